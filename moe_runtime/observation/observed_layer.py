"""What a layer tells of its steps: the time of each phase, counts, waits for peers, and the routes of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.exchange.local_ids import local_ids
from moe_runtime.kernels.exchange.plan import exchange_engine
from moe_runtime.observation.counters import LayerCounters
from moe_runtime.observation.phases import PhaseTimes
from moe_runtime.observation.polled import snapshot
from moe_runtime.observation.routes import RecordedRoutes
from moe_runtime.observation.waits import LayerWaits
from moe_runtime.step import LayerStep


class ObservedLayer(nn.Module):
    """A layer whose steps can be observed: the base of `MoELayer`, which says what each attribute is.

    Each step calls `_observe`.
    """

    config: MoELayerConfig
    context: ExpertParallelContext
    dispatchers: dict[int, TokenDispatcher]
    dispatcher: TokenDispatcher
    router_ids: RouterIds | None

    def __init__(self) -> None:
        super().__init__()
        self.times: PhaseTimes | None = None
        self.counters: LayerCounters | None = None
        self.routes: RecordedRoutes | None = None
        self.waits: LayerWaits | None = None

    def count_steps(self) -> LayerCounters:
        """Count tokens, rows and bytes of each step from now on; what to `poll`, kept in `counters` too.

        A step that is run again after the death of a rank counts once. A step that was captured in a graph before is
        replayed uncounted.
        """
        if self.counters is None:
            geometry, context = self.dispatcher.geometry, self.context
            experts = self.config.num_experts
            self.counters = LayerCounters(geometry, experts, context.device, context.engine, context.hosts)
        return self.counters

    def count_waits(self) -> LayerWaits:
        """Count how long dispatch and combine wait for each peer from now on; what to `poll`, kept in `waits` too.

        It takes kernels of its own, so call it before `warm_up`; a step that was captured in a graph before is replayed
        uncounted. Kernels that wait have one block more, besides those that `num_sms` allows. It changes no bit, and
        ranks may differ in it. After the death of a rank it counts from zero. A rank alone waits for nobody.

        Raises `ValueError` over several hosts, and with the transport `collective`, where nothing is waited for by
        peer.
        """
        if self.waits is None:
            self.waits = LayerWaits(self.context, self.dispatchers)
        return self.waits

    def record_routes(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> RecordedRoutes:
        """Record the experts of each token of each step from now on into a ring of steps; what to `read`, kept in
        `routes` too.

        A step that was captured in a graph before is replayed unrecorded. Ids are those of experts, whatever the
        placement, as `forward` takes them. Warm-up steps are not recorded, and a step that is run again after the death
        of a rank is recorded once.

        Args:
            ids: int16 or int32 `[S, M, K]` on the device of the layer, contiguous, for `S` steps of up to
                `M >= max_tokens_per_rank` tokens. Keep it, and what this returns, as long as graphs that were captured
                since may be replayed.
            weights: fp32 of the same shape for the weights of these experts; None to record ids alone.

        Raises:
            ValueError: a tensor that is too small, or of another dtype, shape or device; it is named.
        """
        config, context = self.config, self.context
        engine, _ = exchange_engine(context.engine, context.device, self.dispatcher.geometry)
        self.routes = RecordedRoutes(
            ids,
            weights,
            max_tokens=config.max_tokens_per_rank,
            top_k=config.top_k,
            num_experts=config.num_experts if self.router_ids is None else self.router_ids.num_experts,
            device=context.device,
            engine=engine,
        )
        return self.routes

    def _observe(self, step: LayerStep) -> None:
        """Count the step and record its routes, if that was asked for: now, while results travel."""
        if self.counters is not None:
            ids, slots = step.topk_idx, step.slots
            if self.router_ids is not None:
                ids = slots = self._numbered(ids, step.topk_weights) if slots is ids else slots
            self.counters.add(ids, slots, step.handle.num_parts, step.received.group_offsets)
        if self.routes is not None:
            # Ids were there before the dispatch. Kernels of combine let the next one begin after their wait, and the
            # one that counts, when it has ended.
            self.routes.add(step.topk_idx, step.topk_weights, settled=True)

    def _numbered(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Ids of `router_ids`, which have been checked, as numbers of the layer's experts."""
        assert self.router_ids is not None
        sizes = self.router_ids.num_experts, self.router_ids.first, self.config.num_experts
        return local_ids(topk_idx.contiguous(), topk_weights.contiguous(), *sizes, self.context.engine)

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Steps inside launch the kernel that counts, but change no counts or times that the caller sees."""
        observed = self.counters, self.times
        self.counters = self.times = None
        restore = snapshot(*([] if self.waits is None else [self.waits.words]), *self._counts_of_lost())
        try:
            self.count_steps()
            with self._unrecorded():
                yield
        finally:
            restore()
            self.counters, self.times = observed

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Routes of steps inside are not recorded."""
        routes, self.routes = self.routes, None
        try:
            yield
        finally:
            self.routes = routes

    @contextmanager
    def _counted_once(self) -> Iterator[None]:
        """A step inside that fails leaves no counts and no routes: it is run again."""
        words = [one.words for one in (self.counters, self.routes) if one is not None]
        restore = snapshot(*words, *self._counts_of_lost())
        try:
            yield
        except BaseException:
            restore()
            raise

    def _counts_of_lost(self) -> list[torch.Tensor]:
        """What a step counts that does without experts which have died; none where no expert has."""
        return []

    def _observe_new_dispatchers(self) -> None:
        """After the death or the return of a rank: counts of steps stay, and waits are counted from zero."""
        if self.counters is not None:
            self.counters._follow(self.dispatcher.geometry)
        if self.waits is not None:
            self.waits._begin(self.dispatchers)
