"""Writes kernels/compile_commands.json, by which clangd opens each CUDA source and header of the kernels.

`python -m moe_runtime.launch.research.compile_commands` takes the macros of the first ahead-of-time case of each
source; a header gets those of a source that includes it. clangd needs the headers of a CUDA toolkit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moe_runtime.kernels import nvrtc
from moe_runtime.launch.research import aot
from moe_runtime.launch.research.aot_cases import CudaCase

FILE = "compile_commands.json"


def cases_by_file() -> dict[str, CudaCase]:
    """A case for each `.cu` and `.cuh`, by its name."""
    cases = [case for _, _, case in aot.collect_cases() if isinstance(case, CudaCase)]
    found: dict[str, CudaCase] = {}
    for case in cases:
        found.setdefault(case.file, case)
    for file, case in list(found.items()):
        for header in nvrtc._headers(nvrtc.source_path(file).read_bytes()):
            found.setdefault(header.decode(), case)
    return found


def compile_commands() -> list[dict[str, Any]]:
    """What compile_commands.json holds, in the order of the names."""
    folders = sorted({path.parent for path in nvrtc.FOLDER.rglob("*.cuh")})
    commands = []
    for name, case in sorted(cases_by_file().items()):
        flags = ["-xcuda", f"--cuda-gpu-arch=sm_{case.archs[0]}a", "--cuda-device-only", "-std=c++17"]
        flags += [f"-D{macro}={value}" for macro, value in case.defines.items()]
        flags += [f"-I{folder}" for folder in folders]
        path = str(nvrtc.source_path(name))
        commands.append({"directory": str(nvrtc.FOLDER), "file": path, "arguments": ["clang++", *flags, path]})
    return commands


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.research.compile_commands")
    parser.add_argument("--to", type=Path, default=nvrtc.FOLDER / FILE, metavar="FILE", help="default: in kernels/")
    target = parser.parse_args(arguments).to
    target.write_text(json.dumps(compile_commands(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
