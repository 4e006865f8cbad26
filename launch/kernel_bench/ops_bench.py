"""`kernel_bench ops`: checks each operation of `moe_runtime.ops` against its bound, and times it on a GPU.

On a GPU the shapes are those of large models; on a CPU they are small and reach every branch. `--engine torch` runs
the torch reference; `triton` on a CPU needs `TRITON_INTERPRET=1`. A result outside its bound is not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.benchmarks.timing import copies_to_rotate, measure_steps, times_record
from moe_runtime.launch.common import environment
from moe_runtime.launch.kernel_bench.op_problems import (
    OpCall,
    Shape,
    check_token_format,
    dynamic_scaled_nvfp4,
    fp8_groupwise,
    mxfp8_groupwise,
    nvfp4_groupwise,
)

KIND = "operations"
"""`kind` of the JSON."""

TOKEN_FORMAT = "NVFP4TokenFormat"

BOUND = "largest |error| / (u |c| + g), elementwise against float64"
BYTES = "bytes that differ from the torch references"


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
        *("grouped_matmul_dynamic_scaled_nvfp4", "nvfp4", "", dynamic_scaled_nvfp4),
        Shape((128, 256, 512, 1024), (0, 3, 2, 4), 6, 4096, 7168),
        Shape((5, 0, 130, 3), (2, 0, -1, 1), 3, 67, 80),
    ),
    Case(
        *("group_gemm_nvfp4_nt_groupwise", "nvfp4", "", nvfp4_groupwise),
        _four(512),
        Shape((4, 0, 132, 8), (0, 1, 2, 3), 4, 72, 128),
    ),
    *(
        Case(
            *("moe_gemm_mxfp8_nt_groupwise", "mxfp8", f"blocks of {block}", partial(mxfp8_groupwise, block=block)),
            _four(376),
            Shape((1, 0, 131, 8), (0, 1, 2, 3), 4, 37, 144),
        )
        for block in (32, 128)
    ),
    Case(
        *("group_gemm_fp8_nt_groupwise", "fp8_block", "e4m3, MN-major"),
        partial(fp8_groupwise, gm=1, major="MN", dtype=torch.float8_e4m3fn),
        _four(512),
        Shape((4, 0, 132, 8), (0, 1, 2, 3), 4, 72, 256),
    ),
    Case(
        *("group_gemm_fp8_nt_groupwise", "fp8_block", "e5m2, K-major, blocks of 128 rows"),
        partial(fp8_groupwise, gm=128, major="K", dtype=torch.float8_e5m2),
        _four(512),
        Shape((128, 0, 128, 60), (0, 1, 2, 3), 4, 72, 256),
    ),
)

TOKENS = ((4096, 7168), (150, 256))
"""Tokens and hidden size for `NVFP4TokenFormat`, on a GPU and on a CPU."""


def run_all(context: ExpertParallelContext, engine: str, *, small: bool, iterations: int) -> list[dict[str, Any]]:
    """One record per operation and variant. Nothing is timed with 0 `iterations`, or on a CPU."""
    rng = torch.Generator(context.device).manual_seed(0)
    timing = iterations > 0 and context.device.type == "cuda"
    results = []
    for case in CASES:
        problem = case.make(case.small if small else case.large, rng)
        error, shape = problem.error(problem.run(problem.empty(), engine)), asdict(problem.shape)
        timed = time_problem(context, problem, engine, iterations) if timing and error <= 1 else {}
        results.append(_record(case.operation, case.format, case.variant, shape, error, 1.0, BOUND) | timed)
        prepacked = problem.prepacked()
        if prepacked is None:
            continue
        error = prepacked.error(prepacked.run(prepacked.empty(), engine))
        # The other engines restore the weights in each call.
        if timed and error <= 1 and engine == "cuda":
            timed = time_problem(context, prepacked, engine, iterations, problem)
            timed["prepare_us"] = time_prepacking(problem)
        else:
            timed = {}
        variant = ", ".join(filter(None, (case.variant, "prepacked weights")))
        results.append(_record(case.operation, case.format, variant, shape, error, 1.0, BOUND) | timed)
    tokens, hidden = TOKENS[small]
    error = check_token_format(tokens, hidden, rng, engine)
    results.append(_record(TOKEN_FORMAT, "nvfp4", "", {"tokens": tokens, "hidden": hidden}, error, 0.0, BYTES))
    return results


def _record(
    operation: str, fmt: str, variant: str, shape: dict[str, Any], error: float, bound: float, measure: str
) -> dict[str, Any]:
    check = {"what": measure, "error": error, "bound": bound, "passed": error <= bound}
    return {"operation": operation, "format": fmt, "variant": variant, "shape": shape, "check": check}


def time_problem(
    context: ExpertParallelContext, problem: OpCall, engine: str, iterations: int, raw: OpCall | None = None
) -> dict[str, Any]:
    """Time a call without validation, on the buffers that were checked and on copies in turn.

    `raw` is the same call with raw weights where `problem` has prepacked ones: its bytes are counted.
    """
    raw = problem if raw is None else raw
    size = sum(value.nbytes for value in raw.arguments.values() if isinstance(value, torch.Tensor))
    copies, out = problem.copies(copies_to_rotate(context.device, size)), problem.empty()

    def step(number: int) -> None:
        copies[number % len(copies)].run(out, engine)

    timing = measure_steps(context, step, iterations=iterations)
    seconds = timing.median_us * 1e-6
    return {
        **times_record(timing),
        "moved_bytes": raw.moved_bytes,
        "work_flop": problem.flops,
        "rate_gb_per_s": raw.moved_bytes / seconds / 1e9,
        "rate_tflop_per_s": problem.flops / seconds / 1e12,
    }


def time_prepacking(problem: OpCall) -> float:
    """Microseconds to prepack all experts' weights, by the host's clock: the least of three."""
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        problem.prepacked()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) * 1e6)
    return min(taken)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Check and time all operations with `engine`, `small`, `steps` and `json` of the command line; the report."""
    environment.check_at_least(0, steps=options.steps)
    with ExpertParallelContext(engine=options.engine or "auto") as context:
        small = options.small or context.device.type != "cuda"
        results = run_all(context, context.engine, small=small, iterations=options.steps)
        record = environment.environment_record(context)
    passed = all(result["check"]["passed"] for result in results)
    report = {"kind": KIND, "environment": record, "passed": passed, "results": results}
    if options.json is not None:
        environment.write_json(options.json, report)
    return report
