"""What a step of a layer costs the host where no CUDA graph was captured: Python calls, with launches that do nothing.

Everything of the host runs as on a Hopper GPU, up to the call of the driver. Calls are counted, since times differ from
machine to machine. `pytest -s` shows which functions are called, and times.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings.driver")
from cuda.bindings import driver

from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.integrations.engine_layers import EngineExperts, TokenShare, _Group
from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.exchange import cuda
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.gemm import dequant_gemm, grouped_gemm, prepacked, tma_gemm
from moe_runtime.layer import MoELayer
from tests.support.exchange_data import rank_input

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 8, 2048, 128, 128, 8
FORMATS = ("nvfp4", "fp8_block", "bf16")

BUDGET = {1: 92, 2: 102}
"""Most Python calls of a step, by ranks."""
BUDGET_OF_EXPERTS = 24
"""Most of these that both products of the experts may have."""
BUDGET_OF_ENGINE = {TOKENS: 100, 256: 112}
"""Most Python calls of a step by an engine's adapter, by tokens: of many of them the dispatch is several launches."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver that does nothing, and what asks for the GPU told that it is Hopper's."""
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *_: (driver.CUresult.CUDA_SUCCESS,))
    # As if memory came to lie where it lay before, so that all tensor maps are there.
    monkeypatch.setattr(tma_gemm, "_tensor_map", lambda *_: driver.CUtensorMap())
    monkeypatch.setattr(nvrtc, "_loaded", lambda *_: driver.CUfunction())
    monkeypatch.setattr(nvrtc, "_ensure_context", lambda *_: None)
    monkeypatch.setattr(nvrtc._THREAD, "has_context", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    nvrtc.most_sms.cache_clear()
    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: True)
    for module in (grouped_gemm, prepacked):
        monkeypatch.setattr(module, "resolve_engine", lambda engine, device: "cuda")
    yield
    nvrtc.most_sms.cache_clear()


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """Count the Python functions that are called, but for those of this file.

    Comprehensions are calls before Python 3.12 alone.
    """

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename != __file__ and code.co_name != "<listcomp>":
            calls[f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def made_layer(fmt: str, world: int, tokens: int = TOKENS, router_ids: RouterIds | None = None) -> MoELayer:
    config = MoELayerConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        weight_format=fmt,
        token_format=fmt,
    )
    context = ExpertParallelContext(engine="auto", heap=PrivateHeap.group(world, CPU)[0])
    layer = MoELayer(config, context, router=router_ids is None, router_ids=router_ids)
    layer.load_random(1)
    for dispatcher in layer.dispatchers.values():
        dispatcher._use(cuda)
        if router_ids is not None:
            dispatcher._take_ids_of(router_ids)
    return layer


def microseconds(step: Callable[[], Any], times: int = 100) -> float:
    """Least thread CPU time of a step."""
    found = []
    for _ in range(times):
        start = time.thread_time_ns()
        step()
        found.append(time.thread_time_ns() - start)
    return min(found) / 1000


def calls_of(step: Callable[[], Any], what: str) -> int:
    """Python calls of `step` once it has been done."""
    for _ in range(3):
        step()
    calls: Counter[str] = Counter()
    with counted(calls):
        step()
    print(f"\n{what}: {calls.total()} calls, {microseconds(step):.0f} us of thread CPU time")
    for name, count in calls.most_common():
        print(f"{count:6} {name}")
    return calls.total()


@pytest.mark.parametrize("world", list(BUDGET))
@pytest.mark.parametrize("fmt", FORMATS)
def test_python_calls_of_a_step(fmt: str, world: int, gpu: None) -> None:
    layer = made_layer(fmt, world)
    data = rank_input(1, 0, TOKENS, HIDDEN, EXPERTS, TOP_K, "random")

    def step() -> torch.Tensor:
        return layer(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights)

    with layer.context:
        assert calls_of(step, f"{fmt}, {world} ranks") <= BUDGET[world]
        dispatcher, experts = layer.dispatchers[TOKENS], layer.experts
        assert experts is not None
        keep = layer.scales_in_record
        rows = dispatcher.dispatch(*data, scales_in_record=keep)
        out = torch.empty(rows.capacity, HIDDEN, dtype=torch.bfloat16)
        assert calls_of(lambda: experts._run(rows, out), f"{fmt}, experts") <= BUDGET_OF_EXPERTS
        assert len(experts._bound) == 1


@pytest.mark.parametrize("tokens", list(BUDGET_OF_ENGINE))
@pytest.mark.parametrize("fmt", FORMATS)
def test_python_calls_of_an_engine(fmt: str, tokens: int, gpu: None) -> None:
    """The second of two ranks that hold the same tokens, each with experts of its own."""
    layer = made_layer(fmt, 1, tokens, router_ids=RouterIds(EXPERTS, 2 * EXPERTS))
    experts = EngineExperts(layer, _Group(layer.context), TokenShare(2, 1, whole=True))
    data = rank_input(1, 0, tokens, HIDDEN, 2 * EXPERTS, TOP_K, "random")

    def step() -> torch.Tensor:
        return experts(*data, tokens)

    assert calls_of(step, f"{fmt}, engine, {tokens} tokens") <= BUDGET_OF_ENGINE[tokens]
