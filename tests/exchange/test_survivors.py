"""Ranks that go on after the death of others; `tests.support.survivors` makes more and chooses them at random."""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.build import random_expert
from moe_runtime.checkpoints import expert_loader
from moe_runtime.comm.errors import ExpertsLostError, MoERuntimeError, RankRemovedError, RoutingError
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.kernels.gemm import grouped_gemm
from moe_runtime.kernels.gemm.expanded_weights import StoredWeights
from moe_runtime.kernels.gemm.plan import GemmPlan
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.observation.metrics import metrics_text
from moe_runtime.placement.placement import Placement
from moe_runtime.resilience.membership import Membership
from moe_runtime.resilience.refill import missing_experts, refill
from moe_runtime.step import LayerStep
from moe_runtime.virtual import VirtualRanks
from tests.support import survivors
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOKENS, TOP_K, RankInput, config, placements, rank_input
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once
from tests.support.survivors import Fate, Fault, Job, Result, faults_of, places, run_job

pytestmark = pytest.mark.cpu_only

PARALLEL = 5
HALF_DONE = 3
"""The job in which ranks 0 and 1 have the result of the step, and rank 3 has not."""
JOBS = [
    Job(4, (Fault(2, "step (3)"),)),
    Job(4, (Fault(3, "store, end (10)"),)),
    Job(4, (Fault(0, "dispatch_recv, end (3)"),), replicas=1),
    Job(4, (Fault(2, "flag, begin (11)"),)),
    Job(4, (Fault(0, "store, end (10)"), Fault(2, "combine_recv, begin (3)"))),
    Job(4, (Fault(3, "combine_send, begin (3)"), Fault(1, "agree, end (1)"))),
    Job(4, (Fault(3, "store, end (10)", stop=True),)),
    Job(4, (Fault(0, "store, end (10)"), Fault(2, "combine_recv, begin (3)")), same_memory=True),
    Job(4, (Fault(3, "flag, begin (10)"), Fault(1, "agree, end (1)")), same_memory=True),
    Job(4, (Fault(1, "combine_recv, begin (3)"),), rejoin=True),
    Job(4, (Fault(2, "dispatch_send, end (3)"),), replicas=1, rejoin=True),
    Job(4, (Fault(1, "combine_send, begin (3)"), Fault(2, "make memory, end (1)", stop=True))),
    Job(4, (Fault(1, "combine_recv, begin (3)"),), rejoin=True, meanwhile=Fault(1, "move, begin (2)")),
    Job(4, (Fault(1, "step (3)"),), replicas=1, rejoin=True, meanwhile=Fault(2, "move experts, begin (2)")),
]


@pytest.fixture(scope="module")
def fates() -> list[list[Fate]]:
    """Of all ranks of each of `JOBS`."""
    survivors.prepare()
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(run_job, JOBS))


def test_survivors_go_on_with_the_bits_of_the_smaller_group(fates: list[list[Fate]]) -> None:
    faults = [f"{job}: {fault}" for job, found in zip(JOBS, fates, strict=True) for fault in faults_of(job, found)]
    assert not faults, "\n".join(faults)


def test_a_rank_that_has_its_result_repeats_the_step_for_the_others(fates: list[list[Fate]]) -> None:
    groups = [fates[HALF_DONE][rank].results[2].members for rank in JOBS[HALF_DONE].survivors]
    assert groups == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 3)]


def test_other_bits_and_other_groups_are_found(fates: list[list[Fate]]) -> None:
    job, found = JOBS[0], copy.deepcopy(fates[0])
    right = found[1].results[4]
    for wrong, message in (
        (Result(4, right.members, right.at, bytes(len(right.y))), "other bits"),
        (Result(4, (0, 1, 2, 3), right.at, survivors.expected(4, 3, (0, 1, 2, 3), 4)[1]), "its group grew"),
        (Result(3, right.members, right.at, right.y), "other bits"),
    ):
        found[1].results[4] = wrong
        assert any(message in fault for fault in faults_of(job, found)), message


def test_faults_are_chosen_at_random_from_all_places() -> None:
    chooser = random.Random(0)
    jobs = [survivors.random_job(chooser) for _ in range(3000)]
    faults = [fault for job in jobs for fault in job.faults]
    assert {fault.place for fault in faults} == {*places(4), *places(8), *survivors.during_recovery()}
    meanwhile = [(job.meanwhile.place, job.meanwhile.rank == job.faults[0].rank) for job in jobs if job.meanwhile]
    assert set(meanwhile) == {(place, new) for place in survivors.during_rejoin() for new in (True, False)}
    assert {fault.stop for fault in faults} == {True, False} and {fault.rank for fault in faults} == set(range(8))


def lose(rank: int, world: int, replicated: bool) -> tuple[int, int]:
    """Rank 1 dies in the second step. Without replicas the others cannot go on."""
    with ExpertParallelContext(
        transport="shared", timeout_s=WITHOUT_ONE_S, startup_timeout_s=PATIENCE_S, on_failure="continue"
    ) as context:
        placement = placements(world, spare=EXPERTS)[0] if replicated else None
        layer = MoELayer(config(), context, placement=placement)
        layer.load_experts([random_expert(config(), 0, expert) for expert in layer.local_experts])
        stale = TokenDispatcher.from_config(context, config())
        counters, ring = layer.count_steps(), torch.zeros(4, TOKENS, TOP_K, dtype=torch.int16)
        routes = layer.record_routes(ring)
        layer.warm_up()
        mine = rank_input(0, rank, 3, HIDDEN, EXPERTS, TOP_K)
        layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        assert y.isfinite().all()
        # The second step was run twice, and counts once.
        counts = counters.read()
        assert (counts.steps, counts.tokens, sum(counts.expert_tokens)) == (2, 6, int((mine.topk_idx >= 0).sum()) * 2)
        recorded = routes.read()
        assert [step.step for step in recorded] == [0, 1] and routes.overwritten == 0
        assert torch.equal(recorded[1].topk_idx, mine.topk_idx.int())
        with pytest.raises(ValueError, match=r"context: its ranks have changed .* \(generation 0, now 1\)"):
            stale.dispatch(*mine)
        assert context.rank_states == {0: "in", 1: "out"} and context.members == (0,)
        return context.rank, context.steps_repeated


def test_experts_of_no_checkpoint_that_died_end_the_group_and_are_named() -> None:
    outcomes = run_once(lose, 3, False)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, ExpertsLostError), outcomes[rank]
        assert "layer 0: no rank that is left holds expert 4, 5, 6, which did not come from" in str(error)


def test_one_rank_goes_on_alone_and_refuses_dispatchers_of_before() -> None:
    assert run_once(lose, 2, True)[0].result == (0, 1)


LOST_STEPS, DEATH, LOADED = 9, 2, 5
"""Steps; in which one rank 1 dies; and before which one rank 2 may load, where tokens do without experts till then."""
Step = tuple[tuple[int, ...], bool, torch.Tensor]


def lose_experts(rank: int, world: int, folder: str, fmt: str, lost: str) -> tuple[list[Step], tuple[int, int]]:
    """Rank 1 dies with experts that no other has. The members, whether experts are missing, and `y`, by step."""
    may_load = threading.Event()
    with ExpertParallelContext(
        transport="shared",
        timeout_s=WITHOUT_ONE_S,
        startup_timeout_s=PATIENCE_S,
        on_failure="continue",
        lost_experts=lost,
    ) as context:
        layer = MoELayer.from_checkpoint(folder, context=context, **config(fmt).model_dump())
        layer.warm_up()
        load_again = layer._members._load_again

        def load_when_told(*arguments: Any) -> None:
            assert rank != 2 or lost == "wait" or may_load.wait(PATIENCE_S)
            load_again(*arguments)

        layer._members._load_again = load_when_told  # type: ignore[method-assign]
        results = []
        for step in range(LOST_STEPS):
            if step == DEATH and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == LOADED:
                may_load.set()
                if layer._members.lost is not None:
                    layer._members.lost._loading.result(PATIENCE_S)
            mine = rank_input(step, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K)
            y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
            results.append((context.members, layer._members.lost is not None, y))
        without = layer.without_expert
        # The layer has a placement now: it refuses ids otherwise than before, and names them as they came.
        mine.topk_idx[0, 0] = EXPERTS
        with pytest.raises(RoutingError, match=f"expert id {EXPERTS} of token 0 of rank "):
            context.admit()  # the other rank has ended the step before
            layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        return results, without


def lose_of_many(rank: int, world: int, folder: str, most: int) -> list[Step]:
    """`lose_experts` as on GPUs, which multiply at most `most` experts in the order of their kernels."""
    expert_loader.MAX_PREPACKED_EXPERTS = most
    PrepackedWeights.wanted = staticmethod(  # type: ignore[method-assign]
        lambda w, engine="auto": w.num_experts <= most
    )
    multiply = grouped_gemm._readable

    def checked(w: StoredWeights, how: GemmPlan) -> StoredWeights:
        assert isinstance(w, ExpertWeights) or w.num_experts <= most, "more than the kernels take"
        return multiply(w, how)

    grouped_gemm._readable = checked
    return lose_experts(rank, world, folder, "nvfp4", "wait")[0]


def routed_without(gone: set[int], given: RankInput) -> RankInput:
    """The routing without experts that are gone, in plain loops."""
    ids, weights = given.topk_idx.clone(), given.topk_weights.clone()
    for token in range(len(ids)):
        known = [k for k in range(TOP_K) if ids[token, k] >= 0]
        stay = [k for k in known if int(ids[token, k]) not in gone]
        if len(stay) < len(known):
            factor = given.topk_weights[token, known].sum() / given.topk_weights[token, stay].sum()
            ids[token, [k for k in known if k not in stay]] = -1
            weights[token] *= factor
    return RankInput(given.x, ids, weights)


@pytest.mark.parametrize(("fmt", "lost"), [("nvfp4", "wait"), ("bf16", "drop")])
def test_experts_without_a_replica_are_loaded_again(fmt: str, lost: str, tmp_path: Path) -> None:
    write_qwen3_moe_checkpoint(tmp_path, config(), seed=0)
    outcomes = run_once(lose_experts, 3, str(tmp_path), fmt, lost)
    starts = expert_starts(EXPERTS, 3)
    gone = set(range(starts[1], starts[2]))
    held = [range(*pair) for pair in pairwise(starts)]
    whole = expected_steps((0, 1, 2), None, tmp_path, fmt, set())
    without = expected_steps((0, 2), refill([held[0], held[2]], EXPERTS), tmp_path, fmt, gone)
    after = expected_steps((0, 2), refill([held[0], held[2]], EXPERTS), tmp_path, fmt, set())
    ends = [[], []] if lost == "wait" else [list(range(DEATH, LOADED + 1)), list(range(DEATH, LOADED + 2))]
    all_dropped = []
    for number, rank in enumerate((0, 2)):
        assert outcomes[rank].error is None, outcomes[rank].trace
        steps, (choices, tokens) = outcomes[rank].result
        all_dropped.append([step for step, (_, missing, _) in enumerate(steps) if missing])
        count = 0
        for step, (members, missing, y) in enumerate(steps):
            assert members == ((0, 1, 2) if step < DEATH else (0, 2))
            found = whole[step][rank] if step < DEATH else (without if missing else after)[step][number]
            assert_same_bits(y, found, f"rank {rank}, step {step}, missing {missing}")
            given = rank_input(step, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K)
            count += sum(expert in gone for expert in given.topk_idx.flatten().tolist()) if missing else 0
        assert choices == count and (tokens > 0) == (lost == "drop") and tokens <= choices
    # Rank 0 may see at once, or in its next step, that all have loaded; both go over in the step after that.
    assert all_dropped[0] == all_dropped[1] and all_dropped[0] in ends


@pytest.mark.parametrize("most", [3, 4])
def test_more_experts_than_are_prepacked(most: int, tmp_path: Path) -> None:
    """On a rank before the death, or on all ranks after it alone: their order in memory is the same all the time."""
    write_qwen3_moe_checkpoint(tmp_path, config(), seed=0)
    outcomes = run_once(lose_of_many, 3, str(tmp_path), most)
    starts = expert_starts(EXPERTS, 3)
    assert [last - first for first, last in pairwise(starts)] == [4, 3, 3]
    held = [range(*pair) for pair in pairwise(starts)]
    whole = expected_steps((0, 1, 2), None, tmp_path, "nvfp4", set())
    after = expected_steps((0, 2), refill([held[0], held[2]], EXPERTS), tmp_path, "nvfp4", set())
    for number, rank in enumerate((0, 2)):
        assert outcomes[rank].error is None, outcomes[rank].trace
        for step, (_, _, y) in enumerate(outcomes[rank].result):
            assert_same_bits(y, whole[step][rank] if step < DEATH else after[step][number], f"rank {rank}, step {step}")


def expected_steps(
    members: tuple[int, ...], placement: Placement | None, folder: Path, fmt: str, gone: set[int]
) -> list[list[torch.Tensor]]:
    """`y` by step and rank, of virtual ranks that had this placement from the start, and no tokens for `gone`."""
    with VirtualRanks(
        config(fmt), len(members), lambda layer: layer.load_checkpoint(folder, 0), placement=placement
    ) as ranks:
        steps = []
        for step in range(LOST_STEPS):
            given = [rank_input(step, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K) for rank in members]
            given = [routed_without(gone, one) for one in given]
            steps.append(ranks([i.x for i in given], [(i.topk_idx, i.topk_weights) for i in given]))
        return steps


def test_new_slots_of_survivors() -> None:
    for world in range(2, 9):
        for experts in (8, 10, 16, 17):
            starts = expert_starts(experts, world)
            held = [tuple(range(*pair)) for pair in pairwise(starts)]
            for dead in range(world):
                left = [ids for rank, ids in enumerate(held) if rank != dead]
                placement = refill(left, experts)  # has each expert, and none twice on a rank
                gone = set(missing_experts(left, experts))
                for rank, ids in enumerate(left):
                    slots = placement.rank_experts(rank)
                    assert slots[: len(ids)] == ids and set(slots[len(ids) :]) <= gone
                assert placement.slots_per_rank <= -(-experts // (world - 1)) + 1


def die_in_warm_up(rank: int, world: int, death: int, folder: str) -> tuple[int, int, torch.Tensor, int]:
    """Rank 1 dies in step `death` of the warm-up, before its experts run. What the others know, and `y` of a step."""
    with ExpertParallelContext(
        transport="shared", timeout_s=WITHOUT_ONE_S, startup_timeout_s=2 * WITHOUT_ONE_S, on_failure="continue"
    ) as context:
        layer = MoELayer.from_checkpoint(folder, context=context, **config(token_buckets=(4,)).model_dump())
        counters, waits, done = layer.count_steps(), layer.count_waits(), []

        def run_or_die(layer: MoELayer, step: LayerStep) -> None:
            if rank == 1 and len(done) == death:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(step)
            layer._run_experts(step)

        layer._stages = tuple(
            stage._replace(run=run_or_die) if stage.phase == "experts" else stage for stage in layer._stages
        )
        layer.warm_up()
        assert context.members == (0, 2) and context.steps_done == 0 and counters.read().steps == 0
        mine = rank_input(0, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K)
        assert [(one.steps, len(one.peers)) for one in waits.read().values()] == [(0, 2)] * 2
        y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        assert counters.read().steps == waits.read()[TOKENS].steps == 1
        # Ranks keep their names in metrics: 2 is the second of those that are left.
        other, text = 2 - rank, metrics_text([layer])
        assert f'steps_total{{layer="0",rank="{rank}"}} 1\n' in text
        assert f'rank_in{{context="0",rank="{rank}",peer="1"}} 0\n' in text
        assert set(re.findall(r'wait\w+\{.*,peer="(\d)"', text)) == {str(other)} and 'rank="1"' not in text
        return context.generation, context.steps_done, y, context.steps_repeated


@pytest.mark.parametrize("death", [0, 4])
def test_a_death_in_a_warm_up(death: int, tmp_path: Path) -> None:
    """In its first step, and in one of the second token bucket."""
    write_qwen3_moe_checkpoint(tmp_path, config(), seed=0)
    outcomes = run_once(die_in_warm_up, 3, death, str(tmp_path))
    assert outcomes[1].exitcode == -signal.SIGKILL
    held = [range(*pair) for pair in pairwise(expert_starts(EXPERTS, 3))]
    placement = refill([held[0], held[2]], EXPERTS)
    expected = expected_steps((0, 2), placement, tmp_path, "bf16", set())[0]
    for number, rank in enumerate((0, 2)):
        assert outcomes[rank].error is None, outcomes[rank].trace
        generation, steps, y, repeated = outcomes[rank].result
        assert (generation, steps) == (1, 1) and repeated >= 1
        assert_same_bits(y, expected[number])


Part = list[tuple[tuple[int, ...], torch.Tensor]]


def leave_and_come_back(rank: int, world: int, placed: bool) -> tuple[Part, str]:
    """Rank 1 leaves in order, asks for its place with another layer, which is refused, and with the right one.

    Two steps with all ranks, two without it, two with it. The members and `y` of each, and why it was refused.
    """
    start = placements(world)[0] if placed else None
    limits: dict[str, Any] = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}
    results: Part = []

    def steps(context: ExpertParallelContext, layer: MoELayer) -> None:
        for _ in range(2):
            mine = rank_input(context.steps_done, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K)
            y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
            results.append((context.members, y))

    def made(context: ExpertParallelContext, **changes: Any) -> MoELayer:
        layer = MoELayer(config(**changes), context, placement=start)
        layer.load_random(0)
        return layer

    context = ExpertParallelContext(transport="shared", on_failure="continue", **limits)
    layer = made(context)
    layer.count_steps()
    layer.count_waits()
    steps(context, layer)
    for wrong in ([], [world], [0, 1, 2], [True]):
        with pytest.raises(ValueError, match="ranks: expected"):
            context.release(wrong)
    for replays in (-1, 0):
        with pytest.raises(ValueError, match="replays: expected" if replays else "recover: expected a context"):
            context.recover(replays)
    refused = ""
    if rank == 1:
        with pytest.raises(RankRemovedError, match="rank 1 is out, as was asked for"):
            context.release([1])
        # It keeps its name in metrics, and those of the ranks that it has waited for.
        text = metrics_text([layer])
        assert set(re.findall(r'[{,]rank="(\d)"', text)) == {"1"}
        assert set(re.findall(r'wait\w+\{.*,peer="(\d)"', text)) == {"0", "2"}
        context.close()
        store = dist.distributed_c10d._get_default_store()
        with pytest.raises(ValueError, match="rank: expected an integer"):
            ExpertParallelContext.rejoin(world, store)
        with pytest.raises(ValueError, match="store: expected one in which ranks") as nobody:
            ExpertParallelContext.rejoin(1, dist.HashStore())
        assert nobody
        other = ExpertParallelContext.rejoin(1, store, **limits)
        with pytest.raises(ValueError, match="agree: this rank and the others disagree on") as caught:
            made(other, max_tokens_per_rank=TOKENS + 1).warm_up()
        other.close()
        refused = str(caught.value)
        context = ExpertParallelContext.rejoin(1, store, **limits)
        layer = made(context)
        context.allocate()
        assert context.steps_done == 4
    else:
        context.release([1])
        steps(context, layer)
        while not (came := context.admit()):
            time.sleep(0.02)
        assert came == (1,) and context.members == (0, 1, 2)
    steps(context, layer)
    assert layer.placement == start
    context.close()
    return results, refused


@pytest.mark.parametrize("placed", [True, False])
def test_a_rank_leaves_in_order_and_comes_back(placed: bool) -> None:
    start = placements(3)[0] if placed else None
    held = [range(*pair) for pair in pairwise(expert_starts(EXPERTS, 3))]
    if start is not None:
        held = [start.rank_experts(rank) for rank in range(3)]
    outcomes = run_once(leave_and_come_back, 3, placed)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert f"max_tokens_per_rank (layer 0): here {TOKENS + 1}, the others {TOKENS}" in outcomes[1].result[1]
    parts = [
        ((0, 1, 2), start, range(2)),
        ((0, 2), refill([held[0], held[2]], EXPERTS), range(2, 4)),
        ((0, 1, 2), start, range(4, 6)),
    ]
    for members, placement, between in parts:
        with VirtualRanks(config(), len(members), lambda layer: layer.load_random(0), placement=placement) as ranks:
            for step in between:
                given = [rank_input(step, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K) for rank in members]
                ys = ranks([i.x for i in given], [(i.topk_idx, i.topk_weights) for i in given])
                for rank, y in zip(members, ys, strict=True):
                    found = outcomes[rank].result[0][step - 2 if rank == 1 and step >= 4 else step]
                    assert found[0] == members
                    assert_same_bits(found[1], y, f"rank {rank}, step {step}")


def ask_for(rank: int, world: int, transport: str, on_failure: list[str]) -> str:
    try:
        with ExpertParallelContext(transport=transport, on_failure=on_failure[rank], startup_timeout_s=PATIENCE_S) as c:
            layer = MoELayer(config(), c)
            layer.load_random(0)
            layer.warm_up()
    except (ValueError, MoERuntimeError) as error:
        return str(error)
    return ""


def test_transports_whose_memory_does_not_survive_are_refused(get_pool: Any) -> None:
    texts = get_pool(2).run(ask_for, "collective", ["continue", "continue"])
    assert all(text.startswith("on_failure: expected 'abort' with transport='collective'") for text in texts), texts


def test_ranks_must_agree_on_it(get_pool: Any) -> None:
    texts = get_pool(2).run(ask_for, "shared", ["continue", "abort"])
    assert all("on_failure (context): rank 0: 'continue', rank 1: 'not given'" in text for text in texts), texts


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="on_failure: expected abort or continue"):
        ExpertParallelContext(on_failure="go on")
    with pytest.raises(ValueError, match="on_failure: expected 'abort' with heap"):
        ExpertParallelContext(heap=PrivateHeap(), on_failure="continue")
    with ExpertParallelContext(transport="private", on_failure="continue") as context:
        assert context.recovery is None and context.members == (0,)
        assert context.rank_states == {0: "in"} and context.steps_repeated == context.steps_done == 0
        assert context.admit() == ()
        with pytest.raises(ValueError, match="recover: expected a context with on_failure='continue' that misses"):
            context.recover()
        with pytest.raises(ValueError, match="on_failure: expected a context of several ranks"):
            context.release([0])


def memberships(count: int) -> list[Membership]:
    store = dist.HashStore()
    return [Membership(RankGroup._at_start(store, rank, count, 10.0)) for rank in range(count)]


def together(work: list[Any]) -> list[Any]:
    """What each of `work` returns or raises, run at the same time."""
    found: list[Any] = [None] * len(work)

    def run(number: int) -> None:
        try:
            found[number] = work[number]()
        except MoERuntimeError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def test_who_comes_late_is_told_that_it_is_out() -> None:
    group = memberships(4)
    record = {0: 7, 2: 8, 3: 7}
    found = together([lambda r=r: group[r].agree(record[r], {1}, PATIENCE_S) for r in record])
    assert found == [record] * 3
    assert all(group[r].members == (0, 2, 3) and group[r].generation == 1 for r in record)
    with pytest.raises(RankRemovedError, match="rank 1 is out: rank 0, 2, 3 went on without it in generation 1") as e:
        group[1].agree(7, set(), PATIENCE_S)
    assert e.value.rank == 1 and group[1].generation == 0


def test_a_suspect_that_comes_in_time_stays() -> None:
    """A rank that only one other misses, wrongly: it takes part before the decision."""
    group = memberships(3)
    works = [lambda r=r: group[r].agree(1, {2} if r == 0 else set(), PATIENCE_S) for r in (2, 1)]
    group[2]._ask(lambda store, prefix: store.set(f"{prefix}/{group[2]._keys('here/2')}", "1"))
    assert together([*works, lambda: group[0].agree(1, {2}, PATIENCE_S)]) == [{0: 1, 1: 1, 2: 1}] * 3


def test_who_does_not_come_is_waited_for_no_longer_than_the_window() -> None:
    group = memberships(3)
    assert together([lambda r=r: group[r].agree(0, set(), 0.3) for r in (0, 1)]) == [{0: 0, 1: 0}] * 2
    assert [group[r].group().world_size for r in (0, 1)] == [2, 2]


def test_only_one_of_two_parties_goes_on() -> None:
    """Ranks that suspect each other: one record is written, and the others learn that they are out."""
    group = memberships(4)
    found = together([lambda r=r: group[r].agree(0, {(r + 2) % 4, (r + 1) % 4}, 0.2) for r in range(4)])
    records = [answer for answer in found if isinstance(answer, dict)]
    assert records and all(record == records[0] for record in records)
    for rank, answer in enumerate(found):
        assert isinstance(answer, dict) if rank in records[0] else isinstance(answer, RankRemovedError)


def test_a_record_that_no_rank_writes_is_refused() -> None:
    for text in ("no JSON", '{"members": [[0, 1], [9, 1]]}', '{"members": 3}', '{"others": []}'):
        rank = memberships(2)[0]
        key = rank._keys("members")
        rank._ask(lambda store, prefix, key=key, text=text: store.set(f"{prefix}/{key}", text))
        with pytest.raises(MoERuntimeError, match="recovery: the record of members is not one"):
            rank.agree(0, set(), 0.1)
