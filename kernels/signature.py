"""The parameters of a CUDA C++ kernel, read from its `extern "C"` signature in the source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch

from moe_runtime.kernels import nvrtc

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\b')
_CONDITION = re.compile(r"^\s*#\s*(if|else|endif)\b[ \t]*(.*?)\s*$")
_PARAMETER = re.compile(r"(.*?)(\w+)", re.DOTALL)
_QUALIFIER = re.compile(r"\b(?:const|volatile|__grid_constant__|__restrict__)\b")

_POINTED_TO: dict[str, frozenset[torch.dtype] | None] = {
    "float": frozenset({torch.float32}),
    "int": frozenset({torch.int32}),
    "u32": frozenset({torch.int32}),
    "short": frozenset({torch.int16}),
    "long long": frozenset({torch.int64}),
    "u64": frozenset({torch.int64}),
    "u16": frozenset({torch.bfloat16, torch.float16, torch.int16}),
    "u8": None,
    "void": None,
}
"""Dtypes of the tensors that a pointer to a type may point to; None for all."""


class Kind(Enum):
    """How a value is passed."""

    POINTER = "a tensor, an Address or None"
    INT32 = "an int of 32 bits"
    INT64 = "an int of 64 bits"
    FLOAT = "a float"
    STRUCT = "an object that is passed by value"


_KINDS = {"int": Kind.INT32, "u32": Kind.INT32, "long long": Kind.INT64, "u64": Kind.INT64, "float": Kind.FLOAT}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: in the signature.
        type: without qualifiers, macros replaced, such as `float*`, `long long` or `TensorMap`.
        kind: how its value is passed.
        dtypes: of the tensors that a pointer may point to; None for all.
    """

    name: str
    type: str
    kind: Kind
    dtypes: frozenset[torch.dtype] | None = None

    @property
    def num_bytes(self) -> int | None:
        """Of a value; None where the source alone does not say it."""
        return {Kind.STRUCT: None, Kind.INT32: 4, Kind.FLOAT: 4}.get(self.kind, 8)


@cache
def parameters_of(file: str, kernel: str, defines: nvrtc.Defines) -> tuple[Parameter, ...]:
    """The parameters of `kernel` in the source `file` compiled with macros `defines`, in order.

    A macro may rename the kernel, stand for a type, and, in an `#if` of its name alone, leave parameters out.

    Raises `NvrtcError` where the source has no such kernel, and `ValueError` for a signature that is not understood.
    """
    text = _COMMENT.sub("", nvrtc.source_path(file).read_text())
    for match in _KERNEL.finditer(text):
        name, start = _name_after(text, match.end())
        if str(defines.get(name, name)) == kernel:
            between = text[start + 1 : _closing(text, start)]
            kept = _without_branches(between, defines)
            return tuple(_parameter(one, defines) for one in kept.split(",") if one.strip())
    raise nvrtc.NvrtcError(f"NOT_FOUND: {file} has no kernel {kernel}")


def kernels_of(file: str) -> tuple[str, ...]:
    """The names of all kernels in the source `file`, without macros."""
    text = _COMMENT.sub("", nvrtc.source_path(file).read_text())
    return tuple(_name_after(text, match.end())[0] for match in _KERNEL.finditer(text))


def _name_after(text: str, at: int) -> tuple[str, int]:
    """The name of a kernel behind `void` and attributes such as `__launch_bounds__(..)`; where its `(` stands."""
    while match := re.compile(r"\s*(\w+)\s*\(").match(text, at):
        if not match.group(1).startswith("__"):
            return match.group(1), match.end() - 1
        at = _closing(text, match.end() - 1) + 1
    raise ValueError(f"expected the name of a kernel, got {text[at : at + 40]!r}")


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` is closed."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError(f"nothing closes {text[start : start + 40]!r}")


def _without_branches(text: str, defines: Mapping[str, int | str]) -> str:
    """`text` as the preprocessor leaves it, for an `#if` of one macro."""
    kept, taken = [], [True]
    for line in text.splitlines():
        if (match := _CONDITION.match(line)) is None:
            if "#" in line:
                raise ValueError(f"expected #if NAME, #else or #endif in a signature, got {line.strip()!r}")
            kept += [line] if all(taken) else []
            continue
        directive, condition = match.groups()
        if directive == "endif":
            taken.pop()
        elif directive == "else":
            taken[-1] = not taken[-1]
        elif re.fullmatch(r"\w+", condition):
            taken.append(bool(int(defines.get(condition, 0))))
        else:
            raise ValueError(f"expected #if NAME in a signature, got {line.strip()!r}")
    return "\n".join(kept)


def _parameter(text: str, defines: Mapping[str, int | str]) -> Parameter:
    match = _PARAMETER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a type and a name in a signature, got {text.strip()!r}")
    written, name = match.groups()
    replaced = re.sub(r"\w+", lambda word: str(defines.get(word.group(), word.group())), _QUALIFIER.sub("", written))
    kind = " ".join(replaced.split()).replace(" *", "*")
    if not kind.endswith("*"):
        if not re.fullmatch(r"[A-Z]\w*", kind) and kind not in _KINDS:
            raise ValueError(f"parameter {name}: no argument can be of type {kind!r}")
        return Parameter(name, kind, _KINDS.get(kind, Kind.STRUCT))
    if kind[:-1] not in _POINTED_TO:
        raise ValueError(f"parameter {name}: no argument can be of type {kind!r}")
    return Parameter(name, kind, Kind.POINTER, _POINTED_TO[kind[:-1]])
