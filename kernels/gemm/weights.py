"""Weights of one rank's experts as the grouped GEMM reads them, and the activation between the two GEMMs.

A weight is quantized once, offline, along K. Second-level scales are not in the quants; the GEMM applies them to the
fp32 accumulator. `E` experts, `N x K` the weight of one, `I` rows of gate (if there is one)
and of up, `V = ceil(K / block)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal, NoReturn, Self, get_args

import torch

from moe_runtime.kernels.formats.number_formats import (
    FP8_BLOCK,
    WEIGHT_BLOCK_N,
    QuantizedRows,
    TokenFormat,
    ceil_div,
    weight_format_named,
)
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.kernels.formats.reference_quantize import quantize_fp8_blocks, token_gsf
from moe_runtime.kernels.formats.swizzle import swizzle_scales, unswizzle_scales
from moe_runtime.kernels.gemm.gate_limit import gate_where_silu_is
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.support.arguments import (
    check_choice,
    check_device,
    check_flag,
    check_is_tensor,
    check_number,
    describe,
)


class GateUpOrder(StrEnum):
    """Order of the rows of gate and up in the `2I` rows of the first weight.

    For `I = 2` the rows are, top to bottom: `GATE_UP` g0 g1 u0 u1, `UP_GATE` u0 u1 g0 g1, `INTERLEAVED` g0 u0 g1 u1.
    """

    GATE_UP = "gate_up"
    UP_GATE = "up_gate"
    INTERLEAVED = "interleaved"

    @classmethod
    def of(cls, value: object) -> GateUpOrder:
        """The order called `value`. Raises `ValueError` for anything else, arrays too, which an enum would compare."""
        return cls(value) if isinstance(value, str) else cls._missing_(value)

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(
            f"order of gate and up: expected one of {[order.value for order in cls]}, got {describe(value)}"
        )

    @property
    def code(self) -> int:
        """The code that kernels branch on, from 1; 0 means weights without gate and up."""
        return 1 + list(GateUpOrder).index(self)

    def gate_rows(self, num_rows: int) -> slice:
        """The rows of gate among `num_rows = 2I`."""
        half = num_rows // 2
        return (slice(0, half), slice(half, num_rows), slice(0, num_rows, 2))[self.code - 1]

    def up_rows(self, num_rows: int) -> slice:
        """The rows of up among `num_rows = 2I`."""
        half = num_rows // 2
        return (slice(half, num_rows), slice(0, half), slice(1, num_rows, 2))[self.code - 1]


class ActivationFunction(StrEnum):
    """The function of one value in an `Activation`, in fp32. NaN stays NaN.

    `SILU` is `x * sigmoid(alpha * x)`, `GELU` is `x / 2 * (1 + erf(x / sqrt(2)))`, `GELU_TANH` its approximation
    `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))` (Hendrycks and Gimpel, arXiv 1606.08415), and `RELU2` is
    `max(x, 0)^2` (So et al., arXiv 2109.08668).
    """

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"

    @classmethod
    def of(cls, value: object) -> ActivationFunction:
        """The function called `value`. Raises `ValueError` for anything else, also for arrays."""
        return cls(value) if isinstance(value, str) else cls._missing_(value)

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"function: expected one of {[each.value for each in cls]}, got {describe(value)}")

    @property
    def code(self) -> int:
        """The code that kernels branch on, from 1."""
        return 1 + list(ActivationFunction).index(self)


LimitOn = Literal["gate", "function"]
"""What a limit bounds from above, beside up: the gate, or the function of the gate."""


@dataclass(frozen=True)
class Activation:
    """The activation between the two GEMMs, in fp32: `function(gate) * (up + up_offset)`, or `function(up)`.

    A `limit` first clamps gate to at most `limit` and up to `-limit .. limit`. A softcap `c` then bounds up, and the
    gate outside of the sigmoid, by `c * tanh(x / c)`. NaN stays NaN. The defaults are `silu(gate) * up`, SwiGLU
    (Shazeer, arXiv 2002.05202). `GPT_OSS` is `swiglu` in github.com/openai/gpt-oss, gpt_oss/torch/model.py.
    `STEP_3P5` limits the function of the gate instead: `min(silu(gate), limit) * clamp(up, -limit, limit)`, as in
    Step 3.5 and Ling 3.0. Kernels clamp the gate at `gate_limit`, where its function reaches the limit.
    `SQUARED_RELU` has no gate: the first weight holds the `I` rows of up alone.

    Attributes:
        order: order of the rows of gate and up in the first weight; `GATE_UP` without a gate.
        alpha: factor inside the sigmoid of `SILU`; 1 for other functions.
        limit: the clamp, positive; None for none, and without a gate.
        limit_on: what `limit` bounds from above beside up, "gate" or "function"; the latter only with a limit, `SILU`
            of alpha 1 and no softcap.
        up_offset: added to up after the clamp; 0 without a gate.
        gate_softcap, up_softcap: softcaps, positive, of a gated `SILU` only; None for none.
        function: function of gate, or of up where there is no gate; a name is looked up.
        gated: whether there is a gate.

    Raises:
        ValueError: a value of the wrong kind, or one that the function or the missing gate excludes.
    """

    order: GateUpOrder = GateUpOrder.GATE_UP
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    function: ActivationFunction = field(default=ActivationFunction.SILU, kw_only=True)
    gated: bool = field(default=True, kw_only=True)
    gate_softcap: float | None = field(default=None, kw_only=True)
    up_softcap: float | None = field(default=None, kw_only=True)
    limit_on: LimitOn = field(default="gate", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", GateUpOrder.of(self.order))
        object.__setattr__(self, "function", ActivationFunction.of(self.function))
        check_flag("gated", self.gated)
        check_number("alpha", self.alpha)
        check_number("up_offset", self.up_offset)
        for name in ("limit", "gate_softcap", "up_softcap"):
            bound = getattr(self, name)
            is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
            if bound is not None and not (is_number and bound > 0):
                raise ValueError(f"{name}: expected a positive number or None, got {describe(bound)}")
        if self.function is not ActivationFunction.SILU and self.alpha != 1.0:
            raise ValueError(f"alpha: only silu has one, expected 1 with {self.function.value}, got {self.alpha!r}")
        for name in () if self.gated else ("order", "limit", "up_offset", "gate_softcap", "up_softcap"):
            value, default = getattr(self, name), getattr(Activation, name)
            if value != default:
                raise ValueError(f"{name}: expected {default!r} without a gate, got {value!r}")
        for name in ("gate_softcap", "up_softcap") if self.function is not ActivationFunction.SILU else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: only silu has one, expected None with {self.function.value}")
        check_choice("limit_on", self.limit_on, get_args(LimitOn))
        if self.limit_on == "function":
            self._check_limit_on_function()

    def _check_limit_on_function(self) -> None:
        if self.limit is None:
            raise ValueError("limit_on: expected gate without a limit, got function")
        required = {"function": ActivationFunction.SILU, "alpha": 1.0, "gate_softcap": None, "up_softcap": None}
        for name, expected in required.items():
            if (value := getattr(self, name)) != expected:
                said = expected.value if isinstance(expected, ActivationFunction) else expected
                raise ValueError(f"{name}: expected {said} with a limit on the function, got {value}")

    @property
    def gate_up(self) -> GateUpOrder | None:
        """The order of gate and up in the first weight; None without a gate."""
        return self.order if self.gated else None

    @property
    def num_parts(self) -> int:
        """Parts of `I` rows in the first weight: 2, gate and up, or 1."""
        return 2 if self.gated else 1

    @property
    def gate_limit(self) -> float | None:
        """What gate is clamped to at most, where `limit` bounds its function, too (`gate_where_silu_is`)."""
        return self.limit if self.limit is None or self.limit_on == "gate" else gate_where_silu_is(self.limit)

    @property
    def constants(self) -> tuple[int, bool, float, float | None, float | None, float, float | None, float | None]:
        """`(function, gated, alpha, gate_limit, limit, up_offset, gate_softcap, up_softcap)` for Triton kernels."""
        clamps = self.gate_limit, self.limit, self.up_offset
        return self.function.code, self.gated, self.alpha, *clamps, self.gate_softcap, self.up_softcap


SwiGLU = Activation
"""`Activation` under the name of what its defaults are."""


def has_blocks_apart(fmt: TokenFormat, num_rows: int, order: GateUpOrder | None) -> bool:
    """Whether gate and up, of `num_rows = 2I`, have 128x128 blocks of their own, of which the last is short.

    So it is in `fp8_block` where one lies above the other and `I` is no multiple of 128.
    """
    whole = order in (None, GateUpOrder.INTERLEAVED) or num_rows // 2 % WEIGHT_BLOCK_N == 0
    return fmt.scale_dtype == torch.float32 and not whole


def scales_shape(
    fmt: TokenFormat, num_experts: int, num_rows: int, num_columns: int, order: GateUpOrder | None
) -> tuple[int, ...] | None:
    """Shape of the block scales of weights `[E, N, K]` in a format; None if it has none."""
    blocks, columns = ceil_div(num_rows, WEIGHT_BLOCK_N), fmt.scale_columns(num_columns)
    if has_blocks_apart(fmt, num_rows, order):
        blocks = 2 * ceil_div(num_rows // 2, WEIGHT_BLOCK_N)
    if fmt.scale_dtype is None:
        return None
    return (num_experts, blocks, ceil_div(columns, 4), 32, 4, 4) if fmt.swizzled else (num_experts, blocks, columns)


SILU = Activation()
GPT_OSS = Activation(GateUpOrder.INTERLEAVED, alpha=1.702, limit=7.0, up_offset=1.0)
STEP_3P5 = Activation(limit=7.0, limit_on="function")
GEGLU = Activation(function=ActivationFunction.GELU)
GEGLU_TANH = Activation(function=ActivationFunction.GELU_TANH)
SQUARED_RELU = Activation(function=ActivationFunction.RELU2, gated=False)


@dataclass(frozen=True)
class TensorsByExpert:
    """What all forms of weights have in common: the first dimension of each tensor is the expert."""

    @property
    def num_experts(self) -> int:
        """`E`."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def expert(self, expert: int) -> Self:
        """The weights of one expert. Raises `ValueError` if it is out of range."""
        if type(expert) is not int or not 0 <= expert < self.num_experts:
            raise ValueError(f"expert: expected 0 .. {self.num_experts - 1}, got {describe(expert)}")
        return self._each(lambda tensor: tensor[expert : expert + 1])

    def to(self, device: torch.device | str) -> Self:
        """The same weights on `device`."""
        place = check_device("device", device)
        return self._each(lambda tensor: tensor.to(place))

    def clone(self) -> Self:
        """The same weights in new memory."""
        return self._each(torch.clone)

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field, without those that are None."""
        found = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in found if isinstance(value, torch.Tensor)}

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same weights with `change` applied to every tensor."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self._tensors.items()}
        return replace(self, **changed)

    def _check_tensor(
        self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype, *shapes: tuple[int, ...]
    ) -> None:
        """Raise `ValueError` unless it is None, or contiguous, of one of `shapes` and on the device of the weights."""
        if tensor is None:
            return
        shape = tuple(check_is_tensor(name, tensor).shape)
        if shape not in shapes or tensor.dtype != dtype or not tensor.is_contiguous():
            expected = " or ".join(str(list(each)) for each in shapes)
            raise ValueError(f"{name}: expected contiguous {dtype} {expected}, got {tensor.dtype} {list(shape)}")
        if tensor.device != self.device:
            raise ValueError(f"{name}: expected device {self.device}, got {tensor.device}")


@dataclass(frozen=True)
class ExpertWeights(TensorsByExpert):
    """`E` weights `[N, K]` in one format; a value is `quants * scales * expert_scales`.

    Attributes:
        format: number format of the weights (a name is looked up).
        quants: `[E, N, quant_columns(K)]` of `format.quant_dtype`, contiguous; `N` a multiple of 8.
        scales: block scales; `nvfp4`, `mxfp4` and `mxfp8`: `[E, ceil(N/128), ceil(V/4), 32, 4, 4]`, the 128x4 swizzle;
            `fp8_block`: fp32 `[E, ceil(N/128), ceil(K/128)]`, blocks of 128x128, the last ones short; with `gate_up`
            but for `INTERLEAVED`, gate and up each start with a block: `[E, 2 * ceil(I/128), ceil(K/128)]`; None for
            bf16.
        expert_scales: fp32 `[E]`, or `[E, 2]` with gate (0) and up (1) apart, applied to the fp32 accumulator; None
            means 1.
        bias: fp32 `[E, N]`, added after the scales; None means 0.
        gate_up: order of gate and up among the `N` rows; None for other weights.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, device or stride; the message names it.
    """

    format: TokenFormat
    quants: torch.Tensor
    scales: torch.Tensor | None = None
    expert_scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    gate_up: GateUpOrder | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", weight_format_named(self.format))
        if self.gate_up is not None:
            object.__setattr__(self, "gate_up", GateUpOrder.of(self.gate_up))
        if check_is_tensor("quants", self.quants).ndim != 3:
            raise ValueError(f"quants: expected [E, N, columns], got shape {list(self.quants.shape)}")
        self._check("quants", self.quants, self.quants.shape, self.format.quant_dtype)
        self.format.check_columns(self.num_columns, "K of quants")
        unit = 8 if self.gate_up is None else 16
        if self.num_rows <= 0 or self.num_rows % unit:
            raise ValueError(f"N of quants: expected a positive multiple of {unit}, got {self.num_rows}")
        shape = scales_shape(self.format, self.num_experts, self.num_rows, self.num_columns, self.gate_up)
        self._check("scales", self.scales, shape, self.format.scale_dtype)
        parts = () if self.gate_up is None else ((self.num_experts, 2),)
        self._check_tensor("expert_scales", self.expert_scales, torch.float32, (self.num_experts,), *parts)
        self._check_tensor("bias", self.bias, torch.float32, (self.num_experts, self.num_rows))

    @property
    def num_experts(self) -> int:
        """`E`."""
        return int(self.quants.shape[0])

    @property
    def num_rows(self) -> int:
        """`N`."""
        return int(self.quants.shape[1])

    @property
    def num_columns(self) -> int:
        """`K`."""
        return int(self.quants.shape[2]) * 8 * self.quants.element_size() // self.format.element_bits

    @property
    def blocks_apart(self) -> bool:
        """`has_blocks_apart` of these weights."""
        return has_blocks_apart(self.format, self.num_rows, self.gate_up)

    @property
    def device(self) -> torch.device:
        return self.quants.device

    @classmethod
    def quantize(
        cls,
        w_ENK: torch.Tensor,
        fmt: str | TokenFormat,
        *,
        gate_up: GateUpOrder | bool = False,
        bias: torch.Tensor | None = None,
        engine: str = "auto",
    ) -> ExpertWeights:
        """Quantize weights `[E, N, K]`, bf16 or fp32; a parameter is detached.

        `nvfp4`: each expert has the encode scale `min(2688 / amax, 2^100)`, separate for gate and up if `gate_up` is
        given (`True` is `GateUpOrder.GATE_UP`). The decode scales become `expert_scales`. `fp8_block`: 128x128 blocks,
        short ones at the end of N and of K. `mxfp8`, `mxfp4` and `nvfp4` blocks lie along K.

        Raises `ValueError` for a wrong shape or dtype and for a K that is no multiple of `format.unit`.
        """
        fmt = weight_format_named(fmt)
        order = (GateUpOrder.GATE_UP if gate_up else None) if isinstance(gate_up, bool) else GateUpOrder.of(gate_up)
        if check_is_tensor("w", w_ENK).ndim != 3:
            raise ValueError(f"w: expected [E, N, K], got shape {list(w_ENK.shape)}")
        if w_ENK.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"w: expected bfloat16 or float32, got {w_ENK.dtype}")
        fmt.check_columns(w_ENK.shape[2], "K of w")
        unit = 8 if order is None else 16
        if w_ENK.shape[1] <= 0 or w_ENK.shape[1] % unit:
            raise ValueError(f"N of w: expected a positive multiple of {unit}, got {w_ENK.shape[1]}")
        if bias is not None and not check_is_tensor("bias", bias).is_floating_point():
            raise ValueError(f"bias: expected floats, got {bias.dtype}")
        resolve_engine(engine, w_ENK.device)
        w_ENK = w_ENK.detach().contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        if fmt.scale_dtype is None:
            return cls(fmt, w_ENK.to(fmt.quant_dtype), bias=bias, gate_up=order)
        if fmt.scale_dtype == torch.float32:
            experts, rows, columns = w_ENK.shape
            parts = 2 if has_blocks_apart(fmt, rows, order) else 1
            w_ENK = w_ENK.float().view(experts * parts, rows // parts, columns)
            quants, scales = quantize_fp8_blocks(w_ENK, WEIGHT_BLOCK_N, FP8_BLOCK.quant_dtype)
            scales = scales.view(experts, parts * scales.shape[1], scales.shape[2])
            return cls(fmt, quants.view(experts, rows, columns), scales, bias=bias, gate_up=order)
        return cls(fmt, *_quantize_along_k(w_ENK, fmt, order, engine), bias=bias, gate_up=order)

    def dequantize(self, *, engine: str = "auto") -> torch.Tensor:
        """fp32 `[E, N, K]`: `(quant * block scale) * expert scale`, in that order; without the bias."""
        resolve_engine(engine, self.device)
        experts, rows, columns = self.num_experts, self.num_rows, self.num_columns
        if self.scales is None:
            w_ENK = self.quants.float()
        elif self.scales.dtype == torch.float32:
            blocks = self.scales[:, self.scale_rows()].repeat_interleave(self.format.block, 2)
            w_ENK = self.quants.float() * blocks[:, :, :columns]
        else:
            scales = unswizzle_scales(self.scales, rows, self.format.scale_columns(columns), engine=engine)
            ones = None
            if self.format.has_row_scale:
                ones = torch.ones(experts * rows, dtype=torch.float32, device=self.device)
            rows_RK = QuantizedRows(self.format, self.quants.flatten(0, 1), scales.flatten(0, 1), ones)
            w_ENK = dequantize_rows(rows_RK, engine=engine).view(experts, rows, columns)
        return w_ENK if self.expert_scales is None else w_ENK * self.row_factors()[:, :, None]

    def scale_rows(self) -> torch.Tensor:
        """int64 `[N]`: the row of `scales` of each weight row, of `fp8_block`."""
        row = torch.arange(self.num_rows, device=self.device)
        if not self.blocks_apart:
            return row // WEIGHT_BLOCK_N
        half = self.num_rows // 2
        return row // half * ceil_div(half, WEIGHT_BLOCK_N) + row % half // WEIGHT_BLOCK_N

    def row_factors(self) -> torch.Tensor:
        """`expert_scales` of each row, fp32 `[E, N]`; ones if there are none."""
        factors = torch.ones(self.num_experts, self.num_rows, dtype=torch.float32, device=self.device)
        if self.expert_scales is None:
            return factors
        if self.expert_scales.ndim == 1 or self.gate_up is None:
            return factors * self.expert_scales[:, None]
        factors[:, self.gate_up.gate_rows(self.num_rows)] = self.expert_scales[:, :1]
        factors[:, self.gate_up.up_rows(self.num_rows)] = self.expert_scales[:, 1:]
        return factors

    def _check(
        self, name: str, tensor: torch.Tensor | None, shape: tuple[int, ...] | None, dtype: torch.dtype | None
    ) -> None:
        if shape is None or tensor is None:
            if (shape is None) != (tensor is None):
                expected = "None" if shape is None else f"a tensor of shape {list(shape)}"
                raise ValueError(f"{name}: expected {expected} for {self.format.name}, got {type(tensor).__name__}")
            return
        if tuple(check_is_tensor(name, tensor).shape) != tuple(shape):
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")
        if tensor.device != self.quants.device:
            raise ValueError(f"{name}: expected device {self.quants.device}, got {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")


def fold_into_fp8(
    w: ExpertWeights, *, gate_up: GateUpOrder | None = None, rows: slice = slice(None), engine: str = "auto"
) -> ExpertWeights:
    """The same weights in `fp8_block`, without the bias: block scales are folded into e4m3 numbers.

    A number is the product of a quant and its block scale, times a power of two, rounded to e4m3: of `mxfp4` and
    `mxfp8` none changes while the exponents of a block of 128x128 are close. The scale of the block is the expert scale
    times the smallest power of two (from 2^-126 on) with which no number exceeds 448. Where rows of gate and of up
    share a block and differ in their expert scales, the larger one counts, and numbers of the others are first
    multiplied by the ratio, in fp32. A block becomes NaN if it holds a NaN, or a product beyond fp32, such as that of
    an `mxfp4` quant of 4 and a scale of 2^126.

    Args:
        w: weights in `nvfp4`, `mxfp4` or `mxfp8`.
        gate_up: order of gate and up in the result; None for other weights.
        rows: rows of `w` that are wanted.

    Waits for the device. Raises `ValueError` for weights in `fp8_block` or `bf16`, which have no such scales.
    """
    if not w.format.swizzled:
        raise ValueError(f"w.format: expected nvfp4, mxfp4 or mxfp8, got {w.format.name}")
    x_ENK = replace(w, expert_scales=None).dequantize(engine=engine)[:, rows]
    experts, count, columns = x_ENK.shape
    parts = 2 if has_blocks_apart(FP8_BLOCK, count, gate_up) else 1
    factors = w.row_factors()[:, rows].reshape(experts * parts, -1)
    padded = torch.nn.functional.pad(factors, (0, -factors.shape[1] % WEIGHT_BLOCK_N))
    of_blocks = padded.unflatten(1, (-1, WEIGHT_BLOCK_N)).abs().amax(2)
    of_rows = of_blocks.repeat_interleave(WEIGHT_BLOCK_N, 1)[:, : factors.shape[1]]
    ratios = torch.where(of_rows == factors, 1.0, factors / of_rows)
    x_ENK = x_ENK.reshape(experts * parts, -1, columns)
    if bool((ratios != 1.0).any()):
        x_ENK = x_ENK * ratios[:, :, None]
    quants, scales = quantize_fp8_blocks(x_ENK, WEIGHT_BLOCK_N, FP8_BLOCK.quant_dtype, powers_of_two=True)
    scales = (scales * of_blocks[:, :, None]).view(experts, -1, scales.shape[2])
    return ExpertWeights(FP8_BLOCK, quants.view(experts, count, columns), scales, gate_up=gate_up)


def _quantize_along_k(
    w_ENK: torch.Tensor, fmt: TokenFormat, order: GateUpOrder | None, engine: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quants, swizzled scales and decode scales of formats whose blocks lie along K."""
    assert fmt.scale_dtype is not None
    experts, rows, columns = w_ENK.shape
    parts = [slice(None)] if order is None else [order.gate_rows(rows), order.up_rows(rows)]
    quants = w_ENK.new_empty((experts, rows, fmt.quant_columns(columns)), dtype=fmt.quant_dtype)
    scales = w_ENK.new_empty((experts, rows, fmt.scale_columns(columns)), dtype=fmt.scale_dtype)
    expert_scales = None
    if fmt.has_row_scale:
        encode = torch.stack([token_gsf(w_ENK[:, part].float().abs().amax((1, 2))) for part in parts], 1)
        expert_scales = (1.0 / encode).contiguous() if order is not None else (1.0 / encode[:, 0]).contiguous()
        for expert in range(experts):
            for index, part in enumerate(parts):
                gsf = encode[expert, index : index + 1].contiguous()
                q = quantize_rows(w_ENK[expert, part].contiguous(), fmt, gsf=gsf, engine=engine)
                quants[expert, part] = q.quants_RK
                scales[expert, part] = _present(q.scales_RV)
    else:
        q = quantize_rows(w_ENK.flatten(0, 1), fmt, engine=engine)
        quants, scales = q.quants_RK.view(quants.shape), _present(q.scales_RV).view(scales.shape)
    return quants, swizzle_scales(scales, engine=engine), expert_scales


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
