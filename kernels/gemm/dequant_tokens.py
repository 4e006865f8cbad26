"""Host side of `dequant_tokens.cu`: gathers tokens and dequantizes them to bf16 in the order that the GEMM reads.

Either all tokens are dequantized before the product, or most of them while it runs (`plan.DequantOverlap`), with the
same bits. `dequant_gemm.py` is that product.
"""

from __future__ import annotations

from functools import cache

import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.formats.number_formats import TokenFormat, ceil_div
from moe_runtime.kernels.gemm.dequant_layout import unit_columns
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import DequantOverlap
from moe_runtime.kernels.gemm.shapes import MANY_TOKENS, TokenShape, overlapped_token_shape


@cache
def piece_macros(
    fmt: TokenFormat, packed: bool = False, scale_block: int | None = None, scales_in_record: bool = False
) -> nvrtc.Defines:
    """Macros of `token_piece.cuh`."""
    return nvrtc.Defines(
        {
            "FMT": int(fmt.code),
            "PACKED": int(packed),
            "SCALES_IN_RECORD": int(scales_in_record),
            "SCALE_BLOCK": scale_block or fmt.block,
        }
    )


@cache
def token_macros(
    fmt: TokenFormat,
    packed: bool = False,
    scale_block: int | None = None,
    scales_in_record: bool = False,
    shape: TokenShape = MANY_TOKENS,
) -> nvrtc.Defines:
    """Macros of `dequant_tokens.cu`."""
    return nvrtc.Defines(
        {
            **piece_macros(fmt, packed, scale_block, scales_in_record),
            "OVERLAPPED": int(shape.overlapped),
            "TEAM": shape.team_warps,
            "THREADS": 32 * shape.warps,
            "MIN_BLOCKS": shape.min_blocks,
            "AHEAD": shape.ahead(fmt),
            "MAX_GROUPS": shape.max_groups,
        }
    )


def token_blocks(a: GroupedRows) -> int:
    """Blocks of 8 dequantized tokens for the groups of `a`, which may each begin with one that is not full."""
    return (a.capacity + 7 * a.num_groups) // 8 + 1


def scale_stride(a: GroupedRows, packed_ld: int | None) -> int:
    """What `token_piece.cuh` calls `scale_ld`."""
    if a.scales_in_record:
        assert a.scales is not None
        return a.scales.stride(0)
    return packed_ld or 0


def dequantized_shape(a: GroupedRows, num_columns: int) -> tuple[int, ...]:
    """Shape of the output of `dequant_tokens` for rows of `num_columns` values in the groups of `a`."""
    return unit_columns(num_columns), token_blocks(a), 8, 8, 16


def empty_dequantized(a: GroupedRows, num_columns: int) -> torch.Tensor:
    """Uninitialized output of `dequant_tokens` for rows of `num_columns` values in the groups of `a`."""
    return torch.empty(dequantized_shape(a, num_columns), dtype=torch.uint8, device=a.rows.device)


def dequant_tokens(
    a: GroupedRows, num_experts: int, shape: TokenShape, packed_ld: int | None = None, scale_block: int | None = None
) -> torch.Tensor:
    """The rows as bf16 in blocks of 8 tokens, uint8 `[units of K, blocks, 8 column pieces, 8 tokens, 16 bytes]`.

    Rows of groups with an expert outside `0 .. num_experts - 1` are left out. `packed_ld` and `scale_block` are those
    of `dequant_gemm`. Every `shape` gives the same bits.
    """
    out = empty_dequantized(a, a.num_columns)
    units, blocks = out.shape[:2]
    grid = _grid(shape, units, blocks, a.format, nvrtc.most_sms(a.rows.device))
    _launch_tokens(a, num_experts, packed_ld, scale_block, out, shape, grid)
    return out


def dequant_tokens_overlapped(
    a: GroupedRows,
    num_experts: int,
    shape: TokenShape,
    overlap: DequantOverlap,
    packed_ld: int | None = None,
    scale_block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `dequant_tokens`, and the counters by which the product waits for it.

    The product must be launched next; the result is complete when it has ended. `shape` is for the tokens that are
    dequantized before it. The counters are int32 `[1 + blocks dequantized while it runs]`.
    """
    out = empty_dequantized(a, a.num_columns)
    units, blocks = out.shape[:2]
    first = min(overlap.first, blocks)
    counters = torch.empty(1 + blocks - first, dtype=torch.int32, device=out.device)
    grid = _grid(shape, units, first, a.format, nvrtc.most_sms(a.rows.device))
    _launch_tokens(a, num_experts, packed_ld, scale_block, out, shape, grid, end=first, counters=counters)
    rest, grid = overlapped_token_shape(units), (overlap.sms, 1, 1)
    _launch_tokens(a, num_experts, packed_ld, scale_block, out, rest, grid, begin=first, counters=counters)
    return out, counters


def _grid(shape: TokenShape, units: int, blocks: int, fmt: TokenFormat, sms: int) -> tuple[int, int, int]:
    """Grid for `blocks` blocks of 8 tokens."""
    parts = ceil_div(units, shape.warps * shape.ahead(fmt))
    return min(blocks, max(1, shape.blocks_per_sm * sms // parts)), parts, 1


def _launch_tokens(
    a: GroupedRows,
    num_experts: int,
    packed_ld: int | None,
    scale_block: int | None,
    out: torch.Tensor,
    shape: TokenShape,
    grid: tuple[int, int, int],
    *,
    begin: int = 0,
    end: int = 2**31 - 1,
    counters: torch.Tensor | None = None,
) -> None:
    """Launch `dequant_tokens.cu` for the blocks of 8 tokens from `begin` to `end`."""
    units, blocks = out.shape[:2]
    nvrtc.launch(
        "dequant_tokens.cu",
        "dequant_tokens",
        token_macros(a.format, packed_ld is not None, scale_block, a.scales_in_record, shape),
        grid=grid,
        block=32 * shape.warps,
        arguments=[
            a.rows,
            a.scales,
            a.row_index,
            a.group_offsets,
            a.group_scale_offsets,
            a.expert_ids,
            a.active_on_device,
            out,
            a.max_active_groups,
            num_experts,
            a.capacity,
            a.num_columns,
            units,
            blocks,
            scale_stride(a, packed_ld),
            nvrtc.int64(a.rows.stride(0) * a.rows.element_size()),
            begin,
            end,
            counters,
        ],
        device=a.rows.device,
        shared_bytes=shape.warps * shape.ahead(a.format) * 1024 if shape.overlapped else 0,
        early=True,
    )
