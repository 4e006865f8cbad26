"""Rates that no kernel exceeds, with which floors count.

The constants were measured on one H200 (torch 2.11, CUDA 13.0): dense GEMMs of torch with 8192 x 8192 x 8192, and a
copy that reads and writes memory.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_TB_PER_S = 4.30
BF16_TFLOP_PER_S = 773.0
FP8_TFLOP_PER_S = 1437.0
MEASURED_GPU = "NVIDIA H200"

CEILINGS = {
    "memory_tb_per_s": MEMORY_TB_PER_S,
    "bf16_tflop_per_s": BF16_TFLOP_PER_S,
    "fp8_tflop_per_s": FP8_TFLOP_PER_S,
    "gpu": MEASURED_GPU,
}
"""What floors count with, for JSON; `gpu` is the one that it was measured on."""

FP8_PAIRS = (("fp8_block", "fp8_block"),)
"""Pairs that are multiplied at the rate of FP8; the others are dequantized to bf16."""


@dataclass(frozen=True)
class Ceilings:
    """What floors count with; None on a CPU.

    Attributes:
        memory_tb_per_s: what the clock and the width of the GPU's memory allow.
        bf16_tflop_per_s, fp8_tflop_per_s: of torch's dense GEMMs of 8192 x 8192 x 8192, timed in the same run.
    """

    memory_tb_per_s: float | None = None
    bf16_tflop_per_s: float | None = None
    fp8_tflop_per_s: float | None = None

    def floor_us(self, pair: tuple[str, str], moved_bytes: float, flops: float) -> tuple[float | None, str | None]:
        """The least time of a layer, and which of `memory` and `compute` bounds it."""
        rate = self.fp8_tflop_per_s if pair in FP8_PAIRS else self.bf16_tflop_per_s
        if rate is None or self.memory_tb_per_s is None:
            return None, None
        memory, compute = moved_bytes / self.memory_tb_per_s * 1e-6, flops / rate * 1e-6
        return (memory, "memory") if memory >= compute else (compute, "compute")
