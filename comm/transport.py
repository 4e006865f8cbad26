"""Which transport ranks use: the first of `TRANSPORTS` that all of them can, and why they cannot use the others."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from moe_runtime.comm.bootstrap import host_identity
from moe_runtime.comm.heaps import nvshmem_world
from moe_runtime.comm.heaps.collective import nccl_of
from moe_runtime.comm.hosts import Hosts, find_hosts
from moe_runtime.comm.messages import integer, optional, row, scalar, text
from moe_runtime.comm.rank_group import RankGroup, describe_ranks
from moe_runtime.support.arguments import check_choice

TRANSPORTS = ("nvshmem", "shared", "private", "hierarchical", "collective")

SURVIVABLE = ("nvshmem", "shared", "private")
"""Transports with which ranks can go on after a death."""

RESTART = "restart all ranks, with weights from host memory where checkpoint: {keep_in_host_memory: true} kept them"

AFTER_DEATH = {
    "shared": "the others can go on (on_failure: continue): they make new memory among themselves. A new process can "
    "take the place of a rank that is out, and gets its experts from the others; ranks can leave in order",
    "private": "there are no others",
    "nvshmem": "the others can go on (on_failure: continue) with the memory that they have, and kill a rank that is "
    "out; no process can take its place, no rank can leave in order, and graphs must be captured again. To have all "
    "again: " + RESTART,
    "hierarchical": "the others end (on_failure: abort): NCCL and gloo cannot leave a rank out; " + RESTART,
    "collective": "the others end (on_failure: abort): the process group cannot leave a rank out; " + RESTART,
}
"""What is possible when a rank has died, by transport."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransportChoice:
    """The transport of a context.

    Attributes:
        name: one of `TRANSPORTS`.
        reasons: why not, for each transport that comes before it or cannot be used.
        hosts: the ranks of each host, for `hierarchical`.
        local: the transport inside a host, for `hierarchical`.
    """

    name: str
    reasons: dict[str, str]
    hosts: Hosts | None = None
    local: str = ""


def choose_transport(
    group: RankGroup, device: torch.device, requested: str = "auto", engine: str = "auto", *, one_memory: bool = False
) -> TransportChoice:
    """The first of `TRANSPORTS` that can be used, or the `requested` one. Collective.

    `engine` is that of this rank's exchange, `cuda` or `torch`: GPUs need `cuda` for `hierarchical`. With `one_memory`
    a heap must have all ranks, as padded rows need it.

    Raises `ValueError` with the reason if the requested one cannot be used, and on every rank if ranks ask for
    different transports or kinds of device.
    """
    check_choice("transport", requested, ("auto", *TRANSPORTS))
    mine = [requested, device.type, host_identity(), engine, one_memory]
    answers = group.gather("choose_transport", mine, row(text, text, text, text, scalar))
    for index, name in ((0, "transport"), (1, "device"), (4, "one_memory")):
        values = [answer[index] for answer in answers]
        if len(set(values)) > 1:
            raise ValueError(f"{name}: ranks disagree, {describe_ranks(values)}")
    identities = [answer[2] for answer in answers]
    hosts = set(identities)
    unusable: dict[str, str] = {}
    if device.type != "cuda":
        unusable["nvshmem"] = f"needs GPUs, the device is {device.type}"
    elif problem := _nvshmem_problem(group, device, len(hosts)):
        unusable["nvshmem"] = problem
    if device.type != "cpu":
        unusable["shared"] = f"shares CPU memory only, the device is {device.type}"
    elif len(hosts) > 1:
        unusable["shared"] = f"the ranks are on {len(hosts)} hosts (or containers)"
    if group.world_size > 1:
        unusable["private"] = f"one rank only, the group has {group.world_size}"
    found = find_hosts(identities, group.rank)
    local, problem = _local_transport(group, device, found, [answer[3] for answer in answers])
    if problem is None and one_memory:
        problem = "padded rows (one_memory) need memory of all ranks"
    if problem is not None:
        unusable["hierarchical"] = problem
    chosen_hosts = found if isinstance(found, Hosts) else None
    if group.group is None:
        unusable["collective"] = "torch.distributed is not initialised"
    if requested != "auto":
        if requested in unusable:
            raise ValueError(f"transport: {requested} cannot be used: {unusable[requested]}")
        return TransportChoice(requested, unusable, chosen_hosts, local)
    # A single rank has no peers: private memory does the same without a file.
    order = ("private", "collective") if group.world_size == 1 else TRANSPORTS
    name = next(name for name in order if name not in unusable)
    if name == "collective" and device.type == "cuda" and group.rank == 0:
        why = "; ".join(unusable[name] for name in ("nvshmem", "hierarchical"))
        _LOG.warning("transport: GPUs exchange by `collective`, which waits for the host: %s", why)
    if name == "private":
        unusable.setdefault("shared", "one rank has nobody to share memory with")
        unusable.setdefault("nvshmem", "one rank has no peers")
    return TransportChoice(name, unusable, chosen_hosts, local)


MOST_HOSTS = 32
"""Most hosts that kernels take."""


def _local_transport(
    group: RankGroup, device: torch.device, hosts: Hosts | str, engines: list[str]
) -> tuple[str, str | None]:
    """The transport inside a host under `hierarchical`, and why that cannot be used. Collective."""
    if isinstance(hosts, str):
        return "", hosts
    if hosts.num_hosts == 1:
        return "", "the ranks are on one host"
    if hosts.num_hosts > MOST_HOSTS:
        return "", f"at most {MOST_HOSTS} hosts, the ranks are on {hosts.num_hosts}"
    if group.group is None:
        return "", "torch.distributed is not initialised"
    if device.type == "cuda" and nccl_of(group.group, device) is None:
        return "", "GPUs of several hosts need a group with NCCL"
    for rank, engine in enumerate(engines):
        if device.type == "cuda" and engine != "cuda":
            return "", f"needs an exchange in CUDA C++ on GPUs, that of rank {rank} is in {engine}"
    if hosts.ranks_per_host == 1:
        return "private", None
    if device.type != "cuda":
        return "shared", None
    local = group.of_ranks(hosts.local_ranks, f"choose_transport {hosts.host}")
    problems = group.gather("choose_transport: hosts", _nvshmem_problem(local, device, 1), optional(text))
    for rank, problem in enumerate(problems):
        if problem is not None:
            return "", f"the host of rank {rank}: {problem}"
    return "nvshmem", None


@dataclass(frozen=True)
class _Gpu:
    """A rank's GPU: why it cannot use NVSHMEM, which GPU it is, and which ranks the process joined before."""

    problem: str | None
    uuid: str
    world: nvshmem_world.NvshmemWorld | None

    def to_message(self) -> list[object]:
        world = self.world
        joined = None if world is None else [world.token, world.rank, world.num_ranks, world.device_index]
        return [self.problem, self.uuid, joined]

    @classmethod
    def from_message(cls, message: object) -> _Gpu:
        joined = row(text, integer(0), integer(1), integer(0))
        problem, uuid, world = row(optional(text), text, optional(joined))(message)
        return cls(problem, uuid, None if world is None else nvshmem_world.NvshmemWorld(*world))


def _nvshmem_problem(group: RankGroup, device: torch.device, num_hosts: int) -> str | None:
    """Why these ranks cannot share GPU memory through NVSHMEM, equal on every rank; None if they can. Collective."""
    gpus = group.gather("choose_transport: GPUs", _gpu_of(device).to_message(), _Gpu.from_message)
    unreachable = _unreachable(device, [gpu.uuid for gpu in gpus])
    hidden = group.gather("choose_transport: peer access", unreachable, optional(integer(0, group.world_size - 1)))
    for rank, gpu in enumerate(gpus):
        if gpu.problem:
            return gpu.problem if group.world_size == 1 else f"rank {rank}: {gpu.problem}"
    if num_hosts > 1:
        return f"the ranks are on {num_hosts} hosts (or containers), whose GPUs are not mapped to each other"
    for rank, gpu in enumerate(gpus):
        first = next(peer for peer, other in enumerate(gpus) if other.uuid == gpu.uuid)
        if first != rank:
            return f"ranks {first} and {rank} share a GPU, each rank needs its own"
    for rank, peer in enumerate(hidden):
        if peer is not None:
            return f"the GPU of rank {rank} cannot access that of rank {peer} (no peer access)"
    worlds = [gpu.world for gpu in gpus]
    if any(worlds):
        tokens = {world.token if world else "" for world in worlds}
        ranks = [world.rank if world else -1 for world in worlds]
        sizes = {world.num_ranks if world else -1 for world in worlds}
        if len(tokens) > 1 or ranks != list(range(group.world_size)) or sizes != {group.world_size}:
            return (
                "a rank has joined other ranks in NVSHMEM before, which a process can do once only; "
                "give all contexts of a process the same group, or transport='collective'"
            )
    return None


def _gpu_of(device: torch.device) -> _Gpu:
    if not torch.cuda.is_available():
        return _Gpu("no GPU can be seen", "", None)
    index = torch.cuda.current_device() if device.index is None else device.index
    problem, world = nvshmem_world.problem(), nvshmem_world.joined()
    if problem is None and world is not None and world.device_index != index:
        problem = f"NVSHMEM of this process is on cuda:{world.device_index}, the context on cuda:{index}"
    return _Gpu(problem, str(torch.cuda.get_device_properties(index).uuid), world)


def _unreachable(device: torch.device, uuids: list[str]) -> int | None:
    """First rank whose GPU this rank sees but cannot access. Mapping checks GPUs that it does not see."""
    if not torch.cuda.is_available():
        return None
    mine = torch.cuda.current_device() if device.index is None else device.index
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for rank, uuid in enumerate(uuids):
        index = visible.get(uuid, mine)
        if index != mine and not torch.cuda.can_device_access_peer(mine, index):
            return rank
    return None
