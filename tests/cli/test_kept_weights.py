"""The program that shows and frees what is kept in host memory, the one that times it, and the doctor's line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_runtime.checkpoints.kept_files import VARIABLE, kept_layers
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch import doctor, kept_weights
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.launch.research import restart_bench
from moe_runtime.layer import MoELayer

pytestmark = pytest.mark.cpu_only

CONFIG = MoELayerConfig(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, max_tokens_per_rank=8)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path / "kept"


def keep(folder: Path) -> int:
    """Write a checkpoint and load it; the bytes that are kept of it."""
    write_qwen3_moe_checkpoint(folder, CONFIG, seed=0)
    before = sum(layer.num_bytes for layer in kept_layers())
    context = ExpertParallelContext(device="cpu")
    MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8, keep_in_host_memory=True)
    return sum(layer.num_bytes for layer in kept_layers()) - before


def test_it_shows_and_frees(tmp_path: Path, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kept_weights.main([]) == 0
    assert f"0 bytes kept in {kept}, room for" in capsys.readouterr().out
    one, two = tmp_path / "one", tmp_path / "two"
    size = keep(one)
    assert 4 * 3 * 256 * 128 * 2 < size == keep(two)
    assert kept_weights.main([]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if str(one) in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]][1:5] == ["0", "bf16", "cpu", "4"]
    assert f"{2 * size / 1e6:.1f} MB kept in {kept}" in out
    assert kept_weights.main(["--free", "--checkpoint", str(one)]) == 0
    assert f"freed in {kept}" in capsys.readouterr().out
    assert [layer.about["checkpoint"] for layer in kept_layers()] == [str(two)]
    assert kept_weights.main(["--free"]) == 0
    assert not list(kept.iterdir())


def test_a_checkpoint_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert kept_weights.main(["--checkpoint", "x"]) == 2
    assert capsys.readouterr().err == "kept_weights: --checkpoint: expected together with --free\n"


def test_a_folder_that_others_can_write_is_refused(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept.mkdir()
    kept.chmod(0o777)
    assert kept_weights.main(["--free"]) == 2
    assert capsys.readouterr().err.startswith(f"kept_weights: {VARIABLE}: ")
    assert doctor.main(["--json"]) == 0
    assert "nobody else to write it" in json.loads(capsys.readouterr().out)["limits"]["kept_weights"]["problem"]
    kept.rmdir()
    kept.touch()
    assert kept_weights.main([]) == 2
    assert f"{VARIABLE}: expected a folder, {kept} is none" in capsys.readouterr().err


def test_the_doctor_says_what_is_kept(tmp_path: Path, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = keep(tmp_path / "one")
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)["limits"]["kept_weights"]
    assert (found["folder"], found["bytes"], found["problem"]) == (str(kept), size, None)
    assert found["usable_bytes"] > 0
    assert doctor.main([]) == 0
    assert "kept weights" in capsys.readouterr().out


def test_the_benchmark_at_a_few_kilobytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    sizes = ["--hidden=256", "--inner=128", "--experts=2", "--runs=1", "--formats", "nvfp4"]
    assert restart_bench.main([*sizes, f"--folder={tmp_path}", f"--json={file}"]) == 0
    report = json.loads(file.read_text())
    (result,) = report["results"]
    assert result["weight_format"] == "nvfp4" and result["bytes"] > 2 * 3 * 256 * 128 // 2
    assert all(result[f"{name}_s"] > 0 for name in ("cold", "cached", "keeps", "kept"))
    assert "from copies" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]


def test_the_benchmark_compares_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter("aaab")
    monkeypatch.setattr(restart_bench, "in_process", lambda *_: {"seconds": 1.0, "digest": next(answers)})
    with pytest.raises(AssertionError, match="bf16: the bits of copies and checkpoint differ"):
        restart_bench.measure(tmp_path, "bf16", str(tmp_path), 1)
