"""Dispatch and combine over several hosts: what happens before and after the exchange within a host."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_runtime.comm.errors import MoERuntimeError, Phase
from moe_runtime.comm.host_link import Exchange as LinkExchange
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import exchange_failed
from moe_runtime.dispatcher.exchange import LocalExchange
from moe_runtime.dispatcher.handle import DispatchHandle
from moe_runtime.kernels.exchange import hierarchical, hierarchical_cuda
from moe_runtime.kernels.exchange.hierarchical import HostGeometry, LinkMemory
from moe_runtime.kernels.exchange.interface import ExchangeBackend, SentTokens
from moe_runtime.kernels.exchange.plan import exchange_engine


@dataclass
class HostStep:
    """What a step between hosts keeps from one part to the next.

    Attributes:
        num_parts: int32 `[H (T + 1)]`, ranks of this host that each token of the rail goes to.
        slots: int32 `[H, T]`, slot of each token in the chunk of each host, -1 for none; None where that is the token.
        exchanges: under way, in their order; what has been awaited is gone.
        forwarded, relayed: which parts have run.
    """

    num_parts: torch.Tensor
    slots: torch.Tensor | None
    exchanges: list[LinkExchange] = field(default_factory=list)
    forwarded: bool = False
    relayed: bool = False


class HierarchicalExchange(LocalExchange):
    """Ranks on several hosts. One dispatch and one combine of a context may be under way at a time.

    Between the parts that go from host to host, the ranks of a host exchange as a `LocalExchange`.

    Args:
        context: with a link.
        host_geometry: of the layer.
        exchange_id: number of the exchange in its context.
        backend: the kernels among the ranks of a host.

    Raises:
        ValueError: on GPUs, where the kernels do not run, or do not take these sizes.
    """

    counts_waits = False

    def __init__(
        self,
        context: ExpertParallelContext,
        host_geometry: HostGeometry,
        exchange_id: int,
        backend: ExchangeBackend,
    ) -> None:
        assert context.link_buffers is not None and context.link is not None
        kernels, why_not = exchange_engine(context.engine, context.device, host_geometry.local)
        if kernels == "cuda":
            kernels, why_not = exchange_engine(context.engine, context.device, host_geometry.between_hosts)
        if kernels == "torch" and context.device.type == "cuda" and context.engine != "torch":
            raise ValueError(f"transport: hierarchical cannot run here, {why_not}; ask for collective")
        super().__init__(context, host_geometry.local, exchange_id, backend)
        self._link, self._link_buffers = context.link, context.link_buffers
        self.host_geometry = host_geometry
        self._link_buffers.grow(**host_geometry.chunk_bytes)
        parts = range(len(host_geometry.parts))
        pieces = [of(part) for of in (host_geometry.dispatch_part, host_geometry.combine_part) for part in parts]
        self._link.make_room(max(piece.stop - piece.start for piece in pieces))
        self._parts = hierarchical_cuda if kernels == "cuda" else hierarchical
        self._chunk_memory: LinkMemory | None = None

    @property
    def _link_memory(self) -> LinkMemory:
        if self._chunk_memory is None:
            geometry, device = self.host_geometry, self.context.device
            self._chunk_memory = LinkMemory(
                self.starts,
                torch.tensor(geometry.host_starts, dtype=torch.int32, device=device),
                *self._link_buffers.chunks("dispatch", geometry.dispatch_chunk),
                *self._link_buffers.chunks("combine", geometry.combine_chunk),
                self._link_buffers.chunks("staging", geometry.staging_chunk)[0],
                self._link_buffers.words,
                self.count_tag,
            )
        return self._chunk_memory

    def expect_dispatch(self, timeout_ns: int) -> None:
        """See `Exchange`."""
        self._expect("dispatch", timeout_ns)

    def dispatch_send(self, handle: DispatchHandle, tokens: SentTokens) -> None:
        """Build records, start to send them, and send this rank's own tokens to the ranks of this host."""
        self._take("dispatch", "dispatch_recv")
        self.memory = self.context.memory
        slots = self._parts.pack(self.memory, self.host_geometry, self._link_memory, tokens, handle.num_parts)
        num_parts = torch.empty(self.geometry.max_tokens, dtype=torch.int32, device=self.context.device)
        handle._kept = step = HostStep(num_parts, slots)
        for part in range(len(self.host_geometry.parts)):
            step.exchanges.append(self._start("dispatch", part, handle.timeout_ns))
        self._expect("combine", handle.timeout_ns)
        self._forward(handle, None)

    def dispatch_forward(self, handle: DispatchHandle) -> None:
        """Await the records and send them to the ranks of this host, part by part."""
        step: HostStep = handle._kept
        if step.forwarded:
            return
        step.forwarded = True
        for part in range(len(self.host_geometry.parts)):
            self._wait(handle, Phase.DISPATCH_SEND)
            self._forward(handle, part)
        self._link_buffers.under_way.discard("dispatch")

    def _forward(self, handle: DispatchHandle, part: int | None) -> None:
        step: HostStep = handle._kept
        sent = handle.epoch, step.num_parts, handle.timeout_ns
        self._parts.forward(self.memory, self.host_geometry, self._link_memory, *sent, part)

    def dispatch_recv(self, handle: DispatchHandle) -> None:
        """See `Exchange`."""
        self.dispatch_forward(handle)
        super().dispatch_recv(handle)

    def check_padded(self) -> None:
        """Refuse."""
        raise ValueError("out: padded rows are for ranks of one host, or for transport='collective'")

    def combine_forward(self, handle: DispatchHandle) -> None:
        """Sum what the ranks of this host have computed and start to send the sums home."""
        step: HostStep = handle._kept
        if step.relayed:
            return
        self._take("combine", "combine_recv")
        step.relayed = True
        link, counts = self._link_memory, (handle.epoch, step.num_parts, handle.timeout_ns)
        for part in range(len(self.host_geometry.parts)):
            self._parts.relay(self.memory, self.host_geometry, link, *counts, part)
            step.exchanges.append(self._start("combine", part, handle.timeout_ns))
        # Of this layer or of another one: then peers learn of a failure by the end of the connection.
        self._expect("dispatch", handle.timeout_ns)
        self._parts.relay(self.memory, self.host_geometry, link, *counts, None)

    def combine_recv(self, handle: DispatchHandle, shared: torch.Tensor | None) -> None:
        """Await the sums of all hosts and add them up, part by part."""
        self.combine_forward(handle)
        step: HostStep = handle._kept
        assert handle._output is not None
        for part in range(len(self.host_geometry.parts)):
            self._wait(handle, Phase.COMBINE_RECV)
            sums = shared, handle._output, step.slots, part
            self._parts.total(self.memory, self.host_geometry, self._link_memory, *sums)
        self._link_buffers.under_way.discard("combine")

    def _expect(self, kind: str, limit_ns: int) -> None:
        """What this rank takes part in next: if it fails before, it says so there."""

        def say_failed() -> None:
            # Peers whose kernels run ahead of their host go on to the end of the step.
            for of in ("dispatch", "combine") if kind == "dispatch" else ("combine",):
                self._parts.say_failed(self.context.memory, self.host_geometry, self._link_memory, of)
                for part in range(len(self.host_geometry.parts)):
                    self._link.post(*self._chunks(of, part), limit_ns * 1e-9)

        self.context.say_failed = say_failed

    def _take(self, kind: str, first: str) -> None:
        """Take the memory of an exchange of `kind`. Raises `ValueError` where what came last has not been read."""
        if kind in self._link_buffers.under_way:
            raise ValueError(f"handle: over several hosts {first} of the step before comes first")
        self._link_buffers.under_way.add(kind)

    def _chunks(self, kind: str, part: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Phase, int]:
        """What `HostLink.start` takes for `part` of an exchange of `kind`."""
        link, geometry = self._link_memory, self.host_geometry
        if kind == "dispatch":
            phase, piece = Phase.DISPATCH_SEND, geometry.dispatch_part(part)
            buffers = link.records_out, link.records_in
        else:
            phase, piece = Phase.COMBINE_SEND, geometry.combine_part(part)
            buffers = link.sums_out, link.sums_in
        outgoing, incoming = ([chunk[piece] for chunk in buffer] for buffer in buffers)
        return outgoing, incoming, phase, part

    def _start(self, kind: str, part: int, timeout_ns: int) -> LinkExchange:
        self.context.say_failed = None
        chunks = self._chunks(kind, part)
        try:
            return self._link.start(*chunks, timeout_ns * 1e-9)
        except MoERuntimeError as error:
            raise exchange_failed(self.context, error, chunks[2], timeout_ns * 1e-9) from error

    def _wait(self, handle: DispatchHandle, phase: Phase) -> None:
        try:
            handle._kept.exchanges.pop(0).wait()
        except MoERuntimeError as error:
            raise exchange_failed(self.context, error, phase, handle.timeout_ns * 1e-9) from error
