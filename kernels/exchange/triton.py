"""The exchange in Triton: `dispatch_send.py`, `dispatch_recv.py` and `combine.py` as one `ExchangeBackend`."""

from __future__ import annotations

import torch

from moe_runtime.kernels.exchange.combine import combine_recv, combine_send
from moe_runtime.kernels.exchange.dispatch_recv import allocate_counts, dispatch_recv
from moe_runtime.kernels.exchange.dispatch_send import dispatch_send
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory, RecvBuffers
from moe_runtime.kernels.exchange.landing import LandedTokens
from moe_runtime.kernels.exchange.padded import place_padded_rows
from moe_runtime.kernels.exchange.padded_rows import PaddedRows

__all__ = [
    "allocate_counts",
    "can_await_tokens",
    "can_keep_scales_in_record",
    "combine_recv",
    "combine_send",
    "dispatch_recv",
    "dispatch_recv_padded",
    "dispatch_send",
    "of_one_rank",
]


def can_keep_scales_in_record(geometry: ExchangeGeometry) -> bool:
    """Never: scales are copied into the layout of the consumer."""
    return False


def can_await_tokens(context: ExchangeMemory) -> bool:
    """Never: `dispatch_recv` does."""
    return False


def of_one_rank(geometry: ExchangeGeometry) -> None:
    """None: a step of a rank alone is as any other."""


def dispatch_recv_padded(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
    out: PaddedRows,
    scales_at: int,
    statistics: torch.Tensor | None,
) -> None:
    """See `interface.ExchangeBackend`."""
    dispatch_recv(context, geometry, count_tag, handle_epoch, timeout_ns, buffers)
    found = buffers.row_index, buffers.positions, buffers.group_offsets, handle_epoch
    place_padded_rows(LandedTokens.of(context, geometry, *found), scales_at, out, statistics)
