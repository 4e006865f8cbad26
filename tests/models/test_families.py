"""Families: what `config.json` files say, as published and as transformers writes them, and each way to be wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.checkpoints.families import family_of, is_moe_layer, layer_config
from moe_runtime.checkpoints.family_table import FAMILIES, Family
from moe_runtime.config import ActivationConfig, MoELayerConfig, RouterConfig, SharedExpertConfig, load_config
from moe_runtime.launch import run
from tests.support.published_configs import PUBLISHED, moe_layers

MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
QWEN2 = "Qwen/Qwen1.5-MoE-A2.7B"
QWEN3 = "Qwen/Qwen3-235B-A22B-FP8"
DEEPSEEK_V3 = "deepseek-ai/DeepSeek-R1"
KIMI_K2 = "moonshotai/Kimi-K2-Instruct"
GPT_OSS = "openai/gpt-oss-120b"
NEMOTRON = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"

GPT_OSS_ACTIVATION = ActivationConfig(order="interleaved", alpha=1.702, limit=7.0, up_offset=1.0)

SIGMOID: dict[str, Any] = {"kind": "sigmoid", "correction_bias": True}
EXPECTED: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
    MIXTRAL: (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_experts": 8, "top_k": 2},
        range(32),
    ),
    QWEN2: (
        {
            "hidden_size": 2048,
            "intermediate_size": 1408,
            "num_experts": 60,
            "top_k": 4,
            "router": RouterConfig(renormalize=False),
            "shared_expert": SharedExpertConfig(intermediate_size=5632, gated=True),
        },
        range(24),
    ),
    QWEN3: (
        {"hidden_size": 4096, "intermediate_size": 1536, "num_experts": 128, "top_k": 8},
        range(94),
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        {"hidden_size": 2048, "intermediate_size": 768, "num_experts": 128, "top_k": 8},
        range(48),
    ),
    DEEPSEEK_V3: (
        {
            "hidden_size": 7168,
            "intermediate_size": 2048,
            "num_experts": 256,
            "top_k": 8,
            "router": RouterConfig(**SIGMOID, num_groups=8, top_groups=4, scaling_factor=2.5),
            "shared_expert": SharedExpertConfig(intermediate_size=2048),
        },
        range(3, 62),
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            "hidden_size": 2048,
            "intermediate_size": 1408,
            "num_experts": 64,
            "top_k": 6,
            "router": RouterConfig(renormalize=False),
            "shared_expert": SharedExpertConfig(intermediate_size=2816),
        },
        range(1, 27),
    ),
    KIMI_K2: (
        {
            "hidden_size": 7168,
            "intermediate_size": 2048,
            "num_experts": 384,
            "top_k": 8,
            "router": RouterConfig(**SIGMOID, scaling_factor=2.827),
            "shared_expert": SharedExpertConfig(intermediate_size=2048),
        },
        range(1, 61),
    ),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (
        {
            "hidden_size": 2304,
            "intermediate_size": 1024,
            "num_experts": 256,
            "top_k": 8,
            "router": RouterConfig(**SIGMOID, scaling_factor=2.446),
            "shared_expert": SharedExpertConfig(intermediate_size=1024),
        },
        range(1, 27),
    ),
    GPT_OSS: (
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_experts": 128,
            "top_k": 4,
            "router": RouterConfig(kind="topk_softmax", bias=True),
            "activation": GPT_OSS_ACTIVATION,
            "expert_bias": True,
        },
        range(36),
    ),
    "zai-org/GLM-4.5": (
        {
            "hidden_size": 5120,
            "intermediate_size": 1536,
            "num_experts": 160,
            "top_k": 8,
            "router": RouterConfig(**SIGMOID, scaling_factor=2.5),
            "shared_expert": SharedExpertConfig(intermediate_size=1536),
        },
        range(3, 93),
    ),
    "XiaomiMiMo/MiMo-V2-Flash": (
        {
            "hidden_size": 4096,
            "intermediate_size": 2048,
            "num_experts": 256,
            "top_k": 8,
            "router": RouterConfig(**SIGMOID),
        },
        range(1, 48),
    ),
    "MiniMaxAI/MiniMax-M2": (
        {
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_experts": 256,
            "top_k": 8,
            "router": RouterConfig(**SIGMOID),
        },
        range(62),
    ),
    NEMOTRON: (
        {
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "num_experts": 128,
            "top_k": 6,
            "router": RouterConfig(**SIGMOID, scaling_factor=2.5),
            "activation": ActivationConfig(function="relu2", gated=False),
            "shared_expert": SharedExpertConfig(intermediate_size=3712),
        },
        [n for n, kind in enumerate("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME") if kind == "E"],
    ),
}
"""What published models are: the fields of their layers, and which layers have experts, the last one of all too."""


@pytest.mark.parametrize("name", EXPECTED)
def test_published_configs(name: str) -> None:
    config, (fields, layers) = PUBLISHED[name], EXPECTED[name]
    assert layer_config(config, max_tokens_per_rank=8) == MoELayerConfig(**fields, max_tokens_per_rank=8)
    assert moe_layers(config) == list(layers)
    beyond = layers[-1] + 1
    for layer in (-1, beyond):
        with pytest.raises(ValueError, match=f"layer: config says {beyond} layers, asked for layer {layer}"):
            is_moe_layer(config, layer)


TINY_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.name in TINY_FAMILIES], ids=lambda family: family.name
)
def test_what_transformers_writes_means_what_its_model_does(family: Family, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support.tiny_models import gate_of, shared_of, tiny_config, tiny_model

    changes = {"swiglu_alpha": 1.5, "swiglu_limit": 5.0} if family.name == "gpt_oss" else {}
    tiny_config(family.name, **changes).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert family_of(data) is family
    model = tiny_model(family.name, 0, **changes)
    got = layer_config(data, max_tokens_per_rank=8)
    assert got == layer_config(model.config.to_dict(), max_tokens_per_rank=8)
    for index, decoder in enumerate(model.model.layers):
        block = decoder.mlp
        assert is_moe_layer(data, index) == hasattr(block, "experts")
        if not hasattr(block, "experts"):
            continue
        gate, experts, shared = gate_of(block), block.experts, shared_of(block)
        rows = experts.gate_up_proj.mT if experts.is_transposed else experts.gate_up_proj
        assert tuple(rows.shape) == (got.num_experts, 2 * got.intermediate_size, got.hidden_size)
        assert (got.activation.order == "interleaved") != experts.is_concatenated
        assert got.expert_bias == experts.has_bias
        assert got.top_k == gate.top_k
        assert got.router.bias == (getattr(gate, "bias", None) is not None)
        assert got.router.correction_bias == hasattr(gate, "e_score_correction_bias")
        assert got.router.renormalize == getattr(gate, "norm_topk_prob", True)
        assert got.router.num_groups == getattr(gate, "num_group", 1)
        assert got.router.top_groups == getattr(gate, "topk_group", 1)
        assert got.router.scaling_factor == getattr(gate, "routed_scaling_factor", 1.0)
        assert (got.shared_expert is None) == (shared is None)
        if got.shared_expert is not None:
            assert shared.gate_proj.out_features == got.shared_expert.intermediate_size
            assert got.shared_expert.gated == hasattr(block, "shared_expert_gate")
    if family.name == "gpt_oss":
        assert got.activation == GPT_OSS_ACTIVATION.replace(alpha=1.5, limit=5.0)


@pytest.mark.parametrize(
    ("name", "renormalize"),
    [(MIXTRAL, True), (QWEN2, False), (QWEN3, False), (DEEPSEEK_V3, True)],
)
def test_weights_are_divided_by_their_sum_where_transformers_does_by_default(name: str, renormalize: bool) -> None:
    published = {key: value for key, value in PUBLISHED[name].items() if key != "norm_topk_prob"}
    assert layer_config(published, max_tokens_per_rank=8).router.renormalize is renormalize


def test_the_activation_of_gpt_oss_is_the_published_one_by_default() -> None:
    published = {key: value for key, value in PUBLISHED[GPT_OSS].items() if key != "swiglu_limit"}
    assert layer_config(published, max_tokens_per_rank=8).activation == GPT_OSS_ACTIVATION


CONFIGS = {
    "mixtral_8x7b": MIXTRAL,
    "qwen3_235b_a22b": QWEN3,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI_K2,
    "gpt_oss_120b": GPT_OSS,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packaged_configs_are_the_published_models(name: str) -> None:
    layer = load_config(name).layer
    assert layer == layer_config(PUBLISHED[CONFIGS[name]], **layer.model_dump())


@pytest.mark.parametrize("name", ["mixtral_8x7b", "deepseek_v3", "gpt_oss_120b"])
def test_packaged_configs_are_the_defaults_of_transformers(name: str) -> None:
    """Their defaults are these models."""
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig

    made = {"mixtral_8x7b": MixtralConfig, "deepseek_v3": DeepseekV3Config, "gpt_oss_120b": GptOssConfig}[name]()
    layer = load_config(name).layer
    assert layer == layer_config(made.to_dict(), **layer.model_dump())


TINY = {
    "tiny_mixtral": MIXTRAL,
    "tiny_qwen2_moe": QWEN2,
    "tiny_qwen3_moe": QWEN3,
    "tiny_deepseek_v3": DEEPSEEK_V3,
    "tiny_kimi_k2": KIMI_K2,
    "tiny_gpt_oss": GPT_OSS,
    "tiny_nemotron_h": NEMOTRON,
}


@pytest.mark.parametrize("name", TINY)
def test_tiny_configs_run_and_are_of_their_family(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the sizes, a config of the family has the same router, activation, biases and kind of shared expert."""
    family, layer = layer_config(PUBLISHED[TINY[name]], max_tokens_per_rank=8), load_config(name).layer
    assert (layer.router, layer.activation, layer.expert_bias) == (family.router, family.activation, family.expert_bias)
    assert (layer.shared_expert is None) == (family.shared_expert is None)
    if layer.shared_expert is not None and family.shared_expert is not None:
        assert layer.shared_expert.gated == family.shared_expert.gated
    assert run.main(["--config", name, "--steps", "1"]) == 0
    assert "inside" in capsys.readouterr().out


def test_layers_between_may_be_dense() -> None:
    config = PUBLISHED[DEEPSEEK_V3] | {"moe_layer_freq": 2, "num_hidden_layers": 7, "num_nextn_predict_layers": 0}
    assert [layer for layer in range(7) if is_moe_layer(config, layer)] == [4, 6]
    config = PUBLISHED[QWEN3] | {"decoder_sparse_step": 3, "mlp_only_layers": [5], "num_hidden_layers": 9}
    assert [layer for layer in range(9) if is_moe_layer(config, layer)] == [2, 8]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (DEEPSEEK_V3, {"n_shared_experts": 0}),
        (QWEN2, {"shared_expert_intermediate_size": 0}),
        (MIXTRAL, {}),
    ],
)
def test_no_shared_expert(name: str, changes: dict[str, Any]) -> None:
    assert layer_config(PUBLISHED[name] | changes, max_tokens_per_rank=8).shared_expert is None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (MIXTRAL, {"model_type": "phimoe"}, "model_type: expected another kind, since .*, got 'phimoe'"),
        (MIXTRAL, {"model_type": None}, "model_type: .*got None"),
        (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act: expected silu, got 'gelu'"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts: expected a positive integer, got 0"),
        (MIXTRAL, {"num_experts_per_tok": True}, "num_experts_per_tok: expected a positive integer, got True"),
        (QWEN2, {"num_experts": "60"}, "num_experts: .*, got '60'"),
        (QWEN2, {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, got 1"),
        (QWEN2, {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size: .*got -1"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func: expected sigmoid, got 'softmax'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method: expected noaux_tc, got 'greedy'"),
        (DEEPSEEK_V3, {"n_group": 0}, "n_group: expected a positive integer, got 0"),
        (DEEPSEEK_V3, {"routed_scaling_factor": float("inf")}, "routed_scaling_factor: .*positive number, got inf"),
        (DEEPSEEK_V3, {"routed_scaling_factor": 10**400}, "routed_scaling_factor: .*positive number, got 1000"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit: expected a positive number, got 0"),
    ],
)
def test_a_config_that_is_wrong(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^file: {message}"):
        layer_config(PUBLISHED[name] | changes, source="file", max_tokens_per_rank=8)


def test_what_the_layer_refuses() -> None:
    with pytest.raises(ValueError, match=r"num_groups: expected a divisor of num_experts = 256, got 7"):
        layer_config(PUBLISHED[DEEPSEEK_V3] | {"n_group": 7}, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match=r"mlp_only_layers: expected a list of layers, got 3"):
        is_moe_layer(PUBLISHED[QWEN3] | {"mlp_only_layers": 3}, 0)


@pytest.mark.parametrize("name", EXPECTED)
def test_overrides_that_contradict(name: str) -> None:
    config = layer_config(PUBLISHED[name], max_tokens_per_rank=8, combine_format="mxfp8", token_format="mxfp8")
    assert layer_config(PUBLISHED[name], **config.model_dump()) == config
    other_bias, other_shared = not config.expert_bias, SharedExpertConfig(intermediate_size=1)
    for key, value in (("top_k", 1), ("expert_bias", other_bias), ("shared_expert", other_shared)):
        with pytest.raises(ValueError, match=f"{key}: config says .*, got"):
            layer_config(PUBLISHED[name], max_tokens_per_rank=8, **{key: value})


def test_what_a_config_refuses_names_its_source() -> None:
    described = PUBLISHED[GPT_OSS] | {"num_experts_per_tok": 999, "experts_per_token": 999}
    with pytest.raises(ValueError, match=r"^model/config\.json: top_k: expected at most") as caught:
        layer_config(described, source="model/config.json", max_tokens_per_rank=8)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^config: max_tokens_per_rank: [^;]*, got 0$"):
        layer_config(PUBLISHED[GPT_OSS], max_tokens_per_rank=0)
