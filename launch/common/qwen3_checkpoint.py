"""Writes a small Qwen3-MoE checkpoint with random weights: for the demo, and for tests of what reads checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from moe_runtime.checkpoints.files import INDEX_FILE, SINGLE_FILE, write_json
from moe_runtime.config import ActivationConfig, MoELayerConfig, RouterConfig


def write_qwen3_moe_checkpoint(
    path: str | Path, config: MoELayerConfig, seed: int, num_layers: int = 1, num_shards: int = 1
) -> None:
    """Write a synthetic checkpoint of `num_layers` MoE layers, without attention and embeddings.

    Weights are normal with variance 1 / fan-in, close to trained ones, so that unit tokens give logits, gates and
    outputs of order 1. One shard makes `model.safetensors`; several make an index too.
    """
    plain = config.router == RouterConfig(renormalize=config.router.renormalize)
    if not plain or config.activation != ActivationConfig() or config.expert_bias or config.shared_expert is not None:
        raise ValueError(
            "config: a Qwen3-MoE checkpoint has a plain softmax router, plain SwiGLU with gate above up, no biases and "
            "no shared expert"
        )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        w_NK = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu")
        return (w_NK * columns**-0.5).to(torch.bfloat16)

    hidden, intermediate = config.hidden_size, config.intermediate_size
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = weight(config.num_experts, hidden)
        for expert in range(config.num_experts):
            tensors[f"{prefix}.experts.{expert}.gate_proj.weight"] = weight(intermediate, hidden)
            tensors[f"{prefix}.experts.{expert}.up_proj.weight"] = weight(intermediate, hidden)
            tensors[f"{prefix}.experts.{expert}.down_proj.weight"] = weight(hidden, intermediate)
    write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "moe_intermediate_size": intermediate,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "norm_topk_prob": config.router.renormalize,
            "num_hidden_layers": num_layers,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    )
    if num_shards == 1:
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
