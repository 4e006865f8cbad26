"""The exchange in Triton: `dispatch.py`, `arrive.py` and `combine.py` as one `ExchangeBackend`."""

from __future__ import annotations

from moe_runtime.geometry import ExchangeGeometry
from moe_runtime.kernels.arrive import allocate_counts, dispatch_recv
from moe_runtime.kernels.combine import combine_recv, combine_send
from moe_runtime.kernels.dispatch import dispatch_send

__all__ = [
    "allocate_counts",
    "can_keep_scales_in_record",
    "combine_recv",
    "combine_send",
    "dispatch_recv",
    "dispatch_send",
]


def can_keep_scales_in_record(geometry: ExchangeGeometry) -> bool:
    """Never: scales are copied into the layout of the consumer."""
    return False
