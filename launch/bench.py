"""Checks, then times, the parts of a layer and the layer, beside what torch takes for the same bytes and products.

`[torchrun --nproc-per-node=N] -m moe_runtime.launch.bench [dispatch|combine|gemm|layer ...] --config NAME` prints a
table and writes JSON. A result that fails its check is not timed and makes the exit code 1. `launch/timing.py` says
how times are taken, `launch/checks.py` against what is checked. `bench gemm` without `--config` runs the cases of
`launch/gemm_cases.py` instead, on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from moe_runtime.config import CombineFormatName, FormatName, RunConfig
from moe_runtime.experts import Experts
from moe_runtime.grouped import GroupedRows
from moe_runtime.kernels.grouped_gemm import gemm_bytes, gemm_flops, grouped_gemm, grouped_gemm_swiglu
from moe_runtime.launch import cases, checks, environment, gemm_bench
from moe_runtime.launch.timing import TOTAL, Lap, Step, Timing, copies_to_rotate, measure
from moe_runtime.layer import MoELayer, context_from_config
from moe_runtime.prepared import PreparedWeights
from moe_runtime.reference import relative_error
from moe_runtime.weights import ExpertWeights

OPERATIONS = ("dispatch", "combine", "gemm", "layer")
OURS = "moe_runtime"


@dataclass(frozen=True)
class Work:
    """What a step of an operation does on the rank that does most; None where it is not counted."""

    moved_bytes: int | None = None
    flops: int | None = None


class Bench:
    """One layer at one number of tokens per rank: its seeded inputs, and the results so far.

    Attributes:
        results: one JSON record per operation and implementation.
    """

    def __init__(self, layer: MoELayer, run: RunConfig, options: argparse.Namespace) -> None:
        self.layer = layer
        self.run = run
        self.options = options
        self.context = layer.context
        self.results: list[dict[str, Any]] = []

    @cached_property
    def inputs(self) -> checks.Inputs:
        """Of all ranks: every rank checks what comes to it."""
        count, kind = self.layer.config.max_tokens_per_rank, self.options.routing
        parts = [
            cases.step_inputs(self.layer, kind, self.run.seed, rank, 0, count)
            for rank in range(self.context.world_size)
        ]
        return checks.Inputs(*zip(*parts, strict=True))

    @cached_property
    def tokens(self) -> list[torch.Tensor]:
        """This rank's tokens, as many times as steps must rotate."""
        x_TH = self.inputs.x[self.context.rank]
        return [x_TH.clone() for _ in range(copies_to_rotate(x_TH.device, x_TH.nbytes))]

    @property
    def experts(self) -> Experts:
        assert self.layer.experts is not None
        return self.layer.experts

    @property
    def routed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(topk_idx, topk_weights)` of this rank."""
        return self.inputs.idx[self.context.rank], self.inputs.weights[self.context.rank]

    def exchange(self) -> None:
        """Dispatch and combine, each alone and both together, beside an all-to-all of the same bytes.

        Every dispatch is combined: the next but one waits for that.
        """
        dispatcher, geometry = self.layer.dispatcher, self.layer.dispatcher.geometry
        wanted = [name for name in ("dispatch", "combine") if name in self.options.operations]
        arrived = dispatcher.dispatch(self.tokens[0], *self.routed)
        rows_RH = checks.combine_input(arrived, self.inputs)
        found = {"dispatch": checks.check_dispatch(arrived, self.inputs)}
        y_TH = dispatcher.combine(rows_RH, arrived.handle)
        found["combine"] = checks.check_combine(y_TH, self.inputs, geometry)
        passed = {name: self._agree(found[name]) for name in wanted}
        sent = self.inputs.sent_tokens(geometry).fill_diagonal_(0)
        traffic = {"dispatch": sent * geometry.record.record_bytes, "combine": sent.T * geometry.partial_bytes}
        work = {name: Work(moved_bytes=int(part.sum(dim=1).max())) for name, part in traffic.items()}

        def step(number: int, lap: Lap) -> None:
            tokens_TH = self.tokens[number % len(self.tokens)]
            handle = dispatcher.dispatch(tokens_TH, *self.routed).handle
            lap("dispatch")
            dispatcher.combine(rows_RH, handle)
            lap("combine")

        graph_safe = self.context.heap.graph_safe
        timings = self._measure(step, list(passed.values()), capturable=graph_safe, laps=True)
        for name in wanted:
            self._add(name, timings.get(name), work[name], passed[name])
            self._add_all_to_all(name, traffic[name], work[name])
        if len(wanted) == 2:
            both = self._measure(step, list(passed.values()), capturable=graph_safe)
            total = Work(moved_bytes=sum(part.moved_bytes or 0 for part in work.values()))
            self._add("dispatch+combine", both.get(TOTAL), total, None)

    def gemm(self) -> None:
        """Both grouped GEMMs on the rows that arrive in a step, beside torch's in bf16 where there is one."""
        experts, config = self.experts, self.layer.config
        inner, hidden, engine = config.intermediate_size, config.hidden_size, self.context.gemm_engine
        arrived = self.layer.dispatcher.dispatch(self.tokens[0], *self.routed)
        fmt = experts.intermediate_format
        assert fmt is not None and not isinstance(fmt, str)
        gate_up, down = (_rotated(w, self.context.device) for w in (experts.gate_up, experts.down))

        def project(number: int) -> GroupedRows:
            w, gsf = gate_up[number % len(gate_up)], experts.intermediate_gsf
            return grouped_gemm_swiglu(arrived, w, experts.activation, out_format=fmt, out_gsf=gsf, engine=engine)

        middle = project(0)
        out_RH = torch.full((arrived.capacity, hidden), torch.nan, dtype=torch.bfloat16, device=self.context.device)
        grouped_gemm(middle, down[0], out=out_RH, engine=engine)
        passed = (
            self._agree(checks.check_gate_up(middle, arrived, experts.gate_up, experts.activation)),
            self._agree(checks.check_down(out_RH, middle, experts.down)),
        )
        counts = arrived.group_offsets.diff().tolist()
        steps: tuple[Step, ...] = (
            lambda number, lap: _discard(project(number)),
            lambda number, lap: _discard(grouped_gemm(middle, down[number % len(down)], out=out_RH, engine=engine)),
        )
        sizes = ((2 * inner, hidden, arrived, checks.format_bytes(fmt, inner)), (hidden, inner, middle, 2 * hidden))
        weights = (experts.gate_up, experts.down)
        for index, (n, k, rows, row_bytes) in enumerate(sizes):
            name = ("gemm gate+up", "gemm down")[index]
            moved = gemm_bytes(
                sum(counts),
                n,
                k,
                a_format=rows.format,
                w_format=weights[index].format,
                active_experts=sum(count > 0 for count in counts),
                out_bytes_per_row=row_bytes,
            )
            work = self._most(Work(moved_bytes=moved, flops=gemm_flops(sum(counts), n, k)))
            timings = self._measure(steps[index], [passed[index]], capturable=True)
            self._add(name, timings.get(TOTAL), work, passed[index])
            if self.context.device.type == "cuda":
                self._add_grouped_mm(name, arrived.group_offsets, n, k, work)
        self.layer.dispatcher.combine(out_RH, arrived.handle)

    def whole_layer(self) -> None:
        """The layer, its router too where that chooses the experts."""
        layer, config = self.layer, self.layer.config
        limit = self.options.check_tokens
        part = slice(0, cases.default_check_tokens(config) if limit is None else limit)
        by_itself = self.options.routing == "router"

        def forward(x_TH: torch.Tensor) -> torch.Tensor:
            if by_itself:
                return layer(x_TH)
            return layer(x_TH, topk_idx=self.routed[0], topk_weights=self.routed[1])

        y_TH = forward(self.tokens[0])[part]
        own = (self.tokens[0][part], *(routed[part] for routed in self.routed))
        reference_TH = cases.layer_reference(layer, cases.expert_source(self.run), *own)
        error, _ = relative_error(y_TH, reference_TH)
        check = self._agree(checks.Check("layer: relative Frobenius error", error, cases.layer_bound(config)))
        ids, starts = torch.cat(list(self.inputs.idx)), layer.dispatcher.geometry.starts
        rows = max(int(((ids >= first) & (ids < end)).sum()) for first, end in pairwise(starts))
        flops = gemm_flops(rows, 3 * config.intermediate_size, config.hidden_size)
        timings = self._measure(
            lambda number, lap: _discard(forward(self.tokens[number % len(self.tokens)])),
            [check],
            capturable=self.context.heap.graph_safe,
        )
        self._add("layer", timings.get(TOTAL), Work(flops=flops), check)

    def _measure(
        self, step: Step, needed: list[checks.Check], *, capturable: bool, laps: bool = False
    ) -> dict[str, Timing]:
        """Timings; none where a check failed."""
        if not all(check.passed for check in needed):
            return {}
        return measure(self.context, step, iterations=self.options.steps, capturable=capturable, laps=laps)

    def _agree(self, check: checks.Check) -> checks.Check:
        """The check of the rank where it is worst, on every rank."""
        errors = torch.tensor(environment.gather(self.context, check.what, check.error), dtype=torch.float64)
        return replace(check, error=float(errors.max()))

    def _most(self, work: Work) -> Work:
        """That of the rank that has most."""
        ranks = environment.gather(self.context, "work", work)
        return max(ranks, key=lambda other: other.flops or 0)

    def _add_all_to_all(self, name: str, traffic_bytes: torch.Tensor, work: Work) -> None:
        """Time torch's all-to-all of the same bytes between the same ranks, without what it would still need."""
        if self.context.group is None or self.context.world_size == 1:
            return
        group, rank = self.context.group.group, self.context.rank
        sent, came = traffic_bytes[rank].tolist(), traffic_bytes[:, rank].tolist()
        source, target = (torch.zeros(sum(s), dtype=torch.uint8, device=self.context.device) for s in (sent, came))

        def step(number: int, lap: Lap) -> None:
            dist.all_to_all_single(target, source, came, sent, group=group)

        timing = measure(self.context, step, iterations=self.options.steps, capturable=True)[TOTAL]
        self._add(name, timing, work, None, "torch all_to_all_single")

    def _add_grouped_mm(self, name: str, group_offsets: torch.Tensor, n: int, k: int, work: Work) -> None:
        """Time torch's grouped GEMM of the same rows and weights in bf16, neither activation nor quantization."""
        function: Callable[..., torch.Tensor] = torch._grouped_mm
        total, experts, device = int(group_offsets[-1]), self.experts.gate_up.num_experts, self.context.device
        a_RK = torch.randn(total, k, dtype=torch.bfloat16, device=device)
        copies = copies_to_rotate(device, 2 * experts * n * k)
        w_ENK = [torch.randn(experts, n, k, dtype=torch.bfloat16, device=device) for _ in range(copies)]
        ends = group_offsets[1:].contiguous()

        def step(number: int, lap: Lap) -> None:
            function(a_RK, w_ENK[number % copies].transpose(1, 2), offs=ends)

        timing = measure(self.context, step, iterations=self.options.steps, capturable=True)[TOTAL]
        self._add(name, timing, replace(work, moved_bytes=None), None, "torch grouped_mm bf16")

    def _add(
        self, operation: str, timing: Timing | None, work: Work, check: checks.Check | None, by: str = OURS
    ) -> None:
        config, median_us = self.layer.config, timing.median_us if timing else None

        def per_second(amount: int | None, unit: float) -> float | None:
            return None if amount is None or not median_us else amount / unit / (median_us * 1e-6)

        self.results.append(
            {
                "operation": operation,
                "implementation": by,
                "tokens_per_rank": config.max_tokens_per_rank,
                "token_format": config.token_format,
                "weight_format": config.weight_format,
                "combine_format": config.combine_format,
                "mode": config.resolved_mode,
                "routing": self.options.routing,
                "median_us": median_us,
                "smallest_us": min(timing.iterations_us) if timing else None,
                "largest_us": max(timing.iterations_us) if timing else None,
                "iterations": len(timing.iterations_us) if timing else 0,
                "steps_per_iteration": timing.steps_per_iteration if timing else 0,
                "method": timing.method if timing else None,
                "moved_bytes": work.moved_bytes,
                "work_flop": work.flops,
                "rate_gb_per_s": per_second(work.moved_bytes, 1e9),
                "rate_tflop_per_s": per_second(work.flops, 1e12),
                "check": None if check is None else asdict(check) | {"passed": check.passed},
            }
        )


def _discard(result: object) -> None:
    """A step gives nothing back."""


def _rotated(w: ExpertWeights | PreparedWeights, device: torch.device) -> list[ExpertWeights | PreparedWeights]:
    """`w`, and copies of it where it would stay in the cache."""
    return [w, *(w.clone() for _ in range(copies_to_rotate(device, w.num_bytes) - 1))]


def bench_format(run: RunConfig, fmt: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The results of one token format at every number of tokens, and the record of the environment. Collective."""
    base = cases.with_token_format(run.layer, fmt)
    if options.combine_format is not None:
        base = base.replace(combine_format=options.combine_format)
    configs = [base.replace(max_tokens_per_rank=count) for count in options.tokens]
    results: list[dict[str, Any]] = []
    with context_from_config(run.parallel) as context:
        first = MoELayer.from_run_config(run.replace(layer=configs[0], tokens_per_rank=0), context)
        layers = [first, *(_sharing(first, MoELayer(config, context)) for config in configs[1:])]
        for layer in layers:
            bench = Bench(layer, run, options)
            if {"dispatch", "combine"} & set(options.operations):
                bench.exchange()
            if "gemm" in options.operations:
                bench.gemm()
            if "layer" in options.operations:
                bench.whole_layer()
            results += bench.results
        record = environment.environment_record(context) if context.rank == 0 else {}
        environment.gather(context, "end", None)
    return results, record


def _sharing(first: MoELayer, layer: MoELayer) -> MoELayer:
    """`layer` with the weights of `first`."""
    layer.router = first.router
    layer.experts = first.experts
    return layer


def print_results(results: list[dict[str, Any]], record: dict[str, Any], console: Console) -> None:
    """One line per operation and implementation."""
    gpus = record["gpus"][0]["name"] if record["device"] == "cuda" else record["processor"]
    table = Table(
        title=f"{record['ranks']} rank(s), {gpus}, transport {record['transport']}, engine {record['engine']}; "
        "the slowest rank, median over iterations"
    )
    for column in ("operation", "by", "tokens", "format", "us", "smallest - largest", "GB/s", "TFLOP/s", "check"):
        table.add_column(column, justify="left" if column in ("operation", "by", "format") else "right")
    for result in results:
        fmt = f"{result['token_format']}>{result['combine_format']}"
        row = [result["operation"], result["implementation"], str(result["tokens_per_rank"]), fmt]
        times = [result[f"{name}_us"] for name in ("median", "smallest", "largest")]
        row += ["-", "-"] if times[0] is None else [f"{times[0]:.1f}", f"{times[1]:.1f} - {times[2]:.1f}"]
        row += ["" if (rate := result[key]) is None else f"{rate:.3g}" for key in ("rate_gb_per_s", "rate_tflop_per_s")]
        check = result["check"]
        verdict = "" if check is None else "ok" if check["passed"] else "[red]FAILED[/red]"
        table.add_row(*row, verdict if check is None else f"{verdict} {check['error']:.2g} <= {check['bound']:.2g}")
    console.print(table)


def _table_width() -> int | None:
    """Columns to print in where there is no terminal to fit into: a log would otherwise get 80."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else 150


def work(options: argparse.Namespace) -> int:
    """Check, time, print and write; 1 if a check failed."""
    for name in ("cases", "small", "picture"):
        if getattr(options, name):
            raise ValueError(f"--{name}: only for gemm alone, without --config")
    options.config, options.routing = options.config or "tiny_cpu", options.routing or "uniform"
    run = environment.read_config(options)
    if run.placement is not None:
        raise ValueError("placement: benchmarks are of contiguous experts, expected a config without one")
    # A shared expert is dense work that every rank does by itself: `layer` times the routed experts alone.
    run = run.replace(layer=run.layer.replace(shared_expert=None))
    options.tokens = options.tokens or [run.tokens_per_rank or run.layer.max_tokens_per_rank]
    if options.steps < 1:
        raise ValueError(f"--steps: expected at least 1, got {options.steps}")
    if min(options.tokens) < 1:
        raise ValueError(f"--tokens: expected at least 1, got {min(options.tokens)}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json: no folder {options.json.parent}")
    environment.start(run)
    results: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    passed = True
    for fmt in options.formats or [run.layer.token_format]:
        more, record = bench_format(run, fmt, options)
        results += more
        passed = all(result["check"] is None or result["check"]["passed"] for result in results)
        if record and options.json is not None:
            # After each format, so that a run which is cut off leaves what it has.
            report = {"environment": record, "config": run.model_dump(), "passed": passed, "results": results}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    if record:
        print_results(results, record, Console(highlight=False, width=_table_width()))
    return 0 if passed else 1


def _gemm_cases(options: argparse.Namespace) -> int:
    """`gemm` without a config. Raises `ValueError` for options that only a config gives a meaning."""
    for name in ("tokens", "formats", "combine_format", "routing", "check_tokens", "transport"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: gemm takes it together with --config only")
    return gemm_bench.work(options)


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.bench", description="Check and time a layer.")
    parser.add_argument(
        "operations", nargs="*", metavar="OPERATION", help=f"any of {', '.join(OPERATIONS)} (default: all)"
    )
    environment.add_common_options(parser)
    parser.set_defaults(config=None)
    gemm_bench.add_options(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="max_tokens_per_rank, each in turn (default: tokens_per_rank)",
    )
    parser.add_argument(
        "--formats", nargs="+", choices=get_args(FormatName), help="of tokens and weights, each in turn"
    )
    parser.add_argument("--combine-format", choices=get_args(CombineFormatName), help="instead of the config's")
    parser.add_argument("--routing", choices=cases.ROUTINGS, help="who chooses the experts (default: uniform)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed iterations (default: 20)")
    parser.add_argument(
        "--check-tokens", type=int, metavar="N", help="tokens of each rank that the layer's check takes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rank 0 writes the results")
    options = parser.parse_args(arguments)
    if unknown := set(options.operations) - set(OPERATIONS):
        parser.error(f"OPERATION: expected any of {', '.join(OPERATIONS)}, got {', '.join(sorted(unknown))}")
    options.operations = options.operations or list(OPERATIONS)
    alone = options.operations == ["gemm"] and options.config is None
    return environment.run_program("bench", lambda: (_gemm_cases if alone else work)(options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
