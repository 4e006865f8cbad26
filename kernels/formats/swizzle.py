"""The 128x4 scale swizzle, `[ceil(R/128), ceil(V/4), 32, 4, 4]` bytes; padding is 0 and never read.

FlashInfer's 128x4 layout and the tcgen05 "5D" layout are the same bytes. The scale of row `r`, column `v` lies at

    (r//128)*ceil(V/4)*512 + (v//4)*512 + (r%32)*16 + ((r%128)//32)*4 + v%4

With V = 4: (0, 1) at 1, (1, 0) at 16, (32, 0) at 4, (128, 0) at 512. The "6D" form of weights prepends the expert.
torch moves the bytes on every engine: four at a time stay side by side.
"""

from __future__ import annotations

import torch

from moe_runtime.kernels.formats import reference_quantize
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.support.arguments import check_integer, check_is_tensor


def swizzle_scales(scales_RV: torch.Tensor, *, engine: str = "auto") -> torch.Tensor:
    """Linear block scales to the 128x4 swizzle.

    Args:
        scales_RV: `[R, V]`, or `[E, N, V]` for weights; one byte per element (uint8, e4m3), last dimension contiguous.
        engine: "auto", "cuda", "triton" or "torch".

    Returns:
        `[ceil(R/128), ceil(V/4), 32, 4, 4]`, or `[E, ceil(N/128), ceil(V/4), 32, 4, 4]`, of the same dtype; padding 0.

    Raises:
        ValueError: for a wrong shape, element size, stride or engine.
    """
    if check_is_tensor("scales_RV", scales_RV).ndim not in (2, 3):
        raise ValueError(f"scales_RV: expected [R, V] or [E, N, V], got shape {tuple(scales_RV.shape)}")
    _check_bytes(scales_RV, "scales_RV")
    if scales_RV.numel() and scales_RV.shape[-1] > 1 and scales_RV.stride(-1) != 1:
        raise ValueError(f"scales_RV: expected a contiguous last dimension, got strides {scales_RV.stride()}")
    scales = scales_RV if scales_RV.ndim == 3 else scales_RV[None]
    resolve_engine(engine, scales.device)
    out = reference_quantize.swizzle_scales(scales)
    return out if scales_RV.ndim == 3 else out[0]


def unswizzle_scales(blocks: torch.Tensor, num_rows: int, num_columns: int, *, engine: str = "auto") -> torch.Tensor:
    """The inverse of `swizzle_scales`: `[num_rows, num_columns]`, or `[E, num_rows, num_columns]` from the 6-D form.

    `blocks` is contiguous `[>= ceil(num_rows/128), ceil(num_columns/4), 32, 4, 4]` (6-D: with the expert in front);
    padding is not read. Raises `ValueError` for a wrong shape, element size, stride or engine.
    """
    shape = tuple(check_is_tensor("blocks", blocks).shape)
    check_integer("num_rows", num_rows, 0)
    check_integer("num_columns", num_columns, 0)
    wanted = (ceil_div(num_columns, 4), 32, 4, 4)
    if blocks.ndim not in (5, 6) or shape[-4:] != wanted or shape[-5] < ceil_div(num_rows, 128):
        raise ValueError(
            f"blocks: expected [(E,) at least {ceil_div(num_rows, 128)}, {', '.join(map(str, wanted))}] "
            f"for {num_rows} rows and {num_columns} columns, got shape {shape}"
        )
    _check_bytes(blocks, "blocks")
    if not blocks.is_contiguous():
        raise ValueError(f"blocks: expected a contiguous tensor, got strides {blocks.stride()}")
    source = blocks if blocks.ndim == 6 else blocks[None]
    resolve_engine(engine, blocks.device)
    out = reference_quantize.unswizzle_scales(source, num_rows, num_columns)
    return out if blocks.ndim == 6 else out[0]


def _check_bytes(t: torch.Tensor, argument: str) -> None:
    if t.dtype.itemsize != 1 or t.dtype == torch.bool:
        raise ValueError(f"{argument}: expected one-byte elements (uint8 or float8_e4m3fn), got {t.dtype}")
