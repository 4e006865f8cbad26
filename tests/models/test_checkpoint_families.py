"""Checkpoints of tiny models that transformers saved: what is read is what the model has, or what its quants mean."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_runtime
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.families import layer_config
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.checkpoints.readers import dense
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from tests.support.checkpoint_writers import (
    FP8,
    MODELOPT,
    layer_config_of,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    rewrite,
    write_gpt_oss_mxfp4,
)
from tests.support.comparison import assert_same_bits

transformers = pytest.importorskip("transformers")
tiny = pytest.importorskip("tests.support.tiny_models")

FAMILIES = tuple(tiny.CLASSES)


def saved(folder: Path, family: str, seed: int, **changes: Any) -> Any:
    """A tiny model in bf16 and its folder, in more than one shard."""
    model = tiny.tiny_model(family, seed, **changes).bfloat16()
    model.save_pretrained(folder, max_shard_size="200KB")
    return model


def moe_layers(model: Any) -> list[int]:
    return [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_read(family: str, tmp_path: Path, seed: int) -> None:
    model = saved(tmp_path, family, seed)
    is_oss = family == "gpt_oss"
    with Checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.files.shards()) > 1
        for index in moe_layers(model):
            block = model.model.layers[index].mlp
            gate, router = tiny.gate_of(block), checkpoint.router(index)
            assert_same_bits(router.weight, gate.weight)
            biases = (getattr(gate, "bias", None), getattr(gate, "e_score_correction_bias", None))
            for got, want in zip((router.bias, router.correction_bias), biases, strict=True):
                assert (got is None) == (want is None)
                if got is not None and want is not None:
                    assert torch.equal(got.float(), want.float())
            experts = list(checkpoint.experts(index, range(12)))
            for expert, (gate_up, down) in zip(
                experts, zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True), strict=True
            ):
                assert isinstance(expert.gate_up, torch.Tensor) and isinstance(expert.down, torch.Tensor)
                assert_same_bits(expert.gate_up, gate_up.T.contiguous() if is_oss else gate_up)
                assert_same_bits(expert.down, down.T.contiguous() if is_oss else down)
            for name in ("gate_up_proj_bias", "down_proj_bias") if is_oss else ():
                got_biases = [getattr(expert, name.replace("_proj", "")) for expert in experts]
                assert torch.equal(torch.stack(got_biases), getattr(block.experts, name).float())
            shared, ours = tiny.shared_of(block), checkpoint.shared_expert(index)
            assert (shared is None) == (ours is None)
            if shared is not None and ours is not None:
                for name in ("gate_proj", "up_proj", "down_proj"):
                    assert_same_bits(getattr(ours, name), getattr(shared, name).weight)
                assert (ours.token_gate is None) == (not hasattr(block, "shared_expert_gate"))
                if ours.token_gate is not None:
                    assert_same_bits(ours.token_gate, block.shared_expert_gate.weight)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_what_transformers_saves_as_it_has_it_in_memory_is_read(family: str, tmp_path: Path, seed: int) -> None:
    """Experts of a layer in two tensors, Mixtral's by other names than its makers gave; the layer has the same bits."""
    model = saved(tmp_path / "apart", family, seed)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    index = moe_layers(model)[-1]
    layers = [layer_and_error(tmp_path / name, index, seed)[0] for name in ("apart", "fused")]
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    assert_same_bits(layers[1](x), layers[0](x))
    with Checkpoint(tmp_path / "fused") as fused, Checkpoint(tmp_path / "apart") as apart:
        assert fused.stored_of(index).layout.name == "plain, fused"
        for one, other in zip(fused.experts(index, range(12)), apart.experts(index, range(12)), strict=True):
            assert_same_bits(one.gate_up, other.gate_up)
            assert_same_bits(one.down, other.down)
    converted = []
    for name in ("fused", "apart"):
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}_nvfp4", "nvfp4")
        with Checkpoint(tmp_path / f"{name}_nvfp4") as checkpoint:
            experts = list(checkpoint.experts(index, range(12)))
            converted.append([dense(part) for expert in experts for part in (expert.gate_up, expert.down)])
    for got, want in zip(*converted, strict=True):
        assert_same_bits(got, want)


def test_fused_experts_that_are_quantized_are_named(tmp_path: Path, seed: int) -> None:
    tiny.tiny_model("qwen3_moe", seed).bfloat16().save_pretrained(tmp_path, save_original_format=False)
    name = "model.layers.0.mlp.experts.down_proj_scale_inv"
    rewrite(tmp_path, load_all(tmp_path) | {name: torch.ones(12, 1, 1)}, quantization_config=FP8)
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(ValueError, match=f"tensor {name} is not expected: 12 experts in layout plain, fused"),
    ):
        list(checkpoint.experts(0, range(1)))


def reference_of(layer: MoELayer, folder: Path, index: int, x: torch.Tensor) -> torch.Tensor:
    """float64 of what the folder's tensors mean, with the layer's own routing and shared expert."""
    with Checkpoint(folder) as checkpoint:
        experts = list(checkpoint.experts(index, range(layer.config.num_experts)))
    assert layer.router is not None and layer.experts is not None
    idx, weights = layer.router(x)
    y = moe_reference(
        x,
        idx,
        weights,
        torch.stack([dense(expert.gate_up) for expert in experts]),
        torch.stack([dense(expert.down) for expert in experts]),
        layer.experts.activation,
        gate_up_bias=None if experts[0].gate_up_bias is None else torch.stack([e.gate_up_bias for e in experts]),  # type: ignore[misc]
        down_bias=None if experts[0].down_bias is None else torch.stack([e.down_bias for e in experts]),  # type: ignore[misc]
    )
    return y if layer.shared_expert is None else y + layer.shared_expert(x)


def layer_and_error(folder: Path, index: int, seed: int, **formats: str) -> tuple[MoELayer, float]:
    """A layer of one rank from the folder, and its error against the folder's own weights."""
    layer = MoELayer.from_checkpoint(
        folder, layer=index, context=ExpertParallelContext(device="cpu"), max_tokens_per_rank=256, **formats
    )
    x = torch.randn(256, layer.config.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return layer, relative_error(layer(x), reference_of(layer, folder, index, x))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_each_family(family: str, tmp_path: Path, seed: int) -> None:
    """bf16 as it is, and quantized while it is read."""
    model = saved(tmp_path, family, seed)
    index = moe_layers(model)[-1]
    layer, error = layer_and_error(tmp_path, index, seed)
    assert (layer.config.token_format, layer.config.weight_format) == ("bf16", "bf16")
    assert error <= error_bound("bf16", "bf16")
    layer, error = layer_and_error(tmp_path, index, seed, weight_format="nvfp4")
    assert (layer.config.token_format, layer.config.weight_format) == ("bf16", "nvfp4")
    assert error_bound("bf16", "bf16") < error <= error_bound("bf16", "nvfp4")


def test_an_fp32_layer_of_a_family_with_a_gated_shared_expert(tmp_path: Path, seed: int) -> None:
    """fp32 that holds bf16 numbers gives the layer of the bf16 checkpoint."""
    saved(tmp_path / "bf16", "qwen2_moe", seed)
    tiny.tiny_model("qwen2_moe", seed).save_pretrained(tmp_path / "fp32")
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    layers = [layer_and_error(tmp_path / name, 0, seed)[0] for name in ("bf16", "fp32")]
    assert_same_bits(layers[1](x), layers[0](x))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_a_modelopt_layer_of_each_family(family: str, tmp_path: Path, seed: int) -> None:
    """Gate and up keep a second-level scale each; weights add no error of their own."""
    model = saved(tmp_path, family, seed)
    index = moe_layers(model)[0]
    tensors = quantize_experts(tmp_path, modelopt_nvfp4, quantization_config=MODELOPT)
    layer, error = layer_and_error(tmp_path, index, seed)
    assert (layer.config.token_format, layer.config.weight_format) == ("nvfp4", "nvfp4")
    assert error <= error_bound("nvfp4", "bf16")
    assert layer.experts is not None and isinstance(layer.experts.gate_up, ExpertWeights)
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = f"model.layers.{index}.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}.experts"
    second = [[tensors[f"{block}.{e}.{name}.weight_scale_2"] for name in names] for e in range(12)]
    scales = torch.tensor(second)
    assert_same_bits(layer.experts.gate_up.expert_scales, scales[:, :2])
    assert_same_bits(layer.experts.down.expert_scales, scales[:, 2])
    quants = torch.stack([torch.cat([tensors[f"{block}.{e}.{name}.weight"] for name in names[:2]]) for e in range(12)])
    assert_same_bits(layer.experts.gate_up.quants, quants)


def test_gpt_oss_in_mxfp4(tmp_path: Path, seed: int) -> None:
    """Held to transformers' own dequantization; tokens stay bf16; biases and the interleaved order are kept."""
    unpack = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    saved(tmp_path, "gpt_oss", seed, intermediate_size=96)
    tensors = write_gpt_oss_mxfp4(tmp_path)
    block = "model.layers.2.mlp.experts"
    with Checkpoint(tmp_path) as checkpoint:
        experts = list(checkpoint.experts(2, range(12)))
    for part in ("gate_up", "down"):
        blocks, scales = tensors[f"{block}.{part}_proj_blocks"], tensors[f"{block}.{part}_proj_scales"]
        want = unpack(blocks, scales, dtype=torch.float32).transpose(1, 2)
        for number, expert in enumerate(experts):
            w = getattr(expert, part)
            assert isinstance(w, ExpertWeights)
            assert w.gate_up == (GateUpOrder.INTERLEAVED if part == "gate_up" else None)
            assert_same_bits(w.quants[0], blocks[number].flatten(1))
            assert_same_bits(w.dequantize()[0], want[number].contiguous())
            assert torch.equal(getattr(expert, f"{part}_bias"), tensors[f"{block}.{part}_proj_bias"][number].float())
    layer, error = layer_and_error(tmp_path, 2, seed)
    assert (layer.config.token_format, layer.config.weight_format) == ("bf16", "mxfp4")
    assert error <= error_bound("bf16", "bf16")
    w4a8, error = layer_and_error(tmp_path, 2, seed, token_format="mxfp8")
    assert (w4a8.config.token_format, w4a8.config.weight_format) == ("mxfp8", "mxfp4")
    assert error_bound("bf16", "bf16") < error <= error_bound("mxfp8", "bf16")
    assert layer.experts is not None and w4a8.experts is not None
    for part in ("gate_up", "down"):
        ours, theirs = getattr(w4a8.experts, part), getattr(layer.experts, part)
        assert_same_bits(ours.quants, theirs.quants)
        assert_same_bits(ours.scales, theirs.scales)
    _, error = layer_and_error(tmp_path, 2, seed, weight_format="bf16")
    assert error <= error_bound("bf16", "bf16")


def test_gpt_oss_tensors_that_are_wrong_are_named(tmp_path: Path, seed: int) -> None:
    saved(tmp_path, "gpt_oss", seed, intermediate_size=96)
    tensors = write_gpt_oss_mxfp4(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = tensors[name].clone()
    scales[7, 3, 1] = 255
    for change, message in (
        ({name: scales}, rf"tensor {name}: expected finite scales, got one that is not at \[3, 1\]"),
        ({name: scales[:, :, :2].contiguous()}, rf"tensor {name}: expected shape \[12, 64, 3\], got \[12, 64, 2\]"),
        ({name: None}, f"tensor {name} is missing"),
        ({name + "_inv": scales}, f"tensor {name}_inv is not expected"),
    ):
        changed = tensors | change
        rewrite(tmp_path, {key: tensor for key, tensor in changed.items() if tensor is not None})
        with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match=message):
            list(checkpoint.experts(1, range(6, 9)))
    rewrite(tmp_path, tensors | {name: scales})
    with Checkpoint(tmp_path) as checkpoint:
        assert len(list(checkpoint.experts(1, range(7)))) == 7, "each rank reads its own experts"


def test_deepseek_fp8_is_what_transformers_dequantizes(tmp_path: Path, seed: int) -> None:
    """Quantized and dequantized by its own operations on checkpoints."""
    operations = pytest.importorskip("transformers.integrations.finegrained_fp8")
    settings = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=[128, 128], scale_fmt=None))
    quantizer = operations.Fp8Quantize(settings)

    def quantize(w: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name.rpartition(".")[2]: part for name, part in quantizer.convert({"e.weight": w}).items()}

    model = saved(tmp_path, "deepseek_v3", seed, hidden_size=256, moe_intermediate_size=128)
    tensors = quantize_experts(tmp_path, quantize, quantization_config=FP8)
    index = moe_layers(model)[0]
    layer, error = layer_and_error(tmp_path, index, seed)
    assert (layer.config.token_format, layer.config.weight_format) == ("fp8_block", "fp8_block")
    assert error <= error_bound("fp8_block", "bf16")
    assert layer.experts is not None and isinstance(layer.experts.gate_up, ExpertWeights)
    assert isinstance(layer.experts.down, ExpertWeights)
    gate_up, down = layer.experts.gate_up.dequantize(), layer.experts.down.dequantize()
    for expert in range(12):
        for name, got in (
            ("gate_proj", gate_up[expert, :128]),
            ("up_proj", gate_up[expert, 128:]),
            ("down_proj", down[expert]),
        ):
            prefix = f"model.layers.{index}.mlp.experts.{expert}.{name}"
            pair = {part: tensors[f"{prefix}.{part}"] for part in ("weight", "weight_scale_inv")}
            restored = operations.Fp8Dequantize(None).convert(pair)["weight"]
            # transformers 5.17 gives a list of one.
            assert_same_bits(got, restored[0] if isinstance(restored, list) else restored)
    _, error = layer_and_error(tmp_path, index, seed, weight_format="nvfp4", token_format="bf16")
    assert error <= error_bound("bf16", "nvfp4")


OSS = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
GROUPS = {"kind": "sigmoid", "num_groups": 3, "top_groups": 2, "correction_bias": True}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt_oss", {"activation": {"order": "gate_up", **OSS}}, r"activation: .*'interleaved'.*, got .*'gate_up'"),
        ("gpt_oss", {"activation": {"order": "interleaved"}}, r"activation: .*alpha=1\.702.*, got .*alpha=1\.0"),
        ("qwen3_moe", {"shared_expert": {"intermediate_size": 64}}, "shared_expert: .* says None, got .*size=64"),
        ("deepseek_v3", {"shared_expert": None}, "shared_expert: .* says SharedExpertConfig.*, got None"),
        ("deepseek_v3", {"router": GROUPS}, r"router: .*scaling_factor=1\.5.*, got .*scaling_factor=1\.0"),
        ("qwen2_moe", {"router": {"renormalize": True}}, "router: .*renormalize=False.*, got .*renormalize=True"),
        ("qwen3_moe", {"top_k": 1}, "top_k: .* says 3, got 1"),
    ],
)
def test_a_layer_that_contradicts_the_checkpoint_does_not_take_it(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny.tiny_config(family).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with Checkpoint(tmp_path) as checkpoint, ExpertParallelContext(device="cpu") as context:
        config = layer_config(checkpoint.config, max_tokens_per_rank=8)
        layer = MoELayer(config.model_validate(config.model_dump() | changes), context)
        with pytest.raises(ValueError, match=message):
            layer.load_checkpoint(checkpoint, 2)


def test_a_layer_may_take_a_checkpoint_in_other_formats_or_leave_its_router_to_the_caller(
    tmp_path: Path, seed: int
) -> None:
    saved(tmp_path, "deepseek_v3", seed)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    with Checkpoint(tmp_path) as checkpoint, ExpertParallelContext(device="cpu") as context:
        config = checkpoint.layer_config(2, max_tokens_per_rank=8)
        whole = MoELayer(config.replace(weight_format="nvfp4"), context)
        whole.load_checkpoint(checkpoint, 2)
        experts = MoELayer(config.replace(router={}, top_k=4, shared_expert=None), context, router=False)
        with pytest.raises(ValueError, match=r"shared_expert: .* says SharedExpertConfig"):
            experts.load_checkpoint(checkpoint, 2)
        experts.load_checkpoint(checkpoint, 2, shared_elsewhere=True)
        assert whole(x).isfinite().all()
        idx = torch.arange(4, dtype=torch.int32).repeat(8, 1)
        assert experts(x, topk_idx=idx, topk_weights=torch.ones(8, 4)).isfinite().all()


def test_a_config_of_another_family_is_refused(tmp_path: Path) -> None:
    transformers.LlamaConfig(hidden_size=64).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: model_type: expected a model with experts .*, got 'llama'"):
        layer_config_of(tmp_path, max_tokens_per_rank=1)


def test_a_transformers_model_takes_its_experts_from_a_checkpoint(tmp_path: Path, seed: int) -> None:
    """gpt-oss in MXFP4 gives the bits of the same model with its weights dequantized, which bf16 holds exactly."""
    parallel = pytest.importorskip("moe_runtime.integrations.transformers")
    model = saved(tmp_path, "gpt_oss", seed, intermediate_size=96)
    write_gpt_oss_mxfp4(tmp_path)
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(seed))
    logits = []
    with Checkpoint(tmp_path) as checkpoint:

        def dequantized(layer: int, expert_ids: range) -> Iterator[ExpertTensors]:
            for expert in checkpoint.experts(layer, expert_ids):
                yield expert._replace(gate_up=dense(expert.gate_up), down=dense(expert.down))

        for experts, weight_format in ((checkpoint.experts, "mxfp4"), (dequantized, "bf16")):
            copied, sizes = copy.deepcopy(model), {"max_tokens_per_rank": 32, "weight_format": weight_format}
            with parallel.apply_expert_parallel(copied, experts=experts, **sizes), torch.no_grad():
                logits.append(copied(ids).logits)
    assert logits[0].isfinite().all()
    assert_same_bits(logits[0], logits[1])


def parallel_layers(model: Any, checkpoint: Checkpoint, **formats: Any) -> list[Any]:
    """The configs of the layers of a model with experts of `checkpoint`."""
    parallel = pytest.importorskip("moe_runtime.integrations.transformers")
    with moe_runtime.without_experts():
        empty = type(model)(model.config).bfloat16()
    with parallel.apply_expert_parallel(empty, experts=checkpoint, max_tokens_per_rank=32, **formats) as owner:
        return [layer.config for layer in owner.layers]


def test_layers_of_a_transformers_model_are_what_the_checkpoint_says_of_each(tmp_path: Path, seed: int) -> None:
    """Formats and scales of their own for layers of NVFP4, a layer that quantization left out, and their bits."""
    parallel = pytest.importorskip("moe_runtime.integrations.transformers")
    model = saved(tmp_path, "qwen3_moe", seed, hidden_size=128, moe_intermediate_size=128)
    plain = load_all(tmp_path)
    quantized = quantize_experts(tmp_path, modelopt_nvfp4, quantization_config=MODELOPT)
    # Those of random weights are so near each other that they may be equal.
    for name in quantized:
        if name.startswith("model.layers.2.") and name.endswith("input_scale"):
            quantized[name] = 2 * quantized[name]
    left_out = "model.layers.1.mlp.experts."
    kept = {name: tensor for name, tensor in quantized.items() if not name.startswith(left_out)}
    rewrite(tmp_path, kept | {name: tensor for name, tensor in plain.items() if name.startswith(left_out)})
    generator = torch.Generator().manual_seed(seed)
    with Checkpoint(tmp_path) as checkpoint:
        with moe_runtime.without_experts():
            empty = transformers.Qwen3MoeForCausalLM(model.config).bfloat16()
        with parallel.apply_expert_parallel(empty, experts=checkpoint, max_tokens_per_rank=32) as owner:
            assert owner.decoder_layers == [0, 1, 2]
            assert [layer.config.token_format for layer in owner.layers] == ["nvfp4", "bf16", "nvfp4"]
            scales = [layer.config.intermediate_gsf for layer in owner.layers]
            auto = parallel_layers(model, checkpoint, token_format="auto", weight_format="auto")
            assert auto == [layer.config for layer in owner.layers]
            half = parallel_layers(model, checkpoint, token_format="bf16", weight_format="auto")
            assert [config.weight_format for config in half] == ["nvfp4", "bf16", "nvfp4"]
            assert scales == [checkpoint.layer_config(n, max_tokens_per_rank=32).intermediate_gsf for n in range(3)]
            assert len({scales[0], scales[2], None}) == 3
            for number, layer in enumerate(owner.layers):
                x = torch.randn(9, 128, generator=generator).bfloat16()
                with ExpertParallelContext(device="cpu") as context:
                    alone = MoELayer.from_checkpoint(tmp_path, layer=number, max_tokens_per_rank=32, context=context)
                    assert alone.router is not None
                    idx, weights = alone.router(x)
                    assert_same_bits(
                        layer(x, topk_idx=idx, topk_weights=weights), alone(x, topk_idx=idx, topk_weights=weights)
                    )
        # A model of other sizes than the checkpoint's is refused, as it is.
        wrong = tiny.tiny_model("qwen3_moe", seed, hidden_size=64, moe_intermediate_size=128).bfloat16()
        with pytest.raises(ValueError, match=r"hidden_size: .*config\.json says 128, got 64"):
            parallel.apply_expert_parallel(wrong, experts=checkpoint, max_tokens_per_rank=32)
        assert wrong(torch.tensor([[4, 5, 6]])).logits.isfinite().all()
