"""Activations on fp32 tiles, between the two GEMMs of an expert. NaN passes through every clamp.

`activated_tile` is for kernels, `activate` is its reference on tensors. Both do the same fp32 operations in the same
order; they differ only in the last bits of `exp`, `erf` and of the quotient.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.gemm.weights import Activation, ActivationFunction

# The vector library behind `torch.exp` on CPUs chooses its code at its first call. When several threads make that call
# at once, one of them rarely computes its part with an error of 1e-4. A call on one thread before all others avoids it.
torch.exp(torch.zeros(1))

GELU = tl.constexpr(ActivationFunction.GELU.code)
GELU_TANH = tl.constexpr(ActivationFunction.GELU_TANH.code)
RELU2 = tl.constexpr(ActivationFunction.RELU2.code)

ROOT_HALF = tl.constexpr(math.sqrt(0.5))
TANH_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
"""`GELU_TANH` is `x * sigmoid(TANH_SLOPE * (x + TANH_CUBE * x^3))`, since `1 + tanh(u) = 2 * sigmoid(2u)`."""
TANH_CUBE = tl.constexpr(0.044715)


@triton.jit
def function_tile(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    """`ActivationFunction` of the code FUNCTION on an fp32 tile."""
    if FUNCTION == RELU2:
        # `tl.maximum` would drop a NaN.
        positive = tl.where(x < 0.0, 0.0, x)
        y = positive * positive
    elif FUNCTION == GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * ROOT_HALF))
    elif FUNCTION == GELU_TANH:
        y = tl.div_rn(x, 1.0 + tl.exp(-TANH_SLOPE * (x + TANH_CUBE * (x * x * x))))
    else:
        y = tl.div_rn(x, 1.0 + tl.exp(-ALPHA * x))
    return y


@triton.jit
def softcap_tile(x, CAP: tl.constexpr):
    """`CAP * tanh(x / CAP)` of an fp32 tile."""
    y = tl.div_rn(x, CAP)
    # Where the quotient would cancel, the series: its next term is 2^-24 of the sum at 0.3.
    s = y * y
    small = y + y * s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835))))
    t = tl.exp(-2.0 * tl.abs(y))
    large = tl.div_rn(1.0 - t, 1.0 + t)
    return CAP * tl.where(tl.abs(y) < 0.3, small, tl.where(y < 0.0, -large, large))


@triton.jit
def activated_tile(
    gate,
    up,
    FUNCTION: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    UP_LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    GATE_SOFTCAP: tl.constexpr,
    UP_SOFTCAP: tl.constexpr,
):
    """`function(gate) * (up + UP_OFFSET)` of fp32 tiles; limits and softcaps may be None (`Activation`)."""
    if UP_LIMIT is not None:
        # `tl.minimum` would drop a NaN.
        gate = tl.where(gate > GATE_LIMIT, GATE_LIMIT, gate)
        up = tl.where(up > UP_LIMIT, UP_LIMIT, tl.where(up < -UP_LIMIT, -UP_LIMIT, up))
    if UP_SOFTCAP is not None:
        up = softcap_tile(up, UP_SOFTCAP)
    if UP_OFFSET != 0.0:
        up = up + UP_OFFSET
    if GATE_SOFTCAP is not None:
        y = tl.div_rn(softcap_tile(gate, GATE_SOFTCAP), 1.0 + tl.exp(-ALPHA * gate))
    else:
        y = function_tile(gate, FUNCTION, ALPHA)
    return y * up


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of fp32 (or float64) results of the first GEMM, `[R, N]` to `[R, I]`."""
    if not activation.gated:
        return _function(x, activation)
    rows = x.shape[-1]
    gate, up = x[..., activation.order.gate_rows(rows)], x[..., activation.order.up_rows(rows)]
    if activation.limit is not None:
        gate = gate.clamp(max=activation.gate_limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.up_softcap is not None:
        up = _softcap(up, activation.up_softcap)
    if activation.up_offset != 0.0:
        up = up + activation.up_offset
    if activation.gate_softcap is not None:
        return _softcap(gate, activation.gate_softcap) / (1.0 + torch.exp(-activation.alpha * gate)) * up
    return _function(gate, activation) * up


def _softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


def _function(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation.function is ActivationFunction.RELU2:
        return x.clamp(min=0.0).square()
    if activation.function is ActivationFunction.GELU:
        return 0.5 * x * (1.0 + torch.erf(x * ROOT_HALF.value))
    slope = activation.alpha * x
    if activation.function is ActivationFunction.GELU_TANH:
        slope = TANH_SLOPE.value * (x + TANH_CUBE.value * (x * x * x))
    return x / (1.0 + torch.exp(-slope))


def softcap_macros(activation: Activation | None) -> dict[str, str]:
    """The macros of softcaps that CUDA C++ kernels take; none where there are none."""
    if activation is None:
        return {}
    return _literals({"GATE_SOFTCAP": activation.gate_softcap, "UP_SOFTCAP": activation.up_softcap})


def limit_macros(activation: Activation | None) -> dict[str, str]:
    """The macros of the clamp that some CUDA C++ kernels take; none where there is none."""
    if activation is None:
        return {}
    return _literals({"GATE_LIMIT": activation.gate_limit, "UP_LIMIT": activation.limit})


def _literals(numbers: dict[str, float | None]) -> dict[str, str]:
    return {name: literal(number) for name, number in numbers.items() if number is not None}


def literal(value: float) -> str:
    """A C literal of the fp32 value nearest to `value`."""
    number = torch.tensor(value, dtype=torch.float32, device="cpu")
    return f"{float(number).hex()}f" if number.isfinite() else f"__int_as_float({int(number.view(torch.int32))})"
