"""Dispatch: quantize each token once, in registers, and store its record to every rank that holds one of its experts.

A token goes once to a rank, whatever the number of its experts there, and always to the slot of its own index in the
part of the landing region that belongs to its source rank. Each slot has a token flag, the epoch, which tells a fresh
record from an old one. The last program of a launch raises the flags: a flag means that all records of this rank have
landed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.signals import SignalLayout
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, sample_geometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory
from moe_runtime.kernels.exchange.signalling import (
    adopt_aborts,
    await_abort_sent,
    exchange_aot_case,
    has_failed,
    last_to_arrive,
    milliseconds,
    record_failure,
    signals_of,
    tag_of,
    turns_of,
    wait_either,
)
from moe_runtime.kernels.formats.bits import bf16_bits_to_f32
from moe_runtime.kernels.formats.number_formats import FORMATS, FormatCode
from moe_runtime.kernels.formats.quantize import quantize_tile, token_gsf
from moe_runtime.kernels.runtime import AotCase

ROUTING = tl.constexpr(int(ErrorCode.ROUTING))
TIMEOUT = tl.constexpr(int(ErrorCode.TIMEOUT))
DISPATCH_SEND = tl.constexpr(int(Phase.DISPATCH_SEND))
BF16 = tl.constexpr(int(FormatCode.BF16))
FP8_BLOCK = tl.constexpr(int(FormatCode.FP8_BLOCK))
MXFP8 = tl.constexpr(int(FormatCode.MXFP8))
NVFP4 = tl.constexpr(int(FormatCode.NVFP4))


@triton.jit
def ranks_of(ids_K, starts_ptr, WORLD: tl.constexpr, WORLD_PAD: tl.constexpr):
    """Rank that owns each expert id; -1 for the id -1. Example: starts [0, 3, 5], ids [4, 0, -1] give [1, 0, -1]."""
    bound = tl.arange(0, WORLD_PAD)
    ends = tl.load(starts_ptr + 1 + bound, mask=bound < WORLD, other=2147483647)
    owner = tl.sum((ids_K[:, None] >= ends[None, :]).to(tl.int32), axis=1)
    return tl.where(ids_K >= 0, owner, -1)


@triton.jit
def checked_ids(raw_K, k, num_experts, K: tl.constexpr, REPEATS: tl.constexpr):
    """`(ids, bad)`: int32 ids with -1 where an id is unrouted, out of range or a repetition; `bad` marks the last two.

    Example: 8 experts, raw [3, 9, 3, -1] give ids [3, -1, -1, -1] and bad [0, 1, 1, 0]. With `REPEATS` they give ids
    [3, -1, 3, -1] and bad [0, 1, 0, 0], and an id below -1 is not bad either.
    """
    in_range = (raw_K >= 0) & (raw_K < num_experts)
    id_K = tl.where(in_range, raw_K, -1).to(tl.int32)
    if REPEATS:
        bad = (raw_K >= num_experts) & (k < K)
    else:
        # Two one-dimensional copies of the ids: entry [i, j] compares entry i with an earlier entry j.
        earlier = k[None, :] < k[:, None]
        same = (id_K[:, None] == id_K[None, :]) & earlier & (id_K >= 0)[:, None]
        repeated = tl.max(same.to(tl.int32), axis=1) > 0
        bad = (((raw_K < -1) | (raw_K >= num_experts)) | repeated) & (k < K)
        id_K = tl.where(repeated, -1, id_K)
    return id_K, bad


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "count_tag",
        "rank",
        "num_experts",
        "max_tokens",
        "landing_half",
        "token_flags_half",
        "timeout_ns",
    ]
)
def _dispatch_send_kernel(
    x_ptr,
    x_stride,
    topk_idx_ptr,
    topk_weights_ptr,
    gsf_ptr,
    num_tokens,
    count_tag,
    starts_ptr,
    landing_ptrs,
    token_flags_ptrs,
    signal_ptrs,
    epoch_ptr,
    handle_epoch_ptr,
    num_parts_ptr,
    error_ptr,
    latch_ptr,
    counter_ptr,
    rank,
    num_experts,
    max_tokens,
    landing_half,
    token_flags_half,
    timeout_ns,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
    FMT: tl.constexpr,
    STATIC_GSF: tl.constexpr,
    AWAIT_READY: tl.constexpr,
    REPEATS: tl.constexpr,
    LOOPED: tl.constexpr,
    COLUMNS: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROW_SCALE_AT: tl.constexpr,
    SOURCE_AT: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    DISPATCH_FLAG: tl.constexpr,
    TOKEN_COUNT: tl.constexpr,
    COMBINE_FLAG: tl.constexpr,
    READY: tl.constexpr,
    ABORT: tl.constexpr,
):
    first = tl.program_id(0)
    epoch = tl.load(epoch_ptr) + 1
    half = epoch & 1
    own = signals_of(signal_ptrs, rank)

    for turn in range(turns_of(tl.maximum(num_tokens, 1)) if LOOPED else 1):
        token = turn * tl.num_programs(0) + first
        if token == 0:
            for peer in range(WORLD):
                tl.atomic_xchg(signals_of(signal_ptrs, peer) + READY + rank, epoch, sem="release", scope="sys")

        # The one program of a rank without tokens has nothing to send, but waits and raises the flags like any other.
        here = token < num_tokens
        k = tl.arange(0, K_PAD)
        raw = tl.load(topk_idx_ptr + token * K + k, mask=(k < K) & here, other=-1).to(tl.int64)
        ids, bad = checked_ids(raw, k, num_experts, K, REPEATS)
        if tl.max(bad.to(tl.int32), axis=0) > 0:
            first_bad = tl.min(tl.where(bad, k, K_PAD), axis=0)
            bad_id = tl.sum(tl.where(k == first_bad, raw, 0), axis=0).to(tl.int32)
            record_failure(
                error_ptr, latch_ptr, signal_ptrs, ROUTING, rank, DISPATCH_SEND, epoch,
                bad_id, token, rank, ABORT, WORLD,
            )  # fmt: skip
        owners = ranks_of(ids, starts_ptr, WORLD, WORLD_PAD)

        # A half may be written once its reader has entered this epoch, or has combined the epoch that used this half
        # before. The first program waits for all peers: it writes count and flag on each.
        parts = 0
        for peer in range(WORLD):
            goes = tl.max((owners == peer).to(tl.int32), axis=0)
            parts += goes
            if AWAIT_READY:
                if ((goes > 0) | (token == 0)) & (has_failed(latch_ptr) == 0):
                    late = wait_either(
                        own + READY + peer,
                        epoch,
                        own + COMBINE_FLAG + half * WORLD + peer,
                        epoch - 2,
                        latch_ptr,
                        own,
                        timeout_ns,
                        ABORT,
                        WORLD,
                        WORLD_PAD,
                    )
                    if late:
                        record_failure(
                            error_ptr, latch_ptr, signal_ptrs, TIMEOUT, peer, DISPATCH_SEND, epoch,
                            milliseconds(timeout_ns), 0, rank, ABORT, WORLD,
                        )  # fmt: skip
        adopt_aborts(error_ptr, latch_ptr, signal_ptrs, rank, ABORT, WORLD, WORLD_PAD)
        tl.store(num_parts_ptr + token, parts, mask=here)

        if here & (has_failed(latch_ptr) == 0):
            x_row = x_ptr.to(tl.pointer_type(tl.uint16)) + token.to(tl.int64) * x_stride
            column = tl.arange(0, COLUMNS)
            gsf = tl.full([1], 1.0, tl.float32)
            if FMT == NVFP4:
                if STATIC_GSF:
                    gsf = tl.load(gsf_ptr + tl.arange(0, 1))
                else:
                    # Magnitudes as integers order like the floats, with Inf and NaN above all numbers.
                    top = tl.zeros([COLUMNS], dtype=tl.int32)
                    for start in range(0, HIDDEN, COLUMNS):
                        raw_x = tl.load(x_row + start + column, mask=start + column < HIDDEN, other=0)
                        top = tl.maximum(top, (raw_x.to(tl.int32) & 0x7FFF))
                    amax_bits = tl.max(tl.reshape(top, [1, COLUMNS]), axis=1)
                    gsf = token_gsf(bf16_bits_to_f32(amax_bits.to(tl.uint16)))

            slot = (rank * max_tokens + token).to(tl.int64)
            for start in range(0, HIDDEN, COLUMNS):
                raw_x = tl.load(x_row + start + column, mask=start + column < HIDDEN, other=0)
                if FMT == BF16:
                    # Bits as they are: rows may hold other data than numbers.
                    quants, scales = raw_x, raw_x
                else:
                    quants, scales = quantize_tile(tl.reshape(bf16_bits_to_f32(raw_x), [1, COLUMNS]), gsf, FMT)
                for peer in range(WORLD):
                    if tl.max((owners == peer).to(tl.int32), axis=0) > 0:
                        record = tl.load(landing_ptrs + peer).to(tl.pointer_type(tl.uint8))
                        record += half * landing_half + slot * RECORD_BYTES
                        store_quants(record, record + SCALES_AT, quants, scales, start, HIDDEN, COLUMNS, FMT)

            weights = tl.load(topk_weights_ptr + token * K + k, mask=k < K, other=0.0)
            for peer in range(WORLD):
                if tl.max((owners == peer).to(tl.int32), axis=0) > 0:
                    record = tl.load(landing_ptrs + peer).to(tl.pointer_type(tl.uint8))
                    record += half * landing_half + slot * RECORD_BYTES
                    if FMT == NVFP4:
                        row_scale = tl.div_rn(tl.full([1], 1.0, tl.float32), gsf)
                        tl.store((record + ROW_SCALE_AT).to(tl.pointer_type(tl.float32)) + tl.arange(0, 1), row_scale)
                    tl.store((record + SOURCE_AT).to(tl.pointer_type(tl.int32)), token)
                    tl.store((record + IDS_AT).to(tl.pointer_type(tl.uint16)) + k, ids.to(tl.uint16), mask=k < K)
                    tl.store((record + WEIGHTS_AT).to(tl.pointer_type(tl.float32)) + k, weights, mask=k < K)
                    token_flag = (
                        tl.load(token_flags_ptrs + peer).to(tl.pointer_type(tl.uint8)) + half * token_flags_half
                    )
                    tl.store(token_flag.to(tl.pointer_type(tl.int32)) + slot, epoch)

    if last_to_arrive(counter_ptr, tl.num_programs(0)):
        tl.store(epoch_ptr, epoch)
        tl.store(handle_epoch_ptr, epoch)
        failed = has_failed(latch_ptr)
        if failed:
            await_abort_sent(latch_ptr)
        for peer in range(WORLD):
            words = signals_of(signal_ptrs, peer) + half * WORLD + rank
            # After a failure, readers of the half's last count have not been awaited.
            if failed == 0:
                tl.store(words + TOKEN_COUNT, num_tokens + tag_of(count_tag, epoch))
            tl.debug_barrier()
            tl.atomic_xchg(words + DISPATCH_FLAG, epoch, sem="release", scope="sys")


@triton.jit
def store_quants(
    quants_at, scales_at, quants, scales, start, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, FMT: tl.constexpr
):
    """Store a `[1, COLUMNS]` tile of `quantize_tile`, columns from `start`, into a row's quants and scales."""
    if FMT == BF16:
        column = tl.arange(0, COLUMNS)
        words = quants_at.to(tl.pointer_type(tl.uint16)) + start + column
        tl.store(words, tl.reshape(quants, [COLUMNS]), mask=start + column < HIDDEN)
    elif FMT == NVFP4:
        pair = tl.arange(0, COLUMNS // 2)
        tl.store(
            quants_at + start // 2 + pair, tl.reshape(quants, [COLUMNS // 2]), mask=start // 2 + pair < HIDDEN // 2
        )
        block = tl.arange(0, COLUMNS // 16)
        tl.store(
            scales_at + start // 16 + block,
            tl.reshape(scales, [COLUMNS // 16]),
            mask=start // 16 + block < HIDDEN // 16,
        )
    elif FMT == MXFP8:
        column = tl.arange(0, COLUMNS)
        tl.store(quants_at + start + column, tl.reshape(quants, [COLUMNS]), mask=start + column < HIDDEN)
        block = tl.arange(0, COLUMNS // 32)
        tl.store(
            scales_at + start // 32 + block,
            tl.reshape(scales, [COLUMNS // 32]),
            mask=start // 32 + block < HIDDEN // 32,
        )
    else:
        column = tl.arange(0, COLUMNS)
        tl.store(quants_at + start + column, tl.reshape(quants, [COLUMNS]), mask=start + column < HIDDEN)
        block = tl.arange(0, COLUMNS // 128)
        words = scales_at.to(tl.pointer_type(tl.float32)) + start // 128 + block
        tl.store(words, tl.reshape(scales, [COLUMNS // 128]), mask=start // 128 + block < (HIDDEN + 127) // 128)


def tile_columns(hidden: int) -> int:
    """Columns that a program quantizes at a time: a power of two, 128 to 2048."""
    return max(128, min(2048, triton.next_power_of_2(hidden)))


def padded(n: int) -> int:
    """Power of two, at least 2, that holds `n` lanes."""
    return max(2, triton.next_power_of_2(n))


@cache
def _record_constexprs(geometry: ExchangeGeometry) -> dict[str, int]:
    signals = SignalLayout(geometry.world_size)
    return {
        **geometry.record.constants,
        "HIDDEN": geometry.hidden,
        "K": geometry.top_k,
        "K_PAD": padded(geometry.top_k),
        "WORLD": geometry.world_size,
        "WORLD_PAD": padded(geometry.world_size),
        "FMT": int(geometry.token_format.code),
        "REPEATS": geometry.accepts_repeats,
        "LOOPED": geometry.num_sms is not None,
        "COLUMNS": tile_columns(geometry.hidden),
        "DISPATCH_FLAG": signals.dispatch_flag,
        "TOKEN_COUNT": signals.token_count,
        "COMBINE_FLAG": signals.combine_flag,
        "READY": signals.ready,
        "ABORT": signals.abort,
    }


def dispatch_send(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    starts: torch.Tensor,
    x_TH: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    gsf: torch.Tensor | None,
    handle_epoch: torch.Tensor,
    num_parts_T: torch.Tensor,
    timeout_ns: int,
) -> None:
    """See `interface.ExchangeBackend`."""
    num_tokens = x_TH.shape[0]
    _dispatch_send_kernel[(geometry.programs(num_tokens),)](
        x_TH,
        x_TH.stride(0),
        topk_idx_TK,
        topk_weights_TK,
        gsf if gsf is not None else topk_weights_TK,
        num_tokens,
        count_tag,
        starts,
        context.landing_pointers,
        context.token_flags_pointers,
        context.signal_pointers,
        context.epoch,
        handle_epoch,
        num_parts_T,
        context.error,
        context.latch,
        context.counters,
        geometry.rank,
        geometry.num_experts,
        geometry.max_tokens,
        geometry.landing_half(context.half_bytes["landing"]),
        context.half_bytes["token_flags"],
        timeout_ns,
        STATIC_GSF=gsf is not None,
        AWAIT_READY=context.heap.directly_mapped,
        **_record_constexprs(geometry),
        num_warps=8,
        enable_fp_fusion=False,
    )


def _aot_case(fmt: str, static: bool, **sizes: Any) -> AotCase:
    constexprs = _record_constexprs(sample_geometry(fmt, **sizes))
    values = {"STATIC_GSF": static, "AWAIT_READY": True, **constexprs}
    return exchange_aot_case("dispatch_send", fmt, _dispatch_send_kernel, values)


AOT_CASES = (
    *(_aot_case(fmt, False) for fmt in FORMATS),
    _aot_case("nvfp4", True),
    _aot_case("nvfp4", False, num_sms=16),
    _aot_case("bf16", False, accepts_repeats=True),
)
