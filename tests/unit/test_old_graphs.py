"""Graphs captured before a death: their kernels find the latch set, a replay is noticed, and what they read stays."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from moe_runtime.resilience.old_graphs import OldGraphs

pytestmark = pytest.mark.cpu_only


def words() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([7], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)


def test_a_replay_of_an_old_graph_is_noticed() -> None:
    graphs, (epoch, latch), (second, other) = OldGraphs(torch.device("cuda")), words(), words()
    graphs.check()
    graphs.end(epoch, latch)
    graphs.end(second, other)
    assert latch.tolist() == other.tolist() == [1, 1]
    graphs.check()
    epoch += 1  # as a replayed dispatch does
    with pytest.raises(ValueError, match="graph: it was captured before a rank died; capture it again"):
        graphs.check()


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_what_they_read_is_kept_on_a_gpu(place: str) -> None:
    graphs, (epoch, latch) = OldGraphs(torch.device(place)), words()
    read = torch.zeros(1)
    kept = [weakref.ref(epoch), weakref.ref(latch), weakref.ref(read)]
    graphs.end(epoch, latch)
    graphs.keep(read)
    del epoch, latch, read
    gc.collect()
    assert [reference() is not None for reference in kept] == [place == "cuda"] * 3
    graphs.check()
