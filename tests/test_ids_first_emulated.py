"""Hopper's arrival beside the sending, emulated: rows placed part by part, with the bits of the twins at any pace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_runtime import context as context_module
from moe_runtime.comm import signals
from moe_runtime.comm.signals import SENT_PARTS
from moe_runtime.errors import PeerTimeoutError, Phase, RoutingError, StepMismatchError
from moe_runtime.kernels import hopper_exchange, hopper_shapes, reference_exchange
from tests.emulator import Emulator, needs_emulator
from tests.exchange_data import rank_input
from tests.test_hopper_exchange_emulated import (
    Step,
    all_at_once,
    assert_is_found,
    assert_same_results,
    one_after_the_other,
)
from tests.token_parts import forget_defines
from tests.virtual_exchange import HOPPER, Ranks, emulator, poisoned_memory

__all__ = ["emulator", "poisoned_memory"]

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
Settings = dict[str, Any]
Draw = Callable[[random.Random, bool], Settings]


@pytest.fixture
def draw_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Draw]:
    """Draws a packed layer whose rows are placed part by part, and a GPU of few SMs; `busy` ones send for long."""

    def drawn(draw: random.Random, busy: bool) -> Settings:
        sms, parts = (3, 3) if busy else (draw.choice((1, 2, 3, 9)), draw.choice((1, 3, 7)))
        sizes = {
            "TOKENS_IN_PARTS": 1,
            "ARRIVE_WARPS": 1 if busy else draw.choice((1, 2, 4)),
            "CHUNK": 32,
            # One sending block of an SM, or as many as fit.
            "THREADS_BESIDE": 64 if busy else draw.choice((64, 448)),
            "SENT_PARTS": parts,
        }
        for name, value in sizes.items():
            monkeypatch.setattr(hopper_shapes, name, value)
        monkeypatch.setattr(hopper_exchange, "most_sms", lambda device, limit=None: min(sms, limit or sms))
        monkeypatch.setattr(signals, "SENT_PARTS", parts)
        monkeypatch.setattr(hopper_exchange, "COUNTED", signals.SENT + parts)
        monkeypatch.setattr(context_module, "NUM_COUNTERS", signals.SENT + parts + 3)
        forget_defines()
        if busy:
            sizes = {"hidden_size": 1152, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 33}
            return {"world": 2, "token_format": "bf16", **sizes}
        world, experts = draw.choice((1, 2, 3, 4)), draw.randint(1, 12)
        most = draw.choice((1, 3, draw.randint(4, 40), 40, 150 if world < 3 else 17))
        return {
            "world": world,
            # Teams of one warp and of two.
            "hidden_size": draw.choice((128, 1152)),
            "num_experts": experts,
            # Ids of more than one store of 16 bytes among them.
            "top_k": draw.randint(1, min(experts, 10)),
            "max_tokens_per_rank": most,
            "token_format": draw.choice(("nvfp4", "fp8_block", "mxfp8", "bf16")),
        }

    yield drawn
    forget_defines()


def ranks_of(settings: Settings, engine: str) -> Ranks:
    settings = dict(settings)
    return Ranks(settings.pop("world"), CPU, engine, mode="contiguous", **settings)


def random_steps(draw: random.Random, settings: Settings, count: int, busy: bool = False) -> list[Step]:
    """Steps with tokens of all numbers on all ranks and every kind of routing; all they can have if `busy`."""
    most, sizes = settings["max_tokens_per_rank"], [settings[n] for n in ("hidden_size", "num_experts", "top_k")]
    steps = []
    for _ in range(count):
        tokens = [most if busy else draw.choice((0, 1, most, draw.randint(0, most))) for _ in range(settings["world"])]
        routing = "random" if busy else draw.choice(("random", "random", "one", "none"))
        seed = draw.randrange(2**20)
        inputs = [rank_input(seed, rank, count, *sizes, routing) for rank, count in enumerate(tokens)]
        steps.append(Step(inputs, combined=not busy and draw.random() < 0.5, shared=False))
    return steps


def random_outputs(ranks: Ranks, seed: int) -> list[torch.Tensor]:
    """What experts give for as many rows as there can be, whatever arrives."""
    generator, geometry = torch.Generator().manual_seed(seed), ranks.dispatchers[0].geometry
    assert hopper_shapes.ids_first(geometry)
    shape = (geometry.row_capacity, geometry.hidden)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in ranks.contexts]


def begin_at(ranks: Ranks, epoch: int) -> None:
    """As after `epoch` steps, the last of which were of layers that place no rows part by part."""
    world, layout = len(ranks.contexts), ranks.contexts[0].signals_layout
    for context in ranks.contexts:
        context.epoch.fill_(epoch)
        context.signals[layout.ready : layout.ready + world] = epoch
        for half in (0, 1):
            last = epoch if epoch % 2 == half else epoch - 1
            for field in (layout.dispatch_flag, layout.combine_flag):
                context.signals[field + half * world : field + (half + 1) * world] = last


def assert_counters_are_zero(ranks: Ranks) -> None:
    for context in ranks.contexts:
        assert context.counters.tolist() == [0] * context_module.NUM_COUNTERS


def run_random_steps(draw_sizes: Draw, emulator: Emulator, seed: int, busy: bool = False) -> None:
    draw = random.Random(seed)
    settings = draw_sizes(draw, busy)
    twins, kernels = ranks_of(settings, "torch"), ranks_of(settings, HOPPER)
    # After the last of these, words that nobody has written seem to be of an epoch to come.
    epoch = 1 - 2**31 if busy else draw.choice((0, -2, 2**31 - 3, 1 - 2**31))
    for ranks in (twins, kernels) if epoch else ():
        begin_at(ranks, epoch)
    steps, outputs = random_steps(draw, settings, 3, busy), random_outputs(twins, seed)
    found = all_at_once(kernels, steps, outputs, emulator)
    assert_same_results(found, one_after_the_other(twins, steps, outputs))
    for context in kernels.contexts:
        context.check_peers()
    assert_counters_are_zero(kernels)


def test_rows_are_placed_as_they_arrive(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    for turn in range(4):
        run_random_steps(draw_sizes, emulator, seed + turn)


def test_ranks_differ_in_what_they_run(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    """A rank that sends its ids first, and ranks that do not and tell of no part."""
    draw = random.Random(seed)
    settings = {**draw_sizes(draw, False), "world": 3}
    twins, mixed = ranks_of(settings, "torch"), ranks_of(settings, HOPPER)
    for dispatcher in mixed.dispatchers[1 :: 1 + seed % 2]:
        dispatcher._backend = reference_exchange
    steps, outputs = random_steps(draw, settings, 3), random_outputs(twins, seed)
    wanted = one_after_the_other(twins, steps, outputs)
    assert_same_results(one_after_the_other(mixed, steps, outputs), wanted)


@pytest.mark.parametrize("parts", [None, 0, SENT_PARTS])
def test_a_peer_that_stops_on_the_way_is_named(
    parts: int | None, draw_sizes: Draw, emulator: Emulator, seed: int
) -> None:
    """It has told of its ids and then of so many parts of its tokens, or of nothing; there need not be any token."""
    settings = {**draw_sizes(random.Random(seed), False), "world": 2}
    kernels = ranks_of(settings, HOPPER)
    context, dispatcher = kernels.contexts[0], kernels.dispatchers[0]
    sizes = [settings[name] for name in ("hidden_size", "num_experts", "top_k")]
    data = rank_input(seed, 0, seed % 2, *sizes)
    handle = dispatcher.dispatch_send(data.x, data.topk_idx, data.topk_weights)
    if parts is not None:
        layout, half = context.signals_layout, 1
        context.signals[layout.token_count + half * 2 + 1] = signals.tag_of(0, 1)
        context.signals[layout.routed + half * 2 + 1] = 1
        of_half = layout.sent + half * 2 * hopper_shapes.SENT_PARTS
        context.signals[of_half : of_half + 2 * min(parts, hopper_shapes.SENT_PARTS)] = 1
    with pytest.raises(PeerTimeoutError) as caught:
        dispatcher.dispatch_recv(handle)
        context.check()
    assert (caught.value.rank, caught.value.phase) == (1, Phase.DISPATCH_RECV)
    assert_counters_are_zero(kernels)


def test_a_bad_id_leaves_counters_as_they_were(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    draw = random.Random(seed)
    settings = {**draw_sizes(draw, False), "world": 3}
    steps = [step._replace(combined=True) for step in random_steps(draw, settings, 2)]
    sizes = [settings[name] for name in ("hidden_size", "num_experts", "top_k")]
    bad = rank_input(seed, 1, settings["max_tokens_per_rank"], *sizes)
    bad.topk_idx[-1, -1] = settings["num_experts"]
    steps[1].inputs[1] = bad
    kernels = ranks_of(settings, HOPPER)
    all_at_once(kernels, steps, random_outputs(kernels, seed), emulator)
    for context in kernels.contexts:
        with pytest.raises(RoutingError, match="rank 1"):
            context.check()
    assert_counters_are_zero(kernels)


def test_a_rank_in_another_exchange_is_named(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    draw = random.Random(seed)
    settings = {**draw_sizes(draw, False), "world": 3, "max_tokens_per_rank": 17}
    kernels = ranks_of({**settings, "other_tokens": draw.choice((1, 16, 17, 18))}, HOPPER)
    sizes = [settings[name] for name in ("hidden_size", "num_experts", "top_k")]
    with emulator.together() as choose:
        for rank, (own, other) in enumerate(zip(kernels.dispatchers, kernels.others, strict=True)):
            choose(rank)
            data = rank_input(seed, rank, 1, *sizes)
            (other if rank == 1 else own).dispatch(data.x, data.topk_idx, data.topk_weights)
    for context in kernels.contexts:
        with pytest.raises(StepMismatchError, match=r"rank 1 (was )?in (exchange )?1"):
            context.check()
    assert_counters_are_zero(kernels)


WRONG = {
    "told before the last token of a part": (
        r"\btoken / (part_tokens\(max_tokens\))",
        r"min(int(token + 2 * gridDim.x) / \1, 3)",
    ),
    "told before the ids are there": (r"last_at\(lane == 0 \? counter \+ \d+ : nullptr\)", r"(\g<0>, true)"),
    "a counter that stays": (r"if \(last\) \*counter = 0;", ""),
    "rows before they have come": (r"return await_tokens\([^;]*, early\);", "return true;"),
    "places before all is counted": (r"while \(load_acquire\(counted \+ 1\) == 0\) \{\}", ""),
    "words of long ago": (r"(await\([^;]*), exact\);", r"\1, false);"),
}
"""What is written instead in translated kernels, as regular expressions."""


@pytest.mark.parametrize("what", WRONG)
def test_kernels_that_are_wrong_are_found(what: str, draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    assert_is_found(WRONG[what], emulator, lambda turn: run_random_steps(draw_sizes, emulator, seed + turn, busy=True))
