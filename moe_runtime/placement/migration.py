"""How experts migrate between ranks, in place: each rank writes its own slots, peers only send to its staging area.

Where peers are mapped, a chunk goes through the region `staging`: the receiver grants it, the sender stores it and
raises `sent`, the receiver copies it to the slot. No rank ever writes the weights of another, and none holds more than
one expert in addition to its own. The region begins with int32 words. Each has one writer, and they only ever grow:

    grant [W]   how many chunks rank w lets this rank send to it
    sent  [W]   how many chunks rank w has stored here
    done  [W]   how many re-placements rank w has finished
    asked [W]   1 once rank w, which has waited too long, asks who is alive
    here  [W]   1 once rank w, which is waiting too, has answered

The host transport carries one expert at a time (`CollectiveTransport.carry_bytes`); two more are held meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.rank_group import ROLL_CALL_S
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.memory import STAGING_WORDS, staging_words_bytes
from moe_runtime.experts import Experts
from moe_runtime.kernels.exchange.reference import record_failure
from moe_runtime.placement.migration_plan import SPARE, Move

SPINS_BEFORE_SLEEP = 200


@dataclass(frozen=True)
class _Words:
    """The words of one rank's region `staging`, int32 `[W]` each."""

    grant: torch.Tensor
    sent: torch.Tensor
    done: torch.Tensor
    asked: torch.Tensor
    here: torch.Tensor


class ExpertMover:
    """One rank's experts as bytes, and the moves that send and receive them.

    Args:
        context: allocated.
        experts: of this rank. All their tensors change in place and keep their addresses.
        needs_spare: allocate memory for one more expert, which cycles of moves need.
    """

    def __init__(self, context: ExpertParallelContext, experts: Experts, *, needs_spare: bool) -> None:
        self.context = context
        self.rank = context.rank
        named = [
            (f"{part}.{field.name}", getattr(weights, field.name))
            for part, weights in (("gate_up", experts.gate_up), ("down", experts.down))
            for field in fields(weights)
        ]
        tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        self.layout = [(name, str(tensor.dtype), tuple(tensor.shape[1:])) for name, tensor in tensors]
        self._rows = [tensor.reshape(tensor.shape[0], -1).view(torch.uint8) for _, tensor in tensors]
        self.num_bytes = sum(rows.shape[1] for rows in self._rows)
        self._spare = torch.empty(self.num_bytes if needs_spare else 0, dtype=torch.uint8, device=context.device)
        self._granted = 0

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of a chunk between mapped ranks."""
        return self.context.staging_bytes - staging_words_bytes(self.context.world_size)

    def copy(self, move: Move) -> None:
        """A move within this rank."""
        if SPARE in (move.source_slot, move.target_slot):
            # The spare slot holds an expert as one flat tensor, as a parcel does.
            spare, slot = self._spare, max(move.source_slot, move.target_slot)
            self._store(slot, 0, spare) if move.source_slot == SPARE else self._load(slot, 0, spare)
            return
        for rows in self._rows:
            rows[move.target_slot].copy_(rows[move.source_slot])

    def grant(self, move: Move) -> None:
        """At the receiver: the staging area is free, the sender may store the next chunk."""
        self._granted = int(self._words(self.rank).sent[move.source_rank]) + 1
        self._words(move.source_rank).grant[self.rank] = self._granted

    def send(self, move: Move, start: int) -> None:
        """At the sender: once granted, store bytes from `start` on in the receiver's staging area and raise `sent`."""
        target = self._words(move.target_rank)
        number = int(target.sent[self.rank]) + 1
        self._wait(self._words(self.rank).grant, move.target_rank, number)
        self._load(move.source_slot, start, self._chunk(move.target_rank, start))
        target.sent[self.rank] = number

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
        """Signal to all ranks that this one has all its experts."""
        if self.context.host_transport is not None:
            return
        number = int(self._words(self.rank).done[self.rank]) + 1
        for peer in range(self.context.world_size):
            self._words(peer).done[self.rank] = number

    def wait_done(self) -> None:
        """Wait until all ranks have called `announce_done`."""
        if self.context.host_transport is not None:
            self._carry({})
            return
        done = self._words(self.rank).done
        number = int(done[self.rank])
        for peer in range(self.context.world_size):
            self._wait(done, peer, number)

    def _carry(self, parcels: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        assert self.context.host_transport is not None
        epoch = int(self.context.epoch[0])
        return self.context.host_transport.carry_bytes(
            self.context, phase=Phase.REPLACEMENT, epoch=epoch, num_bytes=self.num_bytes, parcels=parcels
        )

    def _pieces(self, slot: int, start: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """Views that together are the `num_bytes` bytes from `start` on of the expert in `slot`."""
        end = start + num_bytes
        if slot == SPARE:
            yield self._spare[start:end]
            return
        first = 0
        for rows in self._rows:
            last = first + rows.shape[1]
            if start < last and end > first:
                yield rows[slot, max(start - first, 0) : end - first]
            first = last

    def _load(self, slot: int, start: int, out: torch.Tensor) -> None:
        for piece in self._pieces(slot, start, out.shape[0]):
            out[: piece.shape[0]].copy_(piece)
            out = out[piece.shape[0] :]

    def _store(self, slot: int, start: int, source: torch.Tensor) -> None:
        for piece in self._pieces(slot, start, source.shape[0]):
            piece.copy_(source[: piece.shape[0]])
            source = source[piece.shape[0] :]

    def _chunk(self, rank: int, start: int) -> torch.Tensor:
        """The chunk of bytes from `start` on, in the staging area of `rank`."""
        first = staging_words_bytes(self.context.world_size)
        num_bytes = min(self.chunk_bytes, self.num_bytes - start)
        return self.context.heap.peer_tensor("staging", rank)[first : first + num_bytes]

    def _words(self, rank: int) -> _Words:
        world = self.context.world_size
        words = self.context.heap.peer_tensor("staging", rank)[: STAGING_WORDS * world * 4].view(torch.int32)
        return _Words(*words.view(STAGING_WORDS, world))

    def _wait(self, words: torch.Tensor, peer: int, number: int) -> None:
        """Wait until the word of `peer` has reached `number`; raises what fails meanwhile, here or on a peer."""
        context = self.context
        deadline = time.monotonic() + context.timeout_s
        spins = 0
        while int(words[peer]) < number:
            context.check_peers()
            self._answer()
            if time.monotonic() > deadline:
                about = self._missing(peer)
                limit_ms = min(int(context.timeout_s * 1000), 2**31 - 1)
                record_failure(context, ErrorCode.TIMEOUT, about, Phase.REPLACEMENT, int(context.epoch[0]), limit_ms)
                context.check_peers()
            spins += 1
            time.sleep(0 if spins < SPINS_BEFORE_SLEEP else 2e-4)

    def _answer(self) -> None:
        """Answer the ranks that ask whether this one is alive."""
        # A list: `nonzero` fails when a word changes while it runs.
        for rank, asked in enumerate(self._words(self.rank).asked.tolist()):
            if asked:
                self._words(rank).here[self.rank] = 1

    def _missing(self, peer: int) -> int:
        """The rank to blame for a silent `peer`: one that does not answer, for which `peer` may wait, or `peer`."""
        for rank in range(self.context.world_size):
            self._words(rank).asked[self.rank] = 1
        deadline = time.monotonic() + min(ROLL_CALL_S, self.context.timeout_s)
        absent = [peer]
        while absent and time.monotonic() <= deadline:
            self.context.check_peers()
            self._answer()
            absent = (self._words(self.rank).here == 0).nonzero()[:, 0].tolist()
            time.sleep(2e-4)
        return peer if peer in absent or not absent else absent[0]


def move_experts(movers: Sequence[ExpertMover], moves: Sequence[Move]) -> None:
    """Make the moves on the ranks of this process: one, or all virtual ones. Collective.

    All ranks have experts of one layout. When it returns, each rank has the experts of its new placement. A rank makes
    its moves in the order of `moves` and skips those of others, so the first unfinished move can always go on.
    """
    for move in moves:
        source = [mover for mover in movers if mover.rank == move.source_rank]
        target = [mover for mover in movers if mover.rank == move.target_rank]
        if move.source_rank == move.target_rank:
            for mover in target:
                mover.copy(move)
        elif movers[0].context.host_transport is not None:
            for mover in movers:
                mover.carry(move)
        else:
            for start in range(0, movers[0].num_bytes, movers[0].chunk_bytes):
                for mover in target:
                    mover.grant(move)
                for mover in source:
                    mover.send(move, start)
                for mover in target:
                    mover.take(move, start)
    for mover in movers:
        mover.announce_done()
    for mover in movers:
        mover.wait_done()
