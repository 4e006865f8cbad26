"""Opens files of unknown origin: only regular ones, of a bounded size. Pipes would block, devices have no end."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, open for reading; the caller closes it.

    Raises:
        OSError: the file is missing or cannot be opened.
        ValueError: a folder, pipe, device or socket; does not name the file.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
            raise ValueError(f"expected a regular file, got {kind}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The contents of a regular file. Raises `ValueError` naming it if it is none, unreadable or too large."""
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Python allocates what it is asked to read.
            data = b"" if size > max_bytes else file.read(size + 1)
            if len(data) > size:
                data += file.read(max_bytes + 1 - len(data))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if max(size, len(data)) > max_bytes:
        raise ValueError(f"{path}: expected at most {max_bytes} bytes, got {max(size, len(data))}")
    return data
