"""What ranks do in the tests over NVSHMEM: functions that a worker process with a GPU of its own runs."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.errors import MoERuntimeError, PeerAbortedError
from moe_runtime.comm.heaps.nvshmem_heap import NvshmemHeap
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.transport import choose_transport
from moe_runtime.config import GATHERED_MAX_TOKENS, ModeName, MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.experts import Experts
from moe_runtime.kernels.exchange import cuda, geometry
from moe_runtime.kernels.exchange.plan import required_plan
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.formats.swizzle import unswizzle_scales
from moe_runtime.layer import MoELayer
from moe_runtime.observation.waits import LATE, SLOW_TO_RETURN, WaitCounts
from moe_runtime.virtual import VirtualRanks
from tests.support.exchange_data import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOP_K,
    RankInput,
    config,
    placements,
    rank_input,
    set_mode,
)
from tests.support.token_parts import tokens_in_parts

STEPS = 4
TIMEOUT_S = 30.0
"""Of a step, where a case gives no other: what takes less was not ended by it."""

MANY = GATHERED_MAX_TOKENS + 1
LAYERS = [
    *(config(fmt, max_tokens_per_rank=most) for fmt in sorted(FORMATS) for most in (TOKENS, MANY)),
    config("fp8_block", max_tokens_per_rank=MANY, combine_format="fp8_block"),
    config("mxfp8", combine_format="mxfp8"),
    config("bf16", weight_format="nvfp4", max_tokens_per_rank=MANY),
]


def step_inputs(seed: int, step: int, world: int) -> list[RankInput]:
    """Uneven counts, a rank without tokens, all tokens to one expert, and unrouted tokens, one step after the other."""
    routing = ("random", "one", "none", "random")[step % 4]
    return [
        rank_input(seed + step, r, (TOKENS, 0, 1, 5)[(r + step) % 4], HIDDEN, EXPERTS, TOP_K, routing)
        for r in range(world)
    ]


def gpu_of(rank: int) -> torch.device:
    return torch.device("cuda", rank)


def open_context(**settings: Any) -> ExpertParallelContext:
    return ExpertParallelContext(**{"transport": "nvshmem", "timeout_s": TIMEOUT_S, **settings})


def use_the_heap(rank: int, world: int) -> None:
    """Regions are zero, apart and aligned; what is stored to a peer is read there; heaps come and go side by side."""
    group = RankGroup(timeout_s=60)

    def make(num_bytes: int) -> NvshmemHeap:
        heap = NvshmemHeap(group, gpu_of(rank))
        heap.reserve("small", 1000)
        heap.reserve("words", num_bytes)
        heap.allocate()
        return heap

    def exchange(heap: NvshmemHeap) -> None:
        assert not heap.tensor("words").any() and not heap.tensor("small").any()
        pointers = heap.peer_pointers("words").tolist()
        assert len(set(pointers)) == world and all(pointer % 256 == 0 for pointer in pointers)
        # Every rank must have seen zeros before anyone stores.
        heap.barrier()
        for peer in range(world):
            words = heap.peer_tensor("words", peer).view(torch.int32)
            assert words.data_ptr() == pointers[peer]
            words[rank] = 100 * (rank + 1) + peer
            words[-1 - rank] = rank - 7
        torch.cuda.synchronize()
        heap.barrier()
        own = heap.tensor("words").view(torch.int32)
        assert own[:world].tolist() == [100 * (source + 1) + rank for source in range(world)]
        assert own.flip(0)[:world].tolist() == [source - 7 for source in range(world)]
        assert not heap.tensor("small").any()

    first, second = make(4096), make(3 << 20)
    exchange(first)
    exchange(second)
    first.close()
    third = make(700 << 20)
    exchange(third)
    second.close()
    third.close()
    places = []
    for _ in range(3):
        with make(700 << 20) as again:
            exchange(again)
            places.append(again.tensor("words").data_ptr())
    # How much of the GPU is free would not tell: other processes take of it too.
    assert max(places) - min(places) < 700 << 20, "closed heaps must give their memory back"


def be_refused(rank: int, world: int) -> list[str]:
    """More memory than there is, and sizes that differ: errors on every rank, after which all goes on."""
    messages = []
    for kind, num_bytes in ((OSError, 1 << 44), (ValueError, 1000 * (rank + 1))):
        heap = NvshmemHeap(RankGroup(timeout_s=60), gpu_of(rank))
        heap.reserve("words", num_bytes)
        with pytest.raises(kind) as caught:
            heap.allocate()
        messages.append(str(caught.value))
        heap.close(failed=True)
    return messages


def choose(rank: int, world: int) -> tuple[str, dict[str, str]]:
    choice = choose_transport(RankGroup(timeout_s=60), gpu_of(rank))
    return choice.name, choice.reasons


def choose_one_gpu_for_all(rank: int, world: int) -> tuple[str, dict[str, str]]:
    choice = choose_transport(RankGroup(timeout_s=60), gpu_of(0))
    return choice.name, choice.reasons


def run_layers(rank: int, world: int, configs: list[MoELayerConfig], seed: int) -> list[list[torch.Tensor]]:
    """The steps of each layer in turn, all layers over one context; `y` by layer and step, on the CPU."""
    with open_context() as context:
        assert context.transport == "nvshmem" and context.heap.graph_safe
        layers = [MoELayer(c, context) for c in configs]
        for layer in layers:
            layer.load_random(seed)
        results: list[list[torch.Tensor]] = [[] for _ in layers]
        for step in range(STEPS):
            for number, layer in enumerate(layers):
                mine = step_inputs(seed, step, world)[rank].to(context.device)
                results[number].append(layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
        context.check_peers()
        return [[y.cpu() for y in ys] for ys in results]


def virtual_results(world: int, c: MoELayerConfig, seed: int, device: torch.device) -> list[list[torch.Tensor]]:
    """`y` by rank and step, of one process with virtual ranks."""
    with VirtualRanks(c, world, lambda layer: layer.load_random(seed), device=device) as ranks:
        steps = []
        for step in range(STEPS):
            inputs = [data.to(device) for data in step_inputs(seed, step, world)]
            steps.append(ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs]))
        return [list(ys) for ys in zip(*steps, strict=True)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `run`, which has run before, and its output."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    return graph, y


def replayed(graph: torch.cuda.CUDAGraph, y: torch.Tensor) -> torch.Tensor:
    """The output `y` of a graph as a replay leaves it; what it does not write is NaN."""
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return y


def eager_and_graph(rank: int, world: int, seed: int) -> list[str]:
    """Every layer, its own router too, eagerly and from a graph; what is not equal."""
    wrong = []
    with open_context() as context:
        layers = [MoELayer(c, context) for c in LAYERS]
        for layer in layers:
            layer.load_random(seed)
        for number, layer in enumerate(layers):
            mine = rank_input(seed, rank, TOKENS, HIDDEN, EXPERTS, TOP_K).to(context.device)

            def given(layer: MoELayer = layer, mine: RankInput = mine) -> torch.Tensor:
                return layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)

            def routed(layer: MoELayer = layer, mine: RankInput = mine) -> torch.Tensor:
                return layer(mine.x, shared=mine.x)

            for name, run in (("given", given), ("routed", routed)):
                eager = run().clone()
                graph, y = captured(run)
                for time_ in range(3):
                    if not same(replayed(graph, y), eager):
                        wrong.append(f"layer {number} {name}, replay {time_}")
                if not same(run(), eager):
                    wrong.append(f"layer {number} {name}, eager again")
        context.check_peers()
    return wrong


def replay_sizes(rank: int, world: int, seed: int) -> list[str]:
    """Every layer with a graph for each size of its steps, replayed in turn; what is not equal to steps of one size."""
    wrong = []
    sizes = (1, TOKENS, 300)
    with open_context() as context:
        configs = [c.replace(max_tokens_per_rank=sizes[-1], token_buckets=sizes[:-1]) for c in LAYERS]
        layers = [MoELayer(c, context) for c in configs]
        for number, layer in enumerate(layers):
            layer.load_random(seed)
            runs = []
            for size in sizes:
                mine = rank_input(seed + size, rank, size - rank % 2, HIDDEN, EXPERTS, TOP_K).to(context.device)

                def run(size: int | None, layer: MoELayer = layer, mine: RankInput = mine) -> torch.Tensor:
                    return layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights, max_tokens=size)

                expected = run(None).clone()
                if not same(run(size), expected):
                    wrong.append(f"layer {number}, {size} tokens, eager")
                # A graph reads the inputs where they are: they are kept with it.
                runs.append((size, mine, expected, *captured(functools.partial(run, size))))
            for size, _, expected, graph, y in (runs + runs[::-1]) * 2:
                if not same(replayed(graph, y), expected):
                    wrong.append(f"layer {number}, {size} tokens, replay")
        context.check_peers()
    return wrong


SPIN_CYCLES, WAITED_STEPS = 400_000_000, 4
"""At least 0.2 s of a GPU's clock: where other tests share the GPU, each kernel may wait some 10 ms for its turn."""


def be_waited_for(rank: int, world: int, most: int, slow: int, cause: str, seed: int) -> list[WaitCounts]:
    """Replays of a graph in which `slow` spins: between its steps, or behind its experts; waits of each rank."""
    run_experts = Experts._run

    def spin() -> None:
        if rank == slow:
            torch.cuda._sleep(SPIN_CYCLES)

    def run_slowly(*args: Any) -> None:
        run_experts(*args)
        spin()

    mine = rank_input(seed, rank, 9, HIDDEN, EXPERTS, TOP_K).to(gpu_of(rank))
    with open_context() as context, pytest.MonkeyPatch.context() as patch:
        layer = MoELayer(config("fp8_block", max_tokens_per_rank=most), context)
        layer.load_random(seed)

        def run() -> torch.Tensor:
            return layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)

        expected = run().clone()
        waits = layer.count_waits()
        layer.warm_up()
        assert waits.read()[most].steps == 0
        if cause == SLOW_TO_RETURN:
            patch.setattr(Experts, "_run", run_slowly)
        graph, y = captured(run)
        before = waits.read()[most]
        for _ in range(WAITED_STEPS):
            if cause == LATE:
                spin()
            graph.replay()
        context.check_peers()
        assert same(y, expected)
        after = waits.read()[most]
        assert (after - before).steps == WAITED_STEPS
        return waits.gather()


def have_fewer_sms(rank: int, world: int, slow: int, num_sms: int, seed: int) -> list[WaitCounts]:
    """Replays of a graph in which the GEMMs of `slow` have `num_sms` SMs; waits of each rank.

    They take some 200 GFLOP a step: a GPU that other tests share is a hundred times as fast as a few of its SMs, too.
    """
    hidden, top_k, tokens = 4096, 8, 2048
    made = Experts.__post_init__

    def limited(experts: Experts) -> None:
        object.__setattr__(experts, "num_sms", num_sms)
        made(experts)

    mine = rank_input(seed, rank, tokens, hidden, EXPERTS, top_k).to(gpu_of(rank))
    sizes = {"hidden_size": hidden, "intermediate_size": 2048, "top_k": top_k, "max_tokens_per_rank": tokens}
    with open_context() as context, pytest.MonkeyPatch.context() as patch:
        layer = MoELayer(config("fp8_block", **sizes), context)
        if rank == slow:
            patch.setattr(Experts, "__post_init__", limited)
        layer.load_random(seed)
        assert layer.experts is not None and layer.experts.num_sms == (num_sms if rank == slow else None)
        waits = layer.count_waits()
        layer.warm_up()
        graph, _ = captured(lambda: layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
        for _ in range(WAITED_STEPS):
            graph.replay()
        context.check_peers()
        return waits.gather()


def replace_between_replays(rank: int, world: int, seed: int) -> list[str]:
    """Every layer under three placements in turn, eagerly and from one graph of the first; what is wrong."""
    wrong = []
    plans = placements(world)
    device = gpu_of(rank)
    with open_context() as context:
        layers = [MoELayer(c, context, placement=plans[0]) for c in LAYERS]
        for layer in layers:
            layer.load_random(seed)
        inputs = [rank_input(seed, r, TOKENS, HIDDEN, EXPERTS, TOP_K).to(device) for r in range(world)]
        mine = inputs[rank]
        for number, layer in enumerate(layers):

            def run(layer: MoELayer = layer) -> torch.Tensor:
                return layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)

            run()
            graph, y = captured(run)
            for plan in (*plans, plans[0]):
                layer.replace_experts(plan)
                with VirtualRanks(
                    layer.config, world, lambda layer: layer.load_random(seed), device=device, placement=plan
                ) as virtual:
                    expected = virtual([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])[rank]
                if not same(run(), expected):
                    wrong.append(f"layer {number}, {plan.fingerprint}, eager")
                if not same(replayed(graph, y), expected):
                    wrong.append(f"layer {number}, {plan.fingerprint}, replay")
        context.check_peers()
    return wrong


def draw(generator: torch.Generator, kind: str, tokens: int, c: MoELayerConfig, device: torch.device) -> RankInput:
    """Inputs of one rank drawn on its GPU: ids `uniform`, `zipf` or all to `one` rank's last experts."""
    x = torch.randn(tokens, c.hidden_size, generator=generator, device=device).to(torch.bfloat16)
    weights = torch.rand(tokens, c.top_k, generator=generator, device=device)
    scores = -torch.empty(tokens, c.num_experts, device=device).exponential_(generator=generator).log()
    if kind == "zipf":
        scores -= torch.arange(1, c.num_experts + 1, device=device).log()
    ids = scores.topk(c.top_k, dim=1).indices
    if kind == "one":
        ids = torch.arange(c.num_experts - c.top_k, c.num_experts, device=device).expand(tokens, c.top_k).contiguous()
    return RankInput(x, ids, weights)


def replay_many(
    rank: int, world: int, fmt: str, mode: ModeName, steps: int, seed: int, in_parts: bool = False
) -> tuple[int, int, float]:
    """One graph replayed with new inputs written in place; every result compared, on the device, with virtual ranks.

    `in_parts` is for contiguous rows on Hopper: slots are counted in chunks and tokens combined in parts, as in layers
        of many tokens. Virtual ranks do neither, so that one way is held to the other.

    Returns how many steps were wrong, the first of them, and milliseconds per step, comparison included.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 256, "num_experts": 16, "top_k": 4}
    # Parts of 38 tokens and a last one of 36.
    c = config(fmt, max_tokens_per_rank=150 if in_parts else 32, **sizes)
    device = gpu_of(rank)
    rows, chance = c.max_tokens_per_rank, torch.Generator().manual_seed(seed)
    with (
        pytest.MonkeyPatch.context() as few,
        open_context() as context,
        VirtualRanks(c, world, lambda layer: set_mode(layer, mode).load_random(seed), device=device) as virtual,
    ):
        if in_parts:
            few.setattr(geometry, "OWN_ROWS_TOKENS", 1)
        layer = set_mode(MoELayer(c, context), mode)
        layer.load_random(seed)
        x = torch.zeros(rows, c.hidden_size, dtype=torch.bfloat16, device=device)
        ids = torch.full((rows, c.top_k), -1, dtype=torch.int64, device=device)
        weights = torch.zeros(rows, c.top_k, device=device)

        def run() -> torch.Tensor:
            return layer(x, topk_idx=ids, topk_weights=weights)

        with tokens_in_parts() if in_parts else nullcontext():
            if in_parts:
                # With memory for chunks.
                layer.dispatcher._use(cuda)
                assert layer.dispatcher._exchange.backend is cuda
                plan = required_plan(layer.dispatcher.geometry)
                assert plan.num_chunks > 1 and plan.own_rows == (fmt == "fp8_block" and world > 1)
            run()
            graph, y = captured(run)
        assert required_plan(virtual.layers[rank].dispatcher.geometry).num_chunks == 1
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        first = torch.full((), steps, dtype=torch.int64, device=device)
        generator = torch.Generator(device)
        start = time.monotonic()
        for step in range(steps):
            kind = ("uniform", "zipf", "one")[int(torch.randint(3, (), generator=chance))]
            counts = torch.randint(-8, rows + 9, (world,), generator=chance).clamp(0, rows).tolist()
            inputs = []
            for source, count in enumerate(counts):
                generator.manual_seed(seed * 1000003 + step * 64 + source)
                inputs.append(draw(generator, kind, count, c, device))
            mine = inputs[rank]
            ids.fill_(-1)
            for target, value in ((x, mine.x), (ids, mine.topk_idx), (weights, mine.topk_weights)):
                target[: counts[rank]].copy_(value)
            y.fill_(float("nan"))
            graph.replay()
            expected = torch.zeros_like(y)
            results = virtual([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])
            expected[: counts[rank]] = results[rank]
            differs = (y.view(torch.int16) != expected.view(torch.int16)).any()
            wrong += differs
            first = torch.where(differs, first.clamp(max=step), first)
        torch.cuda.synchronize()
        context.check_peers()
        return int(wrong), int(first), (time.monotonic() - start) * 1e3 / steps


def foretold_rows(arrived: DispatchedTokens, hidden: int, rank: int) -> torch.Tensor:
    """Expert outputs that depend on rank, position and column alone, so that another process can make them too."""
    total, device = int(arrived.group_offsets[-1]), arrived.rows.device
    output = torch.full((arrived.capacity, hidden), float("nan"), device=device)
    place = torch.arange(total, device=device)[:, None] * 3 + torch.arange(hidden, device=device) + 17 * rank
    output[:total] = (place % 1001).float() / 8 - 61
    return output.to(torch.bfloat16)


def what_arrived(arrived: DispatchedTokens) -> dict[str, torch.Tensor]:
    """All that arrived, row by row in contiguous order and with linear scales, on the CPU."""
    total = int(arrived.group_offsets[-1])
    rows = torch.arange(total, device=arrived.rows.device) if arrived.row_index is None else arrived.row_index[:total]
    found = {
        "rows": raw(arrived.rows)[rows.long()],
        "group_offsets": arrived.group_offsets,
        "positions": arrived.handle.positions,
        "num_parts": arrived.handle.num_parts,
    }
    if arrived.scales is not None and arrived.group_scale_offsets is not None:
        columns = arrived.format.scale_columns(arrived.num_columns)
        linear = unswizzle_scales(raw(arrived.scales), 128 * arrived.scales.shape[0], columns, engine="torch")
        starts = arrived.group_offsets[:-1].long()
        sizes = arrived.group_offsets.diff().long()
        group = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
        blocks = starts // 128 + arrived.group_scale_offsets.long()
        place = blocks[group] * 128 + torch.arange(total, device=sizes.device) - starts[group]
        found["scales"] = linear[place]
    elif arrived.scales is not None:
        found["scales"] = arrived.scales[:total]
    if arrived.row_scale is not None:
        found["row_scale"] = arrived.row_scale[:total]
    return {name: value.cpu() for name, value in found.items()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


REFERENCE = {"hidden_size": 7168, "top_k": 8, "max_tokens_per_rank": 128}


def reference_input(seed: int, rank: int, tokens: int, world: int) -> RankInput:
    """Tokens of the reference model, with 32 experts a rank."""
    return rank_input(seed, rank, tokens, 7168, 32 * world, 8)


def exchange_at_reference_size(
    rank: int, world: int, fmt: str, mode: str, wire: str, seed: int
) -> list[dict[str, torch.Tensor]]:
    """Dispatch and combine of 128 tokens, of 1 and of none on one rank; what arrived and `y` of each."""
    settings: dict[str, Any] = {**REFERENCE, "num_experts": 32 * world, "token_format": fmt, "combine_format": wire}
    results = []
    with open_context() as context:
        dispatcher = TokenDispatcher(context, mode=mode, **settings)  # type: ignore[arg-type]
        for step, counts in enumerate(reference_counts(world)):
            mine = reference_input(seed + step, rank, counts[rank], world).to(context.device)
            arrived = dispatcher.dispatch(*mine)
            y = dispatcher.combine(foretold_rows(arrived, 7168, rank), arrived.handle)
            results.append({**what_arrived(arrived), "y": y.cpu()})
        context.check_peers()
    return results


def reference_counts(world: int) -> list[list[int]]:
    return [[128] * world, [1] * world, [(128, 0, 77)[(r + 1) % 3] for r in range(world)]]


def reference_layer(rank: int, world: int, fmt: str, token_counts: list[int], seed: int) -> list[tuple[int, str]]:
    """A layer of the reference model's size (32 experts a rank): eager twice, then from a graph; what differs."""
    c = MoELayerConfig(
        hidden_size=7168,
        intermediate_size=2048,
        num_experts=32 * world,
        top_k=8,
        max_tokens_per_rank=max(token_counts),
        token_format=fmt,
    )
    device = gpu_of(rank)
    generator = torch.Generator(device).manual_seed(seed + rank)
    gate_up = torch.randn(3, 4096, 7168, generator=generator, device=device).mul_(7168**-0.5).to(torch.bfloat16)
    down = torch.randn(3, 7168, 2048, generator=generator, device=device).mul_(2048**-0.5).to(torch.bfloat16)
    wrong = []
    with open_context() as context:
        layer = MoELayer(c, context)
        layer.load_experts((gate_up[e % 3], down[e % 3]) for e in layer.local_experts)
        for tokens in token_counts:
            x = torch.randn(tokens, 7168, generator=generator, device=device).to(torch.bfloat16)
            eager = layer(x).clone()
            if not bool(eager.isfinite().all()) or float(eager.float().std()) < 1e-3:
                wrong.append((tokens, "not finite, or nothing came out"))
            if not same(layer(x), eager):
                wrong.append((tokens, "eager, the second time"))
            graph, y = captured(lambda x=x: layer(x))  # type: ignore[misc]
            for time_ in range(3):
                if not same(replayed(graph, y), eager):
                    wrong.append((tokens, f"replay {time_}"))
            del graph, y, eager
        context.check_peers()
    return wrong


Failure = tuple[str, int, int, str, float]
"""Of an error: its name, the rank it is about, the phase, the text, and the seconds it took."""


def failure_of(context: ExpertParallelContext, run: Callable[[], object]) -> Failure:
    """What `run` and the check after it raise; then the same error again at once, and an orderly end."""
    start = time.monotonic()
    try:
        run()
        torch.cuda.synchronize()
        context.check_peers()
    except (ValueError, MoERuntimeError) as error:
        seconds = time.monotonic() - start
        with pytest.raises(type(error) if isinstance(error, MoERuntimeError) else PeerAbortedError):
            context.check()
        context.close()
        about, phase = getattr(error, "rank", -1), int(getattr(error, "phase", -1))
        return type(error).__name__, about, phase, str(error), seconds
    context.close()
    raise AssertionError("no error was raised")


def good_step(seed: int, rank: int, c: MoELayerConfig, **settings: Any) -> tuple[MoELayer, RankInput]:
    """A layer over a new context, and this rank's tokens, after a step in which all went well on all ranks."""
    layer = MoELayer(c, open_context(**settings))
    layer.load_random(seed)
    mine = rank_input(seed, rank, 4, HIDDEN, EXPERTS, TOP_K, "one").to(layer.context.device)
    layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
    torch.cuda.synchronize()
    layer.context.check_peers()
    dist.barrier()
    return layer, mine


def wait_to_be_told(context: ExpertParallelContext) -> None:
    """Do nothing until a peer's failure arrives, however late the peers come to it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        context.check_peers()
        time.sleep(0.02)


def miss_a_replay(rank: int, world: int, seed: int) -> Failure:
    """The last rank does not enter one replay of a graph in which all others are."""
    layer, mine = good_step(seed, rank, config("mxfp8"), timeout_s=2.0)
    context = layer.context
    graph, y = captured(lambda: layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
    dist.barrier()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    context.check_peers()
    dist.barrier()
    if rank == world - 1:
        result = failure_of(context, lambda: wait_to_be_told(context))
    else:
        result = failure_of(context, graph.replay)
        assert y.isnan().all(), "outputs after a failure are NaN"
    return result


def ask_for_a_wrong_expert(rank: int, world: int, bad: int, seed: int) -> Failure:
    """Rank 0 routes a token to an expert that does not exist, or twice to one."""
    layer, mine = good_step(seed, rank, config("fp8_block", max_tokens_per_rank=MANY))
    if rank == 0:
        mine.topk_idx[2] = torch.tensor([4, bad, 0], device=mine.x.device)
    return failure_of(layer.context, lambda: layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))


def call_with_a_wrong_dtype(rank: int, world: int, seed: int) -> Failure:
    """Rank 0 makes a mistake that its host sees, while the kernels of the others wait for it."""
    layer, mine = good_step(seed, rank, config("bf16"))
    if rank == 0:
        time.sleep(1.0)
    x = mine.x.half() if rank == 0 else mine.x
    return failure_of(layer.context, lambda: layer(x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))


def die_before_a_step(rank: int, world: int, seed: int) -> Failure:
    """The last rank is killed between two steps."""
    layer, mine = good_step(seed, rank, config("fp8_block"), timeout_s=2.0)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure_of(layer.context, lambda: layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))


def in_parts(rank: int, world: int, seed: int) -> tuple[torch.Tensor, str, str, str]:
    """A layer over a half of the ranks; then what becomes of a context over all of them."""
    size = max(1, world // 2)
    groups = [dist.new_group(list(range(start, min(start + size, world)))) for start in range(0, world, size)]
    with open_context(group=groups[rank // size]) as context:
        layer = MoELayer(config("nvfp4"), context)
        layer.load_random(seed + rank // size)
        mine = rank_input(seed, rank, 5, HIDDEN, EXPERTS, TOP_K).to(context.device)
        y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights).cpu()
        context.check_peers()
    try:
        open_context()
        message = ""
    except ValueError as error:
        message = str(error)
    with ExpertParallelContext() as context:
        return y, message, context.transport, context.transport_reasons.get("nvshmem", "")
