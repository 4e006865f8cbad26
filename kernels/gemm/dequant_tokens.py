"""Host side of `dequant_tokens.cu`: gathers tokens and dequantizes them to bf16 in the order that the GEMM reads.

Either all tokens are dequantized before the GEMM, or most of them while it runs (`plan.DequantOverlap`), with the
same bits. `dequant_gemm.py` is that GEMM.
"""

from __future__ import annotations

from functools import cache

import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.bound_kernel import BoundKernel, OneLaunch
from moe_runtime.kernels.formats.number_formats import TokenFormat, ceil_div
from moe_runtime.kernels.gemm.dequant_layout import unit_columns
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import DequantOverlap
from moe_runtime.kernels.gemm.shapes import MANY_TOKENS, TokenShape, overlapped_token_shape

MAX_BLOCKS = 2**31 - 1


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
    """Shape of the dequantized tokens for rows of `num_columns` values in the groups of `a`."""
    return unit_columns(num_columns), token_blocks(a), 8, 8, 16


def empty_blocks(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Uninitialized memory of a `dequantized_shape`."""
    return torch.empty(shape, dtype=torch.uint8, device=device)


class TokenDequantizer:
    """Gathers rows and dequantizes them to bf16, for the GEMM that is launched next.

    Every `shape` gives the same bits. Rows of groups with an expert outside `0 .. num_experts - 1` are left out.

    Args:
        a: rows of the size that all launches have.
        num_experts: experts of the GEMM.
        shape: for the tokens that are dequantized before the GEMM.
        overlap: how the others are dequantized while it runs; None if there are none.
        packed_ld, scale_block: those of `DequantGemm`.
        kernel: `OneLaunch` for one that is launched once.
    """

    def __init__(
        self,
        a: GroupedRows,
        num_experts: int,
        shape: TokenShape,
        overlap: DequantOverlap | None = None,
        packed_ld: int | None = None,
        scale_block: int | None = None,
        *,
        kernel: type[BoundKernel | OneLaunch] = BoundKernel,
    ) -> None:
        self._packed_ld = packed_ld
        self._shape = dequantized_shape(a, a.num_columns)
        units, blocks = self._shape[:2]

        def made(shape: TokenShape, grid: tuple[int, int, int], begin: int, end: int) -> BoundKernel | OneLaunch:
            return kernel(
                "dequant_tokens.cu",
                "dequant_tokens",
                token_macros(a.format, packed_ld is not None, scale_block, a.scales_in_record, shape),
                grid=grid,
                block=32 * shape.warps,
                bound={
                    "num_groups": a.max_active_groups,
                    "num_experts": num_experts,
                    "capacity": a.capacity,
                    "columns": a.num_columns,
                    "units": units,
                    "token_blocks": blocks,
                    "begin": begin,
                    "end": end,
                },
                device=a.rows.device,
                shared_bytes=shape.warps * shape.ahead(a.format) * 1024 if shape.overlapped else 0,
                early=True,
            )

        sms, self._num_counters = nvrtc.most_sms(a.rows.device), 0
        if overlap is None:
            self._kernels = [made(shape, _grid(shape, units, blocks, a.format, sms), 0, MAX_BLOCKS)]
            return
        first = min(overlap.first, blocks)
        self._num_counters = 1 + blocks - first
        self._kernels = [
            made(shape, _grid(shape, units, first, a.format, sms), 0, first),
            made(overlapped_token_shape(units), (overlap.sms, 1, 1), first, MAX_BLOCKS),
        ]

    def launch(self, a: GroupedRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Dequantize the rows `a`, which are as those that this was made of.

        Returns:
            uint8 `[units of K, blocks, 8 column pieces, 8 tokens, 16 bytes]`, bf16 in blocks of 8 tokens; and, where
            the GEMM must wait for some of them, the counters for that, int32 `[1 + such blocks]`. The result is then
            complete when the GEMM has ended.
        """
        device = a.rows.device
        out, counters = empty_blocks(self._shape, device), None
        if self._num_counters:
            counters = torch.empty(self._num_counters, dtype=torch.int32, device=device)
        arguments = {
            "rows": a.rows,
            "scales": a.scales,
            "row_index": a.row_index,
            "group_offsets": a.group_offsets,
            "group_scale_offsets": a.group_scale_offsets,
            "expert_ids": a.expert_ids,
            "num_active": a.active_on_device,
            "out": out,
            "scale_ld": scale_stride(a, self._packed_ld),
            "row_bytes": a.rows.stride(0) * a.rows.element_size(),
            "counters": counters,
        }
        for kernel in self._kernels:
            kernel.launch(arguments)
        return out, counters


def _grid(shape: TokenShape, units: int, blocks: int, fmt: TokenFormat, sms: int) -> tuple[int, int, int]:
    """Grid for `blocks` blocks of 8 tokens."""
    parts = ceil_div(units, shape.warps * shape.ahead(fmt))
    return min(blocks, max(1, shape.blocks_per_sm * sms // parts)), parts, 1
