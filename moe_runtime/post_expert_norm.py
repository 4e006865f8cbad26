"""The norm of a layer that follows each of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_runtime.config import PostExpertNormConfig
from moe_runtime.kernels.gemm.expert_norm import ExpertNorm
from moe_runtime.support.arguments import check_is_tensor
from moe_runtime.support.fixed_dtypes import FixedDtypes, copy_checked


class PostExpertNorm(FixedDtypes):
    """The weight of an RMSNorm over each expert's output, the same for all experts and on every rank.

    A row `x` becomes `y * rsqrt(mean(y^2) + eps)`, `y = bf16(x * (1 + weight))`
    (`moe_runtime.kernels.gemm.expert_norm`).

    Attributes:
        scale: fp32 `[H]`, `1 + weight`; ones until weights are loaded.
        eps: as in the config.
    """

    def __init__(self, hidden_size: int, config: PostExpertNormConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = config.eps
        # Loaded in place, which inference tensors allow in inference mode only.
        with torch.inference_mode(False):
            self.scale = nn.Parameter(torch.ones(hidden_size, dtype=torch.float32, device=device), requires_grad=False)

    def load(self, weight: torch.Tensor) -> None:
        """Copy the weight `[H]` of a checkpoint; `1 + weight` is rounded to its dtype, as models do.

        Raises `ValueError` for a wrong shape.
        """
        check_is_tensor("weight", weight)
        copy_checked({"weight": (self.scale, 1.0 + weight if weight.is_floating_point() else weight)})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *how: Any
    ) -> None:
        # In place also where `assign` is asked for: the experts hold the tensor with which they were loaded.
        assign = local_metadata.get("assign_to_params_buffers", False) and self.scale.is_meta
        local_metadata = {**local_metadata, "assign_to_params_buffers": assign}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *how)

    @property
    def norm(self) -> ExpertNorm:
        """As the experts apply it; later weights count too."""
        return ExpertNorm(self.scale.detach(), self.eps)
