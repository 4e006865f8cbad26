"""`apply_expert_parallel` spreads the experts of a transformers model over ranks and replicates the rest.

Only the `experts` of the MoE blocks are replaced. Routers and shared experts stay, so what a model routes, records and
returns does not change. Each rank calls the model with its own tokens.

Importing this module also registers `moe_runtime` with transformers (`transformers_registry`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.build import check_context, context_from_config
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.families import layer_config
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.comm.messages import integer, many, optional, row
from moe_runtime.comm.number_exchange import NumberExchange
from moe_runtime.config import Auto, CombineFormatName, FormatName, MoELayerConfig, ParallelConfig, WeightFormatName
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import abort_peers, abort_peers_on_error, agree_on
from moe_runtime.integrations import transformers_registry
from moe_runtime.integrations.expert_modules import DescribedExperts, routes_of
from moe_runtime.integrations.replayed_routes import ReplayedRoutes, RoutedBlock
from moe_runtime.integrations.shared_tokens import run_in_steps, steps_for
from moe_runtime.integrations.transformers_models import MoEBlock, check_read, model_config_of, moe_blocks
from moe_runtime.integrations.transformers_registry import check_overrides, layer_fields
from moe_runtime.layer import MoELayer
from moe_runtime.observation.counters import LayerCounts
from moe_runtime.observation.routes import RecordedRoutes
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.rebalance import check_replacement
from moe_runtime.support.arguments import check_is_tensor, check_kind
from moe_runtime.support.compiling import not_compiled

transformers_registry.register()

DONE = -1
"""Stands for the number of tokens of a rank that does not call the model any more."""

MOST_TOKENS = 2**31
"""More than any rank brings to a call of the model."""

ExpertSource = Checkpoint | Callable[[int, Sequence[int]], Iterable[ExpertTensors]] | None
"""Where experts come from: a checkpoint, a function of decoder layer and expert ids, or the model itself."""


def apply_expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    max_tokens_per_rank: int,
    token_format: FormatName | Auto | None = None,
    weight_format: WeightFormatName | Auto | None = None,
    combine_format: CombineFormatName = "bf16",
    experts: ExpertSource = None,
    placement: Placement | Mapping[int, Placement] | None = None,
    parallel: ParallelConfig | None = None,
    device: torch.device | str | None = None,
    context: ExpertParallelContext | None = None,
    **overrides: Any,
) -> ExpertParallel:
    """Spread the experts of a transformers model over ranks, in place. Collective.

    Every rank passes the same model in bf16, of any family whose experts a layer can compute (`describe_experts`,
    docs/families.md). It keeps the weights of its own experts, quantized, and drops the others. From then on
    `model(...)` is collective: every rank calls it with its own tokens. Inside `ExpertParallel.join`, and so in
    `model.generate(...)`, ranks may call it different numbers of times and with any number of tokens. The model is for
    inference: its parameters no longer require gradients, `state_dict` has no experts, and `save_pretrained` raises.

    Args:
        model: such as `Qwen3MoeForCausalLM`; it need not be on `device` yet.
        mesh: a one-dimensional `DeviceMesh` or process group; None is the default group, or a single rank where
            torch.distributed is not initialised (torchrun's ranks call `init_from_env` before).
        max_tokens_per_rank: most tokens (batch times sequence) of a rank in one step. A call with more is split inside
            `join` and refused outside.
        token_format, weight_format, combine_format: as in `MoELayerConfig`. If None or `auto`, `token_format` is bf16,
            and `weight_format` is `token_format`. With a `Checkpoint` they are then chosen as in
            `MoELayer.from_checkpoint`: as it has them where they go together.
        experts: where experts come from instead of the model, which may then have none (`without_experts`).
            `experts(layer, ids)` yields the experts `ids` of decoder layer `layer` in order. A `Checkpoint` also sets
            the formats and `intermediate_gsf` of each layer, and is compared between ranks.
        placement: which rank holds which experts, of every layer or by decoder layer, with replicas; equal on all
            ranks. None, and layers without one: contiguous ids, each expert once.
        parallel: transport, engine and time limits; the defaults of `ParallelConfig` if None.
        device: device of the experts; the model's if None.
        context: one to use instead of `mesh`, `parallel` and `device`, such as `ExpertParallelContext.rejoin()` of a
            process that takes the place of a rank; it is closed with what is returned, and after an error. It has
            layers of this model alone.
        overrides: further fields of `MoELayerConfig`, such as `token_buckets` or `intermediate_gsf`, and `top_k` where
            no block of the model says it. Of router and shared expert the model has its own: they are compared with a
            `Checkpoint` that has routers, and refused without one. Inside `join` each call takes the smallest bucket
            that holds the tokens of every rank.

    Returns:
        The expert-parallel part of the model; close it in the end, or use it as a context manager.

    Raises:
        ValueError: a model or an argument that does not fit; peers get `PeerAbortedError`. A refused model is
            unchanged. If `experts` or a peer fails later, the blocks filled before have lost their experts.
    """
    check_kind("model", model, nn.Module)
    if mesh is not None:
        check_kind("mesh", mesh, (DeviceMesh, dist.ProcessGroup))
    check_context(context)
    if context is None:
        if device is None:
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        context = context_from_config(ParallelConfig() if parallel is None else parallel, mesh, device)
    elif (mesh, parallel, device) != (None, None, None):
        raise ValueError("context: expected None together with mesh, parallel or device")
    try:
        with abort_peers_on_error(context):
            if not (experts is None or isinstance(experts, Checkpoint) or callable(experts)):
                kinds = "a Checkpoint, a callable or None"
                raise ValueError(f"experts: expected {kinds}, got {type(experts).__name__}")
            if not (isinstance(experts, Checkpoint) and experts.routers):
                check_overrides(overrides)
            model_config = model_config_of(model)
            blocks = moe_blocks(model, has_weights=experts is None)
            numbers = [block.number for block in blocks]
            if experts is None:
                check_read(model_config, numbers)
            placements = _by_layer(placement, numbers)
            settings = {
                "max_tokens_per_rank": max_tokens_per_rank,
                "token_format": token_format,
                "weight_format": weight_format,
                "combine_format": combine_format,
                **overrides,
            }
            owner = ExpertParallel(context)
            for block in blocks:
                config = _config_of(model_config, block, experts, settings)
                placed = placements.get(block.number)
                owner.layers.append(MoELayer(config, context, placement=placed, router=False))
                owner.decoder_layers.append(block.number)
            # Before any block loses its experts.
            context.compare()
            for index, block in enumerate(blocks):
                _load(owner.layers[index], block, experts)
                block.module.experts = ParallelExperts(owner, index, block.described)
                owner._blocks.append(ref(block.module))
        context.allocate()
    except BaseException:
        context.close()
        raise
    model.requires_grad_(False)
    if hasattr(model, "generate"):
        model.generate = owner._inside_join(model.generate)
    for part in model.modules():
        if hasattr(part, "save_pretrained"):
            part.save_pretrained = cast(Any, _refuse_to_save)
    return owner


def _refuse_to_save(*args: Any, **named: Any) -> NoReturn:
    raise ValueError(
        "save_pretrained: the experts of this model are spread over ranks; save it before apply_expert_parallel"
    )


class ExpertParallel:
    """The experts of one model on this rank, and what its ranks share; created by `apply_expert_parallel`.

    Attributes:
        context: the group's memory and signals.
        layers: one `MoELayer` for each MoE block, in the order of the model.
        decoder_layers: index of the decoder layer of each.
    """

    def __init__(self, context: ExpertParallelContext) -> None:
        check_kind("context", context, ExpertParallelContext)
        self.context = context
        self.layers: list[MoELayer] = []
        self.decoder_layers: list[int] = []
        self._joined = False
        self._tokens: NumberExchange | None = None
        if context.group is not None and context.recovery is None:
            self._tokens = NumberExchange("call of the model", context.group, integer(DONE, MOST_TOKENS))
        self._most_tokens: int | None = None
        self._counted_from: list[LayerCounts] | None = None
        self._blocks: list[ref[Any]] = []

    def warm_up(self) -> None:
        """Run steps of every bucket in all layers, so that later calls compile and load no kernel. Collective.

        All ranks call it outside of `join`, before the first call of the model; see `MoELayer.warm_up`.
        """
        for layer in self.layers:
            layer.warm_up()

    def replace_experts(self, placement: Placement | Mapping[int, Placement]) -> None:
        """Change the placement of all layers, or of those in a mapping from decoder layers. Collective.

        All ranks call it between two calls of the model, with equal placements; see `MoELayer.replace_experts`.

        Raises:
            ValueError: ranks disagree (raised on all), or this rank's argument is wrong (the others raise
                `PeerAbortedError`). No layer has changed then, and the model may be called as before.
            MoERuntimeError: a rank failed meanwhile, which ends the group as in a step.
        """
        self.context.check()
        wanted: dict[int, Placement] = {}
        problem: BaseException | None = None
        try:
            if placement is None:
                raise ValueError("placement: expected a Placement or a mapping from decoder layer, got None")
            wanted = _by_layer(placement, self.decoder_layers)
            for number, layer in zip(self.decoder_layers, self.layers, strict=True):
                if number in wanted:
                    check_replacement(layer.placement, wanted[number])
        except BaseException as error:
            problem = error
        proposal = {
            f"placement of layer {number}": wanted[number].fingerprint if problem is None and number in wanted else None
            for number in self.decoder_layers
        }
        agree_on(self.context, proposal, problem)
        for number, layer in zip(self.decoder_layers, self.layers, strict=True):
            if number in wanted:
                layer.replace_experts(wanted[number])

    def count_tokens(self) -> None:
        """Count the tokens of each expert in every layer from now on, from zero; see `expert_loads`."""
        self._counted_from = [layer.count_steps().read() for layer in self.layers]

    def expert_loads(self) -> dict[int, list[int]]:
        """Tokens of each expert, summed over ranks since `count_tokens`, by decoder layer. Collective.

        `plan_placement` makes a placement from the list of a layer.

        Raises `ValueError` on every rank if one of them does not count.
        """
        counts: list[list[int]] | None = None
        if self._counted_from is not None:
            pairs = zip(self.layers, self._counted_from, strict=True)
            counts = [list((layer.count_steps().read() - earlier).expert_tokens) for layer, earlier in pairs]
        answers: list[Any] = [counts]
        if self.context.group is not None:
            sizes = [layer.config.num_experts for layer in self.layers]
            read = optional(row(*(many(integer(0), num_experts) for num_experts in sizes)))
            max_bytes = 1000 + 30 * sum(sizes)  # a count has at most 19 digits
            answers = self.context.group.gather("expert_loads", counts, read, max_bytes=max_bytes)
        for rank, answer in enumerate(answers):
            if answer is None:
                raise ValueError(
                    f"expert_loads: rank {rank} does not count; expected count_tokens before, on every rank"
                )
        sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*answers, strict=True)]
        return dict(zip(self.decoder_layers, sums, strict=True))

    def record_routes(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> dict[int, RecordedRoutes]:
        """Record the experts of each token in every layer from now on; by decoder layer, what to `read`.

        A call of the model is one step, or several where `join` splits it. Steps in which this rank waits in `join` for
        others are not recorded.

        Args:
            ids: int16 or int32 `[L, S, M, K]`, contiguous, for the `L` MoE layers in the order of the model, each as
                of `MoELayer.record_routes`.
            weights: fp32 of the same shape, or None.

        Raises `ValueError` as `MoELayer.record_routes`.
        """
        wanted = len(self.layers)
        for name, ring in {"ids": ids, **({} if weights is None else {"weights": weights})}.items():
            if check_is_tensor(name, ring).ndim != 4 or ring.shape[0] != wanted:
                raise ValueError(f"{name}: expected [{wanted}, S, M, K], got {list(ring.shape)}")
        rings = zip(ids, [None] * wanted if weights is None else weights, strict=True)
        before = [layer.routes for layer in self.layers]
        try:
            made = [layer.record_routes(*ring) for layer, ring in zip(self.layers, rings, strict=True)]
        except ValueError:
            for layer, routes in zip(self.layers, before, strict=True):
                layer.routes = routes
            raise
        return dict(zip(self.decoder_layers, made, strict=True))

    def replay_routes(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> ReplayedRoutes:
        """Give the experts of each token to the next forward pass, which is made inside `with` of what this returns.

        The pass has the `T` tokens of `ids` on this rank, also where `join` splits it. With the ids and weights that
        were recorded it gives the same bits for the same tokens. Without weights the model's routers give those of the
        given experts by their own formula, to the same bits where the hidden states are the same. Other ranks may
        replay theirs or not. Leaving the block restores the model. Waits for the device. The pass cannot be captured in
        a CUDA graph.

        Args:
            ids: int16, int32 or int64 `[L, T, K]` on the device of the layers, for the `L` MoE layers in the order of
                the model; copied. -1 is no expert: without weights in all places of a token or in none.
            weights: fp32 of the same shape, taken as they are; None for those of the model's routers.

        Raises:
            ValueError: a wrong argument, also a pass with other MoE layers or tokens than `ids`, whose peers get
                `PeerAbortedError`; a block that is left before a whole pass; weights that are missing for a router that
                does not choose by `torch.topk`.
        """
        blocks = []
        for number, layer, block in zip(self.decoder_layers, self.layers, self._blocks, strict=True):
            module = block()
            if module is None:
                raise ValueError(f"replay_routes: the model has no block of decoder layer {number} any more")
            identity = module.experts._identity_experts
            sizes = layer.config.num_experts + identity, layer.config.top_k
            blocks.append(RoutedBlock(f"decoder layer {number}", module, *sizes, identity > 0, takes_absent=True))
        return ReplayedRoutes(blocks, ids, weights, self.context.device, self.context)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Inside, ranks may call the model different numbers of times. Collective: all ranks enter and leave.

        Before each call of the model the ranks exchange their numbers of tokens. A rank that is done takes part in the
        calls of the others, without tokens, until all are done, and leaves with them. Each call costs an exchange
        between hosts (`NumberExchange`), which cannot be captured in a CUDA graph, and waits at most
        `startup_timeout_s` for the slowest rank. The first one connects the ranks. With `on_failure="continue"` it goes
        through the store, waits at most `timeout_s`, and goes on without a rank that does not come.

        Raises `PeerAbortedError` if another rank leaves with an error, `PeerTimeoutError` if one does not come.
        """
        if self._joined:
            yield
            return
        self._joined = True
        try:
            yield
            self._idle()
        except BaseException as error:
            abort_peers(self.context, error)
            if self._tokens is not None:
                # Peers may wait for the next call of the model, also if this rank failed earlier.
                self._tokens.leave(error)
            raise
        finally:
            self._joined = False

    def _inside_join(self, function: Any) -> Any:
        """`function` called inside `join`."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.join():
                return function(*args, **kwargs)

        return call

    def _run(self, index: int, x_TH: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Run layer `index` on this rank's tokens, in steps of the size agreed on before the first layer."""
        limit = self.layers[index].config.max_tokens_per_rank
        if not self._joined:
            self._most_tokens = None
            if x_TH.shape[0] > limit:
                with abort_peers_on_error(self.context):
                    raise ValueError(
                        f"max_tokens_per_rank: {limit}, got {x_TH.shape[0]} tokens; inside `ExpertParallel.join` they "
                        "would be split"
                    )
        elif index == 0:
            self._most_tokens = self._agree(x_TH.shape[0])
        steps = (1, None) if self._most_tokens is None else self._steps(self._most_tokens)
        return run_in_steps(self.layers[index], x_TH, topk_idx, topk_weights, *steps)

    def close(self) -> None:
        """Free the memory between ranks; see `ExpertParallelContext.close`. The model cannot be called afterwards."""
        try:
            self.context.close()
        finally:
            self._close_tokens()

    def _close_tokens(self) -> None:
        if self._tokens is not None:
            self._tokens.close()

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.context.__exit__(kind, error, tb)
        finally:
            self._close_tokens()

    def _agree(self, num_tokens: int) -> int:
        """Most tokens of any rank in this call of the model; `DONE` if all are done."""
        context = self.context
        if context.recovery is not None:
            context.allocate()
            limit_s = context.timeout_s
            return context.recovery.most("call of the model", num_tokens, limit_s, context._raise_failure)
        return num_tokens if self._tokens is None else max(self._tokens.gather(num_tokens))

    def _steps(self, most_tokens: int) -> tuple[int, int]:
        """Number of steps of a layer in one call, and most tokens of a rank in each."""
        return steps_for(most_tokens, self.layers[0].config.max_tokens_per_rank)

    def _idle(self) -> None:
        """Take part in the calls of the other ranks until all are done."""
        device, nothing = self.context.device, list[dict[str, Any]]()
        for config in (layer.config for layer in self.layers):
            x = torch.empty(0, config.hidden_size, dtype=torch.bfloat16, device=device)
            idx = torch.empty(0, config.top_k, dtype=torch.int32, device=device)
            nothing.append({"x": x, "topk_idx": idx, "topk_weights": idx.float()})
        # A ring for this rank's own steps would soon hold nothing else.
        with ExitStack() as unrecorded:
            for layer in self.layers:
                unrecorded.enter_context(layer._unrecorded())
            while (most_tokens := self._agree(DONE)) != DONE:
                chunks, most = self._steps(most_tokens)
                for layer, given in zip(self.layers, nothing, strict=True):
                    for _ in range(chunks):
                        layer(**given, max_tokens=most)


class ParallelExperts(nn.Module):
    """Replaces the experts of a block: the same call, computed by the experts of all ranks."""

    is_expert_parallel = True

    def __init__(self, owner: ExpertParallel, index: int, described: DescribedExperts) -> None:
        super().__init__()
        self._owner = owner
        self._index = index
        self._identity_experts = described.identity_experts

    @not_compiled
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """bf16, the shape of `hidden_states`: the weighted sum over each token's experts, for this rank's tokens."""
        config = self._owner.layers[self._index].config
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        routes = routes_of(config.num_experts, self._identity_experts, x_TH, top_k_index, top_k_weights)
        topk_idx, own_TH = routes
        y_TH = self._owner._run(self._index, x_TH, topk_idx, top_k_weights)
        return (y_TH if own_TH is None else y_TH + own_TH).view(hidden_states.shape)

    def extra_repr(self) -> str:
        return self._owner.layers[self._index].extra_repr()


def _load(layer: MoELayer, block: MoEBlock, experts: ExpertSource) -> None:
    """Load this rank's experts of `block`, and the norm after them if there is one, into `layer`."""
    if experts is None:
        block.described.load_into(layer, layer.local_experts)
        return
    if layer.post_expert_norm is not None:
        layer.post_expert_norm.load(block.module.experts.post_expert_norm.weight.detach())
    if isinstance(experts, Checkpoint):
        layer.load_checkpoint(experts, block.number, shared_elsewhere=True)
    else:
        layer.load_experts(experts(block.number, layer.local_experts))


def _config_of(
    model_config: dict[str, Any], block: MoEBlock, experts: ExpertSource, settings: dict[str, Any]
) -> MoELayerConfig:
    """The config of the layer of `block`, without the shared expert, which stays in the block."""
    if isinstance(experts, Checkpoint):
        # The model must agree with the checkpoint.
        if experts.routers:
            plain = layer_config(
                model_config,
                source="model.config",
                layer=block.number,
                ignore_keys=experts.ignore_keys,
                max_tokens_per_rank=1,
            )
            stated = {key: getattr(plain, key) for key in plain.model_fields_set}
        else:
            stated = {"top_k": block.top_k(model_config, settings.get("top_k"))}
        stated |= block.described.fields
        made = experts.layer_config(block.number, **stated | settings)
        alone: MoELayerConfig = made.replace(shared_expert=None)
        return alone
    asked = settings["token_format"]
    settings = settings | {"token_format": "bf16" if asked is None else asked}
    return layer_fields(block.described, block.top_k(model_config, settings.get("top_k")), settings)


def _by_layer(placement: Placement | Mapping[int, Placement] | None, numbers: Sequence[int]) -> dict[int, Placement]:
    """The placement of each decoder layer that has one, among `numbers`."""
    if placement is None:
        return {}
    if isinstance(placement, Placement):
        return dict.fromkeys(numbers, placement)
    if not isinstance(placement, Mapping):
        raise ValueError(
            f"placement: expected a Placement, a mapping from decoder layer or None, got {type(placement).__name__}"
        )
    if unknown := [number for number in placement if number not in numbers]:
        raise ValueError(f"placement: expected decoder layers with experts, {list(numbers)}, got {unknown[0]!r}")
    return dict(placement)
