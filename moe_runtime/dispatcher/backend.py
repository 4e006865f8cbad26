"""The kernels that run the exchange of a layer."""

from __future__ import annotations

import logging

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeBackend
from moe_runtime.kernels.exchange.plan import exchange_engine

_LOG = logging.getLogger(__name__)


def choose_backend(context: ExpertParallelContext, geometry: ExchangeGeometry) -> ExchangeBackend:
    """The implementation that `exchange_engine` names, imported only when it is needed.

    Warns where a GPU runs torch's without having been asked to: it waits for the host, so no CUDA graph can capture it.
    """
    engine, why_not = exchange_engine(context.engine, context.device, geometry)
    if engine == "cuda":
        from moe_runtime.kernels.exchange import cuda

        return cuda
    from moe_runtime.kernels.exchange import reference

    if context.device.type == "cuda" and context.engine != "torch":
        _LOG.warning("dispatch and combine run in torch, slowly and not in CUDA graphs: %s", why_not)
    return reference
