"""What `launch.bench` tells of its results: how they compare, the table, and the JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_runtime.config import RunConfig
from moe_runtime.launch import environment, unfused_layer
from moe_runtime.launch.bounds import EVEN, judge_goals, judge_skew, needs_even_case, verdict
from moe_runtime.launch.layer_bench import OURS
from moe_runtime.launch.link_rate import LinkRate, told

PHASES_KIND = "phases"
"""What the JSON of a run with `--trace` says it is: nothing in it was timed but phases."""

KEY = ("operation", "tokens_per_rank", "token_format", "weight_format", "combine_format", "mode", "routing")
"""What a result and its peer in the same run have in common."""

SIZES = ("hidden_size", "intermediate_size", "num_experts", "top_k")
"""Of a layer, by which runs of one model are told."""

COLUMNS = (
    *("operation", "by", "routing", "format", "tokens", "us", "spread", "of torch", "floor us", "goal us"),
    *("GB/s", "TFLOP/s", "peak GB", "check"),
)
TEXTS = ("operation", "by", "routing", "format")
"""Columns of the printed table; texts are aligned to the left. `spread` is from the smallest time to the largest."""


MOST_COLUMNS = 400
"""Of letters that the table may take."""


def settings_of(layer: dict[str, Any]) -> list[str]:
    """What a layer's config says of how its step is run, beside sizes and formats, for titles."""
    return [] if layer.get("num_sms") is None else [f"num_sms {layer['num_sms']}"]


def model_of(report: dict[str, Any]) -> str:
    """Sizes of the layer of a run, and its `settings_of`."""
    layer = report["config"]["layer"]
    return ", ".join([*(f"{name} {layer[name]}" for name in SIZES), *settings_of(layer)])


def key_of(result: dict[str, Any]) -> tuple[object, ...]:
    """What tells the peer of a result."""
    return tuple(result[name] for name in KEY)


def peers_of(results: list[dict[str, Any]]) -> dict[tuple[object, ...], dict[str, Any]]:
    """Those of torch, by `key_of`."""
    return {key_of(result): result for result in results if result["implementation"].startswith("torch")}


def compare(results: list[dict[str, Any]]) -> None:
    """Fill in `skew`, and our time over that of torch and over that of the unfused layer; None where one is missing."""
    unfused = {key_of(result): result for result in results if result["implementation"] == unfused_layer.NAME}
    peers = {"ratio_to_torch": peers_of(results), "ratio_to_unfused": unfused}
    ours = [result for result in results if result["implementation"] == OURS]
    for result in results:
        result |= dict.fromkeys((*peers, "skew", "goal"))
    for result in ours:
        for name, found in peers.items():
            peer = found.get(key_of(result))
            if peer is not None and peer["median_us"] and result["median_us"]:
                result[name] = result["median_us"] / peer["median_us"]
    judge_skew(ours)


def make_report(
    results: list[dict[str, Any]],
    record: dict[str, Any],
    run: RunConfig,
    link: LinkRate | None,
    *,
    traced: bool = False,
) -> dict[str, Any]:
    """The JSON of a run; `record` is that of the environment, empty but on rank 0; `traced` if nothing was timed.

    `link` is what floors count with, None where there are none.
    """
    compare(results)
    gpus = _gpus(record) if record else []
    ours = [result for result in results if result["implementation"] == OURS]
    if not traced:
        judge_goals(ours, run.layer.model_dump(), gpus)
    passed = all(result["check"] is None or result["check"]["passed"] for result in results)
    kind = {"kind": PHASES_KIND} if traced else {}
    floors = {"link": None if link is None else link.record(gpus)}
    return kind | {"environment": record, "config": run.model_dump(), **floors, "passed": passed, "results": results}


def _gpus(record: dict[str, Any]) -> list[str]:
    """Names of the GPUs that the ranks of a run have on its first host; none where it was on CPUs."""
    gpus = record["gpus"] if record["device"] == "cuda" else []
    return [gpu["name"] for gpu in gpus[: record["ranks"]]]


def write_report(report: dict[str, Any], file: Path) -> None:
    environment.write_json(file, report)


def print_results(report: dict[str, Any], console: Console) -> None:
    """One line per operation and implementation; below them what failed, rules, and phases where they were traced."""
    record = report["environment"]
    gpus = record["gpus"][0]["name"] if record["device"] == "cuda" else record["processor"]
    how = "traced, not timed" if report.get("kind") == PHASES_KIND else "the slowest rank, median over iterations"
    table = Table(
        title=f"{record['ranks']} rank(s), {gpus}, transport {record['transport']}, engine {record['engine']}; {how}"
    )
    rows = [_cells(result) for result in report["results"]]
    # Columns that say nothing are left out: there is hardly room for all.
    shown = [place for place in range(len(COLUMNS)) if {row[place] for row in rows} - {"", EVEN}]
    for column in (COLUMNS[place] for place in shown):
        table.add_column(column, justify="left" if column in TEXTS else "right")
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    # A line that a narrow terminal breaks can be read; columns of three letters cannot.
    wide = console.options.update(width=MOST_COLUMNS)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)
    if any(result["floor_us"] is not None for result in report["results"]):
        console.print(told(report["link"], _gpus(record)), markup=False, soft_wrap=True)
    for result in report["results"]:
        check, skew = result["check"], result["skew"]
        if check is not None and not check["passed"]:
            line = f"{_case(result)}: FAILED {check['what']}: {check['error']:.3g} > {check['bound']:.3g}"
            console.print(line, markup=False, soft_wrap=True)
        if skew is not None:
            console.print(
                f"{_case(result)}: {_number(result['median_us'])} us, allowed {skew['allowed_us']:.1f} by the rule for "
                f"uneven routing: {verdict(skew['met'])}",
                markup=False,
                soft_wrap=True,
            )
        elif result["implementation"] == OURS and needs_even_case(result):
            console.print(
                f"{_case(result)}: not held to the rule for uneven routing, no {EVEN} routing was timed in this run",
                markup=False,
                soft_wrap=True,
            )
        if result["phases"]:
            parts = ", ".join(f"{name} {times['mean_us']:.1f}" for name, times in result["phases"].items())
            console.print(f"{_case(result)}, us in eager steps, mean over ranks: {parts}", markup=False, soft_wrap=True)


def _case(result: dict[str, Any]) -> str:
    formats = f"{result['token_format']} > {result['combine_format']}"
    return f"{result['operation']} {formats}, {result['tokens_per_rank']} tokens, {result['routing']}"


def _cells(result: dict[str, Any]) -> list[str]:
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
        word if check is None else f"{word} {check['error']:.2g} <= {check['bound']:.2g}",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
