"""Each exchange has its own id: layers of equal sizes share kernels, plans and memory, and never an id."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.comm.signals import exchange_of
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.hierarchical import HierarchicalExchange
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from tests.emulator import needs_emulator
from tests.exchange.test_hierarchical_emulated import VirtualHosts
from tests.support.exchange_data import rank_input
from tests.support.virtual_exchange import ENGINES, SETTINGS, Ranks, emulator, poisoned_memory
from tests.unit.test_import_graph import module_files

__all__ = ["emulator", "poisoned_memory"]

WORLD = 2
ORDER = (0, 1, 1, 0, 0, 1)
"""Layers of the steps: either may be the first in a half, and follow itself or the other."""


def ids_in_signals(contexts: list[ExpertParallelContext], half: int) -> set[int]:
    """Of the token counts that all ranks of `contexts` have from each other."""
    found = set()
    for context in contexts:
        layout, world = context.signals_layout, context.heap.world_size
        words = context.heap.tensor("signals").view(torch.int32)[layout.token_count :][
            half * world : (half + 1) * world
        ]
        found |= {exchange_of(word) for word in words.tolist()}
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", [1, WORLD])
def test_ids_of_layers_of_equal_sizes(world: int, engine: str, device: torch.device, seed: int) -> None:
    ranks = Ranks(world, device, engine, other_tokens=SETTINGS["max_tokens_per_rank"], **SETTINGS)
    layers = ranks.dispatchers, ranks.others
    for step, layer in enumerate(ORDER):
        ranks.dispatchers = layers[layer]
        inputs = [rank_input(seed + step, rank, 5, 256, 7, 3).to(device) for rank in range(world)]
        arrived = ranks.dispatch(inputs)
        assert ids_in_signals(ranks.contexts, (step + 1) & 1) == {layer}
        capacity = arrived[0].capacity
        ranks.combine(arrived, [torch.ones(capacity, 256, dtype=torch.bfloat16, device=device)] * world)
        for context in ranks.contexts:
            context.check()


@pytest.mark.cpu_only
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_emulator)])
@pytest.mark.parametrize("capacity", [None, 5])
def test_ids_of_layers_between_hosts(capacity: int | None, kernels: bool, seed: int) -> None:
    """Also in the headers that hosts send each other, and in the signals of `pack` that nobody reads."""
    hosts = VirtualHosts(2, 2, kernels, layers=2, host_capacity=capacity)
    for step, layer in enumerate(ORDER):
        inputs = [rank_input(seed + step, rank, 5, 256, 10, 3) for rank in range(4)]
        arrived = hosts.dispatch(inputs, [layer] * 4)
        memories = [context.memory for context in hosts.contexts]
        assert ids_in_signals(memories, (step + 1) & 1) == {layer}  # type: ignore[arg-type]
        found = set()
        for own in hosts.layers[layer]:
            exchange = own._exchange
            assert isinstance(exchange, HierarchicalExchange)
            link, geometry = exchange._link_memory, exchange.host_geometry
            for chunks in (link.records_out, [link.records(host, geometry.hosts.host) for host in (0, 1)]):
                found |= {exchange_of(int(geometry.dispatch_header(chunk)[-1])) for chunk in chunks}
            if link.pointers is not None:
                # Of two hosts: flags, then counts, of each host in each half.
                counts = link.pointers._unread.view(2, -1)[:, 4:8].flatten()  # type: ignore[attr-defined]
                found |= {exchange_of(word) for word in counts.tolist() if word}
        assert found == {layer}
        outputs = [torch.ones(a.capacity, 256, dtype=torch.bfloat16) for a in arrived]
        hosts.combine(arrived, outputs, None, layer)
        for context in hosts.contexts:
            context.check()


def cached_functions() -> Iterator[tuple[str, Any]]:
    """Functions of all modules whose results `functools` keeps."""
    root = Path(__file__).parents[2]
    for module in module_files(root):
        # Programs and adapters of engines keep nothing, and need what may not be installed.
        if module.endswith("__main__") or module.startswith(("moe_runtime.launch", "moe_runtime.integrations")):
            continue
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == module:
                yield f"{module}.{name}", value.__wrapped__


def unequal_fields(kind: Any) -> list[str]:
    """Fields, also of fields, that `==` of a dataclass does not look at."""
    found = []
    if dataclasses.is_dataclass(kind):
        for field, of in zip(dataclasses.fields(kind), typing.get_type_hints(kind).values(), strict=False):
            if not field.compare:
                found.append(f"{kind}.{field.name}")
            found += unequal_fields(of)
    return found + [name for part in typing.get_args(kind) for name in unequal_fields(part)]


@pytest.mark.cpu_only
def test_no_cache_is_keyed_by_what_equality_leaves_out() -> None:
    """A cache gives what it made for an equal key: all that a result may depend on has to be part of equality."""
    seen = 0
    for name, function in cached_functions():
        hints = typing.get_type_hints(function)
        hints.pop("return", None)
        for parameter, kind in hints.items():
            assert not unequal_fields(kind), f"{name}, {parameter}"
            seen += kind in (ExchangeGeometry, HostGeometry)
    assert seen > 5, "the caches of the exchange are among them"
