"""How a process finds its ranks, its device, and the memory that it shares with others of its host."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.errors import Phase, StoreLostError, reason_of
from moe_runtime.comm.group_members import MAX_SECONDS
from moe_runtime.comm.rank_group import CONNECTED_S, RankGroup
from moe_runtime.comm.store_calls import StoreCalls, StoreSilentError, calls_of
from moe_runtime.support.arguments import check_choice, check_integer, check_seconds


def shared_memory_directory() -> str:
    """The directory for files of shared memory: `/dev/shm`, or else the temporary directory."""
    path = "/dev/shm"
    return path if os.path.isdir(path) and os.access(path, os.W_OK) else tempfile.gettempdir()


def host_identity() -> str:
    """Host, boot and mount of the shared memory: equal only for processes that can map each other's files there.

    Files are what ranks fall back to where memory without a name cannot be shared. It includes the environment variable
    `MOE_RUNTIME_HOST`. Set different values for processes of one host that cannot share memory although the rest is
    equal.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    named = os.environ.get("MOE_RUNTIME_HOST", "")
    return f"{socket.gethostname()}/{named}/{boot}/{os.stat(shared_memory_directory()).st_dev}"


def init_from_env(device: str | None = None, *, timeout_s: float = 120.0) -> torch.device:
    """Initialise torch.distributed from the variables that torchrun sets, and return this rank's device.

    Without them nothing is initialised (a single process). `device` is `cpu`, `cuda` or None (GPUs if there are
    any). On GPUs the backend is `cpu:gloo,cuda:nccl`, and `cuda:LOCAL_RANK` becomes the current device; without that
    variable the current device stays. Each wait for other ranks ends after `timeout_s`. Collectives time out after
    that, on GPUs after twice that.

    Raises:
        ValueError: `device` is unknown, the local rank has no GPU, `timeout_s` is no number of seconds, or a variable
            is wrong.
        PeerTimeoutError: naming the ranks that did not come.
        PeerAbortedError: naming a rank that gave up.
        StoreLostError: the store of `MASTER_ADDR` and `MASTER_PORT` cannot be reached or hosted, or is gone.
    """
    limit = timedelta(seconds=check_seconds("timeout_s", timeout_s, MAX_SECONDS))
    check_choice("device", device, ("cpu", "cuda", None))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    current = torch.cuda.current_device() if kind == "cuda" and torch.cuda.is_available() else 0
    local_rank = _number_of_environment("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else current
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise ValueError(f"device: local rank {local_rank} has no GPU, this host has {torch.cuda.device_count()}")
    place = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        _join_started_ranks(place, limit)
    return place


def _join_started_ranks(place: torch.device, limit: timedelta) -> None:
    """`init_process_group` of the ranks that a launcher started, which names those that do not come."""
    world_size = _number_of_environment("WORLD_SIZE", 1)
    rank = _number_of_environment("RANK", 0, world_size - 1)
    store = store_of_environment(rank, limit)
    start = RankGroup._at_start(store, rank, world_size, limit.total_seconds())
    # The agent's store outlives a group that is destroyed, with the addresses that its ranks had.
    ours = dist.PrefixStore(f"{start._prefix}/default_pg", store)
    group: dict[str, Any] = {"store": ours, "rank": rank, "world_size": world_size}
    try:
        start.barrier("init_from_env")
        with start.connecting("init_from_env", "connect"):
            if place.type == "cuda":
                # NCCL ends the process at its own limit, so the limits of a context must come first.
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=2 * limit, device_id=place, **group)
            else:
                # Gloo tries again and again to reach a peer that is gone, each time for as long as it is told.
                calls_of(group["store"]).run(
                    lambda: dist.init_process_group("gloo", timeout=limit, **group),
                    limit.total_seconds(),
                    answer_s=CONNECTED_S,
                )
    except BaseException as error:
        start.leave(reason_of(error), error)
        # Ending NCCL's group may wait for the ranks that are gone.
        if place.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()
        raise


def store_of_environment(rank: int, limit: timedelta, *, is_there: bool = False) -> dist.Store:
    """The store at `MASTER_ADDR` and `MASTER_PORT`. Rank 0 hosts it, unless torchrun's agent does or it `is_there`."""
    address, port = os.environ.get("MASTER_ADDR", ""), _number_of_environment("MASTER_PORT", 0, 65535)
    if not address:
        raise ValueError("MASTER_ADDR: expected the address of rank 0 in the environment, got none")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not by_agent and not is_there:
        try:
            # Not `wait_for_workers`, which does not say who is missing.
            return dist.TCPStore(
                address, port, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True
            )
        except RuntimeError as error:
            message = f"init_from_env: rank 0 cannot host the store at {address}:{port}: {error}"
            raise StoreLostError(message, 0, Phase.START_UP) from error
    deadline = time.monotonic() + limit.total_seconds()
    # On a thread: a client waits without end where a connection is taken and nothing is answered.
    calls = StoreCalls()
    try:
        while True:
            try:
                # A client tries twice, with a pause between, and takes up to three times as long as it is told.
                store = calls.run(
                    lambda: dist.TCPStore(address, port, is_master=False, timeout=limit / 6, wait_for_workers=False),
                    max(deadline - time.monotonic(), 0.0),
                    answer_s=CONNECTED_S,
                )
                break
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    name = "torchrun's agent" if by_agent else "rank 0"
                    silent = isinstance(error, StoreSilentError)
                    state = "may be stopped, or another program has the port" if silent else "is not there"
                    message = (
                        f"init_from_env: rank {rank} cannot reach the store at {address}:{port} within "
                        f"{limit.total_seconds():g} s, {name}, which hosts it, {state}: {error}"
                    )
                    raise StoreLostError(message, -1 if by_agent else 0, Phase.START_UP) from error
    finally:
        calls.end()
    store.set_timeout(limit)
    if not by_agent:
        return store
    # The agent's store may outlive ranks that it starts again.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _number_of_environment(name: str, low: int, high: int | None = None) -> int:
    value = os.environ.get(name, "")
    return check_integer(f"{name} of the environment", int(value) if value.isdecimal() else value, low, high)
