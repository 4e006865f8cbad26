"""A step of a layer in its stages: tokens are sent, `compute` runs the experts, `gather` sums the results.

The stages follow each other. Steps in parts, whose tokens travel while the experts of another part multiply, took
longer, and without rests overlap saves hardly any time, since the time of a step is then its energy over what the GPU
may draw. What was tried, and what token buckets gain: `kernels/exchange_notes.md`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from moe_runtime.dispatch_handle import CombineSink, DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher import TokenDispatcher
from moe_runtime.metrics import phase
from moe_runtime.peers import collective_step
from moe_runtime.placement import Placement

if TYPE_CHECKING:
    from moe_runtime.layer import MoELayer


@dataclass
class LayerStep:
    """A step of a layer whose tokens have been sent; `compute` comes next, then `gather`.

    Before each of them every rank must have come as far.

    Attributes:
        dispatcher: of the size of the step.
        shape: of the tokens that the step began with.
        shared: the shared expert's output, `[T, H]`, if there is one.
        placement: of the layer when the tokens were sent.
        routed: ids of experts and the slots that take the tokens, `[T, K]`.
        sent: tokens and weights as they were sent. Like `routed`, and like what comes in `compute`, kept until the step
            ends: a kernel that reads them may run beside those after it.
    """

    layer: MoELayer
    dispatcher: TokenDispatcher
    shape: torch.Size
    handle: DispatchHandle
    shared: torch.Tensor | None
    placement: Placement | None
    routed: tuple[torch.Tensor, torch.Tensor]
    sent: tuple[torch.Tensor, torch.Tensor]
    _between: tuple[DispatchedTokens, CombineSink] | None = None

    def compute(self) -> None:
        """Wait for the tokens of all ranks, run this rank's experts on them, reduce the results and send them home."""
        layer = self.layer
        with collective_step(layer.context):
            if self.placement != layer.placement:
                raise ValueError("step: expected one that began after replace_experts, its tokens went to other slots")
        with phase("dispatch_recv", layer.times):
            arrived = self.dispatcher.dispatch_recv(self.handle)
        with collective_step(layer.context), phase("experts", layer.times):
            assert layer.experts is not None
            sink = CombineSink(self.handle)
            self._between = arrived, sink
            layer.experts(arrived, out=sink.rows)
        with phase("combine_send", layer.times):
            self.dispatcher.combine_send(sink, self.handle)
        if layer.counters is not None:
            # Now, while results travel and those of the peers are waited for.
            with collective_step(layer.context):
                layer.counters.add(*self.routed, self.handle.num_parts, arrived.group_offsets)

    def gather(self) -> torch.Tensor:
        """Wait for the results of all ranks and sum them; bf16 `[T, H]`."""
        with phase("combine_recv", self.layer.times):
            return self.dispatcher.combine_recv(self.handle, shared=self.shared)


def advance(step: Generator[None, None, torch.Tensor]) -> torch.Tensor | None:
    """Run a step up to its next stop, or to its end: its result then."""
    try:
        next(step)
    except StopIteration as end:
        return cast(torch.Tensor, end.value)
    return None


def advance_all(steps: Sequence[Generator[None, None, torch.Tensor]]) -> list[torch.Tensor]:
    """Run the same step of several ranks to its end, in turn from stop to stop: their results."""
    while True:
        ended = [advance(step) for step in steps]
        if ended[0] is not None:
            return [y for y in ended if y is not None]
