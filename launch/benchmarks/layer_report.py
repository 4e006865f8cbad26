"""The JSON of a run of `bench` over a config: its results with their ratios to torch."""

from __future__ import annotations

from typing import Any

from moe_runtime.config import RunConfig
from moe_runtime.launch.benchmarks.link_rate import LinkRate

OURS = "moe_runtime"
"""The `implementation` of our results; baselines begin with "torch"."""

PHASES_KIND = "phases"
"""`kind` of a run with `--trace`, which times phases only. A run without it has no `kind`."""
LOW_LATENCY_KIND, NORMAL_KIND = "low_latency", "normal"
LOW_LATENCY, NORMAL = "moe_runtime.deep_ep low latency", "moe_runtime.deep_ep normal"
"""How the implementation of their results is called, in the beginning."""

KEY = ("operation", "tokens_per_rank", "token_format", "weight_format", "combine_format", "mode", "routing")
"""What a result and its baseline in the same run have in common."""


def key_of(result: dict[str, Any]) -> tuple[object, ...]:
    """The values of `KEY`."""
    return tuple(result[name] for name in KEY)


def baselines_of(results: list[dict[str, Any]]) -> dict[tuple[object, ...], dict[str, Any]]:
    """Results of torch, by `key_of`."""
    return {key_of(result): result for result in results if result["implementation"].startswith("torch")}


def add_comparisons(results: list[dict[str, Any]]) -> None:
    """Fill in `ratio_to_torch`; None where there is nothing to compare with."""
    baselines = baselines_of(results)
    ours = [result for result in results if result["implementation"] == OURS]
    for result in results:
        result["ratio_to_torch"] = None
    for result in ours:
        baseline = baselines.get(key_of(result))
        if baseline is not None and baseline["median_us"] and result["median_us"]:
            result["ratio_to_torch"] = result["median_us"] / baseline["median_us"]


def make_report(
    results: list[dict[str, Any]],
    record: dict[str, Any],
    run: RunConfig,
    link: LinkRate | None,
    *,
    traced: bool = False,
) -> dict[str, Any]:
    """The JSON of a run.

    Args:
        results: of all operations; completed in place.
        record: of the environment; empty except on rank 0.
        run: what ran.
        link: the rate that floors count with; None where there are no floors.
        traced: whether only phases were recorded.
    """
    add_comparisons(results)
    gpus = gpus_of(record) if record else []
    passed = all(result["check"] is None or result["check"]["passed"] for result in results)
    kind = {"kind": PHASES_KIND} if traced else {}
    for name, begin in ((NORMAL_KIND, NORMAL), (LOW_LATENCY_KIND, LOW_LATENCY)):
        if any(str(result["implementation"]).startswith(begin) for result in results):
            kind = {"kind": name}
    floors = {"link": None if link is None else link.record(gpus)}
    return kind | {"environment": record, "config": run.model_dump(), **floors, "passed": passed, "results": results}


def gpus_of(record: dict[str, Any]) -> list[str]:
    """Names of the GPUs that the ranks of a run have on its first host; none on CPUs."""
    gpus = record["gpus"] if record["device"] == "cuda" else []
    return [gpu["name"] for gpu in gpus[: record["ranks"]]]
