"""Layouts that people publish and no format has: their values, as compressed-tensors or the definition has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.dequantize import stack_rows, times_columns
from moe_runtime.checkpoints.files import SINGLE_FILE
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from tests.support.checkpoint_writers import (
    FP8,
    LibraryScheme,
    Quantizer,
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
    stack_experts,
)
from tests.support.comparison import assert_same_bits

CONFIG = MoELayerConfig(hidden_size=256, intermediate_size=128, num_experts=3, top_k=2, max_tokens_per_rank=8)
PARTS = ("gate_proj", "up_proj", "down_proj")
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed)
    return tmp_path


def prefix_of(expert: int, part: str) -> str:
    return f"model.layers.0.mlp.experts.{expert}.{part}."


def values(folder: Path) -> dict[str, torch.Tensor]:
    """fp32 of every linear of the experts, as it is read."""
    with Checkpoint(folder) as checkpoint:
        experts = list(checkpoint.experts(0, range(3)))
    found = {}
    for number, expert in enumerate(experts):
        for part, w in zip(PARTS, (*dense(expert.gate_up).chunk(2), dense(expert.down)), strict=True):
            found[prefix_of(number, part)] = w.float()
    return found


def held(folder: Path, seed: int, exact: dict[str, torch.Tensor], formats: tuple[str, str], **asked: str) -> MoELayer:
    """A layer in the formats that are chosen, within its bound of a float64 product of the weights `exact`."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=128, **asked)
        assert (layer.config.token_format, layer.config.weight_format) == formats
        assert layer.router is not None
        gate_up, down = (
            torch.stack([torch.cat([exact[prefix_of(e, part)].double() for part in parts]) for e in range(3)])
            for parts in (PARTS[:2], PARTS[2:])
        )
        error, _ = relative_error(layer(x), moe_reference(x, *layer.router(x), gate_up, down))
    # bf16 tokens read weights that are rounded to bf16; others those of the checkpoint.
    assert error <= error_bound(formats[0], "bf16")
    return layer


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"]}


def per_tensor(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """ModelOpt's FP8: one scale, `amax / 448`."""
    scale = (w.abs().max() / 448).float()
    return {"weight": (w / scale).to(E4M3), "weight_scale": scale, "input_scale": torch.tensor(0.01)}


def per_tensor_inv(w: torch.Tensor) -> dict[str, torch.Tensor]:
    made = per_tensor(w)
    return {
        "weight": made["weight"],
        "weight_scale_inv": made["weight_scale"].view(1),
        "activation_scale": torch.ones(1),
    }


def per_row(w: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = (w.abs().amax(1) / 448).float()
    return {"weight": (w / scales[:, None]).to(E4M3), "weight_scale": scales}


def blocks_4d(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """ModelOpt's FP8_PB_WO keeps the dimensions within each block."""
    made = fp8_blocks(w)
    return {"weight": made["weight"], "weight_scale": made["weight_scale_inv"][:, None, :, None]}


def blocks_64(w: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = w.unflatten(0, (-1, 64)).unflatten(2, (-1, 32))
    scales = (blocks.abs().amax((1, 3)) / 448).float()
    quants = blocks / scales[:, None, :, None]
    return {"weight": quants.flatten(2).flatten(0, 1).to(E4M3), "weight_scale_inv": scales}


def half_scales(w: torch.Tensor) -> dict[str, torch.Tensor]:
    made = fp8_blocks(w)
    return {"weight": made["weight"], "weight_scale_inv": made["weight_scale_inv"].half()}


def mxfp8(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """The definition of MX: one power of two for 32 values of a row."""
    blocks = w.double().unflatten(1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(2))) - 8
    quants = (blocks / torch.exp2(exponents)[..., None]).clamp(-448, 448).flatten(1).float().to(E4M3)
    return {"weight": quants, "weight_scale": (exponents + 127).to(torch.uint8)}


AWQ = {"group_size": 16, "has_zero_point": False, "pre_quant_scale": True}


def nvfp4_awq(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """NVFP4 of columns divided by a factor each, which the inputs get; down projections may lack one."""
    if w.shape[1] == 128:
        return modelopt_nvfp4(w)
    factors = torch.exp2(torch.linspace(-3, 3, w.shape[1])).bfloat16()
    return modelopt_nvfp4(w / factors.float()) | {"pre_quant_scale": factors}


def _packed(values_AB: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Nibbles `[A, B]` as int32 `[A, B / 8]`; nibble `i` of each holds entry `order[i]` of eight."""
    words = np.zeros((values_AB.shape[0], values_AB.shape[1] // 8), dtype=np.uint32)
    for place, entry in enumerate(order):
        words |= values_AB[:, entry::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32).copy())


def _quantized_in_groups(w: torch.Tensor, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers of 0 to 15 `[N, K]`, zero points `[N, K / group]` of 1 to 15 and FP16 scales of as many."""
    x = w.double().numpy().reshape(len(w), -1, group)
    low, high = np.minimum(x.min(2), 0), np.maximum(x.max(2), 0)
    scales = ((high - low) / 14).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 1, 15)
    q = np.clip(np.round(x / scales[:, :, None].astype(np.float64)) + zeros[:, :, None], 0, 15)
    return q.reshape(w.shape), zeros, scales


def gptq(w: torch.Tensor, *, stored_less: int = 1, act_order: bool = False) -> dict[str, torch.Tensor]:
    """AutoGPTQ's layout: zero points less 1, except in `gptq_v2`; with `act_order` columns have groups of their own."""
    q_NK, zeros_NV, scales_NV = _quantized_in_groups(w, 64)
    groups = np.arange(w.shape[1]) // 64
    if act_order:
        mixed = np.random.default_rng(0).permutation(w.shape[1])
        q_NK, groups = q_NK[:, mixed], groups[mixed]
    return {
        "qweight": _packed(q_NK).T.contiguous(),
        "qzeros": _packed(zeros_NV.T - stored_less),
        "scales": torch.from_numpy(scales_NV.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def gptq_v2(w: torch.Tensor) -> dict[str, torch.Tensor]:
    return gptq(w, stored_less=0)


def gptq_act_order(w: torch.Tensor) -> dict[str, torch.Tensor]:
    return gptq(w, act_order=True)


def awq(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """AutoAWQ's layout: both along rows, in an order of its own."""
    q_NK, zeros_NV, scales_NV = _quantized_in_groups(w, 32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _packed(q_NK.T, order),
        "qzeros": _packed(zeros_NV.T, order),
        "scales": torch.from_numpy(scales_NV.T.copy()),
    }


def _nibble(words: torch.Tensor, place: int) -> np.ndarray:
    return (words.numpy().view(np.uint32) >> np.uint32(4 * place) & 15).astype(np.float64)


def _product_of_ints(parts: dict[str, torch.Tensor], zero_offset: int) -> np.ndarray:
    """float64 of GPTQ's or AWQ's integers, one row or column after the other."""
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"].double().numpy()
    rows, places = scales.shape[1], (0, 4, 1, 5, 2, 6, 3, 7)
    if "g_idx" in parts:
        q_NK = np.stack([_nibble(words[k // 8], k % 8) for k in range(8 * len(words))], 1)
        zeros_NV = np.stack([_nibble(zeros[:, n // 8], n % 8) for n in range(rows)]) + zero_offset
        groups = parts["g_idx"].numpy()
    else:
        q_NK = np.stack([_nibble(words[:, n // 8], places[n % 8]) for n in range(rows)])
        zeros_NV = np.stack([_nibble(zeros[:, n // 8], places[n % 8]) for n in range(rows)])
        groups = np.arange(len(words)) // 32
    return (q_NK - zeros_NV[:, groups]) * scales.T[:, groups]


def product(parts: dict[str, torch.Tensor], zero_offset: int = 1) -> np.ndarray:
    """float64 of quants times scales, by the shape of the scales."""
    if "qweight" in parts:
        return _product_of_ints(parts, zero_offset)
    if "weight_scale_2" in parts:
        return read_nvfp4(parts) * parts.get("pre_quant_scale", torch.ones(1)).double().numpy()
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    assert scale is not None
    rows, columns = parts["weight"].shape
    factors = np.exp2(scale.double().numpy() - 127) if scale.dtype == torch.uint8 else scale.double().numpy()
    if factors.ndim == 4:
        factors = factors[:, 0, :, 0]
    factors = factors.reshape(factors.shape[0] if factors.ndim else 1, -1)
    high, wide = -(-rows // factors.shape[0]), -(-columns // factors.shape[1])
    return parts["weight"].double().numpy() * factors.repeat(high, 0)[:rows].repeat(wide, 1)[:, :columns]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "dynamic": {"-:.*gate$": {}}}
AUTOAWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

LAYOUTS: dict[str, tuple[Quantizer, dict[str, Any], tuple[str, str]]] = {
    "modelopt FP8": (per_tensor, modelopt("FP8"), ("fp8_block", "fp8_block")),
    "modelopt FP8_PER_CHANNEL_PER_TOKEN": (per_row, modelopt("FP8_PER_CHANNEL_PER_TOKEN"), ("bf16", "bf16")),
    "modelopt FP8_PB_WO": (blocks_4d, modelopt("fp8_pb_wo"), ("bf16", "bf16")),
    "modelopt MXFP8": (mxfp8, modelopt("MXFP8") | {"group_size": 32}, ("mxfp8", "mxfp8")),
    "fp8, dynamic, per tensor": (per_tensor, FP8 | {"weight_block_size": None}, ("fp8_block", "fp8_block")),
    "fp8, static, per tensor": (
        per_tensor_inv,
        {"quant_method": "fp8", "activation_scheme": "static"},
        ("fp8_block", "fp8_block"),
    ),
    "modelopt NVFP4_AWQ": (nvfp4_awq, modelopt("NVFP4_AWQ") | AWQ, ("bf16", "bf16")),
    "gptq": (gptq, GPTQ, ("bf16", "bf16")),
    "gptq, act order": (gptq_act_order, GPTQ | {"desc_act": True}, ("bf16", "bf16")),
    "gptq_v2": (gptq_v2, GPTQ | {"checkpoint_format": "gptq_v2"}, ("bf16", "bf16")),
    "awq": (awq, AUTOAWQ, ("bf16", "bf16")),
    "fp8 64x32": (blocks_64, FP8 | {"weight_block_size": [64, 32]}, ("bf16", "bf16")),
    "fp8 with FP16 scales": (half_scales, FP8, ("fp8_block", "fp8_block")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_by_their_definition(name: str, folder: Path, seed: int) -> None:
    """Every value is the product of quant and scale, rounded to fp32 at most, in a format that holds it if one does."""
    quantizer, said, formats = LAYOUTS[name]
    tensors = quantize_experts(folder, quantizer, quantization_config=said)
    exact = {}
    for prefix, got in values(folder).items():
        parts = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        want = product(parts, zero_offset=0 if name == "gptq_v2" else 1)
        if "weight_scale_2" in parts:
            # Three factors, rounded after each.
            np.testing.assert_allclose(got.numpy(), want, rtol=2.0**-22)
        else:
            np.testing.assert_array_equal(got.numpy(), want.astype(np.float32))
        exact[prefix] = torch.from_numpy(want)
    layer = held(folder, seed, exact, formats)
    assert layer.experts is not None
    if formats[1] != "bf16":
        for expert in range(3):
            want_quants = [tensors[f"{prefix_of(expert, part)}weight"] for part in PARTS]
            assert_same_bits(layer.experts.gate_up.quants[expert], torch.cat(want_quants[:2]))
            assert_same_bits(layer.experts.down.quants[expert], want_quants[2])
    held(folder, seed, exact, ("bf16", "bf16"), token_format="bf16")
    assert layer_config_of(folder, max_tokens_per_rank=1, weight_format="auto", token_format="auto") == layer_config_of(
        folder, max_tokens_per_rank=1
    )


@pytest.mark.parametrize("order", [*GateUpOrder, None])
def test_factors_of_columns_are_those_of_each_linear(order: GateUpOrder | None, seed: int) -> None:
    parts, rng = (1 if order is None else 2), torch.Generator().manual_seed(seed)
    w_PNK, factors = torch.randn(parts, 5, 7, generator=rng), torch.rand(parts, 7, generator=rng)
    got = times_columns(stack_rows(w_PNK, order), factors, order)
    assert_same_bits(got, stack_rows(w_PNK * factors[:, None], order))


MODELOPT_CONFIGS = {
    "FP8_DEFAULT_CFG": ("fp8_block", "fp8_block"),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": ("bf16", "bf16"),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": ("bf16", "bf16"),
    "MXFP8_DEFAULT_CFG": ("mxfp8", "mxfp8"),
}


@pytest.mark.parametrize("name", MODELOPT_CONFIGS)
def test_what_modelopt_exports_is_read(name: str, tmp_path: Path, seed: int) -> None:
    """Where it is installed: a model that it quantizes and exports."""
    transformers = pytest.importorskip("transformers")
    quantization = pytest.importorskip("modelopt.torch.quantization")
    export = pytest.importorskip("modelopt.torch.export")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 2}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(num_hidden_layers=1, vocab_size=96, norm_topk_prob=True, **sizes, **attention)
    config.architectures = ["Qwen3MoeForCausalLM"]
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    stacks = model.model.layers[0].mlp.experts
    plain = [torch.cat([stacks.gate_up_proj[e], stacks.down_proj[e].T]).float() for e in range(3)]
    ids = torch.arange(96).view(4, 24)
    quantization.quantize(model, getattr(quantization, name), lambda quantized: quantized(ids))
    export.export_hf_checkpoint(model, export_dir=str(tmp_path))
    tensors, exact = load_all(tmp_path), {}
    for prefix, got in values(tmp_path).items():
        parts = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        exact[prefix] = torch.from_numpy(product(parts))
        np.testing.assert_array_equal(got.numpy(), exact[prefix].numpy().astype(np.float32))
    for expert in range(3):
        gate, up, down = (exact[prefix_of(expert, part)] for part in PARTS)
        assert relative_error(torch.cat([gate, up, down.T]), plain[expert].double())[0] < 2.0**-4
    held(tmp_path, seed, exact, MODELOPT_CONFIGS[name])


LIBRARY: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "FP8_DYNAMIC": ({}, ("bf16", "bf16")),
    "FP8": ({}, ("fp8_block", "fp8_block")),
    "FP8_BLOCK": ({"block_structure": [64, 64]}, ("bf16", "bf16")),
    "W4A16": ({}, ("bf16", "bf16")),
    "W4A16, 32": ({"group_size": 32}, ("bf16", "bf16")),
    "W4A16, channel": ({"group_size": None, "strategy": "channel"}, ("bf16", "bf16")),
    "W4A16, channel, asymmetric": ({"group_size": None, "strategy": "channel", "symmetric": False}, ("bf16", "bf16")),
    "W4A16_ASYM": ({}, ("bf16", "bf16")),
    "W4A16_ASYM, 32": ({"group_size": 32}, ("bf16", "bf16")),
    "W4A8": ({}, ("bf16", "bf16")),
    "W4AFP8": ({}, ("bf16", "bf16")),
    "W2A16": ({}, ("bf16", "bf16")),
    "W8A16": ({}, ("bf16", "bf16")),
    "W8A16, asymmetric": ({"symmetric": False, "group_size": 64}, ("bf16", "bf16")),
    "W8A8": ({}, ("bf16", "bf16")),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_compressed_tensors_value_for_value(name: str, folder: Path, seed: int) -> None:
    """Written by the library's own compressors from its own scales, and held to its own decompressors."""
    pytest.importorskip("compressed_tensors")
    changes, formats = LIBRARY[name]
    library = LibraryScheme(name.partition(",")[0], "Linear", **changes)
    tensors = quantize_experts(folder, library.compress, quantization_config=compressed_config(library.group))
    suffixes = {key.rpartition(".")[2] for key in tensors}
    assert ("weight_packed" in suffixes) == (name.startswith("W") and name != "W8A8")
    assert ("weight_zero_point" in suffixes) == ("asym" in name.lower())
    exact = {}
    for prefix, got in values(folder).items():
        exact[prefix] = library.decompress(prefix, tensors)
        assert_same_bits(got, exact[prefix])
    held(folder, seed, exact, formats)


def test_a_nested_config_may_say_it(folder: Path) -> None:
    """As Kimi-K2.5 does: int4 in groups of 32, described within `text_config`, under a prefix."""
    pytest.importorskip("compressed_tensors")
    library = LibraryScheme("W4A16", r"re:.*experts.*", group_size=32)
    tensors = quantize_experts(folder, library.compress)
    want = values_of_library(library, tensors)
    config = json.loads((folder / "config.json").read_text())
    said = config | {"quantization_config": compressed_config(library.group)}
    renamed = {key.replace("model.", "language_model.model.", 1): tensor for key, tensor in tensors.items()}
    rewrite(folder, renamed)
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": said}))
    for prefix, got in values(folder).items():
        assert_same_bits(got, want[prefix])
    said["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 3
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": said}))
    message = (
        r"config\.json: text_config\.quantization_config\.config_groups\.group_0\.weights\.num_bits of lang.*got 3"
    )
    with pytest.raises(ValueError, match=message):
        values(folder)


def values_of_library(library: LibraryScheme, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefixes = [prefix_of(expert, part) for expert in range(3) for part in PARTS]
    return {prefix: library.decompress(prefix, tensors) for prefix in prefixes}


STACKS = {
    "model.layers.0.mlp.experts.gate_up_proj": PARTS[:2],
    "model.layers.0.mlp.experts.down_proj": PARTS[2:],
}
"""Tensors of all experts, and the linears that each holds."""


def fused(folder: Path, quantizer: Quantizer, *, apart: bool = False) -> dict[str, torch.Tensor]:
    """Experts as transformers has FP8 in memory: gate and up are quantized together, or each `apart`."""
    tensors = load_all(folder)
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for stack, parts in STACKS.items():
        quants, scales = [], []
        for expert in range(3):
            linears = [tensors[f"{prefix_of(expert, part)}weight"].float() for part in parts]
            quantized = [quantizer(w) for w in (linears if apart else [torch.cat(linears)])]
            quants.append(torch.cat([one["weight"] for one in quantized]))
            of_linears = [one.get("weight_scale", one.get("weight_scale_inv")) for one in quantized]
            scales.append(torch.cat([torch.atleast_2d(scale) for scale in of_linears]))
        made |= {stack: torch.stack(quants), f"{stack}_scale_inv": torch.stack(scales)}
    return made


def stacked_values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float64 of each linear of what `fused` makes of whole blocks."""
    found = {}
    for stack, parts in STACKS.items():
        for expert in range(3):
            pair = {"weight": tensors[stack][expert], "weight_scale": tensors[f"{stack}_scale_inv"][expert]}
            for part, value in zip(parts, torch.from_numpy(product(pair)).chunk(len(parts)), strict=True):
                found[prefix_of(expert, part)] = value
    return found


def turned(stack: torch.Tensor) -> torch.Tensor:
    """`[E, N, K]` as `[E, K, N]`."""
    return stack.view(torch.uint8).mT.contiguous().view(E4M3) if stack.dtype is E4M3 else stack.mT.contiguous()


@pytest.mark.parametrize(
    ("quantizer", "size", "formats"),
    [
        (fp8_blocks, [128, 128], ("fp8_block", "fp8_block")),
        (blocks_64, [64, 32], ("bf16", "bf16")),
        (per_tensor, None, ("fp8_block", "fp8_block")),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_fp8_experts(
    quantizer: Quantizer, size: list[int] | None, formats: tuple[str, str], transposed: bool, folder: Path, seed: int
) -> None:
    """Also transposed with their scales, as FP8 of Qwen3-VL-MoE is published."""
    tensors = fused(folder, quantizer, apart=size is None)
    written = {
        name: turned(tensor) if transposed and ".experts." in name else tensor for name, tensor in tensors.items()
    }
    rewrite(folder, written, quantization_config=FP8 | {"weight_block_size": size})
    exact = stacked_values(tensors)
    for prefix, got in values(folder).items():
        assert_same_bits(got, exact[prefix].float())
    held(folder, seed, exact, formats)
    check_converted(folder, folder / "converted", "mxfp4")


@pytest.mark.parametrize("quantizer", [fp8_blocks, blocks_64, per_tensor])
def test_fp8_experts_whose_scales_alone_are_stacked(quantizer: Quantizer, folder: Path, seed: int) -> None:
    """As transformers saves what it has quantized to FP8 itself: quants as the model has them, scales as in memory."""
    size = None if quantizer is per_tensor else [128, 128] if quantizer is fp8_blocks else [64, 32]
    tensors = fused(folder, quantizer, apart=size is None)
    exact = stacked_values(tensors)
    written = {name: tensor for name, tensor in tensors.items() if name not in STACKS}
    for stack, parts in STACKS.items():
        for expert in range(3):
            halves = tensors[stack][expert].view(torch.uint8).chunk(len(parts))
            for part, half in zip(parts, halves, strict=True):
                written[f"{prefix_of(expert, part)}weight"] = half.view(E4M3)
    rewrite(folder, written, quantization_config=FP8 | {"weight_block_size": size})
    for prefix, got in values(folder).items():
        assert_same_bits(got, exact[prefix].float())
    held(folder, seed, exact, ("bf16", "bf16") if quantizer is blocks_64 else ("fp8_block", "fp8_block"))
    check_converted(folder, folder / "converted", "mxfp4")
    name = "model.layers.0.mlp.experts.down_proj_scale_inv"
    change_tensor(folder, name, torch.full_like(written[name], torch.nan))
    with pytest.raises(ValueError, match=rf"tensor {re.escape(name)}: expected finite scales"):
        values(folder)


def test_stacked_scales_of_blocks_that_could_be_of_gate_and_up_are_named(folder: Path) -> None:
    write_qwen3_moe_checkpoint(folder, CONFIG.replace(intermediate_size=192), seed=0)
    tensors = quantize_experts(folder, fp8_blocks, quantization_config=FP8)
    written = {name: tensor for name, tensor in tensors.items() if "weight_scale_inv" not in name}
    for name, shape in (("gate_up_proj", (3, 3, 2)), ("down_proj", (3, 2, 2))):
        written[f"model.layers.0.mlp.experts.{name}_scale_inv"] = torch.ones(shape)
    rewrite(folder, written)
    message = r"gate_up_proj_scale_inv: expected experts of a multiple of 128 rows, got 192"
    with pytest.raises(ValueError, match=message):
        values(folder)


@pytest.mark.parametrize("inner", [128, 176])
def test_fused_fp8_experts_of_one_scale(inner: int, folder: Path, seed: int) -> None:
    """As Mistral Small 4 has them: gate and up share a scale in bf16; static ones of inputs are not used."""
    write_qwen3_moe_checkpoint(folder, CONFIG.replace(intermediate_size=inner), seed=seed)
    tensors, exact = load_all(folder), {}
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for stack_name, parts in STACKS.items():
        stacks = [torch.stack([tensors[f"{prefix_of(e, part)}weight"].float() for e in range(3)]) for part in parts]
        scales = torch.cat(stacks, 1).abs().amax((1, 2), keepdim=True).div(448).bfloat16()
        quants = [(stack / scales.float()).clamp(-448, 448).to(E4M3) for stack in stacks]
        for part, quant in zip(parts, quants, strict=True):
            for expert in range(3):
                exact[prefix_of(expert, part)] = quant[expert].double() * scales[expert].double()
        made |= {stack_name: torch.cat([q.view(torch.uint8) for q in quants], 1).view(E4M3)}
        made |= {f"{stack_name}_scale_inv": scales, f"{stack_name}_activation_scale": torch.rand(3).bfloat16()}
    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    rewrite(folder, made, quantization_config=said)
    for prefix, got in values(folder).items():
        assert_same_bits(got, exact[prefix].float())
    held(folder, seed, exact, ("fp8_block", "fp8_block"))
    convert_checkpoint(folder, folder / "converted", "nvfp4")
    assert not any(name.endswith(("_scale_inv", "_activation_scale")) for name in load_all(folder / "converted"))


def check_converted(folder: Path, target: Path, fmt: str) -> None:
    """Fused experts become linears of their own, each weight rounded once more."""
    before = values(folder)
    convert_checkpoint(folder, target, fmt)
    assert {name.removeprefix(prefix_of(0, "up_proj")) for name in load_all(target) if "0.up_proj" in name} == {
        "weight_packed",
        "weight_scale",
    }
    check_quantized(target, before, fmt)


def check_quantized(folder: Path, before: dict[str, torch.Tensor], fmt: str) -> None:
    """What is read is the weights `before`, quantized once more."""
    for prefix, got in values(folder).items():
        assert_same_bits(got, ExpertWeights.quantize(before[prefix][None], fmt).dequantize()[0])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("inner", [176, 48, 136])
def test_one_scale_is_that_of_every_block_of_any_size(inner: int, stacked: bool, folder: Path, seed: int) -> None:
    """Also of short blocks. Sizes that `fp8_block` does not take are dequantized."""
    write_qwen3_moe_checkpoint(folder, CONFIG.replace(intermediate_size=inner), seed=seed)
    exact = {prefix: torch.from_numpy(product(per_tensor(w.float()))) for prefix, w in values(folder).items()}
    if stacked:
        rewrite(folder, fused(folder, per_tensor, apart=True), quantization_config=FP8 | {"weight_block_size": None})
    else:
        quantize_experts(folder, per_tensor, quantization_config=modelopt("FP8"))
    formats = ("bf16", "bf16") if inner % 16 else ("fp8_block", "fp8_block")
    with pytest.warns(UserWarning, match="needs a positive multiple of 16") if inner % 16 else nullcontext():
        held(folder, seed, exact, formats)
    for prefix, got in values(folder).items():
        assert_same_bits(got, exact[prefix].float())


@pytest.mark.parametrize("transposed", [False, True])
def test_plain_fused_experts_are_converted(transposed: bool, folder: Path) -> None:
    stack_experts(folder, transposed=transposed)
    check_converted(folder, folder / "converted", "mxfp4")


@pytest.mark.parametrize("together", [False, True])
def test_stacked_experts_of_short_blocks(together: bool, folder: Path, seed: int) -> None:
    """Gate and up of 176 rows have 2 rows of scales each, or 3 in all where blocks run on: the files say which."""
    write_qwen3_moe_checkpoint(folder, CONFIG.replace(intermediate_size=176), seed=seed)
    tensors, exact = fused(folder, fp8_blocks, apart=not together), {}
    for stack, parts in STACKS.items():
        for expert in range(3):
            pieces = 1 if together else len(parts)
            quants = tensors[stack][expert].unflatten(0, (pieces, -1))
            scales = tensors[f"{stack}_scale_inv"][expert].unflatten(0, (pieces, -1))
            whole = np.concatenate([read_fp8_blocks(*pair) for pair in zip(quants, scales, strict=True)])
            for part, want in zip(parts, np.split(whole, len(parts)), strict=True):
                exact[prefix_of(expert, part)] = torch.from_numpy(want)
    assert tensors["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape[1] == (3 if together else 4)
    rewrite(folder, tensors, quantization_config=FP8)
    for prefix, got in values(folder).items():
        assert_same_bits(got, exact[prefix].float())
    with Checkpoint(folder) as checkpoint:
        (expert,) = checkpoint.experts(0, [1])
        assert isinstance(expert.gate_up, ExpertWeights) and isinstance(expert.down, ExpertWeights)
        assert (expert.gate_up.gate_up is None) == together, "bits are kept where gate and up have scales each"
    if together:
        held(folder, seed, exact, ("bf16", "bf16"), token_format="bf16")
    else:
        held(folder, seed, exact, ("fp8_block", "fp8_block"))


def test_stacked_experts_that_may_share_scales_are_named(folder: Path) -> None:
    write_qwen3_moe_checkpoint(folder, CONFIG.replace(intermediate_size=96), seed=0)
    rewrite(folder, fused(folder, fp8_blocks), quantization_config=FP8)
    with pytest.raises(
        ValueError,
        match=r"experts\.gate_up_proj: expected gate and up of a multiple of 128 rows, .*, got 96: whether",
    ):
        values(folder)


@pytest.mark.parametrize(
    ("quantizer", "said"),
    [
        (per_tensor, modelopt("FP8")),
        (per_row, modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
        (fp8_blocks, FP8),
        (blocks_4d, modelopt("FP8_PB_WO")),
    ],
)
def test_fp8_experts_whose_weights_are_all_zero(
    quantizer: Quantizer, said: dict[str, Any], folder: Path, seed: int
) -> None:
    """Scales of 0, and quants of 0 / 0, as ModelOpt writes them. A row or block of zeros needs no warning."""
    zeros = load_all(folder)
    zeros[f"{prefix_of(0, 'gate_proj')}weight"][:, :128] = 0
    zeros[f"{prefix_of(1, 'up_proj')}weight"][...] = 0
    rewrite(folder, zeros)
    tensors = quantize_experts(folder, quantizer, quantization_config=said)
    name = f"{prefix_of(1, 'up_proj')}weight"
    assert tensors[name].float().isnan().all() and (tensors[f"{name}_scale{'_inv' if said is FP8 else ''}"] == 0).all()
    with pytest.warns(UserWarning, match=rf"tensor {name}_scale.*: its linear is read as zeros") as seen:
        found = values(folder)
    assert len(seen) == 1
    for prefix, got in found.items():
        assert got.isfinite().all() and (got == 0).all() == (f"{prefix}weight" == name)
    assert (found[prefix_of(0, "gate_proj")][:, :128] == 0).all()
    with pytest.warns(UserWarning, match="read as zeros"), ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
        assert layer(torch.randn(8, 256).bfloat16()).isfinite().all()


def test_fp16_is_read_exactly(folder: Path, seed: int) -> None:
    """Router, experts and a gated shared expert; bf16 rounds it once."""
    generator = torch.Generator().manual_seed(seed)
    halves = {name: (tensor * 1.01).half() for name, tensor in load_all(folder).items()}
    for part, shape in (("gate", (64, 256)), ("up", (64, 256)), ("down", (256, 64))):
        halves[f"model.layers.0.mlp.shared_expert.{part}_proj.weight"] = torch.randn(shape, generator=generator).half()
    halves["model.layers.0.mlp.shared_expert_gate.weight"] = torch.randn((1, 256), generator=generator).half()
    rewrite(folder, halves, model_type="qwen2_moe", shared_expert_intermediate_size=64)
    for prefix, got in values(folder).items():
        assert_same_bits(got, halves[f"{prefix}weight"].float())
    with Checkpoint(folder) as checkpoint:
        shared = checkpoint.shared_expert(0)
        assert shared is not None and shared.token_gate is not None
        assert_same_bits(shared.up_proj, halves["model.layers.0.mlp.shared_expert.up_proj.weight"].float())
        assert_same_bits(shared.token_gate.float(), halves["model.layers.0.mlp.shared_expert_gate.weight"].float())
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
        assert layer.experts is not None and layer.router is not None
        assert_same_bits(layer.router.weight, halves["model.layers.0.mlp.gate.weight"].float())
        assert_same_bits(layer.experts.down.quants[0], halves[f"{prefix_of(0, 'down_proj')}weight"].float().bfloat16())
        assert layer(torch.randn(4, 256).bfloat16()).isfinite().all()


def test_a_converted_copy_means_the_same(folder: Path) -> None:
    """int4 has no kernel: converted to MXFP8 each weight is rounded once more, and no tensor of the source stays."""
    pytest.importorskip("compressed_tensors")
    library = LibraryScheme("W4A16", "Linear", group_size=32)
    tensors = quantize_experts(folder, library.compress, quantization_config=compressed_config(library.group))
    before = values(folder)
    convert_checkpoint(folder, folder / "converted", "mxfp8")
    assert not any("weight_shape" in name or "packed" in name for name in load_all(folder / "converted"))
    assert any("weight_shape" in name for name in tensors)
    check_quantized(folder / "converted", before, "mxfp8")


@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_model_with_a_nested_config_is_converted(weights: str | None, folder: Path) -> None:
    """Its own description, within `text_config`, stays if there is one, and that of the experts comes before it."""
    pytest.importorskip("compressed_tensors")
    said: dict[str, Any] = {}
    if weights is not None:
        library = LibraryScheme("W4A16", r"re:.*experts.*", group_size=32)
        quantize_experts(folder, library.compress)
        said = {"quantization_config": compressed_config(library.group)}
    config = json.loads((folder / "config.json").read_text()) | said
    rewrite(folder, {name.replace("model.", "model.language_model.", 1): t for name, t in load_all(folder).items()})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": config}))
    before = values(folder)
    convert_checkpoint(folder, folder / "converted", "mxfp8")
    written = json.loads((folder / "converted" / "config.json").read_text())
    assert written["text_config"] == config
    assert ("expert_quantization_config" in written) == (weights is not None) != ("quantization_config" in written)
    assert layer_config_of(folder / "converted", max_tokens_per_rank=1).weight_format == "mxfp8"
    check_quantized(folder / "converted", before, "mxfp8")


NAME = prefix_of(2, "down_proj")
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def int4(w: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": torch.zeros(len(w), w.shape[1] // 8, dtype=torch.int32),
        "weight_scale": torch.ones(len(w), w.shape[1] // 32).bfloat16(),
        "weight_shape": torch.tensor(w.shape),
    }


def int4_with_zero_points(w: torch.Tensor) -> dict[str, torch.Tensor]:
    return int4(w) | {"weight_zero_point": torch.zeros(len(w) // 8, w.shape[1] // 32, dtype=torch.int32)}


def of_int4(**weights: Any) -> dict[str, Any]:
    return compressed_config({"targets": ["Linear"], "format": "pack-quantized", "weights": PACKED | weights})


def group(*, format: str = "float-quantized", **weights: Any) -> dict[str, Any]:
    return compressed_config(
        {
            "targets": ["Linear"],
            "format": format,
            "weights": {"num_bits": 8, "strategy": "channel"} | weights,
        }
    )


@pytest.mark.parametrize(
    ("quantizer", "said", "part", "tensor", "message"),
    [
        (per_tensor, modelopt("FP8"), "weight_scale", torch.ones(2), r"expected shape \[1, 1\], got \[2\]"),
        (per_tensor, modelopt("FP8"), "weight_scale", torch.tensor(float("nan")), "expected finite scales, got one"),
        (per_tensor, modelopt("FP8"), "weight", torch.ones(256, 128), "expected F8_E4M3, got F32"),
        (per_row, group(), "weight_scale", torch.ones(255), r"expected shape \[256, 1\], got \[255\]"),
        (per_row, group(), "weight_scale", torch.ones(256).byte(), "expected F32 or BF16 or F16, got U8"),
        (
            blocks_4d,
            modelopt("FP8_PB_WO"),
            "weight_scale",
            torch.ones(2, 1, 2, 1),
            r"shape \[2, 1\], got \[2, 1, 2, 1\]",
        ),
        (int4, of_int4(), "weight_packed", torch.zeros(256, 32).int(), r"expected shape \[256, 16\], got \[256, 32\]"),
        (int4, of_int4(), "weight_packed", torch.zeros(256, 16).byte(), "expected I32, got U8"),
        (int4, of_int4(), "weight_scale", torch.ones(256, 2), r"expected shape \[256, 4\], got \[256, 2\]"),
        (int4, of_int4(), "weight_shape", torch.tensor([256, 64]), r"expected \[256, 128\], got \[256, 64\]"),
        (
            int4_with_zero_points,
            of_int4(symmetric=False),
            "weight_zero_point",
            torch.zeros(256, 4).int(),
            r"expected shape \[32, 4\], got \[256, 4\]",
        ),
        (gptq, GPTQ, "qweight", torch.zeros(256, 16).int(), r"expected shape \[16, 256\], got \[256, 16\]"),
        (gptq, GPTQ, "qzeros", torch.zeros(2, 64).int(), r"expected shape \[2, 32\], got \[2, 64\]"),
        (gptq, GPTQ, "g_idx", torch.full((128,), 2).int(), r"expected groups of 0 \.\. 1, got another"),
        (gptq, GPTQ, "scales", torch.full((2, 256), float("inf")), "expected finite scales"),
        (awq, AUTOAWQ, "qweight", torch.zeros(16, 256).int(), r"expected shape \[128, 32\], got \[16, 256\]"),
        (nvfp4_awq, modelopt("NVFP4_AWQ"), "pre_quant_scale", torch.ones(64), r"expected shape \[128\], got \[64\]"),
        (nvfp4_awq, modelopt("NVFP4_AWQ"), "pre_quant_scale", torch.zeros(128), "expected positive numbers"),
    ],
)
def test_bad_tensors_are_named(
    quantizer: Quantizer, said: dict[str, Any], part: str, tensor: torch.Tensor, message: str, folder: Path
) -> None:
    made = quantize_experts(folder, quantizer, quantization_config=said)
    values(folder)
    rewrite(folder, made | {f"{NAME}{part}": tensor})
    with pytest.raises(ValueError, match=rf"{folder / SINGLE_FILE}: tensor {NAME}{part}: .*{message}"):
        values(folder)


WEIGHTS = r"quantization_config\.config_groups\.group_0\.weights"
BLOCK_SIZE = r"quantization_config\.weight_block_size: expected two positive integers, got "


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (of_int4(num_bits=3), WEIGHTS + r"\.num_bits of model.*gate_proj: expected 4 or 8 or 2 .*, got 3"),
        (of_int4(type="float"), WEIGHTS + r"\.type of model.*gate_proj: expected 'int', got 'float'"),
        (of_int4(symmetric=0), WEIGHTS + r"\.symmetric of model.*gate_proj: expected True, got 0"),
        (
            group(num_bits=8, type="int", symmetric=False, format="int-quantized"),
            WEIGHTS + r"\.symmetric of model.*gate_proj: expected True, got False",
        ),
        (of_int4(group_size=-1), WEIGHTS + r"\.group_size of model.*gate_proj: expected a positive integer, got -1"),
        (of_int4(strategy="tensor"), WEIGHTS + r"\.strategy of model.*: expected 'group' or 'channel', got 'tensor'"),
        (GPTQ | {"bits": 3}, r"quantization_config\.bits: expected 2, 4 or 8, got 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"quantization_config\.checkpoint_format: .*, got 'marlin'"),
        (
            GPTQ | {"dynamic": {"lm_head": {"bits": 2}, "+:.*": {"bits": 8}}},
            r'quantization_config\.dynamic\["\+:\.\*"\]\.bits of model.*gate_proj: expected 4, got 8',
        ),
        (
            GPTQ | {"dynamic": {r".*\.experts\.0\.down_proj$": {"group_size": 32}}},
            r"quantization_config\.dynamic\[.*\]\.group_size of model.*down_proj: expected 64, got 32",
        ),
        (GPTQ | {"dynamic": {".*": {"adapter": {"rank": 8}}}}, r"quantization_config\.dynamic.*\.adapter of model"),
        (GPTQ | {"dynamic": {".*": 8}}, r'quantization_config\.dynamic\["\.\*"\]: expected an object, got 8'),
        (GPTQ | {"dynamic": {"-:(a": {}}}, r"quantization_config\.dynamic: '-:\(a': missing \)"),
        (GPTQ | {"group_size": 0}, r"quantization_config\.group_size: expected a positive integer, got 0"),
        (AUTOAWQ | {"version": "gemv"}, r"quantization_config\.version: expected 'gemm', got 'gemv'"),
        (AUTOAWQ | {"bits": 8}, r"quantization_config\.bits: expected 4, got 8"),
        (group(type="int"), WEIGHTS + r"\.type of model.*gate_proj: expected 'float', got 'int'"),
        (group(num_bits=6), WEIGHTS + r"\.num_bits of model.*gate_proj: expected 8, got 6"),
        (modelopt("MXFP8") | {"group_size": 16}, r"quantization_config\.group_size of model.*: expected 32, got 16"),
        (modelopt("NVFP4") | {"group_size": 32}, r"quantization_config\.group_size of model.*: expected 16, got 32"),
        (
            modelopt("INT8_SQ"),
            r"quantization_config\.quant_algo of model.*gate_proj: expected one of NVFP4, .*, FP8, .*, got 'INT8_SQ'",
        ),
        (
            {"quant_method": "mxfp4"},
            r"quantization_config\.quant_method: expected one of modelopt, .*, fp8, gptq, awq, got 'mxfp4'",
        ),
        (FP8 | {"weight_block_size": [0, 128]}, BLOCK_SIZE + r"\[0, 128\]"),
        (FP8 | {"weight_block_size": 128}, BLOCK_SIZE + "128"),
        (
            FP8 | {"activation_scheme": "new"},
            r"quantization_config\.activation_scheme: expected 'dynamic' or 'static', got 'new'",
        ),
        (
            {"quant_method": "compressed-tensors"},
            r"quantization_config\.config_groups: expected an object, got None",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {}}},
            r"quantization_config\.format of model.*gate_proj: expected one of nvfp4-pack-quantized, .*'marlin-24'",
        ),
        (
            compressed_config({"format": "nvfp4-pack-quantized", "weights": {"group_size": 32}}),
            WEIGHTS + r"\.group_size of model.*gate_proj: expected 16, got 32",
        ),
    ],
)
def test_what_is_not_read_names_the_key(said: dict[str, Any], message: str, folder: Path) -> None:
    change_config(folder, quantization_config=said)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"), Checkpoint(folder) as checkpoint:
        checkpoint.stored_of(0)


def test_settings_of_one_expert_are_named(folder: Path) -> None:
    """Its tensors are those of the others, and it is not the first."""
    said = GPTQ | {"group_size": 32, "dynamic": {"-:.*gate$": {}, r".*\.experts\.2\.up_proj$": {"desc_act": True}}}
    quantize_experts(folder, gptq, quantization_config=said)
    message = r"\.desc_act of model\.layers\.0\.mlp\.experts\.2\.up_proj: expected False, got True"
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.stored_of(0)


def test_groups_that_do_not_fit_are_named(folder: Path) -> None:
    quantize_experts(folder, int4, quantization_config=of_int4(group_size=96))
    with pytest.raises(ValueError, match=r"columns of .*gate_proj: expected a multiple of 96, got 256"):
        values(folder)


@pytest.mark.parametrize("quantizer", [int4, per_tensor, blocks_4d])
def test_sizes_are_compared_before_memory_is_taken(quantizer: Callable[..., Any], folder: Path) -> None:
    said = {int4: of_int4(), per_tensor: modelopt("FP8"), blocks_4d: modelopt("FP8_PB_WO")}[quantizer]
    quantize_experts(folder, quantizer, quantization_config=said, moe_intermediate_size=1 << 24)
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.weight.*: expected shape \[16777216, "):
        values(folder)
