"""Argument checks for all modules. They raise a `ValueError` that names the argument."""

from __future__ import annotations

import torch


def check_is_tensor(name: str, value: object) -> torch.Tensor:
    """`value` if it is a tensor; else raise `ValueError`."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    return value


def check_no_grad(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` if autograd would need a gradient through `tensor`."""
    if tensor.requires_grad and torch.is_grad_enabled():
        how = "for inference only: detach it or use no_grad"
        raise ValueError(f"{name}: requires grad, expected no gradient ({how}), got requires_grad=True")
