"""One step of a layer on one rank: what its stages hand on to each other.

The stages follow one another. Steps in parts, whose tokens travel while the experts of another part multiply, took
longer. A GPU without pauses is limited by its power, so overlap saves hardly any time there. What was tried, and what
token buckets gain: `kernels/exchange/notes.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.dispatcher.handle import CombineSink, DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.placement.placement import Placement


@dataclass
class LayerStep:
    """A step of a layer; each stage adds what it made.

    A kernel that reads a tensor may still run when later kernels begin, so all tensors are kept until the step ends.

    Attributes:
        dispatcher: for the size of the step.
        shape: of the layer's input `x`.
        tokens: bf16 `[T, H]`.
        topk_idx: `[T, K]`, ids of the experts.
        slots: `[T, K]`, what holds those experts: `topk_idx` itself without a placement.
        topk_weights: fp32 `[T, K]`.
        shared: bf16 `[T, H]`, the output of a shared expert, or None.
        placement: of the layer when the step was routed.
        handle: of the dispatch, once the tokens are sent.
        received: the rows that arrived at this rank.
        output: the output of this rank's experts.
    """

    dispatcher: TokenDispatcher
    shape: torch.Size
    tokens: torch.Tensor
    topk_idx: torch.Tensor
    slots: torch.Tensor
    topk_weights: torch.Tensor
    shared: torch.Tensor | None
    placement: Placement | None
    handle: DispatchHandle | None = None
    received: DispatchedTokens | None = None
    output: CombineSink | None = None
