"""Numbers that ranks exchange before every step: what comes, and what ranks that are gone do to those that wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from moe_runtime.comm import messages
from moe_runtime.comm.errors import MoERuntimeError, PeerAbortedError, PeerTimeoutError
from moe_runtime.comm.messages import integer
from moe_runtime.comm.number_exchange import NumberExchange
from moe_runtime.comm.rank_group import RankGroup
from tests.support.pool import Outcome, run_once

pytestmark = pytest.mark.cpu_only

LIMIT_S = 60.0
SOON_S = 15.0
"""Far below the limit, for machines with much else to do."""


def exchange_of(limit_s: float = LIMIT_S, most: int = 1000) -> tuple[RankGroup, NumberExchange]:
    group = RankGroup(timeout_s=limit_s)
    return group, NumberExchange("numbers", group, integer(-1, most))


def many_calls(rank: int, world: int) -> tuple[bool, int]:
    """Whether all calls give the numbers of all ranks, and how often this rank asked the store."""
    group, exchange = exchange_of()
    right = exchange.gather(rank - 1) == list(range(-1, world - 1))
    asked, ask = 0, group._ask

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return ask(*args)

    group._ask = counted  # type: ignore[method-assign, assignment]
    for call in range(300):
        right &= exchange.gather(call + rank) == list(range(call, call + world))
    exchange.close()
    return right, asked


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_gets_the_numbers_of_all_without_the_store(world: int, get_pool: Any) -> None:
    for right, asked in get_pool(world).run(many_calls):
        assert right and asked < 100


def test_one_rank_is_alone() -> None:
    exchange = NumberExchange("numbers", RankGroup(), integer(-1, 5))
    assert exchange.gather(5) == [5]
    with pytest.raises(ValueError, match="expected an integer"):
        exchange.gather(6)
    exchange.leave(RuntimeError("out of ideas"))
    assert exchange.gather(-1) == [-1]


def late_ranks(rank: int, world: int) -> list[list[int]]:
    """Each rank is late once, for longer than the others wait without a look at the store."""
    group, exchange = exchange_of()
    found = []
    for call in range(world):
        if call == rank:
            time.sleep(0.5)
        found.append(exchange.gather(rank))
    group.barrier()
    return found


def test_a_late_rank_is_waited_for(get_pool: Any) -> None:
    assert get_pool(3).run(late_ranks) == [[[0, 1, 2]] * 3] * 3


def told(work: Callable[[], Any]) -> tuple[type[BaseException], str, int, float]:
    start = time.monotonic()
    with pytest.raises((MoERuntimeError, ValueError)) as caught:
        work()
    seconds = time.monotonic() - start
    return caught.type, str(caught.value), getattr(caught.value, "rank", -1), seconds


def without_rank_1(rank: int, world: int, how: str) -> Any:
    """What a rank is told after rank 1 has come twice and then ends, leaves or stops; and in the call after that."""
    group, exchange = exchange_of(2.0 if how == "stopped" else LIMIT_S)
    pids = [0] * world
    dist.all_gather_object(pids, os.getpid())
    exchange.gather(1)
    exchange.gather(2)
    if rank == 1:
        time.sleep(0.5)  # The others wait.
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "leaves":
            exchange.leave(RuntimeError("out of ideas"))
        elif how == "leaves the group":
            group.leave("out of ideas")
            time.sleep(5)  # Its connections stay.
        return None
    first = told(lambda: exchange.gather(3))
    again = told(lambda: exchange.gather(4))
    if how == "stopped":
        time.sleep(1)
        os.kill(pids[1], signal.SIGCONT)
    return first, again


def check_told(outcomes: list[Outcome], how: str, kind: type, text: str, limit_s: float = SOON_S) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == 1:
            continue
        assert outcome.exitcode == 0
        (found, message, named, seconds), (again, _, _, at_once) = outcome.returned()
        assert (found, named) == (kind, 1), message
        assert text in message and message.startswith("numbers: ")
        assert seconds < limit_s and again is PeerAbortedError and at_once < 1


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_killed_rank_is_named_at_once(world: int) -> None:
    outcomes = run_once(without_rank_1, world, "killed")
    check_told(outcomes, "killed", PeerTimeoutError, "rank 1")
    assert outcomes[1].exitcode == -signal.SIGKILL


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["leaves", "leaves the group"])
def test_a_rank_that_gives_up_ends_the_wait_with_its_reason(world: int, how: str) -> None:
    reason = "RuntimeError: out of ideas" if how == "leaves" else "out of ideas"
    check_told(run_once(without_rank_1, world, how), how, PeerAbortedError, f"rank 1 gave up: {reason}")


@pytest.mark.parametrize("world", [2, 3])
def test_a_stopped_rank_is_named_at_the_limit(world: int) -> None:
    outcomes = run_once(without_rank_1, world, "stopped")
    check_told(outcomes, "stopped", PeerTimeoutError, "rank 1")
    message = f"numbers: rank 1 of {world} did not come within 2 s"
    assert message in [outcome.result[0][1] for outcome in outcomes if outcome.result]


def interrupted(rank: int, world: int) -> Any:
    """Rank 0 is interrupted while it waits for rank 1, which is told of it when it comes."""
    _, exchange = exchange_of()
    exchange.gather(0)
    if rank == 1:
        time.sleep(3)
        return told(lambda: exchange.gather(1))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        exchange.gather(1)
    return time.monotonic() - start


def test_an_interrupt_ends_a_wait_and_the_process() -> None:
    start = time.monotonic()
    waited, late = run_once(interrupted, 2)
    assert waited.error is None and late.error is None, waited.trace + late.trace
    assert waited.result < SOON_S and time.monotonic() - start < LIMIT_S
    kind, message, named, _ = late.result
    assert (kind, named) == (PeerAbortedError, 0) and "rank 0 gave up: KeyboardInterrupt" in message


def other_numbers(rank: int, world: int) -> Any:
    """Rank 1 may send greater numbers than rank 0 takes."""
    _, exchange = exchange_of(most=1000 if rank == 0 else 10**6)
    exchange.gather(7)
    return told(lambda: (exchange.gather(5 + rank * 10**5), exchange.gather(1)))


def test_a_number_that_no_rank_sends_is_refused() -> None:
    here, there = run_once(other_numbers, 2)
    kind, message, named, _ = here.result
    assert (kind, named) == (MoERuntimeError, 1)
    assert message.startswith("numbers: the answer of rank 1 is not one that this program gives: ")
    assert there.result[0] is PeerAbortedError and message in there.result[1]


def elsewhere(rank: int, world: int) -> Any:
    group, exchange = exchange_of()
    exchange.gather(7)
    if rank == 1:
        return told(lambda: group.gather("other", None, messages.nothing))
    return told(lambda: exchange.gather(1))


def test_ranks_in_different_exchanges_do_not_wait_for_each_other() -> None:
    (here, there, third) = (outcome.result for outcome in run_once(elsewhere, 3))
    assert max(result[3] for result in (here, there, third)) < SOON_S
    wrong = "group: its ranks are not at the same step, rank "
    assert there[0] is PeerAbortedError and wrong in there[1]
    for kind, message, *_ in (here, third):
        assert kind in (ValueError, PeerAbortedError) and wrong in message
