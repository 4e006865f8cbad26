"""Torch references of `bits.py`, `quantize.py` and `swizzle.py`: the same results bit for bit, on CPU and CUDA tensors.

CPUs run them, and tests compare the kernels with them. Names and meanings are those of the Triton functions. The public
wrappers there validate the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from moe_runtime.kernels.formats.number_formats import (
    MAX_ENCODE_SCALE,
    NVFP4_FULL_SCALE,
    FormatCode,
    QuantizedRows,
    TokenFormat,
    ceil_div,
)

ABS_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
NAN_BITS = 0x7FC00000
AMAX_FLOOR, AMAX_FLOOR_BITS = 1e-4, 0x38D1B717
MXFP4_FLOOR_BITS = 0x01C00000  # 6 * 2^-126, of scale 2^-126 (byte 1)

CHUNK_ELEMENTS = 1 << 21
"""Elements quantized or dequantized at a time: the encoders need about ten int32 temporaries of this size."""


def f32_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of fp32 `x` as int32."""
    return x.view(torch.int32)


def bits_f32(bits: torch.Tensor) -> torch.Tensor:
    """The fp32 value whose bits are the int32 `bits`."""
    return bits.view(torch.float32)


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """`|x|` of fp32 as int32 bits: ordered like the magnitudes, with Inf above finite values and NaN above Inf."""
    return f32_bits(x) & ABS_MASK


def canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """fp32 `x` with every NaN replaced by 0x7FC00000, because devices return different payloads."""
    return bits_f32(f32_bits(x).masked_fill(magnitude_bits(x) > INF_BITS, NAN_BITS))


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """A 0-dim fp32 tensor on the device: torch turns division by a Python number into a multiplication on GPUs."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def f32_to_bf16_bits(x: torch.Tensor) -> torch.Tensor:
    """uint16 bits of bf16; a NaN keeps its sign and upper payload and is made quiet."""
    bits = f32_bits(x)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    is_nan = (bits & ABS_MASK) > INF_BITS
    return (torch.where(is_nan, bits | 0x400000, rounded) >> 16).to(torch.int16).view(torch.uint16)


def bf16_parts(x: torch.Tensor) -> torch.Tensor:
    """fp32 `[3, ...]`, bf16 numbers whose sum, in this order, is fp32 `x`; of Inf and NaN the first is all, then 0."""
    parts, left = [], x
    for _ in range(3):
        # The upper half of the bits: exact, and what is left has 8 bits less.
        upper = torch.where(left.isfinite(), bits_f32(f32_bits(left) & -65536), left)
        parts.append(upper)
        left = torch.where(left.isfinite(), left - upper, 0.0)
    return torch.stack(parts)


def bf16_bits_to_f32(u16: torch.Tensor) -> torch.Tensor:
    """fp32 of bf16 bits (uint16 or int16)."""
    return bits_f32(u16.view(torch.int16).to(torch.int32) << 16)


def f32_to_e4m3_bits(x: torch.Tensor) -> torch.Tensor:
    """uint8 bits of e4m3fn, saturating at +-448 (Inf too); NaN of either sign gives 0x7F."""
    bits = f32_bits(x)
    is_nan = (bits & ABS_MASK) > INF_BITS
    a = (bits & ABS_MASK).clamp_(max=0x43E00000)
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
    significand = (a & 0x7FFFFF) | 0x800000
    shift = (141 - (a >> 23)).clamp_(1, 25)
    half = torch.bitwise_left_shift(torch.ones_like(shift), shift - 1)
    denormal = (significand + half - 1 + ((significand >> shift) & 1)) >> shift
    code = torch.where(a >= 0x3C800000, normal, denormal) | ((bits >> 24) & 0x80)
    return code.masked_fill_(is_nan, 0x7F).to(torch.uint8)


def e4m3_bits_to_f32(u8: torch.Tensor) -> torch.Tensor:
    """fp32 of e4m3fn bits; 0x7F and 0xFF give NaN (0x7FC00000)."""
    code = u8.to(torch.int32)
    sign = (code & 0x80) << 24
    code = code & 0x7F
    normal = (((code >> 3) + 120) << 23) | ((code & 7) << 20)
    denormal = f32_bits((code & 7).to(torch.float32) * 2.0**-9)
    bits = torch.where(code >= 8, normal, denormal) | sign
    return bits_f32(bits.masked_fill_(code == 0x7F, NAN_BITS))


def f32_to_e2m1_code(x: torch.Tensor) -> torch.Tensor:
    """uint8 code `s e e m` (0..15) of e2m1, saturating at +-6 (Inf too); NaN, which e2m1 lacks, gives 0."""
    bits = f32_bits(x)
    is_nan = (bits & ABS_MASK) > INF_BITS
    a = (bits & ABS_MASK).clamp_(max=0x40C00000)
    normal = ((a + 0x1FFFFF + ((a >> 22) & 1)) >> 22) - 252
    small = (a > 0x3E800000).to(torch.int32) + (a >= 0x3F400000).to(torch.int32)
    code = torch.where(a >= 0x3F800000, normal, small) | ((bits >> 28) & 8)
    return code.masked_fill_(is_nan, 0).to(torch.uint8)


def e2m1_code_to_f32(code: torch.Tensor) -> torch.Tensor:
    """fp32 of an e2m1 code; only its low four bits are read."""
    c = code.to(torch.int32)
    sign = (c & 8) << 28
    normal = ((((c >> 1) & 3) + 126) << 23) | ((c & 1) << 22)
    small = (c & 1) * 0x3F000000
    return bits_f32(torch.where((c & 6) != 0, normal, small) | sign)


def e8m0_to_f32(u8: torch.Tensor) -> torch.Tensor:
    """fp32 `2^(byte - 127)` of a UE8M0 byte; 0 gives 2^-127 (denormal), 255 gives NaN (0x7FC00000)."""
    byte = u8.to(torch.int32)
    return bits_f32((byte << 23).masked_fill_(byte == 0, 0x400000).masked_fill_(byte == 255, NAN_BITS))


def clamp_gsf(gsf: torch.Tensor) -> torch.Tensor:
    """An encode scale kept to at most 2^100; NaN stays NaN."""
    return gsf.masked_fill(gsf > MAX_ENCODE_SCALE, MAX_ENCODE_SCALE)


def row_amax_bits(x: torch.Tensor) -> torch.Tensor:
    """int32 `[M]`: bits of the largest magnitude of each row of fp32 `[M, N]`."""
    return magnitude_bits(x).amax(dim=1)


def token_gsf(amax: torch.Tensor) -> torch.Tensor:
    """Encode scale of NVFP4 rows with fp32 maxima `[M]`: `min(div_rn(2688, amax), 2^100)`; 1 if 0 or not finite."""
    bits = magnitude_bits(amax)
    usable = (bits > 0) & (bits < INF_BITS)
    gsf = torch.div(_constant(NVFP4_FULL_SCALE, amax), amax.clamp(min=2.0**-89))
    return clamp_gsf(gsf).masked_fill_(~usable, 1.0)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., N]` of e2m1 codes to `[..., N/2]`: element `2j` in the low nibble of byte `j`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., N/2]` to e2m1 codes `[..., N]`, the inverse of `pack_nibbles`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def quantize_tile(
    x: torch.Tensor, gsf: torch.Tensor, code: int, block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize fp32 `[M, N]`; `gsf` fp32 `[M]` is read for NVFP4 only.

    `block` None means that of the format. Only FP8 blocks may be short at the end of a row. Returns `(q, s)` as raw
    bits, exactly as the jit function `quantize.quantize_tile` does.
    """
    if code == FormatCode.BF16:
        q = f32_to_bf16_bits(x)
        return q, q
    blocks_of = {FormatCode.FP8_BLOCK: 128, FormatCode.MXFP8: 32, FormatCode.MXFP4: 32, FormatCode.NVFP4: 16}
    block = block or blocks_of[FormatCode(code)]
    num_columns = x.shape[1]
    if code == FormatCode.FP8_BLOCK and num_columns % block:
        x = torch.nn.functional.pad(x, (0, -num_columns % block))
    blocks = x.reshape(x.shape[0], x.shape[1] // block, block)
    amax_bits = magnitude_bits(blocks).amax(dim=2)
    poisoned = amax_bits >= INF_BITS
    amax_bits = amax_bits.masked_fill_(poisoned, 0)
    if code == FormatCode.NVFP4:
        encode = gsf[:, None].expand_as(amax_bits)
        sf = f32_to_e4m3_bits(torch.div(encode * bits_f32(amax_bits), _constant(6.0, x)))
        dead = poisoned | ((sf & 0x7F) == 0) | (sf == 0x7F)
        factor = torch.div(encode, e4m3_bits_to_f32(sf).masked_fill_(dead, 1.0))
        values = blocks.masked_fill(dead[:, :, None], 0.0) * factor[:, :, None]
        return pack_nibbles(f32_to_e2m1_code(values.reshape(x.shape))), sf.masked_fill_(poisoned, 0x7F)
    floor, largest = (MXFP4_FLOOR_BITS, 6.0) if code == FormatCode.MXFP4 else (AMAX_FLOOR_BITS, 448.0)
    ideal = torch.div(bits_f32(amax_bits.clamp(min=floor)), _constant(largest, x))
    clean = blocks.masked_fill(poisoned[:, :, None], 0.0)
    if code in (FormatCode.MXFP8, FormatCode.MXFP4):
        byte = (f32_bits(ideal) + 0x7FFFFF) >> 23
        values = clean * bits_f32((254 - byte) << 23)[:, :, None]
        s = byte.masked_fill(poisoned, 255).to(torch.uint8)
        if code == FormatCode.MXFP4:
            return pack_nibbles(f32_to_e2m1_code(values.reshape(x.shape))), s
    else:
        values = torch.div(clean, ideal[:, :, None])
        s = bits_f32(f32_bits(ideal).masked_fill(poisoned, NAN_BITS))
    return f32_to_e4m3_bits(values).reshape(x.shape)[:, :num_columns], s


def quantize_fp8_blocks(
    x_EMK: torch.Tensor, block_rows: int, dtype: torch.dtype, *, powers_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quants `[E, M, K]` of an fp8 dtype and fp32 scales `[E, ceil(M / block_rows), ceil(K / 128)]` of `[E, M, K]`.

    Blocks are `block_rows x 128`, short at the end of M and of K. The scale is `max(amax, 1e-4) / largest`, or with
    `powers_of_two` the smallest power of two that is at least `amax / largest`, from 2^-126 on; 1 where all is 0. A
    block with NaN or Inf gets scale NaN and quants 0.
    """
    experts, m, k = x_EMK.shape
    padded = torch.nn.functional.pad(x_EMK, (0, -k % 128, 0, -m % block_rows))
    tiles = padded.reshape(experts, ceil_div(m, block_rows), block_rows, ceil_div(k, 128), 128)
    amax = tiles.abs().amax((2, 4))
    usable = amax.isfinite()
    largest = torch.finfo(dtype).max
    # On GPUs torch divides by a Python number as a multiplication by the rounded reciprocal; by a tensor it divides.
    scales = amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, largest)
    if powers_of_two:
        # amax = m * 2^e and largest = f * 2^l, with m and f in [1/2, 1).
        f, log = math.frexp(largest)
        mantissa, exponent = torch.frexp(torch.where(usable, amax, 1.0))
        power = (exponent - log + (mantissa > f)).masked_fill(amax == 0, 0).clamp(min=-126)
        scales = e8m0_to_f32((power + 127).to(torch.uint8))
    values = torch.where(usable[:, :, None, :, None], tiles / scales[:, :, None, :, None], 0.0)
    quants = values.clamp(-largest, largest).reshape(padded.shape)[:, :m, :k].to(dtype)
    return quants.contiguous(), torch.where(usable, scales, torch.nan)


def quantize_rows(x_RK: torch.Tensor, fmt: TokenFormat, *, gsf: torch.Tensor | None = None) -> QuantizedRows:
    """Reference of `quantize.quantize_rows`; `gsf` is None (per row) or a one-element fp32 tensor."""
    num_rows, k = x_RK.shape
    out = empty_rows(fmt, num_rows, k, x_RK.device)
    step = max(1, CHUNK_ELEMENTS // k)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        x = x_RK[rows].to(torch.float32)
        encode = token_gsf(bits_f32(row_amax_bits(x))) if gsf is None else clamp_gsf(gsf).expand(x.shape[0])
        q, s = quantize_tile(x, encode, fmt.code)
        raw_bits(out.quants_RK)[rows] = raw_bits(q)
        if out.scales_RV is not None:
            raw_bits(out.scales_RV)[rows] = raw_bits(s)
        if out.row_scale_R is not None:
            out.row_scale_R[rows] = canonical_nan(torch.div(_constant(1.0, x), encode))
    return out


def dequantize_rows(q: QuantizedRows) -> torch.Tensor:
    """Reference of `quantize.dequantize_rows`: fp32 `[R, K]`, `(q * sf) * row_scale` in that order."""
    fmt = q.format
    if fmt.code == FormatCode.BF16:
        return q.quants_RK.to(torch.float32)
    assert q.scales_RV is not None
    num_rows, columns = q.quants_RK.shape
    k = columns * 8 // fmt.element_bits
    out = torch.empty(num_rows, k, dtype=torch.float32, device=q.quants_RK.device)
    step = max(1, CHUNK_ELEMENTS // max(1, k))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        bits, scales = raw_bits(q.quants_RK[rows]), q.scales_RV[rows]
        values = e2m1_code_to_f32(unpack_nibbles(bits)) if fmt.element_bits == 4 else e4m3_bits_to_f32(bits)
        if fmt.code == FormatCode.NVFP4:
            sf = e4m3_bits_to_f32(raw_bits(scales))
        else:
            sf = scales if fmt.code == FormatCode.FP8_BLOCK else e8m0_to_f32(raw_bits(scales))
        values *= sf.repeat_interleave(fmt.block, dim=1)[:, :k]
        if q.row_scale_R is not None:
            values *= q.row_scale_R[rows, None]
        out[rows] = canonical_nan(values)
    return out


def empty_rows(fmt: TokenFormat, num_rows: int, k: int, device: torch.device) -> QuantizedRows:
    """Uninitialized `QuantizedRows` of `num_rows` rows of `k` values."""

    def new(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, columns, dtype=dtype, device=device)

    return QuantizedRows(
        fmt,
        new(fmt.quant_columns(k), fmt.quant_dtype),
        None if fmt.scale_dtype is None else new(fmt.scale_columns(k), fmt.scale_dtype),
        torch.empty(num_rows, dtype=torch.float32, device=device) if fmt.has_row_scale else None,
    )


def raw_bits(t: torch.Tensor) -> torch.Tensor:
    """`t` viewed as integers of its width (uint8 or int16; fp32 stays): fp8 and bf16 tensors lack most operations."""
    return t if t.dtype == torch.float32 else t.view({1: torch.uint8, 2: torch.int16}[t.dtype.itemsize])


def cat_bits(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`torch.cat` of at least one tensor, all of one dtype. `torch.autocast` lets torch's refuse fp8, and some bf16."""
    return parts[0] if len(parts) == 1 else torch.cat([raw_bits(part) for part in parts]).view(parts[0].dtype)


def copy_as(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the bits of `t`, viewed as `dtype` along the last dimension.

    `contiguous` would return a tensor of one row or none uncopied, with strides and an offset that a wider dtype cannot
    have.
    """
    return t.clone(memory_format=torch.contiguous_format).view(dtype)


def swizzle_scales(scales_ENV: torch.Tensor) -> torch.Tensor:
    """`swizzle.swizzle_scales` of bytes `[E, N, V]`, without checks: `[E, ceil(N/128), ceil(V/4), 32, 4, 4]`."""
    e, n, v = scales_ENV.shape
    blocks, columns = ceil_div(n, 128), ceil_div(v, 4)
    if not scales_ENV.numel():
        return scales_ENV.new_empty(e, blocks, columns, 32, 4, 4)
    padded = raw_bits(scales_ENV).contiguous()
    if n % 128 or v % 4 or padded.storage_offset() % 4:
        padded = torch.nn.functional.pad(padded, (0, columns * 4 - v, 0, blocks * 128 - n))
    # Four bytes side by side stay together: they are moved as one word.
    words = padded.view(-1).view(torch.int32).view(e, blocks, 4, 32, columns).permute(0, 1, 4, 3, 2)
    if words.device.type == "cpu":
        # torch would wake its threads, which costs more than these few bytes while a checkpoint is read.
        words = torch.from_numpy(np.ascontiguousarray(words.numpy()))
    return words.contiguous().view(torch.uint8).view(e, blocks, columns, 32, 4, 4).view(scales_ENV.dtype)


def unswizzle_scales(blocks: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """`swizzle.unswizzle_scales` without checks, of 6-D blocks: `[E, num_rows, num_columns]`."""
    e, row_blocks, column_blocks = blocks.shape[:3]
    raw = raw_bits(blocks)
    words = (raw.clone() if raw.storage_offset() % 4 else raw).view(torch.int32)[..., 0]
    padded = words.permute(0, 1, 4, 3, 2).reshape(e, row_blocks * 128, column_blocks).view(torch.uint8)
    return padded[:, :num_rows, :num_columns].contiguous().view(blocks.dtype)
