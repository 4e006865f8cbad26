"""Gloo groups of ranks that have failed: destroying one waits for what is under way in it, so each is kept until then.

A process that makes groups again and again would else have more and more connections and threads.
"""

from __future__ import annotations

from collections.abc import Callable

_LEFT: list[tuple[Callable[[], bool], tuple[object, ...]]] = []


def keep_until(ended: Callable[[], bool], *held: object) -> None:
    """Keep `held`, a group and what its exchange reads and writes, until `ended()` and a later call of this module."""
    free_ended()
    _LEFT.append((ended, held))


def free_ended() -> None:
    """Let go of all whose exchanges have ended."""
    _LEFT[:] = [left for left in _LEFT if not left[0]()]
