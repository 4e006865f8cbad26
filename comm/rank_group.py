"""The calls among the ranks of a group: small exchanges between their hosts, and connections, each with a time limit.

They go through the key-value store of `comm/group_members.py`, which shows exactly which ranks are missing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch.distributed as dist

from moe_runtime.comm import messages
from moe_runtime.comm.errors import MoERuntimeError, PeerTimeoutError, Phase, StoreLostError, reason_of
from moe_runtime.comm.group_members import MAX_SECONDS, POLL_S, GroupMembers, unwrapped
from moe_runtime.comm.left_groups import free_ended
from moe_runtime.comm.messages import MAX_BYTES, Reader, hexadecimal
from moe_runtime.comm.store_calls import StoreSilentError, calls_of
from moe_runtime.support.arguments import check_seconds

ROLL_CALL_S = 3.0
"""How long ranks have to report themselves, once one of them has waited too long."""

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
"""Environment for an NCCL group whose work torch's watchdog ignores.

Where the watchdog finds an error, it sleeps for a minute, and the default group ends the process minutes later. It does
not watch a group whose waits block.
"""

WORD_S = 3.0
"""How long a `NumberBoard` waits for the store. What it wrote may be there later; what it reads can be read again."""

T = TypeVar("T")


class RankGroup(GroupMembers):
    """The ranks that share one context, and small exchanges between their hosts.

    `gather` and `barrier` are collective. After a `PeerTimeoutError` ranks may have made different numbers of calls,
    and the group is unusable. The base has the constructor, groups of some of the ranks, and `leave`.
    """

    def gather(
        self, what: str, value: object, read: Reader[T], *, timeout_s: float | None = None, max_bytes: int = MAX_BYTES
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
            MoERuntimeError: naming the rank whose answer `read` refuses.
        """
        limit = self.timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s, MAX_SECONDS)
        mine = messages.answer(what, value, max_bytes)
        if self._store is None:
            return [read(value)]
        return self._collect(what, self._answer(what, mine), read, limit, max_bytes)

    def new_name(self, what: str) -> str:
        """A name that nothing else has, equal on all ranks: random, in hexadecimal. Raises as `gather` does."""
        num_bytes = 8
        return self.gather(what, secrets.token_hex(num_bytes), hexadecimal(num_bytes))[0].hex()

    def barrier(self, what: str = "barrier") -> None:
        """Wait for every rank; raises as `gather` does."""
        self.gather(what, None, messages.nothing)

    def for_newcomers(self) -> Self:
        """The same ranks under a new name, in the store as processes see it that know no torch.distributed. Collective.

        Raises as `gather`.
        """
        name = self.new_name("RankGroup.for_newcomers")
        group = self.of_survivors(list(range(self.world_size)), name)
        group._store, group._prefix = unwrapped(self._store), f"moe_runtime/{name}"
        return group

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
        next_look = time.monotonic()
        deadline = next_look + limit
        left: MoERuntimeError | None = None
        pause = 0.001
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
                    if (note := self._note(what)) is not None:
                        left = self._who_left(what, note)
                        deadline = min(deadline, now + ROLL_CALL_S)
                time.sleep(pause)
                pause = min(2 * pause, POLL_S)
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
                self._store.delete_key(self._keys(self._calls - 1)[self.rank])
        return stored

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
        keys = self._keys(event)
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
            self._store.set(self._keys(event)[self.rank], str(number).encode())
            elsewhere = peer != self.rank and self._store.check([self._keys(self._calls + 1)[peer]])
            # Last, since a rank that gives up also answers the next call.
            return elsewhere, self._read_note()

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
        keys = self._keys(event)
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
        free_ended()
        store, limit = dist.PrefixStore(key, self._own_connection(what)), timedelta(seconds=self.timeout_s)
        with self.connecting(what, key):
            return calls_of(store).run(
                lambda: dist.ProcessGroupGloo(store, self.rank, self.world_size, limit),
                self.timeout_s,
                answer_s=CONNECTED_S,
            )

    def number_board(self, name: str) -> NumberBoard:
        """A word of each rank in the store, which needs no call of the others."""
        store = self._own_connection(name)
        store.set_timeout(timedelta(seconds=self.timeout_s))
        calls = calls_of(store)
        return NumberBoard(
            store, self._keys(name), self.rank, lambda work: self._ask(name, work, by=calls, answer_s=WORD_S)
        )

    def connect_nccl(self, what: str, key: str) -> Any:
        """An NCCL group over the same ranks for the caller alone. It connects at its first use, `connecting`.

        torch's watchdog does not know of its work: the caller limits its waits (`HostWatch`). `wait` of its work
        would wait on the host, so the caller orders streams itself. The rest is as for `connect`.
        """
        store = dist.PrefixStore(key, self._own_connection(what))
        before = {name: os.environ[name] for name in NO_WATCHDOG if name in os.environ}
        os.environ.update(NO_WATCHDOG)  # read by the constructor
        try:
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, dist.ProcessGroupNCCL.Options())
        finally:
            for name in NO_WATCHDOG:
                del os.environ[name]
            os.environ.update(before)

    @contextlib.contextmanager
    def connecting(self, what: str, event: str) -> Iterator[None]:
        """Around work in which all ranks connect, and which does not say who is missing. Collective.

        It ends when all ranks have done the work. A `RuntimeError` of the work becomes a `PeerTimeoutError` that names
        the ranks that are gone, or a `PeerAbortedError` if one has given up.
        """
        called, present = f"{self._prefix}/{event}/called", self._keys(event)[self.rank]
        look_out = _LookOut(self._own_connection(what), called=called, present=present, left=self._left_key)
        try:
            yield
        except MoERuntimeError:
            raise
        except RuntimeError as error:
            raise self._cannot_connect(what, event, look_out, error) from error
        else:
            # A rank that was killed after its own work could otherwise not be told from one that waits in it.
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
        mine, missing = self._names[self.rank], [self._names[rank] for rank in missing]
        names = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
        reason = "it takes too long" if isinstance(error, StoreSilentError) else error
        message = f"{what}: rank {mine} cannot connect to its peers, {names} did not take part: {reason}"
        return PeerTimeoutError(message, missing[0] if missing else -1, Phase.START_UP)

    def _own_connection(self, what: str) -> Any:
        """Another connection to the store: whoever waits in one needs one of their own, with its thread."""
        return self._ask(what, lambda: self._store.clone(), self.timeout_s)


class NumberBoard:
    """A word of each rank in the group's store, over a connection of its own, whose calls `ask` makes."""

    def __init__(self, store: Any, keys: list[str], rank: int, ask: Callable[[Callable[[], Any]], Any]) -> None:
        self._store, self._keys, self._rank, self._ask = store, keys, rank, ask

    def put(self, word: bytes) -> None:
        """Write this rank's word.

        Raises `StoreLostError` where the store is gone, or has not answered within `WORD_S`: then it may get the word
        later.
        """
        store, key = self._store, self._keys[self._rank]
        self._ask(lambda: store.set(key, word))

    def read(self) -> dict[int, bytes]:
        """The words of the ranks that have written one. Raises as `put`."""
        store, keys = self._store, self._keys
        words: dict[int, bytes] = self._ask(
            lambda: {r: store.get(key) for r, key in enumerate(keys) if store.check([key])}
        )
        return words


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


def read_answers(what: str, answers: list[Any], read: Reader[T]) -> list[T]:
    """What `read` returns for each rank's answer. Raises `MoERuntimeError` naming the rank whose answer it refuses."""
    values = []
    for rank, answer in enumerate(answers):
        try:
            values.append(read(answer))
        except ValueError as error:
            message = f"{what}: the answer of rank {rank} is not one that this program gives: {error}"
            raise MoERuntimeError(message, rank, Phase.START_UP) from None
    return values


def describe_ranks(values: list[Any]) -> str:
    """`rank 0: a, rank 1: b` for an error message about values that should be equal."""
    return ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
