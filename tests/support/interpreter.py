"""Triton's interpreter without work that is done and thrown away: more than half of the time of an interpreted test.

What kernels compute stays the same. Left out are: the search of all `triton.language` for names to replace at each call
of a device function, where the kernel's own call has replaced them; the computation of whether integers overflow, which
only a debugging option would look at; a table of types that is made anew for each question; and the shapes of tensors
and of their types, checked and made anew for each, where those of one shape can share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _ReplacedOnce:
    """What stands for `_patch_lang`, which replaces the names that a function sees of `triton.language`."""

    def __init__(self) -> None:
        self._replace = interpreter._patch_lang
        self._seen: dict[FunctionType, frozenset[str]] = {}
        self._done: set[frozenset[str]] = set()

    def __call__(self, function: FunctionType) -> Any:
        if function not in self._seen:
            modules = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
            self._seen[function] = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
        names = self._seen[function]
        if names in self._done:
            return None  # a device function, nobody asks for what to undo
        scope = self._replace(function)
        if not self._done:
            # The kernel's own, undone when its launch ends.
            undo = scope.restore

            def restore() -> None:
                self._done.clear()
                undo()

            scope.restore = restore
        self._done.add(names)
        return scope


class _KnownTypes:
    """What stands for `_get_np_dtype`: the numpy type of a Triton type."""

    def __init__(self) -> None:
        self._find = interpreter._get_np_dtype
        self._known: dict[tl.dtype, np.dtype] = {}

    def __call__(self, dtype: tl.dtype) -> np.dtype:
        scalar = dtype.scalar
        if scalar.is_ptr():
            return self._find(scalar)
        if scalar not in self._known:
            self._known[scalar] = self._find(scalar)
        return self._known[scalar]


PLAIN_TENSOR = tl.tensor.__init__
PLAIN_BLOCK_TYPE = tl.block_type.__init__
PLAIN_BROADCAST = TritonSemantic.broadcast_impl_value


@lru_cache(typed=True)
def _shape_of_tensors(*sizes: int) -> tuple[tl.constexpr, tl.tuple]:
    """Elements and shape of tensors."""
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


@lru_cache(typed=True)
def _shape_of_types(*sizes: int) -> tuple[tl.tuple, int, str]:
    """Shape, elements and text of the shape of block types; one that cannot be raises each time."""
    block = tl.block_type.__new__(tl.block_type)
    PLAIN_BLOCK_TYPE(block, tl.void, list(sizes))
    return block.shape, block.numel, str(block.shape)


def _make_tensor(tensor: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """What stands for `tensor.__init__`."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.numel, tensor.shape = _shape_of_tensors(*(type.shape.values if type.is_block() else ()))


def _make_block_type(block: tl.block_type, element_ty: tl.dtype, shape: Iterable[int | tl.constexpr]) -> None:
    """What stands for `block_type.__init__`."""
    sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
    block.element_ty = element_ty
    block.shape, block.numel, text = _shape_of_types(*sizes)
    block.name = f"<{text}, {element_ty}>"


def _broadcast(semantic: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """What stands for `broadcast_impl_value`: tensors of one shape are left as they are."""
    return (lhs, rhs) if lhs.shape is rhs.shape else PLAIN_BROADCAST(semantic, lhs, rhs)


def quicken() -> None:
    """From now on, in this process."""
    if isinstance(interpreter._patch_lang, _ReplacedOnce):
        return
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _ReplacedOnce()
    interpreter._get_np_dtype = _KnownTypes()
    tl.tensor.__init__ = _make_tensor
    tl.block_type.__init__ = _make_block_type
    TritonSemantic.broadcast_impl_value = _broadcast
