"""Our layer with its experts in separate passes, to be timed beside the fused one: what the epilogues spare.

Dispatch and combine are the layer's own. In between, gate and up go to memory in bf16, torch does the activation, a
kernel quantizes, scales are put where the next product reads them, and down follows. How many rows come is known
beforehand, as for the layer of torch: on its way a layer knows only the most that may come.

Shape letters: `R` rows that come to this rank, `I` intermediate size, `V` block scales of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch

from moe_runtime.dispatch_handle import CombineSink
from moe_runtime.experts import Experts
from moe_runtime.formats import TokenFormat, ceil_div
from moe_runtime.grouped import GroupedRows
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.quantize import quantize_rows
from moe_runtime.kernels.reference_quantize import raw_bits
from moe_runtime.launch.torch_layer import gated
from moe_runtime.layer import MoELayer
from moe_runtime.plan import dense_128_blocks_needed, dense_128_starts, swizzled_offset
from moe_runtime.prepared import PreparedWeights
from moe_runtime.weights import ExpertWeights

NAME = "moe_runtime, experts unfused"


@dataclass(frozen=True)
class Rows:
    """What is known beforehand of the rows of a step: how many there are, and where their scales go.

    Attributes:
        count: `R`.
        blocks: 128-row blocks of scales.
        places: int64 `[R, V]` on the device, place of each scale in the swizzled container; None where scales are
            linear.
    """

    count: int
    blocks: int
    places: torch.Tensor | None

    @staticmethod
    def of(sizes: Sequence[int], fmt: TokenFormat, intermediate: int, device: torch.device) -> Rows:
        """Those of groups of `sizes` rows."""
        offsets = [0, *accumulate(sizes)]
        total = offsets[-1]
        if not fmt.swizzled:
            return Rows(total, 0, None)
        columns = fmt.scale_columns(intermediate)
        groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        local = torch.arange(total) - torch.tensor(offsets)[groups]
        row = torch.tensor(dense_128_starts(offsets))[groups] * 128 + local
        places = swizzled_offset(row[:, None], torch.arange(columns), columns)
        return Rows(total, dense_128_blocks_needed(total, len(sizes)), places.to(device))


def plain_gate_up(experts: Experts) -> ExpertWeights | PreparedWeights:
    """The weights of gate and up for a product without activation: once more where they were reordered for it."""
    gate_up = experts.gate_up
    plain = gate_up.restore() if isinstance(gate_up, PreparedWeights) else gate_up
    one_scale = plain.expert_scales is None or plain.expert_scales.ndim == 1
    if PreparedWeights.wanted(plain, experts.engine) and one_scale:
        return PreparedWeights.prepare(replace(plain, gate_up=None))
    return plain


class UnfusedLayer:
    """A layer that runs its experts in separate passes; `gate_up` is `plain_gate_up` of them."""

    def __init__(self, layer: MoELayer, gate_up: ExpertWeights | PreparedWeights) -> None:
        assert layer.experts is not None
        self.layer = layer
        self.experts = layer.experts
        self.gate_up = gate_up

    def __call__(
        self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """bf16 `[T, H]`; nothing waits for the host. Collective."""
        dispatcher = self.layer.dispatcher
        how: dict[str, Any] = {"engine": self.experts.engine, "num_sms": self.experts.num_sms}
        leave = self.layer.scales_in_record and isinstance(self.gate_up, PreparedWeights)
        arrived = dispatcher.dispatch(x_TH, topk_idx_TK, topk_weights_TK, scales_in_record=leave)
        sink = CombineSink(arrived.handle)
        if rows.count:
            both_RN = grouped_gemm(arrived, self.gate_up, **how)[: rows.count]
            grouped_gemm(self._between(arrived, both_RN, rows), self.experts.down, out=sink.rows, **how)
        return dispatcher.combine(sink, arrived.handle)

    def _between(self, arrived: GroupedRows, both_RN: torch.Tensor, rows: Rows) -> GroupedRows:
        """The activation of gate and up, quantized, in the groups of `arrived`."""
        fmt = self.experts.intermediate_format
        assert isinstance(fmt, TokenFormat)
        middle_RI = gated(both_RN, self.experts.activation)
        gsf = self.experts.intermediate_gsf
        assert gsf is None or isinstance(gsf, torch.Tensor)
        made = quantize_rows(middle_RI, fmt, gsf=gsf, engine=self.layer.context.engine)
        scales = made.scales_RV
        if scales is not None and rows.places is not None:
            shape = (rows.blocks, ceil_div(scales.shape[1], 4), 32, 4, 4)
            blocks = torch.empty(shape, dtype=torch.uint8, device=scales.device)
            blocks.view(-1)[rows.places] = raw_bits(scales)
            scales = blocks.view(scales.dtype)
        shared = {field.name: getattr(arrived, field.name) for field in fields(GroupedRows)}
        changed = {
            "format": fmt,
            "rows": made.quants_RK,
            "scales": scales,
            "row_scale": made.row_scale_R,
            "row_index": None,
            "capacity": rows.count,
            "num_columns": middle_RI.shape[1],
            "scales_by_row": False,
        }
        return GroupedRows(**shared | changed)
