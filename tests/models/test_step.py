"""A layer's step in stages: what each does, keeps and refuses."""

from __future__ import annotations

import threading
import time
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm.errors import PeerAbortedError
from moe_runtime.config import MoELayerConfig, SharedExpertConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.layer import MoELayer
from moe_runtime.observation.phases import PhaseTimes
from moe_runtime.virtual import VirtualRanks
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOKENS, TOP_K, config, rank_input
from tests.support.pool import PATIENCE_S
from tests.support.stages import compute, receive, send
from tests.support.waiting import synchronize


def make(c: MoELayerConfig, seed: int, device: torch.device) -> VirtualRanks:
    return VirtualRanks(c, 3, lambda layer: layer.load_random(seed), device=device)


def test_stages_one_by_one_are_the_whole(device: torch.device, seed: int) -> None:
    """In whatever order ranks take their turns; with a shared output, which is added where tokens come home."""
    inputs = [rank_input(seed, rank, (TOKENS, 0, 5)[rank], HIDDEN, EXPERTS, TOP_K).to(device) for rank in range(3)]
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        with make(config("fp8_block"), seed, device) as ranks:
            layers = ranks.layers
            steps = {r: layers[r]._route(*inputs[r], inputs[r].x.flip(0)) for r in order}
            for stage in layers[0]._stages:
                for rank in order:
                    layers[rank]._run(steps[rank], (stage,))
            found.append([step.y for _, step in sorted(steps.items())])
    with make(config("fp8_block"), seed, device) as ranks:
        # What comes home from each rank by itself.
        parts = []
        for first, end in pairwise(expert_starts(EXPERTS, 3)):
            ids = [torch.where((i.topk_idx >= first) & (i.topk_idx < end), i.topk_idx, -1) for i in inputs]
            parts.append(
                ranks([i.x for i in inputs], [(own, i.topk_weights) for own, i in zip(ids, inputs, strict=True)])
            )
    for rank in range(3):
        assert_same_bits(found[0][rank], found[1][rank], f"rank {rank}")
        wanted = inputs[rank].x.flip(0).float()
        for part in parts:
            wanted += part[rank].float()
        assert_same_bits(found[0][rank], wanted.bfloat16(), f"rank {rank} beside the sum of its parts")


def test_router_shared_expert_load_and_times_see_every_token(
    device: torch.device, rng: torch.Generator, seed: int
) -> None:
    x = torch.randn(2, 5, HIDDEN, generator=rng).to(device, torch.bfloat16)
    c = config("mxfp8", shared_expert=SharedExpertConfig(intermediate_size=64, gated=True))
    with ExpertParallelContext(device=device, timeout_s=10) as context:
        layer = MoELayer(c, context)
        layer.load_random(seed)
        counters, layer.times = layer.count_steps(), PhaseTimes(device)
        assert layer(x).shape == x.shape
        assert sum(counters.read().expert_tokens) == 10 * TOP_K
        times = layer.times.milliseconds()
        for name in ("dispatch_send", "shared_expert", "dispatch_recv", "experts", "combine_send", "combine_recv"):
            assert len(times[name]) == 1, name


def test_what_is_sent_is_kept_until_the_step_ends(device: torch.device, seed: int) -> None:
    with make(config(), seed, device) as ranks:
        mine = rank_input(seed, 0, 3, HIDDEN, EXPERTS, TOP_K).to(device)
        given = {name: getattr(mine, name).clone() for name in ("x", "topk_idx", "topk_weights")}
        addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
        ends = [weakref.ref(given["topk_idx"]), weakref.ref(given["topk_weights"])]
        sent = send(ranks.layers[0], given.pop("x"), **given)
        given.clear()
        assert all(end() is not None for end in ends)
        assert sent.tokens.data_ptr() == addresses["x"]


def test_mistakes_are_named(device: torch.device, seed: int) -> None:
    mine = rank_input(seed, 0, TOKENS, HIDDEN, EXPERTS, TOP_K).to(device)
    longer = rank_input(seed, 0, TOKENS + 1, HIDDEN, EXPERTS, TOP_K).to(device)
    cases: list[tuple[str, torch.Tensor, torch.Tensor]] = [
        (f"x: expected at most max_tokens_per_rank = {TOKENS} tokens, got {TOKENS + 1}", longer.x, longer.topk_idx),
        (rf"topk_idx: expected shape \[{TOKENS}, {TOP_K}\]", mine.x, longer.topk_idx),
        (r"topk_idx: expected torch.int32 or torch.int64", mine.x, mine.topk_idx.float()),
    ]
    for message, x, topk_idx in cases:
        with make(config(), seed, device) as ranks:
            weights = torch.rand(topk_idx.shape, device=device)
            with pytest.raises(ValueError, match=message):
                send(ranks.layers[0], x, topk_idx, weights)
            with pytest.raises(PeerAbortedError, match=message.split(":")[0]):
                ranks.layers[1](mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
                # On a GPU it is kernels that hear of it, whenever they run.
                synchronize(device)
                ranks.layers[1].context.check()


def test_a_second_thread_is_refused_and_changes_nothing(seed: int) -> None:
    x = rank_input(seed, 0, 5, HIDDEN, EXPERTS, TOP_K).x
    with ExpertParallelContext(device="cpu") as context:
        layer, other = (MoELayer(config("nvfp4"), context) for _ in range(2))
        layer.load_random(seed)
        other.load_random(seed)
        wanted = layer(x)
        routed = layer.router(x)
        handle = other.dispatcher.dispatch_send(x, *routed)
        calls = {
            "forward": lambda: layer(x),
            "another layer": lambda: other(x),
            "replace_experts": lambda: layer.replace_experts(None),
            "dispatch": lambda: other.dispatcher.dispatch(x, *routed),
            "dispatch_send": lambda: other.dispatcher.dispatch_send(x, *routed),
            "dispatch_recv": lambda: other.dispatcher.dispatch_recv(handle),
            "combine": lambda: other.dispatcher.combine(x, handle),
            "combine_send": lambda: other.dispatcher.combine_send(x, handle),
            "combine_recv": lambda: other.dispatcher.combine_recv(handle),
        }
        refused: list[str] = []
        experts = layer.experts
        assert experts is not None

        def call_all() -> None:
            for name, call in calls.items():
                with pytest.raises(ValueError, match=r"^context: another thread is in a step of it$"):
                    call()
                refused.append(name)

        def beside_another_thread(arrived: DispatchedTokens, out: torch.Tensor) -> None:
            thread = threading.Thread(target=call_all)
            thread.start()
            thread.join()
            experts._run(arrived, out)

        stand_in = SimpleNamespace(_run=beside_another_thread, reads_scales_in_record=False)
        layer.experts = stand_in  # type: ignore[assignment]
        assert_same_bits(layer(x), wanted, "the step that went on")
        assert refused == list(calls)
        # Then another thread may.
        layer.experts = experts
        answers: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: answers.append(layer(x)))
        thread.start()
        thread.join()
        assert_same_bits(answers[0], wanted, "in another thread")


def test_closing_waits_for_the_step_of_another_thread(device: torch.device, seed: int) -> None:
    """What frees memory under a step, and gives up on one that does not end."""
    context = ExpertParallelContext(device=device, startup_timeout_s=PATIENCE_S)
    layer = MoELayer(config(), context)
    layer.load_random(seed)
    x = rank_input(seed, 0, TOKENS, HIDDEN, EXPERTS, TOP_K).x.to(device)
    wanted = layer(x)
    experts, inside, answers = layer.experts, threading.Event(), []
    assert experts is not None

    def slow(arrived: DispatchedTokens, out: torch.Tensor) -> None:
        inside.set()
        time.sleep(0.5)
        assert not context.closed
        experts._run(arrived, out)

    layer.experts = SimpleNamespace(_run=slow, reads_scales_in_record=False)  # type: ignore[assignment]
    thread = threading.Thread(target=lambda: answers.append(layer(x)))
    thread.start()
    assert inside.wait(PATIENCE_S)
    context.startup_timeout_s = 0.1
    with pytest.raises(ValueError, match=r"^context: another thread is in a step of it$"):
        context.close()
    assert not context.closed
    context.startup_timeout_s = PATIENCE_S
    context.close()
    thread.join()
    assert context.closed
    assert_same_bits(answers[0], wanted, "the step beside which it was closed")


def test_stages_may_differ_in_their_mode(device: torch.device, seed: int) -> None:
    """Tensors of a step are made in its first stage and written in later ones."""
    x = rank_input(seed, 0, TOKENS, HIDDEN, EXPERTS, TOP_K).x.to(device)
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(config("nvfp4"), context)
        layer.load_random(seed)
        wanted = layer(x)
        for inside in range(3):
            with torch.inference_mode(inside == 0):
                step = send(layer, x)
            with torch.inference_mode(inside == 1):
                compute(layer, step)
            with torch.inference_mode(inside == 2):
                assert_same_bits(receive(layer, step), wanted, f"stage {inside} in inference mode")


@pytest.mark.gpu
def test_steps_on_several_streams_come_one_after_the_other(device: torch.device, seed: int) -> None:
    """Without anything else to order them: all count in the same memory."""
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    inputs = [rank_input(seed + i, 0, 1 + i % TOKENS, HIDDEN, EXPERTS, TOP_K).x.to(device) for i in range(24)]
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(config("nvfp4"), context)
        layer.load_random(seed)
        wanted = [layer(x) for x in inputs]
        torch.cuda.synchronize(device)
        for _ in range(20):
            found = []
            for number, x in enumerate(inputs):
                with torch.cuda.stream(streams[number % 3]):
                    found.append(layer(x))
            torch.cuda.synchronize(device)
            for number, y in enumerate(found):
                assert_same_bits(y, wanted[number], f"step {number}")
        # In a capture, too, whose streams begin together.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(main)
            found = []
            for number, x in enumerate(inputs):
                with torch.cuda.stream(streams[number % 3]):
                    found.append(layer(x))
            for stream in streams:
                main.wait_stream(stream)
        graph.replay()
        torch.cuda.synchronize(device)
        for number, y in enumerate(found):
            assert_same_bits(y, wanted[number], f"step {number} of a graph")
        assert_same_bits(layer(inputs[0]), wanted[0], "after the graph")
