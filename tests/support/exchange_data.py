"""Tokens and routings of any rank from a seed, and what must become of them, in plain loops over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from moe_runtime.config import GATHERED_MAX_TOKENS, ModeName, MoELayerConfig
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.layer import MoELayer
from moe_runtime.placement.placement import Placement, plan_placement

HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 10, 3, 12


def config(fmt: str = "bf16", **changes: Any) -> MoELayerConfig:
    """The layer that distributed tests run, with `changes`."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "max_tokens_per_rank": TOKENS,
        "token_format": fmt,
        **changes,
    }
    return MoELayerConfig(**settings)


def placements(world: int, spare: int = 2) -> list[Placement]:
    """Three that follow each other: hot experts at the front, at the back, and one more slot order of the latter."""
    slots = min(-(-EXPERTS // world) + spare, EXPERTS)
    first = plan_placement([2.0**-e for e in range(EXPERTS)], world, slots)
    second = plan_placement([2.0**e for e in range(EXPERTS)], world, slots).reordered_like(first)
    turned = [expert for rank in range(world) for expert in second.rank_experts(rank)[::-1]]
    return [first, second, Placement(EXPERTS, world, tuple(turned))]


LAYERS = [
    config("nvfp4"),
    config("bf16"),
    config("fp8_block", max_tokens_per_rank=GATHERED_MAX_TOKENS + 1, combine_format="fp8_block"),
    config("mxfp8", combine_format="mxfp8"),
    config("bf16", weight_format="nvfp4", max_tokens_per_rank=GATHERED_MAX_TOKENS + 1),
]
"""What processes and virtual ranks are compared on: every format, gathered and contiguous rows, every wire."""


def set_mode(layer: MoELayer, mode: ModeName) -> MoELayer:
    """`layer`, whose rows lie in `mode` whatever its config says; before its first step, on all ranks."""
    slots = None if layer.placement is None else layer.placement.num_slots
    layer.dispatchers = TokenDispatcher.of_all_sizes(layer.context, layer.config, num_slots=slots, mode=mode)
    layer.dispatcher = layer.dispatchers[layer.config.max_tokens_per_rank]
    return layer


class RankInput(NamedTuple):
    """What one rank brings to a step: bf16 `[T, H]`, int64 `[T, K]`, fp32 `[T, K]`."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device) -> RankInput:
        return RankInput(*(part.to(device) for part in self))


def rank_input(
    seed: int, rank: int, num_tokens: int, hidden: int, num_experts: int, top_k: int, routing: str = "random"
) -> RankInput:
    """Routing `random` (one id in five unrouted), `one` (all tokens to the last experts) or `none` (all unrouted)."""
    g = torch.Generator().manual_seed(seed * 1009 + rank)
    x = torch.randn(num_tokens, hidden, generator=g) * torch.exp(2 * torch.randn(num_tokens, 1, generator=g))
    if routing == "random":
        scores = torch.rand(num_tokens, num_experts, generator=g)
        idx = scores.argsort(dim=1)[:, :top_k]
        idx = torch.where(torch.rand(idx.shape, generator=g) < 0.2, torch.full_like(idx, -1), idx)
    elif routing == "one":
        idx = torch.arange(num_experts - 1, num_experts - 1 - top_k, -1).expand(num_tokens, top_k)
    else:
        idx = torch.full((num_tokens, top_k), -1)
    return RankInput(x.to(torch.bfloat16), idx.contiguous(), torch.rand(num_tokens, top_k, generator=g))


def repeated_ids(ids: torch.Tensor, most: int, g: torch.Generator) -> torch.Tensor:
    """`ids` `[T, K]`, but some are there several times in a token, at most `most` times in all; others are negative."""
    again = torch.randint(ids.shape[1], ids.shape, generator=g)
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.6, ids.gather(1, again), ids)
    earlier = [int((ids.flatten()[:i] == ids.flatten()[i]).sum()) for i in range(ids.numel())]
    none = -torch.randint(1, 4, ids.shape, generator=g)
    return torch.where((ids >= 0) & (torch.tensor(earlier).view(ids.shape) < most), ids, none)


def expected_groups(inputs: list[RankInput], experts: range) -> list[list[tuple[int, int, int]]]:
    """For each expert, the `(source rank, token, k)` that arrive for it, in the order in which they must lie."""
    groups: list[list[tuple[int, int, int]]] = [[] for _ in experts]
    for rank, data in enumerate(inputs):
        for token, ids in enumerate(data.topk_idx.tolist()):
            for k, expert in enumerate(ids):
                if expert in experts:
                    groups[expert - experts.start].append((rank, token, k))
    return groups


def through_bf16(partial: np.ndarray) -> np.ndarray:
    """A partial sum that travels in bf16, rounded by torch."""
    return torch.from_numpy(partial).to(torch.bfloat16).float().numpy()


def through_fp8_blocks(partial: np.ndarray) -> np.ndarray:
    """A finite partial sum that travels in e4m3 with an fp32 scale for each 128 values, the last ones fewer."""
    blocks = []
    for start in range(0, len(partial), 128):
        block = partial[start : start + 128]
        scale = np.maximum(np.abs(block).max(), np.float32(1e-4)) / np.float32(448)
        quants = np.clip(block / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        blocks.append(quants.astype(np.float32) * scale)
    return np.concatenate(blocks)


WIRES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"bf16": through_bf16, "fp8_block": through_fp8_blocks}


def order_sensitive(*shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """fp32 numbers whose sum depends on their order."""
    return torch.randn(shape, generator=generator).ldexp(torch.randint(-14, 15, shape, generator=generator))


def expected_combine(
    data: RankInput,
    starts: tuple[int, ...],
    row_of: dict[tuple[int, int], np.ndarray],
    token: int,
    wire: str = "bf16",
    by_entry: bool = False,
) -> np.ndarray:
    """fp32 sum of one token before its rounding to bf16, in numpy, one operation at a time.

    `row_of[token, k]` is the expert's row as fp32 of bf16. Partial sums travel in format `wire`, and are added by rank,
    or in the order of the ranks' last entries in the token.
    """
    hidden, experts = data.x.shape[1], data.topk_idx[token].tolist()
    total = np.zeros(hidden, np.float32)
    last = {rank: -1 for rank in range(len(starts) - 1)}
    for k, expert in enumerate(experts):
        last |= {rank: k for rank in last if starts[rank] <= expert < starts[rank + 1]}
    for rank in sorted(last, key=lambda rank: last[rank]) if by_entry else last:
        partial, some = np.zeros(hidden, np.float32), False
        for k, expert in enumerate(experts):
            if starts[rank] <= expert < starts[rank + 1]:
                partial = partial + np.float32(data.topk_weights[token, k].item()) * row_of[token, k]
                some = True
        if some:
            total = total + WIRES[wire](partial)
    return total
