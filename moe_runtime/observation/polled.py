"""Words that kernels count in, read by the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch


class PolledWords:
    """int64 words on a device, zero at first, and their newest copy on the host.

    Attributes:
        words: int64 `[size]` on `device`, for kernels.
        begun: copies to the host that `poll` has begun.
        ended: which of them `poll` gave last, 1 for the first; 0 for none.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # Steps and `poll` write them, and only one of the two may run in inference mode.
        with torch.inference_mode(False):
            self.words = torch.zeros(size, dtype=torch.int64, device=device)
            self._copy = torch.zeros(size, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self._copied = torch.cuda.Event() if on_gpu else None
        self.begun = self.ended = 0
        self._latest: list[int] = self._copy.tolist()

    def poll(self) -> list[int]:
        """The newest words that have reached the host, all of the same moment. Never waits.

        On a GPU each call starts a copy behind what is queued on the current stream, unless one is under way. It
        returns the words of the last copy that has ended. Call it between steps, from the thread that queues them.
        While that thread captures a graph nothing is copied. On a CPU the words are current.
        """
        if self._copied is None:
            self.begun = self.ended = self.begun + 1
            return self.read()
        if torch.cuda.is_current_stream_capturing():
            return self._latest
        if self.ended < self.begun and self._copied.query():
            self._latest, self.ended = self._copy.tolist(), self.begun
        if self.ended == self.begun:
            self._copy.copy_(self.words, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self.words.device))
            self.begun += 1
        return self._latest

    def read(self) -> list[int]:
        """The current words. Waits for the work that is queued on the current stream."""
        found: list[int] = self.words.tolist()
        return found


def snapshot(*words: torch.Tensor) -> Callable[[], None]:
    """Keep what these hold now; what this returns puts it back."""
    before = [each.clone() for each in words]

    def restore() -> None:
        for each, kept in zip(words, before, strict=True):
            each.copy_(kept)

    return restore
