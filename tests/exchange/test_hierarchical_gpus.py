"""GPUs of one machine that take themselves for several hosts, over NCCL: eager and captured steps, and who fails."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from moe_runtime.comm.errors import MoERuntimeError
from moe_runtime.comm.host_watch import EXIT_CODE
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.virtual import VirtualRanks
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, rank_input
from tests.support.pool import Outcome, run_once

pytestmark = pytest.mark.gpu

HIDDEN, EXPERTS, TOP_K, TOKENS = 1024, 32, 4, 48
LAYERS = [
    MoELayerConfig(
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        token_format=fmt,
        weight_format=fmt,
        combine_format=combine,
        host_capacity=capacity,
    )
    for fmt, combine, tokens, capacity in (
        ("nvfp4", "bf16", TOKENS, None),
        ("bf16", "bf16", TOKENS, None),
        ("fp8_block", "fp8_block", TOKENS, None),
        ("mxfp8", "mxfp8", 1100, None),
        ("nvfp4", "bf16", 1600, None),
        ("nvfp4", "bf16", 1600, 1100),
    )
]
"""Chunks of the last three travel in several parts."""
DRAWS, REPLAYS = 16, 1000
SHAPES = [(2, 1), (2, 2)]


def draw(seed: int, number: int, rank: int, size: int) -> RankInput:
    return rank_input(seed * 1000 + number, rank, size, HIDDEN, EXPERTS, TOP_K, ("random", "one")[number % 5 == 4])


def run_layers(rank: int, world: int, num_hosts: int, seed: int) -> dict[str, float]:
    device = torch.device("cuda", torch.cuda.current_device())
    spent = {}
    with ExpertParallelContext(timeout_s=30) as context:
        assert context.transport == "hierarchical" and context.graph_safe, context.transport_reasons
        layers = [MoELayer(c, context) for c in LAYERS]
        for layer in layers:
            layer.load_random(seed)
        for number, layer in enumerate(layers):
            config = layer.config
            size = config.host_capacity or config.max_tokens_per_rank
            with VirtualRanks(
                config, world, lambda layer: layer.load_random(seed), num_hosts=num_hosts, device=device
            ) as virtual:
                given = [[draw(seed, d, r, size).to(device) for r in range(world)] for d in range(DRAWS)]
                expected = [
                    virtual([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])[rank].clone()
                    for inputs in given
                ]
            mine = [inputs[rank] for inputs in given]
            for d, data in enumerate(mine):
                y = layer(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights)
                assert_same_bits(y, expected[d], f"layer {number}, draw {d}, eager")
            held = RankInput(*(part.clone() for part in mine[0]))
            layer(held.x, topk_idx=held.topk_idx, topk_weights=held.topk_weights)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(held.x, topk_idx=held.topk_idx, topk_weights=held.topk_weights)
            wrong = torch.zeros((), dtype=torch.int64, device=device)
            start = time.monotonic()
            for turn in range(REPLAYS if number == 0 else 50):
                d = turn * 7 % DRAWS
                held.x.copy_(mine[d].x)
                held.topk_idx.copy_(mine[d].topk_idx)
                held.topk_weights.copy_(mine[d].topk_weights)
                y.fill_(float("nan"))
                graph.replay()
                wrong += (y.view(torch.int16) != expected[d].view(torch.int16)).any(dim=1).sum()
            torch.cuda.synchronize()
            spent[f"{config.token_format} {config.max_tokens_per_rank} {config.host_capacity}"] = (
                time.monotonic() - start
            )
            assert int(wrong) == 0, f"layer {number}: {int(wrong)} wrong rows in replays"
            del graph
        context.check_peers()
    return spent


def check(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.returned()


@pytest.mark.parametrize(("num_hosts", "per_host"), SHAPES)
def test_steps_equal_virtual_hosts_eagerly_and_from_graphs(num_hosts: int, per_host: int, seed: int) -> None:
    world = num_hosts * per_host
    outcomes = run_once(run_layers, world, num_hosts, seed, gpus=True, hosts=num_hosts)
    check(outcomes)
    print({name: f"{1e3 * s:.0f} ms" for name, s in outcomes[0].result.items()})


def fail_on_one_host(rank: int, world: int, how: str) -> str:
    """What each rank raises where the last one makes a mistake in its second step."""
    try:
        with ExpertParallelContext(timeout_s=20) as context:
            layer = MoELayer(LAYERS[0], context)
            layer.load_random(0)
            for step in range(4):
                mine = draw(3, step, rank, TOKENS).to(context.device)
                ids = mine.topk_idx
                if step == 1 and rank == world - 1:
                    ids = ids[:, :-1] if how == "argument" else torch.where(ids == ids[2, 1], EXPERTS + 3, ids)
                layer(mine.x, topk_idx=ids, topk_weights=mine.topk_weights)
                torch.cuda.synchronize()
            context.check_peers()
    except (MoERuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("how", ["id", "argument"])
@pytest.mark.parametrize(("num_hosts", "per_host"), SHAPES)
def test_a_mistake_is_told_on_every_host(num_hosts: int, per_host: int, how: str) -> None:
    world = num_hosts * per_host
    outcomes = run_once(fail_on_one_host, world, how, gpus=True, hosts=num_hosts)
    check(outcomes)
    for rank, outcome in enumerate(outcomes):
        if how == "id":
            assert f"of rank {world - 1} is out of range" in outcome.result, outcome.result
        elif rank < world - 1:
            assert f"rank {world - 1} gave up: topk_idx" in outcome.result, outcome.result


LIMIT_S = 5.0


def lose_a_rank(rank: int, world: int, in_graph: bool) -> tuple[str, float]:
    """The last rank is killed in its third step; what the others raise, and how long after their last good step."""
    context = ExpertParallelContext(timeout_s=LIMIT_S)
    layer = MoELayer(LAYERS[0], context)
    layer.load_random(0)
    mine = draw(3, 0, rank, TOKENS).to(context.device)

    def step() -> None:
        layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)

    step()
    graph = torch.cuda.CUDAGraph()
    if in_graph:
        with torch.cuda.graph(graph):
            step()
    start = time.monotonic()
    try:
        for number in range(4):
            if number == 2 and rank == world - 1:
                torch.cuda.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
            (graph.replay if in_graph else step)()
            torch.cuda.synchronize()
            context.check_peers()
            start = time.monotonic()
    except (MoERuntimeError, RuntimeError) as error:
        spent = time.monotonic() - start
        try:
            context.check()
        except MoERuntimeError as named:
            return f"{type(named).__name__} {named.rank}: {named} (first {type(error).__name__})", spent
    return "nothing", 0.0


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(("num_hosts", "per_host"), SHAPES)
def test_a_lost_rank_is_named_or_the_process_ends(num_hosts: int, per_host: int, in_graph: bool) -> None:
    world = num_hosts * per_host
    started = time.monotonic()
    outcomes = run_once(lose_a_rank, world, in_graph, gpus=True, hosts=num_hosts, timeout=100.0)
    print(f"{time.monotonic() - started:.0f} s", [(o.result, o.exitcode) for o in outcomes])
    assert outcomes[-1].exitcode == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        if outcome.exitcode == EXIT_CODE:
            assert in_graph
            continue
        assert outcome.error is None and outcome.result is not None, (outcome.trace, outcome.exitcode)
        text, spent = outcome.result
        assert f"rank {world - 1}" in text and spent < 3 * LIMIT_S + 20
