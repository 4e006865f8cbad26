"""Matches the regular expressions of checkpoints in bounded time, for which Python's `re` may need for ever.

An expression is run over all places at once that it may have reached in a name: a set of places is an integer, with bit
`p` for the place before character `p`. So nothing is tried twice. What needs more than sets of places, such as a
reference back to a group, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from moe_runtime.support.arguments import describe

MAX_LENGTH = 2000
"""Most characters of an expression."""
MAX_DEPTH = 20
"""Most groups within each other."""
MAX_STEPS = 10_000
"""Most steps of an expression in a name of `ROUNDS` characters. Those of published checkpoints take some ten."""
ROUNDS = 64
"""A loop takes at most one round for each character of a name, here of a long one."""
MAX_TOTAL_LENGTH = 40_000
"""Most characters of all patterns of a config."""
MAX_TOTAL_STEPS = 8_000_000
"""Most steps of all patterns of a config in all names of a layer."""

_PATTERN_KEYS = ("targets", "ignore", "exclude_modules")
_LOOKED_UP = ("quantized_layers",)
_BY_PATTERN = "dynamic"
"""Key of GPTQ's objects whose keys are patterns."""
_PREFIX = "re:"
_GLOB = frozenset("*?[")

# The parser of `re`, which has no public name.
_PARSER: Any = import_module("re._parser")
_UNBOUNDED: Any = import_module("re._constants").MAXREPEAT


class _Name:
    """A name to match: the places of each of its characters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 1 << len(text)
        self.places: dict[str, int] = {}
        for place, character in enumerate(text):
            self.places[character] = self.places.get(character, 0) | 1 << place
        self._known: dict[Callable[[str], bool], int] = {}

    def of(self, accepts: Callable[[str], bool]) -> int:
        """The places before characters that `accepts` is true of."""
        found = self._known.get(accepts)
        if found is None:
            found = sum(places for character, places in self.places.items() if accepts(character))
            self._known[accepts] = found
        return found

    def boundaries(self) -> int:
        """The places between a word and what is no word."""
        words = self.of(_is_word)
        return (words ^ words << 1) & (2 * self.end - 1)


class _Part(NamedTuple):
    """A part of an expression: from the places before it to those behind it, and the steps that this takes."""

    run: Callable[[_Name, int], int]
    steps: int = 1


def matches(pattern: str, name: str) -> bool:
    """As `re.match(pattern, name) is not None`.

    Raises `ValueError` for an expression that is broken, takes too many steps or is of a kind that is not supported.
    """
    return _compiled(pattern).run(_name(name), 1) != 0


def check_work(config: Mapping[str, Any], num_names: int) -> None:
    """Raise `ValueError` if the patterns of a `quantization_config` take too long for `num_names` names."""
    texts = [text for text in _texts(config) if text.startswith(_PREFIX) or not _GLOB.isdisjoint(text)]
    if (length := sum(map(len, texts))) > MAX_TOTAL_LENGTH:
        raise ValueError(f"targets: expected patterns of at most {MAX_TOTAL_LENGTH} characters in all, got {length}")
    most, steps = MAX_TOTAL_STEPS // max(num_names, 1), 0
    for text in _texts(config):
        steps += _steps(text)
        if steps > most:
            raise ValueError(f"targets: expected patterns of at most {most} steps in all, got more")


def pattern_of(key: str) -> str:
    """The pattern of a key of GPTQ's `dynamic`, which may begin with a sign: `-:` or `+:`."""
    return key.removeprefix("-:").removeprefix("+:")


def _texts(config: Mapping[str, Any]) -> Iterable[str]:
    """The names and patterns in the lists of a config, wherever they stand, and one text for each group of them."""
    left: list[Any] = [config]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            left += (value for key, value in item.items() if key not in _LOOKED_UP)
            for key in _PATTERN_KEYS:
                if isinstance(item.get(key), list):
                    yield from (text for text in item[key] if isinstance(text, str))
            if isinstance(item.get(_BY_PATTERN), Mapping):
                yield from (f"{_PREFIX}{pattern_of(key)}" for key in item[_BY_PATTERN])
            if isinstance(item.get("config_groups"), Mapping):
                yield from item["config_groups"]
        elif isinstance(item, list):
            parts = [part for part in item if isinstance(part, Mapping)]
            left += parts
            yield from ("" for _ in parts)


def _steps(text: str) -> int:
    if not text.startswith(_PREFIX):
        return 1
    try:
        return _compiled(text.removeprefix(_PREFIX)).steps
    except ValueError:
        return 1  # an error of its own where it is used


@lru_cache(maxsize=8)
def _name(text: str) -> _Name:
    return _Name(text)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> _Part:
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"expected at most {MAX_LENGTH} characters, got {len(pattern)}")
    try:
        parsed = _PARSER.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if parsed.state.flags != re.UNICODE:
        raise ValueError("expected an expression without flags")
    part = _sequence(parsed, 0)
    if part.steps > MAX_STEPS:
        raise ValueError(f"expected an expression of at most {MAX_STEPS} steps, got {describe(part.steps)}")
    return part


def _sequence(items: Any, depth: int, *, many: bool = False) -> _Part:
    """The parts `items`, one behind another. Whether there are `many` places before them."""
    if depth > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} groups within each other")
    parts = []
    for op, value in items:
        parts.append(_part(str(op), value, depth, many))
        many = many or str(op) in ("BRANCH", "SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT")

    def run(name: _Name, places: int) -> int:
        for part in parts:
            if not places:
                break
            places = part.run(name, places)
        return places

    return _Part(run, sum(part.steps for part in parts))


def _part(op: str, value: Any, depth: int, many: bool) -> _Part:
    if op == "LITERAL":
        character = chr(value)
        return _Part(lambda name, places: (name.places.get(character, 0) & places) << 1)
    if (accepts := _accepts(op, value)) is not None:
        return _Part(lambda name, places: (name.of(accepts) & places) << 1)
    if op == "SUBPATTERN" and value[1] == value[2] == 0:
        return _sequence(value[3], depth + 1, many=many)
    if op == "BRANCH":
        branches = [_sequence(branch, depth + 1, many=many) for branch in value[1]]
        return _Part(lambda name, places: _union(name, places, branches), sum(branch.steps for branch in branches))
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        return _repeat(depth, *value)
    if op == "AT":
        return _at(str(value))
    if op in ("ASSERT", "ASSERT_NOT"):
        return _assertion(op == "ASSERT", depth, many, *value)
    raise ValueError(f"{op.lower()} is not supported")


def _union(name: _Name, places: int, branches: list[_Part]) -> int:
    found = 0
    for branch in branches:
        found |= branch.run(name, places)
    return found


def _repeat(depth: int, low: int, high: Any, items: Any) -> _Part:
    """From `low` to `high` times what `items` match, as many or as few as needed."""
    accepts = _accepts(str(items[0][0]), items[0][1]) if len(items) == 1 else None
    if accepts is not None and low <= 1 and high == _UNBOUNDED:
        return _Part(lambda name, places: _run_of(name.of(accepts), places, low))
    body = _sequence(items, depth + 1, many=True)

    def run(name: _Name, places: int) -> int:
        # After more rounds than there are characters, one of them has stayed in its place: others may too.
        most = len(name.text) + 1
        for _ in range(min(low, most)):
            places = body.run(name, places)
        found = new = places
        for _ in range(min(high - low, most)):
            new = body.run(name, new) & ~found
            if not new:
                break
            found |= new
        return found

    return _Part(run, 1 + body.steps * min(high, ROUNDS))


def _run_of(accepted: int, places: int, low: int) -> int:
    """The places behind any number, at least `low`, of characters at `accepted`: a carry runs through them."""
    first = accepted & places
    behind = ((accepted + first) ^ accepted) | first | places
    return behind if low == 0 else (behind & accepted) << 1


def _at(where: str) -> _Part:
    if where in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return _Part(lambda name, places: places & 1)
    if where == "AT_END":
        return _Part(lambda name, places: places & (name.end | (name.end >> 1 if name.text[-1:] == "\n" else 0)))
    if where == "AT_END_STRING":
        return _Part(lambda name, places: places & name.end)
    if where == "AT_BOUNDARY":
        return _Part(lambda name, places: places & name.boundaries())
    if where == "AT_NON_BOUNDARY":
        return _Part(lambda name, places: places & ~name.boundaries())
    raise ValueError(f"{where.lower()} is not supported")


def _assertion(wanted: bool, depth: int, many: bool, direction: int, items: Any) -> _Part:
    """The places where `items` match (or do not), ahead or behind."""
    body = _sequence(items, depth + 1)
    back, longest = items.getwidth() if direction < 0 else (0, 0)
    if back != longest:
        raise ValueError("look-behind requires fixed-width pattern")

    def run(name: _Name, places: int) -> int:
        found = 0
        for place in range(places.bit_length()):
            if places >> place & 1:
                ends = body.run(name, 1 << place - back) if place >= back else 0
                holds = ends >> place & 1 if direction < 0 else ends
                found |= (bool(holds) == wanted) << place
        return found

    return _Part(run, 1 + body.steps * (ROUNDS if many else 1))


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": _is_word,
}


def _accepts(op: str, value: Any) -> Callable[[str], bool] | None:
    """Which character a part of one character stands for; None for any other part."""
    if op == "LITERAL":
        return chr(value).__eq__
    if op == "NOT_LITERAL":
        return chr(value).__ne__
    if op == "ANY":
        return "\n".__ne__
    return _set(tuple(value)) if op == "IN" else None


@lru_cache(maxsize=4096)
def _set(members: tuple[Any, ...]) -> Callable[[str], bool]:
    negated = str(members[0][0]) == "NEGATE"
    tests = [_member(str(kind), what) for kind, what in members[negated:]]
    return lambda character: any(test(character) for test in tests) != negated


def _member(kind: str, value: Any) -> Callable[[str], bool]:
    if kind == "RANGE":
        return lambda character: value[0] <= ord(character) <= value[1]
    if kind == "CATEGORY":
        name = str(value).removeprefix("CATEGORY_")
        test = _CATEGORIES[name.removeprefix("NOT_")]
        return (lambda character: not test(character)) if name.startswith("NOT_") else test
    assert kind == "LITERAL", kind
    return chr(value).__eq__
