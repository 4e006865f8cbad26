"""Torch reference of `op_gemm.py`: float64 products of dequantized operands, rounded to fp32 once, then scaled.

It reads offsets and expert ids on the host.
"""

from __future__ import annotations

import torch

from moe_runtime.kernels.formats.number_formats import WEIGHT_BLOCK_N, ScaleLayout, align, ceil_div
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.formats.scale_blocks import dense_128_block, swizzled_offset, unpadded_row
from moe_runtime.kernels.gemm.activation import activate
from moe_runtime.kernels.gemm.op_problem import OpProblem, ScaledOperand
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.reference import dequantize_f64, multiply_f64


@torch.inference_mode()  # an output that was made in this mode may not be changed outside it
def op_gemm(problem: OpProblem, out: torch.Tensor) -> None:
    """Reference of `op_gemm.op_gemm`."""
    p = problem
    b = p.b
    assert not isinstance(b, PrepackedWeights)
    num_active = p.num_groups if p.num_active is None else min(p.num_groups, int(p.num_active))
    offsets, experts = p.group_offsets.tolist(), p.expert_ids.tolist()
    for group in range(num_active):
        start, end, expert = offsets[group], min(offsets[group + 1], p.num_rows), experts[group]
        if not 0 <= expert < p.num_experts or end <= start:
            continue
        w = _dequantize(p, b, b.quants[expert], _weight_scale_rows(p, b, expert))
        x = _dequantize(p, p.a, raw_bits(p.a.quants)[start:end].view(p.a.quants.dtype), _row_scale_rows(p, group, end))
        c = multiply_f64(x, w)
        if p.expert_scales is not None:
            c = c * p.expert_scales[expert]
        if p.activation is not None:
            c = activate(c, p.activation)
        out[start:end] = c.to(out.dtype)


def scale_places(layout: ScaleLayout, rows: torch.Tensor, num_columns: int, ld: int | None) -> torch.Tensor:
    """Index `[M, V]` of the scales of scale rows `rows` (int64 `[M]`) among all scales of an operand.

    >>> rows = torch.tensor([0, 1])
    >>> scale_places(ScaleLayout.K_MAJOR, rows, 3, None).tolist()
    [[0, 1, 2], [3, 4, 5]]
    >>> scale_places(ScaleLayout.MN_MAJOR, rows, 3, 8).tolist()
    [[0, 8, 16], [1, 9, 17]]
    >>> scale_places(ScaleLayout.PACKED, rows, 5, 8).tolist()
    [[0, 1, 2, 3, 32], [4, 5, 6, 7, 36]]
    """
    r, v = rows[:, None], torch.arange(num_columns, device=rows.device)[None, :]
    if layout is ScaleLayout.SWIZZLED:
        return swizzled_offset(r, v, num_columns)
    if layout is ScaleLayout.K_MAJOR:
        return r * num_columns + v
    assert ld is not None
    if layout is ScaleLayout.MN_MAJOR:
        return v * ld + r
    return (v // 4 * ld + r) * 4 + v % 4


def _dequantize(p: OpProblem, operand: ScaledOperand, quants: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    places = scale_places(operand.layout, rows, ceil_div(p.num_columns, p.block), operand.ld)
    scales = raw_bits(operand.scales)[places]
    assert p.format.scale_dtype is not None
    return dequantize_f64(p.format, quants, scales.view(p.format.scale_dtype), p.block)


def _row_scale_rows(p: OpProblem, group: int, end: int) -> torch.Tensor:
    start = int(p.group_offsets[group])
    local = torch.arange(end - start, device=p.a.quants.device)
    if p.scale_offsets is None:
        return unpadded_row(torch.full_like(local, start), local, p.rows_per_scale)
    offset = int(p.scale_offsets[group])
    if p.a.layout is ScaleLayout.SWIZZLED:
        return dense_128_block(start, offset, 0) * 128 + local
    return offset + local


def _weight_scale_rows(p: OpProblem, b: ScaledOperand, expert: int) -> torch.Tensor:
    row = torch.arange(p.num_outputs, device=b.quants.device)
    columns = ceil_div(p.num_columns, p.block)
    if b.layout is ScaleLayout.SWIZZLED:
        return expert * align(p.num_outputs, 128) + row
    if b.layout is ScaleLayout.K_MAJOR:
        return expert * ceil_div(p.num_outputs, WEIGHT_BLOCK_N) + row // WEIGHT_BLOCK_N
    assert b.ld is not None
    if b.layout is ScaleLayout.MN_MAJOR:
        return expert * columns * b.ld + row // WEIGHT_BLOCK_N
    return expert * ceil_div(columns, 4) * b.ld + row
