"""Which layout the JSON files of a checkpoint mean for each linear: its `quantization_config`, whoever made it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from moe_runtime.checkpoints.family_table import text_config
from moe_runtime.checkpoints.files import read_json
from moe_runtime.checkpoints.layouts import (
    COMPRESSED,
    COMPRESSED_FP8_BLOCKS,
    COMPRESSED_MXFP4,
    FP8_BLOCKS,
    FP8_CHANNEL,
    FP8_TENSOR,
    GPT_OSS_MXFP4,
    INT_BITS,
    MODELOPT,
    PACKED_INTS,
    PLAIN,
    PLAIN_STACKED,
    Packing,
    WeightLayout,
    fp8_grid,
    integers,
    transposed_integers,
)
from moe_runtime.checkpoints.patterns import check_work, matches
from moe_runtime.comm.arguments import describe
from moe_runtime.kernels.formats.number_formats import MXFP8, NVFP4

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
EXPERTS_KEY = "expert_quantization_config"
"""Key of `config.json` that describes the experts, in the form of `quantization_config`, if the rest of the model is
quantized otherwise. `launch.convert` writes it; other programs do not know it."""
OLD_KEY = "compression_config"
"""What compressed-tensors used to call `quantization_config`."""
_CONFIG_KEYS = (EXPERTS_KEY, "quantization_config", OLD_KEY)
"""Keys of `config.json` that describe the experts. The first that is there counts."""
_WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class StoredExperts:
    """How the experts of a layer are stored.

    Attributes:
        layout: layout of each weight.
        token_format: token format that the checkpoint is meant for: that of the weights, or bf16 for weight-only
            quantization.
        key: the key that says so, for messages.
    """

    layout: WeightLayout
    token_format: str
    key: str = field(default="", compare=False)


@dataclass(frozen=True)
class Quantization:
    """How the linears of a checkpoint are quantized; each may differ.

    Attributes:
        file: the JSON file that describes it.
        key: its key there.
        quant_config: what it says, as a `quantization_config`; None if there is none.
        stacked: the model's plain experts are stacked, as in gpt-oss.
        unread: another file that describes it, which does not count.
    """

    file: Path
    key: str
    quant_config: Mapping[str, Any] | None
    stacked: bool = False
    unread: Path | None = None

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], *, stacked: bool = False) -> Quantization:
        """Read it from `config`, the parsed `config.json` of `folder`, or else from its `hf_quant_config.json`.

        Raises:
            ValueError: no object, or an unknown method; names file and key.
        """
        modelopt = folder / MODELOPT_FILE
        at, text = "", config
        key = next((key for key in _CONFIG_KEYS if config.get(key) is not None), None)
        if key is None:
            at, text = text_config(config)
            key = next((key for key in _CONFIG_KEYS if text.get(key) is not None), None)
        if key is None and modelopt.is_file():
            described = _mapping(f"{modelopt}: quantization", read_json(modelopt).get("quantization"))
            return cls(modelopt, "quantization", {**described, "quant_method": "modelopt"}, stacked)
        unread = modelopt if modelopt.is_file() else None
        said = None if key is None else text[key]
        found = cls(folder / CONFIG_FILE, f"{at}{key or 'quantization_config'}", said, stacked, unread)
        found._check_method()
        return found

    def _check_method(self) -> None:
        if self.quant_config is None:
            return
        if not isinstance(self.quant_config, Mapping):
            raise ValueError(self.message(f"{self.key}: expected an object, got {self.quant_config!r}"))
        known = (*_METHODS, *(("mxfp4",) if self.stacked else ()))
        method = self.quant_config.get("quant_method")
        if method not in known:
            raise ValueError(
                self.message(f"{self.key}.quant_method: expected one of {', '.join(known)}, got {method!r}")
            )

    def stored(self, names: Sequence[str]) -> StoredExperts:
        """How the linears `names` of one layer, such as `model.layers.0.mlp.experts.0.up_proj`, are stored.

        Linears that are left out of quantization are plain.

        Raises:
            ValueError: an unknown quantization, other block sizes, or `names` that differ; names file, key and linear.
        """
        self._check_work(self.quant_config or {}, len(names))
        found = [self._stored(name) for name in names]
        for name, one in zip(names, found, strict=True):
            if one != found[0]:
                raise ValueError(
                    self.message(
                        f"expected one way to store a layer's experts, got {_words(found[0])} for {names[0]} "
                        f"and {_words(one)} for {name}, by {found[0].key} and {one.key}"
                    )
                )
        return found[0]

    def _check_work(self, quant_config: Mapping[str, Any], num_names: int) -> None:
        try:
            check_work(quant_config, num_names)
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None

    def check_block(self, names: Sequence[str], block: str) -> None:
        """Raise `ValueError`, as `stored`, unless the linears `names`, all within `block`, are stored alike.

        A config with a single scheme needs no look at each linear: the tensors show which are left out of it.
        """
        quant_config = self.quant_config or {}
        if quant_config.get("quant_method") not in ("modelopt", "compressed-tensors"):
            return
        groups = quant_config.get("config_groups") or {}
        if len(groups) < 2 and not quant_config.get("quantized_layers") and not quant_config.get("transform_config"):
            return
        near = {key: group | {"targets": _within(block, group.get("targets"))} for key, group in groups.items()}
        # A group without targets means all linears.
        less = {key: group for key, group in near.items() if group["targets"] or not groups[key].get("targets")}
        short = {**quant_config, "config_groups": less}
        if quant_config["quant_method"] == "compressed-tensors":
            short["ignore"] = _within(block, quant_config.get("ignore"))
        self._check_work(short, len(names))
        quick = replace(self, quant_config=short)
        first = quick._stored(names[0])
        for name in names:
            if not quick._is_stored_as(first, name):
                # The places in messages are those in the whole lists.
                self.stored([names[0], name])

    def _is_stored_as(self, stored: StoredExperts, name: str) -> bool:
        try:
            return self._stored(name) == stored
        except ValueError:
            return False

    def refuse_plain(self, names: Sequence[str], why: str) -> NoReturn:
        """Raise `ValueError` for linears that are left out of quantization, of which the last is quantized (`why`)."""
        raise ValueError(self.message(f"{self.stored(names).key} leaves {names[-1]} out of quantization, but {why}"))

    def _stored(self, name: str) -> StoredExperts:
        if self.quant_config is None:
            found = _plain(f"the lack of {self.key}")
        elif (method := self.quant_config["quant_method"]) == "mxfp4":
            found = StoredExperts(GPT_OSS_MXFP4, "bf16", f"{self.key}.quant_method")
        else:
            try:
                found = _METHODS[method](self.key, self.quant_config, name)
            except ValueError as error:
                raise ValueError(self.message(str(error))) from None
        return replace(found, layout=PLAIN_STACKED) if self.stacked and found.layout is PLAIN else found

    def message(self, text: str) -> str:
        """`text`, which begins with a key, after the file, and with the file that does not count."""
        return f"{self.file}: {text}{f' ({self.unread} is there too, but was not read)' if self.unread else ''}"


def _within(block: str, targets: Sequence[str] | None) -> list[str]:
    """`targets` without names of linears outside `block`: a config may list every linear of a model."""
    above = {*_with_parents(block), "Linear"}
    return [
        target
        for target in targets or ()
        if target in above or target.startswith(("re:", f"{block}.")) or _WILDCARD.search(target)
    ]


def _words(stored: StoredExperts) -> str:
    return f"{stored.layout.name} (for {stored.token_format} tokens)"


def _plain(key: str) -> StoredExperts:
    return StoredExperts(PLAIN, "bf16", key)


# `at` is always the key, in messages, of what is read.


def _fp8(at: str, quant_config: Mapping[str, Any], name: str) -> StoredExperts:
    """`quant_method: fp8`. The tensors show which linears are left out."""
    if (scheme := quant_config.get("activation_scheme", "dynamic")) not in ("dynamic", "static"):
        raise ValueError(f"{at}.activation_scheme: expected 'dynamic' or 'static', got {scheme!r}")
    _expect(f"{at}.fmt", quant_config.get("fmt", "e4m3"), "e4m3")
    sizes = quant_config.get("weight_block_size")
    layout = FP8_TENSOR if sizes is None else fp8_grid(FP8_BLOCKS, *_block(f"{at}.weight_block_size", sizes))
    return StoredExperts(layout, layout.format.name, f"{at}.quant_method")


def _gptq(at: str, quant_config: Mapping[str, Any], name: str) -> StoredExperts:
    """`quant_method: gptq`, of AutoGPTQ and GPTQModel. The tensors show which linears are left out."""
    bits, form = quant_config.get("bits"), quant_config.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8):
        raise ValueError(f"{at}.bits: expected 2, 4 or 8, got {bits!r}")
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"{at}.checkpoint_format: expected 'gptq' or 'gptq_v2', got {form!r}")
    for pattern in _mapping(f"{at}.dynamic", quant_config.get("dynamic") or {}):
        if not pattern.startswith("-:"):
            raise ValueError(f"{at}.dynamic: expected only what is left out (-:), got {pattern!r}")
    layout = transposed_integers(Packing.GPTQ, bits, _group_size(at, quant_config), 1 if form == "gptq" else 0)
    return StoredExperts(layout, "bf16", f"{at}.quant_method")


def _awq(at: str, quant_config: Mapping[str, Any], name: str) -> StoredExperts:
    """`quant_method: awq`, of AutoAWQ. The tensors show which linears are left out."""
    for key, expected in (("bits", 4), ("version", "gemm"), ("zero_point", True)):
        _expect(f"{at}.{key}", quant_config.get(key, expected if key != "bits" else None), expected)
    layout = transposed_integers(Packing.AWQ, 4, _group_size(at, quant_config), 0)
    return StoredExperts(layout, "bf16", f"{at}.quant_method")


def _group_size(at: str, quant_config: Mapping[str, Any]) -> int | None:
    """Columns that share a scale; None for all."""
    size = quant_config.get("group_size")
    return None if size == -1 else _block(f"{at}.group_size", [size], 1)[0]


def _modelopt(at: str, quant_config: Mapping[str, Any], name: str) -> StoredExperts:
    """`quant_method: modelopt`: by `quant_algo`, or by `quantized_layers` for the linear or a module that it is in.

    A group of `config_groups` without `input_activations` means bf16 tokens, whatever the algorithm.
    """
    cache = quant_config.get("kv_cache_quant_algo") or quant_config.get("kv_cache_scheme")
    above, where, recipe = _with_parents(name), at, quant_config
    if quant_config.get("quant_algo") == "MIXED_PRECISION":
        where = f"{at}.quantized_layers"
        listed = _mapping(where, quant_config.get("quantized_layers"))
        found = [module for module in above if module in listed]
        if not found:
            return _plain(where)
        where = f"{where}[{json.dumps(found[-1])}]"
        recipe = _mapping(where, listed[found[-1]])
    elif quant_config.get("quant_algo") is None and cache:
        return _plain(f"{at}.quant_algo = null")
    ignored = "exclude_modules" if "exclude_modules" in quant_config else "ignore"
    for place, pattern in enumerate(_strings(f"{at}.{ignored}", quant_config.get(ignored))):
        if _covers(pattern, above):
            return _plain(f"{at}.{ignored}[{place}] = {json.dumps(pattern)}")
    algorithm = recipe.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in MODELOPT:
        raise ValueError(f"{where}.quant_algo of {name}: expected one of {', '.join(MODELOPT)}, got {algorithm!r}")
    layout, tokens = MODELOPT[algorithm.upper()]
    if layout.quant_format in (NVFP4, MXFP8) and recipe.get("group_size") is not None:
        _expect(f"{where}.group_size of {name}", recipe["group_size"], layout.quant_format.block)
    stored = StoredExperts(layout, tokens, f"{where}.quant_algo")
    if quant_config.get("config_groups") is None:
        return stored
    where, group = _modelopt_group(f"{at}.config_groups", quant_config["config_groups"], above)
    return stored if group is None else _modelopt_tokens(where, group, name, stored)


def _modelopt_group(at: str, groups: Any, above: Sequence[str]) -> tuple[str, Mapping[str, Any] | None]:
    """The key of the group that targets the linear `above[-1]`, and the group; None if there is none.

    Of modules that the linear is in, the nearest counts. They come before patterns, and patterns before `Linear`.
    """
    groups = {key: _mapping(f"{at}.{key}", group) for key, group in _mapping(at, groups).items()}
    targets = {
        key: _strings(f"{at}.{key}.targets", group.get("targets")) or ["Linear"] for key, group in groups.items()
    }
    for module in reversed(above):
        for key, listed in targets.items():
            if module in listed:
                return f"{at}.{key}", groups[key]
    for key, listed in targets.items():
        if any(_covers(target, above) for target in listed):
            return f"{at}.{key}", groups[key]
    key = next((key for key, listed in targets.items() if "Linear" in listed), None)
    return (at, None) if key is None else (f"{at}.{key}", groups[key])


def _modelopt_tokens(at: str, group: Mapping[str, Any], name: str, stored: StoredExperts) -> StoredExperts:
    """`stored`, meant for the tokens that a group of ModelOpt names."""
    fmt = stored.layout.quant_format
    if group.get("weights") is not None and fmt in (NVFP4, MXFP8):
        weights = _mapping(f"{at}.weights", group["weights"])
        _expect(f"{at}.weights.group_size of {name}", weights.get("group_size", fmt.block), fmt.block)
    at = f"{at}.input_activations"
    if group.get("input_activations") is None:
        return replace(stored, token_format="bf16", key=at)
    activations = _mapping(at, group["input_activations"])
    if stored.token_format != "bf16":
        _expect(f"{at}.num_bits of {name}", activations.get("num_bits", fmt.element_bits), fmt.element_bits)
        _expect(f"{at}.type of {name}", activations.get("type", "float"), "float")
    return stored


def _compressed(at: str, quant_config: Mapping[str, Any], name: str) -> StoredExperts:
    """`quant_method: compressed-tensors`: by the group that targets the linear."""
    _check_not_transformed(f"{at}.transform_config", quant_config.get("transform_config"), name)
    key, fmt = compressed_group(at, quant_config, name)
    if key is None:
        return _plain(_ignored(at, quant_config, name) or f"{at}.config_groups")
    group, where = quant_config["config_groups"][key], f"{at}.config_groups.{key}"
    if fmt not in (known := (*COMPRESSED, *INT_BITS)):
        at = where if group.get("format") else at
        raise ValueError(f"{at}.format of {name}: expected one of {', '.join(known)}, got {fmt!r}")
    return _of_group(where, group, _group_layout(where, group, fmt, name), name)


def _group_layout(at: str, group: Mapping[str, Any], fmt: str, name: str) -> WeightLayout:
    """The layout of a linear in format `fmt` of compressed-tensors, by the strategy that a group of it has."""
    at, weights = f"{at}.weights", _mapping(f"{at}.weights", group.get("weights"))
    layout, strategy = COMPRESSED.get(fmt), weights.get("strategy")
    if layout is not None and layout is not COMPRESSED_FP8_BLOCKS:
        return layout
    if layout is None:
        return _integers(at, weights, fmt, name)
    _expect(f"{at}.num_bits of {name}", weights.get("num_bits", 8), 8)
    _expect(f"{at}.type of {name}", weights.get("type", "float"), "float")
    if strategy == "block":
        return fp8_grid(layout, *_block(f"{at}.block_structure of {name}", weights.get("block_structure")))
    if strategy not in _FP8_STRATEGIES:
        expected = ", ".join(("block", *_FP8_STRATEGIES))
        raise ValueError(f"{at}.strategy of {name}: expected one of {expected}, got {strategy!r}")
    return _FP8_STRATEGIES[strategy]


def _integers(at: str, weights: Mapping[str, Any], fmt: str, name: str) -> WeightLayout:
    """The layout of integers in format `fmt`, by what a group says of its `weights`."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if bits not in INT_BITS[fmt]:
        expected = " or ".join(map(str, INT_BITS[fmt]))
        raise ValueError(f"{at}.num_bits of {name}: expected {expected} with {fmt}, got {bits!r}")
    _expect(f"{at}.type of {name}", weights.get("type"), "int")
    if strategy not in ("group", "channel"):
        raise ValueError(f"{at}.strategy of {name}: expected 'group' or 'channel', got {strategy!r}")
    columns = None
    if strategy == "group":
        (columns,) = _block(f"{at}.group_size of {name}", [weights.get("group_size")], 1)
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool or (not symmetric and fmt != PACKED_INTS):
        _expect(f"{at}.symmetric of {name}", symmetric, True)
    return integers(fmt, bits, columns, zero_points=not symmetric)


_FP8_STRATEGIES = {"tensor": FP8_TENSOR, "channel": FP8_CHANNEL}


def _of_group(at: str, group: Mapping[str, Any], layout: WeightLayout, name: str) -> StoredExperts:
    """How a linear is stored in `layout` by what a group of compressed-tensors says."""
    weights, activations = _mapping(f"{at}.weights", group.get("weights")), None
    # Integers are dequantized, for bf16 tokens, whatever activations they may be meant for.
    if group.get("input_activations") is not None and layout.int_bits is None:
        where = f"{at}.input_activations"
        activations = _mapping(where, group["input_activations"])
        bits = 8 if layout.dequantized else layout.format.element_bits
        # MXFP4 weights may be meant for MXFP8 activations. They run in bf16 by default.
        possible = (bits, 8) if layout is COMPRESSED_MXFP4 else (bits,)
        if activations.get("num_bits", bits) not in possible:
            _expect(f"{where}.num_bits of {name}", activations.get("num_bits"), bits)
        _expect(f"{where}.type of {name}", activations.get("type", "float"), "float")
    _expect(f"{at}.output_activations of {name}", group.get("output_activations"), None)
    if layout is COMPRESSED_FP8_BLOCKS:
        if activations is not None:
            _expect(f"{at}.input_activations.dynamic of {name}", activations.get("dynamic"), True)
    elif layout.format.swizzled:
        _expect(f"{at}.weights.group_size of {name}", weights.get("group_size"), layout.format.block)
    if layout.int_bits is None:
        _expect(f"{at}.weights.symmetric of {name}", weights.get("symmetric", True), True)
    tokens = "bf16" if activations is None or layout is COMPRESSED_MXFP4 else layout.format.name
    return StoredExperts(layout, tokens, f"{at}.input_activations")


def compressed_group(at: str, quant_config: Mapping[str, Any], name: str) -> tuple[str | None, str]:
    """The key of the group of compressed-tensors that targets the linear, None if there is none, and its format.

    `at` is the key of `quant_config`, in messages.
    """
    where = f"{at}.config_groups"
    groups = _mapping(where, quant_config.get("config_groups"))
    groups = {key: _mapping(f"{where}.{key}", group) for key, group in groups.items()}
    found = None if _ignored(at, quant_config, name) else _group_of(where, name, groups)
    own = groups[found].get("format") if found is not None else None
    return found, str(own or quant_config.get("format"))


def _ignored(at: str, quant_config: Mapping[str, Any], name: str) -> str | None:
    """The entry of `ignore` that leaves the linear out; None if none does."""
    for place, target in enumerate(_strings(f"{at}.ignore", quant_config.get("ignore"))):
        if target_matches(f"{at}.ignore", name, target):
            return f"{at}.ignore[{place}] = {json.dumps(target)}"
    return None


def _check_not_transformed(at: str, transforms: Any, name: str) -> None:
    """Raise `ValueError` if the linear, its input or its output is rotated (`transform_config`)."""
    if not transforms:
        return
    at, schemes = f"{at}.config_groups", _mapping(at, transforms).get("config_groups")
    for key, scheme in _mapping(at, schemes).items():
        applied = _mapping(f"{at}.{key}", scheme).get("apply") or []
        if not isinstance(applied, list):
            raise ValueError(f"{at}.{key}.apply: expected a list of objects, got {applied!r}")
        for place, one in enumerate(applied):
            where = f"{at}.{key}.apply[{place}]"
            one = _mapping(where, one)
            ignored, targets = (_strings(f"{where}.{part}", one.get(part)) for part in ("ignore", "targets"))
            if not any(target_matches(f"{where}.ignore", name, target) for target in ignored) and any(
                target_matches(f"{where}.targets", name, target) for target in targets
            ):
                raise ValueError(f"{where}: expected none for {name}, got {dict(one)!r}")


_METHODS: dict[str, Callable[[str, Mapping[str, Any], str], StoredExperts]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
}


def _group_of(at: str, name: str, groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The key of the linear's group. Targets by name come before patterns, and patterns before `Linear`."""
    found: dict[int, str] = {}
    for key, group in groups.items():
        where = f"{at}.{key}.targets"
        for target in _strings(where, group.get("targets")) or ["Linear"]:
            if target_matches(where, name, target):
                found.setdefault(0 if target == name else 2 if target == "Linear" else 1, key)
    return found[min(found)] if found else None


def target_matches(at: str, name: str, target: str) -> bool:
    """Whether a target of compressed-tensors (a name, `re:` and a pattern, or `Linear`) matches the linear `name`."""
    if not target.startswith("re:"):
        return target in (name, "Linear")
    try:
        return matches(target[3:], name)
    except ValueError as error:
        raise ValueError(f"{at}: {describe(target)}: {error}") from None


def _covers(pattern: str, above: Sequence[str]) -> bool:
    """Whether one of ModelOpt's patterns matches the linear `above[-1]` or names a module that it is in."""
    # Names are not compiled as patterns, since a config may list every linear of a model.
    return pattern in above or (_WILDCARD.search(pattern) is not None and fnmatchcase(above[-1], pattern))


def _with_parents(name: str) -> list[str]:
    """The names of the modules that a linear is in, outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _strings(at: str, value: Any) -> list[str]:
    """A list of names and patterns; empty if there is none."""
    value = value or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{at}: expected a list of names and patterns, got {value!r}")
    return value


def _mapping(at: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{at}: expected an object, got {value!r}")
    return value


def _block(at: str, value: Any, count: int = 2) -> list[int]:
    """The sizes of a block."""
    if not isinstance(value, list) or len(value) != count or not all(type(n) is int and 0 < n for n in value):
        expected = "two positive integers" if count == 2 else "a positive integer"
        raise ValueError(f"{at}: expected {expected}, got {value if count == 2 else value[0]!r}")
    return value


def _expect(at: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise ValueError(f"{at}: expected {expected!r}, got {value!r}")
