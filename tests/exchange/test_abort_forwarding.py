"""Peers learn of a failure before they see flags that were raised without data; whoever learns of it forwards it."""

from __future__ import annotations

import math

import pytest
import torch

from moe_runtime.comm.errors import ErrorCode, PeerAbortedError, Phase
from moe_runtime.comm.failures import encode_abort, find_failure, write_abort
from moe_runtime.comm.signals import ABORT_WORDS, ERROR_WORDS, REASON_WORDS
from moe_runtime.dispatcher.handle import DispatchHandle
from moe_runtime.kernels.exchange import plan
from tests.emulator import Emulator, needs_emulator
from tests.support.exchange_data import rank_input
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import ENGINES, HOPPER, Ranks, emulator, poisoned_memory, pretend_sms

__all__ = ["emulator", "poisoned_memory"]

SETTINGS = {"hidden_size": 128, "num_experts": 5, "top_k": 2, "max_tokens_per_rank": 4}
REASON = "x: expected at most 4 tokens, got 5"


@pytest.mark.parametrize("mode", ["contiguous", "gathered"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_learns_of_a_failure_forwards_it(
    engine: str, mode: str, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 gives up, and only rank 0 knows when it raises its flags: nobody takes old partial results."""
    ranks = Ranks(3, device, engine, token_format="nvfp4", mode=mode, **SETTINGS)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ranks.dispatchers[0].geometry.row_capacity, 128, generator=generator).bfloat16().to(device)

    def step(number: int) -> list[torch.Tensor]:
        arrived = ranks.dispatch([rank_input(seed + number, r, 4, 128, 5, 2).to(device) for r in range(3)])
        return ranks.combine(arrived, [rows] * 3)

    for number in range(2):
        assert not any(y.isnan().any() for y in step(number))
    first, last = ranks.contexts[0], ranks.contexts[2]
    message = torch.zeros(ABORT_WORDS + REASON_WORDS, dtype=torch.int32)
    encode_abort(message, 2, REASON)
    write_abort(message, [first.signals], last.signals_layout, 2)
    with monkeypatch.context() as patch:
        for context in ranks.contexts:
            # As on a GPU, where the host is ahead of its kernels.
            patch.setattr(context, "_raise_failure", lambda: None)
        assert all(y.isnan().all() for y in step(2))
    for context in ranks.contexts:
        reason = REASON if context is first else "no reason given"
        with pytest.raises(PeerAbortedError, match=f"^rank 2, host of epoch 0: rank 2 gave up: {reason}") as caught:
            context.check_peers()
        assert (caught.value.rank, caught.value.phase) == (2, Phase.HOST)


def test_a_forwarded_failure_names_its_origin() -> None:
    quiet = [0] * ABORT_WORDS
    forwarded = [int(ErrorCode.TIMEOUT), int(Phase.COMBINE_RECV), 7, 1, 5000, 0, 1 + 3, 0]
    failure = find_failure([0] * ERROR_WORDS, [quiet, quiet, forwarded, quiet], str)
    assert str(failure) == "rank 3, combine_recv of epoch 7: rank 1 did not answer within 5 s"


SENDS_LATE = "store_release(x.error, code);"
"""After it a rank sends abort messages to its peers."""
READS_LATE = "const Glance glance(x, own);"
"""After it a rank that has seen token flags and no failure reads ids and counts."""


def slow_after(place: str, text: str) -> str:
    """The kernel of a rank that takes long to go on from `place`, which is there once."""
    assert text.count(place) == 1
    return text.replace(place, f"{place} for (int i = 0; i < 3000; ++i) load_relaxed(x.latch);")


def used_too_late(seed: int, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for its first dispatch during its fourth, which its `arrive` finds while it still sends."""
    sizes = {"RECV_WARPS": 1, "CHUNK": 32, "SMALL_CHUNK_BYTES": 0, "SEND_BLOCKS_PER_SM": ((math.inf, 1),)}
    for name, value in sizes.items():
        monkeypatch.setattr(plan, name, value)
    pretend_sms(monkeypatch, 3)
    forget_plans()
    settings = {"hidden_size": 1152, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 33}
    settings |= {"token_format": "bf16", "mode": "contiguous"}
    cpu = torch.device("cpu")
    references, kernels = Ranks(2, cpu, "torch", **settings), Ranks(2, cpu, HOPPER, **settings)
    inputs = [rank_input(seed, rank, 33, 1152, 4, 2) for rank in range(2)]
    found = []
    with emulator.together() as choose:
        for rank, (dispatcher, tokens) in enumerate(zip(kernels.dispatchers, inputs, strict=True)):
            choose(rank)
            handles = [dispatcher.dispatch_send(*(tensor[:0] for tensor in tokens)) for _ in range(3)]
            handles.append(dispatcher.dispatch_send(*tokens))
            found.append(dispatcher.dispatch_recv(handles[0 if rank == 1 else 3]))
    assert int(kernels.contexts[1].error[0]) == ErrorCode.STALE_HANDLE
    if int(kernels.contexts[0].error[0]) == 0:
        wanted = references.dispatch(inputs)[0]
        rows = int(wanted.group_offsets[-1])
        assert found[0].group_offsets.tolist() == wanted.group_offsets.tolist()
        assert torch.equal(found[0].rows[:rows].view(torch.int16), wanted.rows[:rows].view(torch.int16))


@needs_emulator
@pytest.mark.cpu_only
@pytest.mark.parametrize("waits", [True, False])
def test_flags_come_after_a_failure_of_arrival(
    waits: bool, emulator: Emulator, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer gets all tokens or learns of the failure; where the sender does not wait, neither."""

    def edit(text: str) -> str:
        text = slow_after(SENDS_LATE, text)
        return text if waits else text.replace("if (failed) await_abort_sent(x);", "")

    emulator.edit = edit
    try:
        if waits:
            for turn in range(6):
                used_too_late(seed + turn, emulator, monkeypatch)
        else:
            with pytest.raises(AssertionError):
                for turn in range(40):
                    used_too_late(seed + turn, emulator, monkeypatch)
    finally:
        forget_plans()


def fails_ahead(seed: int, emulator: Emulator) -> None:
    """Rank 0 fails in its third step while rank 1 takes the tokens of the first, which lie in the same half."""
    settings = {**SETTINGS, "token_format": "nvfp4", "mode": "contiguous"}
    cpu = torch.device("cpu")
    references, kernels = Ranks(2, cpu, "torch", **settings), Ranks(2, cpu, HOPPER, **settings)
    steps = [[rank_input(seed + 2 * step + rank, rank, 4, 128, 5, 2) for rank in range(2)] for step in range(3)]
    steps[2][0].topk_idx[0, 1] = 77

    def send(rank: int, step: int) -> DispatchHandle:
        data = steps[step][rank]
        return kernels.dispatchers[rank].dispatch_send(*data)

    first = [send(rank, 0) for rank in range(2)]
    send(0, 1)
    kernels.dispatchers[0].dispatch_recv(first[0])
    with emulator.together() as choose:
        choose(0)
        send(0, 2)
        choose(1)
        found = kernels.dispatchers[1].dispatch_recv(first[1])
    error = kernels.contexts[1].error.tolist()
    if error[0] != 0:
        assert error[:3] == [ErrorCode.ROUTING, 0, Phase.DISPATCH_SEND], error
    else:
        wanted = references.dispatch(steps[0])[1]
        assert found.group_offsets.tolist() == wanted.group_offsets.tolist()
        rows = int(wanted.group_offsets[-1])
        assert torch.equal(found.rows[:rows].view(torch.uint8), wanted.rows[:rows].view(torch.uint8))


@needs_emulator
@pytest.mark.cpu_only
@pytest.mark.parametrize("holds_back", [True, False])
def test_a_failed_rank_leaves_the_token_count_alone(holds_back: bool, emulator: Emulator, seed: int) -> None:
    """It has not waited for readers of the count of two steps before, which its own would replace."""

    def edit(text: str) -> str:
        if "each_expert" in text:
            return slow_after(READS_LATE, text)
        assert text.count("if (!failed && ") == 1
        return text if holds_back else text.replace("if (!failed && ", "if (")

    emulator.edit = edit
    if holds_back:
        for turn in range(3):
            fails_ahead(seed + 10 * turn, emulator)
    else:
        with pytest.raises(AssertionError):
            for turn in range(20):
                fails_ahead(seed + 10 * turn, emulator)
