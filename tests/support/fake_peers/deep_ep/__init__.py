"""DeepEP as `launch.research.peers` calls it; ours does the work."""

from moe_runtime.deep_ep import Buffer, topk_idx_t

__all__ = ["Buffer", "topk_idx_t"]
