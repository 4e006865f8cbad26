"""Inputs of a tile of the grouped GEMM: its group, found on the device, and its operands, dequantized in registers.

Every format but `fp8_block` is dequantized to bf16 and multiplied by bf16 MMA with fp32 accumulation. This is exact up
to the accumulation: `e2m1 * e4m3` has at most 6 significant bits, `e4m3 * 2^k` has 4, `e2m1 * 2^k` has 2. `fp8_block`
weights and tokens are multiplied as they are; the partial sum of each 128 of K is scaled and added in fp32. With e2m1
weights `fp8_block` tokens are scaled in fp32 and rounded to bf16. Tokens and weights use the same code.
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl

from moe_runtime.kernels.formats.bits import (
    bf16_bits_to_f32,
    e2m1_code_to_e4m3_bits,
    e4m3_bits_to_f32,
    e5m2_bits_to_f32,
    f32_to_bf16_bits,
    swizzled_offset,
)
from moe_runtime.kernels.formats.number_formats import ScaleLayout
from moe_runtime.kernels.formats.quantize import CODE_BF16, CODE_FP8_BLOCK, CODE_MXFP4, CODE_MXFP8, CODE_NVFP4


class NativeForm(IntEnum):
    """Form of the operands of Blackwell's block-scaled MMA; the kernel branches on it."""

    NONE = 0
    """No block-scaled MMA: operands are dequantized to bf16."""
    AS_STORED = 1
    WIDENED = 2
    """e2m1 widened to e4m3 without loss, where Triton compiles no instruction for the mixed pair."""


WIDENED = tl.constexpr(int(NativeForm.WIDENED))
SWIZZLED = tl.constexpr(int(ScaleLayout.SWIZZLED))
K_MAJOR = tl.constexpr(int(ScaleLayout.K_MAJOR))
MN_MAJOR = tl.constexpr(int(ScaleLayout.MN_MAJOR))
PACKED = tl.constexpr(int(ScaleLayout.PACKED))

NVFP4_GAIN = tl.constexpr(2.0**8)
"""Dequantized NVFP4 operands are `2^-8` times their value: e2m1 bits placed in a bf16 are `2^-126` times their value,
and an e4m3 scale in bf16 can carry a power of two of at most `2^118`."""

FP8_BLOCK_K = tl.constexpr(128)
"""Values of K that share a scale in `fp8_block`."""

SCALE_GAIN = tl.constexpr(2.0**118)
E2M1_GAIN = tl.constexpr(2.0**126)


@triton.jit
def find_tile(
    group_offsets_ptr, expert_ids_ptr, num_groups, num_experts, tile, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr
):
    """`(expert, group, start, rows, block)` of row tile `tile`; `expert` is -1 past the last tile.

    Tiles are counted group by group: `ceil(rows / BLOCK_M)` for a group whose expert is in `0 .. num_experts - 1`, else
    none. With offsets `[0, 100, 100, 130]`, experts `[2, 0, 1]` and BLOCK_M 64: tiles 0 and 1 are
    blocks 0 and 1 of group 0, tile 2 is block 0 of group 2 (start 100, rows 30), tile 3 is past the last.
    """
    g = tl.arange(0, BLOCK_G)
    live = g < num_groups
    starts = tl.load(group_offsets_ptr + g, mask=live, other=0)
    rows = tl.load(group_offsets_ptr + g + 1, mask=live, other=0) - starts
    experts = tl.load(expert_ids_ptr + g, mask=live, other=-1)
    runs = live & (experts >= 0) & (experts < num_experts)
    tiles = tl.where(runs, (tl.maximum(rows, 0) + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, 0)
    mine = (last > tile) & (last - tiles <= tile)
    group = tl.sum(tl.where(mine, g, 0))
    expert = tl.sum(tl.where(mine, experts + 1, 0)) - 1
    start = tl.sum(tl.where(mine, starts, 0))
    block = tile - tl.sum(tl.where(mine, last - tiles, 0))
    return expert, group, start, tl.sum(tl.where(mine, rows, 0)), block


@triton.jit
def dense_scale_rows(scale_offsets_ptr, group, start, local):
    """int64 rows of the swizzled scales of rows `local` of a group (`dense_128`: each group starts a fresh block)."""
    return (start // 128 + tl.load(scale_offsets_ptr + group)).to(tl.int64) * 128 + local


@triton.jit
def row_scale_rows(offsets_ptr, group, start, local, LAYOUT: tl.constexpr, ROWS_PER_SCALE: tl.constexpr):
    """int64 scale rows of rows `local` of a group, by the convention of the scale layout.

    `offsets_ptr` holds one number per group: the shift of `dense_128` for `SWIZZLED` scales, the first scale row for
    `PACKED` ones and for others that are padded. For `unpadded` scales it is None.
    """
    if LAYOUT == SWIZZLED:
        scale_row = dense_scale_rows(offsets_ptr, group, start, local)
    elif offsets_ptr is not None:
        scale_row = tl.load(offsets_ptr + group).to(tl.int64) + local
    elif ROWS_PER_SCALE == 1:
        scale_row = (start + local).to(tl.int64)
    else:
        scale_row = (start // ROWS_PER_SCALE + local // ROWS_PER_SCALE).to(tl.int64)
    return scale_row


@triton.jit
def weight_scale_rows(
    expert,
    row,
    num_rows,
    K,
    ld,
    FMT: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_APART: tl.constexpr,
):
    """int64 scale rows of weight rows `row` of an expert: swizzled rows are padded to 128, 128x128 blocks are shared.

    With BLOCKS_APART the upper half of the rows starts with a block of its own. In `MN_MAJOR` and `PACKED` layouts, an
    expert spans as many scale rows as it has scales (or words of scales).
    """
    if LAYOUT == MN_MAJOR:
        scale_row = expert.to(tl.int64) * tl.cdiv(K, BLOCK) * ld + row // 128
    elif LAYOUT == PACKED:
        scale_row = expert.to(tl.int64) * tl.cdiv(K, 4 * BLOCK) * ld + row
    elif BLOCKS_APART:
        half = num_rows // 2
        blocks = tl.cdiv(half, 128)
        block = tl.where(row < half, row // 128, blocks + (row - half) // 128)
        scale_row = expert.to(tl.int64) * (2 * blocks) + block
    elif FMT == CODE_FP8_BLOCK:
        scale_row = expert.to(tl.int64) * tl.cdiv(num_rows, 128) + row // 128
    else:
        scale_row = expert.to(tl.int64) * (tl.cdiv(num_rows, 128) * 128) + row
    return scale_row


@triton.jit
def bf16_value(bits, INTERPRET: tl.constexpr):
    """bf16 values of uint16 bits; fp32 under the interpreter, whose bf16 arithmetic is wrong."""
    if INTERPRET:
        value = bf16_bits_to_f32(bits)
    else:
        value = bits.to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def e8m0_to_bf16(scales, INTERPRET: tl.constexpr):
    """`2^(byte - 127)` of UE8M0 bytes, in the type of `bf16_value`: 2^-127 is a denormal, 255 is NaN."""
    byte = scales.to(tl.uint16)
    return bf16_value(tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7)).to(tl.uint16), INTERPRET)


@triton.jit
def spread(scales, REPEAT: tl.constexpr):
    """`[M, S]` with each column repeated: `[M, S * REPEAT]`."""
    M: tl.constexpr = scales.shape[0]
    S: tl.constexpr = scales.shape[1]
    return tl.reshape(tl.broadcast_to(scales[:, :, None], [M, S, REPEAT]), [M, S * REPEAT])


@triton.jit
def load_quants(ptr, row_offset, ok, k, K, PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Words `[M, BLOCK_K]` of rows at `row_offset` from column `k`; `[M, BLOCK_K / 2]` if a word holds two values."""
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    column = k // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)
    mask = ok[:, None]
    if not EVEN_K:
        mask = mask & (column < K // PER_WORD)[None, :]
    return tl.load(ptr + row_offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_scales(ptr, scale_row, ok, k, K, ld, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Block scales of columns `k .. k + BLOCK_K`: `[M, BLOCK_K / BLOCK]` bytes, or fp32 `[M]` in fp32 layouts."""
    columns = tl.cdiv(K, BLOCK)
    if LAYOUT == K_MAJOR:
        scales = tl.load(ptr + scale_row * columns + k // BLOCK, mask=ok, other=0.0)
    elif LAYOUT == MN_MAJOR:
        # Adding the int64 rows makes the product 64-bit.
        column = scale_row * 0 + k // BLOCK
        scales = tl.load(ptr + column * ld + scale_row, mask=ok, other=0.0)
    else:
        v = k // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
        if LAYOUT == PACKED:
            offset = (scale_row[:, None] + (v // 4).to(tl.int64)[None, :] * ld) * 4 + (v % 4)[None, :]
        else:
            offset = swizzled_offset(scale_row[:, None], v[None, :], columns)
        scales = tl.load(ptr + offset, mask=ok[:, None] & (v < columns)[None, :], other=0)
    return scales


@triton.jit
def e4m3_value(bits, INTERPRET: tl.constexpr):
    """Values of e4m3 bits (compiled also of e4m3 values), in the type of `bf16_value`."""
    if INTERPRET:
        value = e4m3_bits_to_f32(bits)
    else:
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    return value


@triton.jit
def e4m3_scaled(bits, scales, INTERPRET: tl.constexpr):
    """`bf16(fp32(value * scale))` of e4m3 bits and fp32 scales, in the type of `bf16_value`."""
    value = e4m3_bits_to_f32(bits) if INTERPRET else bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return bf16_value(f32_to_bf16_bits(value * scales), INTERPRET)


@triton.jit
def dequantize(
    quants,
    scales,
    FMT: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    E5M2: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """`(even, odd)` operand tiles; without `PAIRS` both are the one tile of all columns.

    PAIRS keeps the even and odd columns of e2m1 bytes apart: K is summed in that order, and nothing is interleaved.
    `mxfp4` is exact wherever its value is an fp32 value. `mxfp8` scales are exact in bf16 from 2^-124 to 2^119; smaller
    ones lose denormal bits below 2^-133, larger ones overflow where the dequantized value leaves the range of bf16.
    `fp8_block` values get their scale only with PAIRS, and are rounded (`number_formats.rounds_tokens`).
    """
    if FMT == CODE_NVFP4 or FMT == CODE_MXFP4:
        bits = quants.to(tl.uint16)
        if FMT == CODE_MXFP4:
            scale = e8m0_to_bf16(scales, INTERPRET)
        elif INTERPRET:
            scale = e4m3_bits_to_f32(scales) * SCALE_GAIN
        else:
            scale = (scales.to(tl.float8e4nv, bitcast=True).to(tl.float32) * SCALE_GAIN).to(tl.bfloat16)
        scale = spread(scale, BLOCK // 2)
        even = bf16_value(((bits & 7) << 6) | ((bits & 8) << 12), INTERPRET)
        if FMT == CODE_MXFP4:
            # The gain first: gain times scale may exceed the largest bf16.
            even = even * tl.full([1, 1], E2M1_GAIN, even.dtype)
        even = even * scale
        odd = bf16_value(((bits & 0x70) << 2) | ((bits & 0x80) << 8), INTERPRET)
        if FMT == CODE_MXFP4:
            odd = odd * tl.full([1, 1], E2M1_GAIN, odd.dtype)
        odd = odd * scale
    elif FMT == CODE_MXFP8:
        scale = e8m0_to_bf16(scales, INTERPRET)
        if PAIRS:
            scale = spread(scale, BLOCK // 2)
            even = e4m3_value((quants & 0xFF).to(tl.uint8), INTERPRET) * scale
            odd = e4m3_value(((quants >> 8) & 0xFF).to(tl.uint8), INTERPRET) * scale
        else:
            even = e4m3_value(quants, INTERPRET) * spread(scale, BLOCK)
            odd = even
    elif FMT == CODE_FP8_BLOCK and PAIRS:
        even = e4m3_scaled((quants & 0xFF).to(tl.uint8), scales[:, None], INTERPRET)
        odd = e4m3_scaled(((quants >> 8) & 0xFF).to(tl.uint8), scales[:, None], INTERPRET)
    elif FMT == CODE_FP8_BLOCK:
        if INTERPRET:
            even = e5m2_bits_to_f32(quants) if E5M2 else e4m3_bits_to_f32(quants)
        else:
            even = quants
        odd = even
    elif PAIRS:
        even = bf16_value((quants & 0xFFFF).to(tl.uint16), INTERPRET)
        odd = bf16_value(((quants >> 16) & 0xFFFF).to(tl.uint16), INTERPRET)
    else:
        if INTERPRET:
            even = bf16_bits_to_f32(quants)
        else:
            even = quants
        odd = even
    return even, odd


@triton.jit
def load_operand(
    ptr,
    scales_ptr,
    row_offset,
    scale_row,
    ok,
    k,
    K,
    ld,
    FMT: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """`(even, odd, scales)` of `BLOCK_K` columns from `k`: dequantized tiles, and scales to apply after the MMA.

    `row_offset` (int64): first words of the rows; `scale_row` (int64): their scale rows; `ok`: which rows exist; `ld`:
    leading dimension of `MN_MAJOR` and `PACKED` scales.
    """
    quants = load_quants(ptr, row_offset, ok, k, K, PAIRS, BLOCK_K, EVEN_K)
    if FMT == CODE_BF16:
        scales = 0.0
    else:
        scales = load_scales(scales_ptr, scale_row, ok, k, K, ld, LAYOUT, BLOCK, BLOCK_K)
    even, odd = dequantize(quants, scales, FMT, BLOCK, PAIRS, E5M2, INTERPRET)
    return even, odd, scales


@triton.jit
def dot_step(acc, a_even, a_odd, a_scales, w_even, w_odd, w_scales, FMT: tl.constexpr, PAIRS: tl.constexpr):
    """`acc + a @ w^T` over one `BLOCK_K`; `FMT` is the format of the weights."""
    if FMT == CODE_FP8_BLOCK:
        # FP8 MMA accumulates with few bits: each 128 of K starts from zero and is added in fp32.
        partial = tl.dot(a_even, tl.trans(w_even), out_dtype=tl.float32)
        # One scale after the other: their product may leave the range of fp32 where the result does not.
        acc += (partial * a_scales[:, None]) * w_scales[None, :]
    else:
        acc = tl.dot(a_even, tl.trans(w_even), acc)
        if PAIRS:
            acc = tl.dot(a_odd, tl.trans(w_odd), acc)
    return acc


@triton.jit
def native_step(
    acc,
    a_ptr,
    a_scales_ptr,
    a_offset,
    a_scale_row,
    a_ok,
    a_ld,
    w_ptr,
    w_scales_ptr,
    w_offset,
    w_scale_row,
    w_ok,
    w_ld,
    k,
    K,
    FMT: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """`acc + a @ w^T` over one `BLOCK_K` by block-scaled MMA on quants and scales as they are stored.

    `FMT` is the format of the weights. Rows have the same format, except `mxfp8` rows with `mxfp4` weights, which
    `FORM` may widen.
    """
    PAIRS: tl.constexpr = FMT == CODE_NVFP4 or FMT == CODE_MXFP4
    a = load_quants(a_ptr, a_offset, a_ok, k, K, FMT == CODE_NVFP4, BLOCK_K, EVEN_K)
    w = load_quants(w_ptr, w_offset, w_ok, k, K, PAIRS, BLOCK_K, EVEN_K)
    a_s = load_scales(a_scales_ptr, a_scale_row, a_ok, k, K, a_ld, LAYOUT, BLOCK, BLOCK_K)
    w_s = load_scales(w_scales_ptr, w_scale_row, w_ok, k, K, w_ld, LAYOUT, BLOCK, BLOCK_K)
    if FMT == CODE_NVFP4:
        a_s = a_s.to(tl.float8e4nv, bitcast=True)
        w_s = w_s.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(a, a_s, "e2m1", tl.trans(w), w_s, "e2m1", acc)
    elif FMT == CODE_MXFP4 and FORM == WIDENED:
        w = e2m1_code_to_e4m3_bits(tl.interleave(w & 15, w >> 4))
        acc = tl.dot_scaled(a, a_s, "e4m3", tl.trans(w), w_s, "e4m3", acc)
    elif FMT == CODE_MXFP4:
        acc = tl.dot_scaled(a, a_s, "e4m3", tl.trans(w), w_s, "e2m1", acc)
    else:
        # The instruction needs a scale for each 32 of K.
        a_s = spread(a_s, BLOCK // 32)
        w_s = spread(w_s, BLOCK // 32)
        acc = tl.dot_scaled(a, a_s, "e4m3", tl.trans(w), w_s, "e4m3", acc)
    return acc
