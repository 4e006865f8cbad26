"""Holds each operation of `moe_runtime.ops` to its bound, times it on a GPU: `python -m moe_runtime.launch.ops_run`.

On a GPU the shapes are those of the seeds' models, on a CPU small ones that reach every branch. `--engine torch` takes
the twins; `triton` on a CPU needs `TRITON_INTERPRET=1`. Writes JSON with the environment; a result outside its bound is
not timed and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moe_runtime.context import ExpertParallelContext
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.runtime import ENGINES
from moe_runtime.launch import environment
from moe_runtime.launch.op_problems import (
    OpCall,
    Shape,
    check_token_format,
    dynamic_scaled_nvfp4,
    fp8_groupwise,
    mxfp8_groupwise,
    nvfp4_groupwise,
)
from moe_runtime.launch.timing import TOTAL, Lap, copies_to_rotate, measure, times_record

KIND = "operations"
"""What the JSON says it is."""

PREPARED = "prepared weights"

BOUND = "largest |error| / (u |c| + g), elementwise against float64"
BYTES = "bytes that differ from the torch twins"


@dataclass(frozen=True)
class Case:
    """An operation in one form; `large` is the shape on a GPU, `small` on a CPU."""

    operation: str
    format: str
    variant: str
    make: Callable[[Shape, torch.Generator], OpCall]
    large: Shape
    small: Shape


def _four(rows: int) -> Shape:
    """Four groups of `rows` rows, each with an expert of its own."""
    return Shape((rows,) * 4, (0, 1, 2, 3), 4, 4096, 7168)


CASES = (
    Case(
        "grouped_matmul_dynamic_scaled_nvfp4",
        "nvfp4",
        "",
        dynamic_scaled_nvfp4,
        Shape((128, 256, 512, 1024), (0, 3, 2, 4), 6, 4096, 7168),
        Shape((5, 0, 130, 3), (2, 0, -1, 1), 3, 67, 80),
    ),
    Case(
        "group_gemm_nvfp4_nt_groupwise",
        "nvfp4",
        "",
        nvfp4_groupwise,
        _four(512),
        Shape((4, 0, 132, 8), (0, 1, 2, 3), 4, 72, 128),
    ),
    *(
        Case(
            "moe_gemm_mxfp8_nt_groupwise",
            "mxfp8",
            f"blocks of {block}",
            partial(mxfp8_groupwise, block=block),
            _four(376),
            Shape((1, 0, 131, 8), (0, 1, 2, 3), 4, 37, 144),
        )
        for block in (32, 128)
    ),
    Case(
        "group_gemm_fp8_nt_groupwise",
        "fp8_block",
        "e4m3, MN-major",
        partial(fp8_groupwise, gm=1, major="MN", dtype=torch.float8_e4m3fn),
        _four(512),
        Shape((4, 0, 132, 8), (0, 1, 2, 3), 4, 72, 256),
    ),
    Case(
        "group_gemm_fp8_nt_groupwise",
        "fp8_block",
        "e5m2, K-major, blocks of 128 rows",
        partial(fp8_groupwise, gm=128, major="K", dtype=torch.float8_e5m2),
        _four(512),
        Shape((128, 0, 128, 60), (0, 1, 2, 3), 4, 72, 256),
    ),
)

TOKENS = ((4096, 7168), (150, 256))
"""Tokens and hidden size of the messages of `NVFP4TokenFormat`, on a GPU and on a CPU."""


def run_all(context: ExpertParallelContext, engine: str, *, small: bool, iterations: int) -> list[dict[str, Any]]:
    """One record per operation and variant. Nothing is timed with 0 `iterations`, or on a CPU."""
    rng = torch.Generator(context.device).manual_seed(0)
    results = []
    for case in CASES:
        problem = case.make(case.small if small else case.large, rng)
        error = problem.error(problem.run(problem.empty(), engine))
        timed: dict[str, Any] = {}
        if error <= 1 and iterations and context.device.type == "cuda":
            timed = time_problem(context, problem, engine, iterations)
        shape = asdict(problem.shape)
        results.append(_record(case.operation, case.format, case.variant, shape, error, 1.0, BOUND) | timed)
        prepared = problem.prepared()
        if prepared is not None:
            error = prepared.error(prepared.run(prepared.empty(), engine))
            # The other engines restore the weights in each call.
            if timed and error <= 1 and engine == "cuda":
                timed = time_problem(context, prepared, engine, iterations, problem)
                timed["prepare_us"] = time_preparing(problem)
                timed |= time_as_layer(context, prepared, iterations)
            else:
                timed = {}
            variant = ", ".join(filter(None, (case.variant, PREPARED)))
            results.append(_record(case.operation, case.format, variant, shape, error, 1.0, BOUND) | timed)
    tokens, hidden = TOKENS[small]
    error = check_token_format(tokens, hidden, rng, engine)
    results.append(_record("NVFP4TokenFormat", "nvfp4", "", {"tokens": tokens, "hidden": hidden}, error, 0.0, BYTES))
    return results


def _record(
    operation: str, fmt: str, variant: str, shape: dict[str, Any], error: float, bound: float, measure: str
) -> dict[str, Any]:
    check = {"what": measure, "error": error, "bound": bound, "passed": error <= bound}
    return {"operation": operation, "format": fmt, "variant": variant, "shape": shape, "check": check}


def time_as_layer(context: ExpertParallelContext, problem: OpCall, iterations: int) -> dict[str, Any]:
    """`layer_us`: the same product by the function that layers call, with the same weights in turn; or nothing."""
    size = sum(value.nbytes for value in problem.arguments.values() if isinstance(value, torch.Tensor))
    copies = [copy.as_layer() for copy in problem.copies(copies_to_rotate(context.device, size))]
    out = problem.empty()

    def step(number: int, lap: Lap) -> None:
        rows, weights = copies[number % len(copies)] or (None, None)
        assert rows is not None and weights is not None
        grouped_gemm(rows, weights, out=out)

    if copies[0] is None:
        return {}
    return {"layer_us": measure(context, step, iterations=iterations, capturable=True)[TOTAL].median_us}


def time_preparing(problem: OpCall) -> float:
    """Microseconds in which all experts' weights are prepared, by the host's clock: the least of three times."""
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        problem.prepared()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) * 1e6)
    return min(taken)


def time_problem(
    context: ExpertParallelContext, problem: OpCall, engine: str, iterations: int, raw: OpCall | None = None
) -> dict[str, Any]:
    """Microseconds of a call, without validation, on the buffers that were checked and copies of them in turn.

    `raw` is the call with weights that are not prepared: its bytes are counted.
    """
    raw = problem if raw is None else raw
    size = sum(value.nbytes for value in raw.arguments.values() if isinstance(value, torch.Tensor))
    copies = problem.copies(copies_to_rotate(context.device, size))
    out = problem.empty()

    def step(number: int, lap: Lap) -> None:
        copies[number % len(copies)].run(out, engine)

    timing = measure(context, step, iterations=iterations, capturable=True)[TOTAL]
    seconds = timing.median_us * 1e-6
    return {
        **times_record(timing),
        "moved_bytes": raw.moved_bytes,
        "work_flop": problem.flops,
        "rate_gb_per_s": raw.moved_bytes / seconds / 1e9,
        "rate_tflop_per_s": problem.flops / seconds / 1e12,
    }


def print_results(results: list[dict[str, Any]], title: str, console: Console) -> None:
    """A line per operation and variant."""
    table = Table(title=title)
    for column in ("operation", "format", "variant", "error / bound", "us", "TFLOP/s", "GB/s"):
        table.add_column(column, justify="right" if column in ("us", "TFLOP/s", "GB/s") else "left")
    for result in results:
        check = result["check"]
        verdict = f"{check['error']:.2g} / {check['bound']:.2g}" + ("" if check["passed"] else " FAILED")
        rates = [f"{result[key]:.3g}" if key in result else "" for key in ("rate_tflop_per_s", "rate_gb_per_s")]
        time = f"{result['median_us']:.1f}" if "median_us" in result else ""
        table.add_row(result["operation"], result["format"], result["variant"], verdict, time, *rates)
    console.print(table)


def work(options: argparse.Namespace) -> int:
    """Check, time, print and write; 1 if a check failed."""
    environment.check_folder("--json", options.json)
    if options.steps < 0:
        raise ValueError(f"--steps: expected at least 0, got {options.steps}")
    with ExpertParallelContext(engine=options.engine) as context:
        small = options.small or context.device.type != "cuda"
        results = run_all(context, context.engine, small=small, iterations=options.steps)
        record = environment.environment_record(context)
    passed = all(result["check"]["passed"] for result in results)
    if options.json is not None:
        report = {"kind": KIND, "environment": record, "passed": passed, "results": results}
        environment.write_json(options.json, report)
    where = record["gpus"][0]["name"] if record["device"] == "cuda" else record["processor"]
    how = f"{record['engine']}{', interpreted' if record['interpreted'] else ''}"
    print_results(results, f"{where}, engine {how}", environment.wide_console(150))
    return int(not passed)


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.ops_run", description="Check the operations.")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="default: auto")
    parser.add_argument("--small", action="store_true", help="small shapes on a GPU too")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed iterations on a GPU (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)
    return environment.run_program("ops_run", lambda: work(options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
