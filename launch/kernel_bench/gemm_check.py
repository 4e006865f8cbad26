"""Checks of grouped GEMMs: a sample of their rows is compared with float64 GEMMs of the same operands.

A plain GEMM: `|error| <= 2^-8 |c| + g`, where `g` is `ceil(K/16) 2^-23 sum |a| |b|`, more for FP8 MMA on Hopper
(`fp8_bound.py`). `silu(gate) * up`, requantized: half a step of its format, and what the errors `g` of gate and up may
change, `1.1 |up| g_gate + |silu(gate)| g_up` since `|silu'| <= 1.1`. All other rows must be written, and rows that no
group owns must not. Expanded weights are checked as the e4m3 weights that `ExpandedWeights.expand` gives, with which
the FP8 GEMM must also give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from moe_runtime.kernels.formats.number_formats import FormatCode, QuantizedRows, ceil_div, rounds_tokens
from moe_runtime.kernels.formats.quantize import dequantize_rows
from moe_runtime.kernels.formats.reference_quantize import e8m0_to_f32, raw_bits
from moe_runtime.kernels.gemm.expanded_weights import StoredWeights
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import SILU
from moe_runtime.launch.benchmarks.checks import FP32_GAIN, Check, largest_ratio, plain_expert, ungrouped
from moe_runtime.launch.kernel_bench.fp8_bound import fp8_mma_slack

SAMPLE = 32
"""Rows of a group that are compared: first, last, and others at random."""

SILU_SLOPE = 1.1
SILU_GAIN = 2.0**-18
"""Relative error of `silu(gate) * up` in fp32."""

SMALLEST_STEP = {FormatCode.BF16: 0.0, FormatCode.FP8_BLOCK: 2.0**-9, FormatCode.MXFP8: 2.0**-9, FormatCode.NVFP4: 0.5}
"""From zero to the next element, in units of the block scale."""


@dataclass(frozen=True)
class Sample:
    """Rows that are compared.

    Attributes:
        positions: int64, row positions, on the device of the rows.
        groups: which of them belong to each group.
    """

    positions: torch.Tensor
    groups: list[slice]

    @staticmethod
    def draw(rows: GroupedRows, seed: int) -> Sample:
        """First, last and random rows of each group, at most `SAMPLE` of each. Reads the offsets on the host."""
        rng = torch.Generator().manual_seed(seed)
        offsets = rows.group_offsets.tolist()
        parts, groups, taken = [], [], 0
        for start, end in pairwise(offsets):
            order = torch.randperm(end - start, generator=rng)
            inner = order[(order > 0) & (order < end - start - 1)][: SAMPLE - 2]
            outer = torch.tensor(sorted({0, end - start - 1}) if end > start else [], dtype=torch.int64)
            parts.append(start + torch.cat([outer, inner]))
            groups.append(slice(taken, taken + len(parts[-1])))
            taken += len(parts[-1])
        return Sample(torch.cat(parts).to(rows.rows.device), groups)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN (bytes of 255), so that what a kernel does not write is found."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_plain(out_RN: torch.Tensor, rows: GroupedRows, w: StoredWeights, sample: Sample, name: str) -> Check:
    """The largest error over its bound of bf16 results that were NaN before; infinite for a row left or overwritten."""
    worst, total = 0.0, int(rows.group_offsets[-1])
    for place, c_SN, slack_SN in _products(rows, w, sample):
        got_SN = out_RN[sample.positions[place]].double()
        worst = max(worst, largest_ratio((got_SN - c_SN).abs(), 2.0**-8 * c_SN.abs() + slack_SN))
    if bool(out_RN[:total].isnan().any()) or not bool(out_RN[total:].isnan().all()):
        worst = math.inf
    return Check(f"{name}: largest error over its elementwise bound", worst, 1.0)


def check_gated(out: GroupedRows, rows: GroupedRows, w: StoredWeights, sample: Sample) -> Check:
    """The largest error over its bound of requantized `silu(gate) * up`, infinite where a value is NaN."""
    linear = ungrouped(out)
    taken = _taken(linear, sample.positions)
    values_SI = dequantize_rows(taken, engine="torch").double()
    unit_SI = _block_scales(taken)[:, : out.num_columns]
    worst = 0.0
    for place, c_SN, slack_SN in _products(rows, w, sample):
        gate_rows, up_rows = SILU.order.gate_rows(c_SN.shape[1]), SILU.order.up_rows(c_SN.shape[1])
        gate, up, gate_slack, up_slack = (t[:, part] for t in (c_SN, slack_SN) for part in (gate_rows, up_rows))
        silu = gate * torch.sigmoid(gate)
        h = (silu * up).abs()
        change = SILU_SLOPE * (up.abs() + up_slack) * gate_slack + silu.abs() * up_slack + SILU_GAIN * h
        step = out.format.epsilon / 2 * (h + change) + SMALLEST_STEP[out.format.code] / 2 * unit_SI[place]
        worst = max(worst, largest_ratio((values_SI[place] - silu * up).abs(), step + change))
    if bool(dequantize_rows(linear, engine="torch").isnan().any()):
        worst = math.inf
    return Check("gate_up with SwiGLU: largest error over its elementwise bound", worst, 1.0)


def check_bits(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Check:
    """How many elements have not the bits of the FP8 GEMM with the same e4m3 weights."""
    differing = 0
    for one, other in zip(found, wanted, strict=True):
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.itemsize]
        differing += int((one.view(integers) != other.view(integers)).sum())
    return Check("elements that differ from the FP8 GEMM of the same e4m3 weights", float(differing), 0.0)


def stored_tensors(rows: GroupedRows) -> list[torch.Tensor]:
    """Quants and block scales of all rows, by row position."""
    linear = ungrouped(rows)
    return [linear.quants_RK, *([] if linear.scales_RV is None else [linear.scales_RV])]


def _products(
    rows: GroupedRows, w: StoredWeights, sample: Sample
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """`(place in the sample, c, g)` of each group that has rows, float64 `[sampled rows, N]`."""
    a_SK = dequantize_rows(_taken(ungrouped(rows), sample.positions), engine="torch")
    a_SK = (a_SK.bfloat16() if rounds_tokens(rows.format, w.format) else a_SK).double()
    on_hopper = a_SK.is_cuda and torch.cuda.get_device_capability(a_SK.device)[0] == 9
    gain = ceil_div(rows.num_columns, 16) * FP32_GAIN
    for place, expert in zip(sample.groups, rows.expert_ids.tolist(), strict=True):
        if place.start == place.stop:
            continue
        b_NK = plain_expert(w, expert).dequantize(engine="torch")[0].double()
        slack_SN = gain * (a_SK[place].abs() @ b_NK.abs().T)
        if on_hopper and w.format.code == FormatCode.FP8_BLOCK:
            slack_SN += fp8_mma_slack(a_SK[place], b_NK)
        yield place, a_SK[place] @ b_NK.T, slack_SN


def _taken(rows: QuantizedRows, positions: torch.Tensor) -> QuantizedRows:
    def part(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else raw_bits(t)[positions].view(t.dtype)

    quants = part(rows.quants_RK)
    assert quants is not None
    return QuantizedRows(rows.format, quants, part(rows.scales_RV), part(rows.row_scale_R))


def _block_scales(rows: QuantizedRows) -> torch.Tensor:
    """float64 `[R, K]`: what an element is multiplied by; 1 where there are no scales."""
    if rows.scales_RV is None:
        return torch.ones(rows.quants_RK.shape, dtype=torch.float64, device=rows.quants_RK.device)
    is_power = rows.format.code == FormatCode.MXFP8
    scales_RV = (e8m0_to_f32(rows.scales_RV) if is_power else rows.scales_RV.float()).double()
    if rows.row_scale_R is not None:
        scales_RV = scales_RV * rows.row_scale_R.double()[:, None]
    return scales_RV.repeat_interleave(rows.format.block, 1)
