"""The cases for compute-sanitizer run every kernel in both regimes, and its reports are read correctly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.plan import required_plan
from moe_runtime.kernels.formats.number_formats import FORMATS, NVFP4
from moe_runtime.kernels.gemm.dequant_layout import DEQUANT_FORMATS, unit_rows
from moe_runtime.kernels.gemm.plan import choose_dequant_shape, choose_tma_shape, few_shape
from moe_runtime.kernels.gemm.shapes import (
    DEQUANT_DECODE,
    DEQUANT_FEW,
    DEQUANT_FEW_EVEN,
    DEQUANT_MIDDLE,
    DEQUANT_PREFILL,
    EXPANDING_SHAPES,
    TMA_SHAPES,
    Regime,
)
from moe_runtime.launch.kernel_bench.gemm_data import make_rows
from moe_runtime.launch.research import sanitize
from moe_runtime.virtual import virtual_contexts

pytestmark = pytest.mark.cpu_only

CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}


def test_cases_take_both_regimes_of_each_kernel() -> None:
    rng = torch.Generator().manual_seed(0)
    seen: dict[str, set[Any]] = {name: set() for name in FORMATS}
    gathers = set()
    expand: dict[str, set[Any]] = {}
    others: dict[tuple[str, str], set[tuple[Regime, bool]]] = {}
    for case in sanitize.cases():
        rows = make_rows(case, 0, rng, "torch")
        sizes = rows.likely_rows, rows.num_groups
        if case is sanitize.MANY_TILES:
            for n, k in ((2 * case.intermediate, case.hidden), (case.hidden, case.intermediate)):
                assert choose_dequant_shape(*sizes, n, k, NVFP4) is DEQUANT_FEW
                assert few_shape(sizes[0] * unit_rows(n), k, NVFP4, 132) is DEQUANT_FEW_EVEN
        elif case.expanded:
            gathered = rows.row_index is not None
            expand.setdefault(case.weight_format.name, set()).add(
                choose_tma_shape(*sizes, case.hidden, gathered=gathered, expanded=True)
            )
            continue
        elif case.weight_format not in DEQUANT_FORMATS:
            gathered = rows.row_index is not None
            seen[case.format].add(choose_tma_shape(*sizes, case.hidden, gathered=gathered))
        else:
            shape = choose_dequant_shape(*sizes, 2 * case.intermediate, case.hidden, case.weight_format)
            if case.weights is not None:
                others.setdefault((case.weights, case.format), set()).add((shape.regime, case.hidden % 128 == 0))
                continue
            seen[case.format].add(shape)
        gathers.add((case.format, rows.row_index is not None))
    for name, fmt in FORMATS.items():
        dequant_shapes = {DEQUANT_FEW, DEQUANT_DECODE, DEQUANT_MIDDLE, DEQUANT_PREFILL}
        assert seen[name] == (dequant_shapes if fmt in DEQUANT_FORMATS else set(TMA_SHAPES))
        assert {(name, True), (name, False)} <= gathers
    assert expand == {name: set(EXPANDING_SHAPES) for name in sanitize.FP4}
    assert set(others) == {("mxfp4", "bf16"), ("mxfp4", "mxfp8"), ("mxfp4", "fp8_block")}
    for shapes in others.values():
        kinds = {
            (Regime.FEW, True),
            (Regime.DECODE, False),
            (Regime.DECODE, True),
            (Regime.PREFILL, True),
            (Regime.MIDDLE, False),
        }
        assert shapes == kinds


@pytest.mark.parametrize("name", sanitize.EXCHANGES)
def test_exchanges_end_with_an_expert_id_out_of_range(name: str) -> None:
    # What experts compute has no part in it, and takes most of the time.
    sanitize.run_exchange(name, "torch", "cpu", intermediate_size=64)


@pytest.mark.parametrize("name", sanitize.AGAIN)
def test_handles_are_combined_again_with_the_weights_of_then(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitize.run_again(name, "torch", "cpu")
    # Where a combine keeps the old weights, it is told.
    renew = TokenDispatcher.renew
    monkeypatch.setattr(TokenDispatcher, "renew", lambda self, handle, weights=None: renew(self, handle))
    with pytest.raises(RuntimeError, match=r"sums of weights that are not 2\.0"):
        sanitize.run_again(name, "torch", "cpu")


def test_exchanges_count_slots_in_one_chunk_and_in_several() -> None:
    counted = set()
    for name in sanitize.EXCHANGES:
        with virtual_contexts(sanitize.RANKS)[0] as context:
            geometry = TokenDispatcher.from_config(context, sanitize.exchange_config(name)).geometry
        counted.add(required_plan(geometry).num_chunks > 1)
    assert counted == {False, True}


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_summaries(tool: str) -> None:
    assert sanitize.findings(CLEAN[tool]) == 0
    assert sanitize.findings(CLEAN[tool].replace(": 0", ": 3")) == 3
    assert sanitize.findings("========= COMPUTE-SANITIZER\n") is None


def run_instead(monkeypatch: pytest.MonkeyPatch, program: str) -> list[list[str]]:
    """Makes `check` run a program of Python instead of the tool; the commands that it would have run."""
    commands: list[list[str]] = []
    start = subprocess.Popen

    def instead(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        commands.append(command)
        return start([sys.executable, "-c", program], **how)

    monkeypatch.setattr(subprocess, "Popen", instead)
    return commands


@pytest.mark.parametrize(
    ("code", "lost", "summary", "passed"),
    [(0, 0, 0, True), (1, 0, 0, False), (0, 1, 0, False), (0, 0, 2, False), (0, 0, None, False)],
)
def test_a_run_passes_when_all_cases_ran_without_findings(
    code: int, lost: int, summary: int | None, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sanitize.names()[::3]
    lines = names[lost:] if summary is None else [*names[lost:], f"========= ERROR SUMMARY: {summary} errors"]

    program = f"print({chr(10).join(lines)!r}); raise SystemExit({code})"
    commands = run_instead(monkeypatch, program)
    result = sanitize.check("memcheck", "auto", names, 30.0)
    (command,) = commands
    assert command[:3] == ["compute-sanitizer", "--tool", "memcheck"]
    assert command[-3 - len(names) :] == ["--run", "auto", "--only", *names]
    assert result["passed"] is passed and result["cases"] == names[lost:] and bool(result["output"]) is not passed


def test_a_run_that_takes_too_long_is_ended_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import time; print('half a line', flush=True); time.sleep(600)"
    run_instead(monkeypatch, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    # Ends only when nobody holds the pipe any more.
    result = sanitize.check("racecheck", "triton", sanitize.names(), 5.0)
    assert not result["passed"] and result["output"] == ["half a line"] and result["findings"] is None
    assert result["exit_code"] == -signal.SIGKILL and result["seconds"] < 300


def test_processes_share_the_cases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each case runs once under each tool and engine; one that finds something fails all."""
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    context = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(sanitize, "ExpertParallelContext", lambda: nullcontext(context))
    monkeypatch.setattr(sanitize.environment, "environment_record", lambda _: {})
    bad = ""
    ran: list[tuple[str, str, str]] = []

    def check(tool: str, engine: str, chosen: list[str], seconds: float) -> dict[str, Any]:
        ran.extend((tool, engine, name) for name in chosen)
        hit = tool == "racecheck" and bad in chosen
        about = {"findings": int(hit), "races": {"f": 1} if hit else {}, "exit_code": 0, "seconds": len(chosen)}
        more = {"cases": chosen, "passed": not hit, "output": ["found"] if hit else []}
        return {"tool": tool, "engine": engine, **about, **more}

    monkeypatch.setattr(sanitize, "check", check)
    file = tmp_path / "report.json"
    assert sanitize.main(["--parts", "3", "--json", str(file)]) == 0
    assert sorted(ran) == sorted(product(sanitize.TOOLS, ("auto", "triton"), sanitize.names()))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and all(line.endswith("0 findings, passed") for line in lines)
    ran.clear()
    bad = "exchange bf16, many tokens"
    assert sanitize.main(["--parts", "3", "--cases", "bf16", "--json", str(file)]) == 1
    chosen = [name for name in sanitize.names() if "bf16" in name]
    assert sorted(ran) == sorted(product(sanitize.TOOLS, ("auto", "triton"), chosen))
    results = json.loads(file.read_text())["results"]
    clean, dirty = (0, True, {}), (1, False, {"f": 1})
    assert [(r["findings"], r["passed"], r["races"]) for r in results] == [clean, clean, dirty, dirty]
    assert all(r["cases"] == chosen for r in results)
    # So does a run without a tool, and a case may be named whole.
    ran.clear()
    monkeypatch.setattr(sanitize, "run_cases", lambda engine, chosen: ran.extend(("", engine, name) for name in chosen))
    assert sanitize.main(["--run", "triton", "--cases", "bf16"]) == 0
    assert ran == [("", "triton", name) for name in chosen]
    ran.clear()
    assert sanitize.main(["--run", "auto", "--only", bad, "one rank, nvfp4, bf16 home"]) == 0
    assert ran == [("", "auto", bad), ("", "auto", "one rank, nvfp4, bf16 home")]
    assert sanitize.main(["--cases", "no such case"]) == 2
    assert "--cases: no case like 'no such case'; there are bf16 few 4x1, " in capsys.readouterr().err
    assert sanitize.main(["--cases", "("]) == 2
    assert "--cases: " in capsys.readouterr().err


def test_the_program_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda _: None)
    assert sanitize.main([]) == 2
    assert "expected compute-sanitizer on PATH" in capsys.readouterr().err
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2
    assert "expected a CUDA GPU" in capsys.readouterr().err
    assert sanitize.main(["--json", str(Path("no") / "such" / "file")]) == 2
    assert "--json: no folder" in capsys.readouterr().err
