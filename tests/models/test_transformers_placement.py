"""Placements of transformers models: logits within the bound, and calls that go on through a re-placement."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.comm.errors import PeerAbortedError, RankRemovedError
from moe_runtime.config import ParallelConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.integrations.transformers import apply_expert_parallel
from moe_runtime.placement.placement import Placement, plan_placement
from tests.support.comparison import assert_same_bits
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once

pytest.importorskip("transformers")

from tests.models.test_transformers import SHAPES_OF_LOGITS, check_logits, generate, prompts, save, spread
from tests.support import parallel_models, tiny_models

pytestmark = pytest.mark.cpu_only

EXPERTS = 12


def random_placement(seed: int, world: int, slots: int) -> Placement:
    load = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(seed)).pow(3).tolist()
    return plan_placement(load, world, slots)


@pytest.mark.parametrize(("family", "world", "slots", "some"), [("gpt_oss", 2, 8, False), ("deepseek_v3", 4, 4, True)])
def test_logits_with_replicas(
    family: str, world: int, slots: int, some: bool, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    placement: Any = random_placement(seed, world, slots)
    folder = save(tmp_path, family, seed)
    placement = {2: placement} if some else placement
    check_logits(get_pool(world), folder, prompts(seed, world, SHAPES_OF_LOGITS), "bf16", "bf16", placement=placement)


def test_one_rank_gives_the_same_bits_wherever_its_experts_lie(tmp_path: Path, seed: int) -> None:
    folder, (ids,) = save(tmp_path, "mixtral", seed), prompts(seed, 1)
    found = []
    for placement in (None, Placement(EXPERTS, 1, tuple(reversed(range(EXPERTS))))):
        model, parallel = spread(folder, placement=placement)
        with parallel, torch.no_grad():
            found.append(model(ids).logits)
    assert_same_bits(*found)


def replaced_on_rank(rank: int, world: int, path: Path, ids: list[Any], start: Any, target: Any, num_hosts: int) -> Any:
    """Logits before and after, those of a model that was made with `target`, and the loads in between."""
    with pytest.MonkeyPatch.context() as patch:
        if num_hosts > 1:
            patch.setenv("MOE_RUNTIME_HOST", f"host{rank * num_hosts // world}")
        return replaced(rank, path, ids, start, target, "shared" if num_hosts == 1 else "hierarchical")


def replaced(rank: int, path: Path, ids: list[Any], start: Any, target: Any, transport: str) -> Any:
    model, parallel = spread(path, placement=start)
    assert parallel.context.transport == transport
    with parallel, torch.no_grad():
        parallel.count_tokens()
        before = model(ids[rank]).logits
        loads = parallel.expert_loads()
        parallel.replace_experts(target)
        after = model(ids[rank]).logits
        placements = [layer.placement for layer in parallel.layers]
        parallel.count_tokens()
        assert all(not any(counts) for counts in parallel.expert_loads().values())
    of_all = target if isinstance(target, Placement) else dict.fromkeys(parallel.decoder_layers, start) | target
    model, parallel = spread(path, placement=of_all)
    with parallel, torch.no_grad():
        expected = model(ids[rank]).logits
    return before, after, expected, loads, placements


@pytest.mark.parametrize(("some", "num_hosts"), [(False, 1), (True, 1), (False, 2)])
def test_a_model_goes_on_with_another_placement(
    some: bool, num_hosts: int, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    """The bits of a model that had it from the start, and loads as the original's routers give them."""
    folder, ids = save(tmp_path, "qwen2_moe", seed), prompts(seed, 4)
    start, other = random_placement(seed, 4, 4), random_placement(seed + 1, 4, 4)
    target = {2: other} if some else other
    results = get_pool(4).run(replaced_on_rank, folder, ids, start, target, num_hosts, timeout=120.0)
    original = parallel_models.load(folder)
    first = torch.zeros(EXPERTS, dtype=torch.int64)
    for x, (before, after, expected, loads, placements) in zip(ids, results, strict=True):
        assert_same_bits(after, expected)
        assert before.shape == after.shape
        assert loads == results[0][3]
        assert placements == [start if some else other, other]
        # What the first routers see has not been through any experts.
        first += parallel_models.record_routes(original, x)[1][0][1].flatten().bincount(minlength=EXPERTS)
    assert list(results[0][3]) == [0, 2]
    assert results[0][3][0] == first.tolist()
    assert sum(results[0][3][2]) == 3 * sum(x.numel() for x in ids)


def test_a_model_records_its_routes(tmp_path: Path, seed: int) -> None:
    """Those of the original's routers, by decoder layer; a call that `join` splits takes several steps."""
    folder, (ids,) = save(tmp_path, "qwen2_moe", seed), prompts(seed, 1)
    model, parallel = spread(folder, max_tokens_per_rank=8)
    top_k = parallel.layers[0].config.top_k
    ring = torch.zeros(2, 50, 8, top_k, dtype=torch.int16)
    with parallel, torch.no_grad():
        for name, wrong in {"ids": (ring[:1], None), "weights": (ring, torch.zeros(2, 50, 8))}.items():
            with pytest.raises(ValueError, match=rf"{name}: expected \[2, S, M, K\]"):
                parallel.record_routes(*wrong)
        with pytest.MonkeyPatch.context() as patch:

            def refuse(*ring: torch.Tensor) -> None:
                raise ValueError("ids: no")

            # Where the second layer refuses, the first does not record either.
            patch.setattr(parallel.layers[1], "record_routes", refuse)
            with pytest.raises(ValueError, match="ids: no"):
                parallel.record_routes(ring)
            assert parallel.layers[0].routes is None
        recorded = parallel.record_routes(ring, torch.zeros(ring.shape))
        with parallel.join():
            model(ids)
        steps = recorded[0].read()
        assert list(recorded) == [0, 2] and len(recorded[2].read()) == len(steps) == -(-ids.numel() // 8) > 1
        _, chosen = parallel_models.record_routes(parallel_models.load(folder), ids)
    found = torch.cat([step.topk_idx for step in steps])
    assert torch.equal(found.long(), chosen[0][1].view(found.shape))


def generate_on_rank(rank: int, world: int, path: Path, ids: list[Any], start: Placement) -> Any:
    model, parallel = spread(path, placement=start, max_tokens_per_rank=16)
    with parallel:
        parallel.count_tokens()
        first, _ = generate(model, ids[rank], 1, None)
        planned = {
            number: plan_placement(load, world, start.slots_per_rank).reordered_like(start)
            for number, load in parallel.expert_loads().items()
        }
        parallel.replace_experts(planned)
        second, _ = generate(model, torch.cat([ids[rank], first], 1), 1 + rank, None)
        return torch.cat([first, second], 1), any(one != start for one in planned.values())


def test_greedy_tokens_go_on_through_a_replacement(get_pool: Any, tmp_path: Path, seed: int) -> None:
    """The original's tokens wherever its best two logits are clearly apart; the loads on the way plan the placement.

    Every expert is chosen, as in `test_parallel`, so that no near tie between experts can do more than an error does.
    """
    folder = save(tmp_path, "mixtral", seed, num_local_experts=6, num_experts_per_tok=6)
    ids = prompts(seed, 2, [(16, 5), (12, 3)])
    start = Placement(6, 2, (5, 3, 1, 0, 4, 2, 0, 5))
    original = parallel_models.load(folder)
    exact = parallel_models.load(folder, torch.float64)
    compared = 0
    for rank, (x, (found, changed)) in enumerate(
        zip(ids, get_pool(2).run(generate_on_rank, folder, ids, start, timeout=120.0), strict=True)
    ):
        tokens, logits = generate(original, x, 2 + rank, None)
        assert changed and found.shape == tokens.shape
        for row, length in enumerate(parallel_models.sure_tokens(exact, x, tokens, logits)):
            assert found[row, :length].tolist() == tokens[row, :length].tolist()
            compared += max(0, length - 1)
    assert compared > 0, "none after the re-placement"


def generate_while_one_dies(rank: int, world: int, path: Path, ids: list[Any], start: Placement) -> Any:
    """Rank 1 is killed in its third call of the model, in layer 1."""
    limits = ParallelConfig(on_failure="continue", timeout_s=WITHOUT_ONE_S, startup_timeout_s=PATIENCE_S)
    model, parallel = spread(path, placement=start, max_tokens_per_rank=16, parallel=limits)
    with parallel:
        parallel.warm_up()
        calls = itertools.count(1)

        def die(*_: Any) -> None:
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        if rank == 1:
            tiny_models.moe_blocks(model)[1].experts.register_forward_pre_hook(die)
        tokens, _ = generate(model, ids[rank], 5 + rank, None)
        return tokens, parallel.context.members, parallel.context.steps_repeated


def test_greedy_tokens_go_on_through_a_death(tmp_path: Path, seed: int) -> None:
    """The original's tokens on the ranks that are left, wherever its best two logits are clearly apart."""
    start = Placement(6, 3, (0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 0, 1))  # each expert on two ranks
    compared = 0
    # Some models and prompts leave too few tokens that are sure; the next are taken then.
    for number in itertools.count(seed):
        folder = save(tmp_path / str(number), "mixtral", number, num_local_experts=6, num_experts_per_tok=6)
        ids = prompts(number, 3, [(16, 5), (4, 2), (12, 3)])
        original, exact = parallel_models.load(folder), parallel_models.load(folder, torch.float64)
        plain = {rank: generate(original, ids[rank], 5 + rank, None) for rank in (0, 2)}
        sure = {rank: parallel_models.sure_tokens(exact, ids[rank], *plain[rank]) for rank in (0, 2)}
        if sum(max(0, length - 2) for lengths in sure.values() for length in lengths) >= 2:
            break
    outcomes = run_once(generate_while_one_dies, 3, folder, ids, start)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        found, members, repeated = outcomes[rank].result
        assert found.shape == plain[rank][0].shape and members == (0, 2) and repeated > 0
        for row, length in enumerate(sure[rank]):
            assert found[row, :length].tolist() == plain[rank][0][row, :length].tolist()
            compared += max(0, length - 2)
    assert outcomes[1].exitcode == -signal.SIGKILL and compared >= 2


def leave_and_come_back(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    """Rank 1 leaves in order, and a new one takes its place: logits of all calls, and the members of each."""
    limits: dict[str, Any] = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}
    settings: dict[str, Any] = {"placement": Placement(6, 3, (0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 0, 1))}
    settings["max_tokens_per_rank"] = 16
    parallel_config = ParallelConfig(on_failure="continue", **limits)
    with Checkpoint(path) as experts, torch.no_grad():
        settings["experts"] = experts
        model, parallel = spread(path, parallel=parallel_config, **settings)
        found = []

        def call() -> None:
            with parallel.join():
                found.append((parallel.context.members, model(ids[rank]).logits))

        call()
        if rank == 1:
            with pytest.raises(RankRemovedError):
                parallel.context.release([1])
            parallel.close()
            store = dist.distributed_c10d._get_default_store()
            wrong, unchanged = parallel_models.load(path), parallel_models.load(path)
            context = ExpertParallelContext.rejoin(1, store, **limits)
            with pytest.raises(ValueError, match=r"max_tokens_per_rank \(layer 0\): here 17, the others 16"):
                apply_expert_parallel(wrong, context=context, **{**settings, "max_tokens_per_rank": 17})
            assert context.closed
            for parameter, same in zip(wrong.parameters(), unchanged.parameters(), strict=True):
                assert_same_bits(parameter, same)
            context = ExpertParallelContext.rejoin(1, store, **limits)
            model = parallel_models.load(path)
            parallel = apply_expert_parallel(model, context=context, **settings)
        else:
            parallel.context.release([1])
            call()
            while not parallel.context.admit():
                time.sleep(0.02)
        call()
        call()
        parallel.close()
        return found


def test_a_new_process_takes_the_place_of_a_rank(tmp_path: Path, seed: int) -> None:
    folder = save(tmp_path, "mixtral", seed, num_local_experts=6, num_experts_per_tok=6)
    ids = prompts(seed, 3, [(16, 1), (4, 2), (12, 3)])
    outcomes = run_once(leave_and_come_back, 3, folder, ids)
    for rank, outcome in enumerate(outcomes):
        steps = outcome.returned()
        whole = [logits for members, logits in steps if members == (0, 1, 2)]
        assert len(whole) == 3 and len(steps) == (3 if rank == 1 else 4)
        for logits in whole[1:]:
            assert_same_bits(logits, whole[0], f"rank {rank}")


def test_a_context_excludes_what_would_make_one(tmp_path: Path, seed: int) -> None:
    model = parallel_models.load(save(tmp_path, "mixtral", seed))
    with ExpertParallelContext(device="cpu") as context:
        for other in ({"device": "cpu"}, {"parallel": ParallelConfig()}):
            with pytest.raises(ValueError, match="context: expected None together with mesh, parallel or device"):
                apply_expert_parallel(model, max_tokens_per_rank=16, context=context, **other)
        assert not context.closed
    with pytest.raises(ValueError, match="context: expected an ExpertParallelContext or None, got int"):
        apply_expert_parallel(model, max_tokens_per_rank=16, context=3)  # type: ignore[arg-type]


def refused_on_rank(rank: int, world: int, path: Path, ids: list[Any], start: Any, how: str) -> Any:
    model, parallel = spread(path, placement=start)
    with parallel, torch.no_grad():
        before = model(ids[rank]).logits
        target = random_placement(3 + (how == "differ" and rank), 2, 8)
        arguments: dict[str, Any] = {
            "differ": target,
            "unknown": {7: target} if rank else target,
            "sizes": random_placement(3, 2, 9) if rank else target,
            "type": "anywhere" if rank else target,
            "without": {0: target, 2: target},
            "not counting": None,
        }
        try:
            if how == "not counting":
                if rank == 0:
                    parallel.count_tokens()
                parallel.expert_loads()
            else:
                parallel.replace_experts(arguments[how])
        except Exception as error:
            assert_same_bits(model(ids[rank]).logits, before)
            return type(error), str(error)
    return None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("differ", r"placement of layer 0: ranks disagree"),
        ("unknown", r"placement: expected decoder layers with experts, \[0, 2\], got 7"),
        ("sizes", r"placement: expected 12 experts in 16 slots .*, got 12 experts in 18 slots"),
        ("type", r"placement: expected a Placement, a mapping from decoder layer or None, got str"),
        ("without", r"placement: the layer was made without one"),
        ("not counting", r"expert_loads: rank 1 does not count"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(
    how: str, message: str, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    start: Any = random_placement(seed, 2, 8)
    folder, ids = save(tmp_path, "qwen2_moe", seed), prompts(seed, 2)
    start = {0: start} if how == "without" else start
    outcomes = get_pool(2).run(refused_on_rank, folder, ids, start, how)
    for rank, (kind, text) in enumerate(outcomes):
        told = how in ("unknown", "sizes", "type") and rank == 0
        assert kind is (PeerAbortedError if told else ValueError)
        assert not told or "rank 1 gave up" in text
        assert re.search(message, text), text


def test_placements_that_do_not_fit_are_refused() -> None:
    model = tiny_models.tiny_model("qwen2_moe", 0).bfloat16()
    one = Placement.contiguous(EXPERTS, 1)
    for placement, message in (
        ({1: one}, r"placement: expected decoder layers with experts, \[0, 2\], got 1"),
        ({0: one, 2: Placement.contiguous(6, 1)}, "placement: expected 12 experts on 1 rank"),
        ([one], "placement: expected a Placement, a mapping from decoder layer or None, got list"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_expert_parallel(model, max_tokens_per_rank=8, placement=placement)  # type: ignore[arg-type]
    assert model(torch.tensor([[4, 5, 6]])).logits.isfinite().all(), "nothing was changed"
