"""Gloo groups of ranks that have failed: destroying one waits for what is under way in it, so each is kept until then.

A process that makes groups again and again would else have more and more connections and threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_LEFT: list[tuple[Callable[[], bool], tuple[object, ...]]] = []
_LOCK = threading.Lock()
"""Contexts of one process may be used, and fail, on several threads at once."""


def keep_until(ended: Callable[[], bool], *held: object) -> None:
    """Keep `held`, a group and what its exchange reads and writes, until `ended()` and a later call of this module."""
    free_ended()
    with _LOCK:
        _LEFT.append((ended, held))


def free_ended() -> None:
    """Let go of all whose exchanges have ended."""
    with _LOCK:
        looked_at = [(left, left[0]()) for left in _LEFT]
        _LEFT[:] = [left for left, ended in looked_at if not ended]
    # What is freed is freed here, when the list can be changed again.
