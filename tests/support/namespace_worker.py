"""What a rank does in `test_namespaces.py`: steps between two hosts, and how many bytes its host sent for them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from moe_runtime.layer import MoELayer
from tests.support.exchange_data import rank_input

CONFIG = MoELayerConfig(
    hidden_size=1024,
    intermediate_size=64,
    num_experts=8,
    top_k=4,
    max_tokens_per_rank=96,
    token_format="bf16",
    weight_format="bf16",
)
STEPS = 12


def sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def main(folder: Path, seed: int, interface: str) -> None:
    init_from_env()
    with ExpertParallelContext(timeout_s=30) as context:
        layer = MoELayer(CONFIG, context)
        layer.load_random(seed)
        mine = [
            rank_input(seed + step, context.rank, CONFIG.max_tokens_per_rank - step, 1024, 8, 4)
            for step in range(STEPS)
        ]
        layer(mine[0].x, topk_idx=mine[0].topk_idx, topk_weights=mine[0].topk_weights)
        dist.barrier()
        before, start = sent_bytes(interface), time.monotonic()
        ys = [layer(i.x, topk_idx=i.topk_idx, topk_weights=i.topk_weights) for i in mine]
        dist.barrier()
        spent, sent = time.monotonic() - start, sent_bytes(interface) - before
        assert context.hosts is not None
        geometry = HostGeometry(context.hosts, layer.dispatcher.geometry)
        torch.save(ys, folder / f"rank{context.rank}.pt")
        found = {
            "transport": context.transport,
            "sent": sent,
            "seconds": spent,
            "of_a_step": geometry.dispatch_chunk + geometry.combine_chunk,
        }
        (folder / f"rank{context.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
