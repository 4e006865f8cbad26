"""Which tokens go where, for DeepEP's `get_dispatch_layout`: counts by rank and by expert, and the ranks of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.exchange.row_kernels import padded

TOKENS = 8
"""Of a program."""


def dispatch_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, *, engine: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts and destinations of int64 `topk_idx` `[T, K]` (-1 for none), each rank with `E / W` experts.

    An id from `E` on counts as none; of an id the lower 32 bits count, as in the payload that travels.

    Returns:
        int32 `[W]`, tokens for each rank; int32 `[E]`, tokens for each expert; bool `[T, W]`, whether a token goes to
        a rank.
    """
    num_tokens, top_k = topk_idx.shape
    if engine == "torch":
        return _reference(topk_idx, num_experts, num_ranks)
    counts = torch.zeros(num_ranks + num_experts, dtype=torch.int32, device=topk_idx.device)
    in_rank = torch.empty(num_tokens, num_ranks, dtype=torch.bool, device=topk_idx.device)
    if num_tokens:
        _dispatch_layout_kernel[(triton.cdiv(num_tokens, TOKENS),)](
            topk_idx,
            topk_idx.stride(0),
            topk_idx.stride(1),
            counts,
            in_rank.view(torch.uint8),
            num_tokens,
            num_experts,
            num_experts // num_ranks,
            K=top_k,
            K_PAD=padded(top_k),
            WORLD=num_ranks,
            TOKENS=TOKENS,
            num_warps=1,
        )
    per_rank, per_expert = counts.split_with_sizes((num_ranks, num_experts))
    return per_rank, per_expert, in_rank


def _reference(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`dispatch_layout` in torch."""
    topk_idx = topk_idx.to(torch.int32).to(torch.int64)
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    # Entries without an expert are counted behind the last one.
    ids = torch.where(valid, topk_idx, num_experts)
    per_expert = torch.bincount(ids.flatten(), minlength=num_experts + 1)[:num_experts].to(torch.int32)
    owners = torch.where(valid, ids // (num_experts // num_ranks), -1)
    in_rank = torch.stack([(owners == rank).any(dim=1) for rank in range(num_ranks)], dim=1)
    return in_rank.sum(dim=0, dtype=torch.int32), per_expert, in_rank


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "per_rank"])
def _dispatch_layout_kernel(
    ids_ptr,
    id_row,
    id_column,
    counts_ptr,
    in_rank_ptr,
    num_tokens,
    num_experts,
    per_rank,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    WORLD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, K_PAD)
    there = (token < num_tokens)[:, None] & (k < K)[None, :]
    at = ids_ptr + token.to(tl.int64)[:, None] * id_row + k[None, :] * id_column
    ids = tl.load(at, mask=there, other=-1).to(tl.int32)
    valid = (ids >= 0) & (ids < num_experts)
    tl.atomic_add(counts_ptr + WORLD + ids, 1, mask=valid)
    owners = tl.where(valid, ids // per_rank, -1)
    for rank in range(WORLD):
        goes = tl.max((owners == rank).to(tl.int32), axis=1)
        tl.store(in_rank_ptr + token.to(tl.int64) * WORLD + rank, goes.to(tl.uint8), mask=token < num_tokens)
        tl.atomic_add(counts_ptr + rank, tl.sum(goes, axis=0))
