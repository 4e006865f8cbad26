"""Peers beside us: tables of runs of `research.peers`, and of the layer in runs of `bench`, which has torch alone."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from moe_runtime.launch.benchmarks.bounds import EVEN
from moe_runtime.launch.benchmarks.layer_report import OURS
from moe_runtime.launch.benchmarks.show import Report, Result, print_table, say
from moe_runtime.launch.kernel_bench.show import commit_of, shown_us, where
from moe_runtime.launch.report.runs import PEERS, kind_of, model_of, ranks_of

OK = "ok"
FORMATS = {"nvfp4": "NVFP4", "fp8_block": "FP8", "mxfp8": "MXFP8", "bf16": "BF16"}
"""How tables call the formats of tokens."""
NAMES = {
    OURS: "ours",
    "flashinfer_push": "FlashInfer push",
    "flashinfer_pull": "FlashInfer pull",
    "flashinfer_nvfp4": "FlashInfer",
    "deepep_low_latency": "DeepEP",
    "deepep_normal": "DeepEP",
    "deep_gemm": "DeepGEMM",
    "humming": "Humming",
    "torch": "torch",
}
"""How tables call who did something."""

Series = dict[str, dict[int, Result]]
"""Results with a time, by name of the column or line and by tokens per rank."""


def name_of(result: Result) -> str:
    """Who did it, and in which variant."""
    return f"{NAMES[result['implementation']]} {result['variant']}".strip()


def series_of(report: Report, operation: str) -> Series:
    """Times of an operation, ours first; of equal cases the shortest."""
    results = report["results"] if kind_of(report) == PEERS else _layers_of(report)
    found: Series = {}
    for result in sorted(results, key=lambda result: result["implementation"] != OURS):
        if result["operation"] == operation and result["status"] == OK:
            line, count = found.setdefault(name_of(result), {}), result["tokens_per_rank"]
            line[count] = min(line.get(count, result), result, key=lambda one: one["median_us"])
    return found


def _layers_of(report: Report) -> list[Result]:
    """Results of the layer in a run of `bench`, evenly routed, with the fields of a run of `research.peers`."""
    found = []
    for result in report["results"]:
        if result["operation"] == "layer" and result["routing"] == EVEN and result["median_us"]:
            by = OURS if result["implementation"] == OURS else "torch"
            variant = FORMATS[result["token_format"]] if by == OURS else "BF16"
            more = {"status": OK, "implementation": by, "variant": variant, "error": result["check"]["error"]}
            found.append(result | more)
    return found


def operations_of(report: Report) -> list[str]:
    """In the order of the run."""
    return list(dict.fromkeys(result["operation"] for result in report["results"]))


def rows_of(report: Report, operation: str, cell: Callable[[Result], str]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a line per name: a column for each number of tokens, and the largest error."""
    series = series_of(report, operation)
    counts = sorted({count for line in series.values() for count in line})
    lines = []
    for name, line in series.items():
        error = max(result["error"] for result in line.values())
        lines.append([name, *(cell(line[count]) if count in line else "" for count in counts), f"{error:.2g}"])
    return ["", *map(str, counts), "error"], lines


def excuses(report: Report) -> list[str]:
    """A line for each thing that has no time: what it is, and why."""
    found: dict[tuple[str, str], list[int]] = {}
    for result in report["results"]:
        if result["status"] != OK:
            counts = found.setdefault((f"{name_of(result)}, {result['operation']}", result["status"]), [])
            counts += [] if result["tokens_per_rank"] is None else [result["tokens_per_rank"]]
    return [
        f"{name}{', T = ' if counts else ''}{', '.join(map(str, counts))}: {status}"
        for (name, status), counts in found.items()
    ]


def versions(report: Report) -> str:
    """Peers that were there, with their versions."""
    there = [f"{name} {version}" for name, version in report["versions"].items() if version]
    return ", ".join(there) or "none"


def show_peers(report: Report, console: Console) -> None:
    """A table per operation, below them what has no time."""
    say(console, f"{ranks_of(report)} x {where(report)}, commit {commit_of(report)}: {model_of(report)}")
    for operation in operations_of(report):
        heads, lines = rows_of(report, operation, lambda result: shown_us(result["median_us"]))
        if lines:
            title = f"{operation}, us of the slowest rank by tokens per rank"
            print_table(console, title, ["by", *heads[1:]], lines)
    for line in [*excuses(report), f"versions of peers: {versions(report)}"]:
        say(console, line)
