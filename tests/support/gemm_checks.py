"""What results of the grouped GEMM are checked with: float64 activations, codes, poison, operands with exact sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.kernels.formats.number_formats import NVFP4
from moe_runtime.kernels.gemm.arguments import Intermediate
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import DEQUANT_DECODE_ROWS, DEQUANT_MIDDLE_ROWS, choose_dequant_shape
from moe_runtime.kernels.gemm.shapes import (
    DEQUANT_DECODE,
    DEQUANT_FEW,
    DEQUANT_MIDDLE,
    DEQUANT_PREFILL,
    DequantShape,
)
from moe_runtime.kernels.gemm.weights import Activation, ExpertWeights, GateUpOrder
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import UNIT, Array, Exact, bits, make_rows, scale_rows, swizzled


def poisoned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN in every element, with a payload that no kernel makes."""
    pattern = {2: 0x7FAB, 4: 0x7FABCDEF}[dtype.itemsize]
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.full((rows, columns), pattern, dtype=integer, device=device).view(dtype)


def check_untouched(out: torch.Tensor, before: torch.Tensor, written: Array) -> None:
    """Raise unless rows of `out` that are not `written`, or lie behind those, are as `before`."""
    rest = torch.from_numpy(~np.pad(written, (0, out.shape[0] - len(written))))
    assert_same_bits(out.cpu()[rest], before.cpu()[rest], "rows that no active group owns")


SHAPES = {"few": DEQUANT_FEW, "decode": DEQUANT_DECODE, "middle": DEQUANT_MIDDLE, "prefill": DEQUANT_PREFILL}
"""Of the GEMM that dequantizes in registers. Where blocks cannot hold tokens DEQUANT_DECODE stands for the first."""
ROWS_OF_SHAPES = {
    DEQUANT_FEW: 1,
    DEQUANT_DECODE: DEQUANT_DECODE_ROWS,
    DEQUANT_MIDDLE: DEQUANT_MIDDLE_ROWS[0],
    DEQUANT_PREFILL: DEQUANT_MIDDLE_ROWS[-1] + 1,
}
"""Rows of a group with which each is chosen."""
in_each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def for_shape(a: GroupedRows, shape: DequantShape) -> GroupedRows:
    """The same rows, of which so many are expected that the GEMM that dequantizes in registers takes `shape`.

    With an odd number of units of K it takes PREFILL instead of MIDDLE.
    """
    rows = ROWS_OF_SHAPES[shape] * a.num_groups
    assert choose_dequant_shape(rows, a.num_groups, 64, 256, NVFP4) is shape
    return replace(a, expected_rows=rows)


def integer_operands(
    name: str, rng: torch.Generator, device: torch.device, *, n: int = 40, order: GateUpOrder | None = None
) -> tuple[GroupedRows, ExpertWeights, Array]:
    """Operands whose every product and sum is an integer below 2^24 times one power of two, and the exact result."""
    k, sizes = 256, [3, 68]
    values = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0])

    def draw(*shape: int) -> torch.Tensor:
        sign = torch.randint(0, 2, shape, generator=rng) * 2 - 1
        return values[torch.randint(0, 6, shape, generator=rng)] * sign

    x, m = draw(sum(sizes), k), draw(2, n, k)
    x[:, ::16], m[:, :, ::16] = 6.0, 6.0
    a = make_rows(name, sizes, k, rng, device, num_experts=2, x=x)
    w = ExpertWeights.quantize(m, name, gate_up=order or False, engine="torch").to(device)
    if name == "mxfp8":
        # Far scales that cancel: byte 0 (2^-127, denormal in bf16) of the rows, 2^115 of the weights.
        assert a.scales is not None and w.scales is not None
        a, w = replace(a, scales=a.scales - 121), replace(w, scales=w.scales + 121)
    exact = np.zeros((a.capacity, n))
    rows, weights = x.double().numpy(), m.double().numpy()
    for g, (first, last) in enumerate([(0, 3), (3, 71)]):
        exact[first:last] = rows[first:last] @ weights[g].T
    return a, w, exact


def unit_scales(scales: torch.Tensor | None) -> torch.Tensor:
    """e4m3 scales that are all 1."""
    assert scales is not None
    return torch.full_like(scales.view(torch.uint8), 0x38).view(scales.dtype)


def parts_of(activation: Activation, rows: int) -> list[slice]:
    """The rows of gate and of up among `rows` rows of a first weight; all of them without a gate."""
    order = activation.gate_up
    return [slice(0, rows)] if order is None else [order.gate_rows(rows), order.up_rows(rows)]


SLOPES = {"silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
"""Above the largest slope of each function."""


def _exact_function(x: Array, activation: Activation) -> tuple[Array, Array]:
    """float64 function, and how far the fp32 steps may be from it, relative to `2^-23`.

    `exp` adds what its argument is rounded to. `1 + erf` cancels where it is small.
    """
    if activation.function == "relu2":
        return np.maximum(x, 0) ** 2, 8 * np.maximum(x, 0) ** 2
    if activation.function == "silu":
        cap = activation.gate_softcap
        y = (x if cap is None else cap * np.tanh(x / cap)) / (1 + np.exp(-activation.alpha * x))
        return y, (8 + 2 * np.abs(activation.alpha * x)) * np.abs(y)
    tensor = torch.from_numpy(x)
    if activation.function == "gelu":
        y = torch.nn.functional.gelu(tensor).numpy()
        return y, 8 * np.abs(y) + 2 * np.abs(x)
    y = torch.nn.functional.gelu(tensor, approximate="tanh").numpy()
    return y, (8 + 8 * np.abs(x + 0.044715 * x**3)) * np.abs(y)


def _exact_activation(exact: Exact, activation: Activation) -> tuple[Array, Array]:
    """float64 activation `[capacity, I]` and how far the fp32 one may be from it.

    With `x` within `e`, its function is within the slope times `e`; clamps and softcaps never widen.
    """
    error = UNIT[torch.float32] * np.abs(exact.value) + exact.slack
    if not activation.gated:
        y, steps = _exact_function(exact.value, activation)
        return y, _moved(exact.value, error, activation) + steps * 2.0**-23
    columns = exact.value.shape[1]
    gate_rows, up_rows = activation.order.gate_rows(columns), activation.order.up_rows(columns)
    gate, up = exact.value[:, gate_rows], exact.value[:, up_rows]
    limit = np.inf
    if activation.limit is not None:
        up = np.clip(up, -activation.limit, activation.limit)
        if activation.limit_on == "gate":
            gate = np.minimum(gate, activation.limit)
        else:
            # Where silu is at most the limit, gate is less than twice as large.
            limit, gate = activation.limit, np.minimum(gate, 2 * activation.limit)
    if activation.up_softcap is not None:
        up = activation.up_softcap * np.tanh(up / activation.up_softcap)
    up = up + activation.up_offset
    y, steps = _exact_function(gate, activation)
    y = np.minimum(y, limit)
    gate_error, up_error = _moved(gate, error[:, gate_rows], activation), error[:, up_rows]
    rounding = (steps + (8 * np.abs(y) if activation.up_softcap is not None else 0.0)) * np.abs(up) * 2.0**-23
    return y * up, gate_error * (np.abs(up) + up_error) + np.abs(y) * up_error + rounding


def _moved(x: Array, error: Array, activation: Activation) -> Array:
    """How far the function moves where `x` moves by at most `error`."""
    if activation.function == "relu2":
        return (2 * np.maximum(x, 0) + error) * error
    return SLOPES[activation.function] * error


def _round(x: Array, kind: Any, largest: float) -> Array:
    return np.clip(x, -largest, largest).astype(np.float32).astype(kind).astype(np.float64)


def check_quantized(hidden: GroupedRows, exact: Exact, activation: Activation, gsf: float) -> None:
    """Scale and code of each written number lie between those of the ends of its interval: rounding is monotone."""
    h, error = _exact_activation(exact, activation)
    fmt, written = hidden.format, exact.written
    h, error = h[written], error[written] + 2.0**-22 * np.abs(h[written])
    quants = bits(hidden.rows)[written]
    if fmt.name == "bf16":
        got = quants.view(ml_dtypes.bfloat16).astype(np.float64)
        low, high = (_round(h + s * error, ml_dtypes.bfloat16, np.inf) for s in (-1, 1))
        assert ((low <= got) & (got <= high)).all()
        return
    assert hidden.scales is not None
    raw = bits(hidden.scales)
    if fmt.swizzled:
        raw = raw.reshape(-1)[swizzled(scale_rows(hidden), fmt.scale_columns(hidden.num_columns))]
    raw = raw[: hidden.capacity][written]
    # The last block may be short.
    magnitude, blocks = (
        np.pad(part, ((0, 0), (0, -h.shape[1] % fmt.block))).reshape(len(h), -1, fmt.block)
        for part in (np.abs(h), error)
    )
    ends = [np.maximum(magnitude + s * blocks, 0).max(-1) for s in (-1, 1)]
    if fmt.name == "nvfp4":
        scale = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        low, high = (_round(np.minimum(gsf * end / 6, 448), ml_dtypes.float8_e4m3fn, 448) for end in ends)
        codes = np.stack([quants & 15, quants >> 4], -1).reshape(h.shape)
        got, kind, largest = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64), ml_dtypes.float4_e2m1fn, 6.0
        factor = np.divide(gsf, scale, out=np.zeros_like(scale), where=scale > 0)
    else:
        got, kind, largest = quants.view(ml_dtypes.float8_e4m3fn).astype(np.float64), ml_dtypes.float8_e4m3fn, 448.0
        ideal = [np.maximum(end, 1e-4) / 448 for end in ends]
        if fmt.name == "mxfp8":
            scale = raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
            low, high = (2.0 ** np.ceil(np.log2(end)) for end in ideal)
        else:
            scale = raw.view(np.float32).astype(np.float64)
            low, high = ideal[0] * (1 - 2.0**-23), ideal[1] * (1 + 2.0**-23)
        factor = 1 / scale
    assert ((low <= scale) & (scale <= high)).all()
    factor = factor.repeat(fmt.block, 1)[:, : h.shape[1]]
    low, high = (_round((h + s * error) * factor, kind, largest) for s in (-1, 1))
    assert ((low <= got) & (got <= high)).all()


def poison_intermediates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of quants and scales that the gated GEMM is to fill holds 0xA5 before."""
    fresh = Intermediate.empty

    def poisoned_intermediate(stored: Intermediate, a: GroupedRows) -> GroupedRows:
        rows = fresh(stored, a)
        assert rows.scales is not None
        rows.rows.view(torch.uint8).fill_(0xA5)
        rows.scales.view(torch.uint8).fill_(0xA5)
        return rows

    monkeypatch.setattr(Intermediate, "empty", poisoned_intermediate)


def check_inf_before_missing_columns(
    inner: int,
    activation: Activation,
    run: Callable[[GroupedRows, ExpertWeights], Intermediate],
    rng: torch.Generator,
    device: torch.device,
) -> None:
    """Raise unless Inf in a row, which `activation` makes finite, leaves the scales of `run`, FP8 results, finite.

    Zeros past the last of `inner` columns times Inf are NaN, and no part of the last block's scale.
    """
    numbers = (torch.rand(1, inner * activation.num_parts, 64, generator=rng) + 0.5).to(device)
    weights = numbers if activation.gated else -numbers
    w = ExpertWeights.quantize(weights, "bf16", gate_up=activation.gate_up or False, engine="torch")
    x = torch.rand(3, 64, generator=rng)
    x[1, 5] = float("inf")
    a = make_rows("bf16", [3], 64, rng, device, num_experts=1, x=x)
    exact = grouped_gemm_swiglu(a, w, activation, out_format="fp8_block", engine="torch").scales
    found = run(a, w).scales
    assert exact is not None and found is not None and exact[:3].isfinite().all()
    torch.testing.assert_close(found[:3], exact[:3], rtol=0.02, atol=1e-6)
