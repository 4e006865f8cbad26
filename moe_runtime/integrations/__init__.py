"""Models and engines of others with their experts spread over ranks.

Names are imported when they are first used: an engine that looks for plugins imports this package too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_runtime.integrations.replayed_routes import replay_routes
    from moe_runtime.integrations.transformers import ExpertParallel, apply_expert_parallel
    from moe_runtime.integrations.transformers_models import without_experts
    from moe_runtime.integrations.transformers_registry import close_experts, experts_settings

__all__ = [
    "ExpertParallel",
    "apply_expert_parallel",
    "close_experts",
    "experts_settings",
    "replay_routes",
    "without_experts",
]

VLLM_VARIABLE = "MOE_RUNTIME_VLLM"
"""Environment variable that asks vLLM for the adapter, with its settings."""

_MODULE_OF = {
    "ExpertParallel": "transformers",
    "apply_expert_parallel": "transformers",
    "close_experts": "transformers_registry",
    "experts_settings": "transformers_registry",
    "replay_routes": "replayed_routes",
    "without_experts": "transformers_models",
}

if not TYPE_CHECKING:  # a type checker would take it as a promise that every name exists

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # What registers this package with transformers comes first, as with an import of all names.
        import_module(f"{__name__}.transformers")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
