"""Slots of a step's ids: always a slot of the right expert, chosen by the token alone, evenly; wrong ids stay wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.comm.errors import REFUSED_ID
from moe_runtime.placement.physical_experts import SlotTable
from moe_runtime.placement.placement import Placement, plan_placement


def tokens(num_tokens: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(num_tokens, 32, generator=rng).to(torch.bfloat16)


@given(
    load=st.lists(st.floats(0, 100), min_size=3, max_size=20),
    ranks=st.integers(1, 8),
    spare=st.integers(0, 3),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)
def test_every_slot_holds_its_expert_and_depends_on_its_token_alone(
    load: list[float], ranks: int, spare: int, dtype: torch.dtype, seed: int
) -> None:
    experts = len(load)
    plan = plan_placement(load, ranks, min(-(-experts // ranks) + spare, experts))
    rng = torch.Generator().manual_seed(seed)
    x = tokens(33, rng)
    ids = torch.rand(33, experts, generator=rng).argsort(1)[:, :3]
    ids = torch.where(torch.rand(33, 3, generator=rng) < 0.2, -1, ids).to(dtype)
    table = SlotTable(plan, ids.device)
    slots = table(ids, x)
    assert slots.dtype == dtype and slots.shape == ids.shape
    for row_ids, row_slots in zip(ids.tolist(), slots.tolist(), strict=True):
        for expert, slot in zip(row_ids, row_slots, strict=True):
            assert slot == -1 if expert == -1 else plan.slot_experts[slot] == expert
    order = torch.randperm(33, generator=rng)
    assert torch.equal(table(ids[order], x[order]), slots[order])
    assert torch.equal(table(ids[5:6], x[5:6]), slots[5:6])
    assert torch.equal(table(ids.flip(1), x), slots.flip(1))


def test_replicas_share_tokens_evenly_and_independently_of_another_expert(rng: torch.Generator) -> None:
    """Two experts on each of 7 ranks: by chance a pair of replicas gets 40000 / 49 = 816 tokens, +- 28."""
    plan = Placement(2, 7, (0, 1) * 7)
    ids = torch.tensor([[0, 1]]).expand(40000, 2)
    ranks = SlotTable(plan, ids.device)(ids, tokens(40000, rng)) // 2
    pairs = torch.bincount(ranks[:, 0] * 7 + ranks[:, 1], minlength=49).double()
    assert pairs.view(7, 7).sum(0).sub(40000 / 7).abs().max() < 6 * 70 + 40000 / 1024
    assert pairs.view(7, 7).sum(1).sub(40000 / 7).abs().max() < 6 * 70 + 40000 / 1024
    assert 0.5 < pairs.min() / 816 and pairs.max() / 816 < 1.5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_wrong_ids_never_become_slots(dtype: torch.dtype) -> None:
    """3 experts in 8 slots: ids 3 .. 7 are slots but no experts. The second of two equal ids is refused."""
    plan = plan_placement([1, 1, 1], 4, 2)
    wrong = [3, 7, 8, -2, REFUSED_ID // 2 - 1, -REFUSED_ID // 2, -REFUSED_ID, 1 - REFUSED_ID, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        wrong += [2**32, 2**63 - 1, -(2**63), REFUSED_ID, 2**32 - REFUSED_ID]
    ids = torch.tensor([[0, id, 2] for id in wrong], dtype=dtype)
    slots = SlotTable(plan, ids.device)(ids, torch.zeros(len(wrong), 8, dtype=torch.bfloat16))
    assert (slots[:, 1] >= plan.num_slots).all()
    assert [plan.slot_experts[slot] for slot in slots[:, (0, 2)].flatten()] == [0, 2] * len(wrong)
    near = (slots[:6, 1] - REFUSED_ID).tolist()
    assert near == wrong[:6]

    twice = torch.tensor([[1, 2, 1], [-1, -1, 0], [2, 2, 2], [0, 0, 1]], dtype=dtype)
    slots = SlotTable(plan, ids.device)(twice, torch.zeros(4, 8, dtype=torch.bfloat16))
    wanted = [[False, False, True], [False, False, False], [False, True, True], [False, True, False]]
    assert (slots >= plan.num_slots).tolist() == wanted
    assert (slots[2, 1:] - REFUSED_ID).tolist() == [2, 2] and int(slots[0, 2]) - REFUSED_ID == 1


def test_update_changes_the_table_in_place(rng: torch.Generator, device: torch.device) -> None:
    first, second = Placement.contiguous(6, 2), Placement(6, 2, (5, 4, 3, 2, 1, 0))
    table = SlotTable(first, device)
    addresses = [value.data_ptr() for value in vars(table).values() if isinstance(value, torch.Tensor)]
    ids, x = torch.tensor([[0, 5, -1]], device=device), tokens(1, rng).to(device)
    assert table(ids, x).tolist() == [[0, 5, -1]]
    table.update(second)
    assert table(ids, x).tolist() == [[5, 0, -1]]
    assert addresses == [value.data_ptr() for value in vars(table).values() if isinstance(value, torch.Tensor)]


def test_no_tokens_and_tokens_that_are_not_contiguous(rng: torch.Generator) -> None:
    table = SlotTable(Placement(2, 4, (0, 1) * 4), torch.device("cpu"))
    ids, x = torch.tensor([[0, 1]] * 9), tokens(18, rng)
    assert table(ids[:0], x[:0]).shape == (0, 2)
    assert torch.equal(table(ids, x[::2]), table(ids, x[::2].contiguous()))
    assert torch.equal(table(ids, x[:9].clone().requires_grad_()), table(ids, x[:9]))
    shifted = torch.zeros(8 + 3, dtype=torch.bfloat16)
    shifted[3:] = x[0, :8]
    assert torch.equal(table(ids[:1], shifted[3:].view(1, 8)), table(ids[:1], x[:1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_idx": [[0]]}, "topk_idx: expected a tensor, got list"),
        ({"topk_idx": torch.zeros(2, 1)}, r"topk_idx: expected torch\.int32 or torch\.int64, got torch\.float32"),
        ({"topk_idx": torch.zeros(2, dtype=torch.int64)}, r"topk_idx: expected two dimensions, got shape \[2\]"),
        ({"topk_idx": torch.zeros(3, 1, dtype=torch.int64)}, "topk_idx: expected a row for each of 2 tokens, got 3"),
        ({"topk_idx": torch.zeros(2, 1, dtype=torch.int64, device="meta")}, "topk_idx: expected device cpu, got meta"),
        ({"x": torch.zeros(2, 32)}, r"x: expected torch\.bfloat16, got torch\.float32"),
        ({"x": torch.zeros(2, 4, dtype=torch.bfloat16)}, "x: expected at least 8 numbers in a token, got 4"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    table = SlotTable(Placement.contiguous(2, 1), torch.device("cpu"))
    arguments = {
        "topk_idx": torch.zeros(2, 1, dtype=torch.int64),
        "x": torch.zeros(2, 32, dtype=torch.bfloat16),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        table(**arguments)  # type: ignore[arg-type]
