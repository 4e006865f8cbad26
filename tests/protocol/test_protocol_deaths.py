"""Ranks that are killed at every point of a step, one after the other, until one is left: who lives names who is dead.

A group loses its last rank, those that are left make a group of one less and so on: each time at another point.
"""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from moe_runtime.comm.errors import PeerTimeoutError, Phase
from moe_runtime.context.expert_parallel import ExpertParallelContext
from tests.protocol.test_protocol import expected_y, expert_rows, make_dispatcher, step_inputs
from tests.support.comparison import assert_same_bits
from tests.support.pool import run_once
from tests.support.protocol_clock import StandingClock
from tests.support.protocol_hooks import hooked

pytestmark = pytest.mark.cpu_only

MOST = 2
PHASES = {
    "dispatch_send": Phase.DISPATCH_SEND,
    "dispatch_recv": Phase.DISPATCH_RECV,
    "combine_send": Phase.COMBINE_SEND,
    "combine_recv": Phase.COMBINE_RECV,
}
DEATHS = {
    "before dispatch_send": Phase.DISPATCH_RECV,
    "before dispatch_send, nothing combined": Phase.DISPATCH_SEND,
    "before the 1st dispatch_flag": Phase.DISPATCH_RECV,
    "before the 2nd dispatch_flag": Phase.DISPATCH_RECV,
    "before dispatch_recv": Phase.COMBINE_RECV,
    "before combine_send": Phase.COMBINE_RECV,
    "before the 2nd combine_flag": Phase.COMBINE_RECV,
    "before combine_recv": Phase.DISPATCH_RECV,
    "after combine_recv": Phase.DISPATCH_RECV,
}
"""Where a rank dies, and the phase in which the others miss it. Its first flag goes to rank 0, which is then told of
the failure by those that got none."""
DOOMED = 3
"""The epoch in which it dies, or after which."""


def missed_in(death: str, world: int) -> Phase:
    """The phase in which the ranks that are left miss the last of `world`."""
    if world == 2 and "2nd" in death:
        # The one flag went to the one that is left.
        return Phase.COMBINE_RECV if "dispatch" in death else Phase.DISPATCH_RECV
    return DEATHS[death]


def lose_one(group: dist.ProcessGroup, death: str, seed: int) -> None:
    """Steps of a group of which the last rank dies; each of the others finds out who, and where."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    context = ExpertParallelContext(group, transport="shared", engine="torch", timeout_s=7.5)
    dispatcher = make_dispatcher(context, "bf16", "gathered", MOST)
    clock = StandingClock(context, dead=world - 1)
    doomed = rank == world - 1
    combined = "nothing combined" not in death
    stores: dict[str, int] = {}
    epoch = [0]

    def die_at(point: str) -> None:
        if doomed and epoch[0] == DOOMED and point == death.partition(",")[0]:
            clock.die()

    def on_phase(phase: str, ended: bool) -> None:
        if phase == "dispatch_send" and not ended:
            epoch[0] += 1
            stores.clear()
        die_at(f"{'after' if ended else 'before'} {phase}")
        clock.enter(None if ended else PHASES[phase], epoch[0])

    def on_store(field: str, peer: int, half: int, value: int) -> None:
        stores[field] = stores.get(field, 0) + 1
        for number, name in ((1, "1st"), (2, "2nd")):
            if stores[field] == number:
                die_at(f"before the {name} {field}")

    context.allocate()
    dist.barrier(group)
    with pytest.MonkeyPatch.context() as patch, hooked(dispatcher, on_store, on_phase):
        clock.install(patch)
        try:
            for number in range(1, DOOMED + 2):
                inputs = step_inputs(seed, number, world, MOST)
                arrived = dispatcher.dispatch(*inputs[rank])
                if combined:
                    y = dispatcher.combine(expert_rows(arrived, rank), arrived.handle)
                    assert_same_bits(y, expected_y(inputs, dispatcher.geometry), f"y of epoch {number}")
        except PeerTimeoutError as error:
            none = inputs[rank].x[:0], inputs[rank].topk_idx[:0], inputs[rank].topk_weights[:0]
            for again in (context.check, lambda: dispatcher.dispatch(*none)):
                with pytest.raises(PeerTimeoutError):
                    again()
            context.close()
            assert (error.rank, error.phase) == (world - 1, missed_in(death, world)), (death, world, str(error))
            assert f"rank {world - 1} did not answer within 7.5 s" in str(error)
            return
    raise AssertionError("no error was raised")


def lose_all(rank: int, world: int, deaths: list[str], seed: int) -> int:
    """How many deaths it has lived through."""
    for left, death in zip(range(world, 1, -1), deaths, strict=True):
        lose_one(dist.new_group(list(range(left)), use_local_synchronization=True), death, seed + left)
    return len(deaths)


@pytest.mark.parametrize("deaths", [list(DEATHS)[:7], [list(DEATHS)[i] for i in (2, 7, 8)]])
def test_who_is_left_names_who_died(deaths: list[str], seed: int) -> None:
    outcomes = run_once(lose_all, len(deaths) + 1, deaths, seed, timeout=170)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.trace}"
    assert [outcome.exitcode for outcome in outcomes] == [0] + [-signal.SIGKILL] * len(deaths)
    assert outcomes[0].result == len(deaths)
