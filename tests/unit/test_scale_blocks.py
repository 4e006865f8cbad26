"""Scale-offset conventions and expert ownership against brute force, over random splits of rows into groups."""

from __future__ import annotations

import doctest
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.kernels.formats import scale_blocks

sizes = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 700)), min_size=0, max_size=12)


def offsets_of(counts: list[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def test_worked_examples() -> None:
    results = doctest.testmod(scale_blocks)
    assert results.attempted >= 12
    assert results.failed == 0


@given(st.integers(0, 600), st.integers(1, 70))
def test_every_expert_has_one_rank_and_loads_differ_by_one(num_experts: int, world_size: int) -> None:
    starts = scale_blocks.expert_starts(num_experts, world_size)
    counts = [end - start for start, end in pairwise(starts)]
    assert len(counts) == world_size
    assert starts[0] == 0
    assert starts[-1] == num_experts
    assert counts == [num_experts // world_size + (r < num_experts % world_size) for r in range(world_size)]


@given(sizes)
def test_dense_128_is_dense_and_fits(counts: list[int]) -> None:
    rows = offsets_of(counts)
    needed = scale_blocks.dense_128_blocks_needed(rows[-1], len(counts))
    offsets = scale_blocks.dense_128_offsets(rows)
    next_block = 0
    for g, count in enumerate(counts):
        assert offsets[g] >= 0
        assert (
            scale_blocks.dense_128_block(rows[g], offsets[g], 0) == next_block == scale_blocks.dense_128_starts(rows)[g]
        )
        blocks = {scale_blocks.dense_128_block(rows[g], offsets[g], local) for local in range(count)}
        assert blocks == set(range(next_block, next_block + len(blocks)))
        next_block += len(blocks)
    assert next_block <= needed
    scale_blocks.check_row_offsets(rows, rows[-1])
    scale_blocks.check_dense_128(rows, offsets, next_block)


@given(full_blocks=st.integers(0, 40), num_groups=st.integers(1, 60))
def test_no_smaller_room_is_enough_for_dense_128(full_blocks: int, num_groups: int) -> None:
    counts = [1] * (num_groups - 1) + [128 * full_blocks + 1]
    used = sum(-(-count // 128) for count in counts)
    assert used == scale_blocks.dense_128_blocks_needed(sum(counts), num_groups)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64])
@given(counts=sizes)
def test_tensors_and_lists_agree(dtype: torch.dtype, device: torch.device, counts: list[int]) -> None:
    rows = offsets_of(counts)
    tensor = torch.tensor(rows, dtype=torch.int64).to(dtype).to(device)
    for function in (scale_blocks.dense_128_offsets, scale_blocks.dense_128_starts):
        result = function(tensor)
        assert result.dtype == torch.int32
        assert result.device.type == device.type
        assert result.tolist() == function(rows)


@pytest.mark.parametrize(
    ("start", "needed", "unit"),
    [
        (scale_blocks.closed_form_128_start, scale_blocks.closed_form_128_rows_needed, 128),
        (scale_blocks.closed_form_4_start, scale_blocks.closed_form_4_rows_needed, 4),
    ],
)
@given(counts=sizes)
def test_closed_forms_do_not_overlap_and_fit(start, needed, unit: int, counts: list[int]) -> None:
    rows = offsets_of(counts)
    end = 0
    for g, count in enumerate(counts):
        first = start(rows[g], g)
        assert first % unit == 0
        assert first >= end
        end = first + count
    assert -(-end // unit) * unit <= needed(rows[-1], len(counts))
    groups = torch.arange(len(counts))
    expected = [start(rows[g], g) for g in range(len(counts))]
    assert start(torch.tensor(rows[:-1], dtype=torch.int64), groups).tolist() == expected


@given(counts=sizes, granularity=st.sampled_from([1, 4, 128]))
def test_unpadded_rows_are_distinct_where_the_check_passes(counts: list[int], granularity: int) -> None:
    rows = offsets_of([count * granularity for count in counts[:-1]] + counts[-1:])
    scale_blocks.check_unpadded(rows, granularity)
    needed = scale_blocks.unpadded_rows_needed(rows[-1], granularity)
    seen: set[int] = set()
    for first, end in pairwise(rows):
        mine = {scale_blocks.unpadded_row(first, local, granularity) for local in range(end - first)}
        assert not mine & seen
        seen |= mine
    assert seen == set(range(needed))


@given(counts=sizes, offsets=st.lists(st.integers(-3, 8), min_size=12, max_size=12), num_blocks=st.integers(0, 40))
def test_check_dense_128_against_brute_force(counts: list[int], offsets: list[int], num_blocks: int) -> None:
    rows = offsets_of(counts)
    owner: dict[int, int] = {}
    legal = True
    for g, count in enumerate(counts):
        for local in range(count):
            block = scale_blocks.dense_128_block(rows[g], offsets[g], local)
            legal &= 0 <= block < num_blocks and owner.setdefault(block, g) == g
    if legal:
        scale_blocks.check_dense_128(rows, torch.tensor(offsets), num_blocks)
    else:
        with pytest.raises(ValueError, match="group_scale_offsets"):
            scale_blocks.check_dense_128(rows, torch.tensor(offsets), num_blocks)


def test_the_two_that_look_alike() -> None:
    rows = [0, 100, 300, 400]
    assert scale_blocks.dense_128_starts(rows) == [0, 1, 3]
    assert [scale_blocks.closed_form_128_start(row, g) // 128 for g, row in enumerate(rows[:-1])] == [0, 1, 4]
    scale_blocks.check_dense_128(rows, [0, 1, 2], 6)  # sparser than dense: legal


def test_closed_forms_waste_nothing_on_leading_groups_without_rows() -> None:
    rows = [0, 0, 1, 130]
    assert [scale_blocks.closed_form_128_start(row, g) for g, row in enumerate(rows)] == [0, 0, 128, 384]
    assert [scale_blocks.closed_form_4_start(row, g) for g, row in enumerate(rows)] == [0, 0, 4, 136]


def test_groups_without_rows_share_no_row_of_scales() -> None:
    scale_blocks.check_unpadded([0, 128, 130, 130, 130], 128)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: scale_blocks.expert_starts(-1, 2), "num_experts"),
        (lambda: scale_blocks.expert_starts(4, 0), "world_size"),
        (lambda: scale_blocks.dense_128_offsets([]), "row_offsets"),
        (lambda: scale_blocks.dense_128_offsets(torch.zeros(0, dtype=torch.int32)), "row_offsets"),
        (lambda: scale_blocks.dense_128_offsets(torch.zeros(2, 2, dtype=torch.int32)), "row_offsets"),
        (lambda: scale_blocks.dense_128_offsets(torch.zeros(3)), "row_offsets"),
        (lambda: scale_blocks.check_row_offsets([1, 2], 5), "row_offsets"),
        (lambda: scale_blocks.check_row_offsets([0, 3, 2], 5, "m_indptr"), "m_indptr"),
        (lambda: scale_blocks.check_row_offsets([0, 3, 6], 5), "row_offsets"),
        (lambda: scale_blocks.check_row_offsets([], 5), "row_offsets"),
        (lambda: scale_blocks.check_dense_128([0, 1, 2], [0], 5), "group_scale_offsets"),
        (lambda: scale_blocks.check_unpadded([0, 100, 300], 128), "m_indptr"),
        (lambda: scale_blocks.check_unpadded([0, 130, 130, 200], 128), "group 2"),
        (lambda: scale_blocks.check_unpadded([0, 4], 0), "granularity_m"),
    ],
)
def test_bad_input(call, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call()
