"""Normal mode over a `TokenDispatcher` whose experts are the ranks: a token goes once to each rank that wants it.

What travels with a token is payload, of which the exchange copies the bits (`kernels.exchange.payload`). Ranks tell
each other their counts first, so that the host knows how many rows come. Tokens do not wait for the host.

Where kernels store to peers (`direct`), tokens follow as soon as their rank has counted them. Elsewhere, and on CPUs,
counts are one small record of each rank, and as many tokens follow at once as the dispatch before had room for, which
is equal on all ranks. If a rank has more, they travel in further steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import collective_step
from moe_runtime.deep_ep.counts import CountsExchange, count_words
from moe_runtime.deep_ep.direct import has_kernels
from moe_runtime.deep_ep.direct_dispatch import DirectDispatch
from moe_runtime.deep_ep.normal_handle import (
    Form,
    NormalHandle,
    Received,
    Step,
    TokenLayout,
    Tokens,
    check_one_step,
    payload_layout,
    ranks_by_last_entry,
    room_for,
)
from moe_runtime.deep_ep.sizes import normal_words
from moe_runtime.dispatcher.handle import DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import RoutingDispatcher, TokenDispatcher
from moe_runtime.kernels.exchange.landing import LandedTokens
from moe_runtime.kernels.exchange.layout import dispatch_layout
from moe_runtime.kernels.exchange.payload import (
    WORD,
    ExpandedRows,
    PayloadLayout,
    UnpackedRows,
    allocate_scales,
    expand_rows,
    pack_tokens,
    unpack_rows,
)
from moe_runtime.kernels.exchange.plan import exchange_engine
from moe_runtime.kernels.formats.number_formats import align
from moe_runtime.kernels.formats.reference_quantize import bf16_parts, cat_bits

WITHOUT_IDS = Form(num_experts=0)


def _check_room_of(count: torch.Tensor, room: int) -> None:
    """End in an error where `count` rows come, a number on the device, and there is room for fewer.

    On a GPU the host does not wait for it: an assertion of the device fails.
    """
    if count.device.type != "cpu":
        torch._assert_async((count <= room).squeeze())
    elif int(count) > room:
        raise ValueError(f"num_worst_tokens: expected at least {int(count)}, the rows that come, got {room}")


class NormalExchange:
    """Dispatch and combine of normal mode for tokens of `hidden` elements. All calls are collective.

    Args:
        context: its own; nothing else is registered there.
        hidden: `H`, a multiple of 16.
        max_tokens: most tokens of a rank in one step.
        direct: whether kernels store to peers; None where they can.

    Attributes:
        num_sms: most SMs that a call takes; None is all.
    """

    def __init__(
        self, context: ExpertParallelContext, hidden: int, max_tokens: int, *, direct: bool | None = None
    ) -> None:
        self.context, self.hidden, self.max_tokens = context, hidden, max_tokens
        self.num_sms: int | None = None
        self._guard = collective_step(context)
        self._dispatchers: dict[tuple[int, int, int | None], TokenDispatcher] = {}
        self._combiners: dict[tuple[int, ...], RoutingDispatcher] = {}
        self._counts: dict[tuple[int, int | None], CountsExchange] = {}
        self._rank_numbers = torch.arange(context.world_size, dtype=torch.int64, device=context.device)
        self._agreed_room: int | None = None  # From the counts of the last dispatch, equal on all ranks.
        self._ones = torch.ones(max_tokens, context.world_size, dtype=torch.float32, device=context.device)
        self._direct: DirectDispatch | None = None
        if has_kernels(context) if direct is None else direct:
            self._direct = DirectDispatch(context, hidden, max_tokens)
        # The widest first: the memory for it suffices for all others.
        self._dispatcher(normal_words(hidden), max_tokens)
        context.allocate()
        if self._direct is not None:
            self._direct.kernels.bind()

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

    def _combiner(self, output: int, step: Step) -> RoutingDispatcher:
        """The exchange of routing alone, for combines of rows of `output` elements that came in `step`."""
        key = output, step.room, self.num_sms or 0, step.num_experts or 0, step.entries.shape[1]
        if key not in self._combiners:
            # Entries are in the order in which they are to be added.
            sizes = self._sizes(output, step.room) | {"sums_by_entry": True}
            if step.num_experts is not None:
                sizes |= {"num_experts": step.num_experts, "top_k": step.entries.shape[1], "accepts_repeats": True}
            self._combiners[key] = RoutingDispatcher(self.context, **sizes)
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

    # Dispatch

    def dispatch(
        self,
        x: Tokens,
        token_layout: TokenLayout | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        form: Form,
    ) -> Received:
        """Send tokens, and receive those that all ranks send, by source rank and then by token.

        Waits for the host unless `form.num_worst_tokens` says how many rows to make room for.

        Args:
            x, topk_idx, topk_weights: as of `Buffer.dispatch`; with ids, weights of None are zeros.
            token_layout: of `Buffer.get_dispatch_layout`; None for that of `topk_idx`.
        """
        if self._direct is not None and self._direct.kernels.takes(form.num_experts):
            self._direct.num_sms = self.num_sms
            return self._direct.dispatch(x, token_layout, topk_idx, topk_weights, form)
        num_experts, max_tokens = form.num_experts, form.max_tokens
        if token_layout is None:
            assert topk_idx is not None
            world = self.context.world_size
            engine, _ = exchange_engine(self.context.engine, self.context.device)
            per_rank, per_expert, in_rank = dispatch_layout(topk_idx, num_experts, world, engine=engine)
            token_layout = in_rank, per_rank, per_expert
        if topk_idx is not None and topk_weights is None:
            topk_weights = torch.zeros(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert = token_layout
        num_tokens = is_token_in_rank.shape[0]
        layout = payload_layout(self.hidden, x, topk_idx)
        room = self._agreed_room if max_tokens is None else room_for(max_tokens, self.max_tokens)
        counts: CountsExchange | None = None
        if form.num_worst_tokens:
            with self._guard:
                check_one_step(num_tokens, self.max_tokens)
            room = self.max_tokens if max_tokens is None else room
        else:
            counts = self._counts_of(num_tokens_per_rank, num_tokens_per_expert)
            counts.start(num_tokens, (num_tokens_per_rank, num_tokens_per_expert))
        if form.sums_by_entry:
            assert topk_idx is not None
            entries = ranks_by_last_entry(topk_idx, num_experts, self.context.world_size)
        else:
            entries = torch.where(is_token_in_rank, self._rank_numbers, -1)
        sent = self._packed(layout, x, topk_idx, topk_weights), entries, self._ones_for(num_tokens)
        first = None if room is None else self._send(layout, sent, 0, room)
        prefix: torch.Tensor | None = None
        table: torch.Tensor | None = None
        of_experts: list[int] | None = None
        num_rows, most = form.num_worst_tokens, 0
        if counts is not None:
            table, sums = counts.finish()
            prefix = sums[:, 1 : 1 + self.context.world_size].clone(memory_format=torch.contiguous_format)
            # Small arrays, which numpy handles in a fraction of the time.
            numbers = table.numpy()
            most = int(numbers[:, 0].max())
            self._agreed_room = room_for(most, self.max_tokens)
            num_rows = int(numbers[:, 1 + self.context.rank].sum())
            local = num_experts // self.context.world_size
            at = 1 + self.context.world_size + self.context.rank * local
            of_experts = numbers[:, at : at + local].sum(axis=0).tolist()
        if first is None:
            assert self._agreed_room is not None
            first = self._send(layout, sent, 0, self._agreed_room)
        out = UnpackedRows.allocate(layout, num_rows, self.context.device, not form.to_expand, form.scales_by_column)
        step, arrived = first
        if most <= step.room:
            if table is None:
                _check_room_of(arrived.group_offsets[1], out.source_tokens.shape[0])
            steps, landed = [step], self._unpack(layout, arrived, out, None, num_experts)
        else:
            assert table is not None
            steps, landed = self._steps(layout, sent, first, most, table, out, num_experts)
        handle = NormalHandle((prefix, None, None, out.source_tokens, is_token_in_rank, None))
        handle.num_ranks, handle.num_tokens, handle.num_rows = self.context.world_size, num_tokens, num_rows
        handle.steps, handle.room, handle.tokens_of_experts = steps, max(step.room for step in steps), of_experts
        kept_ids = out.ids.clone() if form.keeps_ids and out.ids is not None else None
        return Received.of(layout, out, handle, landed, kept_ids)

    def dispatch_again(
        self,
        x: Tokens,
        handle: NormalHandle,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        form: Form = WITHOUT_IDS,
    ) -> Received:
        """Send other tokens the way of `handle`, with other weights if given. One step does not wait for the host.

        Arguments are as of `dispatch`.
        """
        if handle.route is not None and self._direct is not None:
            self._direct.num_sms = self.num_sms
            return self._direct.dispatch_again(x, handle, topk_idx, topk_weights, form)
        self._check_room(handle)
        layout = payload_layout(self.hidden, x, topk_idx)
        packed = self._packed(layout, x, topk_idx, topk_weights)
        out = UnpackedRows.allocate(
            layout, handle.num_rows, self.context.device, not form.to_expand, form.scales_by_column
        )
        landed: LandedTokens | None = None
        for step in handle.steps:
            dispatcher = self._dispatcher(layout.words, step.room)
            arrived = dispatcher.dispatch(packed[step.start : step.end], step.entries, step.weights)
            place = None
            if len(handle.steps) > 1:
                # Rows of this step to rows of all steps: the same slots, by their new positions and by the old.
                new, old = arrived.handle.positions.flatten(), step.positions.flatten()
                came = new >= 0
                place = torch.empty(int(came.sum()), dtype=torch.int64, device=old.device)
                place[new[came].to(torch.int64)] = old[came].to(torch.int64)
            landed = self._unpack(layout, arrived, out, place, form.num_experts)
        return Received.of(layout, out, handle, landed)

    def _check_room(self, handle: NormalHandle) -> None:
        """Raise `ValueError` for a handle of an exchange whose steps have room for more tokens."""
        if handle.room > self.max_tokens:
            raise ValueError(f"handle: expected steps of {self.max_tokens} tokens at most, got {handle.room}")

    def _send(
        self, layout: PayloadLayout, sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor], start: int, room: int
    ) -> tuple[Step, DispatchedTokens]:
        """A step of the `room` tokens from `start` on, of which a rank may have fewer; its positions are of this step.

        `sent` are payload, entries and weights of all tokens.
        """
        num_tokens = sent[0].shape[0]
        place = slice(min(start, num_tokens), min(start + room, num_tokens))
        packed, ranks, weights = (each[place] for each in sent)
        arrived = self._dispatcher(layout.words, room).dispatch(packed, ranks, weights)
        return Step(place.start, place.stop, room, ranks, weights, arrived.handle.positions), arrived

    def _steps(
        self,
        layout: PayloadLayout,
        sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        first: tuple[Step, DispatchedTokens],
        most: int,
        table: torch.Tensor,
        out: UnpackedRows,
        num_experts: int,
    ) -> tuple[list[Step], LandedTokens]:
        """Receive the `first` step, and send and receive more, up to `most` tokens of a rank; what landed last."""
        done: list[Step] = []
        filled = torch.zeros(len(table), dtype=torch.int64, device=out.source_tokens.device)
        start, (step, arrived) = 0, first
        while True:
            place = self._place(table, self._sources(arrived, step.room), filled)
            landed = self._unpack(layout, arrived, out, place, num_experts)
            out.source_tokens[place] += start
            positions = step.positions
            if place.numel():
                moved = place[positions.clamp(min=0).to(torch.int64)].to(torch.int32)
                positions = torch.where(positions >= 0, moved, -1)
            done.append(replace(step, positions=positions))
            start += step.room
            if start >= most:
                return done, landed
            step, arrived = self._send(layout, sent, start, room_for(most - start, self.max_tokens))

    def _counts_of(self, per_rank: torch.Tensor, per_expert: torch.Tensor) -> CountsExchange:
        """For counts `[W, 1 + W + E]`: of a rank its tokens, those by rank, and by expert."""
        key = 1 + per_rank.numel() + per_expert.numel(), self.num_sms
        if key not in self._counts:
            self._counts[key] = CountsExchange(self._dispatcher(count_words(key[0]), 1), key[0])
        return self._counts[key]

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

    def _packed(
        self, layout: PayloadLayout, x: Tokens, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """bf16 `[T, words]`, of which only the bits count."""
        quants, scales = x if isinstance(x, tuple) else (x, None)
        how = {"engine": self.context.engine, "num_sms": self.num_sms}
        return pack_tokens(layout, quants, scales, topk_idx, topk_weights, **how)  # type: ignore[arg-type]

    def _unpack(
        self,
        layout: PayloadLayout,
        arrived: DispatchedTokens,
        out: UnpackedRows,
        place: torch.Tensor | None,
        num_experts: int,
    ) -> LandedTokens:
        local, landed = num_experts // self.context.world_size, self._landed(arrived)
        unpack_rows(
            layout,
            landed,
            out,
            place,
            first_expert=local * self.context.rank,
            num_experts=local,
            engine=self.context.engine,
            num_sms=self.num_sms,
        )
        return landed

    def _landed(self, arrived: DispatchedTokens) -> LandedTokens:
        handle = arrived.handle
        assert arrived.row_index is not None
        found = arrived.row_index, handle.positions, arrived.group_offsets, handle.epoch
        return LandedTokens.of(self.context, handle.geometry, *found)

    def _sources(self, arrived: DispatchedTokens, room: int) -> torch.Tensor:
        """int64 `[R]`, the source rank of each row that came in a step of `room` tokens; waits for the host."""
        landed = self._landed(arrived)
        index = landed.row_index[: int(landed.group_offsets[1])].to(torch.int64)
        return (index - (landed.epoch & 1) * landed.first_row) // room

    # Expanded rows

    def expand(
        self, got: Received, slots: torch.Tensor, num_rows: int, *, zero_padding: bool, scales_by_column: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """A row for each expert of each row that `got` has left where it landed; before the next dispatch.

        Args:
            got: of a dispatch with `to_expand`.
            slots: int32 `[R, K]`, rows of the result, -1 for none.
            num_rows: `N`.
            zero_padding: whether rows that `slots` does not name are zeroed; else they hold anything.
            scales_by_column: as of `allocate_scales`.

        Returns:
            `[N, H]` in bf16 or e4m3; fp32 `[N, V]`, or None for bf16; fp32 `[N]` weights, 0 in rows that `slots` does
            not name, or None where `got` has none.
        """
        assert got.landed is not None
        device, layout = self.context.device, got.layout
        tokens = torch.empty(num_rows, layout.token_bytes, dtype=torch.uint8, device=device)
        scales = allocate_scales(layout, num_rows, device, scales_by_column)
        if zero_padding:
            tokens.zero_()
            if scales is not None:
                scales.zero_()
        weights = None if got.topk_weights is None else torch.zeros(num_rows, dtype=torch.float32, device=device)
        out = ExpandedRows(tokens, scales, weights)
        how = {"engine": self.context.engine, "num_sms": self.num_sms}
        expand_rows(layout, got.landed, slots, got.topk_weights, out, **how)  # type: ignore[arg-type]
        return tokens.view(torch.float8_e4m3fn if layout.num_scales else torch.bfloat16), scales, weights

    def meet(self) -> None:
        """Wait, on the device, until every rank has come to this call."""
        dispatcher = self._dispatcher(16, 1)
        nobody = self._rank_numbers.new_empty(0, self.context.world_size)
        no_tokens = torch.empty(0, 16, dtype=torch.bfloat16, device=self.context.device)
        dispatcher.dispatch(no_tokens, nobody, self._ones[:0])

    # Combine

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        biases: tuple[torch.Tensor, ...] = (),
        topk_weights: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the rows of each token, unweighted, in fp32: the `biases`, then ranks ascending, or by `sums_by_entry` of
        the dispatch.

        Args:
            x: bf16 `[R, H]`, contiguous.
            handle: of the dispatch; its rows are not expanded.
            biases: bf16 `[T, H]`, two at most.
            topk_weights: fp32 `[R, K]`, summed likewise.
            ids: int64 `[R, K]`: weights beside a negative id count as 0; or None.

        Returns bf16 `[T, H]`, and fp32 `[T, K]` or None.
        """
        if handle.route is not None and self._direct is not None:
            self._direct.num_sms = self.num_sms
            return self._direct.combine(x, handle, biases, topk_weights, ids)
        self._check_room(handle)
        # As a kernel would, which knows no gradients.
        x, biases = x.detach(), tuple(bias.detach() for bias in biases)
        topk_weights = None if topk_weights is None else topk_weights.detach()
        y = self.combine_steps(x, handle.steps, biases)
        if topk_weights is not None and ids is not None:
            topk_weights = torch.where(ids >= 0, topk_weights, 0.0)
        return y, None if topk_weights is None else self.combine_weights(topk_weights, handle)

    def combine_steps(self, x: torch.Tensor, steps: list[Step], biases: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        """bf16 `[T, H]`, the unweighted sum in fp32 of the `biases` and of each token's rows, by dispatchers."""
        sums = []
        for step in steps:
            added = [bias[step.start : step.end].contiguous() for bias in biases]
            # The exchange adds one. Two are summed in fp32 too, with the partial results where they landed.
            shared = added[0] if len(added) == 1 else None
            combiner = self._combiner(self.hidden, step)
            renewed = combiner.send_routing(step.entries, step.weights, step.positions, x.shape[0])
            y = combiner.combine(x, renewed, shared=shared)
            if len(added) == 2:
                y = self._add_parts(added[0].float() + added[1], renewed).to(torch.bfloat16)
            sums.append(y)
        return cat_bits(sums)

    def combine_once(self, x: torch.Tensor, steps: list[Step], biases: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """`combine` of expanded rows of which each travels by itself: `K` exchanges, and one rounding, at home.

        The sum is in fp32: the `biases`, then the rows by entry.
        """
        (step,) = steps
        total = torch.zeros(step.entries.shape[0], self.hidden, dtype=torch.float32, device=x.device)
        for bias in biases:
            total += bias
        for k in range(step.entries.shape[1]):
            entry = slice(k, k + 1)
            one = replace(
                step,
                entries=step.entries[:, entry],
                weights=step.weights[:, entry],
                positions=step.positions[:, entry].contiguous(),
            )
            total += self.combine_steps(x, [one])
        return total.to(torch.bfloat16)

    def combine_weights(self, topk_weights: torch.Tensor, handle: NormalHandle) -> torch.Tensor:
        """fp32 `[T, K]`, the sums of the weights `[R, K]` of each token's rows."""
        parts = [self._combine_weights(topk_weights, step) for step in handle.steps]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _combine_weights(self, topk_weights: torch.Tensor, step: Step) -> torch.Tensor:
        """fp32 `[T, K]`: the weights of a token's rows on all ranks, summed in fp32 in the order of its entries.

        A weight travels as three bf16 values whose sum it is, from some 2^-110 on; smaller ones lose bits. The partial
        results are read where they landed.
        """
        (num_rows, top_k), device = topk_weights.shape, topk_weights.device
        width = align(3 * top_k, 16)
        rows = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=device)
        rows[:, : 3 * top_k] = bf16_parts(topk_weights).transpose(0, 1).flatten(1)
        combiner = self._combiner(width, step)
        renewed = combiner.send_routing(step.entries, step.weights, step.positions, num_rows)
        combiner.combine(rows, renewed)
        zeros = torch.zeros(step.end - step.start, top_k, dtype=torch.float32, device=device)
        return self._add_parts(zeros, renewed, lambda part: part[:, : 3 * top_k].unflatten(1, (3, top_k)).sum(dim=1))

    def _add_parts(
        self,
        total: torch.Tensor,
        renewed: DispatchHandle,
        values: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
    ) -> torch.Tensor:
        """fp32 `total` `[T, ...]` and the partial results of the combine that has just ended, in the order of entries.

        `values` gives what is added of those of one rank, fp32 `[T, elements]`.
        """
        geometry, context, num_tokens = renewed.geometry, self.context, total.shape[0]
        half, flat = context.half_bytes["combine"], context.heap.tensor("combine")
        shape = geometry.max_tokens, geometry.parts, geometry.partial_bytes // WORD
        num_bytes = geometry.max_tokens * geometry.parts * geometry.partial_bytes
        even, odd = (flat[i * half : i * half + num_bytes].view(torch.bfloat16).view(shape) for i in (0, 1))
        is_odd = (renewed.epoch & 1).to(torch.bool)
        for part in range(geometry.parts):
            landed = torch.where(is_odd, odd[:num_tokens, part], even[:num_tokens, part])[:, : geometry.output_hidden]
            there = renewed.num_parts[:, None] > part
            total = torch.where(there, total + values(landed.float()), total)
        return total
