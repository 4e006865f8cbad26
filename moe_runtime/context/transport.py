"""The memory between ranks: which device, which transport, and the heap over both."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_runtime.comm.heaps.collective import CollectiveHeap
from moe_runtime.comm.heaps.heap import SymmetricHeap
from moe_runtime.comm.heaps.nvshmem_heap import NvshmemHeap
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
from moe_runtime.comm.host_link import GlooLink, HostLink, NcclLink, PrivateLink
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.transport import AFTER_DEATH, SURVIVABLE, choose_transport
from moe_runtime.support.arguments import check_choice, check_device, check_kind


@dataclass(frozen=True)
class Transport:
    """What carries the tokens of a context.

    Attributes:
        name: one of `comm.transport.TRANSPORTS`.
        heap: the memory of all ranks; of the ranks of this host where there is a link.
        link: the way between hosts; None where all ranks share the heap.
        reasons: why not the others, by name.
    """

    name: str
    heap: SymmetricHeap
    link: HostLink | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def make_transport(group: RankGroup, device: torch.device, transport: str, engine: str, one_memory: bool) -> Transport:
    """The transport that the ranks choose. Collective.

    Args:
        engine: of this rank's exchange, `cuda` or `torch`.
        one_memory: whether a heap must have all ranks.

    Raises as `comm.transport.choose_transport`.
    """
    choice = choose_transport(group, device, transport, engine, one_memory=one_memory)
    if choice.name != "hierarchical":
        return Transport(choice.name, _heap(choice.name, group, device), None, choice.reasons)
    assert choice.hosts is not None
    local = group.of_ranks(choice.hosts.local_ranks, f"host {choice.hosts.host}")
    link: HostLink
    if device.type == "cuda":
        link = NcclLink(choice.hosts, group, device)
    else:
        link = GlooLink(choice.hosts, group)
    return Transport(choice.name, _heap(choice.local, local, device), link, choice.reasons)


def _heap(name: str, group: RankGroup, device: torch.device) -> SymmetricHeap:
    if name == "private":
        return PrivateHeap(device)
    if name == "shared":
        return SharedHeap(group)
    return NvshmemHeap(group, device) if name == "nvshmem" else CollectiveHeap(group, device)


def check_survivable(made: Transport, on_failure: str) -> None:
    """Raise `ValueError` where ranks are to go on after a death, and their memory cannot."""
    if on_failure == "continue" and made.name not in SURVIVABLE:
        raise ValueError(
            f"on_failure: expected 'abort' with transport={made.name!r}: after a death {AFTER_DEATH[made.name]}"
        )


def check_heap(
    heap: SymmetricHeap, group: object, device: torch.device | str | None, transport: str, link: PrivateLink | None
) -> None:
    """Raise `ValueError` where a ready-made heap does not fit the other arguments of a context."""
    check_kind("heap", heap, SymmetricHeap)
    if link is not None:
        check_kind("link", link, PrivateLink)
        ours, theirs = (heap.rank, heap.world_size), (link.hosts.local_rank, link.hosts.ranks_per_host)
        if ours != theirs:
            raise ValueError(
                f"link: expected the link of rank {ours[0]} of {ours[1]} on its host, as heap, got rank {theirs[0]} of "
                f"{theirs[1]}"
            )
    if group is not None:
        raise ValueError("group: expected None together with heap, which brings its own ranks")
    check_choice("transport", transport, ("auto", heap.name))
    if device is not None and _named_device(device) != heap.device:
        raise ValueError(f"device: expected the heap's, {heap.device}, got {device}")
    if heap.allocated or heap.closed:
        raise ValueError("heap: expected one that is not allocated yet, nor closed")


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device meant by `device`: with its index on a GPU; None is the current GPU, or the CPU where there is none.

    Raises `ValueError` for a device of another kind, and a GPU that does not exist.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = _named_device(device)
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


def _named_device(device: torch.device | str) -> torch.device:
    """`device` as tensors name it: `cpu:0` is `cpu`."""
    place = check_device("device", device, meta=False)
    return torch.device("cpu") if place.type == "cpu" else place
