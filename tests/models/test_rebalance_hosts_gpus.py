"""Experts that move between GPUs of one machine that take themselves for several hosts, over NCCL."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.context import memory
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.placement.placement import Placement, plan_placement
from moe_runtime.virtual import VirtualRanks
from tests.exchange.test_hierarchical_gpus import EXPERTS, LAYERS, SHAPES, check, draw
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput
from tests.support.pool import run_once

pytestmark = pytest.mark.gpu


def plans_of(world: int) -> list[Placement]:
    """Hot experts at the front, at the back, and at the front again."""
    slots = EXPERTS // world + 3
    first = plan_placement([2.0**-e for e in range(EXPERTS)], world, slots)
    second = plan_placement([2.0**e for e in range(EXPERTS)], world, slots).reordered_like(first)
    return [first, second, first]


def replace_over_hosts(rank: int, world: int, num_hosts: int, seed: int) -> None:
    """Under each placement an eager step and a replay of a graph of the first; each layer against one loaded anew."""
    memory.CHUNK_BYTES = 100_000
    device = torch.device("cuda", torch.cuda.current_device())
    plans = plans_of(world)
    with ExpertParallelContext(timeout_s=30) as context:
        assert context.transport == "hierarchical", context.transport_reasons
        layers = [MoELayer(c, context, placement=plans[0]) for c in LAYERS]
        for layer in layers:
            layer.load_random(seed)
        for number, layer in enumerate(layers):
            size = layer.config.host_capacity or layer.config.max_tokens_per_rank
            inputs = [draw(seed, number, r, size).to(device) for r in range(world)]
            mine = RankInput(*(part.clone() for part in inputs[rank]))
            layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
            for index, plan in enumerate(plans):
                if index:
                    layer.replace_experts(plan)
                with VirtualRanks(
                    layer.config,
                    world,
                    lambda fresh: fresh.load_random(seed),
                    num_hosts=num_hosts,
                    device=device,
                    placement=plan,
                ) as virtual:
                    expected = virtual([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])[rank]
                y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
                assert_same_bits(y, expected, f"layer {number}, placement {index}, eager")
                replayed.fill_(float("nan"))
                graph.replay()
                assert_same_bits(replayed, expected, f"layer {number}, placement {index}, from a graph")
            del graph
        context.check_peers()


@pytest.mark.parametrize(("num_hosts", "per_host"), SHAPES)
def test_experts_move_between_hosts_and_graphs_go_on(num_hosts: int, per_host: int, seed: int) -> None:
    world = num_hosts * per_host
    check(run_once(replace_over_hosts, world, num_hosts, seed, gpus=True, hosts=num_hosts))
