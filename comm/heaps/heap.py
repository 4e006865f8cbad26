"""Symmetric memory as an interface: named, aligned regions, reserved first, then allocated once by all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType

import torch

from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.support.arguments import check_flag, check_integer, check_kind, describe

REGION_ALIGNMENT = 256
MAX_REGION_BYTES = 1 << 47
"""Most bytes of a region: what a process can address."""


def align_region(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of `REGION_ALIGNMENT`."""
    return -(-num_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT


class SymmetricHeap(ABC):
    """The same regions on every rank of a group, with pointers to every peer's copy.

    Use: `reserve()` each region (the same calls on every rank), `allocate()` once (collective), then `tensor`,
    `peer_tensor` and `peer_pointers`, finally `close()`. `allocate()` zeroes regions, except for their `ones`. To add a
    transport, subclass this.

    Attributes:
        rank, world_size: this process in the group.
        device: device of the memory.
        directly_mapped: whether kernels can store to peers through `peer_pointers`. If not, pointers lead to local
            staging that a transport must carry over.
        graph_safe: whether a step through this heap can be captured in a CUDA graph.
        kept_by_survivors: whether ranks that go on after a death have no other memory: spare signals are then reserved.
    """

    name = "abstract"
    directly_mapped = True
    graph_safe = True
    kept_by_survivors = False

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.total_bytes = 0
        self.allocated = False
        self.closed = False
        self._regions: dict[str, tuple[int, int]] = {}
        self._ones: dict[str, int] = {}

    def reserve(self, region: str, num_bytes: int, *, ones: int = 0) -> None:
        """Add a region of `num_bytes` whose first `ones` bytes start as 1. All ranks make the same calls in order."""
        check_kind("region", region, str)
        if self.allocated:
            raise ValueError("heap: it is already allocated")
        if region in self._regions:
            raise ValueError(f"region: {describe(region)} is already reserved")
        check_integer("num_bytes", num_bytes, high=MAX_REGION_BYTES)
        check_integer("ones", ones, 0, num_bytes)
        self._regions[region] = (self.total_bytes, num_bytes)
        self._ones[region] = ones
        self.total_bytes = align_region(self.total_bytes + num_bytes)

    def allocate(self) -> None:
        """Allocate all regions, zeroed, and map the peers'. Collective."""
        if self.allocated or self.closed:
            raise ValueError(f"heap: it is {'closed' if self.closed else 'already allocated'}")
        self._allocate(max(self.total_bytes, REGION_ALIGNMENT))
        self.allocated = True

    def region(self, region: str) -> tuple[int, int]:
        """`(offset, num_bytes)` of a region from the base of the heap."""
        if not isinstance(region, str) or region not in self._regions:
            raise ValueError(f"region: expected one of {sorted(self._regions)}, got {describe(region)}")
        return self._regions[region]

    def tensor(self, region: str) -> torch.Tensor:
        """This rank's copy of a region, uint8 `[num_bytes]`."""
        return self.peer_tensor(region, self.rank)

    def peer_tensor(self, region: str, rank: int) -> torch.Tensor:
        """Rank `rank`'s copy of a region as uint8 `[num_bytes]`, mapped into this process."""
        self._check_open()
        check_integer("rank", rank, 0, self.world_size - 1)
        offset, num_bytes = self.region(region)
        return self._peer_base(rank)[offset : offset + num_bytes]

    def peer_pointers(self, region: str) -> torch.Tensor:
        """int64 `[world_size]` on `device`: the address of each rank's copy of a region, for kernels."""
        self._check_open()
        offset, _ = self.region(region)
        pointers = [self._peer_base(rank).data_ptr() + offset for rank in range(self.world_size)]
        return torch.tensor(pointers, dtype=torch.int64, device=self.device)

    def _prepare_for_deaths(self) -> None:
        """Learn what survivors will have to know, after `allocate()`. Collective. Most need to know nothing."""
        return

    def _of_survivors(self, ranks: Sequence[int], group: RankGroup, generation: int) -> SymmetricHeap:
        """A heap with the same regions of some ranks, as after `allocate()`; this one must not be used any more.

        Collective for these ranks. No other is waited for.

        Args:
            ranks: their indices in the first heap, before any death.
            group: of these ranks alone. Limits every wait.
            generation: how many changes there have been, this one included.

        Raises `PeerTimeoutError` if one of them is missing; then this heap may try again with others.
        """
        raise ValueError(f"heap: ranks of {self.name!r} cannot go on after a death")

    def close(self, *, failed: bool = False) -> None:
        """Free the memory; collective unless `failed` (then no peer is waited for). Safe to call twice."""
        check_flag("failed", failed)
        if not self.closed:
            self.closed = True
            self._close(failed=failed)

    def _check_open(self) -> None:
        if not self.allocated or self.closed:
            state = "closed" if self.closed else "not allocated yet"
            raise ValueError(f"heap: it is {state}")

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(failed=kind is not None)

    @abstractmethod
    def barrier(self) -> None:
        """Wait on the host until every rank is here, bounded by the start-up timeout."""

    def _write_ones(self, base: torch.Tensor) -> None:
        """Write the ones into a rank's zeroed memory, before a peer can store there."""
        for region, (offset, _) in self._regions.items():
            base[offset : offset + self._ones[region]] = 1

    @abstractmethod
    def _allocate(self, num_bytes: int) -> None: ...

    @abstractmethod
    def _peer_base(self, rank: int) -> torch.Tensor:
        """uint8 tensor over the whole heap of `rank`."""

    @abstractmethod
    def _close(self, *, failed: bool) -> None: ...


class GroupHeap(SymmetricHeap):
    """A heap whose ranks are the processes of a `group`, which limits every wait."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        super().__init__(group.rank, group.world_size, device)
        self.group = group

    def barrier(self) -> None:
        self._check_open()
        self.group.barrier(f"{type(self).__name__}.barrier")

    @staticmethod
    def _check_sizes(sizes: list[int]) -> None:
        """Raise `ValueError` unless all ranks reserved as many bytes."""
        if len(set(sizes)) > 1:
            raise ValueError(f"region: ranks reserved different sizes, {sizes} bytes")

    def _part(self, *, failed: bool) -> bool:
        """`RankGroup.part`, or where that would wait in vain, `leave`. Returns whether all ranks are known to part."""
        if self.allocated and not failed:
            return self.group.part(f"{type(self).__name__}.close")
        self.group.leave("it closed its heap" + (" after a failure" if failed else ""))
        return False
