"""`deep_ep.utils.math`: FP8 in blocks of 128, and what DeepEP's tests compare with."""

from __future__ import annotations

import torch

from moe_runtime.deep_ep.sizes import FP8_BLOCK_SIZE as BLOCK
from moe_runtime.kernels.formats.number_formats import align, ceil_div

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "hash_tensor",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]

LARGEST, LEAST = 448.0, 1e-4
"""The largest e4m3, and the least magnitude that a scale is made for: DeepEP's."""


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """`1 - 2 <x', y'> / (|x'|^2 + |y'|^2)` in float64 with `x' = x + 1` and `y' = y + 1`; 0 for equal tensors."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * torch.sum(a * b) / torch.sum(a.square() + b.square()))


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[T, H]` as e4m3 `[T, H]` and fp32 scales `[T, ceil(H / 128)]`, the largest magnitude of a block over 448."""
    rows, columns = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK)).view(rows, ceil_div(columns, BLOCK), BLOCK)
    scales = blocks.abs().amax(dim=2).clamp(min=LEAST) / LARGEST
    quants = (blocks / scales[:, :, None]).to(torch.float8_e4m3fn)
    return quants.flatten(1)[:, :columns].contiguous(), scales


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """bf16 `[T, H]` of e4m3 `[T, H]` and its scales: fp32 `[T, ceil(H / 128)]`, or UE8M0 bytes, four in an int32."""
    if x_scales.dtype == torch.int32:
        x_scales = (x_scales.contiguous().flatten().view(torch.uint8).int() << 23).view(torch.float32)
    rows, columns = x_fp8.shape
    if rows == 0:
        return x_fp8.to(torch.bfloat16)
    of_column = x_scales.reshape(rows, ceil_div(columns, BLOCK)).repeat_interleave(BLOCK, dim=1)[:, :columns]
    return (x_fp8.float() * of_column).to(torch.bfloat16)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Keep each value below `num_slots` once in each row of int `x` `[T, K]`, the most frequent first, then -1."""
    counts = torch.stack([(x == value).sum(dim=1) for value in range(num_slots)], dim=1)
    values = counts.argsort(dim=1, descending=True, stable=True)
    values = values.masked_fill(counts.gather(1, values) == 0, -1)
    kept = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :kept] = values[:, :kept].to(x.dtype)


def hash_tensor(t: torch.Tensor) -> int:
    """The sum of the tensor's bytes as int32 words: equal for equal bits."""
    return int(t.contiguous().view(torch.int32).sum())


def count_bytes(*tensors: object) -> int:
    """Bytes of all tensors, also of those in lists and tuples; None has none."""
    total = 0
    for one in tensors:
        if isinstance(one, tuple | list):
            total += count_bytes(*one)
        elif isinstance(one, torch.Tensor):
            total += one.numel() * one.element_size()
    return total


def safe_div(a: float, b: float) -> float:
    """`a / b`, and 0 for `0 / 0`."""
    return 0 if a == b == 0 else a / b
