"""Ranks that are killed at random moments of a job, and what their peers say; `tests.support.kills` makes more."""

from __future__ import annotations

import random

import pytest

from tests.support import kills
from tests.support.kills import Fate, Kill, by_part, faults_of, judge, left_in_shared_memory, needless, run_job

pytestmark = pytest.mark.cpu_only

KILLS = 10
JOBS = 2


def test_the_others_name_a_rank_that_is_killed_and_nothing_is_left(seed: int) -> None:
    before = left_in_shared_memory()
    results = kills.run_kills(KILLS, seed, JOBS)
    faults = [fault for kill, fates in results for fault in faults_of(kill, fates)]
    assert len(results) == KILLS and not faults, "\n".join(faults)
    assert left_in_shared_memory() <= before


def test_a_job_passes_every_part(tmp_path: object) -> None:
    """Otherwise no rank would be killed there."""
    kills.prepare()
    for transport in kills.TRANSPORTS:
        places = by_part(kills.undisturbed(transport))
        if transport == "hierarchical":
            assert not places.pop("replacement")
        assert all(places.values()), places
        assert kills.LAST_MEETING in places["close"]


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (("error", 1, "PeerTimeoutError: rank 1 did not answer"), "named"),
        (("error", 0, "PeerAbortedError: rank 0 gave up: rank 2, 1 did not come"), "told"),
        (("error", 0, "PeerTimeoutError: rank 0, 12 did not come"), "wrong: it names rank 0"),
        (("error", -1, "PeerTimeoutError: a rank did not take part"), "wrong: it names rank -1"),
        (("other", -1, "RuntimeError: rank 1"), "wrong: no public error"),
        (("clean",), "clean"),
    ],
)
def test_what_counts_as_naming_a_rank(said: tuple[str, int, str], outcome: str) -> None:
    fate = Fate()
    judge(Kill("shared", "agent", 3, victim=1), fate, *said)
    assert fate.outcome == outcome


def test_nobody_is_needed_from_the_last_meeting_on() -> None:
    at_once, later = Kill("shared", "agent", 3), Kill("shared", "agent", 3, delay_s=0.01)
    for kill in (at_once, later):
        assert not needless(kill, ["close"])
        assert needless(kill, ["close", kills.LAST_MEETING, "close: answered"])
    assert needless(later, [kills.LAST_MEETING]) and not needless(at_once, [kills.LAST_MEETING])


def test_ranks_of_other_hosts_than_the_stores_may_close_without_it() -> None:
    for host in ("rank 0", "agent"):
        kill = Kill("hierarchical", host, 4, victim=2)
        assert needless(kill, ["step: total, end (3)", "close"], rank=3) == (host == "rank 0")
        assert not needless(kill, ["step: total, end (3)"], rank=3)
    assert not needless(Kill("hierarchical", "rank 0", 4, victim=1), ["close"], rank=0)
    # Rank 0 has all that it needs of a victim of the other host, and takes the store with it.
    for host in kills.HOSTS:
        kill = Kill("hierarchical", host, 4, victim=3)
        assert needless(kill, ["step: relay, end (3)"], rank=2) == (host == "rank 0")
        assert not needless(kill, ["step: relay, end (2)"], rank=2)


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were no time given to survivors, all of them would be late."""
    kills.prepare()
    monkeypatch.setattr(kills, "SLACK_S", -kills.LIMIT_S)
    kill = Kill("shared", "agent", 2, victim=1, place="joined")
    faults = faults_of(kill, run_job(kill))
    assert len(faults) == 1 and "rank 0: wrong: named after" in faults[0]


def test_who_comes_late_to_its_wait_may_end_late() -> None:
    kill, limit_s = Kill("shared", "agent", 2, victim=0), kills.LIMIT_S + kills.SLACK_S
    assert not kills.late(kill, limit_s - 1, limit_s + 5)
    assert kills.late(kill, limit_s + 1, limit_s + 1)
    assert kills.late(kill, limit_s - 1, 2 * limit_s + 1)


def test_kills_are_chosen_at_random_from_all_parts() -> None:
    places = {transport: {part: [part] for part in kills.PARTS} for transport in kills.TRANSPORTS}
    chooser = random.Random(0)
    chosen = [kills.random_kill(chooser, places) for _ in range(200)]
    assert {kill.place for kill in chosen} == set(kills.PARTS)
    assert {(kill.transport, kill.host) for kill in chosen} == {(t, h) for t in kills.TRANSPORTS for h in kills.HOSTS}
    assert {(kill.world_size, kill.victim) for kill in chosen} == {(w, v) for w in (2, 3, 4) for v in range(w)}
