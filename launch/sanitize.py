"""The GEMM's kernels under compute-sanitizer: `python -m moe_runtime.launch.sanitize` (`make sanitize`) on a GPU.

Small cases of every kernel of the grouped GEMM that the GPU runs, in both regimes, and of what quantizes and swizzles
their operands, run once under each of `TOOLS`. Writes JSON with the environment (`--json FILE`); exits with 1 where a
tool reports something, or a run fails or takes longer than `--seconds`.

On one H200 (launch/results/sanitizer_h200.json) every case ran to its end, and the Triton kernels were clean under both
tools. With Hopper's kernels memcheck, which then reported errors of the API too, reported 34; those kept are functions
that the driver does not have, before the first case. racecheck reported three writes in the FP8 kernel that gathers
rows: `cp.async`, for which each thread waits before the first lane arrives at the barrier for its warp, behind
`__syncwarp`; against reads of the rows by `ldmatrix` and of the scales. The same kernel without gathering, whose copies
arrive at the barrier themselves, was clean.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moe_runtime.context import ExpertParallelContext
from moe_runtime.formats import FORMATS
from moe_runtime.kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.launch import environment
from moe_runtime.launch.gemm_cases import GemmCase
from moe_runtime.launch.gemm_data import make_rows, make_weights
from moe_runtime.weights import SILU

TOOLS = ("memcheck", "racecheck")
KIND = "sanitizer"
SEED = 0
SIZES = (("decode", 4, 8, "layer"), ("decode", 3, 24, "zipf"), ("prefill", 3, 150, "zipf"), ("prefill", 1, 520, "even"))
"""Regime, groups, rows of each on average, routing; `layer` gathers rows. 520 rows are a prefill for decoded weights
too."""

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def cases() -> list[GemmCase]:
    """Both products with SwiGLU between, of every format."""
    return [
        GemmCase(f"{fmt} {name} {groups}x{rows}", fmt, groups, rows, "both", routing, hidden=256, intermediate=256)
        for fmt in FORMATS
        for name, groups, rows, routing in SIZES
    ]


def run_cases(engine: str) -> None:
    """Every case once; raises `RuntimeError` naming one whose results are not finite."""
    with ExpertParallelContext(engine=engine) as context:
        rng = torch.Generator(context.device).manual_seed(SEED)
        for case in cases():
            rows = make_rows(case, SEED, rng)
            first, last = (make_weights(case, product, rng, engine) for product in case.products)
            hidden = grouped_gemm_swiglu(rows, first, SILU, out_format=rows.format, engine=engine)
            out = grouped_gemm(hidden, last, engine=engine)
            if not bool(out[: int(rows.group_offsets[-1])].isfinite().all()):
                raise RuntimeError(f"{case.name}: results that are not finite")
            print(case.name, flush=True)


def findings(output: str) -> int | None:
    """The number that the tool's summary reports; None where there is no summary."""
    found = _SUMMARY.findall(output)
    return sum(int(number) for number in found) if found else None


def check(tool: str, engine: str, seconds: float) -> dict[str, Any]:
    """All cases with kernels of `engine` under one tool: what it reported, and the end of its output if that is bad."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
    if tool == "memcheck":
        # cuda-bindings asks for functions that an older driver does not have.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "moe_runtime.launch.sanitize", "--run", engine]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = (late.stdout or b"").decode(errors="replace"), -1
    finished = [case.name for case in cases() if case.name in output.splitlines()]
    passed = findings(output) == 0 and code == 0 and len(finished) == len(cases())
    return {
        "tool": tool,
        "engine": engine,
        "findings": findings(output),
        "exit_code": code,
        "cases": finished,
        "seconds": round(time.perf_counter() - start, 1),
        "passed": passed,
        "output": [] if passed else output.splitlines()[-60:],
    }


def work(options: argparse.Namespace) -> int:
    """Run, print and write; 1 if something is reported."""
    if options.run is not None:
        run_cases(options.run)
        return 0
    environment.check_folder("--json", options.json)
    if shutil.which("compute-sanitizer") is None:
        raise ValueError("sanitize: expected compute-sanitizer on PATH, found none")
    with ExpertParallelContext() as context:
        if context.device.type != "cuda":
            raise ValueError("sanitize: expected a CUDA GPU, got none")
        record = environment.environment_record(context)
    runs = [(tool, engine) for tool in TOOLS for engine in ("auto", "triton")]
    with ThreadPoolExecutor(len(runs)) as pool:
        results = list(pool.map(lambda run: check(run[0], run[1], options.seconds), runs))
    report = {"kind": KIND, "environment": record, "results": results}
    for result in results:
        shown = "passed" if result["passed"] else f"FAILED, exit code {result['exit_code']}"
        print(f"{result['tool']}, engine {result['engine']}: {result['findings']} findings, {shown}")
        print("\n".join(result["output"]), end="\n" if result["output"] else "")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(result["passed"] for result in results))


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.sanitize", description="compute-sanitizer.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--seconds", type=float, default=600, help="bound of one tool's run")
    parser.add_argument("--run", choices=("auto", "triton"), metavar="ENGINE", help="run the cases, without a tool")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)
    return environment.run_program("sanitize", lambda: work(options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
