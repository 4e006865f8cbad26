"""Files of DeepSeek-V4, of TensorRT-LLM's FP8 blocks and of ModelOpt with DeepSeek's names: read value for value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.files import SINGLE_FILE
from moe_runtime.checkpoints.layouts import hold_scales
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import MoELayerConfig
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from tests.support.checkpoint_writers import (
    FP8,
    fp8_blocks,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    read_e2m1,
    read_fp8_blocks,
    rewrite,
)
from tests.support.comparison import assert_same_bits

HIDDEN, INNER, EXPERTS = 512, 256, 3
V4 = {
    **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 4},
    **{"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "n_routed_experts": EXPERTS, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "num_hash_layers": 3, "num_nextn_predict_layers": 1},
    "hidden_act": "silu",
}
PARTS = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
Tensors = dict[str, torch.Tensor]


def fp4(rows: int, columns: int, rng: np.random.Generator) -> Tensors:
    """Every byte of two codes and every scale but NaN, if there is room for them."""
    raw = rng.permutation(np.resize(np.arange(256), rows * columns // 2)).astype(np.uint8).reshape(rows, -1)
    scales = rng.permutation(np.resize(np.arange(255), rows * columns // 32)).astype(np.uint8).reshape(rows, -1)
    assert set(raw.flat) == set(range(256)) and set(scales.flat) == set(range(255))
    return {
        "weight": torch.from_numpy(raw.view(np.int8)),
        "scale": torch.from_numpy(scales).view(torch.float8_e8m0fnu),
    }


def fp8(rows: int, columns: int, rng: np.random.Generator, *, e8m0: bool = False) -> Tensors:
    """FP8 blocks with `.scale`, powers of two or any numbers."""
    made = fp8_blocks(torch.from_numpy(rng.standard_normal((rows, columns), dtype=np.float32)))
    scales = made["weight_scale_inv"]
    scales = torch.exp2(scales.log2().ceil()).to(torch.float8_e8m0fnu) if e8m0 else scales
    return {"weight": made["weight"], "scale": scales}


def nvfp4(rows: int, columns: int, rng: np.random.Generator) -> Tensors:
    return modelopt_nvfp4(torch.from_numpy(rng.standard_normal((rows, columns), dtype=np.float32)))


def fp4_values(parts: Tensors) -> np.ndarray:
    """float64 by ml_dtypes. The largest scale times 6 is infinite in fp32."""
    scales = parts["scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return read_e2m1(parts["weight"].view(torch.uint8)) * scales.repeat(32, 1)


def fp8_values(parts: Tensors) -> np.ndarray:
    return read_fp8_blocks(parts["weight"], parts["scale"])


def write(folder: Path, experts: Any, seed: int, *, layers: int = 4, **config: Any) -> Tensors:
    """A model by the names of DeepSeek-V4: hash layers, then one with a bias, and a module for prediction."""
    rng, made = np.random.default_rng(seed), dict[str, torch.Tensor]()
    for block in (*(f"layers.{layer}.ffn" for layer in range(layers)), "mtp.0.ffn"):
        made[f"{block}.gate.weight"] = torch.randn(EXPERTS, HIDDEN).bfloat16()
        if block in ("layers.3.ffn", "mtp.0.ffn"):
            made[f"{block}.gate.bias"] = torch.randn(EXPERTS)
        else:
            made[f"{block}.gate.tid2eid"] = torch.zeros(64, 2, dtype=torch.int32)
        for part, (rows, columns) in PARTS.items():
            made |= {f"{block}.shared_experts.{part}.{k}": v for k, v in fp8(rows, columns, rng, e8m0=True).items()}
            for expert in range(EXPERTS):
                made |= {f"{block}.experts.{expert}.{part}.{k}": v for k, v in experts(rows, columns, rng).items()}
    made["norm.weight"] = torch.ones(HIDDEN)
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps(V4 | config))
    return made


def parts_of(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    "config",
    [
        {"expert_dtype": "fp4", "quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
        {"quantization_config": FP8 | {"scale_fmt": "ue8m0", "expert_dtype": "fp4", "weight_block_size": [32, 32]}},
    ],
)
def test_experts_in_fp4_are_mxfp4_bit_for_bit(config: dict[str, Any], tmp_path: Path, seed: int) -> None:
    tensors = write(tmp_path, fp4, seed, **config)
    with Checkpoint(tmp_path, routers=False) as checkpoint:
        assert checkpoint.moe_layers() == [0, 1, 2, 3]
        stored = checkpoint.stored_of(0)
        assert (stored.layout.format.name, stored.token_format, stored.key) == ("mxfp4", "bf16", "expert_dtype")
        for layer in (0, 3):
            buffers = checkpoint.quant_buffers(layer, "mxfp4", EXPERTS, torch.device("cpu"))
            for expert, one in enumerate(checkpoint.experts(layer, range(EXPERTS), buffers)):
                gate, up, down = (parts_of(tensors, f"layers.{layer}.ffn.experts.{expert}.{part}.") for part in PARTS)
                assert isinstance(one.gate_up, ExpertWeights) and isinstance(one.down, ExpertWeights)
                want = torch.cat([gate["weight"], up["weight"]]).view(torch.uint8)
                assert_same_bits(one.gate_up.quants[0], want)
                assert_same_bits(one.down.quants[0], down["weight"].view(torch.uint8))
                exact = np.concatenate([fp4_values(gate), fp4_values(up)])
                with np.errstate(over="ignore"):
                    np.testing.assert_array_equal(dense(one.gate_up).numpy(), exact.astype(np.float32))
                    np.testing.assert_array_equal(dense(one.down).numpy(), fp4_values(down).astype(np.float32))


@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("said", [{}, {"expert_dtype": "fp8"}])
def test_fp8_blocks_with_short_names(said: dict[str, Any], e8m0: bool, tmp_path: Path, seed: int) -> None:
    tensors = write(
        tmp_path, lambda *sizes: fp8(*sizes, e8m0=e8m0), seed, quantization_config=FP8 | {"scale_fmt": "ue8m0"}, **said
    )
    with Checkpoint(tmp_path, routers=False) as checkpoint:
        stored = checkpoint.stored_of(1)
        assert (stored.layout.format.name, stored.token_format) == ("fp8_block", "fp8_block")
        for expert, one in enumerate(checkpoint.experts(1, range(EXPERTS))):
            gate, up, down = (parts_of(tensors, f"layers.1.ffn.experts.{expert}.{part}.") for part in PARTS)
            assert isinstance(one.gate_up, ExpertWeights) and isinstance(one.down, ExpertWeights)
            assert_same_bits(one.gate_up.quants[0], torch.cat([gate["weight"], up["weight"]]))
            assert_same_bits(one.down.quants[0], down["weight"])
            exact = np.concatenate([fp8_values(gate), fp8_values(up)])
            np.testing.assert_array_equal(dense(one.gate_up).numpy(), exact.astype(np.float32))
            np.testing.assert_array_equal(dense(one.down).numpy(), fp8_values(down).astype(np.float32))


def test_experts_that_modelopt_quantized_again(tmp_path: Path, seed: int) -> None:
    """The rest stays FP8."""
    more = {"moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "ignore": ["mtp.*"]}
    listed = {f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in range(4)}
    for config in (FP8 | {"moe_quant_algo": "NVFP4"}, FP8 | more | {"quantized_layers": listed}):
        tensors = write(tmp_path, nvfp4, seed, expert_dtype="fp4", quantization_config=config)
        with Checkpoint(tmp_path, routers=False) as checkpoint:
            (one,) = checkpoint.experts(2, [1])
            assert isinstance(one.down, ExpertWeights) and checkpoint.stored_of(2).token_format == "nvfp4"
            assert_same_bits(one.down.quants[0], tensors["layers.2.ffn.experts.1.w2.weight"])
            shared = [f"layers.2.ffn.shared_experts.{part}" for part in PARTS]
            assert checkpoint.rest.stored(shared).layout.name == "fp8"


def test_fp4_that_the_config_does_not_say_is_refused(tmp_path: Path, seed: int) -> None:
    write(tmp_path, fp4, seed, layers=1, quantization_config=FP8)
    message = (
        r"config\.json: quantization_config\.quant_method says fp8, but .*: "
        r"tensor layers\.0\.ffn\.experts\.0\.w1\.weight: expected F8_E4M3, got I8"
    )
    with Checkpoint(tmp_path, routers=False) as checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.stored_of(0)
    write(tmp_path, fp8, seed, layers=1, expert_dtype="fp4", quantization_config=FP8)
    message = r"config\.json: expert_dtype says .*: tensor .*\.w1\.weight: expected I8 or U8, got F8_E4M3"
    with Checkpoint(tmp_path, routers=False) as checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.stored_of(0)


def test_a_scale_that_is_not_a_number_is_named(tmp_path: Path, seed: int) -> None:
    config = {"expert_dtype": "fp4", "quantization_config": FP8}
    tensors, name = write(tmp_path, fp4, seed, layers=1, **config), "layers.0.ffn.experts.2.w3.scale"
    tensors[name].view(torch.uint8)[5, 3] = 255
    save_file(tensors, tmp_path / SINGLE_FILE)
    with (
        Checkpoint(tmp_path, routers=False) as checkpoint,
        pytest.raises(ValueError, match=rf"tensor {re.escape(name)}: expected finite scales, .* \[5, 3\]"),
    ):
        list(checkpoint.experts(0, [2]))


def test_a_whole_layer_of_deepseek_v4_is_refused_by_name(tmp_path: Path, seed: int) -> None:
    """Its router scores in another way, and its first layers route by token id."""
    write(tmp_path, fp4, seed, layers=1, expert_dtype="fp4", quantization_config=FP8)
    with pytest.raises(ValueError, match=r"config\.json: model_type: .* got 'deepseek_v4'"):
        Checkpoint(tmp_path)


def test_expert_dtype_says_nothing_of_experts_with_a_description_of_their_own(tmp_path: Path, seed: int) -> None:
    """`convert` writes one, and leaves the rest of the config as it is."""

    def converted(rows: int, columns: int, rng: np.random.Generator) -> Tensors:
        made = fp8(rows, columns, rng)
        return {"weight": made["weight"], "weight_scale_inv": made["scale"]}

    keys = {"expert_dtype": "fp4", "quantization_config": FP8, "expert_quantization_config": FP8}
    write(tmp_path, converted, seed, layers=1, **keys)
    with Checkpoint(tmp_path, routers=False) as checkpoint:
        assert checkpoint.stored_of(0).layout.name == "fp8"
        (one,) = checkpoint.experts(0, [1])
        assert isinstance(one.down, ExpertWeights)


def test_an_expert_that_is_not_quantized_again_is_named(tmp_path: Path, seed: int) -> None:
    listed = {f"layers.0.ffn.experts.{expert}": {"quant_algo": "NVFP4"} for expert in (0, 1)}
    write(tmp_path, nvfp4, seed, layers=1, quantization_config=FP8 | {"quantized_layers": listed})
    message = r"modelopt nvfp4 .* for layers\.0\.ffn\.experts\.0\.w1 and plain .* for layers\.0\.ffn\.experts\.2\.w1"
    with Checkpoint(tmp_path, routers=False) as checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.stored_of(0)


def test_short_names_of_scales_count_beside_weights_alone() -> None:
    assert hold_scales(["layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale"])
    assert not hold_scales(["layers.0.router.scale", "layers.0.router.proj.weight", "layers.0.attn.wq_a.weight"])


def with_name(name: str, w: torch.Tensor) -> Tensors:
    made = fp8_blocks(w)
    return {"weight": made["weight"], name: made["weight_scale_inv"]}


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({"quant_algo": "FP8_BLOCK_SCALES"}, "fp8_block"),
        ({"quant_algo": "fp8_block_scales", "group_size": 128, "exclude_modules": ["lm_head"]}, "fp8_block"),
        ({"quant_algo": "FP8_PB", "group_size": 128}, "fp8_block"),
        ({"quant_algo": "FP8_PB_WO", "group_size": 128}, "bf16"),
        (
            {"quant_algo": "MIXED_PRECISION"}
            | {
                "quantized_layers": {
                    "model.layers.0.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}
                }
            },
            "fp8_block",
        ),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_fp8_blocks_under_modelopt(
    file: str, said: dict[str, Any], tokens: str, name: str, tmp_path: Path, seed: int
) -> None:
    sizes = MoELayerConfig(hidden_size=256, intermediate_size=176, num_experts=2, top_k=1, max_tokens_per_rank=8)
    write_qwen3_moe_checkpoint(tmp_path, sizes, seed=seed)
    tensors = quantize_experts(tmp_path, lambda w: with_name(name, w))
    if file == "config.json":
        rewrite(tmp_path, tensors, quantization_config={"quant_method": "modelopt"} | said)
    else:
        (tmp_path / file).write_text(json.dumps({"quantization": said | {"kv_cache_quant_algo": None}}))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layer_config(0, max_tokens_per_rank=1).token_format == tokens
        for expert, one in enumerate(checkpoint.experts(0, range(2))):
            prefix = f"model.layers.0.mlp.experts.{expert}.down_proj."
            exact = read_fp8_blocks(tensors[f"{prefix}weight"], tensors[f"{prefix}{name}"])
            np.testing.assert_array_equal(dense(one.down).numpy(), exact.astype(np.float32))
            assert isinstance(one.down, ExpertWeights)
            assert_same_bits(one.down.quants[0], tensors[f"{prefix}weight"])


@pytest.mark.parametrize("listed", [None, [], ["gate"], ["mlp.experts"]])
def test_what_fp8_lists_as_left_out_does_not_count_against_the_tensors(
    listed: list[str] | None, tmp_path: Path, seed: int
) -> None:
    sizes = MoELayerConfig(hidden_size=128, intermediate_size=128, num_experts=2, top_k=1, max_tokens_per_rank=8)
    write_qwen3_moe_checkpoint(tmp_path, sizes, seed=seed, num_layers=2)
    plain, config = load_all(tmp_path), FP8 | {"modules_to_not_convert": listed}
    quantized = quantize_experts(tmp_path, fp8_blocks)
    rewrite(tmp_path, quantized | {k: v for k, v in plain.items() if ".layers.1." in k}, quantization_config=config)
    tensors = {k: v for k, v in load_all(tmp_path).items() if ".layers.1." not in k or not k.endswith("_scale_inv")}
    rewrite(tmp_path, tensors)
    with Checkpoint(tmp_path) as checkpoint:
        assert [checkpoint.stored_of(layer).layout.name for layer in (0, 1)] == ["fp8", "plain"]
        (one,) = checkpoint.experts(0, [0])
        assert isinstance(one.down, ExpertWeights)
        (other,) = checkpoint.experts(1, [0])
        assert_same_bits(dense(other.down), plain["model.layers.1.mlp.experts.0.down_proj.weight"])
