"""Warm-up: steps whose tokens go nowhere launch whatever later steps launch, so that those compile and load nothing."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch

from moe_runtime.step import advance_all

if TYPE_CHECKING:
    from moe_runtime.layer import MoELayer

KINDS = ((torch.int32, False), (torch.int64, True), (torch.int32, False))
"""Steps of each size: dtype of ids, and whether a shared expert's output is added where the layer has none of its own.

Kernels differ by both. The first step of a size has a longer timeout, whose type may be another to Triton.
"""


@torch.no_grad()
def warm_up(layers: Sequence[MoELayer]) -> None:
    """See `MoELayer.warm_up`; `layers` are those of the ranks that live in this process.

    A step has one token, since torch launches nothing for none, and that is unrouted: it takes no row of a rank that
    has few, whatever the router would say. Kernels and their grids are chosen by sizes, not by tokens.
    """
    kept = [(layer.counters, layer.times) for layer in layers]
    try:
        for layer in layers:
            layer.counters = layer.times = None
            layer.count_steps()
        for size in layers[0].config.all_token_buckets:
            for ids, with_shared in KINDS:
                advance_all([_step(layer, size, ids, with_shared) for layer in layers])
    finally:
        for layer, (counters, times) in zip(layers, kept, strict=True):
            layer.counters, layer.times = counters, times
    for layer in layers:
        layer.context.check_peers()


def _step(layer: MoELayer, size: int, ids: torch.dtype, with_shared: bool) -> Generator[None, None, torch.Tensor]:
    config, device = layer.config, layer.context.device
    x_TH = torch.zeros(1, config.hidden_size, dtype=torch.bfloat16, device=device)
    if layer.router is not None:
        layer.router(x_TH)
    return layer.stages(
        x_TH,
        topk_idx=torch.full((1, config.top_k), -1, dtype=ids, device=device),
        topk_weights=torch.zeros(1, config.top_k, dtype=torch.float32, device=device),
        shared=torch.zeros_like(x_TH) if with_shared and layer.shared_expert is None else None,
        max_tokens=size,
    )
