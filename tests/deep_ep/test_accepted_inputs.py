"""What `Buffer` takes where callers differ: ids, weights and numbers of tokens at their edges, as DeepEP takes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.errors import CapacityError, MoERuntimeError, RoutingError
from moe_runtime.deep_ep import Buffer

EXPERTS, MOST, HIDDEN = 8, 6, 128

Routing = tuple[torch.Tensor, torch.Tensor]


def routing(ids: list[list[int]], weights: float | list[list[float]] = 0.5) -> Routing:
    topk_idx = torch.tensor(ids, dtype=torch.int64).view(len(ids), -1)
    if isinstance(weights, float):
        return topk_idx, torch.full(topk_idx.shape, weights)
    return topk_idx, torch.tensor(weights)


def strided(given: Routing) -> Routing:
    """The same values, column after column."""
    topk_idx, weights = (part.t().contiguous().t() for part in given)
    assert not topk_idx.is_contiguous()
    return topk_idx, weights


def of_one_column(given: Routing) -> Routing:
    """The same values with strides that torch takes for contiguous, and no view of another dtype has."""
    topk_idx, weights = (
        torch.empty_strided(part.shape, (1, len(part)), dtype=part.dtype).copy_(part) for part in given
    )
    assert topk_idx.is_contiguous() and topk_idx.stride() == (1, len(topk_idx))
    return topk_idx, weights


NAN, INF = math.nan, math.inf
CASES: dict[str, Callable[[int], Routing]] = {
    "twice": lambda rank: routing([[2, 2, 5], [5, 2, 5]], [[0.5, 0.25, 1.0], [1.0, 2.0, -3.0]]),
    "all entries alike": lambda rank: routing([[7, 7, 7], [0, 0, 0]]),
    "as many of an expert as there are tokens": lambda rank: routing([[3, 3, 3], [3, 3, 3]]),
    "more entries than experts": lambda rank: routing([[0, 1, 2, 3, 4, 5, 6, 7, 0, 4]]),
    "no expert in a row": lambda rank: routing([[-1, -1, -1], [1, -1, 2]]),
    "no expert at all": lambda rank: routing([[-1, -1, -1]] * 3),
    "no expert on one rank": lambda rank: routing([[-1, -1]] if rank else [[4, 1]]),
    "other negative ids": lambda rank: routing([[-2, 6, -(2**31)], [-7, -7, 1]]),
    "no tokens on one rank": lambda rank: routing([[1, 6]] if rank else []) if rank else (no_ids(2), no_weights(2)),
    "no tokens at all": lambda rank: (no_ids(3), no_weights(3)),
    "as many tokens as there may be": lambda rank: routing([[t, (t + 3) % EXPERTS] for t in range(MOST)]),
    "weights of 0": lambda rank: routing([[1, 4], [4, 4]], 0.0),
    "weights of NaN": lambda rank: routing([[1, 4], [4, 4], [2, -1]], [[NAN, 1.0], [1.0, NAN], [1.0, 1.0]]),
    "weights of Inf": lambda rank: routing([[1, 4], [4, 4]], [[INF, 1.0], [INF, -INF]]),
    "any weight without an expert": lambda rank: routing([[1, -1], [-1, -3]], [[1.0, NAN], [NAN, INF]]),
    "any strides": lambda rank: strided(routing([[1, 2, 2], [3, -1, 7]])),
    "any strides of one choice": lambda rank: of_one_column(routing([[1], [3], [-1]])),
    "any strides of no tokens on one rank": lambda rank: of_one_column(
        routing([[1], [6]]) if rank else (no_ids(1), no_weights(1))
    ),
}


def no_ids(top_k: int) -> torch.Tensor:
    return torch.empty(0, top_k, dtype=torch.int64)


def no_weights(top_k: int) -> torch.Tensor:
    return torch.empty(0, top_k)


def tokens(rank: int, count: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(count, HIDDEN, generator=g).to(torch.bfloat16)


def a_buffer(world: int, top_k: int) -> Buffer:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, world, EXPERTS)
    return Buffer(dist.group.WORLD, 1 << 22, num_bytes, low_latency_mode=True, explicitly_destroy=True)


def low_latency(rank: int, world: int, name: str) -> None:
    """Rows of each entry come, are doubled, and go home by their own weights, on each rank summed by itself first."""
    case, per_rank = CASES[name], EXPERTS // world
    topk_idx, weights = case(rank)
    everyone = [case(r)[0] for r in range(world)]
    x = tokens(rank, topk_idx.shape[0])
    buffer = a_buffer(world, topk_idx.shape[1])
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, MOST, EXPERTS, use_fp8=False)
    assert isinstance(rows, torch.Tensor) and hook is None
    for e in range(per_rank):
        came = [
            (r, t)
            for r, ids in enumerate(everyone)
            for t in range(ids.shape[0])
            for id in ids[t].tolist()
            if id == rank * per_rank + e
        ]
        assert int(counts[e]) == len(came)
        for row, (r, t) in enumerate(came):
            assert torch.equal(rows[e, row], tokens(r, everyone[r].shape[0])[t])
    y, _, _ = buffer.low_latency_combine(rows * 2, topk_idx, weights, handle)
    for t in range(x.shape[0]):
        total = torch.zeros(HIDDEN)
        for r in range(world):
            of_rank = torch.zeros(HIDDEN)
            for k, expert in enumerate(topk_idx[t].tolist()):
                if expert >= 0 and expert // per_rank == r:
                    of_rank = of_rank + weights[t, k] * (x[t] * 2).float()
            total = total + of_rank.to(torch.bfloat16).float()
        assert torch.equal(y[t].isnan(), total.isnan())
        assert torch.equal(y[t].nan_to_num(), total.to(torch.bfloat16).nan_to_num())
    buffer.destroy()


def normal(rank: int, world: int, name: str) -> None:
    """The same routing in normal mode: each entry comes with its id, and a row goes home once."""
    case, per_rank = CASES[name], EXPERTS // world
    topk_idx, weights = case(rank)
    x = tokens(rank, topk_idx.shape[0])
    buffer = a_buffer(world, topk_idx.shape[1])
    per_rank_counts, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    got, ids, came_weights, experts, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank_counts,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=weights,
    )
    wanted = [
        ([id - rank * per_rank if id // per_rank == rank and id >= 0 else -1 for id in row], r, t)
        for r in range(world)
        for t, row in enumerate(case(r)[0].tolist())
    ]
    wanted = [row for row in wanted if any(id >= 0 for id in row[0])]
    assert ids is not None and isinstance(got, torch.Tensor) and handle is not None
    assert ids.tolist() == [row[0] for row in wanted]
    assert came_weights is not None
    sent = [torch.where(torch.tensor(local) >= 0, case(r)[1][t], 0) for local, r, t in wanted]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(came_weights, sent, strict=True))
    assert experts == [sum(row[0].count(e) for row in wanted) for e in range(per_rank)]
    for row, (_, r, t) in enumerate(wanted):
        assert torch.equal(got[row], tokens(r, case(r)[0].shape[0])[t])
    y, _, _ = buffer.combine(got, handle)
    assert torch.equal(y, (x.float() * in_rank.sum(1)[:, None]).to(torch.bfloat16))
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("mode", [low_latency, normal])
@pytest.mark.parametrize("name", CASES)
def test_inputs_that_are_taken(name: str, mode: Callable[..., None], get_pool: Any) -> None:
    get_pool(2).run(mode, name)


def refused(rank: int, world: int, error: type[MoERuntimeError], match: str, ids: list[list[int]]) -> None:
    topk_idx, _ = routing(ids)
    buffer = a_buffer(world, topk_idx.shape[1])
    with pytest.raises(error, match=match):
        # A rank that has its rows before another one fails learns of that in its next call.
        for _ in range(2):
            buffer.low_latency_dispatch(tokens(rank, len(ids)), topk_idx, MOST, EXPERTS, use_fp8=False)
    # The group has failed, whoever found it.
    for context in buffer._contexts:
        context.close()


@pytest.mark.cpu_only
def test_ids_and_rows_without_a_place_are_errors(get_pool: Any) -> None:
    """DeepEP writes to a wrong place for them."""
    get_pool(2).run(refused, RoutingError, f"expert id {EXPERTS} of token 0 of rank", [[1, EXPERTS]])
    get_pool(2).run(refused, RoutingError, "is out of range", [[1, 2**32 + 1]])
    get_pool(2).run(refused, CapacityError, "one expert of rank 0, which has room for 12", [[3, 3, 3]] * 5)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"topk_idx": torch.zeros(2, 2, dtype=torch.int32)}, "topk_idx: expected torch.int64, got torch.int32"),
        ({"topk_idx": torch.zeros(3, 2, dtype=torch.int64)}, r"topk_idx: expected shape \[2, any\], got \[3, 2\]"),
        (
            {"x": torch.zeros(MOST + 1, HIDDEN).bfloat16(), "topk_idx": torch.full((MOST + 1, 2), -1)},
            "x: expected at most max_tokens_per_rank = 6 tokens, got 7",
        ),
    ],
)
def test_ids_of_wrong_kinds_are_named(change: dict[str, torch.Tensor], match: str, get_pool: Any) -> None:
    get_pool(1).run(wrong_kind, change, match)


def wrong_kind(rank: int, world: int, change: dict[str, torch.Tensor], match: str) -> None:
    buffer = a_buffer(world, 2)
    given = {"x": torch.zeros(2, HIDDEN, dtype=torch.bfloat16), "topk_idx": torch.zeros(2, 2, dtype=torch.int64)}
    given |= change
    with pytest.raises(ValueError, match=match):
        buffer.low_latency_dispatch(given["x"], given["topk_idx"], MOST, EXPERTS, use_fp8=False)
    for context in buffer._contexts:
        context.close()
