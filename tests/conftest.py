"""Set up before any test module is imported: without a GPU every Triton kernel of this process is interpreted."""

from __future__ import annotations

import gc
import os

# Several processes share few cores; for the children too. Before numpy is imported, whose BLAS starts its threads then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.kept_files import forget_unused
from tests.support.spawner import interpreter

HAS_GPU = torch.cuda.is_available()
if HAS_GPU:
    # Of several processes each has its own GPU as far as they go.
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    torch.cuda.set_device(process % torch.cuda.device_count())
else:
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before tests/conftest.py could choose the interpreter")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from tests.support.interpreter import quicken

    quicken()
torch.set_num_threads(1)

# The fixture `get_pool`.
pytest_plugins = ["tests.support.pool"]

settings.register_profile(
    "moe_runtime",
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("moe_runtime")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    forget_unused()
    if config.getoption("numprocesses", None):
        # One for all processes of the run: each would take a second or more to load torch.
        interpreter()


LONGEST = (
    "test_aot.py",
    "test_full_size_layers.py",  # on GPUs
    "test_tma_gemm.py",
    "test_tma_gemm_emulated.py",
    "test_dequant_gemm_emulated.py",
)
"""Files that take minutes: one that began late would be the last to end, alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that others run beside them; skip tests marked `gpu` without a GPU.

    Files of each folder are spread over the run: some folders compile, others wait for processes.
    """
    folders: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        folders.setdefault(path.parent, []).append(path)
    place = {path: (i + 0.5) / len(files) for files in folders.values() for i, path in enumerate(files)}
    items.sort(key=lambda item: 0 if item.path.name in LONGEST else place[item.path])
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported and collected is never garbage: looking through it costs some files a tenth of their time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10000, 20, 20)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors of a test lie: the GPU if there is one, so that the same tests run compiled there."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    """Several processes share a GPU: what a test allocated is not kept for the next."""
    yield
    if HAS_GPU:
        torch.cuda.empty_cache()


@pytest.fixture
def seed() -> int:
    """A fresh seed for each test, printed when it fails; `MOE_RUNTIME_TEST_SEED` repeats one."""
    value = int(os.environ.get("MOE_RUNTIME_TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"repeat with MOE_RUNTIME_TEST_SEED={value}")
    return value


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    """A CPU generator started from `seed`: draw on the CPU and move to `device`, for the same inputs everywhere."""
    return torch.Generator().manual_seed(seed)
