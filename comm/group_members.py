"""Who is in a group of ranks, who has left it, and the key-value store in which its ranks meet.

The store is that of torch.distributed, whatever its backend (gloo, NCCL). `comm/rank_group.py` has the calls among the
ranks.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.comm import messages
from moe_runtime.comm.errors import (
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    StoreLostError,
    reason_given,
)
from moe_runtime.comm.messages import integer, row, text
from moe_runtime.comm.store_calls import StoreCalls, StoreSilentError, calls_of
from moe_runtime.support.arguments import check_seconds

MAX_SECONDS = 1e9
"""Longest limit of a wait: 30 years, which all clocks can count."""

FAREWELL_S = 0.5
"""How long the rank whose process hosts the store stays when it gives up, so that its peers learn of it there."""

REASON_S = 2.0
"""How long a rank that learns that another has ended waits for the reason, which reaches the store a little later."""

POLL_S = 0.02
"""Longest pause between two polls of the store."""

T = TypeVar("T")


@dataclass(frozen=True)
class _StoreHost:
    """Whose process hosts a group's store: its rank in the group, -1 if none is known; and its name for messages."""

    rank: int = -1
    name: str = "the process that hosts it"


class GroupMembers:
    """The ranks that share one context, and what they have left in their store.

    The constructor is not collective, but all ranks must create their groups in the same order. A rank that gives up at
    start-up calls `leave`.

    Attributes:
        rank, world_size: this process in the group (not in the world).
        group: the torch.distributed group; None for a single process without torch.distributed.
        timeout_s: limit of every wait, in seconds.

    Raises `ValueError` for a wrong argument, and unless `alone` where a launcher has started several ranks and
    torch.distributed is not initialised.
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh | None = None, *, timeout_s: float = 120.0, alone: bool = False
    ) -> None:
        self.timeout_s = check_seconds("timeout_s", timeout_s, MAX_SECONDS)
        self.group = resolve_group(group)
        started = os.environ.get("WORLD_SIZE", "1")
        if self.group is None and not alone and "RANK" in os.environ and started != "1":
            raise ValueError(  # each of them would otherwise run on its own
                f"group: a launcher started {started} ranks (WORLD_SIZE), but torch.distributed is not initialised; "
                "call moe_runtime.init_from_env() first, or ask for transport='private' to have a single rank in each "
                "process"
            )
        self.rank, self.world_size = 0, 1
        self._parent: Self | None = None
        self._names: Sequence[int] = range(2**31)
        self._prefix = ""
        self._calls = 0
        self._store: Any = None
        self._host = _StoreHost()
        self._gave_up = False
        if self.group is not None:
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
            ranks = dist.get_process_group_ranks(self.group)
            digest = hashlib.sha256(f"{self.group.group_name}/{ranks}".encode()).hexdigest()[:16]
            self._meet(dist.distributed_c10d._get_default_store(), ranks, f"moe_runtime/{digest}")

    @classmethod
    def _at_start(cls, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> Self:
        """All ranks that a launcher started, before torch.distributed is initialised; they meet in `store`."""
        group = cls(timeout_s=timeout_s, alone=True)
        group.rank, group.world_size = rank, world_size
        group._meet(store, list(range(world_size)), "moe_runtime/start")
        return group

    @classmethod
    def _of_newcomer(cls, store: dist.Store, prefix: str, rank: int, world_size: int, timeout_s: float) -> Self:
        """A group that others have made, for a process that takes the place of `rank`; `prefix` begins their keys.

        It takes part in no call of this group, only in those of later generations (`of_survivors`).
        """
        group = cls(timeout_s=timeout_s, alone=True)
        group.rank, group.world_size = rank, world_size
        group._store, group._prefix = store, prefix
        group._host = _host_of(store, list(range(world_size)))
        return group

    def _meet(self, store: dist.Store, ranks: list[int], prefix: str) -> None:
        """Use `store` for exchanges between `ranks` of the default group."""
        self._store = store
        self._host = _host_of(store, ranks)
        # Counted in the store, since other code of this process may have created groups of the same ranks before.
        made = self._ask("group", lambda: store.add(f"{prefix}/made/{self.rank}", 1))
        self._prefix = f"{prefix}/{made}"

    def of_ranks(self, ranks: list[int], name: str) -> Self:
        """The group of some `ranks` of this one, which has no group of torch.distributed.

        Its members make it in the same order, under a `name` of their own. Its errors name ranks as this group does,
        and who leaves it leaves this one.
        """
        part = self._some(ranks, name)
        part._parent = self._whole
        part._names = [self._names[rank] for rank in ranks]
        return part

    def of_survivors(self, ranks: list[int], name: str) -> Self:
        """The group of the `ranks` of this one that go on without the others, numbered anew from 0.

        Its members make it under the same `name`. Its errors name ranks by their new numbers, and what a rank leaves in
        this group is not seen there. It has no group of torch.distributed.
        """
        rest = self._some(ranks, name)
        rest._parent, rest._names, rest._gave_up = None, range(2**31), False
        if (place := rest._host.rank) >= 0:
            rest._host = _StoreHost(place, f"rank {place}, which hosts it,")
        return rest

    def _some(self, ranks: list[int], name: str) -> Self:
        """A copy of this group with these of its ranks, and with `name` in its keys."""
        some = copy.copy(self)
        some.group, some._calls = None, 0
        some.rank, some.world_size = ranks.index(self.rank), len(ranks)
        some._prefix = f"{self._prefix}/{name}"
        hosted = self._host.rank
        some._host = _StoreHost(ranks.index(hosted) if hosted in ranks else -1, self._host.name)
        return some

    @property
    def _whole(self) -> Self:
        """The group that this one is a part of; itself where it is none."""
        return self if self._parent is None else self._parent

    def in_store(self, what: str, work: Callable[[Any, str], T]) -> T:
        """`work(store, prefix)`: short calls of the store, under keys that begin with `prefix`.

        Raises `StoreLostError` if the store is gone or does not answer. Without a store `work` must not be given.
        """
        return self._ask(what, lambda: work(self._store, self._prefix))

    def _ask(
        self,
        what: str,
        work: Callable[[], T],
        limit_s: float = 0.0,
        *,
        by: StoreCalls | None = None,
        answer_s: float | None = None,
    ) -> T:
        """Return `work()`, which calls the store and waits there for at most `limit_s`.

        `by` makes the calls of another connection; `answer_s` is of `StoreCalls.run`. Errors of the store become a
        `StoreLostError` that says whether it is gone or does not answer.
        """
        try:
            return (calls_of(self._store) if by is None else by).run(work, limit_s, answer_s=answer_s)
        except RuntimeError as error:
            trouble = f"cannot reach the group's store, {self._host.name} is gone: {error}"
            if isinstance(error, StoreSilentError):
                trouble = f"gets no answer from the group's store, {self._host.name} may be stopped"
            message = f"{what}: rank {self._names[self.rank]} {trouble}"
            raise StoreLostError(message, self._whole._host.rank, Phase.START_UP) from error

    def leave(self, reason: str, error: BaseException | None = None) -> None:
        """Make the peers' next `gather`, or the one they wait in, raise `PeerAbortedError` with `reason`.

        If `error` says that a rank is gone, all others raise a `PeerTimeoutError` that names it. If it says that
        another rank gave up, the note that all look for has that rank's reason.
        Waits for nobody. But where this process hosts the store, it gives peers `FAREWELL_S` to read it there.
        """
        if self._whole is not self:
            self._whole.leave(reason, error)
            return
        if self._store is None or self._gave_up:
            return
        self._gave_up = True
        reason, cause = str(reason)[: messages.MAX_REASON], self.rank
        if isinstance(error, (PeerTimeoutError, StoreLostError)) and 0 <= error.rank < self.world_size:
            cause = error.rank
        first = [self.rank, reason, cause]
        if isinstance(error, PeerAbortedError) and 0 <= error.rank < self.world_size and (given := reason_given(error)):
            first = [error.rank, given[: messages.MAX_REASON], error.rank]
        # If the store is gone, no peer can read it.
        with contextlib.suppress(MoERuntimeError):
            note = messages.answer("leave", first)
            # First, for those who look for it when they see the answer. The first rank's note stays: others follow it.
            self._ask("leave", lambda: self._store.check([self._left_key]) or self._store.set(self._left_key, note))
            self._answer("leave", messages.farewell(reason, cause))
            if self._host.rank == self.rank and self.world_size > 1:
                time.sleep(FAREWELL_S)

    def _answer(self, what: str, mine: bytes) -> list[str]:
        """Store this rank's answer to the next call. Returns the keys of all ranks' answers."""
        self._calls += 1
        keys = self._keys(self._calls)
        self._ask(what, lambda: self._store.set(keys[self.rank], mine))
        return keys

    def _keys(self, of: int | str) -> list[str]:
        """The keys of all ranks in a call, by its number, or for an event, by its name."""
        return [f"{self._prefix}/{of}/{rank}" for rank in range(self.world_size)]

    def who_left(self, what: str) -> MoERuntimeError | None:
        """The error for a rank that has given up, if one has; None also where the store cannot be asked."""
        with contextlib.suppress(MoERuntimeError):
            if (note := self._note(what)) is not None:
                return self._who_left(what, note)
        return None

    def reason_left(self, what: str) -> str:
        """Why a rank has given up; empty where no rank says so within `REASON_S`, or the store cannot be asked."""
        deadline = time.monotonic() + REASON_S
        with contextlib.suppress(MoERuntimeError, ValueError):
            while (note := self._note(what)) is None:
                if self._store is None or time.monotonic() > deadline:
                    return ""
                time.sleep(POLL_S)
            return row(integer(0), text, integer(0))(messages.read_answer(note).value)[1]
        return ""

    @property
    def _left_key(self) -> str:
        return f"{self._whole._prefix}/left"

    def _note(self, what: str) -> bytes | None:
        """The note of the first rank that has given up. Raises `StoreLostError` where the store cannot be asked."""
        return None if self._store is None else self._ask(what, self._read_note)

    def _read_note(self) -> bytes | None:
        return self._store.get(self._left_key) if self._store.check([self._left_key]) else None

    def _who_left(self, what: str, note: bytes) -> MoERuntimeError:
        """The error for the note of a rank that has given up."""
        try:
            number = integer(0, self._whole.world_size - 1)
            rank, reason, cause = row(number, text, number)(messages.read_answer(note).value)
        except ValueError as error:
            message = f"{what}: a rank gave up with a note that this program does not write: {error}"
            return MoERuntimeError(message, phase=Phase.START_UP)
        return self._left_by(what, rank, reason, cause)

    def _left_by(self, what: str, rank: int, reason: str, cause: int) -> MoERuntimeError:
        """The error for `rank` having given up because of rank `cause`, itself or one that it misses."""
        another = cause not in (rank, self._whole.rank) and cause < self._whole.world_size
        kind, named = (PeerTimeoutError, cause) if another else (PeerAbortedError, rank)
        return kind(f"{what}: rank {rank} gave up: {reason}", named, Phase.START_UP)


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group meant by `group`: itself, that of a one-dimensional mesh, the default group, or None.

    Raises `ValueError` for a mesh with several dimensions, and if this process is not a member.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a DeviceMesh of one dimension, got {group.ndim}; pass mesh['name']")
        group = group.get_group()
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    stranger = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(group, dist.ProcessGroup) and not stranger:
        raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if stranger or dist.get_rank(group) < 0:
        raise ValueError("group: this process is not a member of it")
    return group


def unwrapped(store: Any) -> Any:
    """The store below the prefixes that torch.distributed and launchers put before their keys."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _host_of(store: Any, ranks: list[int]) -> _StoreHost:
    """Whose process hosts the default store, for a group of these ranks of the default group."""
    # torch does not say who hosts a store. It makes the one of these variables itself.
    store, made = unwrapped(store), (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    if not isinstance(store, dist.TCPStore) or (store.host, str(store.port)) != made:
        return _StoreHost()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _StoreHost(name="torchrun's agent, which hosts it,")
    if 0 in ranks:
        return _StoreHost(ranks.index(0), f"rank {ranks.index(0)}, which hosts it,")
    return _StoreHost(name="rank 0 of the default group, which hosts it,")
