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
from typing import NamedTuple

import torch

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.heaps.heap import align_region
from moe_runtime.comm.signals import ABORT_WORDS, COUNT_BITS, TURN_BIT, SignalLayout
from moe_runtime.kernels.bound_kernel import Address, Argument, BoundKernel
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
FLAGS_TOGETHER = 4
"""Flags that a warp stores at a time where SMs are limited: it has many records then, and each fence costs."""
STATIC_BYTES = 1024
"""Shared memory of a block that copies rows, beside the rows."""
NO_STRIDES = 0, 0
"""Of a matrix that is not there."""
HOST_TICKET, HOST_MOST, HOST_PREFIX = range(3)
"""Words in the host's memory: a number that is written last, most tokens of a rank, then `prefix` and `experts`."""


@dataclass(frozen=True, kw_only=True)
class CopyGeometry(ABC):
    """What kernels that copy records through shared memory are made for.

    Attributes:
        rank, world_size: this rank and all.
        num_sms: most SMs that the kernel that sends and the one that receives take together, at least 2; None is all.
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

    def most_blocks(self, sms: int, *, sends: bool) -> int:
        """Of the kernel that sends or of the other one, on a GPU of `sms` SMs.

        Where SMs are limited each kernel has its half of them, at least one.
        """
        if self.num_sms is None:
            return sms
        most = min(sms, self.num_sms)
        return max(1, most // 2 if sends else most - most // 2)

    def copy_macros(self) -> dict[str, int | str]:
        """Of row_stages.cuh, and words of signals."""
        signals = SignalLayout(self.world_size)
        return {
            **signal_macros(self.world_size),
            "RECORD_BYTES": self.record_bytes,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "TOGETHER": 1 if self.num_sms is None else FLAGS_TOGETHER,
            "DISPATCH_FLAG": signals.dispatch_flag,
            "TOKEN_COUNT": signals.token_count,
            "READY": signals.ready,
            "COUNT_BITS": COUNT_BITS,
            "TURN_BIT": TURN_BIT,
        }


def grid_of(rows: int, warps: int, most: int) -> tuple[int, int, int]:
    """`most` blocks at most, of `warps` for one row each at a time."""
    return max(1, min(most, -(-rows // warps))), 1, 1


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


class TokensOfRank(NamedTuple):
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


@dataclass(slots=True)
class Route:
    """Where the tokens of a dispatch go. What a cached dispatch needs, too.

    Attributes:
        words: int32, `index` `[T, W]`, number of a token among those of this rank for a rank, -1 where it does not go
            there; then `experts` and `offsets`, `entries` if there are any, and `prefix`. Views of the others are made
            when they are read, which kernels do not need.
        prefix: int32 `[W, W]`: entry `[i, j]` counts the tokens of ranks 0 to `i` for rank `j`.
        num_tokens, num_local: `T` and `E`.
        with_entries: whether there are `entries`.
    """

    words: torch.Tensor
    prefix: torch.Tensor
    num_tokens: int
    num_local: int
    with_entries: bool

    @classmethod
    def allocate(
        cls, num_tokens: int, world_size: int, num_local: int, device: torch.device, with_entries: bool
    ) -> Route:
        """Uninitialised memory; without `entries` unless asked for."""
        num_pairs = num_tokens * world_size
        num_words = num_pairs + num_local + 2 + (num_pairs if with_entries else 0)
        words = torch.empty(num_words + world_size * world_size, dtype=torch.int32, device=device)
        prefix = words.as_strided((world_size, world_size), (world_size, 1), num_words)
        return cls(words, prefix, num_tokens, num_local, with_entries)

    @property
    def _end_of_index(self) -> int:
        return self.num_tokens * self.prefix.shape[0]

    @property
    def experts(self) -> torch.Tensor:
        """int32 `[E]`, tokens of all ranks for each expert of this rank."""
        return self.words[self._end_of_index :][: self.num_local]

    @property
    def offsets(self) -> torch.Tensor:
        """int32 `[2]`, 0 and the rows that come here."""
        return self.words[self._end_of_index + self.num_local :][:2]

    @property
    def entries(self) -> torch.Tensor | None:
        """int32 `[T, W]`, the rank of each entry of `index`, or -1; None where nobody asked."""
        if not self.with_entries:
            return None
        first = self._end_of_index + self.num_local + 2
        return self.words[first : first + self._end_of_index].view(self.num_tokens, self.prefix.shape[0])


@dataclass(slots=True)
class RowsToCome:
    """Memory of the rows of a dispatch, into which kernels write.

    Attributes:
        out: the rows; without tokens they stay where they landed (`RowGeometry.own_too`). Rows that nothing comes for
            get ids of -1 and weights of 0.
        also_ids: int64 `[R, K]`, gets the same as `out.ids`; or None.
        row_index: int32 `[R]`, receives the landing record of each row; None unless rows stay there.
        positions: int32 `[W * room, W]`, receives in the column of this rank the row of each token that comes, by
            source rank and token; or None.
        room: of `positions`.
    """

    out: UnpackedRows
    also_ids: torch.Tensor | None = None
    row_index: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    room: int = 0

    def keep_first(self, num_rows: int) -> None:
        """Forget all but the first, where rows are contiguous."""
        self.out.keep_first(num_rows)
        if self.also_ids is not None:
            self.also_ids.resize_(num_rows, self.also_ids.shape[1])


class CountKernel:
    """`row_counts.cu` over a rank's memory.

    Args:
        memory: of the exchange.
        tables: int64 `[W]`, where each rank's table lies, of `table_bytes`, at first zeros.
        host: int32 `[host_words]` in host-visible memory.
    """

    def __init__(self, memory: ExchangeMemory, tables: torch.Tensor, host: torch.Tensor) -> None:
        self._memory, self._host = memory, host
        with torch.inference_mode(False):
            state = torch.zeros(2, dtype=torch.int32, device=memory.device)
        self._bound: dict[str, Argument] = {
            "tables": tables,
            "state": state,
            "signals": memory.signal_pointers,
            "epoch_ptr": memory.epoch,
            "error": memory.error,
            "latch": memory.latch,
            "rank": memory.rank,
        }
        self._kernels: dict[bool, BoundKernel] = {}

    def launch(
        self,
        routing: torch.Tensor,
        per_expert: torch.Tensor | None,
        route: Route,
        capacity: int,
        ticket: int,
        timeout_ns: int,
    ) -> None:
        """Exchange counts, and write `route`. Collective.

        Args:
            routing: bool `[T, W]`, contiguous, whether a token goes to a rank; or, without `per_expert`, int64 `[T, K]`
                of expert ids, any strides, of which any that is none counts as none.
            per_expert: int32 `[E * W]`, contiguous, this rank's tokens for each expert of all ranks.
            route: written.
            capacity: most rows that may come, or 0. More are a `CapacityError`.
            ticket: written to the first word of the host's memory, behind sums; 0 for no writes there.
            timeout_ns: how long to wait for a peer.
        """
        from_ids = per_expert is None
        if from_ids not in self._kernels:
            self._kernels[from_ids] = self._bound_kernel(from_ids)
        given: dict[str, Argument]
        if from_ids:
            row, column = routing.stride()
            given = {"topk_idx": routing, "id_row": row, "id_column": column, "top_k": routing.shape[1]}
        else:
            given = {"in_rank": routing, "per_expert": per_expert}
        num_tokens, num_local = route.num_tokens, route.num_local
        experts = route.words.data_ptr() + 4 * num_tokens * self._memory.world_size
        offsets = experts + 4 * num_local
        self._kernels[from_ids].launch(
            {
                **given,
                "num_tokens": num_tokens,
                "num_local": num_local,
                "index": route.words,
                "entries": Address(offsets + 8) if route.with_entries else None,
                "prefix": route.prefix,
                "experts": Address(experts),
                "offsets": Address(offsets),
                "host": self._host if ticket else None,
                "capacity": capacity,
                "ticket": ticket,
                "timeout_ns": timeout_ns,
            }
        )

    def _bound_kernel(self, from_ids: bool) -> BoundKernel:
        world = self._memory.world_size
        return BoundKernel(
            "row_counts.cu",
            "dispatch_counts",
            count_macros(world, from_ids=from_ids),
            block=COUNT_WARPS * WARP,
            grid=(world, 1, 1),
            bound=self._bound,
            device=self._memory.device,
            early=True,
            all_shared=True,  # as the kernels behind it
        )


class RowKernels:
    """`rows.cu` over a rank's memory. Each `receive` is of the tokens of the `send` before it.

    Args:
        memory: of the exchange.
        geometry: of what travels.
        count_tag: `comm.signals.count_tag_of` the exchange.
        handle_epoch: int32 `[1]`, holds the epoch of the last step.
    """

    def __init__(
        self, memory: ExchangeMemory, geometry: RowGeometry, count_tag: int, handle_epoch: torch.Tensor
    ) -> None:
        sms = most_sms(memory.device)
        self.geometry, self._warps = geometry, geometry.warps
        self._most_send, self._most_recv = (geometry.most_blocks(sms, sends=sends) for sends in (True, False))
        landing_half = geometry.landing_half(memory.half_bytes["landing"])
        shared: dict[str, Argument] = {
            "landing": memory.landing_pointers,
            "token_flags": memory.token_flags_pointers,
            "signals": memory.signal_pointers,
            "handle_epoch": handle_epoch,
            "error": memory.error,
            "latch": memory.latch,
            "rank": geometry.rank,
            "max_tokens": geometry.max_tokens,
            "landing_half": landing_half,
            "token_flags_half": memory.half_bytes["token_flags"],
        }
        sends: dict[str, Argument] = {
            **shared,
            "epoch_ptr": memory.epoch,
            "counter": memory.counters,
            "count_tag": count_tag,
        }
        receives: dict[str, Argument] = {**shared, "first_row": landing_half // geometry.record_bytes}

        def made(name: str, warps: int, bound: dict[str, Argument], follows: BoundKernel | None) -> BoundKernel:
            return BoundKernel(
                "rows.cu",
                name,
                row_macros(geometry),
                block=warps * WARP,
                bound=bound,
                follows=follows,
                device=memory.device,
                shared_bytes=geometry.shared_bytes,
                early=True,
                all_shared=True,  # so that both kernels share an SM
            )

        self._send = made("dispatch_send_rows", geometry.warps + 1, sends, None)
        self._recv = made("dispatch_recv_rows", geometry.warps, receives, self._send)

    def send(self, of_rank: TokensOfRank, route: Route, window: int, after_counts: bool, timeout_ns: int) -> None:
        """Send tokens to the peers that want them.

        Args:
            window: number of the first token for each rank.
            after_counts: whether `CountKernel` was launched just before.
        """
        tokens, scales, ids, weights = of_rank
        scale_row, scale_column = NO_STRIDES if scales is None else scales.stride()
        id_row, id_column = NO_STRIDES if ids is None else ids.stride()
        weight_row, weight_column = NO_STRIDES if weights is None else weights.stride()
        num_tokens = route.num_tokens
        self._send.launch(
            {
                "tokens": tokens,
                "scales": scales,
                "scale_row": scale_row,
                "scale_column": scale_column,
                "ids": ids,
                "id_row": id_row,
                "id_column": id_column,
                "weights": weights,
                "weight_row": weight_row,
                "weight_column": weight_column,
                "index": route.words,
                "num_tokens": num_tokens,
                "window": window,
                "after_counts": after_counts,
                "timeout_ns": timeout_ns,
            },
            grid_of(num_tokens, self._warps, self._most_send),
        )

    def receive(self, route: Route, to_come: RowsToCome, is_first: bool, num_local: int) -> None:
        """Wait for the tokens that come, and make rows of them, by source rank and then by token.

        Args:
            to_come: written.
            is_first: whether `source_tokens` are written, as they are unless the dispatch is a cached one.
            num_local: experts of each rank.
        """
        out = to_come.out
        num_rows = out.source_tokens.shape[0]
        scale_row, scale_column = NO_STRIDES if out.scales is None else out.scales.stride()
        self._recv.launch(
            {
                "prefix": route.prefix,
                "out_tokens": out.tokens,
                "out_scales": out.scales,
                "out_scale_row": scale_row,
                "out_scale_column": scale_column,
                "out_ids": out.ids,
                "also_ids": to_come.also_ids,
                "out_weights": out.weights,
                "source_tokens": out.source_tokens if is_first else None,
                "positions": to_come.positions,
                "row_index": to_come.row_index,
                "room": to_come.room,
                "num_rows": num_rows,
                "first_expert": num_local * self.geometry.rank,
                "num_experts": num_local,
            },
            grid_of(num_rows, self._warps, self._most_recv),
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


def forget_macros() -> None:
    """Make macros anew, as where constants have changed."""
    for made in (count_macros, row_macros):
        made.cache_clear()
