"""Live re-placement: between two steps experts change their ranks, or every rank raises; no step runs halfway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moe_runtime.errors import reason_of
from moe_runtime.mover import ExpertMover, move_experts
from moe_runtime.moves import SPARE, Move, plan_moves
from moe_runtime.peers import agree_on
from moe_runtime.placement import Placement

if TYPE_CHECKING:
    from moe_runtime.layer import MoELayer


@torch.inference_mode()  # weights that were loaded in this mode may not be changed outside it
def replace_experts(layers: Sequence[MoELayer], placement: Placement) -> None:
    """Bring the experts of one layer to `placement`. Collective; see `MoELayer.replace_experts`.

    `layers` are those of the ranks that live in this process: one, or one for each virtual rank.
    """
    context = layers[0].context
    for layer in layers:
        layer.context.allocate()
        layer.context.check()
    moves: list[Move] = []
    movers: list[ExpertMover] = []
    proposal: dict[str, object] = {}
    problem: BaseException | None = None
    try:
        moves = _moves_of(layers[0], placement)
        movers = [_mover_of(layer, moves) for layer in layers]
        proposal = {
            "layer": layers[0].layer_id,
            "placement": placement.fingerprint,
            "experts": movers[0].layout,
        }
    except BaseException as error:
        problem = error
    agree_on(context, proposal, problem)

    experts = [layer.experts for layer in layers]
    try:
        for layer in layers:
            # Whatever interrupts the moves, no step can run with half of them made.
            layer.experts = None
        move_experts(movers, moves)
        for layer, moved in zip(layers, experts, strict=True):
            assert layer.slots is not None
            layer.slots.update(placement)
            layer.placement = placement
            layer.experts = moved
    except BaseException as error:
        for layer in layers:
            layer.context.abort(reason_of(error))
        raise


def check_replacement(layer: MoELayer, placement: Placement) -> None:
    """Raise `ValueError` unless `layer` can go over to `placement`."""
    if not isinstance(placement, Placement):
        raise ValueError(f"placement: expected a Placement, got {type(placement).__name__}")
    if layer.placement is None:
        raise ValueError("placement: the layer was made without one; give it Placement.contiguous(...) or another")
    if placement.sizes != layer.placement.sizes:
        raise ValueError(f"placement: expected {layer.placement.sizes}, got {placement.sizes}")


def _moves_of(layer: MoELayer, placement: Placement) -> list[Move]:
    check_replacement(layer, placement)
    assert layer.placement is not None
    return plan_moves(layer.placement, placement)


def _mover_of(layer: MoELayer, moves: list[Move]) -> ExpertMover:
    if layer.experts is None:
        raise ValueError("experts: no weights are loaded")
    rank = layer.context.rank
    needs_spare = any(move.target_slot == SPARE and move.target_rank == rank for move in moves)
    return ExpertMover(layer.context, layer.experts, needs_spare=needs_spare)
