"""Every public call, found by `inspect`, and a right call of each, for `tests.support.wrong_calls`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import random
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, EnumType
from typing import Any

import torch
from pydantic import BaseModel

from tests.support.right_calls import ARGUMENTS, BY_NAME
from tests.support.right_objects import INSTANCES, OTHER_INSTANCES, World

PACKAGES = (
    "moe_runtime",
    "moe_runtime.checkpoints",
    "moe_runtime.context",
    "moe_runtime.dispatcher",
    "moe_runtime.integrations",
    "moe_runtime.ops",
    "moe_runtime.placement",
)
ALSO = {
    "moe_runtime.comm.heaps.private_heap": ("PrivateHeap",),
    "moe_runtime.deep_ep": ("ElasticBuffer",),
    "moe_runtime.config": (
        *("ActivationConfig", "CheckpointConfig", "PlacementConfig", "PostExpertNormConfig", "SharedExpertConfig"),
    ),
    "moe_runtime.router": ("softmax_topk", "topk_softmax", "sigmoid_topk"),
    "moe_runtime.virtual": ("VirtualRanks",),
}
"""What callers use of modules without `__all__`: parts of public arguments, and what the documentation imports."""

NOT_FOR_CALLERS = {
    # Made and moved on by the dispatcher; callers hand them back whole.
    "DispatchedRows",
    "DispatchedRows.entries_of",
    "DispatchedRows.rows_of",
    "DispatchedRows.sums_of",
    "DispatchHandle",
    "DispatchHandle.for_rows",
    # For errors that layers find. `__enter__` and `__exit__` are for `with` statements, which pass nothing wrong.
    "ExpertParallelContext.fail",
    # Refused on CPUs.
    "ElasticBuffer.get_comm_stream",
    # Need several processes: `tests/exchange/test_survivors.py` calls them, also wrongly.
    "ExpertParallelContext.recover",
    "ExpertParallelContext.rejoin",
    "ExpertParallelContext.release",
}

ARITHMETIC = {f"TokenFormat.{kind}_{unit}" for kind in ("quant", "scale") for unit in ("bytes", "columns")}
"""Formulas of sizes that were checked before, in the path of every launch."""


@dataclass(frozen=True)
class Target:
    """A public call: `function`, which is the method `method` of the class `owner` if these are given."""

    name: str
    function: Callable[..., Any]
    owner: type | None = None
    method: str = ""

    @property
    def needs_object(self) -> bool:
        assert self.owner is not None or not self.method
        static = inspect.getattr_static(self.owner, self.method) if self.owner is not None else None
        return bool(self.method) and not isinstance(static, classmethod | staticmethod)

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        if isinstance(self.function, EnumType):
            # Its other parameters make an enum, not a member.
            return {"value": inspect.Parameter("value", inspect.Parameter.POSITIONAL_OR_KEYWORD)}
        found = dict(inspect.signature(self.function).parameters)
        if self.needs_object:
            found.pop("self", None)
        return {n: p for n, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """Annotations by parameter; those of a model's fields where the call takes these."""
        function = self.function
        is_model = isinstance(self.owner or function, type) and issubclass(self.owner or function, BaseModel)  # type: ignore[arg-type]
        if is_model and (self.owner is None or self.method == "replace"):
            return typing.get_type_hints(self.owner or function)
        if isinstance(function, type):
            function = function.__init__ if not dataclasses.is_dataclass(function) else function  # type: ignore[misc]
        try:
            found = typing.get_type_hints(function)
        except (NameError, TypeError):
            return {}
        found.pop("return", None)
        return found

    def hint(self, key: str) -> Any:
        """The annotation of argument `key`, None where there is none; also of one that `**` takes."""
        more = (n for n, p in inspect.signature(self.function).parameters.items() if p.kind is p.VAR_KEYWORD)
        return self.hints.get(key, self.hints.get(next(more, ""))) if isinstance(key, str) else None


@functools.cache
def targets() -> dict[str, Target]:
    """Every public call by its name."""
    found: dict[str, Target] = {}
    for package in (*PACKAGES, *ALSO):
        module = importlib.import_module(package)
        for name in ALSO.get(package) or module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, Exception):
                continue  # an error may say anything
            if isinstance(value, type):
                found[name] = Target(name, value)
                found |= {target.name: target for target in _methods(value)}
            elif callable(value) and inspect.signature(value).parameters:  # without any, no call is wrong
                found[name] = Target(name, value)
    return {name: target for name, target in found.items() if name not in NOT_FOR_CALLERS | ARITHMETIC}


def _methods(owner: type) -> Iterator[Target]:
    for name in dir(owner):
        if name.startswith("_") and name not in ("__call__", "__sub__"):
            continue
        home = next(base for base in owner.__mro__ if name in vars(base))
        value = getattr(owner, name)
        if (value.__doc__ or "").startswith("Not there"):
            continue  # refused whatever it is given
        if home.__module__.startswith("moe_runtime") and callable(value) and not isinstance(value, type | Enum):
            yield Target(f"{owner.__name__}.{name}", value, owner, name)


def unmade() -> list[str]:
    """Calls and parameters for which nothing makes a right value."""
    missing: list[str] = []
    for target in targets().values():
        owner = target.owner
        if target.needs_object and owner is not None and owner.__name__ not in {*INSTANCES, "GateUpOrder"}:
            missing.append(f"an object for {target.name}")
            continue
        if target.parameters and target.name not in ARGUMENTS:
            missing.append(f"arguments of {target.name}")
            continue
        _, made = Call(target, World(random.Random(1))).parts()
        for name, parameter in target.parameters.items():
            if name not in made and name not in BY_NAME and parameter.default in (None, parameter.empty):
                missing.append(f"{name} of {target.name}")
    return missing


class Call:
    """A right call of `target`, with values from `world`."""

    def __init__(self, target: Target, world: World) -> None:
        self.target, self.world = target, world

    def parts(self) -> tuple[Any, dict[str, Any]]:
        """What to call, and its arguments; parameters with a default are passed too."""
        torch.manual_seed(1)
        target, on = self.target, None
        if target.needs_object:
            assert target.owner is not None
            if target.owner.__name__ == "GateUpOrder":
                on = self.world.draw.choice(list(target.owner))  # type: ignore[call-overload]
            else:
                make = OTHER_INSTANCES.get(target.name) or INSTANCES[target.owner.__name__]
                on = make(self.world)
        made = ARGUMENTS.get(target.name, lambda w, on: {})(self.world, on)
        takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(target.function).parameters.values())
        if not takes_more:
            made = {name: value for name, value in made.items() if name in target.parameters}
        for name, parameter in target.parameters.items():
            if name not in made and name in BY_NAME:
                made[name] = BY_NAME[name](self.world)
            elif name not in made and parameter.default is not parameter.empty:
                made[name] = parameter.default
        return (getattr(on, target.method) if on is not None else target.function), made
