"""Who may run a step of a context: one thread at a time, and one stream after another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class _OverContext(Protocol):
    @property
    def context(self) -> Any:
        """An `ExpertParallelContext`, whose module imports this one."""


S = TypeVar("S", bound=_OverContext)


def by_one_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method of an object with a `context`, so that only one thread at a time is in such methods.

    A second thread gets a `ValueError` before the method does anything; the first goes on undisturbed.
    """

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        lock = self.context.thread_lock
        if not lock.acquire(False):
            raise ValueError("context: another thread is in a step of it")
        try:
            return method(self, *args, **kwargs)
        finally:
            lock.release()

    return call


class StreamOrder:
    """Orders the steps of a context on one GPU, whichever stream each is launched on.

    Exchange kernels share epochs and counters, so steps must not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._index = device.index
        self._raw_stream = torch._C._cuda_getCurrentRawStream if device.type == "cuda" else None

    def follow(self) -> None:
        """Make the current stream wait for the stream of the last step. No-op on a CPU.

        While a stream is being captured, only streams of the same capture are waited for.
        """
        last, get = self._last, self._raw_stream
        if get is None or (last is not None and last.cuda_stream == get(self._index)):
            return
        stream = self._last = torch.cuda.current_stream(self._device)
        if last is not None and _is_captured(last) == _is_captured(stream):
            stream.wait_stream(last)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured in a graph; never on a CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
