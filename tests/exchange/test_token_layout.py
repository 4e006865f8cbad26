"""Which tokens go where: the kernel, emulated or on a GPU, and torch, against Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime.kernels.exchange import layout
from moe_runtime.kernels.exchange.layout import dispatch_layout
from tests.support.virtual_exchange import engine, poisoned_memory

__all__ = ["engine", "poisoned_memory"]


def counted(ids: list[list[int]], num_experts: int, num_ranks: int) -> tuple[list[int], list[int], list[list[bool]]]:
    """`dispatch_layout`, one id after the other."""
    per_rank, per_expert, in_rank = [0] * num_ranks, [0] * num_experts, []
    for row in ids:
        low = [(one + 2**31) % 2**32 - 2**31 for one in row]
        known = [one for one in low if 0 <= one < num_experts]
        owners = {one // (num_experts // num_ranks) for one in known}
        for one in known:
            per_expert[one] += 1
        for rank in owners:
            per_rank[rank] += 1
        in_rank.append([rank in owners for rank in range(num_ranks)])
    return per_rank, per_expert, in_rank


def check(ids: torch.Tensor, num_experts: int, num_ranks: int, engine: Any) -> None:
    per_rank, per_expert, in_rank = dispatch_layout(ids, num_experts, num_ranks, engine=engine)
    assert (per_rank.dtype, per_expert.dtype, in_rank.dtype) == (torch.int32, torch.int32, torch.bool)
    found = per_rank.tolist(), per_expert.tolist(), in_rank.tolist()
    assert found == counted(ids.tolist(), num_experts, num_ranks)
    assert in_rank.view(torch.uint8).max().item() <= 1 if in_rank.numel() else True


@pytest.mark.parametrize("of_a_block", [layout.TOKENS_OF_A_BLOCK, 300])
@pytest.mark.parametrize("tokens", [0, 1, 31, 1025])
@pytest.mark.parametrize(("num_experts", "num_ranks", "top_k"), [(6, 1, 1), (20, 4, 9), (256, 8, 8), (64, 32, 3)])
def test_tokens_are_counted(
    num_experts: int,
    num_ranks: int,
    top_k: int,
    tokens: int,
    of_a_block: int,
    engine: Any,
    device: torch.device,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one block and by several, ids of no expert and repeated ones among them, in rows that are no neighbours."""
    monkeypatch.setattr(layout, "TOKENS_OF_A_BLOCK", of_a_block)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-3, num_experts + 3, (tokens, top_k), generator=generator).to(device)
    check(ids, num_experts, num_ranks, engine)
    check(ids.T.contiguous().T, num_experts, num_ranks, engine)


@pytest.mark.parametrize("ids", [[2**32 + 3], [2**31], [-(2**40)], [8], [-5], [7, 7, 7]])
def test_any_id_is_taken(ids: list[int], engine: Any, device: torch.device) -> None:
    """Payload has the lower 32 bits of an id: the layout looks at the same."""
    check(torch.tensor([ids, ids], device=device), 8, 2, engine)


def test_all_tokens_go_to_one_expert(engine: Any, device: torch.device) -> None:
    check(torch.full((2000, 2), 5, dtype=torch.int64, device=device), 8, 4, engine)


def test_more_experts_than_a_block_counts_are_counted_in_torch(device: torch.device, seed: int) -> None:
    assert not layout.layout_kernel_takes(layout.MOST_COUNTS, 2) and not layout.layout_kernel_takes(64, 64)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, layout.MOST_COUNTS, (20, 3), generator=generator).to(device)
    check(ids, layout.MOST_COUNTS, 2, "cuda")
