"""A limit on the SMs of Hopper's grouped GEMMs: the grid that is launched, and the same bits on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.experts import Experts
from moe_runtime.kernels.bound_kernel import BoundKernel
from moe_runtime.kernels.gemm import dequant_gemm, dequant_tokens
from moe_runtime.kernels.gemm import tma_gemm as tma
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.shapes import TMA_DECODE, TMA_DOZEN, TMA_FEW, TMA_PREFILL
from moe_runtime.kernels.gemm.weights import SwiGLU
from tests.conftest import HAS_GPU
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import make_rows, random_weights
from tests.support.gemm_plans import (
    dequant_swiglu,
    empty_intermediate,
    run_dequant_gemm,
    tma_grouped_gemm,
    tma_grouped_gemm_swiglu,
)

SIZES = [200, 0, 1, 60]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("limit", "blocks"), [(None, 132), (500, 132), (116, 116), (7, 7), (1, 1)])
def test_grids(limit: int | None, blocks: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that looks like one with an H200. Clusters of two blocks take an even number, and one at least."""
    grids: list[int] = []

    def record(kernel: BoundKernel, arguments: Any, grid: tuple[int, int, int]) -> None:
        if kernel.name != "dequant_tokens":
            grids.append(grid[0])

    monkeypatch.setattr(BoundKernel, "launch", record)
    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(tma, "_tensor_map", lambda *_: None)
    cpu = torch.device("cpu")
    w = random_weights("nvfp4", 4, 256, 256, rng, cpu)
    a = make_rows("nvfp4", SIZES, 256, rng, cpu, num_experts=4)
    plain = PrepackedWeights.prepack(w)
    run_dequant_gemm(a, plain, torch.empty(a.capacity, 256), num_sms=limit)
    gated = PrepackedWeights.prepack(random_weights("nvfp4", 4, 256, 256, rng, cpu, gate_up=True))
    out, gsf = empty_intermediate(a, gated, SwiGLU(), "nvfp4", None)
    dequant_swiglu(a, gated, SwiGLU(), out, gsf, num_sms=limit)
    assert grids == [blocks, blocks]
    w = random_weights("fp8_block", 4, 256, 256, rng, cpu)
    a = make_rows("fp8_block", SIZES, 256, rng, cpu, num_experts=4)
    for shape in (TMA_DECODE, TMA_PREFILL, TMA_FEW, TMA_DOZEN):
        tma_grouped_gemm(a, w, shape=shape, num_sms=limit)
        tma_grouped_gemm_swiglu(a, w, SwiGLU(), out_format="fp8_block", shape=shape, num_sms=limit)
    pairs = max(2, blocks // 2 * 2)
    # Without a limit, an SM has two blocks of few rows; those of a gated result with block scales come in pairs.
    few = [264, 264] if limit is None else [blocks, pairs]
    assert grids[2:] == [blocks, blocks, pairs, pairs, *few, *few]


@pytest.mark.cpu_only
def test_a_product_that_is_limited_does_not_start_beside_the_one_before(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the SMs that both are to leave free; after `dequant_tokens`, which has no limit, it does."""
    early: list[tuple[str, bool]] = []
    monkeypatch.setattr(BoundKernel, "launch", lambda kernel, *_: early.append((kernel.name, kernel.early)))
    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    cpu = torch.device("cpu")
    gate_up = PrepackedWeights.prepack(random_weights("nvfp4", 4, 256, 256, rng, cpu, gate_up=True))
    down = PrepackedWeights.prepack(random_weights("nvfp4", 4, 256, 128, rng, cpu))
    a = make_rows("nvfp4", SIZES, 256, rng, cpu, num_experts=4)
    for limit in (None, 116):
        hidden, gsf = empty_intermediate(a, gate_up, SwiGLU(), "nvfp4", None)
        shape = dequant_tokens.dequantized_shape(a, hidden.num_columns)
        hidden = replace(hidden, dequantized=dequant_tokens.empty_blocks(shape, a.rows.device))
        dequant_swiglu(a, gate_up, SwiGLU(), hidden, gsf, num_sms=limit)
        run_dequant_gemm(hidden, down, torch.empty(a.capacity, 256), num_sms=limit)
    first = [("dequant_tokens", True), ("dequant_gemm", True)]
    assert early == [*first, ("dequant_gemm", True), *first, ("dequant_gemm", False)]


@pytest.mark.parametrize("fmt", ["bf16", "fp8_block", "mxfp8", "nvfp4"])
def test_experts_give_the_same_bits_on_any_number_of_sms(fmt: str, rng: torch.Generator, device: torch.device) -> None:
    a = make_rows(fmt, SIZES, 256, rng, device, num_experts=4)
    gate_up = random_weights(fmt, 4, 512, 256, rng, device, gate_up=True)
    down = random_weights(fmt, 4, 256, 256, rng, device)
    total = sum(SIZES)
    want = Experts(gate_up, down).prepacked()(a)[:total]
    for limit in (1, 2, 3, 16, 500) if HAS_GPU else (1,):
        assert_same_bits(Experts(gate_up, down, num_sms=limit).prepacked()(a)[:total], want, f"{limit} SMs")


def test_a_limit_below_one_is_refused(rng: torch.Generator, device: torch.device) -> None:
    w = random_weights("bf16", 1, 128, 64, rng, device, gate_up=True), random_weights("bf16", 1, 64, 64, rng, device)
    with pytest.raises(ValueError, match="num_sms: expected at least 1 or None, got 0"):
        Experts(*w, num_sms=0)
    with pytest.raises(ValueError, match="num_sms: expected at least 1 or None, got '4'"):
        Experts(*w, num_sms="4")  # type: ignore[arg-type]
