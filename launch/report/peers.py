"""Peers beside us: tables of runs of `research.peers`, and of the layer in runs of `bench`, which has torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

USUAL = ("NVFP4", "FP8")
"""Our variants that stand beside implementations with weights that we have none of in a run."""

Series = dict[str, dict[int, Result]]
"""Results with a time, by name of the column or line and by tokens per rank."""


def name_of(result: Result) -> str:
    """Who did it, and in which variant."""
    return f"{NAMES[result['implementation']]} {result['variant']}".strip()


def series_of(report: Report, operation: str) -> Series:
    """Times of an operation, ours first; of equal cases the shortest."""
    return series_of_all([report], operation)


def series_of_all(reports: Sequence[Report], operation: str) -> Series:
    """The same of several runs."""
    results = [
        result
        for report in reports
        for result in (report["results"] if kind_of(report) == PEERS else _layers_of(report))
    ]
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
        mine, theirs = result["implementation"] == OURS, result["implementation"].startswith("torch")
        here = result["operation"] == "layer" and result["routing"] == EVEN and result["median_us"]
        if here and (mine or theirs):
            who = (OURS, FORMATS[result["token_format"]]) if mine else ("torch", "BF16")
            more = dict(zip(("implementation", "variant"), who, strict=True))
            # The oldest runs did not check torch.
            error = (result["check"] or {"error": 0.0})["error"]
            found.append(result | more | {"status": OK, "error": error})
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


def verdicts(report: Report) -> list[str]:
    """How times of the layer compare: a line for our formats, then one for each other implementation.

    An implementation stands beside those of ours with weights in its format, or else beside `USUAL`.
    """
    series = series_of(report, "layer")
    mine = {variant_of(line): line for line in series.values() if _is_ours(line)}
    best: dict[str, list[int]] = {}
    for count in sorted({count for line in mine.values() for count in line}):
        there = {name: line[count]["median_us"] for name, line in mine.items() if count in line}
        best.setdefault(min(there, key=lambda name: there[name]), []).append(count)
    lines = [f"fastest of ours: {'; '.join(f'{name} with {_tokens(counts)}' for name, counts in best.items())}"]
    for name, line in series.items():
        if not _is_ours(line):
            weights = variant_of(line).split()[0]
            alike = [our for our in mine if our.split()[0] == weights] or [our for our in USUAL if our in mine]
            parts = [part for our in alike if (part := _beside(our, mine[our], line))]
            lines.append(f"{', '.join(parts)} of the time of {name}" if parts else f"not compared with {name}")
    return lines


def variant_of(line: dict[int, Result]) -> str:
    """Of a line of a series."""
    return str(next(iter(line.values()))["variant"])


def _is_ours(line: dict[int, Result]) -> bool:
    return any(result["implementation"] == OURS for result in line.values())


def _beside(name: str, mine: dict[int, Result], other: dict[int, Result]) -> str:
    """What part of the other's time ours takes, and where it takes more; empty where no number of tokens is shared."""
    ratios = {count: mine[count]["median_us"] / other[count]["median_us"] for count in sorted(mine.keys() & other)}
    if not ratios:
        return ""
    slower = [count for count, ratio in ratios.items() if ratio > 1]
    more = f" (**slower** with {_counts(slower)})" if slower else ""
    return f"{name} takes {min(ratios.values()):.2f} to {max(ratios.values()):.2f}{more}"


def _counts(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _tokens(counts: Sequence[int]) -> str:
    return f"{_counts(counts)} {'token' if list(counts) == [1] else 'tokens'}"


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
