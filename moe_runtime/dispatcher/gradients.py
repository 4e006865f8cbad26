"""Dispatch and combine with gradients, in bf16: the gradient of one is the other.

With `P` the map of tokens to rows (a row for each token and expert), dispatch is `rows = P x`, and combine is
`y = P^T (w * rows)`. So

    dispatch:  dx = P^T drows
    combine:   drows = w * P dy,   dw[t, k] = <dy[t], rows[position of (t, k)]>
"""

from __future__ import annotations

from copy import copy
from typing import Any, Protocol

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import RoutingDispatcher, TokenDispatcher
from moe_runtime.kernels.exchange.landing import landing_records, second_half_row
from moe_runtime.kernels.formats.number_formats import align
from moe_runtime.kernels.formats.reference_quantize import bf16_parts
from moe_runtime.support.arguments import check_is_tensor, check_kind


class RowExchange(Protocol):
    """One dispatch of `T` tokens to `R` rows, as its gradients need it."""

    def rows_of(self, x: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[R, H]`, the row of each token's experts, 0 where there is none; `[R]`, the weights of rows, if given."""

    def sums_of(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """`[T, H]`, the sum of each token's rows, times `weights` `[T, K]` if given."""

    def entries_of(self, values: torch.Tensor) -> torch.Tensor:
        """fp32 `[T, K]`, the value of the row of each (token, k), 0 where there is none; `values` fp32 `[R]`."""


class _Dispatch(torch.autograd.Function):
    """`rows = P x`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        rows, _ = exchange.rows_of(x, None)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.sums_of(grads[0].contiguous(), None), None


class _Combine(torch.autograd.Function):
    """`y = P^T (w * rows)`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange, ctx.dtype = exchange, rows.dtype
        # Rows are for the gradient of weights alone.
        ctx.save_for_backward(weights, rows if ctx.needs_input_grad[1] else None)
        return exchange.sums_of(rows, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        weights, rows = ctx.saved_tensors
        dy_rows, row_weights = ctx.exchange.rows_of(grads[0].contiguous(), weights)
        d_weights = None
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(rows.dtype, torch.float32)
            # Rows that no token has may hold anything, and `dy_rows` is 0 there.
            products = torch.where(dy_rows != 0, dy_rows.to(wide) * rows.to(wide), 0.0)
            d_weights = ctx.exchange.entries_of(products.sum(dim=1)).to(weights.dtype)
        return (dy_rows * row_weights[:, None]).to(ctx.dtype), d_weights, None


def dispatch_rows(x: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """`exchange.rows_of(x)` with a gradient for `x`."""
    return _Dispatch.apply(x, exchange)


def combine_rows(rows: torch.Tensor, weights: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """`exchange.sums_of(rows, weights)` with gradients for both."""
    return _Combine.apply(rows, weights, exchange)


class DispatchedRows:
    """What `DifferentiableDispatcher.dispatch` gives; a `RowExchange`.

    Attributes:
        rows: bf16 `[R, H]`, grouped by local expert, 0 past the last; `R` is `row_capacity`. It has a gradient.
        group_offsets: int32 `[E + 1]`, first row of each local expert, and the end of the last.
    """

    rows: torch.Tensor
    group_offsets: torch.Tensor
    _exchange: DispatchedRows
    """This without `rows`, for autograd: a graph that keeps its own result lives until the garbage collector runs."""

    def __init__(self, dispatchers: tuple[TokenDispatcher, RoutingDispatcher], topk_idx: torch.Tensor) -> None:
        self._dispatcher, self._entries = dispatchers
        self._topk_idx = topk_idx
        self._ones = torch.ones(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        self._handle: DispatchHandle | None = None

    def rows_of(self, x: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `RowExchange`; collective."""
        arrived = self._dispatcher.dispatch(x, self._topk_idx, self._ones if weights is None else weights)
        if self._handle is None:
            self._handle, self.group_offsets = arrived.handle, arrived.group_offsets
        there = torch.arange(arrived.capacity, device=x.device) < arrived.group_offsets[-1]
        rows = torch.where(there[:, None], arrived.rows, 0.0)
        return rows, None if weights is None else self._row_weights(arrived)

    def sums_of(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """See `RowExchange`; collective."""
        assert self._handle is not None
        return self._dispatcher.combine(rows, self._handle, topk_weights=self._ones if weights is None else weights)

    def entries_of(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowExchange`; collective. A value travels as three bf16 values whose sum it is: no sum mixes two."""
        assert self._handle is not None
        positions, top_k = self._handle.positions, self._topk_idx.shape[1]
        entry_of = self._by_row(torch.arange(top_k, device=values.device).expand_as(positions), values.numel())
        shape = values.numel(), self._entries.geometry.output_hidden
        columns = torch.zeros(shape, dtype=torch.float32, device=values.device)
        for third, part in enumerate(bf16_parts(values)):
            columns.scatter_(1, (entry_of + third * top_k)[:, None], part[:, None])
        # Before the routing is sent: `combine_send` may begin as soon as all kernels before that have ended.
        rows = columns.to(torch.bfloat16)
        handle = self._entries.send_routing(self._topk_idx, self._ones, positions, values.numel())
        sums = self._entries.combine(rows, handle)
        return sums[:, : 3 * top_k].float().unflatten(1, (3, top_k)).sum(dim=1)

    def _row_weights(self, arrived: DispatchedTokens) -> torch.Tensor:
        """fp32 `[R]`, from the records that have just landed."""
        handle, context = arrived.handle, self._dispatcher.context
        geometry = self._dispatcher._exchange.geometry  # over several hosts of the ranks of this one
        record, first = geometry.record, second_half_row(context, geometry)
        slots = torch.arange(geometry.num_slots, device=handle.epoch.device) + (handle.epoch & 1) * first
        landed = landing_records(context, geometry)
        weights = landed[:, record.weights_offset : record.weights_offset + 4 * record.top_k][slots]
        return self._by_row(weights.view(torch.float32), arrived.capacity)

    def _by_row(self, entries: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`[R]` of `entries` `[S, K]`, 0 for rows that belong to no entry."""
        assert self._handle is not None
        positions = self._handle.positions
        # Entries without a row go behind the last one.
        at = torch.where(positions >= 0, positions, num_rows).to(torch.int64)
        rows = torch.zeros(num_rows + 1, dtype=entries.dtype, device=entries.device)
        rows.scatter_(0, at.flatten(), entries.flatten())
        return rows[:num_rows]


class DifferentiableDispatcher:
    """Dispatch and combine in bf16 that autograd knows, for training.

    Gradients travel by the same exchange: each rank has to call `backward` (or `torch.autograd.grad`) of what it
    dispatched and combined, in the same order as its peers, also a rank without tokens. Which of `x`, experts' outputs
    and `topk_weights` require grad must be equal on all ranks: each gradient takes an exchange, which others would
    await until the limit.

    Args: those of `TokenDispatcher`.
    """

    def __init__(
        self,
        context: ExpertParallelContext,
        *,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        expert_row_capacity: int | None = None,
        num_sms: int | None = None,
    ) -> None:
        sizes: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "max_tokens_per_rank": max_tokens_per_rank,
            "expert_row_capacity": expert_row_capacity,
            "num_sms": num_sms,
        }
        self._dispatcher = TokenDispatcher(
            context, hidden_size=hidden_size, mode="contiguous", reusable_handles=True, **sizes
        )
        self._entries = RoutingDispatcher(context, output_size=align(3 * top_k, 16), **sizes)

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor) -> DispatchedRows:
        """The rows that arrive here, with a gradient for `x`. Collective.

        Args:
            x: bf16 `[T, H]`, contiguous.
            topk_idx: int32 or int64 `[T, K]`; -1 is unrouted.

        Raises: as `TokenDispatcher.dispatch`.
        """
        check_is_tensor("x", x)
        check_is_tensor("topk_idx", topk_idx)
        exchange = DispatchedRows((self._dispatcher, self._entries), topk_idx.clone())
        rows = dispatch_rows(x, exchange)
        dispatched = copy(exchange)
        dispatched.rows, dispatched._exchange = rows, exchange
        return dispatched

    def combine(
        self, expert_output: torch.Tensor, dispatched: DispatchedRows, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """bf16 `[T, H]`, the weighted sum of each token's rows, with gradients for both. Collective.

        Args:
            expert_output: bf16 `[R, H]`.
            dispatched: what `dispatch` gave.
            topk_weights: fp32 `[T, K]`.

        Raises: as `TokenDispatcher.combine`.
        """
        check_is_tensor("expert_output", expert_output)
        check_is_tensor("topk_weights", topk_weights)
        check_kind("dispatched", dispatched, DispatchedRows)
        if dispatched._dispatcher is not self._dispatcher:
            raise ValueError("dispatched: it belongs to another dispatcher")
        return combine_rows(expert_output, topk_weights, dispatched._exchange)
