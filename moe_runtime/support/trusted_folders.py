"""Folders whose files are used without a further look, such as compiled kernels: nobody else may put one there.

A folder is trusted if, symbolic links resolved, it and every folder above it belong to this user or to root, and nobody
else can write it. A folder above it may be writable by others if its sticky bit is set, as that of `/tmp` is: they
cannot rename what they do not own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def trusted_folder(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """`folder` without symbolic links; None if others could change what is in it, and `warn` gets the reason.

    It need not exist. Raises `OSError` where it cannot be looked at.
    """
    place = folder.resolve()
    for path in (place, *place.parents):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        sticky_above = path != place and found.st_mode & stat.S_ISVTX
        if not _is_owned(found) or (found.st_mode & _WRITABLE_BY_OTHERS and not sticky_above):
            warn(f"{path}: {_words(found)}")
            return None
    return place


def make_trusted(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """As `trusted_folder`; what is missing of `folder` is made, with mode 0700.

    Raises `OSError` where it cannot be made.
    """
    if (place := trusted_folder(folder, warn)) is None:
        return None
    for missing in reversed([path for path in (place, *place.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    # Somebody else may have made the first of them, in a folder that all can write.
    return trusted_folder(place, warn)


def distrust(found: os.stat_result) -> str | None:
    """Why a file or folder is not to be trusted: others own it, or can write it; None if it is."""
    return None if _is_owned(found) and not found.st_mode & _WRITABLE_BY_OTHERS else _words(found)


def _is_owned(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def _words(found: os.stat_result) -> str:
    return (
        f"expected user {os.geteuid()} or root to own it and nobody else to write it, got user {found.st_uid} "
        f"and mode {stat.S_IMODE(found.st_mode):04o}"
    )
