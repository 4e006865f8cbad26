"""Ways of copying between GPUs that `link_bench` compares: the exchange was designed from them."""

from __future__ import annotations

from pathlib import Path

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.bound_kernel import launch
from moe_runtime.kernels.nvrtc import Defines

SOURCE = str(Path(__file__).with_suffix(".cu").resolve())
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
        SOURCE,
        "copy_way",
        defines(way, context.world_size),
        grid=(blocks, 1, 1),
        block=THREADS,
        arguments={
            "sources": sources,
            "targets": sources + context.half_bytes["landing"],
            "bytes": num_bytes,
            "rank": context.rank,
        },
        device=context.device,
    )
