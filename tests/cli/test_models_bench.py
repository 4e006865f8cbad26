"""`kernel_bench models`: every pair of formats at the sizes of a model is checked, or refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.launch.kernel_bench import __main__ as bench
from moe_runtime.launch.kernel_bench import models_bench
from moe_runtime.launch.kernel_bench.ceilings import Ceilings
from moe_runtime.launch.kernel_bench.models_bench import Model


def test_every_pair_has_a_row_per_number_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    assert not bench.main(
        ["models", "--small", "--cases", "gpt-oss-20b", "--tokens", "1", "9", "--steps", "1", "--json", str(file)]
    )
    report = json.loads(file.read_text())
    assert report["passed"]
    rows = {(r["weight_format"], r["token_format"], r.get("tokens")): r for r in report["results"]}
    assert set(rows) == {(*pair, count) for pair in models_bench.PAIRS for count in (1, 9)}
    for row in rows.values():
        assert row["check"]["passed"] and 0 < row["check"]["error"]
        assert row["ratio_to_torch"] == pytest.approx(row["median_us"] / row["torch_us"])
        # All pairs are compared with one time of torch.
        assert row["torch_us"] == rows["bf16", "bf16", row["tokens"]]["torch_us"]
    # 2 experts of one token, of 9 tokens up to 8; 4.25 bits a weight, and bf16 tokens and results.
    weights = 3 * 288 * 160 * (4 + 8 / 32) / 8
    for pair in (("mxfp4", "bf16"), ("mxfp4 in fp8", "fp8_block")):
        assert rows[*pair, 1]["moved_bytes"] == 2 * weights + 4 * 288
    assert rows["mxfp4", "bf16", 9]["work_flop"] == 9 * 2 * 2 * 3 * 288 * 160


def test_a_format_that_sizes_do_not_fit_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 bytes no row of FP8 may be."""
    monkeypatch.setattr(models_bench, "small", lambda model: replace(model, hidden=40, experts=2, top_k=1))
    file = tmp_path / "models.json"
    assert not bench.main(
        ["models", "--small", "--cases", "Mixtral.*fp8_block x", "--tokens", "1", "--json", str(file)]
    )
    (row,) = json.loads(file.read_text())["results"]
    assert row["refused"] == "hidden_size: format fp8_block needs a positive multiple of 16, got 40"
    assert "multiple of 16" in capsys.readouterr().out


def test_a_failed_check_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_runtime.launch.common.cases.layer_bound", lambda config, **more: 0.0)
    file = tmp_path / "models.json"
    assert (
        bench.main(["models", "--small", "--cases", "Mixtral.*nvfp4 x bf16", "--tokens", "1", "--json", str(file)]) == 1
    )
    (row,) = json.loads(file.read_text())["results"]
    assert row["median_us"] is None and row["ratio_to_torch"] is None and not row["check"]["passed"]


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    ceilings = Ceilings(memory_tb_per_s=4.0, bf16_tflop_per_s=800.0, fp8_tflop_per_s=1600.0)
    assert ceilings.floor_us(("nvfp4", "nvfp4"), 4e9, 1e9) == (1000.0, "memory")
    assert ceilings.floor_us(("nvfp4", "nvfp4"), 4e6, 8e12) == (10000.0, "compute")
    assert ceilings.floor_us(("fp8_block", "fp8_block"), 4e6, 8e12) == (5000.0, "compute")
    assert Ceilings().floor_us(("bf16", "bf16"), 1.0, 1.0) == (None, None)


def test_names_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    found = models_bench.select("DeepSeek-V3 nvfp4")
    assert found == {
        Model("DeepSeek-V3", 7168, 2048, 256, 8): [
            *(("nvfp4", fmt) for fmt in ("nvfp4", "bf16", "fp8_block")),
            ("nvfp4 in fp8", "fp8_block"),
        ]
    }
    assert bench.main(["models", "--cases", "none"]) == 2
    assert "Mixtral-8x7B bf16 x bf16" in capsys.readouterr().err
