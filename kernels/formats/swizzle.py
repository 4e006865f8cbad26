"""The 128x4 scale swizzle, `[ceil(R/128), ceil(V/4), 32, 4, 4]` bytes; padding is 0 and never read.

FlashInfer's 128x4 layout and the tcgen05 "5D" layout are the same bytes. The scale of row `r`, column `v` lies at

    (r//128)*ceil(V/4)*512 + (v//4)*512 + (r%32)*16 + ((r%128)//32)*4 + v%4

With V = 4: (0, 1) at 1, (1, 0) at 16, (32, 0) at 4, (128, 0) at 512. The "6D" form of weights prepends the expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats import reference_quantize
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.support.arguments import check_integer, check_is_tensor


@triton.jit
def swizzled_offset(r, v, V):
    """Offset of the scale of row `r`, column `v` of `V` columns; `r` must be int64 if the offset may exceed 2^31.

    `scale_blocks.swizzled_offset` is the same formula on the host.
    """
    return (r // 128) * ((V + 3) // 4 * 512) + (v // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + v % 4


@triton.jit
def _swizzle_kernel(in_ptr, out_ptr, num_rows, num_columns, expert_stride, row_stride, ATOMS: tl.constexpr):
    """One program writes `ATOMS` consecutive 512-byte atoms of one 128-row block of one expert."""
    block = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(2).to(tl.int64)
    atoms = (num_columns + 3) // 4
    position = tl.arange(0, ATOMS * 512)
    atom = tl.program_id(1) * ATOMS + position // 512
    # Position i of an atom: row i//16 of 32, quarter (i%16)//4 of the 128 rows, column i%4.
    within = position % 512
    row = block * 128 + (within % 16) // 4 * 32 + within // 16
    column = atom * 4 + within % 4
    inside = (row < num_rows) & (column < num_columns)
    byte = tl.load(in_ptr + expert * expert_stride + row * row_stride + column, inside, other=0)
    start = ((expert * tl.num_programs(0) + block) * atoms + tl.program_id(1) * ATOMS) * 512
    tl.store(out_ptr + start + position, byte, atom < atoms)


@triton.jit
def _unswizzle_kernel(
    in_ptr, out_ptr, num_rows, num_columns, expert_stride, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr
):
    """One program writes a tile of `BLOCK_R` rows and `BLOCK_V` columns of one expert."""
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    byte = tl.load(in_ptr + expert * expert_stride + swizzled_offset(row, column, num_columns), inside, other=0)
    tl.store(out_ptr + (expert * num_rows + row) * num_columns + column, byte, inside)


ATOMS = 4
BLOCK_R = 32
BLOCK_V = 32


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
    if resolve_engine(engine, scales.device) == "torch":
        out = reference_quantize.swizzle_scales(scales)
    else:
        e, n, v = scales.shape
        blocks, atoms = ceil_div(n, 128), ceil_div(v, 4)
        out = torch.empty(e, blocks, atoms, 32, 4, 4, dtype=scales.dtype, device=scales.device)
        if out.numel():
            _swizzle_kernel[(blocks, ceil_div(atoms, ATOMS), e)](
                raw_bits(scales), raw_bits(out), n, v, scales.stride(0), scales.stride(1), ATOMS=ATOMS
            )
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
    if resolve_engine(engine, blocks.device) == "torch":
        out = reference_quantize.unswizzle_scales(source, num_rows, num_columns)
    else:
        e = source.shape[0]
        out = torch.empty(e, num_rows, num_columns, dtype=blocks.dtype, device=blocks.device)
        if out.numel():
            _unswizzle_kernel[(ceil_div(num_rows, BLOCK_R), ceil_div(num_columns, BLOCK_V), e)](
                raw_bits(source),
                raw_bits(out),
                num_rows,
                num_columns,
                source.stride(0),
                BLOCK_R=BLOCK_R,
                BLOCK_V=BLOCK_V,
            )
    return out if blocks.ndim == 6 else out[0]


def _check_bytes(t: torch.Tensor, argument: str) -> None:
    if t.dtype.itemsize != 1 or t.dtype == torch.bool:
        raise ValueError(f"{argument}: expected one-byte elements (uint8 or float8_e4m3fn), got {t.dtype}")
