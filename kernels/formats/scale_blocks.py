"""Which rank owns which expert, and where the block scales of each group lie, as pure integer functions.

Rows are never padded; scales are. Group `i` has `m_i` rows. `row_offsets` (also called `m_indptr`) are the `G + 1`
prefix sums of `m_i` from 0. `R` is the number of all rows. Four conventions place the scales. Callers name one; none is
inferred. For rows `[0, 100, 300, 400]`, `dense_128` starts the groups at 128-row blocks 0, 1, 3 and `closed_form_128`
at 0, 1, 4.

`row_offsets` may be a sequence of integers (the result is a list) or a one-dimensional int32, uint32 or int64 tensor on
any device (the result is an int32 tensor there, without a host sync). Functions of single numbers are arithmetic only,
so they also work elementwise on tensors. The `check_*` functions read values on the host and therefore sync.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar, overload

import torch

from moe_runtime.kernels.formats.number_formats import ceil_div

Number = TypeVar("Number", int, torch.Tensor)

SCALE_BLOCK_ROWS = 128
"""Rows of one block of swizzled scales."""


def expert_starts(num_experts: int, world_size: int) -> tuple[int, ...]:
    """First expert of each rank, then `num_experts`: `world_size + 1` integers.

    The experts of a rank are contiguous; rank `r` owns `num_experts // world_size + (r < num_experts % world_size)`.

    >>> expert_starts(8, 4)
    (0, 2, 4, 6, 8)
    >>> expert_starts(7, 3)
    (0, 3, 5, 7)
    >>> expert_starts(2, 3)
    (0, 1, 2, 2)
    """
    if num_experts < 0:
        raise ValueError(f"num_experts: expected at least 0, got {num_experts}")
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")
    per_rank, extra = divmod(num_experts, world_size)
    return tuple(r * per_rank + min(r, extra) for r in range(world_size + 1))


@overload
def dense_128_starts(row_offsets: Sequence[int]) -> list[int]: ...
@overload
def dense_128_starts(row_offsets: torch.Tensor) -> torch.Tensor: ...
def dense_128_starts(row_offsets: Sequence[int] | torch.Tensor) -> list[int] | torch.Tensor:
    """`dense_128`: first scale block of each group, `sum_{j<i} ceil(m_j / 128)`; `G` integers.

    >>> dense_128_starts([0, 100, 300, 400])
    [0, 1, 3]
    """
    if isinstance(row_offsets, torch.Tensor):
        blocks = (_signed(row_offsets).diff() + (SCALE_BLOCK_ROWS - 1)) // SCALE_BLOCK_ROWS
        return (blocks.cumsum(0) - blocks).to(torch.int32)
    _check_length(len(row_offsets))
    starts = [0]
    for start, end in itertools.pairwise(row_offsets):
        starts.append(starts[-1] + ceil_div(end - start, SCALE_BLOCK_ROWS))
    return starts[:-1]


@overload
def dense_128_offsets(row_offsets: Sequence[int]) -> list[int]: ...
@overload
def dense_128_offsets(row_offsets: torch.Tensor) -> torch.Tensor: ...
def dense_128_offsets(row_offsets: Sequence[int] | torch.Tensor) -> list[int] | torch.Tensor:
    """`dense_128`: `off[i]` such that group `i` starts at scale block `row_offsets[i] // 128 + off[i]`; `G` integers.

    Groups 0, 1, 2 of the example have 100, 200, 100 rows in 1, 2, 1 blocks; they start at blocks
    `0 + 0`, `100 // 128 + 1 = 1` and `300 // 128 + 1 = 3`. Offsets are never negative.

    >>> dense_128_offsets([0, 100, 300, 400])
    [0, 1, 1]
    >>> dense_128_offsets(torch.tensor([0, 100, 300, 400], dtype=torch.int32))
    tensor([0, 1, 1], dtype=torch.int32)
    """
    if isinstance(row_offsets, torch.Tensor):
        return (dense_128_starts(row_offsets) - _signed(row_offsets)[:-1] // SCALE_BLOCK_ROWS).to(torch.int32)
    starts = dense_128_starts(row_offsets)
    return [start - row // SCALE_BLOCK_ROWS for start, row in zip(starts, row_offsets, strict=False)]


def dense_128_blocks_needed(num_rows: int, num_groups: int) -> int:
    """`dense_128`: scale blocks that suffice for any split of `num_rows` rows into `num_groups` groups.

    >>> dense_128_blocks_needed(400, 3)
    6
    """
    return num_rows // SCALE_BLOCK_ROWS + num_groups


def dense_128_block(row_offset: Number, scale_offset: Number, local_row: Number) -> Number:
    """`dense_128`: the scale block of row `local_row` of a group. In the block it is row `local_row % 128`.

    >>> dense_128_block(300, 1, 99)
    3
    """
    return row_offset // SCALE_BLOCK_ROWS + scale_offset + local_row // SCALE_BLOCK_ROWS


def closed_form_128_start(row_offset: Number, group: Number) -> Number:
    """`closed_form_128`: first scale ROW of a group, a multiple of 128. Row `l` of the group is `l` rows after it.

    >>> [closed_form_128_start(row, i) for i, row in enumerate([0, 100, 300])]
    [0, 128, 512]
    """
    return (row_offset + 127 * group) // 128 * 128


def closed_form_128_rows_needed(num_rows: int, num_groups: int) -> int:
    """`closed_form_128`: scale rows of the whole container, where one more group would start.

    >>> closed_form_128_rows_needed(400, 3)
    768
    """
    return closed_form_128_start(num_rows, num_groups)


def closed_form_128_end(row_offset: Number, next_offset: Number, group: Number) -> Number:
    """`closed_form_128`: the scale row behind the last block of a group of rows `row_offset .. next_offset`.

    >>> [closed_form_128_end(row, end, i) for i, (row, end) in enumerate([(0, 100), (100, 300), (300, 300)])]
    [128, 384, 512]
    """
    return closed_form_128_start(row_offset, group) + (next_offset - row_offset + 127) // 128 * 128


def closed_form_128_rows_used(row_offsets: Sequence[int]) -> int:
    """`closed_form_128`: scale rows up to the last block of the last group that has rows; 0 if none has.

    >>> closed_form_128_rows_used([0, 128, 256]), closed_form_128_rows_needed(256, 2)
    (256, 384)
    """
    groups = list(enumerate(itertools.pairwise(row_offsets)))
    return max([closed_form_128_end(row, end, group) for group, (row, end) in groups if end > row], default=0)


def closed_form_4_start(row_offset: Number, group: Number) -> Number:
    """`closed_form_4`: first scale ROW of a group, a multiple of 4. Row `l` of the group is `l` rows after it.

    >>> [closed_form_4_start(row, i) for i, row in enumerate([0, 1, 3])]
    [0, 4, 8]
    """
    return (row_offset + 3 * group) // 4 * 4


def closed_form_4_rows_needed(num_rows: int, num_groups: int) -> int:
    """`closed_form_4`: scale rows of the whole container (`m_padded`).

    >>> closed_form_4_rows_needed(4, 3)
    12
    """
    return closed_form_4_start(num_rows, num_groups)


def unpadded_row(row_offset: Number, local_row: Number, granularity_m: int) -> Number:
    """`unpadded`: the scale row of row `local_row` of a group, with one scale row per `granularity_m` rows.

    >>> unpadded_row(256, 130, 128), unpadded_row(300, 5, 1)
    (3, 305)
    """
    return row_offset // granularity_m + local_row // granularity_m


def unpadded_rows_needed(num_rows: int, granularity_m: int) -> int:
    """`unpadded`: scale rows of the whole container.

    >>> unpadded_rows_needed(300, 128), unpadded_rows_needed(300, 1)
    (3, 300)
    """
    return ceil_div(num_rows, granularity_m)


def swizzled_offset(row: Number, column: Number, num_columns: int) -> Number:
    """Position of the scale of `(row, column)` in the 128x4 swizzle, counted in scales from the start of the container.

    >>> [swizzled_offset(r, v, 4) for r, v in [(0, 1), (1, 0), (32, 0), (128, 0)]]
    [1, 16, 4, 512]
    """
    atoms = (num_columns + 3) // 4
    return (row // 128 * atoms + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def check_row_offsets(row_offsets: Sequence[int] | torch.Tensor, num_rows: int, argument: str = "row_offsets") -> None:
    """Raise `ValueError` unless the offsets start at 0, do not decrease and end within `num_rows` rows."""
    values = _host(row_offsets)
    _check_length(len(values), argument)
    if values[0] != 0:
        raise ValueError(f"{argument}: expected the first offset to be 0, got {values[0]}")
    for i, (start, end) in enumerate(itertools.pairwise(values)):
        if end < start:
            raise ValueError(f"{argument}: expected no decrease, got {start} then {end} at index {i + 1}")
    if values[-1] > num_rows:
        raise ValueError(f"{argument}: expected at most {num_rows} rows, got {values[-1]} at the end")


def check_dense_128(
    row_offsets: Sequence[int] | torch.Tensor,
    scale_offsets: Sequence[int] | torch.Tensor,
    num_blocks: int,
    argument: str = "group_scale_offsets",
) -> None:
    """Raise `ValueError` if the scale blocks of groups overlap or leave `[0, num_blocks)`. Gaps are allowed.

    `row_offsets` has `G + 1` entries, `scale_offsets` at least `G`. Groups without rows have no blocks.
    """
    rows, offsets = _host(row_offsets), _host(scale_offsets)
    num_groups = len(rows) - 1
    if len(offsets) < num_groups:
        raise ValueError(f"{argument}: expected at least {num_groups} offsets, got {len(offsets)}")
    taken: list[tuple[int, int, int]] = []
    for g in range(num_groups):
        if rows[g + 1] > rows[g]:
            start = dense_128_block(rows[g], offsets[g], 0)
            taken.append((start, start + ceil_div(rows[g + 1] - rows[g], SCALE_BLOCK_ROWS), g))
    taken.sort()
    for start, end, g in taken:
        if start < 0 or end > num_blocks:
            raise ValueError(
                f"{argument}: expected scale blocks within 0..{num_blocks}, got {start}..{end} for group {g}"
            )
    for (_, end, g), (start, _, other) in itertools.pairwise(taken):
        if start < end:
            raise ValueError(f"{argument}: expected no overlap, got block {start} for group {other} and for group {g}")


def check_unpadded(row_offsets: Sequence[int] | torch.Tensor, granularity_m: int, argument: str = "m_indptr") -> None:
    """Raise `ValueError` if an `unpadded` group does not start at a multiple of `granularity_m`.

    Two groups would then share a scale row. The end of the last group and groups without rows may lie anywhere.
    """
    if granularity_m < 1:
        raise ValueError(f"granularity_m: expected at least 1, got {granularity_m}")
    for g, (row, end) in enumerate(itertools.pairwise(_host(row_offsets))):
        if row % granularity_m and end > row:
            raise ValueError(
                f"{argument}: expected groups to start at multiples of {granularity_m}, got {row} for group {g}"
            )


def _signed(offsets: torch.Tensor) -> torch.Tensor:
    """The offsets in a dtype that torch computes with: uint32 becomes int32, into which offsets fit."""
    if offsets.ndim != 1 or offsets.dtype not in (torch.int32, torch.uint32, torch.int64):
        raise ValueError(
            f"row_offsets: expected one dimension of int32, uint32 or int64, "
            f"got {offsets.dtype} of shape {tuple(offsets.shape)}"
        )
    _check_length(offsets.shape[0])
    return offsets.view(torch.int32) if offsets.dtype == torch.uint32 else offsets


def _host(offsets: Sequence[int] | torch.Tensor) -> list[int]:
    if not isinstance(offsets, torch.Tensor):
        return list(offsets)
    return [int(value) for value in offsets.tolist()]


def _check_length(length: int, argument: str = "row_offsets") -> None:
    if length < 1:
        raise ValueError(f"{argument}: expected groups + 1 offsets, got none")
