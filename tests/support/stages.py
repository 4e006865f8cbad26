"""The stages of a layer's step in three parts, for tests in which ranks take turns in one process."""

from __future__ import annotations

from typing import Any

import torch

from moe_runtime.layer import MoELayer
from moe_runtime.step import LayerStep


def send(layer: MoELayer, *arguments: Any, **named: Any) -> LayerStep:
    """Up to the dispatch of this rank's tokens; the arguments are those of `forward`, in its order."""
    step = layer._route(*arguments, **named)
    layer._dispatch_send(step)
    layer._run_shared_expert(step)
    return step


def compute(layer: MoELayer, step: LayerStep) -> None:
    """From waiting for tokens to sending results."""
    layer._dispatch_recv(step)
    layer._run_experts(step)
    layer._combine_send(step)


def receive(layer: MoELayer, step: LayerStep) -> torch.Tensor:
    """The sum of the results of all ranks."""
    return layer._combine_recv(step)
