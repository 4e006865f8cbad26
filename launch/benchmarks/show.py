"""Tables on the console: a run of `bench` over a config, and how a table of any run is printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_runtime.launch.benchmarks.bounds import EVEN
from moe_runtime.launch.benchmarks.layer_report import PHASES_KIND, gpus_of
from moe_runtime.launch.benchmarks.link_rate import describe

Report = dict[str, Any]
Result = dict[str, Any]

LAYER_COLUMNS = (
    *("operation", "by", "routing", "format", "tokens", "us", "spread", "of torch", "floor us"),
    *("GB/s", "TFLOP/s", "peak GB", "hosts", "link", "network MB", "network GB/s", "network us", "check"),
)
"""`spread` is from the smallest time to the largest. `hosts` is their number and the ranks of each, `network
MB` what a rank sends to other hosts in a step, and `network us` the least time for it at `network GB/s`."""

TEXTS = (
    "operation",
    "by",
    "routing",
    "format",
    "case",
    "goal",
    "kernels",
    "variant",
    "way",
    "error / bound",
    "field",
    "model",
    "weights x tokens",
    "bound by",
    "hosts",
    "link",
)
"""Columns that are aligned to the left."""

MOST_COLUMNS = 400
"""Characters that a line may take."""


def show(report: Report, console: Console) -> None:
    """A line per operation and implementation; below them failed checks, and phases where they were traced."""
    record, traced = report["environment"], report.get("kind") == PHASES_KIND
    gpu = record["gpus"][0]["name"] if record["device"] == "cuda" else record["processor"]
    how = "traced, not timed" if traced else "the slowest rank, median over iterations"
    title = f"{record['ranks']} rank(s), {gpu}, transport {record['transport']}, engine {record['engine']}; {how}"
    rows = [_layer_cells(result) for result in report["results"]]
    # Empty columns are left out: all would hardly fit on a line.
    shown = [place for place in range(len(LAYER_COLUMNS)) if {row[place] for row in rows} - {"", EVEN}]
    columns = [LAYER_COLUMNS[place] for place in shown]
    print_table(console, title, columns, [[row[place] for place in shown] for row in rows])
    if report.get("link") and any(result["floor_us"] is not None for result in report["results"]):
        say(console, describe(report["link"], gpus_of(record)))
    for result in report["results"]:
        check, case = result["check"], case_of(result)
        if check is not None and not check["passed"]:
            say(console, f"{case}: FAILED {check['what']}: {check['error']:.3g} > {check['bound']:.3g}")
        if result["phases"]:
            parts = ", ".join(f"{name} {times['mean_us']:.1f}" for name, times in result["phases"].items())
            say(console, f"{case}, us in eager steps, mean over ranks: {parts}")


def _layer_cells(result: Result) -> list[str]:
    median, smallest, largest = (result[f"{name}_us"] for name in ("median", "smallest", "largest"))
    check, memory, ratio = (result[name] for name in ("check", "memory", "ratio_to_torch"))
    word = "" if check is None else "ok" if check["passed"] else "FAILED"
    untimed = "-" if check is not None and not check["passed"] else ""
    return [
        result["operation"],
        result["implementation"],
        result["routing"],
        f"{result['token_format']}>{result['combine_format']}",
        str(result["tokens_per_rank"]),
        *([untimed, ""] if median is None else [f"{median:.1f}", f"{(largest - smallest) / median:.0%}"]),
        "" if ratio is None else f"{ratio:.2f}",
        number(result["floor_us"]),
        *("" if (rate := result[key]) is None else f"{rate:.3g}" for key in ("rate_gb_per_s", "rate_tflop_per_s")),
        "" if memory is None else f"{memory['peak_bytes'] / 1e9:.2f}",
        *_network_cells(result),
        word if check is None else f"{word} {check['error']:.2g} <= {check['bound']:.2g}",
    ]


def _network_cells(result: Result) -> list[str]:
    """Hosts, link, MB, rate and least time; empty on one host, and in runs from before there were several."""
    if not result.get("hosts"):
        return [""] * 5
    sent, rate = result["network_bytes"], result["network_gb_per_s"]
    return [
        f"{result['hosts']}x{result['ranks_per_host']}",
        result["link"],
        "" if sent is None else f"{sent / 1e6:.3g}",
        "" if rate is None else f"{rate:.3g}",
        number(result["network_floor_us"]),
    ]


def formats_of(result: Result) -> str:
    return f"{result['token_format']} > {result['combine_format']}"


def case_of(result: Result) -> str:
    """Operation, formats, tokens and routing."""
    return f"{result['operation']} {formats_of(result)}, {result['tokens_per_rank']} tokens, {result['routing']}"


def number(value: float | None) -> str:
    """One decimal place; empty where there is none."""
    return "" if value is None else f"{value:.1f}"


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, as wide as it needs: a terminal that breaks lines is easier to read than narrow columns.

    Texts are shown as they are; a cell with a failure is red.
    """
    table = Table(title=Text(title))
    for column in columns:
        table.add_column(column, justify="left" if column in TEXTS else "right")
    for row in rows:
        table.add_row(*(Text(cell, "red" if "FAILED" in cell else "") for cell in row))
    wide = console.options.update(width=MOST_COLUMNS)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)


def say(console: Console, text: str) -> None:
    """Print a line as it is, however long."""
    console.print(text, markup=False, soft_wrap=True)
