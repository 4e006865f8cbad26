"""What the exchange and the layer are held to: the rule for uneven routing, and goals of one model."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from moe_runtime.launch.report import goals, runs
from moe_runtime.launch.report.show import show

pytestmark = pytest.mark.cpu_only


def result(**changes: object) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operation": "dispatch",
        "implementation": "moe_runtime",
        "tokens_per_rank": 4,
        "token_format": "nvfp4",
        "weight_format": "nvfp4",
        "combine_format": "bf16",
        "mode": "indexed",
        "routing": "uniform",
        "median_us": 20.0,
        "moved_bytes": 1_000_000,
        "check": None,
    }
    made |= changes
    return made | {"rate_gb_per_s": made["moved_bytes"] / made["median_us"] * 1e-3 if made["median_us"] else None}


def test_the_rule_for_uneven_routing() -> None:
    """50 GB/s in the even case: 2 MB may take 1.25 * 40 + 12 us."""
    results = [
        result(routing="zipf", moved_bytes=2_000_000, median_us=62.0),
        result(),
        result(routing="one", moved_bytes=2_000_000, median_us=62.1),
        result(routing="half", median_us=None),
        result(routing="zipf", tokens_per_rank=8),
        result(routing="zipf", operation="layer"),
    ]
    goals.judge_skew(runs.ours({"results": results}))
    expected = {"even_gb_per_s": 50.0, "allowed_us": pytest.approx(62.0), "met": True}
    assert results[0]["skew"] == expected and results[2]["skew"] == expected | {"met": False}
    assert results[3]["skew"]["met"] is None
    assert [one["skew"] for one in results[4:6]] == [None] * 2 and results[1]["skew"] is None


@pytest.mark.parametrize(
    "field", ["operation", "tokens_per_rank", "token_format", "weight_format", "combine_format", "mode"]
)
def test_the_even_case_is_of_the_same_sizes_and_formats(field: str) -> None:
    """In whichever order they were timed; another combine format is another case of dispatch too."""
    even, uneven = result(), result(routing="zipf", moved_bytes=2_000_000)
    other = result(median_us=1.0) | {field: "combine" if field == "operation" else "another"}
    for results in ([even, other, uneven], [other, even, uneven], [uneven, other, even]):
        goals.judge_skew(results)
        assert uneven["skew"]["even_gb_per_s"] == 50.0 and even["skew"] is None
    goals.judge_skew([other, uneven])
    assert uneven["skew"] is None


def test_the_report_says_what_was_held_to_no_rule(capsys: pytest.CaptureFixture[str]) -> None:
    text = {"memory": None, "ratio_to_torch": None, "floor_us": None, "rate_tflop_per_s": None, "phases": None}
    times = {"smallest_us": 19.0, "largest_us": 21.0}
    results = [
        result(routing="zipf"),
        result(routing="zipf", implementation="torch all_to_all_single"),
        result(routing="zipf", operation="layer"),
        result(routing="zipf", tokens_per_rank=8, moved_bytes=0),
        result(tokens_per_rank=16),
        result(tokens_per_rank=16, routing="one"),
    ]
    where = {"device": "cpu", "processor": "a CPU", "gpus": [], "ranks": 2, "transport": "shared", "engine": "torch"}
    report = {"environment": where, "results": [one | text | times for one in results], "link": None}
    show(report, Console(width=200))
    told = [line for line in capsys.readouterr().out.splitlines() if "uneven routing" in line]
    assert told == [
        "dispatch nvfp4 > bf16, 4 tokens, zipf: not held to the rule for uneven routing, "
        "no uniform routing was timed in this run",
        "dispatch nvfp4 > bf16, 16 tokens, one: 20.0 us, allowed 37.0 by the rule for uneven routing: met",
    ]


def test_goals_are_for_one_model_on_eight_gpus() -> None:
    sizes, gpus = goals.REFERENCE | {"max_tokens_per_rank": 8}, ["NVIDIA H200"] * 8
    results = [
        result(tokens_per_rank=128, median_us=18.0),
        result(tokens_per_rank=128, median_us=18.1),
        result(tokens_per_rank=128, median_us=None, operation="combine", combine_format="fp8_block"),
        result(tokens_per_rank=8, median_us=1.0, operation="layer", combine_format="fp8_block"),
        result(tokens_per_rank=8, median_us=250.0, operation="layer"),
        result(tokens_per_rank=128, routing="zipf"),
        result(tokens_per_rank=129),
        result(tokens_per_rank=8, operation="dispatch+combine"),
    ]
    goals.judge_goals(results, sizes, gpus)
    first = [{"us": 18, "met": True}, {"us": 18, "met": False}, {"us": 26, "met": None}, None, {"us": 250, "met": True}]
    assert [one["goal"] for one in results] == [*first, None, None, None]
    for other in (sizes | {"num_experts": 128}, gpus[:4]), (sizes, gpus[:4]), (sizes, ["NVIDIA H100"] * 8), (sizes, []):
        goals.judge_goals(results, other[0], list(other[1]))
        assert not any(one["goal"] for one in results)
