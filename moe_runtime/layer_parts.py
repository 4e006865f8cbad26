"""The parts of a layer: its dispatchers, router, experts and shared expert, and where their weights come from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from moe_runtime.build import built_over, check_context, checkpoint_overrides, fill_dense, random_expert, read_dense
from moe_runtime.checkpoints.checkpoint import Checkpoint, opened
from moe_runtime.checkpoints.expert_loader import ExpertLoader
from moe_runtime.checkpoints.loading import FRESH, ExpertTensors, QuantBuffers, check_buffers
from moe_runtime.config import MoELayerConfig, RunConfig, load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.memory import staging_bytes
from moe_runtime.context.peers import abort_peers, abort_peers_on_error
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.experts import Experts
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.observation.observed_layer import ObservedLayer
from moe_runtime.placement.physical_experts import SlotTable
from moe_runtime.placement.placement import Placement, placement_from_config
from moe_runtime.post_expert_norm import PostExpertNorm
from moe_runtime.resilience.layer_members import LayerMembers
from moe_runtime.router import Router
from moe_runtime.shared_expert import SharedExpert
from moe_runtime.support.arguments import check_flag, check_integer, check_kind, describe


class LayerParts(ObservedLayer):
    """What a layer is made of. `MoELayer` describes the arguments and attributes, and adds the step."""

    def __init__(
        self,
        config: MoELayerConfig,
        context: ExpertParallelContext | None = None,
        *,
        placement: Placement | None = None,
        router: bool = True,
        router_ids: RouterIds | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MoELayerConfig):
            way = "; of a RunConfig it is `layer`" if hasattr(config, "layer") else ""
            raise ValueError(f"config: expected a MoELayerConfig, got {type(config).__name__}{way}")
        check_context(context)
        check_flag("router", router)
        if context is not None:
            context.check()
        self.config = config
        self.context = context if context is not None else ExpertParallelContext()
        self._owns_context = context is None
        try:
            self._make(placement, router, router_ids)
        except BaseException as error:
            if self._owns_context:
                abort_peers(self.context, error)
                self.context.close()
            raise

    def _make(self, placement: Placement | None, router: bool, router_ids: RouterIds | None) -> None:
        """All parts but the experts, for `config` and `context`."""
        config, device = self.config, self.context.device
        self.placement = placement
        self.router_ids = router_ids
        if router_ids is not None and router:
            raise ValueError("router_ids: expected None, or router=False: the ids are those of a router elsewhere")
        if router_ids is not None and placement is not None:
            raise ValueError("router_ids: expected None with a placement")
        if placement is not None:
            self._check_placement(placement)
        # Behind the checks: a rank that is told of its mistake and tries again is to have the numbers of its peers.
        self.layer_id = self.context.next_layer_id()
        self.slots: SlotTable | None = None
        agree: dict[str, object] = {**config.flat()}
        if placement is not None:
            self.slots = SlotTable(placement, device)
            self.context.has_placement = True
            agree["placement"] = placement.fingerprint
        if self.context.host_transport is None and (placement is not None or self.context.can_rejoin):
            self.context.register(staging_bytes=staging_bytes(config, self.context.heap.world_size))
        self.router: Router | None = None
        if router:
            sizes = (config.hidden_size, config.num_experts, config.top_k)
            self.router = Router(*sizes, config.router, device, engine=self.context.engine)
        self.dispatchers = self._made_dispatchers()
        self.context.register(agree=agree, about=f"layer {self.layer_id}")
        self.dispatcher = self.dispatchers[config.max_tokens_per_rank]
        self.experts: Experts | None = None
        self.shared_expert: SharedExpert | None = None
        if config.shared_expert is not None:
            self.shared_expert = SharedExpert(config.hidden_size, config.shared_expert, device, config.activation)
        self.post_expert_norm: PostExpertNorm | None = None
        if config.post_expert_norm is not None:
            self.post_expert_norm = PostExpertNorm(config.hidden_size, config.post_expert_norm, device)
        self._loader = ExpertLoader(config, self.context, self.post_expert_norm)
        self._members = LayerMembers(self.context, self.layer_id, config.num_experts, placement)

    def _made_dispatchers(self) -> dict[int, TokenDispatcher]:
        """Those of all token buckets, for the present placement."""
        num_slots = None if self.placement is None else self.placement.num_slots
        return TokenDispatcher.of_all_sizes(self.context, self.config, num_slots=num_slots, router_ids=self.router_ids)

    @classmethod
    def from_yaml(cls, path: str | Path, *, context: ExpertParallelContext | None = None) -> Self:
        """The layer of a YAML file (or of a packaged config's bare name), with its weights.

        Weights come from the file's `checkpoint`, else at random from its `seed`, the same for any number of ranks.
        Without a `context` one is made from the file's `parallel` section.
        """
        return cls.from_run_config(load_config(path), context)

    @classmethod
    def from_run_config(cls, run: RunConfig, context: ExpertParallelContext | None = None) -> Self:
        """The layer of a validated `RunConfig`, with its placement and weights.

        Formats that the file does not set come from its checkpoint, if it has one. Without a `context` one is made
        from the section `parallel`.

        Raises:
            ValueError: as `from_checkpoint`, also where the config contradicts the checkpoint; the peers get
                `PeerAbortedError`.
        """
        check_kind("run", run, RunConfig)
        with built_over(context, run.parallel) as used:
            placement = None
            if run.placement is not None:
                placement = placement_from_config(run.placement, run.layer.num_experts, used.world_size)
            if run.checkpoint is None:
                layer = cls(run.layer, used, placement=placement)
                layer.load_random(run.seed)
            else:
                settings = run.checkpoint.model_dump(exclude={"path", "layer"})
                with Checkpoint(run.checkpoint.path, **settings) as checkpoint:
                    overrides = checkpoint_overrides(run.layer)
                    layer = cls._of_checkpoint(checkpoint, run.checkpoint.layer, used, placement, overrides)
        layer._owns_context = context is None
        return layer

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        layer: int = 0,
        context: ExpertParallelContext | None = None,
        placement: Placement | None = None,
        keep_in_host_memory: bool = False,
        ignore_keys: Collection[str] = (),
        **overrides: object,
    ) -> Self:
        """Layer `layer` of a safetensors checkpoint of a family in `moe_runtime.checkpoints.families`.

        Sizes, router and activation come from the checkpoint's `config.json`, and so do the formats of tokens and
        weights where they are not asked for (`moe_runtime.checkpoints.checkpoint.choose_formats`): weights that are
        stored in the format of the layer are taken as they are, others are converted, one by one. `overrides` set other
        fields of `MoELayerConfig`, at least `max_tokens_per_rank`. Each rank reads only its own experts. Before the
        first step ranks compare what they have read.

        NVFP4 tokens have a scale each, whatever `input_scale` the checkpoint has for them; that of the down projections
        becomes `intermediate_gsf`.

        With `keep_in_host_memory` a copy of the loaded experts stays in host memory, from which a process that starts
        again loads them (docs/failures.md). `ignore_keys` names keys of the JSON files that have no influence, although
        they look as if they changed what is computed; such keys are refused otherwise.

        Raises:
            ValueError: naming the file, and the tensor or key that is missing or wrong; the peers get
                `PeerAbortedError`.
        """
        with built_over(context) as used:
            with Checkpoint(path, keep_in_host_memory=keep_in_host_memory, ignore_keys=ignore_keys) as checkpoint:
                made = cls._of_checkpoint(checkpoint, layer, used, placement, overrides)
        made._owns_context = context is None
        return made

    @classmethod
    def _of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        layer: int,
        context: ExpertParallelContext,
        placement: Placement | None,
        overrides: dict[str, Any],
    ) -> Self:
        config = checkpoint.layer_config(layer, **overrides)
        checkpoint.check_sizes(layer)
        made = cls(config, context, placement=placement)
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
        """Read router, shared expert and this rank's experts of decoder layer `layer`; a terminal shows a bar.

        A `checkpoint` that is given as a path is opened for this and closed. Where the checkpoint has a shared expert
        and the layer has none, `shared_elsewhere` says that the caller adds it (see `shared` of `forward`). Experts of
        a checkpoint with `keep_in_host_memory` come from copies there, or are kept there.

        In a process that comes back (`ExpertParallelContext.rejoin`) experts are not read: the others send theirs.

        Raises `ValueError` as `Checkpoint` and `load_experts` do, and, naming the field, where the layer's config
        contradicts the checkpoint; the peers get `PeerAbortedError`. Formats may be others; a layer without a router
        may be of any `top_k`.
        """
        check_flag("shared_elsewhere", shared_elsewhere)
        elsewhere = set() if self.router is not None else {"router", "top_k"}
        if shared_elsewhere and self.shared_expert is None:
            elsewhere.add("shared_expert")
        context = self.context
        with abort_peers_on_error(context), opened(checkpoint) as files:
            files.check_fits(self.config, layer=layer, but_for=elsewhere)
            fill_dense_parts = read_dense(files, layer, self.router, self.shared_expert)
            context.check()
            if context.joins:
                experts = self._loader.none(len(self.local_experts))
            else:
                experts = self._loader.read(files, layer, self.local_experts, shown=context.rank == 0)
            reload = self._loader.reader(files, layer)
            # When all has been read, so that a layer has all weights of one checkpoint.
            fill_dense_parts()
            self.experts = experts
            self._members.take_weights(reload)
            context.register(agree=files.digests(layer), about=f"layer {self.layer_id}")

    def load_random(self, seed: int) -> None:
        """Random weights from `seed`, of sizes that keep activations near unit variance; equal on any `ep_size`.

        Experts are drawn on the layer's device: the weights differ by kind of device.

        Args:
            seed: from 0 to 2^63 - 1.
        """
        self.context.check()
        check_integer("seed", seed, 0, 2**63 - 1)
        fill_dense(self.config, seed, self.router, self.shared_expert, self.post_expert_norm)
        device = self.context.device
        self.load_experts(random_expert(self.config, seed, expert, device) for expert in self.local_experts)
        self._members.take_weights(partial(self._loader.random, seed))

    def load_experts(
        self, experts: Iterable[ExpertTensors | tuple[torch.Tensor, torch.Tensor]], buffers: QuantBuffers = FRESH
    ) -> None:
        """Quantize this rank's experts, in order: for each, gate-and-up `[2I, H]` and down `[H, I]`, bf16 or fp32.

        Where the config says `expert_bias` each is an `ExpertTensors` with its biases; one may hold quantized weights.
        `buffers` is for readers. In a process that comes back (`ExpertParallelContext.rejoin`) nothing is taken from
        `experts`: the others send theirs.

        Raises `ValueError` as `moe_runtime.checkpoints.loading.quantize_experts`, and what `experts` raises; the peers
        get `PeerAbortedError`.
        """
        self.context.check()
        with abort_peers_on_error(self.context):
            if not isinstance(experts, Iterable) or isinstance(experts, torch.Tensor | np.ndarray):
                raise ValueError(f"experts: expected this rank's, in order, got {describe(experts)}")
            check_buffers(buffers)
            count = len(self.local_experts)
            self.experts = (
                self._loader.none(count) if self.context.joins else self._loader.make(experts, count, buffers)
            )
            self._members.take_weights(None)

    def _counts_of_lost(self) -> list[torch.Tensor]:
        return [] if self._members.lost is None else [self._members._without_expert]

    def _check_placement(self, placement: Placement) -> None:
        if not isinstance(placement, Placement):
            raise ValueError(f"placement: expected a Placement or None, got {type(placement).__name__}")
        expected, ranks = self.config.num_experts, self.context.world_size
        if (placement.num_experts, placement.num_ranks) != (expected, ranks):
            raise ValueError(f"placement: expected {expected} experts on {ranks} rank(s), got {placement.sizes}")

    def close(self) -> None:
        """Close the context if it was made for this layer; one that was given is left alone. Safe to call twice.

        Collective, and raises, as `ExpertParallelContext.close`.
        """
        if self._owns_context:
            self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._owns_context:
            self.context.__exit__(kind, error, tb)

    def extra_repr(self) -> str:
        config = self.config
        multiplied = ", fp4_multiplied_in=fp8" if config.fp4_multiplied_in == "fp8" else ""
        return (
            f"hidden_size={config.hidden_size}, intermediate_size={config.intermediate_size}, "
            f"num_experts={config.num_experts}, top_k={config.top_k}, token_format={config.token_format}, "
            f"weight_format={config.weight_format}{multiplied}, combine_format={config.combine_format}, "
            f"rank={self.context.rank} of {self.context.world_size}"
        )
