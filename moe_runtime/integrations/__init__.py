"""Models of other libraries with their experts spread over ranks."""

from __future__ import annotations

from moe_runtime.integrations.transformers import ExpertParallel, apply_expert_parallel
from moe_runtime.integrations.transformers_models import without_experts

__all__ = ["ExpertParallel", "apply_expert_parallel", "without_experts"]
