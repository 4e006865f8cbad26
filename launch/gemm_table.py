"""The table and the roofline of `launch.bench gemm`, from its JSON alone.

`python -m moe_runtime.launch.gemm_table RUN.json [--picture FILE]` shows them again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_runtime.launch import environment
from moe_runtime.launch.bounds import verdict
from moe_runtime.launch.drawing import COLOURS, check_can_draw, new_figure, save
from moe_runtime.launch.environment import shown_us, where
from moe_runtime.launch.gemm_cases import BF16_TFLOP_PER_S, FP8_TFLOP_PER_S, MEASURED_GPU, MEMORY_TB_PER_S

KIND = "gemm"
"""What the JSON says it is."""

COLUMNS = (
    "case",
    "rows",
    "us (sustained)",
    "floor us",
    "of floor",
    "TFLOP/s",
    "TB/s",
    "goal",
    "torch bf16",
    "torch fp8",
    "kernels",
)
"""`sustained` stands in parentheses where it was timed, behind peers' microseconds, too."""

SHORT_CASES = ("32x32 both", "32x1024 both", "8x4096 gate_up")
"""What the short table shows of each format: a decode step, a prefill step, and one large product."""

SHORT_COLUMNS = ("case", "us (sustained)", "floor us", "of floor", "torch bf16", "torch fp8")
"""Of `COLUMNS`."""

RELATIVE = ("of_case", "of_peer")
"""Kinds of goals that a run on any GPU is held to."""

MARKERS = {"gate_up": "^", "down": "v", "both": "o"}


def cells(result: dict[str, Any], elsewhere: bool = False) -> list[str]:
    """Texts of a line, in the order of `COLUMNS`; `elsewhere` than on `MEASURED_GPU` it has no goals in numbers."""
    numbers = [result["floor_us"], result["floor_share"], result["rate_tflop_per_s"], result["rate_tb_per_s"]]
    floor, share, flops, memory = numbers
    failed = not all(check["passed"] for check in result["checks"])
    peers = {peer["name"].split()[2]: _times(peer) for peer in result["peers"]}
    held = [goal for goal in result["goals"] if not elsewhere or goal["kind"] in RELATIVE]
    goals = [f"{goal['text']}: {verdict(goal['met'])}" for goal in held]
    return [
        result["case"],
        str(result["rows"]),
        "check failed" if failed else _times(result),
        shown_us(floor),
        "" if share is None else f"{share:.0%}",
        "" if flops is None else f"{flops:.0f}",
        "" if memory is None else f"{memory:.2f}",
        "; ".join(goals),
        *(peers.get(kind, "") for kind in ("bf16", "fp8")),
        ", ".join(own_kernels(result)),
    ]


def own_kernels(result: dict[str, Any]) -> list[str]:
    """Kernels of the case, each once, without those of torch, whose names are those of C++ templates."""
    return list(dict.fromkeys(name for name in result["kernels"] if not name.startswith("_Z")))


def _times(timed: dict[str, Any]) -> str:
    """The median, and what it takes without rests. (Before those were timed, files said nothing of them.)"""
    sustained = timed.get("sustained_us")
    return shown_us(timed["median_us"]) + ("" if sustained is None else f" ({shown_us(sustained)})")


def foreign_note(report: dict[str, Any]) -> str:
    """On which GPU ceilings were measured, where the run was on another or on none; empty where it is the same."""
    names = [gpu["name"] for gpu in report["environment"]["gpus"][:1]]
    return "" if names == [MEASURED_GPU] else f" on {MEASURED_GPU}, NOT what this ran on"


def print_table(report: dict[str, Any], console: Console) -> None:
    """A line per case; under it the checks that failed and the peers that there are not."""
    table = Table(title=f"Grouped GEMM: {where(report)}, engine {report['environment']['gemm_engine']}")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("case", "goal", "kernels") else "right", overflow="fold")
    for result in report["results"]:
        table.add_row(*(text.replace("`", "") for text in cells(result, bool(foreign_note(report)))))
    console.print(table)
    if foreign := foreign_note(report):
        console.print(f"Floors count what was measured{foreign}.", markup=False)
    for result in report["results"]:
        for check in result["checks"]:
            if not check["passed"]:
                line = f"{result['case']}: FAILED {check['what']}: {check['error']:.3g} > {check['bound']:.3g}"
                console.print(line, markup=False)
    for name, why in sorted({(p["name"], p["why"]) for r in report["results"] for p in r["peers"] if p["why"]}):
        console.print(f"{name}: not available: {why}", markup=False)


def markdown(report: dict[str, Any], source: str, picture: str | None = None) -> str:
    """The whole table; `source` and `picture` are paths of files."""
    foreign = foreign_note(report)
    lines = [
        f"{where(report)}. Floors count {MEMORY_TB_PER_S} TB/s, {BF16_TFLOP_PER_S:.0f} TFLOP/s in bf16 and, for "
        f"`fp8_block`, {FP8_TFLOP_PER_S:.0f} in fp8, all measured{foreign}; peers are torch's `grouped_mm` in "
        "bf16 and `scaled_grouped_mm` with a scale per row, without activation, in the same run. Medians of steps "
        "after rests; in parentheses what steps of a millisecond or more take without them. Spread, times of each "
        f"product and errors are in the [JSON]({source}), written by `{report['environment']['command']}`.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|" + "---:|" * 6 + "---|" + "---:|" * 2 + "---|",
        *(f"| {' | '.join(cells(result, bool(foreign)))} |" for result in report["results"]),
    ]
    return "\n".join([*lines, "", f"![Achieved rates under the roofline]({picture})"] if picture else lines)


def short_markdown(report: dict[str, Any], source: str) -> str:
    """A table of `SHORT_CASES` in each format that has them; `source` is the path of the file."""
    shown = [COLUMNS.index(name) for name in SHORT_COLUMNS]
    found = [result for result in report["results"] if result["case"].partition(" ")[2] in SHORT_CASES]
    lines = [[line[i] for i in shown] for line in map(cells, found)]
    return "\n".join(
        [
            f"{where(report)}; all numbers are in the [JSON]({source}), written by "
            f"`{report['environment']['command']}`.",
            "",
            f"| {' | '.join(SHORT_COLUMNS)} |",
            "|---|" + "---:|" * (len(SHORT_COLUMNS) - 1),
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )


def draw(report: dict[str, Any], file: Path) -> None:
    """A roofline: achieved TFLOP/s of each case (filled) and what its floor would give (hollow).

    Raises `ValueError` where matplotlib is not installed.
    """
    check_can_draw("--picture")
    timed = [result for result in report["results"] if result["median_us"]]
    figure = new_figure(9, 6)
    axes = figure.subplots()
    intensities = [result["work_flop"] / result["moved_bytes"] for result in timed] or [1.0]
    ends = [min(intensities) / 2, max([*intensities, 500.0]) * 2]
    for ceiling, name in ((BF16_TFLOP_PER_S, "bf16"), (FP8_TFLOP_PER_S, "fp8")):
        corner = ceiling / MEMORY_TB_PER_S
        x = sorted([*ends, corner])
        y = [min(ceiling, MEMORY_TB_PER_S * value) for value in x]
        axes.plot(x, y, color="black", linewidth=1, linestyle="-" if name == "bf16" else "--")
        axes.annotate(f"{name} {ceiling:.0f} TFLOP/s", (ends[1], ceiling), ha="right", va="bottom", fontsize=8)
    for result, intensity in zip(timed, intensities, strict=False):
        colour, marker = COLOURS[result["format"]], MARKERS[result["product"]]
        rates = [result["rate_tflop_per_s"], result["work_flop"] / result["floor_us"] * 1e-6]
        axes.plot([intensity] * 2, rates, color=colour, linewidth=0.5)
        axes.plot(intensity, rates[0], color=colour, marker=marker, linestyle="none")
        axes.plot(intensity, rates[1], color=colour, marker=marker, linestyle="none", fillstyle="none")
    for fmt in dict.fromkeys(result["format"] for result in timed):
        axes.plot([], [], color=COLOURS[fmt], marker="s", linestyle="none", label=fmt)
    for product in dict.fromkeys(result["product"] for result in timed):
        axes.plot([], [], color="grey", marker=MARKERS[product], linestyle="none", label=product)
    for label, style in (("achieved", "full"), ("at its floor", "none")):
        axes.plot([], [], color="grey", marker="o", linestyle="none", fillstyle=style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    foreign = foreign_note(report)
    axes.set_title(where(report) + (f"\nceilings measured{foreign}" if foreign else ""))
    axes.legend(fontsize=8)
    save(figure, file, KIND)


def read(file: Path) -> dict[str, Any]:
    """The JSON of `file`. Raises `ValueError` if it is of another kind."""
    found: dict[str, Any] = json.loads(file.read_text())
    if found.get("kind") != KIND:
        raise ValueError(f"{file.name}: expected kind {KIND}, got {found.get('kind')}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.gemm_table", description="Show a run again.")
    parser.add_argument("run", type=Path, metavar="RUN.json", help="what launch.bench gemm wrote")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the roofline")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)

    def show() -> int:
        environment.check_folder("--picture", options.picture)
        report = read(options.run)
        print_table(report, environment.wide_console())
        if options.picture is not None:
            draw(report, options.picture)
        return 0

    return environment.run_program("gemm_table", show, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
