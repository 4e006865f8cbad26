"""A step of a layer in its stages.

**Overlap**, tried and dropped: steps in two and four parts, the tokens of one on their way while the experts of another
multiply. On 2 H200s, 4096 FP8 tokens a rank, half of the experts of DeepSeek-V3, two parts took 3579 us after rests and
3923 without, where a whole step took 3079 and 3355; on 8, all experts, two and four lost, too. Products of half as many
rows read as many weights and leave more tiles half empty, and blocks of the exchange keep SMs from those of a GEMM.

What overlap can bring at all, measured there, too (power by the counter of energy; like the parts, of single runs of
which no file is kept):

                                             after rests     without rests
    layer                                        3101 us     3630 us, 2.48 J, 683 W, 1.38 GHz
    its experts alone                            2530        3082     2.09    678    1.32
    its exchange alone                            450         416     0.24    575    1.98
    dispatch, down projection, combine           1377        1529     1.07    699    1.41
    the same, combine on 16 SMs beside down      1331        1557     1.04    669    1.46
    ... on 24 SMs                                1321        1546     1.04    672    1.44

Without rests the time of a step is its energy over what the GPU may draw, and overlap saves hardly any: 2.48 J take 3.5
ms at 700 W, whatever runs beside what. After a rest a GPU may draw more for some 50 ms, and there 56 of the 225 us of
combine were hidden, for which the products had fewer SMs; in NVFP4, which is bound by instructions, 1856 us became
1942. On 8 GPUs combine takes four times as long: there the down projection by parts of its columns, each sent home
while the next is multiplied, may pay, since it reads no weight twice.

**Sizes** (`MoELayerConfig.step_sizes`). A layer for 4096 tokens a rank on those 2 H200s took for steps of 8, 128, 512
and 1024 tokens, with sizes for as many, and layers that were made for just as many (us, no file kept either):

    NVFP4   450, 633, 806, 1380     333, 500, 801, 1244     331, 493, 797, 1245
    FP8     575, 771, 856, 1078     512, 737, 834, 1060     509, 733, 834, 1062
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from moe_runtime.dispatcher import CombineSink, DispatchedTokens, DispatchHandle, TokenDispatcher
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
        with phase("dispatch_wait", layer.times):
            arrived = self.dispatcher.dispatch_wait(self.handle)
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
        with phase("combine_wait", self.layer.times):
            return self.dispatcher.combine_wait(self.handle, shared=self.shared)


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
