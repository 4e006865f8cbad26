"""The exchange in Triton: `dispatch_send.py`, `dispatch_recv.py` and `combine.py` as one `ExchangeBackend`."""

from __future__ import annotations

from moe_runtime.kernels.exchange.combine import combine_recv, combine_send
from moe_runtime.kernels.exchange.dispatch_recv import allocate_counts, dispatch_recv
from moe_runtime.kernels.exchange.dispatch_send import dispatch_send
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry

__all__ = [
    "allocate_counts",
    "can_keep_scales_in_record",
    "combine_recv",
    "combine_send",
    "dispatch_recv",
    "dispatch_send",
]


def can_keep_scales_in_record(geometry: ExchangeGeometry) -> bool:
    """Never: scales are copied into the layout of the consumer."""
    return False
