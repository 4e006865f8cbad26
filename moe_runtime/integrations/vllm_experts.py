"""vLLM's names for what `engine_layers` needs; written for the signatures of vLLM 0.29 to 0.33.

vLLM lets classes from outside replace its `PluggableLayer`s. `install` replaces `RoutedExperts`, which holds the
routed experts of a MoE layer, by a subclass that differs in one method: the quantization method that vLLM chooses gets
the members of `RunsExperts`. vLLM then creates and loads weights by itself. They are taken over in place of being
reordered for a kernel of vLLM. In each step the method gets vLLM's top-k, and returns results. Where ranks
hold the same tokens, each computes its own experts for all of them, and vLLM sums the results.

vLLM compiles models with torch.compile. On GPUs a whole MoE layer is an operation of vLLM that is not looked into; on
CPUs it is, and finds the operation `moe_runtime::vllm_experts` here.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import library

from moe_runtime.config import ActivationConfig
from moe_runtime.integrations import vllm_config
from moe_runtime.integrations.engine_layers import EngineExperts, EngineLayer, EngineLayers, TokenShare, replace_members
from moe_runtime.integrations.engine_report import report
from moe_runtime.integrations.engine_weights import read_weights
from moe_runtime.integrations.layer_settings import LayerSettings
from moe_runtime.kernels.formats.number_formats import ceil_div

ROUTED_EXPERTS = {
    "RoutedExperts": "vllm.model_executor.layers.fused_moe.routed_experts",
    "GptOssRoutedExperts": "vllm.model_executor.models.gpt_oss",
    "TransformersRoutedExperts": "vllm.model_executor.models.transformers.moe",
}
"""Classes that are replaced, and their modules. vLLM looks a replacement up by the name of the class itself."""

RELOAD, BEGIN_RELOAD = "vllm.model_executor.model_loader.reload", "initialize_layerwise_reload"
"""Where vLLM begins to load weights into a model again."""
RELOAD_IN_PLACE = "reload_weights"
"""Of its module `inplace`: may also copy weights that are in the layout of kernels already."""

NOT_IN_PLACE = "since the experts are in the layout of moe_runtime's kernels"
ONLINE = "OnlineMoEMethodBase"
"""The base of vLLM's methods that quantize weights as they are loaded."""


def install(settings: LayerSettings) -> None:
    """Replace vLLM's classes of routed experts in this process, and what belongs to it of its engine.

    Raises `ValueError` for another version of vLLM, `ImportError` or `AttributeError` where vLLM has not all that is
    replaced.
    """
    vllm_config.check_version(import_module("vllm").__version__)
    layers = EngineLayers(settings)
    vllm_config.install(settings)
    report_models()
    refuse_reloads()
    for name, module in ROUTED_EXPERTS.items():
        original = getattr(import_module(module), name)
        original.register_oot(_taking_over(original, layers), name=name)


def report_models() -> None:
    """Have vLLM's loaders report each model that they load in this process."""
    routed_experts = import_module(ROUTED_EXPERTS["RoutedExperts"]).RoutedExperts

    def reported(load_model: Any) -> Any:
        def load_and_report(self: Any, *given: Any, **named: Any) -> Any:
            model = load_model(self, *given, **named)
            report(model, routed_experts, "vLLM", vllm_config.LOG)
            return model

        return load_and_report

    loader = import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    vllm_config.replace_method(loader, "load_model", reported)


def refuse_reloads() -> None:
    """Have vLLM refuse in this process to load weights again, before it has changed any, where graphs may be captured.

    It begins by `initialize_layerwise_reload`, which its modules import by name. Where vLLM has no such function,
    layers refuse by themselves, when their turn comes. Weights in the layout of vLLM's kernels are refused in any case.
    """

    def refusing(begin: Any) -> Any:
        def checked(model: Any, *given: Any, **named: Any) -> Any:
            for layer, method in _layers_here(model):
                check_reload(layer, method)
            return begin(model, *given, **named)

        return checked

    def refusing_layouts(reload: Any) -> Any:
        def checked(*given: Any, **named: Any) -> Any:
            arguments = inspect.signature(reload).bind(*given, **named).arguments
            for layer, _ in () if arguments.get("is_checkpoint_format", True) else _layers_here(arguments["model"]):
                raise ValueError(f"{layer.layer_name}: reload_weights: expected is_checkpoint_format, {NOT_IN_PLACE}")
            return reload(*given, **named)

        return checked

    _replace_function(RELOAD, BEGIN_RELOAD, refusing)
    _replace_function(f"{RELOAD}.inplace", RELOAD_IN_PLACE, refusing_layouts)


def _layers_here(model: Any) -> Iterator[tuple[Any, Any]]:
    """The layers of a model of vLLM that are taken over, and their methods."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(getattr(method, "moe_runtime_layers", None), EngineLayers):
            yield layer, method


def _replace_function(module: str, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of a module of vLLM in all modules that have it; nothing where vLLM has none."""
    try:
        original = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return
    for found, holder in list(sys.modules.items()):
        if found.startswith("vllm.") and vars(holder).get(name) is original:
            vllm_config.replace_method(holder, name, wrap)


def check_reload(layer: Any, method: Any) -> None:
    """Raise `ValueError` for a layer with experts of which graphs may be captured; `method` is its `RunsExperts`."""
    if method.moe_runtime_experts is not None and method.moe_runtime_capture_sizes:
        raise ValueError(
            f"{layer.layer_name}: reload_weights: expected none, since CUDA graphs would go on with the experts "
            "before; start vLLM with --enforce-eager, or anew"
        )


def _taking_over(original: Any, layers: EngineLayers) -> Any:
    class TakenOver(original):
        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            check_layer(self, moe_config)
            config = import_module("vllm.config").get_current_vllm_config()
            return taken_over(super()._get_quant_method(prefix, quant_config, moe_config), layers, config)

        @functools.wraps(original.weight_loader)  # whose attributes and signature vLLM reads
        def weight_loader(self, param: Any, *given: Any, **named: Any) -> Any:
            if param.numel() == 0 and getattr(self.quant_method, "moe_runtime_experts", None) is not None:
                raise ValueError(
                    f"{self.layer_name}: load_weights: expected reload_weights, {NOT_IN_PLACE}; other weights of the "
                    "model may have changed"
                )
            return super().weight_loader(param, *given, **named)

    TakenOver.__name__ = TakenOver.__qualname__ = f"MoERuntime{original.__name__}"
    return TakenOver


def taken_over(method: Any, layers: EngineLayers, config: Any = None) -> Any:
    """The quantization method `method` of a layer, with what it computes replaced. `config` is vLLM's `VllmConfig`.

    It stays an instance of its class, whose name and attributes tell vLLM how weights are loaded.

    Raises `ValueError` for a method that quantizes weights as they are loaded, which would be lost.
    """
    if any(kind.__name__ == ONLINE for kind in type(method).__mro__):
        name = type(method).__name__
        raise ValueError(f"quantization: expected the checkpoint's, got {name}, which quantizes weights")
    replace_members(method, RunsExperts, layers)
    if config is not None:
        method.moe_runtime_engine = config.instance_id
        method.moe_runtime_capture_sizes = vllm_config.captured_sizes(config)
        method.moe_runtime_zeros_are_none = vllm_config.has_zero_experts(config)
    # An attribute of some methods, a class attribute of others: weights in the layout of a kernel of vLLM are refused.
    method.supports_pre_processed_weights = False
    return method


class _Kernel:
    """What vLLM asks of the kernel of a method."""

    fused_experts = SimpleNamespace(consumes_expert_mask=False)

    def __init__(self, *, reduced: bool) -> None:
        self._reduced = reduced

    def output_is_reduced(self) -> bool:
        return self._reduced


class RunsExperts:
    """What replaces members of an object of vLLM's `FusedMoEMethodBase`."""

    moe: Any
    moe_kernel: Any
    moe_runtime_layers: EngineLayers
    moe_runtime_experts: EngineExperts | None
    moe_runtime_engine: str = ""
    moe_runtime_capture_sizes: Sequence[int] = ()
    moe_runtime_zeros_are_none: bool = False

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
        """Take the experts of `layer` over. Collective over vLLM's expert-parallel group.

        Raises `ValueError` where vLLM loads weights again and may have captured graphs, which would keep the old ones.
        """
        check_reload(layer, self)
        engine, sizes = self.moe_runtime_engine, self.moe_runtime_capture_sizes
        self.moe_runtime_experts = build(self.moe_runtime_layers, layer, self.moe, engine, sizes)
        self.moe_runtime_experts.zeros_are_none = self.moe_runtime_zeros_are_none
        # A model that sums results itself asks vLLM to leave them as they are.
        partial = self.moe_runtime_experts.is_partial
        self.moe_kernel = _Kernel(reduced=not (partial or self.moe.skip_final_all_reduce))

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
        if torch.compiler.is_compiling():
            return OPERATION(x, topk_weights, topk_ids, layer.layer_name)
        assert self.moe_runtime_experts is not None
        return self.moe_runtime_experts(x, topk_ids, topk_weights, most_tokens(self.moe, x.shape[0]))


def _run_by_name(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    """What `RunsExperts.apply` returns for the layer of this name of the engine that is in a step."""
    layer = import_module("vllm.forward_context").get_forward_context().no_compile_layers[layer_name].routed_experts
    return layer.quant_method.apply(layer, x, topk_weights, topk_ids)


OPERATION: Any = library.custom_op(
    "moe_runtime::vllm_experts",
    _run_by_name,
    mutates_args=(),
    schema="(Tensor x, Tensor topk_weights, Tensor topk_ids, str layer_name) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
"""The experts of a layer, for torch.compile. The result is new memory, whatever the arguments lie in."""


@OPERATION.register_fake
def _(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def check_layer(layer: Any, moe: Any) -> None:
    """Raise `ValueError` naming vLLM's `RoutedExperts` `layer` for what the adapter has no way to run.

    `moe` is its `FusedMoEConfig`. Whole engines are refused before (`vllm_config.refusals`), where they are made from
    options.
    """
    name, parallel = layer.layer_name, moe.moe_parallel_config
    refusals = {
        "--enable-expert-parallel: expected it, since experts are not split": parallel.tp_size > 1,
        "--prefill-context-parallel-size: expected 1": parallel.pcp_size > 1,
        "--enable-eplb: expected a run without": parallel.enable_eplb,
        "--enable-lora: expected a run without": moe.is_lora_enabled,
        "apply_router_weight_on_input: expected a model without": layer.apply_router_weight_on_input,
        f"--dtype: expected bfloat16, got {moe.in_dtype}": moe.in_dtype != torch.bfloat16,
    }
    for refusal, applies in refusals.items():
        if applies:
            raise ValueError(f"{name}: {refusal}")
    activation_of(layer, name)


def build(
    layers: EngineLayers, layer: Any, moe: Any, engine: str = "", capture_sizes: Sequence[int] = ()
) -> EngineExperts:
    """The experts of vLLM's `RoutedExperts` `layer`, whose `FusedMoEConfig` is `moe`.

    `engine` tells apart engines of one process; the layer gets token buckets for `capture_sizes`.

    Raises `ValueError` naming the layer for a setting of vLLM that the adapter has no way to run.
    """
    check_layer(layer, moe)
    name, parallel = layer.layer_name, moe.moe_parallel_config
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
            share = TokenShare(tensor_parallel.world_size, tensor_parallel.rank_in_group)
    most = ceil_div(moe.max_num_tokens, parallel.sp_size)
    stated = EngineLayer(
        name=name,
        num_experts=layer.global_num_experts,
        top_k=layer.top_k,
        activation=activation,
        local_experts=local_experts(layer),
        max_tokens=most,
        token_buckets=vllm_config.buckets_of([ceil_div(size, parallel.sp_size) for size in capture_sizes], most),
        engine=engine,
    )
    return layers.build(stated, weights, group, share)


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
    if limit is not None and limit <= 0:
        raise ValueError(f"{name}: swiglu_limit: expected a positive one, got {limit}")
    if kind == "silu":
        return ActivationConfig(limit=limit)
    # vLLM's kernel reads none of them.
    if kind == "swigluoai" and limit in (None, 7.0) and alpha in (None, 1.702) and beta in (None, 1.0):
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
