"""Shared by all kernels of the grouped GEMM: argument checks and allocation of results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from moe_runtime.kernels.formats.number_formats import (
    MAX_ENCODE_SCALE,
    TokenFormat,
    ceil_div,
    format_named,
    token_formats_for,
)
from moe_runtime.kernels.formats.quantize import check_gsf
from moe_runtime.kernels.formats.scale_blocks import dense_128_blocks_needed, dense_128_offsets
from moe_runtime.kernels.gemm.dequant_tokens import dequantized_shape
from moe_runtime.kernels.gemm.expanded_weights import StoredWeights
from moe_runtime.kernels.gemm.grouped_rows import MAX_ROUTED_IDS, GroupedRows
from moe_runtime.kernels.gemm.weights import Activation, ExpertWeights
from moe_runtime.kernels.launch_order import IN_ORDER, LaunchOrder
from moe_runtime.support.arguments import (
    check_flag,
    check_integer,
    check_is_tensor,
    check_kind,
    check_no_grad,
    describe,
)

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

DEFAULT_INTERMEDIATE_GSF = 16.0
"""Encode scale of an NVFP4 intermediate if neither checkpoint nor config gives one.

A tile of the epilogue cannot see a whole row, so this is a constant. Block maxima from `6 * 2^-6 / 16 = 0.006` to
`2688 / 16 = 168` keep the full precision of their e4m3 block scale. Below that the scale is a multiple of 2^-9, off by
at most 2^-10, which adds at most `6 * 2^-10 / 16 = 0.0004` to the error of a value; a block whose maximum is under
0.0004 becomes zeros. Values above 168 saturate. A calibrated scale is better.
"""


def check_formats(a: TokenFormat, w: TokenFormat, argument: str) -> None:
    """Raise `ValueError` naming `argument` unless rows in format `a` can be multiplied with weights in `w`."""
    allowed = token_formats_for(w.name)
    if format_named(a, argument).name not in allowed:
        raise ValueError(f"{argument}: expected {' or '.join(allowed)} with {w.name} weights, got {a.name}")


def check_operands(a: GroupedRows, w: StoredWeights) -> None:
    """Raise `ValueError` naming the argument unless `a` and `w` can be multiplied."""
    try:
        _check_operands(a, w)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        # Every GEMM of a step comes here, so kinds are looked at only now.
        _check_kinds(a)
        raise


def _check_kinds(a: GroupedRows) -> None:
    check_kind("a", a, GroupedRows)
    check_kind("a.format", a.format, TokenFormat)
    check_integer("a.num_columns", a.num_columns)
    for name in ("rows", "group_offsets", "expert_ids"):
        check_is_tensor(f"a.{name}", getattr(a, name))
    for name in ("scales", "row_scale", "row_index", "group_scale_offsets", "dequantized"):
        if (tensor := getattr(a, name)) is not None:
            check_is_tensor(f"a.{name}", tensor)
    check_kind("a.order", a.order, LaunchOrder)
    for name in ("routed_ids", "route_weights"):
        if (tensor := getattr(a.order, name)) is not None:
            check_is_tensor(f"a.order.{name}", tensor)


def _check_operands(a: GroupedRows, w: StoredWeights) -> None:
    check_formats(a.format, w.format, "a.format")
    if a.num_columns != w.num_columns:
        raise ValueError(f"w: expected K = {a.num_columns} as in a, got {w.num_columns}")
    if a.rows.device != w.device:
        raise ValueError(f"w: expected device {a.rows.device} as a.rows, got {w.device}")
    a.format.check_columns(a.num_columns, "a.num_columns")
    columns = a.format.quant_columns(a.num_columns)
    check_no_grad("a.rows", a.rows)
    if a.rows.ndim != 2 or a.rows.shape[1] != columns or a.rows.dtype != a.format.quant_dtype:
        raise ValueError(
            f"a.rows: expected [*, {columns}] of {a.format.quant_dtype}, got {list(a.rows.shape)} of {a.rows.dtype}"
        )
    if a.rows.numel() and a.rows.stride(1) != 1:
        raise ValueError(f"a.rows: expected the last dimension contiguous, got strides {list(a.rows.stride())}")
    if type(a.capacity) is not int or a.capacity < 0:
        raise ValueError(f"a.capacity: expected at least 0, got {describe(a.capacity)}")
    if a.expected_rows is not None and (type(a.expected_rows) is not int or a.expected_rows < 0):
        raise ValueError(f"a.expected_rows: expected at least 0, got {describe(a.expected_rows)}")
    if a.dequantized is None and a.row_index is None and a.rows.shape[0] < a.capacity:
        raise ValueError(f"a.rows: expected at least capacity = {a.capacity} rows, got {a.rows.shape[0]}")
    if a.expert_ids.ndim != 1:
        raise ValueError(f"a.expert_ids: expected one dimension, got shape {list(a.expert_ids.shape)}")
    groups = a.num_groups
    _check(a, "expert_ids", a.expert_ids, torch.int32, groups)
    _check(a, "group_offsets", check_is_tensor("a.group_offsets", a.group_offsets), torch.int32, groups + 1)
    _check(a, "row_index", a.row_index, torch.int32, a.capacity)
    _check(a, "row_scale", a.row_scale, torch.float32, a.capacity)
    if a.format.has_row_scale and a.row_scale is None:
        raise ValueError(f"a.row_scale: expected one for {a.format.name}, got None")
    active = a.num_active_experts
    if isinstance(active, torch.Tensor):
        if active.numel() != 1:
            raise ValueError(f"a.num_active_experts: expected one element, got shape {list(active.shape)}")
        _check(a, "num_active_experts", active.reshape(1), torch.int32, 1)
    elif active is not None and type(active) is not int:
        raise ValueError(f"a.num_active_experts: expected an int or an int32 tensor, got {describe(active)}")
    check_flag("a.order.only_rows_pending", a.order.only_rows_pending)
    if a.order.routed_ids is not None:
        check_integer("a.order.first_id", a.order.first_id, 0)
        _check_ids(a, a.order.routed_ids, a.order.route_weights)
    elif a.order.route_weights is not None:
        raise ValueError("a.order.route_weights: expected None without routed_ids, got a tensor")
    if a.dequantized is not None:
        _check_dequantized(a, a.dequantized)
        return
    scale_columns = a.format.scale_columns(a.num_columns)
    check_flag("a.scales_in_record", a.scales_in_record)
    if a.scales_in_record:
        _check_scales_in_record(a, scale_columns)
    elif a.format.swizzled:
        if a.group_scale_offsets is None:
            raise ValueError(f"a.group_scale_offsets: expected int32 [{groups}] for {a.format.name}, got None")
        _check(a, "group_scale_offsets", a.group_scale_offsets, torch.int32, groups)
        _check_scales(a, "[*, {}, {}, {}, {}]", (ceil_div(scale_columns, 4), 32, 4, 4))
    elif a.format.scale_dtype is not None:
        _check_scales(a, "[*, {}]", (scale_columns,), at_least=a.capacity)
    elif a.scales is not None:
        raise ValueError(f"a.scales: expected None for {a.format.name}, got {type(a.scales).__name__}")


def _check(a: GroupedRows, name: str, tensor: torch.Tensor | None, dtype: torch.dtype, size: int) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise ValueError(f"a.{name}: expected {dtype}, got {tensor.dtype}")
    if tensor.ndim != 1 or tensor.shape[0] < size:
        raise ValueError(f"a.{name}: expected [at least {size}], got shape {list(tensor.shape)}")
    _check_place(a, name, tensor)


def _check_place(a: GroupedRows, name: str, tensor: torch.Tensor) -> None:
    if tensor.device != a.rows.device or not tensor.is_contiguous():
        found = f"strides {list(tensor.stride())} on {tensor.device}"
        raise ValueError(f"a.{name}: expected a contiguous tensor on {a.rows.device}, got {found}")


def _check_ids(a: GroupedRows, ids: torch.Tensor, weights: torch.Tensor | None) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"a.order.routed_ids: expected int32 or int64, got {ids.dtype}")
    if ids.numel() > MAX_ROUTED_IDS:
        raise ValueError(f"a.order.routed_ids: expected at most {MAX_ROUTED_IDS} ids, got {ids.numel()}")
    _check_place(a, "order.routed_ids", ids)
    if weights is not None:
        if weights.dtype != torch.float32 or weights.shape != ids.shape:
            found = f"{weights.dtype} {list(weights.shape)}"
            raise ValueError(f"a.order.route_weights: expected torch.float32 {list(ids.shape)}, got {found}")
        _check_place(a, "order.route_weights", weights)


def _check_dequantized(a: GroupedRows, dequantized: torch.Tensor) -> None:
    blocks = dequantized_shape(a, a.num_columns)
    if dequantized.dtype == torch.bfloat16:
        fits = dequantized.ndim == 2 and dequantized.shape[0] >= a.capacity and dequantized.shape[1] == a.num_columns
    else:
        fits = dequantized.dtype == torch.uint8 and dequantized.shape == blocks
    if not fits:
        found = f"{list(dequantized.shape)} of {dequantized.dtype}"
        raise ValueError(
            f"a.dequantized: expected [at least {a.capacity}, {a.num_columns}] of torch.bfloat16 or {list(blocks)} of "
            f"torch.uint8, got {found}"
        )
    _check_place(a, "dequantized", dequantized)


def _check_scales(a: GroupedRows, pattern: str, tail: tuple[int, ...], at_least: int = 0) -> None:
    expected = f"{pattern.format(*tail)} of {a.format.scale_dtype}"
    if a.scales is None or tuple(a.scales.shape[1:]) != tail or a.scales.dtype != a.format.scale_dtype:
        found = "None" if a.scales is None else f"{list(a.scales.shape)} of {a.scales.dtype}"
        raise ValueError(f"a.scales: expected {expected} for {a.format.name}, got {found}")
    if a.scales.shape[0] < at_least:
        raise ValueError(f"a.scales: expected [at least {at_least}, {tail[0]}], got {list(a.scales.shape)}")
    _check_place(a, "scales", a.scales)


def _check_scales_in_record(a: GroupedRows, columns: int) -> None:
    scales = a.scales
    if scales is None or scales.dtype != a.format.scale_dtype or scales.element_size() != 1:
        kind = None if scales is None else scales.dtype
        raise ValueError(f"a.scales: expected {a.format.scale_dtype} of one byte by row, got {kind}")
    if scales.shape != (a.rows.shape[0], columns) or scales.stride(1) != 1 or scales.device != a.rows.device:
        found = f"{list(scales.shape)} with strides {list(scales.stride())} on {scales.device}"
        raise ValueError(f"a.scales: expected {[a.rows.shape[0], columns]} on {a.rows.device}, got {found}")


def check_out(a: GroupedRows, w: StoredWeights, out: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """`out`, or an uninitialized `[capacity, N]`. Raises `ValueError` naming the argument."""
    if out is not None:
        check_no_grad("out", check_is_tensor("out", out))
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("out: expected a tensor made outside of the inference mode, or a call inside of it")
        out_dtype = out.dtype
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"{'out_dtype' if out is None else 'out'}: expected one of {OUT_DTYPES}, got {out_dtype}")
    if out is None:
        return torch.empty(a.capacity, w.num_rows, dtype=out_dtype, device=w.device)
    if out.ndim != 2 or out.shape[0] < a.capacity or out.shape[1] != w.num_rows:
        raise ValueError(f"out: expected [at least {a.capacity}, {w.num_rows}], got {list(out.shape)}")
    if out.device != w.device:
        raise ValueError(f"out: expected device {w.device}, got {out.device}")
    if out.numel() and out.stride(1) != 1:
        raise ValueError(f"out: expected the last dimension contiguous, got strides {list(out.stride())}")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"out: expected rows that do not overlap, got strides {list(out.stride())}")
    return out


def check_activation(w: StoredWeights, activation: Activation, argument: str = "w") -> None:
    """Raise `ValueError` naming `argument` unless `w` goes with `activation`.

    It must be a weight of gate and up in its order, which prepacked weights must say, or of up where it has no gate.
    """
    expected = activation.gate_up
    if w.gate_up is None and expected is not None:
        if not isinstance(w, ExpertWeights):
            raise ValueError(f"{argument}.gate_up: expected prepacked weights of gate and up, got plain ones")
        if w.num_rows % 16:
            raise ValueError(f"{argument}: expected N = 2I with I a multiple of 8, got N = {w.num_rows}")
    elif w.gate_up is not expected:
        assert w.gate_up is not None
        if expected is None:
            raise ValueError(f"{argument}.gate_up: expected None without a gate, got {w.gate_up.value}")
        raise ValueError(f"activation.order: expected {w.gate_up.value} as in {argument}, got {expected.value}")


@dataclass(frozen=True)
class Intermediate:
    """How an activated result lies in memory until the next GEMM has read it: what is the same in each step.

    Attributes:
        format: of the result.
        num_columns: `I`.
        gsf: encode scale, fp32 `[1]`; None for formats without a row scale.
        finished: whether `row_scale` is filled here, with `1 / gsf`, and `gsf` clamped. Else the kernel does both.
        dequantized: shape and dtype of the dequantized rows that stand for rows and scales; None where there are none.
        order: of the rows (`GroupedRows`).
    """

    format: TokenFormat
    num_columns: int
    gsf: torch.Tensor | None
    finished: bool = True
    dequantized: tuple[tuple[int, ...], torch.dtype] | None = None
    order: LaunchOrder = IN_ORDER

    @classmethod
    def of(
        cls,
        w: StoredWeights,
        activation: Activation,
        out_format: str | TokenFormat,
        out_gsf: float | torch.Tensor | None,
        **more: Any,
    ) -> Intermediate:
        """That of a GEMM with `w` which stores `out_format`; `more` are other attributes.

        Raises `ValueError` for a format that does not go with `w`, or an encode scale that does not go with the format.
        """
        fmt, num_columns = format_named(out_format), w.num_rows // activation.num_parts
        fmt.check_columns(num_columns, "I of w")
        gsf = encode_scale(fmt, out_gsf, w.device, "out_gsf", clamped=more.get("finished", True))
        return cls(fmt, num_columns, gsf, **more)

    @cached_property
    def _quant_columns(self) -> int:
        return self.format.quant_columns(self.num_columns)

    @cached_property
    def _scale_columns(self) -> int:
        return self.format.scale_columns(self.num_columns)

    def empty(self, a: GroupedRows) -> GroupedRows:
        """Uninitialized rows `[capacity, I]` of the groups of `a`.

        Swizzled scales use the scale offsets of `a` if `a` has swizzled scales (they may leave larger gaps than
        `dense_128`), else those of `dense_128`.
        """
        fmt, device, capacity = self.format, a.rows.device, a.capacity
        row_scale = scales = scale_offsets = dequantized = None
        if self.gsf is not None:
            row_scale = torch.empty(capacity, dtype=torch.float32, device=device)
            if self.finished:
                torch.reciprocal(self.gsf.expand(capacity), out=row_scale)
        stored = capacity
        if self.dequantized is not None:
            shape, dtype = self.dequantized
            dequantized, stored = torch.empty(shape, dtype=dtype, device=device), 0
        elif fmt.swizzled:
            if a.format.swizzled and not a.scales_in_record:
                assert a.scales is not None
                scale_offsets, blocks = a.group_scale_offsets, a.scales.shape[0]
            else:
                scale_offsets = dense_128_offsets(a.group_offsets[: a.num_groups + 1])
                blocks = dense_128_blocks_needed(capacity, a.num_groups)
            columns = ceil_div(self._scale_columns, 4)
            scales = torch.empty(blocks, columns, 32, 4, 4, dtype=fmt.scale_dtype, device=device)
        elif fmt.scale_dtype is not None:
            scales = torch.empty(capacity, self._scale_columns, dtype=fmt.scale_dtype, device=device)
        return GroupedRows._of(
            format=fmt,
            rows=torch.empty(stored, self._quant_columns, dtype=fmt.quant_dtype, device=device),
            scales=scales,
            row_scale=row_scale,
            row_index=None,
            group_offsets=a.group_offsets,
            group_scale_offsets=scale_offsets,
            expert_ids=a.expert_ids,
            capacity=capacity,
            num_columns=self.num_columns,
            num_active_experts=a.num_active_experts,
            dequantized=dequantized,
            expected_rows=a.expected_rows,
            order=self.order,
        )


def encode_scale(
    fmt: TokenFormat, gsf: float | torch.Tensor | None, device: torch.device, argument: str, *, clamped: bool = True
) -> torch.Tensor | None:
    """The static encode scale as fp32 `[1]` on `device`, clamped to 2^100; None for formats without one.

    `gsf` None means the default. With `clamped=False` a tensor is returned unchanged. Raises `ValueError` naming
    `argument` for a `gsf` that is not a positive number, or one for a format without an encode scale.
    """
    if fmt.has_row_scale and gsf is None:
        gsf = DEFAULT_INTERMEDIATE_GSF
    scale = check_gsf(gsf, fmt, device, argument)
    if scale is None or not isinstance(gsf, torch.Tensor) or not clamped:
        return scale
    return scale.clamp(max=MAX_ENCODE_SCALE)
