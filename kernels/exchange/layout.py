"""Which tokens go where, for DeepEP's `get_dispatch_layout`: counts by rank and by expert, and the ranks of a token.

Host side of `token_layout.cu`; the reference is in torch.
"""

from __future__ import annotations

from functools import cache

import torch

from moe_runtime.kernels.bound_kernel import launch
from moe_runtime.kernels.exchange.plan import ExchangeEngine
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.nvrtc import Defines

THREADS = 1024
TOKENS_OF_A_BLOCK = 8192
"""One block needs no zeros to add to, which another kernel would have to write."""
MOST_BLOCKS = 64
MOST_COUNTS = 12 * 1024
"""Ranks and experts, in shared memory that needs no leave of the driver."""


@cache
def _macros(num_ranks: int) -> Defines:
    return Defines({"WORLD": num_ranks})


def layout_kernel_takes(num_experts: int, num_ranks: int) -> bool:
    """Whether the kernel counts so many experts and ranks."""
    return num_ranks <= 32 and num_ranks + num_experts <= MOST_COUNTS


def dispatch_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, *, engine: ExchangeEngine
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts and destinations of int64 `topk_idx` `[T, K]` (-1 for none), each rank with `E / W` experts.

    An id from `E` on counts as none; of an id the lower 32 bits count, as in the payload that travels.

    Args:
        topk_idx, num_experts, num_ranks: any strides, `E`, and `W`.
        engine: of the exchange. With "torch", and for more experts than `layout_kernel_takes`, it waits for the host.

    Returns:
        int32 `[W]`, tokens for each rank; int32 `[E]`, tokens for each expert; bool `[T, W]`, whether a token goes to
        a rank.
    """
    num_tokens, top_k = topk_idx.shape
    if engine != "cuda" or not layout_kernel_takes(num_experts, num_ranks):
        return _reference(topk_idx, num_experts, num_ranks)
    device, blocks = topk_idx.device, min(MOST_BLOCKS, max(1, ceil_div(num_tokens, TOKENS_OF_A_BLOCK)))
    made = torch.empty if blocks == 1 else torch.zeros
    counts = made(num_ranks + num_experts, dtype=torch.int32, device=device)
    in_rank = torch.empty(num_tokens, num_ranks, dtype=torch.bool, device=device)
    id_row, id_column = topk_idx.stride()
    launch(
        "token_layout.cu",
        "dispatch_layout",
        _macros(num_ranks),
        grid=(blocks, 1, 1),
        block=THREADS,
        shared_bytes=4 * (num_ranks + num_experts),
        arguments={
            "topk_idx": topk_idx,
            "id_row": id_row,
            "id_column": id_column,
            "counts": counts,
            "in_rank": in_rank,
            "num_tokens": num_tokens,
            "top_k": top_k,
            "num_experts": num_experts,
            "num_local": num_experts // num_ranks,
        },
        device=device,
        early=True,
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
