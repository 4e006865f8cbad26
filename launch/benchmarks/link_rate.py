"""The rate of the links between GPUs that floors of an exchange count with, and where it was measured."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LinkRate:
    """What a GPU sends (or receives) with all peers at once.

    Attributes:
        gb_per_s: the rate.
        source: the committed file of `research.link_bench` that it is the best of, or the option that gave it.
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
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        metavar="RATE",
        help="what floors of dispatch and combine count with "
        f"(default: {MEASURED.gb_per_s:g} on GPUs, measured on {MEASURED.gpu}; none on CPUs)",
    )


def chosen(options: argparse.Namespace) -> LinkRate | None:
    """The rate that the command line gives, if any. Raises `ValueError` for one that is not positive."""
    rate = options.link_gb_per_s
    if rate is None:
        return None
    if not 0 < rate < math.inf:
        raise ValueError(f"--link-gb-per-s: expected a positive number, got {rate}")
    return LinkRate(rate, "--link-gb-per-s")


def default(device: torch.device) -> LinkRate | None:
    """The rate where no option gives one; None on CPUs."""
    return MEASURED if device.type == "cuda" else None


def describe(link: dict[str, Any], gpus: Sequence[str]) -> str:
    """A sentence about a `record`: the rate, its source, and a warning where it was measured on another GPU."""
    text = f"Floors of dispatch and combine count {link['gb_per_s']:g} GB/s"
    if link["gpu"] is None:
        return f"{text}, as {link['source']} says."
    text += f", measured on {link['ranks']} x {link['gpu']} ({link['source']})"
    if link["same_gpu"]:
        return f"{text}."
    here = ", ".join(dict.fromkeys(gpus)) or "no GPU"
    return f"{text}: NOT what this ran on, {here}. research.link_bench measures that, --link-gb-per-s gives it."
