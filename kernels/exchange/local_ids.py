"""A router's ids in the numbering of one rank's experts, host side of `local_ids.cu`; the reference is in torch.

For exchanges that take no other ids (`dispatcher.exchange.Exchange.takes_router_ids`), and for those who count steps.
Reads 8 or 12 and writes 4 bytes for each id: a launch and little else.
"""

from __future__ import annotations

from functools import cache

import torch

from moe_runtime.kernels.bound_kernel import BoundKernel, SizedKernel
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.nvrtc import Defines

THREADS = 256


@cache
def _macros(ids_64: bool) -> Defines:
    return Defines({"IDS": "long long" if ids_64 else "int"})


def local_ids(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, first: int, num_local: int, engine: str
) -> torch.Tensor:
    """int32 or int64 `[T, K]`: `id - first` of the experts `first .. first + num_local - 1`, and -1 of others.

    A route whose weight is NaN counts as none, -1. An id that none of the `num_experts` has becomes `num_local`, which
    a dispatch over `num_local` experts refuses. With all experts here it stays, so that the error names it.

    Args:
        topk_idx: int32 or int64 `[T, K]`, contiguous.
        topk_weights: fp32 `[T, K]`, contiguous.
        engine: "cuda", "triton" or "torch".
    """
    if engine != "cuda":
        if num_local == num_experts:
            return topk_idx.masked_fill(topk_weights.isnan(), -1)
        kept = (topk_idx - first).masked_fill((topk_idx < first) | (topk_idx >= first + num_local), -1)
        kept = kept.masked_fill((topk_idx < -1) | (topk_idx >= num_experts), num_local)
        return kept.masked_fill(topk_weights.isnan(), -1).int()
    local = torch.empty(topk_idx.shape, dtype=torch.int32, device=topk_idx.device)
    num_ids = topk_idx.numel()
    if num_ids:
        kernel = _kernel(topk_idx.dtype == torch.int64, topk_idx.device, num_experts, first, num_local)
        arguments = {"topk_idx": topk_idx, "topk_weights": topk_weights, "local": local, "num_ids": num_ids}
        kernel.launch(arguments, num_ids)
    return local


@cache
def _kernel(ids_64: bool, device: torch.device, num_experts: int, first: int, num_local: int) -> SizedKernel:
    kernel = BoundKernel(
        "local_ids.cu",
        "local_ids",
        _macros(ids_64),
        block=THREADS,
        bound={"num_experts": num_experts, "first": first, "num_local": num_local},
        device=device,
        early=True,
    )
    return SizedKernel(kernel, lambda num_ids: ceil_div(num_ids, THREADS))
