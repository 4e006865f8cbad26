"""`deep_ep.utils.envs`: start-up of the processes of DeepEP's tests."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist

_state = {"seed": 0, "local_rank": 0}
"""What `init_dist` and `init_seed` were told."""


def init_seed(global_seed: int) -> None:
    """Make `global_seed` plus this rank the seed of torch and of `random`."""
    _state["seed"] = global_seed
    torch.manual_seed(get_local_seed())
    random.seed(get_local_seed())


def get_global_seed() -> int:
    """The seed that all ranks share."""
    return _state["seed"]


def get_local_seed() -> int:
    """The seed of this rank."""
    return _state["seed"] + dist.get_rank()


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print `s`, with `once_in_node` on the first rank of each host alone; then ranks meet."""
    if not once_in_node or _state["local_rank"] == 0:
        print(s, flush=True)
    dist.barrier()


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
    _state["local_rank"] = local_rank
    init_seed(seed)
    group = dist.new_group(list(range(ranks)))
    assert isinstance(group, dist.ProcessGroup)
    return rank, ranks, group


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """`(1, ranks)`: all ranks are one domain."""
    return 1, group.size()


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """`(1, ranks)`: all ranks are one domain."""
    return 1, group.size()
