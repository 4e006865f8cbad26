"""Symmetric memory within one process: a peer's memory is simply another tensor."""

from __future__ import annotations

import numpy as np
import torch

from moe_runtime.comm.heaps.heap import REGION_ALIGNMENT, SymmetricHeap
from moe_runtime.support.arguments import check_device, check_integer

MAX_MEMBERS = 1024
"""Most virtual ranks of one process."""


class PrivateHeap(SymmetricHeap):
    """A member of a group of virtual ranks in this process (`PrivateHeap.group`), or a group of one (`PrivateHeap()`).

    Members run one after another, so the first to `allocate()` allocates for all of them. The others must have reserved
    the same regions (`ValueError`). Works on a CPU and on one GPU.
    """

    name = "private"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._members: list[PrivateHeap] = [self]
        self._base: torch.Tensor | None = None
        # As tensors name it: `cuda` is the current `cuda:N`.
        super().__init__(0, 1, torch.empty(0, device=check_device("device", device, meta=False)).device)

    @classmethod
    def group(cls, world_size: int, device: torch.device | str = "cpu") -> list[PrivateHeap]:
        """`world_size` heaps on `device` whose peer pointers lead to each other."""
        check_integer("world_size", world_size, high=MAX_MEMBERS)
        members = [cls(device) for _ in range(world_size)]
        for rank, member in enumerate(members):
            member.rank = rank
            member.world_size = world_size
            member._members = members
        return members

    def barrier(self) -> None:
        """Nothing to wait for: the members share one host thread."""

    def _allocate(self, num_bytes: int) -> None:
        for member in self._members:
            if member._base is None and not member.closed:
                member._base = aligned_zeros(num_bytes, self.device)
                self._write_ones(member._base)
        assert self._base is not None
        first = next(member for member in self._members if member.allocated or member is self)
        if first._regions != self._regions:
            raise ValueError(
                f"region: rank {self.rank} reserved {self._regions}, rank {first.rank} reserved {first._regions}"
            )

    def _peer_base(self, rank: int) -> torch.Tensor:
        base = self._members[rank]._base
        if base is None:
            raise ValueError(f"heap: that of rank {rank} is closed")
        return base

    def _close(self, *, failed: bool) -> None:
        self._base = None


def aligned_zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 `[num_bytes]` of zeros whose address is a multiple of `REGION_ALIGNMENT`."""
    room_bytes = num_bytes + REGION_ALIGNMENT
    if device.type == "cpu":
        # The system provides pages of NumPy's zeros on first touch; torch would write all of them at once.
        room = torch.from_numpy(np.zeros(room_bytes, dtype=np.uint8))
    else:
        room = torch.zeros(room_bytes, dtype=torch.uint8, device=device)
    skip = -room.data_ptr() % REGION_ALIGNMENT
    return room[skip : skip + num_bytes]
