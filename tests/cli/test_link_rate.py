"""What floors count with: from where the rate is, and whether it is that of the GPU at hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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
    file = RESULTS / link_rate.MEASURED.source
    found = link_rate.read(file)
    assert found.gb_per_s == max(result["gb_per_s"] for result in json.loads(file.read_text())["results"])
    assert link_rate.MEASURED.gb_per_s == round(found.gb_per_s)
    assert (found.source, found.gpu, found.ranks) == (file.name, link_rate.MEASURED.gpu, link_rate.MEASURED.ranks)
    assert link_rate.default(torch.device("cuda")) == link_rate.MEASURED
    assert link_rate.default(torch.device("cpu")) is None


def test_the_command_line_overrides_it(tmp_path: Path) -> None:
    assert link_rate.chosen(parsed()) is None
    assert link_rate.chosen(parsed("--link-gb-per-s", 450)) == link_rate.LinkRate(450.0, "--link-gb-per-s")
    file = tmp_path / "mine.json"
    where = {"gpus": [{"name": "NVIDIA H100"}] * 2, "ranks": 2}
    results = [{"gb_per_s": 1.0}, {"gb_per_s": 420.5}, {"gb_per_s": 2.0}]
    file.write_text(json.dumps({"kind": link_rate.KIND, "environment": where, "results": results}))
    assert link_rate.chosen(parsed("--links", file)) == link_rate.LinkRate(420.5, "mine.json", "NVIDIA H100", 2)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError: "),
        ("[]", "TypeError: "),
        ("{}", "KeyError: 'kind'"),
        ('{"kind": "gemm"}', "research.link_bench, got kind gemm"),
        ('{"kind": "links", "results": [{"gb_per_s": 1}]}', "KeyError: 'environment'"),
        ('{"kind": "links", "environment": {"gpus": [], "ranks": 2}, "results": [{"gb_per_s": 1}]}', "IndexError: "),
        ('{"kind": "links", "environment": {}, "results": []}', "empty"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"links\.json: expected the JSON of research\.link_bench, ") as error:
        link_rate.read(file)
    assert message in str(error.value)


@pytest.mark.parametrize(("rate", "told"), [("0", "0.0"), ("-3", "-3.0"), ("NaN", "nan"), ("1e999", "inf")])
def test_rates_that_no_link_has_are_refused(rate: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    where = '{"gpus": [{"name": "NVIDIA H100"}], "ranks": 2}'
    results = f'[{{"gb_per_s": 0.5e-9}}, {{"gb_per_s": {rate}}}]'
    file.write_text(f'{{"kind": "links", "environment": {where}, "results": {results}}}')
    with pytest.raises(ValueError, match=rf"^--links: links\.json: gb_per_s: expected positive numbers, got {told}$"):
        link_rate.chosen(parsed("--links", file))
