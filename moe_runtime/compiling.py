"""What `torch.compile` is to leave as it is."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(method: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable(method)`, made once something is compiled.

    By itself that imports `torch._dynamo`, which takes as long as torch, in every process, whether it compiles or not.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    # What is compiled calls it instead of looking into it.
    marked: Any = call
    marked._torchdynamo_disable = True
    return call
