"""Launches of Hopper's grouped GEMMs as the library plans them, on any machine, or with another choice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from inspect import unwrap
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_runtime.kernels.bound_kernel import OneLaunch
from moe_runtime.kernels.formats.number_formats import TokenFormat, format_named
from moe_runtime.kernels.gemm import dequant_gemm, plan, tma_gemm
from moe_runtime.kernels.gemm import grouped_gemm as gemm_module
from moe_runtime.kernels.gemm.arguments import Intermediate, check_activation, check_operands, check_out
from moe_runtime.kernels.gemm.dequant_tokens import TokenDequantizer
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, StoredWeights
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import GemmKernel, GemmPlan
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.shapes import TmaShape, TokenShape
from moe_runtime.kernels.gemm.weights import Activation, ExpertWeights


def choose(monkeypatch: pytest.MonkeyPatch, **choices: Callable[..., Any]) -> None:
    """From now on these functions of `gemm_plan` are asked instead, and no plan is kept."""
    monkeypatch.setattr(plan, "plan_gemm", unwrap(plan.plan_gemm))
    for name, choice in choices.items():
        monkeypatch.setattr(plan, name, choice)


def planned(
    a: GroupedRows,
    w: StoredWeights,
    *,
    out: torch.Tensor | None = None,
    out_format: TokenFormat | None = None,
    activation: Activation | None = None,
    num_sms: int | None = None,
    **choices: Callable[..., Any],
) -> GemmPlan:
    """The plan for engine `cuda`, on any machine; `choices` are those of `choose`."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(gemm_module, "resolve_engine", lambda *_: "cuda"))
        stack.enter_context(patch.object(plan, "plan_gemm", unwrap(plan.plan_gemm)))
        for name, choice in choices.items():
            stack.enter_context(patch.object(plan, name, choice))
        return gemm_module._plan(a, w, "cuda", num_sms, out=out, out_format=out_format, activation=activation)


def empty_intermediate(
    a: GroupedRows,
    w: StoredWeights,
    activation: Activation,
    out_format: str | TokenFormat,
    out_gsf: float | torch.Tensor | None,
    **more: Any,
) -> tuple[GroupedRows, torch.Tensor | None]:
    """`Intermediate.of(...)` for the groups of `a`: its rows and its encode scale."""
    intermediate = Intermediate.of(w, activation, out_format, out_gsf, **more)
    return intermediate.empty(a), intermediate.gsf


def dequant_tokens(a: GroupedRows, num_experts: int, shape: TokenShape) -> torch.Tensor:
    """The rows `a` dequantized at once; see `TokenDequantizer`."""
    return TokenDequantizer(a, num_experts, shape, None, kernel=OneLaunch).launch(a)[0]


def run_dequant_gemm(
    a: GroupedRows,
    w: PrepackedWeights,
    out: torch.Tensor,
    *,
    num_sms: int | None = None,
    **choices: Callable[..., Any],
) -> None:
    """`grouped_gemm` by `dequant_gemm.cu` or `dequant_few.cu`; `choices` are those of `choose`."""
    dequant_gemm.multiply(a, w, planned(a, w, out=out, num_sms=num_sms, **choices), out=out)


def dequant_swiglu(
    a: GroupedRows,
    w: PrepackedWeights,
    activation: Activation,
    out: GroupedRows,
    gsf: torch.Tensor | None,
    *,
    num_sms: int | None = None,
    **choices: Callable[..., Any],
) -> None:
    """`grouped_gemm_swiglu` by `dequant_gemm.cu` or `dequant_few.cu`; `choices` are those of `choose`."""
    plan = planned(a, w, out_format=out.format, activation=activation, num_sms=num_sms, **choices)
    dequant_gemm.multiply(a, w, plan, out=out.rows, result=out, activation=activation, gsf=gsf)


def tma_plan(
    a: GroupedRows,
    w: ExpertWeights | ExpandedWeights,
    *,
    out: torch.Tensor | None = None,
    out_format: TokenFormat | None = None,
    activation: Activation | None = None,
    shape: TmaShape | None = None,
    num_sms: int | None = None,
) -> GemmPlan:
    """The plan that takes `tma_gemm.cu`, in `shape` where that is given."""
    choices = {} if shape is None else {"choose_tma_shape": lambda *_, **__: shape}
    plan = planned(a, w, out=out, out_format=out_format, activation=activation, num_sms=num_sms, **choices)
    assert plan.kernel is GemmKernel.TMA
    return plan


def tma_grouped_gemm(
    a: GroupedRows,
    w: ExpertWeights | ExpandedWeights,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    shape: TmaShape | None = None,
    num_sms: int | None = None,
) -> torch.Tensor:
    """`grouped_gemm` by `tma_gemm.cu`, in `shape` where that is given."""
    check_operands(a, w)
    out = check_out(a, w, out, out_dtype)
    if a.capacity and a.num_groups and w.num_experts:
        tma_gemm.multiply(a, w, tma_plan(a, w, out=out, shape=shape, num_sms=num_sms), out=out)
    return out


def tma_grouped_gemm_swiglu(
    a: GroupedRows,
    w: ExpertWeights | ExpandedWeights,
    activation: Activation,
    *,
    out_format: str,
    shape: TmaShape | None = None,
    num_sms: int | None = None,
) -> GroupedRows:
    """`grouped_gemm_swiglu` by `tma_gemm.cu`, in `shape` where that is given."""
    check_operands(a, w)
    check_activation(w, activation)
    fmt = format_named(out_format)
    plan = tma_plan(a, w, out_format=fmt, activation=activation, shape=shape, num_sms=num_sms)
    out = gemm_module._intermediate(a, w, activation, fmt, None, None, plan).empty(a)
    tma_gemm.multiply(a, w, plan, out=out.rows, result=out, activation=activation)
    return out
