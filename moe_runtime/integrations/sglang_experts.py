"""SGLang's names for what `engine_layers` needs; run in SGLang 0.5.23 on CPUs.

SGLang lets a plugin hook its functions. `install` hooks `create_moe_dispatcher`, which each MoE layer calls once, after
it has created its weights and before they are loaded. The layer's quantization method gets the members of
`RunsExperts`, and its dispatcher passes tokens on as they come.

Who sums results depends on `--moe-a2a-backend`:

- `none`: all ranks of the expert-parallel group hold the same tokens, and SGLang sums their partial results later, in
  one of several places. Each rank computes its own experts for all tokens here. Where a rank has fewer experts than a
  token, each sends a part of the tokens, and leaves the rows of the others 0.
- `flashinfer`: each rank has its own tokens, and SGLang expects complete results. Nothing of FlashInfer's exchange is
  used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, Literal

import torch

from moe_runtime.config import ActivationConfig
from moe_runtime.integrations.engine_layers import EngineExperts, EngineLayer, EngineLayers, TokenShare, replace_members
from moe_runtime.integrations.engine_report import report
from moe_runtime.integrations.engine_weights import read_weights
from moe_runtime.integrations.layer_settings import LayerSettings
from moe_runtime.kernels.formats.number_formats import ceil_div

HOOKED = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
LOADED = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"

MAX_TOKENS = 8192
"""Tokens of a call that a step holds, unless the settings say otherwise; calls with more are split."""

RUNNERS = ("triton", "marlin", "deep_gemm")
"""Values of `--moe-runner-backend` with which SGLang loads weights in the layout and sizes of the checkpoint."""

LOADED_LATER = ("sharded_state", "presharded", "remote_instance")
"""Values of `--load-format` with which SGLang processes weights before it has loaded them, or never."""

NO_UPDATES = "expected no update of weights, the experts run in moe_runtime"
_LOG = logging.getLogger(__name__)


def install(settings: LayerSettings) -> None:
    """Hook the making of SGLang's dispatchers in this process, and its loading of models, which are reported.

    SGLang applies hooks once all plugins are loaded.
    """
    hooks = import_module("sglang.srt.plugins.hook_registry")
    layers = EngineLayers(settings)

    def around(original: Any, moe_runner_config: Any, quant_method: Any) -> Any:
        return take_over(layers, moe_runner_config, quant_method)

    def after(_: Any, runner: Any) -> None:
        experts = import_module("sglang.srt.layers.moe.fused_moe_triton.layer").FusedMoE
        mark_zero_experts(runner.model)
        report(runner.model, experts, "SGLang", _LOG)

    hooks.HookRegistry.register(HOOKED, around, hooks.HookType.AROUND)
    hooks.HookRegistry.register(LOADED, after, hooks.HookType.AFTER)
    # Not information: engines show only that of their own loggers.
    _LOG.warning("MoE layers of SGLang run in moe_runtime, with %s", settings)


def take_over(layers: EngineLayers, moe_runner_config: Any, quant_method: Any) -> Any:
    """The dispatcher of a layer of SGLang, whose `quant_method` computes here from now on.

    Raises `ValueError` naming the layer for a setting of SGLang that the adapter has no way to run.
    """
    config = moe_runner_config
    check(config.layer, config)
    activation_of(config, name_of(config.layer), False)  # Before any weight is loaded.
    replace_members(quant_method, RunsExperts, layers)
    a2a, on_cpu = import_module("sglang.srt.layers.moe").get_moe_a2a_backend(), _lies_on_cpu(config.layer)
    if a2a.is_flashinfer() and not on_cpu:
        # Else some models apply it to complete results, and others leave it to the layer. On CPUs top-k has no way.
        quant_method.fuse_routed_scaling_factor_in_topk = True
    # SGLang looks for it before it writes weights of a running model, and answers with it.
    config.layer._derived_weight_cache_error = f"{name_of(config.layer)}: {NO_UPDATES}"
    return _passing_dispatcher()


def _lies_on_cpu(layer: Any) -> bool:
    return all(parameter.device.type == "cpu" for parameter in layer.parameters())


def mark_zero_experts(model: Any) -> None:
    """Tell the layers of blocks with experts that compute nothing, to whose routes SGLang gives the weight 0."""
    for block in model.modules():
        if getattr(block, "zero_expert_type", None) is not None:
            for layer in block.modules():
                experts = getattr(getattr(layer, "quant_method", None), "moe_runtime_experts", None)
                if isinstance(experts, EngineExperts):
                    experts.zeros_are_none = True


def _passing_dispatcher() -> Any:
    base = import_module("sglang.srt.layers.moe.token_dispatcher.base").BaseDispatcher
    output = import_module("sglang.srt.layers.moe.token_dispatcher.standard").StandardDispatchOutput

    class PassingDispatcher(base):  # type: ignore[misc, valid-type]
        """Hands tokens and results on: the experts exchange them."""

        def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
            return output(hidden_states=hidden_states, hidden_states_scale=None, topk_output=topk_output)

        def combine(self, combine_input: Any) -> torch.Tensor:
            return combine_input.hidden_states

    return PassingDispatcher()


class RunsExperts:
    """What replaces members of an object of SGLang's `FusedMoEMethodBase`."""

    moe_runtime_layers: EngineLayers
    moe_runtime_experts: EngineExperts | None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Take the experts of `layer` over. Collective over SGLang's expert-parallel group."""
        self.moe_runtime_experts = build(self.moe_runtime_layers, layer, self)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Refuse to load other weights: those of `layer` are in another layout now."""
        raise ValueError(f"{name_of(layer)}: {NO_UPDATES}")

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """A `StandardCombineInput` of bf16 `[T, H]`: the weighted sum over each token's experts, scaled as SGLang's."""
        assert self.moe_runtime_experts is not None
        topk = dispatch_output.topk_output
        checker = import_module("sglang.srt.layers.moe.topk").TopKOutputChecker
        if checker.format_is_bypassed(topk):
            topk = topk.to_standard()
        if not checker.format_is_standard(topk):
            raise ValueError(f"{name_of(layer)}: expected ids and weights of the top-k, got {type(topk).__name__}")
        x, weights = dispatch_output.hidden_states, topk.topk_weights
        factor = factor_left(layer, x.device)
        if factor != 1.0:
            weights = weights * factor
        y = self.moe_runtime_experts(x, topk.topk_ids, weights, most_tokens(x.shape[0]))
        return import_module("sglang.srt.layers.moe.token_dispatcher.standard").StandardCombineInput(hidden_states=y)


def factor_left(layer: Any, device: torch.device) -> float:
    """What is left of SGLang's factor of routing weights to its runner, for tokens on `device`."""
    # On CPUs models apply it, and no runner of SGLang does.
    applied = layer.should_fuse_routed_scaling_factor_in_topk or device.type == "cpu"
    factor = layer.moe_runner_config.routed_scaling_factor
    return 1.0 if factor is None or applied else float(factor)


def name_of(layer: Any) -> str:
    """Of a layer of SGLang, for messages."""
    return layer.layer_name or f"MoE layer {layer.layer_id}"


def check(layer: Any, config: Any) -> None:
    """Raise `ValueError` for settings of SGLang with which a layer cannot run here."""
    context = import_module("sglang.srt.runtime_context")
    a2a = import_module("sglang.srt.layers.moe").get_moe_a2a_backend()
    runner = "none" if config.runner_backend is None else config.runner_backend.value
    execution, parallel, model = context.get_exec(), context.get_parallel(), context.get_model()
    refusals = {
        f"--moe-a2a-backend: expected none or flashinfer, got {a2a.value}": not (a2a.is_none() or a2a.is_flashinfer()),
        f"--moe-runner-backend: expected one of {', '.join(RUNNERS)}, got {runner}": runner not in RUNNERS,
        "--ep-size: expected the tensor-parallel size, since experts are not split": layer.moe_tp_size > 1,
        "--moe-dp-size: expected 1": parallel.moe_dp_size > 1,
        "--dwdp-size: expected 1": parallel.dwdp_size > 1,
        "--enable-eplb: expected no moves of experts": execution.moe.enable_eplb,
        "--enable-two-batch-overlap: expected one batch at a time": execution.overlap.enable_two_batch_overlap,
        "--enable-paged-experts: expected experts that stay on the GPU": execution.moe.enable_paged_experts,
        "--kt-weight-path: expected experts that stay on the GPU": execution.moe.kt_weight_path is not None,
        "--cpu-offload-gb, --offload-group-size: expected none, since experts stay on the GPU": (
            execution.offload.cpu_offload_gb > 0 or execution.offload.offload_group_size > 0
        ),
        f"--load-format: expected weights of a checkpoint, got {model.load_format}": _is_loaded_later(model),
        f"--weight-cache-mode: expected off, got {model.weight_cache_mode}": model.weight_cache_mode != "off",
        "--enable-lora: expected a model without": context.get_lora().enable_lora,
        "--disable-shared-experts-fusion: expected it": layer.num_fused_shared_experts > 0,
        "apply_router_weight_on_input: expected a model without": config.apply_router_weight_on_input,
        "no_combine: expected a layer that sums over the top-k": config.no_combine,
        "reduce_results: expected no sum after complete results": a2a.is_flashinfer() and layer.reduce_results,
        f"--dtype: expected bfloat16, got {layer.params_dtype}": layer.params_dtype != torch.bfloat16,
        "top_k: expected a number": layer.top_k is None,
    }
    for refusal, applies in refusals.items():
        if applies:
            raise ValueError(f"{name_of(layer)}: {refusal}")


def _is_loaded_later(model: Any) -> bool:
    """Whether layers would be taken over before their weights are there; `model` has SGLang's options of the model."""
    from_store = model.load_format == "remote" and str(model.model_path).startswith("redis://")
    return from_store or model.load_format in LOADED_LATER


def build(layers: EngineLayers, layer: Any, quant_method: Any) -> EngineExperts:
    """The experts of SGLang's `FusedMoE` `layer`. Raises `ValueError` naming the layer for what does not fit."""
    name = name_of(layer)
    activation = activation_of(layer.moe_runner_config, name, getattr(quant_method, "load_up_proj_weight_first", False))
    weights = read_weights(
        layer,
        name,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size_per_partition,
        activation=activation,
    )
    share, group = TokenShare(), None
    if layer.moe_ep_size > 1:
        group = import_module("sglang.srt.runtime_context").get_parallel().moe_ep_group.device_group
        if import_module("sglang.srt.layers.moe").get_moe_a2a_backend().is_none():
            share = TokenShare(layer.moe_ep_size, layer.moe_ep_rank)
    first = layer.moe_ep_rank * layer.num_local_experts
    stated = EngineLayer(
        name=name,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        activation=activation,
        local_experts=range(first, first + layer.num_local_experts),
        max_tokens=MAX_TOKENS,
    )
    return layers.build(stated, weights, group, share)


def activation_of(config: Any, name: str, up_first: bool) -> ActivationConfig:
    """The formula of a `MoeRunnerConfig`, as SGLang's Triton runner computes it. Raises `ValueError` for another."""
    alpha, limit, beta = config.gemm1_alpha, config.gemm1_clamp_limit, config.gemm1_beta
    for key, given in (("gemm1_clamp_limit", limit), ("swiglu_limit", config.swiglu_limit)):
        if given is not None and given <= 0:
            raise ValueError(f"{name}: {key}: expected a positive one, got {given}")
    order: Literal["gate_up", "up_gate", "interleaved"] = "up_gate" if up_first else "gate_up"
    if config.activation == "silu" and config.is_gated:
        if alpha is not None and limit is not None and beta in (None, 1.0) and config.swiglu_limit is None:
            order = "interleaved" if config.gate_up_interleaved else order
            return ActivationConfig(order=order, alpha=alpha, limit=limit, up_offset=1.0)
        if (alpha, limit, beta) == (None, None, None):
            return ActivationConfig(order=order, limit=config.swiglu_limit)
        # Without gemm1_alpha the clamp follows silu; that of swiglu_limit comes before it.
        if (alpha, beta, config.swiglu_limit) == (None, None, None):
            return ActivationConfig(order=order, limit=limit, limit_on="function")
    raise ValueError(
        f"{name}: activation: expected gated silu, with swiglu_limit, or with gemm1_clamp_limit and perhaps "
        f"gemm1_alpha, or with none of them, got {config.activation} (is_gated={config.is_gated}, gemm1_alpha={alpha}, "
        f"gemm1_clamp_limit={limit}, gemm1_beta={beta}, swiglu_limit={config.swiglu_limit})"
    )


def most_tokens(num_tokens: int) -> int:
    """Tokens of the rank that has most in this step, equal on all ranks.

    Where ranks have their own tokens it follows from SGLang's list of all attention groups, as in its dispatcher for
    FlashInfer. Without a list, and where ranks hold the same tokens, all have as many.
    """
    if import_module("sglang.srt.layers.moe").get_moe_a2a_backend().is_none():
        return num_tokens
    counts = import_module("sglang.srt.layers.dp_attention").get_dp_global_num_tokens()
    if counts is None or len(counts) < 2:
        return num_tokens
    return ceil_div(max(counts), import_module("sglang.srt.runtime_context").get_parallel().attn_tp_size)
