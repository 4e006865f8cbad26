"""Tokens that several ranks hold alike, of which each rank computes a part; and steps that a layer can hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.formats.reference_quantize import cat_bits


def part_of(num_tokens: int, ranks: int, rank: int) -> slice:
    """The part of `rank` in `num_tokens` tokens that `ranks` ranks hold alike; the last parts may be short or empty.

    >>> [part_of(5, 3, rank) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = ceil_div(num_tokens, ranks)
    return slice(min(rank * rows, num_tokens), min((rank + 1) * rows, num_tokens))


def gather_parts(
    y_TH: torch.Tensor, num_tokens: int, ranks: int, gather: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The results `[num_tokens, H]` of the parts of all ranks; `gather` concatenates equal shapes by rank."""
    rows = ceil_div(num_tokens, ranks)
    return gather(nn.functional.pad(y_TH, (0, 0, 0, rows - y_TH.shape[0])).contiguous())[:num_tokens]


def place_part(y_TH: torch.Tensor, num_tokens: int, part: slice) -> torch.Tensor:
    """`[num_tokens, H]` with the results `y_TH` of `part` and zeros elsewhere: its sum over ranks is the whole."""
    whole = y_TH.new_zeros(num_tokens, y_TH.shape[1])
    whole[part] = y_TH
    return whole


def steps_for(most_tokens: int, limit: int) -> tuple[int, int]:
    """How many steps of at most `limit` tokens `most_tokens` take, at least one, and most tokens of a step.

    >>> steps_for(5, 4), steps_for(0, 4)
    ((2, 3), (1, 0))
    """
    steps = max(1, ceil_div(most_tokens, limit))
    return steps, ceil_div(most_tokens, steps)


def run_in_steps(
    layer: Callable[..., torch.Tensor],
    x_TH: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    steps: int = 1,
    max_tokens: int | None = None,
) -> torch.Tensor:
    """The results of a `MoELayer` for tokens `[T, H]` in `steps` steps of `max_tokens` at most, equal on all ranks."""
    topk_weights = topk_weights.float()
    if steps == 1:
        return layer(x_TH, topk_idx=topk_idx, topk_weights=topk_weights, max_tokens=max_tokens)
    parts = zip(*(t.tensor_split(steps) for t in (x_TH, topk_idx, topk_weights)), strict=True)
    return cat_bits([layer(x, topk_idx=idx, topk_weights=weights, max_tokens=max_tokens) for x, idx, weights in parts])
