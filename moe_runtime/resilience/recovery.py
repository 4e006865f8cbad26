"""What survivors of a death do: agree on who is left, make memory for the smaller group, and run the step again.

Ranks may be one step apart when a rank dies: one has its result already, while another still waits for the dead rank.
Then the first takes part in that step once more, for the others, with a copy of what it brought.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from moe_runtime.comm.errors import (
    ExpertsLostError,
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    RankRemovedError,
    StepMismatchError,
    reason_of,
)
from moe_runtime.comm.messages import Reader, integer, many_of, optional, row, text
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.resilience.follower import Before, Follower
from moe_runtime.resilience.membership import Membership
from moe_runtime.support.arguments import check_integer, check_kind, describe

_LOG = logging.getLogger(__name__)

POLL_S = (0.0005, 0.01)
"""First and longest pause between two looks into the store."""
RECOVERABLE = (
    Phase.DISPATCH_SEND,
    Phase.DISPATCH_RECV,
    Phase.COMBINE_SEND,
    Phase.COMBINE_RECV,
    Phase.RECOVERY,
)
"""Phases of a step. A rank that dies in another, such as at start-up, ends the group."""

T = TypeVar("T")
V = TypeVar("V")


def is_recoverable(failure: BaseException | None) -> bool:
    """Whether survivors go on after it, or nothing has failed."""
    return failure is None or (isinstance(failure, PeerTimeoutError) and failure.phase in RECOVERABLE)


Asks = list[tuple[int, str]]
"""Ranks whose places processes ask for, with the words under which they are answered."""

_HELD = many_of(many_of(integer(0)))
_ASKS: Reader[Asks] = many_of(row(integer(0), text))


class Recovery:
    """The survivors of a context's ranks, named by their numbers at the start.

    Args:
        membership: who is left.
        renew: makes memory for the members, whose group it gets; raises `PeerTimeoutError` if one is missing.
        end: called with the error with which a recovery has failed, which later calls are to raise.
        timeout_s: limit of a step; half of it is how long survivors wait for each other.

    Attributes:
        membership: as given.
        layer_steps: steps of layers that this rank has done, without warm-up steps.
        steps_done: these, warm-up steps, and steps that ranks agree in.
        steps_repeated: steps that this rank has run again, for itself or for others.
        background: runs work of a recovery one after another, on a thread of its own.
    """

    def __init__(
        self,
        membership: Membership,
        renew: Callable[[tuple[int, ...], RankGroup], None],
        end: Callable[[Exception], None],
        timeout_s: float,
    ) -> None:
        self.membership = membership
        self.steps_done = self.layer_steps = 0
        self.steps_repeated = 0
        self.background = ThreadPoolExecutor(1, thread_name_prefix="moe_runtime recovery")
        self._renew, self._end = renew, end
        self._window_s = timeout_s / 2
        self._references: list[weakref.ref[Follower]] = []
        self._last: Callable[[], object] | None = None
        self._others_lack_last = False
        self._came_after: int | None = None
        self._call = ""

    def add(self, follower: Follower) -> None:
        """Have `follower`, which is not kept alive, follow the members. All ranks add theirs in the same order."""
        self._references.append(weakref.ref(follower))

    @property
    def step_number(self) -> int:
        """Of the step that runs, from 1 on, equal on all ranks in it."""
        return self.steps_done + (not self._others_lack_last)

    @property
    def _followers(self) -> list[Follower]:
        return [follower for reference in self._references if (follower := reference()) is not None]

    def most(self, what: str, number: int, limit_s: float, check: Callable[[], None]) -> int:
        """The largest `number` of all members, in a step of its own. Collective.

        A member that does not come within `limit_s` is left. `check` raises what has failed. Raises as `recover`.
        """
        return self._in_step(what, lambda: number, integer(), _largest, lambda found: found, limit_s, check)

    def _in_step(
        self,
        what: str,
        mine: Callable[[], object],
        read: Reader[V],
        result_of: Callable[[list[V]], T],
        known: Callable[[T], object],
        limit_s: float,
        check: Callable[[], None],
    ) -> T:
        """`result_of` the words of all members, in a step of its own; this rank's word is `mine()`.

        A rank that repeats the step for others, since it has the result already, says `known` of the result. With that
        word among them `result_of` must find what is right for those others.
        """
        found: list[T] = []

        def gather(word: object) -> T:
            # A member may be one such step ahead, so its words take turns.
            membership, step, event = self.membership, self.step_number, f"{what} {self.step_number % 2}"
            membership.put(f"{event}/{membership.rank}", [step, word])
            words: dict[int, V] = {}

            def absent() -> list[int]:
                for rank in membership.members:
                    said = membership.get(f"{event}/{rank}", row(integer(0), read))
                    if said is not None and said[0] == step:
                        words[rank] = said[1]
                return [rank for rank in membership.members if rank not in words]

            self._await(what, absent, limit_s, check, Phase.RECOVERY)
            found[:] = [result_of([words[rank] for rank in membership.members])]
            return found[0]

        return self._run(what, lambda: gather(mine()), lambda: lambda: gather(known(found[0])))

    def run(
        self, step: Callable[[], T], again: Callable[[], Callable[[], object]] | None = None, *, counted: bool = True
    ) -> T:
        """`step()` of a layer, again and again until no rank dies in it.

        Args:
            again: called after it; makes what repeats it later without the caller's tensors. None for `step` itself.
            counted: whether it is one of `layer_steps`.

        Raises as `recover`.
        """
        result = self._run("a step of a layer", step, again)
        self.layer_steps += counted
        return result

    def _run(self, call: str, step: Callable[[], T], again: Callable[[], Callable[[], object]] | None) -> T:
        before, self._call = self.membership.generation, call

        def once_more() -> T:
            self.steps_repeated += self.membership.generation > before
            return step()

        result = self._until_none_dies(once_more)
        self.steps_done += 1
        self._last, self._call = step if again is None else again(), ""
        self._settle(self.steps_done)
        return result

    def part(self, limit_s: float, check: Callable[[], None]) -> None:
        """Before the memory is freed: wait until all members are here too, and help those that still need this rank.

        `check` raises what has failed. Raises `PeerTimeoutError` naming a member, by its present number, that does not
        come within `limit_s`; and as `recover`.
        """
        self._call = ""
        self._until_none_dies(lambda: self._meet_at_end(limit_s, check))

    def admit(self, limit_s: float, check: Callable[[], None]) -> tuple[int, ...]:
        """Between two steps: have processes that ask for the places of ranks that are out take them. Collective.

        Processes wait while experts that died are loaded again, since theirs come from the members.

        Returns the ranks that have come back. Arguments, and raises, as `most`.
        """
        read = row(optional(_ASKS), _ASKS)

        def mine() -> list[object]:
            asks = self._asks()
            # Each tells the others that it has loaded its experts, so all followers are asked.
            waits = [follower for follower in self._followers if follower._members.settled() is None]
            return [None, [] if waits else _plain(asks)]

        def decided(words: list[tuple[Asks | None, Asks]]) -> Asks:
            """Nobody if a member has ended this step before a rank was missed; else whom all members see."""
            known = next((known for known, _ in words if known is not None), None)
            return [ask for ask in words[0][1] if all(ask in asks for _, asks in words)] if known is None else known

        asks = self._in_step("admit", mine, read, decided, lambda _: [[], []], limit_s, check)
        if not asks:
            return ()
        came = tuple(rank for rank, _ in asks)
        record = {rank: self.steps_done for rank in sorted((*self.membership.members, *came))}
        with self._out_on_error():
            if self.membership.rank == self.membership.members[0]:
                present = [follower._members.settled() for follower in self._followers]
                more = [self.layer_steps, list(self.membership.members), present]
                for rank, word in asks:
                    self.membership.answer(rank, word, record, more)
            self._change(record)
        return tuple(rank for rank in came if rank in self.membership.members)

    def _asks(self) -> Asks:
        """The processes that ask, and can be followed to; the first member refuses the others."""
        asks: Asks = []
        whole = all(follower._members.began_whole for follower in self._followers)
        for rank, word, layers in self.membership.askers():
            why = ""
            if not whole:
                why = "the others have made a layer while a rank was out, so none can come back"
            elif layers != len(self._followers):
                why = f"the others have {len(self._followers)} layers, this rank has {layers}"
            if not why:
                asks.append((rank, word))
            elif self.membership.rank == self.membership.members[0]:
                self.membership.refuse(rank, word, why)
        return asks

    def _check_release(self, ranks: Sequence[int]) -> None:
        """Raise `ValueError` where `ranks`, by their numbers at the start, cannot leave."""
        check_kind("ranks", ranks, (list, tuple))
        present, host = self.membership.members, self.membership.store_host
        for rank in ranks:
            if check_integer("ranks", rank, 0) not in present:
                raise ValueError(f"ranks: expected some of {present}, got {describe(rank)}")
            if rank == host:
                raise ValueError(f"ranks: expected others than {rank}, whose process hosts the store where ranks meet")
        if not ranks or len(set(ranks)) == len(present):
            raise ValueError(f"ranks: expected one or more, but not all of {present}, got {describe(ranks)}")

    def release(self, ranks: Sequence[int], limit_s: float, check: Callable[[], None]) -> None:
        """Between two steps: go on without `ranks`. Collective, also for those.

        Raises `RankRemovedError` on these; `ValueError` for a wrong argument, of which the others learn by a
        `PeerAbortedError`, and where members disagree, and `ExpertsLostError` where the others cannot go on, and then
        nothing changes; else as `most`.
        """
        self._agree_to_release(ranks, limit_s, check)
        stay = self._without(ranks)
        if not stay:
            raise ValueError(f"ranks: expected one or more to stay, all others than {ranks} have died meanwhile")
        if self.membership.rank in ranks:
            self.membership.members = stay
            error = RankRemovedError(f"rank {self.membership.rank} is out, as was asked for", self.membership.rank)
            self._end(error)
            raise error
        with self._out_on_error():
            self._change(dict.fromkeys(stay, self.steps_done))

    def _agree_to_release(self, ranks: Sequence[int], limit_s: float, check: Callable[[], None]) -> None:
        """Raise, as `release`, unless all members want the same and can go on."""
        problem = self._problem_with(ranks)
        word: list[object] = []

        def mine() -> list[object]:
            if problem is not None:
                word[:] = [None, reason_of(problem), None]
            else:
                word[:] = [sorted(map(int, ranks)), None, self._loss_without(ranks)]
            return word

        read = row(optional(many_of(integer(0))), optional(text), optional(text))
        words = self._in_step("release", mine, read, lambda words: words, lambda _: word, limit_s, check)
        if problem is not None:
            raise problem
        for number, (_, wrong, _) in enumerate(words):
            if wrong is not None:
                raise PeerAbortedError(f"release: rank {number} gave up: {wrong}", number, Phase.HOST)
        if any(asked != words[0][0] for asked, _, _ in words):
            raise ValueError(f"ranks: the members disagree, {[asked for asked, _, _ in words]}")
        for number, (_, _, lost) in enumerate(words):
            if lost is not None:
                raise ExpertsLostError(lost, number)

    def _without(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in self.membership.members if rank not in ranks)

    def _problem_with(self, ranks: Sequence[int]) -> ValueError | None:
        try:
            self._check_release(ranks)
        except ValueError as problem:
            return problem
        return None

    def _loss_without(self, ranks: Sequence[int]) -> str | None:
        """Why the other members could not go on without `ranks`, as far as this one knows."""
        stay = self._without(ranks)
        try:
            for follower in self._followers:
                if self.membership.rank in stay:
                    follower._members.check_reload(stay)
                else:
                    follower._members.check(stay)
        except ExpertsLostError as lost:
            return str(lost)
        return None

    @contextmanager
    def _out_on_error(self) -> Iterator[None]:
        """Around a change of members: a rank that an error ends inside is out, and the others go on without it."""
        try:
            yield
        except BaseException as error:
            own = error if isinstance(error, Exception) else None
            self._end(own or PeerAbortedError(reason_of(error), self.membership.rank, Phase.HOST))
            raise

    def join(self, limit_s: float) -> None:
        """For a process that takes the place of a rank that is out: wait until the members `admit` it, and go over.

        Raises `PeerTimeoutError` if they do not within `limit_s`, or if another rank dies while they do; `ValueError`
        if a layer has not been loaded, or if they have other layers.
        """
        for follower in self._followers:
            follower._check_loaded()
        read = row(integer(0), many_of(integer(0)), many_of(_HELD))
        record, (self.layer_steps, before, present) = self.membership.ask(limit_s, read, len(self._followers))
        self.steps_done = record[self.membership.rank]
        if len(present) != len(self._followers):
            text = f"the others have {len(present)} layers, this rank has {len(self._followers)}"
            raise MoERuntimeError(f"rejoin: {text}")
        for follower, held in zip(self._followers, present, strict=True):
            follower._members.take_as_present(tuple(before), held)
        try:
            self._go_over(tuple(before))
        except PeerTimeoutError as error:
            # Of no phase of a step: this rank has not all experts, so it must not go on with the others, nor help them.
            text = f"rejoin: rank {self.membership.rank} could not come back, a rank died meanwhile: {error}"
            raise PeerTimeoutError(text, error.rank, Phase.START_UP) from error
        _LOG.warning("rank %d: is in again, generation %d", self.membership.rank, self.membership.generation)

    def _change(self, record: dict[int, int]) -> None:
        """Go over to the members of `record`, which all know."""
        before = self.membership.members
        try:
            self.membership.go_over(record)
            self._go_over(before)
        except PeerTimeoutError as error:
            self.recover(error)
            return
        after = self.membership.members
        _LOG.warning(
            "rank %d: generation %d: rank %s came, rank %s left, %s go on",
            self.membership.rank,
            self.membership.generation,
            _listed(sorted(set(after) - set(before))),
            _listed(sorted(set(before) - set(after))),
            _listed(list(after)),
        )

    def recover(self, error: PeerTimeoutError) -> None:
        """After `error` of a step: go on with those that are left. Collective for all that are alive.

        Raises:
            RankRemovedError: the others have gone on without this rank.
            ExpertsLostError: as the layers say, on every survivor.
            StoreLostError: the store where ranks meet is gone or silent.
        """
        began, before = time.monotonic(), self.membership.members
        with self._out_on_error():
            record = self._agree(error)
        self._others_lack_last = min(record.values()) < self.steps_done
        _LOG.warning(
            "rank %d: generation %d: rank %s left, %s go on after %.2f s; %d steps of layers are done here (%s)",
            self.membership.rank,
            self.membership.generation,
            _listed(sorted(set(before) - set(record))),
            _listed(list(record)),
            time.monotonic() - began,
            self.layer_steps,
            error,
        )

    def _agree(self, error: PeerTimeoutError) -> dict[int, int]:
        """Agree with the other survivors, and go over to their memory. Returns the steps that each has done."""
        membership = self.membership
        while True:
            before = membership.members
            suspects = {before[error.rank]} if 0 <= error.rank < len(before) else set()
            suspects = {rank for rank in suspects - {membership.rank} if not self._is_in_another_call(rank)}
            record = membership.agree(self.steps_done, suspects, self._window_s, self._call)
            if not 0 <= self.steps_done - min(record.values()) <= 1:
                text = f"rank {membership.rank} has done {self.steps_done} steps, the members {record}"
                raise MoERuntimeError(f"recovery: steps are further apart than can be: {text}", membership.rank)
            self._check_calls(record)
            self._settle(max(record.values()))
            for follower in self._followers:
                follower._members.check(membership.members)
            try:
                self._go_over(before)
                return record
            except PeerTimeoutError as another:
                error = another  # Also of this rank, if it was stopped and the others go on already.

    def _is_in_another_call(self, rank: int) -> bool:
        """Whether a member has come to `admit` or `release` in place of this step: it will miss others itself."""
        for what in {"admit", "release"} - {self._call}:
            said = self.membership.get(f"{what} {self.step_number % 2}/{rank}", lambda answer: answer)
            if isinstance(said, list) and said[:1] == [self.step_number]:
                return True
        return False

    def _check_calls(self, record: dict[int, int]) -> None:
        """Raise `StepMismatchError`, on all members, if ranks that have done as many steps are in different calls.

        They wait for each other, so none of them is dead.
        """
        calls = {rank: call for rank, call in self.membership.calls.items() if call}
        for steps in sorted(set(record.values())):
            found = {rank: call for rank, call in calls.items() if record[rank] == steps}
            if len(set(found.values())) > 1:
                texts = ", ".join(f"rank {rank}: {call}" for rank, call in found.items())
                raise StepMismatchError(f"recovery: ranks are in different calls, {texts}", min(found))

    def _go_over(self, members_before: tuple[int, ...]) -> None:
        """Move from the previous members' memory to memory of the present ones."""
        membership, followers = self.membership, self._followers
        before: list[Before] | None = None
        if not set(membership.members) <= set(members_before):
            before = [follower._members.expect(membership.members) for follower in followers]
            self._came_after = self.steps_done
        self._renew(membership.members, membership.group())
        for number, follower in enumerate(followers):
            follower._follow_members(membership.members, None if before is None else before[number])

    def _settle(self, steps: int) -> None:
        """`steps` are those that a member has done. If some came back before the last one, all have gone over."""
        if self._came_after is not None and steps > self._came_after:
            self._came_after = None
            for follower in self._followers:
                follower._members.settle()

    def _until_none_dies(self, work: Callable[[], T]) -> T:
        while True:
            try:
                if self._others_lack_last:
                    assert self._last is not None
                    self.steps_repeated += 1
                    self._last()
                    self._others_lack_last = False
                return work()
            except PeerTimeoutError as error:
                if not is_recoverable(error):
                    raise
                self.recover(error)

    def _meet_at_end(self, limit_s: float, check: Callable[[], None]) -> None:
        self.membership.announce("close")
        self._await("close", lambda: self.membership.absent("close"), limit_s, check, Phase.START_UP)

    def _await(
        self,
        event: str,
        absent: Callable[[], list[int]],
        limit_s: float,
        check: Callable[[], None],
        phase: Phase,
    ) -> None:
        """Wait until `absent` names no member any more. Raises `PeerTimeoutError` if one needs a recovery meanwhile.

        It is of `phase` if a member does not come within `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        pause, longest = POLL_S
        while missing := absent():
            check()
            if self.membership.leaving():
                raise PeerTimeoutError(f"{event}: a rank is missed in a step", -1, Phase.RECOVERY)
            if time.monotonic() > deadline:
                number = self.membership.members.index(missing[0])
                message = f"{event}: rank {number} did not come within {limit_s:g} s"
                raise PeerTimeoutError(message, number, phase)
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _largest(numbers: list[int]) -> int:
    return max(numbers)


def _plain(asks: Asks) -> list[list[int | str]]:
    """As JSON carries it."""
    return [list(ask) for ask in asks]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
