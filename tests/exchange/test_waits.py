"""Waits by peer: a slow rank is named with its cause, on processes and emulated; bits stay, warm-up counts nothing."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import Experts
from moe_runtime.kernels.exchange import reference
from moe_runtime.kernels.exchange.waits import (
    BEGAN,
    COMBINE_MAX,
    COMBINE_NS,
    DISPATCH_MAX,
    DISPATCH_NS,
    DISPATCH_WAITS,
    FIELDS,
    HEAD,
    LATE_NS,
    STEP_NS,
    STEPS,
)
from moe_runtime.layer import MoELayer
from moe_runtime.observation import waits as observed
from moe_runtime.observation.waits import (
    LATE,
    SLOW_TO_RETURN,
    SLOW_TO_SEND,
    PeerWaits,
    WaitCounts,
    WaitLog,
    plot_waits,
    slowest_rank,
    total,
)
from moe_runtime.virtual import VirtualRanks, virtual_contexts
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import HIDDEN, TOKENS, config, rank_input

PAUSE_S, SLOW_STEPS = 0.3, 3
"""Longer in all than a busy machine holds up any rank."""


def be_slow(rank: int, world: int, slow: int, cause: str, seed: int) -> Any:
    """Steps in which `slow` sleeps: between them, while it sends, or in its experts."""
    quantized, run = reference.quantized, Experts._run
    with ExpertParallelContext(transport="shared", timeout_s=60.0) as context:
        layer = MoELayer(config("bf16", token_buckets=[4]), context)
        layer.load_random(seed)
        waits = layer.count_waits()
        layer.warm_up()
        assert total(waits.read().values()).steps == 0

        def pause() -> None:
            if rank == slow:
                time.sleep(PAUSE_S)

        def quantize(*args: Any) -> Any:
            pause()
            return quantized(*args)

        def run_experts(*args: Any) -> None:
            pause()
            run(*args)

        if cause == SLOW_TO_SEND:
            reference.quantized = quantize
        elif cause == SLOW_TO_RETURN:
            Experts._run = run_experts  # type: ignore[method-assign]
        try:
            for step in range(SLOW_STEPS):
                if cause == LATE:
                    pause()
                layer(rank_input(seed + step, rank, 4, HIDDEN, 10, 3).x, max_tokens=4)
        finally:
            reference.quantized, Experts._run = quantized, run  # type: ignore[method-assign]
        by_bucket = waits.read()
        assert by_bucket[TOKENS].steps == 0 and by_bucket[4].steps == SLOW_STEPS
        gathered = waits.gather()
        assert gathered[rank] == by_bucket[4]
        return gathered


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("world", "cause"),
    [
        *((2, LATE), (2, SLOW_TO_SEND), (2, SLOW_TO_RETURN)),
        *((4, LATE), (4, SLOW_TO_SEND), (4, SLOW_TO_RETURN), (8, LATE), (8, SLOW_TO_SEND)),
    ],
)
def test_a_slow_rank_is_named(world: int, cause: str, get_pool: Any, seed: int) -> None:
    slow = seed % world
    results = get_pool(world).run(be_slow, slow, cause, seed)
    assert all(found == results[0] for found in results)
    found = slowest_rank(results[0])
    assert found is not None and (found.rank, found.cause) == (slow, cause), str(found)
    # The others waited for it in each step: most of the pause, but for what they themselves took.
    for rank, counts in enumerate(results[0]):
        of_slow = counts.peers[slow]
        assert counts.peers[rank] == PeerWaits()
        if rank != slow:
            longest = of_slow.combine_max_ns if cause == SLOW_TO_RETURN else of_slow.dispatch_max_ns
            assert longest > PAUSE_S * 1e9 / 2 and of_slow.total_ns <= counts.step_ns


def ranks_of(waits_for: dict[tuple[int, int], PeerWaits], world: int, steps: int = 10) -> list[WaitCounts]:
    rows = ([waits_for.get((rank, peer), PeerWaits()) for peer in range(world)] for rank in range(world))
    return [WaitCounts(steps, 10_000, tuple(row)) for row in rows]


@pytest.mark.cpu_only
def test_the_summary_tells_causes_apart() -> None:
    ranks = ranks_of(
        {(0, 1): PeerWaits(100, 90, 2, 80), (2, 1): PeerWaits(300, 90, 2, 100, 50), (0, 2): PeerWaits(combine_ns=90)}, 3
    )
    found = slowest_rank(ranks)
    # 450 ns in 20 steps of two ranks; 180 late, 220 while it sent, 50 in combine.
    assert found == observed.SlowRank(1, 22.5, 450 / 20_000, SLOW_TO_SEND)
    assert str(found) == "0.0 us of a step (2.2%) for rank 1, slow to send its tokens"
    assert slowest_rank(ranks_of({}, 2)) is None and slowest_rank(ranks_of({}, 1)) is None
    assert ranks[2].share(1) == 350 / 10_000 and WaitCounts(0, 0, (PeerWaits(),)).share(0) == 0
    with pytest.raises(ValueError, match="ranks: expected counts of all 3 ranks, got 2"):
        slowest_rank(ranks[:2])
    with pytest.raises(ValueError, match="ranks: expected a WaitCounts"):
        slowest_rank([1])  # type: ignore[list-item]


@pytest.mark.cpu_only
def test_counts_add_and_subtract() -> None:
    one, two = PeerWaits(1, 2, 3, 4, 5, 6, 7), PeerWaits(10, 1, 30, 40, 50, 60, 70)
    a, b = WaitCounts(1, 2, (one,)), WaitCounts(10, 20, (two,))
    assert total([a, b]) == WaitCounts(11, 22, (PeerWaits(11, 2, 33, 44, 55, 60, 77),))
    assert b - a == WaitCounts(9, 18, (PeerWaits(9, 2, 27, 36, 45, 60, 63),))
    assert WaitCounts.of_words(b.words) == b
    with pytest.raises(ValueError, match="other: expected waits for 1 ranks, got 2"):
        a + WaitCounts(1, 1, (one, two))


@pytest.mark.cpu_only
def test_a_line_is_logged_when_it_is_due(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    monkeypatch.setattr(observed, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    context = virtual_contexts(2)[0]
    waits = MoELayer(config(), context).count_waits()
    log, words = WaitLog(waits, 60.0), waits._polled.words
    with caplog.at_level(logging.INFO, "moe_runtime.observation.waits"):
        words[STEPS], words[STEP_NS] = 4, 8_000_000
        words[HEAD + FIELDS + DISPATCH_NS], words[HEAD + FIELDS + LATE_NS] = 1_600_000, 1_500_000
        log.tick()
        assert not caplog.records
        now = 161.0
        log.tick()
        log.tick()
        now = 222.0
        log.tick()
    assert [record.message for record in caplog.records] == [
        "waits in 4 steps: most of them 400.0 us of a step (20.0%) for rank 1, late to enter its steps",
        "waits in 0 steps: none",
    ]


class Copies:
    """In place of the event of a GPU: copies end when they may."""

    ended = True

    def query(self) -> bool:
        return self.ended

    def record(self, stream: object) -> None:
        """Nothing is queued."""


@pytest.mark.cpu_only
def test_a_line_is_of_counts_that_were_copied_when_it_was_due(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, whose counts reach the host later. After a death they are from zero, and ranks keep their names."""
    now = 0.0
    monkeypatch.setattr(observed, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    context, copies = virtual_contexts(3)[0], Copies()
    layer = MoELayer(config(), context)
    waits = layer.count_waits()
    waits._polled._copied = copies  # type: ignore[assignment]

    def step(number: int, peer: int) -> None:
        words = waits._polled.words
        words[STEPS] += number
        words[STEP_NS] += number * 100_000
        words[HEAD + peer * FIELDS + DISPATCH_NS] += number * 10_000

    step(1000, 1)
    log, lines = WaitLog(waits, 60.0), list[str]()
    with caplog.at_level(logging.INFO, "moe_runtime.observation.waits"):
        for minute, count in enumerate((10, 20, 30), 1):
            step(count, 2)
            now = 61.0 * minute
            waits.poll()  # A copy that somebody else began is not the one.
            copies.ended = False
            log.tick()
            assert len(caplog.records) == len(lines)
            copies.ended = True
            log.tick()
            log.tick()
            lines.append(
                f"waits in {count} steps: most of them 10.0 us of a step (10.0%) for rank 2, slow to send its tokens"
            )
            assert [record.message for record in caplog.records] == lines
        # Rank 1 dies and comes back between two lines, as `recovery` tells the layer.
        monkeypatch.setattr(type(context), "members", (0, 5, 7))
        waits._begin(layer.dispatchers)
        waits._begin(layer.dispatchers)
        waits._polled._copied = copies  # type: ignore[assignment]
        step(3, 1)
        now = 300.0
        log.tick()
        log.tick()
    assert caplog.records[-1].message.startswith("waits in 3 steps: most of them 10.0 us of a step (10.0%) for rank 5,")


@pytest.mark.cpu_only
def test_a_heat_map_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_waits(ranks_of({(0, 1): PeerWaits(5000)}, 2), tmp_path / "waits.svg")
    assert "waits for rank" in (tmp_path / "waits.svg").read_text()


@pytest.mark.cpu_only
def test_counts_of_other_ranks_are_refused(tmp_path: Path) -> None:
    two, three = ranks_of({}, 2), ranks_of({}, 3)
    for message, wrong in {
        "ranks: expected counts of at least one rank, got none": [],
        "ranks: expected a WaitCounts, got": [1],
        "ranks: expected counts of all 2 ranks, got 1": two[:1],
        "ranks: expected counts of all 3 ranks, got 2": [two[0], three[1]],
    }.items():
        with pytest.raises(ValueError, match=message):
            plot_waits(wrong, tmp_path / "waits.svg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="counts: expected at least one WaitCounts"):
        total([])
    with pytest.raises(ValueError, match=r"peer: expected .*, got 2"):
        two[0].share(2)


def test_waits_change_no_bit(device: torch.device, seed: int) -> None:
    """Steps of virtual ranks, which begin a stage when all have ended the one before: hardly any wait."""
    world = 3
    inputs = [rank_input(seed, rank, count, HIDDEN, 10, 3).to(device).x for rank, count in enumerate((5, 0, 12))]
    with VirtualRanks(config("nvfp4"), world, lambda layer: layer.load_random(1), device=device) as ranks:
        expected = ranks(inputs)
        waits = [layer.count_waits() for layer in ranks.layers]
        assert ranks.layers[0].count_waits() is waits[0]
        for found, y in zip(ranks(inputs), expected, strict=True):
            assert_same_bits(found, y)
        for rank, counted in enumerate(waits):
            counts = counted.read()[TOKENS]
            assert counts.steps == 1 and counts.step_ns > 0 and counts.peers[rank] == PeerWaits()
        with pytest.raises(ValueError, match="context: expected ranks in processes of their own"):
            waits[0].gather()


@pytest.mark.cpu_only
def test_a_rank_alone_waits_for_nobody_and_hosts_are_refused() -> None:
    with virtual_contexts(1)[0] as context:
        layer = MoELayer(config(), context)
        layer.load_random(1)
        waits = layer.count_waits()
        layer(torch.zeros(2, HIDDEN, dtype=torch.bfloat16))
        assert waits.gather() == [WaitCounts(0, 0, (PeerWaits(),))]
    with VirtualRanks(config(), 4, lambda layer: layer.load_random(1), num_hosts=2) as ranks:
        with pytest.raises(ValueError, match="transport: expected ranks of one host"):
            ranks.layers[0].count_waits()
        assert ranks.layers[0].waits is None


def test_the_words_of_a_peer_lie_side_by_side() -> None:
    """As waits.cuh has them."""
    assert (STEPS, STEP_NS, BEGAN, HEAD) == (0, 1, 2, 4)
    assert (DISPATCH_MAX, DISPATCH_WAITS) == (DISPATCH_NS + 1, DISPATCH_NS + 2) and COMBINE_MAX == COMBINE_NS + 1
