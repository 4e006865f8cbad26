"""Normal mode over a `TokenDispatcher` whose experts are the ranks: a token goes once to each rank that wants it.

What travels with a token is payload of bf16 words, of which the exchange copies the bits (`kernels.exchange.payload`).

Ranks tell each other their counts first, one small record each. So the host knows how many rows come, a step has the
size of the tokens that travel, and more tokens than the buffer has room for travel in several steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import collective_step
from moe_runtime.deep_ep.counts import CountsExchange, count_words
from moe_runtime.deep_ep.sizes import MOST_TOP_K, normal_words
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.dispatcher.token_dispatcher import RoutingDispatcher, TokenDispatcher
from moe_runtime.kernels.exchange.landing import LandedTokens
from moe_runtime.kernels.exchange.payload import (
    WORD,
    PayloadLayout,
    UnpackedRows,
    pack_tokens,
    unpack_rows,
)
from moe_runtime.kernels.formats.number_formats import align, ceil_div
from moe_runtime.kernels.formats.reference_quantize import bf16_parts

LEAST_ROOM = 64
"""Tokens of a rank in the smallest step."""

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Step:
    """Tokens that travelled in one step.

    Attributes:
        start, end: of this rank's tokens.
        room: most tokens of a rank, for which the step was made.
        ranks: int64 `[T, W]`, rank `r` where the token goes there, else -1.
        weights: fp32 ones `[T, W]`.
        positions: int32 `[W * room, W]`, row of each landing slot, -1 for none.
    """

    start: int
    end: int
    room: int
    ranks: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor


class NormalHandle(tuple[torch.Tensor | None, ...]):
    """What a dispatch leaves for cached dispatches and for combines, as often as they are called.

    As a tuple it has DeepEP's six fields, None where they speak of its channels: `rank_prefix_matrix` int32 `[W, W]`
    (entry `[i, r]` counts the tokens of ranks 0 to `i` for rank `r`), None, None, `recv_src_idx` int32 `[R]` (the
    token at its rank), `is_token_in_rank` bool `[T, W]`, None. With `num_worst_tokens` the host knows no counts:
    `rank_prefix_matrix` is None too.

    Attributes:
        steps: the tokens of each step, and where their rows are.
        num_tokens: `T`.
        num_rows: `R`, rows that came, or `num_worst_tokens`.
        tokens_of_experts: tokens that came for each local expert; None with `num_worst_tokens`.
    """

    steps: list[_Step]
    num_tokens: int
    num_rows: int
    tokens_of_experts: list[int] | None


@dataclass(frozen=True)
class Received:
    """What a dispatch gives back.

    Attributes:
        x: `[R, H]` in bf16 or e4m3.
        scales: fp32 `[R, V]`; None for bf16.
        topk_idx: int64 `[R, K]`, local expert ids, -1 for experts of other ranks; None without top-k.
        topk_weights: fp32 `[R, K]`, 0 where the id is -1; None without top-k.
        handle: for combine.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: NormalHandle


class NormalExchange:
    """Dispatch and combine of normal mode for tokens of `hidden` elements. All calls are collective.

    Args:
        context: its own; nothing else is registered there.
        hidden: `H`, a multiple of 16.
        max_tokens: most tokens of a rank in one step.

    Attributes:
        num_sms: most SMs that a call takes; None is all.
    """

    def __init__(self, context: ExpertParallelContext, hidden: int, max_tokens: int) -> None:
        self.context, self.hidden, self.max_tokens = context, hidden, max_tokens
        self.num_sms: int | None = None
        self._dispatchers: dict[tuple[int, int, int | None], TokenDispatcher] = {}
        self._combiners: dict[tuple[int, int, int | None], RoutingDispatcher] = {}
        self._counts: dict[tuple[int, int | None], CountsExchange] = {}
        self._rank_numbers = torch.arange(context.world_size, dtype=torch.int64, device=context.device)
        self._ones = torch.ones(max_tokens, context.world_size, dtype=torch.float32, device=context.device)
        # The widest first: the memory for it suffices for all others.
        self._dispatcher(normal_words(hidden), max_tokens)
        context.allocate()

    def _dispatcher(self, words: int, room: int) -> TokenDispatcher:
        """The exchange of payload of `words`, in steps of at most `room` tokens of a rank."""
        key = words, room, self.num_sms
        if key not in self._dispatchers:
            self._dispatchers[key] = TokenDispatcher(
                self.context,
                hidden_size=words,
                mode="gathered",
                kernel_prefix="dispatch_",
                agreed=self.context.allocated,
                **self._sizes(self.hidden, room),
            )
        return self._dispatchers[key]

    def _combiner(self, output: int, room: int) -> RoutingDispatcher:
        """The exchange of routing alone, for combines of rows of `output` elements."""
        key = output, room, self.num_sms
        if key not in self._combiners:
            self._combiners[key] = RoutingDispatcher(self.context, **self._sizes(output, room))
        return self._combiners[key]

    def _sizes(self, output: int, room: int) -> dict[str, Any]:
        world = self.context.world_size
        return {
            "num_experts": world,
            "top_k": world,
            "max_tokens_per_rank": room,
            "num_sms": self.num_sms,
            "output_size": output,
        }

    def _room_for(self, tokens: int) -> int:
        """A step's size for `tokens` of the rank that has most: kernels look at each slot of it."""
        return min(self.max_tokens, max(LEAST_ROOM, 1 << (tokens - 1).bit_length() if tokens else 1))

    # Dispatch

    def dispatch(
        self,
        x: Tokens,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        num_worst_tokens: int,
    ) -> Received:
        """Send tokens, and receive those that all ranks send, by source rank and then by token.

        Waits for the host unless `num_worst_tokens` says how many rows to make room for.
        """
        num_tokens = is_token_in_rank.shape[0]
        table: torch.Tensor | None = None
        prefix: torch.Tensor | None = None
        of_experts: list[int] | None = None
        if num_worst_tokens:
            with collective_step(self.context):
                if num_tokens > self.max_tokens:
                    raise ValueError(
                        f"x: expected at most {self.max_tokens} tokens with num_worst_tokens (num_nvl_bytes has room "
                        f"for no more in one step), got {num_tokens}"
                    )
            steps, num_rows, room = 1, num_worst_tokens, self.max_tokens
        else:
            table, sums = self._exchange_counts(num_tokens, num_tokens_per_rank, num_tokens_per_expert)
            prefix = sums[:, 1 : 1 + self.context.world_size].clone(memory_format=torch.contiguous_format)
            # Small arrays, which numpy handles in a fraction of the time.
            counts = table.numpy()
            most = int(counts[:, 0].max())
            steps, room = max(1, ceil_div(most, self.max_tokens)), self._room_for(most)
            num_rows = int(counts[:, 1 + self.context.rank].sum())
            local = num_tokens_per_expert.numel() // self.context.world_size
            first = 1 + self.context.world_size + self.context.rank * local
            of_experts = counts[:, first : first + local].sum(axis=0).tolist()
        layout = self._layout(x, topk_idx)
        packed = self._packed(layout, x, topk_idx, topk_weights)
        out = UnpackedRows.allocate(layout, num_rows, self.context.device)
        done = self._steps(layout, packed, is_token_in_rank, steps, room, table, out, num_tokens_per_expert.numel())
        handle = NormalHandle((prefix, None, None, out.source_tokens, is_token_in_rank, None))
        handle.steps, handle.num_tokens, handle.num_rows = done, num_tokens, num_rows
        handle.tokens_of_experts = of_experts
        return Received(self._tokens(layout, out), out.scales, out.ids, out.weights, handle)

    def dispatch_again(self, x: Tokens, handle: NormalHandle) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send other tokens the way of `handle`; `(rows, scales)`. One step does not wait for the host."""
        layout = self._layout(x, None)
        packed = self._packed(layout, x, None, None)
        out = UnpackedRows.allocate(layout, handle.num_rows, self.context.device)
        for step in handle.steps:
            dispatcher = self._dispatcher(layout.words, step.room)
            arrived = dispatcher.dispatch(packed[step.start : step.end], step.ranks, step.weights)
            place = None
            if len(handle.steps) > 1:
                # Rows of this step to rows of all steps: the same slots, by their new positions and by the old.
                new, old = arrived.handle.positions.flatten(), step.positions.flatten()
                came = new >= 0
                place = torch.empty(int(came.sum()), dtype=torch.int64, device=old.device)
                place[new[came].to(torch.int64)] = old[came].to(torch.int64)
            self._unpack(layout, arrived, out, place, 0)
        return self._tokens(layout, out), out.scales

    def _steps(
        self,
        layout: PayloadLayout,
        packed: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        steps: int,
        room: int,
        table: torch.Tensor | None,
        out: UnpackedRows,
        num_experts: int,
    ) -> list[_Step]:
        """Send in `steps` steps of `room` tokens, and receive into `out`."""
        # Each rank is one expert of the exchange.
        ranks = torch.where(is_token_in_rank, self._rank_numbers, -1)
        weights = self._ones_for(ranks.shape[0])
        dispatcher = self._dispatcher(layout.words, room)
        if steps == 1:
            arrived = dispatcher.dispatch(packed, ranks, weights)
            if table is None:
                torch._assert_async((arrived.group_offsets[1] <= out.tokens.shape[0]).squeeze())
            self._unpack(layout, arrived, out, None, num_experts)
            return [_Step(0, packed.shape[0], room, ranks, weights, arrived.handle.positions)]
        assert table is not None
        done: list[_Step] = []
        filled = torch.zeros(len(table), dtype=torch.int64, device=ranks.device)
        for start, end in self._bounds(packed.shape[0], steps):
            arrived = dispatcher.dispatch(packed[start:end], ranks[start:end], weights[start:end])
            place = self._place(table, self._sources(arrived), filled)
            self._unpack(layout, arrived, out, place, num_experts)
            out.source_tokens[place] += len(done) * self.max_tokens
            positions = arrived.handle.positions
            if place.numel():
                moved = place[positions.clamp(min=0).to(torch.int64)].to(torch.int32)
                positions = torch.where(positions >= 0, moved, -1)
            done.append(_Step(start, end, room, ranks[start:end], weights[start:end], positions))
        return done

    def _bounds(self, num_tokens: int, steps: int) -> list[tuple[int, int]]:
        """The tokens of each step; a rank with few tokens has none in the last ones."""
        most = self.max_tokens
        return [(min(i * most, num_tokens), min((i + 1) * most, num_tokens)) for i in range(steps)]

    def _exchange_counts(
        self, num_tokens: int, per_rank: torch.Tensor, per_expert: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `CountsExchange` gives of `[W, 1 + W + E]`: of a rank its tokens, those by rank, and by expert."""
        key = 1 + per_rank.numel() + per_expert.numel(), self.num_sms
        if key not in self._counts:
            self._counts[key] = CountsExchange(self._dispatcher(count_words(key[0]), 1), key[0])
        return self._counts[key].exchange(num_tokens, (per_rank, per_expert))

    def _ones_for(self, num_tokens: int) -> torch.Tensor:
        """fp32 ones `[T, W]`, which nobody writes."""
        if num_tokens > self._ones.shape[0]:
            self._ones = self._ones.new_ones(num_tokens, self._ones.shape[1])
        return self._ones[:num_tokens]

    def _place(self, table: torch.Tensor, sources: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        """int64 `[R]`: for each row of this step, sorted by source, its row among all steps; adds them to `filled`."""
        totals = table[:, 1 + self.context.rank].to(sources.device)
        counts = torch.bincount(sources, minlength=len(table))
        first = totals.cumsum(0) - totals + filled - (counts.cumsum(0) - counts)
        filled += counts
        return torch.arange(sources.numel(), device=sources.device) + first[sources]

    # Payload

    def _layout(self, x: Tokens, topk_idx: torch.Tensor | None) -> PayloadLayout:
        top_k = 0 if topk_idx is None else topk_idx.shape[1]
        if top_k > MOST_TOP_K:
            raise ValueError(f"topk_idx: expected at most {MOST_TOP_K} experts of a token, got {top_k}")
        if isinstance(x, tuple):
            return PayloadLayout(self.hidden, x[1].shape[1], top_k)
        return PayloadLayout(WORD * self.hidden, 0, top_k)

    def _packed(
        self, layout: PayloadLayout, x: Tokens, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """bf16 `[T, words]`, of which only the bits count."""
        quants, scales = x if isinstance(x, tuple) else (x, None)
        how = {"engine": self.context.engine, "num_sms": self.num_sms}
        return pack_tokens(layout, quants, scales, topk_idx, topk_weights, **how)  # type: ignore[arg-type]

    def _tokens(self, layout: PayloadLayout, out: UnpackedRows) -> torch.Tensor:
        return out.tokens.view(torch.float8_e4m3fn if layout.num_scales else torch.bfloat16)

    def _unpack(
        self,
        layout: PayloadLayout,
        arrived: DispatchedTokens,
        out: UnpackedRows,
        place: torch.Tensor | None,
        num_experts: int,
    ) -> None:
        local = num_experts // self.context.world_size
        unpack_rows(
            layout,
            self._landed(arrived),
            out,
            place,
            first_expert=local * self.context.rank,
            num_experts=local,
            engine=self.context.engine,
            num_sms=self.num_sms,
        )

    def _landed(self, arrived: DispatchedTokens) -> LandedTokens:
        handle = arrived.handle
        assert arrived.row_index is not None
        found = arrived.row_index, handle.positions, arrived.group_offsets, handle.epoch
        return LandedTokens.of(self.context, handle.geometry, *found)

    def _sources(self, arrived: DispatchedTokens) -> torch.Tensor:
        """int64 `[R]`, the source rank of each row that came; waits for the host."""
        landed = self._landed(arrived)
        index = landed.row_index[: int(landed.group_offsets[1])].to(torch.int64)
        return (index - (landed.epoch & 1) * landed.first_row) // self.max_tokens

    # Combine

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """bf16 `[T, H]`, the unweighted sum of each token's rows, `bias` first; fp32 `[T, K]`, of its weights."""
        sums, weights = [], []
        for step in handle.steps:
            combiner = self._combiner(self.hidden, step.room)
            shared = None if bias is None else bias[step.start : step.end]
            renewed = combiner.send_routing(step.ranks, step.weights, step.positions, x.shape[0])
            sums.append(combiner.combine(x, renewed, shared=shared))
            if topk_weights is not None:
                weights.append(self._combine_weights(topk_weights, step))
        y = sums[0] if len(sums) == 1 else torch.cat(sums)
        return y, (torch.cat(weights) if weights else None)

    def _combine_weights(self, topk_weights: torch.Tensor, step: _Step) -> torch.Tensor:
        """fp32 `[T, K]`: the weights of a token's rows on all ranks, summed in fp32, ranks ascending.

        A weight travels as three bf16 values whose sum it is. The partial results are read where they landed.
        """
        top_k = topk_weights.shape[1]
        width = align(3 * top_k, 16)
        combiner, context = self._combiner(width, step.room), self.context
        parts = torch.zeros(topk_weights.shape[0], width, dtype=torch.bfloat16, device=topk_weights.device)
        parts[:, : 3 * top_k] = bf16_parts(topk_weights).transpose(0, 1).flatten(1)
        renewed = combiner.send_routing(step.ranks, step.weights, step.positions, parts.shape[0])
        combiner.combine(parts, renewed)
        geometry, num_tokens = renewed.geometry, step.end - step.start
        half = context.half_bytes["combine"]
        flat = context.heap.tensor("combine")
        shape = (geometry.max_tokens, geometry.parts, geometry.partial_bytes // WORD)
        num_bytes = geometry.max_tokens * geometry.parts * geometry.partial_bytes
        halves = [flat[i * half : i * half + num_bytes].view(torch.bfloat16).view(shape) for i in (0, 1)]
        odd = (renewed.epoch & 1).to(torch.bool)
        landed = torch.where(odd, halves[1][:num_tokens, :, :width], halves[0][:num_tokens, :, :width]).float()
        thirds = landed[:, :, : 3 * top_k].view(num_tokens, geometry.parts, 3, top_k)
        values = thirds[:, :, 0] + thirds[:, :, 1] + thirds[:, :, 2]
        total = torch.zeros(num_tokens, top_k, dtype=torch.float32, device=topk_weights.device)
        for part in range(geometry.parts):
            total = torch.where(renewed.num_parts[:, None] > part, total + values[:, part], total)
        return total
