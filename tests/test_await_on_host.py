"""How a warp of Hopper's exchange waits for peers, run on the CPU: it neither diverges nor hangs nor misses a failure.

A peer that fails tells of it and then raises its flag all the same, with nothing behind it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from moe_runtime.kernels.nvrtc import FOLDER
from tests.on_host import between, compile_on_host, needs_compiler

PLACE = "// THE TEXT OF signalling.cuh\n"


def host_text() -> str:
    """`Exchange` to `await` of signalling.cuh, for a compiler of the host."""
    text = (FOLDER / "signalling.cuh").read_text()
    text = between(text, "// What every kernel of an exchange is told.", "// Whether two dispatches have begun")
    text = text.replace(between(text, "__device__ __forceinline__ long long clock_ns()", "// Epochs are"), "")
    for words in ("__device__ __noinline__", "__device__ __forceinline__", "__device__"):
        text = text.replace(words, "inline" if "inline" in words else "")
    assert "asm" not in text and "await(" in text
    return text


@needs_compiler
def test_await(tmp_path: Path) -> None:
    program = tmp_path / "await"
    compile_on_host("await_on_host.cpp", PLACE, host_text(), program, "-O1", "-pthread")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith(" 0 wrong\n"), done.stdout + done.stderr
