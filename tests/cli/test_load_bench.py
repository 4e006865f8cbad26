"""The program that times loading, at a few kilobytes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.research import load_bench


def test_what_it_writes_is_read(tmp_path: Path) -> None:
    load_bench.write_checkpoint(tmp_path, hidden=256, inner=128, experts=130, layers=2)
    with Checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.files.shards()) == 6
        experts = list(checkpoint.experts(1, range(63, 66)))
        buffers = checkpoint.quant_buffers(1, "nvfp4", 3, torch.device("cpu"))
        placed = list(checkpoint.experts(1, range(63, 66), buffers))
    for expert in experts:
        assert isinstance(expert.gate_up, ExpertWeights)
        assert expert.gate_up.dequantize().isfinite().all()
    for one, two in zip(experts, placed, strict=True):
        assert torch.equal(one.down.quants, two.down.quants)  # type: ignore[union-attr]
        assert torch.equal(one.gate_up.quants, two.gate_up.quants)  # type: ignore[union-attr]
    assert not torch.equal(experts[0].down.quants, experts[1].down.quants)  # type: ignore[union-attr]


def test_it_reads_and_loads_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden": 256, "inner": 128, "experts": 6, "layers": 2}
    load_bench.write_checkpoint(tmp_path / "checkpoint", **sizes)
    own = 6 * 2 * 3 * 256 * 128 * 9 // 16
    for rank in range(2):
        loaded = load_bench.load(tmp_path / "checkpoint", rank, 2)
        read = load_bench.read(tmp_path / "checkpoint", rank, 2)
        # Three second-level scales of four bytes each; input scales are read, and not kept.
        assert loaded["bytes"] == (own + 12 * 3 * 4) // 2
        assert read["bytes"] == (own + 12 * 6 * 4) // 2
    arguments = [f"--{name}={number}" for name, number in sizes.items()]
    file = tmp_path / "result.json"
    ballast = torch.ones(2**28)  # 1 GiB of this process, which is not the measured one's.
    assert load_bench.main([*arguments, "--ranks=1", "--runs=1", f"--folder={tmp_path}", f"--json={file}"]) == 0
    report = json.loads(file.read_text())
    where, result = report["environment"], report["result"]
    assert where["command"] and where["processor"] and where["packages"]["torch"]
    assert where["cores"] == len(os.sched_getaffinity(0)) and where["memory_bytes"] > ballast.nbytes
    assert result["bytes"] == own + 12 * 3 * 4 and len(result["load_s"]) == 1
    assert result["ratio"] == result["load_s"][0] / result["read_s"][0]
    assert 0 < result["over_own_bytes"] < ballast.nbytes
    assert "times as long as reading" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "result.json"]


@pytest.mark.timeout(60)
def test_a_process_that_is_killed_is_told_of() -> None:
    with pytest.raises(ChildProcessError, match=r"^raise_signal: its process was killed; is memory short\?$"):
        load_bench.in_process(signal.raise_signal, signal.SIGKILL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(([f"--{name}", "0"], f"--{name}: expected at least 1, got 0") for name in load_bench.NUMBERS),
        (["--json", "no/such/result.json"], "--json: no folder no/such"),
        (["--folder", "no/such"], "--folder: no folder no/such"),
    ],
)
def test_mistakes_are_told_before_the_work(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(*args: object, **sizes: object) -> None:
        raise AssertionError("it writes")

    monkeypatch.setattr(load_bench, "write_checkpoint", begun)
    assert load_bench.main(arguments) == 2
    assert capsys.readouterr().err == f"load_bench: {message}\n"
