"""Rows grouped by expert, as the grouped GEMM reads them: one frozen record handed from dispatch to experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.kernels.formats.number_formats import TokenFormat


@dataclass(frozen=True)
class GroupedRows:
    """`G` groups of rows in one format; group `g` owns row positions `group_offsets[g] .. group_offsets[g+1]`.

    All tensors are on one device; the VALUES of offsets and indices are read on the device only.

    Attributes:
        format: number format of the rows.
        rows: quants `[*, quant_columns(K)]`, last dimension contiguous, any row stride.
        scales: block scales by ROW POSITION in the consumer's layout: for swizzled formats a contiguous
            `[blocks, ceil(V/4), 32, 4, 4]` tensor in the `dense_128` convention; for `fp8_block` `[R, V]` fp32;
            None for bf16.
        row_scale: fp32 `[R]` by row position, applied to the fp32 accumulator; None where the format has none.
        row_index: int32 `[R]`, the row of `rows` that row position `p` reads; None where that is `p` itself.
        group_offsets: int32 `[G + 1]`, from 0, not decreasing.
        group_scale_offsets: int32 `[G]`: scale block of a row is
            `group_offsets[g] // 128 + group_scale_offsets[g] + local_row // 128`; None for formats not swizzled.
        expert_ids: int32 `[G]`, the expert (index into the weights) of each group; -1 skips the group.
        capacity: `R`, row positions that outputs must have room for (rows past `group_offsets[G]` are not written).
        num_columns: `K`, numbers in a row.
        num_active_experts: groups that count, an int or a one-element int32 tensor; None means all `G`.
        dequantized: the rows dequantized, as the GEMM of prepacked weights multiplies them
            (`kernels.gemm.dequant_tokens`), where the kernel that made them stored them so. Then `rows` is empty;
            `scales` and `group_scale_offsets` are None.
        scales_in_record: the scales lie as the rows do, one byte each: `[*, V]` with any row stride, to which
            `row_index` applies. For prepacked weights multiplied by Hopper's kernels, which gather the rows anyway.
        expected_rows: rows of all groups that come on average, as far as the host knows; None where `capacity` is about
            that. Kernels are chosen by it; results are the same for any number.
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

    @property
    def num_groups(self) -> int:
        return int(self.expert_ids.shape[0])

    @property
    def likely_rows(self) -> int:
        """`expected_rows`, or what stands for it."""
        return self.capacity if self.expected_rows is None else self.expected_rows

    @property
    def max_active_groups(self) -> int:
        """Groups that may be active, as far as the host knows."""
        active = self.num_active_experts
        return max(0, min(active, self.num_groups)) if isinstance(active, int) else self.num_groups

    @property
    def active_on_device(self) -> torch.Tensor | None:
        """`num_active_experts` where only the device knows it."""
        return self.num_active_experts if isinstance(self.num_active_experts, torch.Tensor) else None
