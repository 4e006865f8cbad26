"""Iterators around iterators: the same items, errors in their place, never more than one ahead."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator

import pytest

from moe_runtime.progress import one_ahead, with_progress


def test_one_ahead_gives_the_same_items() -> None:
    assert list(one_ahead(range(5))) == list(range(5))
    assert list(one_ahead([])) == []
    assert list(one_ahead([None, None])) == [None, None]


def test_one_ahead_is_one_ahead_in_a_thread() -> None:
    begun: list[tuple[int, str]] = []
    second = threading.Event()

    def items() -> Iterator[int]:
        for number in range(4):
            begun.append((number, threading.current_thread().name))
            if number == 1:
                second.set()
            yield number

    found = one_ahead(items())
    assert begun == []
    assert next(found) == 0
    assert second.wait(10), "the next item is made while the first is in use"
    found.close()  # type: ignore[attr-defined]
    assert [number for number, _ in begun] == [0, 1]
    assert all(name.startswith("one_ahead") for _, name in begun)


def test_an_error_comes_where_its_item_would() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("item 1")

    found = one_ahead(items())
    assert next(found) == 0
    with pytest.raises(ValueError, match="item 1"):
        next(found)


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_is_for_terminals_alone(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    quiet, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    assert list(with_progress(range(3), "counting", 3)) == [0, 1, 2]
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(with_progress(range(3), "counting", 3, shown=shown)) == [0, 1, 2]
    assert quiet.getvalue() == "" and ("counting" in terminal.getvalue()) == shown
