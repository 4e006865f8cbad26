"""Several ranks in one process: the same layers, kernels and bits as with one process per rank, run in lockstep.

Useful for tests, for trying a placement without a launcher, and as the reference that a distributed run must equal
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from moe_runtime.comm.private_heap import PrivateHeap
from moe_runtime.config import MoELayerConfig
from moe_runtime.context import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.placement import Placement
from moe_runtime.replacement import replace_experts
from moe_runtime.step import advance_all
from moe_runtime.warming import warm_up


def virtual_contexts(
    world_size: int, *, device: torch.device | str = "cpu", engine: str = "auto", timeout_s: float = 30.0
) -> list[ExpertParallelContext]:
    """One context for each of `world_size` virtual ranks in this process."""
    heaps = PrivateHeap.group(world_size, device)
    return [ExpertParallelContext(heap=heap, engine=engine, timeout_s=timeout_s) for heap in heaps]


class VirtualRanks:
    """One `MoELayer` per virtual rank. Ranks take turns within a step, at the stops of `MoELayer.stages`.

    Args:
        config: of the layer.
        world_size: virtual ranks.
        load: called with each rank's layer to load its weights.
        device, engine: as for `ExpertParallelContext`.
        placement: as for `MoELayer`.
    """

    def __init__(
        self,
        config: MoELayerConfig,
        world_size: int,
        load: Callable[[MoELayer], None],
        *,
        device: torch.device | str = "cpu",
        engine: str = "auto",
        placement: Placement | None = None,
    ) -> None:
        self.contexts = virtual_contexts(world_size, device=device, engine=engine)
        self.layers = [MoELayer(config, context, placement=placement) for context in self.contexts]
        for layer in self.layers:
            load(layer)
        for context in self.contexts:
            context.allocate()

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        routing: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[torch.Tensor]:
        """Run a step: `xs[r]` are the tokens of rank `r`, `routing[r]` its `(topk_idx, topk_weights)` if given.

        `max_tokens` is that of `MoELayer.forward`. Raises `ValueError` for another number of `xs` or `routing`.
        """
        for name, given in {"xs": xs, "routing": xs if routing is None else routing}.items():
            if len(given) != len(self.layers):
                raise ValueError(f"{name}: expected one for each of {len(self.layers)} ranks, got {len(given)}")
        steps = []
        for rank, (layer, x) in enumerate(zip(self.layers, xs, strict=True)):
            topk_idx, topk_weights = routing[rank] if routing is not None else (None, None)
            steps.append(layer.stages(x, topk_idx=topk_idx, topk_weights=topk_weights, max_tokens=max_tokens))
        return advance_all(steps)

    def warm_up(self) -> None:
        """`MoELayer.warm_up` on all ranks."""
        warm_up(self.layers)

    def replace_experts(self, placement: Placement) -> None:
        """`MoELayer.replace_experts` on all ranks."""
        replace_experts(self.layers, placement)

    def close(self) -> None:
        """Free the memory of all ranks."""
        for context in self.contexts:
            context.close()

    def __enter__(self) -> VirtualRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
