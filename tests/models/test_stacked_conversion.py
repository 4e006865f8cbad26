"""Conversion of stacked experts: gpt-oss as transformers saves it, and in its makers' MXFP4, into every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.checkpoints.calibration import calibrate
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.converted_experts import TARGET_LAYOUTS
from moe_runtime.checkpoints.files import BEGINNING_BYTES, SafetensorsFile
from moe_runtime.checkpoints.loading import QuantBuffer, quantize_experts
from moe_runtime.checkpoints.readers import dense
from moe_runtime.checkpoints.writer import TensorWriter
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS
from moe_runtime.kernels.gemm.weights import GPT_OSS, ExpertWeights, GateUpOrder
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from tests.support.checkpoint_writers import load_all, read_e2m1, rewrite, write_gpt_oss_mxfp4
from tests.support.comparison import assert_same_bits
from tests.support.interruptions import Stopped, contents, stopping

transformers = pytest.importorskip("transformers")
tiny = pytest.importorskip("tests.support.tiny_models")
models = pytest.importorskip("tests.support.parallel_models")
parallel = pytest.importorskip("moe_runtime.integrations.transformers")

HIDDEN, INNER, EXPERTS, LAYERS = 256, 128, 4, 2
BIASES = ("gate_up_bias", "down_bias")
BLOCK = "model.layers.{}.mlp.experts"
CASES = [("bf16", fmt) for fmt in TARGET_LAYOUTS] + [("mxfp4", fmt) for fmt in TARGET_LAYOUTS if fmt != "mxfp4"]
STEP = {"nvfp4": 0.2, "mxfp4": 0.26, "mxfp8": 0.08, "fp8_block": 0.04}
"""Largest error of a weight, of the largest in its block: half the widest gap between numbers, and what saturates."""


def saved(folder: Path, seed: int, stored: str = "bf16") -> Path:
    """Tensors of a layer lie in several shards where it is bf16."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    model = tiny.tiny_model("gpt_oss", seed, **sizes, num_hidden_layers=LAYERS, num_experts_per_tok=2)
    model.bfloat16().save_pretrained(folder, max_shard_size="300KB")
    if stored == "mxfp4":
        write_gpt_oss_mxfp4(folder)
    return folder


def own_weights(tensors: dict[str, torch.Tensor], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 `[E, 2I, H]`, rows of gate and up in turn, and `[E, H, I]` of stacked tensors."""
    found = []
    for name in ("gate_up_proj", "down_proj"):
        prefix = f"{BLOCK.format(layer)}.{name}"
        if prefix in tensors:
            found.append(tensors[prefix].double().mT.numpy())
            continue
        scales = np.exp2(tensors[f"{prefix}_scales"].double().numpy() - 127)
        found.append(read_e2m1(tensors[f"{prefix}_blocks"]).reshape(*scales.shape, 32) * scales[..., None])
        found[-1] = found[-1].reshape(*scales.shape[:2], -1)
    return found[0], found[1]


def linear(tensors: dict[str, torch.Tensor], prefix: str, fmt: str) -> np.ndarray:
    """float64 of one linear, as the layout of `fmt` says."""
    if fmt == "nvfp4":
        scales = tensors[f"{prefix}.weight_scale"].double().numpy() / tensors[f"{prefix}.weight_global_scale"].item()
        return read_e2m1(tensors[f"{prefix}.weight_packed"]) * scales.repeat(16, 1)
    quants = tensors[f"{prefix}.weight"].double().numpy()
    if fmt == "mxfp8":
        return quants * np.exp2(tensors[f"{prefix}.weight_scale"].double().numpy() - 127).repeat(32, 1)
    return quants * tensors[f"{prefix}.weight_scale_inv"].double().numpy().repeat(128, 0).repeat(128, 1)


def written_weights(tensors: dict[str, torch.Tensor], layer: int, fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """As `own_weights`, of converted ones."""
    if fmt == "mxfp4":
        return own_weights(tensors, layer)
    gate_up, down = np.empty((EXPERTS, 2 * INNER, HIDDEN)), np.empty((EXPERTS, HIDDEN, INNER))
    for expert in range(EXPERTS):
        prefix = f"{BLOCK.format(layer)}.{expert}"
        gate_up[expert, 0::2], gate_up[expert, 1::2], down[expert] = (
            linear(tensors, f"{prefix}.{part}_proj", fmt) for part in ("gate", "up", "down")
        )
    return gate_up, down


def with_experts(model: Any, weights: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """A transformers model with these weights, transposed as it has them."""
    with torch.no_grad():
        for block, (gate_up, down) in zip(tiny.moe_blocks(model), weights, strict=True):
            block.experts.gate_up_proj.copy_(torch.from_numpy(gate_up).mT)
            block.experts.down_proj.copy_(torch.from_numpy(down).mT)
    return model


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("stored", "fmt"), CASES)
def test_stacked_experts_in_every_format(stored: str, fmt: str, tmp_path: Path, seed: int) -> None:
    """What is written is near what was there, reads back as it says, and gives the logits of a transformers model that
    has these weights, within the bound of the formats."""
    source, target = saved(tmp_path / "source", seed, stored), tmp_path / "target"
    convert_checkpoint(source, target, fmt)
    before, after = load_all(source), load_all(target)
    for name, tensor in before.items():
        if ".experts." not in name:
            assert_same_bits(after.pop(name), tensor)
    written = [written_weights(after, layer, fmt) for layer in range(LAYERS)]
    with Checkpoint(target) as checkpoint:
        assert all(checkpoint.stored_of(layer).layout.format.name == fmt for layer in range(LAYERS))
        for layer, weights in enumerate(written):
            experts = list(checkpoint.experts(layer, range(EXPERTS)))
            for part, name, ours, own in zip(
                (0, 1), ("gate_up", "down"), weights, own_weights(before, layer), strict=True
            ):
                columns = {"nvfp4": 16, "fp8_block": 128}.get(fmt, 32)
                blocks = [x.reshape(*x.shape[:2], -1, columns) for x in (ours, own)]
                largest = abs(blocks[1]).max() if fmt == "fp8_block" else abs(blocks[1]).max(3, keepdims=True)
                assert (abs(blocks[0] - blocks[1]) <= STEP[fmt] * largest).all()
                read = torch.stack([dense(expert[part]) for expert in experts]).numpy()  # type: ignore[arg-type]
                np.testing.assert_allclose(read, ours, rtol=2.0**-22, atol=0)
                bias = torch.stack([expert[2 + part] for expert in experts])  # type: ignore[arg-type]
                assert torch.equal(bias, before[f"{BLOCK.format(layer)}.{name}_proj_bias"].float())
        plain = saved(tmp_path / "plain", seed) if stored == "mxfp4" else source
        ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(seed))
        _, routes = models.record_routes(models.load(plain), ids)
        theirs = models.logits_with(with_experts(models.load(plain), written), ids, routes)
        exact_model = with_experts(models.load(plain, torch.float64), written)
        exact = models.logits_with(exact_model, ids, routes)
        model = models.load(plain)
        with parallel.apply_expert_parallel(model, experts=checkpoint, max_tokens_per_rank=32) as owner:
            formats = [(layer.config.token_format, layer.config.weight_format) for layer in owner.layers]
            found = models.logits_with(model, ids, routes)
    tokens = fmt if fmt in ("mxfp8", "fp8_block") else "bf16"
    assert formats == [(tokens, fmt)] * LAYERS
    # Blocks of 128x128 of gate and of up apart are quantized again, for rows of both.
    bound = error_bound(tokens, "fp8_block" if fmt == "fp8_block" else "bf16")
    disturbed = models.logits_with(exact_model, ids, routes, bound)
    assert relative(found, exact) <= relative(theirs, exact) + relative(disturbed, exact)


@pytest.mark.parametrize(("hidden", "inner"), [(288, 352), (192, 320), (2880, 64)])
def test_sizes_that_end_within_an_fp8_block(hidden: int, inner: int, tmp_path: Path, seed: int) -> None:
    """The last block of a row and of a column is short, and its scale is that of its own values; a layer of what
    was written, which quantizes gate and up once more, is within the bound."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_local_experts": 2, "num_experts_per_tok": 2}
    model = tiny.tiny_model("gpt_oss", seed, **sizes, num_hidden_layers=1)
    (block,) = tiny.moe_blocks(model)
    with torch.no_grad():
        block.experts.gate_up_proj[:, -1] *= 2**10
        block.experts.down_proj[:, :, -1] *= 2**-10
    model.bfloat16().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "target", "fp8_block")
    after, own = load_all(tmp_path / "target"), own_weights(load_all(tmp_path / "source"), 0)
    gate_up, down = (np.empty_like(part) for part in own)
    for expert in range(2):
        written = {"gate": gate_up[expert, 0::2], "up": gate_up[expert, 1::2], "down": down[expert]}
        parts = {"gate": own[0][expert, 0::2], "up": own[0][expert, 1::2], "down": own[1][expert]}
        for part, w in parts.items():
            prefix = f"{BLOCK.format(0)}.{expert}.{part}_proj"
            quants, scales = after[f"{prefix}.weight"].double().numpy(), after[f"{prefix}.weight_scale_inv"].numpy()
            assert scales.shape == tuple(-(-size // 128) for size in w.shape)
            for i, j in np.ndindex(*scales.shape):
                at = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
                assert scales[i, j] == np.float32(max(abs(w[at]).max(), 1e-4)) / np.float32(448)
                values = (w[at].astype(np.float32) / scales[i, j]).clip(-448, 448)
                np.testing.assert_array_equal(quants[at], values.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))
                written[part][at] = quants[at] * scales[i, j].astype(np.float64)
    x = torch.randn(64, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(tmp_path / "target", context=context, max_tokens_per_rank=64)
        assert (layer.config.token_format, layer.config.weight_format) == ("fp8_block", "fp8_block")
        assert layer.router is not None
        biases = {name: getattr(block.experts, f"{name[:-5]}_proj_bias").detach().float() for name in BIASES}
        weights = torch.from_numpy(gate_up), torch.from_numpy(down)
        exact = moe_reference(x, *layer.router(x), *weights, GPT_OSS, **biases)
        assert relative_error(layer(x), exact)[0] <= error_bound("fp8_block")


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_stacked_experts_are_held_one_at_a_time(
    fmt: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read of a stack at once is one expert, each once; so is what is written."""
    source = saved(tmp_path / "source", seed)
    stacks = {name: tensor for name, tensor in load_all(source).items() if name.endswith(("gate_up_proj", "down_proj"))}
    reads: list[tuple[str, int, int]] = []
    writes: list[int] = []
    read, write = SafetensorsFile.read, TensorWriter.write

    def reading(self: Any, name: str, out: torch.Tensor, first_byte: int = 0) -> None:
        # What tells sources apart is the beginning of each tensor.
        if name in stacks and out.nbytes != BEGINNING_BYTES:
            reads.append((name, first_byte, out.nbytes))
        read(self, name, out, first_byte)

    def writing(self: Any, name: str, tensor: torch.Tensor, item: int | None = None) -> None:
        if ".experts." in name:
            writes.append(tensor.nbytes)
        write(self, name, tensor, item)

    monkeypatch.setattr(SafetensorsFile, "read", reading)
    monkeypatch.setattr(TensorWriter, "write", writing)
    convert_checkpoint(source, tmp_path / "target", fmt)
    assert sorted(reads) == sorted(
        (name, expert * size, size)
        for name, tensor in stacks.items()
        for expert, size in enumerate([tensor[0].nbytes] * EXPERTS)
    )
    assert max(writes) <= HIDDEN * 2 * INNER // 2


def test_calibration_sees_biases_limits_and_both_signs(tmp_path: Path, rng: torch.Generator, seed: int) -> None:
    """Token by token, against a loop in float64: of some the largest intermediate is negative, or has met the limit."""
    folder = saved(tmp_path, seed)
    tensors = load_all(folder)
    for name in ("gate_up_proj", "gate_up_proj_bias"):
        tensor = tensors[f"{BLOCK.format(0)}.{name}"]
        tensor.copy_(2 * torch.randn(tensor.shape, generator=rng))
    # What small tokens give is mostly of these.
    tensors[f"{BLOCK.format(0)}.gate_up_proj_bias"][:, :2] = torch.tensor([6.0, -6.5])
    rewrite(folder, tensors)
    router = (tensors[f"model.layers.0.mlp.router.{name}"].double() for name in ("weight", "bias"))
    weight_EH, bias_E = router
    w_EHN, b_EN = (tensors[f"{BLOCK.format(0)}.{name}"].double() for name in ("gate_up_proj", "gate_up_proj_bias"))
    signs, limited = set(), 0
    sizes = torch.tensor([0.01, 0.08, 0.3]).repeat(8)[:, None]
    for token_H in (sizes * torch.randn(24, HIDDEN, generator=rng)).bfloat16():
        x_H = token_H.double()
        found = []
        for expert in (weight_EH @ x_H + bias_E).topk(2).indices.tolist():
            c = x_H @ w_EHN[expert] + b_EN[expert]
            gate, up = c[0::2].clamp(max=7.0), c[1::2].clamp(-7.0, 7.0)
            found.append(gate * torch.sigmoid(1.702 * gate) * (up + 1))
            limited += int((gate == 7.0).sum())
        values = torch.cat(found)
        largest = values[values.abs().argmax()]
        signs.add(bool(largest > 0))
        assert calibrate(folder, 0, [token_H[None]]).intermediate_amax == pytest.approx(abs(float(largest)), rel=1e-5)
    assert signs == {True, False} and limited > 0


def test_stacked_experts_with_calibrated_scales(tmp_path: Path, seed: int) -> None:
    source, target = saved(tmp_path / "source", seed), tmp_path / "target"
    tokens = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
    found = {layer: calibrate(source, layer, [tokens]) for layer in range(LAYERS)}
    convert_checkpoint(source, target, "nvfp4", calibrations=found)
    for layer, calibration in found.items():
        with Checkpoint(target) as checkpoint:
            config = checkpoint.layer_config(layer, max_tokens_per_rank=1)
        assert (config.token_format, config.intermediate_gsf) == ("nvfp4", calibration.intermediate_gsf)
        # With weights that are rounded, the experts' intermediates are about what they were.
        again = calibrate(target, layer, [tokens])
        assert again.intermediate_amax == pytest.approx(calibration.intermediate_amax, rel=0.5)


def test_transformers_reads_converted_mxfp4(tmp_path: Path, seed: int) -> None:
    source, target = saved(tmp_path / "source", seed), tmp_path / "target"
    convert_checkpoint(source, target, "mxfp4")
    settings = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        target, quantization_config=settings, dtype=torch.bfloat16
    )
    original = models.load(source)
    with Checkpoint(target) as checkpoint:
        for layer, block in enumerate(tiny.moe_blocks(model)):
            for number, expert in enumerate(checkpoint.experts(layer, range(EXPERTS))):
                for part, theirs in (
                    (expert.gate_up, block.experts.gate_up_proj),
                    (expert.down, block.experts.down_proj),
                ):
                    assert_same_bits(dense(part).bfloat16(), theirs[number].mT.contiguous())
    for name, tensor in original.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            assert_same_bits(model.state_dict()[name], tensor, name)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_an_interrupted_conversion_of_stacked_experts_goes_on(fmt: str, tmp_path: Path, seed: int) -> None:
    source, whole, target = saved(tmp_path / "source", seed), tmp_path / "whole", tmp_path / "target"
    convert_checkpoint(source, whole, fmt)

    for after in (1, 3, 2):
        with pytest.raises(Stopped):
            convert_checkpoint(source, target, fmt, progress=stopping(after))
        assert not (target / "config.json").exists()
    assert list(target.glob("*.safetensors"))
    convert_checkpoint(source, target, fmt)
    assert contents(target) == contents(whole)


def test_layers_stacked_and_not(tmp_path: Path, seed: int) -> None:
    """A layer that MXFP4 left out, and one whose experts are linears of their own; both convert, with biases."""
    source, first = saved(tmp_path / "source", seed), tmp_path / "first"
    plain = load_all(source)
    made = write_gpt_oss_mxfp4(source)
    left_out = f"{BLOCK.format(1)}."
    mixed = {name: tensor for name, tensor in made.items() if not name.startswith(left_out)}
    rewrite(source, mixed | {name: tensor for name, tensor in plain.items() if name.startswith(left_out)})
    with Checkpoint(source) as checkpoint:
        assert [checkpoint.stored_of(layer).layout.name for layer in range(2)] == ["mxfp4", "plain, stacked"]
        (expert,) = checkpoint.experts(1, [2])
        assert isinstance(expert.gate_up, torch.Tensor)
        assert_same_bits(expert.gate_up, plain[f"{BLOCK.format(1)}.gate_up_proj"][2].T.contiguous())
    with pytest.raises(ValueError, match="expected another than the source holds, got mxfp4, as of layer 0"):
        convert_checkpoint(source, tmp_path / "refused", "mxfp4")
    convert_checkpoint(source, first, "nvfp4")
    # Linears of their own stay so, also in bf16.
    tensors = load_all(first)
    for expert_id in range(EXPERTS):
        for number, part in enumerate(("gate", "up")):
            prefix, stack = f"{BLOCK.format(1)}.{expert_id}.{part}_proj.", f"{BLOCK.format(1)}.gate_up_proj"
            for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
                del tensors[prefix + suffix]
            tensors[prefix + "weight"] = plain[stack][expert_id, :, number::2].T
            assert_same_bits(tensors[prefix + "bias"], plain[f"{stack}_bias"][expert_id, number::2])
        prefix, stack = f"{BLOCK.format(1)}.{expert_id}.down_proj.", f"{BLOCK.format(1)}.down_proj"
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
            del tensors[prefix + suffix]
        tensors[prefix + "weight"] = plain[stack][expert_id].T
        assert_same_bits(tensors[prefix + "bias"], plain[f"{stack}_bias"][expert_id])
    rewrite(first, tensors)
    convert_checkpoint(first, tmp_path / "second", "mxfp4")
    with Checkpoint(source) as before, Checkpoint(first) as between, Checkpoint(tmp_path / "second") as after:
        assert [between.stored_of(layer).layout.name for layer in range(2)] == ["nvfp4-pack-quantized", "plain"]
        assert after.stored_of(0).layout is TARGET_LAYOUTS["mxfp4"]
        for was, left, now in zip(*(each.experts(1, range(EXPERTS)) for each in (before, between, after)), strict=True):
            assert isinstance(was.gate_up, torch.Tensor) and isinstance(now.gate_up, ExpertWeights)
            assert isinstance(left.gate_up, torch.Tensor) and isinstance(was.down, torch.Tensor)
            assert_same_bits(left.gate_up, was.gate_up)
            want = ExpertWeights.quantize(was.gate_up[None], "mxfp4", gate_up=GateUpOrder.INTERLEAVED)
            assert_same_bits(now.gate_up.quants, want.quants)
            assert_same_bits(now.gate_up.scales, want.scales)
            assert now.gate_up.gate_up is GateUpOrder.INTERLEAVED
            for one in (left, now):
                assert torch.equal(one.gate_up_bias, was.gate_up_bias) and torch.equal(one.down_bias, was.down_bias)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_block"])
def test_rows_of_gate_and_up_are_read_into_their_place(fmt: str, tmp_path: Path, seed: int) -> None:
    """As they are stored and held once, where the format lets them alternate."""
    source, target, cpu = saved(tmp_path / "source", seed), tmp_path / "target", torch.device("cpu")
    convert_checkpoint(source, target, fmt)
    with Checkpoint(target) as checkpoint:
        config = checkpoint.layer_config(0, max_tokens_per_rank=1)
        buffers = checkpoint.quant_buffers(0, fmt, EXPERTS, cpu)
        found = quantize_experts(checkpoint.experts(0, range(EXPERTS), buffers), config, EXPERTS, cpu, buffers)
        fresh = quantize_experts(checkpoint.experts(0, range(EXPERTS)), config, EXPERTS, cpu)
        assert checkpoint.reader(0).holds(WEIGHT_FORMATS[fmt]) == (fmt != "fp8_block")
        for buffer, got, want in zip(buffers, found, fresh, strict=True):
            if fmt != "fp8_block":
                assert isinstance(buffer, QuantBuffer) and buffer.tensor is not None
                assert got.quants.data_ptr() == buffer.tensor.data_ptr()
            assert_same_bits(got.quants, want.quants)
            assert_same_bits(got.scales, want.scales)
            assert_same_bits(got.bias, want.bias)


def test_a_stacked_weight_that_is_not_finite_is_named(tmp_path: Path, seed: int) -> None:
    source = saved(tmp_path / "source", seed)
    name, tensors = f"{BLOCK.format(1)}.down_proj", load_all(source)
    tensors[name][2, 1, 4] = float("inf")
    rewrite(source, tensors)
    with pytest.raises(ValueError, match=rf"{source}.*: tensor {name}: expected finite weights of expert 2, got one"):
        convert_checkpoint(source, tmp_path / "target", "mxfp4")


def test_what_is_wrong_with_stacked_experts_is_named(tmp_path: Path, seed: int) -> None:
    source = saved(tmp_path / "source", seed, "mxfp4")
    with pytest.raises(ValueError, match="weight_format: expected another than the source holds, got mxfp4"):
        convert_checkpoint(source, tmp_path / "target", "mxfp4")
    assert not (tmp_path / "target").exists()
    convert_checkpoint(source, tmp_path / "target", "nvfp4")
    tensors = load_all(tmp_path / "target")
    name = f"{BLOCK.format(1)}.3.up_proj.bias"
    for change, message in (
        ({name: None}, f"tensor {name} is missing"),
        ({name: torch.zeros(5)}, rf"tensor {name}: expected shape \[128\], got \[5\]"),
        ({name + "2": torch.zeros(5)}, f"tensor {name}2 is not expected"),
        ({name.replace(".3.", ".4."): torch.zeros(128)}, r"tensor .*\.4\.up_proj\.bias is not expected: 4 experts"),
    ):
        changed = {key: tensor for key, tensor in (tensors | change).items() if tensor is not None}
        rewrite(tmp_path / "target", changed)
        with Checkpoint(tmp_path / "target") as checkpoint, pytest.raises(ValueError, match=message):
            list(checkpoint.experts(1, range(EXPERTS)))
