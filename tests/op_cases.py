"""Calls of the five operations with random operands, and their float64 results from numpy and ml_dtypes alone.

What a call multiplies is decoded from the packed arguments themselves, by the formulas of each layout written out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from moe_runtime import ops
from tests.gemm_cases import Array, Exact, bits, decode, swizzled
from tests.gemm_cases import token_format as fmt_of

E5M2 = torch.float8_e5m2
E4M3 = torch.float8_e4m3fn


@dataclass
class OpCase:
    """A call; `offsets`, `experts` and `factors` (of the epilogue) are by group."""

    operation: Callable[..., Any]
    arguments: dict[str, Any]
    rows: Array
    weights: Array
    offsets: list[int]
    experts: list[int]
    factors: list[float]

    @property
    def is_in_place(self) -> bool:
        return self.operation is ops.grouped_matmul_dynamic_scaled_nvfp4

    def empty(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An output of NaNs with a payload that no kernel makes."""
        shape, device = (self.rows.shape[0], self.weights.shape[1]), self.arguments["a"].device
        pattern, integer = {2: (0x7FAB, torch.int16), 4: (0x7FABCDEF, torch.int32)}[dtype.itemsize]
        return torch.full(shape, pattern, dtype=integer, device=device).view(dtype)

    def run(self, out: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        out = self.empty() if out is None else out
        name = "c" if self.is_in_place else "out"
        result = self.operation(**(self.arguments | {name: out} | more))
        assert result is (None if self.is_in_place else out)
        return out

    def exact(self, device: torch.device) -> Exact:
        """float64 products, on `device`, and their slack."""
        r, n, k = self.rows.shape[0], self.weights.shape[1], self.rows.shape[1]
        value, slack, written = np.zeros((r, n)), np.zeros((r, n)), np.zeros(r, bool)
        imprecise = (
            device.type == "cuda"
            and self.operation is ops.group_gemm_fp8_nt_groupwise
            and torch.cuda.get_device_capability()[0] == 9
        )
        groups = zip(self.offsets, self.offsets[1:], self.experts, self.factors, strict=False)
        for start, end, expert, factor in groups:
            if not 0 <= expert < self.weights.shape[0] or end <= start:
                continue
            x = torch.from_numpy(self.rows[start:end]).to(device)
            m = torch.from_numpy(self.weights[expert]).to(device)
            terms = -(-k // 16) * 2.0**-23 * (x.abs() @ m.abs().T)
            terms = terms + fp8_mma_slack(x, m) if imprecise else terms
            value[start:end] = ((x @ m.T) * factor).cpu().numpy()
            slack[start:end] = (terms * abs(factor)).cpu().numpy()
            written[start:end] = True
        return Exact(value, slack, written)


def fp8_mma_slack(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """As in `gemm_cases`, on any device: what fp8 MMA on Hopper may lose, promoted each 128 of K."""
    total = x.new_zeros(x.shape[0], m.shape[0])
    for k in range(0, x.shape[1], 128):
        for first in range(0, x.shape[0], 16):
            products = x[first : first + 16, None, k : k + 128] * m[None, :, k : k + 128]
            largest = torch.maximum(products.abs().amax(-1), products.cumsum(-1).abs().amax(-1))
            total[first : first + 16] += 4 * 34 * 2.0**-13 * largest
    return total


def nvfp4_dense(
    sizes: list[int],
    n: int,
    k: int,
    rng: torch.Generator,
    device: torch.device,
    *,
    ids: list[int] | None = None,
    num_experts: int | None = None,
    gaps: int = 0,
    integers: bool = False,
    offsets_dtype: torch.dtype = torch.uint32,
) -> OpCase:
    """`grouped_matmul_dynamic_scaled_nvfp4`; `gaps` leaves blocks free in front of each group's scales."""
    ids = list(range(len(sizes))) if ids is None else ids
    experts = max([*ids, 0]) + 1 if num_experts is None else num_experts
    offsets = [0, *np.cumsum(sizes).tolist()]
    (a, a_linear), (b, b_linear) = _nvfp4((offsets[-1], k), rng, integers), _nvfp4((experts, n, k), rng, integers)
    shifts, block = [], 0
    for start, size in zip(offsets, sizes, strict=False):
        block += gaps
        shifts.append(block - start // 128)
        block += -(-size // 128)
    blocks, _ = ops.pack_dense_128(a_linear, offsets, shifts, block)
    used, _ = ops.pack_dense_128(torch.ones_like(a_linear, dtype=torch.uint8), offsets, shifts, block)
    b_blocks = ops.swizzle_scales(b_linear)
    factors = _factors(experts, rng, integers)
    arguments = dict(
        a=a,
        b=b,
        a_scales=_poison(blocks, used),
        b_scales=_poison(b_blocks, ops.swizzle_scales(torch.ones_like(b_linear, dtype=torch.uint8))),
        group_offsets=torch.tensor(offsets, dtype=torch.int32).view(offsets_dtype),
        group_scale_offsets=torch.tensor(shifts, dtype=torch.int32).view(offsets_dtype),
        expert_ids=torch.tensor(ids, dtype=torch.int32),
        expert_scales=factors,
        num_active_experts=len(sizes),
    )
    starts = [(row // 128 + shift) * 128 for row, shift in zip(offsets, shifts, strict=False)]
    rows = _decode_swizzled(arguments["a_scales"], a, _rows(offsets, starts))
    weights = _decode_nvfp4_weights(arguments["b_scales"], b)
    by_group = [float(factors[e]) if 0 <= e < experts else 0.0 for e in ids]
    operation = ops.grouped_matmul_dynamic_scaled_nvfp4
    return OpCase(operation, _to(arguments, device), rows, weights, offsets, ids, by_group)


def nvfp4_closed(
    sizes: list[int], n: int, k: int, rng: torch.Generator, device: torch.device, *, integers: bool = False
) -> OpCase:
    """`group_gemm_nvfp4_nt_groupwise`."""
    offsets, experts = [0, *np.cumsum(sizes).tolist()], len(sizes)
    (a, a_linear), (b, b_linear) = _nvfp4((offsets[-1], k), rng, integers), _nvfp4((experts, n, k), rng, integers)
    used = ops.pack_closed_form_128(torch.ones_like(a_linear, dtype=torch.uint8), offsets)
    b_used = ops.pack_swizzled_weights(torch.ones_like(b_linear, dtype=torch.uint8))
    arguments = dict(
        a=a,
        b=b,
        a_scale=_poison(ops.pack_closed_form_128(a_linear, offsets), used),
        b_scale=_poison(ops.pack_swizzled_weights(b_linear), b_used),
        m_indptr=torch.tensor(offsets, dtype=torch.int32),
        alpha=_factors(experts, rng, integers),
    )
    starts = [(row + 127 * i) // 128 * 128 for i, row in enumerate(offsets)]
    rows = _decode_swizzled(arguments["a_scale"], a, _rows(offsets, starts))
    weights = _decode_nvfp4_weights(arguments["b_scale"], b)
    factors, operation = arguments["alpha"].tolist(), ops.group_gemm_nvfp4_nt_groupwise
    return OpCase(operation, _to(arguments, device), rows, weights, offsets, list(range(experts)), factors)


def mxfp8(
    sizes: list[int],
    n: int,
    k: int,
    rng: torch.Generator,
    device: torch.device,
    *,
    block: int = 128,
    integers: bool = False,
) -> OpCase:
    """`moe_gemm_mxfp8_nt_groupwise`."""
    offsets, experts = [0, *np.cumsum(sizes).tolist()], len(sizes)
    if integers:
        columns = -(-k // block)
        a, b = (torch.randint(-8, 9, s, generator=rng).float().to(E4M3) for s in ((offsets[-1], k), (experts, n, k)))
        a_linear, b_linear = (
            torch.randint(126, 129, s, generator=rng).to(torch.uint8)
            for s in ((offsets[-1], columns), (experts, n, columns))
        )
    else:
        a, a_linear = ops.quantize_mxfp8(_spread((offsets[-1], k), rng), block)
        b, b_linear = ops.quantize_mxfp8(_spread((experts, n, k), rng), block)
    used = ops.pack_ue8m0_rows(torch.full_like(a_linear, 255), offsets)
    b_used = ops.pack_ue8m0_weights(torch.full_like(b_linear, 255))
    packed, b_packed = ops.pack_ue8m0_rows(a_linear, offsets), ops.pack_ue8m0_weights(b_linear)
    packed |= ~used
    b_packed |= ~b_used
    arguments = dict(
        a=a,
        b=b,
        a_scale=packed,
        b_scale=b_packed,
        m_indptr=torch.tensor(offsets, dtype=torch.int32),
        scale_granularity_mnk=(1, 1, block),
    )
    starts = [(row + 3 * i) // 4 * 4 for i, row in enumerate(offsets)]

    def factors(words: torch.Tensor, rows: Array) -> Array:
        v = np.arange(-(-k // block))
        found = words.numpy().view(np.uint32)[rows[:, None], v[None, :] // 4] >> (8 * (v % 4)).astype(np.uint32)
        scale = (found & 255).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        return scale.repeat(block, 1)[:, :k]

    rows = bits(a).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * factors(packed, _rows(offsets, starts))
    values = bits(b).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    weights = np.zeros((experts, n, k))
    for e in range(experts):
        weights[e] = values[e] * factors(b_packed[e], np.arange(n))
    operation, ones = ops.moe_gemm_mxfp8_nt_groupwise, [1.0] * experts
    moved = _to(arguments, device)
    # A copy to another device need not keep the strides.
    moved["a_scale"] = packed.t().contiguous().to(device).t()
    wide = torch.zeros(experts, b_packed.shape[2], b_packed.stride(2) if n > 1 else 4, dtype=torch.int32)
    wide[:, :, :n] = b_packed.transpose(1, 2)
    moved["b_scale"] = wide.to(device)[:, :, :n].transpose(1, 2)
    return OpCase(operation, moved, rows, weights, offsets, list(range(experts)), ones)


def fp8(
    sizes: list[int],
    n: int,
    k: int,
    rng: torch.Generator,
    device: torch.device,
    *,
    gm: int = 1,
    major: str = "MN",
    dtype: torch.dtype = E4M3,
    integers: bool = False,
    spare: int = 0,
) -> OpCase:
    """`group_gemm_fp8_nt_groupwise`; `spare` scale rows of NaN lie behind those of `a`."""
    offsets, experts = [0, *np.cumsum(sizes).tolist()], len(sizes)
    if integers:
        a, b = (torch.randint(-4, 5, s, generator=rng).float().to(dtype) for s in ((offsets[-1], k), (experts, n, k)))
        a_linear, b_linear = (
            2.0 ** torch.randint(-1, 2, s, generator=rng)
            for s in ((-(-offsets[-1] // gm), k // 128), (experts, -(-n // 128), k // 128))
        )
    else:
        a, a_linear = ops.quantize_fp8(_spread((offsets[-1], k), rng), gm, dtype)
        b, b_linear = ops.quantize_fp8(_spread((experts, n, k), rng), 128, dtype)
    a_linear = torch.nn.functional.pad(a_linear, (0, 0, 0, spare), value=float("nan"))
    arguments = dict(
        a=a,
        b=b,
        a_scale=ops.pack_scale_major(a_linear, major),
        b_scale=ops.pack_scale_major(b_linear, major),
        m_indptr=torch.tensor(offsets, dtype=torch.int32),
        scale_granularity_mnk=(gm, 128, 128),
        scale_major_mode=major,
    )
    kind = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}[dtype]
    a_scale, b_scale = (arguments[name].numpy().astype(np.float64) for name in ("a_scale", "b_scale"))
    if major == "MN":
        a_scale, b_scale = a_scale.T, b_scale.transpose(0, 2, 1)
    place = np.zeros(offsets[-1], np.int64)
    for start, end in itertools.pairwise(offsets):
        place[start:end] = start // gm + np.arange(end - start) // gm
    rows = bits(a).view(kind).astype(np.float64) * a_scale[place].repeat(128, 1)
    weights = bits(b).view(kind).astype(np.float64) * b_scale.repeat(128, 1)[:, :n].repeat(128, 2)
    operation, ones = ops.group_gemm_fp8_nt_groupwise, [1.0] * experts
    return OpCase(operation, _to(arguments, device), rows, weights, offsets, list(range(experts)), ones)


def _spread(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Normal numbers whose rows differ in size, so that no two block scales are alike."""
    return torch.randn(shape, generator=rng) * torch.exp(torch.randn(*shape[:-1], 1, generator=rng))


def _nvfp4(shape: tuple[int, ...], rng: torch.Generator, integers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not integers:
        return ops.quantize_nvfp4(_spread(shape, rng), 16.0)
    codes = torch.tensor([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15], dtype=torch.uint8)
    nibbles = codes[torch.randint(0, len(codes), shape, generator=rng)]
    scales = 2.0 ** torch.randint(-1, 2, (*shape[:-1], shape[-1] // 16), generator=rng)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales.to(E4M3)


def _factors(count: int, rng: torch.Generator, integers: bool) -> torch.Tensor:
    return 2.0 ** torch.randint(-3, 2, (count,), generator=rng) if integers else torch.randn(count, generator=rng) / 256


def _poison(blocks: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """NaN (e4m3) wherever no scale lies."""
    return torch.where(used != 0, blocks.view(torch.uint8), 0x7F).view(blocks.dtype)


def _rows(offsets: list[int], starts: list[int]) -> Array:
    """Scale row of each packed row."""
    parts = [np.arange(end - row) + first for row, end, first in zip(offsets, offsets[1:], starts, strict=False)]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _decode_swizzled(scales: torch.Tensor, quants: torch.Tensor, rows: Array) -> Array:
    columns = quants.shape[-1] // 8
    return decode(fmt_of("nvfp4"), bits(quants), bits(scales).reshape(-1)[swizzled(rows, columns)])


def _decode_nvfp4_weights(scales: torch.Tensor, quants: torch.Tensor) -> Array:
    experts, n, columns = quants.shape
    out = np.zeros((experts, n, 2 * columns))
    for e in range(experts):
        out[e] = _decode_swizzled(scales[e], quants[e], np.arange(n))
    return out


def _to(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
