"""Expanded FP4 weights in Hopper's GEMM, emulated on the CPU: the bits of the FP8 GEMM with the same e4m3 weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.formats.number_formats import MXFP4, NVFP4, TokenFormat
from moe_runtime.kernels.gemm import tma_gemm as tma
from moe_runtime.kernels.gemm.expanded_gemm import expanded_gemm, expanded_gemm_swiglu, plan_expanded
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import MAX_TMA_GROUPS
from moe_runtime.kernels.gemm.shapes import TMA_DECODE, TMA_DOZEN, TMA_FEW, TMA_PREFILL, TMA_SHAPES, TMA_SOME, TmaShape
from moe_runtime.kernels.gemm.weights import GPT_OSS, SQUARED_RELU, Activation, ExpertWeights, GateUpOrder, SwiGLU
from moe_runtime.kernels.runtime import BLOCK_RESERVED_BYTES, SM_SHARED_BYTES
from tests.emulator import Emulator, needs_emulator
from tests.emulator.tensor_maps import encode_tiled
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import UNIT, check_inside, exact_gemm, make_rows
from tests.support.gemm_checks import poisoned
from tests.support.gemm_plans import choose, tma_grouped_gemm, tma_grouped_gemm_swiglu

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
NAMES = ["nvfp4", "mxfp4"]
MOST_SCHEDULES = 30
"""In which a mistake has to show; most do at once."""

names = pytest.mark.parametrize("name", NAMES)
gathers = pytest.mark.parametrize("gather", [False, True], ids=["packed", "gathered"])
regimes = pytest.mark.parametrize("shape", TMA_SHAPES, ids=[shape.regime.name.lower() for shape in TMA_SHAPES])


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Callable[..., Emulator]]:
    """Makes an emulator that stands for the launches of CUDA kernels and for tensor maps, on a GPU of 2 SMs."""

    def emulate(**more: Any) -> Emulator:
        emulator = Emulator(seed, **more)
        emulator.stand_in(monkeypatch)
        return emulator

    monkeypatch.setattr(nvrtc, "most_sms", lambda device, limit=None: limit or 2)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
    tma._tensor_map.cache_clear()
    yield emulate
    tma._tensor_map.cache_clear()


@pytest.fixture
def emulator(emulate: Callable[..., Emulator]) -> Emulator:
    """One that runs the kernels as they are."""
    return emulate()


def ragged(k: int, rng: torch.Generator, gather: bool, spare: int = 9) -> GroupedRows:
    """Empty groups, skipped and inactive ones, odd and even numbers of tiles, tails on both sides of 64 rows."""
    sizes, ids = [3, 0, 70, 5, 1, 2, 300, 4, 193, 128], [2, 0, 0, -1, 1, 3, 2, 1, 0, 1]
    a = make_rows("fp8_block", sizes, k, rng, CPU, num_experts=3, expert_ids=ids, gather=gather, spare=spare)
    return replace(a, num_active_experts=torch.tensor([9], dtype=torch.int32))


def few(k: int, rng: torch.Generator, gather: bool) -> GroupedRows:
    sizes, ids = [3, 0, 37, 1, 17, 5], [2, 0, 1, -1, 1, 0]
    return make_rows("fp8_block", sizes, k, rng, CPU, num_experts=3, expert_ids=ids, gather=gather, spare=2)


def rows_for(shape: TmaShape, k: int, rng: torch.Generator, gather: bool) -> GroupedRows:
    return few(k, rng, gather) if shape.few else ragged(k, rng, gather)


def weights(
    name: str, n: int, k: int, rng: torch.Generator, order: GateUpOrder | None = None, *, biased: bool = False
) -> ExpandedWeights:
    """Of three experts, with gate and up of different sizes."""
    w = torch.randn(3, n, k, generator=rng) * torch.tensor([0.2, 1.0, 30.0])[:, None, None]
    if order is not None:
        w[:, order.up_rows(n)] *= 3
    bias = torch.randn(3, n, generator=rng) if biased else None
    raw = ExpertWeights.quantize(w, name, gate_up=order or False, bias=bias, engine="torch")
    return ExpandedWeights.prepack(raw, engine="torch")


def in_shape(monkeypatch: pytest.MonkeyPatch, shape: TmaShape) -> None:
    choose(monkeypatch, choose_tma_shape=lambda *_, **__: shape)


def compare_plain(
    a: GroupedRows,
    w: ExpandedWeights,
    shape: TmaShape,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_sms: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same bits as the FP8 GEMM's, in all of the result."""
    in_shape(monkeypatch, shape)
    got, want = (poisoned(a.capacity + 2, w.num_rows, dtype, CPU) for _ in range(2))
    tma_grouped_gemm(a, w.expand(), out=want, shape=shape, num_sms=num_sms)
    expanded_gemm(a, w, out=got, num_sms=num_sms)
    assert_same_bits(got, want, shape.regime.name)
    return got


def compare_swiglu(
    a: GroupedRows,
    w: ExpandedWeights,
    activation: Activation,
    out_format: str,
    shape: TmaShape,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits as the FP8 GEMM's with gate above up."""
    in_shape(monkeypatch, shape)
    above = replace(activation, order=GateUpOrder.GATE_UP) if activation.gated else activation
    want = tma_grouped_gemm_swiglu(a, w.expand(), above, out_format=out_format, shape=shape)
    got = expanded_gemm_swiglu(a, w, activation, out_format=out_format)
    offsets, ids = a.group_offsets.tolist(), a.expert_ids.tolist()
    active = a.num_groups if a.num_active_experts is None else int(a.num_active_experts)
    for g in range(active):
        if 0 <= ids[g] < w.num_experts:
            span = slice(offsets[g], offsets[g + 1])
            assert_same_bits(got.rows[span], want.rows[span], f"{shape.regime.name} group {g}")
            if got.scales is not None:
                assert want.scales is not None
                assert_same_bits(got.scales[span], want.scales[span], f"{shape.regime.name} scales of group {g}")


def check_runs(emulator: Emulator, least: int) -> None:
    """Raise unless the kernel ran as often: none of these tests may pass by another way."""
    assert emulator.launched == {(tma.SOURCE, "tma_gemm")} and emulator.runs >= least


@pytest.mark.parametrize(
    ("name", "k", "gather", "shape"),
    [
        *((name, 640, gather, shape) for name, gather, shape in product(NAMES, [False, True], TMA_SHAPES)),
        ("nvfp4", 512, False, TMA_PREFILL),  # with scales that come by TMA
        ("mxfp4", 512, True, TMA_PREFILL),
        ("nvfp4", 400, False, TMA_PREFILL),
        ("nvfp4", 16, False, TMA_DECODE),
        ("mxfp4", 32, True, TMA_FEW),
        ("nvfp4", 272, True, TMA_SOME),
    ],
)
def test_ragged_groups(
    name: str,
    k: int,
    gather: bool,
    shape: TmaShape,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """N ends within a unit and within a tile; on few SMs and on more, where tiles are taken by halves."""
    w = weights(name, 392, k, rng)
    a = rows_for(shape, k, rng, gather)
    for num_sms in (2,) if shape.few else (2, 4):
        got = compare_plain(a, w, shape, monkeypatch, num_sms=num_sms)
    check_inside(got[: a.capacity], exact_gemm(a, w.expand(), CPU), UNIT[torch.float32])
    check_runs(emulator, 2)


@names
@regimes
def test_tiles_that_end_with_any_stage(
    name: str, shape: TmaShape, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for blocks in range(1, 8):
        w = weights(name, 520, 128 * blocks, rng)
        a = make_rows("fp8_block", [130, 5], 128 * blocks, rng, CPU, num_experts=3, gather=blocks % 2 == 0)
        compare_plain(a, w, shape, monkeypatch, dtype=torch.bfloat16)
    check_runs(emulator, 14)


ACTIVATED = [
    (SwiGLU(), "fp8_block", TMA_PREFILL),
    (SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5), "fp8_block", TMA_PREFILL),
    (SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), "bf16", TMA_PREFILL),
    (SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), "fp8_block", TMA_DECODE),
    (GPT_OSS, "bf16", TMA_DECODE),
    (SQUARED_RELU, "fp8_block", TMA_PREFILL),
    (SQUARED_RELU, "bf16", TMA_DECODE),
    (SwiGLU(), "fp8_block", TMA_FEW),
    (GPT_OSS, "fp8_block", TMA_FEW),
    (SQUARED_RELU, "fp8_block", TMA_FEW),
    (SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), "bf16", TMA_SOME),
    (GPT_OSS, "fp8_block", TMA_DOZEN),
]


@names
@gathers
@pytest.mark.parametrize(
    ("activation", "to", "shape"), ACTIVATED, ids=[f"{shape.regime.name}-{to}" for _, to, shape in ACTIVATED]
)
def test_activated(
    name: str,
    gather: bool,
    activation: Activation,
    to: str,
    shape: TmaShape,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In whole blocks of 128 columns, and in short ones of gate, up and the result."""
    for k, inner in ((256, 384), (288, 320)):
        w = weights(name, activation.num_parts * inner, k, rng, activation.gate_up, biased=gather)
        compare_swiglu(rows_for(shape, k, rng, gather), w, activation, to, shape, monkeypatch)
    check_runs(emulator, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@names
def test_epilogue(
    name: str, dtype: torch.dtype, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = weights(name, 264, 256, rng, biased=True)
    a = few(256, rng, False)
    a = replace(a, row_scale=torch.rand(a.capacity, generator=rng) + 0.5)
    for shape in (TMA_FEW, TMA_DECODE):
        compare_plain(a, w, shape, monkeypatch, dtype=dtype)
    check_runs(emulator, 4)


def test_all_shapes_give_the_same_bits(
    emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row in any company."""
    w = weights("nvfp4", 520, 1024, rng)
    x = torch.randn(331, 1024, generator=rng)
    many = make_rows("fp8_block", [5, 326], 1024, rng, CPU, num_experts=3, x=x)
    one = make_rows("fp8_block", [0, 1], 1024, rng, CPU, num_experts=3, x=x[300:301])
    want = compare_plain(many, w, TMA_PREFILL, monkeypatch)[:331]
    for shape in TMA_SHAPES:
        in_shape(monkeypatch, shape)
        assert_same_bits(expanded_gemm(one, w, out_dtype=torch.float32)[0], want[300], "alone")
        if not shape.few:
            assert_same_bits(expanded_gemm(many, w, out_dtype=torch.float32), want, shape.regime.name)


@names
@pytest.mark.parametrize("shape", [TMA_FEW, TMA_DECODE], ids=["few", "decode"])
def test_both_products_of_a_layer(
    name: str, shape: TmaShape, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second may start, and load its weights, while the first runs."""
    in_shape(monkeypatch, shape)
    gate_up = weights(name, 512, 256, rng, GateUpOrder.GATE_UP)
    down = weights(name, 136, 256, rng)
    a = make_rows("fp8_block", [3, 0, 70, 5], 256, rng, CPU, num_experts=3)

    def run(w1: Any, w2: Any, first: Any, second: Any, **how: Any) -> torch.Tensor:
        hidden = first(a, w1, SwiGLU(), out_format="fp8_block", **how)
        assert hidden.order.only_rows_pending
        result: torch.Tensor = second(hidden, w2, **how)
        return result

    want = run(gate_up.expand(), down.expand(), tma_grouped_gemm_swiglu, tma_grouped_gemm, shape=shape)
    for _ in range(3):
        with emulator.together():
            got = run(gate_up, down, expanded_gemm_swiglu, expanded_gemm)
        assert_same_bits(got, want, name)


@names
def test_nothing_to_do(name: str, emulator: Emulator, rng: torch.Generator) -> None:
    w = weights(name, 264, 128, rng)
    a = make_rows("fp8_block", [3, 190, 5], 128, rng, CPU, num_experts=3)
    for none in (replace(a, capacity=0), replace(a, num_active_experts=0)):
        out = poisoned(198, 264, torch.bfloat16, CPU)
        before = out.clone()
        assert_same_bits(expanded_gemm(none, w, out=out), before)


def test_what_is_refused(emulator: Emulator, rng: torch.Generator) -> None:
    gated = weights("nvfp4", 256, 128, rng, GateUpOrder.UP_GATE)
    plain = weights("nvfp4", 256, 128, rng)
    a = make_rows("fp8_block", [3], 128, rng, CPU, num_experts=3)
    with pytest.raises(ValueError, match=r"w\.gate_up: expected None without a gate, got up_gate"):
        expanded_gemm(a, gated)
    with pytest.raises(ValueError, match=r"w\.gate_up: expected expanded weights of gate and up, got plain ones"):
        expanded_gemm_swiglu(a, plain, SwiGLU())
    with pytest.raises(ValueError, match=r"activation\.order: expected up_gate"):
        expanded_gemm_swiglu(a, gated, SwiGLU())
    with pytest.raises(ValueError, match=r"a\.format"):
        expanded_gemm(make_rows("bf16", [3], 128, rng, CPU, num_experts=3), plain)
    with pytest.raises(ValueError, match="Hopper's kernel for expanded weights does not take"):
        expanded_gemm(a, plain, out=torch.empty(3, 258)[:, 1:257])
    assert emulator.runs == 0


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=NAMES)
def test_a_plan_has_room_for_the_table(fmt: TokenFormat, emulator: Emulator, rng: torch.Generator) -> None:
    """Stages that fit without it may not fit with it."""
    w = weights(fmt.name, 256, 512, rng)
    a = make_rows("fp8_block", [1] * 900, 512, rng, CPU, num_experts=3)
    for groups, stages in ((700, 4), (850, 3)):
        offsets, ids = a.group_offsets[: groups + 1], a.expert_ids[:groups]
        how = plan_expanded(replace(a, group_offsets=offsets, expert_ids=ids, expected_rows=10**6), w).tma
        assert how is not None and how.shape is TMA_PREFILL and how.copies_scales == (stages == 4)
        assert how.shape.stages(groups) == 4 and how.shape.stages(groups, fmt) == stages


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=NAMES)
@regimes
def test_both_rings_fit(fmt: TokenFormat, shape: TmaShape) -> None:
    room = SM_SHARED_BYTES // shape.blocks_per_sm - BLOCK_RESERVED_BYTES
    for groups in (1, 32, 128, 512, MAX_TMA_GROUPS):
        stages, packed = shape.stages(groups, fmt), shape.packed_stages(groups, fmt)
        assert shape.shared_bytes(groups, fmt) <= room and stages >= 1
        assert (packed >= 2) == shape.rings and shape.packed_stages(groups, None) == 0
        if groups <= 128 and shape.rings:
            assert stages == 3 and packed >= 3


FREE = "barrier_wait(empty + 8 * stage, ~phase >> stage & 1);"
MISTAKES: dict[str, tuple[TmaShape, str, str, str]] = {
    "a warp does not say that it has expanded": (
        TMA_PREFILL,
        "ptx::fence_proxy_async_shared_cta();\n        barrier_arrive_warp(ready);",
        "if (threadIdx.x % 128 >= 32) barrier_arrive_warp(ready);",
        "go on",
    ),
    "weights are written before the stage is free": (
        TMA_PREFILL,
        FREE,
        f"if (threadIdx.x % 128 < 32) {FREE}",
        "changed while|differ|waits for|go on",
    ),
    "a stage of few rows is written before it is free": (
        TMA_FEW,
        FREE,
        f"if (threadIdx.x % 128 < 32) {FREE}",
        "changed while|differ|waits for|go on",
    ),
    "packed weights are overwritten before all warps have them": (
        TMA_FEW,
        "barrier_init(packed + 8 * ({packed} + s), 4 * ARRIVALS_OF_WARP);",
        "barrier_init(packed + 8 * ({packed} + s), 1);",
        "differ|waits for|go on",
    ),
    "packed weights are read before they are there": (
        TMA_FEW,
        "barrier_wait(full + 8 * slot, phase & 1);",
        "",
        "differ|waits for|go on",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(
    mistake: str, emulate: Callable[..., Emulator], rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, right, wrong, found = MISTAKES[mistake]
    packed = shape.packed_stages(2, NVFP4)

    def edit(text: str) -> str:
        before = right.replace("{packed}", str(packed))
        assert text.count(before) == 1, text.count(before)
        return text.replace(before, wrong.replace("{packed}", str(packed)))

    w = weights("nvfp4", 520, 1280, rng)
    a = make_rows("fp8_block", [13, 5] if shape.few else [130, 5], 1280, rng, CPU, num_experts=3, gather=True)
    in_shape(monkeypatch, shape)
    emulate()
    want = expanded_gemm(a, w)
    emulate(edit=edit)
    with pytest.raises(AssertionError, match=found):
        for _ in range(MOST_SCHEDULES):
            assert_same_bits(expanded_gemm(a, w), want)


def test_every_lane_may_arrive(emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `launch.sanitize` compiles it; of a cluster the emulator knows only warps that tell both blocks at once."""
    emulator.defines = {"EACH_LANE_ARRIVES": 1}
    w = weights("nvfp4", 264, 640, rng)
    for shape in (TMA_FEW, TMA_DECODE):
        compare_plain(few(640, rng, True), w, shape, monkeypatch)
    check_runs(emulator, 4)
