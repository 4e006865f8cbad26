"""Counters of a layer: exact under every routing, captured with a step, read without a wait."""

from __future__ import annotations

import pytest
import torch

from moe_runtime import LayerCounters, LayerCounts, MoELayer, Placement, imbalance
from moe_runtime.kernels.step_counts import BLOCK_T, HEAD, count_step
from moe_runtime.virtual import VirtualRanks, virtual_contexts
from tests.support.exchange_data import EXPERTS, HIDDEN, TOP_K, RankInput, config, placements, rank_input
from tests.support.waiting import synchronize


def expected(
    steps: list[list[RankInput]], layers: list[MoELayer], slots: list[list[torch.Tensor]], starts: tuple[int, ...]
) -> list[LayerCounts]:
    """Counts of each rank in plain loops; `slots[step][rank]` are the slots that take its tokens."""
    found = []
    for rank, layer in enumerate(layers):
        experts, rows, sent, tokens = [0] * EXPERTS, 0, 0, 0
        for step, inputs in enumerate(steps):
            tokens += inputs[rank].x.shape[0]
            for ids in inputs[rank].topk_idx.tolist():
                for expert in ids:
                    if expert >= 0:
                        experts[expert] += 1
            for source, part in enumerate(slots[step]):
                for ids in part.tolist():
                    owners = [next(r for r in range(len(layers)) if i < starts[r + 1]) for i in ids if i >= 0]
                    rows += owners.count(rank)
                    sent += len(set(owners) - {rank}) if source == rank else 0
        geometry = layer.dispatcher.geometry
        record, partial = geometry.record.record_bytes, geometry.partial_bytes
        found.append(LayerCounts(len(steps), tokens, tuple(experts), rows, sent * record, sent * partial))
    return found


def count_by(layer: MoELayer, engine: str) -> LayerCounters:
    """Count the layer's steps by this engine, whatever runs the layer: interpreted, a step takes seconds."""
    layer.counters = LayerCounters(layer.dispatcher.geometry, EXPERTS, layer.context.device, engine)
    return layer.counters


@pytest.mark.parametrize("engine", ["torch", "triton"])
@pytest.mark.parametrize("placed", [False, True])
def test_counts_are_exact(placed: bool, engine: str, device: torch.device, seed: int) -> None:
    world = 3
    tokens = [(5, 0, 3), (0, 0, 0), (1, 7, 2), (4, 4, 4)]
    routings = ["random", "random", "random", "one"]
    steps = [
        [rank_input(seed + step, rank, count, HIDDEN, EXPERTS, TOP_K, routing) for rank, count in enumerate(counts)]
        for step, (counts, routing) in enumerate(zip(tokens, routings, strict=True))
    ]
    placement: Placement | None = placements(world)[0] if placed else None
    with VirtualRanks(
        config("nvfp4"), world, lambda layer: layer.load_random(1), device=device, placement=placement
    ) as ranks:
        counters = [count_by(layer, engine) for layer in ranks.layers]
        assert counters[0].poll() == LayerCounts(0, 0, (0,) * EXPERTS, 0, 0, 0) and imbalance([counters[0].poll()]) == 1
        slots: list[list[torch.Tensor]] = []
        for step, inputs in enumerate(steps):
            moved = [data.to(device) for data in inputs]
            # Ids of 32 bits, and no neighbours in memory, count alike.
            ids = [i.topk_idx.int().T.contiguous().T if step % 2 else i.topk_idx for i in moved]
            slots.append(
                [
                    data.topk_idx if layer.slots is None else layer.slots(data.topk_idx, data.x)
                    for layer, data in zip(ranks.layers, moved, strict=True)
                ]
            )
            ranks([i.x for i in moved], [(i, data.topk_weights) for i, data in zip(ids, moved, strict=True)])
        found = []
        for counter in counters:
            counter.poll()
            synchronize(device)
            found.append(counter.poll())
        starts = ranks.layers[0].dispatcher.geometry.starts
        assert found == expected(steps, ranks.layers, slots, starts)
    assert sum(counts.rows for counts in found) == sum(sum(counts.expert_tokens) for counts in found)
    rows = [counts.rows for counts in found]
    assert imbalance(found) == pytest.approx(max(rows) / (sum(rows) / world))


def test_bytes_between_hosts_are_counted_once_for_each(device: torch.device, seed: int) -> None:
    """Tokens that go to several ranks of a host cross the network once; those of the own host do not."""
    world, num_hosts = 4, 2
    steps = [
        [rank_input(seed + step, rank, 5 + rank, HIDDEN, EXPERTS, TOP_K) for rank in range(world)] for step in range(2)
    ]
    with VirtualRanks(
        config("nvfp4"), world, lambda layer: layer.load_random(1), device=device, num_hosts=num_hosts
    ) as ranks:
        counters = [layer.count_steps() for layer in ranks.layers]
        geometry = ranks.layers[0].dispatcher.geometry
        for inputs in steps:
            moved = [data.to(device) for data in inputs]
            ranks([i.x for i in moved], [(i.topk_idx, i.topk_weights) for i in moved])
        for rank, counter in enumerate(counters):
            sent = 0
            for ids in (token for inputs in steps for token in inputs[rank].topk_idx.tolist()):
                owners = (next(r for r in range(world) if i < geometry.starts[r + 1]) for i in ids if i >= 0)
                sent += len({owner // 2 for owner in owners} - {rank // 2})
            found = counter.read()
            assert sent > 0
            assert found.dispatch_bytes == sent * geometry.record.record_bytes
            assert found.combine_bytes == sent * geometry.partial_bytes


@pytest.mark.parametrize("rows, expected", [((4, 0, 2), 2), ((3, 3, 3), 1), ((0, 0), 1)])
def test_imbalance_is_the_most_rows_over_the_mean(rows: tuple[int, ...], expected: float) -> None:
    assert imbalance([LayerCounts(1, 1, (), count, 0, 0) for count in rows]) == expected


def test_differences_are_of_the_time_between() -> None:
    earlier, later = LayerCounts(1, 2, (3, 4), 5, 6, 7), LayerCounts(11, 22, (33, 44), 55, 66, 77)
    assert later - earlier == LayerCounts(10, 20, (30, 40), 50, 60, 70)
    with pytest.raises(ValueError, match="shorter"):
        later - LayerCounts(1, 2, (3,), 5, 6, 7)


@pytest.mark.parametrize("engine", ["torch", "triton"])
def test_tokens_of_several_programs(engine: str, device: torch.device, seed: int) -> None:
    """More tokens than one program of the kernel takes; counting begins anew nowhere."""
    count = BLOCK_T + 9
    data = rank_input(seed, 0, count, HIDDEN, EXPERTS, TOP_K).to(device)
    with virtual_contexts(1, device=device)[0] as context:
        layer = MoELayer(config(max_tokens_per_rank=count), context)
        layer.load_random(1)
        assert layer.counters is None and layer.count_steps() is layer.count_steps() is layer.counters
        counters = count_by(layer, engine)
        for _ in range(2):
            layer(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights)
        counters.poll()
        synchronize(device)
        found = counters.poll()
        assert counters.read() == found
    experts = torch.bincount(data.topk_idx[data.topk_idx >= 0], minlength=EXPERTS).cpu()
    assert found == LayerCounts(2, 2 * count, tuple((2 * experts).tolist()), int(2 * experts.sum()), 0, 0)


@pytest.mark.parametrize("engine", ["torch", "triton"])
def test_ids_that_do_not_exist_count_nowhere(engine: str, device: torch.device) -> None:
    room = torch.zeros(HEAD + 3 + 8, dtype=torch.int64, device=device)
    ids = torch.tensor([[0, 3, -1], [-4, 2, 10]], device=device)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=device)
    parts = torch.tensor([2, 1], dtype=torch.int32, device=device)
    count_step(room[: HEAD + 3], ids, ids, parts, offsets, (0, 2), engine=engine)
    assert room.tolist() == [1, 2, 2, 2, 1, 0, 1] + [0] * 8


@pytest.mark.gpu
def test_replays_count_and_polls_do_not_wait(device: torch.device, seed: int) -> None:
    data = rank_input(seed, 0, 5, HIDDEN, EXPERTS, TOP_K).to(device)
    with virtual_contexts(1, device=device)[0] as context:
        layer = MoELayer(config("nvfp4"), context)
        layer.load_random(1)
        counters = layer.count_steps()

        def run() -> torch.Tensor:
            return layer(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
            assert counters.poll().steps == 0
        for _ in range(3):
            graph.replay()
        # Behind this, which takes seconds, a copy cannot have ended.
        torch.cuda._sleep(8_000_000_000)
        assert counters.poll().steps == 0 and counters.poll().steps == 0
        torch.cuda.synchronize()
        assert counters.poll().steps == 4
        graph.replay()
        torch.cuda.synchronize()
        # The copy that the last call but one began is of before the replay; the next is not.
        assert counters.poll().steps == 4
        torch.cuda.synchronize()
        assert counters.poll().steps == 5
