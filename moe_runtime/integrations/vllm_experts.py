"""vLLM's names for what `engine_layers` needs; written for the signatures of vLLM 0.33.0.

vLLM lets classes from outside replace its `PluggableLayer`s. `install` replaces `RoutedExperts`, which holds the
routed experts of a MoE layer, by a subclass that differs in one method: the quantization method that vLLM chooses gets
the members of `RunsExperts`. vLLM then creates and loads weights as ever. They are taken over in place of being
reordered for a kernel of vLLM. In each step the method gets vLLM's top-k, and returns results that need no reduction.
"""

from __future__ import annotations

import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from moe_runtime.config import ActivationConfig
from moe_runtime.integrations.engine_layers import (
    EngineExperts,
    EngineLayer,
    EngineLayers,
    TokenShare,
    replace_members,
)
from moe_runtime.integrations.engine_weights import read_weights
from moe_runtime.integrations.layer_settings import LayerSettings
from moe_runtime.kernels.formats.number_formats import ceil_div

ROUTED_EXPERTS = {
    "RoutedExperts": "vllm.model_executor.layers.fused_moe.routed_experts",
    "GptOssRoutedExperts": "vllm.model_executor.models.gpt_oss",
    "TransformersRoutedExperts": "vllm.model_executor.models.transformers.moe",
}
"""Classes that are replaced, and their modules. vLLM looks a replacement up by the name of the class itself."""

_LOG = logging.getLogger(__name__)


def install(settings: LayerSettings) -> None:
    """Replace vLLM's classes of routed experts in this process.

    Raises `ImportError` or `AttributeError` where vLLM has not all of them.
    """
    layers = EngineLayers(settings)
    for name, module in ROUTED_EXPERTS.items():
        original = getattr(import_module(module), name)
        original.register_oot(_taking_over(original, layers), name=name)
    # Not information: engines show only that of their own loggers.
    _LOG.warning("MoE layers of vLLM run in moe_runtime, with %s", settings)


def _taking_over(original: Any, layers: EngineLayers) -> Any:
    class TakenOver(original):
        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            return taken_over(super()._get_quant_method(prefix, quant_config, moe_config), layers)

    TakenOver.__name__ = TakenOver.__qualname__ = f"MoERuntime{original.__name__}"
    return TakenOver


def taken_over(method: Any, layers: EngineLayers) -> Any:
    """The quantization method `method` of a layer, with what it computes replaced.

    It stays an instance of its class, whose name and attributes tell vLLM how weights are loaded.

    Raises `ValueError` for a method that quantizes weights as they are loaded, which would be lost.
    """
    if hasattr(method, "requantization_source"):
        name = type(method).__name__
        raise ValueError(f"quantization: expected that of the checkpoint, got {name}, which quantizes weights")
    replace_members(method, RunsExperts, layers)
    # An attribute of some methods, a class attribute of others: weights in the layout of a kernel of vLLM are refused.
    method.supports_pre_processed_weights = False
    return method


class RunsExperts:
    """What replaces members of an object of vLLM's `FusedMoEMethodBase`."""

    moe: Any
    moe_kernel: Any
    moe_runtime_layers: EngineLayers
    moe_runtime_experts: EngineExperts | None

    supports_eplb = False
    """vLLM refuses to balance experts of methods that say so."""
    is_monolithic = False
    """vLLM's router chooses the experts."""
    supports_internal_mk = True
    """vLLM does not gather tokens of other ranks before, nor scatter results after."""
    mk_can_overlap_shared_experts = False
    topk_indices_dtype = torch.int32
    skip_forward_padding = False
    has_unpadded_output = False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """The sizes as they are: weights are not padded."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM reads it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Take the experts of `layer` over. Collective over vLLM's expert-parallel group."""
        self.moe_runtime_experts = build(self.moe_runtime_layers, layer, self.moe)
        # What vLLM asks a method's kernel. A model that sums results itself asks for partial ones.
        reduced = not self.moe.skip_final_all_reduce
        self.moe_kernel = SimpleNamespace(
            output_is_reduced=lambda: reduced, fused_experts=SimpleNamespace(consumes_expert_mask=False)
        )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """bf16, the shape of `x`: the weighted sum over each token's experts. vLLM runs the shared experts."""
        assert self.moe_runtime_experts is not None
        return self.moe_runtime_experts(x, topk_ids, topk_weights, most_tokens(self.moe, x.shape[0]))


def build(layers: EngineLayers, layer: Any, moe: Any) -> EngineExperts:
    """The experts of vLLM's `RoutedExperts` `layer`, whose `FusedMoEConfig` is `moe`.

    Raises `ValueError` naming the layer for a setting of vLLM that the adapter has no way to run.
    """
    name, parallel = layer.layer_name, moe.moe_parallel_config
    refusals = {
        "--enable-expert-parallel: expected it, since experts are not split": parallel.tp_size > 1,
        "--prefill-context-parallel-size: expected 1": parallel.pcp_size > 1,
        "--enable-lora: expected a model without": moe.is_lora_enabled,
        "apply_router_weight_on_input: expected a model without": layer.apply_router_weight_on_input,
        f"--dtype: expected bfloat16, got {moe.in_dtype}": moe.in_dtype != torch.bfloat16,
    }
    for refusal, applies in refusals.items():
        if applies:
            raise ValueError(f"{name}: {refusal}")
    activation = activation_of(layer, name)
    weights = read_weights(
        layer,
        name,
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition,
        activation=activation,
    )
    distributed = import_module("vllm.distributed")
    share, group = TokenShare(), None
    if parallel.ep_size > 1:
        group = distributed.get_ep_group().device_group
        tensor_parallel = distributed.get_tp_group()
        if tensor_parallel.world_size > 1 and not parallel.is_sequence_parallel:
            gather = None if moe.skip_final_all_reduce else _gather_over(tensor_parallel)
            share = TokenShare(tensor_parallel.world_size, tensor_parallel.rank_in_group, gather)
    stated = EngineLayer(
        name=name,
        num_experts=layer.global_num_experts,
        top_k=layer.top_k,
        activation=activation,
        local_experts=local_experts(layer),
        max_tokens=ceil_div(moe.max_num_tokens, parallel.sp_size),
    )
    return layers.build(stated, weights, group, share)


def _gather_over(group: Any) -> Any:
    """Concatenation over the ranks of a `GroupCoordinator` of vLLM."""
    return lambda rows: group.all_gather(rows, dim=0)


def local_experts(layer: Any) -> list[int]:
    """Ids of the experts that vLLM's `layer` holds, in the order of its weights."""
    if layer._expert_map is None:
        return list(range(layer.local_num_experts))
    places = layer._expert_map.tolist()
    return sorted((expert for expert, place in enumerate(places) if place >= 0), key=lambda expert: places[expert])


def activation_of(layer: Any, name: str) -> ActivationConfig:
    """The formula of vLLM's `MoEActivation`, as `apply_moe_activation` computes it.

    Raises `ValueError` naming the layer for another activation.
    """
    kind = layer.activation.value
    limit, alpha, beta = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
    if kind == "silu":
        return ActivationConfig(limit=limit)
    if kind == "swigluoai" and (limit, alpha, beta) in ((None, None, None), (7.0, 1.702, 1.0)):
        return ActivationConfig(order="interleaved", alpha=1.702, limit=7.0, up_offset=1.0)
    # vLLM reads no limit for this one: https://github.com/vllm-project/vllm, fused_moe/activation.py.
    if kind == "swiglustep" and limit in (None, 7.0) and (alpha, beta) in ((None, None), (1.0, 0.0)):
        return ActivationConfig(limit=7.0, limit_on="function")
    if kind == "swigluoai_uninterleave" and limit is not None:
        return ActivationConfig(alpha=1.0 if alpha is None else alpha, limit=limit, up_offset=beta or 0.0)
    given = f"swiglu_limit={limit}, swiglu_alpha={alpha}, swiglu_beta={beta}"
    raise ValueError(
        f"{name}: activation: expected silu, swigluoai, swiglustep with a limit of 7, or swigluoai_uninterleave with "
        f"any, got {kind} ({given})"
    )


def most_tokens(moe: Any, num_tokens: int) -> int | None:
    """Tokens of the rank that has most in this step, as far as all ranks know it; None where they do not."""
    parallel = moe.moe_parallel_config
    if parallel.dp_size == 1 and not parallel.is_sequence_parallel:
        return num_tokens
    metadata = import_module("vllm.forward_context").get_forward_context().dp_metadata
    if metadata is None:
        return None
    return ceil_div(int(metadata.num_tokens_across_dp_cpu.max()), parallel.sp_size)
