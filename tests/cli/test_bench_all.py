"""`bench_all.sh` runs commands that the programs take, names what failed, and leaves no old results of that behind."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from moe_runtime.launch import bench
from moe_runtime.launch.kernel_bench import __main__ as kernel_bench
from tests.support.programs import ROOT

pytestmark = pytest.mark.cpu_only

SCRIPT = ROOT / "launch" / "scripts" / "bench_all.sh"


def commands(
    folder: Path, fails: str = "nothing", **settings: str
) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
    """The arguments that the script gives to Python, where a program that has `fails` in its arguments fails."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "RUN $*"\ncase "$*" in *{fails}*) exit 3;; esac\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)} | settings
    done = subprocess.run([SCRIPT, folder], env=environment, capture_output=True, text=True, timeout=60)
    return [shlex.split(line)[1:] for line in done.stdout.splitlines() if line.startswith("RUN ")], done


def test_every_part_is_one_that_the_programs_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first thing that a run without GPUs would do."""

    class Reached(Exception):
        pass

    def reached(options: object) -> int:
        raise Reached

    monkeypatch.setattr(bench, "bench_layers", reached)
    monkeypatch.setattr(kernel_bench, "bench", lambda part, options: reached(options))
    (tmp_path / "links.json").write_text("old")
    (tmp_path / "layer_2.json").write_text("old")
    found, done = commands(tmp_path, RANKS="1 2")
    assert done.returncode == 0, done.stderr
    programs = []
    for command in found:
        two = command[:2] == ["-m", "torch.distributed.run"]
        module, *arguments = command[5 if two else 1 :]
        programs.append((module.removeprefix("moe_runtime.launch."), *arguments[:2], 2 if two else 1))
        program = {"bench": bench, "kernel_bench": kernel_bench}.get(module.removeprefix("moe_runtime.launch."))
        if program is not None:
            with pytest.raises(Reached):
                program.main(arguments)
    assert [(name, ranks) for name, *_, ranks in programs] == [
        ("research.link_bench", 2),
        *[("bench", ranks) for ranks in (2, 1, 2, 2)],
        *[("kernel_bench", 1)] * 2,
        ("report", 1),
    ]
    assert not list(tmp_path.glob("*.json"))


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path: Path) -> None:
    found, done = commands(tmp_path, fails="trace", RANKS="2", PARTS="trace gemm", TOKENS="8", FORMATS="bf16")
    assert done.returncode == 1 and len(found) == 2 and "--tokens 8 --trace" in " ".join(found[0])
    assert done.stdout.splitlines()[-1].startswith("FAILED trace: bench layer --config deepseek_v3 --formats bf16")
    assert done.stdout.splitlines()[-1].endswith("(exit code 3)")
    done = subprocess.run([SCRIPT, tmp_path / "no"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("bench_all: no folder ")
