"""The NVFP4 quantizer of Hopper's kernels, compiled for the CPU: codes of ml_dtypes, bits of `quantize_rows`.

And what other quantizers are made of: a division and a conversion of fewer instructions, scales of a GEMM's results.
"""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.kernels.formats.number_formats import BF16, MAX_ENCODE_SCALE, NVFP4
from moe_runtime.kernels.formats.reference_quantize import quantize_rows
from moe_runtime.kernels.nvrtc import source_path
from tests.support.comparison import assert_same_bits
from tests.support.on_host import between, compile_on_host, needs_compiler

PLACE = "// THE TEXT OF quantize.cuh\n"

pytestmark = needs_compiler


def host_text() -> str:
    """quantize.cuh up to formats whose blocks span lanes, less what is an instruction, `divide` and `scale_code`."""
    text = source_path("quantize.cuh").read_text()
    text = between(text, "constexpr u32 MAGNITUDE", "// Quantizes unit `unit` of a row of any other format")
    for start, end in (
        ("// Values of a unit", "// bf16 bits;"),
        ("// e4m3 bits of two values", "// Largest magnitude of 16"),
        ("// The largest `bits` of", "// e2m1 codes of 8"),
    ):
        text = text.replace(between(text, start, end), "")
    numbers = source_path("numbers.cuh").read_text()
    text += between(numbers, "// x / s rounded to nearest", "// bf16 2^(byte - 127)")
    gemm = source_path("dequant_result.cuh").read_text()
    text += between(gemm, "__device__ __forceinline__ bool is_finite", "// The larger magnitude")
    text += "struct Requantization {\n  float gsf;\n"
    text += between(gemm, "  __device__ __forceinline__ u32 scale_code", "\n};") + "\n};\n"
    text = text.replace("__device__ __forceinline__", "inline")
    assert "asm" not in text and "quantize_nvfp4(" in text
    return text


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    binary = tmp_path_factory.mktemp("quantize") / "quantize.so"
    options = ("-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC")
    compile_on_host("quantize_on_host.cpp", PLACE, host_text(), binary, *options)
    return ctypes.CDLL(str(binary))


def codes_of(library: ctypes.CDLL, first: int, step: int, count: int) -> np.ndarray:
    codes = np.empty(count, dtype=np.uint8)
    library.codes_of(ctypes.c_uint32(first), ctypes.c_uint32(step), count, ctypes.c_void_p(codes.ctypes.data))
    return codes


def check_codes(library: ctypes.CDLL, first: int, step: int, count: int) -> None:
    bits = np.uint32(first) + np.arange(count, dtype=np.uint32) * np.uint32(step)
    wanted = np.minimum(bits.view(np.float32), np.float32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(codes_of(library, first, step, count), wanted)


def test_codes_of_magnitudes(library: ctypes.CDLL, rng: torch.Generator) -> None:
    """All fp32 near a tie, and every 251st of them all, from a number that changes."""
    for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 2.0, 4.0, 6.0, 0.5, 1.0):
        check_codes(library, int(np.float32(tie).view(np.uint32)) - 2000, 1, 4000)
    first = int(torch.randint(251, (1,), generator=rng))
    check_codes(library, first, 251, 0x7F800000 // 251)
    assert codes_of(library, 0x7F800000, 1, 1) == 7, "Inf saturates"
    assert not codes_of(library, 0x7F800001, 0x1003, 1000).any(), "NaN has no code"


def hostile_rows(rng: torch.Generator, columns: int) -> torch.Tensor:
    """bf16 rows: random numbers, random bits, every power of two, zeros of both signs, NaN and Inf in some blocks."""

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng)

    bits = torch.randint(-(1 << 15), 1 << 15, (96, columns), generator=rng).to(torch.int16)
    finite = torch.where((bits & 0x7F80) == 0x7F80, bits & 0x3FFF, bits)
    powers = torch.exp2(torch.arange(-133, 127).float())[:, None]
    few = torch.randint(-6, 7, (64, columns), generator=rng).float()
    wide = normal(64) * torch.exp2(torch.randint(-40, 40, (64, columns // 16), generator=rng)).repeat_interleave(16, 1)
    rows = torch.cat([normal(256), normal(len(powers)) * powers, few, few * 2.0**-130, wide]).to(torch.bfloat16)
    rows = torch.cat([rows, bits.view(torch.bfloat16), finite.view(torch.bfloat16)])
    zeros = torch.zeros(2, columns, dtype=torch.bfloat16)
    zeros[1] = -0.0
    broken = normal(4).to(torch.bfloat16)
    broken[0, 5], broken[1, 0], broken[2, columns - 1], broken[3] = torch.nan, torch.inf, -torch.inf, -torch.nan
    return torch.cat([rows, zeros, broken])


@pytest.mark.parametrize("gsf", [None, 1.0, 37.3, 2.0**-126, MAX_ENCODE_SCALE])
def test_bits_of_quantize_rows(library: ctypes.CDLL, rng: torch.Generator, gsf: float | None) -> None:
    x = hostile_rows(rng, 96)
    static = None if gsf is None else torch.full((1,), gsf)
    wanted = quantize_rows(x, NVFP4, gsf=static)
    quants = torch.empty(x.shape[0], 48, dtype=torch.uint8)
    scales = torch.empty(x.shape[0], 6, dtype=torch.uint8)
    row_scale = torch.empty(x.shape[0])
    at = None if static is None else static.data_ptr()
    for r in range(x.shape[0]):
        outputs = [ctypes.c_void_p(t[r].data_ptr()) for t in (quants, scales, row_scale)]
        library.quantize_row(ctypes.c_void_p(x[r].data_ptr()), 6, ctypes.c_void_p(at), *outputs)
    assert wanted.scales_RV is not None and wanted.row_scale_R is not None
    assert_same_bits(scales, wanted.scales_RV.view(torch.uint8), "scales")
    assert_same_bits(quants, wanted.quants_RK.view(torch.uint8), "quants")
    assert_same_bits(row_scale, wanted.row_scale_R, "row_scale")


def random_bits(rng: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (count,), generator=rng).to(torch.int32).view(torch.float32)


def test_a_division_gives_what_division_gives(library: ctypes.CDLL, rng: torch.Generator) -> None:
    """Where it is a normal number: smaller quotients are codes of zero. Divisors are scales of FP8 blocks."""
    x = random_bits(rng, 1 << 20)
    x = torch.cat([x[x.isfinite()], torch.tensor([0.0, -0.0])])
    # The largest number of a block over 448; most quotients then are far below.
    amax = torch.where(
        torch.rand(x.shape, generator=rng) < 0.5, x.abs() * (1 + torch.rand(x.shape, generator=rng)), 1e38
    )
    s = (amax.clamp(min=1e-4, max=3e38) / 448).contiguous()
    found = torch.empty_like(x)
    library.quotients(*(ctypes.c_void_p(t.data_ptr()) for t in (x, s)), x.numel(), ctypes.c_void_p(found.data_ptr()))
    wanted = x / s
    counts = wanted.abs() >= 2.0**-20
    assert counts.sum() > 1000
    assert_same_bits(found[counts], wanted[counts], "quotients")
    assert (found[~counts].abs() < 2.0**-19).all()
    assert_same_bits(found.signbit(), wanted.signbit(), "signs")


@pytest.mark.parametrize("gsf", [1.0, 16.0, 37.3, -37.3])
def test_scale_codes_of_a_gemm(library: ctypes.CDLL, gsf: float) -> None:
    """At fp32 numbers around each tie of e4m3, where a product with 1/6 is another number than a quotient."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ties = (3 * (codes[1:] + codes[:-1]) / abs(gsf)).astype(np.float32).view(np.int32)
    amax = (ties[:, None] + np.arange(-4, 5, dtype=np.int32)).view(np.float32).flatten()
    amax = np.concatenate([amax, np.array([0, 1e-40, 1e36, np.inf, np.nan], dtype=np.float32)])
    found = np.empty(amax.size, dtype=np.uint8)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (amax, found))
    library.scale_codes(ctypes.c_float(gsf), next(pointers), amax.size, next(pointers))
    scales = np.minimum(np.abs(np.float32(gsf)) * amax / np.float32(6), np.float32(448))
    wanted = scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    wanted[-2] = 127  # no scale of numbers that are not finite
    np.testing.assert_array_equal(found, wanted)


def test_words_of_bf16(library: ctypes.CDLL, rng: torch.Generator) -> None:
    """Random bits, every NaN alone among numbers, and the edges of rounding."""
    x = random_bits(rng, 8 << 12)
    few = torch.randn(512, 8, generator=rng)
    few[torch.arange(512), torch.arange(512) % 8] = (torch.arange(512).int() * 0x41 - 0x7FFFFF).view(torch.float32)
    edges = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000, 0x00008000, 0x00018000, 0x7F800000, 0])
    x = torch.cat([x, few.flatten(), edges.int().view(torch.float32)]).view(-1, 8)
    words = torch.empty(x.shape, dtype=torch.int16)
    library.words_of(ctypes.c_void_p(x.data_ptr()), x.shape[0], ctypes.c_void_p(words.data_ptr()))
    assert_same_bits(words, quantize_rows(x, BF16).quants_RK.view(torch.int16), "bf16")
