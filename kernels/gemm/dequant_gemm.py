"""Host side of Hopper's grouped GEMM for weights that are dequantized to bf16 in registers (`nvfp4`, `mxfp8`,
`mxfp4`).

`dequant_tokens` gathers the rows once and dequantizes them to bf16. `dequant_gemm` streams the weights and reads them
once for up to 8, 64, 128 or 160 tokens of a group, by its shape (chosen by `plan.py`). Of a few rows in all
`dequant_few` does both, and leaves results that the second GEMM reads as rows of bf16. With many tokens, a few SMs
dequantize most of them while the other SMs multiply. The GEMM waits for each 8 tokens on a counter, and fails
after half a minute. Activated results for another GEMM with prepacked weights are requantized and stored as
`dequant_tokens` would dequantize them. That GEMM starts before the first has ended, unless it must leave SMs free.

The `.cu` files describe the data flow, `dequant_tokens.py` the tokens, `dequant_layout.py` the order of the weights. On
other architectures the Triton kernel of `grouped_gemm.py` does the same.

K is summed 16 columns at a time, in the order of `dequant_layout`: by `wgmma`, or, for a few rows in all, by
`mma.sync`, which gives the same bits. The order is the same in all shapes, for any number of rows and any neighbours.

Least times of NVFP4, both GEMMs of the reference model (32 experts of 44.0 M parameters): 0.79 GB of weights take
184 us at 4.3 TB/s; at 32 x 1024 rows 2.89e12 flops take 3.73 ms at 773 TFLOP/s.

Measured on one H200 (launch/results/gemm_h200.json of commit 2dbcdbe), us; in parentheses torch's grouped_mm in bf16:

    8 x 16, 32, 48 rows, (4096, 7168)                 35.9, 40.4, 45.6 (164, 164, 162)
    8 x 16, 32, 48 rows, (7168, 2048)                 21.8, 24.4, 26.9 (89, 93, 83)
    32 x 1, 4, 16, 32 rows, both, SwiGLU between      191, 190, 203, 228 (1009, 978, 909, 948)
    32 groups at 128 tokens per rank, the same        240 (926)

Many rows, with overlapped dequantization, on a slower H200 (launch/results/gemm_h200.json); after the semicolons
without pauses between the runs:

    32 x 1024 rows, both, SwiGLU between              3613 (3889, without SwiGLU); 4189 (4486)
    MXFP8 8 x 4096, (4096, 7168) / (7168, 2048)       2448 / 1248 (2527 / 1281); 2915 / 1437 (2908 / 1502)
    BF16 8 x 4096 by `tma_gemm`, the same             2465 / 1249; 2826 / 1447

Bottlenecks, gains of each version, dropped ideas and open work: `kernels/gemm/notes.md`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.bound_kernel import Argument, BoundKernel, OneLaunch
from moe_runtime.kernels.formats.number_formats import BF16, NVFP4, TokenFormat, align
from moe_runtime.kernels.gemm.activation import limit_macros, literal, softcap_macros
from moe_runtime.kernels.gemm.dequant_layout import UNIT, chunk_units, unit_columns, unit_rows
from moe_runtime.kernels.gemm.dequant_tokens import TokenDequantizer, piece_macros, scale_stride, token_blocks
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import GemmPlan
from moe_runtime.kernels.gemm.prepacked import MAX_PREPACKED_EXPERTS, RESULT_FORMATS, PrepackedWeights
from moe_runtime.kernels.gemm.shapes import (
    DEQUANT_FEW,
    DEQUANT_FEW_MORE,
    DequantShape,
    overlapped_token_shape,
    own_bytes,
)
from moe_runtime.kernels.gemm.weights import Activation
from moe_runtime.kernels.runtime import is_hopper

MAX_UNIT_ROWS = 2**20
"""Bound on the rows of a weight / 64, below which the kernel's division is exact."""
MAX_GROUPS_BESIDE_MORE = 256
"""Groups up to which a block of DEQUANT_FEW keeps its registers few enough for blocks of DEQUANT_FEW_MORE beside it."""
OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def takes_dequantized(w: object) -> bool:
    """Whether rows for `w` may be stored dequantized: `w` is prepacked and its K needs no padding."""
    return isinstance(w, PrepackedWeights) and unit_columns(w.num_columns) * UNIT == w.num_columns


def multiply(
    a: GroupedRows,
    w: PrepackedWeights,
    plan: GemmPlan,
    *,
    out: torch.Tensor,
    result: GroupedRows | None = None,
    **how: Any,
) -> None:
    """`grouped_gemm` into `out`, or `grouped_gemm_swiglu` into `result`, whose rows are `out`, by one launch.

    `how` has other arguments of `DequantGemm`. If results are dequantized, the next launch must be the GEMM that reads
    them.
    """
    check(a, w, out, result)
    if a.capacity and a.num_groups and w.num_experts:
        DequantGemm(a, w, plan, out=out, result=result, kernel=OneLaunch, **how).launch(a, out, result)


def kernel_of(shape: DequantShape) -> str:
    """Name of the kernel for `shape`, and of its source without `.cu`."""
    return "dequant_few" if shape.own_tokens else "dequant_gemm"


@cache
def macros(
    w_format: TokenFormat,
    a_format: TokenFormat,
    shape: DequantShape,
    units: int,
    out_format: TokenFormat | None,
    out_dtype: torch.dtype,
    activation: Activation | None,
    *,
    out_dequantized: bool = False,
    out_by_rows: bool = False,
    row_scales: bool,
    expert_scales: bool = True,
    bias: bool = False,
    keep_tokens: bool = False,
    overlapped: bool = False,
    own_tokens: nvrtc.Defines | None = None,
    chained: bool = False,
    max_groups: int,
) -> tuple[nvrtc.Defines, int]:
    """Macros of the kernel for `shape` (`kernel_of`), and the dynamic shared memory of a block.

    `units` is K in units. `out_format` is the format of an activated result; None means a plain result of `out_dtype`.
    `out_dequantized` stores an activated result dequantized, with `out_by_rows` in rows of bf16. `row_scales`,
    `expert_scales` and `bias` say which exist. `keep_tokens` and `overlapped` come from the plan. `own_tokens` are the
    macros of `token_piece.cuh` where blocks hold tokens by rows, which are `chained` if the kernel before makes them.
    `max_groups` is for `dequant_few.cu` only.
    """
    stages, stage_k64, ring_bytes = shape.ring(w_format, units)
    gated = activation is not None and activation.gated
    defines: dict[str, int | str] = {
        "W_FMT": int(w_format.code),
        "OUT_FMT": 0 if out_format is None else int(out_format.code),
        "OUT_TYPE": OUT_TYPES[out_dtype] if out_format is None else 0,
        "ACTIVATED": int(activation is not None),
        "GATED": int(gated),
        "FUNCTION": 0 if activation is None else activation.function.code,
        "OUT_DEQUANTIZED": int(out_dequantized),
        "OUT_BY_ROWS": int(out_by_rows),
        "ROW_SCALES": int(row_scales),
        "EXPERT_SCALES": int(expert_scales),
        "BIAS": int(bias),
        "STAGES": stages,
        "STAGE_K64": stage_k64,
        "CHUNK": chunk_units(units),
        "SCALED_TOKENS": int(a_format is NVFP4),
        "KEEP_TOKENS": int(keep_tokens),
        "MAX_BLOCKS": shape.max_blocks,
        "ALPHA": literal(1.0 if activation is None else activation.alpha),
        "UP_OFFSET": literal(0.0 if activation is None else activation.up_offset),
    }
    if own_tokens is not None:
        held = own_bytes(units)
        defines |= {
            **own_tokens,
            "BLOCKS_PER_SM": blocks_with_registers(shape, max_groups),
            "TEAMS": shape.teams,
            "MAX_GROUPS": max_groups,
            "CHAINED": int(chained),
            "OWN_BYTES": held,
        }
        ring_bytes = shape.teams * (ring_bytes + held)
        if not chained:
            ring_bytes = max(ring_bytes, shape.first_bytes)
    else:
        defines |= {
            "WARPGROUPS": shape.warpgroups,
            "BATCH": shape.batch,
            "BUFFERS": shape.held_batches(w_format, a_format, gated=gated),
            "ROLLING": int(shape.rolling),
            "OVERLAPPED": int(overlapped),
            "CASES": " ".join(f"CASE({blocks})" for blocks in shape.cases),
            "MAX_GROUPS": MAX_PREPACKED_EXPERTS,
        }
    defines |= limit_macros(activation) | softcap_macros(activation)
    return nvrtc.Defines(defines), ring_bytes


class DequantGemm:
    """A GEMM of some size with weights that stay where they are: what does not change from launch to launch.

    Args:
        a: rows of the size, at least one, in at least one group.
        w: weights, which are kept.
        plan: for these.
        out: a result of the dtype and strides that all have; its rows start at multiples of two elements.
        activation, gsf: None for a plain GEMM. The kernel clamps `gsf`.
        result: of an activated GEMM, like those of all launches. Its rows and all scales are filled, or its
            `dequantized` if that is not None.
        packed_ld: leading dimension of the scales of `a` where they are `ScaleLayout.PACKED`; `group_scale_offsets`
            then holds the first scale row of each group.
        scale_block: block of the scales of `a`; None means that of its format.
        kernel: `OneLaunch` for a GEMM that is launched once.
    """

    def __init__(
        self,
        a: GroupedRows,
        w: PrepackedWeights,
        plan: GemmPlan,
        *,
        out: torch.Tensor,
        activation: Activation | None = None,
        gsf: torch.Tensor | None = None,
        result: GroupedRows | None = None,
        packed_ld: int | None = None,
        scale_block: int | None = None,
        kernel: type[BoundKernel | OneLaunch] = BoundKernel,
    ) -> None:
        how = plan.dequant
        assert how is not None
        shape, units = how.shape, unit_columns(w.num_columns)
        dequantized = None if result is None else result.dequantized
        self._holds_tokens, self._packed_ld = shape.own_tokens, packed_ld
        self._tokens: TokenDequantizer | None = None
        own_tokens = None
        if shape.own_tokens and a.dequantized is not None:
            own_tokens = piece_macros(BF16)
        elif shape.own_tokens:
            own_tokens = piece_macros(a.format, packed_ld is not None, scale_block, a.scales_in_record)
        elif how.tokens is not None:
            self._tokens = TokenDequantizer(
                a, w.num_experts, how.tokens, how.overlap, packed_ld, scale_block, kernel=kernel
            )
        defines, shared_bytes = macros(
            w.format,
            a.format,
            shape,
            units,
            None if result is None else result.format,
            out.dtype,
            activation,
            out_dequantized=dequantized is not None,
            out_by_rows=dequantized is not None and dequantized.ndim == 2,
            row_scales=a.row_scale is not None,
            expert_scales=w.expert_scales is not None,
            bias=w.bias is not None,
            keep_tokens=how.keep_tokens,
            overlapped=how.overlap is not None,
            own_tokens=own_tokens,
            chained=a.dequantized is not None,
            max_groups=few_groups(a.num_groups) if shape.own_tokens else MAX_PREPACKED_EXPERTS,
        )
        bound: dict[str, Argument] = {
            "weights": w.units,
            "expert_scales": w.expert_scales,
            "bias": w.bias,
            "out_gsf": gsf,
            "num_groups": a.max_active_groups,
            "num_experts": w.num_experts,
            "capacity": a.capacity,
            "columns": w.num_rows if result is None else result.num_columns,
            "units": units,
            "unit_rows": unit_rows(w.num_rows),
            "token_blocks": token_blocks(a),
            "out_stride": out.stride(0),
            "scales_per_expert": 0 if w.expert_scales is None else w.expert_scales.ndim,
            "gate_up_order": 0 if w.gate_up is None else w.gate_up.code,
            "special_values": w.has_special_values,
        }
        if not shape.own_tokens:
            overlap = how.overlap
            bound["first_overlapped"] = 0 if overlap is None else overlap.first
            bound["team"] = 0 if overlap is None else overlapped_token_shape(units).team_warps
        name = kernel_of(shape)
        self._kernel = kernel(
            f"{name}.cu",
            name,
            defines,
            grid=(plan.blocks, 1, 1),
            block=shape.threads,
            bound=bound,
            device=w.device,
            shared_bytes=shared_bytes,
            early=how.starts_early,
            all_shared=shape.blocks_of_all > shape.blocks_per_sm,
        )

    def launch(self, a: GroupedRows, out: torch.Tensor, result: GroupedRows | None = None) -> None:
        """Multiply `a` into `out`, or, of an activated GEMM, into `result`; both as those that this was made of."""
        counters, tokens = None, a.rows if a.dequantized is None else a.dequantized
        if self._tokens is not None:
            tokens, counters = self._tokens.launch(a)
        arguments: dict[str, Argument] = {
            "tokens": tokens,
            "row_scale": a.row_scale,
            "group_offsets": a.group_offsets,
            "expert_ids": a.expert_ids,
            "num_active": a.active_on_device,
            "out": out if result is None or result.dequantized is None else result.dequantized,
            "out_scales": None if result is None else result.scales,
            "out_row_scale": None if result is None else result.row_scale,
            "out_scale_offsets": None if result is None else result.group_scale_offsets,
        }
        if self._holds_tokens:
            arguments |= {
                "token_scales": a.scales,
                "row_index": a.row_index,
                "group_scale_offsets": a.group_scale_offsets,
                "token_scale_ld": scale_stride(a, self._packed_ld),
                "row_bytes": tokens.stride(0) * tokens.element_size(),
                **a.order.read_early,
            }
        else:
            arguments["counters"] = counters
        self._kernel.launch(arguments)


def blocks_with_registers(shape: DequantShape, max_groups: int) -> int:
    """Blocks of `dequant_few.cu` for which an SM has registers: blocks of DEQUANT_FEW_MORE may run beside those of
    DEQUANT_FEW. The table of more groups takes too many of them."""
    beside = DEQUANT_FEW_MORE if shape is DEQUANT_FEW and max_groups <= MAX_GROUPS_BESIDE_MORE else shape
    return beside.blocks_of_all


def few_groups(num_groups: int) -> int:
    """The groups for which `dequant_few.cu` is compiled: equally many in each lane of a warp."""
    return align(num_groups, 32)


def fits(rows: torch.Tensor, fmt: TokenFormat, out: torch.Tensor, num_groups: int) -> bool:
    """Whether `dequant_gemm` supports these operands: aligned rows and results, not too many groups."""
    return num_groups <= MAX_PREPACKED_EXPERTS and _rows_aligned(rows, fmt) and _out_aligned(out)


def _row_align(fmt: TokenFormat) -> int:
    return 8 if fmt.element_bits == 4 else 16


def _rows_aligned(rows: torch.Tensor, fmt: TokenFormat) -> bool:
    align = _row_align(fmt)
    return rows.data_ptr() % align == 0 and rows.stride(0) * rows.element_size() % align == 0


def _out_aligned(out: torch.Tensor) -> bool:
    return out.data_ptr() % (2 * out.element_size()) == 0 and out.stride(0) % 2 == 0


def check(a: GroupedRows, w: PrepackedWeights, out: torch.Tensor, result: GroupedRows | None) -> None:
    """Raise `ValueError` where these kernels need more than other engines: a Hopper GPU, aligned rows, few groups."""
    if not is_hopper(w.device):
        raise ValueError(f"w: prepacked for Hopper, got {torch.cuda.get_device_name(w.device)}; use w.restore()")
    if unit_rows(w.num_rows) >= MAX_UNIT_ROWS:
        raise ValueError(f"w: expected N < {MAX_UNIT_ROWS * UNIT}, got {w.num_rows}")
    if w.units.data_ptr() % 16:
        raise ValueError("w.units: expected 16-byte alignment")
    if a.num_groups > MAX_PREPACKED_EXPERTS:
        most = f"{MAX_PREPACKED_EXPERTS} for prepacked weights"
        raise ValueError(f"a.expert_ids: expected at most {most}, got {a.num_groups}")
    if not _rows_aligned(a.rows, a.format):
        strides = list(a.rows.stride())
        raise ValueError(f"a.rows: expected rows on {_row_align(a.format)}-byte boundaries, got strides {strides}")
    if result is not None and result.format.name not in RESULT_FORMATS:
        raise ValueError(f"out_format: expected bf16, nvfp4 or mxfp8 with prepacked weights, got {result.format.name}")
    if result is None and not _out_aligned(out):
        align = 2 * out.element_size()
        raise ValueError(f"out: expected rows on {align}-byte boundaries, got strides {list(out.stride())}")
