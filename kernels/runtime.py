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
from typing import Any, Literal

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


Engine = Literal["cuda", "triton", "torch"]
"""What runs an operation: CUDA C++ kernels where it has them, else Triton's; Triton alone; the torch references."""

ENGINES = ("auto", "cuda", "triton", "torch")


def resolve_engine(engine: str, device: torch.device) -> Engine:
    """The engine that runs operations on `device`; a resolved one is returned as it is.

    `"auto"` is `"cuda"` on a Hopper GPU with NVRTC, `"triton"` on other GPUs and under the interpreter there, and
    `"torch"` on CPUs. Of a Hopper GPU that lacks only NVRTC it warns, once.

    Raises `ValueError` for an unknown engine, for `"cuda"` where its kernels cannot run, and for `"triton"` on a CPU
    without the interpreter.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: expected auto, cuda, triton or torch, got {engine!r}")
    return _resolved(engine, device)


@cache
def _resolved(engine: str, device: torch.device) -> Engine:
    """Every call of an operation asks, and asking CUDA takes microseconds."""
    if engine == "torch":
        return "torch"
    if engine == "triton":
        if device.type != "cuda" and not INTERPRET:
            raise ValueError(
                "engine: triton on CPU tensors needs TRITON_INTERPRET=1 set before moe_runtime is imported"
            )
        return "triton"
    missing = missing_for_cuda(device)
    if engine == "cuda" and missing is not None:
        others = "auto, triton or torch" if device.type == "cuda" else "auto or torch"
        raise ValueError(f"engine: expected {others} on {device}, where cuda cannot run ({missing}), got 'cuda'")
    if missing is None:
        return "cuda"
    if device.type != "cuda":
        return "torch"
    if missing == NO_NVRTC:
        _LOG.warning("%s: %s; slower Triton kernels are taken instead of Hopper's own", device, missing)
    return "triton"


NO_NVRTC = "cuda-bindings finds no NVRTC, install the extra gpu"


def missing_for_cuda(device: torch.device) -> str | None:
    """Why kernels in CUDA C++ cannot run on `device`; None where they can."""
    if not is_hopper(device):
        return "the CUDA C++ kernels are for Hopper GPUs"
    if INTERPRET:
        return "TRITON_INTERPRET is set"
    return None if has_nvrtc() else NO_NVRTC


@cache
def has_nvrtc() -> bool:
    """Whether kernels in CUDA C++ can be compiled: `cuda-bindings` (extra `gpu`) finds the NVRTC library."""
    try:
        from cuda.bindings import nvrtc

        return int(nvrtc.nvrtcVersion()[0]) == 0
    except (ImportError, OSError, RuntimeError):
        return False


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU named with its number; None for other devices. CUDA is asked once."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def is_hopper(device: torch.device) -> bool:
    """Whether `device` has compute capability 9.0, which the CUDA C++ kernels are for."""
    return capability(device) == (9, 0)


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
        file: the source, in the folder of this module.
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
