"""What published `config.json` files say of experts and routers: keys and values that are read, or look as if they were
to be; other keys are left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.families import is_moe_layer, num_layers

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")
)
"""By model."""

REFUSED = {
    "CohereLabs/Command-A+": "model_type",
    "MiniMaxAI/MiniMax-M3": "hidden_act",
    "baidu/ERNIE-4.5-21B-A3B": "num_experts_per_tok",
    "dbrx_132b": "model_type",
    "deepseek-ai/DeepSeek-V2.5": "n_group",
    "deepseek-ai/DeepSeek-V4-Flash": "model_type",
    "deepseek-ai/DeepSeek-V4-Pro": "model_type",
    "google/gemma-4-26B-A4B": "num_experts_per_tok",
    "ibm-granite/granite-4.0-h-small": "shared_intermediate_size",
    "ibm-granite/granite-4.0-h-tiny": "shared_intermediate_size",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "model_type",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "model_type",
    "moonshotai/Kimi-K3": "hidden_act",
    "nvidia/Gemma-4-31B-IT-NVFP4": "model_type",
    "nvidia/MiniMax-M3-NVFP4": "hidden_act",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "moe_latent_size",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "moe_latent_size",
    "phimoe": "model_type",
    "poolside/Laguna-S-2.1-FP8": "model_type",
    "poolside/Laguna-XS.2-FP8": "model_type",
    "sgl-project/DeepSeek-V4-Flash-FP8": "scoring_func",
    "sgl-project/DeepSeek-V4-Pro-FP8": "scoring_func",
    "stepfun-ai/Step-3.7-Flash-FP8": "share_expert_dim",
    "tencent/Hunyuan-A13B-Instruct": "moe_intermediate_size",
}
"""The models that are refused, and the key that says why."""


def moe_layers(config: Mapping[str, Any], *, source: str = "config") -> list[int]:
    """The decoder layers that have experts."""
    layers = range(num_layers(config, source=source))
    return [layer for layer in layers if is_moe_layer(config, layer, source=source)]
