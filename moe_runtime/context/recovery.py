"""What survivors of a death do: agree on who is left, make memory for the smaller group, and run the step again.

Ranks may be one step apart when a rank dies: one has its result already, while another still waits for the dead rank.
Then the first takes part in that step once more, for the others, with a copy of what it brought.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moe_runtime.comm.errors import MoERuntimeError, PeerTimeoutError, Phase
from moe_runtime.comm.membership import Membership
from moe_runtime.comm.rank_group import RankGroup

_LOG = logging.getLogger(__name__)

CLOSE_POLL_S = 0.01
RECOVERABLE = (
    Phase.DISPATCH_SEND,
    Phase.DISPATCH_RECV,
    Phase.COMBINE_SEND,
    Phase.COMBINE_RECV,
    Phase.RECOVERY,
)
"""Phases of a step. A rank that dies in another, such as at start-up, ends the group."""

T = TypeVar("T")


Change = Callable[[tuple[int, ...]], None]
"""A method that is called with the members of a new generation, by their numbers at the start."""


class Recovery:
    """The survivors of a context's ranks, named by their numbers at the start.

    Args:
        membership: who is left.
        renew: makes memory for the members, whose group it gets; raises `PeerTimeoutError` if one is missing.
        end: called with the error with which a recovery has failed, which later calls are to raise.
        timeout_s: limit of a step; half of it is how long survivors wait for each other.

    Attributes:
        membership: as given.
        steps_done: steps of this rank that have ended.
        steps_repeated: steps that this rank has run again, for itself or for others.
        step_number: of the step that runs, equal on all ranks in it.
        background: runs work of a recovery one after another, on a thread of its own.
    """

    def __init__(
        self,
        membership: Membership,
        renew: Callable[[tuple[int, ...], RankGroup], None],
        end: Callable[[Exception], None],
        timeout_s: float,
    ) -> None:
        self.membership = membership
        self.steps_done = 0
        self.steps_repeated = 0
        self.step_number = 0
        self.background = ThreadPoolExecutor(1, thread_name_prefix="moe_runtime recovery")
        self._renew, self._end = renew, end
        self._window_s = timeout_s / 2
        self._changes: list[tuple[weakref.WeakMethod[Change], weakref.WeakMethod[Change]]] = []
        self._last: Callable[[], object] | None = None
        self._others_lack_last = False

    def add(self, check: Change, change: Change) -> None:
        """Have methods of an object, which is not kept alive, called with the members of each later generation.

        `check` raises `ExpertsLostError` if they cannot go on, on all of them alike, and changes nothing. `change` goes
        over to them, when there is memory for them. All ranks add theirs in the same order.
        """
        self._changes.append((weakref.WeakMethod(check), weakref.WeakMethod(change)))

    def run(self, step: Callable[[], T], again: Callable[[], Callable[[], object]]) -> T:
        """`step()`, again and again until no rank dies in it.

        `again()` is called after it, and makes what repeats it later without the caller's tensors. Raises as `recover`.
        """
        before = self.membership.generation

        def once_more() -> T:
            self.steps_repeated += self.membership.generation > before
            self.step_number = self.steps_done + 1
            return step()

        result = self._until_none_dies(once_more)
        self.steps_done += 1
        self._last = again()
        return result

    def part(self, limit_s: float, check: Callable[[], None]) -> None:
        """Before the memory is freed: wait until all members are here too, and help those that still need this rank.

        `check` raises what has failed. Raises `PeerTimeoutError` naming a member, by its present number, that does not
        come within `limit_s`; and as `recover`.
        """
        self._until_none_dies(lambda: self._meet_at_end(time.monotonic() + limit_s, limit_s, check))

    def recover(self, error: PeerTimeoutError) -> None:
        """After `error` of a step: go on with those that are left. Collective for all that are alive.

        Raises:
            RankRemovedError: the others have gone on without this rank.
            ExpertsLostError: as `check` of `add` says, on every survivor.
            StoreLostError: the store where ranks meet is gone or silent.
        """
        began, before = time.monotonic(), self.membership.members
        try:
            record = self._agree(error)
        except Exception as failure:
            self._end(failure)
            raise
        fewest = min(record.values())
        self._others_lack_last = fewest < self.steps_done
        _LOG.warning(
            "rank %d: generation %d: rank %s left after %d steps, %s go on after %.2f s (%s)",
            self.membership.rank,
            self.membership.generation,
            _listed(sorted(set(before) - set(record))),
            fewest,
            _listed(list(record)),
            time.monotonic() - began,
            error,
        )

    def _agree(self, error: PeerTimeoutError) -> dict[int, int]:
        """Agree with the other survivors, and go over to their memory. Returns the steps that each has done."""
        membership = self.membership
        while True:
            before = membership.members
            suspects = {before[error.rank]} if 0 <= error.rank < len(before) else set()
            record = membership.agree(self.steps_done, suspects - {membership.rank}, self._window_s)
            if not 0 <= self.steps_done - min(record.values()) <= 1:
                text = f"rank {membership.rank} has done {self.steps_done} steps, the members {record}"
                raise MoERuntimeError(f"recovery: steps are further apart than can be: {text}", membership.rank)
            self._tell([check for check, _ in self._changes])
            try:
                self._renew(membership.members, membership.group())
                self._tell([change for _, change in self._changes])
                return record
            except PeerTimeoutError as another:
                error = another  # Also of this rank, if it was stopped and the others go on already.

    def _tell(self, methods: list[weakref.WeakMethod[Change]]) -> None:
        for reference in methods:
            method = reference()
            if method is not None:
                method(self.membership.members)

    def _until_none_dies(self, work: Callable[[], T]) -> T:
        while True:
            try:
                if self._others_lack_last:
                    assert self._last is not None
                    self.steps_repeated += 1
                    self.step_number = self.steps_done
                    self._last()
                    self._others_lack_last = False
                return work()
            except PeerTimeoutError as error:
                if error.phase not in RECOVERABLE:
                    raise
                self.recover(error)

    def _meet_at_end(self, deadline: float, limit_s: float, check: Callable[[], None]) -> None:
        membership = self.membership
        membership.announce("close")
        while absent := membership.absent("close"):
            check()
            if membership.leaving():
                raise PeerTimeoutError("close: a rank is missed in a step", -1, Phase.COMBINE_RECV)
            if time.monotonic() > deadline:
                number = membership.members.index(absent[0])
                message = f"close: rank {number} did not come within {limit_s:g} s"
                raise PeerTimeoutError(message, number, Phase.START_UP)
            time.sleep(CLOSE_POLL_S)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
