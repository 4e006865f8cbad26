"""Hopper's exchange emulated on the CPU: the bits of the twins, in whatever order lanes, copies and ranks go on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from moe_runtime.dispatcher import DispatchedTokens
from moe_runtime.kernels import hopper_exchange
from tests.comparison import assert_same_bits
from tests.emulator import Emulator
from tests.exchange_data import RankInput, rank_input
from tests.on_host import needs_compiler
from tests.test_exchange import HOPPER, Ranks, emulator, poisoned_memory

__all__ = ["emulator", "poisoned_memory"]

pytestmark = needs_compiler

CPU = torch.device("cpu")
WORLD = 3
SETTINGS: dict[str, Any] = {"hidden_size": 512, "num_experts": 10, "top_k": 3, "max_tokens_per_rank": 7}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[None]:
    """Rings that come round, blocks with several tokens, and tokens in parts, at sizes that can be emulated."""
    draw = random.Random(seed)
    for name, value in {
        "MAX_PLACES": draw.choice((2, 3)),
        "BLOCKS_PER_SM": 1,
        "ARRIVE_WARPS": draw.choice((1, 2, 4)),
        "TOKENS_IN_PARTS": draw.choice((1, 1024)),
    }.items():
        monkeypatch.setattr(hopper_exchange, name, value)
    sms = draw.choice((1, 2, 3))
    monkeypatch.setattr(hopper_exchange, "most_sms", lambda device, limit=None: min(sms, limit or sms))
    defines = (hopper_exchange.dispatch_defines, hopper_exchange.arrive_defines, hopper_exchange.combine_defines)
    for cached in defines:
        cached.cache_clear()
    yield
    for cached in defines:
        cached.cache_clear()


def twins_and_kernels(**settings: Any) -> list[Ranks]:
    return [Ranks(WORLD, CPU, engine, **{**SETTINGS, **settings}) for engine in ("torch", HOPPER)]


ARRIVED = ("group_offsets", "group_scale_offsets", "scales", "row_scale", "rows")


class Step(NamedTuple):
    """What all ranks bring, and whether what arrives is combined, with a shared expert or without."""

    inputs: list[RankInput]
    combined: bool
    shared: bool


Found = tuple[DispatchedTokens, torch.Tensor | None]


def one_after_the_other(ranks: Ranks, steps: list[Step], outputs: list[torch.Tensor]) -> list[list[Found]]:
    """What arrives and would come home in each step, by rank."""
    found: list[list[Found]] = []
    for step in steps:
        arrived = ranks.dispatch(step.inputs)
        y = ranks.combine(arrived, outputs, [data.x for data in step.inputs] if step.shared else None)
        found.append(list(zip(arrived, y, strict=True)))
    return found


def all_at_once(ranks: Ranks, steps: list[Step], outputs: list[torch.Tensor], emulator: Emulator) -> list[list[Found]]:
    """The same where ranks go on as they like, and kernels of one begin before those before have ended."""
    found: list[list[Found]] = [[] for _ in steps]
    with emulator.together() as choose:
        for rank, (own, output) in enumerate(zip(ranks.dispatchers, outputs, strict=True)):
            choose(rank)
            for number, step in enumerate(steps):
                data, y = step.inputs[rank], None
                arrived = own.dispatch(data.x, data.topk_idx, data.topk_weights)
                if step.combined:
                    y = own.combine(output, arrived.handle, shared=data.x if step.shared else None)
                found[number].append((arrived, y))
    return found


def assert_same_results(found: list[list[Found]], wanted: list[list[Found]]) -> None:
    for step, (of_ranks, wanted_of_ranks) in enumerate(zip(found, wanted, strict=True)):
        for rank, ((a, y), (b, wanted_y)) in enumerate(zip(of_ranks, wanted_of_ranks, strict=True)):
            what = f"of rank {rank} in step {step}"
            for name in ARRIVED:
                if getattr(b, name) is not None:
                    assert_same_bits(getattr(a, name), getattr(b, name), f"{name} {what}")
            assert_same_bits(a.handle.positions, b.handle.positions, f"positions {what}")
            if y is not None and wanted_y is not None:
                assert_same_bits(y, wanted_y, f"y {what}")


def random_steps(seed: int, count: int) -> list[Step]:
    """Steps with tokens of all numbers on all ranks, and every kind of routing."""
    draw = random.Random(seed)
    hidden, experts, top_k, most = SETTINGS.values()
    steps = []
    for step in range(count):
        routing = draw.choice(("random", "random", "one", "none"))
        tokens = [draw.choice((0, 1, most, draw.randint(0, most))) for _ in range(WORLD)]
        inputs = [rank_input(seed + step, r, t, hidden, experts, top_k, routing) for r, t in enumerate(tokens)]
        steps.append(Step(inputs, combined=draw.random() < 0.7, shared=draw.random() < 0.5))
    return steps


@pytest.mark.parametrize(
    "settings",
    [
        {"token_format": "nvfp4"},
        {"token_format": "fp8_block", "combine_format": "mxfp8"},
        {"token_format": "nvfp4", "num_sms": 2},
    ],
    ids=str,
)
def test_steps_of_ranks_that_do_not_wait_for_each_other(
    settings: dict[str, Any], emulator: Emulator, seed: int
) -> None:
    for turn in range(4):
        run_random_steps(settings, emulator, seed + turn)


def run_random_steps(settings: dict[str, Any], emulator: Emulator, seed: int) -> None:
    steps = random_steps(seed, 5)
    twins, kernels = twins_and_kernels(mode="packed", **settings)
    rows = twins.dispatchers[0].geometry.row_capacity
    generator = torch.Generator().manual_seed(seed)
    outputs = [torch.randn(rows, SETTINGS["hidden_size"], generator=generator).bfloat16() for _ in range(WORLD)]
    assert_same_results(all_at_once(kernels, steps, outputs, emulator), one_after_the_other(twins, steps, outputs))
    for context in kernels.contexts:
        context.check_peers()
