"""Names that changed: they keep working for one release, with a DeprecationWarning."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that `old` is now `new`."""
    warnings.warn(f"{old} is now {new}; the old name goes with release 0.3", DeprecationWarning, stacklevel=stacklevel)
