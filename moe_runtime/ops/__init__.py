"""Operations of other libraries: grouped GEMMs and a token format with the names and layouts of FlashInfer and MAX."""

from __future__ import annotations

from moe_runtime.ops import operations
from moe_runtime.ops.operations import *  # noqa: F403 (what its `__all__` lists, which is the public interface)

__all__ = operations.__all__
