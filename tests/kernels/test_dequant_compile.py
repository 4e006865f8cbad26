"""The CUDA C++ of `dequant_gemm.cu` as the library compiles it: instructions, registers, shared memory.

What the host side would launch is recorded instead of launched, so that nothing here repeats its macros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.kernels.bound_kernel import BoundKernel
from moe_runtime.kernels.formats.number_formats import (
    BF16,
    FORMATS,
    MXFP4,
    MXFP8,
    NVFP4,
    WEIGHT_FORMATS,
    TokenFormat,
    ceil_div,
    intermediate_format_for,
    token_formats_for,
)
from moe_runtime.kernels.gemm import dequant_gemm
from moe_runtime.kernels.gemm.dequant_layout import DEQUANT_FORMATS, unit_bytes, unit_columns, unit_rows, units_shape
from moe_runtime.kernels.gemm.dequant_tokens import dequantized_shape, empty_blocks
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import (
    DEQUANT_DECODE_ROWS,
    DequantOverlap,
    choose_dequant_shape,
    choose_token_shape,
    keeps_tokens,
    plan_dequant_overlap,
)
from moe_runtime.kernels.gemm.prepacked import MAX_PREPACKED_EXPERTS, PrepackedWeights
from moe_runtime.kernels.gemm.shapes import DEQUANT_DECODE as DECODE
from moe_runtime.kernels.gemm.shapes import DEQUANT_FEW as FEW
from moe_runtime.kernels.gemm.shapes import DEQUANT_FEW_EVEN as FEW_EVEN
from moe_runtime.kernels.gemm.shapes import DEQUANT_FEW_MORE as FEW_MORE
from moe_runtime.kernels.gemm.shapes import DEQUANT_MIDDLE as MIDDLE
from moe_runtime.kernels.gemm.shapes import DEQUANT_PREFILL as PREFILL
from moe_runtime.kernels.gemm.shapes import FEW_TOKENS, MANY_TOKENS, DequantShape, TokenShape
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GEGLU_TANH,
    GPT_OSS,
    SQUARED_RELU,
    STEP_3P5,
    Activation,
    GateUpOrder,
    SwiGLU,
)
from moe_runtime.launch.research.aot_cases import compile_with_log
from tests.support.gemm_checks import ROWS_OF_SHAPES, SHAPES
from tests.support.gemm_plans import dequant_swiglu, dequant_tokens, empty_intermediate, run_dequant_gemm

pytestmark = pytest.mark.cpu_only

SHARED_BYTES_OF_A_BLOCK = 227 * 1024
SHARED_BYTES_OF_AN_SM = 228 * 1024
REGISTERS_OF_A_BLOCK = 65536
SPILL_BYTES = 64
SOFTCAPPED = Activation(gate_softcap=4.0, up_softcap=25.0)


@dataclass(frozen=True)
class Recorded:
    """A launch that did not happen."""

    file: str
    name: str
    defines: dict[str, int | str]
    block: int
    shared_bytes: int


def rows_of(name: str, rows: int, k: int) -> GroupedRows:
    """One group of zeros."""
    fmt = FORMATS[name]
    zero = torch.zeros(1, dtype=torch.int32)
    scales = None
    if fmt.swizzled:
        shape = (ceil_div(rows, 128) + 1, ceil_div(fmt.scale_columns(k), 4), 32, 4, 4)
        scales = torch.zeros(shape, dtype=torch.uint8).view(fmt.scale_dtype)
    elif fmt.scale_dtype is not None:
        scales = torch.zeros(rows, fmt.scale_columns(k), dtype=fmt.scale_dtype)
    return GroupedRows(
        format=fmt,
        rows=torch.zeros(rows, fmt.quant_columns(k), dtype=fmt.quant_dtype),
        scales=scales,
        row_scale=torch.ones(rows) if fmt.has_row_scale else None,
        row_index=None,
        group_offsets=torch.tensor([0, rows], dtype=torch.int32),
        group_scale_offsets=zero if fmt.swizzled else None,
        expert_ids=zero,
        capacity=rows,
        num_columns=k,
    )


def weights_of(name: str, n: int, k: int, order: GateUpOrder | None) -> PrepackedWeights:
    fmt = WEIGHT_FORMATS[name]
    units = torch.zeros(1, *units_shape(n, k, fmt), dtype=torch.uint8)
    marks = torch.zeros(1, unit_rows(n), dtype=torch.uint8) if name != "nvfp4" else None
    return PrepackedWeights(fmt, units, n, k, torch.ones(1), None, order, marks)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """What is launched from now on, on a machine that looks like one with an H200."""
    found: list[Recorded] = []

    def record(kernel: BoundKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int] | None = None) -> None:
        kernel.fill(arguments, grid)
        found.append(Recorded(kernel.file, kernel.name, dict(kernel.defines), kernel.block, kernel.shared_bytes))

    monkeypatch.setattr(BoundKernel, "launch", record)
    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    return found


def launched(
    recorded: list[Recorded],
    weight: str,
    token: str,
    k: int,
    shape: DequantShape,
    activation: Activation | None,
    out: str,
    *,
    chained: bool = False,
) -> Recorded:
    """The GEMM that is launched; `out` is a format where `activation` is one, `dequantized` or not, else a dtype.

    The rows of a `chained` one are results of the product before.
    """
    rows = ROWS_OF_SHAPES.get(shape, 1)
    a, by_rows = rows_of(token, rows, k), shape.own_tokens
    if chained:
        a = replace(a, dequantized=torch.zeros(rows, k, dtype=torch.bfloat16))
    w = weights_of(weight, 64, k, None if activation is None else activation.gate_up)
    choices: dict[str, Any] = {"choose_dequant_shape": lambda *_, **__: FEW if shape.own_tokens else shape}
    if shape.own_tokens:
        choices["few_shape"] = lambda *_: shape
    if activation is None:
        run_dequant_gemm(a, w, torch.empty(rows, 64, dtype=getattr(torch, out)), **choices)
    else:
        name, *dequantized = out.split()
        hidden, gsf = empty_intermediate(a, w, activation, name, None)
        if dequantized and by_rows:
            hidden = replace(hidden, dequantized=torch.empty(rows, hidden.num_columns, dtype=torch.bfloat16))
        elif dequantized:
            hidden = replace(hidden, dequantized=empty_blocks(dequantized_shape(a, hidden.num_columns), a.rows.device))
        dequant_swiglu(a, w, activation, hidden, gsf, **choices)
    names = ["dequant_few"] if by_rows else ["dequant_tokens", "dequant_gemm"]
    assert [launch.name for launch in recorded] == names
    return recorded[-1]


@dataclass(frozen=True)
class Compiled:
    """What NVRTC makes of a launch, and what ptxas says of it."""

    ptx: str
    log: str

    def number(self, pattern: str) -> int:
        """The number that `pattern` finds in the log; 0 if it finds none."""
        found = re.search(pattern, self.log)
        return int(found[1]) if found else 0

    @property
    def spilled_bytes(self) -> int:
        """Local memory of a thread."""
        assert "bytes stack frame" in self.log, self.log
        return self.number(r"(\d+) bytes stack frame") + self.number(r"(\d+) bytes spill stores")

    @property
    def moved_registers(self) -> tuple[int, int]:
        """Registers of a thread that multiplies and of one that loads, after the loader has handed some over."""
        found = dict(re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 (\d+);", self.ptx))
        return int(found["inc"]), int(found["dec"])


def compile_recorded(launch: Recorded, arch: str = "sm_90a") -> Compiled:
    """As the launch would have compiled it."""
    pytest.importorskip("cuda.bindings.nvrtc")
    found = compile_with_log(launch.file, launch.defines, arch)
    return Compiled(found.ptx, found.log)


# Every format of weights, tokens and result in DECODE and PREFILL, some in MIDDLE; widths of stages of 4, 3 and 2.
VARIANTS: list[tuple[DequantShape, str, str, int, Activation | None, str]] = [
    (FEW, "nvfp4", "nvfp4", 7168, SwiGLU(), "nvfp4 dequantized"),
    (FEW, "nvfp4", "nvfp4", 768, None, "bfloat16 chained"),
    (FEW_MORE, "nvfp4", "nvfp4", 4096, SwiGLU(), "nvfp4 dequantized"),
    (FEW_MORE, "nvfp4", "nvfp4", 1536, None, "bfloat16 chained"),
    (FEW_MORE, "mxfp8", "mxfp8", 2048, SwiGLU(), "mxfp8 dequantized"),
    (FEW_MORE, "mxfp8", "mxfp8", 1536, None, "bfloat16 chained"),
    (FEW_MORE, "mxfp4", "bf16", 1536, None, "bfloat16 chained"),
    (FEW_EVEN, "nvfp4", "nvfp4", 7168, SwiGLU(), "nvfp4 dequantized"),
    (FEW_EVEN, "mxfp4", "bf16", 4096, SwiGLU(), "bf16 dequantized"),
    (FEW_EVEN, "mxfp8", "mxfp8", 2048, SQUARED_RELU, "mxfp8"),
    (FEW_EVEN, "nvfp4", "nvfp4", 2048, None, "bfloat16 chained"),
    (FEW_EVEN, "mxfp8", "mxfp8", 1536, None, "bfloat16 chained"),
    (FEW, "nvfp4", "bf16", 2880, GPT_OSS, "bf16 dequantized"),
    (FEW, "nvfp4", "fp8_block", 7168, SwiGLU(), "bf16 dequantized"),
    (FEW_MORE, "mxfp4", "fp8_block", 2880, GPT_OSS, "bf16 dequantized"),
    (FEW_EVEN, "mxfp4", "fp8_block", 2880, GPT_OSS, "bf16 dequantized"),
    (FEW, "mxfp4", "bf16", 4096, SwiGLU(), "bf16 dequantized"),
    (FEW, "mxfp4", "bf16", 2880, None, "bfloat16 chained"),
    (FEW, "mxfp4", "mxfp8", 2880, GPT_OSS, "mxfp8 dequantized"),
    (FEW, "mxfp8", "mxfp8", 7168, SwiGLU(), "mxfp8 dequantized"),
    (FEW, "mxfp8", "mxfp8", 2048, SQUARED_RELU, "mxfp8"),
    (FEW, "mxfp8", "mxfp8", 2880, None, "bfloat16 chained"),
    (DECODE, "nvfp4", "nvfp4", 7168, None, "bfloat16"),
    (DECODE, "nvfp4", "nvfp4", 2880, GPT_OSS, "nvfp4"),
    (DECODE, "nvfp4", "bf16", 128, SwiGLU(GateUpOrder.UP_GATE), "bf16"),
    (DECODE, "mxfp8", "mxfp8", 2048, None, "float32"),
    (DECODE, "mxfp8", "mxfp8", 7168, SwiGLU(), "mxfp8"),
    (DECODE, "nvfp4", "nvfp4", 7168, SwiGLU(), "nvfp4 dequantized"),
    (DECODE, "mxfp8", "mxfp8", 7168, SwiGLU(), "mxfp8 dequantized"),
    (PREFILL, "nvfp4", "nvfp4", 7168, SwiGLU(), "nvfp4 dequantized"),
    (PREFILL, "nvfp4", "bf16", 2880, GPT_OSS, "bf16 dequantized"),
    (PREFILL, "mxfp8", "mxfp8", 7168, SwiGLU(), "mxfp8 dequantized"),
    (MIDDLE, "nvfp4", "nvfp4", 7168, SwiGLU(), "nvfp4 dequantized"),
    (MIDDLE, "nvfp4", "bf16", 2048, GPT_OSS, "bf16 dequantized"),
    (MIDDLE, "nvfp4", "nvfp4", 2048, None, "bfloat16"),
    (MIDDLE, "mxfp8", "mxfp8", 7168, SwiGLU(), "mxfp8 dequantized"),
    (PREFILL, "nvfp4", "nvfp4", 2048, None, "bfloat16"),
    (PREFILL, "nvfp4", "nvfp4", 7168, SwiGLU(), "nvfp4"),
    (PREFILL, "nvfp4", "bf16", 2880, None, "float16"),
    (PREFILL, "mxfp8", "mxfp8", 7168, None, "bfloat16"),
    (PREFILL, "mxfp8", "mxfp8", 2880, SwiGLU(), "bf16"),
    (PREFILL, "mxfp8", "mxfp8", 7168, SwiGLU(), "mxfp8"),
    (DECODE, "mxfp4", "bf16", 2880, GPT_OSS, "bf16 dequantized"),
    (DECODE, "mxfp4", "mxfp8", 2880, GPT_OSS, "mxfp8"),
    (DECODE, "mxfp4", "bf16", 7168, None, "bfloat16"),
    (MIDDLE, "mxfp4", "bf16", 2048, GPT_OSS, "bf16 dequantized"),
    (MIDDLE, "mxfp4", "mxfp8", 7168, None, "float32"),
    (PREFILL, "mxfp4", "bf16", 2880, GPT_OSS, "bf16 dequantized"),
    (PREFILL, "mxfp4", "mxfp8", 2880, GPT_OSS, "mxfp8 dequantized"),
    (PREFILL, "mxfp4", "mxfp8", 7168, SwiGLU(), "mxfp8"),
    (PREFILL, "mxfp4", "bf16", 2880, None, "bfloat16"),
    (PREFILL, "nvfp4", "fp8_block", 7168, SwiGLU(), "bf16 dequantized"),
    (DECODE, "nvfp4", "nvfp4", 7168, GEGLU, "nvfp4 dequantized"),
    (PREFILL, "nvfp4", "nvfp4", 7168, SOFTCAPPED, "nvfp4 dequantized"),
    (MIDDLE, "mxfp8", "mxfp8", 7168, GEGLU_TANH, "mxfp8 dequantized"),
    (PREFILL, "nvfp4", "nvfp4", 2880, SQUARED_RELU, "nvfp4 dequantized"),
    (MIDDLE, "nvfp4", "nvfp4", 2048, SQUARED_RELU, "nvfp4"),
    (PREFILL, "mxfp8", "mxfp8", 7168, SQUARED_RELU, "mxfp8 dequantized"),
    (DECODE, "mxfp4", "mxfp8", 2880, SQUARED_RELU, "mxfp8"),
    (FEW, "nvfp4", "nvfp4", 7168, STEP_3P5, "nvfp4 dequantized"),
    (DECODE, "mxfp8", "mxfp8", 7168, STEP_3P5, "mxfp8 dequantized"),
    (PREFILL, "mxfp4", "mxfp8", 7168, STEP_3P5, "mxfp8"),
]


def _name(activation: Activation | None) -> str:
    if activation is None:
        return "plain"
    return "softcaps" if activation.up_softcap else "step_3p5" if activation == STEP_3P5 else activation.function.value


@pytest.mark.parametrize(
    ("shape", "weight", "token", "k", "activation", "out"),
    VARIANTS,
    ids=[f"{v[0].regime.name.lower()}-{v[1]}-{v[2]}-{v[3]}-{_name(v[4])}-{v[5]}" for v in VARIANTS],
)
def test_gemm_compiles_to_what_it_is_meant_for(
    shape: DequantShape,
    weight: str,
    token: str,
    k: int,
    activation: Activation | None,
    out: str,
    recorded: list[Recorded],
) -> None:
    chained = out.endswith(" chained")
    launch = launched(recorded, weight, token, k, shape, activation, out.removesuffix(" chained"), chained=chained)
    assert launch.defines["OUT_DEQUANTIZED"] == out.endswith(" dequantized")
    assert launch.defines["OUT_BY_ROWS"] == (out.endswith(" dequantized") and shape.own_tokens)
    assert launch.defines["MAX_BLOCKS"] == shape.max_blocks
    assert launch.defines.get("WARPGROUPS", 1) == shape.warpgroups
    assert ("OWN_BYTES" in launch.defines) == shape.own_tokens
    compiled = compile_recorded(launch)
    assert ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in compiled.ptx) == shape.own_tokens
    for blocks in () if shape.own_tokens else (*shape.cases, shape.max_blocks):
        assert f"wgmma.mma_async.sync.aligned.m64n{8 * blocks}k16.f32.bf16.bf16" in compiled.ptx
    assert "cp.async.bulk.shared::cluster.global.mbarrier" in compiled.ptx
    assert (
        ("L2::cache_hint" in compiled.ptx)
        == bool(launch.defines["KEEP_TOKENS"])
        == (shape in (FEW, FEW_MORE, FEW_EVEN, DECODE) and weight in ("nvfp4", "mxfp4"))
    )
    assert "serialized" not in compiled.log and "Potential Performance Loss" not in compiled.log, compiled.log
    assert compiled.spilled_bytes <= SPILL_BYTES, compiled.log
    check_room(launch, compiled, shape, chained=chained)
    assert ("BLOCKS_PER_SM" in launch.defines) == shape.own_tokens
    if shape in (FEW, FEW_MORE):
        assert launch.defines["BLOCKS_PER_SM"] == FEW_MORE.blocks_of_all
    if shape.own_tokens:
        assert "wgmma" not in compiled.ptx and "setmaxnreg" not in compiled.ptx
        assert compiled.ptx.count("griddepcontrol.launch_dependents") == 1
        # All wait before they read the groups, or those who multiply before they read the tokens.
        assert compiled.ptx.count("griddepcontrol.wait") == 1
        return
    consumer, producer = compiled.moved_registers
    assert 128 * (shape.warpgroups * consumer + producer) <= REGISTERS_OF_A_BLOCK


FIRST_BYTES, SECOND_BYTES = 124 * 1024, 103 * 1024
"""Most shared memory of an SM for a block of FEW_EVEN, of the first of two products and of the second."""


def check_room(launch: Recorded, compiled: Compiled, shape: DequantShape, *, chained: bool) -> None:
    """An SM has room for the blocks of `shape`, of each of which the driver takes 1 KiB of shared memory.

    Of FEW_EVEN it has room for one block of either product, and for no two of the first.
    """
    shared = launch.shared_bytes + compiled.number(r"(\d+) bytes smem")
    assert shared <= SHARED_BYTES_OF_A_BLOCK
    shared += 1024
    if shape is FEW_EVEN:
        assert FIRST_BYTES + SECOND_BYTES <= SHARED_BYTES_OF_AN_SM
        assert shared <= (SECOND_BYTES if chained else FIRST_BYTES)
        assert chained or 2 * shared > SHARED_BYTES_OF_AN_SM
    else:
        assert shape.blocks_of_all * shared <= SHARED_BYTES_OF_AN_SM
    blocks = int(launch.defines.get("BLOCKS_PER_SM", shape.blocks_of_all))
    assert blocks >= shape.blocks_of_all
    assert blocks * launch.block * compiled.number(r"Used (\d+) registers") <= REGISTERS_OF_A_BLOCK


@pytest.mark.parametrize(("rows", "shape"), [(8, FEW_TOKENS), (8192, MANY_TOKENS)], ids=["few", "many"])
@pytest.mark.parametrize("name", ["bf16", "fp8_block", "nvfp4", "mxfp8"])
def test_decoding_of_tokens_compiles(name: str, rows: int, shape: TokenShape, recorded: list[Recorded]) -> None:
    a = rows_of(name, rows, 128)
    assert choose_token_shape(rows, a.max_active_groups, unit_columns(128), a.format, 132) is shape
    dequant_tokens(a, 2, shape)
    (launch,) = recorded
    assert launch.block == launch.defines["THREADS"] == 32 * shape.warps
    compiled = compile_recorded(launch)
    assert compiled.spilled_bytes == 0 and "griddepcontrol.launch_dependents" in compiled.ptx


@pytest.mark.parametrize(
    ("weight", "token"),
    [(fmt.name, token) for fmt in DEQUANT_FORMATS for token in token_formats_for(fmt.name)],
)
def test_few_tokens_leave_room_for_a_block_of_the_gemm(weight: str, token: str, recorded: list[Recorded]) -> None:
    """An SM has room for a block of either, of the gated GEMM, which takes most."""
    dequant_tokens(rows_of(token, 1, 7168), 1, FEW_TOKENS)
    tokens = recorded.pop()
    between = intermediate_format_for(FORMATS[token], WEIGHT_FORMATS[weight]).name
    gemm = launched(recorded, weight, token, 7168, DECODE, SwiGLU(), f"{between} dequantized")
    kernels = [(launch, compile_recorded(launch)) for launch in (tokens, gemm)]
    assert tokens.defines["MIN_BLOCKS"] == FEW_TOKENS.min_blocks
    registers = sum(launch.block * compiled.number(r"Used (\d+) registers") for launch, compiled in kernels)
    shared = sum(launch.shared_bytes + compiled.number(r"(\d+) bytes smem") + 1024 for launch, compiled in kernels)
    assert registers <= REGISTERS_OF_A_BLOCK and shared <= 228 * 1024


@pytest.mark.parametrize(
    ("weight", "token", "k", "rows"),
    [
        ("nvfp4", "nvfp4", 64, 8192),
        ("nvfp4", "nvfp4", 7168, 8192),
        ("nvfp4", "nvfp4", 7168, 128 * 32),
        ("nvfp4", "nvfp4", 2880, 8192),
        ("nvfp4", "bf16", 2880, 8192),
        ("mxfp4", "bf16", 2880, 8192),
        ("mxfp4", "mxfp8", 2880, 8192),
        ("mxfp4", "fp8_block", 2880, 8192),
        ("mxfp8", "mxfp8", 2048, 8192),
        ("mxfp8", "mxfp8", 7168, 8192),
    ],
)
def test_dequantization_of_many_tokens_overlaps(
    weight: str, token: str, k: int, rows: int, recorded: list[Recorded]
) -> None:
    """By blocks of which an SM has one, and none of the GEMM, so that these are as many as are asked for."""
    a, w = replace(rows_of(token, 16, k), expected_rows=rows), weights_of(weight, 4096, k, None)
    a = replace(a, group_offsets=torch.zeros(33, dtype=torch.int32), expert_ids=torch.zeros(32, dtype=torch.int32))
    if a.group_scale_offsets is not None:
        a = replace(a, group_scale_offsets=torch.zeros(32, dtype=torch.int32))
    run_dequant_gemm(a, w, torch.empty(16, 4096))
    first, rest, gemm = recorded
    assert (gemm.defines["WARPGROUPS"] == MIDDLE.warpgroups) == (rows == 128 * 32)
    assert [launch.defines.get("OVERLAPPED") for launch in recorded] == [0, 1, 1]
    assert first.defines["MIN_BLOCKS"] == MANY_TOKENS.min_blocks and gemm.defines["OVERLAPPED"] == 1
    team = int(rest.defines["TEAM"])
    assert rest.block == rest.defines["THREADS"] <= 1024 and rest.block % (32 * team) == 0
    assert rest.shared_bytes == rest.block // 32 * int(rest.defines["AHEAD"]) * 1024
    kernels = [compile_recorded(launch) for launch in recorded]
    assert "stmatrix" in kernels[1].ptx and "cp.async.bulk.global" in kernels[1].ptx
    assert kernels[0].spilled_bytes == kernels[1].spilled_bytes == 0 and kernels[2].spilled_bytes <= SPILL_BYTES
    assert "serialized" not in kernels[2].log and "Potential Performance Loss" not in kernels[2].log
    assert 2 * rest.shared_bytes > 228 * 1024
    assert rest.shared_bytes + gemm.shared_bytes > 228 * 1024
    for launch, compiled in zip(recorded, kernels, strict=True):
        assert launch.block * compiled.number(r"Used (\d+) registers") <= REGISTERS_OF_A_BLOCK
        assert launch.shared_bytes + compiled.number(r"(\d+) bytes smem") <= SHARED_BYTES_OF_A_BLOCK


def test_overlap_is_chosen_by_rows_and_columns() -> None:
    def chosen(
        rows: int,
        n: int,
        fmt: TokenFormat = MXFP8,
        shape: DequantShape = PREFILL,
        sms: int = 132,
    ) -> DequantOverlap | None:
        return plan_dequant_overlap(rows, n, fmt, shape, sms)

    # Two rounds of tiles of 256 weight rows and 128 tokens; half of the rows at most.
    assert chosen(8192, 4096) == DequantOverlap(first=2 * 9 * 16, sms=5) == chosen(2 * 8 * 288, 4096)
    assert chosen(2 * 8 * 288 - 1, 4096) is None
    assert chosen(8192, 7168) == DequantOverlap(first=2 * 5 * 16, sms=3)
    assert chosen(32768, 1536) == DequantOverlap(first=2 * 22 * 16, sms=11)
    # With fewer columns too many SMs would have to dequantize.
    assert chosen(10**6, 986) == DequantOverlap(first=2 * 33 * 16, sms=16) and chosen(10**6, 985) is None
    # Tiles of MIDDLE have 128 weight rows and 160 tokens.
    assert chosen(4096, 4096, NVFP4, MIDDLE) == DequantOverlap(first=2 * 5 * 20, sms=5)
    assert chosen(4096, 4096, MXFP8, MIDDLE) is chosen(8192, 4096, NVFP4, DECODE) is None
    assert chosen(8192, 4096, BF16) == chosen(8192, 4096)
    assert chosen(8192, 4096, sms=1) == DequantOverlap(first=2 * 16, sms=1)


@pytest.mark.parametrize("limited", ["SMs", "dequantized"])
def test_nothing_overlaps_on_few_sms_or_where_rows_come_dequantized(limited: str, recorded: list[Recorded]) -> None:
    a, w = replace(rows_of("nvfp4", 16, 64), expected_rows=8192), weights_of("nvfp4", 4096, 64, None)
    if limited == "dequantized":
        a = replace(a, dequantized=empty_blocks(dequantized_shape(a, 64), a.rows.device))
    run_dequant_gemm(a, w, torch.empty(16, 4096), num_sms=100 if limited == "SMs" else None)
    assert [launch.defines.get("OVERLAPPED") for launch in recorded] == ([0, 0] if limited == "SMs" else [0])


def test_shape_for_tokens_is_chosen_by_what_is_loaded_at_once() -> None:
    def chosen(rows: int, groups: int, k: int, fmt: TokenFormat = NVFP4) -> TokenShape:
        return choose_token_shape(rows, groups, unit_columns(k), fmt, 132)

    assert chosen(128, 8, 2048) is FEW_TOKENS and chosen(128, 8, 7168) is MANY_TOKENS
    # 33 blocks of 8 rows and 32 units are what 132 SMs load at once; of MXFP8 and BF16, half of it.
    assert chosen(33 * 8, 1, 2048) is FEW_TOKENS and chosen(33 * 8 + 1, 1, 2048) is MANY_TOKENS
    for fmt in (MXFP8, BF16):
        assert chosen(16 * 8, 1, 2048, fmt) is FEW_TOKENS and chosen(16 * 8 + 1, 1, 2048, fmt) is MANY_TOKENS
    assert chosen(1, 64, 128) is FEW_TOKENS and chosen(1, 65, 128) is MANY_TOKENS


SIZES = [
    (shape, weight, k)
    for shape in SHAPES.values()
    for weight in ("nvfp4", "mxfp8", "mxfp4")
    for k in (128, 2880, 7168)
    if shape is not MIDDLE or k != 2880
]
"""An odd number of units of K has no MIDDLE."""


@pytest.mark.parametrize(("shape", "weight", "k"), SIZES)
def test_stages_fit(shape: DequantShape, weight: str, k: int, recorded: list[Recorded]) -> None:
    """At least two stages, so that loading and multiplying overlap; whole stages of K; at most 1024 threads."""
    launch = launched(recorded, weight, "mxfp8" if weight == "mxfp4" else weight, k, shape, SwiGLU(), "bf16")
    stages, stage_k64 = int(launch.defines["STAGES"]), int(launch.defines["STAGE_K64"])
    assert stages >= 2
    assert stage_k64 > 0 and unit_columns(k) % stage_k64 == 0
    weights = shape.warpgroups * unit_bytes(WEIGHT_FORMATS[weight])
    if shape is FEW:
        held = int(launch.defines["OWN_BYTES"])
        assert launch.shared_bytes == stages * stage_k64 * weights + held
        # A whole token, or a stage of 8.
        assert held >= 2 * k + 16 and held // 8 - 16 >= 128 * stage_k64 and held % 16 == 0
    else:
        assert launch.shared_bytes == stages * stage_k64 * (weights + shape.max_blocks * 8 * 64 * 2)
    assert launch.block == 128 * shape.warpgroups + (32 if shape.own_tokens else 128) <= 1024


def test_tokens_are_kept_in_l2_where_weights_pass_it_once() -> None:
    """Up to 32 MiB of bf16: 2340 rows of 7168."""
    for rows, k, weight, shape, kept in (
        (1, 7168, NVFP4, FEW, True),
        (1, 7168, NVFP4, DECODE, True),
        (2340, 7168, NVFP4, DECODE, True),
        (2341, 7168, NVFP4, DECODE, False),
        (8192, 2048, NVFP4, DECODE, True),
        (2340, 7168, MXFP4, DECODE, True),
        (1, 7168, NVFP4, PREFILL, False),
        (1, 7168, NVFP4, MIDDLE, False),
        (1, 7168, MXFP8, DECODE, False),
    ):
        assert keeps_tokens(rows, k, weight, shape) == kept


def test_shape_is_chosen_by_rows_of_a_group() -> None:
    def chosen(
        rows: int, groups: int, n: int = 4096, k: int = 7168, fmt: TokenFormat = NVFP4, *, limited: bool = False
    ) -> DequantShape:
        return choose_dequant_shape(rows, groups, n, k, fmt, limited=limited)

    assert chosen(DEQUANT_DECODE_ROWS * 32, 32) is DECODE and chosen(DEQUANT_DECODE_ROWS * 32 + 1, 32) is PREFILL
    assert chosen(32 * 1024, 32) is PREFILL
    # At most two rows of a group, and 800 tiles: 12 rows of 4096 weight rows, 64 units.
    for given, shape in (
        ((1, 1), FEW),
        ((2, 1), FEW),
        ((3, 1), DECODE),
        ((1, 0), DECODE),
        ((12, 128), FEW),
        ((13, 128), DECODE),
        ((800, 512, 64), FEW),
        ((801, 512, 64), DECODE),
        ((8, 128, 5760, 2880, MXFP4), FEW),
        ((16, 128, 5760, 2880, MXFP4), DECODE),
        ((33, 128, 1536, 2048, MXFP8), FEW),
        ((34, 128, 1536, 2048, MXFP8), DECODE),
        # K needs padding, or a block has no room for a row.
        ((1, 128, 64, 2048 + 32), DECODE),
        ((1, 128, 64, 16384), DECODE),
    ):
        assert chosen(*given) is shape, given
        assert chosen(*given, limited=True) is DECODE
    for rows, shape in ((112, PREFILL), (113, MIDDLE), (148, MIDDLE), (149, PREFILL)):
        assert chosen(32 * rows, 32) is shape
    assert chosen(32 * 112 + 1, 32) is MIDDLE and chosen(32 * 148 + 1, 32) is PREFILL
    for shape in SHAPES.values():
        assert list(shape.cases) == sorted(set(shape.cases)) and all(case < shape.max_blocks for case in shape.cases)
        assert 4 % shape.batch == 0
        for buffers in (shape.buffers, shape.other_buffers):
            assert not shape.rolling or (4 // shape.batch) % buffers == 0


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"expert_ids": torch.zeros(MAX_PREPACKED_EXPERTS + 1, dtype=torch.int32)}, "a.expert_ids"),
        ({"rows": torch.zeros(4, 68, dtype=torch.uint8)[:, 4:]}, "a.rows"),
        ({"rows": torch.zeros(4, 66, dtype=torch.uint8)[:, :64]}, "a.rows"),
    ],
)
def test_rows_that_the_kernel_cannot_read(change: dict[str, Any], argument: str, recorded: list[Recorded]) -> None:
    a, w = replace(rows_of("nvfp4", 4, 128), **change), weights_of("nvfp4", 64, 128, None)
    with pytest.raises(ValueError, match=f"^{re.escape(argument)}: expected"):
        run_dequant_gemm(a, w, torch.empty(4, 64))
    assert not recorded


def test_results_that_the_kernel_cannot_write(recorded: list[Recorded]) -> None:
    a, w = rows_of("nvfp4", 4, 128), weights_of("nvfp4", 64, 128, None)
    for out in (torch.empty(4, 65)[:, :64], torch.empty(4, 66)[:, 1:65]):
        with pytest.raises(ValueError, match=r"^out: expected rows on 8-byte boundaries"):
            run_dequant_gemm(a, w, out)
    gated = weights_of("nvfp4", 256, 128, GateUpOrder.GATE_UP)
    hidden, gsf = empty_intermediate(a, gated, SwiGLU(), "fp8_block", None)
    with pytest.raises(ValueError, match=r"^out_format: expected bf16, nvfp4 or mxfp8"):
        dequant_swiglu(a, gated, SwiGLU(), hidden, gsf)
    assert not recorded


def test_weights_too_high_for_the_kernel(recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequant_gemm, "MAX_UNIT_ROWS", 2)
    a, w = rows_of("nvfp4", 4, 128), weights_of("nvfp4", 65, 128, None)
    with pytest.raises(ValueError, match=r"^w: expected N < 128, got 65"):
        run_dequant_gemm(a, w, torch.empty(4, 66)[:, :65])
    assert not recorded


def test_other_gpus_are_refused(recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "another GPU")
    with pytest.raises(ValueError, match=r"^w: prepacked for Hopper, got another GPU; use w\.restore"):
        run_dequant_gemm(rows_of("nvfp4", 4, 128), weights_of("nvfp4", 64, 128, None), torch.empty(4, 64))
    assert not recorded


def test_the_kernel_clamps_and_inverts_the_encode_scale_itself(recorded: list[Recorded]) -> None:
    """No kernel of torch's runs before it: a tensor goes to it as it is, with memory for `1 / gsf`."""
    a, w, given = rows_of("nvfp4", 4, 128), weights_of("nvfp4", 64, 128, GateUpOrder.GATE_UP), torch.tensor([2.0**120])
    hidden, gsf = empty_intermediate(a, w, SwiGLU(), "nvfp4", given, finished=False)
    assert gsf is not None and gsf.data_ptr() == given.data_ptr() and gsf.shape == (1,)
    assert hidden.row_scale is not None and hidden.row_scale.shape == (4,)
    finished, clamped = empty_intermediate(a, w, SwiGLU(), "nvfp4", given)
    assert clamped is not None and float(clamped) == 2.0**100
    assert finished.row_scale is not None and finished.row_scale.tolist() == [2.0**-100] * 4


@pytest.mark.parametrize("experts", [160, 256, 384])
@pytest.mark.parametrize(
    ("weight", "k", "activation", "out"),
    [
        ("nvfp4", 7168, SwiGLU(), "nvfp4 dequantized"),
        ("mxfp8", 7168, SwiGLU(), "mxfp8 dequantized"),
        ("mxfp4", 7168, SwiGLU(), "bf16 dequantized"),
        ("nvfp4", 2048, None, "bfloat16"),
        ("mxfp8", 2048, None, "bfloat16"),
        ("mxfp4", 2048, None, "bfloat16"),
    ],
    ids=["nvfp4", "mxfp8", "mxfp4", "nvfp4-down", "mxfp8-down", "mxfp4-down"],
)
def test_the_groups_of_published_layers_stay_in_registers(
    experts: int, weight: str, k: int, activation: Activation | None, out: str, recorded: list[Recorded]
) -> None:
    """A warp of `dequant_few` has the table of groups in its registers: 12 groups in a lane for Kimi-K2."""
    token = "bf16" if weight == "mxfp4" else weight
    for shape in (FEW, FEW_EVEN):
        recorded.clear()
        launch = launched(recorded, weight, token, k, shape, activation, out, chained=activation is None)
        assert launch.defines["MAX_GROUPS"] == 32
        groups = dequant_gemm.few_groups(experts)
        assert groups == experts
        launch.defines["MAX_GROUPS"] = groups
        launch.defines["BLOCKS_PER_SM"] = dequant_gemm.blocks_with_registers(shape, groups)
        compiled = compile_recorded(launch)
        assert compiled.spilled_bytes <= SPILL_BYTES, compiled.log
        check_room(launch, compiled, shape, chained=activation is None)


@pytest.mark.parametrize(("groups", "compiled_for"), [(1, 32), (32, 32), (33, 64), (128, 128), (384, 384), (512, 512)])
def test_a_lane_has_as_many_groups_as_it_needs(groups: int, compiled_for: int) -> None:
    assert dequant_gemm.few_groups(groups) == compiled_for
