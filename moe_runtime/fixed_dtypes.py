"""Modules whose parameters and buffers keep their dtypes, whatever the model around them is converted to."""

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
