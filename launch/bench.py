"""Checks, then times, the parts of a layer and the layer, compared with torch.

`[torchrun --nproc-per-node=N] -m moe_runtime.launch.bench [dispatch|combine|gemm|layer|low_latency|normal ...]
--config NAME` prints a table and writes JSON. A result that fails its check is not timed and makes the exit code 1.
Where `low_latency` and `normal` are both named, and `--tokens` are few and many, each takes those that it is for. With
`--trace` the layer is checked and recorded, and nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from moe_runtime.build import context_from_config
from moe_runtime.config import CombineFormatName, FormatName, MoELayerConfig, RunConfig
from moe_runtime.launch.benchmarks import deep_ep_operations, layer_operations, link_rate, network
from moe_runtime.launch.benchmarks.layer_bench import Baselines, Bench, Settings
from moe_runtime.launch.benchmarks.layer_report import make_report
from moe_runtime.launch.benchmarks.show import show
from moe_runtime.launch.benchmarks.trace import TraceFile
from moe_runtime.launch.common import cases, draws, environment
from moe_runtime.layer import MoELayer
from moe_runtime.support.progress import with_progress

OPERATIONS = ("dispatch", "combine", "gemm", "layer")
IF_NAMED = ("low_latency", "normal")
"""Operations that run only where they are named."""


def bench_layers(options: argparse.Namespace) -> int:
    """Check, time, print and write; 1 if a check failed."""
    run = environment.read_config(options)
    if run.placement is not None:
        raise ValueError("placement: benchmarks are of contiguous experts, expected a config without one")
    environment.check_at_least(1, num_sms=options.num_sms, steps=options.steps, check_tokens=options.check_tokens)
    if options.num_sms is not None:
        run = run.replace(layer=run.layer.replace(num_sms=options.num_sms))
    options.tokens = options.tokens or [run.tokens_per_rank or run.layer.max_tokens_per_rank]
    environment.check_at_least(1, tokens=min(options.tokens))
    if options.trace is not None and options.operations != ["layer"]:
        raise ValueError("--trace: records the layer and times nothing, expected the operation layer alone")
    for name in ("json", "trace"):
        environment.check_folder(f"--{name}", getattr(options, name))
    if None not in (options.json, options.trace) and options.json.resolve() == options.trace.resolve():
        raise ValueError(f"--trace: expected another file than --json, got {options.trace} for both")
    link, network_rate = link_rate.chosen(options), network.given_rate(options)
    network.take_for_hosts(options.hosts)
    device = environment.start(run)
    link = link or link_rate.default(device)
    settings = Settings(
        operations=options.operations,
        iterations=options.steps,
        check_tokens=options.check_tokens,
        link_gb_per_s=None if link is None else link.gb_per_s,
        network_gb_per_s=network_rate,
        trace=None if options.trace is None else TraceFile(options.trace),
    )
    baselines, results = Baselines(run), list[dict[str, Any]]()
    ran: RunConfig | None = None
    for fmt in options.formats or [None]:
        more, record, config = _bench_format(run, fmt, options, settings, baselines)
        results += more
        # Of several formats the first, without tokens: each result names its own.
        layer = config.replace(max_tokens_per_rank=run.layer.max_tokens_per_rank)
        ran = ran or run.replace(layer=layer)
        report = make_report(results, record, ran, link, traced=settings.trace is not None)
        if record and options.json is not None:
            # After each format, so that an interrupted run leaves what it has.
            try:
                environment.write_json(options.json, report)
            except OSError:
                show(report, Console(highlight=False))
                raise
    if record:
        show(report, Console(highlight=False))
        if settings.trace is not None:
            settings.trace.write()
    return int(not report["passed"])


def _bench_format(
    run: RunConfig, fmt: str | None, options: argparse.Namespace, settings: Settings, baselines: Baselines
) -> tuple[list[dict[str, Any]], dict[str, Any], MoELayerConfig]:
    """The results of one token format: every combine format, number of tokens and routing in turn. Collective.

    `fmt` is None for the format of the config or of its checkpoint. Returns the results, on rank 0 the record of the
    environment, and the config of the first layer, completed from its checkpoint.
    """
    base = run.layer if fmt is None else cases.with_token_format(run.layer, fmt)
    wires = options.combine_format or [base.combine_format]
    changes = [{"combine_format": wire, "max_tokens_per_rank": count} for wire in wires for count in options.tokens]
    results: list[dict[str, Any]] = []
    with context_from_config(run.parallel) as context:
        first = MoELayer.from_run_config(run.replace(layer=base.replace(**changes[0]), tokens_per_rank=0), context)
        # Every rank computes a shared expert by itself: `layer` times the routed experts alone.
        first.shared_expert, first.config = None, first.config.replace(shared_expert=None)
        config = first.config
        layers = [first, *(_sharing(first, MoELayer(config.replace(**each), context)) for each in changes[1:])]
        turns = [(layer, routing) for layer in layers for routing in options.routing]
        for layer, routing in with_progress(turns, f"bench {config.token_format}", len(turns), shown=context.rank == 0):
            results += _results(Bench(layer, run, routing, settings, baselines), options.tokens)
        record = environment.environment_record(context) if context.rank == 0 else {}
        environment.barrier(context, "end")
    return results, record, config


def _results(bench: Bench, counts: list[int]) -> list[dict[str, Any]]:
    """Those of the operations that are asked for; `counts` are the tokens of all benches. Collective."""
    wanted = set(bench.settings.operations)
    if wanted & {"dispatch", "combine"}:
        layer_operations.exchange(bench)
    most = deep_ep_operations.FEW_TOKENS
    if wanted >= {"low_latency", "normal"} and min(counts) <= most < max(counts):
        wanted -= {"normal" if bench.layer.config.max_tokens_per_rank <= most else "low_latency"}
    if "low_latency" in wanted:
        deep_ep_operations.low_latency(bench)
    if "normal" in wanted:
        deep_ep_operations.normal(bench)
    if "gemm" in wanted:
        layer_operations.gemm(bench)
    if "layer" in wanted:
        layer_operations.whole_layer(bench)
    return bench.results


def _sharing(first: MoELayer, layer: MoELayer) -> MoELayer:
    """`layer` with the weights of `first`."""
    layer.router, layer.experts = first.router, first.experts
    return layer


def operation(name: str) -> str:
    """`name`, if it is that of an operation."""
    if name not in (*OPERATIONS, *IF_NAMED):
        raise argparse.ArgumentTypeError(f"expected any of {', '.join((*OPERATIONS, *IF_NAMED))}; got {name}")
    return name


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.bench", description="Check and time a layer.")
    help_text = f"any of {', '.join((*OPERATIONS, *IF_NAMED))} (default: {', '.join(OPERATIONS)})"
    parser.add_argument(
        "operations", type=operation, nargs="*", default=list(OPERATIONS), metavar="OPERATION", help=help_text
    )
    environment.add_common_options(parser)
    tokens = "max_tokens_per_rank, each in turn (default: tokens_per_rank)"
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help=tokens)
    formats = "of tokens and weights, each in turn"
    parser.add_argument("--formats", nargs="+", choices=get_args(FormatName), help=formats)
    formats = "each in turn, instead of the config's"
    parser.add_argument("--combine-format", nargs="+", choices=get_args(CombineFormatName), help=formats)
    routing = "who chooses the experts, each in turn (default: uniform)"
    parser.add_argument("--routing", nargs="+", choices=draws.ROUTINGS, default=["uniform"], help=routing)
    parser.add_argument("--num-sms", type=int, metavar="N", help="of the exchange, instead of the config's")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed iterations (default: 20)")
    checked = "tokens of each rank that the check of the layer compares"
    parser.add_argument("--check-tokens", type=int, metavar="N", help=checked)
    link_rate.add_options(parser)
    network.add_options(parser)
    environment.add_json_option(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record the layer there, time nothing")
    return environment.run_parsed("bench", parser, bench_layers, arguments)


if __name__ == "__main__":
    sys.exit(main())
