"""Shows, compares and plots runs of the benchmarks, from their JSON alone.

`python -m moe_runtime.launch.report show RUN.json` prints the tables of a run of any kind. `compare A.json B.json`
says for each time of both runs whether B's median lies within A's spread; the exit code is 1 if one does not. `plot
RUN.json ... --folder FOLDER` draws time against tokens, phases, a roofline for each run of the grouped GEMM, and the
layer beside peers. `tables [--check]` rewrites the tables of README.md, docs and launch/results/README.md; with
`--check` the exit code says whether they are out of date. `picture` draws launch/results/layer.svg from the run that
README.md shows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_runtime.launch.benchmarks.show import Report
from moe_runtime.launch.common import environment
from moe_runtime.launch.kernel_bench.show import wide_console
from moe_runtime.launch.report import pages, runs
from moe_runtime.launch.report.compare import compare, differences, sizes
from moe_runtime.launch.report.plot import check_can_draw, check_fields, draw, draw_layer, draw_roofline
from moe_runtime.launch.report.runs import figures
from moe_runtime.launch.report.show import show

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "launch" / "results"
PICTURE = "layer.svg"
DRAWN_ALONE = {runs.GEMM: draw_roofline, runs.PEERS: draw_layer}
"""By kind of run: those that have a picture for each file."""


def show_run(options: argparse.Namespace) -> int:
    """Print the tables of a run."""
    report = runs.read(options.run)
    with runs.reading(options.run, "a run"):
        show(report, wide_console())
    return 0


def compare_runs(options: argparse.Namespace) -> int:
    """1 if a time of the second run is outside the spread of the first."""
    return int(not compare(_with_times(options.a), _with_times(options.b), wide_console()))


def _with_times(file: Path) -> Report:
    """A run with times; an incomplete one is found here and not in the middle of the comparison."""
    report = runs.read(file)
    with runs.reading(file, "a run with times"):
        differences(report, report)
        sizes(report)
        if not figures(report):
            raise ValueError("got no times")
    return report


def plot_runs(options: argparse.Namespace) -> int:
    """Draw what can be read; 1 if a run was left out, 2 if none is left."""
    if not options.folder.is_dir():
        raise ValueError(f"--folder: no folder {options.folder}")
    check_can_draw("plot")
    reports = dict(_those_that_can(options.runs, _drawable))
    layers = [report for report in reports.values() if runs.kind_of(report) not in DRAWN_ALONE]
    runs.check_alike(layers)  # before a picture is written
    alone = [file for file, report in reports.items() if runs.kind_of(report) in DRAWN_ALONE]

    def draw_one(file: Path) -> Path:
        picture = options.folder / f"{file.stem}.svg"
        with runs.reading(file, "a whole run"):
            DRAWN_ALONE[runs.kind_of(reports[file])](reports[file], picture)
        return picture

    drawn = dict(_those_that_can(alone, draw_one))
    files = [*drawn.values(), *(draw(layers, options.folder) if layers else [])]
    print("\n".join(map(str, files)))
    left_out = len(set(options.runs)) - len(layers) - len(drawn)
    return 2 if not files else int(bool(left_out))


def _those_that_can(files: Iterable[Path], work: Callable[[Path], Any]) -> Iterator[tuple[Path, Any]]:
    """Each file with what `work` makes of it; those that raise `ValueError` are named on stderr."""
    for file in files:
        try:
            yield file, work(file)
        except ValueError as error:
            print(f"report: left out {error}", file=sys.stderr)


def _drawable(file: Path) -> Report:
    report = runs.read(file, runs.LAYER, runs.LOW_LATENCY, runs.PHASES, *DRAWN_ALONE)
    with runs.reading(file, "a whole run"):
        if runs.kind_of(report) not in DRAWN_ALONE:
            check_fields(report)
            runs.check_alike([report])
    return report


def write_tables(options: argparse.Namespace) -> int:
    """Rewrite the pages of results; with `--check` only say by the exit code whether that would change one."""
    found, stale = pages.read_all(RESULTS), False
    for name in pages.PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        wanted = pages.filled(name, page, found)
        stale = stale or page != wanted
        if not options.check:
            (ROOT / name).write_text(wanted, encoding="utf-8")
    return int(options.check and stale)


def draw_picture(options: argparse.Namespace) -> int:
    """Draw the layer of the run that README.md shows."""
    check_can_draw("picture")
    _, report = pages.front_run(pages.read_all(RESULTS))
    draw_layer(report, RESULTS / PICTURE)
    print(RESULTS / PICTURE)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.report", description="Show and compare runs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("show", help="print the tables of a run of any kind")
    command.add_argument("run", type=Path, metavar="RUN.json")
    command.set_defaults(work=show_run)
    command = commands.add_parser("compare", help="is B within the spread of A?")
    command.add_argument("a", type=Path, metavar="A.json")
    command.add_argument("b", type=Path, metavar="B.json")
    command.set_defaults(work=compare_runs)
    command = commands.add_parser("plot", help="draw runs of bench")
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    command.add_argument("--folder", type=Path, required=True, help="where the plots go")
    command.set_defaults(work=plot_runs)
    command = commands.add_parser("tables", help="rewrite the tables of README.md, docs and launch/results")
    command.add_argument("--check", action="store_true", help="change nothing")
    command.set_defaults(work=write_tables)
    command = commands.add_parser("picture", help=f"draw launch/results/{PICTURE}")
    command.set_defaults(work=draw_picture)
    return environment.run_parsed("report", parser, lambda options: int(options.work(options)), arguments)


if __name__ == "__main__":
    sys.exit(main())
