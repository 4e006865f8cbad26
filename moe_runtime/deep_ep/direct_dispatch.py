"""The calls of normal mode where kernels in CUDA C++ store to peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import collective_step
from moe_runtime.context.threads import by_one_thread
from moe_runtime.deep_ep.direct import Counts, DirectExchange
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
from moe_runtime.kernels.exchange.rows import Route, RowKernels, TokensOfRank

MARGIN = 8
"""Rows are received before the host knows how many come: as many as the last dispatch makes likely, and one in MARGIN
more."""
MOST_SPARE = 1024
"""Rows that may be left over beside as many as come. Results are views then, which keep the memory of all."""


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
    def start(
        self,
        x: Tokens,
        token_layout: TokenLayout | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        form: Form,
    ) -> StartedDispatch:
        """The part of a dispatch that does not wait for counts; arguments are as of `NormalExchange.dispatch`."""
        layout = payload_layout(self.hidden, x, topk_idx)
        tokens = _tokens_of_rank(x, topk_idx, topk_weights)
        positions = None
        if not form.num_worst_tokens:
            self.kernels.check_can_wait()
        with self._guard:
            if form.num_worst_tokens:
                check_one_step(tokens.tokens.shape[0], self.max_tokens)
            if form.to_expand:
                assert form.max_tokens is not None
                shape = self.context.world_size * room_for(form.max_tokens, self.max_tokens), self.context.world_size
                with torch.inference_mode(False):
                    positions = torch.full(shape, -1, dtype=torch.int32, device=self.context.device)
            per_expert = None
            if token_layout is None:
                assert topk_idx is not None
                routing = topk_idx
            else:
                routing, per_expert = token_layout[0].contiguous(), token_layout[2].contiguous()
            counted = routing, per_expert, form.num_experts, form.num_worst_tokens
            route = self.kernels.count(*counted, with_entries=form.to_expand)
            copiers = self.kernels.row_kernels(layout, self.num_sms, form.to_expand)
            epoch = self.kernels.send(copiers, tokens, route, window=0, after_counts=True)
        in_rank = None if token_layout is None else token_layout[0]
        return StartedDispatch(self, copiers, layout, tokens, route, epoch, positions, in_rank, form)

    @by_one_thread
    def _finish(self, begun: StartedDispatch) -> Received:
        """The rest of it: `StartedDispatch.finish`."""
        kernels, layout, route, form = self.kernels, begun.layout, begun.route, begun.form
        num_tokens = route.index.shape[0]
        counts: Counts | None = None
        most = most_sent = self.max_tokens
        num_rows = form.num_worst_tokens
        early: EarlyRows | None = None
        if not num_rows:
            with self._guard:
                early = self._receive_early(begun)
            counts = kernels.await_counts(route)
            most, most_sent, num_rows = counts.most_tokens, counts.most_sent, counts.num_rows
            self._rows_per_token = num_rows / max(1, num_tokens)
        with self._guard:
            room = room_for(most if form.max_tokens is None else form.max_tokens, self.max_tokens)
            if early is not None and early.serve(num_rows):
                first_window = self.max_tokens
                out = early.out.first(num_rows)
                kept_ids = None if early.kept_ids is None else early.kept_ids[:num_rows]
            else:
                first_window = 0
                how = not form.to_expand, form.scales_by_column
                out = UnpackedRows.allocate(layout, num_rows, self.context.device, *how)
                kept_ids = _ids_to_keep(begun, out)
            landed = self._receive_rows(begun, out, most_sent, room, kept_ids, first_window)
        handle = NormalHandle((route.prefix, None, None, out.source_tokens, begun.is_token_in_rank, None))
        handle.steps = []
        if begun.positions is not None:
            assert route.entries is not None
            ones = torch.ones(route.entries.shape, dtype=torch.float32, device=self.context.device)
            handle.steps.append(Step(0, num_tokens, room, route.entries, ones, begun.positions))
        handle.num_tokens, handle.num_rows, handle.num_ranks = num_tokens, num_rows, self.context.world_size
        handle.tokens_of_experts = None if counts is None else counts.of_experts
        handle.room, handle.route, handle.most_tokens, handle.most_sent = room, route, most, most_sent
        return Received.of(layout, out, handle, landed, kept_ids)

    def _receive_early(self, begun: StartedDispatch) -> EarlyRows | None:
        """Receive the step that has begun before the host knows how many rows come; None where that does not pay.

        It reads what has landed and nothing more, so it can be done again with more rows.
        """
        likely = int(begun.route.index.shape[0] * self._rows_per_token)
        if not likely or begun.form.to_expand or begun.form.scales_by_column:
            return None
        out = UnpackedRows.allocate(begun.layout, likely + likely // MARGIN + 1, self.context.device)
        early = EarlyRows(out, _ids_to_keep(begun, out))
        self._receive_rows(begun, out, 1, self.max_tokens, early.kept_ids)
        return early

    def _receive_rows(
        self,
        begun: StartedDispatch,
        out: UnpackedRows,
        most_sent: int,
        room: int = 0,
        kept_ids: torch.Tensor | None = None,
        first_window: int = 0,
    ) -> LandedRows | None:
        """Receive the step that has begun, and send and receive more, up to `most_sent` tokens of a pair of ranks.

        `room` is of positions, and 0 for a cached dispatch; windows before `first_window` have been received. Returns
        where rows are that stay there.
        """
        kernels, tokens, route, epoch = self.kernels, begun.tokens, begun.route, begun.epoch
        copiers = begun.copiers
        row_index = torch.empty_like(out.source_tokens) if begun.form.to_expand else None
        for window in range(first_window, max(1, most_sent), self.max_tokens):
            if window:
                epoch = kernels.send(copiers, tokens, route, window=window, after_counts=False)
            kernels.receive(
                copiers,
                tokens,
                route,
                epoch,
                out,
                window=window,
                is_first=room > 0,
                also_ids=kept_ids,
                positions=begun.positions,
                row_index=row_index,
                room=room,
                num_experts=begun.form.num_experts,
            )
        return None if row_index is None else LandedRows(kernels.records(copiers.geometry), row_index, route.offsets)

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
        tokens = _tokens_of_rank(x, topk_idx, topk_weights)
        with self._guard:
            copiers = self.kernels.row_kernels(layout, self.num_sms, form.to_expand)
            epoch = self.kernels.send(copiers, tokens, route, window=0, after_counts=False)
            begun = StartedDispatch(self, copiers, layout, tokens, route, epoch, None, None, form)
            given = not form.to_expand, form.scales_by_column, source_tokens
            out = UnpackedRows.allocate(layout, handle.num_rows, self.context.device, *given)
            landed = self._receive_rows(begun, out, handle.most_sent)
        return Received.of(layout, out, handle, landed)

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
            biases = tuple(_aligned(bias.contiguous()) for bias in biases)
            return self.kernels.combine(rows, route, source_tokens, biases, handle.most_tokens, self.num_sms)


@dataclass(frozen=True)
class StartedDispatch:
    """A direct dispatch whose tokens are on their way. It keeps what kernels read.

    Attributes:
        exchange: of it.
        copiers: the kernels that copy its rows.
        layout, tokens, route, epoch: of what travels.
        positions: of its only step, if they are there already.
        is_token_in_rank: as the caller gave it.
        form: of it.
    """

    exchange: DirectDispatch
    copiers: RowKernels
    layout: PayloadLayout
    tokens: TokensOfRank
    route: Route
    epoch: torch.Tensor
    positions: torch.Tensor | None
    is_token_in_rank: torch.Tensor | None
    form: Form

    def finish(self) -> Received:
        """Wait for the counts, if the host is to know them, and receive rows."""
        return self.exchange._finish(self)


@dataclass(frozen=True)
class EarlyRows:
    """Rows that are received before it is known how many come.

    Attributes:
        out: of as many as are likely.
        kept_ids: as of `Received`.
    """

    out: UnpackedRows
    kept_ids: torch.Tensor | None

    def serve(self, num_rows: int) -> bool:
        """Whether they are all that come, and not many more."""
        there = self.out.source_tokens.shape[0]
        return num_rows <= there <= 2 * num_rows + MOST_SPARE


def _ids_to_keep(begun: StartedDispatch, out: UnpackedRows) -> torch.Tensor | None:
    return torch.empty_like(out.ids) if begun.form.keeps_ids and out.ids is not None else None


def _tokens_of_rank(x: Tokens, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None) -> TokensOfRank:
    quants, scales = x if isinstance(x, tuple) else (x, None)
    return TokensOfRank(_aligned(quants), scales, topk_idx, topk_weights)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows at a multiple of 16 bytes: themselves, or a copy."""
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()
