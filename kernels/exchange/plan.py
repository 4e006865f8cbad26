"""Every choice of the exchange in one place, from a layer's geometry alone.

`exchange_engine` chooses CUDA C++ or torch, `plan_exchange` every size of the kernels in CUDA C++.
`macros.py` turns a plan into macros for the compiler, `cuda.py` launches by it. Why the constants
are as they are, with measurements, is in `kernels/exchange/notes.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from moe_runtime.comm.signals import PARTIAL_FLAG_TOKENS, PROGRESS_PARTS
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.formats.number_formats import TokenFormat, align, ceil_div
from moe_runtime.kernels.runtime import BLOCK_RESERVED_BYTES, NO_NVRTC, SM_SHARED_BYTES, Engine, capability, has_nvrtc

WARP = 32
MAX_THREADS = 1024
LEAST_CAPABILITY = 9
"""Major compute capability from which on a GPU has the instructions of the kernels: bulk copies, barriers that count
bytes, launches that begin early. Nothing else of an architecture is needed but `ExchangeGeometry.sm_shared_bytes`."""
SENDER_STATIC_BYTES = 256
"""Most static shared memory of `dispatch_send`, beside its records."""

RECORD_STAGES = 2
"""Records that a team of `dispatch_send` has in shared memory: one in the making, one being copied."""
PARTIAL_STAGES = 2
"""Partial results that a block of `combine_send` has in shared memory, likewise."""
SEND_BLOCKS_PER_SM = (2, 1), (20, 2), (math.inf, 4)
"""Tokens of an SM, and the blocks of `dispatch_send` on it for up to so many.

A block sends one token while it quantizes the next, and its end takes a fence. NVFP4 tokens of 2 ranks, us:

    tokens              256   384   512  1024  2048  4096
    1 block an SM      15.1  24.1  22.0  33.7  57.2   115
    2                  18.0  22.1  20.9  27.1  43.1  72.6
    4                  18.0  25.3  23.6  30.1  44.4  71.2
"""
BLOCKS_PER_SM = 8
"""Of `one_rank_combine`: more than fit, so that one SM's blocks do not wait for another's."""
MAX_SEND_THREADS = 896
"""Of a block of several teams: with more, ptxas has too few registers for a thread."""
MAX_TEAMS = 15
"""Named barriers of a block, less the one of all its threads."""

RECV_WARPS = 16
"""Of a block that counts or places arrived rows."""
SMALL_CHUNK_BYTES, FEW_ROWS = 32 * 1024, 2048
"""Shared memory of a block, and rows of a rank on average, up to which all slots are one chunk.

Dispatch of NVFP4 takes 15.1 us as one chunk and 17.0 in several for 256 tokens of 2 ranks, 20.5 and 19.1 for 320.
"""
OWN_TOKENS = 256
"""Threads of `place_own_rows`, each with a token: 4096 tokens take 16 blocks."""
CHUNK = 256
"""Slots of a chunk at most, where there are several."""
POLLING_BLOCKS = 32
"""Blocks of `recv_permute` at most, where each looks at the flags of all tokens and copies little.

8, 128 and 256 tokens of 2 ranks take 9.8, 14.4 and 16.8 us with 32 blocks, 10.4, 17.4 and 23.3 with 132.
"""

PADDED_BLOCKS = 64
"""Blocks of `recv_permute` at most, where each looks at the flags of all tokens and rows are padded for each expert.

8, 32 and 128 tokens of 2 ranks, DeepSeek-V3's sizes in FP8, take 11.0, 12.0 and 20.4 us with 64 blocks on H200;
11.5, 13.9 and 24.2 with 24; 12.0, 12.5 and 23.7 with 132.
"""

MAX_READERS = 14
"""Warps that read rows of a ring: more have nothing to do but wait for rows."""
MAX_PLACES = 24
RING_BARRIERS_BYTES = 1024
"""Shared memory for what goes with a ring: barriers and notes."""
ONE_RANK_TOKENS = 128
"""Tokens up to which a rank alone dispatches in one launch: scales of an expert's rows are then one block of 128."""
ONE_RANK_THREADS = 256, 512
"""Of a block of `one_rank_dispatch`, at least and at most: a thread takes one unit of a token."""
ONE_RANK_SUM_THREADS = 128
"""Of a block of `one_rank_combine`, each with one unit of a token."""
TOKENS_IN_PARTS, TOKENS_IN_MOST_PARTS = 1024, 8192
"""`max_tokens` from which on tokens are combined in parts, and in `PROGRESS_PARTS + 1`.

Combine on 2 ranks with 3 and 7 parts before the last takes 63.0 and 64.8 us for 1024 tokens, 117.7 and 115.4 for 2048,
223.6 and 224.4 for 4096, 443.5 and 434.0 for 8192. 512 tokens take 38.1 without parts, 41.6 with 7.
"""
EARLY_PARTS = 3
"""Parts before the last for fewer tokens."""


@dataclass(frozen=True)
class RowRing:
    """Places in shared memory that rows pass through, `places` of them for rows of `row_bytes`."""

    places: int
    row_bytes: int

    @property
    def shared_bytes(self) -> int:
        return self.places * _place_bytes(self.row_bytes)


@dataclass(frozen=True)
class ExchangePlan:
    """What the kernels are compiled with and launched over; equal on all ranks.

    Attributes:
        num_sms: most SMs that a kernel takes; None for all.
        num_slots, top_k, contiguous, swizzled: of the geometry and its token format.
        team_threads: threads of `dispatch_send` that take a token together, 32 elements each.
        teams: teams of a block: one, or as many as an SM holds where blocks are few.
        send_shared_bytes: shared memory of a block of `dispatch_send`.
        recv_warps: of a block that counts or places arrived rows.
        chunk_slots: slots whose rows are counted together.
        num_chunks: chunks of all slots.
        per_token_flags: each token is waited for by itself; otherwise the receiver waits for all tokens of a source.
        own_rows: own tokens are stored to their rows as they are sent.
        own_tokens: threads of a block that finds where, each with a token.
        own_words: int32 words of the scratch memory that this takes.
        tiled_scales: `recv_scales` fills in swizzled scales, in the order of the swizzle.
        place_shared_bytes: shared memory of a block of `recv_permute`.
        partial_flags: partial results of each token are waited for by themselves, as far as they are signalled so.
        num_parts: parts of the tokens whose combined rows are signalled before the rest.
        part_tokens: tokens of such a part.
        output_readers, partial_readers: warps of `combine_send` and of `combine_recv` that read rows.
        output_rings: rows of `combine_send`, fp32 and bf16.
        partial_rings: rows of `combine_recv`, without and with a shared expert.
        combine_shared_bytes: shared memory of a block of `combine_send`, for either ring.
        one_rank_tokens: tokens of a step up to which `one_rank_dispatch` does dispatch, a multiple of 32; 0 for ranks
            that have peers, and where tokens may name an expert several times. Else a rank without peers combines by
            `one_rank_combine`.
        one_rank_threads: of a block of `one_rank_dispatch`.
        one_rank_shared_bytes: shared memory of such a block.
        one_rank_slices: blocks of `one_rank_combine` that share a token.
    """

    num_sms: int | None
    num_slots: int
    top_k: int
    contiguous: bool
    swizzled: bool
    team_threads: int
    teams: int
    send_shared_bytes: int
    recv_warps: int
    chunk_slots: int
    num_chunks: int
    per_token_flags: bool
    own_rows: bool
    own_tokens: int
    own_words: int
    tiled_scales: bool
    place_shared_bytes: int
    partial_flags: bool
    num_parts: int
    part_tokens: int
    output_readers: int
    partial_readers: int
    output_rings: tuple[RowRing, RowRing]
    partial_rings: tuple[RowRing, RowRing]
    combine_shared_bytes: tuple[int, int]
    one_rank_tokens: int
    one_rank_threads: int
    one_rank_shared_bytes: int
    one_rank_slices: int

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may begin while the one before it drains, on SMs that are free already."""
        return self.num_sms is None

    def output_ring(self, bf16: bool) -> RowRing:
        """Of `combine_send`, for expert outputs in bf16 or in fp32."""
        return self.output_rings[bf16]

    def partial_ring(self, has_shared: bool) -> RowRing:
        """Of `combine_recv`."""
        return self.partial_rings[has_shared]

    # Blocks of each kernel on a GPU of `sms` SMs.

    def send_blocks(self, num_tokens: int, sms: int) -> int:
        blocks = self._limited(ceil_div(num_tokens, self.teams))
        if self.num_sms is not None:
            return blocks
        per_sm = next(per_sm for tokens, per_sm in SEND_BLOCKS_PER_SM if num_tokens <= tokens * sms)
        return min(blocks, per_sm * sms)

    def own_blocks(self, num_tokens: int) -> int:
        return max(1, ceil_div(num_tokens, self.own_tokens))

    def count_blocks(self) -> int:
        return self._limited(self.num_chunks)

    def place_split(self, sms: int, scales: bool, rows: bool | None = None) -> tuple[int, int]:
        """Warps that share a slot's rows, and blocks that share a chunk: one or two for each SM.

        Few slots are spread over more SMs, each with fewer rows; where slots are more than warps, a warp takes a slot.
        Where nothing is copied but row scales, or linear scales, few blocks do: all of them look at the same flags.

        Args:
            scales: whether the scales of a format that has block scales are copied.
            rows: whether quants are copied; None is as the geometry says.
        """
        sms = self._sms(sms)
        if rows and not self.contiguous:
            sms = min(sms, PADDED_BLOCKS)
        if self.per_token_flags and not (self.contiguous if rows is None else rows) and not (scales and self.swizzled):
            sms = min(sms, POLLING_BLOCKS)
            if not scales:
                return 1, min(sms, ceil_div(self.num_slots, self.recv_warps))
        slots = self.num_chunks * self.chunk_slots
        if self.num_sms is None and not self.per_token_flags and (self.contiguous or slots >= sms * self.recv_warps):
            sms *= 2  # blocks: an SM has room for two, and with one the copies wait for each other
        shares = max(1, min(self.top_k, sms * self.recv_warps // slots))
        return shares, max(1, min(sms // self.num_chunks, self.chunk_slots * shares))

    def place_blocks(self, split: int, padded: bool = False) -> int:
        """Of `recv_permute`; for `padded` rows one more, which writes the counts."""
        return self._limited(self.num_chunks * split + padded)

    def scales_blocks(self, sms: int) -> int:
        return self._limited(2 * sms)

    def combine_send_blocks(self, sms: int) -> int:
        return self._limited(min(self.num_slots, sms))

    def combine_recv_blocks(self, num_tokens: int, sms: int) -> int:
        """One at least: a rank without tokens learns of a peer's failure in the same step."""
        return self._limited(min(num_tokens, sms))

    @property
    def one_rank(self) -> bool:
        """Whether this rank has no peers and combine is one launch."""
        return self.one_rank_tokens > 0

    def dispatches_at_once(self, num_tokens: int) -> bool:
        """Whether dispatch of `num_tokens` is one launch."""
        return self.one_rank and num_tokens <= self.one_rank_tokens

    def one_rank_dispatch_blocks(self, num_tokens: int, sms: int) -> int:
        return self._limited(min(num_tokens, sms))

    def one_rank_combine_blocks(self, num_tokens: int, sms: int) -> int:
        blocks = self._limited(num_tokens * self.one_rank_slices)
        return blocks if self.num_sms is not None else min(blocks, BLOCKS_PER_SM * sms)

    def _sms(self, sms: int) -> int:
        return sms if self.num_sms is None else min(sms, self.num_sms)

    def _limited(self, blocks: int) -> int:
        """One at least; as many as SMs at most where those are limited, whatever an SM could hold."""
        return max(1, self._sms(blocks))


ExchangeEngine = Literal["cuda", "torch"]


def exchange_engine(
    engine: Engine, device: torch.device, geometry: ExchangeGeometry | None = None
) -> tuple[ExchangeEngine, str]:
    """Whose kernels run the exchange on `device`, and why not those in CUDA C++ ("" where they do).

    Args:
        engine: of the other operations, resolved. With `torch` the exchange is torch's, too.
        geometry: of the exchange; None asks for a layer whose sizes the kernels take.
    """
    if engine == "torch":
        return "torch", "the engine is torch"
    if engine == "triton":  # `resolve_engine` says `cuda` only where CUDA C++ runs
        found = capability(device)
        if found is None:
            return "torch", f"the device is {device.type}"
        if found[0] < LEAST_CAPABILITY:
            return "torch", f"{device} has compute capability {found[0]}.{found[1]}, not {LEAST_CAPABILITY}.0 or more"
        if not has_nvrtc():
            return "torch", NO_NVRTC
    if geometry is not None and plan_exchange(geometry) is None:
        return "torch", "no kernels take these sizes (hidden_size, top_k, num_experts, ranks)"
    return "cuda", ""


@cache
def sm_shared_bytes(device: torch.device) -> int:
    """Shared memory of an SM of `device`; of Hopper's where it is no GPU."""
    if device.type != "cuda":
        return SM_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def required_plan(geometry: ExchangeGeometry) -> ExchangePlan:
    """The plan of a layer that the kernels take."""
    plan = plan_exchange(geometry)
    assert plan is not None
    return plan


@cache
def plan_exchange(geometry: ExchangeGeometry) -> ExchangePlan | None:
    """The sizes for a layer, or None where the kernels do not take it.

    A warp spans the ranks and a token's experts. A record, rows to sum and counts of experts fit into shared memory.
    """
    g, fmt = geometry, geometry.token_format
    team_threads = align(ceil_div(g.hidden, 32), WARP)
    sender_bytes = g.block_shared_bytes - SENDER_STATIC_BYTES
    one_rank_tokens = min(ONE_RANK_TOKENS, align(g.max_tokens, WARP))
    one_rank_bytes = g.record.record_bytes + 4 * g.num_experts * (one_rank_tokens // WARP + 1)
    if (
        g.world_size > WARP
        or g.top_k > WARP
        or g.hidden % 16 != 0
        or team_threads > MAX_THREADS
        or RECORD_STAGES * g.record.record_bytes > sender_bytes
        or g.output_hidden % 16 != 0
        or _ring(g, g.output_hidden * 4, PARTIAL_STAGES * g.partial_bytes).places <= 0
        or _place_shared_bytes(g, CHUNK) > g.block_shared_bytes
        or (g.world_size == 1 and one_rank_bytes > sender_bytes)
    ):
        return None
    teams = 1
    if g.num_sms is not None:
        by_memory = sender_bytes // (RECORD_STAGES * g.record.record_bytes)
        teams = max(1, min(MAX_SEND_THREADS // team_threads, by_memory, MAX_TEAMS))
    chunk_slots = _chunk_slots(g)
    num_parts = 0
    if g.num_sms is None and g.max_tokens >= TOKENS_IN_PARTS:
        num_parts = PROGRESS_PARTS if g.max_tokens >= TOKENS_IN_MOST_PARTS else EARLY_PARTS
    # An SM has a block of either kernel of combine at a time, one of which begins while the other drains.
    least_bytes = _least_send_bytes(g) if g.num_sms is None else 0
    partial_rings = (
        _ring(g, g.partial_bytes, 0, least_bytes),
        _ring(g, max(g.partial_bytes, 2 * g.output_hidden), 0, least_bytes),
    )
    received_bytes = max(ring.shared_bytes for ring in partial_rings) if g.num_sms is None else 0
    partials_bytes = PARTIAL_STAGES * g.partial_bytes
    output_rings = (
        _ring(g, g.output_hidden * 4, partials_bytes, received_bytes),
        _ring(g, g.output_hidden * 2, partials_bytes, received_bytes),
    )
    sent_bytes = [max(ring.shared_bytes + partials_bytes, least_bytes) for ring in output_rings]
    least, most = ONE_RANK_THREADS
    return ExchangePlan(
        num_sms=g.num_sms,
        num_slots=g.num_slots,
        top_k=g.top_k,
        contiguous=g.contiguous,
        swizzled=fmt.swizzled,
        team_threads=team_threads,
        teams=teams,
        send_shared_bytes=teams * RECORD_STAGES * g.record.record_bytes,
        recv_warps=RECV_WARPS,
        chunk_slots=chunk_slots,
        num_chunks=ceil_div(g.num_slots, chunk_slots),
        per_token_flags=chunk_slots >= g.num_slots,
        own_rows=g.own_rows and chunk_slots < g.num_slots,
        own_tokens=OWN_TOKENS,
        own_words=g.max_tokens * (g.top_k + 1) + (1 + ceil_div(g.max_tokens, OWN_TOKENS)) * g.num_experts,
        tiled_scales=fmt.swizzled and chunk_slots < g.num_slots,
        place_shared_bytes=_place_shared_bytes(g, chunk_slots),
        partial_flags=g.world_size > 1 and g.max_tokens <= PARTIAL_FLAG_TOKENS and num_parts == 0,
        num_parts=num_parts,
        part_tokens=ceil_div(g.max_tokens, num_parts + 1),
        output_readers=_readers(g.output_hidden // _unit_numbers(g.combine_format)),
        partial_readers=_readers(g.output_hidden // 8),
        output_rings=output_rings,
        partial_rings=partial_rings,
        combine_shared_bytes=(sent_bytes[0], sent_bytes[1]),
        one_rank_tokens=one_rank_tokens if g.world_size == 1 and not g.accepts_repeats else 0,
        one_rank_threads=max(least, min(most, align(ceil_div(g.hidden, _unit_numbers(fmt)), WARP))),
        one_rank_shared_bytes=one_rank_bytes,
        one_rank_slices=ceil_div(g.output_hidden // _unit_numbers(g.combine_format), ONE_RANK_SUM_THREADS),
    )


def _unit_numbers(fmt: TokenFormat) -> int:
    """Elements that a thread quantizes together; `unit_numbers` of quantize.cuh."""
    return 8 if fmt.name == "bf16" else 16


def _readers(units: int) -> int:
    """Warps that read a row of `units` units together, each thread as many as the others."""
    return ceil_div(ceil_div(units, ceil_div(units, MAX_READERS * WARP)), WARP)


def _place_bytes(row_bytes: int) -> int:
    return align(row_bytes, 128)


def _least_send_bytes(geometry: ExchangeGeometry) -> int:
    """Shared memory of a block of `combine_send`, such that an SM takes one.

    SMs that are the first to be free would else take two, and others none: combine of 4096 and 8192 tokens of 2 ranks
    took 224 and 438 us, with this 204 and 396.
    """
    return geometry.sm_shared_bytes // 2 - BLOCK_RESERVED_BYTES + 128


def _ring(geometry: ExchangeGeometry, row_bytes: int, other_bytes: int, beside_bytes: int = 0) -> RowRing:
    """What fits into an SM's shared memory with `other_bytes`; if two places do, beside a block of `beside_bytes`."""

    def places(most_bytes: int) -> int:
        return (most_bytes - RING_BARRIERS_BYTES - other_bytes) // _place_bytes(row_bytes)

    found = places(geometry.sm_shared_bytes - 2 * BLOCK_RESERVED_BYTES - RING_BARRIERS_BYTES - beside_bytes)
    if beside_bytes == 0 or found < 2:
        found = places(geometry.block_shared_bytes)
    return RowRing(min(MAX_PLACES, found), row_bytes)


def _place_shared_bytes(geometry: ExchangeGeometry, chunk: int) -> int:
    """Shared memory of `recv_permute` on the rank with most experts, with room to align its arrays."""
    experts = ceil_div(geometry.num_experts, geometry.world_size)
    return experts * (chunk // 32 * 6 + 16) + chunk * (geometry.top_k * 2 + 4) + 32


def _chunk_slots(geometry: ExchangeGeometry) -> int:
    """Slots that are counted together, a multiple of 32: all where they are few."""
    everything = align(geometry.num_slots, 32)
    small = _place_shared_bytes(geometry, everything) <= SMALL_CHUNK_BYTES
    return everything if small and geometry.max_tokens * geometry.top_k <= FEW_ROWS else min(CHUNK, everything)
