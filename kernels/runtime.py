"""What differs between a compiled kernel and an interpreted one, in one place.

Under `TRITON_INTERPRET=1` (set before this module is imported) kernels run on CPU tensors; `INTERPRET` is then True
and is passed to kernels that need it as a `tl.constexpr`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_LOG = logging.getLogger(__name__)

INTERPRET: bool = bool(triton.knobs.runtime.interpret)

if INTERPRET:

    def clock_ns() -> int:
        """Nanoseconds of a clock that only grows; gives way to other processes, for it is called in spin loops."""
        os.sched_yield()
        return time.monotonic_ns()

    @triton.jit
    def store_release(ptr, value):
        """Store an int32 word that the host, or a peer, must not see before what was stored until now."""
        tl.atomic_xchg(ptr, value, sem="release", scope="sys")

else:

    @triton.jit
    def clock_ns():
        """Nanoseconds of the GPU's global timer."""
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)

    @triton.jit
    def store_release(ptr, value):
        """Store an int32 word that the host, or a peer, must not see before what was stored until now.

        A store and not an exchange: few machines have atomic operations of a GPU on host memory, and memory checkers
        report them. Every thread of the program stores the same word.
        """
        tl.inline_asm_elementwise(
            "st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [ptr.to(tl.int64), value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def resolve_engine(engine: str, device: torch.device) -> str:
    """`"triton"` or `"torch"` for tensors on `device`.

    `"auto"` is Triton on GPUs, besides what `runs_cuda` allows, and the torch twins on CPUs. `"triton"` on a CPU needs
    the interpreter.
    Raises `ValueError` for anything else.
    """
    if engine not in ("auto", "triton", "torch"):
        raise ValueError(f"engine: expected auto, triton or torch, got {engine!r}")
    if engine == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if engine == "triton" and device.type != "cuda" and not INTERPRET:
        raise ValueError("engine: triton on CPU tensors needs TRITON_INTERPRET=1 set before moe_runtime is imported")
    return engine


@cache
def has_nvrtc() -> bool:
    """Whether kernels in CUDA C++ can be compiled: `cuda-bindings` (extra `gpu`) finds the NVRTC library."""
    try:
        from cuda.bindings import nvrtc

        return int(nvrtc.nvrtcVersion()[0]) == 0
    except (ImportError, OSError, RuntimeError):
        return False


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device, named with its number, is a GPU of compute capability 9.0: those that the CUDA kernels are for.

    Asked in every step, and asking CUDA takes microseconds.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def runs_cuda(engine: str, device: torch.device) -> bool:
    """Whether kernels in CUDA C++ may be taken: engine "auto", a Hopper GPU, `has_nvrtc`, and no interpreter."""
    resolve_engine(engine, device)
    return engine == "auto" and not INTERPRET and _compiles_for(device)


@cache
def _compiles_for(device: torch.device) -> bool:
    """Whether kernels in CUDA C++ can be had for `device`; of a Hopper GPU that lacks only NVRTC it tells, once."""
    if not is_hopper(device):
        return False
    if not has_nvrtc():
        _LOG.warning(
            "%s: cuda-bindings finds no NVRTC, so slower Triton kernels are taken instead of Hopper's own; install the "
            "extra gpu",
            device,
        )
        return False
    return True


ALL_ARCHS = (90, 100, 120)


@dataclass(frozen=True)
class AotCase:
    """One way to compile a kernel ahead of time; a kernel module lists its own in `AOT_CASES`.

    Attributes:
        operation, format: what the table of kernels calls it, e.g. `("quantize", "nvfp4")`.
        kernel: the `triton.jit` function.
        signature: argument name -> Triton type such as `*bf16`, `*i64`, `i32`, or `constexpr`.
        constexprs: values of the arguments typed `constexpr`.
        options: compile options, e.g. `{"num_warps": 8, "enable_fp_fusion": False}`.
        archs: compute capabilities it is for, times ten.
        instruction: regular expression that the PTX must contain, per arch; missing means nothing is asked.
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
    """One way to compile a kernel in CUDA C++ ahead of time, for Hopper; listed in `AOT_CASES` too.

    Attributes:
        operation, format: as in `AotCase`.
        file: the source, beside this module.
        kernel: its name there.
        defines: macros.
        archs: compute capabilities it is for, times ten.
        instruction: as in `AotCase`.
    """

    operation: str
    format: str
    file: str
    kernel: str
    defines: Mapping[str, int | str]
    archs: tuple[int, ...] = (90,)
    instruction: dict[int, str] = field(default_factory=dict)
