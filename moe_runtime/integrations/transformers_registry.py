"""Registers moe_runtime where transformers looks for implementations of experts and of expert parallelism.

`import moe_runtime.integrations.transformers` registers both under the name `moe_runtime`:

- `model.set_experts_implementation("moe_runtime")` runs a model's experts in its own process.
- `DistributedConfig(ep_size=N, ep_implementation="moe_runtime")` spreads them over ranks while the model is loaded.

The layer of an experts module is made in its first call, with the formats and limits of `experts_settings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdRef

from moe_runtime.checkpoints.loading import FRESH, QuantBuffer, QuantBuffers
from moe_runtime.config import Auto, CombineFormatName, FormatName, MoELayerConfig, ParallelConfig, WeightFormatName
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import abort_peers, abort_peers_on_error
from moe_runtime.integrations.expert_modules import (
    DOWN,
    UNGATED_WEIGHTS,
    WEIGHTS,
    DescribedExperts,
    bias_of,
    describe_experts,
    routes_of,
)
from moe_runtime.integrations.layer_settings import (
    DEFAULT_MAX_TOKENS,
    LayerSettings,
    checked_settings,
    context_of,
    layer_config,
)
from moe_runtime.integrations.shared_tokens import gather_parts, part_of, run_in_steps, steps_for
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.layer import MoELayer
from moe_runtime.support.arguments import check_integer, check_kind, describe
from moe_runtime.support.compiling import not_compiled

NAME = "moe_runtime"
"""What `set_experts_implementation` and `ep_implementation` are given."""

OF_THE_MODEL = ("router", "shared_expert")
"""Fields of `MoELayerConfig` that no layer here has: a model keeps its own."""

_current = LayerSettings()


def experts_settings(
    *,
    max_tokens_per_rank: int = DEFAULT_MAX_TOKENS,
    token_format: FormatName | Auto = "bf16",
    weight_format: WeightFormatName | Auto | None = None,
    combine_format: CombineFormatName = "bf16",
    parallel: ParallelConfig | None = None,
    **overrides: Any,
) -> AbstractContextManager[None]:
    """Inside, experts that transformers runs by the name `moe_runtime` get layers with these settings.

    They count for a module that is called for the first time inside, or, for expert parallelism, for a model that is
    loaded inside; equal on all ranks. Outside of it the defaults count. They are those of the process, in all threads.

    Args:
        max_tokens_per_rank: most tokens of a rank in one step. A call with more is split where every rank has the same
            tokens or there is one rank, and refused elsewhere.
        token_format, weight_format, combine_format: as in `MoELayerConfig`. There is no checkpoint here: `token_format`
            is bf16 if `auto`, and `weight_format` is `token_format` if None or `auto`.
        parallel: transport (between ranks), engine and time limits; the defaults of `ParallelConfig` if None.
        overrides: further fields of `MoELayerConfig`, such as `token_buckets`; no router and no shared expert, of which
            the model has its own.

    Raises `ValueError` naming a wrong argument; what does not fit a model is refused when its first layer is made.
    """
    check_integer("max_tokens_per_rank", max_tokens_per_rank, 1, 2**31 - 1)
    check_overrides(overrides)
    fields = {
        "max_tokens_per_rank": max_tokens_per_rank,
        "token_format": token_format,
        "weight_format": weight_format,
        "combine_format": combine_format,
        **overrides,
    }
    return _in_force(checked_settings(parallel, fields))


def check_overrides(overrides: Mapping[str, object]) -> None:
    """Raise `ValueError` for a field that is not the layer's: one with a shared expert would add random weights."""
    for name in OF_THE_MODEL:
        if overrides.get(name) is not None:
            raise ValueError(f"{name}: expected none, the model keeps its own, got {describe(overrides[name])}")


@contextmanager
def _in_force(settings: LayerSettings) -> Iterator[None]:
    global _current
    before, _current = _current, settings
    try:
        yield
    finally:
        _current = before


def close_experts(model: nn.Module) -> None:
    """Free the layers that were made for the experts of `model` and the memory between ranks. Collective.

    The next call of the model makes them again. Models without such layers are left alone.
    """
    check_kind("model", model, nn.Module)
    contexts: dict[int, ExpertParallelContext] = {}
    for module in model.modules():
        for built in _BUILT.pop(module, {}).values():
            contexts[id(built.shared.context)] = built.shared.context
    for context in contexts.values():
        context.close()


def layer_fields(described: DescribedExperts, top_k: int, fields: Mapping[str, Any]) -> MoELayerConfig:
    """The config of the layer of an experts module. Raises `ValueError` where `fields` contradict the module."""
    return layer_config(described.name, {**described.fields, "top_k": top_k}, fields)


class _Shared:
    """What the layers of one model share on this rank. A context of its own: an error of a model is no other's."""

    def __init__(self, model_config: object, settings: LayerSettings, context: ExpertParallelContext) -> None:
        # Both are kept: their ids are in the key of `_SHARED`.
        self.model_config, self.settings, self.context = model_config, settings, context
        if context.world_size == 1:
            finalize(self, context.close)

    @property
    def usable(self) -> bool:
        """False for a lone rank after an error, whose next call starts anew; ranks with peers end together."""
        return not self.context.closed and not (self.context.failed and self.context.world_size == 1)


@dataclass
class _Built:
    """The layer of an experts module, and which weights it has."""

    shared: _Shared
    layer: MoELayer
    num_experts: int
    identity_experts: int
    weights: tuple[object, ...] = ()


_BUILT: WeakKeyDictionary[nn.Module, dict[int, _Built]] = WeakKeyDictionary()
"""The layers of each module by their top-k."""
_SHARED: WeakValueDictionary[tuple[object, ...], _Shared] = WeakValueDictionary()


def _run(
    module: Any,
    x_TH: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    mesh: Any = None,
    settings: LayerSettings | None = None,
    most_tokens: int | None = None,
) -> torch.Tensor:
    """The experts of `module`, or of all ranks of `mesh`, on this rank's tokens.

    `most_tokens` is the number of tokens of the rank that has most; None where it is not known.
    """
    _check_inputs(module, x_TH, topk_weights)
    built = _layer_of(module, topk_idx.shape[-1], mesh, settings or _current)
    layer, limit = built.layer, built.layer.config.max_tokens_per_rank
    if most_tokens is None and x_TH.shape[0] > limit:
        with abort_peers_on_error(layer.context):
            raise ValueError(
                f"max_tokens_per_rank: {limit}, got {x_TH.shape[0]} tokens; load the model inside "
                "experts_settings(max_tokens_per_rank=...) with more"
            )
    steps = (1, None) if most_tokens is None else steps_for(most_tokens, limit)
    topk_idx, own_TH = routes_of(built.num_experts, built.identity_experts, x_TH, topk_idx, topk_weights)
    y_TH = run_in_steps(layer, x_TH, topk_idx, topk_weights, *steps)
    return y_TH if own_TH is None else y_TH + own_TH


def _check_inputs(module: Any, x_TH: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Raise `ValueError` for what no layer takes; peers that wait in a layer of the module get `PeerAbortedError`."""
    problem = ""
    if torch.is_grad_enabled() and (x_TH.requires_grad or topk_weights.requires_grad):
        problem = (
            "hidden_states: the experts of moe_runtime are for inference, expected a call inside torch.no_grad() or "
            "torch.inference_mode(), got an input that requires grad"
        )
    elif x_TH.dtype != torch.bfloat16:
        problem = f"hidden_states: the experts of moe_runtime take torch.bfloat16, got {x_TH.dtype}"
    if problem:
        error = ValueError(problem)
        for built in _BUILT.get(module, {}).values():
            abort_peers(built.shared.context, error)
        raise error


def _layer_of(module: Any, top_k: int, mesh: Any, settings: LayerSettings) -> _Built:
    by_top_k = _BUILT.setdefault(module, {})
    built = by_top_k.get(top_k)
    if built is None or not built.shared.usable:
        built = by_top_k[top_k] = _build(module, top_k, mesh, settings)
    weights = _weights_of(module)
    if built.weights != weights:
        name = type(module).__name__
        described = describe_experts(module, name)
        described.check_weights()
        local = range(getattr(module, DOWN).shape[0])
        described.load_into(built.layer, local, _in_place(described, built.layer.config))
        built.weights = weights
    return built


def _build(module: Any, top_k: int, mesh: Any, settings: LayerSettings) -> _Built:
    name = type(module).__name__
    described = describe_experts(module, name)
    ranks = 1 if mesh is None else mesh.size()
    config = layer_fields(described.of_ranks(ranks), top_k, settings.fields)
    device = getattr(module, DOWN).device
    group = None if mesh is None else mesh.get_group().group_name
    sizes = config.hidden_size, config.num_experts, top_k
    key = id(module.config), id(settings), str(device), group, *sizes
    shared = _SHARED.get(key)
    if shared is None or not shared.usable:
        shared = _SHARED[key] = _Shared(module.config, settings, context_of(settings.parallel, mesh, device))
    layer = MoELayer(config, shared.context, router=False)
    return _Built(shared, layer, config.num_experts, described.identity_experts)


def _weights_of(module: Any) -> tuple[object, ...]:
    """Which weights the parameters hold: changes where they are replaced or written to."""
    found: list[object] = []
    names = dict.fromkeys((*WEIGHTS, *UNGATED_WEIGHTS))
    weights = [getattr(module, key, None) for key in (*names, *map(bias_of, names))]
    for weight in (*weights, getattr(getattr(module, "post_expert_norm", None), "weight", None)):
        if weight is not None:
            version = 0 if weight.is_inference() else weight._version
            # By identity, too: memory of a parameter that is gone may be that of another.
            found += [WeakIdRef(weight), weight.data_ptr(), version, weight.dtype, weight.device]
    return tuple(found)


def _in_place(described: DescribedExperts, config: MoELayerConfig) -> QuantBuffers:
    """Buffers that are the module's parameters where a layer reads them as they are, so that nothing is copied."""
    if config.weight_format != "bf16" or described.transposed:
        return FRESH
    gate_up, down = (getattr(described.module, key) for key in described.weights)
    return QuantBuffer.over(gate_up), QuantBuffer.over(down)


@not_compiled
def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls instead of the forward of an experts module: bf16 `[T, H]`, for `T` tokens."""
    return _run(self, hidden_states, top_k_index, top_k_weights, most_tokens=hidden_states.shape[0])


def _ep_implementation(base: Any) -> Any:
    """The subclass of transformers' `EPImplementation`."""

    class MoERuntimeEP(base):
        """Tokens go to the ranks of their experts and back in the steps of a `MoELayer`.

        The ranks of a tensor-parallel group hold the same tokens: each takes a part, and all gather the results.
        """

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._experts, self._settings = experts, _current

        @not_compiled
        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            num_tokens, tp_size = hidden_states.shape[0], self.tp_mesh.size()
            mine = part_of(num_tokens, tp_size, self.tp_mesh.get_local_rank())
            y_TH = _run(
                self._experts,
                hidden_states[mine],
                top_k_index[mine],
                top_k_weights[mine],
                self.ep_mesh,
                self._settings,
                ceil_div(num_tokens, tp_size) if self.shares_batch else None,
            )
            return y_TH if tp_size == 1 else gather_parts(y_TH, num_tokens, tp_size, self._gather)

        def _gather(self, y_TH: torch.Tensor) -> torch.Tensor:
            whole = y_TH.new_empty(y_TH.shape[0] * self.tp_mesh.size(), y_TH.shape[1])
            dist.all_gather_into_tensor(whole, y_TH, group=self.tp_mesh.get_group())
            return whole

    return MoERuntimeEP


def register() -> None:
    """Register both implementations, as far as the installed transformers has registries; without it do nothing."""
    with suppress(ImportError):
        import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    with suppress(ImportError):
        module = import_module("transformers.distributed.expert_parallel")
        module.EPImplementationInterface.register(NAME, _ep_implementation(module.EPImplementation))
