"""Writes a safetensors file tensor by tensor, or item by item, so that only one of them need be in memory.

The file has a temporary name until it is complete. Under its final name it is always complete.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from moe_runtime.checkpoints.files import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PARTIAL = ".partial"
"""End of the name of an unfinished file."""


class TensorWriter:
    """A context manager that writes `path`. Tensors come in any order, whole or by items of the first dimension.

    Args:
        path: the final name. The file appears there when the block ends without an error and with every tensor.
        shapes: `(dtype, shape)` of each tensor by name, dtypes as safetensors names them.
        metadata: strings for the header.

    Raises:
        ValueError: a tensor that `shapes` does not have, or twice, or of another dtype or shape; a missing tensor at
            the end; names the tensor.
        OSError: a file that cannot be written; names it.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self.path = path
        self._shapes = dict(shapes)
        self._left = {name: _num_items(shape) for name, (_, shape) in shapes.items()}
        self._came: set[tuple[str, int]] = set()
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        ends = [0]
        for name, (dtype, shape) in shapes.items():
            ends.append(ends[-1] + math.prod(shape) * DTYPES[dtype].itemsize)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
        text = json.dumps(header, separators=(",", ":")).encode()
        # The data begins at a multiple of 8, as in files of the library.
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._begins = {name: len(self._header) + begin for name, begin in zip(shapes, ends, strict=False)}

    def __enter__(self) -> TensorWriter:
        self._partial = self.path.with_name(self.path.name + PARTIAL)
        # A new file: a process that still has the old unfinished one open must not write into this one.
        self._partial.unlink(missing_ok=True)
        self._file: BinaryIO = self._partial.open("xb")
        return self

    def write(self, name: str, tensor: torch.Tensor, item: int | None = None) -> None:
        """Write a tensor, on any device, or only that `item` of its first dimension."""
        dtype, shape = self._shapes.get(name, ("", ()))
        left = self._left.get(name, 0)
        if item is None:
            fits = 0 < left == _num_items(shape)
        else:
            fits = left > 0 and item in range(*shape[:1] or (0,)) and (name, item) not in self._came
        if not fits:
            what = f"tensor {name}" if item is None else f"item {item} of tensor {name}"
            raise ValueError(f"{self.path}: {what} is not expected, or came before")
        shape = shape if item is None else shape[1:]
        found = DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)
        if found != (dtype, shape):
            raise ValueError(
                f"{self.path}: tensor {name}: expected {dtype} {list(shape)}, got {found[0]} {list(found[1])}"
            )
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        with _naming(self.path):
            self._file.seek(self._begins[name] + (item or 0) * len(data))
            self._file.write(data)
        self._left[name] -= left if item is None else 1
        if item is not None:
            self._came.add((name, item))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        missing = next((name for name, left in self._left.items() if left), None)
        try:
            if kind is not None:
                return
            if missing is not None:
                raise ValueError(f"{self.path}: tensor {missing} was not written")
            with _naming(self.path):
                self._file.seek(0)
                self._file.write(self._header)
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
            os.replace(self._partial, self.path)
        finally:
            # After a failure, flushing the buffer may fail again.
            with suppress(OSError):
                self._file.close()
            self._partial.unlink(missing_ok=True)


def _num_items(shape: tuple[int, ...]) -> int:
    """The items of the first dimension; 1 for scalars and empty tensors, which have to be written too."""
    return max(1, shape[0]) if shape else 1


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file atomically, also in case of a power loss."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with _naming(path), partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put `path` into an `OSError` raised inside, since an open file's error has no name."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, as the files written here already are."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
