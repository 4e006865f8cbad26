"""What pictures share: matplotlib or a clear error, the colours of formats, and files that come out the same again."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

COLOURS = {"nvfp4": "tab:green", "fp8_block": "tab:blue", "mxfp8": "tab:orange", "bf16": "tab:red"}
"""By token format."""


def check_can_draw(option: str) -> None:
    """Raise `ValueError` naming the option that needs it where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option}: needs matplotlib, the extra `bench`")


def new_figure(width: float, height: float) -> Any:
    """A matplotlib `Figure` of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, file: Path, kind: str) -> None:
    """Without a date and with ids made of `kind`, so that the same numbers make the same file."""
    from matplotlib import rc_context

    metadata = {"Date": None} if file.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": kind}):
        figure.savefig(file, dpi=150, metadata=metadata)
