"""Sums of rows of DeepEP's normal mode in CUDA C++: host side of `row_sums.cu`, which says what the kernels do.

A row goes home as it is, and this rank's own rows do not travel. For 4096 bf16 tokens of 7168 elements, of which almost
all come from both of 2 ranks, a rank sends 59 MB over the links, 168 us at 350 GB/s, and reads and writes 294 MB of
memory, 68 us at 4.3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

from moe_runtime.comm.errors import Phase
from moe_runtime.kernels.bound_kernel import Address, Argument, BoundKernel
from moe_runtime.kernels.exchange.interface import ExchangeMemory
from moe_runtime.kernels.exchange.plan import WARP
from moe_runtime.kernels.exchange.rows import NO_STRIDES, CopyGeometry, Route, grid_of
from moe_runtime.kernels.formats.number_formats import align
from moe_runtime.kernels.nvrtc import Defines, most_sms

SUM_WARPS, BLOCKS_PER_SM = 8, 3
"""Of a block that sums, and blocks of an SM: there are registers for two of them beside one that sends."""
MOST_SUM_WARPS = 24
"""Of such a block where SMs are limited: it has an SM of its own."""


@dataclass(frozen=True, kw_only=True)
class SumGeometry(CopyGeometry):
    """Of combine.

    Attributes:
        hidden: bf16 elements of a row.
        top_k: fp32 weights of a row; 0 for none.
        biases: added to a token.
        entries: of a token's routing at home, by whose order its ranks are added; 0 where that is ascending.
    """

    hidden: int
    top_k: int = 0
    biases: int = 0
    entries: int = 0

    @cached_property
    def record_bytes(self) -> int:
        """Of a row and its weights."""
        return sum_bytes(self.hidden, self.top_k)

    @property
    def sum_warps(self) -> int:
        """Of a block that sums."""
        return SUM_WARPS if self.num_sms is None else MOST_SUM_WARPS


def sum_bytes(hidden: int, top_k: int) -> int:
    """Bytes of the record in which a row goes home."""
    return align(2 * hidden + 4 * top_k, 16)


class RowsOfRank(NamedTuple):
    """What a rank brings to a combine.

    Attributes:
        rows: bf16 `[R, H]`, contiguous, at a multiple of 16 bytes.
        weights: fp32 `[R, K]`, any strides, or None.
        ids: int64 `[R, K]`, contiguous: weights beside a negative id count as 0; or None.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    ids: torch.Tensor | None


class SumKernels:
    """`row_sums.cu` over a rank's memory. Each `receive` is of the rows of the `send` before it.

    Args:
        memory: of the exchange.
        geometry: of what travels.
        count_tag: `comm.signals.count_tag_of` the exchange.
        handle_epoch: int32 `[1]`, holds the epoch of the last step.
    """

    def __init__(
        self, memory: ExchangeMemory, geometry: SumGeometry, count_tag: int, handle_epoch: torch.Tensor
    ) -> None:
        sms = most_sms(memory.device)
        self._warps, self._sum_warps, self._world = geometry.warps, geometry.sum_warps, geometry.world_size
        self._most_send = geometry.most_blocks(sms, sends=True)
        of_sums = sms * (BLOCKS_PER_SM if geometry.num_sms is None else 1)
        self._most_recv = geometry.most_blocks(of_sums, sends=False)
        shared: dict[str, Argument] = {
            "combine": memory.combine_pointers,
            "token_flags": memory.token_flags_pointers,
            "signals": memory.signal_pointers,
            "handle_epoch": handle_epoch,
            "error": memory.error,
            "latch": memory.latch,
            "rank": geometry.rank,
            "combine_half": memory.half_bytes["combine"],
            "token_flags_half": memory.half_bytes["token_flags"],
        }
        sends: dict[str, Argument] = {
            **shared,
            "epoch_ptr": memory.epoch,
            "counter": memory.counters,
            "count_tag": count_tag,
        }

        def made(
            name: str, warps: int, bound: dict[str, Argument], shared_bytes: int, follows: BoundKernel | None = None
        ) -> BoundKernel:
            return BoundKernel(
                "row_sums.cu",
                name,
                sum_macros(geometry),
                block=warps * WARP,
                bound=bound,
                follows=follows,
                device=memory.device,
                shared_bytes=shared_bytes,
                early=True,
                all_shared=True,  # so that both kernels share an SM
            )

        self._send = made("combine_send_rows", geometry.warps, sends, geometry.shared_bytes)
        self._recv = made("combine_recv_rows", geometry.sum_warps, shared, 0, self._send)

    def send(
        self, of_rank: RowsOfRank, route: Route, source_tokens: torch.Tensor, start: int, room: int, timeout_ns: int
    ) -> None:
        """Send rows home.

        Args:
            source_tokens: int32 `[R]`, the token of each row at its rank.
            start, room: first token of each rank in this step, and how many.
        """
        rows, weights, ids = of_rank
        weight_row, weight_column = NO_STRIDES if weights is None else weights.stride()
        num_rows = rows.shape[0]
        self._send.launch(
            {
                "rows": rows,
                "weights": weights,
                "weight_row": weight_row,
                "weight_column": weight_column,
                "ids": ids,
                "num_rows": num_rows,
                "source_tokens": source_tokens,
                "prefix": route.prefix,
                "start": start,
                "room": room,
                "timeout_ns": timeout_ns,
            },
            grid_of(num_rows, self._warps, self._most_send),
        )

    def receive(
        self,
        route: Route,
        y: torch.Tensor,
        out_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        start: int,
        home_ids: torch.Tensor | None = None,
    ) -> None:
        """Wait for the rows of this rank's tokens, and sum them.

        Args:
            y: bf16 `[T, H]`, written: of the tokens of this step, the first of which is `start`.
            out_weights: fp32 `[T, K]`, written, or None.
            biases: bf16 `[T, H]`, contiguous, at a multiple of 16 bytes, added first.
            home_ids: int64 `[all T, entries]`, contiguous, the experts of all tokens of this rank; those that are none
                are negative or too large. With `entries` of the geometry.
        """
        num_tokens, ids_of_step = y.shape[0], None
        if home_ids is not None:
            ids_of_step = Address(home_ids.data_ptr() + 8 * start * home_ids.shape[1])
        self._recv.launch(
            {
                "index": Address(route.words.data_ptr() + 4 * start * self._world),
                "home_ids": ids_of_step,
                "num_local": route.num_local,
                "num_tokens": num_tokens,
                "bias": biases[0] if biases else None,
                "bias_2": biases[1] if len(biases) > 1 else None,
                "y": y,
                "out_weights": out_weights,
            },
            grid_of(num_tokens, self._sum_warps, self._most_recv),
        )


@cache
def sum_macros(geometry: SumGeometry) -> Defines:
    """Macros of `row_sums.cu`."""
    return Defines(
        {
            **geometry.copy_macros(),
            "HIDDEN": geometry.hidden,
            "K": geometry.top_k,
            "SUM_WARPS": geometry.sum_warps,
            "BIASES": geometry.biases,
            "ENTRIES": geometry.entries,
            "COMBINE_SEND": int(Phase.COMBINE_SEND),
            "COMBINE_RECV": int(Phase.COMBINE_RECV),
        }
    )
