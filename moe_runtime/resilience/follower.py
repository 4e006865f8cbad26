"""What changes with the members of a context: a layer, as `Recovery` sees it."""

from __future__ import annotations

from typing import Protocol

Held = list[list[int]]
"""The experts of each member, slot by slot."""

Before = dict[int, list[int]]
"""The same, by the member's number."""


class FollowerMembers(Protocol):
    """The members of a layer, named by their numbers at the start, and what each of them holds."""

    began_whole: bool
    """Whether it was made with all ranks. Otherwise no rank that is out can come back."""

    def check(self, members: tuple[int, ...]) -> None:
        """Raise `ExpertsLostError` if they cannot go on: on all of them alike. Changes nothing."""

    def check_reload(self, members: tuple[int, ...]) -> None:
        """The same, and if this rank cannot load again what they lack."""

    def settled(self) -> Held | None:
        """What each current member holds; None until all of them have loaded experts that died again."""

    def take_as_present(self, members: tuple[int, ...], present: Held) -> None:
        """In a process that comes back: these are the members to whom it comes, and what they hold."""

    def expect(self, members: tuple[int, ...]) -> Before:
        """Plan for these members, some of them rejoining. What each previous member holds, by its id."""

    def settle(self) -> None:
        """All members have gone over."""


class Follower(Protocol):
    """What changes with the members of a context: a layer."""

    @property
    def _members(self) -> FollowerMembers: ...

    def _check_loaded(self) -> None:
        """Raise `ValueError` if it is not ready to take part in steps."""

    def _follow_members(self, members: tuple[int, ...], before: Before | None) -> None:
        """Go over to them, when there is memory for them; `before` as of `expect`, where some come back."""
