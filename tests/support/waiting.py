"""When what was queued has run."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait for all streams of a GPU: failures are told on one of their own, which no other waits for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
