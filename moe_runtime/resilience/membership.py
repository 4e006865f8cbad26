"""Who is left of a group, and how far each has come: survivors of a death agree on it through the store.

Every membership has a generation, 0 at the start. To leave generation `g`, each rank that is alive puts its word into
the store. One of them writes the record of generation `g + 1`: the ranks whose words were there. A record is written
once, whoever comes first, and is final. A rank that is not in it is out, and learns so from it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Collection
from typing import Any, TypeVar

import torch.distributed as dist

from moe_runtime.comm import messages
from moe_runtime.comm.errors import MoERuntimeError, PeerTimeoutError, Phase, RankRemovedError
from moe_runtime.comm.messages import Reader, integer
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.store_calls import calls_of

_POLL_S = 0.005

MAX_BYTES = 16 << 20
"""Most bytes of a value: the experts of every slot of some hundred layers."""

ADDRESS = "moe_runtime/rejoin"
"""The key under which ranks say where they meet."""

T = TypeVar("T")


class Membership:
    """The ranks of a group that are in, and agreements among them on who stays.

    Ranks are named by their numbers in `group`, which never change.

    Args:
        group: all ranks, with the store.

    Attributes:
        generation: number of the present membership.
        members: its ranks, ascending.
        everyone: all ranks, those that are out included.
        calls: what each member was in when they agreed last; empty where it was in nothing that others must be in too.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._published = False
        self.rank = group.rank
        self.generation = 0
        self.calls: dict[int, str] = {}
        self.members = self.everyone = tuple(range(group.world_size))

    @property
    def store_host(self) -> int:
        """The rank whose process hosts the store where ranks meet; -1 where another process does."""
        return self._group._host.rank

    def agree(self, progress: int, suspects: Collection[int], window_s: float, call: str = "") -> dict[int, int]:
        """Go over to the next generation with all members that come. Returns the progress of each of its members.

        It is decided as soon as all members but `suspects` have come, and at the latest after `window_s`.

        Args:
            progress: how far this rank has come.
            suspects: members that nobody waits for.
            window_s: how long others are waited for, in seconds.
            call: what this rank is in; empty for nothing that others must be in too.

        Raises:
            RankRemovedError: the others have decided without this rank.
            StoreLostError: the store is gone or does not answer.
        """
        key = self._keys("members")
        self.put(f"call/{self.rank}", call)
        self._ask(lambda store, prefix: store.set(f"{prefix}/{self._keys(f'here/{self.rank}')}", str(progress)))
        deadline = time.monotonic() + window_s
        needed = [rank for rank in self.members if rank not in suspects]
        while not self._ask(lambda store, prefix: store.check([f"{prefix}/{key}"])):
            late = time.monotonic() > deadline
            absent = self.absent("here")
            if late or not set(needed) & set(absent):
                self._propose(key, [rank for rank in self.members if rank not in absent])
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
        self.calls = {rank: self.get(f"call/{rank}", messages.text) or "" for rank in record}
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

    def put(self, name: str, value: object) -> None:
        """Put a value of this generation into the store: what JSON carries."""
        key, raw = self._keys(name), _encoded(value)
        self._ask(lambda store, prefix: store.set(f"{prefix}/{key}", raw))

    def get(self, name: str, read: Reader[T]) -> T | None:
        """The value that a member has put into the store, or None. Raises `MoERuntimeError` for one of another kind."""
        return self._got(self._keys(name), read)

    def go_over(self, record: dict[int, int]) -> None:
        """Begin the next generation with the members of `record`, which all members know; see `agree` for the rest.

        Raises `MoERuntimeError` if some have agreed on other members meanwhile.
        """
        key, raw = self._keys("members"), _record(list(record.items()))
        found = self._ask(lambda store, prefix: store.compare_set(f"{prefix}/{key}", "", raw))
        if self._read(found) != record:
            raise PeerTimeoutError("recovery: a rank is missed in a step", -1, Phase.RECOVERY)
        self.generation += 1
        self.members = tuple(sorted(record))

    def publish(self, agreed: dict[str, Any]) -> None:
        """Say in the store where these ranks meet, and what is equal on all of them: for processes that join later.

        Collective for the first time, since ranks then choose a place that such processes can find. Raises as
        `RankGroup.gather`.
        """
        if not self._published:
            self._group, self._published = self._group.for_newcomers(), True
        self._ask(
            lambda store, prefix: store.set(
                ADDRESS, _encoded({"prefix": prefix, "ranks": self._group.world_size, "agreed": agreed})
            )
        )

    def askers(self) -> list[tuple[int, str, int]]:
        """Ranks that are out, and whose place a process asks for.

        With the word under which that is answered, and how many layers the process has.
        """
        out = [rank for rank in self.everyone if rank not in self.members]
        found = [(rank, self._got(f"ask/{rank}", messages.row(messages.text, integer(0)))) for rank in out]
        return [(rank, *said) for rank, said in found if said is not None and said != _NOBODY]

    def answer(self, rank: int, word: str, record: dict[int, int], more: object) -> None:
        """Tell a process that it is `rank` in the next generation, whose members `record` has. Once."""
        value = {"generation": self.generation + 1, "members": [list(pair) for pair in record.items()], "more": more}

        def write(store: Any, prefix: str) -> None:
            store.set(f"{prefix}/join/{word}", _encoded(value))
            store.delete_key(f"{prefix}/ask/{rank}")

        self._ask(write)

    def refuse(self, rank: int, word: str, why: str) -> None:
        """Tell a process that it cannot be `rank`, and why. Once or more often."""

        def write(store: Any, prefix: str) -> None:
            store.set(f"{prefix}/join/{word}", _encoded({"refused": why}))
            store.delete_key(f"{prefix}/ask/{rank}")

        self._ask(write)

    def ask(self, limit_s: float, read: Reader[T], layers: int = 0) -> tuple[dict[int, int], T]:
        """For a process that takes the place of a rank that is out: ask the members, and wait for their answer.

        It has so many `layers`. Returns the steps that each member has done, and what `answer` was given. If the
        members miss a rank before they go over to this process, their answer does not count, and it asks again.

        Raises `PeerTimeoutError` if it is not one of them within `limit_s`, `ValueError` if they refuse it.
        """
        deadline, found = time.monotonic() + limit_s, None
        while found is None:
            found = self._ask_once(read, layers, deadline, limit_s)
        return found

    def _ask_once(
        self, read: Reader[T], layers: int, deadline: float, limit_s: float
    ) -> tuple[dict[int, int], T] | None:
        word = secrets.token_hex(8)
        key, value = f"ask/{self.rank}", _encoded([word, layers])
        self._ask(lambda store, prefix: store.set(f"{prefix}/{key}", value))
        try:
            return self._answered(word, read, deadline, limit_s)
        except BaseException:
            # Else the members would wait for a process that is not there any more.
            with contextlib.suppress(MoERuntimeError):
                self._ask(lambda store, prefix: store.compare_set(f"{prefix}/{key}", value, _encoded(list(_NOBODY))))
            raise

    def _answered(self, word: str, read: Reader[T], deadline: float, limit_s: float) -> tuple[dict[int, int], T] | None:
        """What members answer to `word`, and go over to them; None if they have gone over to others."""
        key, fields = f"join/{word}", messages.row(integer(1), _pairs, read)
        while (raw := self._raw(key)) is None:
            self._pause(deadline, limit_s)
        self._ask(lambda store, prefix: store.delete_key(f"{prefix}/{key}"))
        if refused := self._decoded(key, raw, lambda value: messages.text(value.get("refused", ""))):
            raise ValueError(f"rejoin: {refused}")
        generation, pairs, more = self._decoded(key, raw, lambda v: fields([v["generation"], v["members"], v["more"]]))
        self.generation, record = generation - 1, dict(pairs)
        while (raw := self._raw(self._keys("members"))) is None:
            self._pause(deadline, limit_s)
        if self._read(raw) != record:
            return None
        self.generation, self.members = generation, tuple(record)
        return record, more

    def _pause(self, deadline: float, limit_s: float) -> None:
        """Between two looks for what members have to say to this process, which `ask` waits for."""
        if time.monotonic() > deadline:
            text = f"rejoin: no rank has admitted rank {self.rank} within {limit_s:g} s"
            if self.rank in self._latest():
                text += "; it is still in where ranks called allocate() last, maybe for another context"
            raise PeerTimeoutError(text, -1, Phase.START_UP)
        time.sleep(_POLL_S)

    def _latest(self) -> tuple[int, ...]:
        """The members of the newest record, for a process that is not one of them."""
        members, generation = self.everyone, 0
        while (raw := self._raw(f"from generation {generation}/members")) is not None:
            members, generation = tuple(self._read(raw)), generation + 1
        return members

    def leaving(self) -> bool:
        """Whether a member wants to go over to the next generation."""
        return len(self.absent("here")) < len(self.members)

    def _propose(self, key: str, here: list[int]) -> None:
        """Write the record unless another has."""
        words = [(rank, self._got(self._keys(f"here/{rank}"), integer(0))) for rank in here]
        record = _record([(rank, word) for rank, word in words if word is not None])
        self._ask(lambda store, prefix: store.compare_set(f"{prefix}/{key}", "", record))

    def _read(self, raw: bytes) -> dict[int, int]:
        """The progress of each member of a record."""
        try:
            number = integer(0, self._group.world_size - 1)
            pairs = messages.table(_pairs)(messages.decode(raw))["members"]
            return {number(rank): progress for rank, progress in sorted(pairs)}
        except (KeyError, ValueError) as error:
            message = f"recovery: the record of members is not one that this program writes: {error}"
            raise MoERuntimeError(message, phase=Phase.HOST) from None

    def _got(self, key: str, read: Reader[T]) -> T | None:
        raw = self._raw(key)
        return None if raw is None else self._decoded(key, raw, read)

    def _raw(self, key: str) -> bytes | None:
        """What is in the store under `key`; None if nothing is."""

        def look(store: Any, prefix: str) -> bytes | None:
            return store.get(f"{prefix}/{key}") if store.check([f"{prefix}/{key}"]) else None

        return self._ask(look)

    def _decoded(self, key: str, raw: bytes, read: Reader[T]) -> T:
        try:
            return read(messages.decode(raw, MAX_BYTES))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"recovery: {key} is not one that this program writes: {error}"
            raise MoERuntimeError(message, phase=Phase.HOST) from None

    def _keys(self, name: str) -> str:
        return f"from generation {self.generation}/{name}"

    def _ask(self, work: Any) -> Any:
        return self._group.in_store("recovery", work)


def published(store: dist.Store) -> tuple[str, int, dict[str, Any]] | None:
    """What `Membership.publish` has put into `store`: prefix, number of ranks, and what is equal on all of them.

    None if nothing is there. Raises `RuntimeError` as a store does, `ValueError` for what no rank writes.
    """
    calls = calls_of(store)
    if not calls.run(lambda: store.check([ADDRESS])):
        return None
    found = messages.table(lambda value: value)(messages.decode(calls.run(lambda: store.get(ADDRESS)), MAX_BYTES))
    if found.keys() != {"prefix", "ranks", "agreed"}:
        raise ValueError("store: expected the place where ranks have met, got other JSON")
    return messages.text(found["prefix"]), integer(1)(found["ranks"]), messages.table(lambda v: v)(found["agreed"])


def _encoded(value: Any) -> str:
    return messages.encode(value, MAX_BYTES).decode("utf-8", "surrogatepass")


def _record(pairs: list[tuple[int, int]]) -> str:
    return _encoded({"members": [list(pair) for pair in pairs]})


_NOBODY = ("", 0)
"""Said by a process that does not ask any more."""

_pairs = messages.many_of(messages.row(integer(0), integer(0)))
"""Reads `[rank, progress]` of each member."""
