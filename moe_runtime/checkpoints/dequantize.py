"""What becomes of quants and scales as they are read: unpacked, dequantized, or with scales in other blocks.

Shape letters: `P` linears that are read together (one, or gate and up), `N` rows, `K` columns.
"""

from __future__ import annotations

import torch

from moe_runtime.kernels.formats.number_formats import FP8_BLOCK, WEIGHT_BLOCK_N, TokenFormat
from moe_runtime.kernels.gemm.weights import GateUpOrder


def stack_rows(parts: torch.Tensor, order: GateUpOrder | None) -> torch.Tensor:
    """`[P, N, ...]`, one linear or gate and up, as `[P * N, ...]` with their rows in `order`."""
    return (parts.transpose(0, 1) if order is GateUpOrder.INTERLEAVED else parts).flatten(0, 1)


def keeps_scales(fmt: TokenFormat, rows: int, columns: int, order: GateUpOrder | None) -> bool:
    """Whether the scales of linears `[rows, columns]`, stored apart, are those of `ExpertWeights` of all their rows.

    128x128 blocks are not if rows of gate and up alternate, so that a block would hold some of both, nor if K is no
    multiple of `fmt.unit`, or N none of 8.
    """
    kept = rows % 8 == 0 and columns % fmt.unit == 0 and order is not GateUpOrder.INTERLEAVED
    return kept or fmt.scale_dtype is not torch.float32


def spread(scales: torch.Tensor, high: int, wide: int, rows: int, columns: int) -> torch.Tensor:
    """`[P, rows, columns]` of scales `[P, ceil(rows/high), ceil(columns/wide)]` of blocks."""
    by_row = scales.repeat_interleave(min(high, rows), 1)[:, :rows]
    return by_row.repeat_interleave(min(wide, columns), 2)[:, :, :columns]


def dequantized(
    quants: torch.Tensor, scales: torch.Tensor, high: int, wide: int, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 of quants `[P, N, K]`, less `zeros`, times the scales `[P, ceil(N/high), ceil(K/wide)]` of their blocks."""
    values, (rows, columns) = quants.float(), quants.shape[1:]
    high, wide = min(high, rows), min(wide, columns)
    if rows % high or columns % wide:
        if zeros is not None:
            values = values - spread(zeros, high, wide, rows, columns)
        return values * spread(scales, high, wide, rows, columns)
    # Without a copy of the scales for each value.
    blocks = values.contiguous().view(len(quants), rows // high, high, columns // wide, wide)
    if zeros is not None:
        blocks.sub_(zeros[:, :, None, :, None])
    return blocks.mul_(scales[:, :, None, :, None]).view(quants.shape)


def in_blocks(scales: torch.Tensor, high: int, wide: int, rows: int, columns: int) -> torch.Tensor:
    """fp32 scales of blocks of `high x wide` of linears `[P, rows, columns]`, as those of the 128x128 blocks in it."""
    down = torch.arange(0, rows, WEIGHT_BLOCK_N, device=scales.device) // high
    across = torch.arange(0, columns, FP8_BLOCK.block, device=scales.device) // wide
    return scales[:, down][:, :, across].contiguous()


def unpacked(quants: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """uint8 `[..., count]` of the integers of 2, 4 or 8 bits in int32 `[..., W]`."""
    raw, mask = quants.contiguous().view(torch.uint8), (1 << bits) - 1
    return torch.stack([raw >> shift & mask for shift in range(0, 8, bits)], -1).flatten(-2)[..., :count]


def centred(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 of uint8 to which `2^(bits - 1)` was added."""
    # In bytes, where what falls below 0 is the two's complement.
    return (values - (1 << bits - 1)).view(torch.int8)


def times_columns(w_NK: torch.Tensor, factors: torch.Tensor, order: GateUpOrder | None) -> torch.Tensor:
    """`w_NK`, one linear or gate and up with rows in `order`, times the factors `[P, K]` of their columns."""
    if order is GateUpOrder.INTERLEAVED:
        return (w_NK.unflatten(0, (-1, len(factors))) * factors).flatten(0, 1)
    return (w_NK.unflatten(0, (len(factors), -1)) * factors[:, None]).flatten(0, 1)


def no_half(x: torch.Tensor) -> torch.Tensor:
    """`x`, in fp32 if it is fp16."""
    return x.float() if x.dtype == torch.float16 else x
