"""What tests compile and disassemble stays in `.cache` of the checkout while runs use it; `make clean` removes it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.programs import ROOT

CACHE = ROOT / ".cache"
KEPT_DAYS = 14.0
"""Since the last use."""


def folder_for(name: str, *made_of: str | bytes) -> Path:
    """The folder `name` of the cache for what depends on `made_of`: other parts, another folder."""
    digest = hashlib.sha256()
    for part in made_of:
        digest.update(hashlib.sha256(part if isinstance(part, bytes) else part.encode()).digest())
    folder = CACHE / f"{name}-{digest.hexdigest()[:32]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def made_once(file: Path, make: Callable[[Path], object]) -> Path:
    """`file`, written by `make(path)` unless it is there; it appears whole, whichever process or run makes it."""
    if file.exists():
        os.utime(file)
        return file
    part = file.with_name(f"{file.name}.{os.getpid()}")
    make(part)
    return part.replace(file)


def forget_unused() -> None:
    """Remove what no run has used for `KEPT_DAYS`."""
    for path in sorted(CACHE.rglob("*"), reverse=True):
        with suppress(OSError):  # another run removes it too, or a folder is not empty
            if time.time() - path.lstat().st_mtime > KEPT_DAYS * 86400:
                path.rmdir() if path.is_dir() else path.unlink()
