"""Operations of other libraries: grouped GEMMs and a token format with the names and layouts of FlashInfer and MAX."""

from __future__ import annotations

from moe_runtime.ops import operations
from moe_runtime.ops.operations import *  # noqa: F403 (what its `__all__` lists, which is the public interface)
from moe_runtime.support.deprecation import warn_renamed

__all__ = operations.__all__

_RENAMED = {
    "PreparedWeights": "PrepackedWeights",
    "prepare_mxfp8": "prepack_mxfp8",
    "prepare_nvfp4": "prepack_nvfp4",
}


def __getattr__(name: str) -> object:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", _RENAMED[name])
    return getattr(operations, _RENAMED[name])
