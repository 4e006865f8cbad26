"""`NumberExchange`: one number of each rank, again and again, for what ranks agree on before every step."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.errors import (
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    StoreLostError,
    reason_of,
)
from moe_runtime.comm.left_groups import keep_until
from moe_runtime.comm.messages import Reader
from moe_runtime.comm.rank_group import LOOK_S, RankGroup, read_answers

_GRACE_S = 1.0
"""How long an exchange may still take, once a rank is known to be elsewhere."""

_BACKSTOP_S = 30.0
"""How much later than this rank gloo may give up. At a limit of its own it ends connections without a reason."""


class NumberExchange:
    """One number of each rank in well under a millisecond, where `RankGroup.gather` takes several.

    The numbers travel through a gloo group of the exchange's own, which connects at the first call and is kept. The
    store only serves a rank that waits long: there it finds that a peer has given up, and which peers did not come.

    Args:
        what: name of the exchange for messages.
        group: the ranks. The constructor is not collective.
        read: checks what a rank sends, as in `RankGroup.gather`; an integer of 64 bits.
    """

    def __init__(self, what: str, group: RankGroup, read: Reader[int]) -> None:
        self._what, self._group, self._read = what, group, read
        self._event = ""
        self._gloo: Any = None
        self._work: Any = None
        self._count = 0
        self._failure: MoERuntimeError | None = None

    def gather(self, number: int) -> list[int]:
        """The number of every rank, by rank. Collective. Each wait lasts at most the timeout of the group.

        After an error this rank has given up, as by `leave`, and later calls raise `PeerAbortedError`.

        Raises:
            ValueError: a number that `read` refuses; or a rank waits for this one in another exchange.
            PeerTimeoutError: naming all ranks that are gone or did not come in time; its `rank` is the first of them.
            PeerAbortedError: naming a rank that gave up.
            StoreLostError: the store is gone or does not answer, while a peer does not come.
            MoERuntimeError: naming the rank whose number `read` refuses.
        """
        number = self._read(number)
        if self._group.world_size == 1:
            return [number]
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        try:
            if self._gloo is None:
                self._connect()
            return read_answers(self._what, self._exchange(number), self._read)
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Give up: peers that wait, or call `gather` later, raise with the reason of `error`. Waits for no peer."""
        # First, since peers look for it when their connections end.
        self._group.leave(reason_of(error), error)
        if self._failure is None:
            reason = f"{self._what}: rank {self._group.rank} gave up: {reason_of(error)}"
            self._failure = PeerAbortedError(reason, self._group.rank, Phase.HOST)
        gloo, work, self._gloo, self._work = self._gloo, self._work, None, None
        if gloo is not None:
            self._disconnect(gloo)
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=_GRACE_S))
                if not work.is_completed():
                    keep_until(work.is_completed, gloo)

    def close(self) -> None:
        """Free the connections. No rank is in `gather`."""
        self._gloo = None

    def _connect(self) -> None:
        self._event = self._group.new_name(self._what)
        # A rank that gave up after its answer does not connect.
        if (left := self._group.who_left(self._what)) is not None:
            raise left
        self._gloo = self._group.connect(self._what, f"moe_runtime/{self._event}")

    def _exchange(self, number: int) -> list[int]:
        self._count += 1
        limit_s = self._group.timeout_s
        mine = torch.full((self._group.world_size,), number, dtype=torch.int64, device="cpu")
        numbers = torch.empty_like(mine)
        options = dist.AllToAllOptions()
        options.asyncOp = True
        options.timeout = timedelta(seconds=limit_s + _BACKSTOP_S)
        try:
            self._work = self._gloo.alltoall_base(numbers, mine, [], [], options)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._wait(limit_s)
        self._work = None
        found: list[int] = numbers.tolist()
        return found

    def _wait(self, limit_s: float) -> None:
        """Wait for the exchange. After `LOOK_S`, and then as often, look in the store whether that is in vain."""
        deadline = time.monotonic() + limit_s
        in_vain: Exception | None = None
        looks = 0
        while not self._ended(min(LOOK_S, deadline - time.monotonic()), in_vain):
            if time.monotonic() >= deadline:
                raise in_vain or self._group.not_come(self._what, self._event, self._count, limit_s)
            if in_vain is None:
                looks += 1
                peer = (self._group.rank + looks) % self._group.world_size
                try:
                    in_vain = self._group.in_vain(self._what, self._event, self._count, peer)
                except StoreLostError as error:
                    in_vain = error
                if in_vain is not None:
                    # A rank that is elsewhere may have sent its number before.
                    grace_s = _GRACE_S if isinstance(in_vain, ValueError) else LOOK_S
                    deadline = min(deadline, time.monotonic() + grace_s)

    def _ended(self, wait_s: float, in_vain: Exception | None) -> bool:
        """Whether the exchange ends within `wait_s`. Raises if it fails: `in_vain`, if that says why."""
        try:
            # A limit of 0 would be none.
            self._work.wait(timedelta(seconds=max(wait_s, 0.001)))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            try:
                self._work.wait()
            except RuntimeError as error:
                known = None if isinstance(in_vain, StoreLostError) else in_vain
                raise (known or self._lost(error)) from error
        return True

    def _lost(self, error: RuntimeError) -> MoERuntimeError:
        """The error for a connection that has ended: a rank has given up, or is gone."""
        # In this order: a rank that gives up says so before its connections end.
        gone = self._unreachable()
        left = self._group.who_left(self._what)
        if left is not None:
            return left
        names = f"rank {', '.join(map(str, gone))}" if gone else "a rank"
        message = f"{self._what}: {names} of {self._group.world_size} is gone: {error}"
        return PeerTimeoutError(message, gone[0] if gone else -1, Phase.START_UP)

    def _unreachable(self) -> list[int]:
        """Ranks to which the connection has ended: a message to them fails at once, one to the others is not read."""
        gone = []
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        for peer in self._peers():
            try:
                for tag in range(_num_contexts()):
                    self._gloo.send([word], peer, tag)
            except RuntimeError:
                gone.append(peer)
        return gone

    def _disconnect(self, gloo: Any) -> None:
        """End all connections, and with them an exchange under way, for which gloo would else wait.

        Gloo has no call for that, but a receive that times out does it.
        """
        nothing = torch.zeros(1, dtype=torch.int64, device="cpu")
        for tag in range(_num_contexts(), 2 * _num_contexts()):
            for peer in self._peers():
                with contextlib.suppress(RuntimeError):
                    gloo.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._group.world_size) if rank != self._group.rank]


def _num_contexts() -> int:
    """Sets of connections of a gloo group, one for each network interface; a tag chooses one of them."""
    return len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
