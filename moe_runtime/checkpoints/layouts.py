"""How checkpoints store the weight of a linear, as data, and which of these layouts a `config.json` means.

Every layout is one that public programs write, for 4-, 8- or 16-bit weights. A weight reads back as
`quants * block scale * second-level scale`. Some layouts store the second-level scale, others its inverse. The low
nibble is always the even column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.files import read_json
from moe_runtime.checkpoints.patterns import check_work, matches
from moe_runtime.comm.arguments import describe
from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK, MXFP4, MXFP8, NVFP4, TokenFormat

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
EXPERTS_KEY = "expert_quantization_config"
"""Key of `config.json` that describes the experts, in the form of `quantization_config`, if the rest of the model is
quantized otherwise. `launch.convert` writes it; other programs do not know it."""


@dataclass(frozen=True)
class ScaleName:
    """A second-level scale: the last part of its tensor's name, and whether to divide by it (an encode scale)."""

    suffix: str
    divides: bool


@dataclass(frozen=True)
class WeightLayout:
    """The tensors of one linear `[N, K]`.

    Attributes:
        name: its name in messages.
        format: number format of the quants.
        weight: last part of the name of the quants.
        scale: last part of the name of the block scales, `[N, V]` linear, in `fp8_block` `[ceil(N/128), ceil(K/128)]`;
            None if there are none.
        scale_dtypes: possible dtypes of the block scales, as safetensors names them.
        weight_scale: second-level scale of the weight, fp32, one number.
        input_scale: second-level scale of the linear's input, if calibrated.
        stacked: the experts of a layer share two tensors, one of gate and up and one of down, as in gpt-oss.
        transposed: each of these holds experts as `[K, N]`.
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
        """Possible dtypes of the quants, as safetensors names them."""
        return {16: ("BF16", "F32"), 8: ("F8_E4M3",), 4: ("U8",)}[self.format.element_bits]


PLAIN = WeightLayout("plain", BF16)
PLAIN_STACKED = WeightLayout("plain, stacked", BF16, stacked=True, transposed=True)
PLAIN_FUSED = WeightLayout("plain, fused", BF16, stacked=True)
"""As transformers 5 has experts in memory, except gpt-oss; saved with `save_original_format=False`."""
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
        layout: layout of each weight.
        token_format: token format that the checkpoint is meant for: that of the weights, or bf16 for weight-only
            quantization.
    """

    layout: WeightLayout
    token_format: str


@dataclass(frozen=True)
class Quantization:
    """How the linears of a checkpoint are quantized; each may differ.

    Attributes:
        file: the JSON file that describes it.
        quant_config: its `quantization_config`; None if there is none.
        stacked: the model's plain experts are stacked, as in gpt-oss.
    """

    file: Path
    quant_config: Mapping[str, Any] | None
    stacked: bool = False

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], *, stacked: bool = False) -> Quantization:
        """Read it from `config`, the parsed `config.json` of `folder`, or from its `hf_quant_config.json`.

        Raises:
            ValueError: no object, or an unknown method; names file and key.
        """
        file = folder / CONFIG_FILE
        quant_config = config.get(EXPERTS_KEY, config.get("quantization_config"))
        if EXPERTS_KEY not in config and (folder / MODELOPT_FILE).is_file():
            file = folder / MODELOPT_FILE
            quant_config = {"quant_method": "modelopt", **_mapping(file, read_json(file), "quantization")}
        if quant_config is not None and not isinstance(quant_config, Mapping):
            raise ValueError(f"{file}: quantization_config: expected an object, got {quant_config!r}")
        known = (*_METHODS, *(("mxfp4",) if stacked else ()))
        if quant_config is not None and quant_config.get("quant_method") not in known:
            raise ValueError(
                f"{file}: quant_method: expected one of {', '.join(known)}, got {quant_config.get('quant_method')!r}"
            )
        return cls(file, quant_config, stacked)

    def stored(self, names: Sequence[str]) -> StoredExperts:
        """How the linears `names` of one layer, such as `model.layers.0.mlp.experts.0.up_proj`, are stored.

        Linears that are left out of quantization are plain.

        Raises:
            ValueError: an unknown quantization, other block sizes, or `names` that differ; names file, key and linear.
        """
        try:
            check_work(self.quant_config or {}, len(names))
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None
        found = [self._stored(name) for name in names]
        for name, one in zip(names, found, strict=True):
            if one != found[0]:
                raise ValueError(
                    f"{self.file}: expected one way to store a layer's experts, got {_words(found[0])} "
                    f"for {names[0]} and {_words(one)} for {name}"
                )
        return found[0]

    def check_block(self, names: Sequence[str], block: str) -> None:
        """Raise `ValueError`, as `stored`, unless the linears `names`, all within `block`, are stored alike.

        A config with a single scheme needs no look at each linear: the tensors show which are left out of it.
        """
        quant_config = self.quant_config or {}
        if quant_config.get("quant_method") == "modelopt" and "quantized_layers" in quant_config:
            self.stored(names)
        elif quant_config.get("quant_method") == "compressed-tensors" and (
            len(groups := quant_config["config_groups"]) > 1 or quant_config.get("transform_config")
        ):
            near = {key: group | {"targets": _within(block, group.get("targets"))} for key, group in groups.items()}
            # A group without targets means all linears.
            near = {key: group for key, group in near.items() if group["targets"] or not groups[key].get("targets")}
            less = {"config_groups": near, "ignore": _within(block, quant_config.get("ignore"))}
            replace(self, quant_config={**quant_config, **less}).stored(names)

    def _stored(self, name: str) -> StoredExperts:
        plain = StoredExperts(PLAIN_STACKED if self.stacked else PLAIN, "bf16")
        if self.quant_config is None:
            return plain
        method = self.quant_config["quant_method"]
        if method == "mxfp4":
            return StoredExperts(GPT_OSS_MXFP4, "bf16")
        return _METHODS[method](self.file, self.quant_config, name) or plain


def _within(block: str, targets: Sequence[str] | None) -> list[str]:
    """`targets` without names of linears outside `block`: a config may list every linear of a model."""
    return [target for target in targets or () if target.startswith(("re:", f"{block}.")) or target == "Linear"]


def _words(stored: StoredExperts) -> str:
    return f"{stored.layout.name} (for {stored.token_format} tokens)"


def _fp8(file: Path, quant_config: Mapping[str, Any], name: str) -> StoredExperts:
    """`quant_method: fp8`. The tensors show which linears are left out."""
    _expect(file, "weight_block_size", quant_config.get("weight_block_size"), [128, 128])
    _expect(file, "activation_scheme", quant_config.get("activation_scheme", "dynamic"), "dynamic")
    _expect(file, "fmt", quant_config.get("fmt", "e4m3"), "e4m3")
    return StoredExperts(FP8_BLOCKS, "fp8_block")


def _modelopt(file: Path, quant_config: Mapping[str, Any], name: str) -> StoredExperts | None:
    """`quant_method: modelopt`: by `quant_algo`, or by `quantized_layers` for the linear or a module that it is in.

    None if the linear stays plain.
    """
    cache = quant_config.get("kv_cache_quant_algo") or quant_config.get("kv_cache_scheme")
    key, recipe = "quant_algo", quant_config
    if quant_config.get("quant_algo") == "MIXED_PRECISION":
        key, listed = "quantized_layers", _mapping(file, quant_config, "quantized_layers")
        above = [module for module in _with_parents(name) if module in listed]
        if not above:
            return None
        recipe = _mapping(file, listed, above[-1])
    elif quant_config.get("quant_algo") is None and cache:
        return None
    ignored = "exclude_modules" if "exclude_modules" in quant_config else "ignore"
    if _is_left_out(name, _strings(file, ignored, quant_config)):
        return None
    algorithm = recipe.get("quant_algo")
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise ValueError(f"{file}: {key} of {name}: expected NVFP4 or W4A16_NVFP4, got {algorithm!r}")
    _expect(file, f"group_size of {name}", recipe.get("group_size", 16), 16)
    return StoredExperts(MODELOPT_NVFP4, "nvfp4" if algorithm == "NVFP4" else "bf16")


def _compressed(file: Path, quant_config: Mapping[str, Any], name: str) -> StoredExperts | None:
    """`quant_method: compressed-tensors`: by the group that targets the linear; None if the linear stays plain."""
    _check_not_transformed(file, quant_config, name)
    group, fmt = compressed_group(file, quant_config, name)
    if group is None:
        return None
    if fmt not in COMPRESSED:
        raise ValueError(f"{file}: format of {name}: expected one of {', '.join(COMPRESSED)}, got {fmt!r}")
    layout, weights = COMPRESSED[fmt], _mapping(file, group, "weights")
    activations = None
    if group.get("input_activations") is not None:
        activations = _mapping(file, group, "input_activations")
        bits = layout.format.element_bits
        # MXFP4 weights may be meant for MXFP8 activations. They run in bf16 by default.
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


def compressed_group(file: Path, quant_config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any] | None, str]:
    """The group of compressed-tensors that targets the linear, None if there is none, and its format."""
    given = _mapping(file, quant_config, "config_groups")
    groups = [_mapping(file, given, key) for key in given]
    group = _group_of(file, name, groups, _strings(file, "ignore", quant_config))
    return group, str((group or {}).get("format") or quant_config.get("format"))


def _check_not_transformed(file: Path, quant_config: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` if the linear, its input or its output is rotated (`transform_config`)."""
    if not quant_config.get("transform_config"):
        return
    schemes = _mapping(file, _mapping(file, quant_config, "transform_config"), "config_groups")
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
    """The group of the linear `name`. Targets by name come before patterns, and patterns before `Linear`."""
    if any(target_matches(file, name, target) for target in ignored):
        return None
    found: dict[int, Mapping[str, Any]] = {}
    for group in groups:
        for target in _strings(file, "targets", group) or ["Linear"]:
            if target_matches(file, name, target):
                found.setdefault(0 if target == name else 2 if target == "Linear" else 1, group)
    return found[min(found)] if found else None


def target_matches(file: Path, name: str, target: str) -> bool:
    """Whether a target of compressed-tensors (a name, `re:` and a pattern, or `Linear`) matches the linear `name`."""
    if not target.startswith("re:"):
        return target in (name, "Linear")
    try:
        return matches(target[3:], name)
    except ValueError as error:
        raise ValueError(f"{file}: targets: {describe(target)}: {error}") from None


def _is_left_out(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of ModelOpt's patterns matches the linear `name` or a module that it is in."""
    above = _with_parents(name)
    return any(pattern in above or fnmatchcase(name, pattern) for pattern in patterns)


def _with_parents(name: str) -> list[str]:
    """The names of the modules that a linear is in, outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _strings(file: Path, key: str, data: Mapping[str, Any]) -> list[str]:
    """The list of names and patterns under a key; empty if there is none."""
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
