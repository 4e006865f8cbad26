"""What normal mode takes and gives: tokens, the handle of a dispatch, and what came."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from moe_runtime.deep_ep.sizes import MOST_TOP_K
from moe_runtime.kernels.exchange.landing import LandedRows
from moe_runtime.kernels.exchange.payload import WORD, PayloadLayout, UnpackedRows
from moe_runtime.kernels.exchange.reference import last_entries_of
from moe_runtime.kernels.exchange.rows import Route

LEAST_ROOM = 64
"""Tokens of a rank in the smallest step."""

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
TokenLayout = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""`is_token_in_rank` bool `[T, W]`, `num_tokens_per_rank` int32 `[W]` and `num_tokens_per_expert` int32 `[E]`."""


class Form(NamedTuple):
    """What a dispatch is told beside tokens and routing.

    Attributes:
        num_experts: `E`; 0 without expert ids.
        num_worst_tokens: rows to make room for; 0 for those that come, for whose number the host waits.
        max_tokens: most tokens of a rank, equal on all ranks, which fit in one step; None where that is not known.
        to_expand: whether rows stay where they land, for `NormalExchange.expand`; of one step.
        scales_by_column: as of `allocate_scales`.
        keeps_ids: whether there are `Received.kept_ids`.
        sums_by_entry: whether combine adds the ranks of a token in the order of their last entries; else ascending.
    """

    num_experts: int
    num_worst_tokens: int = 0
    max_tokens: int | None = None
    to_expand: bool = False
    scales_by_column: bool = False
    keeps_ids: bool = False
    sums_by_entry: bool = False


@dataclass(frozen=True)
class Step:
    """Tokens that travelled in one step, and where their rows are.

    Each entry of a token has a row of its own. An entry is a rank that the token goes to, or, where rows are expanded,
    an expert.

    Attributes:
        start, end: of this rank's tokens.
        room: most tokens of a rank, for which the step was made.
        entries: int `[T, W]`, ranks that the token goes to, in the order in which combine adds them, and -1. Expanded:
            `[T, K]`, experts of the token, -1 for none.
        weights: fp32 ones of this shape.
        positions: int32 `[W * room, W]`, or `[W * room, K]`: row of each slot and entry, -1 for none. Slots are by
            source rank and token.
        num_experts: `E` of expanded rows; None where entries are ranks.
    """

    start: int
    end: int
    room: int
    entries: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    num_experts: int | None = None


class NormalHandle(tuple[torch.Tensor | None, ...]):
    """What a dispatch leaves for cached dispatches and for combines, as often as they are called.

    As a tuple it has DeepEP's six fields, None where they speak of its channels: `rank_prefix_matrix` int32 `[W, W]`
    (entry `[i, r]` counts the tokens of ranks 0 to `i` for rank `r`), None, None, `recv_src_idx` int32 `[R]` (the
    token at its rank), `is_token_in_rank` bool `[T, W]`, None. On CPUs, `rank_prefix_matrix` is None too with
    `num_worst_tokens`.

    Attributes:
        num_ranks: `W`.
        num_tokens: `T`.
        num_rows: `R`, rows that came, or `num_worst_tokens`.
        room: most tokens of a rank in a step.
        tokens_of_experts: tokens that came for each local expert; None with `num_worst_tokens`.
        steps: the tokens of each step, and where their rows are. With `route` only of rows that are to be expanded.
        route: where tokens go, for kernels that store to peers; None elsewhere.
        most_tokens, most_sent: of a rank and of a pair of ranks at most, with `route`.
        home_ids: int64 `[T, K]`, contiguous, with `route`: see `DirectExchange.combine`.
    """

    num_ranks: int
    num_tokens: int
    num_rows: int
    room: int
    tokens_of_experts: list[int] | None
    steps: list[Step]
    route: Route | None = None
    most_tokens: int = 0
    most_sent: int = 0
    home_ids: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What kernels of later calls read."""
        of_steps = [tensor for step in self.steps for tensor in (step.entries, step.weights, step.positions)]
        return *self, *(() if self.route is None else (self.route.words,)), *of_steps


@dataclass(slots=True)
class Received:
    """What a dispatch gives back.

    Attributes:
        x: `[R, H]` in bf16 or e4m3.
        scales: fp32 `[R, V]`; None for bf16.
        topk_idx: int64 `[R, K]`, local expert ids, -1 for experts of other ranks; None without top-k.
        topk_weights: fp32 `[R, K]`, 0 where the id is -1; None without top-k.
        handle: for combine.
        layout: of what travelled.
        landed: with rows that are to be expanded, in place of `x` and `scales`; until the next dispatch.
        kept_ids: as `topk_idx`, in memory that callers do not get; None where nobody asked.
    """

    x: torch.Tensor | None
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: NormalHandle
    layout: PayloadLayout
    landed: LandedRows | None
    kept_ids: torch.Tensor | None = None

    @property
    def tokens(self) -> Tokens:
        """The rows that came, in the form in which they were sent."""
        assert self.x is not None
        return self.x if self.scales is None else (self.x, self.scales)

    @classmethod
    def of(
        cls,
        layout: PayloadLayout,
        out: UnpackedRows,
        handle: NormalHandle,
        landed: LandedRows | None,
        kept_ids: torch.Tensor | None = None,
    ) -> Received:
        """What `out` holds, and where rows without tokens have `landed`."""
        if out.tokens is not None:
            landed = None
        return cls(out.tokens, out.scales, out.ids, out.weights, handle, layout, landed, kept_ids)


def valid_ids(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 `[T, K]` of int64 `topk_idx`, -1 for every id that is none; the lower 32 bits count, as in what travels."""
    ids = topk_idx.to(torch.int32)
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)


def ranks_by_last_entry(topk_idx: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """int64 `[T, W]`: the ranks of each token's experts in the order of their last entries in `topk_idx`, then -1."""
    ids = valid_ids(topk_idx, num_experts)
    owners = torch.where(ids >= 0, ids // (num_experts // world_size), -1)
    last = last_entries_of(owners, world_size)
    last, ranks = torch.where(last > 0, last, ids.shape[1] + 1).sort(dim=1)
    return torch.where(last <= ids.shape[1], ranks, -1)


def as_sent(rows: Tokens, x: Tokens) -> Tokens:
    """`rows` that came, with scales of the dtype of those of `x`, whose bits they have."""
    if isinstance(x, tuple) and isinstance(rows, tuple) and rows[1].dtype != x[1].dtype:
        return rows[0], rows[1].view(x[1].dtype)
    return rows


def payload_layout(hidden: int, x: Tokens, topk_idx: torch.Tensor | None) -> PayloadLayout:
    """Of tokens of `hidden` elements with `topk_idx`. Raises `ValueError` for too many experts of a token."""
    top_k = 0 if topk_idx is None else topk_idx.shape[1]
    if top_k > MOST_TOP_K:
        raise ValueError(f"topk_idx: expected at most {MOST_TOP_K} experts of a token, got {top_k}")
    if isinstance(x, tuple):
        return _layout(hidden, x[1].shape[1], top_k)
    return _layout(WORD * hidden, 0, top_k)


_layout = cache(PayloadLayout)
"""Equal layouts are one object, which is found in a dict without a comparison."""


def room_for(tokens: int, most: int) -> int:
    """A step's size for `tokens` of the rank that has most, `most` at most: kernels look at each slot of it."""
    return min(most, max(LEAST_ROOM, 1 << (tokens - 1).bit_length() if tokens else 1))


def check_one_step(tokens: int, most: int) -> None:
    """Raise `ValueError` for more tokens than fit in a step, whose counts no host is told."""
    if tokens > most:
        raise ValueError(
            f"x: expected at most {most} tokens with num_worst_tokens (num_nvl_bytes has room for no more in one "
            f"step), got {tokens}"
        )
