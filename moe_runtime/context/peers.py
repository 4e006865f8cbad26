"""How a rank that gives up aborts its peers, so that none waits for it, and how ranks agree before they change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from moe_runtime.comm.errors import (
    ErrorCode,
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    StepMismatchError,
    reason_of,
)
from moe_runtime.comm.messages import Scalar, optional, row, scalar, table, text
from moe_runtime.comm.rank_group import describe_ranks
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.reference import record_failure
from moe_runtime.resilience.recovery import is_recoverable

_RECORDED = {
    PeerTimeoutError: ErrorCode.TIMEOUT,
    PeerAbortedError: ErrorCode.ABORTED,
    StepMismatchError: ErrorCode.MISMATCH,
}
"""How the ranks of a host learn of errors of the link."""


def abort_peers(context: ExpertParallelContext, error: BaseException) -> None:
    """Abort the peers, with the reason of `error`. A rank without peers does nothing, and its context stays usable.

    Does nothing on a rank that has failed already, nor for an error after which survivors go on.
    """
    if context.world_size > 1 and (context.recovery is None or not is_recoverable(error)):
        context.abort(reason_of(error))


@contextmanager
def abort_peers_on_error(context: ExpertParallelContext) -> Iterator[None]:
    """Around work that may fail on some ranks only, such as reading their experts: an error inside aborts the peers."""
    try:
        yield
    except BaseException as error:
        abort_peers(context, error)
        raise


class collective_step:
    """Around work that peers wait for: raises what earlier steps recorded, and aborts the peers on an error inside.

    A rank without peers keeps its context: later steps read nothing of a step that was left half done. It keeps nothing
    of a block, so one may serve many.
    """

    # A class, and not `abort_peers_on_error`: a generator costs more host time.

    def __init__(self, context: ExpertParallelContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        context = self._context
        try:
            context._begin_step()
        except BaseException as error:
            abort_peers(context, error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            abort_peers(self._context, error)


def agree_on(context: ExpertParallelContext, proposal: Mapping[str, Scalar], problem: BaseException | None) -> None:
    """Compare proposals before anything changes: all ranks must want the same, and none may have a problem. Collective.

    Otherwise every rank raises, and may go on with its steps as before: a rank with a `problem` raises that, the others
    `PeerAbortedError`, and all ranks `ValueError` where proposals differ. `PeerTimeoutError` ends the group.
    """
    mine = [dict(proposal), None if problem is None else reason_of(problem)]
    read = row(table(scalar), optional(text))
    answers = [read(mine)]
    if context.group is not None:
        try:
            answers = context.group.gather("replace_experts", mine, read, timeout_s=context.timeout_s)
        except MoERuntimeError as error:
            # Peers that have got all answers may wait for this rank already.
            context.abort(reason_of(error), error)
            raise
    if problem is not None:
        raise problem
    for rank, (_, reason) in enumerate(answers):
        if reason is not None:
            raise PeerAbortedError(f"replace_experts: rank {rank} gave up: {reason}", rank, Phase.REPLACEMENT)
    for key, value in proposal.items():
        values = [answer.get(key, "not given") for answer, _ in answers]
        if any(other != value for other in values):
            raise ValueError(f"{key}: ranks disagree, {describe_ranks(values)}")


def exchange_failed(context: ExpertParallelContext, error: MoERuntimeError, phase: Phase, limit_s: float) -> Exception:
    """The error to raise where an exchange between hosts failed. The ranks of this host learn who did not come.

    Args:
        error: of the link.
        phase, limit_s: of the exchange.
    """
    if isinstance(error, PeerTimeoutError):
        error = context._traced(error)
    return failed_elsewhere(context, error, phase, limit_s)


def failed_elsewhere(context: ExpertParallelContext, error: MoERuntimeError, phase: Phase, limit_s: float) -> Exception:
    """`exchange_failed` for an `error` that a rank of another host has reported, which has traced it."""
    assert context.hosts is not None
    try:
        # A rank of this host may know better who is gone.
        context.check()
    except MoERuntimeError as known:
        context.abort(str(known), known)
        return known
    code = _RECORDED.get(type(error))
    # A GPU may still wait for that host: there the host tells the others (`abort`).
    if context.device.type == "cpu" and code is not None and error.rank >= 0:
        # The limit of a timeout. Of ranks in different exchanges the link does not know which these are.
        detail = -1 if code is ErrorCode.MISMATCH else min(int(limit_s * 1000), 2**31 - 1)
        record_failure(context.memory, code, context.hosts.recorded(error.rank), phase, int(context.epoch[0]), detail)
        context.fail(error)
    context.abort(str(error), error)
    return context.fail(error)
