"""The forms in which the kernels of the grouped GEMM are compiled: tiles, rings of stages, teams of warps.

`plan.py` chooses among them. All forms of a Hopper kernel give the same bits for any number of rows. Alternatives that
were measured are in `kernels/gemm/notes.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from moe_runtime.kernels.formats.number_formats import MXFP4, NVFP4, TokenFormat, ceil_div
from moe_runtime.kernels.gemm.dequant_layout import stage_units, unit_bytes
from moe_runtime.kernels.gemm.prepacked import MAX_PREPACKED_EXPERTS
from moe_runtime.kernels.runtime import BLOCK_RESERVED_BYTES, MAX_SHARED_BYTES, SM_SHARED_BYTES


class Regime(Enum):
    """How many rows a group has on average."""

    FEW = "a row or two"
    SOME = "several rows"
    DOZEN = "a dozen rows"
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
STAGING_BYTES = 2048
"""Shared memory in which a warp transposes its results into rows."""
SCALE_BYTES = 1088
"""Shared memory for the scales of a stage. TMA copies scales of four stages at once; four stages hold two copies."""
TALL_SCALE_BYTES = 2112
"""The same of a tile of 256 rows."""
MAX_STAGES = 4
MAX_FEW_STAGES = 6
FEW_STAGING_BYTES = (HALF + 4) * 4
"""Shared memory of a tile's row by which, in a tile of few rows, the threads of a warpgroup share its sums."""
EXPANSION_TABLE_BYTES = 2048
"""Eight e4m3 products for each scale code of expanded weights; those of MXFP4 take a quarter."""
MAX_PACKED_STAGES = 8
"""Of the ring of packed weights, which hides the latency of memory. There is an even number."""
TILES_AHEAD = 8
"""Tiles that the producers of a block may announce to its math warps in advance."""


@dataclass(frozen=True, eq=False)
class TmaShape:
    """Clusters, TMA boxes and tile order of `tma_gemm.cu`.

    Attributes:
        regime: the number of rows that it is for.
        cluster: blocks that share loads by multicast, or, if `few`, 128 columns of a quantized gated result.
        box_rows: rows of one TMA box of the rows' tensor map; without a cluster, boxes without rows of the group are
            skipped.
        band: column tiles of a band; all row tiles of a band come before the next band. Even if there is a cluster.
        expands_ahead: whether FP4 weights are expanded in memory, before the tiles that multiply them, each once.
        tile_rows: most rows of a tile. With less than TILE_ROWS (`few`), a tile has half of the columns, and an SM two
            blocks. With more (`tall`), it has half of the columns, too.
    """

    regime: Regime
    cluster: int
    box_rows: int
    band: int
    tile_rows: int = TILE_ROWS
    expands_ahead: bool = False

    @property
    def name(self) -> str:
        """In one word: `ahead`, `tall`, or the regime's name."""
        return "ahead" if self.expands_ahead else "tall" if self.tall else self.regime.name.lower()

    @property
    def few(self) -> bool:
        """Whether a tile has few rows and half of the columns."""
        return self.tile_rows < TILE_ROWS

    @property
    def tall(self) -> bool:
        """Whether a tile has twice the rows and half of the columns: for weights that are expanded in the stages."""
        return self.tile_rows > TILE_ROWS

    def blocks_of_cluster(self, *, quantized: bool) -> int:
        """Blocks of a cluster; `quantized` is whether the result is gated and has block scales."""
        return self.cluster if quantized or not self.few else 1

    @property
    def halves(self) -> int:
        """Halves of a tile: each has HALF rows of the weights."""
        return 2 if self.tile_rows == TILE_ROWS else 1

    def tile_columns(self, *, gated: bool) -> int:
        """Columns of the result in a tile."""
        return self.halves * HALF // (2 if gated else 1)

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM has at a time."""
        return 2 if self.few else 1

    def threads(self, expanded: TokenFormat | None = None) -> int:
        """Of a block: warpgroups that multiply, one that loads, and those that only expand weights.

        `expanded` is the format from which the kernel expands weights. With many rows the warpgroup that loads expands,
        too.
        """
        multiply, only_expand = (1, 2) if self.few else (2, 1)
        return 128 * (multiply + 1 + (0 if expanded is None else only_expand))

    def stages(self, num_groups: int, expanded: TokenFormat | None = None) -> int:
        """Stages of the ring: as many as fit into the rest of shared memory, at most MAX_STAGES.

        `expanded` is the format from which the kernel expands weights. Where two warpgroups expand in turn, an even
        number: with `packed_stages` four if these are four, too, else two.
        """
        if expanded is not None and self.few:
            four = self._ring_bytes(num_groups, expanded) >= 4 * (self._stage_bytes + self._packed_bytes(expanded))
            return 4 if four else 2
        most = MAX_FEW_STAGES if self.few else MAX_STAGES
        number = min(self._ring_bytes(num_groups, expanded) // self._stage_bytes, most)
        return number // 2 * 2 if self.tall else number

    def packed_stages(self, num_groups: int, expanded: TokenFormat | None) -> int:
        """Stages of the ring of packed weights; 0 where threads load those into registers, and without expansion.

        With few rows weights stream from memory through such a ring. With many, registers save shared memory, whose
        bandwidth bounds it.
        """
        if expanded is None or not self.few:
            return 0
        room = self._ring_bytes(num_groups, expanded) - self.stages(num_groups, expanded) * self._stage_bytes
        return min(room // self._packed_bytes(expanded) // 2 * 2, MAX_PACKED_STAGES)

    def shared_bytes(self, num_groups: int, expanded: TokenFormat | None = None) -> int:
        """Dynamic shared memory of a block."""
        ring = self.stages(num_groups, expanded) * self._stage_bytes
        if expanded is not None:
            ring += self.packed_stages(num_groups, expanded) * self._packed_bytes(expanded)
        return ring + self._bytes_without_ring(num_groups, expanded)

    def _ring_bytes(self, num_groups: int, expanded: TokenFormat | None) -> int:
        """Room for both rings."""
        bytes_of_block = SM_SHARED_BYTES // self.blocks_per_sm - BLOCK_RESERVED_BYTES
        return bytes_of_block - self._bytes_without_ring(num_groups, expanded)

    def _packed_bytes(self, fmt: TokenFormat) -> int:
        """Packed weights of a stage, and two barriers."""
        rows = self.halves * HALF
        return rows * (fmt.quant_bytes(128) + fmt.scale_columns(128)) + 16

    @property
    def _stage_bytes(self) -> int:
        """128 bytes of K of each row of a tile."""
        return (self.tile_rows + self.halves * HALF) * 128

    def _bytes_without_ring(self, num_groups: int, expanded: TokenFormat | None) -> int:
        """Staging, scales and barriers of the stages, announced tiles, a barrier that tells of the kernel before, the
        table of groups, indices of a tile's gathered rows, maxima of two tiles, the table that expands weights."""
        staging = self.tile_rows * FEW_STAGING_BYTES if self.few else 8 * STAGING_BYTES
        of_stage = TALL_SCALE_BYTES if self.tall else SCALE_BYTES
        scales = MAX_FEW_STAGES * (4 * (self.tile_rows + 8) + 16) if self.few else MAX_STAGES * (of_stage + 16)
        warps = 4 if self.few else 8
        maxima = 0 if self.tile_rows == TILE_ROWS else 2 * (8 * warps + 4 * self.tile_rows)
        numbers = 0 if self.few else 4 * self.tile_rows
        turn = 16 if self.few else 0
        table = 0 if expanded is None else EXPANSION_TABLE_BYTES
        return staging + scales + TILES_AHEAD * (8 + 16) + turn + 16 * (num_groups + 1) + numbers + maxima + table


TMA_FEW = TmaShape(Regime.FEW, cluster=2, box_rows=8, band=1, tile_rows=8)
TMA_SOME = TmaShape(Regime.SOME, cluster=2, box_rows=16, band=1, tile_rows=16)
TMA_DOZEN = TmaShape(Regime.DOZEN, cluster=2, box_rows=16, band=1, tile_rows=32)
TMA_DECODE = TmaShape(Regime.DECODE, cluster=1, box_rows=16, band=1)
# 66 clusters run at a time. 8 column tiles by 8 pairs of row tiles read least: as many rows as weights.
TMA_PREFILL = TmaShape(Regime.PREFILL, cluster=2, box_rows=TILE_ROWS, band=8)
TMA_AHEAD = replace(TMA_PREFILL, expands_ahead=True)
"""For so many rows that it pays to expand weights in memory. Without weights to expand it is TMA_PREFILL."""
TMA_TALL = replace(TMA_PREFILL, tile_rows=2 * TILE_ROWS)
"""For weights that are expanded in the stages, and groups of more than 128 rows: each is expanded once for 256 rows."""
TMA_SHAPES = (TMA_FEW, TMA_SOME, TMA_DOZEN, TMA_DECODE, TMA_PREFILL)
EXPANDING_SHAPES = (TMA_FEW, TMA_SOME, TMA_DOZEN, TMA_PREFILL, TMA_TALL, TMA_AHEAD)
"""For weights that are expanded. Only TMA_TALL does not gather rows."""


# --- Hopper's kernels for weights that are dequantized in registers ---


@dataclass(frozen=True, eq=False)
class DequantShape:
    """Tile and pipeline of `dequant_gemm.cu`.

    Attributes:
        regime: the number of rows that it is for.
        warpgroups: warpgroups that each dequantize and multiply 64 weight rows of a tile; one more warpgroup loads.
        stage_units: most units of 64 columns in a stage of the ring.
        batch: steps of 16 columns that are dequantized before they are multiplied.
        buffers: batches that are held dequantized. When all are full, a warpgroup waits for the tensor cores, and other
            warpgroups go on.
        other_buffers: the same where more do not fit into registers (`held_batches`).
        rolling: wait only for the oldest buffer, so that one is always dequantized while another is multiplied;
            otherwise wait for all.
        max_blocks: tokens of a tile / 8.
        blocks_per_sm: blocks of a launch that an SM has at a time.
        blocks_of_all: blocks for which an SM has room, with those of other launches. Where they are more, the next
            launch loads its first weights early.
        static_bytes: shared memory that is left for the rest of a team; its ring has all else.
        cases: smaller numbers of token blocks that have specialized code.
        teams: teams of a block that each take tiles of their own, with a ring of their own.
        first_bytes: least dynamic shared memory of the first of two GEMMs: with what a block has besides, more than
            half of an SM's, so that an SM takes one of its blocks. 0 for other shapes.
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
    blocks_per_sm: int = 1
    blocks_of_all: int = 1
    static_bytes: int = 20 * 1024
    teams: int = 1
    first_bytes: int = 0

    @property
    def threads(self) -> int:
        """Of a block. One warp of a warpgroup finds tiles and one loads; with `own_tokens` there is one for both."""
        return self.teams * (128 * self.warpgroups + (32 if self.own_tokens else 128))

    def held_batches(self, w_format: TokenFormat, a_format: TokenFormat, *, gated: bool) -> int:
        """Batches that are held dequantized; with one more, ptxas has too few registers and serializes `wgmma`."""
        fits = a_format is NVFP4 or (w_format is MXFP4 and gated)
        return self.buffers if fits else self.other_buffers

    @property
    def own_tokens(self) -> bool:
        """Whether each block holds the tokens of its tiles by rows, and dequantizes them if nothing before it did."""
        return self.regime is Regime.FEW

    def ring(self, w_format: TokenFormat, units: int) -> tuple[int, int, int]:
        """Number of stages, units of K in each, and bytes of all, for a weight `units` wide.

        There are at least two stages, so that one is loaded while another is multiplied. With `own_tokens` stages have
        no tokens, which lie behind them (`own_bytes`).
        """
        unit_stage = self.warpgroups * unit_bytes(w_format) + (0 if self.own_tokens else self.max_blocks * 1024)
        ring_bytes = MAX_SHARED_BYTES // self.blocks_of_all // self.teams - self.static_bytes
        if self.own_tokens:
            ring_bytes -= own_bytes(units)
        size = stage_units(units, min(self.stage_units, ring_bytes // (2 * unit_stage)))
        stages = min(ring_bytes // (size * unit_stage), MAX_DEQUANT_STAGES)
        return stages, size, stages * size * unit_stage


def own_bytes(units: int) -> int:
    """Shared memory for the tokens that a block of DEQUANT_FEW holds by rows, for a weight `units` wide.

    All of one token, or a stage of at most three units of 8, with 16 bytes behind each.
    """
    return max(units * 128 + 16, 8 * (3 * 128 + 16))


MAX_DEQUANT_STAGES = 6
"""The kernels hold a tile until the stages of later tiles are needed, and have room for few of them."""

DEQUANT_FEW = DequantShape(
    Regime.FEW,
    warpgroups=1,
    stage_units=3,
    batch=4,
    buffers=1,
    other_buffers=1,
    rolling=False,
    max_blocks=1,
    cases=(),
    blocks_per_sm=3,
    blocks_of_all=6,
    static_bytes=5 * 1024,  # with what the driver reserves
)
"""For a few rows in all, by `dequant_few.cu`. Blocks are so small that both GEMMs of a layer fit on an SM."""
DEQUANT_FEW_MORE = replace(DEQUANT_FEW, blocks_per_sm=4, blocks_of_all=7)
"""For where that gives each tile a block of its own. There is room for its blocks beside those of DEQUANT_FEW."""
DEQUANT_FEW_EVEN = replace(DEQUANT_FEW, blocks_per_sm=1, blocks_of_all=2, teams=3, first_bytes=112 * 1024)
"""For more tiles than there are blocks: each SM has one block of either GEMM, and so as many tiles as the others."""
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
"""For when most groups have more tokens than a tile of DEQUANT_PREFILL, and few have more than a tile of this shape."""


MAX_TOKEN_WARPS = 32
TOKEN_STEPS = 8
"""Steps of a warp for 8 tokens in overlapped dequantization: enough that the fixed work per 8 tokens costs little."""


@dataclass(frozen=True)
class TokenShape:
    """Launch shape of `dequant_tokens.cu`.

    Attributes:
        warps: warps of a block.
        max_groups: most groups for which there is shared memory.
        min_blocks: blocks that must fit on an SM, which limits registers; 0 leaves registers to the compiler.
        blocks_per_sm: most blocks launched per SM.
        team: warps that share 8 tokens; None for all of a block.
        overlapped: whether it runs while the GEMM that reads the tokens runs; the copy engine then stores from
            shared memory.
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
        """Pieces of a row that a thread loads before it dequantizes the first; few fit into 32 registers."""
        return 4 if self.min_blocks == 0 else 2 if fmt is NVFP4 else 1


MANY_TOKENS = TokenShape(warps=8, max_groups=MAX_PREPACKED_EXPERTS, min_blocks=0, blocks_per_sm=12)
"""Twice as many blocks as fit on an SM at a time, so that none ends much later than the others."""
FEW_TOKENS = TokenShape(warps=4, max_groups=64, min_blocks=16, blocks_per_sm=1)
"""For as many tokens as these warps load at once. A block has 128 threads of 32 registers, all that a block of the GEMM
leaves of an SM. The GEMM therefore starts meanwhile and loads its weights. Further loads of tokens would wait behind
those of weights."""


def overlapped_token_shape(units: int) -> TokenShape:
    """The shape that dequantizes tokens `units` wide while the GEMM runs: one block fills an SM."""
    team = min(MAX_TOKEN_WARPS, ceil_div(units, MANY_TOKENS.ahead(NVFP4) * TOKEN_STEPS))
    return TokenShape(MAX_TOKEN_WARPS // team * team, MAX_PREPACKED_EXPERTS, 0, 1, team, overlapped=True)
