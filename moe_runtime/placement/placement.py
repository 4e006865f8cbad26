"""Which rank holds which expert, as data: every rank has equally many slots, and every slot holds an expert.

Hot experts may have several slots (replicas), at most one per rank. With `S` slots on a rank, slot `s` is number
`s % S` of rank `s // S`. The exchange routes tokens to slots, as it routes them to experts without a placement.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from moe_runtime.comm.messages import unique_keys
from moe_runtime.config import MAX_EXPERTS, PlacementConfig
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.support.arguments import check_integer, check_is_tensor, check_kind, describe, is_real
from moe_runtime.support.regular_files import read_regular

MAX_TEXT_LENGTH = 1 << 21
"""Most characters of a placement as JSON, or of a load: `MAX_EXPERTS` numbers need at most 24 each."""


@dataclass(frozen=True)
class Placement:
    """The expert of every slot. All ranks of a group need equal ones. Placements compare by value and travel as JSON.

    Attributes:
        num_experts: experts of the layer, `E`.
        num_ranks: ranks of the group, `W`.
        slot_experts: expert of each slot, `W * S` ids, rank by rank.

    Raises:
        ValueError: unequal numbers of slots per rank, an id out of range, an expert without a slot, or one twice on a
            rank.

    >>> Placement(3, 2, (0, 1, 2, 0)).rank_experts(1)
    (2, 0)
    """

    num_experts: int
    num_ranks: int
    slot_experts: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, value in (("num_experts", self.num_experts), ("num_ranks", self.num_ranks)):
            check_integer(name, value)
        check_kind("slot_experts", self.slot_experts, tuple)
        num_slots = self.num_slots
        if num_slots > MAX_EXPERTS:
            raise ValueError(f"slot_experts: expected at most {MAX_EXPERTS} slots, got {num_slots}")
        if self.num_experts > MAX_EXPERTS:
            raise ValueError(f"num_experts: expected at most {MAX_EXPERTS}, got {describe(self.num_experts)}")
        if num_slots % self.num_ranks:
            ranks = describe(self.num_ranks)
            raise ValueError(f"slot_experts: expected as many slots on each of {ranks} ranks, got {num_slots}")
        for slot, expert in enumerate(self.slot_experts):
            if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < self.num_experts:
                raise ValueError(
                    f"slot_experts: expected ids of 0 .. {self.num_experts - 1}, got {describe(expert)} in slot {slot}"
                )
        if missing := sorted(set(range(self.num_experts)) - set(self.slot_experts)):
            raise ValueError(f"slot_experts: expected a slot for each expert, got none for {_listed(missing)}")
        for rank in range(self.num_ranks):
            experts = self.rank_experts(rank)
            if len(set(experts)) < len(experts):
                twice = sorted(expert for expert in set(experts) if experts.count(expert) > 1)
                raise ValueError(
                    f"slot_experts: expected an expert once on a rank, rank {rank} has {_listed(twice)} twice"
                )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """Each expert once, in ascending order, as without a placement. `num_ranks` must divide `num_experts`."""
        check_integer("num_experts", num_experts)
        check_integer("num_ranks", num_ranks)
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"num_experts: expected at most {MAX_EXPERTS}, got {describe(num_experts)}")
        if num_experts % num_ranks:
            raise ValueError(f"num_ranks: expected a divisor of num_experts = {num_experts}, got {describe(num_ranks)}")
        return cls(num_experts, num_ranks, tuple(range(num_experts)))

    @property
    def num_slots(self) -> int:
        """`W * S`."""
        return len(self.slot_experts)

    @property
    def slots_per_rank(self) -> int:
        """`S`."""
        return self.num_slots // self.num_ranks

    def rank_experts(self, rank: int) -> tuple[int, ...]:
        """The expert of each slot of `rank`. Raises `ValueError` if there is no such rank."""
        check_integer("rank", rank, low=None)
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank: expected 0 .. {self.num_ranks - 1}, got {describe(rank)}")
        return self.slot_experts[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each expert, ascending."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slot_experts):
            slots[expert].append(slot)
        return tuple(map(tuple, slots))

    def rank_loads(self, load: Sequence[float]) -> list[float]:
        """Load of each rank if every expert's load is split evenly among its replicas.

        Args:
            load: of each expert, any unit, such as the tokens it got. Raises `ValueError` as `plan_placement`.

        >>> Placement(3, 2, (0, 1, 2, 0)).rank_loads([8, 1, 3])
        [5.0, 7.0]
        """
        values = checked_load(load)
        if len(values) != self.num_experts:
            raise ValueError(f"load: expected {self.num_experts} numbers, got {len(values)}")
        shares = [value / len(slots) for value, slots in zip(values, self.replicas, strict=True)]
        return [math.fsum(shares[expert] for expert in self.rank_experts(rank)) for rank in range(self.num_ranks)]

    def reordered_like(self, other: Placement) -> Placement:
        """The same experts on each rank, those that `other` has on it too in the same slots.

        `MoELayer.replace_experts` then moves as little as possible, coming from `other`.

        >>> Placement(3, 2, (0, 1, 2, 0)).reordered_like(Placement(3, 2, (1, 2, 0, 1))).slot_experts
        (1, 0, 0, 2)
        """
        check_kind("other", other, Placement)
        if self.sizes != other.sizes:
            raise ValueError(f"other: expected {self.sizes}, got {other.sizes}")
        slot_experts: list[int] = []
        for rank in range(self.num_ranks):
            mine, theirs = self.rank_experts(rank), other.rank_experts(rank)
            new = iter([expert for expert in mine if expert not in theirs])
            slot_experts += [expert if expert in mine else next(new) for expert in theirs]
        return Placement(self.num_experts, self.num_ranks, tuple(slot_experts))

    @property
    def sizes(self) -> str:
        """Numbers of experts, slots and ranks in words. A layer can only change to a placement with equal sizes."""
        return f"{self.num_experts} experts in {self.num_slots} slots on {self.num_ranks} rank(s)"

    @property
    def fingerprint(self) -> str:
        """Sizes and a hash, short enough for a message; equal if and only if the placements are."""
        return f"{self.sizes}, sha256 {hashlib.sha256(self.to_json().encode()).hexdigest()[:16]}"

    def to_json(self) -> str:
        """One JSON object, keys as the attributes."""
        return json.dumps(
            {"num_experts": self.num_experts, "num_ranks": self.num_ranks, "slot_experts": self.slot_experts}
        )

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """What `to_json` wrote. Raises `ValueError` for text that is not a placement."""
        if not isinstance(text, str):
            raise ValueError(f"text: expected JSON as a str, got {type(text).__name__}")
        if len(text) > MAX_TEXT_LENGTH:
            raise ValueError(f"text: expected at most {MAX_TEXT_LENGTH} characters, got {len(text)}")
        try:
            data = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"text: {error}") from error
        keys = {"num_experts", "num_ranks", "slot_experts"}
        if not isinstance(data, dict) or set(data) != keys or not isinstance(data["slot_experts"], list):
            raise ValueError(f"text: expected a JSON object with {', '.join(sorted(keys))}, got {text[:80]!r}")
        return cls(data["num_experts"], data["num_ranks"], tuple(data["slot_experts"]))


def plan_placement(load: Sequence[float], num_ranks: int, slots_per_rank: int) -> Placement:
    """A placement that balances the load of ranks, from the load of each expert. Deterministic.

    The global policy of EPLB (github.com/deepseek-ai/EPLB) in two steps. First, each slot beyond one per expert goes to
    the expert with the largest load per replica. Then replicas are packed, largest load first, each onto the least
    loaded rank that has a free slot and not yet that expert. If there is none, an expert that is already placed moves.
    Ties go to the expert with fewer replicas, then to the lowest id and rank.

    Args:
        load: of each expert, in any unit, such as the tokens of `MoELayer.count_steps` summed over ranks.
        num_ranks: `W`.
        slots_per_rank: `S`, from `ceil(E / W)` to `E`, which leaves `W * S - E` slots for replicas.

    Returns:
        A placement whose ranks hold experts by ascending id.

    Raises:
        ValueError: a load that is negative or not finite, or too few or too many slots.

    >>> plan_placement([8, 1, 3], 2, 2).slot_experts
    (0, 2, 0, 1)
    """
    loads = checked_load(load)
    num_experts = len(loads)
    check_integer("num_ranks", num_ranks)
    check_integer("slots_per_rank", slots_per_rank)
    if num_ranks * slots_per_rank > MAX_EXPERTS:
        raise ValueError(
            f"slots_per_rank: expected at most {MAX_EXPERTS} slots in all, got {describe(num_ranks * slots_per_rank)}"
        )
    if not num_experts <= num_ranks * slots_per_rank <= num_ranks * num_experts:
        raise ValueError(
            f"slots_per_rank: expected {ceil_div(num_experts, num_ranks)} .. {num_experts} slots "
            f"for {num_experts} experts on {num_ranks} rank(s), got {slots_per_rank}"
        )
    replicas = _replicate(loads, num_ranks, num_ranks * slots_per_rank - num_experts)
    shares = [value / count for value, count in zip(loads, replicas, strict=True)]
    ranks = _pack(shares, replicas, num_ranks, slots_per_rank)
    return Placement(num_experts, num_ranks, tuple(expert for held in ranks for expert in sorted(held)))


def placement_from_config(section: PlacementConfig, num_experts: int, num_ranks: int) -> Placement:
    """The placement that a `placement` section asks for.

    Raises:
        ValueError: a wrong argument, spare slots that do not divide evenly, or a file without the load of each expert
            or without a placement of as many experts and ranks.
    """
    check_kind("section", section, PlacementConfig)
    check_integer("num_experts", num_experts, high=MAX_EXPERTS)
    check_integer("num_ranks", num_ranks)
    if section.file is not None:
        text = _text_of("placement.file", section.file)
        try:
            placement = Placement.from_json(text)
        except ValueError as error:
            raise ValueError(f"placement.file: {section.file}: {error}") from error
        if (placement.num_experts, placement.num_ranks) != (num_experts, num_ranks):
            expected = f"{num_experts} experts on {describe(num_ranks)} rank(s)"
            raise ValueError(f"placement.file: {section.file}: expected {expected}, got {placement.sizes}")
        return placement
    slots_per_rank, left = divmod(num_experts + section.spare_slots, num_ranks)
    if left or slots_per_rank > num_experts:
        raise ValueError(
            f"placement.spare_slots: expected equally many slots on each of {describe(num_ranks)} rank(s), at "
            f"most {num_experts}, got {num_experts} + {describe(section.spare_slots)} in all"
        )
    load: list[float] = [1.0] * num_experts
    if section.load is not None:
        text = _text_of("placement.load", section.load)
        try:
            load = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"placement.load: {section.load}: {error}") from error
        numbers = isinstance(load, list) and all(type(value) in (int, float) for value in load)
        if not numbers or len(load) != num_experts:
            raise ValueError(f"placement.load: {section.load}: expected a list of {num_experts} numbers")
    try:
        return plan_placement(load, num_ranks, slots_per_rank)
    except ValueError as error:
        raise ValueError(f"placement.load: {section.load}: {error}") from error


def _text_of(key: str, file: str) -> str:
    try:
        return read_regular(Path(file), MAX_TEXT_LENGTH).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {file}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _replicate(loads: list[float], num_ranks: int, spare: int) -> list[int]:
    """Number of replicas of each expert, 1 to `num_ranks`, that minimizes the largest load per replica."""
    replicas = [1] * len(loads)
    if num_ranks > 1:
        # Ties go to the expert with fewer replicas: else the first ones without load would be on every rank.
        heap = [(-value, 1, expert) for expert, value in enumerate(loads)]
        heapq.heapify(heap)
        for _ in range(spare):
            *_, expert = heapq.heappop(heap)
            count = replicas[expert] = replicas[expert] + 1
            if count < num_ranks:
                heapq.heappush(heap, (-loads[expert] / count, count, expert))
    return replicas


def _pack(shares: list[float], replicas: list[int], num_ranks: int, slots_per_rank: int) -> list[set[int]]:
    """Experts of each rank, `slots_per_rank` each."""
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    total = [0.0] * num_ranks

    def put(expert: int, rank: int) -> None:
        held[rank].add(expert)
        total[rank] += shares[expert]

    # Ties go to the emptier rank: experts without load must not fill up one rank.
    open_ranks = [(0.0, 0, rank) for rank in range(num_ranks)]
    for expert in sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert)):
        count = min(replicas[expert], len(open_ranks))
        taken = [heapq.heappop(open_ranks)[-1] for _ in range(count)]
        for rank in taken:
            put(expert, rank)
        if count < replicas[expert]:
            # Every rank with a free slot holds this expert already. A full rank without it has at least two experts
            # that such a rank does not hold. The lightest of them moves there.
            roomy_ranks = [(total[rank], rank) for rank in taken if len(held[rank]) < slots_per_rank]
            full_ranks = [(total[rank], rank) for rank in range(num_ranks) if expert not in held[rank]]
            heapq.heapify(roomy_ranks)
            heapq.heapify(full_ranks)
            for _ in range(replicas[expert] - count):
                full, roomy = heapq.heappop(full_ranks)[1], heapq.heappop(roomy_ranks)[1]
                moved = min(held[full] - held[roomy], key=lambda other: (shares[other], other))
                held[full].remove(moved)
                total[full] -= shares[moved]
                put(moved, roomy)
                put(expert, full)
                if len(held[roomy]) < slots_per_rank:
                    heapq.heappush(roomy_ranks, (total[roomy], roomy))
        for rank in taken:
            if len(held[rank]) < slots_per_rank:
                heapq.heappush(open_ranks, (total[rank], len(held[rank]), rank))
    return held


def checked_load(load: Iterable[float]) -> list[float]:
    """The load of each expert, as floats. Raises `ValueError` naming `load` and what it cannot have."""
    if isinstance(load, torch.Tensor):
        check_is_tensor("load", load)
        if load.ndim != 1 or load.is_meta:
            raise ValueError(f"load: expected a number for each expert, got a tensor of shape {list(load.shape)}")
        load = load[: MAX_EXPERTS + 1].tolist()
    try:
        if isinstance(load, str | bytes):
            raise TypeError
        numbers = iter(load)
    except TypeError:
        raise ValueError(f"load: expected a number for each expert, got {describe(load)}") from None
    values: list[float] = []
    for expert, number in enumerate(numbers):
        if expert == MAX_EXPERTS:
            raise ValueError(f"load: expected at most {MAX_EXPERTS} numbers, got more")
        try:
            if not is_real(number):
                raise TypeError
            value = float(number)
        except (TypeError, OverflowError):
            raise ValueError(f"load: expected numbers, got {describe(number)} for expert {expert}") from None
        if not 0 <= value < math.inf:
            raise ValueError(f"load: expected finite numbers of at least 0, got {value} for expert {expert}")
        values.append(value)
    if sum(values) == math.inf:
        raise ValueError("load: expected numbers with a finite sum")
    if not values:
        raise ValueError("load: expected a number for each expert, got none")
    return values


def _listed(experts: list[int]) -> str:
    return "expert " + ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
