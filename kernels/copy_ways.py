"""Ways of moving bytes between GPUs, for `launch.link_bench` to compare: what the exchange was designed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_runtime.kernels.nvrtc import Defines, int64, launch
from moe_runtime.kernels.runtime import CudaCase

if TYPE_CHECKING:
    from moe_runtime.context import ExpertParallelContext

WAYS = ("store", "bulk", "load")
"""16-byte stores to the peer, copies of shared memory by the copy engine, 16-byte loads from the peer."""
PIECE, THREADS = 4096, 256
"""Bytes that a thread block copies at a time, and its threads."""


def defines(way: str, world_size: int) -> Defines:
    """Macros of `copy_ways.cu`."""
    return Defines({"WAY": WAYS.index(way), "WORLD": world_size, "PIECE": PIECE, "THREADS": THREADS})


def copy(context: ExpertParallelContext, way: str, blocks: int, num_bytes: int) -> None:
    """Copy `num_bytes`, whole pieces, from the first half of each rank's `landing` to the second half on each other."""
    sources = context.landing_pointers
    launch(
        "copy_ways.cu",
        "copy_way",
        defines(way, context.world_size),
        grid=(blocks, 1, 1),
        block=THREADS,
        arguments=[sources, sources + context.half_bytes["landing"], int64(num_bytes), context.rank],
        device=context.device,
    )


AOT_CASES = tuple(CudaCase("copy_way", "any", "copy_ways.cu", "copy_way", defines(way, 8)) for way in WAYS)
