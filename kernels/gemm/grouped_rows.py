"""Rows grouped by expert, as the grouped GEMM reads them: one frozen record, passed from dispatch to the experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch

from moe_runtime.kernels.formats.number_formats import TokenFormat
from moe_runtime.kernels.launch_order import IN_ORDER, LaunchOrder

MAX_ROUTED_IDS = 64
"""Ids up to which GEMMs find their groups by counting them (`LaunchOrder.routed_ids`)."""


@dataclass(frozen=True)
class GroupedRows:
    """`G` groups of rows in one format; group `g` owns row positions `group_offsets[g] .. group_offsets[g+1]`.

    All tensors are on one device. The VALUES of offsets and indices are read only on the device.

    Attributes:
        format: number format of the rows.
        rows: quants `[*, quant_columns(K)]`, last dimension contiguous, any row stride.
        scales: block scales by ROW POSITION in the consumer's layout: for swizzled formats a contiguous
            `[blocks, ceil(V/4), 32, 4, 4]` tensor in the `dense_128` convention; for `fp8_block` `[R, V]` fp32;
            None for bf16.
        row_scale: fp32 `[R]` by row position, applied to the fp32 accumulator; None where the format has none.
        row_index: int32 `[R]`, the row of `rows` that row position `p` reads; None if that is `p` itself.
        group_offsets: int32 `[G + 1]`, from 0, not decreasing.
        group_scale_offsets: int32 `[G]`: the scale block of a row is
            `group_offsets[g] // 128 + group_scale_offsets[g] + local_row // 128`; None for formats not swizzled.
        expert_ids: int32 `[G]`, the expert (index into the weights) of each group; -1 skips the group.
        capacity: `R`, the least rows of an output (rows past `group_offsets[G]` are not written).
        num_columns: `K`, values in a row.
        num_active_experts: active groups, an int or a one-element int32 tensor; None means all `G`.
        dequantized: the dequantized rows that the GEMM of prepacked weights reads (`kernels.gemm.dequant_tokens`, or
            for few rows bf16 `[R, K]`), if the kernel that made the rows stored them in this form. Then `rows` is
            empty, and `scales` and `group_scale_offsets` are None.
        scales_in_record: scales lie with their rows in the records: `[*, V]` of one byte each, any row stride, found
            through `row_index`. Only for prepacked weights and Hopper's kernels, which gather the rows anyway.
        expected_rows: the host's estimate of the rows of all groups; None stands for `capacity`. It chooses the kernel;
            results do not depend on it.
        order: what a GEMM of them may read before the kernel that makes them has ended.
    """

    format: TokenFormat
    rows: torch.Tensor
    scales: torch.Tensor | None
    row_scale: torch.Tensor | None
    row_index: torch.Tensor | None
    group_offsets: torch.Tensor
    group_scale_offsets: torch.Tensor | None
    expert_ids: torch.Tensor
    capacity: int
    num_columns: int
    num_active_experts: int | torch.Tensor | None = None
    dequantized: torch.Tensor | None = None
    scales_in_record: bool = False
    expected_rows: int | None = None
    order: LaunchOrder = IN_ORDER

    @classmethod
    def _of(cls, **fields: Any) -> Self:
        """One with these fields, whose names are not checked; others are as by default. Every step makes two of them,
        and `__init__` of a frozen class takes four times as long."""
        rows = object.__new__(cls)
        vars(rows).update(fields)
        return rows

    @cached_property
    def num_groups(self) -> int:
        return int(self.expert_ids.shape[0])

    @property
    def likely_rows(self) -> int:
        """`expected_rows`, or `capacity` if that is None."""
        return self.capacity if self.expected_rows is None else self.expected_rows

    @property
    def max_active_groups(self) -> int:
        """Most groups that may be active by what the host knows."""
        active = self.num_active_experts
        return max(0, min(active, self.num_groups)) if isinstance(active, int) else self.num_groups

    @property
    def active_on_device(self) -> torch.Tensor | None:
        """`num_active_experts` if it is a tensor, else None."""
        return self.num_active_experts if isinstance(self.num_active_experts, torch.Tensor) else None
