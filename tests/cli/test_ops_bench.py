"""The program that runs the operations: it tells right from wrong, times on a GPU, and writes what it found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_runtime import ops
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.kernel_bench import __main__ as bench
from moe_runtime.launch.kernel_bench import ops_bench
from moe_runtime.launch.kernel_bench.op_problems import OpCall, check_token_format
from tests.support.comparison import assert_same_bits


def small_problem(index: int, device: torch.device) -> OpCall:
    case = ops_bench.CASES[index]
    return case.make(case.small, torch.Generator(device).manual_seed(3))


@pytest.mark.parametrize("engine", ["torch", "triton"])
def test_every_operation_is_within_its_bound(engine: str) -> None:
    with ExpertParallelContext(engine=engine) as context:
        results = ops_bench.run_all(context, engine, small=True, iterations=0)
    # One of the small shapes can have prepacked weights too.
    assert len(results) == len(ops_bench.CASES) + 2
    for result in results:
        assert result["check"]["passed"], result
        assert "median_us" not in result


@pytest.mark.parametrize("index", range(len(ops_bench.CASES)))
def test_a_wrong_result_is_outside(index: int, device: torch.device) -> None:
    problem = small_problem(index, device)
    assert problem.operation.__name__ == ops_bench.CASES[index].operation
    out = problem.run(problem.empty(), "torch")
    assert 0 < problem.error(out) <= 1
    row = next(row for row, group in zip(problem.shape.offsets, problem.shape.groups, strict=False) if group)
    other = out.clone()
    other[row] *= 2
    assert problem.error(other) > 1
    other[row] = math.nan
    assert problem.error(other) == math.inf
    assert problem.error(problem.empty()) == math.inf


def test_a_row_that_nobody_owns_must_be_left_alone(device: torch.device) -> None:
    problem = small_problem(0, device)
    assert problem.shape.experts[2] == -1
    out = problem.run(problem.empty(), "torch")
    out[problem.shape.offsets[2]] = 0
    assert problem.error(out) == math.inf


def test_copies_have_the_same_result_elsewhere(device: torch.device) -> None:
    for index in range(len(ops_bench.CASES)):
        problem = small_problem(index, device)
        first, second = problem.copies(2)
        assert first is problem
        for name, value in problem.arguments.items():
            if isinstance(value, torch.Tensor):
                assert second.arguments[name].data_ptr() != value.data_ptr() or not value.numel()
                assert second.arguments[name].stride() == value.stride()
        assert_same_bits(second.run(second.empty(), "torch"), problem.run(problem.empty(), "torch"))


def test_bytes_and_products_of_a_call(device: torch.device) -> None:
    """NVFP4, rows 5, 0 and 3 with an expert each; the 130 rows of nobody count nothing, nor does the expert of none."""
    problem = small_problem(0, device)
    shape = replace(problem.shape, groups=(5, 0, 130, 3))
    rows, used = 8, 2
    a_scales, b_scales = problem.arguments["a_scales"].nbytes, problem.arguments["b_scales"].nbytes
    wanted = rows * (40 + a_scales / 138 + 2 * 67) + used * (67 * 40 + b_scales / 3)
    assert replace(problem, shape=shape).moved_bytes == int(wanted)
    assert problem.flops == 2 * rows * 67 * 80


def test_messages_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    rng = torch.Generator(device).manual_seed(1)
    assert check_token_format(150, 256, rng, "auto") == 0
    message = ops.NVFP4TokenFormat
    original = message.copy_token_to_send_buf

    def spoil(self: object, buf: torch.Tensor, *arguments: object, **more: object) -> None:
        original(self, buf, *arguments, **more)
        buf[7, 3] ^= 1

    monkeypatch.setattr(message, "copy_token_to_send_buf", spoil)
    assert check_token_format(150, 256, rng, "auto") == 1


def test_the_program_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ops.json"
    assert bench.main(["ops", "--small", "--steps", "0", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["kind"] == ops_bench.KIND and report["passed"]
    assert report["environment"]["packages"]["torch"]
    out = capsys.readouterr().out
    for result in report["results"]:
        assert result["operation"] in out


def test_a_failed_check_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(OpCall, "error", lambda *_: math.inf)
    assert bench.main(["ops", "--small", "--steps", "0"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [("--steps", "-1"), ("--json", "no/such/folder/x.json")],
)
def test_bad_arguments(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["ops", *arguments]) == 2
    assert f"kernel_bench: {arguments[0]}: " in capsys.readouterr().err


@pytest.mark.gpu
def test_results_on_a_gpu_are_timed() -> None:
    with ExpertParallelContext() as context:
        results = ops_bench.run_all(context, context.engine, small=True, iterations=2)
    for result in results[:-1]:
        assert 0 < result["smallest_us"] <= result["median_us"] <= result["largest_us"]
        assert result["method"] == "cuda_graph"
