"""Arrival: turn the records that landed here into groups of rows by expert, in an order that depends on nothing else.

Rows of a group are ordered by (source rank, token). Slots are worked on in chunks of `SLOTS`; a chunk never crosses
a source rank. Four launches: count rows by (chunk, expert), prefix sums, places of all rows, and then the copy of
scales (and, when contiguous, of rows) to where the grouped GEMM reads them. Nothing waits for the host.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.signals import SignalLayout
from moe_runtime.kernels.exchange.dispatch_send import padded
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, sample_geometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory, RecvBuffers
from moe_runtime.kernels.exchange.signalling import (
    WITHOUT_SIGN,
    exchange_aot_case,
    exchange_of,
    has_failed,
    record_failure,
    signals_of,
    tag_of,
    turns_of,
    wait_for_peer,
)
from moe_runtime.kernels.formats.number_formats import FORMATS, FormatCode, ceil_div
from moe_runtime.kernels.runtime import AotCase

STALE_HANDLE = tl.constexpr(int(ErrorCode.STALE_HANDLE))
MISMATCH = tl.constexpr(int(ErrorCode.MISMATCH))
CAPACITY = tl.constexpr(int(ErrorCode.CAPACITY))
EXPERT_CAPACITY = tl.constexpr(int(ErrorCode.EXPERT_CAPACITY))
DISPATCH_RECV = tl.constexpr(int(Phase.DISPATCH_RECV))
FP8_BLOCK = tl.constexpr(int(FormatCode.FP8_BLOCK))
NVFP4 = tl.constexpr(int(FormatCode.NVFP4))

_GEOMETRY_ARGUMENTS = [
    *("rank", "max_tokens", "count_tag", "chunks", "first_expert", "num_local", "landing_half", "token_flags_half")
]

SLOTS = 32
"""Slots of a chunk."""
EXPERTS = 32
"""Experts that a program compares at a time."""


@triton.jit
def arrived_experts(
    landing_ptrs,
    token_flags_ptrs,
    signal_ptrs,
    latch_ptr,
    epoch,
    rank,
    source,
    token_S,
    max_tokens,
    count_tag,
    first_expert,
    num_local,
    landing_half,
    token_flags_half,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    WORLD: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    IDS_AT: tl.constexpr,
    TOKEN_COUNT: tl.constexpr,
):
    """int32 `[SLOTS, K_PAD]`: expert of this rank that entry `k` of tokens `token_S` of `source` goes to, else -1.

    -1 for all where this rank has failed, or the tokens are for another exchange: what lies in the slots is not to be
    trusted then.
    """
    half = epoch & 1
    count_at = signals_of(signal_ptrs, rank) + TOKEN_COUNT + half * WORLD + source
    count = (tl.load(count_at, volatile=True) & WITHOUT_SIGN) - tag_of(count_tag, epoch)
    count = tl.where(tl.load(latch_ptr, volatile=True) == 0, count, 0)
    slot = source * max_tokens + token_S
    token_flags = (tl.load(token_flags_ptrs + rank) + half * token_flags_half).to(tl.pointer_type(tl.int32))
    valid = (token_S < count) & (token_S < max_tokens) & (count <= max_tokens)
    fresh = valid & (tl.load(token_flags + slot, mask=valid, other=0) == epoch)
    k = tl.arange(0, K_PAD)
    landing = (tl.load(landing_ptrs + rank) + half * landing_half).to(tl.pointer_type(tl.uint8))
    id_at = landing + slot.to(tl.int64)[:, None] * RECORD_BYTES + IDS_AT + k[None, :] * 2
    ids = tl.load(id_at.to(tl.pointer_type(tl.uint16)), mask=fresh[:, None] & (k < K)[None, :], other=65535).to(
        tl.int32
    )
    local = ids - first_expert
    return tl.where((local >= 0) & (local < num_local) & (ids != 65535), local, -1)


@triton.jit(do_not_specialize=[*_GEOMETRY_ARGUMENTS, "timeout_ns"])
def _recv_count_kernel(
    counts_ptr,
    landing_ptrs,
    token_flags_ptrs,
    signal_ptrs,
    epoch_ptr,
    handle_epoch_ptr,
    error_ptr,
    latch_ptr,
    rank,
    max_tokens,
    count_tag,
    chunks,
    first_expert,
    num_local,
    landing_half,
    token_flags_half,
    timeout_ns,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
    REPEATS: tl.constexpr,
    LOOPED: tl.constexpr,
    E_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    IDS_AT: tl.constexpr,
    DISPATCH_FLAG: tl.constexpr,
    TOKEN_COUNT: tl.constexpr,
    ABORT: tl.constexpr,
):
    first = tl.program_id(0)
    for turn in range(turns_of(WORLD * chunks) if LOOPED else 1):
        program = turn * tl.num_programs(0) + first
        source = program // chunks
        token = (program % chunks) * SLOTS + tl.arange(0, SLOTS)
        epoch = tl.load(handle_epoch_ptr)
        half = epoch & 1
        words = signals_of(signal_ptrs, rank) + half * WORLD + source

        if tl.load(epoch_ptr) - epoch >= 2:
            record_failure(
                error_ptr, latch_ptr, signal_ptrs, STALE_HANDLE, rank, DISPATCH_RECV, epoch, 0, 0, rank, ABORT, WORLD
            )
        wait_for_peer(
            words + DISPATCH_FLAG, epoch, source, DISPATCH_RECV, epoch,
            error_ptr, latch_ptr, signal_ptrs, rank, timeout_ns, ABORT, WORLD, WORLD_PAD,
        )  # fmt: skip
        word = tl.load(words + TOKEN_COUNT, volatile=True)
        tag = tag_of(count_tag, epoch)
        count = (word & WITHOUT_SIGN) - tag
        if (has_failed(latch_ptr) == 0) & ((count < 0) | (count > max_tokens)):
            record_failure(
                error_ptr, latch_ptr, signal_ptrs, MISMATCH, source, DISPATCH_RECV, epoch,
                exchange_of(word), exchange_of(tag), rank, ABORT, WORLD,
            )  # fmt: skip
        local = arrived_experts(
            landing_ptrs, token_flags_ptrs, signal_ptrs, latch_ptr, epoch, rank, source, token, max_tokens,
            count_tag, first_expert, num_local, landing_half, token_flags_half, K, K_PAD, WORLD, RECORD_BYTES, IDS_AT,
            TOKEN_COUNT,
        )  # fmt: skip
        for start in range(0, E_PAD, EXPERTS):
            expert = start + tl.arange(0, EXPERTS)
            hit = (local[:, :, None] == expert[None, None, :]).to(tl.int32)
            here = tl.sum(hit, axis=1) if REPEATS else tl.max(hit, axis=1)
            tl.store(counts_ptr + program * E_PAD + expert, tl.sum(here, axis=0))


@triton.jit(do_not_specialize=["rank", "num_chunks", "num_local", "capacity"])
def _recv_offsets_kernel(
    counts_ptr,
    group_offsets_ptr,
    group_scale_offsets_ptr,
    first_block_ptr,
    signal_ptrs,
    handle_epoch_ptr,
    error_ptr,
    latch_ptr,
    rank,
    num_chunks,
    num_local,
    capacity,
    WORLD: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    ABORT: tl.constexpr,
):
    """Replace counts by their exclusive prefix sums over chunks; then offsets of groups and of their scale blocks.

    Example: rows of 3 groups [100, 200, 100] give group_offsets [0, 100, 300, 400], first_block [0, 1, 3] and
    group_scale_offsets [0, 1, 1].
    """
    expert = tl.arange(0, E_PAD)
    running = tl.zeros([E_PAD], dtype=tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        at = counts_ptr + chunk[:, None] * E_PAD + expert[None, :]
        counts = tl.load(at, mask=(chunk < num_chunks)[:, None], other=0)
        before = tl.cumsum(counts, axis=0) - counts
        tl.store(at, running[None, :] + before, mask=(chunk < num_chunks)[:, None])
        running += tl.sum(counts, axis=0)

    if MOST_ROWS > 0:
        most = tl.max(running, axis=0)
        if most > MOST_ROWS:
            record_failure(
                error_ptr, latch_ptr, signal_ptrs, EXPERT_CAPACITY, rank, DISPATCH_RECV, tl.load(handle_epoch_ptr),
                most, MOST_ROWS, rank, ABORT, WORLD,
            )  # fmt: skip
    total = tl.sum(running, axis=0)
    if total > capacity:
        record_failure(
            error_ptr, latch_ptr, signal_ptrs, CAPACITY, rank, DISPATCH_RECV, tl.load(handle_epoch_ptr),
            total, capacity, rank, ABORT, WORLD,
        )  # fmt: skip
    rows = tl.where(tl.load(latch_ptr, volatile=True) == 0, running, 0)
    ends = tl.cumsum(rows, axis=0)
    blocks = (rows + 127) // 128
    first_block = tl.cumsum(blocks, axis=0) - blocks
    tl.store(group_offsets_ptr + expert, ends - rows, mask=expert < num_local)
    tl.store(group_offsets_ptr + num_local, tl.sum(rows, axis=0))
    tl.store(first_block_ptr + expert, first_block, mask=expert < num_local)
    tl.store(group_scale_offsets_ptr + expert, first_block - (ends - rows) // 128, mask=expert < num_local)


@triton.jit(do_not_specialize=[*_GEOMETRY_ARGUMENTS, "first_row"])
def _recv_permute_kernel(
    counts_ptr,
    group_offsets_ptr,
    row_index_ptr,
    positions_ptr,
    landing_ptrs,
    token_flags_ptrs,
    signal_ptrs,
    handle_epoch_ptr,
    latch_ptr,
    rank,
    max_tokens,
    count_tag,
    chunks,
    first_expert,
    num_local,
    landing_half,
    token_flags_half,
    first_row,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    WORLD: tl.constexpr,
    REPEATS: tl.constexpr,
    LOOPED: tl.constexpr,
    E_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    IDS_AT: tl.constexpr,
    TOKEN_COUNT: tl.constexpr,
):
    """Position of each (slot, k) among the contiguous rows, -1 where it has none, and the inverse, `row_index`."""
    first = tl.program_id(0)
    for turn in range(turns_of(WORLD * chunks) if LOOPED else 1):
        program = turn * tl.num_programs(0) + first
        source = program // chunks
        token = (program % chunks) * SLOTS + tl.arange(0, SLOTS)
        epoch = tl.load(handle_epoch_ptr)
        half = epoch & 1
        slot = source * max_tokens + token
        k = tl.arange(0, K_PAD)
        local = arrived_experts(
            landing_ptrs, token_flags_ptrs, signal_ptrs, latch_ptr, epoch, rank, source, token, max_tokens,
            count_tag, first_expert, num_local, landing_half, token_flags_half, K, K_PAD, WORLD, RECORD_BYTES, IDS_AT,
            TOKEN_COUNT,
        )  # fmt: skip
        position = tl.full([SLOTS, K_PAD], -1, tl.int32)
        for start in range(0, E_PAD, EXPERTS):
            expert = start + tl.arange(0, EXPERTS)
            hit = (local[:, :, None] == expert[None, None, :]).to(tl.int32)
            here = tl.sum(hit, axis=1) if REPEATS else tl.max(hit, axis=1)
            earlier = tl.cumsum(here, axis=0) - here
            base = tl.load(counts_ptr + program * E_PAD + expert)
            base += tl.load(group_offsets_ptr + expert, mask=expert < num_local, other=0)
            # One more than the position, so that 0 can mean "not in this block of experts".
            place = (base[None, :] + earlier + 1)[:, None, :]
            if REPEATS:
                place = place + tl.cumsum(hit, axis=1) - hit
            position += tl.sum(hit * place, axis=2)
        inside = (k < K)[None, :] & (token < max_tokens)[:, None]
        tl.store(positions_ptr + slot[:, None] * K + k[None, :], position, mask=inside)
        row = first_row * half + slot
        tl.store(row_index_ptr + position, tl.broadcast_to(row[:, None], [SLOTS, K_PAD]), mask=inside & (position >= 0))


@triton.jit(do_not_specialize=["rank", "landing_half", "first_expert"])
def _recv_rows_kernel(
    positions_ptr,
    group_offsets_ptr,
    first_block_ptr,
    rows_ptr,
    scales_ptr,
    row_scale_ptr,
    landing_ptrs,
    handle_epoch_ptr,
    rank,
    landing_half,
    first_expert,
    LOOPED_SLOTS: tl.constexpr,
    K: tl.constexpr,
    FMT: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    QUANT_BYTES: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROW_SCALE_AT: tl.constexpr,
    IDS_AT: tl.constexpr,
):
    """Copy what one landed token carries to each of its positions: scales, row scale and, if `CONTIGUOUS`, quants."""
    first = tl.program_id(0)
    for turn in range(turns_of(LOOPED_SLOTS) if LOOPED_SLOTS else 1):
        slot = turn * tl.num_programs(0) + first
        half = tl.load(handle_epoch_ptr) & 1
        record = tl.load(landing_ptrs + rank).to(tl.pointer_type(tl.uint8)) + half * landing_half
        record += slot.to(tl.int64) * RECORD_BYTES
        lane = tl.arange(0, BYTES)
        for k in range(K):
            position = tl.load(positions_ptr + slot * K + k)
            if position >= 0:
                if CONTIGUOUS:
                    row = rows_ptr + position.to(tl.int64) * QUANT_BYTES
                    for start in range(0, QUANT_BYTES, BYTES):
                        inside = start + lane < QUANT_BYTES
                        tl.store(row + start + lane, tl.load(record + start + lane, mask=inside), mask=inside)
                if SCALE_COLUMNS > 0:
                    if FMT == FP8_BLOCK:
                        source = (record + SCALES_AT).to(tl.pointer_type(tl.float32))
                        at = scales_ptr + position.to(tl.int64) * SCALE_COLUMNS
                        for start in range(0, SCALE_COLUMNS, BYTES):
                            inside = start + lane < SCALE_COLUMNS
                            tl.store(at + start + lane, tl.load(source + start + lane, mask=inside), mask=inside)
                    else:
                        expert = (
                            tl.load((record + IDS_AT).to(tl.pointer_type(tl.uint16)) + k).to(tl.int32) - first_expert
                        )
                        local_row = position - tl.load(group_offsets_ptr + expert)
                        block = tl.load(first_block_ptr + expert) + local_row // 128
                        columns4: tl.constexpr = (SCALE_COLUMNS + 3) // 4
                        at = scales_ptr + block.to(tl.int64) * columns4 * 512
                        at += (local_row % 32) * 16 + ((local_row % 128) // 32) * 4
                        for start in range(0, columns4 * 4, BYTES):
                            column = start + lane
                            byte = tl.load(record + SCALES_AT + column, mask=column < SCALE_COLUMNS, other=0)
                            tl.store(at + (column // 4) * 512 + column % 4, byte, mask=column < columns4 * 4)
                if FMT == NVFP4:
                    scale = tl.load((record + ROW_SCALE_AT).to(tl.pointer_type(tl.float32)))
                    tl.store(row_scale_ptr + position, scale)


def allocate_counts(geometry: ExchangeGeometry, device: torch.device) -> torch.Tensor:
    """Int32 `[chunks + 1, E]`, `E` padded: rows of each chunk and expert, and the first scale block of each expert."""
    num_chunks = geometry.world_size * ceil_div(geometry.max_tokens, SLOTS)
    return torch.empty((num_chunks + 1, _padded_experts(geometry)), dtype=torch.int32, device=device)


def dispatch_recv(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
) -> None:
    """See `interface.ExchangeBackend`."""
    counts, group_offsets = buffers.counts, buffers.group_offsets
    assert counts is not None
    chunks = ceil_div(geometry.max_tokens, SLOTS)
    num_chunks = len(counts) - 1
    first_block = counts[num_chunks]
    constexprs = _constexprs(geometry)
    landing_half = geometry.landing_half(context.half_bytes["landing"])
    _recv_count_kernel[(geometry.programs(num_chunks),)](
        counts,
        context.landing_pointers,
        context.token_flags_pointers,
        context.signal_pointers,
        context.epoch,
        handle_epoch,
        context.error,
        context.latch,
        geometry.rank,
        geometry.max_tokens,
        count_tag,
        chunks,
        geometry.first_expert,
        geometry.num_local_experts,
        landing_half,
        context.half_bytes["token_flags"],
        timeout_ns,
        **constexprs["count"],
    )
    _recv_offsets_kernel[(1,)](
        counts,
        group_offsets,
        buffers.group_scale_offsets,
        first_block,
        context.signal_pointers,
        handle_epoch,
        context.error,
        context.latch,
        geometry.rank,
        num_chunks,
        geometry.num_local_experts,
        geometry.row_capacity,
        **constexprs["offsets"],
    )
    _recv_permute_kernel[(geometry.programs(num_chunks),)](
        counts,
        group_offsets,
        buffers.row_index,
        buffers.positions,
        context.landing_pointers,
        context.token_flags_pointers,
        context.signal_pointers,
        handle_epoch,
        context.latch,
        geometry.rank,
        geometry.max_tokens,
        count_tag,
        chunks,
        geometry.first_expert,
        geometry.num_local_experts,
        landing_half,
        context.half_bytes["token_flags"],
        landing_half // geometry.record.record_bytes,
        **constexprs["permute"],
    )
    _recv_rows_kernel[(geometry.programs(geometry.num_slots),)](
        buffers.positions,
        group_offsets,
        first_block,
        buffers.rows,
        buffers.scales,
        buffers.row_scale,
        context.landing_pointers,
        handle_epoch,
        geometry.rank,
        landing_half,
        geometry.first_expert,
        **constexprs["rows"],
    )


def _padded_experts(geometry: ExchangeGeometry) -> int:
    """Columns of the counts."""
    return max(EXPERTS, triton.next_power_of_2(geometry.num_local_experts))


@cache
def _constexprs(geometry: ExchangeGeometry) -> dict[str, dict[str, Any]]:
    """The compile-time arguments of each of the four kernels."""
    record, signals = geometry.record, SignalLayout(geometry.world_size)
    e_pad = _padded_experts(geometry)
    place = {
        "K": geometry.top_k,
        "K_PAD": padded(geometry.top_k),
        "WORLD": geometry.world_size,
        "REPEATS": geometry.accepts_repeats,
        "LOOPED": geometry.num_sms is not None,
        "E_PAD": e_pad,
        "SLOTS": SLOTS,
        "EXPERTS": EXPERTS,
        "RECORD_BYTES": record.record_bytes,
        "IDS_AT": record.ids_offset,
        "TOKEN_COUNT": signals.token_count,
    }
    return {
        "count": place
        | {
            "WORLD_PAD": padded(geometry.world_size),
            "DISPATCH_FLAG": signals.dispatch_flag,
            "ABORT": signals.abort,
        },
        "offsets": {
            "WORLD": geometry.world_size,
            "E_PAD": e_pad,
            "CHUNKS": max(1, 4096 // e_pad),
            "MOST_ROWS": geometry.most_rows_of_expert,
            "ABORT": signals.abort,
        },
        "permute": place,
        "rows": {
            "LOOPED_SLOTS": 0 if geometry.num_sms is None else geometry.num_slots,
            "K": geometry.top_k,
            "FMT": int(geometry.token_format.code),
            "CONTIGUOUS": geometry.contiguous,
            "QUANT_BYTES": geometry.token_format.quant_bytes(geometry.hidden),
            "SCALE_COLUMNS": geometry.token_format.scale_columns(geometry.hidden),
            "BYTES": 512,
            "RECORD_BYTES": record.record_bytes,
            "SCALES_AT": record.scales_offset,
            "ROW_SCALE_AT": record.row_scale_offset,
            "IDS_AT": record.ids_offset,
        },
    }


def _aot_cases(fmt: str, contiguous: bool, **sizes: Any) -> tuple[AotCase, ...]:
    geometry = sample_geometry(fmt, contiguous=contiguous, **sizes)
    kernels = {
        "count": _recv_count_kernel,
        "offsets": _recv_offsets_kernel,
        "permute": _recv_permute_kernel,
        "rows": _recv_rows_kernel,
    }
    scales = {"scales_ptr": "*fp32"} if fmt == "fp8_block" else {}
    return tuple(
        exchange_aot_case(f"recv_{name}", fmt, kernels[name], values, scales)
        for name, values in _constexprs(geometry).items()
    )


AOT_CASES = (
    *(case for fmt in FORMATS for contiguous in (False, True) for case in _aot_cases(fmt, contiguous)),
    *_aot_cases("nvfp4", True, num_sms=16),
    *_aot_cases("bf16", False, accepts_repeats=True),
)
