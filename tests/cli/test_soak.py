"""`launch.soak`: right where all is right, in every format, and every kind of wrong is found and named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.comm.heaps import nvshmem_world
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.launch import soak
from moe_runtime.launch.benchmarks.soak_steps import KINDS, StepPlan, expected_offsets, multiplying_experts
from moe_runtime.virtual import virtual_contexts
from tests.cli.test_launch import TINY, TWO_RANKS, program
from tests.support.exchange_data import LAYERS, config

STEPS = 24


def soak_layers(rank: int, world: int, layers: list[MoELayerConfig], steps: int, seed: int) -> list[soak.SoakResult]:
    with ExpertParallelContext(timeout_s=60) as context:
        layers_dispatchers = [soak.make_dispatchers(c, context) for c in layers]
        return [soak.Soak(dispatchers, seed, steps).run() for dispatchers in layers_dispatchers]


@pytest.mark.cpu_only
def test_every_format_comes_home_bit_for_bit(get_pool: Any, seed: int) -> None:
    """On 3 ranks, of which each holds experts of most tokens; all have some in at least one step."""
    seed = next(number for number in itertools.count(seed) if busy_steps(number, 3, 8))
    ranks = get_pool(3).run(soak_layers, LAYERS, 8, seed)
    for results in ranks:
        assert all(result.passed for result in results), results
    for layer in zip(*ranks, strict=True):
        assert sum(result.tokens for result in layer) > 0 and len({result.checksum for result in layer}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_replays_over_nvshmem(fmt: str, get_pool: Any, seed: int) -> None:
    if nvshmem_world.problem():
        pytest.skip(f"NVSHMEM: {nvshmem_world.problem()}")
    layers = [config(fmt, max_tokens_per_rank=300, token_buckets=(5, 12)), config(fmt)]
    for results in get_pool(torch.cuda.device_count(), gpus=True).run(soak_layers, layers, 200, seed, timeout=170):
        assert all(result.passed and result.replays == 2 * 175 for result in results), results


class Operations(TorchDispatchMode):
    """Names of torch's operations within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu_only
@pytest.mark.parametrize("c", LAYERS, ids=[f"layer {number}" for number in range(len(LAYERS))])
def test_a_step_and_its_check_could_be_captured(c: MoELayerConfig, seed: int) -> None:
    """Around dispatch and combine nothing reads a number of the device, nor makes a tensor of Python numbers."""
    with virtual_contexts(1)[0] as context:
        one = soak.Soak(soak.make_dispatchers(c, context), seed, 1)
        (dispatcher,) = one.dispatchers.values()
        plans = (StepPlan.draw(seed, step, one.geometry) for step in itertools.count())
        plan = next(plan for plan in plans if plan.counts[0] > 0)
        x_TH = plan.tokens(seed, 0, one.geometry, context.device)
        inputs = (x_TH, *plan.routing(seed, 0, one.geometry, context.device))
        arrived = dispatcher.dispatch(*inputs)
        with Operations() as experts:
            y_RH = multiplying_experts(arrived)
        y_TH = dispatcher.combine(y_RH, arrived.handle)
        with Operations() as check:
            checked = one._checked(y_TH, arrived.group_offsets, *inputs)
        assert int(checked.wrong_tokens) == 0
    # The comparison and the fold are among them.
    assert "searchsorted" in experts.names and check.names >= {"searchsorted", "ne", "arange"}
    for seen in (experts, check):
        assert not seen.names & {"_local_scalar_dense", "nonzero", "lift_fresh", "lift_fresh_copy"}


class Faulty(TokenDispatcher):
    """Does one thing wrong in dispatches `at`, once rows arrive there; `done` tells in which it did."""

    fault: str
    at: set[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls, self.done = -1, []

    def dispatch(self, x: torch.Tensor, *args: Any, **named: Any) -> DispatchedTokens:
        self.calls += 1
        if self.fault == "tokens change places" and self.calls in self.at:
            x = x.roll(1, 0)
        arrived = super().dispatch(x, *args, **named)
        if self.calls in self.at:
            total = int(arrived.group_offsets[-1])
            assert total > 0
            if self.fault == "a bit of a row":
                assert arrived.row_index is not None
                arrived.rows.view(torch.int16)[int(arrived.row_index[total - 1]), 5] ^= 1 << 14
            elif self.fault == "a row too many":
                arrived.group_offsets[-1] += 1
        return arrived


def soak_with_a_fault(rank: int, world: int, fault: str, at: set[int], seed: int) -> soak.SoakResult:
    """Rank 0 errs."""
    Faulty.fault, Faulty.at = fault, at if rank == 0 else set()
    with ExpertParallelContext(timeout_s=60) as context, pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "TokenDispatcher", Faulty)
        return soak.Soak(soak.make_dispatchers(config("bf16"), context), seed, STEPS).run()


def busy_steps(seed: int, world: int, steps: int) -> list[int]:
    """The steps in which all ranks bring several tokens, all drawn alike."""
    with virtual_contexts(world)[0] as context:
        geometry = TokenDispatcher.from_config(context, config("bf16")).geometry
    plans = (StepPlan.draw(seed, step, geometry) for step in range(steps))
    return [plan.number for plan in plans if plan.kind == "uniform" and min(plan.counts) > 3]


BUSY_SEED = 0
"""Of a soak that has a busy step."""


@pytest.mark.cpu_only
@pytest.mark.parametrize("passes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("fault", ["a bit of a row", "tokens change places", "a row too many"])
def test_a_fault_is_found(fault: str, passes: tuple[int, ...], get_pool: Any) -> None:
    step = busy_steps(BUSY_SEED, 2, STEPS)[0]
    results = get_pool(2).run(soak_with_a_fault, fault, {STEPS * number + step for number in passes}, BUSY_SEED)
    assert not all(result.passed for result in results)
    if fault == "a row too many":
        assert [result.wrong_arrivals for result in results] == [len(passes), 0]
        return
    assert sum(result.wrong_tokens for result in results) >= len(passes)
    assert {result.first_wrong_step for result in results} - {None} == {step}
    assert max(result.differing_steps for result in results) == (1 if len(passes) == 1 else 0)
    if fault == "tokens change places":
        assert results[1].passed, "rank 0 sent its own tokens"


@pytest.mark.cpu_only
def test_the_program_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY.format(layer="token_format: mxfp8"))
    file = tmp_path / "soak.json"
    arguments = ("--config", tmp_path / "tiny.yaml", "--steps", 50, "--format", "nvfp4", "--combine-format", "mxfp8")
    done = program(
        "soak", *arguments, "--mode", "contiguous", "--token-buckets", 2, 9, "--json", file, launcher=TWO_RANKS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "tokens nvfp4, combine mxfp8, contiguous rows, steps of at most 2 or 9 or 16 tokens; 2 rank(s) on cpu, "
        "transport shared" in done.stdout
    )
    report = json.loads(file.read_text())
    assert report["kind"] == "soak", "what launch.tables knows other files by"
    assert report["passed"] is True and report["seed"] == 3 and report["environment"]["ranks"] == 2
    for rank, result in enumerate(report["ranks"]):
        assert (result["steps"], result["wrong_tokens"], result["first_wrong_step"]) == (50, 0, None)
        assert f"rank {rank}: right, 0 of {result['tokens']} tokens wrong" in done.stdout


def test_the_program_of_one_rank_repeats_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, name = tmp_path / "soak.json", tmp_path / "tiny.yaml"
    name.write_text(TINY.format(layer="token_format: bf16"))
    arguments = ["--config", str(name), "--steps", "6", "--tokens", "7", "--json", str(file)]

    def checksum(*more: str) -> str:
        assert soak.main([*arguments, *more]) == 0
        return json.loads(file.read_text())["ranks"][0]["checksum"]

    assert checksum() == checksum() != checksum("--seed", "5")
    experts = soak.multiplying_experts
    monkeypatch.setattr(soak, "multiplying_experts", lambda arrived: experts(arrived) * 2)
    assert soak.main(arguments) == 1
    assert json.loads(file.read_text())["passed"] is False
    assert "rank 0: WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps: expected at least 1, got 0"),
        (("--json", "no/such/folder/file.json"), "--json: no folder no/such/folder"),
        (("--tokens", "0"), "--tokens: expected at least 1, got 0"),
        (("--token-buckets", "4", "0"), "--token-buckets: expected at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("soak: ") and error.count("\n") == 1


def test_the_json_has_the_config_that_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A soak has room for every row whatever the config says, and does not take a placement for one that it checked."""
    layer = "{hidden_size: 128, intermediate_size: 128, num_experts: 4, top_k: 2, max_tokens_per_rank: 8"
    config, file = tmp_path / "config.yaml", tmp_path / "soak.json"
    config.write_text(f"layer: {layer}, expert_row_capacity: 1}}\n")
    assert soak.main(["--config", str(config), "--steps", "2", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["config"]["layer"]["expert_row_capacity"] is None
    config.write_text(f"layer: {layer}}}\nplacement: {{spare_slots: 2}}\n")
    assert soak.main(["--config", str(config), "--steps", "2"]) == 2
    assert capsys.readouterr().err == (
        "soak: placement: a soak is of contiguous experts, expected a config without one\n"
    )


def test_steps_are_of_every_kind_and_size(seed: int) -> None:
    with virtual_contexts(3)[1] as context:
        geometry = TokenDispatcher.from_config(context, config("bf16")).geometry
    plans = [StepPlan.draw(seed, step, geometry) for step in range(200)]
    assert {plan.kind for plan in plans} == set(KINDS)
    counts = {count for plan in plans for count in plan.counts}
    assert {0, 1, geometry.max_tokens} < counts and max(counts) == geometry.max_tokens
    sized = [StepPlan.draw(seed, step, geometry, (2, 5, geometry.max_tokens)) for step in range(200)]
    assert {plan.size for plan in sized} == {2, 5, geometry.max_tokens}
    assert {plan.size for plan in plans} == {geometry.max_tokens}
    assert all(max(plan.counts) <= plan.size for plan in sized) and {plan.size for plan in sized} <= {
        count for plan in sized for count in plan.counts
    }
    cpu = torch.device("cpu")
    for plan in plans[:20]:
        idx = [plan.routing(seed, rank, geometry, cpu)[0] for rank in range(3)]
        sizes = [sum(ids.flatten().tolist().count(e) for ids in idx) for e in range(*geometry.starts[1:3])]
        wanted = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        assert expected_offsets(idx, geometry).tolist() == wanted
