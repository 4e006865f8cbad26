"""`launch.run` and `launch.bench` as programs: what they print and write, and the exit codes of everything wrong."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from moe_runtime.checkpoints.calibration import Calibration
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.config import MoELayerConfig, load_config
from moe_runtime.kernels.formats.number_formats import FORMATS, ceil_div
from moe_runtime.launch import bench, run
from moe_runtime.launch.benchmarks import checks, layer_bench, layer_report, link_rate, torch_layer
from moe_runtime.launch.common import cases, environment
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.placement.placement import Placement
from tests.support.programs import ROOT, without_interpreter
from tests.support.spawner import interpreter

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

TINY = """
layer: {{hidden_size: 128, intermediate_size: 128, num_experts: 5, top_k: 2, max_tokens_per_rank: 16, {layer}}}
tokens_per_rank: 9
seed: 3
"""


def program(name: str, *arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`python -m moe_runtime.launch.name arguments` without a GPU."""
    command = [interpreter(), *launcher, "-m", f"moe_runtime.launch.{name}", *map(str, arguments)]
    changes = {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = without_interpreter(**changes)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.format(layer="token_format: mxfp8"))
    return file


@pytest.mark.cpu_only
def test_run_under_torchrun_reports_every_rank(tiny: Path) -> None:
    done = program("run", "--config", tiny, "--tokens", 0, 13, "--steps", 2, launcher=TWO_RANKS)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s) on cpu, transport shared, engine torch" in done.stdout
    assert "not nvshmem" in done.stdout
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert ["0", "0", "0", "-", "-", "-", ""] in cells
    (rank_1,) = (row for row in cells if row[:3] == ["1", "13", "39"])
    assert rank_1[-1] == "inside" and float(rank_1[3]) <= float(rank_1[4]) == pytest.approx(0.0907, rel=1e-3)
    phases = {row[0]: [float(cell) for cell in row[1:]] for row in cells if len(row) == 4}
    assert list(phases) == ["route", "dispatch_send", "dispatch_recv", "experts", "combine_send", "combine_recv"]
    assert all(largest == max(ranks) for *ranks, largest in phases.values())
    bars = [line.split() for line in done.stdout.splitlines() if " expert " in line]
    assert [bar[3] for bar in bars] == list("01234") and [bar[1] for bar in bars] == list("00011")
    assert sum(int(bar[-1]) for bar in bars) == 2 * 13 * 2


@pytest.mark.cpu_only
def test_bench_under_torchrun_writes_json(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ("--config", tiny, "--tokens", 1, 16, "--formats", "bf16", "nvfp4", "--steps", 2, "--json", file)
    more = ("--combine-format", "mxfp8", "--routing", "uniform", "half", "--link-gb-per-s", 50)
    done = program("bench", *arguments, *more, launcher=TWO_RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["passed"] is True
    assert report["config"]["layer"]["num_experts"] == 5
    where = report["environment"]
    assert where["ranks"] == 2 and where["transport"] == "shared" and where["engine"] == "torch"
    assert where["packages"]["torch"] and where["cores"] >= 1 and "--combine-format mxfp8" in where["command"]
    assert {"git_commit", "driver", "gpus", "processor", "memory_bytes", "python", "platform", "time_utc"} <= set(where)
    assert where["command"].startswith("torchrun --nproc-per-node=2 -m moe_runtime.launch.bench --config tiny.yaml --")
    given = {"gb_per_s": 50.0, "source": "--link-gb-per-s", "gpu": None, "ranks": None, "same_gpu": None}
    assert report["link"] == given and "count 50 GB/s, as --link-gb-per-s says." in done.stdout
    ours = ["dispatch", "combine", "dispatch+combine", "gemm gate+up", "gemm down", "layer"]
    cases_run = list(itertools.product(("bf16", "nvfp4"), (1, 16), ("uniform", "half")))
    for case in cases_run:
        part = [r for r in report["results"] if (r["token_format"], r["tokens_per_rank"], r["routing"]) == case]
        assert [r["operation"] for r in part if r["implementation"] == layer_report.OURS] == ours
        peers = [(r["operation"], r["implementation"]) for r in part if r["implementation"] != layer_report.OURS]
        all_to_all = "torch all_to_all_single"
        assert peers == [
            ("dispatch", all_to_all),
            ("combine", all_to_all),
            ("layer", torch_layer.NAME),
        ]
        times = {(r["operation"], r["implementation"]): r["median_us"] for r in part}
        for result in part:
            name, by = result["operation"], result["implementation"]
            peer = dict(peers).get(name) if by == layer_report.OURS else None
            ratio = None if peer is None else times[name, by] / times[name, peer]
            assert result["ratio_to_torch"] == pytest.approx(ratio)
            if name in ("dispatch", "combine"):
                assert result["floor_us"] == pytest.approx(result["moved_bytes"] / 50e3)
            assert (
                result["memory"] is None and result["phases"] is None and result["inputs_in_turn"] == layer_bench.TURNS
            )
    for result in report["results"]:
        assert 0 < result["smallest_us"] <= result["median_us"] <= result["largest_us"]
        assert result["method"] == "wall_clock" and result["iterations"] == 2 and result["steps_per_iteration"] == 1
        assert result["combine_format"] == "mxfp8" and result["weight_format"] == result["token_format"]
        if result["operation"] == "layer" or (
            result["implementation"] == layer_report.OURS and result["operation"] != "dispatch+combine"
        ):
            assert result["check"]["passed"] and result["check"]["error"] <= result["check"]["bound"]
        if result["work_flop"] is not None:
            assert result["rate_tflop_per_s"] == pytest.approx(result["work_flop"] / result["median_us"] * 1e-6)
    assert "gemm gate+up" in done.stdout


@pytest.mark.cpu_only
def test_bench_times_the_calls_of_deep_ep(tmp_path: Path) -> None:
    config, file = tmp_path / "config.yaml", tmp_path / "bench.json"
    config.write_text(TINY.format(layer="token_format: fp8_block").replace("num_experts: 5", "num_experts: 6"))
    arguments = ("dispatch", "low_latency", "normal", "--config", config, "--tokens", 16, "--steps", 2, "--json", file)
    done = program("bench", *arguments, launcher=TWO_RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["kind"] == "low_latency" and report["passed"] is True
    timed = {(r["operation"], r["implementation"]): r for r in report["results"]}
    forms = [f"{fmt}, {limit}" for limit in ("24 SMs", "64 SMs", "all SMs") for fmt in ("bf16", "fp8")]
    names = [f"{layer_report.NORMAL}, {buffer}{form}" for buffer in ("", "ElasticBuffer, ") for form in forms]
    calls = ("", ", num_worst_tokens", ", cached")
    dispatches = {("dispatch", f"{name}{call}") for name in names for call in calls}
    dispatches |= {("dispatch", f"{layer_report.NORMAL}, {form}, with layout") for form in forms}
    combines = {("combine", name) for name in names if "bf16" in name}
    parts = ("dispatch", "combine", "dispatch+combine")
    low_latency = {(part, f"{layer_report.LOW_LATENCY}, fp8") for part in parts}
    ours = {("dispatch", layer_report.OURS), ("dispatch", "torch all_to_all_single")}
    assert set(timed) == dispatches | combines | low_latency | ours and len(timed) == len(report["results"])
    for key, result in timed.items():
        assert result["median_us"] > 0 and (result["check"] is None or result["check"]["passed"])
        if key in dispatches | combines:
            row = 128 + 4 if "fp8" in key[1] else 2 * 128
            tokens = result["moved_bytes"] / row
            assert 0 < tokens <= 16 and result["check"]["bound"] == 0
            assert result["rate_gb_per_s"] == pytest.approx(result["moved_bytes"] / result["median_us"] * 1e-3)


@pytest.mark.cpu_only
def test_normal_calls_that_are_wrong_are_not_timed(tmp_path: Path) -> None:
    """A buffer that adds to a row: the check finds it, and nothing of that form is timed."""
    config, file = tmp_path / "config.yaml", tmp_path / "bench.json"
    config.write_text(TINY.format(layer="token_format: bf16").replace("num_experts: 5", "num_experts: 6"))
    code = (
        "import sys, torch; from moe_runtime.launch import bench; from moe_runtime.deep_ep import Buffer\n"
        "right = Buffer.combine\n"
        "def wrong(*a, **k):\n    y, *rest = right(*a, **k)\n    y[0, 0] += 1\n    return y, *rest\n"
        "Buffer.combine = wrong\n"
        f"sys.exit(bench.main(['normal', '--config', {str(config)!r}, '--steps', '1', '--json', {str(file)!r}]))\n"
    )
    script = tmp_path / "wrong.py"
    script.write_text(code)
    environment = without_interpreter(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    command = [interpreter(), *TWO_RANKS, str(script)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    results = json.loads(file.read_text())["results"]
    assert results
    for result in results:
        wrong = "bf16" in result["implementation"]
        assert result["check"]["passed"] is not wrong and (result["median_us"] is None) == wrong


def test_floors_by_the_links_of_another_gpu_are_told_of(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_rate, "default", lambda device: link_rate.MEASURED)
    file = tmp_path / "bench.json"
    assert bench.main(["dispatch", "--config", str(tiny), "--steps", "1", "--json", str(file)]) == 0
    link = json.loads(file.read_text())["link"]
    assert link["gb_per_s"] == 351 and (link["gpu"], link["ranks"]) == ("NVIDIA H200", 4)
    said = "measured on 4 x NVIDIA H200 (links_h200x4.json)"
    if not torch.cuda.is_available():
        assert link["same_gpu"] is False
        said += ": NOT what this ran on, no GPU."
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("routing", ["zipf", "one"])
def test_bench_of_one_rank(routing: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, file = tmp_path / "config.yaml", tmp_path / "bench.json"
    config.write_text(TINY.format(layer="token_format: fp8_block"))
    assert bench.main(["--config", str(config), "--routing", routing, "--steps", "1", "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert {result["mode"] for result in results} == {"gathered"}
    assert {result["tokens_per_rank"] for result in results} == {9}
    assert "FAILED" not in capsys.readouterr().out


def test_bench_takes_from_a_checkpoint_what_the_config_does_not_say(tmp_path: Path) -> None:
    """For every number of tokens, and the report says so."""
    sizes = "hidden_size: 128, intermediate_size: 128, num_experts: 4, top_k: 2, max_tokens_per_rank: 16"
    source, stored, file = tmp_path / "source", tmp_path / "stored", tmp_path / "bench.json"
    write_qwen3_moe_checkpoint(source, MoELayerConfig(**yaml.safe_load(f"{{{sizes}}}")), seed=1)
    calibration = Calibration(4.0, 24.0)
    convert_checkpoint(source, stored, "nvfp4", calibrations={0: calibration})
    for said, tokens, gsf in (("", "nvfp4", calibration.intermediate_gsf), (", token_format: bf16", "bf16", None)):
        config = tmp_path / "config.yaml"
        config.write_text(f"layer: {{{sizes}{said}}}\ncheckpoint: {{path: {stored}}}\n")
        arguments = ["layer", "--config", str(config), "--tokens", "8", "16", "--check-tokens", "12", "--steps", "1"]
        assert bench.main([*arguments, "--json", str(file)]) == 0
        report = json.loads(file.read_text())
        layer = report["config"]["layer"]
        assert (layer["token_format"], layer["weight_format"], layer["intermediate_gsf"]) == (tokens, "nvfp4", gsf)
        assert layer["max_tokens_per_rank"] == 16
        for result in report["results"]:
            assert (result["token_format"], result["weight_format"]) == (tokens, "nvfp4")
            assert result["check"]["checked_tokens"] == min(12, result["tokens_per_rank"])
        assert {result["tokens_per_rank"] for result in report["results"]} == {8, 16}


def test_bench_of_a_checkpoint_leaves_its_shared_expert_out(tmp_path: Path) -> None:
    tiny_models = pytest.importorskip("tests.support.tiny_models")
    source, config, file = tmp_path / "checkpoint", tmp_path / "config.yaml", tmp_path / "bench.json"
    tiny_models.tiny_model("qwen2_moe", 1).bfloat16().save_pretrained(source)
    with Checkpoint(source) as checkpoint:
        layer = checkpoint.layer_config(0, max_tokens_per_rank=8, token_format="bf16")
    assert layer.shared_expert is not None
    config.write_text(yaml.safe_dump({"layer": layer.model_dump(), "checkpoint": {"path": str(source)}}))
    assert bench.main(["layer", "--config", str(config), "--steps", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["config"]["layer"]["shared_expert"] is None and report["passed"] is True


def test_run_without_tokens_per_rank_takes_as_many_as_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(TINY.format(layer="token_format: bf16").replace("tokens_per_rank: 9\n", ""))
    assert load_config(file).tokens_per_rank == 0
    assert run.main(["--config", str(file), "--steps", "1"]) == 0
    (cells,) = (line.split("│") for line in capsys.readouterr().out.splitlines() if "inside" in line)
    assert [cell.strip() for cell in cells[1:4]] == ["0", "16", "32"]


@pytest.mark.parametrize("name", ["tiny_gpt_oss", "tiny_deepseek_v3"])
def test_bench_knows_biases_and_leaves_the_shared_expert_out(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    operations = ["gemm", "layer"]
    assert bench.main([*operations, "--config", name, "--tokens", "8", "--steps", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["config"]["layer"]["expert_bias"] == (name == "tiny_gpt_oss")
    assert report["config"]["layer"]["shared_expert"] is None
    assert "FAILED" not in capsys.readouterr().out


def test_bench_with_few_sms(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ["layer", "--config", str(tiny), "--num-sms", "16", "--steps", "1"]
    assert bench.main([*arguments, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["config"]["layer"]["num_sms"] == 16
    implementations = [r["implementation"] for r in report["results"]]
    assert implementations == [layer_report.OURS, torch_layer.NAME]


def test_run_reads_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = load_config("tiny_qwen3_moe").layer.replace(hidden_size=128, intermediate_size=128, num_experts=4, top_k=2)
    write_qwen3_moe_checkpoint(tmp_path / "checkpoint", layer, seed=1)
    config = tmp_path / "config.yaml"
    config.write_text(
        "layer: {hidden_size: 128, intermediate_size: 128, num_experts: 4, top_k: 2, max_tokens_per_rank: 32}\n"
        f"checkpoint: {{path: {tmp_path / 'checkpoint'}}}\ntokens_per_rank: 32\n"
    )
    for fmt in FORMATS:
        assert run.main(["--config", str(config), "--format", fmt, "--steps", "1"]) == 0
    assert "inside" in capsys.readouterr().out


def test_weights_may_have_another_format_than_tokens(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for formats in (("--format", "fp8_block", "--weight-format", "nvfp4"), ("--weight-format", "mxfp4")):
        assert run.main(["--config", str(tiny), *formats, "--steps", "1"]) == 0
        assert f"weights {formats[-1]}" in " ".join(capsys.readouterr().out.split())
    assert run.main(["--config", str(tiny), "--format", "mxfp8", "--weight-format", "nvfp4"]) == 2
    assert "weight_format: expected mxfp8 or mxfp4, got nvfp4 with mxfp8 tokens" in capsys.readouterr().err


def test_an_error_outside_its_bound_exits_with_1(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "layer_bound", lambda config, **more: 1e-4)
    assert run.main(["--config", str(tiny), "--steps", "1"]) == 1
    assert "OUTSIDE" in capsys.readouterr().out
    file = tmp_path / "bench.json"
    assert bench.main(["layer", "--config", str(tiny), "--steps", "1", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    result, baseline = report["results"]
    assert baseline["check"]["passed"] and baseline["median_us"] and result["ratio_to_torch"] is None
    assert report["passed"] is False and result["check"]["passed"] is False and result["median_us"] is None
    out = capsys.readouterr().out
    assert "layer mxfp8 > bf16, 9 tokens, uniform: FAILED layer: relative Frobenius error: " in out
    traced = tmp_path / "trace.json"
    assert bench.main(["layer", "--config", str(tiny), "--trace", str(traced), "--json", str(file)]) == 1
    (result,) = json.loads(file.read_text())["results"]
    assert result["phases"] is None and json.loads(traced.read_text())["traceEvents"] == []
    # However narrow the terminal, and without columns that say nothing.
    # A rate on a machine that is busy may be wider than its heading.
    assert "│ of torch │" not in out and re.search(r"┃ +TFLOP/s ┃", out) and f"│ {torch_layer.NAME} │" in out


def test_nan_is_outside() -> None:
    result = run.RankResult(1, {}, 1, math.nan, math.nan, [])
    assert not run.inside(result, 0.5)
    assert not checks.Check("nothing", math.nan, 1.0).passed


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("run", ("--config", "no_such_config"), "'no_such_config'"),
        ("run", ("--tokens", "65"), "--tokens: expected 0 .. max_tokens_per_rank = 64, got 65"),
        ("run", ("--tokens", "1", "2"), "--tokens: expected 1 number or 1, one per rank, got 2"),
        ("run", ("--steps", "0"), "--steps: expected at least 1, got 0"),
        ("run", ("--check-tokens", "-1"), "--check-tokens: expected 0 or more, got -1"),
        ("run", ("--transport", "collective"), "transport: collective cannot be used"),
        ("bench", ("--tokens", "0"), "--tokens: expected at least 1, got 0"),
        ("bench", ("--check-tokens", "0"), "--check-tokens: expected at least 1, got 0"),
        ("bench", ("--json", "no/such/folder/file.json"), "--json: no folder no/such/folder"),
        ("bench", ("layer", "--trace", "."), "--trace: expected a file, . is a folder"),
        ("bench", ("layer", "--trace", "no/such/folder/file.json"), "--trace: no folder no/such/folder"),
        ("bench", ("layer", "--json", "a.json", "--trace", "./a.json"), "--trace: expected another file than --json, "),
        (
            "bench",
            ("dispatch", "layer", "--trace", "trace.json"),
            "--trace: records the layer and times nothing, expected the operation layer alone",
        ),
        ("bench", ("--num-sms", "0"), "--num-sms: expected at least 1, got 0"),
        ("bench", ("--link-gb-per-s", "0"), "--link-gb-per-s: expected a positive number, got 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    name: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"run": run, "bench": bench}[name].main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith(f"{name}: ") and error.count("\n") == 1


@pytest.mark.parametrize("size", [2**50, 2**62])
def test_lack_of_memory_is_one_line(size: int, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        return torch.empty(size, dtype=torch.uint8, device=device).numel()

    assert environment.run_program("run", work) == 1
    error = capsys.readouterr().err
    assert error.startswith(("run: RuntimeError: ", "run: OutOfMemoryError: ")) and error.count("\n") == 1
    assert "emory" in error
    with pytest.raises(RuntimeError):
        environment.run_program("run", work, debug=True)
    with pytest.raises(RuntimeError, match="shapes"):
        environment.run_program("run", lambda: exec('raise RuntimeError("shapes")'))


def test_ctrl_c_and_locales_without_a_character(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def work() -> int:
        print("\u2588")
        raise KeyboardInterrupt

    out = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert environment.run_program("run", work) == 130
    out.flush()
    assert raw.getvalue() == b"?\n" and capsys.readouterr().err == "run: interrupted\n"


def test_files_that_cannot_be_written_are_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment.check_folder("--json", tmp_path / "new.json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as of a file system that is read-only
    with pytest.raises(ValueError, match=r"--json: .*new\.json cannot be written"):
        environment.check_folder("--json", tmp_path / "new.json")


def test_links_are_followed_and_circles_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link, circle, lost = (tmp_path / name for name in ("link.json", "circle.json", "lost.json"))
    link.symlink_to(tmp_path / "runs" / "a.json")
    circle.symlink_to(circle)
    lost.symlink_to(tmp_path / "no" / "a.json")
    environment.check_folder("--json", link)
    environment.write_json(link, {"a": 1})
    assert link.is_symlink() and json.loads((tmp_path / "runs" / "a.json").read_text()) == {"a": 1}
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["a.json"]
    with pytest.raises(ValueError, match=r"--json: .*circle\.json cannot be written"):
        environment.check_folder("--json", circle)
    with pytest.raises(ValueError, match=rf"--json: no folder {tmp_path}/no$"):
        environment.check_folder("--json", lost)
    with pytest.raises(ValueError, match=r"--json: .*: File name too long"):
        environment.check_folder("--json", tmp_path / ("a" * 300))


def test_a_file_in_a_folder_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What replaces it needs a name beside it. A device is written in place."""
    (tmp_path / "old.json").write_text("{}")
    folders = (tmp_path, Path("/dev"))
    monkeypatch.setattr(os, "access", lambda path, mode: path not in folders)
    with pytest.raises(ValueError, match=r"--json: .*old\.json cannot be written"):
        environment.check_folder("--json", tmp_path / "old.json")
    environment.check_folder("--json", Path("/dev/null"))


def test_a_results_file_is_written_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment.write_json(file := tmp_path / "a.json", {"a": [1]})
    before = file.read_bytes()

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.json'"):
        environment.write_json(file, {"a": [2]})
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_sigterm_leaves_nothing_of_the_demo(tmp_path: Path) -> None:
    begun = subprocess.Popen(
        [sys.executable, "-m", "moe_runtime.launch.demo"], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=-3
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("moe_runtime-demo-*/checkpoint")) and time.monotonic() < deadline:
        time.sleep(0.05)
    begun.terminate()
    assert begun.wait(60) == 143 and not list(tmp_path.glob("moe_runtime-demo-*"))


def test_unknown_keys_and_sizes_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(TINY.format(layer="hiden_size: 1"))
    assert run.main(["--config", str(file)]) == 2
    assert capsys.readouterr().err == f"run: {file}: layer.hiden_size: unknown key\n"
    file.write_text(TINY.format(layer="token_format: bf16").replace("hidden_size: 128", "hidden_size: 112"))
    assert run.main(["--config", str(file), "--format", "mxfp8"]) == 2
    assert capsys.readouterr().err == "run: hidden_size: format mxfp8 needs a positive multiple of 32, got 112\n"
    with pytest.raises(ValueError, match="positive multiple of 32"):
        run.main(["--config", str(file), "--format", "mxfp8", "--debug"])


@pytest.mark.cpu_only
def test_a_mistake_under_torchrun_ends_all_ranks(tiny: Path) -> None:
    done = program("run", "--config", tiny, "--tokens", 17, launcher=TWO_RANKS)
    assert done.returncode != 0
    assert "--tokens: expected 0 .. max_tokens_per_rank = 16, got 17" in done.stderr
    assert "run: rank " in done.stderr


def test_bench_refuses_a_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "placed.yaml"
    file.write_text(TINY.format(layer="token_format: bf16") + "placement: {}\n")
    assert bench.main(["--config", str(file)]) == 2
    assert "placement: benchmarks are of contiguous experts" in capsys.readouterr().err


def test_bench_refuses_other_operations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(["dispatch", "sort"])
    assert stop.value.code == 2
    assert "got sort" in capsys.readouterr().err


def test_messages_become_one_line() -> None:
    assert (
        environment.one_line(ValueError("file:\n  a: missing\n  b: unknown key")) == "file: a: missing; b: unknown key"
    )


def test_the_command_starts_the_program_again(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench.py", "layer", "--json", "/tmp/a b/run.json"])
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert environment.machine_record()["command"] == "python bench.py layer --json run.json"
    main.__spec__ = ModuleSpec("moe_runtime.launch.bench", None)
    assert environment.machine_record()["command"] == "python -m moe_runtime.launch.bench layer --json run.json"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for ranks, start in ((4, "torchrun --nproc-per-node=4"), (8, "torchrun --nproc-per-node=4 --nnodes=2")):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        command = environment.machine_record()["command"]
        assert command == f"{start} -m moe_runtime.launch.bench layer --json run.json"


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("/tmp/secret/x.json", "x.json"),
        ("../secret/x.json", "x.json"),
        ("./x.json", "x.json"),
        ("/tmp/a=b/x.json", "x.json"),
        ("--json=/tmp/secret/x.json", "--json=x.json"),
        ("--json=secret/a=b.json", "--json=a=b.json"),
        ("--json=x.json", "--json=x.json"),
        ("--config=tiny_cpu", "--config=tiny_cpu"),
        ("^bf16 32x32=", "'^bf16 32x32='"),
        ("-1", "-1"),
    ],
)
def test_the_command_tells_no_folder(argument: str, recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", argument])
    assert environment.machine_record()["command"].endswith(f" {recorded}")


def test_histogram_groups_many_experts() -> None:
    lines = run.histogram([1] * 255 + [3], run.holders_of(256, 8, None))
    assert len(lines) == run.HISTOGRAM_LINES
    assert lines[0].split()[:4] == ["rank", "0", "expert", "0-7"] and lines[0].split()[-1] == "8"
    assert lines[-1].split()[:4] == ["rank", "7", "expert", "248-255"] and lines[-1].split()[-1] == "10"
    assert lines[-1].count("█") == run.HISTOGRAM_WIDTH
    assert len(run.histogram([0] * 33, run.holders_of(33, 2, None))) == ceil_div(33, 2)


def test_replicas_are_held_by_several_ranks_and_share_rows() -> None:
    holders = run.holders_of(3, 2, Placement(3, 2, (0, 1, 2, 0)))
    assert holders == [[0, 1], [0], [1]] and run.holders_of(3, 2, None) == [[0], [0], [1]]
    assert [line.split()[1] for line in run.histogram([8, 1, 3], holders)] == ["0,1", "0", "1"]
    assert run.busiest_rank([8, 1, 3], holders, 2) == 7 / 6
    assert run.busiest_rank([0, 0, 0], holders, 2) == 1.0


@pytest.mark.cpu_only
def test_run_plans_a_placement_from_a_file_of_loads(tmp_path: Path) -> None:
    """5 experts and 3 spare slots on 2 ranks: the three hot ones lie on both."""
    file = tmp_path / "placed.yaml"
    (tmp_path / "load.json").write_text("[60, 30, 20, 15, 12]")
    section = f"placement: {{spare_slots: 3, load: {tmp_path}/load.json}}\n"
    file.write_text(TINY.format(layer="token_format: nvfp4") + section)
    done = program("run", "--config", file, "--routing", "zipf", "--steps", 2, launcher=TWO_RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    bars = [line.split() for line in done.stdout.splitlines() if " expert " in line]
    assert [bar[1] for bar in bars] == ["0,1", "0,1", "0,1", "0", "1"]
    assert sum(int(bar[-1]) for bar in bars) == 2 * 9 * 2 * 2
    (busiest,) = (line.split() for line in done.stdout.splitlines() if line.startswith("Busiest rank"))
    assert 1 <= float(busiest[2]) < 1.2
