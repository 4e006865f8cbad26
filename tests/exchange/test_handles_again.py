"""Handles that are combined again, with later weights, and rows padded for each expert: every engine, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime.dispatcher.handle import CombineSink, DispatchHandle
from moe_runtime.kernels.exchange import cuda, plan
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from tests.emulator import Emulator
from tests.support.comparison import assert_same_bits
from tests.support.emulated_steps import assert_is_found
from tests.support.exchange_data import RankInput, expected_combine, expected_groups, rank_input
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import (
    ENGINES,
    HOPPER,
    SETTINGS,
    Ranks,
    emulator,
    needs_hopper,
    poisoned_memory,
    pretend_sms,
)

__all__ = ["emulator", "poisoned_memory"]

WORLD, HIDDEN, EXPERTS, TOP_K, TOKENS = 3, 256, 7, 3, 5
COUNTS = (5, 0, 3)
CPU = torch.device("cpu")


def inputs_of(seed: int) -> list[RankInput]:
    return [rank_input(seed, rank, COUNTS[rank], HIDDEN, EXPERTS, TOP_K) for rank in range(WORLD)]


def ranks_of(engine: str, device: torch.device, **settings: Any) -> Ranks:
    ranks = Ranks(WORLD, device, engine, **{**SETTINGS, "reusable_handles": True, **settings})
    for dispatcher in ranks.dispatchers:
        if engine == HOPPER and device.type == "cpu" and dispatcher._routing_only is not None:
            dispatcher._routing_only._use(cuda)
    return ranks


def combine_again(
    ranks: Ranks, handles: list[DispatchHandle], outputs: list[torch.Tensor], weights: list[torch.Tensor] | None
) -> list[torch.Tensor]:
    """One more combine on all ranks, a stage at a time."""
    renewed = [
        d.renew(handle, None if weights is None else weights[rank])
        for rank, (d, handle) in enumerate(zip(ranks.dispatchers, handles, strict=True))
    ]
    combiners = [d._routing_only for d in ranks.dispatchers]
    for combiner, handle, output in zip(combiners, renewed, outputs, strict=True):
        assert combiner is not None
        combiner.combine_send(output, handle)
    return [combiner.combine_recv(handle) for combiner, handle in zip(combiners, renewed, strict=True) if combiner]


def outputs_of(ranks: Ranks, seed: int, device: torch.device) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = ranks.dispatchers[0].geometry.row_capacity, HIDDEN
    return [torch.randn(shape, generator=g).to(device=device, dtype=torch.bfloat16) for _ in range(WORLD)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wire", ["bf16", "fp8_block"])
def test_a_handle_is_combined_again_and_later(engine: str, wire: str, device: torch.device, seed: int) -> None:
    """Later combines give the bits of a first one with those weights, whatever has been dispatched between."""
    data = [i.to(device) for i in inputs_of(seed)]
    later = [torch.rand(i.topk_weights.shape, device=device) for i in data]
    again = ranks_of(engine, device, combine_format=wire)
    outputs = outputs_of(again, seed, device)
    arrived = again.dispatch(data)
    first = again.combine(arrived, outputs)
    for turn in range(4):
        if turn == 2:
            # Steps between: the halves of the first one hold other tokens.
            for other in (seed + 1, seed + 2):
                others = [i.to(device) for i in inputs_of(other)]
                again.combine(again.dispatch(others), outputs)
        weights = later if turn % 2 else None
        ys = combine_again(again, [a.handle for a in arrived], outputs, weights)
        expected = first
        if weights is not None:
            fresh = ranks_of(engine, device, combine_format=wire)
            moved = [RankInput(i.x, i.topk_idx, w) for i, w in zip(data, weights, strict=True)]
            expected = fresh.combine(fresh.dispatch(moved), outputs)
        for rank in range(WORLD):
            assert_same_bits(ys[rank], expected[rank], f"rank {rank}, turn {turn}")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rings that come round, blocks with several tokens, and tokens in parts."""
    monkeypatch.setattr(plan, "MAX_PLACES", 2)
    monkeypatch.setattr(plan, "TOKENS_IN_PARTS", 1)
    pretend_sms(monkeypatch, 2)
    forget_plans()
    yield
    forget_plans()


def run_combines_again(emulator: Emulator, seed: int) -> None:
    """Ranks that do not wait for each other, kernels that begin while those before them run."""
    data = inputs_of(seed)
    later = [torch.rand(i.topk_weights.shape) for i in data]
    plain, ranks = ranks_of("torch", CPU), ranks_of(HOPPER, CPU)
    outputs = outputs_of(plain, seed, CPU)
    arrived = plain.dispatch(data)
    expected = [plain.combine(arrived, outputs)]
    expected += [combine_again(plain, [a.handle for a in arrived], outputs, w) for w in (later, None, later)]
    found: list[list[torch.Tensor]] = [[] for _ in expected]
    with emulator.together() as choose:
        for rank, (own, output) in enumerate(zip(ranks.dispatchers, outputs, strict=True)):
            choose(rank)
            got = own.dispatch(*data[rank])
            for turn in range(4):
                weights = None if turn % 2 == 0 else later[rank]
                found[turn].append(own.combine(output, got.handle, topk_weights=weights))
    for turn, ys in enumerate(found):
        for rank in range(WORLD):
            assert_same_bits(ys[rank], expected[turn][rank], f"rank {rank}, turn {turn}")


@needs_hopper
@pytest.mark.cpu_only
def test_combines_that_await_tokens_run_in_any_order(emulator: Emulator, seed: int) -> None:
    for turn in range(3):
        run_combines_again(emulator, seed + turn)


@needs_hopper
@pytest.mark.cpu_only
@pytest.mark.usefixtures("small")
def test_combines_that_await_tokens_go_round_their_rings(emulator: Emulator, seed: int) -> None:
    for turn in range(3):
        run_combines_again(emulator, seed + turn)


@needs_hopper
@pytest.mark.cpu_only
def test_a_combine_that_does_not_await_tokens_is_found(emulator: Emulator, seed: int) -> None:
    edits = r"bool failed = lost \|\| await_slots\([^;]*;", "bool failed = lost;"
    assert_is_found(edits, emulator, lambda turn: run_combines_again(emulator, seed + turn))


@needs_hopper
@pytest.mark.cpu_only
@pytest.mark.usefixtures("small")
def test_rows_that_are_loaded_over_others_are_found(emulator: Emulator, seed: int) -> None:
    """The warp that brings rows waits for nobody."""
    edits = r"(void load\([^{]*\{[^;]*;\s*)barrier_wait\([^;]*;", r"\1"
    assert_is_found(edits, emulator, lambda turn: run_combines_again(emulator, seed + turn))


@needs_hopper
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("stops_at", [0, 1, None])
def test_a_combine_that_awaits_tokens_names_who_does_not_come(
    stops_at: int | None, emulator: Emulator, device: torch.device, seed: int
) -> None:
    if device.type != "cpu":
        pytest.skip("the emulator draws the order")
    data = inputs_of(seed)
    ranks = ranks_of(HOPPER, CPU)
    outputs = outputs_of(ranks, seed, CPU)
    with emulator.together() as choose:
        for rank, (own, output) in enumerate(zip(ranks.dispatchers, outputs, strict=True)):
            choose(rank)
            got = own.dispatch(*data[rank])
            if rank == 2 and stops_at == 0:
                continue
            if rank == 2:
                combiner, given = own._routing_only, got.handle
                assert combiner is not None
                # Where it does not stop, it brings a wrong id, which its abort message tells.
                ids = data[rank].topk_idx if stops_at == 1 else torch.full_like(data[rank].topk_idx, EXPERTS)
                renewed = combiner.send_routing(ids, data[rank].topk_weights, given.positions, output.shape[0])
                if stops_at is None:
                    combiner.combine(output, renewed)
                continue
            own.combine(output, got.handle, topk_weights=data[rank].topk_weights)
    for rank in (0, 1):
        assert int(ranks.contexts[rank].error[0]) != 0 and int(ranks.contexts[rank].error[1]) == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block"])
def test_rows_are_padded_for_each_expert(engine: str, fmt: str, device: torch.device, seed: int) -> None:
    data = inputs_of(seed)
    slots = WORLD * TOKENS
    ranks = ranks_of(engine, device, token_format=fmt)
    placed = [i.to(device) for i in data]
    handles = [d.dispatch_send(*i) for d, i in zip(ranks.dispatchers, placed, strict=True)]
    plain = Ranks(WORLD, device, "torch", **{**SETTINGS, "token_format": fmt})
    wanted = plain.dispatch(placed)
    for rank, (dispatcher, handle, want) in enumerate(zip(ranks.dispatchers, handles, wanted, strict=True)):
        geometry = dispatcher.geometry
        row_bytes = HIDDEN * (1 if fmt == "fp8_block" else 2)
        out = PaddedRows.allocate(
            geometry.num_local_experts,
            slots,
            row_bytes,
            WORLD,
            TOP_K,
            device=device,
            kind=PaddedScales.COLUMNS if fmt == "fp8_block" else PaddedScales.NONE,
            num_scales=2 if fmt == "fp8_block" else 0,
        )
        statistics = torch.full((geometry.num_local_experts,), 7, dtype=torch.int32, device=device)
        dispatcher.dispatch_recv_padded(handle, out, statistics=statistics)
        offsets = want.group_offsets.tolist()
        assert want.row_index is not None
        landed = want.rows.view(torch.uint8)[want.row_index[: offsets[-1]].long()]
        for e in range(geometry.num_local_experts):
            begin, end = offsets[e], offsets[e + 1]
            count = end - begin
            assert int(out.counts[e]) == count and int(statistics[e]) == 7 + count
            assert torch.equal(out.rows[e, :count], landed[begin:end])
            if out.scales is not None:
                assert want.scales is not None
                assert torch.equal(out.scales[e, :count], want.scales[begin:end])
            expert = geometry.first_expert + e
            came = [
                (r, t) for r, i in enumerate(data) for t in (i.topk_idx == expert).any(dim=1).nonzero()[:, 0].tolist()
            ]
            assert out.source_tokens[e, :count].tolist() == [t for _, t in came]
            first = 0
            for r in range(WORLD):
                rows = sum(1 for source, _ in came if source == r)
                assert int(out.layout_range[e, r]) == first << 32 | rows
                first += rows
            for row, (r, t) in enumerate(came):
                k = data[r].topk_idx[t].tolist().index(expert)
                assert int(out.positions[r * TOKENS + t, k]) == e * slots + row
        assert int((out.positions >= 0).sum()) == offsets[-1], f"rank {rank}"


def test_handles_are_used_once_unless_asked_for(device: torch.device, seed: int) -> None:
    data = [i.to(device) for i in inputs_of(seed)]
    ranks = Ranks(WORLD, device, "torch", **SETTINGS)
    arrived = ranks.dispatch(data)
    with pytest.raises(ValueError, match="handle: expected one of a dispatcher with reusable_handles"):
        ranks.dispatchers[0].renew(arrived[0].handle)
    own, mine = Ranks(1, device, "torch", **SETTINGS, reusable_handles=True).dispatchers[0], data[0]
    handle = own.dispatch_send(*mine)
    with pytest.raises(ValueError, match="handle: expected dispatch_recv of it first"):
        own.renew(handle)


def test_renewed_handles_are_combined_by_their_dispatcher(device: torch.device, seed: int) -> None:
    """As `combine` does with a handle that was combined before, in one call and in two halves."""
    data, g = inputs_of(seed)[0].to(device), torch.Generator().manual_seed(seed)
    own = Ranks(1, device, "torch", **SETTINGS, reusable_handles=True).dispatchers[0]
    later = torch.rand(data.topk_weights.shape, generator=g).to(device)
    handle = own.dispatch(*data).handle
    output = torch.randn(own.geometry.row_capacity, HIDDEN, generator=g).to(device, torch.bfloat16)
    wanted = own.combine(output, handle, topk_weights=later)
    assert_same_bits(own.combine(output, own.renew(handle, later)), wanted, "at once")
    renewed, out = own.renew(handle, later), torch.empty_like(wanted)
    own.combine_send(output, renewed, out=out)
    assert own.combine_recv(renewed) is out
    assert_same_bits(out, wanted, "in halves")
    with pytest.raises(ValueError, match="handle: it belongs to another dispatcher"):
        own.combine(output, renewed)


def test_rows_of_a_later_combine_are_of_its_handle(device: torch.device, seed: int) -> None:
    data = inputs_of(seed)[0].to(device)
    own = Ranks(1, device, "torch", **SETTINGS, reusable_handles=True).dispatchers[0]
    first, second = (own.dispatch(*data).handle for _ in range(2))
    with pytest.raises(ValueError, match="expert_output: expected a CombineSink of the same handle"):
        own.combine(CombineSink(first), second, topk_weights=data.topk_weights)


@pytest.mark.parametrize(
    ("rows", "scales", "wrong"),
    [
        ((12,), 0, "out.rows: expected rows of a multiple of 8 bytes, got 12"),
        ((), 0, r"out.rows: expected \[7, 5, 512\], got \[7, 5\]"),
        ((128,), 6, "out.num_scales: expected a multiple of 4, the scales of a word, got 6"),
    ],
)
def test_padded_rows_that_kernels_would_cut_are_refused(
    rows: tuple[int, ...], scales: int, wrong: str, device: torch.device, seed: int
) -> None:
    data = inputs_of(seed)[0].to(device)
    own = Ranks(1, device, "torch", **SETTINGS, mode="gathered").dispatchers[0]
    handle = own.dispatch_send(*data)
    kind = PaddedScales.PACKED_COLUMNS if scales else PaddedScales.NONE
    out = PaddedRows.allocate(EXPERTS, TOKENS, 16, 1, TOP_K, device=device, kind=kind, num_scales=scales)
    out = replace(out, rows=torch.zeros(EXPERTS, TOKENS, *rows, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match=wrong):
        own.dispatch_recv_padded(handle, out)


def padded_of(dispatcher: Any) -> PaddedRows:
    experts = dispatcher.geometry.num_local_experts
    return PaddedRows.allocate(experts, WORLD * TOKENS, 2 * HIDDEN, WORLD, TOP_K, device=CPU)


def assert_arrived(step: list[RankInput], starts: tuple[int, ...], rank: int, out: PaddedRows) -> None:
    for e, came in enumerate(expected_groups(step, range(starts[rank], starts[rank + 1]))):
        assert int(out.counts[e]) == len(came)
        for row, (source, token, _) in enumerate(came):
            assert torch.equal(out.rows[e, row], step[source].x[token].view(torch.uint8)), (rank, e, row)


def assert_all_arrived(ranks: Ranks, steps: list[list[RankInput]], arrived: list[list[PaddedRows]]) -> None:
    """`arrived` is by rank and step."""
    for rank, own in enumerate(ranks.dispatchers):
        assert int(own.context.error[0]) == 0
        for step, out in zip(steps, arrived[rank], strict=True):
            assert_arrived(step, own.geometry.starts, rank, out)


def run_sends_ahead(emulator: Emulator, seed: int) -> None:
    """Two steps are sent before either is received: nothing but flags keeps a rank from writing what a peer reads."""
    inputs = [[rank_input(seed + s, r, TOKENS, HIDDEN, EXPERTS, TOP_K) for r in range(WORLD)] for s in range(7)]
    ranks = ranks_of(HOPPER, CPU, token_format="bf16", mode="gathered")
    arrived: list[list[PaddedRows]] = [[] for _ in range(WORLD)]
    with emulator.together() as choose:
        for rank, own in enumerate(ranks.dispatchers):
            choose(rank)
            for first in (0, 1, 3, 5):
                data = [inputs[number][rank] for number in range(first, first + (2 if first else 1))]
                handles = [own.dispatch_send(*one) for one in data]
                for handle in handles:
                    arrived[rank].append(padded_of(own))
                    own.dispatch_recv_padded(handle, arrived[rank][-1])
    assert_all_arrived(ranks, inputs, arrived)


@needs_hopper
@pytest.mark.cpu_only
def test_padded_steps_that_are_sent_ahead(emulator: Emulator, seed: int) -> None:
    for turn in range(3):
        run_sends_ahead(emulator, seed + turn)


def padded_rows(out: PaddedRows) -> torch.Tensor:
    return out.rows.view(torch.bfloat16).view(-1, HIDDEN)


def run_combines_before_receiving(emulator: Emulator, seed: int) -> None:
    """A step is sent, the one before it combined, and only then is it received; then each is combined at once."""
    steps = 8
    inputs = [[rank_input(seed + s, r, TOKENS, HIDDEN, EXPERTS, TOP_K) for r in range(WORLD)] for s in range(steps)]
    ranks = ranks_of(HOPPER, CPU, token_format="bf16", mode="gathered")
    arrived: list[list[PaddedRows]] = [[] for _ in range(WORLD)]
    with emulator.together() as choose:
        for rank, own in enumerate(ranks.dispatchers):
            choose(rank)
            handles: list[DispatchHandle] = []
            for number, step in enumerate(inputs):
                data = step[rank]
                handles.append(own.dispatch_send(*data))
                if 0 < number < steps // 2:
                    combine_padded(own, inputs[number - 1][rank], handles[-2], arrived[rank][-1])
                arrived[rank].append(padded_of(own))
                own.dispatch_recv_padded(handles[-1], arrived[rank][-1])
                if number >= steps // 2:
                    combine_padded(own, data, handles[-1], arrived[rank][-1])
    assert_all_arrived(ranks, inputs, arrived)


def combine_padded(own: Any, data: RankInput, handle: DispatchHandle, out: PaddedRows, factor: float = 1.0) -> Any:
    combiner, rows = own._routing_only, padded_rows(out)
    weights = factor * data.topk_weights
    renewed = combiner.send_routing(data.topk_idx, weights, out.positions, rows.shape[0], handle)
    combiner.combine_send(rows, renewed)
    return combiner.combine_recv(renewed)


@needs_hopper
@pytest.mark.cpu_only
def test_padded_steps_that_are_sent_before_another_is_combined(emulator: Emulator, seed: int) -> None:
    for turn in range(3):
        run_combines_before_receiving(emulator, seed + turn)


@needs_hopper
@pytest.mark.cpu_only
def test_a_half_that_is_given_back_too_early_is_found(emulator: Emulator, seed: int) -> None:
    """A combine gives back the tokens of the dispatch before it, whoever brought its rows."""
    edits = r"const int of = load_relaxed\(received\);", "const int of = epoch - 1;"
    assert_is_found(edits, emulator, lambda turn: run_combines_before_receiving(emulator, seed + turn))


@needs_hopper
@pytest.mark.cpu_only
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tells", [False, True])
def test_padded_rows_name_who_does_not_come(tells: bool, emulator: Emulator, seed: int) -> None:
    """A rank that stops, or that brings a wrong id: no rows, and nobody waits for longer than its limit."""
    data = inputs_of(seed)
    ranks = ranks_of(HOPPER, CPU, token_format="bf16", mode="gathered")
    arrived: list[list[PaddedRows]] = [[] for _ in range(WORLD)]
    with emulator.together() as choose:
        for rank, own in enumerate(ranks.dispatchers):
            choose(rank)
            for step in range(2):
                mine = data[rank]
                ids = mine.topk_idx
                if (rank, step) == (2, 1):
                    if not tells:
                        break
                    ids = torch.full_like(ids, EXPERTS)
                handle = own.dispatch_send(mine.x, ids, mine.topk_weights)
                arrived[rank].append(padded_of(own))
                own.dispatch_recv_padded(handle, arrived[rank][-1])
    for rank in range(WORLD) if tells else (0, 1):
        assert int(ranks.contexts[rank].error[0]) != 0 and int(ranks.contexts[rank].error[1]) == 2
        # Rank 2 is ahead of others when it tells: they may still wait in the step before, and then give that up.
        if rank == 2 or not tells:
            assert_arrived(data, ranks.dispatchers[0].geometry.starts, rank, arrived[rank][0])
        if not tells:
            assert arrived[rank][1].counts.tolist() == [0] * len(arrived[rank][1].counts)
            assert int((arrived[rank][1].positions >= 0).sum()) == 0


@needs_hopper
@pytest.mark.parametrize("turn", range(3))
def test_padded_steps_run_in_any_order(turn: int, emulator: Emulator, device: torch.device, seed: int) -> None:
    """Steps of padded rows, some of them combined twice: a rank may begin the next one while its peers are behind."""
    if device.type != "cpu":
        pytest.skip("the emulator draws the order")
    steps = 7
    combined = (0, 5)
    inputs = [inputs_of(seed + turn * 100 + step) for step in range(steps)]
    ranks = ranks_of(HOPPER, CPU, token_format="bf16", mode="gathered")
    sums: list[list[torch.Tensor]] = [[] for _ in range(WORLD)]
    arrived: list[list[PaddedRows]] = [[] for _ in range(WORLD)]
    with emulator.together() as choose:
        for rank, own in enumerate(ranks.dispatchers):
            choose(rank)
            for number, step in enumerate(inputs):
                data = step[rank]
                handle = own.dispatch_send(*data)
                out = padded_of(own)
                own.dispatch_recv_padded(handle, out)
                arrived[rank].append(out)
                if number not in combined:
                    continue
                sums[rank] += [combine_padded(own, data, handle, out, factor) for factor in (1.0, 2.0)]
    assert_all_arrived(ranks, inputs, arrived)
    starts = ranks.dispatchers[0].geometry.starts
    for rank in range(WORLD):
        for number, y in enumerate(sums[rank]):
            data, factor = inputs[combined[number // 2]][rank], (1.0, 2.0)[number % 2]
            row_of = {
                (t, k): data.x[t].float().numpy()
                for t in range(data.x.shape[0])
                for k in range(TOP_K)
                if data.topk_idx[t, k] >= 0
            }
            weighted = RankInput(data.x, data.topk_idx, factor * data.topk_weights)
            for token in range(data.x.shape[0]):
                want = torch.from_numpy(expected_combine(weighted, starts, row_of, token))
                assert torch.equal(y[token], want.to(torch.bfloat16)), (rank, number, token)
