"""How linears are stored by what a quantization config says, and what all methods need to read such a config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moe_runtime.checkpoints.layouts import PLAIN, WeightLayout
from moe_runtime.checkpoints.unread_keys import KnownKeys

LOOKS = re.compile(
    r"zero|zp|sym|bias|scal|round|clip|clamp|limit|format|fmt|type|order|perm|pack|group|block|bits|width|axis|quant|algo"
    r"|rotat|transform|hadamard|smooth|spars|lora|adapter|svd|rank|codebook|outlier|scheme|strategy|dynamic|weight"
    r"|activation|offset|shift|shuffle|swizz|transpose|interleav|factor|alpha|mantissa|exponent|layout|override|expert"
)
"""What keys of a quantization config look like that change values."""

EXPERT = re.compile(r"\.experts\.\d+\.")
"""A part of the names of linears of routed experts."""

CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method", "kv_cache_dtype", "kv_cache_bits")
"""Keys of the KV cache, in all methods."""


def known_keys(used: Sequence[str], without_influence: Sequence[str] = ()) -> KnownKeys:
    """Keys of a quantization config or of an object in it."""
    return KnownKeys(("quant_method", *used), (*CACHE_KEYS, *without_influence), LOOKS)


Refuse = Callable[[Mapping[str, Any], KnownKeys, str], None]
"""Raises `ValueError` for the first key of an object that nobody reads; the last argument goes before it."""


@dataclass(frozen=True)
class StoredExperts:
    """How the experts of a layer are stored.

    Attributes:
        layout: layout of each weight.
        token_format: token format that the checkpoint is meant for: that of the weights, or bf16 for weight-only
            quantization.
        key: the key that says so, for messages.
    """

    layout: WeightLayout
    token_format: str
    key: str = field(default="", compare=False)


class Method(NamedTuple):
    """A value of `quant_method`.

    Attributes:
        stored: how a linear is stored, by the key of the config in messages, the config, the linear's name, and what
            refuses keys of objects in it.
        keys: the keys of the config itself.
    """

    stored: Callable[[str, Mapping[str, Any], str, Refuse], StoredExperts]
    keys: KnownKeys


def plain(key: str) -> StoredExperts:
    """Left out of quantization, as `key` says."""
    return StoredExperts(PLAIN, "bf16", key)


def with_parents(name: str) -> list[str]:
    """The names of the modules that a linear is in, outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


# `at` is always the key, in messages, of what is read.


def strings(at: str, value: Any) -> list[str]:
    """A list of names and patterns; empty if there is none."""
    value = value or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{at}: expected a list of names and patterns, got {value!r}")
    return value


def mapping(at: str, value: Any) -> Mapping[str, Any]:
    """An object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{at}: expected an object, got {value!r}")
    return value


def block_sizes(at: str, value: Any, count: int = 2) -> list[int]:
    """The sizes of a block."""
    if not isinstance(value, list) or len(value) != count or not all(type(n) is int and 0 < n for n in value):
        expected = "two positive integers" if count == 2 else "a positive integer"
        raise ValueError(f"{at}: expected {expected}, got {value if count == 2 else value[0]!r}")
    return value


def expect(at: str, value: Any, *expected: Any) -> None:
    """Raise `ValueError` unless `value` is one of these."""
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in expected):
        raise ValueError(f"{at}: expected {' or '.join(map(repr, expected))}, got {value!r}")
