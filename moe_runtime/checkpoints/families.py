"""Families as data: how a `config.json` describes MoE layers, and what their tensors are called.

A `Family` says what models of some `model_type` do that their config does not say. Models of any other `model_type` are
read by `DEFAULT`. Published files and those that transformers 5 writes differ in some keys; both are read, also where a
model with several parts keeps them in a `text_config`. To add a family, add a `Family` to `FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shortened
from typing import Any, Literal, NoReturn

from pydantic import ValidationError

from moe_runtime.comm.arguments import check_integer, describe
from moe_runtime.config import (
    ActivationConfig,
    MoELayerConfig,
    RouterConfig,
    SharedExpertConfig,
    check_stated,
    complaints,
)


@dataclass(frozen=True)
class TensorNames:
    """Parts of the names of a decoder layer's tensors. Of several, the first that the files hold counts.

    Attributes:
        block: the module that holds router and experts, in messages about files that have none.
        projections: gate, up and down of one expert; None for the gate where there is none.
        stacks: gate-and-up (or up) and down of all experts, within the block.
        routers: the linear gate, within the block.
        correction_biases: its correction bias, within the block.
        shared_experts: the shared expert, within the block.
        shared_gate: the gate of a shared expert, within the block.
    """

    block: str = "mlp"
    projections: tuple[tuple[str | None, str, str], ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
    stacks: tuple[tuple[str, str], ...] = (
        ("experts.gate_up_proj", "experts.down_proj"),
        ("experts.fc1.weight", "experts.fc2.weight"),
        ("input_linear.weight", "output_linear.weight"),
    )
    routers: tuple[str, ...] = ("gate", "router", "gate.wg", "router.gate", "router.layer")
    correction_biases: tuple[str, ...] = (
        "gate.e_score_correction_bias",
        "e_score_correction_bias",
        "gate.expert_bias",
        "expert_bias",
        "experts.e_score_correction_bias",
        "router.e_score_correction_bias",
        "moe_statics.e_score_correction_bias",
    )
    shared_experts: tuple[str, ...] = ("shared_experts", "shared_expert", "shared_mlp")
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True)
class Family:
    """What models of one kind have in common and their `config.json` does not say.

    Attributes:
        name: `mixtral`, `qwen3_moe` and so on.
        model_types: values of `model_type` of this family, also with `_text` behind them.
        router: kind of `RouterConfig`; None reads it from the config (`SCORING_KEYS`), or guesses it from other keys.
        renormalize: whether the top-k weights are divided by their sum; None reads it (`RENORMALIZE_KEYS`).
        router_bias: the linear gate has a bias.
        correction_bias: a sigmoid router has a correction bias; None reads it (`topk_method`, `BIAS_KEYS`).
        clamped_swiglu: interleaved gate and up, and the activation of gpt-oss; else SwiGLU with gate above up.
        squared_relu: experts without a gate, with squared ReLU; `ACTIVATION_KEYS` of the config are not theirs.
        expert_bias: both projections of an expert have biases.
        defaults: values of keys that may be missing, as transformers has them.
        names: names of tensors.
    """

    name: str
    model_types: tuple[str, ...] = ()
    router: Literal["softmax", "topk_softmax", "sigmoid"] | None = None
    renormalize: bool | None = None
    router_bias: bool = False
    correction_bias: bool | None = None
    clamped_swiglu: bool = False
    squared_relu: bool = False
    expert_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    names: TensorNames = TensorNames()


NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of routed experts. Of these and of all keys below, the first one that is there counts."""
EXPERT_SIZE_KEYS = ("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
SCORING_KEYS = ("scoring_func", "score_function", "score_func", "moe_router_activation_func")
RENORMALIZE_KEYS = ("norm_topk_prob", "moe_renormalize", "route_norm")
SCALING_KEYS = ("routed_scaling_factor", "route_scale")
NUM_GROUPS_KEYS = ("n_group", "num_expert_group")
BIAS_KEYS = ("use_routing_bias", "use_expert_bias", "moe_router_enable_expert_bias")
"""Keys of whether a sigmoid router has a correction bias."""
SHARED_COUNT_KEYS = ("n_shared_experts", "num_shared_experts", "num_shared_expert")
"""Keys of the size of a shared expert, in routed experts; `shared_expert_intermediate_size` is that of a gated one."""
DENSE_KEYS = ("first_k_dense_replace", "num_dense_layers")
"""Keys of the number of layers without experts at the beginning."""
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of the number of layers for multi-token prediction, which follow the others."""
ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of the config of the language model within that of a model with several parts."""

MIXTRAL = Family(
    "mixtral",
    ("mixtral",),
    "softmax",
    renormalize=True,
    names=TensorNames("block_sparse_moe", projections=(("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    ("qwen2_moe",),
    "softmax",
    defaults={"norm_topk_prob": False, "shared_expert_intermediate_size": 5632},
    names=TensorNames(shared_experts=("shared_expert",)),
)
QWEN3_MOE = Family("qwen3_moe", ("qwen3_moe",), "softmax", defaults={"norm_topk_prob": False})
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    ("deepseek_v3", "kimi_k2"),
    "sigmoid",
    correction_bias=True,
    defaults={
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    },
)
GPT_OSS = Family(
    "gpt_oss",
    ("gpt_oss",),
    "topk_softmax",
    renormalize=True,
    router_bias=True,
    clamped_swiglu=True,
    expert_bias=True,
    names=TensorNames(routers=("router",)),
)
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    ("deepseek_v2",),
    "softmax",
    defaults={"norm_topk_prob": False, "n_shared_experts": 2, "topk_method": "greedy"},
)
MISTRAL4 = Family("mistral4", ("mistral4",), "softmax")
MINIMAX_M2 = Family(
    "minimax_m2",
    ("minimax_m2",),
    "sigmoid",
    renormalize=True,
    names=TensorNames("block_sparse_moe", projections=(("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))),
)
OLMOE = Family("olmoe", ("olmoe", "flex_olmo"), "softmax", defaults={"norm_topk_prob": False})
GRANITEMOE = Family(
    "granitemoe", ("granitemoe",), "topk_softmax", renormalize=True, names=TensorNames("block_sparse_moe")
)
JAMBA = Family("jamba", ("jamba",), "softmax", renormalize=False)
LFM2_MOE = Family("lfm2_moe", ("lfm2_moe",), "sigmoid", defaults={"num_dense_layers": 2})

NEMOTRON_H = Family(
    "nemotron_h",
    ("nemotron_h",),
    "sigmoid",
    correction_bias=True,
    squared_relu=True,
    defaults={"norm_topk_prob": True},
    names=TensorNames(
        "mixer", projections=((None, "up_proj", "down_proj"),), stacks=(("experts.up_proj", "experts.down_proj"),)
    ),
)

FAMILIES = (
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V3,
    GPT_OSS,
    DEEPSEEK_V2,
    MISTRAL4,
    MINIMAX_M2,
    OLMOE,
    GRANITEMOE,
    JAMBA,
    LFM2_MOE,
    NEMOTRON_H,
)

DEFAULT = Family(
    "default",
    (
        *("bailing_hybrid", "cohere2_moe", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
        *("glm4v_moe", "glm_moe_dsa", "kimi_linear", "mellum", "mimo_v2_flash", "minimax", "qwen3_5_moe"),
        *("qwen3_next", "qwen3_vl_moe", "solar_open"),
    ),
)
"""Of every other `model_type`. Those listed are known to be read rightly; for others, `Checkpoint` warns."""

OTHER_KINDS = {
    "phimoe": "its router masks the logits twice",
    "llama4": "its router scales the inputs of experts",
    "longcat_flash": "some of its experts compute nothing",
    "deepseek_v4": "its first layers choose experts by the id of the token, and the others score by sqrtsoftplus",
}
"""Kinds of models whose files look like those that are read, but whose layers compute something else."""

MAX_DEPTH = 4
"""Most configs within each other, counting the outermost."""

MAX_LAYERS = 2000
"""Most decoder layers of a model: published ones have some hundred, and a list of all layers has to stay small."""


def text_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The part of a config that describes MoE layers, and what goes before its keys in messages."""
    at, found = "", config
    for _ in range(MAX_DEPTH):
        if any(key in found for key in NUM_EXPERTS_KEYS):
            return at, found
        key = next((key for key in TEXT_KEYS if isinstance(found.get(key), Mapping)), None)
        if key is None:
            break
        at, found = f"{at}{key}.", found[key]
    return "", config


def family_of(config: Mapping[str, Any], *, source: str = "config") -> Family:
    """The family of `model_type`, `DEFAULT` for one that is in no family.

    Raises `ValueError` naming `source` if it is no text, or if the model has no experts.
    """
    return _Keys.of(config, source).family


def guessed(config: Mapping[str, Any], *, source: str = "config") -> str | None:
    """The key and the value of a `model_type` that no family lists; None if one does. Raises as `family_of`."""
    keys = _Keys.of(config, source)
    model_type = keys.config.get("model_type", config.get("model_type"))
    known = model_type.removesuffix("_text") in keys.family.model_types
    return None if known else f"{keys.at}model_type: {shortened(model_type)}"


def layer_config(
    config: Mapping[str, Any], *, source: str = "config", experts_only: bool = False, **overrides: Any
) -> MoELayerConfig:
    """The MoE layers that a `config.json` describes. `overrides` set the other fields.

    They must have `max_tokens_per_rank`, which has no default. A whole config (`**config.model_dump()`) checks that it
    fits the model.

    Args:
        config: the parsed file, or `to_dict()` of a transformers config.
        source: its name in error messages, such as the path of the file.
        experts_only: read the sizes of the experts alone. `overrides` say everything else.

    Raises:
        ValueError: a model in `OTHER_KINDS`, a key that is missing or out of range, values that `MoELayerConfig`
            refuses, or overrides that contradict the config; names `source` and key.
    """
    keys = _Keys.of(config, source)
    try:
        stored: dict[str, Any] = {
            "hidden_size": keys.positive("hidden_size"),
            "intermediate_size": keys.positive(*EXPERT_SIZE_KEYS),
            "num_experts": keys.positive(*NUM_EXPERTS_KEYS),
        }
        if not experts_only:
            stored |= {
                "top_k": keys.positive(*TOP_K_KEYS),
                "router": _router(keys),
                "activation": _activation(keys),
                "expert_bias": keys.family.expert_bias,
                "post_expert_norm": None,
                "shared_expert": shared_expert(config, source=source),
            }
        made = MoELayerConfig.model_validate(stored | overrides)
    except ValidationError as error:
        raise ValueError(f"{source}: {'; '.join(complaints(error))}") from None
    check_stated(source, stored, made)
    return made


def shared_expert(config: Mapping[str, Any], *, source: str = "config") -> SharedExpertConfig | None:
    """Size and gate of the shared expert of the MoE layers; None if there is none. Raises as `layer_config`."""
    keys = _Keys.of(config, source)
    if keys.family.squared_relu:
        # One expert of this size, however many the config counts.
        return SharedExpertConfig(intermediate_size=keys.positive("moe_shared_expert_intermediate_size"))
    size, gated = keys.count("shared_expert_intermediate_size"), True
    if not size:
        count, gated = keys.count(*SHARED_COUNT_KEYS), False
        size = count * keys.positive("moe_shared_expert_intermediate_size", *EXPERT_SIZE_KEYS) if count else 0
    return SharedExpertConfig(intermediate_size=size, gated=gated) if size else None


def moe_layers(config: Mapping[str, Any], *, source: str = "config") -> list[int]:
    """The decoder layers that have experts (`is_moe_layer`)."""
    return [layer for layer in range(num_layers(config, source=source)) if is_moe_layer(config, layer, source=source)]


def is_moe_layer(config: Mapping[str, Any], layer_index: int, *, source: str = "config") -> bool:
    """Whether decoder layer `layer_index` has experts (the others have one dense MLP).

    Layers for multi-token prediction, which follow the `num_hidden_layers` in DeepSeek-V3, count as layers.

    Raises `ValueError` as `layer_config`, and for a layer that the model does not have.
    """
    keys = _Keys.of(config, source)
    layers = num_layers(config, source=source)
    check_integer("layer", layer_index, low=None)
    if not 0 <= layer_index < layers:
        raise ValueError(f"layer: {source} says {layers} layers, asked for layer {describe(layer_index)}")
    blocks = keys.list_of_layers("layers_block_type") or keys.text("hybrid_override_pattern")
    if blocks:
        return layer_index < len(blocks) and blocks[layer_index] in ("moe", "E")
    kinds = keys.list_of_layers("mlp_layer_types")
    if kinds:
        kind = kinds[layer_index] if layer_index < len(kinds) else "sparse"
        if kind not in ("dense", "sparse"):
            keys.refuse("mlp_layer_types", "dense or sparse", kind)
        return kind == "sparse"
    if layer_index < keys.count(*DENSE_KEYS):
        return False
    every: Any = keys.config.get("moe_layer_freq")
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
    keys = _Keys.of(config, source)
    stated = len(keys.list_of_layers("layers_block_type")) or None
    layers = keys.positive("num_hidden_layers", default=stated) + (keys.count(*MTP_KEYS) if prediction else 0)
    if layers > MAX_LAYERS:
        raise ValueError(
            f"{source}: {keys.at}num_hidden_layers and num_nextn_predict_layers: expected at most {MAX_LAYERS} in all, "
            f"got {describe(layers)}"
        )
    return layers


def _router(keys: _Keys) -> RouterConfig:
    if keys.kind in OTHER_KINDS:
        keys.refuse("model_type", f"another kind, since {OTHER_KINDS[keys.kind]}", keys.kind)
    family, kind = keys.family, _router_kind(keys)
    renormalize = family.renormalize
    if renormalize is None:
        renormalize = keys.flag(*RENORMALIZE_KEYS, default=True)
    scaling_factor = keys.positive_float(*SCALING_KEYS, default=1.0)
    num_groups = keys.positive(*NUM_GROUPS_KEYS, default=1)
    method = keys.config.get("topk_method", family.defaults.get("topk_method"))
    if kind != "sigmoid":
        if num_groups != 1 and method != "greedy":
            keys.refuse(keys.first(NUM_GROUPS_KEYS) or "n_group", f"1 with a {kind} router that is not greedy")
        return RouterConfig(kind=kind, renormalize=renormalize, bias=family.router_bias, scaling_factor=scaling_factor)
    correction_bias = family.correction_bias
    if correction_bias is None:
        if method not in (None, "noaux_tc", "greedy"):
            keys.refuse("topk_method", "noaux_tc or greedy")
        correction_bias = method != "greedy" and keys.flag(*BIAS_KEYS, default=True)
    elif method not in (None, "noaux_tc"):
        keys.refuse("topk_method", "noaux_tc")
    return RouterConfig(
        kind=kind,
        renormalize=renormalize,
        bias=family.router_bias,
        num_groups=num_groups,
        top_groups=keys.positive("topk_group", default=1) if num_groups > 1 else 1,
        scaling_factor=scaling_factor,
        correction_bias=correction_bias,
    )


def _router_kind(keys: _Keys) -> Literal["softmax", "topk_softmax", "sigmoid"]:
    kind, key = keys.family.router, keys.first(SCORING_KEYS)
    said = None if key is None else keys.config[key]
    if key is not None and said is not None:
        if said not in ("softmax", "sigmoid") or (kind is not None and not kind.endswith(said)):
            keys.refuse(key, kind or "softmax or sigmoid")
        return kind or said
    if kind is not None:
        return kind
    signs = (*NUM_GROUPS_KEYS, *BIAS_KEYS)
    noaux = keys.config.get("topk_method") == "noaux_tc"
    return "sigmoid" if noaux or any(keys.config.get(key) is not None for key in signs) else "softmax"


def _activation(keys: _Keys) -> ActivationConfig:
    if keys.family.squared_relu:
        for key, expected in (("mlp_hidden_act", "relu2"), ("moe_latent_size", None), ("mlp_bias", False)):
            if keys.config.get(key, expected) not in (None, expected):
                keys.refuse(key, "none" if expected is None else str(expected).lower())
        return ActivationConfig(function="relu2", gated=False)
    for key in ACTIVATION_KEYS:
        if keys.config.get(key) not in (None, "silu", "swish"):
            keys.refuse(key, "silu")
    if not keys.family.clamped_swiglu:
        if keys.config.get("swiglu_limit") is not None:
            keys.refuse("swiglu_limit", "none")
        return ActivationConfig()
    return ActivationConfig(
        order="interleaved",
        alpha=keys.positive_float("swiglu_alpha", default=1.702),
        limit=keys.positive_float("swiglu_limit", default=7.0),
        up_offset=1.0,
    )


@dataclass(frozen=True)
class _Keys:
    """Reads the values of a config with checks.

    Of several keys, the first one that is there counts. A missing one has the default of its family, or else the
    `default` of the call; one that is null has the latter. Without a `default`, both are errors.
    """

    config: Mapping[str, Any]
    source: str
    at: str
    family: Family
    kind: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> _Keys:
        at, found = text_config(config)
        model_type = found.get("model_type", config.get("model_type"))
        kind = model_type.removesuffix("_text") if isinstance(model_type, str) else ""
        family = next((family for family in FAMILIES if kind in family.model_types), DEFAULT)
        keys = cls(found, source, at, family, kind)
        if not isinstance(model_type, str):
            keys.refuse("model_type", "a text", model_type)
        if family is DEFAULT and keys.first(NUM_EXPERTS_KEYS) is None:
            keys.refuse("model_type", f"a model with experts ({' or '.join(NUM_EXPERTS_KEYS)})", model_type)
        return keys

    def first(self, names: tuple[str, ...]) -> str | None:
        """The first of these keys that is there, and not null if one is not."""
        there = [name for name in names if name in self.config]
        return next((name for name in there if self.config[name] is not None), there[0] if there else None)

    def refuse(self, key: str, expected: str, *got: Any) -> NoReturn:
        """Raise `ValueError` for the value of `key`, or for `got` in it."""
        value = got[0] if got else self.config.get(key)
        raise ValueError(f"{self.source}: {self.at}{key}: expected {expected}, got {shortened(value)}")

    def positive(self, *names: str, default: int | None = None) -> int:
        return self._integer(names, 1, "a positive integer", default)

    def count(self, *names: str) -> int:
        return self._integer(names, 0, "an integer of at least 0", 0)

    def flag(self, *names: str, default: bool) -> bool:
        key, value = self._value(names, default)
        if type(value) is not bool:
            self.refuse(key, "true or false", value)
        return value

    def positive_float(self, *names: str, default: float) -> float:
        key, value = self._value(names, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self.refuse(key, "a positive number", value)
        return float(value)

    def text(self, key: str) -> str:
        """A text; empty if there is none."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "a text")
        return value or ""

    def list_of_layers(self, key: str) -> Sequence[Any]:
        """A list with at most one item for each layer; empty if there is none."""
        value = self.config.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            self.refuse(key, "a list of layers")
        if len(value) > MAX_LAYERS:
            raise ValueError(f"{self.source}: {self.at}{key}: expected at most {MAX_LAYERS} layers, got {len(value)}")
        return value

    def _integer(self, names: tuple[str, ...], least: int, expected: str, default: int | None) -> int:
        key, value = self._value(names, default)
        if type(value) is not int or value < least:
            self.refuse(key, expected, value)
        return value

    def _value(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        """The key that counts, or all of them if none is there, and its value."""
        key = self.first(names)
        if key is None:
            known = (self.family.defaults[name] for name in names if name in self.family.defaults)
            return " or ".join(names), next(known, default)
        value = self.config[key]
        return key, default if value is None else value
