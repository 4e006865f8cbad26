"""How long this rank waited for each peer: the words that dispatch_recv and combine_recv count in, and torch's way.

`words` is int64 `[HEAD + W * FIELDS]`, of one exchange on one rank: steps, their nanoseconds from the start of
dispatch_recv until all partial results are there, when the last dispatch of either half began, and then, for each peer,
sum, maximum and number of its waits in dispatch, the part of that sum before the peer entered its dispatch, and sum,
maximum and number of its waits in combine.

All times are differences on the clock of this rank. A wait for a peer is the time from this rank's own flag to that of
the peer, so it is 0 while this rank itself is still sending. A peer says that it has entered (`ready` of
`comm.signals`) before it sends: what is waited before that is due to its work between steps.
"""

from __future__ import annotations

import time

import torch

from moe_runtime.comm.signals import ANY_AHEAD, has_reached

STEPS, STEP_NS, BEGAN, _, HEAD = range(5)
DISPATCH_NS, DISPATCH_MAX, DISPATCH_WAITS, LATE_NS, COMBINE_NS, COMBINE_MAX, COMBINE_WAITS, FIELDS = range(8)


class Watch:
    """When this rank first saw what each rank has signalled.

    Args:
        own: int32, this rank's signal words.
        epoch: of the step.
        world_size: `W`.
        sent: the first word of a flag of `W` ranks; seen once it has reached `epoch`.
        entered: the same, for an earlier one; None for `sent`.
        most: by how much they may be ahead of `epoch`. Where not all epochs raise them, one of long ago may seem to be.
    """

    def __init__(
        self,
        own: torch.Tensor,
        epoch: int,
        world_size: int,
        sent: int,
        entered: int | None = None,
        *,
        most: int = ANY_AHEAD,
    ) -> None:
        self._own, self._epoch, self._world, self._most = own, epoch, world_size, most
        self._words = {"sent": sent, "entered": sent if entered is None else entered}
        self._seen: dict[str, list[int]] = {name: [0] * world_size for name in self._words}
        self.began = time.monotonic_ns()
        self.look()

    def look(self) -> None:
        """Note what has come since the last look."""
        now = time.monotonic_ns()
        for name, first in self._words.items():  # in this order: who has sent has entered
            values = self._own[first : first + self._world].tolist()
            for rank, value in enumerate(values):
                if not self._seen[name][rank] and has_reached(value, self._epoch, self._most):
                    self._seen[name][rank] = now

    @property
    def sent(self) -> list[int]:
        return self._seen["sent"]

    def waited(self, rank: int) -> list[int]:
        """Nanoseconds for each rank, by `rank`."""
        return [max(at - self.sent[rank], 0) for at in self.sent]

    def late(self, rank: int) -> list[int]:
        """Which of them came before the peer had entered."""
        parts = zip(self.waited(rank), self.sent, self._seen["entered"], strict=True)
        return [max(waited - (sent - entered), 0) for waited, sent, entered in parts]


def count_dispatch_waits(words: torch.Tensor, watch: Watch, rank: int, epoch: int) -> None:
    """Count a dispatch in which all flags have been seen."""
    words[BEGAN + (epoch & 1)] = watch.began
    rows = words[HEAD:].view(-1, FIELDS)
    _count(rows[:, DISPATCH_NS : DISPATCH_WAITS + 1], watch.waited(rank))
    rows[:, LATE_NS] += torch.tensor(watch.late(rank), device=words.device)


def count_combine_waits(words: torch.Tensor, watch: Watch, rank: int, epoch: int) -> None:
    """Count a combine, and with it the step, in which all flags have been seen."""
    words[STEPS] += 1
    words[STEP_NS] += max(watch.sent) - int(words[BEGAN + (epoch & 1)])
    _count(words[HEAD:].view(-1, FIELDS)[:, COMBINE_NS : COMBINE_WAITS + 1], watch.waited(rank))


def _count(sum_max_waits: torch.Tensor, waited: list[int]) -> None:
    added = torch.tensor(waited, device=sum_max_waits.device)
    sum_max_waits[:, 0] += added
    sum_max_waits[:, 1] = torch.maximum(sum_max_waits[:, 1], added)
    sum_max_waits[:, 2] += added > 0
