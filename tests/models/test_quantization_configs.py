"""Which file and key say how experts are quantized, and that messages name them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.files import SINGLE_FILE
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from tests.support.checkpoint_writers import (
    FP8,
    fp8_blocks,
    layer_config_of,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    read_fp8_blocks,
    read_nvfp4,
    rewrite,
)

CONFIG = MoELayerConfig(hidden_size=128, intermediate_size=128, num_experts=3, top_k=2, max_tokens_per_rank=8)
EXPERTS = "model.layers.{}.mlp.experts"
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
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
        config["quantization_config"] = {"quant_method": "modelopt"} | said
    else:
        (folder / file).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(("activations", "tokens"), [(None, "bf16"), (FLOAT4, "nvfp4")])
def test_modelopt_weights_that_are_quantized_alone_leave_tokens_in_bf16(
    activations: dict[str, Any] | None, tokens: str, file: str, tmp_path: Path, seed: int
) -> None:
    """The oracle is a float64 product of the stored weights, dequantized by ml_dtypes.

    Several checkpoints, because the bound is for gates that are symmetric, which those of one small layer are not.
    """
    group = {"targets": ["Linear"], "weights": FLOAT4, "input_activations": activations}
    found, wanted = [], []
    for number in range(4):
        folder = tmp_path / str(number)
        write_qwen3_moe_checkpoint(folder, CONFIG, seed=seed + number, num_layers=2)
        tensors = quantize_experts(folder, modelopt_nvfp4)
        say(folder, file, NVFP4 | {"config_groups": {"group_0": group}})
        gate_up = torch.stack([torch.cat([exact(tensors, one, "gate"), exact(tensors, one, "up")]) for one in range(3)])
        down = torch.stack([exact(tensors, one, "down") for one in range(3)])
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(seed + number)).bfloat16()
        with ExpertParallelContext(device="cpu") as context:
            layer = MoELayer.from_checkpoint(folder, layer=0, context=context, max_tokens_per_rank=256)
            assert (layer.config.token_format, layer.config.weight_format) == (tokens, "nvfp4")
            assert layer.router is not None
            found.append(layer(x))
            wanted.append(moe_reference(x, *layer.router(x), gate_up, down))
    error, _ = relative_error(torch.cat(found), torch.cat(wanted))
    assert error <= error_bound(tokens, "bf16")
    assert (error > error_bound("bf16", "bf16")) == (tokens == "nvfp4")


def exact(tensors: dict[str, torch.Tensor], expert: int, part: str) -> torch.Tensor:
    """A stored weight in float64."""
    prefix = f"{EXPERTS.format(0)}.{expert}.{part}_proj."
    names = ("weight", "weight_scale", "weight_scale_2")
    return torch.from_numpy(read_nvfp4({name: tensors[prefix + name] for name in names}))


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


@pytest.mark.parametrize("said", [{"quant_method": "hqq"}, FP8 | {"fmt": "e5m2"}, []])
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
            r"quantization\.quant_algo of model.*gate_proj: expected one of NVFP4, .*, got 'INT4_AWQ'",
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


def quantize_layers(folder: Path, layers: tuple[int, ...]) -> None:
    """NVFP4 experts as ModelOpt writes them, in these layers alone."""
    plain = load_all(folder)
    kept = {name: tensor for name, tensor in plain.items() if int(name.split(".")[2]) not in layers}
    quantized = quantize_experts(folder, modelopt_nvfp4)
    made = {name: tensor for name, tensor in quantized.items() if int(name.split(".")[2]) in layers}
    rewrite(folder, kept | made)


MIXED = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {EXPERTS.format(0): NVFP4}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
GROUP = {"weights": FLOAT4, "input_activations": None}


@pytest.mark.parametrize(
    ("file", "said", "key"),
    [
        (
            "hf_quant_config.json",
            NVFP4 | {"exclude_modules": ["lm_head", "model.layers.1*"]},
            'quantization.exclude_modules[1] = "model.layers.1*"',
        ),
        (
            "config.json",
            NVFP4 | {"ignore": ["model.layers.1*"]},
            'quantization_config.ignore[0] = "model.layers.1*"',
        ),
        ("hf_quant_config.json", MIXED, "quantization.quantized_layers"),
        ("config.json", MIXED, "quantization_config.quantized_layers"),
        ("config.json", {"quant_algo": None, "kv_cache_scheme": "FP8"}, "quantization_config.quant_algo = null"),
        (
            "config.json",
            COMPRESSED | {"config_groups": {"a": GROUP}, "ignore": ["lm_head", r"re:model\.layers\.1"]},
            r'quantization_config.ignore[1] = "re:model\\.layers\\.1"',
        ),
        (
            "config.json",
            COMPRESSED | {"config_groups": {"a": GROUP | {"targets": [r"re:.*layers\.0\."]}}},
            "quantization_config.config_groups",
        ),
        ("config.json", None, "the lack of quantization_config"),
    ],
)
def test_experts_that_are_left_out_but_quantized_name_the_key(
    file: str, said: dict[str, Any] | None, key: str, tmp_path: Path, seed: int
) -> None:
    """`model.layers.1*` matches layer 10 too."""
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed, num_layers=11)
    quantize_layers(tmp_path, (0, 10))
    if said is not None:
        say(tmp_path, file, said)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.stored_of(1).layout.name == "plain"
        linear = f"{EXPERTS.format(10)}.0.gate_proj"
        message = (
            f"{tmp_path / file}: {key} leaves {linear} out of quantization, but {tmp_path / SINGLE_FILE} has tensor "
            f"{linear}.weight_scale"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            checkpoint.layer_config(10, max_tokens_per_rank=1)


def test_one_expert_that_is_left_out_names_the_key(folder: Path) -> None:
    """Or both, if the first quantized expert in the files is one that is not left out."""
    quantize_experts(folder, modelopt_nvfp4)
    say(folder, "config.json", NVFP4 | {"ignore": [f"{EXPERTS.format(1)}.0"]})
    message = (
        r"config\.json: quantization_config\.ignore\[0\] = .*experts\.0. leaves .*experts\.0\.gate_proj out of .* has "
    )
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.stored_of(0).layout.name == "modelopt nvfp4"
        with pytest.raises(ValueError, match=message):
            checkpoint.stored_of(1)
    tensors = {name: tensor for name, tensor in load_all(folder).items() if ".experts.0." not in name}
    rewrite(folder, tensors)
    message = (
        r"config\.json: expected one way .*, got plain .* for .*experts\.0\.gate_proj and modelopt nvfp4 .* for "
        r'.*experts\.1\.gate_proj, by quantization_config\.ignore\[0\] = ".*experts\.0" and '
        r"quantization_config\.quant_algo$"
    )
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.stored_of(1)


def test_a_shared_expert_that_is_left_out_but_quantized_names_the_key(folder: Path) -> None:
    prefix = "model.layers.0.mlp.shared_expert"
    shared = {
        f"{prefix}.{part}_proj.{name}": tensor
        for part in ("gate", "up", "down")
        for name, tensor in modelopt_nvfp4(torch.randn(128, 128)).items()
    }
    sizes = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 128}
    rewrite(folder, load_all(folder) | shared, **sizes)
    say(folder, "hf_quant_config.json", NVFP4 | {"exclude_modules": ["*.mlp.*"]})
    file = re.escape(str(folder / "hf_quant_config.json"))
    message = rf'^{file}: quantization\.exclude_modules\[0\] = "\*\.mlp\.\*" leaves {prefix}\.gate_proj out of '
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.stored_of(0).layout.name == "plain"
        with pytest.raises(ValueError, match=message):
            checkpoint.shared_expert(0)


def test_the_file_that_was_not_read_is_named_where_tensors_contradict_the_one_that_was(folder: Path) -> None:
    quantize_experts(folder, modelopt_nvfp4)
    say(folder, "hf_quant_config.json", NVFP4)
    say(folder, "config.json", NVFP4 | {"ignore": ["*experts*"]})
    message = rf"leaves .* out of quantization, but .* \({folder / 'hf_quant_config.json'} is there too, but was not "
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.stored_of(0)


@pytest.mark.parametrize(
    ("key", "size", "works"),
    [
        ("intermediate_size", 320, {"bf16": "bf16", "fp8_block": "fp8_block", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}),
        ("intermediate_size", 192, {"bf16": "bf16", "fp8_block": "fp8_block", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}),
        ("hidden_size", 192, {"bf16": "bf16", "fp8_block": "fp8_block", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}),
        ("hidden_size", 288, {"bf16": "bf16", "fp8_block": "fp8_block", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}),
        ("hidden_size", 144, {"bf16": "bf16", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}),
        ("hidden_size", 200, {"bf16": "bf16"}),
        ("intermediate_size", 136, {"bf16": "bf16"}),
    ],
)
def test_formats_that_read_short_fp8_blocks(
    key: str, size: int, works: dict[str, str], tmp_path: Path, seed: int
) -> None:
    """They run within their bounds of the checkpoint's weights. Where FP8 is none of them, tokens are bf16."""
    write_qwen3_moe_checkpoint(tmp_path, CONFIG.replace(**{key: size}), seed=seed)
    tensors = quantize_experts(tmp_path, fp8_blocks, quantization_config=FP8)
    message = (
        f"{tmp_path / 'config.json'}: {key}: format fp8_block needs a positive multiple of 16, got {size}; "
        "quantization_config.quant_method says fp8, but tokens are bf16 and weights bf16"
    )
    if "fp8_block" in works:
        assert layer_config_of(tmp_path, max_tokens_per_rank=256).token_format == "fp8_block"
    else:
        with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
            config = layer_config_of(tmp_path, max_tokens_per_rank=256)
        assert config == layer_config_of(tmp_path, max_tokens_per_rank=256, token_format="bf16")
    for name in {"bf16", "fp8_block", "mxfp8", "nvfp4"} - set(works):
        with pytest.raises(ValueError, match=f"{key}: format {name} needs a positive multiple of [0-9]+, got {size}$"):
            layer_config_of(tmp_path, max_tokens_per_rank=256, token_format=name)

    def weight(expert: int, part: str) -> torch.Tensor:
        prefix = f"{EXPERTS.format(0)}.{expert}.{part}_proj."
        return torch.from_numpy(read_fp8_blocks(tensors[f"{prefix}weight"], tensors[f"{prefix}weight_scale_inv"]))

    gate_up = torch.stack([torch.cat([weight(expert, "gate"), weight(expert, "up")]) for expert in range(3)])
    down = torch.stack([weight(expert, "down") for expert in range(3)])
    hidden = size if key == "hidden_size" else 128
    x = torch.randn(256, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    for tokens, weights in works.items():
        with ExpertParallelContext(device="cpu") as context:
            layer = MoELayer.from_checkpoint(tmp_path, context=context, max_tokens_per_rank=256, token_format=tokens)
            assert (layer.config.token_format, layer.config.weight_format) == (tokens, weights)
            assert layer.router is not None
            error, _ = relative_error(layer(x), moe_reference(x, *layer.router(x), gate_up, down))
        # The weights that are compared with are those of FP8.
        assert error <= error_bound(tokens, "bf16" if weights == "fp8_block" else weights)


def test_bf16_is_not_chosen_where_sizes_fit(tmp_path: Path, seed: int) -> None:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed)
    quantize_experts(tmp_path, fp8_blocks, quantization_config=FP8)
    with pytest.raises(ValueError, match=r"only nvfp4 tokens have one, got it with fp8_block tokens$"):
        layer_config_of(tmp_path, max_tokens_per_rank=8, intermediate_gsf=3.0)


@pytest.mark.parametrize(
    ("quantizer", "said", "message", "leftover"),
    [
        (modelopt_nvfp4, FP8, r"quant_method says fp8, but .*: tensor .*\.weight: expected F8_E4M3, got U8", False),
        (modelopt_nvfp4, FP8, r"quant_method says fp8, but .*: tensor .*\.weight: expected F8_E4M3, got U8", True),
        (
            lambda w: {"weight": modelopt_nvfp4(w)["weight"], "weight_scale_inv": torch.ones(1, 1)},
            FP8,
            r"quant_method says fp8, but .*: tensor .*\.weight: expected F8_E4M3, got U8",
            True,
        ),
        (
            fp8_blocks,
            {"quant_method": "modelopt"} | NVFP4,
            r"quant_algo says modelopt nvfp4, but .*: tensor .*\.weight: expected U8, got F8_E4M3",
            False,
        ),
        (
            modelopt_nvfp4,
            COMPRESSED | {"config_groups": {"a": GROUP}},
            r"config_groups\.a\.input_activations says nvfp4-pack-quantized, but .*\.weight_packed is missing",
            True,
        ),
    ],
)
def test_tensors_of_another_layout_name_the_key_that_says_otherwise(
    quantizer: Any, said: dict[str, Any], message: str, leftover: bool, folder: Path
) -> None:
    """As when a model is quantized again, and its old description stays."""
    quantize_experts(folder, quantizer, quantization_config=said)
    other, end = folder / "hf_quant_config.json", ""
    if leftover:
        other.write_text(json.dumps({"quantization": NVFP4}))
        end = rf" \({re.escape(str(other))} is there too, but was not read\)"
    config = re.escape(str(folder / "config.json"))
    with pytest.raises(ValueError, match=rf"^{config}: quantization_config\.{message}{end}$"):
        layer_config_of(folder, max_tokens_per_rank=1)
