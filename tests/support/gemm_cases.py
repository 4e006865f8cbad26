"""Grouped rows for the GEMM tests, and oracles that dequantize and bound them with numpy and ml_dtypes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from moe_runtime.kernels.formats.number_formats import FORMATS, TokenFormat, format_named
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder
from moe_runtime.launch.kernel_bench.fp8_bound import fp8_mma_slack

Array = np.ndarray
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
HALF_OVERFLOW = 65520.0
"""Smallest number that rounds to infinity in fp16."""

ENGINES = ("triton", "torch")
PAIRS = [(name, name) for name in FORMATS] + [
    *(("nvfp4", name) for name in ("bf16", "fp8_block")),
    *(("mxfp4", name) for name in ("bf16", "mxfp8", "fp8_block")),
]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 3 * 2.0**-24}
"""Relative rounding of the result; fp32 rounds after each of the row scale, the expert scale and the bias."""


def bits(t: torch.Tensor) -> Array:
    """The bits of a tensor as unsigned integers."""
    array = t.detach().cpu().contiguous().view(BITS[t.element_size()]).numpy()
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[t.element_size()])


def decode(fmt: TokenFormat, quants: Array, scales: Array | None) -> Array:
    """float64 of quant bits `[M, columns]` and linear scales `[M, V]` (bytes, or fp32), no second-level scale."""
    if fmt.name == "bf16":
        with np.errstate(invalid="ignore"):
            return (quants.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if fmt.element_bits == 4:
        codes = np.stack([quants & 15, quants >> 4], -1).reshape(quants.shape[0], 2 * quants.shape[1])
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    else:
        values = quants.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert scales is not None
    e8m0 = ml_dtypes.float8_e8m0fnu
    kinds = {"nvfp4": ml_dtypes.float8_e4m3fn, "mxfp8": e8m0, "mxfp4": e8m0, "fp8_block": np.float32}
    factors = scales.view(kinds[fmt.name]).astype(np.float64)
    return values * factors.repeat(fmt.block, 1)[:, : values.shape[1]]


def swizzled(rows: Array, columns: int) -> Array:
    """Offsets `[len(rows), columns]` of the 128x4 swizzle, written out."""
    r, v = rows[:, None].astype(np.int64), np.arange(columns)[None, :]
    return (r // 128) * -(-columns // 4) * 512 + v // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + v % 4


def scale_rows(a: GroupedRows) -> Array:
    """Row in the swizzled scales of each row position `[capacity]` (0 where none is)."""
    assert a.group_scale_offsets is not None
    offsets, shifts = a.group_offsets.cpu().numpy(), a.group_scale_offsets.cpu().numpy()
    rows = np.zeros(a.capacity, np.int64)
    for g in range(a.num_groups):
        local = np.arange(offsets[g + 1] - offsets[g])
        rows[offsets[g] : offsets[g + 1]] = (offsets[g] // 128 + shifts[g]) * 128 + local
    return rows


def decode_rows(a: GroupedRows) -> Array:
    """float64 `[capacity, K]` by row position; rows that no group owns hold anything."""
    source = np.arange(a.capacity) if a.row_index is None else a.row_index.cpu().numpy()[: a.capacity]
    scales = None if a.scales is None else bits(a.scales)
    if scales is not None and a.format.swizzled:
        scales = scales.reshape(-1)[swizzled(scale_rows(a), a.format.scale_columns(a.num_columns))]
    elif scales is not None:
        scales = scales[: a.capacity]
    return decode(a.format, bits(a.rows)[source], scales)


def multiplied_rows(a: GroupedRows, weights: TokenFormat) -> Array:
    """`decode_rows` as the GEMM multiplies them: e2m1 weights have `fp8_block` rows rounded to fp32, then to bf16."""
    values = decode_rows(a)
    if a.format.name != "fp8_block" or weights.element_bits != 4:
        return values
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def as_bf16_rows(a: GroupedRows, weights: TokenFormat) -> GroupedRows:
    """The rows in bf16 as the GEMM multiplies them with `weights`, by row position."""
    values = torch.from_numpy(multiplied_rows(a, weights)).bfloat16().to(a.rows.device)
    return replace(a, format=FORMATS["bf16"], rows=values, scales=None, row_index=None, group_scale_offsets=None)


def with_wild_scales(a: GroupedRows, rng: torch.Generator) -> GroupedRows:
    """`fp8_block` rows with scales of all sizes and both signs, a NaN among them; codes of NaN in another row."""
    assert a.scales is not None and a.row_index is None
    sizes = torch.randint(-100, 100, tuple(a.scales.shape), generator=rng)
    scales = torch.ldexp(torch.rand(a.scales.shape, generator=rng) - 0.5, sizes).to(a.scales.device)
    codes = torch.randint(0, 255, tuple(a.rows.shape), generator=rng).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scales[0, -1], codes[1, 5] = torch.nan, 0xFF
    return replace(a, scales=scales, rows=codes.to(a.rows.device).view(a.rows.dtype))


def dequant_weights(w: ExpertWeights) -> Array:
    """float64 `[E, N, K]` without `expert_scales`."""
    e, n, columns = w.num_experts, w.num_rows, w.format.scale_columns(w.num_columns)
    scales = None if w.scales is None else bits(w.scales)
    out = np.zeros((e, n, w.num_columns))
    for expert in range(e):
        linear = None
        if scales is not None and w.format.swizzled:
            linear = scales[expert].reshape(-1)[swizzled(np.arange(n), columns)]
        elif scales is not None:
            # Gate and up, one above the other, each start with a block of 128 rows.
            halves = 2 if w.gate_up in (GateUpOrder.GATE_UP, GateUpOrder.UP_GATE) else 1
            parts = scales[expert].reshape(halves, -1, columns) if n // halves % 128 else scales[None, expert]
            linear = np.concatenate([part.repeat(128, 0)[: n // len(parts)] for part in parts])
        out[expert] = decode(w.format, bits(w.quants[expert]), linear)
    return out


def make_rows(
    fmt: str | TokenFormat,
    sizes: list[int],
    k: int,
    rng: torch.Generator,
    device: torch.device,
    *,
    num_experts: int,
    expert_ids: list[int] | None = None,
    gather: bool = False,
    spare: int = 0,
    sparse_scales: bool = False,
    x: torch.Tensor | None = None,
) -> GroupedRows:
    """Random rows in groups of `sizes`.

    `gather` scatters them in a wider, longer tensor of 0xFF bytes (NaN in bf16 and e4m3) behind a `row_index`; `spare`
    adds capacity behind the last group, `sparse_scales` leaves gaps between the scales of groups; padding is 0x7F.
    """
    fmt = format_named(fmt)
    count = sum(sizes)
    x = torch.randn(count, k, generator=rng) if x is None else x
    q = quantize_rows(x, fmt, engine="torch")
    capacity = count + spare
    offsets = [0, *np.cumsum(sizes).tolist()]
    shifts, block = [], 0
    for start, size in zip(offsets, sizes, strict=False):
        shifts.append(block - start // 128)
        block += -(-size // 128) + sparse_scales
    ids = [g % num_experts for g in range(len(sizes))] if expert_ids is None else expert_ids

    def i32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows, index = _padded(q.quants_RK, capacity), None
    if gather:
        order = torch.randperm(2 * capacity + 5, generator=rng)[:capacity]
        wide = torch.full((2 * capacity + 5, q.quants_RK.shape[1] + 16), -1, dtype=BITS[rows.element_size()])
        wide[order, : rows.shape[1]] = rows.view(wide.dtype)
        rows = wide.view(rows.dtype).to(device)[:, : rows.shape[1]]
        index = order.to(torch.int32).to(device)
    a = GroupedRows(
        format=fmt,
        rows=rows.to(device),
        scales=None,
        row_scale=None if q.row_scale_R is None else _padded(q.row_scale_R, capacity).to(device),
        row_index=index,
        group_offsets=i32(offsets),
        group_scale_offsets=i32(shifts) if fmt.swizzled else None,
        expert_ids=i32(ids),
        capacity=capacity,
        num_columns=k,
    )
    if q.scales_RV is None:
        return a
    if not fmt.swizzled:
        return replace(a, scales=_padded(q.scales_RV, capacity).to(device))
    columns = fmt.scale_columns(k)
    blocks = np.full((capacity // 128 + len(sizes) * (1 + sparse_scales)) * -(-columns // 4) * 512, 0x7F, np.uint8)
    blocks[swizzled(scale_rows(a)[:count], columns)] = bits(q.scales_RV)
    scales = torch.from_numpy(blocks).view(-1, -(-columns // 4), 32, 4, 4).view(q.scales_RV.dtype)
    return replace(a, scales=scales.to(device))


def _padded(t: torch.Tensor, rows: int) -> torch.Tensor:
    """`t` with rows of 0xFF bytes behind it."""
    out = torch.full((rows, *t.shape[1:]), -1 if t.element_size() > 1 else 255, dtype=BITS[t.element_size()])
    out[: t.shape[0]] = t.contiguous().view(out.dtype)
    return out.view(t.dtype)


@dataclass(frozen=True)
class Exact:
    """float64 results by row position, and how far fp32 sums may be from them.

    Attributes:
        value: `[capacity, N]`, scales and bias applied; 0 where no active group is.
        slack: `[capacity, N]`, `ceil(K / 16) * 2^-23 * sum|a||b|` (fp32 sums, rounded each 16 products), scales
            applied; more where fp8 MMA keeps fewer bits.
        written: `[capacity]`, which rows belong to an active group with an expert.
    """

    value: Array | torch.Tensor
    slack: Array | torch.Tensor
    written: Array | torch.Tensor


def exact_gemm(a: GroupedRows, w: ExpertWeights, device: torch.device) -> Exact:
    """The product of the operands of each group in float64, dequantized as `multiplied_rows`."""
    rows, weights = multiplied_rows(a, w.format), dequant_weights(w)
    factors = w.row_factors().cpu().double().numpy()
    value, slack = np.zeros((a.capacity, w.num_rows)), np.zeros((a.capacity, w.num_rows))
    written = np.zeros(a.capacity, bool)
    active = a.num_groups if a.num_active_experts is None else int(a.num_active_experts)
    offsets, ids = a.group_offsets.tolist(), a.expert_ids.tolist()
    imprecise = device.type == "cuda" and w.format.name == "fp8_block" and torch.cuda.get_device_capability()[0] == 9
    for g in range(min(active, a.num_groups)):
        span, e = slice(offsets[g], offsets[g + 1]), ids[g]
        if not 0 <= e < w.num_experts:
            continue
        x, m = rows[span], weights[e]
        scale = factors[e][None, :] * (1.0 if a.row_scale is None else a.row_scale[span, None].cpu().double().numpy())
        value[span] = (x @ m.T) * scale
        terms = -(-a.num_columns // 16) * 2.0**-23 * (np.abs(x) @ np.abs(m).T)
        lost = fp8_mma_slack(*(torch.from_numpy(t).to(device) for t in (x, m))).cpu().numpy() if imprecise else 0.0
        slack[span] = (terms + lost) * np.abs(scale)
        if w.bias is not None:
            value[span] += w.bias[e].cpu().double().numpy()
        written[span] = True
    return Exact(value, slack, written)


def check_inside(actual: torch.Tensor, exact: Exact, unit: float) -> None:
    """Raise unless each written element is within `unit * |c| + slack` of the exact one.

    Below 2^-14 fp16 is denormal: its numbers lie 2^-24 apart, whatever their size. From 65520 on it is infinite.
    """
    value, slack, written = (
        torch.as_tensor(part, device=actual.device) for part in (exact.value, exact.slack, exact.written)
    )
    is_half = actual.dtype == torch.float16
    got = actual.detach()[: len(value)].double()
    if is_half:
        too_large = got.isinf() & (got.sign() == value.sign()) & (value.abs() + slack >= HALF_OVERFLOW)
        got = torch.where(too_large, value, got)
    bound = (unit * value.abs()).clamp(min=2.0**-25 if is_half else 0.0) + slack
    wrong = written[:, None] & ~((got - value).abs() <= bound)
    if wrong.any():
        i = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} outside; "
            f"at {i}: {got[i].item()}, expected {value[i].item()} +- {bound[i].item()}"
        )


def random_weights(
    name: str, e: int, n: int, k: int, rng: torch.Generator, device: torch.device, **more: Any
) -> ExpertWeights:
    """Normal weights `[E, N, K]` in format `name`; `more` is for `ExpertWeights.quantize`."""
    return ExpertWeights.quantize(torch.randn(e, n, k, generator=rng), name, engine="torch", **more).to(device)
