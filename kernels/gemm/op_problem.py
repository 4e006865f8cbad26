"""`OpProblem`, the argument of `op_gemm`: one record for all operations of `moe_runtime.ops`.

`R` rows, `E` experts, `G` groups, `N`/`K` the weight of one expert, `V = ceil(K / block)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.kernels.formats.number_formats import ScaleLayout, TokenFormat
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import Activation


@dataclass(frozen=True)
class ScaledOperand:
    """Quants and their block scales.

    Attributes:
        quants: contiguous `[R, quant_columns(K)]`, or `[E, N, quant_columns(K)]`.
        scales: one-dimensional and contiguous: fp32, or bytes.
        layout: position of a scale among them.
        ld: leading dimension in scale rows, of layouts that have one; else None.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    layout: ScaleLayout
    ld: int | None = None


@dataclass(frozen=True)
class OpProblem:
    """`out[rows of group] = (a[rows of group] @ b[expert]^T) * expert_scales[expert]`, then the activation.

    Attributes:
        format: format of both operands (e5m2 quants count as `fp8_block`).
        a: rows.
        b: weights. Only Hopper GPUs support prepacked weights.
        group_offsets: int32 `[>= num_groups + 1]`.
        scale_offsets: int32 `[>= num_groups]`: the shift of `dense_128` for swizzled scales, the first scale row for
            `PACKED` ones and for `MN_MAJOR` ones by `closed_form_4`; None for `unpadded` ones.
        expert_ids: int32 `[>= num_groups]`; an id outside `0 .. E-1` skips the group.
        num_groups: groups that may be active.
        num_active: how many of these are active, one int32 on the device; None means all.
        expert_scales: fp32 `[E]`, or None for 1.
        num_columns: `K`.
        block: values of K that share a scale.
        rows_per_scale: rows that share a scale of `a`, for `unpadded` scales.
        max_tile_n: largest tile along N.
        activation: combines gate and up among the `N` rows of raw weights into `N / 2` columns; None for plain results.
    """

    format: TokenFormat
    a: ScaledOperand
    b: ScaledOperand | PrepackedWeights
    group_offsets: torch.Tensor
    scale_offsets: torch.Tensor | None
    expert_ids: torch.Tensor
    num_groups: int
    num_active: torch.Tensor | None
    expert_scales: torch.Tensor | None
    num_columns: int
    block: int
    rows_per_scale: int = 1
    max_tile_n: int = 128
    activation: Activation | None = None

    @property
    def num_rows(self) -> int:
        """`R`."""
        return int(self.a.quants.shape[0])

    @property
    def num_experts(self) -> int:
        """`E`."""
        return self.b.num_experts if isinstance(self.b, PrepackedWeights) else int(self.b.quants.shape[0])

    @property
    def num_outputs(self) -> int:
        """`N`."""
        return self.b.num_rows if isinstance(self.b, PrepackedWeights) else int(self.b.quants.shape[1])
