"""One expert-parallel layer with random weights: tokens in, tokens out, one rank or many.

    python examples/layer_alone.py
    torchrun --nproc-per-node=2 examples/layer_alone.py

`MoELayer.from_checkpoint(folder, layer=3, context=context, max_tokens_per_rank=64)` reads a real model instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_runtime import ExpertParallelContext, MoELayer, MoELayerConfig, init_from_env


def main() -> None:
    device = init_from_env()  # joins the ranks that torchrun started; without torchrun there is one rank
    config = MoELayerConfig(
        hidden_size=256,
        intermediate_size=128,
        num_experts=8,
        top_k=2,
        max_tokens_per_rank=64,
        token_format="nvfp4",
    )
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(config, context)
        layer.load_random(seed=0)  # equal weights for any number of ranks
        generator = torch.Generator().manual_seed(context.rank)  # every rank brings its own tokens
        x = torch.randn(16, config.hidden_size, generator=generator).to(device, torch.bfloat16)
        y = layer(x)
        # Or with the answer of a router of your own; -1 is unrouted.
        topk_idx = torch.tensor([[0, 5]] * 16, dtype=torch.int32, device=device)
        routed = layer(x, topk_idx=topk_idx, topk_weights=torch.full((16, 2), 0.5, device=device))
        print(f"rank {context.rank} of {context.world_size}: {tuple(y.shape)}, {len(layer.local_experts)} experts here")
        assert y.isfinite().all() and routed.isfinite().all()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
