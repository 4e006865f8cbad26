"""Where programs that tests start find the package, and with what environment."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """For `PYTHONPATH`: this checkout, then what the tests themselves were given, which may hold what it needs."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def without_interpreter(**changes: str) -> dict[str, str]:
    """The environment of this process for a program in which Triton does not interpret, with `changes`."""
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | changes
