"""How a layer follows the ranks of its group when one dies or comes back: which experts each rank holds from then on.

Ranks are named by their numbers at the start, unless a text says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from moe_runtime.comm.errors import ExpertsLostError
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.expert_slots import put, with_slots
from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.lost_experts import LostExperts
from moe_runtime.placement.physical_experts import SlotTable
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.refill import missing_experts, refill

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holding:
    """What a layer holds at a time.

    Attributes:
        placement: which rank holds which experts; None is contiguous ids, each once.
        slots: the table of the placement; None without one.
        experts: this rank's weights; None before they are loaded.
    """

    placement: Placement | None
    slots: SlotTable | None
    experts: Experts | None


class LayerMembers:
    """The ranks of a layer, and what each of them holds. Owned by the layer, which passes in what it holds.

    Args:
        context: of the layer.
        layer_id: of the layer.
        num_experts: `E`.
        placement: that of the start, of all ranks.

    Attributes:
        began_placed: whether the layer was made with a placement.
        lost: experts that died with their last rank and are still loaded again; None where there are none.
        reload: loads the experts of these ids again; None where they came from the caller.
    """

    def __init__(
        self, context: ExpertParallelContext, layer_id: int, num_experts: int, placement: Placement | None
    ) -> None:
        self.began_placed = placement is not None
        self.lost: LostExperts | None = None
        self.reload: Callable[[Sequence[int]], Experts] | None = None
        self._context, self._layer_id, self._num_experts = context, layer_id, num_experts
        self._members = context.members
        self._start = _held(placement, num_experts, context.world_size)
        self._without_expert = torch.zeros(2, dtype=torch.int64, device=context.device)

    @property
    def without_expert(self) -> tuple[int, int]:
        """As `MoELayer.without_expert`."""
        choices, tokens = self._without_expert.tolist()
        return choices, tokens

    def without_lost(
        self, lost: LostExperts, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing of a step while there are `lost` experts. Waits, or drops and counts choices (`LostExperts`)."""
        if lost.ended():
            self.lost = None
            return topk_idx, topk_weights
        topk_idx, topk_weights, counts = lost.without(topk_idx, topk_weights)
        self._without_expert += counts
        return topk_idx, topk_weights

    def check(self, members: tuple[int, ...], now: Placement | None) -> None:
        """Raise `ExpertsLostError` if experts that none of `members` holds cannot be loaded."""
        lost = missing_experts(self.held_by(members, now), self._num_experts)
        if lost and self.reload is None:
            raise ExpertsLostError(
                f"layer {self._layer_id}: no rank that is left holds expert {', '.join(map(str, lost))}, which did not "
                f"come from a checkpoint; ranks {', '.join(map(str, members))} are left"
            )

    def held_by(self, members: tuple[int, ...], now: Placement | None) -> list[list[int]]:
        """The experts that each of `members` holds, slot by slot, with the placement `now`.

        A rank that comes back holds what it held at the start. Then the others hold no more than they did there.
        """
        if self.lost is not None:
            present = self.lost.held
        else:
            present = _held(now, self._num_experts, len(self._members))
        held = dict(zip(self._members, present, strict=True))
        if set(members) <= held.keys():
            return [held[member] for member in members]
        if not self.began_placed:
            return [self._start[member] for member in members]
        return [held.get(member, self._start[member])[: len(self._start[member])] for member in members]

    def follow(self, members: tuple[int, ...], held: list[list[int]] | None, now: Holding) -> Holding:
        """What the layer holds with `members`, between whom the context has changed already.

        Experts that no rank holds begin to be loaded again, on a thread.

        Args:
            members: the ranks that are left, or with one that has come back.
            held: what each of them is to hold; None asks `held_by`.
            now: what the layer holds.
        """
        held = self.held_by(members, now.placement) if held is None else held
        self._members = members
        # Without a placement, and with less experts than ranks, one may have gone that had none: others keep theirs.
        if self.began_placed or held != _held(None, self._num_experts, len(members)):
            return self._take_over(held, now)
        self.lost = None
        return Holding(None, None, self._keep(now.experts, len(held[self._context.rank])))

    def _keep(self, experts: Experts | None, kept: int, added: int = 0) -> Experts | None:
        """As many slots as are `kept`, the first ones, and as are `added` behind them."""
        if experts is None or experts.num_experts == kept + added:
            return experts
        with torch.inference_mode(False):
            return with_slots(experts, kept, added)

    def _take_over(self, held: list[list[int]], now: Holding) -> Holding:
        """Go over to the placement in which each rank holds `held`, and begin to load the experts that none holds."""
        context, placement = self._context, refill(held, self._num_experts)
        slots = SlotTable(placement, context.device) if now.slots is None else now.slots
        with torch.inference_mode():
            slots.update(placement)
        self.lost = None
        lost = missing_experts(held, self._num_experts)
        kept = len(held[context.rank])
        if not lost:
            return Holding(placement, slots, self._keep(now.experts, kept))
        assert context.recovery is not None and now.experts is not None
        new = placement.rank_experts(context.rank)[kept:]
        me = context.members[context.rank]
        _LOG.warning("rank %d: layer %d: loads experts %s, which died", me, self._layer_id, new)
        with torch.inference_mode(False):
            experts = with_slots(now.experts, kept, len(new))
        loading = context.recovery.background.submit(self._load_again, experts, kept, new)
        self.lost = LostExperts(context, self._layer_id, lost, self._num_experts, held, loading)
        return Holding(placement, slots, experts)

    def _load_again(self, experts: Experts, first: int, ids: Sequence[int]) -> None:
        """On a thread: experts that died, into the slots of `experts` from `first` on."""
        assert self.reload is not None
        with torch.inference_mode():
            put(experts, range(first, first + len(ids)), self.reload(ids))


def _held(placement: Placement | None, num_experts: int, num_ranks: int) -> list[list[int]]:
    """The experts of each rank; without a placement contiguous ids."""
    if placement is None:
        return [list(range(*pair)) for pair in pairwise(expert_starts(num_experts, num_ranks))]
    return [list(placement.rank_experts(rank)) for rank in range(placement.num_ranks)]
