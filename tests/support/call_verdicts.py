"""What may follow a call, right or wrong, and a fault in words, for `tests.support.wrong_calls`."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import os
import re
import traceback
import types
import typing
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from moe_runtime.kernels.formats.number_formats import TokenFormat
from moe_runtime.placement import Placement
from tests.support.call_references import REFERENCES
from tests.support.public_calls import Target

STEPS = {"DifferentiableDispatcher", "TokenDispatcher", "MoELayer", "VirtualRanks"}
"""What makes steps, in which ids are found to be out of range on the device."""

UNCHECKED = {"DispatchedTokens", "GroupedRows", "LayerCounts", "QuantizedRows"}
"""Records that hold what they are given; who reads one checks it."""


class Fault(Exception):
    """What a call did that it must not do."""


def compare_with_plain(
    name: str, wrong: list[str], found: tuple[Any, dict[str, Any]], function: Any, plain: dict[str, Any], said: str
) -> None:
    """The same call with plain arguments, and torch's answer, must be equal."""
    result, arguments = found
    at = f"{name} | {', '.join(wrong)}"
    if plain.get("out", 0) is None or name == "PrivateHeap.peer_pointers":
        return  # rows that no group owns hold anything; addresses differ
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
    on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in (result, *before.values()))
    if name in REFERENCES and not on_meta and (difference := REFERENCES[name](result, **before)):
        raise Fault(f"{at} | not as the reference: {difference}\n    {said}")


def finished(result: Any) -> Any:
    """The values of a generator; a context manager entered and left."""
    if inspect.isgenerator(result):
        return list(result)
    if isinstance(result, AbstractContextManager) and type(result).__name__ == "_GeneratorContextManager":
        with result:
            return None
    return result


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
    if kind in ("RoutingError", "CapacityError") and target.name.split(".")[0] in STEPS:
        return None  # documented
    if target.name == "ExpertParallelContext.register" and isinstance(error, TypeError) and "keyword" in str(error):
        return None  # from Python itself
    if isinstance(error, TypeError) and re.search(r"unexpected keyword argument|keywords must be strings", str(error)):
        return None
    if target.name == "GateUpOrder" and "truth value of an array" in str(error):
        return None  # from Python itself
    if any(
        typing.get_origin(target.hint(key)) is collections.abc.Callable for key in wrong if callable(arguments.get(key))
    ):
        return None  # from the caller's function
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
    "routing": ("topk_idx", "topk_weights"),
    "rows": ("a", "w"),
    "value": ("order of gate and up",),
    "xs": ("x", "topk_idx"),
}
"""What messages call some parameters."""

ACCEPTED_OTHERS = {
    ("ActivationConfig", "up_offset"),
    ("ActivationConfig.replace", "up_offset"),
    ("ExpertParallelContext.register", "agree"),
    ("Activation", "alpha"),
    ("Activation", "limit"),
    ("Activation", "gate_softcap"),
    ("Activation", "up_softcap"),
    ("SwiGLU", "gate_softcap"),
    ("SwiGLU", "up_softcap"),
    ("Activation", "up_offset"),
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
    # None and "auto" are an absent one.
    ("MoELayerConfig", "token_format"),
    ("MoELayerConfig.replace", "token_format"),
    ("MoELayerConfig", "weight_format"),
    ("MoELayerConfig.replace", "weight_format"),
}
"""Arguments of which a call takes more than the annotation, or than numbers from 0 to the largest, says."""


SIGNED = {("dequantize_nvfp4", "decode_scale")}
"""Parameters that may be negative."""


def judge_accepted(target: Target, key: str, value: Any) -> str | None:
    """Why `value` may not be accepted as `key`, if that is so."""
    hint = target.hint(key)
    if hint is None or target.name in UNCHECKED or (target.name, key) in ACCEPTED_OTHERS:
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
    if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
        return True  # as a section of a YAML file, which has been validated
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
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    simple = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Tensor, TokenFormat, Placement, Enum)
    return isinstance(value, simple) or type(value).__name__ in RECORDS


def differs(found: Any, expected: Any, at: str = "result") -> str | None:
    """Where two results differ, bit for bit; objects of other kinds are not looked into."""
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
    if dataclasses.is_dataclass(found) and type(found).__name__ != "DispatchHandle":
        names = names or tuple(f.name for f in dataclasses.fields(found) if not f.name.startswith("_"))
        pairs_of = ((name, getattr(found, name), getattr(expected, name)) for name in names)
        return next((d for name, a, b in pairs_of if (d := differs(a, b, f"{at}.{name}"))), None)
    if isinstance(found, bool | int | float | str | Enum):
        same = found == expected or (found != found and expected != expected)
        return None if same else f"{at} {found!r}, expected {expected!r}"
    return None


def brief(value: Any) -> str:
    """A value in a few words."""
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
