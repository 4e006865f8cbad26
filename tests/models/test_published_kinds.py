"""Models of many kinds, read by the names in their files: transformers' own blocks give the answers."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.converted_experts import TARGET_LAYOUTS, quantization_config, quantized_linear
from moe_runtime.checkpoints.families import layer_config
from moe_runtime.config import MoELayerConfig, RouterConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, relative_error
from tests.support.checkpoint_writers import layer_config_of, load_all, rewrite, stack_experts
from tests.support.comparison import assert_same_bits
from tests.support.published_configs import PUBLISHED, moe_layers

CONFIG = MoELayerConfig(hidden_size=64, intermediate_size=48, num_experts=4, top_k=2, max_tokens_per_rank=8)

# Sizes are apart, so that no key can stand for another. Every config class takes those that it knows.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 3,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "num_experts": 12,
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_dense_layers": 0,
    "layer_types": ["full_attention"] * 2,
}
GROUPED = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5}
KINDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": GROUPED | {"layer_types": None},
    "cohere2_moe": {},
    "deepseek_v2": {"routed_scaling_factor": 1.5},
    "deepseek_v32": GROUPED | {"layer_types": None},
    "dots1": GROUPED | {"norm_topk_prob": True},
    "exaone_moe": {"routed_scaling_factor": 1.5},
    "flex_olmo": {},
    "granitemoe": {},
    "glm4_moe": GROUPED,
    "glm4_moe_lite": GROUPED,
    "glm4v_moe": GROUPED,
    "glm_moe_dsa": {"layer_types": None},
    "jamba": {"layer_types": None},
    "kimi_linear": {"layer_types": None},
    "lfm2_moe": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {"layer_types": None},
    "minimax_m2": {},
    "mistral4": {},
    "nemotron_h": GROUPED
    | {"layer_types": ["full_attention", "moe", "moe"], "moe_shared_expert_intermediate_size": 80},
    "olmoe": {},
    "qwen3_5_moe": {},
    "qwen3_next": {},
    "qwen3_vl_moe": {},
    "solar_open": GROUPED,
}


def tiny_model(kind: str, seed: int, **changes: Any) -> Any:
    """A model of transformers, or its part for text, whose weights are bf16 numbers."""
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    classes = [value for value in vars(modeling).values() if getattr(value, "__module__", "") == modeling.__name__]
    made = next(
        made
        for end in ("ForCausalLM", "TextModel")
        for made in classes
        if isinstance(made, type) and made.__name__.endswith(end)
    )
    names = made.config_class.attribute_map
    known = made.config_class().to_dict().keys() | {key for key in names if names[key] not in SIZES}
    settings = {key: value for key, value in (SIZES | changes).items() if key in known and value is not None}
    torch.manual_seed(seed)
    model = made(made.config_class(**settings, experts_implementation="eager")).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("correction_bias", "expert_bias")):
                tensor.normal_(std=0.1)
            elif tensor.ndim > 1 and "norm" not in name and "rotary" not in name:
                tensor.normal_(std=tensor.shape[-1] ** -0.5).copy_(tensor.bfloat16())
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_each_kind_is_that_of_transformers(kind: str, tmp_path: Path, seed: int) -> None:
    """Router, experts and shared expert, under the names that are published."""
    pytest.importorskip(f"transformers.models.{kind}", reason="this transformers has no such models")
    model = tiny_model(kind, seed, **KINDS[kind])
    model.save_pretrained(tmp_path)
    blocks = {
        int(re.findall(r"layers\.(\d+)", name)[0]): block
        for name, block in model.named_modules()
        if hasattr(getattr(block, "experts", None), "down_proj")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with Checkpoint(tmp_path) as checkpoint:
            assert [layer for layer in checkpoint.moe_layers() if checkpoint.has_experts(layer)] == list(blocks)
        index = max(blocks)
        with ExpertParallelContext(device="cpu") as context:
            layer = MoELayer.from_checkpoint(tmp_path, layer=index, context=context, max_tokens_per_rank=256)
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
            y = layer(x)
    with torch.no_grad():
        want = blocks[index](x.float()[None])
    want = want[0] if isinstance(want, tuple) else want
    # A shared expert rounds once more to bf16, and so does the sum.
    bound = error_bound("bf16", "bf16") * (1 if layer.config.shared_expert is None else 2)
    assert relative_error(y, want.view(256, 64).double())[0] <= bound


NULLS = ("n_group", "topk_group", "topk_method", "num_nextn_predict_layers", "n_shared_experts", "moe_layer_freq")


def test_keys_that_are_null_mean_none_and_missing_ones_what_transformers_has() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256}
    sizes |= {"num_experts_per_tok": 8, "num_hidden_layers": 61}
    written = transformers.DeepseekV3Config().to_dict()
    assert layer_config(sizes, max_tokens_per_rank=8) == layer_config(written, max_tokens_per_rank=8)
    assert moe_layers(sizes) == [layer for layer in moe_layers(written) if layer < 61] == list(range(3, 61))
    nulls = sizes | dict.fromkeys(NULLS) | {"routed_scaling_factor": None, "first_k_dense_replace": None}
    config = layer_config(nulls, max_tokens_per_rank=8)
    assert (config.router, config.shared_expert) == (RouterConfig(kind="sigmoid", correction_bias=True), None)
    assert moe_layers(nulls) == list(range(61))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": [0, 2]}, r"text_config\.moe_layer_freq: expected 0 or 1 for each layer, got 2"),
        ({"moe_layer_freq": [1] * 2001}, r"text_config\.moe_layer_freq: expected at most 2000 layers, got 2001"),
        ({"moe_layer_freq": "1"}, r"text_config\.moe_layer_freq: expected a positive integer, got '1'"),
        ({"mlp_layer_types": ["dense", "moe"]}, r"text_config\.mlp_layer_types: expected dense or sparse, got 'moe'"),
        ({"mlp_layer_types": 5}, r"text_config\.mlp_layer_types: expected a list of layers, got 5"),
        ({"n_shared_experts": -1}, r"text_config\.n_shared_experts: expected an integer of at least 0, got -1"),
        ({"scoring_func": "sqrtsoftplus"}, r"text_config\.scoring_func: expected softmax or sigmoid, got 'sqrt"),
        ({"swiglu_limit": 7.0}, r"text_config\.swiglu_limit: expected none, got 7\.0"),
        ({"topk_method": "new", "n_group": 2}, r"text_config\.topk_method: expected noaux_tc or greedy, got 'new'"),
        ({"scoring_func": "softmax", "n_group": 2}, r"text_config\.n_group: expected 1 with a softmax router .*got 2"),
        ({"num_experts_per_tok": None}, r"text_config\.num_experts_per_tok: expected a positive integer, got None"),
        ({"hidden_activation": "gelu"}, r"text_config\.hidden_activation: expected silu, got 'gelu'"),
    ],
)
def test_keys_of_a_nested_config_are_named(changes: dict[str, Any], message: str) -> None:
    text = {"model_type": "x", "hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 4}
    text |= {"num_experts_per_tok": 2, "num_hidden_layers": 2}
    config = {"model_type": "y", "text_config": text | changes}
    with pytest.raises(ValueError, match=f"^file: {message}"):
        layer_config(config, source="file", max_tokens_per_rank=8)
        moe_layers(config, source="file")


def test_a_norm_that_no_file_has_is_refused() -> None:
    config = PUBLISHED["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]
    with pytest.raises(ValueError, match=r"^post_expert_norm: config says None, got PostExpertNormConfig"):
        layer_config(config, max_tokens_per_rank=8, post_expert_norm={"eps": 1e-6})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: expected relu2, got 'silu'"),
        ({"moe_latent_size": 32}, "moe_latent_size: expected none, got 32"),
        ({"mlp_bias": True}, "mlp_bias: expected false, got True"),
        ({"hybrid_override_pattern": 5, "layers_block_type": None}, "hybrid_override_pattern: expected a text, got 5"),
        ({"moe_shared_expert_intermediate_size": 0}, "moe_shared_expert_intermediate_size: expected a positive int"),
    ],
)
def test_keys_of_nemotron_h_are_named(changes: dict[str, Any], message: str) -> None:
    config = {"model_type": "nemotron_h", "hidden_size": 64, "moe_intermediate_size": 48, "n_routed_experts": 4}
    config |= {"num_experts_per_tok": 2, "layers_block_type": ["mamba", "moe"]}
    config |= {"moe_shared_expert_intermediate_size": 48, "mlp_hidden_act": None}
    assert moe_layers(config) == [1] and layer_config(config, max_tokens_per_rank=8).activation.function == "relu2"
    config |= {"num_hidden_layers": 2} | changes
    with pytest.raises(ValueError, match=f"^file: {message}"):
        layer_config(config, source="file", max_tokens_per_rank=8)
        moe_layers(config, source="file")


@pytest.mark.parametrize("name", TARGET_LAYOUTS)
def test_quantized_experts_without_a_gate(name: str, tmp_path: Path, seed: int) -> None:
    """Each linear of each expert has the bits that were written; conversion is refused."""
    pytest.importorskip("transformers.models.nemotron_h", reason="this transformers has no such models")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96}
    tiny_model("nemotron_h", seed, **KINDS["nemotron_h"] | sizes).save_pretrained(tmp_path)
    tensors, layout = load_all(tmp_path), TARGET_LAYOUTS[name]
    written: dict[str, dict[str, torch.Tensor]] = {}
    for key in [key for key in tensors if ".experts." in key]:
        w = tensors.pop(key)
        written[key.removesuffix(".weight")] = linear = quantized_linear(w, w, layout)
        tensors |= {f"{key.removesuffix('weight')}{suffix}": tensor for suffix, tensor in linear.items()}
    plain = [key.removesuffix(".weight") for key in tensors if key.endswith(".weight") and ".experts." not in key]
    target = {r"re:.*\.experts\.\d+\.(up|down)_proj$": False}
    rewrite(tmp_path, tensors, quantization_config=quantization_config(layout, target, plain))
    with Checkpoint(tmp_path) as checkpoint:
        c = checkpoint.layer_config(2, max_tokens_per_rank=64)
        assert (c.weight_format, c.activation.gated) == (name, False)
        for number, expert in enumerate(checkpoint.experts(2, range(c.num_experts))):
            for part, w in (("up_proj", expert.gate_up), ("down_proj", expert.down)):
                assert isinstance(w, ExpertWeights) and w.gate_up is None
                linear = written[f"backbone.layers.2.mixer.experts.{number}.{part}"]
                assert_same_bits(w.quants[0].view(torch.uint8), linear[layout.weight].view(torch.uint8))
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(tmp_path, layer=2, context=context, max_tokens_per_rank=64)
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
        assert layer(x).isfinite().all()
    other = "mxfp8" if name != "mxfp8" else "nvfp4"
    with pytest.raises(ValueError, match=r"^source: backbone\.layers\..*\.mixer\.experts of .* have no gate"):
        convert_checkpoint(tmp_path, tmp_path / "other", other)


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    write_qwen3_moe_checkpoint(tmp_path / "plain", CONFIG, seed=seed, num_layers=2)
    return tmp_path / "plain"


def copied(folder: Path, name: str, rename: Any, **config: Any) -> Path:
    """A copy of a checkpoint with other names of tensors and other keys."""
    other = folder.parent / name
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    rewrite(other, {rename(key): tensor for key, tensor in load_all(folder).items()}, **config)
    return other


def read(folder: Path, layer: int = 1) -> list[torch.Tensor]:
    """Router and experts of a layer."""
    with Checkpoint(folder) as checkpoint:
        experts = list(checkpoint.experts(layer, range(4)))
        found = [checkpoint.router(layer).weight, *(t for one in experts for t in (one.gate_up, one.down))]
    assert all(isinstance(tensor, torch.Tensor) for tensor in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "", "a.b."])
def test_layers_are_found_under_any_prefix(prefix: str, folder: Path) -> None:
    """Beside layers that are not the model's, with the config of its text in another one."""
    config = json.loads((folder / "config.json").read_text())
    other = copied(folder, "other", lambda key: key.replace("model.", prefix, 1))
    tensors = load_all(other)
    extra = {f"mtp.layers.0.mlp.experts.{e}.gate_proj.weight": torch.zeros(1) for e in range(4)}
    extra |= {
        "model.visual.blocks.0.mlp.experts.0.w": torch.zeros(1),
        "talker.layers.1.mlp.experts.0.w": torch.zeros(1),
    }
    rewrite(other, tensors | extra)
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": config}))
    for got, want in zip(read(other), read(folder), strict=True):
        assert_same_bits(got, want)
    assert layer_config_of(other, 1, max_tokens_per_rank=8) == layer_config_of(folder, 1, max_tokens_per_rank=8)
    with Checkpoint(other) as checkpoint:
        assert checkpoint.moe_layers() == [0, 1]
    rewrite(other, tensors | {"decoder.layers.1.mlp.experts.0.down_proj.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"expected experts in one list of layers, got .*layers and .*layers"):
        read(other)


def test_two_blocks_of_experts_in_a_layer_are_named(folder: Path) -> None:
    other = copied(folder, "other", lambda key: key.replace("layers.1.mlp.experts.3", "layers.1.vision.experts.0"))
    message = r"expected experts of layer 1 in one module, got model\.layers\.1\.mlp and model\.layers\.1\.vision"
    with pytest.raises(ValueError, match=message):
        read(other)


def test_mixtral_is_read_as_each_of_its_writers_names_it(folder: Path) -> None:
    """Its makers' `w1`, and `gate_proj` below `mlp` as llm-compressor writes it."""
    config = {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 48}
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    new = copied(folder, "new", lambda key: key, **config)
    old = copied(
        folder,
        "old",
        lambda key: re.sub("|".join(parts), lambda m: parts[m[0]], key).replace(".mlp.", ".block_sparse_moe."),
        **config,
    )
    for got, same, want in zip(read(new), read(old), read(folder), strict=True):
        assert_same_bits(got, want)
        assert_same_bits(same, want)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_are_read_either_way_round(transposed: bool, folder: Path) -> None:
    """As Qwen3.5-MoE and as Qwen3-VL-MoE is published. The shapes tell which it is."""
    other = copied(folder, "other", lambda key: key)
    stack_experts(other, transposed=transposed)
    for got, want in zip(read(other), read(folder), strict=True):
        assert_same_bits(got, want)


def test_layers_for_prediction_are_those_that_the_files_hold(folder: Path) -> None:
    """Unless the config has their number."""
    config = {"num_hidden_layers": 1}
    other = copied(folder, "other", lambda key: key, **config)
    with Checkpoint(other) as checkpoint:
        assert checkpoint.moe_layers() == [0, 1] and checkpoint.has_experts(1)
        with pytest.raises(ValueError, match=r"layer: .* says 1 layers, asked for layer 2"):
            checkpoint.names(2)
    for got, want in zip(read(other), read(folder), strict=True):
        assert_same_bits(got, want)
    rewrite(other, load_all(other), num_nextn_predict_layers=0)
    with Checkpoint(other) as checkpoint:
        assert checkpoint.moe_layers() == [0]


def test_an_unknown_kind_is_read_with_a_warning(folder: Path) -> None:
    other = copied(folder, "other", lambda key: key.replace("layers.0.mlp.experts", "layers.0.x"), model_type="new")
    with pytest.warns(
        UserWarning, match=r"config\.json: model_type: 'new' is not known; its router is read as .*softm"
    ):
        got = read(other)
    for one, want in zip(got, read(folder), strict=True):
        assert_same_bits(one, want)
    with pytest.warns(UserWarning), Checkpoint(other) as checkpoint:
        assert checkpoint.moe_layers() == [1], "the files say which layers have experts"
        with pytest.raises(ValueError, match=r"layer: .*model\.safetensors says that layer 0 has no experts"):
            checkpoint.names(0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shared_experts.gate_proj.weight", "no shared expert"),
        ("shared_mlp.gate_proj.weight_packed", "no shared expert"),
        ("shared_expert_gate.weight", "no shared expert with a gate"),
        ("gate.e_score_correction_bias", "a softmax router without it"),
        ("expert_bias", "a softmax router without it"),
        ("gate.bias", "a softmax router without it; only 0"),
    ],
)
def test_tensors_that_would_be_left_out_are_named(name: str, message: str, folder: Path) -> None:
    name, value = f"model.layers.1.mlp.{name}", float(name == "gate.bias")
    rewrite(folder, load_all(folder) | {name: torch.full((4,), value)})
    with (
        ExpertParallelContext(device="cpu") as context,
        pytest.raises(ValueError, match=rf"tensor {name} is not expected: .*config\.json says {message}"),
    ):
        MoELayer.from_checkpoint(folder, layer=1, context=context, max_tokens_per_rank=8)
