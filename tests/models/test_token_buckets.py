"""Steps that are said to be small use the kernels of their token bucket, and give the bits of any other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

from moe_runtime.comm.errors import PeerAbortedError, StepMismatchError
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels import nvrtc
from moe_runtime.layer import MoELayer
from moe_runtime.observation.phases import PhaseTimes
from moe_runtime.virtual import VirtualRanks, virtual_contexts
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOP_K, RankInput, config, placements, rank_input
from tests.support.stages import compute, receive, send
from tests.support.waiting import synchronize

SIZES = (3, 20)
LARGEST = 270
"""Above `GATHERED_MAX_TOKENS`: rows are contiguous in some formats, and never in the smaller buckets."""

CASES = [
    config("nvfp4", max_tokens_per_rank=LARGEST, token_buckets=SIZES),
    config("fp8_block", max_tokens_per_rank=LARGEST, token_buckets=SIZES, combine_format="fp8_block"),
    config("mxfp8", max_tokens_per_rank=LARGEST, token_buckets=(1, LARGEST, *SIZES, 999)),
    config("bf16", max_tokens_per_rank=LARGEST, token_buckets=SIZES, weight_format="nvfp4", expert_row_capacity=200),
]
COUNTS = ((20, 0, 7), (3, 3, 0), (21, 1, 0), (0, 0, 0), (0, 2, 1), (4, 20, 5), (1, 0, 0))
"""Tokens of each rank, step by step: sizes change from each to the next."""


Counts = tuple[tuple[int, ...], ...]


def steps(seed: int, world: int, all_counts: Counts = COUNTS) -> Iterator[list[RankInput]]:
    """What ranks bring, step by step; the ranks beyond three bring what the first bring."""
    for number, (counts, routing) in enumerate(zip(all_counts, itertools.cycle(("random", "one", "random", "none")))):
        yield [
            rank_input(seed + number, r, counts[(r + number) % 3], HIDDEN, EXPERTS, TOP_K, routing)
            for r in range(world)
        ]


def most(inputs: list[RankInput]) -> int:
    return max(data.x.shape[0] for data in inputs)


def virtual_results(
    c: MoELayerConfig,
    world: int,
    seed: int,
    *,
    told: bool,
    counts: Counts = COUNTS,
    warm: bool = False,
    **settings: Any,
) -> list[list[torch.Tensor]]:
    """`y` by step and rank of ranks in one process, which are `told` how many tokens each step has."""
    with VirtualRanks(c, world, lambda layer: layer.load_random(seed), **settings) as ranks:
        device = ranks.contexts[0].device
        if warm:
            ranks.warm_up()
        found = []
        for inputs in steps(seed, world, counts):
            here = [data.to(device) for data in inputs]
            limit = most(inputs) if told else None
            found.append(ranks([i.x for i in here], [(i.topk_idx, i.topk_weights) for i in here], max_tokens=limit))
        return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("c", CASES, ids=lambda c: c.token_format)
def test_no_bit_depends_on_the_size_of_the_step(c: MoELayerConfig, world: int, device: torch.device, seed: int) -> None:
    """Beside a layer that has no sizes, as its memory begins with what its largest steps left there."""
    plain = c.replace(token_buckets=())
    expected = virtual_results(plain, world, seed, told=False, device=device)
    for ys, wanted in zip(virtual_results(c, world, seed, told=True, device=device), expected, strict=True):
        for y, want in zip(ys, wanted, strict=True):
            assert_same_bits(y, want)


def test_no_bit_depends_on_it_with_kernels(device: torch.device, seed: int) -> None:
    """Interpreted where there is no GPU: few tokens."""
    c = config("nvfp4", max_tokens_per_rank=5, token_buckets=(2,))
    settings: dict[str, Any] = {"counts": ((5, 0, 2), (1, 2, 2), (0, 1, 3)), "device": device, "engine": "triton"}
    expected = virtual_results(c.replace(token_buckets=()), 2, seed, told=False, **settings)
    found = virtual_results(c, 2, seed, told=True, **settings)
    for y, want in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert_same_bits(y, want)


@pytest.mark.parametrize("c", CASES, ids=lambda c: c.token_format)
def test_no_bit_depends_on_a_warm_up(c: MoELayerConfig, device: torch.device, seed: int) -> None:
    """With few rows of capacity too, of which it takes none, and with a shared expert."""
    c = c.replace(shared_expert={"intermediate_size": 64} if c.token_format == "nvfp4" else None)
    expected = virtual_results(c, 2, seed, told=True, device=device)
    for ys, wanted in zip(virtual_results(c, 2, seed, told=True, warm=True, device=device), expected, strict=True):
        for y, want in zip(ys, wanted, strict=True):
            assert_same_bits(y, want)


def test_a_warm_up_steps_in_every_size_and_is_not_counted(device: torch.device, seed: int) -> None:
    c = config("nvfp4", max_tokens_per_rank=6, token_buckets=(2, 3), expert_row_capacity=1)
    with VirtualRanks(c, 2, lambda layer: layer.load_random(seed), device=device) as ranks:
        layer = ranks.layers[0]
        counters, times = layer.count_steps(), PhaseTimes(device)
        layer.times = times
        ranks.warm_up()
        # Of one token and of all, with three kinds of arguments.
        assert int(layer.context.epoch) == 3 * 2 * len(c.all_token_buckets)
        assert all(dispatcher._stepped for dispatcher in layer.dispatchers.values())
        assert (layer.counters, layer.times) == (counters, times)
        assert counters.read().steps == 0 and times.milliseconds() == {}
        assert ranks.layers[1].counters is None


def test_a_warm_up_of_a_layer_without_weights_is_told_to_the_peers(device: torch.device) -> None:
    contexts = virtual_contexts(2, device=device)
    layers = [MoELayer(CASES[0], context) for context in contexts]
    for context in contexts:
        context.allocate()
    with pytest.raises(ValueError, match="experts: no weights are loaded"):
        layers[0].warm_up()
    assert layers[0].counters is None
    synchronize(device)
    with pytest.raises(PeerAbortedError, match="rank 0 gave up: experts: no weights are loaded"):
        contexts[1].check_peers()


@pytest.mark.gpu
@pytest.mark.parametrize("router", [True, False])
@pytest.mark.parametrize("c", CASES, ids=lambda c: c.token_format)
def test_after_a_warm_up_nothing_is_compiled(
    c: MoELayerConfig, router: bool, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by NVRTC nor by Triton, with either kind of ids, counted or not; and every size can be captured."""
    compiled: list[str] = []

    def note(*args: Any, **named: Any) -> None:
        compiled.append(str(named.get("repr") or named.get("fn")))

    with ExpertParallelContext(device=device, transport="private") as context:
        layer = MoELayer(c.replace(expert_row_capacity=None), context, router=router)
        layer.load_random(seed)
        layer.warm_up()
        loaded = nvrtc._loaded.cache_info().misses
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
        for counted, count in itertools.product((False, True), (1, *c.all_token_buckets)):
            if counted:
                layer.count_steps()
            data, graph = rank_input(seed, 0, count, HIDDEN, EXPERTS, TOP_K).to(device), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                first = layer(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights)
            graph.replay()
            for ids in (data.topk_idx.int(), data.topk_idx.long()):
                assert_same_bits(layer(data.x, topk_idx=ids, topk_weights=data.topk_weights), first)
                layer(data.x, topk_idx=ids, topk_weights=data.topk_weights, shared=data.x)
            if router:
                layer(data.x)
        context.check_peers()
        assert (nvrtc._loaded.cache_info().misses, compiled) == (loaded, [])


def test_the_smallest_size_with_room_is_taken(device: torch.device, seed: int) -> None:
    assert CASES[2].all_token_buckets == (1, 3, 20, LARGEST)
    with VirtualRanks(CASES[2], 2, lambda layer: layer.load_random(seed), device=device) as ranks:
        layer = ranks.layers[0]
        assert tuple(layer.dispatchers) == CASES[2].all_token_buckets
        wanted = {0: 1, 1: 1, 2: 3, 3: 3, 4: 20, 20: 20, 21: LARGEST, LARGEST: LARGEST, None: LARGEST}
        for max_tokens, size in wanted.items():
            none = torch.zeros(0, HIDDEN, dtype=torch.bfloat16, device=device)
            sent = [send(rank, none, max_tokens=max_tokens) for rank in ranks.layers]
            assert sent[0].handle.geometry.max_tokens == size
            assert sent[0].dispatcher is layer.dispatchers[size]
            for rank, one in zip(ranks.layers, sent, strict=True):
                compute(rank, one)
            for rank, one in zip(ranks.layers, sent, strict=True):
                receive(rank, one)
        largest = max(dispatcher.geometry.half_bytes()["landing"] for dispatcher in layer.dispatchers.values())
        assert largest == layer.dispatcher.geometry.half_bytes()["landing"]


def test_on_one_rank_the_tokens_of_a_step_are_known(device: torch.device, seed: int) -> None:
    c = config("nvfp4", max_tokens_per_rank=LARGEST, token_buckets=SIZES)
    with ExpertParallelContext(device=device, transport="private") as context:
        layer, plain = MoELayer(c, context), MoELayer(c.replace(token_buckets=()), context)
        for made in (layer, plain):
            made.load_random(seed)
        for count, size in ((0, 3), (3, 3), (4, 20), (20, 20), (21, LARGEST)):
            data = rank_input(seed, 0, count, HIDDEN, EXPERTS, TOP_K).to(device)
            sent = send(layer, *data)
            assert sent.dispatcher is layer.dispatchers[size]
            compute(layer, sent)
            y = receive(layer, sent)
            assert_same_bits(y, plain(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights))


@pytest.mark.parametrize("wrong", [2, -1, LARGEST + 1, 20.0, True, "20"])
def test_a_wrong_number_of_tokens_is_named_and_told_to_the_peers(wrong: Any, device: torch.device, seed: int) -> None:
    with VirtualRanks(CASES[0], 2, lambda layer: layer.load_random(seed), device=device) as ranks:
        x = torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=device)
        with pytest.raises(ValueError, match=r"max_tokens: expected None or from 3, .* to max_tokens_per_rank = 270"):
            ranks.layers[0](x, max_tokens=wrong)
        synchronize(device)
        for _ in range(2):
            with pytest.raises(PeerAbortedError, match="rank 0 gave up: max_tokens"):
                ranks.contexts[1].check_peers()
        with pytest.raises(PeerAbortedError, match="rank 0 gave up: max_tokens"):
            ranks.layers[1](x)


@pytest.mark.parametrize("engine", ["auto", "triton"])
def test_ranks_that_say_other_sizes_are_told_so(engine: str, device: torch.device, seed: int) -> None:
    c = config("nvfp4", max_tokens_per_rank=6, token_buckets=(2,))
    with VirtualRanks(c, 2, lambda layer: layer.load_random(seed), device=device, engine=engine) as ranks:
        inputs = [rank_input(seed, r, 2, HIDDEN, EXPERTS, TOP_K).to(device) for r in range(2)]
        parts = [{"topk_idx": data.topk_idx, "topk_weights": data.topk_weights} for data in inputs]
        sent = [
            send(layer, data.x, **part, max_tokens=most)
            for layer, data, part, most in zip(ranks.layers, inputs, parts, (2, 3), strict=True)
        ]
        for layer, one in zip(ranks.layers, sent, strict=True):
            with pytest.raises(StepMismatchError, match=r"in exchange .* same order, with equal max_tokens"):
                compute(layer, one)
                ranks.contexts[0].check_peers()
        synchronize(device)
        with pytest.raises(StepMismatchError):
            ranks.layers[1](inputs[1].x, **parts[1])


def test_what_belongs_to_the_layer_is_that_of_all_sizes(device: torch.device, seed: int) -> None:
    """Another placement, and counters."""
    first, second, _ = placements(2)
    c = CASES[1]
    with (
        VirtualRanks(c, 2, lambda layer: layer.load_random(seed), device=device, placement=first) as ranks,
        VirtualRanks(
            c.replace(token_buckets=()), 2, lambda layer: layer.load_random(seed), device=device, placement=first
        ) as plain,
    ):
        counters = [[layer.count_steps() for layer in made.layers] for made in (ranks, plain)]
        for number, inputs in enumerate(steps(seed, 2)):
            if number == 3:
                for made in (ranks, plain):
                    made.replace_experts(second)
            here = [data.to(device) for data in inputs]
            parts = [i.x for i in here], [(i.topk_idx, i.topk_weights) for i in here]
            for y, want in zip(ranks(*parts, max_tokens=most(inputs)), plain(*parts), strict=True):
                assert_same_bits(y, want)
        for ours, theirs in zip(*counters, strict=True):
            assert ours.read() == theirs.read() and ours.read().steps == len(COUNTS)


def run_layers(rank: int, world: int, configs: list[MoELayerConfig], seed: int, transport: str) -> list[Any]:
    """Steps of all layers in turn over one context, two of which are warmed up; `y` by layer and step."""
    with ExpertParallelContext(transport=transport, engine="torch", timeout_s=30) as context:
        layers = [MoELayer(c, context) for c in configs]
        for layer in layers:
            layer.load_random(seed)
        for layer in layers[:2]:
            layer.warm_up()
        found: list[list[torch.Tensor]] = [[] for _ in layers]
        for inputs in steps(seed, world):
            mine = inputs[rank]
            for layer, ys in zip(layers, found, strict=True):
                y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights, max_tokens=most(inputs))
                ys.append(y)
        return found


@pytest.mark.cpu_only
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_processes_give_the_same_bits(transport: str, get_pool: Any, seed: int) -> None:
    results = get_pool(3).run(run_layers, CASES, seed, transport, timeout=120)
    for number, c in enumerate(CASES):
        for step, wanted in enumerate(virtual_results(c.replace(token_buckets=()), 3, seed, told=False)):
            for rank, want in enumerate(wanted):
                assert_same_bits(results[rank][number][step], want, f"layer {number}, step {step}, rank {rank}")


def disagree(rank: int, world: int) -> str:
    with ExpertParallelContext(timeout_s=30) as context:
        MoELayer(config(max_tokens_per_rank=40, token_buckets=(8,) if rank else (9,)), context)
        try:
            context.allocate()
        except ValueError as error:
            return str(error)
    return "nothing"


@pytest.mark.cpu_only
def test_ranks_with_other_sizes_are_told_so(get_pool: Any) -> None:
    for text in get_pool(2).run(disagree):
        assert text == "agree: ranks disagree on token_buckets (layer 0): rank 0: (9,), rank 1: (8,)"
