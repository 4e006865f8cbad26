"""Small layers whose tokens come and go in parts on Hopper, as those of large ones do."""

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
    """What is launched or captured within takes tokens in parts, however few there can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_shapes, "TOKENS_IN_PARTS", 1)
        forget_defines()
        try:
            yield
        finally:
            forget_defines()
