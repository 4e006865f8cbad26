"""The Hopper GEMM in CUDA C++: what it compiles to, what it supports, and, on a GPU, its results against float64."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.bound_kernel import BoundKernel
from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.kernels.gemm import tma_gemm as tma
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import MAX_TMA_GROUPS, GemmKernel
from moe_runtime.kernels.gemm.shapes import (
    TILE_ROWS,
    TMA_DECODE,
    TMA_DOZEN,
    TMA_FEW,
    TMA_PREFILL,
    TMA_SHAPES,
    TmaShape,
)
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GEGLU_TANH,
    GPT_OSS,
    SILU,
    SQUARED_RELU,
    Activation,
    ExpertWeights,
    GateUpOrder,
    SwiGLU,
)
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import (
    UNIT,
    check_inside,
    exact_gemm,
    make_rows,
    random_weights,
)
from tests.support.gemm_checks import check_quantized, check_untouched, parts_of, poisoned
from tests.support.gemm_plans import empty_intermediate, planned, tma_grouped_gemm, tma_grouped_gemm_swiglu, tma_plan
from tests.support.kept_files import folder_for, made_once

REGIMES = list(TMA_SHAPES)
NAMES = ["fp8_block", "bf16"]
IDS = [shape.regime.name.lower() for shape in REGIMES]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs Hopper")]


def gpu(test: Any) -> Any:
    for mark in on_hopper:
        test = mark(test)
    return test


# --- without a GPU ---------------------------------------------------------------------------------------------------


def _variants() -> list[dict[str, int]]:
    """Every way in which a layer uses the kernel: both products, gathered and packed.

    Up before gate is left out: only the place in memory of a half is another then. Of interleaved gate and up, gathered
    rows and short blocks, each comes together with each of the others, but not all eight ways in every regime.
    """
    found = []
    ways = [(fmt, regime, gather, False) for fmt in (FP8_BLOCK, BF16) for regime in REGIMES for gather in (False, True)]
    for fmt, regime, gather, copied in [
        *ways,
        (FP8_BLOCK, TMA_PREFILL, False, True),
        (FP8_BLOCK, TMA_PREFILL, True, True),
    ]:
        common: dict[str, Any] = dict(gather=gather, extras=False, copied_scales=copied)
        code = 3 if fmt is FP8_BLOCK else 0
        if gather and copied:  # the loads of one, the products of the other
            found.append(tma.macros(fmt, regime, 32, activation=SILU, order=SILU.gate_up, out_code=code, **common))
            continue
        found.append(tma.macros(fmt, regime, 32, activation=None, order=None, out_code=0, **common))
        for order in (GateUpOrder.GATE_UP, GateUpOrder.INTERLEAVED):
            short = fmt is FP8_BLOCK and gather == (order is GateUpOrder.GATE_UP)
            more = {**common, "short_blocks": short}
            found.append(tma.macros(fmt, regime, 32, activation=SILU, order=order, out_code=code, **more))
        for formula in (GEGLU, GEGLU_TANH, SQUARED_RELU) if regime is TMA_PREFILL and (gather or copied) else ():
            more = {**common, "short_blocks": fmt is FP8_BLOCK and not copied}
            order = formula.gate_up
            found.append(tma.macros(fmt, regime, 32, activation=formula, order=order, out_code=code, **more))
    return found


def disassembled(cubin: bytes, cuobjdump: Path) -> str:
    """Text of the machine code, from the cache of tests where it is there: the disassembler takes 0.4 s to start."""

    def write(text: Path) -> None:
        binary = text.with_suffix(".cubin")
        binary.write_bytes(cubin)
        command = [str(cuobjdump), "-sass", str(binary)]
        text.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        binary.unlink()

    return made_once(folder_for("sass", cubin, triton.__version__) / "sass", write).read_text()


@pytest.mark.cpu_only
@pytest.mark.timeout(600)
def test_variants_multiply_in_tensor_cores_and_keep_their_sums_in_registers() -> None:
    """Memory may be used after the last product of the steps that all tiles take, where scales need another path."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.is_file():
        pytest.skip("this triton brings no cuobjdump")
    for variant in _variants():
        sass = disassembled(nvrtc.compile_source(tma.SOURCE, variant), cuobjdump)
        few = variant["ROWS"] < TILE_ROWS
        columns = variant["ROWS"] if few else 128 if variant["FP8"] else 256
        wgmma = f"QGMMA.64x{columns}x32.F32.E4M3.E4M3" if variant["FP8"] else f"HGMMA.64x{columns}x16.F32.BF16"
        assert wgmma in sass and "UTMALDG.4D" in sass, variant
        assert ("USETMAXREG" in sass) == (not few), variant
        assert ("UTMALDG.4D.MULTICAST" in sass) == (variant["CLUSTER"] == 2 and not few), variant
        # TMA copies all rows; threads copy scales alone, 4 bytes at a time.
        assert "UTMALDG.2D" in sass and "LDGSTS.E.BYPASS" not in sass, variant
        # Both blocks of a cluster tell each other the largest values of rows.
        assert ("STAS" in sass) == (few and variant["CLUSTER"] == 2), variant
        names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?(\w+)", sass, re.MULTILINE)
        products = [place for place, name in enumerate(names) if name in ("QGMMA", "HGMMA")]
        # Of FP8 the first four before the loop, which begins where the first half is under way, then those of both
        # halves, unrolled over the stages; then come those for other scales. Tiles of one half have theirs in bf16.
        # Tiles of few rows have two for each step of K, of 64 weight rows each.
        count = 8 if few else 4 + 8 * variant["STAGES"] if variant["FP8"] else 4
        others = 0 if few else 8 if variant["FP8"] else 4 * (not variant["GATED"])
        assert len(products) == count + others, variant
        assert not {"STL", "LDL"} & set(names if few else names[products[0] : products[count - 1]]), variant


@pytest.mark.parametrize(
    ("expected", "rows", "cluster"),
    [
        (0, 8, 1),
        (3 * 4, 8, 1),
        (3 * 4 + 1, 16, 1),
        (3 * 8 + 1, 32, 1),
        (3 * 16 + 1, 128, 1),
        (3 * 64, 128, 1),
        (3 * 64 + 1, 128, 2),
        (None, 128, 2),
    ],
)
def test_a_launch_takes_the_shape_of_the_rows_that_are_expected(
    expected: int | None, rows: int, cluster: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the room that there is."""
    cpu, launched = torch.device("cpu"), []
    a = replace(make_rows("bf16", [100, 101, 0], 128, rng, cpu, num_experts=1), expected_rows=expected)
    w = random_weights("bf16", 1, 128, 128, rng, cpu)
    monkeypatch.setattr(tma, "_tensor_map", lambda *sizes: None)
    monkeypatch.setattr(tma.nvrtc, "most_sms", lambda device: 8)
    monkeypatch.setattr(BoundKernel, "launch", lambda kernel, *_: launched.append(kernel.defines))
    tma_grouped_gemm(a, w)
    assert [(defines["ROWS"], defines["CLUSTER"]) for defines in launched] == [(rows, cluster)]


def test_operands_lie_on_16_byte_boundaries(rng: torch.Generator) -> None:
    cpu = torch.device("cpu")
    for name in NAMES:
        w = random_weights(name, 2, 64, 128, rng, cpu)
        a = make_rows(name, [3], 128, rng, cpu, num_experts=2)
        assert tma.aligned(a.rows, w.quants) and tma.aligned(a.rows, w.quants, torch.empty(3, 64))
        assert not tma.aligned(torch.zeros(4, 129).to(a.rows.dtype)[:, :128], w.quants)
        assert not tma.aligned(a.rows, w.quants, torch.empty(3, 66)[:, 1:65])
    scales = torch.empty(9, 4)
    assert tma.scales_aligned(scales, scales) and not tma.scales_aligned(scales, scales.view(-1)[1:])
    assert not tma.scales_aligned(None, scales) and not tma.scales_aligned(scales, None)


# --- results ---------------------------------------------------------------------------------------------------------


def _ragged(name: str, k: int, rng: torch.Generator, device: torch.device, gather: bool) -> GroupedRows:
    """Empty groups, skipped and inactive ones, odd and even numbers of tiles, tails on both sides of 64 rows."""
    sizes, ids = [3, 0, 70, 5, 1, 2, 300, 4, 193, 128], [2, 0, 0, -1, 1, 3, 2, 1, 0, 1]
    a = make_rows(name, sizes, k, rng, device, num_experts=3, expert_ids=ids, gather=gather, spare=9)
    return replace(a, num_active_experts=torch.tensor([9], dtype=torch.int32, device=device))


@gpu
@pytest.mark.parametrize("regime", REGIMES, ids=IDS)
@pytest.mark.parametrize("gather", [False, True], ids=["packed", "gathered"])
@pytest.mark.parametrize(
    ("name", "k"),
    [
        *(("fp8_block", 128 * blocks) for blocks in (1, 4, 5, 8, 12)),
        *(("fp8_block", k) for k in (16, 192, 288, 320, 400, 2880)),  # 400 are 4 blocks, the last one short
        ("bf16", 64),
        ("bf16", 200),
    ],
)
def test_ragged_groups(
    name: str, k: int, gather: bool, regime: TmaShape, rng: torch.Generator, device: torch.device
) -> None:
    """On all SMs, where few tiles are taken by halves, and on few, where most are whole."""
    check_ragged_groups(name, k, gather, regime, (None, 2, 4), rng, device)


def check_ragged_groups(
    name: str,
    k: int,
    gather: bool,
    regime: TmaShape,
    limits: tuple[int | None, ...],
    rng: torch.Generator,
    device: torch.device,
) -> None:
    """The same bits on each number of SMs of `limits`."""
    w = random_weights(name, 3, 392, k, rng, device)
    a = _ragged(name, k, rng, device, gather)
    exact = exact_gemm(a, w, device)
    found = []
    for num_sms in limits:
        out = poisoned(a.capacity + 2, 392, torch.bfloat16, device)
        before = out.clone()
        assert tma_grouped_gemm(a, w, out=out, shape=regime, num_sms=num_sms) is out
        check_inside(out, exact, UNIT[torch.bfloat16])
        check_untouched(out, before, exact.written)
        found.append(out[: a.capacity][torch.as_tensor(exact.written)])
    for num_sms, other in zip(limits[1:], found[1:], strict=True):
        assert_same_bits(other, found[0], f"{num_sms} SMs")


@gpu
@pytest.mark.parametrize("regime", REGIMES, ids=IDS)
@pytest.mark.parametrize("gather", [False, True], ids=["packed", "gathered"])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", NAMES)
def test_tiles_that_end_with_any_stage(
    name: str, blocks: int, gather: bool, regime: TmaShape, rng: torch.Generator, device: torch.device
) -> None:
    """Several tiles for every SM that end with any stage of the ring, which then is under way when the next begins."""
    check_tiles_of_stages(name, blocks, gather, regime, 2 * 256 * 132, rng, device)


def check_tiles_of_stages(
    name: str, blocks: int, gather: bool, regime: TmaShape, n: int, rng: torch.Generator, device: torch.device
) -> None:
    """Results of `n` columns whose tiles take `blocks` stages."""
    k = blocks * (128 if name == "fp8_block" else 64)
    w = random_weights(name, 2, n, k, rng, device)
    a = make_rows(name, [130, 5], k, rng, device, num_experts=2, gather=gather)
    check_inside(tma_grouped_gemm(a, w, shape=regime), exact_gemm(a, w, device), UNIT[torch.bfloat16])


@gpu
def test_bands_of_columns(rng: torch.Generator, device: torch.device) -> None:
    """More columns than a band has, and two pairs of row tiles and one alone."""
    columns = (TMA_PREFILL.band + 2) * 256 + 8
    w = random_weights("fp8_block", 2, columns, 128, rng, device)
    a = make_rows("fp8_block", [5, 520], 128, rng, device, num_experts=2)
    exact = exact_gemm(a, w, device)
    for num_sms in (None, 6):
        out = tma_grouped_gemm(a, w, shape=TMA_PREFILL, num_sms=num_sms)
        check_inside(out, exact, UNIT[torch.bfloat16])


@gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("order", [None, *GateUpOrder])
def test_epilogue(
    order: GateUpOrder | None, dtype: torch.dtype, name: str, rng: torch.Generator, device: torch.device
) -> None:
    """Row scale, expert scale (of gate and up apart), bias, and each output type."""
    # Blocks of gate and up that start apart are left to another kernel, if there is no activation.
    n = 288 if name == "bf16" or order in (None, GateUpOrder.INTERLEAVED) else 512
    bias = torch.randn(2, n, generator=rng)
    w = random_weights(name, 2, n, 256, rng, device, gate_up=order or False, bias=bias)
    shape = (2,) if order is None else (2, 2)
    w = replace(w, expert_scales=(torch.rand(shape, generator=rng) + 0.5).to(device))
    a = make_rows(name, [5, 66, 200], 256, rng, device, num_experts=2)
    a = replace(a, row_scale=(torch.rand(a.capacity, generator=rng) + 0.5).to(device))
    out = tma_grouped_gemm(a, w, out_dtype=dtype)
    assert out.dtype == dtype
    check_inside(out, exact_gemm(a, w, device), UNIT[dtype])


@gpu
@pytest.mark.parametrize("regime", REGIMES, ids=IDS)
@pytest.mark.parametrize(("name", "to"), [("fp8_block", "fp8_block"), ("fp8_block", "bf16"), ("bf16", "bf16")])
@pytest.mark.parametrize(
    "activation",
    [
        SwiGLU(),
        SwiGLU(GateUpOrder.UP_GATE, alpha=0.7),
        SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5),
        GPT_OSS,
        GEGLU,
        GEGLU_TANH,
        SQUARED_RELU,
        Activation(GateUpOrder.UP_GATE, limit=0.5, limit_on="function"),
    ],
    ids=["silu", "up_gate", "limit", "gpt_oss", "gelu", "gelu_tanh", "relu2", "function"],
)
def test_swiglu_requantized(
    activation: Activation, name: str, to: str, regime: TmaShape, rng: torch.Generator, device: torch.device
) -> None:
    inner = 40 if name == "bf16" else 384  # an odd number of column tiles, so that the last of a cluster is none
    n = activation.num_parts * inner
    w = torch.randn(3, n, 128, generator=rng) * 0.2
    w[:, parts_of(activation, n)[-1]] *= 3
    bias = torch.randn(3, n, generator=rng) if activation.up_offset or not activation.gated else None
    weights = ExpertWeights.quantize(w, name, gate_up=activation.gate_up or False, bias=bias, engine="torch")
    weights = weights.to(device)
    for gather in (False, True):
        a = _ragged(name, 128, rng, device, gather)
        hidden = tma_grouped_gemm_swiglu(a, weights, activation, out_format=to, shape=regime)
        assert hidden.num_columns == inner and hidden.row_index is None
        check_quantized(hidden, exact_gemm(a, weights, device), activation, 1.0)


@gpu
@pytest.mark.parametrize("regime", REGIMES, ids=IDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("k", "inner"), [(192, 320), (288, 352), (400, 192), (16, 80), (2880, 192)])
@pytest.mark.parametrize(
    "activation",
    [SwiGLU(), SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), GPT_OSS, SQUARED_RELU],
    ids=["silu", "up_gate", "gpt_oss", "relu2"],
)
def test_swiglu_in_short_blocks(
    activation: Activation, k: int, inner: int, name: str, regime: TmaShape, rng: torch.Generator, device: torch.device
) -> None:
    """The last block of K, of gate, of up and of the result is short, and its scale is that of its own values."""
    n, order, tail = activation.num_parts * inner, activation.gate_up, inner // 128 * 128
    for factor in (1e-4, 1e4):
        w = torch.randn(3, n, k, generator=rng) * 0.2
        for rows in parts_of(activation, n):
            w[:, rows][:, tail:] *= factor
        bias = torch.randn(3, n, generator=rng) * 1e-4 if activation.up_offset or order is None else None
        weights = ExpertWeights.quantize(w, name, gate_up=order or False, bias=bias, engine="torch").to(device)
        a = _ragged(name, k, rng, device, gather=factor > 1)
        out, _ = empty_intermediate(a, weights, activation, "fp8_block", None)
        assert out.scales is not None
        for tensor in (out.rows, out.scales):
            tensor.view(torch.uint8).fill_(0xA5)
        plan = tma_plan(a, weights, out_format=FP8_BLOCK, activation=activation, shape=regime)
        tma.multiply(a, weights, plan, out=out.rows, result=out, activation=activation)
        exact = exact_gemm(a, weights, device)
        check_quantized(out, exact, activation, 1.0)
        untouched = ~torch.as_tensor(exact.written)
        for tensor in (out.rows, out.scales):
            assert (tensor.view(torch.uint8).cpu()[untouched] == 0xA5).all()


def test_blocks_that_tiles_do_not_fit_are_left_to_another_kernel(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(tma.nvrtc, "most_sms", lambda device: 8)

    def kernel(order: GateUpOrder | None, gated: GateUpOrder | None, inner: int, name: str = "fp8_block") -> GemmKernel:
        w = random_weights(name, 1, 2 * inner, 320, rng, cpu, gate_up=order or False)
        a = make_rows(name, [3], 320, rng, cpu, num_experts=1)
        if gated is None:
            return planned(a, w).kernel
        return planned(a, w, out_format=FP8_BLOCK, activation=SwiGLU(gated)).kernel

    above, interleaved = GateUpOrder.UP_GATE, GateUpOrder.INTERLEAVED
    for inner in (192, 256, 320):
        whole = inner == 256
        assert kernel(above, above, inner) is kernel(interleaved, interleaved, inner) is GemmKernel.TMA
        assert kernel(None, None, inner) is kernel(None, interleaved, inner) is GemmKernel.TMA
        assert kernel(interleaved, None, inner) is kernel(above, None, inner, "bf16") is GemmKernel.TMA
        assert (kernel(None, above, inner) is GemmKernel.TMA) == whole
        assert (kernel(above, None, inner) is GemmKernel.TMA) == whole


@gpu
def test_requantization_is_that_of_the_quantizer(rng: torch.Generator, device: torch.device) -> None:
    """Bit for bit, of the fp32 numbers that the same kernel stores when asked for them."""
    inner, k, activation = 512, 256, SwiGLU()
    w = random_weights("fp8_block", 2, 2 * inner, k, rng, device, gate_up=True)
    a = make_rows("fp8_block", [150, 61, 1], k, rng, device, num_experts=2)
    assert a.scales is not None and w.scales is not None
    rows, quants, scales, w_scales = (t.clone() for t in (a.rows, w.quants, a.scales, w.scales))
    # In one group gates are 32, whose sigmoid is 1, and up is -4 to 4 times a number of the row. 3/4 of the largest is
    # a tie, which a product with the inverse of the scale misses.
    x, m = torch.zeros(61, k), torch.zeros(2 * inner, k)
    x[:, 0], m[activation.order.gate_rows(2 * inner), 0] = 4, 8
    x[:, 1:3] = torch.randint(16, (61, 2), generator=rng) * torch.tensor([16, 1])
    m[activation.order.up_rows(2 * inner), 1:3] = torch.randint(-4, 5, (inner, 1), generator=rng).float()
    rows[150:211], quants[1] = x.to(rows.dtype).to(device), m.to(rows.dtype).to(device)
    scales[150:211], w_scales[1] = 1.0, 1.0
    scales[7] *= 1e-6  # blocks below the least scale
    scales[9, 0], scales[160, 1] = float("nan"), float("inf")
    a, w = replace(a, rows=rows, scales=scales), replace(w, quants=quants, scales=w_scales)
    h = torch.empty(a.capacity, inner, device=device)
    plan = tma_plan(a, w, out_format=FP8_BLOCK)
    tma.TmaGemm(a, w, plan, out=h, activation=activation).launch(a, h)
    hidden = tma_grouped_gemm_swiglu(a, w, activation, out_format="fp8_block")
    want = quantize_rows(h.cpu(), "fp8_block", engine="torch")
    assert torch.equal(h[150:159] / 32, (h[150:159] / 32).round())
    assert hidden.scales is not None and want.scales_RV is not None
    assert hidden.scales.isnan().sum() >= 8
    assert_same_bits(hidden.rows, want.quants_RK, "codes")
    assert_same_bits(hidden.scales, want.scales_RV, "scales")


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_same_bits_in_any_company(name: str, rng: torch.Generator, device: torch.device) -> None:
    """In all regimes, alone, among others, gathered, and again."""
    k, n = 1024, 520
    w = random_weights(name, 2, n, k, rng, device)
    x = torch.randn(331, k, generator=rng)
    many = make_rows(name, [5, 326], k, rng, device, num_experts=2, x=x)
    one = make_rows(name, [0, 1], k, rng, device, num_experts=2, x=x[300:301])
    gathered = make_rows(name, [5, 326], k, rng, device, num_experts=2, x=x, gather=True)
    want = tma_grouped_gemm(many, w, out_dtype=torch.float32, shape=TMA_PREFILL)
    for regime in REGIMES:
        assert_same_bits(tma_grouped_gemm(many, w, out_dtype=torch.float32, shape=regime), want, regime.regime.name)
        assert_same_bits(tma_grouped_gemm(gathered, w, out_dtype=torch.float32, shape=regime), want, "gathered")
        assert_same_bits(tma_grouped_gemm(one, w, out_dtype=torch.float32, shape=regime)[0], want[300], "alone")


@gpu
def test_scales_whose_product_leaves_fp32(rng: torch.Generator, device: torch.device) -> None:
    """A row scale of 2^-100 and a weight scale of 2^90 are exact, NaN stays in its row, neighbours keep their bits."""
    k, n, far = 384, 256, 5
    x = torch.randint(-3, 4, (70, k), generator=rng).float()
    m = torch.randint(-3, 4, (1, n, k), generator=rng).float()
    a = make_rows("fp8_block", [70], k, rng, device, num_experts=1, x=x * 0 + 1)
    w = ExpertWeights.quantize(m, "fp8_block", engine="torch").to(device)
    ones = torch.ones(70, 3, device=device)
    a = replace(a, rows=x.to(torch.float8_e4m3fn).to(device), scales=ones)
    w = replace(w, quants=m.to(torch.float8_e4m3fn).to(device), scales=torch.ones(1, 2, 3, device=device))
    exact = (x.double() @ m[0].double().T).float()
    got = tma_grouped_gemm(a, w, out_dtype=torch.float32)
    assert_same_bits(got, exact, "ones")
    scales = ones.clone()
    scales[far] = 2.0**-100
    scales[far + 1, 1] = float("nan")
    got = tma_grouped_gemm(replace(a, scales=scales), w, out_dtype=torch.float32)
    assert_same_bits(got[far], exact[far] * 2.0**-100, "far row")
    assert got[far + 1].isnan().all()
    others = [i for i in range(70) if i not in (far, far + 1)]
    assert_same_bits(got[others], exact[others], "neighbours")
    # Their product is 2^-140, which would keep few bits; one after the other they lose none before the result.
    scales = torch.full((70, 3), 2.0**-70, device=device)
    far_weights = torch.full((1, 2, 3), 1.5 * 2.0**-70, device=device)
    huge = replace(w, quants=(m * 64).to(torch.float8_e4m3fn).to(device), scales=far_weights)
    a = replace(a, rows=(x * 64).to(torch.float8_e4m3fn).to(device), scales=scales * 1.5)
    got = tma_grouped_gemm(a, huge, out_dtype=torch.float32)
    want = (exact.double() * 2.0**12 * 2.25 * 2.0**-140).float()
    assert ((got.cpu().double() - want.cpu().double()).abs() <= 3 * 2.0**-149).all()


@gpu
@pytest.mark.parametrize("k", [256, 512])
def test_far_scales_give_the_same_bits_in_all_regimes(k: int, rng: torch.Generator, device: torch.device) -> None:
    """Whichever columns share a tile: a pair of scales is taken apart by what it is, not by its neighbours."""
    n = 648
    a = make_rows("fp8_block", [70, 193], k, rng, device, num_experts=2)
    w = random_weights("fp8_block", 2, n, k, rng, device)
    assert a.scales is not None and w.scales is not None
    scales = [t.clone() for t in (a.scales, w.scales)]
    scales[0][::7] *= 2.0**-60
    scales[1][:, 1] *= 2.0**-66
    scales[1][:, 4] *= 2.0**70
    a, w = replace(a, scales=scales[0]), replace(w, scales=scales[1])
    first, *others = (tma_grouped_gemm(a, w, out_dtype=torch.float32, shape=regime) for regime in REGIMES)
    for other in others:
        assert_same_bits(other, first)
    check_inside(first, exact_gemm(a, w, device), UNIT[torch.float32])


@gpu
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e38, float("nan")])
def test_scales_past_the_last_row_may_be_anything(value: float, rng: torch.Generator, device: torch.device) -> None:
    """They come with those of rows, and what is one of them says nothing of the others."""
    a = make_rows("fp8_block", [70, 193, 0, 260], 1024, rng, device, num_experts=4, spare=30)
    w = random_weights("fp8_block", 4, 520, 1024, rng, device)
    plan = tma_plan(a, w, shape=TMA_PREFILL)
    assert a.scales is not None and plan.tma is not None and plan.tma.copies_scales
    want = tma_grouped_gemm(a, w, shape=TMA_DECODE)[:523]
    other = a.scales.clone()
    other[523:] = value
    for scales in (a.scales, other):
        got = tma_grouped_gemm(replace(a, scales=scales), w, shape=TMA_PREFILL)
        assert_same_bits(got[:523], want)


@gpu
def test_nothing_to_do_and_rows_past_the_capacity(rng: torch.Generator, device: torch.device) -> None:
    w = random_weights("fp8_block", 2, 256, 128, rng, device)
    a = make_rows("fp8_block", [3, 190, 5], 128, rng, device, num_experts=2)
    want = tma_grouped_gemm(a, w)
    for capacity in (140, 3, 0):
        out = poisoned(198, 256, torch.bfloat16, device)
        before = out.clone()
        tma_grouped_gemm(replace(a, capacity=capacity), w, out=out)
        assert_same_bits(out[:capacity], want[:capacity], "rows that fit")
        assert_same_bits(out[capacity:], before[capacity:], "rows past the capacity")
    for active in (0, torch.tensor([0], dtype=torch.int32, device=device)):
        out = poisoned(198, 256, torch.bfloat16, device)
        before = out.clone()
        tma_grouped_gemm(replace(a, num_active_experts=active), w, out=out)
        assert_same_bits(out, before, "no active groups")


@gpu
def test_many_groups(rng: torch.Generator, device: torch.device) -> None:
    """Many more groups than a warp has lanes, most of them empty or of a few rows."""
    w = random_weights("bf16", 3, 64, 64, rng, device)
    sizes = [(7 * g) % 5 for g in range(MAX_TMA_GROUPS)]
    a = make_rows("bf16", sizes, 64, rng, device, num_experts=3)
    check_inside(tma_grouped_gemm(a, w), exact_gemm(a, w, device), UNIT[torch.bfloat16])


@gpu
@pytest.mark.parametrize("shape", [TMA_FEW, TMA_DOZEN], ids=["few", "dozen"])
@pytest.mark.parametrize("name", NAMES)
def test_late_loads_do_not_change_the_bits_of_a_few_rows(
    name: str, shape: TmaShape, rng: torch.Generator, device: torch.device
) -> None:
    """Nor does the second product put off its loads when the first has ended, however long it may."""
    inner, columns, k = 640, 264, 1152
    gate_up = random_weights(name, 3, 2 * inner, k, rng, device, gate_up=True)
    down = random_weights(name, 3, columns, inner, rng, device)
    a = make_rows(name, [1, 0, 20, 3, 1], k, rng, device, num_experts=3, expert_ids=[2, 0, 1, 0, -1], gather=True)
    results, seconds = [], []
    # On a GPU that others use, a call may take long for other reasons.
    for ns in (0, 300, *[2 * 10**9] * 3):
        results.append(poisoned(a.capacity, columns, torch.bfloat16, device))
        began = time.perf_counter()
        hidden = tma_grouped_gemm_swiglu(a, gate_up, SwiGLU(), out_format=name, shape=shape)
        tma_grouped_gemm(
            replace(hidden, order=replace(hidden.order, weights_after_ns=ns)), down, out=results[-1], shape=shape
        )
        assert_same_bits(results[0], results[-1], "second product")
        seconds.append(time.perf_counter() - began)
    assert min(seconds[-3:]) < 1.9
    check_inside(results[0], exact_gemm(hidden, down, device), UNIT[torch.bfloat16])


@gpu
def test_captured_in_a_graph(rng: torch.Generator, device: torch.device) -> None:
    """Offsets are read when the graph is replayed."""
    w = random_weights("fp8_block", 2, 256, 256, rng, device)
    a = make_rows("fp8_block", [200, 100], 256, rng, device, num_experts=2)
    out = torch.zeros(300, 256, dtype=torch.bfloat16, device=device)
    tma_grouped_gemm(a, w, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tma_grouped_gemm(a, w, out=out)
    a.group_offsets.copy_(torch.tensor([0, 20, 300], dtype=torch.int32))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out, tma_grouped_gemm(a, w), "replayed with other offsets")
