"""All that may happen in a small machine, breadth first: the way of the protocol's models to what is wrong with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

State = TypeVar("State")


class Violation(Exception):
    """What must not happen, in the turn that is named with it."""

    def __init__(self, what: str, *turn: Any) -> None:
        super().__init__(what)
        self.turn = turn


@dataclass(frozen=True)
class Finding:
    """What came of an exploration: `what` is `right` or what went wrong, `turns` the shortest way there."""

    what: str
    turns: tuple[Any, ...]
    states: int

    def __str__(self) -> str:
        return "\n".join([f"{self.what}; {self.states} states", *map(str, self.turns)])


def search(
    start: State, moves: Callable[[State], Iterable[tuple[Any, State]]], check_end: Callable[[State], None]
) -> Finding:
    """Every state that can be reached, each once, until one of the functions raises `Violation`.

    Args:
        moves: turns that may be next in a state, and the states after them.
        check_end: of a state without any.
    """
    came_by: dict[State, tuple[State, Any] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        moved = False
        try:
            for turn, after in moves(state):
                moved = True
                if after not in came_by:
                    came_by[after] = (state, turn)
                    queue.append(after)
            if not moved:
                check_end(state)
        except Violation as violation:
            turns = list(violation.turn)
            while (step := came_by[state]) is not None:
                state, turn = step
                turns.insert(0, turn)
            return Finding(str(violation), tuple(turns), len(came_by))
    return Finding("right", (), len(came_by))
