"""Tables of a run on the console, for every kind of run."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from moe_runtime.launch.benchmarks import show as layers
from moe_runtime.launch.benchmarks.bounds import EVEN
from moe_runtime.launch.benchmarks.show import Report, case_of, number, print_table, say
from moe_runtime.launch.kernel_bench.ops_table import print_operations
from moe_runtime.launch.kernel_bench.show import gpu_of, show_gemm, show_models, show_operations, verdict, where
from moe_runtime.launch.report import runs
from moe_runtime.launch.report.goals import judge_skew, needs_even_case
from moe_runtime.launch.report.peers import show_peers
from moe_runtime.launch.report.runs import kind_of, ours, ranks_of


def show(report: Report, console: Console) -> None:
    """Print the tables of a run."""
    kinds = {
        runs.LAYER: _show_layer,
        runs.PHASES: layers.show,
        runs.LOW_LATENCY: layers.show,
        runs.NORMAL: layers.show,
        runs.GEMM: show_gemm,
        runs.OPERATIONS: show_operations,
        runs.CHECKED: lambda report, console: print_operations(report, None, console),
        runs.LINKS: _show_links,
        runs.MODELS: show_models,
        runs.PEERS: show_peers,
    }
    kinds.get(kind_of(report), _show_fields)(report, console)


def _show_layer(report: Report, console: Console) -> None:
    """The table, and below it how unevenly routed exchanges came out by the rule for them."""
    layers.show(report, console)
    judge_skew(ours(report))
    for result in ours(report):
        skew, case = result["skew"], case_of(result)
        if skew is not None:
            times = f"{number(result['median_us'])} us, allowed {skew['allowed_us']:.1f}"
            say(console, f"{case}: {times} by the rule for uneven routing: {verdict(skew['met'])}")
        elif needs_even_case(result):
            why = f"no {EVEN} routing was timed in this run"
            say(console, f"{case}: not held to the rule for uneven routing, {why}")


def _show_links(report: Report, console: Console) -> None:
    """GB/s out of each rank, a line for each way and size, a column for each number of blocks."""
    blocks = sorted({result["blocks"] for result in report["results"]})
    rates = {(r["way"], r["bytes_per_peer"], r["blocks"]): r["gb_per_s"] for r in report["results"]}
    rows = [
        [way, f"{size / 1e6:.2f}", *(f"{rates[way, size, n]:.0f}" for n in blocks)]
        for way, size in dict.fromkeys((r["way"], r["bytes_per_peer"]) for r in report["results"])
    ]
    title = f"{ranks_of(report)} x {gpu_of(report)}: GB/s out of each rank"
    print_table(console, title, ["way", "MB per peer", *(f"{n} blocks" for n in blocks)], rows)


def _show_fields(report: Report, console: Console) -> None:
    """What the other kinds found, field by field."""
    rows: list[list[str]] = []

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                add(f"{name}.{key}" if name else key, part)
        elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
            for number, part in enumerate(value):
                add(f"{name}.{number}", part)
        else:
            rows.append([name, str(value)])

    add("", {key: value for key, value in report.items() if key not in ("environment", "config")})
    print_table(console, where(report), ("field", "value"), rows)
