"""The calls of normal mode where kernels in CUDA C++ store to peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import collective_step
from moe_runtime.context.threads import by_one_thread
from moe_runtime.deep_ep.direct import DirectExchange
from moe_runtime.deep_ep.normal_handle import (
    Form,
    NormalHandle,
    Received,
    Step,
    TokenLayout,
    Tokens,
    check_one_step,
    payload_layout,
    room_for,
)
from moe_runtime.kernels.exchange.landing import LandedRows
from moe_runtime.kernels.exchange.payload import PayloadLayout, UnpackedRows
from moe_runtime.kernels.exchange.row_sums import RowsOfRank
from moe_runtime.kernels.exchange.rows import Route, RowKernels, RowsToCome, TokensOfRank

MARGIN = 8
"""Where the host would wait for counts, rows are received before: as many as the last dispatch makes likely, and one in
MARGIN more."""
MOST_SPARE = 1024
"""Rows that may be left over beside as many as come. Results keep the memory of all then."""


class DirectDispatch:
    """Dispatch and combine of tokens of `hidden` elements. All calls are collective.

    Args:
        context: that is not allocated yet.
        hidden: `H`.
        max_tokens: most tokens of a rank in one step.

    Attributes:
        kernels: of counts, rows and sums.
        num_sms: most SMs that a call takes; None is all.
    """

    def __init__(self, context: ExpertParallelContext, hidden: int, max_tokens: int) -> None:
        self.context, self.hidden, self.max_tokens = context, hidden, max_tokens
        self.kernels = DirectExchange(context, hidden, max_tokens)
        self.num_sms: int | None = None
        self._rows_per_token = 0.0  # of the last dispatch that made the host wait
        self._guard = collective_step(context)

    @by_one_thread
    def dispatch(
        self,
        x: Tokens,
        token_layout: TokenLayout | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        form: Form,
    ) -> Received:
        """See `NormalExchange.dispatch`."""
        return self._finish(self.start(x, token_layout, topk_idx, topk_weights, form))

    def start(
        self,
        x: Tokens,
        token_layout: TokenLayout | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        form: Form,
    ) -> StartedDispatch:
        """The part of a dispatch that does not wait for counts; arguments are as of `NormalExchange.dispatch`.

        Rows are received if it is known how many there are to be, or, before the counts are there, how many are likely.
        """
        layout = payload_layout(self.hidden, x, topk_idx)
        quants, scales = _aligned_tokens(x)
        if not form.num_worst_tokens:
            self.kernels.check_can_wait()
        with self._guard:
            if form.num_worst_tokens:
                check_one_step(quants.shape[0], self.max_tokens)
            positions, room = None, 0
            if form.to_expand:
                assert form.max_tokens is not None
                room = room_for(form.max_tokens, self.max_tokens)
                shape = self.context.world_size * room, self.context.world_size
                with torch.inference_mode(False):
                    positions = torch.full(shape, -1, dtype=torch.int32, device=self.context.device)
            in_rank, per_expert = None, None
            if token_layout is None:
                assert topk_idx is not None
                routing = topk_idx
            else:
                in_rank = token_layout[0]
                routing, per_expert = in_rank.contiguous(), token_layout[2].contiguous()
            route = self.kernels.count(routing, per_expert, form.num_experts, form.num_worst_tokens, form.to_expand)
            # The GPU counts meanwhile.
            tokens = TokensOfRank(quants, scales, topk_idx, topk_weights)
            copiers = self.kernels.row_kernels(layout, self.num_sms, form.to_expand)
            self.kernels.send(copiers, tokens, route, 0, after_counts=True)
            begun = StartedDispatch(self, copiers, layout, tokens, route, positions, room, in_rank, form)
            if form.num_worst_tokens:
                begun.rows = _make_room(begun, form.num_worst_tokens)
            elif not self.kernels.has_counts() and (likely := self._likely_rows(begun)):
                try:
                    begun.rows = _make_room(begun, likely)
                except torch.OutOfMemoryError:
                    begun.rows = None  # There may be memory for those that come.
            if begun.rows is not None:
                self._receive(begun, begun.rows, 0)
        return begun

    def _likely_rows(self, begun: StartedDispatch) -> int:
        """How many to receive before the host knows their number; 0 where that does not pay.

        What receives them reads what has landed and nothing more, so it can be done again with more rows. They are at
        most what comes if all ranks have as many tokens, and an eighth more.
        """
        # Of a rank that brought few tokens, the rows were of others: their number follows from no ratio.
        likely = int(begun.route.num_tokens * min(self._rows_per_token, self.context.world_size))
        if not likely or begun.form.to_expand or begun.form.scales_by_column:
            return 0
        return likely + likely // MARGIN + 1

    def _finish(self, begun: StartedDispatch) -> Received:
        """The rest of it: `StartedDispatch.finish`."""
        kernels, route, form, rows = self.kernels, begun.route, begun.form, begun.rows
        num_tokens = begun.route.num_tokens
        of_experts: list[int] | None = None
        most = most_sent = self.max_tokens
        num_rows = form.num_worst_tokens
        if not num_rows:
            counts = kernels.await_counts(route)
            most, most_sent, num_rows = counts.most_tokens, counts.most_sent, counts.num_rows
            of_experts = counts.of_experts
            if num_tokens:
                self._rows_per_token = num_rows / num_tokens
            window = self.max_tokens
            if rows is not None and _serve(rows, num_rows):
                rows.keep_first(num_rows)
            else:
                rows, window = None, 0
            if rows is None or window < most_sent:
                with self._guard:
                    if rows is None:
                        rows = _make_room(begun, num_rows)
                    for first in range(window, max(1, most_sent), self.max_tokens):
                        self._receive(begun, rows, first)
        assert rows is not None
        out = rows.out
        handle = NormalHandle((route.prefix, None, None, out.source_tokens, begun.is_token_in_rank, None))
        handle.steps = []
        landed = None
        if begun.positions is not None:
            entries = route.entries
            assert entries is not None and rows.row_index is not None
            landed = LandedRows(kernels.records(begun.copiers.geometry), rows.row_index, route.offsets)
            ones = torch.ones(entries.shape, dtype=torch.float32, device=self.context.device)
            handle.steps.append(Step(0, num_tokens, begun.room, entries, ones, begun.positions))
        handle.num_tokens, handle.num_rows, handle.num_ranks = num_tokens, num_rows, self.context.world_size
        handle.tokens_of_experts, handle.route = of_experts, route
        handle.room = room_for(most if form.max_tokens is None else form.max_tokens, self.max_tokens)
        handle.most_tokens, handle.most_sent = most, most_sent
        return Received(out.tokens, out.scales, out.ids, out.weights, handle, begun.layout, landed, rows.also_ids)

    def _receive(self, begun: StartedDispatch, rows: RowsToCome, window: int, is_first: bool = True) -> None:
        """Receive the step of the tokens from number `window` on, after it has been sent unless it is the first.

        `is_first` is as of `RowKernels.receive`.
        """
        kernels, copiers, route = self.kernels, begun.copiers, begun.route
        if window:
            kernels.send(copiers, begun.tokens, route, window, after_counts=False)
        kernels.receive(copiers, route, rows, is_first, begun.form.num_experts // self.context.world_size)

    @by_one_thread
    def dispatch_again(
        self,
        x: Tokens,
        handle: NormalHandle,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        form: Form,
    ) -> Received:
        """See `NormalExchange.dispatch_again`."""
        route, source_tokens = handle.route, handle[3]
        assert route is not None and source_tokens is not None
        layout = payload_layout(self.hidden, x, topk_idx)
        tokens = TokensOfRank(*_aligned_tokens(x), topk_idx, topk_weights)
        with self._guard:
            copiers = self.kernels.row_kernels(layout, self.num_sms, form.to_expand)
            self.kernels.send(copiers, tokens, route, 0, after_counts=False)
            begun = StartedDispatch(self, copiers, layout, tokens, route, None, 0, None, form)
            rows = _make_room(begun, handle.num_rows, source_tokens)
            for window in range(0, max(1, handle.most_sent), self.max_tokens):
                self._receive(begun, rows, window, is_first=False)
        landed = None
        if rows.row_index is not None:
            landed = LandedRows(self.kernels.records(copiers.geometry), rows.row_index, route.offsets)
        return Received.of(layout, rows.out, handle, landed)

    @by_one_thread
    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        biases: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor | None,
        ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `NormalExchange.combine`."""
        route, source_tokens = handle.route, handle[3]
        assert route is not None and source_tokens is not None
        with self._guard:
            rows = RowsOfRank(_aligned(x), topk_weights, ids)
            if biases:
                biases = tuple(_aligned(bias.contiguous()) for bias in biases)
            how = handle.most_tokens, self.num_sms, handle.home_ids
            return self.kernels.combine(rows, route, source_tokens, biases, *how)


@dataclass(slots=True)
class StartedDispatch:
    """A direct dispatch whose tokens are on their way. It keeps what kernels read.

    Attributes:
        exchange: of it.
        copiers: the kernels that copy its rows.
        layout, tokens, route: of what travels.
        positions: of its only step, where rows are to be expanded.
        room: of `positions`.
        is_token_in_rank: as the caller gave it.
        form: of it.
        rows: that are received already, of the first step.
    """

    exchange: DirectDispatch
    copiers: RowKernels
    layout: PayloadLayout
    tokens: TokensOfRank
    route: Route
    positions: torch.Tensor | None
    room: int
    is_token_in_rank: torch.Tensor | None
    form: Form
    rows: RowsToCome | None = None

    def finish(self) -> Received:
        """Wait for the counts, if the host is to know them, and receive rows."""
        return self.exchange._finish(self)


def _make_room(begun: StartedDispatch, num_rows: int, source_tokens: torch.Tensor | None = None) -> RowsToCome:
    """Memory for the rows of a dispatch; `source_tokens` as of `UnpackedRows.allocate`."""
    layout, form, device = begun.layout, begun.form, begun.exchange.context.device
    out = UnpackedRows.allocate(layout, num_rows, device, not form.to_expand, form.scales_by_column, source_tokens)
    also_ids = torch.empty_like(out.ids) if form.keeps_ids and out.ids is not None else None
    row_index = torch.empty_like(out.source_tokens) if form.to_expand else None
    return RowsToCome(out, also_ids, row_index, begun.positions, begun.room)


def _serve(rows: RowsToCome, num_rows: int) -> bool:
    """Whether `rows` are all that come, and not many more."""
    there = rows.out.source_tokens.shape[0]
    return num_rows <= there <= 2 * num_rows + MOST_SPARE


def _aligned_tokens(x: Tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens, aligned, and their scales."""
    return (_aligned(x[0]), x[1]) if isinstance(x, tuple) else (_aligned(x), None)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows at a multiple of 16 bytes: themselves, or a copy."""
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()
