"""What the Triton kernels that copy rows before and after an exchange have in common."""

from __future__ import annotations

import triton


def padded(n: int) -> int:
    """Power of two, at least 2, that holds `n` lanes."""
    return max(2, triton.next_power_of_2(n))
