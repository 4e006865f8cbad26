"""Calls of the operations with random operands, and their float64 results from tables of ml_dtypes alone.

What a call multiplies is dequantized from the arguments of the call itself, by the formulas of each layout written out.
Numbers are drawn and packed where the generator is: on a GPU for the large shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from moe_runtime import ops
from moe_runtime.launch.kernel_bench.fp8_bound import fp8_mma_slack
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import Exact, check_inside, swizzled

E5M2 = torch.float8_e5m2
E4M3 = torch.float8_e4m3fn


def _table(kind: Any, codes: int = 256) -> torch.Tensor:
    return torch.from_numpy(np.arange(codes, dtype=np.uint8).view(kind).astype(np.float64))


VALUES = {
    E4M3: _table(ml_dtypes.float8_e4m3fn),
    E5M2: _table(ml_dtypes.float8_e5m2),
    "e8m0": _table(ml_dtypes.float8_e8m0fnu),
    "e2m1": _table(ml_dtypes.float4_e2m1fn, 16),
}
"""float64 of every code."""

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2 * 2.0**-24}
"""Relative rounding of a result; fp32 rounds once more after the factor of the epilogue."""

SEED_GROUPS = ([128, 256, 512, 1024], [65, 129, 257], [1, 2, 3, 4], [4, 256, 1, 200])


@dataclass
class OpCase:
    """A call; `rows` `[R, K]` and `weights` `[E, N, K]` in float64, `offsets`, `experts` and `factors` by group."""

    operation: Callable[..., Any]
    arguments: dict[str, Any]
    rows: torch.Tensor
    weights: torch.Tensor
    offsets: list[int]
    experts: list[int]
    factors: list[float]

    @property
    def is_gated(self) -> bool:
        return bool(self.arguments.get("is_gated"))

    @property
    def is_in_place(self) -> bool:
        return self.operation is ops.grouped_matmul_dynamic_scaled_nvfp4

    def empty(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An output of NaNs with a payload that no kernel makes."""
        columns = self.weights.shape[1] // (2 if self.is_gated else 1)
        shape, device = (self.rows.shape[0], columns), self.arguments["a"].device
        pattern, integer = {2: (0x7FAB, torch.int16), 4: (0x7FABCDEF, torch.int32)}[dtype.itemsize]
        return torch.full(shape, pattern, dtype=integer, device=device).view(dtype)

    def run(self, out: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        out = self.empty() if out is None else out
        name = "c" if self.is_in_place else "out"
        result = self.operation(**(self.arguments | {name: out} | more))
        assert result is (None if self.is_in_place else out)
        return out

    def prepacked(self) -> OpCase:
        """The same call with `b` prepacked and without its scales."""
        b, scales = self.arguments["b"], "b_scales" if self.is_in_place else "b_scale"
        if self.operation is ops.moe_gemm_mxfp8_nt_groupwise:
            w = ops.prepack_mxfp8(b, self.arguments[scales], self.arguments["scale_granularity_mnk"])
        else:
            w = ops.prepack_nvfp4(b, self.arguments[scales])
        return replace(self, arguments=self.arguments | {"b": w, scales: None})

    def exact(self) -> Exact:
        """float64 products and their slack, where the operands are."""
        device, k = self.rows.device, self.rows.shape[1]
        value, slack = (torch.zeros(*self.empty().shape, dtype=torch.float64, device=device) for _ in range(2))
        written = torch.zeros(len(value), dtype=torch.bool, device=device)
        imprecise = (
            device.type == "cuda"
            and self.operation in (ops.group_gemm_fp8_nt_groupwise, ops.moe_gemm_fp8_nt_groupwise)
            and torch.cuda.get_device_capability()[0] == 9
        )
        groups = zip(self.offsets, self.offsets[1:], self.experts, self.factors, strict=False)
        for start, end, expert, factor in groups:
            if not 0 <= expert < self.weights.shape[0] or end <= start:
                continue
            x, m = self.rows[start:end], self.weights[expert]
            terms = -(-k // 16) * 2.0**-23 * (x.abs() @ m.abs().T)
            terms = terms + fp8_mma_slack(x, m) if imprecise else terms
            c, terms = (x @ m.T) * factor, terms * abs(factor)
            value[start:end], slack[start:end] = _gated(c, terms) if self.is_gated else (c, terms)
            written[start:end] = True
        return Exact(value, slack, written)


def _gated(c: torch.Tensor, slack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`up * silu(gate)` of products with up first, and its slack; the slope of silu is at most 1.1."""
    (up, gate), (up_slack, gate_slack) = c.chunk(2, 1), slack.chunk(2, 1)
    silu = gate * torch.sigmoid(gate)
    value = up * silu
    rounding = 16 * 2.0**-24 * value.abs()
    return value, silu.abs() * up_slack + 1.1 * gate_slack * (up.abs() + up_slack) + rounding


def check(case: OpCase, engine: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> torch.Tensor:
    """Every element within the bound; rows that nobody owns keep their bits. The result."""
    out = case.empty(dtype)
    before = out.clone()
    case.run(out, engine=engine, **more)
    exact = case.exact()
    check_inside(out, exact, UNIT[dtype])
    rest = ~exact.written
    assert_same_bits(out[rest], before[rest], "rows that no active group owns")
    return out


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
    arguments = _to(arguments, device)
    rows = _dequant_swizzled(arguments["a_scales"], arguments["a"], _rows(offsets, starts))
    weights = _dequant_nvfp4_weights(arguments["b_scales"], arguments["b"])
    by_group = [float(factors[e]) if 0 <= e < experts else 0.0 for e in ids]
    operation = ops.grouped_matmul_dynamic_scaled_nvfp4
    return OpCase(operation, arguments, rows, weights, offsets, ids, by_group)


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
    arguments = _to(arguments, device)
    rows = _dequant_swizzled(arguments["a_scale"], arguments["a"], _rows(offsets, starts))
    weights = _dequant_nvfp4_weights(arguments["b_scale"], arguments["b"])
    factors, operation = arguments["alpha"].tolist(), ops.group_gemm_nvfp4_nt_groupwise
    return OpCase(operation, arguments, rows, weights, offsets, list(range(experts)), factors)


def mxfp8(
    sizes: list[int],
    n: int,
    k: int,
    rng: torch.Generator,
    device: torch.device,
    *,
    block: int = 128,
    integers: bool = False,
    is_gated: bool = False,
) -> OpCase:
    """`moe_gemm_mxfp8_nt_groupwise`."""
    offsets, experts = [0, *np.cumsum(sizes).tolist()], len(sizes)
    if integers:
        columns = -(-k // block)
        a, b = (_randint(-8, 9, s, rng).float().to(E4M3) for s in ((offsets[-1], k), (experts, n, k)))
        a_linear, b_linear = (
            _randint(126, 129, s, rng).to(torch.uint8) for s in ((offsets[-1], columns), (experts, n, columns))
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
        is_gated=is_gated,
    )
    moved = _to(arguments, device)
    # A copy to another device need not keep the strides.
    moved["a_scale"] = packed.t().contiguous().to(device).t()
    wide = b_packed.new_zeros(experts, b_packed.shape[2], b_packed.stride(2) if n > 1 else 4)
    wide[:, :, :n] = b_packed.transpose(1, 2)
    moved["b_scale"] = wide.to(device)[:, :, :n].transpose(1, 2)

    def factors(words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        v = torch.arange(-(-k // block), device=device)
        found = words[rows.to(device)[:, None], v[None, :] // 4] >> (8 * (v % 4))
        return VALUES["e8m0"].to(device)[found & 255].repeat_interleave(block, 1)[:, :k]

    starts = [(row + 3 * i) // 4 * 4 for i, row in enumerate(offsets)]
    rows, weights = _values(moved["a"]), _values(moved["b"])
    rows *= factors(moved["a_scale"], _rows(offsets, starts))
    for e in range(experts):
        weights[e] *= factors(moved["b_scale"][e], torch.arange(n))
    operation, ones = ops.moe_gemm_mxfp8_nt_groupwise, [1.0] * experts
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
        a, b = (_randint(-4, 5, s, rng).float().to(dtype) for s in ((offsets[-1], k), (experts, n, k)))
        a_linear, b_linear = (
            2.0 ** _randint(-1, 2, s, rng)
            for s in ((-(-offsets[-1] // gm), -(-k // 128)), (experts, -(-n // 128), -(-k // 128)))
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
    arguments = _to(arguments, device)
    a_scale, b_scale = (arguments[name].double() for name in ("a_scale", "b_scale"))
    if major == "MN":
        a_scale, b_scale = a_scale.T, b_scale.transpose(1, 2)
    place = [start // gm + row // gm for start, end in itertools.pairwise(offsets) for row in range(end - start)]
    rows, weights = _values(arguments["a"]), _values(arguments["b"])
    rows *= a_scale[torch.tensor(place, dtype=torch.int64, device=device)].repeat_interleave(128, 1)[:, :k]
    for e in range(experts):
        weights[e] *= b_scale[e].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    operation, ones = ops.group_gemm_fp8_nt_groupwise, [1.0] * experts
    return OpCase(operation, arguments, rows, weights, offsets, list(range(experts)), ones)


def moe_fp8(
    sizes: list[int],
    n: int,
    k: int,
    rng: torch.Generator,
    device: torch.device,
    *,
    integers: bool = False,
    is_gated: bool = False,
) -> OpCase:
    """`moe_gemm_fp8_nt_groupwise`: the numbers of `fp8`, the scales of rows spread among NaN."""
    case = fp8(sizes, n, k, rng, device, integers=integers)
    unpadded, offsets = case.arguments["a_scale"], case.offsets
    starts = [(row + 3 * i) // 4 * 4 for i, row in enumerate(offsets)]
    a_scale = torch.full((-(-k // 128), starts[-1]), float("nan"), device=device)
    a_scale[:, _rows(offsets, starts).to(device)] = unpadded
    arguments = case.arguments | {"a_scale": a_scale, "is_gated": is_gated}
    return replace(case, operation=ops.moe_gemm_fp8_nt_groupwise, arguments=arguments)


def _randn(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng, device=rng.device)


def _randint(low: int, end: int, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return torch.randint(low, end, shape, generator=rng, device=rng.device)


def _spread(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Normal numbers whose rows differ in size, so that no two block scales are alike."""
    return _randn(shape, rng) * torch.exp(_randn((*shape[:-1], 1), rng))


def _nvfp4(shape: tuple[int, ...], rng: torch.Generator, integers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not integers:
        return ops.quantize_nvfp4(_spread(shape, rng), 16.0)
    codes = torch.tensor([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15], dtype=torch.uint8, device=rng.device)
    nibbles = codes[_randint(0, len(codes), shape, rng)]
    scales = 2.0 ** _randint(-1, 2, (*shape[:-1], shape[-1] // 16), rng)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales.to(E4M3)


def _factors(count: int, rng: torch.Generator, integers: bool) -> torch.Tensor:
    return 2.0 ** _randint(-3, 2, (count,), rng) if integers else _randn((count,), rng) / 256


def _poison(blocks: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """NaN (e4m3) wherever no scale lies."""
    return torch.where(used != 0, blocks.view(torch.uint8), 0x7F).view(blocks.dtype)


def _rows(offsets: list[int], starts: list[int]) -> torch.Tensor:
    """Scale row of each packed row."""
    parts = [torch.arange(end - row) + first for row, end, first in zip(offsets, offsets[1:], starts, strict=False)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def _values(quants: torch.Tensor) -> torch.Tensor:
    """float64 of fp8."""
    return VALUES[quants.dtype].to(quants.device)[quants.view(torch.uint8).int()]


def _dequant_swizzled(scales: torch.Tensor, quants: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """float64 `[M, K]` of packed e2m1 and the e4m3 scales of scale rows `rows` `[M]`."""
    device, columns = quants.device, quants.shape[-1] // 8
    places = torch.from_numpy(swizzled(rows.numpy(), columns)).to(device)
    codes = torch.stack([quants & 15, quants >> 4], -1).flatten(-2)
    factors = _values(scales.reshape(-1).view(torch.uint8)[places].view(E4M3))
    return VALUES["e2m1"].to(device)[codes.int()] * factors.repeat_interleave(16, 1)


def _dequant_nvfp4_weights(scales: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    experts, n, columns = quants.shape
    out = torch.zeros(experts, n, 2 * columns, dtype=torch.float64, device=quants.device)
    for e in range(experts):
        out[e] = _dequant_swizzled(scales[e], quants[e], torch.arange(n))
    return out


def _to(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
