"""Number formats bit by bit in integer arithmetic, so that interpreted and compiled kernels give the same bits.

Conversions from fp32 round to nearest, ties to even; conversions to fp32 are exact. Nothing here depends on a device's
handling of denormals, on fused multiply-adds, or on the casts of a library version.
`reference_quantize.py` has the references.

    1.0 -> bf16 0x3F80, e4m3 0x38, e2m1 0b0010;    448.0 -> e4m3 0x7E;    -6.0 -> e2m1 0b1111;    e8m0 127 -> 1.0
"""

from __future__ import annotations

import triton
import triton.language as tl

ABS_MASK = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
E4M3_MAX_BITS = tl.constexpr(0x43E00000)
E4M3_MIN_NORMAL_BITS = tl.constexpr(0x3C800000)


@triton.jit
def f32_bits(x):
    """The bits of fp32 `x` as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_f32(bits):
    """The fp32 value whose bits are the int32 `bits`."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """`|x|` of fp32 as int32 bits: ordered like the magnitudes, with Inf above finite values and NaN above Inf."""
    return f32_bits(x) & ABS_MASK


@triton.jit
def canonical_nan(x):
    """fp32 `x` with every NaN replaced by 0x7FC00000, because devices return different payloads."""
    return bits_f32(tl.where(magnitude_bits(x) > INF_BITS, NAN_BITS, f32_bits(x)))


@triton.jit
def f32_to_bf16_bits(x):
    """uint16 bits of bf16; a NaN keeps its sign and upper payload and is made quiet."""
    bits = f32_bits(x)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    is_nan = (bits & ABS_MASK) > INF_BITS
    return (tl.where(is_nan, bits | 0x400000, rounded) >> 16).to(tl.uint16)


@triton.jit
def bf16_bits_to_f32(u16):
    """fp32 of bf16 bits (16-bit integers, signed or not)."""
    return bits_f32(u16.to(tl.int32) << 16)


@triton.jit
def f32_to_e4m3_bits(x):
    """uint8 bits of e4m3fn, saturating at +-448 (Inf too); NaN of either sign gives 0x7F."""
    bits = f32_bits(x)
    is_nan = (bits & ABS_MASK) > INF_BITS
    a = tl.minimum(bits & ABS_MASK, E4M3_MAX_BITS)
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
    # Below 2^-6 a code counts steps of 2^-9: shift the 24-bit significand so that its unit is that step.
    significand = (a & 0x7FFFFF) | 0x800000
    shift = tl.minimum(tl.maximum(141 - (a >> 23), 1), 25)
    half = 1 << (shift - 1)
    denormal = (significand + half - 1 + ((significand >> shift) & 1)) >> shift
    code = tl.where(a >= E4M3_MIN_NORMAL_BITS, normal, denormal) | ((bits >> 24) & 0x80)
    return tl.where(is_nan, 0x7F, code).to(tl.uint8)


@triton.jit
def e4m3_bits_to_f32(u8):
    """fp32 of e4m3fn bits; 0x7F and 0xFF give NaN (0x7FC00000)."""
    code = u8.to(tl.int32) & 0x7F
    sign = (u8.to(tl.int32) & 0x80) << 24
    normal = ((code >> 3) + 120) << 23 | ((code & 7) << 20)
    denormal = f32_bits((code & 7).to(tl.float32) * 0.001953125)
    bits = tl.where(code >= 8, normal, denormal) | sign
    return bits_f32(tl.where(code == 0x7F, NAN_BITS, bits))


@triton.jit
def e5m2_bits_to_f32(u8):
    """fp32 of e5m2 bits (the upper half of an fp16); Inf is kept, every NaN becomes 0x7FC00000."""
    return canonical_nan((u8.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32))


@triton.jit
def f32_to_e2m1_code(x):
    """uint8 code `s e e m` (0..15) of e2m1, saturating at +-6 (Inf too); NaN, which e2m1 lacks, gives 0."""
    bits = f32_bits(x)
    is_nan = (bits & ABS_MASK) > INF_BITS
    a = tl.minimum(bits & ABS_MASK, 0x40C00000)
    normal = ((a + 0x1FFFFF + ((a >> 22) & 1)) >> 22) - 252
    small = (a > 0x3E800000).to(tl.int32) + (a >= 0x3F400000).to(tl.int32)
    code = tl.where(a >= 0x3F800000, normal, small) | ((bits >> 28) & 8)
    return tl.where(is_nan, 0, code).to(tl.uint8)


@triton.jit
def e2m1_code_to_f32(code):
    """fp32 of an e2m1 code; only its low four bits are read."""
    c = code.to(tl.int32)
    sign = (c & 8) << 28
    normal = (((c >> 1) & 3) + 126) << 23 | ((c & 1) << 22)
    small = (c & 1) * 0x3F000000
    return bits_f32(tl.where((c & 6) != 0, normal, small) | sign)


@triton.jit
def e2m1_code_to_e4m3_bits(code):
    """uint8 bits of e4m3fn of a uint8 e2m1 code with upper bits 0. Exact: e4m3 has every value of e2m1."""
    magnitude = code & 7
    bits = tl.where(magnitude < 2, magnitude * 0x30, magnitude * 4 + 0x30)
    return (bits | ((code & 8) << 4)).to(tl.uint8)


@triton.jit
def e8m0_to_f32(u8):
    """fp32 `2^(byte - 127)` of a UE8M0 byte; 0 gives 2^-127 (denormal), 255 gives NaN (0x7FC00000)."""
    byte = u8.to(tl.int32)
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return bits_f32(tl.where(byte == 255, NAN_BITS, bits))


@triton.jit
def swizzled_offset(r, v, V):
    """Offset of the scale of row `r`, column `v` of `V` columns in the 128x4 swizzle (`swizzle.py`).

    `r` must be int64 if the offset may exceed 2^31. `scale_blocks.swizzled_offset` is the same formula on the host.
    """
    return (r // 128) * ((V + 3) // 4 * 512) + (v // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + v % 4
