"""The exchange in torch: an `ExchangeBackend` with the same regions, words and bits as the kernels.

The kernels are tested against it, and it runs where there is no GPU, or where no kernel takes the sizes of a layer.
Ranks that share a heap may mix it with the kernels.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.signals import ABORT_WORDS, ANY_AHEAD, WITHOUT_SIGN, exchange_of, has_reached, tag_of
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory, RecvBuffers, SentTokens
from moe_runtime.kernels.exchange.landing import LandedTokens
from moe_runtime.kernels.exchange.padded import place_reference
from moe_runtime.kernels.exchange.padded_rows import PaddedRows
from moe_runtime.kernels.exchange.waits import Watch, count_combine_waits, count_dispatch_waits
from moe_runtime.kernels.formats.number_formats import BF16, FormatCode, QuantizedRows, TokenFormat
from moe_runtime.kernels.formats.reference_quantize import copy_as, dequantize_rows, f32_to_bf16_bits, quantize_rows

SPINS_BEFORE_SLEEP = 200
SLEEPS_S = 2e-4, 2e-3
"""Least and longest sleep of a wait, which else is a sixteenth of the time waited: ranks may share few cores."""


def _signals_of(context: ExchangeMemory, rank: int) -> torch.Tensor:
    return context.heap.peer_tensor("signals", rank).view(torch.int32)


def _half(context: ExchangeMemory, region: str, rank: int, offset: int, num_bytes: int) -> torch.Tensor:
    return context.heap.peer_tensor(region, rank)[offset : offset + num_bytes]


def _landing(context: ExchangeMemory, geometry: ExchangeGeometry, rank: int, half: int) -> torch.Tensor:
    """uint8 `[S, record_bytes]`: the landing slots of `rank` in one half."""
    num_bytes = geometry.num_slots * geometry.record.record_bytes
    offset = half * geometry.landing_half(context.half_bytes["landing"])
    return _half(context, "landing", rank, offset, num_bytes).view(geometry.num_slots, geometry.record.record_bytes)


def _token_flags(context: ExchangeMemory, geometry: ExchangeGeometry, rank: int, half: int) -> torch.Tensor:
    offset = half * context.half_bytes["token_flags"]
    return _half(context, "token_flags", rank, offset, 4 * geometry.num_slots).view(torch.int32)


def _partials(context: ExchangeMemory, geometry: ExchangeGeometry, rank: int, half: int) -> torch.Tensor:
    """uint8 `[max_tokens, parts, partial_bytes]`: partial results that came home to `rank`."""
    num_bytes = geometry.max_tokens * geometry.parts * geometry.partial_bytes
    flat = _half(context, "combine", rank, half * context.half_bytes["combine"], num_bytes)
    return flat.view(geometry.max_tokens, geometry.parts, geometry.partial_bytes)


def next_epoch(epoch: int) -> int:
    """`epoch + 1` in wrapping int32 arithmetic."""
    return (epoch + 1 + 0x80000000) % (1 << 32) - 0x80000000


def record_failure(
    context: ExchangeMemory,
    code: int,
    about: int,
    phase: int,
    epoch: int,
    detail: int = 0,
    detail2: int = 0,
    origin: int | None = None,
) -> None:
    """Record the first failure of this rank, or of rank `origin`, here and on every peer; later ones change nothing."""
    if int(context.latch[0]) == 0:
        context.latch[0] = int(code)
        whose = context.rank if origin is None else origin
        own = [about, int(phase), epoch, detail, whose, detail2]
        context.error[1:7] = torch.tensor(own, dtype=torch.int32, device="cpu")
        context.error[0] = int(code)
        for peer in range(context.world_size):
            if peer != context.rank:
                start = context.signals_layout.abort + context.rank * ABORT_WORDS
                words = _signals_of(context, peer)[start : start + ABORT_WORDS]
                told_by = 0 if whose == context.rank else whose + 1
                record = [int(phase), epoch, about, detail, detail2, told_by]
                words[1:7] = torch.tensor(record, dtype=torch.int32, device="cpu")
                words[0] = int(code)
        context.latch[1] = 1


def adopt_aborts(context: ExchangeMemory) -> None:
    """Adopt the failure of a peer, if there is an abort message, and forward it, as `signalling.adopt_aborts`."""
    start = context.signals_layout.abort
    aborts = _signals_of(context, context.rank)[start : start + ABORT_WORDS * context.world_size]
    aborts = aborts.view(context.world_size, ABORT_WORDS)
    # A list, since `nonzero` fails where a word changes meanwhile.
    aborted = [peer for peer, code in enumerate(aborts[:, 0].tolist()) if code]
    if int(context.latch[0]) == 0 and aborted:
        peer = aborted[0]
        code, phase, epoch, about, detail, detail2, told_by = aborts[peer, :7].tolist()
        record_failure(context, code, about, phase, epoch, detail, detail2, origin=told_by - 1 if told_by else peer)


def _wait(
    context: ExchangeMemory,
    words: list[tuple[int, int, int]],
    peer: int,
    phase: Phase,
    epoch: int,
    timeout_ns: int,
    watch: Watch | None = None,
) -> None:
    """Wait until one of `words` is reached, an abort comes, or the clock runs out (recorded as a timeout).

    `words` are a word, an epoch, and by how much the word may be ahead of it: by `ANY_AHEAD` if all epochs raise this
    flag, else a flag of long ago may seem to be ahead. `watch` looks meanwhile at what all peers signal.
    """
    own: Any = context.heap.peer_tensor("signals", context.rank).view(torch.int32)
    latch: Any = context.latch
    codes = own[context.signals_layout.abort :][: ABORT_WORDS * context.world_size : ABORT_WORDS]
    if own.device.type == "cpu":
        # Looked at thousands of times: an element of an array is there ten times sooner than one of a tensor.
        own, codes, latch = own.numpy(), codes.numpy(), latch.numpy()
    began, spins = time.monotonic_ns(), 0
    while int(latch[0]) == 0 and not any(has_reached(int(own[word]), *wanted) for word, *wanted in words):
        if codes.any():
            adopt_aborts(context)
        if watch is not None:
            watch.look()
        waited = time.monotonic_ns() - began
        if waited > timeout_ns:
            record_failure(context, ErrorCode.TIMEOUT, peer, phase, epoch, min(timeout_ns // 1000000, 2**31 - 1))
        spins += 1
        time.sleep(0 if spins < SPINS_BEFORE_SLEEP else min(max(SLEEPS_S[0], waited / 16e9), SLEEPS_S[1]))
    if watch is not None:
        watch.look()
    adopt_aborts(context)


def checked_ids(
    topk_idx_TK: torch.Tensor, num_experts: int, accepts_repeats: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(ids, bad)`: int64 ids, -1 where unrouted, out of range or repeated in the token; `bad` marks the last two.

    With `accepts_repeats` as in `ExchangeGeometry`.
    """
    ids = topk_idx_TK.to(torch.int64)
    in_range = (ids >= 0) & (ids < num_experts)
    ids = torch.where(in_range, ids, torch.full_like(ids, -1))
    if accepts_repeats:
        return ids, topk_idx_TK >= num_experts
    same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    repeated = torch.tril(same, diagonal=-1).any(dim=2)
    bad = (~in_range & (topk_idx_TK != -1)) | repeated
    return torch.where(repeated, torch.full_like(ids, -1), ids), bad


def owners_of(ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Rank that owns each expert id, -1 for the id -1."""
    owners = torch.searchsorted(starts[1:].to(torch.int64).contiguous(), ids.contiguous(), right=True)
    return torch.where(ids >= 0, owners, torch.full_like(ids, -1))


def last_entries_of(owners_TK: torch.Tensor, world_size: int) -> torch.Tensor:
    """int64 `[T, W]`: the last entry of each rank in a token, from 1 on; 0 where it has none."""
    ranks = torch.arange(world_size, device=owners_TK.device)
    entries = torch.arange(1, owners_TK.shape[1] + 1, device=owners_TK.device)
    return ((owners_TK[:, :, None] == ranks) * entries[:, None]).amax(dim=1)


def build_records(
    geometry: ExchangeGeometry, rows: QuantizedRows, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """uint8 `[T, record_bytes]`: the record of each token, padding bytes 0."""
    record, num_tokens = geometry.record, ids_TK.shape[0]
    out = torch.zeros(num_tokens, record.record_bytes, dtype=torch.uint8, device=ids_TK.device)

    def put(offset: int, values: torch.Tensor) -> None:
        data = copy_as(values, torch.uint8).reshape(num_tokens, -1)
        out[:, offset : offset + data.shape[1]] = data

    if num_tokens:
        put(record.quants_offset, rows.quants_RK)
        if rows.scales_RV is not None:
            put(record.scales_offset, rows.scales_RV)
        if rows.row_scale_R is not None:
            put(record.row_scale_offset, rows.row_scale_R[:, None])
        put(record.source_offset, torch.arange(num_tokens, dtype=torch.int32, device=ids_TK.device)[:, None])
        put(record.ids_offset, ids_TK.to(torch.int16))
        put(record.weights_offset, weights_TK)
    return out


def dispatch_send(
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
    """See `interface.ExchangeBackend`."""
    x_TH, topk_idx_TK, topk_weights_TK, gsf = tokens
    epoch = next_epoch(int(context.epoch[0]))
    half = epoch & 1
    enter(context, geometry, epoch)
    ids, bad = checked_ids(topk_idx_TK, geometry.num_experts, geometry.accepts_repeats)
    record_bad_id(context, topk_idx_TK, bad, epoch)
    owners = owners_of(ids, starts)
    goes_to = torch.stack([(owners == peer).any(dim=1) for peer in range(geometry.world_size)], dim=1)
    num_parts_T.copy_(goes_to.sum(dim=1))
    await_ready(context, geometry, epoch, timeout_ns)
    num_tokens = x_TH.shape[0]
    if int(context.latch[0]) == 0 and num_tokens:
        records = build_records(geometry, quantized(geometry.token_format, x_TH, gsf), ids, topk_weights_TK)
        for peer in range(geometry.world_size):
            chosen = goes_to[:, peer].nonzero().flatten()
            store_records(context, geometry, peer, half, chosen, records[chosen], epoch)
    raise_flags(context, geometry, count_tag, epoch, num_tokens)
    handle_epoch[0] = epoch


def enter(context: ExchangeMemory, geometry: ExchangeGeometry, epoch: int) -> None:
    """Tell all peers that this rank has begun the dispatch of `epoch`."""
    for peer in range(geometry.world_size):
        _signals_of(context, peer)[context.signals_layout.ready + geometry.rank] = epoch


def await_ready(context: ExchangeMemory, geometry: ExchangeGeometry, epoch: int, timeout_ns: int) -> None:
    """Wait until no peer reads the half of `epoch` any more, also peers that get no token.

    The count and the flag of this epoch replace those of the half's last one.
    """
    layout = context.signals_layout
    if context.heap.directly_mapped:
        for peer in range(geometry.world_size):
            ready = (layout.ready + peer, epoch, ANY_AHEAD)
            # A flag that nobody has written is one ahead of the epoch before the first of its half.
            combined = (layout.combine_flag + (epoch & 1) * geometry.world_size + peer, epoch - 2, 1)
            _wait(context, [ready, combined], peer, Phase.DISPATCH_SEND, epoch, timeout_ns)
    adopt_aborts(context)


def record_bad_id(context: ExchangeMemory, topk_idx_TK: torch.Tensor, bad: torch.Tensor, epoch: int) -> None:
    """Record the first of the ids that `bad` marks, if there is one."""
    if bool(bad.any()):
        token, entry = bad.nonzero()[0].tolist()
        # A word holds 32 bits: cut off, an id far out of range would look like one of the layer.
        bad_id = min(max(int(topk_idx_TK[token, entry]), -(2**31)), 2**31 - 1)
        record_failure(context, ErrorCode.ROUTING, context.rank, Phase.DISPATCH_SEND, epoch, bad_id, token)


def quantized(fmt: TokenFormat, x_TH: torch.Tensor, gsf: torch.Tensor | None) -> QuantizedRows:
    """Tokens as they travel. In bf16 bits stay as they are: rows may hold other data than numbers."""
    return QuantizedRows(fmt, x_TH) if fmt is BF16 else quantize_rows(x_TH, fmt, gsf=gsf)


def store_records(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    peer: int,
    half: int,
    tokens: torch.Tensor,
    records: torch.Tensor,
    epoch: int,
) -> None:
    """Store the records of this rank's `tokens` in their slots at `peer`, and their token flags."""
    slots = tokens + geometry.rank * geometry.max_tokens
    _landing(context, geometry, peer, half)[slots] = records
    _token_flags(context, geometry, peer, half)[slots] = epoch


def raise_flags(
    context: ExchangeMemory, geometry: ExchangeGeometry, count_tag: int, epoch: int, num_tokens: int
) -> None:
    """Begin `epoch`, and tell all peers that this rank's `num_tokens` have landed there."""
    layout, first = context.signals_layout, (epoch & 1) * geometry.world_size + geometry.rank
    context.epoch[0] = epoch
    for peer in range(geometry.world_size):
        words = _signals_of(context, peer)
        # After a failure, readers of the half's last count have not been awaited.
        if int(context.latch[0]) == 0 or not context.heap.directly_mapped:
            words[layout.token_count + first] = num_tokens + tag_of(count_tag, epoch)
        words[layout.dispatch_flag + first] = epoch


def can_keep_scales_in_record(geometry: ExchangeGeometry) -> bool:
    """Never: scales are copied into the layout of the consumer."""
    return False


def of_one_rank(geometry: ExchangeGeometry) -> None:
    """None: a step of a rank alone is as any other."""


def can_await_tokens(context: ExchangeMemory) -> bool:
    """Never: `dispatch_recv` does."""
    return False


def scratch_words(geometry: ExchangeGeometry) -> int:
    """None: torch allocates by itself."""
    return 0


def dispatch_recv(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
    waits: torch.Tensor | None = None,
) -> None:
    """See `interface.ExchangeBackend`."""
    record, layout, experts = geometry.record, context.signals_layout, geometry.num_local_experts
    epoch = int(handle_epoch[0])
    half, device = epoch & 1, context.device
    _check_fresh(context, epoch, Phase.DISPATCH_RECV)
    flags, watch = layout.dispatch_flag + half * geometry.world_size, None
    if waits is not None:
        watch = Watch(_signals_of(context, context.rank), epoch, geometry.world_size, flags, layout.ready)
    for source in range(geometry.world_size):
        _wait(context, [(flags + source, epoch, ANY_AHEAD)], source, Phase.DISPATCH_RECV, epoch, timeout_ns, watch)
    if waits is not None and watch is not None and int(context.latch[0]) == 0:
        count_dispatch_waits(waits, watch, geometry.rank, epoch)

    landed = _landing(context, geometry, geometry.rank, half)
    words = _signals_of(context, geometry.rank)
    first = layout.token_count + half * geometry.world_size
    tag = tag_of(count_tag, epoch)
    tokens = (words[first : first + geometry.world_size] & WITHOUT_SIGN) - tag
    other = (tokens < 0) | (tokens > geometry.max_tokens)
    if int(context.latch[0]) == 0 and bool(other.any()):
        source = int(other.nonzero()[0])
        numbers = (exchange_of(int(words[first + source])), exchange_of(tag))
        record_failure(context, ErrorCode.MISMATCH, source, Phase.DISPATCH_RECV, epoch, *numbers)
    in_step = (torch.arange(geometry.max_tokens, device=device)[None, :] < tokens[:, None]).flatten()
    fresh = in_step & (_token_flags(context, geometry, geometry.rank, half) == epoch) & (int(context.latch[0]) == 0)
    ids = _ids(context, geometry, half)
    local = ids - geometry.first_expert
    local = torch.where(
        fresh[:, None] & (ids >= 0) & (local >= 0) & (local < experts), local, torch.full_like(local, -1)
    )

    slot_of, entry_of = (local >= 0).nonzero(as_tuple=True)
    expert_of = local[slot_of, entry_of]
    order = torch.argsort(expert_of, stable=True)
    total = int(order.shape[0])
    most = int(torch.bincount(expert_of).max()) if geometry.accepts_repeats and total else 0
    failed: tuple[int, int, int] | None = None
    if most > geometry.most_rows_of_expert:
        failed = ErrorCode.EXPERT_CAPACITY, most, geometry.most_rows_of_expert
    elif total > geometry.row_capacity:
        failed = ErrorCode.CAPACITY, total, geometry.row_capacity
    if failed is not None:
        code, got, room = failed
        record_failure(context, code, geometry.rank, Phase.DISPATCH_RECV, epoch, got, room)
        order, total = order[:0], 0
    slot_of, entry_of, expert_of = slot_of[order], entry_of[order], expert_of[order]
    rows = torch.bincount(expert_of, minlength=experts)[:experts]
    ends = rows.cumsum(0)
    blocks = (rows + 127) // 128
    first_block = blocks.cumsum(0) - blocks
    buffers.group_offsets[0] = 0
    buffers.group_offsets[1:] = ends
    buffers.group_scale_offsets.copy_(first_block - (ends - rows) // 128)
    buffers.positions.fill_(-1)
    buffers.positions[slot_of, entry_of] = torch.arange(total, dtype=torch.int32, device=device)
    first_row = half * geometry.landing_half(context.half_bytes["landing"]) // record.record_bytes
    buffers.row_index[:total] = (first_row + slot_of).to(torch.int32)

    def field(offset: int, num_bytes: int) -> torch.Tensor:
        return landed[slot_of, offset : offset + num_bytes]

    if buffers.rows is not None:
        buffers.rows[:total] = field(record.quants_offset, buffers.rows.shape[1])
    if buffers.row_scale is not None:
        buffers.row_scale[:total] = field(record.row_scale_offset, 4).view(torch.float32).flatten()
    scales = buffers.scales
    if scales is not None:
        columns = geometry.token_format.scale_columns(geometry.hidden)
        wire = field(record.scales_offset, geometry.token_format.scale_bytes(geometry.hidden))
        if geometry.token_format.code == FormatCode.FP8_BLOCK:
            scales[:total] = wire.view(torch.float32)
        else:
            local_row = torch.arange(total, device=device) - (ends - rows)[expert_of]
            block = first_block[expert_of] + local_row // 128
            padded = torch.zeros(total, scales.shape[1] * 4, dtype=torch.uint8, device=device)
            padded[:, :columns] = wire
            scales[block, :, local_row % 32, (local_row % 128) // 32, :] = padded.view(total, scales.shape[1], 4)


def dispatch_recv_padded(
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
    """See `interface.ExchangeBackend`."""
    dispatch_recv(context, geometry, count_tag, handle_epoch, timeout_ns, buffers)
    found = buffers.row_index, buffers.positions, buffers.group_offsets, handle_epoch
    place_reference(LandedTokens.of(context, geometry, *found), scales_at, out, statistics)


def part_index(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    starts: torch.Tensor,
    positions_SK: torch.Tensor,
    epoch: int,
) -> torch.Tensor:
    """int32 `[W, max_tokens]`: which of a token's partial results comes from this rank, -1 where none does.

    Partial results of a token are numbered over the ranks that hold one of its experts, in the order in which they are
    added: see `ExchangeGeometry.sums_by_entry`.
    """
    ids = _ids(context, geometry, epoch & 1)
    owners = owners_of(ids, starts)
    part = torch.zeros(geometry.num_slots, dtype=torch.int32, device=context.device)
    if geometry.sums_by_entry:
        last_SW = last_entries_of(owners, geometry.world_size)
        part += ((last_SW > 0) & (last_SW < last_SW[:, geometry.rank, None])).sum(dim=1, dtype=torch.int32)
    else:
        for peer in range(geometry.rank):
            part += (owners == peer).any(dim=1).to(torch.int32)
    part = torch.where((positions_SK >= 0).any(dim=1), part, torch.full_like(part, -1))
    return part.view(geometry.world_size, geometry.max_tokens)


def _ids(context: ExchangeMemory, geometry: ExchangeGeometry, half: int) -> torch.Tensor:
    """int64 `[S, K]`: expert ids of all landing slots, -1 for none; old records' where a slot was not written."""
    record = geometry.record
    field = _landing(context, geometry, geometry.rank, half)[
        :, record.ids_offset : record.ids_offset + 2 * record.top_k
    ]
    ids = field.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    return torch.where(ids == 0xFFFF, torch.full_like(ids, -1), ids)


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
    record, layout = geometry.record, context.signals_layout
    epoch = int(handle_epoch[0])
    half = epoch & 1
    fresh = _check_fresh(context, epoch, Phase.COMBINE_SEND)
    slots = (
        (positions_SK >= 0).any(dim=1).nonzero().flatten() if fresh else positions_SK.new_empty(0, dtype=torch.int64)
    )
    if slots.numel():
        landed = _landing(context, geometry, geometry.rank, half)[slots]
        positions = positions_SK[slots]
        weights = landed[:, record.weights_offset : record.weights_offset + 4 * geometry.top_k]
        weights = weights.contiguous().view(torch.float32)
        total = torch.zeros(slots.numel(), geometry.output_hidden, dtype=torch.float32, device=context.device)
        for entry in range(geometry.top_k):
            has = (positions[:, entry] >= 0).nonzero().flatten()
            rows = output_RH[positions[has, entry].to(torch.int64)].to(torch.bfloat16).to(torch.float32)
            total[has] += weights[has, entry, None] * rows
        part = part_index(context, geometry, starts, positions_SK, epoch).flatten()[slots].to(torch.int64)
        wire = quantize_rows(total, geometry.combine_format)
        data = torch.zeros(slots.numel(), geometry.partial_bytes, dtype=torch.uint8, device=context.device)
        quants = wire.quants_RK.contiguous().view(torch.uint8)
        data[:, : quants.shape[1]] = quants
        if wire.scales_RV is not None:
            scales = wire.scales_RV.contiguous().view(torch.uint8)
            data[:, geometry.partial_scales_offset : geometry.partial_scales_offset + scales.shape[1]] = scales
        source, token = slots // geometry.max_tokens, slots % geometry.max_tokens
        for peer in range(geometry.world_size):
            mine = source == peer
            _partials(context, geometry, peer, half)[token[mine], part[mine]] = data[mine]
    for peer in range(geometry.world_size):
        _signals_of(context, peer)[layout.combine_flag + half * geometry.world_size + geometry.rank] = epoch


def combine_recv(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    handle_epoch: torch.Tensor,
    num_parts_T: torch.Tensor,
    shared_TH: torch.Tensor | None,
    y_TH: torch.Tensor,
    timeout_ns: int,
    first_token: int = 0,
    waits: torch.Tensor | None = None,
) -> None:
    """See `interface.ExchangeBackend`. The tokens are those from `first_token` on, as many as `y_TH` has rows."""
    epoch = int(handle_epoch[0])
    half = epoch & 1
    _check_fresh(context, epoch, Phase.COMBINE_RECV)
    flags, watch = context.signals_layout.combine_flag + half * geometry.world_size, None
    if waits is not None:
        watch = Watch(_signals_of(context, context.rank), epoch, geometry.world_size, flags, most=0)
    for peer in range(geometry.world_size):
        _wait(context, [(flags + peer, epoch, 0)], peer, Phase.COMBINE_RECV, epoch, timeout_ns, watch)
    if int(context.latch[0]) != 0:
        y_TH.fill_(float("nan"))
        return
    if waits is not None and watch is not None:
        count_combine_waits(waits, watch, geometry.rank, epoch)
    num_tokens, wire = y_TH.shape[0], geometry.combine_format
    total = torch.zeros(num_tokens, geometry.output_hidden, dtype=torch.float32, device=context.device)
    if shared_TH is not None:
        total = shared_TH.to(torch.float32)
    partials = _partials(context, geometry, geometry.rank, half)
    for part in range(geometry.parts):
        tokens = (num_parts_T > part).nonzero().flatten()
        data = partials[first_token + tokens, part]
        quants = data[:, : wire.quant_bytes(geometry.output_hidden)].contiguous().view(wire.quant_dtype)
        scales = None
        if wire.scale_dtype is not None:
            at = geometry.partial_scales_offset
            scales = data[:, at : at + wire.scale_bytes(geometry.output_hidden)].contiguous().view(wire.scale_dtype)
        total[tokens] += dequantize_rows(QuantizedRows(wire, quants, scales))
    y_TH.view(torch.int16).copy_(f32_to_bf16_bits(total).view(torch.int16))


def _check_fresh(context: ExchangeMemory, epoch: int, phase: Phase) -> bool:
    """False, and recorded, where a handle's half has been given to a later dispatch."""
    if ((int(context.epoch[0]) - epoch) & 0xFFFFFFFF) >= 2:
        record_failure(context, ErrorCode.STALE_HANDLE, context.rank, phase, epoch)
        return False
    return True
