"""`deep_ep.utils.envs`: start-up of the processes of DeepEP's tests."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Join the process group as rank `RANK * num_local_ranks + local_rank` and return `(rank, ranks, group)`.

    `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` and `RANK` count hosts, as in DeepEP's launches. On GPUs the backend is
    NCCL, bf16 and this rank's GPU become torch's defaults; on CPUs it is gloo. The random seed is `seed + rank`.
    """
    hosts, host = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    rank, ranks = host * num_local_ranks + local_rank, hosts * num_local_ranks
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=ranks,
        rank=rank,
        device_id=torch.device("cuda", local_rank) if on_gpu else None,
    )
    if on_gpu:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("cuda")
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    group = dist.new_group(list(range(ranks)))
    assert isinstance(group, dist.ProcessGroup)
    return rank, ranks, group
