"""The order in which experts move from one placement to another in place, so that no move overwrites what is needed."""

from __future__ import annotations

from dataclasses import dataclass

from moe_runtime.placement.placement import Placement

SPARE = -1
"""A rank's extra place for one expert, which breaks cycles of moves."""


@dataclass(frozen=True)
class Move:
    """One copy of an expert: from slot `source_slot` (of `0 .. S - 1`, or `SPARE`) of one rank to that of another."""

    expert: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slot: int


def plan_moves(old: Placement, new: Placement) -> list[Move]:
    """Copies that turn `old` into `new` in this order; the same list on every rank.

    Each rank only has to keep the order among its own moves, since only a rank itself reads and writes its slots. A
    slot may be overwritten once no later move needs its expert, or another slot holds it too. If no slot may be, the
    remaining moves are cycles of experts with one slot each: one of them moves to its rank's spare place. At most one
    spare place of the group is in use at a time. A copy comes from the own rank if possible, else from the rank that
    has sent least.

    Raises:
        ValueError: placements of other sizes.

    >>> for move in plan_moves(Placement(2, 2, (0, 1)), Placement(2, 2, (1, 0))): print(move)
    Move(expert=0, source_rank=0, source_slot=0, target_rank=0, target_slot=-1)
    Move(expert=1, source_rank=1, source_slot=0, target_rank=0, target_slot=0)
    Move(expert=0, source_rank=0, source_slot=-1, target_rank=1, target_slot=0)
    """
    if new.sizes != old.sizes:
        raise ValueError(f"new: expected {old.sizes}, got {new.sizes}")
    size = old.slots_per_rank
    held = dict(enumerate(old.slot_experts))
    places: list[set[tuple[int, int]]] = [{divmod(slot, size) for slot in slots} for slots in old.replicas]
    # One slot of each rank in turn, so that ranks can work on different moves at the same time.
    pending = [slot for index in range(size) for slot in range(index, old.num_slots, size)]
    pending = [slot for slot in pending if new.slot_experts[slot] != held[slot]]
    needed = [0] * old.num_experts
    for slot in pending:
        needed[new.slot_experts[slot]] += 1
    sent = [0] * old.num_ranks
    moves: list[Move] = []

    def copy(expert: int, target_rank: int, target_slot: int) -> None:
        source_rank, source_slot = min(
            places[expert], key=lambda place: (place[0] != target_rank, sent[place[0]], place)
        )
        sent[source_rank] += source_rank != target_rank
        moves.append(Move(expert, source_rank, source_slot, target_rank, target_slot))
        places[expert].add((target_rank, target_slot))

    while pending:
        free = (slot for slot in pending if not needed[held[slot]] or len(places[held[slot]]) > 1)
        slot = next(free, pending[0])
        if needed[held[slot]] and len(places[held[slot]]) == 1:
            copy(held[slot], slot // size, SPARE)
        pending.remove(slot)
        places[held[slot]].discard(divmod(slot, size))
        expert = held[slot] = new.slot_experts[slot]
        copy(expert, *divmod(slot, size))
        needed[expert] -= 1
        if not needed[expert]:
            places[expert] = {place for place in places[expert] if place[1] != SPARE}
    return moves
