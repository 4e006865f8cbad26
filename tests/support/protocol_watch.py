"""A rank under watch: the rules of the exchange, asserted at every store and phase, with delays wherever asked for.

What a half of a region must look like is known at all times. Its reader fills it with POISON as soon as it is done with
it; from the moment that all has arrived until then nobody may write there, and what no token was sent to stays POISON.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import torch

from moe_runtime.comm.signals import count_tag_of, tag_of
from moe_runtime.dispatcher.handle import DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.reference import owners_of

POISON = 0xCD
POINTS = (
    *("before combine_send", "after combine_send", "before combine_recv", "after combine_recv", "combine"),
    *("combine_flag", "before dispatch_send", "after dispatch_send", "before dispatch_recv", "after dispatch_recv"),
    *("ready", "landing", "token_flags", "token_count", "dispatch_flag"),
)
"""Where a rank may be slow: around each phase, and before the first of each kind of store within."""
POINTS_OF_ROUND = 6
SLOW_S = 0.03
HOLD_S = 0.25


@dataclass
class Delays:
    """A rank is slow at each of POINTS in turn, POINTS_OF_ROUND of them in a round of two epochs; a seed says which."""

    seed: int
    rank: int
    world: int

    def here(self, number: int, point: str) -> bool:
        turn = number * POINTS_OF_ROUND % len(POINTS)
        slow = (POINTS * 2)[turn : turn + POINTS_OF_ROUND]
        return point in slow and random.Random(f"{self.seed}/{number}/{point}").randrange(self.world) == self.rank


@dataclass
class Watch:
    """Rules of one rank's steps; its methods are the hooks of `tests.support.protocol_hooks.hooked`.

    Attributes:
        delays: where to be slow; None is nowhere.
        epoch: that of the last dispatch; `combining` that of the last combine.
        sent: by half, ids `[T, K]` of this rank's tokens in the last epoch that used it.
        arrived: by half, a copy of records and token flags from their arrival until this rank is done with them.
        done: by half, the last epoch that this rank is done with.
        delayed: (round, point) where it has been slow.
    """

    dispatcher: TokenDispatcher
    delays: Delays | None
    epoch: int = 0
    combining: int = 0
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    arrived: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=lambda: {0: 0, 1: -1})
    delayed: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.context, self.geometry = self.dispatcher.context, self.dispatcher.geometry
        self.world, self.rank = self.context.world_size, self.context.rank
        self.layout = self.context.signals_layout
        for half in (0, 1):
            for memory in (*self.landing(half), self.partials(half)):
                memory.fill_(POISON)

    def landing(self, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Records and token flags of one half of this rank's memory, as bytes by slot."""
        slots, size = self.geometry.num_slots, self.geometry.record.record_bytes
        at = half * self.geometry.landing_half(self.context.half_bytes["landing"])
        records = self.context.heap.tensor("landing")[at : at + slots * size].view(slots, size)
        return records, self.token_flags(self.rank, half)

    def token_flags(self, peer: int, half: int) -> torch.Tensor:
        at, slots = half * self.context.half_bytes["token_flags"], self.geometry.num_slots
        return self.context.heap.peer_tensor("token_flags", peer)[at : at + 4 * slots].view(slots, 4)

    def partials(self, half: int) -> torch.Tensor:
        geometry, at = self.geometry, half * self.context.half_bytes["combine"]
        size = geometry.max_tokens * geometry.parts * geometry.partial_bytes
        region = self.context.heap.tensor("combine")[at : at + size]
        return region.view(geometry.max_tokens, geometry.parts, geometry.partial_bytes)

    def counted(self, half: int) -> int:
        """What tells of the number of tokens that this rank sends."""
        return self.sent[half].shape[0] + tag_of(count_tag_of(self.dispatcher.exchange_id), self.epoch)

    def word(self, peer: int, at: int) -> int:
        return int(self.context.heap.peer_tensor("signals", peer).view(torch.int32)[at])

    # --- steps, as the test calls them

    def send(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> DispatchHandle:
        self.sent[(self.epoch + 1) & 1] = topk_idx
        handle = self.dispatcher.dispatch_send(x, topk_idx, topk_weights)
        assert int(handle.epoch) == int(self.context.epoch) == self.epoch, "epochs count dispatches"
        return handle

    def combine_send(self, output: torch.Tensor, arrived: DispatchedTokens) -> None:
        self.combining = int(arrived.handle.epoch)
        self.dispatcher.combine_send(output, arrived.handle)

    def combine_recv(self, arrived: DispatchedTokens) -> torch.Tensor:
        self.combining = int(arrived.handle.epoch)
        y = self.dispatcher.combine_recv(arrived.handle)
        partials, parts = self.partials(self.combining & 1), arrived.handle.num_parts
        for token in range(self.geometry.max_tokens):
            unused = partials[token, int(parts[token]) if token < parts.shape[0] else 0 :]
            assert bool((unused == POISON).all()), f"a partial result of token {token} that nobody has to send"
        partials.fill_(POISON)
        return y

    def has_arrived(self, handle: DispatchHandle) -> DispatchedTokens:
        arrived = self.dispatcher.dispatch_recv(handle)
        half = int(handle.epoch) & 1
        records, token_flags = self.landing(half)
        fresh = (handle.positions >= 0).any(dim=1)
        assert bool((records[~fresh] == POISON).all() and (token_flags[~fresh] == POISON).all()), (
            "a slot no token goes to"
        )
        self.arrived[half] = (records.clone(), token_flags.clone())
        return arrived

    def hold(self) -> None:
        """Be done with nothing until all others have entered the next epoch, and for a while after that."""
        ready = [self.layout.ready + peer for peer in range(self.world) if peer != self.rank]
        deadline = time.monotonic() + 100
        while any(self.word(self.rank, at) <= self.epoch for at in ready):
            assert time.monotonic() < deadline, "who has what it waits for goes on"
            time.sleep(1e-3)
        time.sleep(HOLD_S)

    # --- hooks

    def on_phase(self, phase: str, ended: bool) -> None:
        if phase == "dispatch_send" and not ended:
            self.epoch += 1
            half = self.epoch & 1
            self.finish(half)
            assert bool((self.partials(half) == POISON).all()), "a partial result before this rank has sent its tokens"
        self.check_unentered()
        self.delay(f"{'after' if ended else 'before'} {phase}")

    def on_store(self, name: str, peer: int, half: int, value: int) -> None:
        """Assert that the store is this rank's to make, and now."""
        world, rank, layout = self.world, self.rank, self.layout
        self.delay(name)
        if name in ("landing", "token_flags", "token_count", "dispatch_flag"):
            assert half == self.epoch & 1
        elif name in ("combine", "combine_flag"):
            assert half == self.combining & 1
        if name == "ready":
            assert (value, self.word(peer, layout.ready + rank)) == (self.epoch, self.epoch - 1)
        elif name == "token_count":
            assert value == self.counted(half)
        elif name == "dispatch_flag":
            flag, count = (at + half * world + rank for at in (layout.dispatch_flag, layout.token_count))
            assert value == self.epoch and self.word(peer, flag) == max(0, value - 2), "flags advance by two"
            assert self.word(peer, count) == self.counted(half), "the count is there before the flag"
            starts = torch.tensor(self.geometry.starts)
            goes = (owners_of(self.sent[half].long(), starts) == peer).any(dim=1).nonzero().flatten()
            token_flags = (
                self.token_flags(peer, half)[rank * self.geometry.max_tokens + goes].contiguous().view(torch.int32)
            )
            assert bool((token_flags == value).all()), "all records have landed before the flag"
        elif name == "combine_flag":
            before = self.word(peer, layout.combine_flag + half * world + rank)
            assert value == self.combining and before in (0, *range(value - 2, 0, -2)), "flags advance by twos"
            self.finish(half)
        else:
            assert name in ("landing", "token_flags", "combine"), f"a store to {name} of rank {peer}"

    def finish(self, half: int) -> None:
        """This rank reads a half no more: it is as it was when all had arrived, and poisoned now."""
        before = self.arrived.pop(half, None)
        if before is not None:
            for now, then in zip(self.landing(half), before, strict=True):
                assert torch.equal(now, then), "written before its reader was done with it"
                now.fill_(POISON)
            self.done[half] += 2

    def check_unentered(self) -> None:
        """A rank that has not entered an epoch has written nothing of it."""
        for half in (0, 1):
            if half in self.arrived:
                continue
            for source in range(self.world):
                slots = slice(source * self.geometry.max_tokens, (source + 1) * self.geometry.max_tokens)
                copies = [memory[slots].clone() for memory in self.landing(half)]
                if self.word(self.rank, self.layout.ready + source) < self.done[half] + 2:
                    assert all(bool((copy == POISON).all()) for copy in copies), f"rank {source} wrote before its turn"

    def delay(self, point: str) -> None:
        where = (max(0, self.epoch - 1) // 2, point)
        if self.delays is not None and self.delays.here(*where) and where not in self.delayed:
            self.delayed.add(where)
            time.sleep(SLOW_S)
