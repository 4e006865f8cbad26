"""What dispatch and combine are held against: the least time for their bytes, and the even case for uneven routing.

`traffic[s, d]` are the bytes that rank `s` sends to rank `d`; what a rank keeps does not cross a link.
"""

from __future__ import annotations

from typing import Any

import torch

LINK_GB_PER_S = 351.0
"""Out of (or into) one H200 with all peers at once: the best of `launch/results/links_h200x4.json`."""

SKEW_FACTOR, SKEW_US = 1.25, 12.0
"""Uneven routing may take `SKEW_FACTOR` times the time of its busiest rank's bytes at the even case's rate, and
`SKEW_US` more."""

EVEN = "uniform"
"""The routing that is the even case."""

SAME_CASE = ("operation", "tokens_per_rank", "token_format", "weight_format", "combine_format", "mode")


def busiest_bytes(traffic: torch.Tensor) -> int:
    """The most bytes that leave one rank or come to it, of `[W, W]`."""
    others = traffic.clone().fill_diagonal_(0)
    return int(max(others.sum(dim=0).max(), others.sum(dim=1).max()))


def floor_us(num_bytes: float, gb_per_s: float) -> float:
    """Microseconds that so many bytes take at that rate."""
    return num_bytes / gb_per_s * 1e-3


def judge_skew(results: list[dict[str, Any]]) -> None:
    """Fill in `skew` of our results, all of one run; None but for dispatch and combine whose even case was timed too.

    `{"even_gb_per_s", "allowed_us", "met"}`, `met` None where the result was not timed.
    """
    even = {_case(result): result for result in results if result["routing"] == EVEN}
    for result in results:
        base, us, moved = even.get(_case(result)), result["median_us"], result["moved_bytes"]
        result["skew"] = None
        exchanged = result["operation"] in ("dispatch", "combine") and result["routing"] != EVEN
        if exchanged and base is not None and base["rate_gb_per_s"]:
            allowed_us = SKEW_FACTOR * floor_us(moved, base["rate_gb_per_s"]) + SKEW_US
            met = None if us is None else us <= allowed_us
            result["skew"] = {"even_gb_per_s": base["rate_gb_per_s"], "allowed_us": allowed_us, "met": met}


def _case(result: dict[str, Any]) -> tuple[object, ...]:
    return tuple(result[name] for name in SAME_CASE)
