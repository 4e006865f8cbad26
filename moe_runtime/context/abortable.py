"""What goes wrong in a context: how a rank learns of it, raises it from then on, and tells its peers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from moe_runtime.comm.errors import ErrorCode, MoERuntimeError, PeerAbortedError, PeerTimeoutError, Phase, reason_of
from moe_runtime.comm.failures import abort_words, encode_abort, find_failure, reason_text, write_abort
from moe_runtime.comm.heaps.collective import CollectiveTransport
from moe_runtime.comm.heaps.heap import SymmetricHeap
from moe_runtime.comm.host_link import HostLink
from moe_runtime.comm.hosts import Hosts
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.signals import ABORT_WORDS, ERROR_WORDS, REASON_WORDS, SignalLayout
from moe_runtime.resilience.old_graphs import OldGraphs
from moe_runtime.resilience.recovery import Recovery, is_recoverable
from moe_runtime.support.arguments import check_kind


class AbortableContext:
    """A context that can fail: the base of `ExpertParallelContext`, which says what each attribute is."""

    device: torch.device
    rank: int
    timeout_s: float
    startup_timeout_s: float
    group: RankGroup | None
    heap: SymmetricHeap
    link: HostLink | None
    hosts: Hosts | None
    host_transport: CollectiveTransport | None
    recovery: Recovery | None
    signals_layout: SignalLayout
    signals: torch.Tensor
    error: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        self.allocated = self.failed = self.closed = False
        self._process = os.getpid()
        self.say_failed: Callable[[], None] | None = None
        self.has_placement = False
        self._told_hosts = False
        self._failure: Exception | None = None
        self._abort_codes: np.ndarray | None = None
        self._side_stream: torch.cuda.Stream | None = None
        self._old_graphs = OldGraphs(device)

    def _allocate_error_words(self) -> None:
        """What this rank's kernels record, and what tells its peers that it gives up."""
        on_gpu = self.device.type == "cuda"
        self.error = torch.zeros(ERROR_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._error_view = self.error.numpy()
        # Neither pinned memory nor a stream can be created while a kernel waits for a peer.
        num_words = ABORT_WORDS + REASON_WORDS
        self._abort_message = torch.zeros(num_words, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._side_stream = torch.cuda.Stream(self.device) if on_gpu else None

    def _watch_abort_words(self) -> None:
        """On a CPU the host sees what peers write in `signals` without waiting."""
        if self.device.type == "cpu":
            self._abort_codes = abort_words(self.signals, self.signals_layout)[:, 0].numpy()

    def check(self) -> None:
        """Raise what went wrong here or, as far as the host sees it without waiting, on a peer; then always the same.

        On a CPU that includes the peers' abort words. On a GPU it reads only the host-visible error record, which has
        what the kernels here have seen. Cheap enough for every step.

        Raises `RoutingError`, `CapacityError`, `PeerTimeoutError`, `PeerAbortedError`, `StaleHandleError` or
        `StepMismatchError`, or what `allocate()` raised; `ValueError` if the context is closed. On a CPU with
        `on_failure="continue"` it does not raise that a rank is missed in a step: the next step goes on without it.
        """
        try:
            self._raise_failure()
        except PeerTimeoutError as error:
            if self.recovery is None or self.device.type != "cpu" or not is_recoverable(error):
                raise

    def _raise_failure(self) -> None:
        """`check()` within a step, or before one that is not run again."""
        if self._failure is None and self.allocated and not self.closed:
            aborted = self._abort_codes is not None and self._abort_codes.any()
            if aborted or self._error_view[0]:
                with torch.cuda.stream(self._side_stream):
                    self._find_failure()
        self._check_usable()

    def _raise_on_cpu(self) -> None:
        """On CPUs a stage is done when its call returns: raise at once what it recorded."""
        if self.device.type == "cpu":
            self._raise_failure()

    def check_peers(self) -> None:
        """`check()` including the peers' abort words on a GPU: waits for the work queued on the current stream.

        Raises `ValueError` also if a graph was replayed that was captured before a rank died (`recover`).
        """
        self._old_graphs.check()
        if self._failure is None and self.allocated and not self.closed:
            self._find_failure()
        self._check_usable()

    def fail(self, error: Exception) -> Exception:
        """Record `error` as this rank's failure unless it has one already; returns the one to raise."""
        if self._failure is None:
            self._failure = error
        self.failed = True
        return self._failure.with_traceback(None)

    def abort(self, reason: str, error: Exception | None = None) -> None:
        """Tell all peers that this rank gives up, waiting for none: they raise `PeerAbortedError` with `reason`.

        For host-side errors inside a collective step. Peers get the first 256 bytes of `reason`. Later calls on this
        rank raise `error`, by default a `PeerAbortedError` too. On a rank that has failed already, peers that do not
        know yet are told of that failure. Does nothing on a closed context. Where this process hosts the store, peers
        have half a second to read it there (`RankGroup.leave`). Raises `ValueError` unless `reason` is a text and
        `error` an exception or None.
        """
        check_kind("reason", reason, str)
        if error is not None:
            check_kind("error", error, Exception)
        if self.closed or os.getpid() != self._process:
            return  # a forked child has the memory of its parent, which goes on
        if self._failure is None:
            self._abort(reason, error)
        elif self.host_transport is not None and self.allocated:
            self._post_record(self.host_transport)
        self._tell_hosts()

    def _abort(self, reason: str, error: Exception | None) -> None:
        """`abort` among the ranks of this host, and in the store."""
        self.fail(error or PeerAbortedError(f"rank {self.rank} gave up: {reason}", self.rank, Phase.HOST))
        if self.allocated:
            local = self.heap.rank
            encode_abort(self._abort_message, local, reason)
            with torch.cuda.stream(self._side_stream):
                ranks = range(self.heap.world_size)
                peers = [self.heap.peer_tensor("signals", peer).view(torch.int32) for peer in ranks]
                write_abort(self._abort_message, peers, self.signals_layout, local)
                if self.host_transport is not None:
                    self.host_transport.post_abort(max(self.timeout_s, self.startup_timeout_s))
        if self.group is not None:
            # Peers may wait on the host: for another layer, or in `close()`.
            self.group.leave(reason, error)

    def _post_record(self, host_transport: CollectiveTransport) -> None:
        """Tell the peers what a kernel here has found since the last exchange: its abort words are only staged."""
        if self._error_view[0] and self._error_view[5] == self.rank:
            if self._side_stream is not None:
                # A kernel stages them after its record.
                self._side_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side_stream):
                host_transport.post_abort(max(self.timeout_s, self.startup_timeout_s))

    def _other_host_failed(self, error: MoERuntimeError) -> None:
        """On the thread of the watch: later calls raise `error`, and this host's ranks learn of it."""
        if not self.closed and self._failure is None:
            self._abort(str(error), error)

    def _tell_hosts(self) -> None:
        """Take part in the exchange between hosts that comes next, once, to say that this rank has failed."""
        if self.link is not None and not self._told_hosts:
            self._told_hosts = True
            if self.say_failed is not None and self.allocated:
                if self._side_stream is not None:
                    torch.cuda.current_stream(self.device).wait_stream(self._side_stream)
                self.say_failed()
            self.link.leave()

    @contextmanager
    def _fails_for_good(self) -> Iterator[None]:
        """For collective work on the host: after an error in it ranks are no longer at the same step.

        Later calls raise the same error, and peers do not wait for this rank.
        """
        try:
            yield
        except Exception as error:
            self.abort(reason_of(error), error)
            raise
        except BaseException as error:
            # An interrupt, which later calls do not raise again.
            self.abort(reason_of(error))
            raise

    def _end(self, error: Exception) -> None:
        """Have all later calls raise `error`: the recovery from a failure has failed."""
        self._failure, self.failed = error, True

    def _find_failure(self) -> None:
        layout = self.signals_layout
        aborts = abort_words(self.signals, layout).tolist()

        def reason(number: int) -> str:
            if number < layout.world_size:
                return reason_text(self.signals, layout, number)
            # A rank of another host, which leaves it in the store after it has told its peers.
            return "" if self.group is None else self.group.reason_left("check")

        named = (lambda number: number) if self.hosts is None else self.hosts.of_recorded
        record = self.error.tolist()
        failure = find_failure(record, aborts, reason, named, placed=self.has_placement)
        if isinstance(failure, PeerTimeoutError) and self.link is not None and self.link.suspects is not None:
            code, about, origin = record[0], record[1], record[5]
            if code == ErrorCode.TIMEOUT and origin == self.heap.rank:
                self.link.suspects.accuse(named(about), gone=False)
            failure = self._traced(failure)
        if failure is not None:
            self.fail(failure)

    def _traced(self, error: PeerTimeoutError) -> PeerTimeoutError:
        """`error`, or one that names the rank which the rank of `error` waits for. For a rank that gave up waiting."""
        if self.link is None or self.link.suspects is None or error.rank < 0:
            return error
        found = self.link.suspects.culprit(error.rank, self.timeout_s / 2)
        if found == error.rank:
            return error
        return PeerTimeoutError(f"{error}, since it waits for rank {found}", found, error.phase)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self.closed:
            raise ValueError("context: it is closed")
