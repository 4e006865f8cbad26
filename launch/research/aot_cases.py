"""What `aot.py` compiles: a Triton kernel or one in CUDA C++, with its types, constants and macros."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.runtime import SM_SHARED_BYTES

ALL_ARCHS = (90, 100, 120)
SM_SHARED_BYTES_OF = {90: SM_SHARED_BYTES, 100: SM_SHARED_BYTES, 120: 100 * 1024}
"""Shared memory of an SM, by compute capability times ten (CUDA C++ Programming Guide, technical specifications)."""


@dataclass(frozen=True)
class AotCase:
    """One way to compile a Triton kernel ahead of time; `aot.py` lists the modules that have cases in `AOT_CASES`.

    Attributes:
        operation, format: row of the printed table, e.g. `("quantize", "nvfp4")`.
        kernel: the `triton.jit` function.
        signature: argument name -> Triton type such as `*bf16`, `*i64`, `i32`, or `constexpr`.
        constexprs: values of the arguments typed `constexpr`.
        options: compile options, e.g. `{"num_warps": 8, "enable_fp_fusion": False}`.
        archs: compute capabilities it is for, times ten.
        instruction: by arch, a regular expression that the PTX must contain; none is required of other archs.
    """

    operation: str
    format: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    archs: tuple[int, ...] = ALL_ARCHS
    instruction: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CudaCase:
    """One way to compile a CUDA C++ kernel ahead of time, also listed in `AOT_CASES`.

    Attributes:
        operation, format: as in `AotCase`.
        file: name of the source, in the folder `kernels` or below it.
        kernel: name of the kernel in the source.
        defines: macros.
        archs: compute capabilities it is for, times ten.
        instruction: as in `AotCase`.
        shared_bytes: dynamic shared memory of a block, which must fit with the kernel's own; None is not checked.
    """

    operation: str
    format: str
    file: str
    kernel: str
    defines: Mapping[str, int | str]
    archs: tuple[int, ...] = (90,)
    instruction: dict[int, str] = field(default_factory=dict)
    shared_bytes: int | None = None


_ROW_TYPES = {"rows_ptr": "*u8", "scales_ptr": "*u8"}


def row_case(
    operation: str, fmt: str, kernel: Any, constexprs: dict[str, Any], types: dict[str, str] | None = None
) -> AotCase:
    """Of a kernel that copies rows: argument types follow from names, `types` overrides them."""
    signature = {}
    for name in kernel.arg_names:
        fallback = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constexprs else (types or {}).get(name, _ROW_TYPES.get(name, fallback))
    return AotCase(operation, fmt, kernel, signature, constexprs, {"num_warps": 8, "enable_fp_fusion": False})


def compile_with_log(file: str, defines: Mapping[str, int | str], arch: str = "sm_90a") -> nvrtc.Compiled:
    """Compile as `nvrtc.compile_source` does; return the cubin with its PTX and the assembler's log.

    Raises `NvrtcError` as `compile_source` does.
    """
    return _compiled_with_log(file, nvrtc.Defines(defines), arch)


@cache
def _compiled_with_log(file: str, defines: nvrtc.Defines, arch: str) -> nvrtc.Compiled:
    cubin_name = nvrtc._file_name(file, defines, arch)
    names = cubin_name, nvrtc._file_name(file, defines, arch.replace("sm_", "compute_")), f"{cubin_name}.log"
    cubin, ptx, log = (nvrtc._kept(name) for name in names)
    if cubin is not None and ptx is not None and log is not None:
        return nvrtc.Compiled(cubin, ptx.decode(), log.decode())
    found = nvrtc._compile(file, defines, arch)
    for name, content in zip(names, (found.cubin, found.ptx.encode(), found.log.encode()), strict=True):
        nvrtc._keep(name, content)
    return found
