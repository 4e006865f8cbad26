"""Whether a second run reproduces a first one: is its median of each time within the spread of the first?"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_runtime.launch.benchmarks.show import Report
from moe_runtime.launch.report.runs import LAYER, LOADING, Figure, figures, kind_of, model_of

ENVIRONMENT = ("processor", "cores", "driver", "cuda", "packages", "git_commit", "transport", "engine", "command")
"""Fields of the environment that are printed where they differ."""


def compare(a: Report, b: Report, console: Console) -> bool:
    """Print a line per time and what differs between the environments; whether all of `b` are within `a`.

    Raises `ValueError` where the runs are of different sizes or have no time in common.
    """
    if sizes(a) != sizes(b):
        raise ValueError(f"B: expected a run of {sizes(a)}; got {sizes(b)}")
    mine, theirs = figures(a), figures(b)
    both = {name: (figure, theirs[name]) for name, figure in mine.items() if name in theirs and figure.median_us}
    if not both:
        raise ValueError("B: has no time that was measured in A")
    table = Table(*("time", "A us", "smallest - largest", "B us", "B / A", "B is"))
    places = []
    for name, (first, second) in both.items():
        places.append(place(first, second))
        ratio = "" if second.median_us is None or not first.median_us else f"{second.median_us / first.median_us:.3f}"
        spread = f"{_us(first.smallest_us)} - {_us(first.largest_us)}"
        table.add_row(escape(name), _us(first.median_us), spread, _us(second.median_us), ratio, places[-1])
    console.print(table)
    within, alone = places.count("within"), [len(own.keys() - both.keys()) for own in (mine, theirs)]
    console.print(
        f"{within} of {len(places)} times are within the spread of A; not compared: {alone[0]} of A, {alone[1]} of B"
    )
    for line in differences(a, b):
        console.print(line, markup=False, soft_wrap=True)
    return within == len(places)


def sizes(report: Report) -> str:
    """What two runs must have in common: kind, ranks and sizes."""
    kind = kind_of(report)
    if kind == LOADING:
        names = ("hidden", "inner", "experts", "layers", "ranks")
        return ", ".join([kind, *(f"{name} {report['result'][name]}" for name in names)])
    return ", ".join([kind, f"{report['environment']['ranks']} ranks", *([model_of(report)] if kind == LAYER else [])])


def place(a: Figure, b: Figure) -> str:
    """Where the median of B lies in the spread of A, which was timed."""
    assert a.smallest_us is not None and a.largest_us is not None
    if b.median_us is None:
        return "not timed"
    return "faster" if b.median_us < a.smallest_us else "slower" if b.median_us > a.largest_us else "within"


def differences(a: Report, b: Report) -> list[str]:
    """What differs between the environments of two runs."""
    first, second = a["environment"], b["environment"]
    gpus = [", ".join(dict.fromkeys(gpu["name"] for gpu in each.get("gpus", []))) or "none" for each in (first, second)]
    pairs: list[tuple[str, Any, Any]] = [("GPUs", gpus[0], gpus[1])]
    for name in ENVIRONMENT:
        left, right = first.get(name), second.get(name)
        if name == "packages":
            left, right = left or {}, right or {}
            pairs += [(package, left.get(package), right.get(package)) for package in sorted({*left, *right})]
        else:
            pairs.append((name, left, right))
    return [f"{name}: {left} in A, {right} in B" for name, left, right in pairs if left != right]


def _us(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds:.1f}"
