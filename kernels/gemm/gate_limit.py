"""The gate from which on a limit on `silu(gate)` acts, so that kernels clamp the gate instead of its function."""

from __future__ import annotations

import ctypes
import math
from functools import cache

_STEPS = 40


@cache
def gate_where_silu_is(value: float) -> float:
    """The fp32 number nearest to the `x > 0` with `x * sigmoid(x) = value`, for a positive fp32 `value`.

    `silu` rises wherever it is positive, so `min(silu(gate), value) = silu(min(gate, x))`. Rounding `x` to fp32 moves
    `silu(x)` by at most `1.28 * 2^-24` of itself: its relative slope `1 + x * (1 - sigmoid(x))` is at most 1.2785.

    The solution is the fixed point of `value * (1 + exp(-x))`, whose slope is at most `1 / e` between `value` and
    `2 * value`. 40 steps in float64 leave `e^-40` of `value`.
    """
    x = value
    for _ in range(_STEPS):
        x = value * (1.0 + math.exp(-x))
    return ctypes.c_float(x).value
