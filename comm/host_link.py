"""The way between hosts: each rank exchanges equal chunks with the ranks of its rail, one on every other host.

Inside a host kernels store to their peers (`comm/heaps/`). Between hosts an engine that people already run carries the
bytes: NCCL on GPUs, gloo on CPUs. A chunk may travel in parts, each an exchange of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_runtime.comm.errors import MoERuntimeError, PeerAbortedError, PeerTimeoutError, Phase, StepMismatchError
from moe_runtime.comm.host_watch import HostWatch
from moe_runtime.comm.hosts import Hosts
from moe_runtime.comm.left_groups import keep_until
from moe_runtime.comm.rank_group import ROLL_CALL_S, RankGroup
from moe_runtime.comm.suspects import Suspects

GRAPHS_SINCE = (2, 30, 4)
"""The first NCCL with which no replay of a graph over several hosts is known to hang."""

_HEADER_BYTES = 32
"""Before each chunk over gloo, int64: phase, part, bytes of the chunk, and whether it is of a rank that has failed."""

Chunks = Sequence[torch.Tensor]


class Exchange(Protocol):
    """An exchange under way."""

    def ended(self) -> bool:
        """Whether `wait` returns or raises at once, and on a GPU whether what follows need not wait either."""

    def wait(self) -> None:
        """Make what follows see the chunks that came: on a GPU on the current stream, without waiting for the host.

        Where the link's waits are bounded, raises `PeerTimeoutError` naming the rank and the host that did not take
        part, and `StepMismatchError` or `PeerAbortedError` naming those that sent another chunk than this rank awaits.
        """


class HostLink(ABC):
    """What carries chunks between the hosts of a group.

    Attributes:
        hosts: the ranks of each host.
        name: of the engine.
        graph_safe: whether a step can be captured in a CUDA graph.
        bounded_waits: whether a wait for a host that is gone ends by itself. Where it does not, a watch ends the
            process (`HostWatch`).
        suspects: what ranks say about whom they missed; None where all are in one process.
    """

    hosts: Hosts
    name: str
    graph_safe: bool
    bounded_waits: bool
    suspects: Suspects | None = None

    def make_room(self, num_bytes: int) -> None:
        """Make room for chunks of up to `num_bytes`. All ranks call it for each layer before they send a chunk."""
        return

    @abstractmethod
    def start(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> Exchange:
        """Send `outgoing[h]` to this rail's rank on each other host `h`, which becomes its `incoming[host]`.

        Args:
            outgoing, incoming: for each host contiguous uint8 `[bytes]`. What one rank sends is as large as what the
                other awaits; those of this host are left alone. `outgoing` must not be written before `wait` of what
                comes back.
            phase: of the step.
            part: of the chunks of this phase.
            limit_s: seconds that the exchange may take, where waits are bounded.
        """

    @abstractmethod
    def post(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> None:
        """`start` of a rank that has failed and waits for nobody; `leave` follows."""

    def leave(self) -> None:
        """Take part in no exchange any more, so that peers do not wait for this rank where it can."""
        return

    def watch(self, on_failure: Callable[[MoERuntimeError], None], limit_s: float, start_s: float) -> None:
        """Call `on_failure`, on another thread, where a rank of another host is gone and waits have no limit."""
        return

    def settle(self, limit_s: float) -> None:
        """Wait at most `limit_s` seconds for what is under way, then end it, where waits have no limit."""
        return

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Free what the link holds. Nothing is under way, unless this rank has `failed`."""


def _check_chunk(hosts: Hosts, host: int, awaited: tuple[Phase, int, int], sent: tuple[int, int, int, int]) -> None:
    """Raise where the chunk that `host` has `sent` is not the one that this rank has `awaited`.

    Args:
        hosts: of this rank.
        awaited: phase, part and bytes.
        sent: likewise, and whether its rank has failed.
    """
    if sent[:3] == awaited:
        return
    phase, rank = awaited[0], hosts.rank_on(host)
    who = f"rank {hosts.rank}, {phase.name.lower()}: rank {rank} (host {host})"
    if sent[3]:
        raise PeerAbortedError(f"{who} gave up", rank, phase)
    here, there = (f"{Phase(of).name.lower()}, part {part} of {size} bytes" for of, part, size in (awaited, sent[:3]))
    raise StepMismatchError(
        f"{who} was at {there}, this rank at {here}: all ranks have to call the same layers in the same order, with "
        "equal max_tokens",
        rank,
        phase,
    )


@dataclass
class _Posted:
    """The chunks of one exchange of a virtual rank.

    Attributes:
        unread: hosts that have not read theirs.
        failed: whether the rank has failed.
    """

    chunks: Chunks
    phase: Phase
    part: int
    unread: set[int]
    failed: bool


class PrivateLink(HostLink):
    """A rail of virtual ranks in one process: all of them start an exchange before any waits for it."""

    name = "private"
    graph_safe = True
    bounded_waits = True

    def __init__(self, hosts: Hosts, rail: list[PrivateLink]) -> None:
        self.hosts = hosts
        self._rail = rail
        self._exchanges = 0
        self._outgoing: dict[int, _Posted] = {}

    @classmethod
    def rails(cls, num_hosts: int, ranks_per_host: int) -> list[PrivateLink]:
        """The link of each virtual rank, by rank."""
        rails: list[list[PrivateLink]] = [[] for _ in range(ranks_per_host)]
        links = []
        for host in range(num_hosts):
            for local_rank in range(ranks_per_host):
                rail = rails[local_rank]
                rail.append(cls(Hosts(num_hosts, ranks_per_host, host, local_rank), rail))
                links.append(rail[-1])
        return links

    def start(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> Exchange:
        return _PrivateExchange(self, incoming, phase, part, self._send(outgoing, phase, part, failed=False))

    def post(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> None:
        self._send(outgoing, phase, part, failed=True)

    def close(self, *, failed: bool) -> None:
        self._outgoing.clear()

    def _send(self, outgoing: Chunks, phase: Phase, part: int, *, failed: bool) -> int:
        """The number of the exchange."""
        self._exchanges += 1
        unread = set(range(self.hosts.num_hosts)) - {self.hosts.host}
        self._outgoing[self._exchanges] = _Posted(outgoing, phase, part, unread, failed)
        return self._exchanges

    def _read(self, number: int, host: int) -> _Posted | None:
        """What this rank has for `host` in an exchange, once; None where it has not come to it."""
        posted = self._outgoing.get(number)
        if posted is not None:
            posted.unread.discard(host)
            if not posted.unread:
                del self._outgoing[number]
        return posted


class _PrivateExchange:
    def __init__(self, link: PrivateLink, incoming: Chunks, phase: Phase, part: int, number: int) -> None:
        self._link, self._incoming = link, incoming
        self._phase, self._part, self._number = phase, part, number

    def ended(self) -> bool:
        return True

    def wait(self) -> None:
        hosts, phase = self._link.hosts, self._phase
        for host, peer in enumerate(self._link._rail):
            if peer is self._link:
                continue
            posted, incoming = peer._read(self._number, hosts.host), self._incoming[host]
            if posted is None:
                rank = hosts.rank_on(host)
                who = f"rank {hosts.rank}, {phase.name.lower()}: rank {rank} (host {host})"
                text = f"{who} did not take part: all virtual ranks start an exchange before one waits for it"
                raise PeerTimeoutError(text, rank, phase)
            came = posted.chunks[hosts.host]
            sent = posted.phase, posted.part, came.numel(), posted.failed
            _check_chunk(hosts, host, (phase, self._part, incoming.numel()), sent)
            incoming.copy_(came)


class GlooLink(HostLink):
    """Over gloo, for CPUs: `wait` waits on the host, at most as long as the step may take. Its making is collective.

    A header says what a chunk is. There is always room for the largest chunk of any layer, since gloo ends the process
    where more comes than is awaited.

    Args:
        hosts: the ranks of each host.
        group: of all ranks.
    """

    name = "gloo"
    graph_safe = False
    bounded_waits = True
    suspects: Suspects

    def __init__(self, hosts: Hosts, group: RankGroup) -> None:
        self.hosts = hosts
        self._all = group
        self.rail = group.of_ranks(hosts.rail, f"rail {hosts.local_rank}")
        self.suspects = Suspects(group)
        self._others = [host for host in range(hosts.num_hosts) if host != hosts.host]
        self._key = self.rail.new_name("GlooLink")
        self._gloo: Any = self.rail.connect("GlooLink", f"moe_runtime/{self._key}")
        self._exchanges = self._room = 0
        self._under_way: list[_GlooExchange] = []

    def make_room(self, num_bytes: int) -> None:
        """See `HostLink`."""
        self._room = max(self._room, num_bytes)

    def start(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> Exchange:
        return self._begin(outgoing, incoming, phase, part, limit_s, failed=False)

    def _begin(
        self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float, *, failed: bool
    ) -> _GlooExchange:
        self._exchanges += 1
        words = [(phase, part, outgoing[host].numel(), failed) for host in self._others]
        headers = torch.tensor(words, dtype=torch.int64, device="cpu")
        out = torch.cat(
            [
                piece
                for host, header in zip(self._others, headers.view(torch.uint8), strict=True)
                for piece in (header, outgoing[host])
            ]
        )
        # Where less comes it is at the start.
        rooms = [0 if host == self.hosts.host else self._room_for(chunk) for host, chunk in enumerate(incoming)]
        came = out.new_empty(sum(rooms))
        sent = [0 if host == self.hosts.host else _HEADER_BYTES + c.numel() for host, c in enumerate(outgoing)]
        options = dist.AllToAllOptions()
        options.asyncOp = True
        options.timeout = timedelta(seconds=max(limit_s, 0.001))
        number = self._exchanges
        begun = time.monotonic()
        try:
            if self._gloo is None:
                raise RuntimeError("an earlier exchange failed")
            work = self._gloo.alltoall_base(came, out, rooms, sent, options)
        except RuntimeError as error:
            raise self._failure(error, number, phase, begun, limit_s) from error
        data = out, came.split(rooms), incoming
        exchange = _GlooExchange(self, work, data, number, (phase, part), begun, limit_s)
        self._under_way = [*(other for other in self._under_way if not other.ended()), exchange]
        return exchange

    def post(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> None:
        with contextlib.suppress(MoERuntimeError):
            exchange = self._begin(outgoing, incoming, phase, part, limit_s, failed=True)
            keep_until(exchange.ended, self._gloo, exchange)

    def leave(self) -> None:
        # Its connections close with the last reference, which ends at once what peers wait for in vain. That would wait
        # for an exchange under way.
        under_way, self._under_way = [exchange for exchange in self._under_way if not exchange.ended()], []
        if under_way:
            keep_until(lambda: all(exchange.ended() for exchange in under_way), self._gloo, under_way)
        self._gloo = None

    def close(self, *, failed: bool) -> None:
        self._gloo = None

    def _room_for(self, chunk: torch.Tensor) -> int:
        """Bytes for a chunk in place of `chunk`, and its header."""
        num_bytes = _HEADER_BYTES + max(self._room, chunk.numel())
        return -(-num_bytes // _HEADER_BYTES) * _HEADER_BYTES

    def _failure(self, error: RuntimeError, number: int, phase: Phase, begun: float, limit_s: float) -> MoERuntimeError:
        """Who did not take part in exchange `number`."""
        traceback.clear_frames(error.__traceback__)
        self.leave()
        waited = time.monotonic() - begun
        if (left := self._all.who_left(phase.name.lower())) is not None:
            return left
        # The ranks of this host wait for this one meanwhile.
        missing, lost = self.rail.roll_call(f"{self._key}/{number}", min(ROLL_CALL_S, limit_s / 4))
        if missing and (left := self._all.who_left(phase.name.lower())) is not None:
            # A rank that waited in vain for one of its own host has said so meanwhile.
            return left
        if not missing and lost is not None and lost.rank >= 0:
            return PeerTimeoutError(f"rank {self.hosts.rank}, {phase.name.lower()}: {lost}", lost.rank, phase)
        rank = self.hosts.rank_on(missing[0]) if missing else -1
        if rank >= 0:
            self.suspects.accuse(rank, gone=waited < limit_s)
        names = " and ".join(f"rank {self.hosts.rank_on(host)} (host {host})" for host in missing) or "a host"
        ended = f"the exchange between hosts ended after {waited:.1f} s, its limit is {limit_s:g} s"
        text = f"rank {self.hosts.rank}, {phase.name.lower()}: {names} did not take part; {ended}"
        return PeerTimeoutError(text, rank, phase)


class _GlooExchange:
    def __init__(
        self,
        link: GlooLink,
        work: Any,
        data: tuple[torch.Tensor, Chunks, Chunks],
        number: int,
        place: tuple[Phase, int],
        begun: float,
        limit_s: float,
    ) -> None:
        self._link, self._work, self._data, self._number = link, work, data, number
        self._phase, self._part = place
        self._begun, self._limit_s = begun, limit_s

    def ended(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        left = max(self._begun + self._limit_s - time.monotonic(), 0.001)
        try:
            self._work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            self._work = None
            raise self._link._failure(error, self._number, self._phase, self._begun, self._limit_s) from error
        # It holds the chunks.
        self._work = None
        _, came, incoming = self._data
        for host in self._link._others:
            chunk, size = incoming[host], incoming[host].numel()
            phase, part, num_bytes, failed = came[host][:_HEADER_BYTES].view(torch.int64).tolist()
            awaited = self._phase, self._part, size
            try:
                _check_chunk(self._link.hosts, host, awaited, (phase, part, num_bytes, failed))
            except PeerAbortedError as error:
                raise self._link._all.who_left(self._phase.name.lower()) or error from None
            chunk.copy_(came[host][_HEADER_BYTES : _HEADER_BYTES + size])


class NcclLink(HostLink):
    """Over NCCL, for GPUs: nothing waits for the host. Constructing it is collective.

    A step waits without limit for a host that is gone: NCCL has no limit of its own. `HostWatch` ends that wait. Peers
    learn from the store that a rank leaves. Chunks of other sizes than a rank awaits are not found: to compare sizes
    first would wait for the host.

    Args:
        hosts: the ranks of each host.
        group: of all ranks.
        device: this rank's GPU.
    """

    name = "nccl"
    graph_safe = True
    bounded_waits = False
    suspects: Suspects

    def __init__(self, hosts: Hosts, group: RankGroup, device: torch.device) -> None:
        self.hosts = hosts
        self._all = group
        self.suspects = Suspects(group)
        self.rail = rail = group.of_ranks(hosts.rail, f"rail {hosts.local_rank}")
        self._watch: HostWatch | None = None
        key = rail.new_name("NcclLink")
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._nccl: Any = rail.connect_nccl("NcclLink", f"moe_runtime/{key}")
            # Connects now: that fails inside a capture.
            words = torch.zeros(2, hosts.num_hosts, 16, dtype=torch.uint8, device=device)
            with rail.connecting("NcclLink", f"{key}/connect"):
                self.start(list(words[0]), list(words[1]), Phase.START_UP, 0, rail.timeout_s).wait()
                torch.cuda.synchronize(device)

    def start(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> Exchange:
        options = dist.AllToAllOptions()
        options.asyncOp = False  # on the stream that is current
        # Nothing is sent for an empty tensor.
        out, came = (
            [chunk[:0] if host == self.hosts.host else chunk for host, chunk in enumerate(chunks)]
            for chunks in (outgoing, incoming)
        )
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                self._nccl.alltoall(came, out, options)
                return _NcclExchange(self._stream.record_event())
        except RuntimeError as error:
            # A connection was lost. The watch soon knows who is gone.
            found = None if self._watch is None else self._watch.verdict(limit_s)
            # Else a call that waits for the GPU and keeps the interpreter's lock would wait for ever.
            self._abort()
            text = f"rank {self.hosts.rank}, {phase.name.lower()}: a host did not take part: {error}"
            raise (found or PeerTimeoutError(text, -1, phase)) from error

    def post(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> None:
        with contextlib.suppress(MoERuntimeError):
            # So that `settle` waits for it.
            self.start(outgoing, incoming, phase, part, limit_s).wait()

    def watch(self, on_failure: Callable[[MoERuntimeError], None], limit_s: float, start_s: float) -> None:
        """Watch the ranks of this rail from now on; see `HostWatch`."""
        rails = self._all, self.rail, self.suspects
        self._watch = HostWatch(self.hosts, *rails, limit_s, start_s, on_failure, self._abort)
        # A process that ends without `close` would wait for a host that is gone.
        atexit.register(self._watch.free_at_exit)

    def settle(self, limit_s: float) -> None:
        """Wait at most `limit_s` until the current stream is idle, then end what waits for other hosts."""
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + limit_s
        while not event.query():
            if time.monotonic() > deadline:
                self._abort()
                return
            time.sleep(1e-4)

    def close(self, *, failed: bool) -> None:
        if self._watch is not None:
            atexit.unregister(self._watch.free_at_exit)
            self._watch.stop(in_order=True)
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            # A shutdown waits for the other hosts.
            (nccl.abort if failed else nccl.shutdown)()

    def _abort(self) -> None:
        nccl = self._nccl
        if nccl is not None:
            nccl.abort()


class _NcclExchange:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def ended(self) -> bool:
        return self._done.query()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


def graph_caution() -> str | None:
    """What is known against steps over several hosts in graphs with the NCCL that is there; None where nothing is."""
    version = torch.cuda.nccl.version()
    if version >= GRAPHS_SINCE:
        return None
    ours, since = (".".join(map(str, numbers)) for numbers in (version, GRAPHS_SINCE))
    return f"NCCL {ours}: replays of graphs over several hosts were reported to hang before {since}"
