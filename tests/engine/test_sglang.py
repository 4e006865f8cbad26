"""SGLang with the adapter answers as SGLang alone does, on one rank and two.

Judged as in `test_offline`: by the mean difference of log-probabilities of prompts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.comparison import CONTROL, FP8_CONTROL, FP8_LIMIT, cases, difference
from tests.engine.processes import run_sglang

MODELS = ("qwen3", "qwen3_top6", "glm4")
"""On two ranks: each computes its own experts, tokens travel, and there is a shared expert."""
TWO = {"tp_size": 2, "ep_size": 2}
RANKS = (1, "private"), (2, "shared")
CONTROL_ON_TWO = 0.95
"""What attention sums over ranks is rounded too."""


@pytest.fixture(scope="module")
def sglang_alone(folder: Path, models: Path) -> dict[str, Any]:
    """On one rank: with expert parallelism on CPUs, SGLang alone crashes."""
    return run_sglang(folder, "sglang_alone", cases(models, (*MODELS, "qwen3_rounded")))[0]


@pytest.fixture(scope="module")
def sglang_adapter(folder: Path, models: Path) -> tuple[dict[str, Any], str]:
    """Results and the log."""
    one = cases(models, (*MODELS, "qwen3_fp8")) + cases(models, MODELS, factor=CONTROL)
    one += cases(models, ["qwen3_fp8"], factor=FP8_CONTROL)
    two = cases(models, MODELS, **TWO) + cases(models, MODELS, factor=CONTROL_ON_TWO, **TWO)
    refused = cases(models, ["qwen3"], tp_size=2)
    named = [[f"{name} on two", *rest] for name, *rest in two] + [["refused", *rest] for _, *rest in refused]
    return run_sglang(folder, "sglang_adapter", one + named, "1")


@pytest.mark.parametrize(("ranks", "control"), [("", CONTROL), (" on two", CONTROL_ON_TWO)])
@pytest.mark.parametrize("name", MODELS)
def test_ranks(
    name: str,
    ranks: str,
    control: float,
    sglang_adapter: tuple[dict[str, Any], str],
    sglang_alone: dict[str, Any],
) -> None:
    """At most two thirds as far from SGLang alone as with experts whose results are `control` of the right ones."""
    ends = ranks, f" x {control}{ranks}"
    right, wrong = (difference(sglang_alone[name], sglang_adapter[0][f"{name}{end}"]) for end in ends)
    print(f"{name}{ranks}: {right:.4f}, limit {wrong * 2 / 3:.4f}")
    assert 0 < right <= wrong * 2 / 3


def test_fp8_blocks(sglang_adapter: tuple[dict[str, Any], str], sglang_alone: dict[str, Any]) -> None:
    """Against the same weights in bf16: SGLang's kernels for FP8 are not there on CPUs. Tokens are rounded too."""
    ends = "", f" x {FP8_CONTROL}"
    right, wrong = (difference(sglang_alone["qwen3_rounded"], sglang_adapter[0][f"qwen3_fp8{end}"]) for end in ends)
    print(f"{right:.4f}, wrong experts {wrong:.4f}")
    assert right <= FP8_LIMIT < wrong


def test_a_refusal_names_the_option(sglang_adapter: tuple[dict[str, Any], str]) -> None:
    """SGLang's own error says nothing, but that of the rank is in the log."""
    found, log = sglang_adapter
    assert isinstance(found["refused"], str)
    assert re.search(r"ValueError: model\.layers\.0\.mlp\.experts: --ep-size: expected the tensor-parallel size", log)


def test_the_log_tells_what_runs(sglang_adapter: tuple[dict[str, Any], str]) -> None:
    """Where each rank computes its own experts it is alone. Tokens of `qwen3_top6` travel on two ranks."""
    assert "MoE layers of SGLang run in moe_runtime" in sglang_adapter[1]
    alone, together = (
        re.findall(rf"{ranks} rank\(s\): transport {name}, ", sglang_adapter[1]) for ranks, name in RANKS
    )
    engines = len(MODELS) + 1
    assert len(alone) == 2 * engines + 2 * 2 * (len(MODELS) - 1)
    assert len(together) == 2
    lines = re.findall(r"moe_runtime: 2 of 2 MoE layers taken over: weights (\w+), .*", sglang_adapter[1])
    assert lines.count("fp8_block") == 2 and len(lines) == 2 * engines + 2 * len(MODELS)
