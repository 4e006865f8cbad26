"""The scripts in `examples/` run as their docstrings say: alone, and one of them under torchrun."""

from __future__ import annotations

import ast
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.programs import ROOT, python_path, without_interpreter
from tests.support.spawner import interpreter

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run_example(name: str, *launcher: str, **environment: str) -> str:
    """What `examples/name` prints, on the GPUs that are there."""
    changes = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    command = [interpreter(), *launcher, f"examples/{name}"]
    done = subprocess.run(
        command, cwd=ROOT, env=without_interpreter(**changes), capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_layer_alone() -> None:
    assert "rank 0 of 1: (16, 256), 8 experts here" in run_example("layer_alone.py")


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra hf")
def test_transformers_model() -> None:
    printed = run_example("transformers_model.py")
    # 3 tokens of the prompt and 3 of the 4 that follow go through the model, each to 4 experts.
    assert "rank 0: [3, 14, 15, " in printed and "24 expert rows in layer 0" in printed


def test_server_loop() -> None:
    kind = "graph" if torch.cuda.is_available() else "eager"
    assert f"rank 0: 20 {kind} steps, last output (8, 256)" in run_example("server_loop.py")


def test_server_loop_on_two_ranks() -> None:
    enough = torch.cuda.device_count() >= 2
    printed = run_example("server_loop.py", *TWO_RANKS, **({} if enough else {"CUDA_VISIBLE_DEVICES": ""}))
    for rank in range(2):
        assert f"rank {rank}: 20 " in printed


@pytest.mark.cpu_only
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(text)) or ""
    assert f"\n    python examples/{example.name}" in said
    assert f"\n    torchrun --nproc-per-node=2 examples/{example.name}" in said
    assert len(text.splitlines()) < 60
