"""The context: what layers register, what ranks must agree on, and how failures reach every rank."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_runtime.comm.errors import (
    CapacityError,
    ErrorCode,
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    RoutingError,
    StaleHandleError,
    StepMismatchError,
)
from moe_runtime.comm.failures import find_failure
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
from moe_runtime.comm.messages import integer
from moe_runtime.comm.signals import (
    ABORT_WORDS,
    COUNT_BITS,
    ERROR_WORDS,
    EXCHANGES,
    NUM_COUNTERS,
    PARTIAL_FLAG_TOKENS,
    PROGRESS_PARTS,
    SignalLayout,
    exchange_of,
    tag_of,
)
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import abort_peers_on_error, collective_step
from moe_runtime.kernels.runtime import resolve_engine
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once
from tests.support.waiting import synchronize


def virtual(world: int, device: torch.device | str = "cpu") -> list[ExpertParallelContext]:
    contexts = [ExpertParallelContext(heap=heap) for heap in PrivateHeap.group(world, device)]
    for context in contexts:
        context.register(token_flags=100, landing=1000, combine=300)
    for context in contexts:
        context.allocate()
    return contexts


# --- one process


def test_a_single_rank_needs_no_group(device: torch.device) -> None:
    with ExpertParallelContext(device=device) as context:
        assert (context.rank, context.world_size, context.transport) == (0, 1, "private")
        assert context.engine == resolve_engine("auto", context.device)
        assert (context.engine == "torch") == (device.type == "cpu")
        assert (context.timeout_ns, context.startup_timeout_ns) == (30 * 10**9, 120 * 10**9)
        assert "torch.distributed" in context.transport_reasons["collective"]
        assert context.host_transport is None
        context.register(token_flags=100, landing=1000)
        context.register(landing=900, combine=257, agree={"anything": 1})
        assert context.half_bytes == {"token_flags": 256, "landing": 1024, "combine": 512}
        assert not context.allocated
        context.allocate()
        assert context.allocated and not context.failed
        layout = context.signals_layout
        assert layout == SignalLayout(1)
        assert context.signals.dtype == torch.int32 and context.signals.shape == (layout.num_words,)
        assert context.signals.device == context.device
        for region, pointers in [
            ("signals", context.signal_pointers),
            ("token_flags", context.token_flags_pointers),
            ("landing", context.landing_pointers),
            ("combine", context.combine_pointers),
        ]:
            assert pointers.dtype == torch.int64 and pointers.device == context.device
            assert pointers.tolist() == [context.heap.tensor(region).data_ptr()]
        assert context.heap.tensor("landing").shape == (2 * 1024,)
        sizes = [context.heap.region(name) for name in ("signals", "token_flags", "landing", "combine")]
        assert context.reserved_bytes == context.heap.total_bytes == sum(-(-size // 256) * 256 for _, size in sizes)
        for words, count in [(context.epoch, 1), (context.latch, 2), (context.counters, NUM_COUNTERS)]:
            assert words.dtype == torch.int32 and words.device == context.device and words.tolist() == [0] * count
        assert context.error.device.type == "cpu" and context.error.tolist() == [0] * ERROR_WORDS
        assert context.error.is_pinned() == (device.type == "cuda")
        context.allocate()
        context.check()
        context.check_peers()
    assert context.closed
    context.close()
    with pytest.raises(ValueError, match="context: it is closed"):
        context.check()


def test_nothing_needs_to_be_registered() -> None:
    with ExpertParallelContext(device="cpu") as context:
        context.allocate()
        assert context.half_bytes == {"token_flags": 256, "landing": 256, "combine": 256}


def test_a_later_layer_must_fit() -> None:
    with ExpertParallelContext(device="cpu") as context:
        context.register(landing=1000)
        context.allocate()
        context.register(landing=1024, token_flags=10)
        with pytest.raises(ValueError, match="landing: 1025 bytes needed, but the context is allocated with 1024"):
            context.register(landing=1025)
        with pytest.raises(ValueError, match="staging_bytes: 1 bytes needed, but the context is allocated with 0"):
            context.register(staging_bytes=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_s": 0.0}, "timeout_s: expected a positive, finite number of seconds, at most 1e.09, got 0.0"),
        ({"startup_timeout_s": float("nan")}, "startup_timeout_s: expected a positive, finite number .*, got nan"),
        (
            {"timeout_s": float("inf")},
            "timeout_s: expected a positive, finite number of seconds, at most 1e.09, got inf",
        ),
        (
            {"transport": "tcp"},
            "transport: expected auto, .*, private, hierarchical or collective, got 'tcp'",
        ),
        ({"transport": "collective"}, "transport: collective cannot be used: torch.distributed is not initialised"),
        ({"engine": "nvcc"}, "engine: expected auto, cuda, triton or torch, got 'nvcc'"),
        ({"device": "meta"}, "device: expected a device of this machine, got meta"),
        ({"device": "foo"}, "device: expected a device such as cpu or cuda:0, got 'foo'"),
        ({"device": 1.5}, "device: expected a device such as cpu or cuda:0, got 1.5"),
        ({"device": "cuda:99"}, "device: expected a device of this machine, got cuda:99"),
        ({"timeout_s": "3"}, "timeout_s: expected seconds as a number, got '3'"),
        ({"startup_timeout_s": None}, "startup_timeout_s: expected seconds as a number, got None"),
        ({"timeout_s": True}, "timeout_s: expected seconds as a number, got True"),
        ({"group": np.zeros(2)}, "group: expected a ProcessGroup, a DeviceMesh or None, got ndarray"),
        ({"heap": 5}, "heap: expected a SymmetricHeap, got int"),
        ({"group": "world"}, "group: expected a ProcessGroup, a DeviceMesh or None, got str"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertParallelContext(**({"device": "cpu"} | arguments))  # type: ignore[arg-type]


def test_wrong_arguments_beside_a_heap_are_named() -> None:
    with pytest.raises(ValueError, match="group: expected None together with heap"):
        ExpertParallelContext("x", heap=PrivateHeap())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="transport: expected auto or private, got 'shared'"):
        ExpertParallelContext(heap=PrivateHeap(), transport="shared")
    with pytest.raises(ValueError, match="device: expected a device such as cpu or cuda:0, got 'foo'"):
        ExpertParallelContext(heap=PrivateHeap(), device="foo")
    ExpertParallelContext(heap=PrivateHeap(), device="cpu:0").close()
    with pytest.raises(ValueError, match=r"device: expected (the heap's, cpu|a device of this machine), got cuda"):
        ExpertParallelContext(heap=PrivateHeap(), device="cuda")
    heap = PrivateHeap()
    heap.allocate()
    with pytest.raises(ValueError, match="heap: expected one that is not allocated yet"):
        ExpertParallelContext(heap=heap)


def test_wrong_registrations_are_named() -> None:
    context = ExpertParallelContext(device="cpu")
    with pytest.raises(ValueError, match=r"region: expected one of .*, got 'signals'"):
        context.register(signals=10)
    with pytest.raises(ValueError, match=r"landing: expected an integer from 0 to .*, got -1"):
        context.register(landing=-1)
    for wrong, message in (
        ({"staging_bytes": 2.0}, "staging_bytes: expected an integer from 0 to .*, got 2.0"),
        ({"combine": 2**62}, "combine: expected an integer from 0 to"),
        ({"about": 5}, "about: expected a str, got int"),
        ({"agree": [1]}, "agree: expected a Mapping, got list"),
        ({"agree": {None: 1}}, "agree: expected texts as keys, got None"),
        ({"agree": {"top_p": math.nan}}, "agree: top_p: expected a value that equals itself, got nan"),
        ({"agree": {"top_k": 10**100}}, "agree: expected integers of at most 100 digits"),
    ):
        with pytest.raises(ValueError, match=message):
            context.register(landing=1000, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="landing: expected an integer from 0 to"):
        context.register(landing=2**46 + 1, agree={"top_k": 2})
    # A rank that tries again has the sizes and values of its peers.
    assert context.half_bytes["landing"] == 256 and context._agreement.complete
    with pytest.raises(ValueError, match="reason: expected a str, got int"):
        context.abort(5)  # type: ignore[arg-type]
    context.close()
    with pytest.raises(ValueError, match="context: it is closed"):
        context.register(landing=1)


# --- failures, with virtual ranks

CODES: list[tuple[ErrorCode, type[MoERuntimeError], str]] = [
    (ErrorCode.ROUTING, RoutingError, "expert id 77 of token 5 of rank 1 is out of range or twice in its top-k"),
    (ErrorCode.CAPACITY, CapacityError, "77 rows arrived at rank 1, more than its expert_row_capacity of 5"),
    (ErrorCode.TIMEOUT, PeerTimeoutError, "rank 1 did not answer within 0.077 s"),
    (ErrorCode.EXPERT_CAPACITY, CapacityError, "77 rows arrived for one expert of rank 1, which has room for 5"),
    (
        ErrorCode.MISMATCH,
        StepMismatchError,
        "rank 1 was in exchange 77 of the context, rank 2 in 5: all ranks have to call the same layers in the same "
        "order, with equal max_tokens",
    ),
    (ErrorCode.STALE_HANDLE, StaleHandleError, "its handle was used after two later dispatches had begun"),
]


@pytest.mark.parametrize(("code", "kind", "text"), CODES)
def test_a_recorded_error_is_raised_ever_after(code: ErrorCode, kind: type, text: str, device: torch.device) -> None:
    contexts = virtual(3, device)
    contexts[0].error[:7] = torch.tensor([code, 1, Phase.DISPATCH_RECV, 12, 77, 2, 5])
    for attempt in (contexts[0].check, contexts[0].check, contexts[0].check_peers, contexts[0].allocate):
        with pytest.raises(kind) as caught:
            attempt()
        assert str(caught.value) == f"rank 2, dispatch_recv of epoch 12: {text}"
        assert (caught.value.rank, caught.value.phase) == (1, Phase.DISPATCH_RECV)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (str(copy), copy.rank, copy.phase) == (str(caught.value), 1, Phase.DISPATCH_RECV)
    assert contexts[0].failed
    contexts[0].error.zero_()
    with pytest.raises(kind):
        contexts[0].check()
    contexts[1].check()
    for context in contexts:
        context.close()
    with pytest.raises(kind):
        contexts[0].check()


@pytest.mark.parametrize(("code", "kind", "text"), CODES)
def test_abort_words_of_a_peer_say_the_same(code: ErrorCode, kind: type, text: str, device: torch.device) -> None:
    """What a kernel of rank 2 writes into the signals of rank 0."""
    contexts = virtual(3, device)
    start = contexts[0].signals_layout.abort + 2 * ABORT_WORDS
    words = torch.tensor([code, Phase.DISPATCH_RECV, 12, 1, 77, 5], dtype=torch.int32)
    contexts[0].signals[start : start + 6] = words.to(device)
    if device.type == "cuda":
        contexts[0].check()  # It never looks at device memory.
    with pytest.raises(kind) as caught:
        contexts[0].check() if device.type == "cpu" else contexts[0].check_peers()
    assert str(caught.value) == f"rank 2, dispatch_recv of epoch 12: {text}"


@pytest.mark.parametrize(
    "reason",
    ["", "x: expected [4, 64], got [5, 64]", "Ω" * 127 + "end", "a" + "Ω" * 200, "a" * 500, "/t\udce9l\udce9/x"],
)
def test_abort_reaches_every_peer_with_its_reason(reason: str, device: torch.device) -> None:
    contexts = virtual(3, device)
    contexts[1].abort(reason)
    contexts[1].abort("a second reason is not told")
    synchronize(device)
    assert [context.failed for context in contexts] == [False, True, False]
    cut = reason.encode(errors="replace")[:256].decode(errors="ignore")
    for context in contexts:
        for _ in range(2):
            with pytest.raises(PeerAbortedError) as caught:
                context.check_peers()
            assert caught.value.rank == 1
            if context.rank == 1:
                assert str(caught.value) == f"rank 1 gave up: {reason}"
            else:
                told = cut or "no reason given"
                assert str(caught.value) == f"rank 1, host of epoch 0: rank 1 gave up: {told}"
        assert context.failed
    contexts[2].abort("too late")
    for context in contexts:
        context.close()


def test_a_first_cause_goes_before_what_follows_from_it() -> None:
    contexts = virtual(4)
    layout = contexts[0].signals_layout

    def tell(rank: int, code: ErrorCode, about: int) -> None:
        start = layout.abort + rank * ABORT_WORDS
        contexts[0].signals[start + 3] = about
        contexts[0].signals[start] = int(code)

    # Rank 2 stopped because rank 3 had; this rank's own kernel stopped because rank 2 had.
    tell(2, ErrorCode.ABORTED, 3)
    contexts[0].error[:6] = torch.tensor([ErrorCode.ABORTED, 2, Phase.COMBINE_RECV, 4, 0, 0])
    tell(3, ErrorCode.ROUTING, 3)
    with pytest.raises(RoutingError, match="of rank 3 is out of range") as caught:
        contexts[0].check()
    assert caught.value.rank == 3


@pytest.mark.parametrize("world", [1, 2, 8])
def test_every_word_has_one_writer(world: int) -> None:
    layout = SignalLayout(world)
    words = [layout.words_of(rank) for rank in range(world)]
    assert sorted(word for of_rank in words for word in of_rank) == list(range(layout.num_words))
    per_rank = {
        "token_count": 2,
        "ready": 1,
        "progress": 2 * PROGRESS_PARTS,
        "partial_flag": 2 * PARTIAL_FLAG_TOKENS,
    }
    for field, count in per_rank.items():
        for rank, of_rank in enumerate(words):
            assert {getattr(layout, field) + i * world + rank for i in range(count)} <= set(of_rank), field


@pytest.mark.parametrize("number", [0, 1, EXCHANGES - 1])
def test_a_number_of_tokens_tells_of_its_epoch_and_exchange(number: int) -> None:
    tag = number << COUNT_BITS
    around_the_wrap = [(epoch + 2**31) % 2**32 - 2**31 for epoch in range(2**31 - 4, 2**31 + 4)]
    for epoch in (1, 2, 3, 4, 1000, *around_the_wrap, -3, -2, -1):
        word = tag_of(tag, epoch) + 2**COUNT_BITS - 1
        after = (epoch + 2 + 2**31) % 2**32 - 2**31
        assert 0 <= word < 2**31 and exchange_of(word) == number
        assert word - tag_of(tag, after) not in range(2**COUNT_BITS), "the next epoch of the half takes it for its own"
    for first in (1, 2):
        assert 0 - tag_of(tag, first) < 0, "nobody has written it"


def test_unknown_words_are_still_an_error() -> None:
    context = virtual(2)[0]
    context.error[:7] = torch.tensor([99, 1, 98, 3, 4, 0, 5])
    with pytest.raises(MoERuntimeError, match="unknown error code 99 about rank 1"):
        context.check()


def test_an_exception_in_the_block_aborts() -> None:
    contexts = virtual(2)
    with pytest.raises(KeyError), contexts[0]:
        raise KeyError("weights")
    assert contexts[0].closed and contexts[0].failed
    with pytest.raises(PeerAbortedError, match="rank 0 gave up: KeyError: 'weights'"):
        contexts[1].check()


@pytest.mark.parametrize("around", [abort_peers_on_error, collective_step])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("x: expected a tensor"), "x: expected a tensor"),
        (KeyError("w1"), "KeyError: 'w1'"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (PeerTimeoutError("in another context", 7), "PeerTimeoutError: in another context"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_peers_are_told_of_every_error_in_one_wording(
    error: BaseException, told: str, around: Callable[[ExpertParallelContext], AbstractContextManager[None]]
) -> None:
    contexts = virtual(2)
    with pytest.raises(type(error)) as caught, around(contexts[0]):
        raise error
    assert caught.value is error
    with pytest.raises(PeerAbortedError) as heard:
        contexts[1].check()
    assert str(heard.value) == f"rank 0, host of epoch 0: rank 0 gave up: {told}"
    alone = virtual(1)[0]
    with pytest.raises(type(error)), around(alone):
        raise error
    alone.check()


def test_what_is_allocated_is_logged_by_the_first_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "moe_runtime"):
        contexts = virtual(2)
        contexts[0].allocate()
    num_bytes = contexts[0].reserved_bytes
    assert [record.getMessage() for record in caplog.records] == [
        f"2 rank(s): transport private, engine torch, {num_bytes} bytes reserved on each"
    ]


def test_what_the_last_step_recorded_is_raised_at_the_end_of_the_block(device: torch.device) -> None:
    """On a GPU no call may come after it; what has been raised, or a peer alone has met with, is not raised there."""
    for caught in (False, True):
        context = virtual(1, device)[0]
        record = torch.tensor([ErrorCode.ROUTING, 0, 3, Phase.DISPATCH_SEND, 99, 5, 0, 0], dtype=torch.int32)
        with pytest.raises(RoutingError, match="expert id 99") if not caught else contextlib.nullcontext():
            with context:
                context.error.copy_(record)
                if caught:
                    with pytest.raises(RoutingError):
                        context.check()
        assert context.closed and context.failed
    first, second = virtual(2, device)
    with second:
        first.abort("no weights")
        synchronize(device)
    assert second.closed and second.failed


def test_a_context_closes_even_if_peers_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    context = virtual(2)[0]
    monkeypatch.setattr(context, "abort", lambda reason: 1 / 0)
    with pytest.raises(ZeroDivisionError), context:
        raise KeyError("weights")
    assert context.closed


def test_a_host_failure_is_kept() -> None:
    context = virtual(1)[0]
    first = PeerTimeoutError("first", 0)
    assert context.fail(first) is first
    assert context.fail(PeerTimeoutError("second", 0)) is first
    with pytest.raises(PeerTimeoutError, match="first"):
        context.check()


# --- several processes


def exchange_in(context: ExpertParallelContext, base: int) -> None:
    """Each rank writes its mark into every rank's landing region; all see all marks."""
    with context:
        context.register(landing=64, agree={"hidden_size": 64, "format": "nvfp4"})
        context.allocate()
        for peer in range(context.world_size):
            context.heap.peer_tensor("landing", peer)[context.rank] = base + context.rank
        context.heap.barrier()
        marks = context.heap.tensor("landing")[: context.world_size].tolist()
        assert marks == [base + rank for rank in range(context.world_size)]
        context.check()


def in_shared_memory(rank: int, world: int) -> None:
    for base in (10, 20):
        context = ExpertParallelContext(device="cpu", startup_timeout_s=PATIENCE_S)
        assert context.transport == ("shared" if world > 1 else "private")
        assert (context.rank, context.world_size) == (rank, world)
        exchange_in(context, base)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_contexts_over_shared_memory(world: int, get_pool) -> None:
    # A pool's ranks come to it one by one, when they have imported all this.
    get_pool(world).run(in_shared_memory, timeout=150)


def in_two_halves(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    context = ExpertParallelContext(pairs[mine], device="cpu", startup_timeout_s=PATIENCE_S)
    assert (context.rank, context.world_size) == (rank % 2, 2)
    exchange_in(context, 10 * mine)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    exchange_in(ExpertParallelContext(mesh["dp"], device="cpu", startup_timeout_s=PATIENCE_S), 50 * (rank % 2))
    # What goes wrong in one half does not touch the other.
    with ExpertParallelContext(pairs[mine], device="cpu", startup_timeout_s=PATIENCE_S) as context:
        context.allocate()
        if rank == 3:
            context.abort("only in the second half")
        if mine == 1:
            with pytest.raises(PeerAbortedError, match="only in the second half"):
                until_failure(context)
        context.check() if mine == 0 else None


def until_failure(context: ExpertParallelContext, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        context.check()
        time.sleep(0.001)


def test_contexts_of_parts_of_the_world(get_pool) -> None:
    get_pool(4).run(in_two_halves)


def disagree(rank: int, world: int) -> None:
    with ExpertParallelContext(device="cpu", startup_timeout_s=PATIENCE_S) as context:
        context.register(landing=100, agree={"hidden_size": 64, "top_k": 2}, about="layer 0")
        agree = {"hidden_size": 128 if rank == 1 else 64}
        context.register(landing=300 if rank == 2 else 100, agree=agree, about="layer 1")
        context.allocate()


def test_disagreement_is_named_on_every_rank(get_pool) -> None:
    for outcome in get_pool(4).outcomes(disagree):
        assert isinstance(outcome.error, ValueError), outcome
        assert str(outcome.error) == (
            "agree: ranks disagree on hidden_size (layer 1): rank 0: 64, rank 1: 128, rank 2: 64, rank 3: 64; "
            "bytes of landing: rank 0: 256, rank 1: 256, rank 2: 512, rank 3: 256"
        )


def compare_first(rank: int, world: int) -> None:
    with ExpertParallelContext(device="cpu", startup_timeout_s=PATIENCE_S) as context:
        context.register(landing=100, agree={"top_k": 2})
        context.compare()
        assert not context.allocated
        context.register(agree={"digest": "a"})
        context.allocate()
        context.heap.barrier()
    with ExpertParallelContext(device="cpu", startup_timeout_s=PATIENCE_S) as context:
        context.register(landing=100, agree={"top_k": 2 + rank}, about="layer 0")
        for go_on in (context.compare, context.allocate, context.check):
            with pytest.raises(ValueError, match=r"agree: ranks disagree on top_k \(layer 0\): rank 0: 2, rank 1: 3"):
                go_on()


def test_ranks_may_compare_before_they_allocate(get_pool) -> None:
    get_pool(2).run(compare_first)
    context = virtual(1)[0]
    context.register(agree={"top_k": 2})
    context.compare()
    context.allocate()


def disagree_later(rank: int, world: int) -> None:
    with ExpertParallelContext(device="cpu", startup_timeout_s=PATIENCE_S) as context:
        context.register(landing=100, agree={"top_k": 2})
        context.allocate()
        context.register(agree={"top_k": 3} if rank else {"top_k": 3, "top_p": 0.5}, about="layer 1")
        context.allocate()


def test_layers_after_the_first_step_must_agree_too(get_pool) -> None:
    for outcome in get_pool(2).outcomes(disagree_later):
        assert isinstance(outcome.error, ValueError), outcome
        assert str(outcome.error) == "agree: ranks disagree on top_p (layer 1): rank 0: 0.5, rank 1: 'not given'"


def begin_wrong(rank: int, world: int) -> None:
    error: type[Exception] = ValueError if rank == 1 else PeerAbortedError
    for wrong in ({"timeout_s": -1.0}, {"startup_timeout_s": 0.0}, {"on_failure": "retry"}):
        with pytest.raises(error, match=next(iter(wrong))):
            ExpertParallelContext(device="cpu", **(wrong if rank == 1 else {"startup_timeout_s": PATIENCE_S}))
        dist.barrier()  # all have given up before one tries again
    with ExpertParallelContext(device="cpu", startup_timeout_s=PATIENCE_S) as context:
        context.allocate()


def test_a_wrong_argument_of_one_rank_is_heard_and_ranks_meet_again(get_pool) -> None:
    get_pool(2).run(begin_wrong)


def fail_on_rank_1(rank: int, world: int, stage: str) -> float:
    start = time.monotonic()
    arguments = {"device": "meta"} if rank == 1 and stage == "construct" else {"device": "cpu"}
    error: type[MoERuntimeError] | type[ValueError] = ValueError if rank == 1 else PeerAbortedError
    with pytest.raises(error) as caught, ExpertParallelContext(startup_timeout_s=30.0, **arguments) as context:  # type: ignore[arg-type]
        if stage == "step":
            context.allocate()
        if rank == 1:
            raise ValueError("x: expected [4, 64], got [5, 64]")
        context.allocate()
        until_failure(context)
    if rank != 1:
        assert caught.value.rank == 1  # type: ignore[union-attr]
        text = "device: expected a device of this machine, got meta" if stage == "construct" else "got [5, 64]"
        assert text in str(caught.value)
    return time.monotonic() - start


@pytest.mark.parametrize("stage", ["construct", "allocate", "step"])
def test_a_rank_that_raises_is_heard_at_once(stage: str, get_pool) -> None:
    assert max(get_pool(4).run(fail_on_rank_1, stage)) < 10


def compare_beside_an_abort(rank: int, world: int, transport: str, heard_in: str, what: str) -> float:
    """Rank 0 gives up after the first layer; the others hear it by their memory, or when they wait for the second."""
    context = ExpertParallelContext(device="cpu", transport=transport, startup_timeout_s=PATIENCE_S)
    context.allocate()
    context.heap.barrier()
    start = time.monotonic()
    if rank == 0 and heard_in == "memory":
        context.group.leave = lambda *_: None  # type: ignore[method-assign, union-attr]
        context.abort("no such checkpoint")
        del context.group.leave  # type: ignore[union-attr]
    dist.barrier()
    if rank == 0:
        if heard_in == "store":
            time.sleep(0.5)
            context.abort("no such checkpoint")
        dist.barrier()
    else:
        context.register(agree={"top_k": 2})
        with pytest.raises(PeerAbortedError, match="rank 0 gave up: no such checkpoint") as caught:
            getattr(context, what)()
        assert caught.value.rank == 0
        dist.barrier()
    context.close()
    return time.monotonic() - start


@pytest.mark.parametrize("what", ["allocate", "compare"])
@pytest.mark.parametrize(
    ("transport", "heard_in"), [("shared", "memory"), ("shared", "store"), ("collective", "store")]
)
def test_who_waits_for_another_layer_hears_of_an_abort(transport: str, heard_in: str, what: str, get_pool) -> None:
    outcomes = get_pool(2).outcomes(compare_beside_an_abort, transport, heard_in, what)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes
    assert max(outcome.result for outcome in outcomes) < 10


def close_after_an_abort(rank: int, world: int) -> float:
    context = ExpertParallelContext(device="cpu", startup_timeout_s=30.0)
    context.allocate()
    context.heap.barrier()
    start = time.monotonic()
    if rank == 0:
        context.abort("done")
        context.close()
    else:
        while not context._abort_codes.any():  # type: ignore[union-attr]
            assert time.monotonic() < start + 20
        context.close()  # Without having looked: there is nobody to wait for.
        assert context.failed
    return time.monotonic() - start


def test_close_after_an_abort_waits_for_nobody(get_pool) -> None:
    assert max(get_pool(2).run(close_after_an_abort)) < 10


def fork_in_the_block(rank: int, world: int) -> list[int]:
    """What the ranks tell each other in the block after a child that rank 0 has forked there has left it."""
    with ExpertParallelContext(device="cpu", timeout_s=PATIENCE_S, startup_timeout_s=PATIENCE_S) as context:
        context.allocate()
        assert context.group is not None
        if rank == 0:
            if (child := os.fork()) == 0:
                try:
                    signal.alarm(5)  # It has no thread that makes calls of the store, so each would take longer.
                    context.__exit__(SystemExit, SystemExit(), None)
                finally:
                    os._exit(0 if context.closed else 1)
            assert os.waitpid(child, 0) == (child, 0)
        return context.group.gather("after it", rank, integer())


def test_a_forked_child_closes_nothing(get_pool) -> None:
    assert get_pool(2).run(fork_in_the_block) == [[0, 1], [0, 1]]


def never_comes(rank: int, world: int, stage: str) -> float:
    """Rank 1 waits elsewhere until the others have given up."""
    dist.barrier()  # How long each has taken to import this module does not count.
    start = time.monotonic()
    context = None
    try:
        if rank != 1 or stage == "allocate":
            context = ExpertParallelContext(device="cpu", startup_timeout_s=WITHOUT_ONE_S)
        if rank != 1:
            assert context is not None
            context.allocate()
            raise AssertionError("nothing was raised")
    except PeerTimeoutError as error:
        assert error.rank == 1 and f"rank 1 of 3 did not come within {WITHOUT_ONE_S:g} s" in str(error)
        if context is not None:
            context.close()
    finally:
        seconds = time.monotonic() - start
        dist.barrier()
    return seconds


@pytest.mark.parametrize("stage", ["construct", "allocate"])
def test_a_rank_that_never_comes_is_named_in_time(stage: str) -> None:
    outcomes = run_once(never_comes, 3, stage, timeout=150)
    for outcome in outcomes:
        assert outcome.returned() < 10 * WITHOUT_ONE_S


def die_in_use(rank: int, world: int) -> None:
    dist.barrier()
    context = ExpertParallelContext(device="cpu", startup_timeout_s=WITHOUT_ONE_S)
    context.allocate()
    context.heap.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(
        PeerTimeoutError, match=rf"SharedHeap\.close: rank 0 of 2 did not come within {WITHOUT_ONE_S:g} s"
    ):
        context.close()
    assert context.closed


def test_closing_beside_a_dead_rank_ends() -> None:
    outcomes = run_once(die_in_use, 2, timeout=150)
    assert outcomes[0].exitcode == -signal.SIGKILL
    assert outcomes[1].error is None, outcomes[1].trace


@pytest.mark.parametrize(("milliseconds", "limit"), [(120_000, "120 s"), (1_500, "1.5 s")])
def test_a_timeout_names_the_limit_that_held(milliseconds: int, limit: str) -> None:
    record = [ErrorCode.TIMEOUT, 1, Phase.DISPATCH_RECV, 3, milliseconds, 0, 0, 0]
    failure = find_failure(record, [], str)
    assert isinstance(failure, PeerTimeoutError) and str(failure).endswith(f"within {limit}")


def test_what_a_rank_found_itself_goes_before_what_peers_say() -> None:
    """But if it only stopped because of a peer, the failure is that of the lowest rank with a cause of its own."""
    quiet = [0] * ABORT_WORDS
    routing = [ErrorCode.ROUTING, Phase.DISPATCH_SEND, 3, 2, 77, 5, 0, 0]
    # Rank 1 passes on what rank 2 has found; rank 3 has found the same of rank 2.
    aborts = [quiet, [*routing[:6], 3, 0], [ErrorCode.ABORTED, Phase.HOST, 0, 2, 0, 0, 0, 0], routing]
    own = [ErrorCode.TIMEOUT, 1, Phase.DISPATCH_RECV, 3, 1500, 0, 0, 0]
    failure = find_failure(own, aborts, str)
    assert isinstance(failure, PeerTimeoutError) and failure.rank == 1
    for code in (ErrorCode.NONE, ErrorCode.ABORTED):
        failure = find_failure([code, *own[1:]], aborts, str)
        assert isinstance(failure, RoutingError) and failure.rank == 2
        assert str(failure).startswith("rank 2, dispatch_send of epoch 3: expert id 77 of token 5 of rank 2 ")
    # Who says it of itself goes before who says it of another.
    aborts[2] = [*routing[:4], 78, 5, 0, 0]
    assert "expert id 78 of token 5 of rank 2 " in str(find_failure([0] * 8, aborts, str))


def test_an_abort_leaves_the_error_that_is_given_and_no_closed_context() -> None:
    context = ExpertParallelContext(device="cpu")
    with pytest.raises(ValueError, match="error: expected an Exception, got int"):
        context.abort("a reason", 5)  # type: ignore[arg-type]
    context.check()
    context.abort("a reason", KeyError("w1"))
    with pytest.raises(KeyError, match="w1"):
        context.check()
    context.close()
    closed = ExpertParallelContext(device="cpu")
    closed.close()
    closed.abort("too late")
    assert not closed.failed
    with pytest.raises(ValueError, match="context: it is closed"):
        closed.check()


def test_exchanges_are_named_where_they_are_known() -> None:
    texts = {0: "in exchange 0 of the context, rank 2 in 0", -1: "in another exchange, or another part"}
    for number, named in texts.items():
        record = [ErrorCode.MISMATCH, 1, Phase.DISPATCH_RECV, 3, number, 2, number, 0]
        assert f"rank 1 was {named}" in str(find_failure(record, [], str))


@pytest.mark.parametrize("said", [-1, 2**29 - 1, 2**29, 2**30 + 7, 2**30 + 2**29 - 1, 2**30 + 2**29])
def test_only_a_placement_changes_ids_and_only_some(said: int) -> None:
    record = [ErrorCode.ROUTING, 1, Phase.DISPATCH_SEND, 3, said, 0, 5, 0]
    refused = 2**29 <= said < 2**30 + 2**29
    for placed, named in ((False, said), (True, said - 2**30 if refused else said)):
        assert f": expert id {named} of token 5 of rank 1 " in str(find_failure(record, [], str, placed=placed))


def check_costs(rank: int, world: int) -> float:
    with ExpertParallelContext(device="cpu", startup_timeout_s=PATIENCE_S) as context:
        context.allocate()
        return min(seconds(context.check) for _ in range(100))


def seconds(work: Callable[[], None], repeat: int = 50) -> float:
    """Of one call; so few are made at once that others of the machine will hardly come between in every trial."""
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - start) / repeat


def test_check_is_cheap(get_pool) -> None:
    """A step takes at least hundreds of microseconds; the check before it must not be seen there."""
    assert max(get_pool(2).run(check_costs)) < 50e-6


def test_a_ready_made_shared_heap() -> None:
    with ExpertParallelContext(heap=SharedHeap()) as context:
        context.allocate()
        assert context.transport == "shared"
