"""Before a dispatch of normal mode, ranks tell each other how many tokens come: one small record each."""

from __future__ import annotations

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.threads import by_one_thread, is_capturing
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.payload import WORD
from moe_runtime.kernels.formats.number_formats import align


def count_words(num_counts: int) -> int:
    """bf16 words of the record in which a rank sends `num_counts` int32 counts."""
    return align(4 // WORD * num_counts, 16)


class CountsExchange:
    """The exchange of `N` counts of each rank: of its tokens, and of those for each of some receivers.

    `start` and `finish` are two calls, between which the host may launch what does not depend on the counts. Where
    kernels store to peers, `direct` has a quicker one.

    Args:
        dispatcher: of steps of one token of each rank for all ranks, `count_words(num_counts)` wide.
        num_counts: `N`.
    """

    def __init__(self, dispatcher: TokenDispatcher, num_counts: int) -> None:
        self.context: ExpertParallelContext = dispatcher.context
        device, world = self.context.device, self.context.world_size
        self._dispatcher, self._num_counts = dispatcher, num_counts
        with torch.inference_mode(False):
            payload = torch.zeros(1, count_words(num_counts) // 2, dtype=torch.int32, device=device)
            self._num_tokens, self._by_receiver = payload[0, :1], payload[0, 1:num_counts]
            self._sent = (
                payload.view(torch.bfloat16),
                torch.arange(world, device=device)[None, :],
                torch.ones(1, world, dtype=torch.float32, device=device),
            )
            on_gpu = device.type == "cuda"
            self._table = torch.empty(world, num_counts, dtype=torch.int32, pin_memory=on_gpu, device="cpu")
            self._sums = torch.empty(world, num_counts, dtype=torch.int32, device=device)
        self._done = torch.cuda.Event() if on_gpu else None

    @by_one_thread
    def start(self, num_tokens: int, by_receiver: tuple[torch.Tensor, ...]) -> None:
        """Send this rank's counts, on the current stream. Collective.

        Args:
            num_tokens: the first count.
            by_receiver: int32, the `N - 1` others.

        Raises `ValueError` in the capture of a CUDA graph.
        """
        if is_capturing(self.context.device):
            raise ValueError("num_worst_tokens: expected it in a capture, where the host cannot wait for the counts")
        self._num_tokens.fill_(num_tokens)
        torch.cat(by_receiver, out=self._by_receiver)
        arrived = self._dispatcher.dispatch(*self._sent)
        assert arrived.row_index is not None
        landed = arrived.rows.index_select(0, arrived.row_index[: self.context.world_size])
        table = landed.view(torch.int32)[:, : self._num_counts].contiguous()
        self._table.copy_(table, non_blocking=True)
        torch.cumsum(table, 0, dtype=torch.int32, out=self._sums)
        if self._done is not None:
            self._done.record()

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the counts of all ranks, but not for what was launched since.

        Returns int32 `[W, N]` on the CPU, and on the device the sums of its rows 0 to `i`; both until the next `start`.

        Raises `MoERuntimeError` for a rank that failed or did not come.
        """
        if self._done is not None:
            self._done.synchronize()
        # By now a failure is known.
        self.context.check()
        return self._table, self._sums
