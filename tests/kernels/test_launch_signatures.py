"""Every launch against the kernel's signature: names and types of arguments, and their sizes in compiled code."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.deep_ep.normal import NormalExchange
from moe_runtime.deep_ep.normal_handle import Form
from moe_runtime.kernels import clock, nvrtc
from moe_runtime.kernels.bound_kernel import BoundKernel
from moe_runtime.kernels.exchange import cuda, hierarchical, plan, row_sums, rows
from moe_runtime.kernels.exchange.layout import dispatch_layout
from moe_runtime.kernels.exchange.local_ids import local_ids
from moe_runtime.kernels.exchange.padded_rows import PaddedRows
from moe_runtime.kernels.gemm import dequant_gemm, grouped_gemm, op_gemm
from moe_runtime.kernels.gemm import plan as gemm_plan
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.pack_units import packed_units
from moe_runtime.kernels.gemm.plan import DequantOverlap
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.shapes import DEQUANT_DECODE, DEQUANT_FEW, DEQUANT_PREFILL
from moe_runtime.kernels.gemm.tma_gemm import Extras
from moe_runtime.kernels.gemm.weights import SwiGLU
from moe_runtime.kernels.launch_order import LaunchOrder
from moe_runtime.kernels.nvrtc import Defines
from moe_runtime.kernels.recorded_routes import record_routes
from moe_runtime.kernels.signature import Kind, Parameter, kernels_of, parameters_of
from moe_runtime.launch.research import aot, copy_ways
from moe_runtime.launch.research.aot_cases import CudaCase
from moe_runtime.observation.waits import LayerWaits
from tests.emulator.tensor_maps import encode_tiled
from tests.exchange.test_hierarchical_emulated import VirtualHosts, inputs_of
from tests.support.exchange_data import rank_input
from tests.support.gemm_cases import make_rows, random_weights
from tests.support.gemm_plans import tma_grouped_gemm, tma_grouped_gemm_swiglu
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import HOPPER, Ranks, pretend_sms

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")
SOURCES = sorted(path.name for path in nvrtc.FOLDER.rglob("*.cu"))
SIZES: dict[str, Any] = {"hidden_size": 256, "num_experts": 7, "top_k": 3}
Variant = tuple[str, tuple[str, ...]]
"""A kernel and the names of its parameters, of which macros leave some out."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """What is launched: its arguments are written, and with that compared with the signature, and nothing runs."""
    found: list[Variant] = []

    def launch(kernel: BoundKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int] | None = None) -> None:
        kernel._checked = False
        kernel.fill(arguments, grid)
        renamed = {str(new): name for name, new in kernel.defines.items()}
        found.append((renamed.get(kernel.name, kernel.name), tuple(p.name for p in kernel.parameters)))

    monkeypatch.setattr(BoundKernel, "launch", launch)
    monkeypatch.setattr(nvrtc, "most_sms", lambda device: 132)
    pretend_sms(monkeypatch, 132)
    for module in (rows, row_sums):
        monkeypatch.setattr(module, "most_sms", lambda device: 132)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: True)
    for module in (grouped_gemm, op_gemm):
        monkeypatch.setattr(module, "resolve_engine", lambda engine, device: "cuda")
    monkeypatch.setattr(torch, "empty", torch.zeros)
    return found


def exchange(
    world: int, tokens: int, *, mode: str = "gathered", token_format: str = "nvfp4", waits: bool = False, **more: Any
) -> None:
    """One step of each rank, without and with a shared expert's output, and with waits counted or not."""
    ranks = Ranks(world, CPU, HOPPER, max_tokens_per_rank=tokens, mode=mode, token_format=token_format, **SIZES, **more)
    for dispatcher in ranks.dispatchers:
        if waits:
            LayerWaits(dispatcher.context, {tokens: dispatcher})
        for shared in (False, True):
            data = rank_input(1, 0, tokens, 256, 7, 3, "random")
            rows = dispatcher.dispatch(*data)
            output = torch.zeros(rows.capacity, 256, dtype=torch.float32 if shared else torch.bfloat16)
            dispatcher.combine(output, rows.handle, shared=data.x if shared else None)


def padded_exchange() -> None:
    ranks = Ranks(2, CPU, HOPPER, max_tokens_per_rank=5, token_format="bf16", reusable_handles=True, **SIZES)
    dispatcher = ranks.dispatchers[0]
    assert dispatcher._routing_only is not None
    dispatcher._routing_only._use(cuda)
    data = rank_input(1, 0, 5, 256, 7, 3, "random")
    handle = dispatcher.dispatch_send(*data)
    experts, rows = dispatcher.geometry.num_local_experts, dispatcher.geometry.num_slots
    out = PaddedRows.allocate(experts, rows, 512, 2, 3, device=CPU)
    dispatcher.dispatch_recv_padded(handle, out)
    dispatcher.combine(torch.zeros(handle.geometry.row_capacity, 256), handle, topk_weights=data.topk_weights)


def normal_mode() -> None:
    """A dispatch by ids and one by their layout, and a cached one."""
    for world in (1, 2):
        heap = PrivateHeap.group(world, CPU)[0]
        exchange = NormalExchange(ExpertParallelContext(heap=heap), 256, 8, direct=True)
        data = rank_input(1, 0, 5, 256, 4, 3, "random")
        ids = data.topk_idx.long()
        per_rank, per_expert, in_rank = dispatch_layout(ids, 4, world, engine="torch")
        for layout in (None, (in_rank, per_rank, per_expert)):
            got = exchange.dispatch(data.x, layout, ids, data.topk_weights, Form(4, 16))
            exchange.dispatch_again(data.x, got.handle)
            for biases in ((), (data.x, data.x)):
                exchange.combine(torch.zeros(16, 256).bfloat16(), got.handle, biases, torch.zeros(16, 3))


def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "PART_TOKENS", 3)
    for capacity, shared in ((None, False), (6, True)):
        ranks = VirtualHosts(2, 2, True, token_format="fp8_block", combine_format="fp8_block", host_capacity=capacity)
        inputs = inputs_of(1, 0, 4, most=6)
        arrived = ranks.dispatch(inputs)
        outputs = [torch.zeros(a.capacity, 256, dtype=torch.bfloat16) for a in arrived]
        ranks.combine(arrived, outputs, [i.x for i in inputs] if shared else None)


def products(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bf16", "fp8_block", "nvfp4", "mxfp8"):
        gate_up = random_weights(name, 4, 512, 256, rng, CPU, gate_up=True)
        down = random_weights(name, 4, 256, 256, rng, CPU)
        a = make_rows(name, [2, 0, 1, 0], 256, rng, CPU, num_experts=4, gather=True)
        order = LaunchOrder(routed_ids=torch.zeros(3, 1, dtype=torch.int64))
        rows = [a, replace(a, order=order, num_active_experts=torch.zeros(1).int())]
        if name in ("bf16", "fp8_block"):
            for one in (*rows, replace(a, expected_rows=1000)):
                hidden = grouped_gemm.grouped_gemm_swiglu(one, gate_up, SwiGLU(), out_format=name)
                grouped_gemm.grouped_gemm(hidden, down)
            if name == "fp8_block":
                expanded_products(a, rng)
            continue
        packed = PrepackedWeights.prepack(gate_up), PrepackedWeights.prepack(down)
        for shape in (DEQUANT_FEW, DEQUANT_DECODE, DEQUANT_PREFILL):
            monkeypatch.setattr(gemm_plan, "choose_dequant_shape", lambda *_, shape=shape, **__: shape)
            overlap = DequantOverlap(1, 2) if shape is DEQUANT_PREFILL else None
            monkeypatch.setattr(gemm_plan, "plan_dequant_overlap", lambda *_, overlap=overlap: overlap)
            gemm_plan.plan_gemm.cache_clear()
            for one in rows:
                for then in (None, packed[1]):
                    hidden = grouped_gemm.grouped_gemm_swiglu(one, packed[0], SwiGLU(), out_format=name, then=then)
                    grouped_gemm.grouped_gemm(hidden, packed[1], out=torch.zeros(a.capacity, 256))
        gemm_plan.plan_gemm.cache_clear()


def expanded_products(a: GroupedRows, rng: torch.Generator) -> None:
    gate_up = ExpandedWeights.prepack(random_weights("nvfp4", 4, 512, 256, rng, CPU, gate_up=True))
    down = ExpandedWeights.prepack(random_weights("mxfp4", 4, 256, 256, rng, CPU))
    for one in (a, replace(a, expected_rows=1000), replace(a, expected_rows=10000)):
        hidden = tma_grouped_gemm_swiglu(one, gate_up, SwiGLU(), out_format="fp8_block")
        tma_grouped_gemm(hidden, down)


def all_launches(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as few:
        few.setattr(plan, "ONE_RANK_TOKENS", 64)
        forget_plans()
        exchange(1, 5)
    forget_plans()
    exchange(1, 400)
    exchange(2, 5, mode="contiguous")
    exchange(2, 5, waits=True)
    exchange(2, 2000, waits=True)
    exchange(2, 2000, reusable_handles=True)
    exchange(2, 2048, mode="contiguous", token_format="fp8_block")
    padded_exchange()
    normal_mode()
    hosts(monkeypatch)
    products(rng, monkeypatch)
    packed_units(random_weights("nvfp4", 1, 64, 128, rng, CPU))
    clock.write_clock(torch.zeros(1, dtype=torch.int64))
    local_ids(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2), 8, 0, 4, "cuda")
    dispatch_layout(torch.zeros(3, 2, dtype=torch.int64), 8, 2, engine="cuda")
    ring, words = torch.zeros(2, 3, 2, dtype=torch.int16), torch.zeros(4, dtype=torch.int64)
    record_routes(torch.zeros(3, 2).int(), torch.zeros(3, 2), ring, None, words, 8, engine="cuda")
    copy_ways.copy(Ranks(2, CPU, HOPPER, max_tokens_per_rank=4, **SIZES).contexts[0], "bulk", 2, 4096)


def test_every_launch_passes_what_the_kernel_takes(
    launched: list[Variant], rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels that there are, with all sets of parameters that are compiled ahead of time."""
    all_launches(rng, monkeypatch)
    kernels = {name for file in SOURCES for name in kernels_of(file)} | set(kernels_of(copy_ways.SOURCE))
    assert {name for name, _ in launched} == kernels
    compiled = {(_plain_name(case), tuple(p.name for p in _parameters(case))) for case in cuda_cases()}
    assert compiled <= set(launched)


def cuda_cases() -> list[CudaCase]:
    return [case for _, _, case in aot.collect_cases() if isinstance(case, CudaCase)]


def _parameters(case: CudaCase) -> tuple[Parameter, ...]:
    return parameters_of(case.file, case.kernel, Defines(case.defines))


def _plain_name(case: CudaCase) -> str:
    return {str(new): name for name, new in case.defines.items()}.get(case.kernel, case.kernel)


_SIZES = {"u64": 8, "u32": 4, "f32": 4}


def _declared_sizes(ptx: str, kernel: str) -> list[int]:
    """Bytes of the parameters of a kernel in compiled code."""
    entry = re.search(rf"\.entry {kernel}\s*\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    return [
        int(size) if size else _SIZES[kind]
        for kind, size in re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,\[]*(?:\[(\d+)\])?", entry.group(1))
    ]


def test_sizes_of_parameters_are_those_of_the_compiled_kernel() -> None:
    """One case for each set of parameters."""
    pytest.importorskip("cuda.bindings.nvrtc")
    cases = {(_plain_name(case), _parameters(case)): case for case in cuda_cases()}
    assert len(cases) >= 15
    for (name, parameters), case in cases.items():
        ptx = nvrtc.compile_source(case.file, case.defines, "compute_90a").decode()
        found = _declared_sizes(ptx, case.kernel)
        assert len(found) == len(parameters), name
        structs = {"TensorMap": 128, "Extras": ctypes.sizeof(Extras)}
        for parameter, size in zip(parameters, found, strict=True):
            wanted = structs[parameter.type] if parameter.kind is Kind.STRUCT else parameter.num_bytes
            assert size == wanted, f"{name}.{parameter.name}"
