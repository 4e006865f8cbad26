"""Which `Exchange` a dispatcher has, and what becomes of handles and memory that one has used."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.dispatcher.exchange import Exchange, LocalExchange, OneRankExchange
from moe_runtime.dispatcher.hierarchical import HierarchicalExchange
from moe_runtime.dispatcher.token_dispatcher import RoutingDispatcher, TokenDispatcher
from moe_runtime.kernels.exchange import cuda, reference
from moe_runtime.virtual import virtual_contexts
from tests.support.exchange_data import rank_input
from tests.support.virtual_exchange import SETTINGS

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("ranks", "hosts", "kernels", "expected"),
    [
        (1, 1, reference, LocalExchange),
        (1, 1, cuda, OneRankExchange),
        (2, 1, reference, LocalExchange),
        (2, 1, cuda, LocalExchange),
        (2, 2, reference, HierarchicalExchange),
        (4, 2, cuda, HierarchicalExchange),
    ],
)
def test_the_exchange_follows_the_memory_between_ranks(
    ranks: int, hosts: int, kernels: object, expected: type[Exchange]
) -> None:
    context = virtual_contexts(ranks, num_hosts=hosts, engine="torch")[0]
    dispatcher = TokenDispatcher(context, **SETTINGS)  # type: ignore[arg-type]
    dispatcher._use(kernels)  # type: ignore[arg-type]
    exchange = dispatcher._exchange
    assert type(exchange) is expected and exchange.backend is kernels
    assert exchange.geometry.world_size == ranks // hosts


def test_a_handle_that_was_made_for_rows_takes_no_stage_itself(seed: int) -> None:
    context = virtual_contexts(1, engine="torch")[0]
    sizes = {name: SETTINGS[name] for name in ("num_experts", "top_k", "max_tokens_per_rank")}
    combiner = RoutingDispatcher(context, **sizes, output_size=SETTINGS["hidden_size"])
    data = rank_input(seed, 0, 5, *(SETTINGS[name] for name in ("hidden_size", "num_experts", "top_k")))
    routing = combiner.dispatch_send(combiner._no_tokens[:5], data.topk_idx, data.topk_weights)
    renewed = routing.for_rows(routing.positions, 15)
    with pytest.raises(ValueError, match="handle: dispatch_recv was already called with it"):
        combiner.dispatch_recv(routing)
    rows = torch.zeros(15, SETTINGS["hidden_size"], dtype=torch.bfloat16)
    combiner.combine_send(rows, renewed)
    assert combiner.combine_recv(renewed).shape == data.x.shape


def test_views_of_what_has_landed_end_with_the_context(seed: int) -> None:
    context = virtual_contexts(1, engine="torch")[0]
    dispatcher = TokenDispatcher(context, **SETTINGS, token_format="nvfp4")  # type: ignore[arg-type]
    data = rank_input(seed, 0, 5, *(SETTINGS[name] for name in ("hidden_size", "num_experts", "top_k")))
    first, second = (dispatcher.dispatch(data.x, data.topk_idx, data.topk_weights) for _ in range(2))
    assert first.rows is second.rows and first.row_index is not None
    context.close()
    assert not context.landing_views
