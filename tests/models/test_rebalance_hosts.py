"""Placements over several hosts: processes equal virtual hosts bit for bit; what crosses the network, and failures."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm import host_link
from moe_runtime.comm.errors import PeerAbortedError, Phase
from moe_runtime.context import memory
from moe_runtime.layer import MoELayer
from moe_runtime.placement.migration import ExpertMover
from moe_runtime.placement.migration_plan import plan_migration
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.rail import PAD
from moe_runtime.virtual import VirtualRanks
from tests.exchange.test_hierarchical import make_context
from tests.models.test_rebalance import (
    addresses,
    fail_over,
    missed_rank_2,
    propose_over,
    random_weights,
    small_chunks,
    step_inputs,
    virtual_results,
    weights_of,
)
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, LAYERS, config, placements
from tests.support.pool import PATIENCE_S, run_once


@dataclass(frozen=True)
class Run:
    """What one rank saw of one layer.

    Attributes:
        ys: `y` of each step.
        expert_tokens: how many of its tokens each expert got in all steps.
        sent: bytes that it sent to other hosts in each re-placement.
        expert_bytes, chunk_bytes: of the weights of an expert, and the most that moves at once.
    """

    ys: list[torch.Tensor]
    expert_tokens: tuple[int, ...]
    sent: list[int]
    expert_bytes: int
    chunk_bytes: int


def run_over_hosts(rank: int, world: int, per_host: int, seed: int, delays: bool) -> list[Run]:
    """Two steps under each placement, all layers over one context."""
    dice, sent, start = random.Random(seed * 100 + rank), [0], host_link.GlooLink.start

    def counted(
        self: host_link.GlooLink, outgoing: Any, incoming: Any, phase: Phase, part: int, limit_s: float
    ) -> host_link.Exchange:
        if delays:
            time.sleep(dice.choice((0.0, 0.0, 0.02)))
        if phase is Phase.REPLACEMENT:
            sent[0] += sum(chunk.numel() for host, chunk in enumerate(outgoing) if host != self.hosts.host)
        return start(self, outgoing, incoming, phase, part, limit_s)

    small_chunks()
    host_link.GlooLink.start = counted  # type: ignore[method-assign]
    runs = []
    try:
        with make_context(rank, per_host, engine="auto") as context:
            assert context.transport == "hierarchical"
            plans = placements(world)
            layers = [MoELayer(c, context, placement=plans[0]) for c in LAYERS]
            for layer in layers:
                layer.load_random(seed)
            for layer in layers:
                ys, moved, counters = [], [], layer.count_steps()
                for index, plan in enumerate(plans):
                    if index:
                        sent[0] = 0
                        layer.replace_experts(plan)
                        moved.append(sent[0])
                    for step in (2 * index, 2 * index + 1):
                        mine = step_inputs(seed, step, world)[rank]
                        ys.append(layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
                expert_bytes = sum(value[0].nbytes for value in weights_of(layer).values())
                chunk_bytes = context.staging_bytes - memory.staging_words_bytes(per_host)
                runs.append(Run(ys, counters.read().expert_tokens, moved, expert_bytes, chunk_bytes))
        return runs
    finally:
        host_link.GlooLink.start = start  # type: ignore[method-assign]
        memory.CHUNK_BYTES = 16 << 20
        del os.environ["MOE_RUNTIME_HOST"]


def experts_on(placement: Placement, host: int, per_host: int) -> set[int]:
    return {e for rank in range(host * per_host, (host + 1) * per_host) for e in placement.rank_experts(rank)}


@pytest.mark.cpu_only
@pytest.mark.parametrize(("num_hosts", "per_host"), [(2, 1), (2, 2)])
def test_steps_loads_and_bytes_over_hosts(num_hosts: int, per_host: int, get_pool: Any, seed: int) -> None:
    world = num_hosts * per_host
    runs = get_pool(world).run(run_over_hosts, per_host, seed, world == 4, timeout=150)
    plans = placements(world)
    routed = [torch.cat([i.topk_idx.flatten() for i in step_inputs(seed, step, world)]) for step in range(6)]
    load = torch.bincount(torch.cat([ids[ids >= 0] for ids in routed]), minlength=EXPERTS).tolist()
    for number, c in enumerate(LAYERS):
        expected = virtual_results(world, c, seed, num_hosts)
        for rank in range(world):
            for step in range(6):
                what = f"layer {number}, step {step}, rank {rank} of {world}"
                assert_same_bits(runs[rank][number].ys[step], expected[rank][step], what)
        assert [sum(counts) for counts in zip(*(run[number].expert_tokens for run in runs), strict=True)] == load
        one = runs[0][number]
        assert one.chunk_bytes < one.expert_bytes or c.token_format != "bf16"
        chunks = -(-one.expert_bytes // one.chunk_bytes)
        for index, (old, new) in enumerate(pairwise(plans)):
            plan, pads = plan_migration(old, new, per_host), 0
            for rank in range(world):
                rail = rank % per_host
                rounds = sum(any(c.rail == rail for c in one_round.crossings) for one_round in plan.rounds)
                padding = (chunks * rounds + 1) * (num_hosts - 1) * PAD
                experts = [plan.sender(crossing) for crossing in plan.crossings].count(rank)
                assert runs[rank][number].sent[index] == experts * one.expert_bytes + padding
                pads += padding
            newly = [experts_on(new, h, per_host) - experts_on(old, h, per_host) for h in range(num_hosts)]
            total = sum(runs[rank][number].sent[index] for rank in range(world))
            assert total - pads == sum(map(len, newly)) * one.expert_bytes


@pytest.mark.parametrize(
    ("num_hosts", "per_host", "fmt"), [(3, 2, "nvfp4"), (2, 3, "mxfp8"), (4, 1, "fp8_block"), (2, 2, "bf16")]
)
def test_experts_move_in_place_between_virtual_hosts(
    num_hosts: int, per_host: int, fmt: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(memory, "CHUNK_BYTES", 40_000)
    world, load = num_hosts * per_host, random_weights(seed)
    plans = placements(world)
    with VirtualRanks(config(fmt), world, load, placement=plans[0], num_hosts=num_hosts) as ranks:
        before = [addresses(layer) for layer in ranks.layers]
        for plan in (*plans[1:], plans[0], plans[0]):
            ranks.replace_experts(plan)
            with VirtualRanks(config(fmt), world, load, placement=plan, num_hosts=num_hosts) as fresh:
                for layer, expected in zip(ranks.layers, fresh.layers, strict=True):
                    for name, value in weights_of(layer).items():
                        assert_same_bits(value, weights_of(expected)[name], name)
        assert before == [addresses(layer) for layer in ranks.layers]


def propose_on_hosts(rank: int, world: int, kind: str, seed: int) -> tuple[str, str, list[torch.Tensor]]:
    try:
        return propose_over(make_context(rank, 1), rank, world, kind, seed)
    finally:
        del os.environ["MOE_RUNTIME_HOST"]


@pytest.mark.cpu_only
def test_hosts_that_disagree_go_on_as_before(get_pool: Any, seed: int) -> None:
    for name, message, ys in get_pool(2).run(propose_on_hosts, "placement", seed):
        assert name == "ValueError" and "placement: ranks disagree" in message
        assert_same_bits(ys[1], ys[0], "after the refusal")


def fail_on_a_host(rank: int, world: int, kind: str, among_two: bool, seed: int) -> tuple[str, int, str, float]:
    """As `fail_over`; rank 2 is the first of host 1."""
    return fail_over(make_context(rank, 2, PATIENCE_S), rank, world, kind, among_two, seed)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("kind", "among_two"), [("raises", False), ("raises", True), ("dies", False), ("stops", True)])
def test_a_rank_that_fails_in_the_middle_ends_it_on_every_host(kind: str, among_two: bool, seed: int) -> None:
    """Also on host 0 where it has no part in it (`among_two`)."""
    outcomes = run_once(fail_on_a_host, 4, kind, among_two, seed, timeout=150)
    # The one that stopped goes on when it is missed, and may be the first to tell other hosts of it.
    names = ("PeerTimeoutError", "PeerAbortedError") if kind == "stops" else ("PeerTimeoutError",)
    for name, about, message in missed_rank_2(outcomes, kind):
        assert name in names and about == 2 and "rank 2" in message, message


def wait_for_a_host(rank: int, world: int) -> tuple[str, int, float]:
    """Rank 1 waits for rank 3, which is elsewhere, when rank 0 of its host gives up; what each raises, and when."""
    context = make_context(rank, 2, PATIENCE_S)
    placement = placements(world)[0]
    layer = MoELayer(config(), context, placement=placement)
    layer.load_random(0)
    context.allocate()
    assert layer.experts is not None
    mover = ExpertMover(context, layer.experts, plan_migration(placement, placement, 2))
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        time.sleep(0.5)
        context.abort("it was elsewhere")
    if rank == 1:
        exchange = mover.start_exchange((), 0)
        with pytest.raises(PeerAbortedError):
            mover.end_exchange(exchange)
        context.abort("it follows")
    if rank == 2:
        # On the other host, for rank 3, which has not come.
        with pytest.raises(PeerAbortedError):
            mover._wait(mover._words(rank).sent, 3, 1)
    seconds = time.monotonic() - start
    dist.barrier()
    with pytest.raises(PeerAbortedError) as caught:
        context.check()
    context.close()
    return str(caught.value), caught.value.rank, seconds


@pytest.mark.cpu_only
def test_waits_inside_and_between_hosts_end_when_a_rank_of_any_host_gives_up() -> None:
    for rank, outcome in enumerate(run_once(wait_for_a_host, 4)):
        text, about, seconds = outcome.returned()
        assert about == 0 and "rank 0 gave up: it was elsewhere" in text, (rank, text)
        assert seconds < PATIENCE_S / 5
