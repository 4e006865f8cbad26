"""The grouped GEMM with prepacked weights against float64, element by element; on Hopper they are dequantized in
registers.

On a GPU these tests run the kernels of `dequant_gemm.cu` in each shape (the rows that are expected choose it);
without one, prepacked weights go through the torch reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.kernels.formats.number_formats import FORMATS, intermediate_format_for, token_formats_for
from moe_runtime.kernels.formats.swizzle import swizzle_scales
from moe_runtime.kernels.gemm import dequant_tokens, plan, shapes
from moe_runtime.kernels.gemm import grouped_gemm as gemm_module
from moe_runtime.kernels.gemm.dequant_layout import DEQUANT_FORMATS
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import DequantOverlap
from moe_runtime.kernels.gemm.prepacked import MAX_PREPACKED_EXPERTS, PrepackedWeights
from moe_runtime.kernels.gemm.shapes import DEQUANT_DECODE as DECODE
from moe_runtime.kernels.gemm.shapes import DEQUANT_FEW as FEW
from moe_runtime.kernels.gemm.shapes import DEQUANT_FEW_EVEN as FEW_EVEN
from moe_runtime.kernels.gemm.shapes import DEQUANT_MIDDLE as MIDDLE
from moe_runtime.kernels.gemm.shapes import DEQUANT_PREFILL as PREFILL
from moe_runtime.kernels.gemm.shapes import FEW_TOKENS, MANY_TOKENS, DequantShape
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, SwiGLU
from tests.conftest import HAS_GPU
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import (
    UNIT,
    as_bf16_rows,
    bits,
    check_inside,
    exact_gemm,
    make_rows,
    random_weights,
    scale_rows,
    swizzled,
    with_wild_scales,
)
from tests.support.gemm_checks import (
    SHAPES,
    check_untouched,
    for_shape,
    in_each_shape,
    integer_operands,
    poisoned,
    unit_scales,
)
from tests.support.gemm_plans import choose

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(HAS_GPU and not IS_HOPPER, reason="prepacked weights are for Hopper")

PAIRS = [(fmt.name, token) for fmt in DEQUANT_FORMATS for token in token_formats_for(fmt.name)]
RAGGED_K = {"nvfp4": 336, "mxfp8": 160, "mxfp4": 352}


@in_each_shape
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_ragged_groups(
    weight: str, token: str, shape: DequantShape, rng: torch.Generator, device: torch.device
) -> None:
    """Empty groups, one row, skipped experts, inactive groups, gathered strided rows, spare capacity, partial tiles.

    N is 8 times an odd number, K 16 (32) times one.
    """
    k, n = RAGGED_K[weight], 136
    w = random_weights(weight, 3, n, k, rng, device)
    sizes, ids = [3, 0, 70, 5, 1, 2, 130, 4], [2, 0, 0, -1, 1, 3, 2, 1]
    a = make_rows(token, sizes, k, rng, device, num_experts=3, expert_ids=ids, gather=True, spare=7, sparse_scales=True)
    a = replace(for_shape(a, shape), num_active_experts=torch.tensor([7], dtype=torch.int32, device=device))
    out = poisoned(a.capacity + 2, n, torch.bfloat16, device)
    before = out.clone()
    assert grouped_gemm(a, PrepackedWeights.prepack(w), out=out) is out
    exact = exact_gemm(a, w, device)
    assert exact.written.sum() == 204
    check_inside(out, exact, UNIT[torch.bfloat16])
    check_untouched(out, before, exact.written)


@pytest.mark.parametrize(
    ("sizes", "ids"),
    [
        ([90], [1]),
        ([0, 65, 0], [0, 1, 0]),
        ([1, 1, 1], [0, 1, 0]),
        ([300, 0, 1], [1, 1, 1]),
        ([5, 6], [-7, 2]),
        ([0, 0], [0, 1]),
    ],
)
def test_group_shapes(sizes: list[int], ids: list[int], rng: torch.Generator, device: torch.device) -> None:
    """One group, empty ones at either end, tokens all to one expert over several tiles, ids that are no expert."""
    w = random_weights("nvfp4", 2, 40, 64, rng, device)
    a = make_rows("nvfp4", sizes, 64, rng, device, num_experts=2, expert_ids=ids)
    out = poisoned(a.capacity, 40, torch.float16, device)
    before = out.clone()
    grouped_gemm(a, PrepackedWeights.prepack(w), out=out)
    exact = exact_gemm(a, w, device)
    assert exact.written.sum() == sum(size for size, e in zip(sizes, ids, strict=True) if 0 <= e < 2)
    check_inside(out, exact, UNIT[torch.float16])
    check_untouched(out, before, exact.written)


def test_as_many_groups_as_there_may_be(rng: torch.Generator, device: torch.device) -> None:
    """Of zero to two rows each, some without an expert."""
    w = random_weights("nvfp4", 5, 40, 64, rng, device)
    sizes = torch.randint(0, 3, (MAX_PREPACKED_EXPERTS,), generator=rng).tolist()
    ids = torch.randint(-1, 5, (MAX_PREPACKED_EXPERTS,), generator=rng).tolist()
    a = make_rows("nvfp4", sizes, 64, rng, device, num_experts=5, expert_ids=ids)
    out = poisoned(a.capacity, 40, torch.bfloat16, device)
    before = out.clone()
    grouped_gemm(a, PrepackedWeights.prepack(w), out=out)
    exact = exact_gemm(a, w, device)
    check_inside(out, exact, UNIT[torch.bfloat16])
    check_untouched(out, before, exact.written)


def test_nothing_to_do(rng: torch.Generator, device: torch.device) -> None:
    """No capacity, no groups, no experts, no active groups: all legal, nothing is written."""
    w = PrepackedWeights.prepack(random_weights("mxfp8", 2, 32, 64, rng, device))
    empty = make_rows("mxfp8", [0, 0], 64, rng, device, num_experts=2)
    assert grouped_gemm(empty, w).shape == (0, 32)
    no_groups = make_rows("mxfp8", [], 64, rng, device, num_experts=2, spare=3)
    some = make_rows("mxfp8", [2, 1], 64, rng, device, num_experts=2)
    none_active = torch.zeros(1, dtype=torch.int32, device=device)
    for a in (no_groups, replace(some, num_active_experts=0), replace(some, num_active_experts=none_active)):
        out = poisoned(3, 32, torch.bfloat16, device)
        before = out.clone()
        grouped_gemm(a, w, out=out)
        assert_same_bits(out, before, "nothing to do")


def test_rows_past_the_capacity_are_left_alone(rng: torch.Generator, device: torch.device) -> None:
    """Offsets that go on behind the capacity: what fits is the same, nothing behind it is written."""
    plain, order = random_weights("mxfp8", 2, 64, 64, rng, device), GateUpOrder.GATE_UP
    w, gated = PrepackedWeights.prepack(plain), PrepackedWeights.prepack(replace(plain, gate_up=order))
    a = make_rows("mxfp8", [3, 90, 5], 64, rng, device, num_experts=2)
    want = grouped_gemm(a, w)
    for capacity in (40, 3, 0):
        out = poisoned(98, 64, torch.bfloat16, device)
        before = out.clone()
        grouped_gemm(replace(a, capacity=capacity), w, out=out)
        assert_same_bits(out[:capacity], want[:capacity], "rows that fit")
        assert_same_bits(out[capacity:], before[capacity:], "rows past the capacity")
        hidden = grouped_gemm_swiglu(replace(a, capacity=capacity), gated, SwiGLU(), out_format="mxfp8")
        assert hidden.rows.shape == (capacity, 32)


@pytest.mark.parametrize("active", [-1, 0, 1, 2, 99])
def test_active_groups_are_counted_alike_on_host_and_device(
    active: int, rng: torch.Generator, device: torch.device
) -> None:
    w = PrepackedWeights.prepack(random_weights("nvfp4", 2, 40, 64, rng, device))
    a = make_rows("nvfp4", [3, 5], 64, rng, device, num_experts=2, spare=2)
    # What lies behind the two groups looks like two more, of one row each.
    offsets = torch.tensor([0, 3, 8, 9, 10], dtype=torch.int32, device=device)
    ids = torch.tensor([0, 1, 1, 1], dtype=torch.int32, device=device)[:2]
    want, rows = grouped_gemm(a, w), [0, 3, 8][max(0, min(active, 2))]
    for count in (active, torch.tensor([active], dtype=torch.int32, device=device)):
        out = poisoned(10, 40, torch.bfloat16, device)
        before = out.clone()
        grouped_gemm(replace(a, expert_ids=ids, group_offsets=offsets, num_active_experts=count), w, out=out)
        assert_same_bits(out[:rows], want[:rows], f"{active} active")
        assert_same_bits(out[rows:], before[rows:], "rows of no active group")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_scales_that_lie_as_the_rows_do(name: str, rng: torch.Generator, device: torch.device) -> None:
    """The same bits as with swizzled ones, on Hopper; an error where other kernels would multiply."""
    k, sizes = 320, [5, 0, 3, 137]
    w = PrepackedWeights.prepack(random_weights(name, 2, 72, k, rng, device))
    a = make_rows(name, sizes, k, rng, device, num_experts=2, gather=True, spare=9)
    assert a.scales is not None and a.row_index is not None
    columns, count = a.format.scale_columns(k), sum(sizes)
    linear = bits(a.scales).reshape(-1)[swizzled(scale_rows(a)[:count], columns)]
    # Between other bytes, and those of rows that nothing refers to are NaN.
    wide = torch.full((a.rows.shape[0], columns + 24), 0x7F if name == "nvfp4" else 0xFF, dtype=torch.uint8)
    wide[a.row_index[:count].cpu().long(), 5 : 5 + columns] = torch.from_numpy(linear)
    scales = wide.to(device)[:, 5 : 5 + columns].view(a.scales.dtype)
    by_row = replace(a, scales=scales, group_scale_offsets=None, scales_in_record=True)
    for wrong in (None, scales[1:], scales[:, ::2], scales.view(torch.int8)):
        with pytest.raises(ValueError, match=r"^a\.scales: expected "):
            grouped_gemm(replace(by_row, scales=wrong), w)
    if gemm_module.resolve_engine("auto", device) != "cuda":
        with pytest.raises(ValueError, match=r"^a\.scales_in_record: expected False"):
            grouped_gemm(by_row, w)
        return
    results = [poisoned(a.capacity, 72, torch.bfloat16, device) for _ in range(2)]
    for rows, out in zip((a, by_row), results, strict=True):
        grouped_gemm(rows, w, out=out)
    assert_same_bits(*results, "results")


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_epilogue(name: str, dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> None:
    """Row scale, expert scale, bias, each output type, rows of the output further apart than they are long."""
    k, n = 64, 168
    w = random_weights(name, 2, n, k, rng, device, bias=torch.randn(2, n, generator=rng) * 9)
    w = replace(w, expert_scales=torch.tensor([0.37, 4.1], device=device))
    a = make_rows(name, [5, 66], k, rng, device, num_experts=2, x=torch.randn(71, k, generator=rng) * 5)
    a = replace(a, row_scale=(torch.rand(71, generator=rng) + 0.1).to(device))
    wide = poisoned(71, n + 14, dtype, device)
    before = wide.clone()
    out = wide[:, 4 : 4 + n]
    grouped_gemm(a, PrepackedWeights.prepack(w), out=out)
    check_inside(out.contiguous(), exact_gemm(a, w, device), UNIT[dtype])
    for beside in (slice(0, 4), slice(4 + n, None)):
        assert_same_bits(wide[:, beside], before[:, beside], "columns beside the output")


@pytest.mark.gpu
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_tokens_are_decoded_alike_in_both_shapes(
    weight: str, token: str, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a shape has far more to decode than it is chosen for."""
    k = 1040 if weight == "nvfp4" else 1056
    w = PrepackedWeights.prepack(random_weights(weight, 2, 40, k, rng, device))
    a = make_rows(token, [3, 0, 70, 41], k, rng, device, num_experts=2, gather=True, sparse_scales=True)
    results = []
    for shape in (FEW_TOKENS, MANY_TOKENS):
        choose(monkeypatch, choose_token_shape=lambda *_, shape=shape: shape)
        results.append(poisoned(a.capacity, 40, torch.bfloat16, device))
        grouped_gemm(a, w, out=results[-1])
    assert_same_bits(*results, "both shapes")
    check_inside(results[0], exact_gemm(a, w.restore(), device), UNIT[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("k", [128, 192, 1152, 2048])
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_few_tokens_are_decoded_by_the_blocks_that_multiply_them(
    weight: str, token: str, k: int, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as of tokens that are dequantized before, and of larger tiles; also of more rows than are expected.

    A block is one team, or three. A team holds all columns of one token, and of 2 to 8 at a time as many columns as
    there is room for.
    """
    w = random_weights(weight, 3, 136, k, rng, device)
    sizes, ids = [1, 0, 2, 5, 1, 3, 19, 4, 8], [2, 0, 0, -1, 1, 3, 2, 1, 1]
    a = make_rows(token, sizes, k, rng, device, num_experts=3, expert_ids=ids, gather=True, spare=7, sparse_scales=True)
    a = replace(a, num_active_experts=torch.tensor([8], dtype=torch.int32, device=device), expected_rows=9)
    prepacked, results = PrepackedWeights.prepack(w), []
    for shape in (FEW, FEW_EVEN, DECODE):
        of_rows = FEW if shape.own_tokens else shape
        choose(monkeypatch, choose_dequant_shape=lambda *_, of_rows=of_rows, **__: of_rows)
        choose(monkeypatch, few_shape=lambda *_, shape=shape: shape)
        results.append(poisoned(a.capacity, 136, torch.bfloat16, device))
        grouped_gemm(a, prepacked, out=results[-1])
        assert_same_bits(results[0], results[-1], "results")
    exact = exact_gemm(a, w, device)
    check_inside(results[0], exact, UNIT[torch.bfloat16])
    check_untouched(results[0], poisoned(a.capacity, 136, torch.bfloat16, device), exact.written)


OVERLAPS = [(DequantOverlap(1, 1), 8), (DequantOverlap(3, 2), 1), (DequantOverlap(1000, 3), 8)]
"""Of the tokens one block is dequantized before, or three, or all; with the steps of a warp."""


def as_both(monkeypatch: pytest.MonkeyPatch, multiply: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `multiply` gives where all tokens are dequantized before, the same bits as where most are meanwhile."""
    # Of a kernel that does not wait the product would read these.
    empty = dequant_tokens.empty_blocks
    monkeypatch.setattr(dequant_tokens, "empty_blocks", lambda *given: empty(*given).fill_(0xAB))
    choose(monkeypatch, plan_dequant_overlap=lambda *_: None)
    want = multiply()
    for overlap, steps in OVERLAPS:
        choose(monkeypatch, plan_dequant_overlap=lambda *_, overlap=overlap: overlap)
        monkeypatch.setattr(shapes, "TOKEN_STEPS", steps)
        assert_same_bits(multiply(), want, str(overlap))
    return want


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MIDDLE, PREFILL], ids=["middle", "prefill"])
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_dequantization_overlaps_with_the_product(
    weight: str,
    token: str,
    shape: DequantShape,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups that are empty, skipped, inactive; gathered rows; K of one step of a warp and a part of another."""
    k = 336 if weight == "nvfp4" else 352
    w = random_weights(weight, 3, 136, k, rng, device)
    sizes, ids = [3, 0, 70, 5, 1, 2, 130, 4], [2, 0, 0, -1, 1, 3, 2, 1]
    a = make_rows(token, sizes, k, rng, device, num_experts=3, expert_ids=ids, gather=True, spare=7, sparse_scales=True)
    a = replace(a, num_active_experts=torch.tensor([7], dtype=torch.int32, device=device))
    prepacked = PrepackedWeights.prepack(w)

    def multiply() -> torch.Tensor:
        out = poisoned(a.capacity, 136, torch.bfloat16, device)
        return grouped_gemm(for_shape(a, shape), prepacked, out=out)

    out = as_both(monkeypatch, multiply)
    exact = exact_gemm(a, w, device)
    check_inside(out, exact, UNIT[torch.bfloat16])
    check_untouched(out, poisoned(a.capacity, 136, torch.bfloat16, device), exact.written)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_dequantization_of_many_tokens_overlaps_with_the_product(
    name: str, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as it takes for that to be chosen, again and again; one group has half of them."""
    sizes = [4000, 1, 0, 900, 1100, 77, 1200, 722]
    prepacked = PrepackedWeights.prepack(random_weights(name, 8, 4096, 1056, rng, device))
    a = make_rows(name, sizes, 1056, rng, device, num_experts=8)
    real, chosen = plan.plan_dequant_overlap, []
    choose(monkeypatch, plan_dequant_overlap=lambda *given: chosen.append(real(*given)) or chosen[-1])
    results = [grouped_gemm(a, prepacked) for _ in range(20)]
    assert chosen and None not in chosen
    choose(monkeypatch, plan_dequant_overlap=lambda *_: None)
    want = grouped_gemm(a, prepacked)
    for result in results:
        assert_same_bits(result, want, "tokens dequantized meanwhile")


@in_each_shape
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_small_integers_are_exact(name: str, shape: DequantShape, rng: torch.Generator, device: torch.device) -> None:
    """Sums that need no rounding: no number is lost, doubled or in another place. `mxfp8` with scales of 2^-127."""
    a, w, exact = integer_operands(name, rng, device)
    if name == "nvfp4":
        a = replace(a, row_scale=torch.full((a.capacity,), 0.5, device=device), scales=unit_scales(a.scales))
        w = replace(w, expert_scales=torch.full((2,), 4.0, device=device), scales=unit_scales(w.scales))
        exact = exact * 2.0
    out = grouped_gemm(for_shape(a, shape), PrepackedWeights.prepack(w), out_dtype=torch.float32)
    assert_same_bits(out[:71], torch.from_numpy(exact).float(), name)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_a_scale_of_nan_is_nan_whatever_its_codes(name: str, rng: torch.Generator, device: torch.device) -> None:
    """In the rows it poisons one row, in the weights (`mxfp8`) one column.

    All operands are positive, so that a scale of Inf would make no NaN.
    """
    k, n = 128, 136
    w = ExpertWeights.quantize(torch.rand(1, n, k, generator=rng) + 1, name, engine="torch").to(device)
    a = make_rows(name, [6], k, rng, device, num_experts=1, x=torch.rand(6, k, generator=rng) + 1)
    assert a.scales is not None and w.scales is not None
    scales = a.scales.clone()
    # Row 3 lies at 3 * 16 in the swizzle.
    scales.view(torch.uint8).view(-1)[48] = 0x7F if name == "nvfp4" else 255
    got = grouped_gemm(replace(a, scales=scales), PrepackedWeights.prepack(w))
    assert got[3].isnan().all() and got[[0, 1, 2, 4, 5]].isfinite().all()
    if name == "mxfp8":
        scales = w.scales.clone()
        scales.view(-1)[48] = 255
        got = grouped_gemm(a, PrepackedWeights.prepack(replace(w, scales=scales)))
        assert got[:, 3].isnan().all() and got.isnan().sum() == 6


@pytest.mark.parametrize(
    ("name", "token", "first", "last"),
    [
        ("nvfp4", "nvfp4", 0, 126),
        ("nvfp4", "bf16", 0, 126),
        ("mxfp8", "mxfp8", 3, 202),
        ("mxfp4", "bf16", 0, 202),
        ("mxfp4", "mxfp8", 0, 202),
    ],
)
def test_all_scales_are_decoded(
    name: str, token: str, first: int, last: int, rng: torch.Generator, device: torch.device
) -> None:
    """Each byte that a scale of the weights may be, 0 and denormal e4m3 too, by itself: one block of K.

    Below byte 3 of `mxfp8` the smallest quants are no bf16 numbers, and above 202 fp32 sums come near their end. Units
    of `mxfp4` with and without scales above 128 are dequantized in two ways.
    """
    k, n = 16 if name == "nvfp4" else 32, 208
    w = random_weights(name, 1, n, k, rng, device)
    codes = (torch.arange(n) + first).clamp(max=last).to(torch.uint8)
    swizzled = swizzle_scales(codes[None, :, None], engine="torch").to(device)
    w = replace(w, scales=swizzled.view(w.format.scale_dtype or torch.uint8), expert_scales=None)
    a = make_rows(token, [9], k, rng, device, num_experts=1)
    if token == "mxfp8":
        assert a.scales is not None
        a = replace(a, scales=torch.full_like(a.scales, 127))
    out = grouped_gemm(a, PrepackedWeights.prepack(w), out_dtype=torch.float32)
    check_inside(out, exact_gemm(a, w, device), UNIT[torch.float32])
    if name == "nvfp4":
        assert not out[:, codes == 0].any()


@in_each_shape
@pytest.mark.parametrize("weight", ["nvfp4", "mxfp4"])
def test_fp8_rows_have_the_bits_of_their_values_in_bf16(
    weight: str, shape: DequantShape, rng: torch.Generator, device: torch.device
) -> None:
    """Both products, with scales of any size, both signs, and NaN."""
    k, inner = 384, 72
    weights = [random_weights(weight, 2, 2 * inner, k, rng, device, gate_up=gated) for gated in (False, True)]
    plain, gated = map(PrepackedWeights.prepack, weights)
    a = make_rows("fp8_block", [3, 0, 70, 9], k, rng, device, num_experts=2)
    for rows in (a, with_wild_scales(a, rng)):
        found = []
        for given in (for_shape(rows, shape), for_shape(as_bf16_rows(rows, plain.format), shape)):
            out = poisoned(a.capacity, 2 * inner, torch.float32, device)
            hidden = grouped_gemm_swiglu(given, gated, SwiGLU(), out_format="bf16")
            found.append((grouped_gemm(given, plain, out=out), hidden.rows))
        for ours, want in zip(*found, strict=True):
            nan = want.isnan()
            assert nan.all(1)[:2].all() == (rows is not a) and not nan.all()
            assert torch.equal(ours.isnan(), nan)
            assert_same_bits(ours[~nan], want[~nan], "results")


@in_each_shape
@pytest.mark.parametrize("large", [False, True], ids=["usual", "with_large_scales"])
def test_all_codes_of_mxfp8_are_decoded(
    large: bool, shape: DequantShape, rng: torch.Generator, device: torch.device
) -> None:
    """Row `n` of the weight has the one number of code `n`, zeros beside it; of the two NaNs alone there is NaN.

    Codes 64 to 127 and 192 to 255 share rows with a NaN, which are dequantized in more steps, all with scales above
    2^7.
    """
    k, n, rows = 160, 256, 70
    quants = torch.zeros(1, n, k, dtype=torch.uint8)
    column = torch.randint(0, k, (n,), generator=rng)
    quants[0, torch.arange(n), column] = torch.arange(n).to(torch.uint8)
    scales = torch.full((1, n, k // 32), 124, dtype=torch.uint8)
    if large:
        scales[0, :, 2] = 135 + torch.randint(0, 3, (n,), generator=rng).to(torch.uint8)
    w = ExpertWeights(
        FORMATS["mxfp8"],
        quants.view(torch.float8_e4m3fn),
        swizzle_scales(scales, engine="torch"),
    ).to(device)
    a = make_rows("mxfp8", [rows], k, rng, device, num_experts=1, x=torch.ones(rows, k))
    prepacked = PrepackedWeights.prepack(w)
    assert prepacked.has_special_values is not None and prepacked.has_special_values.tolist() == [
        [1, 1, 1, 1] if large else [0, 1, 0, 1]
    ]
    got = grouped_gemm(for_shape(a, shape), prepacked, out_dtype=torch.float32)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors = 2.0 ** (scales[0, torch.arange(n), column // 32].double().numpy() - 127)
    want = torch.from_numpy(values * factors).float().expand(rows, n).contiguous()
    assert want.isnan().sum() == 2 * rows
    torch.testing.assert_close(got[:rows].cpu(), want, rtol=0, atol=0, equal_nan=True)


@in_each_shape
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_units_marked_as_special_have_the_same_bits(
    name: str, shape: DequantShape, rng: torch.Generator, device: torch.device
) -> None:
    """Marked though there is no special value in them, some or all units: the result does not change."""
    k, n = 320, 328
    prepacked = PrepackedWeights.prepack(random_weights(name, 3, n, k, rng, device))
    assert prepacked.has_special_values is not None and not prepacked.has_special_values.any()
    a = for_shape(make_rows("mxfp8", [3, 70, 41], k, rng, device, num_experts=3), shape)
    want = grouped_gemm(a, prepacked)
    some = torch.randint(0, 2, tuple(prepacked.has_special_values.shape), generator=rng).to(torch.uint8).to(device)
    for marks in (some, torch.ones_like(some)):
        assert_same_bits(
            grouped_gemm(a, replace(prepacked, has_special_values=marks)), want, "dequantized in more steps"
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_rows_do_not_depend_on_neighbours_or_shape(
    weight: str, token: str, rng: torch.Generator, device: torch.device
) -> None:
    """The first and the last row of groups of every kind of size: the bits that they have alone, in each shape."""
    k, n = 1280, 136
    w = PrepackedWeights.prepack(random_weights(weight, 2, n, k, rng, device))
    x = torch.randn(2, k, generator=rng)
    alone = make_rows(token, [1, 1], k, rng, device, num_experts=2, expert_ids=[1, 1], x=x)
    want = grouped_gemm(alone, w, out_dtype=torch.float32)
    for size in (2, 7, 8, 9, 16, 17, 33, 48, 49, 64, 65, 96, 97, 128, 129, 150, 257):
        inner = torch.randn(size - 2, k, generator=rng) * 3
        rows = torch.cat((torch.randn(5, k, generator=rng), x[:1], inner, x[1:]))
        for shape in SHAPES.values():
            a = for_shape(make_rows(token, [5, size], k, rng, device, num_experts=2, spare=7, x=rows), shape)
            got = grouped_gemm(a, w, out_dtype=torch.float32)
            assert_same_bits(got[[5, 4 + size]], want, f"group of {size} rows, {shape}")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["wide", "cancelling"])
@pytest.mark.parametrize("weight", ["nvfp4", "mxfp4"])
def test_products_of_warps_have_the_bits_of_products_of_warpgroups(
    weight: str, kind: str, rng: torch.Generator, device: torch.device
) -> None:
    """`mma.sync` beside `wgmma`: terms whose exponents lie far apart, and large terms of which little is left."""
    k, n, sizes = 2880, 200, [5, 8, 1]
    w = PrepackedWeights.prepack(random_weights(weight, 3, n, k, rng, device))
    x = torch.randn(sum(sizes), k, generator=rng)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-30, 30, x.shape, generator=rng).float())
    else:
        x = torch.where(torch.rand(x.shape, generator=rng) < 0.5, x.sign() * 64, x * 0.01)
    a = make_rows("bf16", sizes, k, rng, device, num_experts=3, x=x)
    got, want = (grouped_gemm(for_shape(a, shape), w, out_dtype=torch.float32) for shape in (FEW, DECODE))
    assert_same_bits(got, want, kind)


@pytest.mark.gpu
@in_each_shape
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_repeated_calls_give_the_same_bits(
    weight: str, token: str, shape: DequantShape, rng: torch.Generator, device: torch.device
) -> None:
    """More tiles than the GPU has processors, and stages enough that the ring goes round."""
    k, n, sizes = 2048, 2048, [33, 0, 64, 1, 20, 130, 31, 48]
    w = random_weights(weight, 8, n, k, rng, device, gate_up=GateUpOrder.GATE_UP)
    gated, plain = PrepackedWeights.prepack(w), PrepackedWeights.prepack(replace(w, gate_up=None, expert_scales=None))
    a = for_shape(make_rows(token, sizes, k, rng, device, num_experts=8, spare=7), shape)
    count, between = sum(sizes), intermediate_format_for(FORMATS[token], w.format).name
    first, hidden = grouped_gemm(a, plain), grouped_gemm_swiglu(a, gated, SwiGLU(), out_format=between)
    assert hidden.rows[:count].view(torch.uint8).count_nonzero() > count * n // 16
    for turn in range(20):
        assert_same_bits(grouped_gemm(a, plain)[:count], first[:count], f"turn {turn}")
        again = grouped_gemm_swiglu(a, gated, SwiGLU(), out_format=between)
        assert_same_bits(again.rows[:count], hidden.rows[:count], f"turn {turn}")


@pytest.mark.gpu
@in_each_shape
def test_a_captured_graph_reads_the_groups_of_its_replay(
    shape: DequantShape, rng: torch.Generator, device: torch.device
) -> None:
    """Offsets, experts, the number of active groups and the rows themselves change between replays."""
    k, n, w = 192, 136, random_weights("nvfp4", 4, 136, 192, rng, device)
    prepacked = PrepackedWeights.prepack(w)
    capacity = 400

    def rows_of(sizes: list[int], ids: list[int], active: int) -> GroupedRows:
        spare = capacity - sum(sizes)
        a = make_rows("nvfp4", sizes, k, rng, device, num_experts=4, expert_ids=ids, gather=True, spare=spare)
        return replace(for_shape(a, shape), num_active_experts=torch.tensor([active], dtype=torch.int32, device=device))

    first = rows_of([3, 80, 1, 0], [0, 1, 2, 3], 4)
    out = poisoned(capacity, n, torch.bfloat16, device)
    before = out.clone()
    grouped_gemm(first, prepacked, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(first, prepacked, out=out)
    for sizes, ids, active in (
        ([0, 1, 140, 259], [3, 3, 1, 0], 4),
        ([130, 0, 0, 7], [2, -1, 4, 1], 4),
        ([64, 65, 66, 67], [0, 1, 2, 3], 2),
        ([1, 1, 1, 1], [3, 2, 1, 0], 0),
    ):
        now = rows_of(sizes, ids, active)
        for name in ("rows", "scales", "row_scale", "row_index", "group_offsets", "group_scale_offsets", "expert_ids",
                     "num_active_experts"):  # fmt: skip
            getattr(first, name).copy_(getattr(now, name))
        out.copy_(before)
        graph.replay()
        exact = exact_gemm(now, w, device)
        check_inside(out, exact, UNIT[torch.bfloat16])
        check_untouched(out, before, exact.written)


@pytest.mark.gpu
@in_each_shape
@pytest.mark.parametrize(("weight", "token"), PAIRS)
@pytest.mark.parametrize("k", [7168, 2048, 2880])
def test_widths_of_models(
    k: int, weight: str, token: str, shape: DequantShape, rng: torch.Generator, device: torch.device
) -> None:
    """DeepSeek-V3 and gpt-oss, with the bound of zero-mean data: 2^-20 instead of `ceil(K / 16) * 2^-23`."""
    w = random_weights(weight, 2, 520, k, rng, device)
    sizes = [5, 40] if shape is DECODE else [70, 300]
    a = for_shape(make_rows(token, sizes, k, rng, device, num_experts=2, spare=7), shape)
    out = grouped_gemm(a, PrepackedWeights.prepack(w), out_dtype=torch.float32)
    exact = exact_gemm(a, w, device)
    tighter = np.asarray(exact.slack) * (2.0**-20 / (-(-k // 16) * 2.0**-23))
    check_inside(out, replace(exact, slack=tighter), UNIT[torch.float32])


@pytest.mark.gpu
def test_rows_weights_and_output_past_2_31_bytes(rng: torch.Generator, device: torch.device) -> None:
    """A gathered row, an expert, and output rows far away (the memory between is never touched)."""
    k, n, far_row, far_expert = 128, 64, 2**25 + 1, 2**19
    near = PrepackedWeights.prepack(random_weights("mxfp8", 1, n, k, rng, device))
    a = make_rows("mxfp8", [2], k, rng, device, num_experts=1)
    want = grouped_gemm(a, near)
    rows = torch.empty(far_row + 1, k, dtype=torch.uint8, device=device)
    rows[0], rows[far_row] = a.rows.view(torch.uint8)[1], a.rows.view(torch.uint8)[0]
    index = torch.tensor([far_row, 0], dtype=torch.int32, device=device)
    far = replace(a, rows=rows.view(torch.float8_e4m3fn), row_index=index)
    assert_same_bits(grouped_gemm(far, near), want, "far row")
    units = torch.empty(far_expert + 1, *near.units.shape[1:], dtype=torch.uint8, device=device)
    units[far_expert] = near.units[0]
    last = replace(a, expert_ids=torch.tensor([far_expert], dtype=torch.int32, device=device))
    marks = torch.zeros(far_expert + 1, 1, dtype=torch.uint8, device=device)
    assert_same_bits(grouped_gemm(last, replace(near, units=units, has_special_values=marks)), want, "far expert")
    marks[far_expert] = 1
    assert_same_bits(grouped_gemm(last, replace(near, units=units, has_special_values=marks)), want, "far mark")
    stride = 2**30 + 2**29
    out = torch.empty(stride + n, dtype=torch.bfloat16, device=device).as_strided((2, n), (stride, 1))
    assert_same_bits(grouped_gemm(a, near, out=out).contiguous(), want, "far output")


def test_arguments(rng: torch.Generator, device: torch.device) -> None:
    """Prepacked weights are either plain or for SwiGLU, in one order."""
    plain = random_weights("nvfp4", 2, 64, 64, rng, device)
    gated = PrepackedWeights.prepack(replace(plain, gate_up=GateUpOrder.INTERLEAVED))
    a = make_rows("nvfp4", [2, 3], 64, rng, device, num_experts=2)
    with pytest.raises(ValueError, match=r"^w\.gate_up: expected None"):
        grouped_gemm(a, gated)
    with pytest.raises(ValueError, match=r"^w\.gate_up: expected prepacked weights of gate and up"):
        grouped_gemm_swiglu(a, PrepackedWeights.prepack(plain), SwiGLU(), out_format="nvfp4")
    with pytest.raises(ValueError, match=r"^activation\.order: expected interleaved"):
        grouped_gemm_swiglu(a, gated, SwiGLU(), out_format="nvfp4")
    with pytest.raises(ValueError, match=r"^w: expected K = 64"):
        grouped_gemm(a, PrepackedWeights.prepack(random_weights("nvfp4", 2, 64, 80, rng, device)))
    with pytest.raises(ValueError, match=r"^a\.format: expected mxfp8"):
        grouped_gemm(a, PrepackedWeights.prepack(random_weights("mxfp8", 2, 64, 64, rng, device)))
