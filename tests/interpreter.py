"""Triton's interpreter without work that is done and thrown away: half of the time of an interpreted test.

What kernels compute stays the same. Left out are: the search of all `triton.language` for names to replace at each call
of a device function, where the kernel's own call has replaced them; the computation of whether integers overflow, which
only a debugging option would look at; and a table of types that is made anew for each question.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class _ReplacedOnce:
    """What stands for `_patch_lang`, which replaces the names that a function sees of `triton.language`."""

    def __init__(self) -> None:
        self._replace = interpreter._patch_lang
        self._done: set[frozenset[str]] = set()

    def __call__(self, function: FunctionType) -> Any:
        modules = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
        names = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
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


def quicken() -> None:
    """From now on, in this process."""
    if isinstance(interpreter._patch_lang, _ReplacedOnce):
        return
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _ReplacedOnce()
    interpreter._get_np_dtype = _KnownTypes()
