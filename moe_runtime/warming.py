"""Warm-up: steps that route no token launch every kernel of later steps, so that those compile and load nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from moe_runtime.config import MoELayerConfig

KINDS = ((torch.int32, False), (torch.int64, True), (torch.int32, False))
"""Steps of each token bucket and number of tokens: the dtype of ids, and whether a shared expert's output is given.

Kernels differ by both. The first step of a bucket has a longer timeout, which Triton may take for another type.
"""


class WarmUpStep(NamedTuple):
    """Arguments of `MoELayer.forward`, in its order."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    shared: torch.Tensor | None
    max_tokens: int


def warm_up_steps(config: MoELayerConfig, device: torch.device, *, takes_shared: bool) -> Iterator[WarmUpStep]:
    """The steps that warm up a layer; `takes_shared` where its caller may give the output of a shared expert.

    Each size has a step of one token and one of all that it takes: a rank without peers has other kernels for few
    tokens. No step is without a token, since torch launches nothing for none. The tokens are unrouted, so they take no
    row of any rank.
    """
    for max_tokens in config.all_token_buckets:
        for (ids, with_shared), tokens in product(KINDS, sorted({1, max_tokens})):
            x = torch.zeros(tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
            topk_weights = torch.zeros(tokens, config.top_k, dtype=torch.float32, device=device)
            topk_idx = torch.full((tokens, config.top_k), -1, dtype=ids, device=device)
            shared = torch.zeros_like(x) if with_shared and takes_shared else None
            yield WarmUpStep(x, topk_idx, topk_weights, shared, max_tokens)
