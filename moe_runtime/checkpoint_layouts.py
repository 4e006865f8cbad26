"""How checkpoints store the weight of a linear, as data, and which of these layouts a `config.json` means.

Every layout is one for 4-, 8- or 16-bit weights that public programs write. A weight reads back as
`quants * block scale * second-level scale`; some layouts store the second-level scale, some the number to DIVIDE by.
Low nibble is the even column in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
        transposed: each of them as `[K, N]`.
    """

    name: str
    format: TokenFormat
    weight: str = "weight"
    scale: str | None = None
    scale_dtypes: tuple[str, ...] = ()
    weight_scale: ScaleName | None = None
    input_scale: ScaleName | None = None
    stacked: bool = False
    transposed: bool = False

    @property
    def quant_dtypes(self) -> tuple[str, ...]:
        """What dtypes the quants may have, in the words of safetensors."""
        return {16: ("BF16", "F32"), 8: ("F8_E4M3",), 4: ("U8",)}[self.format.element_bits]


PLAIN = WeightLayout("plain", BF16)
PLAIN_STACKED = WeightLayout("plain, stacked", BF16, stacked=True, transposed=True)
PLAIN_FUSED = WeightLayout("plain, fused", BF16, stacked=True)
"""What transformers 5 has in memory, of all families but gpt-oss; saved with `save_original_format=False`."""
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
COMPRESSED_FP8_BLOCKS = WeightLayout("float-quantized", FP8_BLOCK, scale="weight_scale", scale_dtypes=("F32", "BF16"))
FP8_BLOCKS = WeightLayout("fp8", FP8_BLOCK, scale="weight_scale_inv", scale_dtypes=("F32", "BF16", "F8_E8M0"))
GPT_OSS_MXFP4 = WeightLayout("mxfp4", MXFP4, weight="blocks", scale="scales", scale_dtypes=("U8",), stacked=True)

COMPRESSED = {
    layout.name: layout for layout in (COMPRESSED_NVFP4, COMPRESSED_MXFP4, COMPRESSED_MXFP8, COMPRESSED_FP8_BLOCKS)
} | {"naive-quantized": COMPRESSED_FP8_BLOCKS}
"""Layouts of compressed-tensors by the name of their format."""


@dataclass(frozen=True)
class StoredExperts:
    """How the experts of a layer are stored.

    Attributes:
        layout: of each weight.
        token_format: of the tokens that the checkpoint is meant for: that of the weights, bf16 where only weights were
            quantized.
    """

    layout: WeightLayout
    token_format: str


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says of how its linears are quantized; each may be in a way of its own.

    Attributes:
        file: the JSON file that says it.
        said: the words of a `quantization_config`; None where there are none.
        stacked: the model's own experts are stacked, as those of gpt-oss are.
    """

    file: Path
    said: Mapping[str, Any] | None
    stacked: bool = False

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], *, stacked: bool = False) -> Quantization:
        """That of `config`, the parsed `config.json` of `folder`, or of the `hf_quant_config.json` beside it.

        Raises:
            ValueError: no object, or a method that is not read; names file and key.
        """
        file = folder / CONFIG_FILE
        said = config.get(EXPERTS_KEY, config.get("quantization_config"))
        if EXPERTS_KEY not in config and (folder / MODELOPT_FILE).is_file():
            file = folder / MODELOPT_FILE
            said = {"quant_method": "modelopt", **_mapping(file, read_json(file), "quantization")}
        if said is not None and not isinstance(said, Mapping):
            raise ValueError(f"{file}: quantization_config: expected an object, got {said!r}")
        known = (*_METHODS, *(("mxfp4",) if stacked else ()))
        if said is not None and said.get("quant_method") not in known:
            raise ValueError(
                f"{file}: quant_method: expected one of {', '.join(known)}, got {said.get('quant_method')!r}"
            )
        return cls(file, said, stacked)

    def stored(self, names: Sequence[str]) -> StoredExperts:
        """How the linears `names`, such as `model.layers.0.mlp.experts.0.up_proj`, are stored; what others are does
        not count. Linears that are left out are plain.

        Raises:
            ValueError: a quantization that is not read, or one of other block sizes, or several ways for `names`, which
                are those of one layer; names file, key and linear.
        """
        found = [self._stored(name) for name in names]
        for name, one in zip(names, found, strict=True):
            if one != found[0]:
                raise ValueError(
                    f"{self.file}: expected one way to store a layer's experts, got {_words(found[0])} "
                    f"for {names[0]} and {_words(one)} for {name}"
                )
        return found[0]

    def check_block(self, names: Sequence[str], block: str) -> None:
        """Raise `ValueError`, as `stored`, unless the linears `names`, all within `block`, are stored in one way.

        Looks no further where one way alone is said: of linears that are left out of it, the tensors tell.
        """
        said = self.said or {}
        if said.get("quant_method") == "modelopt" and "quantized_layers" in said:
            self.stored(names)
        elif said.get("quant_method") == "compressed-tensors" and (
            len(groups := said["config_groups"]) > 1 or said.get("transform_config")
        ):
            near = {key: group | {"targets": _within(block, group.get("targets"))} for key, group in groups.items()}
            # A group without targets means all linears.
            near = {key: group for key, group in near.items() if group["targets"] or not groups[key].get("targets")}
            less = {"config_groups": near, "ignore": _within(block, said.get("ignore"))}
            replace(self, said={**said, **less}).stored(names)

    def _stored(self, name: str) -> StoredExperts:
        plain = StoredExperts(PLAIN_STACKED if self.stacked else PLAIN, "bf16")
        if self.said is None:
            return plain
        method = self.said["quant_method"]
        if method == "mxfp4":
            return StoredExperts(GPT_OSS_MXFP4, "bf16")
        return _METHODS[method](self.file, self.said, name) or plain


def _within(block: str, targets: Sequence[str] | None) -> list[str]:
    """`targets` without the names of linears elsewhere: a config may list each of a model."""
    return [target for target in targets or () if target.startswith(("re:", f"{block}.")) or target == "Linear"]


def _words(stored: StoredExperts) -> str:
    return f"{stored.layout.name} (for {stored.token_format} tokens)"


def _fp8(file: Path, said: Mapping[str, Any], name: str) -> StoredExperts:
    """Which linears are left out is seen from their tensors."""
    _expect(file, "weight_block_size", said.get("weight_block_size"), [128, 128])
    _expect(file, "activation_scheme", said.get("activation_scheme", "dynamic"), "dynamic")
    _expect(file, "fmt", said.get("fmt", "e4m3"), "e4m3")
    return StoredExperts(FP8_BLOCKS, "fp8_block")


def _modelopt(file: Path, said: Mapping[str, Any], name: str) -> StoredExperts | None:
    """What `quant_algo` says of all that is not left out, or `quantized_layers` of the linear or of what it is in; None
    where it stays plain."""
    cache = said.get("kv_cache_quant_algo") or said.get("kv_cache_scheme")
    key, recipe = "quant_algo", said
    if said.get("quant_algo") == "MIXED_PRECISION":
        key, listed = "quantized_layers", _mapping(file, said, "quantized_layers")
        above = [module for module in _with_parents(name) if module in listed]
        if not above:
            return None
        recipe = _mapping(file, listed, above[-1])
    elif said.get("quant_algo") is None and cache:
        return None
    if _is_left_out(name, _strings(file, "exclude_modules" if "exclude_modules" in said else "ignore", said)):
        return None
    algorithm = recipe.get("quant_algo")
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise ValueError(f"{file}: {key} of {name}: expected NVFP4 or W4A16_NVFP4, got {algorithm!r}")
    _expect(file, f"group_size of {name}", recipe.get("group_size", 16), 16)
    return StoredExperts(MODELOPT_NVFP4, "nvfp4" if algorithm == "NVFP4" else "bf16")


def _compressed(file: Path, said: Mapping[str, Any], name: str) -> StoredExperts | None:
    """What the group says that has the linear among its targets; None where it stays plain."""
    _check_not_transformed(file, said, name)
    group, fmt = compressed_group(file, said, name)
    if group is None:
        return None
    if fmt not in COMPRESSED:
        raise ValueError(f"{file}: format of {name}: expected one of {', '.join(COMPRESSED)}, got {fmt!r}")
    layout, weights = COMPRESSED[fmt], _mapping(file, group, "weights")
    activations = None
    if group.get("input_activations") is not None:
        activations = _mapping(file, group, "input_activations")
        bits = layout.format.element_bits
        # Those of 4-bit weights may be meant for MXFP8, and run in bf16 unless asked otherwise.
        possible = (bits, 8) if layout is COMPRESSED_MXFP4 else (bits,)
        if activations.get("num_bits", bits) not in possible:
            _expect(file, f"num_bits of the activations of {name}", activations.get("num_bits"), bits)
        _expect(file, f"type of the activations of {name}", activations.get("type", "float"), "float")
    _expect(file, f"output_activations of {name}", group.get("output_activations"), None)
    if layout is COMPRESSED_FP8_BLOCKS:
        _expect(file, f"strategy of {name}", weights.get("strategy"), "block")
        _expect(file, f"block_structure of {name}", weights.get("block_structure"), [128, 128])
        if activations is not None:
            _expect(file, f"dynamic of the activations of {name}", activations.get("dynamic"), True)
    else:
        _expect(file, f"group_size of {name}", weights.get("group_size"), layout.format.block)
    _expect(file, f"symmetric of {name}", weights.get("symmetric", True), True)
    return StoredExperts(layout, "bf16" if activations is None or layout is COMPRESSED_MXFP4 else layout.format.name)


def compressed_group(file: Path, said: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any] | None, str]:
    """The group of compressed-tensors that has the linear among its targets, None where there is none, and its
    format."""
    given = _mapping(file, said, "config_groups")
    groups = [_mapping(file, given, key) for key in given]
    group = _group_of(file, name, groups, _strings(file, "ignore", said))
    return group, str((group or {}).get("format") or said.get("format"))


def _check_not_transformed(file: Path, said: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` where the linear, or what goes in or comes out, is rotated (`transform_config`)."""
    if not said.get("transform_config"):
        return
    schemes = _mapping(file, _mapping(file, said, "transform_config"), "config_groups")
    for key in schemes:
        applied = _mapping(file, schemes, key).get("apply") or []
        if not isinstance(applied, list):
            raise ValueError(f"{file}: apply: expected a list of objects, got {applied!r}")
        for one in applied:
            where = _mapping(file, {"apply": one}, "apply")
            ignored = any(target_matches(file, name, target) for target in _strings(file, "ignore", where))
            if not ignored and any(target_matches(file, name, target) for target in _strings(file, "targets", where)):
                raise ValueError(f"{file}: transform_config: expected none for {name}, got {key} of {dict(where)!r}")


_METHODS: dict[str, Callable[[Path, Mapping[str, Any], str], StoredExperts | None]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}


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


def _with_parents(name: str) -> list[str]:
    """The names of the modules that a linear is in, from the top, and its own."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


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
