"""The forms that the kernels of the grouped GEMM are compiled in: tiles, rings of stages, teams of warps.

`plan.py` chooses among them. The forms of one kernel of Hopper give the same bits for any number of rows. What
they were measured against is in `kernels/gemm/notes.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moe_runtime.kernels.formats.number_formats import NVFP4, TokenFormat, ceil_div
from moe_runtime.kernels.gemm.dequant_layout import stage_units, unit_bytes
from moe_runtime.kernels.gemm.prepacked import MAX_PREPACKED_EXPERTS

SHARED_BYTES = 227 * 1024
"""Shared memory that a block of Hopper may have."""


class Regime(Enum):
    """How many rows a group has on average."""

    DECODE = "few rows"
    MIDDLE = "medium rows"
    PREFILL = "many rows"
    ANY = "any rows"


@dataclass(frozen=True)
class GemmTile:
    """Tile shape and launch options of the Triton kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# --- Hopper's kernel for weights that tensor cores read as they are stored ---

HALF = 128
"""Weight rows of half a tile: a plain tile has 256 columns, a gated one 128 of gate and 128 of up."""
TILE_ROWS = 128
STAGE_BYTES = (TILE_ROWS + 2 * HALF) * 128
"""Bytes of one stage of the ring: 128 bytes of K of each row of a tile."""
STAGING_BYTES = 2048
"""Shared memory in which each warp turns its results into rows."""
SCALE_BYTES = 1088
"""Shared memory for the scales of a stage: as much as they take where a copy brings those of four stages."""
MAX_STAGES = 4
TILES_AHEAD = 8
"""Tiles that the producers of a block announce to its math warps at a time."""


@dataclass(frozen=True, eq=False)
class TmaShape:
    """How `tma_gemm.cu` cuts its work.

    Attributes:
        regime: what it is for.
        cluster: blocks that share loads by multicast.
        box_rows: rows that one copy of the rows' tensor map brings; where there is no cluster, boxes without rows of
            the group are left out.
        band: column tiles that are walked together, all row tiles of them before the next; even with a cluster.
    """

    regime: Regime
    cluster: int
    box_rows: int
    band: int

    def stages(self, num_groups: int) -> int:
        """Stages of the ring: as many as the rest of shared memory leaves room for."""
        return (SHARED_BYTES - _bytes_without_ring(num_groups)) // STAGE_BYTES

    def shared_bytes(self, num_groups: int) -> int:
        """Dynamic shared memory of a block."""
        return self.stages(num_groups) * STAGE_BYTES + _bytes_without_ring(num_groups)


def _bytes_without_ring(num_groups: int) -> int:
    """Staging, scales and barriers of the stages, tiles, the table of groups."""
    return 8 * STAGING_BYTES + MAX_STAGES * (SCALE_BYTES + 16) + TILES_AHEAD * (8 + 16) + 16 * (num_groups + 1)


TMA_DECODE = TmaShape(Regime.DECODE, cluster=1, box_rows=16, band=1)
# 66 clusters at a time, 8 columns by 8 pairs of rows, read least: as many rows as weights.
TMA_PREFILL = TmaShape(Regime.PREFILL, cluster=2, box_rows=TILE_ROWS, band=8)


# --- Hopper's kernels for weights that are dequantized in registers ---


@dataclass(frozen=True, eq=False)
class DequantShape:
    """Tile and pipeline of `dequant_gemm.cu`.

    Attributes:
        regime: what it is for.
        warpgroups: each dequantizes and multiplies 64 weight rows of a tile; one more warpgroup loads.
        stage_units: most units of 64 columns in a stage of the ring.
        batch: steps of 16 columns that are dequantized before they are multiplied.
        buffers, other_buffers: for so many steps, of NVFP4 weights and tokens and of other pairs, which leave fewer
            registers. When all are full, dequantizing waits for the tensor cores and other warpgroups go on.
        rolling: wait for the oldest buffer alone, so that one is dequantized while another is multiplied, always;
            otherwise for all.
        max_blocks: tokens of a tile / 8.
        cases: smaller numbers of blocks that have code of their own.
    """

    regime: Regime
    warpgroups: int
    stage_units: int
    batch: int
    buffers: int
    other_buffers: int
    rolling: bool
    max_blocks: int
    cases: tuple[int, ...]

    def ring(self, w_format: TokenFormat, units: int) -> tuple[int, int, int]:
        """Stages, units of K in each, and bytes of all, for a weight `units` wide.

        At least two stages, so that one is loaded while the other is multiplied.
        """
        unit_stage = self.warpgroups * unit_bytes(w_format) + self.max_blocks * 1024
        size = stage_units(units, min(self.stage_units, RING_BYTES // (2 * unit_stage)))
        stages = RING_BYTES // (size * unit_stage)
        return stages, size, stages * size * unit_stage


RING_BYTES = SHARED_BYTES - 20 * 1024
"""Shared memory for the ring; the rest is static."""

DEQUANT_DECODE = DequantShape(
    Regime.DECODE,
    warpgroups=4,
    stage_units=4,
    batch=4,
    buffers=2,
    other_buffers=2,
    rolling=False,
    max_blocks=8,
    cases=(1, 2, 3, 4, 5, 6),
)
DEQUANT_PREFILL = DequantShape(
    Regime.PREFILL,
    warpgroups=4,
    stage_units=4,
    batch=2,
    buffers=2,
    other_buffers=1,
    rolling=False,
    max_blocks=16,
    cases=(4, 6, 8, 10, 12, 14),
)
DEQUANT_MIDDLE = DequantShape(
    Regime.MIDDLE,
    warpgroups=2,
    stage_units=2,
    batch=2,
    buffers=2,
    other_buffers=2,
    rolling=True,
    max_blocks=20,
    cases=(4, 8, 10, 12, 14, 16, 18),
)
"""Where most groups have more tokens than a tile of DEQUANT_PREFILL takes, and few more than one of these."""


MAX_TOKEN_WARPS = 32
TOKEN_STEPS = 8
"""Steps of a warp for 8 tokens where dequantization is overlapped: what it does once for these counts little then."""


@dataclass(frozen=True)
class TokenShape:
    """How `dequant_tokens.cu` is cut.

    Attributes:
        warps: of a block.
        max_groups: for which there is shared memory.
        min_blocks: of an SM, for which registers are kept few; 0 leaves them to the compiler.
        blocks_per_sm: that are launched, at most.
        team: warps that take 8 tokens together; None for all of a block.
        overlapped: runs while the product multiplies that takes the tokens, from shared memory by the copy engine.
    """

    warps: int
    max_groups: int
    min_blocks: int
    blocks_per_sm: int
    team: int | None = None
    overlapped: bool = False

    @property
    def team_warps(self) -> int:
        return self.team or self.warps

    def ahead(self, fmt: TokenFormat) -> int:
        """Pieces of a row that a thread loads before it dequantizes the first: 32 registers hold few."""
        return 4 if self.min_blocks == 0 else 2 if fmt is NVFP4 else 1


MANY_TOKENS = TokenShape(warps=8, max_groups=MAX_PREPACKED_EXPERTS, min_blocks=0, blocks_per_sm=12)
"""Twice as many blocks as an SM takes at a time: none ends much later than the others."""
FEW_TOKENS = TokenShape(warps=4, max_groups=64, min_blocks=16, blocks_per_sm=1)
"""For what these warps load at once. A block has 128 threads of 32 registers, all that a block of the GEMM leaves of an
SM: the GEMM starts meanwhile and loads its weights. More loads of tokens would wait behind those of weights."""


def overlapped_token_shape(units: int) -> TokenShape:
    """Of the blocks that dequantize tokens `units` wide while the GEMM multiplies: one fills an SM."""
    team = min(MAX_TOKEN_WARPS, ceil_div(units, MANY_TOKENS.ahead(NVFP4) * TOKEN_STEPS))
    return TokenShape(MAX_TOKEN_WARPS // team * team, MAX_PREPACKED_EXPERTS, 0, 1, team, overlapped=True)
