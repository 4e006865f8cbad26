"""Ahead-of-time cases of the operations of `moe_runtime.ops`: each layout of scales, element and width of tile."""

from __future__ import annotations

from moe_runtime.formats import FP8_BLOCK, MXFP8, NVFP4, ScaleLayout, TokenFormat
from moe_runtime.kernels.gemm_aot import MMA, MXF8_MMA, NARROW, WIDE, gemm_case
from moe_runtime.kernels.op_gemm import choose_op_tile
from moe_runtime.kernels.runtime import ALL_ARCHS, AotCase

_QUANTS = {NVFP4.name: "*u8", MXFP8.name: "*fp8e4nv", FP8_BLOCK.name: "*fp8e4nv"}
_NATIVE = {
    NVFP4.name: {100: r"tcgen05\.mma\S*mxf4nvf4\S*block_scale", 120: r"mma\.sync\S*mxf4nvf4\S*block_scale"},
    MXFP8.name: MXF8_MMA,
}
_NEVER = ("row_scale_ptr", "row_index_ptr", "bias_ptr", "out_scales_ptr", "out_gsf_ptr", "out_scale_offsets_ptr")


def _case(
    operation: str,
    fmt: TokenFormat,
    layout: ScaleLayout,
    *,
    out: str = "*i16",
    expert_scales: bool = False,
    num_active: bool = False,
    block: int | None = None,
    rows_per_scale: int = 1,
    max_tile_n: int = 128,
    even_k: bool = True,
    e5m2: bool = False,
    native: bool = False,
    n: int = WIDE,
) -> AotCase:
    quants = "*fp8e5" if e5m2 else _QUANTS[fmt.name]
    scales = "*fp32" if fmt is FP8_BLOCK else "*u8"
    pointers = {"a_ptr": quants, "w_ptr": quants, "a_scales_ptr": scales, "w_scales_ptr": scales, "out_ptr": out}
    absent = list(_NEVER)
    absent += [] if expert_scales else ["expert_scales_ptr"]
    absent += [] if num_active else ["num_active_ptr"]
    absent += ["a_scale_offsets_ptr"] if fmt is FP8_BLOCK else []
    absent += [] if layout in (ScaleLayout.MN_MAJOR, ScaleLayout.PACKED) else ["a_scale_ld", "w_scale_ld"]
    tile = choose_op_tile(n, fmt, max_tile_n, native)
    constants = {
        "A_FMT": int(fmt.code),
        "W_FMT": int(fmt.code),
        "A_LAYOUT": int(layout),
        "W_LAYOUT": int(layout),
        "SCALE_BLOCK": block or fmt.block,
        "ROWS_PER_SCALE": rows_per_scale,
        "E5M2": e5m2,
        "NATIVE": native,
        "SCALES_PER_EXPERT": int(expert_scales),
        "EVEN_K": even_k,
    }
    archs: tuple[int, ...] = ALL_ARCHS
    if fmt.name in _NATIVE:
        # The form that `op_gemm.has_native_mma` takes there, and no other.
        archs = (100, 120) if native else (90,)
    wanted = _NATIVE[fmt.name] if native else MMA
    return gemm_case(operation, fmt.name, tile, pointers, constants, absent, archs=archs, instruction=wanted)


_MAX = "grouped_matmul_dynamic_scaled_nvfp4"
_NVFP4 = "group_gemm_nvfp4_nt_groupwise"
_MXFP8 = "moe_gemm_mxfp8_nt_groupwise"
_FP8 = "group_gemm_fp8_nt_groupwise"

AOT_CASES: tuple[AotCase, ...] = (
    _case(_MAX, NVFP4, ScaleLayout.SWIZZLED, expert_scales=True, num_active=True, even_k=False),
    _case(_NVFP4, NVFP4, ScaleLayout.SWIZZLED, out="*fp16", expert_scales=True),
    _case(_NVFP4, NVFP4, ScaleLayout.SWIZZLED, max_tile_n=32),
    _case(_MXFP8, MXFP8, ScaleLayout.PACKED, block=128, even_k=False),
    _case(_MXFP8, MXFP8, ScaleLayout.PACKED, block=32, n=NARROW),
    _case(_MAX, NVFP4, ScaleLayout.SWIZZLED, expert_scales=True, num_active=True, even_k=False, native=True),
    _case(_NVFP4, NVFP4, ScaleLayout.SWIZZLED, out="*fp16", expert_scales=True, max_tile_n=64, native=True),
    _case(_MXFP8, MXFP8, ScaleLayout.PACKED, block=128, even_k=False, native=True),
    _case(_MXFP8, MXFP8, ScaleLayout.PACKED, block=32, native=True, n=NARROW),
    _case(_FP8, FP8_BLOCK, ScaleLayout.MN_MAJOR),
    _case(_FP8, FP8_BLOCK, ScaleLayout.K_MAJOR, rows_per_scale=128, out="*fp16", e5m2=True, n=NARROW),
)
