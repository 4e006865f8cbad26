"""The order in which experts move from one placement to another in place, so that no move overwrites what is needed.

Over several hosts a plan has rounds. In each, experts cross the network, and then move inside their hosts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from moe_runtime.placement.placement import Placement

SPARE = -1
"""A rank's extra place for one expert, which breaks cycles of moves."""

Place = tuple[int, int]
"""A rank, and one of its slots or `SPARE`."""


@dataclass(frozen=True)
class Move:
    """One copy of an expert: from slot `source_slot` (of `0 .. S - 1`, or `SPARE`) of one rank to that of another."""

    expert: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slot: int


@dataclass(frozen=True)
class Crossing:
    """A move to another host, over the network between the ranks number `rail` of the two hosts."""

    move: Move
    rail: int


@dataclass(frozen=True)
class Round:
    """Crossings, which all read their sources before any writes its target, then moves inside hosts, in order.

    A rank sends at most one crossing of a round over the network, and receives at most one.
    """

    crossings: tuple[Crossing, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class MigrationPlan:
    """All moves from one placement to another, on hosts of `ranks_per_host` ranks."""

    ranks_per_host: int
    rounds: tuple[Round, ...]

    @property
    def crossings(self) -> list[Crossing]:
        """Those of all rounds."""
        return [crossing for one in self.rounds for crossing in one.crossings]

    def sender(self, crossing: Crossing) -> int:
        """The rank that sends it over the network."""
        return crossing.move.source_rank // self.ranks_per_host * self.ranks_per_host + crossing.rail

    def receiver(self, crossing: Crossing) -> int:
        """The rank that receives it from the network."""
        return crossing.move.target_rank // self.ranks_per_host * self.ranks_per_host + crossing.rail


def plan_migration(old: Placement, new: Placement, ranks_per_host: int) -> MigrationPlan:
    """The moves of `plan_moves` in rounds; the same plan on every rank. On one host it has one round at most.

    Each move is in the first round that it can be in. A crossing takes the rail that is free first, and among equals
    that of its source or target, which saves copies inside hosts.

    Raises:
        ValueError: as `plan_moves`.

    >>> plan = plan_migration(Placement(2, 4, (0, 1, 1, 1)), Placement(2, 4, (0, 1, 0, 0)), 2)
    >>> plan.rounds[0].crossings
    (Crossing(move=Move(expert=0, source_rank=0, source_slot=0, target_rank=2, target_slot=0), rail=0),)
    >>> plan.rounds[0].moves
    (Move(expert=0, source_rank=2, source_slot=0, target_rank=3, target_slot=0),)
    """
    crossings: defaultdict[int, list[Crossing]] = defaultdict(list)
    inside: defaultdict[int, list[Move]] = defaultdict(list)
    # When a place was read and written last. Crossings of round `n` are at `2 n`, moves inside hosts at `2 n + 1`.
    read: defaultdict[Place, int] = defaultdict(lambda: -1)
    written: defaultdict[Place, int] = defaultdict(lambda: -1)
    busy: set[tuple[int, str, int]] = set()
    for move in plan_moves(old, new, ranks_per_host):
        source, target = (move.source_rank, move.source_slot), (move.target_rank, move.target_slot)
        filled = max(written[source], written[target])
        if move.source_rank // ranks_per_host == move.target_rank // ranks_per_host:
            number = max(filled, read[target], 0) // 2
            inside[number].append(move)
            time = 2 * number + 1
        else:
            first = max(filled // 2 + 1, (read[target] + 1) // 2)
            number, crossing = _on_a_free_rail(move, first, ranks_per_host, busy)
            crossings[number].append(crossing)
            time = 2 * number
        read[source] = max(read[source], time)
        written[target] = time
    count = max([*crossings, *inside], default=-1) + 1
    rounds = tuple(Round(tuple(crossings[number]), tuple(inside[number])) for number in range(count))
    return MigrationPlan(ranks_per_host, rounds)


def _on_a_free_rail(
    move: Move, first: int, ranks_per_host: int, busy: set[tuple[int, str, int]]
) -> tuple[int, Crossing]:
    """The round from `first` on, and the rail, that `move` crosses in; adds to `busy` what it takes there."""
    source_host, source_rail = divmod(move.source_rank, ranks_per_host)
    target_host, target_rail = divmod(move.target_rank, ranks_per_host)

    def ends(number: int, rail: int) -> set[tuple[int, str, int]]:
        return {
            (number, "sends", source_host * ranks_per_host + rail),
            (number, "receives", target_host * ranks_per_host + rail),
        }

    def cost(rail: int) -> tuple[int, int, int]:
        number = first
        while ends(number, rail) & busy:
            number += 1
        return number, (rail != source_rail) + (rail != target_rail), rail

    number, _, rail = min(map(cost, range(ranks_per_host)))
    busy |= ends(number, rail)
    return number, Crossing(move, rail)


def plan_moves(old: Placement, new: Placement, ranks_per_host: int) -> list[Move]:
    """Copies that turn `old` into `new` in this order; the same list on every rank.

    Each rank only has to keep the order among its own moves, since only a rank itself reads and writes its slots. A
    slot may be overwritten once no later move needs its expert, or another slot holds it too, one of this host where a
    move to this host needs it. If no slot may be, the remaining moves are cycles of experts: one of them moves to its
    rank's spare place. At most one spare place of the group is in use at a time.

    A copy comes from the own rank if possible, else from the rank of the own host that has sent least, else from the
    host that has sent least. So an expert crosses to a host once at most, and never to one that had it.

    Args:
        ranks_per_host: a divisor of the number of ranks; all of them for one host.

    Raises:
        ValueError: placements of other sizes, or hosts that do not divide the ranks.

    >>> for move in plan_moves(Placement(2, 2, (0, 1)), Placement(2, 2, (1, 0)), 2): print(move)
    Move(expert=0, source_rank=0, source_slot=0, target_rank=0, target_slot=-1)
    Move(expert=1, source_rank=1, source_slot=0, target_rank=0, target_slot=0)
    Move(expert=0, source_rank=0, source_slot=-1, target_rank=1, target_slot=0)
    """
    if new.sizes != old.sizes:
        raise ValueError(f"new: expected {old.sizes}, got {new.sizes}")
    if old.num_ranks % ranks_per_host:
        raise ValueError(f"ranks_per_host: expected a divisor of {old.num_ranks} ranks, got {ranks_per_host}")
    size = old.slots_per_rank
    held = dict(enumerate(old.slot_experts))
    places: list[set[Place]] = [{divmod(slot, size) for slot in slots} for slots in old.replicas]
    # One slot of each rank in turn, so that ranks can work on different moves at the same time.
    pending = [slot for index in range(size) for slot in range(index, old.num_slots, size)]
    pending = [slot for slot in pending if new.slot_experts[slot] != held[slot]]
    needed = [0] * old.num_experts
    needed_on: Counter[tuple[int, int]] = Counter()
    for slot in pending:
        needed[new.slot_experts[slot]] += 1
        needed_on[new.slot_experts[slot], slot // size // ranks_per_host] += 1
    sent, crossed = Counter[int](), Counter[int]()
    moves: list[Move] = []

    def must_stay(expert: int, place: Place) -> bool:
        """Whether a later move can find the expert here only, or can find it on this host here only."""
        if not needed[expert]:
            return False
        host, others = place[0] // ranks_per_host, places[expert] - {place}
        near = any(rank // ranks_per_host == host for rank, _ in others)
        return not others or bool(needed_on[expert, host] and not near)

    def copy(expert: int, target_rank: int, target_slot: int) -> None:
        host = target_rank // ranks_per_host

        def cost(place: Place) -> tuple[bool, bool, int, Place]:
            away = place[0] // ranks_per_host != host
            load = crossed[place[0] // ranks_per_host] if away else sent[place[0]]
            return place[0] != target_rank, away, load, place

        source_rank, source_slot = min(places[expert], key=cost)
        sent[source_rank] += source_rank != target_rank
        crossed[source_rank // ranks_per_host] += source_rank // ranks_per_host != host
        moves.append(Move(expert, source_rank, source_slot, target_rank, target_slot))
        places[expert].add((target_rank, target_slot))

    while pending:
        slot = next((slot for slot in pending if not must_stay(held[slot], divmod(slot, size))), pending[0])
        if must_stay(held[slot], divmod(slot, size)):
            copy(held[slot], slot // size, SPARE)
        pending.remove(slot)
        places[held[slot]].discard(divmod(slot, size))
        expert = held[slot] = new.slot_experts[slot]
        copy(expert, *divmod(slot, size))
        needed[expert] -= 1
        needed_on[expert, slot // size // ranks_per_host] -= 1
        places[expert] = {place for place in places[expert] if place[1] != SPARE or must_stay(expert, place)}
    return moves
