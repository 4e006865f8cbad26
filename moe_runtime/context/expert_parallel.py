"""What all layers of a group share: one heap, one epoch counter, one error record and one signal area.

Layers `register` what they need, then `allocate()` makes it once; `check()` raises what kernels or peers recorded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.comm.errors import MoERuntimeError, PeerAbortedError, PeerTimeoutError, Phase, reason_of
from moe_runtime.comm.group_members import MAX_SECONDS
from moe_runtime.comm.heaps.collective import CollectiveHeap, CollectiveTransport
from moe_runtime.comm.heaps.heap import SymmetricHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
from moe_runtime.comm.host_link import PrivateLink
from moe_runtime.comm.host_watch import BEAT_S
from moe_runtime.comm.rank_group import ROLL_CALL_S, RankGroup
from moe_runtime.comm.signals import NUM_COUNTERS, SignalLayout
from moe_runtime.context.abortable import AbortableContext
from moe_runtime.context.agreement import Agreement
from moe_runtime.context.host_memory import LinkBuffers
from moe_runtime.context.regions import Regions
from moe_runtime.context.threads import StreamOrder
from moe_runtime.context.transport import Transport, check_heap, check_survivable, make_transport, resolve_device
from moe_runtime.kernels.exchange.interface import ExchangeMemory
from moe_runtime.kernels.exchange.plan import exchange_engine
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.resilience.membership import Membership
from moe_runtime.resilience.newcomer import newcomers_group
from moe_runtime.resilience.recovery import Recovery, is_recoverable
from moe_runtime.support.arguments import check_choice, check_flag, check_integer, check_kind, check_seconds

_LOG = logging.getLogger(__name__)

_READ_BY_KERNELS = (
    *("signals", "signal_pointers", "token_flags_pointers", "landing_pointers", "combine_pointers"),
    *("epoch", "error", "latch", "counters"),
)
"""Attributes whose memory kernels read and write, besides the regions."""

SPARE_SIGNALS = 2
"""Regions of spare signals for each rank: for its death, and for a time when it was only missed."""


class ExpertParallelContext(AbortableContext):
    """One rank's part of a group that runs expert layers together. Constructing it is collective.

    Only one thread at a time may be in a call of a layer or dispatcher over it; a second one is refused. On a GPU,
    steps on different streams run one after another, but both halves of one step belong on the same stream. A CUDA
    graph that holds steps is not ordered for you: replay graphs on the stream that runs the other steps, or order them
    with events.

    As a context manager it closes itself, and raises what the last step recorded unless another error is on its way.

    Args:
        group: a process group or a one-dimensional `DeviceMesh`; it may be a part of the world. None is the default
            group, or a single rank where torch.distributed is not initialised (`init_from_env`). Where torchrun has
            started several ranks, that single rank is refused unless the transport is `private`.
        device: where the heap lies; default the current GPU, or the CPU where there is none. Layers need the current
            GPU (`torch.cuda.set_device`), since Triton launches there.
        heap: a ready-made heap that is not allocated yet, such as a member of `PrivateHeap.group`. It excludes
            `group`, and configurations are not compared.
        link: with a heap of the ranks of one virtual host, its way to the others (`PrivateLink.rails`).
        transport: `auto`, `nvshmem`, `shared`, `private`, `hierarchical` or `collective`
            (`comm.transport.choose_transport`).
        one_memory: exclude `hierarchical`, as padded rows need.
        engine: `auto`, `cuda`, `triton` or `torch` (`kernels.runtime.resolve_engine`).
        timeout_s: how long a step waits for a peer.
        startup_timeout_s: how long construction, `allocate()`, the first step and `close()` wait for a peer.
        on_failure: `abort`: a rank that dies in a step ends the group. `continue`: the others go on without it, where
            each expert has a replica on one of them or can be loaded again (docs/failures.md). Equal on all ranks;
            needs a transport whose memory survives a rank (`shared`, `nvshmem`).
        lost_experts: with `continue`, experts that died without a replica and that survivors load again: `wait` has
            steps wait until they are there, `drop` has tokens do without them, with renormalised weights and counted.

    Attributes:
        rank, world_size, device: of this process in the group; after a death, ranks that are left are numbered anew.
        generation: how often the ranks have changed.
        members: original ids of the current ranks.
        recovery: what goes on after a death; None with `abort`, and on a single rank.
        heap: the memory of all ranks; with `link`, of the ranks of this host.
        link: the way between hosts; None where the heap has all ranks.
        hosts: the ranks of each host; None without a link.
        link_buffers: memory of what travels between hosts; None without a link.
        say_failed: takes part in the next exchange between hosts, to tell that this rank has failed.
        has_placement: whether a layer has, or had, a placement, which changes ids that it refuses (`REFUSED_ID`).
        engine: `cuda`, `triton` or `torch`, resolved. `kernels.exchange.plan.exchange_engine` says what the exchange
            runs on.
        transport: name of the transport in use; `transport_reasons` says why not the others.
        host_transport: the `CollectiveTransport`; None where peers are mapped.
        timeout_ns, startup_timeout_ns: the limits for kernels.
        signals_layout: word offsets in `signals`.
        half_bytes: bytes from one half of a region to the other, by region.
        thread_lock: held by the thread that is in a step (`threads.by_one_thread`).
        allocated, failed, closed: the state.
        signals: int32 view of the own signal region (after `allocate()`, like all below).
        signal_pointers, token_flags_pointers, landing_pointers, combine_pointers: int64 `[W]` for kernels.
        epoch: int32 `[1]`, number of the last dispatch.
        dispatches: calls of `dispatch_send` so far, without replays of graphs, which `epoch` counts too.
        landing_views: by number of the exchange, what has landed as rows and block scales (`Exchange.landed`).
        error: int32 `[8]` in host-visible memory, `comm.signals.ERROR_WORDS`.
        latch: int32 `[2]` on the device: the first error, which alone is recorded, and whether all peers know of it.
        counters: int32 `[NUM_COUNTERS]` of `comm.signals` on the device, zero between kernels.
    """

    signals: torch.Tensor
    signal_pointers: torch.Tensor
    token_flags_pointers: torch.Tensor
    landing_pointers: torch.Tensor
    combine_pointers: torch.Tensor
    epoch: torch.Tensor
    error: torch.Tensor
    latch: torch.Tensor
    counters: torch.Tensor

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | RankGroup | None = None,
        *,
        device: torch.device | str | None = None,
        heap: SymmetricHeap | None = None,
        link: PrivateLink | None = None,
        transport: str = "auto",
        one_memory: bool = False,
        engine: str = "auto",
        timeout_s: float = 30.0,
        startup_timeout_s: float = 120.0,
        on_failure: str = "abort",
        lost_experts: str = "wait",
    ) -> None:
        alone = isinstance(transport, str) and transport == "private"
        try:
            check_flag("one_memory", one_memory)
            check_choice("on_failure", on_failure, ("abort", "continue"))
            check_choice("lost_experts", lost_experts, ("wait", "drop"))
            self.timeout_s = check_seconds("timeout_s", timeout_s, MAX_SECONDS)
            self.startup_timeout_s = check_seconds("startup_timeout_s", startup_timeout_s, MAX_SECONDS)
            if link is not None and heap is None:
                raise ValueError("link: expected None without heap")
            if heap is not None and on_failure == "continue":
                raise ValueError("on_failure: expected 'abort' with heap, whose ranks meet in no store")
        except ValueError as error:
            if heap is None and not isinstance(group, RankGroup):
                # Peers that are making this group would wait, and number the next ones otherwise than this rank.
                with contextlib.suppress(ValueError, MoERuntimeError):
                    RankGroup(group, alone=alone).leave(reason_of(error), error)
            raise
        self.lost_experts = lost_experts
        self.timeout_ns = int(self.timeout_s * 1e9)
        self.startup_timeout_ns = int(self.startup_timeout_s * 1e9)
        self.group: RankGroup | None = None
        self.transport_reasons: dict[str, str] = {}
        newcomer = isinstance(group, RankGroup)
        if heap is None:
            ranks = (
                group
                if isinstance(group, RankGroup)
                else RankGroup(group, timeout_s=self.startup_timeout_s, alone=alone)
            )
            self.group = ranks
            try:
                self.device = resolve_device(device)
                self.engine = resolve_engine(engine, self.device)
                if newcomer:
                    made = Transport("shared", SharedHeap(ranks))
                else:
                    kernels, _ = exchange_engine(self.engine, self.device)
                    made = make_transport(ranks, self.device, transport, kernels, one_memory)
                check_survivable(made, on_failure)
            except BaseException as error:
                ranks.leave(reason_of(error), error)
                raise
        else:
            check_heap(heap, group, device, transport, link)
            made, self.device = Transport(heap.name, heap, link), heap.device
            self.engine = resolve_engine(engine, self.device)
        super().__init__(self.device)
        self.transport, self.transport_reasons, self.heap, self.link = made.name, made.reasons, made.heap, made.link
        self.host_transport = CollectiveTransport(self.heap) if isinstance(self.heap, CollectiveHeap) else None
        self.hosts = None if self.link is None else self.link.hosts
        self.rank = self.heap.rank if self.hosts is None else self.hosts.rank
        self.world_size = self.heap.world_size if self.hosts is None else self.hosts.world_size
        self.link_buffers = None if self.hosts is None else LinkBuffers(self.hosts.num_hosts)
        self._local_memory: ExchangeMemory | None = None
        self.signals_layout = SignalLayout(self.heap.world_size)
        self.thread_lock = threading.RLock()
        self._regions = Regions(self.signals_layout)
        self.half_bytes = self._regions.half_bytes
        self._agreement = Agreement()
        self._exchanges = 0
        self._layers = 0
        self.dispatches = 0
        self.landing_views: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._streams = StreamOrder(self.device)
        self.recovery: Recovery | None = None
        self.generation = 0
        if on_failure == "continue" and self.group is not None and self.world_size > 1:
            self.recovery = Recovery(Membership(self.group), self._renew, self._end, self.timeout_s)
            agree = {"on_failure": on_failure, "lost_experts": lost_experts, "transport": self.transport}
            self.register(agree=agree, about="context")
        self._everyone = tuple(range(self.world_size))
        self._others_agreed: dict[str, object] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return self._everyone if self.recovery is None else self.recovery.membership.members

    @property
    def rank_states(self) -> dict[int, str]:
        """`in` or `out`, for each rank by its number at the start."""
        everyone = self._everyone if self.recovery is None else self.recovery.membership.everyone
        return {rank: "in" if rank in self.members else "out" for rank in everyone}

    @property
    def steps_done(self) -> int:
        """Steps of layers that this rank has done with `on_failure="continue"`, without warm-up steps."""
        return 0 if self.recovery is None else self.recovery.layer_steps

    @property
    def steps_repeated(self) -> int:
        """How many steps this rank has run again since a rank died in them, for itself or for others.

        `admit` and `release` count too.
        """
        return 0 if self.recovery is None else self.recovery.steps_repeated

    @property
    def can_rejoin(self) -> bool:
        """Whether a new process can take the place of a rank that is out."""
        return self.recovery is not None and not self.heap.kept_by_survivors

    @property
    def joins(self) -> bool:
        """Whether this process is still to take the place of a rank (`rejoin`). Its experts come from the others."""
        return self._others_agreed is not None

    @property
    def memory(self) -> ExchangeMemory:
        """What kernels get, after `allocate()`: this context, or with a link the part of it that is this host's."""
        return self if self._local_memory is None else self._local_memory

    @property
    def graph_safe(self) -> bool:
        """Whether a step can be captured in a CUDA graph."""
        return self.heap.graph_safe and (self.link is None or self.link.graph_safe)

    def register(
        self,
        *,
        agree: Mapping[str, object] | None = None,
        about: str | None = None,
        staging_bytes: int = 0,
        **half_bytes: int,
    ) -> None:
        """Ask for at least `half_bytes` bytes in each of the two halves of regions `token_flags`, `landing`, `combine`.

        Args:
            agree: numbers, texts, bools, None, or sequences of them, which must be equal on all ranks; `allocate()`
                compares them.
            about: what they belong to, such as `layer 3`, for messages; None numbers the registration.
            staging_bytes: least size of region `staging`, through which experts move between ranks.

        Raises `ValueError` for an unknown region, for other values to agree on, after `allocate()` for more bytes than
        there are, and if the context is closed; after a failure what `check()` raises.
        """
        self._check_usable()
        # All is checked before anything changes: a rank that tries again is to have the sizes and values of its peers.
        self._regions.check(half_bytes, staging_bytes, allocated=self.allocated)
        if about is not None:
            check_kind("about", about, str)
        if agree is not None:
            self._agreement.add(agree, about)
        self._regions.grow(half_bytes, staging_bytes)

    def next_exchange_id(self) -> int:
        """The id of the next exchange. All ranks must create exchanges in the same order."""
        self._exchanges += 1
        return self._exchanges - 1

    def next_layer_id(self) -> int:
        """The id of the next layer. All ranks must create layers in the same order."""
        self._layers += 1
        return self._layers - 1

    @property
    def staging_bytes(self) -> int:
        """Bytes of region `staging`, through which experts move between ranks; 0 where no layer asks for it."""
        return self._regions.staging_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of this rank: two halves of each region, the signals, the staging of moving experts, and the link's."""
        return self._regions.num_bytes + (0 if self.link_buffers is None else self.link_buffers.num_bytes)

    @classmethod
    def rejoin(
        cls,
        rank: int | None = None,
        store: dist.Store | None = None,
        *,
        engine: str = "auto",
        timeout_s: float = 30.0,
        startup_timeout_s: float = 120.0,
        lost_experts: str = "wait",
    ) -> ExpertParallelContext:
        """The context of a new process that takes the place of a rank that is out (`on_failure="continue"`).

        Make the same layers over it as the others did, with the same placements, and load their weights by the same
        calls. These read no experts. `allocate()` then waits until the others call `admit`, and gets the experts of
        this rank from them. From there on it is one of them: `steps_done` says after how many steps. torch.distributed
        need not be initialised, and `init_from_env` and `warm_up` must not be called.

        Args:
            rank: whose place it takes, by its number at the start; None is `RANK` of the environment.
            store: where the others meet, as they were given it; None is the one at `MASTER_ADDR` and `MASTER_PORT`.
            engine, timeout_s, startup_timeout_s, lost_experts: as for the others.

        Raises:
            ValueError: a wrong argument, or a store in which no such ranks have met.
            StoreLostError: there is no store.
        """
        limit_s = check_seconds("startup_timeout_s", startup_timeout_s, MAX_SECONDS)
        group, agreed = newcomers_group(rank, store, limit_s)
        context = cls(
            group,
            device="cpu",
            engine=engine,
            timeout_s=timeout_s,
            startup_timeout_s=startup_timeout_s,
            on_failure="continue",
            lost_experts=lost_experts,
        )
        context._others_agreed = agreed
        return context

    def allocate(self) -> None:
        """Compare configurations and allocate the heap. Collective; later calls compare what was registered since.

        Raises on every rank: `ValueError` naming the keys on which ranks disagree and each rank's value; `OSError`
        where memory does not suffice; `PeerTimeoutError` naming a rank that does not come within `startup_timeout_s`.
        """
        self._check_usable()
        if self.allocated and self._agreement.complete:
            return
        if self.joins:
            self._join()
            return
        self.compare()
        if not self.allocated:
            # The first step may run in inference mode, and a later writer of this memory may not.
            with self._fails_for_good(), torch.inference_mode(False):
                self._allocate()
        if self.recovery is not None:
            with self._fails_for_good():
                self.recovery.membership.publish(self._agreed)

    def compare(self) -> None:
        """Only the comparison of `allocate()`, for what must wait until ranks agree. Collective; raises as it does.

        A process that takes the place of a rank compares what it has registered so far with what the others have, and
        waits for nobody.
        """
        self._raise_failure()
        if self._others_agreed is not None:
            self._agreement.check_joins(self._agreed, self._others_agreed, so_far=True)
            return
        with self._fails_for_good():
            self._agreement.compare(self.group, self._regions.sizes)

    @property
    def _agreed(self) -> dict[str, object]:
        """What is equal on all ranks, once they have compared it."""
        return {**self._agreement.values, **{f"bytes of {name}": size for name, size in self._regions.sizes.items()}}

    def _join(self) -> None:
        """`allocate()` of a process that takes the place of a rank that is out."""
        assert self.recovery is not None and self._others_agreed is not None
        self._agreement.check_joins(self._agreed, self._others_agreed)
        try:
            with torch.inference_mode(False):
                self._regions.reserve(self.heap)
                self.recovery.join(self.startup_timeout_s)
            self._others_agreed = None
        except BaseException as error:
            # The others go on without this rank. They would all end if it told them that it gives up.
            known = error if isinstance(error, Exception) else None
            self._end(known or PeerAbortedError(reason_of(error), self.rank, Phase.HOST))
            raise
        self._agreement.take_as_compared()

    def admit(self) -> tuple[int, ...]:
        """Between two steps: have new processes take the places of ranks that are out (`rejoin`). Collective.

        The experts of a rank that comes back are copied from the others, over the heap. While experts that died are
        still loaded again, processes wait.

        Every rank calls it at the same point of its steps, whatever `members` says there: ranks may learn of a death
        one step apart. It takes some milliseconds where none asks. A rank that does not come within `timeout_s` is out.

        Returns:
            The ranks that have come back, by their numbers at the start.

        Raises as a step, and `ValueError` in a process that is still to come back itself.
        """
        self.check()
        if self.recovery is None:
            return ()
        self._begin_change()
        return self.recovery.admit(self.timeout_s, self.check_peers)

    def _begin_change(self) -> None:
        """Before ranks come or leave: this context must be allocated. Collective."""
        self._check_joined()
        if not self.allocated:
            self.allocate()

    def _check_joined(self) -> None:
        if self.joins:
            raise ValueError("context: call allocate() first, with which this process takes its place")

    def release(self, ranks: Sequence[int]) -> None:
        """Between two steps: go on without `ranks`, which may end then. Collective, also for those.

        Their experts are taken over as after a death. A new process may take their places later (`rejoin`, `admit`).

        Args:
            ranks: by their numbers at the start, of `members`, equal on all ranks; one must be left. A rank whose
                process hosts the store where ranks meet cannot leave.

        Raises:
            ValueError: wrong ranks, of which the other ranks learn by a `PeerAbortedError`; nothing has changed. Or a
                context without `on_failure="continue"`, or a process that is still to come back itself.
            RankRemovedError: on `ranks`, when the others go on.
            ExpertsLostError: experts that only these ranks hold cannot be loaded; nothing has changed.
            MoERuntimeError: as a step.
        """
        if self.recovery is None:
            raise ValueError("on_failure: expected a context of several ranks with on_failure='continue' for release")
        if self.heap.kept_by_survivors:
            raise ValueError(
                f"ranks: none can leave in order with transport={self.transport!r}, whose memory stays shared"
            )
        self.check()
        self._begin_change()
        self.recovery.release(ranks, self.timeout_s, self.check_peers)

    def recover(self, replays: int = 0) -> int:
        """After `PeerTimeoutError` of a graph's replay: go on with the ranks that are left. Collective for all of them.

        Steps that are not in a graph need no such call. Capture graphs again: replays of older ones give NaN, and
        `check_peers` raises `ValueError` after them. Repeat the steps that another rank has not done.

        Args:
            replays: how many replays this rank has done without an error.

        Returns:
            The fewest `replays` of any rank that is left.

        Raises:
            ValueError: a context without `on_failure="continue"`, or one in which no rank is missed in a step.
            MoERuntimeError: as a step.
        """
        check_integer("replays", replays, 0, 2**62)
        recovery, failure = self.recovery, self._failure
        if recovery is None or not isinstance(failure, PeerTimeoutError) or not is_recoverable(failure):
            raise ValueError("recover: expected a context with on_failure='continue' that misses a rank in a step")
        recovery.recover(failure)
        return -recovery.most("recover", -replays, self.timeout_s, self._raise_failure)

    def _allocate(self) -> None:
        if self.recovery is not None and self.heap.kept_by_survivors:
            self._regions.spare_signals = SPARE_SIGNALS * self.world_size
        self._regions.reserve(self.heap)
        # The words that this rank's kernels write must exist before a peer can store here.
        self._allocate_words()
        self.heap.allocate()
        if self.recovery is not None:
            self.heap._prepare_for_deaths()
        self._point_at_peers()
        if self.link_buffers is not None and self.link is not None:
            self.link_buffers.allocate(self.device)
            limit_s = max(self.timeout_s, 3 * BEAT_S)
            self.link.watch(self._other_host_failed, limit_s, max(limit_s, self.startup_timeout_s))
            # The same memory, where ranks have their numbers on this host.
            ours = {name: getattr(self, name) for name in ExchangeMemory.__annotations__}
            ours |= {"rank": self.heap.rank, "world_size": self.heap.world_size}
            self._local_memory = cast(ExchangeMemory, SimpleNamespace(**ours))
        self.allocated = True
        if self.rank == 0:
            sizes = self.world_size, self.transport, self.engine, self.reserved_bytes
            _LOG.info("%d rank(s): transport %s, engine %s, %d bytes reserved on each", *sizes)

    def _point_at_peers(self) -> None:
        """Views of and pointers to the memory of the heap, which is allocated."""
        self.signals = self.heap.tensor("signals").view(torch.int32)
        self.signal_pointers, self.token_flags_pointers, self.landing_pointers, self.combine_pointers = (
            self.heap.peer_pointers(region) for region in ("signals", "token_flags", "landing", "combine")
        )
        self.kernels: dict[tuple[Any, ...], Any] = {}
        self._watch_abort_words()

    @torch.inference_mode(False)
    def _renew(self, members: tuple[int, ...], group: RankGroup) -> None:
        """Go over to memory of `members` alone, after a death. Collective for them; what `recovery` calls.

        Nothing of the old memory is used again: what a rank that was stopped still stores there is not seen.

        Args:
            members: their numbers at the start.
            group: of them alone.
        """
        if self._side_stream is not None:
            torch.cuda.synchronize(self.device)  # Ends, since every wait of a kernel does.
        group.timeout_s = self.timeout_s
        assert self.recovery is not None
        generation = self.recovery.membership.generation
        heap = self.heap._of_survivors(members, group, generation)
        if self.allocated:
            self._old_graphs.end(self.epoch, self.latch)
            self._old_graphs.keep(*(getattr(self, name) for name in _READ_BY_KERNELS))
        group.timeout_s = self.startup_timeout_s
        self.heap, self.group, self.rank, self.world_size = heap, group, heap.rank, heap.world_size
        self.signals_layout = SignalLayout(heap.world_size)
        self._allocate_words()
        self._point_at_peers()
        self.generation, self._exchanges = generation, 0
        self.landing_views.clear()
        self.allocated = True
        self._failure, self.failed = None, False

    def _allocate_words(self) -> None:
        self.epoch = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.latch = torch.zeros(2, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=self.device)
        self._allocate_error_words()

    def _check_no_capture(self) -> None:
        """Raise `ValueError` where the current stream is being captured and a step cannot be."""
        if not self.graph_safe and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            others = "; ".join(f"{name}: {reason}" for name, reason in self.transport_reasons.items())
            raise ValueError(
                f"transport: {self.transport} waits for the host in every step, which a CUDA graph cannot capture"
                + (f" ({others})" if others else "")
            )

    def _begin_step(self) -> None:
        """Before a step, or a part of one: allocate what is not, raise what has failed, and follow the last stream.

        On a GPU what is launched from now on comes after the steps of other streams (`StreamOrder.follow`).
        """
        if (
            self._failure is not None
            or self.closed
            or not self.allocated
            or not self._agreement.complete
            or self._error_view[0]
            or (self._abort_codes is not None and self._abort_codes.any())
        ):
            self.allocate()
            self._raise_failure()
        self._streams.follow()

    def close(self) -> None:
        """Free the heap; collective and in order, unless something has failed: then no peer is waited for.

        Waits for another thread that is in a step. Tensors and pointers of the heap must not be used afterwards. Safe
        to call twice. A forked child only marks its copy as closed: its parent goes on.

        Raises `ValueError` if the step of another thread does not end within `startup_timeout_s`.
        """
        if os.getpid() != self._process:
            self.closed = True
            return
        if not self.thread_lock.acquire(timeout=self.startup_timeout_s):
            raise ValueError("context: another thread is in a step of it")
        try:
            self._close()
        finally:
            self.thread_lock.release()

    def _close(self) -> None:
        if self.closed:
            return
        if self.host_transport is not None:
            self.host_transport.settle(self.timeout_s)
        if self.link is not None and self.allocated:
            self.link.settle(min(self.timeout_s, ROLL_CALL_S) if self.failed else self.timeout_s)
        if self._side_stream is not None:
            # Ends, since every wait of a kernel does. Afterwards everything that peers reported is visible.
            torch.cuda.synchronize(self.device)
        if self._failure is None and self.allocated:
            self._find_failure()
        try:
            if self.recovery is not None and self.allocated and is_recoverable(self._failure):
                with self._fails_for_good():
                    self.recovery.part(self.startup_timeout_s, self.check_peers)
        finally:
            self._free()

    def _free(self) -> None:
        self.closed = True
        self.landing_views.clear()
        if self.recovery is not None:
            self.recovery.background.shutdown(wait=False, cancel_futures=True)
        if self.allocated:
            del self.signals
        self._abort_codes = None
        if self._failure is not None and self.group is not None:
            self.group.leave(reason_of(self._failure), self._failure)
        if self.link is not None:
            self.link.close(failed=self.failed)
        self.heap.close(failed=self.failed)

    def __enter__(self) -> ExpertParallelContext:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles, also deep copies of layers: peers hold pointers to this memory."""
        raise TypeError(
            "ExpertParallelContext: cannot be copied or pickled, nor can a layer over it; make and load another layer"
            " over the same context"
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        raised = error is not None or self._failure is not None
        try:
            if error is not None:
                self.abort(reason_of(error))
                self.failed = True
        finally:
            self.close()
        # On a GPU the last step may have failed since the last call.
        if not raised and self._failure is not None and self._error_view[0]:
            raise self._failure.with_traceback(None)
