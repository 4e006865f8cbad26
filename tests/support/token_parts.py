"""Small layers that the CUDA exchange handles like large ones: slots counted in chunks, tokens combined in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moe_runtime.kernels.exchange import macros, plan


def forget_plans() -> None:
    """Plans and macros of the CUDA exchange, made once for a geometry; for tests that change their constants."""
    plan.plan_exchange.cache_clear()
    macros.dispatch_macros.cache_clear()
    macros.recv_macros.cache_clear()
    macros.combine_macros.cache_clear()
    macros.one_rank_dispatch_macros.cache_clear()
    macros.one_rank_combine_macros.cache_clear()


@contextmanager
def tokens_in_parts() -> Iterator[None]:
    """What is launched or captured within takes tokens in parts and slots in chunks, however few there can be."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TOKENS_IN_PARTS": 1, "SMALL_CHUNK_BYTES": 0, "CHUNK": 32}.items():
            patch.setattr(plan, name, value)
        forget_plans()
        try:
            yield
        finally:
            forget_plans()
