"""How checkpoints store the weight of a linear, as data, and which of these layouts a `config.json` means.

Every layout is one for 4-, 8- or 16-bit weights that public programs write. A weight reads back as
`quants * block scale * second-level scale`; some layouts store the second-level scale, some the number to DIVIDE by.
Low nibble is the even column in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
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


def stored_experts(
    folder: Path, config: Mapping[str, Any], *, names: Iterable[str] = (), stacked: bool = False
) -> StoredExperts:
    """The layout that `config`, the parsed `config.json` of `folder`, or the `hf_quant_config.json` beside it means.

    Args:
        names: the linears in question, such as `model.layers.0.mlp.experts.0.up_proj`: how others are quantized does
            not count, and what leaves all of these out stores them plain. Without names everything counts.
        stacked: the model's plain experts are stacked, as those of gpt-oss are.

    Raises:
        ValueError: a quantization that is not read, or one of other block sizes, or several for these linears; names
            file and key.
    """
    file = folder / CONFIG_FILE
    quantization = config.get(EXPERTS_KEY, config.get("quantization_config"))
    if EXPERTS_KEY not in config and (folder / MODELOPT_FILE).is_file():
        file = folder / MODELOPT_FILE
        quantization = {"quant_method": "modelopt", **_mapping(file, read_json(file), "quantization")}
    plain = StoredExperts(replace(PLAIN, stacked=stacked), "bf16")
    if quantization is None:
        return plain
    if not isinstance(quantization, Mapping):
        raise ValueError(f"{file}: quantization_config: expected an object, got {quantization!r}")
    method = quantization.get("quant_method")
    if method == "modelopt":
        return _modelopt(file, quantization, list(names)) or plain
    if method == "compressed-tensors":
        return _compressed(file, quantization, list(names)) or plain
    if method == "mxfp4" and stacked:
        return StoredExperts(GPT_OSS_MXFP4, "bf16")
    if method == "fp8":
        _expect(file, "weight_block_size", quantization.get("weight_block_size"), [128, 128])
        _expect(file, "activation_scheme", quantization.get("activation_scheme", "dynamic"), "dynamic")
        _expect(file, "fmt", quantization.get("fmt", "e4m3"), "e4m3")
        return StoredExperts(FP8_BLOCKS, "fp8_block")
    known = "modelopt, compressed-tensors, fp8" + (", mxfp4" if stacked else "")
    raise ValueError(f"{file}: quant_method: expected one of {known}, got {method!r}")


def _modelopt(file: Path, quantization: Mapping[str, Any], names: Sequence[str]) -> StoredExperts | None:
    """What `quant_algo` says of all that is not left out, or `quantized_layers` of each name or of what it is in; None
    where the weights in question, or all, stay plain."""
    cache = quantization.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme")
    key, recipes = "quant_algo", [quantization]
    if quantization.get("quant_algo") == "MIXED_PRECISION":
        key, listed = "quantized_layers", _mapping(file, quantization, "quantized_layers")
        wanted = {above for name in names for above in _with_parents(name)}
        recipes = [_mapping(file, listed, name) for name in listed if not names or name in wanted]
    elif quantization.get("quant_algo") is None and cache:
        return None
    left_out_key = "exclude_modules" if "exclude_modules" in quantization else "ignore"
    left_out = _strings(file, left_out_key, quantization)
    if not recipes or (names and all(_is_left_out(name, left_out) for name in names)):
        return None
    algorithms = sorted({str(recipe.get("quant_algo")) for recipe in recipes})
    if len(algorithms) != 1 or algorithms[0] not in ("NVFP4", "W4A16_NVFP4"):
        got = repr(algorithms[0]) if len(algorithms) == 1 else f"{algorithms} for one kind of linear"
        raise ValueError(f"{file}: {key}: expected NVFP4 or W4A16_NVFP4, got {got}")
    for recipe in recipes:
        _expect(file, "group_size", recipe.get("group_size", 16), 16)
    return StoredExperts(MODELOPT_NVFP4, "nvfp4" if algorithms == ["NVFP4"] else "bf16")


def _compressed(file: Path, quantization: Mapping[str, Any], names: Sequence[str]) -> StoredExperts | None:
    """What the groups say that have one of `names` among their targets; None where these, or all, stay plain."""
    given = _mapping(file, quantization, "config_groups")
    groups = [_mapping(file, given, name) for name in given]
    if names:
        ignored = _strings(file, "ignore", quantization)
        found = [_group_of(file, name, groups, ignored) for name in names]
        groups = [group for group in groups if any(group is one for one in found)]
    if not groups and (names or quantization.get("kv_cache_scheme")):
        return None
    formats = {str(group.get("format") or quantization.get("format")) for group in groups}
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


def _group_of(
    file: Path, name: str, groups: Sequence[Mapping[str, Any]], ignored: Sequence[str]
) -> Mapping[str, Any] | None:
    """The group of the linear `name`: that with its name among the `targets`, else with a pattern, else `Linear`."""
    if any(target_matches(file, name, target) for target in ignored):
        return None
    found: dict[int, Mapping[str, Any]] = {}
    for group in groups:
        for target in _strings(file, "targets", group) or ["Linear"]:
            if target_matches(file, name, target):
                found.setdefault(0 if target == name else 2 if target == "Linear" else 1, group)
    return found[min(found)] if found else None


def target_matches(file: Path, name: str, target: str) -> bool:
    """Whether a target of compressed-tensors means the linear `name`: its name, `re:` and a pattern, or `Linear`."""
    if not target.startswith("re:"):
        return target in (name, "Linear")
    try:
        return re.match(target[3:], name) is not None
    except re.error as error:
        raise ValueError(f"{file}: targets: {target!r}: {error}") from None


def _is_left_out(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of ModelOpt's patterns, of names or of what they are in, leaves the linear `name` out."""
    above = _with_parents(name)
    return any(pattern in above or fnmatchcase(name, pattern) for pattern in patterns)


def _with_parents(name: str) -> set[str]:
    """A name and those of the modules that it is in."""
    parts = name.split(".")
    return {".".join(parts[: count + 1]) for count in range(len(parts))}


def _strings(file: Path, key: str, data: Mapping[str, Any]) -> list[str]:
    """The list of names and patterns under a key; empty where there is none."""
    value = data.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{file}: {key}: expected a list of names and patterns, got {value!r}")
    return value


def _mapping(file: Path, data: Any, key: str) -> Mapping[str, Any]:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, Mapping):
        raise ValueError(f"{file}: {key}: expected an object, got {value!r}")
    return value


def _expect(file: Path, key: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise ValueError(f"{file}: {key}: expected {expected!r}, got {value!r}")
