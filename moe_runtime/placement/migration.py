"""How experts migrate between ranks, in place: each rank writes its own slots, peers only send to its staging area.

Where peers are mapped, a chunk goes through the region `staging`: the receiver grants it, the sender stores it and
raises `sent`, the receiver copies it to the slot. No rank ever writes the weights of another, and none holds more than
one expert in addition to its own. The region begins with int32 words. Each has one writer, and they only ever grow. `L`
are the ranks that share the heap, all of them on one host:

    grant [L]   how many chunks rank l lets this rank send to it
    sent  [L]   how many chunks rank l has stored here
    done  [L]   how many re-placements rank l has finished
    asked [L]   how often rank l, which has waited too long, has asked who is alive
    here  [L]   the last of these times that rank l, which is waiting too, has answered

Between hosts a chunk goes over a rail (`moe_runtime.placement.rail`): from the rank of its slot to the one that sends
it, over the network, and to the rank of its new slot. Those are moves inside hosts from and to the rail's two chunks.

The host transport carries one expert at a time (`CollectiveTransport.carry_bytes`); two more are held meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from moe_runtime.comm.errors import ErrorCode, MoERuntimeError, PeerTimeoutError, Phase, reason_of
from moe_runtime.comm.host_link import Exchange
from moe_runtime.comm.rank_group import LOOK_S, ROLL_CALL_S
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.memory import STAGING_WORDS, staging_words_bytes
from moe_runtime.context.peers import exchange_failed, failed_elsewhere
from moe_runtime.expert_slots import rows_of, tensors_of
from moe_runtime.experts import Experts
from moe_runtime.kernels.exchange.reference import record_failure
from moe_runtime.placement.migration_plan import SPARE, Crossing, MigrationPlan, Move
from moe_runtime.placement.rail import Rail

SPINS_BEFORE_SLEEP = 200

_LEFT: list[Rail] = []
"""Of moves that have failed: the network may still write to their chunks."""

OUTGOING, INCOMING = -2, -3
"""Slots of a move that are a rank's chunks to and from other hosts."""


@dataclass(frozen=True)
class _Words:
    """The words of one rank's region `staging`, int32 `[L]` each."""

    grant: torch.Tensor
    sent: torch.Tensor
    done: torch.Tensor
    asked: torch.Tensor
    here: torch.Tensor


class ExpertMover:
    """One rank's experts as bytes, and the moves that send and receive them.

    Args:
        context: allocated.
        experts: of this rank. Without `into` all their tensors change in place and keep their addresses.
        plan: what moves. Memory for one more expert is allocated where it needs the spare place of this rank, and two
            chunks where this rank sends or receives experts over the network.
        into: experts of the same layout in other memory, which moves write to. None is `experts` themselves.
        phase: what a wait in vain is called in errors. In `RECOVERY` it names the rank that is waited for, without a
            search for another that this one may wait for itself: the survivors find out who is there.
    """

    def __init__(
        self,
        context: ExpertParallelContext,
        experts: Experts,
        plan: MigrationPlan,
        *,
        into: Experts | None = None,
        phase: Phase = Phase.REPLACEMENT,
    ) -> None:
        self.context = context
        self.rank = context.rank
        self._first_rank = context.rank - context.heap.rank
        self._phase = phase
        tensors = tensors_of(experts)
        self.layout = [(name, str(tensor.dtype), tuple(tensor.shape[1:])) for name, tensor in tensors.items()]
        self._rows = [rows_of(tensor) for tensor in tensors.values()]
        self._rows_into = self._rows if into is None else [rows_of(tensor) for tensor in tensors_of(into).values()]
        self.num_bytes = sum(rows.shape[1] for rows in self._rows)
        spares = [(move.target_rank, move.target_slot) for one in plan.rounds for move in one.moves]
        needed = self.num_bytes if (self.rank, SPARE) in spares else 0
        self._spare = torch.empty(needed, dtype=torch.uint8, device=context.device)
        self.rail = None if context.link is None else Rail(context, plan, min(self.chunk_bytes, self.num_bytes))
        self._granted = 0
        self._next_look = 0.0

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of a chunk between mapped ranks, or between hosts."""
        return self.context.staging_bytes - staging_words_bytes(self.context.heap.world_size)

    def copy_chunk(self, move: Move, start: int) -> None:
        """The bytes from `start` on of a move within this rank to or from a chunk of the rail."""
        assert self.rail is not None
        num_bytes = min(self.chunk_bytes, self.num_bytes - start)
        if move.target_slot == OUTGOING:
            self._load(move.source_slot, start, self.rail.outgoing[:num_bytes])
        else:
            self._store(move.target_slot, start, self.rail.incoming[:num_bytes])

    def copy(self, move: Move) -> None:
        """A move within this rank."""
        if SPARE in (move.source_slot, move.target_slot):
            # The spare slot holds an expert as one flat tensor, as a parcel does.
            spare, slot = self._spare, max(move.source_slot, move.target_slot)
            self._store(slot, 0, spare) if move.source_slot == SPARE else self._load(slot, 0, spare)
            return
        for rows, into in zip(self._rows, self._rows_into, strict=True):
            into[move.target_slot].copy_(rows[move.source_slot])

    def grant(self, move: Move) -> None:
        """At the receiver: the staging area is free, the sender may store the next chunk."""
        self._granted = int(self._words(self.rank).sent[self._local(move.source_rank)]) + 1
        self._words(move.source_rank).grant[self._local(self.rank)] = self._granted

    def send(self, move: Move, start: int) -> None:
        """At the sender: once granted, store bytes from `start` on in the receiver's staging area and raise `sent`."""
        target = self._words(move.target_rank)
        number = int(target.sent[self._local(self.rank)]) + 1
        self._wait(self._words(self.rank).grant, move.target_rank, number)
        self._load(move.source_slot, start, self._chunk(move.target_rank, start))
        target.sent[self._local(self.rank)] = number

    def take(self, move: Move, start: int) -> None:
        """At the receiver: wait for a chunk and copy it to its slot."""
        self._wait(self._words(self.rank).sent, move.source_rank, self._granted)
        self._store(move.target_slot, start, self._chunk(self.rank, start))

    def carry(self, move: Move) -> None:
        """A move between ranks through the host transport. Every rank takes part."""
        parcels = {}
        if move.source_rank == self.rank:
            parcel = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.context.device)
            self._load(move.source_slot, 0, parcel)
            parcels[move.target_rank] = parcel
        for came in self._carry(parcels).values():
            self._store(move.target_slot, 0, came)

    def announce_done(self) -> None:
        """Signal to all ranks, of this host where there are several, that this one has all its experts."""
        if self.context.host_transport is not None:
            return
        number = int(self._words(self.rank).done[self._local(self.rank)]) + 1
        for peer in self._local_ranks:
            self._words(peer).done[self._local(self.rank)] = number

    def wait_done(self) -> None:
        """Wait until all ranks, of this host where there are several, have called `announce_done`."""
        if self.context.host_transport is not None:
            self._carry({})
            return
        done = self._words(self.rank).done
        number = int(done[self._local(self.rank)])
        for peer in self._local_ranks:
            self._wait(done, peer, number)

    def start_exchange(self, crossings: Sequence[Crossing], start: int) -> Exchange:
        """Begin to send and to get what crosses on this rail of the bytes from `start` on."""
        assert self.rail is not None
        try:
            return self.rail.start(crossings, min(self.chunk_bytes, self.num_bytes - start))
        except MoERuntimeError as error:
            raise exchange_failed(self.context, error, Phase.REPLACEMENT, self.rail.limit_s) from error

    def end_exchange(self, exchange: Exchange) -> None:
        """Wait for it; raises what fails meanwhile, on a rank of this host or between hosts."""
        assert self.rail is not None
        context, limit_s = self.context, self.rail.limit_s
        deadline = time.monotonic() + limit_s
        while not exchange.ended() and time.monotonic() < deadline:
            context.check()
            self._look()
            time.sleep(2e-4)
        try:
            if not exchange.ended() and context.link is not None and not context.link.bounded_waits:
                text = f"rank {self.rank}, replacement: the exchange between hosts did not end within {limit_s:g} s"
                raise PeerTimeoutError(text, -1, Phase.REPLACEMENT)
            exchange.wait()
        except MoERuntimeError as error:
            raise exchange_failed(context, error, Phase.REPLACEMENT, limit_s) from error

    def _carry(self, parcels: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        assert self.context.host_transport is not None
        epoch = int(self.context.epoch[0])
        return self.context.host_transport.carry_bytes(
            self.context, phase=Phase.REPLACEMENT, epoch=epoch, num_bytes=self.num_bytes, parcels=parcels
        )

    def _pieces(
        self, all_rows: Sequence[torch.Tensor], slot: int, start: int, num_bytes: int
    ) -> Iterator[torch.Tensor]:
        """Views that together are the `num_bytes` bytes from `start` on of the expert in `slot` of `all_rows`."""
        end = start + num_bytes
        if slot == SPARE:
            yield self._spare[start:end]
            return
        if slot in (OUTGOING, INCOMING):
            assert self.rail is not None
            yield (self.rail.outgoing if slot == OUTGOING else self.rail.incoming)[:num_bytes]
            return
        first = 0
        for rows in all_rows:
            last = first + rows.shape[1]
            if start < last and end > first:
                yield rows[slot, max(start - first, 0) : end - first]
            first = last

    def _load(self, slot: int, start: int, out: torch.Tensor) -> None:
        for piece in self._pieces(self._rows, slot, start, out.shape[0]):
            out[: piece.shape[0]].copy_(piece)
            out = out[piece.shape[0] :]

    def _store(self, slot: int, start: int, source: torch.Tensor) -> None:
        for piece in self._pieces(self._rows_into, slot, start, source.shape[0]):
            piece.copy_(source[: piece.shape[0]])
            source = source[piece.shape[0] :]

    def _chunk(self, rank: int, start: int) -> torch.Tensor:
        """The chunk of bytes from `start` on, in the staging area of `rank`."""
        first = staging_words_bytes(self.context.heap.world_size)
        num_bytes = min(self.chunk_bytes, self.num_bytes - start)
        return self.context.heap.peer_tensor("staging", self._local(rank))[first : first + num_bytes]

    @property
    def _local_ranks(self) -> range:
        """The ranks that share the heap."""
        return range(self._first_rank, self._first_rank + self.context.heap.world_size)

    def _local(self, rank: int) -> int:
        """The number of `rank` in the heap."""
        return rank - self._first_rank

    def _words(self, rank: int) -> _Words:
        count = self.context.heap.world_size
        words = self.context.heap.peer_tensor("staging", self._local(rank))[: STAGING_WORDS * count * 4]
        return _Words(*words.view(torch.int32).view(STAGING_WORDS, count))

    def _wait(self, words: torch.Tensor, peer: int, number: int) -> None:
        """Wait until the word of `peer` has reached `number`; raises what fails meanwhile, here or on a peer.

        Over several hosts a peer that lives may wait for another host, which it then names; so it has longer.
        """
        context = self.context
        limit_s, begun = context.timeout_s, time.monotonic()
        spins = 0
        while int(words[self._local(peer)]) < number:
            context.check_peers()
            self._look()
            if time.monotonic() > begun + limit_s:
                about = peer if self._phase is Phase.RECOVERY else self._missing(peer)
                if about is None and self.rail is not None and limit_s < 2 * self.rail.limit_s:
                    limit_s = 2 * self.rail.limit_s
                    continue
                about = self._local(peer if about is None else about)
                limit_ms, epoch = min(int(limit_s * 1000), 2**31 - 1), int(context.epoch[0])
                record_failure(context.memory, ErrorCode.TIMEOUT, about, self._phase, epoch, limit_ms)
                context.check_peers()
            spins += 1
            time.sleep(0 if spins < SPINS_BEFORE_SLEEP else 2e-4)

    def _look(self) -> None:
        """What a rank does while it waits: answer those that ask for it, and raise what ranks of other hosts report."""
        self._answer()
        context = self.context
        if self.rail is not None and context.group is not None and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if (left := context.group.who_left("replacement")) is not None:
                raise failed_elsewhere(context, left, Phase.REPLACEMENT, self.rail.limit_s)

    def _answer(self) -> None:
        """Answer the ranks that ask whether this one is alive."""
        # A list: `nonzero` fails when a word changes while it runs.
        for rank, asked in zip(self._local_ranks, self._words(self.rank).asked.tolist(), strict=True):
            if asked:
                self._words(rank).here[self._local(self.rank)] = asked

    def _missing(self, peer: int) -> int | None:
        """Who of this host does not answer, for whom a silent `peer` may wait, itself first; None if all answer."""
        me = self._local(self.rank)
        number = int(self._words(self.rank).asked[me]) + 1
        for rank in self._local_ranks:
            self._words(rank).asked[me] = number
        deadline = time.monotonic() + min(ROLL_CALL_S, self.context.timeout_s)
        absent = [peer]
        while absent and time.monotonic() <= deadline:
            self.context.check_peers()
            self._look()
            here = zip(self._local_ranks, self._words(self.rank).here.tolist(), strict=True)
            absent = [rank for rank, answered in here if answered < number]
            time.sleep(2e-4)
        return peer if peer in absent else next(iter(absent), None)


def move_experts(movers: Sequence[ExpertMover], plan: MigrationPlan) -> None:
    """Make the moves of `plan` on the ranks of this process: one, or all virtual ones. Collective.

    All ranks have experts of one layout. When it returns, each rank has the experts of its new placement. A rank makes
    its moves in the order of the plan and skips other ranks' moves, so the first unfinished move can always go on.
    """
    contexts = [mover.context for mover in movers]
    # Peers that are in an exchange of experts could not read what a failing rank says in one of tokens.
    words = [context.say_failed for context in contexts]
    for context in contexts:
        context.say_failed = None
    try:
        _make(movers, plan)
    except BaseException as error:
        _LEFT.extend(mover.rail for mover in movers if mover.rail is not None)
        if isinstance(error, PeerTimeoutError):
            for context in contexts:
                if context.link is not None and context.group is not None and error.rank != context.rank:
                    # Before this rank leaves the link: ranks of other hosts then look in the store who is gone.
                    context.group.leave(reason_of(error), error)
        raise
    for context, say_failed in zip(contexts, words, strict=True):
        context.say_failed = say_failed


def _make(movers: Sequence[ExpertMover], plan: MigrationPlan) -> None:
    """All moves of `plan`, and the wait for other ranks' moves."""
    for one in plan.rounds:
        for start in range(0, movers[0].num_bytes, movers[0].chunk_bytes) if one.crossings else ():
            _cross(movers, plan, one.crossings, start)
        for move in one.moves:
            _move(movers, move)
    for mover in movers:
        mover.announce_done()
    for mover in movers:
        mover.wait_done()
    # All ranks of this host are done, and so are other hosts' ranks that come to this exchange.
    _exchange([mover for mover in movers if mover.rail is not None], (), 0)


def _move(movers: Sequence[ExpertMover], move: Move) -> None:
    """A move inside a host, or through the host transport."""
    if move.source_rank == move.target_rank:
        for mover in movers:
            if mover.rank == move.target_rank:
                mover.copy(move)
    elif movers[0].context.host_transport is not None:
        for mover in movers:
            mover.carry(move)
    else:
        for start in range(0, movers[0].num_bytes, movers[0].chunk_bytes):
            _hop(movers, move, start)


def _cross(movers: Sequence[ExpertMover], plan: MigrationPlan, crossings: Sequence[Crossing], start: int) -> None:
    """The bytes from `start` on of all crossings of a round. Ranks read them in each slot before they write there."""
    for crossing in crossings:
        _hop(movers, replace(crossing.move, target_rank=plan.sender(crossing), target_slot=OUTGOING), start)
    rails = {crossing.rail for crossing in crossings}
    _exchange([mover for mover in movers if mover.context.heap.rank in rails], crossings, start)
    for crossing in crossings:
        _hop(movers, replace(crossing.move, source_rank=plan.receiver(crossing), source_slot=INCOMING), start)


def _exchange(movers: Sequence[ExpertMover], crossings: Sequence[Crossing], start: int) -> None:
    exchanges = [mover.start_exchange(crossings, start) for mover in movers]
    for mover, exchange in zip(movers, exchanges, strict=True):
        mover.end_exchange(exchange)


def _hop(movers: Sequence[ExpertMover], move: Move, start: int) -> None:
    """The bytes from `start` on of a move inside a host."""
    source = [mover for mover in movers if mover.rank == move.source_rank]
    target = [mover for mover in movers if mover.rank == move.target_rank]
    if move.source_rank == move.target_rank:
        for mover in target:
            mover.copy_chunk(move, start)
        return
    for mover in target:
        mover.grant(move)
    for mover in source:
        mover.send(move, start)
    for mover in target:
        mover.take(move, start)
