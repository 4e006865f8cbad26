"""torch's own layer: `all_to_all_single` and `grouped_mm` in BF16, with the routing known beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_runtime.launch.benchmarks import torch_layer
from moe_runtime.launch.benchmarks.torch_layer import Route, TorchLayer
from moe_runtime.launch.research.peers.case import Case, Point, Way


def layers(case: Case) -> Point:
    layer = case.run.layer
    sizes = layer.hidden_size, layer.intermediate_size
    baseline = TorchLayer(case.expert, case.local, *sizes, case.activation, case.device)

    def point(tokens: int) -> Iterator[Way]:
        turns = case.turns(tokens)
        ids = [[case.turn(tokens, n, rank).idx for rank in range(case.world)] for n in range(len(turns))]
        routes = [Route.of(of_ranks, case.rank, case.starts, case.device) for of_ranks in ids]

        def step(number: int) -> torch.Tensor:
            turn = number % len(turns)
            return baseline(case.context, turns[turn].x, turns[turn].weights, routes[turn])

        error, note = case.layer_error(tokens, step(0)), "knows the routing before the step"
        yield Way("layer", "BF16", step, error, torch_layer.error_bound(), note=note)

    return point
