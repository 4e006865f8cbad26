"""What a layer accepts as tokens; a wrong argument is a `ValueError` with its name, what was expected and what came."""

from __future__ import annotations

import torch

from moe_runtime.dispatcher.arguments import check_shared
from moe_runtime.kernels.arguments import check_is_tensor
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry


def flat_tokens(geometry: ExchangeGeometry, device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """`x` `[..., H]` as `[T, H]`; the dispatcher checks its dtype and the number of tokens."""
    check_is_tensor("x", x)
    if x.device != device:
        raise ValueError(f"x: expected device {device}, got {x.device}")
    if x.ndim < 1 or x.shape[-1] != geometry.hidden:
        raise ValueError(f"x: expected [..., {geometry.hidden}], got shape {list(x.shape)}")
    return x.reshape(-1, geometry.hidden)


def flat_shared(
    geometry: ExchangeGeometry, device: torch.device, shared: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """`shared`, which has the `shape` of `x`, as bf16 `[T, H]`."""
    check_is_tensor("shared", shared)
    if shared.shape != shape:
        raise ValueError(f"shared: expected the shape of x, {list(shape)}, got {list(shared.shape)}")
    shared_TH = shared.reshape(-1, geometry.hidden)
    check_shared(geometry, device, shared_TH, shared_TH.shape[0])
    return shared_TH
