"""Launches of CUDA C++ kernels, whose arguments are named as in the kernel's signature.

A `BoundKernel` holds what a launch needs, so that one costs the host little: the function, the grid, and the values of
all arguments in the memory that the driver reads. `launch` is for launches whose arguments all change.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import itemgetter
from typing import Any

import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.nvrtc import Defines
from moe_runtime.kernels.signature import Kind, parameters_of

_C = torch._C  # whose functions take longer to find through torch
_PACKED = {Kind.POINTER: "Q", Kind.INT64: "q", Kind.INT32: "i4x"}
"""How `struct` writes a value of a kind into 8 bytes, little-endian: a narrower one has the first of them."""


class Address(int):
    """Where something lies that the caller keeps: for a pointer into a tensor, which is quicker than a view of it."""


Argument = torch.Tensor | Address | int | float | None | Any
"""By the kernel's signature a tensor, an `Address` or None for a pointer, an int, a float, or a ctypes structure or
descriptor of the driver (`CUtensorMap`) for what is passed by value."""


class BoundKernel:
    """A kernel of one device with a memory of its own for the values of its arguments.

    A value that is bound stays the same in all launches, the others come with each of them. Any thread may launch it.

    Args:
        file, name, defines: source, kernel and macros.
        block: threads of a block.
        device: a CUDA device.
        grid: blocks.
        bound: arguments that are the same in every launch, by name. They are kept as long as this object.
        follows: a kernel that the same thread launches before this one, each time with arguments that are meant for
            both: those that it is given in a launch and this kernel has too come from there.
        shared_bytes: dynamic shared memory of a block.
        early: whether the kernel may start when every block of the previous kernel has called
            `griddepcontrol.launch_dependents`. It must call `griddepcontrol.wait` before it reads the results of that
            kernel.
        all_shared: ask for all shared memory that an SM can have, so that it has room for blocks of the next kernel.

    Raises:
        ValueError: an argument that the kernel does not have, or of another type than its parameter.
        NvrtcError: the source has no such kernel.
    """

    def __init__(
        self,
        file: str,
        name: str,
        defines: Defines,
        *,
        block: int,
        device: torch.device,
        grid: tuple[int, int, int] = (1, 1, 1),
        bound: Mapping[str, Argument] | None = None,
        follows: BoundKernel | None = None,
        shared_bytes: int = 0,
        early: bool = False,
        all_shared: bool = False,
    ) -> None:
        self.file, self.name, self.defines = file, name, defines
        self.block, self.grid, self.device = block, grid, device
        self.shared_bytes, self.early, self.all_shared = shared_bytes, early, all_shared
        self.parameters = parameters_of(file, name, defines)
        self._values = (ctypes.c_int64 * len(self.parameters))()
        self._pointers = (ctypes.c_void_p * len(self.parameters))()
        self._address = ctypes.addressof(self._pointers)
        self._by_value: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._index = _with_index(device).index or 0
        self._config: Any = None
        self._function: Any = None
        self._launch: Any = None
        self._stream: int | None = None
        self._bound = {} if bound is None else dict(bound)
        places = {p.name: (at, p.kind) for at, p in enumerate(self.parameters)}
        for given in self._bound:
            if given not in places:
                raise ValueError(f"{self.name}.{given}: the kernel has no such parameter")
        self._expect({given: places.pop(given) for given in self._bound}, 0)
        self.fill(self._bound)
        self._follows = follows  # whose memory has the values that come from there
        if follows is not None:
            for given, (at, kind) in follows._given.items():
                if kind in _PACKED and given in places and places[given][1] is kind:
                    self._pointers[places.pop(given)[0]] = follows._pointers[at]
        self._expect(places, len(self._bound))

    def _expect(self, given: dict[str, tuple[int, Kind]], first: int) -> None:
        """From now on `fill` takes these arguments, by name: place and kind. The first time checks types to the last.

        Their values follow each other by kind from number `first` on, so that most are written at once.
        """
        self._given, self._checked = given, False
        packed = [(name, kind) for wanted in _PACKED for name, (_, kind) in given.items() if kind is wanted]
        others = [name for name, (_, kind) in given.items() if kind not in _PACKED]
        for number, name in enumerate([*(name for name, _ in packed), *others], first):
            self._pointers[given[name][0]] = ctypes.addressof(self._values) + 8 * number
        self._first = 8 * first
        self._pointers_of = _all_of(name for name, kind in packed if kind is Kind.POINTER)
        self._integers_of = _all_of(name for name, kind in packed if kind is not Kind.POINTER)
        self._pack = struct.Struct("<" + "".join(_PACKED[kind] for _, kind in packed)).pack_into
        self._others_given = [(name, *given[name]) for name in others]

    @property
    def address(self) -> int:
        """Of the pointers to the values, for the driver."""
        return self._address

    def launch(self, arguments: Mapping[str, Argument], grid: tuple[int, int, int] | None = None) -> None:
        """Launch on the current stream of the device; the first launch compiles and loads.

        Args:
            arguments: all that are not bound, by name. They must outlive the call, and what they point to the kernel.
            grid: blocks, in place of those of the launch before.

        Raises `ValueError` as making this does, or for an argument that is missing, and `NvrtcError` where the source
        does not compile or the driver refuses the launch.
        """
        if _C._cuda_getDevice() != self._index:
            # Entering a device takes as long as the launch, even if it is already current.
            with torch.cuda.device(self._index):
                return self.launch(arguments, grid)
        with self._lock:
            self.fill(arguments, grid)
            if self._config is None:
                self._load()
            if not nvrtc._THREAD.has_context:
                nvrtc._ensure_context(self._index)
            if (stream := _C._cuda_getCurrentRawStream(self._index)) != self._stream:
                self._config.hStream = self._stream = stream
            # The driver reads the values in this call.
            (status,) = self._launch(self._config, self._function, self._address, 0)
        if status:
            raise nvrtc.NvrtcError(f"{type(status).__name__}.{status.name}")

    def fill(self, arguments: Mapping[str, Argument], grid: tuple[int, int, int] | None = None) -> None:
        """Write the arguments and the grid of the next launch, as `launch` does."""
        if len(arguments) != len(self._given) or not self._checked:
            self._check(arguments)
        if grid is not None and grid != self.grid:
            self.grid = grid
            if self._config is not None:
                self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = grid
        try:
            self._pack(
                self._values,
                self._first,
                *[
                    0 if pointer is None else pointer if type(pointer) is Address else pointer.data_ptr()
                    for pointer in self._pointers_of(arguments)
                ],
                *self._integers_of(arguments),
            )
            for name, at, kind in self._others_given:
                value: Any = arguments[name]
                if kind is Kind.FLOAT and isinstance(value, float):
                    ctypes.c_float.from_address(self._pointers[at] or 0).value = value
                elif kind is Kind.STRUCT and isinstance(value, ctypes.Structure):
                    self._pointers[at], self._by_value[at] = ctypes.addressof(value), value
                elif kind is Kind.STRUCT and hasattr(value, "getPtr"):
                    self._pointers[at], self._by_value[at] = value.getPtr(), value
                else:
                    raise self._wrong(at, value)
        except (KeyError, AttributeError, TypeError, struct.error):
            self._check(arguments)  # which names what is missing or wrong
            raise

    def _check(self, arguments: Mapping[str, Argument]) -> None:
        """Raise `ValueError` for wrong names, pointers and integers.

        Among them are those that `fill` takes for speed: tensors of another dtype, and what only stands for an int.
        """
        for name, value in arguments.items():
            if name not in self._given:
                why = "it is bound" if name in self._bound else "the kernel has no such parameter"
                if self._follows is not None and name in self._follows._given:
                    why = f"it comes from {self._follows.name}"
                raise ValueError(f"{self.name}.{name}: {why}")
            at, kind = self._given[name]
            if kind is Kind.POINTER:
                dtypes = self.parameters[at].dtypes
                is_tensor = isinstance(value, torch.Tensor) and (dtypes is None or value.dtype in dtypes)
                is_right = is_tensor or value is None or type(value) is Address
            elif kind is Kind.INT32 or kind is Kind.INT64:
                bits = 31 if kind is Kind.INT32 else 63
                is_right = isinstance(value, int) and type(value) is not Address and -(2**bits) <= value < 2**bits
            else:
                continue
            if not is_right:
                raise self._wrong(at, value)
        if missing := [name for name in self._given if name not in arguments]:
            raise ValueError(f"{self.name}.{missing[0]}: expected an argument, got none")
        self._checked = True

    def _load(self) -> None:
        """Make what the driver takes; on the current device."""
        nvrtc._ensure_context(self._index)
        self._function = nvrtc._loaded(
            self.file, self.name, self.defines, self._index, self.shared_bytes, self.all_shared
        )
        config = _driver().CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = self.shared_bytes
        if self.early:
            config.attrs, config.numAttrs = [nvrtc._early()], 1
        self._launch = _driver().cuLaunchKernelEx
        self._config, self._stream = config, None

    def _wrong(self, at: int, value: object) -> ValueError:
        parameter = self.parameters[at]
        found = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
        expected = f"{parameter.kind.value} for {parameter.type}"
        return ValueError(f"{self.name}.{parameter.name}: expected {expected}, got {found}")


def _all_of(names: Iterable[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Gives the values of `names`, in this order."""
    match tuple(names):
        case ():
            return lambda arguments: ()
        case (name,):
            return lambda arguments: (arguments[name],)
        case many:
            return itemgetter(*many)


class SizedKernel:
    """A kernel whose blocks follow from one number, such as the tokens of a step.

    Args:
        kernel: with its arguments.
        blocks: of a launch, by that number; asked once for each.
    """

    def __init__(self, kernel: BoundKernel, blocks: Callable[[int], int]) -> None:
        self.kernel = kernel
        self._grid = cache(lambda size: (blocks(size), 1, 1))

    def launch(self, arguments: Mapping[str, Argument], size: int) -> None:
        """As `BoundKernel.launch`."""
        self.kernel.launch(arguments, self._grid(size))


@cache
def _driver() -> Any:
    """The driver's module, which is not there on a machine without CUDA."""
    from cuda.bindings import driver

    return driver


def _with_index(device: torch.device) -> torch.device:
    """The current device for `cuda` alone."""
    named = device.type != "cuda" or device.index is not None
    return device if named else torch.device("cuda", torch.cuda.current_device())


_KERNELS: dict[tuple[Any, ...], BoundKernel] = {}
"""Of `launch`, by all that its kernels differ in but grid and arguments."""


def launch(
    file: str,
    name: str,
    defines: Defines,
    *,
    grid: tuple[int, int, int],
    block: int,
    arguments: Mapping[str, Argument],
    device: torch.device,
    shared_bytes: int = 0,
    early: bool = False,
    all_shared: bool = False,
) -> None:
    """Launch a kernel on the current stream of `device` as a `BoundKernel` that has nothing bound.

    Args and errors as of `BoundKernel`. Keep the `Defines` of frequent launches: an equal one is compared in each.
    """
    if device.index is None:
        device = _with_index(device)
    key = file, name, defines, block, device, shared_bytes, early, all_shared
    kernel = _KERNELS.get(key)
    if kernel is None:
        kernel = BoundKernel(
            file,
            name,
            defines,
            block=block,
            device=device,
            shared_bytes=shared_bytes,
            early=early,
            all_shared=all_shared,
        )
        _KERNELS[key] = kernel
    kernel.launch(arguments, grid)


class OneLaunch:
    """A `BoundKernel` for a single launch, by a kernel that others launch, too: it is made in less time."""

    def __init__(self, file: str, name: str, defines: Defines, *, bound: Mapping[str, Argument], **how: Any) -> None:
        self._how = {"file": file, "name": name, "defines": defines, **how}
        self._bound = bound

    def launch(self, arguments: Mapping[str, Argument]) -> None:
        """As `BoundKernel.launch`."""
        launch(**self._how, arguments={**self._bound, **arguments})
