"""The program that times what counted waits and recorded routes cost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from moe_runtime.launch.research import overheads
from tests.support.programs import ROOT, without_interpreter
from tests.support.spawner import interpreter


def test_it_times_every_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.json"
    arguments = [
        "--config",
        "tiny_deepseek_v3",
        "--tokens",
        "1",
        "8",
        "--rounds",
        "2",
        "--captures",
        "3",
        "--json",
        str(file),
    ]
    assert overheads.main(arguments) == 0
    report = json.loads(file.read_text())
    assert report["kind"] == "overheads" and [row["tokens"] for row in report["results"]] == [1, 8]
    for row in report["results"]:
        # A rank alone waits for nobody.
        assert set(row["us"]) == set(row["over_off"]) == set(overheads.VARIANTS) - set(overheads.WAITING)
        assert all(us > 0 for us in row["us"].values()) and row["over_off"]["off"] == 0
        assert all(len(times) == 3 and len(times[0]) == 2 for times in row["all_us"].values())
    assert "T=8: off" in capsys.readouterr().out


@pytest.mark.cpu_only
def test_experts_move_where_ranks_do_not_divide_them(tmp_path: Path) -> None:
    """32 experts on three ranks."""
    file = tmp_path / "times.json"
    launcher = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m"]
    arguments = ["--config", "tiny_deepseek_v3", "--tokens", "3", "--rounds", "1", "--captures", "1"]
    done = subprocess.run(
        [*launcher, "moe_runtime.launch.research.overheads", *arguments, "--json", str(file)],
        env=without_interpreter(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["environment"]["ranks"] == 3 and report["results"][0]["us"]["off"] > 0
    replaced = report["replace"]
    assert replaced["slots"] > 0 and len(replaced["seconds"]) == 6 and min(replaced["seconds"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "no/such/times.json"], "--json: no folder no/such"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--captures", "0"], "--captures: expected at least 1, got 0"),
        (["--tokens", "8", "0"], "--tokens: expected at least 1, got 0"),
    ],
)
def test_wrong_calls_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert overheads.main(arguments) == 2
    assert message in capsys.readouterr().err
