"""Refuses keys of a JSON file that look as if they changed values and that nothing reads.

Whoever reads a file says which keys it used and which are known to have no influence. Of the others, those whose names
look like keys that change values are refused, unless their value cannot act. So a model or a quantization method that
is newer than this release is refused by the name of what is new in it, and never read as something else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from reprlib import repr as shortened
from typing import Any

from moe_runtime.support.arguments import describe

_BOUND = re.compile(r"limit|clamp|clip|cap(?!acity)|bound|max|min")
"""Keys whose value is a bound: a 1 acts."""
_FACTOR = re.compile(r"alpha|scal|factor|multiplier")
"""Keys whose value is a factor: a 1 does not act."""

_TRUE = re.compile(r"(?<!a)sym(?!b)|norm.*(topk|top_k|prob|weight|rout|gat|expert)|use_grouped_topk")
"""Keys that are true unless something is out of the ordinary, of symmetry and of the router's sum: a false acts."""
_OFFSET = re.compile(r"offset|beta|shift")
"""Keys whose value is added: a 1 acts."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownKeys:
    """Keys of one object that need no further look.

    Attributes:
        used: those that were read.
        without_influence: those that are known to change no value.
        looks: what names look like of keys that change values.
        parts: keys of objects that describe something else, such as the vision part of a model.
        defaults: values that are known to be read rightly, by key.
    """

    used: Collection[str]
    without_influence: Collection[str]
    looks: re.Pattern[str]
    parts: Collection[str] = ()
    defaults: Mapping[str, Any] | None = None


def acts(key: str, value: object) -> bool:
    """Whether a value of a key can change anything: not null, 0, empty, a factor of 1, or false, unless true is usual.

    >>> acts("router_scale", 1.0), acts("swiglu_limit", 1.0), acts("swiglu_limits", [0.0, 0.0]), acts("use_bias", True)
    (False, True, False, True)
    >>> acts("use_bias", False), acts("symmetric", False), acts("normalize_expert_weights", False)
    (False, True, True)
    >>> acts("swiglu_beta", 1.0)
    True
    """
    if isinstance(value, Mapping):
        return any(acts(name, item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return any(acts(key, item) for item in value)
    if value is None or value == "":
        return False
    if value is False:
        return _TRUE.search(key.lower()) is not None
    if isinstance(value, int | float) and value is not True:
        bound = _BOUND.search(key.lower()) is not None or _OFFSET.search(key.lower()) is not None
        one = value == 1 and not bound and (isinstance(value, float) or _FACTOR.search(key.lower()) is not None)
        return value != 0 and not one
    return True


def check_ignored(ignore_keys: object) -> tuple[str, ...]:
    """Raise `ValueError` unless `ignore_keys` are names of keys."""
    if not isinstance(ignore_keys, list | tuple | set | frozenset) or not all(isinstance(k, str) for k in ignore_keys):
        raise ValueError(f"ignore_keys: expected names of keys, got {describe(ignore_keys)}")
    return tuple(ignore_keys)


def refuse_unread(
    given: Mapping[str, Any], known: KnownKeys, *, source: str, at: str = "", ignored: Collection[str] = ()
) -> None:
    """Raise `ValueError` for the first key of `given` that looks like one that changes values and is not known.

    Args:
        given: an object of a JSON file. Objects in it are looked through too, but for `known.parts`.
        known: what is known of its keys.
        source: the file, in messages.
        at: what goes before the keys in messages, such as `text_config.`.
        ignored: keys that the caller says have no influence, with or without `at`; of an object, all that is in it.
            Each that would be refused is logged.
    """
    complaint = complaint_of(given, known, source=source, at=at, ignored=ignored)
    if complaint is not None:
        raise ValueError(f"{source}: {complaint}")


def complaint_of(
    given: Mapping[str, Any], known: KnownKeys, *, source: str, at: str = "", ignored: Collection[str] = ()
) -> str | None:
    """What `refuse_unread` says after the file; None if all keys are known. `source` is for what is logged."""
    for key, value in _unread(given, known, at, False):
        if not _names(key, at).isdisjoint(ignored):
            log_ignored(source, f"{key}: {shortened(value)}")
            continue
        return (
            f"{key}: expected a key that is known here, got {shortened(value)}; it looks as if it changed what is "
            "computed, and nothing reads it: name it in ignore_keys if it has no influence"
        )
    return None


def _names(key: str, at: str) -> set[str]:
    """What a caller may call a key: with what goes before it or without, or by an object below `at` that it is in."""
    parts = key.removeprefix(at).split(".")
    inside = {".".join(parts[: count + 1]) for count in range(len(parts))}
    return inside | {f"{at}{name}" for name in inside} | {parts[-1]}


@lru_cache
def log_ignored(source: str, what: str) -> None:
    """Log that something is ignored; once, since an object may describe thousands of linears."""
    log.warning("%s: %s is ignored, as ignore_keys says", source, what)


def _unread(given: Mapping[str, Any], known: KnownKeys, at: str, inside: bool) -> Iterator[tuple[str, Any]]:
    """Keys, with what goes before them, and values. `inside` an object whose name looks like it, all keys do.

    There the names of keys that are read elsewhere say nothing.
    """
    for key, value in given.items():
        if not isinstance(key, str):
            continue
        if not inside and (key in known.used or key in known.without_influence or key in known.parts):
            continue
        if not acts(key, value):
            continue
        if not inside and known.defaults is not None and key in known.defaults and known.defaults[key] == value:
            continue
        looks = inside or known.looks.search(key.lower()) is not None
        items = list(value) if isinstance(value, list | tuple) else [value]
        objects = {i: item for i, item in enumerate(items) if isinstance(item, Mapping)}
        for i, item in objects.items():
            # What was read of the object around it says nothing of the keys in this one.
            place = f"{at}{key}." if item is value else f"{at}{key}.{i}."
            yield from _unread(item, replace(known, used=(), defaults=None), place, looks)
        if looks and len(objects) < len(items):
            yield f"{at}{key}", value
