"""How much GPU memory a step takes beside what is there before it."""

from __future__ import annotations

from types import TracebackType

import torch


class StepMemory:
    """Inside a `with`, watches what torch allocates on a GPU.

    Attributes:
        num_bytes: after it, the most bytes that were allocated at once above those at its beginning; None on CPUs,
            where nobody counts them.
    """

    num_bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> StepMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._device.type == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
