"""What results are compared with: the least time for the bytes of an exchange.

`traffic[s, d]` are the bytes that rank `s` sends to rank `d`; what a rank keeps does not cross a link.
"""

from __future__ import annotations

import torch

EVEN = "uniform"
"""The routing that is the even case."""


def busiest_bytes(traffic: torch.Tensor) -> int:
    """The most bytes that leave one rank or come to it, of `[W, W]`."""
    others = traffic.clone().fill_diagonal_(0)
    return int(max(others.sum(dim=0).max(), others.sum(dim=1).max()))


def floor_us(num_bytes: float, gb_per_s: float) -> float:
    """Microseconds that so many bytes take at that rate."""
    return num_bytes / gb_per_s * 1e-3
