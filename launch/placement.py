"""Plan placements from the load of each expert: what the present one costs, what a new one gains, and its file.

LOAD is a JSON file: a list with a number for each expert, such as its tokens, or an object of such lists by decoder
layer, as `ExpertParallel.expert_loads` gives them. A cost is the load of the busiest rank over the mean of all ranks: a
step of many tokens takes about so much longer than with even load. A placement that gains nothing stays as it is. The
new file is a `placement.file` for a list, and an object of placements by decoder layer for an object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_runtime.comm.messages import unique_keys
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.launch.common import environment
from moe_runtime.observation.counters import most_over_mean
from moe_runtime.placement.placement import MAX_TEXT_LENGTH, Placement, checked_load, plan_placement
from moe_runtime.support.regular_files import read_regular

ALONE = ""
"""In place of a decoder layer, for a file of one layer."""


def read(option: str, file: Path) -> Any:
    """The JSON of `file`. Raises `ValueError` naming the option and the file."""
    try:
        text = read_regular(file, 128 * MAX_TEXT_LENGTH)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option}: {file}: {error}") from None


def read_loads(file: Path) -> dict[str, list[float]]:
    """Loads of experts by decoder layer, or by `ALONE`."""
    data = read("LOAD", file)
    loads = data if isinstance(data, dict) else {ALONE: data}
    if not loads or (data is loads and ALONE in loads) or not all(isinstance(v, list) and v for v in loads.values()):
        raise ValueError(f"LOAD: {file}: expected a list of numbers, or an object of such lists by decoder layer")
    for layer, load in loads.items():
        try:
            checked_load(load)
        except ValueError as error:
            raise ValueError(f"LOAD: {file}: {_layer(layer)}{error}") from None
    return loads


def _layer(layer: str) -> str:
    return f"layer {layer}: " if layer else ""


def contiguous_loads(load: list[float], ranks: int) -> list[float]:
    """The load of each rank where experts lie in order, as evenly as they can, without a placement."""
    return [math.fsum(load[start:end]) for start, end in pairwise(expert_starts(len(load), ranks))]


def read_present(file: Path, layers: Mapping[str, list[float]]) -> dict[str, Placement]:
    """The present placement of each layer: one for all, or by decoder layer."""
    data = read("--present", file)
    shared = isinstance(data, dict) and "slot_experts" in data
    if not shared and (not isinstance(data, dict) or set(data) != set(layers)):
        raise ValueError(f"--present: {file}: expected a placement, or one for each decoder layer of LOAD")
    try:
        return {layer: Placement.from_json(json.dumps(data if shared else data[layer])) for layer in layers}
    except ValueError as error:
        raise ValueError(f"--present: {file}: {error}") from None


def work(options: argparse.Namespace) -> int:
    """Plan, print and write; 0."""
    environment.check_at_least(1, ranks=options.ranks, slots_per_rank=options.slots_per_rank)
    environment.check_folder("--to", options.to)
    loads = read_loads(options.load)
    present: dict[str, Placement] = {}
    if options.to is not None and os.path.realpath(options.to) == os.path.realpath(options.load):
        raise ValueError("--to: expected another file than LOAD")
    if options.present is not None:
        present = read_present(options.present, loads)
    elif options.ranks is None:
        raise ValueError("--ranks: expected it, or --present with the present placement")
    table = Table("layer", "busiest rank over mean", "planned", "slots that change, of the rank with most")
    planned: dict[str, Placement] = {}
    for layer, load in loads.items():
        now, experts, where = present.get(layer), len(load), _layer(layer)
        if now is not None and now.num_experts != experts:
            raise ValueError(f"--present: {where}expected {experts} experts as in LOAD, got {now.num_experts}")
        ranks = options.ranks or (0 if now is None else now.num_ranks)
        least = ceil_div(experts, ranks)
        slots = options.slots_per_rank or (least if now is None else max(least, now.slots_per_rank))
        if not least <= slots <= experts:
            raise ValueError(f"--slots-per-rank: {where}expected {least} .. {experts}, got {slots}")
        if now is None and experts % ranks == 0:
            now = Placement.contiguous(experts, ranks)
        new = plan_placement(load, ranks, slots)
        present_loads = contiguous_loads(load, ranks) if now is None else now.rank_loads(load)
        costs = [most_over_mean(one) for one in (present_loads, new.rank_loads(load))]
        changes = "-"  # Another number of slots is for a layer that is made anew.
        if now is not None and new.sizes == now.sizes:
            new = new.reordered_like(now) if costs[1] < costs[0] else now
            pairs = [zip(now.rank_experts(rank), new.rank_experts(rank), strict=True) for rank in range(ranks)]
            changes = f"{max(sum(a != b for a, b in pair) for pair in pairs)} of {slots}"
        table.add_row(escape(layer) or "-", *(f"{cost:.2f}" for cost in costs), changes)
        planned[layer] = new
    Console(highlight=False).print(table)
    if options.to is not None:
        parts = {layer: json.loads(placement.to_json()) for layer, placement in planned.items()}
        environment.write_json(options.to, parts.get(ALONE, parts))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.placement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("load", type=Path, metavar="LOAD", help="JSON file with the load of each expert")
    parser.add_argument("--present", type=Path, metavar="FILE", help="the present placement; contiguous if not given")
    parser.add_argument("--ranks", type=int, help="ranks of the new placement; as many as now if not given")
    parser.add_argument("--slots-per-rank", type=int, help="experts that a rank holds; as many as now if not given")
    parser.add_argument("--to", type=Path, metavar="FILE", help="where the new placement is written")
    return environment.run_parsed("placement", parser, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
