"""How ranks learn that one of them cannot go on: in one wording, at once, whatever it was interrupted by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from moe_runtime.comm.bootstrap import describe_ranks
from moe_runtime.context import ExpertParallelContext
from moe_runtime.errors import MoERuntimeError, PeerAbortedError, Phase, reason_of


def abort_peers(context: ExpertParallelContext, error: BaseException) -> None:
    """Tell the peers that this rank gives up. A rank without peers has no one to leave behind, and keeps its context.

    Does nothing on a rank that has failed already.
    """
    if context.world_size > 1:
        context.abort(reason_of(error))


@contextmanager
def abort_peers_on_error(context: ExpertParallelContext) -> Iterator[None]:
    """Around what only some ranks may fail at, such as reading their experts: the peers are told of an error within."""
    try:
        yield
    except BaseException as error:
        abort_peers(context, error)
        raise


@contextmanager
def collective_step(context: ExpertParallelContext) -> Iterator[None]:
    """Around work that peers wait for: raises what earlier steps recorded, and tells the peers of an error within.

    A rank without peers keeps its context: of a step that was left half done, later ones read nothing.
    """
    context.allocate()
    context.check()
    context.follow_stream()
    # Not `abort_peers_on_error`: another context manager in each part of a step takes time of the host.
    try:
        yield
    except BaseException as error:
        abort_peers(context, error)
        raise


def agree_on(context: ExpertParallelContext, proposal: Mapping[str, object], problem: BaseException | None) -> None:
    """Find out together, before anything changes, whether all ranks want the same and none has a problem.

    Raises on every rank, each of which may go on with its steps as before: the `problem` where it is,
    `PeerAbortedError` elsewhere, and `ValueError` where proposals differ. `PeerTimeoutError` ends the group.
    """
    text = None if problem is None else reason_of(problem)
    answers = [(proposal, text)]
    if context.group is not None:
        try:
            answers = context.group.gather("replace_experts", (proposal, text), timeout_s=context.timeout_s)
        except MoERuntimeError as error:
            raise context.fail(error) from None
    if problem is not None:
        raise problem
    for rank, (_, reason) in enumerate(answers):
        if reason is not None:
            raise PeerAbortedError(f"replace_experts: rank {rank} gave up: {reason}", rank, Phase.REPLACEMENT)
    for key, value in proposal.items():
        values = [answer[key] for answer, _ in answers]
        if any(other != value for other in values):
            raise ValueError(f"{key}: ranks disagree, {describe_ranks(values)}")
