"""Weights of `moe_runtime.ops` prepacked once: in the order that the kernels of Hopper read."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_runtime.kernels.formats.number_formats import MXFP8, NVFP4, ScaleLayout, align, ceil_div
from moe_runtime.kernels.formats.swizzle import swizzle_scales, unswizzle_scales
from moe_runtime.kernels.gemm.op_gemm import plan_op
from moe_runtime.kernels.gemm.op_problem import OpProblem, ScaledOperand
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.ops.arguments import check_granularity, check_tensor, check_weights
from moe_runtime.ops.scales import pack_ue8m0_weights, unpack_ue8m0_weights


def prepack_nvfp4(b: torch.Tensor, b_scales: torch.Tensor) -> PrepackedWeights:
    """Weights of both NVFP4 operations, to be given as `b` with scales None.

    Args:
        b: uint8 `[E, N, K/2]`; N a multiple of 8, K of 16.
        b_scales: e4m3 `[E, ceil(N/128), ceil(V/4), 32, 4, 4]`, or its bytes in a uint8 `[E, align(N, 128), K/16]` for K
            a multiple of 64.

    Raises `ValueError` naming the argument, also for scales that are negative or NaN. Waits for the device.
    """
    experts, n, k = check_weights(b, torch.uint8, 16, per_byte=2)
    shape = (experts, ceil_div(n, 128), ceil_div(k // 16, 4), 32, 4, 4)
    if isinstance(b_scales, torch.Tensor) and b_scales.dtype == torch.uint8 and k % 64 == 0:
        check_tensor("b_scales", b_scales, torch.uint8, (experts, align(n, 128), k // 16), b.device)
        b_scales = b_scales.view(torch.float8_e4m3fn).view(shape)
    check_tensor("b_scales", b_scales, torch.float8_e4m3fn, shape, b.device)
    return PrepackedWeights.prepack(ExpertWeights(NVFP4, b, b_scales), argument="b_scales")


def prepack_mxfp8(
    b: torch.Tensor, b_scale: torch.Tensor, scale_granularity_mnk: tuple[int, int, int] = (1, 1, 128)
) -> PrepackedWeights:
    """Weights of `moe_gemm_mxfp8_nt_groupwise`, to be given as `b` with scales None.

    Args:
        b: e4m3 `[E, N, K]`; N a multiple of 8, K of 32.
        b_scale: int32 `[E, N, k_align]`, as the operation takes it.
        scale_granularity_mnk: (1, 1, 32) or (1, 1, 128); a block of 128 becomes four of 32.

    Raises `ValueError` naming the argument. Waits for the device.
    """
    experts, n, k = check_weights(b, torch.float8_e4m3fn, 32)
    _, _, block = check_granularity(scale_granularity_mnk, ((1, 1, 32), (1, 1, 128)))
    words, ld = ceil_div(k, 4 * block), align(n, 4)
    check_tensor("b_scale", b_scale, torch.int32, (experts, n, words), b.device, strides=(words * ld, 1, ld))
    linear = unpack_ue8m0_weights(b_scale, ceil_div(k, block)).repeat_interleave(block // 32, 2)[..., : k // 32]
    return PrepackedWeights.prepack(ExpertWeights(MXFP8, b, swizzle_scales(linear.contiguous())))


def readable(problem: OpProblem, out: torch.Tensor, engine: str) -> OpProblem:
    """The problem with weights that its kernel reads: prepacked ones where Hopper's takes them, else restored."""
    w, a = problem.b, problem.a
    if not isinstance(w, PrepackedWeights) or not plan_op(problem, out, engine).restores:
        return problem
    raw = w.restore()
    assert raw.scales is not None
    if w.format is NVFP4:
        return replace(problem, b=ScaledOperand(raw.quants, raw.scales.view(-1), ScaleLayout.SWIZZLED))
    packed = pack_ue8m0_weights(unswizzle_scales(raw.scales, w.num_rows, w.num_columns // 32))
    ld = align(w.num_rows, 4)
    count = max(0, (w.num_experts * packed.shape[2] - 1) * ld + w.num_rows)
    scales = torch.as_strided(packed, (count,), (1,)).view(torch.uint8)
    b = ScaledOperand(raw.quants, scales, ScaleLayout.PACKED, ld)
    # Prepacked weights have a scale for each 32 of K, whatever the rows have.
    return replace(problem, a=_in_blocks_of_32(a, problem.block, w.num_columns), b=b, block=32)


def _in_blocks_of_32(a: ScaledOperand, block: int, num_columns: int) -> ScaledOperand:
    """Rows whose packed scales are for `block` elements each, with one for each 32; the layout is the same."""
    if block == 32 or not a.scales.numel():
        return a
    assert a.ld is not None
    # A byte for 128 elements becomes the four of a word, one word of all rows after the other.
    linear = a.scales.view(-1, a.ld, 4).transpose(1, 2).reshape(-1, a.ld)[: ceil_div(num_columns, block)]
    return replace(a, scales=linear.repeat_interleave(block // 32, 1).view(-1))
