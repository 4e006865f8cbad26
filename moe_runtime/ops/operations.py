"""Grouped GEMMs with the names, arguments and layouts of FlashInfer's and MAX's, on any GPU from Hopper on and on CPUs.

`C[rows of group] = A[rows of group] @ B[expert]^T`: `R` rows in groups, `E` experts, `N x K` the weight of each,
`V = ceil(K / block)` block scales of a row. All operations run on one Triton kernel (`kernels/gemm/grouped_gemm.py`)
or, with `engine="torch"`, on a float64 reference; both read weights as they are given. On Hopper there are the faster
kernels of layers: for e4m3 FP8 with a scale for each row (`kernels/gemm/tma_gemm.py`; MN-major scales are transposed
for it in each call), and for NVFP4 and MXFP8 weights that `prepack_nvfp4` and `prepack_mxfp8` made once
(`kernels/gemm/dequant_gemm.py`). `kernels/gemm/plan.py` chooses.

Every operation checks shapes, dtypes, devices and strides, and raises a `ValueError` that names the argument. The
VALUES of offsets and ids are checked under `validate=True`; `validate=None` means on a CPU, and not on a GPU, where it
would wait for the device. Unchecked, an expert id out of range counts as -1; other wrong offsets are the caller's
fault.
Arguments that only steer Blackwell hardware are checked as there and change nothing, but for `tile_n` with raw weights.

Empty groups, zero rows and zero groups are legal. Rows of the output that no active group owns are not written. An
output that shares memory with an input is refused.

Where the scales of each group start differs between the operations, and two conventions look alike but are not. For
groups of 100, 200 and 100 rows, these are the first 128-row blocks of each group:

>>> from moe_runtime.kernels.formats.scale_blocks import closed_form_128_start, dense_128_starts
>>> dense_128_starts([0, 100, 300, 400])  # grouped_matmul_dynamic_scaled_nvfp4
[0, 1, 3]
>>> [closed_form_128_start(row, i) // 128 for i, row in enumerate([0, 100, 300])]  # group_gemm_nvfp4_nt_groupwise
[0, 1, 4]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_runtime.kernels.formats import scale_blocks
from moe_runtime.kernels.formats.number_formats import FP8_BLOCK, MXFP8, NVFP4, ScaleLayout, align, ceil_div
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.kernels.formats.reference_quantize import cat_bits
from moe_runtime.kernels.formats.swizzle import swizzle_scales, unswizzle_scales
from moe_runtime.kernels.gemm.arguments import OUT_DTYPES
from moe_runtime.kernels.gemm.op_gemm import op_gemm
from moe_runtime.kernels.gemm.op_problem import OpProblem, ScaledOperand
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import GateUpOrder, SwiGLU
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.ops.arguments import (
    OUT_DTYPES_HALF,
    AtLeast,
    Operands,
    check_active_values,
    check_expert_values,
    check_gated,
    check_granularity,
    check_indptr_values,
    check_no_scales,
    check_num_active,
    check_operands,
    check_output,
    check_scale_signs,
    check_tensor,
    make_output,
    resolve_validate,
    signed,
)
from moe_runtime.ops.inputs import (
    dequantize_fp8,
    dequantize_mxfp8,
    dequantize_nvfp4,
    nvfp4_encode_scale,
    quantize_fp8,
    quantize_mxfp8,
    quantize_nvfp4,
)
from moe_runtime.ops.scales import (
    pack_closed_form_128,
    pack_dense_128,
    pack_scale_major,
    pack_swizzled_weights,
    pack_ue8m0_rows,
    pack_ue8m0_weights,
    unpack_closed_form_128,
    unpack_dense_128,
    unpack_swizzled_weights,
    unpack_ue8m0_rows,
    unpack_ue8m0_weights,
)
from moe_runtime.ops.token_format import NVFP4TokenFormat
from moe_runtime.ops.weights import prepack_mxfp8, prepack_nvfp4, readable
from moe_runtime.support.arguments import check_apart, check_choice, check_is_tensor
from moe_runtime.support.compiling import not_compiled

__all__ = [
    "NVFP4TokenFormat",
    "PrepackedWeights",
    "dequantize_fp8",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "dequantize_rows",
    "group_gemm_fp8_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
    "grouped_matmul_dynamic_scaled_nvfp4",
    "moe_gemm_fp8_nt_groupwise",
    "moe_gemm_mxfp8_nt_groupwise",
    "nvfp4_encode_scale",
    "pack_closed_form_128",
    "pack_dense_128",
    "pack_scale_major",
    "pack_swizzled_weights",
    "pack_ue8m0_rows",
    "pack_ue8m0_weights",
    "prepack_mxfp8",
    "prepack_nvfp4",
    "quantize_fp8",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "quantize_rows",
    "swizzle_scales",
    "unpack_closed_form_128",
    "unpack_dense_128",
    "unpack_swizzled_weights",
    "unpack_ue8m0_rows",
    "unpack_ue8m0_weights",
    "unswizzle_scales",
]

OFFSETS = (torch.int32, torch.uint32)
E4M3 = torch.float8_e4m3fn
UP_SILU_GATE = SwiGLU(GateUpOrder.UP_GATE)


def grouped_matmul_dynamic_scaled_nvfp4(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | PrepackedWeights,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor | None,
    group_offsets: torch.Tensor,
    group_scale_offsets: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_scales: torch.Tensor,
    num_active_experts: int | torch.Tensor,
    *,
    validate: bool | None = None,
    engine: str = "auto",
) -> None:
    """MAX's operation of this name: NVFP4 by NVFP4, written into `c`.

    No block scale is negative, nor -0: Blackwell reads them without a sign. Checked under `validate`.

    Args:
        c: bf16, fp16 or fp32 `[R, N]`, last dimension contiguous.
        a: uint8 `[R, K/2]`, element `2j` in the low nibble of byte `j`; K a multiple of 16.
        b: uint8 `[E, N, K/2]`; or what `prepack_nvfp4` made of it and its scales.
        a_scales: e4m3 `[blocks, ceil(V/4), 32, 4, 4]`, the 128x4 swizzle with `V = K/16`; row `l` of group `g` lies in
            block `group_offsets[g] // 128 + group_scale_offsets[g] + l // 128` (`dense_128`, or any without overlap).
        b_scales: e4m3 `[E, ceil(N/128), ceil(V/4), 32, 4, 4]`; None with prepacked weights.
        group_offsets: uint32 or int32, at least `num_active_experts + 1`, from 0, not decreasing.
        group_scale_offsets: uint32 or int32, at least `num_active_experts`.
        expert_ids: int32, at least `num_active_experts`; -1 leaves the group's rows of `c` as they are.
        expert_scales: fp32 `[E]`, applied to the fp32 sums; by expert, not by group.
        num_active_experts: groups that count, an int or one int32 on the device. Entries behind are not read.
        validate: check values on the host; None means on a CPU.
        engine: "auto", "cuda", "triton" or "torch".

    Raises:
        ValueError: naming the argument.
    """
    o = check_operands(a, b, (torch.uint8,), 1, 16, per_byte=2)
    device, atoms = o.device, ceil_div(o.k // 16, 4)
    check_output("c", c, OUT_DTYPES, o.rows, o.n, device)
    check_tensor("a_scales", a_scales, E4M3, ("blocks", atoms, 32, 4, 4), device)
    weights = _nvfp4_weights(b, "b_scales", b_scales, E4M3, (o.experts, ceil_div(o.n, 128), atoms, 32, 4, 4))
    check_tensor("expert_scales", expert_scales, torch.float32, (o.experts,), device)
    check_tensor("group_offsets", group_offsets, OFFSETS, (AtLeast(1),), device)
    check_tensor("group_scale_offsets", group_scale_offsets, OFFSETS, ("G",), device)
    check_tensor("expert_ids", expert_ids, torch.int32, ("G",), device)
    room = min(group_offsets.shape[0] - 1, group_scale_offsets.shape[0], expert_ids.shape[0])
    groups, active = check_num_active(num_active_experts, room, device)
    check_tensor("group_offsets", group_offsets, OFFSETS, (AtLeast(groups + 1),), device)
    check_tensor("group_scale_offsets", group_scale_offsets, OFFSETS, (AtLeast(groups),), device)
    check_tensor("expert_ids", expert_ids, torch.int32, (AtLeast(groups),), device)
    resolve_engine(engine, device)
    offsets, shifts = signed(group_offsets), signed(group_scale_offsets)
    if resolve_validate(validate, device):
        count = check_active_values(active, groups)
        starts = offsets[: count + 1].tolist()
        scale_blocks.check_row_offsets(starts, o.rows, "group_offsets")
        scale_blocks.check_dense_128(starts, shifts[:count].tolist(), a_scales.shape[0])
        check_expert_values(expert_ids, count, o.experts)

        def rows_scales() -> torch.Tensor:
            linear = unpack_dense_128(a_scales, starts, shifts[:count], o.k // 16)  # of skipped groups, too
            spans = zip(starts, starts[1:], expert_ids[:count].tolist(), strict=False)
            return cat_bits([linear[:0], *(linear[start:end] for start, end, expert in spans if expert >= 0)])

        check_scale_signs("a_scales", a_scales, rows_scales)
        _check_weight_signs("b_scales", b_scales, o)
    problem = OpProblem(
        format=NVFP4,
        a=ScaledOperand(a, a_scales.view(-1), ScaleLayout.SWIZZLED),
        b=weights,
        group_offsets=offsets,
        scale_offsets=shifts,
        expert_ids=expert_ids,
        num_groups=groups,
        num_active=active,
        expert_scales=expert_scales,
        num_columns=o.k,
        block=16,
    )
    inputs = {"a": a, "b": b, "a_scales": a_scales, "b_scales": b_scales, "group_offsets": offsets}
    inputs |= {"group_scale_offsets": shifts, "expert_ids": expert_ids, "expert_scales": expert_scales}
    _run(problem, c, engine, inputs | {"num_active_experts": active}, "c")


def group_gemm_nvfp4_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor | PrepackedWeights,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor | None,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    tile_k: int = 128,
    swap_ab: bool = True,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    validate: bool | None = None,
    engine: str = "auto",
) -> torch.Tensor:
    """FlashInfer's operation of this name: NVFP4 by NVFP4, group `i` by weight `i`.

    No block scale is negative, nor -0: Blackwell reads them without a sign. Checked under `validate`.

    Args:
        a: uint8 `[R, K/2]`, element `2j` in the low nibble of byte `j`; K a multiple of 128.
        b: uint8 `[E, N, K/2]`; N a multiple of 8; or what `prepack_nvfp4` made of it and its scales.
        a_scale: uint8 `[rows, K/16]`, bytes of e4m3 in the 128x4 swizzle; the two dimensions are a container. Group `i`
            starts at scale row `(m_indptr[i] + 127 * i) // 128 * 128` (`closed_form_128`). `(R + 127 * E) // 128 * 128`
            rows are always enough; the container may end with the last block of the last group that has rows.
            Unchecked, a group whose blocks are not all there is skipped.
        b_scale: uint8 `[E, align(N, 128), K/16]`, the swizzle of each expert; None with prepacked weights.
        m_indptr: int32 `[E + 1]`, from 0, not decreasing, multiples of 4.
        alpha: fp32 `[E]`, applied to the fp32 sums of each group, `1 / (gsf_a * gsf_b)`; None or no elements mean 1.
        tile_m: 128.
        tile_n: 32, 64 or 128; the largest width of a tile.
        tile_k: 128 or 256.
        swap_ab: a bool.
        out: bf16 or fp16 `[R, N]`; made when None.
        out_dtype: of a new `out`; None means bf16.
        validate: check values on the host; None means on a CPU.
        engine: "auto", "cuda", "triton" or "torch".

    Returns:
        `out`.

    Raises:
        ValueError: naming the argument.
    """
    o = check_operands(a, b, (torch.uint8,), 8, 128, per_byte=2)
    check_tensor("a_scale", a_scale, torch.uint8, ("rows", o.k // 16), o.device)
    weights = _nvfp4_weights(b, "b_scale", b_scale, torch.uint8, (o.experts, align(o.n, 128), o.k // 16))
    if alpha is not None:
        is_empty = check_is_tensor("alpha", alpha).numel() == 0
        check_tensor("alpha", alpha, torch.float32, alpha.shape if is_empty else (o.experts,), o.device)
        alpha = None if is_empty else alpha
    check_choice("tile_m", tile_m, (128,))
    check_choice("tile_n", tile_n, (32, 64, 128))
    check_choice("tile_k", tile_k, (128, 256))
    check_choice("swap_ab", swap_ab, (True, False))
    result = make_output(out, out_dtype, OUT_DTYPES_HALF, o)
    groups = _groups_of(m_indptr, o, engine, validate, unit=4)
    if resolve_validate(validate, o.device):
        used = scale_blocks.closed_form_128_rows_used(m_indptr.tolist())
        if a_scale.shape[0] < used:
            raise ValueError(f"a_scale: expected at least {used} rows for m_indptr, got {a_scale.shape[0]}")
        check_scale_signs("a_scale", a_scale, lambda: unpack_closed_form_128(a_scale[:used], m_indptr))
        _check_weight_signs("b_scale", b_scale, o)
    starts, group = m_indptr[:-1], groups["expert_ids"]
    shifts = scale_blocks.closed_form_128_start(starts, group) // 128 - starts // 128
    if a_scale.shape[0] < scale_blocks.closed_form_128_rows_needed(o.rows, o.experts):
        # No kernel reads the scales of a skipped group.
        ends = scale_blocks.closed_form_128_end(starts, m_indptr[1:], group)
        groups["expert_ids"] = group.masked_fill(ends > a_scale.shape[0], -1)
    problem = OpProblem(
        format=NVFP4,
        a=ScaledOperand(a, a_scale.view(-1), ScaleLayout.SWIZZLED),
        b=weights,
        scale_offsets=shifts,
        block=16,
        max_tile_n=tile_n,
        **groups | {"expert_scales": alpha},
    )
    inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "m_indptr": m_indptr, "alpha": alpha}
    return _run(problem, result, engine, inputs)


def moe_gemm_mxfp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor | PrepackedWeights,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor | None,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 1, 128),
    scale_major_mode: str = "MN",
    backend: str = "cute",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    is_gated: bool = False,
    *,
    validate: bool | None = None,
    engine: str = "auto",
) -> torch.Tensor:
    """FlashInfer's operation of this name: MXFP8 by MXFP8, group `i` by weight `i`.

    Scales are UE8M0 bytes, four to a little-endian int32: byte `j` of word `w` belongs to K-block `4w + j`. With
    `k_align = ceil(K / (4 * granularity of K))`:

    Args:
        a: e4m3 `[R, K]`; K a multiple of 16, the last block may be partial.
        b: e4m3 `[E, N, K]`, N even if `is_gated`; or what `prepack_mxfp8` made of it and its scales.
        a_scale: int32 `[m_padded, k_align]`, strides `(1, m_padded)`, `m_padded = (R + 3 * E) // 4 * 4`; group `i`
            starts at scale row `(m_indptr[i] + 3 * i) // 4 * 4` (`closed_form_4`).
        b_scale: int32 `[E, N, k_align]`, strides `(k_align * align(N, 4), 1, align(N, 4))`; None with prepacked
            weights.
        m_indptr: int32 `[E + 1]`, from 0, not decreasing.
        scale_granularity_mnk: (1, 1, 32) or (1, 1, 128); of `a_scale` alone with prepacked weights, whatever theirs
            was.
        scale_major_mode: "MN".
        backend: "cute".
        out: bf16 `[R, N]`, or `[R, N/2]` if `is_gated`; made when None.
        out_dtype: bf16 or None.
        is_gated: whether the result is `up * silu(gate)`, in fp32, of the first N/2 rows of `b` (up) and the others
            (gate). Not for prepacked weights.
        validate: check values on the host; None means on a CPU.
        engine: "auto", "cuda", "triton" or "torch".

    Returns:
        `out`.

    Raises:
        ValueError: naming the argument.
    """
    o = check_operands(a, b, (E4M3,), 1, 16)
    _, _, block = check_granularity(scale_granularity_mnk, ((1, 1, 32), (1, 1, 128)))
    check_choice("scale_major_mode", scale_major_mode, ("MN",))
    check_choice("backend", backend, ("cute",))
    words, ld = ceil_div(o.k, 4 * block), align(o.n, 4)
    m_padded = scale_blocks.closed_form_4_rows_needed(o.rows, o.experts)
    check_tensor("a_scale", a_scale, torch.int32, (m_padded, words), o.device, strides=(1, m_padded))
    if isinstance(b, PrepackedWeights):
        check_no_scales("b_scale", b_scale)
    else:
        check_tensor("b_scale", b_scale, torch.int32, (o.experts, o.n, words), o.device, strides=(words * ld, 1, ld))
    result = make_output(out, out_dtype, (torch.bfloat16,), check_gated(is_gated, o))
    if is_gated and isinstance(b, PrepackedWeights):
        raise ValueError("is_gated: expected False with prepacked weights, got True")
    groups = _groups_of(m_indptr, o, engine, validate)
    weights: ScaledOperand | PrepackedWeights
    if isinstance(b, PrepackedWeights):
        weights = b
    else:
        assert b_scale is not None
        # From its first word to its last: behind the last expert the padding of N need not be there.
        b_words = max(0, ((o.experts * words) - 1) * ld + o.n)
        weights = ScaledOperand(b, _bytes(b_scale, b_words), ScaleLayout.PACKED, ld)
    problem = OpProblem(
        format=MXFP8,
        a=ScaledOperand(a, _bytes(a_scale, m_padded * words), ScaleLayout.PACKED, m_padded),
        b=weights,
        scale_offsets=scale_blocks.closed_form_4_start(m_indptr[:-1], groups["expert_ids"]),
        block=block,
        activation=UP_SILU_GATE if is_gated else None,
        **groups,
    )
    inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "m_indptr": m_indptr}
    return _run(problem, result, engine, inputs)


def moe_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    scale_major_mode: str = "MN",
    backend: str = "cute",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    is_gated: bool = False,
    *,
    validate: bool | None = None,
    engine: str = "auto",
) -> torch.Tensor:
    """FlashInfer's operation of this name: FP8 by FP8 with fp32 block scales, group `i` by weight `i`.

    Args:
        a: e4m3 `[R, K]`; K a multiple of 16, the last block may be partial.
        b: e4m3 `[E, N, K]`; N a multiple of 8.
        a_scale: fp32 `[ceil(K/128), m_padded]`, `m_padded = (R + 3 * E) // 4 * 4`; group `i` starts at column
            `(m_indptr[i] + 3 * i) // 4 * 4` (`closed_form_4`).
        b_scale: fp32 `[E, ceil(K/128), ceil(N/128)]`.
        m_indptr: int32 `[E + 1]`, from 0, not decreasing.
        scale_granularity_mnk: (1, 128, 128).
        scale_major_mode: "MN".
        backend: "cute".
        out: bf16 `[R, N]`, or `[R, N/2]` if `is_gated`; made when None.
        out_dtype: bf16 or None.
        is_gated: whether the result is `up * silu(gate)`, in fp32, of the first N/2 rows of `b` (up) and the others
            (gate).
        validate: check values on the host; None means on a CPU.
        engine: "auto", "cuda", "triton" or "torch".

    Returns:
        `out`.

    Raises:
        ValueError: naming the argument.
    """
    o = check_operands(a, b, (E4M3,), 8, 16)
    check_granularity(scale_granularity_mnk, ((1, 128, 128),))
    check_choice("scale_major_mode", scale_major_mode, ("MN",))
    check_choice("backend", backend, ("cute",))
    columns, n_scales = ceil_div(o.k, 128), ceil_div(o.n, 128)
    m_padded = scale_blocks.closed_form_4_rows_needed(o.rows, o.experts)
    check_tensor("a_scale", a_scale, torch.float32, (columns, m_padded), o.device)
    check_tensor("b_scale", b_scale, torch.float32, (o.experts, columns, n_scales), o.device)
    result = make_output(out, out_dtype, (torch.bfloat16,), check_gated(is_gated, o))
    groups = _groups_of(m_indptr, o, engine, validate)
    problem = OpProblem(
        format=FP8_BLOCK,
        a=ScaledOperand(a, a_scale.view(-1), ScaleLayout.MN_MAJOR, m_padded),
        b=ScaledOperand(b, b_scale.view(-1), ScaleLayout.MN_MAJOR, n_scales),
        scale_offsets=scale_blocks.closed_form_4_start(m_indptr[:-1], groups["expert_ids"]),
        block=128,
        activation=UP_SILU_GATE if is_gated else None,
        **groups,
    )
    inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "m_indptr": m_indptr}
    return _run(problem, result, engine, inputs)


def group_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    validate: bool | None = None,
    engine: str = "auto",
) -> torch.Tensor:
    """FlashInfer's operation of this name: FP8 by FP8 with fp32 block scales, group `i` by weight `i`.

    With `gm` the granularity of M; scale row of row `l` of group `i` is `m_indptr[i] // gm + l // gm` (`unpadded`):

    Args:
        a: e4m3 or e5m2 `[R, K]`; K a multiple of 128.
        b: `[E, N, K]`, of the dtype of `a`; N a multiple of 8.
        a_scale: fp32; K-major `[>= ceil(R/gm), K/128]`, MN-major `[K/128, >= ceil(R/gm)]`.
        b_scale: fp32; K-major `[E, ceil(N/128), K/128]`, MN-major `[E, K/128, ceil(N/128)]`.
        m_indptr: int32 `[E + 1]`, from 0, not decreasing, multiples of 4; with gm 128 groups start at multiples of 128.
        scale_granularity_mnk: (1, 128, 128) or (128, 128, 128).
        scale_major_mode: "MN" or "K".
        mma_sm: 1 or 2.
        out: bf16 or fp16 `[R, N]`; made when None.
        out_dtype: of a new `out`; None means bf16.
        validate: check values on the host; None means on a CPU.
        engine: "auto", "cuda", "triton" or "torch".

    Returns:
        `out`.

    Raises:
        ValueError: naming the argument.
    """
    o = check_operands(a, b, (E4M3, torch.float8_e5m2), 8, 128)
    gm, _, _ = check_granularity(scale_granularity_mnk, ((1, 128, 128), (128, 128, 128)))
    check_choice("scale_major_mode", scale_major_mode, ("MN", "K"))
    check_choice("mma_sm", mma_sm, (1, 2))
    columns, m_scales, n_scales = o.k // 128, scale_blocks.unpadded_rows_needed(o.rows, gm), ceil_div(o.n, 128)
    is_mn = scale_major_mode == "MN"
    a_shape = (columns, AtLeast(m_scales)) if is_mn else (AtLeast(m_scales), columns)
    b_shape = (o.experts, columns, n_scales) if is_mn else (o.experts, n_scales, columns)
    check_tensor("a_scale", a_scale, torch.float32, a_shape, o.device)
    check_tensor("b_scale", b_scale, torch.float32, b_shape, o.device)
    result = make_output(out, out_dtype, OUT_DTYPES_HALF, o)
    groups = _groups_of(m_indptr, o, engine, validate, unit=4, granularity_m=gm)
    layout = ScaleLayout.MN_MAJOR if is_mn else ScaleLayout.K_MAJOR
    problem = OpProblem(
        format=FP8_BLOCK,
        a=ScaledOperand(a, a_scale.view(-1), layout, a_scale.shape[1] if is_mn else None),
        b=ScaledOperand(b, b_scale.view(-1), layout, n_scales if is_mn else None),
        scale_offsets=None,
        block=128,
        rows_per_scale=gm,
        **groups,
    )
    inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "m_indptr": m_indptr}
    return _run(problem, result, engine, inputs)


def _run(
    problem: OpProblem,
    out: torch.Tensor,
    engine: str,
    inputs: Mapping[str, torch.Tensor | PrepackedWeights | None],
    name: str = "out",
) -> torch.Tensor:
    """`out`, filled; `inputs` are its tensors by argument, from which `out` (argument `name`) must be apart."""
    check_apart(name, out, {key: t.units if isinstance(t, PrepackedWeights) else t for key, t in inputs.items()})
    op_gemm(readable(problem, out, engine), out, engine=engine)
    return out


def _groups_of(
    m_indptr: torch.Tensor, o: Operands, engine: str, validate: bool | None, *, unit: int = 1, granularity_m: int = 1
) -> dict[str, Any]:
    """The fields of `OpProblem` of a call whose group `i` has the rows from `m_indptr[i]` on and weight `i`.

    Checks the offsets, `engine` and `validate`.
    """
    check_tensor("m_indptr", m_indptr, torch.int32, (o.experts + 1,), o.device)
    resolve_engine(engine, o.device)
    if resolve_validate(validate, o.device):
        check_indptr_values(m_indptr, o.rows, unit, granularity_m)
    ids = torch.arange(o.experts, dtype=torch.int32, device=o.device)
    groups = {"group_offsets": m_indptr, "expert_ids": ids, "num_groups": o.experts, "num_active": None}
    return {**groups, "expert_scales": None, "num_columns": o.k}


def _nvfp4_weights(
    b: torch.Tensor | PrepackedWeights,
    name: str,
    scales: object,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> ScaledOperand | PrepackedWeights:
    if isinstance(b, PrepackedWeights):
        check_no_scales(name, scales)
        return b
    return ScaledOperand(b, check_tensor(name, scales, dtype, shape, b.device).view(-1), ScaleLayout.SWIZZLED)


def _check_weight_signs(name: str, scales: torch.Tensor | None, o: Operands) -> None:
    """Of raw weights: prepacked ones have no scale with a sign."""
    if scales is not None:
        blocks = (o.experts, ceil_div(o.n, 128), ceil_div(o.k // 16, 4), 32, 4, 4)
        check_scale_signs(name, scales, lambda: unswizzle_scales(scales.view(blocks), o.n, o.k // 16))


@not_compiled  # the default backend cannot replay a view of another dtype behind `as_strided`
def _bytes(words: torch.Tensor, count: int) -> torch.Tensor:
    """The bytes of `count` int32 words from the first of `words` on, whatever its strides."""
    return torch.as_strided(words, (count if words.numel() else 0,), (1,)).view(torch.uint8)
