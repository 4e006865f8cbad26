"""Where programs that tests start find the package."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_path() -> str:
    """For `PYTHONPATH`: this checkout, then what the tests themselves were given, which may hold what it needs."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
