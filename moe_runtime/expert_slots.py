"""The weights of a rank's experts slot by slot: more or fewer slots, and an expert put into one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from moe_runtime.checkpoints.loading import populated
from moe_runtime.experts import Experts


def tensors_of(experts: Experts) -> dict[str, torch.Tensor]:
    """The tensors of the weights by name, such as `gate_up.quants`; slots are the first dimension of each."""
    parts = {"gate_up": experts.gate_up, "down": experts.down}
    return {f"{part}.{name}": tensor for part, w in parts.items() for name, tensor in w._tensors.items()}


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[E, bytes of an expert]`: a view."""
    return tensor.view(tensor.shape[0], math.prod(tensor.shape[1:])).view(torch.uint8)


def with_slots(experts: Experts, kept: int, added: int) -> Experts:
    """The first `kept` of `experts`, and room for `added` more behind them, zeros, in new memory."""

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        rows = rows_of(tensor)[:kept]
        whole = torch.cat([rows, rows.new_zeros(added, rows.shape[1])])
        return whole.view(tensor.dtype).view(kept + added, *tensor.shape[1:])

    return _changed(experts, longer)


def empty_slots(like: Experts, count: int) -> Experts:
    """`count` slots for experts like `like`, uninitialised, in new memory."""
    return _changed(like, lambda tensor: populated(tensor.new_empty((count, *tensor.shape[1:]))))


def put(target: Experts, slots: Sequence[int], source: Experts) -> None:
    """Copy the experts of `source` into these slots of `target`, one for each."""
    tensors = tensors_of(target)
    for name, tensor in tensors_of(source).items():
        into = rows_of(tensors[name])
        for slot, row in zip(slots, rows_of(tensor), strict=True):
            into[slot].copy_(row)


def _changed(experts: Experts, change: Callable[[torch.Tensor], torch.Tensor]) -> Experts:
    """`experts` with what `change` makes of each tensor of their weights."""
    return replace(experts, gate_up=experts.gate_up._each(change), down=experts.down._each(change))
