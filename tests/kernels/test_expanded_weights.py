"""FP4 weights expanded to e4m3: their value against ml_dtypes, their layout, what they accept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.kernels.formats.number_formats import MXFP4, NVFP4, TokenFormat
from moe_runtime.kernels.formats.swizzle import swizzle_scales
from moe_runtime.kernels.gemm.dequant_layout import SCALE_CODES
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, products_of_codes, units_shape
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, fold_into_fp8
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import Array, bits, random_weights, swizzled

CPU = torch.device("cpu")
KINDS = {NVFP4: ml_dtypes.float8_e4m3fn, MXFP4: ml_dtypes.float8_e8m0fnu}
ORDERS = [None, *GateUpOrder]
formats = pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
pytestmark = pytest.mark.cpu_only


def linear_scales(w: ExpertWeights) -> Array:
    """float64 `[E, N, V]`."""
    assert w.scales is not None
    at = swizzled(np.arange(w.num_rows), w.format.scale_columns(w.num_columns))
    return np.stack([one.reshape(-1)[at] for one in bits(w.scales)]).view(KINDS[w.format]).astype(np.float64)


def e2m1(w: ExpertWeights) -> Array:
    """float64 `[E, N, K]` without scales."""
    quants = bits(w.quants)
    codes = np.stack([quants & 15, quants >> 4], -1).reshape(*quants.shape[:2], -1)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def parts_of(w: ExpertWeights) -> list[Array]:
    """Rows of gate and of up, or of the weight."""
    rows = np.arange(w.num_rows)
    if w.gate_up is None:
        return [rows]
    return [rows[w.gate_up.gate_rows(w.num_rows)], rows[w.gate_up.up_rows(w.num_rows)]]


def expected(w: ExpertWeights) -> tuple[Array, Array, Array]:
    """By the definition, block by block: e4m3 bits `[E, N, K]` with gate above up, scales, which experts are exact."""
    values, scales, block = e2m1(w), linear_scales(w), w.format.block
    quants, factors, exact = np.zeros(values.shape, np.uint8), [], []
    for expert in range(w.num_experts):
        first, of_expert, is_exact = 0, [], True
        for number, rows in enumerate(parts_of(w)):
            factor = 1.0
            if w.expert_scales is not None:
                factor = float(w.expert_scales.view(w.num_experts, -1)[expert, number])
            for r in range(0, len(rows), 128):
                of_row = []
                for k in range(0, w.num_columns, 128):
                    mine = rows[r : r + 128]
                    s = scales[expert, mine, k // block : (k + 128) // block]
                    product = values[expert, mine, k : k + 128] * s.repeat(block, 1)
                    largest = np.abs(product[~np.isnan(product)]).max(initial=0.0)
                    fold = 0
                    if largest > 0:
                        fold = min(f for f in range(-126, 200) if largest * 2.0**-f <= 448)
                    product *= 2.0**-fold
                    rounded = product.astype(ml_dtypes.float8_e4m3fn)
                    assert np.isnan(product).sum() == np.isnan(rounded.astype(np.float64)).sum()
                    is_exact &= bool(((rounded.astype(np.float64) == product) | np.isnan(product)).all())
                    quants[expert, first + r : first + r + len(mine), k : k + 128] = rounded.view(np.uint8)
                    of_row.append(np.float32(np.float64(np.float32(factor)) * 2.0**fold))
                of_expert.append(of_row)
            first += len(rows)
        factors.append(of_expert)
        exact.append(is_exact)
    return quants, np.array(factors, np.float32), np.array(exact)


def check(w: ExpertWeights) -> ExpandedWeights:
    """Raise unless `w` prepacked and expanded is what the definition says. NaN may have either sign."""
    packed = ExpandedWeights.prepack(w, engine="torch")
    found, (quants, scales, exact) = packed.expand(), expected(w)
    codes = bits(found.quants)
    is_nan = (codes & 127) == 127
    np.testing.assert_array_equal(is_nan, (quants & 127) == 127)
    np.testing.assert_array_equal(np.where(is_nan, 0, codes), np.where(is_nan, 0, quants))
    assert found.scales is not None
    assert_same_bits(found.scales, scales, "scales")
    np.testing.assert_array_equal(packed.exact.numpy(), exact)
    assert packed.format is found.format and packed.num_rows == found.num_rows == w.num_rows
    assert found.gate_up is (None if w.gate_up is None else GateUpOrder.GATE_UP)
    assert packed.blocks_apart == found.blocks_apart
    return packed


def weights_of(fmt: TokenFormat, quants: torch.Tensor, scales: torch.Tensor, **more: Any) -> ExpertWeights:
    assert fmt.scale_dtype is not None
    return ExpertWeights(fmt, quants, swizzle_scales(scales.view(fmt.scale_dtype), engine="torch"), **more)


@formats
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (400, 288), (256, 256), (272, 160)])
def test_random_weights(fmt: TokenFormat, order: GateUpOrder | None, n: int, k: int, rng: torch.Generator) -> None:
    """Heavy tails in rows and columns, so that scales of a block differ by much."""
    w = torch.randn(2, n, k, generator=rng) * torch.randn(2, n, 1, generator=rng).mul(3).exp()
    bias = torch.randn(2, n, generator=rng)
    weights = ExpertWeights.quantize(w, fmt, gate_up=order or False, bias=bias, engine="torch")
    packed = check(weights)
    assert packed.bias is not None
    rows = np.concatenate(parts_of(weights))
    assert_same_bits(packed.bias, bias[:, torch.from_numpy(rows)])


@formats
@pytest.mark.parametrize("order", [None, GateUpOrder.GATE_UP, GateUpOrder.UP_GATE], ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (400, 288), (512, 384)])
def test_the_same_weights_as_folded_ones(
    fmt: TokenFormat, order: GateUpOrder | None, n: int, k: int, rng: torch.Generator
) -> None:
    """Where rows of gate and of up do not share blocks: there folded weights have one scale for both."""
    w = torch.randn(2, n, k, generator=rng) * torch.randn(2, n, 1, generator=rng).mul(3).exp()
    weights = ExpertWeights.quantize(w, fmt, gate_up=order or False, engine="torch")
    # Blocks without a largest magnitude, of small numbers alone, and of zeros with scales.
    weights.quants.view(torch.uint8)[0, :128, : k // 4] &= 0xBB
    weights.quants.view(torch.uint8)[1, n // 2 :, k // 4 :] &= 0x88
    found, want = ExpandedWeights.prepack(weights, engine="torch").expand(), fold_into_fp8(weights, gate_up=order)
    assert found.scales is not None and want.scales is not None
    quants, scales = want.quants, want.scales
    if order is GateUpOrder.UP_GATE:
        quants, scales = (torch.cat(t.chunk(2, 1)[::-1], 1) for t in (quants, scales))
    assert_same_bits(found.quants, quants, "quants")
    assert_same_bits(found.scales, scales, "scales")


@formats
def test_every_scale_with_every_weight(fmt: TokenFormat) -> None:
    """Each scale beside each other that may be the largest of its block: all folds, and NaN scales of `mxfp4`."""
    scales = torch.arange(127 if fmt is NVFP4 else 256, dtype=torch.uint8)
    blocks = 128 // fmt.block
    nibbles = torch.arange(16, dtype=torch.uint8)
    row = (nibbles[0::2] | nibbles[1::2] << 4).repeat(128 // 16)
    # In each row of a block of 128 x 128 stand some scales; its first scale is one of all.
    rows = -(-len(scales) // (blocks - 1))
    below = torch.nn.functional.pad(scales, (0, rows * (blocks - 1) - len(scales))).view(rows, blocks - 1)
    largest = scales if fmt is NVFP4 else torch.cat((scales[:2], scales[2::23], scales[-2:]))
    whole = torch.zeros(len(largest), 128, blocks, dtype=torch.uint8)
    whole[:, :rows, 1:] = torch.minimum(below[None], largest[:, None, None])
    whole[:, :, 0] = largest[:, None]
    if fmt is MXFP4:
        whole[:, 100, 1] = 255
    experts = len(largest)
    w = weights_of(fmt, row.expand(experts, 128, -1).contiguous(), whole)
    packed = check(w)
    assert not packed.exact.all()


def test_the_table_of_the_kernel_has_each_product_rounded_once() -> None:
    code = np.arange(256)
    with np.errstate(invalid="ignore"):
        values = (1 + (code % 8) / 8) * 2.0 ** (code // 8 - 15.0)
    values[:8], values[248:] = 0.0, np.nan
    magnitudes = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    products = values[:, None] * magnitudes
    largest_of_a_fold = (15 + 6) * 8 + 1
    want = products.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    got = products_of_codes().numpy()
    used = [*range(largest_of_a_fold + 1), 255]
    np.testing.assert_array_equal(got[used], want[used])
    assert got[largest_of_a_fold, 7] == ml_dtypes.float8_e4m3fn(432).view(np.uint8)


def test_mxfp4_is_exact_while_exponents_span_at_most_15_values(rng: torch.Generator) -> None:
    for span, exact in ((14, True), (15, False)):
        scales = torch.full((1, 128, 4), 100, dtype=torch.uint8)
        scales[0, 77, 2] = 100 + span
        quants = torch.full((1, 128, 64), 0x11, dtype=torch.uint8)  # 0.5
        quants[0, 77, 32:48] = 0x77  # 6
        w = weights_of(MXFP4, quants, scales)
        packed = check(w)
        assert packed.exact.tolist() == [exact]
        value = packed.expand().dequantize(engine="torch")
        assert torch.equal(value, w.dequantize(engine="torch")) == exact
    # The block beside it has a scale of its own.
    scales = torch.full((1, 256, 8), 1, dtype=torch.uint8)
    scales[:, 128:], scales[:, :128, 4:] = 120, 254
    w = weights_of(MXFP4, torch.randint(256, (1, 256, 128), dtype=torch.uint8, generator=rng), scales)
    assert check(w).exact.all()


def test_nvfp4_scales_far_below_the_largest_of_their_block_lose_bits_and_no_more(rng: torch.Generator) -> None:
    """Each weight is off by at most 2^-4 of itself, or by 2^-10 of the block's scale where that is more."""
    codes = torch.randint(127, (1, 128, 8), dtype=torch.uint8, generator=rng)
    codes[0, 0, 0] = 126
    w = weights_of(NVFP4, torch.randint(256, (1, 128, 64), dtype=torch.uint8, generator=rng), codes)
    packed = check(w)
    assert packed.scales.item() == 8
    value, exact = packed.expand().dequantize(engine="torch").double(), w.dequantize(engine="torch").double()
    error = (value - exact).abs()
    assert (error <= torch.maximum(exact.abs() / 16, torch.tensor(2.0**-10 * 8))).all()
    assert ((exact != 0) & (value == 0)).any()


@formats
def test_zeros_and_blocks_without_a_number(fmt: TokenFormat) -> None:
    scales = torch.zeros(1, 128, 256 // fmt.block, dtype=torch.uint8)
    if fmt is MXFP4:
        scales[:, :, :4] = 255
    w = weights_of(fmt, torch.full((1, 128, 128), 0x9C, dtype=torch.uint8), scales)
    packed = check(w)
    assert packed.scales[0, 0, 0] == 1


@formats
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_units_hold_the_bits_of_the_weights_and_no_more(
    fmt: TokenFormat, order: GateUpOrder | None, rng: torch.Generator
) -> None:
    w = random_weights(fmt.name, 3, 512, 384, rng, CPU, gate_up=order or False)
    packed = ExpandedWeights.prepack(w, engine="torch")
    assert w.scales is not None
    assert packed.units.numel() == w.quants.numel() + w.scales.numel()
    assert packed.num_bytes == packed.units.numel() + packed.scales.numel() * 4
    shape = units_shape(fmt, 512, 384, 1 if order is None else 2)
    assert packed.units.shape == (3, *shape) and shape[3] % 128 == 0
    assert packed.to("cpu").units.data_ptr() == packed.units.data_ptr()


def test_what_is_refused(rng: torch.Generator) -> None:
    w = random_weights("nvfp4", 2, 256, 256, rng, CPU)
    with pytest.raises(ValueError, match=r"w\.format: expected nvfp4 or mxfp4, got mxfp8"):
        ExpandedWeights.prepack(random_weights("mxfp8", 1, 128, 128, rng, CPU))
    for code in (0x7F, 0x81):
        assert w.scales is not None
        scales = w.scales.clone()
        scales.view(torch.uint8)[1, 0, 0, 0, 0, 0] = code
        with pytest.raises(ValueError, match=r"w\.scales: expected e4m3 values that are not negative"):
            ExpandedWeights.prepack(replace(w, scales=scales))
    good = ExpandedWeights.prepack(w)
    assert max(SCALE_CODES) < 256
    for wrong, message in (
        ({"units": good.units[..., :-1]}, r"units: expected contiguous torch.uint8"),
        ({"units": good.units[0]}, r"units: expected contiguous"),
        ({"scales": good.scales.double()}, r"scales: expected contiguous torch.float32"),
        ({"exact": good.exact[:1]}, r"exact: expected contiguous torch.bool"),
        ({"bias": torch.zeros(2, 8)}, r"bias: expected contiguous torch.float32"),
        ({"stored_format": "mxfp8"}, r"stored_format: expected nvfp4 or mxfp4"),
        ({"gate_up": "gate_up"}, r"units: expected contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(good, **wrong)
