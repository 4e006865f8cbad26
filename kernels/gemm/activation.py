"""SwiGLU on fp32 tiles, between the two products of an expert. NaN passes through every clamp.

`swiglu_tile` is for kernels, `swiglu` is its reference on tensors. Both do the same fp32 operations in the same order;
they differ only in the last bits of `exp` and of the quotient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.gemm.weights import SwiGLU

# The vector library behind `torch.exp` on CPUs chooses its code at its first call. When several threads make that call
# at once, one of them rarely computes its part with an error of 1e-4. A call on one thread before all others avoids it.
torch.exp(torch.zeros(1))


@triton.jit
def swiglu_tile(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """`gate * sigmoid(ALPHA * gate) * (up + UP_OFFSET)` of fp32 tiles; `LIMIT` is the clamp or None (`SwiGLU`)."""
    if LIMIT is not None:
        # `tl.minimum` would drop a NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if UP_OFFSET != 0.0:
        up = up + UP_OFFSET
    return tl.div_rn(gate, 1.0 + tl.exp(-ALPHA * gate)) * up


def swiglu(gate: torch.Tensor, up: torch.Tensor, activation: SwiGLU) -> torch.Tensor:
    """The activation of fp32 (or float64) tensors of one shape; `SwiGLU` gives formula and source."""
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.up_offset != 0.0:
        up = up + activation.up_offset
    return gate / (1.0 + torch.exp(-activation.alpha * gate)) * up
