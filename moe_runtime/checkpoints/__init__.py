"""Checkpoints: model families, layouts of quantized weights, reading, loading and converting."""

from __future__ import annotations

from moe_runtime.checkpoints.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
