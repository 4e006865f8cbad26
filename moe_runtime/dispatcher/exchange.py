"""How the tokens of a layer travel: an `Exchange` for each kind of memory between ranks, of which a dispatcher has one.

`LocalExchange` is for ranks that store to each other's memory, `OneRankExchange` for a rank without peers,
`StagedExchange` for a heap whose transport carries what was staged. `hierarchical.HierarchicalExchange` is for several
hosts. Each runs the kernels of an `ExchangeBackend`, the torch reference among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache, partial

import torch

from moe_runtime.comm.signals import count_tag_of
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchHandle
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeBackend, ExchangeMemory, RecvBuffers, SentTokens
from moe_runtime.kernels.exchange.landing import landing_rows, landing_scales
from moe_runtime.kernels.exchange.one_rank_cuda import OneRankKernels
from moe_runtime.kernels.exchange.padded_rows import PaddedRows
from moe_runtime.kernels.exchange.reference import part_index
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.launch_order import LaunchOrder


class Exchange(ABC):
    """Dispatch and combine of one layer on one rank.

    A step calls the four abstract methods in their order, with its handle. `TokenDispatcher` has checked their
    arguments, and that the handle is at this stage. `dispatch_forward` and `combine_forward` come before
    `dispatch_recv` and `combine_recv`, which call them where nobody has.

    Args:
        context: the group's memory and signals.
        geometry: of the ranks whose memory kernels address.
        exchange_id: number of the exchange in its context.
        backend: the kernels.

    Attributes:
        waits: the words of `kernels.exchange.waits` in which waits for peers are counted; None where they are not.
    """

    counts_waits = False
    """Whether `waits` may be set."""
    takes_router_ids = False
    """Whether geometries may have `router_ids`."""

    def __init__(
        self,
        context: ExpertParallelContext,
        geometry: ExchangeGeometry,
        exchange_id: int,
        backend: ExchangeBackend,
    ) -> None:
        assert geometry.router_ids is None or self.takes_router_ids
        self.waits: torch.Tensor | None = None
        self.context, self.geometry, self.backend = context, geometry, backend
        self.memory: ExchangeMemory = context
        self.exchange_id, self.count_tag = exchange_id, count_tag_of(exchange_id)
        self.starts = torch.tensor(geometry.starts, dtype=torch.int32, device=context.device)
        self.recv_memory = RecvMemory(geometry, backend, context.device)
        self.can_keep_scales_in_record = backend.can_keep_scales_in_record(geometry)

    @abstractmethod
    def dispatch_send(self, handle: DispatchHandle, tokens: SentTokens) -> None:
        """Quantize this rank's tokens and send them: all that does not wait for the peers' tokens."""

    @abstractmethod
    def dispatch_recv(self, handle: DispatchHandle) -> None:
        """Wait for the peers' tokens and group them into the buffers of `handle`."""

    @abstractmethod
    def combine_send(self, handle: DispatchHandle, output: torch.Tensor) -> None:
        """Weight and sum the rows of each token on this rank, `output` `[R, H]`, and send the sums home."""

    @abstractmethod
    def combine_recv(self, handle: DispatchHandle, shared: torch.Tensor | None) -> None:
        """Wait for the sums of all ranks and add them and `shared` `[T, H]` into the output of `handle`."""

    @abstractmethod
    def dispatch_recv_padded(
        self, handle: DispatchHandle, out: PaddedRows, scales_at: int, statistics: torch.Tensor | None
    ) -> None:
        """`dispatch_recv` into `out`; `ExchangeBackend.dispatch_recv_padded` has the arguments."""

    def combine_at_once(
        self, handle: DispatchHandle, output: torch.Tensor, shared: torch.Tensor | None, order: LaunchOrder
    ) -> None:
        """`combine_send` where `combine_recv` comes next, with this `shared`; `order` as in `CombineSink`."""
        self.combine_send(handle, output)

    def expect_dispatch(self, timeout_ns: int) -> None:
        """Note, before anything can fail, that this rank takes part in a dispatch next."""
        return

    def dispatch_forward(self, handle: DispatchHandle) -> None:
        """Send tokens of other hosts on to the ranks of this one; nothing on one host."""
        return

    def combine_forward(self, handle: DispatchHandle) -> None:
        """Send the sums of this host to the others; nothing on one host."""
        return

    def check_padded(self) -> None:
        """Raise `ValueError` where rows cannot be received as padded ones."""
        return

    def landed(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the landing slots of both halves, and their block scales, None for formats without.

        They stay as they are, so `ExpertParallelContext.landing_views` keeps them.
        """
        geometry, memory = self.geometry, self.memory
        has_scales = geometry.token_format.scale_dtype is not None
        with torch.inference_mode(False):
            views = landing_rows(memory, geometry), landing_scales(memory, geometry) if has_scales else None
        self.context.landing_views[self.exchange_id] = views
        return views


class RecvMemory:
    """The sizes of `RecvBuffers`, worked out once: steps only allocate."""

    def __init__(self, geometry: ExchangeGeometry, backend: ExchangeBackend, device: torch.device) -> None:
        fmt, capacity, hidden = geometry.token_format, geometry.row_capacity, geometry.hidden
        self._device, self._capacity, self._experts = device, capacity, geometry.num_local_experts
        self._positions = geometry.num_slots, geometry.top_k
        self._rows = (capacity, fmt.quant_bytes(hidden)) if geometry.contiguous else None
        self._has_row_scale = fmt.has_row_scale
        self._scales: tuple[int, ...] | None = None
        self._scale_dtype = torch.uint8 if fmt.swizzled else fmt.scale_dtype
        if fmt.swizzled:
            self._scales = geometry.scale_blocks, ceil_div(fmt.scale_columns(hidden), 4), 32, 4, 4
        elif fmt.scale_dtype is not None:
            self._scales = capacity, fmt.scale_columns(hidden)
        self._scratch = backend.scratch_words(geometry)

    def allocate(self, *, scales_in_record: bool) -> RecvBuffers:
        """Uninitialised buffers for a step."""
        device, empty, int32 = self._device, torch.empty, torch.int32
        scales = None
        if self._scales is not None and not scales_in_record:
            scales = empty(self._scales, dtype=self._scale_dtype, device=device)
        return RecvBuffers(
            empty(self._positions, dtype=int32, device=device),
            empty(self._experts + 1, dtype=int32, device=device),
            empty(self._experts, dtype=int32, device=device),
            empty(self._capacity, dtype=int32, device=device),
            None if self._rows is None else empty(self._rows, dtype=torch.uint8, device=device),
            scales,
            empty(self._capacity, dtype=torch.float32, device=device) if self._has_row_scale else None,
            empty(self._scratch, dtype=int32, device=device) if self._scratch else None,
        )


class LocalExchange(Exchange):
    """Ranks that store to each other's memory."""

    counts_waits = True

    def dispatch_send(self, handle: DispatchHandle, tokens: SentTokens) -> None:
        """See `Exchange`."""
        self.context.dispatches += 1
        self.backend.dispatch_send(
            self.memory,
            self.geometry,
            self.count_tag,
            self.starts,
            tokens,
            handle.epoch,
            handle.num_parts,
            handle.timeout_ns,
            handle._buffers,
        )

    def dispatch_recv(self, handle: DispatchHandle) -> None:
        """See `Exchange`."""
        buffers = handle._buffers
        assert buffers is not None
        step = handle.epoch, handle.timeout_ns, buffers
        self.backend.dispatch_recv(self.memory, self.geometry, self.count_tag, *step, waits=self.waits)

    def dispatch_recv_padded(
        self, handle: DispatchHandle, out: PaddedRows, scales_at: int, statistics: torch.Tensor | None
    ) -> None:
        """See `Exchange`."""
        buffers = handle._buffers
        assert buffers is not None
        step = handle.epoch, handle.timeout_ns, buffers, out, scales_at, statistics
        self.backend.dispatch_recv_padded(self.memory, self.geometry, self.count_tag, *step)

    def combine_send(self, handle: DispatchHandle, output: torch.Tensor) -> None:
        """See `Exchange`."""
        if handle.num_rows is None:
            self._send_partials(handle, output, handle.positions)
            return
        # The routing of rows that an earlier dispatch brought has not been received.
        self.dispatch_forward(handle)
        if self.backend.can_await_tokens(self.memory):
            self._send_partials(handle, output, handle.positions, handle.timeout_ns, handle.received)
            return
        self.dispatch_recv(handle)
        self.context._raise_on_cpu()
        buffers = handle._buffers
        assert buffers is not None
        self._send_partials(handle, output, torch.where(buffers.positions >= 0, handle.positions, -1))

    def _send_partials(
        self,
        handle: DispatchHandle,
        output: torch.Tensor,
        positions: torch.Tensor,
        await_ns: int | None = None,
        received: torch.Tensor | None = None,
    ) -> None:
        self.backend.combine_send(
            self.memory,
            self.geometry,
            self.count_tag,
            self.starts,
            output,
            positions,
            handle.epoch,
            await_ns=await_ns,
            received=received,
        )

    def combine_recv(self, handle: DispatchHandle, shared: torch.Tensor | None) -> None:
        """See `Exchange`."""
        y, limit_ns = handle._output, handle.timeout_ns
        assert y is not None
        if handle.num_rows is not None:
            # `combine_send` may still wait for the routing of a rank that is gone, and is to name it first: peers that
            # wait for that rank too are late here.
            limit_ns += limit_ns // 4
        step = handle.epoch, handle.num_parts, shared, y, limit_ns
        self.backend.combine_recv(self.memory, self.geometry, *step, waits=self.waits)


class OneRankExchange(LocalExchange):
    """A rank without peers: few tokens are received as they are sent, and sums need not wait for anybody.

    `dispatch_recv` and `combine_recv` then launch nothing. Callers of the halves of combine get the kernels that wait:
    `combine_send` cannot know what `combine_recv` will add.
    """

    counts_waits = False
    takes_router_ids = True

    def __init__(
        self,
        context: ExpertParallelContext,
        geometry: ExchangeGeometry,
        exchange_id: int,
        backend: ExchangeBackend,
        kernels: OneRankKernels,
    ) -> None:
        super().__init__(context, geometry, exchange_id, backend)
        self._kernels = kernels
        self._receives_at_once = cache(partial(kernels.dispatches, geometry))

    def dispatch_send(self, handle: DispatchHandle, tokens: SentTokens) -> None:
        """See `Exchange`."""
        if not self._receives_at_once(handle.num_tokens):
            super().dispatch_send(handle, tokens)
            return
        context, buffers = self.context, handle._buffers
        assert buffers is not None
        context.dispatches += 1
        written = handle.epoch, handle.num_parts, buffers
        self._kernels.dispatch(self.memory, self.geometry, self.count_tag, tokens, *written)
        handle._received_in = context.dispatches

    def dispatch_recv(self, handle: DispatchHandle) -> None:
        """See `Exchange`. The kernel that waits finds a handle stale, and records it."""
        received_in = handle._received_in
        if received_in is None or self.context.dispatches - received_in >= 2:
            super().dispatch_recv(handle)

    def combine_at_once(
        self, handle: DispatchHandle, output: torch.Tensor, shared: torch.Tensor | None, order: LaunchOrder
    ) -> None:
        """See `Exchange`."""
        if handle.num_rows is not None:
            self.combine_send(handle, output)
            return
        y = handle._output
        assert y is not None
        step = output, handle.positions, handle.epoch, shared, y
        self._kernels.combine(self.memory, self.geometry, *step, order=order)
        handle._summed = True

    def combine_recv(self, handle: DispatchHandle, shared: torch.Tensor | None) -> None:
        """See `Exchange`."""
        if not handle._summed:
            super().combine_recv(handle, shared)


class StagedExchange(LocalExchange):
    """Ranks whose kernels store to staging, which `CollectiveTransport` carries to the peers."""

    counts_waits = False

    def dispatch_send(self, handle: DispatchHandle, tokens: SentTokens) -> None:
        """See `Exchange`."""
        super().dispatch_send(handle, tokens)
        context, geometry = self.context, self.geometry
        assert context.host_transport is not None
        context.host_transport.carry_dispatch(
            context,
            epoch=int(handle.epoch),
            exchange_id=self.exchange_id,
            num_tokens=handle.num_tokens,
            max_tokens=geometry.max_tokens,
            record_bytes=geometry.record.record_bytes,
            timeout_ns=handle.timeout_ns,
            landing_half=geometry.landing_half(context.half_bytes["landing"]),
        )

    def _send_partials(
        self,
        handle: DispatchHandle,
        output: torch.Tensor,
        positions: torch.Tensor,
        await_ns: int | None = None,
        received: torch.Tensor | None = None,
    ) -> None:
        super()._send_partials(handle, output, positions, await_ns, received)
        context, geometry, epoch = self.context, self.geometry, int(handle.epoch)
        assert context.host_transport is not None
        context.host_transport.carry_combine(
            context,
            epoch=epoch,
            exchange_id=self.exchange_id,
            max_tokens=geometry.max_tokens,
            parts=geometry.parts,
            row_bytes=geometry.partial_bytes,
            part_index=part_index(context, geometry, self.starts, positions, epoch),
            timeout_ns=handle.timeout_ns,
        )
