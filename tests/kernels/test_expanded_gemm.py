"""Expanded FP4 weights in Hopper's GEMM: what it compiles to, and, on a GPU, the bits of the FP8 GEMM."""

from __future__ import annotations

import re
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.formats.number_formats import FP8_BLOCK, MXFP4, NVFP4, TokenFormat
from moe_runtime.kernels.gemm import tma_gemm as tma
from moe_runtime.kernels.gemm.shapes import EXPANDING_SHAPES, TMA_TALL, TmaShape
from moe_runtime.kernels.gemm.weights import GPT_OSS, SILU, SQUARED_RELU, Activation, GateUpOrder, SwiGLU
from tests.kernels.test_tma_gemm import disassembled, gpu
from tests.support.comparison import assert_same_bits
from tests.support.expanded_cases import (
    ACTIVATED,
    GATHERING_SHAPES,
    compare_plain,
    compare_swiglu,
    expanded_weights,
    in_shape,
    of_all_sizes,
    rows_for,
)
from tests.support.gemm_cases import make_rows
from tests.support.gemm_plans import tma_grouped_gemm

names = pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
gathers = pytest.mark.parametrize("gather", [False, True], ids=["packed", "gathered"])
regimes = pytest.mark.parametrize("shape", GATHERING_SHAPES, ids=attrgetter("name"))


def _variants() -> list[tuple[TokenFormat, nvrtc.Defines]]:
    """Both products, gathered and packed, with the scales of rows by TMA and by threads."""
    found = []
    for fmt in (NVFP4, MXFP4):
        for shape in EXPANDING_SHAPES:
            gathered, copied_too = [(True, False)] * (not shape.tall), [(False, True)] * (not shape.few)
            for gather, copied in [(False, False), *gathered, *copied_too]:
                more: dict[str, Any] = {"gather": gather, "extras": False, "copied_scales": copied, "expanded": fmt}
                gated = {"activation": SILU, "order": SILU.gate_up, "out_code": 3}
                plain = {"activation": None, "order": None, "out_code": 0}
                found += [(fmt, tma.macros(FP8_BLOCK, shape, 32, **how, **more)) for how in (gated, plain)]
    return found


INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+([^;]*);", re.MULTILINE)
MASK = re.compile(r"LOP3\.LUT \S+, \S+, (?:0x77777777|0x80808080), \S+")


def loops_around(code: list[tuple[int, str]], wanted: re.Pattern[str]) -> set[tuple[int, int]]:
    """First and last address of the innermost loop around each instruction that is in one."""
    ends = [(re.match(r"@\S+ BRA (0x[0-9a-f]+)", text), at) for at, text in code]
    loops = [(int(end[1], 16), at) for end, at in ends if end is not None and int(end[1], 16) < at]
    around = [[loop for loop in loops if loop[0] <= at <= loop[1]] for at, text in code if wanted.match(text)]
    return {min(found, key=lambda loop: loop[1] - loop[0]) for found in around if found}


@pytest.mark.cpu_only
@pytest.mark.timeout(600)
def test_variants_expand_in_few_instructions_and_keep_everything_in_registers() -> None:
    """8 weights take 7: a mask, two selections, a shift each for the second half and its signs, two to put signs in."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.is_file():
        pytest.skip("this triton brings no cuobjdump")
    for fmt, variant in _variants():
        sass = disassembled(nvrtc.compile_source(tma.SOURCE, variant), cuobjdump)
        few = int(variant["ROWS"]) < 128
        columns = variant["ROWS"] if few else 128
        assert f"QGMMA.64x{columns}x32.F32.E4M3.E4M3" in sass and "HGMMA" not in sass, variant
        # TMA brings rows, expanded weights from memory, and packed weights only through a ring.
        assert "UTMALDG.4D" not in sass and "UTMALDG.2D" in sass, variant
        in_registers = not variant["PACKED"] and not variant["AHEAD"]
        assert ("LDG.E.NA.128" in sass) == in_registers and ("LDG.E.NA.64" in sass) == bool(variant["AHEAD"]), variant
        code = [(int(at, 16), text) for at, text in INSTRUCTION.findall(sass)]
        count = Counter(re.sub(r"^@\S+\s+", "", text).split()[0].split(".")[0] for _, text in code)
        in_memory = [at for at, text in code if re.search(r"\b(STL|LDL)\b", text)]
        multiplying = loops_around(code, re.compile("QGMMA"))
        if variant["AHEAD"]:
            # Warps that expand have time.
            assert multiplying and len(in_memory) <= 20, variant
            assert not any(low <= at <= high for at in in_memory for low, high in multiplying), variant
        elif (variant["GATHER"] and not variant["PACKED"]) or int(variant["ROWS"]) > 128:
            # Values of a tile may be kept in memory: the loops over its blocks of K do not use them.
            expanding = loops_around(code, MASK)
            assert len(expanding) == 2 and multiplying, variant
            assert not any(low <= at <= high for at in in_memory for low, high in expanding | multiplying), variant
        else:
            assert not in_memory, variant
        # A thread expands 32 weights of each of two words of a unit: 8 selections a word, one for each of its scales.
        # There is code for two units, in one warpgroup or two.
        masks = [text for _, text in code if MASK.match(text)]
        words = 4 if few else 8
        selections = 8 + 32 // fmt.block
        assert words * selections <= count["PRMT"] <= words * selections + 16, (variant, count["PRMT"])
        assert len(masks) == words * (4 + 8), (variant, len(masks))


@gpu
@names
@gathers
@regimes
@pytest.mark.parametrize("k", [16 * 2, 288, 512, 640, 2880, 7168])
def test_ragged_groups(
    name: str,
    k: int,
    gather: bool,
    shape: TmaShape,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = expanded_weights(name, 392, k, rng, device)
    a = rows_for(shape, k, rng, gather, device)
    for num_sms in (None, 2, 4):
        compare_plain(a, w, shape, monkeypatch, num_sms=num_sms)


@gpu
@names
@pytest.mark.parametrize(("n", "k"), [(520, 512), (392, 640), (136, 400), (7168, 2048), (264, 32), (1032, 2880)])
def test_tall_tiles(
    name: str, n: int, k: int, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    k += k % 32 if name == "mxfp4" else 0
    w, a = expanded_weights(name, n, k, rng, device, biased=k == 640), of_all_sizes(k, rng, device)
    for num_sms in (None, 2, 4):
        for _ in range(10):
            compare_plain(a, w, TMA_TALL, monkeypatch, num_sms=num_sms)


@gpu
@names
@pytest.mark.parametrize("activation", [SwiGLU(), SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), GPT_OSS, SQUARED_RELU])
@pytest.mark.parametrize(("inner", "k"), [(384, 512), (208, 640), (2048, 7168), (80, 32)])
def test_activated_tall_tiles(
    name: str,
    activation: Activation,
    inner: int,
    k: int,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = activation.num_parts * inner
    w = expanded_weights(name, rows, k, rng, device, activation.gate_up, biased=activation is GPT_OSS)
    a = of_all_sizes(k, rng, device)
    for to in ("fp8_block", "bf16") * 5:
        compare_swiglu(a, w, activation, to, TMA_TALL, monkeypatch)


@gpu
@names
@regimes
@pytest.mark.parametrize("blocks", range(1, 9))
def test_tiles_that_end_with_any_stage(
    name: str,
    blocks: int,
    shape: TmaShape,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several tiles for every SM."""
    w = expanded_weights(name, 2 * 256 * 132, 128 * blocks, rng, device)
    a = make_rows("fp8_block", [130, 5], 128 * blocks, rng, device, num_experts=3, gather=blocks % 2 == 0)
    compare_plain(a, w, shape, monkeypatch, dtype=torch.bfloat16)


@gpu
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
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for k, inner in ((256, 384), (288, 320), (2880, 1536)):
        n = activation.num_parts * inner
        w = expanded_weights(name, n, k, rng, device, activation.gate_up, biased=gather)
        compare_swiglu(rows_for(shape, k, rng, gather, device), w, activation, to, shape, monkeypatch)


@gpu
@names
def test_all_shapes_give_the_same_bits(
    name: str, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = expanded_weights(name, 1544, 7168, rng, device)
    a = make_rows("fp8_block", [5, 1, 326], 7168, rng, device, num_experts=3)
    found = []
    for shape in EXPANDING_SHAPES:
        in_shape(monkeypatch, shape)
        found.append(tma_grouped_gemm(a, w, out_dtype=torch.float32))
    for other in found[1:]:
        assert_same_bits(other, found[0])
