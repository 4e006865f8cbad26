"""Weights that stay where another library has put them."""

from __future__ import annotations

import torch

from moe_runtime.checkpoints.loading import QuantBuffer, QuantBuffers


def buffers_over(gate_up: torch.Tensor, down: torch.Tensor) -> QuantBuffers:
    """Buffers that are the quants of all experts, so that those which a layer reads as they are need no copy."""
    return _over(gate_up), _over(down)


def _over(quants: torch.Tensor) -> QuantBuffer:
    buffer = QuantBuffer(quants.shape[0])
    buffer.tensor = quants.detach()
    return buffer
