"""One step of a layer on one rank: what its stages hand on to each other.

The stages follow one another. Steps in parts, whose tokens travel while the experts of another part multiply, took
longer. A GPU without pauses is limited by its power, so overlap saves hardly any time there. What was tried, and what
token buckets gain: `kernels/exchange/notes.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_runtime.dispatcher.handle import DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher


@dataclass
class LayerStep:
    """A step of a layer. Its stages set `handle`, `received`, `output` and `y`, in this order.

    A kernel that reads a tensor may still run when later kernels begin, so all tensors are kept until the step ends.

    Attributes:
        dispatcher: for the size of the step.
        shape: of the layer's input `x`.
        tokens: bf16 `[T, H]`.
        topk_idx: `[T, K]`, ids of the experts, as the layer is given them.
        slots: `[T, K]`, what the dispatcher takes: what holds those experts, `topk_idx` itself without a placement.
            Where the layer has `router_ids`, and its dispatcher has not, the numbers of its own experts.
        topk_weights: fp32 `[T, K]`.
        shared: bf16 `[T, H]`, the output of a shared expert, or None.
        handle: of the dispatch, once the tokens are sent.
        received: the rows that arrived at this rank.
        output: bf16 `[row_capacity, H]`, the output of this rank's experts.
        y: bf16 of `shape`, the result.
    """

    dispatcher: TokenDispatcher
    shape: torch.Size
    tokens: torch.Tensor
    topk_idx: torch.Tensor
    slots: torch.Tensor
    topk_weights: torch.Tensor
    shared: torch.Tensor | None
    handle: DispatchHandle = field(init=False)
    received: DispatchedTokens = field(init=False)
    output: torch.Tensor = field(init=False)
    y: torch.Tensor = field(init=False)
