"""The doctor's report is complete JSON, readable tables, one voice under torchrun, and a clear word on a bad config."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from moe_runtime.comm.bootstrap import shared_memory_directory
from moe_runtime.comm.heaps.shared_memory import NamelessMemory
from moe_runtime.config import load_config
from moe_runtime.context.memory import layer_geometry, reserved_bytes
from moe_runtime.kernels.exchange.plan import plan_exchange
from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS
from moe_runtime.launch import doctor
from moe_runtime.launch.common import cases
from tests.support.programs import ROOT, python_path, without_interpreter
from tests.support.spawner import interpreter


def run_doctor(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [interpreter(), *launcher, "-m", "moe_runtime.launch.doctor", *arguments]
    environment = os.environ | {"PYTHONPATH": python_path(), "COLUMNS": "160"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_json_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--config", "tiny_cpu", "--world-size", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["limits"]["cores"] >= 1
    assert 0 < report["limits"]["memory_bytes"]["available"] <= report["limits"]["memory_bytes"]["total"]
    shared = report["limits"]["shared_memory"]
    assert 0 < shared["free_bytes"] <= shared["total_bytes"]
    assert shared["folder"] == (None if NamelessMemory.problem() is None else shared_memory_directory())
    assert report["packages"]["torch"] and report["packages"]["triton"] and report["packages"]["numpy"]
    assert report["engine"]["name"] in ("torch", "triton", "cuda")
    assert report["engine"]["grouped_gemm"].startswith(("torch", "Triton", "CUDA C++"))
    assert report["transport"]["name"] and report["transport"]["name"] not in report["transport"]["why_not"]
    layer = load_config("tiny_cpu").layer
    (count, formats), *others = report["reserved_bytes"].items()
    assert not others and int(count) == layer.max_tokens_per_rank and set(formats) == set(FORMATS)
    assert formats[layer.token_format] == reserved_bytes(layer, 4)
    assert set(report["gemm_plans"]) == set(report["exchange_plans"]) == {"1", "8", "128", "1024", "4096"}
    for plans in report["gemm_plans"].values():
        assert plans["engine"] == report["engine"]["name"]
        assert plans["gate_up"]["kernel"] == plans["down"]["kernel"] == "torch reference" or plans["engine"] != "torch"


@pytest.mark.cpu_only
def test_the_exchange_of_hopper_is_planned_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "deepseek_v3", "--world-size", "8", "--hopper"]
    assert doctor.main([*arguments, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["exchange_plans"]
    layer = load_config("deepseek_v3").layer
    for count, plan in plans.items():
        geometry = layer_geometry(layer.replace(max_tokens_per_rank=int(count)), 8)
        expected = plan_exchange(geometry)
        assert expected is not None and plan["engine"] == "cuda"
        assert plan["record_bytes"] == geometry.record.record_bytes
        assert plan["rows"] == ("contiguous" if int(count) >= 1024 else "gathered")
        assert plan["flags"] == ("each token" if expected.per_token_flags else "each rank")
        assert plan["parts"] == (4 if int(count) >= 1024 else 1)
        assert plan["blocks"]["dispatch_send"] == expected.send_blocks(int(count), 132)
    assert plans["1"]["flags"] == "each token" and plans["4096"]["flags"] == "each rank"
    assert doctor.main(arguments) == 0
    assert "Exchange on 8 rank(s)" in capsys.readouterr().out


@pytest.mark.cpu_only
def test_the_kernels_of_a_rank_alone_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "gpt_oss_120b", "--world-size", "1", "--hopper"]
    assert doctor.main([*arguments, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["exchange_plans"]
    assert plans["8"]["blocks"] == {"one_rank_dispatch": 8, "one_rank_combine": 24} and plans["8"]["flags"] == "none"
    assert set(plans["1024"]["blocks"]) == {"dispatch_send", "recv_permute", "one_rank_combine"}
    assert doctor.main(arguments) == 0
    assert "one_rank_combine" in capsys.readouterr().out


def test_an_exchange_too_wide_for_cuda_is_planned_for_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--config", "deepseek_v3", "--world-size", "64", "--hopper", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["exchange_plans"]
    assert {plan["engine"] for plan in plans.values()} == {"torch"}
    assert all("no kernels take these sizes" in plan["why_not_cuda"] for plan in plans.values())


@pytest.mark.cpu_only
def test_plans_of_hopper_are_told_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "kimi_k2", "--world-size", "8", "--hopper"]
    assert doctor.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["engine"]["name"] in ("torch", "triton")
    for count, plans in report["gemm_plans"].items():
        assert plans["engine"] == "cuda" and plans["rows_per_expert"] == round(int(count) * 8 * 8 * 48 / 384) / 48
        for product in ("gate_up", "down"):
            assert plans[product]["kernel"] == "hopper tma"
            # With at most 8 rows an SM has two blocks.
            assert plans[product]["blocks"] == (264 if plans["rows_per_expert"] <= 8 else 132)
            assert (plans[product]["regime"] == "few rows") == (8 < plans["rows_per_expert"] <= 50)
    assert doctor.main(arguments) == 0
    assert "Grouped GEMMs of the experts on 8 rank(s)" in capsys.readouterr().out


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("formats", "told"),
    [
        ({"token_format": "fp8_block", "weight_format": "nvfp4"}, ("fp8_block", "bf16", "nvfp4", "bf16")),
        ({"token_format": "nvfp4", "weight_format": "nvfp4"}, ("nvfp4", "nvfp4", "nvfp4", "bf16")),
        ({"token_format": "fp8_block", "weight_format": "fp8_block"}, ("fp8_block", "fp8_block", "fp8_block", "e4m3")),
        (
            {"token_format": "fp8_block", "weight_format": "nvfp4", "fp4_multiplied_in": "fp8"},
            ("fp8_block", "fp8_block", "nvfp4", "e4m3"),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_multiplied_is_told(
    formats: dict[str, str], told: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formats of rows of both products, of weights, and the numbers of the tensor cores; on CPUs those of torch."""
    file = tmp_path / "config.yaml"
    run = load_config("deepseek_v3_half").model_dump()
    file.write_text(yaml.safe_dump(run | {"layer": run["layer"] | {"intermediate_gsf": None} | formats}))
    first, second, weights, numbers = told
    assert doctor.main(["--config", str(file), "--hopper", "--json"]) == 0
    for plans in json.loads(capsys.readouterr().out)["gemm_plans"].values():
        for name, rows in (("gate_up", first), ("down", second)):
            plan = plans[name]
            assert (plan["rows"], plan["weights"], plan["multiplied_in"]) == (rows, weights, numbers)
            assert plan["kernel"].startswith("hopper")
    assert doctor.main(["--config", str(file), "--hopper"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"gate/up multiplies {first} rows x {weights} weights in {numbers}" in out
    assert f"down multiplies {second} rows x {weights} weights in {numbers}" in out
    assert doctor.main(["--config", str(file)]) == 0
    assert "weights in float64" in " ".join(capsys.readouterr().out.split())


def test_the_bytes_of_weights_are_told_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Folded into FP8 those of four bits take nearly twice as many."""
    assert doctor.main(["--config", "gpt_oss_120b", "--world-size", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["expert_bytes_by_format"]
    assert set(found) == set(WEIGHT_FORMATS) and found["mxfp4"] == report["expert_bytes"]
    assert 1.85 < found["fp8_block"] / found["mxfp4"] < 1.9
    assert doctor.main(["--config", "gpt_oss_120b"]) == 0
    assert "GB in fp8_block" in " ".join(capsys.readouterr().out.split())


def test_tables_name_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--config", "tiny_cpu"]) == 0
    out = capsys.readouterr().out
    for word in ("engine", "transport", "not nvshmem", "shared memory", "locked memory", "kept weights", *FORMATS):
        assert word in out


def test_without_a_config_nothing_is_reserved(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "--transport", "private"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["transport"]["name"] == "private"
    assert report["reserved_bytes"] == report["gemm_plans"] == report["exchange_plans"] == {}


def test_bytes_are_told_for_the_tokens_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--config", "deepseek_v3", "--world-size", "8", "--tokens", "128", "4096", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["reserved_bytes"]
    layer = load_config("deepseek_v3").layer
    for count in (128, 4096):
        changed = layer.replace(max_tokens_per_rank=count)
        assert told[str(count)][layer.token_format] == reserved_bytes(changed, 8)
    assert doctor.main(["--tokens", "0"]) == 2


def test_the_staging_of_a_placed_layer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "placed.yaml"
    run = load_config("tiny_cpu")
    file.write_text(yaml.safe_dump(run.model_dump() | {"placement": {"spare_slots": 0}}))
    assert doctor.main(["--config", str(file), "--json"]) == 0
    (formats,) = json.loads(capsys.readouterr().out)["reserved_bytes"].values()
    for name in FORMATS:
        assert formats[name] == reserved_bytes(cases.with_token_format(run.layer, name), 1, placed=True)
    assert doctor.main(["--config", str(file), "--world-size", "32", "--hosts", "2", "--json"]) == 0
    (formats,) = json.loads(capsys.readouterr().out)["reserved_bytes"].values()
    for name in FORMATS:
        layer = cases.with_token_format(run.layer, name)
        assert formats[name] == reserved_bytes(layer, 32, placed=True, num_hosts=2)
    assert doctor.main(["--config", str(file)]) == 0 and "staging" in capsys.readouterr().out
    assert doctor.main(["--config", "tiny_cpu"]) == 0 and "staging" not in capsys.readouterr().out


@pytest.mark.cpu_only
@pytest.mark.parametrize(("ranks", "hosts", "staged"), [(1, 1, False), (4, 1, True), (4, 2, False)])
def test_one_process_tells_the_staging_of_ranks_that_can_come_back(
    ranks: int, hosts: int, staged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    text = (ROOT / "configs" / "tiny_cpu.yaml").read_text()
    file.write_text(text.replace("transport: auto", "transport: auto\n  on_failure: continue"))
    assert doctor.main(["--config", str(file), "--world-size", str(ranks), "--hosts", str(hosts), "--json"]) == 0
    (formats,) = json.loads(capsys.readouterr().out)["reserved_bytes"].values()
    expected = reserved_bytes(load_config("tiny_cpu").layer, ranks, placed=staged, num_hosts=hosts)
    assert formats[load_config("tiny_cpu").layer.token_format] == expected


def test_a_format_that_does_not_fit_says_why() -> None:
    layer = load_config("tiny_cpu").layer.replace(
        token_format="bf16", weight_format=None, hidden_size=304, intermediate_size=96
    )
    reserved = doctor.reserved_by_format(layer, 2)
    assert isinstance(reserved["fp8_block"], dict) and isinstance(reserved["nvfp4"], dict)
    problem = reserved["mxfp8"]
    assert isinstance(problem, str) and "mxfp8 needs a positive multiple of 32, got 304" in problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "no_such_config"), "'no_such_config'"),
        (("--config", "no/such/file.yaml"), "no/such/file.yaml"),
        (("--world-size", "0"), "--world-size: expected at least 1, got 0"),
        (("--tokens", "5"), "--tokens: expected it with --config"),
        (("--hopper",), "--hopper: expected it with --config"),
        (("--world-size", "4"), "--world-size: expected it with --config"),
        (("--world-size", "4", "--hosts", "2"), "--world-size: expected it with --config"),
        (("--config", ""), "expected a path that is not empty"),
        (("--config", "tiny_cpu", "--hosts", "2"), "--hosts: expected it with --world-size"),
        (("--world-size", "4", "--hosts", "0"), "--hosts: expected a divisor of --world-size 4, got 0"),
        (("--world-size", "4", "--hosts", "-2"), "--hosts: expected a divisor of --world-size 4, got -2"),
        (("--world-size", "4", "--hosts", "3"), "--hosts: expected a divisor of --world-size 4, got 3"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(list(arguments)) == 2
    assert message in capsys.readouterr().err


def test_an_engine_that_cannot_run_is_a_line_of_the_report(tmp_path: Path) -> None:
    file = tmp_path / "triton.yaml"
    file.write_text((ROOT / "configs" / "tiny_cpu.yaml").read_text().replace("engine: auto", "engine: triton"))
    command = [interpreter(), "-m", "moe_runtime.launch.doctor", "--config", str(file), "--json"]
    environment = without_interpreter(PYTHONPATH=python_path(), CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    engine = json.loads(done.stdout)["engine"]
    assert engine["name"] is None and "TRITON_INTERPRET=1" in engine["problem"]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("transport", "on_failure", "copies"), [("auto", "continue", 1), ("auto", "abort", 1), ("collective", "abort", 2)]
)
def test_under_torchrun_rank_0_speaks_for_all(transport: str, on_failure: str, copies: int, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    text = (ROOT / "configs" / "tiny_cpu.yaml").read_text()
    file.write_text(text.replace("transport: auto", f"transport: {transport}\n  on_failure: {on_failure}"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run_doctor("--config", str(file), "--json", launcher=launcher)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ranks"] == report["world_size"] == 2
    assert report["transport"]["name"] == ("shared" if transport == "auto" else transport)
    for possible in ("on_failure: continue", "gets its experts from the others", "ranks can leave in order"):
        assert (possible in report["transport"]["after_death"]) == (transport == "auto")
    assert "one rank only" in report["transport"]["why_not"]["private"]
    assert report["copies"] == copies
    sizes = [size for formats in report["reserved_bytes"].values() for size in formats.values()]
    assert sizes and all(("staging" in size) == (on_failure == "continue") for size in sizes)


def test_program_prints_tables() -> None:
    done = run_doctor()
    assert done.returncode == 0, done.stderr
    assert "This machine" in done.stdout
