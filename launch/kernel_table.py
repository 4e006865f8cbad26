"""The table operation x (CPU twin, interpreted, run on sm_90, compiled for sm_100 and sm_120) of `moe_runtime.ops`.

`check_here` fills in all but the run column: the twins and the interpreted kernels are held to their bounds, and the
kernels are compiled, each in a process of its own, since a process either interprets kernels or compiles them. The
run column is a file of `launch.ops_run`. `launch.doctor --kernels` shows both; the README is made from committed ones.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_runtime.launch.environment import where
from moe_runtime.launch.ops_run import CASES, KIND

CHECKED = "operations_checked"
"""What the JSON of `launch.doctor --kernels --json` says it is; committed as `launch/results/ops_checked.json`."""

CHECKED_FILE, RUN_FILE = "ops_checked.json", "ops_h200.json"
"""In `launch/results/`."""

COLUMNS = ("operation", "format", "CPU twin", "interpreted", "run on sm_90", "compiled sm_100", "compiled sm_120")

OPERATIONS = (
    "grouped_matmul_dynamic_scaled_nvfp4",
    "group_gemm_nvfp4_nt_groupwise",
    "moe_gemm_mxfp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "NVFP4TokenFormat",
)
"""In the order of the table."""

KERNELS = {"NVFP4TokenFormat": "quantize"}
"""Operation of the ahead-of-time cases that stand for an operation under another name."""

ARCHS = (90, 100, 120)


def check_here(jobs: int = 1) -> dict[str, Any]:
    """`{"kind", "twin", "interpreted", "compiled"}`: what this machine finds without a GPU, in under a minute or two.

    Raises `RuntimeError` where a program fails without a result.
    """
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    clean["CUDA_VISIBLE_DEVICES"] = ""
    program = "moe_runtime.launch.ops_run"
    twin = _run(program, "--engine", "torch", environment=clean)
    interpreted = _run(program, "--engine", "triton", environment=clean | {"TRITON_INTERPRET": "1"})
    names = [kernel_operation(name) for name in OPERATIONS]
    compiled = _run("moe_runtime.kernels.aot", "--jobs", str(jobs), "--operations", *names, environment=clean)
    return checked(twin["results"], interpreted["results"], compiled["results"])


def checked(
    twin: Iterable[dict[str, Any]], interpreted: Iterable[dict[str, Any]], compiled: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """The file of results of `launch.ops_run` on both engines, and of `kernels.aot`; nothing else of them is kept."""
    return {
        "kind": CHECKED,
        "twin": [_short(result) for result in twin],
        "interpreted": [_short(result) for result in interpreted],
        "compiled": compiled_records(compiled),
    }


def compiled_records(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One `{operation, format, arch, instructions, errors}` per operation, format and architecture."""
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    results = list(results)
    for index, (operation, fmt) in enumerate(rows()):
        for result in results:
            if (result["operation"], result["format"]) != (kernel_operation(operation), fmt):
                continue
            new: dict[str, Any] = {"operation": operation, "format": fmt, "arch": result["arch"]}
            record = found.setdefault((index, fmt, result["arch"]), new | {"instructions": [], "errors": []})
            record["instructions"] = sorted({*record["instructions"], *map(_plain, result["instructions"])})
            record["errors"] += [result["error"]] if result["error"] else []
    return [found[key] for key in sorted(found)]


def rows() -> list[tuple[str, str]]:
    """`(operation, format)` of each line of the table."""
    formats = {"NVFP4TokenFormat": "nvfp4", **{case.operation: case.format for case in CASES}}
    return [(operation, formats[operation]) for operation in OPERATIONS]


def kernel_operation(operation: str) -> str:
    """What the ahead-of-time cases call an operation."""
    return KERNELS.get(operation, operation)


def cells(checked: dict[str, Any], run: dict[str, Any] | None) -> list[list[str]]:
    """Texts of each line, in the order of `COLUMNS`; instructions in backticks."""
    table = []
    for operation, fmt in rows():
        compiled = {r["arch"]: r for r in checked["compiled"] if (r["operation"], r["format"]) == (operation, fmt)}
        here = [_verdict([r for r in checked[key] if r["operation"] == operation]) for key in ("twin", "interpreted")]
        ran = [] if run is None else [r for r in run["results"] if r["operation"] == operation]
        on_gpu = _verdict(ran) if ran else "no record"
        worst = max((r["check"]["error"] / r["check"]["bound"] for r in ran if r["check"]["bound"]), default=None)
        on_gpu += "" if worst is None else f", {worst:.2f} of its bound"
        times = [f"{r['median_us']:.0f}" for r in ran if r.get("median_us")]
        on_gpu += f", {' and '.join(times)} us" if times else ""
        found = [_instructions(compiled.get(arch)) for arch in ARCHS]
        table.append([operation, fmt, *here, f"{on_gpu}; {found[0]}", *found[1:]])
    return table


def has_failed(checked: dict[str, Any]) -> bool:
    """Whether a result is outside its bound, or a kernel did not compile to its instruction."""
    results = [*checked["twin"], *checked["interpreted"]]
    return any(not r["check"]["passed"] for r in results) or any(r["errors"] for r in checked["compiled"])


def _verdict(results: Sequence[dict[str, Any]]) -> str:
    """Whether all variants are within their bounds."""
    if not results:
        return "-"
    failed = [result for result in results if not result["check"]["passed"]]
    return f"{len(failed)} of {len(results)} FAILED" if failed else "ok"


def _instructions(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    if record["errors"]:
        return "FAILED"
    return ", ".join(f"`{name}`" for name in record["instructions"]) or "no MMA in it"


def _plain(instruction: str) -> str:
    """Without what is the same for all, and without the width of a wgmma, which follows the tile."""
    instruction = instruction.replace("mma_async.sync", "mma_async")
    for part in (".aligned", ".row.col", ".cta_group::1"):
        instruction = instruction.replace(part, "")
    return re.sub(r"(wgmma\S*\.m64)n\d+(k\d+)", r"\1n*\2", instruction)


def _short(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("operation", "format", "variant", "check")}


def print_table(checked: dict[str, Any], run: dict[str, Any] | None, console: Console) -> None:
    """The table; under it what failed to compile, and on which machine the run column comes from."""
    table = Table(title="Operations of moe_runtime.ops", show_lines=True)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for line in cells(checked, run):
        table.add_row(*(text.replace("`", "").replace("; ", "\n").replace(", ", "\n") for text in line))
    console.print(table)
    for record in checked["compiled"]:
        for error in record["errors"]:
            console.print(f"{record['operation']} sm_{record['arch']}: {error}", markup=False)
    if run is None:
        console.print("No run on a GPU is recorded here: python -m moe_runtime.launch.ops_run --json FILE makes one.")
    else:
        console.print(f"Run on {where(run)}.", highlight=False)


def markdown(checked: dict[str, Any], run: dict[str, Any] | None, source: str) -> str:
    """The table for the README; `source` is the path of the file of the run."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join([f'`{line[0]}`', *line[1:]])} |" for line in cells(checked, run)]
    if run is not None:
        lines += _about_preparing(run)
        lines += ["", f"Run on {where(run)}; shapes, errors, bounds and rates are in the [JSON]({source})."]
    return "\n".join(lines)


def _about_preparing(run: dict[str, Any]) -> list[str]:
    """How much faster operations with prepared weights are, and what preparing takes; nothing where none was timed."""
    ratios, prepared = [], []
    for raw, after in itertools.pairwise(run["results"]):
        if "prepare_us" in after:
            ratios.append(raw["median_us"] / after["median_us"])
            shape = after["shape"]
            experts = f"{shape['num_experts']} experts of {shape['n']} x {shape['k']}"
            prepared.append(f"{after['prepare_us'] / 1e3:.1f} ms for {experts} in {after['format']}")
    if not ratios:
        return []
    text = (
        f"With prepared weights operations are {min(ratios):.1f} to {max(ratios):.1f} times as fast. Preparing takes "
        f"{', '.join(prepared)}."
    )
    for result in run["results"]:
        if "layer_us" in result:
            text += (
                f" `{result['operation']}` takes {result['median_us']:.0f} us with them, the call that a layer makes "
                f"for the same product {result['layer_us']:.0f} us."
            )
    return ["", text]


def read(file: Path, kind: str) -> dict[str, Any] | None:
    """The JSON of `file`, None where there is none. Raises `ValueError` if it is of another kind."""
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    if found.get("kind") != kind:
        raise ValueError(f"{file.name}: expected kind {kind}, got {found.get('kind')}")
    return found


def read_run(folder: Path) -> dict[str, Any] | None:
    """The committed run on a GPU."""
    return read(folder / RUN_FILE, KIND)


def read_checked(folder: Path) -> dict[str, Any] | None:
    """The committed file of `check_here`."""
    return read(folder / CHECKED_FILE, CHECKED)


def _run(module: str, *arguments: str, environment: dict[str, str]) -> dict[str, Any]:
    """The JSON that a program writes; a failed check is in it, so its exit code is not asked."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", module, *arguments, "--json", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not file.is_file():
            raise RuntimeError(f"{module}: no results (exit code {done.returncode}): {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found
