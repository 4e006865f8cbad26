"""Grouped GEMM of Hopper for weights that are decoded to bf16 in registers (`nvfp4`, `mxfp8`): host side.

`decode_tokens` gathers the rows once and decodes them to bf16; `decoded_gemm` streams the weights, which it reads once
for up to 64, 128 or 160 tokens of a group, according to its shape. Gated results for another product with prepared
weights are requantized and stored as `decode_tokens` would decode them, and that product starts beside the first unless
it is to leave SMs free. See the `.cu` files for the way of the data and `decoded_layout.py` for the order of the
weights. The Triton kernel of `grouped_gemm.py` is their sibling for other architectures.

The order in which K is summed is that of `wgmma` over 16 columns at a time, in the order of `decoded_layout`: the same
in all shapes, for every number of rows and whatever the neighbours.

The two numbers, NVFP4, both products of the reference model (32 experts of 44.0 M parameters): 0.79 GB, 184 us at
4.3 TB/s; at 32 x 1024 rows 2.89e12 flops, 3.73 ms at 773 TFLOP/s. A decode step is bound by instructions beside that:
4.3 TB/s are 33 weights a cycle and SM, and the four schedulers issue 128 lanes; 2.15 instructions a weight are needed
here (275 for the 128 of a thread in a stage of DECODE; 317 before the words were decoded by twos), and while `wgmma`
takes its operands from registers the other warps issue less: beside products of 32 tokens a `lop3` takes 3.2 cycles
instead of 2 (16 tokens: 2.9).

Measured on one H200 (launch/results/gemm_h200.json), us; in parentheses torch's grouped_mm in bf16:

    8 x 16, 32, 48 rows, (4096, 7168)                 38.7, 42.1, 47.8 (164, 170, 173)
    8 x 16, 32, 48 rows, (7168, 2048)                 25.0, 26.8, 29.4 (89, 93, 88)
    32 x 1, 4, 16, 32 rows, both, SwiGLU between      201, 202, 213, 240 (1010, 963, 912, 960)
    32 groups as 128 tokens a rank give, the same     253 (936)
    32 x 1024 rows, both, SwiGLU between              3700 (3867, without SwiGLU); without rests 4145 (4397)
    MXFP8 8 x 4096, (4096, 7168) / (7168, 2048)       2770 / 1366 (2521 / 1280); without rests 3062 / 1513 (2888 / 1482)

Another H200, on which kernels that had not changed took 1% less, gave 39.4, 42.1, 46.9, 25.1, 27.0, 29.5, 202, 203,
214, 236 and 249 for the first eleven (no file kept).

What each version brought (us; plain (4096, 7168), 32 x 16 and 32 x 32 rows; the Triton kernel took about 1450):

    1. two warpgroups of 128 rows, a wait after every 16 columns: 186, 204
    2. the next unit's quants read ahead: 170, 196. Without any arithmetic it took 139, without loads 160
    3. four warpgroups of 64 rows, stages of 256 columns: 161, 190 (of 128: 168, 198); nothing read ahead: 152, 172
    4. slots of 9 instead of 11 instructions a word, scales stored so that a shift makes them bf16, tokens 2^100 times
       their value, 64 columns for each wait, weights on their way before the tokens are decoded: 147, 167
    5. widths of 8, 24 and 40 tokens; scales of a tile copied while it is summed: 146, 164
    6. the epilogue loops over blocks of tokens: unrolled it missed the instruction cache; SwiGLU and requantization of
       32 x 1024 rows went from 2200 us to 550
    7. four warpgroups of 64 rows, 256 columns a stage for many rows too: 32 x 1024 gate and up from 3542 to 3180
    8. gated results turned through shared memory, so that a thread quantizes four columns of one token and shares one
       scale with its neighbours (before, every lane made every scale); 112 registers for those that multiply, without
       which wgmma of gated MXFP8 results was serialized: 32 x 1024 both from 4771 to 4496, MXFP8 from 5369 to 5191
    9. the encode scale clamped and inverted in the kernel instead of by two of torch's; `decode_tokens` asks for
       offsets, experts and index at once and then for four pieces of a row: 8 x 16 (7168, 2048) from 28.6 to 26.5; with
       8, 32 x 1, 16, 32 both from 226, 239, 275 to 218, 230, 260
    10. quants read ahead within a stage, for which there are now registers: 32 x 1024 both from 4474 to 4353, MXFP8
        (7168, 2048) from 1697 to 1624; few rows as before
    11. `decode_tokens` by blocks of its result instead of by rows of its input: where groups do not start at multiples
        of 8, warps had stored parts of lines, and memory made whole ones of them (ncu: 28.5 of 32 bytes of a sector,
        1.9 TB/s). Blocks stay for all rows instead of one for each 8 that might come. 32926 rows of 32 groups as they
        come, of 262144 that could: 332 + 90 us to 203 + 57 (single runs of which no file is kept)
    12. the tokens of a group cut evenly, with code for 48, 80 and 112: 137 rows had been a tile of 128 and one of 9,
        which decodes as many weights. 32 groups as 512 and 1024 tokens a rank give, old and new in turn (no file kept):
        478 + 264 to 458 + 253 and 816 + 423 to 799 + 405; MXFP8 548 + 301 to 513 + 284, 943 + 487 to 900 + 458. Few
        rows as before (184 + 98 to 187 + 99 in one run, 198 + 105 to 201 + 106 in another)

The next are both products of NVFP4, old and new in turn, in single runs of which no file is kept; 16 groups are those
of Qwen3-235B on 8 ranks:

    13. one thread of a block walks the tiles and tells the others; where rounds of tiles would leave more idle, each
        block takes one cut of the weight rows, of several tiles. 61 rows of 32 groups (8 tokens a rank) 210 to 193, 16
        groups of 16 and 32 rows 77 and 84 to 75 and 79, 8 x 48 (7168, 2048) 34.5 to 33.2; where the cuts stay as they
        were 0.5 to 1 slower. A warpgroup without rows must learn its number from one lane: while the compiler held it
        for each, with all that depends on it, everything was 13% slower
    14. gated results decoded for the second product, which starts as soon as SMs are free: of those 193 to 185, 75 and
        79 to 69 and 74, 32 x 1 and 16 rows 223 and 247 to 216 and 241, 128 tokens a rank 319 to 305 (hot), MXFP8 32 x
        16 432 to 421
    15. 16 columns for each wait where many rows come: 512 and 1024 tokens a rank 702 and 1197 to 683 and 1157, 32 x
        1024 4059 to 4003. With MXFP8 they lost (4600 to 4642)
    16. finishing results had taken 456 of 3790 (32 x 1024, products alone, with and without it): a loop that turned the
        accumulators in registers, e2m1 codes by seven comparisons each, two divisions for four numbers. Now unrolled,
        what an e4m3 scale asks for from a table, e2m1 by two multiply-adds, scales of rows read before they are wanted:
        175. 32 x 1024 4082 to 3760, Zipf 4250 to 3930, 512 and 1024 tokens a rank 687 and 1160 to 622 and 1073, 128
        275 to 262; MXFP8 32 x 1024 4639 to 4197, 512 tokens 806 to 732
    17. tiles of a last round for a third of the SMs at most are cut in pieces: 32 x 1024 3779 to 3746, Zipf 3946 to
        3909, 224 tokens a rank 375 to 345. In two pieces they lost (512 tokens 622 to 634)
    18. chosen by the rows that are expected instead of by the room for the worst case: 256 tokens a rank of 8 444 to
        386, and on fewer ranks more. By either the choice was at 64 rows of a group, now it is at 56
    19. tiles of 160 tokens by two warpgroups, for 113 to 148 expected rows of a group: 512 tokens a rank 625 to 568,
        576 748 to 637, MXFP8 733 to 653. With fewer or more rows they lose: 384 tokens 450 to 483, 640 739 to 770
    20. weights by chunks of 128 columns, so that a tile reads 18 KB at a time instead of four times 9: 32 x 1 and 16
        214 and 226 to 207 and 221, 128 tokens 266 to 263, 512 tokens 571 to 559 (timed with other chunks, of a stage)
    21. 275 instead of 317 instructions for four units: halves of a register as operands of multiplications, words
        decoded by twos, addresses of a stage added up once, and a stage given back when its products are done instead
        of in the next. 32 x 1, 16 and 32 rows 208, 221 and 247 to 202, 213 and 236, 8 x 16, 32 and 48 both 67, 73 and
        80 to 63, 67 and 75, 128 tokens a rank 262 to 249, MXFP8 32 x 32 438 to 368, 32 x 1024 4130 to 4090
    22. 32 columns for each wait where many rows come, now that decoding takes less: 32 x 1024 3687 to 3646, 256 tokens
        a rank 344 to 343; 64 columns 3636, but 348. MXFP8 has had them
    23. DECODE up to 50 rows of a group instead of 56, MXFP8 up to 24: 224 tokens a rank 333 to 321, 16 groups of 52 and
        56 rows 180 and 181 to 168 both; MXFP8 of 160, 192 and 224 tokens 383, 398 and 443 to 379, 392 and 408. NVFP4 of
        32 groups with 51 to 55 rows, of which few have more than 64, loses 2 to 4%

Dropped: `griddepcontrol.launch_dependents` at the start of the GEMM (4 us slower: what decodes the next tokens gathers
on the few SMs that are idle) and at the end of its loads (1 us faster or 2 slower); two warpgroups of 256 tokens for
many rows (6170 instead of 4474: copies of 1 and 2 KB do not keep up); 64 columns for each wait there (4677). Right
shifts of decoding by multiplies, which take another pipe: one of the two makes plain (4096, 7168) with 32 x 32 rows 190
us where it was 175, both 209. Two buffers of 32 columns there: 192, one of 32: 180; stages of 128 columns: 200. Three
warpgroups and 192 tokens, for which weights are decoded a third less often: 32 x 1024 both from 4002 to 4322, MXFP8
from 4588 to 6050. While the loop was 13% slower, as above: the last round of tiles by halves of their tokens, 4248 to
4227, but 722 to 738 with 512 tokens a rank; groups in the order of their rows, blocks taking them forth and back, no
change with 128 tokens, 1224 to 1238 with 1024; weights of the next 2, 4 and 8 stages asked for into the L2 cache while
tokens are decoded, 8 x 16 (4096, 7168) from 46.6 to 47.3, 48.4 and 50.1; tokens decoded by blocks of 512 or 1024
threads, on fewer SMs, no change (all in turn in single runs of which no file is kept). Beside versions 15 to 17, in
turn: clusters of two blocks that share the tokens of a tile by multicast, 4060 to 4035 with 128 tokens a tile, but with
256 of them 512 tokens a rank took 671 to 712; two teams in a block, each with two warpgroups, stages and tiles of its
own, so that one finishes while the other multiplies, 4034 to 4388 (two warpgroups alone do not keep the tensor cores
busy); warpgroups that begin 1000 to 2000 cycles after each other, no change; tiles of 256 tokens by two warpgroups 3697
to 3721, of 192 by three 3697 to 3877; for few rows two warpgroups instead of four, 250 to 270 and more, stages of 128
columns 249 to 265. Beside version 21, in turn: the first unit of a stage decoded while the last of the one before is
multiplied, 236 to 238 with 32 x 32 rows, MXFP8 368 to 393; stages of 128 columns 235 to 238. Beside version 23, between
its shapes: tiles of 80 and 96 tokens, waits of 32 and 64 columns, stages of 128 and 256: at most 0.7% with any of 48 to
72 rows; code for 40 tokens in PREFILL: MXFP8 with 32 rows 372 to 369, but NVFP4 with 1024 3638 to 3656.

What is left, by these measurements. Plain (4096, 7168) with 32 x 32 rows took 164 us in version 5, without products
141, without decoding 146, without either 141, without tokens 162: decoding and products each hide behind memory, and
together they do not, since they share the register file; the 18 us to the floor are filling, draining and the kernel
before. 8 groups of 16 rows take 8 and 9 us more than their floors of 31 and 16; of that, decoding the tokens before is
1 to 2 (up to 2.5 with 48 rows), the rest, it seems, the launch, filling and draining. MXFP8 with many rows is bound by
decoding (five instructions for two weights, conversions among them). NVFP4 with 32 x 1024 rows, clocks counted on the
SMs: gate and up 2317 us at 1.68 GHz, of which 91 are finishing, down 1212 at 1.70, of which 84 are, and some 200 go
into decoding the tokens before, at 3 TB/s; before version 16 it ran at 1.76. Without decoding weights and finishing the
two took 2094 and 1057 at 1.79, which is 95 and 94% of the rate of the tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from moe_runtime.formats import NVFP4, TokenFormat, ceil_div
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
        batch, mxfp8_batch: steps of 16 columns of NVFP4 and MXFP8 weights that are decoded before the tensor cores are
            waited for.
        buffers: for decoded steps; with one, decoding waits for the tensor cores and other warpgroups go on.
        max_blocks: tokens of a tile / 8.
        cases: smaller numbers of blocks that have code of their own.
    """

    warpgroups: int
    stage_units: int
    batch: int
    mxfp8_batch: int
    buffers: int
    max_blocks: int
    cases: tuple[int, ...]


DECODE = DecodedShape(4, 4, 4, 4, 1, 8, (1, 2, 3, 4, 5, 6))
PREFILL = DecodedShape(4, 4, 2, 2, 1, 16, (4, 6, 8, 10, 12, 14))
MIDDLE = DecodedShape(2, 2, 2, 2, 2, 20, (4, 8, 10, 12, 14, 16, 18))
"""Where most groups have more tokens than a tile of PREFILL takes, and few more than one of these."""

DECODE_ROWS = {"nvfp4": 50, "mxfp8": 24}
"""Rows of a group, on average, up to which a launch takes DECODE, by the format of the weights. With more of NVFP4 some
groups have more than the 64 of a tile."""
MIDDLE_ROWS = range(113, 149)
"""Rows of a group, on average, with which it takes MIDDLE: then half of the groups that random routing gives have more
than 128."""

TOKEN_BLOCKS = 12
"""Blocks of `decode_tokens` for each SM, twice as many as it takes at a time: none ends much later than the others."""


def choose_shape(rows: int, num_groups: int, weight_format: TokenFormat) -> DecodedShape:
    """The shape for `rows` that come on average; all give the same bits for any number."""
    if rows <= DECODE_ROWS[weight_format.name] * num_groups:
        return DECODE
    return MIDDLE if ceil_div(rows, num_groups) in MIDDLE_ROWS else PREFILL


@cache
def token_macros(
    fmt: TokenFormat, packed: bool = False, scale_block: int | None = None, by_row: bool = False
) -> nvrtc.Defines:
    """Macros of `decode_tokens.cu`."""
    return nvrtc.Defines(
        {
            "FMT": int(fmt.code),
            "MAX_GROUPS": MAX_GROUPS,
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
    parts = ceil_div(units, 32)
    scale_ld = packed_ld or 0
    if a.scales_by_row:
        assert a.scales is not None
        scale_ld = a.scales.stride(0)
    nvrtc.launch(
        "decode_tokens.cu",
        "decode_tokens",
        token_macros(a.format, packed_ld is not None, scale_block, a.scales_by_row),
        grid=(min(blocks, ceil_div(TOKEN_BLOCKS * nvrtc.most_sms(a.rows.device), parts)), parts, 1),
        block=256,
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
        ],
        device=a.rows.device,
        early=True,
    )
    return out


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
) -> tuple[nvrtc.Defines, int]:
    """Macros of `decoded_gemm.cu`, and the dynamic shared memory of a block.

    `units` is K in units; `out_format` is that of a gated result, None for a plain one of `out_dtype`; `out_decoded`
    leaves a gated one decoded; `row_scales`, `expert_scales` and `bias` say what there is.
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
        "BATCH": shape.batch if w_format is NVFP4 else shape.mxfp8_batch,
        "BUFFERS": shape.buffers,
        "SCALED_TOKENS": int(a_format.name == "nvfp4"),
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
    shape = choose_shape(a.likely_rows, a.num_groups, w.format)
    units = unit_columns(w.num_columns)
    out_format = None if result is None else result.format
    decoded = None if result is None else result.decoded
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
    )
    columns = w.num_rows // 2 if result is not None else w.num_rows
    tokens = decode_tokens(a, w.num_experts, packed_ld, scale_block) if a.decoded is None else a.decoded
    nvrtc.launch(
        "decoded_gemm.cu",
        "decoded_gemm",
        defines,
        grid=(nvrtc.most_sms(w.device, num_sms), 1, 1),
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
