"""Which `Exchange` a dispatcher has, and what becomes of handles and memory that one has used."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.comm.hosts import Hosts
from moe_runtime.dispatcher.exchange import Exchange, LocalExchange, OneRankExchange
from moe_runtime.dispatcher.hierarchical import HierarchicalExchange
from moe_runtime.dispatcher.token_dispatcher import RoutingDispatcher, TokenDispatcher
from moe_runtime.kernels.exchange import cuda, reference
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from moe_runtime.kernels.exchange.plan import plan_exchange
from moe_runtime.launch.research.aot_exchange import sample_geometry
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


@pytest.mark.parametrize(("num_hosts", "ranks_per_host", "num_experts"), [(33, 8, 264), (2, 32, 24576)])
def test_more_hosts_or_experts_of_a_host_than_the_sender_takes_are_refused(
    num_hosts: int, ranks_per_host: int, num_experts: int
) -> None:
    """The kernels within a host take them: the one that sends to hosts, for which each is a rank, does not."""
    hosts = Hosts(num_hosts, ranks_per_host, 0, 0)
    flat = replace(sample_geometry("bf16"), rank=0, world_size=hosts.world_size, num_experts=num_experts)
    geometry = HostGeometry(hosts, flat)
    assert plan_exchange(geometry.local) is not None
    context: Any = SimpleNamespace(link=object(), link_buffers=object(), engine="cuda", device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"^transport: hierarchical cannot run here, no kernels take these sizes"):
        HierarchicalExchange(context, geometry, 0, cuda)  # type: ignore[arg-type]


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
    first, second = (dispatcher.dispatch(*data) for _ in range(2))
    assert first.rows is second.rows and first.row_index is not None
    context.close()
    assert not context.landing_views
