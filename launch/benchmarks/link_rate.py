"""The rate of the links between GPUs that floors of an exchange count with, and where it was measured."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moe_runtime.launch.common import environment

KIND = "links"
"""`kind` of the JSON of `research.link_bench`."""


@dataclass(frozen=True)
class LinkRate:
    """What a GPU sends (or receives) with all peers at once.

    Attributes:
        gb_per_s: the rate.
        source: the file of `research.link_bench` that it is the best of, or the option that gave it.
        gpu: the GPU that was measured; None where nothing is known of it.
        ranks: how many of them at once; None as `gpu`.
    """

    gb_per_s: float
    source: str
    gpu: str | None = None
    ranks: int | None = None

    def record(self, gpus: Sequence[str]) -> dict[str, Any]:
        """For JSON; `same_gpu` says whether all of `gpus` are the one that was measured, None where it is not known."""
        return asdict(self) | {"same_gpu": None if self.gpu is None else {self.gpu} == set(gpus)}


MEASURED = LinkRate(351.0, "links_h200x4.json", "NVIDIA H200", 4)
"""Of the file in `launch/results/`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `chosen` reads."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--link-gb-per-s",
        type=float,
        metavar="RATE",
        help="what floors of dispatch and combine count with "
        f"(default: {MEASURED.gb_per_s:g} on GPUs, measured on {MEASURED.gpu}; none on CPUs)",
    )
    group.add_argument(
        "--links", type=Path, metavar="FILE", help="count with the best rate in this JSON of research.link_bench"
    )


def chosen(options: argparse.Namespace) -> LinkRate | None:
    """The rate that the command line gives, if any.

    Raises `ValueError` for one that is not positive, and for another file or none.
    """
    if options.links is not None:
        return read(options.links)
    rate = options.link_gb_per_s
    if rate is None:
        return None
    if not 0 < rate < math.inf:
        raise ValueError(f"--link-gb-per-s: expected a positive number, got {rate}")
    return LinkRate(rate, "--link-gb-per-s")


def default(device: torch.device) -> LinkRate | None:
    """The rate where no option gives one; None on CPUs."""
    return MEASURED if device.type == "cuda" else None


def read(file: Path) -> LinkRate:
    """The best rate of a file of `research.link_bench`.

    Raises `ValueError` if it is none of those, cannot be read, or has a rate that no link has.
    """
    with environment.reading(file, "research.link_bench"):
        found = json.loads(file.read_text())
        if found["kind"] != KIND:
            raise ValueError(f"got kind {found['kind']}")
        rates = [float(result["gb_per_s"]) for result in found["results"]]
        record = found["environment"]
        best = LinkRate(max(rates), file.name, record["gpus"][0]["name"], record["ranks"])
    for rate in rates:
        if not 0 < rate < math.inf:
            raise ValueError(f"--links: {file.name}: gb_per_s: expected positive numbers, got {rate}")
    return best


def describe(link: dict[str, Any], gpus: Sequence[str]) -> str:
    """A sentence about a `record`: the rate, its source, and a warning where it was measured on another GPU."""
    text = f"Floors of dispatch and combine count {link['gb_per_s']:g} GB/s"
    if link["gpu"] is None:
        return f"{text}, as {link['source']} says."
    text += f", measured on {link['ranks']} x {link['gpu']} ({link['source']})"
    if link["same_gpu"]:
        return f"{text}."
    here = ", ".join(dict.fromkeys(gpus)) or "no GPU"
    return f"{text}: NOT what this ran on, {here}. research.link_bench measures that, --links reads its JSON."
