"""How a warp of Hopper's exchange waits for peers, run on the CPU: it neither diverges nor hangs nor misses a failure.

A peer that fails tells of it and then raises its flag all the same, with nothing behind it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moe_runtime.kernels.nvrtc import FOLDER

HARNESS = Path(__file__).with_name("await_on_host.cpp")
PLACE = "// THE TEXT OF signalling.cuh\n"
COMPILER = shutil.which("c++")


def between(text: str, start: str, end: str) -> str:
    first = text.index(start)
    return text[first : text.index(end, first)]


def host_text() -> str:
    """`Exchange` to `await` of signalling.cuh, for a compiler of the host."""
    text = (FOLDER / "signalling.cuh").read_text()
    text = between(text, "// What every kernel of an exchange is told.", "// Whether two dispatches have begun")
    text = text.replace(between(text, "__device__ __forceinline__ long long clock_ns()", "// Epochs are"), "")
    for words in ("__device__ __noinline__", "__device__ __forceinline__", "__device__"):
        text = text.replace(words, "inline" if "inline" in words else "")
    assert "asm" not in text and "await(" in text
    return text


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_await(tmp_path: Path) -> None:
    source, program = tmp_path / "await.cpp", tmp_path / "await"
    harness = HARNESS.read_text()
    assert harness.count(PLACE) == 1
    source.write_text(harness.replace(PLACE, host_text()))
    command = [str(COMPILER), "-O1", "-std=c++17", "-pthread", "-o", str(program), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith(" 0 wrong\n"), done.stdout + done.stderr
