"""A progress bar where somebody looks at a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def with_progress(items: Iterable[Item], text: str, total: int, *, shown: bool = True) -> Iterator[Item]:
    """The `items`, of which there are `total`, with a bar on standard error while they are taken.

    There is none unless `shown` and standard error is a terminal.
    """
    if not shown or sys.stderr is None or sys.stderr.closed or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=text, total=total, console=Console(stderr=True), transient=True)


def one_ahead(items: Iterable[Item]) -> Generator[Item, None, None]:
    """The `items`, the next of which a thread makes while one is in use; an error comes where its item would.

    When this iterator is closed the item being made is waited for, and no other is begun.
    """
    iterator = iter(items)
    end = object()
    with ThreadPoolExecutor(1, "one_ahead") as pool:
        made = pool.submit(next, iterator, end)
        while (item := made.result()) is not end:
            made = pool.submit(next, iterator, end)
            yield item  # type: ignore[misc]
