"""Rows of tokens that landed, copied to a block of rows for each expert: `[E, S, H]`, filled from the front.

A program takes a landing slot and copies its token to the rows of its experts, with the scales as `PaddedScales` says.
One more program for each expert writes its counts.

It is bound by memory: 128 tokens of 2 ranks, DeepSeek-V3's sizes in FP8, read 1.9 MB and write 7.3 MB, 3 us at 3 TB/s.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.exchange.landing import LandedTokens
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.exchange.row_kernels import padded
from moe_runtime.kernels.formats.bits import swizzled_offset

NONE = tl.constexpr(int(PaddedScales.NONE))
COLUMNS = tl.constexpr(int(PaddedScales.COLUMNS))
PACKED_COLUMNS = tl.constexpr(int(PaddedScales.PACKED_COLUMNS))
ROWS = tl.constexpr(int(PaddedScales.ROWS))

MOST_AT_ONCE = 4096
"""Most of `rows_at_once`, 16 for each thread. Registers hold few more, and a block of Triton has 2^20 at most."""


def place_padded_rows(landed: LandedTokens, scales_at: int, out: PaddedRows, statistics: torch.Tensor | None) -> None:
    """Fill `out`; add each expert's rows to int32 `statistics` `[E]`. Does not wait for the host.

    `scales_at` is the bytes from the start of a record to its scales.
    """
    experts, slots, row_bytes = out.rows.shape
    top_k = landed.positions.shape[1]
    _dispatch_place_kernel[(slots + experts,)](
        landed.records,
        landed.row_index,
        landed.positions,
        landed.group_offsets,
        landed.epoch,
        out.rows,
        out.rows if out.scales is None else out.scales,
        out.counts,
        out.source_tokens,
        out.layout_range,
        out.positions,
        out.counts if statistics is None else statistics,
        landed.first_row,
        landed.geometry.first_expert,
        landed.geometry.max_tokens,
        slots,
        **_constexprs(
            landed.geometry.record,
            scales_at,
            row_bytes,
            top_k,
            slots // landed.geometry.max_tokens,
            out.num_scales,
            out.kind,
        ),
        AT_ONCE=rows_at_once(slots),
        HAS_STATISTICS=statistics is not None,
        num_warps=8,
    )


def rows_at_once(slots: int) -> int:
    """Rows of an expert that a program looks at together, of at most `slots`."""
    return min(MOST_AT_ONCE, padded(slots))


@cache
def _constexprs(
    record: RecordLayout,
    scales_at: int,
    row_bytes: int,
    top_k: int,
    world_size: int,
    num_scales: int,
    kind: PaddedScales,
) -> dict[str, int]:
    return {
        "RECORD_BYTES": record.record_bytes,
        "IDS_AT": record.ids_offset,
        "SCALES_AT": scales_at,
        "WORDS": row_bytes // 8,
        "WIDTH": min(1024, padded(row_bytes // 8)),
        "K": top_k,
        "K_PAD": padded(top_k),
        "WORLD": world_size,
        "WORLD_PAD": padded(world_size),
        "NUM_SCALES": num_scales // 4 if kind == PaddedScales.PACKED_COLUMNS else num_scales,
        "SCALES_PAD": padded(max(num_scales, 1)),
        "KIND": int(kind),
    }


@triton.jit(do_not_specialize=["first_row", "first_expert", "max_tokens", "slots"])
def _dispatch_place_kernel(
    records_ptr,
    row_index_ptr,
    positions_ptr,
    offsets_ptr,
    epoch_ptr,
    rows_ptr,
    scales_ptr,
    counts_ptr,
    source_tokens_ptr,
    layout_range_ptr,
    out_positions_ptr,
    statistics_ptr,
    first_row,
    first_expert,
    max_tokens,
    slots,
    RECORD_BYTES: tl.constexpr,
    IDS_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr,
    KIND: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
):
    program = tl.program_id(0)
    first = (tl.load(epoch_ptr) & 1) * first_row
    if program < slots:
        slot = program
        k = tl.arange(0, K_PAD)
        position = tl.load(positions_ptr + slot * K + k, mask=k < K, other=-1)
        record = records_ptr + (first + slot).to(tl.int64) * RECORD_BYTES
        here = position >= 0
        ids = tl.load((record + IDS_AT).to(tl.pointer_type(tl.uint16)) + k, mask=here, other=0).to(tl.int32)
        expert = tl.where(here, ids - first_expert, 0)
        row = position - tl.load(offsets_ptr + expert, mask=here, other=0)
        target = expert * slots + row
        tl.store(out_positions_ptr + slot * K + k, tl.where(here, target, -1), mask=k < K)
        tl.store(source_tokens_ptr + target, tl.zeros([K_PAD], tl.int32) + slot % max_tokens, mask=here)
        if tl.max(position, axis=0) >= 0:
            column = tl.arange(0, WIDTH)
            words = record.to(tl.pointer_type(tl.int64))
            for start in range(0, WORDS, WIDTH):
                inside = start + column < WORDS
                value = tl.load(words + start + column, mask=inside, other=0)
                for entry in range(K):
                    chosen = tl.max(tl.where((k == entry) & here, target, -1), axis=0)
                    if chosen >= 0:
                        to = rows_ptr.to(tl.pointer_type(tl.int64)) + chosen.to(tl.int64) * WORDS + start
                        tl.store(to + column, value, mask=inside)
            if KIND != NONE:
                v = tl.arange(0, SCALES_PAD)
                there = v < NUM_SCALES
                if KIND == COLUMNS or KIND == PACKED_COLUMNS:
                    words_at = (record + SCALES_AT).to(tl.pointer_type(tl.int32))
                    if KIND == PACKED_COLUMNS:
                        scale = tl.zeros([SCALES_PAD], tl.int32)
                        for byte in tl.static_range(4):
                            # A power of two: its exponent is the byte.
                            bits = tl.load(words_at + v * 4 + byte, mask=there, other=0)
                            scale = scale | (((bits >> 23) & 0xFF) << (8 * byte))
                    else:
                        scale = tl.load(words_at + v, mask=there, other=0)
                else:
                    scale = tl.load(record + SCALES_AT + v, mask=there, other=0)
                for entry in range(K):
                    chosen = tl.max(tl.where((k == entry) & here, target, -1), axis=0)
                    if chosen >= 0:
                        e, i = (chosen // slots).to(tl.int64), chosen % slots
                        if KIND == COLUMNS or KIND == PACKED_COLUMNS:
                            to = scales_ptr.to(tl.pointer_type(tl.int32)) + e * (NUM_SCALES * slots) + i
                            tl.store(to + v * slots, scale, mask=there)
                        elif KIND == ROWS:
                            tl.store(scales_ptr + chosen.to(tl.int64) * NUM_SCALES + v, scale, mask=there)
                        else:
                            block = e * ((slots + 127) // 128)  # as int64, which is multiplied below
                            to = scales_ptr + block * ((NUM_SCALES + 3) // 4 * 512)
                            to += swizzled_offset(i.to(tl.int64), v, NUM_SCALES)
                            tl.store(to, scale, mask=there)
    else:
        e = program - slots
        begin = tl.load(offsets_ptr + e)
        count = tl.load(offsets_ptr + e + 1) - begin
        tl.store(counts_ptr + e, count)
        if HAS_STATISTICS:
            tl.store(statistics_ptr + e, tl.load(statistics_ptr + e) + count)
        r = tl.arange(0, WORLD_PAD)
        of_source = tl.zeros([WORLD_PAD], tl.int32)
        for start in range(0, count, AT_ONCE):
            i = start + tl.arange(0, AT_ONCE)
            slot_of = tl.load(row_index_ptr + begin + i, mask=i < count, other=0) - first
            source = tl.where(i < count, slot_of // max_tokens, WORLD)
            for rank in range(WORLD):
                of_source += tl.where(r == rank, tl.sum((source == rank).to(tl.int32), axis=0), 0)
        before = tl.cumsum(of_source, axis=0) - of_source
        packed = (before.to(tl.int64) << 32) | of_source.to(tl.int64)
        tl.store(layout_range_ptr + e * WORLD + r, packed, mask=r < WORLD)


@torch.inference_mode()  # memory that was made in this mode may not be changed outside it
def place_reference(landed: LandedTokens, scales_at: int, out: PaddedRows, statistics: torch.Tensor | None) -> None:
    """`place_padded_rows` in torch; waits for the host."""
    experts, slots, row_bytes = out.rows.shape
    offsets = landed.group_offsets.to(torch.int64)
    counts = offsets[1:] - offsets[:-1]
    out.counts.copy_(counts)
    if statistics is not None:
        statistics += counts.to(statistics.dtype)
    total = int(offsets[-1])
    index = landed.row_index[:total].to(torch.int64)
    device = index.device
    expert = torch.repeat_interleave(torch.arange(experts, device=device), counts)
    row = torch.arange(total, device=device) - offsets[expert]
    slot = index - int(landed.epoch[0] & 1) * landed.first_row
    records = landed.records[index]
    out.rows[expert, row] = records[:, :row_bytes]
    out.source_tokens[expert, row] = (slot % landed.geometry.max_tokens).to(torch.int32)
    target = torch.cat([expert * slots + row, torch.full((1,), -1, device=device)])
    # Position -1 takes the last entry.
    out.positions.copy_(target[landed.positions.to(torch.int64)])
    world = out.layout_range.shape[1]
    of_source = torch.zeros(experts, world, dtype=torch.int64, device=device)
    of_source.index_put_((expert, slot // landed.geometry.max_tokens), torch.ones_like(slot), accumulate=True)
    out.layout_range.copy_((of_source.cumsum(1) - of_source) << 32 | of_source)
    if out.scales is None:
        return
    scales = records[:, scales_at : scales_at + out.num_scales * out.kind.scale_bytes].contiguous()
    if out.kind == PaddedScales.COLUMNS:
        out.scales[expert, row] = scales.view(torch.float32)
    elif out.kind == PaddedScales.PACKED_COLUMNS:
        out.scales[expert, row] = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    elif out.kind == PaddedScales.ROWS:
        out.scales[expert, row] = scales
    else:
        of_four = torch.nn.functional.pad(scales, (0, -out.num_scales % 4)).view(total, -1, 4)
        out.scales[expert, row // 128, :, row % 32, row % 128 // 32] = of_four
