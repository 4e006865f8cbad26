"""Which tokens go where: `Buffer.get_dispatch_layout`, and the routing of normal mode as a dispatcher takes it."""

from __future__ import annotations

import torch


def dispatch_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts and destinations of int `topk_idx` `[T, K]` (-1 for none), each rank with `E / W` experts.

    Returns:
        int32 `[W]`, tokens for each rank; int32 `[E]`, tokens for each expert; bool `[T, W]`, whether a token goes to
        a rank.
    """
    device, per_rank = topk_idx.device, num_experts // num_ranks
    # Entries without an expert are counted behind the last one.
    ids = torch.where(topk_idx >= 0, topk_idx, num_experts).to(torch.int64)
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    ones = torch.ones(1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, ids.flatten(), ones.expand(ids.numel()))
    owners = torch.where(topk_idx >= 0, ids // per_rank, num_ranks)
    in_rank = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool, device=device)
    in_rank.scatter_(1, owners, torch.ones(1, 1, dtype=torch.bool, device=device).expand_as(owners))
    in_rank = in_rank[:, :num_ranks].contiguous()
    return in_rank.sum(dim=0, dtype=torch.int32), per_expert[:num_experts], in_rank


def ranks_as_experts(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """int64 `[T, W]`: rank `r` where the token goes there, -1 elsewhere; each rank is one expert of the exchange."""
    ranks = torch.arange(is_token_in_rank.shape[1], dtype=torch.int64, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, ranks, -1)
