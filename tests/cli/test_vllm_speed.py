"""`research.vllm_speed` without vLLM: models that are written, sums over a trace, turns, wrong options."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.research import vllm_speed
from moe_runtime.launch.research.vllm_models import FORMATS, SIZES, ModelSizes, write_model
from moe_runtime.layer import MoELayer

pytestmark = pytest.mark.cpu_only

GPT_OSS = ModelSizes("gpt_oss", 256, 128, 8, 2, 2, 4, 2, 64)

TURNS = 3
"""Of a case: log-probabilities, one batch and a prefill."""

STAND_IN = """
import json, os, time
from types import SimpleNamespace as SamplingParams

NOTES = os.environ["STAND_IN_NOTES"]


class LLM:
    def __init__(self, tensor_parallel_size, **named):
        self.case = ("alone" if os.environ["MOE_RUNTIME_VLLM"] == "0" else "adapter") + str(tensor_parallel_size)
        seconds = json.loads(os.environ["STAND_IN_START"])[self.case]
        self.note("start")
        if seconds is None:
            raise RuntimeError("no engine")
        ends = time.monotonic() + 20
        while open(NOTES).read().count("start") < int(os.environ["STAND_IN_TOGETHER"]):
            if time.monotonic() > ends:
                raise RuntimeError("the others have not started")
            time.sleep(0.01)
        time.sleep(seconds)
        self.note("up")

    def note(self, what):
        with open(NOTES, "a") as file:
            file.write(json.dumps([self.case, what, time.monotonic()]) + "\\n")

    def sleep(self, level, mode):
        self.note("timed")

    def enqueue(self, prompts, parameters, use_tqdm):
        self.tokens = parameters.max_tokens

    def wake_up(self, tags):
        pass

    def wait_for_completion(self, use_tqdm):
        time.sleep(0.02 + 0.0002 * self.tokens)
        self.note("timed")
        token = SamplingParams(logprob=-1.0)
        return [SamplingParams(prompt_token_ids=[3, 4], prompt_logprobs=[None, {4: token}])]
"""
"""A module `vllm` whose engines wait for each other, then as long as they are told to, and note when they do what."""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what stand-ins for vLLM note. Cases find one, and modules in place of those that import torch."""
    package = tmp_path / "moe_runtime/launch"
    for folder in ("common", "research"):
        (package / folder).mkdir(parents=True)
    write_json = "import json\ndef write_json(file, data): file.write_text(json.dumps(data))"
    (package / "common/environment.py").write_text(write_json)
    (package / "research/vllm_models.py").write_text("FORMATS = SIZES = ModelSizes = write_model = None")
    (package / "research/vllm_speed.py").symlink_to(vllm_speed.__file__)
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN_NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(vllm_speed.environment, "machine_record", dict)
    return tmp_path / "notes"


def run_cases(folder: Path, cases: str, *more: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and results of a run whose model is there already."""
    model = folder / f"qwen3_tiny-bf16-{SIZES['qwen3_tiny'].layers}"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    options = ["--model", "qwen3_tiny", "--cases", cases, "--folder", str(folder), "--limit", "40"]
    options += ["--json", str(folder / "found.json"), "--batches", "1", "--repeats", "1"]
    code = vllm_speed.main([*options, *more])
    return code, json.loads((folder / "found.json").read_text())["results"]


def run_in_turns(folder: Path, cases: str, *more: str) -> tuple[int, list[dict[str, Any]]]:
    return run_cases(folder, cases, "--turns", "turns", *more)


def spans(notes: Path, first: str, last: str) -> list[tuple[float, float]]:
    """Of each case from the first note of one kind to the last of another, by their begin."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    return sorted(
        (
            min(at for name, what, at in lines if (name, what) == (case, first)),
            max(at for name, what, at in lines if (name, what) == (case, last)),
        )
        for case in {line[0] for line in lines if line[1] == last}
    )


def check_turns(notes: Path, cases: set[str]) -> None:
    """None was timed before all were up, nor while another one was. Two take turns."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    timed = [case for case, what, _ in lines if what == "timed"]
    assert {case for case, what, _ in lines[: -len(timed)] if what == "up"} == cases
    assert timed[::2] == timed[1::2]
    turns = [case for case, _ in groupby(timed)]
    assert len(turns) == 2 * TURNS or len(cases) > 2


@pytest.mark.parametrize(
    ("sizes", "fmt"),
    [(SIZES["qwen3_tiny"], fmt) for fmt in FORMATS["qwen3"]] + [(GPT_OSS, fmt) for fmt in FORMATS["gpt_oss"]],
)
def test_models_are_checkpoints(sizes: ModelSizes, fmt: str, tmp_path: Path) -> None:
    """Every layer can be read, in the format of its experts."""
    write_model(tmp_path, sizes, fmt)
    with ExpertParallelContext(transport="private") as context:
        for layer in range(sizes.layers):
            made = MoELayer.from_checkpoint(tmp_path, layer=layer, context=context, max_tokens_per_rank=8)
            assert made.config.weight_format == {"fp8": "fp8_block"}.get(fmt, fmt)
            assert made.config.num_experts == sizes.experts and made.config.hidden_size == sizes.hidden


def test_sizes_are_those_of_published_models() -> None:
    assert {kind for sizes in SIZES.values() for kind in [sizes.kind]} == set(FORMATS)
    assert replace(SIZES["gpt_oss_120b"], experts=32, layers=24) == SIZES["gpt_oss_20b"]
    with pytest.raises(ValueError, match="--format: expected mxfp4 for gpt_oss, got bf16"):
        write_model(Path("nowhere"), SIZES["gpt_oss_20b"], "bf16")


def test_times_of_a_profile(tmp_path: Path) -> None:
    ours = vllm_speed.own_kernels()
    for name in ("tma_gemm", "dequant_few", "one_rank_dispatch", "dispatch_send", "_grouped_gemm_kernel"):
        assert ours.fullmatch(name), name
    assert not ours.search("__launch_bounds__") and not ours.search("fused_moe_kernel")
    steps = vllm_speed.PROFILED_STEPS
    events = [
        {"cat": "kernel", "name": name, "ts": 20.0 * step + begin, "dur": us}
        for step in range(steps)
        for name, begin, us in (
            ("fused_moe_kernel", 0.0, 3.0),
            ("fused_moe_kernel", 2.0, 3.0),  # Begins before the first one has ended.
            ("flash_fwd", 4.0, 5.0),
            ("nvjet_tst", 12.0, 1.0),
        )
    ]
    events.append({"cat": "cpu_op", "name": "fused_moe_kernel", "ts": 0.0, "dur": 100.0})
    with gzip.open(tmp_path / "rank0.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    (tmp_path / "small.json").write_text('{"traceEvents": []}')
    found = vllm_speed.kernel_times(tmp_path, ours, steps)
    assert (found["gpu_us"], found["experts_us"]) == (10.0, 5.0)
    assert found["kernels"][0] == {"name": "fused_moe_kernel", "kind": "experts", "us": 6.0, "launches": 2.0}
    assert vllm_speed.kernel_times(tmp_path / "none", ours, 1) == {"error": "no trace was written"}


def test_cases_start_together_and_are_timed_in_turns(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a killed run has left holds up none of them."""
    killed = subprocess.Popen(["true"])
    killed.wait()
    left = Path("turns.starting") / f"{killed.pid}-alone1"
    left.parent.mkdir()
    left.touch()
    monkeypatch.setenv("STAND_IN_START", '{"alone1": 0.0, "adapter1": 0.25}')
    monkeypatch.setenv("STAND_IN_TOGETHER", "2")
    code, results = run_in_turns(Path("a"), "alone1,adapter1")
    assert code == 0 and [result["case"] for result in results] == ["alone1", "adapter1"]
    assert all(result["turns"] is True and result["waited_s"] < result["seconds"] for result in results)
    assert results[0]["waited_s"] >= 0.1
    assert results[1]["difference"] == {"mean": 0.0, "max": 0.0}
    check_turns(notes, {"alone1", "adapter1"})
    assert list(left.parent.iterdir()) == [left]


def test_two_runs_take_turns_by_one_file(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_START", '{"alone1": 0.0, "adapter1": 0.0, "alone2": 0.2}')
    monkeypatch.setenv("STAND_IN_TOGETHER", "3")
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(run_in_turns, [Path("a"), Path("b")], ["alone1,adapter1", "alone2"]))
    assert [code for code, _ in runs] == [0, 0]
    check_turns(notes, {"alone1", "adapter1", "alone2"})


def test_a_case_that_dies_while_it_starts_holds_up_no_other(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_START", '{"alone1": null, "adapter1": 0.0}')
    monkeypatch.setenv("STAND_IN_TOGETHER", "1")
    code, (dead, other) = run_in_turns(Path("a"), "alone1,adapter1")
    assert code == 1 and dead["error"] == "exit status 1" and "RuntimeError: no engine" in dead["lines"]
    assert dead["turns"] is True and "waited_s" not in dead
    assert "error" not in other and other["waited_s"] < 10
    code, results = run_in_turns(Path("b"), "alone1,adapter1", "--limit", "1")
    assert code == 1 and all("left out" in result["error"] for result in results)
    assert not list(Path("turns.starting").iterdir())


def test_without_turns_one_case_follows_another(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_START", '{"alone1": 0.0, "adapter1": 0.0}')
    monkeypatch.setenv("STAND_IN_TOGETHER", "1")
    code, results = run_cases(Path("a"), "alone1,adapter1")
    (_, first), (second, _) = spans(notes, "start", "timed")
    assert code == 0 and first < second
    assert not any({"turns", "waited_s", "beside_others"} & set(result) for result in results)


def test_files_of_runs_that_go_on() -> None:
    assert vllm_speed.is_starting(Path(f"{os.getpid()}-alone1")) and vllm_speed.is_starting(Path("1-alone1"))
    assert not vllm_speed.is_starting(Path(".hidden"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--turns", "turns", "--beside"], "--turns: expected a run without --beside"),
        (
            ["--turns", "turns", "--cases", "alone1,alone1"],
            "--cases: expected no case twice where they run at the same time",
        ),
        (["--turns", "no_folder/turns"], "--turns: no folder no_folder"),
        (["--cases", "alone"], "--cases: expected names such as alone1 and adapter2, got 'alone'"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--beside", "--cases", "alone1,alone1"], "--cases: expected no case twice where they run at the same time"),
        (["--format", "mxfp4"], "--format: expected bf16 or fp8 or nvfp4 for qwen3_30b, got mxfp4"),
        (["--model", "gpt_oss_20b", "--format", "nvfp4"], "--format: expected mxfp4 for gpt_oss_20b, got nvfp4"),
        (["--batches", "8,0"], "--batches: expected at least 1"),
        (["--profile", "0"], "--profile: expected at least 1"),
        (["--engine", "[1]"], "--engine: expected a JSON object, got [1]"),
        (["--json", "no_folder/x.json"], "--json: no folder no_folder"),
    ],
)
def test_wrong_options(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_speed.main(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_what_is_kept_of_a_log_names_no_folder() -> None:
    line = "Using default MoE config at 9.5 tokens/s. No file /opt/of/one.machine/configs/E=64,N=768.json, see https://a.b/c"
    kept = line.replace("/opt/of/one.machine/configs/", "")
    assert vllm_speed.without_folders(line) == kept
