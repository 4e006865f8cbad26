"""Overhead of counted waits and of recorded routes, on and off in one run; the time that moving experts takes.

    torchrun --nproc-per-node=2 -m moe_runtime.launch.research.overheads --json overheads.json

Steps are in CUDA graphs. Two graphs of equal steps may differ by 2% in all replays, so each variant is captured several
times. Variants take turns, one after the other in each round, in an order that rotates. A time is that of the slowest
rank: the median over rounds of each capture, and the mean of the captures. The bits of all variants are compared before
they are timed. On CPU ranks it runs, too, with few tokens and rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.config import load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.common import environment
from moe_runtime.layer import MoELayer
from moe_runtime.observation.waits import slowest_rank
from moe_runtime.placement.placement import plan_placement

Captured = tuple[Callable[[], Any], torch.Tensor]
"""What runs a step again, and its result."""

VARIANTS = ("off", "off again", "routes", "routes and weights", "waits", "both")
WAITING = ("waits", "both")
"""Those that a rank alone does not have: it waits for nobody."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; exit code 2 if it is called wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="deepseek_v3_half", help="name or file (default: deepseek_v3_half)")
    parser.add_argument("--format", default="fp8_block", help="of tokens and weights (default: fp8_block)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 128, 4096], metavar="N", help="of a rank")
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="in which each variant has a turn")
    parser.add_argument("--captures", type=int, default=8, metavar="N", help="of each variant")
    environment.add_json_option(parser)
    return environment.run_parsed("overheads", parser, work, arguments)


def work(options: argparse.Namespace) -> int:
    """What the program does."""
    environment.check_at_least(1, tokens=min(options.tokens), rounds=options.rounds, captures=options.captures)
    environment.check_folder("--json", options.json)
    device = init_from_env()
    on_gpu = device.type == "cuda"
    most = max(options.tokens)
    config = load_config(options.config).layer.replace(
        token_format=options.format,
        weight_format=options.format,
        max_tokens_per_rank=most,
        token_buckets=tuple(t for t in sorted(set(options.tokens)) if t != most),
    )
    experts, top_k, hidden = config.num_experts, config.top_k, config.hidden_size
    with ExpertParallelContext(device=device) as context:
        rank, world = context.rank, context.world_size
        layer = MoELayer(config, context, router=False)
        placed = None
        if world > 1:
            slots = experts // world
            loads = [1.0] * experts, [1.0 + e for e in range(experts)]
            plans = [plan_placement(load, world, slots) for load in loads]
            plans[1] = plans[1].reordered_like(plans[0])
            placed = MoELayer(config, context, placement=plans[0], router=False)
        for one in (layer, placed):
            if one is not None:
                one.load_random(1)
        layer.warm_up()
        results = []

        def slowest(value: float) -> float:
            """Over the ranks."""
            if not dist.is_initialized():
                return value
            found = torch.tensor([value], dtype=torch.float64, device=device)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            return float(found)

        steps = {}
        for tokens in options.tokens:
            generator = torch.Generator().manual_seed(1000 * tokens + rank)
            x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16).to(device)
            ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.int().to(device)
            weights = torch.rand(tokens, top_k, generator=generator).to(device)
            steps[tokens] = x, ids, weights

        def capture(tokens: int) -> Captured:
            (x, ids, weights), routes = steps[tokens], layer.routes

            def run() -> torch.Tensor:
                layer.routes = routes  # where no graph keeps them
                return layer(x, topk_idx=ids, topk_weights=weights, max_tokens=tokens)

            y = run()
            if not on_gpu:
                return run, y
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = run()
            graph.replay()
            torch.cuda.synchronize()
            return graph.replay, y

        shape = 64, most, top_k
        ring = torch.zeros(shape, dtype=torch.int16, device=device)
        weights_ring = torch.zeros(shape, device=device)
        made: dict[tuple[str, int], list[Captured]] = {}
        kept = []  # routes that graphs record
        # Counting has no end: without graphs, which keep a step as it was, nothing could be timed without it.
        variants = [variant for variant in VARIANTS if (on_gpu and world > 1) or variant not in WAITING]
        waits = None
        # Counting waits has no end.
        for together in ([v for v in variants if v not in WAITING], [v for v in variants if v in WAITING]):
            for _, variant in itertools.product(range(options.captures), together):
                layer.routes = None
                if variant in ("routes", "both"):
                    kept.append(layer.record_routes(ring))
                elif variant == "routes and weights":
                    kept.append(layer.record_routes(ring, weights_ring))
                if variant in WAITING and waits is None:
                    waits = layer.count_waits()
                    layer.warm_up()
                for tokens in options.tokens:
                    made.setdefault((variant, tokens), []).append(capture(tokens))
        for (variant, tokens), captured in made.items():
            for _, y in captured:
                assert torch.equal(y, made["off", tokens][0][1]), (variant, tokens)
        context.check_peers()

        def timed(run: Callable[[], Any], count: int) -> float:
            """Microseconds of a step."""
            if not on_gpu:
                since = time.perf_counter()
                for _ in range(count):
                    run()
                return (time.perf_counter() - since) / count * 1e6
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / count * 1e3

        for tokens in options.tokens:
            count = (10 if tokens >= 1024 else 100) if on_gpu else 2
            times: dict[str, list[list[float]]] = {v: [[] for _ in range(options.captures)] for v in variants}
            for turn in range(options.rounds + 2):
                for at, number in itertools.product(range(len(variants)), range(options.captures)):
                    variant = variants[(at + turn) % len(variants)]
                    if dist.is_initialized():
                        dist.barrier()
                    us = slowest(timed(made[variant, tokens][number][0], count))
                    if turn >= 2:
                        times[variant][number].append(us)
                    time.sleep(0.02)
            of_captures = {variant: [statistics.median(t) for t in times[variant]] for variant in variants}
            mean = {variant: statistics.fmean(t) for variant, t in of_captures.items()}
            off = mean["off"]
            row: dict[str, Any] = {
                "tokens": tokens,
                "us": mean,
                "us_of_captures": of_captures,
                "all_us": times,
                "over_off": {variant: us / off - 1 for variant, us in mean.items()},
            }
            results.append(row)
            if rank == 0:
                over = ", ".join(f"{v} {o:+.2%}" for v, o in row["over_off"].items())
                print(f"T={tokens}: off {off:.1f} us; {over}", flush=True)
        context.check_peers()
        record = environment.environment_record(context)
        named = None if waits is None else str(slowest_rank(waits.gather()))
        replaced = []
        if placed is not None:
            placed.warm_up()
            changed = max(
                sum(a != b for a, b in zip(plans[0].rank_experts(r), plans[1].rank_experts(r), strict=True))
                for r in range(world)
            )
            for turn in range(6):
                if on_gpu:
                    torch.cuda.synchronize()
                dist.barrier()
                begin = time.perf_counter()
                placed.replace_experts(plans[1 - turn % 2])
                if on_gpu:
                    torch.cuda.synchronize()
                replaced.append(slowest(time.perf_counter() - begin))
            expert_bytes = 3 * hidden * config.intermediate_size
            if rank == 0:
                print(f"replace_experts: {changed} slots change, {expert_bytes} elements an expert: {replaced} s")
        if rank == 0:
            print(f"waits: {named}")
            data = {
                "kind": "overheads",
                "environment": record,
                "config": options.config,
                "format": options.format,
                "rounds": options.rounds,
                "captures": options.captures,
                "results": results,
                "waits": named,
            }
            if placed is not None:
                data["replace"] = {"slots": changed, "elements_of_an_expert": expert_bytes, "seconds": replaced}
            if options.json is not None:
                environment.write_json(options.json, data)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
