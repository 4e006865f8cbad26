"""Models and runs that several tests compare. Processes are started one after another: a machine may have two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.comparison import CONTROL, FP8_CONTROL, NAMES, cases, difference
from tests.engine.processes import HERE, environment, run_llms, run_program


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For logs, results and vLLM's caches."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def models(folder: Path) -> Path:
    """The folder with a checkpoint of each name."""
    run_program(
        [str(HERE / "tiny_models.py"), str(folder / "models")], folder / "models.log", environment(folder, "0"), 300
    )
    return folder / "models"


@pytest.fixture(scope="session")
def alone(folder: Path, models: Path) -> dict[str, Any]:
    """vLLM without the adapter, on one rank, without torch.compile."""
    return run_llms(folder, "alone", cases(models, (*NAMES, "qwen3_rounded"), enforce_eager=True))[0]


@pytest.fixture(scope="session")
def adapter(folder: Path, models: Path) -> tuple[dict[str, Any], str]:
    """vLLM with it, and its log. One engine after another in one process, which may each need more memory."""
    right = cases(models, (*NAMES, "qwen3_fp8", "dense"), enforce_eager=True)
    wrong = cases(models, NAMES, factor=CONTROL, enforce_eager=True)
    wrong += cases(models, ["qwen3_fp8"], factor=FP8_CONTROL, enforce_eager=True)
    return run_llms(folder, "adapter", right + wrong, "1")


@pytest.fixture(scope="session")
def limits(alone: dict[str, Any], adapter: tuple[dict[str, Any], str]) -> dict[str, float]:
    """The most by which a model with the adapter may differ from vLLM alone: two thirds of it with wrong experts.

    Two runs of vLLM alone are no measure: they have equal bits on one rank, and on two differ as much as wrong experts
    do, since what attention sums is rounded too.
    """
    return {name: difference(alone[name], adapter[0][f"{name} x {CONTROL}"]) * 2 / 3 for name in NAMES}
