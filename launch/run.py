"""Runs one layer on seeded tokens and compares every rank's output with the float64 reference.

`[torchrun --nproc-per-node=N] -m moe_runtime.launch.run --config NAME` prints each rank's tokens, errors and phase
times, and how many tokens each expert got. The exit code is 0 only if every rank's error is inside the bound that
follows from the formats; 2 for a wrong argument or config.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from moe_runtime.build import context_from_config
from moe_runtime.config import FormatName, RunConfig, WeightFormatName
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.launch.common import cases, draws, environment
from moe_runtime.layer import MoELayer
from moe_runtime.observation.counters import most_over_mean
from moe_runtime.observation.phases import PhaseTimes
from moe_runtime.placement.placement import Placement
from moe_runtime.reference import relative_error

HISTOGRAM_LINES = 32
HISTOGRAM_WIDTH = 40


@dataclass(frozen=True)
class RankResult:
    """The results of one rank.

    Attributes:
        num_tokens: tokens of a step.
        phase_ms: median over the timed steps, by phase.
        checked: tokens compared with the reference.
        frobenius, largest: `relative_error` over these.
        expert_tokens: this rank's tokens for each expert of the layer, over the steps.
    """

    num_tokens: int
    phase_ms: dict[str, float]
    checked: int
    frobenius: float
    largest: float
    expert_tokens: list[int]


def run_steps(
    layer: MoELayer,
    run: RunConfig,
    *,
    kind: str,
    num_tokens: int,
    max_tokens: int,
    steps: int,
    check_tokens: int,
) -> RankResult:
    """Run one untimed and `steps` timed steps on this rank; of each, the first `check_tokens` tokens are checked.

    It brings `num_tokens` to a step, and no rank more than `max_tokens`.
    """
    context, rank = layer.context, layer.context.rank
    inputs = [cases.step_inputs(layer, kind, run.seed, rank, step, num_tokens) for step in range(steps + 1)]
    outputs = []
    times = PhaseTimes(context.device)
    for step, (x_TH, idx_TK, weights_TK) in enumerate(inputs):
        environment.barrier(context, "step")
        layer.times = times if step else None
        given = {} if kind == "router" else {"topk_idx": idx_TK, "topk_weights": weights_TK}
        y_TH = layer(x_TH, **given, max_tokens=max_tokens)
        outputs.append(y_TH[:check_tokens])
    layer.times = None
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
        context.check()
    x_TH, idx_TK, weights_TK = (
        torch.cat([part[:check_tokens] for part in parts]) for parts in zip(*inputs, strict=True)
    )
    with cases.expert_source(run, x_TH.device) as experts:
        reference_TH = cases.layer_reference(layer, experts, x_TH, idx_TK, weights_TK)
    frobenius, largest = relative_error(torch.cat(outputs), reference_TH)
    ids = torch.cat([idx.flatten() for _, idx, _ in inputs[1:]]).long()
    return RankResult(
        num_tokens=num_tokens,
        phase_ms={name: statistics.median(values) for name, values in times.milliseconds().items()},
        checked=x_TH.shape[0],
        frobenius=frobenius,
        largest=largest,
        expert_tokens=torch.bincount(ids[ids >= 0].cpu(), minlength=layer.config.num_experts).tolist(),
    )


def inside(result: RankResult, bound: float) -> bool:
    """Whether a rank's error is inside the bound; NaN is not."""
    return result.frobenius <= bound


def report(
    results: list[RankResult],
    run: RunConfig,
    context: ExpertParallelContext,
    placement: Placement | None,
    console: Console,
) -> None:
    """Print the results of all ranks."""
    config, bound = run.layer, cases.layer_bound(run.layer, several_hosts=context.hosts is not None)
    console.print(
        f"hidden {config.hidden_size}, intermediate {config.intermediate_size}, {config.num_experts} experts, "
        f"top {config.top_k}; tokens {config.token_format}, weights {config.weight_format}, "
        f"combine {config.combine_format}, mode {config.mode_on(context.world_size)}"
    )
    console.print(
        f"{context.world_size} rank(s) on {context.device.type}, transport {context.transport}, engine {context.engine}"
    )
    for name, reason in context.transport_reasons.items():
        console.print(f"  not {name}: {reason}", markup=False)
    table = Table(title="Each rank, against the float64 reference")
    for column in ("rank", "tokens a step", "checked", "error", "bound", "largest error", ""):
        table.add_column(column, justify="right")
    for rank, result in enumerate(results):
        verdict = "inside" if inside(result, bound) else "[red]OUTSIDE[/red]"
        errors = (f"{result.frobenius:.3e}", f"{bound:.3e}", f"{result.largest:.3e}") if result.checked else ("-",) * 3
        table.add_row(
            str(rank), str(result.num_tokens), str(result.checked), *errors, verdict if result.checked else ""
        )
    console.print(table)
    console.print(
        "error: Frobenius norm relative to the reference's, over all checked tokens of the rank; "
        "largest error: relative to the reference's largest value"
    )
    console.print(phase_table(results))
    console.print(f"Tokens per expert, all ranks, timed steps (at most {HISTOGRAM_LINES} lines)")
    expert_tokens = [sum(column) for column in zip(*(r.expert_tokens for r in results), strict=True)]
    holders = holders_of(run.layer.num_experts, context.world_size, placement)
    for line in histogram(expert_tokens, holders):
        console.print(line, markup=False)
    console.print(f"Busiest rank: {busiest_rank(expert_tokens, holders, context.world_size):.2f} times the mean rows")


def phase_table(results: list[RankResult]) -> Table:
    """Milliseconds of each phase: every rank's median over steps, and the maximum over ranks."""
    table = Table(title="Phase times, ms (median over steps)")
    for column in ("phase", *(f"rank {rank}" for rank in range(len(results))), "largest"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for name in results[0].phase_ms:
        values = [result.phase_ms[name] for result in results]
        table.add_row(name, *(f"{value:.3f}" for value in (*values, max(values))))
    return table


def holders_of(num_experts: int, world_size: int, placement: Placement | None) -> list[list[int]]:
    """The ranks that hold each expert, ascending."""
    if placement is not None:
        return [[slot // placement.slots_per_rank for slot in slots] for slots in placement.replicas]
    starts = expert_starts(num_experts, world_size)
    return [[sum(start <= expert for start in starts[1:])] for expert in range(num_experts)]


def busiest_rank(expert_tokens: list[int], holders: list[list[int]], world_size: int) -> float:
    """Rows of the busiest rank over the mean of all, where replicas share tokens evenly; 1 where there are no rows."""
    rows = [0.0] * world_size
    for tokens, ranks in zip(expert_tokens, holders, strict=True):
        for rank in ranks:
            rows[rank] += tokens / len(ranks)
    return most_over_mean(rows)


def histogram(expert_tokens: list[int], holders: list[list[int]]) -> list[str]:
    """One line per expert, or per run of neighbouring experts where there are many: holders, ids, bar, tokens."""
    per_line = ceil_div(len(expert_tokens), HISTOGRAM_LINES)
    groups = [
        range(first, min(first + per_line, len(expert_tokens))) for first in range(0, len(expert_tokens), per_line)
    ]
    totals = [sum(expert_tokens[expert] for expert in group) for group in groups]
    ranks = [",".join(map(str, sorted({rank for expert in group for rank in holders[expert]}))) for group in groups]
    width = max(3, *map(len, ranks))
    lines = []
    for group, total, held_by in zip(groups, totals, ranks, strict=True):
        label = f"{group.start}" if len(group) == 1 else f"{group.start}-{group.stop - 1}"
        bar = "█" * round(HISTOGRAM_WIDTH * total / max(1, *totals))
        lines.append(f"  rank {held_by:<{width}} expert {label:>11} {bar:<{HISTOGRAM_WIDTH}} {total}")
    return lines


def work(options: argparse.Namespace) -> int:
    """Run and report; 1 if an error is outside its bound."""
    run = environment.read_config(options)
    if options.format is not None or options.weight_format is not None:
        tokens = options.format or run.layer.token_format
        run = run.replace(layer=cases.with_token_format(run.layer, tokens, options.weight_format))
    environment.check_at_least(1, steps=options.steps)
    check_tokens = cases.default_check_tokens(run.layer) if options.check_tokens is None else options.check_tokens
    if check_tokens < 0:
        raise ValueError(f"--check-tokens: expected 0 or more, got {check_tokens}")
    environment.start(run)
    with context_from_config(run.parallel) as context:
        given = options.tokens or [run.tokens_per_rank or run.layer.max_tokens_per_rank]
        counts = cases.counts_of(given, context.world_size, run.layer.max_tokens_per_rank)
        layer = MoELayer.from_run_config(run, context)
        run = run.replace(layer=layer.config)
        mine = run_steps(
            layer,
            run,
            kind=options.routing,
            num_tokens=counts[context.rank],
            max_tokens=max(counts),
            steps=options.steps,
            check_tokens=check_tokens,
        )
        results = environment.gather(context, "results", mine, RankResult)
        report(results, run, context, layer.placement, environment.console_of(context))
        bound = cases.layer_bound(run.layer, several_hosts=context.hosts is not None)
    return 0 if all(inside(result, bound) for result in results) else 1


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.run", description="Run and check one layer.")
    environment.add_common_options(parser)
    parser.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", help="tokens of a step: for all ranks, or one number per rank"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps (default: 10)")
    parser.add_argument("--format", choices=get_args(FormatName), help="of tokens and weights, instead of the config's")
    weights = "of weights, where it is not that of the tokens"
    parser.add_argument("--weight-format", choices=get_args(WeightFormatName), help=weights)
    parser.add_argument("--routing", choices=draws.ROUTINGS, default="router", help="who chooses the experts")
    parser.add_argument(
        "--check-tokens",
        type=int,
        metavar="N",
        help="tokens of each rank and step to check, 0 for none (default: all, but "
        f"{cases.FEW_TOKENS} where the experts hold more than {cases.CHECK_WEIGHTS} weights). The bound is for the "
        "mean over many tokens; the error of a few varies around it",
    )
    return environment.run_parsed("run", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
