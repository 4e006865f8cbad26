"""The bound of FP8 MMA is that of its formula, the probe measures what it says, and the committed numbers hold."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from moe_runtime.launch.benchmarks.checks import FP8_MMA_BITS, FP8_MMA_GAIN
from moe_runtime.launch.kernel_bench.fp8_bound import fp8_mma_slack
from moe_runtime.launch.research import probe
from tests.support.programs import ROOT


@pytest.mark.parametrize("k", [16, 144, 256, 400])
@pytest.mark.parametrize("engine", ["torch", "triton"])
def test_slack_is_the_largest_term_or_partial_sum_of_each_chunk(
    engine: str, k: int, rng: torch.Generator, device: torch.device
) -> None:
    """The last chunk may be shorter; zeros behind it change nothing."""
    a, b = (torch.randn(n, k, generator=rng, dtype=torch.float64) for n in (19, 3))
    padded = torch.nn.functional.pad(a[:, None] * b[None], (0, -k % 128))
    products = padded.numpy().reshape(19, 3, -1, 128)
    largest = np.maximum(np.abs(products).max(-1), np.abs(products.cumsum(-1)).max(-1)).sum(-1)
    found = fp8_mma_slack(a.to(device), b.to(device), engine=engine).cpu().numpy()
    np.testing.assert_allclose(found, 4 * 34 * 2.0**-13 * largest, rtol=2.0**-16 if engine == "triton" else 1e-12)


def test_no_rows_have_no_slack(device: torch.device) -> None:
    assert fp8_mma_slack(*(torch.zeros(n, 128, dtype=torch.float64, device=device) for n in (0, 3))).shape == (0, 3)


def truncating(bits: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`multiply` of a machine that cuts every term of an MMA of 32 at `2^-bits` of the largest exponent."""

    def multiply(a_RK: torch.Tensor, b_K: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(a_RK.shape[0], dtype=torch.float64)
        for k in range(0, 128, 32):
            terms = torch.cat([total[:, None], (a_RK * b_K).double()[:, k : k + 32]], 1)
            exponent = torch.frexp(terms.abs().amax(1, keepdim=True)).exponent - 1
            unit = 2.0 ** (exponent - bits).double()
            total = (torch.trunc(terms / unit) * unit).sum(1)
        return total.float()

    return multiply


@pytest.mark.parametrize("bits", [5, 10, 13])
def test_the_probe_finds_the_bits_of_a_machine_that_cuts(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(probe, "multiply", truncating(bits))
    assert probe.kept_bits(cpu) == bits
    assert 2.0 ** -(bits + 1) < probe.largest_loss(cpu, 256) < 4 * 34 * 2.0**-bits


def test_exact_sums_keep_all_bits_and_lose_nothing() -> None:
    cpu = torch.device("cpu")
    assert probe.kept_bits(cpu) == probe.MOST_BITS
    assert probe.largest_loss(cpu, 64) == 0


def test_the_probe_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.main([]) == 2
    assert "probe: expected a CUDA GPU" in capsys.readouterr().err


def test_the_committed_measurement_is_what_the_bound_counts_on() -> None:
    found = json.loads((ROOT / "launch" / "results" / "fp8_probe_h200.json").read_text())
    assert found["kept_bits"] == FP8_MMA_BITS
    assert 0 < found["largest_loss"] <= FP8_MMA_GAIN
    assert found["environment"]["gpus"][0]["arch"] == "sm_90"


@pytest.mark.gpu
def test_this_gpu_keeps_as_many_bits(device: torch.device) -> None:
    found = probe.probe(device)
    assert found["kept_bits"] >= FP8_MMA_BITS, found
    assert found["largest_loss"] <= FP8_MMA_GAIN, found
