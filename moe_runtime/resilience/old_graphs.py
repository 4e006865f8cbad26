"""CUDA graphs that were captured before a rank died: a replay of one ends at once, is noticed, and is harmless."""

from __future__ import annotations

import torch


class OldGraphs:
    """What graphs captured before a death still read and write; it is kept as long as this object.

    Args:
        device: of the context. On a CPU there are no graphs, and nothing is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._epochs: list[tuple[torch.Tensor, int]] = []
        self._kept: list[object] = []

    def end(self, epoch: torch.Tensor, latch: torch.Tensor) -> None:
        """Have replays of all graphs so far end at once.

        Args:
            epoch: the context's previous one, int32 `[1]`, which a replay raises.
            latch: the context's previous one: kernels that find it set end.
        """
        latch.fill_(1)
        if self._on_gpu:
            self._epochs.append((epoch, int(epoch)))
            self.keep(latch)

    def keep(self, *read: object) -> None:
        """Keep what graphs so far read: a replay must not reach freed memory."""
        if self._on_gpu:
            self._kept.extend(read)

    def check(self) -> None:
        """Raise `ValueError` if one was replayed after its end. Waits for the device."""
        for epoch, last in self._epochs:
            if int(epoch) != last:
                raise ValueError("graph: it was captured before a rank died; capture it again")
