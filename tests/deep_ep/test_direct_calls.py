"""The buffers' calls of normal mode over the kernels in CUDA C++, emulated, of a rank without peers.

What they are compared with is as on GPUs and CPUs. Several ranks are in tests/exchange/test_rows_emulated.py: emulated
kernels of different processes cannot wait for each other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.deep_ep import ElasticBuffer, direct, direct_dispatch, normal
from moe_runtime.kernels.exchange import row_sums, rows
from tests.deep_ep.test_elastic import CASES, every_call
from tests.deep_ep.test_normal import dispatch_and_combine, other_numbers_of_rows, worst_case
from tests.emulator import Emulator, needs_emulator

pytestmark = [needs_emulator, pytest.mark.cpu_only]


def emulated(rank: int, world: int, seed: int, call: Any, arguments: tuple[Any, ...]) -> None:
    """`call` with the kernels in place of the `TokenDispatcher`s."""
    emulator = Emulator(seed)
    with pytest.MonkeyPatch.context() as patch:
        emulator.stand_in(patch)
        patch.setattr(normal, "has_kernels", lambda context: True)
        for module in (rows, row_sums):
            patch.setattr(module, "most_sms", lambda device: 3)
        patch.setattr(rows, "MOST_WARPS", 2)
        patch.setattr(rows, "COUNT_WARPS", 2)
        rows.forget_macros()
        row_sums.sum_macros.cache_clear()
        call(rank, world, *arguments)
    rows.forget_macros()
    row_sums.sum_macros.cache_clear()
    assert {name for _, name in emulator.launched} >= {"dispatch_counts", "dispatch_send_rows", "dispatch_recv_rows"}


@pytest.mark.parametrize("fp8", [False, True])
def test_buffer(fp8: bool, get_pool: Any, seed: int) -> None:
    """More tokens than a step has room for, too."""
    for room in (32, 4):
        get_pool(1).run(emulated, seed, dispatch_and_combine, ([9], fp8, room, seed))
    get_pool(1).run(emulated, seed, worst_case, (seed,))


def test_rows_that_are_received_before_their_number_is_known(get_pool: Any, seed: int) -> None:
    """They are too few, too many by far, or right."""
    get_pool(1).run(emulated, seed, counted_rows, (seed,))


def counted_rows(rank: int, world: int, seed: int) -> None:
    served: list[bool] = []
    serve = direct_dispatch._serve

    def watched(early: rows.RowsToCome, num_rows: int) -> bool:
        served.append(serve(early, num_rows))
        return served[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_dispatch, "_serve", watched)
        patch.setattr(direct_dispatch, "MOST_SPARE", 16)
        patch.setattr(direct.DirectExchange, "has_counts", lambda exchange: False)
        other_numbers_of_rows(rank, world, seed)
    assert True in served and False in served


def limits(rank: int, world: int, found: list[float]) -> None:
    """How long the kernels of calls in a row wait for peers, in seconds: dispatch and combine, each twice."""
    with pytest.MonkeyPatch.context() as patch:
        for kernels in (rows.RowKernels, row_sums.SumKernels):

            def send(self: Any, *arguments: Any, really: Any = kernels.send) -> None:
                found.append(arguments[-1] / 1e9)
                really(self, *arguments)

            patch.setattr(kernels, "send", send)
        group = dist.group.WORLD
        elastic = ElasticBuffer(
            group, num_max_tokens_per_rank=8, hidden=256, num_gpu_timeout_secs=2, explicitly_destroy=True
        )
        x, idx = torch.randn(5, 256).bfloat16(), torch.arange(5)[:, None] % 4
        for _ in range(2):
            got, _, _, handle, _ = elastic.dispatch(x, idx, num_experts=4)
            elastic.combine(got, handle)
        elastic.destroy()
    assert found == [120.0, 120.0, 2.0, 2.0]


def test_the_first_call_of_each_kind_may_compile(get_pool: Any, seed: int) -> None:
    """A combine that comes first waits as long for its peers as a dispatch that does."""
    get_pool(1).run(emulated, seed, limits, ([],))


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "packed"])
def test_elastic_buffer(fmt: str, get_pool: Any, seed: int) -> None:
    get_pool(1).run(emulated, seed, every_call, (list(CASES), [fmt], seed))
