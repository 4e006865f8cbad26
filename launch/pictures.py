"""Pictures of runs of `launch.bench`, from their JSON alone.

`python -m moe_runtime.launch.pictures RUN.json [RUN.json ...] --folder FOLDER` writes, as far as the runs have the
numbers: `dispatch.svg` and `combine.svg` (time against tokens per rank, beside the floor and torch's all-to-all),
`layer.svg` (beside a layer of torch and ours unfused), `phases.svg` (where the time of a layer goes, of runs with
`--trace`) and `scaling.svg` (the layer against the number of ranks). Runs are of one model; all but the last picture
are of the runs with the most ranks among those that have such numbers. A run that is missing or broken is left out,
which is said and makes the exit code 1, or 2 where no run is left.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.launch import environment, unfused_layer
from moe_runtime.launch.bounds import EVEN
from moe_runtime.launch.drawing import COLOURS, check_can_draw, new_figure, save
from moe_runtime.launch.layer_bench import OURS
from moe_runtime.launch.layer_report import PHASES_KIND, key_of, model_of, peers_of

STYLES = {"bf16": "-", "fp8_block": (0, (6, 2)), "mxfp8": (0, (3, 1, 1, 1))}
"""Lines by combine format."""

PEER = {"linestyle": "--", "marker": "x", "linewidth": 1, "alpha": 0.6}
FLOOR = {"linestyle": ":", "marker": "", "linewidth": 1}

PHASE_COLOURS = {
    "route": "tab:gray",
    "dispatch_send": "tab:blue",
    "shared_expert": "tab:olive",
    "dispatch_recv": "tab:cyan",
    "gate_up": "tab:green",
    "down": "yellowgreen",
    "combine_send": "tab:orange",
    "combine_recv": "gold",
}
"""Those that do not contain one another, in the order in which a step begins them."""

Result = dict[str, Any]
Report = dict[str, Any]


def read(file: Path) -> Report:
    """The JSON of a run.

    Raises `ValueError` naming the file if it is not one of `launch.bench` over a config, or cannot be read.
    """
    found: Report
    with environment.reading(file, "launch.bench over a config"):
        found = json.loads(file.read_text())
        if (kind := found.get("kind", PHASES_KIND)) != PHASES_KIND:
            raise ValueError(f"got kind {kind}")
        _taken(found)
    return found


def _taken(report: Report) -> list[object]:
    """What every picture takes from a run; raises as Python does where it is not there."""
    results = [(*key_of(r), r["implementation"], r["median_us"]) for r in report["results"]]
    return [_ranks(report), model_of(report), _gpu(report), *results]


def readable(files: Sequence[Path]) -> tuple[list[Report], list[str]]:
    """The runs that can be read, and why each of the others cannot."""
    reports, problems = [], []
    for file in files:
        try:
            reports.append(read(file))
        except ValueError as error:
            problems.append(str(error))
    return reports, problems


def draw(reports: Sequence[Report], folder: Path) -> list[Path]:
    """The pictures that the runs have numbers for, written into `folder`; their files.

    Raises `ValueError` where there is none, where the runs are of different models or GPUs, and without matplotlib.
    """
    check_can_draw("pictures")
    _check_alike(reports)
    makers: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: _against_tokens(reports, "dispatch"),
        "combine": lambda: _against_tokens(reports, "combine"),
        "layer": lambda: _against_tokens(reports, "layer"),
        "phases": lambda: _phases(reports),
        "scaling": lambda: _scaling(reports),
    }
    files = []
    for name, make in makers.items():
        figure = make()
        if figure is not None:
            files.append(folder / f"{name}.svg")
            save(figure, files[-1], name)
    if not files:
        raise ValueError("RUN: nothing to draw, no result of dispatch, combine or layer was timed")
    return files


def _largest(
    reports: Sequence[Report], choose: Callable[[Report], list[Result]]
) -> tuple[list[Report], list[Result]] | None:
    """The runs with the most ranks that have chosen results, and those of all of them; None where none has.

    Of several results of one case the last.
    """
    having = [report for report in reports if choose(report)]
    if not having:
        return None
    most = max(map(_ranks, having))
    having = [report for report in having if _ranks(report) == most]
    results = {(*key_of(r), r["implementation"]): r for report in having for r in choose(report)}
    return having, list(results.values())


def _check_alike(reports: Sequence[Report]) -> None:
    for what, of in (("model", model_of), ("GPU", _gpu)):
        found = list(dict.fromkeys(of(report) for report in reports))
        if len(found) > 1:
            raise ValueError(f"RUN: expected runs of one {what}, got {'; '.join(found)}")


def _ranks(report: Report) -> int:
    return int(report["environment"]["ranks"])


def _gpu(report: Report) -> str:
    record = report["environment"]
    return str(record["gpus"][0]["name"] if record["gpus"] else record["processor"])


def _title(report: Report, what: str) -> str:
    return f"{what}, {_ranks(report)} x {_gpu(report)}\n{model_of(report)}"


def _timed(report: Report, operation: str) -> list[Result]:
    return [r for r in report["results"] if r["operation"] == operation and r["median_us"]]


def _name(result: Result) -> str:
    return f"{result['token_format']} > {result['combine_format']}"


def _style(result: Result) -> dict[str, Any]:
    return {
        "color": COLOURS[result["token_format"]],
        "linestyle": STYLES[result["combine_format"]],
        "linewidth": 1,
        "marker": "o",
    }


def _against_tokens(reports: Sequence[Report], operation: str) -> Any:
    """A panel for each routing; None where nothing was timed."""
    largest = _largest(reports, lambda report: _timed(report, operation))
    if largest is None:
        return None
    shown, results = largest
    routings = list(dict.fromkeys(r["routing"] for r in results))
    figure = new_figure(max(7, 5 * len(routings)), 5)
    figure.suptitle(_title(shown[0], operation), fontsize=9)
    panels = figure.subplots(1, len(routings), squeeze=False, sharey=True)[0]
    for axes, routing in zip(panels, routings, strict=True):
        here = sorted((r for r in results if r["routing"] == routing), key=lambda r: int(r["tokens_per_rank"]))
        ours = [r for r in here if r["implementation"] == OURS]
        peers = peers_of(here)
        for name in dict.fromkeys(map(_name, ours)):
            line = [r for r in ours if _name(r) == name]
            axes.plot(*_times(line), **_style(line[0]), label=name)
            if operation != "layer":
                beside = [peers[key_of(r)] for r in line if key_of(r) in peers]
                axes.plot(*_times(beside), **_style(line[0]) | PEER)
                axes.plot(*_times([r for r in line if r.get("floor_us")], "floor_us"), **_style(line[0]) | FLOOR)
        if operation != "layer":
            axes.plot([], [], color="grey", **PEER, label="torch all-to-all of the same bytes")
            axes.plot([], [], color="grey", **FLOOR, label=_floor_label(shown, operation))
        unfused = [r for r in here if r["implementation"] == unfused_layer.NAME]
        for name in dict.fromkeys(map(_name, unfused)):
            line = [r for r in unfused if _name(r) == name]
            axes.plot(*_times(line), **_style(line[0]) | FLOOR)
        if unfused:
            axes.plot([], [], color="grey", **FLOOR, label="ours with experts in separate passes")
        if operation == "layer" and peers:
            # In bf16 whatever our format is: where it was timed beside several, the fastest.
            slowest_first = sorted(peers.values(), key=lambda r: -float(r["median_us"]))
            fastest = {r["tokens_per_rank"]: r for r in slowest_first}
            beside = [fastest[count] for count in sorted(fastest)]
            axes.plot(*_times(beside), color="black", **PEER, label=beside[0]["implementation"])
        axes.set(xscale="log", yscale="log", xlabel="tokens per rank", title=f"{routing} routing")
        counts = sorted({r["tokens_per_rank"] for r in here})
        axes.set_xticks(counts, labels=list(map(str, counts)), minor=False)
        axes.set_xticks([], minor=True)
        axes.legend(fontsize=7)
    panels[0].set(ylabel="us, the slowest rank")
    return figure


def _floor_label(reports: Sequence[Report], operation: str) -> str:
    """With the rate that the runs with floors counted with, where all of them say the same one."""
    with_floors = [report for report in reports if any(r.get("floor_us") for r in _timed(report, operation))]
    rates = {_rate(report.get("link")) for report in with_floors}
    return f"floor of the bytes{rates.pop() if len(rates) == 1 else ''}"


def _rate(link: dict[str, Any] | None) -> str:
    """How the label says it; empty where a run does not tell its rate."""
    if link is None:
        return ""
    other = f" of {link['gpu']}" if link["same_gpu"] is False else ""
    return f" at {link['gb_per_s']:g} GB/s{other}"


def _times(results: Sequence[Result], field: str = "median_us") -> tuple[list[int], list[float]]:
    return [r["tokens_per_rank"] for r in results], [r[field] for r in results]


def _phases(reports: Sequence[Report]) -> Any:
    """A bar for each traced layer, of its phases on the mean rank; None where nothing was traced."""
    largest = _largest(reports, lambda report: [r for r in report["results"] if r.get("phases")])
    if largest is None:
        return None
    (report, *_), results = largest
    figure = new_figure(9, 1.5 + 0.4 * len(results))
    axes = figure.subplots()
    times = [{name: r["phases"].get(name, {}).get("mean_us", 0.0) for name in PHASE_COLOURS} for r in results]
    totals = [sum(phases.values()) for phases in times]
    names = [
        f"{_name(r)}, T={r['tokens_per_rank']}, {r['routing']}: {total:.0f} us"
        for r, total in zip(results, totals, strict=True)
    ]
    starts = [0.0] * len(results)
    for phase, colour in PHASE_COLOURS.items():
        shares = [phases[phase] / (total or 1.0) for phases, total in zip(times, totals, strict=True)]
        if any(shares):
            axes.barh(names, shares, left=starts, color=colour, label=phase)
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of an eager step, mean over ranks", xlim=(0, 1))
    axes.set_title(_title(report, "phases of the layer"), fontsize=9)
    figure.legend(fontsize=7, loc="outside lower center", ncols=len(PHASE_COLOURS))
    return figure


def _scaling(reports: Sequence[Report]) -> Any:
    """The layer under uniform routing against ranks, a panel for each number of tokens per rank.

    None where no two runs with the same tokens and formats differ in their ranks.
    """
    lines: dict[tuple[int, str], dict[int, Result]] = {}
    for report in reports:
        for r in _timed(report, "layer"):
            if r["routing"] == EVEN and r["implementation"] != unfused_layer.NAME:
                by = _name(r) if r["implementation"] == OURS else r["implementation"]
                line = lines.setdefault((r["tokens_per_rank"], by), {})
                # A peer is timed beside each of our formats: the fastest, as above.
                line[_ranks(report)] = min(line.get(_ranks(report), r), r, key=lambda one: float(one["median_us"]))
    lines = {key: line for key, line in lines.items() if len(line) > 1}
    counts = sorted({count for count, _ in lines})
    if not counts:
        return None
    figure = new_figure(max(7, 3 * len(counts)), 4)
    where = f"{_gpu(reports[0])}\n{model_of(reports[0])}"
    figure.suptitle(f"layer at fixed tokens per rank, {EVEN} routing, {where}", fontsize=9)
    ticks = sorted({ranks for line in lines.values() for ranks in line})
    for axes, count in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        for (tokens, by), line in sorted(lines.items()):
            if tokens == count:
                ranks = sorted(line)
                ours = line[ranks[0]]["implementation"] == OURS
                style = _style(line[ranks[0]]) if ours else {"color": "black"} | PEER
                axes.plot(ranks, [line[n]["median_us"] for n in ranks], label=by, **style)
        axes.set(xlabel="ranks", xticks=ticks, ylim=(0, None), title=f"{count} tokens per rank")
    figure.axes[0].set(ylabel="us, the slowest rank")
    labelled = figure.axes[0].get_legend_handles_labels()
    figure.legend(*labelled, fontsize=7, loc="outside lower center", ncols=4)
    return figure


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.pictures", description="Pictures of runs.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json", help="what launch.bench --config wrote")
    parser.add_argument("--folder", type=Path, required=True, metavar="FOLDER", help="where the pictures go")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)

    def show() -> int:
        if not options.folder.is_dir():
            raise ValueError(f"--folder: no folder {options.folder}")
        reports, problems = readable(options.runs)
        for problem in problems:
            print(f"pictures: left out {problem}", file=sys.stderr)
        if not reports:
            return 2
        for file in draw(reports, options.folder):
            print(file)
        return int(bool(problems))

    return environment.run_program("pictures", show, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
