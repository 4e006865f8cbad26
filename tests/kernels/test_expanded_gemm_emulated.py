"""Expanded FP4 weights in Hopper's GEMM, emulated on the CPU: the bits of the FP8 GEMM with the same e4m3 weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.formats.number_formats import MXFP4, NVFP4, TokenFormat
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.plan import MAX_TMA_GROUPS
from moe_runtime.kernels.gemm.shapes import (
    EXPANDING_SHAPES,
    TMA_AHEAD,
    TMA_DOZEN,
    TMA_FEW,
    TMA_PREFILL,
    TMA_SOME,
    TMA_TALL,
    TmaShape,
)
from moe_runtime.kernels.gemm.tma_gemm import Strips
from moe_runtime.kernels.gemm.weights import GPT_OSS, SQUARED_RELU, Activation, GateUpOrder, SwiGLU
from moe_runtime.kernels.runtime import BLOCK_RESERVED_BYTES, SM_SHARED_BYTES
from tests.emulator import MOST_SCHEDULES, Emulator, needs_emulator, planted
from tests.kernels import test_tma_gemm_emulated
from tests.support.comparison import assert_same_bits
from tests.support.expanded_cases import (
    ACTIVATED,
    GATHERING_SHAPES,
    compare_plain,
    compare_swiglu,
    expanded_weights,
    few,
    in_shape,
    of_all_sizes,
    rows_for,
)
from tests.support.gemm_cases import UNIT, check_inside, exact_gemm, make_rows, random_weights
from tests.support.gemm_checks import poisoned
from tests.support.gemm_plans import tma_grouped_gemm, tma_grouped_gemm_swiglu, tma_plan

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
NAMES = ["nvfp4", "mxfp4"]

names = pytest.mark.parametrize("name", NAMES)
all_shapes = pytest.mark.parametrize("shape", EXPANDING_SHAPES, ids=attrgetter("name"))


emulate, emulator = test_tma_gemm_emulated.emulate, test_tma_gemm_emulated.emulator
check_runs = test_tma_gemm_emulated.check_runs


@pytest.mark.parametrize(
    ("name", "k", "gather", "shape"),
    [
        *(
            (NAMES[(i + gather) % 2], 640, gather, shape)
            for i, shape in enumerate(GATHERING_SHAPES)
            for gather in (False, True)
        ),
        ("nvfp4", 512, False, TMA_PREFILL),  # with scales that come by TMA
        ("mxfp4", 512, False, TMA_AHEAD),
        ("nvfp4", 128, True, TMA_AHEAD),
        ("mxfp4", 512, True, TMA_PREFILL),
        ("nvfp4", 400, False, TMA_PREFILL),
        ("nvfp4", 16, False, TMA_SOME),
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
    monkeypatch.setattr(nvrtc, "most_sms", lambda *_: 4)
    w = expanded_weights(name, 392, k, rng, CPU)
    a = rows_for(shape, k, rng, gather, CPU)
    for num_sms in (2,) if shape.few else (2, 4):
        got = compare_plain(a, w, shape, monkeypatch, num_sms=num_sms)
    check_inside(got[: a.capacity], exact_gemm(a, w.expand(), CPU), UNIT[torch.float32])
    check_runs(emulator, 2)


@pytest.mark.parametrize(("name", "shape"), [(NAMES[i % 2], shape) for i, shape in enumerate(GATHERING_SHAPES)])
def test_tiles_that_end_with_any_stage(
    name: str, shape: TmaShape, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for blocks in range(1, 8):
        w = expanded_weights(name, 520, 128 * blocks, rng, CPU)
        a = make_rows("fp8_block", [130, 5], 128 * blocks, rng, CPU, num_experts=3, gather=blocks % 2 == 0)
        compare_plain(a, w, shape, monkeypatch, dtype=torch.bfloat16)
    check_runs(emulator, 14)


@pytest.mark.parametrize(
    ("name", "gather", "number"),
    [
        ("nvfp4", False, 0),
        ("mxfp4", True, 2),
        ("mxfp4", False, 3),
        ("nvfp4", True, 5),
        ("nvfp4", True, 7),
        ("mxfp4", False, 9),
        ("nvfp4", False, 10),
        ("mxfp4", True, 11),
    ],
)
def test_activated(
    name: str,
    gather: bool,
    number: int,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In whole blocks of 128 columns, and in short ones of gate, up and the result."""
    activation, to, shape = ACTIVATED[number]
    for k, inner in ((256, 384), (288, 320)):
        w = expanded_weights(name, activation.num_parts * inner, k, rng, CPU, activation.gate_up, biased=gather)
        compare_swiglu(rows_for(shape, k, rng, gather, CPU), w, activation, to, shape, monkeypatch)
    check_runs(emulator, 4)


@pytest.mark.parametrize(("name", "dtype"), [("nvfp4", torch.float16), ("mxfp4", torch.bfloat16)])
def test_epilogue(
    name: str, dtype: torch.dtype, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = expanded_weights(name, 264, 256, rng, CPU, biased=True)
    a = few(256, rng, False, CPU)
    a = replace(a, row_scale=torch.rand(a.capacity, generator=rng) + 0.5)
    for shape in (TMA_FEW, TMA_PREFILL):
        compare_plain(a, w, shape, monkeypatch, dtype=dtype)
    check_runs(emulator, 4)


def test_all_shapes_give_the_same_bits(
    emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row in any company."""
    w = expanded_weights("nvfp4", 520, 1024, rng, CPU)
    x = torch.randn(331, 1024, generator=rng)
    many = make_rows("fp8_block", [5, 326], 1024, rng, CPU, num_experts=3, x=x)
    one = make_rows("fp8_block", [0, 1], 1024, rng, CPU, num_experts=3, x=x[300:301])
    want = compare_plain(many, w, TMA_PREFILL, monkeypatch)[:331]
    for shape in GATHERING_SHAPES:
        in_shape(monkeypatch, shape)
        assert_same_bits(tma_grouped_gemm(one, w, out_dtype=torch.float32)[0], want[300], "alone")
        if not shape.few:
            assert_same_bits(tma_grouped_gemm(many, w, out_dtype=torch.float32), want, shape.regime.name)


def in_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 8 SMs, with room for the strips of one group, which is the least: blocks wait for strips, and strips for
    blocks."""
    monkeypatch.setattr(nvrtc, "most_sms", lambda *_: 8)
    monkeypatch.setattr(Strips, "of", classmethod(lambda cls, groups, tiles, k, **_: Strips(groups * tiles, tiles, k)))


@names
def test_strips_in_few_slots(
    name: str, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiles of several groups at a time, an odd column tile that clusters reach past, and halved tiles."""
    in_few_slots(monkeypatch)
    sizes, ids = [130, 5, 0, 64, 270, 1, 3, 140, 2], [0, 1, 2, 1, 0, 2, 2, 1, 0]
    a = make_rows("fp8_block", sizes, 384, rng, CPU, num_experts=3, expert_ids=ids)
    for n in (264, 520, 776):
        w = expanded_weights(name, n, 384, rng, CPU)
        for num_sms in (2, 8):
            compare_plain(a, w, TMA_AHEAD, monkeypatch, num_sms=num_sms)
    check_runs(emulator, 12)


@pytest.mark.parametrize(
    ("name", "n", "k", "dtype"),
    [
        ("nvfp4", 520, 512, torch.bfloat16),  # with scales that come by TMA, and an odd number of column tiles
        ("mxfp4", 392, 640, torch.float32),
        ("nvfp4", 136, 400, torch.float16),
        ("mxfp4", 768, 512, torch.bfloat16),
        ("nvfp4", 264, 16, torch.bfloat16),
        ("mxfp4", 264, 256, torch.bfloat16),
    ],
)
def test_tall_tiles(
    name: str,
    n: int,
    k: int,
    dtype: torch.dtype,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "most_sms", lambda *_: 4)
    w = expanded_weights(name, n, k, rng, CPU, biased=k == 640)
    a = of_all_sizes(k, rng, CPU, spare=0 if n == 768 else 9)
    for num_sms in (2, 4):
        compare_plain(a, w, TMA_TALL, monkeypatch, num_sms=num_sms, dtype=dtype)
    check_runs(emulator, 4)


@names
@pytest.mark.parametrize("k", [384, 512])
def test_tall_tiles_with_far_scales(
    name: str, k: int, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of scales that are not normal, of some rows of either half, from the first or from a later stage on."""
    w = expanded_weights(name, 520, k, rng, CPU)
    gated = expanded_weights(name, 512, k, rng, CPU, GateUpOrder.UP_GATE)
    a = make_rows("fp8_block", [70, 193, 5, 256, 129], k, rng, CPU, num_experts=3)
    assert a.scales is not None
    scales = a.scales.clone()
    scales[::7, 2] *= 2.0**-60
    scales[75, 0] *= 2.0**-70
    scales[400:420] *= 2.0**-60
    a = replace(a, scales=scales)
    for weights in (w, gated):
        far = weights.scales.clone()
        far[:, 1::3] *= 2.0**-66
        far[:, 2::3, 2:] *= 2.0**90
        far_weights = replace(weights, scales=far)
        if weights is w:
            compare_plain(a, far_weights, TMA_TALL, monkeypatch)
        else:
            compare_swiglu(a, far_weights, SwiGLU(GateUpOrder.UP_GATE), "fp8_block", TMA_TALL, monkeypatch)
    check_runs(emulator, 4)


@names
def test_tall_tiles_that_end_with_any_stage(
    name: str, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for blocks in range(1, 7):
        w = expanded_weights(name, 264, 128 * blocks, rng, CPU)
        a = make_rows("fp8_block", [130, 5, 257], 128 * blocks, rng, CPU, num_experts=3)
        compare_plain(a, w, TMA_TALL, monkeypatch, dtype=torch.bfloat16)
    check_runs(emulator, 12)


def test_tall_tiles_and_scales_past_the_last_row(
    emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come with those of rows."""
    w = expanded_weights("nvfp4", 264, 512, rng, CPU)
    for sizes in ([70, 0, 193], [5, 140], [260]):
        a = make_rows("fp8_block", sizes, 512, rng, CPU, num_experts=3, spare=30)
        assert a.scales is not None
        for value in (0.0, 1e38, float("nan")):
            scales = a.scales.clone()
            scales[sum(sizes) :] = value
            compare_plain(replace(a, scales=scales), w, TMA_TALL, monkeypatch)
    check_runs(emulator, 18)


@pytest.mark.parametrize(
    ("name", "activation", "to", "k", "inner"),
    [
        ("nvfp4", SwiGLU(), "fp8_block", 512, 384),
        ("mxfp4", SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5), "fp8_block", 512, 256),
        ("mxfp4", SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), "fp8_block", 288, 320),
        ("nvfp4", GPT_OSS, "fp8_block", 384, 208),
        ("nvfp4", SwiGLU(), "bf16", 512, 320),
        ("mxfp4", GPT_OSS, "bf16", 128, 384),
        ("nvfp4", SQUARED_RELU, "fp8_block", 640, 400),
        ("mxfp4", SQUARED_RELU, "fp8_block", 512, 384),
        ("nvfp4", SQUARED_RELU, "bf16", 512, 264),
    ],
)
def test_activated_tall_tiles(
    name: str,
    activation: Activation,
    to: str,
    k: int,
    inner: int,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks of a cluster tell each other the largest values of rows of a gated result."""
    monkeypatch.setattr(nvrtc, "most_sms", lambda *_: 4)
    rows = activation.num_parts * inner
    w = expanded_weights(name, rows, k, rng, CPU, activation.gate_up, biased=activation is GPT_OSS)
    compare_swiglu(of_all_sizes(k, rng, CPU), w, activation, to, TMA_TALL, monkeypatch)
    check_runs(emulator, 2)


@names
@pytest.mark.parametrize("shape", [TMA_FEW, TMA_DOZEN], ids=attrgetter("name"))
def test_both_products_of_a_layer(
    name: str, shape: TmaShape, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second may start, and load its weights, while the first runs."""
    in_shape(monkeypatch, shape)
    gate_up = expanded_weights(name, 512, 256, rng, CPU, GateUpOrder.GATE_UP)
    down = expanded_weights(name, 136, 256, rng, CPU)
    a = make_rows("fp8_block", [3, 0, 70, 5], 256, rng, CPU, num_experts=3)

    def run(w1: Any, w2: Any, first: Any, second: Any, **how: Any) -> torch.Tensor:
        hidden = first(a, w1, SwiGLU(), out_format="fp8_block", **how)
        assert hidden.order.only_rows_pending
        result: torch.Tensor = second(hidden, w2, **how)
        return result

    want = run(gate_up.expand(), down.expand(), tma_grouped_gemm_swiglu, tma_grouped_gemm, shape=shape)
    for _ in range(3):
        with emulator.together():
            got = run(gate_up, down, tma_grouped_gemm_swiglu, tma_grouped_gemm)
        assert_same_bits(got, want, name)


def test_scales_that_are_nan_and_far_ones(
    emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN stays in its columns. Scales of 2^-100 and 2^90 beside each other lose the smaller weights."""
    raw = random_weights("mxfp4", 3, 264, 384, rng, CPU)
    assert raw.scales is not None
    scales = raw.scales.clone()
    scales[1, 0, 0, 5, 1, 2], scales[1, 1, 1, 7, 0, 1] = 255, 255
    scales[2, 0, :, ::3], scales[2, 0, 1, 4] = 27, 217
    w = ExpandedWeights.prepack(replace(raw, scales=scales), engine="torch")
    assert w.exact.tolist() == [True, True, False]
    for shape in (TMA_FEW, TMA_PREFILL):
        found = compare_plain(few(384, rng, False, CPU), w, shape, monkeypatch)
        assert found[3:40].isnan().any(0).nonzero().flatten().tolist() == [37, 135]
    check_runs(emulator, 4)


@names
@all_shapes
def test_nothing_to_do(name: str, shape: TmaShape, emulator: Emulator, rng: torch.Generator) -> None:
    w = expanded_weights(name, 264, 128, rng, CPU)
    a = make_rows("fp8_block", [3, 190, 5], 128, rng, CPU, num_experts=3)
    for none in (replace(a, capacity=0), replace(a, num_active_experts=0)):
        out = poisoned(198, 264, torch.bfloat16, CPU)
        before = out.clone()
        assert_same_bits(tma_grouped_gemm(none, w, out=out, shape=shape), before)


def test_what_is_refused(emulator: Emulator, rng: torch.Generator) -> None:
    gated = expanded_weights("nvfp4", 256, 128, rng, CPU, GateUpOrder.UP_GATE)
    plain = expanded_weights("nvfp4", 256, 128, rng, CPU)
    a = make_rows("fp8_block", [3], 128, rng, CPU, num_experts=3)
    with pytest.raises(ValueError, match=r"w\.gate_up: expected None: prepacked weights with gate_up"):
        grouped_gemm(a, gated)
    with pytest.raises(ValueError, match=r"w\.gate_up: expected prepacked weights of gate and up, got plain ones"):
        grouped_gemm_swiglu(a, plain, SwiGLU(), out_format="bf16")
    with pytest.raises(ValueError, match=r"activation\.order: expected up_gate"):
        grouped_gemm_swiglu(a, gated, SwiGLU(), out_format="bf16")
    with pytest.raises(ValueError, match=r"a\.format"):
        grouped_gemm(make_rows("bf16", [3], 128, rng, CPU, num_experts=3), plain)
    assert emulator.runs == 0


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=NAMES)
def test_a_plan_has_room_for_the_table(fmt: TokenFormat, emulator: Emulator, rng: torch.Generator) -> None:
    """Stages that fit without it may not fit with it."""
    w = expanded_weights(fmt.name, 256, 512, rng, CPU)
    a = make_rows("fp8_block", [1] * 900, 512, rng, CPU, num_experts=3)
    for groups, stages in ((700, 4), (850, 3)):
        offsets, ids = a.group_offsets[: groups + 1], a.expert_ids[:groups]
        how = tma_plan(replace(a, group_offsets=offsets, expert_ids=ids, expected_rows=10**6), w).tma
        assert how is not None and how.shape is TMA_AHEAD and how.copies_scales == (stages == 4)
        assert how.shape.stages(groups) == 4 and how.shape.stages(groups, fmt) == stages


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=NAMES)
@all_shapes
def test_both_rings_fit(fmt: TokenFormat, shape: TmaShape) -> None:
    room = SM_SHARED_BYTES // shape.blocks_per_sm - BLOCK_RESERVED_BYTES
    for groups in (1, 32, 128, 512, MAX_TMA_GROUPS):
        stages, packed = shape.stages(groups, fmt), shape.packed_stages(groups, fmt)
        assert shape.shared_bytes(groups, fmt) <= room and stages >= 1
        assert (packed >= 2) == shape.few and shape.packed_stages(groups, None) == 0
        if groups <= 128 and shape.few:
            assert stages in (2, 4) and packed >= 4
        assert not (shape.few or shape.tall) or stages % 2 == packed % 2 == 0


FREE = "barrier_wait(block.empty + 8 * stage, ~phase >> stage & 1);"
MISTAKES: dict[str, tuple[TmaShape, str, str, str]] = {
    "a warp does not say that it has expanded": (
        TMA_PREFILL,
        "    barrier_arrive_warp(ready);\n",
        "    if (threadIdx.x % 128 >= 32) barrier_arrive_warp(ready);\n",
        "go on",
    ),
    "weights are written before the stage is free": (
        TMA_PREFILL,
        f"{FREE}\n      __syncwarp();\n      expander.",
        f"if (threadIdx.x % 128 < 32) {FREE}\n      __syncwarp();\n      expander.",
        "changed while|differ|waits for|go on",
    ),
    "a strip is loaded before all warps have written": (
        TMA_AHEAD,
        "u32 all = 4 * k_blocks;",
        "u32 all = 4 * k_blocks - 1;",
        "changed while|differ",
    ),
    "a strip is overwritten before all tiles have read it": (
        TMA_AHEAD,
        "return BOXES * (tiles_m + past);",
        "return BOXES * (tiles_m + past) - BOXES;",
        "changed while|differ",
    ),
    "a block waits before it tells what it has read": (
        TMA_AHEAD,
        "      end(block, phases);\n      for",
        "      for",
        "go on|gave up",
    ),
    "a stage of few rows is written before it is free": (
        TMA_FEW,
        f"{FREE}\n      __syncwarp();\n      expander.",
        f"if (threadIdx.x % 128 < 32) {FREE}\n      __syncwarp();\n      expander.",
        "changed while|differ|waits for|go on",
    ),
    "packed weights are overwritten before all warps have them": (
        TMA_FEW,
        "barrier_init(packed_full + 8 * ({packed} + s), 4 * ARRIVALS_OF_WARP);",
        "barrier_init(packed_full + 8 * ({packed} + s), 1);",
        "differ|waits for|go on",
    ),
    "packed weights of the next tile begin with a stage of the other warpgroup": (
        TMA_FEW,
        "if (k_blocks % 2) now.swap(next);",
        "",
        "differ|waits for|go on",
    ),
    "packed weights are read before they are there": (
        TMA_FEW,
        "barrier_wait(ring.full(block), ring.phase & 1);",
        "",
        "differ|waits for|go on",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(
    mistake: str, emulate: Callable[..., Emulator], rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, right, wrong, found = MISTAKES[mistake]
    right, wrong = (text.replace("{packed}", str(shape.packed_stages(2, NVFP4))) for text in (right, wrong))
    ahead = shape.expands_ahead
    k, sizes = (128, [130, 5, 64, 260, 3, 1, 40]) if ahead else (1408, [13, 5] if shape.few else [130, 5])
    w = expanded_weights("nvfp4", 520, k, rng, CPU)
    ids = [i % 3 for i in range(len(sizes))]
    a = make_rows("fp8_block", sizes, k, rng, CPU, num_experts=3, expert_ids=ids, gather=True)
    in_shape(monkeypatch, shape)
    if ahead:
        in_few_slots(monkeypatch)
    emulate()
    want = tma_grouped_gemm(a, w)
    emulate(edit=planted(right, wrong))
    with pytest.raises(AssertionError, match=found):
        for _ in range(MOST_SCHEDULES):
            assert_same_bits(tma_grouped_gemm(a, w), want)


def test_tall_tiles_with_a_warp_that_is_slow_to_look(
    emulate: Callable[..., Emulator], rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that expands looks at a stage of the other warpgroup only when that has been filled and freed again."""
    w = expanded_weights("nvfp4", 264, 512, rng, CPU)
    a = make_rows("fp8_block", [70, 0, 193], 512, rng, CPU, num_experts=3)
    in_shape(monkeypatch, TMA_TALL)
    emulate()
    want = tma_grouped_gemm(a, w)
    pause = 'for (int i = 0; block.warp == MATH_WARPS + 2 && i < 3000; ++i) emulator::look("a pause");'

    def edit(text: str) -> str:
        text, times = re.subn(r"(barrier_wait\(block\.empty \+ 8 \* stage, ~phase)", rf"{pause} \1", text)
        assert times >= 2
        return text

    emulate(edit=edit)
    assert_same_bits(tma_grouped_gemm(a, w), want)


MISTAKES_OF_TALL = {
    "the other block's maxima are not waited for": (
        "barrier_wait(x.arrived, x.parity);\n#pragma unroll",
        "#pragma unroll",
        "differ|under way",
    ),
    "maxima of the next tile overwrite those that have not been read": (
        "u32 place = stored % 2 * MATH_WARPS + warp;",
        "u32 place = warp; stored += stored & 1;",
        "differ|outside|nothing can go on",
    ),
    "a stage is free when all warps but one are through": (
        "barrier_init(empty + 8 * s, MATH_WARPS * TEAM * ARRIVALS_OF_WARP)",
        "barrier_init(empty + 8 * s, MATH_WARPS * TEAM - 1)",
        "changed while their product was under way|waits for|nothing can go on|differ",
    ),
    "a stage is expanded before all warps of its warpgroup are through": (
        "IN_STAGES ? 4 * (IN_TURNS ? 1 : PRODUCER_WGS)",
        "IN_STAGES ? (IN_TURNS ? 3 : 4 * PRODUCER_WGS)",
        "changed while|differ|waits for|nothing can go on|outside",
    ),
    "a warpgroup goes on with the block of K of the other": (
        "source.advance(STEP);",
        "source.advance(1);",
        "differ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_TALL)
def test_mistakes_in_tall_tiles_are_found(
    mistake: str, emulate: Callable[..., Emulator], rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong, found = MISTAKES_OF_TALL[mistake]

    # A block is ahead of the other by a tile only if the ring has room for all of it.
    k = 128 if "maxima" in mistake else 640
    w = expanded_weights("nvfp4", 512, k, rng, CPU, GateUpOrder.GATE_UP)
    a = make_rows("fp8_block", [60, 5, 64, 3, 300, 20], k, rng, CPU, num_experts=3)
    in_shape(monkeypatch, TMA_TALL)
    emulate()
    want = tma_grouped_gemm_swiglu(a, w, SwiGLU(), out_format="fp8_block")
    assert want.scales is not None
    emulate(edit=planted(right, wrong))
    with pytest.raises(AssertionError, match=found):
        for _ in range(MOST_SCHEDULES):
            got = tma_grouped_gemm_swiglu(a, w, SwiGLU(), out_format="fp8_block")
            assert got.scales is not None
            assert_same_bits(got.rows, want.rows, "rows")
            assert_same_bits(got.scales, want.scales, "scales")


def test_every_lane_may_arrive(emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `launch.research.sanitize` compiles it; of a cluster the emulator knows only warps that tell both at once."""
    emulator.defines = {"EACH_LANE_ARRIVES": 1}
    w = expanded_weights("nvfp4", 264, 640, rng, CPU)
    for shape in (TMA_FEW, TMA_DOZEN):
        compare_plain(few(640, rng, True, CPU), w, shape, monkeypatch)
    check_runs(emulator, 4)
