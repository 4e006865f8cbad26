"""The model of dispatch by token flags: right whatever is seen when and whoever fails, wrong without any safeguard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from moe_runtime.comm.signals import TURN_BIT, tag_of
from moe_runtime.kernels.nvrtc import source_path
from tests.support.exploration import Finding
from tests.support.token_flags_model import RIGHT, Machine, Rules, explore, turn_of

pytestmark = pytest.mark.cpu_only

IN_TURN = "s1 w1 c1 s2 w2 c2 s3 w3 c3 s4 w4 c4 s5 w5 c5"
OVERLAPPING = "s1 s2 w1 c1 w2 c2 s3 s4 w3 c3 w4 c4 s5 w5 c5"
NEVER_COMBINED = "s1 w1 s2 w2 u1 s3 w3 u2 s4 w4 u3 s5 w5 u4"
SENT_AHEAD = "s1 s2 w1 u1 s3 w2 u2 s4 w3 u3 s5 w4 w5"
UNAWAITED = "s1 w1 c1 s2 w2 c2 s3 s4 s5 w5"
SCRIPTS = (IN_TURN, OVERLAPPING, NEVER_COMBINED, SENT_AHEAD, UNAWAITED)
ONE_STEP = ["s1 w1"] * 3


@pytest.mark.parametrize("tokens", [["an", "n"], ["a . . a a", ". a"]], ids=" or ".join)
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks(script: str, tokens: list[str]) -> None:
    found = explore(Machine([script] * 2, tokens))
    assert found.what == "right" and found.states > 300, found


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_of_two_ranks_stores_token_flags_first(script: str) -> None:
    found = explore(Machine([script] * 2, ["an"] * 2, per_token_flags=(True, False)))
    assert found.what == "right" and found.states > 200, found


@pytest.mark.parametrize(
    ("script", "epoch"),
    [*((script, epoch) for script in (IN_TURN, NEVER_COMBINED) for epoch in (1, 3, 5)), (SENT_AHEAD, 3)],
)
def test_a_rank_that_fails_or_dies(script: str, epoch: int) -> None:
    """Wherever it is in that epoch. If it lives, it goes on to the last one, without waiting for anyone."""
    for per_token_flags in ((True, True), (True, False))[: 1 + (epoch == 3)]:
        for fails, dies in ((((0, epoch),), ()), ((), ((0, epoch),))):
            found = explore(Machine([script] * 2, ["a"] * 2, per_token_flags=per_token_flags, fails=fails, dies=dies))
            assert found.what == "right" and found.states > 150, found


def test_a_handle_that_is_used_too_late() -> None:
    found = explore(Machine(LATE, BOTH))
    assert found.what == "right" and found.states > 100, found


def test_blocks_that_have_not_noticed_a_failure() -> None:
    found = explore(Machine(["s1 w1 c1 s2 w2"] * 2, ["an", "a"], fails=((0, 2),)))
    assert found.what == "right" and found.states > 1000, found


def test_tokens_for_another_exchange_are_a_failure() -> None:
    for per_token_flags in ((True, True), (False, True)):
        found = explore(Machine([IN_TURN] * 2, ["a"] * 2, per_token_flags=per_token_flags, foreign=((0, 3),)))
        assert found.what == "right" and found.states > 100, found


def test_three_ranks() -> None:
    found = explore(Machine(ONE_STEP, ["a", "2", "."]))
    assert found.what == "right" and found.states > 10000, found


def test_a_failure_among_three_ranks_that_wait_for_flags() -> None:
    found = explore(Machine(ONE_STEP, ["."] * 3, per_token_flags=(False,) * 3, fails=((0, 1),)))
    assert found.what == "right" and found.states > 10000, found


class Safeguard(NamedTuple):
    """A rule, where kernels have it, ranks that are wrong without it, and in which way."""

    rule: str
    source: str
    text: str
    what: str
    scripts: list[str]
    tokens: list[str]
    more: Mapping[str, Any] = MappingProxyType({})


TWO, BOTH = [IN_TURN] * 2, ["a"] * 2
FAILS, MIXED = {"fails": ((0, 3),)}, {"per_token_flags": (True, False)}
ANY = {"fails": ((0, 1),)}
LATE = ["s1 w1 s2 s3 c1", "s1 w1 c1 s2 s3"]
"""The first uses a handle too late, for which the second waits."""
SEND, ARRIVE, SIGNALS, COMBINE = "dispatch_send.cu", "dispatch_recv.cu", "signalling.cuh", "combine.cu"
ARRIVAL, PLACES = "arrival.cuh", "recv_places.cuh"
SAFEGUARDS = [
    Safeguard(
        "recent",
        ARRIVAL,
        "bool recent = ahead(load_acquire(flag), epoch - 2) >= 0;",
        "takes count of epoch 1 from rank 0 in 5",
        [UNAWAITED] * 2,
        [". a a a a", "a"],
    ),
    Safeguard("turn", ARRIVAL, "same_turn(word, arrived.tag)", "takes count of epoch 1", TWO, BOTH),
    Safeguard("sign", ARRIVAL, "has_token_flags(word)", "takes ids of epoch 0 from rank 1 in 1", TWO, BOTH, MIXED),
    Safeguard(
        "epoch_of_token_flag", ARRIVAL, "token_flag == epoch && epoch != 0", "takes token_flag of epoch 1", TWO, BOTH
    ),
    Safeguard("token_flag_last", SEND, "fence_system();\n    int* token_flag =", "takes ids of epoch 0", TWO, BOTH),
    Safeguard(
        "flag_last",
        SEND,
        "store_release(words_of_lane + half * WORLD + rank + DISPATCH_FLAG, epoch)",
        "takes count of epoch 0",
        TWO,
        BOTH,
    ),
    Safeguard(
        "combined_last",
        COMBINE,
        "store_release(words_of_lane + word + rank, epoch)",
        "takes partial of epoch 0",
        TWO,
        BOTH,
    ),
    Safeguard(
        "ids_everywhere",
        SEND,
        "if (PER_TOKEN_FLAGS && !lost && lane < WORLD && !(targets >> lane & 1))",
        "takes ids of epoch 0",
        TWO,
        ["n", "a"],
    ),
    Safeguard(
        "ready_in_time",
        SEND,
        'asm volatile("griddepcontrol.wait;" ::: "memory");\n  // All loads of this warp',
        "takes row of epoch 3 from rank 0 in 1",
        [NEVER_COMBINED] * 2,
        BOTH,
    ),
    Safeguard(
        "await_everyone",
        SEND,
        "if (PER_TOKEN_FLAGS) peers = everyone;",
        "of epoch 3 from rank 1 in 1",
        [SENT_AHEAD] * 2,
        ["a", "n"],
    ),
    Safeguard(
        "count_waits",
        SEND,
        "ready |= wanted;\n    }\n    failed = __any_sync(ALL, failed) != 0;\n    // The count is stored early:",
        "takes count of epoch 3 from rank 0 in 1",
        [SENT_AHEAD] * 2,
        BOTH,
    ),
    Safeguard(
        "failed_without_token_flags",
        SEND,
        "PER_TOKEN_FLAGS && !lost && first < num_tokens",
        "takes ids",
        TWO,
        BOTH,
        FAILS,
    ),
    Safeguard(
        "check_sources",
        ARRIVE,
        "arrived.check_sources(x, DISPATCH_RECV)",
        "takes tokens of rank 0 for another exchange",
        TWO,
        BOTH,
        {"foreign": ((0, 3),)},
    ),
    Safeguard("clock", SIGNALS, "if (too_late(x, waiting,", "waits for ever", TWO, BOTH, {"dies": ((0, 3),)}),
    Safeguard("send_aborts", SIGNALS, "store_release(words, code);", "of epoch 1 from rank 0 in 3", TWO, BOTH, FAILS),
    Safeguard(
        "forward_aborts",
        SIGNALS,
        "if (trouble) adopt_aborts(x);",
        "rank 2 takes token_flag of epoch 0 from rank 1 in 1",
        ONE_STEP,
        [".", "a", "."],
        ANY | {"per_token_flags": (False,) * 3},
    ),
    Safeguard(
        "name_first",
        SIGNALS,
        "origin == x.rank ? 0 : origin + 1",
        "says that rank 1 failed first",
        ONE_STEP,
        ["."] * 3,
        ANY,
    ),
    Safeguard(
        "look_for_failures",
        PLACES,
        "if (glance.trouble()) adopt_aborts(x), failed = true;",
        "of epoch 1 from rank 0 in 3",
        TWO,
        BOTH,
        FAILS,
    ),
    Safeguard(
        "await_abort_sent", SEND, "if (failed) await_abort_sent(x);", "of epoch 1 from rank 0 in 3", TWO, BOTH, FAILS
    ),
    Safeguard(
        "abort_sent_last", SIGNALS, "store_release(x.latch + 1, 1);", "of epoch 1 from rank 0 in 3", TWO, BOTH, FAILS
    ),
    # Who has failed does not wait: a slower rank may still read the number of two epochs before.
    Safeguard(
        "failed_without_count",
        SEND,
        "if (!failed && first && blockIdx.x == 0 && team == 0 && lane < WORLD) {",
        "takes count of epoch 3 from rank 0 in 1",
        [SENT_AHEAD] * 2,
        BOTH,
        FAILS,
    ),
    # `combine_recv` may find the same beside it, have the latch, and not have told anyone yet.
    Safeguard(
        "stale_waits",
        COMBINE,
        "sending the abort messages.\n      await_abort_sent(x);",
        "rank 1 takes partial of epoch 0 from rank 0 in 1",
        LATE,
        BOTH,
    ),
]


def explored(safeguard: Safeguard, rules: Rules) -> Finding:
    return explore(Machine(safeguard.scripts, safeguard.tokens, rules, **safeguard.more))


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda safeguard: safeguard.rule)
def test_a_safeguard_left_out_is_missed(safeguard: Safeguard) -> None:
    found = explored(safeguard, replace(RIGHT, **{safeguard.rule: False}))
    assert safeguard.what in found.what, found


def test_all_rules_are_left_out_once() -> None:
    assert sorted(safeguard.rule for safeguard in SAFEGUARDS) == sorted(field.name for field in fields(Rules))


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda safeguard: safeguard.rule)
def test_kernels_are_as_the_model_says(safeguard: Safeguard) -> None:
    text = source_path(safeguard.source).read_text()
    assert safeguard.text in text, f"{safeguard.source} has changed: is {safeguard.rule} still what it does?"


def test_turns_are_those_of_the_words() -> None:
    assert [turn_of(epoch) for epoch in range(9)] == [tag_of(0, epoch) >> TURN_BIT & 1 for epoch in range(9)]
    assert all(turn_of(epoch) != turn_of(epoch - 2) == turn_of(epoch + 2) for epoch in range(2, 9))
