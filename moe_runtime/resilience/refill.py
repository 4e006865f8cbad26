"""Where experts go whose last slot is gone: survivors of a death get new slots for them.

And how a rank that rejoins gets its experts from the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.placement.migration_plan import Move
from moe_runtime.placement.placement import Placement


def missing_experts(held: Sequence[Sequence[int]], num_experts: int) -> tuple[int, ...]:
    """The experts of `0 .. num_experts - 1` that no rank holds, ascending."""
    return tuple(sorted(set(range(num_experts)) - {expert for experts in held for expert in experts}))


def refill(held: Sequence[Sequence[int]], num_experts: int) -> Placement:
    """The placement in which ranks keep what they hold, in its slots, and get the missing experts in slots behind.

    A missing expert goes to the rank with the most free slots. Slots that are left, since all ranks have equally many,
    get replicas of the missing experts: nothing is to be loaded that a rank holds already.

    Args:
        held: experts of each rank, different ones; ranks differ by at most one in their number.
        num_experts: `E`.

    Raises `ValueError` as `Placement`.

    >>> refill([[0, 1], [2, 3]], 6).slot_experts
    (0, 1, 4, 2, 3, 5)
    >>> refill([[0, 1], [2, 3]], 5).slot_experts
    (0, 1, 4, 2, 3, 4)
    """
    ranks = [list(experts) for experts in held]
    missing = missing_experts(held, num_experts)
    slots = max(ceil_div(sum(map(len, ranks)) + len(missing), len(ranks)), max(map(len, ranks)))
    for expert in missing:
        min(ranks, key=len).append(expert)
    for number, experts in enumerate(ranks):
        turned = missing[number:] + missing[:number]
        for expert in turned:
            if len(experts) < slots and expert not in experts:
                experts.append(expert)
    return Placement(num_experts, len(ranks), tuple(expert for experts in ranks for expert in experts))


def plan_copies(
    wanted: Sequence[Sequence[int]], kept: Sequence[int], sources: Mapping[int, Sequence[int]]
) -> tuple[Move, ...]:
    """Copies that fill the slots which ranks do not have yet; the same on every rank. Sources do not change meanwhile.

    A copy comes from the own rank if possible, else from the rank that has sent least.

    Args:
        wanted: experts of each rank, slot by slot.
        kept: how many of these slots each rank has already, the first ones.
        sources: experts of ranks, slot by slot, from which copies are made. They have all that are wanted.

    >>> plan_copies([[0, 1], [2, 3]], [2, 0], {0: [0, 1, 2, 3]})[0]
    Move(expert=2, source_rank=0, source_slot=2, target_rank=1, target_slot=0)
    """
    sent = Counter[int]()
    moves = []
    for slot in range(max(map(len, wanted))):
        for rank, experts in enumerate(wanted):
            if kept[rank] <= slot < len(experts):
                holders = [holder for holder, held in sources.items() if experts[slot] in held]
                source = min(holders, key=lambda holder: (holder != rank, sent[holder], holder))
                sent[source] += source != rank
                moves.append(Move(experts[slot], source, list(sources[source]).index(experts[slot]), rank, slot))
    return tuple(moves)
