"""Small layers that the CUDA exchange takes like large ones: slots counted in chunks, tokens combined in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moe_runtime.kernels import hopper_shapes


def forget_defines() -> None:
    """Macros of Hopper's kernels, which are made once for a geometry; for tests that change what they are made from."""
    hopper_shapes.dispatch_defines.cache_clear()
    hopper_shapes.arrive_defines.cache_clear()
    hopper_shapes.combine_defines.cache_clear()


@contextmanager
def tokens_in_parts() -> Iterator[None]:
    """What is launched or captured within takes tokens in parts and slots in chunks, however few there can be."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TOKENS_IN_PARTS": 1, "SMALL_CHUNK_BYTES": 0, "CHUNK": 32}.items():
            patch.setattr(hopper_shapes, name, value)
        forget_defines()
        try:
            yield
        finally:
            forget_defines()
