"""The grouped GEMM of `fp8_block` rows and `ExpandedWeights`, by `tma_gemm.cu` on Hopper.

The bits are those of `grouped_gemm` and `grouped_gemm_swiglu` with `ExpandedWeights.expand`, in every shape.
"""

from __future__ import annotations

from typing import cast

import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.formats.number_formats import FP8_BLOCK, TokenFormat, format_named
from moe_runtime.kernels.gemm import plan, tma_gemm
from moe_runtime.kernels.gemm.arguments import Intermediate, check_activation, check_operands, check_out
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import GemmKernel, GemmPlan, GemmProblem
from moe_runtime.kernels.gemm.weights import Activation, ExpertWeights
from moe_runtime.kernels.launch_order import LaunchOrder
from moe_runtime.kernels.runtime import capability


def plan_expanded(
    a: GroupedRows,
    w: ExpandedWeights,
    *,
    out: torch.Tensor | None = None,
    out_format: TokenFormat | None = None,
    activation: Activation | None = None,
    num_sms: int | None = None,
) -> GemmPlan:
    """The plan for checked operands; arguments as of `grouped_gemm._plan`.

    Raises `ValueError` for rows, results or sizes that the kernel does not take.
    """
    found = plan.plan_gemm(
        GemmProblem(
            "cuda",
            capability(a.rows.device),
            nvrtc.most_sms(a.rows.device),
            weight_format=w.format,
            token_format=a.format,
            experts=w.num_experts,
            n=w.num_rows,
            k=w.num_columns,
            rows=a.likely_rows,
            capacity=a.capacity,
            groups=a.num_groups,
            active_groups=a.max_active_groups,
            out_format=out_format,
            gated=activation is None or activation.gated,
            gathered=a.row_index is not None,
            sm_limit=num_sms,
            aligned=tma_gemm.aligned(a.rows, w.units, out),
            scales_aligned=tma_gemm.scales_aligned(a.scales, w.scales),
            expanded_from=w.stored_format,
        )
    )
    if found.kernel is not GemmKernel.TMA:
        raise ValueError("a: rows, results or sizes that Hopper's kernel for expanded weights does not take")
    return found


def expanded_gemm(
    a: GroupedRows,
    w: ExpandedWeights,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    num_sms: int | None = None,
) -> torch.Tensor:
    """`grouped_gemm` of `fp8_block` rows and plain expanded weights; arguments, result and errors are as there."""
    if w.gate_up is not None:
        raise ValueError(f"w.gate_up: expected None without a gate, got {w.gate_up.value}")
    check_operands(a, _as_fp8(w))
    out = check_out(a, _as_fp8(w), out, out_dtype)
    if a.capacity and a.num_groups and w.num_experts:
        tma_gemm.multiply(a, w, out, plan_expanded(a, w, out=out, num_sms=num_sms))
    return out


def expanded_gemm_swiglu(
    a: GroupedRows,
    w: ExpandedWeights,
    activation: Activation,
    *,
    out_format: str | TokenFormat = FP8_BLOCK,
    num_sms: int | None = None,
) -> GroupedRows:
    """`grouped_gemm_swiglu` of `fp8_block` rows and expanded weights; arguments, result and errors are as there.

    `out_format` is `fp8_block` or `bf16`.
    """
    check_operands(a, _as_fp8(w))
    check_activation(_as_fp8(w), activation)
    if w.gate_up is not activation.gate_up:
        raise ValueError("w.gate_up: expected expanded weights of gate and up, got plain ones")
    fmt = format_named(out_format, "out_format")
    if a.capacity == 0 or a.num_groups == 0 or w.num_experts == 0:
        return Intermediate.of(_as_fp8(w), activation, fmt, None).empty(a)
    how = plan_expanded(a, w, out_format=fmt, activation=activation, num_sms=num_sms)
    assert how.tma is not None
    order = LaunchOrder(only_rows_pending=True, weights_after_ns=how.tma.next_loads_ns)
    out = Intermediate.of(_as_fp8(w), activation, fmt, None, order=order).empty(a)
    tma_gemm.multiply_swiglu(a, w, activation, out, how)
    return out


def _as_fp8(w: ExpandedWeights) -> ExpertWeights:
    """For checks, which look at sizes and the format that is multiplied."""
    return cast(ExpertWeights, w)
