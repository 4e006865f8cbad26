"""What FP8 MMA on Hopper may lose of a sum: it keeps few bits, and only until the sum is promoted, each 128 of K.

`p` is how many bits behind the leading one of its largest term, or of the sum so far, an MMA keeps of every term. A
term that it adds loses less than `2^-p` of that largest one. In 128 of K there are 4 MMAs of 32 products, the sum so
far and the roundings of the result: hence `4 * 34 * 2^-p * max(|a_j b_j|, |partial sum|)`.

`R` rows, `N` columns of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.launch.benchmarks.checks import FP8_MMA_GAIN

CHUNK = 128
"""Products of K between two promotions to fp32."""

_ROWS_AT_ONCE = 16
"""Of the torch form, which holds `_ROWS_AT_ONCE * N * CHUNK` products."""


def fp8_mma_slack(a_RK: torch.Tensor, b_NK: torch.Tensor, *, engine: str = "auto") -> torch.Tensor:
    """`FP8_MMA_GAIN` times the largest term or partial sum, summed over the chunks of K: float64 `[R, N]`.

    Args:
        a_RK: dequantized rows, float64; any K.
        b_NK: dequantized weights, float64, on the same device.
        engine: "auto", "triton" (in fp32, which is exact to 2^-16 of the result) or "torch".
    """
    if resolve_engine(engine, a_RK.device) == "torch":
        return FP8_MMA_GAIN * _largest_torch(a_RK, b_NK)
    rows, columns, k = a_RK.shape[0], b_NK.shape[0], a_RK.shape[1]
    largest = torch.empty(rows, columns, dtype=torch.float32, device=a_RK.device)
    if largest.numel():
        grid = (ceil_div(rows, 32), ceil_div(columns, 64))
        # By K, so that a program's loads lie side by side.
        a_KR, b_KN = (t.float().t().contiguous() for t in (a_RK, b_NK))
        _largest[grid](a_KR, b_KN, largest, rows, columns, k, CHUNK=CHUNK, BLOCK_R=32, BLOCK_N=64)
    return FP8_MMA_GAIN * largest.double()


def _largest_torch(a_RK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    total = a_RK.new_zeros(a_RK.shape[0], b_NK.shape[0])
    for k in range(0, a_RK.shape[1], CHUNK):
        for first in range(0, a_RK.shape[0], _ROWS_AT_ONCE):
            place = slice(first, first + _ROWS_AT_ONCE)
            products = a_RK[place, None, k : k + CHUNK] * b_NK[None, :, k : k + CHUNK]
            total[place] += torch.maximum(products.abs().amax(-1), products.cumsum(-1).abs().amax(-1))
    return total


@triton.jit
def _largest(
    a_ptr,
    b_ptr,
    out_ptr,
    num_rows,
    num_columns,
    K,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum over chunks of the largest `|a_j b_j|` or partial sum of a chunk; `a` is `[K, R]`, `b` `[K, N]`."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptrs, b_ptrs = a_ptr + row, b_ptr + column
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for first in range(0, K, CHUNK):
        partial = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        largest = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for _ in range(tl.minimum(CHUNK, K - first)):
            a = tl.load(a_ptrs, mask=row < num_rows, other=0.0)
            b = tl.load(b_ptrs, mask=column < num_columns, other=0.0)
            product = a[:, None] * b[None, :]
            partial += product
            largest = tl.maximum(largest, tl.maximum(tl.abs(product), tl.abs(partial)))
            a_ptrs += num_rows
            b_ptrs += num_columns
        total += largest
    place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out_ptr + place, total, mask=(row < num_rows)[:, None] & (column < num_columns)[None, :])
