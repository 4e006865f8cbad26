"""What floors count with: from where the rate is, and whether it is that of the GPU at hand."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from moe_runtime.launch.benchmarks import link_rate
from tests.support.programs import ROOT

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "launch" / "results"


def parsed(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    link_rate.add_options(parser)
    return parser.parse_args(list(map(str, arguments)))


def test_the_default_is_the_best_of_the_committed_file() -> None:
    measured = link_rate.MEASURED
    found = json.loads((RESULTS / measured.source).read_text())
    assert measured.gb_per_s == round(max(result["gb_per_s"] for result in found["results"]))
    assert (found["environment"]["gpus"][0]["name"], found["environment"]["ranks"]) == (measured.gpu, measured.ranks)
    assert link_rate.default(torch.device("cuda")) == link_rate.MEASURED
    assert link_rate.default(torch.device("cpu")) is None


def test_the_command_line_overrides_it() -> None:
    assert link_rate.chosen(parsed()) is None
    assert link_rate.chosen(parsed("--link-gb-per-s", 450)) == link_rate.LinkRate(450.0, "--link-gb-per-s")


@pytest.mark.parametrize(
    ("gpus", "same", "end"),
    [
        (["NVIDIA H200"] * 8, True, "measured on 4 x NVIDIA H200 (links_h200x4.json)."),
        (["NVIDIA H100"] * 8, False, "NOT what this ran on, NVIDIA H100."),
        (["NVIDIA H200", "NVIDIA H200 NVL"], False, "NOT what this ran on, NVIDIA H200, NVIDIA H200 NVL."),
        ([], False, "NOT what this ran on, no GPU."),
    ],
)
def test_another_gpu_is_told_of(gpus: list[str], same: bool, end: str) -> None:
    record = link_rate.MEASURED.record(gpus)
    assert record["same_gpu"] is same and record["gb_per_s"] == 351.0 and record["source"] == "links_h200x4.json"
    text = link_rate.describe(record, gpus)
    assert text.startswith("Floors of dispatch and combine count 351 GB/s, measured on 4 x NVIDIA H200 ")
    assert end in text and ("NOT" in text) != same


@pytest.mark.parametrize("rate", ["0", "-3", "NaN", "1e999"])
def test_rates_that_no_link_has_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=rf"^--link-gb-per-s: expected a positive number, got {float(rate)}$"):
        link_rate.chosen(parsed("--link-gb-per-s", rate))
