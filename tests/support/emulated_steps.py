"""Steps of ranks that do not wait for each other, emulated: drawn at random, run, and compared with the references."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from moe_runtime.comm.errors import MoERuntimeError, RoutingError
from moe_runtime.comm.signals import NUM_COUNTERS
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens
from tests.emulator import MOST_SCHEDULES, Emulator, Replaced
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, rank_input
from tests.support.virtual_exchange import Ranks

ARRIVED = ("group_offsets", "group_scale_offsets", "scales", "row_scale", "rows")

Settings = dict[str, Any]
"""Of `Ranks`, with `world`."""


class Step(NamedTuple):
    """What all ranks bring, and whether what arrives is combined, with a shared expert or without."""

    inputs: list[RankInput]
    combined: bool
    shared: bool


Found = tuple[DispatchedTokens, torch.Tensor | None]


def _sizes_of(settings: Settings) -> tuple[int, int, int]:
    return settings["hidden_size"], settings["num_experts"], settings["top_k"]


def random_steps(draw: random.Random, settings: Settings, count: int, *, shared: bool = False) -> list[Step]:
    """Steps with tokens of all numbers on all ranks and every kind of routing; some with a shared expert if asked."""
    most, steps = settings["max_tokens_per_rank"], []
    for _ in range(count):
        tokens = [draw.choice((0, 1, most, draw.randint(0, most))) for _ in range(settings["world"])]
        routing, seed = draw.choice(("random", "random", "one", "none")), draw.randrange(2**20)
        inputs = [rank_input(seed, rank, count, *_sizes_of(settings), routing) for rank, count in enumerate(tokens)]
        steps.append(Step(inputs, combined=draw.random() < 0.6, shared=shared and draw.random() < 0.5))
    return steps


def most_tokens(settings: Settings, seed: int) -> list[RankInput]:
    """As many tokens on each rank as there may be."""
    most = settings["max_tokens_per_rank"]
    return [rank_input(seed, rank, most, *_sizes_of(settings)) for rank in range(settings["world"])]


def random_outputs(ranks: Ranks, seed: int) -> list[torch.Tensor]:
    """What experts give for as many rows as there can be, whatever arrives."""
    generator, geometry = torch.Generator().manual_seed(seed), ranks.dispatchers[0].geometry
    shape = (geometry.row_capacity, geometry.hidden)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in ranks.contexts]


def one_after_the_other(ranks: Ranks, steps: list[Step], outputs: list[torch.Tensor]) -> list[list[Found]]:
    """What arrives and would come home in each step, by rank."""
    found: list[list[Found]] = []
    for step in steps:
        arrived = ranks.dispatch(step.inputs)
        y = ranks.combine(arrived, outputs, [data.x for data in step.inputs] if step.shared else None)
        found.append(list(zip(arrived, y, strict=True)))
    return found


def dispatched_at_once(ranks: Ranks, inputs: list[RankInput], emulator: Emulator) -> list[DispatchedTokens]:
    """What arrives in one step of ranks that do not wait for each other."""
    with emulator.together() as choose:
        arrived = []
        for rank, (own, data) in enumerate(zip(ranks.dispatchers, inputs, strict=True)):
            choose(rank)
            arrived.append(own.dispatch(*data))
    return arrived


def all_at_once(
    ranks: Ranks,
    steps: list[Step],
    outputs: list[torch.Tensor],
    emulator: Emulator,
    stops: tuple[int, int, bool] | None = None,
) -> list[list[Found]]:
    """The same where ranks go on as they like, and kernels of one begin before those before have ended.

    `stops` is a rank, the steps that it still does, and whether it sends its tokens of one more.
    """
    found: list[list[Found]] = [[] for _ in steps]
    with emulator.together() as choose:
        for rank, (own, output) in enumerate(zip(ranks.dispatchers, outputs, strict=True)):
            choose(rank)
            for number, step in enumerate(steps):
                data, y = step.inputs[rank], None
                if stops is not None and (rank, number) == stops[:2]:
                    if stops[2]:
                        own.dispatch_send(*data)
                    break
                arrived = own.dispatch(*data)
                if step.combined:
                    y = own.combine(output, arrived.handle, shared=data.x if step.shared else None)
                found[number].append((arrived, y))
    return found


def assert_same_results(found: list[list[Found]], wanted: list[list[Found]]) -> None:
    for step, (of_ranks, wanted_of_ranks) in enumerate(zip(found, wanted, strict=True)):
        for rank, ((a, y), (b, wanted_y)) in enumerate(zip(of_ranks, wanted_of_ranks, strict=True)):
            what = f"of rank {rank} in step {step}"
            for name in ARRIVED:
                if getattr(b, name) is not None:
                    assert_same_bits(getattr(a, name), getattr(b, name), f"{name} {what}")
            assert_same_bits(a.handle.positions, b.handle.positions, f"positions {what}")
            if y is not None and wanted_y is not None:
                assert_same_bits(y, wanted_y, f"y {what}")


def begin_at(contexts: Sequence[ExpertParallelContext], epoch: int) -> None:
    """As after `epoch` steps, the last of which were of layers that combine no tokens in parts."""
    world, layout = len(contexts), contexts[0].signals_layout
    for context in contexts:
        context.epoch.fill_(epoch)
        context.signals[layout.ready : layout.ready + world] = epoch
        for half in (0, 1):
            last = epoch if epoch % 2 == half else epoch - 1
            for field in (layout.dispatch_flag, layout.combine_flag):
                context.signals[field + half * world : field + (half + 1) * world] = last


def assert_counters_are_zero(ranks: Ranks) -> None:
    for context in ranks.contexts:
        assert context.counters.tolist() == [0] * NUM_COUNTERS


def check_steps(
    references: Ranks, kernels: Ranks, steps: list[Step], emulator: Emulator, seed: int, epoch: int = 0
) -> None:
    """Raise unless kernels give what references give, after `epoch` steps, and leave their counters as they were."""
    for ranks in (references, kernels) if epoch else ():
        begin_at(ranks.contexts, epoch)
    outputs = random_outputs(references, seed)
    found = all_at_once(kernels, steps, outputs, emulator)
    assert_same_results(found, one_after_the_other(references, steps, outputs))
    for context in kernels.contexts:
        context.check_peers()
    assert_counters_are_zero(kernels)


def check_with_references_among_them(references: Ranks, mixed: Ranks, steps: list[Step], seed: int) -> None:
    """Raise unless `mixed`, some of whom run the reference, give what references give."""
    outputs = random_outputs(references, seed)
    wanted = one_after_the_other(references, steps, outputs)
    assert_same_results(one_after_the_other(mixed, steps, outputs), wanted)


def check_a_bad_id_is_told(
    kernels: Ranks, settings: Settings, draw: random.Random, emulator: Emulator, seed: int
) -> None:
    """Rank 1 brings one in its second step. All ranks say so, and leave their counters as they were."""
    steps = [step._replace(combined=True) for step in random_steps(draw, settings, 2)]
    bad = most_tokens(settings, seed)[1]
    bad.topk_idx[-1, -1] = settings["num_experts"]
    steps[1].inputs[1] = bad
    all_at_once(kernels, steps, random_outputs(kernels, seed), emulator)
    for context in kernels.contexts:
        with pytest.raises(RoutingError, match="rank 1"):
            context.check()
    assert_counters_are_zero(kernels)


def assert_is_found(
    edits: tuple[str, str],
    emulator: Emulator,
    run: Callable[[int], None],
    slowed: Callable[[str], str] = lambda text: text,
    only_in: str = "",
) -> None:
    """Some run fails where a regular expression is replaced in translated kernels that have `only_in`, `slowed` before.

    Each run gets the number of it.
    """
    emulator.edit = edit = Replaced(*edits, slowed, only_in)
    with pytest.raises((AssertionError, MoERuntimeError)):
        for turn in range(MOST_SCHEDULES):
            run(turn)
    assert edit.times > 0
