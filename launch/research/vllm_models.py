"""Random checkpoints of whole models of published layer sizes, which `vllm_speed` runs in vLLM.

Quants are drawn and not rounded from anything, with scales that keep results of usual size. All layers have the experts
of one draw in turn, so that writing takes no longer than the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelSizes:
    """`hidden`, `inner`, `experts`, `top_k` and `layers`; heads of queries and of keys, and the width of one."""

    kind: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 1024


SIZES = {
    "qwen3_30b": ModelSizes("qwen3", 2048, 768, 128, 8, 16, 32, 4, 128),
    "qwen3_235b": ModelSizes("qwen3", 4096, 1536, 128, 8, 4, 64, 4, 128),
    "gpt_oss_20b": ModelSizes("gpt_oss", 2880, 2880, 32, 4, 24, 64, 8, 64),
    "gpt_oss_120b": ModelSizes("gpt_oss", 2880, 2880, 128, 4, 16, 64, 8, 64),
    "qwen3_tiny": ModelSizes("qwen3", 256, 128, 8, 2, 2, 4, 2, 64),
}
"""Layers of published models; the number of layers is by default what a GPU of 80 GB holds twice in 4 bits."""

FORMATS = {"qwen3": ("bf16", "fp8", "nvfp4"), "gpt_oss": ("mxfp4",)}
"""In which formats the experts of a kind of model can be written."""


class _Draw:
    """Random tensors, drawn on a GPU where there is one."""

    def __init__(self) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(7)

    def normal(self, *shape: int, std: float = 0.02) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device=self._device)
        return (drawn * std).bfloat16().cpu()

    def integers(self, first: int, last: int, *shape: int) -> torch.Tensor:
        drawn = torch.randint(first, last + 1, shape, generator=self._generator, device=self._device, dtype=torch.uint8)
        return drawn.cpu()

    def linear(self, fmt: str, rows: int, columns: int) -> Tensors:
        """A projection of an expert, by the ends of its names."""
        if fmt == "bf16":
            return {"weight": self.normal(rows, columns)}
        if fmt == "fp8":
            quants = self.normal(rows, columns, std=50).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales = torch.full((-(-rows // 128), -(-columns // 128)), 0.02 / 50)
            return {"weight": quants, "weight_scale_inv": scales}
        return {
            "weight": self.integers(0, 255, rows, columns // 2),
            # e4m3 from 32 to 60.
            "weight_scale": self.integers(0x60, 0x67, rows, columns // 16).view(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(0.02 / 2.9 / 44),
            "input_scale": torch.tensor(1.0 / 64),
        }


def write_model(folder: Path, sizes: ModelSizes, fmt: str) -> None:
    """Write `config.json` and a file of tensors for each layer. Raises `ValueError` for a format that is not there."""
    if fmt not in FORMATS[sizes.kind]:
        raise ValueError(f"--format: expected {' or '.join(FORMATS[sizes.kind])} for {sizes.kind}, got {fmt}")
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_parts(sizes, fmt)):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(_config(sizes, fmt)))


def _parts(sizes: ModelSizes, fmt: str) -> Iterator[Tensors]:
    draw, hidden = _Draw(), sizes.hidden
    yield {
        "model.embed_tokens.weight": draw.normal(sizes.vocabulary, hidden, std=0.5),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": draw.normal(sizes.vocabulary, hidden, std=0.05),
    }
    experts = _gpt_oss_experts(draw, sizes) if sizes.kind == "gpt_oss" else _qwen3_experts(draw, sizes, fmt)
    for layer in range(sizes.layers):
        own = _attention(draw, sizes) | experts
        yield {f"model.layers.{layer}.{name}": value for name, value in own.items()}


def _attention(draw: _Draw, sizes: ModelSizes) -> Tensors:
    hidden, width = sizes.hidden, sizes.head_dim
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones.clone()}
    shapes = {"q": (sizes.heads * width, hidden), "o": (hidden, sizes.heads * width)}
    shapes |= dict.fromkeys("kv", (sizes.kv_heads * width, hidden))
    for name, shape in shapes.items():
        tensors[f"self_attn.{name}_proj.weight"] = draw.normal(*shape)
        if sizes.kind == "gpt_oss":
            tensors[f"self_attn.{name}_proj.bias"] = draw.normal(shape[0])
    if sizes.kind == "gpt_oss":
        tensors["self_attn.sinks"] = draw.normal(sizes.heads, std=1.0)
        router = "mlp.router"
        tensors[f"{router}.bias"] = draw.normal(sizes.experts)
    else:
        router = "mlp.gate"
        for name in "qk":
            tensors[f"self_attn.{name}_norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    tensors[f"{router}.weight"] = draw.normal(sizes.experts, hidden, std=0.05)
    return tensors


def _qwen3_experts(draw: _Draw, sizes: ModelSizes, fmt: str) -> Tensors:
    shapes = {"gate": (sizes.inner, sizes.hidden), "up": (sizes.inner, sizes.hidden)}
    shapes["down"] = sizes.hidden, sizes.inner
    return {
        f"mlp.experts.{expert}.{name}_proj.{end}": value
        for expert in range(sizes.experts)
        for name, shape in shapes.items()
        for end, value in draw.linear(fmt, *shape).items()
    }


def _gpt_oss_experts(draw: _Draw, sizes: ModelSizes) -> Tensors:
    tensors = {}
    # With larger results of experts the model is chaotic: bf16 and fp32 of it differ as much as other models do.
    for name, rows, columns, least in (
        ("gate_up_proj", 2 * sizes.inner, sizes.hidden, 118),
        ("down_proj", sizes.hidden, sizes.inner, 116),
    ):
        one = f"mlp.experts.{name}"
        tensors[f"{one}_blocks"] = draw.integers(0, 255, sizes.experts, rows, columns // 32, 16)
        tensors[f"{one}_scales"] = draw.integers(least, least + 2, sizes.experts, rows, columns // 32)
        tensors[f"{one}_bias"] = draw.normal(sizes.experts, rows, std=0.1)
    return tensors


def _config(sizes: ModelSizes, fmt: str) -> dict[str, Any]:
    attention = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(sizes.layers) for name in "qkvo"]
    kept = ["lm_head", "model.embed_tokens", *attention]
    config: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocabulary,
        "num_experts_per_tok": sizes.top_k,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
    }
    if sizes.kind == "gpt_oss":
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(sizes.layers)]
        yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return config | {
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": sizes.experts,
            "intermediate_size": sizes.inner,
            "attention_bias": True,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "layer_types": kinds,
            "rope_theta": 150000,
            "rope_scaling": yarn | {"original_max_position_embeddings": 4096},
            "max_position_embeddings": 131072,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept},
        }
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": sizes.experts,
        "moe_intermediate_size": sizes.inner,
        "intermediate_size": sizes.inner,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "use_sliding_window": False,
    }
    kept += [f"model.layers.{layer}.mlp.gate" for layer in range(sizes.layers)]
    if fmt == "fp8":
        fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        config["quantization_config"] = fp8 | {"modules_to_not_convert": kept}
    elif fmt == "nvfp4":
        nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
        config["quantization_config"] = nvfp4 | {"ignore": kept, "producer": {"name": "modelopt"}}
    return config
