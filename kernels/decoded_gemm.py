"""Grouped GEMM of Hopper for weights that are decoded to bf16 in registers (`nvfp4`, `mxfp8`): host side.

`decode_tokens` gathers the rows once and decodes them to bf16; `decoded_gemm` streams the weights, which it reads once
for up to 64, 128 or 160 tokens of a group, according to its shape. Where many tokens come, a few SMs decode most of
them beside the product, which waits for each 8 by a counter (after half a minute the kernel fails). Gated results for
another product with prepared weights are requantized and stored as `decode_tokens` would decode them, and that product
starts beside the first unless it is to leave SMs free. See the `.cu` files for the way of the data and
`decoded_layout.py` for the order of the weights. The Triton kernel of `grouped_gemm.py` is their sibling for other
architectures.

The order in which K is summed is that of `wgmma` over 16 columns at a time, in the order of `decoded_layout`: the same
in all shapes, for every number of rows and whatever the neighbours.

The two numbers, NVFP4, both products of the reference model (32 experts of 44.0 M parameters): 0.79 GB, 184 us at
4.3 TB/s; at 32 x 1024 rows 2.89e12 flops, 3.73 ms at 773 TFLOP/s.

Measured on one H200 (launch/results/gemm_h200.json), us; in parentheses torch's grouped_mm in bf16:

    8 x 16, 32, 48 rows, (4096, 7168)                 35.9, 40.4, 45.6 (164, 164, 162)
    8 x 16, 32, 48 rows, (7168, 2048)                 21.8, 24.4, 26.9 (89, 93, 83)
    32 x 1, 4, 16, 32 rows, both, SwiGLU between      191, 190, 203, 228 (1009, 978, 909, 948)
    32 groups as 128 tokens a rank give, the same     240 (926)

Many rows, whose tokens are decoded beside, on a slower one (launch/results/gemm_h200_beside.json); without rests behind
the semicolons:

    32 x 1024 rows, both, SwiGLU between              3613 (3889, without SwiGLU); 4189 (4486)
    MXFP8 8 x 4096, (4096, 7168) / (7168, 2048)       2448 / 1248 (2527 / 1281); 2915 / 1437 (2908 / 1502)
    BF16 8 x 4096 by `tma_gemm`, the same             2465 / 1249; 2826 / 1447

What bounds it, what each version brought, what was dropped and what is left: `kernels/grouped_gemm_notes.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from moe_runtime.formats import MXFP8, NVFP4, TokenFormat, ceil_div
from moe_runtime.grouped import GroupedRows
from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.decoded_layout import UNIT, chunk_units, stage_units, unit_bytes, unit_columns, unit_rows
from moe_runtime.kernels.runtime import is_hopper
from moe_runtime.prepared import MAX_PREPARED_EXPERTS, RESULT_FORMATS, PreparedWeights
from moe_runtime.weights import SwiGLU

MAX_GROUPS = MAX_PREPARED_EXPERTS
MAX_UNIT_ROWS = 2**20
"""Rows of a weight / 64 that the kernel divides fast."""
SHARED_BYTES = 227 * 1024 - 20 * 1024
"""Of a block of threads, less what is static."""
OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(frozen=True)
class DecodedShape:
    """Tile and pipeline of `decoded_gemm.cu`.

    Attributes:
        warpgroups: that decode and multiply 64 weight rows of a tile each, besides the one that loads.
        stage_units: most units of 64 columns in a stage of the ring.
        batch: steps of 16 columns that are decoded before they are multiplied.
        buffers, other_buffers: for so many steps, of NVFP4 weights and tokens and of other pairs, which leave fewer
            registers. When all are full, decoding waits for the tensor cores and other warpgroups go on.
        rolling: wait for the oldest buffer alone, so that one is decoded while another is multiplied, always; otherwise
            for all.
        max_blocks: tokens of a tile / 8.
        cases: smaller numbers of blocks that have code of their own.
    """

    warpgroups: int
    stage_units: int
    batch: int
    buffers: int
    other_buffers: int
    rolling: bool
    max_blocks: int
    cases: tuple[int, ...]


DECODE = DecodedShape(
    warpgroups=4,
    stage_units=4,
    batch=4,
    buffers=2,
    other_buffers=2,
    rolling=False,
    max_blocks=8,
    cases=(1, 2, 3, 4, 5, 6),
)
PREFILL = DecodedShape(
    warpgroups=4,
    stage_units=4,
    batch=2,
    buffers=2,
    other_buffers=1,
    rolling=False,
    max_blocks=16,
    cases=(4, 6, 8, 10, 12, 14),
)
MIDDLE = DecodedShape(
    warpgroups=2,
    stage_units=2,
    batch=2,
    buffers=2,
    other_buffers=2,
    rolling=True,
    max_blocks=20,
    cases=(4, 8, 10, 12, 14, 16, 18),
)
"""Where most groups have more tokens than a tile of PREFILL takes, and few more than one of these."""

DECODE_ROWS = 50
"""Rows of a group, on average, up to which a launch takes DECODE. With more, some groups have more than the 64 of a
tile."""
KEPT_BYTES = 16 * 2**20
"""Of decoded tokens, on average, up to which L2 is asked to keep them and to give up weights first: a part of L2 that
others can spare. NVFP4 alone gained by it."""
MIDDLE_ROWS = range(113, 149)
"""Rows of a group, on average, with which it takes MIDDLE: then half of the groups that random routing gives have more
than 128."""


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
COLUMNS_OF_DECODING = 136
"""Columns of a product that take an SM as long as one decodes the same tokens beside it, where memory has little else
to do: measured with 7168 and 2048 columns of K, of both formats."""
MOST_DECODERS = 16
ROUNDS_BEFORE = 2
"""Rounds of tiles whose tokens are decoded before the GEMM begins: those that decode beside it are then ahead of it."""


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


def choose_beside(rows: int, num_rows: int, token_format: TokenFormat, shape: DecodedShape, sms: int) -> Beside | None:
    """For `rows` that come on average and weights of `num_rows`; None to decode all before, with the same bits.

    In MIDDLE, where the last tiles take a larger part of the time, MXFP8 lost by it. BF16 tokens, which are only put in
    order, were not timed so.
    """
    cuts = ceil_div(unit_rows(num_rows), shape.warpgroups)
    first = ROUNDS_BEFORE * ceil_div(sms, cuts) * shape.max_blocks
    decoders = ceil_div(sms * COLUMNS_OF_DECODING, num_rows + COLUMNS_OF_DECODING)
    shapes = {NVFP4: (MIDDLE, PREFILL), MXFP8: (PREFILL,)}.get(token_format, ())
    if shape not in shapes or rows < 2 * 8 * first or decoders > MOST_DECODERS:
        return None
    return Beside(first, decoders)


def choose_token_shape(rows: int, num_groups: int, units: int, fmt: TokenFormat, sms: int) -> TokenShape:
    """The shape for `rows` that come on average, `units` wide; both give the same bits for any number."""
    blocks = (rows + 7 * num_groups) // 8
    few = blocks * units <= sms * FEW_TOKENS.warps * FEW_TOKENS.ahead(fmt)
    return FEW_TOKENS if few and num_groups <= FEW_TOKENS.max_groups else MANY_TOKENS


def choose_shape(rows: int, num_groups: int) -> DecodedShape:
    """The shape for `rows` that come on average; all give the same bits for any number."""
    if rows <= DECODE_ROWS * num_groups:
        return DECODE
    return MIDDLE if ceil_div(rows, num_groups) in MIDDLE_ROWS else PREFILL


def keeps_tokens(rows: int, num_columns: int, weight_format: TokenFormat, shape: DecodedShape) -> bool:
    """Whether L2 is to keep `rows` that come on average, of `num_columns`: where a launch reads each weight once."""
    return weight_format is NVFP4 and shape is DECODE and 2 * rows * num_columns <= KEPT_BYTES


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


def takes_decoded(w: object) -> bool:
    """Whether the kernel that makes rows for `w` may decode them: prepared weights whose K is whole units."""
    return isinstance(w, PreparedWeights) and unit_columns(w.num_columns) * UNIT == w.num_columns


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


def decoded_gemm(
    a: GroupedRows,
    w: PreparedWeights,
    out: torch.Tensor,
    *,
    packed_ld: int | None = None,
    scale_block: int | None = None,
    num_sms: int | None = None,
) -> None:
    """`grouped_gemm` into `out`, whose rows start at multiples of two numbers.

    Scales of `a` that are `ScaleLayout.PACKED` come with their leading dimension `packed_ld` and the first scale row of
    each group in `group_scale_offsets`; `scale_block` is the block of the scales of `a`, None that of its format.
    """
    _launch(a, w, out, num_sms=num_sms, packed_ld=packed_ld, scale_block=scale_block)


def decoded_gemm_swiglu(
    a: GroupedRows,
    w: PreparedWeights,
    activation: SwiGLU,
    out: GroupedRows,
    gsf: torch.Tensor | None,
    *,
    num_sms: int | None = None,
) -> None:
    """`grouped_gemm_swiglu` into the rows and all scales of `out`, or into its `decoded` where it has that.

    `gsf` may be more than it is clamped to. After decoded results comes the product that takes them.
    """
    _launch(a, w, out.rows, activation=activation, gsf=gsf, result=out, num_sms=num_sms)


@cache
def macros(
    w_format: TokenFormat,
    a_format: TokenFormat,
    shape: DecodedShape,
    units: int,
    out_format: TokenFormat | None,
    out_dtype: torch.dtype,
    activation: SwiGLU | None,
    *,
    out_decoded: bool = False,
    row_scales: bool = True,
    expert_scales: bool = True,
    bias: bool = False,
    keep_tokens: bool = False,
    counted: bool = False,
) -> tuple[nvrtc.Defines, int]:
    """Macros of `decoded_gemm.cu`, and the dynamic shared memory of a block.

    `units` is K in units; `out_format` is that of a gated result, None for a plain one of `out_dtype`; `out_decoded`
    leaves a gated one decoded; `row_scales`, `expert_scales` and `bias` say what there is; `keep_tokens` is
    `keeps_tokens`; `counted` is for tokens that are decoded beside.
    """
    unit_stage = shape.warpgroups * unit_bytes(w_format) + shape.max_blocks * 1024
    # At least two stages, so that one is loaded while the other is multiplied.
    stage_k64 = stage_units(units, min(shape.stage_units, SHARED_BYTES // (2 * unit_stage)))
    stages = SHARED_BYTES // (stage_k64 * unit_stage)
    defines: dict[str, int | str] = {
        "W_FMT": int(w_format.code),
        "OUT_FMT": 0 if out_format is None else int(out_format.code),
        "OUT_TYPE": OUT_TYPES[out_dtype] if out_format is None else 0,
        "GATED": int(out_format is not None),
        "OUT_DECODED": int(out_decoded),
        "ROW_SCALES": int(row_scales),
        "EXPERT_SCALES": int(expert_scales),
        "BIAS": int(bias),
        "WARPGROUPS": shape.warpgroups,
        "STAGES": stages,
        "STAGE_K64": stage_k64,
        "CHUNK": chunk_units(units),
        "BATCH": shape.batch,
        "BUFFERS": shape.buffers if a_format is NVFP4 else shape.other_buffers,
        "ROLLING": int(shape.rolling),
        "SCALED_TOKENS": int(a_format.name == "nvfp4"),
        "KEEP_TOKENS": int(keep_tokens),
        "COUNTED": int(counted),
        "MAX_BLOCKS": shape.max_blocks,
        "CASES": " ".join(f"CASE({blocks})" for blocks in shape.cases),
        "MAX_GROUPS": MAX_GROUPS,
        "ALPHA": _literal(1.0 if activation is None else activation.alpha),
        "UP_OFFSET": _literal(0.0 if activation is None else activation.up_offset),
    }
    if activation is not None and activation.limit is not None:
        defines["LIMIT"] = _literal(activation.limit)
    return nvrtc.Defines(defines), stages * stage_k64 * unit_stage


def _launch(
    a: GroupedRows,
    w: PreparedWeights,
    out: torch.Tensor,
    *,
    num_sms: int | None,
    activation: SwiGLU | None = None,
    gsf: torch.Tensor | None = None,
    result: GroupedRows | None = None,
    packed_ld: int | None = None,
    scale_block: int | None = None,
) -> None:
    _check(a, w, out, result)
    if a.capacity == 0 or a.num_groups == 0 or w.num_experts == 0:
        return
    shape = choose_shape(a.likely_rows, a.num_groups)
    units = unit_columns(w.num_columns)
    out_format = None if result is None else result.format
    decoded = None if result is None else result.decoded
    sms = nvrtc.most_sms(w.device, num_sms)
    # Where SMs are left free, blocks that decode beside the GEMM could take those.
    with_others = a.decoded is None and num_sms is None
    beside = choose_beside(a.likely_rows, w.num_rows, a.format, shape, sms) if with_others else None
    defines, shared_bytes = macros(
        w.format,
        a.format,
        shape,
        units,
        out_format,
        out.dtype,
        activation,
        out_decoded=decoded is not None,
        row_scales=a.row_scale is not None,
        expert_scales=w.expert_scales is not None,
        bias=w.bias is not None,
        keep_tokens=keeps_tokens(a.likely_rows, w.num_columns, w.format, shape),
        counted=beside is not None,
    )
    columns = w.num_rows // 2 if result is not None else w.num_rows
    counters = None
    if a.decoded is not None:
        tokens = a.decoded
    elif beside is None:
        tokens = decode_tokens(a, w.num_experts, packed_ld, scale_block)
    else:
        tokens, counters = decode_beside(a, w.num_experts, beside, packed_ld, scale_block)
    nvrtc.launch(
        "decoded_gemm.cu",
        "decoded_gemm",
        defines,
        grid=(sms, 1, 1),
        block=128 * (shape.warpgroups + 1),
        arguments=[
            tokens,
            w.units,
            a.row_scale,
            w.expert_scales,
            w.bias,
            a.group_offsets,
            a.expert_ids,
            a.active_on_device,
            out if decoded is None else decoded,
            None if result is None else result.scales,
            gsf,
            None if result is None else result.row_scale,
            None if result is None else result.group_scale_offsets,
            a.max_active_groups,
            w.num_experts,
            a.capacity,
            columns,
            units,
            unit_rows(w.num_rows),
            int(tokens.shape[1]),
            nvrtc.int64(out.stride(0)),
            0 if w.expert_scales is None else w.expert_scales.ndim,
            0 if w.gate_up is None else w.gate_up.code,
            w.unusual,
            counters,
            0 if beside is None else beside.first,
            shape_beside(units).team_warps,
        ],
        device=w.device,
        shared_bytes=shared_bytes,
        # Beside a product that leaves SMs free, the one that takes its results would take those.
        early=a.decoded is None or num_sms is None,
    )


def fits(rows: torch.Tensor, fmt: TokenFormat, out: torch.Tensor, num_groups: int) -> bool:
    """Whether `decoded_gemm` takes these: rows and results aligned as it loads and stores them, not too many groups."""
    return num_groups <= MAX_GROUPS and _rows_aligned(rows, fmt) and _out_aligned(out)


def _row_align(fmt: TokenFormat) -> int:
    return 8 if fmt.element_bits == 4 else 16


def _rows_aligned(rows: torch.Tensor, fmt: TokenFormat) -> bool:
    align = _row_align(fmt)
    return rows.data_ptr() % align == 0 and rows.stride(0) * rows.element_size() % align == 0


def _out_aligned(out: torch.Tensor) -> bool:
    return out.data_ptr() % (2 * out.element_size()) == 0 and out.stride(0) % 2 == 0


def _check(a: GroupedRows, w: PreparedWeights, out: torch.Tensor, result: GroupedRows | None) -> None:
    """What these kernels ask beyond the other engines: aligned rows, a Hopper GPU."""
    if not is_hopper(w.device):
        raise ValueError(f"w: prepared for Hopper, got {torch.cuda.get_device_name(w.device)}; use w.restore()")
    if unit_rows(w.num_rows) >= MAX_UNIT_ROWS:
        raise ValueError(f"w: expected N < {MAX_UNIT_ROWS * UNIT}, got {w.num_rows}")
    if w.units.data_ptr() % 16:
        raise ValueError("w.units: expected 16-byte alignment")
    if a.num_groups > MAX_GROUPS:
        raise ValueError(f"a.expert_ids: expected at most {MAX_GROUPS} for prepared weights, got {a.num_groups}")
    if not _rows_aligned(a.rows, a.format):
        strides = list(a.rows.stride())
        raise ValueError(f"a.rows: expected rows on {_row_align(a.format)}-byte boundaries, got strides {strides}")
    if result is not None and result.format.name not in RESULT_FORMATS:
        raise ValueError(f"out_format: expected bf16, nvfp4 or mxfp8 with prepared weights, got {result.format.name}")
    if result is None and not _out_aligned(out):
        align = 2 * out.element_size()
        raise ValueError(f"out: expected rows on {align}-byte boundaries, got strides {list(out.stride())}")


def _literal(value: float) -> str:
    """A C literal of the fp32 number next to `value`."""
    number = torch.tensor(value, dtype=torch.float32, device="cpu")
    return f"{float(number).hex()}f" if number.isfinite() else f"__int_as_float({int(number.view(torch.int32))})"
