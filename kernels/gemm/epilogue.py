"""Epilogue of a tile of the grouped GEMM, in fp32: scales, bias, rounding or requantization, stores."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.formats.bits import f32_to_bf16_bits, swizzled_offset
from moe_runtime.kernels.formats.quantize import CODE_BF16, CODE_FP8_BLOCK, CODE_MXFP8, CODE_NVFP4, quantize_tile
from moe_runtime.kernels.gemm.weights import GateUpOrder

NO_ORDER = tl.constexpr(0)
GATE_UP = tl.constexpr(GateUpOrder.GATE_UP.code)
UP_GATE = tl.constexpr(GateUpOrder.UP_GATE.code)
INTERLEAVED = tl.constexpr(GateUpOrder.INTERLEAVED.code)


@triton.jit
def half_rows(n, columns, UP: tl.constexpr, ORDER: tl.constexpr):
    """Weight rows of columns `n` of gate (`UP` 0) or up (1), each `columns` wide; `n` itself without an order."""
    if ORDER == NO_ORDER:
        row = n
    elif ORDER == INTERLEAVED:
        row = 2 * n + UP
    elif (ORDER == GATE_UP) == (UP == 1):
        row = n + columns
    else:
        row = n
    return row


@triton.jit
def is_up(row, num_rows, ORDER: tl.constexpr):
    """1 for weight rows of up, 0 for those of gate; 0 for all without an order."""
    if ORDER == INTERLEAVED:
        up = row % 2
    elif ORDER == GATE_UP:
        up = (row >= num_rows // 2).to(tl.int32)
    elif ORDER == UP_GATE:
        up = (row < num_rows // 2).to(tl.int32)
    else:
        up = row * 0
    return up


@triton.jit
def scaled(
    acc,
    row_scale,
    expert_scales_ptr,
    bias_ptr,
    expert,
    row,
    ok,
    num_rows,
    GAIN: tl.constexpr,
    SCALES_PER_EXPERT: tl.constexpr,
    ORDER: tl.constexpr,
):
    """`acc * row_scale * expert_scale + bias`; `row` holds the weight row of each column of `acc`."""
    if GAIN != 1.0:
        acc = acc * GAIN
    if row_scale is not None:
        acc = acc * row_scale[:, None]
    if SCALES_PER_EXPERT == 1:
        acc = acc * tl.load(expert_scales_ptr + expert)
    elif SCALES_PER_EXPERT == 2:
        acc = acc * tl.load(expert_scales_ptr + expert * 2 + is_up(row, num_rows, ORDER))[None, :]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + expert.to(tl.int64) * num_rows + row, mask=ok, other=0.0)[None, :]
    return acc


@triton.jit
def store_plain(out_ptr, position, row_ok, column, column_ok, stride, c):
    """Round fp32 to the type of `out_ptr` and store; an int16 pointer means bf16 bits."""
    if out_ptr.dtype.element_ty == tl.int16:
        value = f32_to_bf16_bits(c).to(tl.int16, bitcast=True)
    else:
        value = c.to(out_ptr.dtype.element_ty)
    pointers = out_ptr + position[:, None] * stride + column[None, :]
    tl.store(pointers, value, mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def store_quantized(out_ptr, scales_ptr, gsf_ptr, position, scale_row, row_ok, tile_n, columns, h, FMT: tl.constexpr):
    """Quantize the fp32 tile; store contiguous rows of quants, and scales in the layout that the next GEMM reads."""
    M: tl.constexpr = h.shape[0]
    N: tl.constexpr = h.shape[1]
    gsf = tl.full([M], 1.0, tl.float32)
    if FMT == CODE_NVFP4:
        gsf = gsf * tl.load(gsf_ptr)
    if FMT == CODE_FP8_BLOCK:
        # A block of 128 may reach past the last column, where zeros of weights times Inf are NaN.
        h = tl.where((tile_n * N + tl.arange(0, N) < columns)[None, :], h, 0.0)
    q, s = quantize_tile(h, gsf, FMT)
    PER_WORD: tl.constexpr = 2 if FMT == CODE_NVFP4 else 1
    words = columns // PER_WORD
    j = tile_n * (N // PER_WORD) + tl.arange(0, N // PER_WORD)
    if FMT == CODE_BF16:
        q = q.to(tl.int16, bitcast=True)
    tl.store(out_ptr + position[:, None] * words + j[None, :], q, mask=row_ok[:, None] & (j < words)[None, :])
    if FMT != CODE_BF16:
        BLOCK: tl.constexpr = 128 if FMT == CODE_FP8_BLOCK else (32 if FMT == CODE_MXFP8 else 16)
        num_scales = tl.cdiv(columns, BLOCK)
        v = tile_n * (N // BLOCK) + tl.arange(0, N // BLOCK)
        if FMT == CODE_FP8_BLOCK:
            offset = position[:, None] * num_scales + v[None, :]
        else:
            offset = swizzled_offset(scale_row[:, None], v[None, :], num_scales)
        tl.store(scales_ptr + offset, s, mask=row_ok[:, None] & (v < num_scales)[None, :])
