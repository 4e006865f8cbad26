"""The program that plans placements: costs as the placements have them, files that layers read, refusals."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from moe_runtime.config import PlacementConfig
from moe_runtime.launch import placement
from moe_runtime.placement.placement import Placement, placement_from_config, plan_placement

pytestmark = pytest.mark.cpu_only

LOAD = [90, 1, 2, 3, 1, 1, 1, 1]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def written(folder: Path, name: str, data: object) -> str:
    (folder / name).write_text(json.dumps(data))
    return str(folder / name)


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


def test_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From contiguous experts to replicas, then from these to others with as many slots."""
    to = tmp_path / "new.json"
    assert (
        placement.main([written(tmp_path, "load", LOAD), "--ranks", "2", "--slots-per-rank", "6", "--to", str(to)]) == 0
    )
    # 96 of 100 on the first rank; then half of the 90 on each.
    assert rows(capsys) == [["-", "1.92", "1.00", "-"]]
    first = placement_from_config(PlacementConfig(file=str(to)), 8, 2)
    assert first == plan_placement(LOAD, 2, 6)
    assert placement.main([written(tmp_path, "other", LOAD[::-1]), "--present", str(to), "--to", str(to)]) == 0
    second = Placement.from_json(to.read_text())
    assert second == plan_placement(LOAD[::-1], 2, 6).reordered_like(first)
    changed = max(
        sum(a != b for a, b in zip(first.rank_experts(r), second.rank_experts(r), strict=True)) for r in (0, 1)
    )
    assert changed > 0 and rows(capsys)[0][3] == f"{changed} of 6"


def test_the_layers_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load, to = written(tmp_path, "load", {"3": LOAD, "7": [1] * 8}), tmp_path / "new.json"
    present = written(tmp_path, "present", {key: json.loads(Placement.contiguous(8, 4).to_json()) for key in "37"})
    assert placement.main([load, "--present", present, "--slots-per-rank", "3", "--to", str(to)]) == 0
    assert [row[:2] for row in rows(capsys)] == [["3", "3.64"], ["7", "1.00"]]
    made = {key: Placement.from_json(json.dumps(value)) for key, value in json.loads(to.read_text()).items()}
    assert made == {"3": plan_placement(LOAD, 4, 3), "7": plan_placement([1] * 8, 4, 3)}
    shared = written(tmp_path, "shared", json.loads(Placement.contiguous(8, 4).to_json()))
    assert placement.main([load, "--present", shared]) == 0
    assert [row[3] for row in rows(capsys)][1] == "0 of 2"


def test_names_of_layers_are_no_markup_and_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "new.json"
    load = written(tmp_path, "load", {"[/x]": LOAD})
    assert placement.main([load, "--ranks", "2", "--to", str(to)]) == 0
    assert rows(capsys)[0][0] == "[/x]" and list(json.loads(to.read_text())) == ["[/x]"]
    # As if the file were of one layer, which was all that was written.
    load = written(tmp_path, "load", {"": LOAD, "3": LOAD})
    assert placement.main([load, "--ranks", "2", "--to", str(to)]) == 2
    assert "LOAD: " in capsys.readouterr().err and list(json.loads(to.read_text())) == ["[/x]"]


def test_a_placement_is_written_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers may read the present one meanwhile."""
    to, load = tmp_path / "new.json", written(tmp_path, "load", LOAD)
    assert placement.main([load, "--ranks", "2", "--to", str(to)]) == 0
    before = to.read_text()

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert placement.main([load, "--ranks", "4", "--to", str(to)]) == 1
    assert to.read_text() == before


def test_experts_that_no_placement_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight on three ranks lie as 3, 3 and 2 where a layer has no placement."""
    to = tmp_path / "new.json"
    assert placement.main([written(tmp_path, "load", [1, 1, 1, 1, 1, 1, 5, 5]), "--ranks", "3", "--to", str(to)]) == 0
    # 10 of 16 on the last; planned, a five and two ones on two ranks.
    assert rows(capsys) == [["-", "1.88", "1.31", "-"]]
    assert Placement.from_json(to.read_text()) == plan_placement([1, 1, 1, 1, 1, 1, 5, 5], 3, 3)
    present = written(tmp_path, "present", json.loads(Placement.contiguous(4, 2).to_json()))
    assert placement.main([written(tmp_path, "load", LOAD), "--present", present]) == 2
    assert "--present: expected 8 experts as in LOAD, got 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("load", "more", "message"),
    [
        (LOAD, [], "--ranks: expected it, or --present"),
        (LOAD, ["--ranks", "0"], "--ranks: expected at least 1"),
        ([1e308] * 4, ["--ranks", "2"], "LOAD: .*load: expected numbers with a finite sum"),
        ({"2": LOAD, "4": [1, -1]}, ["--ranks", "2"], "LOAD: .*layer 4: load: expected finite numbers"),
        ({"2": 5}, ["--ranks", "2"], "LOAD: .*expected a list of numbers, or an object"),
        (LOAD, ["--ranks", "2", "--slots-per-rank", "9"], "--slots-per-rank: expected 4 .. 8, got 9"),
        ({"2": LOAD}, ["--ranks", "3", "--slots-per-rank", "2"], "--slots-per-rank: layer 2: expected 3 .. 8, got 2"),
        (LOAD, ["--present", "LOAD"], "--present: .*expected a placement, or one for each decoder layer"),
        (LOAD, ["--ranks", "2", "--to", "/nowhere/new.json"], "--to: no folder"),
        (LOAD, ["--ranks", "2", "--to", "LOAD"], "--to: expected another file than LOAD"),
    ],
)
def test_mistakes_are_named(
    load: object, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "load", load)
    assert placement.main([file, *(file if word == "LOAD" else word for word in more)]) == 2
    assert re.match(f"placement: {message}", capsys.readouterr().err)
