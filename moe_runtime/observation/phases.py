"""Where the time of a step goes: named phases, marked only while a profiler or a `PhaseTimes` records them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

PREFIX = "moe_runtime::"
"""Prefix of the names of phases in a profile."""


class PhaseTimes:
    """Times of named phases, one list of milliseconds per phase.

    On GPUs a phase is the time between two events on the current stream; `milliseconds()` waits for them. On CPUs it is
    wall-clock time.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: dict[str, list[tuple[object, object]]] = {}

    def _mark(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as phase `name`."""
        start = self._mark()
        yield
        self._marks.setdefault(name, []).append((start, self._mark()))

    def milliseconds(self) -> dict[str, list[float]]:
        """The times of each phase, in the order they were taken."""
        if self._cuda:
            torch.cuda.synchronize()
        return {name: [self._between(*marks) for marks in pairs] for name, pairs in self._marks.items()}

    def _between(self, start: object, end: object) -> float:
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(start.elapsed_time(end))
        assert isinstance(start, float) and isinstance(end, float)
        return (end - start) * 1e3


_NOTHING = nullcontext()


def phase(name: str, times: PhaseTimes | None = None) -> AbstractContextManager[None]:
    """A range that a profiler of this thread shows as `moe_runtime::name`, and that `times` records if given.

    With neither it costs next to nothing.
    """
    profiled = torch.autograd._profiler_enabled()
    return _marked(name, times, profiled) if profiled or times is not None else _NOTHING


@contextmanager
def _marked(name: str, times: PhaseTimes | None, profiled: bool) -> Iterator[None]:
    with torch.profiler.record_function(PREFIX + name) if profiled else _NOTHING:
        with times.phase(name) if times is not None else _NOTHING:
            yield
