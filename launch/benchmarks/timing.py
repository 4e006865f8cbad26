"""How a step is timed: ranks start together, each iteration counts its slowest rank, the median is over iterations.

On a GPU an iteration is a replay of a CUDA graph of a barrier, an event, several steps and another event, or as many
eager steps where the step cannot be captured. On a CPU it is one step by the wall clock.

After a rest a GPU runs for some time at a higher clock than it can keep: an H200 multiplied FP8 at 1410 TFLOP/s (1.52
GHz) for 40 to 80 ms, and at 1200 (1.27 GHz) from 0.1 s on. An iteration is therefore short and comes after a rest.
Steps of a millisecond or more are timed without pauses too, after 0.3 s of them: `sustained_us`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.clock import write_clock
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.launch.common.environment import gather

STEPS_PER_GRAPH, FEWEST_STEPS, WARM_UP_STEPS = 20, 3, 3
ITERATION_US = 20_000.0
"""Of an iteration on a GPU, unless `FEWEST_STEPS` take longer."""
RESTS = 3
"""Length of the rest before an iteration, in iterations."""
HEAD_START_CYCLES = 2_000_000
"""A GPU spins so long before the barrier of an iteration, about 1 ms, while the host launches barrier and iteration.

Ranks then begin together. With the spin after the barrier each took its own clock: one of two H200s began 60 to 170 us
before the other and waited so long in its first dispatch, 3 to 9 us for each of 20 steps. The barrier is in the graph
of the steps: launched by itself, it may be over before a host that pauses has launched the steps.
"""
LONG_US = 1000.0
"""A step of this length is timed without pauses too."""
SUSTAINED_US = 300_000.0
"""Length of the steps before a sustained time, and of those that are timed."""
CACHES_TO_ROTATE = 32
"""Inputs that steps use in turn are together this many times as large as the L2 cache, unless a graph has fewer steps.
Weights that leave the cache first may leave a part of themselves there, which is then small."""
TOTAL = "total"
MOST_MARKS = 16
"""Marks of a step: its beginning and the ends of its parts."""

Lap = Callable[[str], None]
Step = Callable[[int, Lap], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one step: of each iteration, on its slowest rank.

    Attributes:
        iterations_us: one number per iteration.
        steps_per_iteration: steps that an iteration's number is the mean of.
        method: `cuda_graph`, `cuda_events` or `wall_clock`.
        sustained_us: of a step without pauses, after `SUSTAINED_US` of them; None where that is not timed.
    """

    iterations_us: list[float]
    steps_per_iteration: int
    method: str
    sustained_us: float | None = None

    @property
    def median_us(self) -> float:
        return statistics.median(self.iterations_us)


def times_record(timing: Timing | None) -> dict[str, Any]:
    """What JSON says of a time: its median over iterations, and from the smallest to the largest as its spread."""
    return {
        "median_us": timing.median_us if timing else None,
        "smallest_us": min(timing.iterations_us) if timing else None,
        "largest_us": max(timing.iterations_us) if timing else None,
        "sustained_us": timing.sustained_us if timing else None,
        "iterations": len(timing.iterations_us) if timing else 0,
        "steps_per_iteration": timing.steps_per_iteration if timing else 0,
        "method": timing.method if timing else None,
    }


def copies_to_rotate(device: torch.device, num_bytes: int) -> int:
    """How many copies of an input of `num_bytes` steps must use in turn, so that none is still in the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(STEPS_PER_GRAPH, ceil_div(CACHES_TO_ROTATE * cache, max(1, num_bytes))))


def steps_of_iteration(step_us: float, most: int) -> int:
    """Steps of an iteration on a GPU, of which each takes about so long."""
    return min(most, max(FEWEST_STEPS, int(ITERATION_US / max(step_us, 1.0))))


def measure(
    context: ExpertParallelContext,
    step: Step,
    *,
    iterations: int,
    capturable: bool,
    laps: bool = False,
    steps: int = STEPS_PER_GRAPH,
    sustained: bool = True,
) -> dict[str, Timing]:
    """Time `step(number, lap)`. Collective.

    Args:
        step: does step `number` (which of the rotated inputs to use); calls `lap(name)` where a part called `name`
            ends, which began at the start of the step or at the lap before. Must not wait for the device.
        iterations: how many are timed.
        capturable: whether a GPU may capture the step in a graph.
        laps: time the parts instead of the whole step. Telling them apart takes time itself: on Hopper a kernel that
            writes the clock and lets the next one begin early, else an event, in graphs a node of its own.
        steps: of an iteration on a GPU, at most; fewer where they are long.
        sustained: whether long steps are timed without pauses too.

    Returns:
        Timings by part; under `total` the whole step where `laps` is false.
    """
    on_gpu = context.device.type == "cuda"
    clock = _CudaClock(context, step, capturable, laps, steps) if on_gpu else _WallClock(context, step, laps)
    clock.warm_up()
    mine: dict[str, list[float]] = {}
    for number in range(iterations):
        clock.rest()
        for name, microseconds in clock.iteration(number).items():
            mine.setdefault(name, []).append(microseconds)
    context.check()
    ranks = gather(context, "timings", mine, dict[str, list[float]])
    timings = {
        name: Timing([max(values) for values in zip(*(r[name] for r in ranks), strict=True)], clock.steps, clock.method)
        for name in mine
    }
    if sustained and isinstance(clock, _CudaClock) and not laps and timings[TOTAL].median_us >= LONG_US:
        mine_us = clock.sustained(timings[TOTAL].median_us)
        context.check()
        sustained_us = max(gather(context, "sustained time", mine_us, float))
        timings[TOTAL] = replace(timings[TOTAL], sustained_us=sustained_us)
    return timings


def measure_steps(
    context: ExpertParallelContext, step: Callable[[int], object], *, capturable: bool = True, **how: Any
) -> Timing:
    """`measure` of `step(number)` as a whole; `how` are its other arguments. Collective."""
    return measure(context, lambda number, lap: step(number), capturable=capturable, **how)[TOTAL]


def _barrier(context: ExpertParallelContext) -> None:
    """On GPUs it is queued on the current stream and the host goes on."""
    if context.world_size == 1 or context.group is None:
        return
    if context.device.type == "cuda":
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=context.device), group=context.group.group)
    else:
        dist.barrier(context.group.group)


def _no_lap(name: str) -> None:
    """Where the parts of a step are not timed."""


class _WallClock:
    """One step per iteration, by the host's clock."""

    steps = 1
    method = "wall_clock"

    def __init__(self, context: ExpertParallelContext, step: Step, laps: bool) -> None:
        self._context = context
        self._step = step
        self._laps = laps

    def warm_up(self) -> None:
        for number in range(WARM_UP_STEPS):
            self._step(number, _no_lap)

    def rest(self) -> None:
        """A CPU needs none."""

    def iteration(self, number: int) -> dict[str, float]:
        _barrier(self._context)
        marks = [("", time.perf_counter())]
        self._step(number, (lambda name: marks.append((name, time.perf_counter()))) if self._laps else _no_lap)
        if not self._laps:
            marks.append((TOTAL, time.perf_counter()))
        return {name: (at - before) * 1e6 for (_, before), (name, at) in pairwise(marks)}


class _CudaClock:
    """At most `steps` steps per iteration between events, captured once where possible."""

    def __init__(self, context: ExpertParallelContext, step: Step, capturable: bool, laps: bool, steps: int) -> None:
        self.steps = steps
        self.method = "cuda_graph" if capturable else "cuda_events"
        self._context = context
        self._step = step
        self._laps = laps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._marks: list[tuple[str, torch.cuda.Event | int]] = []
        self._start_and_end: tuple[torch.cuda.Event, torch.cuda.Event]
        self._clocks: torch.Tensor | None = None
        self._iteration_us = 0.0
        if laps and context.engine == "cuda":
            self._clocks = torch.zeros(steps * MOST_MARKS, 1, dtype=torch.int64, device=context.device)

    def warm_up(self) -> None:
        """Run a few steps, see how many an iteration has, and capture them. Collective."""
        _barrier(self._context)  # the first collective of a group may not be captured
        # On a side stream, as capturing asks for.
        stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for number in range(WARM_UP_STEPS):
                start.record()
                self._step(number, _no_lap)
                end.record()
        stream.wait_stream(side)
        torch.cuda.synchronize(self._context.device)
        # Of an eager step; one that waits for its launches is short enough for the most steps.
        step_us = max(gather(self._context, "time of a step", start.elapsed_time(end) * 1e3, float))
        self.steps = steps_of_iteration(step_us, self.steps)
        self._iteration_us = self.steps * step_us
        if self.method == "cuda_graph":
            self._graph = self._captured(self._between_events)
        # Once as it will be timed: a first replay takes 0.1 to 0.2 ms more, an exchange after 0.1 s without any 0.1.
        self.iteration(0)

    def _captured(self, enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what `enqueue` launches; all graphs have one pool of memory, since none runs beside another."""
        graph, pool = torch.cuda.CUDAGraph(), None if self._graph is None else self._graph.pool()
        # Other threads (a process group's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            enqueue()
        return graph

    def _recorded(self) -> torch.cuda.Event:
        # An external event becomes a node that records it anew at each replay.
        event = torch.cuda.Event(enable_timing=True, external=self.method == "cuda_graph")
        event.record()
        return event

    def _mark(self, name: str) -> None:
        if self._clocks is not None:
            number = len(self._marks)
            write_clock(self._clocks[number])
            self._marks.append((name, number))
        else:
            self._marks.append((name, self._recorded()))

    def _steps(self) -> None:
        self._marks = []
        for number in range(self.steps):
            if self._laps:
                self._mark("")
            self._step(number, self._mark if self._laps else _no_lap)

    def rest(self) -> None:
        time.sleep(RESTS * self._iteration_us * 1e-6)

    def _between_events(self) -> None:
        """Enqueue a barrier and the steps, between events."""
        _barrier(self._context)
        start = self._recorded()
        self._steps()
        self._start_and_end = start, self._recorded()

    def sustained(self, step_us: float) -> float:
        """Microseconds of a step without pauses; `step_us`, the same on all ranks, is about what it takes with them."""
        run = self._steps if self._graph is None else self._captured(self._steps).replay
        times = ceil_div(int(SUSTAINED_US), int(step_us * self.steps))
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        _barrier(self._context)
        for event in (start, middle):
            event.record()
            for _ in range(times):
                run()
        end.record()
        torch.cuda.synchronize(self._context.device)
        return middle.elapsed_time(end) * 1e3 / (times * self.steps)

    def iteration(self, number: int) -> dict[str, float]:
        torch.cuda._sleep(HEAD_START_CYCLES)
        if self._graph is None:
            self._between_events()
        else:
            self._graph.replay()
        torch.cuda.synchronize(self._context.device)
        start, end = self._start_and_end
        self._iteration_us = start.elapsed_time(end) * 1e3
        if not self._laps:
            return {TOTAL: self._iteration_us / self.steps}
        clocks = [] if self._clocks is None else self._clocks.flatten().tolist()
        sums: dict[str, float] = {}
        for (_, before), (name, after) in pairwise(self._marks):
            if not name:
                continue
            if isinstance(before, int) and isinstance(after, int):
                microseconds = (clocks[after] - clocks[before]) * 1e-3
            else:
                assert isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event)
                microseconds = before.elapsed_time(after) * 1e3
            sums[name] = sums.get(name, 0.0) + microseconds
        return {name: total / self.steps for name, total in sums.items()}
