"""A clock for tests of dead ranks: it stands still until nothing can happen any more, and then has run out.

So which wait ends by its timeout depends on no speed. A rank is stuck where something that it waits for has not come;
if all that live are stuck at the same time they are so for ever, since no one is left to store anything.
"""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm.errors import Phase
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange import reference

REGION = "progress"
DEAD = -1
AWAITED = (Phase.DISPATCH_SEND, Phase.DISPATCH_RECV, Phase.COMBINE_RECV)


class StandingClock:
    """Makes the waits of this process end once all living ranks are stuck and the first that this one misses is dead.

    Args:
        context: not allocated yet; its heap gets one region more, in which ranks tell in which wait they are.
        dead: the rank that will die.
    """

    def __init__(self, context: ExpertParallelContext, dead: int) -> None:
        self.context, self.dead, self.misses_dead = context, dead, False
        self.time_ns = 10**15
        context.heap.reserve(REGION, 12)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(reference, "time", SimpleNamespace(monotonic_ns=self.now, sleep=time.sleep))

    def now(self) -> int:
        # What came since a wait last looked is not missed any more: it looks once again before time goes on.
        before = self.misses_dead
        gone = int(self._progress(self.dead)[0]) == DEAD
        self.misses_dead = gone and self._missing(self.context.rank)[:1] == [self.dead]
        if before and self.misses_dead and self._all_stuck():
            self.time_ns += 10**12  # Longer than any wait, also for one that begins only now.
        else:
            time.sleep(2e-3)
        return self.time_ns

    def enter(self, phase: Phase | None, epoch: int = 0) -> None:
        """This rank is in `phase` now; None between phases."""
        words = self._progress(self.context.rank)
        words[2] += 1
        words[1] = epoch
        words[0] = 0 if phase is None else int(phase)
        words[2] += 1

    def die(self) -> None:
        """This rank is killed, after everyone can know."""
        self._progress(self.context.rank)[0] = DEAD
        os.kill(os.getpid(), signal.SIGKILL)

    def _progress(self, rank: int) -> torch.Tensor:
        return self.context.heap.peer_tensor(REGION, rank).view(torch.int32)

    def _missing(self, rank: int) -> list[int]:
        """The peers of which `rank` waits for something that has not come, ascending."""
        phase, epoch, _ = self._progress(rank).tolist()
        if phase not in AWAITED:
            return []
        world, layout = self.context.world_size, self.context.signals_layout
        words = self.context.heap.peer_tensor("signals", rank).view(torch.int32)
        here = {name: getattr(layout, name) + (epoch & 1) * world for name in ("dispatch_flag", "combine_flag")}

        def has_come(peer: int) -> bool:
            if phase == Phase.DISPATCH_RECV:
                return bool(words[here["dispatch_flag"] + peer] >= epoch)
            if phase == Phase.COMBINE_RECV:
                return bool(words[here["combine_flag"] + peer] >= epoch)
            return bool(words[layout.ready + peer] >= epoch) or bool(words[here["combine_flag"] + peer] >= epoch - 2)

        return [peer for peer in range(world) if not has_come(peer)]

    def _all_stuck(self) -> bool:
        """Whether all living ranks are stuck. Looked at twice: who has not moved between was so at one same moment."""
        living = [rank for rank in range(self.context.world_size) if rank != self.dead]
        looks = []
        for _ in (0, 1):
            if not all(self._missing(rank) for rank in living):
                return False
            looks.append([self._progress(rank).tolist() for rank in living])
        return looks[0] == looks[1] and all(turns % 2 == 0 for _, _, turns in looks[0])
