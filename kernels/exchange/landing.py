"""The landing region of a rank as tensors: the records of tokens, and the fields of those records."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory


def second_half_row(context: ExchangeMemory, geometry: ExchangeGeometry) -> int:
    """The row of `landing_records` at which the second half begins."""
    return geometry.landing_half(context.half_bytes["landing"]) // geometry.record.record_bytes


def landing_records(context: ExchangeMemory, geometry: ExchangeGeometry) -> torch.Tensor:
    """uint8 `[rows of both halves, record_bytes]`."""
    stride = geometry.record.record_bytes
    num_rows = second_half_row(context, geometry) + geometry.num_slots
    return context.heap.tensor("landing")[: num_rows * stride].view(num_rows, stride)


def landing_rows(context: ExchangeMemory, geometry: ExchangeGeometry) -> torch.Tensor:
    """The landing slots of both halves as rows of quants, one record apart."""
    fmt = geometry.token_format
    return landing_records(context, geometry)[:, : fmt.quant_bytes(geometry.hidden)].view(fmt.quant_dtype)


def landing_scales(context: ExchangeMemory, geometry: ExchangeGeometry) -> torch.Tensor:
    """Their block scales, one record apart."""
    record = geometry.record
    assert record.format.scale_dtype is not None
    first = record.scales_offset
    scales = landing_records(context, geometry)[:, first : first + record.format.scale_bytes(geometry.hidden)]
    return scales.view(record.format.scale_dtype)


@dataclass(frozen=True)
class LandedRows:
    """Rows that stay where they landed.

    Attributes:
        records: uint8 `[rows of both halves, record_bytes]`.
        row_index: int32 `[R]`, row of `records` of each position.
        group_offsets: int32 `[E + 1]`, first position of each expert, and the end of the last.
    """

    records: torch.Tensor
    row_index: torch.Tensor
    group_offsets: torch.Tensor


@dataclass(frozen=True)
class LandedTokens(LandedRows):
    """What `dispatch_recv` leaves of a dispatch with gathered rows.

    Attributes:
        geometry: of the dispatch.
        first_row: rows of `records` before the second half.
        positions: int32 `[S, K]`, position of each (landing slot, k), -1 for none.
        epoch: int32 `[1]`.
    """

    geometry: ExchangeGeometry
    first_row: int
    positions: torch.Tensor
    epoch: torch.Tensor

    @classmethod
    def of(
        cls,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        row_index: torch.Tensor,
        positions: torch.Tensor,
        group_offsets: torch.Tensor,
        epoch: torch.Tensor,
    ) -> LandedTokens:
        """What has landed in `context`, and what `dispatch_recv` has written of it."""
        records, first_row = landing_records(context, geometry), second_half_row(context, geometry)
        return cls(records, row_index, group_offsets, geometry, first_row, positions, epoch)
