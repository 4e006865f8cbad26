"""From expert ids to slots on the device: the token alone decides which replica of an expert takes it.

A slot is the place of one physical expert: a replica on one rank.

The first elements of a token are hashed to one of `BUCKETS` buckets. A table gives the slot for each expert and bucket.
So replicas share tokens evenly, except that equal tokens take the same slot. The slot depends neither on the token's
place in the batch, nor on its neighbours, nor on the rank that brings it.
"""

from __future__ import annotations

import torch

from moe_runtime.comm.errors import REFUSED_ID
from moe_runtime.placement.placement import Placement
from moe_runtime.support.arguments import check_is_tensor

BUCKET_BITS = 10
BUCKETS = 1 << BUCKET_BITS
"""Each of `n` replicas gets `floor(BUCKETS / n)` buckets or one more. The table has 4 KiB for each expert."""

HASHED = 8
"""How many elements of a token are hashed: 16 bytes. Every hidden size is a multiple of it."""

_MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))
"""Odd numbers whose bits have no pattern: the golden ratio, as in Fibonacci hashing, and a prime of xxHash."""

_UNROUTED = 1
"""Row of the table for -1. Row 0 is for smaller ids, row `2 + e` for expert `e`, the last row for larger ids."""


class SlotTable:
    """The slots of a `Placement`. Its tensors keep their addresses, so captured graphs see an `update`.

    Args:
        placement: the first one; `update` takes others of the same sizes.
        device: of the ids and tokens.
    """

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self._num_experts = placement.num_experts
        self._multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device)
        self._table = _table(placement).to(device)
        self._device = self._table.device

    def update(self, placement: Placement) -> None:
        """Change to another placement of as many experts, in place and on the current stream."""
        self._table.copy_(_table(placement))

    def __call__(self, topk_idx: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Slots of the experts that a router has chosen. Nothing waits for the host.

        Args:
            topk_idx: int32 or int64 `[T, K]`; -1 is unrouted.
            x: bf16 `[T, H]`, the tokens.

        Returns:
            `[T, K]` of the dtype of `topk_idx`: a slot for each expert id, and -1 for -1. For an id that is out of
            range, or repeats an earlier one of its token, it is `REFUSED_ID` plus the id, which no dispatcher accepts.

        Raises:
            ValueError: an argument of wrong type, shape, dtype or device.
        """
        self._check(topk_idx, x)
        rows_TK = topk_idx.clamp(-_UNROUTED - 1, self._num_experts).long() + (_UNROUTED + 1)
        slots_TK = self._table[rows_TK, self._buckets(x)[:, None]].to(topk_idx.dtype)
        again = (topk_idx[:, :, None] == topk_idx[:, None, :]).tril(-1).any(2) & (topk_idx >= 0)
        # Clamped: adding `REFUSED_ID` to an id far out of range could wrap around to a slot.
        refused_TK = topk_idx.clamp(-REFUSED_ID // 2, REFUSED_ID // 2 - 1) + REFUSED_ID
        return torch.where((slots_TK < -1) | again, refused_TK, slots_TK)

    def _buckets(self, x: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` of `0 .. BUCKETS - 1`: the top bits of a 64-bit sum of products, with wrap-around."""
        # A copy: a view as int64 needs an aligned address.
        words_T2 = x.detach()[:, :HASHED].clone(memory_format=torch.contiguous_format).view(torch.int64)
        return (words_T2 * self._multipliers).sum(1) >> (64 - BUCKET_BITS) & (BUCKETS - 1)

    def _check(self, topk_idx: torch.Tensor, x: torch.Tensor) -> None:
        kinds = {"topk_idx": (topk_idx, (torch.int32, torch.int64)), "x": (x, (torch.bfloat16,))}
        for name, (tensor, dtypes) in kinds.items():
            check_is_tensor(name, tensor)
            if tensor.device != self._device:
                raise ValueError(f"{name}: expected device {self._device}, got {tensor.device}")
            if tensor.dtype not in dtypes:
                raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
            if tensor.ndim != 2:
                raise ValueError(f"{name}: expected two dimensions, got shape {list(tensor.shape)}")
        if topk_idx.shape[0] != x.shape[0]:
            raise ValueError(f"topk_idx: expected a row for each of {x.shape[0]} tokens, got {topk_idx.shape[0]}")
        if x.shape[1] < HASHED:
            raise ValueError(f"x: expected at least {HASHED} numbers in a token, got {x.shape[1]}")


def _table(placement: Placement) -> torch.Tensor:
    """int32 `[E + 3, BUCKETS]`: the slot for each expert and bucket, -1 for unrouted and -2 for refused ids.

    Each expert permutes the buckets in its own way. Otherwise the tokens of replica 0 of one hot expert would also take
    replica 0 of all others.
    """
    table = torch.full((placement.num_experts + _UNROUTED + 2, BUCKETS), -2, dtype=torch.int32, device="cpu")
    table[_UNROUTED] = -1
    buckets = torch.arange(BUCKETS, device="cpu")
    for expert, slots in enumerate(placement.replicas):
        # An odd factor permutes the numbers below a power of two; Knuth's has no pattern in its low bits.
        dealt = (buckets * (2654435761 * (expert + 1) | 1) + 389 * expert) % BUCKETS
        held = torch.tensor(slots, dtype=torch.int32, device="cpu")
        table[_UNROUTED + 1 + expert] = held[dealt * len(slots) // BUCKETS]
    return table
