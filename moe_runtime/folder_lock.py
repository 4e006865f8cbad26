"""Keeps a folder to one writing process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".moe_runtime.lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Inside, no other process is inside for the same folder. The system lets go of the lock of one that is killed;
    the file that it leaves behind does not count.

    Raises `ValueError` naming the folder where another process is inside, or where its file system has no locks.
    """
    path = folder / LOCK_FILE
    with path.open("wb") as file:
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
            path.unlink(missing_ok=True)
