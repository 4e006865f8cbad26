"""A progress bar where somebody looks at a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def with_progress(items: Iterable[Item], text: str, total: int, *, shown: bool = True) -> Iterator[Item]:
    """The `items`, of which there are `total`, with a bar on standard error while they are taken.

    There is none unless `shown` and standard error is a terminal.
    """
    if not shown or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=text, total=total, console=Console(stderr=True), transient=True)
