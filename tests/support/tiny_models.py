"""Small random models of every family, made by transformers; imported where transformers is known to be there."""

from __future__ import annotations

from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

CLASSES = {
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
}
"""Families that tests of all families run."""

_OTHERS = {"glm4_moe": "Glm4Moe"}
"""Those that tests ask for by name."""

# Sizes are apart, so that no key can stand for another; layer 1 of some families is dense.
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
_EXTRA: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 12},
    "qwen2_moe": {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 12,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 12,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "head_dim": 32,
    },
    "deepseek_v3": {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    },
    "glm4_moe": {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "head_dim": 32,
    },
    "gpt_oss": {"intermediate_size": 48, "num_local_experts": 12, "head_dim": 32, "sliding_window": 16},
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The transformers config of a tiny model of `family`."""
    settings = {**_COMMON, **_EXTRA[family], **changes}
    return getattr(transformers, f"{(CLASSES | _OTHERS)[family]}Config")(**settings)


def tiny_model(family: str, seed: int, **changes: Any) -> Any:
    """A model in float32 whose weights are bf16 numbers, normal with variance 1 / fan-in; biases normal."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{(CLASSES | _OTHERS)[family]}ForCausalLM")(tiny_config(family, **changes)).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.1)
            elif "norm" in name or "rotary" in name:
                continue
            elif tensor.ndim == 1 or name.endswith("proj_bias"):
                tensor.normal_(std=0.3).copy_(tensor.bfloat16())
            else:
                # The experts of gpt-oss are stored transposed.
                fan_in = tensor.shape[-2] if family == "gpt_oss" and tensor.ndim == 3 else tensor.shape[-1]
                tensor.normal_(std=fan_in**-0.5).copy_(tensor.bfloat16())
    return model


def moe_blocks(model: Any) -> list[Any]:
    """The MoE blocks of a model, in the order of its layers."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def gate_of(block: Any) -> Any:
    """The router of a block."""
    return block.router if hasattr(block, "router") else block.gate


def shared_of(block: Any) -> Any:
    """The shared expert of a block, or None."""
    return getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
