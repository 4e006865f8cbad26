"""A decorator for functions that `torch.compile` must not look into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(method: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable(method)`, applied once the process uses `torch.compile`.

    Applied at once it would import `torch._dynamo` in every process, which takes as long as importing torch.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    # Dynamo calls a marked function instead of tracing it.
    marked: Any = call
    marked._torchdynamo_disable = True
    return call
