"""Modules whose parameters and buffers keep their dtypes, and a checked copy of values into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_runtime.support.arguments import check_is_tensor


class FixedDtypes(nn.Module):
    """A module that ignores dtypes in `.to(torch.bfloat16)`, `.half()` and so on, but follows devices as usual."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def without_cast(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(without_cast, recurse)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *how: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            for name, own in (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)):
                if isinstance(given := state_dict.get(prefix + name), torch.Tensor):
                    state_dict[prefix + name] = given.to(own.dtype)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *how)


def copy_checked(pairs: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
    """Copy each source into its target. A missing target needs a missing source.

    Args:
        pairs: `(target, source)` by their name in error messages.

    Raises `ValueError` naming the first pair with different shapes, or whose source holds no floats, before it copies
    anything.
    """
    for name, (target, source) in pairs.items():
        if source is not None and (not check_is_tensor(name, source).is_floating_point() or source.is_meta):
            raise ValueError(f"{name}: expected floats that are not on the meta device, got {source.dtype}")
        expected, got = ("none" if t is None else f"shape {list(t.shape)}" for t in (target, source))
        if expected != got:
            raise ValueError(f"{name}: expected {expected}, got {got}")
    with torch.no_grad():
        for target, source in pairs.values():
            if target is not None and source is not None:
                target.copy_(source)
