"""RMSNorm of the rows that experts return, in place, between the down GEMM and combine.

A row `x` of an expert, bf16, becomes `y * rsqrt(mean(y^2) + eps)` in bf16 with `y = bf16(x * scale)`: the weight comes
before the norm, as in Muse Spark. One Triton kernel for every GPU, and a torch reference. The sum of a row depends on
neither its neighbours nor the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats.bits import bf16_bits_to_f32, f32_to_bf16_bits
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.operands import find_tile
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.support.arguments import check_device, check_is_tensor, check_number, describe

BLOCK_M = 4
"""Rows of a program."""
MAX_COLUMNS = 1024
"""Most columns that a program reads at a time."""


@dataclass(frozen=True)
class ExpertNorm:
    """`y * rsqrt(mean(y^2) + eps)`, `y = bf16(x * scale)`, of each row of every expert.

    Attributes:
        scale: fp32 `[H]`, contiguous.
        eps: added to the mean square; from 0, finite.

    Raises:
        ValueError: a tensor or number of another kind; the message names it.
    """

    scale: torch.Tensor
    eps: float

    def __post_init__(self) -> None:
        scale = check_is_tensor("scale", self.scale)
        if scale.ndim != 1 or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise ValueError(f"scale: expected contiguous torch.float32 [H], got {scale.dtype} {list(scale.shape)}")
        check_number("eps", self.eps)
        if self.eps < 0:
            raise ValueError(f"eps: expected a number from 0, got {describe(self.eps)}")

    def to(self, device: torch.device | str) -> ExpertNorm:
        """The same norm on `device`."""
        return replace(self, scale=self.scale.to(check_device("device", device)))


@triton.jit
def _expert_norm_kernel(
    rows_ptr,
    stride,
    scale_ptr,
    group_offsets_ptr,
    expert_ids_ptr,
    num_active_ptr,
    num_groups,
    num_experts,
    capacity,
    eps,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """`BLOCK_M` rows of one group. They are read twice: for the sum, and for the result."""
    if num_active_ptr is not None:
        num_groups = tl.minimum(num_groups, tl.load(num_active_ptr))
    expert, _, start, group_rows, block = find_tile(
        group_offsets_ptr, expert_ids_ptr, num_groups, num_experts, tl.program_id(0), BLOCK_M, BLOCK_G
    )
    if expert < 0:
        return
    local = block * BLOCK_M + tl.arange(0, BLOCK_M)
    position = start + local
    row_ok = (local < group_rows) & (position < capacity)
    of_rows = rows_ptr + position.to(tl.int64)[:, None] * stride
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for first in range(0, HIDDEN, COLUMNS):
        inside = first + column < HIDDEN
        y = _scaled(of_rows, scale_ptr, first + column, row_ok, inside)
        total += y * y
    square = tl.sum(total, axis=1) / HIDDEN
    inverse = tl.div_rn(1.0, tl.sqrt_rn(square + eps))
    for first in range(0, HIDDEN, COLUMNS):
        inside = first + column < HIDDEN
        y = _scaled(of_rows, scale_ptr, first + column, row_ok, inside) * inverse[:, None]
        result = f32_to_bf16_bits(y).to(tl.int16, bitcast=True)
        tl.store(of_rows + (first + column)[None, :], result, mask=row_ok[:, None] & inside[None, :])


@triton.jit
def _scaled(of_rows, scale_ptr, column, row_ok, inside):
    """`bf16(x * scale)` in fp32."""
    x = tl.load(of_rows + column[None, :], mask=row_ok[:, None] & inside[None, :], other=0)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0)
    return bf16_bits_to_f32(f32_to_bf16_bits(bf16_bits_to_f32(x.to(tl.uint16, bitcast=True)) * scale[None, :]))


def expert_norm(
    rows: torch.Tensor, groups: GroupedRows, num_experts: int, norm: ExpertNorm, *, engine: str = "auto"
) -> None:
    """Normalize in place the rows that a GEMM of `groups` with the weights of `num_experts` experts has written.

    Args:
        rows: bf16 `[>= groups.capacity, H]`, last dimension contiguous.
        groups: the rows of that GEMM; only its groups count.
        num_experts: rows of groups with other experts than `0 .. num_experts - 1` stay as they are.
        norm: scale `[H]` and eps.
        engine: "auto", "cuda", "triton" or "torch".

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit; the message names the argument.
    """
    hidden = norm.scale.shape[0]
    if rows.dtype != torch.bfloat16 or rows.ndim != 2 or rows.shape[0] < groups.capacity or rows.shape[1] != hidden:
        expected = f"torch.bfloat16 [at least {groups.capacity}, {hidden}]"
        raise ValueError(f"rows: expected {expected}, got {rows.dtype} {list(rows.shape)}")
    if rows.numel() and rows.stride(1) != 1:
        raise ValueError(f"rows: expected the last dimension contiguous, got strides {list(rows.stride())}")
    if norm.scale.device != rows.device:
        raise ValueError(f"norm.scale: expected device {rows.device}, got {norm.scale.device}")
    if groups.capacity == 0 or groups.num_groups == 0 or num_experts == 0:
        return
    if resolve_engine(engine, rows.device) == "torch":
        _reference(rows, groups, num_experts, norm)
        return
    options = _options(hidden, groups.num_groups)
    _expert_norm_kernel[(ceil_div(groups.capacity, BLOCK_M) + groups.num_groups,)](
        raw_bits(rows),
        rows.stride(0),
        norm.scale,
        groups.group_offsets,
        groups.expert_ids,
        groups.active_on_device,
        groups.max_active_groups,
        num_experts,
        groups.capacity,
        float(norm.eps),
        **options,
        enable_fp_fusion=False,
    )


def _reference(rows: torch.Tensor, groups: GroupedRows, num_experts: int, norm: ExpertNorm) -> None:
    """The same on the host, with the mean in float64."""
    active = groups.num_groups if groups.num_active_experts is None else int(groups.num_active_experts)
    offsets, experts = groups.group_offsets.tolist(), groups.expert_ids.tolist()
    for group in range(min(active, groups.num_groups)):
        owned = slice(offsets[group], min(offsets[group + 1], groups.capacity))
        if 0 <= experts[group] < num_experts and owned.stop > owned.start:
            y = (rows[owned].float() * norm.scale).to(rows.dtype).double()
            rows[owned] = (y * torch.rsqrt(y.square().mean(1, keepdim=True) + norm.eps)).float().to(rows.dtype)


def _options(hidden: int, num_groups: int) -> dict[str, Any]:
    columns = min(MAX_COLUMNS, triton.next_power_of_2(hidden))
    return {
        "HIDDEN": hidden,
        "COLUMNS": columns,
        "BLOCK_M": BLOCK_M,
        "BLOCK_G": max(16, triton.next_power_of_2(num_groups)),
    }
