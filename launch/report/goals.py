"""What this project holds its exchange and its layer to: goals, a rule for uneven routing, the least memory traffic."""

from __future__ import annotations

from typing import Any

from moe_runtime.config import ResolvedMode
from moe_runtime.kernels.formats.number_formats import format_named
from moe_runtime.launch.benchmarks.bounds import EVEN, floor_us

SKEW_FACTOR, SKEW_US = 1.25, 12.0
"""Uneven routing may take `SKEW_FACTOR` times the time of its busiest rank's bytes at the even case's rate, and
`SKEW_US` more."""

OLD_MODES: dict[str, ResolvedMode] = {"packed": "contiguous", "indexed": "gathered"}
"""Names of modes in results of 0.1."""

REFERENCE = {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8}
REFERENCE_RANKS, REFERENCE_GPU = 8, "H200"
"""The layer, and the ranks, that goals are for."""

GOALS_US = {
    ("dispatch", "nvfp4"): {1: 10, 8: 10, 32: 12, 128: 18, 4096: 250},
    ("dispatch", "fp8_block"): {128: 23, 4096: 420},
    ("dispatch", "bf16"): {4096: 790},
    ("combine", "bf16"): {1: 11, 8: 12, 32: 18, 128: 38, 4096: 830},
    ("combine", "fp8_block"): {128: 26, 4096: 470},
    ("layer", "nvfp4"): {8: 250, 128: 290, 512: 800, 1024: 1450, 4096: 5000, 8192: 9900},
    ("layer", "fp8_block"): {8: 400, 128: 450, 512: 600, 1024: 950, 4096: 3400, 8192: 6700},
}
"""Microseconds by operation and format (of combine its own, of the layer that of tokens, its combine being in bf16),
and by tokens per rank."""

SAME_CASE = ("operation", "tokens_per_rank", "token_format", "weight_format", "combine_format", "mode")


def memory_bytes(result: dict[str, Any], sizes: dict[str, Any], ranks: int) -> float:
    """Least bytes that the memory of a GPU reads and writes in an evenly routed dispatch or combine of several ranks.

    Dispatch reads tokens and writes records; packed rows are copied from there. Combine reads the rows of experts,
    writes and reads the partial results of each rank, and writes their sums. Every token is of the most that a rank may
    bring. Caches are not counted.

    Args:
        result: of `dispatch` or `combine`, with `moved_bytes` between ranks.
        sizes: of the layer, the fields of `REFERENCE` among them.
    """
    tokens, hidden, top_k = result["tokens_per_rank"], sizes["hidden_size"], sizes["top_k"]
    # Each of the ranks gets as much of what a rank sends, itself included.
    arriving = result["moved_bytes"] * ranks / (ranks - 1)
    if result["operation"] == "combine":
        return tokens * top_k * 2 * hidden + 2 * arriving + 2 * tokens * hidden
    sent = 2 * tokens * hidden + arriving
    if OLD_MODES.get(result["mode"], result["mode"]) != "contiguous":
        return sent
    fmt = format_named(result["token_format"])
    return sent + arriving + tokens * top_k * (fmt.quant_bytes(hidden) + fmt.scale_bytes(hidden))


def judge_goals(results: list[dict[str, Any]], sizes: dict[str, Any], gpus: list[str]) -> None:
    """Fill in `goal` of our results, `{"us", "met"}`: None where there is none, `met` None where nothing was timed.

    Args:
        sizes: of the layer, the fields of `REFERENCE` among them.
        gpus: name of the GPU of each rank; empty without GPUs.
    """
    alike = all(sizes[name] == value for name, value in REFERENCE.items())
    there = alike and len(gpus) == REFERENCE_RANKS and all(REFERENCE_GPU in name for name in gpus)
    for result in results:
        operation, wire = result["operation"], result["combine_format"]
        fmt = wire if operation == "combine" else result["token_format"]
        goal_us = GOALS_US.get((operation, fmt), {}).get(result["tokens_per_rank"])
        result["goal"] = None
        if there and goal_us and result["routing"] == EVEN and (operation != "layer" or wire == "bf16"):
            us = result["median_us"]
            result["goal"] = {"us": goal_us, "met": None if us is None else us <= goal_us}


def judge_skew(results: list[dict[str, Any]]) -> None:
    """Fill in `skew` of our results, all of one run; None but where `needs_even_case`, and where that was timed too.

    `{"even_gb_per_s", "allowed_us", "met"}`, `met` None where the result was not timed.
    """
    even = {_case(result): result for result in results if result["routing"] == EVEN}
    for result in results:
        base, us, moved = even.get(_case(result)), result["median_us"], result["moved_bytes"]
        result["skew"] = None
        if needs_even_case(result) and base is not None and base["rate_gb_per_s"]:
            allowed_us = SKEW_FACTOR * floor_us(moved, base["rate_gb_per_s"]) + SKEW_US
            met = None if us is None else us <= allowed_us
            result["skew"] = {"even_gb_per_s": base["rate_gb_per_s"], "allowed_us": allowed_us, "met": met}


def needs_even_case(result: dict[str, Any]) -> bool:
    """Whether the rule for uneven routing is for such a result: an exchange in which bytes cross a link.

    It is not for several hosts, between which as many bytes go whatever the routing is.
    """
    exchange = result["operation"] in ("dispatch", "combine") and bool(result["moved_bytes"])
    return exchange and result["routing"] != EVEN and result.get("network_bytes") is None


def _case(result: dict[str, Any]) -> tuple[object, ...]:
    return tuple(result[name] for name in SAME_CASE)
