"""The weights of a rank's experts slot by slot: more or fewer slots, and an expert put into one.

`HasSlots` are the `moe_runtime.experts.Experts`, of which only the weights count here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar, cast

import torch

from moe_runtime.checkpoints.loading import populated
from moe_runtime.kernels.gemm.expanded_weights import StoredWeights


class HasSlots(Protocol):
    """A frozen dataclass with the weights of some experts. Slots are the first dimension of each tensor."""

    @property
    def gate_up(self) -> StoredWeights: ...

    @property
    def down(self) -> StoredWeights: ...


T = TypeVar("T", bound=HasSlots)


def tensors_of(experts: HasSlots) -> dict[str, torch.Tensor]:
    """The tensors of the weights by name, such as `gate_up.quants`; slots are the first dimension of each."""
    found = {}
    for part in ("gate_up", "down"):
        weights: StoredWeights = getattr(experts, part)
        for field in fields(weights):
            if isinstance(value := getattr(weights, field.name), torch.Tensor):
                found[f"{part}.{field.name}"] = value
    return found


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[E, bytes of an expert]`: a view."""
    return tensor.view(tensor.shape[0], math.prod(tensor.shape[1:])).view(torch.uint8)


def with_slots(experts: T, kept: int, added: int) -> T:
    """The first `kept` of `experts`, and room for `added` more behind them, zeros, in new memory."""

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        rows = rows_of(tensor)[:kept]
        whole = torch.cat([rows, rows.new_zeros(added, rows.shape[1])])
        return whole.view(tensor.dtype).view(kept + added, *tensor.shape[1:])

    return _of_tensors(experts, {name: longer(tensor) for name, tensor in tensors_of(experts).items()})


def empty_slots(like: T, count: int) -> T:
    """`count` slots for experts like `like`, uninitialised, in new memory."""
    made = {name: populated(t.new_empty((count, *t.shape[1:]))) for name, t in tensors_of(like).items()}
    return _of_tensors(like, made)


def put(target: HasSlots, slots: Sequence[int], source: HasSlots) -> None:
    """Copy the experts of `source` into these slots of `target`, one for each."""
    tensors = tensors_of(target)
    for name, tensor in tensors_of(source).items():
        into = rows_of(tensors[name])
        for slot, row in zip(slots, rows_of(tensor), strict=True):
            into[slot].copy_(row)


def _of_tensors(like: T, tensors: dict[str, torch.Tensor]) -> T:
    """Experts like `like` with these tensors, named as by `tensors_of`."""

    def part(name: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}

    parts: dict[str, Any] = {name: replace(getattr(like, name), **part(name)) for name in ("gate_up", "down")}
    return cast(T, replace(cast(Any, like), **parts))
