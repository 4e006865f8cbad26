"""What tests of expert-parallel models share: routing that is recorded and forced, and errors against float64.

Imported where transformers is known to be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moe_runtime.checkpoints.families import layer_config
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder
from tests.support.tiny_models import gate_of, moe_blocks

Routes = list[tuple[torch.Tensor, torch.Tensor]]
"""Weights and ids of each MoE layer, in order."""


def load(path: Path | str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A saved model with its own experts' plain implementation."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@contextmanager
def hooked(modules: Sequence[Any], hook_of: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
    """With `hook_of(i)` as forward hook of module `i`."""
    handles = [module.register_forward_hook(hook_of(i)) for i, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def record_routes(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, Routes]:
    """Logits of a call, and what each router answered."""
    routes: Routes = []

    def keep(_: int) -> Callable[..., None]:
        return lambda module, args, output: routes.append((output[1].float(), output[2]))

    with hooked([gate_of(block) for block in moe_blocks(model)], keep):
        return model(ids).logits, routes


@torch.no_grad()
def logits_with(model: Any, ids: torch.Tensor, routes: Routes, noise: float = 0.0) -> torch.Tensor:
    """Logits where the routers answer `routes`, and each layer's experts are off by `noise` of their norm."""
    generator = torch.Generator().manual_seed(0)

    def force(i: int) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Any) -> Any:
            weights, chosen = routes[i]
            return output[0], weights.to(output[1].dtype), chosen

        return hook

    def disturb(_: int) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            random = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            return output + random * (noise * output.norm() / random.norm().clamp(min=1e-30))

        return hook

    blocks = moe_blocks(model)
    with hooked([gate_of(block) for block in blocks], force):
        if not noise:
            return model(ids).logits
        with hooked([block.experts for block in blocks], disturb):
            return model(ids).logits


@torch.no_grad()
def dequantize_experts(model: Any, fmt: str) -> None:
    """Replace the experts' weights of a model by what they are once quantized to `fmt`."""
    config = layer_config(model.config.to_dict(), max_tokens_per_rank=1)
    order = GateUpOrder(config.activation.order)
    for block in moe_blocks(model):
        for weight, gate_up in ((block.experts.gate_up_proj, order), (block.experts.down_proj, False)):
            w_ENK = weight.mT if block.experts.is_transposed else weight.data
            read = ExpertWeights.quantize(w_ENK.float().contiguous(), fmt, gate_up=gate_up).dequantize()
            weight.copy_(read.mT if block.experts.is_transposed else read)


@torch.no_grad()
def sure_tokens(exact: Any, ids: torch.Tensor, tokens: torch.Tensor, logits: Sequence[torch.Tensor]) -> list[int]:
    """How many of the greedy `tokens` of each row must be found by every model that is about as exact.

    `logits` are those that the original saw, `exact` is its float64 self.
    """
    truth = exact(torch.cat([ids, tokens], dim=1)[:, :-1]).logits[:, ids.shape[1] - 1 :]
    seen = torch.stack(list(logits), dim=1)
    # Root mean square error of a logit of the original, at its worst token. Ours may be off as much, so that two
    # logits move by twice as much against each other: five times that.
    off = (seen.double() - truth).square().mean(dim=-1).sqrt().max()
    best = seen.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 5 * 2 * off
    return [[*row, False].index(False) for row in clear.tolist()]


def generate(
    model: Any, ids: torch.Tensor, new_tokens: int, eos: int | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The tokens that greedy search adds to each row, and the logits that it saw."""
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences[:, ids.shape[1] :], result.logits
