"""Dispatch and combine with gradients: the formulas in float64, and bf16 over processes against a dense model."""

from __future__ import annotations

import gc
import os
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.gradients import DifferentiableDispatcher, combine_rows, dispatch_rows

HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 6, 3, 7


class Model:
    """A `RowExchange` of one rank in any dtype."""

    def __init__(self, topk_idx: torch.Tensor, num_rows: int) -> None:
        self.idx, self.num_rows = topk_idx, num_rows
        order = sorted((e, t, k) for t, row in enumerate(topk_idx.tolist()) for k, e in enumerate(row) if e >= 0)
        self.position = {(t, k): row for row, (_, t, k) in enumerate(order)}

    def rows_of(self, x: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = x.new_zeros(self.num_rows, x.shape[1])
        row_weights = None if weights is None else weights.new_zeros(self.num_rows)
        for (t, k), row in self.position.items():
            rows[row] = x[t]
            if row_weights is not None and weights is not None:
                row_weights[row] = weights[t, k]
        return rows, row_weights

    def sums_of(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        y = rows.new_zeros(self.idx.shape[0], rows.shape[1])
        for (t, k), row in self.position.items():
            y[t] += rows[row] * (1 if weights is None else weights[t, k])
        return y

    def entries_of(self, values: torch.Tensor) -> torch.Tensor:
        found = values.new_zeros(self.idx.shape)
        for (t, k), row in self.position.items():
            found[t, k] = values[row]
        return found


def routing(seed: int, tokens: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    idx = torch.rand(tokens, EXPERTS, generator=g).argsort(dim=1)[:, :TOP_K]
    return torch.where(torch.rand(idx.shape, generator=g) < 0.25, -1, idx)


def test_gradients_are_those_of_finite_differences(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    exchange = Model(routing(seed, 4), 4 * TOP_K + 2)
    x = torch.randn(4, 5, generator=g, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, TOP_K, generator=g, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(5, 5, generator=g, dtype=torch.float64)

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combine_rows(torch.tanh(dispatch_rows(x, exchange) @ matrix), weights, exchange)

    assert torch.autograd.gradcheck(layer, (x, weights))


def train(rank: int, world: int, counts: list[int], seed: int) -> None:
    """A step of an MoE layer of one matrix an expert, and what the same layer gives on one rank in float64."""
    with ExpertParallelContext(timeout_s=30) as context:
        place = context.device
        dispatcher = DifferentiableDispatcher(
            context, hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=TOKENS
        )
        context.allocate()
        g = torch.Generator().manual_seed(seed)
        weights_of_experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=g) / HIDDEN**0.5
        count = counts[rank % len(counts)]
        own = torch.Generator().manual_seed(seed + 1 + rank)
        x_start = torch.randn(count, HIDDEN, generator=own).to(torch.bfloat16)
        w_start = torch.rand(count, TOP_K, generator=own)
        dy = torch.randn(count, HIDDEN, generator=own).to(torch.bfloat16)
        idx = routing(seed + 50 + rank, count)
        first, last = _bounds(rank, world)
        for _ in range(2):
            x = x_start.to(place, copy=True).requires_grad_()
            w = w_start.to(place, copy=True).requires_grad_()
            local = weights_of_experts[first:last].to(device=place, dtype=torch.bfloat16).requires_grad_()
            dispatched = dispatcher.dispatch(x, idx.to(place))
            offsets = dispatched.group_offsets.tolist()
            parts = [dispatched.rows[a:b] @ local[e].T for e, (a, b) in enumerate(pairwise(offsets))]
            parts.append(torch.zeros_like(dispatched.rows[offsets[-1] :]))
            y = dispatcher.combine(torch.cat(parts), dispatched, w)
            y.backward(dy.to(place))

            exact_x = x_start.double().requires_grad_()
            exact_w = w_start.double().requires_grad_()
            wide = weights_of_experts.to(torch.bfloat16).double()
            exact = torch.zeros(count, HIDDEN, dtype=torch.float64)
            products = torch.zeros(count, TOP_K, dtype=torch.float64)  # of the norms of dy and of the expert's row
            for t in range(count):
                for k, e in enumerate(idx[t].tolist()):
                    if e >= 0:
                        row = wide[e] @ exact_x[t]
                        exact = exact.index_add(0, torch.tensor([t]), (exact_w[t, k] * row)[None])
                        products[t, k] = dy[t].double().norm() * row.detach().norm()
            if exact.requires_grad:
                exact.backward(dy.double())
            # A row is rounded to bf16; its product with dy may cancel.
            want_w = torch.zeros(count, TOP_K, dtype=torch.float64) if exact_w.grad is None else exact_w.grad
            assert w.grad is not None and bool(((w.grad.cpu().double() - want_w).abs() <= 2 * 2**-9 * products).all())
            for got, want in ((y, exact), (x.grad, exact_x.grad)):
                assert got is not None
                want = torch.zeros_like(got.cpu().double()) if want is None else want.detach()
                error = (got.detach().cpu().double() - want).norm() / want.norm().clamp(min=1e-30)
                # bf16 at each of at most four roundings of a sum.
                assert error <= 4 * 2**-9, (error, got.shape)
            assert local.grad is None or bool(local.grad.isfinite().all())


def _bounds(rank: int, world: int) -> tuple[int, int]:
    share, more = divmod(EXPERTS, world)
    first = rank * share + min(rank, more)
    return first, first + share + (rank < more)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_in_bf16_is_the_dense_model(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world).run(train, [5, 0, 7, 1], seed)


@pytest.mark.cpu_only
@pytest.mark.parametrize("backward", [False, True])
def test_rows_end_with_their_last_user(backward: bool, seed: int) -> None:
    """They are large, and the garbage collector does not know how full a GPU is."""
    with ExpertParallelContext() as context:
        dispatcher = DifferentiableDispatcher(
            context, hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=TOKENS
        )
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(TOKENS, HIDDEN, generator=g).to(torch.bfloat16).requires_grad_()
        weights = torch.rand(TOKENS, TOP_K, generator=g).requires_grad_()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            dispatched = dispatcher.dispatch(x, routing(seed, TOKENS))
            rows = weakref.ref(dispatched.rows)
            y = dispatcher.combine(torch.tanh(dispatched.rows), dispatched, weights)
            if backward:
                y.sum().backward()
            else:
                del y
            del dispatched
            assert rows() is None
        finally:
            if was_enabled:
                gc.enable()


@pytest.mark.cpu_only
@pytest.mark.parametrize("trains_weights", [False, True])
def test_rows_are_kept_for_the_gradient_of_weights_alone(trains_weights: bool, seed: int) -> None:
    exchange = Model(routing(seed, 4), 4 * TOP_K)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * TOP_K, 5, generator=g, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, TOP_K, generator=g, dtype=torch.float64, requires_grad=trains_weights)
    rows = x * 2
    last_seen, y = weakref.ref(rows), combine_rows(rows, weights, exchange)
    del rows
    assert (last_seen() is not None) is trains_weights
    (dx,) = torch.autograd.grad(y.sum(), x)
    wanted = exchange.rows_of(torch.full_like(y, 2.0), weights.detach())
    assert wanted[1] is not None and torch.equal(dx, wanted[0] * wanted[1][:, None])


class _Gathered(TorchDispatchMode):
    """Notes the bytes of what is gathered by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.index.Tensor:
            self.sizes.append(found.numel() * found.element_size())
        return found


@pytest.mark.cpu_only
def test_weights_of_rows_are_gathered_without_their_records(seed: int) -> None:
    """Which are a thousand times larger, of all tokens of all ranks."""
    with ExpertParallelContext() as context:
        dispatcher = DifferentiableDispatcher(
            context, hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=TOKENS
        )
        x, ids = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16), routing(seed, TOKENS)
        weights = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(seed))
        dispatched = dispatcher.dispatch(x, ids)
        arrived = dispatcher._dispatcher.dispatch(x, ids, weights)
        with _Gathered() as gathered:
            of_rows = dispatched._row_weights(arrived)
        assert gathered.sizes == [4 * TOP_K * TOKENS]
        order = [float(weights[t, k]) for e in range(EXPERTS) for t, k in (ids == e).nonzero().tolist()]
        assert of_rows.tolist() == order + [0.0] * (len(of_rows) - len(order))


def train_over_hosts(rank: int, world: int, ranks_per_host: int, *step: Any) -> None:
    os.environ["MOE_RUNTIME_HOST"] = f"host{rank // ranks_per_host}"
    try:
        train(rank, world, *step)
    finally:
        del os.environ["MOE_RUNTIME_HOST"]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("world", "ranks_per_host"), [(2, 1), (4, 2)])
def test_training_over_several_hosts(world: int, ranks_per_host: int, get_pool: Any, seed: int) -> None:
    get_pool(world).run(train_over_hosts, ranks_per_host, [5, 0, 7, 1], seed)


@pytest.mark.parametrize("world", [1, 2])
def test_training_on_gpus_is_the_dense_model(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world, gpus=True).run(train, [5, 7], seed)
