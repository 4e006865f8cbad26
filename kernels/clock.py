"""The GPU's clock between kernels, for benchmarks."""

from __future__ import annotations

import torch

from moe_runtime.kernels.bound_kernel import launch
from moe_runtime.kernels.nvrtc import Defines

DEFINES = Defines({})


def write_clock(at: torch.Tensor) -> None:
    """Store nanoseconds of the GPU's global timer in `at`, int64 `[1]`, once all previous kernels have ended.

    The next kernel may begin before that, up to its own wait, if it is launched with `early`.
    """
    launch(
        "clock.cu", "write_clock", DEFINES, grid=(1, 1, 1), block=1, arguments={"at": at}, device=at.device, early=True
    )
