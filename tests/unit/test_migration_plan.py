"""Orders of moves, played on lists: every copy finds what it is to copy, and in the end every slot is right.

Over several hosts each rank plays its part of each round, and the network is counted.
"""

from __future__ import annotations

import doctest
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.placement import migration_plan as moves_module
from moe_runtime.placement.migration_plan import SPARE, MigrationPlan, Move, plan_migration, plan_moves
from moe_runtime.placement.placement import Placement, plan_placement


@st.composite
def two_placements(draw: st.DrawFn, ranks: int | None = None) -> tuple[Placement, Placement]:
    """Of equal sizes, their experts in any order on each rank."""
    experts, ranks = draw(st.integers(1, 12)), ranks or draw(st.integers(1, 5))
    slots = draw(st.integers(-(-experts // ranks), experts))

    def one() -> Placement:
        plan = plan_placement(draw(st.permutations(range(experts))), ranks, slots)
        order = [expert for rank in range(ranks) for expert in draw(st.permutations(plan.rank_experts(rank)))]
        return Placement(experts, ranks, tuple(order))

    return one(), one()


@st.composite
def hosts_and_placements(draw: st.DrawFn) -> tuple[int, Placement, Placement]:
    """Ranks of a host, and two placements."""
    hosts, per_host = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return per_host, *draw(two_placements(hosts * per_host))


def play(old: Placement, new: Placement, per_host: int | None = None) -> list[Move]:
    """The moves, after they were made on a dictionary of places."""
    size, per_host = new.slots_per_rank, per_host or new.num_ranks
    places = {divmod(slot, size): expert for slot, expert in enumerate(old.slot_experts)}
    moves = plan_moves(old, new, per_host)
    for move in moves:
        assert places[move.source_rank, move.source_slot] == move.expert
        assert SPARE not in (move.source_slot, move.target_slot) or move.source_slot != move.target_slot
        if move.source_rank != move.target_rank:
            assert all(places.get((move.target_rank, slot)) != move.expert for slot in (SPARE, *range(size)))
        places[move.target_rank, move.target_slot] = move.expert
    assert [places[divmod(slot, size)] for slot in range(new.num_slots)] == list(new.slot_experts)
    return moves


def experts_of_host(placement: Placement, host: int, per_host: int) -> set[int]:
    return {expert for rank in range(per_host) for expert in placement.rank_experts(host * per_host + rank)}


def play_rounds(old: Placement, new: Placement, per_host: int) -> MigrationPlan:
    """The plan, after its rounds were made on a dictionary of places."""
    size = new.slots_per_rank
    places = {divmod(slot, size): expert for slot, expert in enumerate(old.slot_experts)}
    plan = plan_migration(old, new, per_host)
    for one in plan.rounds:
        came = [places[crossing.move.source_rank, crossing.move.source_slot] for crossing in one.crossings]
        targets = [(crossing.move.target_rank, crossing.move.target_slot) for crossing in one.crossings]
        assert came == [crossing.move.expert for crossing in one.crossings]
        assert len(set(targets)) == len(targets)
        places |= zip(targets, came, strict=True)
        for move in one.moves:
            assert move.source_rank // per_host == move.target_rank // per_host
            assert places[move.source_rank, move.source_slot] == move.expert
            places[move.target_rank, move.target_slot] = move.expert
        for ends in (map(plan.sender, one.crossings), map(plan.receiver, one.crossings)):
            assert max(Counter(ends).values(), default=0) <= 1
    assert [places[divmod(slot, size)] for slot in range(new.num_slots)] == list(new.slot_experts)
    return plan


@given(hosts_and_placements())
def test_an_expert_crosses_once_to_each_host_that_newly_needs_it_and_to_no_other(
    case: tuple[int, Placement, Placement],
) -> None:
    per_host, old, new = case
    play(old, new, per_host)
    plan = play_rounds(old, new, per_host)
    crossed = [(c.move.expert, c.move.target_rank // per_host) for c in plan.crossings]
    hosts = range(new.num_ranks // per_host)
    newly = [
        (expert, host)
        for host in hosts
        for expert in experts_of_host(new, host, per_host) - experts_of_host(old, host, per_host)
    ]
    assert sorted(crossed) == sorted(newly)
    assert all(c.move.source_rank // per_host != c.move.target_rank // per_host for c in plan.crossings)
    assert plan == plan_migration(old, new, per_host)
    if len(hosts) == 1:
        assert [list(one.moves) for one in plan.rounds] == [plan_moves(old, new, per_host)] * len(plan.rounds)


def test_examples_in_docstrings() -> None:
    outcome = doctest.testmod(moves_module)
    assert outcome.attempted > 0 and outcome.failed == 0


@given(two_placements())
def test_moves_lead_from_one_placement_to_another(pair: tuple[Placement, Placement]) -> None:
    old, new = pair
    moves = play(old, new)
    assert moves == plan_moves(old, new, old.num_ranks)
    # Each slot that changes is written once and no other; what goes to a spare place was about to be overwritten.
    written = [(m.target_rank, m.target_slot) for m in moves if m.target_slot != SPARE]
    changed = [slot for slot in range(old.num_slots) if old.slot_experts[slot] != new.slot_experts[slot]]
    assert sorted(written) == [divmod(slot, old.slots_per_rank) for slot in changed]
    # A spare place is filled only when those before have been emptied by their last use.
    spares = [i for i, m in enumerate(moves) if m.target_slot == SPARE]
    for first, second in pairwise([*spares, len(moves)]):
        rank = moves[first].target_rank
        assert moves[first].source_rank == rank
        uses = [i for i, m in enumerate(moves) if (m.source_rank, m.source_slot) == (rank, SPARE) and i > first]
        assert uses and uses[0] < second


@given(two_placements())
def test_an_expert_that_is_on_the_rank_already_is_not_sent_there(pair: tuple[Placement, Placement]) -> None:
    old, new = pair
    kept = new.reordered_like(old)
    for move in play(old, kept):
        if move.target_slot != SPARE:
            assert move.expert not in old.rank_experts(move.target_rank)
    assert plan_moves(old, old, old.num_ranks) == []


def test_a_rotation_over_all_ranks_takes_one_spare_place() -> None:
    moves = play(Placement(4, 4, (0, 1, 2, 3)), Placement(4, 4, (1, 2, 3, 0)))
    assert len(moves) == 5 and sum(move.target_slot == SPARE for move in moves) == 1


def test_replicas_are_fetched_from_different_ranks() -> None:
    """Expert 0 lies on ranks 0 and 1 and goes to 2, 3, 4 and 5 too: no rank sends it to more than two."""
    old = Placement(5, 6, (0, 1, 0, 2, 1, 3, 2, 4, 3, 4, 1, 2))
    new = Placement(5, 6, (0, 1, 0, 2, 0, 3, 0, 4, 0, 4, 0, 2))
    senders = [move.source_rank for move in play(old, new) if move.expert == 0]
    assert len(senders) == 4
    assert max(senders.count(rank) for rank in senders) <= 2


def test_rails_share_what_one_rank_sends_to_another() -> None:
    """Rank 4 on host 1 gets all experts of rank 0 on host 0: each rank of both hosts carries one of them, at once."""
    per_host, size = 4, 4
    old = Placement(28, 8, (*range(16), *range(16, 20), *range(16, 20), *range(20, 28)))
    new = Placement(28, 8, (*range(16), *range(size), *range(16, 20), *range(20, 28)))
    plan = play_rounds(old, new, per_host)
    assert len(plan.rounds) == 1
    assert sorted(map(plan.sender, plan.crossings)) == [0, 1, 2, 3]
    assert sorted(map(plan.receiver, plan.crossings)) == [4, 5, 6, 7]


@pytest.mark.parametrize("spare", [0, 32])
def test_no_rank_sends_or_receives_much_more_than_the_mean(spare: int, seed: int) -> None:
    """256 experts on 4 hosts of 8 ranks whose load has changed altogether."""
    rng, ranks, per_host = random.Random(seed), 32, 8

    def plan(like: Placement | None) -> Placement:
        made = plan_placement([rng.paretovariate(1) for _ in range(256)], ranks, (256 + spare) // ranks)
        return made if like is None else made.reordered_like(like)

    old = plan(None)
    migration = play_rounds(old, plan(old), per_host)
    mean = len(migration.crossings) / ranks
    for ends in (map(migration.sender, migration.crossings), map(migration.receiver, migration.crossings)):
        assert max(Counter(ends).values()) <= 3 * mean


def test_a_crossing_takes_the_rail_of_its_source_or_target_where_that_is_free() -> None:
    """An expert that every rank of one host gives to its neighbour on the other takes no copy inside a host."""
    old, per_host = Placement.contiguous(8, 8), 4
    plan = play_rounds(old, Placement(8, 8, (4, 5, 6, 7, 0, 1, 2, 3)), per_host)
    assert all(c.rail == c.move.source_rank % per_host == c.move.target_rank % per_host for c in plan.crossings)


def test_hosts_with_replicas_share_what_another_host_gets() -> None:
    """Experts 0 and 1 lie on hosts 0 and 1 and go to host 2: each of those sends one of them."""
    plan = play_rounds(Placement(4, 3, (0, 1, 0, 1, 2, 3)), Placement(4, 3, (0, 2, 1, 3, 0, 1)), 1)
    senders = [plan.sender(c) for c in plan.crossings if c.move.target_rank == 2]
    assert sorted(senders) == [0, 1]


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"new: expected 4 experts in 4 slots on 2 .* got 4 experts in 8"):
        plan_moves(Placement.contiguous(4, 2), Placement(4, 2, (0, 1, 2, 3) * 2), 2)
    with pytest.raises(ValueError, match="ranks_per_host: expected a divisor of 4 ranks, got 3"):
        plan_migration(Placement.contiguous(4, 4), Placement.contiguous(4, 4), 3)
