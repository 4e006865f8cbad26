"""Operations of other libraries: grouped GEMMs and a token format with the names and layouts of FlashInfer and MAX."""

from __future__ import annotations

from moe_runtime.ops import operations
from moe_runtime.ops.operations import (
    NVFP4TokenFormat,
    PrepackedWeights,
    dequantize_bf16,
    dequantize_fp8,
    dequantize_mxfp8,
    dequantize_nvfp4,
    dequantize_rows,
    group_gemm_fp8_nt_groupwise,
    group_gemm_nvfp4_nt_groupwise,
    grouped_matmul_dynamic_scaled_nvfp4,
    moe_gemm_mxfp8_nt_groupwise,
    nvfp4_encode_scale,
    pack_closed_form_128,
    pack_dense_128,
    pack_scale_major,
    pack_swizzled_weights,
    pack_ue8m0_rows,
    pack_ue8m0_weights,
    prepack_mxfp8,
    prepack_nvfp4,
    quantize_bf16,
    quantize_fp8,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_rows,
    swizzle_scales,
    unpack_closed_form_128,
    unpack_dense_128,
    unpack_scale_major,
    unpack_swizzled_weights,
    unpack_ue8m0_rows,
    unpack_ue8m0_weights,
    unswizzle_scales,
)
from moe_runtime.support.deprecation import warn_renamed

__all__ = [
    "NVFP4TokenFormat",
    "PrepackedWeights",
    "dequantize_bf16",
    "dequantize_fp8",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "dequantize_rows",
    "group_gemm_fp8_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
    "grouped_matmul_dynamic_scaled_nvfp4",
    "moe_gemm_mxfp8_nt_groupwise",
    "nvfp4_encode_scale",
    "pack_closed_form_128",
    "pack_dense_128",
    "pack_scale_major",
    "pack_swizzled_weights",
    "pack_ue8m0_rows",
    "pack_ue8m0_weights",
    "prepack_mxfp8",
    "prepack_nvfp4",
    "quantize_bf16",
    "quantize_fp8",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "quantize_rows",
    "swizzle_scales",
    "unpack_closed_form_128",
    "unpack_dense_128",
    "unpack_scale_major",
    "unpack_swizzled_weights",
    "unpack_ue8m0_rows",
    "unpack_ue8m0_weights",
    "unswizzle_scales",
]

_RENAMED = {
    "PreparedWeights": "PrepackedWeights",
    "prepare_mxfp8": "prepack_mxfp8",
    "prepare_nvfp4": "prepack_nvfp4",
}


def __getattr__(name: str) -> object:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", _RENAMED[name])
    return getattr(operations, _RENAMED[name])
