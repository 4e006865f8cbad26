"""Models of other libraries with their experts spread over ranks."""

from __future__ import annotations

from moe_runtime.integrations.transformers import ExpertParallel, apply_expert_parallel
from moe_runtime.integrations.transformers_models import without_experts
from moe_runtime.integrations.transformers_registry import close_experts, experts_settings

__all__ = ["ExpertParallel", "apply_expert_parallel", "close_experts", "experts_settings", "without_experts"]
