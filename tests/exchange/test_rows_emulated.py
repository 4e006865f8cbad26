"""Counts and rows of normal mode emulated on the CPU, against a plain model, in any order of lanes and ranks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moe_runtime.comm.errors import CapacityError, MoERuntimeError, PeerTimeoutError
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.deep_ep import direct_dispatch
from moe_runtime.deep_ep.direct_dispatch import StartedDispatch
from moe_runtime.deep_ep.normal import NormalExchange
from moe_runtime.deep_ep.normal_handle import Form, Received, TokenLayout, Tokens
from moe_runtime.kernels.exchange import row_sums, rows
from moe_runtime.kernels.exchange.layout import dispatch_layout
from tests.emulator import Emulator, needs_emulator
from tests.support.comparison import assert_same_bits
from tests.support.emulated_steps import assert_is_found, begin_at
from tests.support.exchange_data import order_sensitive
from tests.support.virtual_exchange import emulator, poisoned_memory

__all__ = ["emulator", "poisoned_memory"]

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
TOP_K, LOCAL = 3, 4
SIZES = ((1, 1, 1, 2, 1), (2, 2, 2, 3, 4), (1, 4, 3, 4, 2), (2, 1, 3, 2, 4), (1, 2, 1, 4, 1))
"""`SUM_WARPS`, `COUNT_WARPS`, `MOST_WARPS`, `MOST_STAGES` and `FLAGS_TOGETHER`: few, since kernels are compiled for
each."""


@pytest.fixture(autouse=True)
def few_sms(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Draws how many blocks and warps there are."""
    draw = random.Random(seed)
    sms = draw.choice((1, 2, 3))
    for module in (rows, row_sums):
        monkeypatch.setattr(module, "most_sms", lambda device: sms)
    sum_warps, count_warps, warps, stages, together = draw.choice(SIZES)
    monkeypatch.setattr(row_sums, "SUM_WARPS", sum_warps)
    monkeypatch.setattr(row_sums, "MOST_SUM_WARPS", 4)
    monkeypatch.setattr(rows, "COUNT_WARPS", count_warps)
    monkeypatch.setattr(rows, "MOST_WARPS", warps)
    monkeypatch.setattr(rows, "MOST_STAGES", stages)
    monkeypatch.setattr(rows, "FLAGS_TOGETHER", together)
    rows.forget_macros()
    row_sums.sum_macros.cache_clear()


@dataclass(frozen=True)
class Case:
    """What a rank brings: tokens of a form, int64 `[T, K]` and fp32 `[T, K]`."""

    x: Tokens
    ids: torch.Tensor
    weights: torch.Tensor

    def goes_to(self, rank: int) -> torch.Tensor:
        return ((self.ids >= rank * LOCAL) & (self.ids < (rank + 1) * LOCAL)).any(dim=1)

    def layout(self, world: int) -> TokenLayout:
        per_rank, per_expert, in_rank = dispatch_layout(self.ids, world * LOCAL, world, engine="torch")
        return in_rank, per_rank, per_expert


def strided(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """The same numbers, maybe by column, or with a gap between rows."""
    if draw.random() < 0.3:
        return tensor.t().contiguous().t()
    if draw.random() < 0.3:
        return torch.cat([tensor, tensor], dim=1)[:, : tensor.shape[1]]
    return tensor


def case_of(seed: int, rank: int, count: int, world: int, hidden: int, fp8: bool) -> Case:
    g, draw = torch.Generator().manual_seed(seed * 7919 + rank), random.Random(seed * 31 + rank)
    ids = torch.randint(0, world * LOCAL, (count, TOP_K), generator=g)
    ids = torch.where(torch.rand(ids.shape, generator=g) < draw.choice((0.0, 0.3, 0.8)), -1, ids)
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.05, world * LOCAL + 3, ids)
    weights = torch.randn(count, TOP_K, generator=g)
    x: Tokens
    if fp8:
        quants = torch.randint(0, 256, (count, hidden), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
        x = quants, strided(torch.randn(count, hidden // 128, generator=g), draw)
    else:
        x = torch.randn(count, hidden, generator=g).to(torch.bfloat16)
    return Case(x, strided(ids, draw), strided(weights, draw))


def exchanges(
    world: int, hidden: int, room: int, num_sms: int | None = None, fresh: bool = False
) -> list[NormalExchange]:
    heaps = PrivateHeap.group(world, CPU)
    contexts = [ExpertParallelContext(heap=heap, timeout_s=5, startup_timeout_s=6) for heap in heaps]
    found = [NormalExchange(context, hidden, room, direct=True) for context in contexts]
    for exchange, heap in zip(found, heaps, strict=True):
        exchange.num_sms = num_sms
        for region in () if fresh else ("token_flags", "landing"):
            heap.tensor(region).fill_(0xCD)
    return found


def parts(x: Tokens) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def check(got: Received, cases: list[Case], rank: int, num_rows: int | None = None, with_ids: bool = True) -> None:
    """Every row is the token that it must be, and the handle says so."""
    world = len(cases)
    arriving = [(s, t) for s, case in enumerate(cases) for t in case.goes_to(rank).nonzero()[:, 0].tolist()]
    came = len(arriving)
    total = came if num_rows is None else num_rows
    for number, part in enumerate(parts(got.tokens)):
        assert part.shape[0] == total
        for row, (s, t) in enumerate(arriving):
            assert_same_bits(part[row], parts(cases[s].x)[number][t], f"part {number} of row {row} of rank {rank}")
    if with_ids:
        assert got.topk_idx is not None and got.topk_weights is not None
        for row, (s, t) in enumerate(arriving):
            local = cases[s].ids[t] - rank * LOCAL
            here = (local >= 0) & (local < LOCAL)
            assert torch.equal(got.topk_idx[row], torch.where(here, local, -1))
            assert torch.equal(got.topk_weights[row], torch.where(here, cases[s].weights[t], 0.0))
        assert (got.topk_idx[came:] == -1).all() and (got.topk_weights[came:] == 0).all()
        assert got.kept_ids is None or torch.equal(got.kept_ids, got.topk_idx)
    prefix, source_tokens = got.handle[0], got.handle[3]
    assert prefix is not None and source_tokens is not None
    assert source_tokens[:came].tolist() == [t for _, t in arriving]
    for to in range(world):
        upto = torch.tensor([int(case.goes_to(to).sum()) for case in cases]).cumsum(0)
        assert prefix[:, to].tolist() == upto.tolist()
    of_experts = [
        sum(int((case.ids[case.goes_to(rank)] == rank * LOCAL + e).sum()) for case in cases) for e in range(LOCAL)
    ]
    assert got.handle.route is not None and got.handle.route.experts.tolist() == of_experts
    assert got.handle.tokens_of_experts in (None, of_experts)


def start_all(
    ranks: list[NormalExchange], cases: list[Case], emulator: Emulator, begin: Callable[[NormalExchange, Case], Any]
) -> list[Any]:
    """What `begin` gives for each rank, whose kernels run beside each other."""
    found = []
    with emulator.together() as choose:
        for rank, (exchange, case) in enumerate(zip(ranks, cases, strict=True)):
            choose(rank)
            found.append(begin(exchange, case))
    return found


def started(exchange: NormalExchange, case: Case, **how: Any) -> StartedDispatch:
    worst, from_ids = how.pop("worst", 0), how.pop("from_ids", False)
    world = exchange.context.world_size
    layout = None if from_ids else case.layout(world)
    direct = exchange._direct
    assert direct is not None
    direct.num_sms = exchange.num_sms
    form = Form(world * LOCAL, worst, keeps_ids=True, **how)
    return direct.start(case.x, layout, case.ids, case.weights, form)


def finish_all(begun: list[StartedDispatch], emulator: Emulator) -> list[Received]:
    return start_all(begun, begun, emulator, lambda _, one: one.finish())  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_are_the_tokens_that_were_sent(world: int, fp8: bool, emulator: Emulator, seed: int) -> None:
    """Dispatches one after the other, of all numbers of tokens, with the host waiting for the counts and without."""
    draw = random.Random(seed)
    hidden, room = draw.choice((128, 256)), 12
    ranks = exchanges(world, hidden, room, draw.choice((None, 2)))
    for turn in range(4):
        counts = [draw.choice((0, 1, room, draw.randint(0, room))) for _ in range(world)]
        cases = [case_of(seed + turn, r, counts[r], world, hidden, fp8) for r in range(world)]
        how: dict[str, Any] = {"from_ids": draw.random() < 0.5, "scales_by_column": draw.random() < 0.5}
        if turn % 2:
            worst = world * room + 3

            def whole(exchange: NormalExchange, case: Case, how: Any = how, worst: int = worst) -> Received:
                return started(exchange, case, worst=worst, **how).finish()

            got = start_all(ranks, cases, emulator, whole)
        else:
            worst = 0
            got = finish_all(start_all(ranks, cases, emulator, lambda e, c, how=how: started(e, c, **how)), emulator)
        for rank in range(world):
            check(got[rank], cases, rank, worst or None)
            assert (got[rank].handle.tokens_of_experts is None) == bool(worst)
        # Others take the same way.
        others = [case_of(seed + 50 + turn, r, counts[r], world, hidden, fp8) for r in range(world)]
        handles = {id(e): g.handle for e, g in zip(ranks, got, strict=True)}
        again = start_all(ranks, others, emulator, lambda e, c, handles=handles: e.dispatch_again(c.x, handles[id(e)]))
        for rank in range(world):
            arriving = [(s, t) for s, case in enumerate(cases) for t in case.goes_to(rank).nonzero()[:, 0].tolist()]
            for number, part in enumerate(parts(again[rank].tokens)):
                for row, (s, t) in enumerate(arriving):
                    assert_same_bits(part[row], parts(others[s].x)[number][t], f"part {number} of row {row} again")
    for exchange in ranks:
        exchange.context.check_peers()


def test_rows_before_their_number_take_no_more_room_than_could_come(
    emulator: Emulator, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a dispatch in which this rank had hardly a token, and its peer many. And without memory for so many."""
    world, hidden, room, asked, refused = 2, 128, 32, list[int](), list[StartedDispatch]()
    ranks, make_room, scarce = exchanges(world, hidden, room), direct_dispatch._make_room, False

    def watched(begun: StartedDispatch, num_rows: int, *more: Any) -> Any:
        asked.append(num_rows)
        # The first time is before the number is known.
        if scarce and not any(begun is one for one in refused):
            refused.append(begun)
            raise torch.OutOfMemoryError
        return make_room(begun, num_rows, *more)

    monkeypatch.setattr(direct_dispatch, "_make_room", watched)
    for counts in ([0, room], [1, room], [room, room], [room, room]):
        cases = [case_of(seed, rank, count, world, hidden, fp8=False) for rank, count in enumerate(counts)]
        got = finish_all(start_all(ranks, cases, emulator, started), emulator)
        for rank in range(world):
            check(got[rank], cases, rank)
        scarce = counts[0] == room
    assert max(asked) <= world * room * 9 // 8 + 1 and len(refused) == world


@pytest.mark.parametrize("epoch", [-2, ~0x01010101 - 1])
def test_flags_that_nobody_has_written_stand_for_no_row(epoch: int, emulator: Emulator, seed: int) -> None:
    """Such flags are 0 in the half of odd epochs and 0x01010101 in the other."""
    for turn in range(8):
        ranks = exchanges(2, 128, 12, fresh=True)
        begin_at([exchange.context for exchange in ranks], epoch)
        cases = [case_of(seed + turn, r, 12, 2, 128, False) for r in range(2)]
        got = start_all(ranks, cases, emulator, lambda e, c: started(e, c, worst=27).finish())
        for rank in range(2):
            check(got[rank], cases, rank, 27)


@pytest.mark.parametrize("world", [1, 2])
def test_more_tokens_than_a_step_has_room_for(world: int, emulator: Emulator, seed: int) -> None:
    ranks = exchanges(world, 128, 4)
    cases = [case_of(seed, r, (11, 3)[r], world, 128, True) for r in range(world)]
    got = finish_all(start_all(ranks, cases, emulator, started), emulator)
    for rank in range(world):
        check(got[rank], cases, rank)
    others = [case_of(seed + 1, r, (11, 3)[r], world, 128, True) for r in range(world)]
    handles = {id(e): g.handle for e, g in zip(ranks, got, strict=True)}
    again = start_all(ranks, others, emulator, lambda e, c: e.dispatch_again(c.x, handles[id(e)]))
    for rank in range(world):
        arriving = [(s, t) for s, case in enumerate(cases) for t in case.goes_to(rank).nonzero()[:, 0].tolist()]
        for number, part in enumerate(parts(again[rank].tokens)):
            for row, (s, t) in enumerate(arriving):
                assert_same_bits(part[row], parts(others[s].x)[number][t], f"part {number} of row {row} again")


@pytest.mark.parametrize("world", [1, 3])
def test_rows_that_stay_where_they_landed(world: int, emulator: Emulator, seed: int) -> None:
    """For expanding them: records are whole, and `row_index` finds them."""
    ranks = exchanges(world, 256, 9)
    for turn in range(2):
        cases = [case_of(seed + turn, r, random.Random(seed + r).randint(0, 9), world, 256, True) for r in range(world)]
        how = {"max_tokens": 9, "to_expand": True, "from_ids": True}
        got = finish_all(start_all(ranks, cases, emulator, lambda e, c, how=how: started(e, c, **how)), emulator)
        for rank, one in enumerate(got):
            landed, layout = one.landed, one.layout
            assert landed is not None and one.x is None
            arriving = [(s, t) for s, case in enumerate(cases) for t in case.goes_to(rank).nonzero()[:, 0].tolist()]
            assert landed.group_offsets.tolist() == [0, len(arriving)]
            for row, (s, t) in enumerate(arriving):
                record = landed.records[int(landed.row_index[row])]
                quants, scales = parts(cases[s].x)
                assert_same_bits(record[: layout.token_bytes], quants[t].view(torch.uint8), "tokens")
                assert_same_bits(record[layout.token_bytes : layout.ids_at].view(torch.float32), scales[t], "scales")
            (step,) = one.handle.steps
            wanted = torch.stack([torch.where(cases[rank].goes_to(to), to, -1) for to in range(world)], dim=1)
            assert torch.equal(step.entries, wanted.to(torch.int32))
            came = {s * step.room + t: row for row, (s, t) in enumerate(arriving)}
            assert step.positions[:, rank].tolist() == [came.get(slot, -1) for slot in range(world * step.room)]


def test_more_rows_than_the_caller_has_room_for(emulator: Emulator, seed: int) -> None:
    """Every rank learns of it, and nothing is written behind the rows."""
    ranks = exchanges(2, 128, 8)
    cases = [case_of(seed, r, 8, 2, 128, False) for r in range(2)]
    for case in cases:
        case.ids[:, 0] = 0
    got = start_all(ranks, cases, emulator, lambda e, c: started(e, c, worst=10).finish())
    assert got[0].x is not None and got[0].x.shape[0] == 10
    with pytest.raises(CapacityError, match="16 rows arrived at rank 0"):
        ranks[0].context.check_peers()
    with pytest.raises(MoERuntimeError):
        ranks[1].context.check_peers()


@pytest.mark.parametrize("stage", ["counts", "rows"])
def test_a_rank_that_does_not_come_is_named(stage: str, emulator: Emulator, seed: int) -> None:
    """In the counts by the host that waits for them, in the rows of a cached dispatch by the kernels."""
    ranks = exchanges(3, 128, 8)
    cases = [case_of(seed, r, 8, 3, 128, False) for r in range(3)]
    for case in cases:
        case.ids[:, 0] = 5
    if stage == "rows":
        got = finish_all(start_all(ranks, cases, emulator, started), emulator)
        handles = {id(e): g.handle for e, g in zip(ranks, got, strict=True)}
        start_all(ranks[:2], cases[:2], emulator, lambda e, c: e.dispatch_again(c.x, handles[id(e)]))
        for exchange in ranks[:2]:
            with pytest.raises(PeerTimeoutError, match="rank 2 did not answer"):
                exchange.context.check()
        return
    begun = start_all(ranks[:2], cases[:2], emulator, started)
    for one in begun:
        with pytest.raises(PeerTimeoutError, match="rank 2 did not answer"):
            one.finish()


def test_a_number_of_counts_is_not_taken_for_another(emulator: Emulator, seed: int) -> None:
    """The host waits for the counts of its own dispatch, also where those before were not awaited by it."""
    (rank,) = exchanges(1, 128, 8)
    for turn in range(3):
        case = case_of(seed + turn, 0, turn, 1, 128, False)
        started(rank, case, worst=8).finish()
        begun = started(rank, case)
        check(begun.finish(), [case], 0)
        with pytest.raises(MoERuntimeError, match="ended without counts"):
            assert rank._direct is not None
            rank._direct.kernels._ticket += 1
            rank._direct.kernels.await_counts(begun.route)
        rank._direct.kernels._ticket -= 1


def combined(
    case: Case, rank: int, of_rows: list[list[torch.Tensor]], biases: list[torch.Tensor], by_entry: bool
) -> torch.Tensor:
    """fp32 sums, biases first, then ranks ascending or in the order of their last entries in the token.

    `of_rows` are the rows of each rank, by source and token.
    """
    total, world = torch.zeros(case.ids.shape[0], of_rows[0][0].shape[1]), len(of_rows)
    for bias in biases:
        total += bias.float()
    for token, ids in enumerate(case.ids.tolist()):
        last = {id // LOCAL: k for k, id in enumerate(ids) if 0 <= id < world * LOCAL}
        for there in sorted(last, key=lambda there: last[there] if by_entry else there):
            total[token] += of_rows[there][rank][token].float()
    return total


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("room", [12, 5])
def test_rows_are_summed_at_home(world: int, room: int, emulator: Emulator, seed: int) -> None:
    """Combines of one handle, again and again, with weights and biases and without; in steps, too."""
    draw, hidden = random.Random(seed), 272
    ranks = exchanges(world, hidden, room, draw.choice((None, 2)))
    for turn in range(2):
        counts = [draw.choice((0, 1, 12, draw.randint(0, 12))) for _ in range(world)]
        cases = [case_of(seed + turn, r, count, world, hidden, False) for r, count in enumerate(counts)]
        got = finish_all(start_all(ranks, cases, emulator, started), emulator)
        by_entry = draw.random() < 0.5
        for case, one in zip(cases, got, strict=True):
            one.handle.home_ids = case.ids.contiguous() if by_entry else None
        for again in range(3):
            g = torch.Generator().manual_seed(seed * 91 + turn * 7 + again)
            num_biases, top_k = (turn + again) % 3, again * 4
            # By rank, source rank and token there.
            outputs = [[order_sensitive(count, hidden, generator=g).bfloat16() for count in counts] for _ in ranks]
            weights = [[order_sensitive(count, top_k, generator=g) for count in counts] for _ in ranks]
            biases = [[order_sensitive(n, hidden, generator=g).bfloat16() for _ in range(num_biases)] for n in counts]
            # Beside some ids, weights do not count.
            ids: list[torch.Tensor | None] = [None] * world
            if top_k and draw.random() < 0.5:
                drawn = [[torch.randint(-1, 2, (count, top_k), generator=g) for count in counts] for _ in ranks]
                ids = [torch.cat([i[c.goes_to(r)] for i, c in zip(drawn[r], cases, strict=True)]) for r in range(world)]

            def brought(of_rank: list[torch.Tensor], rank: int, cases: list[Case] = cases) -> torch.Tensor:
                return torch.cat([part[case.goes_to(rank)] for part, case in zip(of_rank, cases, strict=True)])

            found: list[Any] = []
            with emulator.together() as choose:
                for rank, exchange in enumerate(ranks):
                    choose(rank)
                    of_rows = strided(brought(weights[rank], rank), draw) if top_k else None
                    rows_here = brought(outputs[rank], rank)
                    given = tuple(biases[rank]), of_rows, ids[rank]
                    found.append(exchange.combine(rows_here, got[rank].handle, *given))
            for rank, (y, y_weights) in enumerate(found):
                wanted = combined(cases[rank], rank, outputs, biases[rank], by_entry).to(torch.bfloat16)
                assert_same_bits(y, wanted, f"sums of rank {rank}, {num_biases} biases")
                assert (y_weights is None) == (top_k == 0)
                if y_weights is not None:
                    counted = weights
                    if ids[0] is not None:
                        pairs = [list(zip(*pair, strict=True)) for pair in zip(weights, drawn, strict=True)]
                        counted = [[torch.where(i >= 0, w, 0.0) for w, i in pair] for pair in pairs]
                    wanted = combined(cases[rank], rank, counted, [], by_entry)
                    assert_same_bits(y_weights, wanted, f"weights of rank {rank}")
    for exchange in ranks:
        exchange.context.check_peers()


def test_sums_of_a_step_that_fails_are_nan(emulator: Emulator, seed: int) -> None:
    ranks = exchanges(2, 128, 8)
    cases = [case_of(seed, r, 8, 2, 128, False) for r in range(2)]
    for case in cases:
        case.ids[:, 0], case.ids[:, 1] = 1, LOCAL
    got = finish_all(start_all(ranks, cases, emulator, started), emulator)
    (y, weights) = ranks[0].combine(got[0].x, got[0].handle, (), torch.ones(16, 2))  # type: ignore[arg-type]
    assert weights is not None and y.isnan().all() and weights.isnan().all()
    with pytest.raises(PeerTimeoutError, match="rank 1 did not answer"):
        ranks[0].context.check()


def run_on(ranks: list[NormalExchange], emulator: Emulator, seed: int, *, in_a_ring: bool = False) -> None:
    """Dispatches and combines that no host waits for, all at once, so that ranks run ahead as far as they may.

    With `in_a_ring` tokens go to the next rank alone, which a rank then hears nothing of.
    """
    world, draw, turns = len(ranks), random.Random(seed), 6 if in_a_ring else 4
    first = [case_of(seed, r, draw.randint(6, 8), world, 128, False) for r in range(world)]
    for rank, case in enumerate(first):
        if in_a_ring:
            case.ids[:] = (rank + 1) % world * LOCAL
    cases = [
        [case_of(seed + 1 + turn, r, len(c.ids), world, 128, False) for r, c in enumerate(first)]
        for turn in range(turns)
    ]
    got: list[Any] = [[] for _ in ranks]
    again: list[Any] = [[] for _ in ranks]
    sums: list[Any] = [[] for _ in ranks]
    with emulator.together() as choose:
        for rank, exchange in enumerate(ranks):
            choose(rank)
            one = started(exchange, first[rank], worst=world * 8).finish()
            got[rank].append(one)
            for turn in range(turns):
                again[rank].append(exchange.dispatch_again(cases[turn][rank].x, one.handle))
                if turn % 2 and not in_a_ring:
                    sums[rank].append(exchange.combine(again[rank][-1].x, one.handle)[0])
    for rank in range(world):
        check(got[rank][0], first, rank, world * 8)
        here = [case.goes_to(rank) for case in first]
        copies = torch.stack([first[rank].goes_to(r) for r in range(world)]).sum(dim=0)[:, None]
        for turn in range(turns):
            wanted = torch.cat([parts(c.x)[0][there] for c, there in zip(cases[turn], here, strict=True)])
            assert_same_bits(again[rank][turn].x[: len(wanted)], wanted, f"rows of turn {turn}")
            if turn % 2 and not in_a_ring:
                y = (parts(cases[turn][rank].x)[0].float() * copies + 0.0).to(torch.bfloat16)  # 0 is no -0
                assert_same_bits(sums[rank][turn // 2], y, f"sums of turn {turn}")
    for exchange in ranks:
        exchange.context.check_peers()


def slowed(text: str) -> str:
    """One rank takes its time for each row, which others may not overtake."""
    waits = "for (int i = 0; rank == 1 && i < 100; ++i) load_acquire(flags);"
    return re.sub(r"const bool is_own = row\.slot < 0;", rf"\g<0> {waits}", text)


@pytest.mark.parametrize("in_a_ring", [False, True])
def test_ranks_that_run_ahead(in_a_ring: bool, emulator: Emulator, seed: int) -> None:
    emulator.edit = slowed
    run_on(exchanges(3, 128, 8), emulator, seed, in_a_ring=in_a_ring)


def test_ranks_that_run_ahead_after_2_31_steps(emulator: Emulator, seed: int) -> None:
    """No step of these kernels raises combine flags. By then those seem to be ahead."""
    emulator.edit = slowed
    for turn in range(3):
        ranks = exchanges(3, 128, 8)
        for exchange in ranks:
            context, epoch = exchange.context, 3 - 2**31
            layout = context.signals_layout
            context.epoch.fill_(epoch)
            context.signals[layout.ready : layout.ready + 3] = epoch
            for last in (epoch, epoch - 1):
                first = layout.dispatch_flag + last % 2 * 3
                context.signals[first : first + 3] = last
        run_on(ranks, emulator, seed + turn, in_a_ring=True)


MISTAKES = {
    "flags before records have landed": (r"bulk_await<BEHIND>\(\);", ";"),
    "the last flags before records have landed": (r"bulk_await\(\);(\s*\S+ )", r";\1"),
    "rows before their flags": (r"if \(has_landed\(row\)\) return true;", "return true;"),
    "records loaded over what is still stored": (r"bulk_await_read<\d+ - 2>\(\);", ";"),
    "halves that are still read": (r"lane < \d+ && lane != rank, own", "false, own"),
    "counts before those of peers": (r"await\(x, own, lane < \d+, flag", "await(x, own, false, flag"),
    "sums before their records": (r"wanted = load_acquire\(flags \+ slot\) != tag;", "wanted = false;"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, emulator: Emulator, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of this file would notice what they are there for. A warp has several records."""
    for module in (rows, row_sums):
        monkeypatch.setattr(module, "most_sms", lambda device: 1)
    # More stages let more copies be late.
    stages = 2 if mistake == "records loaded over what is still stored" else 4
    for name, value in (("MOST_WARPS", 1), ("MOST_STAGES", stages)):
        monkeypatch.setattr(rows, name, value)
    assert_is_found(
        MISTAKES[mistake],
        emulator,
        lambda turn: run_on(exchanges(3, 128, 8), emulator, seed + turn, in_a_ring=turn % 2 == 1),
        slowed,
    )
