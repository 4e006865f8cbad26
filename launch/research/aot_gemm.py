"""Ahead-of-time cases of the grouped GEMM: every pair of formats, every form of the epilogue, each architecture's MMA,
and the operations of `moe_runtime.ops`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_runtime.kernels.formats.number_formats import (
    BF16,
    FORMATS,
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    NVFP4,
    ScaleLayout,
    TokenFormat,
    rounds_tokens,
)
from moe_runtime.kernels.gemm import dequant_gemm, dequant_tokens, pack_units, tma_gemm
from moe_runtime.kernels.gemm.dequant_layout import DEQUANT_FORMATS, unit_columns
from moe_runtime.kernels.gemm.grouped_gemm import _grouped_gemm_kernel, tile_options
from moe_runtime.kernels.gemm.operands import NativeForm
from moe_runtime.kernels.gemm.plan import choose_op_tile, choose_tile, keeps_tokens
from moe_runtime.kernels.gemm.shapes import (
    DEQUANT_DECODE,
    DEQUANT_FEW,
    DEQUANT_FEW_EVEN,
    DEQUANT_MIDDLE,
    DEQUANT_PREFILL,
    EXPANDING_SHAPES,
    TMA_PREFILL,
    TMA_SHAPES,
    DequantShape,
    Regime,
    TmaShape,
    overlapped_token_shape,
)
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GEGLU_TANH,
    GPT_OSS,
    SILU,
    SQUARED_RELU,
    STEP_3P5,
    Activation,
    GateUpOrder,
)
from moe_runtime.launch.research.aot_cases import ALL_ARCHS, AotCase, CudaCase

PLAIN, GATED = "grouped_gemm", "grouped_gemm_swiglu"
OP_MAX = "grouped_matmul_dynamic_scaled_nvfp4"
OP_NVFP4 = "group_gemm_nvfp4_nt_groupwise"
OP_MXFP8 = "moe_gemm_mxfp8_nt_groupwise"
OP_MOE_FP8 = "moe_gemm_fp8_nt_groupwise"
OP_FP8 = "group_gemm_fp8_nt_groupwise"

# --- The grouped GEMM in Triton ---

MMA = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 120: r"mma\.sync"}
BLOCK_SCALED = {100: r"tcgen05\.mma\S*{}\S*block_scale", 120: r"mma\.sync\S*{}\S*block_scale"}
WIDE, NARROW = 2048, 32
"""Output columns that give the widest tile and the narrowest one, which compiles in half the time."""

_TYPES = """
    a_ptr:*bf16 a_scales_ptr:*u8 row_scale_ptr:*fp32 row_index_ptr:*i32 w_ptr:*bf16 w_scales_ptr:*u8
    expert_scales_ptr:*fp32 bias_ptr:*fp32 out_ptr:*u8 out_scales_ptr:*u8 out_gsf_ptr:*fp32 group_offsets_ptr:*i32
    a_scale_offsets_ptr:*i32 out_scale_offsets_ptr:*i32 expert_ids_ptr:*i32 num_active_ptr:*i32 num_groups:i32
    num_experts:i32 capacity:i32 columns:i32 K:i32 a_stride:i64 out_stride:i64 a_scale_ld:i64 w_scale_ld:i64
"""
_QUANTS = {BF16: "*bf16", FP8_BLOCK: "*fp8e4nv", MXFP8: "*fp8e4nv", NVFP4: "*u8", MXFP4: "*u8"}
_PAIRS = {BF16: "*i32", FP8_BLOCK: "*i16", MXFP8: "*i16", NVFP4: "*u8"}
"""Types of words that hold two values of a row."""
_RESULTS = {BF16: "*i16", FP8_BLOCK: "*u8", MXFP8: "*u8", NVFP4: "*u8"}


def _triton(
    a: TokenFormat,
    w: TokenFormat,
    *,
    operation: str | None = None,
    out: TokenFormat | None = None,
    activation: Activation | None = None,
    out_type: str = "*i16",
    absent: tuple[str, ...] = (),
    archs: tuple[int, ...] = ALL_ARCHS,
    native: NativeForm = NativeForm.NONE,
    n: int = WIDE,
    max_tile_n: int = 128,
    layout: ScaleLayout | None = None,
    **constants: Any,
) -> AotCase:
    """A case with every optional tensor that the formats allow except those in `absent`, for `n` output columns.

    `operation` is one of `moe_runtime.ops`; None means a layer. `constants` are constexprs.
    """
    if operation is None:
        gated = activation is None or activation.gated
        multiplied = BF16 if rounds_tokens(a, w) else a
        tile = choose_tile(n, multiplied, out_block=0 if out is None else out.block, gated=gated, native=native)
    else:
        tile = choose_op_tile(n, w, max_tile_n, bool(native), activation is not None)
    if activation is not None:
        order = activation.gate_up
        constants |= {"ORDER": 0 if order is None else order.code, "ACTIVATION": activation.constants}
    how = tile_options(tile, native, num_groups=32, k=tile.block_k) | {"INTERPRET": False}
    options = {name: how.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    a_layout, w_layout = (int(f.scale_layout if layout is None else layout) for f in (a, w))
    constexprs = how | {"A_FMT": int(a.code), "W_FMT": int(w.code), "OUT_FMT": 0 if out is None else int(out.code)}
    constexprs |= {"A_LAYOUT": a_layout, "W_LAYOUT": w_layout, "SCALE_BLOCK": w.block, "ROWS_PER_SCALE": 1}
    constexprs |= {
        "E5M2": False,
        "BLOCKS_APART": False,
        "ORDER": 0,
        "SCALES_PER_EXPERT": 0,
        "ACTIVATION": None,
        **constants,
    }
    has_ld = layout in (ScaleLayout.MN_MAJOR, ScaleLayout.PACKED)
    there = {
        "a_scales_ptr": a is not BF16,
        "w_scales_ptr": w is not BF16,
        "a_scale_offsets_ptr": a.swizzled or operation == OP_MOE_FP8,
        "out_scales_ptr": out is not None and out.scale_dtype is not None,
        "out_scale_offsets_ptr": out is not None and out.swizzled,
        "out_gsf_ptr": out is not None and out.has_row_scale,
        "expert_scales_ptr": constexprs["SCALES_PER_EXPERT"] > 0,
        "a_scale_ld": has_ld,
        "w_scale_ld": has_ld,
    }
    constexprs |= dict.fromkeys((*absent, *(name for name, is_there in there.items() if not is_there)))
    types = dict(pair.split(":") for pair in _TYPES.split())
    types |= {"a_ptr": _QUANTS[a], "w_ptr": _QUANTS[w], "out_ptr": out_type if out is None else _RESULTS[out]}
    if w.element_bits == 4 and not native:
        types["a_ptr"] = _PAIRS[a]
    if constexprs["E5M2"]:
        types |= dict.fromkeys(("a_ptr", "w_ptr"), "*fp8e5")
    types |= {f"{name}_scales_ptr": "*fp32" for name, f in (("a", a), ("w", w), ("out", out)) if f is FP8_BLOCK}
    kind = "mxf4nvf4" if w is NVFP4 else "mxf8f6f4"
    wanted = {arch: BLOCK_SCALED[arch].format(kind) if native else MMA[arch] for arch in archs}
    name, fmt = operation or (PLAIN if out is None else GATED), w.name if a is w else f"{w.name} x {a.name}"
    signature = types | dict.fromkeys(constexprs, "constexpr")
    return AotCase(name, fmt, _grouped_gemm_kernel, signature, constexprs, options, archs, wanted)


_NO_EXTRAS = ("row_index_ptr", "row_scale_ptr", "bias_ptr", "num_active_ptr")
_STORED, _WIDENED = NativeForm.AS_STORED, NativeForm.WIDENED
_ONE: dict[str, Any] = {"SCALES_PER_EXPERT": 1}
_TWO: dict[str, Any] = {"SCALES_PER_EXPERT": 2}
_ODD_K: dict[str, Any] = {"EVEN_K": False}


def _layer_cases() -> Iterator[AotCase]:
    """Every format with the widest tile, token formats in both operations. Other forms have the narrowest tile."""
    for f in FORMATS.values():
        yield _triton(f, f, absent=() if f.has_row_scale else ("row_scale_ptr",))
        yield _triton(f, f, out=f, activation=SILU, **_TWO)
    apart: dict[str, Any] = {"BLOCKS_APART": True, "absent": ("row_scale_ptr",)}
    yield _triton(FP8_BLOCK, FP8_BLOCK, out=FP8_BLOCK, activation=SILU, **apart, **_ODD_K)
    yield _triton(BF16, NVFP4, absent=_NO_EXTRAS, **_ONE, **_ODD_K)
    yield _triton(BF16, NVFP4, out=BF16, activation=GPT_OSS, n=NARROW, **_TWO, **_ODD_K)
    yield _triton(BF16, MXFP4, n=NARROW, **_ODD_K)
    yield _triton(BF16, MXFP4, out=BF16, activation=GPT_OSS)
    for f in (NVFP4, MXFP4):
        yield _triton(FP8_BLOCK, f, **_ODD_K)
        yield _triton(FP8_BLOCK, f, out=BF16, activation=GPT_OSS)
    yield _triton(FP8_BLOCK, MXFP4, out=FP8_BLOCK, activation=SILU, absent=("row_scale_ptr",))
    for arch, native in ((90, NativeForm.NONE), (100, _STORED), (120, _WIDENED)):
        yield _triton(MXFP8, MXFP4, archs=(arch,), native=native, **_ODD_K)
        yield _triton(MXFP8, MXFP4, out=MXFP8, activation=GPT_OSS, archs=(arch,), native=native)
    yield _triton(BF16, BF16, out_type="*fp16", absent=_NO_EXTRAS, n=NARROW, **_ODD_K)
    interleaved: dict[str, Any] = {"ORDER": GateUpOrder.INTERLEAVED.code}
    yield _triton(MXFP8, MXFP8, out_type="*fp32", n=NARROW, **interleaved, **_TWO, **_ODD_K)
    up_gate = Activation(GateUpOrder.UP_GATE)
    yield _triton(NVFP4, NVFP4, out=NVFP4, activation=up_gate, absent=("bias_ptr",), n=NARROW, **_ONE)
    yield _triton(NVFP4, NVFP4, out=NVFP4, activation=SQUARED_RELU, **_ONE)
    yield _triton(FP8_BLOCK, FP8_BLOCK, out=FP8_BLOCK, activation=SQUARED_RELU, absent=("row_scale_ptr",), **_ODD_K)
    for arch, native in ((90, NativeForm.NONE), (100, _STORED), (120, _WIDENED)):
        yield _triton(MXFP8, MXFP4, out=MXFP8, activation=SQUARED_RELU, archs=(arch,), native=native)
    yield _triton(BF16, BF16, out=BF16, activation=GEGLU_TANH, n=NARROW)
    yield _triton(BF16, BF16, out=BF16, activation=STEP_3P5, n=NARROW)
    yield _triton(BF16, NVFP4, out=BF16, activation=GEGLU, n=NARROW, **_TWO)


def _op_cases() -> Iterator[AotCase]:
    """Each layout of scales, element type and tile width of `moe_runtime.ops`, in the form for each architecture."""
    common: dict[str, Any]
    up_gate = Activation(GateUpOrder.UP_GATE)
    for archs, native, max_tile_n in (((90,), NativeForm.NONE, 128), ((100, 120), _STORED, 64)):
        common = {"layout": ScaleLayout.SWIZZLED, "archs": archs, "native": native}
        yield _triton(NVFP4, NVFP4, operation=OP_MAX, absent=_NO_EXTRAS[:3], **_ONE, **_ODD_K, **common)
        common |= {"absent": _NO_EXTRAS}
        fp16: dict[str, Any] = {"out_type": "*fp16", "max_tile_n": max_tile_n}
        yield _triton(NVFP4, NVFP4, operation=OP_NVFP4, **fp16, **_ONE, **common)
        if native is NativeForm.NONE:
            yield _triton(NVFP4, NVFP4, operation=OP_NVFP4, max_tile_n=32, **common)
        common |= {"layout": ScaleLayout.PACKED}
        yield _triton(MXFP8, MXFP8, operation=OP_MXFP8, SCALE_BLOCK=128, **_ODD_K, **common)
        yield _triton(MXFP8, MXFP8, operation=OP_MXFP8, SCALE_BLOCK=32, n=NARROW, **common)
        yield _triton(MXFP8, MXFP8, operation=OP_MXFP8, SCALE_BLOCK=32, activation=up_gate, **common)
    common = {"operation": OP_MOE_FP8, "absent": _NO_EXTRAS, "layout": ScaleLayout.MN_MAJOR}
    yield _triton(FP8_BLOCK, FP8_BLOCK, n=NARROW, **_ODD_K, **common)
    yield _triton(FP8_BLOCK, FP8_BLOCK, activation=up_gate, **common)
    common = {"operation": OP_FP8, "absent": _NO_EXTRAS}
    yield _triton(FP8_BLOCK, FP8_BLOCK, layout=ScaleLayout.MN_MAJOR, **common)
    e5m2: dict[str, Any] = {"out_type": "*fp16", "E5M2": True, "ROWS_PER_SCALE": 128}
    yield _triton(FP8_BLOCK, FP8_BLOCK, layout=ScaleLayout.K_MAJOR, n=NARROW, **e5m2, **common)


# --- Hopper's grouped GEMM in CUDA C++; the tests of each kernel compile more variants ---

HIDDEN, GROUPS = 7168, 32
BF16_MMA = {90: r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"}
BF16_WGMMA = {90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"}
FP8_WGMMA = {90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3"}


def _dequant(
    operation: str,
    fmt: TokenFormat,
    shape: DequantShape,
    out_dtype: torch.dtype,
    activation: Activation | None = None,
    **more: Any,
) -> CudaCase:
    out = None if activation is None else fmt
    arguments = fmt, fmt, shape, unit_columns(HIDDEN), out, out_dtype, activation
    max_groups = dequant_gemm.few_groups(GROUPS)
    defines, _ = dequant_gemm.macros(*arguments, row_scales=fmt.has_row_scale, max_groups=max_groups, **more)
    instruction = BF16_MMA if shape.own_tokens else BF16_WGMMA
    name = dequant_gemm.kernel_of(shape)
    return CudaCase(operation, fmt.name, f"{name}.cu", name, defines, instruction=instruction)


def _tma(
    operation: str,
    fmt: TokenFormat,
    shape: TmaShape,
    out_code: int,
    gather: bool,
    copied: bool = False,
    activation: Activation | None = None,
    expanded: TokenFormat | None = None,
) -> CudaCase:
    order = None if activation is None else activation.gate_up
    more: dict[str, Any] = {"gather": gather, "extras": False, "copied_scales": copied, "expanded": expanded}
    defines = tma_gemm.macros(fmt, shape, GROUPS, activation=activation, order=order, out_code=out_code, **more)
    wgmma = FP8_WGMMA if fmt is FP8_BLOCK else BF16_WGMMA
    return CudaCase(operation, fmt.name, tma_gemm.SOURCE, "tma_gemm", defines, instruction=wgmma)


def _hopper_cases() -> Iterator[CudaCase]:
    """Each format in every regime, plain and with SwiGLU; other activations; the operations of `moe_runtime.ops`."""
    for operation, fmt in ((OP_MAX, NVFP4), (OP_NVFP4, NVFP4), (OP_MXFP8, MXFP8)):
        for out_dtype in (torch.bfloat16, torch.float16):
            yield _dequant(operation, fmt, DEQUANT_DECODE, out_dtype)
    for out_code in (0, 1):
        yield _tma(OP_FP8, FP8_BLOCK, TMA_PREFILL, out_code, gather=False)
    for fmt in (NVFP4, MXFP8):
        for dequant_shape in (DEQUANT_DECODE, DEQUANT_MIDDLE, DEQUANT_PREFILL):
            ways = [(PLAIN, False, False), (GATED, False, False), (GATED, True, False)]
            ways += [(PLAIN, False, True), (GATED, True, True)] if dequant_shape is DEQUANT_PREFILL else []
            keep = keeps_tokens(GROUPS, HIDDEN, fmt, dequant_shape)
            for operation, dequantized, overlapped in ways:
                more = {"out_dequantized": dequantized, "keep_tokens": keep, "overlapped": overlapped}
                formula = None if operation == PLAIN else SILU
                yield _dequant(operation, fmt, dequant_shape, torch.bfloat16, formula, **more)
        keep = keeps_tokens(1, HIDDEN, fmt, DEQUANT_FEW)
        raw, made = dequant_tokens.piece_macros(fmt, scales_in_record=True), dequant_tokens.piece_macros(BF16)
        first: dict[str, Any] = {"own_tokens": raw, "out_dequantized": True, "out_by_rows": True}
        second: dict[str, Any] = {"own_tokens": made, "chained": True}
        for few in (DEQUANT_FEW, DEQUANT_FEW_EVEN):
            yield _dequant(GATED, fmt, few, torch.bfloat16, SILU, keep_tokens=keep, **first)
            yield _dequant(PLAIN, fmt, few, torch.bfloat16, keep_tokens=keep, **second)
    for fmt in (FP8_BLOCK, BF16):
        for tma_shape in TMA_SHAPES:
            for operation in (PLAIN, GATED):
                out_code = 3 if operation == GATED and fmt is FP8_BLOCK else 0
                formula = None if operation == PLAIN else SILU
                yield _tma(operation, fmt, tma_shape, out_code, gather=operation == GATED, activation=formula)
                if fmt is FP8_BLOCK and tma_shape is TMA_PREFILL:
                    for gather in (False, True):
                        yield _tma(operation, fmt, tma_shape, out_code, gather=gather, copied=True, activation=formula)
    for expanded in (NVFP4, MXFP4):
        for tma_shape in EXPANDING_SHAPES:
            copied, gather = tma_shape.regime is Regime.PREFILL, not tma_shape.tall
            yield _tma(PLAIN, FP8_BLOCK, tma_shape, 0, False, copied=copied, expanded=expanded)
            yield _tma(GATED, FP8_BLOCK, tma_shape, 3, gather=gather, activation=SILU, expanded=expanded)
    for formula in (GEGLU, GEGLU_TANH, SQUARED_RELU, STEP_3P5):
        more = {"out_dequantized": True, "keep_tokens": True}
        yield _dequant(GATED, NVFP4, DEQUANT_DECODE, torch.bfloat16, formula, **more)
        if formula is not STEP_3P5:  # limits are arguments there
            yield _tma(GATED, FP8_BLOCK, TMA_PREFILL, 3, gather=False, copied=True, activation=formula)
    for fmt in FORMATS.values():
        overlapped_shape = overlapped_token_shape(unit_columns(HIDDEN))
        layouts: list[dict[str, Any]] = [{}, {"shape": overlapped_shape}]
        layouts += [{"packed": True}] if fmt is not FP8_BLOCK else []
        for layout in layouts + ([{"scales_in_record": True}] if fmt.swizzled else []):
            defines = dequant_tokens.token_macros(fmt, **layout)
            yield CudaCase("dequant_tokens", fmt.name, "dequant_tokens.cu", "dequant_tokens", defines)
    for fmt in DEQUANT_FORMATS:
        yield CudaCase("pack_units", fmt.name, "pack_units.cu", "pack_units", pack_units.pack_macros(fmt))


AOT_CASES: tuple[AotCase | CudaCase, ...] = (*_hopper_cases(), *_layer_cases(), *_op_cases())
