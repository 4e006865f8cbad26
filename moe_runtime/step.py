"""What the stages of a layer's step hand on: tokens that were sent, then rows that the experts computed.

The stages follow one another. Steps in parts, whose tokens travel while the experts of another part multiply, took
longer. A GPU without pauses is limited by its power, so overlap saves hardly any time there. What was tried, and what
token buckets gain: `kernels/exchange/notes.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moe_runtime.dispatcher.handle import CombineSink, DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.placement.placement import Placement


class SentTokens(NamedTuple):
    """A step whose tokens are on their way.

    A kernel that reads a tensor may still run when later kernels begin, so all tensors are kept until the step ends.

    Attributes:
        dispatcher: for the size of the step.
        handle: of its dispatch.
        shape: of the layer's input `x`.
        tokens: bf16 `[T, H]`.
        topk_idx: `[T, K]`, ids of the experts.
        slots: `[T, K]`, what holds those experts: `topk_idx` itself without a placement.
        topk_weights: fp32 `[T, K]`.
        shared: the shared expert's output, bf16 `[T, H]`, or None.
        placement: of the layer when the tokens were sent.
    """

    dispatcher: TokenDispatcher
    handle: DispatchHandle
    shape: torch.Size
    tokens: torch.Tensor
    topk_idx: torch.Tensor
    slots: torch.Tensor
    topk_weights: torch.Tensor
    shared: torch.Tensor | None
    placement: Placement | None


class ComputedRows(NamedTuple):
    """A step whose results are on their way home: what was sent, what arrived here, and the experts' output."""

    sent: SentTokens
    received: DispatchedTokens
    output: CombineSink


@dataclass
class LayerStep:
    """Deprecated: a step between `MoELayer.begin` and `MoELayer.finish`."""

    sent: SentTokens
    computed: ComputedRows | None = None
