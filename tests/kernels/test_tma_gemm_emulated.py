"""The Hopper GEMM in CUDA C++ emulated on the CPU: the tests of `test_tma_gemm.py` that need a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.gemm import op_gemm
from moe_runtime.kernels.gemm import tma_gemm as tma
from moe_runtime.kernels.gemm.arguments import Intermediate
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.shapes import TMA_DECODE, TMA_FEW, TMA_PREFILL, TMA_SOME, TmaShape
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GEGLU_TANH,
    GPT_OSS,
    SQUARED_RELU,
    Activation,
    ExpertWeights,
    GateUpOrder,
    SwiGLU,
)
from tests.emulator import MOST_SCHEDULES, Emulator, needs_emulator, planted
from tests.emulator.tensor_maps import encode_tiled
from tests.kernels import test_tma_gemm as on_gpu
from tests.kernels.test_activations import check_limit_on_function, check_special_values
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import make_rows, random_weights
from tests.support.gemm_checks import check_inf_before_missing_columns
from tests.support.gemm_plans import tma_grouped_gemm, tma_grouped_gemm_swiglu
from tests.support.op_cases import check, moe_fp8

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
SCHEDULES = 2
"""Of a case that is run more than once, all different."""

MORE_TILES = 520
"""Columns of several tiles for every SM."""

gathers = pytest.mark.parametrize("gather", [False, True], ids=["packed", "gathered"])
regimes = pytest.mark.parametrize("regime", on_gpu.REGIMES, ids=on_gpu.IDS)
names = pytest.mark.parametrize("name", on_gpu.NAMES)


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Callable[..., Emulator]]:
    """Makes an emulator that stands for the launches of CUDA kernels and for tensor maps, on a GPU of 2 SMs."""

    def emulate(**more: Any) -> Emulator:
        emulator = Emulator(seed, **more)
        emulator.stand_in(monkeypatch)
        return emulator

    monkeypatch.setattr(nvrtc, "most_sms", lambda device: 2)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
    tma._tensor_map.cache_clear()
    yield emulate
    tma._tensor_map.cache_clear()


@pytest.fixture
def emulator(emulate: Callable[..., Emulator]) -> Emulator:
    """One that runs the kernels as they are."""
    return emulate()


def check_runs(emulator: Emulator, least: int) -> None:
    """Raise unless the kernel ran as often: none of these tests may pass by another way."""
    assert emulator.launched == {(tma.SOURCE, "tma_gemm")} and emulator.runs >= least


@pytest.mark.parametrize(
    ("name", "k", "gather", "regime"),
    [
        *product(["fp8_block"], [640, 288], [False, True], on_gpu.REGIMES),
        *product(["bf16"], [200], [False, True], on_gpu.REGIMES),
        ("fp8_block", 512, False, TMA_PREFILL),  # with scales that come by TMA
        ("fp8_block", 512, True, TMA_PREFILL),
        ("fp8_block", 400, False, TMA_PREFILL),
    ],
)
def test_ragged_groups(
    name: str, k: int, gather: bool, regime: TmaShape, emulator: Emulator, rng: torch.Generator
) -> None:
    # All SMs are 2 here.
    on_gpu.check_ragged_groups(name, k, gather, regime, (2, 4), rng, CPU)
    check_runs(emulator, 2)


@gathers
@regimes
@names
def test_tiles_that_end_with_any_stage(
    name: str, gather: bool, regime: TmaShape, emulator: Emulator, rng: torch.Generator
) -> None:
    for blocks in range(1, 7):
        on_gpu.check_tiles_of_stages(name, blocks, gather, regime, MORE_TILES, rng, CPU)
    check_runs(emulator, 6)


def both_products(
    name: str,
    shape: TmaShape,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    weights_after_ns: int = 0,
) -> None:
    """The second product may start while the first runs; the bits are those of one after the other."""
    fresh = Intermediate.empty

    def poisoned(stored: Intermediate, rows: GroupedRows) -> GroupedRows:
        hidden = fresh(stored, rows)
        hidden.rows.view(torch.uint8).fill_(0x3A)
        return hidden

    monkeypatch.setattr(Intermediate, "empty", poisoned)
    a = make_rows(name, [3, 0, 70, 5], 256, rng, CPU, num_experts=4)
    gate_up = random_weights(name, 4, 256, 256, rng, CPU, gate_up=GateUpOrder.GATE_UP)
    down = random_weights(name, 4, 136, 128, rng, CPU)

    def run() -> torch.Tensor:
        hidden = tma_grouped_gemm_swiglu(a, gate_up, SwiGLU(), out_format=name, shape=shape)
        assert hidden.order.only_rows_pending
        return tma_grouped_gemm(
            replace(hidden, order=replace(hidden.order, weights_after_ns=weights_after_ns)), down, shape=shape
        )

    want = run()
    for _ in range(SCHEDULES):
        with emulator.together():
            got = run()
        assert_same_bits(got, want, name)


@pytest.mark.parametrize(
    ("shape", "weights_after_ns"),
    [(TMA_FEW, 0), (TMA_FEW, 500), (TMA_DECODE, 0)],
    ids=["few", "few, with late loads", "decode"],
)
@names
def test_a_product_starts_while_the_one_before_ends(
    name: str,
    shape: TmaShape,
    weights_after_ns: int,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both_products(name, shape, emulator, rng, monkeypatch, weights_after_ns)
    check_runs(emulator, 2 + SCHEDULES)


@pytest.mark.parametrize(
    ("shape", "right", "wrong"),
    [
        (TMA_DECODE, "ptx::griddepcontrol_wait();", ""),
        (TMA_FEW, "ptx::griddepcontrol_wait();", ""),
        (TMA_FEW, "wait_for_rows();\n      if (index_waits)", "if (index_waits)"),
    ],
    ids=["decode", "few", "few, with the weights of the first tile"],
)
def test_a_product_that_does_not_wait_is_found(
    shape: TmaShape,
    right: str,
    wrong: str,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.edit = planted(right, wrong)
    with pytest.raises(AssertionError, match=r"differ|are other than"):
        for _ in range(MOST_SCHEDULES):
            both_products("bf16", shape, emulator, rng, monkeypatch)


Case = tuple[Callable[..., None], dict[str, Any], int]
"""A test on a GPU, its arguments, and how often at least it runs the kernel."""


def _cases() -> Iterator[Case]:
    yield on_gpu.test_bands_of_columns, {}, 2
    for name, order, dtype in (
        ("bf16", None, torch.float32),
        ("bf16", GateUpOrder.INTERLEAVED, torch.float16),
        ("fp8_block", GateUpOrder.GATE_UP, torch.bfloat16),
        ("fp8_block", GateUpOrder.UP_GATE, torch.float32),
    ):
        yield on_gpu.test_epilogue, {"name": name, "order": order, "dtype": dtype}, 1
    for name, to, activation, regime in (
        ("fp8_block", "fp8_block", SwiGLU(), TMA_PREFILL),
        ("fp8_block", "fp8_block", SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5), TMA_DECODE),
        ("fp8_block", "bf16", SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), TMA_DECODE),
        ("bf16", "bf16", GPT_OSS, TMA_PREFILL),
        ("fp8_block", "fp8_block", GEGLU_TANH, TMA_PREFILL),
        ("bf16", "bf16", Activation(gate_softcap=2.0, up_softcap=4.0), TMA_PREFILL),
        ("bf16", "bf16", GEGLU, TMA_DECODE),
        ("fp8_block", "fp8_block", SQUARED_RELU, TMA_PREFILL),
        ("fp8_block", "fp8_block", SQUARED_RELU, TMA_DECODE),
        ("fp8_block", "bf16", SQUARED_RELU, TMA_DECODE),
        ("bf16", "bf16", SQUARED_RELU, TMA_PREFILL),
        ("fp8_block", "fp8_block", SwiGLU(), TMA_FEW),
        ("fp8_block", "fp8_block", SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5), TMA_FEW),
        ("fp8_block", "fp8_block", SwiGLU(), TMA_SOME),
        ("fp8_block", "bf16", SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), TMA_FEW),
        ("fp8_block", "fp8_block", SQUARED_RELU, TMA_FEW),
        ("bf16", "bf16", GPT_OSS, TMA_FEW),
        ("fp8_block", "fp8_block", Activation(limit=0.5, limit_on="function"), TMA_PREFILL),
        ("fp8_block", "fp8_block", Activation(GateUpOrder.UP_GATE, limit=0.5, limit_on="function"), TMA_FEW),
        ("bf16", "bf16", Activation(GateUpOrder.INTERLEAVED, limit=0.5, limit_on="function"), TMA_DECODE),
    ):
        arguments = {"name": name, "to": to, "activation": activation, "regime": regime}
        yield on_gpu.test_swiglu_requantized, arguments, 2
    for name, k, inner, activation, regime in (
        ("fp8_block", 192, 320, SwiGLU(), TMA_PREFILL),
        ("fp8_block", 400, 192, SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), TMA_PREFILL),
        ("fp8_block", 288, 352, GPT_OSS, TMA_DECODE),
        ("fp8_block", 16, 80, SwiGLU(), TMA_DECODE),
        ("bf16", 192, 320, GPT_OSS, TMA_PREFILL),
        ("fp8_block", 192, 320, SQUARED_RELU, TMA_PREFILL),
        ("fp8_block", 288, 352, SQUARED_RELU, TMA_DECODE),
        ("fp8_block", 16, 80, SQUARED_RELU, TMA_DECODE),
        ("fp8_block", 192, 320, SwiGLU(), TMA_FEW),
        ("fp8_block", 288, 352, GPT_OSS, TMA_FEW),
        ("fp8_block", 288, 352, GPT_OSS, TMA_SOME),
        ("fp8_block", 16, 80, SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), TMA_FEW),
    ):
        arguments = {"name": name, "k": k, "inner": inner, "activation": activation, "regime": regime}
        yield on_gpu.test_swiglu_in_short_blocks, arguments, 2
    yield on_gpu.test_requantization_is_that_of_the_quantizer, {}, 2
    yield on_gpu.test_rows_have_the_same_bits_in_any_company, {"name": "bf16"}, 13
    yield on_gpu.test_scales_whose_product_leaves_fp32, {}, 3
    for k in (256, 512):
        yield on_gpu.test_far_scales_give_the_same_bits_in_all_regimes, {"k": k}, 4
    yield on_gpu.test_scales_past_the_last_row_may_be_anything, {"value": float("nan")}, 3
    yield on_gpu.test_nothing_to_do_and_rows_past_the_capacity, {}, 5
    yield on_gpu.test_many_groups, {}, 1


@pytest.mark.parametrize(
    ("test", "arguments", "runs"), [pytest.param(*case, id=case[0].__name__.removeprefix("test_")) for case in _cases()]
)
def test_as_on_a_gpu(
    test: Callable[..., None], arguments: dict[str, Any], runs: int, emulator: Emulator, rng: torch.Generator
) -> None:
    test(**arguments, rng=rng, device=CPU)
    check_runs(emulator, runs)


def test_special_values(emulator: Emulator) -> None:
    def run(a: GroupedRows, w: ExpertWeights, activation: Activation) -> GroupedRows:
        return tma_grouped_gemm_swiglu(a, w, activation, out_format="bf16")

    check_special_values("bf16", run, CPU)
    check_runs(emulator, 8)


@pytest.mark.parametrize("name", ["bf16", "fp8_block"])
def test_limit_on_function(name: str, emulator: Emulator) -> None:
    def run(a: GroupedRows, w: ExpertWeights, activation: Activation) -> GroupedRows:
        return tma_grouped_gemm_swiglu(a, w, activation, out_format="bf16")

    check_limit_on_function(name, run, CPU)
    check_runs(emulator, 6)


@pytest.mark.parametrize("shape", [TMA_FEW, TMA_DECODE, TMA_PREFILL], ids=attrgetter("name"))
@pytest.mark.parametrize("activation", [SQUARED_RELU, Activation(limit=7.0, up_offset=1.0)], ids=["relu2", "limit"])
@pytest.mark.parametrize("inner", [208, 256])
def test_inf_before_columns_that_are_not_there(
    inner: int, activation: Activation, shape: TmaShape, emulator: Emulator, rng: torch.Generator
) -> None:
    def run(a: GroupedRows, w: ExpertWeights) -> Intermediate:
        return tma_grouped_gemm_swiglu(a, w, activation, out_format="fp8_block", shape=shape)

    check_inf_before_missing_columns(inner, activation, run, rng, CPU)


@pytest.mark.parametrize(("k", "n", "is_gated"), [(272, 200, False), (400, 256, True), (144, 192, False)])
def test_operation_whose_last_block_of_k_is_short(
    k: int, n: int, is_gated: bool, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales are transposed for the kernel, which takes the operation as it takes a layer."""
    case = moe_fp8([5, 0, 130, 3], n, k, rng, CPU, is_gated=is_gated)
    monkeypatch.setattr(op_gemm, "resolve_engine", lambda *_: "cuda")
    check(case, "auto")
    check_runs(emulator, 1)


@pytest.mark.parametrize("wrong", [{"address": 8}, {"strides": (120,)}, {"box": (128, 16)}, {"box": (64, 257)}])
def test_maps_that_the_driver_refuses(wrong: dict[str, Any], emulator: Emulator) -> None:
    good: dict[str, Any] = {"address": 4096, "element_size": 2, "dims": (64, 5), "strides": (128,), "box": (64, 16)}
    assert tma._tensor_map(**good) is tma._tensor_map(**good)
    with pytest.raises(nvrtc.NvrtcError, match="cuTensorMapEncodeTiled"):
        tma._tensor_map(**good | wrong)


# --- mistakes that are found -----------------------------------------------------------------------------------------

MISTAKES = {
    "a stage is given back under its products": (
        "ptx::wgmma_wait_group_sync_aligned(LEFT)",
        "ptx::wgmma_wait_group_sync_aligned(LEFT + 1)",
        "changed while their product was under way",
    ),
    "a stage is free when all warps but one are through": (
        "barrier_init(empty + 8 * s, MATH_WARPS * TEAM * ARRIVALS_OF_WARP)",
        "barrier_init(empty + 8 * s, MATH_WARPS * TEAM - 1)",
        "changed while their product was under way|waits for|nothing can go on",
    ),
    "indices of rows are written while those of the last tile are used": (
        "__syncwarp();\n      block.row_indices[first_own + lane]",
        "block.row_indices[first_own + lane]",
        "outside",
    ),
    "one warp loads no rows": (
        "if (OF_ROWS > 0 && elected())",
        "if (threadIdx.x / 32 % 4 != 2 && elected())",
        "nothing can go on",
    ),
    "each warp loads the rows of the first": (
        "end = first_own + own;",
        "end = own; i = 0;",
        "outside|changed while|nothing can go on",
    ),
    "a stage is there when all but one have arrived": (
        "barrier_init(full + 8 * s, 1 + OF_COPIES + OF_ROWS + OF_EXPANSION)",
        "barrier_init(full + 8 * s, OF_COPIES + OF_ROWS + OF_EXPANSION)",
        "changed while their product was under way|outside|waits for|nothing can go on",
    ),
    "a block ends before the other of its cluster": ("leave_cluster();\n}", "}", "of a block that has ended"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, emulate: Callable[..., Emulator], rng: torch.Generator) -> None:
    right, wrong, found = MISTAKES[mistake]

    emulate(edit=planted(right, wrong))
    # Most want a stage that is used again.
    with pytest.raises(AssertionError, match=found):
        for blocks in [5] * MOST_SCHEDULES:
            on_gpu.check_tiles_of_stages("fp8_block", blocks, True, TMA_PREFILL, MORE_TILES, rng, CPU)


MISTAKES_OF_FEW = {
    "a block quantizes by its own half": ("if (PAIRED) bits = largest_of_pair(maxima, bits);", "", "differ"),
    "maxima of all tiles have one place": (
        "u32 place = number % 2 * MATH_WARPS + warp;",
        "u32 place = warp; number *= 2;",
        "differ|go on",
    ),
    "a warp takes the maxima of another tile": (
        "of_pair.parity = number / 2 & 1",
        "of_pair.parity = 1",
        "differ|go on|waits for",
    ),
    "the last row is not copied": ("&& lane < own) load_row(", "&& lane + 1 < own) load_row(", "go on"),
    "a stage has too few arrivals": (
        "barrier_init(empty + 8 * s, MATH_WARPS * TEAM * ARRIVALS_OF_WARP)",
        "barrier_init(empty + 8 * s, MATH_WARPS * TEAM - 1)",
        "changed while their product was under way|waits for|go on",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_FEW)
def test_mistakes_of_few_rows_are_found(mistake: str, emulate: Callable[..., Emulator], rng: torch.Generator) -> None:
    right, wrong, found = MISTAKES_OF_FEW[mistake]
    a = make_rows("fp8_block", [3, 70, 5], 640, rng, CPU, num_experts=3, gather=True)
    w = random_weights("fp8_block", 3, 1024, 640, rng, CPU, gate_up=GateUpOrder.GATE_UP)

    def run() -> GroupedRows:
        return tma_grouped_gemm_swiglu(a, w, SwiGLU(), out_format="fp8_block", shape=TMA_FEW)

    emulate()
    want = run()
    emulate(edit=planted(right, wrong))
    with pytest.raises(AssertionError, match=found):
        for _ in range(MOST_SCHEDULES):
            got = run()
            assert got.scales is not None and want.scales is not None
            assert_same_bits(got.scales, want.scales, "scales")
            assert_same_bits(got.rows, want.rows, "codes")


@gathers
def test_every_lane_may_arrive(gather: bool, emulator: Emulator, rng: torch.Generator) -> None:
    """As `research.sanitize` compiles it; of a cluster the emulator knows only warps that tell both blocks at once."""
    emulator.defines = {"EACH_LANE_ARRIVES": 1}
    for shape in (TMA_FEW, TMA_DECODE):
        on_gpu.check_tiles_of_stages("fp8_block", 5, gather, shape, MORE_TILES, rng, CPU)
    check_runs(emulator, 2)
