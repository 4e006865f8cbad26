"""Recorded routes: what a ring holds under every dtype and size, what it lost, and replays with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime import MoELayer, RecordedRoutes
from moe_runtime.observation.routes import StepRoutes
from moe_runtime.virtual import VirtualRanks, virtual_contexts
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOKENS, TOP_K, config, placements, rank_input
from tests.support.virtual_exchange import engine

__all__ = ["engine"]


def ring_of(steps: int, most: int, top_k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((steps, most, top_k), 77, dtype=dtype, device=device)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ring_dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("settled", [False, True])
def test_steps_take_one_place_after_the_other(
    ids_dtype: torch.dtype, ring_dtype: torch.dtype, settled: bool, engine: str, device: torch.device, seed: int
) -> None:
    """Steps of no token, of a few, and of more than a block of the kernel takes; every third is read late.

    What was read stays as it was when the ring comes round.
    """
    steps, most, top_k, experts = 3, 500, 5, 20
    ring = ring_of(steps, most, top_k, ring_dtype, device)
    weights = torch.full(ring.shape, 77.0, device=device)
    sizes = {"max_tokens": most, "top_k": top_k, "num_experts": experts}
    routes = RecordedRoutes(ring, weights, **sizes, device=device, engine=engine)
    between = torch.zeros(1, device=device)
    generator = torch.Generator().manual_seed(seed)
    wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
    kept: list[StepRoutes] = []
    read = 0
    for step, tokens in enumerate((3, 0, 500, 1, 211, 2, 7, 400)):
        ids = torch.randint(-3, experts + 3, (tokens, top_k), generator=generator, dtype=ids_dtype)
        own = torch.randn(tokens, top_k, generator=generator)
        # Kernels of a layer's step lie between two records of it.
        between.add_(1)
        # Rows that are no neighbours in memory are recorded alike.
        routes.add(ids.to(device).T.contiguous().T, own.to(device), settled=settled)
        wanted.append((ids.where((ids >= 0) & (ids < experts), -1).int(), own))
        if step in (1, 6):
            found = routes.read()
            assert [one.step for one in found] == list(range(max(read, step + 1 - steps), step + 1))
            kept += found
            for one in kept:
                assert torch.equal(one.topk_idx.cpu(), wanted[one.step][0]) and one.topk_idx.dtype == torch.int32
                assert one.topk_weights is not None and torch.equal(one.topk_weights.cpu(), wanted[one.step][1])
            read = step + 1
    assert routes.steps == 8 and routes.overwritten == 2 and [one.step for one in routes.read()] == [7]
    assert routes.read() == []
    # The place of step 5 was step 2's, too, whose tokens beyond those of step 5 stay.
    assert torch.equal(ring[2, 2:].cpu().int(), wanted[2][0][2:])


@pytest.mark.parametrize("placed", [False, True])
def test_a_replayed_step_gives_the_same_bits(placed: bool, device: torch.device, seed: int) -> None:
    """Ids are the experts', whatever the placement; the layer's own router chose them. Warm-up is not recorded."""
    world, tokens = 2, (5, 0)
    placement = placements(world)[0] if placed else None
    inputs = [rank_input(seed, rank, count, HIDDEN, EXPERTS, TOP_K).to(device).x for rank, count in enumerate(tokens)]
    with VirtualRanks(
        config("nvfp4"), world, lambda layer: layer.load_random(1), device=device, placement=placement
    ) as ranks:
        ring = ring_of(2, TOKENS, TOP_K, torch.int16, device)
        recorded = [layer.record_routes(ring.clone(), torch.zeros(ring.shape, device=device)) for layer in ranks.layers]
        first = ranks(inputs)
        routes = []
        for layer, record, x in zip(ranks.layers, recorded, inputs, strict=True):
            (step,) = record.read()
            assert layer.routes is record and step.topk_weights is not None and layer.router is not None
            assert torch.equal(step.topk_idx, layer.router(x)[0].int())
            routes.append((step.topk_idx, step.topk_weights))
            layer.routes = None
        for found, again in zip(first, ranks(inputs, routes), strict=True):
            assert_same_bits(found, again)
        assert recorded[0].steps == 1


def test_warm_up_is_not_recorded(device: torch.device) -> None:
    with virtual_contexts(1, device=device)[0] as context:
        layer = MoELayer(config(), context)
        layer.load_random(1)
        routes = layer.record_routes(ring_of(2, TOKENS, TOP_K, torch.int32, device))
        layer.warm_up()
        assert routes.steps == 0 and layer.routes is routes
        layer(torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=device))
        (step,) = routes.read()
        assert step.topk_idx.shape == (3, TOP_K) and step.topk_weights is None


RIGHT: dict[str, Any] = {"dtype": torch.int16, "shape": (2, TOKENS, TOP_K)}


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        ({"dtype": torch.int64}, None, "ids: expected torch.int16 or torch.int32, got torch.int64"),
        ({"shape": (2, TOKENS - 1, TOP_K)}, None, rf"ids: expected \[steps, at least {TOKENS} tokens, {TOP_K}\]"),
        ({"shape": (2, TOKENS, TOP_K + 1)}, None, "ids: expected"),
        ({"shape": (0, TOKENS, TOP_K)}, None, "ids: expected"),
        ({"device": "meta"}, None, "ids: expected a tensor on"),
        ({}, {"dtype": torch.bfloat16}, "weights: expected torch.float32"),
        ({}, {"shape": (3, TOKENS, TOP_K)}, "weights: expected torch.float32"),
        ({}, {"device": "meta"}, "weights: expected a tensor on"),
    ],
)
def test_wrong_rings_are_named(
    ids: dict[str, Any], weights: dict[str, Any] | None, message: str, device: torch.device
) -> None:
    def made(dtype: torch.dtype, shape: tuple[int, ...], device: Any = device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    with virtual_contexts(1, device=device)[0] as context:
        layer = MoELayer(config(), context)
        rings = made(**{**RIGHT, **ids}), None
        if weights is not None:
            rings = rings[0], made(**{**RIGHT, "dtype": torch.float32, **weights})
        with pytest.raises(ValueError, match=message):
            layer.record_routes(*rings)
        assert layer.routes is None
        with pytest.raises(ValueError, match="ids: expected a contiguous tensor"):
            layer.record_routes(made(**RIGHT).transpose(0, 1).contiguous().transpose(0, 1))


def test_a_narrow_ring_is_refused_for_many_experts_and_a_full_step(device: torch.device) -> None:
    sizes = {"max_tokens": 4, "top_k": 1, "device": device, "engine": "torch"}
    ring = ring_of(1, 4, 1, torch.int16, device)
    with pytest.raises(ValueError, match=r"ids: expected torch\.int32 for 40000 experts"):
        RecordedRoutes(ring, num_experts=40000, **sizes)
    routes = RecordedRoutes(ring, num_experts=8, **sizes)
    with pytest.raises(ValueError, match="topk_idx: expected at most 4 tokens"):
        routes.add(torch.zeros(5, 1, dtype=torch.int32, device=device), torch.zeros(5, 1, device=device))
    with pytest.raises(ValueError, match=r"topk_weights: expected torch\.float32"):
        routes.add(torch.zeros(2, 1, dtype=torch.int32, device=device), torch.zeros(3, 1, device=device))
    assert routes.steps == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_replays_of_a_graph_are_recorded(tokens: int, device: torch.device, seed: int) -> None:
    data = rank_input(seed, 0, tokens, HIDDEN, EXPERTS, TOP_K).to(device)
    with virtual_contexts(1, device=device)[0] as context:
        layer = MoELayer(config("fp8_block"), context)
        layer.load_random(1)
        routes = layer.record_routes(ring_of(4, TOKENS, TOP_K, torch.int16, device))
        layer.warm_up()
        ids = data.topk_idx.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(data.x, topk_idx=ids, topk_weights=data.topk_weights)
        assert routes.steps == 0
        wanted = []
        for shift in range(6):
            ids.copy_(torch.where(data.topk_idx < 0, -1, (data.topk_idx + shift) % EXPERTS))
            wanted.append(ids.int().clone())
            graph.replay()
        found = routes.read()
        assert routes.overwritten == 2 and [one.step for one in found] == [2, 3, 4, 5]
        for one in found:
            assert torch.equal(one.topk_idx, wanted[one.step])
