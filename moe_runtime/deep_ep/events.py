"""CUDA events with DeepEP's names. On CPUs calls are done when they return, so that there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from moe_runtime.context.threads import is_capturing
from moe_runtime.support.arguments import check_kind


class EventHandle:
    """The point that the current stream has come to.

    Attributes:
        event: of CUDA; None on CPUs.
        captured: whether it is a point in the capture of a CUDA graph.
    """

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        self.captured = False
        if torch.cuda.is_available():
            self.event = torch.cuda.Event()
            self.event.record()
            self.captured = torch.cuda.is_current_stream_capturing()

    def current_stream_wait(self) -> None:
        """Let the current stream wait for that point; the host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event to wait for later, and what must live until then. As a context manager it waits at its end.

    Args:
        event: what to wait for; None where a call did not run beside the current stream.
        extra_tensors: kept alive as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[torch.Tensor | None] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors
        self._after_wait: Callable[[], object] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait for the event. Raises `ValueError` where there is none."""
        if self.event is None:
            raise ValueError("event: expected one to wait for, got None: the call was not made with async_finish")
        self.event.current_stream_wait()
        hook, self._after_wait = self._after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Call `hook_after_wait` once, at the end of the next `current_stream_wait`."""
        if self._after_wait is not None:
            raise ValueError("hook_after_wait: expected one hook, another is registered")
        self._after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Itself, for `with event(release_handle=True):`."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release)
        self._release = False


def overlap_of(name: str, event: EventOverlap | EventHandle | None) -> EventOverlap | None:
    """The argument `name` as `Buffer` takes events; `ElasticBuffer.capture` gives the handle alone."""
    if event is not None:
        check_kind(name, event, (EventHandle, EventOverlap))
    return EventOverlap(event) if isinstance(event, EventHandle) else event


_AS_IT_IS = nullcontext()
"""Of calls that run on the current stream and wait for nothing."""


class CommStream:
    """The stream on which calls with `async_finish`, `previous_event` or `allocate_on_comm_stream` run.

    Other calls run on the current stream: they would wait for each other anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._device = device
        self._after_current = False  # whether the stream waited for the current one in the call that runs

    def running(
        self, beside: bool, previous_event: EventOverlap | None, also: EventOverlap | None = None
    ) -> AbstractContextManager[None]:
        """Run the body on the stream if `beside`, after `previous_event`, or else after the current stream.

        Either way after `also`.
        """
        if not beside and previous_event is None and also is None:
            return _AS_IT_IS
        return self._running(beside, previous_event, also)

    @contextmanager
    def _running(self, beside: bool, previous_event: EventOverlap | None, also: EventOverlap | None) -> Iterator[None]:
        previous, other = (None if event is None else event.event for event in (previous_event, also))
        stream = self.stream if beside else None
        self._after_current = previous is None
        if stream is not None and previous is None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for event in (previous, other):
                if event is not None:
                    event.current_stream_wait()
            yield

    def on_this_stream(self, call: Callable[[], object]) -> Callable[[], object]:
        """`call`, on the stream that is current now, whichever is then."""
        if self.stream is None:
            return call
        stream = torch.cuda.current_stream(self._device)

        def run() -> object:
            with torch.cuda.stream(stream):
                return call()

        return run

    def finish(self, beside: bool, async_finish: bool, tensors: Sequence[torch.Tensor | None]) -> EventOverlap:
        """The event of a call that has just run; without `async_finish` the current stream waits for it here.

        Args:
            beside: whether the call ran on the stream.
            async_finish: whether the caller waits for the event itself.
            tensors: what the call read or made. They are used on both streams.
        """
        if self.stream is None or not beside:
            return EventOverlap(EventHandle()) if async_finish else EventOverlap()
        current = torch.cuda.current_stream(self._device)
        # Memory that a capture has recorded is not used again in it. Streams that wait for each other do not need that.
        if not (self._after_current and is_capturing(self._device)):
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self.stream)
                    tensor.record_stream(current)
        if not async_finish:
            current.wait_stream(self.stream)
            return EventOverlap()
        with torch.cuda.stream(self.stream):
            event = EventHandle()
        return EventOverlap(event, tuple(tensors))
