"""Offline conversion: what is written reads back as the quantizers' own values, here and by the makers' libraries."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.checkpoints.calibration import Calibration, calibrate
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.converted_experts import TARGET_LAYOUTS
from moe_runtime.checkpoints.files import INDEX_FILE, SINGLE_FILE, TensorFiles
from moe_runtime.checkpoints.quantization import EXPERTS_KEY, MODELOPT_FILE
from moe_runtime.checkpoints.readers import dense
from moe_runtime.checkpoints.writer import TensorWriter
from moe_runtime.config import MoELayerConfig
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch import convert
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from tests.support.checkpoint_writers import (
    FP8,
    NVFP4_RTOL,
    change_config,
    compress_layers,
    fp8_blocks,
    layer_config_of,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    rewrite,
)
from tests.support.comparison import assert_same_bits
from tests.support.interruptions import Stopped, contents, stopping
from tests.support.programs import python_path

CONFIG = MoELayerConfig(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, max_tokens_per_rank=8)
OTHERS = {
    "model.embed_tokens.weight": torch.randn(32, 256).bfloat16(),
    "model.layers.0.self_attn.q_proj.weight": torch.randn(256, 256).bfloat16(),
    "model.norm.weight": torch.ones(256),
    "some.counter": torch.arange(5),
}


@pytest.fixture
def source(tmp_path: Path, seed: int) -> Path:
    """Two layers in three shards, tensors that are no experts, a tokenizer."""
    folder = tmp_path / "source"
    write_qwen3_moe_checkpoint(folder, CONFIG, seed=seed, num_layers=2, num_shards=3)
    save_file(OTHERS, folder / "others.safetensors")
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"] |= dict.fromkeys(OTHERS, "others.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def check_quantized(before: Checkpoint, after: Checkpoint, layer: int, fmt: str) -> None:
    """The experts of `after` have the bits that the quantizers make of those of `before`."""
    for was, is_now in zip(before.experts(layer, range(4)), after.experts(layer, range(4)), strict=True):
        for old, new in ((was.gate_up, is_now.gate_up), (was.down, is_now.down)):
            assert isinstance(new, ExpertWeights)
            want = ExpertWeights.quantize(dense(old)[None], fmt)
            assert_same_bits(new.quants, want.quants)
            assert_same_bits(new.scales, want.scales)
            if want.expert_scales is not None and new.expert_scales is not None:
                assert (new.expert_scales.view(-1) == want.expert_scales).all()


@pytest.mark.parametrize("fmt", TARGET_LAYOUTS)
def test_what_is_written_reads_back_as_what_the_quantizers_make(fmt: str, source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "target", fmt)
    tensors = load_all(tmp_path / "target")
    for name, tensor in OTHERS.items():
        assert_same_bits(tensors[name], tensor)
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    originals = load_all(source)
    with Checkpoint(source) as before, Checkpoint(tmp_path / "target") as after:
        assert set(after.files.names()) == set(tensors)
        assert list(after.files.shards()) == list(before.files.shards())
        for layer in range(2):
            gate = f"model.layers.{layer}.mlp.gate.weight"
            assert_same_bits(tensors[gate], originals[gate])
            check_quantized(before, after, layer, fmt)
    config = layer_config_of(tmp_path / "target", max_tokens_per_rank=1)
    tokens = fmt if fmt in ("mxfp8", "fp8_block") else "bf16"
    assert (config.token_format, config.weight_format) == (tokens, fmt)


def test_what_no_index_names_is_left_out(source: Path, tmp_path: Path) -> None:
    save_file(OTHERS | {"unnamed": torch.ones(1)}, source / "others.safetensors")
    save_file({"unnamed": torch.ones(1)}, source / "unnamed.safetensors")
    (source / "weights.bin").write_bytes(b"1")
    (source / "folder.json").mkdir()
    convert_checkpoint(source, tmp_path / "target", "mxfp4")
    left_out = {"unnamed.safetensors", "weights.bin", "folder.json"}
    assert set(contents(tmp_path / "target")) == {path.name for path in source.iterdir()} - left_out
    assert "unnamed" not in load_all(tmp_path / "target")


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8"])
def test_compressed_tensors_reads_what_is_written(fmt: str, source: Path, tmp_path: Path) -> None:
    """Its config model takes our config, matches the experts' names alone, and its decompressor gives our numbers."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    convert_checkpoint(source, tmp_path / "target", fmt)
    data = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(data)
    scheme = config.config_groups["group_0"]
    (target,) = scheme.targets
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    tensors = load_all(tmp_path / "target")
    modules = {name.rpartition(".")[0] for name in tensors}
    matched = {name for name in modules if match_name(name, target)}
    assert matched == {name for name in modules if ".experts." in name}
    # Loaders of other programs raise for a linear that is neither among the targets nor left out.
    linears = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.ndim == 2}
    plain = {name for name in linears if ".experts." not in name}
    assert set(config.ignore) == plain and "model.layers.0.mlp.gate" in plain
    assert not {name for name in matched if any(match_name(name, ignored) for ignored in config.ignore)}
    with Checkpoint(tmp_path / "target") as checkpoint:
        (expert,) = checkpoint.experts(1, range(2, 3))
    assert isinstance(expert.down, ExpertWeights)
    prefix = "model.layers.1.mlp.experts.2.down_proj."
    parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    back = compressor.decompress(parts, scheme)["weight"].float()
    rtol = NVFP4_RTOL if fmt == "nvfp4" else 0.0
    torch.testing.assert_close(expert.down.dequantize()[0], back, rtol=rtol, atol=0.0)


def test_fp8_experts_become_nvfp4_and_the_rest_stays(source: Path, tmp_path: Path) -> None:
    """Quantized linears beside the experts keep their `quantization_config`; the experts have one of their own."""
    tensors = quantize_experts(source, fp8_blocks)
    attention = fp8_blocks(torch.randn(256, 256))
    tensors |= {f"model.layers.0.self_attn.o_proj.{name}": tensor for name, tensor in attention.items()}
    rewrite(source, tensors, quantization_config=FP8)
    convert_checkpoint(source, tmp_path / "target", "nvfp4")
    data = json.loads((tmp_path / "target" / "config.json").read_text())
    assert data["quantization_config"] == FP8
    assert data[EXPERTS_KEY]["format"] == "nvfp4-pack-quantized"
    made = load_all(tmp_path / "target")
    for name, tensor in attention.items():
        assert_same_bits(made[f"model.layers.0.self_attn.o_proj.{name}"], tensor)
    assert not any(name.endswith("weight_scale_inv") and ".experts." in name for name in made)
    with Checkpoint(source) as before, Checkpoint(tmp_path / "target") as after:
        assert after.rest.stored(["model.layers.0.self_attn.o_proj"]).layout.name == "fp8"
        check_quantized(before, after, 0, "nvfp4")


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("cache", [None, {"num_bits": 8, "type": "float"}])
def test_experts_that_alone_were_quantized_may_change_their_format(
    cache: Any, key: str, source: Path, tmp_path: Path
) -> None:
    """Nothing else is described by the source's `quantization_config`: that of the experts takes its place."""
    first, second = tmp_path / "first", tmp_path / "second"
    convert_checkpoint(source, first, "nvfp4")
    data = json.loads((first / "config.json").read_text())
    data[key] = data.pop("quantization_config") | {"kv_cache_scheme": cache}
    (first / "config.json").write_text(json.dumps(data))
    convert_checkpoint(first, second, "mxfp4")
    converted = json.loads((second / "config.json").read_text())
    assert (EXPERTS_KEY in converted) == (cache is not None)
    assert converted[EXPERTS_KEY if cache else "quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert converted[key if cache else "quantization_config"].get("kv_cache_scheme") == cache
    assert ("compression_config" in converted) == (cache is not None and key == "compression_config")
    with Checkpoint(second) as checkpoint:
        assert checkpoint.stored_of(1).layout is TARGET_LAYOUTS["mxfp4"]
        assert len(list(checkpoint.experts(1, range(4)))) == 4


def test_layers_in_several_formats_become_one(tmp_path: Path, seed: int) -> None:
    """NVFP4, blocks of FP8 and bf16, by compressed-tensors; a format that one layer has is refused."""
    pytest.importorskip("compressed_tensors")
    source, target = tmp_path / "source", tmp_path / "target"
    write_qwen3_moe_checkpoint(source, CONFIG, seed=seed, num_layers=3)
    compress_layers(source, "NVFP4", "FP8_BLOCK")
    for fmt, layer in (("nvfp4", 0), ("fp8_block", 1)):
        with pytest.raises(ValueError, match=f"expected another than the source holds, got {fmt}, as of layer {layer}"):
            convert_checkpoint(source, target, fmt)
    convert_checkpoint(source, target, "mxfp8")
    with Checkpoint(source) as before, Checkpoint(target) as after:
        for layer in range(3):
            check_quantized(before, after, layer, "mxfp8")


def test_what_modelopt_says_of_the_rest_stays(source: Path, tmp_path: Path) -> None:
    quantize_experts(source, modelopt_nvfp4)
    said = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    convert_checkpoint(source, tmp_path / "target", "mxfp8")
    with Checkpoint(source) as before, Checkpoint(tmp_path / "target") as after:
        assert after.rest.stored(["model.layers.0.self_attn.o_proj"]).layout.name == "modelopt nvfp4"
        assert after.stored_of(1).layout.name == "mxfp8-quantized"
        check_quantized(before, after, 1, "mxfp8")


def test_calibrated_scales_are_stored(source: Path, tmp_path: Path, rng: torch.Generator) -> None:
    """Against the largest numbers of an independent loop in float64; stored, they make activations NVFP4."""
    batches = [torch.randn(5, 256, generator=rng).bfloat16(), torch.randn(3, 256, generator=rng).bfloat16()]
    found = calibrate(source, 1, batches)
    tensors, x = load_all(source), torch.cat(batches).double()
    block = "model.layers.1.mlp"
    top = (x @ tensors[f"{block}.gate.weight"].double().T).topk(2).indices
    largest = 0.0
    for token, experts in zip(x, top.tolist(), strict=True):
        for expert in experts:
            gate, up = (
                tensors[f"{block}.experts.{expert}.{part}_proj.weight"].double() @ token for part in ("gate", "up")
            )
            largest = max(largest, float((torch.nn.functional.silu(gate) * up).abs().max()))
    assert found.token_amax == float(x.abs().max())
    assert found.intermediate_amax == pytest.approx(largest, rel=1e-5)
    calibrations = {0: Calibration(2.0, 1e-40), 1: found}
    assert calibrations[0].intermediate_gsf == 2.0**100
    convert_checkpoint(source, tmp_path / "target", "nvfp4", calibrations=calibrations)
    for layer, calibration in calibrations.items():
        config = layer_config_of(tmp_path / "target", layer=layer, max_tokens_per_rank=1)
        assert (config.token_format, config.intermediate_gsf) == ("nvfp4", calibration.intermediate_gsf)
    stored = load_all(tmp_path / "target")["model.layers.0.mlp.experts.3.up_proj.input_global_scale"]
    assert stored.tolist() == [1344.0]


def test_layers_for_multi_token_prediction_need_no_calibration(source: Path, tmp_path: Path) -> None:
    """They stay meant for bf16 tokens, as the config says, here and to compressed-tensors."""
    change_config(source, num_hidden_layers=1, num_nextn_predict_layers=1)
    one = Calibration(2.0, 3.0)
    convert_checkpoint(source, tmp_path / "target", "nvfp4", calibrations={0: one})
    for layer, fmt in enumerate(("nvfp4", "bf16")):
        found = layer_config_of(tmp_path / "target", layer=layer, max_tokens_per_rank=1)
        assert (found.token_format, found.weight_format) == (fmt, "nvfp4")
    scaled = {name.split(".")[2] for name in load_all(tmp_path / "target") if name.endswith("input_global_scale")}
    assert scaled == {"0"}
    with pytest.raises(ValueError, match=r"calibrations: expected those of layers \[0\], got \[1\]"):
        convert_checkpoint(source, tmp_path / "other", "nvfp4", calibrations={1: one})
    convert_checkpoint(source, tmp_path / "both", "nvfp4", calibrations={0: one, 1: one})
    assert layer_config_of(tmp_path / "both", layer=1, max_tokens_per_rank=1).token_format == "nvfp4"
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    data = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]
    groups = (
        pytest.importorskip("compressed_tensors.quantization").QuantizationConfig.model_validate(data).config_groups
    )
    for layer in range(2):
        matching = [g for g in groups.values() if match_name(f"model.layers.{layer}.mlp.experts.3.up_proj", *g.targets)]
        assert [group.input_activations is None for group in matching] == [layer == 1]


def test_tokens_that_cannot_calibrate_are_refused(source: Path) -> None:
    for batches, message in (
        ([], "batches of layer 0: token_amax: expected a positive finite number, got 0.0"),
        ([torch.zeros(2, 256)], "batches of layer 0: token_amax: expected a positive finite number, got 0.0"),
        ([torch.full((2, 256), float("nan"))], "token_amax: expected a positive finite number, got nan"),
        ([torch.zeros(2, 128)], r"batch 0 of layer 0: expected floats \[T, 256\], got torch.float32 \[2, 128\]"),
        ([torch.zeros(2, 256, dtype=torch.int32)], "batch 0 of layer 0: expected floats"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(source, 0, batches)


def test_wrong_use_is_named(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    one = Calibration(1.0, 1.0)
    for arguments, changes, message in (
        ((source, target, "bf16"), {}, "weight_format: expected one of nvfp4, mxfp4, mxfp8, fp8_block, got 'bf16'"),
        ((source, source, "nvfp4"), {}, "target: expected another folder than the source"),
        ((source, target, "nvfp4"), {"calibrations": {0: one}}, r"calibrations: expected those of layers \[0, 1\]"),
        ((source, target, "mxfp8"), {"calibrations": {0: one, 1: one}}, "calibrations: expected none for mxfp8"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(*arguments, **changes)  # type: ignore[arg-type]
    assert not target.exists()
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match="target: expected a path"):
            convert_checkpoint(source, "", "nvfp4")
        with pytest.raises(ValueError, match=rf"target: expected a folder, {path} (is|lies below) a file"):
            convert_checkpoint(source, path, "nvfp4")
    convert_checkpoint(source, target, "mxfp8")
    with pytest.raises(
        ValueError, match=r"weight_format: expected another than the source holds, got mxfp8, as of layer 0"
    ):
        convert_checkpoint(target, tmp_path / "again", "mxfp8")
    with pytest.raises(ValueError, match=r"safetensors: expected nothing, or a shard that the same conversion wrote"):
        convert_checkpoint(source, target, "nvfp4")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other/config\.json: expected an empty folder"):
        convert_checkpoint(source, tmp_path / "other", "nvfp4")


@pytest.mark.parametrize("name", [INDEX_FILE, MODELOPT_FILE, "other.safetensors", SINGLE_FILE])
def test_what_another_checkpoint_left_is_not_mixed_in(name: str, source: Path, tmp_path: Path) -> None:
    """Neither read together with what is written, nor written over."""
    target = tmp_path / "target"
    target.mkdir()
    (target / name).write_text("{}")
    with pytest.raises(ValueError, match=re.escape(f"{target / name}: expected an empty folder, or one of the same")):
        convert_checkpoint(source, target, "mxfp8")
    assert contents(target) == {name: b"{}"}


def test_files_of_others_are_not_written_over(source: Path, tmp_path: Path) -> None:
    """They may be there with the bytes that would be written, or under names of which nothing is."""
    target = tmp_path / "target"
    target.mkdir()
    (source / "README.md").write_text("of the source")
    (target / "README.md").write_text("of somebody else")
    (target / "notes.md").write_text("too")
    before = contents(target)
    with pytest.raises(ValueError, match=re.escape(f"{target / 'README.md'}: expected nothing, or what the source")):
        convert_checkpoint(source, target, "mxfp8")
    assert contents(target) == before
    (target / "README.md").write_text("of the source")
    with pytest.raises(Stopped):
        convert_checkpoint(source, target, "mxfp8", progress=stopping(3))
    convert_checkpoint(source, target, "mxfp8")
    assert contents(target)["notes.md"] == b"too" and contents(target)["README.md"] == b"of the source"


def test_a_single_file_is_not_read_by_an_index_beside_it(tmp_path: Path, seed: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_qwen3_moe_checkpoint(source, CONFIG, seed=seed)
    target.mkdir()
    (target / INDEX_FILE).write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match=re.escape(f"{target / INDEX_FILE}: expected an empty folder")):
        convert_checkpoint(source, target, "mxfp8")
    (target / INDEX_FILE).unlink()
    convert_checkpoint(source, target, "mxfp8")
    whole = contents(target)
    (target / INDEX_FILE).write_text('{"weight_map": {}}')
    convert_checkpoint(source, target, "mxfp8")
    assert contents(target) == whole


def test_another_training_of_the_same_model_is_not_mixed_in(source: Path, tmp_path: Path) -> None:
    """Same JSON files, names, shapes and gates: only some weight differs."""
    target = tmp_path / "target"
    convert_checkpoint(source, target, "nvfp4")
    (target / "model-00002-of-00003.safetensors").unlink()
    before = contents(target)
    file = source / "others.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"safetensors: expected nothing, or a shard that the same conversion wrote"):
        convert_checkpoint(source, target, "nvfp4")
    assert contents(target) == before


@pytest.mark.parametrize("part", ["gate", "up", "down"])
@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_named(part: str, number: float, source: Path, tmp_path: Path) -> None:
    """Their scales would be what no reader takes."""
    name = f"model.layers.1.mlp.experts.2.{part}_proj.weight"
    tensors = load_all(source)
    tensors[name][3, 5] = number
    rewrite(source, tensors)
    message = rf"{source}.*safetensors: tensor {name}: expected finite weights of expert 2, got one that is not"
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "target", "mxfp8")
    assert not (tmp_path / "target" / "config.json").exists()


def test_a_layer_that_lost_its_experts_is_not_passed_over(source: Path, tmp_path: Path) -> None:
    """Those of layers for multi-token prediction alone may be missing."""
    change_config(source, num_nextn_predict_layers=1)
    convert_checkpoint(source, tmp_path / "target", "nvfp4")
    index = json.loads((source / INDEX_FILE).read_text())
    index["weight_map"] = {k: shard for k, shard in index["weight_map"].items() if "layers.1.mlp.experts" not in k}
    (source / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{INDEX_FILE}: tensor model\.layers\.1\.mlp\.experts\.0.* is missing"):
        convert_checkpoint(source, tmp_path / "other", "nvfp4")


def test_what_torch_has_no_dtype_for_is_named(source: Path, tmp_path: Path) -> None:
    file = source / "others.safetensors"
    header = {"some.counter": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(3))
    index = json.loads((source / INDEX_FILE).read_text())
    for name in set(OTHERS) - {"some.counter"}:
        del index["weight_map"][name]
    (source / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{file}: tensor some\.counter: F6_E2M3 is no dtype of torch"):
        convert_checkpoint(source, tmp_path / "target", "nvfp4")


def test_an_interrupted_conversion_goes_on(source: Path, tmp_path: Path) -> None:
    """Whatever step it ends at: no final name holds half a file, no checkpoint shows before it is whole, nothing that
    is whole is written again, and the result is the same."""
    whole, target = tmp_path / "whole", tmp_path / "target"
    convert_checkpoint(source, whole, "nvfp4")

    for after in (0, 2, 3):
        written = {path: path.stat().st_mtime_ns for path in target.glob("*.safetensors")}
        with pytest.raises(Stopped):
            convert_checkpoint(source, target, "nvfp4", progress=stopping(after))
        assert not (target / "config.json").exists() and not (target / INDEX_FILE).exists()
        for path in target.glob("*.safetensors"):
            assert path.read_bytes() == (whole / path.name).read_bytes()
        assert all(path.stat().st_mtime_ns == when for path, when in written.items())
    convert_checkpoint(source, target, "nvfp4")
    assert contents(target) == contents(whole)


def test_another_version_does_not_go_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may quantize into other bits."""
    with pytest.raises(Stopped):
        convert_checkpoint(source, tmp_path / "target", "nvfp4", progress=stopping(8))
    assert list((tmp_path / "target").glob("*.safetensors"))
    monkeypatch.setattr("moe_runtime.__version__", "9.8.7")
    with pytest.raises(ValueError, match=r"a shard that the same conversion wrote, with moe_runtime 9\.8\.7"):
        convert_checkpoint(source, tmp_path / "target", "nvfp4")


def test_a_stopped_conversion_writes_nothing_later(source: Path, tmp_path: Path) -> None:
    """Its error, which somebody may keep, keeps no shard open that another conversion is going to write."""
    whole, target = tmp_path / "whole", tmp_path / "target"
    convert_checkpoint(source, whole, "mxfp8")
    with pytest.raises(Stopped) as stopped:
        convert_checkpoint(source, target, "nvfp4", progress=stopping(0))
    still_open = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in still_open if path.startswith(str(target))]
    convert_checkpoint(source, target, "mxfp8")
    del stopped
    gc.collect()
    assert contents(target) == contents(whole)


def test_a_writer_left_open_does_not_write_into_the_next_one(tmp_path: Path) -> None:
    path, shapes = tmp_path / "a.safetensors", {"x": ("U8", (64,))}
    left_open = TensorWriter(path, shapes, {}).__enter__()
    left_open.write("x", torch.ones(64, dtype=torch.uint8))
    with TensorWriter(path, shapes, {}) as writer:
        writer.write("x", torch.zeros(64, dtype=torch.uint8))
    left_open.__exit__(Stopped, Stopped(), None)
    assert load_file(path)["x"].tolist() == [0] * 64


def test_what_could_not_be_written_is_named_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a tensor, or at the end of a shard or of another file; nor does what ends for another reason."""
    path, target = tmp_path / "large.safetensors", tmp_path / "target"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OSError, match=f"File too large: '{path}'"):
        try:
            with TensorWriter(path, {"x": ("U8", (1 << 23,))}, {}) as writer:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, limits[1]))
                writer.write("x", torch.zeros(1 << 23, dtype=torch.uint8))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("large*"))
    with pytest.raises(Stopped):
        convert_checkpoint(source, target, "mxfp8", progress=stopping(2))
    assert not list(target.glob("*.partial"))
    sync = os.fsync

    def fails(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"{failing}.partial"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    for failing in ("others.safetensors", "tokenizer.json"):
        with pytest.raises(OSError, match=re.escape(f"No space left on device: '{target / failing}'")):
            convert_checkpoint(source, target, "mxfp8")
        assert not list(target.glob("*.partial")) and not (target / failing).exists()


def test_what_is_whole_outlasts_a_loss_of_power(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file takes its final name before its bytes are on the disk; the names themselves are, at the end."""
    synced: list[int] = []
    named: list[str] = []
    sync, replace = os.fsync, os.replace

    def syncing(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def replacing(before: Path, after: Path) -> None:
        assert before.stat().st_ino in synced
        named.append(after.name)
        replace(before, after)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    convert_checkpoint(source, tmp_path / "target", "mxfp8")
    assert sorted(named) == sorted(contents(tmp_path / "target")) and named[-1] == "config.json"
    assert synced[-1] == (tmp_path / "target").stat().st_ino


def test_a_killed_program_goes_on(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "[target]"  # brackets are no markup of the console
    command = [sys.executable, "-m", "moe_runtime.launch.convert", str(source), str(target), "--format", "mxfp4"]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": python_path()})
    try:
        deadline = time.monotonic() + 60
        while not any(target.glob("*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    finally:
        process.wait()
    assert convert.main([str(source), str(target), "--format", "mxfp4"]) == 0
    assert f"{target}: experts in mxfp4" in capsys.readouterr().out
    convert_checkpoint(source, tmp_path / "whole", "mxfp4")
    assert contents(target) == contents(tmp_path / "whole")


def test_the_program_calibrates(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens.safetensors"
    x = {f"layers.{layer}": torch.randn(4, 256).bfloat16() for layer in range(2)}
    save_file(x, tokens)
    assert convert.main([str(source), str(tmp_path / "target"), "--calibrate", str(tokens)]) == 0
    assert "layer 1: tokens up to" in capsys.readouterr().out
    config = layer_config_of(tmp_path / "target", layer=1, max_tokens_per_rank=1)
    assert config.intermediate_gsf == calibrate(source, 1, [x["layers.1"]]).intermediate_gsf
    # Wrong names and formats are found before anything is computed.
    monkeypatch.setattr(convert, "calibrate", None)
    assert convert.main([str(source), str(tmp_path / "again"), "--calibrate", str(tokens), "--format", "mxfp8"]) == 2
    assert "calibrations: expected none for mxfp8, got 2" in capsys.readouterr().err
    save_file({"tokens": x["layers.0"]}, tokens)
    assert convert.main([str(source), str(tmp_path / "again"), "--calibrate", str(tokens)]) == 2
    assert f"{tokens}: tensor tokens: expected layers.0, layers.1" in capsys.readouterr().err
    save_file(x | {"layers.00": x["layers.1"].clone()}, tokens)
    assert convert.main([str(source), str(tmp_path / "again"), "--calibrate", str(tokens)]) == 2
    assert f"{tokens}: tensors layers.0 and layers.00: expected one for each layer" in capsys.readouterr().err
    save_file({"layers.0": x["layers.0"]}, tokens)
    assert convert.main([str(source), str(tmp_path / "again"), "--calibrate", str(tokens)]) == 2
    assert "calibrations: expected those of layers [0, 1], got [0]" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["no_such", "meta", "cuda:2", "xpu"])
def test_the_program_names_a_device_that_is_not_there(
    device: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert convert.main([str(source), str(tmp_path / "target"), "--device", device]) == 2
    expected = "--device: expected cpu or one of 2 GPUs, cuda:0 and so on; got"
    assert capsys.readouterr().err == f"convert: {expected} {device}\n"
    assert not (tmp_path / "target").exists()
    for there in ("cpu", "cuda", "cuda:1"):
        convert.check_device(there)


def test_the_writer_writes_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.zeros(0, 4),
        "c": torch.tensor(2.5),
        "d": torch.randn(7).to(torch.float8_e4m3fn),
        "e": torch.arange(6, dtype=torch.uint8).view(2, 3).T,
    }
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}
    shapes = {name: (names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = tmp_path / "model.safetensors"
    with TensorWriter(path, shapes, {"format": "pt"}) as writer:
        for name, tensor in list(tensors.items())[::-1]:
            if name != "e":
                writer.write(name, tensor)
                continue
            for item in (2, 0, 1):
                writer.write(name, tensor[item], item)
    back = load_file(path)
    for name, tensor in tensors.items():
        assert_same_bits(back[name], tensor.contiguous())
    # The data begins where any dtype may lie, however long the names are.
    for length in range(1, 9):
        with TensorWriter(tmp_path / "names", {"x" * length: ("F32", (2,))}, {}) as writer:
            writer.write("x" * length, torch.zeros(2))
        assert (tmp_path / "names").stat().st_size % 8 == 0
    with TensorFiles(tmp_path) as files:
        assert files.names() == list(tensors)
    other = tmp_path / "other.safetensors"
    for given, message in (
        ([("a", tensors["a"]), ("a", tensors["a"])], "tensor a is not expected, or came before"),
        ([("a", tensors["a"].float())], r"tensor a: expected BF16 \[3, 5\], got F32 \[3, 5\]"),
        ([("a", tensors["a"])], "tensor b was not written"),
        ([*tensors.items(), ("f", tensors["a"])], "tensor f is not expected"),
        ([("a", tensors["a"][0], 0), ("a", tensors["a"])], "tensor a is not expected, or came before"),
        ([("a", tensors["a"]), ("a", tensors["a"][0], 0)], "item 0 of tensor a is not expected, or came before"),
        ([("a", tensors["a"][0], 3)], "item 3 of tensor a is not expected"),
        ([("a", tensors["a"][0], -1)], "item -1 of tensor a is not expected"),
        ([("b", tensors["b"][:, 0], 0)], "item 0 of tensor b is not expected"),
        ([("c", tensors["c"], 0)], "item 0 of tensor c is not expected"),
        ([("a", tensors["a"][0], 0), ("a", tensors["a"][0], 0)], "item 0 of tensor a is not expected, or came before"),
        ([("a", tensors["a"], 0)], r"tensor a: expected BF16 \[5\], got BF16 \[3, 5\]"),
        (
            [*((n, t) for n, t in tensors.items() if n != "a"), ("a", tensors["a"][2], 2), ("a", tensors["a"][0], 0)],
            "tensor a was not written",
        ),
    ):
        with pytest.raises(ValueError, match=message), TensorWriter(other, shapes, {}) as writer:
            for part in given:
                writer.write(*part)
        assert not other.exists()
