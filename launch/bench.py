"""Checks, then times, the parts of a layer and the layer, beside what others take for the same.

`[torchrun --nproc-per-node=N] -m moe_runtime.launch.bench [dispatch|combine|gemm|layer ...] --config NAME` prints a
table and writes JSON. A result that fails its check is not timed and makes the exit code 1. With `--trace` the layer is
checked and recorded instead, and its JSON has the times of its phases alone. The operations are in
`launch/layer_operations.py`, the layers that ours is timed beside in `launch/torch_layer.py` and
`launch/unfused_layer.py`; `launch/timing.py` says how times are taken, `launch/checks.py` against what is checked,
`launch/bounds.py` with what is compared. `bench gemm` without `--config` runs the cases of `launch/gemm_cases.py`
instead, on one GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from moe_runtime.config import CombineFormatName, FormatName, MoELayerConfig, RunConfig
from moe_runtime.launch import cases, environment, gemm_bench, layer_operations, link_rate
from moe_runtime.launch.layer_bench import Bench, Settings
from moe_runtime.launch.layer_report import make_report, print_results, write_report
from moe_runtime.launch.link_rate import LinkRate
from moe_runtime.launch.trace import TraceFile
from moe_runtime.launch.yardsticks import Yardsticks
from moe_runtime.layer import MoELayer
from moe_runtime.layer_build import context_from_config
from moe_runtime.progress import with_progress

OPERATIONS = ("dispatch", "combine", "gemm", "layer")


def bench_format(
    run: RunConfig,
    fmt: str | None,
    options: argparse.Namespace,
    trace: TraceFile | None,
    link: LinkRate | None,
    yardsticks: Yardsticks,
) -> tuple[list[dict[str, Any]], dict[str, Any], MoELayerConfig]:
    """The results of one token format: every combine format, number of tokens and routing in turn. Collective.

    `fmt` is None for that of the config, or of its checkpoint. Returns the results, on rank 0 the record of the
    environment, and the config of the first layer, with all that its checkpoint says.
    """
    base = run.layer if fmt is None else cases.with_token_format(run.layer, fmt)
    wires = options.combine_format or [base.combine_format]
    changes = [{"combine_format": wire, "max_tokens_per_rank": count} for wire in wires for count in options.tokens]
    results: list[dict[str, Any]] = []
    with context_from_config(run.parallel) as context:
        settings = Settings(
            operations=options.operations,
            iterations=options.steps,
            check_tokens=options.check_tokens,
            link_gb_per_s=None if link is None else link.gb_per_s,
            trace=trace,
        )
        first = MoELayer.from_run_config(run.replace(layer=base.replace(**changes[0]), tokens_per_rank=0), context)
        # A shared expert is dense work that every rank does by itself: `layer` times the routed experts alone.
        first.shared_expert, first.config = None, first.config.replace(shared_expert=None)
        config = first.config
        layers = [first, *(_sharing(first, MoELayer(config.replace(**each), context)) for each in changes[1:])]
        turns = [(layer, routing) for layer in layers for routing in options.routing]
        for layer, routing in with_progress(turns, f"bench {config.token_format}", len(turns), shown=context.rank == 0):
            results += layer_operations.run(Bench(layer, run, routing, settings, yardsticks))
        record = environment.environment_record(context) if context.rank == 0 else {}
        environment.gather(context, "end", None)
    return results, record, config


def _sharing(first: MoELayer, layer: MoELayer) -> MoELayer:
    """`layer` with the weights of `first`."""
    layer.router = first.router
    layer.experts = first.experts
    return layer


def resolved(run: RunConfig, config: MoELayerConfig) -> RunConfig:
    """`run` with the layer that ran, but for the numbers of tokens: these stand in each result."""
    layer = config.replace(max_tokens_per_rank=run.layer.max_tokens_per_rank)
    changed: RunConfig = run.replace(layer=layer)
    return changed


def work(options: argparse.Namespace) -> int:
    """Check, time, print and write; 1 if a check failed."""
    for name in ("cases", "small", "picture"):
        if getattr(options, name):
            raise ValueError(f"--{name}: only for gemm alone, without --config")
    options.config, options.routing = options.config or "tiny_cpu", options.routing or ["uniform"]
    run = environment.read_config(options)
    if run.placement is not None:
        raise ValueError("placement: benchmarks are of contiguous experts, expected a config without one")
    for name in ("num_sms", "steps", "check_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    changes = {} if options.num_sms is None else {"num_sms": options.num_sms}
    run = run.replace(layer=run.layer.replace(**changes))
    options.tokens = options.tokens or [run.tokens_per_rank or run.layer.max_tokens_per_rank]
    _check(options)
    link = link_rate.chosen(options)
    device = environment.start(run)
    link = link or link_rate.default(device)
    trace = None if options.trace is None else TraceFile(options.trace)
    yardsticks = Yardsticks(run)
    results: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    ran: RunConfig | None = None
    for fmt in options.formats or [None]:
        more, record, config = bench_format(run, fmt, options, trace, link, yardsticks)
        results += more
        # Of several formats the first; each result names its own.
        ran = ran or resolved(run, config)
        report = make_report(results, record, ran, link, traced=trace is not None)
        if record and options.json is not None:
            # After each format, so that a run which is cut off leaves what it has.
            write_report(report, options.json)
    if record:
        if trace is not None:
            trace.write()
        print_results(report, Console(highlight=False))
    return int(not report["passed"])


def _check(options: argparse.Namespace) -> None:
    """Raise `ValueError` for what the parser lets through."""
    if min(options.tokens) < 1:
        raise ValueError(f"--tokens: expected at least 1, got {min(options.tokens)}")
    if options.trace is not None and options.operations != ["layer"]:
        raise ValueError("--trace: records the layer and times nothing, expected the operation layer alone")
    for name in ("json", "trace"):
        environment.check_folder(f"--{name}", getattr(options, name))
    if None not in (options.json, options.trace) and options.json.resolve() == options.trace.resolve():
        raise ValueError(f"--trace: expected another file than --json, got {options.trace} for both")


def _gemm_cases(options: argparse.Namespace) -> int:
    """`gemm` without a config. Raises `ValueError` for options that only a config gives a meaning."""
    only = (
        *("tokens", "formats", "combine_format", "routing", "check_tokens", "link_gb_per_s", "links"),
        *("trace", "transport", "num_sms"),
    )
    for name in only:
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
    parser.add_argument(
        "--combine-format", nargs="+", choices=get_args(CombineFormatName), help="each in turn, instead of the config's"
    )
    parser.add_argument(
        "--routing", nargs="+", choices=cases.ROUTINGS, help="who chooses the experts, each in turn (default: uniform)"
    )
    parser.add_argument("--num-sms", type=int, metavar="N", help="of the exchange, instead of the config's")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed iterations (default: 20)")
    parser.add_argument(
        "--check-tokens", type=int, metavar="N", help="tokens of each rank that the layer's check takes"
    )
    link_rate.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rank 0 writes the results")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record the layer there, time nothing")
    options = parser.parse_args(arguments)
    if unknown := set(options.operations) - set(OPERATIONS):
        parser.error(f"OPERATION: expected any of {', '.join(OPERATIONS)}, got {', '.join(sorted(unknown))}")
    options.operations = options.operations or list(OPERATIONS)
    alone = options.operations == ["gemm"] and options.config is None
    return environment.run_program("bench", lambda: (_gemm_cases if alone else work)(options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
