"""Calls of the operations of `moe_runtime.ops` with random operands, and how far each result is from its bound.

Results are compared with float64 products of the dequantized operands, element by element: `|error| <= u |c| +
ceil(K/16) 2^-23 sum |a| |b|`, more for FP8 MMA on Hopper (`fp8_bound.py`). Rows outside of the groups must not change.

`R` rows, `E` experts, `N x K` a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from moe_runtime import ops
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.formats.scale_blocks import dense_128_offsets
from moe_runtime.kernels.gemm.grouped_gemm import gemm_flops
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.launch.benchmarks.checks import FP32_GAIN, largest_ratio
from moe_runtime.launch.kernel_bench.fp8_bound import fp8_mma_slack

POISON = 0x7FAB
"""A NaN of bf16 that no kernel makes."""

GSF = 16.0
"""Encode scale of the NVFP4 operands."""

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Rows of each group, the expert of each (-1: none), and the sizes of the weights."""

    groups: tuple[int, ...]
    experts: tuple[int, ...]
    num_experts: int
    n: int
    k: int

    @property
    def offsets(self) -> list[int]:
        return [0, *accumulate(self.groups)]


@dataclass(frozen=True)
class OpCall:
    """One call.

    Attributes:
        operation: of `moe_runtime.ops`.
        arguments: by name, without the output.
        output: name of the output's argument.
        rows: dequantized, float64 `[R, K]`.
        weights: dequantized, float64 `[E, N, K]`.
        factors: of the epilogue, by expert.
        shape: of the call.
        fp8_mma: whether FP8 MMA makes the sums.
    """

    operation: Callable[..., Any]
    arguments: Arguments
    output: str
    rows: torch.Tensor
    weights: torch.Tensor
    factors: torch.Tensor
    shape: Shape
    fp8_mma: bool = False

    def empty(self) -> torch.Tensor:
        """A poisoned bf16 output."""
        size = (self.rows.shape[0], self.weights.shape[1])
        return torch.full(size, POISON, dtype=torch.int16, device=self.rows.device).view(torch.bfloat16)

    def run(self, out: torch.Tensor, engine: str) -> torch.Tensor:
        self.operation(**self.arguments, **{self.output: out}, validate=False, engine=engine)
        return out

    def copies(self, count: int) -> list[OpCall]:
        """This and `count - 1` others whose arguments lie elsewhere."""
        copied = [{name: _clone(value) for name, value in self.arguments.items()} for _ in range(count - 1)]
        return [self, *(replace(self, arguments=arguments) for arguments in copied)]

    def prepacked(self) -> OpCall | None:
        """The same call with prepacked weights; None where the operation has no prepacked weights of this shape."""
        (name,) = (name for name in self.arguments if name in ("b_scale", "b_scales"))
        b, scales, n, k = self.arguments["b"], self.arguments[name], self.shape.n, self.shape.k
        if n % 8 or self.operation is ops.group_gemm_fp8_nt_groupwise:
            return None
        if self.operation is ops.moe_gemm_mxfp8_nt_groupwise:
            if k % 32:
                return None
            w = ops.prepack_mxfp8(b, scales, self.arguments["scale_granularity_mnk"])
        else:
            w = ops.prepack_nvfp4(b, scales)
        return replace(self, arguments=self.arguments | {"b": w, name: None})

    def error(self, out: torch.Tensor) -> float:
        """The largest error over its bound of an element; infinite for NaNs, or where a row was wrongly written."""
        offsets, worst = self.shape.offsets, 0.0
        imprecise = self.fp8_mma and out.is_cuda and torch.cuda.get_device_capability(out.device)[0] == 9
        for (start, end), expert in zip(pairwise(offsets), self.shape.experts, strict=True):
            if expert < 0:
                untouched = bool((out[start:end].view(torch.int16) == POISON).all())
                worst = worst if untouched else math.inf
                continue
            if end == start:
                continue
            a, b, factor = self.rows[start:end], self.weights[expert], self.factors[expert]
            c = (a @ b.T) * factor
            slack = ceil_div(a.shape[1], 16) * FP32_GAIN * (a.abs() @ b.abs().T)
            slack = slack + fp8_mma_slack(a, b) if imprecise else slack
            bound = 2.0**-8 * c.abs() + slack * factor.abs()
            worst = max(worst, largest_ratio((out[start:end].double() - c).abs(), bound))
        return worst

    @property
    def moved_bytes(self) -> int:
        """Rows, the weights of experts that have rows, scales of both, and results, each once."""
        s, a, b = self.shape, self.arguments["a"], self.arguments["b"]
        rows = sum(m for m, e in zip(s.groups, s.experts, strict=True) if e >= 0)
        used = len({e for m, e in zip(s.groups, s.experts, strict=True) if e >= 0 and m})
        scales = [value for name, value in self.arguments.items() if name.endswith(("_scale", "_scales"))]
        per_row = [t.nbytes / max(1, self.rows.shape[0]) for t in (a, scales[0])]
        per_expert = [t.nbytes / s.num_experts for t in (b, scales[1])]
        return int(rows * (sum(per_row) + 2 * s.n) + used * sum(per_expert))

    @property
    def flops(self) -> int:
        rows = sum(m for m, e in zip(self.shape.groups, self.shape.experts, strict=True) if e >= 0)
        return gemm_flops(rows, self.shape.n, self.shape.k)


def dynamic_scaled_nvfp4(shape: Shape, rng: torch.Generator) -> OpCall:
    """`grouped_matmul_dynamic_scaled_nvfp4` with `dense_128` scales."""
    (a, a_scales), (b, b_scales) = (ops.quantize_nvfp4(x, GSF) for x in _operands(shape, rng))
    offsets, device = shape.offsets, a.device
    blocks, _ = ops.pack_dense_128(a_scales, offsets)
    factors, int32 = _factors(shape, rng), partial(torch.tensor, dtype=torch.int32, device=device)
    arguments = dict(
        a=a,
        b=b,
        a_scales=blocks,
        b_scales=ops.swizzle_scales(b_scales),
        group_offsets=int32(offsets).view(torch.uint32),
        group_scale_offsets=int32(dense_128_offsets(offsets)).view(torch.uint32),
        expert_ids=int32(shape.experts),
        expert_scales=factors,
        num_active_experts=len(shape.groups),
    )
    rows, weights = (ops.dequantize_nvfp4(*t, engine="torch").double() for t in ((a, a_scales), (b, b_scales)))
    return OpCall(ops.grouped_matmul_dynamic_scaled_nvfp4, arguments, "c", rows, weights, factors.double(), shape)


def nvfp4_groupwise(shape: Shape, rng: torch.Generator) -> OpCall:
    """`group_gemm_nvfp4_nt_groupwise`."""
    (a, a_scales), (b, b_scales) = (ops.quantize_nvfp4(x, GSF) for x in _operands(shape, rng))
    factors = _factors(shape, rng)
    arguments = dict(
        a=a,
        b=b,
        a_scale=ops.pack_closed_form_128(a_scales, shape.offsets),
        b_scale=ops.pack_swizzled_weights(b_scales),
        m_indptr=_indptr(shape, a.device),
        alpha=factors,
    )
    rows, weights = (ops.dequantize_nvfp4(*t, engine="torch").double() for t in ((a, a_scales), (b, b_scales)))
    return OpCall(ops.group_gemm_nvfp4_nt_groupwise, arguments, "out", rows, weights, factors.double(), shape)


def mxfp8_groupwise(shape: Shape, rng: torch.Generator, block: int) -> OpCall:
    """`moe_gemm_mxfp8_nt_groupwise`."""
    (a, a_scales), (b, b_scales) = (ops.quantize_mxfp8(x, block) for x in _operands(shape, rng))
    arguments = dict(
        a=a,
        b=b,
        a_scale=ops.pack_ue8m0_rows(a_scales, shape.offsets),
        b_scale=ops.pack_ue8m0_weights(b_scales),
        m_indptr=_indptr(shape, a.device),
        scale_granularity_mnk=(1, 1, block),
    )
    rows, weights = (ops.dequantize_mxfp8(*t, block).double() for t in ((a, a_scales), (b, b_scales)))
    return OpCall(ops.moe_gemm_mxfp8_nt_groupwise, arguments, "out", rows, weights, _ones(shape, a.device), shape)


def fp8_groupwise(shape: Shape, rng: torch.Generator, gm: int, major: str, dtype: torch.dtype) -> OpCall:
    """`group_gemm_fp8_nt_groupwise`."""
    a_float, b_float = _operands(shape, rng)
    (a, a_scales), (b, b_scales) = (
        ops.quantize_fp8(a_float, gm, dtype),
        ops.quantize_fp8(b_float, 128, dtype),
    )
    arguments = dict(
        a=a,
        b=b,
        a_scale=ops.pack_scale_major(a_scales, major),
        b_scale=ops.pack_scale_major(b_scales, major),
        m_indptr=_indptr(shape, a.device),
        scale_granularity_mnk=(gm, 128, 128),
        scale_major_mode=major,
    )
    rows, weights = (
        ops.dequantize_fp8(a, a_scales, gm).double(),
        ops.dequantize_fp8(b, b_scales, 128).double(),
    )
    operation = ops.group_gemm_fp8_nt_groupwise
    return OpCall(operation, arguments, "out", rows, weights, _ones(shape, a.device), shape, fp8_mma=True)


def check_token_format(tokens: int, hidden: int, rng: torch.Generator, engine: str) -> float:
    """`NVFP4TokenFormat`: bytes of the unpacked messages that differ from torch's quantization."""
    device, top_k = rng.device, 8
    x = torch.randn(tokens, hidden, generator=rng, dtype=torch.float32, device=device).to(torch.bfloat16)
    starts = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32, device=device)
    quants = torch.zeros(tokens, hidden // 2, dtype=torch.uint8, device=device)
    size = (tokens // 128 + 2, ceil_div(hidden // 16, 4), 32, 4, 4)
    scales = torch.zeros(size, dtype=torch.float8_e4m3fn, device=device)
    message = ops.NVFP4TokenFormat(hidden, top_k, output_tokens=quants, output_scales=scales)
    shifts = message.pad_expert_offsets(starts)
    buf = torch.zeros(tokens, message.msg_size(), dtype=torch.uint8, device=device)
    message.copy_token_to_send_buf(buf, x, GSF, engine=engine)
    message.copy_msg_to_output_tensor(buf, torch.arange(tokens, device=device))
    wanted = ops.quantize_rows(x, "nvfp4", gsf=GSF, engine="torch")
    assert wanted.scales_RV is not None
    found = ops.unpack_dense_128(scales, starts, shifts, hidden // 16)
    differing = (quants != wanted.quants_RK).sum() + (raw_bits(found) != raw_bits(wanted.scales_RV)).sum()
    return float(differing)


def _operands(shape: Shape, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values whose rows differ in size, so that no two block scales are alike."""
    sizes = ((shape.offsets[-1], shape.k), (shape.num_experts, shape.n, shape.k))
    drawn = []
    for size in sizes:
        x = torch.randn(size, generator=rng, dtype=torch.float32, device=rng.device)
        drawn.append(x * torch.randn((*size[:-1], 1), generator=rng, dtype=torch.float32, device=rng.device).exp())
    return drawn[0], drawn[1]


def _factors(shape: Shape, rng: torch.Generator) -> torch.Tensor:
    return torch.rand(shape.num_experts, generator=rng, dtype=torch.float32, device=rng.device).add(0.5) / GSF**2


def _ones(shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.ones(shape.num_experts, dtype=torch.float64, device=device)


def _indptr(shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.tensor(shape.offsets, dtype=torch.int32, device=device)


def _clone(value: Any) -> Any:
    """A tensor elsewhere with the same strides; prepacked weights elsewhere."""
    if isinstance(value, PrepackedWeights):
        return value.clone()
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
