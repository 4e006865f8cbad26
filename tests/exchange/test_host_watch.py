"""The watch over other hosts: it names who is gone, misses nobody who parts in order, and ends what does not end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moe_runtime.comm import host_watch, rank_group, store_calls
from moe_runtime.comm.errors import MoERuntimeError, Phase, StoreLostError
from moe_runtime.comm.host_watch import EXIT_CODE, PARTED, HostWatch
from moe_runtime.comm.hosts import Hosts
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.suspects import Suspects
from tests.support.pool import PATIENCE_S, Outcome, run_once

pytestmark = pytest.mark.cpu_only

LIMIT_S = 1.5


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
    if rank == 1:
        if how == "parts":
            watch.stop(in_order=True)
        elif how == "gives up":
            watch.stop(in_order=True)
            group.leave("x: too many tokens")
        elif not how.startswith("exits"):
            # Between two calls of the store: torch's FileStore hangs all readers of an entry that is half written.
            watch._beats.read = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            time.sleep(PATIENCE_S)
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
    text, spent, freed = outcome.returned()
    assert text == f"rank 0: rank 1 (host 1) has given no sign of life for {LIMIT_S:g} s"
    assert LIMIT_S - 0.5 < spent < LIMIT_S + 5 and freed == (how == "killed")


class Beats:
    """A board of two ranks that this test writes: `silent` as of a store without answers, `stands` of a dead rank 1.

    Also the clock of the watch, which stands still but for `passes`: no test depends on how busy the machine is.
    """

    def __init__(self) -> None:
        self.silent = self.stands = False
        self.words = {0: b"", 1: b"0"}
        self.now, self.puts = 0.0, 0

    def put(self, word: bytes) -> None:
        self.puts += 1
        if self.silent:
            raise StoreLostError("the store is silent", 0, Phase.START_UP)
        self.words[0] = word

    def read(self) -> dict[int, bytes]:
        if not self.stands and self.words[1] != PARTED:
            self.words[1] = self.words[0]
        return dict(self.words)

    def passes(self, seconds: float) -> None:
        """Let time pass, and the watch look at least once since."""
        self.now += seconds
        before, deadline = self.puts, time.monotonic() + PATIENCE_S
        while self.puts < before + 3 and time.monotonic() < deadline:  # one may be under way
            time.sleep(0.005)
        assert self.puts >= before + 3


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Beats, list[MoERuntimeError]]]:
    """What a watch of 1 s, and of 2 s for its store, sees; and what it finds."""
    board, found = Beats(), list[MoERuntimeError]()
    monkeypatch.setattr(host_watch, "BEAT_S", 0.01)
    monkeypatch.setattr(host_watch, "time", SimpleNamespace(monotonic=lambda: board.now))
    group: Any = SimpleNamespace(who_left=lambda what: None, number_board=lambda name: board)
    suspects: Any = SimpleNamespace(accuse=lambda rank, gone: None)
    watch = HostWatch(Hosts(2, 1, 0, 0), group, group, suspects, 1.0, 2.0, found.append, lambda: None)
    board.passes(0.3)
    yield board, found
    watch.stop(in_order=False)


def wait_for(found: list[MoERuntimeError]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)


def test_nobody_is_missed_while_the_store_is_silent(beats: tuple[Beats, list[MoERuntimeError]]) -> None:
    board, found = beats
    board.silent = board.stands = True
    board.passes(1.3)
    assert not found
    # It says the same as before at first: the other rank could not write meanwhile.
    board.silent = False
    board.passes(0.3)
    assert not found
    board.now += 0.8
    wait_for(found)
    assert [str(error) for error in found] == ["rank 0: rank 1 (host 1) has given no sign of life for 1 s"]


def test_a_store_that_stays_silent_is_a_failure_of_its_own(beats: tuple[Beats, list[MoERuntimeError]]) -> None:
    board, found = beats
    board.silent = True
    board.passes(1.3)
    assert not found
    board.now += 0.8
    wait_for(found)
    assert [(type(error), str(error)) for error in found] == [(StoreLostError, "the store is silent")]


def test_nobody_misses_the_store_once_all_others_have_parted(beats: tuple[Beats, list[MoERuntimeError]]) -> None:
    board, found = beats
    board.words[1] = PARTED
    board.passes(0.5)
    board.silent = True
    board.passes(2.6)
    assert not found


def test_a_rank_that_gives_up_is_named_with_its_reason() -> None:
    outcome = outcome_of("gives up")
    text, spent, _ = outcome.returned()
    assert "rank 1 gave up: x: too many tokens" in text and spent < LIMIT_S + 5


def test_a_rank_that_parts_in_order_is_not_missed() -> None:
    outcome = outcome_of("parts")
    assert outcome.returned() == ("", 0.0, False)


@pytest.mark.parametrize("how", ["stuck", "exits while stuck"])
def test_a_process_ends_where_a_wait_does_not(how: str) -> None:
    assert outcome_of(how).exitcode == EXIT_CODE


def test_a_process_that_exits_frees_what_waits() -> None:
    outcome = outcome_of("exits")
    _, spent, freed = outcome.returned()
    assert freed and spent < LIMIT_S


def test_a_board_gives_up_on_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(rank_group, "WORD_S", 0.2)

    class Store:
        def clone(self) -> Store:
            return self

        def set_timeout(self, limit: timedelta) -> None:
            """Calls of this store know no limit."""

        def set(self, key: str, word: bytes) -> None:
            never.wait()

    group = RankGroup(alone=True)
    group._store = Store()
    board = group.number_board("words")
    start = time.monotonic()
    for ask in (lambda: board.put(b"1"), board.read):
        with pytest.raises(StoreLostError, match=r"^words: rank 0 gets no answer from the group's store"):
            ask()
    assert time.monotonic() - start < store_calls.ANSWER_S
    never.set()
