"""Symmetric memory between processes of one host: a file of shared memory per rank, which every rank maps.

The files are unlinked as soon as all ranks have mapped them, so nothing is left behind however a process ends after
`allocate()`. If a rank is killed during `allocate()`, the peers that know its file unlink it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.bootstrap import RankGroup, shared_memory_directory
from moe_runtime.comm.heaps.heap import SymmetricHeap
from moe_runtime.comm.messages import integer, optional, row, text


class SharedHeap(SymmetricHeap):
    """A heap in POSIX shared memory, for CPU ranks on one host.

    `allocate()` raises `OSError` on every rank, naming the bytes needed and available, if memory does not suffice, and
    `PeerTimeoutError` naming a rank that does not come within the group's timeout. After `close()` the memory is freed
    with its last tensor; pointers to it must not be used any more.
    """

    name = "shared"
    graph_safe = False

    def __init__(self, group: RankGroup | dist.ProcessGroup | None = None, *, directory: str | None = None) -> None:
        self._group = group if isinstance(group, RankGroup) else RankGroup(group)
        super().__init__(self._group.rank, self._group.world_size, torch.device("cpu"))
        self._directory = directory or shared_memory_directory()
        self._bases: list[torch.Tensor] = []

    def barrier(self) -> None:
        self._check_open()
        self._group.barrier("SharedHeap.barrier")

    def _allocate(self, num_bytes: int) -> None:
        path = os.path.join(os.path.abspath(self._directory), f"moe_runtime-{secrets.token_hex(16)}")
        problem = _create(path, num_bytes, self.world_size)
        paths = [path]
        try:
            read = row(_read_path, integer(0), _read_problem)
            answers = self._group.gather("SharedHeap.allocate: create", [path, num_bytes, problem], read)
            self._raise_first([answer[2] for answer in answers])
            sizes = {answer[1] for answer in answers}
            if len(sizes) > 1:
                raise ValueError(f"region: ranks reserved different sizes, {[answer[1] for answer in answers]} bytes")
            for peer_path, _, _ in answers:
                problem = problem or self._map(peer_path, num_bytes)
            if problem is None:
                self._write_ones(self._bases[self.rank])
            paths = [peer_path for peer_path, _, _ in answers]
            self._raise_first(self._group.gather("SharedHeap.allocate: map", problem, _read_problem))
            paths = [path]
        except BaseException:
            self._drop()
            raise
        finally:
            # After the second gather every rank has mapped the file; before it, the start-up has failed.
            for left in paths:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(left)

    def _map(self, path: str, num_bytes: int) -> list[int | str] | None:
        """Map a rank's file, which must be this user's. Returns an error as `[errno, text]`, to be raised on all."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                    return [errno.EPERM, f"{path}: expected a file of this user"]
                if status.st_size != num_bytes:
                    return [errno.EINVAL, f"{path}: expected {num_bytes} bytes, got {status.st_size}"]
                mapping = mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            return [error.errno or errno.EIO, f"mapping {path}: {error.strerror}"]
        self._bases.append(torch.frombuffer(mapping, dtype=torch.uint8))
        return None

    @staticmethod
    def _raise_first(problems: list[Any]) -> None:
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise OSError(problem[0], f"shared memory of rank {rank}: {problem[1]}")

    def _peer_base(self, rank: int) -> torch.Tensor:
        return self._bases[rank]

    def _close(self, *, failed: bool) -> None:
        try:
            if self.allocated and not failed:
                self._group.part("SharedHeap.close")
            else:
                self._group.leave("it closed its heap" + (" after a failure" if failed else ""))
        finally:
            self._drop()

    def _drop(self) -> None:
        # Never `mmap.close()`: `torch.frombuffer` keeps the mapping alive but does not keep its buffer exported, so
        # closing would succeed under a tensor in use. Each mapping is freed with its last tensor.
        self._bases.clear()


_read_problem = optional(row(integer(1), text))
"""Reads the errno and the text of an `OSError`, or None."""


def _read_path(value: object) -> str:
    """Reads the path of a rank's file. Files of other names are never mapped, and never unlinked."""
    if re.fullmatch(r"/([^\0]*/)?moe_runtime-[0-9a-f]{32}", path := text(value)) is None:
        raise ValueError("expected the path of a heap's file, got another text")
    return path


def _create(path: str, num_bytes: int, world_size: int) -> list[int | str] | None:
    """Create a private file with all its memory reserved. Returns an error as `[errno, text]`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return [error.errno or errno.EIO, f"creating {path}: {error.strerror}"]
    try:
        status = os.fstatvfs(descriptor)
        available = status.f_bavail * status.f_frsize
        try:
            if num_bytes > available:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            reserve_file(descriptor, num_bytes)
        except OSError as error:
            where = os.path.dirname(path)
            return [
                error.errno or errno.EIO,
                f"{error.strerror}: {num_bytes} bytes needed per rank ({world_size} ranks: {num_bytes * world_size}), "
                f"{available} available in {where}; make {where} larger (docker: --shm-size) or configure fewer tokens",
            ]
    finally:
        os.close(descriptor)
    return None


def reserve_file(descriptor: int, num_bytes: int) -> None:
    """Fill an empty file with `num_bytes` allocated zero bytes: stores to a sparse file may end in SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    chunk = bytes(1 << 20)
    for start in range(0, num_bytes, len(chunk)):
        os.write(descriptor, chunk[: num_bytes - start])
