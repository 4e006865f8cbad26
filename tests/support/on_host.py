"""Text of CUDA headers compiled for the CPU, in a harness that stands for what only a GPU has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def between(text: str, start: str, end: str) -> str:
    """From the first `start` up to the `end` after it."""
    first = text.index(start)
    return text[first : text.index(end, first)]


def compile_on_host(harness: str, place: str, text: str, binary: Path, *options: str) -> None:
    """Compile `harness`, a file of this folder, with `text` in the one place where it says `place`."""
    source = binary.with_suffix(".cpp")
    frame = Path(__file__).with_name(harness).read_text()
    assert frame.count(place) == 1
    source.write_text(frame.replace(place, text))
    command = [str(COMPILER), "-std=c++17", *options, "-o", str(binary), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
