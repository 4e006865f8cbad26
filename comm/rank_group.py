"""The ranks of a context on the host: small exchanges through the key-value store of the group, each with a time limit.

The store works with any backend of the group (gloo, NCCL), and shows exactly which ranks are missing.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.comm import messages
from moe_runtime.comm.errors import (
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    StoreLostError,
    reason_of,
)
from moe_runtime.comm.messages import MAX_BYTES, Reader, hexadecimal, integer, row, text
from moe_runtime.comm.store_calls import StoreSilentError, calls_of
from moe_runtime.support.arguments import check_seconds

MAX_SECONDS = 1e9
"""Longest limit of a wait: 30 years, which all clocks can count."""

ROLL_CALL_S = 3.0
"""How long ranks have to report themselves, once one of them has waited too long."""

FAREWELL_S = 0.5
"""How long the rank whose process hosts the store stays when it gives up, so that its peers learn of it there."""

REASON_S = 2.0
"""How long a rank that learned of the end of another one waits for its reason, which comes to the store a bit later."""

LOOK_S = 0.1
"""How often a rank that waits looks whether a peer has given up, or calls the roll."""

CONNECTED_S = 0.5
"""How much longer than it is told a group may take to connect: it knows best why it cannot."""

PARTING_S = 5.0
"""How long rank 0, whose process may host the store, waits for peers that still read from it at the end."""

NO_WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Environment of a group of NCCL whose work torch's watchdog does not look at.

Where the watchdog finds an error, it sleeps for a minute, and the default group ends the process minutes later. It does
not get the work of a group whose waits block.
"""

_NAME_BYTES = 8
"""Of a random name."""

_POLL_S = (0.001, 0.02)
"""First and longest pause between two polls for the answers of peers."""

T = TypeVar("T")


@dataclass(frozen=True)
class _StoreHost:
    """Whose process hosts a group's store: its rank in the group, -1 if none is known; and its name for messages."""

    rank: int = -1
    name: str = "the process that hosts it"


class RankGroup:
    """The ranks that share one context, and small exchanges between their hosts.

    The constructor is not collective, but all ranks must create their groups in the same order. `gather` and `barrier`
    are collective. A rank that gives up at start-up calls `leave`. After a `PeerTimeoutError` ranks may have made
    different numbers of calls, and the group is unusable.

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
        if self.group is None and not alone:
            _check_started_alone()
        self.rank = 0
        self.world_size = 1
        self._parent: RankGroup | None = None
        self._names: Sequence[int] = range(2**31)
        self._prefix = ""
        self._calls = 0
        self._store: Any = None
        self._host = _StoreHost()
        self._gave_up = False
        if self.group is not None:
            self.rank = dist.get_rank(self.group)
            self.world_size = dist.get_world_size(self.group)
            ranks = dist.get_process_group_ranks(self.group)
            identity = f"{self.group.group_name}/{ranks}"
            digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
            self._meet(dist.distributed_c10d._get_default_store(), ranks, f"moe_runtime/{digest}")

    @classmethod
    def _at_start(cls, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> RankGroup:
        """All ranks that a launcher started, before torch.distributed is initialised; they meet in `store`."""
        group = cls(timeout_s=timeout_s, alone=True)
        group.rank, group.world_size = rank, world_size
        group._meet(store, list(range(world_size)), "moe_runtime/start")
        return group

    def for_newcomers(self) -> RankGroup:
        """The same ranks under a new name, in the store as processes see it that know no torch.distributed. Collective.

        Raises as `gather`.
        """
        name = self.new_name("RankGroup.for_newcomers")
        group = self.of_survivors(list(range(self.world_size)), name)
        group._store, group._prefix = unwrapped(self._store), f"moe_runtime/{name}"
        return group

    @classmethod
    def _of_newcomer(cls, store: dist.Store, prefix: str, rank: int, world_size: int, timeout_s: float) -> RankGroup:
        """A group that others have made, for a process that takes the place of `rank`; `prefix` is that of their keys.

        It takes part in no call of this group, only in those of later generations (`of_survivors`).
        """
        group = cls(timeout_s=timeout_s, alone=True)
        group.rank, group.world_size = rank, world_size
        group._store, group._prefix = store, prefix
        group._host = _host_of(store, list(range(world_size)))
        return group

    def of_ranks(self, ranks: list[int], name: str) -> RankGroup:
        """The group of some `ranks` of this one, which has no group of torch.distributed.

        Its members make it in the same order, under a `name` of their own. Its errors name ranks as this group does,
        and who leaves it leaves this one.
        """
        part = copy.copy(self)
        part.group, part._calls, part._parent = None, 0, self._whole
        part.rank, part.world_size = ranks.index(self.rank), len(ranks)
        part._names = [self._names[rank] for rank in ranks]
        part._prefix = f"{self._prefix}/{name}"
        hosted = self._host.rank
        part._host = _StoreHost(ranks.index(hosted) if hosted in ranks else -1, self._host.name)
        return part

    def of_survivors(self, ranks: list[int], name: str) -> RankGroup:
        """The group of the `ranks` of this one that go on without the others, numbered anew from 0.

        Its members make it under the same `name`. Its errors name ranks by their new numbers, and what a rank leaves in
        this group is not seen there. It has no group of torch.distributed.
        """
        rest = copy.copy(self)
        rest.group, rest._calls, rest._parent, rest._gave_up = None, 0, None, False
        rest.rank, rest.world_size = ranks.index(self.rank), len(ranks)
        rest._names = range(2**31)
        rest._prefix = f"{self._prefix}/{name}"
        hosted = self._host.rank
        place = ranks.index(hosted) if hosted in ranks else -1
        rest._host = _StoreHost(place, f"rank {place}, which hosts it," if place >= 0 else self._host.name)
        return rest

    def in_store(self, what: str, work: Callable[[Any, str], T]) -> T:
        """`work(store, prefix)`: short calls of the store, under keys that begin with `prefix`.

        Raises `StoreLostError` if the store is gone or does not answer. Without a store `work` must not be given.
        """
        return self._ask(what, lambda: work(self._store, self._prefix))

    @property
    def _whole(self) -> RankGroup:
        """The group that this one is a part of; itself where it is none."""
        return self if self._parent is None else self._parent

    def who_left(self, what: str) -> MoERuntimeError | None:
        """The error for a rank that has given up, if one has; None also where the store cannot be asked."""
        note = None
        with contextlib.suppress(MoERuntimeError):
            note = self._note(what)
        return None if note is None else self._who_left(what, note)

    def reason_left(self, what: str) -> str:
        """Why a rank has given up; empty where no rank says so within `REASON_S`, or the store cannot be asked."""
        deadline = time.monotonic() + REASON_S
        with contextlib.suppress(MoERuntimeError, ValueError):
            while (note := self._note(what)) is None:
                if self._store is None or time.monotonic() > deadline:
                    return ""
                time.sleep(_POLL_S[1])
            return row(integer(0), text, integer(0))(messages.read_answer(note).value)[1]
        return ""

    def _note(self, what: str) -> bytes | None:
        """Of the first rank that has given up. Raises `StoreLostError` where the store cannot be asked."""
        if self._store is not None and self._ask(what, lambda: self._store.check([self._left_key])):
            return self._ask(what, lambda: self._store.get(self._left_key))
        return None

    def _meet(self, store: dist.Store, ranks: list[int], prefix: str) -> None:
        """Use `store` for exchanges between `ranks` of the default group."""
        self._store = store
        self._host = _host_of(store, ranks)
        # Counted in the store, since other code of this process may have created groups of the same ranks before.
        made = self._ask("group", lambda: store.add(f"{prefix}/made/{self.rank}", 1))
        self._prefix = f"{prefix}/{made}"

    def gather(
        self,
        what: str,
        value: object,
        read: Reader[T],
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> list[T]:
        """Every rank's `value`, by rank, as `read` returns it.

        Args:
            value: what JSON carries so that it comes back the same (`messages.encode`), of at most `max_bytes`.
            read: checks and converts what came, also from this rank. It raises `ValueError` for what no rank sends.
            timeout_s: limit of the wait, in seconds; default the group's.

        Raises:
            ValueError: a wrong argument; on every rank where ranks are not at the same step.
            PeerTimeoutError: naming `what` and all ranks that did not come in time; its `rank` is the first of them.
            PeerAbortedError: naming a rank that gave up.
            StoreLostError: the store is gone or does not answer.
            MoERuntimeError: naming the rank whose answer is none that `read` takes.
        """
        limit = self.timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s, MAX_SECONDS)
        mine = messages.answer(what, value, max_bytes)
        if self._store is None:
            return [read(value)]
        return self._collect(what, self._answer(what, mine), read, limit, max_bytes)

    def new_name(self, what: str) -> str:
        """A name that nothing else has, equal on all ranks: random, in hexadecimal. Raises as `gather` does."""
        return self.gather(what, secrets.token_hex(_NAME_BYTES), hexadecimal(_NAME_BYTES))[0].hex()

    def barrier(self, what: str = "barrier") -> None:
        """Wait for every rank; raises as `gather` does."""
        self.gather(what, None, messages.nothing)

    def part(self, what: str) -> bool:
        """The last `barrier`, after which processes may end. Returns whether all ranks are known to have come.

        Rank 0, whose process may host the store, stays until all of them know it. Raises as `gather` does, unless the
        store goes after this rank and the one that hosts it have come: its host has then left, and nothing remains to
        agree on.
        """
        if self._store is None:
            return True
        mine = messages.answer(what, None)
        keys = self._answer(what, mine)
        try:
            if not self._all_part(what, keys):
                return False
        except MoERuntimeError as error:
            # If this process hosts the store and ends, peers that still wait would take it for one that left in order.
            self.leave(reason_of(error), error)
            raise
        with contextlib.suppress(MoERuntimeError):
            keys = self._answer(what, mine)
            if self.rank == 0:
                self._wait(what, keys, PARTING_S)
        return True

    def _all_part(self, what: str, keys: list[str]) -> bool:
        """Wait until all ranks have come to `part`; False if the store has gone since its host came."""
        host = self._host.rank
        # If the store goes before that rank has come, it has not left in order.
        if host >= 0 and self._wait(what, [keys[host]], self.timeout_s):
            raise self._timeout(what, self._not_there(what, keys) or [host], self.timeout_s)
        try:
            self._collect(what, keys, messages.nothing, self.timeout_s)
        except StoreLostError as error:
            if isinstance(error.__cause__, StoreSilentError):
                raise
            return False
        return True

    def leave(self, reason: str, error: BaseException | None = None) -> None:
        """Make the peers' next `gather`, or the one they wait in, raise `PeerAbortedError` with `reason`.

        If `error` says that a rank is gone, all others raise a `PeerTimeoutError` that names it.
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
        # If the store is gone, no peer can read it.
        with contextlib.suppress(MoERuntimeError):
            note = messages.answer("leave", [self.rank, reason, cause])
            # First, for those who look for it when they see the answer. The first rank's note stays: others follow it.
            self._ask("leave", lambda: self._store.check([self._left_key]) or self._store.set(self._left_key, note))
            self._answer("leave", messages.farewell(reason, cause))
            if self._host.rank == self.rank and self.world_size > 1:
                time.sleep(FAREWELL_S)

    def missing(self, event: str, wait_s: float) -> list[int]:
        """Ranks that have not called this for `event` within `wait_s`, or before the store failed.

        If the store fails before that is known, the rank that hosts it, where one does. Never raises.
        """
        absent, lost = self.roll_call(event, wait_s)
        return [lost.rank] if lost is not None and not absent and lost.rank >= 0 else absent

    def roll_call(self, event: str, wait_s: float) -> tuple[list[int], MoERuntimeError | None]:
        """As `missing`, and the error if the store failed; then the ranks that were missing before it did."""
        absent: list[int] = []
        if self._store is None:
            return absent, None
        keys = self._present_keys(event)
        deadline = time.monotonic() + wait_s
        try:
            self._ask(event, lambda: self._store.set(keys[self.rank], b"here"))
            while (absent := self._not_there(event, keys)) and time.monotonic() <= deadline:
                time.sleep(0.01)
        except MoERuntimeError as error:
            return absent, error
        return absent, None

    def in_vain(self, what: str, event: str, number: int, peer: int) -> Exception | None:
        """For a rank that waits outside of the store, in exchange `number` of `event`: why it waits in vain, if known.

        A rank has given up, or `peer` waits in the store for this one. Says in the store that this rank has come.
        Raises `StoreLostError`.
        """

        def look() -> tuple[bool, bytes | None]:
            self._store.set(self._present_keys(event)[self.rank], str(number).encode())
            elsewhere = peer != self.rank and self._store.check([f"{self._prefix}/{self._calls + 1}/{peer}"])
            # Last, since a rank that gives up also answers the next call.
            return elsewhere, self._store.get(self._left_key) if self._store.check([self._left_key]) else None

        elsewhere, note = self._ask(what, look)
        if note is not None:
            return self._who_left(what, note)
        steps = f"rank {self.rank}: {what!r}, rank {peer}: another one"
        return ValueError(f"group: its ranks are not at the same step, {steps}") if elsewhere else None

    def not_come(self, what: str, event: str, number: int, limit_s: float) -> MoERuntimeError:
        """The error for ranks that have not come to exchange `number` of `event`, as `in_vain` says, in `limit_s`.

        Raises `StoreLostError`.
        """
        # Those that came at last have not said so yet.
        time.sleep(2 * LOOK_S)
        if (left := self.who_left(what)) is not None:
            return left
        keys = self._present_keys(event)
        numbers = self._ask(what, lambda: [self._number_at(key) for key in keys])
        if missing := [rank for rank, found in enumerate(numbers) if found < number and rank != self.rank]:
            return self._timeout(what, missing, limit_s)
        message = f"{what}: all ranks came, but their exchange did not end within {limit_s:g} s"
        return PeerTimeoutError(message, -1, Phase.START_UP)

    def _number_at(self, key: str) -> int:
        """The number under `key`; -1 if there is none."""
        with contextlib.suppress(ValueError):
            if self._store.check([key]):
                return int(self._store.get(key)[:20])
        return -1

    def connect(self, what: str, key: str) -> dist.ProcessGroupGloo:
        """A gloo group over the same ranks for the caller alone. Collective; `key` must be new and equal on all ranks.

        Raises `PeerTimeoutError` if that takes longer than the group's timeout, or a connection fails.
        """
        limit = timedelta(seconds=self.timeout_s)
        # It waits in the store, so it needs its own connection and thread.
        store = self._ask(what, lambda: self._store.clone(), self.timeout_s)

        def make() -> dist.ProcessGroupGloo:
            return dist.ProcessGroupGloo(dist.PrefixStore(key, store), self.rank, self.world_size, limit)

        with self.connecting(what, key):
            return calls_of(store).run(make, self.timeout_s, answer_s=CONNECTED_S)

    def number_board(self, name: str) -> NumberBoard:
        """A word of each rank in the store, which needs no call of the others."""
        store = self._ask(name, lambda: self._store.clone(), self.timeout_s)
        return NumberBoard(store, f"{self._prefix}/{name}", self.rank, self.world_size, self.timeout_s)

    def connect_nccl(self, what: str, key: str) -> Any:
        """An NCCL group over the same ranks for the caller alone. It connects at its first use, `connecting`.

        torch's watchdog does not know of its work: the caller looks to its waits (`HostWatch`). `wait` of its work
        would wait on the host, so the caller orders streams itself. The rest is as for `connect`.
        """
        store = self._ask(what, lambda: self._store.clone(), self.timeout_s)
        before = {name: os.environ.get(name) for name in NO_WATCHDOG}
        os.environ.update(NO_WATCHDOG)  # read by the constructor
        try:
            return dist.ProcessGroupNCCL(
                dist.PrefixStore(key, store), self.rank, self.world_size, dist.ProcessGroupNCCL.Options()
            )
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    @contextlib.contextmanager
    def connecting(self, what: str, event: str) -> Iterator[None]:
        """Around work in which all ranks connect, and which does not say who is missing. Collective.

        It ends when all ranks have done the work. A `RuntimeError` of the work becomes a `PeerTimeoutError` that names
        the ranks that are gone, or a `PeerAbortedError` if one has given up.
        """
        look_out = _LookOut(
            self._ask(what, lambda: self._store.clone(), self.timeout_s),
            called=f"{self._prefix}/{event}/called",
            present=self._present_keys(event)[self.rank],
            left=self._left_key,
        )
        try:
            try:
                yield
            except MoERuntimeError:
                raise
            except RuntimeError as error:
                raise self._cannot_connect(what, event, look_out, error) from error
            # Else a rank that was killed after its own work could not be told from one that waits in it.
            self.barrier(f"{what}: connected")
        finally:
            look_out.stop()

    def _cannot_connect(self, what: str, event: str, look_out: _LookOut, error: RuntimeError) -> MoERuntimeError:
        """The error for `error` of a connection, which the peers may not have seen yet."""
        with contextlib.suppress(MoERuntimeError):
            self._ask(what, lambda: self._store.set(look_out.called, b""))
        missing, lost = self.roll_call(event, min(ROLL_CALL_S, self.timeout_s))
        if not missing and look_out.note is not None:
            return self._who_left(what, look_out.note)
        if not missing and lost is not None:
            return lost
        missing = [self._names[rank] for rank in missing]
        names = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
        reason = "it takes too long" if isinstance(error, StoreSilentError) else error
        message = (
            f"{what}: rank {self._names[self.rank]} cannot connect to its peers, {names} did not take part: {reason}"
        )
        return PeerTimeoutError(message, missing[0] if missing else -1, Phase.START_UP)

    @property
    def _left_key(self) -> str:
        return f"{self._whole._prefix}/left"

    def _present_keys(self, event: str) -> list[str]:
        return [f"{self._prefix}/{event}/{rank}" for rank in range(self.world_size)]

    def _who_left(self, what: str, note: bytes) -> MoERuntimeError:
        """The error for the note of a rank that has given up."""
        if self._whole is not self:
            return self._whole._who_left(what, note)
        try:
            number = integer(0, self.world_size - 1)
            rank, reason, cause = row(number, text, number)(messages.read_answer(note).value)
        except ValueError as error:
            message = f"{what}: a rank gave up with a note that this program does not write: {error}"
            return MoERuntimeError(message, phase=Phase.START_UP)
        return self._left_by(what, rank, reason, cause)

    def _left_by(self, what: str, rank: int, reason: str, cause: int) -> MoERuntimeError:
        """The error for `rank` having given up because of rank `cause`, itself or one that it misses."""
        if self._whole is not self:
            return self._whole._left_by(what, rank, reason, cause)
        another = cause not in (rank, self.rank) and cause < self.world_size
        kind, named = (PeerTimeoutError, cause) if another else (PeerAbortedError, rank)
        return kind(f"{what}: rank {rank} gave up: {reason}", named, Phase.START_UP)

    def _ask(self, what: str, work: Callable[[], T], limit_s: float = 0.0) -> T:
        """Return `work()`, which calls the store and waits there for at most `limit_s`.

        Errors of the store become a `StoreLostError` that says whether it is gone or does not answer.
        """
        try:
            return calls_of(self._store).run(work, limit_s)
        except RuntimeError as error:
            trouble = f"cannot reach the group's store, {self._host.name} is gone: {error}"
            if isinstance(error, StoreSilentError):
                trouble = f"gets no answer from the group's store, {self._host.name} may be stopped"
            message = f"{what}: rank {self._names[self.rank]} {trouble}"
            raise StoreLostError(message, self._whole._host.rank, Phase.START_UP) from error

    def _answer(self, what: str, mine: bytes) -> list[str]:
        """Store this rank's answer to the next call. Returns the keys of all ranks' answers."""
        self._calls += 1
        keys = [f"{self._prefix}/{self._calls}/{rank}" for rank in range(self.world_size)]
        self._ask(what, lambda: self._store.set(keys[self.rank], mine))
        return keys

    def _collect(
        self, what: str, keys: list[str], read: Reader[T], limit: float, max_bytes: int = MAX_BYTES
    ) -> list[T]:
        """Wait for the answers of all ranks under `keys`, and return their values as `read` does."""
        if missing := self._wait(what, keys, limit):
            raise self._timeout(what, missing, limit)
        stored = self._ask(what, lambda: self._read(keys))
        answers = read_answers(what, stored, lambda raw: messages.read_answer(raw, max_bytes))
        for rank, answer in enumerate(answers):
            if answer.left is not None:
                raise self._left_by(what, rank, answer.left, answer.cause)
        if len({answer.what for answer in answers}) > 1:
            steps = describe_ranks([answer.what for answer in answers])
            raise ValueError(f"group: its ranks are not at the same step, {steps}")
        return read_answers(what, [answer.value for answer in answers], read)

    def _timeout(self, what: str, missing: list[int], limit: float) -> PeerTimeoutError:
        ranks = [self._names[rank] for rank in missing]
        names, count = ", ".join(map(str, ranks)), self._whole.world_size
        message = f"{what}: rank {names} of {count} did not come within {limit:g} s"
        return PeerTimeoutError(message, ranks[0], Phase.START_UP)

    def _wait(self, what: str, keys: list[str], limit: float) -> list[int]:
        """Ranks whose answers are not there within `limit` seconds.

        Raises if the answers of others are not there soon after a rank has given up: who waits for them would wait in
        vain. It polls, since a store that waits serves no other thread of this process meanwhile.
        """
        deadline = time.monotonic() + limit
        next_look = time.monotonic()
        left: MoERuntimeError | None = None
        pause, longest = _POLL_S
        try:
            while not self._ask(what, lambda: self._store.check(keys)):
                now = time.monotonic()
                if now > deadline:
                    # One may have answered since the last poll.
                    missing = self._not_there(what, keys)
                    if missing and left is not None:
                        raise left
                    return missing
                if left is None and now >= next_look:
                    next_look = now + LOOK_S
                    if self._ask(what, lambda: self._store.check([self._left_key])):
                        left = self._who_left(what, self._ask(what, lambda: self._store.get(self._left_key)))
                        deadline = min(deadline, now + ROLL_CALL_S)
                time.sleep(pause)
                pause = min(2 * pause, longest)
        except StoreLostError as error:
            # The rank that gave up may have hosted it.
            if left is not None:
                raise left from error
            raise
        return []

    def _not_there(self, what: str, keys: list[str]) -> list[int]:
        """Ranks whose keys are not in the store."""
        return self._ask(what, lambda: [rank for rank, key in enumerate(keys) if not self._store.check([key])])

    def _read(self, keys: list[str]) -> list[bytes]:
        """The answers of all ranks, which are there. Deletes this rank's answer to the previous call."""
        stored = [self._store.get(key) for key in keys]
        # Every rank has come to this call, so none still reads the answers to the previous one.
        if self._calls > 1:
            # The answers are read, whatever happens to the store.
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"{self._prefix}/{self._calls - 1}/{self.rank}")
        return stored


class NumberBoard:
    """A word of each rank in the group's store, over a connection of its own."""

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int, limit_s: float) -> None:
        self._store, self._keys = store, [f"{prefix}/{r}" for r in range(world_size)]
        self._rank = rank
        self._store.set_timeout(timedelta(seconds=limit_s))

    def put(self, word: bytes) -> None:
        """Write this rank's word. Raises `RuntimeError` where the store is gone."""
        self._store.set(self._keys[self._rank], word)

    def read(self) -> dict[int, bytes]:
        """The words of the ranks that have written one. Raises as `put`."""
        store = self._store
        return {r: store.get(key) for r, key in enumerate(self._keys) if store.check([key])}


class _LookOut:
    """While this rank waits in code of others: answers a call of the roll for it, and notes what a peer leaves.

    Attributes:
        called: the key that a rank sets to call the roll.
        note: what a rank that gave up has left, if one has.
    """

    def __init__(self, store: Any, *, called: str, present: str, left: str) -> None:
        self.called = called
        self.note: bytes | None = None
        self._store, self._present, self._left = store, present, left
        self._ended = threading.Event()
        # A daemon, since a process must be able to end while the store does not answer.
        threading.Thread(target=self._look, name="moe_runtime look-out", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _look(self) -> None:
        # Once the store is gone, nobody calls the roll.
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(LOOK_S):
                if self._store.check([self.called]):
                    self._store.set(self._present, b"here")
                if self.note is None and self._store.check([self._left]):
                    self.note = self._store.get(self._left)


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
    if not isinstance(group, dist.ProcessGroup):
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this process is not a member of it")
        raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: this process is not a member of it")
    return group


def _check_started_alone() -> None:
    """Raise `ValueError` if a launcher started several ranks, each of which would otherwise run on its own."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and num_ranks != "1":
        raise ValueError(
            f"group: a launcher started {num_ranks} ranks (WORLD_SIZE), but torch.distributed is not initialised; call "
            "moe_runtime.init_from_env() first, or ask for transport='private' to have a single rank in each process"
        )


def unwrapped(store: Any) -> Any:
    """The store below the prefixes that torch.distributed and launchers put before their keys."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def read_answers(what: str, answers: list[Any], read: Reader[T]) -> list[T]:
    """What `read` returns for the answer of each rank. Raises `MoERuntimeError` naming the rank whose it refuses."""
    values = []
    for rank, answer in enumerate(answers):
        try:
            values.append(read(answer))
        except ValueError as error:
            message = f"{what}: the answer of rank {rank} is none that this program gives: {error}"
            raise MoERuntimeError(message, rank, Phase.START_UP) from None
    return values


def _host_of(store: Any, ranks: list[int]) -> _StoreHost:
    """Whose process hosts the default store, for a group of these ranks of the default group."""
    store = unwrapped(store)
    if not isinstance(store, dist.TCPStore):
        return _StoreHost()
    # torch does not say who hosts a store. It makes the one of these variables itself.
    if (store.host, str(store.port)) != (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")):
        return _StoreHost()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _StoreHost(name="torchrun's agent, which hosts it,")
    if 0 in ranks:
        return _StoreHost(ranks.index(0), f"rank {ranks.index(0)}, which hosts it,")
    return _StoreHost(name="rank 0 of the default group, which hosts it,")


def describe_ranks(values: list[Any]) -> str:
    """`rank 0: a, rank 1: b` for an error message about values that should be equal."""
    return ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
