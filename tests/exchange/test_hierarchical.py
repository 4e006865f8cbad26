"""The exchange over several hosts: processes equal virtual hosts bit for bit, and all hosts learn what fails."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest
import torch

from moe_runtime.build import random_expert
from moe_runtime.comm import host_link
from moe_runtime.comm.errors import (
    CapacityError,
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    RoutingError,
    StepMismatchError,
)
from moe_runtime.comm.hosts import Hosts, find_hosts
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.memory import reserved_bytes
from moe_runtime.kernels.exchange import hierarchical
from moe_runtime.kernels.exchange.hierarchical import PART_TOKENS, HostGeometry
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.gemm.weights import SwiGLU
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from moe_runtime.virtual import VirtualRanks, virtual_contexts
from tests.exchange.test_distributed import STEPS, step_inputs, unit_tokens
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, LAYERS, TOKENS, TOP_K, config, rank_input
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once

SHAPES = [(2, 1), (2, 2), (2, 4), (4, 2)]
"""Hosts, and ranks of each."""


def virtual_results(world: int, num_hosts: int, c: MoELayerConfig, seed: int) -> list[list[torch.Tensor]]:
    """`y` by rank and step, of virtual ranks on `num_hosts` virtual hosts."""
    with VirtualRanks(c, world, lambda layer: layer.load_random(seed), num_hosts=num_hosts) as ranks:
        steps = []
        for step in range(STEPS):
            inputs = step_inputs(seed, step, world)
            steps.append(ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs]))
        return [list(ys) for ys in zip(*steps, strict=True)]


def on_host(rank: int, ranks_per_host: int) -> None:
    """Let this process take itself for one of its own host."""
    os.environ["MOE_RUNTIME_HOST"] = f"host{rank // ranks_per_host}"


def make_context(
    rank: int, ranks_per_host: int, timeout_s: float = 30.0, transport: str = "auto", engine: str = "torch"
) -> ExpertParallelContext:
    on_host(rank, ranks_per_host)
    return ExpertParallelContext(
        transport=transport, engine=engine, timeout_s=timeout_s, startup_timeout_s=PATIENCE_S, device="cpu"
    )


def in_parts(parts: int) -> None:
    """Let this process send the chunks of the layers of these tests in so many parts."""
    hierarchical.PART_TOKENS = TOKENS // parts


def run_layers(
    rank: int, world: int, ranks_per_host: int, seed: int, parts: int, delays: bool
) -> list[list[torch.Tensor]]:
    """The steps of each layer in turn, all over one context; `y` by layer and step."""
    in_parts(parts)
    dice = random.Random(seed * 100 + rank)
    start = host_link.GlooLink.start

    def late(self: host_link.GlooLink, *arguments: Any) -> host_link.Exchange:
        time.sleep(dice.choice((0.0, 0.0, 0.05)))
        return start(self, *arguments)

    if delays:
        host_link.GlooLink.start = late  # type: ignore[method-assign]
    try:
        with make_context(rank, ranks_per_host) as context:
            assert context.transport == "hierarchical"
            layers = [MoELayer(c, context) for c in LAYERS]
            for layer in layers:
                layer.load_random(seed)
                geometry = layer.dispatcher._exchange.host_geometry  # type: ignore[attr-defined]
                assert len(geometry.parts) >= parts
            results: list[list[torch.Tensor]] = [[] for _ in layers]
            for step in range(STEPS):
                for number, layer in enumerate(layers):
                    mine = step_inputs(seed, step, world)[rank]
                    results[number].append(layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
            return results
    finally:
        host_link.GlooLink.start = start  # type: ignore[method-assign]
        hierarchical.PART_TOKENS = PART_TOKENS
        del os.environ["MOE_RUNTIME_HOST"]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("num_hosts", "per_host"), SHAPES)
def test_processes_equal_virtual_hosts_bit_for_bit(num_hosts: int, per_host: int, get_pool: Any, seed: int) -> None:
    """The virtual ones send each chunk as a whole."""
    world = num_hosts * per_host
    parts, delays = {(2, 2): 2, (4, 2): 4}.get((num_hosts, per_host), 1), (num_hosts, per_host) == (2, 2)
    results = get_pool(world).run(run_layers, per_host, seed, parts, delays, timeout=150)
    for number, c in enumerate(LAYERS):
        expected = virtual_results(world, num_hosts, c, seed)
        for rank in range(world):
            for step in range(STEPS):
                what = f"layer {number}, step {step}, rank {rank} of {world}"
                assert_same_bits(results[rank][number][step], expected[rank][step], what)


@pytest.mark.parametrize("combine", ["bf16", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_the_layer_is_within_its_bound_of_float64(fmt: str, combine: str, seed: int) -> None:
    world, num_hosts = 6, 3
    c = config(fmt, max_tokens_per_rank=40, combine_format=combine)
    inputs = [rank_input(seed, rank, 40, HIDDEN, EXPERTS, TOP_K) for rank in range(world)]
    xs = [unit_tokens(seed, rank, 40) for rank in range(world)]
    with VirtualRanks(c, world, lambda layer: layer.load_random(seed), num_hosts=num_hosts) as ranks:
        ys = ranks(xs, [(i.topk_idx, i.topk_weights) for i in inputs])
    experts = [random_expert(c, seed, e) for e in range(EXPERTS)]
    gate_up, down = (torch.stack([pair[i] for pair in experts]) for i in (0, 1))
    expected = [
        moe_reference(x, i.topk_idx, i.topk_weights, gate_up, down, SwiGLU()) for x, i in zip(xs, inputs, strict=True)
    ]
    error, _ = relative_error(torch.cat(ys), torch.cat(expected))
    assert error <= error_bound(fmt, combine_format=combine, several_hosts=True)


FAILURES = ("id", "argument", "late reason", "elsewhere", "capacity", "host capacity", "sizes", "bytes")
"""`late reason`: as `argument`, and the reason comes to the store half a second after the peers are told; `elsewhere`:
as `argument`, in a larger layer; `bytes`: as `sizes`, and the network carries other sizes, too."""


def one_rank_fails(rank: int, world: int, per_host: int, how: str, parts: int) -> str:
    """What each rank raises where the last rank makes a mistake in its second step."""
    in_parts(parts)
    argument = how in ("argument", "late reason", "elsewhere")
    with pytest.raises(MoERuntimeError if rank < world - 1 or not argument else ValueError) as caught:
        with make_context(rank, per_host, timeout_s=WITHOUT_ONE_S) as context:
            if how == "late reason" and rank == world - 1:
                group = context.group
                assert group is not None
                leave = group.leave
                group.leave = lambda *of: (time.sleep(0.5), leave(*of))[1]
            capacities = {"capacity": {"expert_row_capacity": 40}, "host capacity": {"host_capacity": 4}}
            c = config("bf16", **capacities.get(how, {}))
            layers = [MoELayer(c, context), MoELayer(c, context), MoELayer(c.replace(max_tokens_per_rank=40), context)]
            for layer in layers:
                layer.load_random(0)
            for step in range(6):
                mine = rank_input(step, rank, 4 if step != 1 and how == "host capacity" else 5, HIDDEN, EXPERTS, TOP_K)
                ids = mine.topk_idx
                if step == 1 and "capacity" in how:
                    ids = torch.arange(TOP_K).expand(5, TOP_K).contiguous()
                elif step == 1 and rank == world - 1 and how == "id":
                    ids = ids.clone()
                    ids[2, 1] = EXPERTS + 3
                elif step == 1 and rank == world - 1 and argument:
                    ids = ids[:, :-1]
                layer = layers[0]
                if step == 1 and rank == world - 1:
                    layer = layers[{"sizes": 1, "elsewhere": 2, "bytes": 2}.get(how, 0)]
                layer(mine.x, topk_idx=ids, topk_weights=mine.topk_weights)
    del os.environ["MOE_RUNTIME_HOST"]
    hierarchical.PART_TOKENS = PART_TOKENS
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("how", "parts"), [*((how, 1) for how in FAILURES), ("id", 3), ("argument", 3), ("late reason", 3)]
)
def test_a_mistake_of_one_rank_is_told_on_every_host(how: str, parts: int, get_pool: Any) -> None:
    texts = get_pool(4).run(one_rank_fails, 2, how, parts)
    kind, text = {
        "id": (RoutingError, "expert id"),
        "argument": (PeerAbortedError, "rank 3 gave up: topk_idx: expected shape"),
        "late reason": (PeerAbortedError, "rank 3 gave up: topk_idx: expected shape"),
        "capacity": (CapacityError, "more than its expert_row_capacity of 40"),
        "host capacity": (CapacityError, "go to one host, more than its host_capacity of 4"),
        "elsewhere": (PeerAbortedError, "rank 3 gave up: topk_idx: expected shape"),
        "sizes": (StepMismatchError, "the same layers in the same order"),
        "bytes": (StepMismatchError, "the same layers in the same order"),
    }[how]
    for rank, said in enumerate(texts):
        if how in ("argument", "late reason", "elsewhere") and rank == 3:
            assert said.startswith("ValueError: topk_idx")
            continue
        assert text in said and said.count("gave up") <= 1, (rank, said)
        assert said.startswith(kind.__name__), (rank, said)
    if how == "id":
        assert all("of rank 3 is out of range" in said for said in texts)
    if how == "capacity":
        # The experts of all tokens are the first ones, those of rank 0.
        assert all("arrived at rank 0" in said for said in texts)


PLACES = [("pack", 2), ("forward", 3), ("forward", 4), ("relay", 3), ("relay", 4), ("total", 2)]
"""The calls of the second step: `forward` and `relay` treat own tokens and those of other hosts apart."""


def one_rank_dies(rank: int, world: int, per_host: int, place: str, call: int, how: str) -> str:
    """The last rank ends, or stops, at a call of `place` in the second step; what the others raise, and when."""
    from moe_runtime.kernels.exchange import hierarchical

    context = make_context(rank, per_host, timeout_s=WITHOUT_ONE_S)
    layer = MoELayer(config("nvfp4"), context)
    layer.load_random(0)
    work, calls = getattr(hierarchical, place), [0]

    def fatal(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and rank == world - 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3 * WITHOUT_ONE_S)
        return work(*arguments)

    setattr(hierarchical, place, fatal)
    start = time.monotonic()
    try:
        for step in range(4):
            mine = rank_input(step, rank, 5, HIDDEN, EXPERTS, TOP_K)
            start = time.monotonic()
            layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
    except (PeerTimeoutError, PeerAbortedError) as error:
        assert time.monotonic() - start < PATIENCE_S
        context.close()
        return f"{type(error).__name__} {error.rank}: {error}"
    return "nothing"


@pytest.mark.cpu_only
@pytest.mark.parametrize(("place", "call"), [("pack", 2), ("total", 2)])
def test_a_rank_that_stalls_is_named_on_every_host(place: str, call: int) -> None:
    """And learns when it goes on that the others have given up, if it stalls before they are done."""
    outcomes = run_once(one_rank_dies, 4, 2, place, call, "stalled", timeout=4 * PATIENCE_S)
    for rank, outcome in enumerate(outcomes):
        told = outcome.returned()
        assert told != "nothing", rank
        assert rank == 3 or told.startswith("PeerTimeoutError 3") or "rank 3" in told, (rank, told)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("place", "call"), PLACES)
def test_a_dead_rank_is_named_on_every_host(place: str, call: int) -> None:
    outcomes = run_once(one_rank_dies, 4, 2, place, call, "killed", timeout=4 * PATIENCE_S)
    assert outcomes[3].exitcode == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes[:3]):
        told = outcome.returned()
        assert told.startswith("PeerTimeoutError 3") or "rank 3" in told, (rank, told)


def count_bytes(rank: int, world: int, per_host: int) -> list[int]:
    """Bytes of each exchange of a step that this rank sends to other hosts."""
    sent: list[int] = []
    start = host_link.GlooLink.start

    def counted(self: host_link.GlooLink, outgoing: host_link.Chunks, *arguments: Any) -> host_link.Exchange:
        assert all(chunk.is_contiguous() for chunk in outgoing)
        sent.append(sum(chunk.numel() for host, chunk in enumerate(outgoing) if host != self.hosts.host))
        return start(self, outgoing, *arguments)

    host_link.GlooLink.start = counted  # type: ignore[method-assign]
    try:
        with make_context(rank, per_host) as context:
            layer = MoELayer(config("nvfp4"), context)
            layer.load_random(0)
            mine = rank_input(0, rank, 3, HIDDEN, EXPERTS, TOP_K)
            layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
            geometry = HostGeometry(context.hosts, layer.dispatcher.geometry)  # type: ignore[arg-type]
            others = context.hosts.num_hosts - 1  # type: ignore[union-attr]
            record, tokens = geometry.flat.record.record_bytes, geometry.flat.max_tokens
            slots = 128 + -(-tokens * 4 // 128) * 128 + tokens * record
            assert sent == [others * slots, others * (tokens + 1) * 2 * HIDDEN]
            return sent
    finally:
        host_link.GlooLink.start = start  # type: ignore[method-assign]
        del os.environ["MOE_RUNTIME_HOST"]


@pytest.mark.cpu_only
def test_the_bytes_between_hosts_are_those_of_the_formula(get_pool: Any) -> None:
    """One record for each token and host, whatever the number of its ranks there, and one sum back."""
    assert len({tuple(sent) for sent in get_pool(4).run(count_bytes, 2)}) == 1


def test_a_dispatch_before_the_last_one_was_received_is_refused() -> None:
    """Its chunks would overwrite those that are under way."""
    contexts = virtual_contexts(2, num_hosts=2, engine="torch", timeout_s=5)
    dispatchers = [MoELayer(config(), context).dispatcher for context in contexts]
    for rank, dispatcher in enumerate(dispatchers):
        mine = rank_input(0, rank, 5, HIDDEN, EXPERTS, TOP_K)
        dispatcher.dispatch_send(*mine)
    with pytest.raises(ValueError, match="over several hosts dispatch_recv of the step before comes first"):
        dispatchers[1].dispatch_send(*mine)


def test_tokens_of_a_rail_that_cannot_be_counted_are_refused() -> None:
    """Their number would run over into that of the exchange."""
    many = 1 << 21
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 4, "top_k": 1, "max_tokens_per_rank": many}
    wide = MoELayerConfig(**sizes, token_format="bf16")
    said = rf"max_tokens_per_rank: expected .* less than 4194304 .*, got {2 * many + 2} on 2 hosts"
    with pytest.raises(ValueError, match=said):
        reserved_bytes(wide, 4, num_hosts=2)
    assert reserved_bytes(wide.replace(host_capacity=many - 2), 4, num_hosts=2)["link"] > 0
    assert reserved_bytes(wide, 4)["landing"] > 0


def test_hosts_are_found_or_refused_with_a_reason() -> None:
    assert find_hosts(["a"] * 3, 1) == Hosts(1, 3, 0, 1)
    assert find_hosts(["a", "a", "b", "b"], 3) == Hosts(2, 2, 1, 1)
    assert "different numbers" in str(find_hosts(["a", "b", "b"], 0))
    assert "do not follow" in str(find_hosts(["a", "b", "a", "b"], 0))
    hosts = Hosts(3, 4, 1, 2)
    assert hosts.rank == 6 and hosts.rail == [2, 6, 10] and hosts.local_ranks == [4, 5, 6, 7]
    assert [hosts.of_recorded(n) for n in range(4)] == [4, 5, 6, 7]
    assert [hosts.of_recorded(hosts.recorded(rank)) for rank in range(12)] == list(range(12))
