"""Combine: reduce the experts of a rank for each token, send one partial result home, and sum over ranks.

`y = bf16(shared + sum over ranks ascending of wire(sum over that rank's experts, k ascending, of w_k * bf16(acc)))`,
sums in fp32, `shared` first and only where there is one. Products and sums are kept apart (no fused multiply-add),
so that every engine gives the same bits. A NaN is a NaN everywhere, but its sign and payload are the machine's.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.signals import COMBINED, SignalLayout
from moe_runtime.kernels.exchange.dispatch_send import padded, ranks_of, store_quants, tile_columns
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, sample_geometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory
from moe_runtime.kernels.exchange.signalling import (
    agreed,
    await_abort_sent,
    exchange_aot_case,
    has_failed,
    last_to_arrive,
    record_failure,
    signals_of,
    turns_of,
    wait_for_peer,
)
from moe_runtime.kernels.formats.bits import bf16_bits_to_f32, e4m3_bits_to_f32, e8m0_to_f32, f32_to_bf16_bits
from moe_runtime.kernels.formats.number_formats import COMBINE_FORMATS, FormatCode
from moe_runtime.kernels.formats.quantize import quantize_tile
from moe_runtime.kernels.runtime import AotCase

STALE_HANDLE = tl.constexpr(int(ErrorCode.STALE_HANDLE))
COMBINE_SEND = tl.constexpr(int(Phase.COMBINE_SEND))
COMBINE_RECV = tl.constexpr(int(Phase.COMBINE_RECV))
BF16 = tl.constexpr(int(FormatCode.BF16))
FP8_BLOCK = tl.constexpr(int(FormatCode.FP8_BLOCK))


@triton.jit(do_not_specialize=["rank", "max_tokens", "landing_half", "combine_half"])
def _combine_send_kernel(
    output_ptr,
    output_stride,
    positions_ptr,
    starts_ptr,
    landing_ptrs,
    combine_ptrs,
    signal_ptrs,
    epoch_ptr,
    handle_epoch_ptr,
    error_ptr,
    latch_ptr,
    counter_ptr,
    rank,
    max_tokens,
    landing_half,
    combine_half,
    OUTPUT_BF16: tl.constexpr,
    LOOPED: tl.constexpr,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
    WIRE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTIAL_BYTES: tl.constexpr,
    PARTIAL_SCALES_AT: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    COMBINE_FLAG: tl.constexpr,
    ABORT: tl.constexpr,
):
    first = tl.program_id(0)
    epoch = tl.load(handle_epoch_ptr)
    half = epoch & 1
    # A stale handle's slots hold another step's records: their routing must not be used as addresses.
    stale = agreed((tl.load(epoch_ptr, volatile=True) - epoch >= 2).to(tl.int32)) != 0
    if stale:
        record_failure(
            error_ptr, latch_ptr, signal_ptrs, STALE_HANDLE, rank, COMBINE_SEND, epoch, 0, 0, rank, ABORT, WORLD
        )
    for turn in range(turns_of(WORLD * max_tokens) if LOOPED else 1):
        slot = turn * tl.num_programs(0) + first
        source = slot // max_tokens
        token = slot % max_tokens
        k = tl.arange(0, K_PAD)
        positions = tl.load(positions_ptr + slot * K + k, mask=k < K, other=-1)
        if (tl.max(positions, axis=0) >= 0) & (stale == 0):
            record = tl.load(landing_ptrs + rank).to(tl.pointer_type(tl.uint8)) + half * landing_half
            record += slot.to(tl.int64) * RECORD_BYTES
            ids = tl.load((record + IDS_AT).to(tl.pointer_type(tl.uint16)) + k, mask=k < K, other=65535).to(tl.int32)
            owners = ranks_of(tl.where(ids == 65535, -1, ids), starts_ptr, WORLD, WORLD_PAD)
            part = 0
            for peer in range(WORLD):
                if peer < rank:
                    part += tl.max((owners == peer).to(tl.int32), axis=0)
            partial = tl.load(combine_ptrs + source).to(tl.pointer_type(tl.uint8)) + half * combine_half
            partial += (token * PARTS + part).to(tl.int64) * PARTIAL_BYTES
            weights = (record + WEIGHTS_AT).to(tl.pointer_type(tl.float32))
            column = tl.arange(0, COLUMNS)
            for start in range(0, HIDDEN, COLUMNS):
                inside = start + column < HIDDEN
                total = tl.zeros([COLUMNS], dtype=tl.float32)
                for entry in range(K):
                    position = tl.load(positions_ptr + slot * K + entry)
                    if position >= 0:
                        at = position.to(tl.int64) * output_stride + start + column
                        if OUTPUT_BF16:
                            row = tl.load(output_ptr.to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0)
                        else:
                            row = f32_to_bf16_bits(tl.load(output_ptr + at, mask=inside, other=0.0))
                        total += tl.load(weights + entry) * bf16_bits_to_f32(row)
                quants, scales = quantize_tile(
                    tl.reshape(total, [1, COLUMNS]), tl.full([1], 1.0, tl.float32), WIRE
                )  # fmt: skip
                store_quants(partial, partial + PARTIAL_SCALES_AT, quants, scales, start, HIDDEN, COLUMNS, WIRE)

    if last_to_arrive(counter_ptr, tl.num_programs(0)):
        if has_failed(latch_ptr):
            await_abort_sent(latch_ptr)
        for peer in range(WORLD):
            flag = signals_of(signal_ptrs, peer) + COMBINE_FLAG + half * WORLD + rank
            tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["num_tokens", "rank", "combine_half", "timeout_ns"])
def _combine_recv_kernel(
    y_ptr,
    shared_ptr,
    shared_stride,
    num_parts_ptr,
    num_tokens,
    combine_ptrs,
    signal_ptrs,
    epoch_ptr,
    handle_epoch_ptr,
    error_ptr,
    latch_ptr,
    rank,
    combine_half,
    timeout_ns,
    HAS_SHARED: tl.constexpr,
    LOOPED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
    WIRE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTIAL_BYTES: tl.constexpr,
    PARTIAL_SCALES_AT: tl.constexpr,
    COMBINE_FLAG: tl.constexpr,
    ABORT: tl.constexpr,
):
    first = tl.program_id(0)
    epoch = tl.load(handle_epoch_ptr)
    half = epoch & 1
    flags = signals_of(signal_ptrs, rank) + COMBINE_FLAG + half * WORLD
    if tl.load(epoch_ptr) - epoch >= 2:
        record_failure(
            error_ptr, latch_ptr, signal_ptrs, STALE_HANDLE, rank, COMBINE_RECV, epoch, 0, 0, rank, ABORT, WORLD
        )
    for peer in range(WORLD):
        wait_for_peer(
            flags + peer, epoch, peer, COMBINE_RECV, epoch,
            error_ptr, latch_ptr, signal_ptrs, rank, timeout_ns, ABORT, WORLD, WORLD_PAD,
        )  # fmt: skip
    failed = has_failed(latch_ptr)
    for turn in range(turns_of(num_tokens) if LOOPED else 1):
        token = turn * tl.num_programs(0) + first
        num_parts = tl.load(num_parts_ptr + token, mask=(token < num_tokens) & (failed == 0), other=0)
        partials = tl.load(combine_ptrs + rank).to(tl.pointer_type(tl.uint8)) + half * combine_half
        partials += token.to(tl.int64) * (PARTS * PARTIAL_BYTES)
        column = tl.arange(0, COLUMNS)
        for start in range(0, HIDDEN, COLUMNS):
            inside = (start + column < HIDDEN) & (token < num_tokens)
            total = tl.zeros([COLUMNS], dtype=tl.float32)
            if HAS_SHARED:
                shared_row = shared_ptr.to(tl.pointer_type(tl.uint16)) + token.to(tl.int64) * shared_stride
                total = bf16_bits_to_f32(tl.load(shared_row + start + column, mask=inside, other=0))
            for part in range(num_parts):
                partial = partials + part * PARTIAL_BYTES
                if WIRE == BF16:
                    words = partial.to(tl.pointer_type(tl.uint16))
                    total += bf16_bits_to_f32(tl.load(words + start + column, mask=inside, other=0))
                else:
                    values = e4m3_bits_to_f32(tl.load(partial + start + column, mask=inside, other=0))
                    if WIRE == FP8_BLOCK:
                        scales = (partial + PARTIAL_SCALES_AT).to(tl.pointer_type(tl.float32))
                        total += values * tl.load(scales + (start + column) // 128, mask=inside, other=0.0)
                    else:
                        byte = tl.load(partial + PARTIAL_SCALES_AT + (start + column) // 32, mask=inside, other=127)
                        total += values * e8m0_to_f32(byte)
            bits = f32_to_bf16_bits(total)
            if failed:
                bits = tl.full([COLUMNS], 0x7FC0, tl.uint16)
            tl.store(
                y_ptr.to(tl.pointer_type(tl.uint16)) + token.to(tl.int64) * HIDDEN + start + column, bits, mask=inside
            )


@cache
def _partial_constexprs(geometry: ExchangeGeometry) -> dict[str, int]:
    signals = SignalLayout(geometry.world_size)
    return {
        "COMBINE_FLAG": signals.combine_flag,
        "ABORT": signals.abort,
        "HIDDEN": geometry.output_hidden,
        "WORLD": geometry.world_size,
        "WORLD_PAD": padded(geometry.world_size),
        "WIRE": int(geometry.combine_format.code),
        "COLUMNS": tile_columns(geometry.output_hidden),
        "PARTS": geometry.parts,
        "LOOPED": geometry.num_sms is not None,
        "PARTIAL_BYTES": geometry.partial_bytes,
        "PARTIAL_SCALES_AT": geometry.partial_scales_offset,
    }


@cache
def _record_constexprs(geometry: ExchangeGeometry) -> dict[str, int]:
    return {
        "K": geometry.top_k,
        "K_PAD": padded(geometry.top_k),
        "RECORD_BYTES": geometry.record.record_bytes,
        "IDS_AT": geometry.record.ids_offset,
        "WEIGHTS_AT": geometry.record.weights_offset,
    }


def combine_send(
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
    """See `interface.ExchangeBackend`."""
    assert await_ns is None and received is None
    _combine_send_kernel[(geometry.programs(geometry.num_slots),)](
        output_RH,
        output_RH.stride(0),
        positions_SK,
        starts,
        context.landing_pointers,
        context.combine_pointers,
        context.signal_pointers,
        context.epoch,
        handle_epoch,
        context.error,
        context.latch,
        context.counters[COMBINED:],
        geometry.rank,
        geometry.max_tokens,
        geometry.landing_half(context.half_bytes["landing"]),
        context.half_bytes["combine"],
        OUTPUT_BF16=output_RH.dtype == torch.bfloat16,
        **_record_constexprs(geometry),
        **_partial_constexprs(geometry),
        num_warps=8,
        enable_fp_fusion=False,
    )


def combine_recv(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    handle_epoch: torch.Tensor,
    num_parts_T: torch.Tensor,
    shared_TH: torch.Tensor | None,
    y_TH: torch.Tensor,
    timeout_ns: int,
) -> None:
    """See `interface.ExchangeBackend`."""
    num_tokens = y_TH.shape[0]
    # A rank without tokens waits too, so that it learns of a peer's failure in the same step.
    _combine_recv_kernel[(geometry.programs(num_tokens),)](
        y_TH,
        shared_TH if shared_TH is not None else y_TH,
        shared_TH.stride(0) if shared_TH is not None else 0,
        num_parts_T,
        num_tokens,
        context.combine_pointers,
        context.signal_pointers,
        context.epoch,
        handle_epoch,
        context.error,
        context.latch,
        geometry.rank,
        context.half_bytes["combine"],
        timeout_ns,
        HAS_SHARED=shared_TH is not None,
        **_partial_constexprs(geometry),
        num_warps=8,
        enable_fp_fusion=False,
    )


def _aot_cases(wire: str, num_sms: int | None = None) -> tuple[AotCase, ...]:
    geometry = sample_geometry("nvfp4", combine_format=wire, num_sms=num_sms)
    partial = _partial_constexprs(geometry)
    send = _record_constexprs(geometry) | partial
    return (
        exchange_aot_case("combine_send", wire, _combine_send_kernel, {"OUTPUT_BF16": True, **send}),
        exchange_aot_case(
            "combine_send", wire, _combine_send_kernel, {"OUTPUT_BF16": False, **send}, {"output_ptr": "*fp32"}
        ),
        exchange_aot_case("combine_recv", wire, _combine_recv_kernel, {"HAS_SHARED": True, **partial}),
        exchange_aot_case("combine_recv", wire, _combine_recv_kernel, {"HAS_SHARED": False, **partial}),
    )


AOT_CASES = (*(case for wire in COMBINE_FORMATS for case in _aot_cases(wire)), *_aot_cases("bf16", num_sms=16))
