"""Conversions that end in the middle, and what is in a folder then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path


class Stopped(Exception):
    """Raised by `stopping`."""


def stopping(after: int) -> Callable[[Iterator[None], int], Iterator[None]]:
    """A `progress` of `convert_checkpoint` that stops it after so many steps."""

    def progress(steps: Iterator[None], total: int) -> Iterator[None]:
        for number, _ in enumerate(steps):
            if number == after:
                raise Stopped
            yield

    return progress


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
