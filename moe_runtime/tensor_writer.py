"""Writes a safetensors file tensor by tensor, so that none but the one being written need be in memory.

The file has a name of its own until it is whole; under its final name there is never half of one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from moe_runtime.tensor_files import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PARTIAL = ".partial"
"""What the name of an unfinished file ends with."""


class TensorWriter:
    """A context manager that writes `path`; tensors come in the order of `shapes`, whole.

    Args:
        path: the final name. The file appears there when the block ends without an error and every tensor has come.
        shapes: `(dtype, shape)` of each tensor by name, dtypes in the words of safetensors.
        metadata: strings for the header.

    Raises:
        ValueError: naming the tensor: it is not the next one, or of another dtype or shape; or one is missing at the
            end.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self.path = path
        self._shapes = dict(shapes)
        self._left = list(shapes)[::-1]
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for name, (dtype, shape) in shapes.items():
            begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        # The data begins at a multiple of 8, as the library writes it.
        self._header = text + b" " * (-len(text) % 8)

    def __enter__(self) -> TensorWriter:
        self._partial = self.path.with_name(self.path.name + PARTIAL)
        self._file: BinaryIO = self._partial.open("wb")
        self._file.write(len(self._header).to_bytes(8, "little") + self._header)
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor, on any device."""
        expected = self._left[-1] if self._left else None
        if name != expected:
            raise ValueError(f"{self.path}: expected tensor {expected} next, got {name}")
        dtype, shape = self._shapes[name]
        found = DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)
        if found != (dtype, shape):
            raise ValueError(
                f"{self.path}: tensor {name}: expected {dtype} {list(shape)}, got {found[0]} {list(found[1])}"
            )
        self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._left.pop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None and not self._left:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is not None:
            return
        if self._left:
            raise ValueError(f"{self.path}: tensor {self._left[-1]} was not written")
        os.replace(self._partial, self.path)


def write_whole(path: Path, text: str) -> None:
    """Write a small file that is never there by half."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
