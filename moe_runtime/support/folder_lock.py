"""A lock that lets only one process at a time write to a folder."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

LOCK_FILE = ".moe_runtime.lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. If the process is killed, the system releases it.

    A lock file that is left behind does not count, whoever owns it. A child forked while the lock is held keeps it
    until the child ends too.

    Raises `ValueError` naming the folder if another process holds the lock or the file system has no locks, and naming
    the lock file if it cannot be opened.
    """
    path = folder / LOCK_FILE
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file after it was opened here, and another may lock a new one.
            mine = os.path.samestat(os.fstat(file.fileno()), path.lstat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        except OSError as error:
            raise ValueError(f"{folder}: cannot be locked: {error.strerror}") from error
        if not mine:
            raise ValueError(f"{folder}: another process writes to this folder")
        try:
            yield
        finally:
            with suppress(PermissionError):
                path.unlink(missing_ok=True)


def _opened(path: Path) -> FileIO:
    advice = "; the file may be removed if no process writes to its folder" if os.path.lexists(path) else ""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise ValueError(f"{path}: cannot be opened: {error.strerror}{advice}") from error
    file, found = FileIO(descriptor, "r+"), os.fstat(descriptor)
    # Not what somebody else's file was linked or renamed to, since its mode changes.
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size:
        file.close()
        raise ValueError(f"{path}: expected an empty file without other names{advice}")
    # Other users must be able to open a file that a killed process left, whatever the umask.
    with suppress(OSError):
        os.fchmod(descriptor, 0o666)
    return file
