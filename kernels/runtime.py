"""Engines, and the differences between compiled and interpreted kernels.

Under `TRITON_INTERPRET=1` (set before this module is imported) kernels run on CPU tensors. `INTERPRET` is then True;
kernels that need it get it as a `tl.constexpr`.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import torch
import triton

from moe_runtime.support.arguments import check_choice

_LOG = logging.getLogger(__name__)

INTERPRET: bool = bool(triton.knobs.runtime.interpret)

Engine = Literal["cuda", "triton", "torch"]
"""`cuda`: an operation's CUDA C++ kernel, or Triton's if it has none. `triton`: Triton only. `torch`: references.

The exchange has no Triton kernels; `kernels.exchange.plan.exchange_engine` says what it runs on."""

ENGINES = ("auto", "cuda", "triton", "torch")


def resolve_engine(engine: str, device: torch.device) -> Engine:
    """The engine that runs operations on `device`; a resolved engine is returned unchanged.

    `"auto"` is `"cuda"` on a Hopper GPU with NVRTC, `"triton"` on other GPUs and on GPUs under the interpreter, and
    `"torch"` on CPUs. It warns once if a Hopper GPU lacks only NVRTC.

    Raises `ValueError` for an unknown engine, for `"cuda"` where its kernels cannot run, and for `"triton"` on a CPU
    without the interpreter.
    """
    if type(engine) is not str:  # Else it can be looked up, and is refused there.
        check_choice("engine", engine, ENGINES)
    return _resolved(engine, device)


@cache
def _resolved(engine: str, device: torch.device) -> Engine:
    """Cached, because every operation asks, and asking CUDA takes microseconds."""
    check_choice("engine", engine, ENGINES)
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
        _LOG.warning("%s: %s; slower Triton kernels run instead of Hopper's CUDA C++ kernels", device, missing)
    return "triton"


NO_NVRTC = "cuda-bindings finds no NVRTC, install the extra gpu"


def missing_for_cuda(device: torch.device) -> str | None:
    """Why CUDA C++ kernels cannot run on `device`; None if they can."""
    if not is_hopper(device):
        return "the CUDA C++ kernels are for Hopper GPUs"
    if INTERPRET:
        return "TRITON_INTERPRET is set"
    return None if has_nvrtc() else NO_NVRTC


@cache
def has_nvrtc() -> bool:
    """Whether CUDA C++ kernels can be compiled: `cuda-bindings` (extra `gpu`) finds the NVRTC library."""
    try:
        from cuda.bindings import nvrtc

        return int(nvrtc.nvrtcVersion()[0]) == 0
    except (ImportError, OSError, RuntimeError):
        return False


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU whose `device` has an index; None for other devices. Cached."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def is_hopper(device: torch.device) -> bool:
    """Whether `device` has compute capability 9.0, for which the CUDA C++ kernels are written."""
    return capability(device) == (9, 0)


SM_SHARED_BYTES, BLOCK_RESERVED_BYTES = 228 * 1024, 1024
"""Shared memory of an SM of Hopper, and what the driver takes of it for each block."""
MAX_SHARED_BYTES = SM_SHARED_BYTES - BLOCK_RESERVED_BYTES
"""Most shared memory of a block there."""
