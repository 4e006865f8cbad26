"""The layer over real processes: equal to virtual ranks bit for bit, and everything that can go wrong between ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.comm.errors import MoERuntimeError, PeerTimeoutError, Phase
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.gemm.weights import SwiGLU
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from moe_runtime.virtual import VirtualRanks
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, LAYERS, TOKENS, TOP_K, RankInput, config, rank_input
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once
from tests.support.stages import compute, receive, send


def step_inputs(seed: int, step: int, world: int) -> list[RankInput]:
    """Uneven counts, a rank without tokens, all tokens to one expert, and unrouted tokens, one step after the other."""
    routing = ("random", "one", "none", "random")[step % 4]
    return [
        rank_input(seed + step, r, (TOKENS, 0, 1, 5)[(r + step) % 4], HIDDEN, EXPERTS, TOP_K, routing)
        for r in range(world)
    ]


STEPS = 4


def run_layers(
    rank: int, world: int, configs: list[MoELayerConfig], seed: int, transport: str, engine: str
) -> list[list[torch.Tensor]]:
    """The steps of each layer in turn, all layers over one context; `y` by layer and step."""
    with ExpertParallelContext(transport=transport, engine=engine, timeout_s=30) as context:
        layers = [MoELayer(c, context) for c in configs]
        for layer in layers:
            layer.load_random(seed)
        results: list[list[torch.Tensor]] = [[] for _ in layers]
        for step in range(STEPS):
            for number, layer in enumerate(layers):
                mine = step_inputs(seed, step, world)[rank]
                results[number].append(layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
        return results


def virtual_results(world: int, c: MoELayerConfig, seed: int) -> list[list[torch.Tensor]]:
    """`y` by rank and step, of one process with virtual ranks."""
    with VirtualRanks(c, world, lambda layer: layer.load_random(seed)) as ranks:
        steps = []
        for step in range(STEPS):
            inputs = step_inputs(seed, step, world)
            steps.append(ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs]))
        return [list(ys) for ys in zip(*steps, strict=True)]


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_processes_equal_virtual_ranks_bit_for_bit(world: int, get_pool: Any, seed: int) -> None:
    transport = "private" if world == 1 else "shared"
    results = get_pool(world).run(run_layers, LAYERS, seed, transport, "torch", timeout=150)
    for number, c in enumerate(LAYERS):
        expected = virtual_results(world, c, seed)
        for rank in range(world):
            for step in range(STEPS):
                what = f"layer {number}, step {step}, rank {rank} of {world}"
                assert_same_bits(results[rank][number][step], expected[rank][step], what)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [2, 3])
def test_the_collective_transport_gives_the_same_bits(world: int, get_pool: Any, seed: int) -> None:
    results = get_pool(world).run(run_layers, LAYERS, seed, "collective", "torch", timeout=120)
    for number, c in enumerate(LAYERS):
        expected = virtual_results(world, c, seed)
        for rank in range(world):
            for step in range(STEPS):
                assert_same_bits(results[rank][number][step], expected[rank][step], f"layer {number}, step {step}")


def make_dispatcher(context: ExpertParallelContext, fmt: str, mode: Any) -> TokenDispatcher:
    return TokenDispatcher.from_config(context, config(fmt), mode=mode)


def foreseeable_output(arrived: DispatchedTokens, rank: int) -> torch.Tensor:
    """Expert outputs that depend on rank and position only; NaN where no row is."""
    output = torch.full((arrived.capacity, HIDDEN), float("nan"))
    total = int(arrived.group_offsets[-1])
    place = torch.arange(total)[:, None] * 3 + torch.arange(HIDDEN)[None, :] + 17 * rank
    output[:total] = (place % 101).float() / 8 - 6
    return output


def late_in_first_steps(rank: int, world: int, transport: str) -> None:
    """Rank 1 comes later than a step's limit to both halves of the first step of a context's second layer."""
    with ExpertParallelContext(transport=transport, timeout_s=0.2, startup_timeout_s=PATIENCE_S) as context:
        for late_s, fmt in ((0.0, "bf16"), (0.6, "nvfp4")):
            dispatcher = make_dispatcher(context, fmt, "auto")
            mine = rank_input(0, rank, 3, HIDDEN, EXPERTS, TOP_K)
            context.allocate()
            time.sleep(late_s * rank)
            arrived = dispatcher.dispatch(*mine)
            time.sleep(late_s * rank)
            dispatcher.combine(foreseeable_output(arrived, rank), arrived.handle)


@pytest.mark.cpu_only
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_the_first_step_of_each_layer_may_take_long(transport: str, get_pool: Any) -> None:
    get_pool(2).run(late_in_first_steps, transport)


def dispatch_ahead(rank: int, world: int) -> list[int]:
    """Rows that arrive in dispatches of 4, 4 and 0 or 4 tokens a rank, two in flight, none combined; rank 0 is slow."""
    with ExpertParallelContext(engine="torch", timeout_s=60) as context:
        dispatcher = TokenDispatcher(context, hidden_size=128, num_experts=2, top_k=1, max_tokens_per_rank=4)

        def send(tokens: int) -> DispatchHandle:
            x = torch.ones(tokens, 128, dtype=torch.bfloat16)
            return dispatcher.dispatch_send(x, torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1))

        handles = [send(4), send(4)]
        if rank == 0:
            time.sleep(1.0)
        arrived = [dispatcher.dispatch_recv(handle) for handle in handles]
        arrived.append(dispatcher.dispatch_recv(send(0 if rank == 1 else 4)))
        return [int(a.group_offsets[-1]) for a in arrived]


@pytest.mark.cpu_only
def test_a_rank_two_steps_ahead_without_tokens_takes_none_from_a_slow_one(get_pool: Any) -> None:
    assert get_pool(2).run(dispatch_ahead, timeout=120) == [[8, 8, 4], [0, 0, 0]]


SMALL = [
    MoELayerConfig(
        hidden_size=128,
        intermediate_size=128,
        num_experts=3,
        top_k=2,
        max_tokens_per_rank=4,
        token_format=fmt,
        weight_format=weights,
    )
    for fmt, weights in (*((fmt, fmt) for fmt in FORMATS), ("mxfp8", "mxfp4"))
]


def run_interpreted(rank: int, world: int, seed: int) -> list[torch.Tensor]:
    with ExpertParallelContext(engine="triton", timeout_s=60) as context:
        layers = [MoELayer(c, context) for c in SMALL]
        results = []
        for layer in layers:
            layer.load_random(seed)
            mine = rank_input(seed, rank, (4, 3)[rank], 128, 3, 2)
            results.append(layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
        return results


@pytest.mark.cpu_only
def test_the_whole_layer_interpreted_in_processes_equals_virtual_ranks(get_pool: Any, seed: int) -> None:
    results = get_pool(2).run(run_interpreted, seed, timeout=150)
    for number, c in enumerate(SMALL):
        inputs = [rank_input(seed, r, (4, 3)[r], 128, 3, 2) for r in range(2)]
        with VirtualRanks(c, 2, lambda layer: layer.load_random(seed), engine="triton") as ranks:
            ys = ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])
        for rank in range(2):
            assert_same_bits(results[rank][number], ys[rank], f"{c.weight_format}, rank {rank}")


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_one_ep_size_agrees_with_another_within_the_rounding_of_partial_sums(fmt: str, seed: int) -> None:
    """`y` differs only by the rounding of partial sums to bf16 (half an ulp each, 2^-9 relative) and of `y` itself."""
    x = rank_input(seed, 0, TOKENS, HIDDEN, EXPERTS, TOP_K)
    results = {}
    for world in (1, 2, 5):
        with VirtualRanks(config(fmt), world, lambda layer: layer.load_random(seed)) as ranks:
            none = rank_input(seed, 1, 0, HIDDEN, EXPERTS, TOP_K)
            inputs = [x] + [none] * (world - 1)
            results[world] = ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])[0].double()
    # Per element the sum of magnitudes of what is added bounds the partial sums; the experts' own outputs are taken
    # from the one-rank run of each expert alone, so the bound holds whatever the format does to them.
    magnitude = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    with VirtualRanks(config(fmt), 1, lambda layer: layer.load_random(seed)) as ranks:
        for k in range(TOP_K):
            only = torch.full_like(x.topk_idx, -1)
            only[:, k] = x.topk_idx[:, k]
            magnitude += ranks([x.x], [(only, x.topk_weights)])[0].double().abs()
    for world in (2, 5):
        error = (results[world] - results[1]).abs()
        # Up to TOP_K roundings of partial sums in each run and one of y, each at most 2^-8 of the magnitude added up.
        assert (error <= (2 * TOP_K + 2) * 2.0**-8 * magnitude + 1e-30).all()


def unit_tokens(seed: int, rank: int, num_tokens: int) -> torch.Tensor:
    """bf16 `[T, H]` of unit variance, as after the norm that precedes an expert layer."""
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    return torch.randn(num_tokens, HIDDEN, generator=generator).to(torch.bfloat16)


def route_and_run(rank: int, world: int, c: MoELayerConfig, seed: int) -> list[torch.Tensor]:
    with ExpertParallelContext(timeout_s=30) as context:
        layer = MoELayer(c, context)
        layer.load_random(seed)
        x = unit_tokens(seed, rank, 64)
        return [layer(x), *layer.router(x)]


@pytest.mark.cpu_only
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_the_layer_is_within_its_bound_of_float64(fmt: str, get_pool: Any, seed: int) -> None:
    world = 4
    c = config(fmt, max_tokens_per_rank=64)
    results = get_pool(world).run(route_and_run, c, seed)
    experts = [random_expert(c, seed, e) for e in range(EXPERTS)]
    gate_up, down = (torch.stack([pair[i] for pair in experts]) for i in (0, 1))
    reference = [
        moe_reference(unit_tokens(seed, rank, 64), idx, weights, gate_up, down, SwiGLU())
        for rank, (_, idx, weights) in enumerate(results)
    ]
    frobenius, _ = relative_error(torch.cat([y for y, _, _ in results]), torch.cat(reference))
    assert frobenius <= error_bound(fmt)


CALL_S = 60.0


def call_wrongly(rank: int, world: int, kind: str, seed: int) -> tuple[str, int, int, str, float]:
    """A good step, then one in which rank 1 errs; `(error, its rank, its phase, text, seconds)` of that one."""
    context = ExpertParallelContext(timeout_s=CALL_S)
    layer = MoELayer(config(), context)
    layer.load_random(seed)
    mine = rank_input(seed, rank, 4, HIDDEN, EXPERTS, TOP_K)
    layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
    # A failure ends the group, so a rank that is still in the step before may learn of it there: here none is.
    dist.barrier()
    x, idx, weights = mine.x, mine.topk_idx.clone(), mine.topk_weights
    if rank == 1:
        if kind == "width":
            x = x[:, :128]
        elif kind == "dtype":
            x = x.half()
        elif kind == "top_k":
            idx, weights = idx.repeat(1, 2), weights.repeat(1, 2)
        elif kind == "too many":
            x, idx, weights = x.repeat(9, 1), idx.repeat(9, 1), weights.repeat(9, 1)
        elif kind == "grad":
            x = x.clone().requires_grad_()
        elif kind == "out of memory":
            layer.router = BrokenRouter()  # type: ignore[assignment]
        elif kind == "expert id":
            idx[0, 0] = EXPERTS
        elif kind == "expert twice":
            idx[3] = torch.tensor([5, 1, 5])
    start = time.monotonic()
    try:
        if kind == "out of memory":
            layer(x)
        else:
            layer(x, topk_idx=idx, topk_weights=weights)
    except (ValueError, MemoryError, MoERuntimeError) as error:
        seconds = time.monotonic() - start
        # The same error ever after, at once, and an orderly end.
        if isinstance(error, MoERuntimeError):
            with pytest.raises(type(error)):
                layer(mine.x)
            with pytest.raises(type(error)):
                context.check()
        context.close()
        return (
            type(error).__name__,
            getattr(error, "rank", -1),
            int(getattr(error, "phase", -1)),
            str(error),
            seconds,
        )
    raise AssertionError("no error was raised")


class BrokenRouter(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise MemoryError("no room for the logits")


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("width", "ValueError", "x: expected"),
        ("dtype", "ValueError", "x: expected torch.bfloat16"),
        ("top_k", "ValueError", "topk_idx: expected shape"),
        ("too many", "ValueError", "x: expected at most max_tokens_per_rank"),
        ("grad", "ValueError", "x: requires grad"),
        ("out of memory", "MemoryError", "no room for the logits"),
    ],
)
def test_a_mistake_on_one_rank_ends_the_step_on_all(kind: str, error: str, text: str, get_pool: Any, seed: int) -> None:
    results = get_pool(3).run(call_wrongly, kind, seed)
    assert results[1][0] == error and text in results[1][3]
    for rank in (0, 2):
        name, about, _, message, seconds = results[rank]
        assert (name, about) == ("PeerAbortedError", 1)
        assert text in message
        assert seconds < CALL_S, "peers must learn of it, not run into their timeout"


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", ["expert id", "expert twice"])
def test_a_bad_expert_id_is_a_routing_error_everywhere(kind: str, get_pool: Any, seed: int) -> None:
    for name, about, phase, _, seconds in get_pool(3).run(call_wrongly, kind, seed):
        assert (name, about, phase) == ("RoutingError", 1, int(Phase.DISPATCH_SEND))
        assert seconds < CALL_S


def disagree(rank: int, world: int, change: dict[str, Any]) -> str:
    context = ExpertParallelContext(timeout_s=5)
    layer = MoELayer(config(**(change if rank == 1 else {})), context)
    layer.load_random(0)
    try:
        layer(torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
    except ValueError as error:
        with pytest.raises(ValueError, match="disagree"):
            context.check()
        context.close()
        return str(error)
    raise AssertionError("no error was raised")


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 2},
        {"token_format": "nvfp4"},
        {"max_tokens_per_rank": 13},
        {"intermediate_size": 256},
        {"weight_format": "nvfp4"},
    ],
)
def test_ranks_that_disagree_all_learn_on_what(change: dict[str, Any], get_pool: Any) -> None:
    for message in get_pool(2).run(disagree, change):
        key, value = next(iter(change.items()))
        assert key in message and str(value) in message


def load_what_one_rank_lacks(rank: int, world: int, folder: str, own_context: bool) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        if own_context:
            path = folder if rank != 1 else folder + "/nowhere"
            layer = MoELayer.from_checkpoint(path, max_tokens_per_rank=4)
        else:
            context = ExpertParallelContext()
            layer = MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=4)
        layer(torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
    except (ValueError, MoERuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError("no error was raised")


@pytest.mark.cpu_only
@pytest.mark.parametrize("own_context", [True, False])
def test_weights_that_one_rank_cannot_read_end_the_start_of_all(
    own_context: bool, get_pool: Any, tmp_path: Path
) -> None:
    write_qwen3_moe_checkpoint(tmp_path, config(num_experts=6), seed=0)
    text = "nowhere"
    if not own_context:
        text = "experts.3.up_proj.weight is missing"
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
    results = get_pool(3).run(load_what_one_rank_lacks, str(tmp_path), own_context)
    for rank, (name, message, seconds) in enumerate(results):
        assert name == ("ValueError" if rank == 1 else "PeerAbortedError")
        assert text in message and (rank == 1 or "rank 1 gave up" in message)
        assert seconds < 120, "not by the start-up timeout of 120 s"


def load_late(rank: int, world: int, folder: str, kind: str) -> tuple[str, str, float]:
    """Rank 1 fails in loading weights into a layer that is there, before the first step or after it."""
    start = time.monotonic()
    context = ExpertParallelContext(timeout_s=PATIENCE_S)
    layer = MoELayer(config(num_experts=6), context)

    def experts() -> Iterator[ExpertTensors]:
        for expert in layer.local_experts:
            if rank == 1:
                raise {"KeyError": KeyError("w1"), "KeyboardInterrupt": KeyboardInterrupt()}[kind]
            yield random_expert(layer.config, 0, expert)

    try:
        if kind == "later":
            layer.load_random(0)
            layer(torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
        if kind in ("path", "later"):
            layer.load_checkpoint(folder if rank != 1 else f"{folder}/nowhere", 0)
        else:
            layer.load_experts(experts())
        layer(torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
    except (ValueError, KeyError, KeyboardInterrupt, MoERuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError("no error was raised")


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", ["path", "later", "KeyError", "KeyboardInterrupt"])
def test_weights_that_one_rank_cannot_load_are_told_to_the_others(kind: str, get_pool: Any, tmp_path: Path) -> None:
    write_qwen3_moe_checkpoint(tmp_path, config(num_experts=6), seed=0)
    results = get_pool(3).run(load_late, str(tmp_path), kind)
    own, text = {"KeyError": ("KeyError", "KeyError: 'w1'"), "KeyboardInterrupt": ("KeyboardInterrupt",) * 2}.get(
        kind, ("ValueError", "nowhere")
    )
    assert results[1][0] == own
    for name, message, seconds in (results[0], results[2]):
        assert name == "PeerAbortedError" and f"rank 1 gave up: {'' if own == 'ValueError' else own}" in message
        assert text in message
        assert seconds < PATIENCE_S, "peers must learn of it, not run into their timeout"


def load_what_differs_second(rank: int, world: int, folders: list[str]) -> None:
    """The second of two layers, both of which are there before the weights of either."""
    with ExpertParallelContext(timeout_s=20.0) as context:
        layers = [MoELayer(config(num_experts=6, token_buckets=(2,)), context) for _ in range(2)]
        layers[0].load_checkpoint(folders[0], 0)
        layers[1].load_checkpoint(folders[rank], 0)
        context.allocate()


@pytest.mark.cpu_only
def test_a_disagreement_names_the_layer_that_it_is_about(get_pool: Any, tmp_path: Path) -> None:
    folders = [str(tmp_path / str(rank)) for rank in range(2)]
    for rank, folder in enumerate(folders):
        write_qwen3_moe_checkpoint(folder, config(num_experts=6), seed=rank)
    for outcome in get_pool(2).outcomes(load_what_differs_second, folders):
        assert isinstance(outcome.error, ValueError), outcome
        assert "disagree on sha256 of model.layers.0.mlp.gate.weight (layer 1): rank 0" in str(outcome.error)
        assert "(layer 0)" not in str(outcome.error)


def load_what_differs(rank: int, world: int, folders: list[str]) -> None:
    context = ExpertParallelContext(timeout_s=20.0)
    layer = MoELayer.from_checkpoint(folders[rank], context=context, max_tokens_per_rank=4)
    layer(torch.zeros(1, HIDDEN, dtype=torch.bfloat16))


@pytest.mark.cpu_only
@pytest.mark.parametrize("what", ["weights", "config", "shard"])
def test_ranks_that_see_other_files_are_told_which(what: str, get_pool: Any, tmp_path: Path) -> None:
    """Other weights of the same shapes show in the gate, which all ranks read; a shard in which only rank 2's experts
    lie shows in its header."""
    folders = [str(tmp_path / str(rank)) for rank in range(3)]
    for rank, folder in enumerate(folders):
        seed, shards = int(what == "weights" and rank == 1), 3 if what == "shard" else 1
        write_qwen3_moe_checkpoint(folder, config(num_experts=6), seed=seed, num_shards=shards)
    if what == "config":
        file = Path(folders[1]) / "config.json"
        file.write_text(file.read_text() + "\n")
    shard = "model-00003-of-00003.safetensors"
    if what == "shard":
        tensors = load_file(f"{folders[1]}/{shard}")
        save_file(tensors, f"{folders[1]}/{shard}", metadata={"format": "pt", "saved": "again"})
    name = {"config": "config.json", "weights": "model.layers.0.mlp.gate.weight"}.get(what, f"the header of {shard}")
    for outcome in get_pool(3).outcomes(load_what_differs, folders):
        assert isinstance(outcome.error, ValueError), outcome
        assert f"agree: ranks disagree on sha256 of {name} (layer 0)" in str(outcome.error)


def die_in(rank: int, world: int, phase: str, seed: int) -> tuple[str, int, float]:
    # Those that live may be half a layer apart here.
    context = ExpertParallelContext(timeout_s=1.5 * WITHOUT_ONE_S)
    layer = MoELayer(config("mxfp8"), context)
    layer.load_random(seed)
    mine = rank_input(seed, rank, 4, HIDDEN, EXPERTS, TOP_K, "one")
    for _ in range(2):
        layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
    dist.barrier()
    start = time.monotonic()
    try:
        if rank == 2 and phase == "before dispatch":
            os.kill(os.getpid(), signal.SIGKILL)
        step = send(layer, *mine)
        if rank == 2 and phase == "after dispatch":
            os.kill(os.getpid(), signal.SIGKILL)
        compute(layer, step)
        if rank == 2 and phase == "after combine_send":
            os.kill(os.getpid(), signal.SIGKILL)
        receive(layer, step)
        # Who dies after it has sent everything is missed in the next step.
        layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
    except PeerTimeoutError as error:
        context.close()
        return str(error), error.rank, time.monotonic() - start
    raise AssertionError("no error was raised")


@pytest.mark.cpu_only
@pytest.mark.parametrize("phase", ["before dispatch", "after dispatch", "after combine_send"])
def test_a_rank_that_dies_is_named_by_the_others_in_time(phase: str, seed: int) -> None:
    outcomes = run_once(die_in, 3, phase, seed, timeout=150)
    assert outcomes[2].exitcode == -signal.SIGKILL
    for rank in (0, 1):
        assert outcomes[rank].error is None, outcomes[rank].trace
        message, missing, seconds = outcomes[rank].result
        assert missing == 2 and "rank 2" in message
        assert seconds < 120, "not by the start-up timeout of 120 s"
        assert outcomes[rank].exitcode == 0


def in_halves(rank: int, world: int, seed: int) -> torch.Tensor:
    """Two groups of two ranks, each with a layer of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with ExpertParallelContext(groups[rank // 2], timeout_s=30) as context:
        layer = MoELayer(config("nvfp4"), context)
        layer.load_random(seed + rank // 2)
        mine = rank_input(seed, rank, 5, HIDDEN, EXPERTS, TOP_K)
        return layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)


@pytest.mark.cpu_only
def test_a_group_may_be_a_part_of_the_world(get_pool: Any, seed: int) -> None:
    results = get_pool(4).run(in_halves, seed)
    for half in range(2):
        inputs = [rank_input(seed, 2 * half + r, 5, HIDDEN, EXPERTS, TOP_K) for r in range(2)]
        number = seed + half
        with VirtualRanks(config("nvfp4"), 2, lambda layer, n=number: layer.load_random(n)) as ranks:
            ys = ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])
        for r in range(2):
            assert_same_bits(results[2 * half + r], ys[r], f"rank {r} of half {half}")
