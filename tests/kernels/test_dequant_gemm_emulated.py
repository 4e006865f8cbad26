"""The GEMM with weights dequantized in registers emulated on the CPU: what it must do on a GPU, in any order of
threads.

The cases and their oracles are those of the tests on a GPU; each is run under several schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.gemm import dequant_gemm, op_gemm
from moe_runtime.kernels.gemm import grouped_gemm as gemm
from moe_runtime.kernels.gemm.arguments import DEFAULT_INTERMEDIATE_GSF
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import DequantOverlap
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.shapes import DEQUANT_DECODE as DECODE
from moe_runtime.kernels.gemm.shapes import DEQUANT_FEW_EVEN, DequantShape
from moe_runtime.kernels.gemm.shapes import DEQUANT_MIDDLE as MIDDLE
from moe_runtime.kernels.gemm.shapes import DEQUANT_PREFILL as PREFILL
from moe_runtime.kernels.gemm.weights import SQUARED_RELU, Activation, ExpertWeights, GateUpOrder, SwiGLU
from tests.emulator import MOST_SCHEDULES, Emulator, needs_emulator, planted
from tests.kernels import test_dequant_gemm as plain
from tests.kernels import test_dequant_swiglu as gated
from tests.kernels import test_op_weights as operations
from tests.kernels.test_activations import check_limit_on_function, check_special_values
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import UNIT, check_inside, exact_gemm, make_rows, random_weights
from tests.support.gemm_checks import SHAPES, check_quantized, poisoned
from tests.support.gemm_plans import choose

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
MULTIPLY = dequant_gemm.multiply
"""Of both kernels."""
SCHEDULES = 2
Case = tuple[Callable[..., None], dict[str, Any]]


def _cases() -> Iterator[Case]:
    for (weight, token), shape in product(plain.PAIRS, SHAPES.values()):
        yield plain.test_ragged_groups, {"weight": weight, "token": token, "shape": shape}
    for sizes, ids in (([90], [1]), ([0, 65, 0], [0, 1, 0]), ([300, 0, 1], [1, 1, 1]), ([5, 6], [-7, 2])):
        yield plain.test_group_shapes, {"sizes": sizes, "ids": ids}
    for weight, shape in product(("nvfp4", "mxfp4"), SHAPES.values()):
        arguments = {"weight": weight, "shape": shape}
        yield plain.test_fp8_rows_have_the_bits_of_their_values_in_bf16, arguments
    for weight, token in plain.PAIRS:
        yield plain.test_tokens_are_decoded_alike_in_both_shapes, {"weight": weight, "token": token}
        for shape in (MIDDLE, PREFILL):
            arguments = {"weight": weight, "token": token, "shape": shape}
            yield plain.test_dequantization_overlaps_with_the_product, arguments
        for k in (192, 1152):
            arguments = {"weight": weight, "token": token, "k": k}
            yield plain.test_few_tokens_are_decoded_by_the_blocks_that_multiply_them, arguments
    yield plain.test_nothing_to_do, {}
    yield plain.test_rows_past_the_capacity_are_left_alone, {}
    for active in (-1, 1, 99):
        yield plain.test_active_groups_are_counted_alike_on_host_and_device, {"active": active}
    yield plain.test_epilogue, {"name": "nvfp4", "dtype": torch.float16}
    yield plain.test_epilogue, {"name": "mxfp8", "dtype": torch.float32}
    yield plain.test_small_integers_are_exact, {"name": "nvfp4", "shape": PREFILL}
    for name in ("nvfp4", "mxfp8"):
        yield plain.test_scales_that_lie_as_the_rows_do, {"name": name}
        yield plain.test_a_scale_of_nan_is_nan_whatever_its_codes, {"name": name}
    yield plain.test_all_codes_of_mxfp8_are_decoded, {"large": False, "shape": DECODE}
    yield plain.test_all_codes_of_mxfp8_are_decoded, {"large": True, "shape": PREFILL}
    for name, shape in (("mxfp8", MIDDLE), ("mxfp4", DECODE)):
        yield plain.test_units_marked_as_special_have_the_same_bits, {"name": name, "shape": shape}
    for name, token, first, last in (
        ("mxfp8", "mxfp8", 3, 202),
        ("nvfp4", "nvfp4", 0, 126),
        ("nvfp4", "bf16", 0, 126),
        ("mxfp4", "bf16", 0, 202),
    ):
        yield plain.test_all_scales_are_decoded, {"name": name, "token": token, "first": first, "last": last}
    # The two left out have nothing that none of the others has.
    for case in (*gated.CASES[:3], *gated.CASES[4:10], *gated.CASES[11:]):
        yield gated.test_swiglu_requantized, {"case": case}
    yield gated.test_a_negative_encode_scale_turns_the_signs_of_codes, {}
    for order in GateUpOrder:
        yield gated.test_expert_scales_of_gate_and_up_alike, {"order": order}
    for name in ("mxfp8", "nvfp4"):
        for activation in (SwiGLU(), SQUARED_RELU):
            arguments = {"name": name, "activation": activation, "shape": DECODE}
            yield gated.test_nothing_but_the_result_is_written, arguments
        yield gated.test_requantization_is_that_of_the_quantizer, {"out": name, "shape": DECODE}
    for name, token, out, activation, shape in (
        ("nvfp4", "nvfp4", "nvfp4", SwiGLU(), DECODE),
        ("nvfp4", "bf16", "bf16", SwiGLU(), PREFILL),
        ("nvfp4", "nvfp4", "nvfp4", SwiGLU(), MIDDLE),
        ("mxfp8", "mxfp8", "mxfp8", SwiGLU(), PREFILL),
        ("mxfp4", "bf16", "bf16", SwiGLU(), DECODE),
        ("mxfp4", "mxfp8", "mxfp8", SwiGLU(), PREFILL),
        ("nvfp4", "fp8_block", "bf16", SwiGLU(), MIDDLE),
        ("mxfp4", "fp8_block", "bf16", SQUARED_RELU, PREFILL),
        ("nvfp4", "nvfp4", "nvfp4", SQUARED_RELU, PREFILL),
        ("nvfp4", "bf16", "bf16", SQUARED_RELU, DECODE),
        ("mxfp8", "mxfp8", "mxfp8", SQUARED_RELU, MIDDLE),
    ):
        arguments = {"name": name, "token": token, "out": out, "activation": activation, "shape": shape}
        yield gated.test_a_result_is_decoded_for_the_product_that_follows, arguments
    for name, token, out in (("nvfp4", "nvfp4", "nvfp4"), ("mxfp4", "fp8_block", "bf16")):
        arguments = {"name": name, "token": token, "out": out}
        yield gated.test_teams_and_late_loads_do_not_change_the_bits_of_a_few_rows, arguments
    for name in operations.VARIANTS:
        yield operations.test_small_integers_are_exact, {"name": name}


def _name(case: Case) -> str:
    test, arguments = case
    names = {shape: name for name, shape in SHAPES.items()}
    values = (
        names[value]
        if isinstance(value, DequantShape)
        else value.function.value
        if isinstance(value, Activation)
        else value
        for value in arguments.values()
    )
    return "-".join([test.__name__.removeprefix("test_"), *map(str, values)])


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch, seed: int) -> Emulator:
    """What stands for the launches of CUDA kernels, on a Hopper GPU of one to five SMs.

    The GEMM is started as early as it asks for, while its rows are dequantized.
    """
    emulator = Emulator(seed)

    def multiply(*arguments: Any, **more: Any) -> None:
        with emulator.together():
            MULTIPLY(*arguments, **more)

    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: True)
    for module in (gemm, op_gemm):
        monkeypatch.setattr(module, "resolve_engine", lambda engine, device: "cuda" if engine == "auto" else engine)
    monkeypatch.setattr(gated, "IS_HOPPER", True)
    monkeypatch.setattr(dequant_gemm, "multiply", multiply)
    emulator.stand_in(monkeypatch)
    monkeypatch.setattr(nvrtc, "most_sms", lambda device: 1 + seed % 5)
    return emulator


def three_units_of_k(rng: torch.Generator) -> None:
    """A stage has three units of K, no multiple of the buffers of DECODE; several stages, so that one is refilled."""
    w = random_weights("nvfp4", 2, 72, 15 * 64, rng, CPU)
    a = make_rows("nvfp4", [9, 33], 15 * 64, rng, CPU, num_experts=2)
    out = poisoned(a.capacity, 72, torch.bfloat16, CPU)
    gemm.grouped_gemm(a, PrepackedWeights.prepack(w), out=out)
    check_inside(out, exact_gemm(a, w, CPU), UNIT[torch.bfloat16])


@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_stages_of_three_units(schedule: int, emulator: Emulator, rng: torch.Generator) -> None:
    three_units_of_k(rng)


def test_a_stage_of_three_units_given_back_too_early_is_found(emulator: Emulator, rng: torch.Generator) -> None:
    end = " || number == 3 * PART_BATCHES - 1"

    emulator.edit = planted(end, "", only_in="wgmma")
    with pytest.raises(AssertionError, match=r"changed while their product was under way|outside; at"):
        for _ in range(MOST_SCHEDULES):
            three_units_of_k(rng)


@pytest.mark.parametrize("schedule", range(SCHEDULES))
@pytest.mark.parametrize("case", list(_cases()), ids=_name)
def test_as_on_a_gpu(
    case: Case, schedule: int, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    test, arguments = case
    if "monkeypatch" in signature(test).parameters:
        arguments = arguments | {"monkeypatch": monkeypatch}
    test(**arguments, rng=rng, device=CPU)
    assert {file for file, _ in emulator.launched} & {"dequant_gemm.cu", "dequant_few.cu"}


@pytest.mark.parametrize(
    ("inner", "overlapped", "sizes"),
    [
        (144, False, [3, 0, 70, 9]),
        (192, False, [3, 0, 70, 9]),
        (144, True, [3, 0, 70, 9]),
        (192, True, [3, 0, 70, 9]),
        (144, False, [1, 0, 3, 2]),
        (192, False, [1, 0, 3, 2]),
        (1152, False, [2, 0, 10, 4]),
        (192, True, [1, 0, 3, 2]),
    ],
    ids=[
        "plain",
        "dequantized",
        "plain-overlapped",
        "dequantized-overlapped",
        "few",
        "few-by-rows",
        "few-in-parts",
        "few-by-teams",
    ],
)
@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_both_products_of_a_layer(
    schedule: int,
    inner: int,
    overlapped: bool,
    sizes: list[int],
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kernel is started as early as it asks for, and the second product beside the first that decodes for it."""
    monkeypatch.setattr(dequant_gemm, "multiply", MULTIPLY)
    if overlapped:
        choose(monkeypatch, plan_dequant_overlap=lambda *_: DequantOverlap(2, 2))
        # A few rows have nothing dequantized before: there the second product overlaps, and waits for a while.
        choose(monkeypatch, few_shape=lambda *_: DEQUANT_FEW_EVEN, next_loads_ns=lambda *_: 500)
    k = 128
    gate_up = random_weights("nvfp4", 2, 2 * inner, k, rng, CPU, gate_up=True)
    down = random_weights("nvfp4", 2, 136, inner, rng, CPU)
    a = make_rows("nvfp4", sizes, k, rng, CPU, num_experts=2, expert_ids=[1, 0, 0, -1], gather=True)
    a = replace(a, expected_rows=len(sizes)) if sum(sizes) <= 16 else a
    first, second = PrepackedWeights.prepack(gate_up), PrepackedWeights.prepack(down)
    out = poisoned(a.capacity, 136, torch.bfloat16, CPU)
    with emulator.together():
        chained = gemm.grouped_gemm_swiglu(a, first, SwiGLU(), out_format="nvfp4", then=second)
        gemm.grouped_gemm(chained, second, out=out)
    assert (chained.dequantized is None) == (inner == 144)
    assert chained.dequantized is None or (chained.dequantized.ndim == 2) == (sum(sizes) <= 16)
    with emulator.together():
        hidden = gemm.grouped_gemm_swiglu(a, first, SwiGLU(), out_format="nvfp4")
    check_quantized(hidden, exact_gemm(a, gate_up, CPU), SwiGLU(), DEFAULT_INTERMEDIATE_GSF)
    check_inside(out, exact_gemm(hidden, down, CPU), UNIT[torch.bfloat16])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_special_values_of_the_activation(name: str, emulator: Emulator) -> None:
    def run(a: GroupedRows, w: ExpertWeights, activation: Activation) -> GroupedRows:
        return gemm.grouped_gemm_swiglu(a, PrepackedWeights.prepack(w), activation, out_format="bf16")

    check_special_values(name, run, CPU)
    assert emulator.runs >= 8
    check_limit_on_function(name, run, CPU)
    assert emulator.runs >= 14


@pytest.mark.parametrize("rows", [[9], [40, 0, 129]], ids=["one_group", "four_parts"])
def test_bits_are_the_same_however_tiles_are_cut(
    rows: list[int], emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 units of weight rows on 1 to 14 SMs: blocks take tiles in turn, or one cut of 2 to 13 units each."""
    n = 13 * 64 - 8
    w = random_weights("nvfp4", 3, n, 128, rng, CPU)
    a, prepacked = make_rows("nvfp4", rows, 128, rng, CPU, num_experts=3), PrepackedWeights.prepack(w)
    results = []
    for sms in (1, 2, 3, 4, 5, 7, 14):
        monkeypatch.setattr(nvrtc, "most_sms", lambda device, sms=sms: sms)
        results.append(poisoned(a.capacity, n, torch.bfloat16, CPU))
        gemm.grouped_gemm(a, prepacked, out=results[-1])
        assert_same_bits(results[0], results[-1], f"{sms} SMs")
    check_inside(results[0], exact_gemm(a, w, CPU), UNIT[torch.bfloat16])


def test_weight_rows_that_no_tile_has_are_found(
    emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.edit = lambda text: text.replace("larger = unit_rows - units * cuts;", "larger = 0;")
    with pytest.raises(AssertionError, match=r"SMs|outside"):
        test_bits_are_the_same_however_tiles_are_cut([9], emulator, rng, monkeypatch)


def test_a_walk_that_does_not_wait_for_loads_is_found(
    emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One SM has more tiles than there are slots for."""
    wait = "barrier_wait(loaded + before.at * 8, before.parity);"

    emulator.edit = planted(wait, "", only_in="wgmma")
    with pytest.raises(AssertionError, match=r"SMs|outside|arrive|nothing can go on|changed while"):
        for _ in range(MOST_SCHEDULES):
            test_bits_are_the_same_however_tiles_are_cut([40, 0, 129], emulator, rng, monkeypatch)


MISTAKES = {
    "products_not_waited_for": (
        DECODE,
        "wgmma_wait<0>();\n      }",
        "}",
        "outside; at|changed while their product was",
    ),
    "all_but_the_last_waited_for": (
        DECODE,
        "wgmma_wait<0>();\n      }",
        "wgmma_wait<1>();\n      }",
        "changed while their product was under way|written before their product was waited for",
    ),
    "the_buffer_before_not_waited_for": (
        MIDDLE,
        "wgmma_wait<2 - 1>();",
        "wgmma_wait<2>();",
        "changed while their product was under way",
    ),
    "scales_of_the_next_tile": (
        DECODE,
        "finish_plain<BLOCKS>(p, tile, scales, unit, acc);\n    ptx::bar_sync(1 + warpgroup, 128);",
        "finish_plain<BLOCKS>(p, tile, scales, unit, acc);",
        "outside; at",
    ),
    "a_stage_further": (
        DECODE,
        "barrier_wait(full + stage * 8, parity);\n    load_part(0);",
        "barrier_wait(full + (stage + 1) % 4 * 8, parity);\n    load_part(0);",
        "nothing can go on|arrive at mbarrier|changed while",
    ),
}
"""By shape what is written instead in the translated GEMM, and what that ends with."""


@pytest.mark.parametrize(("shape", "right", "wrong", "found"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found(
    shape: DequantShape, right: str, wrong: str, found: str, emulator: Emulator, rng: torch.Generator
) -> None:
    emulator.edit = planted(right, wrong, only_in="wgmma")  # not in the one that decodes rows
    with pytest.raises(AssertionError, match=found):
        for _ in range(MOST_SCHEDULES):
            plain.test_ragged_groups("nvfp4", "nvfp4", shape, rng, CPU)


MISTAKES_OF_FEW = {
    "a_stage_given_back_twice": (
        "unit.prepare(ahead_scales);",
        "unit.prepare(ahead_scales);\n      if (part == 0) barrier_arrive_warp(ring.empty(ring.stage));",
        "results|arrive|nothing can go on",
    ),
    "one_ring_for_all_teams": (
        "shared_address(memory) + team * TEAM_BYTES",
        "shared_address(memory)",
        "results|arrive|nothing can go on",
    ),
    "tokens_of_the_unit_before": ("own.load(k64 + part, tokens)", "own.load(k64, tokens)", "results"),
    "tokens_not_waited_for": ("    meet();\n  }\n", "  }\n", "results"),
    "tokens_overwritten": ("if (from > 0) meet();", "", "results"),
}
"""What is written instead in the translated kernel for a few rows, and what that ends with."""


@pytest.mark.parametrize(("right", "wrong", "found"), MISTAKES_OF_FEW.values(), ids=MISTAKES_OF_FEW)
def test_mistakes_with_a_few_rows_are_found(
    right: str, wrong: str, found: str, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.edit = planted(right, wrong, only_in="struct OwnTokens")  # the kernel for a few rows
    with pytest.raises(AssertionError, match=found):
        for _ in range(MOST_SCHEDULES):
            plain.test_few_tokens_are_decoded_by_the_blocks_that_multiply_them(
                "nvfp4", "nvfp4", 1152, rng, CPU, monkeypatch
            )


MISTAKES_OF_OVERLAP = {
    "tokens_not_waited_for": ("if (1) await_tokens(", "if (0) await_tokens("),
    "told_before_they_are_there": (
        "outbox.pending = counters + 1 + number - begin;",
        "if (lane == 0) atomicAdd(counters + 1 + number - begin, 1);",
    ),
    "filled_before_they_are_sent": ("bulk_await_read<0>();", ""),
    "counted_from_anything": ("counters[i] = 0;", "counters[i] = 7;"),
}
"""What is written instead in the translated kernels; the bits differ then from those of tokens dequantized before."""


@pytest.mark.parametrize(("right", "wrong"), MISTAKES_OF_OVERLAP.values(), ids=MISTAKES_OF_OVERLAP)
def test_mistakes_of_the_overlap_are_found(
    right: str, wrong: str, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = 0

    def edit(text: str) -> str:
        nonlocal edited
        edited += text.count(right)
        return text.replace(right, wrong)

    emulator.edit = edit
    with pytest.raises(AssertionError, match=r"are other than|differ|outside"):
        for _ in range(MOST_SCHEDULES):
            plain.test_dequantization_overlaps_with_the_product("nvfp4", "nvfp4", PREFILL, rng, CPU, monkeypatch)
    assert edited > 0
