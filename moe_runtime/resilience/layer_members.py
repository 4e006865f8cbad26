"""How a layer follows the ranks of its group when one dies or comes back: which experts each rank holds from then on.

Ranks are named by their numbers at the start, unless a text says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from moe_runtime.comm.errors import ExpertsLostError, Phase, reason_of
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.expert_slots import empty_slots, put, with_slots
from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.placement.migration import ExpertMover, move_experts
from moe_runtime.placement.migration_plan import MigrationPlan, Round
from moe_runtime.placement.physical_experts import SlotTable
from moe_runtime.placement.placement import Placement
from moe_runtime.resilience.lost_experts import LostExperts
from moe_runtime.resilience.refill import missing_experts, plan_copies, refill

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
        placement: with which the layer began, of all ranks.

    Attributes:
        placement: the present one, as the layer has it.
        began_placed: whether the layer was made with a placement.
        began_whole: whether all ranks were in when the layer was made. Otherwise no rank that is out can come back.
        lost: experts that died with their last rank and are still loaded again; None where there are none.
        reload: loads the experts of these ids again; None where they came from the caller.
    """

    def __init__(
        self, context: ExpertParallelContext, layer_id: int, num_experts: int, placement: Placement | None
    ) -> None:
        self.placement, self.began_placed = placement, placement is not None
        self.began_whole = "out" not in context.rank_states.values()
        self.lost: LostExperts | None = None
        self.reload: Callable[[Sequence[int]], Experts] | None = None
        self._context, self._layer_id, self._num_experts = context, layer_id, num_experts
        self._members = context.members
        self._unsettled: list[list[int]] | None = None
        self._start = _held(placement, num_experts, context.world_size)
        self._without_expert = torch.zeros(2, dtype=torch.int64, device=context.device)

    @property
    def without_expert(self) -> tuple[int, int]:
        """As `MoELayer.without_expert`."""
        choices, tokens = self._without_expert.tolist()
        return choices, tokens

    def take_weights(self, reload: Callable[[Sequence[int]], Experts] | None) -> None:
        """All experts of this rank have been loaded anew; `reload` as the attribute."""
        self.reload = reload
        if self.lost is not None:
            self.lost.take_as_loaded()

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

    def check(self, members: tuple[int, ...]) -> None:
        """Raise `ExpertsLostError` if experts that none of `members` holds cannot be loaded."""
        lost = missing_experts(self.held_by(members), self._num_experts)
        if lost and self.reload is None:
            raise self._lost(lost, members, "which did not come from a checkpoint")

    def check_reload(self, members: tuple[int, ...]) -> None:
        """As `check`, and try whether this rank can still read where experts that none of `members` holds came from."""
        self.check(members)
        lost = missing_experts(self.held_by(members), self._num_experts)
        if lost and self.reload is not None:
            try:
                self.reload(())
            except Exception as error:
                raise self._lost(lost, members, f"which cannot be loaded again: {reason_of(error)}") from error

    def _lost(self, experts: Sequence[int], members: tuple[int, ...], why: str) -> ExpertsLostError:
        return ExpertsLostError(
            f"layer {self._layer_id}: no rank that is left holds expert {', '.join(map(str, experts))}, {why}; ranks "
            f"{', '.join(map(str, members))} are left"
        )

    def present(self) -> list[list[int]]:
        """The experts that each current rank holds for sure, slot by slot."""
        return self._all_held() if self.lost is None or self._unsettled is not None else self.lost.held

    def settled(self) -> list[list[int]] | None:
        """The experts that each current rank holds, with those that were loaded again; None until all have them."""
        return self._all_held() if self.lost is None or self.lost.all_loaded() else None

    def _all_held(self) -> list[list[int]]:
        """`present`, and what is loaded again."""
        if self._unsettled is not None:
            return self._unsettled
        return _held(self.placement, self._num_experts, len(self._members))

    def expect(self, members: tuple[int, ...]) -> dict[int, list[int]]:
        """Plan for `members`, some of them rejoining. Returns the experts of each previous rank, slot by slot.

        Some ranks may have gone over to `members`, and others not, when another rank dies. Until `settle` all of them
        therefore count on what `held_by` says now, and not on more that they have got since. Ranks come back only where
        `settled` says what all ranks hold.
        """
        before = dict(zip(self._members, self._all_held(), strict=True))
        self._members, self._unsettled = members, self.held_by(members)
        return before

    def settle(self) -> None:
        """Count on all that ranks have got: every one of them has gone over."""
        self._unsettled = None

    def take_as_present(self, members: tuple[int, ...], present: list[list[int]]) -> None:
        """In a process that comes back: `members`, to whom it comes, hold these experts."""
        self._members, self._unsettled = members, present

    def held_by(self, members: tuple[int, ...]) -> list[list[int]]:
        """The experts that each of `members` holds, slot by slot.

        A rank that comes back holds what it held at the start. Then the others hold no more than they did there.
        """
        held = dict(zip(self._members, self.present(), strict=True))
        if set(members) <= held.keys():
            return [held[member] for member in members]
        if not self.began_placed:
            return [self._start[member] for member in members]
        return [held.get(member, self._start[member])[: len(self._start[member])] for member in members]

    def follow(self, members: tuple[int, ...], before: Mapping[int, Sequence[int]] | None, now: Holding) -> Holding:
        """What the layer holds with `members`, between whom the context has changed already.

        Experts that no rank holds begin to be loaded again, on a thread.

        Args:
            members: the ranks that are left, or with some that have come back.
            before: where some have come back, what `expect` has returned: experts come from there. Collective then.
            now: what the layer holds.

        Raises `PeerTimeoutError` if a rank dies while experts come from it or go to it; nothing has changed then.
        """
        held, rank = self.held_by(members), self._context.rank
        self._members = members
        # Without a placement, and with fewer experts than ranks, one may have gone that had none: others keep theirs.
        placed = self.began_placed or held != _held(None, self._num_experts, len(members))
        placement = refill(held, self._num_experts) if placed else None
        lost: tuple[int, ...] = ()
        if before is not None:
            experts = self._with_copies(now.experts, held, placement, before)
        else:
            self._unsettled = None
            lost = missing_experts(held, self._num_experts)
            added = 0 if placement is None or not lost else placement.slots_per_rank - len(held[rank])
            experts = self._with_slots(now.experts, len(held[rank]), added)
        if self.lost is not None:
            self.lost.cancel()
        self.lost, self.placement = None, placement
        if placement is None:
            return Holding(None, None, experts)
        slots = SlotTable(placement, self._context.device) if now.slots is None else now.slots
        self._context.has_placement = True
        with torch.inference_mode():
            slots.update(placement)
        if lost:
            self._begin_to_load(experts, held, lost, placement)
        return Holding(placement, slots, experts)

    def _with_slots(self, experts: Experts | None, kept: int, added: int) -> Experts | None:
        """The first `kept` slots, and `added` ones behind them in new memory."""
        if experts is None or (not added and experts.num_experts == kept):
            return experts
        with torch.inference_mode(False):
            return with_slots(experts, kept, added)

    def _with_copies(
        self,
        experts: Experts | None,
        held: list[list[int]],
        placement: Placement | None,
        before: Mapping[int, Sequence[int]],
    ) -> Experts | None:
        """The experts of this rank, those that it does not hold as copies of others, which come over the heap.

        Args:
            experts: of this rank, before; none of them in a process that comes back.
            held: experts of each rank, those included that ranks which come back are to hold.
            placement: what all ranks hold then; None for `held`.
            before: experts of each previous rank, by its original id.
        """
        context, members = self._context, self._members
        wanted = _held(placement, self._num_experts, len(members))
        kept = [len(held[number]) if member in before else 0 for number, member in enumerate(members)]
        copies = plan_copies(wanted, kept, {members.index(member): ids for member, ids in before.items()})
        if experts is None:
            return None
        mine = len(wanted[context.rank])
        if members[context.rank] in before:
            into = self._with_slots(experts, kept[context.rank], mine - kept[context.rank])
            assert into is not None
        else:
            with torch.inference_mode(False):
                experts = into = empty_slots(experts, mine)
        plan = MigrationPlan(len(members), (Round((), copies),))
        with torch.inference_mode():
            move_experts([ExpertMover(context, experts, plan, into=into, phase=Phase.RECOVERY)], plan)
        came = [copy for copy in copies if copy.target_rank == context.rank]
        if came:
            givers = sorted({members[copy.source_rank] for copy in came})
            text = "rank %d: layer %d: %d experts came from rank %s"
            _LOG.info(text, members[context.rank], self._layer_id, len(came), ", ".join(map(str, givers)))
        return into

    def _begin_to_load(
        self, experts: Experts | None, held: list[list[int]], lost: tuple[int, ...], placement: Placement
    ) -> None:
        """Load the experts that no rank holds into the slots behind those that this rank keeps, on a thread."""
        context = self._context
        assert context.recovery is not None and experts is not None and self.reload is not None
        kept = len(held[context.rank])
        new = placement.rank_experts(context.rank)[kept:]
        me = context.members[context.rank]
        _LOG.warning("rank %d: layer %d: loads experts %s, which died", me, self._layer_id, new)
        loading = context.recovery.background.submit(self._load_again, self.reload, experts, kept, new)
        self.lost = LostExperts(context, self._layer_id, lost, self._num_experts, held, loading)

    @staticmethod
    def _load_again(
        reload: Callable[[Sequence[int]], Experts], experts: Experts, first: int, ids: Sequence[int]
    ) -> None:
        """On a thread: experts that died, into the slots of `experts` from `first` on."""
        with torch.inference_mode():
            put(experts, range(first, first + len(ids)), reload(ids))


def _held(placement: Placement | None, num_experts: int, num_ranks: int) -> list[list[int]]:
    """The experts of each rank; without a placement contiguous ids."""
    if placement is None:
        return [list(range(*pair)) for pair in pairwise(expert_starts(num_experts, num_ranks))]
    return [list(placement.rank_experts(rank)) for rank in range(placement.num_ranks)]
