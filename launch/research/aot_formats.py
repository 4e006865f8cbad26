"""Ahead-of-time cases of the quantizers."""

from __future__ import annotations

from moe_runtime.kernels.formats import quantize
from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS, FormatCode, TokenFormat
from moe_runtime.launch.research.aot_cases import AotCase


def _quantizer(
    operation: str, fmt: TokenFormat, *, x_bf16: bool = True, static_gsf: bool = False, short_blocks: int = 0
) -> AotCase:
    q = "*u16" if fmt.code == FormatCode.BF16 else "*u8"
    s = "*fp32" if fmt.code == FormatCode.FP8_BLOCK else "*u8"
    constexprs = {"FMT": int(fmt.code), "BLOCK_R": quantize.BLOCK_R, "BLOCK_K": quantize.BLOCK_K}
    if operation == "quantize":
        kernel = quantize._quantize_kernel
        signature = {"x_ptr": "*i16" if x_bf16 else "*fp32", "q_ptr": q, "s_ptr": s, "row_scale_ptr": "*fp32"}
        signature |= {"gsf_ptr": "*fp32", "num_rows": "i32", "k": "i32", "x_stride": "i64"}
        constexprs |= {"X_BF16": x_bf16, "STATIC_GSF": static_gsf, "SHORT_BLOCKS": short_blocks}
    else:
        kernel = quantize._dequantize_kernel
        signature = {"q_ptr": q, "s_ptr": s, "row_scale_ptr": "*fp32", "out_ptr": "*fp32"}
        signature |= {"num_rows": "i32", "k": "i32", "q_stride": "i64", "s_stride": "i64"}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return AotCase(operation, fmt.name, kernel, signature, constexprs, {"enable_fp_fusion": False})


AOT_CASES: tuple[AotCase, ...] = (
    *(_quantizer(operation, fmt) for operation in ("quantize", "dequantize") for fmt in WEIGHT_FORMATS.values()),
    *(_quantizer("quantize", fmt, x_bf16=False) for fmt in WEIGHT_FORMATS.values()),
    _quantizer("quantize", FORMATS["nvfp4"], static_gsf=True),
    _quantizer("quantize", FORMATS["fp8_block"], short_blocks=1),
)
