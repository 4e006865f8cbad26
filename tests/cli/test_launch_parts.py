"""Parts of `launch.run` and `launch.bench`: inputs from a seed, references, checks that find what is wrong, times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import CheckpointConfig, RunConfig, load_config
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.launch.benchmarks import checks, layer_operations, timing
from moe_runtime.launch.benchmarks.timing import TOTAL, measure, steps_of_iteration
from moe_runtime.launch.common import cases, draws
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import moe_reference
from moe_runtime.virtual import virtual_contexts


@pytest.mark.parametrize("kind", draws.ROUTINGS[1:])
def test_routing_is_valid_and_repeats(kind: str, seed: int) -> None:
    idx_TK, weights_TK = draws.routing(kind, seed, 1, 2, 50, 12, 3)
    again = draws.routing(kind, seed, 1, 2, 50, 12, 3)
    assert torch.equal(idx_TK, again[0]) and torch.equal(weights_TK, again[1])
    assert idx_TK.dtype == torch.int32 and weights_TK.dtype == torch.float32
    assert int(idx_TK.min()) >= -1 and int(idx_TK.max()) < 12
    torch.testing.assert_close(weights_TK.sum(1), torch.ones(50))
    for row in idx_TK.tolist():
        routed = [expert for expert in row if expert >= 0]
        assert len(set(routed)) == len(routed)
    if kind == "one":
        assert idx_TK.tolist() == [[0, -1, -1]] * 50
    else:
        other = draws.routing(kind, seed, 2, 2, 50, 12, 3)
        assert not torch.equal(idx_TK, other[0])


def test_zipf_favours_the_first_experts(seed: int) -> None:
    idx_TK, _ = draws.routing("zipf", seed, 0, 0, 4000, 8, 1)
    counts = torch.bincount(idx_TK.flatten(), minlength=8).double()
    share = 1 / torch.arange(1, 9).double()
    share /= share.sum()
    # Six standard deviations of a binomial count.
    assert ((counts - 4000 * share).abs() <= 6 * (4000 * share * (1 - share)).sqrt()).all()


def test_tokens_differ_by_rank_and_step(seed: int) -> None:
    first = draws.tokens(seed, 0, 0, 5, 64)
    assert torch.equal(first, draws.tokens(seed, 0, 0, 5, 64))
    assert not torch.equal(first, draws.tokens(seed, 1, 0, 5, 64))
    assert not torch.equal(first, draws.tokens(seed, 0, 1, 5, 64))
    assert draws.tokens(seed, 0, 0, 0, 64).shape == (0, 64)


def test_reference_one_expert_at_a_time_is_the_reference(device: torch.device, seed: int) -> None:
    config = load_config("tiny_cpu").layer.replace(num_experts=5, top_k=3, token_format="bf16", weight_format=None)
    with virtual_contexts(1, device=device)[0] as context:
        layer = MoELayer(config, context)
        layer.load_random(seed)
        x_TH, idx_TK, weights_TK = cases.step_inputs(layer, "uniform", seed, 0, 0, 7)
        idx_TK[2, 1] = -1
        with cases.expert_source(RunConfig(layer=config, seed=seed), context.device) as experts:
            found = cases.layer_reference(layer, experts, x_TH, idx_TK, weights_TK)
    gate_up, down = (
        torch.stack(w) for w in zip(*(random_expert(config, seed, e, device)[:2] for e in range(5)), strict=True)
    )
    expected = moe_reference(x_TH.cpu(), idx_TK.cpu(), weights_TK.cpu(), gate_up.cpu(), down.cpu())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_is_opened_once_for_all_experts(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one has some 270 thousand names, which take half a second."""
    config = load_config("tiny_cpu").layer.replace(num_experts=5, top_k=3)
    write_qwen3_moe_checkpoint(tmp_path, config, seed)
    opened: list[Checkpoint] = []

    class Counted(Checkpoint):
        def __enter__(self) -> Checkpoint:
            opened.append(self)
            return self

    monkeypatch.setattr(cases, "Checkpoint", Counted)
    run = RunConfig(layer=config, checkpoint=CheckpointConfig(path=str(tmp_path)))
    with cases.expert_source(run, torch.device("cpu")) as experts:
        found = [experts(expert) for expert in range(5)]
    assert len(opened) == 1
    with Checkpoint(tmp_path) as checkpoint:
        for one, wanted in zip(found, checkpoint.experts(0, range(5)), strict=True):
            assert torch.equal(dense(one.gate_up), dense(wanted.gate_up))
            assert torch.equal(dense(one.down), dense(wanted.down))


@pytest.mark.parametrize("fmt", FORMATS)
def test_checks_find_what_is_wrong(fmt: str, device: torch.device, seed: int) -> None:
    """One wrong byte, one wrong element, one token from the wrong place: each makes its check fail."""
    config = cases.with_token_format(load_config("tiny_cpu").layer, fmt)
    with virtual_contexts(1, device=device)[0] as context:
        layer = MoELayer(config, context)
        layer.load_random(seed)
        experts = layer.experts
        assert experts is not None
        parts = cases.step_inputs(layer, "uniform", seed, 0, 0, 40)
        inputs = checks.Inputs(*([part] for part in parts))
        arrived = layer.dispatcher.dispatch(*parts)
        rows_RH = checks.combine_input(arrived, inputs)
        assert checks.check_dispatch(arrived, inputs).passed
        slot = int(arrived.row_index[17]) if arrived.row_index is not None else 17
        arrived.rows.view(torch.uint8)[slot, 5] ^= 1
        # The slot is read by every expert of its token.
        assert checks.check_dispatch(arrived, inputs).error == config.top_k
        arrived.rows.view(torch.uint8)[slot, 5] ^= 1

        middle = layer_operations.grouped_gemm_swiglu(
            arrived, experts.gate_up, experts.activation, out_format=fmt, out_gsf=experts.intermediate_gsf
        )
        assert checks.check_gate_up(middle, arrived, experts.gate_up, experts.activation).passed
        shifted = replace(middle, rows=middle.rows.view(torch.uint8).roll(1, 0).view(middle.rows.dtype))
        assert not checks.check_gate_up(shifted, arrived, experts.gate_up, experts.activation).passed
        out_RH = layer_operations.grouped_gemm(middle, experts.down)
        assert checks.check_down(out_RH, middle, experts.down).passed
        # The bound of fp8 MMA is wide: what it must not let through is an element that is altogether wrong.
        by_fp8_mma = device.type == "cuda" and fmt == "fp8_block"
        # Of one that is small because its terms cancel, 2% would be inside the bound of their sum.
        column = int(out_RH[3].abs().argmax())
        out_RH[3, column] += out_RH.abs().max() if by_fp8_mma else 0.02 * out_RH[3, column]
        assert not checks.check_down(out_RH, middle, experts.down).passed

        y_TH = layer.dispatcher.combine(rows_RH, arrived.handle)
        geometry = layer.dispatcher.geometry
        assert checks.check_combine(y_TH, inputs, geometry).passed
        assert not checks.check_combine(y_TH.roll(1, 0), inputs, geometry).passed


@pytest.mark.parametrize("fmt", FORMATS)
def test_ungrouped_rows_are_the_quantized_rows(fmt: str, device: torch.device, rng: torch.Generator) -> None:
    """Dispatched to one expert of one rank, 300 rows come back in order, over several 128-row blocks of scales."""
    with virtual_contexts(1, device=device)[0] as context:
        config = load_config("tiny_cpu").layer.replace(
            num_experts=1, top_k=1, max_tokens_per_rank=300, token_format=fmt, weight_format=None
        )
        layer = MoELayer(config, context)
        x_TH = torch.randn(300, config.hidden_size, generator=rng).bfloat16()
        ids_TK, weights_TK = torch.zeros(300, 1, dtype=torch.int32), torch.ones(300, 1)
        arrived = layer.dispatcher.dispatch(*(part.to(context.device) for part in (x_TH, ids_TK, weights_TK)))
        found, made = checks.ungrouped(arrived), quantize_rows(x_TH, fmt, engine="torch")
        for name in ("quants_RK", "scales_RV", "row_scale_R"):
            ours, theirs = getattr(found, name), getattr(made, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8)), name


def test_measure_times_parts_and_the_whole() -> None:
    calls: list[int] = []

    def step(number: int, lap: object) -> None:
        calls.append(number)
        if callable(lap):
            lap("first")
            lap("second")

    with virtual_contexts(1)[0] as context:
        context.allocate()
        whole = measure(context, step, iterations=4, capturable=False)
        assert set(whole) == {TOTAL} and len(whole[TOTAL].iterations_us) == 4 and whole[TOTAL].sustained_us is None
        assert set(measure(context, step, iterations=1, capturable=False, laps=True)) == {"first", "second"}
    assert calls[3:7] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("step_us", "most", "steps"),
    [(0.0, 20, 20), (999.0, 20, 20), (3300.0, 20, 6), (3300.0, 4, 4), (9e6, 20, 3), (9e6, 2, 2)],
)
def test_an_iteration_has_fewer_steps_where_they_are_long(step_us: float, most: int, steps: int) -> None:
    assert steps_of_iteration(step_us, most) == steps


def test_ranks_meet_before_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(timing, "_barrier", lambda context: order.append("barrier"))
    with virtual_contexts(1)[0] as context:
        measure(context, lambda number, lap: order.append("step"), iterations=2, capturable=False)
    assert order[timing.WARM_UP_STEPS :] == ["barrier", "step"] * 2


def test_ranks_meet_after_their_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that spin the same number of cycles at their own clocks would part again after a barrier."""
    order: list[str] = []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("head start"))
    monkeypatch.setattr(timing, "_barrier", lambda context: order.append("barrier"))
    with virtual_contexts(1)[0] as context:
        clock = timing._CudaClock(context, lambda number, lap: order.append("step"), False, False, 2)
        assert clock.iteration(0) == {TOTAL: 500.0}
    assert order == ["head start", "barrier", "step", "step"]


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("laps", [True, False])
def test_ranks_meet_before_each_iteration_on_a_gpu(
    capturable: bool, laps: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier comes before each iteration, also of a graph, and what it takes is not counted."""
    met, seen = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)

    def barrier(context: object) -> None:
        torch.cuda._sleep(20_000_000)  # about 10 ms
        met.add_(1)

    def step(number: int, lap: Callable[[str], None]) -> None:
        torch.cuda._sleep(1_000)
        seen.copy_(met)
        lap("all")

    monkeypatch.setattr(timing, "_barrier", barrier)
    with virtual_contexts(1, device=device)[0] as context:
        context.allocate()
        (timed,) = measure(context, step, iterations=4, capturable=capturable, laps=laps, steps=3).values()
    # Before the first step, before the iteration that warms up, and before each that is timed.
    assert int(seen) == int(met) == 1 + 1 + 4
    assert max(timed.iterations_us) < 2000


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [True, False])
def test_long_steps_are_timed_without_rests_too(
    capturable: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that spins draws hardly any power: it takes as long with pauses as without."""
    monkeypatch.setattr(timing, "SUSTAINED_US", 20_000.0)
    calls: list[int] = []

    def step(number: int, lap: object) -> None:
        calls.append(number)
        torch.cuda._sleep(4_000_000)

    with virtual_contexts(1, device=device)[0] as context:
        context.allocate()
        for _ in range(3):  # other programs may use the GPU meanwhile
            calls.clear()
            (whole,) = measure(context, step, iterations=5, capturable=capturable).values()
            assert whole.sustained_us is not None and whole.median_us > timing.LONG_US
            assert timing.FEWEST_STEPS <= whole.steps_per_iteration < timing.STEPS_PER_GRAPH
            # Five iterations, and what is sustained, twice.
            assert len(calls) >= (whole.steps_per_iteration * (1 if capturable else 7))
            alike = whole.sustained_us == pytest.approx(min(whole.iterations_us), rel=0.2)
            if alike:
                break
        assert alike, whole
        (short,) = measure(
            context, lambda number, lap: torch.cuda._sleep(10_000), iterations=2, capturable=True
        ).values()
        assert short.sustained_us is None


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [True, False])
def test_measure_tells_parts_apart_on_a_gpu(capturable: bool, device: torch.device) -> None:
    """Kernels that spin for so many cycles: the parts are in their proportion, and together the whole."""
    cycles = {"first": 200_000, "second": 600_000}

    def step(number: int, lap: Callable[[str], None]) -> None:
        for name, count in cycles.items():
            torch.cuda._sleep(count)
            lap(name)

    with virtual_contexts(1, device=device)[0] as context:
        context.allocate()
        (whole,) = measure(context, step, iterations=30, capturable=capturable, steps=2).values()
        parts = measure(context, step, iterations=30, capturable=capturable, steps=2, laps=True)
    # The quickest of many: other programs may use the GPU meanwhile.
    first, second = (min(parts[name].iterations_us) for name in cycles)
    assert 2.5 < second / first < 3.5
    assert first + second == pytest.approx(min(whole.iterations_us), rel=0.15)
