"""Imported first by the process that workers of `tests/support/pool.py` are forked from, where there is no GPU."""

from __future__ import annotations

import os

# Before numpy is imported, whose BLAS starts its threads then, and before triton is.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRITON_INTERPRET"] = "1"

from tests.support.interpreter import quicken

quicken()
