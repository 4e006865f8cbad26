"""Expert-parallel Mixture-of-Experts layers: quantized dispatch, grouped GEMM and combine over many ranks.

Public names are imported when they are first used, so `import moe_runtime` costs nothing and does not load torch.

Layers, from the top. A module imports from its own layer or from those below it, never upward; the longest name counts.

    launch
    launch.research
    launch.report
    launch.kernel_bench
    launch.benchmarks
    launch.common
    virtual, integrations, observation.metrics
    layer, layer_parts, ops, checkpoints.conversion
    resilience.layer_members, checkpoints.expert_loader
    build, resilience.lost_experts, placement.rebalance
    checkpoints.kept_experts, checkpoints.converted_experts, checkpoints.calibration
    placement.migration
    experts, expert_slots, placement.rail
    step, warming, observation.waits, observation.observed_layer
    deep_ep
    dispatcher
    context, resilience, checkpoints, router, shared_expert, post_expert_norm, observation, reference
    placement
    config, observation.phases
    kernels.gemm, kernels.exchange, kernels.route, kernels.step_counts, kernels.recorded_routes, kernels.clock
    kernels.formats, kernels.launch_order
    kernels
    comm.heaps, comm.transport
    comm
    support
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_runtime.comm.bootstrap import init_from_env
    from moe_runtime.comm.errors import (
        CapacityError,
        ExpertsLostError,
        MoERuntimeError,
        PeerAbortedError,
        PeerTimeoutError,
        RankRemovedError,
        RoutingError,
        StaleHandleError,
        StepMismatchError,
        StoreLostError,
    )
    from moe_runtime.config import MoELayerConfig, ParallelConfig, RouterConfig, RunConfig, load_config
    from moe_runtime.context.expert_parallel import ExpertParallelContext
    from moe_runtime.context.memory import reserved_bytes
    from moe_runtime.dispatcher.handle import CombineSink, DispatchedTokens, DispatchHandle
    from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
    from moe_runtime.experts import Experts
    from moe_runtime.integrations.transformers import ExpertParallel, apply_expert_parallel
    from moe_runtime.integrations.transformers_models import without_experts
    from moe_runtime.kernels.exchange.record import RecordLayout
    from moe_runtime.kernels.formats.number_formats import FORMATS, QuantizedRows, TokenFormat
    from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
    from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
    from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
    from moe_runtime.kernels.gemm.weights import Activation, ExpertWeights, GateUpOrder, SwiGLU
    from moe_runtime.layer import MoELayer
    from moe_runtime.observation.counters import LayerCounters, LayerCounts, imbalance
    from moe_runtime.observation.routes import RecordedRoutes
    from moe_runtime.ops.token_format import NVFP4TokenFormat
    from moe_runtime.placement.placement import Placement, plan_placement
    from moe_runtime.router import Router

__version__ = "0.3.0"

__all__ = [
    "FORMATS",
    "Activation",
    "CapacityError",
    "CombineSink",
    "DispatchHandle",
    "DispatchedTokens",
    "ExpertParallel",
    "ExpertParallelContext",
    "ExpertWeights",
    "Experts",
    "ExpertsLostError",
    "GateUpOrder",
    "GroupedRows",
    "LayerCounters",
    "LayerCounts",
    "MoELayer",
    "MoELayerConfig",
    "MoERuntimeError",
    "NVFP4TokenFormat",
    "ParallelConfig",
    "PeerAbortedError",
    "PeerTimeoutError",
    "Placement",
    "PrepackedWeights",
    "QuantizedRows",
    "RankRemovedError",
    "RecordLayout",
    "RecordedRoutes",
    "Router",
    "RouterConfig",
    "RoutingError",
    "RunConfig",
    "StaleHandleError",
    "StepMismatchError",
    "StoreLostError",
    "SwiGLU",
    "TokenDispatcher",
    "TokenFormat",
    "apply_expert_parallel",
    "dequantize_rows",
    "imbalance",
    "init_from_env",
    "load_config",
    "plan_placement",
    "quantize_rows",
    "reserved_bytes",
    "without_experts",
]

_NAMES_IN = {
    "comm.bootstrap": ("init_from_env",),
    "comm.errors": (
        "CapacityError",
        "ExpertsLostError",
        "MoERuntimeError",
        "PeerAbortedError",
        "PeerTimeoutError",
        "RankRemovedError",
        "RoutingError",
        "StaleHandleError",
        "StepMismatchError",
        "StoreLostError",
    ),
    "config": ("MoELayerConfig", "ParallelConfig", "RouterConfig", "RunConfig", "load_config"),
    "context.expert_parallel": ("ExpertParallelContext",),
    "context.memory": ("reserved_bytes",),
    "dispatcher.handle": ("CombineSink", "DispatchHandle", "DispatchedTokens"),
    "dispatcher.token_dispatcher": ("TokenDispatcher",),
    "experts": ("Experts",),
    "integrations.transformers": ("ExpertParallel", "apply_expert_parallel"),
    "integrations.transformers_models": ("without_experts",),
    "kernels.exchange.record": ("RecordLayout",),
    "kernels.formats.number_formats": ("FORMATS", "QuantizedRows", "TokenFormat"),
    "kernels.formats.quantize": ("dequantize_rows", "quantize_rows"),
    "kernels.gemm.grouped_rows": ("GroupedRows",),
    "kernels.gemm.prepacked": ("PrepackedWeights",),
    "kernels.gemm.weights": ("Activation", "ExpertWeights", "GateUpOrder", "SwiGLU"),
    "layer": ("MoELayer",),
    "observation.counters": ("LayerCounters", "LayerCounts", "imbalance"),
    "observation.routes": ("RecordedRoutes",),
    "ops.token_format": ("NVFP4TokenFormat",),
    "placement.placement": ("Placement", "plan_placement"),
    "router": ("Router",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take it as a promise that every name exists

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
