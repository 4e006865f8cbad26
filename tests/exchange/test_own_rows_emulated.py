"""Own rows that are stored as they are sent, emulated: the bits of the torch reference at any pace of the ranks.

Their places are known in time for all tokens, some or none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_runtime.comm.errors import CapacityError
from moe_runtime.kernels.exchange import cuda, geometry, plan, reference
from moe_runtime.kernels.exchange.interface import RecvBuffers, SentTokens
from tests.emulator import Emulator, needs_emulator
from tests.support.emulated_steps import (
    Settings,
    assert_counters_are_zero,
    assert_is_found,
    assert_same_results,
    check_a_bad_id_is_told,
    check_steps,
    check_with_references_among_them,
    dispatched_at_once,
    most_tokens,
    one_after_the_other,
    random_outputs,
    random_steps,
)
from tests.support.exchange_data import RankInput
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import HOPPER, Ranks, emulator, poisoned_memory, pretend_sms

__all__ = ["emulator", "poisoned_memory"]

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
Draw = Callable[[random.Random], Settings]
PATIENCE = r"(OWN_ROWS_PATIENCE_NS = )[\d']+"
FOREVER, NEVER, UNEQUAL = 10**9, -1, -2


def patient(nanoseconds: int) -> Callable[[str], str]:
    """Kernels that wait so long for what spares copies; `UNEQUAL`: `place_own_rows` forever, `dispatch_send` never."""

    def edit(text: str) -> str:
        if nanoseconds == UNEQUAL:
            text = text.replace("> OWN_ROWS_PATIENCE_NS)) return come", "> 1000000000ll)) return come")
        return re.sub(PATIENCE, rf"\g<1>{nanoseconds}ll", text)

    return edit


@pytest.fixture
def draw_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Draw]:
    """Draws a layer whose own rows are placed, with several blocks that count, and a GPU of few SMs."""

    def drawn(draw: random.Random) -> Settings:
        sms = draw.choice((1, 2, 3, 9))
        sizes = {"SMALL_CHUNK_BYTES": 0, "RECV_WARPS": draw.choice((1, 2, 4)), "CHUNK": 32, "OWN_TOKENS": 32}
        for name, value in sizes.items():
            monkeypatch.setattr(plan, name, value)
        monkeypatch.setattr(geometry, "OWN_ROWS_TOKENS", 1)
        pretend_sms(monkeypatch, sms)
        forget_plans()
        # Few, since kernels are compiled for each.
        world, hidden, experts, top_k = draw.choice(((2, 1152, 7, 3), (3, 128, 40, 9)))
        return {
            "world": world,
            "hidden_size": hidden,
            "num_experts": experts,
            "top_k": top_k,
            "max_tokens_per_rank": draw.randint(33, 70),
            "token_format": "fp8_block",
            "mode": "contiguous",
        }

    yield drawn
    forget_plans()


def ranks_of(settings: Settings, engine: str) -> Ranks:
    settings = dict(settings)
    # A GPU that holds one block at a time may be patient once for each block of a launch.
    ranks = Ranks(settings.pop("world"), CPU, engine, timeout_s=1000, **settings)
    assert plan.required_plan(ranks.dispatchers[0].geometry).own_rows
    return ranks


Placed = list[tuple[int, torch.Tensor]]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Placed:
    """A rank, and a view of what its kernel says of its tokens, for each dispatch that has begun."""
    seen: Placed = []
    send = cuda.dispatch_send

    def spied(context: Any, geometry: Any, tag: int, starts: Any, tokens: SentTokens, *step: Any) -> None:
        buffers: RecvBuffers = step[-1]
        assert buffers.scratch is not None
        start = cuda._count_words(geometry) + geometry.max_tokens * geometry.top_k
        seen.append((geometry.rank, buffers.scratch[start : start + tokens[0].shape[0]]))
        send(context, geometry, tag, starts, tokens, *step)

    monkeypatch.setattr(cuda, "dispatch_send", spied)
    return seen


def run_random_steps(draw_sizes: Draw, emulator: Emulator, seed: int, epoch: int | None = None) -> None:
    draw = random.Random(seed)
    settings = draw_sizes(draw)
    epoch = draw.choice((0, -2, 2**31 - 3, 1 - 2**31)) if epoch is None else epoch
    steps = random_steps(draw, settings, 4)
    check_steps(ranks_of(settings, "torch"), ranks_of(settings, HOPPER), steps, emulator, seed, epoch)


def tokens_that_stay(ranks: Ranks, rank: int, data: RankInput) -> torch.Tensor:
    starts = ranks.dispatchers[0].geometry.starts
    return ((data.topk_idx >= starts[rank]) & (data.topk_idx < starts[rank + 1])).any(dim=1)


@pytest.mark.parametrize("nanoseconds", [FOREVER, 20_000, 300, NEVER, UNEQUAL])
def test_bits_are_those_of_rows_that_are_copied(
    nanoseconds: int, draw_sizes: Draw, emulator: Emulator, seed: int
) -> None:
    emulator.edit = patient(nanoseconds)
    for turn in range(4):
        run_random_steps(draw_sizes, emulator, seed + turn)


def test_all_own_rows_are_placed_where_ranks_wait_for_each_other(
    draw_sizes: Draw, emulator: Emulator, placed: Placed, seed: int
) -> None:
    emulator.edit = patient(FOREVER)
    draw = random.Random(seed)
    settings = draw_sizes(draw)
    kernels = ranks_of(settings, HOPPER)
    inputs = most_tokens(settings, seed)
    dispatched_at_once(kernels, inputs, emulator)
    stayed = 0
    for rank, words in placed:
        stays = tokens_that_stay(kernels, rank, inputs[rank])
        assert bool((words[stays] == 1).all())
        stayed += int(stays.sum())
    assert stayed > 0 and len(placed) == len(inputs)


def test_ranks_that_come_too_late_are_not_waited_for(
    draw_sizes: Draw, emulator: Emulator, placed: Placed, seed: int
) -> None:
    """One after the other: only the last rank finds the counts of all."""
    draw = random.Random(seed)
    settings = draw_sizes(draw)
    references, kernels = ranks_of(settings, "torch"), ranks_of(settings, HOPPER)
    steps, outputs = random_steps(draw, settings, 3), random_outputs(references, seed)
    wanted = one_after_the_other(references, steps, outputs)
    assert_same_results(one_after_the_other(kernels, steps, outputs), wanted)
    assert_counters_are_zero(kernels)
    last = len(kernels.contexts) - 1
    for number, (rank, words) in enumerate(placed):
        stays = tokens_that_stay(kernels, rank, steps[number // (last + 1)].inputs[rank])
        assert bool((words[stays] == int(rank == last)).all())


def test_ranks_differ_in_what_they_run(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    draw = random.Random(seed)
    settings = draw_sizes(draw)
    references, mixed = ranks_of(settings, "torch"), ranks_of(settings, HOPPER)
    for dispatcher in mixed.dispatchers[seed % 2 :: 2]:
        dispatcher._use(reference)
    check_with_references_among_them(references, mixed, random_steps(draw, settings, 3), seed)


def test_more_rows_than_there_is_room_for(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    emulator.edit = patient(FOREVER)
    settings = draw_sizes(random.Random(seed))
    settings |= {"expert_row_capacity": 20}
    kernels = ranks_of(settings, HOPPER)
    dispatched_at_once(kernels, most_tokens(settings, seed), emulator)
    for context in kernels.contexts:
        with pytest.raises(CapacityError, match="20"):
            context.check()
    assert_counters_are_zero(kernels)


def test_a_bad_id_is_named(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    draw = random.Random(seed)
    settings = draw_sizes(draw)
    check_a_bad_id_is_told(ranks_of(settings, HOPPER), settings, draw, emulator, seed)


WRONG = {
    "rows of ranks before are not counted": (r"if \(source < rank\) of_lower \+= count;", "", FOREVER),
    "rows of blocks before are not counted": (r"places\.before\[[^=;]*\] = sum;", "", FOREVER),
    "a token has the number of the next": (
        r"\(1u << lane\) - 1\)\);(\s*for \(int word)",
        r"(2u << lane) - 1));\1",
        FOREVER,
    ),
    "places are read before they are known": (r"load_acquire\(placing\) != 0", "true", FOREVER),
    "counts are read before they have come": (
        r"load_acquire\(own \+ counted \+ peer\) == epoch",
        "true",
        FOREVER,
    ),
    "rows that are there are copied": (r"__ldcg\(placed \+ [^;]*\) != 0", "false", FOREVER),
    "rows that are not there are left": (r"__ldcg\(placed \+ [^;]*\) != 0", "true", NEVER),
    "places stay known": (r"\*placing = 0;", "", FOREVER),
    "the kernel ends before places are known": (
        r"(bulk_await\(\);\s*if \()1(\) ptx::griddepcontrol_wait)",
        r"\1false\2",
        UNEQUAL,
    ),
}
"""What is written instead in translated kernels, as regular expressions, and how patient they are."""


def test_words_that_nobody_has_written_are_found(draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    """They seem to be of epoch 0."""
    assert_is_found(
        (r"if \(epoch == 0\) return;", ""),
        emulator,
        lambda turn: run_random_steps(draw_sizes, emulator, seed + turn, epoch=-2),
        patient(20_000),
    )


@pytest.mark.parametrize("what", WRONG)
def test_kernels_that_are_wrong_are_found(what: str, draw_sizes: Draw, emulator: Emulator, seed: int) -> None:
    pattern, instead, nanoseconds = WRONG[what]
    assert_is_found(
        (pattern, instead),
        emulator,
        lambda turn: run_random_steps(draw_sizes, emulator, seed + turn, epoch=0),
        patient(nanoseconds),
    )
