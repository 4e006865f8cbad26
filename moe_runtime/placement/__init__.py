"""Which rank holds which experts, and how experts move between ranks."""

from __future__ import annotations

from moe_runtime.placement.placement import Placement, placement_from_config, plan_placement

__all__ = ["Placement", "placement_from_config", "plan_placement"]
