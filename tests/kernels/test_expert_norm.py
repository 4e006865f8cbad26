"""The norm after each expert, in place: against transformers, groups that are left alone, wrong arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_runtime.experts import Experts
from moe_runtime.kernels.gemm.expert_norm import ExpertNorm, expert_norm
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import GateUpOrder
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import ENGINES, make_rows, random_weights
from tests.support.gemm_checks import poisoned

engines = pytest.mark.parametrize("engine", ENGINES)


def groups(sizes: list[int], rng: torch.Generator, device: torch.device, ids: list[int] | None = None) -> GroupedRows:
    return make_rows("bf16", sizes, 16, rng, device, num_experts=3, expert_ids=ids, spare=3)


@engines
@pytest.mark.parametrize("hidden", [8, 1000, 1024, 2880])
def test_rows_are_those_of_transformers(hidden: int, engine: str, rng: torch.Generator, device: torch.device) -> None:
    """Their own module in bf16, of which the last bit may differ: rows large and small, skipped groups left alone."""
    modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    theirs = modeling.MuseSparkTextInputScaledRMSNorm(hidden, eps=1e-6).bfloat16().to(device)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(hidden, generator=rng) * 0.3)
        norm = ExpertNorm((1.0 + theirs.weight).float(), 1e-6)
    a = groups([5, 0, 9, 1, 3], rng, device, ids=[1, 0, -1, 2, 3])
    rows = poisoned(a.capacity, hidden, torch.bfloat16, device)
    rows[:18] = (torch.randn(18, hidden, generator=rng) * torch.logspace(-4, 4, 18)[:, None]).to(device)
    before = rows.clone()
    expert_norm(rows, a, 3, norm, engine=engine)
    with torch.no_grad():
        want = theirs(before)
    for owned in (slice(0, 5), slice(14, 15)):
        torch.testing.assert_close(rows[owned].float(), want[owned].float(), rtol=2**-7, atol=0)
        # The rounding of `x * scale` is the same, so that few numbers differ at all.
        assert (rows[owned] == want[owned]).float().mean() > 0.98
    for left in (slice(5, 14), slice(15, None)):
        assert_same_bits(rows[left], before[left], "rows of no expert")


@engines
def test_neighbours_and_counts_do_not_change_a_bit(engine: str, rng: torch.Generator, device: torch.device) -> None:
    hidden = 1500
    norm = ExpertNorm(torch.rand(hidden, generator=rng).to(device) + 0.5, 1e-5)
    x = torch.randn(12, hidden, generator=rng).bfloat16().to(device)
    x[3, 7], x[4, 0], x[5] = torch.nan, torch.inf, 0.0
    together, alone = x.clone(), x.clone()
    expert_norm(together, groups([2, 6, 1], rng, device), 3, norm, engine=engine)
    for row in range(9):
        one = replace(groups([1], rng, device), capacity=1)
        expert_norm(alone[row : row + 1], one, 3, norm, engine=engine)
    kept = [0, 1, 2, 5, 6, 7, 8]
    assert_same_bits(together[kept], alone[kept], "rows")
    assert together[3].isnan().all() and together[4, 0].isnan() and (together[5] == 0).all()
    assert together[kept].isfinite().all()


@engines
@pytest.mark.parametrize("active", [0, 1, 99])
def test_only_active_groups(active: int, engine: str, rng: torch.Generator, device: torch.device) -> None:
    norm = ExpertNorm(torch.ones(64, device=device), 0.0)
    for given in (active, torch.tensor([active], dtype=torch.int32, device=device)):
        a = replace(groups([4, 6], rng, device), num_active_experts=given)
        x = torch.randn(a.capacity, 64, generator=rng).bfloat16().to(device)
        rows = x.clone()
        expert_norm(rows, a, 3, norm, engine=engine)
        end = {0: 0, 1: 4, 99: 10}[active]
        assert_same_bits(rows[end:], x[end:], "rows of other groups")
        assert (rows[:end].float().square().mean(1) - 1).abs().lt(0.01).all()


def test_wrong_arguments_are_named(rng: torch.Generator) -> None:
    cpu = torch.device("cpu")
    a, norm = groups([4], rng, cpu), ExpertNorm(torch.ones(64), 1e-6)
    for rows, message in (
        (torch.zeros(9, 64), r"rows: expected torch\.bfloat16 \[at least 7, 64\], got torch\.float32 \[9, 64\]"),
        (torch.zeros(6, 64).bfloat16(), r"rows: expected .*, got torch\.bfloat16 \[6, 64\]"),
        (torch.zeros(9, 32).bfloat16(), r"rows: expected .*, got torch\.bfloat16 \[9, 32\]"),
        (torch.zeros(64, 9).bfloat16().T, "rows: expected the last dimension contiguous"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            expert_norm(rows, a, 3, norm)
    for scale, eps, message in (
        (torch.ones(64).bfloat16(), 1e-6, r"scale: expected contiguous torch\.float32 \[H\], got torch\.bfloat16"),
        (torch.ones(2, 64), 1e-6, r"scale: expected contiguous .*, got torch\.float32 \[2, 64\]"),
        (torch.ones(64), -1.0, r"eps: expected a number from 0, got -1\.0"),
        (torch.ones(64), float("nan"), "eps: expected a finite number"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            ExpertNorm(scale, eps)


def test_a_result_that_has_no_norm_is_refused_before_it_is_written(rng: torch.Generator) -> None:
    cpu = torch.device("cpu")
    gate_up = random_weights("bf16", 3, 32, 16, rng, cpu, gate_up=GateUpOrder.GATE_UP)
    down = random_weights("bf16", 3, 16, 16, rng, cpu)
    experts = Experts(gate_up, down, norm=ExpertNorm(torch.ones(16), 1e-6))
    a = groups([4], rng, cpu)
    for dtype in (torch.float32, torch.float16):
        out = poisoned(a.capacity, 16, dtype, cpu)
        before = out.clone()
        with pytest.raises(ValueError, match=rf"^out: expected torch\.bfloat16 with a norm, got {dtype}"):
            experts(a, out)
        assert_same_bits(out, before, str(dtype))
    assert experts(a, poisoned(a.capacity, 16, torch.bfloat16, cpu))[:4].isfinite().all()
