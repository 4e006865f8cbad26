"""Checks of a benchmark's results before anything is timed, on the very buffers that are timed.

Dispatch is compared bit for bit. Combine, gate and up: relative error in the Frobenius norm, below what the formats'
rounding may add. Down: element by element, with a float64 product of the dequantized operands. Nothing here uses the
kernels that are timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moe_runtime.comm.hosts import Hosts
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.formats.number_formats import FormatCode, QuantizedRows, TokenFormat
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, StoredWeights, expanded_activation
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import Activation, ExpertWeights
from moe_runtime.reference import activation_reference, relative_error, rounding_error

FP32_GAIN = 2.0**-23
"""Per 16 of K: error of an fp32 sum, or of a bf16 MMA, over the sum of the products' magnitudes."""


FP8_MMA_BITS = 13
"""Bits behind the leading one of the largest term that FP8 MMA on Hopper keeps of every term of a sum; measured."""

FP8_MMA_GAIN = 4 * 34 * 2.0**-FP8_MMA_BITS
"""Loss of the sum of 128 products, over the largest term or partial sum: 4 MMAs of 32 products, the sum so far, and the
roundings of the result."""


@dataclass(frozen=True)
class Check:
    """A comparison: `error` must not be above `bound`; `what` says of what, in which measure."""

    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Inputs:
    """The tokens of all ranks in one step, on one device: `x[r]` bf16 `[T, H]`, `idx[r]` and `weights[r]` `[T, K]`."""

    x: Sequence[torch.Tensor]
    idx: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]


def sent_tokens(idx: Sequence[torch.Tensor], geometry: ExchangeGeometry) -> torch.Tensor:
    """int64 `[W, W]`: tokens that rank `s` (row) sends to rank `d`, each once however many experts share it.

    `idx[s]` are the ids of rank `s`, `[T, K]`.
    """
    sent = torch.zeros(geometry.world_size, geometry.world_size, dtype=torch.int64)
    for source, idx_TK in enumerate(idx):
        for rank in range(geometry.world_size):
            first, end = geometry.starts[rank], geometry.starts[rank + 1]
            sent[source, rank] = ((idx_TK >= first) & (idx_TK < end)).any(dim=1).sum()
    return sent


def arrival_order(counts: Sequence[int], hosts: Hosts) -> torch.Tensor:
    """int64: all ranks' tokens, of which rank `r` has `counts[r]`, as their rows are ordered: by rail, host and token.

    >>> arrival_order([2, 1, 1, 1], Hosts(2, 2, 0, 0)).tolist()
    [0, 1, 3, 2, 4]
    """
    parts = torch.arange(sum(counts)).split(list(counts))
    ranks = torch.arange(len(counts)).view(hosts.num_hosts, hosts.ranks_per_host).T.flatten()
    return torch.cat([parts[rank] for rank in ranks.tolist()])


@dataclass(frozen=True)
class Arrivals:
    """What must arrive at a rank, by row position: int64 `[R]` each, `token` counting through all ranks' tokens."""

    token: torch.Tensor
    entry: torch.Tensor
    expert: torch.Tensor

    @staticmethod
    def expected(inputs: Inputs, geometry: ExchangeGeometry, hosts: Hosts | None = None) -> Arrivals:
        """Local experts ascending, within each the tokens by source rank, then by their place there.

        With `hosts`, by rail, then by host.
        """
        ids = torch.cat(list(inputs.idx)).long()
        tokens = torch.arange(len(ids))
        if hosts is not None:
            tokens = arrival_order([len(idx) for idx in inputs.idx], hosts)
        tokens = tokens.to(ids.device)
        end = geometry.first_expert + geometry.num_local_experts
        ordered = ids[tokens]
        place, entry = ((ordered >= geometry.first_expert) & (ordered < end)).nonzero(as_tuple=True)
        order = ordered[place, entry].argsort(stable=True)
        token, entry = tokens[place[order]], entry[order]
        return Arrivals(token, entry, ids[token, entry])


def ungrouped(rows: GroupedRows) -> QuantizedRows:
    """The rows by row position with linear scales, as the quantizers give them. Reads offsets on the host."""
    return first_rows(rows, int(rows.group_offsets[-1]))


def first_rows(rows: GroupedRows, count: int) -> QuantizedRows:
    """As `ungrouped` the first `count` row positions, without the host: positions past the last row hold anything."""
    fmt, offsets = rows.format, rows.group_offsets.long()
    position = torch.arange(count, device=offsets.device)
    quants = raw_bits(rows.rows)
    # A wrong index gives a row that the check finds, not an error of the device.
    index = rows.row_index
    source = position if index is None else index[:count].long().clamp(0, max(0, quants.shape[0] - 1))
    quants = quants[source]
    scales = None if rows.scales is None else rows.scales[:count]
    if rows.scales is not None and rows.scales_in_record:
        scales = raw_bits(rows.scales)[source].view(rows.scales.dtype)
    elif rows.scales is not None and rows.group_scale_offsets is not None:
        group = torch.searchsorted(offsets[1:], position, right=True).clamp(max=rows.num_groups - 1)
        local = position - offsets[group]
        block = offsets[group] // 128 + rows.group_scale_offsets[group] + local // 128
        # A block is [C4, 32, 4, 4]: column / 4, row % 32, row / 32, column % 4.
        swizzled = raw_bits(rows.scales)[block.clamp(0, rows.scales.shape[0] - 1), :, local % 32, local % 128 // 32]
        linear = swizzled.flatten(1)[:, : fmt.scale_columns(rows.num_columns)].contiguous()
        scales = linear.view(rows.scales.dtype)
    row_scale = None if rows.row_scale is None else rows.row_scale[:count]
    return QuantizedRows(fmt, quants.contiguous().view(fmt.quant_dtype), scales, row_scale)


def check_dispatch(arrived: DispatchedTokens, inputs: Inputs, hosts: Hosts | None = None) -> Check:
    """Bytes of quants, scales and row scales that differ from each token's own quantization."""
    geometry = arrived.handle.geometry
    expected = Arrivals.expected(inputs, geometry, hosts)
    offsets = torch.searchsorted(
        expected.expert,
        torch.arange(geometry.first_expert, geometry.starts[geometry.rank + 1] + 1, device=expected.expert.device),
    )
    if not torch.equal(offsets.int(), arrived.group_offsets):
        return Check("dispatch: bytes that differ", math.inf, 0)
    made = quantize_rows(torch.cat(list(inputs.x)), arrived.format, engine="torch")
    found = ungrouped(arrived)
    differing = 0
    for name in ("quants_RK", "scales_RV", "row_scale_R"):
        ours, theirs = getattr(made, name), getattr(found, name)
        if ours is not None:
            wanted = raw_bits(ours)[expected.token].contiguous().view(torch.uint8)
            differing += int((wanted != raw_bits(theirs).contiguous().view(torch.uint8)).sum())
    return Check("dispatch: bytes that differ", float(differing), 0)


def combine_input(arrived: DispatchedTokens, inputs: Inputs, hosts: Hosts | None = None) -> torch.Tensor:
    """bf16 `[capacity, H]` to combine: each row its token times a factor of its expert, NaN past the last row."""
    geometry = arrived.handle.geometry
    expected = Arrivals.expected(inputs, geometry, hosts)
    shape = (geometry.row_capacity, geometry.hidden)
    rows_RH = torch.full(shape, math.nan, dtype=torch.bfloat16, device=arrived.group_offsets.device)
    factor_R = expert_factor(expected.expert, geometry)
    rows_RH[: len(factor_R)] = (torch.cat(list(inputs.x))[expected.token].float() * factor_R[:, None]).bfloat16()
    return rows_RH


def check_combine(y_TH: torch.Tensor, inputs: Inputs, geometry: ExchangeGeometry, hosts: Hosts | None = None) -> Check:
    """Error of this rank's combined tokens, of `combine_input` on all ranks.

    The parts of a token point the same way, so that rounding each to the combine format and their sum to bf16 adds
    `(1 + e_combine^2) (1 + e_bf16^2) - 1` to its mean square (`reference.rounding_error`). On several hosts the parts
    of ranks are bf16, and sums of hosts are rounded to the combine format.
    """
    x_TH, idx_TK, weights_TK = (part[geometry.rank] for part in (inputs.x, inputs.idx, inputs.weights))
    rows_TKH = (x_TH.float()[:, None] * expert_factor(idx_TK, geometry)[:, :, None]).bfloat16().double()
    weights_TK = torch.where(idx_TK >= 0, weights_TK, 0.0).double()
    error, _ = relative_error(y_TH, (rows_TKH * weights_TK[:, :, None]).sum(dim=1))
    bf16 = 1 + rounding_error("bf16") ** 2
    growth = (1 + rounding_error(geometry.combine_format) ** 2) * bf16 * (1 if hosts is None else bf16)
    return Check("combine: relative Frobenius error", error, math.sqrt(growth - 1))


def check_gate_up(out: GroupedRows, rows: GroupedRows, w: StoredWeights, activation: Activation) -> Check:
    """Error of the quantized intermediate, bounded by its rounding: both sides use the same dequantized operands."""
    if isinstance(w, ExpandedWeights):
        activation = expanded_activation(activation)
    expected = [activation_reference(c, activation) for _, c, _ in _products(rows, w)]
    values = dequantize_rows(ungrouped(out), engine="torch")
    error, _ = relative_error(values, torch.cat(expected) if expected else values.double())
    return Check("gate and up: relative Frobenius error", error, rounding_error(out.format))


def check_down(out_RH: torch.Tensor, rows: GroupedRows, w: StoredWeights) -> Check:
    """The largest `|error| / (u |c| + g sum |a| |b|)` of an element; `u` is 2^-8 for bf16, `g` by the kind of MMA."""
    gain = math.ceil(rows.num_columns / 16) * FP32_GAIN
    if out_RH.device.type == "cuda" and w.format.code == FormatCode.FP8_BLOCK:
        # Each chunk's largest term or partial sum is under the sum of its magnitudes.
        gain = FP8_MMA_GAIN
    worst = 0.0
    for place, c, magnitude in _products(rows, w):
        allowed = 2.0**-8 * c.abs() + gain * magnitude
        worst = max(worst, largest_ratio((out_RH[place].double() - c).abs(), allowed))
    return Check("down: largest error over its elementwise bound", worst, 1.0)


def expert_factor(experts: torch.Tensor, geometry: ExchangeGeometry) -> torch.Tensor:
    """fp32, different for each expert, from 1 to 2."""
    return 1 + experts.float() / geometry.num_experts


def largest_ratio(error: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest `error / bound`, infinite for NaN."""
    ratio = error / bound.clamp(min=torch.finfo(torch.float32).tiny)
    return math.inf if bool(ratio.isnan().any()) else float(ratio.max())


def plain_expert(w: StoredWeights, expert: int) -> ExpertWeights:
    """One expert's weights as they were before prepacking; of `ExpandedWeights` what they are expanded to."""
    one = w.expert(expert)
    if isinstance(one, PrepackedWeights):
        return one.restore(engine="torch")
    return one.expand() if isinstance(one, ExpandedWeights) else one


def _products(rows: GroupedRows, w: StoredWeights) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """`(place, a @ b^T + bias, |a| @ |b|^T + |bias|)` of each group that has rows: float64, of dequantized operands."""
    a_RK = dequantize_rows(ungrouped(rows), engine="torch").double()
    offsets = rows.group_offsets.tolist()
    for group, expert in enumerate(rows.expert_ids.tolist()):
        place = slice(offsets[group], offsets[group + 1])
        if place.start < place.stop and expert >= 0:
            one = plain_expert(w, expert)
            b_NK = one.dequantize(engine="torch")[0].double()
            bias_N = b_NK.new_zeros(()) if one.bias is None else one.bias[0].double()
            yield place, a_RK[place] @ b_NK.T + bias_N, a_RK[place].abs() @ b_NK.T.abs() + bias_N.abs()


def format_bytes(fmt: TokenFormat, columns: int) -> int:
    """Bytes of a row of `columns` elements with its scales."""
    return fmt.quant_bytes(columns) + fmt.scale_bytes(columns) + 4 * fmt.has_row_scale
