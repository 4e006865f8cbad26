"""Quantizers: kernels and references bit for bit against each other and against oracles written in numpy and ml_dtypes.

The oracles compute each step in float64 and round it to fp32, which gives the IEEE product or quotient of fp32 numbers.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats import reference_quantize
from moe_runtime.kernels.formats.bits import bits_f32
from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK, MXFP4, MXFP8, NVFP4, QuantizedRows, TokenFormat
from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS as FORMATS
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows, quantize_tile, row_amax_bits, token_gsf
from tests.support.comparison import assert_same_bits

ENGINES = ("torch", "triton")
F32_MAX = torch.finfo(torch.float32).max


def hostile_rows(k: int, rng: torch.Generator) -> torch.Tensor:
    """fp32 `[24, k]`: ordinary, zero, denormal, huge, wide-ranged, NaN and Inf rows, and random bit patterns."""
    x = torch.randn(24, k, generator=rng)
    x[1] = 0.0
    x[2] = -0.0
    x[3] *= 1e-39  # denormal amax: gsf clamps to 2^100
    x[4] *= 1e-44
    x[5] *= 1e37
    x[6, 5] = float("nan")
    x[7, 40] = float("inf")
    x[8, 100] = -float("inf")
    x[9] = torch.randint(-(2**31), 2**31, (k,), generator=rng).to(torch.int32).view(torch.float32)
    x[10] *= torch.exp(10 * torch.randn(k, generator=rng))
    x[11] *= 1e-4
    x[12] *= 1e-6
    x[13] = F32_MAX
    x[14, :16] = 0.0
    x[14, 16:] *= 1e-30
    x[15, 0] = 1e30  # the other blocks underflow beside it
    x[16] = 448.0 * 2.0 ** torch.randint(-10, 10, (k,), generator=rng)
    x[17, ::16] = -6.0
    x[18] = 1e-4
    x[19] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # all NaN, negative, full payload
    x[20] = torch.tensor(1, dtype=torch.int32).view(torch.float32)
    x[21] *= 2.0**-90
    x[22, :] = x[22].bfloat16().float()
    return x


def f32(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float32).astype(np.float64)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def oracle_nvfp4(x: np.ndarray, gsf: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    amax_row = np.abs(x).max(axis=1)
    if gsf is None:
        usable = np.isfinite(amax_row) & (amax_row > 0)
        scale = np.where(usable, np.minimum(f32(2688.0 / np.where(usable, amax_row, 1.0)), 2.0**100), 1.0)
    else:
        scale = np.full(len(x), min(float(np.float32(gsf)), 2.0**100))
    blocks = x.reshape(len(x), -1, 16)
    amax = np.abs(blocks).max(axis=2)
    bad = ~np.isfinite(amax)
    sf_bits = to_e4m3(f32(f32(scale[:, None] * np.where(bad, 0, amax)) / 6.0))
    sf = sf_bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    dead = bad | (sf == 0)
    mul = f32(scale[:, None] / np.where(dead, 1.0, sf))
    scaled = f32(np.where(dead[:, :, None], 0.0, blocks) * mul[:, :, None])
    codes = np.clip(scaled, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = np.where(dead[:, :, None], np.uint8(0), codes).reshape(len(x), -1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, np.where(bad, np.uint8(0x7F), sf_bits), f32(1.0 / scale)


def over_scales(x: np.ndarray, least: float, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Values over their blocks' scales, powers of two, so that they are at most `largest`; and the scales' bytes."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=2)
    bad = ~np.isfinite(amax)
    ideal = f32(np.maximum(np.where(bad, 0, amax), least) / largest)
    mantissa, exponent = np.frexp(ideal)  # ideal = mantissa * 2^exponent, mantissa in [.5, 1)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    values = f32(np.where(bad[:, :, None], 0, blocks) / np.exp2(exponent.astype(float))[:, :, None])
    return values.reshape(x.shape), np.where(bad, 255, exponent + 127).astype(np.uint8)


def oracle_mxfp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, scales = over_scales(x, float(np.float32(1e-4)), 448.0)
    return to_e4m3(values), scales


def oracle_mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, scales = over_scales(x, 6 * 2.0**-126, 6.0)
    codes = values.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def oracle_fp8_block(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    quants, scales = [], []
    for start in range(0, x.shape[1], 128):
        block = x[:, start : start + 128]  # the last one may be shorter
        amax = np.abs(block).max(axis=1)
        bad = ~np.isfinite(amax)
        scale = f32(np.maximum(np.where(bad, 0, amax), np.float64(np.float32(1e-4))) / 448.0)
        quants.append(to_e4m3(f32(np.where(bad[:, None], 0, block) / scale[:, None])))
        scales.append(np.where(bad, np.nan, scale).astype(np.float32))
    return np.concatenate(quants, 1), np.stack(scales, 1)


def assert_same_rows(actual: QuantizedRows, expected: QuantizedRows, what: str = "") -> None:
    assert actual.format is expected.format
    for name in ("quants_RK", "scales_RV", "row_scale_R"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (e is None), name
        if a is not None:
            assert_same_bits(a, e, f"{what} {name}")


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the quantizers do not write stays 0xA5."""
    fresh = reference_quantize.empty_rows

    def poisoned(*args) -> QuantizedRows:
        rows = fresh(*args)
        for tensor in (rows.quants_RK, rows.scales_RV, rows.row_scale_R):
            if tensor is not None and tensor.numel():
                tensor.view(torch.uint8).fill_(0xA5)
        return rows

    monkeypatch.setattr(reference_quantize, "empty_rows", poisoned)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [128, 1152, 192, 288, 320, 352])
@pytest.mark.usefixtures("poisoned_outputs")
def test_against_numpy_oracles(engine: str, dtype: torch.dtype, k: int, device: torch.device, rng) -> None:
    given = hostile_rows(k, rng).to(dtype)
    x = given.double().numpy()
    given = given.to(device)

    bf16 = quantize_rows(given, "bf16", engine=engine)
    finite = np.isfinite(x)
    wanted = x.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.int16)
    assert np.array_equal(bf16.quants_RK.cpu().view(torch.int16).numpy()[finite], wanted[finite])
    assert np.array_equal(bf16.quants_RK.double().cpu().numpy()[~finite], x[~finite], equal_nan=True)

    for fmt, oracle in ((FP8_BLOCK, oracle_fp8_block), (MXFP8, oracle_mxfp8), (MXFP4, oracle_mxfp4)):
        q = quantize_rows(given, fmt, engine=engine)
        quants, scales = oracle(x)
        assert_same_bits(q.quants_RK.view(torch.uint8), quants, f"{fmt.name} quants")
        assert_same_bits(q.scales_RV, scales, f"{fmt.name} scales")

    for gsf in (None, 1.0, 3e5, 1e-30, 2.0**120):
        q = quantize_rows(given, NVFP4, gsf=gsf, engine=engine)
        quants, scales, row_scale = oracle_nvfp4(x, gsf)
        assert_same_bits(q.quants_RK, quants, f"nvfp4 {gsf} quants")
        assert_same_bits(q.scales_RV.view(torch.uint8), scales, f"nvfp4 {gsf} scales")
        assert_same_bits(q.row_scale_R, row_scale.astype(np.float32), f"nvfp4 {gsf} row_scale")


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.usefixtures("poisoned_outputs")
def test_kernel_and_reference_agree_bit_for_bit(fmt: TokenFormat, device: torch.device, rng) -> None:
    static = [1.0, torch.tensor([17.5]), torch.tensor(float("nan")), torch.tensor(0.0), torch.tensor(float("inf"))]
    for k in (128, 384, 2304, *((192, 288, 1040) if fmt is FP8_BLOCK else ())):
        x = hostile_rows(k, rng)
        wide = torch.cat([x, torch.full_like(x, float("nan"))], dim=1).to(device)
        x = x.to(device)
        for given in (x, x.bfloat16(), wide[:, :k], x[:1], x[:0], x[:1].expand(35, k), x[3:17:3]):
            for gsf in (None, *static) if fmt.has_row_scale and k == 384 else (None,):
                gsf = gsf.to(device) if isinstance(gsf, torch.Tensor) else gsf
                reference = quantize_rows(given, fmt, gsf=gsf, engine="torch")
                assert_same_rows(quantize_rows(given, fmt, gsf=gsf, engine="triton"), reference, f"K={k} gsf={gsf}")
                back = dequantize_rows(reference, engine="torch")
                assert_same_bits(dequantize_rows(reference, engine="triton"), back, f"dequantize K={k} gsf={gsf}")


@pytest.mark.parametrize("engine", ENGINES)
def test_read_back_is_quant_times_scale_times_row_scale(engine: str, device: torch.device, rng) -> None:
    x = hostile_rows(256, rng).to(device)
    for fmt in (FP8_BLOCK, MXFP8, MXFP4, NVFP4):
        q = quantize_rows(x, fmt, engine="torch")
        raw = q.quants_RK.cpu().view(torch.uint8).numpy()
        scales = q.scales_RV.cpu()
        if fmt.element_bits == 4:
            codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)
            values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        else:
            values = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        if fmt is NVFP4:
            sf = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        else:
            sf = scales.numpy() if fmt is FP8_BLOCK else scales.numpy().view(ml_dtypes.float8_e8m0fnu)
            sf = sf.astype(np.float64)
        expected = f32(values * np.repeat(sf, fmt.block, axis=1))
        if q.row_scale_R is not None:
            expected = f32(expected * q.row_scale_R.double().cpu().numpy()[:, None])
        actual = dequantize_rows(q, engine=engine).double().cpu().numpy()
        np.testing.assert_array_equal(actual, expected)
        assert np.array_equal(np.signbit(actual), np.signbit(expected))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_error_is_within_half_a_step(fmt: TokenFormat, engine: str, device: torch.device, rng) -> None:
    """Half a step of the element at its magnitude, widened where the stored scale is a rounded one.

    bf16: 2^-8 |x|. e4m3: 2^-4 |x|, and half of its smallest step 2^-9 times the scale. NVFP4 with blocks within a
    factor of 2^14 of each other (their e4m3 scales are normal): steps are at most 2 scales wide up to 6, and what the
    scale's rounding (2^-4) cuts off above is less, so one scale, `(1 + 2^-4) amax / 6`. MXFP4: also one, which is at
    most twice `amax / 6`.
    """
    x = torch.randn(16, 256, generator=rng).to(device)
    error = (dequantize_rows(quantize_rows(x, fmt, engine=engine), engine=engine) - x).abs().double()
    magnitude = x.abs().double()
    amax = magnitude.view(16, -1, fmt.block).amax(dim=2).repeat_interleave(fmt.block, dim=1)
    rounding = 1 + 2.0**-20  # of the fp32 steps themselves
    if fmt is BF16:
        bound = magnitude * 2.0**-8
    elif fmt is NVFP4:
        bound = amax / 6 * (1 + 2.0**-4)
    elif fmt is MXFP4:
        bound = amax / 3
    else:
        bound = magnitude * 2.0**-4 + amax / 448 * 2 * 2.0**-10
    assert (error <= bound * rounding).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fmt", [FP8_BLOCK, MXFP8, MXFP4, NVFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_poisons_its_block_only(fmt: TokenFormat, engine: str, bad: float, device, rng) -> None:
    x = torch.randn(3, 512, generator=rng).to(device)
    clean = quantize_rows(x, fmt, engine=engine)
    x[1, 300] = bad
    q = quantize_rows(x, fmt, engine=engine)
    back = dequantize_rows(q, engine=engine)
    block = slice(300 // fmt.block * fmt.block, (300 // fmt.block + 1) * fmt.block)
    expected_nan = torch.zeros_like(back, dtype=torch.bool)
    expected_nan[1, block] = True
    assert torch.equal(back.isnan(), expected_nan)
    assert not q.quants_RK.view(torch.uint8)[1, block.start * fmt.element_bits // 8 :][: fmt.block // 2].any()
    for row in (0, 2):
        assert_same_bits(q.quants_RK[row], clean.quants_RK[row])
        assert_same_bits(q.scales_RV[row], clean.scales_RV[row])


SHORT_BLOCKS = (144, 192, 288, 320, 352, 960, 1856, 2880)
"""Values of a row whose last block of 128 is short."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("k", SHORT_BLOCKS)
@pytest.mark.usefixtures("poisoned_outputs")
def test_a_short_block_has_the_scale_of_its_own_values(k: int, engine: str, device: torch.device, rng) -> None:
    """Huge values just before the tail leave it alone, as a huge or bad tail leaves the block before it."""
    full = k // 128 * 128
    for before, tail in ((1e30, 1e-3), (1e-3, 1e30), (float("inf"), 1e-3), (1e-3, float("nan")), (1e-3, 0.0)):
        x = torch.randn(3, k, generator=rng).clamp(-3, 3)
        x[:, full - 1], x[:, full:] = before, x[:, full:] * tail
        q = quantize_rows(x.to(device), FP8_BLOCK, engine=engine)
        assert q.scales_RV.shape == (3, k // 128 + 1)
        quants, scales = oracle_fp8_block(x.double().numpy())
        assert_same_bits(q.quants_RK.view(torch.uint8), quants)
        assert_same_bits(q.scales_RV, scales)
        amax = x[:, full:].abs().amax(1).clamp(min=1e-4)
        assert_same_bits(q.scales_RV[:, -1], (amax / 448).masked_fill(amax.isnan(), float("nan")))
        back = dequantize_rows(q, engine=engine).cpu()
        if 0 < tail < 1:
            half_step = x[:, full:].abs() / 16 + 2.0**-10 * q.scales_RV[:, -1:].cpu()
            assert ((back - x)[:, full:].abs() <= half_step).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_worked_values(engine: str, device: torch.device) -> None:
    """A row of amax 2688 has gsf 1; a block of amax 6 then has sf 1 and codes that are the numbers themselves."""
    x = torch.zeros(1, 32, device=device)
    x[0, 0], x[0, 16], x[0, 17], x[0, 18] = 2688.0, 6.0, -1.5, 0.5
    q = quantize_rows(x, "nvfp4", engine=engine)
    assert q.row_scale_R.tolist() == [1.0]
    assert q.scales_RV.float().tolist() == [[448.0, 1.0]]
    assert q.quants_RK[0, 8:10].tolist() == [0x7 | 0xB << 4, 0x1]
    y = torch.zeros(1, 32, device=device)
    y[0, 0] = 448.0
    assert quantize_rows(y, "mxfp8", engine=engine).scales_RV.tolist() == [[127]]
    y[0, 0] = 448.5
    assert quantize_rows(y, "mxfp8", engine=engine).scales_RV.tolist() == [[128]]
    y[0, :4] = torch.tensor([6.0, -4.0, 0.25, 0.75])
    q = quantize_rows(y, "mxfp4", engine=engine)
    assert (q.scales_RV.tolist(), q.quants_RK[0, :2].tolist()) == ([[127]], [0x7 | 0xE << 4, 0x0 | 0x2 << 4])
    y[0, 0] = 6.5
    assert quantize_rows(y, "mxfp4", engine=engine).scales_RV.tolist() == [[128]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("fmt", "lost", "coarse"), [(FP8_BLOCK, 2.18e-10, 3.49e-9), (MXFP8, 2.33e-10, 3.73e-9)])
def test_what_a_scale_that_has_a_floor_loses(
    fmt: TokenFormat, lost: float, coarse: float, engine: str, device: torch.device
) -> None:
    """As the README has it, to three digits."""

    def read_back(numbers: torch.Tensor) -> torch.Tensor:
        x_RK = numbers[:, None].expand(-1, 128).contiguous().to(device)
        return dequantize_rows(quantize_rows(x_RK, fmt, engine=engine), engine=engine)[:, 0].cpu()

    below, above = read_back(torch.tensor([lost * 0.997, lost * 1.003]))
    assert below == 0 and above > 0
    steps = torch.linspace(1.003, 1.9, 500) * coarse
    assert ((read_back(steps) - steps).abs() <= steps / 16).all()
    steps = torch.linspace(0.5, 0.997, 500) * coarse
    assert ((read_back(steps) - steps).abs() > steps / 16).any()


@pytest.mark.parametrize("engine", ENGINES)
def test_scale_underflow_gives_codes_zero(engine: str, device: torch.device) -> None:
    x = torch.full((1, 64), 1e-8, device=device)
    x[0, 0] = 2688.0
    q = quantize_rows(x, "nvfp4", engine=engine)
    assert q.scales_RV.float()[0, 1:].tolist() == [0.0] * 3
    assert not q.quants_RK[0, 8:].any()
    assert dequantize_rows(q, engine=engine)[0, 16:].tolist() == [0.0] * 48


@triton.jit
def _tile_kernel(x_ptr, q_ptr, s_ptr, FMT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    row = tl.arange(0, M)[:, None]
    x = tl.load(x_ptr + row * N + tl.arange(0, N)[None, :])
    q, s = quantize_tile(x, token_gsf(bits_f32(row_amax_bits(x))), FMT)
    tl.store(q_ptr + row * q.shape[1] + tl.arange(0, q.shape[1])[None, :], q)
    tl.store(s_ptr + row * s.shape[1] + tl.arange(0, s.shape[1])[None, :], s)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(1, 2048), (16, 128), (64, 128)])
def test_quantize_tile_inside_another_kernel(fmt: TokenFormat, shape: tuple[int, int], device, rng) -> None:
    rows = hostile_rows(shape[1], rng)
    x = rows[torch.arange(shape[0]) * 5 % len(rows)].to(device)
    gsf = reference_quantize.token_gsf(reference_quantize.row_amax_bits(x).view(torch.float32))
    q, s = reference_quantize.quantize_tile(x, gsf, int(fmt.code))
    q_out, s_out = torch.empty_like(q), torch.empty_like(s)
    _tile_kernel[(1,)](x, q_out, s_out, FMT=int(fmt.code), M=shape[0], N=shape[1], enable_fp_fusion=False)
    assert_same_bits(q_out, q, "q")
    assert_same_bits(s_out, s, "s")


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device, rng) -> None:
    x = hostile_rows(256, rng).to(device)
    for fmt in FORMATS.values():
        together = quantize_rows(x, fmt)
        for row in (0, 9, 15):
            alone = quantize_rows(x[row : row + 1], fmt)
            assert_same_bits(together.quants_RK[row : row + 1], alone.quants_RK)


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch, rng) -> None:
    x = hostile_rows(256, rng)
    clean, seen = reference_quantize.canonical_nan, []

    def remember(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.numel())
        return clean(values)

    for fmt in FORMATS.values():
        whole = quantize_rows(x, fmt, engine="torch")
        numbers = dequantize_rows(whole, engine="torch")
        with monkeypatch.context() as patch:
            patch.setattr(reference_quantize, "CHUNK_ELEMENTS", 5 * 256)
            patch.setattr(reference_quantize, "canonical_nan", remember)
            assert_same_rows(quantize_rows(x, fmt, engine="torch"), whole)
            assert_same_bits(dequantize_rows(whole, engine="torch"), numbers, fmt.name)
    assert max(seen) == 5 * 256


def test_rows_past_two_to_the_31_elements(device: torch.device) -> None:
    """Only three rows of the storage are touched, so it costs address space, not memory."""
    storage = torch.empty(2**31 + 128, dtype=torch.bfloat16, device=device)
    x = storage.as_strided((3, 128), (2**30, 1))
    x.copy_(torch.arange(384).view(3, 128))
    q = quantize_rows(x, "bf16", engine="triton")
    assert_same_bits(q.quants_RK, torch.arange(384).view(3, 128).bfloat16())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_no_rows_with_the_strides_of_numpy(fmt: TokenFormat, engine: str, device: torch.device) -> None:
    x = torch.zeros(0, 128, device=device).as_strided((0, 128), (0, 0))
    assert x.stride() == (0, 0) == torch.from_numpy(np.zeros((0, 128), np.float32)).stride()
    q = quantize_rows(x, fmt, engine=engine)
    assert dequantize_rows(q, engine=engine).shape == (0, 128)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: x.tolist(), "x_RK"),
        (lambda x: x[0], "x_RK"),
        (lambda x: x.half(), "x_RK"),
        (lambda x: x[:, ::2], "x_RK"),
        (lambda x: x[:, :200].contiguous(), "x_RK"),
        (lambda x: x[:, :0], "x_RK"),
        (lambda x: x.requires_grad_(), "x_RK"),
    ],
    ids=["list", "1-D", "fp16", "strided", "not 16 bytes", "no columns", "grad"],
)
def test_bad_rows(change, name: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=name):
        quantize_rows(change(torch.ones(2, 512, device=device)), "fp8_block")


@pytest.mark.parametrize("gsf", [0.0, -1.0, "1", float("nan"), float("inf"), torch.ones(2), torch.ones(1).double()])
def test_bad_gsf(gsf, device: torch.device) -> None:
    gsf = gsf.to(device) if isinstance(gsf, torch.Tensor) else gsf
    with pytest.raises(ValueError, match="gsf"):
        quantize_rows(torch.ones(2, 128, device=device), "nvfp4", gsf=gsf)


def test_bad_format_engine_and_useless_gsf(device: torch.device) -> None:
    x = torch.ones(2, 128, device=device)
    with pytest.raises(ValueError, match=r"format.*'int3'"):
        quantize_rows(x, "int3")
    with pytest.raises(ValueError, match="engine"):
        quantize_rows(x, "bf16", engine="nvcc")
    with pytest.raises(ValueError, match="gsf"):
        quantize_rows(x, "mxfp8", gsf=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quants_RK", lambda t: t.int()),
        ("quants_RK", lambda t: t[0]),
        ("quants_RK", lambda t: torch.cat([t, t], 1)[:, ::2]),
        ("scales_RV", lambda t: None),
        ("scales_RV", lambda t: t[:, :-1]),
        ("scales_RV", lambda t: t.float()),
        ("row_scale_R", lambda t: None),
        ("row_scale_R", lambda t: t[:1]),
    ],
)
def test_bad_quantized_rows(field: str, value, device: torch.device) -> None:
    q = quantize_rows(torch.ones(2, 128, device=device), "nvfp4")
    with pytest.raises(ValueError, match=field):
        dequantize_rows(dataclasses.replace(q, **{field: value(getattr(q, field))}))
