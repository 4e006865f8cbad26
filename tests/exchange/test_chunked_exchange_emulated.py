"""The CUDA exchange of many tokens, emulated: rows counted in chunks and combined in parts, at any pace of the ranks.

Layers, formats and GPUs are drawn at random, epochs also around the wrap of int32; the bits are those of the torch
reference.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Protocol

import pytest
import torch

from moe_runtime.comm.errors import StepMismatchError
from moe_runtime.kernels.exchange import geometry, plan, reference
from tests.emulator import MOST_SCHEDULES, Emulator, needs_emulator
from tests.support.comparison import assert_same_bits
from tests.support.emulated_steps import (
    Settings,
    assert_counters_are_zero,
    assert_is_found,
    check_a_bad_id_is_told,
    check_steps,
    check_with_references_among_them,
    dispatched_at_once,
    most_tokens,
    random_steps,
)
from tests.support.exchange_data import rank_input
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import HOPPER, Ranks, emulator, poisoned_memory, pretend_sms

__all__ = ["emulator", "poisoned_memory"]

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")


LAYERS = (
    (2, 1, 1, 128, 12, 10, "nvfp4", "contiguous", None),
    (3, 1, 2, 1152, 7, 3, "fp8_block", "contiguous", None),
    (2, 1024, 4, 128, 9, 4, "bf16", "contiguous", None),
    (3, 1, 1, 1152, 11, 8, "mxfp8", "gathered", None),
    (2, 1, 2, 128, 5, 5, "fp8_block", "contiguous", 2),
    (3, 1, 4, 1152, 3, 2, "nvfp4", "gathered", 2),
    (2, 1, 1, 128, 1, 1, "mxfp8", "contiguous", None),
    (3, 1024, 2, 1152, 10, 9, "bf16", "gathered", 2),
)
"""`MAX_PLACES`, `TOKENS_IN_PARTS` and `RECV_WARPS` of the plan, then a layer: hidden size (teams of one warp and of
two), experts, top-k (ids of more than one store of 16 bytes among them), token format, mode and `num_sms`.

Kernels are compiled for each, hence so few.
"""


class Draw(Protocol):
    def __call__(self, draw: random.Random, world: int | None = None) -> Settings: ...


@pytest.fixture
def draw_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Draw]:
    """Draws a layer of several chunks of slots, and a GPU of few SMs."""

    def drawn(draw: random.Random, world: int | None = None) -> Settings:
        sms = draw.choice((1, 2, 3, 9))
        places, in_parts, warps, hidden, experts, top_k, token_format, mode, num_sms = draw.choice(LAYERS)
        sizes = {
            "MAX_PLACES": places,
            "TOKENS_IN_PARTS": in_parts,
            "SMALL_CHUNK_BYTES": 0,
            "RECV_WARPS": warps,
            "CHUNK": 32,
        }
        for name, value in sizes.items():
            monkeypatch.setattr(plan, name, value)
        monkeypatch.setattr(geometry, "OWN_ROWS_TOKENS", draw.choice((1, 1, 1024)))
        pretend_sms(monkeypatch, sms)
        forget_plans()
        world = world or draw.choice((1, 2, 3, 4))
        fewest = -(-33 // world)
        return {
            "world": world,
            "hidden_size": hidden,
            "num_experts": experts,
            "top_k": top_k,
            "max_tokens_per_rank": draw.choice((fewest, draw.randint(fewest, 40), 150 if world < 3 else fewest + 1)),
            "token_format": token_format,
            "mode": mode,
            "num_sms": num_sms,
        }

    yield drawn
    forget_plans()


def ranks_of(settings: Settings, engine: str) -> Ranks:
    settings = dict(settings)
    ranks = Ranks(settings.pop("world"), CPU, engine, **settings)
    assert plan.required_plan(ranks.dispatchers[0].geometry).num_chunks > 1
    return ranks


def run_random_steps(
    draw_sizes: Draw, emulator: Emulator, seed: int, epoch: int | None = None, combined: bool | None = None
) -> None:
    draw = random.Random(seed)
    settings = draw_sizes(draw)
    # After the last of these, words that nobody has written seem to be of an epoch to come.
    epoch = draw.choice((0, -2, 2**31 - 3, 1 - 2**31)) if epoch is None else epoch
    steps = random_steps(draw, settings, 3)
    if combined is not None:
        steps = [step._replace(combined=combined) for step in steps]
    check_steps(ranks_of(settings, "torch"), ranks_of(settings, HOPPER), steps, emulator, seed, epoch)


def test_steps_of_ranks_that_do_not_wait_for_each_other(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    for turn in range(6):
        run_random_steps(draw_sizes, emulator, seed + turn)


def test_ranks_differ_in_what_they_run(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    draw = random.Random(seed)
    settings = draw_sizes(draw, world=3)
    references, mixed = ranks_of(settings, "torch"), ranks_of(settings, HOPPER)
    for dispatcher in mixed.dispatchers[1 :: 1 + seed % 2]:
        dispatcher._use(reference)
    check_with_references_among_them(references, mixed, random_steps(draw, settings, 3), seed)


def test_a_bad_id_leaves_counters_as_they_were(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    draw = random.Random(seed)
    settings = draw_sizes(draw, world=3)
    check_a_bad_id_is_told(ranks_of(settings, HOPPER), settings, draw, emulator, seed)


COUNTED = r"(chunk_counts\[chunk \* \w+ \+ e\] = )counts\[e\];"


def failed_while_counting(draw_sizes: Draw, emulator: Emulator, seed: int, more: tuple[str, str] | None = None) -> None:
    """A failure that `recv_count` finds, which then counts nothing, after `recv_permute` has seen all flags.

    Raises `AssertionError` where that leaves rows to read.
    """
    settings = draw_sizes(random.Random(seed), world=2)
    edited = []

    def edit(text: str) -> str:
        found = "if (e == 0) record_failure(x, 1, 1, 1, epoch, 0, 0);"
        text, times = re.subn(COUNTED, rf"{{ {found} \g<1>0; }}", text)
        if times and more is not None:
            text, other_times = re.subn(*more, text)
            assert other_times == 1
        edited.append(times)
        return text

    emulator.edit = edit
    arrived = dispatched_at_once(ranks_of(settings, HOPPER), most_tokens(settings, seed), emulator)
    assert 1 in edited
    for tokens in arrived:
        assert not bool(tokens.group_offsets.any()) and bool((tokens.handle.positions == -1).all()), "rows to read"


def test_a_failure_found_while_rows_are_counted_leaves_none(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    for turn in range(4):
        failed_while_counting(draw_sizes, emulator, seed + turn)


def test_one_that_is_not_looked_for_is_found(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    with pytest.raises(AssertionError, match="rows to read"):
        for turn in range(MOST_SCHEDULES):
            failed_while_counting(draw_sizes, emulator, seed + turn, (r"threadIdx\.x == 0 && x\.failed\(\)", "false"))


def placed_once(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    """A first step, whose records have no ids before they have come; raises `AssertionError` for rows out of place.

    Of a format without scales: to copy these, kernels follow the numbers of rows that may never have been placed.
    """
    settings = {**draw_sizes(random.Random(seed), world=2), "token_format": "bf16"}
    inputs = most_tokens(settings, seed)
    wanted = ranks_of(settings, "torch").dispatch(inputs)
    arrived = dispatched_at_once(ranks_of(settings, HOPPER), inputs, emulator)
    for found, tokens in zip(arrived, wanted, strict=True):
        assert_same_bits(found.handle.positions, tokens.handle.positions, "positions")


def test_rows_are_placed_while_they_are_counted(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    for turn in range(4):
        placed_once(draw_sizes, emulator, seed + turn)


def test_rows_that_are_placed_before_they_have_come_are_found(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    assert_is_found(
        (r"const bool landed = await_chunk\([^;]*;", "const bool landed = __syncthreads_or(0) == 0;"),
        emulator,
        lambda turn: placed_once(draw_sizes, emulator, seed + turn),
    )


def test_a_rank_in_another_exchange_is_named(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    draw = random.Random(seed)
    settings = {**draw_sizes(draw, world=3), "max_tokens_per_rank": 17}
    kernels = ranks_of({**settings, "other_tokens": draw.choice((1, 16, 17, 18))}, HOPPER)
    sizes = [settings[name] for name in ("hidden_size", "num_experts", "top_k")]
    with emulator.together() as choose:
        for rank, (own, other) in enumerate(zip(kernels.dispatchers, kernels.others, strict=True)):
            choose(rank)
            data = rank_input(seed, rank, 1, *sizes)
            (other if rank == 1 else own).dispatch(*data)
    for context in kernels.contexts:
        with pytest.raises(StepMismatchError, match=r"rank 1 (was )?in (exchange )?1"):
            context.check()
    assert_counters_are_zero(kernels)


WRONG = {
    "a counter that stays": (r"if \(last\) \*counter = 0;", ""),
    "rows are counted before they have come": (
        r"const bool good = await_chunk\([^;]*;",
        "const bool good = __syncthreads_or(0) == 0;",
    ),
    "words of long ago": (r"load_acquire\(of_part\) != epoch", "ahead(load_acquire(of_part), epoch) < 0"),
}
"""What is written instead in translated kernels, as regular expressions."""


@pytest.mark.parametrize("what", WRONG)
def test_kernels_that_are_wrong_are_found(what: str, draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    assert_is_found(
        WRONG[what],
        emulator,
        lambda turn: run_random_steps(draw_sizes, emulator, seed + turn, epoch=1 - 2**31, combined=True),
    )
