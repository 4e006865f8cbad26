"""How full the slots of an exchange between hosts are: routing is drawn at random and counted.

A rank has `T` slots for each other host, one for each of its tokens. A token uses a host's slot if that host holds one
of its experts. Hosts hold equally many experts, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moe_runtime.launch.common import draws
from moe_runtime.router import sigmoid_topk

ROUTINGS = ("uniform", "zipf", "groups", "random groups")
"""`uniform` and `zipf`: as in `common.cases`. `groups`: as DeepSeek-V3 does it, of random scores: the `TOP_GROUPS` of
`GROUPS` groups of experts whose two best scores are largest, then the best experts of these. `random groups`: groups
are chosen without looking at their scores."""

GROUPS, TOP_GROUPS = 8, 4
BLOCK = 8192
"""Tokens that are drawn at once."""

SIGMAS = 6.0
"""Standard deviations above the mean that a capacity has room for."""


@dataclass(frozen=True)
class Fill:
    """How many tokens of a rank use one host, of `tokens` that might.

    Attributes:
        tokens: `T`, of a rank in a step.
        shares: part of all tokens that uses each host.
        mean, sigma: tokens of a rank and step for the host that gets most, over steps.
        most: for any host in any step that was drawn.
        steps: of one rank, that were drawn.
    """

    tokens: int
    shares: tuple[float, ...]
    mean: float
    sigma: float
    most: int
    steps: int

    @property
    def waste(self) -> float:
        """Part of all slots that stays empty."""
        return 1 - sum(self.shares) / len(self.shares)

    @property
    def capacity(self) -> int:
        """Slots for the mean and `SIGMAS` standard deviations of the host that gets most, at most `tokens`."""
        return min(self.tokens, math.ceil(self.mean + SIGMAS * self.sigma))

    @property
    def waste_of_capacity(self) -> float:
        """Part of `capacity` slots for each host that stays empty."""
        return 1 - sum(self.shares) / len(self.shares) * self.tokens / self.capacity


def draw(routing: str, num_tokens: int, num_experts: int, top_k: int, seed: int, block: int = 0) -> torch.Tensor:
    """int32 `[num_tokens, top_k]`: experts of tokens, another draw for each `block`.

    Raises `ValueError` for another routing than `ROUTINGS`, and for groups where the experts do not fit into them.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: expected one of {', '.join(ROUTINGS)}, got {routing!r}")
    if routing == "random groups" and (num_experts % GROUPS or top_k > TOP_GROUPS * num_experts // GROUPS):
        raise ValueError(f"num_experts: expected {GROUPS} groups, {TOP_GROUPS} of them with {top_k}, got {num_experts}")
    if routing in ("uniform", "zipf"):
        return draws.routing(routing, seed, 0, block, num_tokens, num_experts, top_k)[0]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + block)
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator)
    if routing == "random groups":
        chosen = torch.rand(num_tokens, GROUPS, generator=generator).topk(TOP_GROUPS, dim=1).indices
        allowed = torch.zeros(num_tokens, GROUPS, dtype=torch.bool).scatter_(1, chosen, True)
        # Scores in chosen groups come before all others.
        logits_TE += 100.0 * allowed.repeat_interleave(num_experts // GROUPS, dim=1)
        return logits_TE.topk(top_k, dim=1).indices.to(torch.int32)
    return sigmoid_topk(logits_TE, top_k, num_groups=GROUPS, top_groups=TOP_GROUPS)[0]


def places_used(ids_TK: torch.Tensor, num_experts: int, places: int) -> torch.Tensor:
    """bool `[T, places]`: whether each of `places` equal parts of the experts holds one of a token's.

    >>> places_used(torch.tensor([[0, 1], [1, 3]]), 4, 2).tolist()
    [[True, False], [True, True]]
    """
    used = torch.zeros(len(ids_TK), places, dtype=torch.bool)
    return used.scatter_(1, ids_TK.long() // (num_experts // places), True)


def simulate(
    routing: str, places: list[int], tokens: list[int], num_tokens: int, num_experts: int, top_k: int, seed: int
) -> dict[tuple[int, int], Fill]:
    """The `Fill` of each number of places (hosts, or ranks) and of tokens of a rank, from the same `num_tokens` tokens.

    Args:
        places: into how many equal parts the experts are divided.
        tokens: `T`; each divides `num_tokens`, and `num_tokens / T` steps of a rank are counted.
        num_tokens: that are drawn.

    Raises:
        ValueError: for a number of places that does not divide the experts, and for tokens that do not divide.
    """
    for count in places:
        if count < 1 or num_experts % count:
            raise ValueError(f"places: expected divisors of {num_experts} experts, got {count}")
    for count in tokens:
        if count < 1 or num_tokens % count or num_tokens < 2 * count:
            raise ValueError(f"tokens: expected two steps at least of {num_tokens} tokens, got {count}")
    blocks = [
        draw(routing, min(BLOCK, num_tokens - start), num_experts, top_k, seed, start)
        for start in range(0, num_tokens, BLOCK)
    ]
    ids_TK = torch.cat(blocks)
    found = {}
    for count in places:
        used = places_used(ids_TK, num_experts, count)
        shares = used.double().mean(dim=0)
        for size in tokens:
            steps = used.view(-1, size, count).sum(dim=1)
            hottest = steps[:, int(shares.argmax())].double()
            found[count, size] = Fill(
                size, tuple(shares.tolist()), float(hottest.mean()), float(hottest.std()), int(steps.max()), len(steps)
            )
    return found
