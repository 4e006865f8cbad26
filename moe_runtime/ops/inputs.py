"""Float tensors to the operands of `moe_runtime.ops` and back: quants, and block scales not yet laid out.

Works on `[..., K]` in bf16 or fp32, so rows `[R, K]` and weights `[E, N, K]` alike. NVFP4 and MXFP8 use the fp32
sequences of `kernels/formats/quantize.py`, bit for bit the same on every engine. `scales.py` lays the scales out.
"""

from __future__ import annotations

import torch

from moe_runtime.kernels.formats import reference_quantize as rq
from moe_runtime.kernels.formats.number_formats import FP8_BLOCK, MXFP8, NVFP4, FormatCode, QuantizedRows, ceil_div
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.ops.arguments import check_device
from moe_runtime.support.arguments import check_choice, check_is_tensor, check_no_grad, describe

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def nvfp4_encode_scale(x: torch.Tensor) -> torch.Tensor:
    """fp32 `[1]`: `min(2688 / amax, 2^100)` of all of `x`, 1 if that is 0 or not finite. For offline use.

    Parameters are taken under `torch.no_grad`, as by all quantizers.

    >>> nvfp4_encode_scale(torch.tensor([[-42.0, 3.0]]))
    tensor([64.])
    """
    _check_dtype("x", x, (torch.bfloat16, torch.float16, torch.float32, torch.float64))
    check_no_grad("x", x)
    numbers = x.float()
    return rq.token_gsf(numbers.abs().amax().reshape(1) if x.numel() else numbers.new_zeros(1))


def quantize_nvfp4(
    x: torch.Tensor, gsf: float | torch.Tensor = 1.0, *, engine: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(uint8 [..., K/2], e4m3 [..., K/16])`; K a multiple of 16.

    `gsf` is the encode scale: a number, one fp32, or for `[E, N, K]` one fp32 for each expert. What the operations
    take as `alpha` or `expert_scales` is `1 / (gsf of a * gsf of b)`.
    """
    _check_floats(x, 16)
    if gsf is None:
        raise ValueError("gsf: expected a number or fp32 tensor, got None")
    k, parts = x.shape[-1], [(x, gsf)]
    if isinstance(gsf, torch.Tensor) and check_is_tensor("gsf", gsf).numel() != 1:
        if x.ndim != 3 or gsf.shape != x.shape[:1]:
            raise ValueError(f"gsf: expected one number, or one per expert of [E, N, K], got shape {list(gsf.shape)}")
        parts = [(x[e], gsf[e : e + 1]) for e in range(x.shape[0])] or [(x, 1.0)]
    done = [quantize_rows(part.reshape(-1, k).contiguous(), NVFP4, gsf=scale, engine=engine) for part, scale in parts]
    quants = [q.quants_RK for q in done]
    scales = [q.scales_RV for q in done if q.scales_RV is not None]
    return torch.cat(quants).view(*x.shape[:-1], k // 2), rq.cat_bits(scales).view(*x.shape[:-1], k // 16)


def dequantize_nvfp4(
    q: torch.Tensor, scales: torch.Tensor, decode_scale: float | torch.Tensor | None = None, *, engine: str = "auto"
) -> torch.Tensor:
    """fp32 `[..., K]`: `(q * scale) * decode_scale`.

    `decode_scale` is `1 / gsf`: a number, one fp32, for `[E, N, K]` one fp32 for each expert, or an fp32 tensor with as
    many dimensions as `q` that broadcasts to the result, such as `[R, 1]`; None means 1.
    """
    _check_quants(q, (torch.uint8,))
    columns = q.shape[-1]
    if columns % 8 or not columns:
        raise ValueError(f"q: expected [..., K/2], K a positive multiple of 16, got {list(q.shape)}")
    shape = (*q.shape[:-1], 2 * columns)
    factor = None if decode_scale is None else _decode_scale(decode_scale, shape, q.device)
    linear = _linear(scales, (*q.shape[:-1], columns // 8), (torch.float8_e4m3fn, torch.uint8), q.device)
    linear = linear.view(torch.float8_e4m3fn).reshape(-1, columns // 8).contiguous()
    quants = q.reshape(-1, columns).contiguous()
    ones = torch.ones(quants.shape[0], dtype=torch.float32, device=q.device)
    x = dequantize_rows(QuantizedRows(NVFP4, quants, linear, ones), engine=engine).view(shape)
    return x if factor is None else x * factor


def _decode_scale(scale: object, shape: tuple[int, ...], device: torch.device) -> float | torch.Tensor:
    """What a result of `shape` is multiplied by."""
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        if not abs(scale) <= torch.finfo(torch.float32).max:
            raise ValueError(f"decode_scale: expected a number that fp32 holds, got {describe(scale)}")
        return float(scale)
    if not isinstance(scale, torch.Tensor):
        raise ValueError(f"decode_scale: expected a number, an fp32 tensor or None, got {type(scale).__name__}")
    check_is_tensor("decode_scale", scale)
    if scale.dtype == torch.float32 and scale.device == device:
        if scale.numel() == 1:
            return scale.reshape(())
        if len(shape) == 3 and scale.shape == shape[:1]:
            return scale[:, None, None]
        if scale.ndim == len(shape) and all(size in (1, whole) for size, whole in zip(scale.shape, shape, strict=True)):
            return scale
    raise ValueError(
        f"decode_scale: expected one fp32 on {device}, one per expert of [E, N, K], or what broadcasts to "
        f"{list(shape)}, got {scale.dtype} {list(scale.shape)} on {scale.device}"
    )


def quantize_mxfp8(
    x: torch.Tensor, granularity_k: int = 32, *, engine: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(e4m3 [..., K], UE8M0 bytes [..., ceil(K / granularity_k)])`, granularity 32 or 128; K a multiple of 16.

    Granularity 128, which no kernel has, runs on torch with every `engine`.
    """
    _check_floats(x, 16)
    check_choice("granularity_k", granularity_k, (32, 128))
    block, k = granularity_k, x.shape[-1]
    rows = x.reshape(-1, k)
    padded = torch.nn.functional.pad(rows, (0, -k % block)) if k % block else rows.contiguous()
    if block == MXFP8.block:
        done = quantize_rows(padded, MXFP8, engine=engine)
        quants, scales = done.quants_RK[:, :k].contiguous(), done.scales_RV
        assert scales is not None
    else:
        resolve_engine(engine, x.device)
        step = max(1, rq.CHUNK_ELEMENTS // padded.shape[1])
        ones = torch.ones(step, dtype=torch.float32, device=x.device)
        parts = [rq.quantize_tile(part.float(), ones, FormatCode.MXFP8, block) for part in padded.split(step)]
        quants = torch.cat([q[:, :k] for q, _ in parts]).view(MXFP8.quant_dtype)
        scales = torch.cat([s for _, s in parts])
    return quants.view(x.shape), scales.view(*x.shape[:-1], ceil_div(k, block))


def dequantize_mxfp8(q: torch.Tensor, scales: torch.Tensor, granularity_k: int = 32) -> torch.Tensor:
    """fp32 `[..., K]` of e4m3 quants and UE8M0 bytes `[..., ceil(K / granularity_k)]`."""
    _check_quants(q, (MXFP8.quant_dtype,))
    check_choice("granularity_k", granularity_k, (32, 128))
    block, k = granularity_k, q.shape[-1]
    linear = _linear(scales, (*q.shape[:-1], ceil_div(k, block)), (torch.uint8,), q.device)
    return q.float() * rq.e8m0_to_f32(linear).repeat_interleave(block, -1)[..., :k]


def quantize_fp8(
    x: torch.Tensor, granularity_mn: int = 1, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(fp8 [..., M, K], fp32 scales [..., ceil(M / granularity_mn), ceil(K/128)])`; K a multiple of 16.

    Blocks are `granularity_mn x 128`, 1 or 128 (partial at the end of M and of K); the scale is
    `max(amax, 1e-4) / largest`. A block that is not finite gets scale NaN and quants 0.
    """
    _check_floats(x, FP8_BLOCK.unit)
    check_choice("dtype", dtype, FP8_DTYPES)
    check_choice("granularity_mn", granularity_mn, (1, 128))
    quants, scales = rq.quantize_fp8_blocks(x.float() if x.ndim == 3 else x.float()[None], granularity_mn, dtype)
    return (quants, scales) if x.ndim == 3 else (quants[0], scales[0])


def dequantize_fp8(q: torch.Tensor, scales: torch.Tensor, granularity_mn: int = 1) -> torch.Tensor:
    """fp32 `[..., M, K]` of fp8 quants and fp32 scales `[..., ceil(M / granularity_mn), ceil(K/128)]`."""
    _check_dtype("q", q, FP8_DTYPES)
    _check_shape("q", q, FP8_BLOCK.unit)
    check_choice("granularity_mn", granularity_mn, (1, 128))
    gm, block, (m, k) = granularity_mn, FP8_BLOCK.block, q.shape[-2:]
    linear = _linear(scales, (*q.shape[:-2], ceil_div(m, gm), ceil_div(k, block)), (torch.float32,), q.device)
    return q.float() * linear.repeat_interleave(gm, -2)[..., :m, :].repeat_interleave(block, -1)[..., :k]


def _check_floats(x: torch.Tensor, unit: int) -> None:
    _check_dtype("x", x, (torch.bfloat16, torch.float32))
    _check_shape("x", x, unit)
    check_no_grad("x", x)


def _check_shape(name: str, x: torch.Tensor, unit: int) -> None:
    if x.ndim not in (2, 3) or x.shape[-1] <= 0 or x.shape[-1] % unit:
        raise ValueError(f"{name}: expected [R, K] or [E, N, K], K a positive multiple of {unit}, got {list(x.shape)}")


def _check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    check_device(name, tensor)
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: expected {' or '.join(map(str, allowed))}, got {tensor.dtype}")


def _check_quants(q: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    _check_dtype("q", q, dtypes)
    if q.ndim == 0:
        raise ValueError("q: expected [..., K], got a tensor without dimensions")


def _linear(
    scales: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    _check_dtype("scales", scales, dtypes)
    if scales.device != device:
        raise ValueError(f"scales: expected device {device}, got {scales.device}")
    if tuple(scales.shape) != shape:
        raise ValueError(f"scales: expected shape {list(shape)}, got {list(scales.shape)}")
    return scales
