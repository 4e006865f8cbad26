"""Tokens that name an expert several times, where a dispatcher accepts them: a row for each entry, in every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime.comm.errors import CapacityError, MoERuntimeError, RoutingError
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange import cuda, plan
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.virtual import virtual_contexts
from tests.emulator import Emulator, planted
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, expected_combine, expected_groups, rank_input, repeated_ids
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import (
    ENGINES,
    HOPPER,
    Ranks,
    check_step,
    emulator,
    needs_hopper,
    poisoned_memory,
    pretend_sms,
)
from tests.support.waiting import synchronize

__all__ = ["emulator", "poisoned_memory"]

HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 7, 3, 40
SETTINGS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_experts": EXPERTS,
    "top_k": TOP_K,
    "max_tokens_per_rank": TOKENS,
    "accepts_repeats": True,
}


def inputs_of(seed: int, world: int) -> list[RankInput]:
    """Of some ranks with many tokens, and some with few; 40 slots of a rank end within a word of 32.

    By their weights, sums of ranks depend on the order.
    """
    found = []
    for rank in range(world):
        data = rank_input(seed, rank, (TOKENS, 3, 0, 37)[rank], HIDDEN, EXPERTS, TOP_K)
        g = torch.Generator().manual_seed(seed + rank)
        ids = repeated_ids(data.topk_idx, TOKENS, g)
        found.append(RankInput(data.x, ids, data.topk_weights.ldexp(torch.randint(-14, 15, ids.shape, generator=g))))
    return found


def check(context: ExpertParallelContext) -> None:
    """`context.check()`, once the kernels before it have run."""
    synchronize(context.device)
    context.check()


@pytest.fixture
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Slots of the CUDA exchange in chunks of 32 if asked for."""
    if request.param:
        monkeypatch.setattr(plan, "SMALL_CHUNK_BYTES", 0)
        monkeypatch.setattr(plan, "CHUNK", 32)
    forget_plans()
    yield request.param
    forget_plans()


in_every_way = pytest.mark.parametrize(
    ("engine", "chunks"),
    [
        *((engine, False) for engine in ENGINES[:1]),
        *(pytest.param(HOPPER, of, marks=needs_hopper) for of in (False, True)),
    ],
    indirect=["chunks"],
)


@in_every_way
@pytest.mark.parametrize(
    ("fmt", "mode", "world", "by_entry"),
    [
        ("bf16", "gathered", 1, False),
        ("bf16", "gathered", 4, False),
        ("bf16", "gathered", 4, True),
        ("nvfp4", "gathered", 2, False),
        ("fp8_block", "contiguous", 2, False),
    ],
)
def test_rows_and_sums(
    fmt: str, mode: str, world: int, by_entry: bool, engine: str, chunks: bool, device: torch.device, seed: int
) -> None:
    ranks = Ranks(world, device, engine, **SETTINGS, token_format=fmt, mode=mode, sums_by_entry=by_entry)
    for step in range(2):
        check_step(ranks, inputs_of(seed + step, world), seed, torch.bfloat16)


def padded_ranks(world: int, device: torch.device, engine: str, **settings: Any) -> Ranks:
    ranks = Ranks(world, device, engine, **{**SETTINGS, "mode": "gathered", "reusable_handles": True, **settings})
    for dispatcher in ranks.dispatchers:
        if engine == HOPPER and device.type == "cpu" and dispatcher._routing_only is not None:
            dispatcher._routing_only._use(cuda)
    return ranks


def padded_of(own: TokenDispatcher) -> PaddedRows:
    geometry, fmt = own.geometry, own.geometry.token_format
    kinds = {"bf16": PaddedScales.NONE, "fp8_block": PaddedScales.COLUMNS, "nvfp4": PaddedScales.SWIZZLED}
    return PaddedRows.allocate(
        geometry.num_local_experts,
        geometry.num_slots,
        fmt.quant_bytes(HIDDEN),
        geometry.world_size,
        TOP_K,
        device=own.context.device,
        kind=kinds[fmt.name],
        num_scales=fmt.scale_columns(HIDDEN),
    )


SLOWLY = """{
  const int before = statistics[e];
  for (int look = 0; look < 1000; ++look) (void)load_relaxed(statistics + e);
  statistics[e] = before + places.totals[e];
}"""


@pytest.mark.cpu_only
@needs_hopper
def test_statistics_of_two_steps_are_added_one_after_the_other(
    emulator: Emulator, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are received when both are sent; the kernel of one may begin while that of the other runs."""
    emulator.edit = planted("statistics[e] += places.totals[e];", SLOWLY, only_in="statistics")
    pretend_sms(monkeypatch, 1)
    for turn in range(6):
        ranks = padded_ranks(2, torch.device("cpu"), HOPPER, token_format="bf16")
        steps = [inputs_of(seed + 2 * turn + step, 2) for step in range(2)]
        statistics, outs = [], []
        with emulator.together() as choose:
            for rank, own in enumerate(ranks.dispatchers):
                choose(rank)
                handles = [own.dispatch_send(*i[rank]) for i in steps]
                statistics.append(torch.zeros(own.geometry.num_local_experts, dtype=torch.int32))
                outs.append([padded_of(own) for _ in handles])
                for handle, out in zip(handles, outs[-1], strict=True):
                    own.dispatch_recv_padded(handle, out, statistics=statistics[-1])
        for found, (first, second) in zip(statistics, outs, strict=True):
            assert torch.equal(found, first.counts + second.counts)


@in_every_way
@pytest.mark.parametrize(
    ("fmt", "world", "by_entry"),
    [
        ("bf16", 1, False),
        ("bf16", 4, False),
        ("bf16", 4, True),
        ("fp8_block", 1, False),
        ("fp8_block", 2, False),
        ("nvfp4", 2, False),
    ],
)
def test_padded_rows_and_sums(
    fmt: str, world: int, by_entry: bool, engine: str, chunks: bool, device: torch.device, seed: int
) -> None:
    """Rows, tokens, ranges and positions of each entry; then a combine in which each row differs."""
    inputs = [data.to(device) for data in inputs_of(seed, world)]
    ranks = padded_ranks(world, device, engine, token_format=fmt, sums_by_entry=by_entry)
    handles = [d.dispatch_send(*i) for d, i in zip(ranks.dispatchers, inputs, strict=True)]
    outs = []
    for own, handle in zip(ranks.dispatchers, handles, strict=True):
        outs.append(padded_of(own))
        own.dispatch_recv_padded(handle, outs[-1])
    geometry = ranks.dispatchers[0].geometry
    starts, slots = geometry.starts, geometry.num_slots
    quantized = [quantize_rows(data.x, fmt) for data in inputs]
    row_of: list[dict[tuple[int, int], Any]] = [{} for _ in range(world)]
    outputs = []
    for rank, out in enumerate(outs):
        g = torch.Generator().manual_seed(seed + rank)
        results = torch.randn(out.rows.shape[0] * slots, HIDDEN, generator=g).to(torch.bfloat16)
        outputs.append(results.to(device))
        seen = 0
        for e, came in enumerate(expected_groups(inputs, range(starts[rank], starts[rank + 1]))):
            assert int(out.counts[e]) == len(came)
            assert out.source_tokens[e, : len(came)].tolist() == [token for _, token, _ in came]
            per_source = [sum(1 for source, _, _ in came if source == r) for r in range(world)]
            begins = [sum(per_source[:r]) for r in range(world)]
            assert out.layout_range[e].tolist() == [b << 32 | n for b, n in zip(begins, per_source, strict=True)]
            for row, (source, token, k) in enumerate(came):
                wanted = quantized[source].quants_RK[token].view(torch.uint8)
                assert_same_bits(out.rows[e, row], wanted, f"row {row} of expert {e} of rank {rank}")
                if fmt == "fp8_block":
                    assert out.scales is not None
                    assert torch.equal(out.scales[e, row], quantized[source].scales_RV[token])  # type: ignore[index]
                assert int(out.positions[source * TOKENS + token, k]) == e * slots + row
                row_of[source][token, k] = results[e * slots + row].float().numpy()
            seen += len(came)
        assert int((out.positions >= 0).sum()) == seen
    combiners = [own._routing_only for own in ranks.dispatchers]
    renewed = [
        combiner.send_routing(i.topk_idx, i.topk_weights, out.positions, len(rows), handle)  # type: ignore[union-attr]
        for combiner, i, out, rows, handle in zip(combiners, inputs, outs, outputs, handles, strict=True)
    ]
    for combiner, rows, handle in zip(combiners, outputs, renewed, strict=True):
        combiner.combine_send(rows, handle)  # type: ignore[union-attr]
    for rank, (combiner, handle) in enumerate(zip(combiners, renewed, strict=True)):
        y = combiner.combine_recv(handle)  # type: ignore[union-attr]
        for token in range(y.shape[0]):
            want = torch.from_numpy(expected_combine(inputs[rank], starts, row_of[rank], token, by_entry=by_entry))
            assert_same_bits(y[token], want.to(torch.bfloat16), f"y of token {token} of rank {rank}")
    for context in ranks.contexts:
        context.check()


@in_every_way
@pytest.mark.parametrize("over", [0, 1])
def test_more_rows_than_an_expert_has_room_for(
    over: int, engine: str, chunks: bool, device: torch.device, seed: int
) -> None:
    """As many rows as all ranks have tokens for are taken; one more is a failure, and none is written."""
    ranks = padded_ranks(2, device, engine, token_format="bf16")
    own = ranks.dispatchers[0]
    ids = [torch.full((TOKENS, TOP_K), -1) for _ in range(2)]
    ids[1].view(-1)[: 2 * TOKENS + over] = 1
    outs, found = [], []
    with_room = [padded_of(own) for own in ranks.dispatchers]
    inputs = [rank_input(seed, rank, TOKENS, HIDDEN, EXPERTS, TOP_K).to(device) for rank in range(2)]
    handles = [
        own.dispatch_send(i.x, given.to(device), i.topk_weights)
        for own, i, given in zip(ranks.dispatchers, inputs, ids, strict=True)
    ]
    for own, handle, out in zip(ranks.dispatchers, handles, with_room, strict=True):
        out.rows.fill_(7)
        try:
            own.dispatch_recv_padded(handle, out)
            check(own.context)
        except MoERuntimeError as error:
            found.append(error)
        outs.append(out)
    if over:
        assert isinstance(found[0], CapacityError) and found[0].rank == 0
        assert "81 rows arrived for one expert of rank 0, which has room for 80" in str(found[0])
        assert not outs[0].counts.any() and bool((outs[0].rows == 7).all())
    else:
        assert not found and outs[0].counts.tolist() == [0, 2 * TOKENS, *[0] * (len(outs[0].counts) - 2)]


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_past_the_last_expert_are_refused_as_ever(engine: str, device: torch.device, seed: int) -> None:
    ranks = Ranks(1, device, engine, **SETTINGS)
    data = rank_input(seed, 0, 3, HIDDEN, EXPERTS, TOP_K).to(device)
    data.topk_idx[1] = torch.tensor([2, EXPERTS, 2])
    with pytest.raises(RoutingError, match=f"expert id {EXPERTS} of token 1 of rank 0 is out of range"):
        ranks.dispatchers[0].dispatch(*data)
        check(ranks.contexts[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ids", [[2, 2, 5], [2, -2, 5]])
def test_dispatchers_that_do_not_accept_repeats_refuse_them(
    ids: list[int], engine: str, device: torch.device, seed: int
) -> None:
    ranks = Ranks(1, device, engine, **{**SETTINGS, "accepts_repeats": False})
    data = rank_input(seed, 0, 3, HIDDEN, EXPERTS, TOP_K).to(device)
    data.topk_idx[1] = torch.tensor(ids)
    with pytest.raises(RoutingError, match=f"expert id {ids[1]} of token 1 of rank 0"):
        ranks.dispatchers[0].dispatch(*data)
        check(ranks.contexts[0])


@pytest.mark.cpu_only
def test_more_entries_than_experts() -> None:
    """`top_k` past the number of experts is possible only where a token may name one twice."""
    context = ExpertParallelContext(timeout_s=5, engine="torch")
    sizes = {"hidden_size": 16, "num_experts": 2, "top_k": 3, "max_tokens_per_rank": 2}
    with pytest.raises(ValueError, match="top_k: expected at most num_experts = 2, got 3"):
        TokenDispatcher(context, **sizes)  # type: ignore[arg-type]
    own = TokenDispatcher(context, **sizes, accepts_repeats=True, mode="gathered")  # type: ignore[arg-type]
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    arrived = own.dispatch(x, torch.tensor([[1, 0, 1]]), torch.ones(1, 3))
    assert arrived.group_offsets.tolist() == [0, 1, 3]
    context.close()


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["accepts_repeats", "sums_by_entry"])
def test_ranks_of_several_hosts_do_not_take_repeats(name: str) -> None:
    contexts = virtual_contexts(2, num_hosts=2, engine="torch", timeout_s=5)
    with pytest.raises(ValueError, match=f"{name}: expected False where ranks are on several hosts"):
        TokenDispatcher(contexts[0], **SETTINGS | {"accepts_repeats": False, name: True})
