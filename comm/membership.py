"""Who is left of a group, and how far each has come: survivors of a death agree on it through the store.

Every membership has a generation, 0 at the start. To leave generation `g`, each rank that is alive puts its word into
the store. One of them writes the record of generation `g + 1`: the ranks whose words were there. A record is written
once, whoever comes first, and is final. A rank that is not in it is out, and learns so from it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from moe_runtime.comm import messages
from moe_runtime.comm.errors import MoERuntimeError, Phase, RankRemovedError
from moe_runtime.comm.messages import integer
from moe_runtime.comm.rank_group import RankGroup

_POLL_S = 0.005


class Membership:
    """The ranks of a group that are in, and agreements among them on who stays.

    Ranks are named by their numbers in `group`, which never change.

    Args:
        group: all ranks, with the store.

    Attributes:
        generation: number of the present membership.
        members: its ranks, ascending.
        everyone: all ranks, those that are out included.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.rank = group.rank
        self.generation = 0
        self.members = self.everyone = tuple(range(group.world_size))

    def agree(self, progress: int, suspects: Collection[int], window_s: float) -> dict[int, int]:
        """Go over to the next generation with all members that come. Returns the progress of each of its members.

        It is decided as soon as all members but `suspects` have come, and at the latest after `window_s`.

        Args:
            progress: how far this rank has come.
            suspects: members that nobody waits for.
            window_s: how long others are waited for, in seconds.

        Raises:
            RankRemovedError: the others have decided without this rank.
            StoreLostError: the store is gone or does not answer.
        """
        key, words = self._keys("members"), [self._keys(f"here/{rank}") for rank in self.members]
        self._ask(lambda store, prefix: store.set(f"{prefix}/{self._keys(f'here/{self.rank}')}", str(progress)))
        deadline = time.monotonic() + window_s
        needed = [rank for rank in self.members if rank not in suspects]
        while not self._ask(lambda store, prefix: store.check([f"{prefix}/{key}"])):
            late = time.monotonic() > deadline
            here = self._ask(
                lambda store, prefix: [
                    rank for rank, word in zip(self.members, words, strict=True) if store.check([f"{prefix}/{word}"])
                ]
            )
            if late or set(needed) <= set(here):
                self._propose(key, here)
                break
            time.sleep(_POLL_S)
        record = self._read(self._ask(lambda store, prefix: store.get(f"{prefix}/{key}")))
        if self.rank not in record:
            others = ", ".join(map(str, record))
            raise RankRemovedError(
                f"rank {self.rank} is out: rank {others} went on without it in generation {self.generation + 1}",
                self.rank,
                Phase.HOST,
            )
        self.generation += 1
        self.members = tuple(record)
        return record

    def group(self) -> RankGroup:
        """The group of the members, numbered anew from 0 in the order of `members`; a new one for each generation."""
        return self._group.of_survivors(list(self.members), f"generation {self.generation}")

    def announce(self, event: str) -> None:
        """Put into the store that this rank has come to `event` of this generation."""
        key = self._keys(f"{event}/{self.rank}")
        self._ask(lambda store, prefix: store.set(f"{prefix}/{key}", b"here"))

    def absent(self, event: str) -> list[int]:
        """Members that have not announced `event` in this generation."""
        keys = [self._keys(f"{event}/{rank}") for rank in self.members]
        found = self._ask(lambda store, prefix: [store.check([f"{prefix}/{key}"]) for key in keys])
        return [rank for rank, came in zip(self.members, found, strict=True) if not came]

    def set_number(self, name: str, number: int) -> None:
        """Put a number of this generation into the store."""
        key = self._keys(name)
        self._ask(lambda store, prefix: store.set(f"{prefix}/{key}", str(number)))

    def number_of(self, name: str) -> int | None:
        """The number that a member has put into the store, None if none has. Raises `MoERuntimeError` for others."""
        key = self._keys(name)

        def read(store: Any, prefix: str) -> bytes | None:
            return store.get(f"{prefix}/{key}") if store.check([f"{prefix}/{key}"]) else None

        raw = self._ask(read)
        try:
            return None if raw is None else integer(0)(messages.decode(raw))
        except ValueError as error:
            raise MoERuntimeError(f"recovery: {name} is none that this program writes: {error}") from None

    def leaving(self) -> bool:
        """Whether a member wants to go over to the next generation."""
        return len(self.absent("here")) < len(self.members)

    def _propose(self, key: str, here: list[int]) -> None:
        """Write the record unless another has."""

        def write(store: Any, prefix: str) -> None:
            words = [[rank, int(store.get(f"{prefix}/{self._keys(f'here/{rank}')}"))] for rank in here]
            store.compare_set(f"{prefix}/{key}", "", messages.encode({"members": words}).decode())

        self._ask(write)

    def _read(self, raw: bytes) -> dict[int, int]:
        """The progress of each member of a record, ranks ascending."""
        try:
            number = integer(0, self._group.world_size - 1)
            pairs = messages.table(_pairs)(messages.decode(raw))["members"]
            return {number(rank): progress for rank, progress in pairs}
        except (KeyError, ValueError) as error:
            message = f"recovery: the record of members is none that this program writes: {error}"
            raise MoERuntimeError(message, phase=Phase.HOST) from None

    def _keys(self, name: str) -> str:
        return f"from generation {self.generation}/{name}"

    def _ask(self, work: Any) -> Any:
        return self._group.in_store("recovery", work)


def _pairs(value: Any) -> list[tuple[int, int]]:
    """Reads `[rank, progress]` of each member."""
    if not isinstance(value, list):
        raise ValueError("expected a list of members")
    return [messages.row(integer(0), integer(0))(entry) for entry in value]
