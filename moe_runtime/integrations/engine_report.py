"""What the log of an engine says once a model is loaded: which of its layers run here, and how."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from moe_runtime.context.memory import expert_bytes
from moe_runtime.integrations.engine_layers import EngineExperts, built_layers


def summary(taken: Sequence[EngineExperts], total: int, engine: str) -> str:
    """One line about the layers of a model that were taken over, of `total` that `engine` has made."""
    layers, share = [experts.layer for experts in taken], taken[0].share
    context = layers[0].context
    formats = {(layer.config.weight_format, layer.config.token_format) for layer in layers}
    weights, tokens = (", ".join(sorted({pair[i] for pair in formats})) for i in range(2))
    buckets = sorted({size for layer in layers for size in layer.config.all_token_buckets})
    experts = sum(expert_bytes(layer.config, context.world_size) for layer in layers)
    ranks = f"{context.world_size} rank{'s' * (context.world_size > 1)}, transport {context.transport}"
    if share.whole:
        ranks = f"{share.ranks} ranks with experts of their own, summed by {engine}"
    return (
        f"moe_runtime: {len(layers)} of {total} MoE layers taken over: weights {weights}, tokens {tokens}, "
        f"{ranks}, engine {context.engine}, token buckets {buckets}, on this rank {_mib(experts)} of experts and "
        f"{_mib(context.reserved_bytes)} for exchange"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def report(model: Any, experts_class: type, engine: str, log: logging.Logger) -> None:
    """Log the `summary` of `model` on the first rank of its groups, or a warning where no layer was taken over.

    A model without experts beside others that were taken over is no reason to warn.

    Args:
        model: of torch, whose layers of `experts_class` may have `moe_runtime_experts` in their `quant_method`.
        experts_class: the engine's, of which each MoE layer has one.
        engine: its name.
        log: which the engine shows.
    """
    total, taken = 0, list[EngineExperts]()
    for module in model.modules():
        if isinstance(module, experts_class):
            total += 1
            experts = getattr(getattr(module, "quant_method", None), "moe_runtime_experts", None)
            if experts is not None:
                taken.append(experts)
    if not taken:
        why = "it has none" if total == 0 else "its class of experts is not known here"
        # A draft without experts, or a stage of a pipeline, beside layers that were taken over.
        fine = total == 0 and built_layers()
        log.log(
            logging.INFO if fine else logging.WARNING,
            "moe_runtime: 0 of %d MoE layers of %s taken over (%s): it runs as without MOE_RUNTIME_%s",
            total,
            type(model).__name__,
            why,
            engine.upper(),
        )
    elif taken[0].layer.context.rank == taken[0].share.rank == 0:
        log.info("%s", summary(taken, total, engine))
