"""What an exchange refuses, and what its ranks learn: stale handles, timeouts, wrong ids, arguments and peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm.errors import (
    CapacityError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    RoutingError,
    StaleHandleError,
    StepMismatchError,
)
from moe_runtime.dispatcher.handle import CombineSink, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.padded_rows import PaddedRows
from tests.support.exchange_data import RankInput, rank_input
from tests.support.token_parts import tokens_in_parts
from tests.support.virtual_exchange import (
    ENGINES,
    SETTINGS,
    Ranks,
    check_arrival,
    emulator,
    expert_rows,
    poisoned_memory,
)
from tests.support.waiting import synchronize

__all__ = ["emulator", "poisoned_memory"]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_dispatches_may_be_in_flight_and_a_third_makes_the_first_stale(
    engine: str, device: torch.device, seed: int
) -> None:
    ranks = Ranks(1, device, engine, token_format="nvfp4", mode="gathered", **SETTINGS)
    dispatcher, context = ranks.dispatchers[0], ranks.contexts[0]
    data = [rank_input(seed + i, 0, 5, 256, 7, 3).to(device) for i in range(3)]
    first, second = (dispatcher.dispatch(*d) for d in data[:2])
    host = [rank_input(seed + i, 0, 5, 256, 7, 3) for i in range(3)]
    check_arrival(first, host[:1], range(7))
    check_arrival(second, host[1:2], range(7))
    dispatcher.combine(expert_rows(second, 256, seed, torch.bfloat16), second.handle)
    third = dispatcher.dispatch(*data[2])
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
    settings = {**SETTINGS, "max_tokens_per_rank": max_tokens}
    ranks = Ranks(1, device, engine, token_format="nvfp4", mode="gathered", **settings)
    data = [rank_input(seed + i, 0, max_tokens, 256, 7, 3).to(device) for i in range(3)]
    first, *_ = (ranks.dispatchers[0].dispatch_send(*d) for d in data)
    with pytest.raises(StaleHandleError, match="rank 0") as caught:
        arrived = ranks.dispatchers[0].dispatch_recv(first)
        synchronize(device)
        assert arrived.group_offsets.tolist() == [0] * 8
        ranks.contexts[0].check()
    assert caught.value.phase == Phase.DISPATCH_RECV


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_step_of_a_layer_waits_longer_and_a_timeout_names_its_limit(
    engine: str, device: torch.device, seed: int
) -> None:
    ranks = Ranks(2, device, engine, **SETTINGS)
    for context in ranks.contexts:
        context.timeout_ns, context.startup_timeout_ns = 250_000_000, 500_000_000
    inputs = [rank_input(seed, r, 3, 256, 7, 3).to(device) for r in range(2)]
    first = ranks.dispatchers[0].dispatch_send(*inputs[0])
    assert first.timeout_ns == 500_000_000
    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not answer within 0\.5 s") as caught:
        ranks.dispatchers[0].dispatch_recv(first)
        synchronize(device)
        ranks.contexts[0].check()
    assert (caught.value.rank, caught.value.phase) == (1, Phase.DISPATCH_RECV)

    ranks = Ranks(2, device, engine, **SETTINGS)
    arrived = ranks.dispatch(inputs)
    ranks.combine(arrived, [expert_rows(a, 256, seed, torch.bfloat16) for a in arrived])
    later = ranks.dispatchers[0].dispatch_send(*inputs[0])
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
    y = arrived.handle._output
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        ranks.dispatchers[0].combine_recv(arrived.handle)
        synchronize(device)
        ranks.contexts[0].check()
    assert y is not None and y.isnan().all()


@pytest.fixture(params=["each token", "parts"])
def summed(request: pytest.FixtureRequest) -> Iterator[None]:
    """How `combine_recv` waits: for the partial results of each token, or for parts of the tokens."""
    with tokens_in_parts() if request.param == "parts" else nullcontext():
        yield


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("summed")
def test_combine_flags_of_long_ago_are_not_ahead(engine: str, device: torch.device, seed: int) -> None:
    """A flag that 2^31 dispatches have left alone, since nobody has combined them."""
    inputs = [rank_input(seed, rank, 5, 256, 7, 3).to(device) for rank in range(2)]
    for epoch in (2, 3, 2 - 2**31, 3 - 2**31):
        for phase in (Phase.DISPATCH_SEND, Phase.COMBINE_RECV):
            ranks = Ranks(2, device, engine, mode="contiguous", **SETTINGS)
            for context in ranks.contexts:
                layout, signals = context.signals_layout, context.signals
                context.timeout_ns = context.startup_timeout_ns = 500_000_000
                context.epoch.fill_(epoch)
                signals[layout.ready : layout.ready + 2] = epoch + (phase == Phase.COMBINE_RECV)
                for last in (epoch, epoch - 1):
                    first = layout.dispatch_flag + last % 2 * 2
                    signals[first : first + 2] = last
            own = ranks.dispatchers[0]
            if phase == Phase.COMBINE_RECV:
                arrived = ranks.dispatch(inputs)[0]
                own.combine_send(expert_rows(arrived, 256, seed, torch.bfloat16), arrived.handle)
            with pytest.raises(PeerTimeoutError, match="rank 1") as caught:
                if phase == Phase.COMBINE_RECV:
                    own.combine_recv(arrived.handle)
                else:
                    # The peer may still read what came in the dispatch before the last.
                    own.dispatch_send(*inputs[0])
                synchronize(device)
                ranks.contexts[0].check()
            assert caught.value.phase == phase, epoch


def test_a_dispatcher_wants_a_context() -> None:
    with pytest.raises(ValueError, match="context: expected an ExpertParallelContext, got NoneType"):
        TokenDispatcher(None, **SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_scale: expected a positive number, with nvfp4 tokens, got 'a'"):
        Ranks(1, torch.device("cpu"), "torch", token_format="nvfp4", input_scale="a", **SETTINGS)


def test_a_handle_combines_once(device: torch.device, seed: int) -> None:
    ranks = Ranks(1, device, "torch", **SETTINGS)
    data = rank_input(seed, 0, 5, 256, 7, 3).to(device)
    arrived = ranks.dispatchers[0].dispatch(*data)
    sink = CombineSink(arrived.handle)
    sink.rows.zero_()
    ranks.dispatchers[0].combine(sink, arrived.handle)
    with pytest.raises(ValueError, match="handle: combine_send was already called"):
        ranks.dispatchers[0].combine(sink, arrived.handle)


def test_on_one_rank_a_handle_is_good_after_a_wrong_argument(device: torch.device, seed: int) -> None:
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    data = rank_input(seed, 0, 5, 256, 7, 3).to(device)
    arrived = dispatcher.dispatch(*data)
    sink = CombineSink(arrived.handle)
    sink.rows.zero_()
    with pytest.raises(ValueError, match="expert_output: expected a tensor, got NoneType"):
        dispatcher.combine_send(None, arrived.handle)  # type: ignore[arg-type]
    dispatcher.combine_send(sink, arrived.handle)
    with pytest.raises(ValueError, match="shared: expected a tensor, got list"):
        dispatcher.combine_recv(arrived.handle, shared=[1])  # type: ignore[arg-type]
    assert not dispatcher.combine_recv(arrived.handle).any()


def test_memory_into_which_kernels_could_not_store_is_refused(device: torch.device, seed: int) -> None:
    """They store 16 bytes at a time, which a GPU does not forgive elsewhere."""
    data = rank_input(seed, 0, 5, 256, 7, 3).to(device)
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    arrived = dispatcher.dispatch(*data)
    out = torch.zeros(4 + 5 * 256, dtype=torch.bfloat16, device=device)[4:].view(5, 256)
    with pytest.raises(ValueError, match=r"^out: expected memory at a multiple of 16 bytes"):
        dispatcher.combine_send(expert_rows(arrived, 256, seed, torch.bfloat16), arrived.handle, out=out)
    dispatcher = Ranks(1, device, "torch", mode="gathered", **SETTINGS).dispatchers[0]
    padded = PaddedRows.allocate(7, 5, 512, 1, 3, device=device)
    rows = torch.zeros(8 + 7 * 5 * 512, dtype=torch.uint8, device=device)[8:].view(7, 5, 512)
    handle = dispatcher.dispatch_send(*data)
    with pytest.raises(ValueError, match=r"^out\.rows: expected memory at a multiple of 16 bytes"):
        dispatcher.dispatch_recv_padded(handle, replace(padded, rows=rows))


def test_no_expert_output_is_told_to_the_peers(device: torch.device, seed: int) -> None:
    ranks = Ranks(2, device, "torch", **SETTINGS)
    data = [rank_input(seed, rank, 5, 256, 7, 3).to(device) for rank in range(2)]
    pairs = list(zip(ranks.dispatchers, data, strict=True))
    handles = [dispatcher.dispatch_send(*i) for dispatcher, i in pairs]
    arrived = [dispatcher.dispatch_recv(h) for dispatcher, h in zip(ranks.dispatchers, handles, strict=True)]
    with pytest.raises(ValueError, match="expert_output: expected a tensor, got NoneType"):
        ranks.dispatchers[0].combine(None, arrived[0].handle)  # type: ignore[arg-type]
    synchronize(device)
    with pytest.raises(PeerAbortedError, match="rank 0 gave up: expert_output: expected a tensor"):
        ranks.contexts[1].check_peers()


@pytest.mark.parametrize("half", ["dispatch_send", "dispatch_recv", "combine_send", "combine_recv"])
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_what_goes_wrong_in_the_exchange_itself_is_told_to_the_peers(
    half: str, error: BaseException, device: torch.device, seed: int
) -> None:
    ranks = Ranks(2, device, "torch", **SETTINGS)
    inputs = [rank_input(seed, rank, 5, 256, 7, 3).to(device) for rank in range(2)]
    arrived = ranks.dispatch(inputs)
    ranks.combine(arrived, [expert_rows(a, 256, seed, torch.bfloat16) for a in arrived])

    def fails(*_: object, **__: object) -> None:
        raise error

    names = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
    exchange = ranks.dispatchers[0]._exchange
    kernels = {name: getattr(exchange.backend, name) for name in names} | {half: fails}
    exchange.backend = SimpleNamespace(**kernels)  # type: ignore[assignment]
    with pytest.raises(type(error)):
        arrived = ranks.dispatch(inputs)
        ranks.combine(arrived, [expert_rows(a, 256, seed, torch.bfloat16) for a in arrived])
    synchronize(device)
    with pytest.raises(PeerAbortedError, match=f"rank 0 gave up: {type(error).__name__}: "):
        ranks.contexts[1].check_peers()


def test_stages_come_in_order_and_a_sink_belongs_to_its_handle(device: torch.device, seed: int) -> None:
    data = rank_input(seed, 0, 5, 256, 7, 3).to(device)

    def send(dispatcher: TokenDispatcher) -> DispatchHandle:
        return dispatcher.dispatch_send(*data)

    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    with pytest.raises(ValueError, match="handle: expected dispatch_recv to be called with it before combine_send"):
        handle = send(dispatcher)
        dispatcher.combine_send(CombineSink(handle), handle)
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    with pytest.raises(ValueError, match="handle: dispatch_recv was already called with it"):
        dispatcher.dispatch_recv(dispatcher.dispatch_recv(send(dispatcher)).handle)
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    with pytest.raises(ValueError, match="handle: expected combine_send to be called with it before combine_recv"):
        dispatcher.combine_recv(dispatcher.dispatch_recv(send(dispatcher)).handle)
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    first, second = (dispatcher.dispatch_recv(send(dispatcher)).handle for _ in range(2))
    with pytest.raises(ValueError, match="expert_output: expected a CombineSink of the same handle"):
        dispatcher.combine(CombineSink(first), second)
    dispatcher = Ranks(1, device, "torch", **SETTINGS).dispatchers[0]
    sink = CombineSink(dispatcher.dispatch_recv(send(dispatcher)).handle)
    sink.order = 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"expert_output\.order: expected a LaunchOrder, got int"):
        dispatcher.combine(sink, sink.handle)
    for stage in ("dispatch_recv", "combine", "combine_send", "combine_recv"):
        ranks = Ranks(1, device, "torch", other_tokens=5, **SETTINGS)
        dispatcher = ranks.dispatchers[0]
        handle = send(dispatcher)
        arguments: tuple[object, ...] = (handle,)
        if stage != "dispatch_recv":
            sink = CombineSink(dispatcher.dispatch_recv(handle).handle)
            if stage == "combine_recv":
                dispatcher.combine_send(sink, handle)
            else:
                arguments = sink, handle
        with pytest.raises(ValueError, match="handle: it belongs to another dispatcher"):
            getattr(ranks.others[0], stage)(*arguments)


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


@pytest.mark.parametrize("bad", [2**31 - 1, 2**29, 2**30 + 7, 65535, -2, -(2**31), 2**32, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_id_is_named_as_it_came(engine: str, bad: int, device: torch.device, seed: int) -> None:
    """Also one that an id refused by a placement would look like. Beyond int32 its limit is."""
    (dispatcher,) = Ranks(1, device, engine, **SETTINGS).dispatchers
    data = rank_input(seed, 0, 3, 256, 7, 3)
    data.topk_idx[2] = torch.tensor([4, bad, 0])
    named = min(max(bad, -(2**31)), 2**31 - 1)
    dispatcher.dispatch_send(data.x.to(device), data.topk_idx.to(device), data.topk_weights.to(device))
    with pytest.raises(RoutingError, match=f"expert id {named} of token 2 of rank 0 is out of range"):
        dispatcher.context.check_peers()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_capacity_of_just_what_arrives_suffices(engine: str, device: torch.device, seed: int) -> None:
    inputs = [rank_input(seed, r, 5, 256, 7, 3) for r in range(2)]
    most = max(sum(int(((i.topk_idx >= a) & (i.topk_idx < b)).sum()) for i in inputs) for a, b in ((0, 4), (4, 7)))
    ranks = Ranks(2, device, engine, expert_row_capacity=most, **SETTINGS)
    arrived = ranks.dispatch([i.to(device) for i in inputs])
    for a, local in zip(arrived, (range(4), range(4, 7)), strict=True):
        check_arrival(a, inputs, local)
    assert max(int(a.group_offsets[-1]) for a in arrived) == most
    for context in ranks.contexts:
        context.check_peers()


@pytest.mark.parametrize("engine", ENGINES)
def test_too_small_a_capacity_is_an_error_on_every_rank(engine: str, device: torch.device, seed: int) -> None:
    ranks = Ranks(2, device, engine, expert_row_capacity=4, **SETTINGS)
    inputs = [rank_input(seed, r, 5, 256, 7, 3, "one").to(device) for r in range(2)]
    handles = [d.dispatch_send(*i) for d, i in zip(ranks.dispatchers, inputs, strict=True)]
    told = "30 rows arrived at rank 1, more than its expert_row_capacity of 4"
    with pytest.raises(CapacityError, match=told):
        ranks.dispatchers[1].dispatch_recv(handles[1])
        synchronize(device)
        ranks.contexts[1].check()
    with pytest.raises(CapacityError, match=told):
        ranks.dispatchers[0].dispatch_recv(handles[0])
        synchronize(device)
        ranks.contexts[0].check()


def wrong_calls(good: RankInput, device: torch.device) -> dict[str, tuple[RankInput, str]]:
    x, idx, w = good
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
        ranks.dispatchers[0].dispatch(*data)


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
    [
        (12, "contiguous", 12),
        (12, "gathered", 5),
        (5, "contiguous", 12),
        (600, "contiguous", 40),
        (600, "gathered", 600),
    ],
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
    handles = [d.dispatch_send(*i) for d, i in zip(dispatchers, inputs, strict=True)]
    text = (
        r"dispatch_recv of epoch 2: rank (1 was in exchange 1 of the context, rank [02] in 0|[02] .* rank 1 in 1): all"
    )
    for dispatcher, handle, context in zip(dispatchers, handles, ranks.contexts, strict=True):
        with pytest.raises(StepMismatchError, match=text):
            arrived_here = dispatcher.dispatch_recv(handle)
            assert int(arrived_here.group_offsets[-1]) <= arrived_here.capacity
            context.check_peers()
