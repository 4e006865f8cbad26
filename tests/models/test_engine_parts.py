"""Parts of vLLM and SGLang that do run without a GPU, taken from their sources, together with the adapters.

Sources are found as for `test_engine_signatures.py`; without them these tests skip.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Optional, cast, overload

import pytest
import torch
from torch import nn

from moe_runtime.config import ActivationConfig, ParallelConfig
from moe_runtime.integrations import sglang_experts, vllm_experts
from moe_runtime.integrations.engine_layers import EngineLayers
from moe_runtime.integrations.layer_settings import LayerSettings
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.reference import error_bound, relative_error
from tests.support import engine_stand_ins
from tests.support.engine_sources import FUSED, QUANTIZATION, SRT, sources_of
from tests.support.engine_stand_ins import (
    TopK,
    draw_tokens,
    make_experts,
    plain_moe,
    sglang_layer,
    sglang_modules,
    vllm_config,
    vllm_layer,
    vllm_modules,
)
from tests.support.engine_stand_ins import modules as engine_modules
from tests.support.vllm_stand_ins import Vllm

pytestmark = pytest.mark.cpu_only

LIMITS = ParallelConfig(timeout_s=60.0, startup_timeout_s=60.0)


def test_vllm_s_own_classes_with_the_adapter(seed: int) -> None:
    """Its registry of layers, its base class of methods, and what holds and calls a method, run from its sources."""
    sources = sources_of("vllm")
    space: dict[str, Any] = {"nn": nn, "torch": torch, "logger": logging.getLogger("vllm"), "cast": cast}
    space |= {"op_registry": {}, "op_registry_oot": {}, "ABC": ABC, "abstractmethod": abstractmethod}
    space |= {"overload": overload, "Literal": Literal}
    space = sources.run("vllm.model_executor.custom_op", ["PluggableLayer"], space)
    space = sources.run(f"{QUANTIZATION}.base_config", ["QuantizeMethodBase"], space)
    space = sources.run(f"{FUSED}.fused_moe_method_base", ["FusedMoEMethodBase"], space)

    class Unquantized(space["FusedMoEMethodBase"]):  # type: ignore[misc]
        experts_cls = SimpleNamespace(is_monolithic=lambda: True)

        def create_weights(self, *given: Any, **named: Any) -> None: ...

        def get_fused_moe_quant_config(self, layer: Any) -> Any:
            raise AssertionError("vLLM's own method must not run")

    space["UnquantizedFusedMoEMethod"] = Unquantized
    kept = {"_get_quant_method", "_ensure_moe_quant_config_init", "forward_modular", "expert_map", "weight_loader"}
    space = sources.run(f"{FUSED}.routed_experts", ["RoutedExperts"], space, kept)
    runner_parts = {"_quant_method", "_fused_output_is_reduced", "do_naive_dispatch_combine"}
    space["MoERunnerInterface"] = object
    runner_kind = sources.run(f"{FUSED}.runner.moe_runner", ["MoERunner"], space, runner_parts)["MoERunner"]
    routed = space["RoutedExperts"]

    def initialize(self: Any, config: Any, state: nn.Module) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(state))
        self.quant_method = self._get_quant_method("", None, config)

    routed.__init__ = initialize
    named: dict[str, dict[str, Any]] = {path: {} for path in vllm_experts.ROUTED_EXPERTS.values()}
    for name, path in vllm_experts.ROUTED_EXPERTS.items():
        named[path][name] = routed
    for name, members in Vllm().modules.items():
        named.setdefault(name, members)
    del named["vllm.distributed"], named["vllm.forward_context"]
    data, (x, ids, weights) = make_experts("bf16", seed), draw_tokens(seed, 21)
    # Data parallel without sequence parallelism, where vLLM gathers tokens for methods of the old kind.
    config = vllm_config(dp=2, ep_size=1)
    with vllm_modules(counts=torch.tensor([21, 3]), **named):
        vllm_experts.install(LayerSettings(LIMITS, {}))
        layer = routed(config, vllm_layer(data.of(slice(None))))
        assert type(layer).__name__ == "MoERuntimeRoutedExperts" and isinstance(layer, routed)
        runner = runner_kind()
        runner.__dict__.update(routed_experts=layer, moe_config=SimpleNamespace(dp_size=2, is_sequence_parallel=False))
        assert not runner._fused_output_is_reduced and not runner.do_naive_dispatch_combine
        layer.quant_method.process_weights_after_loading(layer)
        layer._ensure_moe_quant_config_init()
        found = layer.forward_modular(x=x, topk_weights=weights, topk_ids=ids)
        assert layer.expert_map is None
        with pytest.raises(ValueError, match="load_weights: expected reload_weights"):
            layer.weight_loader(layer.w13_weight, data.gate[0], "w13_weight", "w1", 0)
    assert runner._fused_output_is_reduced and not runner.do_naive_dispatch_combine
    assert relative_error(found, plain_moe(data, x, ids, weights))[0] <= error_bound("bf16")


def test_sglang_s_own_hooks_with_the_adapter(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its registry of hooks, its base of dispatchers and its outputs, run from its sources."""
    sources = sources_of("sglang")
    spec = importlib.util.spec_from_file_location("hook_registry", sources.path(f"{SRT}.plugins.hook_registry"))
    assert spec is not None and spec.loader is not None
    registry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    space: dict[str, Any] = {"torch": torch, "NamedTuple": NamedTuple}
    standard = sources.run(
        f"{SRT}.layers.moe.token_dispatcher.standard", ["StandardDispatchOutput", "StandardCombineInput"], space
    )
    base_path = sources.path(f"{SRT}.layers.moe.token_dispatcher.base")
    base: dict[str, Any] = {"__name__": "token_dispatcher_base"}
    exec(compile(base_path.read_text(), str(base_path), "exec"), base)
    module, _, function = sglang_experts.HOOKED.rpartition(".")
    runner_module, owner, _ = sglang_experts.LOADED.rsplit(".", 2)
    data, (x, ids, weights) = make_experts("bf16", seed), draw_tokens(seed, 21)
    layer = sglang_layer(data.of(slice(None)))

    class ModelRunner:
        model: nn.Module

        def load_model(self) -> None:
            self.model = nn.Sequential(layer)

    named = {
        f"{SRT}.plugins.hook_registry": vars(registry),
        f"{SRT}.layers.moe.token_dispatcher.base": base,
        f"{SRT}.layers.moe.token_dispatcher.standard": standard,
        module: {
            function: lambda moe_runner_config, quant_method: "SGLang's own dispatcher",
            "FusedMoE": type(layer),
        },
        runner_module: {owner: ModelRunner},
    }
    with sglang_modules(**named):
        sglang_experts.install(LayerSettings(LIMITS, {}))
        registry.HookRegistry.apply_hooks()

        class Method:
            pass

        method = Method()
        hooked = getattr(importlib.import_module(module), function)
        dispatcher = hooked(layer.moe_runner_config, quant_method=method)
        assert isinstance(dispatcher, base["BaseDispatcher"])
        method.process_weights_after_loading(layer)  # type: ignore[attr-defined]
        layer.quant_method = method
        with caplog.at_level("INFO"):
            ModelRunner().load_model()
        assert "moe_runtime: 1 of 1 MoE layers taken over: weights bf16, tokens bf16, 1 rank" in caplog.text
        dispatched = dispatcher.dispatch(hidden_states=x, topk_output=TopK(weights, ids))
        found = dispatcher.combine(combine_input=method.apply(layer=layer, dispatch_output=dispatched))  # type: ignore[attr-defined]
    assert relative_error(found, plain_moe(data, x, ids, weights))[0] <= error_bound("bf16")


@pytest.mark.parametrize("backend", ["none", "flashinfer"])
def test_sglang_s_models_scale_results_once(backend: str, rng: torch.Generator) -> None:
    """On GPUs: by the top-k, the layer, or DeepSeek's model, which does so behind results that are complete."""
    sources = sources_of("sglang")
    layer_module, model = f"{SRT}.layers.moe.fused_moe_triton.layer", f"{SRT}.models.deepseek_v2"
    given = {"ModelOptNvFp4FusedMoEMethod": type("NvFp4", (), {}), "Fp8MoEMethod": type("Fp8", (), {})}
    decide = sources.run(layer_module, ["_fuses_routed_scaling_factor_in_topk"], given)
    behind = sources.run(model, ["_scale_routed_and_add_shared"], {"torch": torch, "Optional": Optional})
    runner = SimpleNamespace(
        **{f"is_{name}": lambda: False for name in ("cutlass", "flashinfer_trtllm", "flashinfer_trtllm_routed")}
    )
    layer = sglang_layer({"w13_weight": torch.empty(1, device="meta")}, routed_scaling_factor=2.5)
    method = given["Fp8MoEMethod"]()
    with sglang_modules(backend=backend):
        sglang_experts.take_over(EngineLayers(LayerSettings(LIMITS, {})), layer.moe_runner_config, method)
    fused = decide["_fuses_routed_scaling_factor_in_topk"](method, runner)
    layer.should_fuse_routed_scaling_factor_in_topk = fused
    results = torch.randn(5, 8, generator=rng)
    found = results * (2.5 if fused else 1.0) * sglang_experts.factor_left(layer, torch.device("cuda"))
    if backend == "flashinfer":
        found = behind["_scale_routed_and_add_shared"](found, None, routed_scaling_factor=2.5, fused_in_topk=fused)
    torch.testing.assert_close(found, results * 2.5)
    assert "or get_moe_a2a_backend().is_flashinfer()" in ast.unparse(sources.find(model, "DeepseekV2MoE.__init__"))
    assert "_scale_routed_and_add_shared" in ast.unparse(sources.find(model, "DeepseekV2MoE.forward_deepep"))
    assert "_scale_routed_and_add_shared" not in ast.unparse(sources.find(model, "DeepseekV2MoE.forward_normal"))
    made = ast.unparse(sources.find(layer_module, "FusedMoE.__init__"))
    assert made.find("create_moe_dispatcher(") < made.find("_fuses_routed_scaling_factor_in_topk(")


CREATED: list[tuple[str, str, dict[str, Any], str, str | None]] = [
    (f"{FUSED}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod.create_weights", {}, "bf16", None),
    (f"{FUSED}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod.create_weights", {}, "bf16", "bias"),
    (f"{QUANTIZATION}.fp8", "Fp8MoEMethod.create_weights", {"block_quant": True}, "fp8_block", "bias"),
    (f"{QUANTIZATION}.fp8", "Fp8MoEMethod.create_weights", {"block_quant": False}, "fp8_tensor", None),
    (f"{QUANTIZATION}.modelopt", "ModelOptNvFp4FusedMoE.create_weights", {}, "nvfp4", None),
    (f"{QUANTIZATION}.modelopt", "ModelOptMxFp8FusedMoE.create_weights", {}, "mxfp8", None),
    (f"{QUANTIZATION}.mxfp4", "Mxfp4MoEMethod.create_weights", {}, "mxfp4", "bias"),
    (f"{QUANTIZATION}.mxfp4", "GptOssMxfp4MoEMethod.create_weights", {}, "mxfp4", "bias"),
    (
        f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
        "CompressedTensorsW4A4Nvfp4MoEMethod.create_weights",
        {"group_size": 16},
        "compressed_nvfp4",
        None,
    ),
    (f"{SRT}.layers.quantization.unquant", "UnquantizedFusedMoEMethod.create_weights", {}, "bf16", None),
    (f"{SRT}.layers.quantization.unquant", "UnquantizedFusedMoEMethod.create_weights", {}, "bf16", "weight_bias"),
    (f"{SRT}.layers.quantization.fp8", "Fp8MoEMethod.create_fp8_moe_weight_", {"block_quant": True}, "fp8_block", None),
    (
        f"{SRT}.layers.quantization.fp8",
        "Fp8MoEMethod.create_fp8_moe_weight_",
        {"block_quant": False},
        "fp8_tensor",
        "weight_bias",
    ),
    (f"{SRT}.layers.quantization.modelopt_quant", "ModelOptNvFp4FusedMoEMethod.create_weights", {}, "nvfp4", None),
    (f"{SRT}.layers.quantization.mxfp4", "Mxfp4MoEMethod.create_weights", {}, "mxfp4", "weight_bias"),
]


@pytest.mark.parametrize(("module", "method", "settings", "form", "bias"), CREATED)
def test_parameters_are_those_that_engines_create(
    module: str, method: str, settings: dict[str, Any], form: str, bias: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The methods that create weights, run from the sources: names, shapes and dtypes of the stand-ins are theirs."""
    engine = module.partition(".")[0]
    sources = sources_of(engine)
    # Sizes that the engines take with blocks of 128x128.
    hidden, inner = 256, 128
    monkeypatch.setattr(engine_stand_ins, "HIDDEN", hidden)
    monkeypatch.setattr(engine_stand_ins, "INNER", inner)
    expected = make_experts(form, 0, bias=bias).parameters
    layer = nn.Module()
    vars(layer).update(
        num_experts=7, num_local_experts=7, hidden_size=hidden, intermediate_size_per_partition=inner, moe_tp_size=1
    )
    vars(layer)["moe_runner_config"] = SimpleNamespace(is_gated=True)
    scales = SimpleNamespace(**{name: SimpleNamespace(value=name) for name in ("BLOCK", "TENSOR", "GROUP")})
    no_backend = SimpleNamespace(**{f"is_{name}": lambda: False for name in ("cutlass", "flashinfer_megamoe")})

    def parameter(data: torch.Tensor, **named: Any) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=False)

    given = {
        "torch": torch,
        "Parameter": nn.Parameter,
        "set_weight_attrs": lambda *given: None,
        "FusedMoeWeightScaleSupported": scales,
        "ModelWeightParameter": parameter,
        "PerTensorScaleParameter": parameter,
        "MXFP8_BLOCK_SIZE": 32,
        "MXFP8_VALUE_DTYPE": torch.float8_e4m3fn,
        "MXFP8_SCALE_DTYPE": torch.uint8,
        "Mxfp4MoEMethod": SimpleNamespace(get_scale_weight_loader=lambda loader: loader),
        "validate_fp8_block_shape_moe": lambda *given: None,
        "get_moe_runner_backend": lambda: no_backend,
        "get_platform": lambda: SimpleNamespace(is_sm100=False),
        "get_moe_weight_sizes": lambda inner, **named: (2 * inner, inner, False),
        "get_moe_padding_size": lambda aiter: 0,
        "swizzle_blockscale": lambda scales: torch.zeros(1),
        "_make_per_tensor_scale_parameter": lambda shape, **named: parameter(torch.ones(shape)),
        "_use_xpu_moe_ld_padding": lambda use: False,
        "_UE8M0_ONE": 127,
        "has_triton_kernels": False,
        **dict.fromkeys(("_use_aiter", "_is_hip", "_use_hip_int4", "_is_xpu"), False),
    }
    moe = SimpleNamespace(
        is_act_and_mul=True,
        w13_num_shards=2,
        has_bias=bias is not None,
        hidden_dim_unpadded=hidden,
        intermediate_size_per_partition_unpadded=inner,
    )
    quant_config = SimpleNamespace(
        group_size=16, activation_scheme="dynamic", weight_block_size=[128, 128], is_checkpoint_fp8_serialized=True
    )
    vars(quant_config).update(is_checkpoint_nvfp4_serialized=True, is_checkpoint_mxfp8_serialized=True)
    owner = SimpleNamespace(
        moe=moe,
        quant_config=quant_config,
        weight_block_size=[128, 128],
        moe_block_shape=[128, 128],
        weight_scale_refine=None,
        weight_scale_name="weight_scale_inv" if settings.get("block_quant") else "weight_scale",
        prepare_weight_loader=lambda layer, loader: loader,
        _uses_serialized_fp8_source=lambda: False,
        use_global_sf=False,
        enable_flashinfer_trtllm_moe=False,
        use_triton_kernels=False,
        use_marlin=False,
        use_deep_gemm=False,
        use_mega_moe=False,
        use_flashinfer=False,
        _fi_kernel=None,
        **settings,
    )
    vars(quant_config)["get_name"] = lambda: "modelopt_fp4"
    names = {"sglang.srt.layers.moe.fused_moe_triton": {"FusedMoeWeightScaleSupported": scales}}
    arguments: dict[str, Any] = {"num_experts": 7, "hidden_size": hidden, "intermediate_size_per_partition": inner}
    arguments |= {"layer": layer, "params_dtype": torch.bfloat16, "weight_loader": None, "global_num_experts": 7}
    if engine == "sglang":
        arguments["with_bias"] = bias is not None
    create = sources.run(module, [method], given)[method.rpartition(".")[2]]
    with engine_modules(names):
        if method.endswith("create_fp8_moe_weight_"):
            options = {"quant_config": quant_config, "use_mxfp8": False, "is_fp4_expert": False}
            create(**arguments, **options, is_checkpoint_fp8_serialized=True, **settings)
        else:
            create(owner, **arguments)
    created = {name: (list(value.shape), value.dtype) for name, value in layer.named_parameters()}
    ours = {name: (list(value.shape), value.dtype) for name, value in expected.items()}
    for name, (shape, dtype) in ours.items():
        assert created[name][0] == shape, name
        # SGLang keeps some biases in fp32.
        assert created[name][1] == dtype or (name.endswith("bias") and created[name][1] == torch.float32), name
    left = {name for name in created if name not in ours and not name.endswith(("input_scale", "input_global_scale"))}
    assert {name for name in left if "bias" not in name} <= {"w13_blockscale_swizzled", "w2_blockscale_swizzled"}


def check_formula(activation: ActivationConfig, expected: torch.Tensor, x: torch.Tensor) -> None:
    """`expected` is what the docstring of `ActivationConfig` says."""
    interleaved = activation.order == "interleaved"
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    if activation.limit is not None:
        up = up.clamp(-activation.limit, activation.limit)
        if activation.limit_on == "gate":
            gate = gate.clamp(max=activation.limit)
    function = gate * torch.sigmoid(activation.alpha * gate)
    if activation.limit_on == "function":
        function = function.clamp(max=activation.limit)
    found = function * (up + activation.up_offset)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_formulas_are_those_of_vllm(rng: torch.Generator) -> None:
    """`forward_native` of its activations, on values on both sides of the limits."""
    sources, x = sources_of("vllm"), 6 * torch.randn(9, 64, generator=rng, dtype=torch.float64)
    module, given = "vllm.model_executor.layers.activation", {"torch": torch, "F": nn.functional}
    state = SimpleNamespace(alpha=1.702, limit=7.0, swiglu_limit=7.0, beta=1.0)

    def native(name: str) -> torch.Tensor:
        forward = sources.run(module, [f"{name}.forward_native"], given)["forward_native"]
        return cast(torch.Tensor, forward(x) if name == "SiluAndMul" else forward(state, x))

    def ours(kind: str, **changes: Any) -> ActivationConfig:
        return vllm_experts.activation_of(vllm_layer({}, activation=SimpleNamespace(value=kind), **changes), "layer")

    check_formula(ours("silu"), native("SiluAndMul"), x)
    check_formula(ours("swigluoai"), native("SwigluOAIAndMul"), x)
    # Experts have it without a limit of the model: apply_moe_activation leaves the kernel's default.
    check_formula(ours("swiglustep"), native("SwigluStepAndMul"), x)
    apply = ast.unparse(sources.find(f"{FUSED}.activation", "apply_moe_activation"))
    assert "swiglustep_and_mul_triton(output, input)" in apply
    (limit,) = sources.find(module, "swiglustep_and_mul_triton").args.defaults
    assert ast.literal_eval(limit) == 7.0
    uninterleaved = ours("swigluoai_uninterleave", swiglu_limit=7.0, swiglu_alpha=1.702, swiglu_beta=1.0)
    check_formula(uninterleaved, native("SiluAndMulWithClamp"), x)
    state.alpha, state.beta, state.swiglu_limit = 1.0, 0.0, 2.5
    check_formula(ours("silu", swiglu_limit=2.5), native("SiluAndMulWithClamp"), x)


def test_formulas_are_those_of_sglang(rng: torch.Generator) -> None:
    sources, x = sources_of("sglang"), 6 * torch.randn(9, 64, generator=rng, dtype=torch.float64)
    module, given = f"{SRT}.layers.moe.moe_runner.triton_utils.fused_moe", {"torch": torch, "F": nn.functional}
    for interleaved, name in {
        True: "swiglu_gpt_oss_sigmoid_alpha",
        False: "swiglu_no_interleaved_with_alpha_and_limit",
    }.items():
        layer = sglang_layer({}, gemm1_alpha=1.702, gemm1_clamp_limit=7.0, gate_up_interleaved=interleaved)
        ours = sglang_experts.activation_of(layer.moe_runner_config, "layer", up_first=False)
        check_formula(ours, sources.run(module, [name], given)[name](x, 1.702, 7.0), x)
    for name, changes in {
        "_swiglu_silu_clamp_mul": {"gemm1_clamp_limit": 2.5},
        "swiglu_no_interleaved_with_alpha_and_limit": {"gemm1_clamp_limit": 2.5, "gemm1_alpha": 1.702},
    }.items():
        config = sglang_layer({}, gate_up_interleaved=False, **changes).moe_runner_config
        ours = sglang_experts.activation_of(config, "layer", up_first=False)
        assert f"{name}(" in ast.unparse(sources.find(module, "_fused_moe_kernel_sequence"))
        limits = [changes[key] for key in ("gemm1_alpha", "gemm1_clamp_limit") if key in changes]
        check_formula(ours, sources.run(module, [name], given)[name](x, *limits), x)


@pytest.mark.parametrize(("num_experts", "ranks"), [(8, 4), (7, 3), (5, 4), (256, 6), (2, 3)])
def test_experts_of_a_rank_are_those_of_vllm(num_experts: int, ranks: int) -> None:
    function = "determine_expert_map"
    given = {"torch": torch, "ExpertPlacementStrategy": str}
    determine = sources_of("vllm").run(f"{FUSED}.expert_map_manager", [function], given)[function]
    starts = expert_starts(num_experts, ranks)
    for rank in range(ranks):
        count, expert_map, _ = determine(ranks, rank, num_experts)
        layer = vllm_layer({}, _expert_map=expert_map, local_num_experts=count)
        assert vllm_experts.local_experts(layer) == list(range(starts[rank], starts[rank + 1]))


@pytest.mark.parametrize("counts", [[1, 1], [40, 9], [3, 64, 17]])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_most_tokens_are_those_that_engines_count(counts: list[int], parts: int) -> None:
    """Each of `parts` ranks of a group has a part of its tokens."""
    function, tensor = "_compute_sp_num_tokens", torch.tensor(counts)
    each = sources_of("vllm").run("vllm.forward_context", [function], {"torch": torch})[function](tensor, parts)
    config = vllm_config(tp=parts, dp=len(counts), sequence_parallel=parts > 1)
    with vllm_modules(counts=tensor):
        assert vllm_experts.most_tokens(config, min(each)) == max(each)
    function = "_max_tokens_per_scattered_source"
    module = f"{SRT}.layers.moe.token_dispatcher.flashinfer"
    expected = sources_of("sglang").run(module, [function], {})[function](counts, parts)
    with sglang_modules(backend="flashinfer", counts=counts, settings={"attn_tp_size": parts}):
        assert sglang_experts.most_tokens(min(each)) == expected
