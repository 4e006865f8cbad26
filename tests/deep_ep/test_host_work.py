"""What a call of normal mode launches, and what it costs the host: with launches that do nothing, on a CPU.

Every kernel of ours is launched by `BoundKernel`; what torch launches is an operation that is neither an allocation nor
a view. Python calls are counted, since times differ from machine to machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.deep_ep import Buffer, ElasticBuffer, direct, normal
from moe_runtime.deep_ep import buffer as buffer_module
from moe_runtime.deep_ep.sizes import normal_bytes
from moe_runtime.kernels.bound_kernel import BoundKernel
from moe_runtime.kernels.exchange import row_sums, rows

HIDDEN, TOKENS, TOP_K, EXPERTS = 256, 64, 8, 32
NOT_LAUNCHED = {
    "empty",
    "empty_like",
    "view",
    "as_strided",
    "split_with_sizes",
    "detach",
    "slice",
    "unbind",
    "record_stream",
    "resize_",
}
"""Operations of torch that allocate, or that look at memory in another way. `resize_` makes tensors smaller."""

COUNTS, SEND, RECEIVE = "dispatch_counts", "dispatch_send_rows", "dispatch_recv_rows"
SUMS = ["combine_send_rows", "combine_recv_rows"]
EXPECTED: dict[str, tuple[list[str], list[str], int]] = {
    "get_dispatch_layout": (["dispatch_layout"], [], 20),
    "dispatch": ([COUNTS, SEND, RECEIVE], [], 77),  # of which 20 or so while rows are copied
    "dispatch, num_worst_tokens": ([COUNTS, SEND, RECEIVE], [], 71),
    "dispatch, cached": ([SEND, RECEIVE], [], 52),
    "combine": (SUMS, [], 34),
    "combine with weights and two biases": (SUMS, [], 43),
    "elastic dispatch": ([COUNTS, SEND, RECEIVE], [], 90),
    # Callers may change their ids, unless they say that they do not.
    "elastic dispatch, do_handle_copy=True": ([COUNTS, SEND, RECEIVE], ["clone"], 91),
    "elastic dispatch, do_cpu_sync=False": ([COUNTS, SEND, RECEIVE], [], 88),
    # Callers may change the ids that they get.
    "elastic dispatch, cached": ([SEND, RECEIVE], ["clone"], 65),
    "elastic combine with weights": (SUMS, [], 42),
}
"""Of each call: launches of ours, those of torch, and most Python calls."""


class Operations(TorchDispatchMode):
    """The names of torch's operations in its body."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def python_calls(call: Callable[[], object]) -> int:
    """How many Python functions are called; comprehensions are calls before Python 3.12 alone."""
    count = 0

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_name != "<listcomp>"

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def count_work(rank: int, world: int) -> dict[str, tuple[list[str], list[str], int]]:
    """`EXPECTED`, as it is."""
    launched: list[str] = []

    def launch(kernel: BoundKernel, arguments: Mapping[str, Any], grid: object = None) -> None:
        kernel.fill(arguments)
        launched.append(kernel.name)

    def await_counts(self: object, route: rows.Route) -> direct.Counts:
        return direct.Counts(TOKENS, TOKENS, TOKENS, [1] * route.num_local)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundKernel, "launch", launch)
        patch.setattr(normal, "has_kernels", lambda context: True)
        patch.setattr(buffer_module, "exchange_engine", lambda engine, device: ("cuda", ""))
        patch.setattr(direct.DirectExchange, "await_counts", await_counts)
        for module in (rows, row_sums):
            patch.setattr(module, "most_sms", lambda device: 132)
        buffer = Buffer(dist.group.WORLD, normal_bytes(HIDDEN, world, TOKENS), explicitly_destroy=True)
        assert dist.group.WORLD is not None
        elastic = ElasticBuffer(
            dist.group.WORLD, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, explicitly_destroy=True
        )
        x = torch.zeros(TOKENS, HIDDEN).to(torch.float8_e4m3fn), torch.ones(TOKENS, HIDDEN // 128)
        y = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
        ids, weights = torch.zeros(TOKENS, TOP_K, dtype=torch.int64), torch.zeros(TOKENS, TOP_K)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)

        def dispatch(**more: int) -> Any:
            return buffer.dispatch(x, **layout, topk_idx=ids, topk_weights=weights, **more)

        def dispatch_elastic(**more: Any) -> Any:
            return elastic.dispatch(x, ids, weights, num_experts=EXPERTS, **{"do_handle_copy": False} | more)

        handle, elastic_handle = dispatch()[4], dispatch_elastic()[3]
        # What kernels read to add ranks in DeepEP's order.
        assert elastic_handle._rows.home_ids is ids and handle.home_ids is None
        calls = (
            lambda: buffer.get_dispatch_layout(ids, EXPERTS),
            dispatch,
            lambda: dispatch(num_worst_tokens=TOKENS),
            lambda: buffer.dispatch(x, handle=handle),
            lambda: buffer.combine(y, handle),
            lambda: buffer.combine(y, handle, topk_weights=weights, bias=(y, y)),
            dispatch_elastic,
            lambda: dispatch_elastic(do_handle_copy=True),
            lambda: dispatch_elastic(do_cpu_sync=False),
            lambda: elastic.dispatch(x, handle=elastic_handle),
            lambda: elastic.combine(y, elastic_handle, topk_weights=weights),
        )
        found = {}
        for name, call in zip(EXPECTED, calls, strict=True):
            call()
            launched.clear()
            with Operations() as operations:
                call()
            work = launched.copy(), [one for one in operations.names if one not in NOT_LAUNCHED]
            found[name] = *work, python_calls(call)
        elastic.destroy()
        buffer.destroy()
    return found


@pytest.mark.cpu_only
def test_what_a_call_launches(get_pool: Any) -> None:
    (found,) = get_pool(1).run(count_work)
    for name, (launches, operations, calls) in found.items():
        print(f"{name}: {launches}, {operations}, {calls} Python calls")
        most = EXPECTED[name][2]
        assert (launches, operations) == EXPECTED[name][:2], name
        assert calls <= most, f"{name}: {calls} Python calls, at most {most}"
