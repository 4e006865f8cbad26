"""Where experts go whose last slot is gone: survivors of a death get new slots for them."""

from __future__ import annotations

from collections.abc import Sequence

from moe_runtime.kernels.formats.number_formats import ceil_div
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
