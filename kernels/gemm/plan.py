"""The kernel choice of the grouped GEMM: one pure function from what the host knows to a frozen plan.

`plan_gemm` reads nothing but its argument, so a plan can be made, printed (`python -m moe_runtime.launch.doctor
--config NAME`) and tested without a GPU. `grouped_gemm.py` and `op_gemm.py` validate, plan and launch.

The number of rows only chooses between forms that give the same bits: a row's sum over K is in an order that depends on
the weight's size, the formats and the kernel, never on how many rows there are or on their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import triton

from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK, MXFP4, MXFP8, NVFP4, TokenFormat, ceil_div
from moe_runtime.kernels.gemm.dequant_layout import UNIT, unit_columns, unit_rows
from moe_runtime.kernels.gemm.operands import NativeForm
from moe_runtime.kernels.gemm.shapes import (
    DEQUANT_DECODE,
    DEQUANT_MIDDLE,
    DEQUANT_PREFILL,
    FEW_TOKENS,
    HALF,
    MANY_TOKENS,
    MAX_STAGES,
    TILE_ROWS,
    TMA_DECODE,
    TMA_PREFILL,
    DequantShape,
    GemmTile,
    Regime,
    TmaShape,
    TokenShape,
)
from moe_runtime.kernels.runtime import Engine

MAX_PLANS = 4096
"""Plans that are kept; a layer needs two for each of its largest numbers of tokens."""


class GemmKernel(Enum):
    """What multiplies."""

    TORCH = "torch reference"
    TRITON = "triton"
    TMA = "hopper tma"
    """`tma_gemm.cu`: tensor cores read the weights as they are stored, `fp8_block` and `bf16`."""
    DEQUANT = "hopper dequant"
    """`dequant_gemm.cu`: prepacked weights, dequantized in registers, `nvfp4` and `mxfp8`."""


# --- The Triton kernel ---


def choose_tile(n: int, a_format: TokenFormat, *, out_block: int = 0, native: NativeForm = NativeForm.NONE) -> GemmTile:
    """The tile for `n` output columns; `out_block` is the scale block of the result where it is gated, else 0.

    It depends on sizes and formats that are fixed for a layer, never on the number of rows: with it goes the order of
    sums. Shared memory stays under the 99 KiB of sm_120. Block-scaled MMA on sm_100 wants 128 rows.
    """
    block_n = min(128, max(triton.next_power_of_2(n), 32, out_block))
    block_k = 64 if a_format.element_bits == 16 else 128
    gated = out_block > 0
    block_m = 128 if native is NativeForm.AS_STORED else 64
    num_warps = 8 if block_n == 128 and (gated or native) else 4
    return GemmTile(block_m, block_n, block_k, num_warps, num_stages=2 if gated else 3)


def choose_op_tile(n: int, fmt: TokenFormat, max_tile_n: int, native: bool = False) -> GemmTile:
    """The tile of a layer's GEMM, not wider than `max_tile_n`. The order of sums along K does not depend on it.

    Block-scaled MMA on sm_100 wants 128 rows; two stages of MXFP8 keep to the 99 KiB of sm_120.
    """
    tile = choose_tile(n, fmt)
    tile = replace(tile, block_n=min(tile.block_n, max_tile_n))
    return replace(tile, block_m=128, num_stages=2) if native else tile


def native_form(a: TokenFormat, w: TokenFormat, capability: tuple[int, int] | None) -> NativeForm:
    """How block-scaled MMA multiplies a layer's rows in `a` with weights in `w`.

    `mxfp8` rows and `mxfp4` weights are taken as they are stored on sm_100; for sm_120 Triton 3.6 would take a product
    of e4m3 and e2m1 apart into bf16 MMA. Other formats, and those on other GPUs, are dequantized.
    """
    if capability is None or (a, w) != (MXFP8, MXFP4):
        return NativeForm.NONE
    forms = {10: NativeForm.AS_STORED, 12: NativeForm.WIDENED}
    return forms.get(capability[0], NativeForm.NONE)


def has_native_mma(fmt: TokenFormat, capability: tuple[int, int] | None) -> bool:
    """Whether block-scaled MMA multiplies an operation's `fmt`: NVFP4 and MXFP8 on GPUs from sm_100 on."""
    return capability is not None and capability[0] >= 10 and fmt in (NVFP4, MXFP8)


# --- Hopper's kernel for weights that tensor cores read as they are stored ---

MAX_TMA_GROUPS = 1024
MAX_INDEX = 2**31 - 1
TMA_DECODE_ROWS = 64
"""Rows of a group, on average, up to which a launch takes TMA_DECODE."""


@dataclass(frozen=True)
class TmaPlan:
    """A launch of `tma_gemm.cu`; `copies_scales`: TMA brings the scales, those of MAX_STAGES stages at once."""

    shape: TmaShape
    copies_scales: bool


def choose_tma_shape(rows: int, num_groups: int) -> TmaShape:
    """The shape for `rows` that come on average; both give the same bits for any number."""
    return TMA_DECODE if rows <= TMA_DECODE_ROWS * num_groups else TMA_PREFILL


# --- Hopper's kernels for weights that are dequantized in registers ---


DEQUANT_DECODE_ROWS = 50
"""Rows of a group, on average, up to which a launch takes DEQUANT_DECODE. With more, some groups have more than the 64
of a tile."""
DEQUANT_MIDDLE_ROWS = range(113, 149)
"""Rows of a group, on average, with which it takes DEQUANT_MIDDLE: then half of the groups that random routing gives
have more than 128."""
KEPT_BYTES = 16 * 2**20
"""Dequantized tokens, on average, up to which L2 is asked to keep them and to give up weights first: a part of L2 that
others can spare. NVFP4 alone gained by it."""
OVERLAP_COLUMNS = 136
"""Columns of a product that take an SM as long as one dequantizes the same tokens meanwhile, where memory has little
else to do: measured with 7168 and 2048 columns of K, of both formats."""
MAX_OVERLAP_SMS = 16
ROUNDS_BEFORE = 2
"""Rounds of tiles whose tokens are dequantized before the GEMM begins, so that the overlapped ones stay ahead of it."""


@dataclass(frozen=True)
class DequantOverlap:
    """How most tokens are dequantized while the product that takes them multiplies.

    Attributes:
        first: blocks of 8 tokens that all SMs dequantize before it.
        sms: that dequantize the others; then they help with the product.
    """

    first: int
    sms: int


@dataclass(frozen=True)
class DequantPlan:
    """A launch of `dequant_gemm.cu` and, before it, of `dequant_tokens.cu`.

    Attributes:
        shape: tile and pipeline.
        keep_tokens: whether L2 is asked to keep the tokens.
        tokens: how they are dequantized before; None where they come dequantized.
        overlap: how the rest of them is dequantized meanwhile; None for none.
        starts_early: whether it may start before the kernel before it has ended.
    """

    shape: DequantShape
    keep_tokens: bool
    tokens: TokenShape | None
    overlap: DequantOverlap | None
    starts_early: bool


def choose_dequant_shape(rows: int, num_groups: int) -> DequantShape:
    """The shape for `rows` that come on average; all give the same bits for any number."""
    if rows <= DEQUANT_DECODE_ROWS * num_groups or num_groups == 0:
        return DEQUANT_DECODE
    return DEQUANT_MIDDLE if ceil_div(rows, num_groups) in DEQUANT_MIDDLE_ROWS else DEQUANT_PREFILL


def keeps_tokens(rows: int, k: int, weight_format: TokenFormat, shape: DequantShape) -> bool:
    """Whether L2 is to keep `rows` that come on average, of `k` numbers: where a launch reads each weight once."""
    return weight_format is NVFP4 and shape is DEQUANT_DECODE and 2 * rows * k <= KEPT_BYTES


def choose_token_shape(rows: int, num_groups: int, units: int, fmt: TokenFormat, sms: int) -> TokenShape:
    """The shape for `rows` that come on average, `units` wide; both give the same bits for any number."""
    blocks = (rows + 7 * num_groups) // 8
    few = blocks * units <= sms * FEW_TOKENS.warps * FEW_TOKENS.ahead(fmt)
    return FEW_TOKENS if few and num_groups <= FEW_TOKENS.max_groups else MANY_TOKENS


def plan_dequant_overlap(
    rows: int, n: int, token_format: TokenFormat, shape: DequantShape, sms: int
) -> DequantOverlap | None:
    """For `rows` that come on average and weights of `n` rows; None dequantizes all before, with the same bits.

    In DEQUANT_MIDDLE, where the last tiles take a larger part of the time, MXFP8 lost by it. BF16 tokens, which are
    only put in order, were not timed so.
    """
    if shape is DEQUANT_DECODE or token_format is BF16 or (shape is DEQUANT_MIDDLE and token_format is not NVFP4):
        return None
    n_tiles = ceil_div(unit_rows(n), shape.warpgroups)
    first = ROUNDS_BEFORE * ceil_div(sms, n_tiles) * shape.max_blocks
    overlap_sms = ceil_div(sms * OVERLAP_COLUMNS, n + OVERLAP_COLUMNS)
    # At least half of the rows are left for these.
    return None if rows < 2 * 8 * first or overlap_sms > MAX_OVERLAP_SMS else DequantOverlap(first, overlap_sms)


# --- The choice ---


class GemmProblem(NamedTuple):
    """What the host knows of one grouped GEMM: `rows` of `k` numbers in groups, times `[experts, n, k]`.

    Attributes:
        engine: a resolved one.
        capability: of the GPU; None on a CPU.
        sms: of the GPU; 0 where no kernel of Hopper may be taken.
        weight_format, token_format: of the operands.
        experts, n, k: of the weight; `n` counts gate and up where the product is gated.
        rows: that come on average.
        capacity: rows that there is room for.
        groups, active_groups: all, and those that may be active.
        out_format: of a gated result (SwiGLU, requantized); None for a plain product.
        prepacked: whether the weights are `PrepackedWeights`.
        gathered: whether rows are found through an index.
        scales_in_record: whether the scales lie as the rows do (`GroupedRows.scales_in_record`).
        dequantized: whether the rows come dequantized (`GroupedRows.dequantized`).
        sm_limit: most SMs that a kernel of Hopper may take; None means all.
        aligned: whether Hopper's kernel finds rows, weights and results on the boundaries that it loads and stores by.
        scales_aligned: the same of block scales that TMA would bring.
        operation: an operation of `moe_runtime.ops`, not of a layer: Blackwell's block-scaled MMA multiplies what a
            layer dequantizes to bf16, and prepacked weights that are not `aligned` are no error.
        max_tile_n: widest tile of an operation in Triton.
        rows_per_scale, e5m2: of an operation's FP8 operands.
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
    prepacked: bool = False
    gathered: bool = False
    scales_in_record: bool = False
    dequantized: bool = False
    sm_limit: int | None = None
    aligned: bool = True
    scales_aligned: bool = True
    operation: bool = False
    max_tile_n: int = 128
    rows_per_scale: int = 1
    e5m2: bool = False

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.n if self.out_format is None else self.n // 2


@dataclass(frozen=True)
class GemmPlan:
    """What multiplies, and how.

    Attributes:
        kernel: the kernel.
        regime: for how many rows its form is made.
        tile: rows, columns and K of a tile; zeros for the reference. A gated tile of Hopper has half its columns of
            gate and half of up.
        blocks: thread blocks that are launched; 0 for the reference.
        restores: whether prepacked weights are turned back into raw ones first, in each call.
        triton, native, tma, dequant: the launch of that kernel, else None.
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


@lru_cache(MAX_PLANS)
def plan_gemm(p: GemmProblem) -> GemmPlan:
    """The plan for a problem. Raises `ValueError` for rows in a form that the kernel for them does not read."""
    if p.engine == "cuda" and p.prepacked and (p.aligned or not p.operation):
        return _plan_dequant(p)
    if p.dequantized:
        raise ValueError("a.dequantized: expected None but for prepacked weights and the kernels of Hopper")
    if p.scales_in_record:
        raise ValueError("a.scales_in_record: expected False but for prepacked weights and the kernels of Hopper")
    if p.engine == "cuda" and _tma_takes(p):
        return _plan_tma(p)
    if p.engine == "torch":
        return GemmPlan(GemmKernel.TORCH, Regime.ANY, restores=p.prepacked)
    return _plan_triton(p)


def _plan_dequant(p: GemmProblem) -> GemmPlan:
    shape = choose_dequant_shape(p.rows, p.groups)
    units, sms = unit_columns(p.k), _limited(p)
    overlap = tokens = None
    if not p.dequantized:
        # Where SMs are left free, blocks that dequantize meanwhile could take those.
        if p.sm_limit is None:
            overlap = plan_dequant_overlap(p.rows, p.n, p.token_format, shape, sms)
        all_before = choose_token_shape(p.rows, p.active_groups, units, p.token_format, p.sms)
        tokens = MANY_TOKENS if overlap else all_before
    plan = DequantPlan(
        shape,
        keep_tokens=keeps_tokens(p.rows, p.k, p.weight_format, shape),
        tokens=tokens,
        overlap=overlap,
        # After a product that leaves SMs free, the one that takes its results would take those.
        starts_early=not p.dequantized or p.sm_limit is None,
    )
    _, stage, _ = shape.ring(p.weight_format, units)
    tile = 8 * shape.max_blocks, UNIT * shape.warpgroups, UNIT * stage
    return GemmPlan(GemmKernel.DEQUANT, shape.regime, tile, sms, dequant=plan)


def _tma_takes(p: GemmProblem) -> bool:
    fmt = p.token_format
    if fmt != p.weight_format or fmt not in (BF16, FP8_BLOCK) or p.e5m2 or p.rows_per_scale != 1:
        return False
    if p.out_format is not None:
        if p.out_format not in (BF16, FP8_BLOCK):
            return False
        # Blocks of 128 rows of the weight's scales must not straddle gate and up in one tile.
        if fmt == FP8_BLOCK and p.columns % HALF:
            return False
    if not 0 < p.groups <= MAX_TMA_GROUPS or p.experts == 0 or p.capacity == 0:
        return False
    # Scales are found by 32-bit numbers.
    last = max(p.capacity, p.experts * (ceil_div(p.n, HALF) + 1)) * ceil_div(p.k, HALF)
    return last <= MAX_INDEX and p.aligned


def _plan_tma(p: GemmProblem) -> GemmPlan:
    shape = choose_tma_shape(p.rows, p.groups)
    # For many rows that lie in order: of few, a copy of 128 rows' scales brings more of others' than of theirs.
    copies_scales = (
        p.token_format == FP8_BLOCK
        and shape is TMA_PREFILL
        and not p.gathered
        and shape.stages(p.groups) == MAX_STAGES
        and ceil_div(p.k, HALF) % MAX_STAGES == 0
        and p.scales_aligned
    )
    blocks = max(_limited(p) // shape.cluster, 1) * shape.cluster
    tile = TILE_ROWS, 2 * HALF, 128 * 8 // p.token_format.element_bits
    return GemmPlan(GemmKernel.TMA, shape.regime, tile, blocks, tma=TmaPlan(shape, copies_scales))


def _plan_triton(p: GemmProblem) -> GemmPlan:
    if p.operation:
        native = NativeForm.AS_STORED if has_native_mma(p.weight_format, p.capability) else NativeForm.NONE
        tile = choose_op_tile(p.columns, p.token_format, p.max_tile_n, bool(native))
    else:
        native = native_form(p.token_format, p.weight_format, p.capability)
        out_block = 0 if p.out_format is None else p.out_format.block
        tile = choose_tile(p.columns, p.token_format, out_block=out_block, native=native)
    blocks = (ceil_div(p.capacity, tile.block_m) + p.groups) * ceil_div(p.columns, tile.block_n)
    size = tile.block_m, tile.block_n, tile.block_k
    return GemmPlan(GemmKernel.TRITON, Regime.ANY, size, blocks, restores=p.prepacked, triton=tile, native=native)


def _limited(p: GemmProblem) -> int:
    return p.sms if p.sm_limit is None else min(p.sms, p.sm_limit)
