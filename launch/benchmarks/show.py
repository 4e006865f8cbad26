"""Tables of a run on the console, for every kind of run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_runtime.launch.benchmarks import runs
from moe_runtime.launch.benchmarks.bounds import EVEN, needs_even_case, verdict
from moe_runtime.launch.benchmarks.gemm_cases import MEASURED_GPU
from moe_runtime.launch.benchmarks.layer_report import OURS, gpus_of
from moe_runtime.launch.benchmarks.link_rate import describe
from moe_runtime.launch.benchmarks.ops_table import print_operations
from moe_runtime.launch.benchmarks.runs import Report, Result, case_of, kind_of, ranks_of, shown_us, where

LAYER_COLUMNS = (
    *("operation", "by", "routing", "format", "tokens", "us", "spread", "of torch", "floor us", "goal us"),
    *("GB/s", "TFLOP/s", "peak GB", "hosts", "link", "network MB", "network GB/s", "network us", "check"),
)
"""`spread` is from the smallest time to the largest. `hosts` is their number and that of the ranks of each, `network
MB` what a rank sends to other hosts in a step, and `network us` the least time for it at `network GB/s`."""

GEMM_COLUMNS = (
    *("case", "rows", "us (sustained)", "floor us", "of floor", "TFLOP/s", "TB/s", "goal"),
    *("torch bf16", "torch fp8", "kernels"),
)

OPERATION_COLUMNS = ("operation", "format", "variant", "error / bound", "us", "TFLOP/s", "GB/s")
MODEL_COLUMNS = ("model", "weights x tokens", "tokens", "us", "of torch", "floor us", "of floor", "bound by", "check")
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

RELATIVE = ("of_case", "of_peer")
"""Kinds of goals that a run on any GPU is held to."""

MOST_COLUMNS = 400
"""Characters that a line may take."""


def show(report: Report, console: Console) -> None:
    """Print the tables of a run."""
    kinds = {
        runs.LAYER: _show_layer,
        runs.PHASES: _show_layer,
        runs.LOW_LATENCY: _show_layer,
        runs.NORMAL: _show_layer,
        runs.GEMM: _show_gemm,
        runs.OPERATIONS: _show_operations,
        runs.CHECKED: lambda report, console: print_operations(report, None, console),
        runs.LINKS: _show_links,
        runs.MODELS: _show_models,
    }
    kinds.get(kind_of(report), _show_fields)(report, console)


def _print(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, as wide as it needs: a terminal that breaks lines is easier to read than narrow columns."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in TEXTS else "right")
    for row in rows:
        table.add_row(*row)
    wide = console.options.update(width=MOST_COLUMNS)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _show_layer(report: Report, console: Console) -> None:
    """A line per operation and implementation; below them failed checks, rules, and phases where they were traced."""
    record, traced = report["environment"], kind_of(report) == runs.PHASES
    gpu = record["gpus"][0]["name"] if record["device"] == "cuda" else record["processor"]
    how = "traced, not timed" if traced else "the slowest rank, median over iterations"
    title = f"{ranks_of(report)} rank(s), {gpu}, transport {record['transport']}, engine {record['engine']}; {how}"
    rows = [_layer_cells(result) for result in report["results"]]
    # Empty columns are left out: all would hardly fit on a line.
    shown = [place for place in range(len(LAYER_COLUMNS)) if {row[place] for row in rows} - {"", EVEN}]
    columns = [LAYER_COLUMNS[place] for place in shown]
    _print(console, title, columns, [[row[place] for place in shown] for row in rows])
    if report.get("link") and any(result["floor_us"] is not None for result in report["results"]):
        _say(console, describe(report["link"], gpus_of(record)))
    for result in report["results"]:
        check, skew, case = result["check"], result["skew"], case_of(result)
        if check is not None and not check["passed"]:
            _say(console, f"{case}: FAILED {check['what']}: {check['error']:.3g} > {check['bound']:.3g}")
        if skew is not None:
            times = f"{_number(result['median_us'])} us, allowed {skew['allowed_us']:.1f}"
            _say(console, f"{case}: {times} by the rule for uneven routing: {verdict(skew['met'])}")
        elif result["implementation"] == OURS and needs_even_case(result):
            why = f"no {EVEN} routing was timed in this run"
            _say(console, f"{case}: not held to the rule for uneven routing, {why}")
        if result["phases"]:
            parts = ", ".join(f"{name} {times['mean_us']:.1f}" for name, times in result["phases"].items())
            _say(console, f"{case}, us in eager steps, mean over ranks: {parts}")


def _layer_cells(result: Result) -> list[str]:
    median, smallest, largest = (result[f"{name}_us"] for name in ("median", "smallest", "largest"))
    check, memory, ratio, goal = (result[name] for name in ("check", "memory", "ratio_to_torch", "goal"))
    word = "" if check is None else "ok" if check["passed"] else "[red]FAILED[/red]"
    untimed = "-" if check is not None and not check["passed"] else ""
    return [
        result["operation"],
        result["implementation"],
        result["routing"],
        f"{result['token_format']}>{result['combine_format']}",
        str(result["tokens_per_rank"]),
        *([untimed, ""] if median is None else [f"{median:.1f}", f"{(largest - smallest) / median:.0%}"]),
        "" if ratio is None else f"{ratio:.2f}",
        _number(result["floor_us"]),
        "" if goal is None else f"{goal['us']} {verdict(goal['met'])}",
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
        _number(result["network_floor_us"]),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def foreign_note(report: Report) -> str:
    """The GPU of the GEMM's ceilings where the run was on another or on none; else empty."""
    names = [gpu["name"] for gpu in report["environment"]["gpus"][:1]]
    return "" if names == [MEASURED_GPU] else f" on {MEASURED_GPU}, NOT what this ran on"


def _show_gemm(report: Report, console: Console) -> None:
    """A line per case; below them failed checks and baselines that are not available."""
    foreign = foreign_note(report)
    title = f"Grouped GEMM: {where(report)}, engine {report['environment']['gemm_engine']}"
    rows = [[text.replace("`", "") for text in gemm_cells(result, bool(foreign))] for result in report["results"]]
    _print(console, title, GEMM_COLUMNS, rows)
    if foreign:
        _say(console, f"Floors count what was measured{foreign}.")
    for result in report["results"]:
        for check in result["checks"]:
            if not check["passed"]:
                error = f"{check['error']:.3g} > {check['bound']:.3g}"
                _say(console, f"{result['case']}: FAILED {check['what']}: {error}")
    for name, why in sorted({(p["name"], p["why"]) for r in report["results"] for p in r["peers"] if p["why"]}):
        _say(console, f"{name}: not available: {why}")


def gemm_cells(result: Result, foreign: bool = False) -> list[str]:
    """Texts of a line, in the order of `GEMM_COLUMNS`; on a `foreign` GPU only relative goals."""
    numbers = [result["floor_us"], result["floor_share"], result["rate_tflop_per_s"], result["rate_tb_per_s"]]
    floor, share, flops, memory = numbers
    failed = not all(check["passed"] for check in result["checks"])
    baselines = {peer["name"].split()[2]: times_of(peer) for peer in result["peers"]}
    goals = [goal for goal in result["goals"] if not foreign or goal["kind"] in RELATIVE]
    return [
        result["case"],
        str(result["rows"]),
        "check failed" if failed else times_of(result),
        shown_us(floor),
        "" if share is None else f"{share:.0%}",
        "" if flops is None else f"{flops:.0f}",
        "" if memory is None else f"{memory:.2f}",
        "; ".join(f"{goal['text']}: {verdict(goal['met'])}" for goal in goals),
        *(baselines.get(kind, "") for kind in ("bf16", "fp8")),
        ", ".join(own_kernels(result)),
    ]


def own_kernels(result: Result) -> list[str]:
    """Kernels of the case, each once, without those of torch, whose names are mangled."""
    return list(dict.fromkeys(name for name in result["kernels"] if not name.startswith("_Z")))


def times_of(timed: Result) -> str:
    """The median, and in parentheses the sustained time, which old runs do not have."""
    sustained = timed.get("sustained_us")
    return shown_us(timed["median_us"]) + ("" if sustained is None else f" ({shown_us(sustained)})")


def _show_operations(report: Report, console: Console) -> None:
    rows = []
    for result in report["results"]:
        check = result["check"]
        found = f"{check['error']:.2g} / {check['bound']:.2g}" + ("" if check["passed"] else " FAILED")
        time = f"{result['median_us']:.1f}" if "median_us" in result else ""
        rates = [f"{result[key]:.3g}" if key in result else "" for key in ("rate_tflop_per_s", "rate_gb_per_s")]
        rows.append([result["operation"], result["format"], result["variant"], found, time, *rates])
    record = report["environment"]
    how = f"{record['engine']}{', interpreted' if record['interpreted'] else ''}"
    place = record["gpus"][0]["name"] if record["device"] == "cuda" else record["processor"]
    _print(console, f"{place}, engine {how}", OPERATION_COLUMNS, rows)


def _show_links(report: Report, console: Console) -> None:
    """GB/s out of each rank, a line for each way and size, a column for each number of blocks."""
    blocks = sorted({result["blocks"] for result in report["results"]})
    rates = {(r["way"], r["bytes_per_peer"], r["blocks"]): r["gb_per_s"] for r in report["results"]}
    rows = [
        [way, f"{size / 1e6:.2f}", *(f"{rates[way, size, n]:.0f}" for n in blocks)]
        for way, size in dict.fromkeys((r["way"], r["bytes_per_peer"]) for r in report["results"])
    ]
    title = f"{ranks_of(report)} x {runs.gpu_of(report)}: GB/s out of each rank"
    _print(console, title, ["way", "MB per peer", *(f"{n} blocks" for n in blocks)], rows)


def _show_models(report: Report, console: Console) -> None:
    rows = []
    for result in report["results"]:
        pair = f"{result['weight_format']} x {result['token_format']}"
        if "refused" in result:
            rows.append([result["model"], pair, "", "refused", "", "", "", result["refused"], ""])
            continue
        ratios = [_optional(result[key], "{:.2f}") for key in ("ratio_to_torch", "times_floor")]
        check = "ok" if result["check"]["passed"] else "FAILED"
        rows.append(
            [
                *(result["model"], pair, str(result["tokens"]), shown_us(result["median_us"]), ratios[0]),
                *(shown_us(result["floor_us"]), ratios[1], result["bound_by"] or "", check),
            ]
        )
    _print(console, f"layers of published sizes on {where(report)}", MODEL_COLUMNS, rows)


def _optional(value: float | None, shape: str) -> str:
    return "" if value is None else shape.format(value)


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
    _print(console, where(report), ("field", "value"), rows)
