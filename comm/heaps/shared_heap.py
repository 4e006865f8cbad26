"""Symmetric memory between processes of one host: each rank makes its own, which every rank maps.

By default it has no name, so nothing is left behind whenever a process is killed. Files in a folder take its place
where `directory` is given, or where a rank cannot make such memory or open that of a peer: the system forbids it, or
the ranks do not see each other in /proc. They are unlinked as soon as all ranks have mapped them. If a rank is killed
during `allocate()`, the peers that know its file unlink it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.bootstrap import shared_memory_directory
from moe_runtime.comm.heaps.heap import GroupHeap, SymmetricHeap
from moe_runtime.comm.heaps.shared_memory import NamedMemory, NamelessMemory, Room, SharedMemory, shortage
from moe_runtime.comm.messages import integer, optional, row, text
from moe_runtime.comm.rank_group import RankGroup

_LOG = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)

_Problem = tuple[int, str] | None
"""The errno and the text of an `OSError`."""


class SharedHeap(GroupHeap):
    """A heap in shared memory, for CPU ranks on one host.

    `allocate()` raises `OSError` on every rank, naming the bytes needed and available, if memory does not suffice, and
    `PeerTimeoutError` naming a rank that does not come within the group's timeout. After `close()` the memory is freed
    with its last tensor; pointers to it must not be used any more.

    Args:
        group: the ranks; those of the default group when None.
        directory: where to put the memory into files, on any rank; default memory without a name.
    """

    name = "shared"
    graph_safe = False

    def __init__(self, group: RankGroup | dist.ProcessGroup | None = None, *, directory: str | None = None) -> None:
        super().__init__(group if isinstance(group, RankGroup) else RankGroup(group), torch.device("cpu"))
        self._directory = directory
        self._bases: list[torch.Tensor] = []

    def _of_survivors(self, ranks: Sequence[int], group: RankGroup, generation: int) -> SymmetricHeap:
        """See `SymmetricHeap`. The memory is new: a rank that was only stopped still stores to the old one."""
        heap = SharedHeap(group, directory=self._directory)
        heap._regions, heap._ones, heap.total_bytes = dict(self._regions), dict(self._ones), self.total_bytes
        heap.allocate()
        self.closed = True
        self._drop()
        return heap

    def _allocate(self, num_bytes: int) -> None:
        try:
            reason = self._compare(num_bytes) or self._share(NamelessMemory(), num_bytes)
            if reason is not None:
                folder = self._directory or shared_memory_directory()
                if self._directory is None and self.rank == 0:
                    _LOG.warning("shared memory: ranks map files of %s, since %s", folder, reason[1])
                reason = self._share(NamedMemory(folder), num_bytes)
                if reason is not None:
                    raise OSError(*reason)
        except BaseException:
            self._drop()
            raise

    def _compare(self, num_bytes: int) -> _Problem:
        """Why the memory must be in files, the same on all ranks.

        Raises on all ranks if they reserve different sizes, or more in all than is available.
        """
        problem = NamelessMemory.problem() if self._directory is None else "a folder is given"
        # All ranks look before one of them takes its part.
        available = 0 if problem else NamelessMemory().room().available_bytes
        read = row(integer(0), optional(text), integer(0))
        answers = self.group.gather("SharedHeap.allocate: size", [num_bytes, problem, available], read)
        self._check_sizes([size for size, _, _ in answers])
        for rank, (_, problem, _) in enumerate(answers):
            if problem is not None:
                return errno.ENOTSUP, f"rank {rank}: {problem}"
        for rank, (_, _, available) in enumerate(answers):
            # The kernel would hand it out, and kill a process when it is used.
            if num_bytes * self.world_size > available:
                message = shortage(os.strerror(errno.ENOSPC), Room(None, 0, available), num_bytes, self.world_size)
                raise OSError(errno.ENOSPC, f"shared memory of rank {rank}: {message}")
        return None

    def _share(self, memory: SharedMemory, num_bytes: int) -> _Problem:
        """Make this rank's memory, and map that of all ranks. Returns why a rank could not map it, the same on all.

        Raises on all ranks if one could not make its memory.
        """
        known: list[Any] = []
        try:
            mine = self._create(memory, num_bytes)
            answers = self.group.gather("SharedHeap.allocate: create", mine, lambda value: _read_made(memory, value))
            known = [place for place, _ in answers]
            if (problem := _first([problem for _, problem in answers])) is not None:
                raise OSError(*problem)
            for place in known:
                problem = problem or self._map(memory, place, num_bytes)
            if problem is None:
                self._write_ones(self._bases[self.rank])
            mapped = self.group.gather("SharedHeap.allocate: map", problem and list(problem), _read_problem)
            known = []
        finally:
            # After the second gather every rank has mapped the memory; before it, the start-up has failed.
            memory.clean(known)
        if (problem := _first(mapped)) is not None:
            self._drop()
        return problem

    def _create(self, memory: SharedMemory, num_bytes: int) -> list[Any]:
        """`[place, None]` of this rank's memory, or `[None, [errno, text]]`."""
        try:
            return [memory.create(num_bytes), None]
        except OSError as error:
            reason = error.strerror or type(error).__name__
            if error.errno in _NO_ROOM:
                reason = shortage(reason, memory.room(), num_bytes, self.world_size)
            return [None, [error.errno or errno.EIO, reason]]

    def _map(self, memory: SharedMemory, place: Any, num_bytes: int) -> _Problem:
        """Map the memory of a rank."""
        try:
            descriptor = memory.open(place, num_bytes)
            try:
                mapping = mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            return error.errno or errno.EIO, f"{memory.describe(place)}: {error.strerror}"
        self._bases.append(torch.frombuffer(mapping, dtype=torch.uint8))
        return None

    def _peer_base(self, rank: int) -> torch.Tensor:
        return self._bases[rank]

    def _close(self, *, failed: bool) -> None:
        try:
            self._part(failed=failed)
        finally:
            self._drop()

    def _drop(self) -> None:
        # Never `mmap.close()`: `torch.frombuffer` keeps the mapping alive but does not keep its buffer exported, so
        # closing would succeed under a tensor in use. Each mapping is freed with its last tensor.
        self._bases.clear()


_read_problem = optional(row(integer(1), text))
"""Reads the errno and the text of an `OSError`, or None."""


def _read_made(memory: SharedMemory, value: object) -> tuple[Any, Any]:
    """Reads where a rank's memory is, or why there is none."""
    place, problem = row(optional(memory.read_place), _read_problem)(value)
    if (place is None) == (problem is None):
        raise ValueError("expected a place or a problem, got both or neither")
    return place, problem


def _first(problems: list[Any]) -> _Problem:
    """The problem of the first rank that has one, with its rank."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            return problem[0], f"shared memory of rank {rank}: {problem[1]}"
    return None
