"""Families as data: what models of some kind do that their `config.json` does not say, and what its keys are called.

A `Family` says what models of some `model_type` do that their config does not say. Models of any other `model_type` are
read by `DEFAULT`. To add a family, add a `Family` to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


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
        softmax_of_top_k: a router that the config calls softmax takes the softmax of the top-k logits alone.
        clamped_swiglu: interleaved gate and up, and the activation of gpt-oss; else SwiGLU with gate above up.
        squared_relu: experts without a gate, with squared ReLU; `ACTIVATION_KEYS` of the config are not theirs.
        expert_bias: both projections of an expert have biases.
        names: names of tensors.
    """

    name: str
    model_types: tuple[str, ...] = ()
    router: Literal["softmax", "topk_softmax", "sigmoid"] | None = None
    renormalize: bool | None = None
    router_bias: bool = False
    correction_bias: bool | None = None
    softmax_of_top_k: bool = False
    clamped_swiglu: bool = False
    squared_relu: bool = False
    expert_bias: bool = False
    names: TensorNames = TensorNames()


NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of routed experts. Of these and of all keys below, the first one that is there counts."""
EXPERT_SIZE_KEYS = ("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
SCORING_KEYS = ("scoring_func", "score_function", "score_func", "moe_router_activation_func", "expert_selection_fn")
RENORMALIZE_KEYS = ("norm_topk_prob", "moe_renormalize", "route_norm")
SCALING_KEYS = ("routed_scaling_factor", "route_scale")
NUM_GROUPS_KEYS = ("n_group", "num_expert_group", "num_expert_groups")
TOP_GROUPS_KEYS = ("topk_group", "num_limited_groups")
BIAS_KEYS = ("use_routing_bias", "use_expert_bias", "moe_router_enable_expert_bias")
"""Keys of whether a sigmoid router has a correction bias."""
SHARED_COUNT_KEYS = ("n_shared_experts", "num_shared_experts", "num_shared_expert")
"""Keys of the size of a shared expert, in routed experts; `shared_expert_intermediate_size` is that of a gated one."""
DENSE_KEYS = ("first_k_dense_replace", "num_dense_layers")
"""Keys of the number of layers without experts at the beginning."""
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of the number of layers for multi-token prediction, which follow the others."""
LAYER_KEYS = ("moe_layer_freq", "mlp_only_layers", "decoder_sparse_step", "mlp_layer_types", "layers_block_type")
"""Other keys of which layers have experts, beside `hybrid_override_pattern`."""
ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
LIMIT_KEYS = ("expert_swiglu_limit_list",)
"""Keys of the clamp of the experts of each layer: 0 or null is none. It bounds `silu(gate)` and, both ways, `up`."""
SHARED_LIMIT_KEYS = ("share_expert_swiglu_limit_list",)
"""The same of the shared experts."""
TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of the config of the language model within that of a model with several parts."""

_BLOCK_SPARSE_NAMES = TensorNames(
    "block_sparse_moe", projections=(("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))
)
MIXTRAL = Family("mixtral", ("mixtral",), "softmax", renormalize=True, names=_BLOCK_SPARSE_NAMES)
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
FAMILIES = (
    MIXTRAL,
    GPT_OSS,
    Family("qwen2_moe", ("qwen2_moe",), "softmax", names=TensorNames(shared_experts=("shared_expert",))),
    Family("qwen3_moe", ("qwen3_moe",), "softmax"),
    Family("deepseek_v3", ("deepseek_v3", "kimi_k2"), "sigmoid", correction_bias=True),
    Family("deepseek_v2", ("deepseek_v2",), "softmax"),
    Family("deepseek_ocr2", ("deepseek_ocr2", "unlimited_ocr"), "softmax", renormalize=False),
    Family("mistral4", ("mistral4",), "softmax"),
    Family("minimax_m2", ("minimax_m2",), "sigmoid", renormalize=True, names=_BLOCK_SPARSE_NAMES),
    Family("olmoe", ("olmoe", "flex_olmo"), "softmax"),
    Family("granitemoe", ("granitemoe",), "topk_softmax", renormalize=True, names=TensorNames("block_sparse_moe")),
    Family("jamba", ("jamba",), "softmax", renormalize=False),
    Family("cohere2_moe", ("cohere2_moe",), correction_bias=False, softmax_of_top_k=True),
    Family("lfm2_moe", ("lfm2_moe",), "sigmoid"),
    Family(
        "nemotron_h",
        ("nemotron_h",),
        "sigmoid",
        correction_bias=True,
        squared_relu=True,
        names=TensorNames(
            "mixer", projections=((None, "up_proj", "down_proj"),), stacks=(("experts.up_proj", "experts.down_proj"),)
        ),
    ),
)

DEFAULT = Family(
    "default",
    (
        *("bailing_hybrid", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
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
    "axk1": "a norm follows its experts",
    "laguna": "its config says neither how its router scores nor that its shared expert has no gate",
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
