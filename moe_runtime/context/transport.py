"""The memory between ranks: which device, which transport, and the heap over both."""

from __future__ import annotations

import torch

from moe_runtime.comm.arguments import check_choice, check_device, check_kind
from moe_runtime.comm.heaps.collective import CollectiveHeap
from moe_runtime.comm.heaps.heap import SymmetricHeap
from moe_runtime.comm.heaps.nvshmem_heap import NvshmemHeap
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.transport import choose_transport


def make_heap(group: RankGroup, device: torch.device, transport: str) -> tuple[SymmetricHeap, dict[str, str]]:
    """A heap on `device` over the transport that the ranks choose, and why they did not choose the others. Collective.

    Raises as `comm.transport.choose_transport`.
    """
    choice = choose_transport(group, device, transport)
    if choice.name == "private":
        return PrivateHeap(device), choice.reasons
    if choice.name == "shared":
        return SharedHeap(group), choice.reasons
    kind = NvshmemHeap if choice.name == "nvshmem" else CollectiveHeap
    return kind(group, device), choice.reasons


def check_heap(heap: SymmetricHeap, group: object, device: torch.device | str | None, transport: str) -> None:
    """Raise `ValueError` where a ready-made heap does not fit the other arguments of a context."""
    check_kind("heap", heap, SymmetricHeap)
    if group is not None:
        raise ValueError("group: expected None together with heap, which brings its own ranks")
    check_choice("transport", transport, ("auto", heap.name))
    if device is not None and _named_device(device) != heap.device:
        raise ValueError(f"device: expected that of heap, {heap.device}, got {device}")
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
