"""What the adapters take for granted of vLLM and SGLang, looked up in their sources, where these are present.

    export MOE_RUNTIME_VLLM_SOURCES=FOLDER MOE_RUNTIME_SGLANG_SOURCES=FOLDER
    python -m pytest tests/models/test_engine_signatures.py

with the folders of unpacked wheels. Without sources these tests skip, but for that of the reader itself.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from moe_runtime.integrations import sglang_experts, vllm_experts
from moe_runtime.integrations import vllm_config as vllm_config_module
from tests.support.engine_sources import FUSED, QUANTIZATION, SRT, Sources, find_sources, sources_of
from tests.support.engine_stand_ins import sglang_layer, vllm_config, vllm_layer
from tests.support.vllm_stand_ins import VllmConfig

pytestmark = pytest.mark.cpu_only

Check = Callable[[Sources], None]

VLLM_ADAPTERS = (vllm_experts, vllm_config_module)


def overrides(adapter: type, sources: Sources, homes: list[tuple[str, str]]) -> Iterator[str]:
    """What `adapter` has that no class of an engine has, or has with other parameters."""
    for name, value in vars(adapter).items():
        if name.startswith("_") or name in vars(adapter).get("__annotations__", {}):
            continue
        home = next((home for home in homes if name in sources.members(*home)), None)
        if home is None:
            yield f"{name}: in none of {homes}"
        elif inspect.isfunction(value):
            own = [each for each in inspect.signature(value).parameters if each != "self"]
            theirs = sources.parameters(home[0], f"{home[1]}.{name}")
            if own != theirs:
                yield f"{name}: {theirs} in {home[0]}, {own} here"


def modules_named(adapter: Any, engine: str) -> set[str]:
    """The modules of an engine that the source of an adapter names."""
    constants = (
        node.value for node in ast.walk(ast.parse(inspect.getsource(adapter))) if isinstance(node, ast.Constant)
    )
    return {each for each in constants if isinstance(each, str) and re.fullmatch(rf"{engine}(\.\w+)+", each)}


def stored_by_vllm(sources: Sources) -> None:
    """The names of parameters, and that those which our reader knows are all."""
    names = {
        (f"{FUSED}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"): ("weight", "bias"),
        (f"{QUANTIZATION}.modelopt", "ModelOptNvFp4FusedMoE"): ("weight", "weight_scale", "weight_scale_2"),
        (f"{QUANTIZATION}.modelopt", "ModelOptMxFp8FusedMoE"): ("weight", "weight_scale"),
        (f"{QUANTIZATION}.mxfp4", "Mxfp4MoEMethod"): ("weight", "weight_scale", "bias"),
        (f"{QUANTIZATION}.mxfp4", "GptOssMxfp4MoEMethod"): ("weight", "weight_scale", "bias"),
        (
            f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
            "CompressedTensorsW4A4Nvfp4MoEMethod",
        ): ("weight_packed", "weight_scale", "weight_global_scale"),
    }
    for (module, method), ends in names.items():
        constants = sources.constants(module, f"{method}.create_weights")
        assert {f"{part}_{end}" for part in ("w13", "w2") for end in ends} <= constants, method
    fp8 = sources.constants(f"{QUANTIZATION}.fp8", "Fp8MoEMethod")
    assert {"weight_scale_inv", "weight_scale", "w13_", "w2_", "w13_weight", "w2_weight"} <= fp8


def hooks_of_vllm(sources: Sources) -> None:
    assert sources.parameters("vllm.model_executor.custom_op", "PluggableLayer.register_oot") == [
        "_decorated_layer_cls",
        "name",
    ]
    base = f"{FUSED}.routed_experts"
    assert "PluggableLayer" in sources.bases(base, "RoutedExperts")
    for name, module in vllm_experts.ROUTED_EXPERTS.items():
        assert name == "RoutedExperts" or "RoutedExperts" in sources.bases(module, name), name
        own = {each.name for each in sources.find(module, name).body if hasattr(each, "name")}
        assert name == "RoutedExperts" or not own & {"_get_quant_method", "forward_modular", "__new__"}, name
    assert sources.parameters(base, "RoutedExperts._get_quant_method") == ["prefix", "quant_config", "moe_config"]
    assert sources.parameters(base, "RoutedExperts.weight_loader")[0] == "param"
    made = ast.unparse(sources.find(base, "RoutedExperts.__init__"))
    chosen = made.find("self._get_quant_method")
    for checked in ("activation", "swiglu_limit", "swiglu_alpha", "swiglu_beta", "apply_router_weight_on_input"):
        assert 0 <= made.find(f"self.{checked} = ") < chosen, checked
    assert "vllm.general_plugins" in sources.text("vllm.plugins")


def method_of_vllm(sources: Sources) -> None:
    homes = [
        (f"{FUSED}.fused_moe_method_base", "FusedMoEMethodBase"),
        (f"{QUANTIZATION}.base_config", "QuantizeMethodBase"),
    ]
    assert not list(overrides(vllm_experts.RunsExperts, sources, homes))
    assert {"moe", "moe_kernel", "moe_quant_config"} <= sources.members(*homes[0])
    sources.find(f"{QUANTIZATION}.online.moe_base", vllm_experts.ONLINE)
    called = sources.keywords_of_call(
        f"{FUSED}.routed_experts", "RoutedExperts.forward_modular", "self.quant_method.apply"
    )
    assert called == list(inspect.signature(vllm_experts.RunsExperts.apply).parameters)[1:]
    loader = "vllm.model_executor.model_loader.utils"
    called = sources.keywords_of_call(
        loader, "process_weights_after_loading", "quant_method.process_weights_after_loading"
    )
    assert called == ["*"]


def attributes_of_vllm(sources: Sources) -> None:
    layer = {name for name in vars(vllm_layer({})) if not name.startswith("_")} - set(vars(nn.Module())) | {
        "_expert_map"
    }
    assert layer <= sources.members(f"{FUSED}.routed_experts", "RoutedExperts")
    config = vars(vllm_config())
    assert set(config) <= sources.members(f"{FUSED}.config", "FusedMoEConfig")
    assert set(vars(config["moe_parallel_config"])) <= sources.members(f"{FUSED}.config", "FusedMoEParallelConfig")
    activations = sources.constants(f"{FUSED}.activation", "MoEActivation")
    assert {"silu", "swigluoai", "swigluoai_uninterleave", "swiglustep"} <= activations


def step_of_vllm(sources: Sources) -> None:
    assert {"get_ep_group", "get_tp_group"} <= sources.exported("vllm.distributed")
    state = "vllm.distributed.parallel_state"
    assert {"device_group", "rank_in_group", "world_size"} <= sources.members(state, "GroupCoordinator")
    assert sources.parameters(state, "GroupCoordinator.all_gather") == ["input_", "dim"]
    context = "vllm.forward_context"
    assert "get_forward_context" in sources.exported(context)
    assert "dp_metadata" in sources.members(context, "ForwardContext")
    assert "num_tokens_across_dp_cpu" in sources.members(context, "DPMetadata")
    runner = f"{FUSED}.runner.moe_runner"
    reduced = ast.unparse(sources.find(runner, "MoERunner._fused_output_is_reduced"))
    assert "self._quant_method.moe_kernel.output_is_reduced()" in reduced
    assert "supports_internal_mk" in ast.unparse(sources.find(runner, "MoERunner.do_naive_dispatch_combine"))
    assert "moe_kernel.fused_experts.consumes_expert_mask" in sources.text(f"{FUSED}.routed_experts")


def engine_of_vllm(sources: Sources) -> None:
    """What the adapter replaces or asks of a whole engine."""
    assert sources.parameters("vllm.config.vllm", "VllmConfig.compute_hash") in ([], ["include_version"])
    stand_in = VllmConfig()
    assert set(vars(stand_in)) <= sources.members("vllm.config.vllm", "VllmConfig")
    assert set(vars(stand_in.parallel_config)) <= sources.members("vllm.config.parallel", "ParallelConfig")
    assert set(vars(stand_in.model_config)) <= sources.members("vllm.config.model", "ModelConfig")
    assert "cudagraph_capture_sizes" in sources.members("vllm.config.compilation", "CompilationConfig")
    assert set(vars(stand_in.load_config)) <= sources.members("vllm.config.load", "LoadConfig")
    assert {"VllmConfig", "get_current_vllm_config"} <= sources.exported("vllm.config")
    arguments = "vllm.engine.arg_utils"
    assert sources.parameters(arguments, "EngineArgs.create_engine_config") == ["usage_context", "headless"]
    assert "load_general_plugins()" in sources.text(arguments)
    loader = "vllm.model_executor.model_loader.base_loader"
    assert sources.parameters(loader, "BaseModelLoader.load_model") == ["vllm_config", "model_config", "prefix"]
    assert "vllm_config.compute_hash()" in ast.unparse(
        sources.find("vllm.compilation.caching", "aot_compile_hash_factors")
    )
    assert "vllm_config.compute_hash()" in sources.text("vllm.compilation.backends")
    assert "no_compile_layers" in sources.members("vllm.forward_context", "ForwardContext")
    assert vllm_experts.BEGIN_RELOAD in sources.exported(vllm_experts.RELOAD)
    assert "config.zero_expert_type" in sources.text("vllm.model_executor.models.longcat_flash")
    registered = ast.unparse(sources.find(f"{FUSED}.runner.moe_runner", "register_layer_for_moe_forward_op"))
    assert "static_forward_context[prefix] = layer" in registered
    assert "routed_experts" in sources.members(f"{FUSED}.runner.moe_runner", "MoERunner")


def modules_of_vllm(sources: Sources) -> None:
    for module in {name for adapter in VLLM_ADAPTERS for name in modules_named(adapter, "vllm")}:
        # Also a name for messages.
        if module != vllm_config_module.LOG.name:
            sources.path(module)


def hooks_of_sglang(sources: Sources) -> None:
    module, _, function = sglang_experts.HOOKED.rpartition(".")
    assert sources.parameters(module, function) == ["moe_runner_config", "quant_method"]
    assert sources.keywords_of_call(module, "FusedMoE.__init__", function) == ["*", "quant_method"]
    # After weights are created, before they are loaded.
    text = ast.unparse(sources.find(module, "FusedMoE.__init__"))
    created, made = (text.index(f"{call}(") for call in ("self.quant_method.create_weights", function))
    assert created < made
    registry = f"{SRT}.plugins.hook_registry"
    assert sources.parameters(registry, "HookRegistry.register")[:3] == ["target", "hook", "hook_type"]
    assert {"AROUND", "AFTER"} <= set(sources.members(registry, "HookType"))
    module, owner, method = sglang_experts.LOADED.rsplit(".", 2)
    assert sources.parameters(module, f"{owner}.{method}") == []
    assert "self.model = " in ast.unparse(sources.find(module, f"{owner}.{method}"))
    assert "sglang.srt.plugins" in sources.constants(f"{SRT}.plugins", "load_plugins") | {
        node.value for node in ast.walk(sources.tree(f"{SRT}.plugins")) if isinstance(node, ast.Constant)
    }


def method_of_sglang(sources: Sources) -> None:
    module = f"{SRT}.layers.quantization.base_config"
    homes = [(module, "FusedMoEMethodBase"), (module, "QuantizeMethodBase")]
    assert not list(overrides(sglang_experts.RunsExperts, sources, homes))
    layer = f"{SRT}.layers.moe.fused_moe_triton.layer"
    called = sources.keywords_of_call(layer, "FusedMoE.run_moe_core", "self.quant_method.apply")
    assert called == ["layer", "dispatch_output"]
    assert "self.dispatcher.combine(combine_input=" in ast.unparse(sources.find(layer, "FusedMoE.forward_impl"))
    base = f"{SRT}.layers.moe.token_dispatcher.base"
    assert sources.parameters(base, "BaseDispatcher.dispatch") == ["hidden_states", "topk_output"]
    assert sources.parameters(base, "BaseDispatcher.combine") == ["combine_input"]
    standard = f"{SRT}.layers.moe.token_dispatcher.standard"
    assert {"hidden_states", "hidden_states_scale", "topk_output"} <= sources.members(
        standard, "StandardDispatchOutput"
    )
    assert "hidden_states" in sources.members(standard, "StandardCombineInput")


def attributes_of_sglang(sources: Sources) -> None:
    layer = sglang_layer({})
    attributes = {name for name in vars(layer) if not name.startswith("_")} - set(vars(nn.Module()))
    assert attributes <= sources.members(f"{SRT}.layers.moe.fused_moe_triton.layer", "FusedMoE")
    config = set(vars(layer.moe_runner_config))  # type: ignore[arg-type]
    assert config <= sources.members(f"{SRT}.layers.moe.moe_runner.base", "MoeRunnerConfig")
    first = [f"{SRT}.layers.quantization.{name}" for name in ("unquant", "modelopt_quant")]
    assert all("def load_up_proj_weight_first(self)" in sources.text(module) for module in first)
    runners = sources.constants(f"{SRT}.layers.moe.utils", "MoeRunnerBackend")
    assert set(sglang_experts.RUNNERS) <= runners


def step_of_sglang(sources: Sources) -> None:
    topk = f"{SRT}.layers.moe.topk"
    assert {"topk_weights", "topk_ids"} <= sources.members(topk, "StandardTopKOutput")
    assert {"format_is_bypassed", "format_is_standard"} <= sources.members(topk, "TopKOutputChecker")
    assert "to_standard" in sources.members(topk, "BypassedTopKOutput")
    assert "get_moe_a2a_backend" in sources.exported(f"{SRT}.layers.moe")
    assert {"is_none", "is_flashinfer"} <= sources.members(f"{SRT}.layers.moe.utils", "MoeA2ABackend")
    context = f"{SRT}.runtime_context"
    assert {"get_exec", "get_parallel", "get_lora", "get_model"} <= sources.exported(context)
    for name in ("moe_ep_group", "moe_dp_size", "attn_tp_size"):
        assert name in sources.text(context), name
    fields = f"{SRT}.arg_groups.fields"
    assert "enable_eplb" in sources.members(f"{fields}.exec_", "ExecMoe")
    assert {"enable_paged_experts", "kt_weight_path"} <= sources.members(f"{fields}.exec_", "ExecMoe")
    assert "enable_two_batch_overlap" in sources.members(f"{fields}.exec_", "ExecOverlap")
    assert {"cpu_offload_gb", "offload_group_size"} <= sources.members(f"{fields}.exec_", "ExecOffload")
    assert {"load_format", "weight_cache_mode", "model_path"} <= sources.members(f"{fields}.model", "Model")
    # So that a draft's format counts while the draft is made.
    assert "get_model().override(load_format=load_format)" in sources.text(f"{SRT}.model_executor.model_runner")
    assert set(sglang_experts.LOADED_LATER) <= sources.constants(f"{SRT}.configs.load_config", "LoadFormat")
    updates = f"{SRT}.model_executor.model_runner_components.weight_updater"
    assert 'getattr(module, "_derived_weight_cache_error", None)' in sources.text(updates)
    assert "self.zero_expert_type" in sources.text(f"{SRT}.models.longcat_flash")
    assert "enable_lora" in sources.members(f"{fields}.lora", "Lora")
    users = {
        "model_executor.model_runner": "get_exec().moe.enable_eplb",
        "eplb.expert_distribution": "get_exec().overlap.enable_two_batch_overlap",
        "layers.quantization.unquant": "get_lora().enable_lora",
        "distributed.parallel_state": "get_parallel().moe_ep_group",
        "layers.moe.utils": "get_parallel().dwdp_size",
        "utils.offloader": "if get_exec().offload.offload_group_size > 0:",
        "model_executor.model_runner_components.load_model_utils": "get_model().weight_cache_mode",
    }
    for module, read in users.items():
        assert read in sources.text(f"{SRT}.{module}"), read
    assert "get_dp_global_num_tokens" in sources.exported(f"{SRT}.layers.dp_attention")


def stored_by_sglang(sources: Sources) -> None:
    quantization = f"{SRT}.layers.quantization"
    names = {
        ("unquant", "UnquantizedFusedMoEMethod.create_weights"): ("weight", "weight_bias"),
        ("fp8", "Fp8MoEMethod.create_fp8_moe_weight_"): ("weight", "weight_scale_inv", "weight_scale", "weight_bias"),
        ("modelopt_quant", "ModelOptNvFp4FusedMoEMethod.create_weights"): ("weight", "weight_scale", "weight_scale_2"),
        ("mxfp4", "Mxfp4MoEMethod.create_weights"): ("weight", "weight_scale", "weight_bias"),
    }
    for (module, method), ends in names.items():
        constants = sources.constants(f"{quantization}.{module}", method)
        assert {f"{part}_{end}" for part in ("w13", "w2") for end in ends} <= constants, method


def modules_of_sglang(sources: Sources) -> None:
    for module in modules_named(sglang_experts, "sglang") - {sglang_experts.HOOKED, sglang_experts.LOADED}:
        sources.path(module)


CHECKS: dict[str, list[Check]] = {
    "vllm": [
        hooks_of_vllm,
        method_of_vllm,
        attributes_of_vllm,
        step_of_vllm,
        stored_by_vllm,
        engine_of_vllm,
        modules_of_vllm,
    ],
    "sglang": [
        hooks_of_sglang,
        method_of_sglang,
        attributes_of_sglang,
        step_of_sglang,
        stored_by_sglang,
        modules_of_sglang,
    ],
}


@pytest.mark.parametrize("check", [each for checks in CHECKS.values() for each in checks], ids=lambda c: c.__name__)
def test_signatures(check: Check) -> None:
    check(sources_of("vllm" if check in CHECKS["vllm"] else "sglang"))


ALTERED = [
    (f"{FUSED}.fused_moe_method_base", "topk_ids: torch.Tensor,", "topk_idx: torch.Tensor,"),
    (f"{FUSED}.fused_moe_method_base", "def supports_internal_mk", "def supports_mk"),
    (f"{FUSED}.fused_moe_method_base", "act_dtype: torch.dtype,", "act_dtype: torch.dtype, more: int,"),
    (f"{QUANTIZATION}.online.moe_base", "class OnlineMoEMethodBase(", "class OnlineMoEMethod("),
    ("vllm.config.vllm", "def compute_hash(", "def hash_of("),
    ("vllm.config.parallel", "def use_ubatching(", "def uses_ubatching("),
    ("vllm.engine.arg_utils", "headless: bool = False,", "headed: bool = True,"),
    ("vllm.model_executor.model_loader.base_loader", "vllm_config: VllmConfig, model", "config: VllmConfig, model"),
    (f"{FUSED}.runner.moe_runner", "static_forward_context[prefix] = layer", "static_layers[prefix] = layer"),
    (f"{FUSED}.routed_experts", "moe_config: FusedMoEConfig,\n    ) -> F", "config: FusedMoEConfig,\n    ) -> F"),
    (f"{FUSED}.routed_experts", "def weight_loader(", "def load_weight("),
    (f"{FUSED}.routed_experts", '"_expert_map"', '"_map"'),
    (f"{FUSED}.routed_experts", "self.swiglu_limit", "self.limit"),
    (f"{FUSED}.config", "max_num_tokens: int =", "most_tokens: int ="),
    (f"{FUSED}.config", "sp_size: int", "sequence_size: int"),
    (f"{FUSED}.activation", 'SWIGLUOAI = "swigluoai"', 'SWIGLUOAI = "swiglu_oai"'),
    (f"{FUSED}.runner.moe_runner", "moe_kernel.output_is_reduced()", "moe_kernel.is_reduced()"),
    (f"{QUANTIZATION}.modelopt", '"w13_weight_scale_2"', '"w13_global_scale"'),
    ("vllm.forward_context", "num_tokens_across_dp_cpu", "num_tokens"),
    ("vllm.model_executor.custom_op", "name: str | None = None):", "op: str | None = None):"),
    (f"{SRT}.layers.moe.fused_moe_triton.layer", "quant_method: FusedMoEMethodBase,\n)", "method: object,\n)"),
    (f"{SRT}.layers.moe.fused_moe_triton.layer", "self.moe_ep_rank =", "self.ep_rank ="),
    (f"{SRT}.layers.moe.moe_runner.base", "gemm1_clamp_limit: O", "clamp_limit: O"),
    (f"{SRT}.layers.moe.token_dispatcher.base", "hidden_states: torch.Tensor, topk", "x: torch.Tensor, topk"),
    (f"{SRT}.layers.quantization.base_config", "dispatch_output: DispatchOutput", "dispatched: DispatchOutput"),
    (f"{SRT}.plugins.hook_registry", "hook: Callable,\n        hook_type", "function: Callable,\n        hook_type"),
    (f"{SRT}.model_executor.model_runner", "self.model = loaded.model", "self.loaded = loaded.model"),
    (f"{SRT}.layers.moe.topk", "def to_standard", "def standard"),
    (f"{SRT}.layers.quantization.mxfp4", '"w2_weight_scale"', '"w2_scale"'),
]


@pytest.mark.parametrize(("module", "old", "new"), ALTERED)
def test_an_altered_signature_is_found(module: str, old: str, new: str, tmp_path: Path) -> None:
    """Of a copy in which one name is another, some check fails."""
    engine = module.partition(".")[0]
    sources = sources_of(engine)
    copy = Sources(tmp_path)

    class Copied(Sources):
        def path(self, name: str) -> Path:
            path = sources.path(name)
            target = copy.root / path.relative_to(sources.root)
            if name == module and not target.is_file():
                target.parent.mkdir(parents=True)
                shutil.copy(path, target)
                assert old in target.read_text()
                target.write_text(target.read_text().replace(old, new))
            return target if name == module else path

    altered = Copied(tmp_path)
    failed = 0
    for check in CHECKS[engine]:
        try:
            check(altered)
        except AssertionError:
            failed += 1
    assert failed


def test_the_reader_itself(tmp_path: Path) -> None:
    """What the reader finds in a module, so that a check which finds nothing is no accident."""
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .one import *\n")
    (folder / "one.py").write_text(
        "class Base:\n    pass\n\n\n"
        "class One(Base):\n    field: int\n\n"
        "    def method(self, a, *, b=1):\n        self.set = local = a\n"
        "        self.register_buffer('buffer', other(a, x=b))\n\n\n"
        "def function(a, b):\n    return 'text'\n"
    )
    sources = Sources(tmp_path)
    assert sources.members("engine.one", "One") == {"field", "method", "set", "buffer"}
    assert sources.parameters("engine.one", "One.method") == ["a", "b"]
    assert sources.parameters("engine.one", "function") == ["a", "b"]
    assert sources.bases("engine.one", "One") == {"Base"}
    assert sources.constants("engine.one", "function") == {"text"}
    assert sources.exported("engine") == {"Base", "One", "function"}
    assert sources.keywords_of_call("engine.one", "One.method", "other") == ["*", "x"]
    for missing in ("One.other", "Two"):
        with pytest.raises(AssertionError, match=f"no {missing}"):
            sources.find("engine.one", missing)
    with pytest.raises(AssertionError, match="no such module"):
        sources.path("engine.two")


def test_engines_are_read_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RUNTIME_VLLM_SOURCES", str(tmp_path))
    found = find_sources("vllm")
    assert found is not None and found.root == tmp_path
