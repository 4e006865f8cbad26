"""Rows of DeepEP's normal mode in CUDA C++: host side of `row_counts.cu` and `rows.cu`, which say what they do.

Counts travel first, and tokens behind them without waiting for the host. A rank's own tokens become rows without a
landing record. Bytes for `T` tokens of `b` bytes on `W` ranks, of which each rank gets a part `p`, about:

    over the links, out and in      (W - 1) p T b
    memory read                     W p T b own tokens and records, (W - 1) p T b to send
    memory written                  W p T b rows, (W - 1) p T b records

For 4096 FP8 tokens of 7460 bytes, of which almost all go to both of 2 ranks: 31 MB over the links, 88 us at 350 GB/s,
and 184 MB of memory, 43 us at 4.3 TB/s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.heaps.heap import align_region
from moe_runtime.comm.signals import ABORT_WORDS, COUNT_BITS, TURN_BIT, SignalLayout
from moe_runtime.kernels.bound_kernel import Argument, BoundKernel
from moe_runtime.kernels.exchange.interface import ExchangeMemory
from moe_runtime.kernels.exchange.payload import PayloadLayout, UnpackedRows
from moe_runtime.kernels.exchange.plan import WARP
from moe_runtime.kernels.formats.number_formats import align, ceil_div
from moe_runtime.kernels.nvrtc import Defines, most_sms
from moe_runtime.kernels.runtime import BLOCK_RESERVED_BYTES, SM_SHARED_BYTES

MOST_LOCAL = 1024
"""Experts of a rank whose tokens are counted, at most."""
COUNT_WARPS = 32
"""Of a block of `dispatch_counts`: there are few blocks, and what they read they wait for."""
MOST_WARPS = 16
"""Of a block that copies rows: more have no room for rows of their own."""
MOST_STAGES = 4
STATIC_BYTES = 1024
"""Shared memory of a block that copies rows, beside the rows."""
HOST_TICKET, HOST_MOST, HOST_PREFIX = range(3)
"""Words in the host's memory: a number that is written last, most tokens of a rank, then `prefix` and `experts`."""


@dataclass(frozen=True, kw_only=True)
class CopyGeometry(ABC):
    """What kernels that copy records through shared memory are made for.

    Attributes:
        rank, world_size: this rank and all.
        num_sms: most SMs that the kernel that sends and the one that receives take together; None is all.
        sm_shared_bytes: shared memory of an SM. Ranks may differ in it.
    """

    rank: int
    world_size: int
    num_sms: int | None = None
    sm_shared_bytes: int = SM_SHARED_BYTES

    @property
    @abstractmethod
    def record_bytes(self) -> int:
        """Of a landing record."""

    @cached_property
    def _places(self) -> int:
        """Records in a block's shared memory: half of an SM's, or all of it where kernels have SMs of their own."""
        blocks = 2 if self.num_sms is None else 1
        room = self.sm_shared_bytes // blocks - BLOCK_RESERVED_BYTES - STATIC_BYTES
        return room // align(self.record_bytes, 128)

    @property
    def fits(self) -> bool:
        """Whether the kernels take records of this size."""
        return self._places >= 2

    @cached_property
    def warps(self) -> int:
        """Of a block, that copy."""
        return min(MOST_WARPS, self._places // 2)

    @cached_property
    def stages(self) -> int:
        """Records that a warp has in shared memory."""
        return min(MOST_STAGES, self._places // self.warps)

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.stages * align(self.record_bytes, 128)

    def blocks(self, rows: int, sms: int, *, sends: bool, warps: int | None = None) -> int:
        """Of the kernel that sends or of the other one, for `rows` on a GPU of `sms` SMs.

        A block has `warps`, each for one row at a time. Where SMs are limited each kernel has its half of them.
        """
        if self.num_sms is not None:
            most = min(sms, self.num_sms)
            sms = max(1, most // 2 if sends else most - most // 2)
        return max(1, min(sms, ceil_div(rows, self.warps if warps is None else warps)))

    def copy_macros(self) -> dict[str, int | str]:
        """Of row_stages.cuh, and words of signals."""
        signals = SignalLayout(self.world_size)
        return {
            **signal_macros(self.world_size),
            "RECORD_BYTES": self.record_bytes,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "DISPATCH_FLAG": signals.dispatch_flag,
            "TOKEN_COUNT": signals.token_count,
            "READY": signals.ready,
            "COUNT_BITS": COUNT_BITS,
            "TURN_BIT": TURN_BIT,
        }


@dataclass(frozen=True, kw_only=True)
class RowGeometry(CopyGeometry):
    """Of dispatch.

    Attributes:
        max_tokens: of a pair of ranks in one step.
        layout: of what travels with a token.
        own_too: whether this rank's own records land here, too, and rows stay where they landed.
    """

    max_tokens: int
    layout: PayloadLayout
    own_too: bool = False

    @cached_property
    def record_bytes(self) -> int:
        """Of the payload and the number of the token at its rank."""
        return align(self.layout.weights_at + 4 * self.layout.top_k + 4, 16)

    def landing_half(self, region_half_bytes: int) -> int:
        """As `ExchangeGeometry.landing_half`."""
        return ceil_div(region_half_bytes, self.record_bytes) * self.record_bytes


def table_words(world_size: int) -> int:
    """int32 words of the counts of a source in a rank's table."""
    return align(2 + world_size + MOST_LOCAL, 32)


def table_bytes(world_size: int) -> int:
    """Symmetric memory of the counts of all ranks in both halves."""
    return align_region(2 * world_size * table_words(world_size) * 4)


def host_words(world_size: int) -> int:
    """int32 words of host-visible memory for the sums of counts."""
    return HOST_PREFIX + world_size * world_size + MOST_LOCAL


@dataclass(frozen=True)
class TokensOfRank:
    """What a rank brings to a dispatch.

    Attributes:
        tokens: `[T, ...]`, contiguous, rows of a multiple of 16 bytes.
        scales: fp32 or int32 `[T, V]`, any strides, or None.
        ids: int64 `[T, K]`, any strides, or None.
        weights: fp32 `[T, K]`, any strides; None for zeros.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor | None
    weights: torch.Tensor | None

    @cached_property
    def arguments(self) -> dict[str, Argument]:
        """Of both kernels."""
        found: dict[str, Argument] = {"tokens": self.tokens}
        for name, one in (("scale", self.scales), ("id", self.ids), ("weight", self.weights)):
            row, column = (0, 0) if one is None else one.stride()
            found |= {f"{name}s": one, f"{name}_row": row, f"{name}_column": column}
        return found


@dataclass(frozen=True)
class Route:
    """Where the tokens of a dispatch go. What a cached dispatch needs, too.

    Attributes:
        index: int32 `[T, W]`, number of a token among those of this rank for a rank, -1 where it does not go there.
        entries: int32 `[T, W]`, that rank, or -1; None where nobody asks.
        prefix: int32 `[W, W]`: entry `[i, j]` counts the tokens of ranks 0 to `i` for rank `j`.
        experts: int32 `[E]`, tokens of all ranks for each expert of this rank.
        offsets: int32 `[2]`, 0 and the rows that come here.
    """

    index: torch.Tensor
    entries: torch.Tensor | None
    prefix: torch.Tensor
    experts: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def allocate(
        cls, num_tokens: int, world_size: int, num_local: int, device: torch.device, *, with_entries: bool
    ) -> Route:
        """Uninitialised memory; without `entries` unless asked for."""
        index = torch.empty(num_tokens, world_size, dtype=torch.int32, device=device)
        square = world_size * world_size
        sums = torch.empty(square + num_local + 2, dtype=torch.int32, device=device)
        prefix, experts, offsets = sums.split_with_sizes((square, num_local, 2))
        entries = torch.empty_like(index) if with_entries else None
        return cls(index, entries, prefix.view(world_size, world_size), experts, offsets)


def count_tokens(
    memory: ExchangeMemory,
    routing: torch.Tensor,
    per_expert: torch.Tensor | None,
    route: Route,
    tables: torch.Tensor,
    state: torch.Tensor,
    *,
    capacity: int,
    host: torch.Tensor | None,
    ticket: int,
    timeout_ns: int,
) -> None:
    """Exchange counts, and write `route`. Collective.

    Args:
        routing: bool `[T, W]`, contiguous, whether a token goes to a rank; or, without `per_expert`, int64 `[T, K]` of
            expert ids, any strides, of which any that is none counts as none.
        per_expert: int32 `[E * W]`, contiguous, this rank's tokens for each expert of all ranks.
        route: written.
        tables: int64 `[W]`, where each rank's table lies, of `table_bytes`, at first zeros.
        state: int32 `[2]`, at first zeros.
        capacity: most rows that may come, or 0. More are a `CapacityError`.
        host: int32 `[host_words]` in host-visible memory, or None.
        ticket: written to its first word, behind all else.
        timeout_ns: how long to wait for a peer.
    """
    from_ids = per_expert is None
    given: dict[str, Argument]
    if from_ids:
        row, column = routing.stride()
        given = {"topk_idx": routing, "id_row": row, "id_column": column, "top_k": routing.shape[1]}
    else:
        given = {"in_rank": routing.view(torch.uint8), "per_expert": per_expert}
    _counts(memory.rank, memory.world_size, memory.device, from_ids).launch(
        {
            **given,
            "num_tokens": routing.shape[0],
            "num_local": route.experts.shape[0],
            "index": route.index,
            "entries": route.entries,
            "prefix": route.prefix,
            "experts": route.experts,
            "offsets": route.offsets,
            "tables": tables,
            "state": state,
            "signals": memory.signal_pointers,
            "epoch_ptr": memory.epoch,
            "error": memory.error,
            "latch": memory.latch,
            "host": host,
            "capacity": capacity,
            "ticket": ticket,
            "timeout_ns": timeout_ns,
        }
    )


@cache
def _counts(rank: int, world_size: int, device: torch.device, from_ids: bool) -> BoundKernel:
    return BoundKernel(
        "row_counts.cu",
        "dispatch_counts",
        count_macros(world_size, from_ids=from_ids),
        block=COUNT_WARPS * WARP,
        grid=(world_size, 1, 1),
        bound={"rank": rank},
        device=device,
        early=True,
    )


def send_rows(
    memory: ExchangeMemory,
    geometry: RowGeometry,
    count_tag: int,
    tokens: TokensOfRank,
    route: Route,
    handle_epoch: torch.Tensor,
    *,
    window: int,
    after_counts: bool,
    timeout_ns: int,
) -> None:
    """Send tokens to the peers that want them.

    Args:
        count_tag: `comm.signals.count_tag_of` the exchange.
        handle_epoch: int32 `[1]`, receives the epoch of this step.
        window: number of the first token for each rank.
        after_counts: whether `count_tokens` was launched just before.
    """
    num_tokens = route.index.shape[0]
    _send(geometry, memory.device).launch(
        {
            **tokens.arguments,
            "index": route.index,
            "num_tokens": num_tokens,
            "window": window,
            "after_counts": int(after_counts),
            "count_tag": count_tag,
            "landing": memory.landing_pointers,
            "token_flags": memory.token_flags_pointers,
            "signals": memory.signal_pointers,
            "epoch_ptr": memory.epoch,
            "handle_epoch": handle_epoch,
            "error": memory.error,
            "latch": memory.latch,
            "counter": memory.counters,
            "landing_half": geometry.landing_half(memory.half_bytes["landing"]),
            "token_flags_half": memory.half_bytes["token_flags"],
            "timeout_ns": timeout_ns,
        },
        (geometry.blocks(num_tokens, most_sms(memory.device), sends=True), 1, 1),
    )


@cache
def _send(geometry: RowGeometry, device: torch.device) -> BoundKernel:
    return _copier("dispatch_send_rows", geometry, device, geometry.warps + 1)


def recv_rows(
    memory: ExchangeMemory,
    geometry: RowGeometry,
    tokens: TokensOfRank,
    route: Route,
    handle_epoch: torch.Tensor,
    out: UnpackedRows,
    *,
    window: int,
    is_first: bool,
    positions: torch.Tensor | None,
    row_index: torch.Tensor | None,
    room: int,
    first_expert: int,
    num_local: int,
    timeout_ns: int,
) -> None:
    """Wait for the tokens that come, and make rows of them, by source rank and then by token.

    Args:
        tokens: as of `send_rows`.
        out: written; without tokens rows stay where they landed (`RowGeometry.own_too`). Rows that nothing comes for
            get ids of -1 and weights of 0.
        is_first: whether `out.source_tokens` is written, as it is unless the dispatch is a cached one.
        positions: int32 `[W * room, W]`, receives in the column of this rank the row of each token that comes, by
            source rank and token; or None.
        row_index: int32 `[R]`, receives the landing record of each row; None unless rows stay there.
        room: of `positions`.
        first_expert, num_local: ids of this rank's experts.
    """
    num_rows = out.source_tokens.shape[0]
    scale_row, scale_column = (0, 0) if out.scales is None else out.scales.stride()
    landing_half = geometry.landing_half(memory.half_bytes["landing"])
    _recv(geometry, memory.device).launch(
        {
            **tokens.arguments,
            "index": route.index,
            "prefix": route.prefix,
            "num_tokens": route.index.shape[0],
            "window": window,
            "landing": memory.landing_pointers,
            "token_flags": memory.token_flags_pointers,
            "signals": memory.signal_pointers,
            "handle_epoch": handle_epoch,
            "error": memory.error,
            "latch": memory.latch,
            "out_tokens": out.tokens,
            "out_scales": out.scales,
            "out_scale_row": scale_row,
            "out_scale_column": scale_column,
            "out_ids": out.ids,
            "out_weights": out.weights,
            "source_tokens": out.source_tokens if is_first else None,
            "positions": positions,
            "row_index": row_index,
            "room": room,
            "num_rows": num_rows,
            "first_expert": first_expert,
            "num_experts": num_local,
            "first_row": landing_half // geometry.record_bytes,
            "landing_half": landing_half,
            "token_flags_half": memory.half_bytes["token_flags"],
            "timeout_ns": timeout_ns,
        },
        (geometry.blocks(num_rows, most_sms(memory.device), sends=False), 1, 1),
    )


@cache
def _recv(geometry: RowGeometry, device: torch.device) -> BoundKernel:
    return _copier("dispatch_recv_rows", geometry, device, geometry.warps)


def _copier(name: str, geometry: RowGeometry, device: torch.device, warps: int) -> BoundKernel:
    return BoundKernel(
        "rows.cu",
        name,
        row_macros(geometry),
        block=warps * WARP,
        bound={"rank": geometry.rank, "max_tokens": geometry.max_tokens},
        device=device,
        shared_bytes=geometry.shared_bytes,
        early=True,
    )


def signal_macros(world_size: int) -> dict[str, int | str]:
    """Of signalling.cuh."""
    return {
        "WORLD": world_size,
        "ABORT": SignalLayout(world_size).abort,
        "ABORT_WORDS": ABORT_WORDS,
        "TIMEOUT": int(ErrorCode.TIMEOUT),
    }


_PHASES = {"DISPATCH_SEND": int(Phase.DISPATCH_SEND), "DISPATCH_RECV": int(Phase.DISPATCH_RECV)}


@cache
def count_macros(world_size: int, *, from_ids: bool) -> Defines:
    """Macros of `row_counts.cu`."""
    return Defines(
        {
            **signal_macros(world_size),
            **_PHASES,
            "WARPS": COUNT_WARPS,
            "TABLE_WORDS": table_words(world_size),
            "MOST_LOCAL": MOST_LOCAL,
            "FROM_IDS": int(from_ids),
            "CAPACITY": int(ErrorCode.CAPACITY),
        }
    )


@cache
def row_macros(geometry: RowGeometry) -> Defines:
    """Macros of `rows.cu`."""
    layout = geometry.layout
    return Defines(
        {
            **geometry.copy_macros(),
            **_PHASES,
            "TOKEN_BYTES": layout.token_bytes,
            "SCALES": layout.num_scales,
            "K": layout.top_k,
            "OWN_TOO": int(geometry.own_too),
            "COMBINE_FLAG": SignalLayout(geometry.world_size).combine_flag,
        }
    )


def forget_kernels() -> None:
    """Bind kernels anew, as where constants have changed."""
    for bound in (_counts, _send, _recv, count_macros, row_macros):
        bound.cache_clear()
