"""Ranks that go on after the death of others; `tests.support.survivors` makes more and chooses them at random."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from moe_runtime.comm.errors import ExpertsLostError, MoERuntimeError, RankRemovedError
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.membership import Membership
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.layer import MoELayer
from tests.support import survivors
from tests.support.exchange_data import EXPERTS, HIDDEN, TOP_K, config, placements, rank_input
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once
from tests.support.survivors import Fate, Fault, Job, Result, faults_of, places, run_job

pytestmark = pytest.mark.cpu_only

PARALLEL = 3
HALF_DONE = 4
"""The job in which ranks 0 and 1 have the result of the step, and rank 3 has not."""
JOBS = [
    Job(4, (Fault(2, "step (3)"),)),
    Job(4, (Fault(1, "dispatch_send, begin (3)"),)),
    Job(4, (Fault(3, "store, end (10)"),)),
    Job(4, (Fault(0, "dispatch_recv, end (3)"),)),
    Job(4, (Fault(2, "flag, begin (11)"),)),
    Job(4, (Fault(1, "combine_recv, begin (3)"),)),
    Job(4, (Fault(0, "store, end (10)"), Fault(2, "combine_recv, begin (3)"))),
    Job(4, (Fault(3, "combine_send, begin (3)"), Fault(1, "agree, end (1)"))),
    Job(4, (Fault(3, "store, end (10)", stop=True),)),
    Job(4, (Fault(1, "combine_send, begin (3)"), Fault(2, "make memory, end (1)", stop=True))),
]


@pytest.fixture(scope="module")
def fates() -> list[list[Fate]]:
    """Of all ranks of each of `JOBS`."""
    survivors.prepare()
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(run_job, JOBS))


def test_survivors_go_on_with_the_bits_of_the_smaller_group(fates: list[list[Fate]]) -> None:
    faults = [f"{job}: {fault}" for job, found in zip(JOBS, fates, strict=True) for fault in faults_of(job, found)]
    assert not faults, "\n".join(faults)


def test_a_rank_that_has_its_result_repeats_the_step_for_the_others(fates: list[list[Fate]]) -> None:
    groups = [fates[HALF_DONE][rank].results[2].members for rank in JOBS[HALF_DONE].survivors]
    assert groups == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 3)]


def test_other_bits_and_other_groups_are_found(fates: list[list[Fate]]) -> None:
    job, found = JOBS[0], copy.deepcopy(fates[0])
    right = found[1].results[4]
    for wrong, message in (
        (Result(4, right.members, right.at, bytes(len(right.y))), "other bits"),
        (Result(4, (0, 1, 2, 3), right.at, survivors.expected(4, 3, (0, 1, 2, 3))[4, 1]), "its group grew"),
        (Result(3, right.members, right.at, right.y), "other bits"),
    ):
        found[1].results[4] = wrong
        assert any(message in fault for fault in faults_of(job, found)), message


def test_faults_are_chosen_at_random_from_all_places() -> None:
    chooser = random.Random(0)
    faults = [fault for _ in range(1000) for fault in survivors.random_job(chooser).faults]
    assert {fault.place for fault in faults} == {*places(4), *places(8), *survivors.during_recovery()}
    assert {fault.stop for fault in faults} == {True, False} and {fault.rank for fault in faults} == set(range(8))


def lose(rank: int, world: int, replicated: bool) -> tuple[int, int]:
    """Rank 1 dies in the second step. Without replicas the others cannot go on."""
    with ExpertParallelContext(
        transport="shared", timeout_s=WITHOUT_ONE_S, startup_timeout_s=PATIENCE_S, on_failure="continue"
    ) as context:
        placement = placements(world, spare=EXPERTS)[0] if replicated else None
        layer = MoELayer(config(), context, placement=placement)
        layer.load_random(0)
        layer.warm_up()
        mine = rank_input(0, rank, 3, HIDDEN, EXPERTS, TOP_K)
        stale = TokenDispatcher.from_config(context, config())
        layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        assert context.recovery is not None and y.isfinite().all()
        if world == 2:  # alone, so that nobody else is aborted
            with pytest.raises(ValueError, match=r"context: its ranks have changed .* \(generation 0, now 1\)"):
                stale.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        return context.rank, context.recovery.steps_repeated


def test_experts_that_died_end_the_group_and_are_named() -> None:
    outcomes = run_once(lose, 3, False)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, ExpertsLostError), outcomes[rank]
        assert "layer 0: no rank that is left holds expert 4, 5, 6; ranks 0, 2 are left" in str(error)


def test_one_rank_goes_on_alone_and_refuses_dispatchers_of_before() -> None:
    assert run_once(lose, 2, True)[0].result == (0, 1)


def ask_for(rank: int, world: int, transport: str, on_failure: list[str]) -> str:
    try:
        with ExpertParallelContext(transport=transport, on_failure=on_failure[rank], startup_timeout_s=PATIENCE_S) as c:
            layer = MoELayer(config(), c)
            layer.load_random(0)
            layer.warm_up()
    except (ValueError, MoERuntimeError) as error:
        return str(error)
    return ""


def test_transports_whose_memory_does_not_survive_are_refused(get_pool: Any) -> None:
    texts = get_pool(2).run(ask_for, "collective", ["continue", "continue"])
    assert all(text.startswith("on_failure: expected 'abort' with transport='collective'") for text in texts), texts


def test_ranks_must_agree_on_it(get_pool: Any) -> None:
    texts = get_pool(2).run(ask_for, "shared", ["continue", "abort"])
    assert all("on_failure (context): rank 0: 'continue', rank 1: 'not given'" in text for text in texts), texts


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="on_failure: expected abort or continue"):
        ExpertParallelContext(on_failure="go on")
    with pytest.raises(ValueError, match="on_failure: expected 'abort' with heap"):
        ExpertParallelContext(heap=PrivateHeap(), on_failure="continue")
    with ExpertParallelContext(transport="private", on_failure="continue") as context:
        assert context.recovery is None and context.members == (0,)


def memberships(count: int) -> list[Membership]:
    store = dist.HashStore()
    return [Membership(RankGroup._at_start(store, rank, count, 10.0)) for rank in range(count)]


def together(work: list[Any]) -> list[Any]:
    """What each of `work` returns or raises, run at the same time."""
    found: list[Any] = [None] * len(work)

    def run(number: int) -> None:
        try:
            found[number] = work[number]()
        except MoERuntimeError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def test_who_comes_late_is_told_that_it_is_out() -> None:
    group = memberships(4)
    record = {0: 7, 2: 8, 3: 7}
    found = together([lambda r=r: group[r].agree(record[r], {1}, PATIENCE_S) for r in record])
    assert found == [record] * 3
    assert all(group[r].members == (0, 2, 3) and group[r].generation == 1 for r in record)
    with pytest.raises(RankRemovedError, match="rank 1 is out: rank 0, 2, 3 went on without it in generation 1") as e:
        group[1].agree(7, set(), PATIENCE_S)
    assert e.value.rank == 1 and group[1].generation == 0


def test_a_suspect_that_comes_in_time_stays() -> None:
    """A rank that only one other misses, wrongly: it takes part before the decision."""
    group = memberships(3)
    works = [lambda r=r: group[r].agree(1, {2} if r == 0 else set(), PATIENCE_S) for r in (2, 1)]
    group[2]._ask(lambda store, prefix: store.set(f"{prefix}/{group[2]._keys('here/2')}", "1"))
    assert together([*works, lambda: group[0].agree(1, {2}, PATIENCE_S)]) == [{0: 1, 1: 1, 2: 1}] * 3


def test_who_does_not_come_is_waited_for_no_longer_than_the_window() -> None:
    group = memberships(3)
    assert together([lambda r=r: group[r].agree(0, set(), 0.3) for r in (0, 1)]) == [{0: 0, 1: 0}] * 2
    assert [group[r].group().world_size for r in (0, 1)] == [2, 2]


def test_only_one_of_two_parties_goes_on() -> None:
    """Ranks that suspect each other: one record is written, and the others learn that they are out."""
    group = memberships(4)
    found = together([lambda r=r: group[r].agree(0, {(r + 2) % 4, (r + 1) % 4}, 0.2) for r in range(4)])
    records = [answer for answer in found if isinstance(answer, dict)]
    assert records and all(record == records[0] for record in records)
    for rank, answer in enumerate(found):
        assert isinstance(answer, dict) if rank in records[0] else isinstance(answer, RankRemovedError)


def test_a_record_that_no_rank_writes_is_refused() -> None:
    for text in ("no JSON", '{"members": [[0, 1], [9, 1]]}', '{"members": 3}', '{"others": []}'):
        rank = memberships(2)[0]
        key = rank._keys("members")
        rank._ask(lambda store, prefix, key=key, text=text: store.set(f"{prefix}/{key}", text))
        with pytest.raises(MoERuntimeError, match="recovery: the record of members is none"):
            rank.agree(0, set(), 0.1)
