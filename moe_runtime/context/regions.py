"""The regions of a context's heap: each as large as the largest layer asks for."""

from __future__ import annotations

from moe_runtime.comm.heaps.heap import MAX_REGION_BYTES, REGION_ALIGNMENT, SymmetricHeap, align_region
from moe_runtime.comm.heaps.survivors import spare_region
from moe_runtime.comm.signals import SignalLayout
from moe_runtime.support.arguments import check_integer

HALVED_REGIONS = ("token_flags", "landing", "combine")
"""Regions of two halves, used in turn; `moe_runtime.context.memory` has them all."""


class Regions:
    """Sizes of the regions, the largest that any layer asks for.

    Attributes:
        half_bytes: bytes from one half of a region to the other, by region of `HALVED_REGIONS`.
        staging_bytes: bytes of region `staging`; 0 where no layer asks for it.
        spare_signals: how many more regions for signals there are (`comm.heaps.survivors`).
    """

    def __init__(self, layout: SignalLayout) -> None:
        self._signal_bytes = layout.num_bytes
        self.spare_signals = 0
        self.half_bytes = dict.fromkeys(HALVED_REGIONS, REGION_ALIGNMENT)
        self.staging_bytes = 0

    def check(self, half_bytes: dict[str, int], staging_bytes: int, *, allocated: bool) -> None:
        """Raise `ValueError`, as `ExpertParallelContext.register`, where regions cannot `grow` so."""
        asked = {**half_bytes, "staging_bytes": staging_bytes}
        for region, num_bytes in asked.items():
            if region not in (*HALVED_REGIONS, "staging_bytes"):
                raise ValueError(f"region: expected one of {HALVED_REGIONS}, got {region!r}")
            check_integer(region, num_bytes, 0, MAX_REGION_BYTES // 2)
            there = self.half_bytes.get(region, self.staging_bytes)
            if allocated and num_bytes > there:
                raise ValueError(
                    f"{region}: {num_bytes} bytes needed, but the context is allocated with {there}; "
                    "create all layers before the first step, or register the largest one first"
                )

    def grow(self, half_bytes: dict[str, int], staging_bytes: int) -> None:
        """Make every region at least as large as asked, which `check` has passed."""
        self.staging_bytes = max(self.staging_bytes, align_region(staging_bytes))
        for region, num_bytes in half_bytes.items():
            self.half_bytes[region] = max(self.half_bytes[region], align_region(num_bytes))

    @property
    def sizes(self) -> dict[str, int]:
        """What ranks must reserve alike, by region."""
        return {**self.half_bytes, "staging": self.staging_bytes}

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole heap of a rank."""
        signals = (1 + self.spare_signals) * align_region(self._signal_bytes)
        return 2 * sum(self.half_bytes.values()) + signals + self.staging_bytes

    def reserve(self, heap: SymmetricHeap) -> None:
        """Reserve every region in a heap that is not allocated yet."""
        heap.reserve("signals", self._signal_bytes)
        for region, num_bytes in self.half_bytes.items():
            # The first half is for even epochs. Its flags start odd, so that no token is taken for written when the
            # epoch is 0 again after 2^32 dispatches.
            heap.reserve(region, 2 * num_bytes, ones=num_bytes if region == "token_flags" else 0)
        for generation in range(1, 1 + self.spare_signals):
            heap.reserve(spare_region(generation), self._signal_bytes)
        if self.staging_bytes:
            heap.reserve("staging", self.staging_bytes)
