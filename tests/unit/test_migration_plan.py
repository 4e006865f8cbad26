"""Orders of moves, played on lists: every copy finds what it is to copy, and in the end every slot is right."""

from __future__ import annotations

import doctest
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.placement import migration_plan as moves_module
from moe_runtime.placement.migration_plan import SPARE, Move, plan_moves
from moe_runtime.placement.placement import Placement, plan_placement


@st.composite
def two_placements(draw: st.DrawFn) -> tuple[Placement, Placement]:
    """Of equal sizes, their experts in any order on each rank."""
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    slots = draw(st.integers(-(-experts // ranks), experts))

    def one() -> Placement:
        plan = plan_placement(draw(st.permutations(range(experts))), ranks, slots)
        order = [expert for rank in range(ranks) for expert in draw(st.permutations(plan.rank_experts(rank)))]
        return Placement(experts, ranks, tuple(order))

    return one(), one()


def play(old: Placement, new: Placement) -> list[Move]:
    """The moves, after they were made on a dictionary of places."""
    size = new.slots_per_rank
    places = {divmod(slot, size): expert for slot, expert in enumerate(old.slot_experts)}
    moves = plan_moves(old, new)
    for move in moves:
        assert places[move.source_rank, move.source_slot] == move.expert
        assert SPARE not in (move.source_slot, move.target_slot) or move.source_slot != move.target_slot
        if move.source_rank != move.target_rank:
            assert all(places.get((move.target_rank, slot)) != move.expert for slot in (SPARE, *range(size)))
        places[move.target_rank, move.target_slot] = move.expert
    assert [places[divmod(slot, size)] for slot in range(new.num_slots)] == list(new.slot_experts)
    return moves


def test_examples_in_docstrings() -> None:
    outcome = doctest.testmod(moves_module)
    assert outcome.attempted > 0 and outcome.failed == 0


@given(two_placements())
def test_moves_lead_from_one_placement_to_another(pair: tuple[Placement, Placement]) -> None:
    old, new = pair
    moves = play(old, new)
    assert moves == plan_moves(old, new)
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
    assert plan_moves(old, old) == []


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


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"new: expected 4 experts in 4 slots on 2 .* got 4 experts in 8"):
        plan_moves(Placement.contiguous(4, 2), Placement(4, 2, (0, 1, 2, 3) * 2))
