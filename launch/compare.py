"""Whether a run again gives the figures of a run: `python -m moe_runtime.launch.compare A.json B.json`.

For each figure that both have: is B's median in the spread that A states, from its smallest time to its largest? The
exit code is 1 if one is outside, on either side, or was not timed in B. Files are those of `launch.bench`, of
`launch.bench gemm`, `launch.ops_run`, `launch.link_bench` or `launch.load_bench`, both of one kind, of the same sizes
and as many ranks; what else differs between the machines is told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_runtime.launch import environment, gemm_table, link_bench, load_bench, ops_run
from moe_runtime.launch.layer_report import KEY, model_of

Report = dict[str, Any]

LAYER = "layer"
"""The kind of a file of `launch.bench` over a config, which says none."""

NAMED_BY = {
    LAYER: (*KEY, "implementation"),
    gemm_table.KIND: ("case", "hidden", "intermediate"),
    ops_run.KIND: ("operation", "format", "variant", "shape"),
    link_bench.KIND: ("way", "bytes_per_peer", "blocks"),
}
"""What tells the figures of a file apart, by kind."""

TOLD = ("processor", "cores", "driver", "cuda", "packages", "git_commit", "transport", "engine", "command")
"""Of the environment: what is told where it differs."""


@dataclass(frozen=True)
class Figure:
    """A time and its spread, in microseconds; all None where nothing was timed."""

    median_us: float | None
    smallest_us: float | None
    largest_us: float | None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Figure:
        """From what `timing.times_record` made."""
        return cls(record["median_us"], record["smallest_us"], record["largest_us"])


def kind_of(report: Report) -> str:
    return str(report.get("kind", LAYER))


def figures(report: Report) -> dict[str, Figure]:
    """Every figure of a report that has a spread, by name. Raises `ValueError` for a kind without figures."""
    kind = kind_of(report)
    if kind == load_bench.KIND:
        return dict(_loading(report["result"]))
    if kind not in NAMED_BY:
        raise ValueError(f"got kind {kind}")
    found: dict[str, Figure] = {}
    for result in report["results"]:
        name = ", ".join(str(result[field]) for field in NAMED_BY[kind] if result[field] != "")
        parts = {name: result}
        if kind == gemm_table.KIND:
            parts |= {f"{name}: {part}": timed for part, timed in result.get("parts", {}).items()}
            parts |= {f"{name}: {peer['name']}": peer for peer in result["peers"]}
        # Before spreads of peers were written, there were none.
        found |= {part: Figure.of(timed) for part, timed in parts.items() if "smallest_us" in timed}
    return found


def _loading(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    for name in ("read_s", "load_s"):
        times = [1e6 * seconds for seconds in result[name]]
        yield name.removesuffix("_s"), Figure(statistics.median(times), min(times), max(times))


def sizes(report: Report) -> str:
    """What two reports must have in common, kind and ranks among it."""
    kind = kind_of(report)
    if kind == load_bench.KIND:
        result = report["result"]
        named = (f"{name} {result[name]}" for name in ("hidden", "inner", "experts", "layers", "ranks"))
        return ", ".join([kind, *named])
    model = [model_of(report)] if kind == LAYER else []
    return ", ".join([kind, f"{report['environment']['ranks']} ranks", *model])


def read(file: Path) -> Report:
    """Raises `ValueError` naming the file if it has no figures or cannot be read."""
    found: Report
    with environment.reading(file, "a program that times"):
        found = json.loads(file.read_text())
        # Whatever is taken from it later.
        differences(found, found)
        if not figures(found):
            raise ValueError(f"got no figures of {sizes(found)}")
    return found


def gpus(report: Report) -> str:
    """Names of the GPUs of a run."""
    return ", ".join(dict.fromkeys(gpu["name"] for gpu in report["environment"].get("gpus", []))) or "none"


def place(a: Figure, b: Figure) -> str:
    """Where B's median lies to the spread of A, which was timed."""
    assert a.smallest_us is not None and a.largest_us is not None
    if b.median_us is None:
        return "not timed"
    return "faster" if b.median_us < a.smallest_us else "slower" if b.median_us > a.largest_us else "within"


def compare(a: Report, b: Report, console: Console) -> bool:
    """Print a line per figure, and what differs around them; whether all of them are within.

    Raises `ValueError` where the reports are of different sizes or have no figure in common.
    """
    if sizes(a) != sizes(b):
        raise ValueError(f"B: expected a run of {sizes(a)}; got {sizes(b)}")
    mine, theirs = ({name: figure for name, figure in figures(report).items()} for report in (a, b))
    both = {name: (figure, theirs[name]) for name, figure in mine.items() if name in theirs and figure.median_us}
    if not both:
        raise ValueError("B: has no figure that was timed in A")
    table = Table(*("figure", "A us", "smallest - largest", "B us", "B / A", "B is"))
    ends = []
    for name, (ours, other) in both.items():
        ends.append(place(ours, other))
        ratio = "" if other.median_us is None or not ours.median_us else f"{other.median_us / ours.median_us:.3f}"
        spread = f"{_us(ours.smallest_us)} - {_us(ours.largest_us)}"
        table.add_row(name, _us(ours.median_us), spread, _us(other.median_us), ratio, ends[-1])
    console.print(table)
    within, alone = ends.count("within"), [len(own.keys() - both.keys()) for own in (mine, theirs)]
    console.print(
        f"{within} of {len(ends)} figures are in the spread of A; not compared: {alone[0]} of A, {alone[1]} of B"
    )
    for line in differences(a, b):
        console.print(line, markup=False, soft_wrap=True)
    return within == len(ends)


def differences(a: Report, b: Report) -> list[str]:
    """What differs between where and how both ran."""
    pairs = [("GPUs", gpus(a), gpus(b))]
    ours, theirs = a["environment"], b["environment"]
    for name in TOLD:
        left, right = ours.get(name), theirs.get(name)
        if name == "packages":
            names = sorted({*(left or {}), *(right or {})})
            pairs += [(package, *((found or {}).get(package) for found in (left, right))) for package in names]
        else:
            pairs.append((name, left, right))
    return [f"{name}: {left} in A, {right} in B" for name, left, right in pairs if left != right]


def _us(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds:.1f}"


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.compare", description="Is a run again within the spread of a run?"
    )
    parser.add_argument("a", type=Path, metavar="A.json", help="the run that states a spread")
    parser.add_argument("b", type=Path, metavar="B.json", help="the run again")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)

    def show() -> int:
        return int(not compare(read(options.a), read(options.b), environment.wide_console()))

    return environment.run_program("compare", show, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
