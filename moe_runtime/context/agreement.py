"""What ranks compare at start-up: the values that each layer needs equal everywhere, and the sizes of the regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_runtime.comm.messages import Scalar, encode, scalar, table
from moe_runtime.comm.rank_group import RankGroup, describe_ranks
from moe_runtime.support.arguments import check_kind, describe

MAX_BYTES = 16 << 20
"""Most bytes of what a rank has to compare: some 50 values of 100 bytes for each of a few thousand layers."""

Value = Scalar | list[Scalar]


class Agreement:
    """Values that must be equal on all ranks of a group. Each is compared once, in the order of registration.

    Attributes:
        complete: whether every registered value has been compared.
    """

    def __init__(self) -> None:
        self._values: list[dict[str, Value]] = []
        self._compared = 0
        self.complete = True

    def add(self, values: Mapping[str, object], about: str | None) -> None:
        """Register `values` (numbers, texts, bools, None, or sequences of them) of `about`; None numbers it.

        Raises `ValueError` for other values, keys that are no texts, NaN, and what messages cannot carry.
        """
        check_kind("agree", values, Mapping)
        for key in values:
            if not isinstance(key, str):
                raise ValueError(f"agree: expected texts as keys, got {describe(key)}")
        name = f"agreement {len(self._values)}" if about is None else about
        plain = {f"{key} ({name})": _plain(key, values[key]) for key in sorted(values)}
        try:
            encode(plain, MAX_BYTES)
        except ValueError as error:
            raise ValueError(f"agree: {error}") from None
        self._values.append(plain)
        self.complete = False

    @property
    def values(self) -> dict[str, Value]:
        """All registered values."""
        return {key: value for values in self._values for key, value in values.items()}

    def take_as_compared(self) -> None:
        """Note that all values are known to be equal on all ranks."""
        self._compared, self.complete = len(self._values), True

    @staticmethod
    def check_joins(mine: Mapping[str, object], others: Mapping[str, object], *, so_far: bool = False) -> None:
        """Raise `ValueError` naming the keys in which a process and the ranks that it joins differ.

        With `so_far` it need not have all keys of the others yet.
        """
        expected = {key: value for key, value in others.items() if key in mine} if so_far else others
        problems = [
            f"{key}: here {mine.get(key, 'not given')!r}, the others {expected.get(key, 'not given')!r}"
            for key in dict.fromkeys([*expected, *mine])
            if mine.get(key) != expected.get(key)
        ]
        if problems:
            raise ValueError(f"agree: this rank and the others disagree on {'; '.join(problems)}")

    def compare(self, group: RankGroup | None, sizes: Mapping[str, int]) -> None:
        """Compare what was added since the last call, and `sizes` (bytes by region). Collective.

        Raises `ValueError` on every rank, naming each key on which ranks disagree and each rank's value, and as
        `RankGroup.gather`.
        """
        new = self._values[self._compared :]
        self._compared, self.complete = len(self._values), True
        if group is None:
            return
        mine = {key: value for values in new for key, value in values.items()}
        mine |= {f"bytes of {region}": num_bytes for region, num_bytes in sizes.items()}
        answers = group.gather("ExpertParallelContext.allocate", mine, table(_read), max_bytes=MAX_BYTES)
        problems = []
        for key in dict.fromkeys(key for answer in answers for key in answer):
            values = [answer.get(key, "not given") for answer in answers]
            if any(value != values[0] for value in values):
                problems.append(f"{key}: {describe_ranks(values)}")
        if problems:
            raise ValueError(f"agree: ranks disagree on {'; '.join(problems)}")


def _read(value: Any) -> Scalar | tuple[Scalar, ...]:
    """Reads a scalar, or a list of them as a tuple."""
    return tuple(scalar(entry) for entry in value) if isinstance(value, list) else scalar(value)


def _plain(key: str, value: object) -> Value:
    """`value` as JSON carries it: a tuple as a list, and numpy's float64 as a float."""
    if isinstance(value, list | tuple):
        return [_plain_scalar(key, entry) for entry in value]
    return _plain_scalar(key, value)


def _plain_scalar(key: str, value: object) -> Scalar:
    try:
        found = scalar(value)
    except ValueError as error:
        raise ValueError(f"agree: {key}: {error}") from None
    if found != found:
        raise ValueError(f"agree: {key}: expected a value that equals itself, got nan")
    if found is None or isinstance(found, bool):
        return found
    return next(kind(found) for kind in (int, float, str) if isinstance(found, kind))
