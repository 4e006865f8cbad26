"""The kernel choice of the grouped GEMM: one pure function from what the host knows to a frozen plan.

`plan_gemm` reads only its argument, so a plan can be made, printed (`python -m moe_runtime.launch.doctor --config
NAME`) and tested without a GPU. `grouped_gemm.py` and `op_gemm.py` validate, plan and launch.

The number of rows only chooses between forms that give the same bits. The order in which a row's K is summed depends on
the size of the weight, the formats and the kernel. It does not depend on the number of rows or on a row's neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import triton

from moe_runtime.kernels.formats.number_formats import (
    BF16,
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    NVFP4,
    TokenFormat,
    ceil_div,
    rounds_tokens,
)
from moe_runtime.kernels.gemm.dequant_layout import UNIT, unit_bytes, unit_columns, unit_rows
from moe_runtime.kernels.gemm.operands import NativeForm
from moe_runtime.kernels.gemm.shapes import (
    DEQUANT_DECODE,
    DEQUANT_FEW,
    DEQUANT_FEW_EVEN,
    DEQUANT_FEW_MORE,
    DEQUANT_MIDDLE,
    DEQUANT_PREFILL,
    FEW_TOKENS,
    HALF,
    MANY_TOKENS,
    MAX_STAGES,
    TMA_AHEAD,
    TMA_DECODE,
    TMA_DOZEN,
    TMA_FEW,
    TMA_PREFILL,
    TMA_SOME,
    TMA_TALL,
    DequantShape,
    GemmTile,
    Regime,
    TmaShape,
    TokenShape,
)
from moe_runtime.kernels.runtime import Engine

MAX_PLANS = 4096
"""Size of the plan cache; a layer needs two plans for each of its token buckets."""


class GemmKernel(Enum):
    """The kernel that runs a GEMM."""

    TORCH = "torch reference"
    TRITON = "triton"
    TMA = "hopper tma"
    """`tma_gemm.cu`: tensor cores read `fp8_block` and `bf16` weights as they are stored."""
    DEQUANT = "hopper dequant"
    """`dequant_gemm.cu`: prepacked `nvfp4`, `mxfp8` and `mxfp4` weights are dequantized in registers."""


# --- The Triton kernel ---


def choose_tile(
    n: int, a_format: TokenFormat, *, out_block: int = 0, gated: bool = True, native: NativeForm = NativeForm.NONE
) -> GemmTile:
    """The tile for `n` output columns; `out_block` is the scale block of an activated result, 0 for a plain GEMM.

    `a_format` is that of the rows, or bf16 for rows that are rounded to it: then sums have the order of bf16 rows. An
    activated result that is `gated` has a GEMM each for gate and up.

    The tile fixes the order of sums, so it depends on sizes and formats that are constant in a layer, never on the
    number of rows. Shared memory stays under the 99 KiB of sm_120. Block-scaled MMA on sm_100 needs 128 rows.
    """
    block_n = min(128, max(triton.next_power_of_2(n), 32, out_block))
    block_k = 64 if a_format.element_bits == 16 else 128
    gated = gated and out_block > 0
    block_m = 128 if native is NativeForm.AS_STORED else 64
    num_warps = 8 if block_n == 128 and (gated or native) else 4
    return GemmTile(block_m, block_n, block_k, num_warps, num_stages=2 if gated else 3)


def choose_op_tile(n: int, fmt: TokenFormat, max_tile_n: int, native: bool = False, gated: bool = False) -> GemmTile:
    """The tile of a layer's GEMM, at most `max_tile_n` wide. The width does not change the order of sums along K.

    Block-scaled MMA on sm_100 needs 128 rows. Two stages of MXFP8 fit into the 99 KiB of sm_120, `gated` ones with half
    of the columns, since each has a gate and an up.
    """
    tile = choose_tile(n, fmt, out_block=BF16.block if gated else 0)
    tile = replace(tile, block_n=min(tile.block_n, max_tile_n // 2 if native and gated else max_tile_n))
    return replace(tile, block_m=128, num_stages=2) if native else tile


def native_form(a: TokenFormat, w: TokenFormat, capability: tuple[int, int] | None) -> NativeForm:
    """How block-scaled MMA multiplies a layer's rows in `a` with weights in `w`.

    sm_100 multiplies `mxfp8` rows and `mxfp4` weights as they are stored. On sm_120 the weights are widened, because
    Triton 3.6 would lower an MMA of e4m3 and e2m1 to bf16 MMA. Other formats and other GPUs dequantize.
    """
    if capability is None or (a, w) != (MXFP8, MXFP4):
        return NativeForm.NONE
    forms = {10: NativeForm.AS_STORED, 12: NativeForm.WIDENED}
    return forms.get(capability[0], NativeForm.NONE)


def has_native_mma(fmt: TokenFormat, capability: tuple[int, int] | None) -> bool:
    """Whether block-scaled MMA multiplies `fmt` in an operation: NVFP4 and MXFP8 on sm_100 and later."""
    return capability is not None and capability[0] >= 10 and fmt in (NVFP4, MXFP8)


# --- Hopper's kernel for weights that tensor cores read as they are stored ---

MAX_TMA_GROUPS = 1024
MAX_INDEX = 2**31 - 1
TMA_DECODE_ROWS = 64
"""Average rows of a group up to which a launch uses TMA_DECODE."""
TMA_FEW_ROWS = 4
"""Average rows of a group up to which it uses TMA_FEW. With more, some groups have more than the 8 rows of a tile."""
TMA_SOME_ROWS = 8
"""The same for TMA_SOME, whose tiles have 16 rows."""
TMA_DOZEN_ROWS = 16
"""The same for TMA_DOZEN, whose tiles have 32 rows. It loses from 20 rows on in BF16, from 24 in FP8."""
TMA_DOZEN_GATHERED_K, TMA_DOZEN_K = 3072, 1024
"""Largest K for which TMA_DOZEN is used: of gathered rows, and of others. It gained with K of 2048 and 2880, in second
GEMMs with 768, and lost with 7168 and in second GEMMs with 2048."""


EXPANDED_SOME_ROWS, EXPANDED_DOZEN_ROWS = 12, 24
"""Average rows of a group up to which a launch that expands FP4 weights uses TMA_SOME and TMA_DOZEN. A tile that more
rows than it has make necessary expands all weights again (kernels/gemm/notes.md)."""
TALL_ROWS = 116
"""Average rows of a group from which it uses TMA_TALL. With random routing a sixth of the groups then has more than the
128 rows of a tile of TMA_PREFILL. Groups of 128 rows each took 275 us in TMA_PREFILL and 297 in TMA_TALL, groups of 128
rows on average 403 and 357."""
AHEAD_ROWS = 1000
"""Average rows of a group from which FP4 weights are expanded in memory, before the tiles that multiply them. With 1024
rows NVFP4 took as long as in TMA_TALL, and MXFP4 3% less; with 640 NVFP4 took 6% more, and MXFP4 2%."""


@dataclass(frozen=True)
class TmaPlan:
    """A launch of `tma_gemm.cu`.

    Attributes:
        shape: clusters and order of tiles.
        copies_scales: whether TMA copies the scales of MAX_STAGES stages at once.
        starts_early: whether it may start before the previous kernel has ended.
        next_loads_ns: `LaunchOrder.weights_after_ns` of a result.
    """

    shape: TmaShape
    copies_scales: bool
    starts_early: bool
    next_loads_ns: int = 0


def choose_tma_shape(rows: int, num_groups: int, k: int, *, gathered: bool, expanded: bool = False) -> TmaShape:
    """The shape for `rows` expected rows of `k` values; all shapes give the same bits for any number of rows.

    `expanded` is whether the kernel expands the weights.
    """
    if rows <= TMA_FEW_ROWS * num_groups:
        return TMA_FEW
    if expanded:
        return _shape_that_expands(rows / max(num_groups, 1), gathered=gathered)
    if rows <= TMA_SOME_ROWS * num_groups:
        return TMA_SOME
    if rows <= TMA_DOZEN_ROWS * num_groups and k <= (TMA_DOZEN_GATHERED_K if gathered else TMA_DOZEN_K):
        return TMA_DOZEN
    return TMA_DECODE if rows <= TMA_DECODE_ROWS * num_groups else TMA_PREFILL


def _shape_that_expands(rows_of_group: float, *, gathered: bool) -> TmaShape:
    """For more than TMA_FEW_ROWS."""
    if rows_of_group >= AHEAD_ROWS:
        return TMA_AHEAD
    if rows_of_group <= EXPANDED_SOME_ROWS:
        return TMA_SOME
    if rows_of_group <= EXPANDED_DOZEN_ROWS:
        return TMA_DOZEN
    # Rows that are gathered have no tiles of 256: a layer gathers so many only if it has few tokens and fewer experts.
    return TMA_TALL if rows_of_group >= TALL_ROWS and not gathered else TMA_PREFILL


# --- Hopper's kernels for weights that are dequantized in registers ---


DEQUANT_DECODE_ROWS = 50
"""Average rows of a group up to which a launch uses DEQUANT_DECODE. With more, some groups have more than the 64 rows
of a tile."""
DEQUANT_MIDDLE_ROWS = range(113, 149)
"""Average rows of a group for which a launch uses DEQUANT_MIDDLE: with random routing, half of the groups then have
more than 128 rows."""
DEQUANT_FEW_ROWS = 2
"""Average rows of a group up to which a launch uses DEQUANT_FEW, whose tiles have at most 8, if there are few tiles."""
DEQUANT_FEW_TILES = 800
"""Tiles up to which it does so, if each row has an expert of its own: two for each of the blocks on 132 SMs."""
MIN_MORE_BYTES = 16 * 1024
"""Least bytes of the ring of DEQUANT_FEW_MORE. With 9 KB, for K of 7168, one token of DeepSeek-V3 on 2 ranks took 107
us, and with DEQUANT_FEW 96. GEMMs that gained have 17 and 23 KB."""
BYTES_PER_NS, NEXT_LOADS_NS = 4200, 4000
"""Rate at which the first of two GEMMs of a few rows loads its weights on an H200, and how long before the end of
that the second begins to load."""
MIN_OWN_STAGES = 2
"""Least stages of a ring beside a token that a block holds, which takes as much room as it has columns."""
KEPT_BYTES = 32 * 2**20
"""Expected bytes of dequantized tokens up to which L2 is asked to keep them and to evict weights first: a part of L2
that others can spare. NVFP4 and MXFP4 gained by it, MXFP8 lost."""
MIN_MIDDLE_STAGES = 3
"""Stages of a ring with which DEQUANT_MIDDLE is faster than DEQUANT_PREFILL. With two, where K is an odd number of
units, 128 rows of 2880 values take 1.5 times as long."""
OVERLAP_COLUMNS = 136
"""Output columns that keep an SM busy as long as dequantizing the same tokens does, where memory has little else to do.
Measured with K of 7168 and 2048, for both formats."""
MAX_OVERLAP_SMS = 16
ROUNDS_BEFORE = 2
"""Rounds of tiles whose tokens are dequantized before the GEMM. Overlapped dequantization then stays ahead of it."""


@dataclass(frozen=True)
class DequantOverlap:
    """How most tokens are dequantized while the GEMM that reads them runs.

    Attributes:
        first: blocks of 8 tokens that all SMs dequantize before the GEMM.
        sms: SMs that dequantize the other blocks; they help with the GEMM afterwards.
    """

    first: int
    sms: int


@dataclass(frozen=True)
class DequantPlan:
    """A launch of `dequant_gemm.cu` and, before it, of `dequant_tokens.cu`.

    Attributes:
        shape: tile and pipeline.
        keep_tokens: whether L2 is asked to keep the tokens.
        tokens: how tokens are dequantized before the GEMM; None where they come dequantized, or where
            blocks hold their own (`DequantShape.own_tokens`).
        overlap: how the other tokens are dequantized while the GEMM runs; None if all are dequantized before it.
        starts_early: whether the GEMM may start before the previous kernel has ended.
        next_loads_ns: `LaunchOrder.weights_after_ns` of a result.
    """

    shape: DequantShape
    keep_tokens: bool
    tokens: TokenShape | None
    overlap: DequantOverlap | None
    starts_early: bool
    next_loads_ns: int = 0


def choose_dequant_shape(
    rows: int, num_groups: int, n: int, k: int, weight_format: TokenFormat, *, limited: bool = False
) -> DequantShape:
    """The shape for `rows` expected rows and weights `[experts, n, k]`; all give the same bits for any number of rows.

    `limited` leaves out DEQUANT_FEW, whose blocks would spread over more SMs than they need.
    """
    few = rows <= DEQUANT_FEW_ROWS * num_groups and rows * unit_rows(n) <= DEQUANT_FEW_TILES
    if few and num_groups > 0 and not limited and holds_tokens(k, weight_format, DEQUANT_FEW):
        return DEQUANT_FEW
    if rows <= DEQUANT_DECODE_ROWS * num_groups or num_groups == 0:
        return DEQUANT_DECODE
    stages, _, _ = DEQUANT_MIDDLE.ring(weight_format, unit_columns(k))
    middle = ceil_div(rows, num_groups) in DEQUANT_MIDDLE_ROWS and stages >= MIN_MIDDLE_STAGES
    return DEQUANT_MIDDLE if middle else DEQUANT_PREFILL


def holds_tokens(k: int, weight_format: TokenFormat, shape: DequantShape) -> bool:
    """Whether blocks of `shape` hold tokens of `k` values by rows: if K needs no padding and there is room for them."""
    units = unit_columns(k)
    if not shape.own_tokens or units * UNIT != k:
        return False
    stages, _, _ = shape.ring(weight_format, units)
    return stages >= MIN_OWN_STAGES


def few_shape(tiles: int, k: int, weight_format: TokenFormat, sms: int) -> DequantShape:
    """The shape for a few rows in all that make `tiles` tiles: one for each block, or as many for each SM."""
    if tiles <= DEQUANT_FEW.blocks_per_sm * sms:
        return DEQUANT_FEW
    _, _, ring_bytes = DEQUANT_FEW_MORE.ring(weight_format, unit_columns(k))
    more = ring_bytes >= MIN_MORE_BYTES and holds_tokens(k, weight_format, DEQUANT_FEW_MORE)
    if more and tiles <= DEQUANT_FEW_MORE.blocks_per_sm * sms:
        return DEQUANT_FEW_MORE
    return DEQUANT_FEW_EVEN


def next_loads_ns(weight_bytes: int) -> int:
    """How long after its start the second of two GEMMs should ask for its first weights.

    It starts when the first has its rows. The first has `weight_bytes` of weights to load from then on.
    """
    return max(0, round(weight_bytes / BYTES_PER_NS - NEXT_LOADS_NS))


def keeps_tokens(rows: int, k: int, weight_format: TokenFormat, shape: DequantShape) -> bool:
    """Whether L2 keeps the `rows` expected rows of `k` values: where a launch reads each weight once."""
    read_once = shape.regime in (Regime.FEW, Regime.DECODE)
    return weight_format in (NVFP4, MXFP4) and read_once and 2 * rows * k <= KEPT_BYTES


def choose_token_shape(rows: int, num_groups: int, units: int, fmt: TokenFormat, sms: int) -> TokenShape:
    """The shape for `rows` expected rows, `units` wide; both shapes give the same bits for any number of rows."""
    blocks = (rows + 7 * num_groups) // 8
    few = blocks * units <= sms * FEW_TOKENS.warps * FEW_TOKENS.ahead(fmt)
    return FEW_TOKENS if few and num_groups <= FEW_TOKENS.max_groups else MANY_TOKENS


def plan_dequant_overlap(
    rows: int, n: int, token_format: TokenFormat, shape: DequantShape, sms: int
) -> DequantOverlap | None:
    """The overlap for `rows` expected rows and weights of `n` rows. None dequantizes all before, with the same bits.

    In DEQUANT_MIDDLE the last tiles are a larger part of the time, and MXFP8 lost by the overlap.
    """
    if shape not in (DEQUANT_MIDDLE, DEQUANT_PREFILL) or (shape is DEQUANT_MIDDLE and token_format is not NVFP4):
        return None
    n_tiles = ceil_div(unit_rows(n), shape.warpgroups)
    first = ROUNDS_BEFORE * ceil_div(sms, n_tiles) * shape.max_blocks
    overlap_sms = ceil_div(sms * OVERLAP_COLUMNS, n + OVERLAP_COLUMNS)
    # At least half of the rows must remain for these SMs.
    return None if rows < 2 * 8 * first or overlap_sms > MAX_OVERLAP_SMS else DequantOverlap(first, overlap_sms)


# --- The choice ---


class GemmProblem(NamedTuple):
    """What the host knows of one grouped GEMM: grouped rows `[rows, k]` times weights `[experts, n, k]`.

    Attributes:
        engine: the resolved engine.
        capability: compute capability of the GPU; None on a CPU.
        sms: SMs of the GPU; 0 where no Hopper kernel may be used.
        weight_format, token_format: formats of the operands.
        experts, n, k: shape of the weight; `n` counts gate and up rows of a gated GEMM.
        rows: expected rows.
        capacity: most rows.
        groups, active_groups: all groups, and those that may be active.
        out_format: format of an activated result; None for a plain GEMM.
        gated: whether an activated result has a gate.
        tiled_blocks: whether the 128x128 blocks of weight scales start where the tiles of Hopper's kernel do: those of
            gate and up apart if a gated GEMM reads them apart.
        prepacked: whether the weights are `PrepackedWeights`.
        gathered: whether rows are found through an index.
        scales_in_record: whether scales lie with their rows in the records (`GroupedRows.scales_in_record`).
        dequantized: whether the rows come dequantized (`GroupedRows.dequantized`).
        dequantized_rows: whether they do as rows of bf16, which only DEQUANT_FEW reads.
        sm_limit: most SMs that a Hopper kernel may use; None means all.
        aligned: whether rows, weights and results have the alignment that Hopper's kernel needs.
        scales_aligned: whether block scales have the alignment that TMA needs.
        operation: True for an operation of `moe_runtime.ops`, False for a layer. In an operation, Blackwell's
            block-scaled MMA multiplies formats that a layer dequantizes to bf16, and operands of prepacked weights may
            be unaligned.
        max_tile_n: widest Triton tile of an operation.
        rows_per_scale, e5m2: of an operation's FP8 operands.
        expanded_from: the format from which the kernel expands `fp8_block` weights (`ExpandedWeights`); None where they
            are stored so.
    """

    engine: Engine
    capability: tuple[int, int] | None
    sms: int
    weight_format: TokenFormat
    token_format: TokenFormat
    experts: int
    n: int
    k: int
    rows: int
    capacity: int
    groups: int
    active_groups: int
    out_format: TokenFormat | None = None
    gated: bool = True
    tiled_blocks: bool = True
    prepacked: bool = False
    gathered: bool = False
    scales_in_record: bool = False
    dequantized: bool = False
    dequantized_rows: bool = False
    sm_limit: int | None = None
    aligned: bool = True
    scales_aligned: bool = True
    operation: bool = False
    max_tile_n: int = 128
    rows_per_scale: int = 1
    e5m2: bool = False
    expanded_from: TokenFormat | None = None

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n if self.out_format is None or not self.gated else self.n // 2


@dataclass(frozen=True)
class GemmPlan:
    """The kernel of a grouped GEMM and its launch.

    Attributes:
        kernel: the kernel.
        regime: the number of rows that its form is made for.
        tile: rows, columns and K of a tile; zeros for the reference. Half of the columns of a gated Hopper tile are
            gate, half are up.
        blocks: thread blocks of the launch; 0 for the reference.
        restores: whether every call first restores the raw weights from the prepacked weights.
        triton, native: launch of the Triton kernel, else None and `NativeForm.NONE`.
        tma, dequant: launch of that Hopper kernel, else None.
    """

    kernel: GemmKernel
    regime: Regime
    tile: tuple[int, int, int] = (0, 0, 0)
    blocks: int = 0
    restores: bool = False
    triton: GemmTile | None = None
    native: NativeForm = NativeForm.NONE
    tma: TmaPlan | None = None
    dequant: DequantPlan | None = None


def multiplied_in(plan: GemmPlan, weights: TokenFormat) -> str:
    """The numbers that a planned product with `weights` multiplies."""
    if plan.kernel is GemmKernel.TORCH:
        return "float64"
    if plan.native is not NativeForm.NONE:
        return "block-scaled numbers"
    return "e4m3" if weights == FP8_BLOCK else "bf16"


@lru_cache(MAX_PLANS)
def plan_gemm(p: GemmProblem) -> GemmPlan:
    """The plan for a problem. Raises `ValueError` for rows in a form that the chosen kernel does not read."""
    if p.engine == "cuda" and p.prepacked and (p.aligned or not p.operation):
        return _plan_dequant(p)
    if p.dequantized:
        raise ValueError("a.dequantized: expected None except for prepacked weights with Hopper's kernels")
    if p.scales_in_record:
        raise ValueError("a.scales_in_record: expected False except for prepacked weights with Hopper's kernels")
    if p.engine == "cuda" and _tma_takes(p):
        return _plan_tma(p)
    if p.engine == "torch":
        return GemmPlan(GemmKernel.TORCH, Regime.ANY, restores=p.prepacked)
    return _plan_triton(p)


def _plan_dequant(p: GemmProblem) -> GemmPlan:
    units, sms = unit_columns(p.k), _limited(p)
    limited = p.sm_limit is not None
    shape = choose_dequant_shape(p.rows, p.groups, p.n, p.k, p.weight_format, limited=limited)
    if p.dequantized:
        # As the kernel before left them.
        shape = DEQUANT_FEW if p.dequantized_rows else DEQUANT_DECODE if shape.own_tokens else shape
    tiles = p.rows * unit_rows(p.n)  # if each row has an expert of its own
    if shape is DEQUANT_FEW:
        shape = few_shape(tiles, p.k, p.weight_format, sms)
    overlap = tokens = None
    if not p.dequantized and not shape.own_tokens:
        # With an SM limit, overlapped dequantization could occupy the SMs that must stay free.
        if p.sm_limit is None:
            overlap = plan_dequant_overlap(p.rows, p.n, p.token_format, shape, sms)
        all_before = choose_token_shape(p.rows, p.active_groups, units, p.token_format, p.sms)
        tokens = MANY_TOKENS if overlap else all_before
    plan = DequantPlan(
        shape,
        keep_tokens=keeps_tokens(p.rows, p.k, p.weight_format, shape),
        tokens=tokens,
        overlap=overlap,
        # An early start would occupy the SMs that the previous GEMM leaves free.
        starts_early=not p.dequantized or p.sm_limit is None,
        next_loads_ns=next_loads_ns(tiles * units * unit_bytes(p.weight_format)) if shape.own_tokens else 0,
    )
    _, stage, _ = shape.ring(p.weight_format, units)
    tile = 8 * shape.max_blocks, UNIT * shape.warpgroups, UNIT * stage
    return GemmPlan(GemmKernel.DEQUANT, shape.regime, tile, sms * shape.blocks_per_sm, dequant=plan)


def _tma_takes(p: GemmProblem) -> bool:
    fmt = p.token_format
    if fmt != p.weight_format or fmt not in (BF16, FP8_BLOCK) or p.e5m2 or p.rows_per_scale != 1:
        return False
    if p.out_format not in (None, BF16, FP8_BLOCK) or not p.tiled_blocks:
        return False
    if not 0 < p.groups <= MAX_TMA_GROUPS or p.experts == 0 or p.capacity == 0:
        return False
    # Scale indices have 32 bits.
    last = max(p.capacity, p.experts * (ceil_div(p.n, HALF) + 1)) * ceil_div(p.k, HALF)
    return last <= MAX_INDEX and p.aligned


def _plan_tma(p: GemmProblem) -> GemmPlan:
    expanded = p.expanded_from is not None
    shape = choose_tma_shape(p.rows, p.groups, p.k, gathered=p.gathered, expanded=expanded)
    # For many rows only: with few, most of the 128 scales of a copy would belong to other groups.
    copies_scales = (
        p.token_format == FP8_BLOCK
        and shape.regime is Regime.PREFILL
        and shape.stages(p.groups, p.expanded_from) == MAX_STAGES
        and ceil_div(p.k, HALF) % MAX_STAGES == 0
        and p.scales_aligned
    )
    # With a limit, blocks that share an SM could spread over more SMs.
    blocks = _limited(p) * (shape.blocks_per_sm if p.sm_limit is None else 1)
    cluster = shape.blocks_of_cluster(quantized=p.gated and p.out_format == FP8_BLOCK)
    blocks = max(blocks // cluster, 1) * cluster
    tile = shape.tile_rows, shape.halves * HALF, 128 * 8 // p.token_format.element_bits
    # An early start gains with few rows, for which the launch is a part of the time. It was not measured with many.
    starts_early = shape.regime is not Regime.PREFILL and p.sm_limit is None
    # Where some SMs have more tiles than others, memory has room for the second GEMM before the first has loaded
    # all.
    tiles = p.rows * ceil_div(p.n, HALF)  # if each row has an expert of its own
    weight_bytes = p.rows * p.n * (p.expanded_from or p.weight_format).quant_bytes(p.k)
    later = next_loads_ns(weight_bytes) if shape.few and tiles <= p.sms else 0
    how = TmaPlan(shape, copies_scales, starts_early, later)
    return GemmPlan(GemmKernel.TMA, shape.regime, tile, blocks, tma=how)


def _plan_triton(p: GemmProblem) -> GemmPlan:
    if p.operation:
        native = NativeForm.AS_STORED if has_native_mma(p.weight_format, p.capability) else NativeForm.NONE
        tile = choose_op_tile(p.columns, p.token_format, p.max_tile_n, bool(native), p.out_format is not None)
    else:
        native = native_form(p.token_format, p.weight_format, p.capability)
        out_block = 0 if p.out_format is None else p.out_format.block
        multiplied = BF16 if rounds_tokens(p.token_format, p.weight_format) else p.token_format
        tile = choose_tile(p.columns, multiplied, out_block=out_block, gated=p.gated, native=native)
    blocks = (ceil_div(p.capacity, tile.block_m) + p.groups) * ceil_div(p.columns, tile.block_n)
    size = tile.block_m, tile.block_n, tile.block_k
    return GemmPlan(GemmKernel.TRITON, Regime.ANY, size, blocks, restores=p.prepacked, triton=tile, native=native)


def _limited(p: GemmProblem) -> int:
    return p.sms if p.sm_limit is None else min(p.sms, p.sm_limit)
