"""Quantized layouts: quants and scales come back as they were written, and read back as their writers say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.checkpoints.checkpoint import Checkpoint, choose_formats
from moe_runtime.checkpoints.files import SINGLE_FILE, TensorFiles
from moe_runtime.checkpoints.layouts import (
    COMPRESSED_MXFP4,
    COMPRESSED_MXFP8,
    COMPRESSED_NVFP4,
    FP8_BLOCKS,
    GPT_OSS_MXFP4,
    MODELOPT_NVFP4,
    PLAIN,
)
from moe_runtime.checkpoints.loading import FRESH, ExpertTensors, QuantBuffer
from moe_runtime.checkpoints.loading import quantize_experts as load_experts
from moe_runtime.checkpoints.readers import check_no_nan, read_linear
from moe_runtime.checkpoints.stored_experts import StoredExperts
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.swizzle import unswizzle_scales
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from tests.support.checkpoint_writers import (
    FP8,
    MODELOPT,
    NVFP4_RTOL,
    LibraryScheme,
    change_config,
    change_tensor,
    compressed_config,
    fp8_blocks,
    layer_config_of,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    read_fp8_blocks,
    read_nvfp4,
    rewrite,
)
from tests.support.comparison import assert_same_bits

CONFIG = MoELayerConfig(hidden_size=256, intermediate_size=128, num_experts=3, top_k=2, max_tokens_per_rank=8)
PARTS = ("gate_proj", "up_proj", "down_proj")


SHORT = {"hidden_size": 288, "intermediate_size": 320}
"""Sizes that end within a block of 128."""


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed)
    return tmp_path


def read(folder: Path) -> list[ExpertTensors]:
    with Checkpoint(folder) as checkpoint:
        return list(checkpoint.experts(0, range(3)))


def linear(expert: int, part: str, suffix: str) -> str:
    return f"model.layers.0.mlp.experts.{expert}.{part}.{suffix}"


class Projection(NamedTuple):
    """One linear as it was read: quants `[N, *]`, linear scales, second-level scale, and fp32 `[N, K]`."""

    prefix: str
    quants: torch.Tensor
    scales: torch.Tensor
    second: torch.Tensor | None
    value: torch.Tensor


def projections(folder: Path) -> list[Projection]:
    """All of layer 0, gate and up apart."""
    found = []
    for number, expert in enumerate(read(folder)):
        for part, w, half in zip(PARTS, (expert.gate_up, expert.gate_up, expert.down), (0, 1, None), strict=True):
            assert isinstance(w, ExpertWeights) and w.scales is not None
            assert w.gate_up == (None if half is None else GateUpOrder.GATE_UP)
            scales, columns = w.scales[0], w.format.scale_columns(w.num_columns)
            if w.format.swizzled:
                scales = unswizzle_scales(w.scales, w.num_rows, columns)[0].view(torch.uint8)
            halves = [t if half is None else t.chunk(2)[half] for t in (w.quants[0], scales, w.dequantize()[0])]
            second = None if w.expert_scales is None else w.expert_scales.view(-1)[half or 0]
            found.append(Projection(linear(number, part, ""), halves[0], halves[1], second, halves[2]))
    assert len(found) == 9
    return found


def test_modelopt(folder: Path) -> None:
    """Also found by `hf_quant_config.json` alone."""
    tensors = quantize_experts(folder, modelopt_nvfp4)
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    for prefix, quants, scales, second, value in projections(folder):
        weight, scale, scale_2 = (tensors[prefix + part] for part in ("weight", "weight_scale", "weight_scale_2"))
        assert_same_bits(quants, weight)
        assert_same_bits(scales, scale.view(torch.uint8))
        assert second is not None and second.item() == scale_2.item()
        exact = read_nvfp4({"weight": weight, "weight_scale": scale, "weight_scale_2": scale_2})
        np.testing.assert_array_equal(value.numpy(), exact.astype(np.float32))
    config = layer_config_of(folder, max_tokens_per_rank=1)
    assert (config.token_format, config.weight_format) == ("nvfp4", "nvfp4")
    largest = max(tensors[linear(e, "down_proj", "input_scale")] for e in range(3))
    assert config.intermediate_gsf == (torch.ones(()) / largest).item()
    (folder / "hf_quant_config.json").unlink()
    change_config(folder, quantization_config=MODELOPT)
    assert layer_config_of(folder, max_tokens_per_rank=1) == config


def test_modelopt_value_for_value(folder: Path) -> None:
    """What its own quantizer of NVFP4 makes, where it is installed, and its own dequantization."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    back: list[torch.Tensor] = []

    def quantizer(w: torch.Tensor) -> dict[str, torch.Tensor]:
        made, scale, second = qtensor.NVFP4QTensor.quantize(w.bfloat16(), 16)
        sizes = {"dtype": torch.float32, "scale": scale, "double_scale": second, "block_sizes": {-1: 16}}
        back.append(made.dequantize(**sizes))
        stored = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": second.float().reshape(())}
        return stored | {"input_scale": torch.tensor(0.01)}

    tensors = quantize_experts(folder, quantizer, quantization_config=MODELOPT)
    order = dict.fromkeys(key.rpartition(".")[0] + "." for key in tensors if ".experts." in key)
    dequantized = dict(zip(order, back, strict=True))
    for prefix, quants, scales, second, value in projections(folder):
        assert_same_bits(quants, tensors[f"{prefix}weight"])
        assert_same_bits(scales, tensors[f"{prefix}weight_scale"].view(torch.uint8))
        assert second is not None and second == tensors[f"{prefix}weight_scale_2"]
        # It rounds the product of the scales first.
        torch.testing.assert_close(value, dequantized[prefix], rtol=2.0**-22, atol=0)


def assert_is_fp8_block_weight(w: torch.Tensor, tensors: dict[str, torch.Tensor], number: int, part: str) -> None:
    """Raise unless fp32 `w` is each stored block, short ones too, times its scale."""
    exact = read_fp8_blocks(*(tensors[linear(number, part, name)] for name in ("weight", "weight_scale_inv")))
    assert_same_bits(w, torch.from_numpy(exact.astype(np.float32)))


@pytest.mark.parametrize(
    ("hidden", "inner"), [(256, 128), (128, 320), (128, 192), (192, 128), (288, 192), (352, 64), (144, 1408)]
)
def test_fp8_blocks(hidden: int, inner: int, tmp_path: Path, seed: int) -> None:
    """Scales are stored for `ceil(N/128) x ceil(K/128)` blocks; quants and scales are kept as they are."""
    write_qwen3_moe_checkpoint(tmp_path, CONFIG.replace(hidden_size=hidden, intermediate_size=inner), seed=seed)
    tensors = quantize_experts(tmp_path, fp8_blocks, quantization_config=FP8)
    for number, (prefix, quants, scales, _, value) in enumerate(projections(tmp_path)):
        assert_same_bits(quants.view(torch.uint8), tensors[f"{prefix}weight"].view(torch.uint8))
        assert_same_bits(scales, tensors[f"{prefix}weight_scale_inv"])
        assert_is_fp8_block_weight(value, tensors, number // 3, PARTS[number % 3])
    config = layer_config_of(tmp_path, max_tokens_per_rank=1)
    assert (config.token_format, config.weight_format, config.intermediate_gsf) == ("fp8_block", "fp8_block", None)
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(tmp_path, context=context, max_tokens_per_rank=1)
        assert layer.experts is not None
        for number, one in enumerate(read(tmp_path)):
            for made, given in ((layer.experts.gate_up, one.gate_up), (layer.experts.down, one.down)):
                assert isinstance(made, ExpertWeights) and isinstance(given, ExpertWeights)
                assert_same_bits(made.expert(number).quants, given.quants)
                assert_same_bits(made.expert(number).scales, given.scales)


def test_fp8_blocks_of_sizes_that_no_row_may_have_are_dequantized(tmp_path: Path, seed: int) -> None:
    """Rows of 136 bytes do not lie on 16-byte boundaries."""
    write_qwen3_moe_checkpoint(tmp_path, CONFIG.replace(intermediate_size=136), seed=seed)
    tensors = quantize_experts(tmp_path, fp8_blocks, quantization_config=FP8)
    for number, expert in enumerate(read(tmp_path)):
        assert isinstance(expert.gate_up, ExpertWeights) and isinstance(expert.down, torch.Tensor)
        weights = (*expert.gate_up.dequantize()[0].chunk(2), expert.down)
        for part, w in zip(PARTS, weights, strict=True):
            assert_is_fp8_block_weight(w, tensors, number, part)


@pytest.mark.parametrize(("rows", "columns"), [(132, 288), (12, 256), (136, 200)])
def test_fp8_linears_of_any_size_are_read(rows: int, columns: int, tmp_path: Path, rng: torch.Generator) -> None:
    """As those of a shared expert, which no kernel multiplies as they are stored."""
    stored = fp8_blocks(torch.randn(rows, columns, generator=rng))
    save_file({linear(0, "up_proj", name): tensor for name, tensor in stored.items()}, tmp_path / SINGLE_FILE)
    with TensorFiles(tmp_path) as files:
        w = read_linear(files, FP8_BLOCKS, linear(0, "up_proj", "")[:-1], rows, columns)
    assert isinstance(w, torch.Tensor)
    assert_is_fp8_block_weight(w, {linear(0, "up_proj", name): tensor for name, tensor in stored.items()}, 0, "up_proj")


@pytest.mark.parametrize(
    ("name", "sizes"), [*((name, {}) for name in LibraryScheme.FORMATS), ("FP8_BLOCK", SHORT), ("NVFP4", SHORT)]
)
def test_compressed_tensors_value_for_value(name: str, sizes: dict[str, int], folder: Path, seed: int) -> None:
    """Written by the library's own compressors from its own scales, and held to its own decompressors."""
    pytest.importorskip("compressed_tensors")
    if sizes:
        write_qwen3_moe_checkpoint(folder, CONFIG.replace(**sizes), seed=seed)
    library = LibraryScheme(name, "Linear")
    tensors = quantize_experts(folder, library.compress, quantization_config=compressed_config(library.group))
    for prefix, quants, scales, second, value in projections(folder):
        weight = tensors[prefix + ("weight" if "FP8" in name else "weight_packed")]
        assert_same_bits(quants.view(torch.uint8), weight.view(torch.uint8))
        stored = tensors[f"{prefix}weight_scale"]
        assert_same_bits(scales, stored if name == "FP8_BLOCK" else stored.view(torch.uint8))
        back = library.decompress(prefix, tensors)
        if name.startswith("NVFP4"):
            assert second is not None and second == torch.ones(1) / tensors[f"{prefix}weight_global_scale"]
            torch.testing.assert_close(value, back, rtol=NVFP4_RTOL, atol=0)
        else:
            assert_same_bits(value, back)
    config = layer_config_of(folder, max_tokens_per_rank=1)
    tokens = {"NVFP4": "nvfp4", "MXFP8": "mxfp8", "FP8_BLOCK": "fp8_block"}.get(name, "bf16")
    weights = "fp8_block" if name == "FP8_BLOCK" else library.format.partition("-")[0]
    assert (config.token_format, config.weight_format) == (tokens, weights)
    if name == "NVFP4":
        stored = [tensors[linear(e, "down_proj", "input_global_scale")].item() for e in range(3)]
        assert config.intermediate_gsf == min(stored)
    else:
        assert config.intermediate_gsf is None


def test_linears_that_quantization_left_out_are_plain(folder: Path) -> None:
    """A whole layer in bf16 beside a quantized one."""
    write_qwen3_moe_checkpoint(folder, CONFIG, seed=1, num_layers=2)
    plain = load_file(folder / SINGLE_FILE)
    quantized = {name: tensor for name, tensor in plain.items() if ".layers.1." in name}
    save_file(quantized, folder / SINGLE_FILE)
    made = quantize_experts(folder, modelopt_nvfp4, quantization_config=MODELOPT)
    save_file(made | {name: tensor for name, tensor in plain.items() if name not in quantized}, folder / SINGLE_FILE)
    for expert in read(folder):
        assert isinstance(expert.down, torch.Tensor) and expert.down.dtype == torch.bfloat16
    with Checkpoint(folder) as checkpoint:
        (one,) = checkpoint.experts(1, range(1))
        assert isinstance(one.down, ExpertWeights)
        assert checkpoint.stored_of(0) == StoredExperts(PLAIN, "bf16")
    assert layer_config_of(folder, 0, max_tokens_per_rank=1).token_format == "bf16"
    assert layer_config_of(folder, 1, max_tokens_per_rank=1).token_format == "nvfp4"


@pytest.mark.parametrize("parts", [PARTS, PARTS[1:2]])
@pytest.mark.parametrize("block_scale", [0x7F, 0x00])
def test_experts_whose_weights_are_all_zero(parts: tuple[str, ...], block_scale: int, folder: Path) -> None:
    """A second-level scale of 0 divides none: block scales are NaN, or 0. Scales of other experts are as they were."""
    made = quantize_experts(folder, modelopt_nvfp4, quantization_config=MODELOPT)
    before = projections(folder)
    for part in parts:
        made[linear(1, part, "weight_scale_2")] = torch.zeros(())
        made[linear(1, part, "weight_scale")].view(torch.uint8).fill_(block_scale)
        made[linear(1, part, "input_scale")] = torch.zeros(())
    rewrite(folder, made)
    names = "|".join(re.escape(linear(1, part, "weight_scale_2")) for part in parts)
    with pytest.warns(UserWarning, match=rf"{SINGLE_FILE}: tensor ({names}): its linear is read as zeros") as seen:
        after = projections(folder)
    assert len(seen) == len(parts)
    for old, new in zip(before, after, strict=True):
        dead = any(new.prefix == linear(1, part, "") for part in parts)
        assert torch.equal(new.value, torch.zeros_like(old.value) if dead else old.value)
    with pytest.warns(UserWarning, match="read as zeros"), ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
        assert layer(torch.randn(8, 256).bfloat16()).isfinite().all()
    alive = [e for e in range(3) if e != 1 or "down_proj" not in parts]
    largest = max(made[linear(e, "down_proj", "input_scale")] for e in alive)
    assert layer.config.intermediate_gsf == (torch.ones(()) / largest).item()


def test_block_scales_that_are_all_zero(folder: Path) -> None:
    """Their linear is 0 whatever its second-level scale; one block of zeros needs no warning."""
    made = quantize_experts(folder, modelopt_nvfp4, quantization_config=MODELOPT)
    name = linear(1, "up_proj", "weight_scale")
    made[name].view(torch.uint8)[...] = 0
    made[linear(2, "up_proj", "weight_scale")].view(torch.uint8)[0] = 0
    rewrite(folder, made)
    with pytest.warns(
        UserWarning, match=rf"{SINGLE_FILE}: tensor {re.escape(name)}: its linear is read as zeros"
    ) as seen:
        values = projections(folder)
    assert len(seen) == 1
    for one in values:
        assert (one.prefix == linear(1, "up_proj", "")) == bool((one.value == 0).all())


def test_what_compressed_tensors_writes_of_zeros_is_read_as_zeros(folder: Path) -> None:
    """Its scale for them is 1; an infinite one, as other writers have it, means the same."""
    pytest.importorskip("compressed_tensors")
    zeros = {name: tensor * 0 if ".experts.1." in name else tensor for name, tensor in load_all(folder).items()}
    rewrite(folder, zeros)
    library = LibraryScheme("NVFP4A16", "Linear")
    made = quantize_experts(folder, library.compress, quantization_config=compressed_config(library.group))
    for values in (projections(folder), None):
        if values is None:
            name = linear(1, "up_proj", "weight_global_scale")
            rewrite(folder, made | {name: torch.tensor([float("inf")])})
            with pytest.warns(UserWarning, match=f"tensor {name}: its linear is read as zeros"):
                values = projections(folder)
        for one in values:
            assert (".experts.1." in one.prefix) == (one.value == 0).all()


CASES: list[tuple[StoredExperts, tuple[str | None, str | None], tuple[str, str]]] = [
    (StoredExperts(PLAIN, "bf16"), (None, None), ("bf16", "bf16")),
    (StoredExperts(PLAIN, "bf16"), ("nvfp4", None), ("nvfp4", "nvfp4")),
    (StoredExperts(PLAIN, "bf16"), (None, "nvfp4"), ("bf16", "nvfp4")),
    (StoredExperts(PLAIN, "bf16"), (None, "mxfp8"), ("mxfp8", "mxfp8")),
    (StoredExperts(MODELOPT_NVFP4, "nvfp4"), (None, None), ("nvfp4", "nvfp4")),
    (StoredExperts(MODELOPT_NVFP4, "nvfp4"), ("bf16", None), ("bf16", "nvfp4")),
    (StoredExperts(COMPRESSED_NVFP4, "bf16"), (None, None), ("bf16", "nvfp4")),
    (StoredExperts(COMPRESSED_NVFP4, "bf16"), ("nvfp4", None), ("nvfp4", "nvfp4")),
    (StoredExperts(COMPRESSED_MXFP8, "bf16"), (None, None), ("bf16", "bf16")),
    (StoredExperts(COMPRESSED_MXFP8, "mxfp8"), (None, "mxfp4"), ("mxfp8", "mxfp4")),
    (StoredExperts(COMPRESSED_MXFP4, "bf16"), (None, None), ("bf16", "mxfp4")),
    (StoredExperts(COMPRESSED_MXFP4, "bf16"), ("mxfp8", None), ("mxfp8", "mxfp4")),
    (StoredExperts(GPT_OSS_MXFP4, "bf16"), ("mxfp8", None), ("mxfp8", "mxfp4")),
    (StoredExperts(GPT_OSS_MXFP4, "bf16"), ("nvfp4", None), ("nvfp4", "nvfp4")),
    (StoredExperts(FP8_BLOCKS, "fp8_block"), (None, "nvfp4"), ("fp8_block", "nvfp4")),
    (StoredExperts(FP8_BLOCKS, "fp8_block"), ("bf16", None), ("bf16", "bf16")),
    (StoredExperts(FP8_BLOCKS, "fp8_block"), (None, "mxfp4"), ("fp8_block", "mxfp4")),
    (StoredExperts(FP8_BLOCKS, "fp8_block"), ("mxfp8", "nvfp4"), ("mxfp8", "nvfp4")),
]


@pytest.mark.parametrize(("stored", "asked", "want"), CASES)
def test_formats_are_those_of_the_checkpoint_unless_asked_otherwise(
    stored: StoredExperts, asked: tuple[str | None, str | None], want: tuple[str, str]
) -> None:
    assert choose_formats(stored, *asked) == want


@pytest.mark.parametrize("argument", ["token_format", "weight_format"])
@pytest.mark.parametrize("bad", [["nvfp4"], "nvfp3", 4])
def test_what_is_no_format_is_named(argument: str, bad: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"{argument}: expected one of \['bf16', .*got {re.escape(repr(bad))}"):
        layer_config_of(folder, max_tokens_per_rank=1, **{argument: bad})


ONE_NAN = torch.zeros(256, 8)
ONE_NAN[255, 7] = torch.nan


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        ("weight", torch.zeros(256, 64, dtype=torch.int8), "expected U8, got I8"),
        ("weight", torch.zeros(256, 128, dtype=torch.uint8), r"expected shape \[256, 64\], got"),
        ("weight", None, "is missing"),
        ("weight_scale", None, "is missing"),
        ("weight_scale", torch.zeros(256, 4).to(torch.float8_e4m3fn), r"expected shape \[256, 8\]"),
        ("weight_scale", ONE_NAN.to(torch.float8_e4m3fn), r"expected finite scales, got one that is not at \[255, 7\]"),
        ("weight_scale_2", None, "is missing"),
        ("weight_scale_2", torch.tensor(float("nan")), "expected a positive number, got nan"),
        ("weight_scale_2", torch.ones(2), r"expected shape \[\], got \[2\]"),
        ("weight_scale_2", torch.ones((), dtype=torch.float64), "expected F32, got F64"),
    ],
)
def test_bad_quantized_tensors_are_named(suffix: str, tensor: torch.Tensor | None, message: str, folder: Path) -> None:
    quantize_experts(folder, modelopt_nvfp4, quantization_config=MODELOPT)
    name = linear(2, "down_proj", suffix)
    file = change_tensor(folder, name, tensor)
    with pytest.raises(ValueError, match=rf"{file}: tensor {name}:? {message}"):
        read(folder)


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj"])
@pytest.mark.parametrize(("suffix", "dtypes"), [("weight", "U8, got I8"), ("weight_scale", "F8_E4M3, got I8")])
def test_both_linears_of_a_product_are_checked(projection: str, suffix: str, dtypes: str, folder: Path) -> None:
    """Bytes of another type, and rows that are missing, are not taken for what they are not."""
    quantize_experts(folder, modelopt_nvfp4, quantization_config=MODELOPT)
    name = linear(2, projection, suffix)
    tensor = load_file(folder / SINGLE_FILE)[name]
    for bad, message in ((tensor.view(torch.int8), f"expected {dtypes}"), (tensor[:-1].clone(), "expected shape")):
        change_tensor(folder, name, bad)
        with pytest.raises(ValueError, match=rf"tensor {name}:? {message}"):
            read(folder)


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x7E, 0xFE, 0x80])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
def test_every_nan_of_block_scales_is_found_and_nothing_else(code: int, dtype: torch.dtype, tmp_path: Path) -> None:
    scales = torch.full((3, 5), 0x30, dtype=torch.uint8)
    scales[1, 2] = code
    save_file({"x": scales}, tmp_path / SINGLE_FILE)
    # Bytes without a type of their own are e8m0.
    seen = scales.view(torch.float8_e8m0fnu if dtype == torch.uint8 else dtype).float()
    with TensorFiles(tmp_path) as files:
        if seen.isnan().any():
            with pytest.raises(ValueError, match=r"tensor x: expected finite scales, got one that is not at \[1, 2\]"):
                check_no_nan(files, "x", scales.view(dtype))
        else:
            check_no_nan(files, "x", scales.view(dtype))


@pytest.mark.parametrize("fmt", ["nvfp4", "bf16"])
def test_weights_that_stay_as_they_are_are_read_into_their_place(fmt: str, folder: Path) -> None:
    """One copy of the quants: what is read is the layer's memory, and where it is converted, it is not."""
    if fmt == "nvfp4":
        quantize_experts(folder, modelopt_nvfp4, quantization_config=MODELOPT)
    cpu = torch.device("cpu")
    with Checkpoint(folder) as checkpoint:
        config = checkpoint.layer_config(0, max_tokens_per_rank=1)
        buffers = checkpoint.quant_buffers(0, fmt, 3, cpu)
        gate_up, down = load_experts(checkpoint.experts(0, range(3), buffers), config, 3, cpu, buffers)
        fresh = load_experts(checkpoint.experts(0, range(3)), config, 3, cpu)
        for buffer, got, want in zip(buffers, (gate_up, down), fresh, strict=True):
            assert isinstance(buffer, QuantBuffer) and buffer.tensor is not None
            assert got.quants.data_ptr() == buffer.tensor.data_ptr() != want.quants.data_ptr()
            assert_same_bits(got.quants, want.quants)
            assert_same_bits(got.dequantize(), want.dequantize())
        assert checkpoint.quant_buffers(0, "mxfp8", 3, cpu) == FRESH
        assert checkpoint.quant_buffers(0, fmt, 3, torch.device("cuda")) == FRESH


@pytest.mark.parametrize("wide", [[1], [2], [0, 2]])
def test_experts_of_which_some_are_fp32(wide: list[int], folder: Path) -> None:
    """What has another dtype than the first expert that is read does not get a slice of the buffer of that one's."""
    originals = load_all(folder)
    names = [f".experts.{expert}." for expert in wide]
    rewrite(folder, {k: w.float() if any(name in k for name in names) else w for k, w in originals.items()})
    cpu, ids = torch.device("cpu"), (2, 0, 1)
    with Checkpoint(folder) as checkpoint:
        config = checkpoint.layer_config(0, max_tokens_per_rank=1)
        buffers = (QuantBuffer(3), QuantBuffer(3))
        gate_ups, downs = load_experts(checkpoint.experts(0, ids, buffers), config, 3, cpu, buffers)
    for expert, gate_up, down in zip(ids, gate_ups.quants, downs.quants, strict=True):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        gate, up = (originals[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up"))
        assert_same_bits(gate_up, torch.cat([gate, up]))
        assert_same_bits(down, originals[f"{prefix}.down_proj.weight"])
