"""Dispatchers of virtual ranks in one process, of any engine, and plain loops that say what they must give.

Who imports `poisoned_memory` and `emulator` has them around each test; `engine` is for tests that ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange import cuda, one_rank_cuda
from moe_runtime.kernels.formats.reference_quantize import quantize_rows
from tests.emulator import CAN_EMULATE, Emulator
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, expected_combine, expected_groups

HOPPER = "hopper"
"""The kernels in CUDA C++: what ranks take on a Hopper GPU where nothing is asked for; on a CPU they are emulated."""
needs_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() or CAN_EMULATE), reason="needs a GPU, or a C++ compiler for x86-64"
)
ENGINES = ("torch", pytest.param(HOPPER, marks=needs_hopper))

SETTINGS = {"hidden_size": 256, "num_experts": 7, "top_k": 3, "max_tokens_per_rank": 5}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `torch.empty` gives is filled with 0xCD, so that an element nobody wrote is seen."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xCD)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    yield


def pretend_sms(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Launches of the exchange are for a GPU with so many SMs."""
    for module in (cuda, one_rank_cuda):
        monkeypatch.setattr(module, "most_sms", lambda device: most)


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch, device: torch.device, seed: int) -> Emulator:
    """Where there is no GPU, what runs kernels in CUDA C++: one of 5 SMs."""
    emulator = Emulator(seed)
    if device.type == "cpu":
        emulator.stand_in(monkeypatch)
        pretend_sms(monkeypatch, 5)
    return emulator


@pytest.fixture(params=["torch", "cuda"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device, seed: int) -> Any:
    """Of an operation with a kernel in CUDA C++ and a reference in torch; without a GPU the kernel is emulated."""
    if request.param == "cuda" and device.type == "cpu":
        if not CAN_EMULATE:
            pytest.skip("needs a C++ compiler for x86-64")
        Emulator(seed).stand_in(monkeypatch)
    return request.param


class Ranks:
    """A dispatcher on each of some virtual ranks, and `others` of a layer with other tokens if asked for.

    `num_sms` of some ranks may be their own. Memory is filled with what is neither old nor new, if it is not `fresh`.
    """

    def __init__(
        self,
        world: int,
        device: torch.device,
        engine: str,
        other_tokens: int | None = None,
        sms_of_ranks: Sequence[int | None] = (),
        fresh: bool = False,
        timeout_s: float = 5,
        **settings: object,
    ) -> None:
        heaps = PrivateHeap.group(world, device)
        named = "auto" if engine == HOPPER else engine
        limits = {"timeout_s": timeout_s, "startup_timeout_s": timeout_s + 1}
        self.contexts = [ExpertParallelContext(heap=heap, engine=named, **limits) for heap in heaps]
        self.dispatchers = [
            TokenDispatcher(context, **(settings | {"num_sms": sms}))  # type: ignore[arg-type]
            for context, sms in zip(self.contexts, sms_of_ranks or [settings.get("num_sms")] * world, strict=True)
        ]
        # Of a second layer.
        self.others = []
        if other_tokens is not None:
            settings["max_tokens_per_rank"] = other_tokens
            self.others = [TokenDispatcher(context, **settings) for context in self.contexts]  # type: ignore[arg-type]
        for dispatcher in (*self.dispatchers, *self.others):
            if engine == HOPPER and device.type == "cpu":
                dispatcher._use(cuda)
        for context in self.contexts:
            context.allocate()
        for heap in heaps:
            for region in () if fresh else ("token_flags", "landing", "combine"):
                # Token flags of epochs that have not been are the worst thing to find in memory; these are far behind.
                heap.tensor(region).fill_(0xCD)

    def dispatch(self, inputs: list[RankInput]) -> list[DispatchedTokens]:
        handles = [d.dispatch_send(*i) for d, i in zip(self.dispatchers, inputs, strict=True)]
        return [d.dispatch_recv(handle) for d, handle in zip(self.dispatchers, handles, strict=True)]

    def combine(
        self, arrived: list[DispatchedTokens], outputs: list[torch.Tensor], shared: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        for d, a, output in zip(self.dispatchers, arrived, outputs, strict=True):
            d.combine_send(output, a.handle)
        return [
            d.combine_recv(a.handle, shared=None if shared is None else shared[rank])
            for rank, (d, a) in enumerate(zip(self.dispatchers, arrived, strict=True))
        ]


def scale_row(arrived: DispatchedTokens, group: int, local_row: int, position: int) -> torch.Tensor:
    """The linear scales of one row position, read through the consumer's layout."""
    assert arrived.scales is not None
    if arrived.group_scale_offsets is None:
        return arrived.scales[position]
    start = int(arrived.group_offsets[group])
    block = start // 128 + int(arrived.group_scale_offsets[group]) + local_row // 128
    row = arrived.scales.view(torch.uint8)[block, :, local_row % 32, local_row % 128 // 32, :].flatten()
    return row.view(arrived.scales.dtype)


def check_arrival(arrived: DispatchedTokens, inputs: list[RankInput], experts: range) -> None:
    """Every row of every group is the quantized token it must be, in its place."""
    fmt = arrived.format
    groups = expected_groups(inputs, experts)
    sizes = [len(group) for group in groups]
    assert arrived.group_offsets.tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert arrived.expert_ids.tolist() == list(range(len(experts)))
    quantized = [quantize_rows(data.x, fmt) for data in inputs]
    position = 0
    for number, group in enumerate(groups):
        for local_row, (rank, token, _) in enumerate(group):
            row = position if arrived.row_index is None else int(arrived.row_index[position])
            what = f"group {number} row {local_row} (token {token} of rank {rank})"
            assert_same_bits(arrived.rows[row], quantized[rank].quants_RK[token], f"quants of {what}")
            scales, row_scale = quantized[rank].scales_RV, quantized[rank].row_scale_R
            if scales is not None:
                found = scale_row(arrived, number, local_row, position)
                assert_same_bits(found[: scales.shape[1]], scales[token], f"scales of {what}")
                assert not found[scales.shape[1] :].view(torch.uint8).any(), f"columns behind the scales of {what}"
            if row_scale is not None:
                assert arrived.row_scale is not None
                assert_same_bits(arrived.row_scale[position], row_scale[token], f"row scale of {what}")
            position += 1


def expert_rows(
    arrived: DispatchedTokens, hidden: int, seed: int, dtype: torch.dtype, sizes: torch.Tensor | None = None
) -> torch.Tensor:
    """Random expert outputs, of a size by column; NaN where no row is, which must never reach a token."""
    total = int(arrived.group_offsets[-1])
    rows = torch.full((arrived.capacity, hidden), float("nan"))
    rows[:total] = torch.randn(total, hidden, generator=torch.Generator().manual_seed(seed))
    rows[:total] *= 1 if sizes is None else sizes
    return rows.to(dtype).to(arrived.rows.device)


def check_step(
    ranks: Ranks, inputs: list[RankInput], seed: int, dtype: torch.dtype, sizes: torch.Tensor | None = None
) -> None:
    """A dispatch and a combine: every row and every sum against plain loops; `sizes` as for `expert_rows`."""
    geometry, device = ranks.dispatchers[0].geometry, ranks.contexts[0].device
    starts = geometry.starts
    arrived = ranks.dispatch([data.to(device) for data in inputs])
    outputs = []
    for rank, a in enumerate(arrived):
        check_arrival(a, inputs, range(starts[rank], starts[rank + 1]))
        outputs.append(expert_rows(a, geometry.hidden, seed + rank, dtype, sizes))
    ys = ranks.combine(arrived, outputs)
    for rank, (data, y) in enumerate(zip(inputs, ys, strict=True)):
        assert y.shape == data.x.shape
        for token in range(data.x.shape[0]):
            row_of = {}
            for holder in range(geometry.world_size):
                positions = arrived[holder].handle.positions[rank * geometry.max_tokens + token].tolist()
                for k, position in enumerate(positions):
                    if position >= 0:
                        row_of[token, k] = outputs[holder][position].to(torch.bfloat16).float().cpu().numpy()
            how = geometry.combine_format.name, geometry.sums_by_entry
            wanted = expected_combine(data, starts, row_of, token, *how)
            want = torch.from_numpy(wanted).to(torch.bfloat16)
            assert_same_bits(y[token], want, f"y of token {token} of rank {rank}")
