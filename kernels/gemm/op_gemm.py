"""The grouped GEMM behind `moe_runtime.ops`: one problem record for all operations, on the kernels of layers.

An operation differs from a layer only in data: the layout of its scales, their block along K, and where the scales of a
group start. On Blackwell, NVFP4 and MXFP8 use block-scaled MMA instead of bf16 MMA.

`R` rows, `E` experts, `G` groups, `N`/`K` the weight of one expert, `V = ceil(K / block)`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.formats.number_formats import BF16, ScaleLayout, ceil_div
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.gemm import dequant_gemm, op_reference, plan, tma_gemm
from moe_runtime.kernels.gemm.grouped_gemm import _grouped_gemm_kernel, tile_options
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.op_problem import OpProblem, ScaledOperand
from moe_runtime.kernels.gemm.plan import GemmKernel, GemmPlan, GemmProblem
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights, has_blocks_apart
from moe_runtime.kernels.runtime import INTERPRET, capability, resolve_engine


def plan_op(p: OpProblem, out: torch.Tensor, engine: str) -> GemmPlan:
    """The plan for a problem. If it restores prepacked weights, the caller must do that."""
    device, resolved = out.device, resolve_engine(engine, out.device)
    cuda, aligned, scales_aligned = resolved == "cuda", True, True
    if cuda and isinstance(p.b, PrepackedWeights):
        aligned = dequant_gemm.fits(p.a.quants, p.format, out, p.num_groups)
    elif cuda and isinstance(p.b, ScaledOperand):
        aligned = tma_gemm.aligned(p.a.quants, p.b.quants, out)
        # Transposing allocates new memory, except for a weight with one block of rows, whose scales stay in place.
        copied = p.a.layout is ScaleLayout.MN_MAJOR
        scales_aligned = (copied or p.a.scales.data_ptr() % 16 == 0) and (
            (copied and p.num_outputs > 128) or p.b.scales.data_ptr() % 16 == 0
        )
    return plan.plan_gemm(
        GemmProblem(
            resolved,
            capability(device),
            nvrtc.most_sms(device) if cuda else 0,
            weight_format=p.format,
            token_format=p.format,
            experts=p.num_experts,
            n=p.num_outputs,
            k=p.num_columns,
            rows=p.num_rows,
            capacity=p.num_rows,
            groups=p.num_groups,
            active_groups=p.num_groups,
            prepacked=isinstance(p.b, PrepackedWeights),
            out_format=None if p.activation is None else BF16,
            # The blocks of weights in an operation run on from gate to up.
            tiled_blocks=p.activation is None or not has_blocks_apart(p.format, p.num_outputs, p.activation.order),
            aligned=aligned,
            scales_aligned=scales_aligned,
            operation=True,
            max_tile_n=p.max_tile_n,
            rows_per_scale=p.rows_per_scale,
            e5m2=p.a.quants.dtype == torch.float8_e5m2,
        )
    )


def op_gemm(problem: OpProblem, out: torch.Tensor, *, engine: str = "auto") -> None:
    """Fill `out` `[R, N]`, bf16, fp16 or fp32; with an activation `[R, N / 2]` in bf16.

    Rows that no active group with an expert owns are not written.
    """
    p, plan = problem, plan_op(problem, out, engine)
    if isinstance(p.b, PrepackedWeights):
        assert plan.kernel is GemmKernel.DEQUANT
        w = replace(p.b, expert_scales=p.expert_scales)
        dequant_gemm.multiply(_grouped_rows(p), w, plan, out=out, packed_ld=p.a.ld, scale_block=p.block)
        return
    if plan.kernel is GemmKernel.TORCH:
        op_reference.op_gemm(p, out)
        return
    if p.num_rows == 0 or p.num_groups == 0 or p.num_experts == 0:
        return
    if plan.kernel is GemmKernel.TMA:
        _tma_gemm(p, p.b, out, plan)
        return
    assert plan.triton is not None
    f = p.activation
    a, b = (raw_bits(t) if INTERPRET else t for t in (p.a.quants, p.b.quants))
    _grouped_gemm_kernel[(plan.blocks,)](
        a,
        raw_bits(p.a.scales),
        None,
        None,
        b,
        raw_bits(p.b.scales),
        p.expert_scales,
        None,
        raw_bits(out) if out.dtype == torch.bfloat16 else out,
        None,
        None,
        p.group_offsets,
        p.scale_offsets,
        None,
        p.expert_ids,
        p.num_active,
        p.num_groups,
        p.num_experts,
        p.num_rows,
        out.shape[1],
        p.num_columns,
        a.stride(0),
        out.stride(0),
        p.a.ld,
        p.b.ld,
        A_FMT=int(p.format.code),
        W_FMT=int(p.format.code),
        OUT_FMT=0,
        A_LAYOUT=int(p.a.layout),
        W_LAYOUT=int(p.b.layout),
        SCALE_BLOCK=p.block,
        ROWS_PER_SCALE=p.rows_per_scale,
        E5M2=p.a.quants.dtype == torch.float8_e5m2,
        BLOCKS_APART=False,
        ORDER=0 if f is None else f.order.code,
        SCALES_PER_EXPERT=0 if p.expert_scales is None else 1,
        ACTIVATION=None if f is None else f.constants,
        **tile_options(plan.triton, plan.native, p.num_groups, p.num_columns),
    )


def _grouped_rows(p: OpProblem, scales: torch.Tensor | None = None) -> GroupedRows:
    """The rows as a layer has them; `scales` replaces those of the problem."""
    return GroupedRows(
        format=p.format,
        rows=p.a.quants,
        scales=p.a.scales if scales is None else scales,
        row_scale=None,
        row_index=None,
        group_offsets=p.group_offsets,
        group_scale_offsets=p.scale_offsets,
        expert_ids=p.expert_ids[: p.num_groups],
        capacity=p.num_rows,
        num_columns=p.num_columns,
        num_active_experts=p.num_groups if p.num_active is None else p.num_active,
    )


def _tma_gemm(p: OpProblem, b: ScaledOperand, out: torch.Tensor, plan: GemmPlan) -> None:
    """FP8 on Hopper's kernel, with scales made K-major."""
    columns, blocks = ceil_div(p.num_columns, 128), ceil_div(p.num_outputs, 128)
    a_scales, b_scales = p.a.scales, b.scales
    if p.a.layout is ScaleLayout.MN_MAJOR:
        a_scales = a_scales.view(columns, -1)[:, _scale_columns(p)].T.contiguous()
        b_scales = b_scales.view(p.num_experts, columns, blocks).transpose(1, 2).contiguous()
    rows = _grouped_rows(p, a_scales.view(-1, columns))
    w = ExpertWeights(p.format, b.quants, b_scales.view(p.num_experts, blocks, columns))
    result = None
    if p.activation is not None:
        result = replace(rows, format=BF16, rows=out, scales=None, num_columns=out.shape[1])
    tma_gemm.multiply(rows, w, plan, out=out, activation=p.activation, result=result)


def _scale_columns(p: OpProblem) -> slice | torch.Tensor:
    """The columns of `MN_MAJOR` scales that belong to the rows, in the order of the rows."""
    if p.scale_offsets is None:
        return slice(p.num_rows)
    assert p.a.ld is not None
    row = torch.arange(p.num_rows, dtype=torch.int32, device=p.a.quants.device)
    group = torch.searchsorted(p.group_offsets[1:], row, right=True).clamp(max=p.num_groups - 1)
    # Rows that no group owns have no scales.
    return (row + (p.scale_offsets - p.group_offsets[:-1])[group]).clamp(0, p.a.ld - 1)
