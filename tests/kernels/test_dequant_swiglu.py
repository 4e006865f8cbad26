"""SwiGLU and requantization after weights dequantized in registers: against float64, and against the Triton kernel."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.kernels.gemm import dequant_tokens
from moe_runtime.kernels.gemm.arguments import DEFAULT_INTERMEDIATE_GSF, Intermediate
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.shapes import DEQUANT_DECODE as DECODE
from moe_runtime.kernels.gemm.shapes import DEQUANT_FEW as FEW
from moe_runtime.kernels.gemm.shapes import DEQUANT_FEW_EVEN as FEW_EVEN
from moe_runtime.kernels.gemm.shapes import DEQUANT_MIDDLE as MIDDLE
from moe_runtime.kernels.gemm.shapes import DEQUANT_PREFILL as PREFILL
from moe_runtime.kernels.gemm.shapes import MANY_TOKENS, DequantShape
from moe_runtime.kernels.gemm.weights import (
    GEGLU_TANH,
    GPT_OSS,
    SQUARED_RELU,
    Activation,
    ExpertWeights,
    GateUpOrder,
    SwiGLU,
)
from tests.conftest import HAS_GPU
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import (
    UNIT,
    Array,
    bits,
    check_inside,
    exact_gemm,
    make_rows,
    random_weights,
    scale_rows,
    swizzled,
)
from tests.support.gemm_checks import (
    SHAPES,
    check_quantized,
    for_shape,
    in_each_shape,
    integer_operands,
    parts_of,
    poison_intermediates,
    poisoned,
    unit_scales,
)
from tests.support.gemm_plans import choose
from tests.support.gemm_plans import dequant_tokens as dequantized_tokens

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(HAS_GPU and not IS_HOPPER, reason="prepacked weights are for Hopper")

INNER = {"bf16": 40, "mxfp8": 160, "nvfp4": 144}
"""Columns of the result: no multiple of the 32 of a unit where the format allows."""


@dataclass(frozen=True)
class Case:
    """Formats of weights, tokens and result; the activation; the shape on the GPU."""

    weight: str
    token: str
    out: str
    activation: Activation
    shape: DequantShape

    def __str__(self) -> str:
        order, function = self.activation.gate_up, self.activation.function.value
        function = f"{function}-softcaps" if self.activation.up_softcap else function
        function = "limited-silu" if self.activation.limit_on == "function" else function
        formula = function if order is None else order.value if function == "silu" else f"{function}-{order.value}"
        parts = (self.weight, self.token, self.out, formula)
        return "-".join((*parts, next(name for name, shape in SHAPES.items() if shape is self.shape)))


CASES = [
    Case("nvfp4", "nvfp4", "nvfp4", SwiGLU(), DECODE),
    Case("nvfp4", "nvfp4", "nvfp4", SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5), PREFILL),
    Case("nvfp4", "nvfp4", "mxfp8", GPT_OSS, DECODE),
    Case("nvfp4", "nvfp4", "bf16", SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), PREFILL),
    Case("nvfp4", "bf16", "bf16", SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5), DECODE),
    Case("nvfp4", "bf16", "nvfp4", SwiGLU(), PREFILL),
    Case("nvfp4", "nvfp4", "nvfp4", SwiGLU(GateUpOrder.UP_GATE), MIDDLE),
    Case("nvfp4", "bf16", "bf16", GPT_OSS, MIDDLE),
    Case("mxfp8", "mxfp8", "mxfp8", SwiGLU(), MIDDLE),
    Case("mxfp8", "mxfp8", "mxfp8", SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), DECODE),
    Case("mxfp8", "mxfp8", "mxfp8", GPT_OSS, PREFILL),
    Case("mxfp8", "mxfp8", "bf16", SwiGLU(), DECODE),
    Case("mxfp8", "mxfp8", "nvfp4", SwiGLU(), DECODE),
    Case("mxfp4", "bf16", "bf16", GPT_OSS, DECODE),
    Case("mxfp4", "bf16", "bf16", GPT_OSS, PREFILL),
    Case("mxfp4", "mxfp8", "mxfp8", GPT_OSS, MIDDLE),
    Case("mxfp4", "mxfp8", "mxfp8", SwiGLU(), PREFILL),
    Case("nvfp4", "nvfp4", "nvfp4", GEGLU_TANH, PREFILL),
    Case("mxfp8", "mxfp8", "mxfp8", Activation(GateUpOrder.INTERLEAVED, function="gelu"), MIDDLE),
    Case("mxfp4", "bf16", "bf16", Activation(function="gelu_tanh", limit=0.5, up_offset=1.0), DECODE),
    Case("nvfp4", "nvfp4", "nvfp4", SQUARED_RELU, DECODE),
    Case("nvfp4", "bf16", "bf16", SQUARED_RELU, PREFILL),
    Case("mxfp8", "mxfp8", "mxfp8", SQUARED_RELU, PREFILL),
    Case("mxfp4", "mxfp8", "mxfp8", SQUARED_RELU, MIDDLE),
    Case("mxfp4", "bf16", "bf16", Activation(function="gelu", gated=False), DECODE),
    Case("nvfp4", "nvfp4", "nvfp4", Activation(gate_softcap=2.0, up_softcap=4.0), DECODE),
    Case("nvfp4", "nvfp4", "nvfp4", Activation(limit=0.5, limit_on="function"), MIDDLE),
    Case("nvfp4", "bf16", "bf16", Activation(GateUpOrder.UP_GATE, limit=0.5, limit_on="function"), PREFILL),
    Case("mxfp8", "mxfp8", "mxfp8", Activation(GateUpOrder.UP_GATE, limit=0.5, limit_on="function"), DECODE),
    Case("mxfp4", "bf16", "bf16", Activation(GateUpOrder.INTERLEAVED, limit=0.5, limit_on="function"), DECODE),
    Case("mxfp4", "mxfp8", "mxfp8", Activation(limit=0.5, limit_on="function"), PREFILL),
    Case("nvfp4", "fp8_block", "bf16", SwiGLU(), PREFILL),
    Case("nvfp4", "fp8_block", "bf16", SQUARED_RELU, MIDDLE),
    Case("mxfp4", "fp8_block", "bf16", GPT_OSS, MIDDLE),
    Case("mxfp4", "fp8_block", "bf16", GPT_OSS, DECODE),
    Case("mxfp4", "fp8_block", "mxfp8", Activation(GateUpOrder.UP_GATE, function="gelu"), PREFILL),
]


FORMATS_OF_PRODUCTS = [
    ("nvfp4",) * 3,
    ("nvfp4", "bf16", "bf16"),
    ("mxfp8",) * 3,
    ("mxfp4", "bf16", "bf16"),
    ("mxfp4", "mxfp8", "mxfp8"),
    ("nvfp4", "fp8_block", "bf16"),
    ("mxfp4", "fp8_block", "bf16"),
]
"""Of weights, tokens and the result of the first product."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_swiglu_requantized(case: Case, rng: torch.Generator, device: torch.device) -> None:
    """Activation and requantization; gate and up with scales of their own, skipped and empty groups, gathering."""
    k, inner, activation = 128, INNER[case.out], case.activation
    n = activation.num_parts * inner
    m = torch.randn(2, n, k, generator=rng) * 0.2
    m[:, parts_of(activation, n)[-1]] *= 3
    bias = torch.randn(2, n, generator=rng) if activation.up_offset or not activation.gated else None
    w = ExpertWeights.quantize(m, case.weight, gate_up=activation.gate_up or False, bias=bias, engine="torch")
    w = w.to(device)
    sizes = [5, 0, 3, 66]
    a = make_rows(case.token, sizes, k, rng, device, num_experts=2, expert_ids=[1, 0, -1, 0], gather=True, spare=7)
    a = for_shape(a, case.shape)
    prepacked, exact = PrepackedWeights.prepack(w), exact_gemm(a, w, device)
    assert exact.written.sum() == 71
    if case.out != "nvfp4":
        check_quantized(grouped_gemm_swiglu(a, prepacked, activation, out_format=case.out), exact, activation, 1.0)
        return
    tensor = torch.tensor([2.0**120], device=device)
    for given, gsf in ((None, DEFAULT_INTERMEDIATE_GSF), (11.0, 11.0), (tensor, 2.0**100)):
        hidden = grouped_gemm_swiglu(a, prepacked, activation, out_format="nvfp4", out_gsf=given)
        assert hidden.num_columns == inner and hidden.capacity == a.capacity and hidden.row_index is None
        check_quantized(hidden, exact, activation, gsf)
        assert hidden.row_scale is not None
        want = torch.full((a.capacity,), float(np.float32(1) / np.float32(gsf)))
        assert_same_bits(hidden.row_scale, want, "row_scale")


def test_a_negative_encode_scale_turns_the_signs_of_codes(rng: torch.Generator, device: torch.device) -> None:
    """As a tensor, of which the host knows nothing: scales stay positive, rows and codes have the other sign."""
    if not IS_HOPPER:
        pytest.skip("what others make of it is theirs")
    sizes, inner = [5, 9], 128
    w = PrepackedWeights.prepack(random_weights("nvfp4", 2, 2 * inner, 128, rng, device, gate_up=True))
    down = PrepackedWeights.prepack(random_weights("nvfp4", 2, 64, inner, rng, device))
    a = make_rows("nvfp4", sizes, 128, rng, device, num_experts=2)
    for then in (None, down):
        found = []
        for gsf in (11.0, -11.0):
            given = torch.tensor([gsf], device=device)
            found.append(grouped_gemm_swiglu(a, w, SwiGLU(), out_format="nvfp4", out_gsf=given, then=then))
        want, got = found
        assert want.row_scale is not None and got.row_scale is not None
        assert_same_bits(got.row_scale, -want.row_scale, "row_scale")
        if then is not None:
            continue
        assert want.scales is not None and got.scales is not None
        rows = swizzled(scale_rows(want)[: sum(sizes)], inner // 16)
        scales = [bits(hidden.scales).reshape(-1)[rows] for hidden in found]
        assert (scales[0] > 0).all() and (scales[0] < 127).all()
        assert_same_bits(torch.from_numpy(scales[1]), torch.from_numpy(scales[0]), "scales")
        count = sum(sizes)
        assert_same_bits(got.rows[:count].view(torch.uint8), want.rows[:count].view(torch.uint8) ^ 0x88, "codes")
    results = [poisoned(a.capacity, 64, torch.bfloat16, device) for _ in found]
    for hidden, result in zip(found, results, strict=True):
        assert hidden.dequantized is not None
        grouped_gemm(hidden, down, out=result)
    # Sums that are 0 are +0 either way, and then have the sign of the row's scale; to add 0 takes that away.
    assert_same_bits(*(result + 0.0 for result in results), "second product")


@pytest.mark.parametrize("order", GateUpOrder)
def test_expert_scales_of_gate_and_up_alike(order: GateUpOrder, rng: torch.Generator, device: torch.device) -> None:
    """`[E]` where `[E, 2]` would hold the same number twice."""
    w = random_weights("nvfp4", 2, 96, 64, rng, device, gate_up=order)
    a = make_rows("nvfp4", [9, 3], 64, rng, device, num_experts=2)
    scales = torch.tensor([0.01, 0.03], device=device)
    one, two = (
        grouped_gemm_swiglu(a, PrepackedWeights.prepack(replace(w, expert_scales=s)), SwiGLU(order), out_format="nvfp4")
        for s in (scales, scales[:, None].expand(2, 2).contiguous())
    )
    assert_same_bits(one.rows, two.rows, "rows")
    check_quantized(
        one, exact_gemm(a, replace(w, expert_scales=scales), device), SwiGLU(order), DEFAULT_INTERMEDIATE_GSF
    )


@in_each_shape
@pytest.mark.parametrize("activation", [SwiGLU(), SQUARED_RELU], ids=["silu", "relu2"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_nothing_but_the_result_is_written(
    name: str,
    activation: Activation,
    shape: DequantShape,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding of scales, skipped groups and gaps stay as they were; units reach past the `I` columns."""
    if not IS_HOPPER:
        pytest.skip("the reference writes whole blocks of scales")
    poison_intermediates(monkeypatch)
    inner = INNER[name]
    w = random_weights(name, 2, activation.num_parts * inner, 128, rng, device, gate_up=activation.gate_up or False)
    sizes, ids = [130, 3, 0, 5], [0, -1, 1, 1]
    a = make_rows(name, sizes, 128, rng, device, num_experts=2, expert_ids=ids, spare=7, sparse_scales=True)
    a = for_shape(a, shape)
    hidden = grouped_gemm_swiglu(a, PrepackedWeights.prepack(w), activation, out_format=name)
    exact = exact_gemm(a, w, device)
    check_quantized(hidden, exact, activation, DEFAULT_INTERMEDIATE_GSF if name == "nvfp4" else 1.0)
    assert (bits(hidden.rows)[~exact.written] == 0xA5).all()
    assert hidden.scales is not None
    raw = bits(hidden.scales).reshape(-1).copy()
    raw[swizzled(scale_rows(hidden)[exact.written], hidden.format.scale_columns(inner))] = 0xA5
    assert (raw == 0xA5).all()


def _codes_and_scales(hidden: GroupedRows, written: Array) -> tuple[Array, Array]:
    """Codes `[rows, I]` of the written rows as they are ordered by value, and the bytes of their scales."""
    quants = bits(hidden.rows)[written]
    if hidden.format.name == "nvfp4":
        quants = np.stack([quants & 15, quants >> 4], -1).reshape(len(quants), -1)
    sign_bit = {"nvfp4": 8, "mxfp8": 0x80, "bf16": 0x8000}[hidden.format.name]
    magnitude = (quants & (sign_bit - 1)).astype(np.int64)
    codes = np.where(quants & sign_bit, -magnitude, magnitude)
    if hidden.scales is None:
        return codes, np.zeros((len(codes), 1), np.uint8)
    places = swizzled(scale_rows(hidden), hidden.format.scale_columns(hidden.num_columns))
    return codes, bits(hidden.scales).reshape(-1)[places][written]


def _exact_sums(
    name: str, inner: int, order: GateUpOrder, rng: torch.Generator, device: torch.device
) -> tuple[GroupedRows, ExpertWeights]:
    """Rows of `K = 256` and weights of gate and up whose sums of products no fp32 arithmetic rounds; any scales."""
    a, w, _ = integer_operands(name, rng, device, n=2 * inner, order=order)
    a = replace(a, row_scale=torch.rand(a.capacity, generator=rng).to(device) / 64)
    if name == "nvfp4":
        a, w = replace(a, scales=unit_scales(a.scales)), replace(w, scales=unit_scales(w.scales))
    return a, replace(w, expert_scales=torch.tensor([[1.0, 0.5], [0.25, 2.0]], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [SwiGLU(), GPT_OSS], ids=["silu", "gpt_oss"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_exact_sums_become_the_codes_of_the_triton_kernel(
    name: str, activation: SwiGLU, rng: torch.Generator, device: torch.device
) -> None:
    """Where no sum is rounded, both kernels do the same fp32 operations from there on, but for a quotient.

    One multiplies with an approximate inverse, so that the last bits differ. With e4m3 one of some 2^20 numbers is then
    on the other side of the border of a code.
    """
    a, w = _exact_sums(name, INNER[name], activation.order, rng, device)
    found = grouped_gemm_swiglu(a, PrepackedWeights.prepack(w), activation, out_format=name)
    wanted = grouped_gemm_swiglu(a, w, activation, out_format=name, engine="triton")
    everything = np.ones(a.capacity, bool)
    codes, got = _codes_and_scales(found, everything)
    wanted_codes, want = _codes_and_scales(wanted, everything)
    assert_same_bits(torch.from_numpy(got), want, "scales")
    difference = np.abs(codes - wanted_codes)
    assert difference.max() <= 1 and (difference > 0).sum() <= 3


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["nvfp4", "mxfp8", "bf16"])
def test_nearly_all_codes_are_those_of_the_triton_kernel(out: str, rng: torch.Generator, device: torch.device) -> None:
    """fp32 sums in another order, 2^-20 apart: one number in some thousands crosses the border of a code, by one step.

    The scale of a block crosses as rarely; where it does, all codes of the block may differ, and are not compared.
    """
    k, inner = 1024, 512
    w = random_weights("nvfp4", 4, 2 * inner, k, rng, device, gate_up=True)
    a = make_rows("nvfp4", [64, 32, 1, 160], k, rng, device, num_experts=4)
    x = replace(w, expert_scales=None if w.expert_scales is None else w.expert_scales * 0.05)
    written = np.ones(a.capacity, bool)
    got, got_scales = _codes_and_scales(
        grouped_gemm_swiglu(a, PrepackedWeights.prepack(x), SwiGLU(), out_format=out), written
    )
    want, want_scales = _codes_and_scales(grouped_gemm_swiglu(a, x, SwiGLU(), out_format=out, engine="triton"), written)
    other_scale = got_scales != want_scales
    assert other_scale.mean() < 1e-3
    compared = ~other_scale.repeat(inner // other_scale.shape[1], 1)
    difference = np.abs(got - want)[compared]
    print(f"{(difference > 0).mean():.2e} of the codes differ, {other_scale.sum()} of {other_scale.size} scales")
    # A bf16 step is 2^-8 of a number, its sums are 2^-20 of their terms apart.
    assert difference.max() <= 1 if out != "bf16" else np.median(difference) == 0
    assert (difference > 0).mean() < (1e-2 if out == "bf16" else 1e-3)


def _blocks(dequantized: torch.Tensor, a: GroupedRows) -> torch.Tensor:
    """The rows that groups own, out of their blocks of 8, uint8 `[rows, units of K, 8, 16]`; or as they lie there."""
    if dequantized.ndim == 2:
        words = dequantized[: int(a.group_offsets[-1])].cpu().view(torch.int32).unflatten(1, (-1, 4, 8))
        return words.transpose(2, 3).contiguous().view(torch.uint8)
    offsets = a.group_offsets.tolist()
    owned = [(group, row) for group, (first, last) in enumerate(pairwise(offsets)) for row in range(last - first)]
    blocks = torch.tensor([(offsets[group] + 7 * group) // 8 + row // 8 for group, row in owned])
    return dequantized.cpu().transpose(0, 1)[blocks, :, :, torch.tensor([row % 8 for _, row in owned])]


@in_each_shape
@pytest.mark.parametrize("activation", [SwiGLU(), SQUARED_RELU], ids=["silu", "relu2"])
@pytest.mark.parametrize(
    ("name", "token", "out"),
    FORMATS_OF_PRODUCTS,
)
def test_a_result_is_decoded_for_the_product_that_follows(
    name: str,
    token: str,
    out: str,
    activation: Activation,
    shape: DequantShape,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where Hopper's kernels run: the bits that decoding the requantized rows gives, and the same second product."""
    inner, columns, sizes = 192, 72, [5, 0, 3, 66, 137]
    first = random_weights(name, 2, activation.num_parts * inner, 128, rng, device, gate_up=activation.gate_up or False)
    gate_up = PrepackedWeights.prepack(first)
    down = PrepackedWeights.prepack(random_weights(name, 2, columns, inner, rng, device))
    a = for_shape(make_rows(token, sizes, 128, rng, device, num_experts=2, spare=7, gather=True), shape)
    a = replace(a, row_scale=None if a.row_scale is None else a.row_scale * 0.02)
    a.rows[0] = 0x7F if token == "nvfp4" else a.rows[0]
    empty, fresh = dequant_tokens.empty_blocks, Intermediate.empty

    def poisoned_intermediate(stored: Intermediate, rows: GroupedRows) -> GroupedRows:
        made = fresh(stored, rows)
        if made.dequantized is not None:
            made.dequantized.view(torch.uint8).fill_(0xAB)
        return made

    monkeypatch.setattr(dequant_tokens, "empty_blocks", lambda *given: empty(*given).fill_(0xAB))
    monkeypatch.setattr(Intermediate, "empty", poisoned_intermediate)
    hidden = grouped_gemm_swiglu(a, gate_up, activation, out_format=out)
    chained = grouped_gemm_swiglu(a, gate_up, activation, out_format=out, then=down)
    assert hidden.dequantized is None and (chained.dequantized is not None) == IS_HOPPER
    if chained.dequantized is not None:
        assert chained.scales is None and chained.rows.shape[0] == 0
        want = _blocks(dequantized_tokens(hidden, 2, MANY_TOKENS), a)
        assert want.unique().numel() > 20
        assert_same_bits(_blocks(chained.dequantized, a), want, "dequantized rows")
        with pytest.raises(ValueError, match=r"^a\.dequantized: expected None except for prepacked weights"):
            grouped_gemm(chained, down, engine="torch")
    results = [poisoned(a.capacity, columns, torch.bfloat16, device) for _ in range(2)]
    for rows, result in zip((hidden, chained), results, strict=True):
        grouped_gemm(rows, down, out=result)
    assert_same_bits(*results, "second product")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "token", "out"),
    FORMATS_OF_PRODUCTS,
)
def test_teams_and_late_loads_do_not_change_the_bits_of_a_few_rows(
    name: str, token: str, out: str, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the second product put off its loads when the first has ended, however long it may."""
    inner, columns, k = 576, 200, 128
    gate_up = PrepackedWeights.prepack(random_weights(name, 3, 2 * inner, k, rng, device, gate_up=True))
    down = PrepackedWeights.prepack(random_weights(name, 3, columns, inner, rng, device))
    a = make_rows(token, [1, 0, 2, 3, 1], k, rng, device, num_experts=3, expert_ids=[2, 0, 1, 0, -1], gather=True)
    a, results, seconds = replace(a, expected_rows=5), [], []
    on_gpu = device.type == "cuda"
    # On a GPU that others use, a call may take long for other reasons.
    long = [(FEW, 2 * 10**9)] * (3 if on_gpu else 1)
    for shape, ns in ((FEW, 0), (FEW_EVEN, 0), (FEW_EVEN, 300), *long):
        choose(monkeypatch, few_shape=lambda *_, shape=shape: shape, next_loads_ns=lambda *_, ns=ns: ns)
        results.append(poisoned(a.capacity, columns, torch.bfloat16, device))
        began = time.perf_counter()
        hidden = grouped_gemm_swiglu(a, gate_up, SwiGLU(), out_format=out, then=down)
        assert hidden.dequantized is not None and hidden.dequantized.ndim == 2 and hidden.order.weights_after_ns == ns
        grouped_gemm(hidden, down, out=results[-1])
        assert_same_bits(results[0], results[-1], "second product")
        seconds.append(time.perf_counter() - began)
    assert not on_gpu or min(seconds[-len(long) :]) < 1.9
    plain = grouped_gemm_swiglu(a, gate_up, SwiGLU(), out_format=out)
    check_inside(results[0], exact_gemm(plain, down.restore(), device), UNIT[torch.bfloat16])


@pytest.mark.parametrize("inner", [144, 320])
def test_a_result_is_not_decoded_where_units_would_need_zeros(
    inner: int, rng: torch.Generator, device: torch.device
) -> None:
    """320 columns are five units, which no number of them in a stage divides: there is a sixth."""
    gate_up = PrepackedWeights.prepack(random_weights("nvfp4", 2, 2 * inner, 64, rng, device, gate_up=True))
    down = PrepackedWeights.prepack(random_weights("nvfp4", 2, 64, inner, rng, device))
    a = make_rows("nvfp4", [3, 9], 64, rng, device, num_experts=2)
    assert grouped_gemm_swiglu(a, gate_up, SwiGLU(), out_format="nvfp4", then=down).dequantized is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_experts_prepare_themselves(name: str, rng: torch.Generator, device: torch.device) -> None:
    """Both products: the second of each is held to the float64 product of what its first gives."""
    k, inner = 256, 128
    a, gate_up = _exact_sums(name, inner, GateUpOrder.GATE_UP, rng, device)
    down = random_weights(name, 2, k, inner, rng, device)
    experts = Experts(gate_up, down)
    prepacked = experts.prepacked()
    assert isinstance(prepacked.gate_up, PrepackedWeights) and isinstance(prepacked.down, PrepackedWeights)
    assert prepacked.prepacked().gate_up is prepacked.gate_up
    for each in (experts, prepacked):
        hidden = grouped_gemm_swiglu(a, each.gate_up, SwiGLU(), out_format=name)
        check_inside(each(a), exact_gemm(hidden, down, device), UNIT[torch.bfloat16])
    kept = replace(experts, engine="torch").prepacked()
    assert kept.gate_up is gate_up and kept.down is down


@in_each_shape
@pytest.mark.parametrize("out", ["nvfp4", "mxfp8", "bf16"])
def test_requantization_is_that_of_the_quantizer(
    out: str, shape: DequantShape, rng: torch.Generator, device: torch.device
) -> None:
    """Bit for bit, with ties, tiny and huge blocks, zeros and NaN: here each activation is `128 * u`, exactly.

    One weight is 1 in each row, so that gate is the first number of a token and `u` are its last ones; a sigmoid of 128
    is 1. Multiples of 1/4 up to 6 are all codes and borders of e2m1 where the scale is that of 6 * 128.
    """
    inner, count, gsf = 96, 24, 0.5
    m = torch.zeros(1, 2 * inner, 16 + inner)
    m[0, :inner, 0] = 1.0
    m[0, inner:, 16:] = torch.eye(inner)
    w = ExpertWeights.quantize(m, "nvfp4", gate_up=True, engine="torch").to(device)
    # The quantizer makes 6 (code 7) times a scale of 1 / 6 of each 1; here it is code 2.
    w = replace(w, quants=w.quants // 7 * 2, scales=unit_scales(w.scales), expert_scales=None)
    assert (w.dequantize().cpu() == m).all()
    u = torch.randn(count, inner, generator=rng)
    u[:8] *= 2.0 ** torch.randint(-30, 20, (8, inner // 16), generator=rng).repeat_interleave(16, 1)
    u[8:16] = torch.randint(-24, 25, (8, inner), generator=rng) / 4
    u[8:16, ::16] = 6.0
    u[16], u[17, 5], u[18, :32] = 0.0, torch.nan, 0.0
    x = torch.zeros(count, 16 + inner)
    x[:, 0], x[:, 16:] = 128.0, u
    a = for_shape(make_rows("bf16", [count], 16 + inner, rng, device, num_experts=1, spare=7, x=x), shape)
    h = 128 * u.bfloat16().float()
    # Zero weights times NaN are NaN too.
    h[17] = torch.nan
    encode = gsf if out == "nvfp4" else None
    hidden = grouped_gemm_swiglu(a, PrepackedWeights.prepack(w), SwiGLU(), out_format=out, out_gsf=encode)
    want = quantize_rows(h, out, gsf=encode, engine="torch")
    got = hidden.rows[:count].cpu()
    if out == "bf16":
        assert got[17].isnan().all() and want.quants_RK[17].isnan().all()
        got[17], want.quants_RK[17] = 0, 0
    assert_same_bits(got, want.quants_RK, "codes")
    if want.scales_RV is not None:
        assert hidden.scales is not None
        found = bits(hidden.scales).reshape(-1)[swizzled(scale_rows(hidden)[:count], want.scales_RV.shape[1])]
        assert_same_bits(torch.from_numpy(found), want.scales_RV.view(torch.uint8), "scales")
