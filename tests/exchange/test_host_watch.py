"""The watch over other hosts: it names who is gone, misses nobody who parts in order, and ends what does not end."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from moe_runtime.comm import host_watch, store_calls
from moe_runtime.comm.errors import MoERuntimeError
from moe_runtime.comm.host_watch import EXIT_CODE, HostWatch
from moe_runtime.comm.hosts import Hosts
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.suspects import Suspects
from tests.support.pool import PATIENCE_S, Outcome, run_once

pytestmark = pytest.mark.cpu_only

LIMIT_S = 1.5


class SilentStore:
    """Answers nothing."""

    def set(self, key: str, word: bytes) -> None:
        threading.Event().wait()


def watch_others(rank: int, world: int, how: str) -> tuple[str, float, bool]:
    """Rank 1 of two hosts goes in its way; what rank 0's watch says of it, when, and whether it freed what waits."""
    host_watch.BEAT_S, host_watch.FREE_S = 0.1, 1.0
    group = RankGroup(timeout_s=20.0)
    hosts = Hosts(world, 1, rank, 0)
    found: list[MoERuntimeError] = []
    told, freed, never = threading.Event(), threading.Event(), threading.Event()

    def on_failure(error: MoERuntimeError) -> None:
        found.append(error)
        told.set()

    def free() -> None:
        freed.set()
        if "stuck" in how:
            never.wait()

    rail = group.of_ranks(hosts.rail, "rail")
    watch = HostWatch(hosts, group, rail, Suspects(group), LIMIT_S, 20.0, on_failure, free)
    dist.barrier()
    time.sleep(0.5)
    start = time.monotonic()
    if how == "cannot be asked about":
        # As where the host of the store has lost its power: calls have no answer and no error.
        store_calls.ANSWER_S = 0.5
        if rank == 0:
            watch._beats._store = SilentStore()
        how = "ends"
    if rank == 1:
        if how == "parts":
            watch.stop(in_order=True)
        elif how == "gives up":
            watch.stop(in_order=True)
            group.leave("x: too many tokens")
        elif not how.startswith("exits"):
            os.kill(os.getpid(), signal.SIGKILL)
        return "", 0.0, False
    if how.startswith("exits"):
        watch.free_at_exit()
        return "", time.monotonic() - start, freed.is_set()
    if how == "parts":
        assert not told.wait(3 * LIMIT_S)
        watch.stop(in_order=True)
        return "", 0.0, freed.is_set()
    assert told.wait(PATIENCE_S)
    spent = time.monotonic() - start
    assert watch.verdict(0.0) is found[0] and len(found) == 1
    if how != "ends":
        assert freed.wait(PATIENCE_S)
    if how == "stuck":
        time.sleep(PATIENCE_S)
    watch.stop(in_order=True)
    if how == "ends":
        assert not freed.wait(2 * LIMIT_S)
    return str(found[0]), spent, freed.is_set()


def outcome_of(how: str) -> Outcome:
    return run_once(watch_others, 2, how, timeout=PATIENCE_S)[0]


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_a_rank_that_is_gone_is_named(how: str) -> None:
    outcome = outcome_of(how)
    assert outcome.error is None, outcome.trace
    text, spent, freed = outcome.result
    assert text == f"rank 0: rank 1 (host 1) has given no sign of life for {LIMIT_S:g} s"
    assert LIMIT_S - 0.5 < spent < LIMIT_S + 5 and freed == (how == "killed")


def test_a_rank_is_named_where_the_store_is_silent() -> None:
    outcome = outcome_of("cannot be asked about")
    assert outcome.error is None, outcome.trace
    text, spent, _ = outcome.result
    assert text == f"rank 0: rank 1 (host 1) has given no sign of life for {LIMIT_S:g} s"
    assert LIMIT_S - 0.5 < spent < LIMIT_S + 5


def test_a_rank_that_gives_up_is_named_with_its_reason() -> None:
    outcome = outcome_of("gives up")
    assert outcome.error is None, outcome.trace
    text, spent, _ = outcome.result
    assert "rank 1 gave up: x: too many tokens" in text and spent < LIMIT_S + 5


def test_a_rank_that_parts_in_order_is_not_missed() -> None:
    outcome = outcome_of("parts")
    assert outcome.error is None, outcome.trace
    assert outcome.result == ("", 0.0, False)


@pytest.mark.parametrize("how", ["stuck", "exits while stuck"])
def test_a_process_ends_where_a_wait_does_not(how: str) -> None:
    assert outcome_of(how).exitcode == EXIT_CODE


def test_a_process_that_exits_frees_what_waits() -> None:
    outcome = outcome_of("exits")
    assert outcome.error is None, outcome.trace
    assert outcome.result[2] and outcome.result[1] < LIMIT_S
