"""The steps of a soak: any rank can make any of them, and its expected output, from seed and number alone.

The experts of a soak only multiply: the row of expert `e` is its token, quantized, times a factor of `e`. So the
combined result of a rank's own tokens follows from them and their routing, bit for bit, in the order of sums that
`kernels/exchange/combine.cu` states. Every token of every rank and step differs, so a wrong, old or foreign row shows.

Shape letters: `T` tokens of a rank, `H` hidden size, `K` experts per token, `R` rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.reference import owners_of
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.launch.benchmarks.checks import expert_factor, first_rows
from moe_runtime.launch.common import draws

KINDS = (*draws.ROUTINGS[1:], "none")
"""How a step is routed: those of `draws.routing`, and no token at all."""
UNROUTED_ABOVE = 1.28
"""Entries whose normal draw lies above are -1 where experts are drawn: one in ten."""


@dataclass(frozen=True)
class StepPlan:
    """What a step is, equal on all ranks: how tokens are routed, and how many of at most `size` each rank brings."""

    number: int
    kind: str
    size: int
    counts: tuple[int, ...]

    @staticmethod
    def draw(seed: int, number: int, geometry: ExchangeGeometry, sizes: Sequence[int] = ()) -> StepPlan:
        """Each rank brings none, one, all that it may or any number in between, one time in four each.

        Steps have the size of the geometry, or, where there are several, as often each of `sizes`.
        """
        chance = random.Random(f"{seed}/{number}")
        most = chance.choice(sizes) if len(sizes) > 1 else geometry.max_tokens
        counts = tuple(chance.choice((0, 1, most, chance.randint(0, most))) for _ in range(geometry.world_size))
        return StepPlan(number, chance.choice(KINDS), most, counts)

    def routing(
        self, seed: int, rank: int, geometry: ExchangeGeometry, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int32 and weights fp32 `[T, K]` of any rank."""
        count, experts, top_k = self.counts[rank], geometry.num_experts, geometry.top_k
        kind = "one" if self.kind == "none" else self.kind
        idx_TK, weights_TK = draws.routing(kind, seed, rank, self.number, count, experts, top_k, device)
        if self.kind == "none":
            idx_TK.fill_(-1)
        elif self.kind != "one":
            drawn = draws.tokens(seed, rank, -1 - self.number, count, top_k, device)
            idx_TK.masked_fill_(drawn > UNROUTED_ABOVE, -1)
        return idx_TK, weights_TK

    def tokens(self, seed: int, rank: int, geometry: ExchangeGeometry, device: torch.device) -> torch.Tensor:
        """bf16 `[T, H]` of any rank."""
        return draws.tokens(seed, rank, self.number, self.counts[rank], geometry.hidden, device)


def expected_offsets(idx: Sequence[torch.Tensor], geometry: ExchangeGeometry) -> torch.Tensor:
    """int32 `[E + 1]`: the `group_offsets` of this rank; `idx[r]` are the ids of rank `r`, `[T, K]`."""
    ids = torch.cat([part.flatten() for part in idx]).long()
    rows = torch.zeros(geometry.num_experts + 1, dtype=torch.int64, device=ids.device)
    rows.scatter_add_(0, ids + 1, torch.ones_like(ids))
    first = 1 + geometry.first_expert
    mine = rows[first : first + geometry.num_local_experts]
    return torch.cat([mine.new_zeros(1), mine.cumsum(0)]).int()


def multiplying_experts(arrived: DispatchedTokens) -> torch.Tensor:
    """bf16 `[R, H]` to combine, without the host: each row its token times the factor of its expert, then NaN."""
    geometry, offsets = arrived.handle.geometry, arrived.group_offsets.long()
    shape, device = (geometry.row_capacity, geometry.hidden), offsets.device
    if geometry.num_local_experts == 0:
        return torch.full(shape, math.nan, dtype=torch.bfloat16, device=device)
    position = torch.arange(geometry.row_capacity, device=device)
    expert = torch.searchsorted(offsets[1:], position, right=True) + geometry.first_expert
    values = dequantize_rows(first_rows(arrived, geometry.row_capacity))
    values *= expert_factor(expert, geometry)[:, None]
    return values.masked_fill_((position >= offsets[-1])[:, None], math.nan).bfloat16()


def expected_output(
    x_TH: torch.Tensor, idx_TK: torch.Tensor, weights_TK: torch.Tensor, geometry: ExchangeGeometry, starts: torch.Tensor
) -> torch.Tensor:
    """bf16 `[T, H]`, without the host: what `combine` must give for tokens of this rank and `multiplying_experts`.

    `starts` are those of the geometry, int64 on the device of the tokens.

    `bf16(sum over ranks ascending of wire(sum over that rank's experts, k ascending, of w_k * row_k))`, sums in fp32.
    """
    values_TH = dequantize_rows(quantize_rows(x_TH, geometry.token_format, engine="torch"), engine="torch")
    owner_TK, wire = owners_of(idx_TK.long(), starts), geometry.combine_format
    y_TH = torch.zeros_like(values_TH)
    for rank in range(geometry.world_size):
        total_TH = torch.zeros_like(values_TH)
        for k in range(geometry.top_k):
            row_TH = (values_TH * expert_factor(idx_TK[:, k], geometry)[:, None]).bfloat16().float()
            here = owner_TK[:, k, None] == rank
            total_TH = torch.where(here, total_TH + weights_TK[:, k, None] * row_TH, total_TH)
        partial_TH = dequantize_rows(quantize_rows(total_TH, wire, engine="torch"), engine="torch")
        y_TH = torch.where((owner_TK == rank).any(dim=1)[:, None], y_TH + partial_TH, y_TH)
    return y_TH.bfloat16()
