"""A step of a layer in its stages; in micro-batches, the tokens of one travel while the experts of another compute.

What is queued on the two streams of a GPU for three micro-batches (`D` dispatch, `A` arrival, `E` experts, `S` and `W`
the halves of combine), each line in its order:

    exchange   D0 D1 A0 A1 | S0 W0 D2 A2 | S1 W1 | S2 W2
    compute          E0    | E1          | E2    |

Two dispatches are under way at most, one for each half of the symmetric memory. A token's result does not depend on
its neighbours, so that micro-batches change no bit.

**What overlap can bring.** Where steps follow each other without rests, the time of one is its energy over what the GPU
may draw, and overlap saves none. On 2 H200s, 4096 FP8 tokens a rank, half of the experts of DeepSeek-V3 (power by the
counter of energy, single runs of which no file is kept):

                                             after rests     without rests
    layer                                        3101 us     3630 us, 2.48 J, 683 W, 1.38 GHz
    its experts alone                            2530        3082     2.09    678    1.32
    its exchange alone                            450         416     0.24    575    1.98
    dispatch, down projection, combine           1377        1529     1.07    699    1.41
    the same, combine on 16 SMs beside down      1331        1557     1.04    669    1.46
    ... on 24 SMs                                1321        1546     1.04    672    1.44

A layer of 2.48 J cannot take less than 3.5 ms at 700 W, whatever runs beside what. After a rest the GPU may draw more
for some 50 ms, and there overlap helps: of the 225 us of combine 56 are hidden, since the products have fewer SMs then.
In NVFP4, which is bound by instructions, the same lost (1856 to 1942).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

import torch

from moe_runtime.config import MoELayerConfig
from moe_runtime.dispatcher import CombineSink, DispatchedTokens, DispatchHandle, collective_step
from moe_runtime.formats import ceil_div
from moe_runtime.kernels.nvrtc import most_sms
from moe_runtime.metrics import phase
from moe_runtime.placement import Placement

if TYPE_CHECKING:
    from moe_runtime.layer import MoELayer


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all layers, since memory of a stream is used again on no other; and for all virtual ranks of a process,
    whose waiting kernels then cannot take the SMs that another's sending ones need.
    """
    # Its blocks are few and peers wait for them: they go first where an SM is free.
    return torch.cuda.Stream(device, priority=-1)


class ExchangeStream:
    """The stream that the exchange of layers runs on.

    Args:
        device: a GPU for a stream beside the current one; None for the current stream, whichever that is.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream = None if device is None else _stream_of(device)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What is queued inside goes here, after all that the current stream has been given until now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The end of what has been queued here until now; None where there is one stream."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for(self, mark: torch.cuda.Event | None) -> None:
        """The current stream goes on after `mark`."""
        if self._stream is not None and mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)


@dataclass
class LayerStep:
    """A step of a layer, or a micro-batch of one, whose tokens have been sent. What follows is called in this order.

    Between `receive` of a rank and the call before it, every rank must have come as far; so before `gather`.

    Attributes:
        shape: of the tokens that the step began with.
        shared: the shared expert's output, `[T, H]`, if there is one.
        placement: of the layer when the tokens were sent.
        routed: ids of experts and the slots that take the tokens, `[T, K]`.
        sent: tokens and weights as they were sent. Like `routed` kept for the exchange's stream, which may read them
            long after the current stream has gone on.
    """

    layer: MoELayer
    shape: torch.Size
    handle: DispatchHandle
    shared: torch.Tensor | None
    placement: Placement | None
    routed: tuple[torch.Tensor, torch.Tensor]
    sent: tuple[torch.Tensor, torch.Tensor]
    _arrived: DispatchedTokens | None = None
    _arrival: torch.cuda.Event | None = None
    _sink: CombineSink | None = None

    def receive(self) -> None:
        """Wait for the tokens of all ranks and group them."""
        layer = self.layer
        with collective_step(layer.context):
            if self.placement != layer.placement:
                raise ValueError("step: expected one that began after replace_experts, its tokens went to other slots")
        with layer.exchange_stream.joined(), phase("dispatch_wait", layer.times):
            self._arrived = layer.dispatcher.dispatch_wait(self.handle)
        self._arrival = layer.exchange_stream.mark()

    def run_experts(self) -> None:
        """This rank's experts, on the current stream."""
        layer = self.layer
        layer.exchange_stream.wait_for(self._arrival)
        with collective_step(layer.context), phase("experts", layer.times):
            assert layer.experts is not None and self._arrived is not None
            self._sink = CombineSink(self.handle)
            layer.experts(self._arrived, out=self._sink.rows)

    def send_back(self, out: torch.Tensor | None = None) -> None:
        """Reduce the results here and send them home; `out` is for `gather`, as `TokenDispatcher.combine_send` says."""
        layer = self.layer
        assert self._sink is not None
        with layer.exchange_stream.joined(), phase("combine_send", layer.times):
            layer.dispatcher.combine_send(self._sink, self.handle, out=out)
        if layer.counters is not None and self._arrived is not None:
            # Now, while results travel and those of the peers are waited for.
            with collective_step(layer.context), layer.exchange_stream.joined():
                layer.counters.add(*self.routed, self.handle.num_parts, self._arrived.group_offsets)

    def gather(self) -> torch.Tensor:
        """Wait for the results of all ranks and sum them, on the exchange's stream; bf16 `[T, H]`."""
        layer = self.layer
        with layer.exchange_stream.joined(), phase("combine_wait", layer.times):
            return layer.dispatcher.combine_wait(self.handle, shared=self.shared)


def in_micro_batches(
    layer: MoELayer,
    x_TH: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    shared_TH: torch.Tensor | None,
) -> Generator[None, None, torch.Tensor]:
    """A step of `layer` in `config.micro_batches` parts; stops wherever it goes on only once all ranks came as far.

    Gives bf16 `[T, H]`.
    """
    parts = layer.config.micro_batches
    size = ceil_div(x_TH.shape[0], parts)
    rows = [slice(number * size, (number + 1) * size) for number in range(parts)]
    with collective_step(layer.context):
        y_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    # Tensors of one stream are used on the other. They are kept until both are through, and memory that is freed then
    # is not used again before the next step, in which each stream begins after the other's end.
    steps: list[LayerStep] = []

    def send(number: int) -> None:
        if number < parts:
            part = rows[number]
            shared = None if shared_TH is None else shared_TH[part]
            steps.append(layer.send(x_TH[part], topk_idx_TK[part], topk_weights_TK[part], shared))

    try:
        send(0)
        send(1)
        yield
        steps[0].receive()
        for number, part in enumerate(rows):
            # Before this rank's experts: those of the next micro-batch wait for nothing else.
            if number + 1 < parts:
                steps[number + 1].receive()
            steps[number].run_experts()
            steps[number].send_back(y_TH[part])
            yield
            steps[number].gather()
            send(number + 2)
            yield
    finally:
        layer.exchange_stream.wait_for(layer.exchange_stream.mark())
    return y_TH


SMS_WITHOUT_A_PAIR = 8
"""SMs that blocks of the exchange may leave without one to pair with, one in each GPC of a Hopper GPU. A GEMM whose
blocks come in pairs would wait for them: on an H200, both of 32688 rows took 4940 us instead of 2660 beside a kernel
on 16 SMs, and 2796 with 8 SMs less (single runs of which no file is kept)."""


def sms_of_experts(config: MoELayerConfig, device: torch.device) -> int | None:
    """What the exchange of other micro-batches leaves of a GPU; None for all. (A GEMM keeps its SMs until it ends.)"""
    if device.type != "cuda" or config.micro_batches == 1 or config.num_sms is None:
        return None
    return max(1, most_sms(device) - config.num_sms - SMS_WITHOUT_A_PAIR)


def advance(step: Generator[None, None, torch.Tensor]) -> torch.Tensor | None:
    """Run a step up to its next stop, or to its end: its result then."""
    try:
        next(step)
    except StopIteration as end:
        return cast(torch.Tensor, end.value)
    return None
