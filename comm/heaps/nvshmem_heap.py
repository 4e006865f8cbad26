"""Symmetric memory between GPUs of one host, through NVSHMEM: every peer's memory is mapped here, or it is refused.

NVSHMEM (3.x) grows its heap as it is asked to, in steps of 512 MiB of GPU memory (`NVSHMEM_CUMEM_GRANULARITY`), so no
size is given beforehand. Where its virtual memory management is switched off (`NVSHMEM_DISABLE_CUDA_VMM=1`) the heap is
fixed at `NVSHMEM_SYMMETRIC_SIZE`, which then has to be large enough.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import torch

from moe_runtime.comm.heaps.heap import REGION_ALIGNMENT, GroupHeap, SymmetricHeap
from moe_runtime.comm.heaps.nvshmem_world import join, load_nvshmem
from moe_runtime.comm.heaps.survivors import SurvivorHeap
from moe_runtime.comm.messages import integer, optional, row, text
from moe_runtime.comm.processes import ProcessName
from moe_runtime.comm.rank_group import RankGroup

GONE_S = 10.0
"""How long the process of a rank that is out may take to end, with its part of the GPU's work."""


class NvshmemHeap(GroupHeap):
    """A heap of NVSHMEM for GPU ranks of one host, each with a GPU of its own.

    `allocate()` raises `OSError` on every rank, naming bytes needed and free, where the memory does not suffice;
    `PeerTimeoutError` naming a rank that does not come within the group's timeout; and `ValueError` where a peer's
    memory cannot be mapped. Several heaps of one process may live side by side, over the same ranks.

    `close()` gives the memory back to NVSHMEM, for later heaps. That is collective: after a failure the memory stays
    taken until the process ends.
    """

    name = "nvshmem"
    kept_by_survivors = True

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"device: expected one GPU such as cuda:0, got {device}")
        super().__init__(group, device)
        self._own: torch.Tensor | None = None
        self._bases: list[torch.Tensor] = []
        self._processes: list[ProcessName] = []

    def _prepare_for_deaths(self) -> None:
        mine = ProcessName.own()
        read = row(integer(1), integer(0), text)
        answers = self.group.gather("NvshmemHeap: processes", [mine.pid, mine.started, mine.namespace], read)
        self._processes = [ProcessName(*answer) for answer in answers]

    def _of_survivors(self, ranks: Sequence[int], group: RankGroup, generation: int) -> SymmetricHeap:
        """See `SymmetricHeap`. No memory can be made without all ranks, so these go on with what they have.

        Processes that are out are killed, since they could still store there. Raises `OSError` if one cannot be.
        """
        for rank, process in enumerate(self._processes):
            if rank not in ranks:
                process.end(GONE_S)
        return SurvivorHeap(self, ranks, group, generation)

    def _allocate(self, num_bytes: int) -> None:
        room = num_bytes + REGION_ALIGNMENT
        free = _free_bytes(self.device, room)
        answers = self.group.gather("NvshmemHeap.allocate: size", [num_bytes, free], row(integer(0), integer(0)))
        self._check_sizes([size for size, _ in answers])
        # Found out together and beforehand: a rank that fails within a collective of NVSHMEM leaves the others in it.
        for rank, (_, available) in enumerate(answers):
            if available < room:
                text = f"GPU memory of rank {rank}: {room} bytes needed for the symmetric heap, {available} free"
                raise OSError(errno.ENOMEM, f"{text}; configure fewer tokens")
        join(self.group, self.device)
        self._raise_first("NvshmemHeap.allocate: allocate", self._take(room))
        self._raise_first("NvshmemHeap.allocate: map", self._map(num_bytes))

    def _take(self, room: int) -> list[Any] | None:
        """Take the memory. Returns an error as `[errno, text]`, to be raised on all ranks."""
        try:
            with torch.cuda.device(self.device):
                self._own = load_nvshmem().tensor((room,), dtype=torch.uint8, except_on_del=False)
                self._own.zero_()
                self._write_ones(self._own[self._skip(self._own) :])
                torch.cuda.synchronize(self.device)
        except Exception as error:
            return [
                errno.ENOMEM,
                f"NVSHMEM gave rank {self.rank} no {room} bytes ({error}); NVSHMEM_MAX_MEMORY_PER_GPU, or with "
                "NVSHMEM_DISABLE_CUDA_VMM=1 NVSHMEM_SYMMETRIC_SIZE, may be too small",
            ]
        return None

    def _map(self, num_bytes: int) -> list[Any] | None:
        """Map the memory of all ranks. Returns the text of a `ValueError` as `[None, text]`, to be raised on all."""
        assert self._own is not None
        skip = self._skip(self._own)
        for rank in range(self.world_size):
            whole = self._own
            if rank != self.rank:
                try:
                    # Not for this rank itself: that would count as a second owner, and the memory would never be freed.
                    whole = load_nvshmem().get_peer_tensor(self._own, rank)
                except Exception as error:
                    return [
                        None,
                        f"transport: rank {self.rank} cannot map the GPU memory of rank {rank} ({error}); "
                        "use transport='collective'",
                    ]
            self._bases.append(whole[skip : skip + num_bytes])
        return None

    @staticmethod
    def _skip(own: torch.Tensor) -> int:
        """Bytes before the first region: as many on every rank, whose heaps start at multiples of far more."""
        return -own.data_ptr() % REGION_ALIGNMENT

    def _raise_first(self, what: str, problem: list[Any] | None) -> None:
        """Raise what the first rank with a problem says, on every rank."""
        for answer in self.group.gather(what, problem, optional(row(optional(integer(1)), text))):
            if answer is not None:
                number, message = answer
                raise ValueError(message) if number is None else OSError(number, message)

    def _peer_base(self, rank: int) -> torch.Tensor:
        return self._bases[rank]

    def _close(self, *, failed: bool) -> None:
        try:
            if self.allocated and not failed:
                torch.cuda.synchronize(self.device)
            if self._part(failed=failed):
                # Without the others it would not end.
                load_nvshmem().free_tensor(self._own)
        finally:
            self._bases.clear()
            self._own = None


def _free_bytes(device: torch.device, wanted: int) -> int:
    """Free bytes of a GPU; memory that torch holds in reserve is given back first, if `wanted` asks for it."""
    free, _ = torch.cuda.mem_get_info(device)
    if free < wanted:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
    return free
