"""Keeps a folder to one writing process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

LOCK_FILE = ".moe_runtime.lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Inside, no other process is inside for the same folder. The system lets go of the lock of one that is killed;
    the file that it leaves behind does not count, whoever's it is. A child that was forked inside keeps the lock of a
    process that is killed until it ends too.

    Raises `ValueError` naming the folder where another process is inside, or where its file system has no locks; naming
    the file where that may not be opened.
    """
    path = folder / LOCK_FILE
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last one inside may have removed the file after it was opened here: another may lock a new one.
            mine = os.path.samestat(os.fstat(file.fileno()), path.stat())
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
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError as error:
        advice = "; the file may be removed if no process writes to its folder" if path.exists() else ""
        raise ValueError(f"{path}: cannot be opened: {error.strerror}{advice}") from error
    # The umask of one user would keep others from the file, which a killed process leaves to them.
    with suppress(OSError):
        os.fchmod(descriptor, 0o666)
    return FileIO(descriptor, "r+")
