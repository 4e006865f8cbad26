"""The bar around an iterator: the same items, and nothing to see where nobody looks."""

from __future__ import annotations

import io
import sys

import pytest

from moe_runtime.progress import with_progress


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
