"""Wrong calls of the whole public interface: each is refused with a `ValueError` that names the argument, or right.

Every function, constructor and method that `__all__` of a public package leads to is found by `inspect`. A call starts
from right arguments (`right_calls`), of which one or two become wrong or hostile (`wrong_values`). What may follow:

- a `ValueError` whose text begins with the name of an argument;
- where the values are of the annotated kinds and in range: the result of the same call with plain values, contiguous
  tensors and Python numbers, on objects of its own; and, where `REFERENCES` has one, the result of torch in float64.

Anything else is a fault. Calls run in child processes, which report how far they are: a crash or a hang has a number
too. `python -m tests.support.wrong_calls --calls 20000 --seed 1` prints all faults; `--only 123` repeats one call.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import functools
import importlib
import inspect
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

PACKAGES = (
    "moe_runtime",
    "moe_runtime.checkpoints",
    "moe_runtime.context",
    "moe_runtime.dispatcher",
    "moe_runtime.integrations",
    "moe_runtime.ops",
    "moe_runtime.placement",
)
ALSO = {"moe_runtime.router": ("softmax_topk", "topk_softmax", "sigmoid_topk")}
"""Functions of public modules without `__all__`."""

NOT_FOR_CALLERS = {
    # Made and moved on by the dispatcher; callers hand them back whole.
    "DispatchHandle",
    "DispatchHandle.allocate",
    "DispatchHandle.allocate_output",
    "DispatchHandle.enter",
    "DispatchHandle.take_output",
    "DispatchHandle.take_recv_buffers",
    # For errors that layers find.
    "ExpertParallelContext.fail",
}

ARITHMETIC = {f"TokenFormat.{kind}_{unit}" for kind in ("quant", "scale") for unit in ("bytes", "columns")}
"""Formulas of sizes that were checked before, in the path of every launch."""

UNCHECKED = {"DispatchedTokens", "GroupedRows", "LayerCounts", "QuantizedRows"}
"""Records that hold what they are given; who reads one checks it."""

FOR_MESSAGES = {"argument"}
"""Parameters that only name an argument in a message."""

SECONDS = 10
"""Most seconds of a call."""
SILENCE = 60
"""Seconds without a call after which a child hangs."""
MEMORY = 2 << 30
"""Bytes that a child may take: a call that wants more is at fault."""


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
        function = self.function
        if isinstance(function, type):
            function = function.__init__ if not dataclasses.is_dataclass(function) else function  # type: ignore[misc]
        try:
            return typing.get_type_hints(function)
        except (NameError, TypeError):
            return {}


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
            elif callable(value) and inspect.signature(value).parameters:
                found[name] = Target(name, value)
    return {name: target for name, target in found.items() if name not in NOT_FOR_CALLERS | ARITHMETIC}


def _methods(owner: type) -> Iterator[Target]:
    for name in dir(owner):
        if name.startswith("_") and name not in ("__call__", "__sub__"):
            continue
        home = next(base for base in owner.__mro__ if name in vars(base))
        value = getattr(owner, name)
        if home.__module__.startswith("moe_runtime") and callable(value) and not isinstance(value, type | Enum):
            yield Target(f"{owner.__name__}.{name}", value, owner, name)


def unmade() -> list[str]:
    """Calls and parameters for which nothing makes a right value."""
    from tests.support.right_calls import ARGUMENTS, BY_NAME, INSTANCES, World

    missing: list[str] = []
    for target in targets().values():
        if (
            target.needs_object
            and target.owner is not None
            and target.owner.__name__ not in {*INSTANCES, "GateUpOrder"}
        ):
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

    def __init__(self, target: Target, world: Any) -> None:
        self.target, self.world = target, world

    def parts(self) -> tuple[Any, dict[str, Any]]:
        """What to call, and its arguments; parameters with a default are passed too."""
        import torch

        from tests.support.right_calls import ARGUMENTS, BY_NAME, INSTANCES

        torch.manual_seed(1)
        target, on = self.target, None
        if target.needs_object:
            assert target.owner is not None
            if target.owner.__name__ == "GateUpOrder":
                on = self.world.draw.choice(list(target.owner))  # type: ignore[call-overload]
            else:
                kind = "placed_layer" if target.name == "MoELayer.replace_experts" else None
                on = self.world.placed_layer() if kind else INSTANCES[target.owner.__name__](self.world)
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


class Fault(Exception):
    """What a call did that it must not do."""


class Hang(BaseException):
    """A call that takes too long."""


def run_call(seed: int, index: int) -> tuple[str, str]:
    """Make call `index`: its target, and `refused`, `accepted` or `order`. Raises `Fault`."""
    from tests.support.right_calls import World

    draw = random.Random(f"{seed}-{index}")
    names = sorted(targets())
    name = names[index % len(names)]
    target = targets()[name]
    # Objects that cost much are made less often.
    if target.owner is not None and target.owner.__name__ == "TokenDispatcher" and draw.random() < 0.3:
        check_order(draw)
        return "order of calls", "order"
    seed_of_world = draw.randrange(2**31)
    function, arguments = Call(target, World(random.Random(seed_of_world))).parts()
    wrong = _spoil(arguments, draw)
    closed = draw.random() < (0.1 if wrong else 1.0) and _close(function, arguments)
    said = describe(name, arguments, wrong, closed)
    plain = {key: normal(arguments[key]) for key in wrong}
    try:
        result = finished(function(**arguments))
    except Exception as error:
        problem = judge_error(target, arguments, wrong, error)
        if problem:
            raise Fault(f"{problem}\n    {said}\n    {where(error)}") from None
        return name, "refused"
    if closed and name not in MAY_BE_CLOSED:
        raise Fault(f"{name} | context | accepted a closed one\n    {said}")
    for key in wrong:
        if problem := judge_accepted(target, key, arguments[key]):
            raise Fault(f"{name} | {key} | {problem}\n    {said}")
    if wrong and not closed and name not in UNCHECKED and all(is_plain(value) for value in plain.values()):
        other, others = Call(target, World(random.Random(seed_of_world))).parts()
        compare_with_plain(name, wrong, (result, arguments), other, others | plain, said)
    return name, "accepted"


def compare_with_plain(
    name: str, wrong: list[str], found: tuple[Any, dict[str, Any]], function: Any, plain: dict[str, Any], said: str
) -> None:
    """The same call with plain arguments, and torch's answer, must be equal."""
    import torch

    from tests.support.call_references import REFERENCES

    result, arguments = found
    at = f"{name} | {', '.join(wrong)}"
    if plain.get("out", 0) is None:
        return  # rows that no group owns hold anything
    before = {key: normal(value) for key, value in plain.items()} if name in REFERENCES else {}
    try:
        expected = finished(function(**plain))
    except Exception as error:
        raise Fault(f"{at} | accepted, but refused with plain values\n    {said}\n    {where(error)}") from None
    if difference := differs(result, expected):
        raise Fault(f"{at} | wrong result: {difference}\n    {said}")
    for key in {"c", "out", "buf"} & set(arguments):
        if difference := differs(arguments[key], plain[key]):
            raise Fault(f"{at} | wrong {key}: {difference}\n    {said}")
    on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in before.values())
    if name in REFERENCES and not on_meta and (difference := REFERENCES[name](result, **before)):
        raise Fault(f"{at} | not as the reference: {difference}\n    {said}")


def _spoil(arguments: dict[str, Any], draw: random.Random) -> list[str]:
    """Make one or two of the arguments wrong; their names."""
    import torch

    from tests.support.wrong_values import wrong_value

    names = sorted(set(arguments) - FOR_MESSAGES)
    wrong = draw.sample(names, min(len(names), draw.choice((1, 1, 1, 2))))
    for key in wrong:
        others = [v for k, v in sorted(arguments.items()) if k != key and isinstance(v, torch.Tensor)]
        others = [other for other in others if other.layout == torch.strided and not other.is_nested]
        arguments[key] = wrong_value(arguments[key], others, draw)
    return wrong


def _close(function: Any, arguments: dict[str, Any]) -> bool:
    """Close the context of a call, if it has one. A checkpoint that is read again opens its files again."""
    on = getattr(function, "__self__", None)
    for value in (on, getattr(on, "context", None), arguments.get("context")):
        if type(value).__name__ == "ExpertParallelContext":
            value.close()
            return True
    return False


def finished(result: Any) -> Any:
    """The values of a generator; a context manager entered and left."""
    if inspect.isgenerator(result):
        return list(result)
    if isinstance(result, AbstractContextManager) and type(result).__name__ == "_GeneratorContextManager":
        with result:
            return None
    return result


MAY_BE_CLOSED = {
    "CombineSink",
    "ExpertParallel",
    "ExpertParallel.close",
    "ExpertParallel.count_tokens",
    "ExpertParallel.expert_loads",
    "ExpertParallel.join",
    "ExpertParallelContext.abort",
    "ExpertParallelContext.close",
    "ExpertParallelContext.fail",
    "ExpertParallelContext.follow_stream",
    "ExpertParallelContext.next_exchange_id",
    "ExpertParallelContext.next_layer_id",
    "MoELayer.close",
    "MoELayer.count_steps",
    "MoELayer.extra_repr",
}
"""What needs no memory between ranks."""


UNVALIDATED = {"expert_ids", "group_offsets", "group_scale_offsets", "m_indptr"}
"""Arguments of operations whose values are not checked with `validate=False`."""


def _is_of_values(error: Exception) -> bool:
    """Whether the kernel, which alone reads the values of offsets and indices, went out of bounds by them."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, IndexError | RuntimeError) and last.endswith(("gemm/reference.py", "gemm/op_reference.py"))


def judge_error(target: Target, arguments: dict[str, Any], wrong: list[str], error: Exception) -> str | None:
    """What is wrong with an error, as `call | arguments | problem`."""
    at = f"{target.name} | {', '.join(wrong)}"
    kind = type(error).__name__
    if kind in ("RoutingError", "CapacityError") and target.name.split(".")[0] in ("TokenDispatcher", "MoELayer"):
        return None  # documented
    if target.name == "ExpertParallelContext.register" and isinstance(error, TypeError) and "keyword" in str(error):
        return None  # from Python itself
    if isinstance(error, TypeError) and re.search(r"unexpected keyword argument|keywords must be strings", str(error)):
        return None
    if target.name == "GateUpOrder" and "truth value of an array" in str(error):
        return None  # from Python itself
    if target.name == "Experts.__call__" and "rows" in wrong and _is_of_values(error):
        return None
    if arguments.get("validate") is False and UNVALIDATED & set(wrong) and _is_of_values(error):
        return None  # documented as the caller's fault
    if not isinstance(error, ValueError):
        return f"{at} | {kind}"
    text = str(error)
    given = [str(arguments[name]) for name in wrong if isinstance(arguments[name], str | os.PathLike)]
    if not wrong or any(word and (word in text or repr(word) in text) for word in given):
        return None
    names = {"context", "experts", "handle", "step"}
    for key, value in (*arguments.items(), *((key, None) for key in target.parameters)):
        names |= {key, re.sub(r"_[A-Z]+$", "", key), *ALSO_CALLED.get(key, ())}
        if dataclasses.is_dataclass(value):
            names |= {field.name for field in dataclasses.fields(value)}
        names |= set(getattr(type(value), "model_fields", ()))
    if kind == "ValidationError":
        found = {str(part) for problem in error.errors() for part in problem["loc"]}  # type: ignore[attr-defined]
        found |= {str(problem["msg"]) for problem in error.errors()}  # type: ignore[attr-defined]
        text = " ".join(found) + ":"
    head = text.split(":", 1)[0] if ":" in text else ""
    if "/" in head:
        head = text.split(":", 2)[1]  # behind the name of a file
    if kind != "ValidationError" and len(head) > 60:
        head = ""
    return (
        None
        if any(re.search(rf"\b{re.escape(name)}\b", head) for name in names if name)
        else f"{at} | message: {text[:150]!r}"
    )


ALSO_CALLED = {
    "experts": ("expert",),
    "fmt": ("format",),
    "gate_up": ("order of gate and up",),
    "order": ("order of gate and up",),
    "rows": ("a", "w"),
    "value": ("order of gate and up",),
}
"""What messages call some parameters."""

ANY_NUMBER = {
    ("ExpertParallelContext.register", "agree"),
    ("SwiGLU", "alpha"),
    ("SwiGLU", "limit"),
    ("SwiGLU", "up_offset"),
    # Encode scales are clamped to 2^100.
    ("NVFP4TokenFormat.copy_token_to_send_buf", "input_scale"),
    ("NVFP4TokenFormat.read_token", "input_scale"),
    ("Experts", "intermediate_gsf"),
    ("quantize_nvfp4", "gsf"),
    ("quantize_rows", "gsf"),
    ("NVFP4TokenFormat.write_info", "source"),
}


SIGNED = {("dequantize_nvfp4", "decode_scale")}
"""Parameters that may be negative."""


def judge_accepted(target: Target, key: str, value: Any) -> str | None:
    """Why `value` may not be accepted as `key`, if that is so."""
    hint = target.hints.get(key)
    if hint is None or target.name in UNCHECKED or key not in target.parameters or (target.name, key) in ANY_NUMBER:
        return None
    if not fits(hint, value):
        return f"accepted {brief(value)}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    most = 3.5e38 if fits(hint, 0.5) else 2**62
    least = -most if (target.name, key) in SIGNED else 0
    if number and not (least <= value < most) and "seed" not in key:
        return f"accepted {brief(value)}"
    return None


def fits(hint: Any, value: Any) -> bool:
    """Whether `value` is of the annotated kind; numbers of numpy, texts for paths and the like are."""
    import numpy as np
    import torch

    from moe_runtime.kernels.formats.number_formats import TokenFormat

    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object) or isinstance(hint, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(one, value) for one in inner)
    if origin is typing.Annotated:
        return fits(inner[0], value)
    if origin is typing.Literal:
        return value in inner if not isinstance(value, torch.Tensor | np.ndarray) else False
    if hint is None or hint is type(None):
        return value is None
    kind = origin or hint
    if kind is collections.abc.Callable:
        return callable(value)
    if kind in (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection, tuple, list):
        if isinstance(value, np.ndarray | torch.Tensor):
            return value.ndim == 1
        if isinstance(value, str | bytes) or not isinstance(value, collections.abc.Iterable):
            return False
        elements = inner[:1] if kind is not tuple or (inner and inner[-1] is Ellipsis) else ()
        return all(fits(elements[0], one) for one in value) if elements and isinstance(value, list | tuple) else True
    if kind is collections.abc.Mapping or kind is dict:
        return isinstance(value, collections.abc.Mapping)
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, str | os.PathLike)
    if kind is torch.device:
        return isinstance(value, str | torch.device)
    if kind is torch.Tensor:
        return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
    if kind is TokenFormat or (isinstance(kind, type) and issubclass(kind, Enum)):
        return isinstance(value, str | kind)
    return isinstance(value, kind) if isinstance(kind, type) else True


def normal(value: Any) -> Any:
    """The same numbers in the plainest form."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided or value.is_meta:
            return value
        return value.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(map(normal, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__name__ in RECORDS:
        return dataclasses.replace(value, **{f.name: normal(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


RECORDS = ("QuantizedRows", "GroupedRows")


def is_plain(value: Any) -> bool:
    """Whether two calls may share the value."""
    import torch

    from moe_runtime.kernels.formats.number_formats import TokenFormat
    from moe_runtime.placement import Placement

    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    simple = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Tensor, TokenFormat, Placement, Enum)
    return isinstance(value, simple) or type(value).__name__ in RECORDS


def differs(found: Any, expected: Any, at: str = "result") -> str | None:
    """Where two results differ, bit for bit; objects of other kinds are not looked into."""
    import torch

    if type(found) is not type(expected) and not isinstance(found, torch.Tensor):
        return f"{at} is {type(found).__name__}, not {type(expected).__name__}"
    if isinstance(found, torch.Tensor):
        if found.is_nested or found.layout != torch.strided:
            return None
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"{at} {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
        if found.is_meta:
            return None
        bits = (
            t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
            for t in (found, expected)
        )
        return None if torch.equal(*bits) else f"bits of {at}"
    if isinstance(found, list | tuple):
        if len(found) != len(expected):
            return f"length of {at}"
        pairs = enumerate(zip(found, expected, strict=True))
        return next((d for i, (a, b) in pairs if (d := differs(a, b, f"{at}[{i}]"))), None)
    if isinstance(found, dict):
        if found.keys() != expected.keys():
            return f"keys of {at}"
        return next((d for k in found if (d := differs(found[k], expected[k], f"{at}[{k}]"))), None)
    names = ("group_offsets",) if type(found).__name__ == "DispatchedTokens" else None
    if dataclasses.is_dataclass(found) and type(found).__name__ not in ("DispatchHandle", "LayerStep"):
        names = names or tuple(f.name for f in dataclasses.fields(found))
        pairs_of = ((name, getattr(found, name), getattr(expected, name)) for name in names)
        return next((d for name, a, b in pairs_of if (d := differs(a, b, f"{at}.{name}"))), None)
    if isinstance(found, bool | int | float | str | Enum):
        same = found == expected or (found != found and expected != expected)
        return None if same else f"{at} {found!r}, expected {expected!r}"
    return None


def check_order(draw: random.Random) -> None:
    """Stages of steps in any order and of any dispatcher: refused unless each is the next one of its own handle."""
    import torch

    from moe_runtime.comm.errors import StaleHandleError
    from tests.support.right_calls import HIDDEN, World

    w = World(draw)
    torch.manual_seed(1)
    context = w.context()
    from moe_runtime.dispatcher import TokenDispatcher

    made = [TokenDispatcher(**(w.dispatcher_arguments() | {"context": context})) for _ in range(2)]
    stages = ("dispatch_recv", "combine_send", "combine_recv")
    handles: list[list[Any]] = []  # handle, dispatcher, stages done, number of the dispatch
    said = []
    sent = 0
    for _ in range(12):
        if not handles or draw.random() < 0.25:
            owner = draw.randrange(2)
            try:
                handles.append([made[owner].dispatch_send(**w.tokens()), owner, 0, sent])
            except StaleHandleError:
                return  # what an earlier stage recorded, which ends the group
            sent += 1
            said.append(f"send({owner})")
            continue
        held = draw.choice(handles)
        handle, owner, done, number = held
        stage = draw.randrange(3) if draw.random() < 0.5 else min(done, 2)
        caller = owner if draw.random() < 0.9 else 1 - owner
        said.append(f"{stages[stage]}({number}, by {caller})")
        output = torch.zeros(made[caller].geometry.row_capacity, HIDDEN, dtype=torch.bfloat16)
        more = (output, handle) if stages[stage] == "combine_send" else (handle,)
        right = caller == owner and stage == done
        try:
            getattr(made[caller], stages[stage])(*more)
        except ValueError as error:
            if right or not str(error).startswith("handle: "):
                raise Fault(f"order of calls | handle | {error}\n    {said}") from None
        except StaleHandleError:
            if max(sent - other[3] for other in handles) <= 2:
                raise Fault(f"order of calls | handle | stale too soon\n    {said}") from None
            return  # which ends the group
        except Exception as error:
            raise Fault(f"order of calls | handle | {type(error).__name__}\n    {said}\n    {where(error)}") from None
        else:
            if not right:
                raise Fault(f"order of calls | handle | accepted\n    {said}")
            held[2] += 1


def brief(value: Any) -> str:
    """A value in a few words."""
    import torch

    if isinstance(value, torch.Tensor):
        extra = "" if value.layout == torch.strided and not value.is_nested else " not strided"
        shape = "nested" if value.is_nested else list(value.shape)
        few = f" {value.tolist()}" if not extra and not value.is_meta and 0 < value.numel() <= 6 else ""
        return f"{value.dtype} {shape} on {value.device}{extra}{few}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(brief, value[:6]))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if not f.name.startswith("_")]
        return f"{type(value).__name__}({', '.join(f'{f.name}={brief(getattr(value, f.name))}' for f in fields)})"[:300]
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def describe(name: str, arguments: dict[str, Any], wrong: list[str], closed: bool) -> str:
    state = ", after close" if closed else ""
    return f"{name}({', '.join(f'{key}={brief(arguments[key])}' for key in wrong)}{state})"


def where(error: BaseException) -> str:
    """The error and the line of the package that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f
        for f in frames
        if "/tests/" not in f.filename and "site-packages" not in f.filename and "/lib/" not in f.filename
    ]
    place = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}: {str(error)[:160]}{place}"


def _child(seed: int, start: int, count: int, progress: str) -> None:
    """Make calls `start .. start + count`, one JSON line for each fault, and a count of all in the end."""
    import torch

    from tests.support import right_calls  # noqa: F401 (before memory is limited)

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    file = os.open(progress, os.O_WRONLY | os.O_CREAT)

    def too_long(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, too_long)
    counts: Counter[str] = Counter()
    for index in range(start, start + count):
        os.pwrite(file, f"{index:020d}".encode(), 0)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            name, outcome = run_call(seed, index)
            counts[f"{name} {outcome}"] += 1
        except Fault as fault:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps({"index": index, "fault": str(fault)}), flush=True)
        except Hang:
            print(json.dumps({"index": index, "fault": f"{_name_of(index)} | | over {SECONDS} s"}), flush=True)
        except Exception as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            text = f"{_name_of(index)} | | the fuzzer itself: {where(error)}"
            print(json.dumps({"index": index, "fault": text, "trace": traceback.format_exc()[-1500:]}), flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"counts": counts}), flush=True)


def _name_of(index: int) -> str:
    names = sorted(targets())
    return names[index % len(names)]


@dataclass(frozen=True)
class Outcome:
    """Of a run: calls by target and outcome, and faults `(index, text)`."""

    counts: Counter[str]
    faults: list[tuple[int, str]]


def run(seed: int, start: int, count: int, *, processes: int = 1, seconds: float = float("inf")) -> Outcome:
    """Make `count` calls from `start` on, in `processes` children at a time, for about `seconds`."""
    batch, end = max(1, min(500, count // processes)), time.monotonic() + seconds
    starts = iter(range(start, start + count, batch))
    outcome, running = Outcome(Counter(), []), []
    with tempfile.TemporaryDirectory() as folder:
        while True:
            while len(running) < processes and time.monotonic() < end and (first := next(starts, None)) is not None:
                running.append(_Batch(seed, first, min(batch, start + count - first), Path(folder)))
            if not running:
                return outcome
            for child in list(running):
                if child.is_done(outcome):
                    running.remove(child)
            time.sleep(0.05)


class _Batch:
    """A child process with a range of calls; after a crash or a hang another one goes on behind it."""

    def __init__(self, seed: int, start: int, count: int, folder: Path) -> None:
        self.seed, self.start, self.end, self.folder = seed, start, start + count, folder
        self._begin()

    def _begin(self) -> None:
        self.progress = self.folder / f"{self.start}.progress"
        self.output = self.folder / f"{self.start}.out"
        numbers = [str(self.seed), str(self.start), str(self.end - self.start)]
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.support.wrong_calls", "--child", *numbers]
        with self.output.open("w") as out, (self.folder / f"{self.start}.err").open("w") as err:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            environment.pop("TRITON_INTERPRET", None)
            self.process = subprocess.Popen(
                [*command, str(self.progress)], stdout=out, stderr=err, env=environment, start_new_session=True
            )
        self.seen, self.since = -1, time.monotonic()

    def is_done(self, outcome: Outcome) -> bool:
        at = int(self.progress.read_text() or 0) if self.progress.exists() else -1
        if at != self.seen:
            self.seen, self.since = at, time.monotonic()
        code, silent = self.process.poll(), time.monotonic() - self.since > SILENCE
        if code is None and not silent:
            return False
        if code is None:
            self.process.kill()
            self.process.wait()
        for line in self.output.read_text().splitlines():
            found = json.loads(line)
            outcome.counts.update(found.get("counts", {}))
            if "fault" in found:
                outcome.faults.append((found["index"], found["fault"]))
        if code == 0:
            return True
        error = (self.folder / f"{self.start}.err").read_text()[-600:]
        if at < 0:
            raise RuntimeError(f"a child made no call: {error}")
        how = "hangs" if code is None else f"ends the process ({code}): {error}"
        outcome.faults.append((at, f"{_name_of(at)} | | {how}"))
        if at + 1 >= self.end:
            return True
        self.start = at + 1
        self._begin()
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, help="number of one call, made in this process")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(*map(int, options.child[:3]), options.child[3])
        return 0
    if options.only is not None:
        warnings.simplefilter("ignore")
        print(*run_call(options.seed, options.only))
        return 0
    outcome = run(options.seed, options.start, options.calls, processes=options.processes)
    for kind, number in sorted(outcome.counts.items()):
        print(f"{number:6d}  {kind}")
    groups: dict[str, list[tuple[int, str]]] = {}
    for index, fault in sorted(outcome.faults):
        groups.setdefault(fault.split("\n")[0], []).append((index, fault))
    for _, found in sorted(groups.items()):
        print(f"{len(found)} x {found[0][1]}\n    --seed {options.seed} --only {found[0][0]}")
    print(f"{outcome.counts.total() + len(outcome.faults)} calls, {len(outcome.faults)} faults, {len(groups)} kinds")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
