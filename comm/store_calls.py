"""Calls of a key-value store with a time limit: a TCPStore waits forever if the process that hosts it is stopped."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar, cast

ANSWER_S = 10.0
"""How long a store may take to answer, on top of what it is asked to wait for. A TCPStore looks up the name of each
peer that connects, and serves nobody meanwhile; a name server that does not answer takes 5 s of that."""

T = TypeVar("T")


class StoreSilentError(RuntimeError):
    """The store has not answered in time."""


class StoreCalls:
    """Makes the calls of one store on a thread of its own, one after another, with a time limit for each.

    While a call has no answer, it makes no other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: Future[Any] | None = None
        self._until = 0.0
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A daemon, since a process must be able to end while a call has no answer.
        self.thread = threading.Thread(target=_serve, args=(self._work,), name="moe_runtime store", daemon=True)
        self.thread.start()

    def run(self, work: Callable[[], T], limit_s: float = 0.0, *, answer_s: float | None = None) -> T:
        """Return or raise as `work()`, which calls the store and waits there for at most `limit_s` in all.

        Other calls wait meanwhile. Raises `StoreSilentError` if `work` takes `answer_s` longer (default `ANSWER_S`),
        and at once while an earlier call has no answer. One whose caller was interrupted has its own time first: what
        that caller then says, such as that it gives up, is not to be refused.
        """
        with self._lock:
            if self._pending is not None:
                wait([self._pending], max(self._until - time.monotonic(), 0.0))
            if self._pending is None or self._pending.done():
                call: Future[Any] = Future()
                patience_s = limit_s + (ANSWER_S if answer_s is None else answer_s)
                self._pending, self._until = call, time.monotonic() + patience_s
                self._work.put((work, call))
                try:
                    return cast(T, call.result(patience_s))
                except TimeoutError:  # of the wait: errors of a store are RuntimeErrors
                    pass
                finally:
                    if call.done():
                        # An error in it would keep the store alive.
                        self._pending = None
            raise StoreSilentError("the store does not answer")

    def end(self) -> None:
        """Let the thread end after the calls it has."""
        self._work.put(None)


_CALLS: weakref.WeakKeyDictionary[Any, StoreCalls] = weakref.WeakKeyDictionary()
_CALLS_LOCK = threading.Lock()


def calls_of(store: Any) -> StoreCalls:
    """The `StoreCalls` of `store`; their thread ends with it."""
    with _CALLS_LOCK:
        calls = _CALLS.get(store)
        if calls is None:
            calls = _CALLS[store] = StoreCalls()
            weakref.finalize(store, calls.end).atexit = False
        return calls


def _serve(queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (item := queue.get()) is not None:
        _make(*item)
        # Otherwise it would keep the store alive while idle.
        del item


def _make(work: Callable[[], Any], call: Future[Any]) -> None:
    try:
        answer = work()
    except BaseException as error:
        call.set_exception(error)
    else:
        call.set_result(answer)
