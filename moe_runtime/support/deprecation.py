"""Names that changed: they keep working for one release, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings

REMOVED_IN = "0.3"
_PASSED_OVER = ("moe_runtime", "torch")
"""Packages whose frames lie between a deprecated method and its caller: `torch.compiler.disable` adds some."""


def warn_renamed(old: str, new: str, stacklevel: int | None = None) -> None:
    """Warn that `old` is now `new`.

    `stacklevel` is that of `warnings.warn`; None is the first line outside of this package and of torch.
    """
    _warn(f"{old} is now {new}; the old name goes with release {REMOVED_IN}", stacklevel)


def warn_removed(old: str, instead: str) -> None:
    """Warn that `old` will be gone, and say what to use `instead`."""
    _warn(f"{old} goes with release {REMOVED_IN}; {instead}", None)


def _warn(text: str, stacklevel: int | None) -> None:
    """`stacklevel` is counted from the caller."""
    if stacklevel is None:
        stacklevel, frame = 1, sys._getframe(1)
        while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _PASSED_OVER:
            frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
