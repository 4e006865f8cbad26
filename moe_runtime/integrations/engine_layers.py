"""The MoE layers that an inference engine runs here: its routed experts, its top-k, its groups of ranks.

An engine has its own names for these, which `vllm_experts` and `sglang_experts` translate. Nothing here imports one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.config import ActivationConfig, MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import abort_peers_on_error
from moe_runtime.integrations.engine_weights import EngineWeights
from moe_runtime.integrations.layer_settings import LayerSettings, context_of, layer_config
from moe_runtime.integrations.shared_tokens import gather_parts, part_of, place_part, run_in_steps, steps_for
from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS, ceil_div, token_formats_for
from moe_runtime.layer import MoELayer
from moe_runtime.support.compiling import not_compiled

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Concatenates tensors of equal shapes `[R, H]` of ranks, by rank."""


@dataclass(frozen=True)
class TokenShare:
    """Which of the tokens of a call this rank brings to the layer.

    Attributes:
        ranks: how many ranks hold the same tokens; 1 where every rank has its own.
        rank: this one among them.
        gather: completes the results of those ranks. None leaves the rows of other ranks 0, for an engine that sums
            results over these ranks itself.
    """

    ranks: int = 1
    rank: int = 0
    gather: Gather | None = None


@dataclass(frozen=True)
class EngineLayer:
    """What an engine states about one MoE layer.

    Attributes:
        name: of the layer, for messages.
        num_experts: experts over all ranks.
        top_k: experts of one token.
        activation: formula, and the order of gate and up.
        local_experts: ids of this rank's experts in the order of the weights.
        max_tokens: most tokens in a call; a longer one is split where all ranks know its length.
    """

    name: str
    num_experts: int
    top_k: int
    activation: ActivationConfig
    local_experts: Sequence[int]
    max_tokens: int


@dataclass
class _Group:
    """The layers over one group of ranks. All of them are warmed up in the first step of any."""

    context: ExpertParallelContext
    cold: list[MoELayer] = field(default_factory=list)

    def warm_up(self) -> None:
        while self.cold:
            self.cold.pop(0).warm_up()


class EngineLayers:
    """The layers of one process of an engine, by group of ranks; made when an adapter is switched on.

    All ranks of a group build their layers in the same order, before the first step of any, and call them in the same
    order. Contexts end with the process.

    Args:
        settings: formats and limits of all layers, transport and time limits of all contexts.
    """

    def __init__(self, settings: LayerSettings) -> None:
        self.settings = settings
        self._groups: dict[tuple[str, torch.device], _Group] = {}

    def build(
        self, stated: EngineLayer, weights: EngineWeights, group: dist.ProcessGroup | None, share: TokenShare
    ) -> EngineExperts:
        """The experts of a layer, with their weights, which are taken from the engine. Collective over `group`.

        Without a `group` this rank is alone. Tokens are bf16 where the format of the weights allows it, unless the
        settings say otherwise.

        Raises `ValueError` naming the layer and what does not fit; the peers get `PeerAbortedError`.
        """
        key = "" if group is None else str(group.group_name), weights.device
        if key not in self._groups:
            self._groups[key] = _Group(context_of(self.settings.parallel, group, weights.device))
        ours = self._groups[key]
        with abort_peers_on_error(ours.context):
            layer = MoELayer(self._config(stated, weights, share), ours.context, router=False)
            if list(layer.local_experts) != list(stated.local_experts):
                raise ValueError(
                    f"{stated.name}: expected the experts {_ends(layer.local_experts)} on rank {ours.context.rank}, as "
                    f"a linear placement has them, got {_ends(stated.local_experts)}"
                )
            layer.load_experts(weights.tensors(), weights.buffers())
            weights.release()
        ours.cold.append(layer)
        return EngineExperts(layer, ours, share)

    def _config(self, stated: EngineLayer, weights: EngineWeights, share: TokenShare) -> MoELayerConfig:
        fields = self.settings.fields
        # What names no format leaves the choice to us.
        asked = {key: fields.get(key) for key in ("weight_format", "token_format")}
        weight_format = asked["weight_format"] if asked["weight_format"] in WEIGHT_FORMATS else weights.format.name
        possible = token_formats_for(weight_format)
        usual = "bf16" if "bf16" in possible else possible[0]
        token_format = asked["token_format"] if asked["token_format"] in FORMATS else usual
        model = {
            "hidden_size": weights.hidden_size,
            "intermediate_size": weights.intermediate_size,
            "num_experts": stated.num_experts,
            "top_k": stated.top_k,
            "activation": stated.activation,
            "expert_bias": weights.has_bias,
        }
        limit = {"max_tokens_per_rank": ceil_div(stated.max_tokens, share.ranks)}
        formats = {"weight_format": weight_format, "token_format": token_format}
        return layer_config(stated.name, model, {**limit, **fields, **formats})


def replace_members(method: Any, replacements: type, layers: EngineLayers) -> None:
    """Make `method`, an engine's object of any class, answer with the members of `replacements` in place of its own.

    It gets a subclass of its class with these members: mixed in as a base, `replacements` would change the layout of
    its objects, which Python refuses. `moe_runtime_layers` is `layers`, and `moe_runtime_experts` None.
    """
    kind = type(method)
    members = {name: value for name, value in vars(replacements).items() if not name.startswith("__")}
    method.__class__ = type(f"MoERuntime{kind.__name__}", (kind,), members)
    method.moe_runtime_layers = layers
    method.moe_runtime_experts = None


class EngineExperts:
    """Computes the routed experts of one layer in place of the engine's kernels.

    Attributes:
        layer: the layer.
        share: which tokens this rank brings to it.
    """

    def __init__(self, layer: MoELayer, group: _Group, share: TokenShare) -> None:
        self.layer = layer
        self.share = share
        self._group = group

    @not_compiled
    def __call__(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, most_tokens: int | None = None
    ) -> torch.Tensor:
        """The weighted sum over each token's experts. Collective over the group of the layer.

        Args:
            x: bf16 `[T, H]`.
            topk_ids: int32 or int64 `[T, K]`, ids among all experts; -1 is unrouted.
            topk_weights: fp32 `[T, K]`; a route whose weight is NaN counts as none.
            most_tokens: tokens of the rank that has most, equal on all ranks. A call with more than a layer can hold is
                then split. None where it is not known.

        Returns:
            bf16 `[T, H]`: complete, or, with a share and no gather, 0 in the rows of other ranks.

        Raises:
            ValueError: a wrong argument, or too many tokens; the peers get `PeerAbortedError`.
        """
        self._group.warm_up()
        # A router's answer for what pads a batch, which may be anything.
        topk_ids = topk_ids.masked_fill(topk_weights.isnan(), -1)
        share, limit = self.share, self.layer.config.max_tokens_per_rank
        mine = part_of(x.shape[0], share.ranks, share.rank)
        steps: tuple[int, int | None] = 1, None
        if most_tokens is not None:
            steps = steps_for(max(1, ceil_div(most_tokens, share.ranks)), limit)
        y_TH = run_in_steps(self.layer, x[mine], topk_ids[mine], topk_weights[mine], *steps)
        if share.ranks == 1:
            return y_TH
        if share.gather is None:
            return place_part(y_TH, x.shape[0], mine)
        return gather_parts(y_TH, x.shape[0], share.ranks, share.gather)


def _ends(experts: Sequence[int]) -> str:
    """The first and the last of some ids, and how many there are."""
    return f"{experts[0]} .. {experts[-1]} ({len(experts)})" if len(experts) else "none"
