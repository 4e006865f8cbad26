"""Experts that died with their last rank, until survivors have loaded them: steps wait for them, or do without."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from moe_runtime.comm.errors import PeerTimeoutError, Phase
from moe_runtime.comm.messages import integer
from moe_runtime.context.expert_parallel import ExpertParallelContext

_LOG = logging.getLogger(__name__)

POLL_S = 0.01


class LostExperts:
    """The experts of a layer that no rank holds, while ranks load them. Made alike on every rank.

    Args:
        context: with a recovery.
        layer_id: of the layer.
        experts: their ids.
        num_experts: experts of the layer.
        held: what each rank holds meanwhile.
        loading: of this rank's part; its result is unimportant.

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
        self._announced = False
        self._began = time.monotonic()

    def ended(self) -> bool:
        """Whether all ranks have their experts from this step on: equal on all of them. Called in each step.

        With `wait` it waits until they have. Raises what went wrong in loading, and `PeerTimeoutError` naming a rank
        that has not loaded within `startup_timeout_s`.
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

    def _all_have(self) -> bool:
        limit_s = self._context.startup_timeout_s
        while absent := self._absent():
            self._context._raise_failure()
            if self._seconds > limit_s:
                number = self._context.members.index(absent[0])
                message = f"{self._name}: rank {number} has not loaded its new experts within {limit_s:g} s"
                raise PeerTimeoutError(message, number, Phase.RECOVERY)
            time.sleep(POLL_S)
        return True

    def _agreed(self) -> bool:
        """Rank 0 decides from which step on; a step that ends on any rank ended after that was written."""
        membership, number = self._recovery.membership, self._recovery.step_number
        first = membership.get(f"{self._name} complete", integer(0))
        if first is None and not self._absent() and self._context.rank == 0:
            membership.put(f"{self._name} complete", number + 1)
        return first is not None and number >= first

    def _absent(self) -> list[int]:
        """Ranks that have not loaded theirs."""
        membership, event = self._recovery.membership, f"{self._name} loaded"
        if self._loading.done() and not self._announced:
            self._loading.result()
            membership.announce(event)
            self._announced = True
        return membership.absent(event)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began
