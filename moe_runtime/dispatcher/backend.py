"""The kernels that run the exchange of a layer."""

from __future__ import annotations

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeBackend
from moe_runtime.kernels.exchange.plan import exchange_engine


def choose_backend(context: ExpertParallelContext, geometry: ExchangeGeometry) -> ExchangeBackend:
    """The implementation that `exchange_engine` names, imported only when it is needed."""
    match exchange_engine(context.engine, geometry):
        case "torch":
            from moe_runtime.kernels.exchange import reference

            return reference
        case "triton":
            from moe_runtime.kernels.exchange import triton

            return triton
        case "cuda":
            from moe_runtime.kernels.exchange import cuda

            return cuda
