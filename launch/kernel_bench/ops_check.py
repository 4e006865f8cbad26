"""Checks the operations of `moe_runtime.ops` without a GPU: torch and interpreted kernels run, all kernels compile.

Each part runs in a process of its own, because a process either interprets Triton kernels or compiles them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_runtime.launch.kernel_bench.ops_bench import CASES, TOKEN_FORMAT

KIND = "operations_checked"
"""`kind` of the JSON of `kernel_bench check`; committed as `launch/results/ops_checked.json`."""

OPERATIONS = (*dict.fromkeys(case.operation for case in CASES), TOKEN_FORMAT)
FORMATS = {TOKEN_FORMAT: "nvfp4", **{case.operation: case.format for case in CASES}}
KERNELS = {TOKEN_FORMAT: "quantize"}
"""The ahead-of-time cases of an operation that has another name there."""


def kernel_operation(operation: str) -> str:
    """What the ahead-of-time cases call an operation."""
    return KERNELS.get(operation, operation)


def check_here(jobs: int = 1) -> dict[str, Any]:
    """Run all parts, with `jobs` compilers; `{"kind", "twin", "interpreted", "compiled"}`. Takes a minute or two.

    Raises `RuntimeError` where a program ends without a result.
    """
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    clean["CUDA_VISIBLE_DEVICES"] = ""
    bench = ("moe_runtime.launch.kernel_bench", "ops", "--engine")
    torch = _run(*bench, "torch", environment=clean)
    interpreted = _run(*bench, "triton", environment=clean | {"TRITON_INTERPRET": "1"})
    names = map(kernel_operation, OPERATIONS)
    compiled = _run("moe_runtime.launch.research.aot", "--jobs", str(jobs), "--operations", *names, environment=clean)
    return summary(torch["results"], interpreted["results"], compiled["results"])


def summary(
    torch: Iterable[dict[str, Any]], interpreted: Iterable[dict[str, Any]], compiled: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """The JSON, from the results of `kernel_bench ops` with both engines and of `research.aot`."""
    fields = ("operation", "format", "variant", "check")
    twin, checked = ([{key: result[key] for key in fields} for result in results] for results in (torch, interpreted))
    return {"kind": KIND, "twin": twin, "interpreted": checked, "compiled": compiled_records(compiled)}


def compiled_records(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One `{operation, format, arch, instructions, errors}` per operation and architecture."""
    results, found = list(results), []
    for operation in OPERATIONS:
        kernel = kernel_operation(operation), FORMATS[operation]
        own = [result for result in results if (result["operation"], result["format"]) == kernel]
        for arch in sorted({result["arch"] for result in own}):
            here = [result for result in own if result["arch"] == arch]
            instructions = sorted({_plain(name) for result in here for name in result["instructions"]})
            errors = [result["error"] for result in here if result["error"]]
            record = {"operation": operation, "format": FORMATS[operation], "arch": arch}
            found.append(record | {"instructions": instructions, "errors": errors})
    return found


def has_failed(checked: dict[str, Any]) -> bool:
    """Whether a result is outside its bound, or a kernel did not compile to its instruction."""
    results = [*checked["twin"], *checked["interpreted"]]
    return any(not r["check"]["passed"] for r in results) or any(r["errors"] for r in checked["compiled"])


def _plain(instruction: str) -> str:
    """Without the parts that are the same for all, and without the width of a wgmma, which depends on the tile."""
    instruction = instruction.replace("mma_async.sync", "mma_async")
    for part in (".aligned", ".row.col", ".cta_group::1"):
        instruction = instruction.replace(part, "")
    return re.sub(r"(wgmma\S*\.m64)n\d+(k\d+)", r"\1n*\2", instruction)


def _run(module: str, *arguments: str, environment: dict[str, str]) -> dict[str, Any]:
    """The JSON that a program writes. Its exit code is ignored: a failed check is in the JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", module, *arguments, "--json", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not file.is_file():
            raise RuntimeError(f"{module}: no results (exit code {done.returncode}): {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found
