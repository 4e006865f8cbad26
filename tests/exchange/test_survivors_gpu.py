"""A rank is killed on a GPU, between steps or in a graph's replay: the others go on with the memory that they have."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from moe_runtime.comm.errors import PeerTimeoutError
from moe_runtime.comm.heaps import nvshmem_world
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.placement.placement import Placement
from moe_runtime.virtual import VirtualRanks
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOKENS, TOP_K, RankInput, config, rank_input
from tests.support.pool import run_once

WORLD = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")]

TIMEOUT_S = 3.0
STEPS, DEATH = 6, 3
REPLAYS = 200
"""Replays that are queued when the last rank is killed."""


@pytest.fixture(autouse=True)
def _needs_nvshmem() -> None:
    if nvshmem_world.problem():
        pytest.skip(f"NVSHMEM: {nvshmem_world.problem()}")


def everywhere(world: int) -> Placement:
    """Each rank has all experts."""
    return Placement(EXPERTS, world, tuple(range(EXPERTS)) * world)


def open_layer(fmt: str, world: int) -> MoELayer:
    context = ExpertParallelContext(transport="nvshmem", timeout_s=TIMEOUT_S, on_failure="continue")
    layer = MoELayer(config(fmt), context, placement=everywhere(world))
    layer.load_random(0)
    layer.warm_up()
    return layer


def given(step: int, rank: int, device: torch.device) -> RankInput:
    return rank_input(step, rank, TOKENS - rank % 2, HIDDEN, EXPERTS, TOP_K).to(device)


def expected(fmt: str, world: int, steps: range) -> list[list[torch.Tensor]]:
    """`y` by step and rank, of virtual ranks on this process's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    with VirtualRanks(
        config(fmt), world, lambda layer: layer.load_random(0), device=device, placement=everywhere(world)
    ) as ranks:
        inputs = [[given(step, rank, device) for rank in range(world)] for step in steps]
        return [ranks([i.x for i in of], [(i.topk_idx, i.topk_weights) for i in of]) for of in inputs]


def die_between_steps(rank: int, world: int, fmt: str) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    layer = open_layer(fmt, world)
    results = []
    for step in range(STEPS):
        if step == DEATH and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = given(step, rank, layer.context.device)
        y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        results.append((layer.context.members, y.cpu()))
    layer.context.check_peers()
    return results


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_the_others_go_on_without_a_rank_that_dies(fmt: str) -> None:
    outcomes = run_once(die_between_steps, WORLD, fmt, gpus=True, timeout=140)
    assert outcomes[-1].exitcode == -signal.SIGKILL
    before, after = expected(fmt, WORLD, range(DEATH)), expected(fmt, WORLD - 1, range(DEATH, STEPS))
    for rank, outcome in enumerate(outcomes[:-1]):
        for step, (members, y) in enumerate(outcome.returned()):
            assert members == tuple(range(WORLD if step < DEATH else WORLD - 1))
            assert_same_bits(y, [*before, *after][step][rank], f"rank {rank}, step {step}")


def die_in_a_replay(rank: int, world: int, fmt: str) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """`y` of a replay before and after, and whether a replay of the old graph gave NaN and was refused."""
    layer = open_layer(fmt, world)
    context = layer.context
    mine = given(0, rank, context.device)

    def captured() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        return graph, y

    old, y = captured()
    old.replay()
    context.check_peers()
    first = y.cpu()
    for _ in range(REPLAYS):
        old.replay()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerTimeoutError):
        for _ in range(10):
            old.replay()
            context.check_peers()
    assert context.recover() == 0 and context.members == tuple(range(world - 1))
    layer.warm_up()
    graph, y_again = captured()
    for _ in range(3):
        graph.replay()
        context.check_peers()
    again = y_again.cpu()
    # What the old graph reads must not have been given to others.
    others = [torch.full((size,), -1, dtype=torch.int64, device=context.device) for size in (8, 64, 512) * 1000]
    old.replay()
    with pytest.raises(ValueError, match="graph: it was captured before a rank died; capture it again"):
        context.check_peers()
    assert all(bool((other == -1).all()) for other in others)
    return first, again, bool(y.isnan().all())


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_a_rank_killed_in_a_replay(fmt: str) -> None:
    outcomes = run_once(die_in_a_replay, WORLD, fmt, gpus=True, timeout=140)
    assert outcomes[-1].exitcode == -signal.SIGKILL
    before, after = expected(fmt, WORLD, range(1)), expected(fmt, WORLD - 1, range(1))
    for rank, outcome in enumerate(outcomes[:-1]):
        first, again, is_nan = outcome.returned()
        assert is_nan
        assert_same_bits(first, before[0][rank], f"rank {rank}, before")
        assert_same_bits(again, after[0][rank], f"rank {rank}, after")
