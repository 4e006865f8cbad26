"""The exchange in CUDA C++ against Triton's, at the sizes of models: every byte, also of what nobody has to write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_runtime.formats import COMBINE_FORMATS, FORMATS
from moe_runtime.geometry import sample_geometry
from moe_runtime.kernels import hopper_exchange, hopper_shapes
from tests.comparison import assert_same_bits
from tests.exchange_data import rank_input
from tests.token_parts import tokens_in_parts
from tests.virtual_exchange import Ranks, expert_rows, poisoned_memory

__all__ = ["poisoned_memory"]

WORLD, HIDDEN, EXPERTS, TOP_K = 4, 7168, 64, 8


def test_all_slots_are_one_chunk_where_their_bitmaps_are_small() -> None:
    geometry = sample_geometry("nvfp4")
    assert hopper_shapes.chunk_slots(geometry) == geometry.num_slots == 1024
    assert hopper_shapes.chunk_slots(replace(geometry, max_tokens=4096)) == hopper_shapes.CHUNK
    assert hopper_shapes.chunk_slots(replace(geometry, max_tokens=3)) == 32, "whole words of 32 slots"


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, (8, 132)), (128, (2, 132)), (4096, (1, 1))])
def test_few_slots_are_shared_by_warps_of_more_blocks(max_tokens: int, expected: tuple[int, int]) -> None:
    for geometry in (sample_geometry("nvfp4"), sample_geometry("nvfp4", packed=True)):
        sized = replace(geometry, max_tokens=max_tokens)
        assert hopper_shapes.arrive_shares(sized, 132, scales=True) == expected


@pytest.mark.parametrize(
    ("fmt", "max_tokens", "expected"),
    [
        ("nvfp4", 1, (1, 1)),
        ("nvfp4", 8, (1, 4)),
        ("bf16", 8, (1, 4)),
        ("nvfp4", 128, (1, 32)),
        ("nvfp4", 4096, (1, 1)),
        ("fp8_block", 8, (8, 32)),
        ("fp8_block", 128, (1, 32)),
    ],
)
def test_few_blocks_wait_for_rows_that_are_not_copied(fmt: str, max_tokens: int, expected: tuple[int, int]) -> None:
    geometry = replace(sample_geometry(fmt), max_tokens=max_tokens)
    assert hopper_shapes.arrive_shares(geometry, 132, scales=fmt == "fp8_block") == expected


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("sms", [1, 16, 78, 132])
def test_arrival_is_one_round_of_blocks(sms: int, scales: bool, rng: torch.Generator) -> None:
    for max_tokens in torch.randint(1, 5000, (50,), generator=rng).tolist():
        geometry = replace(sample_geometry("nvfp4"), max_tokens=max_tokens)
        shares, split = hopper_shapes.arrive_shares(geometry, sms, scales)
        chunk = hopper_shapes.chunk_slots(geometry)
        chunks = -(-geometry.num_slots // chunk)
        assert 1 <= shares <= geometry.top_k and 1 <= split <= chunk * shares
        assert split == 1 or chunks * split <= sms
        assert shares == 1 or chunks * chunk * shares <= sms * hopper_shapes.ARRIVE_WARPS


def test_what_a_warp_or_its_shared_memory_cannot_hold_is_left_to_triton() -> None:
    geometry = sample_geometry("nvfp4")
    assert hopper_shapes.fits(geometry)
    assert not hopper_shapes.fits(replace(geometry, world_size=33, rank=0))
    assert not hopper_shapes.fits(replace(geometry, record=replace(geometry.record, top_k=33)))
    assert not hopper_shapes.fits(replace(geometry, num_experts=65000))
    assert not hopper_shapes.fits(replace(geometry, record=replace(geometry.record, format=FORMATS["bf16"], hidden=72)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["indexed", "packed"])
@pytest.mark.parametrize(
    ("fmt", "wire", "max_tokens"),
    [
        ("nvfp4", "bf16", 8),
        ("nvfp4", "bf16", 128),
        ("nvfp4", "mxfp8", 700),
        ("mxfp8", "fp8_block", 700),
        ("fp8_block", "bf16", 128),
        ("fp8_block", "fp8_block", 700),
        ("bf16", "mxfp8", 128),
        ("bf16", "bf16", 700),
    ],
)
def test_bits_of_triton(fmt: str, wire: str, max_tokens: int, mode: str, device: torch.device, seed: int) -> None:
    assert wire in COMBINE_FORMATS
    settings = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
    both = [
        Ranks(WORLD, device, engine, token_format=fmt, combine_format=wire, mode=mode, **settings)
        for engine in ("triton", "auto")
    ]
    assert_same_steps(both, seed)


@pytest.fixture
def in_parts() -> Iterator[None]:
    with tokens_in_parts():
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("mode", ["indexed", "packed"])
@pytest.mark.parametrize(("fmt", "max_tokens"), [("nvfp4", 3), ("fp8_block", 130), ("nvfp4", 1030)])
def test_bits_where_tokens_come_in_parts(fmt: str, max_tokens: int, mode: str, device: torch.device, seed: int) -> None:
    settings = {"hidden_size": 1024, "num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
    both = [Ranks(WORLD, device, engine, token_format=fmt, mode=mode, **settings) for engine in ("triton", "auto")]
    assert_same_steps(both, seed)


def test_parts_of_the_tokens() -> None:
    geometry = sample_geometry("nvfp4")
    assert hopper_shapes.parts_of_tokens(replace(geometry, max_tokens=4096)) == (3, 1024)
    assert hopper_shapes.parts_of_tokens(replace(geometry, max_tokens=1025)) == (3, 257)
    assert hopper_shapes.parts_of_tokens(replace(geometry, max_tokens=1023)) == (0, 1023)
    assert hopper_shapes.parts_of_tokens(replace(geometry, max_tokens=4096, num_sms=16)) == (0, 4096)


def test_many_packed_rows_are_counted_in_chunks() -> None:
    geometry = sample_geometry("fp8_block", max_tokens=4096, packed=True)
    assert hopper_shapes.chunk_slots(geometry) == 256
    counts = hopper_exchange.room_to_count(geometry, torch.device("cpu"))
    assert counts is not None and counts.shape == (128, 32)


def assert_same_steps(
    both: list[Ranks], seed: int, routings: tuple[str, ...] = ("random", "one", "random", "none")
) -> None:
    """Steps of uneven counts and all kinds of routing, on two groups of the same layer: the same bits in all."""
    geometry, device = both[0].dispatchers[0].geometry, both[0].contexts[0].device
    world, max_tokens, hidden = geometry.world_size, geometry.max_tokens, geometry.hidden
    for step, routing in enumerate(routings):
        counts = [(max_tokens, 0, max_tokens // 2 + 1, 1)[(rank + step) % 4] for rank in range(world)]
        inputs = [
            rank_input(seed + step, rank, count, hidden, geometry.num_experts, geometry.top_k, routing).to(device)
            for rank, count in enumerate(counts)
        ]
        inputs[step % world].x[:1, 5] = torch.nan
        inputs[step % world].x[1:2] = 0
        shared = [data.x if step % 2 else None for data in inputs]
        ys = []
        for ranks in both:
            arrived = ranks.dispatch(inputs)
            outputs = [
                expert_rows(a, hidden, seed + rank, torch.float32 if step == 2 else torch.bfloat16)
                for rank, a in enumerate(arrived)
            ]
            for dispatcher, a, output in zip(ranks.dispatchers, arrived, outputs, strict=True):
                dispatcher.combine_send(output, a.handle)
            y = [d.combine_wait(a.handle, shared=s) for d, a, s in zip(ranks.dispatchers, arrived, shared, strict=True)]
            ys.append((arrived, y))
        (arrived_a, y_a), (arrived_b, y_b) = ys
        for rank, (a, b) in enumerate(zip(arrived_a, arrived_b, strict=True)):
            what = f"of rank {rank} in step {step}"
            for name in ("group_offsets", "group_scale_offsets", "row_index", "scales", "row_scale"):
                if getattr(a, name) is not None:
                    assert_same_bits(getattr(b, name), getattr(a, name), f"{name} {what}")
            assert_same_bits(b.handle.positions, a.handle.positions, f"positions {what}")
            assert_same_bits(b.handle.num_parts, a.handle.num_parts, f"num_parts {what}")
            found = [x.rows if x.row_index is None else x.rows[x.row_index[: int(x.group_offsets[-1])]] for x in (a, b)]
            assert_same_bits(found[1], found[0], f"rows {what}")
            assert_same_bits(y_b[rank], y_a[rank], f"y {what}")
    for ranks in both:
        for context in ranks.contexts:
            context.check_peers()
