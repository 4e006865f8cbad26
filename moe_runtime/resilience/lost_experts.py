"""Experts that died with their last rank, until survivors have loaded them: steps wait for them, or do without."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NoReturn

import torch

from moe_runtime.comm.errors import ExpertsLostError, PeerTimeoutError, Phase, reason_of
from moe_runtime.comm.messages import integer, row, text
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.resilience.membership import Membership

_LOG = logging.getLogger(__name__)

POLL_S = 0.01
BEAT_S = 0.1
"""How often a rank that waits says so."""


class LostExperts:
    """The experts of a layer that no rank holds, while ranks load them. Made alike on every rank.

    Args:
        context: with a recovery.
        layer_id: of the layer.
        experts: their ids.
        num_experts: experts of the layer.
        held: what each rank holds meanwhile.
        loading: that of this rank's part; its result does not matter.

    Attributes:
        held: as given.
    """

    def __init__(
        self,
        context: ExpertParallelContext,
        layer_id: int,
        experts: Sequence[int],
        num_experts: int,
        held: list[list[int]],
        loading: Future[None],
    ) -> None:
        assert context.recovery is not None
        self.held = held
        self._context, self._recovery = context, context.recovery
        self._name = f"layer {layer_id}"
        self._ids = tuple(experts)
        self._lost = torch.zeros(num_experts, dtype=torch.bool, device=context.device)
        self._lost[list(experts)] = True
        self._loading = loading
        self._answered = False
        self._why_not: dict[int, str] = {}
        self._began = time.monotonic()

    def ended(self) -> bool:
        """Whether all ranks have their experts from this step on: equal on all of them. Called in each step.

        With `wait` it waits until they have.

        Raises:
            ExpertsLostError: a rank cannot load its part; on all ranks, for which the group ends.
            PeerTimeoutError: in a phase that survivors recover from, naming a rank that is missed; in another one, with
                which the group ends, naming a rank that is there and has not loaded within `startup_timeout_s`.
        """
        ended = self._all_have() if self._context.lost_experts == "wait" else self._agreed()
        if ended:
            _LOG.warning("%s: experts %s are loaded, after %.1f s", self._name, self._ids, self._seconds)
        return ended

    def without(
        self, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The routing over the experts that remain: choices of lost ones become -1.

        The weights of a token's other choices grow by one factor, so that their sum stays. A token without any other
        choice gets no expert. Nothing waits for the host.

        Args:
            topk_idx: `[T, K]`, -1 for none.
            topk_weights: fp32 `[T, K]`.

        Returns:
            Both anew, and int64 `[2]`: how many choices went, and how many tokens had one of them.
        """
        known = (topk_idx >= 0) & (topk_idx < self._lost.numel())
        gone_TK = self._lost[topk_idx.clamp(0, self._lost.numel() - 1).long()] & known
        before_T = torch.where(known, topk_weights, 0.0).sum(1, keepdim=True)
        after_T = torch.where(known & ~gone_TK, topk_weights, 0.0).sum(1, keepdim=True)
        grown_TK = torch.where(gone_TK, 0.0, topk_weights * (before_T / after_T))
        some_T = gone_TK.any(1, keepdim=True)
        weights_TK = torch.where(some_T & (after_T != 0), grown_TK, topk_weights)
        return torch.where(gone_TK, -1, topk_idx), weights_TK, torch.stack([gone_TK.sum(), some_T.sum()])

    def all_loaded(self) -> bool:
        """Whether all ranks have said that they have their experts. Says so for this one; waits for nobody."""
        return not self._absent() and not any(self._why_not.values())

    def take_as_loaded(self) -> None:
        """This rank has got its experts otherwise."""
        self._loading.cancel()
        self._loading = Future()
        self._loading.set_result(None)

    def cancel(self) -> None:
        """Do not begin to load any more: the ranks have changed, and this object is not asked again."""
        self._loading.cancel()

    def _all_have(self) -> bool:
        context, membership = self._context, self._recovery.membership
        began, limit_s = time.monotonic(), context.startup_timeout_s
        roll = _Roll(membership, f"{self._name} waits", began, context.timeout_s, limit_s)
        while absent := self._absent():
            self._raise_why_not()
            context._raise_failure()
            if membership.leaving():
                raise PeerTimeoutError(f"{self._name}: a rank is missed in a step", -1, Phase.RECOVERY)
            now = time.monotonic()
            others = [rank for rank in absent if rank != membership.rank]
            if missed := roll.missed(others, now):
                number = membership.members.index(missed[0])
                message = f"{self._name}: rank {number} is missed while experts are loaded again"
                raise PeerTimeoutError(message, number, Phase.RECOVERY)
            if now - began > limit_s:
                number = membership.members.index((others or absent)[0])
                message = f"{self._name}: rank {number} has not loaded experts that died within {limit_s:g} s"
                raise PeerTimeoutError(message, number, Phase.HOST)
            time.sleep(POLL_S)
        self._raise_why_not()
        return True

    def _agreed(self) -> bool:
        """Rank 0 decides from which step on; a step that ends on any rank ended after that was written."""
        membership, number = self._recovery.membership, self._recovery.step_number
        decision = membership.get(f"{self._name} complete", row(integer(0), text))
        if decision is None:
            absent = self._absent()
            if self._context.rank == 0 and (self._trouble or not absent):
                membership.put(f"{self._name} complete", [number + 1, self._trouble])
            return False
        first, trouble = decision
        if number >= first and trouble:
            self._end(trouble)
        return number >= first

    def _absent(self) -> list[int]:
        """Ranks that have not said yet whether they have loaded theirs. Says so for this one."""
        membership, event = self._recovery.membership, f"{self._name} loaded"
        if self._loading.done() and not self._answered:
            error = self._loading.exception()
            membership.put(f"{event}/{membership.rank}", "" if error is None else reason_of(error) or "no reason")
            self._answered = True
        for rank in membership.members:
            if rank not in self._why_not and (why := membership.get(f"{event}/{rank}", text)) is not None:
                self._why_not[rank] = why
        return [rank for rank in membership.members if rank not in self._why_not]

    @property
    def _trouble(self) -> str:
        """Why a rank cannot load its part, as far as ranks have said so; empty if none has."""
        members = self._recovery.membership.members
        return next((f"rank {members.index(rank)}: {why}" for rank, why in self._why_not.items() if why), "")

    def _raise_why_not(self) -> None:
        if trouble := self._trouble:
            self._end(trouble)

    def _end(self, trouble: str) -> NoReturn:
        """All ranks come here, so none has to tell the others."""
        ids = ", ".join(map(str, self._ids))
        error = ExpertsLostError(f"{self._name}: expert {ids} died, and cannot be loaded again: {trouble}")
        self._context._end(error)
        raise error from (self._loading.exception() if self._loading.done() else None)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began


class _Roll:
    """Which ranks are in the same wait as this one: each counts in the store while it is.

    Args:
        membership: of the ranks.
        event: names the wait.
        began: when it began here.
        timeout_s: how long a rank that has come may be silent.
        first_s: how long one may take to come.
    """

    def __init__(self, membership: Membership, event: str, began: float, timeout_s: float, first_s: float) -> None:
        self._membership, self._event, self._timeout_s, self._first_s = membership, event, timeout_s, first_s
        self._began = self._next = began
        self._count = 0
        self._seen: dict[int, tuple[int, float]] = {}

    def missed(self, ranks: Sequence[int], now: float) -> list[int]:
        """Those of `ranks`, other ones, that are silent for too long. Counts for this one."""
        if now >= self._next:
            self._next, self._count = now + BEAT_S, self._count + 1
            self._membership.put(f"{self._event}/{self._membership.rank}", self._count)
            for rank in ranks:
                count = self._membership.get(f"{self._event}/{rank}", integer(0))
                if count is not None and count != self._seen.get(rank, (-1, 0.0))[0]:
                    self._seen[rank] = count, now
        return [rank for rank in ranks if now - self._last(rank) > self._limit(rank)]

    def _last(self, rank: int) -> float:
        return self._seen[rank][1] if rank in self._seen else self._began

    def _limit(self, rank: int) -> float:
        return self._timeout_s if rank in self._seen else self._first_s
