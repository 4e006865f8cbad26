"""What a rank does in `test_two_nodes.py`: the steps of `test_distributed.py`, saved for the test to compare."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from tests.exchange.test_distributed import LAYERS, STEPS, step_inputs


def main(folder: Path, seed: int) -> None:
    init_from_env()
    with ExpertParallelContext(timeout_s=30) as context:
        layers = [MoELayer(config, context) for config in LAYERS]
        for layer in layers:
            layer.load_random(seed)
        results = []
        for step in range(STEPS):
            mine = step_inputs(seed, step, context.world_size)[context.rank]
            results.append([layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights) for layer in layers])
        torch.save((context.transport, context.transport_reasons, results), folder / f"rank{context.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
