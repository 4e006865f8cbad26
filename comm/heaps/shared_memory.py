"""Two kinds of memory that processes of one host share: without a name, and as files of a folder.

Memory without a name is freed with the last process that has it open or mapped, whenever and however processes end. A
file stays where a process is killed between creating it and telling its peers of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from moe_runtime.comm.bootstrap import shared_memory_directory
from moe_runtime.comm.messages import integer, row, text
from moe_runtime.support.host_memory import memory_bytes

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_NAME = "moe_runtime-heap"
"""Shown in /proc, so that no other program's memory is taken for that of a heap."""

RESERVED_AT_ONCE = 4 << 20
"""Bytes, which take some milliseconds."""


@dataclass(frozen=True)
class Room:
    """How many bytes there are for shared memory, and in which folder; None is memory without a name."""

    folder: str | None
    total_bytes: int
    available_bytes: int


def shortage(reason: str, room: Room, num_bytes: int, world_size: int) -> str:
    """The message where there is no room for `num_bytes` of each of `world_size` ranks."""
    where, remedy = room.folder, f"make {room.folder} larger (docker: --shm-size)"
    if room.folder is None:
        where, remedy = "memory", "raise the memory limit of the container"
    return (
        f"{reason}: {num_bytes} bytes needed per rank ({world_size} ranks: {num_bytes * world_size}), "
        f"{room.available_bytes} available in {where}; {remedy} or configure fewer tokens"
    )


def room_for_heaps() -> Room:
    """What heaps of the transport `shared` may take here by default."""
    kind = NamelessMemory() if NamelessMemory.problem() is None else NamedMemory(shared_memory_directory())
    return kind.room()


class SharedMemory(ABC):
    """One rank's memory of one kind. A rank creates its own, and opens its peers' at the places that they report."""

    @abstractmethod
    def room(self) -> Room:
        """How much there is of this kind. Raises `OSError` where the system does not say."""

    @abstractmethod
    def create(self, num_bytes: int) -> list[Any]:
        """Make memory with all its bytes reserved, and zero. Returns its place, as JSON carries it.

        Raises `OSError`, and then leaves nothing behind.
        """

    @abstractmethod
    def read_place(self, value: Any) -> Any:
        """Reads a place that a rank reported."""

    @abstractmethod
    def open(self, place: Any, num_bytes: int) -> int:
        """A descriptor of the memory at `place`. Raises `OSError` unless it is this user's and has `num_bytes`."""

    @abstractmethod
    def describe(self, place: Any) -> str:
        """A place, for messages."""

    @abstractmethod
    def clean(self, places: list[Any]) -> None:
        """Give up what is needed only until all ranks have opened this memory, and that at `places` of others."""


class NamelessMemory(SharedMemory):
    """Memory that peers open through this process's entry in /proc. Its size is sealed."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    @classmethod
    def problem(cls) -> str | None:
        """Why this process cannot make such memory and open it again; None if it can."""
        if not hasattr(os, "memfd_create"):
            return "this system has no memfd_create"
        memory = cls()
        try:
            memory.room()
            os.close(memory.open(memory.read_place(memory.create(1)), 1))
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            memory.clean([])
        return None

    def room(self) -> Room:
        found = memory_bytes()
        return Room(None, found["total"], found["available"])

    def create(self, num_bytes: int) -> list[Any]:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            reserve_file(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            status = os.fstat(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return [os.getpid(), descriptor, status.st_dev, status.st_ino]

    def read_place(self, value: Any) -> tuple[int, int, int, int]:
        pid, descriptor, device, inode = row(integer(1), integer(0), integer(0), integer(0))(value)
        return pid, descriptor, device, inode

    def open(self, place: tuple[int, int, int, int], num_bytes: int) -> int:
        _, _, device, inode = place
        # Without O_PATH, opening what is no file, such as a device, may do something.
        anchor = os.open(self.describe(place), os.O_PATH | os.O_CLOEXEC)
        again = f"/proc/self/fd/{anchor}"
        try:
            status = os.fstat(anchor)
            # Another process may have got the number of one that ended.
            if (status.st_dev, status.st_ino) != (device, inode) or os.readlink(again) != f"/memfd:{_NAME} (deleted)":
                raise OSError(errno.ESTALE, "expected the memory of a heap")
            check_file(status, num_bytes)
            descriptor = os.open(again, os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(anchor)
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != _SEALS:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "expected memory with a sealed size")
        return descriptor

    def describe(self, place: tuple[int, int, int, int]) -> str:
        return f"/proc/{place[0]}/fd/{place[1]}"

    def clean(self, places: list[Any]) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class NamedMemory(SharedMemory):
    """A file in a folder, which is unlinked when all ranks have mapped it, or by a peer of a rank that was killed."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self._path: str | None = None

    def room(self) -> Room:
        status = os.statvfs(self.folder)
        return Room(self.folder, status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail)

    def create(self, num_bytes: int) -> list[Any]:
        if num_bytes > self.room().available_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = os.path.join(self.folder, f"moe_runtime-{secrets.token_hex(16)}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._path = path
        try:
            reserve_file(descriptor, num_bytes)
        except BaseException:
            self.clean([])
            raise
        finally:
            os.close(descriptor)
        return [path]

    def read_place(self, value: Any) -> str:
        (path,) = row(text)(value)
        # Files of other names are never mapped, and never unlinked.
        if re.fullmatch(r"/([^\0]*/)?moe_runtime-[0-9a-f]{32}", path) is None:
            raise ValueError("expected the path of a heap's file, got another text")
        return path

    def open(self, place: str, num_bytes: int) -> int:
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            check_file(os.fstat(descriptor), num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def describe(self, place: str) -> str:
        return place

    def clean(self, places: list[Any]) -> None:
        path, self._path = self._path, None
        for left in (path, *places):
            if left is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(left)


def check_file(status: os.stat_result, num_bytes: int) -> None:
    """Raise `OSError` unless it is a regular file of this user, of `num_bytes`."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "expected a file of this user")
    if status.st_size != num_bytes:
        raise OSError(errno.EINVAL, f"expected {num_bytes} bytes, got {status.st_size}")


def reserve_file(descriptor: int, num_bytes: int) -> None:
    """Fill an empty file with `num_bytes` allocated zero bytes: stores to a sparse file may end in SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        # In parts: many a Linux undoes a call on tmpfs that a signal interrupts, and Python repeats it. Where a
        # profiler's signals come more often than all bytes take, that would never end.
        for start in range(0, num_bytes, RESERVED_AT_ONCE):
            os.posix_fallocate(descriptor, start, min(RESERVED_AT_ONCE, num_bytes - start))
        return
    chunk = bytes(1 << 20)
    for start in range(0, num_bytes, len(chunk)):
        os.write(descriptor, chunk[: num_bytes - start])
