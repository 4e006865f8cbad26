"""Random tokens and routing: any rank can draw any other's from a seed alone.

Shape letters: `T` tokens of a rank, `H` hidden size, `E` experts of the layer, `K` experts per token.
"""

from __future__ import annotations

import hashlib

import torch

ROUTINGS = ("router", "uniform", "zipf", "half", "one")
"""`router`: the layer's own. `uniform`: every set of K experts alike. `zipf`: expert `e` with weight `1 / (e + 1)`.
`one`: every token goes to expert 0 alone, its other entries are -1. `half`: every second token as in `one`, the others
as in `uniform`."""

CPU = torch.device("cpu")


def tokens(seed: int, rank: int, step: int, num_tokens: int, hidden: int, device: torch.device = CPU) -> torch.Tensor:
    """bf16 `[T, H]`, normal with variance 1: what `rank` brings to `step`. Values differ by kind of device."""
    generator = _generator("tokens", seed, rank, step, device=device)
    return torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float32, device=device).to(torch.bfloat16)


def routing(
    kind: str,
    seed: int,
    rank: int,
    step: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    device: torch.device = CPU,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 `[T, K]` and weights fp32 `[T, K]` for each of `ROUTINGS` but `router`; as `tokens` by device.

    Weights of a token are positive and sum to 1. Raises `ValueError` for an unknown `kind`.
    """
    if kind not in ROUTINGS[1:]:
        raise ValueError(f"routing: expected one of {', '.join(ROUTINGS[1:])}, got {kind!r}")
    generator = _generator(kind, seed, rank, step, device=device)
    # The K largest of log(weight) + Gumbel noise are a draw without replacement.
    noise_TE = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device)
    noise_TE = -noise_TE.exponential_(generator=generator).log()
    if kind == "zipf":
        noise_TE -= torch.arange(1, num_experts + 1, dtype=torch.float32, device=device).log()
    idx_TK = noise_TE.topk(top_k, dim=1).indices.to(torch.int32)
    weights_TK = torch.randn(num_tokens, top_k, generator=generator, dtype=torch.float32, device=device).softmax(dim=1)
    if kind in ("half", "one"):
        nth = 2 if kind == "half" else 1
        idx_TK[::nth], weights_TK[::nth] = -1, 0.0
        idx_TK[::nth, 0], weights_TK[::nth, 0] = 0, 1.0
    return idx_TK, weights_TK


def _generator(*parts: object, device: torch.device = CPU) -> torch.Generator:
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
