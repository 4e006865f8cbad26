"""A run again is held to the spread of a run: figure by figure, of every program that times."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.launch import bench, compare

pytestmark = pytest.mark.cpu_only

RESULTS = Path(compare.__file__).resolve().parent / "results"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a.json", tmp_path / "b.json"


def run(files: tuple[Path, Path], a: dict[str, Any], b: dict[str, Any]) -> int:
    for file, report in zip(files, (a, b), strict=True):
        file.write_text(json.dumps(report))
    return compare.main([str(file) for file in files])


def rows(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def stated(value: Any) -> int:
    """Times in a report that stand with their spread."""
    if isinstance(value, list):
        return sum(map(stated, value))
    if not isinstance(value, dict):
        return 0
    return int(isinstance(value.get("smallest_us"), float)) + sum(map(stated, value.values()))


@pytest.mark.parametrize("name", sorted(file.name for file in RESULTS.glob("*h200*.json")))
def test_committed_results_are_within_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = stated(json.loads((RESULTS / name).read_text()))
    if not figures:
        pytest.skip("no times in it")
    assert compare.main([str(RESULTS / name)] * 2) == 0
    out = capsys.readouterr().out
    assert f"{figures} of {figures} figures are in the spread of A; not compared: 0 of A, 0 of B" in out
    assert " in A, " not in out


def test_loading_is_within_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Its two times are seconds of several runs."""
    assert compare.main([str(RESULTS / "load_two_cores.json")] * 2) == 0
    assert "2 of 2 figures are in the spread of A" in capsys.readouterr().out


def test_each_figure_is_held_to_its_spread(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The ends belong to it; faster is outside as well; what either did not time is told."""
    a = json.loads((RESULTS / "links_h200x4.json").read_text())
    a["results"] = [dict(r, median_us=10.0, smallest_us=9.0, largest_us=12.0) for r in a["results"][:6]]
    b = copy.deepcopy(a)
    for result, us in zip(b["results"], (9.0, 12.0, 10.5), strict=False):
        result["median_us"] = us
    a["results"][5]["median_us"] = None
    del b["results"][4]
    assert run(files, a, b) == 0
    assert "4 of 4 figures are in the spread of A; not compared: 2 of A, 1 of B" in capsys.readouterr().out
    for us, place, ratio in ((8.99, "faster", "0.899"), (12.01, "slower", "1.201"), (None, "not timed", "")):
        b["results"][1]["median_us"] = us
        assert run(files, a, b) == 1
        out = capsys.readouterr().out
        assert "3 of 4 figures are in the spread of A" in out
        name = ", ".join(str(a["results"][1][field]) for field in ("way", "bytes_per_peer", "blocks"))
        shown = "" if us is None else f"{us:.1f}"
        assert [row for row in rows(out) if row[-1] != "within"] == [[name, "10.0", "9.0 - 12.0", shown, ratio, place]]


def test_what_differs_around_them_is_told(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a = json.loads((RESULTS / "h200x4.json").read_text())
    b = copy.deepcopy(a)
    b["environment"] |= {"driver": "1.2.3", "gpus": [{"name": "NVIDIA H100"}] * 4}
    b["environment"]["packages"] |= {"triton": None}
    assert run(files, a, b) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if " in A, " in line]
    assert told == [
        "GPUs: NVIDIA H200 in A, NVIDIA H100 in B",
        "driver: 580.159.04 in A, 1.2.3 in B",
        "triton: 3.6.0 in A, None in B",
    ]


def test_products_and_peers_of_the_gemm_are_figures_too(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["gemm", "--small", "--cases", "^fp8_block 32x32 both$", "--steps", "2", "--json"]
    assert bench.main([*arguments, str(files[0])]) == 0
    report = json.loads(files[0].read_text())
    (result,) = report["results"]
    timed = [result, *result["parts"].values(), *(peer for peer in result["peers"] if peer["median_us"])]
    capsys.readouterr()
    assert run(files, report, report) == 0
    assert f"{len(timed)} of {len(timed)} figures" in capsys.readouterr().out and len(timed) >= 4
    slower = copy.deepcopy(report)
    slower["results"][0]["parts"]["down"]["median_us"] *= 1e6
    assert run(files, report, slower) == 1
    assert f"{len(timed) - 1} of {len(timed)} figures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("h200x4.json", lambda b: b["environment"].update(ranks=8), "B: expected a run of layer, 4 ranks, "),
        ("h200x4.json", lambda b: b["config"]["layer"].update(num_experts=7), "num_experts 7, top_k 8"),
        ("load_two_cores.json", lambda b: b["result"].update(layers=2), "layers 4, ranks 8; got loading, "),
        ("links_h200x4.json", lambda b: b.update(results=b["results"][:0]), "b.json: expected the JSON of a program"),
        ("links_h200x4.json", lambda b: b["results"][3].pop("median_us"), "KeyError: 'median_us'"),
        ("links_h200x4.json", lambda b: b.pop("environment"), "KeyError: 'environment'"),
        ("h200x4.json", lambda b: b.update(kind="phases"), "got kind phases"),
        (
            "h200x4.json",
            lambda b: b.update(results=[dict(r, routing="one") for r in b["results"]]),
            "B: has no figure that was timed in A",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    name: str, change: Any, message: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a = json.loads((RESULTS / name).read_text())
    b = copy.deepcopy(a)
    change(b)
    assert run(files, a, b) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("compare: ") and error.count("\n") == 1


@pytest.mark.parametrize("which", ["A", "B"])
@pytest.mark.parametrize(("name", "why"), [("no.json", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_no_figure_outside(
    which: str, name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 says that a figure is outside."""
    pair = [str(RESULTS / "h200x4.json"), str(tmp_path / name)]
    assert compare.main(pair if which == "B" else pair[::-1]) == 2
    assert capsys.readouterr().err == f"compare: {(tmp_path / name).name}: {why}\n"
