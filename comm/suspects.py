"""Follows timeouts to the rank that stopped: whom a rank waits for in vain may itself wait for another.

Over several hosts a rank waits for ranks of its host and of its rail alone. All that wait for others give up at about
the same time, and say in the store whom they missed. A rank that missed nobody is the one that does not answer.
"""

from __future__ import annotations

import contextlib
import time

from moe_runtime.comm.messages import integer
from moe_runtime.comm.rank_group import RankGroup

_POLL_S = 0.02


class Suspects:
    """What each rank of a group says about whom it missed.

    Args:
        group: all ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._board = group.number_board("suspects")
        self._rank = integer(0, group.world_size - 1)

    def accuse(self, rank: int, *, gone: bool) -> None:
        """Say that this rank has waited for `rank` in vain; `gone` where that cannot come back."""
        with contextlib.suppress(RuntimeError):
            self._board.put(f"{rank} {int(gone)}".encode())

    def culprit(self, rank: int, wait_s: float) -> int:
        """Who keeps the others waiting, where one of them waits for `rank`.

        It is known at once if it is gone, else when the others have had `wait_s` to say whom they wait for. `rank`
        itself where ranks wait for each other, and where the store does not answer.
        """
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(RuntimeError, ValueError):
            while True:
                late = time.monotonic() > deadline
                missed = {by: self._read(word) for by, word in self._board.read().items()}
                last, passed = rank, set()
                while last in missed and last not in passed:
                    passed.add(last)
                    last = missed[last][0]
                if last in passed:
                    last = rank
                if late or (last, True) in missed.values():
                    return last
                time.sleep(_POLL_S)
        return rank

    def _read(self, word: bytes) -> tuple[int, bool]:
        rank, gone = word.decode().split()
        return self._rank(int(rank)), bool(int(gone))
