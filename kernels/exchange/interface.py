"""The seam between the dispatcher and the kernels of the exchange: what a backend does, and the memory it works on.

Shape letters: `W` ranks, `T` tokens of this rank, `K` top-k, `E` experts of this rank, `H` hidden size,
`S = W * max_tokens` landing slots, `R = row_capacity` rows of experts, `Q` bytes of a row's quants, `V` block scales of
a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch

from moe_runtime.comm.heaps.heap import SymmetricHeap
from moe_runtime.comm.signals import SignalLayout
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.padded_rows import PaddedRows


class ExchangeMemory(Protocol):
    """One rank's share of the memory through which a group exchanges tokens; `ExpertParallelContext` is one.

    Attributes:
        rank, world_size: this process in the group.
        device: where the memory lies.
        heap: the symmetric memory of the regions `signals`, `token_flags`, `landing` and `combine`.
        half_bytes: bytes from one half of a region to the other, by region.
        signals_layout: word offsets in the region `signals`.
        signal_pointers, token_flags_pointers, landing_pointers, combine_pointers: int64 `[W]`, the address of each
            rank's copy of a region.
        epoch: int32 `[1]`, number of the last dispatch.
        error: int32 `[8]` in host-visible memory, the error record of this rank.
        latch: int32 `[2]`: the code of the first error, and whether all peers know of it.
        counters: int32, zero between kernels.
        kernels: what `kept_by_memory` keeps; empty where any of the above has changed.
    """

    rank: int
    world_size: int
    device: torch.device
    heap: SymmetricHeap
    half_bytes: dict[str, int]
    signals_layout: SignalLayout
    signal_pointers: torch.Tensor
    token_flags_pointers: torch.Tensor
    landing_pointers: torch.Tensor
    combine_pointers: torch.Tensor
    epoch: torch.Tensor
    error: torch.Tensor
    latch: torch.Tensor
    counters: torch.Tensor
    kernels: dict[tuple[Any, ...], Any]


def memory_arguments(context: ExchangeMemory, geometry: ExchangeGeometry) -> dict[str, Any]:
    """What kernels that store records, or read them, are told of their memory, by the names of their parameters."""
    return {
        "landing": context.landing_pointers,
        "signals": context.signal_pointers,
        "epoch_ptr": context.epoch,
        "error": context.error,
        "latch": context.latch,
        "landing_half": geometry.landing_half(context.half_bytes["landing"]),
    }


def id_arguments(geometry: ExchangeGeometry) -> dict[str, int]:
    """What kernels that read the ids of tokens are told of them, by the names of their parameters."""
    ids = geometry.router_ids
    return {"first_id": 0 if ids is None else ids.first, "router_experts": 0 if ids is None else ids.num_experts}


Kind = TypeVarTuple("Kind")
Bound = TypeVar("Bound")


def kept_by_memory(
    bind: Callable[[ExchangeMemory, ExchangeGeometry, *Kind], Bound],
) -> Callable[[ExchangeMemory, ExchangeGeometry, *Kind], Bound]:
    """Decorate what binds kernels to a memory, which keeps them: it is called once for equal other arguments."""

    def kept(context: ExchangeMemory, geometry: ExchangeGeometry, *kind: *Kind) -> Bound:
        key = bind, geometry.number, *kind
        bound = context.kernels.get(key)
        if bound is None:
            bound = context.kernels[key] = bind(context, geometry, *kind)
        return bound

    return kept


SentTokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What a rank sends in a step: `x_TH, topk_idx_TK, topk_weights_TK, gsf`.

x_TH: bf16 `[T, H]`, last dimension contiguous.
topk_idx_TK: int32 or int64 `[T, K]`, contiguous; -1 is unrouted. An id out of range or repeated within a token counts
    as unrouted and is recorded as `RoutingError`; see `ExchangeGeometry.accepts_repeats` and `router_ids` there.
topk_weights_TK: fp32 `[T, K]`, contiguous.
gsf: fp32 `[1]` static NVFP4 encode scale, or None for one per token.
"""


@dataclass(eq=False, slots=True)
class RecvBuffers:
    """Uninitialised memory that `dispatch_recv` writes.

    It is allocated before this rank sends. A kernel that waits for peers may begin while the kernel before it runs, so
    its output must not lie in memory that the earlier kernel still uses.

    Attributes:
        positions: int32 `[S, K]`, the row position of each (landing slot, k); -1 for none.
        group_offsets: int32 `[E + 1]`, the first row position of each expert's rows, and the end of the last.
        group_scale_offsets: int32 `[E]`, by the `dense_128` convention of `GroupedRows`.
        row_index: int32 `[R]`, the landing row of each row position.
        rows: uint8 `[R, Q]`, quants by row position; None where rows stay in their records.
        scales: block scales in the consumer's layout: uint8 `[blocks, ceil(V / 4), 32, 4, 4]` for swizzled formats,
            fp32 `[R, V]` for `fp8_block`; None for bf16, and where scales stay in their records.
        row_scale: fp32 `[R]` by row position; None for formats without row scales.
        scratch: int32, of `ExchangeBackend.scratch_words`; None where that is 0.
    """

    positions: torch.Tensor
    group_offsets: torch.Tensor
    group_scale_offsets: torch.Tensor
    row_index: torch.Tensor
    rows: torch.Tensor | None
    scales: torch.Tensor | None
    row_scale: torch.Tensor | None
    scratch: torch.Tensor | None


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows where each starts at a multiple of 16 bytes: themselves, or a copy."""
    fits_already = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return rows if fits_already else rows.clone(memory_format=torch.contiguous_format)


class ExchangeBackend(Protocol):
    """Dispatch and combine of one engine. All engines write the same bits, so ranks may differ in their engine.

    `count_tag` is `comm.signals.count_tag_of` the exchange: layers of equal geometry differ in it.

    No function waits for the host on a GPU. What goes wrong on the device is recorded in `context.error` and on all
    peers; every wait for a peer ends by its flag, by a failure or after `timeout_ns`.
    """

    def can_keep_scales_in_record(self, geometry: ExchangeGeometry) -> bool:
        """Whether `dispatch_recv` takes `scales=None` for a format that has block scales."""

    def can_await_tokens(self, context: ExchangeMemory) -> bool:
        """Whether `combine_send` takes `await_ns`."""

    def scratch_words(self, geometry: ExchangeGeometry) -> int:
        """Of the uninitialised int32 scratch memory of a dispatch."""

    def of_one_rank(self, geometry: ExchangeGeometry) -> Any:
        """`one_rank_cuda.OneRankKernels` for a rank without peers; None for others and where there are none."""

    def dispatch_send(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        count_tag: int,
        starts: torch.Tensor,
        tokens: SentTokens,
        handle_epoch: torch.Tensor,
        num_parts_T: torch.Tensor,
        timeout_ns: int,
        buffers: RecvBuffers | None = None,
    ) -> None:
        """Quantize and send this rank's tokens, begin the next epoch, and raise this rank's flag on every peer.

        Args:
            starts: int32 `[W + 1]`, first expert id of each rank.
            handle_epoch: int32 `[1]`, receives the epoch of this dispatch.
            num_parts_T: int32 `[T]`, receives the number of ranks that each token goes to.
            timeout_ns: how long to wait for a peer.
            buffers: those of `dispatch_recv`, to which this rank's own rows may be stored at once.
        """

    def dispatch_recv(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        count_tag: int,
        handle_epoch: torch.Tensor,
        timeout_ns: int,
        buffers: RecvBuffers,
        waits: torch.Tensor | None = None,
    ) -> None:
        """Wait for all ranks' tokens of epoch `handle_epoch` (int32 `[1]`) and group them by expert into `buffers`.

        More rows than `row_capacity`, or of an expert than `most_rows_of_expert` allows, are recorded as
        `CapacityError`. After any failure all groups are empty. Waits for each rank are added to `waits`, the words of
        `waits.py`.
        """

    def dispatch_recv_padded(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        count_tag: int,
        handle_epoch: torch.Tensor,
        timeout_ns: int,
        buffers: RecvBuffers,
        out: PaddedRows,
        scales_at: int,
        statistics: torch.Tensor | None,
    ) -> None:
        """`dispatch_recv` of a geometry with gathered rows, and copies of the rows in `out`.

        Args:
            out: written, with counts of 0 after any failure. `buffers` are scratch memory.
            scales_at: bytes from the start of a record to the scales of `out`.
            statistics: int32 `[E]`, to which the counts are added, or None.
        """

    def combine_send(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        count_tag: int,
        starts: torch.Tensor,
        output_RH: torch.Tensor,
        positions_SK: torch.Tensor,
        handle_epoch: torch.Tensor,
        await_ns: int | None = None,
        received: torch.Tensor | None = None,
    ) -> None:
        """Weight and reduce this rank's expert rows of each token, send the partial results home, raise the flags.

        Args:
            starts: int32 `[W + 1]`, first expert id of each rank.
            output_RH: bf16 or fp32 `[R, H]` by row position; fp32 is rounded to bf16 first.
            positions_SK: int32 `[S, K]` from `dispatch_recv`.
            handle_epoch: int32 `[1]`, the epoch of the dispatch.
            await_ns: how long to wait for the tokens of the dispatch, which nothing has received; None where
                `dispatch_recv` has. Entries without an expert then have no part in the sum, whatever their position.
            received: int32 `[1]`, with `await_ns`: the epoch of a dispatch that `dispatch_recv_padded` has received. If
                it is the last one before that of routing, peers learn that its tokens have been read.
        """

    def combine_recv(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        handle_epoch: torch.Tensor,
        num_parts_T: torch.Tensor,
        shared_TH: torch.Tensor | None,
        y_TH: torch.Tensor,
        timeout_ns: int,
        *,
        waits: torch.Tensor | None = None,
    ) -> None:
        """Wait for all ranks' partial results and sum them, ranks ascending, into `y_TH`; NaN after any failure.

        Args:
            handle_epoch: int32 `[1]`, the epoch of the dispatch.
            num_parts_T: int32 `[T]` from `dispatch_send`.
            shared_TH: bf16 `[T, H]`, last dimension contiguous, added first; None where there is no shared expert.
            y_TH: bf16 `[T, H]`, contiguous, written.
            timeout_ns: how long to wait for a peer.
            waits: as of `dispatch_recv`.
        """
