"""`quant_method: compressed-tensors`: by the group that targets a linear."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moe_runtime.checkpoints.layouts import (
    COMPRESSED,
    COMPRESSED_FP8_BLOCKS,
    COMPRESSED_MXFP4,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT_BITS,
    PACKED_INTS,
    WeightLayout,
    fp8_grid,
    integers,
)
from moe_runtime.checkpoints.patterns import matches
from moe_runtime.checkpoints.stored_experts import (
    Method,
    Refuse,
    StoredExperts,
    block_sizes,
    expect,
    known_keys,
    mapping,
    plain,
    strings,
)
from moe_runtime.support.arguments import describe

_GROUP_KEYS = known_keys(("targets", "weights", "input_activations", "output_activations", "format"))
_WEIGHT_KEYS = known_keys(
    ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    # The tensors have the dtypes of scales and zero points.
    ("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)
# Tokens have scales of their own.
_INPUT_KEYS = known_keys(("num_bits", "type", "dynamic"), (*_WEIGHT_KEYS.used, *_WEIGHT_KEYS.without_influence))


def _compressed(at: str, quant_config: Mapping[str, Any], name: str, refuse: Refuse) -> StoredExperts:
    _check_not_transformed(f"{at}.transform_config", quant_config.get("transform_config"), name)
    key, fmt = compressed_group(at, quant_config, name)
    if key is None:
        return plain(_ignored(at, quant_config, name) or f"{at}.config_groups")
    _check_dense(f"{at}.sparsity_config", quant_config.get("sparsity_config"), name)
    group, where = quant_config["config_groups"][key], f"{at}.config_groups.{key}"
    refuse(group, _GROUP_KEYS, f"{where}.")
    for part, keys in (("weights", _WEIGHT_KEYS), ("input_activations", _INPUT_KEYS)):
        if group.get(part) is not None:
            refuse(mapping(f"{where}.{part}", group[part]), keys, f"{where}.{part}.")
    if fmt not in (known := (*COMPRESSED, *INT_BITS)):
        at = where if group.get("format") else at
        raise ValueError(f"{at}.format of {name}: expected one of {', '.join(known)}, got {fmt!r}")
    layout = _group_layout(where, group, fmt, name)
    _check_blocks(f"{where}.weights", mapping(f"{where}.weights", group.get("weights")), name)
    return _of_group(where, group, layout, name)


def _check_blocks(at: str, weights: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` for blocks or an order of columns that the strategy leaves no use for."""
    # Columns in an order of their own have groups that another tensor names.
    expect(f"{at}.actorder of {name}", weights.get("actorder") or None, None, "weight", "static")
    if weights.get("strategy") in ("channel", "tensor"):
        expect(f"{at}.group_size of {name}", weights.get("group_size"), None, -1)
    if weights.get("strategy") != "block":
        expect(f"{at}.block_structure of {name}", weights.get("block_structure"), None)


def _group_layout(at: str, group: Mapping[str, Any], fmt: str, name: str) -> WeightLayout:
    """The layout of a linear in format `fmt` of compressed-tensors, by the strategy that a group of it has."""
    at, weights = f"{at}.weights", mapping(f"{at}.weights", group.get("weights"))
    expect(f"{at}.dynamic of {name}", weights.get("dynamic") or False, False)
    layout, strategy = COMPRESSED.get(fmt), weights.get("strategy")
    if layout is not None and layout is not COMPRESSED_FP8_BLOCKS:
        bits = layout.format.element_bits
        expect(f"{at}.num_bits of {name}", weights.get("num_bits", bits), bits)
        expect(f"{at}.type of {name}", weights.get("type", "float"), "float")
        expect(f"{at}.strategy of {name}", strategy, None, "group", "tensor_group")
        return layout
    if layout is None:
        return _integers(at, weights, fmt, name)
    expect(f"{at}.num_bits of {name}", weights.get("num_bits", 8), 8)
    expect(f"{at}.type of {name}", weights.get("type", "float"), "float")
    if strategy == "block":
        return fp8_grid(layout, *block_sizes(f"{at}.block_structure of {name}", weights.get("block_structure")))
    if not isinstance(strategy, str) or strategy not in _FP8_STRATEGIES:
        expected = ", ".join(("block", *_FP8_STRATEGIES))
        raise ValueError(f"{at}.strategy of {name}: expected one of {expected}, got {strategy!r}")
    return _FP8_STRATEGIES[strategy]


def _integers(at: str, weights: Mapping[str, Any], fmt: str, name: str) -> WeightLayout:
    """The layout of integers in format `fmt`, by what a group says of its `weights`."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if bits not in INT_BITS[fmt]:
        expected = " or ".join(map(str, INT_BITS[fmt]))
        raise ValueError(f"{at}.num_bits of {name}: expected {expected} with {fmt}, got {bits!r}")
    expect(f"{at}.type of {name}", weights.get("type"), "int")
    if strategy not in ("group", "channel"):
        raise ValueError(f"{at}.strategy of {name}: expected 'group' or 'channel', got {strategy!r}")
    columns = None
    if strategy == "group":
        (columns,) = block_sizes(f"{at}.group_size of {name}", [weights.get("group_size")], 1)
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool or (not symmetric and fmt != PACKED_INTS):
        expect(f"{at}.symmetric of {name}", symmetric, True)
    return integers(fmt, bits, columns, zero_points=not symmetric)


_FP8_STRATEGIES = {"tensor": FP8_TENSOR, "channel": FP8_CHANNEL}


def _of_group(at: str, group: Mapping[str, Any], layout: WeightLayout, name: str) -> StoredExperts:
    """How a linear is stored in `layout` by what a group of compressed-tensors says."""
    weights, activations = mapping(f"{at}.weights", group.get("weights")), None
    # Integers are dequantized, for bf16 tokens, whatever activations they may be meant for.
    if group.get("input_activations") is not None and layout.int_bits is None:
        where = f"{at}.input_activations"
        activations = mapping(where, group["input_activations"])
        bits = 8 if layout.dequantized else layout.format.element_bits
        # MXFP4 weights may be meant for MXFP8 activations. They run in bf16 by default.
        possible = (bits, 8) if layout is COMPRESSED_MXFP4 else (bits,)
        if activations.get("num_bits", bits) not in possible:
            expect(f"{where}.num_bits of {name}", activations.get("num_bits"), bits)
        expect(f"{where}.type of {name}", activations.get("type", "float"), "float")
    expect(f"{at}.output_activations of {name}", group.get("output_activations"), None)
    if layout is COMPRESSED_FP8_BLOCKS:
        if activations is not None:
            expect(f"{at}.input_activations.dynamic of {name}", activations.get("dynamic"), True)
    elif layout.format.swizzled:
        expect(f"{at}.weights.group_size of {name}", weights.get("group_size"), layout.format.block)
    if layout.int_bits is None:
        expect(f"{at}.weights.symmetric of {name}", weights.get("symmetric", True), True)
    tokens = "bf16" if activations is None or layout is COMPRESSED_MXFP4 else layout.format.name
    return StoredExperts(layout, tokens, f"{at}.input_activations")


def compressed_group(at: str, quant_config: Mapping[str, Any], name: str) -> tuple[str | None, str]:
    """The key of the group of compressed-tensors that targets the linear, None if there is none, and its format.

    `at` is the key of `quant_config`, in messages.
    """
    where = f"{at}.config_groups"
    groups = mapping(where, quant_config.get("config_groups"))
    groups = {key: mapping(f"{where}.{key}", group) for key, group in groups.items()}
    found = None if _ignored(at, quant_config, name) else _group_of(where, name, groups)
    own = groups[found].get("format") if found is not None else None
    return found, str(own or quant_config.get("format"))


def _ignored(at: str, quant_config: Mapping[str, Any], name: str) -> str | None:
    """The entry of `ignore` that leaves the linear out; None if none does."""
    for place, target in enumerate(strings(f"{at}.ignore", quant_config.get("ignore"))):
        if target_matches(f"{at}.ignore", name, target):
            return f"{at}.ignore[{place}] = {json.dumps(target)}"
    return None


def _check_dense(at: str, sparsity: Any, name: str) -> None:
    """Raise `ValueError` if zeros of the linear are left out of its tensors (`sparsity_config`)."""
    if not sparsity:
        return
    sparsity = mapping(at, sparsity)
    targets = strings(f"{at}.targets", sparsity.get("targets")) or ["Linear"]
    ignored = strings(f"{at}.ignore", sparsity.get("ignore"))
    if any(target_matches(f"{at}.ignore", name, one) for one in ignored):
        return
    if any(target_matches(f"{at}.targets", name, one) for one in targets):
        expect(f"{at}.format of {name}", sparsity.get("format"), None, "dense")


def _check_not_transformed(at: str, transforms: Any, name: str) -> None:
    """Raise `ValueError` if the linear, its input or its output is rotated (`transform_config`)."""
    if not transforms:
        return
    at, schemes = f"{at}.config_groups", mapping(at, transforms).get("config_groups")
    for key, scheme in mapping(at, schemes).items():
        applied = mapping(f"{at}.{key}", scheme).get("apply") or []
        if not isinstance(applied, list):
            raise ValueError(f"{at}.{key}.apply: expected a list of objects, got {applied!r}")
        for place, one in enumerate(applied):
            where = f"{at}.{key}.apply[{place}]"
            one = mapping(where, one)
            ignored, targets = (strings(f"{where}.{part}", one.get(part)) for part in ("ignore", "targets"))
            if not any(target_matches(f"{where}.ignore", name, target) for target in ignored) and any(
                target_matches(f"{where}.targets", name, target) for target in targets
            ):
                raise ValueError(f"{where}: expected none for {name}, got {dict(one)!r}")


def _group_of(at: str, name: str, groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The key of the linear's group. Targets by name come before patterns, and patterns before `Linear`."""
    found: dict[int, str] = {}
    for key, group in groups.items():
        where = f"{at}.{key}.targets"
        for target in strings(where, group.get("targets")) or ["Linear"]:
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


COMPRESSED_METHOD = Method(
    _compressed,
    known_keys(
        ("config_groups", "format", "ignore", "transform_config", "sparsity_config"),
        ("quantization_status", "global_compression_ratio", "version"),
    ),
)
