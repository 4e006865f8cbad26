"""A program that writes tiny random checkpoints as transformers does: `python tiny_models.py FOLDER`.

`qwen3_fp8` has the experts of `qwen3` in FP8 blocks, and `qwen3_rounded` what these say, in bf16. `dense` has none.
A token of `qwen3_top6` has more experts than one rank of two.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128, "intermediate_size": 512, "num_experts_per_tok": 2}
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0}
# The only sizes of latent attention that vLLM has kernels for on GPUs.
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3MoeConfig", {**HEADS, **EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3_top6": (
        "Qwen3MoeConfig",
        {**HEADS, **EXPERTS, "num_experts_per_tok": 6, "num_experts": 8, "norm_topk_prob": True},
    ),
    "glm4": (
        "Glm4MoeConfig",
        {**HEADS, **EXPERTS, **SHARED, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**HEADS, "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **EXPERTS,
            **SHARED,
            **LATENT,
            # Few, since they are wide: the experts have to count beside them.
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "dense": ("Qwen3Config", {**HEADS, "intermediate_size": 512}),
}


def write(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    kind, fields = MODELS[name]
    config = getattr(transformers, kind)(**(COMMON | fields))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        # Larger than usual, so that every layer counts and log-probabilities differ.
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
            elif "bias" in key or "sinks" in key:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_fp8(source: Path, quantized: Path, rounded: Path) -> None:
    """Copies of `source` with experts in FP8 with scales of 128x128 blocks, and with what these say in bf16."""
    for folder in (quantized, rounded):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {key: value for file in source.glob("*.safetensors") for key, value in load_file(file).items()}
    stored, said = dict(tensors), dict(tensors)
    for key, value in tensors.items():
        if ".experts." in key and key.endswith("_proj.weight"):
            blocks = value.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scales = blocks.abs().amax((1, 3)) / 448
            quants = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            stored[key], stored[f"{key}_scale_inv"] = quants.reshape(value.shape), scales
            said[key] = (quants.float() * scales[:, None, :, None]).reshape(value.shape).bfloat16()
    for folder, held in ((quantized, stored), (rounded, said)):
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    others = [f"self_attn.{name}_proj" for name in "qkvo"] + ["mlp.gate"]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.{name}" for i in range(2) for name in others)],
    }
    (quantized / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for each in MODELS:
        write(each, root / each)
    write_fp8(root / "qwen3", root / "qwen3_fp8", root / "qwen3_rounded")
