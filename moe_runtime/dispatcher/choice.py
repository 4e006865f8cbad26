"""Which exchange a dispatcher has, and which kernels run it."""

from __future__ import annotations

import logging

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.exchange import Exchange, LocalExchange, OneRankExchange, StagedExchange
from moe_runtime.dispatcher.hierarchical import HierarchicalExchange
from moe_runtime.kernels.exchange import hierarchical
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from moe_runtime.kernels.exchange.interface import ExchangeBackend
from moe_runtime.kernels.exchange.plan import exchange_engine

_LOG = logging.getLogger(__name__)


def choose_exchange(
    context: ExpertParallelContext,
    geometry: ExchangeGeometry,
    exchange_id: int,
    host_capacity: int | None = None,
    backend: ExchangeBackend | None = None,
) -> Exchange:
    """The exchange for the memory of `context`.

    Args:
        context: of the layer.
        geometry: of the layer, as all ranks would exchange on one host.
        exchange_id: number of the exchange in its context.
        host_capacity: several hosts: most tokens of a rank for one host; None for all.
        backend: the kernels; None for those that `choose_backend` names.

    Raises:
        ValueError: several hosts with GPUs where the kernels do not run, or do not take these sizes.
    """
    if context.hosts is not None:
        between = HostGeometry(context.hosts, geometry, hierarchical.PART_TOKENS, host_capacity)
        backend = choose_backend(context, between.local) if backend is None else backend
        return HierarchicalExchange(context, between, exchange_id, backend)
    backend = choose_backend(context, geometry) if backend is None else backend
    if context.host_transport is not None:
        return StagedExchange(context, geometry, exchange_id, backend)
    if geometry.world_size == 1 and context.heap.directly_mapped:
        kernels = backend.of_one_rank(geometry)
        if kernels is not None:
            return OneRankExchange(context, geometry, exchange_id, backend, kernels)
    return LocalExchange(context, geometry, exchange_id, backend)


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
