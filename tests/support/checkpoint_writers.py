"""Quantized checkpoints for the tests of the readers, written with what others made: numpy, ml_dtypes and transformers.

Every writer takes the tensors of a model as its own `save_pretrained` wrote them and replaces the experts' weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.files import INDEX_FILE, SINGLE_FILE
from moe_runtime.config import MoELayerConfig

EXPERT_WEIGHT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
Quantizer = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""From a weight to the tensors that replace it, by the last part of their names."""
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
"""The `quantization_config` of what `modelopt_nvfp4` makes."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""That of what `fp8_blocks` makes."""


def layer_config_of(folder: Path, layer: int = 0, **overrides: Any) -> MoELayerConfig:
    """Decoder layer `layer` as a checkpoint's own files describe it."""
    with Checkpoint(folder) as checkpoint:
        return checkpoint.layer_config(layer, **overrides)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """Make `tensors` the ones of the checkpoint, and add keys to its `config.json`."""
    for file in (*folder.glob("*.safetensors"), folder / INDEX_FILE):
        file.unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)
    change_config(folder, **config)


def shard_of(folder: Path, name: str) -> Path:
    """The file that holds a tensor."""
    index = folder / INDEX_FILE
    return folder / (json.loads(index.read_text())["weight_map"][name] if index.exists() else SINGLE_FILE)


def change_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """Replace a tensor (None: remove it) in its file, and return the file."""
    file = shard_of(folder, name)
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), file)
    return file


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of a checkpoint's `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def quantize_experts(folder: Path, quantizer: Quantizer, **config: Any) -> dict[str, torch.Tensor]:
    """Replace the weights of all experts by what `quantizer` makes of them; the tensors that are there then."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_all(folder).items():
        if EXPERT_WEIGHT.search(name):
            prefix = name.removesuffix("weight")
            tensors |= {prefix + part: value for part, value in quantizer(tensor.float()).items()}
        else:
            tensors[name] = tensor
    rewrite(folder, tensors, **config)
    return tensors


def stack_experts(folder: Path, *, transposed: bool = False) -> None:
    """Put the plain experts of each layer into two tensors, gate and up into one, as transformers has them in memory.

    `transposed` as Qwen3-VL-MoE is published.
    """
    tensors = load_all(folder)
    made = {name: tensor for name, tensor in tensors.items() if not EXPERT_WEIGHT.search(name)}
    for block in {name.rsplit(".", 3)[0] for name in tensors if EXPERT_WEIGHT.search(name)}:
        count = sum(name.startswith(f"{block}.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{block}.{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        for name, stack in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
            made[f"{block}.{name}"] = stack.mT if transposed else stack
    rewrite(folder, made)


def _codes(x: np.ndarray) -> torch.Tensor:
    codes = np.clip(x, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)


def _e4m3(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).view(
        torch.float8_e4m3fn
    )


def modelopt_nvfp4(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """`weight_scale_2` is `amax / 2688`, block scales `amax / 6` over it, `input_scale` some number of each tensor."""
    x = w.double().numpy()
    blocks = x.reshape(len(x), -1, 16)
    second = np.float32(np.abs(x).max() / 2688)
    scales = (np.abs(blocks).max(2) / 6 / second).astype(ml_dtypes.float8_e4m3fn)
    quants = _codes((blocks / np.maximum(scales.astype(np.float64)[:, :, None] * second, 1e-30)).reshape(x.shape))
    return {
        "weight": quants,
        "weight_scale": _e4m3(scales),
        "weight_scale_2": torch.tensor(second),
        "input_scale": torch.tensor(np.float32(0.01 + np.abs(x).mean() / 100)),
    }


def fp8_blocks(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """128x128 blocks, partial ones at the edges."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w, (0, -columns % 128, 0, -rows % 128)).double()
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = (blocks.abs().amax((1, 3)) / 448).float()
    quants = (blocks / scales[:, None, :, None].double()).flatten(2).flatten(0, 1)[:rows, :columns]
    return {"weight": _e4m3(quants.numpy()), "weight_scale_inv": scales}


def mxfp4_blocks(w_ENK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gpt-oss's blocks `[E, N, K/32, 16]` and scales `[E, N, K/32]`."""
    x = w_ENK.double().numpy().reshape(*w_ENK.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(x).max(3))) - 2
    scales = torch.from_numpy((exponents + 127).astype(np.uint8))
    return _codes(x / np.exp2(exponents)[..., None]), scales


def write_gpt_oss_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a saved gpt-oss by MXFP4, in its makers' layout."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_all(folder).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = mxfp4_blocks(tensor.transpose(1, 2).float())
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = tensor
    rewrite(folder, tensors, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return tensors


def read_e2m1(packed: torch.Tensor) -> np.ndarray:
    """float64 of bytes of two codes."""
    raw = packed.numpy()
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def read_nvfp4(parts: dict[str, torch.Tensor]) -> np.ndarray:
    """float64 of what `modelopt_nvfp4` makes."""
    scales = parts["weight_scale"].double().numpy() * parts["weight_scale_2"].double().item()
    return read_e2m1(parts["weight"]) * scales.repeat(16, axis=1)


def read_fp8_blocks(quants: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """float64 of FP8 in blocks of 128x128, the last ones short."""
    rows, columns = quants.shape
    factors = scales.float().double().numpy().repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    return quants.double().numpy() * factors


class LibraryScheme:
    """Linears as compressed-tensors itself writes and reads them, by one of its presets."""

    FORMATS: ClassVar = {
        "NVFP4": "nvfp4-pack-quantized",
        "NVFP4A16": "nvfp4-pack-quantized",
        "MXFP4A16": "mxfp4-pack-quantized",
        "MXFP8": "mxfp8-quantized",
        "FP8_BLOCK": "float-quantized",
    }

    DEQUANTIZED: ClassVar = {
        "FP8_DYNAMIC": "float-quantized",
        "FP8": "float-quantized",
        "W8A8": "int-quantized",
        **dict.fromkeys(("W2A16", "W4A16", "W4A16_ASYM", "W4A8", "W4AFP8", "W8A16"), "pack-quantized"),
    }
    """Presets whose quants or scales no format has as they are written."""

    def __init__(self, preset: str, *targets: str, **weights: Any) -> None:
        """`weights` changes what the preset says of weights."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import preset_name_to_scheme

        self.preset, self.format = preset, (self.FORMATS | self.DEQUANTIZED)[preset]
        self.scheme = preset_name_to_scheme(preset, list(targets))
        self.scheme.weights = self.scheme.weights.model_copy(update=weights)
        self._compressor = BaseCompressor.get_value_from_registry(self.format)

    @property
    def group(self) -> dict[str, Any]:
        """One of the `config_groups`."""
        return json.loads(self.scheme.model_dump_json()) | {"format": self.format}

    def compress(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        """From the library's own scales; FP8 blocks may be short."""
        from compressed_tensors.quantization.utils import helpers

        parts, weights = {"weight": w}, self.scheme.weights
        if self.format.startswith("nvfp4"):
            parts["weight_global_scale"] = helpers.generate_gparam(w.min(), w.max())
        if weights.block_structure is not None:
            high, wide = weights.block_structure
            padded = torch.nn.functional.pad(w, (0, -w.shape[1] % wide, 0, -w.shape[0] % high))
            blocks, along = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide)), (1, 3)
        elif weights.group_size is None:
            blocks, along = (w[:, None], (2,)) if weights.strategy == "channel" else (w.view(1, 1, -1), (1, 2))
        else:
            blocks, along = w.unflatten(1, (-1, weights.group_size)), (2,)
        second = parts.get("weight_global_scale")
        parts["weight_scale"], zeros = helpers.calculate_qparams(
            blocks.amin(along), blocks.amax(along), weights, second
        )
        if not weights.symmetric:
            parts["weight_zero_point"] = zeros
        if self.preset in ("FP8", "FP8_DYNAMIC") and weights.strategy == "tensor":
            parts["weight_scale"] = parts["weight_scale"].view(1)
            parts["input_scale"] = w.abs().amax().view(1)
        if self.preset == "NVFP4":
            parts["input_global_scale"] = 2688 / (w.abs().amax() * 300).reshape(1)
        return self._compressor.compress(parts, self.scheme)

    def decompress(self, prefix: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """fp32 of the linear whose tensors begin with `prefix`."""
        parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        return self._compressor.decompress(parts, self.scheme)["weight"].float()


def compress_layers(folder: Path, *presets: str) -> tuple[list[LibraryScheme], dict[str, torch.Tensor]]:
    """Write the experts of layer `n` by the `n`-th preset, those of further layers as they are; what was written."""
    schemes = [LibraryScheme(preset, rf"re:.*layers\.{n}\.mlp\.experts\..*") for n, preset in enumerate(presets)]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_all(folder).items():
        layer = int(name.split(".")[2])
        if EXPERT_WEIGHT.search(name) and layer < len(schemes):
            prefix = name.removesuffix("weight")
            tensors |= {prefix + part: value for part, value in schemes[layer].compress(tensor.float()).items()}
        else:
            tensors[name] = tensor
    rewrite(folder, tensors, quantization_config=compressed_config(*(scheme.group for scheme in schemes)))
    return schemes, tensors


NVFP4_RTOL = 2.0**-8 + 2.0**-15
"""compressed-tensors rounds to bf16 once: products of NVFP4's numbers with quotients of its scales, both in fp32."""


def compressed_config(*groups: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignore),
    }
