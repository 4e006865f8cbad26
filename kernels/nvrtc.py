"""CUDA C++ kernels: compiled by NVRTC for one architecture, cached on disk, loaded through the driver.

Sources are the `.cu` files in this folder and below it, named without their folder. They include only the `.cuh` files
there, so no CUDA toolkit is needed. Macros set their sizes. Compiling needs no GPU, only the NVRTC library
(`cuda-bindings` and `nvidia-cuda-nvrtc`, which come with CUDA builds of torch). `bound_kernel.py` launches what is
loaded. Kernels of the exchange are for Hopper and Blackwell, those of GEMMs for Hopper, and other architectures run a
Triton kernel instead. Without a GPU, tests run the sources in an emulator (`tests/emulator`).
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_runtime.kernels import kernel_cache

FOLDER = Path(__file__).parent
_INCLUDE = re.compile(rb'^\s*#\s*include\s+"(.*)"', re.MULTILINE)
CACHE_VARIABLE = "MOE_RUNTIME_CACHE_DIR"

EVERY_PROGRAM: dict[str, int | str] = {}
"""Extra macros of every program that is loaded later; `research.sanitize` sets EACH_LANE_ARRIVES."""


class Defines(Mapping[str, int | str]):
    """Immutable macros of a program, sorted by name. They are hashed once, not in each launch.

    >>> Defines({"WORLD": 8, "K": 2})
    Defines({'K': 2, 'WORLD': 8})
    """

    def __init__(self, values: Mapping[str, int | str]) -> None:
        self._values = dict(sorted(values.items()))
        self._hash = hash(tuple(self._values.items()))

    def __getitem__(self, name: str) -> int | str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Defines({self._values})"


@dataclass(frozen=True)
class Compiled:
    """Result of one run of the compiler.

    Attributes:
        cubin: the binary; empty for `compute_*` architectures.
        ptx: the PTX of the binary.
        log: the assembler's report on each kernel, with registers, shared and local memory.
    """

    cubin: bytes
    ptx: str
    log: str


class NvrtcError(RuntimeError):
    """A source does not compile (with the compiler's log), or the driver refuses a call."""


def cache_dir() -> Path:
    """Folder of compiled kernels: `$MOE_RUNTIME_CACHE_DIR`, else `~/.cache/moe_runtime`.

    It is used only if nobody but this user and root can write it (`moe_runtime.kernels.kernel_cache`).
    """
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "moe_runtime")


def compile_source(file: str, defines: Mapping[str, int | str], arch: str = "sm_90a") -> bytes:
    """Compile `file` with macros `defines`.

    Args:
        file: name of a source in the folder of this module or below it.
        defines: macros; values are written as `str` prints them.
        arch: `sm_90a` gives a cubin, `compute_90a` its PTX.

    Raises `NvrtcError` with the compiler's log for a source that does not compile.
    """
    return _compiled(file, Defines(defines), arch)


def source_path(name: str) -> Path:
    """The file `name` (`*.cu` or `*.cuh`) in `FOLDER` or below it; an absolute path is returned unchanged."""
    if os.path.isabs(name):
        return Path(name)
    (path,) = FOLDER.rglob(name)
    return path


def _headers(source: bytes) -> dict[bytes, bytes]:
    """Contents of the headers that `source` includes, and that those include, by name."""
    paths, found, texts = {path.name.encode(): path for path in FOLDER.rglob("*.cuh")}, dict[bytes, bytes](), [source]
    while texts:
        for name in _INCLUDE.findall(texts.pop()):
            if name in paths and name not in found:
                found[name] = paths[name].read_bytes()
                texts.append(found[name])
    return dict(sorted(found.items()))


def _options(defines: Defines, arch: str) -> list[str]:
    return [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]


def _file_name(file: str, defines: Defines, arch: str) -> str:
    """Name of the cache file. It depends on everything that changes the code."""
    from cuda.bindings import nvrtc

    source, version = source_path(file).read_bytes(), _checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((source, _headers(source), _options(defines, arch), version)).encode()).hexdigest()[:32]
    return f"{Path(file).stem}-{key}.{'ptx' if arch.startswith('compute') else 'cubin'}"


@cache
def _compiled(file: str, defines: Defines, arch: str) -> bytes:
    name = _file_name(file, defines, arch)
    kept = _kept(name)
    if kept is not None:
        return kept
    found = _compile(file, defines, arch)
    binary = found.ptx.encode() if arch.startswith("compute") else found.cubin
    _keep(name, binary)
    return binary


def _compile(file: str, defines: Defines, arch: str) -> Compiled:
    from cuda.bindings import nvrtc

    # For the log; in the cubin it changes only the note of the compiler options.
    options = [*_options(defines, arch), "--ptxas-options=-v"]
    source = source_path(file).read_bytes()
    headers = _headers(source)
    program = _checked(
        nvrtc.nvrtcCreateProgram(source, file.encode(), len(headers), list(headers.values()), list(headers))
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise NvrtcError(f"{file} {dict(defines)} for {arch}: {status.name}\n{log}")
        cubin = _output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        ptx = _output(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, ptx, log)


def _output(program: Any, size_of: Callable[[Any], Any], read: Callable[[Any, bytearray], Any]) -> bytes:
    """The output of a program that `read` writes, `size_of` bytes."""
    # Not into a `bytes` object: Python shares those of length 1, the size of an empty log.
    output = bytearray(_checked(size_of(program)))
    _checked(read(program, output))
    return bytes(output)


def _kept(name: str) -> bytes | None:
    """A file of the cache, or None. An unusable cache is no error."""
    try:
        return kernel_cache.read(cache_dir(), name)
    except RuntimeError:  # no home folder, or links in a circle
        return None


def _keep(name: str, binary: bytes) -> None:
    """Write a file of the cache. An unusable cache is no error."""
    try:
        kernel_cache.write(cache_dir(), name, binary)
    except RuntimeError:
        return


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise NvrtcError(f"{type(status).__name__}.{status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.has_context = False


_THREAD = _Thread()


def _ensure_context(device: int) -> None:
    """Make the context of `device`, the current device, current for the driver in a thread that has no context.

    The first call of CUDA's runtime does that, but `torch.cuda.device(0)` makes no call if device 0 is already current
    (https://github.com/pytorch/pytorch/issues/195256).
    """
    if _THREAD.has_context:
        return
    from cuda.bindings import driver

    if not int(_checked(driver.cuCtxGetCurrent())):
        # The primary context, as in CUDA's runtime; it is kept until the process ends.
        context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))
        _checked(driver.cuCtxSetCurrent(context))
    _THREAD.has_context = True


@cache
def _loaded(file: str, name: str, defines: Defines, device: int, shared_bytes: int, all_shared: bool = False) -> Any:
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    binary = _compiled(file, Defines({**EVERY_PROGRAM, **defines}), f"sm_{major}{minor}a")
    module = _checked(driver.cuModuleLoadData(binary))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    if shared_bytes > 0:
        # More than 48 KiB, static shared memory included, must be requested.
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    if all_shared:
        share = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _checked(driver.cuFuncSetAttribute(function, share, 100))
    return function


@cache
def _early() -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


@cache
def most_sms(device: torch.device) -> int:
    """The SMs of `device`."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
