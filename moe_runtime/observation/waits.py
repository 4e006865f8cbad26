"""How long a layer waited for each of its peers, and which rank the others wait for.

The kernels that wait count (`kernels.exchange.waits`), on the clock of their GPU, and so do steps that a CUDA graph
captured. A wait for a peer runs from the moment when this rank itself had sent. In dispatch it is told apart whether
the peer had entered its step: before that it was busy with something else, afterwards it was slow to send.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from moe_runtime.comm.messages import integer, many
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.waits import FIELDS, HEAD, STEP_NS, STEPS
from moe_runtime.observation.polled import PolledWords
from moe_runtime.support.arguments import check_integer, check_kind, check_path, check_seconds

_LOG = logging.getLogger(__name__)

LATE, SLOW_TO_SEND, SLOW_TO_RETURN = "late to enter its steps", "slow to send its tokens", "slow to return results"
"""Why others wait for a rank: work between its steps; its dispatch; its experts or its combine."""


@dataclass(frozen=True)
class PeerWaits:
    """Waits of a rank for one of its peers, nanoseconds.

    Attributes:
        dispatch_ns, dispatch_max_ns, dispatch_waits: sum, maximum and number of the waits for its tokens.
        late_ns: the part of `dispatch_ns` before the peer had entered its step.
        combine_ns, combine_max_ns, combine_waits: sum, maximum and number of the waits for its results.
    """

    dispatch_ns: int = 0
    dispatch_max_ns: int = 0
    dispatch_waits: int = 0
    late_ns: int = 0
    combine_ns: int = 0
    combine_max_ns: int = 0
    combine_waits: int = 0

    @property
    def total_ns(self) -> int:
        """Of both."""
        return self.dispatch_ns + self.combine_ns

    def plus(self, other: PeerWaits, sign: int = 1) -> PeerWaits:
        """Sums of both; with -1, what is left without `other`. Maxima are those of the larger one."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums = [max(a, b) if at in (1, 5) else a + sign * b for at, (a, b) in enumerate(pairs)]
        return PeerWaits(*sums)


@dataclass(frozen=True)
class WaitCounts:
    """Waits of one rank since counting began; subtract earlier ones for the time between, in which maxima stay.

    Attributes:
        steps: number of steps.
        step_ns: their time, from the start of dispatch_recv until all results are there.
        peers: waits for each rank, by rank; none for this rank itself.
    """

    steps: int
    step_ns: int
    peers: tuple[PeerWaits, ...]

    def __add__(self, other: WaitCounts) -> WaitCounts:
        return self._plus(other, 1)

    def __sub__(self, earlier: WaitCounts) -> WaitCounts:
        return self._plus(earlier, -1)

    def _plus(self, other: WaitCounts, sign: int) -> WaitCounts:
        check_kind("other", other, WaitCounts)
        if len(other.peers) != len(self.peers):
            raise ValueError(f"other: expected waits for {len(self.peers)} ranks, got {len(other.peers)}")
        peers = tuple(a.plus(b, sign) for a, b in zip(self.peers, other.peers, strict=True))
        return WaitCounts(self.steps + sign * other.steps, self.step_ns + sign * other.step_ns, peers)

    def share(self, peer: int) -> float:
        """The part of the steps' time in which this rank waited for `peer`.

        Raises `ValueError` for a rank that there is not.
        """
        check_integer("peer", peer, 0, len(self.peers) - 1)
        return self.peers[peer].total_ns / self.step_ns if self.step_ns else 0.0

    @classmethod
    def of_words(cls, words: Sequence[int]) -> WaitCounts:
        """From the words of `kernels.exchange.waits`."""
        rows = (words[at : at + FIELDS] for at in range(HEAD, len(words), FIELDS))
        return cls(words[STEPS], words[STEP_NS], tuple(PeerWaits(*row) for row in rows))

    @property
    def words(self) -> list[int]:
        """As `of_words` takes them."""
        return [self.steps, self.step_ns, *[0] * (HEAD - 2), *(word for peer in self.peers for word in astuple(peer))]


class LayerWaits:
    """Waits of one layer on one rank, on its device, by token bucket; made by `MoELayer.count_waits`.

    Args:
        context: of the layer.
        dispatchers: of the layer, by token bucket. Their steps count from now on.

    Attributes:
        words: int64 on the device: those of `kernels.exchange.waits` for each bucket in turn.
        members: the ranks that are waited for, by their numbers at the start.

    Raises `ValueError` where ranks do not wait for each other by flags.
    """

    def __init__(self, context: ExpertParallelContext, dispatchers: Mapping[int, TokenDispatcher]) -> None:
        self._context = context
        self._begin(dispatchers)

    def _begin(self, dispatchers: Mapping[int, TokenDispatcher]) -> None:
        """Count from zero in these dispatchers: at first, and after the death of a rank."""
        context, exchanges = self._context, [dispatcher._exchange for dispatcher in dispatchers.values()]
        alone = context.world_size == 1
        if not alone and not all(exchange.counts_waits for exchange in exchanges):
            expected = "ranks of one host that map each other's memory, to count waits by peer"
            raise ValueError(f"transport: expected {expected}, got {context.transport}")
        self.members = context.members
        self._buckets, self._size = tuple(dispatchers), HEAD + context.world_size * FIELDS
        self._polled = PolledWords(len(exchanges) * self._size, context.device)
        self.words = self._polled.words
        if not alone:
            for exchange, words in zip(exchanges, self.words.view(-1, self._size), strict=True):
                exchange.waits = words

    def poll(self) -> dict[int, WaitCounts]:
        """The newest counts of each bucket that have reached the host. Never waits; see `LayerCounters.poll`."""
        return self._counts(self._polled.poll())

    def read(self) -> dict[int, WaitCounts]:
        """The current counts of each bucket. Waits for the work that is queued on the current stream."""
        return self._counts(self._polled.read())

    def gather(self) -> list[WaitCounts]:
        """Waits of each rank, by rank, over all token buckets: for `slowest_rank`. Collective; waits for the device.

        Every rank calls it between the same two steps. Raises `ValueError` for virtual ranks, whose counts are all in
        one process, and errors between ranks as `RankGroup.gather`.
        """
        mine, context = total(self.read().values()), self._context
        if context.group is None:
            if context.world_size > 1:
                raise ValueError("context: expected ranks in processes of their own; read those of each virtual rank")
            return [mine]
        words = context.group.gather("waits", mine.words, many(integer(0), self._size))
        return [WaitCounts.of_words(of_rank) for of_rank in words]

    def _counts(self, words: list[int]) -> dict[int, WaitCounts]:
        parts = (words[at : at + self._size] for at in range(0, len(words), self._size))
        return dict(zip(self._buckets, map(WaitCounts.of_words, parts), strict=True))


def total(counts: Iterable[WaitCounts]) -> WaitCounts:
    """The sum of counts of the same ranks: of all buckets, or of several layers.

    Raises `ValueError` unless there is at least one, and all are of as many ranks.
    """
    several = list(counts)
    if not several:
        raise ValueError("counts: expected at least one WaitCounts, got none")
    return sum(several[1:], several[0])


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for.

    Attributes:
        rank: its present number; `ExpertParallelContext.members` has those at the start.
        wait_ns: nanoseconds that another rank waits for it in a step, on average.
        share: of the others' steps.
        cause: the largest part of that: `LATE`, `SLOW_TO_SEND` or `SLOW_TO_RETURN`.
    """

    rank: int
    wait_ns: float
    share: float
    cause: str

    def __str__(self) -> str:
        return f"{self.wait_ns / 1e3:.1f} us of a step ({self.share:.1%}) for rank {self.rank}, {self.cause}"


def slowest_rank(ranks: Sequence[WaitCounts]) -> SlowRank | None:
    """The rank that the others wait for longest, from the counts of each rank, by rank; None where nobody waits.

    Raises `ValueError` unless these are counts of as many ranks.
    """
    _check_ranks(ranks)
    return _slowest({peer: [c for rank, c in enumerate(ranks) if rank != peer] for peer in range(len(ranks))})


def _check_ranks(ranks: object) -> None:
    """Raise `ValueError` unless these are the counts of all ranks."""
    check_kind("ranks", ranks, (list, tuple))
    assert isinstance(ranks, list | tuple)
    for counts in ranks:
        check_kind("ranks", counts, WaitCounts)
        if len(counts.peers) != len(ranks):
            raise ValueError(f"ranks: expected counts of all {len(counts.peers)} ranks, got {len(ranks)}")


def _slowest(waiting: dict[int, list[WaitCounts]]) -> SlowRank | None:
    """Of the peers that are keys, the one that the ranks whose counts it has wait for longest."""
    found: list[SlowRank] = []
    for peer, counts in waiting.items():
        waits = [one.peers[peer] for one in counts]
        late, sum_ns = sum(w.late_ns for w in waits), sum(w.total_ns for w in waits)
        causes = {
            LATE: late,
            SLOW_TO_SEND: sum(w.dispatch_ns for w in waits) - late,
            SLOW_TO_RETURN: sum(w.combine_ns for w in waits),
        }
        if sum_ns:
            steps, step_ns = sum(one.steps for one in counts), sum(one.step_ns for one in counts)
            cause = max(causes, key=lambda name: causes[name])
            found.append(SlowRank(peer, sum_ns / max(steps, 1), sum_ns / max(step_ns, 1), cause))
    return max(found, key=lambda slow: slow.wait_ns, default=None)


class WaitLog:
    """A line in the log, once in a while, on which peer this rank waited for since the last one.

    The line names a rank by its number at the start.

    Args:
        waits: of a layer. Where layers follow one another, the first shows what happens between steps of the model.
        seconds: from one line to the next.
    """

    def __init__(self, waits: LayerWaits, seconds: float = 60.0) -> None:
        check_kind("waits", waits, LayerWaits)
        self._waits, self._seconds = waits, check_seconds("seconds", seconds)
        self._next_s, self._before = time.monotonic() + seconds, total(waits.read().values())
        self._counted = waits._polled  # where `before` is from
        self._wanted: tuple[PolledWords, int] | None = None  # the copy that the line is to be of, once it is due

    def tick(self) -> None:
        """Write the line if it is due; between steps, from the thread that queues them. Waits for nothing.

        On a GPU a tick that finds it due begins to copy the counts, and a later one, which finds them, writes the line.
        """
        waits = self._waits
        if self._wanted is None and time.monotonic() < self._next_s:
            return
        if self._wanted is None or self._wanted[0] is not waits._polled:
            self._wanted = waits._polled, waits._polled.begun + 1
        now, (polled, copy) = total(waits.poll().values()), self._wanted
        if polled.ended < copy:
            return
        # After a death or a return, counts are from zero.
        since = now - self._before if polled is self._counted else now
        slow = _slowest({peer: [since] for peer in range(len(since.peers))})
        if slow is not None:
            slow = replace(slow, rank=waits.members[slow.rank])
        _LOG.info("waits in %d steps: %s", since.steps, "none" if slow is None else f"most of them {slow}")
        self._next_s, self._before = time.monotonic() + self._seconds, now
        self._counted, self._wanted = polled, None


def plot_waits(ranks: Sequence[WaitCounts], file: str | Path) -> None:
    """Draw a heat map, PNG or SVG by the name of the file: microseconds of a step that each rank waits for each.

    Needs matplotlib (extra `bench`). Raises `ValueError` unless these are counts of all ranks, at least one.
    """
    _check_ranks(ranks)
    if not ranks:
        raise ValueError("ranks: expected counts of at least one rank, got none")
    from matplotlib.figure import Figure

    path = check_path("file", file)
    us = [[peer.total_ns / 1e3 / max(counts.steps, 1) for peer in counts.peers] for counts in ranks]
    size = 2.5 + 0.4 * len(us)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(us, cmap="magma")
    axes.set(xlabel="waits for rank", ylabel="rank", xticks=range(len(us)), yticks=range(len(us)))
    figure.colorbar(image, label="us of a step")
    figure.savefig(path)
