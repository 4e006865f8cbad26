"""The errors that ranks record on the device and `ExpertParallelContext.check()` raises on the host."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """First word of an error record; 0 means that nothing happened."""

    NONE = 0
    ROUTING = 1
    CAPACITY = 2
    TIMEOUT = 3
    ABORTED = 4
    STALE_HANDLE = 5
    MISMATCH = 6
    EXPERT_CAPACITY = 7


class Phase(IntEnum):
    """The phase of a step in which an error was recorded."""

    START_UP = 0
    DISPATCH_SEND = 1
    DISPATCH_RECV = 2
    COMBINE_SEND = 3
    COMBINE_RECV = 4
    HOST = 5
    REPLACEMENT = 6
    """Experts move from rank to rank."""
    RECOVERY = 7
    """Survivors of a death load the experts that died."""


REFUSED_ID = 1 << 30
"""Added to an expert id that a placement refuses, so that dispatch refuses it too; messages subtract it again."""

NO_REASON = "no reason given"
"""What a `PeerAbortedError` says where a rank gave no reason."""


class MoERuntimeError(RuntimeError):
    """Base of errors between ranks. `rank` is the rank that it happened on, or that is missing."""

    def __init__(self, message: str, rank: int = -1, phase: Phase = Phase.HOST) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.rank, self.phase))


class RoutingError(MoERuntimeError):
    """An expert id was out of range, or twice in one token's top-k where that is not accepted, on rank `rank`."""


class CapacityError(MoERuntimeError):
    """More rows arrived on rank `rank` than its `expert_row_capacity`, or it has more tokens for one host than its
    `host_capacity`; or more rows for an expert than it has room for, where tokens may name an expert several times."""


class PeerTimeoutError(MoERuntimeError):
    """Rank `rank` did not answer in `phase` within the configured time."""


class PeerAbortedError(MoERuntimeError):
    """Rank `rank` gave up a collective step; the message carries its reason."""


class StoreLostError(MoERuntimeError):
    """The key-value store in which ranks meet on the host is gone, or does not answer any more.

    `rank` is the rank of the group whose process hosts it: rank 0 of the default group, where torch.distributed made
    the store from `MASTER_ADDR` and `MASTER_PORT`. It is -1 where that rank is not in the group, where torchrun's agent
    hosts the store, and where the program chose a store itself.
    """


class RankRemovedError(MoERuntimeError):
    """The other ranks have gone on without rank `rank`, this one: it did not come within their limit."""


class ExpertsLostError(MoERuntimeError):
    """Experts have died with their ranks, and nothing is there to replace them; the message names experts and layer."""


class StepMismatchError(MoERuntimeError):
    """Rank `rank` was in a step of another layer, or of another size, than the rank that got its tokens."""


class StaleHandleError(MoERuntimeError):
    """A dispatch handle was used after two later dispatches of its context had begun."""


def reason_of(error: BaseException) -> str:
    """The reason that peers get for an error: the text of a `ValueError`, else type and text.

    >>> reason_of(ValueError("x: expected a tensor")), reason_of(KeyError("w1"))
    ('x: expected a tensor', "KeyError: 'w1'")
    """
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def reason_given(error: PeerAbortedError) -> str:
    """Why the rank of `error` gave up; empty where the message does not say.

    >>> reason_given(PeerAbortedError("close: rank 1 gave up: x: expected a tensor", 1))
    'x: expected a tensor'
    """
    reason = str(error).partition(f"rank {error.rank} gave up: ")[2]
    return "" if reason == NO_REASON else reason
