"""Dispatch and combine of a layer whose ranks are on several hosts: what happens before and after those of one host."""

from __future__ import annotations

import torch

from moe_runtime.comm.errors import MoERuntimeError, Phase
from moe_runtime.comm.host_link import Exchange
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import exchange_failed
from moe_runtime.dispatcher.handle import HostStep
from moe_runtime.kernels.exchange import hierarchical, hierarchical_cuda
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.hierarchical import HostGeometry, LinkMemory
from moe_runtime.kernels.exchange.plan import exchange_engine


class HostExchange:
    """The parts of a step between hosts. One dispatch and one combine of a context may be under way at a time.

    Args:
        context: with a link.
        flat: of the layer, as all ranks would exchange on one host.
        count_tag: of the exchange, as for `ExchangeBackend`.
        capacity: most tokens of a rank for one host; None for all.

    Raises:
        ValueError: on GPUs, where the kernels do not run, or do not take these sizes.
    """

    def __init__(
        self, context: ExpertParallelContext, flat: ExchangeGeometry, count_tag: int, capacity: int | None = None
    ) -> None:
        assert context.hosts is not None and context.link_buffers is not None and context.link is not None
        self._count_tag = count_tag
        self.context, self._link, self._buffers = context, context.link, context.link_buffers
        self.geometry = geometry = HostGeometry(context.hosts, flat, hierarchical.PART_TOKENS, capacity)
        kernels, why_not = exchange_engine(context.engine, context.device, geometry.local)
        if kernels == "torch" and context.device.type == "cuda" and context.engine != "torch":
            raise ValueError(f"transport: hierarchical cannot run here, {why_not}; ask for collective")
        self._buffers.grow(**geometry.chunk_bytes)
        self._parts = hierarchical_cuda if kernels == "cuda" else hierarchical
        self._memory: LinkMemory | None = None

    @property
    def _link_memory(self) -> LinkMemory:
        if self._memory is None:
            geometry, device = self.geometry, self.context.device
            self._memory = LinkMemory(
                torch.tensor(geometry.local.starts, dtype=torch.int32, device=device),
                torch.tensor(geometry.host_starts, dtype=torch.int32, device=device),
                *self._buffers.chunks("dispatch", geometry.dispatch_chunk),
                *self._buffers.chunks("combine", geometry.combine_chunk),
                self._buffers.chunks("staging", geometry.staging_chunk)[0],
                self._buffers.words,
                self._count_tag,
            )
        return self._memory

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        gsf: torch.Tensor | None,
        handle_epoch: torch.Tensor,
        num_hosts: torch.Tensor,
        timeout_ns: int,
    ) -> HostStep:
        """Build records, start to send them, and send this rank's own tokens to the ranks of this host.

        `ExchangeBackend.dispatch_send` has the arguments.
        """
        self._take("dispatch", "dispatch_forward or dispatch_recv")
        link = self._link_memory
        tokens = x, topk_idx, topk_weights, gsf, num_hosts
        slots = self._parts.pack(self.context.memory, self.geometry, link, *tokens)
        num_parts = torch.empty(self.geometry.local.max_tokens, dtype=torch.int32, device=x.device)
        step = HostStep(num_parts, slots, timeout_ns)
        for part in range(len(self.geometry.parts)):
            step.exchanges.append(self._start("dispatch", part, timeout_ns))
        self.expect("combine", timeout_ns)
        self._forward(step, handle_epoch, None)
        return step

    def forward(self, step: HostStep, handle_epoch: torch.Tensor) -> None:
        """Await the records and send them to the ranks of this host, part by part."""
        step.forwarded = True
        for part in range(len(self.geometry.parts)):
            self._wait(step, Phase.DISPATCH_SEND)
            self._forward(step, handle_epoch, part)
        self._buffers.under_way.discard("dispatch")

    def _forward(self, step: HostStep, handle_epoch: torch.Tensor, part: int | None) -> None:
        memory, link = self.context.memory, self._link_memory
        self._parts.forward(memory, self.geometry, link, handle_epoch, step.num_parts, step.timeout_ns, part)

    def relay(self, step: HostStep, handle_epoch: torch.Tensor) -> None:
        """Sum what the ranks of this host have computed and start to send the sums home."""
        self._take("combine", "combine_recv")
        step.relayed = True
        memory, link = self.context.memory, self._link_memory
        counts = handle_epoch, step.num_parts, step.timeout_ns
        for part in range(len(self.geometry.parts)):
            self._parts.relay(memory, self.geometry, link, *counts, part)
            step.exchanges.append(self._start("combine", part, step.timeout_ns))
        # Of this layer or of another one: then peers learn of a failure by the end of the connection.
        self.expect("dispatch", step.timeout_ns)
        self._parts.relay(memory, self.geometry, link, *counts, None)

    def total(self, step: HostStep, shared: torch.Tensor | None, y: torch.Tensor) -> None:
        """Await the sums of all hosts and sum them into `y`, part by part."""
        for part in range(len(self.geometry.parts)):
            self._wait(step, Phase.COMBINE_RECV)
            self._parts.total(self.context.memory, self.geometry, self._link_memory, shared, y, step.slots, part)
        self._buffers.under_way.discard("combine")

    def expect(self, kind: str, limit_ns: int) -> None:
        """What this rank takes part in next: if it fails before, it says so there."""

        def say_failed() -> None:
            # Peers whose kernels run ahead of their host go on to the end of the step.
            for of in ("dispatch", "combine") if kind == "dispatch" else ("combine",):
                self._parts.say_failed(self.context.memory, self.geometry, self._link_memory, of)
                for part in range(len(self.geometry.parts)):
                    self._link.post(*self._chunks(of, part), limit_ns * 1e-9)

        self.context.say_failed = say_failed

    def _take(self, kind: str, first: str) -> None:
        """Take the memory of an exchange of `kind`. Raises `ValueError` where what came last has not been read."""
        if kind in self._buffers.under_way:
            raise ValueError(f"handle: over several hosts {first} of the step before comes first")
        self._buffers.under_way.add(kind)

    def _chunks(self, kind: str, part: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Phase, int]:
        """What `HostLink.start` takes for `part` of an exchange of `kind`."""
        link, geometry = self._link_memory, self.geometry
        if kind == "dispatch":
            phase, piece = Phase.DISPATCH_SEND, geometry.dispatch_part(part)
            buffers = link.records_out, link.records_in
        else:
            phase, piece = Phase.COMBINE_SEND, geometry.combine_part(part)
            buffers = link.sums_out, link.sums_in
        outgoing, incoming = ([chunk[piece] for chunk in buffer] for buffer in buffers)
        return outgoing, incoming, phase, part

    def _start(self, kind: str, part: int, timeout_ns: int) -> Exchange:
        self.context.say_failed = None
        chunks = self._chunks(kind, part)
        try:
            return self._link.start(*chunks, timeout_ns * 1e-9)
        except MoERuntimeError as error:
            raise exchange_failed(self.context, error, chunks[2], timeout_ns * 1e-9) from error

    def _wait(self, step: HostStep, phase: Phase) -> None:
        try:
            step.exchanges.pop(0).wait()
        except MoERuntimeError as error:
            raise exchange_failed(self.context, error, phase, step.timeout_ns * 1e-9) from error
