"""What all layers of a group share: one heap, one epoch counter, one error record and one signal area.

Layers `register` what they need, then `allocate()` makes it once; `check()` raises what kernels or peers recorded.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.comm.bootstrap import RankGroup, TransportChoice, choose_transport, describe_ranks
from moe_runtime.comm.collective import CollectiveHeap, CollectiveTransport
from moe_runtime.comm.failures import abort_words, encode_abort, find_failure, reason_text, write_abort
from moe_runtime.comm.heap import REGION_ALIGNMENT, SymmetricHeap
from moe_runtime.comm.nvshmem_heap import NvshmemHeap
from moe_runtime.comm.private_heap import PrivateHeap
from moe_runtime.comm.shared_heap import SharedHeap
from moe_runtime.comm.signals import ABORT_WORDS, ERROR_WORDS, NUM_COUNTERS, REASON_WORDS, SignalLayout
from moe_runtime.errors import MoERuntimeError, PeerAbortedError, Phase, reason_of
from moe_runtime.formats import align
from moe_runtime.kernels.nvrtc import raw_stream
from moe_runtime.kernels.runtime import resolve_engine

HALVED_REGIONS = ("stamps", "landing", "combine")
"""Regions of two halves, used in turn; `moe_runtime.memory` has them all."""
_LOG = logging.getLogger(__name__)
MAX_SECONDS = 1e9
"""Kernels count nanoseconds in int64."""
P = ParamSpec("P")
R = TypeVar("R")


class _OverContext(Protocol):
    context: ExpertParallelContext


S = TypeVar("S", bound=_OverContext)


class ExpertParallelContext:
    """One rank's part of a group that runs expert layers together. Constructing it is collective.

    One thread at a time may be in a call of a layer or dispatcher over it; that of another is refused. On a GPU steps
    of different streams come one after the other, but the halves of one step belong on the same stream. A CUDA graph
    that holds steps is not ordered for you: replay graphs on the stream that runs the other steps, or order them with
    events.

    Used as `with ExpertParallelContext(...) as context:`, its end raises what the last step recorded, if nothing else
    has been raised.

    Args:
        group: a process group or a one-dimensional `DeviceMesh`, may be a part of the world; None is the default
            group, or a single rank where torch.distributed is not initialised (`init_from_env`), which is refused
            where torchrun has started several, unless the transport is `private`.
        device: where the heap lies; default the current GPU, or the CPU where there is none. Another GPU than the
            current one (`torch.cuda.set_device`) is not for layers: Triton launches on the current one.
        heap: a ready-made heap that is not allocated yet, such as a member of `PrivateHeap.group`; then there is no
            `group`, and configurations are not compared.
        transport: `auto`, `nvshmem`, `shared`, `private` or `collective` (`comm.bootstrap.choose_transport`).
        engine: `auto`, `cuda`, `triton` or `torch` (`kernels.runtime.resolve_engine`).
        timeout_s: how long a step waits for a peer.
        startup_timeout_s: how long construction, `allocate()`, the first step and `close()` wait for a peer.

    Attributes:
        rank, world_size, device, heap: as they are.
        engine: `cuda`, `triton` or `torch`, resolved.
        transport: name of the transport in use; `transport_reasons` says why not the others.
        carrier: the `CollectiveTransport`; None where peers are mapped.
        timeout_ns, startup_timeout_ns: the limits for kernels.
        signals_layout: word offsets in `signals`.
        half_bytes: bytes from one half of a region to the other, by region.
        staging_bytes: bytes of region `staging`, through which experts move (`moe_runtime.replacement`); mostly 0.
        allocated, failed, closed: the state.
        signals: int32 view of the own signal region (after `allocate()`, like all below).
        signal_pointers, stamps_pointers, landing_pointers, combine_pointers: int64 `[W]` for kernels.
        epoch: int32 `[1]`, number of the last dispatch.
        error: int32 `[8]` in host-visible memory, `comm.signals.ERROR_WORDS`.
        latch: int32 `[2]` on the device: the first error, which alone is recorded, and whether all peers know of it.
        counters: int32 `[NUM_COUNTERS]` of `comm.signals` on the device, zero between kernels.
    """

    signals: torch.Tensor
    signal_pointers: torch.Tensor
    stamps_pointers: torch.Tensor
    landing_pointers: torch.Tensor
    combine_pointers: torch.Tensor
    epoch: torch.Tensor
    error: torch.Tensor
    latch: torch.Tensor
    counters: torch.Tensor

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        heap: SymmetricHeap | None = None,
        transport: str = "auto",
        engine: str = "auto",
        timeout_s: float = 30.0,
        startup_timeout_s: float = 120.0,
    ) -> None:
        for name, limit in (("timeout_s", timeout_s), ("startup_timeout_s", startup_timeout_s)):
            number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if not (number and 0 < limit <= MAX_SECONDS):
                raise ValueError(f"{name}: expected a positive number of seconds, at most 1e9, got {limit!r}")
        self.timeout_s = timeout_s
        self.startup_timeout_s = startup_timeout_s
        self.timeout_ns = int(timeout_s * 1e9)
        self.startup_timeout_ns = int(startup_timeout_s * 1e9)
        self.group: RankGroup | None = None
        self.transport_reasons: dict[str, str] = {}
        if heap is None:
            self.group = RankGroup(group, timeout_s=startup_timeout_s, alone=transport == "private")
            try:
                self.device = _resolve_device(device)
                self.engine = resolve_engine(engine, self.device)
                choice = choose_transport(self.group, self.device, transport)
                self.heap = _make_heap(choice, self.group, self.device)
            except BaseException as error:
                self.group.leave(reason_of(error))
                raise
            self.transport_reasons = choice.reasons
        else:
            self._check_heap(heap, group, device, transport)
            self.device = heap.device
            self.engine = resolve_engine(engine, self.device)
            self.heap = heap
        self.transport = self.heap.name
        self.carrier = CollectiveTransport(self.heap) if isinstance(self.heap, CollectiveHeap) else None
        self.rank = self.heap.rank
        self.world_size = self.heap.world_size
        self.signals_layout = SignalLayout(self.world_size)
        self.half_bytes = dict.fromkeys(HALVED_REGIONS, REGION_ALIGNMENT)
        self.staging_bytes = 0
        self.allocated = False
        self.failed = False
        self.closed = False
        self._agreements: list[tuple[str, dict[str, object]]] = []
        self._agreed = 0
        self._exchanges = 0
        self._layers = 0
        self._failure: Exception | None = None
        self._abort_codes: np.ndarray | None = None
        self._side_stream: torch.cuda.Stream | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self._one_thread = threading.RLock()

    @staticmethod
    def _check_heap(heap: SymmetricHeap, group: object, device: torch.device | str | None, transport: str) -> None:
        if group is not None:
            raise ValueError("group: expected None together with heap, which brings its own ranks")
        if transport not in ("auto", heap.name):
            raise ValueError(f"transport: expected auto or {heap.name} together with this heap, got {transport!r}")
        if device is not None and _named_device(device) != heap.device:
            raise ValueError(f"device: expected that of heap, {heap.device}, got {device}")
        if heap.allocated:
            raise ValueError("heap: expected one that is not allocated yet")

    def register(
        self,
        *,
        agree: Mapping[str, object] | None = None,
        about: str | None = None,
        staging_bytes: int = 0,
        **half_bytes: int,
    ) -> None:
        """Ask for at least `half_bytes` bytes in each of the two halves of regions `stamps`, `landing`, `combine`.

        Args:
            agree: values (picklable, comparable) that must be equal on all ranks; `allocate()` compares them.
            about: what they belong to, such as `layer 3`, for messages; None is the number of the registration.
            staging_bytes: least size of region `staging`, which there is only if a layer asks for it.

        Raises `ValueError` for an unknown region, and after `allocate()` for more than there is.
        """
        for region, num_bytes in half_bytes.items():
            if region not in HALVED_REGIONS:
                raise ValueError(f"region: expected one of {HALVED_REGIONS}, got {region!r}")
            if num_bytes < 0:
                raise ValueError(f"{region}: expected bytes >= 0, got {num_bytes}")
            if self.allocated and num_bytes > self.half_bytes[region]:
                raise ValueError(
                    f"{region}: {num_bytes} bytes needed, but the context is allocated with {self.half_bytes[region]}; "
                    "create all layers before the first step, or register the largest one first"
                )
        if self.allocated and staging_bytes > self.staging_bytes:
            raise ValueError(
                f"staging_bytes: {staging_bytes} needed, but the context is allocated with {self.staging_bytes}; "
                "create all layers before the first step, or register the largest one first"
            )
        self.staging_bytes = max(self.staging_bytes, align(staging_bytes, REGION_ALIGNMENT))
        for region, num_bytes in half_bytes.items():
            self.half_bytes[region] = max(self.half_bytes[region], align(num_bytes, REGION_ALIGNMENT))
        if agree is not None:
            name = f"agreement {len(self._agreements)}" if about is None else about
            self._agreements.append((name, dict(agree)))

    def number_exchange(self) -> int:
        """The number of the next exchange, which ranks make in the same order."""
        self._exchanges += 1
        return self._exchanges - 1

    def number_layer(self) -> int:
        """The number of the next layer, which ranks make in the same order."""
        self._layers += 1
        return self._layers - 1

    @property
    def reserved_bytes(self) -> int:
        """Bytes of this rank's heap: two halves of each region, the signals and the staging of moving experts."""
        signal_bytes = align(self.signals_layout.num_bytes, REGION_ALIGNMENT)
        return 2 * sum(self.half_bytes.values()) + signal_bytes + self.staging_bytes

    def allocate(self) -> None:
        """Compare configurations and allocate the heap. Collective; later calls compare what was registered since.

        Raises on every rank: `ValueError` naming the keys on which ranks disagree and each rank's value; `OSError`
        where memory does not suffice; `PeerTimeoutError` naming a rank that does not come within `startup_timeout_s`.
        """
        self._check_usable()
        if self.allocated and self._agreed == len(self._agreements):
            return
        self.check()
        with self._given_up_on_error():
            self._compare()
            if not self.allocated:
                # The first step may be in inference mode and what writes here later not.
                with torch.inference_mode(False):
                    self._allocate()

    def compare(self) -> None:
        """The comparison of `allocate()` by itself, for what shall be done only where ranks agree. Collective.

        Raises as `allocate()`.
        """
        self.check()
        with self._given_up_on_error():
            self._compare()

    @contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        """Around what ranks do together: after an error they are not at the same step any more.

        The same error is raised ever after, and nobody waits for this rank.
        """
        try:
            yield
        except Exception as error:
            self._failure = error
            self.failed = True
            if self.group is not None:
                self.group.leave(reason_of(error))
            raise
        except BaseException as error:
            # An interrupt, which is not raised again.
            self.abort(reason_of(error))
            raise

    def _allocate(self) -> None:
        self.heap.reserve("signals", self.signals_layout.num_bytes)
        for region in HALVED_REGIONS:
            # The first half is for even epochs. A stamp of it that nobody has written is odd: after 2^32 dispatches the
            # epoch is 0 again.
            ones = self.half_bytes[region] if region == "stamps" else 0
            self.heap.reserve(region, 2 * self.half_bytes[region], ones=ones)
        if self.staging_bytes:
            self.heap.reserve("staging", self.staging_bytes)
        # What kernels write on this rank's behalf exists before any peer can store here.
        self._allocate_words()
        self.heap.allocate()
        self.signals = self.heap.tensor("signals").view(torch.int32)
        self.signal_pointers = self.heap.peer_pointers("signals")
        self.stamps_pointers = self.heap.peer_pointers("stamps")
        self.landing_pointers = self.heap.peer_pointers("landing")
        self.combine_pointers = self.heap.peer_pointers("combine")
        if self.device.type == "cpu":
            self._abort_codes = abort_words(self.signals, self.signals_layout)[:, 0].numpy()
        self.allocated = True
        if self.rank == 0:
            sizes = self.world_size, self.transport, self.engine, self.reserved_bytes
            _LOG.info("%d rank(s): transport %s, engine %s, %d bytes reserved on each", *sizes)

    def _allocate_words(self) -> None:
        on_gpu = self.device.type == "cuda"
        self.epoch = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.latch = torch.zeros(2, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=self.device)
        self.error = torch.zeros(ERROR_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._error_view = self.error.numpy()
        # Made now, since neither pinned memory nor a stream can be made while a kernel waits for a peer.
        num_words = ABORT_WORDS + REASON_WORDS
        self._abort_message = torch.zeros(num_words, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._side_stream = torch.cuda.Stream(self.device) if on_gpu else None

    def _compare(self) -> None:
        compared, self._agreed = self._agreed, len(self._agreements)
        if self.group is None:
            return
        mine: dict[str, object] = {}
        for about, agreement in self._agreements[compared:]:
            mine.update({f"{key} ({about})": agreement[key] for key in sorted(agreement)})
        mine.update({f"bytes of {region}": self.half_bytes[region] for region in HALVED_REGIONS})
        mine["bytes of staging"] = self.staging_bytes
        answers = self.group.gather("ExpertParallelContext.allocate", mine)
        keys = list(dict.fromkeys(key for answer in answers for key in answer))
        problems = []
        for key in keys:
            values = [answer.get(key, "not given") for answer in answers]
            if any(value != values[0] for value in values):
                problems.append(f"{key}: {describe_ranks(values)}")
        if problems:
            raise ValueError(f"agree: ranks disagree on {'; '.join(problems)}")

    def check(self) -> None:
        """Raise what went wrong here or, as far as the host sees it without waiting, on a peer; the same ever after.

        On a CPU that includes the peers' abort words, on a GPU only the host-visible error record is read: what
        kernels there have seen. Cheap enough for every step.

        Raises `RoutingError`, `CapacityError`, `PeerTimeoutError`, `PeerAbortedError`, `StaleHandleError` or
        `StepMismatchError`, or what `allocate()` raised; `ValueError` if the context is closed.
        """
        if self._failure is None and self.allocated and not self.closed:
            told = self._abort_codes is not None and self._abort_codes.any()
            if told or self._error_view[0]:
                with torch.cuda.stream(self._side_stream):
                    self._find_failure()
        self._check_usable()

    def check_peers(self) -> None:
        """`check()` including the peers' abort words on a GPU: waits for the work queued on the current stream."""
        if self._failure is None and self.allocated and not self.closed:
            self._find_failure()
        self._check_usable()

    def fail(self, error: MoERuntimeError) -> Exception:
        """Record `error` as this rank's failure unless there is one already; returns the one to raise."""
        if self._failure is None:
            self._failure = error
        self.failed = True
        return self._failure.with_traceback(None)

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank gives up, without waiting: they raise `PeerAbortedError` with `reason`.

        Called by whoever raises a host-side error inside a collective step. The first 256 bytes of `reason` arrive.
        Does nothing on a rank that has failed already.
        """
        if self.closed or self._failure is not None:
            return
        self.fail(PeerAbortedError(f"rank {self.rank} gave up: {reason}", self.rank, Phase.HOST))
        if self.allocated:
            encode_abort(self._abort_message, self.rank, reason)
            with torch.cuda.stream(self._side_stream):
                peers = [self.heap.peer_tensor("signals", peer).view(torch.int32) for peer in range(self.world_size)]
                write_abort(self._abort_message, peers, self.signals_layout, self.rank)
                if self.carrier is not None:
                    self.carrier.post_abort(max(self.timeout_s, self.startup_timeout_s))
        if self.group is not None:
            # Peers may wait on the host: for another layer, or in `close()`.
            self.group.leave(reason)

    def follow_stream(self) -> None:
        """On a GPU, order what is launched from now on behind what steps launched on another stream.

        All kernels of the exchange share epochs and counters, so no two steps may run beside each other. Of a stream
        that is captured, only others of the same capture are awaited.
        """
        last = self._last_stream
        if self.device.type != "cuda" or (last is not None and last.cuda_stream == raw_stream(self.device.index)):
            return
        stream = self._last_stream = torch.cuda.current_stream(self.device)
        if last is not None and _is_captured(last) == _is_captured(stream):
            stream.wait_stream(last)

    def close(self) -> None:
        """Free the heap; collective and in order, unless something has failed: then no peer is waited for.

        Waits for another thread that is in a step. Tensors and pointers of the heap must not be used afterwards. Safe
        to call twice.

        Raises `ValueError` if the step of another thread does not end within `startup_timeout_s`.
        """
        if not self._one_thread.acquire(timeout=self.startup_timeout_s):
            raise ValueError("context: another thread is in a step of it")
        try:
            self._close()
        finally:
            self._one_thread.release()

    def _close(self) -> None:
        if self.closed:
            return
        if self.carrier is not None:
            self.carrier.settle(self.timeout_s)
        if self._side_stream is not None:
            # Every wait of a kernel ends, so this does; then all that peers have told of is there to be seen.
            torch.cuda.synchronize(self.device)
        if self._failure is None and self.allocated:
            self._find_failure()
        self.closed = True
        if self.allocated:
            del self.signals
        self._abort_codes = None
        self.heap.close(failed=self.failed)

    def __enter__(self) -> ExpertParallelContext:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies, deep ones of layers among them, and pickles: the memory is one with that of the peers."""
        raise TypeError(
            "ExpertParallelContext: cannot be copied or pickled, nor can a layer over it; make and load another layer"
            " over the same context"
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        told = error is not None or self._failure is not None
        try:
            if error is not None:
                self.abort(reason_of(error))
                self.failed = True
        finally:
            self.close()
        # On a GPU the last step may have failed since the last call.
        if not told and self._failure is not None and self._error_view[0]:
            raise self._failure.with_traceback(None)

    def _find_failure(self) -> None:
        layout = self.signals_layout
        aborts = abort_words(self.signals, layout).tolist()
        failure = find_failure(
            self.error.tolist(),
            aborts,
            lambda rank: reason_text(self.signals, layout, rank),
        )
        if failure is not None:
            self.fail(failure)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self.closed:
            raise ValueError("context: it is closed")


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def by_one_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method of what has a `context`, of whose steps no two threads may do parts at a time.

    That raises `ValueError` in a second thread, before the method does anything, and leaves the first undisturbed.
    """

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        one_thread = self.context._one_thread
        if not one_thread.acquire(False):
            raise ValueError("context: another thread is in a step of it")
        try:
            return method(self, *args, **kwargs)
        finally:
            one_thread.release()

    return call


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = _named_device(device)
    if place.type == "cuda":
        count = torch.cuda.device_count()
        if (place.index or 0) >= count:
            raise ValueError(f"device: expected a CPU or one of {count} GPUs, got {place}")
        if place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
    return place


def _named_device(device: torch.device | str) -> torch.device:
    """The device of that name, as tensors on it have it: `cpu:0` is `cpu`."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected a CPU or a CUDA device, got {device!r}") from None
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected a CPU or a CUDA device, got {place}")
    return torch.device("cpu") if place.type == "cpu" else place


def _make_heap(choice: TransportChoice, group: RankGroup, device: torch.device) -> SymmetricHeap:
    if choice.name == "private":
        return PrivateHeap(device)
    if choice.name == "shared":
        return SharedHeap(group)
    if choice.name == "nvshmem":
        return NvshmemHeap(group, device)
    return CollectiveHeap(group, device)
