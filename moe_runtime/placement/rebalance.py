"""Live re-placement (a rebalance of physical experts): experts move to other ranks between two steps.

Ranks agree on it before anything changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_runtime.comm.messages import Scalar
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import agree_on
from moe_runtime.experts import Experts
from moe_runtime.placement.migration import ExpertMover
from moe_runtime.placement.migration_plan import MigrationPlan, plan_migration
from moe_runtime.placement.placement import Placement
from moe_runtime.support.arguments import check_kind


@dataclass(frozen=True)
class Replacement:
    """What all ranks have agreed to move, and what moves it on this rank (`migration.move_experts`)."""

    plan: MigrationPlan
    mover: ExpertMover


def agree_on_replacement(
    context: ExpertParallelContext,
    layer_id: int,
    current: Placement | None,
    experts: Experts | None,
    placement: Placement,
) -> Replacement:
    """Agree with all ranks to bring the experts of layer `layer_id` from `current` to `placement`. Collective.

    Raises as `MoELayer.replace_experts` where ranks do not agree; nothing has changed then.
    """
    context.allocate()
    context._raise_failure()
    replacement: Replacement | None = None
    proposal: dict[str, Scalar] = {}
    problem: BaseException | None = None
    try:
        replacement = _plan(context, current, experts, placement)
        layout = replacement.mover.layout
        proposal = {"layer": layer_id, "placement": placement.fingerprint, "experts": str(layout)}
    except BaseException as error:
        problem = error
    agree_on(context, proposal, problem)
    assert replacement is not None
    return replacement


def check_replacement(current: Placement | None, placement: Placement) -> Placement:
    """`current`, if a layer can go over from it to `placement`; else `ValueError`."""
    check_kind("placement", placement, Placement)
    if current is None:
        raise ValueError("placement: the layer was made without one; give it Placement.contiguous(...) or another")
    if placement.sizes != current.sizes:
        raise ValueError(f"placement: expected {current.sizes}, got {placement.sizes}")
    return current


def _plan(
    context: ExpertParallelContext, current: Placement | None, experts: Experts | None, placement: Placement
) -> Replacement:
    old = check_replacement(current, placement)
    if experts is None:
        raise ValueError("experts: no weights are loaded")
    plan = plan_migration(old, placement, context.heap.world_size)
    return Replacement(plan, ExpertMover(context, experts, plan))
