"""NVSHMEM in this process: joined once, with one set of ranks and one GPU, until the process ends.

NVSHMEM's own collectives have no time limit and need all ranks that joined. So a process joins only after an exchange
with a time limit over the group, and never leaves: leaving is collective and would hang if a rank has died.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.comm.messages import hexadecimal, row
from moe_runtime.comm.rank_group import RankGroup

ENVIRONMENT = {
    # Every peer is mapped, so no network is needed, and looking for one fails without RDMA.
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    # Only plain loads and stores are used: no multicast, which is also slow to set up.
    "NVSHMEM_DISABLE_NVLS": "1",
    # Its proxy thread spins on a core of its own. It serves networks, and exits and timeouts of NVSHMEM's own device
    # functions, which no kernel here calls.
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",
}
"""Environment variables set before NVSHMEM starts, unless the user has set them."""


UNIQUE_ID_BYTES = 128
"""Bytes of `nvshmemx_uniqueid_t`, by which ranks find each other."""

TOKEN_BYTES = 8


@dataclass(frozen=True)
class NvshmemWorld:
    """The ranks that this process has joined.

    Attributes:
        token: equal on those ranks, and on no others.
        rank, num_ranks: this process among them (NVSHMEM's PE).
        device_index: its GPU.
    """

    token: str
    rank: int
    num_ranks: int
    device_index: int


# NVSHMEM's state belongs to the process, so this one does too.
_joined: list[NvshmemWorld] = []


def joined() -> NvshmemWorld | None:
    """What this process joined through `join`; None if it has not."""
    return _joined[0] if _joined else None


def load_nvshmem() -> Any:
    """The module `nvshmem.core`. Raises `ImportError` or whatever its import raises."""
    return importlib.import_module("nvshmem.core")


def problem() -> str | None:
    """Why NVSHMEM cannot be used in this process, None if it can."""
    try:
        core = load_nvshmem()
        core.get_version()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("nvshmem", "cuda"):
            return "nvshmem4py is not installed: pip install 'moe_runtime[gpu]'"
        return f"nvshmem4py cannot be imported: {error}"
    except Exception as error:
        # It loads libraries of the driver and of CUDA, which may raise anything.
        return f"nvshmem4py cannot be loaded: {type(error).__name__}: {error}"
    if joined() is None and importlib.import_module("nvshmem.bindings").init_status() > 1:
        return "other code of this process has initialised NVSHMEM, which can be done only once"
    return None


def version() -> str | None:
    """Version of the NVSHMEM library; None if it cannot be loaded."""
    try:
        return str(load_nvshmem().get_version().libnvshmem_version)
    except Exception:
        return None


def join(group: RankGroup, device: torch.device) -> NvshmemWorld:
    """Join the ranks of `group` in NVSHMEM, once per process; later calls return the same. Collective.

    `comm.transport.choose_transport` checks, equally on all ranks, that a later group has the same ranks. Raises
    `PeerTimeoutError` naming a rank that does not come, and what NVSHMEM raises.
    """
    core = load_nvshmem()
    if not _joined:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        uid = core.get_unique_id(empty=group.rank != 0)
        mine = [ctypes.string_at(uid.ptr, UNIQUE_ID_BYTES).hex(), os.urandom(TOKEN_BYTES).hex()]
        read = row(hexadecimal(UNIQUE_ID_BYTES), hexadecimal(TOKEN_BYTES))
        unique_id, token = group.gather("NvshmemWorld.join", mine, read)[0]
        ctypes.memmove(uid.ptr, unique_id, UNIQUE_ID_BYTES)
        from cuda.core import Device

        place = Device(device.index)
        place.set_current()
        core.init(device=place, uid=uid, rank=group.rank, nranks=group.world_size, initializer_method="uid")
        _joined.append(NvshmemWorld(token.hex(), group.rank, group.world_size, device.index))
    return _joined[0]
