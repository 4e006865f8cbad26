"""The exchange of few tokens as a small machine: each token has a flag, memory is weak, and ranks fail.

`protocol_model` has the two halves and their flags, where nothing fails and stores are seen in their order. Here is
what the CUDA kernels do where each token is awaited by itself (`dispatch_send.cu` and `dispatch_recv.cu` with
PER_TOKEN_FLAGS), and what all engines do when a rank fails (`signalling.cuh`). `explore` takes every interleaving of
the ranks' kernels, every order in which their stores may be seen and every point at which a rank may fail or die.

**A token's way** from a rank to a peer in epoch `e`, in memory of the peer that epochs `e - 2` and `e + 2` use, too:

1. The rank stores `ready`: it has entered `e`, so that peers may write over what it has of `e - 2`. It waits until
   all of them have entered `e`, too, or have combined `e - 2`.
2. It stores `count`, the number of its tokens, in no order with what follows. That word also says whose turn of the
   half it is (a bit that changes from `e - 2` to `e`, and is the same in `e - 4`), and has a sign if token flags can be
   relied on.
3. It stores the token's `ids` and `row`, or, to peers that it does not go to, its `ids` alone; behind a fence after
   them the token's `token_flag`, which is `e`.
4. When all that is done it raises `flag`, by a release.

The peer looks at each slot by itself. It may read what lies there once `flag` is `e`. It may as well once `flag` is
`e - 2` at least, `count` is of this turn and has a sign, and the slot either lies behind that number of tokens or has
token flag `e`.

**A failure** takes the rank's latch, is written to `abort` of all peers, by releases, and then to the second word of
the latch. From then on the rank waits for nothing and sends nothing, but goes on raising flags, with nothing behind
them, so that nobody waits for it. Before its next flag it waits until all abort messages have been sent, since another
kernel of its own may still be sending them. A peer looks for failures after it has seen flags. It adopts the first that
it sees and forwards it: the sender may not have informed others yet, and they are about to see its own flags. `abort`
names who failed first.

**What stands for what.** Turns are named after what they stand for; those that are made at once (`Machine.settled`)
are not among the turns of a `Finding`:

    enters            dispatch_send.cu: from the start to `launch_dependents`
    stores the count  dispatch_send.cu: `failed_or_ready` of block 0, with `await_free` of signalling.cuh, TOKEN_COUNT
    sends token       dispatch_send.cu: the loop over tokens and, after `bulk_await` and `fence_system`, their flags
    holds back        dispatch_send.cu: `failed_or_ready` where it returns true, with `await_abort_sent`; the last block
    raises its flags  dispatch_send.cu: the block that is `last_to_arrive`, with DISPATCH_FLAG
    finds (a slot)    arrival.cuh: `await_slots`, the `Glance` behind it and `each_expert`; of ranks without
                      token flags `await_tokens` and `recv_count`, or `dispatch_recv` of reference.py
    reads all         dispatch_recv.cu: the rest of `recv_permute`, with `check_sources`
    uses rows         a GEMM that gathers rows where they landed
    sends partial     combine.cu: `combine_send`, with COMBINE_FLAG
    finds (a peer's)  combine.cu: `combine_recv` and its `await_while`, with the `Glance` after the flags
    sums partial      combine.cu: the rest of `combine_recv`
    fails             `record_failure`: what a rank finds wrong itself, in whatever it waits for or sends
    waits too long    `too_late`, where a rank is dead
    learns            `adopt_aborts`, and `record_failure_of` to all others

**Memory.** What a rank has stored is under way until someone reads it; `Store` has what is then seen, too. That is
all that a weak memory can do: what comes of a run is what its reads have given, and nothing has to be seen by a time.
So what must be of this epoch is read safely if memory shows that, and nothing else is under way to there. A rank's
own loads are in the order of its program, as acquires and branches make them; `ready` and `combined` at the start of
`dispatch_send` are loaded without an acquire, and the stores behind them taken to wait for the branch, as they do on
any GPU.

Each rank's blocks are one, but for this: after a failure those that have not noticed go on with tokens of their own;
and a slot is read as soon as it is found, whatever has become of others.

**What is left out**: what a rank sends to itself, which goes the same way; parts of tokens and flags of
partial results (PROGRESS, PARTIAL_FLAGS); hosts that give up; epochs that wrap; several failures of a rank, of which
the latch takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tests.support.exploration import Finding, Violation, search

Cell = tuple[str, int, int, int, int]
"""`(field, whose memory, who writes it, half, token)`; 0 where there is but one half or token."""
NOWHERE = -1
FOREIGN = 100
"""What `count` has beside the epoch where the tokens are for another exchange."""


class Store(NamedTuple):
    """A store under way: with it all is seen that went to `after` before, or was stored by kernels up to `upto`.

    What went to the same cell before always is.
    """

    cell: int
    value: int
    kernel: int
    after: tuple[int, ...] = ()
    upto: int = NOWHERE


class UnderWay:
    """What a rank has stored and nobody has seen, oldest first. Made by `Machine.queue` alone: equal ones are one."""

    def __init__(self, stores: tuple[Store, ...]) -> None:
        self.stores = stores
        self.to_cell: dict[int, list[int]] = {}
        for number, store in enumerate(stores):
            self.to_cell.setdefault(store.cell, []).append(number)
        self.shown: dict[int, tuple[list[Store], UnderWay]] = {}

    def before(self, number: int) -> set[int]:
        """Numbers of the stores that are seen no later than one of them, itself included."""
        found, left = set(), [number]
        while left:
            at = left.pop()
            if at not in found:
                found.add(at)
                left += [other for other in range(at) if self._comes_before(self.stores[other], self.stores[at])]
        return found

    @staticmethod
    def _comes_before(other: Store, store: Store) -> bool:
        return other.cell == store.cell or other.cell in store.after or other.kernel <= store.upto


class Rank(NamedTuple):
    """How far a rank is.

    Attributes:
        kernel: number of the first of its kernels that has not ended, and `step` what that does next.
        beside: what the kernel behind it does next, where that runs already; else -1.
        seen: bits of what the one of them that waits has found to be there.
        wrong: what that has taken for something of this epoch.
        good: bits of the epochs of which all has arrived.
        failure: 0, or 1 + the rank that failed first, as far as this one knows.
        unnoticed: some blocks of the kernel that runs may not have noticed that.
        dead: it does nothing any more; what it has under way may be seen or not.
    """

    kernel: int = 0
    step: int = 0
    beside: int = -1
    seen: int = 0
    wrong: str = ""
    good: int = 0
    failure: int = 0
    unnoticed: bool = False
    dead: bool = False


class State(NamedTuple):
    """All ranks, what memory shows, what each rank has under way, and how much may still go wrong."""

    ranks: tuple[Rank, ...]
    memory: bytes
    under_way: tuple[UnderWay, ...]
    may_fail: bool
    may_die: bool


class TokenStores(NamedTuple):
    records: list[Store]
    token_flags: list[Store]


class SendStores(NamedTuple):
    ready: list[Store]
    counts: list[Store]
    tokens: list[TokenStores]
    flags: list[Store]


class Wait(NamedTuple):
    """What memory may show once something has been found, and what is read then."""

    found: Callable[[State], Iterator[State]]
    cells: list[int]


class At(NamedTuple):
    """Whose turn it is: a kernel of a rank, in an epoch."""

    rank: int
    kernel: int
    epoch: int


@dataclass(frozen=True)
class Rules:
    """The protocol, and what may be wrong with it.

    Attributes:
        recent: `count` is looked at only once the flag of the epoch before has been seen.
        turn: it has to be of this turn of its half.
        sign: it has to say that token flags can be relied on.
        epoch_of_token_flag: a token flag has to be of this epoch, and not of any.
        token_flag_last, flag_last, combined_last: what tells of something is seen after it.
        ids_everywhere: peers that a token does not go to get its expert ids.
        ready_in_time: a rank says that it has entered an epoch once it has, and not one before.
        await_everyone: a rank waits until it may write to all, not only to where its tokens go.
        count_waits: `count`, too, is stored after that wait.
        failed_without_count: a rank that has failed does not store it.
        failed_without_token_flags: nor the token flags of tokens that it holds back.
        check_sources: tokens for another exchange are a failure.
        clock: nobody waits longer than for a time.
        send_aborts: a rank that fails sends an abort message to all others.
        forward_aborts: whoever learns of a failure forwards it to the others.
        name_first: and names the rank that has failed first.
        look_for_failures: after flags have been seen.
        await_abort_sent: a rank that holds something back waits until all of its abort messages have been sent.
        abort_sent_last: the second word of the latch comes after those messages.
        stale_waits: `await_abort_sent` also in `combine_send` where a handle is used too late.
    """

    recent: bool = True
    turn: bool = True
    sign: bool = True
    epoch_of_token_flag: bool = True
    token_flag_last: bool = True
    flag_last: bool = True
    combined_last: bool = True
    ids_everywhere: bool = True
    ready_in_time: bool = True
    await_everyone: bool = True
    count_waits: bool = True
    failed_without_count: bool = True
    failed_without_token_flags: bool = True
    check_sources: bool = True
    clock: bool = True
    send_aborts: bool = True
    forward_aborts: bool = True
    name_first: bool = True
    look_for_failures: bool = True
    await_abort_sent: bool = True
    abort_sent_last: bool = True
    stale_waits: bool = True


RIGHT = Rules()
LOOKING, READING, DONE = 0, 1, 99
"""Steps of kernels that wait. Others begin with 0, and all end with `DONE`."""
ENTER, AWAIT, TOKENS, WITHOUT_COUNT = 0, 1, 2, 98
"""Steps of `send`; from `TOKENS` on one for each token, and one more. `WITHOUT_COUNT` is that of blocks other than the
first, which has failed, instead of `AWAIT`."""
Moves = Iterator[tuple[str, State]]


class Machine:
    """What each rank does, and how that changes a state.

    Args:
        scripts: of each rank, such as `s1 w1 c1 s2 w2 u2`: send, wait for arrivals, combine, use rows in place.
        tokens: of each rank, a word for each epoch, repeated: a letter for each token, `a` for one that goes to all
            peers, `n` to none, a digit to that rank; or `.` for no token.
        per_token_flags: ranks that store token flags last. Others store them first, and wait for flags alone.
        fails: ranks and epochs in which one of them may fail by itself, beside what follows from that.
        dies: the same, of a rank that does nothing more from some point on.
        foreign: ranks and epochs in which their tokens are for another exchange.
    """

    def __init__(
        self,
        scripts: list[str],
        tokens: list[str],
        rules: Rules = RIGHT,
        *,
        per_token_flags: tuple[bool, ...] = (),
        fails: tuple[tuple[int, int], ...] = (),
        dies: tuple[tuple[int, int], ...] = (),
        foreign: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.world, self.rules, self.foreign = len(scripts), rules, foreign
        self.tokens = [["" if word == "." else word for word in words.split()] for words in tokens]
        self.slots = max(1, *(len(word) for words in self.tokens for word in words))
        self.per_token_flags = per_token_flags or (True,) * self.world
        kernels = {"s": ("send",), "w": ("arrive",), "c": ("combine", "home"), "u": ("use",)}
        self.programs = [[(kind, int(w[1:])) for w in s.split() for kind in kernels[w[0]]] for s in scripts]
        self.may_fail, self.may_die = (self._kernels(which) for which in (fails, dies))
        self.kinds = {kind: getattr(self, f"_{kind}") for kind in ("send", "arrive", "combine", "home", "use")}
        halved = [(f, h, 0) for f in ("count", "flag", "partial", "combined") for h in (0, 1)]
        of_slots = [(f, h, t) for f in ("ids", "row", "token_flag") for h in (0, 1) for t in range(self.slots)]
        everyone, fields = range(self.world), [("ready", 0, 0), ("abort", 0, 0), *halved, *of_slots]
        self.cells = [(f, o, w, h, t) for f, h, t in fields for o in everyone for w in everyone if o != w]
        self.number = {cell: number for number, cell in enumerate(self.cells)}
        self.aborts = [[self.cell("abort", rank, peer) for peer in self.others(rank)] for rank in everyone]
        self.quiet = not (fails or dies or foreign)
        self.at_once: dict[tuple[int, Rank, UnderWay], tuple[Rank, UnderWay] | None] = {}
        self.sends: dict[At, SendStores] = {}
        self.waits: dict[At, list[Wait]] = {}
        self.queues: dict[tuple[Store, ...], UnderWay] = {}
        nothing = (self.queue(()),) * self.world
        self.start = State((Rank(),) * self.world, bytes(len(self.cells)), nothing, bool(fails), bool(dies))
        for rank in everyone:
            self.start = self.settled(self.start, rank)

    def _kernels(self, which: tuple[tuple[int, int], ...]) -> list[set[int]]:
        """Of each rank, the numbers of its kernels in those epochs."""
        return [
            {kernel for kernel, (_, epoch) in enumerate(program) if (rank, epoch) in which}
            for rank, program in enumerate(self.programs)
        ]

    # --- what ranks bring

    def sent(self, rank: int, epoch: int) -> str:
        """A letter for each token."""
        words = self.tokens[rank]
        return words[(epoch - 1) % len(words)] if epoch else ""

    def goes(self, rank: int, epoch: int, token: int, peer: int) -> bool:
        return self.sent(rank, epoch)[token] in ("a", str(peer))

    def goes_any(self, rank: int, epoch: int, peer: int) -> bool:
        return any(self.goes(rank, epoch, token, peer) for token in range(len(self.sent(rank, epoch))))

    def is_stale(self, at: At) -> bool:
        """Whether the half of its epoch has been given to a later one; `is_stale` of signalling.cuh."""
        return ("send", at.epoch + 2) in self.programs[at.rank][: at.kernel]

    def others(self, rank: int) -> list[int]:
        return [peer for peer in range(self.world) if peer != rank]

    # --- memory

    def cell(self, field: str, owner: int, writer: int, epoch: int = 0, token: int = 0) -> int:
        return self.number[field, owner, writer, epoch & 1, token]

    def queue(self, stores: tuple[Store, ...]) -> UnderWay:
        if stores not in self.queues:
            self.queues[stores] = UnderWay(stores)
        return self.queues[stores]

    def store(self, state: State, rank: int, stores: list[Store]) -> State:
        queue = self.queue((*state.under_way[rank].stores, *stores))
        under_way = replaced(state.under_way, rank, queue)
        return State(state.ranks, state.memory, under_way, state.may_fail, state.may_die)

    def show(self, state: State, writer: int, number: int) -> State:
        """Store `number` of those that `writer` has under way is seen, with all that comes before it."""
        queue = state.under_way[writer]
        if number not in queue.shown:
            seen = queue.before(number)
            rest = tuple(store for at, store in enumerate(queue.stores) if at not in seen)
            queue.shown[number] = [queue.stores[at] for at in sorted(seen)], self.queue(rest)
        stores, left = queue.shown[number]
        memory = bytearray(state.memory)
        for store in stores:
            memory[store.cell] = store.value
        under_way = replaced(state.under_way, writer, left)
        return State(state.ranks, bytes(memory), under_way, state.may_fail, state.may_die)

    def sights(self, state: State, cell: int) -> Iterator[tuple[int, State]]:
        """What a read of `cell` may give, and what memory shows then."""
        yield state.memory[cell], state
        writer = self.cells[cell][2]
        queue = state.under_way[writer]
        for number in queue.to_cell.get(cell, ()):
            yield queue.stores[number].value, self.show(state, writer, number)

    def see(self, state: State, cell: int, least: int) -> State | None:
        """What memory shows once `cell` has been seen to be `least` or more; None where that cannot be."""
        if state.memory[cell] >= least:
            return state
        writer = self.cells[cell][2]
        queue = state.under_way[writer]
        for number in queue.to_cell.get(cell, ()):
            if queue.stores[number].value >= least:
                return self.show(state, writer, number)
        return None

    def taken(self, state: State, at: At, cells: list[int]) -> Iterator[tuple[str, State]]:
        """What reads of cells that should be of this epoch may give: nothing wrong, or what is."""
        if not cells:
            yield "", state
            return
        for value, shown in self.sights(state, cells[0]):
            if value % FOREIGN != at.epoch:
                field, _, writer, _, _ = self.cells[cells[0]]
                yield f"rank {at.rank} takes {field} of epoch {value} from rank {writer} in {at.epoch}", shown
            else:
                yield from self.taken(shown, at, cells[1:])

    def check(self, state: State, at: At, cells: list[int]) -> None:
        """Reads behind which nobody looks for failures."""
        for wrong, _ in self.taken(state, at, cells):
            if wrong:
                raise Violation(wrong)

    # --- ranks

    def go(self, state: State, at: At, step: int, **changes: Any) -> State:
        """The kernel does `step` next; `DONE` is its end, if that of the kernel before has come."""
        program, own = self.programs[at.rank], state.ranks[at.rank]
        own = own._replace(**{"step" if at.kernel == own.kernel else "beside": step, **changes})
        if own.step == DONE:
            following = own.beside if own.beside != DONE else 0
            kernel = own.kernel + 1 + (own.beside == DONE)
            own = own._replace(kernel=kernel, step=max(0, following), beside=-1, unnoticed=False)
            # Tokens are combined by two kernels, the second beside the first.
            if own.step == 0 and program[own.kernel :] and program[own.kernel][0] == "combine":
                own = own._replace(beside=0)
        ranks = replaced(state.ranks, at.rank, own)
        return State(ranks, state.memory, state.under_way, state.may_fail, state.may_die)

    def fail(self, state: State, at: At, first: int) -> State:
        """The rank has failed, since rank `first` has: `record_failure_of`."""
        own = state.ranks[at.rank]
        own = own._replace(failure=1 + first, unnoticed=self.programs[at.rank][own.kernel][0] == "send")
        ranks = replaced(state.ranks, at.rank, own)
        if ranks[first].failure != 1 + first:
            raise Violation(f"rank {at.rank} says that rank {first} failed first")
        named = first if self.rules.name_first else at.rank
        sends = self.rules.send_aborts if first == at.rank else self.rules.forward_aborts
        cells = [self.cell("abort", peer, at.rank) for peer in self.others(at.rank) if sends]
        return self.store(state._replace(ranks=ranks), at.rank, [Store(cell, 1 + named, at.kernel) for cell in cells])

    def adopted(self, state: State, at: At) -> Moves:
        """A failure of which a peer has told: `adopt_aborts`."""
        if not any(own.failure for own in state.ranks):
            return
        for peer in self.others(at.rank):
            for value, shown in self.sights(state, self.cell("abort", at.rank, peer)):
                if value:
                    yield f"learns from rank {peer} of a failure", self.fail(shown, at, value - 1)

    def own_failures(self, state: State, at: At, waits: bool) -> Moves:
        """Its own: its clock runs out, or it has found something wrong."""
        if state.may_fail and at.kernel in self.may_fail[at.rank]:
            yield "fails", self.fail(state._replace(may_fail=False), at, at.rank)
        elif waits and self.rules.clock and any(rank.dead for rank in state.ranks):
            yield "has waited for too long", self.fail(state, at, at.rank)

    def informed(self, at: At) -> int:
        """The last kernel whose stores come before an empty flag: `await_abort_sent` sees those of the next, too."""
        return at.kernel + (self.rules.await_abort_sent and self.rules.abort_sent_last)

    # --- kernels: what may happen next in `step` of one

    def _send(self, state: State, at: At, step: int) -> Moves:
        """`dispatch_send` of dispatch_send.cu."""
        rank, kernel, epoch = at
        rules, own, stores = self.rules, state.ranks[rank], self.stores_of(at)
        last = TOKENS + len(stores.tokens)
        if step == ENTER:
            stored = self.store(state, rank, stores.ready if rules.count_waits else stores.ready + stores.counts)
            beside = [kind for kind, _ in self.programs[rank][kernel + 1 : kernel + 2]] == ["arrive"]
            yield f"enters epoch {epoch}", self.go(stored, at, AWAIT, beside=0 if beside else -1)
            return
        if step == last:
            yield f"raises its flags of {epoch}", self.go(self.store(state, rank, stores.flags), at, DONE)
            return
        if own.failure:
            # Who notices that stores none of what is left, whatever other blocks have stored.
            left = stores.counts if step in (AWAIT, WITHOUT_COUNT) and not rules.failed_without_count else []
            if not rules.failed_without_token_flags:
                left = left + [store for token in stores.tokens for store in token.token_flags]
            empty = [flag._replace(upto=self.informed(at)) if flag.upto != NOWHERE else flag for flag in stores.flags]
            yield f"holds tokens of {epoch} back", self.go(self.store(state, rank, left + empty), at, DONE)
            if not own.unnoticed:
                return
        if step in (AWAIT, WITHOUT_COUNT):
            for shown in self._awaited(state, at):
                if step == AWAIT:
                    stored = self.store(shown, rank, stores.counts if rules.count_waits else [])
                    yield f"stores the count of {epoch}", self.go(stored, at, TOKENS)
                elif last > TOKENS + 1:
                    yield "has blocks that have not failed", self.go(shown, at, TOKENS + 1)
        else:
            token = stores.tokens[step - TOKENS]
            stored = self.store(state, rank, token.records + token.token_flags)
            yield f"sends token {step - TOKENS} of {epoch}", self.go(stored, at, step + 1)
        if not own.failure:
            # The block that fails sends nothing; others may not have noticed, if there are any.
            following = WITHOUT_COUNT if step == AWAIT else step + 1
            for what, failed in (*self.adopted(state, at), *self.own_failures(state, at, step == AWAIT)):
                if step == AWAIT or following < last:
                    yield what, self.go(failed, at, following)
                else:
                    ranks = replaced(failed.ranks, rank, failed.ranks[rank]._replace(unnoticed=False))
                    yield what, failed._replace(ranks=ranks)

    def stores_of(self, at: At) -> SendStores:
        """What `dispatch_send` stores: some to all, and of each token its record and its token flag."""
        if at in self.sends:
            return self.sends[at]
        rank, kernel, epoch = at
        rules, peers, per_token_flags = self.rules, self.others(rank), self.per_token_flags[rank]
        entered = epoch + (not rules.ready_in_time)
        number = epoch + FOREIGN * ((rank, epoch) in self.foreign)
        tokens = []
        for token in range(len(self.sent(rank, epoch))):
            records, token_flags = [], []
            for peer in peers:
                goes = self.goes(rank, epoch, token, peer)
                fields = ("ids", "row") if goes else ("ids",) if per_token_flags and rules.ids_everywhere else ()
                records += [Store(self.cell(field, peer, rank, epoch, token), epoch, kernel) for field in fields]
                if per_token_flags or goes:
                    # After `fence_system`; of a rank that stores them first in no order.
                    record = tuple(self.cell(field, peer, rank, epoch, token) for field in ("ids", "row"))
                    after = record if per_token_flags and rules.token_flag_last else ()
                    token_flags.append(Store(self.cell("token_flag", peer, rank, epoch, token), epoch, kernel, after))
            tokens.append(TokenStores(records, token_flags))
        upto = kernel if rules.flag_last else NOWHERE
        self.sends[at] = SendStores(
            [Store(self.cell("ready", peer, rank), entered, kernel, (), kernel) for peer in peers],
            [Store(self.cell("count", peer, rank, epoch), number, kernel) for peer in peers],
            tokens,
            [Store(self.cell("flag", peer, rank, epoch), epoch, kernel, (), upto) for peer in peers],
        )
        return self.sends[at]

    def _awaited(self, state: State, at: At) -> list[State]:
        """What memory may show once all may be written to: `await_free` for `wanted` in `failed_or_ready`."""
        states = [state]
        for peer in self.others(at.rank):
            if self.rules.await_everyone or self.goes_any(at.rank, at.epoch, peer):
                signs = [(self.cell("ready", at.rank, peer), at.epoch)]
                signs.append((self.cell("combined", at.rank, peer, at.epoch), at.epoch - 2))
                ways = [self.see(shown, *sign) for shown in states for sign in signs]
                states = list(dict.fromkeys(shown for shown in ways if shown is not None))
        return states

    def _arrive(self, state: State, at: At, step: int) -> Moves:
        """`recv_permute` of dispatch_recv.cu."""
        yield from self._waiting(state, at, step, self._read_arrival)

    def waits_of(self, at: At) -> list[Wait]:
        """What a kernel waits for."""
        if at not in self.waits:
            peers = self.others(at.rank)
            if self.programs[at.rank][at.kernel][0] == "home":
                self.waits[at] = [Wait(partial(self._partial_found, at, peer), []) for peer in peers]
            else:
                self.waits[at] = [
                    Wait(partial(self._slot_found, at, source, token), self._of_slot(at, source, token))
                    for source in peers
                    for token in range(self.slots)
                ]
        return self.waits[at]

    def _slot_found(self, at: At, source: int, token: int, state: State) -> Iterator[State]:
        """What memory may show once a slot may be read: `behind` of `await_slots`."""
        rules, epoch = self.rules, at.epoch
        flag = self.cell("flag", at.rank, source, epoch)
        flagged = self.see(state, flag, epoch)
        if flagged is not None:
            yield flagged
        recent = self.see(state, flag, epoch - 2) if rules.recent else state
        if not self.per_token_flags[at.rank] or recent is None:
            return
        for word, shown in self.sights(recent, self.cell("count", at.rank, source, epoch)):
            if rules.turn and turn_of(word % FOREIGN) != turn_of(epoch):
                continue
            if rules.sign and not (word and self.per_token_flags[source]):
                continue
            if word >= FOREIGN or token >= len(self.sent(source, word)):
                yield shown
            else:
                least = epoch if rules.epoch_of_token_flag else 1
                seen = self.see(shown, self.cell("token_flag", at.rank, source, epoch, token), least)
                if seen is not None:
                    yield seen

    def _of_slot(self, at: At, source: int, token: int) -> list[int]:
        """What `each_expert` reads, and all that is read later of a row that it finds."""
        rank, _, epoch = at
        count = self.cell("count", rank, source, epoch)
        if token >= len(self.sent(source, epoch)) or (source, epoch) in self.foreign:
            return [count]
        goes = self.goes(source, epoch, token, rank)
        # Where a token does not go, its token flag tells, or the ids beside it.
        fields = ("token_flag", "ids", "row") if goes else ("token_flag", "ids") if self.per_token_flags[source] else ()
        return [count, *(self.cell(field, rank, source, epoch, token) for field in fields)]

    def _read_arrival(self, state: State, at: At) -> Moves:
        if self.rules.check_sources:
            for source in self.others(at.rank):
                if state.memory[self.cell("count", at.rank, source, at.epoch)] >= FOREIGN:
                    # It is not on its own that it fails: it may fail once more.
                    yield "finds tokens for another exchange", self.go(self.fail(state, at, at.rank), at, DONE)
                    return
        for wait in self.waits_of(at):
            self.check(state, at, wait.cells)
        for source in self.others(at.rank):
            if (source, at.epoch) in self.foreign:
                raise Violation(f"rank {at.rank} takes tokens of rank {source} for another exchange")
        good = state.ranks[at.rank].good | 1 << at.epoch
        yield f"reads all of {at.epoch}", self.go(state, at, DONE, good=good)

    def _home(self, state: State, at: At, step: int) -> Moves:
        """`combine_recv` of combine.cu."""
        yield from self._waiting(state, at, step, self._read_partials)

    def _partial_found(self, at: At, peer: int, state: State) -> Iterator[State]:
        shown = self.see(state, self.cell("combined", at.rank, peer, at.epoch), at.epoch)
        if shown is not None:
            yield shown

    def _read_partials(self, state: State, at: At) -> Moves:
        came = [peer for peer in self.others(at.rank) if self.goes_any(at.rank, at.epoch, peer)]
        self.check(state, at, [self.cell("partial", at.rank, peer, at.epoch) for peer in came])
        yield f"sums partial results of {at.epoch}", self.go(state, at, DONE)

    def _waiting(self, state: State, at: At, step: int, read: Callable[[State, At], Moves]) -> Moves:
        """A kernel that waits for all that it has to, takes what is there as soon as it is, and in the end reads."""
        own, waits = state.ranks[at.rank], self.waits_of(at)
        if step == DONE:
            return
        if own.failure:
            yield "waits no more", self.go(state, at, DONE, seen=0, wrong="")
        elif self.is_stale(at):
            yield "has a stale handle", self.fail(state, at, at.rank)
        elif step == LOOKING:
            aborts = self.aborts[at.rank]
            for bit, wait in enumerate(waits):
                if own.seen >> bit & 1:
                    continue
                seen = own.seen | 1 << bit
                complete = seen == (1 << len(waits)) - 1
                for shown in wait.found(state):
                    if self.rules.look_for_failures and any(shown.memory[abort] for abort in aborts):
                        # Others may be as well under way: `adopted`, below.
                        first = next(shown.memory[abort] for abort in aborts if shown.memory[abort]) - 1
                        yield f"finds {bit} in {at.epoch}, and a failure", self.fail(shown, at, first)
                        continue
                    for wrong, taken in self.taken(shown, at, wait.cells):
                        wrong = own.wrong or wrong
                        what = f"finds {bit} in {at.epoch}" + (f": {wrong}" if wrong else "")
                        if not complete:
                            yield what, self.go(taken, at, LOOKING, seen=seen, wrong=wrong)
                        elif wrong:
                            raise Violation(wrong, f"rank {at.rank} {what}")
                        else:
                            yield what, self.go(taken, at, READING, seen=0)
            yield from self.adopted(state, at)
            yield from self.own_failures(state, at, waits=True)
        else:
            yield from read(state, at)
            if state.may_fail and at.kernel in self.may_fail[at.rank]:
                yield "fails", self.fail(state._replace(may_fail=False), at, at.rank)

    def _use(self, state: State, at: At, step: int) -> Moves:
        self._check_rows(state, at)
        yield f"uses rows of {at.epoch}", self.go(state, at, DONE)

    def _check_rows(self, state: State, at: At) -> None:
        own = state.ranks[at.rank]
        if own.good >> at.epoch & 1 and not own.failure:
            for source in self.others(at.rank):
                for token in range(len(self.sent(source, at.epoch))):
                    if self.goes(source, at.epoch, token, at.rank):
                        fields = ("ids", "row")
                        self.check(state, at, [self.cell(f, at.rank, source, at.epoch, token) for f in fields])

    def _combine(self, state: State, at: At, step: int) -> Moves:
        """`combine_send` of combine.cu."""
        rank, kernel, epoch = at
        own = state.ranks[rank]
        stale, partials = self.is_stale(at), []
        if stale and not own.failure:
            yield "has a stale handle", self.fail(state, at, rank)
            return
        if own.good >> epoch & 1 and not stale:
            self._check_rows(state, at)
            homes = [source for source in self.others(rank) if self.goes_any(source, epoch, rank)]
            partials = [Store(self.cell("partial", source, rank, epoch), epoch, kernel) for source in homes]
        upto = (
            (self.informed(at) if stale and self.rules.stale_waits else kernel) if self.rules.combined_last else NOWHERE
        )
        cells = [self.cell("combined", peer, rank, epoch) for peer in self.others(rank)]
        flags = [Store(cell, epoch, kernel, (), upto) for cell in cells]
        yield f"sends partial results of {epoch}", self.go(self.store(state, rank, partials + flags), at, DONE)

    # --- all together

    def moves(self, state: State) -> Moves:
        """What may happen next, and after it what the same rank may as well do at once."""
        if all(own.dead or own.failure or self._is_done(rank, own) for rank, own in enumerate(state.ranks)):
            return
        for rank, own in enumerate(state.ranks):
            if own.dead or self._is_done(rank, own):
                continue
            for kernel, step in ((own.kernel, own.step), (own.kernel + 1, own.beside)):
                if step >= 0:
                    kind, epoch = self.programs[rank][kernel]
                    for what, after in self.kinds[kind](state, At(rank, kernel, epoch), step):
                        yield f"rank {rank} {what}", self.settled(after, rank)
            if state.may_die and own.kernel in self.may_die[rank]:
                ranks = replaced(state.ranks, rank, own._replace(dead=True))
                yield f"rank {rank} dies", state._replace(ranks=ranks, may_die=False)

    def settled(self, state: State, rank: int) -> State:
        """The state behind all that a rank does that nothing that others do can change, and nobody has to see at once.

        Such are stores, that are under way for as long as one likes, and what a rank does that has failed.
        """
        own, queue = state.ranks[rank], state.under_way[rank]
        key = rank, own, queue
        if key not in self.at_once:
            after = state
            while (move := self._move_at_once(after, rank)) is not None:
                after = move
            self.at_once[key] = None if after is state else (after.ranks[rank], after.under_way[rank])
        found = self.at_once[key]
        if found is None:
            return state
        ranks, under_way = replaced(state.ranks, rank, found[0]), replaced(state.under_way, rank, found[1])
        return State(ranks, state.memory, under_way, state.may_fail, state.may_die)

    def _move_at_once(self, state: State, rank: int) -> State | None:
        own = state.ranks[rank]
        if own.dead or self._is_done(rank, own):
            return None
        kernel, step = (own.kernel, own.step) if own.step != DONE else (own.kernel + 1, own.beside)
        kind, epoch = self.programs[rank][kernel]
        ends = kind == "send" and step in (ENTER, TOKENS + len(self.sent(rank, epoch)))
        sends = kind == "send" and step not in (AWAIT, DONE) and self.quiet and not own.failure
        if not (ends or sends or (own.failure and not own.unnoticed)):
            return None
        ((_, after),) = self.kinds[kind](state, At(rank, kernel, epoch), step)
        return after

    def _is_done(self, rank: int, own: Rank) -> bool:
        return own.kernel == len(self.programs[rank])

    def check_end(self, state: State) -> None:
        """Where nothing can happen any more, all have come to their end, and know of each failure of one that lives."""
        for rank, own in enumerate(state.ranks):
            if own.dead:
                continue
            if not (own.failure or self._is_done(rank, own)):
                raise Violation(f"rank {rank} waits for ever")
            if own.failure:
                for peer in self.others(rank):
                    other, told = state.ranks[peer], self.see(state, self.cell("abort", peer, rank), 1)
                    if not (other.dead or other.failure or told):
                        raise Violation(f"rank {peer} never learns of the failure of rank {rank}")


def replaced(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def turn_of(epoch: int) -> int:
    """The bit of `count` that tells an epoch from the one before that used its half, as `comm.signals.tag_of`."""
    return (epoch >> 1 ^ epoch) & 1


def explore(machine: Machine) -> Finding:
    return search(machine.start, machine.moves, machine.check_end)
