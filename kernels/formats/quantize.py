"""Quantize and dequantize rows: each format is ONE fp32 sequence, so that every engine gives the same bits.

Block maxima are taken on integer bits, which order NaN above Inf above every finite value. A block with NaN or Inf gets
scale NaN and codes 0, and poisons only its own token. Every division is `div_rn`. Kernels that use these helpers are
launched with `enable_fp_fusion=False`. `reference_quantize.py` has the references.

`R` rows, `K` values in a row, `V = ceil(K / block)` block scales of a row, `M x N` a tile inside a kernel.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats import reference_quantize
from moe_runtime.kernels.formats.bits import (
    INF_BITS,
    NAN_BITS,
    bf16_bits_to_f32,
    bits_f32,
    canonical_nan,
    e2m1_code_to_f32,
    e4m3_bits_to_f32,
    e8m0_to_f32,
    f32_bits,
    f32_to_bf16_bits,
    f32_to_e2m1_code,
    f32_to_e4m3_bits,
    magnitude_bits,
)
from moe_runtime.kernels.formats.number_formats import (
    MAX_ENCODE_SCALE,
    NVFP4_FULL_SCALE,
    FormatCode,
    QuantizedRows,
    TokenFormat,
    weight_format_named,
)
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.runtime import INTERPRET, resolve_engine
from moe_runtime.support.arguments import check_is_tensor, check_kind, check_no_grad, describe

CODE_BF16 = tl.constexpr(int(FormatCode.BF16))
CODE_FP8_BLOCK = tl.constexpr(int(FormatCode.FP8_BLOCK))
CODE_MXFP8 = tl.constexpr(int(FormatCode.MXFP8))
CODE_NVFP4 = tl.constexpr(int(FormatCode.NVFP4))
CODE_MXFP4 = tl.constexpr(int(FormatCode.MXFP4))

MAX_GSF = tl.constexpr(MAX_ENCODE_SCALE)
FULL_SCALE = tl.constexpr(NVFP4_FULL_SCALE)
SMALLEST_DIVISOR = tl.constexpr(2.0**-89)
AMAX_FLOOR_BITS = tl.constexpr(reference_quantize.AMAX_FLOOR_BITS)
MXFP4_FLOOR_BITS = tl.constexpr(reference_quantize.MXFP4_FLOOR_BITS)


@triton.jit
def clamp_gsf(gsf):
    """An encode scale clamped to at most 2^100; NaN stays NaN."""
    return tl.where(gsf > MAX_GSF, MAX_GSF, gsf)


@triton.jit
def row_amax_bits(x):
    """int32 `[M]`: bits of the largest magnitude of each row of fp32 `[M, N]`; combine tiles with `tl.maximum`."""
    return tl.max(magnitude_bits(x), axis=1)


@triton.jit
def token_gsf(amax):
    """Encode scale of NVFP4 rows with fp32 maxima `[M]`: `min(div_rn(2688, amax), 2^100)`; 1 if 0 or not finite.

    Compute `amax` by `bits_f32(row_amax_bits(x))`: `tl.max` on floats may drop a NaN.
    """
    bits = magnitude_bits(amax)
    usable = (bits > 0) & (bits < INF_BITS)
    # 2688 / 2^-89 is already above 2^100: a smaller divisor would not change the result but could overflow.
    divisor = tl.where(usable, tl.where(amax < SMALLEST_DIVISOR, SMALLEST_DIVISOR, amax), 1.0)
    return tl.where(usable, clamp_gsf(tl.div_rn(tl.full(divisor.shape, FULL_SCALE, tl.float32), divisor)), 1.0)


@triton.jit
def quantize_tile(x, gsf, FMT: tl.constexpr):
    """Quantize an fp32 tile `[M, N]`, `N` a multiple of the block; `FMT` is `int(FormatCode)`.

    `gsf` is the fp32 encode scale `[M]` of each row, read for NVFP4 only. Returns `(q, s)`:

        BF16       q uint16 [M, N] (bf16 bits)      s is q again
        FP8_BLOCK  q uint8  [M, N] (e4m3 bits)      s fp32  [M, N/128]
        MXFP8      q uint8  [M, N] (e4m3 bits)      s uint8 [M, N/32] (UE8M0)
        NVFP4      q uint8  [M, N/2] (low = even)   s uint8 [M, N/16] (e4m3 bits)
        MXFP4      q uint8  [M, N/2] (low = even)   s uint8 [M, N/32] (UE8M0)
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if FMT == CODE_BF16:
        q = f32_to_bf16_bits(x)
        s = q
    else:
        BLOCK: tl.constexpr = 128 if FMT == CODE_FP8_BLOCK else (16 if FMT == CODE_NVFP4 else 32)
        blocks = tl.reshape(x, [M, N // BLOCK, BLOCK])
        amax_bits = tl.max(magnitude_bits(blocks), axis=2)
        poisoned = amax_bits >= INF_BITS
        amax_bits = tl.where(poisoned, 0, amax_bits)
        if FMT == CODE_NVFP4:
            encode = tl.broadcast_to(gsf[:, None], [M, N // BLOCK])
            six = tl.full([M, N // BLOCK], 6.0, tl.float32)
            code = f32_to_e4m3_bits(tl.div_rn(encode * bits_f32(amax_bits), six))
            s = tl.where(poisoned, 0x7F, code.to(tl.int32)).to(tl.uint8)
            dead = poisoned | ((code & 0x7F) == 0) | (code == 0x7F)
            factor = tl.div_rn(encode, tl.where(dead, 1.0, e4m3_bits_to_f32(code)))
            values = tl.where(dead[:, :, None], 0.0, blocks) * factor[:, :, None]
            q = packed_e2m1(values)
        else:
            FLOOR: tl.constexpr = MXFP4_FLOOR_BITS if FMT == CODE_MXFP4 else AMAX_FLOOR_BITS
            LARGEST: tl.constexpr = 6.0 if FMT == CODE_MXFP4 else 448.0
            floored = bits_f32(tl.maximum(amax_bits, FLOOR))
            ideal = tl.div_rn(floored, tl.full([M, N // BLOCK], LARGEST, tl.float32))
            clean = tl.where(poisoned[:, :, None], 0.0, blocks)
            if FMT != CODE_FP8_BLOCK:
                # The floor and the range of fp32 keep the byte within 105..247 (mxfp4: 1..253), all valid scales.
                byte = (f32_bits(ideal) + 0x7FFFFF) >> 23
                s = tl.where(poisoned, 255, byte).to(tl.uint8)
                # Multiplying by the inverse power of two gives the same value as dividing, and is cheaper.
                values = clean * bits_f32((254 - byte) << 23)[:, :, None]
            else:
                s = bits_f32(tl.where(poisoned, NAN_BITS, f32_bits(ideal)))
                values = tl.div_rn(clean, tl.broadcast_to(ideal[:, :, None], [M, N // BLOCK, BLOCK]))
            if FMT == CODE_MXFP4:
                q = packed_e2m1(values)
            else:
                q = tl.reshape(f32_to_e4m3_bits(values), [M, N])
    return q, s


@triton.jit
def packed_e2m1(values):
    """e2m1 bytes `[M, N/2]` of fp32 blocks `[M, N/BLOCK, BLOCK]`, the even column in the low nibble."""
    PAIRS: tl.constexpr = values.shape[1] * values.shape[2] // 2
    low, high = tl.split(tl.reshape(f32_to_e2m1_code(values), [values.shape[0], PAIRS, 2]))
    return low | (high << 4)


@triton.jit
def _quantize_kernel(
    x_ptr, q_ptr, s_ptr, row_scale_ptr, gsf_ptr, num_rows, k, x_stride,
    FMT: tl.constexpr, X_BF16: tl.constexpr, STATIC_GSF: tl.constexpr, SHORT_BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """SHORT_BLOCKS is 1 if the last block of a row is short, else 0."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < num_rows
    gsf = tl.full([BLOCK_R], 1.0, tl.float32)
    if FMT == CODE_NVFP4:
        if STATIC_GSF:
            gsf = clamp_gsf(tl.load(gsf_ptr) + tl.zeros([BLOCK_R], tl.float32))
        else:
            amax_bits = tl.zeros([BLOCK_R], tl.int32)
            for start in range(0, k, BLOCK_K):
                x = _load_tile(x_ptr, row, live, start, k, x_stride, X_BF16, BLOCK_K)
                amax_bits = tl.maximum(amax_bits, row_amax_bits(x))
            gsf = token_gsf(bits_f32(amax_bits))
        row_scale = canonical_nan(tl.div_rn(tl.full([BLOCK_R], 1.0, tl.float32), gsf))
        tl.store(row_scale_ptr + row, row_scale, live)
    PER_Q: tl.constexpr = 2 if FMT == CODE_NVFP4 or FMT == CODE_MXFP4 else 1
    for start in range(0, k, BLOCK_K):
        x = _load_tile(x_ptr, row, live, start, k, x_stride, X_BF16, BLOCK_K)
        q, s = quantize_tile(x, gsf, FMT)
        column = start // PER_Q + tl.arange(0, BLOCK_K // PER_Q)
        inside = live[:, None] & (column < k // PER_Q)[None, :]
        tl.store(q_ptr + row[:, None] * (k // PER_Q) + column[None, :], q, inside)
        if FMT != CODE_BF16:
            BLOCK: tl.constexpr = BLOCK_K // s.shape[1]
            column = start // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
            inside = live[:, None] & (column < k // BLOCK + SHORT_BLOCKS)[None, :]
            tl.store(s_ptr + row[:, None] * (k // BLOCK + SHORT_BLOCKS) + column[None, :], s, inside)


@triton.jit
def _load_tile(x_ptr, row, live, start, k, x_stride, X_BF16: tl.constexpr, BLOCK_K: tl.constexpr):
    column = start + tl.arange(0, BLOCK_K)
    inside = live[:, None] & (column < k)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], inside, other=0)
    return bf16_bits_to_f32(x) if X_BF16 else x


@triton.jit
def _dequantize_kernel(
    q_ptr, s_ptr, row_scale_ptr, out_ptr, num_rows, k, q_stride, s_stride,
    FMT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (row < num_rows)[:, None] & (column < k)[None, :]
    if FMT == CODE_NVFP4 or FMT == CODE_MXFP4:
        byte = tl.program_id(1) * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        packed_inside = (row < num_rows)[:, None] & (byte < k // 2)[None, :]
        packed = tl.load(q_ptr + row[:, None] * q_stride + byte[None, :], packed_inside, other=0)
        codes = tl.reshape(tl.join(packed & 0xF, packed >> 4), [BLOCK_R, BLOCK_K])
        value = e2m1_code_to_f32(codes)
    else:
        bits = tl.load(q_ptr + row[:, None] * q_stride + column[None, :], inside, other=0)
        value = bf16_bits_to_f32(bits) if FMT == CODE_BF16 else e4m3_bits_to_f32(bits)
    if FMT != CODE_BF16:
        BLOCK: tl.constexpr = 128 if FMT == CODE_FP8_BLOCK else (16 if FMT == CODE_NVFP4 else 32)
        s = tl.load(s_ptr + row[:, None] * s_stride + (column // BLOCK)[None, :], inside, other=0)
        if FMT == CODE_MXFP8 or FMT == CODE_MXFP4:
            s = e8m0_to_f32(s)
        elif FMT == CODE_NVFP4:
            s = e4m3_bits_to_f32(s)
        value = value * s
        if FMT == CODE_NVFP4:
            value = value * tl.load(row_scale_ptr + row, row < num_rows, other=0.0)[:, None]
        value = canonical_nan(value)
    tl.store(out_ptr + row[:, None] * k + column[None, :], value, inside)


# The interpreter's cost of a program depends on the number of operations and hardly on the number of rows.
BLOCK_R = 32 if INTERPRET else 4
BLOCK_K = 1024


def quantize_rows(
    x_RK: torch.Tensor,
    fmt: str | TokenFormat,
    *,
    gsf: float | torch.Tensor | None = None,
    engine: str = "auto",
) -> QuantizedRows:
    """Quantize rows into a format, bit for bit the same on every engine and device.

    Args:
        x_RK: bf16 or fp32 `[R, K]`, last dimension contiguous, any row stride; `R` may be 0, with any strides.
        fmt: format of the result, any weight format too; `K` must be a multiple of its `unit`.
        gsf: encode scale of NVFP4. None: one per row, `min(2688 / amax, 2^100)`. Else a static one, clamped to 2^100: a
            positive number, or a one-element fp32 tensor on the same device (its value is not checked).
        engine: "auto", "cuda", "triton" or "torch".

    Returns:
        `QuantizedRows` with linear scales; `row_scale_R` is `1 / gsf` for NVFP4. A block with NaN or Inf gets scale
        NaN and codes 0 (bf16: the values as they are).

    Raises:
        ValueError: for a wrong shape, dtype, stride, column count, format, gsf or engine.
    """
    fmt = weight_format_named(fmt)
    _check_input(x_RK, fmt)
    gsf = check_gsf(gsf, fmt, x_RK.device)
    if resolve_engine(engine, x_RK.device) == "torch":
        return reference_quantize.quantize_rows(x_RK, fmt, gsf=gsf)
    num_rows, k = x_RK.shape
    out = reference_quantize.empty_rows(fmt, num_rows, k, x_RK.device)
    if num_rows:
        q = raw_bits(out.quants_RK)
        is_bf16 = x_RK.dtype == torch.bfloat16
        _quantize_kernel[(triton.cdiv(num_rows, BLOCK_R),)](
            x_RK.view(torch.int16) if is_bf16 else x_RK,
            q,
            q if out.scales_RV is None else raw_bits(out.scales_RV),
            q if out.row_scale_R is None else out.row_scale_R,
            q if gsf is None else gsf,
            num_rows,
            k,
            x_RK.stride(0),
            FMT=int(fmt.code),
            X_BF16=is_bf16,
            STATIC_GSF=gsf is not None,
            SHORT_BLOCKS=int(k % fmt.block != 0),
            BLOCK_R=BLOCK_R,
            BLOCK_K=BLOCK_K,
            enable_fp_fusion=False,
        )
    return out


def dequantize_rows(q: QuantizedRows, *, engine: str = "auto") -> torch.Tensor:
    """fp32 `[R, K]` of quantized rows: `(q * sf) * row_scale`, rounded in that order; NaN is 0x7FC00000.

    Raises `ValueError` if a tensor of `q` is missing or has the wrong shape, dtype, device or stride.
    """
    _check_rows(q)
    if resolve_engine(engine, q.quants_RK.device) == "torch":
        return reference_quantize.dequantize_rows(q)
    num_rows, columns = q.quants_RK.shape
    k = columns * 2 if q.format.element_bits == 4 else columns
    out = torch.empty(num_rows, k, dtype=torch.float32, device=q.quants_RK.device)
    if num_rows:
        bits = raw_bits(q.quants_RK)
        scales = bits if q.scales_RV is None else raw_bits(q.scales_RV)
        _dequantize_kernel[(triton.cdiv(num_rows, BLOCK_R), triton.cdiv(k, BLOCK_K))](
            bits,
            scales,
            out if q.row_scale_R is None else q.row_scale_R,
            out,
            num_rows,
            k,
            bits.stride(0),
            scales.stride(0),
            FMT=int(q.format.code),
            BLOCK_R=BLOCK_R,
            BLOCK_K=BLOCK_K,
            enable_fp_fusion=False,
        )
    return out


def _check_input(x_RK: torch.Tensor, fmt: TokenFormat) -> None:
    check_is_tensor("x_RK", x_RK)
    if x_RK.ndim != 2:
        raise ValueError(f"x_RK: expected two dimensions [R, K], got shape {tuple(x_RK.shape)}")
    if x_RK.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x_RK: expected bfloat16 or float32, got {x_RK.dtype}")
    fmt.check_columns(x_RK.shape[1], "x_RK")
    if x_RK.numel() and x_RK.stride(1) != 1:
        raise ValueError(f"x_RK: expected a contiguous last dimension, got strides {x_RK.stride()}")
    check_no_grad("x_RK", x_RK)


def check_gsf(
    gsf: float | torch.Tensor | None, fmt: TokenFormat, device: torch.device, argument: str = "gsf"
) -> torch.Tensor | None:
    """The encode scale as fp32 `[1]` on `device`, or None. Raises `ValueError` naming `argument`.

    A number is clamped to 2^100. A tensor is returned unclamped.
    """
    if gsf is None:
        return None
    if not fmt.has_row_scale:
        raise ValueError(f"{argument}: expected None for {fmt.name}, got {describe(gsf)}")
    if isinstance(gsf, torch.Tensor):
        check_no_grad(argument, check_is_tensor(argument, gsf))
        if gsf.numel() != 1 or gsf.dtype != torch.float32 or gsf.device != device:
            found = f"{gsf.dtype} {list(gsf.shape)} on {gsf.device}"
            raise ValueError(f"{argument}: expected one float32 element on {device}, got {found}")
        return gsf.reshape(1)
    # A denormal fp32 scale has lost precision.
    is_number = isinstance(gsf, int | float) and not isinstance(gsf, bool)
    if not (is_number and torch.finfo(torch.float32).tiny <= gsf < math.inf):
        raise ValueError(f"{argument}: expected a positive finite number (at least 2^-126), got {describe(gsf)}")
    return torch.full((1,), float(min(gsf, MAX_ENCODE_SCALE)), dtype=torch.float32, device=device)


def _check_rows(q: QuantizedRows) -> None:
    check_kind("q", q, QuantizedRows)
    fmt = weight_format_named(q.format, "q.format")
    if check_is_tensor("quants_RK", q.quants_RK).ndim != 2 or q.quants_RK.dtype != fmt.quant_dtype:
        raise ValueError(
            f"quants_RK: expected two dimensions of {fmt.quant_dtype}, "
            f"got {q.quants_RK.dtype} of shape {tuple(q.quants_RK.shape)}"
        )
    num_rows, columns = q.quants_RK.shape
    k = columns * 8 * fmt.quant_dtype.itemsize // fmt.element_bits
    wanted = {
        "quants_RK": (q.quants_RK, (num_rows, columns), fmt.quant_dtype),
        "scales_RV": (q.scales_RV, (num_rows, fmt.scale_columns(k)), fmt.scale_dtype),
        "row_scale_R": (q.row_scale_R, (num_rows,), torch.float32 if fmt.has_row_scale else None),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if dtype is None:
            if tensor is not None:
                raise ValueError(f"{name}: expected None for {fmt.name}, got {type(tensor).__name__}")
            continue
        if tensor is None:
            raise ValueError(f"{name}: expected {dtype} of shape {shape}, got None")
        check_is_tensor(name, tensor)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != q.quants_RK.device:
            raise ValueError(
                f"{name}: expected {dtype} of shape {shape} on {q.quants_RK.device}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
        if num_rows and shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}")
