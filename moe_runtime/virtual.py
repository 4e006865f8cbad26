"""Several ranks in one process: the same layers, kernels and bits as with one process per rank, run in lockstep.

Useful for tests, for trying a placement without a launcher, and as the reference that a distributed run must equal
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch

from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.host_link import PrivateLink
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.placement.migration import move_experts
from moe_runtime.placement.placement import Placement
from moe_runtime.support.arguments import check_integer, check_kind, describe

StepArguments = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int | None]
"""Those of `MoELayer.forward`, in its order."""


def virtual_contexts(
    world_size: int,
    *,
    device: torch.device | str = "cpu",
    engine: str = "auto",
    timeout_s: float = 30.0,
    num_hosts: int = 1,
) -> list[ExpertParallelContext]:
    """One context for each of `world_size` virtual ranks in this process, on `num_hosts` virtual hosts.

    Raises `ValueError` unless `world_size` is a multiple of `num_hosts`.
    """
    check_integer("num_hosts", num_hosts)
    if num_hosts == 1:
        heaps = PrivateHeap.group(world_size, device)
        return [ExpertParallelContext(heap=heap, engine=engine, timeout_s=timeout_s) for heap in heaps]
    check_integer("world_size", world_size)
    if world_size % num_hosts:
        raise ValueError(f"num_hosts: expected a divisor of {world_size} ranks, got {num_hosts}")
    per_host = world_size // num_hosts
    heaps = [heap for _ in range(num_hosts) for heap in PrivateHeap.group(per_host, device)]
    return [
        ExpertParallelContext(heap=heap, link=link, engine=engine, timeout_s=timeout_s)
        for heap, link in zip(heaps, PrivateLink.rails(num_hosts, per_host), strict=True)
    ]


@torch.inference_mode()  # as in `MoELayer.replace_experts`
def replace_experts(layers: Sequence[MoELayer], placement: Placement) -> None:
    """`MoELayer.replace_experts` of a layer whose virtual ranks are all in this process."""
    replacements = [layer._agree_on_replacement(placement) for layer in layers]
    with ExitStack() as replacing:
        for layer in layers:
            replacing.enter_context(layer._replacing(placement))
        move_experts([replacement.mover for replacement in replacements], replacements[0].plan)


class VirtualRanks:
    """One `MoELayer` per virtual rank. Each stage of a step runs on all ranks before the next one begins.

    Args:
        config: of the layer.
        world_size: virtual ranks.
        load: called with each rank's layer to load its weights.
        device, engine: as for `ExpertParallelContext`.
        placement: as for `MoELayer`.
        num_hosts: virtual hosts, with equally many ranks.
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
        num_hosts: int = 1,
    ) -> None:
        check_kind("config", config, MoELayerConfig)
        if not callable(load):
            raise ValueError(f"load: expected a function that loads a layer, got {describe(load)}")
        self.contexts = virtual_contexts(world_size, device=device, engine=engine, num_hosts=num_hosts)
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

        `max_tokens` is as in `MoELayer.forward`. Raises `ValueError` unless `xs` and `routing` are lists or tuples
        of one for each rank.
        """
        for name, given in {"xs": xs, "routing": xs if routing is None else routing}.items():
            if not isinstance(given, list | tuple) or len(given) != len(self.layers):
                got = len(given) if isinstance(given, list | tuple) else describe(given)
                raise ValueError(f"{name}: expected one for each of {len(self.layers)} ranks, got {got}")
        answers = [(None, None)] * len(xs) if routing is None else routing
        for answer in answers:
            if not isinstance(answer, list | tuple) or len(answer) != 2:
                raise ValueError(f"routing: expected pairs of topk_idx and topk_weights, got {describe(answer)}")
        return self._run([(x, *answer, None, max_tokens) for x, answer in zip(xs, answers, strict=True)])

    def warm_up(self) -> None:
        """`MoELayer.warm_up` on all ranks."""
        with torch.no_grad(), ExitStack() as unobserved:
            for layer in self.layers:
                unobserved.enter_context(layer._unobserved())
            for steps in zip(*(layer._warm_up_steps() for layer in self.layers), strict=True):
                self._run(steps)
        for context in self.contexts:
            context.check_peers()

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

    def _run(self, steps: Sequence[StepArguments]) -> list[torch.Tensor]:
        """`MoELayer.forward` on all ranks: each with its arguments, all in one stage before the next one begins."""
        routed = [layer._route(*arguments) for layer, arguments in zip(self.layers, steps, strict=True)]
        for stage in self.layers[0]._stages:
            for layer, step in zip(self.layers, routed, strict=True):
                layer._run(step, (stage,))
        return [step.y for step in routed]
