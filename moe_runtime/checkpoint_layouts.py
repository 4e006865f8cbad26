"""How checkpoints store the weight of a linear, as data, and which of these layouts a `config.json` means.

Every layout is one for 4-, 8- or 16-bit weights that public programs write. A weight reads back as
`quants * block scale * second-level scale`; some layouts store the second-level scale, some the number to DIVIDE by.
Low nibble is the even column in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_runtime.formats import BF16, FP8_BLOCK, MXFP4, MXFP8, NVFP4, TokenFormat
from moe_runtime.tensor_files import read_json

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
EXPERTS_KEY = "expert_quantization_config"
"""Key of `config.json` that describes the experts where the rest of the model is quantized otherwise, in the words of
`quantization_config`. `launch.convert` writes it; other programs do not know it."""


@dataclass(frozen=True)
class ScaleName:
    """A second-level scale: the last part of its tensor's name, and whether it divides (an encode scale)."""

    suffix: str
    divides: bool


@dataclass(frozen=True)
class WeightLayout:
    """The tensors of one linear `[N, K]`.

    Attributes:
        name: for messages.
        format: number format of the quants.
        weight: last part of the name of the quants.
        scale: last part of the name of the block scales, `[N, V]` linear, in `fp8_block` `[ceil(N/128), ceil(K/128)]`;
            None where there are none.
        scale_dtypes: what dtypes these may have, in the words of safetensors.
        weight_scale: second-level scale of the weight, fp32, one number.
        input_scale: that of what it is multiplied with, as far as it was calibrated.
        stacked: the experts of a layer lie in one tensor each for gate and up, and for down, as in gpt-oss.
    """

    name: str
    format: TokenFormat
    weight: str = "weight"
    scale: str | None = None
    scale_dtypes: tuple[str, ...] = ()
    weight_scale: ScaleName | None = None
    input_scale: ScaleName | None = None
    stacked: bool = False

    @property
    def quant_dtypes(self) -> tuple[str, ...]:
        """What dtypes the quants may have, in the words of safetensors."""
        return {16: ("BF16", "F32"), 8: ("F8_E4M3",), 4: ("U8",)}[self.format.element_bits]


PLAIN = WeightLayout("plain", BF16)
MODELOPT_NVFP4 = WeightLayout(
    "modelopt nvfp4",
    NVFP4,
    scale="weight_scale",
    scale_dtypes=("F8_E4M3",),
    weight_scale=ScaleName("weight_scale_2", divides=False),
    input_scale=ScaleName("input_scale", divides=False),
)
COMPRESSED_NVFP4 = WeightLayout(
    "nvfp4-pack-quantized",
    NVFP4,
    weight="weight_packed",
    scale="weight_scale",
    scale_dtypes=("F8_E4M3",),
    weight_scale=ScaleName("weight_global_scale", divides=True),
    input_scale=ScaleName("input_global_scale", divides=True),
)
COMPRESSED_MXFP4 = WeightLayout(
    "mxfp4-pack-quantized", MXFP4, weight="weight_packed", scale="weight_scale", scale_dtypes=("U8", "F8_E8M0")
)
COMPRESSED_MXFP8 = WeightLayout("mxfp8-quantized", MXFP8, scale="weight_scale", scale_dtypes=("U8", "F8_E8M0"))
FP8_BLOCKS = WeightLayout("fp8", FP8_BLOCK, scale="weight_scale_inv", scale_dtypes=("F32", "BF16", "F8_E8M0"))
GPT_OSS_MXFP4 = WeightLayout("mxfp4", MXFP4, weight="blocks", scale="scales", scale_dtypes=("U8",), stacked=True)

COMPRESSED = {layout.name: layout for layout in (COMPRESSED_NVFP4, COMPRESSED_MXFP4, COMPRESSED_MXFP8)}
"""Layouts of compressed-tensors by the name of their format."""


@dataclass(frozen=True)
class StoredExperts:
    """How the experts of a checkpoint are stored.

    Attributes:
        layout: of each weight.
        token_format: of the tokens that the checkpoint is meant for: that of the weights, bf16 where only weights were
            quantized.
    """

    layout: WeightLayout
    token_format: str


def stored_experts(folder: Path, config: Mapping[str, Any], *, stacked: bool = False) -> StoredExperts:
    """The layout that `config`, the parsed `config.json` of `folder`, or the `hf_quant_config.json` beside it means.

    Args:
        stacked: the model's plain experts are stacked, as those of gpt-oss are.

    Raises:
        ValueError: a quantization that is not read, or one of other block sizes; names file and key.
    """
    file = folder / CONFIG_FILE
    quantization = config.get(EXPERTS_KEY, config.get("quantization_config"))
    if EXPERTS_KEY not in config and (folder / MODELOPT_FILE).is_file():
        file = folder / MODELOPT_FILE
        quantization = {"quant_method": "modelopt", **_mapping(file, read_json(file), "quantization")}
    if quantization is None:
        return StoredExperts(replace(PLAIN, stacked=stacked), "bf16")
    if not isinstance(quantization, Mapping):
        raise ValueError(f"{file}: quantization_config: expected an object, got {quantization!r}")
    method = quantization.get("quant_method")
    if method == "modelopt":
        return _modelopt(file, quantization)
    if method == "compressed-tensors":
        return _compressed(file, quantization)
    if method == "mxfp4" and stacked:
        return StoredExperts(GPT_OSS_MXFP4, "bf16")
    if method == "fp8":
        _expect(file, "weight_block_size", quantization.get("weight_block_size"), [128, 128])
        _expect(file, "activation_scheme", quantization.get("activation_scheme", "dynamic"), "dynamic")
        _expect(file, "fmt", quantization.get("fmt", "e4m3"), "e4m3")
        return StoredExperts(FP8_BLOCKS, "fp8_block")
    known = "modelopt, compressed-tensors, fp8" + (", mxfp4" if stacked else "")
    raise ValueError(f"{file}: quant_method: expected one of {known}, got {method!r}")


def _modelopt(file: Path, quantization: Mapping[str, Any]) -> StoredExperts:
    algorithm = quantization.get("quant_algo")
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise ValueError(f"{file}: quant_algo: expected NVFP4 or W4A16_NVFP4, got {algorithm!r}")
    _expect(file, "group_size", quantization.get("group_size", 16), 16)
    return StoredExperts(MODELOPT_NVFP4, "nvfp4" if algorithm == "NVFP4" else "bf16")


def _compressed(file: Path, quantization: Mapping[str, Any]) -> StoredExperts:
    groups = list(_mapping(file, quantization, "config_groups").values())
    formats = {
        str(_mapping(file, {"group": group}, "group").get("format") or quantization.get("format")) for group in groups
    }
    if len(formats) != 1 or not formats <= set(COMPRESSED):
        raise ValueError(f"{file}: format: expected one of {', '.join(COMPRESSED)}, got {sorted(formats)}")
    layout = COMPRESSED[formats.pop()]
    for group in groups:
        _expect(file, "group_size", _mapping(file, group, "weights").get("group_size"), layout.format.block)
        _expect(file, "symmetric", group["weights"].get("symmetric", True), True)
    weights_only = [group.get("input_activations") is None for group in groups]
    if any(weights_only) != all(weights_only):
        raise ValueError(f"{file}: input_activations: expected the same in all groups, got some with and some without")
    return StoredExperts(layout, "bf16" if all(weights_only) or layout is COMPRESSED_MXFP4 else layout.format.name)


def _mapping(file: Path, data: Any, key: str) -> Mapping[str, Any]:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, Mapping):
        raise ValueError(f"{file}: {key}: expected an object, got {value!r}")
    return value


def _expect(file: Path, key: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise ValueError(f"{file}: {key}: expected {expected!r}, got {value!r}")
