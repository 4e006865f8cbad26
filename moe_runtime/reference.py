"""The whole layer in one process in float64, and bounds on the error of a layer in given formats against it.

Shape letters: `T` tokens, `H` hidden size, `I` intermediate size, `E` experts of the layer, `K` experts per token.
"""

from __future__ import annotations

import math

import torch

from moe_runtime.kernels.formats.number_formats import (
    BF16,
    MXFP4,
    TokenFormat,
    format_named,
    intermediate_format_for,
    rounds_tokens,
    weight_format_named,
)
from moe_runtime.kernels.gemm.expert_norm import ExpertNorm
from moe_runtime.kernels.gemm.weights import Activation, ActivationFunction

FUNCTION_GAINS = {
    ActivationFunction.SILU: 1.5511,
    ActivationFunction.GELU: 1.6110,
    ActivationFunction.GELU_TANH: 1.6104,
    ActivationFunction.RELU2: 4.0,
}
"""Bounds of how much a function enlarges the square of a relative error, rounded up (`error_bound`)."""


def activation_reference(gate_up: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
    """The activation in float64: `[T, 2I]` to `[T, I]`, or `[T, I]` to `[T, I]` without a gate.

    None is `silu(gate) * up`, gate in the first `I` columns.
    """
    activation = activation or Activation()
    if not activation.gated:
        return _function(gate_up.double(), activation)
    columns = gate_up.shape[-1]
    gate = gate_up[..., activation.order.gate_rows(columns)].double()
    up = gate_up[..., activation.order.up_rows(columns)].double()
    if activation.limit is not None:
        up = up.clamp(-activation.limit, activation.limit)
        if activation.limit_on == "gate":
            gate = gate.clamp(max=activation.limit)
    if activation.up_softcap is not None:
        up = _softcap(up, activation.up_softcap)
    outside = gate if activation.gate_softcap is None else _softcap(gate, activation.gate_softcap)
    y = _function(gate, activation, outside)
    if activation.limit_on == "function":
        y = y.clamp(max=activation.limit)
    return y * (up + activation.up_offset)


def _softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(x / cap) * cap


def _function(x: torch.Tensor, activation: Activation, outside: torch.Tensor | None = None) -> torch.Tensor:
    """The function; `outside` stands for `x` outside of the sigmoid of silu."""
    if activation.function is ActivationFunction.RELU2:
        return torch.relu(x).square()
    if activation.function is ActivationFunction.SILU:
        return (x if outside is None else outside) * torch.sigmoid(activation.alpha * x)
    approximate = "tanh" if activation.function is ActivationFunction.GELU_TANH else "none"
    return torch.nn.functional.gelu(x, approximate=approximate)


def moe_reference(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation | None = None,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    norm: ExpertNorm | None = None,
) -> torch.Tensor:
    """`y[t] = sum over k of topk_weights[t, k] * down[e] @ act(gate_up[e] @ x[t])`, `e = topk_idx[t, k]`.

    Both GEMMs add their bias, if given. A `norm` follows the second one. Operands are converted to float64, one
    expert at a time.

    Args:
        x: `[T, H]`, any float dtype.
        topk_idx: `[T, K]` ids, int32 or int64; -1 adds nothing.
        topk_weights: `[T, K]`, any float dtype.
        gate_up: `[E, 2I, H]`, rows in the order `activation.order`, or `[E, I, H]` of up without a gate.
        down: `[E, H, I]`.
        activation: None is `silu(gate) * up`, gate above up.
        gate_up_bias: `[E, 2I]` or `[E, I]`, rows in the same order.
        down_bias: `[E, H]`.
        norm: of each expert's row, without its rounding of `x * scale`.

    Returns:
        float64 `[T, H]`.

    Raises:
        ValueError: shapes that do not fit together, or an id outside `-1 .. E - 1`.
    """
    experts, rows, hidden = gate_up.shape
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"x: expected [T, {hidden}], got {list(x.shape)}")
    if topk_idx.dim() != 2 or topk_idx.shape[0] != x.shape[0] or topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"topk_idx, topk_weights: expected [{x.shape[0]}, K] both, "
            f"got {list(topk_idx.shape)} and {list(topk_weights.shape)}"
        )
    inner = rows // (activation or Activation()).num_parts
    if tuple(down.shape) != (experts, hidden, inner):
        raise ValueError(f"down: expected {[experts, hidden, inner]}, got {list(down.shape)}")
    for name, bias, columns in (("gate_up_bias", gate_up_bias, rows), ("down_bias", down_bias, hidden)):
        if bias is not None and tuple(bias.shape) != (experts, columns):
            raise ValueError(f"{name}: expected {[experts, columns]}, got {list(bias.shape)}")
    if topk_idx.numel() and not (-1 <= int(topk_idx.min()) and int(topk_idx.max()) < experts):
        raise ValueError(
            f"topk_idx: expected ids of -1 .. {experts - 1}, got {int(topk_idx.min())} .. {int(topk_idx.max())}"
        )
    y_TH = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in topk_idx.unique().tolist():
        if expert < 0:
            continue
        token, k = torch.where(topk_idx == expert)
        projected = x[token].double() @ gate_up[expert].double().T
        if gate_up_bias is not None:
            projected += gate_up_bias[expert].double()
        output = activation_reference(projected, activation) @ down[expert].double().T
        if down_bias is not None:
            output += down_bias[expert].double()
        if norm is not None:
            output = output * norm.scale.double().to(output.device)
            output = output * torch.rsqrt(output.square().mean(1, keepdim=True) + norm.eps)
        y_TH.index_add_(0, token, output * topk_weights[token, k].double()[:, None])
    return y_TH


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """`(|y - ref| / |ref|` in the Frobenius norm, `max |y - ref| / max |ref|)`; NaN in `y` gives NaN.

    0 if both are empty or `y` equals a zero reference, infinity if only the reference is zero.
    """
    if y.shape != reference.shape:
        raise ValueError(f"y: expected shape {list(reference.shape)}, got {list(y.shape)}")
    if not y.numel():
        return 0.0, 0.0
    reference = reference.double()
    error = y.double() - reference

    def ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> float:
        top, bottom = numerator.item(), denominator.item()
        if bottom == 0.0:
            return 0.0 if top == 0.0 else math.nan if math.isnan(top) else math.inf
        return top / bottom

    return ratio(error.norm(), reference.norm()), ratio(error.abs().max(), reference.abs().max())


def rounding_error(fmt: str | TokenFormat) -> float:
    """The largest root-mean-square relative error (Frobenius) of a block stored in `fmt`, over what it may hold.

    A value between the neighbouring elements `a < b` is rounded to the nearer one. Wherever it is equally likely to
    lie between them, its error has mean square `(b-a)^2 / 12` while it has mean square `(a^2 + a*b + b^2) / 3` itself.
    The ratio is largest at the start of a binade, `a = 1`, `b = 1 + d` with `d = format.epsilon`:

        rounding_error^2 = d^2 / (4 * (3 + 3*d + d^2))      bf16 0.00225, e4m3 0.0339, e2m1 0.1147

    Below the smallest normal element the ratio of one value is larger, but the block scale puts the largest value
    of a block near the top of the range (6 of e2m1, 448 of e4m3; above 224 where the scale is a power of two), and
    the others' errors are then small against that one: `15 * 0.5^2/12 / 36 = 0.0087` in e2m1, against 0.0132.

    The block scale itself: in `fp8_block` it has 24 bits, in `mxfp8` it is a power of two and rounded up, so neither
    adds anything. In `nvfp4` it is rounded to e4m3, and the values are divided by the rounded scale: that moves the
    grid, which costs nothing, and lets the largest value reach `6 * 17/16`, where it saturates with an error of at
    most 1/17, less than the 0.1147 already counted. This needs block maxima between `6 * 2^-6` and `6 * 448` over the
    encode scale: a row's own encode scale gives that, down to `2^-14.8` of the row's maximum; a static one must have
    been chosen so.

    In `mxfp4` the largest of 32 values is only known to reach 3 of the 6, and the 31 others may all lie between 0 and
    0.5, where a number has mean square `0.5^2 / 3` and its error `0.5^2 / 12`. With `e^2` from above for the largest:

        rounding_error^2 = (31 * 0.5^2 / 12 + 9 * e^2) / (31 * 0.5^2 / 3 + 9)      mxfp4 0.2569
    """
    fmt = weight_format_named(fmt)
    spacing = fmt.epsilon
    square = spacing**2 / (4 * (3 + 3 * spacing + spacing**2))
    if fmt is MXFP4:
        small = (fmt.block - 1) * 0.5**2
        square = (small / 12 + 9 * square) / (small / 3 + 9)
    return math.sqrt(square)


def error_bound(
    token_format: str | TokenFormat,
    weight_format: str | TokenFormat | None = None,
    combine_format: str | TokenFormat = "bf16",
    intermediate_format: str | TokenFormat | None = None,
    activation: Activation | None = None,
    *,
    exact_weights: bool = False,
    multiplied_format: str | TokenFormat | None = None,
    post_expert_norm: bool = False,
    several_hosts: bool = False,
) -> float:
    """Bound of `relative_error(y, moe_reference(...))[0]`, derived from the formats alone.

    The reference takes the bf16 tokens and bf16 weights before they are quantized, so a bf16 operand adds nothing.
    `weight_format` is `token_format` when None, `intermediate_format` what a layer of these has, `activation`
    `silu(gate) * up`. With `exact_weights` the reference has the weights as they are stored. With a `multiplied_format`
    they are rounded to it once more.

    What is assumed: rounding errors have zero mean, do not depend on each other or on what they are multiplied with,
    and lie anywhere between two neighbours alike (`rounding_error`); gates are distributed symmetrically about 0 and
    independently of ups; experts of a token do not cancel. Errors of independent steps then add in quadrature, and
    where a step multiplies, so do the factors `1 + e^2`. The result bounds the mean square: the error over a batch of
    tokens keeps to it, the error of one token strays by tens of percent. Derivation, `e_F` for `rounding_error(F)`:

    1. Gate and up are dot products of quantized tokens and weights: `1 + e_g^2 = (1 + e_token^2) (1 + e_weight^2)`,
       relative to the root mean square of all gates (of all ups). For e2m1 weights `fp8_block` tokens are rounded to
       bf16: times `1 + e_bf16^2`.
    2. `h = silu(gate) * up`. An error in up counts in full. An error `d` in gate becomes `silu'(gate) * d`, and `d` is
       relative to the norm of all gates, not to its own gate, so the slope `|silu'| <= 1.0999` counts for gates where
       silu is small too: what enters is `c = E[gate^2] E[silu'(gate)^2] / E[silu(gate)^2]`. Take gates by pairs
       `+a, -a`: with `p = sigmoid(a)` and `s = silu'(a) = p + a*p*(1-p)`, the pair has mean `silu^2` of
       `a^2 (p^2 + (1-p)^2) / 2` and mean `silu'^2` of `(s^2 + (1-s)^2) / 2`. The factor of `a^2` grows with `a`, so
       `E[silu^2] >= E[a^2] E[(p^2 + (1-p)^2) / 2]` (Chebyshev's sum inequality), and `c` is at most the largest ratio
       of the two brackets, 1.5511 at `a = 1.608` (`FUNCTION_GAINS`). `alpha` only changes the unit of gate.
       `1 + e_h^2 = (1 + c * e_g^2) (1 + e_g^2)`, the curvature of silu being left out (it is of order `e_g^4`).
       GELU is `a * p` too, with other `p` that satisfy `p(-a) = 1 - p(a)`, so the same holds with `s = (a * p)'`:
       1.6110 at `a = 1.025`, by tanh 1.6104. For `relu(a)^2`, `E[h^2] = E[a^4] / 2` and `E[h'^2] = 2 E[a^2]`, so
       `c = 4 E[a^2]^2 / E[a^4]`, at most 4 (Jensen). Without a gate there is no error of another factor:
       `1 + e_h^2 = 1 + c * e_g^2`.
    3. Down: the intermediate and its weight are quantized: times `(1 + e_intermediate^2) (1 + e_weight^2)`.
    4. Each expert's row is rounded to bf16, each rank's partial sum to the combine format, the sum over ranks to
       bf16: times `(1 + e_bf16^2)^2 (1 + e_combine^2)`. Sums over experts and ranks keep relative errors or make
       them smaller, since independent parts add in quadrature. A norm after each expert (`post_expert_norm`) rounds
       its row to bf16 twice more: times `(1 + e_bf16^2)^2`. To divide a row by its norm takes away the part of its
       error that lies along it. It weights rows alike: rows of one layer, sums of many terms, have nearly equal norms.
       With `several_hosts` partial sums of ranks are bf16, and so is each host's sum of them, which is rounded to the
       combine format: times `1 + e_bf16^2`, and once more where that format is not bf16.

    Accumulation in fp32 (about 2^-20) is far below all of these, and so is a limit on the function, which kernels meet
    within 1.28 * 2^-24. A clamp (`limit`, of gate or its function) or a softcap at several times the root mean square
    of gates and ups changes little, and an offset of up only adds to what the errors are compared with.
    """

    def growth(fmt: str | TokenFormat) -> float:
        return 1 + rounding_error(fmt) ** 2

    def operand(fmt: str | TokenFormat) -> float:
        return 1.0 if weight_format_named(fmt) == BF16 else growth(fmt)

    tokens = format_named(token_format, "token_format")
    weights = tokens if weight_format is None else weight_format_named(weight_format, "weight_format")
    weight = 1.0 if exact_weights else operand(weights)
    if multiplied_format is not None:
        weights = weight_format_named(multiplied_format, "multiplied_format")
        weight *= operand(weights)
    between = intermediate_format_for(tokens, weights) if intermediate_format is None else intermediate_format
    token = operand(tokens) * (growth(BF16) if rounds_tokens(tokens, weights) else 1.0)
    intermediate = growth(between)
    projected = token * weight
    formula = activation or Activation()
    activated = (1 + FUNCTION_GAINS[formula.function] * (projected - 1)) * (projected if formula.gated else 1.0)
    returned = activated * intermediate * weight * growth(BF16) ** 2 * growth(combine_format)
    if post_expert_norm:
        returned *= growth(BF16) ** 2
    if several_hosts:
        returned *= growth(BF16) if weight_format_named(combine_format) == BF16 else growth(BF16) ** 2
    return math.sqrt(returned - 1)
