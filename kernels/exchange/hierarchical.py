"""The exchange between hosts: a token crosses the network once to each host, and each host sends one partial sum home.

A step has two parts more than on one host:

1. `pack` quantizes this rank's tokens and builds their records, one chunk for each host. The link brings the chunks to
   the ranks of this rail.
2. `forward` copies each record to the ranks of this host that hold its experts, as if this rank's tokens were those of
   its whole rail: first those of its own tokens, then those that came. From there on the kernels of one host do the
   rest.
3. `relay` sums what the ranks of this host computed for each token, and the link brings the sums home.
4. `total` sums over hosts.

The link carries a chunk in parts where a step has many tokens, so that `forward`, `relay` and `total` of one part run
while another crosses the network. What a rank has for its own host stays where `pack` and `relay` write it.

Letters: `H` hosts, `L` ranks of a host, `T` most tokens of a rank. Token `t` of host `h` is token `h (T + 1) + t` of
its rail within a host; the last of each host stands for none, and carries the header of `relay`.

A header says whether its rank has failed, in the first part of the records and in the last of the sums. So all ranks of
a rail learn of it in the same step.

With a `capacity` below `T` a chunk has that many slots, and `T` stands for it where slots are meant: `pack` builds
records in slots of tokens, then copies those for a host into the first slots of its chunk. Token order stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.hosts import Hosts
from moe_runtime.comm.signals import COUNT_BITS, ERROR_WORDS, WITHOUT_SIGN, exchange_of, tag_of
from moe_runtime.kernels.exchange import reference
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory, SentTokens
from moe_runtime.kernels.exchange.record import NO_EXPERT
from moe_runtime.kernels.formats.number_formats import BF16, QuantizedRows, align
from moe_runtime.kernels.formats.reference_quantize import copy_as, dequantize_rows, f32_to_bf16_bits, quantize_rows

HEADER_BYTES = 4 * ERROR_WORDS
"""A header is the error record of its rank, with the ranks that `Hosts.recorded` names, and the token count last."""
HEADER_SPACE = 128
"""Bytes that a header has in a chunk of records."""
COUNT = ERROR_WORDS - 1

PART_TOKENS = 512
"""Fewest tokens of a part. In NVFP4 that is 2 MB for DeepSeek's hidden size, 48 us at 45 GB/s."""
MOST_PARTS = 4
MOST_LAUNCHES = 16
"""Most parts times other hosts: `relay` launches a kernel for each."""

PACK_WORDS = 64
"""Of `LinkMemory.words`: the epoch, the code of a failure and the word after it, and from 8 on the error record."""


@dataclass(frozen=True)
class HostGeometry:
    """One layer's exchange over several hosts.

    Attributes:
        hosts: the ranks of each host.
        flat: as all ranks would exchange on one host.
        part_tokens: fewest tokens of a part.
        capacity: most tokens of a rank for one host; None for all.
        local: of the ranks of this host, whose tokens are those of their rails. Partial results are bf16 there: the
            format of combine is for the network.
    """

    hosts: Hosts
    flat: ExchangeGeometry
    part_tokens: int = PART_TOKENS
    capacity: int | None = None

    @cached_property
    def host_starts(self) -> tuple[int, ...]:
        """First expert of each host, and the end of the last."""
        return self.flat.starts[:: self.hosts.ranks_per_host]

    @cached_property
    def first_expert(self) -> int:
        """Of this host."""
        return self.host_starts[self.hosts.host]

    @cached_property
    def local(self) -> ExchangeGeometry:
        hosts, flat = self.hosts, self.flat
        if (slots := hosts.num_hosts * self.slots) >= 1 << COUNT_BITS:
            raise ValueError(
                f"max_tokens_per_rank: expected slots for less than {1 << COUNT_BITS} tokens of a rail (they are "
                f"counted in {COUNT_BITS} bits), got {slots} on {hosts.num_hosts} hosts: set host_capacity"
            )
        return replace(
            flat,
            rank=hosts.local_rank,
            world_size=hosts.ranks_per_host,
            num_experts=self.host_starts[hosts.host + 1] - self.first_expert,
            max_tokens=slots,
            combine_format=BF16,
            own_rows=False,
        )

    @cached_property
    def between_hosts(self) -> ExchangeGeometry:
        """Of the hosts, each of which is a rank: what `pack` sends by on GPUs."""
        return replace(self.flat, rank=self.hosts.host, world_size=self.hosts.num_hosts)

    @cached_property
    def tokens(self) -> int:
        """Most tokens of a chunk."""
        return min(self.flat.max_tokens, self.capacity or self.flat.max_tokens)

    @property
    def compacts(self) -> bool:
        """Whether a chunk has fewer slots than a rank has tokens."""
        return self.tokens < self.flat.max_tokens

    @cached_property
    def of_tokens(self) -> HostGeometry:
        """With a slot for each token, as `pack` builds records."""
        return replace(self, capacity=None)

    @cached_property
    def slots(self) -> int:
        """Of each host in `local`: its tokens and one more."""
        return self.tokens + 1

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The other hosts, ascending."""
        return tuple(host for host in range(self.hosts.num_hosts) if host != self.hosts.host)

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """Slots of a host in each part of a chunk."""
        tokens = self.tokens
        count = min(MOST_PARTS, tokens // self.part_tokens, MOST_LAUNCHES // max(1, len(self.others)))
        ends = [tokens * (part + 1) // max(1, count) for part in range(max(1, count))]
        return tuple(range(first, end) for first, end in zip([0, *ends], [*ends[:-1], self.slots], strict=False))

    @property
    def flags_offset(self) -> int:
        """Bytes from the start of a chunk of records to its token flags; its header comes first."""
        return HEADER_SPACE

    @cached_property
    def records_offset(self) -> int:
        """Bytes from the start of a chunk of records to its first record."""
        return align(self.flags_offset + 4 * self.tokens, HEADER_SPACE)

    @cached_property
    def dispatch_chunk(self) -> int:
        """Bytes of a chunk of records."""
        return self.records_offset + self.tokens * self.flat.record.record_bytes

    @property
    def staging_chunk(self) -> int:
        """Bytes of a chunk of records before they are compacted; 0 where they are not."""
        return self.of_tokens.dispatch_chunk if self.compacts else 0

    @property
    def chunk_bytes(self) -> dict[str, int]:
        """Bytes for each host, by kind of buffer."""
        return {"dispatch": self.dispatch_chunk, "combine": self.combine_chunk, "staging": self.staging_chunk}

    def dispatch_part(self, part: int) -> slice:
        """Bytes of a chunk of records that travel in `part`."""
        slots, record = self.parts[part], self.flat.record.record_bytes
        end = self.records_offset + min(slots.stop, self.tokens) * record
        return slice(self.records_offset + slots.start * record if part else 0, end)

    def combine_part(self, part: int) -> slice:
        """Bytes of a chunk of partial sums that travel in `part`."""
        slots = self.parts[part]
        return slice(slots.start * self.sum_bytes, slots.stop * self.sum_bytes)

    @cached_property
    def sum_bytes(self) -> int:
        """Bytes of one partial sum between hosts: as within a host, without what aligns it there."""
        fmt, hidden = self.flat.combine_format, self.flat.output_hidden
        num_bytes = self.flat.partial_scales_offset + fmt.scale_bytes(hidden)
        return align(num_bytes, 16) if fmt.scale_dtype is not None else fmt.quant_bytes(hidden)

    @cached_property
    def sum_header_offset(self) -> int:
        """Bytes from the start of a chunk of partial sums to its header: the slot that stands for no token."""
        return self.tokens * self.sum_bytes

    @cached_property
    def combine_chunk(self) -> int:
        """Bytes of a chunk of partial sums."""
        return self.slots * self.sum_bytes

    def relayed_slots(self, part: int | None) -> list[tuple[int, range]]:
        """The hosts whose tokens `relay` of `part` sums, and their slots."""
        if part is None:
            return [(self.hosts.host, range(self.slots))]
        return [(host, self.parts[part]) for host in self.others]

    def sum_rows(self, chunk: torch.Tensor) -> torch.Tensor:
        """uint8 `[T + 1, sum_bytes]` of a chunk."""
        return chunk.view(self.slots, self.sum_bytes)

    def records(self, chunk: torch.Tensor) -> torch.Tensor:
        """uint8 `[T, record_bytes]` of a chunk."""
        return chunk[self.records_offset : self.dispatch_chunk].view(self.tokens, -1)

    def flags(self, chunk: torch.Tensor) -> torch.Tensor:
        """int32 `[T]` of a chunk of records: the epoch of what lies in each slot.

        Those of the rank's tokens are written in each step. The others may hold anything: layers of other sizes have
        their records there.
        """
        return chunk[self.flags_offset : self.flags_offset + 4 * self.tokens].view(torch.int32)

    def dispatch_header(self, chunk: torch.Tensor) -> torch.Tensor:
        """int32 `[ERROR_WORDS]`."""
        return chunk[:HEADER_BYTES].view(torch.int32)

    def combine_header(self, chunk: torch.Tensor) -> torch.Tensor:
        """int32 `[ERROR_WORDS]`."""
        start = self.sum_header_offset
        return chunk[start : start + HEADER_BYTES].view(torch.int32)


@dataclass
class LinkMemory:
    """What a rank sends to other hosts and gets from them, and what kernels need for it.

    Attributes:
        starts: int32 `[L + 1]`, first expert of each rank of this host, from 0.
        host_starts: int32 `[H + 1]`, first expert id of each host.
        records_out, records_in: uint8 `[H, dispatch_chunk]`. What is for this host stays in `records_out`.
        sums_out, sums_in: uint8 `[H, combine_chunk]`, likewise.
        staging: uint8 `[H, staging_chunk]`, where `pack` builds records that it then compacts.
        count_tag: as for `ExchangeBackend`.
        pointers: what `hierarchical_cuda` makes of it.
        words: int32, zeros at first, in which `pack` on GPUs counts epochs and keeps what it finds.
    """

    starts: torch.Tensor
    host_starts: torch.Tensor
    records_out: torch.Tensor
    records_in: torch.Tensor
    sums_out: torch.Tensor
    sums_in: torch.Tensor
    staging: torch.Tensor
    words: torch.Tensor
    count_tag: int
    pointers: object = None

    def records(self, host: int, own: int) -> torch.Tensor:
        """The chunk of records of this rail's rank on `host`, where `own` is this host."""
        return (self.records_out if host == own else self.records_in)[host]

    def sums(self, host: int, own: int) -> torch.Tensor:
        """The chunk of partial sums that `host` has for this rank."""
        return (self.sums_out if host == own else self.sums_in)[host]


def pack(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    tokens: SentTokens,
    num_hosts_T: torch.Tensor,
) -> torch.Tensor | None:
    """Build the records of this rank's tokens in `records_out`, in the chunk of each host that holds their experts.

    Args:
        tokens: of this rank.
        num_hosts_T: int32 `[T]`, receives the number of hosts that each token goes to.

    Returns int32 `[H, T]`, the slot of each token in the chunk of each host, -1 for none; None where that is the token.
    """
    x_TH, topk_idx_TK, topk_weights_TK, gsf = tokens
    flat, epoch = geometry.flat, reference.next_epoch(int(memory.epoch[0]))
    ids, bad = reference.checked_ids(topk_idx_TK, flat.num_experts)
    reference.record_bad_id(memory, topk_idx_TK, bad, epoch)
    owners = reference.owners_of(ids, link.host_starts)
    goes_to = torch.stack([(owners == host).any(dim=1) for host in range(geometry.hosts.num_hosts)], dim=1)
    num_hosts_T.copy_(goes_to.sum(dim=1))
    if x_TH.shape[0]:
        rows = reference.quantized(flat.token_format, x_TH, gsf)
        records = reference.build_records(flat, rows, ids, topk_weights_TK)
        built = geometry.of_tokens
        for host, chunk in enumerate(link.staging if geometry.compacts else link.records_out):
            chosen = goes_to[:, host].nonzero().flatten()
            built.records(chunk)[chosen] = records[chosen]
            built.flags(chunk)[: len(goes_to)] = torch.where(goes_to[:, host], epoch, ~epoch).to(torch.int32)
    slots_HT = None
    if geometry.compacts:
        epoch_1 = torch.tensor([epoch], dtype=torch.int32, device=x_TH.device)
        slots_HT, counts_H = compact(geometry, link, epoch_1, x_TH.shape[0])
        most = int(counts_H.max())
        if most > geometry.tokens:
            rank = geometry.local.rank
            reference.record_failure(
                memory, ErrorCode.CAPACITY, rank, Phase.DISPATCH_SEND, epoch, most, geometry.tokens
            )
    count = x_TH.shape[0] + tag_of(link.count_tag, epoch)
    _write_headers(memory, geometry, [geometry.dispatch_header(chunk) for chunk in link.records_out], count)
    return slots_HT


def compact(
    geometry: HostGeometry, link: LinkMemory, epoch: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the records in `staging` to the first slots of `records_out`, token order kept, as many as there are slots.

    Args:
        epoch: int32 `[1]`, that of this dispatch.
        count: tokens of this rank; what lies in `staging` past them is old.

    Returns int32 `[H, T]`, the slot of each token, -1 for none, and int32 `[H]`, the tokens for each host.
    """
    built, num_tokens, num_slots = geometry.of_tokens, geometry.flat.max_tokens, geometry.tokens
    chosen = torch.stack([built.flags(chunk) for chunk in link.staging]) == epoch
    chosen[:, count:] = False
    place = chosen.cumsum(dim=1) - 1
    place = torch.where(chosen & (place < num_slots), place, num_slots)
    token = torch.arange(num_tokens, device=place.device).expand_as(place)
    # One slot more for all that have none.
    token_of_slot = token.new_full((len(place), num_slots + 1), num_tokens).scatter_(1, place, token)[:, :num_slots]
    for tokens, chunk, out in zip(token_of_slot, link.staging, link.records_out, strict=True):
        filled = tokens < num_tokens
        torch.index_select(built.records(chunk), 0, tokens.clamp(max=num_tokens - 1), out=geometry.records(out))
        geometry.flags(out).copy_(torch.where(filled, epoch, ~epoch))
    slots = torch.where(place < num_slots, place, -1).to(torch.int32)
    return slots, chosen.sum(dim=1, dtype=torch.int32)


def say_failed(memory: ExchangeMemory, geometry: HostGeometry, link: LinkMemory, kind: str) -> None:
    """Only write the headers of `kind`, `dispatch` or `combine`, for a rank that goes no further."""
    if kind == "dispatch":
        _write_headers(memory, geometry, [geometry.dispatch_header(chunk) for chunk in link.records_out], 0)
    else:
        _write_headers(memory, geometry, [geometry.combine_header(chunk) for chunk in link.sums_out], 0)


def _write_headers(memory: ExchangeMemory, geometry: HostGeometry, headers: list[torch.Tensor], count: int) -> None:
    """Say in each of `headers` whether this rank has failed, by itself or because of a peer on this host."""
    reference.adopt_aborts(memory)
    words = memory.error.tolist() if int(memory.latch[0]) else [0] * ERROR_WORDS
    if words[0]:
        for place in (1, 5):
            words[place] = geometry.hosts.recorded(geometry.hosts.of_recorded(words[place]))
    words[COUNT] = count
    for header in headers:
        header.copy_(torch.tensor(words, dtype=torch.int32, device="cpu"))


def _adopt_headers(memory: ExchangeMemory, headers: list[torch.Tensor]) -> None:
    """Record the failure of a rank of another host, if a header tells of one."""
    for header in headers:
        code, about, phase, epoch, detail, origin, detail2, _ = header.tolist()
        if code and int(memory.latch[0]) == 0:
            reference.record_failure(memory, code, about, phase, epoch, detail, detail2, origin=origin)


def forward(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    handle_epoch: torch.Tensor,
    num_parts_V: torch.Tensor,
    timeout_ns: int,
    part: int | None,
) -> None:
    """Send records to the ranks of this host that hold their experts; with the last part raise this rank's flags there.

    Args:
        handle_epoch: int32 `[1]`, receives the epoch of this dispatch.
        num_parts_V: int32 `[H (T + 1)]`, receives the number of ranks that each token goes to.
        timeout_ns: how long to wait for a rank of this host.
        part: of `records_in`; None, which comes first, for this rank's own tokens.
    """
    local, own = geometry.local, geometry.hosts.host
    epoch = reference.next_epoch(int(memory.epoch[0]))
    hosts, tokens = ((own,), range(geometry.slots)) if part is None else (geometry.others, geometry.parts[part])
    if part is None:
        reference.enter(memory, local, epoch)
        reference.await_ready(memory, local, epoch, timeout_ns)
    if not part:
        headers = {host: geometry.dispatch_header(link.records(host, own)) for host in hosts}
        _check_headers(memory, geometry, headers, tag_of(link.count_tag, epoch), epoch)
    for source in hosts:
        first = source * geometry.slots
        num_parts_V[first + tokens.start : first + tokens.stop] = 0
        if int(memory.latch[0]) == 0:
            _forward_chunk(memory, geometry, link, source, tokens, num_parts_V, epoch)
    if part == len(geometry.parts) - 1:
        reference.raise_flags(memory, local, link.count_tag, epoch, local.max_tokens)
    handle_epoch[0] = epoch


def _check_headers(
    memory: ExchangeMemory, geometry: HostGeometry, headers: dict[int, torch.Tensor], tag: int, epoch: int
) -> None:
    """Record the failure of a rank of another host, or that it is in another exchange. `headers` are by host."""
    _adopt_headers(memory, list(headers.values()))
    for host, header in headers.items():
        word = int(header[COUNT])
        if int(memory.latch[0]) == 0 and not 0 <= (word & WITHOUT_SIGN) - tag <= geometry.flat.max_tokens:
            about = geometry.hosts.recorded(geometry.hosts.rank_on(host))
            numbers = exchange_of(word), exchange_of(tag)
            reference.record_failure(memory, ErrorCode.MISMATCH, about, Phase.DISPATCH_SEND, epoch, *numbers)


def _forward_chunk(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    host: int,
    slots: range,
    num_parts_V: torch.Tensor,
    epoch: int,
) -> None:
    """Store the records of `host` in `slots` of its chunk at the ranks of this host that hold their experts."""
    local, record = geometry.local, geometry.flat.record
    chunk = link.records(host, geometry.hosts.host)
    count = (int(geometry.dispatch_header(chunk)[COUNT]) & WITHOUT_SIGN) - tag_of(link.count_tag, epoch)
    tokens = (geometry.flags(chunk)[slots.start : min(slots.stop, count)] == epoch).nonzero().flatten() + slots.start
    records = geometry.records(chunk)[tokens]
    places = tokens + host * geometry.slots

    def put(offset: int, values: torch.Tensor) -> None:
        data = copy_as(values, torch.uint8)
        records[:, offset : offset + data.shape[1]] = data

    field = records[:, record.ids_offset : record.ids_offset + 2 * record.top_k].contiguous()
    ids = (field.view(torch.int16).to(torch.int64) & NO_EXPERT) - geometry.first_expert
    ids = torch.where((ids >= 0) & (ids < local.num_experts), ids, -1)
    put(record.ids_offset, ids.to(torch.int16))
    put(record.source_offset, places.to(torch.int32)[:, None])
    owners = reference.owners_of(ids, link.starts)
    for peer in range(local.world_size):
        mine = (owners == peer).any(dim=1)
        num_parts_V[places] += mine.to(torch.int32)
        chosen = mine.nonzero().flatten()
        reference.store_records(memory, local, peer, epoch & 1, places[chosen], records[chosen], epoch)


def relay(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    handle_epoch: torch.Tensor,
    num_parts_V: torch.Tensor,
    timeout_ns: int,
    part: int | None,
) -> None:
    """Sum what the ranks of this host have computed for tokens of this rail into `sums_out`, in its format.

    Args:
        handle_epoch: int32 `[1]`, the epoch of the dispatch.
        num_parts_V: int32 `[H (T + 1)]` from `forward`.
        timeout_ns: how long to wait for a rank of this host.
        part: of the tokens of other hosts; None, which comes last, for this rank's own tokens.
    """
    for of in relayed(geometry, link, num_parts_V, part):
        args = memory, geometry.local, handle_epoch, of.num_parts, None, of.sums, timeout_ns
        reference.combine_recv(*args, first_token=of.first)
        if of.rows is not None:
            _put_sums(geometry, quantize_rows(of.sums, geometry.flat.combine_format), of.rows)
    if part == len(geometry.parts) - 1:
        _write_headers(memory, geometry, [geometry.combine_header(chunk) for chunk in link.sums_out], 0)


@dataclass(frozen=True)
class Relayed:
    """Tokens of one host that `relay` sums.

    Attributes:
        first: the first of them among the tokens of `HostGeometry.local`.
        num_parts: int32 `[n]`, a view.
        sums: bf16 `[n, H]`, to be written.
        rows: uint8 `[n, sum_bytes]` of the chunk, where the quantized sums belong; None where `sums` lie there.
    """

    first: int
    num_parts: torch.Tensor
    sums: torch.Tensor
    rows: torch.Tensor | None


def relayed(geometry: HostGeometry, link: LinkMemory, num_parts_V: torch.Tensor, part: int | None) -> list[Relayed]:
    """What `relay` of `part` sums."""
    found = []
    for host, slots in geometry.relayed_slots(part):
        first = host * geometry.slots + slots.start
        counts = num_parts_V[first : first + len(slots)]
        rows = geometry.sum_rows(link.sums_out[host])[slots.start : slots.stop]
        if geometry.flat.combine_format is BF16:
            found.append(Relayed(first, counts, rows.view(torch.bfloat16), None))
        else:
            sums = rows.new_empty((len(slots), geometry.flat.output_hidden), dtype=torch.bfloat16)
            found.append(Relayed(first, counts, sums, rows))
    return found


def _put_sums(geometry: HostGeometry, sums: QuantizedRows, rows: torch.Tensor) -> None:
    """Write quantized sums and their scales into uint8 `[R, sum_bytes]` of a chunk."""
    assert sums.scales_RV is not None
    quants, scales = sums.quants_RK.view(torch.uint8), sums.scales_RV.contiguous().view(torch.uint8)
    rows[:, : quants.shape[1]] = quants
    at = geometry.flat.partial_scales_offset
    rows[:, at : at + scales.shape[1]] = scales


def total(
    memory: ExchangeMemory,
    geometry: HostGeometry,
    link: LinkMemory,
    shared_TH: torch.Tensor | None,
    y_TH: torch.Tensor,
    slots_HT: torch.Tensor | None,
    part: int,
) -> None:
    """Sum the partial sums of all hosts, ascending, into the rows of `part` in `y_TH`; NaN in all rows after a failure.

    Args:
        shared_TH: bf16 `[T, H]`, last dimension contiguous, added first; None where there is no shared expert.
        y_TH: bf16 `[T, H]`, contiguous, written.
        slots_HT: what `pack` returned.
        part: of the slots. Parts come in their order, and the last knows of failures.
    """
    if part == len(geometry.parts) - 1:
        _adopt_headers(memory, [geometry.combine_header(link.sums_in[host]) for host in geometry.others])
        if int(memory.latch[0]) != 0:
            y_TH.fill_(float("nan"))
            return
    rows = tokens_of(geometry, part, len(y_TH))
    sums = sum_over_hosts(geometry, link, shared_TH, rows, slots_HT)
    y_TH[rows].view(torch.int16).copy_(f32_to_bf16_bits(sums).view(torch.int16))


def tokens_of(geometry: HostGeometry, part: int, num_tokens: int) -> slice:
    """The tokens of `part` where a rank has `num_tokens`: all in the last part where slots are not tokens."""
    slots = geometry.parts[part]
    if geometry.compacts:
        return slice(0, num_tokens if part == len(geometry.parts) - 1 else 0)
    return slice(min(slots.start, num_tokens), min(slots.stop, num_tokens))


def sum_over_hosts(
    geometry: HostGeometry,
    link: LinkMemory,
    shared_TH: torch.Tensor | None,
    tokens: slice,
    slots_HT: torch.Tensor | None,
) -> torch.Tensor:
    """fp32, a row for each of `tokens`: the sum of `shared_TH` and the partial sums of all hosts, ascending."""
    wire, hidden, at = geometry.flat.combine_format, geometry.flat.output_hidden, geometry.flat.partial_scales_offset
    shape = tokens.stop - tokens.start, hidden
    sums = torch.zeros(shape, dtype=torch.float32, device=link.words.device)
    if shared_TH is not None:
        sums = shared_TH[tokens].to(torch.float32)
    for host in range(geometry.hosts.num_hosts):
        rows = geometry.sum_rows(link.sums(host, geometry.hosts.host))
        rows = rows[tokens] if slots_HT is None else rows[slots_HT[host, tokens].clamp(min=0)]
        quants, scales = rows[:, : wire.quant_bytes(hidden)].contiguous().view(wire.quant_dtype), None
        if wire.scale_dtype is not None:
            scales = rows[:, at : at + wire.scale_bytes(hidden)].contiguous().view(wire.scale_dtype)
        partial = dequantize_rows(QuantizedRows(wire, quants, scales))
        if slots_HT is not None:
            partial = torch.where(slots_HT[host, tokens, None] >= 0, partial, 0.0)
        sums = sums + partial
    return sums
