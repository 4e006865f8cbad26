"""Checkpoints: what transformers writes is what we read, bit for bit, and each way to be broken is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.checkpoints import files
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.config import MoELayerConfig, RouterConfig
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from tests.support.checkpoint_writers import change_config, change_tensor, layer_config_of, shard_of

CONFIG = MoELayerConfig(
    hidden_size=64, intermediate_size=32, num_experts=5, top_k=2, max_tokens_per_rank=8, router=RouterConfig()
)
DOWN_3 = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(params=[1, 4], ids=["single", "sharded"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=7, num_layers=2, num_shards=request.param)
    return tmp_path


def read_layer(folder: Path, layer: int, expert_ids: range) -> list[ExpertTensors]:
    with Checkpoint(folder) as checkpoint:
        return list(checkpoint.experts(layer, expert_ids))


def read_router(folder: Path, layer: int) -> torch.Tensor:
    with Checkpoint(folder) as checkpoint:
        return checkpoint.router(layer).weight


def test_what_was_written_is_read(folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp"
        assert torch.equal(read_router(folder, layer), tensors[f"{prefix}.gate.weight"])
        for number, expert in enumerate(read_layer(folder, layer, range(1, 4)), 1):
            names = [f"{prefix}.experts.{number}.{part}_proj.weight" for part in ("gate", "up", "down")]
            assert torch.equal(expert.gate_up, torch.cat([tensors[names[0]], tensors[names[1]]]))
            assert torch.equal(expert.down, tensors[names[2]])
            assert expert.gate_up_bias is None and expert.down_bias is None
        assert number == 3
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert read_layer(folder, 0, range(2, 2)) == []


def test_experts_come_one_by_one_and_only_those_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = files.SafetensorsFile.read

    def spy(self: files.SafetensorsFile, name: str, out: torch.Tensor, first_byte: int = 0) -> None:
        read.append(name)
        real(self, name, out, first_byte)

    monkeypatch.setattr(files.SafetensorsFile, "read", spy)
    with Checkpoint(folder) as checkpoint:
        experts = checkpoint.experts(1, range(2, 4))
        next(experts)
        assert len(read) == 3 and all(".layers.1.mlp.experts.2." in name for name in read)
        assert len(list(experts)) == 1
    assert len(read) == 6 and all(".layers.1.mlp.experts.3." in name for name in read[3:])


def test_other_shards_need_not_even_be_there(tmp_path: Path) -> None:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=7, num_layers=2, num_shards=8)
    before = read_layer(tmp_path, 1, range(3, 5))
    needed = {
        shard_of(tmp_path, f"model.layers.1.mlp.{name}.weight")
        for name in ("gate", *(f"experts.{e}.{p}_proj" for e in (3, 4) for p in ("gate", "up", "down")))
    }
    others = set(tmp_path.glob("*.safetensors")) - needed
    assert others
    for file in others:
        file.unlink()
    for one, two in zip(before, read_layer(tmp_path, 1, range(3, 5)), strict=True):
        assert torch.equal(one.gate_up, two.gate_up) and torch.equal(one.down, two.down)


def test_tensors_outlive_their_file(folder: Path) -> None:
    tensors = [tensor for expert in read_layer(folder, 0, range(5)) for tensor in (expert.gate_up, expert.down)]
    tensors.append(read_router(folder, 0))
    kept = [tensor.clone() for tensor in tensors]
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"")
    assert all(map(torch.equal, kept, tensors))


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_transformers_save_pretrained_is_read(tmp_path: Path, max_shard_size: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(8)
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            vocab_size=64,
        )
    ).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / files.INDEX_FILE).exists() == (max_shard_size == "20KB")
    config = layer_config_of(tmp_path, max_tokens_per_rank=4)
    assert (config.hidden_size, config.intermediate_size, config.num_experts, config.top_k) == (64, 32, 4, 2)
    assert config.router == RouterConfig(kind="softmax", renormalize=True)
    for layer in (0, 1):
        block = model.model.layers[layer].mlp
        got = read_layer(tmp_path, layer, range(4))
        assert torch.equal(read_router(tmp_path, layer), block.gate.weight)
        assert torch.equal(torch.stack([expert.gate_up for expert in got]), block.experts.gate_up_proj)
        assert torch.equal(torch.stack([expert.down for expert in got]), block.experts.down_proj)


def test_our_config_is_read_by_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.model_type == "qwen3_moe"
    assert (config.hidden_size, config.moe_intermediate_size) == (64, 32)
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (5, 2, True)


def test_the_same_seed_writes_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_qwen3_moe_checkpoint(tmp_path / name, CONFIG, seed=seed)
    a, b, c = ((tmp_path / name / files.SINGLE_FILE).read_bytes() for name in "abc")
    assert a == b and a != c


def test_layer_config_takes_overrides_that_do_not_contradict(folder: Path) -> None:
    config = layer_config_of(folder, max_tokens_per_rank=8, combine_format="mxfp8")
    assert config == CONFIG.replace(combine_format="mxfp8")
    assert layer_config_of(folder, **CONFIG.model_dump()) == CONFIG
    with pytest.raises(ValueError, match="max_tokens_per_rank"):
        layer_config_of(folder)
    for key, value in (("hidden_size", 128), ("intermediate_size", 64), ("num_experts", 4), ("top_k", 1)):
        with pytest.raises(ValueError, match=rf"{key}: .*config.json says .*, got {value}"):
            layer_config_of(folder, max_tokens_per_rank=8, **{key: value})
    with pytest.raises(ValueError, match=r"router: .*config\.json says"):
        layer_config_of(folder, max_tokens_per_rank=8, router=RouterConfig(renormalize=False))
    with pytest.raises(ValueError, match=r"activation: .*config\.json says"):
        layer_config_of(folder, max_tokens_per_rank=8, activation={"order": "up_gate"})


def test_a_missing_tensor(folder: Path) -> None:
    file = change_tensor(folder, DOWN_3, None)
    with pytest.raises(ValueError, match=rf"{file}: tensor {DOWN_3} is missing"):
        read_layer(folder, 1, range(5))
    assert len(read_layer(folder, 1, range(3))) == 3
    change_config(folder, num_hidden_layers=10)
    with pytest.raises(ValueError, match=r"model\.layers\.9\.mlp\.gate\.weight is missing"):
        read_router(folder, 9)


def test_a_tensor_too_many(folder: Path) -> None:
    file = shard_of(folder, DOWN_3)
    extra = "model.layers.1.mlp.experts.5.down_proj.weight"
    tensors = load_file(file) | {extra: torch.zeros(64, 32, dtype=torch.bfloat16)}
    save_file(tensors, file)
    index = folder / files.INDEX_FILE
    if index.exists():
        data = json.loads(index.read_text())
        data["weight_map"][extra] = file.name
        index.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"{folder}/.*: tensor {extra} is not expected: 5 experts"):
        read_layer(folder, 1, range(2))
    assert len(read_layer(folder, 0, range(2))) == 2


def test_a_layer_without_experts(folder: Path) -> None:
    change_config(folder, mlp_only_layers=[1])
    with pytest.raises(ValueError, match=r"layer: .*config\.json says that layer 1 has no experts"):
        read_layer(folder, 1, range(2))
    with pytest.raises(ValueError, match=r"layer: .*config\.json says 2 layers, asked for layer 2"):
        layer_config_of(folder, layer=2, max_tokens_per_rank=1)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(64, 32, dtype=torch.int8), "expected BF16 or F32 or F16, got I8"),
        (torch.zeros(64, 32, dtype=torch.float8_e4m3fn), "expected BF16 or F32 or F16, got F8_E4M3"),
        (torch.zeros(32, 64, dtype=torch.bfloat16), r"expected shape \[64, 32\], got \[32, 64\]"),
        (torch.zeros(64 * 32, dtype=torch.bfloat16), r"expected shape \[64, 32\], got \[2048\]"),
    ],
)
def test_a_wrong_tensor(folder: Path, tensor: torch.Tensor, message: str) -> None:
    file = change_tensor(folder, DOWN_3, tensor)
    with pytest.raises(ValueError, match=f"{file}: tensor {DOWN_3}: {message}"):
        read_layer(folder, 1, range(5))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = shard_of(folder, DOWN_3)
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(ValueError, match=f"{file}: broken or cut off .*wanted for "):
        read_layer(folder, 1, range(3, 4))


def test_a_missing_shard(tmp_path: Path) -> None:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=7, num_layers=2, num_shards=4)
    file = shard_of(tmp_path, DOWN_3)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file}: shard is missing .*layers.1.mlp.experts"):
        read_layer(tmp_path, 1, range(5))


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=7, num_layers=2, num_shards=4)
    index = tmp_path / files.INDEX_FILE
    good = json.loads(index.read_text())
    for text, message in (
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "weight_map: expected a mapping"),
        (json.dumps({"weight_map": {}}), f"tensor {DOWN_3.replace('down', 'gate')} is missing"),
        (
            json.dumps({"weight_map": good["weight_map"] | {DOWN_3: "../elsewhere.safetensors"}}),
            f"tensor {DOWN_3}: expected the name of a file in its folder",
        ),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=f"{index}: {message}"):
            read_layer(tmp_path, 1, range(3, 4))


def test_a_config_with_more_experts_than_the_file(folder: Path) -> None:
    change_config(folder, num_experts=6)
    with pytest.raises(ValueError, match=r"gate\.weight: expected shape \[6, 64\], got \[5, 64\]"):
        read_router(folder, 0)
    with pytest.raises(ValueError, match=r"experts\.5\.gate_proj\.weight is missing"):
        read_layer(folder, 0, range(6))


def test_an_expert_that_the_config_does_not_have(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"expert_ids: .*config\.json says 5 experts, asked for expert 5"):
        read_layer(folder, 0, range(4, 6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type: expected a text, got None"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, got 'gelu'"),
        ({"num_experts": 0}, "num_experts: expected a positive integer, got 0"),
        ({"hidden_size": "64"}, "hidden_size: expected a positive integer, got '64'"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: expected a positive integer, got 0"),
    ],
)
def test_a_config_json_that_is_wrong(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=f"{folder / 'config.json'}: {message}"):
        layer_config_of(folder, max_tokens_per_rank=8)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: No such file"):
        read_router(tmp_path / "nothing", 0)
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=7)
    (tmp_path / files.SINGLE_FILE).unlink()
    with pytest.raises(ValueError, match="found neither"):
        read_router(tmp_path, 0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_router(tmp_path, 0)


def test_only_what_the_naming_can_say_is_written(tmp_path: Path) -> None:
    for config in (
        CONFIG.replace(router=RouterConfig(kind="sigmoid")),
        CONFIG.replace(activation={"order": "interleaved"}),
        CONFIG.replace(activation={"limit": 7.0}),
        CONFIG.replace(router=RouterConfig(bias=True)),
        CONFIG.replace(expert_bias=True),
        CONFIG.replace(shared_expert={"intermediate_size": 64}),
    ):
        with pytest.raises(ValueError, match="config: a Qwen3-MoE checkpoint has"):
            write_qwen3_moe_checkpoint(tmp_path, config, seed=1)
