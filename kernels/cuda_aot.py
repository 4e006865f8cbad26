"""Ahead-of-time cases of Hopper's kernels in CUDA C++: each format in both regimes, plain and gated.

The tests of each kernel compile more of their variants and look at registers and shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_runtime.formats import BF16, FORMATS, FP8_BLOCK, MXFP8, NVFP4, TokenFormat
from moe_runtime.kernels import decode_tokens, decoded_gemm, tma_gemm
from moe_runtime.kernels.decoded_layout import unit_columns
from moe_runtime.kernels.runtime import CudaCase
from moe_runtime.weights import SILU

HIDDEN, GROUPS = 7168, 32
PLAIN, GATED = "grouped_gemm", "grouped_gemm_swiglu"
BF16_WGMMA = {90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"}
FP8_WGMMA = {90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3"}


def _decoded(fmt: TokenFormat) -> Iterator[CudaCase]:
    for shape in (decoded_gemm.DECODE, decoded_gemm.MIDDLE, decoded_gemm.PREFILL):
        ways = [(PLAIN, False, False), (GATED, False, False), (GATED, True, False)]
        if shape is decoded_gemm.PREFILL:
            ways += [(PLAIN, False, True), (GATED, True, True)]
        for operation, decoded, counted in ways:
            gated = operation == GATED
            defines, _ = decoded_gemm.macros(
                fmt,
                fmt,
                shape,
                unit_columns(HIDDEN),
                fmt if gated else None,
                torch.bfloat16,
                SILU if gated else None,
                out_decoded=decoded,
                keep_tokens=decoded_gemm.keeps_tokens(GROUPS, HIDDEN, fmt, shape),
                counted=counted,
            )
            yield CudaCase(operation, fmt.name, "decoded_gemm.cu", "decoded_gemm", defines, instruction=BF16_WGMMA)


def _tma(fmt: TokenFormat) -> Iterator[CudaCase]:
    wgmma = FP8_WGMMA if fmt is FP8_BLOCK else BF16_WGMMA
    for regime in (tma_gemm.DECODE, tma_gemm.PREFILL):
        for operation, order in ((PLAIN, None), (GATED, SILU.order)):
            gated = order is not None
            code = 3 if gated and fmt is FP8_BLOCK else 0
            ways: list[dict[str, bool]] = [{"gather": gated}]
            if fmt is FP8_BLOCK and regime is tma_gemm.PREFILL:
                ways.append({"gather": False, "copied_scales": True})
            for way in ways:
                defines = tma_gemm.macros(
                    fmt, regime, GROUPS, gated=gated, order=order, out_code=code, extras=False, **way
                )
                yield CudaCase(operation, fmt.name, tma_gemm.SOURCE, "tma_gemm", defines, instruction=wgmma)


def _operations() -> Iterator[CudaCase]:
    """What the operations of `moe_runtime.ops` run on Hopper, by their names."""
    for operation, fmt in (
        ("grouped_matmul_dynamic_scaled_nvfp4", NVFP4),
        ("group_gemm_nvfp4_nt_groupwise", NVFP4),
        ("moe_gemm_mxfp8_nt_groupwise", MXFP8),
    ):
        for out_dtype in (torch.bfloat16, torch.float16):
            defines, _ = decoded_gemm.macros(fmt, fmt, decoded_gemm.DECODE, unit_columns(HIDDEN), None, out_dtype, None)
            yield CudaCase(operation, fmt.name, "decoded_gemm.cu", "decoded_gemm", defines, instruction=BF16_WGMMA)
    for out_code in (0, 1):
        defines = tma_gemm.macros(
            FP8_BLOCK, tma_gemm.PREFILL, GROUPS, gather=False, gated=False, order=None, out_code=out_code, extras=False
        )
        name = "group_gemm_fp8_nt_groupwise"
        yield CudaCase(name, FP8_BLOCK.name, tma_gemm.SOURCE, "tma_gemm", defines, instruction=FP8_WGMMA)


AOT_CASES: tuple[CudaCase, ...] = (
    *_operations(),
    *(case for fmt in (NVFP4, MXFP8) for case in _decoded(fmt)),
    *(case for fmt in (FP8_BLOCK, BF16) for case in _tma(fmt)),
    *(
        CudaCase(
            "decode_tokens", fmt.name, "decode_tokens.cu", "decode_tokens", decode_tokens.token_macros(fmt, **layout)
        )
        for fmt in FORMATS.values()
        for layout in (
            {},
            {"packed": True},
            {"shape": decode_tokens.shape_beside(unit_columns(HIDDEN))},
            *(({"by_row": True},) if fmt.swizzled else ()),
        )
        if fmt is not FP8_BLOCK
    ),
)
