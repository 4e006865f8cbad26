"""Many steps of dispatch and combine, each of another size and routing and checked on the device; then all once more.

`[torchrun --nproc-per-node=N] -m moe_runtime.launch.soak --config NAME --steps 20000` counts tokens whose
combined result is wrong in any bit (`benchmarks/soak_steps.py`), and dispatches whose groups have wrong sizes.
The second pass must give the same bits. Nothing waits for the device until the end, so steps follow each other closely.
Where the transport allows it, most steps are replays of a CUDA graph, one for each of the layer's token buckets, and
inputs are written in place. The exit code is 0 only if no rank found anything; 2 for a wrong argument or config.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

import torch
from rich.console import Console

from moe_runtime.build import context_from_config
from moe_runtime.config import CombineFormatName, FormatName, ModeName, MoELayerConfig, resolve_mode
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.launch.benchmarks.soak_steps import StepPlan, expected_offsets, expected_output, multiplying_experts
from moe_runtime.launch.common import cases, environment

KIND = "soak"
"""What the JSON says it is."""
EAGER_EVERY = 8
"""Of so many steps one is launched kernel by kernel where the others are replays."""
PASSES = 2
BITS = 1_000_003
"""Odd, so that multiplying by it modulo 2^64 loses nothing."""


@dataclass(frozen=True)
class SoakResult:
    """What one rank found.

    Attributes:
        steps: of each pass; `replays` of them came from a graph.
        tokens: combined, over all passes.
        wrong_tokens: with a wrong result; `first_wrong_step` is the first step with one.
        wrong_arrivals: steps in which the groups of received rows had wrong sizes.
        differing_steps: steps whose output had other bits in the second pass than in the first.
        checksum: of all outputs of the first pass.
        seconds: of all passes, checks included.
    """

    steps: int
    replays: int
    tokens: int
    wrong_tokens: int
    first_wrong_step: int | None
    wrong_arrivals: int
    differing_steps: int
    checksum: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.wrong_tokens == self.wrong_arrivals == self.differing_steps == 0


class Checked(NamedTuple):
    """What came of a step, on the device.

    Attributes:
        y_TH: as combined.
        offsets: `group_offsets` of what arrived.
        wrong_tokens, bits: int64 scalars; tokens of `y_TH` that are not what they must be, and a checksum of all.
    """

    y_TH: torch.Tensor
    offsets: torch.Tensor
    wrong_tokens: torch.Tensor
    bits: torch.Tensor


class Soak:
    """The steps of one layer's exchange on this rank. Every rank makes and runs its own with equal arguments.

    Args:
        dispatchers: of the layer, by the size of their steps (`TokenDispatcher.of_all_sizes`). With several ranks, each
            is in a process of its own.
        seed: of all tokens and routings.
        steps: of a pass.
    """

    def __init__(self, dispatchers: Mapping[int, TokenDispatcher], seed: int, steps: int) -> None:
        self.dispatchers, self.seed, self.steps = dispatchers, seed, steps
        largest = dispatchers[max(dispatchers)]
        self.context, self.geometry = largest.context, largest.geometry
        geometry, device = self.geometry, self.context.device
        self.x_TH = torch.zeros(geometry.max_tokens, geometry.hidden, dtype=torch.bfloat16, device=device)
        self.idx_TK = torch.full((geometry.max_tokens, geometry.top_k), -1, dtype=torch.int32, device=device)
        self.weights_TK = torch.zeros(geometry.max_tokens, geometry.top_k, dtype=torch.float32, device=device)
        self.starts = torch.tensor(geometry.starts, dtype=torch.int64, device=device)
        self.bits = torch.zeros(PASSES, steps, dtype=torch.int64, device=device)
        self.wrong_tokens = torch.zeros(steps, dtype=torch.int64, device=device)
        self.wrong_arrivals = torch.zeros((), dtype=torch.int64, device=device)
        self.tokens = self.replays = 0

    def run(self) -> SoakResult:
        """Both passes. Raises what went wrong between ranks, a rank that does not answer among it."""
        start = time.monotonic()
        replays: dict[int, Callable[[], Checked]] = {}
        if self.context.device.type == "cuda" and self.context.graph_safe:
            replays = {size: self._capture(size) for size in self.dispatchers}
        for number in range(PASSES):
            for step in range(self.steps):
                self._step(number, step, {} if step % EAGER_EVERY == 0 else replays)
        self.context.check_peers()
        wrong = self.wrong_tokens.nonzero().flatten().tolist()
        return SoakResult(
            steps=self.steps,
            replays=self.replays,
            tokens=self.tokens,
            wrong_tokens=int(self.wrong_tokens.sum()),
            first_wrong_step=wrong[0] if wrong else None,
            wrong_arrivals=int(self.wrong_arrivals),
            differing_steps=int((self.bits != self.bits[0]).any(dim=0).sum()),
            checksum=f"{int(_folded(self.bits[0])) & (1 << 64) - 1:016x}",
            seconds=time.monotonic() - start,
        )

    def _step(self, number: int, step: int, replays: Mapping[int, Callable[[], Checked]]) -> None:
        """One step; the one of `replays` for its size, if there is one, answers for the tokens in the buffers."""
        geometry, device, rank = self.geometry, self.context.device, self.context.rank
        plan = StepPlan.draw(self.seed, step, geometry, tuple(self.dispatchers))
        count = plan.counts[rank]
        x_TH = plan.tokens(self.seed, rank, geometry, device)
        routings = [plan.routing(self.seed, r, geometry, device) for r in range(geometry.world_size)]
        inputs = (x_TH, *routings[rank])
        if plan.size not in replays:
            checked = self._exchange(plan.size, *inputs)
        else:
            # Rows behind the tokens are of an earlier step; unrouted, they are not sent.
            self.idx_TK.fill_(-1)
            for buffer, values in zip((self.x_TH, self.idx_TK, self.weights_TK), inputs, strict=True):
                buffer[:count].copy_(values)
            checked = replays[plan.size]()
            self.replays += 1
        self.wrong_tokens[step] += checked.wrong_tokens
        expected = expected_offsets([ids for ids, _ in routings], geometry)
        self.wrong_arrivals += (checked.offsets != expected).any()
        self.bits[number, step] = checked.bits
        self.tokens += count
        self.context.check()

    def _exchange(
        self,
        size: int,
        x_TH: torch.Tensor,
        idx_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        scales_in_record: bool = False,
    ) -> Checked:
        """Dispatch, combine, and compare with the expected output; nothing waits for the host."""
        dispatcher = self.dispatchers[size]
        arrived = dispatcher.dispatch(x_TH, idx_TK, weights_TK, scales_in_record=scales_in_record)
        y_TH = dispatcher.combine(multiplying_experts(arrived), arrived.handle)
        return self._checked(y_TH, arrived.group_offsets, x_TH, idx_TK, weights_TK)

    def _checked(
        self,
        y_TH: torch.Tensor,
        offsets: torch.Tensor,
        x_TH: torch.Tensor,
        idx_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> Checked:
        """The output compared with the expected one; captured with the exchange."""
        expected_TH = expected_output(x_TH, idx_TK, weights_TK, self.geometry, self.starts)
        found, wanted = y_TH.view(torch.int64), expected_TH.view(torch.int64)
        wrong = (found != wanted).any(dim=1).sum()
        return Checked(y_TH, offsets, wrong, _folded(found))

    def _capture(self, size: int) -> Callable[[], Checked]:
        """A graph of a step of this size over the buffers with its check, once such a step has run.

        It leaves block scales in the records, if it can; steps that are launched kernel by kernel copy them.
        """
        buffers = (self.x_TH[:size], self.idx_TK[:size], self.weights_TK[:size])
        scales_in_record = self.dispatchers[size].can_keep_scales_in_record
        self._exchange(size, *buffers, scales_in_record=scales_in_record)
        graph = torch.cuda.CUDAGraph()
        # Other threads (a process group's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            checked = self._exchange(size, *buffers, scales_in_record=scales_in_record)

        def replay() -> Checked:
            checked.y_TH.fill_(float("nan"))
            graph.replay()
            return checked

        return replay


def _folded(values: torch.Tensor) -> torch.Tensor:
    """One int64 that depends on each of `values` (int64) and on its place."""
    flat = values.flatten()
    return ((flat + 1) * (torch.arange(flat.numel(), device=flat.device) * BITS + 1)).sum()


def make_dispatchers(
    config: MoELayerConfig, context: ExpertParallelContext, mode: ModeName = "auto"
) -> dict[int, TokenDispatcher]:
    """The dispatchers of the layer that `config` describes, without a placement and with capacity for every row."""
    return TokenDispatcher.of_all_sizes(context, config.replace(expert_row_capacity=None), mode=mode)


def report(
    results: list[SoakResult],
    config: MoELayerConfig,
    context: ExpertParallelContext,
    console: Console,
    mode: ModeName = "auto",
) -> None:
    """Print what all ranks found."""
    rows = config.mode_on(context.world_size) if mode == "auto" else resolve_mode(mode, 1, config.token_format)
    sizes = " or ".join(map(str, config.all_token_buckets))
    console.print(
        f"{PASSES} passes of {results[0].steps} steps, tokens {config.token_format}, combine {config.combine_format}, "
        f"{rows} rows, steps of at most {sizes} tokens; "
        f"{context.world_size} rank(s) on {context.device.type}, transport {context.transport}"
    )
    for rank, r in enumerate(results):
        first = "" if r.first_wrong_step is None else f", the first in step {r.first_wrong_step}"
        console.print(
            f"rank {rank}: {'right' if r.passed else '[red]WRONG[/red]'}, {r.wrong_tokens} of {r.tokens} tokens wrong"
            f"{first}, {r.wrong_arrivals} arrivals wrong, {r.differing_steps} steps differ between passes; checksum "
            f"{r.checksum}, {r.replays} replays, {r.seconds:.1f} s",
            soft_wrap=True,
        )


def work(options: argparse.Namespace) -> int:
    """Run and report; 1 if anything was wrong."""
    run = environment.read_config(options)
    if run.placement is not None:
        raise ValueError("placement: a soak is of contiguous experts, expected a config without one")
    environment.check_at_least(1, steps=options.steps, tokens=options.tokens)
    environment.check_folder("--json", options.json)
    names = {"token_format": options.format, "combine_format": options.combine_format}
    changes: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    changes["expert_row_capacity"] = None  # as `make_dispatchers`: the JSON has the config that ran
    if options.format is not None:
        run = run.replace(layer=cases.with_token_format(run.layer, changes.pop("token_format")))
    if options.tokens is not None:
        changes["max_tokens_per_rank"], run = options.tokens, run.replace(tokens_per_rank=0)
    if options.token_buckets is not None:
        environment.check_at_least(1, token_buckets=min(options.token_buckets))
        changes["token_buckets"] = tuple(options.token_buckets)
    run = run.replace(layer=run.layer.replace(**changes))
    if options.seed is not None:
        run = run.replace(seed=options.seed)
    environment.start(run)
    with context_from_config(run.parallel) as context:
        mine = Soak(make_dispatchers(run.layer, context, options.mode), run.seed, options.steps).run()
        results = environment.gather(context, "results", mine, SoakResult)
        passed = all(result.passed for result in results)
        report(results, run.layer, context, environment.console_of(context), options.mode)
        if context.rank == 0 and options.json is not None:
            ranks = [asdict(result) | {"passed": result.passed} for result in results]
            record = environment.environment_record(context)
            data = {"kind": KIND, "environment": record, "config": run.model_dump(), "mode": options.mode}
            environment.write_json(options.json, data | {"seed": run.seed, "passed": passed, "ranks": ranks})
    return 0 if passed else 1


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.soak", description="Check many steps.")
    environment.add_common_options(parser)
    parser.add_argument("--steps", type=int, default=20000, metavar="N", help="steps of each pass (default: 20000)")
    parser.add_argument("--seed", type=int, metavar="N", help="instead of the config's")
    parser.add_argument("--tokens", type=int, metavar="N", help="max_tokens_per_rank, instead of the config's")
    buckets = "token_buckets, instead of the config's"
    parser.add_argument("--token-buckets", type=int, nargs="+", metavar="N", help=buckets)
    parser.add_argument("--format", choices=get_args(FormatName), help="of tokens, instead of the config's")
    parser.add_argument("--combine-format", choices=get_args(CombineFormatName), help="instead of the config's")
    parser.add_argument(
        "--mode", choices=("auto", "contiguous", "gathered"), default="auto", help="how rows lie after dispatch"
    )
    environment.add_json_option(parser)
    return environment.run_parsed("soak", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
