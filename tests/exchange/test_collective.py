"""The collective transport: what kernels staged arrives where they would have stored it, and nothing else changes."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm import left_groups
from moe_runtime.comm.errors import (
    ErrorCode,
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    RoutingError,
    StepMismatchError,
)
from moe_runtime.comm.heaps import collective
from moe_runtime.comm.heaps.collective import CollectiveHeap, CollectiveTransport
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.signals import ABORT_WORDS
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.reference import record_failure
from moe_runtime.layer import MoELayer
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, Outcome, run_once

MAX_TOKENS, RECORD, PARTS, ROW = 7, 48, 3, 20
SENTINEL = 0xA5


def make_context(device: str = "cpu", timeout_s: float = PATIENCE_S) -> ExpertParallelContext:
    return ExpertParallelContext(
        device=device, transport="collective", timeout_s=timeout_s, startup_timeout_s=PATIENCE_S
    )


def prepare(context: ExpertParallelContext, landing_half: int) -> CollectiveTransport:
    world = context.world_size
    context.register(token_flags=4 * world * MAX_TOKENS, landing=landing_half, combine=MAX_TOKENS * PARTS * ROW)
    context.allocate()
    assert context.host_transport is not None
    context.heap.tensor("landing").fill_(SENTINEL)
    context.heap.tensor("combine").fill_(SENTINEL)
    return context.host_transport


def dice(seed: int, *place: int) -> torch.Generator:
    for number in place:
        seed = (seed * 1_000_003 + number + 7) % (2**31)
    return torch.Generator().manual_seed(seed)


def sent_tokens(seed: int, epoch: int, source: int, target: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """What `source` sends to `target`: its token count, the tokens that go there, their records."""
    count = int(torch.randint(0, MAX_TOKENS + 1, (1,), generator=dice(seed, epoch, source)))
    if (source + epoch) % 3 == 0:
        count = 0 if epoch % 2 else MAX_TOKENS
    generator = dice(seed, epoch, source, target)
    goes = torch.rand(count, generator=generator) < 0.6
    tokens = goes.nonzero().flatten()
    return count, tokens, torch.randint(0, 256, (len(tokens), RECORD), generator=generator, dtype=torch.uint8)


def returned_rows(seed: int, epoch: int, source: int, target: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `target` sends back to `source`: tokens, their parts, rows."""
    _, tokens, _ = sent_tokens(seed, epoch, source, target)
    generator = dice(seed, epoch, source, target, 99)
    parts = torch.full((len(tokens),), target % PARTS)
    return tokens, parts, torch.randint(0, 256, (len(tokens), ROW), generator=generator, dtype=torch.uint8)


def signals_of(context: ExpertParallelContext, rank: int) -> torch.Tensor:
    return context.heap.peer_tensor("signals", rank).view(torch.int32)


def halves(context: ExpertParallelContext, region: str, rank: int, stride: int, shape: tuple[int, ...]) -> torch.Tensor:
    """uint8 `[2, *shape]` over the two halves of a region."""
    size = torch.Size(shape).numel()
    data = context.heap.peer_tensor(region, rank)
    return torch.as_strided(data, (2, size), (stride, 1)).unflatten(1, shape)


def run_steps(rank: int, world: int, device: str, seed: int, num_epochs: int, odd_half: bool) -> None:
    used = world * MAX_TOKENS * RECORD
    landing_half = used + 8 if odd_half else -(-used // 256) * 256
    with make_context(device) as context:
        host_transport = prepare(context, landing_half)
        layout = context.signals_layout
        strides = context.half_bytes | {"landing": landing_half}
        shapes = {"landing": (world, MAX_TOKENS, RECORD), "combine": (MAX_TOKENS, PARTS, ROW)}
        token_flag_shape = (world, MAX_TOKENS * 4)
        expected = {name: halves(context, name, rank, strides[name], shapes[name]).cpu() for name in shapes}
        expected = {name: tensor.clone() for name, tensor in expected.items()}
        # What nobody has written is of no epoch.
        expected_token_flags = torch.zeros(2, world, MAX_TOKENS, dtype=torch.int32)
        expected_token_flags[0] = 0x01010101
        for epoch in range(1, num_epochs + 1):
            half = epoch % 2
            for peer in range(world):  # The send kernel.
                count, tokens, records = sent_tokens(seed, epoch, rank, peer)
                landing = halves(context, "landing", peer, strides["landing"], shapes["landing"])
                landing[half, rank, tokens.to(device)] = records.to(device)
                token_flags = halves(context, "token_flags", peer, strides["token_flags"], token_flag_shape).view(
                    torch.int32
                )
                token_flags[half, rank, tokens.to(device)] = epoch
                words = signals_of(context, peer)
                words[layout.ready + rank] = epoch - 1
                words[layout.token_count + half * world + rank] = count
                words[layout.dispatch_flag + half * world + rank] = epoch
            host_transport.carry_dispatch(
                context,
                epoch=epoch,
                exchange_id=0,
                num_tokens=count,
                max_tokens=MAX_TOKENS,
                record_bytes=RECORD,
                timeout_ns=context.startup_timeout_ns,
                landing_half=landing_half if odd_half else None,
            )
            for source in range(world):
                count, tokens, records = sent_tokens(seed, epoch, source, rank)
                expected["landing"][half, source, tokens] = records
                expected_token_flags[half, source, tokens] = epoch
                assert context.signals[layout.token_count + half * world + source] == count
            landing = halves(context, "landing", rank, strides["landing"], shapes["landing"])
            token_flags = halves(context, "token_flags", rank, strides["token_flags"], token_flag_shape).view(
                torch.int32
            )
            assert torch.equal(landing.cpu(), expected["landing"])
            assert torch.equal(token_flags.cpu(), expected_token_flags)
            flags = context.signals[layout.dispatch_flag + half * world :][:world]
            assert flags.tolist() == [epoch] * world
            assert context.signals[layout.ready :][:world].tolist() == [epoch - 1] * world

            part_index = torch.full((world, MAX_TOKENS), -1, dtype=torch.int32, device=device)
            for source in range(world):  # The combine kernel.
                tokens, parts, rows = returned_rows(seed, epoch, source, rank)
                combine = halves(context, "combine", source, strides["combine"], shapes["combine"])
                combine[half, tokens.to(device), parts.to(device)] = rows.to(device)
                part_index[source, tokens.to(device)] = parts.to(torch.int32).to(device)
                signals_of(context, source)[layout.combine_flag + half * world + rank] = epoch
            combine_by(context, part_index, context.timeout_ns, epoch)
            for target in range(world):
                tokens, parts, rows = returned_rows(seed, epoch, rank, target)
                expected["combine"][half, tokens, parts] = rows
            combine = halves(context, "combine", rank, strides["combine"], shapes["combine"])
            assert torch.equal(combine.cpu(), expected["combine"])
            flags = context.signals[layout.combine_flag + half * world :][:world]
            assert flags.tolist() == [epoch] * world
            context.check()


# No more ranks than parts: a part is the rank it comes from here.
@pytest.mark.parametrize(("world", "odd_half"), [(1, False), (2, True), (3, False)])
def test_carries_what_was_staged(world: int, odd_half: bool, get_pool, seed: int) -> None:
    get_pool(world).run(run_steps, "cpu", seed, 5, odd_half)


@pytest.mark.gpu
def test_carries_between_gpus(seed: int) -> None:
    for outcome in run_once(run_steps, 2, "cuda", seed, 5, False, timeout=120.0, gpus=True):
        outcome.returned()


def properties(rank: int, world: int) -> None:
    with make_context() as context:
        prepare(context, world * MAX_TOKENS * RECORD)
        heap = context.heap
        assert isinstance(heap, CollectiveHeap)
        assert context.transport == "collective" and not heap.directly_mapped and not heap.graph_safe
        for peer in range(world):
            if peer != rank:
                assert not heap.peer_tensor("landing", peer).any()
                assert heap.peer_tensor("landing", peer).data_ptr() == int(context.landing_pointers[peer])
        part_index = torch.zeros(world, MAX_TOKENS, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"part_index: expected int32 \[2, 7\], got torch.int64 \[2, 7\]"):
            combine_by(context, part_index, timeout_ns=1)
        with pytest.raises(ValueError, match=r"token_flags: half 1 of \[2, 1000\] ends at 8256 of 512 bytes"):
            context.host_transport.carry_dispatch(  # type: ignore[union-attr]
                context, epoch=1, exchange_id=0, num_tokens=0, max_tokens=1000, record_bytes=RECORD, timeout_ns=1
            )


def test_heap_and_arguments(get_pool) -> None:
    get_pool(2).run(properties)


def test_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match="the collective transport needs torch"):
        CollectiveHeap(RankGroup())


def carry_nothing(context: ExpertParallelContext, epoch: int, exchange_id: int = 0, record: int = RECORD) -> None:
    assert context.host_transport is not None
    context.host_transport.carry_dispatch(
        context,
        epoch=epoch,
        exchange_id=exchange_id,
        num_tokens=0,
        max_tokens=MAX_TOKENS,
        record_bytes=record,
        timeout_ns=context.startup_timeout_ns if epoch == 1 else context.timeout_ns,
    )


def combine_by(context: ExpertParallelContext, part_index: torch.Tensor, timeout_ns: int, epoch: int = 1) -> None:
    assert context.host_transport is not None
    context.host_transport.carry_combine(
        context,
        epoch=epoch,
        exchange_id=0,
        max_tokens=MAX_TOKENS,
        parts=PARTS,
        row_bytes=ROW,
        part_index=part_index,
        timeout_ns=timeout_ns,
    )


def test_what_is_under_way_is_kept_where_two_threads_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two contexts. Freed while its exchange is under way, a group waits for ranks that are gone."""
    looks, looked = threading.Event(), threading.Event()

    def slow() -> bool:
        if not looks.is_set():
            looks.set()
            looked.wait(0.5)
        return False

    def look() -> None:
        looks.wait(60)
        left_groups.free_ended()
        looked.set()

    left = [(lambda: True, ("ended",)), (slow, ("slow",)), (lambda: False, ("under way",))]
    monkeypatch.setattr(left_groups, "_LEFT", left)
    other = threading.Thread(target=look)
    other.start()
    left_groups.free_ended()
    other.join(60)
    assert [held for _, held in left_groups._LEFT] == [("slow",), ("under way",)]


def free_the_groups() -> None:
    """As the end of a process does, this waits for exchanges that go on: half an hour by the limit of a group."""
    left_groups._LEFT.clear()
    dist.destroy_process_group()
    gc.collect()


def give_up_alone(rank: int, world: int) -> float:
    """Rank 0 gives up while rank 1 does not come, and is free once the limit of a start is over."""
    context = make_context(timeout_s=0.2)
    context.allocate()
    context.heap.barrier()
    context.startup_timeout_s = 0.5
    start = time.monotonic()
    if rank == 0:
        context.abort("nobody hears this")
        context.close()
        del context
        free_the_groups()
    return time.monotonic() - start


def test_who_gives_up_waits_for_nobody_forever() -> None:
    outcomes = run_once(give_up_alone, 2)
    assert outcomes[0].error is None, outcomes[0].trace
    assert outcomes[0].result < PATIENCE_S


def fail_again_and_again(rank: int, world: int, transport: str) -> list[int]:
    """Files that are open after each of several contexts, in which a rank gave up between two steps."""
    config = MoELayerConfig(hidden_size=64, intermediate_size=64, num_experts=4, top_k=2, max_tokens_per_rank=8)
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        if transport == "hierarchical":
            patch.setenv("MOE_RUNTIME_HOST", f"host of rank {rank}")
        for attempt in range(9):
            context = ExpertParallelContext(
                device="cpu", transport=transport, timeout_s=PATIENCE_S, startup_timeout_s=PATIENCE_S
            )
            layer = MoELayer(config, context)
            layer.load_random(seed=0)
            x = torch.zeros(4, 64, dtype=torch.bfloat16)
            layer(x)
            if rank == attempt % world:
                context.abort("enough")
            else:
                with pytest.raises(PeerAbortedError, match="enough"):
                    layer(x)
            context.close()
            del context, layer
            gc.collect()
            opened.append(len(os.listdir("/proc/self/fd")))
    return opened


@pytest.mark.parametrize("transport", ["collective", "hierarchical"])
def test_contexts_that_fail_leave_no_connections(transport: str, get_pool) -> None:
    for opened in get_pool(2).run(fail_again_and_again, transport):
        assert opened[-1] - opened[2] < 6, f"a connection or more for each failure: {opened}"


def give_up_between_steps(rank: int, world: int, how: str) -> list[float]:
    """Rank 0 gives up while the others close; then the group does what it did before, and a new context its steps."""
    context = make_context(timeout_s=WITHOUT_ONE_S)
    prepare(context, world * MAX_TOKENS * RECORD)
    carry_nothing(context, 1)
    dist.barrier()
    if rank == 0:
        context.abort("x: too many tokens")
        context.close()
    else:
        with pytest.raises(PeerAbortedError, match="rank 0 gave up: x: too many tokens"):
            context.close()
    if how == "context":
        with make_context(timeout_s=WITHOUT_ONE_S) as context:
            prepare(context, world * MAX_TOKENS * RECORD)
            for epoch in (1, 2):
                carry_nothing(context, epoch)
    ranks = torch.tensor([float(rank)])
    dist.all_reduce(ranks)
    return ranks.tolist()


@pytest.mark.parametrize("how", ["group", "context"])
def test_who_gives_up_between_steps_leaves_the_group_alone(how: str, get_pool) -> None:
    assert get_pool(3).run(give_up_between_steps, how) == [[3.0]] * 3


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def one_rank_fails(rank: int, world: int, device: str, how: str) -> float:
    with make_context(device) as context:
        host_transport = prepare(context, world * MAX_TOKENS * RECORD)
        carry_nothing(context, 1)
        start = time.monotonic()
        if how == "abort":
            if rank == 1:
                context.abort("x: too many tokens")
                with pytest.raises(PeerAbortedError, match="rank 1 gave up: x: too many tokens"):
                    context.check()
            else:
                with pytest.raises(PeerAbortedError, match="rank 1 gave up: x: too many tokens") as caught:
                    carry_nothing(context, 2)
                assert caught.value.rank == 1
        elif how == "kernel":
            if rank == 1:
                for peer in range(world):
                    if peer != rank:
                        begin = context.signals_layout.abort + rank * ABORT_WORDS
                        words = torch.tensor([ErrorCode.ROUTING, Phase.DISPATCH_SEND, 2, 1, 77, 3], dtype=torch.int32)
                        signals_of(context, peer)[begin : begin + 6] = words.to(device)
            with pytest.raises(RoutingError, match="expert id 77 of token 3 of rank 1") as routing:
                carry_nothing(context, 2)
            assert routing.value.rank == 1
        elif how == "kernel after it":
            if rank == 1:
                record_failure(context, ErrorCode.ROUTING, 1, Phase.DISPATCH_SEND, 2, 77, 3)
                with pytest.raises(RoutingError, match="expert id 77 of token 3 of rank 1"):
                    context.check()
                for _ in range(2):
                    context.abort("it has failed")
            else:
                with pytest.raises(RoutingError, match="expert id 77 of token 3 of rank 1"):
                    carry_nothing(context, 2)
        elif how == "inside":
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    # What came next would be taken for the rows of this exchange.
                    patch.setattr(host_transport, "_check_headers", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        carry_nothing(context, 2)
                    context.abort("interrupted")
                else:
                    patch.setattr(collective, "ROLL_CALL_S", 0.3)
                    with pytest.raises(PeerTimeoutError, match="rank 1 did not take part"):
                        carry_nothing(context, 2)
        elif how == "exchange":
            told = r"rank 0: dispatch_send of epoch 2 in exchange 0, rank 1: dispatch_send of epoch 2 in exchange 5"
            with pytest.raises(StepMismatchError, match=told) as other:
                carry_nothing(context, 2, *((5, 2 * RECORD) if rank == 1 else ()))
            assert other.value.rank == int(rank != 1)
        elif rank == 1:
            part_index = torch.full((world, MAX_TOKENS), -1, dtype=torch.int32, device=device)
            with pytest.raises(StepMismatchError, match="not at the same step"):
                combine_by(context, part_index, context.timeout_ns)
        else:
            with pytest.raises(StepMismatchError, match="rank 1: combine_send of epoch 1"):
                carry_nothing(context, 2)
        assert context.failed
    return time.monotonic() - start


FAILURES = ["abort", "kernel", "kernel after it", "exchange", "step"]


@pytest.mark.parametrize("how", [*FAILURES, "inside"])
def test_a_failure_ends_the_step_on_every_rank(how: str, get_pool) -> None:
    assert max(get_pool(3).run(one_rank_fails, "cpu", how)) < PATIENCE_S


@pytest.mark.gpu
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_ends_the_step_on_every_gpu(how: str) -> None:
    for outcome in run_once(one_rank_fails, 2, "cuda", how, timeout=120.0, gpus=True):
        assert outcome.returned() < PATIENCE_S


def one_rank_errs(rank: int, world: int, how: str) -> str:
    """Rank 1 does something else than the others in its second step; the error of each rank."""
    with make_context() as context:
        sizes = {"num_experts": 6, "top_k": 2, "max_tokens_per_rank": 8}
        layer = TokenDispatcher(context, hidden_size=128, expert_row_capacity=20, **sizes)
        wider = TokenDispatcher(context, hidden_size=256, **sizes)

        def dispatch(dispatcher: TokenDispatcher, expert: int) -> DispatchedTokens:
            x = torch.ones(4, dispatcher.geometry.hidden, dtype=torch.bfloat16)
            return dispatcher.dispatch(x, torch.tensor([[expert, 4]] * 4), torch.ones(4, 2))

        def combine(arrived: DispatchedTokens) -> None:
            layer.combine(torch.ones(arrived.capacity, 128, dtype=torch.bfloat16), arrived.handle)

        combine(dispatch(layer, 0))
        with pytest.raises(MoERuntimeError) as caught:
            if how == "capacity":
                # The experts of rank 2, which has more rows than room once all tokens have arrived there.
                combine(dispatch(layer, 5))
            elif how == "layer":
                dispatch(wider if rank == 1 else layer, 0)
            else:
                arrived = dispatch(layer, 0)
                dispatch(layer, 0) if rank == 1 else combine(arrived)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("how", ["capacity", "layer", "dispatch for combine"])
def test_a_step_that_does_not_fit_is_told_to_every_rank(how: str, get_pool) -> None:
    kind = (
        "CapacityError: .* 24 rows arrived at rank 2" if how == "capacity" else "StepMismatchError: .* the same layers"
    )
    for text in get_pool(3).run(one_rank_errs, how):
        assert re.match(kind, text), text


SILENT: list[ExpertParallelContext] = []
"""Contexts that are not closed: without them their connections would end."""


def die_between_steps(rank: int, world: int, device: str, how: str) -> float:
    context = make_context(device, timeout_s=WITHOUT_ONE_S)
    prepare(context, world * MAX_TOKENS * RECORD)
    carry_nothing(context, 1)
    context.heap.barrier()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        SILENT.append(context)
        return 0.0  # and lives on, as idle workers do
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="dispatch_send of epoch 2: rank 1 did not take part") as caught:
        carry_nothing(context, 2)
    assert caught.value.rank == 1
    spent = time.monotonic() - start
    ended = re.search(rf"the exchange ended after ([\d.]+) s, its limit is {WITHOUT_ONE_S:g} s$", str(caught.value))
    # A connection that is lost may end it at once.
    assert ended and (0 if how == "killed" else WITHOUT_ONE_S) <= float(ended[1]) < spent
    context.close()
    if device == "cpu":
        del context, caught
        free_the_groups()
    return spent


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_missing_rank_is_named_in_time(how: str) -> None:
    check_survivors(run_once(die_between_steps, 3, "cpu", how), how)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_missing_gpu_rank_is_named_in_time(how: str) -> None:
    check_survivors(run_once(die_between_steps, 2, "cuda", how, timeout=120.0, gpus=True), how)


def test_a_capture_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    context = SimpleNamespace(
        graph_safe=False, device=torch.device("cuda"), transport="collective", transport_reasons={"nvshmem": "no P2P"}
    )
    with pytest.raises(ValueError, match=r"transport: collective waits for the host .* \(nvshmem: no P2P\)"):
        ExpertParallelContext._check_no_capture(context)  # type: ignore[arg-type]
    context.graph_safe = True
    ExpertParallelContext._check_no_capture(context)  # type: ignore[arg-type]


def capture_a_step(rank: int, world: int) -> None:
    config = MoELayerConfig(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, max_tokens_per_rank=8)
    with ExpertParallelContext(device="cuda", transport="collective") as context:
        layer = MoELayer(config, context)
        layer.load_random(0)
        x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
        layer(x)
        with pytest.raises(ValueError, match="transport: collective waits for the host"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer(x)
        layer(x)


@pytest.mark.gpu
def test_a_capture_over_the_host_is_refused() -> None:
    for outcome in run_once(capture_a_step, 2, timeout=120.0, gpus=True):
        outcome.returned()


def survive_rank_1(rank: int, world: int) -> ExpertParallelContext:
    """A context over a group of NCCL's own, after one step and the end of rank 1."""
    context = ExpertParallelContext(
        dist.new_group(), device="cuda", transport="collective", timeout_s=WITHOUT_ONE_S, startup_timeout_s=PATIENCE_S
    )
    prepare(context, world * MAX_TOKENS * RECORD)
    carry_nothing(context, 1)
    context.heap.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return context


def outlive_nccl(rank: int, world: int) -> None:
    """The watchdog of a group made now ends this process a second after an error; by itself that takes a minute."""
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "250"
    context = survive_rank_1(rank, world)
    with pytest.raises(PeerTimeoutError, match="rank 1 did not take part"):
        carry_nothing(context, 2)
    context.close()
    time.sleep(5)


@pytest.mark.gpu
def test_a_survivor_on_a_gpu_lives_on() -> None:
    survivor, _ = run_once(outlive_nccl, 2, timeout=120.0, gpus=True)
    assert survivor.error is None, survivor.trace
    assert survivor.exitcode == 0


def give_up_unheard(rank: int, world: int) -> tuple[bool, float]:
    """Rank 0 gives up in an exchange in which rank 1, which is gone, never takes part; whether closing aborted it."""
    context = survive_rank_1(rank, world)
    context.abort("nobody hears this")
    start = time.monotonic()
    context.close()
    return context.failed, time.monotonic() - start


@pytest.mark.gpu
def test_giving_up_on_a_gpu_waits_for_nobody_forever() -> None:
    survivor, _ = run_once(give_up_unheard, 2, timeout=120.0, gpus=True)
    assert survivor.error is None, survivor.trace
    assert survivor.result[0] and survivor.result[1] < PATIENCE_S


def exchanges_that_never_end(rank: int, world: int) -> None:
    """In place of NCCL: a group that counts how often it is aborted, and exchanges that end by that alone."""
    context = make_context(timeout_s=0.1)
    host_transport = prepare(context, world * MAX_TOKENS * RECORD)
    carry_nothing(context, 1)
    aborts: list[int] = []
    work = SimpleNamespace(is_completed=lambda: bool(aborts), wait=lambda: None)
    host_transport._nccl = SimpleNamespace(abort=lambda: aborts.append(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", lambda *_, **__: work)
        if rank == 0:
            with pytest.raises(PeerTimeoutError, match=r"did not take part; the exchange .* limit is 0\.1 s"):
                carry_nothing(context, 2)
        else:
            context.abort("x")
            assert not aborts
            context.close()
    assert len(aborts) == 1
    context.close()


def test_exchanges_by_nccl_that_do_not_end_are_aborted(get_pool) -> None:
    get_pool(2).run(exchanges_that_never_end)


def check_survivors(outcomes: list[Outcome], how: str) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            assert outcome.exitcode == 0, "it has died"
            assert outcome.returned() < PATIENCE_S, "it ended by the limit of a start"
    if how == "killed":
        assert outcomes[1].exitcode == -signal.SIGKILL
