"""The MoE layers that an inference engine runs here: its routed experts, its top-k, its groups of ranks.

An engine has its own names for these, which `vllm_experts` and `sglang_experts` translate. Nothing here imports one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.config import ActivationConfig, MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import abort_peers_on_error
from moe_runtime.context.threads import is_capturing
from moe_runtime.integrations.engine_weights import EngineWeights
from moe_runtime.integrations.layer_settings import LayerSettings, context_of, layer_config
from moe_runtime.integrations.replayed_routes import checked_ids, checked_weights
from moe_runtime.integrations.shared_tokens import part_of, place_part, run_in_steps, steps_for
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.exchange.plan import exchange_engine
from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS, TokenFormat, ceil_div, token_formats_for
from moe_runtime.layer import MoELayer
from moe_runtime.observation.routes import RecordedRoutes, StepRoutes
from moe_runtime.support.arguments import check_kind
from moe_runtime.support.compiling import not_compiled

_BUILT = weakref.WeakValueDictionary[str, "EngineExperts"]()
_RECORDED = weakref.WeakValueDictionary[str, RecordedRoutes]()


def built_layers() -> dict[str, MoELayer]:
    """The layers of this process, by the engine's name of each: for `metrics_text`, with `recorded_routes`.

    Where all ranks hold the same tokens, the experts of a layer are those of this rank.
    """
    return {name: experts.layer for name, experts in _BUILT.items()}


def recorded_routes() -> dict[str, RecordedRoutes]:
    """What the layers of this process record, by the engine's name of each; none without the setting `routes`.

    Ids are among all experts of the layer, and tokens are those that the engine passes on this rank. Where engines of
    one process have equal names, the newest has them.
    """
    return dict(_RECORDED)


class _Given:
    """Routes that calls of layers take, each once.

    Attributes:
        left: by layer, those that were not taken so far.
    """

    def __init__(self, left: dict[EngineExperts, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.left = left

    def take(self, experts: EngineExperts, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids and weights of a call of `experts` for which the engine chose `topk_ids`.

        Raises `ValueError` where there are none, or of other tokens, or the call is captured in a graph.
        """
        if is_capturing(topk_ids.device):
            raise ValueError(
                f"routes: {experts.name} is captured in a CUDA graph, whose replays cannot be given routes"
            )
        if experts not in self.left:
            raise ValueError(f"routes: expected those of one call of each layer, got none for a call of {experts.name}")
        ids, weights = self.left[experts]
        if ids.shape != topk_ids.shape:
            raise ValueError(
                f"routes: expected {list(topk_ids.shape)} for this call of {experts.name}, got {list(ids.shape)}"
            )
        del self.left[experts]
        return ids.to(topk_ids.dtype), weights


_given: _Given | None = None


def replay_routes(routes: Mapping[str, StepRoutes]) -> AbstractContextManager[None]:
    """Inside, each layer named in `routes` takes these in its next call, in place of what the engine's router chose.

    For one step of the engine, in this process. Leaving it restores all layers. The names are those of
    `recorded_routes`, and each rank gives its own. Weights are needed: the engine's router, which has answered before,
    gives those of its own choice. A step that the engine replays as a CUDA graph asks for no routes: have it run
    without graphs (vLLM's `enforce_eager`, SGLang's `disable_cuda_graph`).

    Args:
        routes: by name of the layer, for all layers of the step: ids int16, int32 or int64 `[T, K]` and weights fp32
            `[T, K]` on the layer's device, for the tokens that the engine passes to it, padding included; copied.

    Raises:
        ValueError: a name without a layer, wrong tensors, a call of a layer that is not named, was called before or has
            other tokens, whose peers get `PeerAbortedError`, a call that is captured in a graph; and, on leaving, a
            layer that was not called.
    """
    check_kind("routes", routes, Mapping)
    given: dict[EngineExperts, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, step in routes.items():
        experts = _BUILT.get(name) if isinstance(name, str) else None
        if experts is None:
            raise ValueError(f"routes: expected names of layers ({_some(_BUILT)}), got {name!r}")
        check_kind(f"routes[{name!r}]", step, StepRoutes)
        ids, weights, config = step.topk_idx, step.topk_weights, experts.layer.config
        if weights is None:
            raise ValueError(f"routes[{name!r}].topk_weights: expected a tensor, got None; record them with weights")
        shape = (None, config.top_k)
        checked_ids(f"routes[{name!r}].topk_idx", ids, shape, experts.num_experts, experts.layer.context.device)
        checked_weights(f"routes[{name!r}].topk_weights", weights, ids)
        given[experts] = ids.clone(), weights.clone()
    return _in_force(_Given(given))


@contextmanager
def _in_force(given: _Given) -> Iterator[None]:
    global _given
    if _given is not None:
        raise ValueError("replay_routes: expected no other in force in this process")
    _given = given
    try:
        yield
    finally:
        _given = None
    if left := [experts.name for experts in given.left]:
        raise ValueError(
            f"routes: expected a step of the engine inside replay_routes, got no call of {_some(left)}; a CUDA graph "
            "that is replayed asks for none"
        )


def _some(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    first, *others = [*names] or ["none"]
    return f"{first} and {len(others)} others" if others else first


@dataclass(frozen=True)
class TokenShare:
    """Ranks that hold the same tokens. The engine sums their results, each of which is a part.

    Attributes:
        ranks: how many they are; 1 where every rank has its own tokens.
        rank: this one among them.
        whole: whether each of them brings all of the tokens to its layer, else an equal part.
    """

    ranks: int = 1
    rank: int = 0
    whole: bool = False

    @property
    def parts(self) -> int:
        """Parts of the tokens, of which this rank brings one to its layer."""
        return 1 if self.whole else self.ranks


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
        token_buckets: numbers of tokens in a call for which kernels of their own pay, unless the settings name some.
        engine: which of the engines of this process has the layer. Layers of different ones share nothing.
    """

    name: str
    num_experts: int
    top_k: int
    activation: ActivationConfig
    local_experts: Sequence[int]
    max_tokens: int
    token_buckets: Sequence[int] = ()
    engine: str = ""


@dataclass(eq=False)
class _Group:
    """The layers of one engine over one group of ranks. All of them are warmed up in the first step of any.

    The layers alone hold it. When an engine has let go of its layers, the context is closed.
    """

    context: ExpertParallelContext
    cold: list[MoELayer] = field(default_factory=list)

    def __post_init__(self) -> None:
        # At the end of the process the system frees all there is, and peers may be gone.
        weakref.finalize(self, _end, self.context).atexit = False

    def warm_up(self) -> None:
        while self.cold:
            self.cold.pop(0).warm_up()


def _end(context: ExpertParallelContext) -> None:
    """Close a context whose layers are gone. Ranks come here at different times, so none waits for another."""
    context.failed |= context.world_size > 1
    context.close()


class EngineLayers:
    """The layers of one process of an engine, by group of ranks; made when an adapter is switched on.

    All ranks of a group build their layers in the same order, before the first step of any, and call them in the same
    order. Contexts end with the layers of their engine, or with the process.

    Args:
        settings: formats and limits of all layers, transport and time limits of all contexts.
    """

    def __init__(self, settings: LayerSettings) -> None:
        self.settings = settings
        self._groups = weakref.WeakValueDictionary[tuple[str, str, torch.device], _Group]()

    def build(
        self, stated: EngineLayer, weights: EngineWeights, group: dist.ProcessGroup | None, share: TokenShare
    ) -> EngineExperts:
        """The experts of a layer, with their weights, which are taken from the engine. Collective over `group`.

        Without a `group` this rank is alone, and so it is where all ranks of the group hold the same tokens: each then
        computes its own experts for all of them, and nothing but the engine's sum passes between ranks. Tokens are bf16
        where the format of the weights allows it, unless the settings say otherwise.

        Raises `ValueError` naming the layer and what does not fit; the peers get `PeerAbortedError`.
        """
        first, num_experts = 0, stated.num_experts
        if group is not None and computes_own_experts(stated, share, group.size()):
            first, num_experts = stated.local_experts[0], len(stated.local_experts)
            group, share = None, TokenShare(share.ranks, share.rank, whole=True)
        key = stated.engine, "" if group is None else str(group.group_name), weights.device
        ours = self._groups.get(key)
        if ours is None:
            self._groups[key] = ours = _Group(context_of(self.settings.parallel, group, weights.device))
        with abort_peers_on_error(ours.context):
            config, ids = self._config(stated, num_experts, weights, share), RouterIds(first, stated.num_experts)
            layer = MoELayer(config, ours.context, router=False, router_ids=ids)
            expected = [first + expert for expert in layer.local_experts]
            if expected != list(stated.local_experts):
                raise ValueError(
                    f"{stated.name}: expected the experts {_ends(expected)} on rank {ours.context.rank}, as a linear "
                    f"placement has them, got {_ends(stated.local_experts)}"
                )
            layer.load_experts(weights.tensors(), weights.buffers())
            weights.release()
        ours.cold.append(layer)
        ring = self._ring(stated, ours.context)
        experts = EngineExperts(layer, ours, share, ring, stated.name)
        _BUILT[stated.name] = experts
        return experts

    def _ring(self, stated: EngineLayer, context: ExpertParallelContext) -> RecordedRoutes | None:
        """Where the routes of a layer are recorded, if they are."""
        wanted, device = self.settings.routes, context.device
        if wanted is None:
            return None
        shape = wanted.steps, stated.max_tokens, stated.top_k
        narrow = stated.num_experts <= 2**15
        routes = RecordedRoutes(
            torch.empty(shape, dtype=torch.int16 if narrow else torch.int32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device) if wanted.weights else None,
            max_tokens=stated.max_tokens,
            top_k=stated.top_k,
            num_experts=stated.num_experts,
            device=device,
            engine=exchange_engine(context.engine, device)[0],
        )
        _RECORDED[stated.name] = routes
        return routes

    def _config(
        self, stated: EngineLayer, num_experts: int, weights: EngineWeights, share: TokenShare
    ) -> MoELayerConfig:
        fields = self.settings.fields
        model = {
            "hidden_size": weights.hidden_size,
            "intermediate_size": weights.intermediate_size,
            "num_experts": num_experts,
            "top_k": stated.top_k,
            "activation": stated.activation,
            "expert_bias": weights.has_bias,
        }
        limits = {
            "max_tokens_per_rank": ceil_div(stated.max_tokens, share.parts),
            "token_buckets": tuple(ceil_div(size, share.parts) for size in stated.token_buckets),
        }
        return layer_config(stated.name, model, limits | dict(fields) | formats_of(stated.name, weights.format, fields))


def formats_of(name: str, held: TokenFormat, fields: Mapping[str, Any]) -> dict[str, str]:
    """`weight_format` and `token_format` of the layer `name` with the settings `fields`; an engine holds its weights in
    `held`.

    Raises `ValueError` naming the layer, and the field that was set, for tokens that do not go with the weights.
    """
    asked = {key: fields.get(key) for key in ("weight_format", "token_format")}
    # What names no format leaves the choice to us.
    chosen = asked["weight_format"] in WEIGHT_FORMATS
    weight_format = str(asked["weight_format"]) if chosen else held.name
    possible = token_formats_for(weight_format)
    if asked["token_format"] not in FORMATS:
        return {"weight_format": weight_format, "token_format": "bf16" if "bf16" in possible else possible[0]}
    if asked["token_format"] not in possible:
        whose = "asked for" if chosen else "that the engine holds (weight_format converts them)"
        raise ValueError(
            f"{name}: token_format: expected {' or '.join(possible)} with the {weight_format} weights {whose}, got "
            f"{asked['token_format']}"
        )
    return {"weight_format": weight_format, "token_format": str(asked["token_format"])}


def replace_members(method: Any, replacements: type, layers: EngineLayers) -> None:
    """Make `method`, an engine's object of any class, answer with the members of `replacements` in place of its own.

    It gets a subclass of its class with these members: mixed in as a base, `replacements` would change the layout of
    its objects, which Python refuses. The subclass has the name of its class, since loaders of weights compare names.
    `moe_runtime_layers` is `layers`, and `moe_runtime_experts` None.
    """
    kind = type(method)
    members = {name: value for name, value in vars(replacements).items() if not name.startswith("__")}
    method.__class__ = type(kind.__name__, (kind,), {"__qualname__": kind.__qualname__, **members})
    method.moe_runtime_layers = layers
    method.moe_runtime_experts = None


def computes_own_experts(stated: EngineLayer, share: TokenShare, group_size: int) -> bool:
    """Whether no layer needs another rank's: all ranks hold the same tokens, and each has at least `top_k` experts."""
    return share.ranks == group_size and stated.num_experts // group_size >= stated.top_k


class EngineExperts:
    """Computes the routed experts of one layer in place of the engine's kernels.

    Args:
        layer: the layer, with the ids of the engine's router (`router_ids`).
        group: it and its kin.
        share: which tokens this rank brings to it.
        routes: where the routes of each call are recorded; None for nowhere.
        name: of the layer, for messages.

    Attributes:
        layer, share, routes, name: as above.
        num_experts: of the engine's layer.
        zeros_are_none: whether a route whose weight is 0 counts as none. Engines give routes to experts that compute
            nothing, as LongCat-Flash has them, the id of a real expert and this weight.
    """

    def __init__(
        self,
        layer: MoELayer,
        group: _Group,
        share: TokenShare,
        routes: RecordedRoutes | None = None,
        name: str = "",
    ) -> None:
        self.layer = layer
        self.share = share
        assert layer.router_ids is not None
        self.num_experts = layer.router_ids.num_experts
        self.routes = routes
        self.name = name
        self.zeros_are_none = False
        self._group = group

    @property
    def is_partial(self) -> bool:
        """Whether results are parts, which the engine has to sum over the ranks of `share`."""
        return self.share.ranks > 1

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
            bf16 `[T, H]`: complete, or what this rank adds to the engine's sum where `is_partial`.

        Raises:
            ValueError: a wrong argument, or too many tokens; the peers get `PeerAbortedError`.
        """
        if self._group.cold:
            self._group.warm_up()
        share, parts, num_tokens = self.share, self.share.parts, x.shape[0]
        if _given is not None:
            with abort_peers_on_error(self.layer.context):
                topk_ids, topk_weights = _given.take(self, topk_ids)
        if self.zeros_are_none:
            topk_ids = topk_ids.masked_fill(topk_weights == 0, -1)
        if self.routes is not None:
            most = self.routes.ids.shape[1]
            with abort_peers_on_error(self.layer.context):
                for ids, weights in zip(topk_ids.split(most), topk_weights.float().split(most), strict=True):
                    self.routes.add(ids, weights)
        if parts > 1:
            mine = part_of(num_tokens, share.ranks, share.rank)
            x, topk_ids, topk_weights = x[mine], topk_ids[mine], topk_weights[mine]
        ids, weights = topk_ids.contiguous(), topk_weights.float().contiguous()
        steps: tuple[int, int | None] = 1, None
        if most_tokens is not None:
            steps = steps_for(max(1, ceil_div(most_tokens, parts)), self.layer.config.max_tokens_per_rank)
        y_TH = run_in_steps(self.layer, x, ids, weights, *steps)
        return y_TH if parts == 1 else place_part(y_TH, num_tokens, mine)


def _ends(experts: Sequence[int]) -> str:
    """The first and the last of some ids, and how many there are."""
    return f"{experts[0]} .. {experts[-1]} ({len(experts)})" if len(experts) else "none"
