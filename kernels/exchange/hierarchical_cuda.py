"""The parts of `hierarchical.py` in CUDA C++, with the same arguments and the same bits.

`dispatch_send.cu` packs: its ranks are the hosts, and its memory of each host is that host's chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial

import torch

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.signals import ERROR_WORDS, SignalLayout
from moe_runtime.kernels.bound_kernel import launch
from moe_runtime.kernels.exchange import cuda
from moe_runtime.kernels.exchange.hierarchical import (
    COUNT,
    HostGeometry,
    LinkMemory,
    compact,
    relayed,
    tokens_of,
)
from moe_runtime.kernels.exchange.interface import ExchangeMemory, SentTokens, aligned
from moe_runtime.kernels.exchange.macros import shared_macros, token_macros
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.nvrtc import Defines

FILE = "hierarchical.cu"
MOST_WARPS = 8
"""Of a block of `forward_send`, each with a record in shared memory."""
EPOCH, LATCH, FOUND = 0, 1, 8
"""Places in `LinkMemory.words`."""


@cache
def host_macros(geometry: HostGeometry) -> Defines:
    """Macros of `hierarchical.cu`."""
    local, flat = geometry.local, geometry.flat
    signals = SignalLayout(local.world_size)
    return Defines(
        {
            **shared_macros(local),
            **token_macros(local),
            "HOSTS": geometry.hosts.num_hosts,
            "HOST": geometry.hosts.host,
            "SLOTS": geometry.slots,
            "WARPS": _warps(geometry),
            "ERROR_WORDS": ERROR_WORDS,
            "COUNT": COUNT,
            "FLAGS_AT": geometry.flags_offset,
            "RECORDS_AT": geometry.records_offset,
            "SUM_HEADER_AT": geometry.sum_header_offset,
            "SUM_BYTES": geometry.sum_bytes,
            "WIRE": int(flat.combine_format.code),
            "PARTIAL_SCALES_AT": flat.partial_scales_offset,
            "HIDDEN": flat.output_hidden,
            "READY": signals.ready,
            "COMBINE_FLAG": signals.combine_flag,
            "ROUTING": int(ErrorCode.ROUTING),
            "CAPACITY": int(ErrorCode.CAPACITY),
            "MISMATCH": int(ErrorCode.MISMATCH),
            "DISPATCH_SEND": int(Phase.DISPATCH_SEND),
        }
    )


def _warps(geometry: HostGeometry) -> int:
    return max(1, min(MOST_WARPS, geometry.flat.block_shared_bytes // 2 // geometry.flat.record.record_bytes))


def _shared_bytes(geometry: HostGeometry) -> int:
    """Dynamic shared memory of a block of `forward_send`."""
    return _warps(geometry) * geometry.flat.record.record_bytes


class _Pointers:
    """int64 addresses for kernels; they are made once for each memory.

    They are `[H]`, but for those of partial results: `[L]`, by the first token that `relay` sums.
    """

    def __init__(self, memory: ExchangeMemory, geometry: HostGeometry, link: LinkMemory) -> None:
        device, words = link.words.device, SignalLayout(geometry.hosts.num_hosts).num_words
        record, before = geometry.flat.record.record_bytes, geometry.hosts.host * geometry.flat.max_tokens

        def table(addresses: list[int]) -> torch.Tensor:
            return torch.tensor(addresses, dtype=torch.int64, device=device)

        def chunks(of: Iterable[torch.Tensor]) -> torch.Tensor:
            return table([chunk.data_ptr() for chunk in of])

        own, hosts = geometry.hosts.host, range(geometry.hosts.num_hosts)
        self.records_out, self.sums_out = chunks(link.records_out), chunks(link.sums_out)
        self.records = chunks([link.records(host, own) for host in hosts])
        self.sums = chunks([link.sums(host, own) for host in hosts])
        # `dispatch_send` begins at the slots of its own rank.
        built = geometry.of_tokens
        starts = [chunk.data_ptr() for chunk in (link.staging if geometry.compacts else link.records_out)]
        self.landing = table([start + built.records_offset - before * record for start in starts])
        self.token_flags = table([start + built.flags_offset - before * 4 for start in starts])
        # Its signals go nowhere: headers say what other hosts must know.
        partials, slots = geometry.local.parts * geometry.local.partial_bytes, geometry.slots
        self.combine = {
            first: memory.combine_pointers + first * partials
            for part in (None, *range(len(geometry.parts)))
            for first in (host * slots + of.start for host, of in geometry.relayed_slots(part))
        }
        self._unread = torch.zeros(2, words, dtype=torch.int32, device=device)
        self.signals = table([self._unread[int(host == own)].data_ptr() for host in hosts])
        memory_of_sender = {
            "landing": self.landing,
            "token_flags": self.token_flags,
            "signals": self.signals,
            "epoch_ptr": link.words[EPOCH:],
            "error": link.words[FOUND:],
            "latch": link.words[LATCH:],
            "counter": memory.counters,
            "landing_half": 0,
            "token_flags_half": 0,
        }
        of_sender = geometry.between_hosts, device, memory_of_sender
        self.sender = cache(partial(cuda.bind_sender, *of_sender, await_ready=False))


def _pointers(memory: ExchangeMemory, geometry: HostGeometry, link: LinkMemory) -> _Pointers:
    if link.pointers is None:
        link.pointers = _Pointers(memory, geometry, link)
    assert isinstance(link.pointers, _Pointers)
    return link.pointers


def pack(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    tokens: SentTokens,
    num_hosts_T: torch.Tensor,
) -> torch.Tensor | None:
    """See `hierarchical.pack`."""
    table, words = _pointers(memory, geometry, link), link.words
    x_TH, topk_idx_TK, _, gsf = tokens
    kernel = table.sender(ids_64=topk_idx_TK.dtype == torch.int64, static_gsf=gsf is not None)
    changing = {
        "starts": link.host_starts,
        "handle_epoch": words[FOUND + ERROR_WORDS :],
        "num_parts": num_hosts_T,
    }
    cuda.send_records(kernel, link.count_tag, tokens, changing, timeout_ns=0)
    slots_HT = counts_H = None
    if geometry.compacts:
        slots_HT, counts_H = compact(geometry, link, words[EPOCH : EPOCH + 1], x_TH.shape[0])
    _write_headers(memory, geometry, table.records_out, 0, words, x_TH.shape[0], link.count_tag, counts_H)
    return slots_HT


def _write_headers(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    chunks: torch.Tensor,
    header_at: int,
    packed: torch.Tensor | None,
    num_tokens: int = 0,
    count_tag: int = 0,
    counts_H: torch.Tensor | None = None,
) -> None:
    """Of tokens with `packed`; without it headers have no count, only what this rank knows of failures."""
    launch(
        FILE,
        "host_headers",
        host_macros(geometry),
        grid=(1, 1, 1),
        block=32,
        arguments={
            "chunks": chunks,
            "header_at": header_at,
            "packed": None if packed is None else packed[FOUND:],
            "pack_latch": None if packed is None else packed[LATCH:],
            "counts": counts_H,
            "num_tokens": num_tokens,
            "count_tag": count_tag,
            "pack_epoch": None if packed is None else packed[EPOCH:],
            "signals": memory.signal_pointers,
            "error": memory.error,
            "latch": memory.latch,
            "rank": geometry.local.rank,
            "timeout_ns": 0,
        },
        device=memory.device,
    )


def say_failed(memory: ExchangeMemory, geometry: HostGeometry, link: LinkMemory, kind: str) -> None:
    """See `hierarchical.say_failed`."""
    table = _pointers(memory, geometry, link)
    if kind == "dispatch":
        _write_headers(memory, geometry, table.records_out, 0, None)
    else:
        _write_headers(memory, geometry, table.sums_out, geometry.sum_header_offset, None)


def forward(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    handle_epoch: torch.Tensor,
    num_parts_V: torch.Tensor,
    timeout_ns: int,
    part: int | None,
) -> None:
    """See `hierarchical.forward`."""
    local, warps, own = geometry.local, _warps(geometry), part is None
    slots = range(geometry.slots) if part is None else geometry.parts[part]
    num_slots = len(slots) * (1 if own else len(geometry.others))
    blocks = min(ceil_div(num_slots, warps), 2 * cuda.most_sms(memory.device))
    launch(
        FILE,
        "forward_send",
        host_macros(geometry),
        grid=(blocks if local.num_sms is None else min(blocks, local.num_sms), 1, 1),
        block=32 * warps,
        shared_bytes=_shared_bytes(geometry),
        arguments={
            "chunks": _pointers(memory, geometry, link).records,
            "own_tokens": own,
            "first": slots.start,
            "end": slots.stop,
            "num_tokens": geometry.flat.max_tokens,
            "count_tag": link.count_tag,
            "starts": link.starts,
            "first_expert": geometry.first_expert,
            "num_experts": local.num_experts,
            "landing": memory.landing_pointers,
            "token_flags": memory.token_flags_pointers,
            "signals": memory.signal_pointers,
            "epoch_ptr": memory.epoch,
            "handle_epoch": handle_epoch,
            "num_parts": num_parts_V,
            "error": memory.error,
            "latch": memory.latch,
            "counter": memory.counters,
            "rank": local.rank,
            "landing_half": local.landing_half(memory.half_bytes["landing"]),
            "token_flags_half": memory.half_bytes["token_flags"],
            "timeout_ns": timeout_ns,
        },
        device=memory.device,
    )


def relay(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    handle_epoch: torch.Tensor,
    num_parts_V: torch.Tensor,
    timeout_ns: int,
    part: int | None,
) -> None:
    """See `hierarchical.relay`."""
    table = _pointers(memory, geometry, link)
    for of in relayed(geometry, link, num_parts_V, part):
        args = memory, geometry.local, handle_epoch, of.num_parts, None, of.sums, timeout_ns
        cuda.combine_recv(*args, combine_pointers=table.combine[of.first])
        if of.rows is not None:
            num_rows = len(of.rows)
            launch(
                FILE,
                "host_quantize",
                host_macros(geometry),
                grid=(geometry.flat.programs(min(num_rows, 4 * cuda.most_sms(memory.device))), 1, 1),
                block=256,
                arguments={"sums": of.sums, "rows": of.rows, "num_rows": num_rows},
                device=memory.device,
            )
    if part == len(geometry.parts) - 1:
        _write_headers(memory, geometry, table.sums_out, geometry.sum_header_offset, None)


def total(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    shared_TH: torch.Tensor | None,
    y_TH: torch.Tensor,
    slots_HT: torch.Tensor | None,
    part: int,
) -> None:
    """See `hierarchical.total`."""
    rows, last = tokens_of(geometry, part, y_TH.shape[0]), part == len(geometry.parts) - 1
    num_tokens, sums = rows.stop - rows.start, _pointers(memory, geometry, link).sums
    if num_tokens == 0 and not last:
        return
    shared_TH = None if shared_TH is None else aligned(shared_TH)
    launch(
        FILE,
        "host_total",
        host_macros(geometry),
        grid=(geometry.flat.programs(min(num_tokens, 4 * cuda.most_sms(memory.device))), 1, 1),
        block=256,
        arguments={
            "chunks": sums,
            "shared": shared_TH,
            "shared_stride": 0 if shared_TH is None else shared_TH.stride(0),
            "slots": slots_HT,
            "max_tokens": geometry.flat.max_tokens,
            "y": y_TH,
            "first": rows.start,
            "end": rows.stop,
            "last": last,
            "signals": memory.signal_pointers,
            "error": memory.error,
            "latch": memory.latch,
            "rank": geometry.local.rank,
            "timeout_ns": 0,
        },
        device=memory.device,
    )


KERNELS = ("host_headers", "forward_send", "host_quantize", "host_total")
