"""Times each way of copying between GPUs: `torchrun --nproc-per-node=N -m moe_runtime.launch.research.link_bench`.

Every rank copies the same number of bytes to (or loads them from) every peer at once, by 16-byte stores, by copies of
shared memory by the copy engine, and by 16-byte loads, from few blocks to many. Needs GPUs of one host with NVSHMEM and
NVRTC. Each way is checked before it is timed.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import torch

from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.benchmarks.show import show
from moe_runtime.launch.benchmarks.timing import measure_steps, times_record
from moe_runtime.launch.common import environment
from moe_runtime.launch.report.runs import LINKS
from moe_runtime.launch.research.copy_ways import PIECE, THREADS, WAYS, copy

MEGABYTES = (0.05, 0.25, 1.0, 4.0, 16.0, 40.0)
BLOCKS = (8, 16, 32, 64, 132, 528)


def piece_bytes(megabytes: float) -> int:
    """Whole pieces, about so many MB."""
    return max(1, round(megabytes * 1e6 / PIECE)) * PIECE


def check(context: ExpertParallelContext, way: str, blocks: int, num_bytes: int) -> None:
    """Raise `RuntimeError` unless every byte that is to come here does, and no other."""
    landing, half = context.heap.tensor("landing"), context.half_bytes["landing"]
    arrived = landing[half:]
    arrived.fill_(0xCD)
    torch.cuda.synchronize()
    context.heap.barrier()
    copy(context, way, blocks, num_bytes)
    torch.cuda.synchronize()
    context.heap.barrier()
    for peer in range(context.world_size):
        source = context.heap.peer_tensor("landing", peer)[context.rank * num_bytes :][:num_bytes]
        found = arrived[peer * num_bytes :][:num_bytes]
        want = torch.full_like(source, 0xCD) if peer == context.rank else source
        if not torch.equal(found, want):
            raise RuntimeError(f"{way}, {blocks} blocks, {num_bytes} bytes: what came from rank {peer} is wrong")
    context.heap.barrier()


def work(options: argparse.Namespace) -> int:
    """Check, time, print and write."""
    environment.check_at_least(1, blocks=min(options.blocks), steps=options.steps)
    for megabytes in options.megabytes:
        if not 0 < megabytes < math.inf:
            raise ValueError(f"--megabytes: expected positive numbers, got {megabytes:g}")
    environment.check_folder("--json", options.json)
    device = init_from_env(timeout_s=120.0)
    if device.type != "cuda":
        raise ValueError("device: expected GPUs, got none")
    with ExpertParallelContext(device=device, transport="nvshmem") as context:
        if context.world_size < 2:
            raise ValueError("ranks: expected at least 2, got 1")
        sizes = [piece_bytes(m) for m in options.megabytes]
        context.register(landing=context.world_size * max(sizes))
        context.allocate()
        context.heap.tensor("landing").random_(256, generator=torch.Generator(device).manual_seed(context.rank))
        results: list[dict[str, Any]] = []
        for num_bytes in sizes:
            for way in WAYS:
                for blocks in options.blocks:
                    check(context, way, blocks, num_bytes)

                    def step(_: int, way: str = way, blocks: int = blocks, size: int = num_bytes) -> None:
                        copy(context, way, blocks, size)

                    steps = 20 if num_bytes < 1 << 22 else 4
                    timing = measure_steps(context, step, iterations=options.steps, steps=steps)
                    moved = (context.world_size - 1) * num_bytes
                    results.append(
                        {
                            "way": way,
                            "bytes_per_peer": num_bytes,
                            "blocks": blocks,
                            **times_record(timing),
                            "gb_per_s": moved / timing.median_us / 1e3,
                        }
                    )
        record = environment.environment_record(context)
        report = {"kind": LINKS, "environment": record, "piece_bytes": PIECE, "threads": THREADS, "results": results}
        show(report, environment.console_of(context))
        if options.json is not None and context.rank == 0:
            environment.write_json(options.json, report)
        environment.barrier(context, "end")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.research.link_bench", description="Time copies."
    )
    parser.add_argument("--megabytes", type=float, nargs="+", default=MEGABYTES, metavar="MB", help="per peer")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, metavar="N", help="thread blocks")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed iterations (default: 10)")
    environment.add_json_option(parser)
    return environment.run_parsed("link_bench", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
