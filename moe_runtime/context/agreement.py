"""What ranks compare at start-up: the values that each layer needs equal everywhere, and the sizes of the regions."""

from __future__ import annotations

from collections.abc import Mapping

from moe_runtime.comm.bootstrap import RankGroup, describe_ranks


class Agreement:
    """Values that must be equal on all ranks of a group. Each is compared once, in the order of registration."""

    def __init__(self) -> None:
        self._values: list[dict[str, object]] = []
        self._compared = 0

    def add(self, values: Mapping[str, object], about: str | None) -> None:
        """Register `values` (picklable, comparable) of `about`; None numbers the registration."""
        name = f"agreement {len(self._values)}" if about is None else about
        self._values.append({f"{key} ({name})": values[key] for key in sorted(values)})

    @property
    def complete(self) -> bool:
        """Whether every registered value has been compared."""
        return self._compared == len(self._values)

    def compare(self, group: RankGroup | None, sizes: Mapping[str, int]) -> None:
        """Compare what was added since the last call, and `sizes` (bytes by region). Collective.

        Raises `ValueError` on every rank, naming each key on which ranks disagree and each rank's value, and as
        `RankGroup.gather`.
        """
        new, self._compared = self._values[self._compared :], len(self._values)
        if group is None:
            return
        mine = {key: value for values in new for key, value in values.items()}
        mine |= {f"bytes of {region}": num_bytes for region, num_bytes in sizes.items()}
        answers = group.gather("ExpertParallelContext.allocate", mine)
        problems = []
        for key in dict.fromkeys(key for answer in answers for key in answer):
            values = [answer.get(key, "not given") for answer in answers]
            if any(value != values[0] for value in values):
                problems.append(f"{key}: {describe_ranks(values)}")
        if problems:
            raise ValueError(f"agree: ranks disagree on {'; '.join(problems)}")
