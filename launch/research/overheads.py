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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.config import load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.launch.common import environment
from moe_runtime.layer import MoELayer
from moe_runtime.observation.waits import LayerWaits, slowest_rank
from moe_runtime.placement.placement import Placement, plan_placement

Step = Callable[[], Any]
"""Runs a step."""

VARIANTS = ("off", "off again", "routes", "routes and weights", "waits", "both")
WAITING = ("waits", "both")
"""Those that a rank alone does not have: it waits for nobody."""
WARM_ROUNDS = 2
"""Rounds before those that count."""


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
    most = max(options.tokens)
    config = load_config(options.config).layer.replace(
        token_format=options.format,
        weight_format=options.format,
        max_tokens_per_rank=most,
        token_buckets=tuple(t for t in sorted(set(options.tokens)) if t != most),
    )
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(config, context, router=False)
        plans = placements(config.num_experts, context.world_size)
        placed = MoELayer(config, context, placement=plans[0], router=False) if plans else None
        for one in (layer, placed):
            if one is not None:
                one.load_random(1)
        layer.warm_up()
        variants = Variants(layer, options.captures)
        made = variants.capture({tokens: step_of(layer, tokens) for tokens in options.tokens})
        context.check_peers()
        results = []
        for tokens in options.tokens:
            results.append(time_step(made[tokens], tokens, options.rounds, device))
            if context.rank == 0:
                over = ", ".join(f"{v} {o:+.2%}" for v, o in results[-1]["over_off"].items())
                print(f"T={tokens}: off {results[-1]['us']['off']:.1f} us; {over}", flush=True)
        context.check_peers()
        data = {
            "kind": "overheads",
            "environment": environment.environment_record(context),
            "config": options.config,
            "format": options.format,
            "rounds": options.rounds,
            "captures": options.captures,
            "results": results,
            "waits": None if variants.waits is None else str(slowest_rank(variants.waits.gather())),
        }
        if placed is not None:
            data["replace"] = time_replacements(placed, plans)
        if context.rank == 0:
            print(f"waits: {data['waits']}")
            if placed is not None:
                print(f"replace_experts: {data['replace']}")
            if options.json is not None:
                environment.write_json(options.json, data)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def placements(num_experts: int, world: int) -> list[Placement]:
    """Placements for even and for uneven loads, between which experts move; none for one rank."""
    if world == 1:
        return []
    loads = [1.0] * num_experts, [1.0 + e for e in range(num_experts)]
    first, second = (plan_placement(load, world, ceil_div(num_experts, world)) for load in loads)
    return [first, second.reordered_like(first)]


def step_of(layer: MoELayer, tokens: int) -> Step:
    """A step of random tokens and routes, the same for all variants."""
    config, device = layer.config, layer.context.device
    generator = torch.Generator().manual_seed(1000 * tokens + layer.context.rank)
    x = torch.randn(tokens, config.hidden_size, generator=generator).to(torch.bfloat16).to(device)
    ids = torch.rand(tokens, config.num_experts, generator=generator).topk(config.top_k).indices.int().to(device)
    weights = torch.rand(tokens, config.top_k, generator=generator).to(device)

    def run() -> torch.Tensor:
        return layer(x, topk_idx=ids, topk_weights=weights, max_tokens=tokens)

    return run


class Variants:
    """Steps of a layer in each of `VARIANTS` that it has, captured `captures` times.

    Attributes:
        waits: counters of the variants that count waits; None where there are none.
    """

    def __init__(self, layer: MoELayer, captures: int) -> None:
        self.layer, self.captures = layer, captures
        self.waits: LayerWaits | None = None
        config, device = layer.config, layer.context.device
        shape = 64, config.max_tokens_per_rank, config.top_k
        self._ring = torch.zeros(shape, dtype=torch.int16, device=device)
        self._weights_ring = torch.zeros(shape, device=device)
        self._kept: list[Any] = []  # routes that graphs record

    def capture(self, steps: Mapping[int, Step]) -> dict[int, dict[str, list[Step]]]:
        """Each step by tokens and variant. Raises `ValueError` where variants differ in a bit."""
        made: dict[int, dict[str, list[Step]]] = {tokens: {} for tokens in steps}
        first: dict[int, torch.Tensor] = {}
        for variant in self._turns():
            self._begin(variant)
            for tokens, step in steps.items():
                again, y = self._captured(step)
                if not torch.equal(y, first.setdefault(tokens, y)):
                    raise ValueError(f"{variant}: a step of {tokens} tokens has other bits than without")
                made[tokens].setdefault(variant, []).append(again)
        self.layer.routes = None
        return made

    def _turns(self) -> list[str]:
        """Variants in the order in which they are captured. Those that count waits are last: counting has no end.

        Without graphs, which keep a step as it was, nothing could be timed without it.
        """
        context = self.layer.context
        counted = WAITING if context.device.type == "cuda" and context.world_size > 1 else ()
        return [v for v in VARIANTS if v not in WAITING] * self.captures + [*counted] * self.captures

    def _begin(self, variant: str) -> None:
        self.layer.routes = None
        if variant in ("routes", "both"):
            self._kept.append(self.layer.record_routes(self._ring))
        elif variant == "routes and weights":
            self._kept.append(self.layer.record_routes(self._ring, self._weights_ring))
        if variant in WAITING and self.waits is None:
            self.waits = self.layer.count_waits()
            self.layer.warm_up()

    def _captured(self, step: Step) -> tuple[Step, torch.Tensor]:
        """What runs a step again in the variant that has begun, and its result."""
        layer, routes = self.layer, self.layer.routes
        y = step()
        if layer.context.device.type != "cuda":

            def again() -> torch.Tensor:
                layer.routes = routes  # no graph keeps them
                return step()

            return again, y
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = step()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay, y


def time_step(made: Mapping[str, Sequence[Step]], tokens: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Times of a step of `tokens` tokens, in microseconds on the slowest rank, by variant."""
    count = 2 if device.type != "cuda" else 10 if tokens >= 1024 else 100
    variants = list(made)
    times: dict[str, list[list[float]]] = {variant: [[] for _ in made[variant]] for variant in variants}
    for turn in range(WARM_ROUNDS + rounds):
        for at, number in itertools.product(range(len(variants)), range(len(made[variants[0]]))):
            variant = variants[(at + turn) % len(variants)]
            if dist.is_initialized():
                dist.barrier()
            us = of_slowest_rank(microseconds(made[variant][number], count, device), device)
            if turn >= WARM_ROUNDS:
                times[variant][number].append(us)
            time.sleep(0.02)
    of_captures = {variant: [statistics.median(t) for t in times[variant]] for variant in variants}
    mean = {variant: statistics.fmean(t) for variant, t in of_captures.items()}
    return {
        "tokens": tokens,
        "us": mean,
        "us_of_captures": of_captures,
        "all_us": times,
        "over_off": {variant: us / mean["off"] - 1 for variant, us in mean.items()},
    }


def time_replacements(layer: MoELayer, plans: Sequence[Placement]) -> dict[str, Any]:
    """How long it takes to move experts from one placement to the other and back, three times, in seconds."""
    layer.warm_up()
    context, config = layer.context, layer.config
    changed = max(
        sum(a != b for a, b in zip(plans[0].rank_experts(r), plans[1].rank_experts(r), strict=True))
        for r in range(context.world_size)
    )
    seconds = []
    for turn in range(6):
        synchronize(context.device)
        dist.barrier()
        begin = time.perf_counter()
        layer.replace_experts(plans[1 - turn % 2])
        synchronize(context.device)
        seconds.append(of_slowest_rank(time.perf_counter() - begin, context.device))
    elements = 3 * config.hidden_size * config.intermediate_size
    return {"slots": changed, "elements_of_an_expert": elements, "seconds": seconds}


def microseconds(run: Step, count: int, device: torch.device) -> float:
    """Of a step, over `count` of them."""
    if device.type != "cuda":
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


def of_slowest_rank(value: float, device: torch.device) -> float:
    """The largest over the ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
