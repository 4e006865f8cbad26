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
from moe_runtime.kernels import aot
from moe_runtime.launch import doctor, kernel_table, ops_run
from moe_runtime.launch.fp8_bound import FP8_MMA_BITS
from tests.programs import ROOT
from tests.spawner import interpreter

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "launch" / "results"


def result(operation: str, passed: bool = True, **more: Any) -> dict[str, Any]:
    check = {"what": "x", "error": 0.5, "bound": 1.0, "passed": passed}
    return {"operation": operation, "format": "nvfp4", "variant": "", "check": check, "shape": {}} | more


def compiled(operation: str, arch: int, *instructions: str, error: str = "") -> dict[str, Any]:
    fmt = dict(kernel_table.rows()).get(operation, "nvfp4")
    return {"operation": operation, "format": fmt, "arch": arch, "instructions": list(instructions), "error": error}


def some() -> dict[str, Any]:
    first, *rest = kernel_table.OPERATIONS
    return kernel_table.checked(
        [result(name) for name in kernel_table.OPERATIONS],
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
    "kind": ops_run.KIND,
    "environment": {"gpus": [{"name": "NVIDIA H200"}], "driver": "1", "packages": {"torch": "2", "triton": "3"}},
    "results": [
        result(kernel_table.OPERATIONS[0], median_us=1234.4),
        result(kernel_table.OPERATIONS[0], median_us=99.6),
        result("NVFP4TokenFormat") | {"check": {"what": "bytes", "error": 0.0, "bound": 0.0, "passed": True}},
    ],
}


def test_lines_hold_what_was_found() -> None:
    first, second, *_, last = kernel_table.cells(some(), RUN)
    wgmma = "`wgmma.mma_async.m64n*k16.f32.bf16.bf16`"
    run = f"ok, 0.50 of its bound, 1234 and 100 us; {wgmma}"
    assert first == [
        kernel_table.OPERATIONS[0],
        "nvfp4",
        "ok",
        "1 of 2 FAILED",
        run,
        "`tcgen05.mma.kind::f16`",
        "FAILED",
    ]
    assert second[2:] == ["ok", "ok", "no record; -", "-", "-"]
    assert last == ["NVFP4TokenFormat", "nvfp4", "ok", "ok", "ok; no MMA in it", "-", "-"]
    assert kernel_table.has_failed(some())


def test_printed_and_as_markdown() -> None:
    file = io.StringIO()
    kernel_table.print_table(some(), RUN, Console(file=file, width=250))
    text = file.getvalue()
    assert "tcgen05.mma.kind::f16" in text and "sm_120: no instruction matches" in text and "NVIDIA H200" in text
    kernel_table.print_table(some(), None, Console(file=file, width=250))
    assert "No run on a GPU is recorded" in file.getvalue()
    lines = kernel_table.markdown(some(), RUN, "x.json").splitlines()
    assert lines[2].startswith("| `grouped_matmul_dynamic_scaled_nvfp4` | nvfp4 | ok | 1 of 2 FAILED |")
    assert len(lines) == 2 + len(kernel_table.OPERATIONS) + 2 and "[JSON](x.json)" in lines[-1]


def test_every_line_is_an_operation_with_a_case_and_a_kernel() -> None:
    cases = {(case.operation, case.format) for _, _, case in aot.collect_cases()}
    run = {case.operation for case in ops_run.CASES} | {"NVFP4TokenFormat"}
    assert run == set(kernel_table.OPERATIONS)
    for operation, fmt in kernel_table.rows():
        assert hasattr(ops, operation)
        assert (kernel_table.kernel_operation(operation), fmt) in cases


def test_committed_files_say_that_all_is_well() -> None:
    checked, run = kernel_table.read_checked(RESULTS), kernel_table.read_run(RESULTS)
    assert checked is not None and run is not None
    assert not kernel_table.has_failed(checked)
    assert run["passed"] and run["environment"]["gpus"][0]["arch"] == "sm_90"
    for line in kernel_table.cells(checked, run):
        assert "FAILED" not in " ".join(line) and "no record" not in " ".join(line) and "-" not in line
    probe = json.loads((RESULTS / "fp8_probe_h200.json").read_text())
    assert probe["kept_bits"] == FP8_MMA_BITS


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert kernel_table.read_run(tmp_path) is None
    (tmp_path / kernel_table.RUN_FILE).write_text(json.dumps({"kind": "x"}))
    with pytest.raises(ValueError, match=rf"{kernel_table.RUN_FILE}: expected kind operations, got x"):
        kernel_table.read_run(tmp_path)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_doctor_shows_it(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_table, "check_here", lambda jobs: some())
    assert doctor.main(["--kernels", *(["--json"] if as_json else [])]) == 1
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out) == some()
    else:
        assert "Operations of moe_runtime.ops" in out


def test_programs_of_the_table_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the compiler, which test_aot.py runs."""
    run = kernel_table._run

    def without_compiler(module: str, *arguments: str, environment: dict[str, str]) -> dict[str, Any]:
        if module != "moe_runtime.kernels.aot":
            return run(module, *arguments, environment=environment)
        assert set(arguments[3:]) <= {case.operation for _, _, case in aot.collect_cases()}
        return {"results": []}

    monkeypatch.setattr(kernel_table, "_run", without_compiler)
    monkeypatch.setattr("sys.executable", interpreter())
    found = kernel_table.check_here()
    assert len(found["twin"]) == len(found["interpreted"]) == len(ops_run.CASES) + 2
    assert not kernel_table.has_failed(found)


def test_a_program_without_results_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", interpreter())
    with pytest.raises(RuntimeError, match=r"ops_run: no results \(exit code 2\)[\s\S]*argument --engine"):
        kernel_table._run("moe_runtime.launch.ops_run", "--engine", "none", environment=dict(os.environ))
