"""Hopper's exchange emulated on the CPU: the bits of the references, in any order of lanes, copies and ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
import torch

from moe_runtime.comm.errors import PeerTimeoutError, Phase, StepMismatchError
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.kernels.exchange import plan
from moe_runtime.observation.waits import LATE, SLOW_TO_SEND, LayerWaits, PeerWaits, slowest_rank
from tests.emulator import Emulator, Replaced, needs_emulator
from tests.support.emulated_steps import (
    Step,
    all_at_once,
    assert_is_found,
    assert_same_results,
    check_a_bad_id_is_told,
    check_steps,
    one_after_the_other,
    random_outputs,
    random_steps,
)
from tests.support.exchange_data import expected_groups, rank_input
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import HOPPER, Ranks, emulator, poisoned_memory, pretend_sms

__all__ = ["emulator", "poisoned_memory"]

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
WORLD = 3
SETTINGS: dict[str, Any] = {"hidden_size": 512, "num_experts": 10, "top_k": 3, "max_tokens_per_rank": 12}


SIZES = ((2, 1, 1, 0), (3, 2, 1024, 0), (2, 4, 1, 1 << 20), (3, 1, 1024, 1 << 20), (3, 2, 1, 0))
"""`MAX_PLACES`, `RECV_WARPS`, `TOKENS_IN_PARTS` and `SMALL_CHUNK_BYTES`: few, since kernels are compiled for each."""


class Shrink(Protocol):
    def __call__(self, seed: int, **sizes: int) -> None: ...


@pytest.fixture(autouse=True)
def shrink(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Shrink]:
    """Draws sizes, but for those that are given: rings that come round, blocks with several tokens, tokens in parts,
    slots in one chunk or two."""

    def shrink(seed: int, **given: int) -> None:
        draw = random.Random(seed)
        sms = draw.choice((1, 2, 3))
        places, warps, in_parts, in_chunk_bytes = draw.choice(SIZES)
        sizes = {
            "MAX_PLACES": places,
            "SEND_BLOCKS_PER_SM": ((math.inf, 1),),
            "RECV_WARPS": warps,
            "TOKENS_IN_PARTS": in_parts,
            "SMALL_CHUNK_BYTES": in_chunk_bytes,
            "CHUNK": 32,
        }
        for name, value in (sizes | given).items():
            monkeypatch.setattr(plan, name, value)
        pretend_sms(monkeypatch, sms)
        forget_plans()

    shrink(seed)
    yield shrink
    forget_plans()


def references_and_kernels(**settings: Any) -> list[Ranks]:
    return [Ranks(WORLD, CPU, engine, **{**SETTINGS, **settings}) for engine in ("torch", HOPPER)]


def combined_steps(seed: int, count: int) -> list[Step]:
    steps = random_steps(random.Random(seed), {**SETTINGS, "world": WORLD}, count, shared=True)
    return [step._replace(combined=True) for step in steps]


@pytest.mark.parametrize(
    "settings",
    [
        {"token_format": "nvfp4"},
        {"token_format": "fp8_block", "combine_format": "mxfp8"},
        {"token_format": "nvfp4", "num_sms": 2},
        {"token_format": "fp8_block", "combine_format": "fp8_block", "hidden_size": 528},
    ],
    ids=str,
)
def test_steps_of_ranks_that_do_not_wait_for_each_other(
    settings: dict[str, Any], emulator: Emulator, seed: int, shrink: Shrink
) -> None:
    for turn in range(4):
        shrink(seed + turn)
        run_random_steps(settings, emulator, seed + turn)


def run_random_steps(
    settings: dict[str, Any], emulator: Emulator, seed: int, count: int = 5, **of_kernels: Any
) -> None:
    settings = {**SETTINGS, "mode": "contiguous", **settings}
    steps = random_steps(random.Random(seed), {**settings, "world": WORLD}, count, shared=True)
    run_steps(settings, steps, emulator, seed, **of_kernels)


def run_steps(settings: dict[str, Any], steps: list[Step], emulator: Emulator, seed: int, **of_kernels: Any) -> None:
    references, kernels = Ranks(WORLD, CPU, "torch", **settings), Ranks(WORLD, CPU, HOPPER, **settings, **of_kernels)
    check_steps(references, kernels, steps, emulator, seed)


ONE_CHUNK = {"SMALL_CHUNK_BYTES": 1 << 20, "TOKENS_IN_PARTS": 1024}
SEVERAL_CHUNKS = {"SMALL_CHUNK_BYTES": 0, "TOKENS_IN_PARTS": 1024}
"""Each token is told of by itself."""


@pytest.mark.parametrize("sizes", [{}, ONE_CHUNK], ids=["drawn", "one_chunk"])
@pytest.mark.parametrize("sends", [False, True])
def test_a_rank_that_stops_is_named_by_all_others(
    sends: bool, sizes: dict[str, int], emulator: Emulator, seed: int, shrink: Shrink
) -> None:
    shrink(seed, **sizes)
    steps = combined_steps(seed, 3)
    references, kernels = references_and_kernels(mode="contiguous", token_format="nvfp4")
    outputs, lost = random_outputs(references, seed), seed % WORLD
    found = all_at_once(kernels, steps, outputs, emulator, stops=(lost, 1, sends))
    assert_same_results(found[:1], one_after_the_other(references, steps, outputs)[:1])
    for rank, context in enumerate(kernels.contexts):
        if rank != lost:
            with pytest.raises(PeerTimeoutError) as caught:
                context.check()
            assert caught.value.rank == lost
            assert caught.value.phase == (Phase.COMBINE_RECV if sends else Phase.DISPATCH_RECV)


@pytest.mark.parametrize("sizes", [{}, ONE_CHUNK], ids=["drawn", "one_chunk"])
def test_a_bad_expert_id_is_told_to_ranks_that_are_at_work(
    sizes: dict[str, int], emulator: Emulator, seed: int, shrink: Shrink
) -> None:
    """A rank that fails tells of it and then raises its flag all the same; kernels that wait for it miss neither."""
    shrink(seed, **sizes)
    settings = {**SETTINGS, "mode": "contiguous", "token_format": "fp8_block"}
    kernels = Ranks(WORLD, CPU, HOPPER, **settings)
    check_a_bad_id_is_told(kernels, {**settings, "world": WORLD}, random.Random(seed), emulator, seed)


@pytest.mark.parametrize("sizes", [ONE_CHUNK, SEVERAL_CHUNKS, {}], ids=["one_chunk", "several_chunks", "drawn"])
def test_waits_are_counted_beside_the_work(
    sizes: dict[str, int], emulator: Emulator, seed: int, shrink: Shrink
) -> None:
    """By a block of its own, with the same results. A rank that has work between its steps is named."""
    shrink(seed, **sizes)
    steps = combined_steps(seed, 3)
    references, kernels = references_and_kernels(mode="contiguous", token_format="nvfp4")
    outputs, slow = random_outputs(references, seed), seed % WORLD
    waits = [LayerWaits(own.context, {12: own}) for own in kernels.dispatchers]
    work = Ranks(2, CPU, HOPPER, **SETTINGS)
    data = [rank_input(seed, rank, 12, *list(SETTINGS.values())[:3]) for rank in range(2)]
    dispatch = kernels.dispatchers[slow].dispatch
    with pytest.MonkeyPatch.context() as patch:

        def late(*tokens: torch.Tensor) -> DispatchedTokens:
            for _ in range(3):
                arrived = work.dispatch(data)
                work.combine(arrived, [torch.zeros(a.capacity, 512) for a in arrived])
            return dispatch(*tokens)

        patch.setattr(kernels.dispatchers[slow], "dispatch", late)
        found = all_at_once(kernels, steps, outputs, emulator)
    assert_same_results(found, one_after_the_other(references, steps, outputs))
    counts = [of_rank.read()[12] for of_rank in waits]
    for rank, own in enumerate(counts):
        assert own.steps == 3 and own.peers[rank] == PeerWaits()
        for peer in own.peers:
            assert 0 <= peer.late_ns <= peer.dispatch_ns <= 3 * peer.dispatch_max_ns
            assert peer.combine_ns <= 3 * peer.combine_max_ns and peer.total_ns <= own.step_ns
            assert (peer.dispatch_waits > 0, peer.combine_waits > 0) == (peer.dispatch_ns > 0, peer.combine_ns > 0)
    named = slowest_rank(counts)
    assert named is not None and (named.rank, named.cause) == (slow, LATE)


def test_a_rank_that_has_entered_and_does_not_send_is_told_apart(emulator: Emulator, seed: int, shrink: Shrink) -> None:
    """It stops for a while in each step, after its peers have learned that it has entered."""
    shrink(seed)
    steps, slow = combined_steps(seed, 3), seed % WORLD
    references, kernels = references_and_kernels(mode="contiguous", token_format="nvfp4")
    outputs = random_outputs(references, seed)
    waits = [LayerWaits(own.context, {12: own}) for own in kernels.dispatchers]
    pause = f"if (rank == {slow}) for (int i = 0; i < 500; ++i) load_relaxed(own + lane);"
    has_entered = r"(store_release\(words_of_lane \+ \d+ \+ rank, last_epoch \+ 1\);)"
    emulator.edit = edit = Replaced(has_entered, rf"\1 {pause}")
    found = all_at_once(kernels, steps, outputs, emulator)
    assert edit.times == 1
    assert_same_results(found, one_after_the_other(references, steps, outputs))
    named = slowest_rank([of_rank.read()[12] for of_rank in waits])
    assert named is not None and (named.rank, named.cause) == (slow, SLOW_TO_SEND), str(named)


def test_a_combine_flag_of_long_ago_is_not_taken_for_one_of_this_step(
    emulator: Emulator, seed: int, shrink: Shrink
) -> None:
    """It may seem to be ahead, since not all epochs raise it."""
    shrink(seed)
    steps, slow = combined_steps(seed, 2), seed % WORLD
    references, kernels = references_and_kernels(mode="contiguous", token_format="nvfp4")
    outputs = random_outputs(references, seed)
    waits = [LayerWaits(own.context, {12: own}) for own in kernels.dispatchers]
    for context in kernels.contexts:
        first = context.signals_layout.combine_flag
        context.heap.tensor("signals").view(torch.int32)[first : first + 2 * WORLD] = 1 << 30
    pause = f"if (rank == {slow}) for (int i = 0; i < 500; ++i) load_relaxed(epoch_ptr);"
    emulator.edit = edit = Replaced(r"(signal\(\d+ \+ half \* \d+, counter, false\);)", rf"{pause} \1")
    found = all_at_once(kernels, steps, outputs, emulator)
    assert edit.times
    assert_same_results(found, one_after_the_other(references, steps, outputs))
    for rank, of_rank in enumerate(waits):
        peer = of_rank.read()[12].peers[slow]
        assert rank == slow or peer.combine_ns > 10**5, "no more than the lanes' clocks differ by"


WRONG = {
    "a row is overwritten while it is read": (r"barrier_wait\(empty \+ 8 \* place\.index, place\.parity \^ 1\);", ""),
    "lanes wait for another round": (r"(index, place\.parity \^ 1\);\n)    __syncwarp\(\);", r"\1"),
    "fewer readers than there are": (r"rows\.init\((\w+)\);", r"rows.init(\1 - 1);"),
    "the flag of another step": (r"signal\((\w+) \+ half \* \w+, counter", r"signal(\1, counter"),
}
"""What is written instead in translated kernels, as regular expressions."""
WRONG_TOKEN_FLAGS = {
    "a token is told of before it has landed": (r"if \(warp == 0\) bulk_await\(\);", ""),
    "nothing says that a token goes elsewhere": (r"(reinterpret_cast<uint4\*>\(to \+ \d+\))\[i\] =", r"\1;"),
    "all tokens are there with the first": (r"(load_acquire\(arrived\.token_flags \+ slot)", r"\1 - token"),
    "the number of tokens may be of an epoch before": (r"same_turn\(word, arrived\.tag\)", "true"),
    "the number of tokens is that of another step": (r"(int count = )num_tokens", r"\1num_tokens - 1"),
}
"""The same, of what tells of each token."""


BEFORE_IT_HAS_LANDED = r"if \(but_last\) bulk_await<1>\(\);", "if (but_last) ;"
"""The same, of what tells of the first parts of the tokens."""


WRONG_PARTIAL_FLAGS = {
    "a partial result is told of before it is sent": (r"(if \(token\) for)", r"store_relaxed(partial_flag, epoch); \1"),
    "one partial result fewer than there are": (r"__popc\(partials\) == parts", "__popc(partials) + 1 >= parts"),
    "partial results of an epoch before": (r"load_acquire\(of_token\) == epoch", "load_acquire(of_token) > 0"),
    "those of another token": (r"(half \* \d+) \+ token(\) \* \d+ \+ peer)", r"\1\2"),
}
"""The same, of what tells of each partial result."""


@pytest.mark.parametrize("what", WRONG)
def test_kernels_that_are_wrong_are_found(what: str, emulator: Emulator, seed: int, shrink: Shrink) -> None:
    def run(turn: int) -> None:
        shrink(seed + turn)
        run_random_steps({"token_format": "nvfp4"}, emulator, seed + turn)

    assert_is_found(WRONG[what], emulator, run)


@pytest.mark.parametrize("what", WRONG_TOKEN_FLAGS)
def test_tokens_that_are_told_of_wrongly_are_found(what: str, emulator: Emulator, seed: int, shrink: Shrink) -> None:
    def run(turn: int) -> None:
        shrink(seed + turn, **ONE_CHUNK)
        run_random_steps({"token_format": "nvfp4"}, emulator, seed + turn)

    assert_is_found(WRONG_TOKEN_FLAGS[what], emulator, run)


def test_parts_that_are_told_of_too_early_are_found(emulator: Emulator, seed: int, shrink: Shrink) -> None:
    """Ranks are full in all steps, so that each part has something of each block."""
    settings = {**SETTINGS, "hidden_size": 256, "max_tokens_per_rank": 16, "token_format": "bf16", "mode": "gathered"}
    _, experts, top_k, _ = SETTINGS.values()

    def full_step(of_step: int) -> Step:
        inputs = [rank_input(of_step, rank, 16, 256, experts, top_k) for rank in range(WORLD)]
        return Step(inputs, combined=True, shared=False)

    def run(turn: int) -> None:
        shrink(seed + turn, TOKENS_IN_PARTS=1)
        run_steps(settings, [full_step(seed + turn + 100 * step) for step in range(4)], emulator, seed + turn)

    # One in ten runs fails: parts have to be summed before anybody sees to the copies.
    assert_is_found(BEFORE_IT_HAS_LANDED, emulator, run)


@pytest.fixture
def a_block_for_each_slot(monkeypatch: pytest.MonkeyPatch, shrink: Shrink, seed: int) -> dict[str, Any]:
    """Settings of few tokens, on as many SMs as they have slots on a rank."""
    shrink(seed, TOKENS_IN_PARTS=1024)
    pretend_sms(monkeypatch, 2 * WORLD)
    return {"token_format": "nvfp4", "max_tokens_per_rank": 2}


def test_partial_results_are_summed_as_they_come(
    a_block_for_each_slot: dict[str, Any], emulator: Emulator, seed: int
) -> None:
    for turn in range(4):
        run_random_steps(a_block_for_each_slot, emulator, seed + turn)


def test_partial_results_are_summed_where_some_ranks_tell_of_all_at_once(
    a_block_for_each_slot: dict[str, Any], emulator: Emulator, seed: int
) -> None:
    """Ranks that may take two SMs have blocks with several slots."""
    for turn in range(4):
        sms = random.Random(seed + turn).sample([None, 2, None, 2], WORLD)
        run_random_steps(a_block_for_each_slot, emulator, seed + turn, sms_of_ranks=sms)


@pytest.mark.parametrize("what", WRONG_PARTIAL_FLAGS)
def test_partial_results_that_are_told_of_wrongly_are_found(
    what: str, a_block_for_each_slot: dict[str, Any], emulator: Emulator, seed: int
) -> None:
    def run(turn: int) -> None:
        run_random_steps(a_block_for_each_slot, emulator, seed + turn, count=12)

    def slow_partial_results(text: str) -> str:
        """All but those of the first tokens are sent late."""
        return text.replace(
            "bulk_store(to, partials",
            "if (token) for (int i = 0; i < 400; ++i) load_relaxed(x.latch); bulk_store(to, partials",
        )

    assert_is_found(WRONG_PARTIAL_FLAGS[what], emulator, run, slow_partial_results)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that may take all SMs take slots in chunks and store token flags first; others tell of each token."""
    monkeypatch.setattr(plan, "_chunk_slots", lambda geometry: 32 if geometry.num_sms is None else 64)


def slow_records(text: str) -> str:
    """Records that are sent long after their token flags have been stored."""
    return text.replace("+ slot, epoch);", "+ slot, epoch); for (int i = 0; i < 10; ++i) load_relaxed(x.latch);")


def run_mixed_steps(emulator: Emulator, seed: int) -> None:
    sms = random.Random(seed).sample([None, 2, None, 2], WORLD)
    run_random_steps({"token_format": "nvfp4"}, emulator, seed, sms_of_ranks=sms)


@pytest.mark.usefixtures("mixed")
def test_ranks_that_wait_for_token_flags_know_whose_say_nothing(emulator: Emulator, seed: int, shrink: Shrink) -> None:
    emulator.edit = slow_records
    for turn in range(3):
        shrink(seed + turn)
        run_mixed_steps(emulator, seed + turn)


@pytest.mark.usefixtures("mixed")
def test_token_flags_that_say_nothing_taken_for_others_are_found(emulator: Emulator, seed: int, shrink: Shrink) -> None:
    def run(turn: int) -> None:
        shrink(seed + turn)
        run_mixed_steps(emulator, seed + turn)

    assert_is_found((r"has_token_flags\(word\)", "true"), emulator, run, slow_records)


@pytest.mark.parametrize("sizes", [SEVERAL_CHUNKS, ONE_CHUNK], ids=["several_chunks", "one_chunk"])
def test_nothing_is_placed_among_tokens_for_another_exchange(
    sizes: dict[str, int], emulator: Emulator, seed: int, shrink: Shrink
) -> None:
    """A peer's tokens, of a step of another size, come to slots of this rank's own between two looks at them."""
    settings = {**SETTINGS, "hidden_size": 256, "num_experts": 8, "top_k": 2, "max_tokens_per_rank": 64}
    for turn in range(2):
        shrink(seed + turn, RECV_WARPS=2, **sizes)
        ranks = Ranks(2, CPU, HOPPER, **settings, mode="gathered", token_format="nvfp4", other_tokens=16)
        alone = Ranks(1, CPU, HOPPER, **settings | {"max_tokens_per_rank": 8}).dispatchers[0]
        own, late = rank_input(seed + turn, 0, 64, 256, 8, 2), rank_input(seed + turn, 1, 16, 256, 8, 2)
        # The late ones go where there was nothing.
        own.topk_idx[16:32] = -1
        late.topk_idx[:, 0], late.topk_idx[:, 1] = 3, -1
        with emulator.together() as choose:
            choose(0)
            arrived = ranks.dispatchers[0].dispatch(*own)
            choose(1)
            for _ in range(6):
                alone.dispatch(late.x[:8], late.topk_idx[:8], late.topk_weights[:8])
            ranks.others[1].dispatch_send(*late)
        with pytest.raises(StepMismatchError, match=r"rank 1 was in exchange 1 of the context, rank 0 in 0"):
            ranks.contexts[0].check()
        assert arrived.group_scale_offsets is not None and not arrived.group_scale_offsets.any()
        assert not arrived.group_offsets.any()
        assert bool((arrived.handle.positions == -1).all())
        assert arrived.row_index is not None and not arrived.row_index.any()


def run_unawaited_dispatches(emulator: Emulator, seed: int) -> None:
    """A rank waits for the last of three dispatches alone, while its peer may not have come to the first.

    What the peer had stored two turns of the half before is all that there is then: that it has no tokens.
    """
    settings = {**SETTINGS, "hidden_size": 256, "top_k": 2, "num_experts": 4, "max_tokens_per_rank": 6}
    ranks, alone = Ranks(2, CPU, HOPPER, **settings), Ranks(1, CPU, HOPPER, **settings).dispatchers[0]
    # All go to the rank that is ahead.
    inputs = [rank_input(seed, rank, 6, 256, 2, 2) for rank in range(2)]
    rows, found = torch.zeros(ranks.dispatchers[0].geometry.row_capacity, 256).bfloat16(), []
    with emulator.together() as choose:
        for rank, (dispatcher, tokens) in enumerate(zip(ranks.dispatchers, inputs, strict=True)):
            choose(rank)
            for _ in range(4):
                arrived = dispatcher.dispatch(*(tensor[:0] for tensor in tokens))
                dispatcher.combine(rows, arrived.handle)
            for _ in range(6 * rank):
                alone.dispatch(*tokens)
            for _ in range(3):
                handle = dispatcher.dispatch_send(*tokens)
            found.append(dispatcher.dispatch_recv(handle))
    for context in ranks.contexts:
        context.check_peers()
    assert [int(a.group_offsets[-1]) for a in found] == [sum(map(len, expected_groups(inputs, range(2)))), 0]


def test_dispatches_that_nobody_waits_for(emulator: Emulator, seed: int, shrink: Shrink) -> None:
    """A number of tokens stored two turns of its half before looks like that of this one."""
    for turn in range(4):
        shrink(seed + turn, **ONE_CHUNK)
        run_unawaited_dispatches(emulator, seed + turn)


def test_a_number_of_tokens_of_long_ago_is_found(emulator: Emulator, seed: int, shrink: Shrink) -> None:
    def run(turn: int) -> None:
        shrink(seed + turn, **ONE_CHUNK)
        run_unawaited_dispatches(emulator, seed + turn)

    assert_is_found((r"bool recent = [^;]+;", "bool recent = true;"), emulator, run)
