"""`quant_method: modelopt`, and what `hf_quant_config.json` says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from moe_runtime.checkpoints.layouts import MODELOPT, WeightLayout
from moe_runtime.checkpoints.stored_experts import (
    EXPERT,
    Method,
    Refuse,
    StoredExperts,
    expect,
    known_keys,
    mapping,
    plain,
    strings,
    with_parents,
)
from moe_runtime.kernels.formats.number_formats import MXFP8, NVFP4

WILDCARD = re.compile(r"[*?\[]")

_RECIPE = ("quant_algo", "group_size", "awq_block_size", "has_zero_point", "pre_quant_scale")
_RECIPE_KEYS = known_keys(_RECIPE, ("weight_only",))
_GROUP_KEYS = known_keys(("targets", "weights", "input_activations", *_RECIPE))
_WEIGHT_KEYS = known_keys(("num_bits", "type", "group_size", "dynamic", "symmetric", "strategy"))
# Tokens have scales of their own.
_INPUT_KEYS = known_keys(("num_bits", "type"), ("group_size", "dynamic", "symmetric", "strategy"))


def stored_by_recipe(at: str, quant_config: Mapping[str, Any], name: str, refuse: Refuse) -> StoredExperts:
    """By `quant_algo`, or by `quantized_layers` for the linear or a module that it is in; `moe_quant_algo` of experts.

    A group of `config_groups` without `input_activations` means bf16 tokens, whatever the algorithm.
    """
    cache = quant_config.get("kv_cache_quant_algo") or quant_config.get("kv_cache_scheme")
    above, where, recipe = with_parents(name), at, quant_config
    experts = quant_config.get("moe_quant_algo") if EXPERT.search(name) is not None else None
    if experts is not None and quant_config.get("quantized_layers") is None:
        recipe = {**quant_config, "quant_algo": experts}
    elif quant_config.get("quant_algo") == "MIXED_PRECISION":
        where = f"{at}.quantized_layers"
        listed = mapping(where, quant_config.get("quantized_layers"))
        found = [module for module in above if module in listed]
        if not found:
            return plain(where)
        where = f"{where}[{json.dumps(found[-1])}]"
        recipe = mapping(where, listed[found[-1]])
        refuse(recipe, _RECIPE_KEYS, f"{where}.")
    elif quant_config.get("quant_algo") is None and cache:
        return plain(f"{at}.quant_algo = null")
    ignored = "exclude_modules" if "exclude_modules" in quant_config else "ignore"
    for place, pattern in enumerate(strings(f"{at}.{ignored}", quant_config.get(ignored))):
        if _covers(pattern, above):
            return plain(f"{at}.{ignored}[{place}] = {json.dumps(pattern)}")
    algorithm = recipe.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in MODELOPT:
        raise ValueError(f"{where}.quant_algo of {name}: expected one of {', '.join(MODELOPT)}, got {algorithm!r}")
    if experts is not None:
        expect(f"{at}.moe_quant_algo of {name}", experts, algorithm)
        expect(f"{at}.quant_algo", quant_config.get("quant_algo"), None, "MIXED_PRECISION", algorithm)
    layout, tokens = MODELOPT[algorithm.upper()]
    block = layout.quant_format.block if layout.quant_format in (NVFP4, MXFP8) or layout.grid is None else None
    for key in ("group_size", "awq_block_size"):
        # Of formats without blocks, ModelOpt writes 0.
        if recipe.get(key):
            expect(f"{where}.{key} of {name}", recipe[key], block)
    _check_factors(where, recipe, name, layout)
    stored = StoredExperts(layout, tokens, f"{where}.quant_algo")
    if quant_config.get("config_groups") is None:
        return stored
    where, group = _modelopt_group(f"{at}.config_groups", quant_config["config_groups"], above)
    if group is None:
        return stored
    refuse(group, _GROUP_KEYS, f"{where}.")
    for part, keys in (("weights", _WEIGHT_KEYS), ("input_activations", _INPUT_KEYS)):
        if group.get(part) is not None:
            refuse(mapping(f"{where}.{part}", group[part]), keys, f"{where}.{part}.")
    _check_factors(where, group, name, layout)
    if group.get("quant_algo") is not None:
        expect(f"{where}.quant_algo of {name}", group["quant_algo"], algorithm)
        if group.get("weights") is None:
            # ModelOpt writes nothing else of algorithms that compressed-tensors lacks.
            return stored
    return _modelopt_tokens(where, group, name, stored)


def _check_factors(at: str, said: Mapping[str, Any], name: str, layout: WeightLayout) -> None:
    """Raise `ValueError` if a recipe or a group says other zero points or factors of columns than `layout` has."""
    for key, expected in (("has_zero_point", False), ("pre_quant_scale", layout.column_scale is not None)):
        if said.get(key) is not None:
            expect(f"{at}.{key} of {name}", said[key], expected)


def _modelopt_group(at: str, groups: Any, above: Sequence[str]) -> tuple[str, Mapping[str, Any] | None]:
    """The key of the group that targets the linear `above[-1]`, and the group; None if there is none.

    Of modules that the linear is in, the nearest counts. They come before patterns, and patterns before `Linear`.
    """
    groups = {key: mapping(f"{at}.{key}", group) for key, group in mapping(at, groups).items()}
    targets = {key: strings(f"{at}.{key}.targets", group.get("targets")) or ["Linear"] for key, group in groups.items()}
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
    fmt, layout = stored.layout.quant_format, stored.layout
    if group.get("weights") is not None:
        weights, where = mapping(f"{at}.weights", group["weights"]), f"{at}.weights"
        block = fmt.block if fmt in (NVFP4, MXFP8) else layout.grid and layout.grid[1]
        expect(f"{where}.group_size of {name}", weights.get("group_size", block), block)
        expect(f"{where}.num_bits of {name}", weights.get("num_bits", fmt.element_bits), fmt.element_bits)
        expect(f"{where}.type of {name}", weights.get("type", "float"), "float")
        expect(f"{where}.dynamic of {name}", weights.get("dynamic") or False, False)
        expect(f"{where}.symmetric of {name}", weights.get("symmetric", True), True)
        if layout.grid is not None:
            strategy = "tensor" if layout.grid[0] is None else "channel"
            expect(f"{where}.strategy of {name}", weights.get("strategy", strategy), strategy)
        else:
            expect(f"{where}.strategy of {name}", weights.get("strategy"), None, "group", "tensor_group", "block")
    at = f"{at}.input_activations"
    if group.get("input_activations") is None:
        return replace(stored, token_format="bf16", key=at)
    activations = mapping(at, group["input_activations"])
    if stored.token_format != "bf16":
        expect(f"{at}.num_bits of {name}", activations.get("num_bits", fmt.element_bits), fmt.element_bits)
        expect(f"{at}.type of {name}", activations.get("type", "float"), "float")
    return stored


def _covers(pattern: str, above: Sequence[str]) -> bool:
    """Whether one of ModelOpt's patterns matches the linear `above[-1]` or names a module that it is in."""
    # Names are not compiled as patterns, since a config may list every linear of a model.
    return pattern in above or (WILDCARD.search(pattern) is not None and fnmatchcase(above[-1], pattern))


MODELOPT_METHOD = Method(
    stored_by_recipe,
    known_keys(
        (*_RECIPE, "moe_quant_algo", "quantized_layers", "exclude_modules", "ignore", "config_groups"),
        ("producer", "method", "quant_lm_head", "weight_only"),
    ),
)
