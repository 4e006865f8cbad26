"""The table of operations says what was found: runs, instructions, failures, and what nobody has run."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_runtime import ops
from moe_runtime.launch.benchmarks.checks import FP8_MMA_BITS
from moe_runtime.launch.kernel_bench import __main__ as kernel_bench
from moe_runtime.launch.kernel_bench import ops_bench, ops_check, ops_table
from moe_runtime.launch.research import aot
from tests.support.programs import ROOT
from tests.support.spawner import interpreter

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "launch" / "results"


def result(operation: str, passed: bool = True, **more: Any) -> dict[str, Any]:
    check = {"what": "x", "error": 0.5, "bound": 1.0, "passed": passed}
    return {"operation": operation, "format": "nvfp4", "variant": "", "check": check, "shape": {}} | more


def compiled(operation: str, arch: int, *instructions: str, error: str = "") -> dict[str, Any]:
    fmt = ops_check.FORMATS.get(operation, "nvfp4")
    return {"operation": operation, "format": fmt, "arch": arch, "instructions": list(instructions), "error": error}


def some() -> dict[str, Any]:
    first, *rest = ops_check.OPERATIONS
    return ops_check.summary(
        [result(name) for name in ops_check.OPERATIONS],
        [result(first, passed=False), result(first), *(result(name) for name in rest)],
        [
            compiled(first, 90, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"),
            compiled(first, 90, "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"),
            compiled(first, 100, "tcgen05.mma.cta_group::1.kind::f16"),
            compiled(first, 120, error="no instruction matches"),
            compiled("quantize", 90),
            compiled("dispatch_send", 90, "mma.sync"),
        ],
    )


RUN = {
    "kind": ops_bench.KIND,
    "environment": {
        "gpus": [{"name": "NVIDIA H200"}],
        "driver": "1",
        "git_commit": "0123456789",
        "git_modified_files": 0,
        "packages": {"torch": "2", "triton": "3"},
    },
    "results": [
        result(ops_check.OPERATIONS[0], median_us=1234.4),
        result(ops_check.OPERATIONS[0], median_us=99.6),
        result("NVFP4TokenFormat") | {"check": {"what": "bytes", "error": 0.0, "bound": 0.0, "passed": True}},
    ],
}


def test_lines_hold_what_was_found() -> None:
    first, second, *_, last = ops_table.cells(some(), RUN)
    wgmma = "`wgmma.mma_async.m64n*k16.f32.bf16.bf16`"
    run = f"ok, 0.50 of its bound, 1234 and 100 us; {wgmma}"
    assert first == [
        ops_check.OPERATIONS[0],
        "nvfp4",
        "ok",
        "1 of 2 FAILED",
        run,
        "`tcgen05.mma.kind::f16`",
        "FAILED",
    ]
    assert second[2:] == ["ok", "ok", "no record; -", "-", "-"]
    assert last == ["NVFP4TokenFormat", "nvfp4", "ok", "ok", "ok; no MMA in it", "-", "-"]
    assert ops_check.has_failed(some())


def test_printed_and_as_markdown() -> None:
    file = io.StringIO()
    ops_table.print_operations(some(), RUN, Console(file=file, width=250))
    text = file.getvalue()
    assert "tcgen05.mma.kind::f16" in text and "sm_120: no instruction matches" in text and "NVIDIA H200" in text
    ops_table.print_operations(some(), None, Console(file=file, width=250))
    assert "No run on a GPU is shown" in file.getvalue()
    lines = ops_table.operations_markdown(some(), RUN, "x.json").splitlines()
    assert lines[2].startswith("| `grouped_matmul_dynamic_scaled_nvfp4` | nvfp4 | ok | 1 of 2 FAILED |")
    assert len(lines) == 2 + len(ops_check.OPERATIONS) + 2 and "[JSON](x.json)" in lines[-1]


def test_every_line_is_an_operation_with_a_case_and_a_kernel() -> None:
    cases = {(case.operation, case.format) for _, _, case in aot.collect_cases()}
    run = {case.operation for case in ops_bench.CASES} | {"NVFP4TokenFormat"}
    assert run == set(ops_check.OPERATIONS)
    for operation, fmt in ops_check.FORMATS.items():
        assert hasattr(ops, operation)
        assert (ops_check.kernel_operation(operation), fmt) in cases


def test_committed_files_say_that_all_is_well() -> None:
    checked, run = (json.loads((RESULTS / name).read_text()) for name in ("ops_checked.json", "ops_h200.json"))
    assert not ops_check.has_failed(checked)
    assert run["passed"] and run["environment"]["gpus"][0]["arch"] == "sm_90"
    for line in ops_table.cells(checked, run):
        assert "FAILED" not in " ".join(line) and "no record" not in " ".join(line) and "-" not in line
    probe = json.loads((RESULTS / "fp8_probe_h200.json").read_text())
    assert probe["kept_bits"] == FP8_MMA_BITS


def test_the_program_shows_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops_check, "check_here", lambda jobs: some())
    file = tmp_path / "checked.json"
    assert kernel_bench.main(["check", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert json.loads(file.read_text()) == some() and "Operations of moe_runtime.ops" in out and "NVIDIA H200" in out


def test_programs_of_the_table_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the compiler, which test_aot.py runs."""
    run = ops_check._run

    def without_compiler(module: str, *arguments: str, environment: dict[str, str]) -> dict[str, Any]:
        if module != "moe_runtime.launch.research.aot":
            return run(module, *arguments, environment=environment)
        assert set(arguments[3:]) <= {case.operation for _, _, case in aot.collect_cases()}
        return {"results": []}

    monkeypatch.setattr(ops_check, "_run", without_compiler)
    monkeypatch.setattr("sys.executable", interpreter())
    found = ops_check.check_here()
    assert len(found["twin"]) == len(found["interpreted"]) == len(ops_bench.CASES) + 2
    assert not ops_check.has_failed(found)


def test_a_program_without_results_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", interpreter())
    with pytest.raises(RuntimeError, match=r"kernel_bench: no results \(exit code 2\)[\s\S]*argument --engine"):
        ops_check._run("moe_runtime.launch.kernel_bench", "ops", "--engine", "none", environment=dict(os.environ))
