"""How a new process finds the ranks whose dead member it is to replace."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from moe_runtime.comm.bootstrap import store_of_environment
from moe_runtime.comm.group_members import unwrapped
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.resilience.membership import published
from moe_runtime.support.arguments import check_integer, check_kind


def newcomers_group(rank: int | None, store: dist.Store | None, limit_s: float) -> tuple[RankGroup, dict[str, object]]:
    """The group of the ranks that were there at the start, for a process that takes the place of `rank`.

    Returns also what is equal on all ranks, by key. Arguments, and raises, as `ExpertParallelContext.rejoin`.
    """
    if rank is None:
        text = os.environ.get("RANK", "")
        if not text.isdecimal():
            raise ValueError(f"rank: expected a number, or RANK in the environment, got {text!r}")
        rank = int(text)
    check_integer("rank", rank, 0)
    if store is None:
        store = store_of_environment(rank, timedelta(seconds=limit_s), is_there=True)
    check_kind("store", store, dist.Store)
    store = unwrapped(store)
    found = published(store)
    if found is None:
        raise ValueError("store: expected one in which ranks with on_failure='continue' have met, found none")
    prefix, world_size, agreed = found
    check_integer("rank", rank, 0, world_size - 1)
    return RankGroup._of_newcomer(store, prefix, rank, world_size, limit_s), agreed
