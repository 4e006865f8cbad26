"""`kernel_bench gemm`: checks, then times the cases of `gemm_cases.py` on one GPU.

Each case is checked on the buffers that are then timed (`gemm_check.py`); a case that fails is not timed. Timed are
`grouped_gemm_swiglu` and `grouped_gemm` with everything that they launch, in CUDA graphs whose steps use copies of
rows and weights in turn. On a CPU, or with `--small`, sizes are small and times mean little.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK, NVFP4, intermediate_format_for
from moe_runtime.kernels.gemm.arguments import encode_scale
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, StoredWeights
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import choose_tma_shape
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import SILU
from moe_runtime.kernels.runtime import has_nvrtc, resolve_engine
from moe_runtime.launch.benchmarks.checks import Check
from moe_runtime.launch.benchmarks.timing import measure_steps, times_record
from moe_runtime.launch.common import environment
from moe_runtime.launch.kernel_bench.ceilings import CEILINGS
from moe_runtime.launch.kernel_bench.gemm_cases import CASES, GemmCase, Goal, Product
from moe_runtime.launch.kernel_bench.gemm_check import (
    Sample,
    check_bits,
    check_gated,
    check_plain,
    poisoned_memory,
    stored_tensors,
)
from moe_runtime.launch.kernel_bench.gemm_data import clone_rows, make_rows, make_weights, num_copies, row_bytes
from moe_runtime.launch.kernel_bench.gemm_peers import Peers
from moe_runtime.launch.kernel_bench.options import chosen_cases

KIND = "gemm"
"""`kind` of the JSON."""

SEED = 0
"""Of rows, weights and routing."""

Call = Callable[[int], object]


@dataclass(frozen=True)
class RotatedWeights:
    """Weights of the GEMMs of a case, by their products.

    Attributes:
        copies: what steps use in turn, at least enough to keep all of them out of the cache.
        multiplied: the first copy, or what `expand` gives of it, which the following cases need again.
    """

    copies: dict[Product, list[StoredWeights]]
    multiplied: dict[Product, StoredWeights]


class Runner:
    """Operands, checks and times of one case after the other.

    Weights are kept for as long as the following cases have the same formats. `engine` is passed on as it is: "auto"
    lets the GEMM choose among its kernels.
    """

    def __init__(self, context: ExpertParallelContext, *, engine: str, iterations: int, seed: int) -> None:
        self.context = context
        self.engine = engine
        self.iterations = iterations
        self.seed = seed
        self.peers = Peers(context, iterations)
        # Experts too keep it on the device.
        self._gsf = encode_scale(NVFP4, None, context.device, "gsf")
        self._weights: dict[tuple[object, ...], RotatedWeights] = {}

    def run(self, case: GemmCase) -> dict[str, Any]:
        """The record of a case; its goals are judged by `judge` when all are there."""
        device, sizes = self.context.device, case.group_rows(self.seed)
        rng = torch.Generator(device).manual_seed(self.seed)
        rows = make_rows(case, self.seed, rng, self.engine)
        rotated = self._rotated_weights(case, rng)
        copies = rotated.copies
        count = max(len(part) for part in copies.values())
        inputs = [rows, *(clone_rows(rows) for _ in range(count - 1))]
        last = case.products[-1]
        out = torch.full((rows.capacity, last.n), torch.nan, dtype=torch.bfloat16, device=device)
        checks, between = self._check(case, inputs, rotated, out)
        passed = all(check.passed for check in checks)
        floors = case.floors_us(sizes)
        calls = self._calls(case, inputs, between, copies, out)
        times = {}
        if passed:
            times = {
                name: measure_steps(
                    self.context, call, iterations=self.iterations, sustained=not case.brief or name == case.product
                )
                for name, call in calls.items()
            }
        on_gpu = device.type == "cuda"
        weights = next(iter(copies.values()))[0]
        record = {
            "case": case.name,
            "format": case.format,
            "weight_format": case.weight_format.name,
            "expanded_weights": case.expanded,
            "product": case.product,
            "routing": case.routing,
            "hidden": case.hidden,
            "intermediate": case.intermediate,
            "groups": case.groups,
            "rows": sum(sizes),
            "largest_group": max(sizes),
            "active_groups": sum(size > 0 for size in sizes),
            "capacity": rows.capacity,
            "prepacked_weights": isinstance(weights, PrepackedWeights),
            "weight_copies": count,
            "row_bytes": row_bytes(rows),
            "weight_bytes": sum(part[0].num_bytes for part in copies.values()),
            "shapes": planned_shapes(case, rows) if resolve_engine(self.engine, device) == "cuda" else {},
            "kernels": kernel_names(calls[case.product]) if passed and on_gpu and has_nvrtc() else [],
            "checks": [asdict(check) | {"passed": check.passed} for check in checks],
            "work_flop": case.flops(sizes),
            "moved_bytes": sum(case.moved_bytes(product, sizes) for product in case.products),
            "floor_us": sum(us for us, _ in floors),
            "bound_by": [kind for _, kind in floors],
            "parts": {name: times_record(timing) for name, timing in times.items() if name != case.product},
            "goals": [asdict(goal) | {"text": goal.text, "met": None} for goal in case.goals],
            **times_record(times.get(case.product)),
        }
        record |= _rates(record)
        del inputs, out, rows, between, calls
        record["peers"] = self.peers.of(case, sizes)
        return record

    def _rotated_weights(self, case: GemmCase, rng: torch.Generator) -> RotatedWeights:
        formats = (case.format, case.weight_format, case.expanded)
        key = (formats, case.groups, case.product, case.hidden, case.intermediate)
        if any(other[0] != formats for other in self._weights):
            self._weights.clear()
        if key not in self._weights:
            made = {product: make_weights(case, product, rng, self.engine) for product in case.products}
            count = num_copies(rng.device, sum(w.num_bytes for w in made.values()))
            self._weights[key] = RotatedWeights(
                {product: [w, *(w.clone() for _ in range(count - 1))] for product, w in made.items()},
                {product: w.expand() if isinstance(w, ExpandedWeights) else w for product, w in made.items()},
            )
        return self._weights[key]

    def _swiglu(self, rows: GroupedRows, w: StoredWeights, then: StoredWeights | None) -> GroupedRows:
        gsf = self._gsf if rows.format.has_row_scale else None
        between = intermediate_format_for(rows.format, w.format)
        return grouped_gemm_swiglu(rows, w, SILU, out_format=between, out_gsf=gsf, then=then, engine=self.engine)

    def _check(
        self,
        case: GemmCase,
        inputs: Sequence[GroupedRows],
        rotated: RotatedWeights,
        out: torch.Tensor,
    ) -> tuple[list[Check], GroupedRows | None]:
        """Checks of the first copies, and that the others give the same bits; what lies between the GEMMs.

        The first GEMM is checked as it is stored, the second with what a layer gives it.
        """
        rows, engine, copies, multiplied = inputs[0], self.engine, rotated.copies, rotated.multiplied
        sample = Sample.draw(rows, self.seed)
        first, last = case.products[0], case.products[-1]
        checks, between, stored = [], None, rows
        total = int(rows.group_offsets[-1])
        if case.product == "both":
            with poisoned_memory():
                stored, between = (self._swiglu(rows, copies[first][0], then) for then in (None, copies[last][0]))
            checks.append(check_gated(stored, rows, multiplied[first], sample))
        grouped_gemm(rows if between is None else between, copies[last][0], out=out, engine=engine)
        checks.append(check_plain(out, stored, multiplied[last], sample, last.name))
        if case.expanded:
            ours, fp8 = [out[:total]], [grouped_gemm(stored, multiplied[last], engine=engine)[:total]]
            if between is not None:
                ours += stored_tensors(stored)
                fp8 += stored_tensors(self._swiglu(rows, multiplied[first], None))
            checks.append(check_bits(ours, fp8))
        differing = 0
        calls = self._calls(case, inputs, between, copies, out)
        wanted = out[:total].clone()
        for number in range(1, len(inputs)):
            out[:total].fill_(torch.nan)
            calls[case.product](number)
            differing += int((out[:total] != wanted).sum())
        checks.append(Check("elements that differ between copies", float(differing), 0.0))
        return checks, between

    def _calls(
        self,
        case: GemmCase,
        inputs: Sequence[GroupedRows],
        between: GroupedRows | None,
        copies: dict[Product, list[StoredWeights]],
        out: torch.Tensor,
    ) -> dict[str, Call]:
        """What is timed, by name: the case, and for `both` each product too."""
        engine, first, last = self.engine, copies[case.products[0]], copies[case.products[-1]]
        count = len(inputs)

        def down(rows: GroupedRows, number: int) -> object:
            return grouped_gemm(rows, last[number % count], out=out, engine=engine)

        if between is None:
            return {case.product: lambda number: down(inputs[number % count], number)}

        def gate_up(number: int) -> GroupedRows:
            return self._swiglu(inputs[number % count], first[number % count], last[number % count])

        return {
            case.product: lambda number: down(gate_up(number), number),
            "gate_up": gate_up,
            "down": lambda number: down(between, number),
        }


def planned_shapes(case: GemmCase, rows: GroupedRows) -> dict[str, str]:
    """By product, the shape of Hopper's kernel for weights that tensor cores read as they are stored, if it runs."""
    if case.multiplied_format != case.token_format or case.token_format not in (BF16, FP8_BLOCK):
        return {}
    gathered = [rows.row_index is not None, False]
    return {
        product.name: choose_tma_shape(
            rows.likely_rows, rows.num_groups, product.k, gathered=gathers, expanded=case.expanded
        ).name
        for product, gathers in zip(case.products, gathered, strict=False)
    }


def _rates(record: dict[str, Any]) -> dict[str, Any]:
    us = record["median_us"]
    return {
        "floor_share": record["floor_us"] / us if us else None,
        "rate_tflop_per_s": record["work_flop"] / us * 1e-6 if us else None,
        "rate_tb_per_s": record["moved_bytes"] / us * 1e-6 if us else None,
    }


def judge(results: list[dict[str, Any]]) -> None:
    """Fill in `met` of every goal: None where it, or what it compares with, was not timed."""
    by_name = {result["case"]: result for result in results}
    for result in results:
        for goal in result["goals"]:
            goal["met"] = _met(result, Goal(goal["kind"], goal["value"], goal["other"]), by_name)


def _met(result: dict[str, Any], goal: Goal, by_name: dict[str, dict[str, Any]]) -> bool | None:
    us = result["median_us"]
    if us is None:
        return None
    if goal.kind == "us":
        return bool(us <= goal.value)
    if goal.kind in ("tflop_per_s", "floor_share"):
        found = result["rate_tflop_per_s" if goal.kind == "tflop_per_s" else "floor_share"]
        return bool(found >= goal.value)
    if goal.kind == "of_case":
        other = by_name.get(goal.other, {}).get("median_us")
    else:
        other = next((peer["median_us"] for peer in result["peers"] if peer["name"] == goal.other), None)
    return None if other is None else bool(us <= goal.value * other)


def select(pattern: str | None) -> tuple[GemmCase, ...]:
    """The cases in whose names the regular expression is found. Raises `ValueError` where there is none."""
    chosen = chosen_cases([case.name for case in CASES], pattern)
    return tuple(case for case in CASES if case.name in chosen)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Check and time with `cases`, `small`, `json`, `engine` and `steps` of the command line; the report."""
    chosen = select(options.cases)
    environment.check_at_least(1, steps=options.steps)
    results: list[dict[str, Any]] = []
    engine = options.engine or "auto"
    with ExpertParallelContext(engine=engine) as context:
        if options.small or context.device.type != "cuda":
            chosen = tuple(case.small() for case in chosen)
        runner = Runner(context, engine=engine, iterations=options.steps, seed=SEED)
        record = environment.environment_record(context) | {"gemm_engine": engine}
        for case in chosen:
            results.append(runner.run(case))
            judge(results)
            passed = all(check["passed"] for result in results for check in result["checks"])
            report = {"kind": KIND, "environment": record, "ceilings": CEILINGS, "passed": passed, "results": results}
            if options.json is not None:
                # After each case, so that an interrupted run leaves what it has.
                environment.write_json(options.json, report)
    return report


def kernel_names(call: Call) -> list[str]:
    """Names of the kernels that `call(0)` launches, from a CUDA graph of it; needs a GPU and `cuda-bindings`.

    `call` must be warm: nothing may be compiled while it is captured.
    """
    from cuda.bindings import driver

    def name_of(node: Any) -> str:
        _, parameters = driver.cuGraphKernelNodeGetParams(node)
        # Kernels of libraries are known by a handle that belongs to no context.
        by_function = int(parameters.func) != 0
        _, name = driver.cuFuncGetName(parameters.func) if by_function else driver.cuKernelGetName(parameters.kern)
        return str(name.decode())

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call(0)
    handle = driver.CUgraph(init_value=graph.raw_cuda_graph())
    _, _, count = driver.cuGraphGetNodes(handle)
    _, nodes, _ = driver.cuGraphGetNodes(handle, count)
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return [name_of(node) for node in nodes if driver.cuGraphNodeGetType(node)[1] == kernel]
