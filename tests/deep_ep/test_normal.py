"""Normal mode of `moe_runtime.deep_ep.Buffer` over processes, against a plain model of DeepEP's layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.deep_ep import Buffer, Config, group_buffer, normal_handle
from moe_runtime.deep_ep.sizes import normal_bytes
from moe_runtime.deep_ep.utils.math import per_token_cast_to_fp8

HIDDEN, EXPERTS, TOP_K = 256, 16, 3


@dataclass(frozen=True)
class Tokens:
    """What a rank brings: bf16 `[T, H]`, int64 `[T, K]`, fp32 `[T, K]`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def goes_to(self, rank: int, per_rank: int) -> torch.Tensor:
        return ((self.ids >= rank * per_rank) & (self.ids < (rank + 1) * per_rank)).any(dim=1)


def tokens_of(seed: int, rank: int, count: int, experts: int = EXPERTS) -> Tokens:
    g = torch.Generator().manual_seed(seed * 7919 + rank)
    x = torch.randn(count, HIDDEN, generator=g).to(torch.bfloat16)
    ids = torch.rand(count, experts, generator=g).argsort(dim=1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, -1, ids)
    return Tokens(x, ids, torch.randn(count, TOP_K, generator=g))


def a_buffer(tokens: int = 32, **settings: Any) -> Buffer:
    group = dist.group.WORLD
    num_bytes = normal_bytes(HIDDEN, dist.get_world_size(), tokens)
    return Buffer(group, num_bytes, explicitly_destroy=True, **settings)


def dispatch_and_combine(rank: int, world: int, counts: list[int], fp8: bool, room: int, seed: int) -> None:
    per_rank = EXPERTS // world
    everyone = [tokens_of(seed, r, counts[r % len(counts)]) for r in range(world)]
    mine = everyone[rank]
    buffer = a_buffer(room)
    layout = buffer.get_dispatch_layout(mine.ids, EXPERTS)
    in_rank = torch.stack([mine.goes_to(r, per_rank) for r in range(world)], dim=1)
    assert torch.equal(layout[3], in_rank)
    assert layout[0].tolist() == in_rank.sum(dim=0).tolist() and layout[0].dtype == torch.int32
    assert layout[2].tolist() == [int((mine.ids == e).sum()) for e in range(EXPERTS)]

    # What must come here: tokens of rank 0, 1, ... in their order.
    arriving = [
        (r, t) for r, data in enumerate(everyone) for t in data.goes_to(rank, per_rank).nonzero()[:, 0].tolist()
    ]
    sent: Any = per_token_cast_to_fp8(mine.x) if fp8 else mine.x
    names = dict(num_tokens_per_rank=layout[0], num_tokens_per_expert=layout[2], is_token_in_rank=layout[3])
    for with_top_k in (False, True):
        routing = dict(topk_idx=mine.ids, topk_weights=mine.weights) if with_top_k else {}
        got, ids, weights, experts, handle, _ = buffer.dispatch(sent, **names, **routing, expert_alignment=4)
        assert handle is not None and experts is not None
        for number in range(2 if fp8 else 1):
            part = got[number] if fp8 else got
            each = [(per_token_cast_to_fp8(d.x)[number] if fp8 else d.x) for d in everyone]
            expected = [each[r][t] for r, t in arriving]
            assert part.shape[0] == len(arriving) and part.is_contiguous()
            for row, want in zip(part, expected, strict=True):
                assert torch.equal(row.view(torch.uint8), want.view(torch.uint8))
        local = [(everyone[r].ids[t] - rank * per_rank, everyone[r].weights[t]) for r, t in arriving]
        exact = [sum(int((i == e).sum()) for i, _ in local) for e in range(per_rank)]
        assert experts == [-(-c // 4) * 4 for c in exact]
        if with_top_k:
            assert ids is not None and weights is not None and ids.dtype == torch.int64
            for row, (i, w) in enumerate(local):
                here = (i >= 0) & (i < per_rank)
                assert torch.equal(ids[row], torch.where(here, i, -1))
                assert torch.equal(weights[row], torch.where(here, w, 0.0))
        else:
            assert ids is None and weights is None
        prefix, _, _, source_tokens, same, _ = handle
        assert source_tokens is not None and source_tokens.tolist() == [t for _, t in arriving]
        assert same is not None and torch.equal(same, in_rank) and prefix is not None
        for r in range(world):
            upto = torch.tensor([int(d.goes_to(r, per_rank).sum()) for d in everyone]).cumsum(0)
            assert prefix[:, r].tolist() == upto.tolist()

        # Other tokens take the same way, as often as one likes, also after other steps.
        for turn in range(3):
            others = [tokens_of(seed + 100 + turn, r, counts[r % len(counts)]) for r in range(world)]
            again: Any = per_token_cast_to_fp8(others[rank].x) if fp8 else others[rank].x
            rows, none, no_weights, no_list, no_handle, _ = buffer.dispatch(again, handle=handle)
            assert (none, no_weights, no_list, no_handle) == (None, None, None, None)
            each = [(per_token_cast_to_fp8(d.x)[0] if fp8 else d.x) for d in others]
            rows = rows[0] if fp8 else rows
            for row, (r, t) in zip(rows, arriving, strict=True):
                assert torch.equal(row.view(torch.uint8), each[r][t].view(torch.uint8))

        # Combine: fp32 sums of the rows, ranks ascending, as often as one likes.
        for turn in range(3):
            outputs = [
                torch.randn(HIDDEN, generator=torch.Generator().manual_seed(turn + r * 91 + rank * 17 + t))
                for r, t in arriving
            ]
            out = torch.stack(outputs).to(torch.bfloat16) if outputs else torch.empty(0, HIDDEN, dtype=torch.bfloat16)
            row_weights = torch.randn(len(arriving), TOP_K, generator=torch.Generator().manual_seed(rank + turn))
            biases = tuple(tokens_of(seed + 5 + b, rank, counts[rank % len(counts)]).x for b in range(turn))
            bias: Any = biases if turn == 2 else biases[0] if biases else None
            y, y_weights, _ = buffer.combine(out, handle, topk_weights=row_weights if turn else None, bias=bias)
            expected = torch.zeros(mine.x.shape[0], HIDDEN)
            for one in biases:
                expected += one.float()
            expected_weights = torch.zeros(mine.x.shape[0], TOP_K)
            for r in range(world):
                rows_of = [
                    (s, t) for s, d in enumerate(everyone) for t in d.goes_to(r, per_rank).nonzero()[:, 0].tolist()
                ]
                their_weights = torch.randn(len(rows_of), TOP_K, generator=torch.Generator().manual_seed(r + turn))
                for number, (s, t) in enumerate(rows_of):
                    if s != rank:
                        continue
                    row = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(turn + s * 91 + r * 17 + t))
                    expected[t] += row.to(torch.bfloat16).float()
                    expected_weights[t] += their_weights[number]
            assert torch.equal(y, expected.to(torch.bfloat16))
            assert (y_weights is None) == (turn == 0)
            if y_weights is not None:
                assert torch.equal(y_weights, expected_weights)
    buffer.destroy()


def other_numbers_of_rows(rank: int, world: int, seed: int, device: str = "cpu") -> None:
    """Dispatches whose numbers of rows the ones before do not foretell: none, few, many, more than a step takes."""
    buffer = a_buffer(64)
    steps = [(9, 1.0), (9, 1.0), (9, 0.0), (9, 1.0), (64, 0.1), (64, 1.0), (3, 1.0), (150, 1.0), (150, 0.4), (0, 1.0)]
    for step, (count, part) in enumerate(steps):
        everyone = [tokens_of(seed + step, r, count) for r in range(world)]
        masks = []
        for r in range(world):
            g = torch.Generator().manual_seed(seed * 31 + step * 7 + r)
            masks.append(torch.rand(count, world, generator=g) < part)
        mine, in_rank = everyone[rank], masks[rank].to(device)
        per_expert = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
        got, _, _, experts, handle, _ = buffer.dispatch(
            mine.x.to(device),
            num_tokens_per_rank=in_rank.sum(dim=0, dtype=torch.int32),
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
        )
        expected = torch.cat([data.x[mask[:, rank]] for data, mask in zip(everyone, masks, strict=True)])
        assert isinstance(got, torch.Tensor) and handle is not None and experts is not None
        assert got.is_contiguous() and torch.equal(got.cpu(), expected), f"step {step}"
        source_tokens = torch.cat([mask[:, rank].nonzero()[:, 0] for mask in masks])
        assert handle[3] is not None and torch.equal(handle[3].cpu().to(torch.int64), source_tokens), f"step {step}"
        y, _, _ = buffer.combine(got, handle)
        times = masks[rank].sum(dim=1, keepdim=True)
        assert torch.equal(y.cpu(), (mine.x.float() * times).to(torch.bfloat16)), f"step {step}"
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 4])
def test_other_numbers_of_rows(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world).run(other_numbers_of_rows, seed)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("fp8", [False, True])
def test_tokens_arrive_and_come_home(world: int, fp8: bool, get_pool: Any, seed: int) -> None:
    get_pool(world).run(dispatch_and_combine, [5, 0, 9, 1], fp8, 32, seed)


@pytest.mark.cpu_only
def test_more_tokens_than_a_step_has_room_for(get_pool: Any, seed: int) -> None:
    get_pool(4).run(dispatch_and_combine, [21, 0, 9, 8], False, 8, seed)


def many_sizes(rank: int, world: int, seed: int) -> None:
    """Dispatches of several sizes over the same memory, whose handles are used later and in another order.

    Most bring more or fewer tokens than the one before, whose size the first step has.
    """
    least, normal_handle.LEAST_ROOM = normal_handle.LEAST_ROOM, 2
    try:
        buffer = a_buffer(16)
        kept = []
        for turn, sizes in enumerate([[3, 2], [9, 0], [1, 1], [40, 5], [0, 0], [16, 7]]):
            everyone = [tokens_of(seed + turn, r, sizes[r % 2]) for r in range(world)]
            mine, local = everyone[rank], EXPERTS // world
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.ids, EXPERTS)
            counts = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
            rows, _, _, _, handle, _ = buffer.dispatch(mine.x, **counts)
            assert handle is not None
            here = [data.goes_to(rank, local).nonzero()[:, 0] for data in everyone]
            assert torch.equal(rows, torch.cat([data.x[tokens] for data, tokens in zip(everyone, here, strict=True)]))
            assert handle[3] is not None and handle[3].tolist() == torch.cat(here).tolist()
            kept.append((mine, in_rank, rows, handle))
        assert len({step.room for _, _, _, handle in kept for step in handle.steps}) > 2
        # 9 after 4, 1 after 16, 40 after 2, 0 after 16, 16 after 2; the memory has room for 16 at a time.
        assert [[step.room for step in handle.steps] for *_, handle in kept] == [
            [4],
            [4, 8],
            [16],
            [2, 16, 16, 8],
            [16],
            [2, 16],
        ]
        for mine, in_rank, rows, handle in reversed(kept):
            again, *_ = buffer.dispatch(mine.x, handle=handle)
            assert torch.equal(again, rows)
            y, _, _ = buffer.combine(rows, handle)
            assert torch.equal(y, (mine.x.float() * in_rank.sum(dim=1, keepdim=True)).to(torch.bfloat16))
        buffer.destroy()
    finally:
        normal_handle.LEAST_ROOM = least


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4])
def test_steps_of_many_sizes_share_the_memory(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world).run(many_sizes, seed)


def worst_case(rank: int, world: int, seed: int) -> None:
    mine = tokens_of(seed, rank, 6)
    buffer = a_buffer()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.ids, EXPERTS)
    names = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
    routing = dict(topk_idx=mine.ids, topk_weights=mine.weights)
    exact, ids, weights, _, _, _ = buffer.dispatch(mine.x, **names, **routing)
    rows, worst_ids, worst_weights, experts, handle, _ = buffer.dispatch(
        mine.x, **names, **routing, num_worst_tokens=40
    )
    assert experts == [] and handle is not None and worst_ids is not None and worst_weights is not None
    count = exact.shape[0]
    assert rows.shape[0] == worst_ids.shape[0] == 40 and torch.equal(rows[:count], exact)
    assert torch.equal(worst_ids[:count], ids) and (worst_ids[count:] == -1).all()
    assert torch.equal(worst_weights[:count], weights) and (worst_weights[count:] == 0).all()
    y, _, _ = buffer.combine(rows, handle)
    times = in_rank.sum(dim=1, keepdim=True)
    assert torch.equal(y, (mine.x.float() * times).to(torch.bfloat16))
    buffer.destroy()


@pytest.mark.cpu_only
def test_worst_case_rows_are_marked(get_pool: Any, seed: int) -> None:
    get_pool(2).run(worst_case, seed)


def interpreted(rank: int, world: int, counts: list[int], room: int, seed: int) -> None:
    contexts = group_buffer.ExpertParallelContext
    try:
        group_buffer.ExpertParallelContext = partial(contexts, engine="triton")  # type: ignore[misc, assignment]
        for fp8 in (False, True):
            dispatch_and_combine(rank, world, counts, fp8, room, seed)
        worst_case(rank, world, seed)
    finally:
        group_buffer.ExpertParallelContext = contexts  # type: ignore[misc]


@pytest.mark.cpu_only
def test_interpreted_kernels_pack_and_unpack_the_same_rows(get_pool: Any, seed: int) -> None:
    get_pool(2).run(interpreted, [5, 3], 4, seed)


def test_a_config_hints_the_bytes_of_its_tokens() -> None:
    assert Config().get_nvl_buffer_size_hint(2 * 7168, 8) == normal_bytes(7168, 8, 4096)
    assert Config().get_rdma_buffer_size_hint(2 * 7168, 8) == 0
