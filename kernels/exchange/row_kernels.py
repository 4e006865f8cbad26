"""What the Triton kernels that copy rows before and after an exchange have in common."""

from __future__ import annotations

from typing import Any

import triton

from moe_runtime.kernels.runtime import AotCase

_TYPES = {"rows_ptr": "*u8", "scales_ptr": "*u8"}


def padded(n: int) -> int:
    """Power of two, at least 2, that holds `n` lanes."""
    return max(2, triton.next_power_of_2(n))


def row_aot_case(
    operation: str, fmt: str, kernel: Any, constexprs: dict[str, Any], types: dict[str, str] | None = None
) -> AotCase:
    """The `AotCase` of such a kernel: argument types follow from names, `types` overrides them."""
    signature = {}
    for name in kernel.arg_names:
        fallback = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constexprs else (types or {}).get(name, _TYPES.get(name, fallback))
    return AotCase(operation, fmt, kernel, signature, constexprs, {"num_warps": 8, "enable_fp_fusion": False})
