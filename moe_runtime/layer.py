"""`MoELayer`: router, dispatch, experts and combine of one MoE layer, an `nn.Module` that spans a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.checkpoint import Checkpoint, opened
from moe_runtime.compiling import not_compiled
from moe_runtime.config import MoELayerConfig, ParallelConfig, RunConfig, load_config
from moe_runtime.context import ExpertParallelContext, by_one_thread
from moe_runtime.counters import LayerCounters
from moe_runtime.dispatcher import TokenDispatcher
from moe_runtime.experts import Experts, swiglu_of
from moe_runtime.formats import token_format
from moe_runtime.loading import FRESH, ExpertTensors, Rooms, quantize_experts
from moe_runtime.memory import staging_bytes
from moe_runtime.metrics import PhaseTimes, phase
from moe_runtime.peers import collective_step, told_to_peers
from moe_runtime.placement import Placement, placement_from_config
from moe_runtime.plan import expert_starts
from moe_runtime.progress import with_progress
from moe_runtime.replacement import replace_experts
from moe_runtime.router import Router
from moe_runtime.shared_expert import SharedExpert
from moe_runtime.slots import SlotTable
from moe_runtime.step import LayerStep, advance
from moe_runtime.warming import warm_up


class MoELayer(nn.Module):
    """One expert-parallel MoE layer, for inference.

    Every rank of the context's group makes the layer with an equal config and calls it in the same order, each with
    its own tokens. The experts' weights are set by `load_experts` (or by `from_checkpoint` and `from_yaml`). While one
    thread is in a call of it, or of another layer of its context, calls of other threads are refused. What
    `torch.compile` makes of a model leaves its steps as they are.

    `close()`, or the end of a `with`, closes a context that was made for the layer alone, and no other.

    Args:
        config: sizes, formats, router, activation.
        context: the group's memory and signals, shared by all layers of a group; None makes one for the default group
            (one rank where torch.distributed is not initialised; torchrun's ranks call `init_from_env` before).
        placement: which rank holds which experts, equal on all ranks; None is contiguous ids, each expert once.
        router: False for a layer whose every call brings a router's answer: no weights are kept for it.

    Attributes:
        placement: the present one; None as above.
        slots: the `SlotTable` of the placement; None without one.
        router: `moe_runtime.router.Router`; None where there is none.
        dispatchers: a `moe_runtime.dispatcher.TokenDispatcher` for each of `config.all_step_sizes`, ascending.
        dispatcher: the last of them, for steps of any size.
        experts: `moe_runtime.experts.Experts`, None until weights are loaded.
        shared_expert: `moe_runtime.shared_expert.SharedExpert`; None where the config has none.
        times: set to a `PhaseTimes` to time each phase.
        counters: what `count_steps` made, None before.
        number: tells layers of a context apart, equal on all ranks.
    """

    def __init__(
        self,
        config: MoELayerConfig,
        context: ExpertParallelContext | None = None,
        *,
        placement: Placement | None = None,
        router: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(config, MoELayerConfig):
            way = "; of a RunConfig it is `layer`" if hasattr(config, "layer") else ""
            raise ValueError(f"config: expected a MoELayerConfig, got {type(config).__name__}{way}")
        _check_context(context)
        self.config = config
        self.context = context if context is not None else ExpertParallelContext()
        self._owns_context = context is None
        device = self.context.device
        self.number = self.context.number_layer()
        self.placement = placement
        self.slots: SlotTable | None = None
        agree: dict[str, object] = {**config.flat()}
        if placement is not None:
            self._check_placement(placement)
            self.slots = SlotTable(placement, device)
            agree["placement"] = placement.fingerprint
            if self.context.carrier is None:
                self.context.register(staging_bytes=staging_bytes(config, self.context.world_size))
        self.router: Router | None = None
        if router:
            sizes = (config.hidden_size, config.num_experts, config.top_k)
            self.router = Router(*sizes, config.router, device, engine=self.context.engine)
        num_slots = None if placement is None else placement.num_slots
        self.dispatchers = TokenDispatcher.of_all_sizes(self.context, config, num_slots=num_slots)
        self.context.register(agree=agree, about=f"layer {self.number}")
        self.dispatcher = self.dispatchers[config.max_tokens_per_rank]
        self.experts: Experts | None = None
        self.shared_expert: SharedExpert | None = None
        if config.shared_expert is not None:
            self.shared_expert = SharedExpert(config.hidden_size, config.shared_expert, device)
        self.times: PhaseTimes | None = None
        self.counters: LayerCounters | None = None

    @classmethod
    def from_yaml(cls, path: str | Path, *, context: ExpertParallelContext | None = None) -> MoELayer:
        """The layer of a YAML file (or of a packaged config's bare name), with its weights.

        Weights come from the file's `checkpoint`, else at random from its `seed`, the same for any number of ranks.
        Without a `context` one is made from the file's `parallel` section.
        """
        return cls.from_run_config(load_config(path), context)

    @classmethod
    def from_run_config(cls, run: RunConfig, context: ExpertParallelContext | None = None) -> MoELayer:
        """The layer of a validated `RunConfig`, with its placement and weights.

        Formats that the file does not set are those of its checkpoint, if it has one. Without a `context` one is made
        from the section `parallel`.

        Raises:
            ValueError: as `from_checkpoint`, also where the config contradicts the checkpoint; the peers get
                `PeerAbortedError`.
        """
        if not isinstance(run, RunConfig):
            raise ValueError(f"run: expected a RunConfig, got {type(run).__name__}")
        _check_context(context)
        if context is None:
            return cls._over_own(context_from_config(run.parallel), partial(cls.from_run_config, run))
        with told_to_peers(context):
            placement = None
            if run.placement is not None:
                placement = placement_from_config(run.placement, run.layer.num_experts, context.world_size)
            if run.checkpoint is None:
                layer = cls(run.layer, context, placement=placement)
                layer.load_random(run.seed)
                return layer
            asked = run.layer.model_fields_set
            given = run.layer.model_dump()
            given |= {name: None for name in ("token_format", "weight_format") if name not in asked}
            return cls._of_checkpoint(run.checkpoint.path, run.checkpoint.layer, context, placement, given)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        layer: int = 0,
        context: ExpertParallelContext | None = None,
        placement: Placement | None = None,
        **overrides: object,
    ) -> MoELayer:
        """Layer `layer` of a safetensors checkpoint of a family in `moe_runtime.families`.

        Sizes, router and activation come from the `config.json` beside the weights, and so do the formats of tokens and
        weights where they are not asked for (`moe_runtime.checkpoint.choose_formats`): weights that are stored in the
        format of the layer are taken as they are, others are converted, one by one. `overrides` set other fields of
        `MoELayerConfig`, at least `max_tokens_per_rank`. Each rank reads only its own experts; that all ranks read the
        same checkpoint is compared with their configs, before the first step.

        NVFP4 tokens have a scale each, whatever `input_scale` the checkpoint has for them; that of the down projections
        becomes `intermediate_gsf`.

        Raises:
            ValueError: naming the file and the tensor that is missing or wrong; the peers get `PeerAbortedError`.
        """
        _check_context(context)

        def make(context: ExpertParallelContext) -> MoELayer:
            with told_to_peers(context):
                return cls._of_checkpoint(path, layer, context, placement, overrides)

        return make(context) if context is not None else cls._over_own(ExpertParallelContext(), make)

    @classmethod
    def _over_own(cls, own: ExpertParallelContext, make: Callable[[ExpertParallelContext], MoELayer]) -> MoELayer:
        """The layer that `make` makes over a context that is for it alone, and closed with it."""
        try:
            layer = make(own)
        except BaseException:
            own.close()
            raise
        layer._owns_context = True
        return layer

    @classmethod
    def _of_checkpoint(
        cls,
        path: str | Path,
        layer: int,
        context: ExpertParallelContext,
        placement: Placement | None,
        overrides: dict[str, Any],
    ) -> MoELayer:
        with Checkpoint(path) as checkpoint:
            made = cls(checkpoint.layer_config(layer, **overrides), context, placement=placement)
            made.load_checkpoint(checkpoint, layer)
            return made

    @property
    def local_experts(self) -> Sequence[int]:
        """Ids of this rank's experts, in the order in which they are loaded."""
        if self.placement is not None:
            return self.placement.rank_experts(self.context.rank)
        starts = expert_starts(self.config.num_experts, self.context.world_size)
        return range(starts[self.context.rank], starts[self.context.rank + 1])

    def load_checkpoint(
        self, checkpoint: Checkpoint | str | Path, layer: int, *, shared_elsewhere: bool = False
    ) -> None:
        """Read router, shared expert and this rank's experts of decoder layer `layer`; on terminals with a bar.

        A `checkpoint` that is given as a path is opened for this and closed. A layer without a shared expert, for a
        checkpoint that has one, has to be told that the caller adds it (`shared_elsewhere`; see `shared` of `forward`).

        Raises `ValueError` as `Checkpoint` and `load_experts` do, and, naming the field, where the layer's config
        contradicts the checkpoint; the peers get `PeerAbortedError`. Formats may be others; a layer without a router
        may be of any `top_k`.
        """
        with told_to_peers(self.context), opened(checkpoint) as files:
            self._load_checkpoint(files, layer, shared_elsewhere)

    def _load_checkpoint(self, checkpoint: Checkpoint, layer: int, shared_elsewhere: bool) -> None:
        elsewhere = set() if self.router is not None else {"router", "top_k"}
        if shared_elsewhere and self.shared_expert is None:
            elsewhere.add("shared_expert")
        checkpoint.check_fits(self.config, but_for=elsewhere)
        if self.router is not None:
            router = checkpoint.router(layer)
            self.router.load(router.weight, bias=router.bias, correction_bias=router.correction_bias)
        shared = checkpoint.shared_expert(layer) if self.shared_expert is not None else None
        if self.shared_expert is not None and shared is not None:
            self.shared_expert.load(shared.gate_proj, shared.up_proj, shared.down_proj, shared.token_gate)
        count = len(self.local_experts)
        rooms = checkpoint.rooms(layer, self.config.weight_format, count, self.context.device)
        text = f"rank {self.context.rank}: layer {layer} of {checkpoint.folder.name}"
        # After an error too, its reader is done before anybody closes the files.
        with closing(checkpoint.experts(layer, self.local_experts, rooms)) as experts:
            self.load_experts(with_progress(experts, text, count, shown=self.context.rank == 0), rooms)
        self.context.register(agree=checkpoint.digests(layer), about=f"layer {self.number}")

    def load_random(self, seed: int) -> None:
        """Random weights from `seed`, of the sizes that keep activations near unit variance; equal on any `ep_size`.

        Experts are drawn on the layer's device: the numbers differ by kind of device.
        """
        hidden = self.config.hidden_size
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int) -> torch.Tensor:
            w_NK = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device=generator.device)
            return w_NK * columns**-0.5

        weight = normal(self.config.num_experts, hidden)
        if self.router is not None:
            self.router.weight.data.copy_(weight)
        device = self.context.device
        self.load_experts(random_expert(self.config, seed, expert, device) for expert in self.local_experts)
        if self.shared_expert is not None:
            for parameter in self.shared_expert.parameters():
                parameter.data.copy_(normal(*parameter.shape))

    def load_experts(
        self, experts: Iterable[ExpertTensors | tuple[torch.Tensor, torch.Tensor]], rooms: Rooms = FRESH
    ) -> None:
        """Quantize this rank's experts, in order: for each, gate-and-up `[2I, H]` and down `[H, I]`, bf16 or fp32.

        Where the config says `expert_bias` each is an `ExpertTensors` with its biases; one may hold quantized weights.
        `rooms` is for readers. Raises `ValueError` as `moe_runtime.loading.quantize_experts`, and what `experts`
        raises; the peers get `PeerAbortedError`.
        """
        config = self.config
        with told_to_peers(self.context):
            gate_up, down = quantize_experts(experts, config, len(self.local_experts), self.context.device, rooms)
            experts_of_rank = Experts(
                gate_up,
                down,
                swiglu_of(config.activation),
                intermediate_format=token_format(config.token_format),
                intermediate_gsf=config.intermediate_gsf,
                engine=self.context.engine,
            )
            self.experts = experts_of_rank.prepared()

    @by_one_thread
    def replace_experts(self, placement: Placement) -> None:
        """Go over to another placement between two steps: experts move to their new slots, in place. Collective.

        Every rank calls it with an equal placement, at the same point of its steps and on their stream, with no step
        under way. Weights and the table of slots keep their addresses: a graph captured before goes on with the new
        placement. A rank holds at most one expert beside its own meanwhile.

        Args:
            placement: with as many experts, ranks and slots; `Placement.reordered_like` saves moves.

        Raises:
            ValueError: on every rank where ranks disagree; on the rank itself where its argument is wrong, while the
                others get `PeerAbortedError`. Nothing has moved then, and the layer may be used as before.
            MoERuntimeError: a rank failed meanwhile, which ends the group as in a step.
        """
        replace_experts([self], placement)

    @by_one_thread
    def warm_up(self) -> None:
        """Run steps of every size whose tokens go nowhere, so that later ones compile and load no kernel. Collective.

        For a server before its first request, and before a graph is captured: without it the first step of each size
        compiles what it launches. With weights loaded, and no step under way. Later steps give the bits that they had
        given without it, and wait for peers no longer than `timeout_s`. Nothing of it is counted or timed. Waits for
        the device.

        Raises as a step does.
        """
        with told_to_peers(self.context):
            warm_up([self])

    def count_steps(self) -> LayerCounters:
        """Count tokens, rows and bytes of each step from now on; what to `poll`, kept in `counters` too.

        A step that was captured in a graph before is replayed uncounted.
        """
        if self.counters is None:
            geometry, context = self.dispatcher.geometry, self.context
            self.counters = LayerCounters(geometry, self.config.num_experts, context.device, context.engine)
        return self.counters

    def _check_placement(self, placement: Placement) -> None:
        if not isinstance(placement, Placement):
            raise ValueError(f"placement: expected a Placement or None, got {type(placement).__name__}")
        expected, ranks = self.config.num_experts, self.context.world_size
        if (placement.num_experts, placement.num_ranks) != (expected, ranks):
            raise ValueError(f"placement: expected {expected} experts on {ranks} rank(s), got {placement.sizes}")

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
            x: bf16 `[..., H]`, at most `max_tokens_per_rank` tokens, 0 included.
            topk_idx, topk_weights: int32 or int64, and fp32, `[T, K]`: a router's answer for the flattened tokens
                (both or neither; without them the layer's own router is asked). -1 is unrouted.
            shared: bf16 `[..., H]`, output of a shared expert, added first; only where the layer has none of its own,
                which is added by itself.
            max_tokens: no rank brings more tokens to this step; equal on all ranks. The step takes what is made for
                the smallest of `config.all_step_sizes` with room for it, which changes its time and no bit. None is
                `max_tokens_per_rank`; on a single rank, the tokens of `x`.

        Returns:
            bf16, the shape of `x`.

        Raises:
            ValueError: a wrong argument; the peers get `PeerAbortedError`.
            MoERuntimeError: what went wrong between ranks (see `ExpertParallelContext.check`).
        """
        steps = self.stages(x, topk_idx=topk_idx, topk_weights=topk_weights, shared=shared, max_tokens=max_tokens)
        while (y := advance(steps)) is None:
            pass
        return y

    def stages(
        self,
        x: torch.Tensor,
        *,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        max_tokens: int | None = None,
    ) -> Generator[None, None, torch.Tensor]:
        """`forward` with stops, as many on every rank: wherever it goes on only once all ranks have come as far.

        For ranks that take turns in one process (`VirtualRanks`), and for other work in between.
        """
        # Not `begin`, `compute` and `finish`: each takes the lock and leaves torch.compile once more.
        step = self._begin(x, topk_idx, topk_weights, shared, max_tokens)
        yield
        step.compute()
        yield
        return step.gather().view(step.shape)

    @not_compiled
    @by_one_thread
    def begin(
        self,
        x: torch.Tensor,
        *,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        max_tokens: int | None = None,
    ) -> LayerStep:
        """Route and send this rank's tokens; the shared expert takes them while they travel."""
        return self._begin(x, topk_idx, topk_weights, shared, max_tokens)

    def _begin(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        shared: torch.Tensor | None,
        max_tokens: int | None,
    ) -> LayerStep:
        with collective_step(self.context):
            tokens_TH, topk_idx, topk_weights, shared_TH = self._route(x, topk_idx, topk_weights, shared)
            dispatcher = self._dispatcher_for(tokens_TH.shape[0], max_tokens)
            slots = topk_idx if self.slots is None else self.slots(topk_idx, tokens_TH)
        with phase("dispatch_send", self.times):
            leave_scales = self._leaves_scales(dispatcher)
            handle = dispatcher.dispatch_send(tokens_TH, slots, topk_weights, leave_scales=leave_scales)
        if self.shared_expert is not None:
            with collective_step(self.context), torch.no_grad(), phase("shared_expert", self.times):
                shared_TH = self.shared_expert(tokens_TH)
        routed, sent = (topk_idx, slots), (tokens_TH, topk_weights)
        return LayerStep(self, dispatcher, x.shape, handle, shared_TH, self.placement, routed, sent)

    @property
    def leaves_scales(self) -> bool:
        """Whether its steps leave the block scales of tokens where they were sent: its experts find them by row."""
        return self._leaves_scales(self.dispatcher)

    def _leaves_scales(self, dispatcher: TokenDispatcher) -> bool:
        return dispatcher.can_leave_scales and self.experts is not None and self.experts.reads_scales_in_record

    def _dispatcher_for(self, num_tokens: int, max_tokens: int | None) -> TokenDispatcher:
        """That of the smallest size with room for a step in which no rank has more than `max_tokens`."""
        limit = self.config.max_tokens_per_rank
        if max_tokens is None:
            # What is too much for any size is refused by the dispatcher.
            max_tokens = min(num_tokens, limit) if self.context.world_size == 1 else limit
        elif isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not num_tokens <= max_tokens <= limit:
            raise ValueError(
                f"max_tokens: expected None or from {num_tokens}, the tokens of x, to max_tokens_per_rank = {limit}, "
                f"got {max_tokens!r}"
            )
        return next(dispatcher for size, dispatcher in self.dispatchers.items() if size >= max_tokens)

    @not_compiled
    @by_one_thread
    def compute(self, step: LayerStep) -> None:
        """Wait for the tokens of all ranks, run this rank's experts on them, and send the results back."""
        step.compute()

    @not_compiled
    @by_one_thread
    def finish(self, step: LayerStep) -> torch.Tensor:
        """Wait for the results of all ranks and sum them: bf16, the shape of the step's `x`."""
        return step.gather().view(step.shape)

    def _route(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        shared: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Checked `x` and `shared` as `[T, H]`, and the router's answer in between."""
        if self.experts is None:
            raise ValueError("experts: no weights are loaded (load_experts, from_checkpoint or from_yaml)")
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"x: expected a tensor, got {type(x).__name__}")
        if x.device != self.context.device:
            raise ValueError(f"x: expected device {self.context.device}, got {x.device}")
        if x.ndim < 1 or x.shape[-1] != self.config.hidden_size:
            raise ValueError(f"x: expected [..., {self.config.hidden_size}], got shape {list(x.shape)}")
        if (topk_idx is None) != (topk_weights is None):
            raise ValueError("topk_idx: expected together with topk_weights")
        if shared is not None and self.shared_expert is not None:
            raise ValueError("shared: expected None, the layer has a shared expert of its own")
        if shared is not None and not isinstance(shared, torch.Tensor):
            raise ValueError(f"shared: expected a tensor, got {type(shared).__name__}")
        if shared is not None and shared.shape != x.shape:
            raise ValueError(f"shared: expected the shape of x, {list(x.shape)}, got {list(shared.shape)}")
        tokens_TH = x.reshape(-1, self.config.hidden_size)
        shared_TH = None if shared is None else shared.reshape(-1, self.config.hidden_size)
        self.dispatcher.check_shared(shared_TH, tokens_TH.shape[0])
        if topk_idx is None or topk_weights is None:
            if self.router is None:
                raise ValueError("topk_idx: expected a router's answer, the layer was made without a router")
            with phase("route", self.times):
                topk_idx, topk_weights = self.router(tokens_TH)
        return tokens_TH, topk_idx, topk_weights, shared_TH

    def close(self) -> None:
        """Close the context if it was made for this layer; one that was given is left alone. Safe to call twice.

        Collective, and raises, as `ExpertParallelContext.close`.
        """
        if self._owns_context:
            self.context.close()

    def __enter__(self) -> MoELayer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._owns_context:
            self.context.__exit__(kind, error, tb)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"hidden_size={config.hidden_size}, intermediate_size={config.intermediate_size}, "
            f"num_experts={config.num_experts}, top_k={config.top_k}, token_format={config.token_format}, "
            f"weight_format={config.weight_format}, combine_format={config.combine_format}, "
            f"rank={self.context.rank} of {self.context.world_size}"
        )


def _check_context(context: ExpertParallelContext | None) -> None:
    if context is not None and not isinstance(context, ExpertParallelContext):
        raise ValueError(f"context: expected an ExpertParallelContext or None, got {type(context).__name__}")


def context_from_config(
    parallel: ParallelConfig,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> ExpertParallelContext:
    """The context that a `parallel` section describes; group and device as for `ExpertParallelContext`."""
    if not isinstance(parallel, ParallelConfig):
        raise ValueError(f"parallel: expected a ParallelConfig, got {type(parallel).__name__}")
    return ExpertParallelContext(
        group,
        device=device,
        transport=parallel.transport,
        engine=parallel.engine,
        timeout_s=parallel.timeout_s,
        startup_timeout_s=parallel.startup_timeout_s,
    )


def random_expert(config: MoELayerConfig, seed: int, expert: int, device: torch.device | str = "cpu") -> ExpertTensors:
    """One expert in bf16, from `seed`, its id and the kind of `device` alone; with biases where the config has them."""
    generator = torch.Generator(device).manual_seed((seed * 65537 + expert + 1) % 2**63)

    def normal(*shape: int, fan_in: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)
        return (x * fan_in**-0.5).to(torch.bfloat16)

    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up, down = normal(2 * inner, hidden, fan_in=hidden), normal(hidden, inner, fan_in=inner)
    if not config.expert_bias:
        return ExpertTensors(gate_up, down)
    return ExpertTensors(gate_up, down, normal(2 * inner, fan_in=hidden), normal(hidden, fan_in=inner))
