"""`launch.bench --trace` as a program: every phase of every rank is in the file, and nothing is timed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.launch import bench
from moe_runtime.launch.benchmarks import layer_report, trace
from tests.cli.test_launch import TINY, TWO_RANKS, program


@pytest.mark.cpu_only
def test_a_trace_under_torchrun_is_of_the_layer_alone(tmp_path: Path) -> None:
    """Nothing is timed beside a profiler, and the JSON says that it is no run of the benchmark."""
    config, file, traced = (tmp_path / name for name in ("tiny.yaml", "phases.json", "trace.json"))
    config.write_text(TINY.format(layer="token_format: mxfp8"))
    arguments = ("layer", "--config", config, "--tokens", 1, 16, "--formats", "bf16", "nvfp4", "--json", file)
    done = program("bench", *arguments, "--routing", "uniform", "half", "--trace", traced, launcher=TWO_RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["kind"] == layer_report.PHASES_KIND and report["passed"] is True
    results = report["results"]
    assert [r["implementation"] for r in results] == [layer_report.OURS] * 8
    assert all(r["check"]["passed"] and r["median_us"] is None for r in results)
    check_trace(json.loads(traced.read_text()), 8, results)
    assert "traced, not timed" in " ".join(done.stdout.split()) and "┃ us ┃" not in done.stdout
    assert done.stdout.count("us in eager steps, mean over ranks: dispatch_send ") == 8


def check_trace(found: dict[str, Any], recordings: int, results: list[dict[str, Any]]) -> None:
    """Every phase of every rank and step is there, inside the range of its recording; the JSON has their times."""
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0: host", "rank 0: layer", "rank 1: host", "rank 1: layer"]
    events = [event | {"by": names[event["pid"]]} for event in found["traceEvents"] if event["ph"] == "X"]
    phases = ["dispatch_send", "dispatch_recv", "experts", "gate_up", "down", "combine_send", "combine_recv"]
    wholes = {rank: [e for e in events if e["by"] == f"rank {rank}: layer"] for rank in (0, 1)}
    layers = [r for r in results if r["phases"]]
    assert len(layers) == recordings
    for rank, recorded in wholes.items():
        assert len(recorded) == recordings
        for before, after in itertools.pairwise(recorded):
            assert before["ts"] + before["dur"] < after["ts"]
        for whole, result in zip(recorded, layers, strict=True):
            formats = f"{result['token_format']} > {result['combine_format']}"
            assert whole["name"] == f"layer {formats}, {result['tokens_per_rank']} tokens, {result['routing']}"
            assert list(result["phases"]) == phases
            end = whole["ts"] + whole["dur"]
            inside = [e for e in events if e["by"] == f"rank {rank}: host" and whole["ts"] <= e["ts"] < end]
            assert {e["name"] for e in inside} == {f"moe_runtime::{name}" for name in phases}
            for name, times in result["phases"].items():
                durations = [e["dur"] for e in inside if e["name"] == f"moe_runtime::{name}"]
                assert len(durations) == trace.STEPS
                assert sum(durations) / trace.STEPS <= times["largest_us"] * (1 + 1e-9)
                assert times["mean_us"] <= times["largest_us"]
            assert all(e["ts"] + e["dur"] <= end + 1e-3 for e in inside)


@pytest.mark.cpu_only
def test_a_trace_that_cannot_be_written_leaves_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY.format(layer="token_format: bf16"))
    assert bench.main(["layer", "--config", str(config), "--trace", "/dev/full"]) == 1
    said = capsys.readouterr()
    assert "us in eager steps, mean over ranks: dispatch_send " in said.out
    assert said.err.endswith("bench: OSError: [Errno 28] No space left on device\n")
