"""Tokens for the GEMM that decodes weights in registers: gathered, decoded to bf16, in the order in which it reads.

The host side of `decode_tokens.cu`. All are decoded before the product that takes them, or most of them beside it
(`Beside`), with the same bits. `decoded_gemm.py` is that product, and chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from moe_runtime.formats import NVFP4, TokenFormat, ceil_div
from moe_runtime.grouped import GroupedRows
from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.decoded_layout import unit_columns
from moe_runtime.prepared import MAX_PREPARED_EXPERTS

MAX_GROUPS = MAX_PREPARED_EXPERTS


@dataclass(frozen=True)
class TokenShape:
    """How `decode_tokens.cu` is cut.

    Attributes:
        warps: of a block.
        max_groups: for which there is shared memory.
        min_blocks: of an SM, for which registers are kept few; 0 leaves them to the compiler.
        blocks_per_sm: that are launched, at most.
        team: warps that take 8 tokens together; None for all of a block.
        beside: beside the product that takes the tokens, from shared memory by the copy engine.
    """

    warps: int
    max_groups: int
    min_blocks: int
    blocks_per_sm: int
    team: int | None = None
    beside: bool = False

    @property
    def team_warps(self) -> int:
        return self.team or self.warps

    def ahead(self, fmt: TokenFormat) -> int:
        """Pieces of a row that a thread loads before it decodes the first: 32 registers hold few."""
        return 4 if self.min_blocks == 0 else 2 if fmt is NVFP4 else 1


MANY_TOKENS = TokenShape(warps=8, max_groups=MAX_GROUPS, min_blocks=0, blocks_per_sm=12)
"""Twice as many blocks as an SM takes at a time: none ends much later than the others."""
FEW_TOKENS = TokenShape(warps=4, max_groups=64, min_blocks=16, blocks_per_sm=1)
"""For what these warps load at once. A block has 128 threads of 32 registers, all that a block of the GEMM leaves of an
SM: that starts beside it and loads its weights meanwhile. More loads of tokens would wait behind those of weights."""

STEPS_BESIDE = 8
"""Of a warp that decodes beside the GEMM, for 8 tokens: what it does once for these is little beside them then."""
MOST_WARPS = 32


def shape_beside(units: int) -> TokenShape:
    """Of the blocks that decode tokens `units` wide beside the GEMM: one fills an SM."""
    team = min(MOST_WARPS, ceil_div(units, MANY_TOKENS.ahead(NVFP4) * STEPS_BESIDE))
    return TokenShape(MOST_WARPS // team * team, MAX_GROUPS, 0, 1, team, beside=True)


@dataclass(frozen=True)
class Beside:
    """How tokens are decoded of which most are beside the product that takes them.

    Attributes:
        first: blocks of 8 tokens that all SMs decode before.
        sms: that decode the others; then they help with the product.
    """

    first: int
    sms: int


def choose_token_shape(rows: int, num_groups: int, units: int, fmt: TokenFormat, sms: int) -> TokenShape:
    """The shape for `rows` that come on average, `units` wide; both give the same bits for any number."""
    blocks = (rows + 7 * num_groups) // 8
    few = blocks * units <= sms * FEW_TOKENS.warps * FEW_TOKENS.ahead(fmt)
    return FEW_TOKENS if few and num_groups <= FEW_TOKENS.max_groups else MANY_TOKENS


@cache
def token_macros(
    fmt: TokenFormat,
    packed: bool = False,
    scale_block: int | None = None,
    by_row: bool = False,
    shape: TokenShape = MANY_TOKENS,
) -> nvrtc.Defines:
    """Macros of `decode_tokens.cu`."""
    return nvrtc.Defines(
        {
            "BESIDE": int(shape.beside),
            "TEAM": shape.team_warps,
            "THREADS": 32 * shape.warps,
            "MIN_BLOCKS": shape.min_blocks,
            "AHEAD": shape.ahead(fmt),
            "FMT": int(fmt.code),
            "MAX_GROUPS": shape.max_groups,
            "PACKED": int(packed),
            "BY_ROW": int(by_row),
            "SCALE_BLOCK": scale_block or fmt.block,
        }
    )


def empty_decoded(a: GroupedRows, num_columns: int) -> torch.Tensor:
    """What `decode_tokens` would fill for rows of `num_columns` numbers in the groups of `a`."""
    blocks = (a.capacity + 7 * a.num_groups) // 8 + 1
    return torch.empty(unit_columns(num_columns), blocks, 8, 8, 16, dtype=torch.uint8, device=a.rows.device)


def decode_tokens(
    a: GroupedRows, num_experts: int, packed_ld: int | None = None, scale_block: int | None = None
) -> torch.Tensor:
    """The rows as bf16 in blocks of 8 tokens, uint8 `[units of K, blocks, 8 column pieces, 8 tokens, 16 bytes]`.

    Rows of groups whose expert is not in `0 .. num_experts - 1` are left out. `packed_ld` and `scale_block` are those
    of `decoded_gemm`.
    """
    out = empty_decoded(a, a.num_columns)
    units, blocks = out.shape[:2]
    sms = nvrtc.most_sms(a.rows.device)
    shape = choose_token_shape(a.likely_rows, a.max_active_groups, units, a.format, sms)
    _launch_tokens(a, num_experts, packed_ld, scale_block, out, shape, _grid(shape, units, blocks, a.format, sms))
    return out


def decode_beside(
    a: GroupedRows, num_experts: int, beside: Beside, packed_ld: int | None = None, scale_block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `decode_tokens` gives, when the product that is launched next is done, and counters that it waits by.

    The counters are int32 `[1 + blocks behind those decoded before]`.
    """
    out = empty_decoded(a, a.num_columns)
    units, blocks = out.shape[:2]
    first = min(beside.first, blocks)
    counters = torch.empty(1 + blocks - first, dtype=torch.int32, device=out.device)
    grid = _grid(MANY_TOKENS, units, first, a.format, nvrtc.most_sms(a.rows.device))
    _launch_tokens(a, num_experts, packed_ld, scale_block, out, MANY_TOKENS, grid, end=first, counters=counters)
    grid = (beside.sms, 1, 1)
    shape = shape_beside(units)
    _launch_tokens(a, num_experts, packed_ld, scale_block, out, shape, grid, begin=first, counters=counters)
    return out, counters


def _grid(shape: TokenShape, units: int, blocks: int, fmt: TokenFormat, sms: int) -> tuple[int, int, int]:
    """Blocks of threads for so many of 8 tokens."""
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
    """Launch `decode_tokens.cu` for the blocks of 8 tokens from `begin` to `end`."""
    scale_ld = packed_ld or 0
    if a.scales_by_row:
        assert a.scales is not None
        scale_ld = a.scales.stride(0)
    units, blocks = out.shape[:2]
    nvrtc.launch(
        "decode_tokens.cu",
        "decode_tokens",
        token_macros(a.format, packed_ld is not None, scale_block, a.scales_by_row, shape),
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
            scale_ld,
            nvrtc.int64(a.rows.stride(0) * a.rows.element_size()),
            begin,
            end,
            counters,
        ],
        device=a.rows.device,
        shared_bytes=shape.warps * shape.ahead(a.format) * 1024 if shape.beside else 0,
        early=True,
    )
