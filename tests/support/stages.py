"""A layer's step in three parts, for tests in which ranks take turns in one process."""

from __future__ import annotations

from typing import Any

import torch

from moe_runtime.layer import MoELayer
from moe_runtime.step import LayerStep


def send(layer: MoELayer, *arguments: Any, **named: Any) -> LayerStep:
    """Up to the dispatch of this rank's tokens; the arguments are those of `forward`, in its order."""
    step = layer._route(*arguments, **named)
    layer._run(step, layer._stages[: _number(layer, "dispatch_recv")])
    return step


def compute(layer: MoELayer, step: LayerStep) -> None:
    """From waiting for tokens to sending results."""
    layer._run(step, layer._stages[_number(layer, "dispatch_recv") : _number(layer, "combine_recv")])


def receive(layer: MoELayer, step: LayerStep) -> torch.Tensor:
    """The sum of the results of all ranks."""
    layer._run(step, layer._stages[_number(layer, "combine_recv") :])
    return step.y


def _number(layer: MoELayer, phase: str) -> int:
    return [stage.phase for stage in layer._stages].index(phase)
