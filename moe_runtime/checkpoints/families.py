"""Model families as data: how the `config.json` of each kind of model describes its MoE layers.

A `Family` holds the keys that models of some `model_type` use, and what is the same in all of them. Published files and
those that transformers 5 writes differ in some keys; both are read. To add a family, add a `Family` to `FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any, Literal

from pydantic import ValidationError

from moe_runtime.comm.arguments import check_integer, describe
from moe_runtime.config import ActivationConfig, MoELayerConfig, RouterConfig, SharedExpertConfig, complaints


@dataclass(frozen=True)
class Family:
    """What models of one kind have in common.

    Attributes:
        name: `mixtral`, `qwen2_moe`, `qwen3_moe`, `deepseek_v3` or `gpt_oss`.
        model_types: values of `model_type` of this family.
        num_experts_keys: keys of the number of routed experts; the first one present counts.
        intermediate_size_key: key of `I` of one routed expert.
        router: kind of `RouterConfig`.
        renormalize: whether the top-k weights are divided by their sum; None reads `norm_topk_prob`.
        default_renormalize: value for a config without `norm_topk_prob`, as in transformers.
        router_bias: the linear gate has a bias.
        group_limited: the router has groups, a correction bias and a scaling factor, as in DeepSeek-V3.
        clamped_swiglu: interleaved gate and up, and the activation of gpt-oss; else SwiGLU with gate above up.
        expert_bias: both projections of an expert have biases.
        shared: `gated` for a shared expert of `shared_expert_intermediate_size` with a sigmoid gate, `counted` for one
            of `n_shared_experts` times the size of a routed expert, None for none.
        dense_layers: which layers have no experts: `sparse_step` reads `mlp_only_layers` and `decoder_sparse_step`,
            `first_k` reads `first_k_dense_replace` and `moe_layer_freq`, None means that all have experts.
    """

    name: str
    model_types: tuple[str, ...]
    num_experts_keys: tuple[str, ...]
    intermediate_size_key: str
    router: Literal["softmax", "topk_softmax", "sigmoid"]
    renormalize: bool | None = None
    default_renormalize: bool = False
    router_bias: bool = False
    group_limited: bool = False
    clamped_swiglu: bool = False
    expert_bias: bool = False
    shared: Literal["gated", "counted"] | None = None
    dense_layers: Literal["sparse_step", "first_k"] | None = None


MIXTRAL = Family("mixtral", ("mixtral",), ("num_local_experts",), "intermediate_size", "softmax", renormalize=True)
QWEN2_MOE = Family(
    "qwen2_moe",
    ("qwen2_moe",),
    ("num_experts", "num_local_experts"),
    "moe_intermediate_size",
    "softmax",
    shared="gated",
    dense_layers="sparse_step",
)
QWEN3_MOE = Family(
    "qwen3_moe",
    ("qwen3_moe",),
    ("num_experts", "num_local_experts"),
    "moe_intermediate_size",
    "softmax",
    dense_layers="sparse_step",
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    ("deepseek_v3", "kimi_k2"),
    ("n_routed_experts", "num_local_experts"),
    "moe_intermediate_size",
    "sigmoid",
    default_renormalize=True,
    group_limited=True,
    shared="counted",
    dense_layers="first_k",
)
GPT_OSS = Family(
    "gpt_oss",
    ("gpt_oss",),
    ("num_local_experts", "num_experts"),
    "intermediate_size",
    "topk_softmax",
    renormalize=True,
    router_bias=True,
    clamped_swiglu=True,
    expert_bias=True,
)

FAMILIES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS)

MAX_LAYERS = 2000
"""Most decoder layers of a model: published ones have some hundred, and a list of all layers has to stay small."""


def family_of(config: Mapping[str, Any], *, source: str = "config") -> Family:
    """The family of `model_type`. Raises `ValueError` naming `source` and the known ones if it is unknown."""
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"{source}: model_type: expected one of {known}, got {shortened(model_type)}")


def layer_config(config: Mapping[str, Any], *, source: str = "config", **overrides: Any) -> MoELayerConfig:
    """The MoE layers that a `config.json` describes. `overrides` set the other fields.

    They must have `max_tokens_per_rank`, which has no default. A whole config (`**config.model_dump()`) checks that it
    fits the model.

    Args:
        config: the parsed file, or `to_dict()` of a transformers config.
        source: its name in error messages, such as the path of the file.

    Raises:
        ValueError: an unknown family, a key that is missing or out of range, values that `MoELayerConfig` refuses,
            or overrides that contradict the config; names `source` and key.
    """
    family = family_of(config, source=source)
    keys = _Keys(config, source)
    if keys.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act: expected silu, got {shortened(config['hidden_act'])}")
    try:
        stored: dict[str, Any] = {
            "hidden_size": keys.positive("hidden_size"),
            "intermediate_size": keys.positive(family.intermediate_size_key),
            "num_experts": keys.positive(*family.num_experts_keys),
            "top_k": keys.positive("num_experts_per_tok"),
            "router": _router(family, keys),
            "activation": _activation(family, keys),
            "expert_bias": family.expert_bias,
            "shared_expert": shared_expert(config, source=source),
        }
        made = MoELayerConfig.model_validate(stored | overrides)
    except ValidationError as error:
        raise ValueError(f"{source}: {'; '.join(complaints(error))}") from None
    for key, value in stored.items():
        if getattr(made, key) != value:
            raise ValueError(f"{key}: {source} says {value!r}, got {getattr(made, key)!r}")
    return made


def shared_expert(config: Mapping[str, Any], *, source: str = "config") -> SharedExpertConfig | None:
    """Size and gate of the shared expert of the MoE layers; None if there is none. Raises as `layer_config`."""
    family, keys = family_of(config, source=source), _Keys(config, source)
    if family.shared == "gated":
        size = keys.count("shared_expert_intermediate_size")
    elif family.shared == "counted":
        size = keys.count("n_shared_experts") * keys.positive(family.intermediate_size_key)
    else:
        return None
    return SharedExpertConfig(intermediate_size=size, gated=family.shared == "gated") if size else None


def moe_layers(config: Mapping[str, Any], *, source: str = "config") -> list[int]:
    """The decoder layers that have experts (`is_moe_layer`)."""
    return [layer for layer in range(_num_layers(config, source)) if is_moe_layer(config, layer, source=source)]


def is_moe_layer(config: Mapping[str, Any], layer_index: int, *, source: str = "config") -> bool:
    """Whether decoder layer `layer_index` has experts (the others have one dense MLP).

    Layers for multi-token prediction, which follow the `num_hidden_layers` in DeepSeek-V3, count as layers.

    Raises `ValueError` as `layer_config`, and for a layer that the model does not have.
    """
    family, keys = family_of(config, source=source), _Keys(config, source)
    layers = _num_layers(config, source)
    check_integer("layer", layer_index, low=None)
    if not 0 <= layer_index < layers:
        raise ValueError(f"layer: {source} says {layers} layers, asked for layer {describe(layer_index)}")
    if family.dense_layers == "sparse_step":
        dense = keys.get("mlp_only_layers") or []
        if not isinstance(dense, list | tuple):
            raise ValueError(f"{source}: mlp_only_layers: expected a list of layers, got {shortened(dense)}")
        if len(dense) > MAX_LAYERS:
            raise ValueError(f"{source}: mlp_only_layers: expected at most {MAX_LAYERS} layers, got {len(dense)}")
        return layer_index not in dense and (layer_index + 1) % keys.positive("decoder_sparse_step", default=1) == 0
    if family.dense_layers == "first_k":
        first, every = keys.count("first_k_dense_replace"), keys.positive("moe_layer_freq", default=1)
        return layer_index >= first and layer_index % every == 0
    return True


def _num_layers(config: Mapping[str, Any], source: str) -> int:
    keys = _Keys(config, source)
    layers = keys.positive("num_hidden_layers") + keys.count("num_nextn_predict_layers", default=0)
    if layers > MAX_LAYERS:
        raise ValueError(
            f"{source}: num_hidden_layers and num_nextn_predict_layers: expected at most {MAX_LAYERS} in all, "
            f"got {describe(layers)}"
        )
    return layers


def _router(family: Family, keys: _Keys) -> RouterConfig:
    renormalize = family.renormalize
    if renormalize is None:
        renormalize = keys.flag("norm_topk_prob", default=family.default_renormalize)
    if not family.group_limited:
        return RouterConfig(kind=family.router, renormalize=renormalize, bias=family.router_bias)
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if keys.get(key, expected) != expected:
            raise ValueError(f"{keys.source}: {key}: expected {expected}, got {shortened(keys.get(key))}")
    num_groups, top_groups = keys.positive("n_group"), keys.positive("topk_group")
    return RouterConfig(
        kind=family.router,
        renormalize=renormalize,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=keys.positive_float("routed_scaling_factor"),
        correction_bias=True,
    )


def _activation(family: Family, keys: _Keys) -> ActivationConfig:
    if not family.clamped_swiglu:
        return ActivationConfig()
    return ActivationConfig(
        order="interleaved",
        alpha=keys.positive_float("swiglu_alpha", default=1.702),
        limit=keys.positive_float("swiglu_limit", default=7.0),
        up_offset=1.0,
    )


@dataclass(frozen=True)
class _Keys:
    """Reads the values of a config with checks. A missing key has its default, if one is given."""

    config: Mapping[str, Any]
    source: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.config.get(key, default)

    def positive(self, *keys: str, default: int | None = None) -> int:
        return self._integer(keys, 1, "a positive integer", default)

    def count(self, key: str, default: int | None = None) -> int:
        return self._integer((key,), 0, "an integer of at least 0", default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise ValueError(f"{self.source}: {key}: expected true or false, got {shortened(value)}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{self.source}: {key}: expected a positive number, got {shortened(value)}")
        return float(value)

    def _integer(self, keys: tuple[str, ...], least: int, expected: str, default: int | None) -> int:
        value = next((self.config[key] for key in keys if key in self.config), default)
        if type(value) is not int or value < least:
            raise ValueError(f"{self.source}: {' or '.join(keys)}: expected {expected}, got {shortened(value)}")
        return value
