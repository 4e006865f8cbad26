"""A layer's step in stages and in micro-batches: the bits of the whole, whatever the parts."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime import step as step_module
from moe_runtime.config import MoELayerConfig, SharedExpertConfig
from moe_runtime.context import ExpertParallelContext
from moe_runtime.errors import PeerAbortedError
from moe_runtime.formats import FORMATS
from moe_runtime.layer import MoELayer
from moe_runtime.memory import reserved_bytes
from moe_runtime.metrics import PhaseTimes
from moe_runtime.step import ExchangeStream, sms_of_experts
from moe_runtime.virtual import VirtualRanks
from tests.comparison import assert_same_bits
from tests.exchange_data import EXPERTS, HIDDEN, TOKENS, TOP_K, RankInput, config, placements, rank_input

COUNTS = [(TOKENS, 0, 5), (1, TOKENS, 0), (0, 0, 0), (7, 2, 11)]
"""Tokens of three ranks: none, fewer than parts, some that no number of parts divides."""


def run(ranks: VirtualRanks, steps: list[list[RankInput]]) -> list[list[torch.Tensor]]:
    return [ranks([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs]) for inputs in steps]


def inputs_of(seed: int, device: torch.device) -> list[list[RankInput]]:
    return [
        [rank_input(seed + step, r, count, HIDDEN, EXPERTS, TOP_K).to(device) for r, count in enumerate(counts)]
        for step, counts in enumerate(COUNTS)
    ]


def make(c: MoELayerConfig, seed: int, device: torch.device, **settings: Any) -> VirtualRanks:
    return VirtualRanks(c, 3, lambda layer: layer.load_random(seed), device=device, **settings)


@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("mode", ["indexed", "packed"])
def test_micro_batches_change_no_bit(fmt: str, mode: str, device: torch.device, seed: int) -> None:
    steps = inputs_of(seed, device)
    with make(config(fmt, mode=mode), seed, device) as whole:
        expected = run(whole, steps)
    for parts in (2, 3, 5, TOKENS):
        with make(config(fmt, mode=mode, micro_batches=parts), seed, device) as ranks:
            for step, ys in enumerate(run(ranks, steps)):
                for rank, y in enumerate(ys):
                    assert_same_bits(y, expected[step][rank], f"{parts} parts, step {step}, rank {rank}")


@settings(max_examples=10)
@given(parts=st.integers(1, TOKENS), count=st.integers(0, TOKENS), seed=st.integers(0, 2**20))
def test_any_number_of_parts_and_tokens(parts: int, count: int, seed: int) -> None:
    mine = [[rank_input(seed, r, (count, 3)[r], HIDDEN, EXPERTS, TOP_K) for r in range(2)]]
    results = []
    for c in (config("nvfp4"), config("nvfp4", micro_batches=parts)):
        with VirtualRanks(c, 2, lambda layer: layer.load_random(7)) as ranks:
            results.append(run(ranks, mine)[0])
    for whole, y in zip(*results, strict=True):
        assert_same_bits(y, whole)


def test_router_shared_expert_load_and_times_see_every_token(
    device: torch.device, rng: torch.Generator, seed: int
) -> None:
    results, loads = [], []
    x = torch.randn(2, 5, HIDDEN, generator=rng).to(device, torch.bfloat16)
    for parts in (1, 3):
        c = config("mxfp8", micro_batches=parts, shared_expert=SharedExpertConfig(intermediate_size=64, gated=True))
        with ExpertParallelContext(device=device, timeout_s=10) as context:
            layer = MoELayer(c, context)
            layer.load_random(seed)
            counters, layer.times = layer.count_steps(), PhaseTimes(device)
            results.append(layer(x))
            loads.append(counters.read().expert_tokens)
            times = layer.times.milliseconds()
            for name in ("dispatch_send", "shared_expert", "dispatch_wait", "experts", "combine_send", "combine_wait"):
                assert len(times[name]) == parts, name
    assert_same_bits(results[1], results[0])
    assert loads[1] == loads[0]
    assert sum(loads[0]) == 10 * TOP_K


def test_a_placement_and_a_shared_output_are_cut_with_the_tokens(device: torch.device, seed: int) -> None:
    plan = placements(3)[0]
    steps = inputs_of(seed, device)
    results = []
    for parts in (1, 4):
        with make(config("fp8_block", micro_batches=parts), seed, device, placement=plan) as ranks:
            ys = []
            for inputs in steps:
                stages = [
                    layer.stages(i.x, topk_idx=i.topk_idx, topk_weights=i.topk_weights, shared=i.x.flip(0))
                    for layer, i in zip(ranks.layers, inputs, strict=True)
                ]
                ended: list[torch.Tensor] = []
                while not ended:
                    for stage in stages:
                        try:
                            next(stage)
                        except StopIteration as end:
                            ended.append(end.value)
                ys.append(ended)
            results.append(ys)
    for step, (whole, parts_of) in enumerate(zip(*results, strict=True)):
        for rank in range(3):
            assert_same_bits(parts_of[rank], whole[rank], f"step {step}, rank {rank}")


def test_less_memory_is_reserved() -> None:
    one, four = (reserved_bytes(config("bf16", micro_batches=parts), 8) for parts in (1, 4))
    assert four["combine"] * 4 == one["combine"]
    assert one["landing"] / 4 <= four["landing"] < one["landing"] / 3
    c = config("bf16", micro_batches=4)
    with make(c, 0, torch.device("cpu")) as ranks:
        expected = reserved_bytes(c, 3)
        for name in ("landing", "stamps", "combine"):
            assert ranks.contexts[0].heap.tensor(name).nbytes == expected[name], name


def test_experts_leave_the_exchange_its_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "most_sms", lambda _: 132)
    gpu = torch.device("cuda", 0)
    assert sms_of_experts(config(micro_batches=2, num_sms=16), gpu) == 132 - 16 - 8
    assert sms_of_experts(config(micro_batches=2, num_sms=132), gpu) == 1
    assert sms_of_experts(config(num_sms=16), gpu) is None
    assert sms_of_experts(config(micro_batches=2), gpu) is None
    assert sms_of_experts(config(micro_batches=2, num_sms=16), torch.device("cpu")) is None


def test_layers_of_a_device_share_the_stream_beside_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append(device))
    step_module._stream_of.cache_clear()
    try:
        gpus = [torch.device("cuda", number) for number in (0, 1)]
        for gpu in (None, *gpus, *gpus):
            ExchangeStream(gpu)
        assert made == gpus
    finally:
        step_module._stream_of.cache_clear()


def test_what_is_sent_is_kept_for_the_stream_that_reads_it(device: torch.device, seed: int) -> None:
    with make(config(micro_batches=2), seed, device) as ranks:
        mine = rank_input(seed, 0, 3, HIDDEN, EXPERTS, TOP_K).to(device)
        given = {name: getattr(mine, name).clone() for name in ("x", "topk_idx", "topk_weights")}
        addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
        ends = [weakref.ref(given["topk_idx"]), weakref.ref(given["topk_weights"])]
        begun = ranks.layers[0].begin(given.pop("x"), **given)
        given.clear()
        assert all(end() is not None for end in ends)
        assert begun.sent[0].data_ptr() == addresses["x"]


def test_mistakes_are_named(device: torch.device, seed: int) -> None:
    with pytest.raises(ValueError, match=f"micro_batches: expected at most max_tokens_per_rank = {TOKENS}, got 13"):
        config(micro_batches=13)
    mine = rank_input(seed, 0, TOKENS, HIDDEN, EXPERTS, TOP_K).to(device)
    longer = rank_input(seed, 0, TOKENS + 1, HIDDEN, EXPERTS, TOP_K).to(device)
    cases: list[tuple[str, torch.Tensor, torch.Tensor]] = [
        (f"x: expected at most max_tokens_per_rank = {TOKENS} tokens, got {TOKENS + 1}", longer.x, longer.topk_idx),
        (rf"topk_idx: expected shape \[{TOKENS}, {TOP_K}\]", mine.x, longer.topk_idx),
        (r"topk_idx: expected torch.int32 or torch.int64", mine.x, mine.topk_idx.float()),
    ]
    for message, x, topk_idx in cases:
        with make(config(micro_batches=2), seed, device) as ranks:
            weights = torch.rand(topk_idx.shape, device=device)
            with pytest.raises(ValueError, match=message):
                next(ranks.layers[0].stages(x, topk_idx=topk_idx, topk_weights=weights))
            with pytest.raises(PeerAbortedError, match=message.split(":")[0]):
                ranks.layers[1](mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
                # On a GPU it is kernels that hear of it, whenever they run.
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                ranks.layers[1].context.check()


@pytest.mark.parametrize("change", ["shape", "strides", "dtype"])
def test_where_combine_writes_is_checked(change: str, device: torch.device, seed: int) -> None:
    with make(config(), seed, device) as ranks:
        layer = ranks.layers[0]
        mine = rank_input(seed, 0, 4, HIDDEN, EXPERTS, TOP_K).to(device)
        dispatcher = layer.dispatcher
        handle = dispatcher.dispatch_send(mine.x, mine.topk_idx, mine.topk_weights)
        for other in ranks.layers[1:]:
            other.dispatcher.dispatch_send(mine.x, mine.topk_idx, mine.topk_weights)
        arrived = dispatcher.dispatch_wait(handle)
        rows = torch.zeros(arrived.capacity, HIDDEN, dtype=torch.bfloat16, device=device)
        wide = torch.empty(5, 2 * HIDDEN, dtype=torch.bfloat16, device=device)
        out = {"shape": wide[:, :HIDDEN], "strides": wide[:4, :HIDDEN], "dtype": torch.empty(4, HIDDEN, device=device)}
        with pytest.raises(ValueError, match=r"^out: expected"):
            dispatcher.combine_send(rows, handle, out=out[change])
