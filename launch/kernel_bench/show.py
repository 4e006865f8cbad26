"""Tables of the kernels' benchmarks on the console, and how any run is named in tables."""

from __future__ import annotations

import sys

from rich.console import Console

from moe_runtime.launch.benchmarks.show import Report, Result, print_table, say
from moe_runtime.launch.kernel_bench.ceilings import MEASURED_GPU

GEMM_COLUMNS = (
    *("case", "rows", "us (sustained)", "floor us", "of floor", "TFLOP/s", "TB/s", "goal"),
    *("torch bf16", "torch fp8", "kernels"),
)

OPERATION_COLUMNS = ("operation", "format", "variant", "error / bound", "us", "TFLOP/s", "GB/s")
MODEL_COLUMNS = ("model", "weights x tokens", "tokens", "us", "of torch", "floor us", "of floor", "bound by", "check")
RELATIVE = ("of_case", "of_peer")
"""Kinds of goals that a run on any GPU is held to."""


def show_gemm(report: Report, console: Console) -> None:
    """A line per case; below them failed checks and baselines that are not available."""
    foreign = foreign_note(report)
    title = f"Grouped GEMM: {where(report)}, engine {report['environment']['gemm_engine']}"
    rows = [[text.replace("`", "") for text in gemm_cells(result, bool(foreign))] for result in report["results"]]
    print_table(console, title, GEMM_COLUMNS, rows)
    if foreign:
        say(console, f"Floors count what was measured{foreign}.")
    for result in report["results"]:
        for check in result["checks"]:
            if not check["passed"]:
                error = f"{check['error']:.3g} > {check['bound']:.3g}"
                say(console, f"{result['case']}: FAILED {check['what']}: {error}")
    for name, why in sorted({(p["name"], p["why"]) for r in report["results"] for p in r["peers"] if p["why"]}):
        say(console, f"{name}: not available: {why}")


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


def foreign_note(report: Report) -> str:
    """The GPU of the GEMM's ceilings where the run was on another or on none; else empty."""
    names = [gpu["name"] for gpu in report["environment"]["gpus"][:1]]
    return "" if names == [MEASURED_GPU] else f" on {MEASURED_GPU}, NOT what this ran on"


def own_kernels(result: Result) -> list[str]:
    """Kernels of the case, each once, without torch's, whose names are mangled."""
    return list(dict.fromkeys(name for name in result["kernels"] if not name.startswith("_Z")))


def show_operations(report: Report, console: Console) -> None:
    """A line per operation and variant."""
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
    print_table(console, f"{place}, engine {how}", OPERATION_COLUMNS, rows)


def show_models(report: Report, console: Console) -> None:
    """A line per model, pair of formats and number of tokens; refused pairs say why."""
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
    print_table(console, f"layers of published sizes on {where(report)}", MODEL_COLUMNS, rows)


def _optional(value: float | None, shape: str) -> str:
    return "" if value is None else shape.format(value)


def verdict(met: bool | None) -> str:
    """How a goal or a rule came out, in a word."""
    return {True: "met", False: "missed", None: "unknown"}[met]


def wide_console() -> Console:
    """For a wide table: as wide as the terminal, or 200 columns where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def gpu_of(report: Report) -> str:
    """Name of the first GPU, or of the processor."""
    record = report["environment"]
    return str(record["gpus"][0]["name"] if record["gpus"] else record["processor"])


def where(report: Report) -> str:
    """GPU, driver and versions."""
    record = report["environment"]
    packages = ", ".join(f"{name} {record['packages'][name]}" for name in ("torch", "triton"))
    driver = f", driver {record['driver']}" if record["driver"] else ""
    return f"{gpu_of(report)}{driver}, {packages}"


def commit_of(report: Report) -> str:
    """The commit that the files of a run are of, and how many were modified."""
    record = report["environment"]
    if record.get("source_tree"):
        # "the files of <commit>, ..."
        return str(record["source_tree"]).removeprefix("the files of ")[:7]
    modified = record["git_modified_files"]
    return str(record["git_commit"])[:7] + (f" with {modified} modified files" if modified else "")


def shown_us(microseconds: float | None) -> str:
    """Three digits or more; "n/a" where there is no time."""
    if microseconds is None:
        return "n/a"
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def times_of(timed: Result) -> str:
    """The median, and in parentheses the sustained time, which old runs do not have."""
    sustained = timed.get("sustained_us")
    return shown_us(timed["median_us"]) + ("" if sustained is None else f" ({shown_us(sustained)})")
