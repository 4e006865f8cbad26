"""Layers with a placement, also while it changes: over processes as with virtual ranks bit for bit, or an error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moe_runtime.build import random_expert
from moe_runtime.comm.errors import MoERuntimeError, PeerTimeoutError, RoutingError
from moe_runtime.comm.failures import abort_words
from moe_runtime.config import MoELayerConfig
from moe_runtime.context import memory
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange import reference
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.placement import migration, rebalance
from moe_runtime.placement.migration_plan import plan_migration
from moe_runtime.placement.placement import Placement, plan_placement
from moe_runtime.reference import error_bound, moe_reference, relative_error
from moe_runtime.virtual import VirtualRanks, replace_experts, virtual_contexts
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOKENS,
    TOP_K,
    RankInput,
    config,
    placements,
    rank_input,
)
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, Outcome, run_once
from tests.support.stages import send

Load = Callable[[MoELayer], None]
LOOK_S = 1.0
"""Within which words that change while they are looked at are met thousands of times."""


def random_weights(seed: int) -> Load:
    return lambda layer: layer.load_random(seed)


def step_inputs(seed: int, step: int, world: int) -> list[RankInput]:
    routing = ("random", "one", "random")[step % 3]
    return [
        rank_input(seed + step, r, (TOKENS, 0, 1, 5)[(r + step) % 4], HIDDEN, EXPERTS, TOP_K, routing)
        for r in range(world)
    ]


def small_chunks() -> None:
    """From now on in this process experts travel in several chunks that end anywhere."""
    memory.CHUNK_BYTES = 40_000


def run_placed(rank: int, world: int, configs: list[MoELayerConfig], seed: int, transport: str) -> list[list[Any]]:
    """Two steps under each placement, all layers over one context; `y` by layer and step."""
    small_chunks()
    try:
        with ExpertParallelContext(transport=transport, timeout_s=30) as context:
            plans = placements(world)
            layers = [MoELayer(c, context, placement=plans[0]) for c in configs]
            for layer in layers:
                layer.load_random(seed)
            results: list[list[Any]] = [[] for _ in layers]
            for number, layer in enumerate(layers):
                for index, plan in enumerate(plans):
                    if index:
                        layer.replace_experts(plan)
                    for step in (2 * index, 2 * index + 1):
                        mine = step_inputs(seed, step, world)[rank]
                        results[number].append(layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
            return results
    finally:
        memory.CHUNK_BYTES = 16 << 20


def virtual_results(world: int, c: MoELayerConfig, seed: int, num_hosts: int = 1) -> list[list[torch.Tensor]]:
    """`y` by rank and step, of one process with virtual ranks, each placement loaded anew."""
    steps = []
    for index, plan in enumerate(placements(world)):
        with VirtualRanks(c, world, random_weights(seed), placement=plan, num_hosts=num_hosts) as ranks:
            for step in (2 * index, 2 * index + 1):
                inputs = step_inputs(seed, step, world)
                steps.append(ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs]))
    return [list(ys) for ys in zip(*steps, strict=True)]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("world", "transport"), [(2, "shared"), (4, "shared"), (2, "collective"), (3, "collective")])
def test_steps_before_between_and_after_replacements_equal_virtual_ranks(
    world: int, transport: str, get_pool: Any, seed: int
) -> None:
    configs = LAYERS if transport == "shared" else LAYERS[:2]
    results = get_pool(world).run(run_placed, configs, seed, transport, timeout=150)
    for number, c in enumerate(configs):
        expected = virtual_results(world, c, seed)
        for rank in range(world):
            for step in range(6):
                what = f"layer {number}, step {step}, rank {rank} of {world}"
                assert_same_bits(results[rank][number][step], expected[rank][step], what)


def weights_of(layer: MoELayer) -> dict[str, torch.Tensor]:
    """Every tensor of the experts, by name."""
    assert layer.experts is not None
    return {
        f"{part}.{name}": value
        for part in ("gate_up", "down")
        for name, value in vars(getattr(layer.experts, part)).items()
        if isinstance(value, torch.Tensor)
    }


def addresses(layer: MoELayer) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in weights_of(layer).items()}


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_experts_move_in_place_and_bit_for_bit(fmt: str, device: torch.device, seed: int) -> None:
    world, plans = 4, placements(4)
    load = random_weights(seed)
    with VirtualRanks(config(fmt), world, load, device=device, placement=plans[0]) as ranks:
        before = [addresses(layer) for layer in ranks.layers]
        for plan in (*plans[1:], plans[0], plans[0]):
            ranks.replace_experts(plan)
            with VirtualRanks(config(fmt), world, load, device=device, placement=plan) as fresh:
                for layer, expected in zip(ranks.layers, fresh.layers, strict=True):
                    assert layer.placement == plan
                    assert layer.local_experts == plan.rank_experts(layer.context.rank)
                    for name, value in weights_of(layer).items():
                        assert_same_bits(value, weights_of(expected)[name], name)
        assert before == [addresses(layer) for layer in ranks.layers]


def test_weights_of_a_checkpoint_are_read_in_the_order_of_slots_and_move(tmp_path: Path, seed: int) -> None:
    """Loaded in inference mode, moved outside it; against the same experts quantized one by one."""
    c, plans = config("mxfp8"), placements(2)
    write_qwen3_moe_checkpoint(tmp_path, c, seed)
    contexts = virtual_contexts(2)
    with torch.inference_mode():
        layers = [
            MoELayer.from_checkpoint(
                tmp_path, context=context, placement=plans[0], max_tokens_per_rank=TOKENS, token_format="mxfp8"
            )
            for context in contexts
        ]
    tensors = load_file(tmp_path / "model.safetensors")

    def gate_up(expert: int) -> torch.Tensor:
        prefix = f"model.layers.0.mlp.experts.{expert}"
        return torch.cat([tensors[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up")])

    for plan in plans:
        if plan != plans[0]:
            replace_experts(layers, plan)
        for layer in layers:
            ids = plan.rank_experts(layer.context.rank)
            expected = ExpertWeights.quantize(torch.stack([gate_up(expert) for expert in ids]), "mxfp8", gate_up=True)
            assert layer.experts is not None and isinstance(layer.experts.gate_up, ExpertWeights)
            assert_same_bits(layer.experts.gate_up.quants, expected.quants)
    for context in contexts:
        context.close()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_biases_and_prepacked_weights_move_too(fmt: str, rng: torch.Generator, seed: int) -> None:
    """Layers prepare weights on Hopper only, and have no biases yet: given to them by hand here. Every other expert has
    a NaN, of which its MXFP8 weights have a mark.
    """
    plans = placements(2)
    c = config(fmt)

    def load(layer: MoELayer) -> None:
        layer.load_random(seed)
        experts = layer.experts
        assert experts is not None
        bias = torch.stack([torch.full((c.hidden_size,), float(e)) for e in layer.local_experts])
        quants = experts.down.quants.view(torch.uint8).clone()
        quants[[slot for slot, e in enumerate(layer.local_experts) if e % 2], 0, 0] = 127
        changed = replace(experts.down, quants=quants.view(experts.down.quants.dtype), bias=bias)
        down = PrepackedWeights.prepack(changed)
        layer.experts = replace(experts, down=down)

    with VirtualRanks(c, 2, load, placement=plans[0]) as ranks:
        ranks.replace_experts(plans[1])
        with VirtualRanks(c, 2, load, placement=plans[1]) as fresh:
            for layer, expected in zip(ranks.layers, fresh.layers, strict=True):
                assert {"down.units", "down.bias"} <= weights_of(layer).keys()
                assert ("down.has_special_values" in weights_of(layer)) == (fmt == "mxfp8")
                for name, value in weights_of(layer).items():
                    assert_same_bits(value, weights_of(expected)[name], name)


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_a_replicated_layer_is_within_the_bound_and_blind_to_order_and_neighbours(
    fmt: str, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    world, c = 4, config(fmt, max_tokens_per_rank=64)
    x = torch.randn(64, HIDDEN, generator=rng).to(torch.bfloat16)
    routed = rank_input(seed, 0, 64, HIDDEN, EXPERTS, TOP_K)
    with VirtualRanks(c, world, random_weights(seed), device=device, placement=placements(world)[0]) as ranks:
        counters = [layer.count_steps() for layer in ranks.layers]

        def run(rank: int, rows: torch.Tensor) -> torch.Tensor:
            """`y` of these rows, brought by `rank` alone."""
            parts = [rows if r == rank else rows[:0] for r in range(world)]
            routing = [(routed.topk_idx[p].to(device), routed.topk_weights[p].to(device)) for p in parts]
            return ranks([x[p].to(device) for p in parts], routing)[rank].cpu()

        every = torch.arange(64)
        y = run(0, every)
        assert_same_bits(run(3, every.flip(0)).flip(0), y, "from another rank, in another order")
        assert_same_bits(run(1, every[7:9]), y[7:9], "two tokens alone")
    experts = [random_expert(c, seed, e, device) for e in range(EXPERTS)]
    gate_up, down = (torch.stack([pair[i] for pair in experts]) for i in (0, 1))
    reference = moe_reference(x, routed.topk_idx, routed.topk_weights, gate_up.cpu(), down.cpu())
    assert relative_error(y, reference)[0] <= error_bound(fmt)
    expected = torch.bincount(routed.topk_idx[routed.topk_idx >= 0], minlength=EXPERTS)
    assert counters[0].read().expert_tokens == counters[3].read().expert_tokens == tuple(expected.tolist())


def test_a_contiguous_placement_is_a_layer_without_one(device: torch.device, seed: int) -> None:
    c = config("mxfp8", num_experts=8)
    results = []
    for placement in (None, Placement.contiguous(8, 2)):
        with VirtualRanks(c, 2, random_weights(seed), device=device, placement=placement) as ranks:
            inputs = [rank_input(seed, r, 7, HIDDEN, 8, TOP_K).to(device) for r in range(2)]
            results.append(ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs]))
            assert list(ranks.layers[1].local_experts) == [4, 5, 6, 7]
    for plain, placed in zip(*results, strict=True):
        assert_same_bits(placed, plain)


@pytest.mark.parametrize("engine", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["out of range", "a slot but no expert", "negative", "twice"])
def test_a_routing_error_names_the_id_that_the_router_gave(
    kind: str, engine: str, device: torch.device, seed: int
) -> None:
    ids = {"out of range": 4711, "a slot but no expert": EXPERTS, "negative": -3, "twice": 9}
    plan = placements(4)[0]
    assert EXPERTS < plan.num_slots
    contexts = virtual_contexts(4, device=device, engine=engine)
    layers = [MoELayer(config(), context, placement=plan) for context in contexts]
    for layer in layers:
        layer.load_random(seed)
        layer.context.allocate()
    mine = rank_input(seed, 0, 4, HIDDEN, EXPERTS, TOP_K).to(device)
    mine.topk_idx[2] = torch.tensor([9, ids[kind], -1])
    send(layers[0], *mine)
    for layer in layers:
        with pytest.raises(RoutingError, match=rf"expert id {ids[kind]} of token 2 of rank 0 is out of range or twice"):
            layer.context.check_peers()
        layer.context.close()


def propose(rank: int, world: int, kind: str, seed: int) -> tuple[str, str, list[torch.Tensor]]:
    return propose_over(ExpertParallelContext(timeout_s=30), rank, world, kind, seed)


def propose_over(
    context: ExpertParallelContext, rank: int, world: int, kind: str, seed: int
) -> tuple[str, str, list[torch.Tensor]]:
    """A re-placement that cannot be agreed on, and the steps before and after it."""
    plans = placements(world)
    with context:
        layers = [MoELayer(config(), context, placement=plans[0]) for _ in range(2)]
        for layer in layers:
            layer.load_random(seed)
        mine = rank_input(seed, rank, 5, HIDDEN, EXPERTS, TOP_K)

        def run() -> torch.Tensor:
            return layers[0](mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)

        ys = [run()]
        layer, plan, experts = layers[0], plans[1], layers[0].experts
        if rank == 1:
            if kind == "placement":
                plan = plans[2]
            elif kind == "layer":
                layer = layers[1]
            elif kind == "type":
                plan = None  # type: ignore[assignment]
            elif kind == "sizes":
                plan = plan_placement([1] * EXPERTS, world, plan.slots_per_rank + 1)
            elif kind == "memory":
                rebalance.ExpertMover = refuse_memory  # type: ignore[assignment,misc]
        start = time.monotonic()
        try:
            layer.replace_experts(plan)
        except (ValueError, MemoryError, MoERuntimeError) as error:
            assert time.monotonic() - start < 10
            assert layers[0].experts is experts and layers[0].placement == plans[0]
            ys.append(run())
            return type(error).__name__, str(error), ys
        finally:
            rebalance.ExpertMover = migration.ExpertMover  # type: ignore[misc]
    raise AssertionError("no error was raised")


def refuse_memory(*arguments: object, **named: object) -> None:
    raise MemoryError("no room for a spare expert")


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("placement", "placement: ranks disagree"),
        ("layer", "layer: ranks disagree, rank 0: 0, rank 1: 1, rank 2: 0"),
        ("type", "placement: expected a Placement, got NoneType"),
        ("sizes", "placement: expected 10 experts in 18 slots on 3 rank(s), got 10 experts in 21 slots"),
        ("memory", "no room for a spare expert"),
    ],
)
def test_what_ranks_do_not_agree_on_moves_nothing(kind: str, text: str, get_pool: Any, seed: int) -> None:
    for rank, (name, message, ys) in enumerate(get_pool(3).run(propose, kind, seed)):
        assert text in message
        if kind in ("placement", "layer"):
            assert name == "ValueError"
        elif rank == 1:
            assert name == ("MemoryError" if kind == "memory" else "ValueError")
        else:
            assert name == "PeerAbortedError" and "rank 1 gave up" in message
        assert_same_bits(ys[1], ys[0], "after the refusal")


def disagree_from_the_start(rank: int, world: int) -> str:
    with ExpertParallelContext(timeout_s=5) as context:
        MoELayer(config(), context, placement=placements(world)[rank])
        with pytest.raises(ValueError, match="ranks disagree on placement") as caught:
            context.allocate()
        return str(caught.value)


@pytest.mark.cpu_only
def test_layers_with_other_placements_do_not_start(get_pool: Any) -> None:
    for message in get_pool(2).run(disagree_from_the_start):
        assert all(f"rank {r}: '{p.fingerprint}'" in message for r, p in enumerate(placements(2)[:2]))


def swapped(placement: Placement, ranks: tuple[int, int]) -> Placement:
    """The placement with one expert of each of two ranks on the other."""
    first, second = (placement.rank_experts(rank) for rank in ranks)
    one = next(expert for expert in first if expert not in second)
    other = next(expert for expert in second if expert not in first)
    places = [ranks[0] * placement.slots_per_rank + first.index(one)]
    places += [ranks[1] * placement.slots_per_rank + second.index(other)]
    slot_experts = list(placement.slot_experts)
    slot_experts[places[0]], slot_experts[places[1]] = other, one
    return Placement(placement.num_experts, placement.num_ranks, tuple(slot_experts))


def fail_in_the_middle(
    rank: int, world: int, kind: str, transport: str, among_two: bool, seed: int
) -> tuple[str, int, str, float]:
    context = ExpertParallelContext(timeout_s=PATIENCE_S, transport=transport)
    return fail_over(context, rank, world, kind, among_two, seed)


def fail_over(
    context: ExpertParallelContext, rank: int, world: int, kind: str, among_two: bool, seed: int
) -> tuple[str, int, str, float]:
    """Rank 2 fails at its third piece of work in a re-placement; what the others and their next step say."""
    small_chunks()
    plans = placements(world)
    layer = MoELayer(config("bf16"), context, placement=plans[0])
    layer.load_random(seed)
    mine = rank_input(seed, rank, 4, HIDDEN, EXPERTS, TOP_K)
    layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
    if rank == 2:
        break_after(3, kind)
    if kind != "raises" and context.host_transport is None:
        context.timeout_s = WITHOUT_ONE_S
    dist.barrier()
    start = time.monotonic()
    try:
        layer.replace_experts(swapped(plans[0], (2, 3)) if among_two else plans[1])
    except (MoERuntimeError, OSError) as error:
        seconds = time.monotonic() - start
        assert layer.experts is None
        with pytest.raises((MoERuntimeError, OSError)):
            layer(mine.x)
        with pytest.raises(MoERuntimeError):
            context.check()
        context.close()
        return type(error).__name__, getattr(error, "rank", -1), str(error), seconds
    raise AssertionError("no error was raised")


def wait_for_a_failure(context: ExpertParallelContext) -> None:
    """Until a peer has given up."""
    assert context._abort_codes is not None
    while not context._abort_codes.any():
        time.sleep(0.01)


def break_after(count: int, kind: str) -> None:
    """The `count`th time that an expert's bytes are read or written, this process raises, dies or stops.

    It stops until a peer has given up, and then goes on without having looked.
    """
    done = [0]

    def broken(original: Any) -> Any:
        def call(self: Any, *arguments: Any) -> None:
            done[0] += 1
            if done[0] >= count:
                if kind == "raises":
                    raise OSError("bad memory")
                if kind == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                wait_for_a_failure(self.context)
            original(self, *arguments)

        return call

    migration.ExpertMover._load = broken(migration.ExpertMover._load)  # type: ignore[method-assign]
    migration.ExpertMover._store = broken(migration.ExpertMover._store)  # type: ignore[method-assign]


def missed_rank_2(outcomes: list[Outcome], kind: str) -> Iterator[tuple[str, int, str]]:
    """Check how ranks ended where rank 2 fails, and what it raised told the others.

    Yields what each of them raised that missed it: the name of its type, the rank it names, and its text.
    """
    for rank, outcome in enumerate(outcomes):
        if rank == 2 and kind == "dies":
            assert outcome.exitcode == -signal.SIGKILL
            continue
        name, about, message, seconds = outcome.returned()
        assert seconds < PATIENCE_S / 2
        if rank == 2 and kind == "raises":
            assert (name, message) == ("OSError", "bad memory")
        elif kind == "raises":
            assert (name, about) == ("PeerAbortedError", 2) and "bad memory" in message, (rank, message)
        elif rank != 2:
            yield name, about, message


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("kind", "transport", "among_two"),
    [
        ("raises", "shared", False),
        ("raises", "shared", True),
        ("dies", "shared", False),
        ("stops", "shared", True),
        ("raises", "collective", False),
        ("dies", "collective", False),
    ],
)
def test_a_rank_that_fails_in_the_middle_ends_it_for_all(kind: str, transport: str, among_two: bool, seed: int) -> None:
    """Also for ranks 0 and 1 where they have no part in it (`among_two`)."""
    outcomes = run_once(fail_in_the_middle, 4, kind, transport, among_two, seed, timeout=150)
    for name, about, message in missed_rank_2(outcomes, kind):
        assert (name, about) == ("PeerTimeoutError", 2) and "rank 2" in message
        assert "replacement" in message or transport == "collective"


def mover_of_rank(world: int) -> migration.ExpertMover:
    """Of a layer of this rank, over memory that its peers have mapped."""
    context = ExpertParallelContext(timeout_s=PATIENCE_S)
    layer = MoELayer(config(), context, placement=placements(world)[0])
    layer.load_random(0)
    context.allocate()
    assert layer.experts is not None
    placement = placements(world)[0]
    return migration.ExpertMover(context, layer.experts, plan_migration(placement, placement, world))


def wait_in_a_row(rank: int, world: int, last_waits: bool) -> int:
    """Rank 0 waits for rank 1, which waits longer for rank 2, which is not there or waits for rank 0; who is named."""
    waiting = mover_of_rank(world)
    context = waiting.context
    dist.barrier()
    if rank == 0:
        context.timeout_s = WITHOUT_ONE_S
    if rank == 2 and not last_waits:
        wait_for_a_failure(context)
    with pytest.raises(PeerTimeoutError) as caught:
        waiting._wait(waiting._words(rank).sent, (rank + 1) % world, 1)
    context.close()
    return caught.value.rank


@pytest.mark.cpu_only
@pytest.mark.parametrize("last_waits", [False, True])
def test_a_rank_that_waits_itself_is_not_named_for_one_that_is_not_there(last_waits: bool, get_pool: Any) -> None:
    assert get_pool(3).run(wait_in_a_row, last_waits) == [1 if last_waits else 2] * 3


def look_at_changing_words(rank: int, world: int) -> int:
    """Rank 0 looks for those that ask and for aborts while rank 1 writes such words; how often it saw one."""
    mine = mover_of_rank(world)
    context = mine.context
    signals = context.heap.peer_tensor("signals", 0).view(torch.int32)
    words = [mine._words(0).asked[1:2].numpy(), abort_words(signals, context.signals_layout)[1, :1].numpy()]
    seen = 0
    dist.barrier()
    end = time.monotonic() + LOOK_S
    while time.monotonic() < end:
        if rank == 1:
            for word in words:
                word[0] = 1 - word[0]
            continue
        mine._answer()
        reference.adopt_aborts(context)
        seen += int(context.latch[0])
        context.latch.zero_()
    dist.barrier()
    context.failed = True
    context.close()
    return seen


@pytest.mark.cpu_only
def test_words_may_change_while_they_are_looked_at(get_pool: Any) -> None:
    assert get_pool(2).run(look_at_changing_words)[0] > 0


def stay_away(rank: int, world: int, seed: int) -> tuple[str, int, str, float]:
    """Rank 1 does not take part in a re-placement, and gives up when the others have."""
    context = ExpertParallelContext(timeout_s=WITHOUT_ONE_S)
    plans = placements(world)
    layer = MoELayer(config(), context, placement=plans[0])
    layer.load_random(seed)
    context.allocate()
    dist.barrier()
    if rank == 1:
        dist.barrier()
        context.abort("it was elsewhere")
        context.close()
        return "", -1, "", 0.0
    start = time.monotonic()
    try:
        layer.replace_experts(plans[1])
    except MoERuntimeError as error:
        seconds = time.monotonic() - start
        with pytest.raises(type(error)):
            layer(torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
        context.close()
        return type(error).__name__, error.rank, str(error), seconds
    finally:
        dist.barrier()
    raise AssertionError("no error was raised")


@pytest.mark.cpu_only
def test_a_rank_that_does_not_come_is_named_in_time(seed: int) -> None:
    outcomes = run_once(stay_away, 3, seed, timeout=150)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        name, about, message, seconds = outcomes[rank].result
        assert (name, about) == ("PeerTimeoutError", 1) and seconds < PATIENCE_S / 2
        assert f"replace_experts: rank 1 of 3 did not come within {WITHOUT_ONE_S:g} s" in message


def test_a_layer_without_a_placement_or_weights_has_nothing_to_replace(device: torch.device) -> None:
    placement = Placement.contiguous(EXPERTS, 1)
    context = ExpertParallelContext(device=device)
    with pytest.raises(ValueError, match="placement: the layer was made without one"):
        MoELayer(config(), context).replace_experts(placement)
    with pytest.raises(ValueError, match="experts: no weights are loaded"):
        MoELayer(config(), ExpertParallelContext(device=device), placement=placement).replace_experts(placement)
    with pytest.raises(ValueError, match=r"placement: expected 10 experts on 1 rank\(s\), got 10 experts .* on 2 rank"):
        MoELayer(config(), context, placement=Placement.contiguous(EXPERTS, 2))
    with pytest.raises(ValueError, match="placement: expected a Placement or None, got tuple"):
        MoELayer(config(), context, placement=(0, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"staging_bytes: .* but the context is allocated with 0"):
        MoELayer(config(), context, placement=placement)


def test_staging_is_reserved_for_placed_layers_alone(device: torch.device) -> None:
    for world in (1, 3):
        for placement in (None, plan_placement([1] * EXPERTS, world, EXPERTS)):
            with VirtualRanks(config(), world, lambda layer: None, device=device, placement=placement) as ranks:
                expected = memory.reserved_bytes(config(), world, placed=placement is not None)
                assert {context.reserved_bytes for context in ranks.contexts} == {sum(expected.values())}
                # 3 matrices of 256 x 128 in bf16, and a block of words.
                assert expected.get("staging", 0) == (0 if placement is None else 256 + 3 * 256 * 128 * 2)
    large = MoELayerConfig(
        hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8, max_tokens_per_rank=8, token_format="nvfp4"
    )
    assert memory.staging_bytes(large, 8) == 256 + (16 << 20)
