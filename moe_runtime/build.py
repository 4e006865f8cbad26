"""What a layer is built of: the context it runs over, and dense weights and experts from a checkpoint or a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.config import MoELayerConfig, ParallelConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import abort_peers_on_error
from moe_runtime.post_expert_norm import PostExpertNorm
from moe_runtime.router import Router
from moe_runtime.shared_expert import SharedExpert
from moe_runtime.support.arguments import check_kind


def check_context(context: ExpertParallelContext | None) -> None:
    """Raise `ValueError` unless `context` is one, or None."""
    if context is not None and not isinstance(context, ExpertParallelContext):
        raise ValueError(f"context: expected an ExpertParallelContext or None, got {type(context).__name__}")


def context_from_config(
    parallel: ParallelConfig,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> ExpertParallelContext:
    """The context that a `parallel` section describes; the rest as for `ExpertParallelContext`."""
    check_kind("parallel", parallel, ParallelConfig)
    # The keys of the section are arguments of the context.
    return ExpertParallelContext(group, device=device, **parallel.model_dump())


@contextmanager
def built_over(
    context: ExpertParallelContext | None, parallel: ParallelConfig | None = None
) -> Iterator[ExpertParallelContext]:
    """Around the construction of a layer: yields `context`, or a new one as `parallel` describes it.

    After an error inside, the peers get `PeerAbortedError` and a new context is closed.
    """
    check_context(context)
    used = context
    if used is None:
        used = context_from_config(parallel or ParallelConfig())
    try:
        with abort_peers_on_error(used):
            yield used
    except BaseException:
        if context is None:
            used.close()
        raise


def checkpoint_overrides(config: MoELayerConfig) -> dict[str, Any]:
    """The fields of a layer's config that its checkpoint must match; formats that are not set follow the checkpoint."""
    unset = {name for name in ("token_format", "weight_format") if name not in config.model_fields_set}
    return config.model_dump() | dict.fromkeys(unset)


def read_dense(
    checkpoint: Checkpoint, layer: int, router: Router | None, shared_expert: SharedExpert | None
) -> Callable[[], None]:
    """Read what `router` and `shared_expert` have in decoder layer `layer`; the result fills them."""
    gate = checkpoint.router(layer) if router is not None else None
    shared = checkpoint.shared_expert(layer) if shared_expert is not None else None

    def fill() -> None:
        if router is not None and gate is not None:
            router.load(gate.weight, bias=gate.bias, correction_bias=gate.correction_bias)
        if shared_expert is not None and shared is not None:
            shared_expert.load(shared.gate_proj, shared.up_proj, shared.down_proj, shared.token_gate)

    return fill


def fill_dense(
    config: MoELayerConfig,
    seed: int,
    router: Router | None,
    shared_expert: SharedExpert | None,
    norm: PostExpertNorm | None,
) -> None:
    """Fill these at random from `seed`, with values that keep activations near unit variance."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> torch.Tensor:
        w_NK = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device=generator.device)
        return w_NK * columns**-0.5

    # Drawn without a router too: the numbers of the shared expert do not depend on it.
    gate = normal(config.num_experts, config.hidden_size)
    if router is not None:
        router.weight.data.copy_(gate)
    if shared_expert is not None:
        for parameter in shared_expert.parameters():
            parameter.data.copy_(normal(*parameter.shape))
    if norm is not None:
        norm.load(normal(1, config.hidden_size)[0])


def random_expert(config: MoELayerConfig, seed: int, expert: int, device: torch.device | str = "cpu") -> ExpertTensors:
    """One expert in bf16, from `seed`, its id and the kind of `device` alone; with biases where the config has them."""
    generator = torch.Generator(device).manual_seed((seed * 65537 + expert + 1) % 2**63)

    def normal(*shape: int, fan_in: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)
        return (x * fan_in**-0.5).to(torch.bfloat16)

    hidden, inner = config.hidden_size, config.intermediate_size
    rows = config.activation.num_parts * inner
    gate_up, down = normal(rows, hidden, fan_in=hidden), normal(hidden, inner, fan_in=inner)
    if not config.expert_bias:
        return ExpertTensors(gate_up, down)
    return ExpertTensors(gate_up, down, normal(rows, fan_in=hidden), normal(hidden, fan_in=inner))
