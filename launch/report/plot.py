"""Plots of runs: time against tokens, phases of a traced layer, and rooflines of the exchange and the grouped GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_runtime.launch.benchmarks.bounds import EVEN
from moe_runtime.launch.benchmarks.layer_report import KEY, OURS, baselines_of, key_of
from moe_runtime.launch.benchmarks.show import Report, Result, formats_of
from moe_runtime.launch.kernel_bench.ceilings import BF16_TFLOP_PER_S, FP8_TFLOP_PER_S, MEMORY_TB_PER_S
from moe_runtime.launch.kernel_bench.show import commit_of, foreign_note, gpu_of, where
from moe_runtime.launch.report.goals import OLD_MODES, memory_bytes
from moe_runtime.launch.report.peers import series_of
from moe_runtime.launch.report.runs import check_alike, model_of, ranks_of
from moe_runtime.support.arguments import describe

COLOURS = {"nvfp4": "tab:green", "fp8_block": "tab:blue", "mxfp8": "tab:orange", "bf16": "tab:red"}
"""By token format."""
STYLES = {"bf16": "-", "fp8_block": (0, (6, 2)), "mxfp8": (0, (3, 1, 1, 1))}
"""By combine format."""
BASELINE = {"linestyle": "--", "marker": "x", "linewidth": 1, "alpha": 0.6}
FLOOR = {"linestyle": ":", "marker": "", "linewidth": 1}
PRODUCTS = {"gate_up": "^", "down": "v", "both": "o"}
PHASES = {
    "route": "tab:gray",
    "dispatch_send": "tab:blue",
    "shared_expert": "tab:olive",
    "dispatch_recv": "tab:cyan",
    "gate_up": "tab:green",
    "down": "yellowgreen",
    "combine_send": "tab:orange",
    "combine_recv": "gold",
}
"""Phases that do not contain one another, in the order of a step."""
EXCHANGE_MARKERS = {"dispatch": "o", "combine": "s"}
MOST = 1e18
"""More than any time in us, number of bytes or size of a run; its inverse is less. Beyond them matplotlib fails."""
FORMER = {"dispatch_recv": "dispatch_wait", "combine_recv": "combine_wait"}
"""Names of phases in runs of release 0.1."""


def check_can_draw(option: str) -> None:
    """Raise `ValueError` naming the option that needs it where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option}: needs matplotlib, the extra `bench`")


def check_fields(report: Report) -> None:
    """Raise `ValueError` naming a field of a run over a config with which nothing can be drawn; or as Python does."""
    ranks = _expect("environment.ranks", report["environment"]["ranks"], int)
    for name in ("hidden_size", "top_k"):
        _expect(f"config.layer.{name}", report["config"]["layer"][name], int)
    if report.get("link") is not None:
        _expect("link.gb_per_s", report["link"]["gb_per_s"], int, float)
        _expect("link.gpu", report["link"]["gpu"], str)
        _expect("link.same_gpu", report["link"]["same_gpu"], bool)
    for number, result in enumerate(report["results"]):
        where = f"results[{number}]"
        for name in ("implementation", *KEY):
            _expect(f"{where}.{name}", result[name], int if name == "tokens_per_rank" else str)
        for name, known in (("token_format", COLOURS), ("combine_format", STYLES)):
            if result[name] not in known:
                raise ValueError(f"{where}.{name}: expected {', '.join(known)}, got {describe(result[name])}")
        for name in ("median_us", "floor_us", "moved_bytes"):
            value = result["median_us"] if name == "median_us" else result.get(name)
            if value not in (None, 0):
                _expect(f"{where}.{name}", value, int, float)
        if ranks == 1 and result.get("moved_bytes"):
            raise ValueError(f"{where}.moved_bytes: expected 0 of one rank, got {describe(result['moved_bytes'])}")
        for phase, times in _expect(f"{where}.phases", result["phases"] or {}, dict).items():
            mean_us = _expect(f"{where}.phases.{phase}", times, dict).get("mean_us", 0)
            if mean_us != 0:
                _expect(f"{where}.phases.{phase}.mean_us", mean_us, int, float)


def _expect(field: str, value: Any, *kinds: type) -> Any:
    """`value`, if it is of one of `kinds`, and as a number drawable; else `ValueError` naming the field."""
    if type(value) not in kinds or (type(value) in (int, float) and not 1 / MOST < value < MOST):
        names = " or ".join(kind.__name__ for kind in kinds) + (" above 0" if int in kinds else "")
        raise ValueError(f"{field}: expected {names}, got {describe(value)}")
    return value


def draw(reports: Sequence[Report], folder: Path) -> list[Path]:
    """`times.svg`, `exchange.svg` and `phases.svg` of runs over a config, those that can be drawn; returns the files.

    Each plot shows the runs with the most ranks. Raises `ValueError` where there is nothing to draw, or where the runs
    are of different models or GPUs.
    """
    check_alike(reports)
    files = []
    for name, figure in (("times", _times(reports)), ("exchange", _exchange(reports)), ("phases", _phases(reports))):
        if figure is not None:
            files.append(folder / f"{name}.svg")
            save(figure, files[-1])
    if not files:
        raise ValueError("RUN: nothing to draw, no dispatch, combine or layer was timed")
    return files


def save(figure: Any, file: Path) -> None:
    """Write a small file, the same for the same values: without a date, letters as text."""
    from matplotlib import rc_context

    metadata = {"Date": None} if file.suffix == ".svg" else None
    fonts = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    with rc_context({"svg.hashsalt": "moe_runtime", **fonts}):
        figure.savefig(file, dpi=150, metadata=metadata)
    if file.suffix == ".svg":
        file.write_text("\n".join(line.strip() for line in file.read_text().splitlines() if line.strip()) + "\n")


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _largest(reports: Sequence[Report], field: str, operation: str) -> tuple[list[Report], list[Result]]:
    """The runs with the most ranks that have `field` in results of an operation, and these; of equal cases the last."""
    having = [
        (report, found)
        for report in reports
        if (found := [r for r in report["results"] if r["operation"] == operation and r[field]])
    ]
    most = max((ranks_of(report) for report, _ in having), default=0)
    chosen = [(report, found) for report, found in having if ranks_of(report) == most]
    results = {(*key_of(r), r["implementation"]): r for _, found in chosen for r in found}
    return [report for report, _ in chosen], list(results.values())


def _times(reports: Sequence[Report]) -> Any:
    """A panel per operation and routing; None where nothing was timed."""
    panels = []
    for operation in ("dispatch", "combine", "layer"):
        shown, results = _largest(reports, "median_us", operation)
        for routing in dict.fromkeys(r["routing"] for r in results):
            here = sorted((r for r in results if r["routing"] == routing), key=lambda r: int(r["tokens_per_rank"]))
            panels.append((operation, routing, shown, here))
    if not panels:
        return None
    figure = _figure(4.5 * len(panels), 4.5)
    figure.suptitle(f"{gpu_of(panels[0][2][0])}, {model_of(panels[0][2][0])}", fontsize=9)
    for axes, (operation, routing, shown, results) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _time_panel(axes, operation, results)
        suffix = "" if routing == EVEN else f", {routing} routing"
        axes.set_title(f"{operation}, {ranks_of(shown[0])} GPUs{suffix}", fontsize=9)
        if operation != "layer":
            axes.plot([], [], color="grey", **BASELINE, label="torch all-to-all of the same bytes")
            axes.plot([], [], color="grey", **FLOOR, label=f"floor of the bytes{_rate(shown)}")
        if operation == "layer" or axes is figure.axes[0]:
            axes.legend(fontsize=7)
    figure.axes[0].set_ylabel("us, the slowest rank")
    return figure


def _time_panel(axes: Any, operation: str, results: Sequence[Result]) -> None:
    ours, baselines = [r for r in results if r["implementation"] == OURS], baselines_of(list(results))
    for name in dict.fromkeys(map(formats_of, ours)):
        line = [r for r in ours if formats_of(r) == name]
        style = {"color": COLOURS[line[0]["token_format"]], "linestyle": STYLES[line[0]["combine_format"]]}
        axes.plot(*_points(line), linewidth=1, marker="o", label=name, **style)
        if operation != "layer":
            axes.plot(*_points([baselines[key_of(r)] for r in line if key_of(r) in baselines]), **style | BASELINE)
            axes.plot(*_points([r for r in line if r.get("floor_us")], "floor_us"), **style | FLOOR)
    if operation == "layer" and baselines:
        # The baseline is in bf16 for all our formats: the fastest one that was timed.
        slowest_first = sorted(baselines.values(), key=lambda r: -float(r["median_us"]))
        fastest = {r["tokens_per_rank"]: r for r in slowest_first}
        line = [fastest[count] for count in sorted(fastest)]
        axes.plot(*_points(line), color="black", **BASELINE, label=line[0]["implementation"])
    axes.set(xscale="log", yscale="log", xlabel="tokens per rank")
    counts = sorted({r["tokens_per_rank"] for r in results})
    axes.set_xticks(counts, labels=list(map(str, counts)), fontsize=7)
    axes.minorticks_off()


def _points(results: Sequence[Result], field: str = "median_us") -> tuple[list[int], list[float]]:
    return [r["tokens_per_rank"] for r in results], [r[field] for r in results]


def _exchange(reports: Sequence[Report]) -> Any:
    """What dispatch and combine reach of a roofline of the links and the memory; None where nothing crossed a link.

    Lines join the numbers of tokens of a case. A case at the slope is bound by memory, one at the level by the links,
    and one below both by latency.
    """
    found = {}
    for operation in EXCHANGE_MARKERS:
        shown, results = _largest(reports, "median_us", operation)
        ours = [r for r in results if r["implementation"] == OURS and r["routing"] == EVEN]
        found[operation] = [r for r in ours if r.get("moved_bytes")]
    links = [report["link"] for report in shown if report.get("link")]
    if not links or not any(found.values()):
        return None
    figure = _figure(7, 5)
    axes = figure.subplots()
    ranks, sizes, link = ranks_of(shown[0]), shown[0]["config"]["layer"], links[0]["gb_per_s"]
    intensities = []
    for operation, results in found.items():
        for name in dict.fromkeys(_exchange_case(r) for r in results):
            # Combine does not depend on the format of tokens: one of those that were timed.
            alike = {int(r["tokens_per_rank"]): r for r in results if _exchange_case(r) == name}
            line = [alike[count] for count in sorted(alike)]
            fmt = line[0]["combine_format" if operation == "combine" else "token_format"]
            x = [memory_bytes(r, sizes, ranks) / r["moved_bytes"] for r in line]
            y = [r["moved_bytes"] / r["median_us"] * 1e-3 for r in line]
            intensities += x
            style = {"color": COLOURS[fmt], "marker": EXCHANGE_MARKERS[operation], "linewidth": 0.5, "markersize": 4}
            axes.plot(x, y, label=name, **style)
            for r, at, rate in zip(line, x, y, strict=True):
                axes.annotate(str(r["tokens_per_rank"]), (at, rate), fontsize=6)
    memory = MEMORY_TB_PER_S * 1e3
    ends = sorted([min(intensities) / 1.5, memory / link, max(*intensities, memory / link) * 1.5])
    axes.plot(ends, [min(link, memory / x) for x in ends], color="black", linewidth=1)
    axes.annotate(f"links {link:g} GB/s", (ends[0], link), va="bottom", fontsize=8)
    axes.annotate(f"memory {MEMORY_TB_PER_S:g} TB/s", (ends[2], memory / ends[2]), ha="right", va="bottom", fontsize=8)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes of memory for each byte over the links", ylabel="GB/s over the links"
    )
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50) if ends[0] <= tick <= ends[2]]
    axes.set_xticks(ticks, labels=list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_title(
        f"exchange, {ranks} x {gpu_of(shown[0])}; numbers are tokens per rank\n{model_of(shown[0])}", fontsize=9
    )
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    return figure


def _exchange_case(result: Result) -> str:
    if result["operation"] == "combine":
        return f"combine {result['combine_format']}"
    return f"dispatch {result['token_format']}, rows {OLD_MODES.get(result['mode'], result['mode'])}"


def _rate(reports: Sequence[Report]) -> str:
    """The rate that the floors count with; empty where runs differ in it or do not name it."""
    with_floors = [report for report in reports if any(r.get("floor_us") for r in report["results"])]
    rates = {str(report.get("link")): report.get("link") for report in with_floors}
    link = next(iter(rates.values()), None)
    if link is None or len(rates) > 1:
        return ""
    return f" at {link['gb_per_s']:g} GB/s" + (f" of {link['gpu']}" if link["same_gpu"] is False else "")


def _phases(reports: Sequence[Report]) -> Any:
    """A bar per traced layer with its phases, mean over ranks; None where nothing was traced."""
    shown, results = _largest(reports, "phases", "layer")
    if not results:
        return None
    figure = _figure(9, 1.5 + 0.4 * len(results))
    axes = figure.subplots()
    times = [
        {name: r["phases"].get(name, r["phases"].get(FORMER.get(name), {})).get("mean_us", 0.0) for name in PHASES}
        for r in results
    ]
    totals = [sum(phases.values()) or 1.0 for phases in times]
    names = [
        f"{formats_of(r)}, T={r['tokens_per_rank']}, {r['routing']}: {total:.0f} us"
        for r, total in zip(results, totals, strict=True)
    ]
    starts = [0.0] * len(results)
    for phase, colour in PHASES.items():
        shares = [phases[phase] / total for phases, total in zip(times, totals, strict=True)]
        if any(shares):
            axes.barh(names, shares, left=starts, color=colour, label=phase)
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of an eager step, mean over ranks", xlim=(0, 1))
    title = f"phases of the layer, {ranks_of(shown[0])} x {gpu_of(shown[0])}\n{model_of(shown[0])}"
    axes.set_title(title, fontsize=9)
    figure.legend(fontsize=7, loc="outside lower center", ncols=len(PHASES))
    return figure


def draw_layer(report: Report, file: Path) -> None:
    """Time of the layer against tokens, of every implementation of a run; ours are solid lines.

    Raises `ValueError` where no layer was timed.
    """
    series = series_of(report, "layer")
    if not series:
        raise ValueError("RUN: nothing to draw, no layer was timed")
    figure = _figure(7, 5)
    axes = figure.subplots()
    for name, line in series.items():
        counts = sorted(line)
        mine = line[counts[0]]["implementation"] == OURS
        style = {"marker": "o", "linewidth": 1.5} if mine else {"linestyle": "--", "marker": "x", "linewidth": 1}
        axes.plot(counts, [line[count]["median_us"] for count in counts], label=name, **style)
    counts = sorted({count for line in series.values() for count in line})
    axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="us of a layer, the slowest rank")
    axes.set_xticks(counts, labels=list(map(str, counts)), fontsize=7)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    where_ran = f"{ranks_of(report)} x {gpu_of(report)}, commit {commit_of(report)}"
    axes.set_title(f"{where_ran}\n{model_of(report)}", fontsize=9)
    axes.legend(fontsize=8)
    save(figure, file)


def draw_roofline(report: Report, file: Path) -> None:
    """The rate of each GEMM case (filled) and what its floor would give (hollow), below the ceilings."""
    timed = [result for result in report["results"] if result["median_us"]]
    figure = _figure(9, 6)
    axes = figure.subplots()
    intensities = [result["work_flop"] / result["moved_bytes"] for result in timed] or [1.0]
    ends = [min(intensities) / 2, max([*intensities, 500.0]) * 2]
    for ceiling, name, style in ((BF16_TFLOP_PER_S, "bf16", "-"), (FP8_TFLOP_PER_S, "fp8", "--")):
        x = sorted([*ends, ceiling / MEMORY_TB_PER_S])
        axes.plot(
            x, [min(ceiling, MEMORY_TB_PER_S * value) for value in x], color="black", linewidth=1, linestyle=style
        )
        axes.annotate(f"{name} {ceiling:.0f} TFLOP/s", (ends[1], ceiling), ha="right", va="bottom", fontsize=8)
    for kind in dict.fromkeys((result["format"], result["product"]) for result in timed):
        here = [(r, at) for r, at in zip(timed, intensities, strict=False) if (r["format"], r["product"]) == kind]
        points = {"color": COLOURS[kind[0]], "marker": PRODUCTS[kind[1]], "linestyle": "none"}
        at = [intensity for _, intensity in here]
        axes.plot(at, [r["rate_tflop_per_s"] for r, _ in here], label=" ".join(kind), **points)
        axes.plot(at, [r["work_flop"] / r["floor_us"] * 1e-6 for r, _ in here], fillstyle="none", **points)
    axes.plot([], [], color="grey", marker="o", linestyle="none", fillstyle="none", label="at its floor")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.minorticks_off()
    foreign = foreign_note(report)
    axes.set_title(where(report) + (f"\nceilings measured{foreign}" if foreign else ""))
    axes.legend(fontsize=8)
    save(figure, file)
