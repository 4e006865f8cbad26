"""A transformers model whose experts are spread over the ranks: a tiny Qwen3-MoE, made from its config.

    pip install -e ".[hf]"
    python examples/transformers_model.py
    torchrun --nproc-per-node=2 examples/transformers_model.py

Attention, routers and shared experts stay on every rank. Each rank generates from its own prompt.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_runtime import apply_expert_parallel, init_from_env


def main() -> None:
    device = init_from_env()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)  # the same model on every rank
    sizes = Qwen3MoeConfig(
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
    )
    model = AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16).to(device).eval()
    prompt = torch.tensor([[3, 14, 15 + rank]], device=device)
    with apply_expert_parallel(model, max_tokens_per_rank=64, token_format="nvfp4", device=device) as experts:
        experts.count_tokens()
        # Ranks may generate different numbers of tokens: a rank that is done still serves its experts to the others.
        answer = model.generate(prompt, max_new_tokens=4 + rank, do_sample=False, pad_token_id=0)
        loads = experts.expert_loads()  # over all ranks, by decoder layer
        print(f"rank {rank}: {answer[0].tolist()}, {sum(loads[0])} expert rows in layer 0")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
