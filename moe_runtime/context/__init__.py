"""What the layers of a group share: symmetric memory, signals, the agreement of ranks, and news of failures."""

from __future__ import annotations

from moe_runtime.context.expert_parallel import ExpertParallelContext

__all__ = ["ExpertParallelContext"]
