"""`MoELayer`: router, dispatch, experts and combine of one MoE layer, an `nn.Module` that spans a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_runtime.comm.errors import reason_of
from moe_runtime.context.peers import abort_peers, abort_peers_on_error, collective_step
from moe_runtime.context.threads import by_one_thread, is_capturing
from moe_runtime.dispatcher.arguments import check_shared, check_tokens, flat_shared, flat_tokens
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.gemm.grouped_rows import MAX_ROUTED_IDS
from moe_runtime.kernels.launch_order import IN_ORDER, ONLY_ROWS_PENDING, LaunchOrder
from moe_runtime.layer_parts import LayerParts
from moe_runtime.observation.phases import phase
from moe_runtime.placement.migration import move_experts
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.rebalance import Replacement, agree_on_replacement
from moe_runtime.resilience.layer_members import Holding
from moe_runtime.step import LayerStep
from moe_runtime.support.compiling import not_compiled
from moe_runtime.warming import WarmUpStep, warm_up_steps


class Stage(NamedTuple):
    """A part of a step.

    Attributes:
        phase: under which its time is taken; None for none.
        run: of a layer and its step.
    """

    phase: str | None
    run: Callable[[MoELayer, LayerStep], None]


class MoELayer(LayerParts):
    """One expert-parallel MoE layer, for inference.

    Every rank of the context's group makes the layer with an equal config. All ranks call the layers in the same order,
    each with its own tokens. `load_experts`, `from_checkpoint` or `from_yaml` set the weights of the experts. While one
    thread is in a call of a layer, calls of other threads to layers of the same context are refused. `torch.compile`
    leaves the steps as they are.

    `state_dict` has the router and the shared expert. The experts are this rank's alone, in the order of its kernels,
    and come from `load_checkpoint`, `load_experts` or `load_random`.

    `close()`, or the end of a `with`, closes a context that was made for the layer alone, and no other.

    Args:
        config: sizes, formats, router, activation.
        context: the group's memory and signals, shared by all layers of a group; None makes one for the default group
            (one rank where torch.distributed is not initialised; torchrun's ranks call `init_from_env` before).
        placement: which rank holds which experts, equal on all ranks; None is contiguous ids, each expert once.
        router: False for a layer whose callers always pass `topk_idx` and `topk_weights`: it keeps no router weights.
        router_ids: of a router that has chosen among more experts, elsewhere, where `topk_idx` has its ids: each of
            several ranks that hold the same tokens then computes the part of its own experts alone. Routes to other
            experts, and those whose weight is NaN, count as none. None where ids are those of the layer's experts.

    Attributes:
        placement: the present one; None as above.
        slots: the `SlotTable` of the placement; None without one.
        router: `moe_runtime.router.Router`; None where there is none.
        dispatchers: a `moe_runtime.dispatcher.token_dispatcher.TokenDispatcher` for each of `config.all_token_buckets`,
            ascending.
        dispatcher: the last of them, for steps of any size.
        experts: `moe_runtime.experts.Experts`, None until weights are loaded.
        shared_expert: `moe_runtime.shared_expert.SharedExpert`; None where the config has none.
        post_expert_norm: `moe_runtime.post_expert_norm.PostExpertNorm`; None where the config has none.
        times: set to a `PhaseTimes` to time each phase.
        counters: what `count_steps` made, None before.
        routes: what `record_routes` made, None before; set it to None to end recording.
        waits: what `count_waits` made, None before.
        layer_id: of the layer in its context, equal on all ranks.
    """

    def _make(self, placement: Placement | None, router: bool, router_ids: RouterIds | None) -> None:
        """All parts but the experts, and which stages a step has."""
        super()._make(placement, router, router_ids)
        absent = set() if self.context.hosts is not None else {"dispatch_forward", "combine_forward"}
        if self.shared_expert is None:
            absent.add("shared_expert")
        self._stages = tuple(stage for stage in self._STAGES if stage.phase not in absent)
        self._guard = collective_step(self.context)
        self._capturable = self.context.graph_safe
        if self.context.recovery is not None:
            self.context.recovery.add(self)

    @not_compiled
    @by_one_thread
    def forward(
        self,
        x: torch.Tensor,
        *,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        """Run the layer on this rank's tokens. Collective.

        Args:
            x: bf16 `[..., H]`, last dimension contiguous, at most `max_tokens_per_rank` tokens, 0 included.
            topk_idx, topk_weights: int32 or int64, and fp32, `[T, K]`: a router's answer for the flattened tokens
                (both or neither; without them the layer's own router is asked). -1 is unrouted. Ids are those of the
                layer's experts, or as `router_ids` says.
            shared: bf16, of the shape of `x`, last dimension contiguous: output of a shared expert, added first; only
                where the layer has no shared expert of its own.
            max_tokens: most tokens that any rank brings to this step; equal on all ranks. The step takes the smallest
                of `config.all_token_buckets` that holds them, which changes its time and no bit. None is
                `max_tokens_per_rank`; on a single rank, the tokens of `x`.

        Returns:
            bf16, the shape of `x`.

        Raises:
            ValueError: a wrong argument; the peers get `PeerAbortedError`.
            MoERuntimeError: what went wrong between ranks (see `ExpertParallelContext.check`). With a context of
                `on_failure="continue"` a rank that dies is no error: the step is run again without it, unless
                `ExpertsLostError` says that experts have died with it. A rank that the others did not wait for raises
                `RankRemovedError`.
        """
        recovery = self.context.recovery
        if recovery is None or is_capturing(self.context.device):
            return self._forward(x, topk_idx, topk_weights, shared, max_tokens)

        def step() -> torch.Tensor:
            with self._counted_once():
                y = self._forward(x, topk_idx, topk_weights, shared, max_tokens)
                if self.context.device.type == "cuda":
                    self.context.check_peers()  # Only a step that has ended can be told from one to be repeated.
            return y

        def again() -> Callable[[], torch.Tensor]:
            idx_again, weights_again = (None if t is None else t.clone() for t in (topk_idx, topk_weights))
            kept = x.clone(), idx_again, weights_again, None, max_tokens

            def for_others() -> torch.Tensor:
                with self._unobserved():
                    return self._forward(*kept)

            return for_others

        return recovery.run(step, again)

    if TYPE_CHECKING:  # that of nn.Module takes and gives Any
        __call__ = forward

    def _forward(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        shared: torch.Tensor | None,
        max_tokens: int | None,
    ) -> torch.Tensor:
        """One try of `forward`."""
        step = self._route(x, topk_idx, topk_weights, shared, max_tokens)
        self._run(step, self._stages)
        return step.y

    def _run(self, step: LayerStep, stages: Iterable[Stage]) -> None:
        """Run `stages` of a step. An error in one aborts the peers, which wait for the next ones."""
        try:
            if self.times is None and not torch.autograd._profiler_enabled():
                for stage in stages:
                    stage.run(self, step)
                return
            for stage in stages:
                with nullcontext() if stage.phase is None else phase(stage.phase, self.times):
                    stage.run(self, step)
        except BaseException as error:
            abort_peers(self.context, error)
            raise

    def _route(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        max_tokens: int | None = None,
    ) -> LayerStep:
        """Begin a step: check the arguments of `forward`, and choose the experts of each token."""
        if not self._capturable:
            self.context._check_no_capture()
        with self._guard:
            if self.experts is None:
                raise ValueError("experts: no weights are loaded (load_experts, from_checkpoint or from_yaml)")
            geometry, device = self.dispatcher.geometry, self.context.device
            tokens_TH, shared_TH = flat_tokens(geometry, device, x), None
            if (topk_idx is None) != (topk_weights is None):
                raise ValueError("topk_idx: expected together with topk_weights")
            if shared is not None:
                if self.shared_expert is not None:
                    raise ValueError("shared: expected None, the layer has a shared expert of its own")
                shared_TH = flat_shared(geometry, device, shared, x.shape)
            if topk_idx is None or topk_weights is None:
                if self.router is None:
                    raise ValueError("topk_idx: expected a router's answer, the layer was made without a router")
                with phase("route", self.times):
                    topk_idx, topk_weights = self.router(tokens_TH)
            dispatcher = self._dispatcher_for(tokens_TH.shape[0], max_tokens)
            numbers = self.router_ids is not None and dispatcher.geometry.router_ids is None
            if numbers or self._members.lost is not None:
                # Others are checked where they are sent.
                check_tokens(dispatcher.geometry, device, tokens_TH, topk_idx, topk_weights)
            if self._members.lost is not None:
                topk_idx, topk_weights = self._members.without_lost(self._members.lost, topk_idx, topk_weights)
            slots = topk_idx if self.slots is None else self.slots(topk_idx, tokens_TH)
            if numbers:
                slots = self._numbered(topk_idx, topk_weights)
        return LayerStep(dispatcher, x.shape, tokens_TH, topk_idx, slots, topk_weights, shared_TH)

    def _dispatch_send(self, step: LayerStep) -> None:
        """Quantize this rank's tokens and send them to the ranks of their experts."""
        dispatcher, tokens = step.dispatcher, (step.tokens, step.slots, step.topk_weights)
        assert self.experts is not None
        keep = dispatcher._exchange.can_keep_scales_in_record and self.experts.reads_scales_in_record
        step.handle = dispatcher._dispatch_send(*tokens, dispatcher._begin_dispatch(), keep)

    def _run_shared_expert(self, step: LayerStep) -> None:
        """Run the shared expert on this rank's tokens while they travel."""
        if self.shared_expert is None:  # It can be taken away.
            return
        with torch.no_grad():
            step.shared = self.shared_expert(step.tokens)
        check_shared(step.dispatcher.geometry, self.context.device, step.shared, step.tokens.shape[0])

    def _dispatch_forward(self, step: LayerStep) -> None:
        """Between several hosts: send tokens of other hosts on to the ranks of this one."""
        step.dispatcher._exchange.dispatch_forward(step.handle)

    def _dispatch_recv(self, step: LayerStep) -> None:
        """Wait for the tokens of all ranks and group them by expert."""
        order, ids, weights = IN_ORDER, step.slots, step.topk_weights
        if step.handle._received_in is not None and ids.numel() <= MAX_ROUTED_IDS and ids.is_contiguous():
            router = step.dispatcher.geometry.router_ids
            if router is None:
                order = LaunchOrder(routed_ids=ids)
            elif weights.is_contiguous():
                order = LaunchOrder(routed_ids=ids, route_weights=weights, first_id=router.first)
        step.received = step.dispatcher._dispatch_recv(step.handle, order)

    def _run_experts(self, step: LayerStep) -> None:
        """Run this rank's experts on the rows that arrived."""
        assert self.experts is not None
        geometry = step.dispatcher.geometry
        shape = geometry.row_capacity, geometry.output_hidden
        step.output = torch.empty(shape, dtype=torch.bfloat16, device=self.context.device)
        self.experts._run(step.received, step.output)

    def _combine_send(self, step: LayerStep) -> None:
        """Weight and sum this rank's rows of each token, and send the sums to the token's rank."""
        order = IN_ORDER if step.handle._received_in is None else ONLY_ROWS_PENDING
        step.dispatcher._combine_send(step.output, step.handle, step.shared, order)

    def _combine_forward(self, step: LayerStep) -> None:
        """Between several hosts: send the sums of this host to the others."""
        step.dispatcher._exchange.combine_forward(step.handle)

    def _combine_recv(self, step: LayerStep) -> None:
        """Wait for the results of all ranks and sum them: bf16, the shape of `x`."""
        y_TH = step.dispatcher._combine_recv(step.handle, step.shared)
        step.y = y_TH if len(step.shape) == 2 else y_TH.view(step.shape)

    _STAGES = (
        Stage("dispatch_send", _dispatch_send),
        Stage("shared_expert", _run_shared_expert),
        Stage("dispatch_forward", _dispatch_forward),
        Stage("dispatch_recv", _dispatch_recv),
        Stage("experts", _run_experts),
        Stage("combine_send", _combine_send),
        Stage(None, LayerParts._observe),
        Stage("combine_forward", _combine_forward),
        Stage("combine_recv", _combine_recv),
    )
    """The order of a step, after `_route`. Where one process has several ranks, all run a stage before the next one."""

    def _dispatcher_for(self, num_tokens: int, max_tokens: int | None) -> TokenDispatcher:
        """That of the smallest token bucket for a step in which no rank has more than `max_tokens`."""
        limit = self.config.max_tokens_per_rank
        if max_tokens is None:
            # What is too much for any size is refused by the dispatcher.
            max_tokens = min(num_tokens, limit) if self.context.world_size == 1 else limit
        elif isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not num_tokens <= max_tokens <= limit:
            raise ValueError(
                f"max_tokens: expected None or from {num_tokens}, the tokens of x, to max_tokens_per_rank = {limit}, "
                f"got {max_tokens!r}"
            )
        for size, dispatcher in self.dispatchers.items():
            if size >= max_tokens:
                return dispatcher
        raise AssertionError("the last dispatcher takes all tokens")

    @property
    def scales_in_record(self) -> bool:
        """Whether steps leave the block scales of tokens in the records that arrive; the experts read them there."""
        keeps = self.dispatcher.can_keep_scales_in_record
        return keeps and self.experts is not None and self.experts.reads_scales_in_record

    @by_one_thread
    @torch.inference_mode()  # weights that were loaded in this mode may not be changed outside it
    def replace_experts(self, placement: Placement) -> None:
        """Go over to another placement between two steps: experts move to their new slots, in place. Collective.

        Every rank calls it with an equal placement, at the same point of its steps and on their stream, with no step
        under way. Weights and the table of slots keep their addresses: a graph captured before goes on with the new
        placement. Meanwhile a rank holds at most one expert more than its own, and over several hosts two chunks of
        16 MiB. Between hosts an expert travels once to each host that gets it and has not had it.

        Args:
            placement: with as many experts, ranks and slots; `Placement.reordered_like` saves moves.

        Raises:
            ValueError: on every rank where ranks disagree; on the rank itself where its argument is wrong, while the
                others get `PeerAbortedError`. Nothing has moved then, and the layer may be used as before.
            MoERuntimeError: a rank failed meanwhile, which ends the group as in a step.
        """
        replacement = self._agree_on_replacement(placement)
        with self._replacing(placement):
            move_experts([replacement.mover], replacement.plan)

    def _agree_on_replacement(self, placement: Placement) -> Replacement:
        self.context._check_joined()
        if self._members.lost is not None:
            raise ValueError("placement: experts that died are still loaded again; replace experts later")
        if self.placement is not None and not self._members.began_placed:
            raise ValueError("placement: the layer was made without one; give it Placement.contiguous(...) or another")
        return agree_on_replacement(self.context, self.layer_id, self.placement, self.experts, placement)

    @contextmanager
    def _replacing(self, placement: Placement) -> Iterator[None]:
        """Around the moves to `placement`: no step can run inside, nor after an error, which ends the group."""
        experts, self.experts = self.experts, None
        try:
            yield
            assert self.slots is not None
            self.slots.update(placement)
            self.placement, self.experts = placement, experts
            self._members.placement = placement
        except BaseException as error:
            self.context.abort(reason_of(error))
            raise

    @by_one_thread
    def warm_up(self) -> None:
        """Run steps of every token bucket that route no token, so that later ones compile and load no kernel.

        Collective. For a server before its first request, and before a graph is captured: without it the first step of
        each bucket compiles what it launches. With weights loaded, and no step under way. Later steps give the same
        bits as without it, and wait for peers no longer than `timeout_s`. Nothing of it is counted or timed. Waits for
        the device.

        Raises as a step does. With a context of `on_failure="continue"` ranks go on after a death in it, too.
        """
        recovery = self.context.recovery
        with abort_peers_on_error(self.context), torch.no_grad():
            if recovery is None:
                with self._unobserved():
                    for arguments in self._warm_up_steps():
                        self._forward(*arguments)
                self.context.check_peers()
                return
            for arguments in self._warm_up_steps():
                recovery.run(partial(self._unobserved_step, arguments), counted=False)
            self.context.check()

    def _unobserved_step(self, arguments: WarmUpStep) -> None:
        """A step of a warm-up that may be run again. Ranks go over to others between two such steps."""
        with self._unobserved():
            self._forward(*arguments)
            if self.context.device.type == "cuda":
                self.context.check_peers()

    def _warm_up_steps(self) -> Iterator[WarmUpStep]:
        """The arguments of each step of a warm-up, after the router has run on its token."""
        for step in warm_up_steps(self.config, self.context.device, takes_shared=self.shared_expert is None):
            if self.router is not None:
                self.router(step.x)
            yield step

    @property
    def without_expert(self) -> tuple[int, int]:
        """How many choices of this rank's tokens went to no expert, since it had died, and how many tokens had such.

        Waits for the device.
        """
        return self._members.without_expert

    def _check_loaded(self) -> None:
        """As `Recovery` calls it."""
        if self.experts is None:
            raise ValueError(f"experts: no weights of layer {self.layer_id} are loaded; load them as the others did")

    def _follow_members(self, members: tuple[int, ...], before: dict[int, list[int]] | None) -> None:
        """As `Recovery` calls it: go over to other ranks, those that are left, or with some that have come back."""
        self.context._old_graphs.keep(self.dispatchers, self.slots)
        now = self._members.follow(members, before, Holding(self.placement, self.slots, self.experts))
        self.placement, self.slots, self.experts = now.placement, now.slots, now.experts
        old = self.dispatchers
        with torch.inference_mode(False):
            self.dispatchers = self._made_dispatchers()
        for size, dispatcher in self.dispatchers.items():
            dispatcher._took_steps_as(old[size])
        self.dispatcher = self.dispatchers[self.config.max_tokens_per_rank]
        self._observe_new_dispatchers()
