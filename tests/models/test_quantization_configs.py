"""Which file and key say how experts are quantized, and that messages name them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.checkpoints.checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from tests.support.checkpoint_writers import (
    fp8_blocks,
    layer_config_of,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    read_e2m1,
    rewrite,
)

CONFIG = MoELayerConfig(hidden_size=128, intermediate_size=128, num_experts=3, top_k=2, max_tokens_per_rank=8)
EXPERTS = "model.layers.{}.mlp.experts"
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed, num_layers=2)
    return tmp_path


def say(folder: Path, file: str, said: dict[str, Any]) -> None:
    """Describe the quantization in `file` alone, which is one of the two that may."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    if file == "config.json":
        config["quantization_config"] = {"quant_method": "modelopt", **said}
    else:
        (folder / file).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(("activations", "tokens"), [(None, "bf16"), (FLOAT4, "nvfp4")])
def test_modelopt_weights_that_are_quantized_alone_leave_tokens_in_bf16(
    activations: dict[str, Any] | None, tokens: str, file: str, folder: Path, seed: int
) -> None:
    """The oracle is a float64 product of the stored weights, dequantized by ml_dtypes."""
    tensors = quantize_experts(folder, modelopt_nvfp4)
    group = {"targets": ["Linear"], "weights": FLOAT4, "input_activations": activations}
    say(folder, file, NVFP4 | {"config_groups": {"group_0": group}})

    def weight(expert: int, part: str) -> torch.Tensor:
        prefix = f"{EXPERTS.format(0)}.{expert}.{part}_proj."
        scales = tensors[f"{prefix}weight_scale"].double().numpy().repeat(16, 1)
        exact = read_e2m1(tensors[f"{prefix}weight"]) * scales * tensors[f"{prefix}weight_scale_2"].double().item()
        return torch.from_numpy(exact)

    gate_up = torch.stack([torch.cat([weight(expert, "gate"), weight(expert, "up")]) for expert in range(3)])
    down = torch.stack([weight(expert, "down") for expert in range(3)])
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(folder, layer=0, context=context, max_tokens_per_rank=256)
        assert (layer.config.token_format, layer.config.weight_format) == (tokens, "nvfp4")
        assert layer.router is not None
        error, _ = relative_error(layer(x), moe_reference(x, *layer.router(x), gate_up, down))
    assert error <= error_bound(tokens, "bf16")
    assert (error > error_bound("bf16", "bf16")) == (tokens == "nvfp4")


def test_config_json_comes_before_a_file_of_modelopt(folder: Path) -> None:
    quantize_experts(folder, fp8_blocks, quantization_config=FP8)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": NVFP4}))
    config = layer_config_of(folder, max_tokens_per_rank=1)
    assert (config.token_format, config.weight_format) == ("fp8_block", "fp8_block")


def test_the_file_of_modelopt_counts_where_config_json_says_nothing(folder: Path) -> None:
    quantize_experts(folder, modelopt_nvfp4, quantization_config=None)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": NVFP4}))
    assert layer_config_of(folder, max_tokens_per_rank=1).token_format == "nvfp4"


def test_the_old_name_in_config_json(folder: Path) -> None:
    quantize_experts(folder, fp8_blocks, compression_config=FP8)
    assert layer_config_of(folder, max_tokens_per_rank=1).weight_format == "fp8_block"
    rewrite(folder, load_all(folder), compression_config=FP8 | {"fmt": "e5m2"})
    file = re.escape(str(folder / "config.json"))
    with pytest.raises(ValueError, match=f"^{file}: compression_config.fmt: expected 'e4m3', got 'e5m2'$"):
        layer_config_of(folder, max_tokens_per_rank=1)
    rewrite(folder, load_all(folder), quantization_config=FP8)
    assert layer_config_of(folder, max_tokens_per_rank=1).weight_format == "fp8_block"


@pytest.mark.parametrize("said", [{"quant_method": "gptq"}, FP8 | {"fmt": "e5m2"}, []])
@pytest.mark.parametrize("key", ["quantization_config", "expert_quantization_config"])
def test_what_is_wrong_in_config_json_names_the_file_that_was_not_read(key: str, said: Any, folder: Path) -> None:
    rewrite(folder, load_all(folder), **{key: said})
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": NVFP4}))
    config, other = (re.escape(str(folder / name)) for name in ("config.json", "hf_quant_config.json"))
    message = rf"^{config}: {key}.*: expected .*, got .* \({other} is there too, but was not read\)$"
    with pytest.raises(ValueError, match=message):
        layer_config_of(folder, max_tokens_per_rank=1)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_algo": "INT4_AWQ"},
            r"quantization\.quant_algo of model.*gate_proj: expected NVFP4 or W4A16_NVFP4, got 'INT4_AWQ'",
        ),
        (NVFP4 | {"group_size": 32}, r"quantization\.group_size of model.*gate_proj: expected 16, got 32"),
        ([], r"quantization: expected an object, got \[\]"),
    ],
)
def test_what_is_wrong_in_the_file_of_modelopt_is_named(said: Any, message: str, folder: Path) -> None:
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": said}))
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: {message}$"):
        layer_config_of(folder, max_tokens_per_rank=1)
