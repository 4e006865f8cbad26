"""The exchange in CUDA C++ as it would be launched and as its compiler sees it, at the edges of what it supports.

Launches are recorded instead of made, so that nothing here repeats their sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moe_runtime.kernels.bound_kernel import BoundKernel
from moe_runtime.kernels.exchange import cuda, plan
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, worst_case_rows
from moe_runtime.kernels.exchange.interface import ExchangeMemory, RecvBuffers
from moe_runtime.kernels.exchange.plan import plan_exchange, required_plan
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import COMBINE_FORMATS, FORMATS, align
from moe_runtime.kernels.runtime import BLOCK_RESERVED_BYTES
from moe_runtime.launch.research.aot import compile_case
from moe_runtime.launch.research.aot_cases import ALL_ARCHS, SM_SHARED_BYTES_OF
from moe_runtime.launch.research.aot_exchange import AOT_CASES
from tests.kernels.test_dequant_compile import (
    REGISTERS_OF_A_BLOCK,
    SHARED_BYTES_OF_AN_SM,
    SPILL_BYTES,
    Compiled,
    Recorded,
    compile_recorded,
)
from tests.support.virtual_exchange import pretend_sms

pytestmark = pytest.mark.cpu_only


@dataclass(frozen=True)
class Launch(Recorded):
    """A launch that did not happen, with its grid and whether it was to begin early."""

    grid: tuple[int, int, int]
    early: bool


def geometry_of(
    fmt: str,
    wire: str,
    hidden: int,
    top_k: int,
    world: int,
    experts: int,
    max_tokens: int,
    contiguous: bool,
    arch: int = 90,
) -> ExchangeGeometry:
    """As the last rank sees it, which may have no experts."""
    rows = worst_case_rows(experts, world, top_k, max_tokens)
    record = RecordLayout(FORMATS[fmt], hidden, top_k)
    sizes = world - 1, world, record, FORMATS[wire], experts, max_tokens, contiguous, rows
    return ExchangeGeometry(*sizes, sm_shared_bytes=SM_SHARED_BYTES_OF[arch])


def half_bytes(geometry: ExchangeGeometry) -> dict[str, int]:
    return {name: align(size, 256) for name, size in geometry.half_bytes().items()}


def launches(geometry: ExchangeGeometry, *, mapped: bool = True, shared: bool = False) -> list[Launch]:
    """What a step of full ranks launches on a GPU like an H200; memory is not looked at."""
    none = torch.empty(0)
    pointers, words = torch.empty(0, dtype=torch.int64), torch.empty(2, dtype=torch.int32)
    tables = ("landing_pointers", "token_flags_pointers", "signal_pointers", "combine_pointers")
    parts = SimpleNamespace(
        heap=SimpleNamespace(directly_mapped=mapped),
        device=torch.device("cpu"),
        half_bytes=half_bytes(geometry),
        kernels={},
        **dict.fromkeys(tables, pointers),
        **dict.fromkeys(("epoch", "error", "latch", "counters"), words),
    )
    context = cast(ExchangeMemory, parts)
    x = torch.empty(geometry.max_tokens, geometry.hidden, dtype=torch.bfloat16, device="meta")
    written = dict.fromkeys(("positions", "group_offsets", "group_scale_offsets", "row_index", "scratch"), none)
    buffers = RecvBuffers(**written, rows=None, scales=none, row_scale=None)
    found: list[Launch] = []

    def record(kernel: BoundKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int] | None = None) -> None:
        sizes = kernel.block, kernel.shared_bytes, grid or kernel.grid, kernel.early
        found.append(Launch(kernel.file, kernel.name, dict(kernel.defines), *sizes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundKernel, "launch", record)
        pretend_sms(patch, 132)
        cuda.dispatch_send(context, geometry, 0, none, (x, none, none, None), none, none, 1)
        cuda.dispatch_recv(context, geometry, 0, none, 1, buffers)
        cuda.combine_send(context, geometry, 0, none, x, none, none)
        cuda.combine_recv(context, geometry, none, none, x if shared else None, x, 1)
        few = x[: plan.ONE_RANK_TOKENS]
        alone = cuda.of_one_rank(geometry)
        if alone is not None:
            alone.dispatch(context, geometry, 0, (few, none, none, None), none, none, buffers)
            alone.combine(context, geometry, few, none, none, few if shared else None, few)
    return found


@given(data=st.data())
def test_launches_fit_and_copies_are_aligned(data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(sorted(FORMATS)), "format")
    wire = data.draw(st.sampled_from(COMBINE_FORMATS), "combine format")
    unit = max(FORMATS[fmt].block, FORMATS[wire].block, 16)
    world = data.draw(st.integers(1, 32), "ranks")
    experts = data.draw(st.integers(1, 4000), "experts")
    geometry = geometry_of(
        fmt,
        wire,
        unit * data.draw(st.integers(1, 40000 // unit), "blocks"),
        data.draw(st.integers(1, min(experts, 32)), "top_k"),
        world,
        experts,
        data.draw(st.one_of(st.integers(1, 300), st.integers(1, 65536)), "max_tokens"),
        data.draw(st.booleans(), "contiguous"),
        data.draw(st.sampled_from(ALL_ARCHS), "arch"),
    )
    geometry = replace(geometry, num_sms=data.draw(st.sampled_from([None, 16]), "num_sms"))
    sizes = plan_exchange(geometry)
    assume(sizes is not None)
    assert sizes is not None
    found = launches(geometry)
    for launch in found:
        assert launch.block % 32 == 0 and 32 <= launch.block <= 1024, launch.name
        assert launch.shared_bytes <= geometry.block_shared_bytes, launch.name
        assert 1 <= launch.grid[0] < 2**31 and launch.grid[1:] == (1, 1), launch.name
    names = [launch.name for launch in found]
    defines = found[names.index("recv_permute")].defines
    slots = -(-geometry.num_slots // int(defines["CHUNK"])) * int(defines["CHUNK"])
    assert slots >= geometry.num_slots and int(defines["CHUNK"]) % 32 == 0
    assert int(defines["CHUNK"]) < 65536, "counts before a word are u16"
    assert ("recv_count" in names) == (int(defines["CHUNK"]) < geometry.num_slots)
    assert ("recv_scales" in names) == sizes.tiled_scales
    assert ("one_rank_dispatch" in names) == ("one_rank_combine" in names) == (world == 1)
    # Copies by the engine take whole 16 bytes, from and to a multiple of 16; the region may be another layer's size.
    region = align(half_bytes(geometry)["landing"] + data.draw(st.integers(0, 2**20), "other layer"), 256)
    record = geometry.record
    offsets = [record.record_bytes, record.scales_offset, record.ids_offset, record.weights_offset]
    offsets += [geometry.partial_bytes, geometry.partial_scales_offset, geometry.landing_half(region)]
    assert all(offset % 16 == 0 for offset in offsets)
    assert geometry.landing_half(region) >= region
    assert geometry.landing_half(region) + geometry.num_slots * record.record_bytes <= 2 * region


@given(data=st.data())
def test_ranks_choose_alike(data: st.DataObject) -> None:
    """Where experts are not as many on each rank, too."""
    world, experts = data.draw(st.integers(2, 32), "ranks"), data.draw(st.integers(1, 300), "experts")
    top_k, most = data.draw(st.integers(1, min(experts, 8)), "top_k"), data.draw(st.integers(1, 600), "max_tokens")
    last = geometry_of("nvfp4", "bf16", 7168, top_k, world, experts, most, data.draw(st.booleans(), "contiguous"))
    assert len({required_plan(replace(last, rank=rank)) for rank in range(world)}) == 1


EDGES = {
    "smallest": ("bf16", "bf16", 16, 1, 1, 1, 1, False),
    "a column of scales": ("nvfp4", "bf16", 16, 1, 2, 2, 5, True),
    "no experts here": ("mxfp8", "mxfp8", 96, 1, 32, 7, 33, False),
    "most ranks and ids": ("nvfp4", "bf16", 48, 32, 32, 33, 5, True),
    "one block of 128": ("fp8_block", "fp8_block", 128, 7, 3, 7, 5, True),
    "stages of 48 KiB": ("bf16", "bf16", 12224, 8, 4, 64, 4096, True),
    "widest": ("nvfp4", "fp8_block", 32768, 8, 8, 512, 65536, False),
    "widest records": ("bf16", "bf16", 28672, 32, 8, 512, 700, True),
    "most experts": ("nvfp4", "mxfp8", 2880, 4, 1, 3500, 300, True),
    "one rank, widest": ("mxfp8", "fp8_block", 32768, 32, 1, 1000, 64, True),
    "one rank, gpt-oss": ("nvfp4", "bf16", 2880, 4, 1, 128, 8, False),
    "deepseek_v3": ("nvfp4", "bf16", 7168, 8, 8, 256, 4096, True),
}

ON_BLACKWELL = {
    **{name: EDGES[name] for name in ("most ranks and ids", "one rank, gpt-oss", "deepseek_v3")},
    "widest of 99 KiB": ("bf16", "bf16", 8192, 8, 8, 256, 700, True),
}
"""Of all architectures: with the most experts that a rank of sm_120 takes, and few SMs or all."""

KNOWN_SPILLS = {("deepseek_v3", "dispatch_send"): 68}
"""A frame of 40 bytes, 28 of them spilled: NVFP4 with 72 registers, as measured."""


def of_kernel(compiled: Compiled, name: str) -> Compiled:
    """What ptxas says of one of the kernels of a source."""
    _, _, after = compiled.log.partition(f"Compiling entry function '{name}'")
    return Compiled(compiled.ptx, after.partition("Compiling entry function")[0])


def check_launches(case: str, geometry: ExchangeGeometry, arch: int) -> None:
    """Registers and shared memory of each kernel are what a block of `arch` can have, and little is spilled."""
    assert plan_exchange(geometry) is not None
    sources: dict[str, Compiled] = {}
    for launch in launches(geometry, shared=geometry.contiguous):
        if launch.file not in sources:
            sources[launch.file] = compile_recorded(launch, f"sm_{arch}a")
        kernel = of_kernel(sources[launch.file], launch.name)
        assert launch.block * kernel.number(r"Used (\d+) registers") <= REGISTERS_OF_A_BLOCK, kernel.log
        static = kernel.number(r"(\d+) bytes smem")
        assert static + launch.shared_bytes <= SM_SHARED_BYTES_OF[arch] - BLOCK_RESERVED_BYTES
        if launch.block < 1024:
            assert kernel.spilled_bytes <= KNOWN_SPILLS.get((case, launch.name), SPILL_BYTES), kernel.log


@pytest.mark.parametrize("case", sorted(EDGES))
def test_edges_compile_to_what_can_be_launched(case: str) -> None:
    check_launches(case, geometry_of(*EDGES[case]), 90)


@pytest.mark.parametrize("num_sms", [None, 16])
@pytest.mark.parametrize("arch", [100, 120])
@pytest.mark.parametrize("case", sorted(ON_BLACKWELL))
def test_blackwell_can_launch_what_compiles(case: str, arch: int, num_sms: int | None) -> None:
    check_launches(case, replace(geometry_of(*ON_BLACKWELL[case], arch=arch), num_sms=num_sms), arch)


@pytest.mark.parametrize(
    ("hidden", "wire"), [(2048, "bf16"), (2880, "fp8_block"), (4096, "bf16"), (5120, "fp8_block"), (7168, "bf16")]
)
@pytest.mark.parametrize("max_tokens", [8, 4096])
def test_an_sm_has_room_for_one_block_of_each_kernel_of_combine(hidden: int, wire: str, max_tokens: int) -> None:
    """With two blocks of `combine_send` on some SMs others have none: combine takes 10% longer."""
    of_block, of_sm = 1024, SHARED_BYTES_OF_AN_SM
    for shared in (False, True):
        geometry = geometry_of("nvfp4", wire, hidden, 8, 2, 128, max_tokens, False)
        both = [launch for launch in launches(geometry, shared=shared) if launch.file == "combine.cu"]
        send, recv = both
        compiled = {launch.name: of_kernel(compile_recorded(launch), launch.name) for launch in both}
        sizes = {
            launch.name: launch.shared_bytes + compiled[launch.name].number(r"(\d+) bytes smem") + of_block
            for launch in both
        }
        assert 2 * sizes[send.name] > of_sm and sizes[send.name] + sizes[recv.name] <= of_sm
        registers = [launch.block * compiled[launch.name].number(r"Used (\d+) registers") for launch in both]
        # Blocks of few tokens look at both halves, and are fewer than SMs.
        assert max_tokens == 8 or sum(registers) <= REGISTERS_OF_A_BLOCK


@pytest.mark.parametrize(("max_tokens", "fences"), [(8, 1), (128, 1), (4096, 0)])
def test_only_token_flags_are_stored_behind_a_fence_of_the_system(max_tokens: int, fences: int) -> None:
    """A fence takes a microsecond. Other flags are stored by a last block, whose release covers all blocks."""
    found = {
        launch.file: compile_recorded(launch).ptx
        for launch in launches(geometry_of("nvfp4", "bf16", 7168, 8, 8, 256, max_tokens, False))
    }
    counts = {file: ptx.count("fence.acq_rel.sys") for file, ptx in found.items()}
    assert counts == {"dispatch_send.cu": fences, "dispatch_recv.cu": 0, "combine.cu": 0}
    for file in ("dispatch_send.cu", "combine.cu"):
        assert "atom.add.acq_rel.gpu" in found[file] and "st.release.sys" in found[file]


def test_what_torch_carries_is_waited_for() -> None:
    """A kernel that began beside torch's could see a flag and not yet the count beside it."""
    geometry = geometry_of(*EDGES["deepseek_v3"])
    assert all(launch.early for launch in launches(geometry))
    early = {launch.name: launch.early for launch in launches(geometry, mapped=False)}
    assert not early["recv_count"] and not early["recv_permute"] and not early["combine_recv"]


@pytest.mark.parametrize("arch", ALL_ARCHS)
def test_a_block_that_does_not_fit_is_found(arch: int) -> None:
    """Its kernel has shared memory of its own beside what a launch asks for."""
    pytest.importorskip("cuda.bindings.nvrtc")
    case = next(case for case in AOT_CASES if case.kernel == "combine_send" and arch in case.archs)
    most = SM_SHARED_BYTES_OF[arch] - BLOCK_RESERVED_BYTES
    assert compile_case(case, arch).error == ""
    error = compile_case(replace(case, shared_bytes=most), arch).error
    assert re.fullmatch(rf"a block needs \d+ bytes of shared memory, of {most}", error)
