"""The memory of a heap that some of its ranks go on with, where no other can be made; dead ranks' memory stays as is.

Nothing is copied or moved. Each generation of ranks has signal words of its own, which were reserved at the start. So
kernels of an earlier one, in a graph say, neither see the new words nor write them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_runtime.comm.errors import MoERuntimeError
from moe_runtime.comm.heaps.heap import GroupHeap, SymmetricHeap
from moe_runtime.comm.rank_group import RankGroup


def spare_region(generation: int) -> str:
    """The region that is `signals` in this generation, from 1 on."""
    return f"signals {generation}"


class SurvivorHeap(GroupHeap):
    """The regions of `whole` on some of its ranks, as after `allocate()`. Making it is collective for these.

    No rank stores into `whole` any more: those that are out have ended.

    Args:
        whole: an allocated heap of all ranks, with spare regions for signals.
        ranks: those that go on, ascending, by their indices in `whole`.
        group: of these ranks alone.
        generation: number of this change, from 1 on.

    Raises `MoERuntimeError` where no spare region is left, and as `RankGroup.gather`.
    """

    def __init__(self, whole: SymmetricHeap, ranks: Sequence[int], group: RankGroup, generation: int) -> None:
        super().__init__(group, whole.device)
        self.name, self.graph_safe, self.kept_by_survivors = whole.name, whole.graph_safe, True
        self.allocated, self.total_bytes = True, whole.total_bytes
        self._whole, self._ranks = whole, list(ranks)
        self._regions, self._ones = dict(whole._regions), dict(whole._ones)
        if spare_region(generation) not in whole._regions:
            raise MoERuntimeError(f"recovery: no signal words are left for generation {generation}; restart all ranks")
        self._regions["signals"] = whole._regions[spare_region(generation)]
        # The kernels of a survivor have ended when it comes here. A flag of a later step must not be overwritten.
        group.barrier("recovery: kernels have ended")
        flags = self.tensor("token_flags")
        flags.zero_()
        flags[: self._ones["token_flags"]] = 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        group.barrier("recovery: flags are lowered")

    def _of_survivors(self, ranks: Sequence[int], group: RankGroup, generation: int) -> SymmetricHeap:
        return self._whole._of_survivors(ranks, group, generation)

    def _allocate(self, num_bytes: int) -> None:
        raise AssertionError("it is allocated")

    def _peer_base(self, rank: int) -> torch.Tensor:
        return self._whole._peer_base(self._ranks[rank])

    def _close(self, *, failed: bool) -> None:
        """The memory stays taken until the process ends: to free it, all ranks of `whole` would be needed."""
        self._part(failed=failed)
