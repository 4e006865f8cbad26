"""What a `config.json` says of MoE layers: sizes, router, activation, shared expert, and which layers have experts.

Published files and those that transformers 5 writes differ in some keys; both are read, also where a model with several
parts keeps them in a `text_config`. `family_table` has what configs do not say. A key that may change what is computed
and that is not read here is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from reprlib import repr as shortened
from typing import Any, Literal

from pydantic import ValidationError

from moe_runtime.checkpoints import family_table as table
from moe_runtime.checkpoints.config_keys import ConfigKeys
from moe_runtime.config import (
    ActivationConfig,
    MoELayerConfig,
    RouterConfig,
    SharedExpertConfig,
    check_stated,
    complaints,
)
from moe_runtime.support.arguments import check_integer, describe


def family_of(config: Mapping[str, Any], *, source: str = "config") -> table.Family:
    """The family of `model_type`, `DEFAULT` for one that is in no family.

    Raises `ValueError` naming `source` if it is no text, or if the model has no experts.
    """
    return ConfigKeys.of(config, source).family


def guessed(config: Mapping[str, Any], *, source: str = "config") -> str | None:
    """The key and the value of a `model_type` that no family lists; None if one does. Raises as `family_of`."""
    keys = ConfigKeys.of(config, source)
    model_type = keys.config.get("model_type", config.get("model_type"))
    known = model_type.removesuffix("_text") in keys.family.model_types
    return None if known else f"{keys.at}model_type: {shortened(model_type)}"


def layer_config(
    config: Mapping[str, Any],
    *,
    source: str = "config",
    layer: int | None = None,
    experts_only: bool = False,
    ignore_keys: Collection[str] = (),
    **overrides: Any,
) -> MoELayerConfig:
    """The MoE layers that a `config.json` describes. `overrides` set the other fields.

    They must have `max_tokens_per_rank`, which has no default. A whole config (`**config.model_dump()`) checks that it
    fits the model.

    Args:
        config: the parsed file, or `to_dict()` of a transformers config.
        source: its name in error messages, such as the path of the file.
        layer: the decoder layer that is meant, where layers differ.
        experts_only: read the sizes of the experts alone. `overrides` say everything else.
        ignore_keys: keys that are not read, although they look as if they changed what is computed.

    Raises:
        ValueError: a model in `OTHER_KINDS`, a key that is missing or out of range, a key that may change what is
            computed and that nothing reads, values that `MoELayerConfig` refuses, or overrides that contradict the
            config; names `source` and key.
    """
    keys = ConfigKeys.of(config, source)
    try:
        stored: dict[str, Any] = {
            "hidden_size": keys.positive("hidden_size"),
            "intermediate_size": keys.positive(*table.EXPERT_SIZE_KEYS, alike=False),
            "num_experts": keys.positive(*table.NUM_EXPERTS_KEYS),
        }
        if not experts_only:
            stored |= {
                "top_k": keys.positive(*table.TOP_K_KEYS),
                "router": _router(keys),
                "activation": _activation(keys, layer),
                "expert_bias": keys.family.expert_bias,
                "post_expert_norm": None,
                "shared_expert": _shared_expert(keys, layer),
            }
            keys.used.update((*table.DENSE_KEYS, *table.MTP_KEYS, *table.LAYER_KEYS, "hybrid_override_pattern"))
            keys.refuse_unread(config, ignore_keys)
        made = MoELayerConfig.model_validate(stored | overrides)
    except ValidationError as error:
        raise ValueError(f"{source}: {'; '.join(complaints(error))}") from None
    check_stated(source, stored, made)
    return made


def _shared_expert(keys: ConfigKeys, layer: int | None) -> SharedExpertConfig | None:
    if keys.family.squared_relu:
        # One expert of this size, however many the config counts, as in transformers.
        keys.count(*table.SHARED_COUNT_KEYS)
        return SharedExpertConfig(intermediate_size=keys.positive("moe_shared_expert_intermediate_size"))
    limit = keys.number_of_layer(table.SHARED_LIMIT_KEYS, layer)
    size, gated = keys.count("shared_expert_intermediate_size"), True
    if not size:
        count, gated = keys.count(*table.SHARED_COUNT_KEYS), False
        if count > 1 and keys.has("moe_shared_expert_intermediate_size"):
            # Some readers take it as the size of each, others as the size of all.
            key = keys.first(table.SHARED_COUNT_KEYS) or table.SHARED_COUNT_KEYS[0]
            keys.refuse(key, "at most 1 beside moe_shared_expert_intermediate_size")
        sizes = "moe_shared_expert_intermediate_size", *table.EXPERT_SIZE_KEYS
        size = count * keys.positive(*sizes, alike=False) if count else 0
    keys.used.add("moe_shared_expert_intermediate_size")
    if not size:
        return None
    if keys.raw("moe_router_enable_shared_expert") is False:
        keys.refuse("moe_router_enable_shared_expert", "true where there are shared experts")
    if keys.raw("shared_expert_combination_strategy") not in (None, "sum"):
        keys.refuse("shared_expert_combination_strategy", "sum", keys.raw("shared_expert_combination_strategy"))
    return SharedExpertConfig(intermediate_size=size, gated=gated, limit=limit)


def is_moe_layer(config: Mapping[str, Any], layer_index: int, *, source: str = "config") -> bool:
    """Whether decoder layer `layer_index` has experts (the others have one dense MLP).

    Layers for multi-token prediction, which follow the `num_hidden_layers` in DeepSeek-V3, count as layers.

    Raises `ValueError` as `layer_config`, and for a layer that the model does not have.
    """
    keys = ConfigKeys.of(config, source)
    layers = num_layers(config, source=source)
    check_integer("layer", layer_index, low=None)
    if not 0 <= layer_index < layers:
        raise ValueError(f"layer: {source} says {layers} layers, asked for layer {describe(layer_index)}")
    blocks = keys.block_types()
    if blocks:
        return layer_index < len(blocks) and blocks[layer_index] in ("moe", "E")
    kinds = keys.list_of_layers("mlp_layer_types")
    if kinds:
        kind = kinds[layer_index] if layer_index < len(kinds) else "sparse"
        if kind not in ("dense", "sparse"):
            keys.refuse("mlp_layer_types", "dense or sparse", kind)
        return kind == "sparse"
    if layer_index < keys.dense_layers():
        return False
    every: Any = keys.raw("moe_layer_freq")
    if isinstance(every, list | tuple):
        flags = keys.list_of_layers("moe_layer_freq")
        flag = flags[layer_index] if layer_index < len(flags) else 1
        if type(flag) not in (int, bool) or flag not in (0, 1):
            keys.refuse("moe_layer_freq", "0 or 1 for each layer", flag)
        return bool(flag)
    if layer_index % keys.positive("moe_layer_freq", default=1):
        return False
    dense = keys.list_of_layers("mlp_only_layers")
    return layer_index not in dense and (layer_index + 1) % keys.positive("decoder_sparse_step", default=1) == 0


def num_layers(config: Mapping[str, Any], *, source: str = "config", prediction: bool = True) -> int:
    """The number of decoder layers, with those for multi-token prediction that the config names if `prediction`."""
    keys = ConfigKeys.of(config, source)
    stated = len(keys.block_types()) or None
    # Where the config does not say how many layers for multi-token prediction there are, the files do.
    more = keys.count(*table.MTP_KEYS) if prediction and keys.first(table.MTP_KEYS) is not None else 0
    layers = keys.positive("num_hidden_layers", default=stated) + more
    if layers > table.MAX_LAYERS:
        raise ValueError(
            f"{source}: {keys.at}num_hidden_layers and num_nextn_predict_layers: expected at most {table.MAX_LAYERS} "
            f"in all, got {describe(layers)}"
        )
    return layers


def _router(keys: ConfigKeys) -> RouterConfig:
    if keys.kind in table.OTHER_KINDS:
        keys.refuse("model_type", f"another kind, since {table.OTHER_KINDS[keys.kind]}", keys.kind)
    family, kind = keys.family, _router_kind(keys)
    if family.renormalize is None:
        renormalize = keys.flag(*table.RENORMALIZE_KEYS, default=True)
    else:
        renormalize = keys.fixed_flag(*table.RENORMALIZE_KEYS, value=family.renormalize)
    scaling_factor = keys.positive_float(*table.SCALING_KEYS, default=1.0)
    num_groups = keys.positive(*table.NUM_GROUPS_KEYS, default=1)
    top_groups = keys.positive(*table.TOP_GROUPS_KEYS, default=1)
    method = keys.raw("topk_method")
    if keys.raw("use_grouped_topk") is False and num_groups != 1:
        keys.refuse("use_grouped_topk", f"true with {num_groups} groups of experts")
    if kind != "sigmoid":
        if num_groups != 1 and method != "greedy":
            keys.refuse(keys.first(table.NUM_GROUPS_KEYS) or "n_group", f"1 with a {kind} router that is not greedy")
        if keys.flag(*table.BIAS_KEYS, default=False):
            keys.refuse(keys.first(table.BIAS_KEYS) or table.BIAS_KEYS[0], f"false with a {kind} router", True)
        return RouterConfig(
            kind=kind,
            renormalize=renormalize or kind == "topk_softmax",
            bias=family.router_bias,
            scaling_factor=scaling_factor,
        )
    if family.correction_bias is None:
        if method not in (None, "noaux_tc", "greedy"):
            keys.refuse("topk_method", "noaux_tc or greedy")
        correction_bias = keys.flag(*table.BIAS_KEYS, default=True) and method != "greedy"
    else:
        if method not in (None, "noaux_tc"):
            keys.refuse("topk_method", "noaux_tc")
        correction_bias = keys.fixed_flag(*table.BIAS_KEYS, value=family.correction_bias)
    return RouterConfig(
        kind=kind,
        renormalize=renormalize,
        bias=family.router_bias,
        num_groups=num_groups,
        top_groups=top_groups if num_groups > 1 else 1,
        scaling_factor=scaling_factor,
        correction_bias=correction_bias,
    )


def _router_kind(keys: ConfigKeys) -> Literal["softmax", "topk_softmax", "sigmoid"]:
    kind, said = keys.family.router, keys.choice(*table.SCORING_KEYS)
    if said is not None:
        if said not in ("softmax", "sigmoid") or (kind is not None and not kind.endswith(said)):
            keys.refuse(keys.first(table.SCORING_KEYS) or table.SCORING_KEYS[0], kind or "softmax or sigmoid", said)
        if kind is None and said == "softmax" and keys.family.softmax_of_top_k:
            return "topk_softmax"
        return kind or said
    if kind is not None:
        return kind
    signs = (*table.NUM_GROUPS_KEYS, *table.BIAS_KEYS)
    noaux = keys.raw("topk_method") == "noaux_tc"
    return "sigmoid" if noaux or any(keys.has(key) for key in signs) else "softmax"


def _activation(keys: ConfigKeys, layer: int | None) -> ActivationConfig:
    if keys.family.squared_relu:
        for key, expected in (("mlp_hidden_act", "relu2"), ("moe_latent_size", None), ("mlp_bias", False)):
            if keys.raw(key) not in (None, expected):
                keys.refuse(key, "none" if expected is None else str(expected).lower(), keys.raw(key))
        return ActivationConfig(function="relu2", gated=False)
    for key in table.ACTIVATION_KEYS:
        if keys.raw(key) not in (None, "silu", "swish"):
            keys.refuse(key, "silu", keys.raw(key))
    if not keys.family.clamped_swiglu:
        if keys.raw("swiglu_limit"):
            keys.refuse("swiglu_limit", "none", keys.raw("swiglu_limit"))
        limit = keys.number_of_layer(table.LIMIT_KEYS, layer)
        return ActivationConfig() if limit is None else ActivationConfig(limit=limit, limit_on="function")
    return ActivationConfig(
        order="interleaved",
        alpha=keys.positive_float("swiglu_alpha", default=1.702),
        limit=keys.positive_float("swiglu_limit", default=7.0),
        up_offset=1.0,
    )
