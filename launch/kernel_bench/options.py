"""What `--cases` of the kernels' programs chooses."""

from __future__ import annotations

import re
from collections.abc import Sequence


def chosen_cases(names: Sequence[str], pattern: str | None) -> list[str]:
    """Names in which the regular expression of `--cases` is found, or all. Raises `ValueError` if there is none."""
    try:
        found = [name for name in names if pattern is None or re.search(pattern, name)]
    except re.error as error:
        raise ValueError(f"--cases: {error}") from None
    if not found:
        raise ValueError(f"--cases: no case like {pattern!r}; there are {', '.join(names)}")
    return found
