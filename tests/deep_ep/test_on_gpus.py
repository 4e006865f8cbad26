"""The buffers of `moe_runtime.deep_ep` on GPUs: streams, hooks, and every mode captured in a graph and replayed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.errors import PeerTimeoutError
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.deep_ep import Buffer, ElasticBuffer, EventHandle
from moe_runtime.deep_ep.normal import NormalExchange
from moe_runtime.deep_ep.normal_handle import Form, NormalHandle, Received
from moe_runtime.deep_ep.sizes import normal_bytes
from tests.deep_ep.test_elastic import CASES, every_call
from tests.deep_ep.test_normal import other_numbers_of_rows
from tests.deep_ep.test_training import train_elastic
from tests.exchange.test_rows_emulated import LOCAL
from tests.exchange.test_rows_emulated import case_of as row_case
from tests.exchange.test_rows_emulated import check as check_rows
from tests.exchange.test_rows_emulated import parts as row_parts
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import repeated_ids
from tests.support.pool import run_once

HIDDEN, EXPERTS, TOP_K, MOST = 1024, 32, 4, 48
REPLAYS = 40

Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def data_of(seed: int, rank: int, device: torch.device) -> Data:
    g = torch.Generator().manual_seed(seed * 7919 + rank)
    x = torch.randn(MOST, HIDDEN, generator=g).to(torch.bfloat16)
    ids = torch.rand(MOST, EXPERTS, generator=g).argsort(dim=1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.2, -1, ids)
    return x.to(device), ids.to(device), torch.rand(MOST, TOP_K, generator=g).to(device)


def weighted(data: Data, world: int, scale: float = 1.0) -> torch.Tensor:
    """What experts that multiply by `scale` give: fp32 sums of a rank's experts, rounded, and their sum."""
    x, ids, weights = data
    rows = (x * scale).float()
    total = torch.zeros_like(rows)
    for rank in range(world):
        partial = torch.zeros_like(rows)
        for k in range(TOP_K):
            here = (ids[:, k] >= 0) & (ids[:, k] // (EXPERTS // world) == rank)
            partial = torch.where(here[:, None], partial + weights[:, k, None] * rows, partial)
        total += partial.to(torch.bfloat16).float()
    return total.to(torch.bfloat16)


def summed(weights: torch.Tensor) -> torch.Tensor:
    """fp32 `[T, 1]`, `k` ascending: the order in which `torch.sum` adds depends on the number of rows."""
    total = torch.zeros_like(weights[:, :1])
    for k in range(weights.shape[1]):
        total = total + weights[:, k : k + 1]
    return total


def copied(into: Data, data: Data) -> None:
    for target, source in zip(into, data, strict=True):
        target.copy_(source)


def entries_of(seed: int, rank: int, device: torch.device) -> Data:
    """`data_of`, for two seeds of four with tokens that name experts several times, which low latency takes."""
    x, ids, weights = data_of(seed, rank, device)
    if seed // 2 % 2:
        ids = repeated_ids(ids.cpu(), MOST, torch.Generator().manual_seed(seed * 7919 + rank)).to(device)
    return x, ids, weights


def replay_low_latency(rank: int, world: int, seed: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    num_bytes = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, world, EXPERTS)
    buffer = Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, explicitly_destroy=True)
    held = entries_of(seed, rank, device)
    per_rank = EXPERTS // world

    def step(hooks: bool, beside: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, ids, weights = held
        ways: dict[str, Any] = {"return_recv_hook": hooks, "async_finish": beside}
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False, **ways)
        if hook is not None:
            hook()
        if beside:
            event.current_stream_wait()
        assert isinstance(rows, torch.Tensor)
        outs = []
        for scale in (2.0, 4.0):
            y, event, hook = buffer.low_latency_combine(rows * scale, ids, weights, handle, **ways)
            if hook is not None:
                hook()
            if beside:
                event.current_stream_wait()
            outs.append(y)
        return counts, outs[0], outs[1]

    def check(seed: int, found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        everyone = [entries_of(seed, r, device) for r in range(world)]
        expected = [sum(int((d[1] == rank * per_rank + e).sum()) for d in everyone) for e in range(per_rank)]
        assert found[0].tolist() == expected
        for y, scale in zip(found[1:], (2.0, 4.0), strict=True):
            assert torch.equal(y, weighted(everyone[rank], world, scale))

    for ways in ((False, False), (True, False), (False, True)):
        check(seed, step(*ways))
    graphs = []
    for hooks in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(hooks)
        graphs.append((graph, found))
    for turn in range(REPLAYS):
        copied(held, entries_of(seed + turn, rank, device))
        graph, found = graphs[turn % 2]
        for tensor in found:
            tensor.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        check(seed + turn, found)
    buffer.destroy()


def replay_normal(rank: int, world: int, seed: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    buffer = Buffer(dist.group.WORLD, normal_bytes(HIDDEN, world, MOST), explicitly_destroy=True)
    held = data_of(seed, rank, device)

    def step(tokens: int = MOST, **ways: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, ids, weights = (tensor[:tokens] for tensor in held)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        counts = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }
        beside = ways.pop("beside", False)
        if beside:
            ways |= {"async_finish": True, "previous_event": buffer.capture()}
        rows, got_ids, got_weights, _, handle, event = buffer.dispatch(
            x, **counts, topk_idx=ids, topk_weights=weights, **ways
        )
        if beside:
            event.current_stream_wait()
        assert isinstance(rows, torch.Tensor) and got_ids is not None and got_weights is not None and handle is not None
        valid = got_ids >= 0
        # Each row stands for its local experts: their weights times the row.
        valid_weights = torch.where(valid, got_weights, 0.0)
        factor = summed(valid_weights)
        out = (torch.where(valid.any(dim=1, keepdim=True), rows, 0.0).float() * factor).to(torch.bfloat16)
        ways.pop("num_worst_tokens", None)
        if beside:
            # With an event the communication stream waits for nothing else: one after all that it reads is there.
            ways["previous_event"] = buffer.capture()
        y, y_weights, event = buffer.combine(out, handle, topk_weights=valid_weights, **ways)
        if beside:
            event.current_stream_wait()
        assert y_weights is not None
        return (got_ids >= 0).sum(), y, y_weights

    def check(
        seed: int, found: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tokens: Callable[[int], int] = lambda r: MOST
    ) -> None:
        datas = [data_of(seed, r, device) for r in range(world)]
        everyone = [
            (x[: tokens(r)], ids[: tokens(r)], weights[: tokens(r)]) for r, (x, ids, weights) in enumerate(datas)
        ]
        x, ids, weights = everyone[rank]
        first, end = rank * EXPERTS // world, (rank + 1) * EXPERTS // world
        assert int(found[0]) == sum(int(((d[1] >= first) & (d[1] < end)).sum()) for d in everyone)
        total = torch.zeros(tokens(rank), HIDDEN, device=device)
        for r in range(world):
            here = (ids >= 0) & (ids // (EXPERTS // world) == r)
            factor = summed(torch.where(here, weights, 0.0))
            total += (x.float() * factor).to(torch.bfloat16).float()
        assert torch.equal(found[1], total.to(torch.bfloat16))
        assert torch.equal(found[2], torch.where(ids >= 0, weights, 0.0))

    worst = world * MOST
    for ways in ({}, {"num_worst_tokens": worst}, {"beside": True}):
        check(seed, step(**ways))
    # Counts travel in a graph that the buffer replays, on either stream.
    for turn in range(12):
        copied(held, data_of(seed + turn, rank, device))

        def tokens(r: int, turn: int = turn) -> int:
            return MOST if (turn + r) % 3 else turn % 2 * 5

        with torch.inference_mode(turn % 2 == 1):
            check(seed + turn, step(tokens(rank), beside=turn % 3 == 2), tokens)
    with pytest.raises(ValueError, match="num_worst_tokens: expected it in a capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(num_worst_tokens=worst)
    for turn in range(REPLAYS):
        copied(held, data_of(seed + turn, rank, device))
        for tensor in found:
            tensor.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        check(seed + turn, found)
    buffer.destroy()


def replay_elastic(rank: int, world: int, seed: int) -> None:
    """Weighted rows of `ElasticBuffer`, expanded and not; on a GPU also in graphs, on both streams."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    assert dist.group.WORLD is not None
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN, explicitly_destroy=True)
    held, local = data_of(seed, rank, device), EXPERTS // world
    counts = torch.zeros(local, dtype=torch.int32, device=device)

    def step(expand: bool, beside: bool = False, sync: bool = False) -> tuple[torch.Tensor, ...]:
        x, ids, weights = held
        ways: dict[str, Any] = {"async_with_compute_stream": beside}
        if beside:
            ways |= {"previous_event": buffer.capture(), "previous_event_before_epilogue": EventHandle()}
        counts.zero_()
        rows, got_ids, got_weights, handle, event = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=EXPERTS,
            do_expand=expand,
            do_cpu_sync=sync,
            cumulative_local_expert_recv_stats=counts,
            **ways,
        )
        if beside:
            event.current_stream_wait()
        assert isinstance(rows, torch.Tensor) and got_weights is not None
        factor = got_weights[:, None] if got_ids is None else summed(got_weights)
        out = (rows.float() * factor).to(torch.bfloat16)
        if beside:
            ways["previous_event"] = buffer.capture()
        y, y_weights, event = buffer.combine(out, handle, topk_weights=got_weights, **ways)
        if beside:
            event.current_stream_wait()
        assert y_weights is not None
        return y, y_weights, counts.clone(), handle.psum_num_recv_tokens_per_scaleup_rank

    def check(seed: int, found: tuple[torch.Tensor, ...], expand: bool) -> None:
        everyone = [data_of(seed, r, device) for r in range(world)]
        x, ids, weights = everyone[rank]
        total = torch.zeros(MOST, HIDDEN, device=device)
        for r in range(world):
            here = (ids >= 0) & (ids // local == r)
            own = torch.where(here, weights, 0.0)
            if expand:
                partial = torch.zeros_like(total)
                for k in range(TOP_K):
                    partial += (x.float() * own[:, k : k + 1]).to(torch.bfloat16).float()
                total += partial.to(torch.bfloat16).float()
            else:
                total += (x.float() * summed(own)).to(torch.bfloat16).float()
        assert torch.equal(found[0], total.to(torch.bfloat16))
        assert torch.equal(found[1], torch.where(ids >= 0, weights, 0.0))
        assert found[2].tolist() == [sum(int((d[1] == rank * local + e).sum()) for d in everyone) for e in range(local)]
        comes = [int(((d[1] >= 0) & (d[1] // local == rank)).any(dim=1).sum()) for d in everyone]
        assert found[3].tolist() == [sum(comes[: r + 1]) for r in range(world)]

    for expand in (False, True):
        for beside in (False, True):
            for sync in (True, False):
                check(seed, step(expand, beside, sync), expand)
    graphs = []
    for expand in (False, True) if on_gpu else ():
        with pytest.raises(ValueError, match="do_cpu_sync: expected False in a capture"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                step(expand, sync=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(expand)
        graphs.append((graph, found))
    for turn in range(REPLAYS if on_gpu else 0):
        copied(held, data_of(seed + turn, rank, device))
        graph, found = graphs[turn % 2]
        for tensor in found:
            tensor.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        check(seed + turn, found, turn % 2 == 1)
    buffer.destroy()


def on_cpu(got: Received) -> Received:
    """Copies on the CPU of what a dispatch gave."""
    handle = NormalHandle(None if one is None else one.cpu() for one in got.handle)
    vars(handle).update(vars(got.handle))
    route = got.handle.route
    assert route is not None and not handle.steps
    handle.route = replace(route, words=route.words.cpu())
    parts = {name: getattr(got, name) for name in ("x", "scales", "topk_idx", "topk_weights")}
    return replace(got, handle=handle, **{n: None if part is None else part.cpu() for n, part in parts.items()})


def compare_rows(rank: int, world: int, seed: int) -> None:
    """Rows of normal mode, of few tokens and many, on few SMs and all, with ranks that come late: as a plain model."""
    device, draw = torch.device("cuda", torch.cuda.current_device()), random.Random(seed)
    late = random.Random(seed * 31 + rank)
    for hidden, room, fp8, turns in ((256, 40, True, 30), (1024, 300, False, 10), (7168, 4096, True, 2)):
        context = ExpertParallelContext(dist.group.WORLD, timeout_s=20)
        exchange = NormalExchange(context, hidden, room)
        assert exchange._direct is not None
        for turn in range(turns):
            exchange.num_sms = draw.choice((None, 2, 24))
            # More than a step has room for, too, where the host knows of it.
            worst = draw.choice((0, 0, world * room))
            most = room if worst or hidden == 7168 else 3 * room
            counts = [draw.choice((0, 1, most, draw.randint(0, most))) for _ in range(world)]
            cases = [row_case(seed + turn, r, counts[r], world, hidden, fp8) for r in range(world)]
            others = [row_case(seed + turn + 1000, r, counts[r], world, hidden, fp8) for r in range(world)]
            mine, layout = cases[rank], cases[rank].layout(world)
            there = None if draw.random() < 0.5 else tuple(one.to(device) for one in layout)
            torch.cuda._sleep(late.choice((0, 0, 10**5, 10**6)))
            sent = tuple(one.to(device) for one in row_parts(mine.x))
            got = exchange.dispatch(
                sent if fp8 else sent[0],  # type: ignore[arg-type]
                there,  # type: ignore[arg-type]
                mine.ids.to(device),
                mine.weights.to(device),
                Form(world * LOCAL, worst, scales_by_column=draw.random() < 0.5),
            )
            torch.cuda._sleep(late.choice((0, 0, 10**5, 10**6)))
            again = exchange.dispatch_again(
                tuple(one.to(device) for one in row_parts(others[rank].x)) if fp8 else others[rank].x.to(device),  # type: ignore[arg-type]
                got.handle,
            )
            check_rows(on_cpu(got), cases, rank, worst or None)
            here = [case.goes_to(rank) for case in cases]
            for number, part in enumerate(row_parts(again.tokens)):
                wanted = torch.cat([row_parts(o.x)[number][there] for o, there in zip(others, here, strict=True)])
                assert_same_bits(part.cpu()[: len(wanted)], wanted, f"part {number} again")
            if not fp8:
                assert got.x is not None
                y, _ = exchange.combine(got.x, got.handle)
                copies = torch.stack([mine.goes_to(r) for r in range(world)]).sum(dim=0)[:, None]
                assert torch.equal(y.cpu(), (row_parts(mine.x)[0].float() * copies).to(torch.bfloat16))
        context.check_peers()
        context.close()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_normal_mode(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world, gpus=True).run(compare_rows, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_other_numbers_of_rows(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world, gpus=True).run(other_numbers_of_rows, seed, "cuda")


def miss_counts(rank: int, world: int) -> str:
    """The last rank does not come to a second dispatch: what the host is told that waits for its counts."""
    context = ExpertParallelContext(dist.group.WORLD, timeout_s=2, startup_timeout_s=60)
    exchange = NormalExchange(context, 256, 16)
    case, device = row_case(1, rank, 8, world, 256, False), context.device
    given = row_parts(case.x)[0].to(device), None, case.ids.to(device), case.weights.to(device)
    exchange.dispatch(*given, Form(world * LOCAL))
    torch.cuda.synchronize()
    if rank == world - 1:
        time.sleep(5)
        return ""
    with pytest.raises(PeerTimeoutError) as raised:
        exchange.dispatch(*given, Form(world * LOCAL))
    return str(raised.value)


@pytest.mark.gpu
def test_counts_that_do_not_come() -> None:
    told, _ = run_once(miss_counts, 2, gpus=True)
    assert told.error is None and "rank 1 did not answer within 2 s" in told.result, told


@pytest.mark.cpu_only
def test_weighted_rows_of_cpu_ranks(get_pool: Any, seed: int) -> None:
    get_pool(2).run(replay_elastic, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_elastic_layouts_and_gradients(world: int, get_pool: Any, seed: int) -> None:
    pool = get_pool(world, gpus=True)
    pool.run(every_call, list(CASES), ["bf16", "fp8", "packed"], seed)
    for form in ({"do_expand": True}, {"do_cpu_sync": False}):
        pool.run(train_elastic, [6, 0, 4, 1], seed, form, False)


@pytest.mark.parametrize("mode", [replay_low_latency, replay_normal, replay_elastic])
@pytest.mark.parametrize("world", [1, 2])
def test_replays_give_what_plain_torch_gives(world: int, mode: Any, get_pool: Any, seed: int) -> None:
    get_pool(world, gpus=True).run(mode, seed)
