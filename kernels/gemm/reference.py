"""Torch references of the grouped GEMM: products of the dequantized operands in float64, rounded to fp32 once.

Rows are first rounded to bf16 where the kernels round them (`number_formats.rounds_tokens`).

Rows are multiplied `ROWS_AT_ONCE` at a time, so that the sums of a row do not depend on the number of rows of its
group. Everything after the sums is the same fp32 sequence as in the kernel. These references read offsets and expert
ids on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_runtime.kernels.formats import reference_quantize as rq
from moe_runtime.kernels.formats.number_formats import TokenFormat, ceil_div, rounds_tokens
from moe_runtime.kernels.gemm.activation import activate
from moe_runtime.kernels.gemm.arguments import Intermediate, check_activation, check_operands, check_out
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import Activation, ExpertWeights

ROWS_AT_ONCE = 32
"""Rows of every float64 product; the last one is padded with zeros. For few rows BLAS sums in another order, which
shows where sums cancel. This is a multiple of BLAS's tiles, so that all rows use the same kernel. BLAS may still split
a long K among threads; sums that cancel may then depend on the number of threads."""


def grouped_gemm(
    a: GroupedRows,
    w: ExpertWeights,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Reference of `grouped_gemm.grouped_gemm`."""
    check_operands(a, w)
    out = check_out(a, w, out, out_dtype)
    for _, rows, c in _products(a, w):
        out[rows] = c.to(out.dtype)
    return out


def grouped_gemm_swiglu(
    a: GroupedRows,
    w: ExpertWeights,
    activation: Activation,
    *,
    out_format: str | TokenFormat,
    out_gsf: float | torch.Tensor | None = None,
) -> GroupedRows:
    """Reference of `grouped_gemm.grouped_gemm_swiglu`."""
    check_operands(a, w)
    check_activation(w, activation)
    intermediate = Intermediate.of(w, activation, out_format, out_gsf)
    out, gsf = intermediate.empty(a), intermediate.gsf
    for group, rows, c in _products(a, w):
        h = activate(c, activation)
        encode = torch.ones(1, dtype=torch.float32, device=h.device) if gsf is None else gsf
        q, s = rq.quantize_tile(h, encode.expand(h.shape[0]), out.format.code)
        rq.raw_bits(out.rows)[rows] = rq.raw_bits(q)
        if out.scales is None:
            continue
        if not out.format.swizzled:
            out.scales[rows] = s
            continue
        blocks = rq.swizzle_scales(s[None])[0]
        first = _first_block(out, group, rows.start)
        rq.raw_bits(out.scales)[first : first + blocks.shape[0]] = rq.raw_bits(blocks)
    return out


def dequantize_f64(
    fmt: TokenFormat, quants: torch.Tensor, scales: torch.Tensor | None, block: int | None = None
) -> torch.Tensor:
    """Exact float64 `[M, K]` of quants `[M, quant_columns(K)]` and linear scales `[M, V]`; no second-level scale.

    `block` None means that of the format. The last block may be partial.
    """
    if fmt.element_bits == 4:
        codes = torch.arange(256, dtype=torch.uint8, device=quants.device)[:, None]
        pairs = rq.e2m1_code_to_f32(rq.unpack_nibbles(codes)).double()
        values = torch.nn.functional.embedding(quants.int(), pairs).flatten(1)
    else:
        values = quants.double()
    if scales is None:
        return values
    factors = rq.e8m0_to_f32(scales) if fmt.scale_dtype == torch.uint8 else scales.float()
    block, columns = block or fmt.block, values.shape[1]
    values = torch.nn.functional.pad(values, (0, -columns % block)) if columns % block else values
    blocks = values.view(values.shape[0], factors.shape[1], block)
    return blocks.mul_(factors.double()[:, :, None]).view(values.shape)[:, :columns]


def _products(a: GroupedRows, w: ExpertWeights) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """`(group, row positions, c)` of each group with rows; `c` is fp32 `[rows, N]` with scales and bias applied."""
    factors = None if w.expert_scales is None else w.row_factors()
    num_active = a.num_groups if a.num_active_experts is None else int(a.num_active_experts)
    offsets, experts = a.group_offsets.tolist(), a.expert_ids.tolist()
    for group in range(min(num_active, a.num_groups)):
        expert = experts[group]
        rows = slice(offsets[group], min(offsets[group + 1], a.capacity))
        if not 0 <= expert < w.num_experts or rows.stop <= rows.start:
            continue
        x = _rows_f64(a, group, rows)
        if rounds_tokens(a.format, w.format):
            x = x.float().bfloat16().double()
        c = multiply_f64(x, _weight_f64(w, expert))
        if a.row_scale is not None:
            c = c * a.row_scale[rows, None]
        if factors is not None:
            c = c * factors[expert]
        if w.bias is not None:
            c = c + w.bias[expert]
        yield group, rows, c


def multiply_f64(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """fp32 `x @ w^T` of float64 operands."""
    count = x_MK.shape[0]
    padded = torch.nn.functional.pad(x_MK, (0, 0, 0, -count % ROWS_AT_ONCE))
    return torch.cat([(part @ w_NK.T).float() for part in padded.split(ROWS_AT_ONCE)])[:count]


def _first_block(a: GroupedRows, group: int, start: int) -> int:
    assert a.group_scale_offsets is not None
    return start // 128 + int(a.group_scale_offsets[group])


def _rows_f64(a: GroupedRows, group: int, rows: slice) -> torch.Tensor:
    bits = rq.raw_bits(a.rows)
    quants = bits[rows] if a.row_index is None else bits[a.row_index[rows].long()]
    quants = quants.view(a.format.quant_dtype)
    if a.scales is None or not a.format.swizzled:
        return dequantize_f64(a.format, quants, None if a.scales is None else a.scales[rows])
    first, count = _first_block(a, group, rows.start), rows.stop - rows.start
    blocks = a.scales[None, first : first + ceil_div(count, 128)]
    scales = rq.unswizzle_scales(blocks, count, a.format.scale_columns(a.num_columns))[0]
    return dequantize_f64(a.format, quants, scales)


def _weight_f64(w: ExpertWeights, expert: int) -> torch.Tensor:
    if w.scales is None:
        return dequantize_f64(w.format, w.quants[expert], None)
    if w.format.swizzled:
        columns = w.format.scale_columns(w.num_columns)
        scales = rq.unswizzle_scales(w.scales[expert : expert + 1], w.num_rows, columns)[0]
    else:
        scales = w.scales[expert, w.scale_rows()]
    return dequantize_f64(w.format, w.quants[expert], scales)
