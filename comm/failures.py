"""Turns error records and abort words into exceptions, which read the same on the failing rank and on its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_runtime.comm.errors import (
    NO_REASON,
    REFUSED_ID,
    CapacityError,
    ErrorCode,
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    RoutingError,
    StaleHandleError,
    StepMismatchError,
)
from moe_runtime.comm.signals import ABORT_WORDS, REASON_WORDS, SignalLayout


def describe_failure(
    code: int,
    about: int,
    phase: int,
    epoch: int,
    details: tuple[int, int],
    origin: int,
    *,
    reason: str,
    placed: bool = False,
) -> MoERuntimeError:
    """The exception for one failure that rank `origin` recorded about rank `about`.

    `details` are, by code: ROUTING (expert id, plus `REFUSED_ID` if a placement refused it; token), CAPACITY (rows
    arrived or, of dispatch_send, tokens for one host; capacity), TIMEOUT (limit in ms, -), MISMATCH (numbers of its
    exchange and of rank `origin`'s; -1 where these are not known). `placed`: whether there is a placement.
    """
    step = Phase(phase) if phase in list(Phase) else Phase.HOST
    where = f"rank {origin}, {step.name.lower()} of epoch {epoch}"
    if code == ErrorCode.ROUTING:
        # A placement refuses ids of at most half of it, either way.
        refused = placed and REFUSED_ID // 2 <= details[0] < REFUSED_ID + REFUSED_ID // 2
        expert = details[0] - REFUSED_ID if refused else details[0]
        text = f"expert id {expert} of token {details[1]} of rank {about} is out of range or twice in its top-k"
        return RoutingError(f"{where}: {text}", about, step)
    if code == ErrorCode.CAPACITY:
        text = f"{details[0]} rows arrived at rank {about}, more than its expert_row_capacity of {details[1]}"
        if step is Phase.DISPATCH_SEND:
            text = f"{details[0]} tokens of rank {about} go to one host, more than its host_capacity of {details[1]}"
        return CapacityError(f"{where}: {text}", about, step)
    if code == ErrorCode.EXPERT_CAPACITY:
        text = f"{details[0]} rows arrived for one expert of rank {about}, which has room for {details[1]}"
        return CapacityError(f"{where}: {text}", about, step)
    if code == ErrorCode.TIMEOUT:
        return PeerTimeoutError(f"{where}: rank {about} did not answer within {details[0] / 1000:g} s", about, step)
    if code == ErrorCode.MISMATCH:
        text = f"rank {about} was in exchange {details[0]} of the context, rank {origin} in {details[1]}"
        if details[0] < 0:
            text = f"rank {about} was in another exchange, or another part of one, than rank {origin}"
        text += ": all ranks have to call the same layers in the same order, with equal max_tokens"
        return StepMismatchError(f"{where}: {text}", about, step)
    if code == ErrorCode.STALE_HANDLE:
        return StaleHandleError(f"{where}: its handle was used after two later dispatches had begun", about, step)
    if code == ErrorCode.ABORTED:
        return PeerAbortedError(f"{where}: rank {about} gave up: {reason or NO_REASON}", about, step)
    return MoERuntimeError(f"{where}: unknown error code {code} about rank {about}, {details}", about, step)


def find_failure(
    record: Sequence[int],
    aborts: Sequence[Sequence[int]],
    reason_of: Callable[[int], str],
    named: Callable[[int], int] = lambda rank: rank,
    *,
    placed: bool = False,
) -> MoERuntimeError | None:
    """The failure in a rank's error `record` (`ERROR_WORDS`) and all ranks' abort words `[W][ABORT_WORDS]`, or None.

    A rank that stopped only because a peer raised its abort flag records ABORTED; the failure is then the peer's. Among
    several abort words a first cause precedes a mere ABORTED, then the lowest rank. `named` gives the rank that a
    number in them stands for. `placed` is that of `describe_failure`.
    """
    code, about, phase, epoch, detail, origin, detail2 = record[:7]
    aborted = [rank for rank, words in enumerate(aborts) if words[0]]
    if aborted and code in (ErrorCode.NONE, ErrorCode.ABORTED):
        peer = min(aborted, key=lambda rank: (aborts[rank][0] == ErrorCode.ABORTED, aborts[rank][3] != rank, rank))
        code, phase, epoch, about, detail, detail2, reported_by = aborts[peer][:7]
        origin = reported_by - 1 if reported_by else peer
    if code == ErrorCode.NONE:
        return None
    reason = reason_of(about) if code == ErrorCode.ABORTED else ""
    details = detail, detail2
    return describe_failure(code, named(about), phase, epoch, details, named(origin), reason=reason, placed=placed)


def encode_abort(message: torch.Tensor, rank: int, reason: str) -> None:
    """Fill `message`, int32 `[ABORT_WORDS + REASON_WORDS]`, with the words of a rank that gives up on the host."""
    message.zero_()
    message[:4] = torch.tensor([ErrorCode.ABORTED, Phase.HOST, 0, rank], dtype=torch.int32, device="cpu")
    # A file name may hold bytes that are not text.
    text = reason.encode(errors="replace")[: 4 * REASON_WORDS]
    if text:
        message[ABORT_WORDS:].view(torch.uint8)[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")


def write_abort(message: torch.Tensor, of_ranks: Sequence[torch.Tensor], layout: SignalLayout, rank: int) -> None:
    """Copy `message` into `rank`'s words of the signals of each rank, without waiting.

    Reasons go first, to all ranks, since a rank that sees a code passes it on. Each code goes last.
    """
    abort = layout.abort + ABORT_WORDS * rank
    reason = layout.reason + REASON_WORDS * rank
    for signals in of_ranks:
        signals[reason : reason + REASON_WORDS].copy_(message[ABORT_WORDS:], non_blocking=True)
    for signals in of_ranks:
        signals[abort + 1 : abort + ABORT_WORDS].copy_(message[1:ABORT_WORDS], non_blocking=True)
        signals[abort : abort + 1].copy_(message[:1], non_blocking=True)


def abort_words(signals: torch.Tensor, layout: SignalLayout) -> torch.Tensor:
    """The abort words of all ranks in `signals`, int32 `[W, ABORT_WORDS]` (a view)."""
    return signals[layout.abort : layout.reason].view(layout.world_size, ABORT_WORDS)


def reason_text(signals: torch.Tensor, layout: SignalLayout, rank: int) -> str:
    """The reason that `rank` gave, without an incomplete last character."""
    start = layout.reason + REASON_WORDS * rank
    words = signals[start : start + REASON_WORDS].cpu().contiguous()
    return bytes(words.view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="ignore")
