"""The kernels under compute-sanitizer: `python -m moe_runtime.launch.research.sanitize` (`make sanitize`) on a GPU.

Small cases of every kernel of the grouped GEMM that the GPU runs, in both regimes, of what quantizes and swizzles their
operands, and of the exchange between two virtual ranks: steps of a layer, with an expert id out of range at the end,
handles that are combined again, and rows padded for each expert; once under each of `TOOLS`. Several processes share
the cases (`--parts`), and each tells when it has ended. Writes JSON with the environment (`--json FILE`); exits with 1
where a tool reports something, or a run fails or takes longer than `--seconds`.

At an arrival at a barrier racecheck counts what its own thread did before. It does not know that a `__syncwarp`, or a
wait for MMAs of a warpgroup, orders other lanes before it. The kernels in CUDA C++ are therefore compiled with
EACH_LANE_ARRIVES (`mbarrier.cuh`): every lane arrives for itself, where otherwise one lane does for its warp.

On one H200 both tools found nothing in the cases that launch/results/sanitizer_h200.json names.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from moe_runtime.comm.errors import RoutingError
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from moe_runtime.kernels.formats.number_formats import FORMATS, intermediate_format_for, token_formats_for
from moe_runtime.kernels.gemm import plan
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.plan import DequantOverlap
from moe_runtime.kernels.gemm.weights import SILU
from moe_runtime.launch.common import draws, environment
from moe_runtime.launch.common.cases import step_inputs
from moe_runtime.launch.kernel_bench.gemm_cases import GemmCase
from moe_runtime.launch.kernel_bench.gemm_data import make_rows, make_weights
from moe_runtime.launch.kernel_bench.options import chosen_cases
from moe_runtime.layer import MoELayer
from moe_runtime.virtual import VirtualRanks, virtual_contexts

TOOLS = ("memcheck", "racecheck")
KIND = "sanitizer"
SEED = 0
OVERLAPPED = "overlapped"
SIZES = (
    ("few", 4, 1, "layer"),
    ("few", 12, 2, "layer"),
    ("decode", 4, 8, "layer"),
    ("decode", 4, 12, "layer"),
    ("decode", 3, 24, "layer"),
    ("prefill", 3, 130, "layer"),
    ("prefill", 1, 520, "even"),
    (OVERLAPPED, 2, 200, "zipf"),
)
"""Regime, groups, rows of each on average, routing; `layer` gathers rows. Blocks of `few` dequantize their own
tokens. 130 rows are between the regimes for dequantized weights; `overlapped` has their tokens dequantized while the
GEMM runs, for which many more are wanted elsewhere."""

FP4 = ("nvfp4", "mxfp4")

_RACE = re.compile(r"Race reported between \w+ access at (\w+)")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


MXFP4_SIZES = (
    ("few", 4, 1, "layer", 256),
    ("decode", 4, 1, "layer", 320),
    ("decode", 4, 8, "layer", 256),
    ("prefill", 2, 200, "zipf", 256),
    ("prefill", 2, 130, "zipf", 320),
)
"""As `SIZES`, then hidden and intermediate size; 320 is no multiple of 128, and an odd number of units of 64."""


EXPANDED_SIZES = (
    (4, 1, "layer"),
    (4, 8, "layer"),
    (3, 20, "layer"),
    (3, 40, "layer"),
    (2, 200, "zipf"),
    (1, 1030, "even"),
)
"""Of FP4 weights that are multiplied in FP8, as in `SIZES`: each shape that expands them. K has 11 blocks of 128, more
than any ring has stages."""


MANY_TILES = GemmCase("nvfp4 few 16x1, many tiles", "nvfp4", 16, 1, "both", "layer", hidden=2304, intermediate=1152)
"""More tiles of either GEMM than a GPU of 132 SMs has blocks of one team: blocks have three teams."""


def _case(fmt: str, name: str, groups: int, rows: int, routing: str, hidden: int, inner: int, **how: Any) -> GemmCase:
    return GemmCase(name, fmt, groups, rows, "both", routing, hidden=hidden, intermediate=inner, **how)


def cases() -> list[GemmCase]:
    """Both GEMMs with SwiGLU between: every format with itself, MXFP4 weights with the tokens they have, and FP4
    weights multiplied in FP8."""
    with_themselves = [
        _case(fmt, f"{fmt} {name} {groups}x{rows}", groups, rows, routing, 256, 256)
        for fmt in FORMATS
        for name, groups, rows, routing in SIZES
    ]
    of_mxfp4 = [
        _case(fmt, f"mxfp4 x {fmt} {name} {groups}x{rows}, K={k}", groups, rows, routing, k, k, weights="mxfp4")
        for fmt in token_formats_for("mxfp4")
        for name, groups, rows, routing, k in MXFP4_SIZES
    ]
    expanded = [
        _case(
            "fp8_block", f"{fmt} in fp8 {groups}x{rows}", groups, rows, routing, 1408, 256, weights=fmt, expanded=True
        )
        for fmt in FP4
        for groups, rows, routing in EXPANDED_SIZES
    ]
    return [*with_themselves, MANY_TILES, *of_mxfp4, *expanded]


MANY = {"max_tokens_per_rank": 1000, "num_experts": 500}
"""Tokens whose slots are counted in several chunks."""
FEW = {"max_tokens_per_rank": 8}
"""Tokens of which the first GEMM counts the ids."""
NORMED = {"activation": {"function": "relu2", "gated": False}, "post_expert_norm": {"eps": 1e-6}}
"""Experts without a gate, with a norm after each."""
EXCHANGES: dict[str, dict[str, Any]] = {
    "exchange nvfp4, bf16 home": {"token_format": "nvfp4", "mode": "gathered"},
    "exchange nvfp4 contiguous, mxfp8 home": {"token_format": "nvfp4", "mode": "contiguous", "combine_format": "mxfp8"},
    "exchange mxfp8, fp8_block home": {"token_format": "mxfp8", "mode": "gathered", "combine_format": "fp8_block"},
    "exchange fp8_block on 3 SMs": {"token_format": "fp8_block", "mode": "contiguous", "num_sms": 3},
    "exchange nvfp4, squared ReLU and a norm": {"token_format": "nvfp4", "mode": "gathered"} | NORMED,
    "exchange fp8_block, squared ReLU and a norm": {"token_format": "fp8_block", "mode": "contiguous"} | NORMED,
    "exchange bf16, many tokens": {"token_format": "bf16", "mode": "gathered"} | MANY,
    "exchange fp8_block, many tokens": {"token_format": "fp8_block", "mode": "contiguous"} | MANY,
    "exchange fp8_block, own rows": {"token_format": "fp8_block", "mode": "contiguous", "max_tokens_per_rank": 1024},
    "exchange nvfp4, many tokens": {"token_format": "nvfp4", "mode": "gathered"} | MANY,
    "one rank, nvfp4, bf16 home": {"token_format": "nvfp4", "mode": "gathered", "ranks": 1},
    "one rank, fp8_block contiguous, mxfp8 home": {
        "token_format": "fp8_block",
        "mode": "contiguous",
        "combine_format": "mxfp8",
        "ranks": 1,
    },
    "one rank, few tokens, nvfp4": {"token_format": "nvfp4", "mode": "gathered", "ranks": 1} | FEW,
    "one rank, few tokens, fp8_block": {"token_format": "fp8_block", "mode": "gathered", "ranks": 1} | FEW,
}
"""Settings of layers on RANKS ranks, or on as many as are given."""
AGAIN: dict[str, dict[str, Any]] = {
    "handles again, bf16": {"token_format": "bf16", "combine_format": "bf16"},
    "handles again, fp8_block": {"token_format": "fp8_block", "combine_format": "fp8_block"},
}
"""Settings of dispatchers with `reusable_handles` on two ranks."""
EXCHANGE_SIZES = {"hidden_size": 256, "num_experts": 96, "top_k": 3, "max_tokens_per_rank": 40}
RANKS = 2


def exchange_config(name: str, intermediate_size: int = 256) -> MoELayerConfig:
    """Of one of `EXCHANGES`, but for its mode, which layers do not choose, and its ranks."""
    sizes = EXCHANGE_SIZES | {"intermediate_size": intermediate_size}
    own = {key: value for key, value in EXCHANGES[name].items() if key not in ("mode", "ranks")}
    return MoELayerConfig(**(sizes | own))


def names() -> list[str]:
    """Of all cases, in their order."""
    return [case.name for case in cases()] + list(EXCHANGES) + list(AGAIN)


def run_cases(engine: str, chosen: Sequence[str]) -> None:
    """The chosen cases once; raises `RuntimeError` naming one that gives what it must not."""
    nvrtc.EVERY_PROGRAM["EACH_LANE_ARRIVES"] = 1
    run_gemms(engine, [case for case in cases() if case.name in chosen])
    for name in (*EXCHANGES, *AGAIN):
        if name not in chosen:
            continue
        run = run_exchange if name in EXCHANGES else run_again
        run(name, engine)
        print(name, flush=True)


def run_exchange(name: str, engine: str, device: str = "cuda", intermediate_size: int = 256) -> None:
    """Two steps of a layer on virtual ranks, then one with an expert id of rank 0 out of range.

    From the second on waits are counted and routes recorded.
    """
    config, mode = exchange_config(name, intermediate_size), EXCHANGES[name]["mode"]

    def load(layer: MoELayer) -> None:
        layer.dispatcher = TokenDispatcher.from_config(layer.context, config, mode=mode, agreed=True)
        layer.dispatchers = {config.max_tokens_per_rank: layer.dispatcher}
        layer.load_random(SEED)

    with VirtualRanks(config, EXCHANGES[name].get("ranks", RANKS), load, device=device, engine=engine) as ranks:
        for step in range(3):
            steps = [
                step_inputs(layer, "zipf", SEED, rank, step, config.max_tokens_per_rank - rank)
                for rank, layer in enumerate(ranks.layers)
            ]
            xs, routing = [x for x, _, _ in steps], [(idx, weights) for _, idx, weights in steps]
            if step == 1:
                for layer in ranks.layers:
                    layer.count_waits()
                    shape = 2, config.max_tokens_per_rank, config.top_k
                    layer.record_routes(torch.empty(shape, dtype=torch.int16, device=device))
            if step == 2:
                routing[0][0][-1, 0] = config.num_experts
            try:
                finite = all(bool(y.isfinite().all()) for y in ranks(xs, routing))
                ranks.contexts[0].check()
            except RoutingError:
                if step == 2:
                    return
                raise
            if not finite:
                raise RuntimeError(f"{name}: results that are not finite")
    raise RuntimeError(f"{name}: an expert id out of range was not found")


def run_again(name: str, engine: str, device: str = "cuda") -> None:
    """A step of virtual ranks, combined twice more, the second time with other weights, then rows that are padded.

    Each stage runs on all ranks before the next one begins; `TokenDispatcher.combine` would wait for other ranks.
    """
    tokens, experts, top_k = (
        EXCHANGE_SIZES["max_tokens_per_rank"],
        EXCHANGE_SIZES["num_experts"],
        EXCHANGE_SIZES["top_k"],
    )
    with ExitStack() as stack:
        contexts = virtual_contexts(RANKS, device=device, engine=engine)
        for context in contexts:
            stack.callback(context.close)
        settings = {"mode": "gathered", "reusable_handles": True, "agreed": True, **EXCHANGE_SIZES, **AGAIN[name]}
        dispatchers = [TokenDispatcher(context, **settings) for context in contexts]
        for context in contexts:
            context.allocate()
        place, geometry = contexts[0].device, dispatchers[0].geometry
        steps = [
            (
                draws.tokens(SEED, rank, 0, tokens - rank, geometry.hidden, place),
                *draws.routing("zipf", SEED, rank, 0, tokens - rank, experts, top_k, place),
            )
            for rank in range(RANKS)
        ]
        # Of rows of ones, each token gets the sum of its weights.
        rows = torch.ones(geometry.row_capacity, geometry.hidden, dtype=torch.bfloat16, device=place)
        handles = [d.dispatch_send(*step) for d, step in zip(dispatchers, steps, strict=True)]
        for dispatcher, handle in zip(dispatchers, handles, strict=True):
            dispatcher.dispatch_recv(handle)
        _combine(name, dispatchers, handles, rows, 1.0)
        combiners = [d._routing_only for d in dispatchers if d._routing_only is not None]
        for factor in (None, 2.0):
            renewed = [
                d.renew(handle, None if factor is None else factor * weights_TK)
                for d, handle, (_, _, weights_TK) in zip(dispatchers, handles, steps, strict=True)
            ]
            _combine(name, combiners, renewed, rows, factor or 1.0)
        padded = [d.dispatch_send(*step) for d, step in zip(dispatchers, steps, strict=True)]
        for dispatcher, handle in zip(dispatchers, padded, strict=True):
            out = _padded_rows(dispatcher)
            statistics = torch.zeros_like(out.counts)
            dispatcher.dispatch_recv_padded(handle, out, statistics=statistics)
            if not bool((statistics == out.counts).all()):
                raise RuntimeError(f"{name}: statistics that differ from the rows of experts")
        contexts[0].check()


def _combine(
    name: str, dispatchers: Sequence[TokenDispatcher], handles: Sequence[DispatchHandle], rows: torch.Tensor, sum: float
) -> None:
    """Combine `rows` on all ranks; raises `RuntimeError` for tokens that are not `sum` of the rows' ones."""
    for dispatcher, handle in zip(dispatchers, handles, strict=True):
        dispatcher.combine_send(rows, handle)
    for dispatcher, handle in zip(dispatchers, handles, strict=True):
        y_TH = dispatcher.combine_recv(handle)
        if not bool(((y_TH - sum).abs() <= 0.1 * sum).all()):
            raise RuntimeError(f"{name}: sums of weights that are not {sum}")


def _padded_rows(dispatcher: TokenDispatcher) -> PaddedRows:
    """For what arrives at a rank."""
    geometry, context = dispatcher.geometry, dispatcher.context
    fmt, hidden = geometry.token_format, geometry.hidden
    return PaddedRows.allocate(
        geometry.num_local_experts,
        geometry.num_slots,
        fmt.quant_bytes(hidden),
        context.world_size,
        geometry.top_k,
        device=context.device,
        kind=PaddedScales.NONE if fmt.scale_dtype is None else PaddedScales.COLUMNS,
        num_scales=fmt.scale_columns(hidden),
    )


def run_gemms(engine: str, chosen: Sequence[GemmCase]) -> None:
    """GEMMs; raises `RuntimeError` naming one whose results are not finite."""
    with ExpertParallelContext(engine=engine) as context:
        rng = torch.Generator(context.device).manual_seed(SEED)
        for case in chosen:
            rows = make_rows(case, SEED, rng, engine)
            first, last = (make_weights(case, product, rng, engine) for product in case.products)
            overlap = DequantOverlap(first=2, sms=3) if OVERLAPPED in case.name else None
            with patch.object(plan, "plan_dequant_overlap", lambda *_, overlap=overlap: overlap):
                plan.plan_gemm.cache_clear()
                between = rows.format if case.expanded else intermediate_format_for(rows.format, first.format)
                for then in (None, last):
                    hidden = grouped_gemm_swiglu(rows, first, SILU, out_format=between, then=then, engine=engine)
                    out = grouped_gemm(hidden, last, engine=engine)
                    if not bool(out[: int(rows.group_offsets[-1])].isfinite().all()):
                        raise RuntimeError(f"{case.name}: results that are not finite")
            print(case.name, flush=True)
    plan.plan_gemm.cache_clear()


def findings(output: str) -> int | None:
    """The number that the tool's summary reports; None where there is no summary."""
    found = _SUMMARY.findall(output)
    return sum(int(number) for number in found) if found else None


def check(tool: str, engine: str, chosen: Sequence[str], seconds: float) -> dict[str, Any]:
    """Cases with kernels of `engine` under one tool: what it reported, and the end of its output if that is bad."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
    # Torch's kernels, most of them for weights, are not checked: they would take most of the time.
    command += ["--kernel-name-exclude", "kernel_substring=at6native"]
    if tool == "memcheck":
        # cuda-bindings asks for functions that an older driver does not have.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "moe_runtime.launch.research.sanitize", "--run", engine, "--only", *chosen]
    start = time.perf_counter()
    # A session of its own: where only the tool is ended, the program that it ran goes on.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as run:
        try:
            text, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            text, _ = run.communicate()
    output, code = text.decode(errors="replace"), run.returncode
    finished = [name for name in chosen if name in output.splitlines()]
    passed = findings(output) == 0 and code == 0 and len(finished) == len(chosen)
    races = Counter(_RACE.findall(output))
    return {
        "tool": tool,
        "engine": engine,
        "findings": findings(output),
        "races": dict(races),
        "exit_code": code,
        "cases": finished,
        "seconds": round(time.perf_counter() - start, 1),
        "passed": passed,
        "output": [] if passed else output.splitlines()[-60:],
    }


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of processes that shared the cases of one tool and one engine, as that of one process."""
    finished = {name for part in parts for name in part["cases"]}
    reported = [part["findings"] for part in parts]
    return {
        "tool": parts[0]["tool"],
        "engine": parts[0]["engine"],
        "findings": None if None in reported else sum(reported),
        "races": dict(sum((Counter(part["races"]) for part in parts), Counter())),
        "exit_code": next((part["exit_code"] for part in parts if part["exit_code"]), 0),
        "cases": [name for name in names() if name in finished],
        "seconds": max(part["seconds"] for part in parts),
        "passed": all(part["passed"] for part in parts),
        "output": [line for part in parts for line in part["output"]],
    }


def work(options: argparse.Namespace) -> int:
    """Run, print and write; 1 if something is reported."""
    chosen = chosen_cases(options.only or names(), options.cases)
    if options.run is not None:
        run_cases(options.run, chosen)
        return 0
    environment.check_folder("--json", options.json)
    environment.check_at_least(1, parts=options.parts)
    if shutil.which("compute-sanitizer") is None:
        raise ValueError("expected compute-sanitizer on PATH, found none")
    with ExpertParallelContext() as context:
        if context.device.type != "cuda":
            raise ValueError("expected a CUDA GPU, got none")
        record = environment.environment_record(context)
    tools = [(tool, engine) for tool in TOOLS for engine in ("auto", "triton")]
    # So that each process has two cores.
    count = min(options.parts or max(1, (os.cpu_count() or 1) // (2 * len(tools))), len(chosen))
    runs = [(*each, chosen[part::count]) for each in tools for part in range(count)]

    def run(tool: str, engine: str, part: list[str]) -> dict[str, Any]:
        result = check(tool, engine, part, options.seconds)
        shown = "passed" if result["passed"] else f"FAILED, exit code {result['exit_code']}"
        about = f"{len(result['cases'])} of {len(part)} cases, {result['findings']} findings"
        print(f"{tool}, engine {engine}: {about}, {shown}", flush=True)
        return result

    with ThreadPoolExecutor(len(runs)) as pool:
        found = list(pool.map(lambda each: run(*each), runs))
    results = [together(found[first : first + count]) for first in range(0, len(found), count)]
    for result in results:
        print("\n".join(result["output"]), end="\n" if result["output"] else "")
    if options.json is not None:
        environment.write_json(options.json, {"kind": KIND, "environment": record, "results": results})
    return int(not all(result["passed"] for result in results))


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.research.sanitize", description="compute-sanitizer."
    )
    environment.add_json_option(parser)
    parser.add_argument("--cases", metavar="REGEX", help="only cases with such a name")
    parser.add_argument("--seconds", type=float, default=600, help="bound of one tool's run")
    shared = "processes that share the cases of a tool and an engine (default: by the number of cores)"
    parser.add_argument("--parts", type=int, metavar="N", help=shared)
    parser.add_argument("--run", choices=("auto", "triton"), metavar="ENGINE", help="run the cases, without a tool")
    parser.add_argument("--only", nargs="+", choices=names(), metavar="CASE", help="only these cases")
    return environment.run_parsed("sanitize", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
