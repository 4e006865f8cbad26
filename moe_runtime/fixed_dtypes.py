"""Modules whose parameters and buffers keep their dtypes, and how those are given values of any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class FixedDtypes(nn.Module):
    """`.to(torch.bfloat16)`, `.half()` and so on change the dtype of nothing in it; devices change as in any module."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def without_cast(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(without_cast, recurse)


def copy_checked(pairs: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
    """Copy each source into its target; where there is no target there must be no source.

    Args:
        pairs: `(target, source)` by the name that errors give.

    Raises `ValueError` naming the first pair whose shapes differ, before anything is copied.
    """
    for name, (target, source) in pairs.items():
        expected, got = ("none" if t is None else f"shape {list(t.shape)}" for t in (target, source))
        if expected != got:
            raise ValueError(f"{name}: expected {expected}, got {got}")
    with torch.no_grad():
        for target, source in pairs.values():
            if target is not None and source is not None:
                target.copy_(source)
