"""Survivors that load experts again, of ranks that have left, and what becomes of them where that goes wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.build import random_expert
from moe_runtime.comm.errors import (
    ExpertsLostError,
    MoERuntimeError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    RankRemovedError,
)
from moe_runtime.comm.messages import integer
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.layer import MoELayer
from moe_runtime.resilience.lost_experts import LostExperts
from moe_runtime.resilience.recovery import is_recoverable
from moe_runtime.resilience.refill import refill
from moe_runtime.step import LayerStep
from moe_runtime.virtual import VirtualRanks
from tests.exchange.test_survivors import memberships
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOKENS, TOP_K, config, rank_input
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once

pytestmark = pytest.mark.cpu_only

WORLD = 3
SHORT_S = 2.0
"""A limit that ranks pass."""
Reload = Callable[[Sequence[int]], Experts]


class Survivors:
    """A rank's layers, of which rank 2 is to leave: the others lack its experts.

    Args:
        rank: this one.
        layers: how many.
        again: changes how the experts of a layer are loaded again; it gets how they would be.
        settings: of the context.
    """

    def __init__(self, rank: int, layers: int, again: Callable[[Reload], Reload], **settings: Any) -> None:
        limits: dict[str, Any] = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}
        self.context = ExpertParallelContext(transport="shared", on_failure="continue", **limits | settings)
        self.layers = [MoELayer(config(), self.context) for _ in range(layers)]
        for layer in self.layers:
            layer.load_random(0)
            layer.warm_up()
            assert layer._members.reload is not None
            layer._members.reload = again(layer._members.reload)
        self._mine = rank_input(0, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K)

    def release(self, rank: int) -> bool:
        """Whether rank 2, which leaves, is another than this `rank`."""
        if rank != 2:
            self.context.release([2])
            return True
        with pytest.raises(RankRemovedError):
            self.context.release([2])
        self.context.close()
        return False

    def step(self, layer: int = 0) -> torch.Tensor:
        given = self._mine
        return self.layers[layer](given.x, topk_idx=given.topk_idx, topk_weights=given.topk_weights)

    def until_it_fails(self) -> MoERuntimeError:
        """What a step raises at last."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                self.step()
            except MoERuntimeError as error:
                return error
        raise AssertionError("no step failed")


def load_too_slowly(rank: int, world: int) -> list[Any]:
    """Rank 1 is there and does not get its experts. What a step of each survivor raises, when, and who is in then."""
    may_load = threading.Event()

    def again(reload: Reload) -> Reload:
        return lambda ids: (rank != 1 or not ids or may_load.wait(PATIENCE_S)) and reload(ids)  # type: ignore[return-value]

    ranks = Survivors(rank, 1, again)
    if not ranks.release(rank):
        return []
    ranks.context.startup_timeout_s = SHORT_S
    began = time.monotonic()
    error = ranks.until_it_fails()
    took_s = time.monotonic() - began
    may_load.set()
    ranks.context.close()
    return [error, took_s, ranks.context.members, ranks.context.generation]


def test_a_step_does_not_wait_for_ever_for_a_rank_that_loads(get_pool: Any) -> None:
    """It ends the group: a rank that is there is not thrown out, and loading does not begin anew."""
    found = get_pool(WORLD).run(load_too_slowly)
    text = "layer 0: rank 1 has not loaded experts that died within 2 s"
    errors = [found[rank][0] for rank in (0, 1)]
    assert any(isinstance(error, PeerTimeoutError) and str(error) == text for error in errors), errors
    for rank in (0, 1):
        error, took_s, members, generation = found[rank]
        assert isinstance(error, PeerTimeoutError | PeerAbortedError) and text in str(error)
        assert error.phase == Phase.HOST and (members, generation) == ((0, 1), 1)
        assert SHORT_S / 2 < took_s < PATIENCE_S / 2


def load_one_layer_after_another(rank: int, world: int) -> tuple[tuple[int, ...], int]:
    """Each takes less than the limit, all of them take longer."""

    def again(reload: Reload) -> Reload:
        def slow(ids: Sequence[int]) -> Experts:
            time.sleep(SHORT_S * 0.3 if ids else 0)
            return reload(ids)

        return slow

    ranks = Survivors(rank, 4, again)
    if ranks.release(rank):
        ranks.context.startup_timeout_s = SHORT_S
        for layer in range(4):
            assert ranks.step(layer).isfinite().all()
        ranks.context.startup_timeout_s = PATIENCE_S
        ranks.context.close()
    return ranks.context.members, ranks.context.generation


def test_the_limit_is_one_of_a_step_and_not_of_all_layers(get_pool: Any) -> None:
    assert get_pool(WORLD).run(load_one_layer_after_another)[:2] == [((0, 1), 1)] * 2


def die_while_others_wait(rank: int, world: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Rank 1 dies as it loads experts of rank 2. Rank 0, which waits for it, goes on alone."""

    def again(reload: Reload) -> Reload:
        def loaded(ids: Sequence[int]) -> Experts:
            if rank == 1 and ids:
                time.sleep(0.5)  # Its own step waits by then.
                os.kill(os.getpid(), signal.SIGKILL)
            return reload(ids)

        return loaded

    ranks = Survivors(rank, 1, again, timeout_s=WITHOUT_ONE_S)
    if not ranks.release(rank):
        return (), torch.zeros(0)
    y = ranks.step()
    ranks.context.close()
    return ranks.context.members, y


def test_a_rank_that_dies_while_experts_are_loaded_is_missed_as_in_a_step() -> None:
    outcomes = run_once(die_while_others_wait, WORLD)
    assert outcomes[1].exitcode == -signal.SIGKILL and outcomes[0].error is None, outcomes[0].trace
    members, y = outcomes[0].result
    assert members == (0,) and y.isfinite().all()


@pytest.mark.parametrize(
    ("beats", "limits", "phase", "why"),
    [
        (0, (PATIENCE_S, 0.3), Phase.RECOVERY, "rank 1 is missed"),
        (1, (0.3, PATIENCE_S), Phase.RECOVERY, "rank 1 is missed"),
        (10**6, (PATIENCE_S, 0.3), Phase.HOST, "rank 1 has not loaded"),
    ],
    ids=["never came", "silent", "slow"],
)
def test_a_rank_that_is_gone_is_told_from_a_slow_one(
    beats: int, limits: tuple[float, float], phase: Phase, why: str
) -> None:
    """Rank 1 says so often that it waits too, with these limits of a step and of start-up.

    Survivors go on after an error of phase `RECOVERY` alone.
    """
    mine, others = memberships(2)
    context: Any = SimpleNamespace(lost_experts="wait", device="cpu", rank=0, members=(0, 1), recovery=None)
    (context.timeout_s, context.startup_timeout_s), context._raise_failure = limits, lambda: None
    context.recovery = SimpleNamespace(membership=mine, step_number=1)
    loading: Future[None] = Future()
    loading.set_result(None)
    lost = LostExperts(context, 0, [1], 2, [[0], []], loading)
    stop = threading.Event()

    def beat() -> None:
        for count in range(beats):
            others.put("layer 0 waits/1", count)
            if stop.wait(0.02):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    while beats and others.get("layer 0 waits/1", integer(0)) is None:
        time.sleep(0.01)
    with pytest.raises(PeerTimeoutError, match=f"^layer 0: {why}") as caught:
        lost.ended()
    stop.set()
    thread.join()
    assert caught.value.phase == phase and is_recoverable(caught.value) == (phase == Phase.RECOVERY)
    assert caught.value.rank == 1


def cannot_load(rank: int, world: int, lost: str) -> list[Any]:
    """Rank 1 cannot load its part. What a step of each survivor raises, and the next call."""

    def again(reload: Reload) -> Reload:
        def loaded(ids: Sequence[int]) -> Experts:
            if rank == 1 and ids:
                raise ValueError("the folder is gone")
            return reload(ids)

        return loaded

    ranks = Survivors(rank, 1, again, lost_experts=lost)
    if not ranks.release(rank):
        return []
    error = ranks.until_it_fails()
    with pytest.raises(ExpertsLostError) as later:
        ranks.step()
    ranks.context.close()
    return [error, str(later.value)]


@pytest.mark.parametrize("lost", ["wait", "drop"])
def test_experts_that_one_rank_cannot_load_end_all_of_them(lost: str, get_pool: Any) -> None:
    found = get_pool(WORLD).run(cannot_load, lost)
    for error, later in found[:2]:
        text = "layer 0: expert 7, 8, 9 died, and cannot be loaded again: rank 1: the folder is gone"
        assert isinstance(error, ExpertsLostError) and str(error) == later == text


def load_other_weights(rank: int, world: int, lost: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller loads new experts while those of a rank that has left are loaded. `y` of then, and of a new layer."""

    def again(reload: Reload) -> Reload:
        return lambda ids: reload(ids) if not ids or loaded.wait(PATIENCE_S) else reload(())

    loaded = threading.Event()
    ranks = Survivors(rank, 2, again, lost_experts=lost)
    if not ranks.release(rank):
        return torch.zeros(0), torch.zeros(0)
    for layer in ranks.layers:
        # The first layer is still loading its lost experts, the second has not begun.
        layer.load_experts(random_expert(config(), 7, expert) for expert in layer.local_experts)
        assert layer._members.reload is None
    while lost == "drop" and any(layer._members.lost is not None for layer in ranks.layers):
        for number in range(2):
            ranks.step(number)
    found = ranks.step(0), ranks.step(1)
    loaded.set()
    ranks.context.close()
    return found


@pytest.mark.parametrize("lost", ["wait", "drop"])
def test_weights_that_are_loaded_meanwhile_are_taken(lost: str, get_pool: Any) -> None:
    results = get_pool(WORLD).run(load_other_weights, lost)[:2]
    held = [range(*pair) for pair in pairwise(expert_starts(EXPERTS, WORLD))]

    def fill(layer: MoELayer) -> None:
        layer.load_experts(random_expert(config(), 7, expert) for expert in layer.local_experts)

    with VirtualRanks(config(), 2, fill, placement=refill(held[:2], EXPERTS)) as ranks:
        given = [rank_input(0, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K) for rank in range(2)]
        expected = ranks([one.x for one in given], [(one.topk_idx, one.topk_weights) for one in given])
    for found, y in zip(results, expected, strict=True):
        assert_same_bits(found[0], y)
        assert_same_bits(found[1], y)


def repeat_a_step_that_drops(rank: int, world: int) -> list[tuple[int, int]]:
    """A step that goes without experts fails at its end, and is run again; and once more for others. Counts of each."""
    may_load = threading.Event()

    def again(reload: Reload) -> Reload:
        return lambda ids: reload(ids) if not ids or may_load.wait(PATIENCE_S) else reload(())

    ranks = Survivors(rank, 1, again, lost_experts="drop")
    if not ranks.release(rank):
        return []
    (layer,) = ranks.layers
    ranks.step()
    counts = [layer.without_expert]
    failed: list[int] = []

    def fail_once(layer: MoELayer, step: LayerStep) -> None:
        layer._combine_recv(step)
        if not failed:
            failed.append(1)
            raise PeerTimeoutError("a rank is missed", -1, Phase.RECOVERY)

    layer._stages = tuple(
        stage._replace(run=fail_once) if stage.phase == "combine_recv" else stage for stage in layer._stages
    )
    ranks.step()
    counts.append(layer.without_expert)
    assert ranks.context.steps_repeated == 1 and ranks.context.generation == 2
    assert ranks.context.recovery is not None and ranks.context.recovery._last is not None
    ranks.context.recovery._last()  # As for a rank that is one step behind.
    counts.append(layer.without_expert)
    may_load.set()
    ranks.context.close()
    return counts


def test_a_step_that_is_run_again_counts_once_what_it_drops(get_pool: Any) -> None:
    for first, second, for_others in get_pool(WORLD).run(repeat_a_step_that_drops)[:2]:
        assert first[0] > 0 and second == for_others == (2 * first[0], 2 * first[1])
