"""Every kernel compiles, without a GPU, for each architecture it declares, down to the instructions it is meant for."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS
from moe_runtime.launch.kernel_bench import ops_check
from moe_runtime.launch.research import aot
from moe_runtime.launch.research.aot_cases import ALL_ARCHS, AotCase, CudaCase
from tests.support.programs import ROOT, without_interpreter
from tests.support.spawner import interpreter

# Where nothing is compiled yet and other tests run beside it, that takes 10 minutes and more.
pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(1500)]

WIRE_FORMATS = ("bf16", "fp8_block", "mxfp8")
MIXED = ("nvfp4 x bf16", "nvfp4 x fp8_block", "mxfp4 x bf16", "mxfp4 x mxfp8", "mxfp4 x fp8_block")
OPERATIONS = {
    "quantize": tuple(WEIGHT_FORMATS),
    "dequantize": tuple(WEIGHT_FORMATS),
    "place_own_rows": ("fp8_block",),
    "dispatch_send": tuple(FORMATS),
    "recv_count": tuple(FORMATS),
    "recv_permute": tuple(FORMATS),
    "recv_scales": tuple(FORMATS),
    "grouped_gemm": (*FORMATS, *MIXED),
    "grouped_gemm_swiglu": (*FORMATS, *MIXED),
    "grouped_matmul_dynamic_scaled_nvfp4": ("nvfp4",),
    "group_gemm_nvfp4_nt_groupwise": ("nvfp4",),
    "moe_gemm_mxfp8_nt_groupwise": ("mxfp8",),
    "moe_gemm_fp8_nt_groupwise": ("fp8_block",),
    "group_gemm_fp8_nt_groupwise": ("fp8_block",),
    "expert_norm": ("bf16",),
    "combine_send": WIRE_FORMATS,
    "combine_recv": WIRE_FORMATS,
    "one_rank_dispatch": tuple(FORMATS),
    "one_rank_combine": WIRE_FORMATS,
    **dict.fromkeys(("host_headers", "forward_send", "host_total"), tuple(FORMATS)),
    "host_quantize": ("fp8_block", "mxfp8"),
    "route_logits": ("bf16",),
    "route_choose": ("any",),
}
"""Operations, and the formats that each needs a kernel for."""


def run_aot(*arguments: str, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process that the interpreter of this one does not reach."""
    # With several jobs it has processes of its own, whose results name what is in its `__main__`: `sys.executable`.
    command = [python, "-m", "moe_runtime.launch.research.aot", *arguments]
    environment = without_interpreter(PYTHONPATH=str(ROOT)) | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("aot") / "results.json"
    done = run_aot("--json", str(file), "--jobs", "2", "--assemble-once")
    assert file.exists(), f"{done.stdout}\n{done.stderr}"
    found: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    assert done.returncode == int(any(result["error"] for result in found)), done.stderr
    return found


def test_every_case_compiles_to_its_instructions(results: list[dict[str, Any]]) -> None:
    failed = [f"{r['kernel']} {r['format']} sm_{r['arch']}: {r['error']}" for r in results if r["error"]]
    assert not failed, "\n".join(failed)


def test_each_kernel_is_assembled_for_each_architecture(results: list[dict[str, Any]]) -> None:
    """All cases of Hopper, and of Blackwell's some of each operation with each matrix instruction that it uses."""
    assert all(result["assembled"] for result in results if result["arch"] == 90)

    def forms(some: list[dict[str, Any]]) -> set[tuple[str, str, int, bool]]:
        scaled = [any("block_scale" in name for name in result["instructions"]) for result in some]
        return {(r["operation"], r["kernel"], r["arch"], s) for r, s in zip(some, scaled, strict=True)}

    assert forms([result for result in results if result["assembled"]]) == forms(results)
    assert sum(not result["assembled"] for result in results) > 100


def test_results_come_in_the_order_of_the_cases(results: list[dict[str, Any]]) -> None:
    """Whichever process compiled them."""
    wanted = [(case.operation, case.format, arch) for _, _, case in aot.collect_cases() for arch in case.archs]
    assert [(result["operation"], result["format"], result["arch"]) for result in results] == wanted


def test_every_operation_and_format_has_a_kernel_for_every_architecture(results: list[dict[str, Any]]) -> None:
    archs: dict[tuple[str, str], set[int]] = defaultdict(set)
    for result in results:
        archs[result["operation"], result["format"]].add(result["arch"])
    # Steps of Hopper's own GEMM kernels that the others have no need of, and what only a program times.
    alone = {"dequant_tokens", "pack_units", "write_clock"}
    extra = {key for key in archs if key[0] in alone}
    wanted = {(operation, name) for operation, names in OPERATIONS.items() for name in names} | set(archs) - extra
    missing = {key: sorted(set(ALL_ARCHS) - archs[key]) for key in wanted if not archs[key] >= set(ALL_ARCHS)}
    assert not missing


def test_the_committed_table_of_operations_is_what_compiles_here(results: list[dict[str, Any]]) -> None:
    committed = json.loads((ROOT / "launch" / "results" / "ops_checked.json").read_text())
    found = ops_check.compiled_records(results)
    assert found == committed["compiled"], "python -m moe_runtime.launch.kernel_bench check --json FILE makes it anew"


def test_a_part_of_the_operations_compiles_alone(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = run_aot("--json", str(file), "--jobs", "1", "--operations", "count_step", python=interpreter())
    assert done.returncode == 0, done.stderr
    assert {result["operation"] for result in json.loads(file.read_text())["results"]} == {"count_step"}
    done = run_aot("--operations", "no_such", python=interpreter())
    assert done.returncode == 2 and "--operations: expected any of" in done.stderr


def test_a_kernel_that_cannot_do_with_a_constant_is_found(tmp_path: Path) -> None:
    """A launch makes a constant of an integer that is 1, and a constant has no `.to`."""
    (tmp_path / "one_kernel.py").write_text(
        "import triton, triton.language as tl\n"
        "from moe_runtime.launch.research import aot\n"
        "from moe_runtime.launch.research.aot_cases import AotCase\n"
        "@triton.jit\n"
        "def _kernel(out, count, FACTOR: tl.constexpr):\n"
        "    tl.store(out, count.to(tl.int64) * FACTOR)\n"
        "signature = {'out': '*i64', 'count': 'i32', 'FACTOR': 'constexpr'}\n"
        "print(aot.compile_case(AotCase('one', 'any', _kernel, signature, {'FACTOR': 3}), 90).error)\n"
    )
    command = [interpreter(), "one_kernel.py"]
    clean = without_interpreter(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert "has no attribute 'to'" in done.stdout, done.stderr


def test_no_kernel_is_left_out() -> None:
    kernels = {
        node.name
        for path in (ROOT / "kernels").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and re.fullmatch(r"_\w+_kernel", node.name)
    }
    cases = [case for _, _, case in aot.collect_cases()]
    assert kernels == {case.kernel.__name__ for case in cases if isinstance(case, AotCase)}
    sources = {path.name for path in (ROOT / "kernels").rglob("*.cu")}
    assert sources == {case.file for case in cases if isinstance(case, CudaCase)}


def test_the_interpreter_is_refused() -> None:
    done = run_aot(python=interpreter(), TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "without TRITON_INTERPRET" in done.stderr


def test_compile_all_refuses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "INTERPRET", True)
    with pytest.raises(RuntimeError, match="without TRITON_INTERPRET"):
        aot.compile_all()


def test_cases_name_known_formats_and_architectures() -> None:
    for module, index, case in aot.collect_cases():
        assert isinstance(case, AotCase | CudaCase), (module, index)
        assert case.format == "any" or set(case.format.split(" x ")) <= set(WEIGHT_FORMATS), (
            module,
            index,
            case.format,
        )
        assert set(case.instruction) <= set(case.archs) <= set(ALL_ARCHS), (module, index)
        if isinstance(case, CudaCase):
            continue
        names = set(case.signature)
        assert {name for name in names if case.signature[name] == "constexpr"} == set(case.constexprs), (module, index)
