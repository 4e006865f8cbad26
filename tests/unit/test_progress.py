"""Around an iterator: a bar, which is nothing to see where nobody looks, and a thread that is one item ahead."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from moe_runtime.support.progress import one_ahead, with_progress


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
    for none in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", none)
        if none is not None:
            none.close()
        assert list(with_progress(range(3), "counting", 3)) == [0, 1, 2]


def test_one_ahead_keeps_the_order_and_brings_an_error_in_its_place() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(4):
            made.append(number)
            if number == 3:
                raise ValueError("the fourth")
            yield number

    seen: list[int] = []
    with pytest.raises(ValueError, match="the fourth"):
        for item in one_ahead(items()):
            seen.append(item)
    assert seen == [0, 1, 2] and made == [0, 1, 2, 3]


def test_one_ahead_makes_one_more_than_is_taken_and_stops_when_closed() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    ahead = one_ahead(items())
    assert next(ahead) == 0
    ahead.close()
    assert made == [0, 1]
