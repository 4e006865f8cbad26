"""What the benchmark of a layer compares with: torch's layer, floors, the rule for uneven routing, traces."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.config import MoELayerConfig, RunConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.kernels.gemm.weights import GPT_OSS, SILU, SwiGLU
from moe_runtime.launch.benchmarks import (
    bounds,
    checks,
    layer_bench,
    layer_operations,
    layer_report,
    torch_layer,
    trace,
)
from moe_runtime.launch.benchmarks.torch_layer import Route, TorchLayer
from moe_runtime.layer import MoELayer
from moe_runtime.observation.phases import PhaseTimes, phase
from moe_runtime.reference import moe_reference, relative_error
from tests.support.exchange_data import RankInput, rank_input

HIDDEN, INTER = 64, 32


class Exchange:
    """All-to-all between threads, each with its rank for a context."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=60)
        self.parts: list[list[torch.Tensor]] = [[] for _ in range(world)]

    def __call__(
        self,
        context: object,
        rows: torch.Tensor,
        came: list[int],
        sent: list[int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rank = cast(int, context)
        self.parts[rank] = list(rows.split(sent))
        self.barrier.wait()
        mine = [parts[rank] for parts in self.parts]
        assert [len(part) for part in mine] == came
        result = torch.cat(mine)
        self.barrier.wait()
        return result if out is None else out.copy_(result)


def even_input(seed: int, rank: int, count: int, experts: int, top_k: int, routing: str) -> RankInput:
    """Tokens of one length, so that no error counts for more than others."""
    drawn = rank_input(seed, rank, count, HIDDEN, experts, top_k, routing)
    x_TH = torch.nn.functional.normalize(drawn.x.float(), dim=1) * HIDDEN**0.5
    return drawn._replace(x=x_TH.bfloat16())


@pytest.mark.parametrize(
    ("tokens", "experts", "routing", "activation"),
    [
        ((25, 0, 60), 8, "random", SILU),
        ((24, 32, 8), 2, "random", SILU),
        ((30, 30, 30), 7, "one", GPT_OSS),
        ((0,), 3, "random", SILU),
    ],
)
def test_torch_layer_is_the_reference(
    tokens: tuple[int, ...], experts: int, routing: str, activation: SwiGLU, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks without tokens, ranks without experts, unrouted entries, biases."""
    world, top_k = len(tokens), min(3, experts)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    biased = activation is GPT_OSS
    weights = [
        ExpertTensors(
            normal(2 * INTER, HIDDEN),
            normal(HIDDEN, INTER),
            normal(2 * INTER) if biased else None,
            normal(HIDDEN) if biased else None,
        )
        for _ in range(experts)
    ]
    inputs = [even_input(seed, rank, count, experts, top_k, routing) for rank, count in enumerate(tokens)]
    starts = expert_starts(experts, world)
    exchange = Exchange(world)
    monkeypatch.setattr(torch_layer, "_all_to_all", exchange)

    def run(rank: int) -> torch.Tensor:
        cpu = torch.device("cpu")
        layer = TorchLayer(weights.__getitem__, range(starts[rank], starts[rank + 1]), HIDDEN, INTER, activation, cpu)
        route = Route.of([part.topk_idx for part in inputs], rank, starts, cpu)
        mine = inputs[rank]
        return layer(cast(ExpertParallelContext, rank), mine.x, mine.topk_weights, route)

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(run, range(world)))
    stacked = [None if part[0] is None else torch.stack(cast(Any, part)) for part in zip(*weights, strict=True)]
    gate_up, down, gate_up_bias, down_bias = stacked
    assert gate_up is not None and down is not None
    for y_TH, mine in zip(found, inputs, strict=True):
        assert y_TH.shape == mine.x.shape and y_TH.dtype == torch.bfloat16
    expected = moe_reference(
        *(torch.cat(parts) for parts in zip(*inputs, strict=True)),
        gate_up,
        down,
        activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    # Of all ranks together: the bound is one of many tokens alike, and the parts of a single one may nearly cancel.
    assert relative_error(torch.cat(found), expected)[0] <= 1.5 * torch_layer.error_bound()
    assert 2e-3 < torch_layer.error_bound() < 1e-2


def test_bytes_of_the_busiest_rank() -> None:
    traffic = torch.tensor([[99, 1, 2], [3, 99, 4], [5, 6, 99]])
    assert bounds.busiest_bytes(traffic) == 11
    assert bounds.busiest_bytes(traffic.T) == 11
    assert bounds.busiest_bytes(torch.tensor([[9]])) == 0
    assert bounds.floor_us(351_000, 351.0) == pytest.approx(1.0)


def test_results_are_compared_with_torch_in_the_same_run() -> None:
    def result(us: float, by: str = "moe_runtime", routing: str = "uniform") -> dict[str, Any]:
        case = dict.fromkeys(layer_report.KEY, "x")
        return case | {"implementation": by, "routing": routing, "median_us": us}

    results = [result(62.0, routing="zipf"), result(20.0), result(10.0, "torch"), result(100.0, "torch", "zipf")]
    layer_report.add_comparisons(results)
    assert [one["ratio_to_torch"] for one in results] == [0.62, 2.0, None, None]


def test_sent_tokens_count_once_for_a_rank() -> None:
    class Geometry:
        world_size, starts = 2, (0, 2, 3)

    idx = [torch.tensor([[0, 1], [2, 0], [-1, -1]]), torch.tensor([[2, -1]])]
    assert checks.sent_tokens(idx, cast(Any, Geometry())).tolist() == [[2, 1], [0, 1]]


def exported(*events: tuple[str, str, float, float], base: int = 0) -> dict[str, Any]:
    made = [{"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": 7} for kind, name, ts, dur in events]
    return {"baseTimeNanoseconds": base, "traceEvents": [{"ph": "M", "name": "process_name"}, *made]}


def test_a_trace_keeps_ranges_kernels_and_launches_on_one_clock(tmp_path: Path) -> None:
    start = 1_760_000_000_000_000_000
    first = trace.own_events(
        exported(
            ("user_annotation", "moe_runtime::down", 1.001, 100.0),
            ("gpu_user_annotation", "moe_runtime::down", 50.0, 5.0 * trace.STEPS),
            ("kernel", "k", 50.0, 10.0),
            ("cuda_driver", "cuLaunchKernel", 2.0, 1.0),
            ("cpu_op", "aten::mm", 2.0, 1.0),
            ("user_annotation", "other", 2.0, 1.0),
            base=start,
        )
    )
    second = trace.own_events(exported(("user_annotation", "moe_runtime::down", 0.001, 3.0), base=start + 2000))
    assert [(event["name"], event["on"]) for event in first] == [
        ("moe_runtime::down", "host"),
        ("moe_runtime::down", "GPU"),
        ("k", "GPU"),
        ("cuLaunchKernel", "host"),
    ]
    assert second[0]["start_ns"] - first[0]["start_ns"] == 1000
    assert trace.phase_times(first, trace.GPU_RANGES) == {"down": 5.0}
    assert trace.phase_times(first, trace.HOST_RANGES) == {"down": 100.0 / trace.STEPS}
    assert trace.phase_times(second, trace.GPU_RANGES) == {}
    assert trace.mean_phases([{"a": 1.0}, {"a": 2.0, "b": 4.0}]) == {
        "a": {"mean_us": 1.5, "largest_us": 2.0},
        "b": {"mean_us": 2.0, "largest_us": 4.0},
    }
    file = trace.TraceFile(tmp_path / "trace.json")
    file.add("one", [first, second])
    file.add("two", [second, []])
    assert not file.file.exists()
    file.write()
    written = json.loads(file.file.read_text())["traceEvents"]
    downs = [event["ts"] for event in written if event["name"] == "moe_runtime::down"]
    # The last event of the first recording ends 100 us after its begin, the first of the second begins 1 ms later.
    assert downs == pytest.approx([0.0, 48.999, 1.0, 100.0 + trace.GAP_US])
    assert [event["ts"] for event in written if event["name"] == "two"] == [100.0 + trace.GAP_US] * 2


def test_phases_are_marked_for_profilers_and_clocks_alone() -> None:
    times = PhaseTimes(torch.device("cpu"))
    assert phase("idle") is phase("other")
    with phase("timed", times), phase("timed"):
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with phase("seen"), phase("both", times):
            pass
    assert {event.key for event in profiler.key_averages()} >= {"moe_runtime::seen", "moe_runtime::both"}
    assert {name: len(values) for name, values in times.milliseconds().items()} == {"timed": 1, "both": 1}


@pytest.mark.cpu_only
def test_steps_of_the_layer_take_copies_of_its_weights_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave it with its own."""
    config = MoELayerConfig(
        hidden_size=64, intermediate_size=64, num_experts=4, top_k=2, max_tokens_per_rank=5, token_format="nvfp4"
    )
    run, used = RunConfig(layer=config), []
    monkeypatch.setattr(layer_operations, "copies_to_rotate", lambda device, num_bytes: 3)
    multiply = Experts.__call__

    def spy(self: Experts, *rows: Any, **out: Any) -> torch.Tensor:
        used.append(self)
        return multiply(self, *rows, **out)

    monkeypatch.setattr(Experts, "__call__", spy)
    with ExpertParallelContext(engine="torch") as context:
        layer = MoELayer.from_run_config(run, context)
        first = layer.experts
        settings = layer_bench.Settings(operations=["layer"], iterations=4)
        bench = layer_bench.Bench(layer, run, "uniform", settings, layer_bench.Baselines(run))
        layer_operations.whole_layer(bench)
    assert layer.experts is first
    (ours,) = (result for result in bench.results if result["implementation"] == layer_report.OURS)
    assert ours["weight_copies"] == 3 and ours["median_us"] > 0
    taken = list(dict.fromkeys(id(experts) for experts in used))
    # The check takes the first; warm-up and timed steps the next of each other.
    timed = [taken.index(id(experts)) for experts in used][1:]
    assert len(taken) == 3 and all((b - a) % 3 == 1 or b == 0 for a, b in pairwise(timed))
    for name in ("gate_up", "down"):
        assert len({id(getattr(experts, name)) for experts in used}) == 3
