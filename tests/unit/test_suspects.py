"""Who keeps the others waiting, by what ranks say about whom they missed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from moe_runtime.comm.suspects import Suspects


class Board:
    def __init__(self, words: dict[int, bytes], lost: bool = False) -> None:
        self.words, self.lost = words, lost
        self.later: dict[int, bytes] = {}  # said after the first look

    def read(self) -> dict[int, bytes]:
        if self.lost:
            raise RuntimeError("store")
        found = dict(self.words)
        self.words |= self.later
        return found


def suspects(words: dict[int, str], lost: bool = False) -> Suspects:
    board = Board({rank: word.encode() for rank, word in words.items()}, lost)
    return Suspects(SimpleNamespace(world_size=6, number_board=lambda name: board))  # type: ignore[arg-type]


def test_the_last_of_a_chain_is_the_one() -> None:
    chain = suspects({0: "1 0", 1: "3 0", 2: "3 0"})
    assert [chain.culprit(rank, 0.0) for rank in (0, 1, 2, 3, 4)] == [3, 3, 3, 3, 4]


def test_ranks_that_wait_for_each_other_are_taken_at_their_word() -> None:
    assert suspects({0: "1 0", 1: "2 0", 2: "0 0"}).culprit(1, 0.0) == 1


def test_one_that_is_gone_is_known_at_once_and_others_are_heard_before() -> None:
    start = time.monotonic()
    assert suspects({1: "3 1"}).culprit(1, 60.0) == 3
    assert time.monotonic() - start < 30
    late = suspects({2: "1 0"})
    board: Any = late._board
    board.later = {1: b"5 0"}
    assert late.culprit(1, 1.0) == 5


def test_without_the_store_a_rank_keeps_what_it_knows() -> None:
    assert suspects({1: "3 1"}, lost=True).culprit(1, 60.0) == 1
    assert suspects({1: "77 1"}).culprit(1, 60.0) == 1
