"""The grouped GEMM behind `moe_runtime.ops`: one problem record for all operations, on the kernel that layers use.

An operation differs from a layer in data alone: the layout of its scales, their block along K, and where those of a
group start. On Blackwell, NVFP4 and MXFP8 take the block-scaled MMA instead of bf16.

`R` rows, `E` experts, `G` groups, `N`/`K` the weight of one expert, `V = ceil(K / block)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from moe_runtime.formats import FP8_BLOCK, ScaleLayout, TokenFormat, ceil_div
from moe_runtime.grouped import GroupedRows
from moe_runtime.kernels import reference_op_gemm, tma_gemm
from moe_runtime.kernels.decoded_gemm import decoded_gemm
from moe_runtime.kernels.grouped_gemm import GemmTile, _grouped_gemm_kernel, choose_tile
from moe_runtime.kernels.reference_quantize import raw_bits
from moe_runtime.kernels.runtime import INTERPRET, resolve_engine
from moe_runtime.prepared import PreparedWeights
from moe_runtime.weights import ExpertWeights


@dataclass(frozen=True)
class ScaledOperand:
    """Quants and their block scales.

    Attributes:
        quants: contiguous `[R, quant_columns(K)]`, or `[E, N, quant_columns(K)]`.
        scales: one-dimensional and contiguous: fp32, or bytes.
        layout: where a scale lies among them.
        ld: leading dimension of the layouts that have one, in scale rows; else None.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    layout: ScaleLayout
    ld: int | None = None


@dataclass(frozen=True)
class OpProblem:
    """`out[rows of group] = (a[rows of group] @ b[expert]^T) * expert_scales[expert]`.

    Attributes:
        format: of both operands (e5m2 quants count as `fp8_block`).
        a: rows.
        b: weights; prepared ones on a Hopper GPU alone.
        group_offsets: int32 `[>= num_groups + 1]`.
        scale_offsets: int32 `[>= num_groups]`: the shift of `dense_128` for swizzled scales, the first scale row for
            packed ones; None for `unpadded` ones.
        expert_ids: int32 `[>= num_groups]`; an id outside `0 .. E-1` skips the group.
        num_groups: groups that may be active.
        num_active: how many of them are, one int32 on the device; None means all.
        expert_scales: fp32 `[E]`, or None for 1.
        num_columns: `K`.
        block: numbers of K that share a scale.
        rows_per_scale: rows that share a scale of `a`, where those are `unpadded`.
        max_tile_n: largest tile along N.
    """

    format: TokenFormat
    a: ScaledOperand
    b: ScaledOperand | PreparedWeights
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

    @property
    def num_rows(self) -> int:
        """`R`."""
        return int(self.a.quants.shape[0])

    @property
    def num_experts(self) -> int:
        """`E`."""
        return self.b.num_experts if isinstance(self.b, PreparedWeights) else int(self.b.quants.shape[0])

    @property
    def num_outputs(self) -> int:
        """`N`."""
        return self.b.num_rows if isinstance(self.b, PreparedWeights) else int(self.b.quants.shape[1])


def choose_op_tile(n: int, fmt: TokenFormat, max_tile_n: int, native: bool = False) -> GemmTile:
    """The tile of a layer's GEMM, not wider than `max_tile_n`. The order of sums along K does not depend on it.

    Block-scaled MMA on sm_100 wants 128 rows; two stages of MXFP8 keep to the 99 KiB of sm_120.
    """
    tile = choose_tile(n, fmt)
    tile = replace(tile, block_n=min(tile.block_n, max_tile_n))
    return replace(tile, block_m=128, num_stages=2) if native else tile


def has_native_mma(fmt: TokenFormat, device: torch.device) -> bool:
    """Whether block-scaled MMA multiplies `fmt` there: NVFP4 and MXFP8 on GPUs from sm_100 on."""
    if device.type != "cuda" or fmt.scale_dtype == torch.float32:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 10


def op_gemm(problem: OpProblem, out: torch.Tensor, *, engine: str = "auto") -> None:
    """Fill `out` `[R, N]`, bf16, fp16 or fp32; rows that no active group with an expert owns are not written."""
    p = problem
    if isinstance(p.b, PreparedWeights):
        decoded_gemm(
            _grouped_rows(p), replace(p.b, expert_scales=p.expert_scales), out, packed_ld=p.a.ld, scale_block=p.block
        )
        return
    if (
        resolve_engine(engine, out.device) == "cuda"
        and p.format is FP8_BLOCK
        and p.rows_per_scale == 1
        and _tma_gemm(p, p.b, out)
    ):
        return
    if resolve_engine(engine, out.device) == "torch":
        reference_op_gemm.op_gemm(p, out)
        return
    if p.num_rows == 0 or p.num_groups == 0 or p.num_experts == 0:
        return
    native = has_native_mma(p.format, out.device)
    tile = choose_op_tile(p.num_outputs, p.format, p.max_tile_n, native)
    tiles = (ceil_div(p.num_rows, tile.block_m) + p.num_groups) * ceil_div(p.num_outputs, tile.block_n)
    a, b = (raw_bits(t) if INTERPRET else t for t in (p.a.quants, p.b.quants))
    _grouped_gemm_kernel[(tiles,)](
        a,
        raw_bits(p.a.scales),
        None,
        None,
        b,
        raw_bits(p.b.scales),
        p.expert_scales,
        None,
        raw_bits(out) if out.dtype == torch.bfloat16 else out,
        None,
        None,
        p.group_offsets,
        p.scale_offsets,
        None,
        p.expert_ids,
        p.num_active,
        p.num_groups,
        p.num_experts,
        p.num_rows,
        p.num_outputs,
        p.num_columns,
        a.stride(0),
        out.stride(0),
        p.a.ld,
        p.b.ld,
        A_FMT=int(p.format.code),
        W_FMT=int(p.format.code),
        OUT_FMT=0,
        A_LAYOUT=int(p.a.layout),
        W_LAYOUT=int(p.b.layout),
        SCALE_BLOCK=p.block,
        ROWS_PER_SCALE=p.rows_per_scale,
        E5M2=p.a.quants.dtype == torch.float8_e5m2,
        NATIVE=native,
        ORDER=0,
        SCALES_PER_EXPERT=0 if p.expert_scales is None else 1,
        ACTIVATION=None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BLOCK_G=max(16, triton.next_power_of_2(p.num_groups)),
        EVEN_K=p.num_columns % tile.block_k == 0,
        INTERPRET=INTERPRET,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


def _grouped_rows(p: OpProblem, scales: torch.Tensor | None = None) -> GroupedRows:
    """The rows as layers have them; `scales` in place of those of the problem."""
    return GroupedRows(
        format=p.format,
        rows=p.a.quants,
        scales=p.a.scales if scales is None else scales,
        row_scale=None,
        row_index=None,
        group_offsets=p.group_offsets,
        group_scale_offsets=p.scale_offsets,
        expert_ids=p.expert_ids[: p.num_groups],
        capacity=p.num_rows,
        num_columns=p.num_columns,
        num_active_experts=p.num_groups if p.num_active is None else p.num_active,
    )


def _tma_gemm(p: OpProblem, b: ScaledOperand, out: torch.Tensor) -> bool:
    """FP8 on Hopper's kernel, with the scales K-major; False where that does not take these operands."""
    if p.a.quants.dtype != FP8_BLOCK.quant_dtype:
        return False
    columns, blocks = p.num_columns // 128, ceil_div(p.num_outputs, 128)
    a_scales, b_scales = p.a.scales, b.scales
    if p.a.layout is ScaleLayout.MN_MAJOR:
        a_scales = a_scales.view(columns, -1)[:, : p.num_rows].T.contiguous()
        b_scales = b_scales.view(p.num_experts, columns, blocks).transpose(1, 2).contiguous()
    rows = _grouped_rows(p, a_scales.view(-1, columns))
    w = ExpertWeights(p.format, b.quants, b_scales.view(p.num_experts, blocks, columns))
    if not tma_gemm.supports(rows, w, out):
        return False
    tma_gemm.multiply(rows, w, out)
    return True
