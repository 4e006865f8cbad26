"""Folder of compiled kernels, which are loaded into the GPU without a further look: nobody else may put one there.

A file is used if its folder is trusted (`moe_runtime/support/trusted_folders.py`), it is a regular file that belongs to
this user or to root, nobody else can write it, and its first 32 bytes are the SHA-256 of its name and of the bytes
after them.

Anything else counts as missing and is not written either. The first case of each folder is logged as a warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from functools import partial
from pathlib import Path

from moe_runtime.support.trusted_folders import distrust, make_trusted, trusted_folder

_LOG = logging.getLogger(__name__)
_DIGEST_BYTES = hashlib.sha256().digest_size
_WARNED: set[Path] = set()
"""Folders that a warning was logged for."""


def read(folder: Path, name: str) -> bytes | None:
    """The bytes that `write` kept as `name`; None if there are none, or if file or folder cannot be trusted."""
    try:
        place = trusted_folder(folder, partial(_warn, folder))
        return None if place is None else _read(place, name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn(folder, f"{folder / name}: {error.strerror}")
        return None


def write(folder: Path, name: str, content: bytes) -> None:
    """Keep `content` as `name`, atomically. Missing folders are made with mode 0700, the file with 0600.

    Without effect if the folder cannot be trusted or written.
    """
    try:
        if (place := make_trusted(folder, partial(_warn, folder))) is None:
            return
        descriptor, temporary = tempfile.mkstemp(dir=place)
        try:
            with open(descriptor, "wb") as file:
                file.write(_digest(name, content) + content)
            os.replace(temporary, place / name)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return


def _read(place: Path, name: str) -> bytes | None:
    # Neither a link is followed, nor does a pipe without a writer make us wait.
    descriptor = os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            _warn(place, f"{place / name}: expected a regular file")
            return None
        if (reason := distrust(found)) is not None:
            _warn(place, f"{place / name}: {reason}")
            return None
        with open(descriptor, "rb", closefd=False) as file:
            stored = file.read()
    finally:
        os.close(descriptor)
    digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if digest != _digest(name, content):
        _warn(place, f"{place / name}: expected the digest of its contents first; the file is damaged or old")
        return None
    return content


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _warn(folder: Path, reason: str) -> None:
    place = folder.resolve()
    if place not in _WARNED:
        _WARNED.add(place)
        _LOG.warning("the cache of compiled kernels is not used as it is, kernels are compiled anew: %s", reason)
