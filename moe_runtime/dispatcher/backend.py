"""Which kernels run the exchange of a layer, decided in one place."""

from __future__ import annotations

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeBackend


def choose_backend(context: ExpertParallelContext, geometry: ExchangeGeometry) -> ExchangeBackend:
    """Torch where the context's engine is torch; CUDA C++ on Hopper for sizes that its kernels take; else Triton."""
    if context.engine == "torch":
        from moe_runtime.kernels.exchange import reference

        return reference
    from moe_runtime.kernels.exchange import cuda, triton
    from moe_runtime.kernels.exchange.plan import plan_exchange

    if context.engine == "cuda" and plan_exchange(geometry) is not None:
        return cuda
    return triton
