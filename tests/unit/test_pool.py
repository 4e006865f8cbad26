"""The pool of worker processes itself: every way in which a rank can fail is put into words, and the pool goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from moe_runtime.comm.errors import PeerTimeoutError
from tests.support.pool import RankFailure, WorkerPool, run_once


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def who(rank: int, world: int, *args: object) -> tuple[object, ...]:
    return rank, world, os.environ.get("TRITON_INTERPRET"), torch.get_num_threads(), torch.cuda.is_available(), *args


def process(rank: int, world: int) -> int:
    return os.getpid()


def test_results_come_by_rank_and_workers_stay(pool: WorkerPool) -> None:
    assert pool.run(who, "a", 3) == [(rank, 2, "1", 1, False, "a", 3) for rank in range(2)]
    assert pool.run(process) == pool.run(process)


class Odd(Exception):
    """Cannot be made again from its arguments, so cannot be pickled."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


def fail(rank: int, world: int, how: str) -> str:
    if rank == 1 and how == "raise":
        raise PeerTimeoutError("gone", 7)
    if rank == 1 and how == "odd":
        raise Odd("unpicklable", 3)
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "hang":
        time.sleep(100)
    return how


def test_exceptions_come_back(pool: WorkerPool) -> None:
    before = pool.run(process)
    good, bad = pool.outcomes(fail, "raise")
    assert good.result == "raise" and good.error is None
    assert isinstance(bad.error, PeerTimeoutError) and bad.error.rank == 7
    assert 'raise PeerTimeoutError("gone", 7)' in bad.trace
    assert isinstance(pool.outcomes(fail, "odd")[1].error, RankFailure)
    with pytest.raises(RankFailure, match=r"(?s)fail failed on 1 rank.*rank 1 of 2.*PeerTimeoutError: gone"):
        pool.run(fail, "raise")
    assert pool.run(process) == before


def test_a_hang_tells_where_and_the_pool_is_built_anew(pool: WorkerPool) -> None:
    before = pool.run(process)
    with pytest.raises(RankFailure, match=r"(?s)fail: rank 1 did not answer within.*line \d+ in fail"):
        # Until then rank 0 has answered and rank 1 fallen asleep, on a loaded machine too.
        pool.run(fail, "hang", timeout=4.0)
    assert not set(pool.run(process)) & set(before)


def test_a_death_is_told_and_the_pool_is_built_anew(pool: WorkerPool) -> None:
    with pytest.raises(RankFailure, match="fail: rank 1 died with exit code -9"):
        pool.run(fail, "die")
    assert pool.run(who)[1][0] == 1


def test_fresh_processes_may_die() -> None:
    outcomes = run_once(fail, 2, "die")
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL]
    assert outcomes[0].result == "die"
