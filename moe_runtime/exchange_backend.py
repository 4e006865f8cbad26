"""Which kernels run the exchange of a layer, decided in one place."""

from __future__ import annotations

from moe_runtime.context import ExpertParallelContext
from moe_runtime.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange_interface import ExchangeBackend


def choose_backend(context: ExpertParallelContext, geometry: ExchangeGeometry) -> ExchangeBackend:
    """Torch where the context's engine is torch; CUDA C++ on Hopper for sizes that its kernels take; else Triton."""
    if context.engine == "torch":
        from moe_runtime.kernels import reference_exchange

        return reference_exchange
    from moe_runtime.kernels import hopper_exchange, triton_exchange
    from moe_runtime.kernels.exchange_plan import plan_exchange

    if context.engine == "cuda" and plan_exchange(geometry) is not None:
        return hopper_exchange
    return triton_exchange
