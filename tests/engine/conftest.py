"""Models and runs that several tests compare. Processes are started one after another: a machine may have two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.comparison import NAMES, ON_TWO, cases, difference
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
def alone_on_two(folder: Path, models: Path) -> dict[str, Any]:
    """vLLM without the adapter on two ranks. Expert parallelism of its own crashes on CPUs."""
    arguments = {"enforce_eager": True, "tensor_parallel_size": 2}
    return run_llms(folder, "alone_on_two", cases(models, ON_TWO, **arguments))[0]


@pytest.fixture(scope="session")
def limit(alone: dict[str, Any], alone_on_two: dict[str, Any]) -> float:
    """The most by which a model may differ: twice what two runs of vLLM alone differ, whose sums are rounded
    differently."""
    apart = {name: difference(alone[name], alone_on_two[name]) for name in ON_TWO}
    print("two runs of vLLM alone:", apart)
    return 2 * max(apart.values())
