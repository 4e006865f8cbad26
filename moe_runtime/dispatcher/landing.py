"""The landing region of a rank as tensors: the records of tokens, and the fields of those records."""

from __future__ import annotations

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry


def landing_half(context: ExpertParallelContext, geometry: ExchangeGeometry) -> int:
    """Bytes from the first half to the second."""
    return geometry.landing_half(context.half_bytes["landing"])


def landing_records(context: ExpertParallelContext, geometry: ExchangeGeometry) -> torch.Tensor:
    """uint8 `[rows of both halves, record_bytes]`; the second half begins at row `landing_half / record_bytes`."""
    stride = geometry.record.record_bytes
    num_rows = landing_half(context, geometry) // stride + geometry.num_slots
    return context.heap.tensor("landing")[: num_rows * stride].view(num_rows, stride)


def landing_rows(context: ExpertParallelContext, geometry: ExchangeGeometry) -> torch.Tensor:
    """The landing slots of both halves as rows of quants, one record apart."""
    fmt = geometry.token_format
    return landing_records(context, geometry)[:, : fmt.quant_bytes(geometry.hidden)].view(fmt.quant_dtype)


def landing_scales(context: ExpertParallelContext, geometry: ExchangeGeometry) -> torch.Tensor:
    """Their block scales, one record apart."""
    record = geometry.record
    assert record.format.scale_dtype is not None
    first = record.scales_offset
    scales = landing_records(context, geometry)[:, first : first + record.format.scale_bytes(geometry.hidden)]
    return scales.view(record.format.scale_dtype)
