"""FP4 weights that a kernel expands, rows for them, and comparisons with the FP8 GEMM of the same e4m3 weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, expanded_activation
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.shapes import EXPANDING_SHAPES, TMA_DOZEN, TMA_FEW, TMA_PREFILL, TMA_SOME, TmaShape
from moe_runtime.kernels.gemm.weights import GPT_OSS, SQUARED_RELU, Activation, ExpertWeights, GateUpOrder, SwiGLU
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import make_rows
from tests.support.gemm_checks import poisoned
from tests.support.gemm_plans import choose, tma_grouped_gemm, tma_grouped_gemm_swiglu

ACTIVATED = [
    (SwiGLU(), "fp8_block", TMA_PREFILL),
    (SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5), "fp8_block", TMA_PREFILL),
    (SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), "bf16", TMA_PREFILL),
    (SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), "fp8_block", TMA_SOME),
    (GPT_OSS, "bf16", TMA_PREFILL),
    (SQUARED_RELU, "fp8_block", TMA_PREFILL),
    (SQUARED_RELU, "bf16", TMA_FEW),
    (SwiGLU(), "fp8_block", TMA_FEW),
    (GPT_OSS, "fp8_block", TMA_FEW),
    (SQUARED_RELU, "fp8_block", TMA_FEW),
    (SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), "bf16", TMA_SOME),
    (GPT_OSS, "fp8_block", TMA_DOZEN),
]
"""Activations, formats of the result and shapes."""
GATHERING_SHAPES = tuple(shape for shape in EXPANDING_SHAPES if not shape.tall)


def ragged(k: int, rng: torch.Generator, gather: bool, device: torch.device) -> GroupedRows:
    """Empty groups, skipped and inactive ones, odd and even numbers of tiles, tails on both sides of 64 rows."""
    sizes, ids = [3, 0, 70, 5, 1, 2, 300, 4, 193, 128], [2, 0, 0, -1, 1, 3, 2, 1, 0, 1]
    a = make_rows("fp8_block", sizes, k, rng, device, num_experts=3, expert_ids=ids, gather=gather, spare=9)
    return replace(a, num_active_experts=torch.tensor([9], dtype=torch.int32, device=device))


def few(k: int, rng: torch.Generator, gather: bool, device: torch.device) -> GroupedRows:
    sizes, ids = [3, 0, 37, 1, 17, 5], [2, 0, 1, -1, 1, 0]
    return make_rows("fp8_block", sizes, k, rng, device, num_experts=3, expert_ids=ids, gather=gather, spare=2)


def rows_for(shape: TmaShape, k: int, rng: torch.Generator, gather: bool, device: torch.device) -> GroupedRows:
    return few(k, rng, gather, device) if shape.few else ragged(k, rng, gather, device)


def expanded_weights(
    name: str,
    n: int,
    k: int,
    rng: torch.Generator,
    device: torch.device,
    order: GateUpOrder | None = None,
    *,
    biased: bool = False,
) -> ExpandedWeights:
    """Of three experts, with gate and up of different sizes."""
    w = torch.randn(3, n, k, generator=rng) * torch.tensor([0.2, 1.0, 30.0])[:, None, None]
    if order is not None:
        w[:, order.up_rows(n)] *= 3
    bias = torch.randn(3, n, generator=rng) if biased else None
    raw = ExpertWeights.quantize(w, name, gate_up=order or False, bias=bias, engine="torch")
    return ExpandedWeights.prepack(raw.to(device), engine="torch")


def of_all_sizes(k: int, rng: torch.Generator, device: torch.device, *, spare: int = 9) -> GroupedRows:
    """Groups that end before, at or past each 64 rows of a tile of TMA_TALL; empty, skipped and inactive ones."""
    sizes = [1, 0, 255, 65, 128, 300, 64, 5, 192, 257, 127, 193, 129, 3]
    ids = [2, 0, 0, 1, 2, 0, 2, -1, 1, 0, 2, 0, 3, 0]
    a = make_rows("fp8_block", sizes, k, rng, device, num_experts=3, expert_ids=ids, spare=spare)
    return replace(a, num_active_experts=torch.tensor([len(sizes) - 1], dtype=torch.int32, device=device))


def fp8_shape(shape: TmaShape) -> TmaShape:
    """The shape of the FP8 GEMM with which another of expanded weights is compared."""
    return TMA_PREFILL if shape.tall else shape


def in_shape(monkeypatch: pytest.MonkeyPatch, shape: TmaShape) -> None:
    choose(monkeypatch, choose_tma_shape=lambda *_, **__: shape)


def compare_plain(
    a: GroupedRows,
    w: ExpandedWeights,
    shape: TmaShape,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_sms: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same bits as the FP8 GEMM's, in all of the result."""
    in_shape(monkeypatch, shape)
    got, want = (poisoned(a.capacity + 2, w.num_rows, dtype, w.device) for _ in range(2))
    tma_grouped_gemm(a, w.expand(), out=want, shape=fp8_shape(shape), num_sms=num_sms)
    tma_grouped_gemm(a, w, out=got, num_sms=num_sms)
    assert_same_bits(got, want, shape.regime.name)
    return got


def compare_swiglu(
    a: GroupedRows,
    w: ExpandedWeights,
    activation: Activation,
    out_format: str,
    shape: TmaShape,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits as the FP8 GEMM's with gate above up."""
    in_shape(monkeypatch, shape)
    formula, fp8 = expanded_activation(activation), fp8_shape(shape)
    want = tma_grouped_gemm_swiglu(a, w.expand(), formula, out_format=out_format, shape=fp8)
    got = tma_grouped_gemm_swiglu(a, w, activation, out_format=out_format)
    offsets, ids = a.group_offsets.tolist(), a.expert_ids.tolist()
    active = a.num_groups if a.num_active_experts is None else int(a.num_active_experts)
    for g in range(active):
        if 0 <= ids[g] < w.num_experts:
            span = slice(offsets[g], offsets[g + 1])
            assert_same_bits(got.rows[span], want.rows[span], f"{shape.regime.name} group {g}")
            if got.scales is not None:
                assert want.scales is not None
                assert_same_bits(got.scales[span], want.scales[span], f"{shape.regime.name} scales of group {g}")
