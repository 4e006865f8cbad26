"""The exchange in CUDA C++: its plans, and against torch's at the sizes of models: every byte, also of what nobody has
to write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_runtime.kernels.exchange import cuda, plan
from moe_runtime.kernels.exchange.plan import plan_exchange, required_plan
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import COMBINE_FORMATS, FORMATS
from moe_runtime.kernels.runtime import Engine
from moe_runtime.launch.research.aot_cases import SM_SHARED_BYTES_OF
from moe_runtime.launch.research.aot_exchange import sample_geometry
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import rank_input
from tests.support.token_parts import tokens_in_parts
from tests.support.virtual_exchange import HOPPER, Ranks, expert_rows, poisoned_memory

__all__ = ["poisoned_memory"]

WORLD, HIDDEN, EXPERTS, TOP_K = 4, 7168, 64, 8


def test_all_slots_are_one_chunk_where_their_bitmaps_are_small() -> None:
    geometry = sample_geometry("nvfp4")
    assert required_plan(geometry).chunk_slots == geometry.num_slots == 1024
    assert required_plan(replace(geometry, max_tokens=4096)).chunk_slots == plan.CHUNK
    assert required_plan(replace(geometry, max_tokens=3)).chunk_slots == 32, "whole words of 32 slots"


@pytest.mark.parametrize(
    ("max_tokens", "on_all_sms", "on_some"),
    [(1, (8, 132), (8, 132)), (128, (2, 132), (2, 132)), (4096, (1, 2), (1, 1))],
)
def test_few_slots_are_shared_by_warps_of_more_blocks(
    max_tokens: int, on_all_sms: tuple[int, int], on_some: tuple[int, int]
) -> None:
    """Two blocks for each SM group many rows, unless SMs are to be left free."""
    for contiguous in (False, True):
        sized = replace(sample_geometry("nvfp4", contiguous=contiguous), max_tokens=max_tokens)
        assert required_plan(sized).place_split(132, scales=True) == on_all_sms
        limited = required_plan(replace(sized, num_sms=132))
        assert limited.place_split(132, scales=True) == on_some


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [(0, 1), (5, 5), (132, 132), (264, 132), (265, 264), (2640, 264), (2641, 528), (4096, 528)],
)
def test_blocks_that_send_follow_the_tokens(num_tokens: int, blocks: int) -> None:
    sized = replace(sample_geometry("nvfp4"), max_tokens=4096)
    assert required_plan(sized).send_blocks(num_tokens, 132) == blocks
    assert required_plan(replace(sized, num_sms=20)).send_blocks(num_tokens, 132) <= 20


@pytest.mark.parametrize(
    ("fmt", "max_tokens", "expected"),
    [
        ("nvfp4", 1, (1, 1)),
        ("nvfp4", 8, (1, 4)),
        ("bf16", 8, (1, 4)),
        ("nvfp4", 128, (1, 32)),
        ("nvfp4", 4096, (1, 2)),
        ("fp8_block", 8, (8, 32)),
        ("fp8_block", 128, (1, 32)),
    ],
)
def test_few_blocks_wait_for_rows_that_are_not_copied(fmt: str, max_tokens: int, expected: tuple[int, int]) -> None:
    geometry = replace(sample_geometry(fmt), max_tokens=max_tokens)
    assert required_plan(geometry).place_split(132, scales=fmt == "fp8_block") == expected


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("sms", [1, 16, 78, 132])
def test_arrival_is_one_round_of_blocks(sms: int, scales: bool, rng: torch.Generator) -> None:
    for max_tokens in torch.randint(1, 5000, (50,), generator=rng).tolist():
        geometry = replace(sample_geometry("nvfp4"), max_tokens=max_tokens)
        plan = required_plan(geometry)
        shares, split = plan.place_split(sms, scales)
        chunk = plan.chunk_slots
        chunks = -(-geometry.num_slots // chunk)
        assert plan.num_chunks == chunks
        assert 1 <= shares <= geometry.top_k and 1 <= split <= chunk * shares
        blocks = sms if plan.per_token_flags else 2 * sms
        assert split == 1 or chunks * split <= blocks
        assert shares == 1 or chunks * chunk * shares <= blocks * plan.recv_warps


def test_what_a_warp_or_its_shared_memory_cannot_hold_is_left_to_torch() -> None:
    geometry = sample_geometry("nvfp4")
    assert plan_exchange(geometry) is not None
    assert plan_exchange(replace(geometry, world_size=33, rank=0)) is None
    assert plan_exchange(replace(geometry, record=replace(geometry.record, top_k=33))) is None
    assert plan_exchange(replace(geometry, num_experts=65000)) is None
    assert plan_exchange(replace(geometry, record=replace(geometry.record, format=FORMATS["bf16"], hidden=72))) is None


@pytest.mark.parametrize("num_sms", [None, 16])
@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("max_tokens", [8, 128, 4096])
def test_less_shared_memory_changes_rings_and_teams_alone(fmt: str, max_tokens: int, num_sms: int | None) -> None:
    """So ranks of different GPUs follow one protocol. At DeepSeek-V3's size every ring has two places or more."""
    plans = [
        required_plan(sample_geometry(fmt, max_tokens=max_tokens, num_sms=num_sms, sm_shared_bytes=sm))
        for sm in (SM_SHARED_BYTES_OF[90], SM_SHARED_BYTES_OF[120])
    ]
    of_memory = ("teams", "send_shared_bytes", "output_rings", "partial_rings", "combine_shared_bytes")
    few = {name: getattr(plans[1], name) for name in of_memory}
    assert replace(plans[0], **few) == plans[1]
    assert all(ring.places >= 2 for ring in (*plans[1].output_rings, *plans[1].partial_rings))
    assert max(plans[1].send_shared_bytes, *plans[1].combine_shared_bytes) <= 99 * 1024
    assert sample_geometry(fmt, sm_shared_bytes=SM_SHARED_BYTES_OF[120]).block_shared_bytes == 99 * 1024


def test_sizes_that_fit_hopper_alone_are_left_to_torch_on_sm_120() -> None:
    wide = replace(sample_geometry("bf16"), record=RecordLayout(FORMATS["bf16"], 16384, 8))
    assert plan_exchange(wide) is not None
    assert plan_exchange(replace(wide, sm_shared_bytes=SM_SHARED_BYTES_OF[120])) is None


@pytest.mark.parametrize(
    ("engine", "capability", "nvrtc", "expected", "why"),
    [
        ("cuda", (9, 0), True, "cuda", ""),
        ("triton", (9, 0), True, "cuda", ""),
        ("triton", (10, 0), True, "cuda", ""),
        ("triton", (12, 0), True, "cuda", ""),
        ("triton", (12, 0), False, "torch", "cuda-bindings finds no NVRTC"),
        ("triton", (8, 0), True, "torch", "cuda:0 has compute capability 8.0, not 9.0 or more"),
        ("triton", None, True, "torch", "the device is cpu"),
        ("torch", (9, 0), True, "torch", "the engine is torch"),
    ],
)
def test_the_exchange_of_an_engine(
    engine: Engine,
    capability: tuple[int, int] | None,
    nvrtc: bool,
    expected: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu") if capability is None else torch.device("cuda", 0)
    monkeypatch.setattr(plan, "capability", lambda device: capability)
    monkeypatch.setattr(plan, "has_nvrtc", lambda: nvrtc)
    for geometry in (None, sample_geometry("nvfp4")):
        kernels, why_not = plan.exchange_engine(engine, device, geometry)
        assert kernels == expected and why_not.startswith(why) and bool(why_not) == (kernels == "torch")
    if expected == "cuda":
        kernels, why_not = plan.exchange_engine(engine, device, replace(sample_geometry("nvfp4"), num_experts=65000))
        assert kernels == "torch" and why_not.startswith("no kernels take these sizes")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
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
def test_bits_of_torch(fmt: str, wire: str, max_tokens: int, mode: str, device: torch.device, seed: int) -> None:
    assert wire in COMBINE_FORMATS
    settings = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
    both = [
        Ranks(WORLD, device, engine, token_format=fmt, combine_format=wire, mode=mode, **settings)
        for engine in ("torch", HOPPER)
    ]
    assert_same_steps(both, seed)


@pytest.fixture
def in_parts() -> Iterator[None]:
    with tokens_in_parts():
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize(("fmt", "max_tokens"), [("nvfp4", 3), ("fp8_block", 130), ("nvfp4", 1030)])
def test_bits_where_tokens_come_in_parts(fmt: str, max_tokens: int, mode: str, device: torch.device, seed: int) -> None:
    settings = {"hidden_size": 1024, "num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
    both = [Ranks(WORLD, device, engine, token_format=fmt, mode=mode, **settings) for engine in ("torch", HOPPER)]
    assert_same_steps(both, seed)


@pytest.mark.parametrize(
    ("max_tokens", "num_sms", "expected"),
    [
        (8192, None, (7, 1024)),
        (4096, None, (3, 1024)),
        (1025, None, (3, 257)),
        (1023, None, (0, 1023)),
        (4096, 16, (0, 4096)),
    ],
)
def test_parts_of_the_tokens(max_tokens: int, num_sms: int | None, expected: tuple[int, int]) -> None:
    plan = required_plan(sample_geometry("nvfp4", max_tokens=max_tokens, num_sms=num_sms))
    assert (plan.num_parts, plan.part_tokens) == expected


def test_many_packed_rows_are_counted_in_chunks() -> None:
    geometry = sample_geometry("fp8_block", max_tokens=4096, contiguous=True)
    assert required_plan(geometry).chunk_slots == 256
    assert cuda.scratch_words(geometry) == 128 * 32


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
            y = [d.combine_recv(a.handle, shared=s) for d, a, s in zip(ranks.dispatchers, arrived, shared, strict=True)]
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
