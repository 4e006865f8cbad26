"""Routes of a layer's steps, copied on the device into a ring of steps; `observation.routes` reads them.

`words` is int64 `[2 + S]`: steps so far, a word of the kernel's own, then the number of tokens at each of `S` places.
Step `n` takes place `n % S`.
"""

from __future__ import annotations

from functools import cache

import torch

from moe_runtime.kernels.bound_kernel import launch
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.nvrtc import Defines

STEPS, _, HEAD = range(3)
THREADS = 256
IDS_PER_BLOCK = 4 * THREADS
_TYPES = {torch.int16: "short", torch.int32: "int", torch.int64: "long long"}


@cache
def _macros(ids: torch.dtype, ring: torch.dtype) -> Defines:
    return Defines({"IDS": _TYPES[ids], "RING_IDS": _TYPES[ring]})


def record_routes(
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    ring: torch.Tensor,
    weights_ring: torch.Tensor | None,
    words: torch.Tensor,
    num_experts: int,
    *,
    engine: str,
    settled: bool = False,
) -> None:
    """Copy the routes of a step to the next place of the ring, without a host sync.

    Args:
        topk_idx_TK: int32 or int64 `[T, K]`, contiguous; an id that none of `num_experts` has is recorded as -1.
        topk_weights_TK: fp32 `[T, K]`, contiguous.
        ring: int16 or int32 `[S, M, K]`, contiguous, `T <= M`.
        weights_ring: fp32 `[S, M, K]`, contiguous, or None.
        words: as in the module docstring.
        engine: of the exchange: "cuda" for one launch, "torch" for several.
        settled: whether ids and weights, and the step before in `words`, were stored by kernels that have ended when
            this one begins early (`kernels.launch_order`, rule 2): not so where this ring's last step was recorded by
            the kernel right before.
    """
    (num_tokens, top_k), (steps, most, _) = topk_idx_TK.shape, ring.shape
    if engine != "cuda":
        place = words[STEPS : STEPS + 1] % steps
        known = (topk_idx_TK >= 0) & (topk_idx_TK < num_experts)
        ring[:, :num_tokens].index_copy_(0, place, topk_idx_TK.where(known, -1).to(ring.dtype)[None])
        if weights_ring is not None:
            weights_ring[:, :num_tokens].index_copy_(0, place, topk_weights_TK[None])
        words.index_fill_(0, HEAD + place, num_tokens)
        words[STEPS] += 1
        return
    launch(
        "record_routes.cu",
        "record_routes",
        _macros(topk_idx_TK.dtype, ring.dtype),
        grid=(max(1, ceil_div(num_tokens * top_k, IDS_PER_BLOCK)), 1, 1),
        block=THREADS,
        arguments={
            "topk_idx": topk_idx_TK,
            "topk_weights": topk_weights_TK,
            "ring": ring,
            "weights_ring": weights_ring,
            "words": words,
            "num_tokens": num_tokens,
            "top_k": top_k,
            "num_experts": num_experts,
            "steps": steps,
            "place_ids": most * top_k,
            "settled": int(settled),
        },
        device=topk_idx_TK.device,
        early=True,
    )
