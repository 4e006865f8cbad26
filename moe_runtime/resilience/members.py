"""The ranks of a context, as they die, come back and leave: what a caller may ask for, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_runtime.comm.errors import PeerTimeoutError
from moe_runtime.resilience.recovery import Recovery, is_recoverable
from moe_runtime.support.arguments import check_kind, describe


class ContextMembers:
    """The ranks of a context, by their numbers at the start. Owned by the context, whose public methods say more.

    Args:
        world_size: ranks at the start.
        recovery: what goes on after a death; None where ranks do not change.

    Attributes:
        others_agreed: what is equal on the others, by key, for a process that is still to take the place of a rank;
            else None.
    """

    def __init__(self, world_size: int, recovery: Recovery | None) -> None:
        self.others_agreed: dict[str, object] | None = None
        self._recovery, self._all = recovery, tuple(range(world_size))

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks still in the group."""
        return self._all if self._recovery is None else self._recovery.membership.members

    @property
    def states(self) -> dict[int, str]:
        """`in` or `out`, for each rank."""
        everyone = self._all if self._recovery is None else self._recovery.membership.everyone
        present = self.present
        return {rank: "in" if rank in present else "out" for rank in everyone}

    def check_agrees(self, agreed: dict[str, object], *, so_far: bool = False) -> None:
        """Raise `ValueError` naming the keys in which this process, with `agreed`, and those it joins differ.

        With `so_far` it need not have all keys of the others yet.
        """
        others = self.others_agreed or {}
        if so_far:
            others = {key: value for key, value in others.items() if key in agreed}
        problems = [
            f"{key}: here {agreed.get(key, 'not given')!r}, the others {others.get(key, 'not given')!r}"
            for key in dict.fromkeys([*others, *agreed])
            if agreed.get(key) != others.get(key)
        ]
        if problems:
            raise ValueError(f"agree: this rank and the others disagree on {'; '.join(problems)}")

    def join(self, limit_s: float) -> None:
        """Take the place of a rank: wait until the others `admit` this process. Raises as `Recovery.join`."""
        assert self._recovery is not None
        self._recovery.join(limit_s)
        self.others_agreed = None

    def admit(self, limit_s: float, check: Callable[[], None]) -> tuple[int, ...]:
        """As `ExpertParallelContext.admit`, and `Recovery.admit`."""
        return () if self._recovery is None else self._recovery.admit(limit_s, check)

    def check_release(self, ranks: Sequence[int], keeps_memory: str | None) -> None:
        """Raise `ValueError` where `ranks` cannot leave.

        Args:
            ranks: as of `ExpertParallelContext.release`.
            keeps_memory: the transport, if its memory stays shared with ranks that leave; else None.
        """
        if self._recovery is None:
            raise ValueError("on_failure: expected a context of several ranks with on_failure='continue' for release")
        if keeps_memory is not None:
            raise ValueError(
                f"ranks: none can leave in order with transport={keeps_memory!r}, whose memory stays shared"
            )
        check_kind("ranks", ranks, (list, tuple))
        present = self.present
        for rank in ranks:
            if rank not in present or isinstance(rank, bool):
                raise ValueError(f"ranks: expected some of {present}, got {describe(rank)}")
        if not ranks or len(set(ranks)) == len(present):
            raise ValueError(f"ranks: expected one or more, but not all of {present}, got {describe(ranks)}")

    def release(self, ranks: Sequence[int], limit_s: float, check: Callable[[], None]) -> None:
        """As `Recovery.release`, after `check_release`."""
        assert self._recovery is not None
        self._recovery.release(ranks, limit_s, check)

    def recover(self, failure: Exception | None, replays: int, limit_s: float, check: Callable[[], None]) -> int:
        """As `ExpertParallelContext.recover`, after `failure`."""
        if self._recovery is None or not isinstance(failure, PeerTimeoutError) or not is_recoverable(failure):
            raise ValueError("recover: expected a context with on_failure='continue' that misses a rank in a step")
        self._recovery.recover(failure)
        return -self._recovery.most("recover", -replays, limit_s, check)
