"""Ranks that come back get their experts from the others. Deaths meanwhile: `tests.support.survivors`."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.comm.errors import (
    ExpertsLostError,
    PeerAbortedError,
    PeerTimeoutError,
    Phase,
    RankRemovedError,
    StepMismatchError,
)
from moe_runtime.comm.group_members import _StoreHost
from moe_runtime.comm.messages import text
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import Experts
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.placement.placement import Placement, plan_placement
from moe_runtime.resilience.recovery import Recovery
from moe_runtime.resilience.refill import missing_experts, plan_copies, refill
from moe_runtime.virtual import VirtualRanks
from tests.exchange.test_survivors import memberships, together
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOKENS, TOP_K, config, rank_input
from tests.support.pool import PATIENCE_S, run_once

pytestmark = pytest.mark.cpu_only

WORLD = 4
TWICE = plan_placement([1.0] * EXPERTS, WORLD, -(-2 * EXPERTS // WORLD))
"""Each expert on two ranks or more."""
Step = tuple[int, tuple[int, ...], Placement | None, torch.Tensor]


def test_experts_are_twice_in_the_placement() -> None:
    held = [TWICE.rank_experts(rank) for rank in range(WORLD)]
    for rank in range(WORLD):
        assert not missing_experts(held[:rank] + held[rank + 1 :], EXPERTS)


def without_experts(folder: Path, into: Path) -> None:
    """A checkpoint that looks the same, whose experts are zeros."""
    shutil.copytree(folder, into)
    for file in into.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        first = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:first]).items():
            if ".experts." in name:
                begin, end = (first + offset for offset in entry["data_offsets"])
                assert any(raw[begin:end])
                raw[begin:end] = bytes(end - begin)
        file.write_bytes(raw)


def nothing_to_read() -> Iterator[Any]:
    raise AssertionError("a process that comes back reads no experts")
    yield


def loaded(context: ExpertParallelContext, fmt: str, start: Placement | None, folder: Path | None) -> MoELayer:
    """A layer of a checkpoint, or without one with weights that cannot be loaded again."""
    if folder is not None:
        settings = config(fmt).model_dump()
        return MoELayer.from_checkpoint(folder, context=context, placement=start, **settings)
    layer = MoELayer(config(fmt), context, placement=start)
    if context.joins:
        layer.load_experts(nothing_to_read())
    else:
        layer.load_experts(random_expert(config(fmt), 0, expert) for expert in layer.local_experts)
    return layer


def admitted(context: ExpertParallelContext) -> tuple[int, ...]:
    """Who has come back, after as many tries as that takes."""
    end = time.monotonic() + PATIENCE_S / 4
    while not (came := context.admit()):
        assert time.monotonic() < end, "nobody asks"
        time.sleep(0.02)
    return came


def come_and_go(
    rank: int, world: int, fmt: str, start: Placement | None, gone: list[int], folder: Path | None, moves: bool
) -> tuple[list[Step], list[str]]:
    """The ranks `gone` leave one after another, and come back in the same order; two layers, a step of each between.

    With `moves` the first layer goes over to other placements meanwhile. The number, the members, the placement and `y`
    of each step, and what was logged.
    """
    results: list[Step] = []
    records: list[logging.LogRecord] = []
    collector = logging.Handler()
    collector.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("moe_runtime").addHandler(collector)
    logging.getLogger("moe_runtime").setLevel(logging.INFO)
    limits: dict[str, Any] = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}

    def steps() -> None:
        for layer in layers:
            number = context.steps_done
            mine = rank_input(number, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K)
            y = layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
            results.append((number, context.members, layer.placement, y))

    def move() -> None:
        placement = layers[0].placement
        if moves and placement is not None:
            held = [list(placement.rank_experts(number)) for number in range(placement.num_ranks)]
            chooser = random.Random(len(context.members))
            for experts in held:
                chooser.shuffle(experts)
            chooser.shuffle(held)
            new = Placement(EXPERTS, len(held), tuple(expert for experts in held for expert in experts))
            layers[0].replace_experts(new)

    context = ExpertParallelContext(transport="shared", on_failure="continue", **limits)
    layers = [loaded(context, fmt, start, folder) for _ in range(2)]
    steps()
    move()
    steps()
    for leaver in gone:
        if rank == leaver:
            with pytest.raises(RankRemovedError):
                context.release([rank])
            context.close()
            break
        context.release([leaver])
        steps()
    else:
        move()
        steps()
    store = dist.distributed_c10d._get_default_store()
    for number, comer in enumerate(gone):
        if rank == comer:
            if number:
                store.get(f"{gone[number - 1]} is in")  # waits
            Checkpoint.experts = nothing_to_read  # type: ignore[assignment,method-assign]
            context = ExpertParallelContext.rejoin(rank, store, **limits)
            assert context.joins
            layers = [loaded(context, fmt, start, folder and folder.with_name("others")) for _ in range(2)]
            context.allocate()
            assert not context.joins
        elif rank in context.members:
            assert admitted(context) == (comer,)
        else:
            continue
        steps()
        store.set(f"{comer} is in", "yes")
    steps()
    context.close()
    return results, [record.getMessage() for record in records]


CASES = {
    "replicas": ("nvfp4", TWICE, [1], True, False),
    "replicas, no checkpoint": ("bf16", TWICE, [2], False, False),
    "no placement": ("bf16", None, [0], True, False),
    "no placement, two at a time": ("nvfp4", None, [1, 2], True, False),
    "replicas move": ("bf16", TWICE, [3, 1], True, True),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_of_a_rank_that_comes_back_come_from_the_others(case: str, tmp_path: Path) -> None:
    """It can read no expert, and each step of all ranks has the bits of the group and placement of that moment."""
    fmt, start, gone, from_checkpoint, moves = CASES[case]
    folder = tmp_path / "model" if from_checkpoint else None
    if folder is not None:
        write_qwen3_moe_checkpoint(folder, config(fmt), seed=0)
        without_experts(folder, tmp_path / "others")
    outcomes = run_once(come_and_go, WORLD, fmt, start, gone, folder, moves)
    assert all(outcome.error is None for outcome in outcomes), "\n".join(outcome.trace for outcome in outcomes)
    found: dict[tuple[int, tuple[int, ...], Placement | None], dict[int, torch.Tensor]] = {}
    for rank, outcome in enumerate(outcomes):
        for number, members, placement, y in outcome.result[0]:
            found.setdefault((number, members, placement), {})[rank] = y
    assert {len(members) for _, members, _ in found} == set(range(WORLD - len(gone), WORLD + 1))
    for (number, members, placement), ys in found.items():
        assert tuple(sorted(ys)) == members
        with VirtualRanks(
            config(fmt), len(members), lambda layer: fill(layer, fmt, folder), placement=placement
        ) as ranks:
            given = [rank_input(number, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K) for rank in members]
            expected = ranks([i.x for i in given], [(i.topk_idx, i.topk_weights) for i in given])
            for rank, y in zip(members, expected, strict=True):
                assert_same_bits(ys[rank], y, f"{case}: rank {rank}, step {number}, {placement}")
    for rank, outcome in enumerate(outcomes):
        check_log(rank, gone, "\n".join(outcome.result[1]))
    last = max(found, key=lambda step: step[0])
    assert last[1] == tuple(range(WORLD)) and last[2] == start


def check_log(rank: int, gone: list[int], lines: str) -> None:
    """There is a line for each change."""
    if rank in gone:
        assert f"rank {rank}: is in again, generation" in lines
        for layer in range(2):
            assert re.search(rf"rank {rank}: layer {layer}: \d+ experts came from rank \d", lines)
        return
    for other in gone:
        assert re.search(rf"rank {rank}: generation \d: rank none came, rank {other} left, .* go on", lines)
        assert re.search(rf"rank {rank}: generation \d: rank {other} came, rank none left, .* go on", lines)


def fill(layer: MoELayer, fmt: str, folder: Path | None) -> None:
    if folder is not None:
        layer.load_checkpoint(folder, 0)
    else:
        layer.load_experts(random_expert(config(fmt), 0, expert) for expert in layer.local_experts)


def not_loaded(rank: int, world: int) -> str:
    """Rank 1 leaves, and comes back without weights: the others go on without it."""
    limits: dict[str, Any] = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}
    context = ExpertParallelContext(transport="shared", on_failure="continue", **limits)
    layer = MoELayer(config(), context)
    layer.load_random(0)
    layer.warm_up()
    said = ""
    if rank == 1:
        with pytest.raises(RankRemovedError):
            context.release([1])
        context.close()
        context = ExpertParallelContext.rejoin(1, dist.distributed_c10d._get_default_store(), **limits)
        layer = MoELayer(config(), context)
        with pytest.raises(ValueError, match="experts: no weights of layer 0 are loaded") as caught:
            context.allocate()
        said = str(caught.value)
    else:
        context.release([1])
        for _ in range(3):
            assert context.admit() == ()
        layer.warm_up()
    context.close()
    return said


def test_a_layer_without_weights_does_not_come_back() -> None:
    outcomes = run_once(not_loaded, 3)
    assert all(outcome.error is None for outcome in outcomes), "\n".join(outcome.trace for outcome in outcomes)
    assert outcomes[1].result


def release_what_others_lack(rank: int, world: int) -> None:
    """Rank 1 may not leave: it alone has experts that cannot be loaded again. Steps go on as if nobody had asked."""
    with ExpertParallelContext(
        transport="shared", on_failure="continue", timeout_s=PATIENCE_S, startup_timeout_s=PATIENCE_S
    ) as context:
        layer = loaded(context, "bf16", None, None)
        mine = rank_input(0, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K)
        ys = []
        for _ in range(2):
            ys.append(layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights))
            with pytest.raises(ExpertsLostError, match="layer 0: no rank that is left holds expert 4, 5, 6, which did"):
                context.release([1])
        assert_same_bits(ys[0], ys[1])
        assert (context.generation, context.members, layer.placement) == (0, (0, 1, 2), None)


def test_a_rank_whose_experts_would_be_lost_stays() -> None:
    outcomes = run_once(release_what_others_lack, 3)
    assert all(outcome.error is None for outcome in outcomes), "\n".join(outcome.trace for outcome in outcomes)


def release_wrongly(rank: int, world: int) -> list[str]:
    """Releases before the first step that cannot be, none of which changes anything, and then one that can.

    What this rank was told of those that only some ranks did wrong.
    """
    limits: dict[str, Any] = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}
    context = ExpertParallelContext(transport="shared", on_failure="continue", **limits)
    layer = MoELayer(config(), context)
    layer.load_random(0)
    reload = layer._members.reload
    assert context.recovery is not None and reload is not None
    told = []

    def refused(*kinds: type[Exception], ranks: Any) -> None:
        with pytest.raises(kinds) as caught:
            context.release(ranks)
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        assert (context.members, context.generation, layer.placement) == ((0, 1, 2), 0, None)

    for wrong in ([1.0], [np.int64(1)], [torch.tensor(1)], [True], [[1]], [-1], "1", 1, None):
        with pytest.raises(ValueError, match=r"^ranks: expected "):
            context.release(wrong)  # type: ignore[arg-type]
    refused(ValueError, PeerAbortedError, ranks=[7] if rank == 0 else [2])
    refused(ValueError, ranks=[Phase(rank)])  # an int like any other
    group = context.recovery.membership._group
    group._host = _StoreHost(0, "rank 0, which hosts it,")
    refused(ValueError, ranks=[0])
    group._host = _StoreHost()

    def gone(ids: Sequence[int]) -> Experts:
        raise ValueError("config.json: cannot be read")

    layer._members.reload = gone if rank == 1 else reload
    refused(ExpertsLostError, ranks=[2])
    layer._members.reload = reload
    if rank == 2:
        with pytest.raises(RankRemovedError):
            context.release([2])
    else:
        context.release([2])
        layer.warm_up()
        assert (context.members, context.generation) == ((0, 1), 1)
    context.close()
    return told


def test_a_release_that_cannot_be_changes_nothing_and_all_ranks_learn_why(get_pool: Any) -> None:
    results = get_pool(3).run(release_wrongly)
    for rank, told in enumerate(results):
        wrong, others, host, gone = told
        text = "ranks: expected some of (0, 1, 2), got 7"
        assert wrong == (f"PeerAbortedError: release: rank 0 gave up: {text}" if rank else f"ValueError: {text}")
        assert others == "ValueError: ranks: the members disagree, [[0], [1], [2]]"
        assert host == "ValueError: ranks: expected others than 0, whose process hosts the store where ranks meet"
        assert gone == (
            "ExpertsLostError: layer 0: no rank that is left holds expert 7, 8, 9, which cannot be loaded again: "
            "config.json: cannot be read; ranks 0, 1 are left"
        )


def come_back_to_others(rank: int, world: int) -> list[str]:
    """Rank 2 leaves, and comes back while the others do no step. They have deleted a layer, and make one later.

    Why rank 2 was refused.
    """
    limits: dict[str, Any] = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}
    store = dist.distributed_c10d._get_default_store()
    key = f"come_back_to_others/{store.add(f'come_back_to_others/{rank}', 1)}"
    mine = rank_input(0, rank, TOKENS - rank, HIDDEN, EXPERTS, TOP_K)

    def made(context: ExpertParallelContext) -> MoELayer:
        layer = MoELayer(config(), context)
        layer.load_random(0)
        return layer

    def step(layer: MoELayer) -> torch.Tensor:
        return layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)

    def refused(layers: int) -> str:
        newcomer = ExpertParallelContext.rejoin(2, store, **limits)
        kept = [made(newcomer) for _ in range(layers)]
        for call in (newcomer.admit, lambda: newcomer.release([0]), lambda: kept[0].replace_experts(TWICE)):
            with pytest.raises(ValueError, match=r"^context: call allocate\(\) first"):
                call()
        with pytest.raises(ValueError, match=r"^rejoin: ") as caught:
            newcomer.allocate()
        newcomer.close()
        return str(caught.value)

    def admit_until(done: str) -> None:
        assert context.recovery is not None
        while not context.recovery.most("done", store.check([f"{key}/{done}"]) + 0, PATIENCE_S, context.check_peers):
            assert context.admit() == ()

    context = ExpertParallelContext(transport="shared", on_failure="continue", **limits)
    layers = [made(context) for _ in range(2)]
    before = step(layers[1])
    del layers[0]
    why = []
    if rank == 2:
        with pytest.raises(RankRemovedError):
            context.release([2])
        context.close()
        why.append(refused(2))
        store.set(f"{key}/refused", "")
        context = ExpertParallelContext.rejoin(2, store, **limits)
        layers = [made(context) for _ in range(2)]
        del layers[0]
        context.allocate()
    else:
        context.release([2])
        admit_until("refused")
        assert admitted(context) == (2,)
    assert_same_bits(step(layers[0]), before)
    if rank == 2:
        with pytest.raises(RankRemovedError):
            context.release([2])
        context.close()
        store.get(f"{key}/late")
        why.append(refused(3))
        store.set(f"{key}/refused again", "")
        return why
    context.release([2])
    layers.append(made(context))
    late = step(layers[1])
    store.set(f"{key}/late", "")
    admit_until("refused again")
    assert_same_bits(step(layers[1]), late)
    assert (context.members, context.world_size) == ((0, 1), 2)
    context.close()
    return why


def test_a_process_comes_back_to_the_same_layers_and_while_others_do_no_step(get_pool: Any) -> None:
    assert get_pool(3).run(come_back_to_others)[2] == [
        "rejoin: the others have 1 layers, this rank has 2",
        "rejoin: the others have made a layer while a rank was out, so none can come back",
    ]


def recoveries(count: int, renew: Any) -> tuple[list[Recovery], list[list[Exception]]]:
    """Of `count` ranks without layers, and with what each has ended."""
    ended: list[list[Exception]] = [[] for _ in range(count)]
    group = memberships(count)
    return [Recovery(one, renew, end.append, 1.0) for one, end in zip(group, ended, strict=True)], ended


@pytest.mark.parametrize("call", ["recover", "admit", "release"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no memory"), IndexError("of ours")])
def test_a_rank_that_does_not_get_over_to_others_is_out(call: str, error: BaseException) -> None:
    """Whatever ends it on the way: it must not go on half changed."""

    def renew(*_: Any) -> None:
        raise error

    (one, *_), ended = recoveries(2, renew)
    if call != "release":
        one.membership.generation, one.membership.members = 1, (0,)
    if call == "admit":
        one.membership._ask(lambda store, prefix: store.set(f"{prefix}/ask/1", '["word", 0]'))
        work = lambda: one.admit(1.0, lambda: None)  # noqa: E731
    elif call == "recover":
        work = lambda: one.recover(PeerTimeoutError("", -1, Phase.RECOVERY))  # noqa: E731
    else:
        one.membership._ask(
            lambda store, prefix: store.set(f"{prefix}/from generation 0/release 1/1", "[1, [[1], null, null]]")
        )
        work = lambda: one.release([1], 1.0, lambda: None)  # noqa: E731
    with pytest.raises(type(error)):
        work()
    (found,) = ended[0]
    assert found is error or (isinstance(found, PeerAbortedError) and str(found).startswith("KeyboardInterrupt"))


def test_ranks_in_different_calls_do_not_throw_each_other_out() -> None:
    """One is in `admit`, the others are in `release`: none of them is dead."""
    ranks, ended = recoveries(3, lambda *_: None)
    calls = [lambda: ranks[0].admit(0.3, lambda: None)]
    calls += [lambda r=r: ranks[r].release([1], 0.3, lambda: None) for r in (1, 2)]
    errors = together(calls)
    for error, (end,) in zip(errors, ended, strict=True):
        assert isinstance(error, StepMismatchError) and end is error
        assert str(error) == ("recovery: ranks are in different calls, rank 0: admit, rank 1: release, rank 2: release")
    assert all(rank.membership.members == (0, 1, 2) for rank in ranks)


def test_copies_fill_all_slots_that_ranks_do_not_have() -> None:
    chooser = random.Random(0)
    for world in range(2, 7):
        for _ in range(20):
            everything = [chooser.sample(range(8), 8) for _ in range(world)]
            sources = {rank: held for rank, held in enumerate(everything) if rank != 1}
            size = chooser.randint(1, 4)
            wanted = [chooser.sample(range(8), size) for _ in range(world)]
            kept = [0 if rank == 1 else chooser.randint(0, size) for rank in range(world)]
            moves = plan_copies(wanted, kept, sources)
            assert sorted((m.target_rank, m.target_slot) for m in moves) == [
                (rank, slot) for rank in range(world) for slot in range(kept[rank], size)
            ]
            for m in moves:
                assert m.expert == wanted[m.target_rank][m.target_slot] == sources[m.source_rank][m.source_slot]
                assert m.target_rank == 1 or m.source_rank == m.target_rank
            if world > 2:
                counts = [sum(m.source_rank == rank for m in moves if m.target_rank == 1) for rank in sources]
                assert max(counts) - min(counts) <= 1, "all of them give"


def test_copies_of_a_refill_come_from_slots_of_before() -> None:
    """Two of four ranks are out, one comes back: what its old neighbours do not keep moves to other slots."""
    before = refill([[0, 1], [6, 7]], 8)
    sources = {number: before.rank_experts(number) for number in range(2)}
    target = refill([[0, 1], [2, 3], [6, 7]], 8)
    wanted = [target.rank_experts(rank) for rank in range(3)]
    moves = plan_copies(wanted, [2, 0, 2], {0: sources[0], 2: sources[1]})
    assert {(m.target_rank, m.target_slot) for m in moves} == {(0, 2), (1, 0), (1, 1), (1, 2), (2, 2)}


def test_a_process_that_gives_up_does_not_ask_any_more() -> None:
    members = memberships(3)
    for member in members[:2]:
        member.generation, member.members = 1, (0, 1)
    words: list[Any] = []

    def watch() -> None:
        while not (asks := members[0].askers()):
            time.sleep(0.01)
        words.extend(asks)

    _, error = together([watch, lambda: members[2].ask(0.5, text)])
    assert isinstance(error, PeerTimeoutError) and "no rank has admitted rank 2 within 0.5 s" in str(error)
    assert [rank for rank, *_ in words] == [2] and members[0].askers() == []
    assert "it is still in where ranks called allocate() last" in str(error)
    members[0].generation, members[0].members = 0, (0, 1, 2)
    members[0].go_over({0: 0, 1: 0})
    with pytest.raises(PeerTimeoutError, match=r"within 0\.1 s$"):
        members[2].ask(0.1, text)


def test_a_process_that_is_not_admitted_after_all_asks_again() -> None:
    """A member dies before the others go over to the process that they have answered."""
    members = memberships(3)
    for member in members[:2]:
        member.generation, member.members = 1, (0, 1)
    newcomer = members[2]

    def others() -> None:
        while not (asks := members[0].askers()):
            time.sleep(0.01)
        members[0].answer(*asks[0][:2], {0: 4, 1: 4, 2: 4}, "first")
        members[0].agree(4, {1}, 0.1)
        with pytest.raises(PeerTimeoutError, match="a rank is missed"):
            members[1].go_over({0: 4, 1: 4, 2: 4})
        while not (again := members[0].askers()):
            time.sleep(0.01)
        assert again[0][1] != asks[0][1]
        members[0].answer(*again[0][:2], {0: 5, 2: 5}, "second")
        members[0].go_over({0: 5, 2: 5})

    assert together([others, lambda: newcomer.ask(PATIENCE_S, text)]) == [None, ({0: 5, 2: 5}, "second")]
    assert (newcomer.generation, newcomer.members) == (3, (0, 2)) == (members[0].generation, members[0].members)
