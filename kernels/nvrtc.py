"""CUDA C++ kernels: compiled by NVRTC for one architecture, cached on disk, launched through the driver.

Sources are the `.cu` files beside this one. They include the `.cuh` files there and nothing else, so that no CUDA
toolkit is needed, and take their sizes as macros. Compiling needs no GPU, only the NVRTC library (`cuda-bindings` and
`nvidia-cuda-nvrtc`, which CUDA builds of torch bring along). Each has a Triton sibling for other architectures and for
CPUs; where there is no GPU, tests run the text of the sources itself, emulated (`tests/emulator`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
CACHE_VARIABLE = "MOE_RUNTIME_CACHE_DIR"

Defines = tuple[tuple[str, int | str], ...]
Argument = torch.Tensor | int | None | ctypes._SimpleCData


EVERY_PROGRAM: dict[str, int | str] = {}
"""Macros of all programs that are launched from now on, as `launch.sanitize` wants one."""

int64 = ctypes.c_int64
"""Marks an argument of 64 bits."""


class NvrtcError(RuntimeError):
    """A source that does not compile, with the compiler's log, or a call that the driver refuses."""


def cache_dir() -> Path:
    """Where compiled kernels are kept: `$MOE_RUNTIME_CACHE_DIR`, else `~/.cache/moe_runtime`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "moe_runtime")


def compile_source(file: str, defines: Mapping[str, int | str], arch: str = "sm_90a") -> bytes:
    """Compile `file` with macros `defines`.

    Args:
        file: name of a source beside this module.
        defines: macros; their values are written as they print.
        arch: `sm_90a` gives a cubin, `compute_90a` its PTX.

    Raises `NvrtcError` with the compiler's log for a source that does not compile.
    """
    return _compiled(file, tuple(sorted(defines.items())), arch)


def _headers() -> dict[bytes, bytes]:
    """What a source may include, by name."""
    return {path.name.encode(): path.read_bytes() for path in sorted(FOLDER.glob("*.cuh"))}


def create_program(file: str) -> Any:
    """What `nvrtcCreateProgram` answers for a source beside this module and the headers there."""
    from cuda.bindings import nvrtc

    headers = _headers()
    source = (FOLDER / file).read_bytes()
    return nvrtc.nvrtcCreateProgram(source, file.encode(), len(headers), list(headers.values()), list(headers))


def compile_with_ptx(file: str, defines: Mapping[str, int | str], arch: str = "sm_90a") -> tuple[bytes, bytes]:
    """A cubin and its PTX, as `compile_source` gives each, in one run of the compiler."""
    macros = tuple(sorted(defines.items()))
    names = _file_name(file, macros, arch), _file_name(file, macros, arch.replace("sm_", "compute_"))
    cubin, ptx = (_kept(name) for name in names)
    if cubin is None or ptx is None:
        cubin, ptx = _compile(file, macros, arch)
        for name, binary in zip(names, (cubin, ptx), strict=True):
            _keep(name, binary)
    return cubin, ptx


def _options(defines: Defines, arch: str) -> list[str]:
    return [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines)]


def _file_name(file: str, defines: Defines, arch: str) -> str:
    """Of what is kept: another one for whatever changes the code."""
    from cuda.bindings import nvrtc

    source, version = (FOLDER / file).read_bytes(), _checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((source, _headers(), _options(defines, arch), version)).encode()).hexdigest()[:32]
    return f"{Path(file).stem}-{key}.{'ptx' if arch.startswith('compute') else 'cubin'}"


@cache
def _compiled(file: str, defines: Defines, arch: str) -> bytes:
    name = _file_name(file, defines, arch)
    kept = _kept(name)
    if kept is not None:
        return kept
    cubin, ptx = _compile(file, defines, arch)
    binary = ptx if arch.startswith("compute") else cubin
    _keep(name, binary)
    return binary


def _compile(file: str, defines: Defines, arch: str) -> tuple[bytes, bytes]:
    """A cubin, empty for an `arch` that has none, and PTX."""
    from cuda.bindings import nvrtc

    options = _options(defines, arch)
    program = _checked(create_program(file))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise NvrtcError(f"{file} {dict(defines)} for {arch}: {status.name}\n{log.decode(errors='replace')}")
        cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        ptx = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
        _checked(nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, ptx


def _kept(name: str) -> bytes | None:
    """A file of the cache; a cache that cannot be is no error."""
    try:
        return (cache_dir() / name).read_bytes()
    except (OSError, RuntimeError):
        return None


def _keep(name: str, binary: bytes) -> None:
    """Write a file of the cache so that other processes see all of it or none; a cache that cannot be is no error."""
    try:
        path = cache_dir() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_bytes(binary)
            os.replace(written, path)
    except (OSError, RuntimeError):
        return


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise NvrtcError(f"{type(status).__name__}.{status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


@cache
def _loaded(file: str, name: str, defines: Defines, device: int, shared_bytes: int) -> Any:
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    binary = _compiled(file, defines, f"sm_{major}{minor}a")
    module = _checked(driver.cuModuleLoadData(binary))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    if shared_bytes > 0:
        # More than 48 KiB have to be asked for, those that the kernel declares among them.
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return function


def launch(
    file: str,
    name: str,
    defines: Mapping[str, int | str],
    *,
    grid: tuple[int, int, int],
    block: int,
    arguments: Sequence[Argument | Any],
    device: torch.device,
    shared_bytes: int = 0,
    early: bool = False,
) -> None:
    """Launch an `extern "C"` kernel on the current stream of `device`; compiled and loaded at the first call.

    Args:
        file, name, defines: source, kernel and macros.
        grid, block: blocks, and threads of one.
        arguments: tensors and None become pointers, ints `int`; other types as ctypes objects, and descriptors of the
            driver (`CUtensorMap`), which are passed by value.
        device: a CUDA device.
        shared_bytes: dynamic shared memory of a block.
        early: may start when every block of the kernel before has called `griddepcontrol.launch_dependents`; it calls
            `griddepcontrol.wait` before it reads what that kernel writes.

    Raises `NvrtcError` where the source does not compile or the driver refuses the launch.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        index = torch.cuda.current_device()
        function = _loaded(file, name, tuple(sorted((EVERY_PROGRAM | dict(defines)).items())), index, shared_bytes)
        values = [_value(argument) for argument in arguments]
        addresses = [v.getPtr() if hasattr(v, "getPtr") else ctypes.addressof(v) for v in values]
        pointers = (ctypes.c_void_p * len(values))(*addresses)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


@cache
def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def most_sms(device: torch.device, limit: int | None = None) -> int:
    """How many SMs a kernel may take: those of `device`, `limit` at most."""
    return _sms(device) if limit is None else min(_sms(device), limit)


def _value(argument: Argument | Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    return argument
