"""The demo keeps to its time and memory; its exit code says whether every error is inside its bound."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.launch import demo
from moe_runtime.launch.common import cases
from tests.support.programs import ROOT, without_interpreter

pytestmark = pytest.mark.cpu_only

CPU_SECONDS_OF = """
import contextlib, ctypes, os, resource, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36  # What outlives its parent is waited for here, and counted.
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
code = subprocess.run([sys.executable, *sys.argv[2:]]).returncode
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    file.write(str(used.ru_utime + used.ru_stime))
sys.exit(code)
"""
"""A program that runs Python with its further arguments, and writes to its first how long processors were busy."""


def test_demo_as_a_program(tmp_path: Path) -> None:
    """Less than a minute of two cores, which others may use meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", CPU_SECONDS_OF, "used", "-m", "moe_runtime.launch.demo"],
        cwd=tmp_path,
        env=without_interpreter(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 1 < float((tmp_path / "used").read_text()) < 2 * 60
    assert done.stderr == ""
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line and line.split()[0] in FORMATS}
    assert list(rows) == list(FORMATS)
    for row in rows.values():
        assert len(row) == 4 + len(demo.PHASES)
        assert float(row[1]) <= float(row[2])
    assert "4 ranks, transport shared" in done.stdout and "32/32 experts" in done.stdout
    if Path("/proc/self/smaps_rollup").is_file():
        match = re.search(r"memory \(PSS\): ([\d.]+) (\w+) in all", done.stdout)
        assert match and float(match[1]) * {"MB": 1e6, "GB": 1e9}[match[2]] < 4e9
    assert not list(tmp_path.glob("moe_runtime-demo-*"))


def report(**errors: float) -> demo.RankReport:
    phases = dict.fromkeys(demo.PHASES, 1.0)
    return demo.RankReport({fmt: demo.FormatResult(errors.get(fmt, 0.001), 0.1, phases) for fmt in FORMATS}, None)


@pytest.mark.parametrize("error", [0.5, math.nan, math.inf])
def test_one_error_of_one_rank_outside_its_bound_is_exit_code_1(error: float) -> None:
    assert demo.exit_code([report(), report()]) == 0
    assert demo.exit_code([report(), report(mxfp8=error)]) == 1


def test_steps_are_uneven_and_a_rank_is_without_tokens() -> None:
    assert all(len(counts) == demo.WORLD_SIZE for counts in demo.TOKENS)
    assert any(0 in counts for counts in demo.TOKENS)
    limit = demo.layer_config("bf16").max_tokens_per_rank
    assert all(count <= limit for counts in demo.TOKENS for count in counts)


def test_bounds_grow_as_formats_get_coarser() -> None:
    bounds = [cases.layer_bound(demo.layer_config(fmt)) for fmt in ("bf16", "mxfp8", "nvfp4")]
    assert bounds == sorted(bounds)
