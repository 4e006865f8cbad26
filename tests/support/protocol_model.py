"""The protocol of dispatch and combine as a small machine: what each rank stores, waits for and reads, in which order.

`explore` takes every interleaving of the ranks' actions, breadth first, and finds the shortest one in which a rank
reads what it must not, or in which nobody can go on. Actions are those of `kernels/exchange/reference.py`
(`dispatch_send`, `dispatch_recv`, `combine_send`, `combine_recv`), which the kernels share;
`tests/protocol/test_protocol_model.py` holds both to them.

What is left out: timeouts and aborts, and stores seen in another order than they were made. All records of a rank, or
all of its partial results, are stored at once: no one may look at them before a flag that comes later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.exploration import Finding, Violation, search

Cell = tuple[str, int, int, int]
"""`(field, whose memory, half, who writes it)`; 0 is the half of `ready`."""


@dataclass(frozen=True)
class Action:
    """One step of a rank: `store` of `epoch` to all `cells`; `read` of cells that must hold `epoch`; or `await`, until
    of each entry of `awaited` one cell holds at least the epoch beside it."""

    kind: str
    epoch: int
    cells: tuple[Cell, ...] = ()
    awaited: tuple[tuple[tuple[Cell, int], ...], ...] = ()


@dataclass(frozen=True)
class Rules:
    """The protocol, and what may be wrong with it.

    Attributes:
        await_ready: a sender waits until a half may be written.
        await_empty: also one without tokens, that only tells so.
        by_ready, by_combined: of two signs of that: the reader has entered this epoch; it has combined the one before
            that used the half.
        halves: of each region.
        flag_last: the flag comes after what it stands for.
    """

    await_ready: bool = True
    await_empty: bool = True
    by_ready: bool = True
    by_combined: bool = True
    halves: int = 2
    flag_last: bool = True


RIGHT = Rules()


@dataclass(frozen=True)
class Program:
    """What rank `rank` of `world` does; `tokens` says which ranks have any to send."""

    rank: int
    world: int
    tokens: tuple[bool, ...]
    rules: Rules = RIGHT

    def actions(self, script: str) -> list[Action]:
        """Of a script such as `s1 w1 c1 s2 w2 u1`: send, wait for arrivals, combine, use rows where they landed."""
        parts = {"s": self.dispatch_send, "w": self.arrive, "u": self.use, "c": self.combine}
        return [action for word in script.split() for action in parts[word[0]](int(word[1:]))]

    def dispatch_send(self, epoch: int) -> list[Action]:
        rules, half = self.rules, self._half(epoch)
        actions = [Action("store", epoch, (("ready", peer, 0, self.rank),)) for peer in range(self.world)]
        if rules.await_ready and (rules.await_empty or self.tokens[self.rank]):
            signs = []
            for peer in range(self.world):
                ready = [(("ready", self.rank, 0, peer), epoch)] * rules.by_ready
                signs.append((*ready, *[(("combine_flag", self.rank, half, peer), epoch - 2)] * rules.by_combined))
            actions.append(Action("await", epoch, awaited=tuple(signs)))
        records = self._to_all("records", half) if self.tokens[self.rank] else ()
        flags = []
        for peer in range(self.world):
            flags.append(Action("store", epoch, (("token_count", peer, half, self.rank),)))
            flags.append(Action("store", epoch, (("dispatch_flag", peer, half, self.rank),)))
        stores = [Action("store", epoch, records)] * bool(records)
        return actions + (stores + flags if rules.flag_last else flags + stores)

    def arrive(self, epoch: int) -> list[Action]:
        counts = Action("read", epoch, self._from("token_count", epoch, range(self.world)))
        return [self._await_all("dispatch_flag", epoch), counts, *self.use(epoch)]

    def use(self, epoch: int) -> list[Action]:
        senders = [peer for peer in range(self.world) if self.tokens[peer]]
        return [Action("read", epoch, self._from("records", epoch, senders))]

    def combine(self, epoch: int) -> list[Action]:
        half = self._half(epoch)
        homes = tuple(cell for cell in self._to_all("partials", half) if self.tokens[cell[1]])
        partials = [Action("store", epoch, homes)] * bool(homes)
        flags = [Action("store", epoch, (cell,)) for cell in self._to_all("combine_flag", half)]
        came = self._from("partials", epoch, range(self.world)) if self.tokens[self.rank] else ()
        stores = partials + flags if self.rules.flag_last else flags + partials
        home = [self._await_all("combine_flag", epoch), Action("read", epoch, came)]
        return [*self.use(epoch), *stores, *home]

    def _half(self, epoch: int) -> int:
        return epoch % self.rules.halves

    def _to_all(self, field: str, half: int) -> tuple[Cell, ...]:
        return tuple((field, peer, half, self.rank) for peer in range(self.world))

    def _from(self, field: str, epoch: int, peers: range | list[int]) -> tuple[Cell, ...]:
        return tuple((field, self.rank, self._half(epoch), peer) for peer in peers)

    def _await_all(self, field: str, epoch: int) -> Action:
        cells = self._from(field, epoch, range(self.world))
        return Action("await", epoch, awaited=tuple(((cell, epoch),) for cell in cells))


def explore(scripts: list[str], rules: Rules = RIGHT, tokens: tuple[bool, ...] | None = None) -> Finding:
    """Every interleaving of ranks that follow `scripts`, one each. Words begin at 0, which is no epoch."""
    world = len(scripts)
    having = tokens or (True,) * world
    programs = [Program(rank, world, having, rules).actions(script) for rank, script in enumerate(scripts)]
    start = (0,) * world
    # Each cell has one writer, so how far the ranks are says what is in all of memory.
    memory: dict[tuple[int, ...], dict[Cell, int]] = {start: {}}

    def moves(state: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        cells = memory.pop(state)
        for rank, at in enumerate(state):
            if at == len(programs[rank]):
                continue
            action = programs[rank][at]
            if action.kind == "await" and not all(
                any(cells.get(cell, 0) >= least for cell, least in either) for either in action.awaited
            ):
                continue
            if action.kind == "read":
                for cell in action.cells:
                    if cells.get(cell, 0) != action.epoch:
                        what = f"rank {rank} reads {cell} of epoch {cells.get(cell, 0)} in epoch {action.epoch}"
                        raise Violation(what, rank)
            after = (*state[:rank], at + 1, *state[rank + 1 :])
            # All ways to a state come before its own turns.
            if after not in memory:
                stored = dict.fromkeys(action.cells, action.epoch) if action.kind == "store" else {}
                memory[after] = {**cells, **stored} if stored else cells
            yield rank, after

    def check_end(state: tuple[int, ...]) -> None:
        if any(at < len(program) for at, program in zip(state, programs, strict=True)):
            raise Violation("deadlock")

    return search(start, moves, check_end)
