"""Dispatch, arrive and combine, kernels and twins, over virtual ranks: against plain loops and against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.comm.private_heap import PrivateHeap
from moe_runtime.context import ExpertParallelContext
from moe_runtime.dispatcher import CombineSink, DispatchedTokens, DispatchHandle, TokenDispatcher
from moe_runtime.errors import (
    CapacityError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    RoutingError,
    StaleHandleError,
    StepMismatchError,
)
from moe_runtime.formats import FORMATS, QuantizedRows
from moe_runtime.kernels import hopper_exchange, hopper_shapes
from moe_runtime.kernels.reference_quantize import MAX_GSF, dequantize_rows, quantize_rows
from moe_runtime.launch.checks import ungrouped
from tests.comparison import assert_same_bits
from tests.emulator import CAN_EMULATE, Emulator
from tests.exchange_data import RankInput, expected_combine, expected_groups, rank_input
from tests.token_parts import forget_defines
from tests.waiting import synchronize

HOPPER = "hopper"
"""The kernels in CUDA C++: what ranks take on a Hopper GPU where nothing is asked for; on a CPU they are emulated."""
needs_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() or CAN_EMULATE), reason="needs a GPU, or a C++ compiler for x86-64"
)
ENGINES = ("torch", "triton", pytest.param(HOPPER, marks=needs_hopper))


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


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch, device: torch.device, seed: int) -> Emulator:
    """Where there is no GPU, what runs kernels in CUDA C++: one of 5 SMs."""
    emulator = Emulator(seed)
    if device.type == "cpu":
        monkeypatch.setattr(hopper_exchange, "launch", emulator.launch)
        monkeypatch.setattr(hopper_exchange, "most_sms", lambda device, limit=None: min(5, limit or 5))
    return emulator


class Ranks:
    """A dispatcher on each of some virtual ranks, and `others` of a layer with other tokens if asked for.

    `num_sms` of some ranks may be their own.
    """

    def __init__(
        self,
        world: int,
        device: torch.device,
        engine: str,
        other_tokens: int | None = None,
        sms_of_ranks: Sequence[int | None] = (),
        **settings: object,
    ) -> None:
        heaps = PrivateHeap.group(world, device)
        named = "auto" if engine == HOPPER else engine
        self.contexts = [ExpertParallelContext(heap=h, engine=named, timeout_s=5, startup_timeout_s=6) for h in heaps]
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
                dispatcher._exchange = hopper_exchange
        for context in self.contexts:
            context.allocate()
        for heap in heaps:
            for region in ("stamps", "landing", "combine"):
                # Stamps of epochs that have not been are the worst thing to find in memory; these are far behind.
                heap.tensor(region).fill_(0xCD)

    def dispatch(self, inputs: list[RankInput]) -> list[DispatchedTokens]:
        handles = [
            d.dispatch_send(i.x, i.topk_idx, i.topk_weights) for d, i in zip(self.dispatchers, inputs, strict=True)
        ]
        return [d.dispatch_wait(handle) for d, handle in zip(self.dispatchers, handles, strict=True)]

    def combine(
        self, arrived: list[DispatchedTokens], outputs: list[torch.Tensor], shared: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        for d, a, output in zip(self.dispatchers, arrived, outputs, strict=True):
            d.combine_send(output, a.handle)
        return [
            d.combine_wait(a.handle, shared=None if shared is None else shared[rank])
            for rank, (d, a) in enumerate(zip(self.dispatchers, arrived, strict=True))
        ]


def scale_row(arrived: DispatchedTokens, group: int, local_row: int, position: int) -> torch.Tensor:
    """The linear scales of one packed position, read through the consumer's layout."""
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


def expert_rows(arrived: DispatchedTokens, hidden: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Random expert outputs; NaN where no row is, which must never reach a token."""
    total = int(arrived.group_offsets[-1])
    rows = torch.full((arrived.capacity, hidden), float("nan"))
    rows[:total] = torch.randn(total, hidden, generator=torch.Generator().manual_seed(seed))
    return rows.to(dtype).to(arrived.rows.device)


SETTINGS = {"hidden_size": 256, "num_experts": 7, "top_k": 3, "max_tokens_per_rank": 5}


def check_step(ranks: Ranks, inputs: list[RankInput], seed: int, dtype: torch.dtype) -> None:
    """A dispatch and a combine of bf16 partial results: every row and every sum against plain loops."""
    geometry, device = ranks.dispatchers[0].geometry, ranks.contexts[0].device
    starts = geometry.starts
    arrived = ranks.dispatch([data.to(device) for data in inputs])
    outputs = []
    for rank, a in enumerate(arrived):
        check_arrival(a, inputs, range(starts[rank], starts[rank + 1]))
        outputs.append(expert_rows(a, geometry.hidden, seed + rank, dtype))
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
            want = torch.from_numpy(expected_combine(data, starts, row_of, token)).to(torch.bfloat16)
            assert_same_bits(y[token], want, f"y of token {token} of rank {rank}")


@pytest.mark.parametrize("mode", ["indexed", "packed"])
@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("engine", ENGINES)
def test_arrival_and_combine_are_what_plain_loops_give(
    engine: str, fmt: str, mode: str, device: torch.device, seed: int
) -> None:
    ranks = Ranks(3, device, engine, token_format=fmt, mode=mode, **SETTINGS)
    for step, (tokens, routing) in enumerate([((5, 0, 2), "random"), ((1, 5, 0), "one"), ((4, 3, 5), "random")]):
        inputs = [rank_input(seed + step, r, t, 256, 7, 3, routing) for r, t in enumerate(tokens)]
        check_step(ranks, inputs, seed, torch.bfloat16 if step else torch.float32)


@given(data=st.data())
def test_any_sizes_give_what_plain_loops_give(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5), "ranks")
    num_experts = data.draw(st.integers(1, 12), "experts")
    top_k = data.draw(st.integers(1, min(num_experts, 6)), "top_k")
    most = data.draw(st.integers(1, 40), "max_tokens_per_rank")
    fmt = data.draw(st.sampled_from(sorted(FORMATS)), "format")
    hidden = max(FORMATS[fmt].block, 8) * data.draw(st.integers(1, 5), "blocks")
    mode = data.draw(st.sampled_from(["indexed", "packed"]), "mode")
    settings = {"hidden_size": hidden, "num_experts": num_experts, "top_k": top_k, "max_tokens_per_rank": most}
    ranks = Ranks(world, torch.device("cpu"), "torch", token_format=fmt, mode=mode, **settings)
    for _ in range(2):
        seed = data.draw(st.integers(0, 2**20), "seed")
        routing = data.draw(st.sampled_from(["random", "one", "none"]), "routing")
        counts = [data.draw(st.integers(0, most), f"tokens of rank {r}") for r in range(world)]
        inputs = [rank_input(seed, r, t, hidden, num_experts, top_k, routing) for r, t in enumerate(counts)]
        check_step(ranks, inputs, seed, torch.bfloat16)


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize(
    ("world", "fmt", "wire", "mode"),
    [
        (1, "bf16", "bf16", "packed"),
        (2, "nvfp4", "mxfp8", "packed"),
        (4, "mxfp8", "fp8_block", "indexed"),
        (5, "fp8_block", "bf16", "packed"),
        (8, "nvfp4", "bf16", "indexed"),  # more ranks than experts: some have none
    ],
)
def test_kernels_and_twins_give_the_same_bits(
    world: int, fmt: str, wire: str, mode: str, engine: str, device: torch.device, seed: int
) -> None:
    settings = {**SETTINGS, "token_format": fmt, "combine_format": wire, "mode": mode}
    both = [Ranks(world, device, name, **settings) for name in ("torch", engine)]
    # The third uses a half of memory again. Interpreted, a step of many ranks takes seconds: there it is left out.
    for step in range(3 if world < 5 else 2):
        inputs = [rank_input(seed + step, r, (0, 5, 1, 3)[(r + step) % 4], 256, 7, 3) for r in range(world)]
        for data in inputs[:1]:
            if data.x.shape[0] > 2:
                data.x[1, 7] = float("nan")
                data.x[2] = 0
        results = []
        for ranks in both:
            arrived = ranks.dispatch([data.to(device) for data in inputs])
            outputs = [expert_rows(a, 256, seed + r, torch.bfloat16) for r, a in enumerate(arrived)]
            shared = None
            if step == 1:
                shared = [
                    rank_input(seed + 99, r, data.x.shape[0], 256, 7, 3).x.to(device) for r, data in enumerate(inputs)
                ]
            results.append((arrived, ranks.combine(arrived, outputs, shared)))
        (arrived_a, ys_a), (arrived_b, ys_b) = results
        for rank in range(world):
            a, b = arrived_a[rank], arrived_b[rank]
            total = int(a.group_offsets[-1])
            assert_same_bits(b.group_offsets, a.group_offsets, "group_offsets")
            assert_same_bits(b.handle.positions, a.handle.positions, "positions")
            assert_same_bits(b.handle.num_parts, a.handle.num_parts, "num_parts")
            if a.group_scale_offsets is not None and b.group_scale_offsets is not None:
                assert_same_bits(b.group_scale_offsets, a.group_scale_offsets, "group_scale_offsets")
            if a.row_index is not None and b.row_index is not None:
                assert_same_bits(b.row_index[:total], a.row_index[:total], "row_index")
            check_arrival(b, inputs, range(*ranks.dispatchers[0].geometry.starts[rank : rank + 2]))
            assert_same_bits(ys_b[rank], ys_a[rank], f"y of rank {rank}")


@pytest.mark.parametrize(
    ("engine", "fmt", "tiled"),
    [
        ("torch", "nvfp4", False),
        ("triton", "nvfp4", False),
        pytest.param(HOPPER, "mxfp8", False, marks=needs_hopper),
        pytest.param(HOPPER, "nvfp4", True, marks=needs_hopper),
    ],
)
def test_scales_of_many_rows_and_few_columns(
    engine: str, fmt: str, tiled: bool, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of 130 rows, with 3 or 6 scales in words of 4, where zeros lie behind them. `tiled` is a kernel of its
    own that fills them in."""
    monkeypatch.setattr(hopper_shapes, "SMALL_CHUNK_BYTES", 0 if tiled else 1 << 20)
    monkeypatch.setattr(hopper_shapes, "CHUNK", 32)
    forget_defines()
    settings = {"hidden_size": 96, "num_experts": 7, "top_k": 2, "max_tokens_per_rank": 70}
    ranks = Ranks(2, device, engine, token_format=fmt, mode="packed", **settings)
    if engine == HOPPER:
        assert hopper_shapes.tiled_scales(ranks.dispatchers[0].geometry) == tiled
    inputs = [rank_input(seed, rank, 65, 96, 7, 2, "one") for rank in range(2)]
    for rank, arrived in enumerate(ranks.dispatch([data.to(device) for data in inputs])):
        check_arrival(arrived, inputs, range(*ranks.dispatchers[0].geometry.starts[rank : rank + 2]))


def rows_with_nan(arrived: DispatchedTokens, hidden: int, every: int, rng: torch.Generator) -> torch.Tensor:
    """fp32 expert outputs in which one number in `every` is a NaN of random bits, one an infinity and one huge."""
    rows = torch.randn(arrived.capacity, hidden, generator=rng)
    payloads = torch.randint(0x7F800001, 0x80000000, rows.shape, generator=rng).to(torch.int32).view(torch.float32)
    signs = torch.where(torch.rand(rows.shape, generator=rng) < 0.5, -1.0, 1.0)
    kinds = torch.randint(every, rows.shape, generator=rng)
    for kind, values in enumerate((payloads, torch.full_like(rows, torch.inf), torch.full_like(rows, 3e38))):
        rows = torch.where(kinds == kind, torch.copysign(values, signs), rows)
    return rows.to(arrived.rows.device)


@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_results_are_nan_in_the_same_places(
    engine: str, wire: str, device: torch.device, seed: int, rng: torch.Generator
) -> None:
    """Of experts and of a shared expert that give NaN and infinities; all that is no NaN has the same bits."""
    settings = {**SETTINGS, "combine_format": wire, "mode": "packed"}
    inputs = [rank_input(seed, rank, 4, 256, 7, 3) for rank in range(2)]
    inputs[0].topk_weights[0] = 0
    shared = [data.x.clone() for data in inputs]
    shared[0][:, 5], shared[1][:, 6] = torch.nan, -torch.inf
    results, outputs = [], []
    for name in ("torch", engine):
        ranks = Ranks(2, device, name, **settings)
        arrived = ranks.dispatch([data.to(device) for data in inputs])
        # In other formats a NaN makes its whole block NaN.
        outputs = outputs or [rows_with_nan(a, 256, 20 if wire == "bf16" else 2000, rng) for a in arrived]
        results.append(ranks.combine(arrived, outputs, [x.to(device) for x in shared]))
    assert results[0][0].isnan().any() and results[0][1].isinf().any()
    for wanted, found in zip(*results, strict=True):
        nan = wanted.isnan()
        assert not nan.all()
        assert torch.equal(found.isnan(), nan)
        assert_same_bits(found[~nan], wanted[~nan], "numbers")


@needs_hopper
@pytest.mark.parametrize("mode", ["indexed", "packed"])
@pytest.mark.parametrize("kernels_of", [(0,), (2,), (0, 1)], ids=str)
def test_ranks_may_run_different_engines(
    kernels_of: tuple[int, ...], mode: str, device: torch.device, seed: int
) -> None:
    """Hopper's kernels tell of each token by itself, and take what the twins tell of by a flag alone."""
    settings = {**SETTINGS, "token_format": "nvfp4", "mode": mode}
    ranks = Ranks(3, device, "torch", **settings)
    for rank in kernels_of:
        assert hopper_shapes.stamped(ranks.dispatchers[rank].geometry)
        ranks.dispatchers[rank]._exchange = hopper_exchange
    for step, tokens in enumerate(((5, 2, 0), (0, 5, 3), (1, 0, 5), (0, 0, 4))):
        routing = "one" if step == 2 else "random"
        inputs = [rank_input(seed + step, rank, t, 256, 7, 3, routing) for rank, t in enumerate(tokens)]
        check_step(ranks, inputs, seed + step, torch.bfloat16)
    for context in ranks.contexts:
        context.check_peers()


@needs_hopper
@pytest.mark.parametrize("max_tokens", [6, 200], ids=["one_chunk", "several"])
@pytest.mark.parametrize("token", ["nvfp4", "mxfp8"])
def test_scales_may_be_left_where_they_were_sent(
    token: str, max_tokens: int, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows and scales that the twins group, found by index; results come home as ever."""
    settings = {
        "hidden_size": 512,
        "num_experts": 7,
        "top_k": 3,
        "max_tokens_per_rank": max_tokens,
        "token_format": token,
        "mode": "indexed",
    }
    monkeypatch.setattr(hopper_shapes, "SMALL_CHUNK_BYTES", 4096)
    forget_defines()
    twins, kernels = Ranks(3, device, "torch", **settings), Ranks(3, device, HOPPER, **settings)
    assert not twins.dispatchers[0].can_leave_scales and kernels.dispatchers[0].can_leave_scales
    for step, tokens in enumerate(((max_tokens, 0, 3), (1, max_tokens, 2), (0, 0, 0))):
        inputs = [rank_input(seed + step, r, t, 512, 7, 3).to(device) for r, t in enumerate(tokens)]
        wanted, handles = twins.dispatch(inputs), []
        for own, data in zip(kernels.dispatchers, inputs, strict=True):
            handles.append(own.dispatch_send(data.x, data.topk_idx, data.topk_weights, leave_scales=True))
        found = [own.dispatch_wait(handle) for own, handle in zip(kernels.dispatchers, handles, strict=True)]
        for rank, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert a.scales_by_row and not b.scales_by_row
            assert_same_bits(a.group_offsets, b.group_offsets, f"offsets of rank {rank}")
            linear, other = ungrouped(a), ungrouped(b)
            assert linear.scales_RV is not None and other.scales_RV is not None
            assert_same_bits(linear.quants_RK, other.quants_RK, f"quants of rank {rank}")
            assert_same_bits(linear.scales_RV, other.scales_RV, f"scales of rank {rank}")
            if other.row_scale_R is not None:
                assert linear.row_scale_R is not None
                assert_same_bits(linear.row_scale_R, other.row_scale_R, f"row scales of rank {rank}")
        outputs = [
            torch.randn(a.capacity, 512, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
            for rank, a in enumerate(found)
        ]
        for y, want in zip(kernels.combine(found, outputs), twins.combine(wanted, outputs), strict=True):
            assert_same_bits(y, want, "combined")
    forget_defines()


def test_rows_that_are_expected_are_those_of_experts_chosen_alike(device: torch.device) -> None:
    """40 tokens of 3 ranks choose 3 of 7 experts each: 360 rows, in parts as large as those of the experts."""
    sizes = {"hidden_size": 64, "num_experts": 7, "top_k": 3, "max_tokens_per_rank": 40}
    ranks = Ranks(3, device, "torch", token_format="bf16", **sizes)
    idx = torch.arange(40 * 3).view(40, 3)
    inputs = [replace(rank_input(0, r, 40, 64, 7, 3), topk_idx=(idx + r) % 7).to(device) for r in range(3)]
    for own, found in zip(ranks.dispatchers, ranks.dispatch(inputs), strict=True):
        share = own.geometry.num_local_experts / 7
        assert found.expected_rows == own.geometry.expected_rows == round(360 * share) < found.capacity
        assert abs(int(found.group_offsets[-1]) - found.expected_rows) <= 0.1 * found.expected_rows
        assert found.likely_rows == found.expected_rows
        assert replace(found, expected_rows=None).likely_rows == found.capacity
        assert replace(own.geometry, row_capacity=7).expected_rows == 7


def test_scales_cannot_be_left_by_other_engines(device: torch.device, seed: int) -> None:
    sizes = {"hidden_size": 64, "num_experts": 2, "top_k": 1, "max_tokens_per_rank": 4}
    ranks = Ranks(1, device, "torch", token_format="nvfp4", **sizes)
    data = rank_input(seed, 0, 2, 64, 2, 1).to(device)
    with pytest.raises(ValueError, match=r"^leave_scales: expected False"):
        ranks.dispatchers[0].dispatch_send(data.x, data.topk_idx, data.topk_weights, leave_scales=True)


@pytest.mark.parametrize("wire", ["fp8_block", "mxfp8"])
def test_a_quantized_wire_rounds_each_partial_result_once(wire: str, device: torch.device, seed: int) -> None:
    ranks = Ranks(2, device, "torch", combine_format=wire, **{**SETTINGS, "num_experts": 2, "top_k": 2})
    inputs = [rank_input(seed, r, 4, 256, 2, 2) for r in range(2)]
    arrived = ranks.dispatch([data.to(device) for data in inputs])
    outputs = [expert_rows(a, 256, seed + r, torch.bfloat16) for r, a in enumerate(arrived)]
    ys = ranks.combine(arrived, outputs)
    for rank, data in enumerate(inputs):
        total = torch.zeros(4, 256)
        for holder in range(2):
            positions = arrived[holder].handle.positions[rank * 5 : rank * 5 + 4]
            partial = torch.zeros(4, 256)
            for k in range(2):
                has = positions[:, k].cpu() >= 0
                rows = outputs[holder][positions[has.to(device), k].long()].float().cpu()
                partial[has] += data.topk_weights[has, k, None] * rows
            q = quantize_rows(partial, FORMATS[wire])
            sent = (positions >= 0).any(dim=1).cpu()
            total[sent] += dequantize_rows(QuantizedRows(q.format, q.quants_RK, q.scales_RV))[sent]
        assert_same_bits(ys[rank], total.to(torch.bfloat16), "y")


@pytest.mark.parametrize("engine", ENGINES)
def test_two_dispatches_may_be_in_flight_and_a_third_makes_the_first_stale(
    engine: str, device: torch.device, seed: int
) -> None:
    ranks = Ranks(1, device, engine, token_format="nvfp4", mode="indexed", **SETTINGS)
    dispatcher, context = ranks.dispatchers[0], ranks.contexts[0]
    data = [rank_input(seed + i, 0, 5, 256, 7, 3).to(device) for i in range(3)]
    first, second = (dispatcher.dispatch(d.x, d.topk_idx, d.topk_weights) for d in data[:2])
    host = [rank_input(seed + i, 0, 5, 256, 7, 3) for i in range(3)]
    check_arrival(first, host[:1], range(7))
    check_arrival(second, host[1:2], range(7))
    dispatcher.combine(expert_rows(second, 256, seed, torch.bfloat16), second.handle)
    third = dispatcher.dispatch(data[2].x, data[2].topk_idx, data[2].topk_weights)
    check_arrival(third, host[2:], range(7))
    with pytest.raises(StaleHandleError, match="rank 0"):
        dispatcher.combine(expert_rows(first, 256, seed, torch.bfloat16), first.handle)
        synchronize(device)
        context.check()


@pytest.mark.parametrize("max_tokens", [5, 3000])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_third_dispatch_makes_the_first_stale_before_its_tokens_are_waited_for(
    engine: str, max_tokens: int, device: torch.device, seed: int
) -> None:
    """The kernel that waits may start beside the third dispatch, which tells of itself only at its end."""
    if engine == "triton" and device.type == "cpu" and max_tokens > 5:
        pytest.skip("a program for each slot, interpreted")
    settings = {**SETTINGS, "max_tokens_per_rank": max_tokens}
    ranks = Ranks(1, device, engine, token_format="nvfp4", mode="indexed", **settings)
    data = [rank_input(seed + i, 0, max_tokens, 256, 7, 3).to(device) for i in range(3)]
    first, *_ = (ranks.dispatchers[0].dispatch_send(d.x, d.topk_idx, d.topk_weights) for d in data)
    with pytest.raises(StaleHandleError, match="rank 0") as caught:
        arrived = ranks.dispatchers[0].dispatch_wait(first)
        synchronize(device)
        assert arrived.group_offsets.tolist() == [0] * 8
        ranks.contexts[0].check()
    assert caught.value.phase == Phase.DISPATCH_WAIT


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_step_of_a_layer_waits_longer_and_a_timeout_names_its_limit(
    engine: str, device: torch.device, seed: int
) -> None:
    ranks = Ranks(2, device, engine, **SETTINGS)
    for context in ranks.contexts:
        context.timeout_ns, context.startup_timeout_ns = 250_000_000, 500_000_000
    inputs = [rank_input(seed, r, 3, 256, 7, 3).to(device) for r in range(2)]
    first = ranks.dispatchers[0].dispatch_send(inputs[0].x, inputs[0].topk_idx, inputs[0].topk_weights)
    assert first.timeout_ns == 500_000_000
    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not answer within 0\.5 s") as caught:
        ranks.dispatchers[0].dispatch_wait(first)
        synchronize(device)
        ranks.contexts[0].check()
    assert (caught.value.rank, caught.value.phase) == (1, Phase.DISPATCH_WAIT)

    ranks = Ranks(2, device, engine, **SETTINGS)
    arrived = ranks.dispatch(inputs)
    ranks.combine(arrived, [expert_rows(a, 256, seed, torch.bfloat16) for a in arrived])
    later = ranks.dispatchers[0].dispatch_send(inputs[0].x, inputs[0].topk_idx, inputs[0].topk_weights)
    assert later.timeout_ns == ranks.contexts[0].timeout_ns == 5 * 10**9


@pytest.mark.parametrize("engine", ENGINES)
def test_results_after_a_failure_are_nan(engine: str, device: torch.device, seed: int) -> None:
    """Of all tokens, whether the silent peer has one of their experts or not."""
    ranks = Ranks(2, device, engine, **SETTINGS)
    for context in ranks.contexts:
        context.startup_timeout_ns = 500_000_000
    inputs = [rank_input(seed, rank, 5, 256, 7, 3).to(device) for rank in range(2)]
    inputs[0].topk_idx[0] = -1
    arrived = ranks.dispatch(inputs)[0]
    ranks.dispatchers[0].combine_send(expert_rows(arrived, 256, seed, torch.bfloat16), arrived.handle)
    y = arrived.handle._results["y"]
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        ranks.dispatchers[0].combine_wait(arrived.handle)
        synchronize(device)
        ranks.contexts[0].check()
    assert y.isnan().all()


def test_a_capacity_above_the_worst_case_is_that() -> None:
    """7 experts, 3 of a token, on 2 ranks with 5 tokens each."""
    ranks = Ranks(2, torch.device("cpu"), "torch", expert_row_capacity=1000, **SETTINGS)
    assert [dispatcher.geometry.row_capacity for dispatcher in ranks.dispatchers] == [30, 30]


def test_a_handle_combines_once(device: torch.device, seed: int) -> None:
    ranks = Ranks(1, device, "torch", **SETTINGS)
    data = rank_input(seed, 0, 5, 256, 7, 3).to(device)
    arrived = ranks.dispatchers[0].dispatch(data.x, data.topk_idx, data.topk_weights)
    sink = CombineSink(arrived.handle)
    sink.rows.zero_()
    ranks.dispatchers[0].combine(sink, arrived.handle)
    with pytest.raises(ValueError, match="handle: combine_send was already called"):
        ranks.dispatchers[0].combine(sink, arrived.handle)


def test_on_one_rank_a_handle_is_good_after_a_wrong_argument(device: torch.device, seed: int) -> None:
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    data = rank_input(seed, 0, 5, 256, 7, 3).to(device)
    arrived = dispatcher.dispatch(data.x, data.topk_idx, data.topk_weights)
    sink = CombineSink(arrived.handle)
    sink.rows.zero_()
    with pytest.raises(ValueError, match="expert_output: expected a tensor, got NoneType"):
        dispatcher.combine_send(None, arrived.handle)  # type: ignore[arg-type]
    dispatcher.combine_send(sink, arrived.handle)
    with pytest.raises(ValueError, match="shared: expected a tensor, got list"):
        dispatcher.combine_wait(arrived.handle, shared=[1])  # type: ignore[arg-type]
    assert not dispatcher.combine_wait(arrived.handle).any()


def test_no_expert_output_is_told_to_the_peers(device: torch.device, seed: int) -> None:
    ranks = Ranks(2, device, "torch", **SETTINGS)
    data = [rank_input(seed, rank, 5, 256, 7, 3).to(device) for rank in range(2)]
    pairs = list(zip(ranks.dispatchers, data, strict=True))
    handles = [dispatcher.dispatch_send(i.x, i.topk_idx, i.topk_weights) for dispatcher, i in pairs]
    arrived = [dispatcher.dispatch_wait(h) for dispatcher, h in zip(ranks.dispatchers, handles, strict=True)]
    with pytest.raises(ValueError, match="expert_output: expected a tensor, got NoneType"):
        ranks.dispatchers[0].combine(None, arrived[0].handle)  # type: ignore[arg-type]
    synchronize(device)
    with pytest.raises(PeerAbortedError, match="rank 0 gave up: expert_output: expected a tensor"):
        ranks.contexts[1].check_peers()


def test_stages_come_in_order_and_a_sink_belongs_to_its_handle(device: torch.device, seed: int) -> None:
    data = rank_input(seed, 0, 5, 256, 7, 3).to(device)

    def send(dispatcher: TokenDispatcher) -> DispatchHandle:
        return dispatcher.dispatch_send(data.x, data.topk_idx, data.topk_weights)

    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    with pytest.raises(ValueError, match="handle: expected dispatch_wait to be called with it before combine_send"):
        handle = send(dispatcher)
        dispatcher.combine_send(CombineSink(handle), handle)
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    with pytest.raises(ValueError, match="handle: expected combine_send to be called with it before combine_wait"):
        dispatcher.combine_wait(dispatcher.dispatch_wait(send(dispatcher)).handle)
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    first, second = (dispatcher.dispatch_wait(send(dispatcher)).handle for _ in range(2))
    with pytest.raises(ValueError, match="expert_output: expected a CombineSink of the same handle"):
        dispatcher.combine(CombineSink(first), second)
    ranks = Ranks(1, device, "torch", other_tokens=5, **SETTINGS)
    with pytest.raises(ValueError, match="handle: it belongs to another dispatcher"):
        ranks.others[0].dispatch_wait(send(ranks.dispatchers[0]))


@pytest.mark.parametrize("bad", [7, 99, -2, 2**40, "twice"])
@pytest.mark.parametrize("engine", ENGINES)
def test_bad_expert_ids_are_recorded_on_every_rank_and_never_stored_through(
    engine: str, bad: int | str, device: torch.device, seed: int
) -> None:
    ranks = Ranks(3, device, engine, **SETTINGS)
    inputs = [rank_input(seed, r, 3, 256, 7, 3) for r in range(3)]
    inputs[1].topk_idx[2] = torch.tensor([4, 4, 0]) if bad == "twice" else torch.tensor([4, int(bad), 0])
    for dispatcher, data in zip(ranks.dispatchers[:2], inputs, strict=False):
        dispatcher.dispatch_send(data.x.to(device), data.topk_idx.to(device), data.topk_weights.to(device))
    for rank, context in enumerate(ranks.contexts):
        synchronize(device)
        with pytest.raises(RoutingError, match="rank 1") as caught:
            # On a GPU `check` sees what this rank's kernels saw, and those of rank 0 had ended before the failure.
            context.check() if rank == 1 or device.type == "cpu" else context.check_peers()
        assert caught.value.rank == 1
        assert caught.value.phase == Phase.DISPATCH_SEND


@pytest.mark.parametrize("engine", ENGINES)
def test_too_small_a_capacity_is_an_error_on_every_rank(engine: str, device: torch.device, seed: int) -> None:
    ranks = Ranks(2, device, engine, expert_row_capacity=4, **SETTINGS)
    inputs = [rank_input(seed, r, 5, 256, 7, 3, "one").to(device) for r in range(2)]
    handles = [d.dispatch_send(i.x, i.topk_idx, i.topk_weights) for d, i in zip(ranks.dispatchers, inputs, strict=True)]
    with pytest.raises(CapacityError, match="rank 1"):
        ranks.dispatchers[1].dispatch_wait(handles[1])
        synchronize(device)
        ranks.contexts[1].check()
    with pytest.raises(CapacityError, match="rank 1"):
        ranks.dispatchers[0].dispatch_wait(handles[0])
        synchronize(device)
        ranks.contexts[0].check()


@pytest.mark.parametrize("input_scale", [0.003, 1e-36])
def test_a_static_input_scale_is_used_as_given(input_scale: float, device: torch.device, seed: int) -> None:
    ranks = Ranks(1, device, "torch", token_format="nvfp4", mode="packed", input_scale=input_scale, **SETTINGS)
    data = rank_input(seed, 0, 5, 256, 7, 3)
    arrived = ranks.dispatch([data.to(device)])[0]
    gsf = (torch.ones(1) / torch.tensor([input_scale])).clamp(max=MAX_GSF)
    want = quantize_rows(data.x, FORMATS["nvfp4"], gsf=gsf)
    rows = [row for group in expected_groups([data], range(7)) for row in group]
    assert arrived.row_scale is not None
    for position, (_, token, _) in enumerate(rows):
        assert_same_bits(arrived.rows[position], want.quants_RK[token])
        assert float(arrived.row_scale[position]) == float(1 / gsf)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_may_be_parts_of_longer_ones(engine: str, device: torch.device, seed: int) -> None:
    """Of tokens, experts and a shared expert, by the engine that is named; the scale is static."""

    def part(rows: torch.Tensor) -> torch.Tensor:
        wide = torch.full((rows.shape[0], rows.shape[1] + 64), 9.0, dtype=rows.dtype, device=device)
        wide[:, 32:-32] = rows
        return wide[:, 32:-32]

    settings = {**SETTINGS, "token_format": "nvfp4", "mode": "packed", "input_scale": 0.003}
    inputs = [rank_input(seed, rank, 4, 256, 7, 3).to(device) for rank in range(2)]
    shared = [rank_input(seed + 1, rank, 4, 256, 7, 3).x.to(device) for rank in range(2)]
    twins, ranks = Ranks(2, device, "torch", **settings), Ranks(2, device, engine, **settings)
    wanted, found = twins.dispatch(inputs), ranks.dispatch([replace(data, x=part(data.x)) for data in inputs])
    outputs = [expert_rows(a, 256, seed, torch.float32) for a in wanted]
    for a, b in zip(wanted, found, strict=True):
        total = int(a.group_offsets[-1])
        assert_same_bits(b.rows[:total], a.rows[:total], "rows")
        assert a.row_scale is not None and b.row_scale is not None
        assert_same_bits(b.row_scale[:total], a.row_scale[:total], "row scales")
    ys = ranks.combine(found, [part(rows) for rows in outputs], [part(rows) for rows in shared])
    for y, want in zip(ys, twins.combine(wanted, outputs, shared), strict=True):
        assert_same_bits(y, want, "y")


def wrong_calls(good: RankInput, device: torch.device) -> dict[str, tuple[RankInput, str]]:
    x, idx, w = good.x, good.topk_idx, good.topk_weights
    return {
        "x rank": (RankInput(x[0], idx, w), "x: expected"),
        "x width": (RankInput(x[:, :128], idx, w), "x: expected shape"),
        "x dtype": (RankInput(x.float(), idx, w), "x: expected torch.bfloat16"),
        "x stride": (RankInput(x.t().contiguous().t(), idx, w), "x: expected a contiguous last"),
        "x device": (RankInput(x.to("meta"), idx, w), "x: expected device"),
        "x grad": (RankInput(x.clone().requires_grad_(), idx, w), "x: requires grad"),
        "too many": (RankInput(x.repeat(2, 1), idx.repeat(2, 1), w.repeat(2, 1)), "x: expected at most max_tokens"),
        "idx shape": (RankInput(x, idx[:, :2], w), "topk_idx: expected shape"),
        "idx dtype": (RankInput(x, idx.float(), w), "topk_idx: expected torch.int32 or"),
        "weights shape": (RankInput(x, idx, w[:2]), "topk_weights: expected shape"),
        "weights dtype": (RankInput(x, idx, w.double()), "topk_weights: expected torch.float32"),
        "idx none": (RankInput(x, None, w), "topk_idx: expected a tensor, got NoneType"),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", sorted(wrong_calls(rank_input(0, 0, 5, 256, 7, 3), torch.device("cpu"))))
def test_wrong_tokens_are_named(name: str, device: torch.device, seed: int) -> None:
    ranks = Ranks(1, device, "torch", **SETTINGS)
    data, message = wrong_calls(rank_input(seed, 0, 5, 256, 7, 3).to(device), device)[name]
    with pytest.raises(ValueError, match=message):
        ranks.dispatchers[0].dispatch(data.x, data.topk_idx, data.topk_weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 250}, "hidden_size: format"),
        ({"top_k": 8}, "top_k: expected at most"),
        ({"top_k": 0}, "top_k: expected a positive"),
        ({"num_experts": 70000}, "num_experts: expected at most 65535"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank: expected a positive"),
        ({"max_tokens_per_rank": 2.5}, "max_tokens_per_rank: expected a positive integer, got 2.5"),
        ({"max_tokens_per_rank": 2**22}, "max_tokens_per_rank: expected at most 4194303, .* tokens in 22 bits"),
        (
            {"max_tokens_per_rank": 2**21 + 1, "num_experts": 1200, "top_k": 1024},
            "max_tokens_per_rank: expected at most 2097151, .* counted in int32",
        ),
        ({"mode": "fast"}, "mode: expected auto"),
        ({"combine_format": "nvfp4"}, "combine_format: expected"),
        ({"hidden_size": "256"}, "hidden_size: expected a positive integer, got '256'"),
        ({"hidden_size": 256.0}, "hidden_size: expected a positive integer, got 256.0"),
        ({"token_format": "fp4"}, "^token_format: expected one of"),
        ({"token_format": ["bf16"]}, "^token_format: expected one of"),
        ({"combine_format": "fp4"}, "^combine_format: expected one of"),
        ({"expert_row_capacity": 0}, "expert_row_capacity: expected a positive"),
        ({"input_scale": 1.0}, "input_scale: expected a positive number, with nvfp4"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ranks(1, torch.device("cpu"), "torch", **{**SETTINGS, **change})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("max_tokens", "mode", "others"),
    [(12, "packed", 12), (12, "indexed", 5), (5, "packed", 12), (600, "packed", 40), (600, "indexed", 600)],
)
def test_ranks_in_different_exchanges_are_told_of_it(
    max_tokens: int, mode: str, others: int, engine: str, device: torch.device, seed: int
) -> None:
    """Tokens that are for another layer, or another size of steps, are not taken for those of this one."""
    if max_tokens > 100 and device.type == "cpu" and engine != "torch":
        pytest.skip("takes too long where kernels are interpreted or emulated")
    settings = {**SETTINGS, "token_format": "nvfp4", "mode": mode, "max_tokens_per_rank": max_tokens}
    ranks = Ranks(3, device, engine, **settings, other_tokens=others)
    inputs = [rank_input(seed, r, 4, 256, 7, 3).to(device) for r in range(3)]
    arrived = ranks.dispatch(inputs)
    ranks.combine(arrived, [expert_rows(a, 256, seed, torch.bfloat16) for a in arrived])
    dispatchers = [ranks.others[r] if r == 1 else ranks.dispatchers[r] for r in range(3)]
    handles = [d.dispatch_send(i.x, i.topk_idx, i.topk_weights) for d, i in zip(dispatchers, inputs, strict=True)]
    text = (
        r"dispatch_wait of epoch 2: rank (1 was in exchange 1 of the context, rank [02] in 0|[02] .* rank 1 in 1): all"
    )
    for dispatcher, handle, context in zip(dispatchers, handles, ranks.contexts, strict=True):
        with pytest.raises(StepMismatchError, match=text):
            arrived_here = dispatcher.dispatch_wait(handle)
            assert int(arrived_here.group_offsets[-1]) <= arrived_here.capacity
            context.check_peers()
