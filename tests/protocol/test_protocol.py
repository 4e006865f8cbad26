"""Ranks that are slow at every point of a step, and ranks a step ahead of others: no rule broken, no bit changed.

`tests.support.protocol_watch` has the rules. Plain loops check received rows and combined results in every step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, config, expected_combine, expected_groups, rank_input
from tests.support.protocol_hooks import hooked
from tests.support.protocol_watch import POINTS, Delays, Watch
from tests.support.virtual_exchange import check_arrival

pytestmark = pytest.mark.cpu_only

HIDDEN, EXPERTS, TOP_K = 64, 5, 2
FIVE, THREE = (True, True, False, True, True), (True, False, True)
"""Whether the two epochs of each round are combined; every one of POINTS comes in three rounds, twice in five."""


def make_dispatcher(context: ExpertParallelContext, fmt: str, mode: Any, max_tokens: int) -> TokenDispatcher:
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
    return TokenDispatcher.from_config(context, config(fmt, intermediate_size=HIDDEN, **sizes), mode=mode)


def step_inputs(seed: int, epoch: int, world: int, most: int) -> list[RankInput]:
    """Of all ranks: uneven counts, one of them 0, and now and then all tokens to one rank or to none."""
    routing = ("none", "random", "one", "random")[epoch % 4]
    counts = [(most, 0, 1)[(rank + epoch) % 3] for rank in range(world)]
    return [rank_input(seed + epoch, r, count, HIDDEN, EXPERTS, TOP_K, routing) for r, count in enumerate(counts)]


def expert_row(holder: int, position: int) -> torch.Tensor:
    """fp32 `[HIDDEN]`, exact in bf16: what the experts of rank `holder` make of a row position."""
    return ((3 * position + torch.arange(HIDDEN) + 17 * holder) % 101).float() / 8 - 6


def expert_rows(arrived: DispatchedTokens, rank: int) -> torch.Tensor:
    output = torch.full((arrived.capacity, HIDDEN), float("nan"))
    for position in range(int(arrived.group_offsets[-1])):
        output[position] = expert_row(rank, position)
    return output


def expected_y(inputs: list[RankInput], geometry: ExchangeGeometry) -> torch.Tensor:
    """What must come home to this rank, in plain loops."""
    starts, rank = geometry.starts, geometry.rank
    row_of: dict[tuple[int, int], Any] = {}
    for holder in range(geometry.world_size):
        groups = expected_groups(inputs, range(starts[holder], starts[holder + 1]))
        for position, (source, token, k) in enumerate(row for group in groups for row in group):
            if source == rank:
                row_of[token, k] = expert_row(holder, position).numpy()
    data = inputs[rank]
    rows = [torch.from_numpy(expected_combine(data, starts, row_of, t)) for t in range(data.x.shape[0])]
    return torch.stack(rows).to(torch.bfloat16) if rows else torch.empty(0, HIDDEN, dtype=torch.bfloat16)


def run_rounds(
    rank: int, world: int, fmt: str, mode: str, most: int, rounds: tuple[bool, ...], seed: int, slow: bool
) -> tuple[list[torch.Tensor], list[tuple[int, str]]]:
    """Every `y` of this rank, and where it was slow. Rounds are of two epochs, one after the other or overlapping."""
    ys = []
    with ExpertParallelContext(transport="shared", engine="torch", timeout_s=100) as context:
        dispatcher = make_dispatcher(context, fmt, mode, most)
        context.allocate()
        watch = Watch(dispatcher, Delays(seed, rank, world) if slow else None)
        local = range(*dispatcher.geometry.starts[rank : rank + 2])
        dist.barrier()
        with hooked(dispatcher, watch.on_store, watch.on_phase):
            for number, combined in enumerate(rounds):
                # Where epochs before were not combined, a send ends only when all ranks have entered it: there the
                # order must be the same on all.
                alone = rank if number == 0 or rounds[number - 1] else 0
                ahead = random.Random(f"{seed}/{number}/{alone}").random() < 0.5
                steps = [step_inputs(seed, 2 * number + i, world, most) for i in (0, 1)]
                handles = []
                for i in (0, 1):
                    for inputs in steps if ahead and i == 0 else [] if ahead else [steps[i]]:
                        mine = inputs[rank]
                        handles.append(watch.send(*mine))
                    arrived = watch.has_arrived(handles[i])
                    check_arrival(arrived, steps[i], local)
                    if combined:
                        watch.combine_send(expert_rows(arrived, rank), arrived)
                        y = watch.combine_recv(arrived)
                        assert_same_bits(y, expected_y(steps[i], dispatcher.geometry), f"y of round {number}")
                        ys.append(y)
                if slow and not combined and rank == 0:
                    watch.hold()
        dist.barrier()
        assert watch.epoch == 2 * len(rounds)
    return ys, sorted(watch.delayed)


@pytest.mark.parametrize(
    ("world", "fmt", "mode", "most", "rounds"),
    [
        (2, "bf16", "gathered", 2, THREE),
        (3, "mxfp8", "contiguous", 5, FIVE),
        (8, "bf16", "gathered", 4, FIVE),
        (8, "nvfp4", "gathered", 1, THREE),
    ],
)
def test_slow_ranks_break_no_rule_and_change_no_bit(
    world: int, fmt: str, mode: str, most: int, rounds: tuple[bool, ...], get_pool: Any, seed: int
) -> None:
    pool, arguments = get_pool(world), (fmt, mode, most, rounds, seed)
    results = pool.run(run_rounds, *arguments, True, timeout=150)
    slow = {point for _, where in results for _, point in where}
    # A rank without tokens stores no record.
    assert slow >= set(POINTS) - {"landing", "token_flags", "combine"}
    if world < 8:
        for rank, (ys, where) in enumerate(pool.run(run_rounds, *arguments, False, timeout=150)):
            assert where == []
            for i, (y, delayed) in enumerate(zip(ys, results[rank][0], strict=True)):
                assert_same_bits(delayed, y, f"y {i} of rank {rank}")


def test_delays_come_to_every_point() -> None:
    for point in POINTS:
        for rounds, least in ((THREE, 1), (FIVE, 2)):
            who = [rank for number in range(len(rounds)) for rank in range(4) if Delays(7, rank, 4).here(number, point)]
            assert len(who) >= least
