"""`quant_method: fp8` of DeepSeek and transformers, and `mxfp4` of gpt-oss.

The tensors show which linears are left out of `fp8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_runtime.checkpoints.layouts import DEEPSEEK_FP4, FP8_BLOCKS, FP8_TENSOR, GPT_OSS_MXFP4, fp8_grid
from moe_runtime.checkpoints.modelopt_config import stored_by_recipe
from moe_runtime.checkpoints.stored_experts import (
    EXPERT,
    Method,
    Refuse,
    StoredExperts,
    block_sizes,
    expect,
    known_keys,
)

EXPERT_DTYPE = "expert_dtype"
"""Key of DeepSeek-V4, which may stand in `config.json` itself."""
_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn")


def _fp8(at: str, quant_config: Mapping[str, Any], name: str, refuse: Refuse) -> StoredExperts:
    if (scheme := quant_config.get("activation_scheme", "dynamic")) not in ("dynamic", "static"):
        raise ValueError(f"{at}.activation_scheme: expected 'dynamic' or 'static', got {scheme!r}")
    fmt = quant_config.get("fmt") or "e4m3"
    if fmt not in _E4M3:
        expect(f"{at}.fmt", fmt, "e4m3")
    # Scales are stored as what they are, which `ue8m0` says to be powers of two.
    expect(f"{at}.scale_fmt", quant_config.get("scale_fmt"), None, "float", "ue8m0")
    dtype, algorithm = quant_config.get(EXPERT_DTYPE), quant_config.get("moe_quant_algo")
    expect(EXPERT_DTYPE, dtype, None, "fp8", "fp4")
    others = algorithm is not None or quant_config.get("quantized_layers") is not None
    expect(f"{at}.quant_algo", quant_config.get("quant_algo"), None, *(["MIXED_PRECISION"] if others else []))
    for key in ("config_groups", "group_size"):
        if not others:
            expect(f"{at}.{key}", quant_config.get(key), None)
    if EXPERT.search(name) is not None:
        if others:
            # Experts that ModelOpt quantized again, as in NVFP4 of DeepSeek-V4.
            return stored_by_recipe(at, {**quant_config, "quant_algo": "MIXED_PRECISION"}, name, refuse)
        if dtype == "fp4":
            return StoredExperts(DEEPSEEK_FP4, "bf16", EXPERT_DTYPE)
    sizes = quant_config.get("weight_block_size")
    layout = FP8_TENSOR if sizes is None else fp8_grid(FP8_BLOCKS, *block_sizes(f"{at}.weight_block_size", sizes))
    return StoredExperts(layout, layout.format.name, f"{at}.quant_method")


def _mxfp4(at: str, quant_config: Mapping[str, Any], name: str, refuse: Refuse) -> StoredExperts:
    return StoredExperts(GPT_OSS_MXFP4, "bf16", f"{at}.quant_method")


FP8 = Method(
    _fp8,
    known_keys(
        (
            *("activation_scheme", "fmt", "scale_fmt", "weight_block_size", EXPERT_DTYPE, "moe_quant_algo"),
            *("quantized_layers", "quant_algo", "config_groups", "group_size", "exclude_modules", "ignore"),
        ),
        ("modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize", "producer"),
    ),
)
MXFP4 = Method(_mxfp4, known_keys((), ("modules_to_not_convert", "dequantize")))
