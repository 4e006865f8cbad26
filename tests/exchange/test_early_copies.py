"""What torch writes for a kernel that does not await it is written before the launch that this kernel does await."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher import gradients
from moe_runtime.dispatcher.gradients import DifferentiableDispatcher
from moe_runtime.kernels.bound_kernel import BoundKernel
from moe_runtime.kernels.exchange import cuda, geometry, plan
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import HOPPER, Ranks, pretend_sms

pytestmark = pytest.mark.cpu_only

CPU, HIDDEN = torch.device("cpu"), 128
IDS, ONES = torch.tensor([[0, 3]] * 4), torch.ones(4, 2)
WRITES = ("to", "clone", "copy_")


class _Writes(TorchFunctionMode):
    """Notes what copies and converts."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(function, "__name__", "")) in WRITES:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[str]]:
    """The launches and the writes of torch in a call, in their order; early launches have a star."""
    seen: list[str] = []

    def launch(kernel: BoundKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int] | None = None) -> None:
        kernel.fill(arguments, grid)
        seen.append("_".join(kernel.name.split("_")[-2:]) + "*" * kernel.early)

    monkeypatch.setattr(BoundKernel, "launch", launch)
    pretend_sms(monkeypatch, 5)

    def of(call: Callable[[], object]) -> list[str]:
        seen.clear()
        with _Writes(seen):
            call()
        return list(seen)

    return of


@pytest.fixture
def dispatched() -> tuple[gradients.DispatchedRows, DifferentiableDispatcher]:
    """What a dispatch of one of two ranks gave, of which nothing has run."""
    contexts = [
        ExpertParallelContext(heap=heap, timeout_s=5, startup_timeout_s=6) for heap in PrivateHeap.group(2, CPU)
    ]
    sizes = {"hidden_size": HIDDEN, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 4}
    made = [DifferentiableDispatcher(context, **sizes) for context in contexts]
    for one in made:
        for dispatcher in (one._dispatcher, one._dispatcher._routing_only, one._entries):
            assert dispatcher is not None
            dispatcher._use(cuda)
    for context in contexts:
        context.allocate()
    own = made[0]
    return gradients.DispatchedRows((own._dispatcher, own._entries), IDS), own


def test_values_of_rows_are_converted_before_their_routing_is_sent(launches: Any, dispatched: Any) -> None:
    rows, own = dispatched
    x = torch.zeros(4, HIDDEN, dtype=torch.bfloat16)
    launches(lambda: setattr(rows, "_handle", own._dispatcher.dispatch_send(x, IDS, ONES)))
    rows._handle.positions.fill_(-1)
    found = launches(lambda: rows.entries_of(torch.ones(16)))
    routing = found.index("dispatch_send*")
    assert "to" in found[:routing] and not {*WRITES} & {*found[routing : found.index("combine_send*")]}, found


@pytest.mark.parametrize("is_aligned", [False, True])
def test_rows_that_are_copied_are_awaited(is_aligned: bool, launches: Any, dispatched: Any) -> None:
    rows, own = dispatched
    x, capacity = torch.zeros(4, HIDDEN, dtype=torch.bfloat16), own._dispatcher.geometry.row_capacity
    launches(lambda: setattr(rows, "_handle", own._dispatcher.dispatch_send(x, IDS, ONES)))
    launches(lambda: own._dispatcher.dispatch_recv(rows._handle))
    rows._handle.positions.fill_(-1)
    output = torch.zeros(capacity, HIDDEN + (0 if is_aligned else 4), dtype=torch.bfloat16)[:, :HIDDEN]
    found = launches(lambda: own._dispatcher.combine(output, rows._handle, topk_weights=ONES))
    behind = found[found.index("dispatch_send*") :]
    assert ("clone" in behind) is not is_aligned, found
    assert ("combine_send*" if is_aligned else "combine_send") in behind, found


def test_tokens_are_copied_before_own_rows_are_placed(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "OWN_ROWS_TOKENS", 1)
    monkeypatch.setattr(plan, "SMALL_CHUNK_BYTES", 0)
    monkeypatch.setattr(plan, "CHUNK", 32)
    forget_plans()
    try:
        sizes = {"hidden_size": HIDDEN, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 64}
        own = Ranks(2, CPU, HOPPER, **sizes, token_format="fp8_block", mode="contiguous").dispatchers[0]
        x = torch.zeros(64, HIDDEN + 2, dtype=torch.bfloat16)[:, 1 : HIDDEN + 1]
        found = launches(lambda: own.dispatch_send(x, torch.tensor([[0, 1]] * 64), torch.ones(64, 2)))
    finally:
        forget_plans()
    assert found.index("clone") < found.index("own_rows*") < found.index("dispatch_send*"), found
