"""What ranks tell each other on the host: JSON, so that reading what a peer, or somebody else, has stored runs no code.

An answer is one JSON object: `{"what": "...", "value": ...}`, or `{"left": "...", "cause": rank}` of a rank that gave
up. Its reader checks the value, since whoever reaches the store can put any other there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_runtime.support.arguments import check_integer, describe

MAX_BYTES = 1 << 20
"""Most bytes of an answer, unless its call says otherwise: far more than any has, and read in milliseconds."""

MAX_DIGITS = 100
"""Most digits of an integer: reading one takes time that grows with the square of them."""

MAX_REASON = 10_000
"""Most characters of the reason of a rank that gives up; the rest is cut off."""

T = TypeVar("T")

Reader = Callable[[Any], T]
"""Checks a value that came and returns it, maybe as another type. Raises `ValueError` for what it does not expect."""

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Answer:
    """What a rank says in one call: a `value` in the call `what`, or that it `left`, with the reason.

    `cause` is the rank that made it leave, which may be itself.
    """

    what: str = ""
    value: Any = None
    left: str | None = None
    cause: int = -1


def encode(message: dict[str, Any], max_bytes: int = MAX_BYTES) -> bytes:
    """The JSON of `message`, which `decode` reads back the same.

    It may hold None, bools, ints, floats (also NaN and infinite), texts, lists, and dicts with texts as keys. Raises
    `ValueError` for anything else (a tuple too, which would come back as a list) and for what is too large or too deep.
    """
    try:
        _check_plain(message)
        raw = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise ValueError("expected a value of few levels, got one that is too deep") from None
    if len(raw) > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes of JSON, got {len(raw)}")
    return raw


def decode(raw: bytes, max_bytes: int = MAX_BYTES) -> Any:
    """The value of one JSON text. Raises `ValueError` for what `encode` does not write, and for a key given twice."""
    if len(raw) > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes of JSON, got {len(raw)}")
    try:
        return json.loads(raw.decode("utf-8", "surrogatepass"), object_pairs_hook=unique_keys, parse_int=_integer)
    except RecursionError:
        raise ValueError("expected a value of few levels, got one that is too deep") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("expected JSON, got something else") from None


def answer(what: str, value: object, max_bytes: int = MAX_BYTES) -> bytes:
    """The answer of a rank in the call `what`. Raises `ValueError` naming the call if JSON cannot carry `value`."""
    try:
        return encode({"what": what, "value": value}, max_bytes)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def farewell(reason: str, cause: int) -> bytes:
    """The answer of a rank that gives up because of rank `cause`."""
    return encode({"left": str(reason)[:MAX_REASON], "cause": cause})


def read_answer(raw: bytes, max_bytes: int = MAX_BYTES) -> Answer:
    """The answer that `answer` or `farewell` wrote. Raises `ValueError` for anything else."""
    found = decode(raw, max_bytes)
    if isinstance(found, dict) and found.keys() == {"left", "cause"}:
        return Answer(left=text(found["left"])[:MAX_REASON], cause=integer(0)(found["cause"]))
    if isinstance(found, dict) and found.keys() == {"what", "value"}:
        return Answer(what=text(found["what"]), value=found["value"])
    raise ValueError("expected an answer of a rank, got other JSON")


def nothing(value: Any) -> None:
    """Reads None."""
    if value is not None:
        raise ValueError(f"expected None, got {describe(value)}")


def text(value: Any) -> str:
    """Reads a text."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {describe(value)}")
    return value


def scalar(value: Any) -> Scalar:
    """Reads None, a bool, a number or a text."""
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"expected a number, a text, a bool or None, got {describe(value)}")
    return value


def integer(low: int | None = None, high: int | None = None) -> Reader[int]:
    """Reads an integer from `low` to `high`, None for no limit."""
    return lambda value: check_integer("value", value, low, high)


def hexadecimal(num_bytes: int) -> Reader[bytes]:
    """Reads so many bytes, as `bytes.hex` writes them."""

    def read(value: Any) -> bytes:
        if re.fullmatch(f"[0-9a-f]{{{2 * num_bytes}}}", text(value)) is None:
            raise ValueError(f"expected {num_bytes} bytes in hexadecimal, got {describe(value)}")
        return bytes.fromhex(value)

    return read


def optional(read: Reader[T]) -> Reader[T | None]:
    """Reads None, or what `read` does."""
    return lambda value: None if value is None else read(value)


def row(*readers: Reader[Any]) -> Reader[tuple[Any, ...]]:
    """Reads a list of one entry for each of `readers`, as a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(readers):
            raise ValueError(f"expected a list of {len(readers)}, got {_size(value)}")
        return tuple(reader(entry) for reader, entry in zip(readers, value, strict=True))

    return read


def many(reader: Reader[T], count: int) -> Reader[list[T]]:
    """Reads a list of `count` entries."""

    def read(value: Any) -> list[T]:
        if not isinstance(value, list) or len(value) != count:
            raise ValueError(f"expected a list of {count}, got {_size(value)}")
        return [reader(entry) for entry in value]

    return read


def many_of(reader: Reader[T]) -> Reader[list[T]]:
    """Reads a list of any number of entries."""

    def read(value: Any) -> list[T]:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, got {describe(value)}")
        return [reader(entry) for entry in value]

    return read


def table(reader: Reader[T]) -> Reader[dict[str, T]]:
    """Reads a dict with any texts as keys."""

    def read(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError(f"expected a dict, got {describe(value)}")
        return {key: reader(entry) for key, entry in value.items()}

    return read


def _size(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else describe(value)


def _check_plain(value: object) -> None:
    """Raise `ValueError` unless JSON carries `value` so that it comes back the same, its class too."""
    if type(value) is dict:
        for key, entry in value.items():
            if type(key) is not str:
                raise ValueError(f"expected texts as keys, got {describe(key)}")
            _check_plain(entry)
    elif type(value) is list:
        for entry in value:
            _check_plain(entry)
    elif type(value) is int:
        if abs(value) >= 10**MAX_DIGITS:
            raise ValueError(f"expected integers of at most {MAX_DIGITS} digits, got {describe(value)}")
    elif value is not None and type(value) not in (bool, float, str):
        raise ValueError(f"expected what JSON carries, got {type(value).__name__}")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises `ValueError` for a key that is there twice, of which JSON keeps the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("expected each key once, got one twice")
    return found


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"expected integers of at most {MAX_DIGITS} digits, got one of {len(digits)}")
    return int(digits)
