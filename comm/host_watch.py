"""Who watches whether other hosts live, where a wait for them has no limit of its own.

Each rank counts up a number in the group's store every second, and looks at the numbers of its rail. One that stands
still, a rank that has left with an error, or a store that is gone or silent, is a failure of this rank. NCCL is then
aborted, so that what waits for that host ends. Where that does not help, as in a graph, the process ends rather than
hang.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

from moe_runtime.comm.errors import MoERuntimeError, PeerTimeoutError, Phase, StoreLostError
from moe_runtime.comm.hosts import Hosts
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.suspects import Suspects

_LOG = logging.getLogger(__name__)

BEAT_S = 1.0
"""How often a rank says that it lives."""
FREE_S = 10.0
"""How long NCCL may take to let go of what waits for a host that is gone."""
EXIT_CODE = 75
"""Of a process that ends because a wait for another host does not."""
PARTED = b"parted"


class HostWatch:
    """A thread that watches the ranks of this rail, from its making to `stop`.

    Args:
        hosts: the ranks of each host.
        group: of all ranks.
        rail: of this rail.
        suspects: is told of ranks that give no sign of life.
        limit_s: seconds without a sign of life after which a rank counts as dead.
        start_s: seconds after which a rank counts as dead that has given none yet, and after which, or `limit_s` if
            that is more, the store counts as lost.
        on_failure: called once with what is known, on the thread of the watch.
        free: ends what waits for other hosts; returns when that is done.

    Attributes:
        found: the failure, once there is one.
    """

    def __init__(
        self,
        hosts: Hosts,
        group: RankGroup,
        rail: RankGroup,
        suspects: Suspects,
        limit_s: float,
        start_s: float,
        on_failure: Callable[[MoERuntimeError], None],
        free: Callable[[], None],
    ) -> None:
        self._hosts, self._group, self._limit_s, self._start_s = hosts, group, limit_s, start_s
        self._on_failure, self._free, self._suspects = on_failure, free, suspects
        self._beats = rail.number_board("watch of hosts")
        self._ended, self._found_it, self._done = threading.Event(), threading.Event(), threading.Event()
        self._free_at_end = False
        self.found: MoERuntimeError | None = None
        # A daemon, since a process must be able to end while the store does not answer.
        self._thread = threading.Thread(target=self._run, name="moe_runtime host watch", daemon=True)
        self._thread.start()

    def verdict(self, limit_s: float) -> MoERuntimeError | None:
        """What is found within `limit_s` more than the watch's own limit."""
        self._found_it.wait(self._limit_s + limit_s)
        return self.found

    def stop(self, *, in_order: bool) -> None:
        """End the watch. `in_order`: this rank leaves its peers, which must not miss it."""
        self._ended.set()
        if in_order:
            self._done.wait(self._limit_s)  # a beat that is under way must not come after the farewell
            with contextlib.suppress(RuntimeError):
                self._beats.put(PARTED)

    def free_at_exit(self) -> None:
        """End what waits for other hosts, so that this process can end; where that does not end either, end it at once.

        On the thread of the watch: a process that exits may start no thread.
        """
        self._free_at_end = True
        self._ended.set()
        if not self._done.wait(FREE_S):
            _end_process("what waits for other hosts does not end")

    def _run(self) -> None:
        try:
            self._watch()
            if self._free_at_end:
                self._free()
        finally:
            self._done.set()

    def _watch(self) -> None:
        """Beat and look, until a failure or the end."""
        seen: dict[int, tuple[bytes, float]] = {}  # of the other hosts
        count, answered = 0, time.monotonic()
        while not self._ended.wait(BEAT_S if count else 0.0):
            count += 1
            try:
                self._beats.put(str(count).encode())
                found = self._beats.read()
            except StoreLostError as error:
                # While nobody can say that it lives, nobody is missed.
                now = time.monotonic()
                seen = {host: (beat, now) for host, (beat, _) in seen.items()}
                parted = seen and all(beat == PARTED for beat, _ in seen.values())
                if not parted and now - answered > max(self._limit_s, self._start_s) and not self._ended.is_set():
                    self._fail(error)
                    return
                continue
            if self._ended.is_set():
                return
            now = answered = time.monotonic()
            for host in range(self._hosts.num_hosts):
                beat = found.get(host, b"")
                if host != self._hosts.host and (host not in seen or seen[host][0] != beat):
                    seen[host] = beat, now
            left = self._group.who_left("watch of hosts")
            silent_s = {host: now - since for host, (beat, since) in seen.items() if beat != PARTED}
            still = [h for h, spent in silent_s.items() if spent > (self._limit_s if seen[h][0] else self._start_s)]
            if left is not None or still:
                self._fail(left if left is not None else self._silent(still[0]))
                return

    def _silent(self, host: int) -> MoERuntimeError:
        rank = self._hosts.rank_on(host)
        self._suspects.accuse(rank, gone=True)
        text = f"rank {rank} (host {host}) has given no sign of life for {self._limit_s:g} s"
        return PeerTimeoutError(f"rank {self._hosts.rank}: {text}", rank, Phase.HOST)

    def _fail(self, error: MoERuntimeError) -> None:
        _LOG.error("%s", error)
        self.found = error
        self._found_it.set()
        self._on_failure(error)
        # The step that is under way may end by itself: ranks that gave up say so in their last exchange.
        if self._ended.wait(self._limit_s):
            return
        freeing = threading.Thread(target=self._free, name="moe_runtime host watch: free", daemon=True)
        try:
            freeing.start()
        except RuntimeError:  # of a process that exits, which frees it at the end
            return
        freeing.join(FREE_S)
        if freeing.is_alive() and not self._ended.is_set():
            _end_process(f"{error}; what waits for it does not end (a graph over NCCL)")


def _end_process(why: str) -> None:
    _LOG.critical("%s, so this process does", why)
    logging.shutdown()
    os._exit(EXIT_CODE)
