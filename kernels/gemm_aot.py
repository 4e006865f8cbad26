"""Ahead-of-time cases of the grouped GEMM: every pair of formats, every form of the epilogue, each arch's MMA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moe_runtime.formats import BF16, FORMATS, FP8_BLOCK, MXFP4, MXFP8, NVFP4, TokenFormat
from moe_runtime.kernels.gemm_operands import NativeForm
from moe_runtime.kernels.grouped_gemm import GemmTile, _grouped_gemm_kernel, choose_tile
from moe_runtime.kernels.runtime import ALL_ARCHS, AotCase
from moe_runtime.weights import GPT_OSS, GateUpOrder, SwiGLU

ARGUMENTS = {
    "a_ptr": "*bf16",
    "a_scales_ptr": "*u8",
    "row_scale_ptr": "*fp32",
    "row_index_ptr": "*i32",
    "w_ptr": "*bf16",
    "w_scales_ptr": "*u8",
    "expert_scales_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "out_ptr": "*u8",
    "out_scales_ptr": "*u8",
    "out_gsf_ptr": "*fp32",
    "group_offsets_ptr": "*i32",
    "a_scale_offsets_ptr": "*i32",
    "out_scale_offsets_ptr": "*i32",
    "expert_ids_ptr": "*i32",
    "num_active_ptr": "*i32",
    "num_groups": "i32",
    "num_experts": "i32",
    "capacity": "i32",
    "columns": "i32",
    "K": "i32",
    "a_stride": "i64",
    "out_stride": "i64",
    "a_scale_ld": "i64",
    "w_scale_ld": "i64",
}

_POINTER = {
    BF16.name: "*bf16",
    FP8_BLOCK.name: "*fp8e4nv",
    MXFP8.name: "*fp8e4nv",
    NVFP4.name: "*u8",
    MXFP4.name: "*u8",
}
_OUT_POINTER = {BF16.name: "*i16", FP8_BLOCK.name: "*u8", MXFP8.name: "*u8", NVFP4.name: "*u8"}
_PAIR_POINTER = {BF16.name: "*i32", MXFP8.name: "*i16", NVFP4.name: "*u8"}
"""Words of two numbers of the rows."""

WIDE, NARROW = 2048, 32
"""Output columns with the widest tile and with the narrowest, which compiles in half the time."""

MMA = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 120: r"mma\.sync"}
MXF8_MMA = {100: r"tcgen05\.mma\S*mxf8f6f4\S*block_scale", 120: r"mma\.sync\S*mxf8f6f4\S*block_scale"}


def gemm_case(
    operation: str,
    fmt: str,
    tile: GemmTile,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    absent: Iterable[str],
    *,
    archs: tuple[int, ...] = ALL_ARCHS,
    instruction: Mapping[int, str] = MMA,
) -> AotCase:
    """A case of the kernel: `pointers` and `constants` instead of the usual ones, `absent` arguments None."""
    constexprs: dict[str, Any] = {
        "OUT_FMT": 0,
        "ROWS_PER_SCALE": 1,
        "E5M2": False,
        "NATIVE": False,
        "ORDER": 0,
        "SCALES_PER_EXPERT": 0,
        "ACTIVATION": None,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_G": 32,
        "EVEN_K": True,
        "INTERPRET": False,
    }
    constexprs |= {**constants, **dict.fromkeys(absent)}
    signature = {**ARGUMENTS, **pointers, **dict.fromkeys(constexprs, "constexpr")}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
    wanted = {arch: instruction[arch] for arch in archs}
    return AotCase(operation, fmt, _grouped_gemm_kernel, signature, constexprs, options, archs, wanted)


def _case(
    a: TokenFormat,
    w: TokenFormat,
    *,
    out: TokenFormat | None = None,
    activation: SwiGLU | None = None,
    out_dtype: str = "*i16",
    order: GateUpOrder | None = None,
    scales_per_expert: int = 0,
    absent: tuple[str, ...] = (),
    even_k: bool = True,
    archs: tuple[int, ...] = ALL_ARCHS,
    native: NativeForm = NativeForm.NONE,
    n: int = WIDE,
) -> AotCase:
    """A case with every optional tensor that the formats allow, less those in `absent`, for `n` output columns."""
    scale_pointer = {"fp8_block": "*fp32"}
    in_pairs = w.element_bits == 4 and not native
    pointers = {
        "a_ptr": _PAIR_POINTER[a.name] if in_pairs else _POINTER[a.name],
        "w_ptr": _POINTER[w.name],
        "a_scales_ptr": scale_pointer.get(a.name, "*u8"),
        "w_scales_ptr": scale_pointer.get(w.name, "*u8"),
        "out_ptr": out_dtype if out is None else _OUT_POINTER[out.name],
        "out_scales_ptr": "*u8" if out is None else scale_pointer.get(out.name, "*u8"),
    }
    missing = {*absent, "a_scale_ld", "w_scale_ld"}
    missing |= set() if a.scale_dtype is not None else {"a_scales_ptr"}
    missing |= set() if w.scale_dtype is not None else {"w_scales_ptr"}
    missing |= set() if a.swizzled else {"a_scale_offsets_ptr"}
    missing |= set() if out is not None and out.swizzled else {"out_scale_offsets_ptr"}
    missing |= set() if out is not None and out.has_row_scale else {"out_gsf_ptr"}
    missing |= set() if out is not None and out.scale_dtype is not None else {"out_scales_ptr"}
    missing |= set() if scales_per_expert else {"expert_scales_ptr"}
    tile = choose_tile(n, a, out_block=0 if out is None else out.block, native=native)
    if activation is not None:
        order = activation.order
    constants = {
        "A_FMT": int(a.code),
        "W_FMT": int(w.code),
        "OUT_FMT": 0 if out is None else int(out.code),
        "A_LAYOUT": int(a.scale_layout),
        "W_LAYOUT": int(w.scale_layout),
        "SCALE_BLOCK": w.block,
        "NATIVE": int(native),
        "ORDER": 0 if order is None else order.code,
        "SCALES_PER_EXPERT": scales_per_expert,
        "ACTIVATION": None if activation is None else (activation.alpha, activation.limit, activation.up_offset),
        "EVEN_K": even_k,
    }
    operation = "grouped_gemm" if out is None else "grouped_gemm_swiglu"
    name = w.name if a is w else f"{w.name} x {a.name}"
    wanted = MXF8_MMA if native else MMA
    return gemm_case(operation, name, tile, pointers, constants, missing, archs=archs, instruction=wanted)


_PLAIN = ("row_index_ptr", "row_scale_ptr", "bias_ptr", "num_active_ptr")
_MXFP4_FORMS: tuple[dict[str, Any], ...] = (
    {"archs": (90,)},
    {"archs": (100,), "native": NativeForm.AS_STORED},
    {"archs": (120,), "native": NativeForm.WIDENED},
)
"""As `native_form` has it of each arch."""

# Every format with the widest tile in both operations, those of 4-bit weights alone in one; other forms with the
# narrowest.
AOT_CASES: tuple[AotCase, ...] = (
    *(_case(f, f, absent=() if f.has_row_scale else ("row_scale_ptr",)) for f in FORMATS.values()),
    *(_case(f, f, out=f, activation=SwiGLU(), scales_per_expert=2) for f in FORMATS.values()),
    _case(BF16, NVFP4, scales_per_expert=1, absent=_PLAIN, even_k=False),
    _case(BF16, NVFP4, out=BF16, activation=GPT_OSS, scales_per_expert=2, even_k=False, n=NARROW),
    _case(BF16, MXFP4, even_k=False, n=NARROW),
    _case(BF16, MXFP4, out=BF16, activation=GPT_OSS),
    *(_case(MXFP8, MXFP4, even_k=False, **form) for form in _MXFP4_FORMS),
    *(_case(MXFP8, MXFP4, out=MXFP8, activation=GPT_OSS, **form) for form in _MXFP4_FORMS),
    _case(BF16, BF16, out_dtype="*fp16", absent=_PLAIN, even_k=False, n=NARROW),
    _case(MXFP8, MXFP8, out_dtype="*fp32", order=GateUpOrder.INTERLEAVED, scales_per_expert=2, even_k=False, n=NARROW),
    _case(
        NVFP4,
        NVFP4,
        out=NVFP4,
        activation=SwiGLU(GateUpOrder.UP_GATE),
        scales_per_expert=1,
        absent=("bias_ptr",),
        n=NARROW,
    ),
)
