"""The table of `moe_runtime.ops`: each operation in torch, interpreted, run on sm_90, compiled for other GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_runtime.launch.benchmarks.show import Report, Result
from moe_runtime.launch.kernel_bench.show import commit_of, where

COLUMNS = ("operation", "format", "torch", "interpreted", "run on sm_90", "compiled sm_100", "compiled sm_120")
ARCHS = (90, 100, 120)


def cells(checked: Report, run: Report | None) -> list[list[str]]:
    """Texts of each line, in the order of `COLUMNS`; instructions in backticks.

    Args:
        checked: the JSON of `kernel_bench check`.
        run: the JSON of `kernel_bench ops` on a GPU; None where there is none.
    """
    table = []
    for operation, fmt in {r["operation"]: r["format"] for r in checked["twin"]}.items():
        compiled = {r["arch"]: r for r in checked["compiled"] if r["operation"] == operation}
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


def _verdict(results: Sequence[Result]) -> str:
    if not results:
        return "-"
    failed = sum(not result["check"]["passed"] for result in results)
    return f"{failed} of {len(results)} FAILED" if failed else "ok"


def _instructions(record: Result | None) -> str:
    if record is None:
        return "-"
    if record["errors"]:
        return "FAILED"
    return ", ".join(f"`{name}`" for name in record["instructions"]) or "no MMA in it"


def print_operations(checked: Report, run: Report | None, console: Console) -> None:
    """The table; below it what failed to compile, and the machine of the run."""
    table = Table(title="Operations of moe_runtime.ops", show_lines=True)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for line in cells(checked, run):
        table.add_row(*(Text(text.replace("`", "").replace("; ", "\n").replace(", ", "\n")) for text in line))
    console.print(table)
    for record in checked["compiled"]:
        for error in record["errors"]:
            console.print(f"{record['operation']} sm_{record['arch']}: {error}", markup=False)
    if run is None:
        console.print("No run on a GPU is shown here: `kernel_bench ops --json FILE` makes one.")
    else:
        console.print(f"Run on {where(run)}.", markup=False, highlight=False)


def operations_markdown(checked: Report, run: Report, source: str) -> str:
    """The table in markdown; `source` is the path of the run's file."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join([f'`{line[0]}`', *line[1:]])} |" for line in cells(checked, run)]
    ratios, prepacked = [], []
    for raw, after in itertools.pairwise(run["results"]):
        if "prepare_us" in after:
            ratios.append(raw["median_us"] / after["median_us"])
            shape, ms = after["shape"], after["prepare_us"] / 1e3
            experts = f"{shape['num_experts']} x {shape['n']} x {shape['k']}"
            prepacked.append(f"{ms:.1f} ms for {experts} in {after['format']}")
    text = f"Run on {where(run)}, commit {commit_of(run)} ([JSON]({source}));"
    text += " a time per variant, raw weights before prepacked ones."
    if ratios:
        text += f" Prepacked weights make operations {min(ratios):.1f} to {max(ratios):.1f} times as fast."
        text += f" Prepacking takes {', '.join(prepacked)}."
    for result in run["results"]:
        if "layer_us" in result:
            text += f" `{result['operation']}` takes {result['median_us']:.0f} us with them; the same GEMM takes"
            text += f" {result['layer_us']:.0f} us in a layer."
    return "\n".join([*lines, "", text])
