"""Ids in the numbering of a rank's own experts: the kernel, emulated or on a GPU, and torch, against Python."""

from __future__ import annotations

import math

import pytest
import torch

from moe_runtime.kernels.exchange.local_ids import local_ids
from tests.support.virtual_exchange import engine

__all__ = ["engine"]

NUM_EXPERTS = 20


def wanted_id(expert: int, weight: float, first: int, num_local: int) -> int:
    if math.isnan(weight) or expert == -1:
        return -1
    if not 0 <= expert < NUM_EXPERTS:
        return num_local
    return expert - first if first <= expert < first + num_local else -1


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 3), (1, 1), (13, 8), (257, 2)])
@pytest.mark.parametrize(("first", "num_local"), [(0, 7), (7, 6), (13, 7)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_local_ids(
    tokens: int,
    top_k: int,
    first: int,
    num_local: int,
    dtype: torch.dtype,
    engine: str,
    device: torch.device,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-3, NUM_EXPERTS + 3, (tokens, top_k), generator=generator, dtype=dtype)
    weights = torch.randn(tokens, top_k, generator=generator)
    weights[torch.rand(tokens, top_k, generator=generator) < 0.2] = float("nan")
    found = local_ids(ids.to(device), weights.to(device), NUM_EXPERTS, first, num_local, engine)
    wanted = [
        [wanted_id(int(expert), float(weight), first, num_local) for expert, weight in zip(*row, strict=True)]
        for row in zip(ids.tolist(), weights.tolist(), strict=True)
    ]
    assert found.tolist() == wanted and found.dtype == torch.int32


def test_all_experts_here(engine: str, device: torch.device, seed: int) -> None:
    """Ids stay as they are, wrong ones too, and routes with NaN weights are none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-5, NUM_EXPERTS + 5, (33, 4), generator=generator, dtype=torch.int32)
    weights = torch.randn(33, 4, generator=generator)
    weights[::5] = float("nan")
    found = local_ids(ids.to(device), weights.to(device), NUM_EXPERTS, 0, NUM_EXPERTS, engine)
    assert found.tolist() == ids.masked_fill(weights.isnan(), -1).tolist()
