"""The protocol's model: right in every interleaving of small groups, wrong with any rule left out, and what is run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime.comm.signals import tag_of
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.virtual import virtual_contexts
from tests.support.protocol_hooks import hooked
from tests.support.protocol_model import RIGHT, Program, explore

pytestmark = pytest.mark.cpu_only

IN_TURN = "s1 w1 c1 s2 w2 c2 s3 w3 c3 s4 w4 c4"
OVERLAPPING = "s1 s2 w1 c1 w2 c2 s3 s4 w3 c3 w4 c4"
NEVER_COMBINED = "s1 w1 s2 w2 u1 s3 w3 u2 s4 w4"
AT_TIMES_COMBINED = "s1 w1 s2 w2 c2 u1 s3 w3 s4 w4 c4 u3"
SENT_AHEAD = "s1 s2 w1 u1 s3 w2 u2 s4 w3 w4"
SCRIPTS = (IN_TURN, OVERLAPPING, NEVER_COMBINED, AT_TIMES_COMBINED, SENT_AHEAD)


@pytest.mark.parametrize("tokens", [(True, True), (True, False)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks(script: str, tokens: tuple[bool, bool]) -> None:
    found = explore([script] * 2, tokens=tokens)
    assert found.what == "right" and found.states > 300, found


@pytest.mark.parametrize("script", SCRIPTS)
def test_three_ranks(script: str) -> None:
    found = explore([script] * 3)
    assert found.what == "right" and found.states > 3000, found


def test_ranks_may_overlap_their_steps_or_not_where_all_are_combined() -> None:
    assert explore([IN_TURN, OVERLAPPING]).what == "right"
    assert explore([OVERLAPPING, IN_TURN, OVERLAPPING]).what == "right"


def test_another_order_on_another_rank_stops_all_where_epochs_are_not_combined() -> None:
    """One rank sends and waits until all have entered, another combines and waits for it: both end by their timeout."""
    assert explore(["s1 w1 s2 w2 s3 w3 c3 s4 w4 c4", "s1 w1 s2 w2 s3 s4 w3 c3 w4 c4"]).what == "deadlock"


@pytest.mark.parametrize(
    ("change", "scripts", "tokens", "what"),
    [
        ({"await_ready": False}, [NEVER_COMBINED] * 2, None, "of epoch 3 in epoch 1"),
        ({"await_ready": False}, [SENT_AHEAD] * 2, (True, False), "'token_count', 0, 1, 1) of epoch 3 in epoch 1"),
        ({"await_empty": False}, [SENT_AHEAD] * 2, (True, False), "'token_count', 0, 1, 1) of epoch 3 in epoch 1"),
        ({"halves": 1}, [OVERLAPPING] * 2, None, "of epoch 2 in epoch 1"),
        ({"flag_last": False}, [IN_TURN] * 2, None, "of epoch 0 in epoch 1"),
        ({"by_ready": False}, [NEVER_COMBINED] * 2, None, "deadlock"),
        ({"by_combined": False}, [IN_TURN, OVERLAPPING], None, "deadlock"),
    ],
)
def test_a_rule_left_out_is_missed(
    change: dict[str, object], scripts: list[str], tokens: tuple[bool, bool] | None, what: str
) -> None:
    found = explore(scripts, replace(RIGHT, **change), tokens)
    assert what in found.what, found


def test_one_half_would_do_where_steps_follow_each_other_and_all_are_combined() -> None:
    """The other is for steps that overlap, and for rows that are read in place."""
    assert explore([IN_TURN] * 3, replace(RIGHT, halves=1)).what == "right"


Trace = list[tuple[object, ...]]


class Recorder:
    """What rank 0 stores and, in the torch reference, waits for, as the actions of the model."""

    def __init__(self, context: ExpertParallelContext) -> None:
        self.layout, self.world = context.signals_layout, context.world_size
        self.epoch, self.count = 0, 0
        self.stores: Trace = []
        self.waits: Trace = []

    def on_store(self, field: str, peer: int, half: int, value: int) -> None:
        name = {"landing": "records", "token_flags": "records", "combine": "partials"}.get(field, field)
        cell = (name, peer, half, 0)
        if name in ("records", "partials"):
            # All that goes to any peer is one action.
            if not self.stores or not {cell[0] for cell in self.stores[-1][1]} == {name}:  # type: ignore[attr-defined]
                self.stores.append((self.epoch, set()))
            self.stores[-1][1].add(cell)  # type: ignore[attr-defined]
        else:
            assert value == (self.count + tag_of(0, self.epoch) if name == "token_count" else self.epoch)
            self.stores.append((self.epoch, {cell}))

    def on_wait(self, words: list[tuple[int, int, int]]) -> None:
        def cell(word: int) -> tuple[str, int, int, int]:
            if word >= self.layout.ready:
                return ("ready", 0, 0, word - self.layout.ready)
            name = "combine_flag" if word >= self.layout.combine_flag else "dispatch_flag"
            return (name, 0, *divmod(word - getattr(self.layout, name), self.world))

        self.waits.append((self.epoch, tuple((cell(word), least) for word, least, _ in words)))


def modelled(world: int, has_tokens: bool, last: int) -> tuple[Trace, Trace]:
    """The stores of rank 0 and its waits, peer by peer, in steps that follow each other."""
    script = " ".join(f"s{epoch} w{epoch} c{epoch}" for epoch in range(1, last + 1))
    actions = Program(0, world, (has_tokens,) + (True,) * (world - 1)).actions(script)
    stores = [(action.epoch, set(action.cells)) for action in actions if action.kind == "store"]
    waits = [(action.epoch, either) for action in actions for either in action.awaited]
    return stores, waits


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_model_is_what_ranks_do(world: int, has_tokens: bool) -> None:
    """Each rank has an expert of its own, and its one token goes to all of them. Each half is used twice."""
    contexts = virtual_contexts(world, engine="torch")
    dispatchers = [
        TokenDispatcher(c, hidden_size=64, num_experts=world, top_k=world, max_tokens_per_rank=1) for c in contexts
    ]
    for context in contexts:
        context.allocate()
    recorder = Recorder(contexts[0])
    recorder.count = int(has_tokens)

    def watched(rank: int) -> AbstractContextManager[None]:
        return (
            hooked(dispatchers[0], recorder.on_store, lambda *_: None, recorder.on_wait) if rank == 0 else nullcontext()
        )

    def each(run: Callable[[int, TokenDispatcher], Any]) -> list[Any]:
        results = []
        for rank, dispatcher in enumerate(dispatchers):
            with watched(rank):
                results.append(run(rank, dispatcher))
        return results

    def send(rank: int, dispatcher: TokenDispatcher) -> DispatchHandle:
        count = 1 if rank else int(has_tokens)
        ids = torch.arange(world).expand(count, world)
        return dispatcher.dispatch_send(torch.ones(count, 64, dtype=torch.bfloat16), ids, torch.ones(count, world))

    def step() -> None:
        handles = each(send)
        arrived = each(lambda rank, dispatcher: dispatcher.dispatch_recv(handles[rank]))
        outputs = [torch.zeros(a.capacity, 64) for a in arrived]
        each(lambda rank, dispatcher: dispatcher.combine_send(outputs[rank], handles[rank]))
        each(lambda rank, dispatcher: dispatcher.combine_recv(handles[rank]))

    last = 4
    for recorder.epoch in range(1, last + 1):
        step()
    stores, waits = modelled(world, has_tokens, last)
    assert recorder.stores == stores
    assert recorder.waits == waits
