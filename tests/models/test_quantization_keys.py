"""Keys of quantization configs: each is used, known to be without influence, or refused by name; never silent."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.checkpoints.quantization import Quantization

EXPERTS = [f"model.layers.0.mlp.experts.{expert}.{part}_proj" for expert in (0, 1) for part in ("gate", "up", "down")]
FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
GROUP = {
    "targets": ["Linear"],
    "format": "pack-quantized",
    "input_activations": None,
    "output_activations": None,
    "weights": {
        **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False},
        **{"actorder": "static", "block_structure": None, "observer": "minmax", "observer_kwargs": {}},
        **{"scale_dtype": None, "zp_dtype": "torch.int8"},
    },
}
FP8_ARGS = {
    **{"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "observer": "memoryless_minmax"},
    **{"actorder": None, "scale_dtype": None, "zp_dtype": None, "observer_kwargs": {}},
}
FP8_BLOCK_GROUP = {
    **{"targets": ["Linear"], "format": "float-quantized", "output_activations": None},
    "weights": FP8_ARGS | {"strategy": "block", "block_structure": [128, 128], "group_size": None},
    "input_activations": FP8_ARGS
    | {"strategy": "group", "group_size": 128, "dynamic": True, "observer": None, "block_structure": None},
}
NVFP4_GROUP = {
    **{"targets": ["Linear"], "format": "nvfp4-pack-quantized", "output_activations": None},
    "weights": FP8_ARGS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    "input_activations": FP8_ARGS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
}
CHANNEL_GROUP = {
    **{"targets": ["Linear"], "format": "float-quantized"},
    "weights": FP8_ARGS | {"strategy": "channel", "group_size": None, "block_structure": None},
    "input_activations": FP8_ARGS | {"strategy": "token", "dynamic": True, "observer": None},
}
INT8_GROUP = {
    **{"targets": ["Linear"], "format": "int-quantized"},
    "weights": FP8_ARGS | {"type": "int", "strategy": "channel", "group_size": None},
    "input_activations": FP8_ARGS | {"type": "int", "strategy": "token", "dynamic": True},
}
META = {
    **{"quantizer": ["gptqmodel:4.0.0"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05},
    **{"damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True, "mse": 0.0, "gptaq": None},
    **{"act_group_aware": True, "gptaq_alpha": 0.25, "preprocessors": [{"code": "smoother"}]},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.29.0"}}
W4A4 = {"targets": ["Linear"], "weights": FLOAT4, "input_activations": FLOAT4}


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    """With every key that compressed-tensors has written so far."""
    return {
        **{"quant_method": "compressed-tensors", "format": groups[0]["format"], "ignore": ["lm_head", "re:.*gate$"]},
        **{"config_groups": {f"group_{n}": group for n, group in enumerate(groups)}, "kv_cache_scheme": None},
        **{
            "quantization_status": "compressed",
            "global_compression_ratio": 1.5,
            "sparsity_config": {},
            "version": "0.13",
        },
        **{"transform_config": {}},
        **more,
    }


def listed(algorithm: str, size: int | None) -> dict[str, Any]:
    recipe = {"quant_algo": algorithm} | ({} if size is None else {"group_size": size})
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp.experts": recipe}}


PUBLISHED: dict[str, dict[str, Any]] = {
    # AutoGPTQ, old and new; optimum and transformers; GPTQModel, old and new; AutoRound; others.
    "AutoGPTQ": GPTQ
    | {"damp_percent": 0.01, "static_groups": False, "true_sequential": True, "model_name_or_path": None}
    | {"model_file_base_name": "model", "is_marlin_format": False},
    "AutoGPTQ 0.8": GPTQ | {"checkpoint_format": "gptq", "damp_percent": 0.1, "lm_head": False, "static_groups": True},
    "optimum": GPTQ
    | {"batch_size": 1, "block_name_to_quantize": "model.layers", "cache_block_outputs": True, "damp_percent": 0.1}
    | {"dataset": None, "exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": 2048}
    | {"module_name_preceding_first_block": ["model.embed_tokens"], "modules_in_block_to_quantize": None}
    | {"pad_token_id": None, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": True, "use_exllama": True},
    "transformers 5": GPTQ
    | {"act_group_aware": True, "backend": "auto", "checkpoint_format": "gptq", "format": "gptq", "meta": None},
    "GPTQModel": GPTQ
    | {"checkpoint_format": "gptq", "dynamic": {"-:.*mlp.gate$": {}}, "lm_head": False, "meta": META}
    | {"pack_dtype": "int32"},
    "Qwen3.5 GPTQ-Int4": GPTQ
    | {"dynamic": {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}}},
    "GPTQ, another head": GPTQ
    | {"dynamic": {"+:.*lm_head$": {"bits": 8}, "-:.*gate$": {}, r".*\.experts\..*": {"bits": 4, "sym": True}}},
    "GPTQModel 5": GPTQ
    | {"checkpoint_format": "gptq", "format": "gptq", "method": "gptq", "meta": META, "pack_dtype": "int32"}
    | {"lm_head": False, "pack_impl": "cpu", "rotation": None, "adapter": None},
    "GPTQModel, v2": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "dynamic": None, "desc_act": True},
    "AutoRound as GPTQ": GPTQ
    | {"data_type": "int", "iters": 200, "nsamples": 128, "seqlen": 2048, "autoround_version": "0.5.1", "amp": True}
    | {"enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "enable_quanted_input": True, "lr": 0.005}
    | {"low_gpu_mem_usage": True, "minmax_lr": 0.005, "quant_block_list": None, "scale_dtype": "torch.float16"}
    | {"batch_size": 8, "gradient_accumulate_steps": 1, "damp_percent": 0.01, "act_bits": 16},
    "AutoRound 0.13 as GPTQ": GPTQ
    | {"data_type": "int", "dynamic": {"-:.*in_proj_b.*": {}}, "enable_quanted_input": False},
    "JointQ": GPTQ | {"groupsize": 128, "actorder": False, "checkpoint_format": "gptq"},
    # AutoAWQ, older and newer, of transformers, of GPTQModel, and made from compressed-tensors.
    "AutoAWQ": AWQ | {"modules_to_not_convert": None},
    "AutoAWQ, old": AWQ | {"version": "GEMM"},
    "AutoAWQ, gates left out": AWQ | {"modules_to_not_convert": ["gate"], "do_fuse": False},
    "AWQ of transformers 4": AWQ
    | {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None}
    | {"modules_to_fuse": None, "modules_to_not_convert": ["mlp.gate"]},
    "AWQ of transformers 5": AWQ
    | {"act_group_aware": False, "backend": "auto", "batch_size": 1, "cache_block_outputs": True, "dataset": None}
    | {"damp_percent": 0.1, "desc_act": False, "format": "gemm", "sym": True, "true_sequential": True, "meta": None},
    "AWQ of GPTQModel": AWQ
    | {"checkpoint_format": "gemm", "format": "gemm", "method": "awq", "desc_act": False, "dynamic": None}
    | {"lm_head": False, "meta": META, "pack_dtype": "int32"},
    "AWQ of GPTQModel, some left out": AWQ | {"dynamic": {"-:.*mtp.*": {}, "-:.*attn.*": {}}},
    "AWQ from compressed-tensors": AWQ | {"ignore": ["lm_head"], "modules_to_not_convert": ["lm_head"]},
    "AWQ, short": {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "gemm"},
    "AWQ, a head": AWQ | {"lm_head": False},
    "AWQ of AutoRound": AWQ | {"autoround_version": "0.12.3", "iters": 0, "modules_to_not_convert": ["lm_head"]},
    # DeepSeek-V3, V3.1, V3.2 and V4; Qwen, MiniMax, GLM; transformers; static ones.
    "DeepSeek-V3": FP8,
    "DeepSeek-V3.1": FP8 | {"scale_fmt": "ue8m0"},
    "DeepSeek-V4": FP8 | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    "DeepSeek-V4-Base": FP8 | {"expert_dtype": "fp8"},
    "DeepSeek-V4-NVFP4": FP8
    | {"moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "ignore": ["mtp.*"]}
    | {"producer": {"name": "modelopt"}, "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}}},
    "Qwen3": FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    "MiniMax-M2": FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]},
    "MiniMax, ignored": {"quant_method": "fp8", "ignored_layers": ["gate"], "weight_block_size": [128, 128]},
    "transformers 5, fp8": FP8 | {"dequantize": False, "modules_to_convert": None, "scale_fmt": "float"},
    "static": {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["gate"]},
    "a cache in fp8": FP8 | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "kv_cache_quant_method": "fp8"},
    # ModelOpt: by algorithm, with groups, mixed, with what TensorRT-LLM calls it, and DeepSeek's names.
    "modelopt, NVFP4": MODELOPT
    | {"ignore": ["lm_head"], "config_groups": {"group_0": W4A4}, "kv_cache_scheme": {"num_bits": 8, "dynamic": False}},
    "modelopt, hf_quant_config": {
        **MODELOPT,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
        "kv_cache_quant_algo": "FP8",
    },
    "modelopt, FP8": MODELOPT
    | {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    | {
        "config_groups": {
            "group_0": {k: {"num_bits": 8, "type": "float", "dynamic": False} for k in ("weights", "input_activations")}
        }
    },
    "modelopt, AWQ": MODELOPT
    | {"quant_algo": "NVFP4_AWQ", "group_size": 16, "has_zero_point": False, "pre_quant_scale": True},
    "modelopt, W4A16": MODELOPT
    | {"quant_algo": "W4A16_NVFP4", "config_groups": {"group_0": {"weights": FLOAT4, "targets": ["Linear"]}}},
    "modelopt, channels": MODELOPT
    | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    | {
        "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "channel"}}
        }
    },
    "modelopt, MXFP8": MODELOPT | {"quant_algo": "MXFP8", "group_size": 32},
    "modelopt, blocks": MODELOPT | {"quant_algo": "FP8_PB_WO", "group_size": 128},
    "modelopt, mixed": MODELOPT | listed("FP8_BLOCK_SCALES", 128) | {"exclude_modules": ["*gate"]},
    "modelopt, mixed with groups": MODELOPT
    | listed("FP8_PB_WO", 128)
    | {"config_groups": {"group_0": {"quant_algo": "FP8_PB_WO", "targets": ["model.layers.0.mlp.experts"]}}},
    "modelopt, mixed NVFP4": MODELOPT
    | listed("NVFP4", 16)
    | {"config_groups": {"group_1": W4A4 | {"targets": [EXPERTS[0]]}}},
    "modelopt, experts alone": MODELOPT
    | {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16},
    "modelopt, experts named twice": MODELOPT | listed("NVFP4", 16) | {"moe_quant_algo": "NVFP4"},
    "TensorRT-LLM": {"quant_method": "modelopt", "quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": None},
    # compressed-tensors.
    "W4A16": compressed(GROUP),
    "W4A16, channel": compressed(GROUP | {"weights": GROUP["weights"] | {"strategy": "channel", "group_size": None}}),
    "W4A16, asymmetric": compressed(GROUP | {"weights": GROUP["weights"] | {"symmetric": False, "group_size": 32}}),
    "FP8 blocks": compressed(FP8_BLOCK_GROUP),
    "FP8 dynamic": compressed(CHANNEL_GROUP),
    "FP8 static": compressed(
        CHANNEL_GROUP
        | {"weights": FP8_ARGS | {"strategy": "tensor"}, "input_activations": FP8_ARGS | {"strategy": "tensor"}}
    ),
    "NVFP4": compressed(NVFP4_GROUP),
    "NVFP4A16": compressed(NVFP4_GROUP | {"input_activations": None}),
    "W8A8": compressed(INT8_GROUP),
    "mixed precision": compressed(
        NVFP4_GROUP | {"targets": ["re:.*experts.*"]}, FP8_BLOCK_GROUP, format="mixed-precision"
    ),
    "stored dense": compressed(
        GROUP, sparsity_config={"format": "dense", "global_sparsity": 0.5, "registry_requires_subclass": False}
    ),
    "experts not sparse": compressed(
        GROUP, sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"], "ignore": ["re:.*experts.*"]}
    ),
    "an old one": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": GROUP},
    }
    | {"quantization_status": "frozen", "global_compression_ratio": 1.89, "ignore": ["lm_head"]},
    "gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"]},
}


def read(folder: Path, quantization: dict[str, Any], **more: Any) -> Quantization:
    """As `Checkpoint` does: the config, then the experts of a layer."""
    config = {"num_experts": 2, "quantization_config": quantization}
    found = Quantization.of(folder, config, stacked=quantization["quant_method"] == "mxfp4", **more)
    found.stored(EXPERTS)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_keys_are_no_false_alarm(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, PUBLISHED[name]).stored(EXPERTS).layout.name != "plain"


SUSPICIOUS: dict[str, Any] = {
    **{"zero_points": True, "zero_point_offset": 1, "symmetric_weights": False, "use_bias": True, "scale_bits": 8},
    **{"weight_scale_semantics": "inverse", "scale_rounding": "up", "round_zp": True, "clip_ratio": 0.9},
    **{"storage_format": "tiles", "weight_dtype": "int4", "column_order": "reversed", "packing": "planar"},
    **{"group_order": [1, 0], "block_shape": [64, 64], "nbits_per_codebook": 8, "rotation": "hadamard"},
    **{"input_transform": "hadamard", "smoothquant_val": 0.5, "moe_sparsity": 0.5, "lora_rank": 32, "svdquant": True},
    **{"codebook": "nf4", "outlier_columns": 4, "swizzle": "128x4", "transposed": True, "interleaved": True},
    **{"shift": 2, "expert_overrides": {"7": {"width": 8}}, "mantissa_bits": 3, "quant_type": "uint4", "axis": 1},
    **{"layer_bits": {"0": 8}, "per_layer_quant_config": {"0": {"bits": 8}}, "data_layout": "nk", "limits": [3.0]},
}
"""Keys that no release of the producers has, or that others have."""


def _objects(quantization: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where the objects are that describe the experts' weights."""
    found = [path]
    for part in (
        "config_groups",
        "group_0",
        "weights",
        "input_activations",
        "quantized_layers",
        "model.layers.0.mlp.experts",
    ):
        inner: Any = quantization.get(part)
        if isinstance(inner, dict):
            deeper = _objects(inner, (*path, part))
            found += deeper if part not in ("config_groups", "quantized_layers") else deeper[1:]
    return found


PLACES = [
    (name, path)
    for name in (
        "AutoGPTQ",
        "AutoAWQ",
        "DeepSeek-V3",
        "gpt-oss",
        "W4A16",
        "FP8 blocks",
        "modelopt, NVFP4",
        "modelopt, mixed",
    )
    for path in _objects(PUBLISHED[name])
]


@pytest.mark.parametrize(("name", "path"), PLACES, ids=str)
def test_a_key_that_looks_as_if_it_changed_values_is_refused_everywhere(
    name: str, path: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for key, value in SUSPICIOUS.items():
        quantization = json.loads(json.dumps(PUBLISHED[name]))
        inside = quantization
        for part in path:
            inside = inside[part]
        inside[key] = value
        with pytest.raises(ValueError, match=rf"config\.json: quantization_config.*\b{key}") as error:
            read(tmp_path, quantization)
        assert "ignore_keys" in str(error.value)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "moe_runtime"):
            read(tmp_path, quantization, ignore_keys=(key,))
        assert len([one for one in caplog.messages if key in one]) == 1, "logged, once for all linears"
        inside[key] = None
        read(tmp_path, quantization)


def changed(name: str, *path: str, to: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        quantization = json.loads(json.dumps(PUBLISHED[name]))
        inside = quantization
        for part in path[:-1]:
            inside = inside[part]
        inside[path[-1]] = to
        return quantization

    return make


GROUP_0 = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("made", "key"),
    [
        (changed("W4A16", *GROUP_0, "weights", "actorder", to="group"), "actorder"),
        (changed("W4A16", *GROUP_0, "weights", "actorder", to="dynamic"), "actorder"),
        (changed("W4A16", *GROUP_0, "weights", "dynamic", to=True), "dynamic"),
        (changed("W4A16", *GROUP_0, "weights", "block_structure", to=[64, 64]), "block_structure"),
        (changed("W4A16", *GROUP_0, "output_activations", to={"num_bits": 8}), "output_activations"),
        (changed("W4A16", "sparsity_config", to={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (
            changed("W4A16", "sparsity_config", to={"format": "sparse-bitmask", "targets": ["Linear"]}),
            "sparsity_config",
        ),
        (changed("W4A16", "moe_sparsity_config", to={"method": "novice"}), "moe_sparsity_config"),
        (changed("FP8 dynamic", *GROUP_0, "weights", "type", to="int"), "type"),
        (changed("FP8 dynamic", *GROUP_0, "weights", "group_size", to=64), "group_size"),
        (changed("FP8 dynamic", *GROUP_0, "weights", "symmetric", to=False), "symmetric"),
        (changed("FP8 dynamic", *GROUP_0, "weights", "strategy", to="group"), "strategy"),
        (changed("FP8 dynamic", *GROUP_0, "weights", "strategy", to=["channel"]), "strategy"),
        (changed("FP8 blocks", *GROUP_0, "weights", "symmetric", to=False), "symmetric"),
        (changed("NVFP4", *GROUP_0, "weights", "num_bits", to=8), "num_bits"),
        (changed("NVFP4", *GROUP_0, "weights", "type", to="int"), "type"),
        (changed("NVFP4", *GROUP_0, "weights", "strategy", to="channel"), "strategy"),
        (changed("modelopt, NVFP4", "has_zero_point", to=True), "has_zero_point"),
        (changed("modelopt, NVFP4", "pre_quant_scale", to=True), "pre_quant_scale"),
        (changed("modelopt, AWQ", "pre_quant_scale", to=False), "pre_quant_scale"),
        (changed("modelopt, NVFP4", "awq_block_size", to=128), "awq_block_size"),
        (changed("modelopt, NVFP4", *GROUP_0, "has_zero_point", to=True), "has_zero_point"),
        (changed("modelopt, NVFP4", *GROUP_0, "weights", "symmetric", to=False), "symmetric"),
        (changed("modelopt, NVFP4", *GROUP_0, "weights", "num_bits", to=8), "num_bits"),
        (changed("modelopt, FP8", *GROUP_0, "weights", "strategy", to="channel"), "strategy"),
        (changed("modelopt, blocks", "group_size", to=64), "group_size"),
        (changed("modelopt, mixed with groups", *GROUP_0, "quant_algo", to="FP8"), "quant_algo"),
        (changed("modelopt, NVFP4", "moe_quant_algo", to="FP8"), "quant_algo"),
        (changed("modelopt, experts named twice", "moe_quant_algo", to="FP8"), "moe_quant_algo"),
        (changed("AutoAWQ", "zero_point", to=False), "zero_point"),
        (changed("AutoAWQ", "dynamic", to={"+:.*down_proj": {"group_size": 64}}), "group_size"),
        (changed("AutoAWQ", "backend", to="llm-awq"), "backend"),
        (changed("AutoAWQ", "format", to="gemv_fast"), "format"),
        (changed("AutoAWQ", "desc_act", to=True), "desc_act"),
        (changed("AutoAWQ", "pack_dtype", to="int16"), "pack_dtype"),
        (changed("DeepSeek-V3", "scale_fmt", to="e5m3"), "scale_fmt"),
        (changed("DeepSeek-V3", "fmt", to="e5m2"), "fmt"),
        (changed("DeepSeek-V3", "expert_dtype", to="int4"), "expert_dtype"),
        (changed("DeepSeek-V3", "quant_algo", to="NVFP4"), "quant_algo"),
        (changed("DeepSeek-V4-NVFP4", "moe_quant_algo", to="FP8"), "moe_quant_algo"),
    ],
)
def test_known_keys_with_values_that_are_not_read_are_named(
    made: Callable[[], dict[str, Any]], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: .*\b{re.escape(key)}\b.*: expected .*, got "):
        read(tmp_path, made())


@pytest.mark.parametrize(
    "method", ["quark", "auto-round", "intel/auto-round", "bitsandbytes", "hqq", "torchao", "quanto", "aqlm", "new"]
)
def test_methods_that_are_not_read_say_what_to_do(method: str, tmp_path: Path) -> None:
    message = rf"quantization_config\.quant_method: expected one of .*, got '{method}'; \w+ "
    with pytest.raises(ValueError, match=message):
        Quantization.of(tmp_path, {"num_experts": 2, "quantization_config": {"quant_method": method}})


def test_keys_of_the_file_of_modelopt_are_looked_through_too(tmp_path: Path) -> None:
    said = {"quant_algo": "NVFP4", "group_size": 16, "rotation": "hadamard"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantization\.rotation: expected .*, got 'hadamard'"):
        Quantization.of(tmp_path, {"num_experts": 2})
    assert Quantization.of(tmp_path, {"num_experts": 2}, ignore_keys={"quantization.rotation"}).stored(EXPERTS)


def test_the_other_file_is_named_beside_an_unread_key(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"rotation: .* \(.*hf_quant_config\.json is there too, but was not read\)$"):
        read(tmp_path, FP8 | {"rotation": "hadamard"})


def test_groups_of_other_linears_may_say_what_they_like(tmp_path: Path) -> None:
    other = json.loads(json.dumps(GROUP)) | {"targets": ["re:.*self_attn.*"], "rotation": "hadamard"}
    quantization = compressed(GROUP, other)
    read(tmp_path, quantization)
    found = Quantization.of(tmp_path, {"num_experts": 2, "quantization_config": quantization})
    with pytest.raises(ValueError, match=r"config_groups\.group_1\.rotation"):
        found.stored(["model.layers.0.self_attn.q_proj"])
