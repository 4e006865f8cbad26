"""NVSHMEM as this process has it: joined once, with one set of ranks and one GPU, and kept until the process ends.

NVSHMEM's own collectives have no time limit and take all ranks that joined together. So it is joined only after a
bounded exchange over the group, and never left: leaving is collective, and would hang behind a rank that has died.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.comm.bootstrap import RankGroup

ENVIRONMENT = {
    # Every peer is mapped, so no network is needed, and looking for one fails where there is no RDMA.
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    # Only plain loads and stores are used: no multicast, which is also slow to set up.
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""What is set before NVSHMEM starts, unless the user has set it."""


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


# NVSHMEM's state belongs to the process, so what is known of it does too.
_joined: list[NvshmemWorld] = []


def joined() -> NvshmemWorld | None:
    """What this process has joined through `join`, if it has."""
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
        # It loads libraries of the driver and of CUDA, which fail in ways of their own.
        return f"nvshmem4py cannot be loaded: {type(error).__name__}: {error}"
    if joined() is None and importlib.import_module("nvshmem.bindings").init_status() > 1:
        return "other code of this process has initialised NVSHMEM, which can be done only once"
    return None


def version() -> str | None:
    """Version of the NVSHMEM library, None where it cannot be loaded."""
    try:
        return str(load_nvshmem().get_version().libnvshmem_version)
    except Exception:
        return None


def join(group: RankGroup, device: torch.device) -> NvshmemWorld:
    """Join the ranks of `group` in NVSHMEM, once per process; later calls return what is there. Collective.

    Whether the group is the one that was joined before is for `comm.transport.choose_transport` to find out, on all
    ranks alike. Raises `PeerTimeoutError` naming a rank that does not come, and what NVSHMEM raises.
    """
    core = load_nvshmem()
    if not _joined:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        uid = core.get_unique_id() if group.rank == 0 else None
        token = os.urandom(8).hex()
        uid, token = group.gather("NvshmemWorld.join", (uid, token))[0]
        from cuda.core import Device

        place = Device(device.index)
        place.set_current()
        core.init(device=place, uid=uid, rank=group.rank, nranks=group.world_size, initializer_method="uid")
        _joined.append(NvshmemWorld(token, group.rank, group.world_size, device.index))
    return _joined[0]
