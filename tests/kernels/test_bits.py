"""Every codec, as kernel and as reference, against ml_dtypes: on all bit patterns, or on all bf16 numbers, the
neighbours of every rounding boundary and millions of random fp32 patterns."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats import bits
from moe_runtime.kernels.formats import reference_quantize as references
from moe_runtime.kernels.runtime import INTERPRET
from tests.support.comparison import assert_same_bits

BLOCK = 1 << 18 if INTERPRET else 1024

DECODERS = {
    "e4m3": (bits.e4m3_bits_to_f32, references.e4m3_bits_to_f32, ml_dtypes.float8_e4m3fn),
    "e8m0": (bits.e8m0_to_f32, references.e8m0_to_f32, ml_dtypes.float8_e8m0fnu),
    "e2m1": (bits.e2m1_code_to_f32, references.e2m1_code_to_f32, ml_dtypes.float4_e2m1fn),
    "bf16": (bits.bf16_bits_to_f32, references.bf16_bits_to_f32, ml_dtypes.bfloat16),
}
# kernel, reference, oracle, largest finite value (encoders to types without an Inf saturate there)
ENCODERS = {
    "bf16": (bits.f32_to_bf16_bits, references.f32_to_bf16_bits, ml_dtypes.bfloat16, None),
    "e4m3": (bits.f32_to_e4m3_bits, references.f32_to_e4m3_bits, ml_dtypes.float8_e4m3fn, 448.0),
    "e2m1": (bits.f32_to_e2m1_code, references.f32_to_e2m1_code, ml_dtypes.float4_e2m1fn, 6.0),
}


@triton.jit
def _map_kernel(in_ptr, out_ptr, n, FN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, FN(tl.load(in_ptr + i, i < n, other=0)), i < n)


def by_kernel(fn, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(x.numel()))
    _map_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), FN=fn, BLOCK=block, enable_fp_fusion=False)
    return out


def canonical(x: np.ndarray) -> np.ndarray:
    """fp32 with the one NaN of our decoders: ml_dtypes keeps the sign of a NaN."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000).view(np.float32), x)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_on_every_bit_pattern(name: str, device: torch.device) -> None:
    kernel, reference, oracle = DECODERS[name]
    patterns = np.arange({"bf16": 65536, "e2m1": 16}.get(name, 256)).astype(np.uint16 if name == "bf16" else np.uint8)
    expected = patterns.view(oracle).astype(np.float32)
    if name == "bf16":
        # The decoder passes a NaN on as it is; numpy's cast makes it quiet.
        expected = (patterns.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(expected, patterns.view(oracle).astype(np.float32))
    else:
        expected = canonical(expected)
    x = torch.from_numpy(patterns).to(device)
    assert_same_bits(by_kernel(kernel, x, torch.float32), expected, "kernel")
    assert_same_bits(reference(x), expected, "reference")


def test_e5m2_decoder_on_every_bit_pattern(device: torch.device) -> None:
    patterns = np.arange(256).astype(np.uint8)
    expected = canonical(patterns.view(ml_dtypes.float8_e5m2).astype(np.float32))
    assert_same_bits(by_kernel(bits.e5m2_bits_to_f32, torch.from_numpy(patterns).to(device), torch.float32), expected)


def test_e2m1_decoder_looks_at_four_bits_only(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    expected = references.e2m1_code_to_f32(codes & 15)
    assert_same_bits(by_kernel(bits.e2m1_code_to_f32, codes, torch.float32), expected)
    assert_same_bits(references.e2m1_code_to_f32(codes), expected)


def test_every_number_of_e2m1_is_one_of_e4m3(device: torch.device) -> None:
    codes = np.arange(16).astype(np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    found = by_kernel(bits.e2m1_code_to_e4m3_bits, torch.from_numpy(codes).to(device), torch.uint8)
    assert_same_bits(found, expected)


def encoder_inputs(oracle: type, seed: int) -> np.ndarray:
    """All bf16 numbers; values of the target type, midpoints between them, and their fp32 neighbours; random bits."""
    bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    width = np.dtype(oracle).itemsize
    values = np.arange(256 if width == 1 else 65536).astype(np.uint8 if width == 1 else np.uint16)
    if oracle is ml_dtypes.float4_e2m1fn:
        values = values[:16]
    values = values.view(oracle).astype(np.float32)
    values = np.unique(values[np.isfinite(values)].astype(np.float64))
    with np.errstate(over="ignore"):
        boundaries = np.concatenate([values, (values[1:] + values[:-1]) / 2, values * 1.25]).astype(np.float32)
        neighbours = [np.nextafter(boundaries, np.float32(s * np.inf)) for s in (-1, 1)]
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2**32, 1 << 21, dtype=np.uint32).view(np.float32)
    # Uniform patterns are mostly far outside the narrow formats.
    near = rng.standard_normal(1 << 20).astype(np.float32) * np.exp2(rng.integers(-12, 10, 1 << 20)).astype(np.float32)
    return np.concatenate([bf16, boundaries, *neighbours, patterns, near])


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_round_like_ml_dtypes(name: str, device: torch.device, seed: int) -> None:
    kernel, reference, oracle, largest = ENCODERS[name]
    x = encoder_inputs(oracle, seed)
    nan = np.isnan(x)
    finite = np.where(nan, np.float32(0), x)
    if largest is not None:
        finite = np.clip(finite, -largest, largest)
    expected = finite.astype(oracle).view(np.uint16 if name == "bf16" else np.uint8)
    if name == "bf16":
        # Quiet, sign and upper payload kept: what the IEEE standard asks for and hardware does.
        expected = np.where(nan, (x.view(np.uint32) >> 16).astype(np.uint16) | np.uint16(0x40), expected)
        assert np.isnan(expected.view(oracle)[nan]).all()
    else:
        expected = np.where(nan, np.uint8(0x7F if name == "e4m3" else 0), expected)
    given = torch.from_numpy(x).to(device)
    dtype = torch.uint16 if name == "bf16" else torch.uint8
    assert_same_bits(by_kernel(kernel, given, dtype), expected, "kernel")
    assert_same_bits(reference(given), expected, "reference")


def test_e2m1_ties_of_the_format_description(device: torch.device) -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 1e30, -0.25, -1.75, float("inf")], device=device)
    expected = torch.tensor([0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 12, 7], dtype=torch.uint8)
    assert_same_bits(by_kernel(bits.f32_to_e2m1_code, x, torch.uint8), expected)


def test_docstring_example() -> None:
    one, minus_six, top = (torch.tensor([v]) for v in (1.0, -6.0, 448.0))
    assert references.f32_to_bf16_bits(one).view(torch.int16).item() == 0x3F80
    assert references.f32_to_e4m3_bits(one).item() == 0x38
    assert references.f32_to_e4m3_bits(top).item() == 0x7E
    assert references.f32_to_e2m1_code(one).item() == 0b0010
    assert references.f32_to_e2m1_code(minus_six).item() == 0b1111
    assert references.e8m0_to_f32(torch.tensor([127], dtype=torch.uint8)).item() == 1.0


def test_canonical_nan_and_magnitude_order(device: torch.device) -> None:
    patterns = torch.tensor([0, -(2**31), 1, 0x7F800000, -0x800000, 0x7F800001, -1, 0x7FC12345], dtype=torch.int32)
    x = patterns.view(torch.float32).to(device)
    expected = patterns.clone()
    expected[5:] = 0x7FC00000
    assert_same_bits(by_kernel(bits.canonical_nan, x, torch.float32), expected.view(torch.float32))
    assert_same_bits(references.canonical_nan(x), expected.view(torch.float32))
    assert by_kernel(bits.magnitude_bits, x, torch.int32).tolist() == (patterns & 0x7FFFFFFF).tolist()
