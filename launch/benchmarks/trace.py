"""Steps of a layer as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: all ranks in one file.

Steps run eagerly, because a graph's kernels belong to no range; launch gaps count in a phase's time. The ranges are
those of `observation.phases.phase`: on GPUs from a phase's first kernel to the end of its last, on CPUs as the host
passed them. The trace also has kernels, copies and launches. Recordings follow each other in the file, a millisecond
apart, each under a range of its own.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch.profiler import ProfilerActivity, profile

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.common import environment
from moe_runtime.observation.phases import PREFIX

KIND = "trace"
"""What the JSON says it is; viewers do not mind."""

STEPS = 5
WARM_UP_STEPS = 2

HOST_RANGES, GPU_RANGES = "user_annotation", "gpu_user_annotation"
KEPT = (HOST_RANGES, GPU_RANGES, "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver")

GAP_US = 1000.0

EVENT = {"ph": str, "cat": str, "name": str, "dur": int | float, "tid": int | str, "start_ns": int, "on": str}
"""What each event of a rank has."""


def check_event(event: dict[str, Any]) -> dict[str, Any]:
    """`event`. Raises `ValueError` unless it has what `EVENT` says."""
    if event.keys() != EVENT.keys() or not all(isinstance(event[key], kind) for key, kind in EVENT.items()):
        raise ValueError(f"expected an event with {', '.join(EVENT)}")
    return event


Event = Annotated[dict[str, Any], AfterValidator(check_event)]


class TraceFile:
    """Events of all ranks, one recording after the other; in a file once they are all there."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._events: list[Event] = []
        self._processes: dict[tuple[int, str], int] = {}
        self._end_us = 0.0

    def add(self, title: str, ranks: list[list[Event]]) -> None:
        """Put a recording, by rank, after what is there already."""
        first_ns = min((event["start_ns"] for events in ranks for event in events), default=0)
        begin_us = self._end_us
        for rank, events in enumerate(ranks):
            starts = [begin_us + (event["start_ns"] - first_ns) / 1e3 for event in events]
            ends = [start + event["dur"] for start, event in zip(starts, events, strict=True)]
            whole = {"ph": "X", "name": title, "ts": begin_us, "dur": max(ends, default=begin_us) - begin_us, "tid": 0}
            self._events.append(whole | {"pid": self._process(rank, "layer")})
            for start, event in zip(starts, events, strict=True):
                shown = {key: event[key] for key in ("ph", "cat", "name", "dur", "tid")}
                self._events.append(shown | {"ts": start, "pid": self._process(rank, event["on"])})
            self._end_us = max(self._end_us, begin_us, *ends)
        self._end_us += GAP_US

    def write(self) -> None:
        """Write the file, as `environment.write_json`."""
        found = {"kind": KIND, "traceEvents": self._events, "displayTimeUnit": "ns"}
        environment.write_json(self.file, found)

    def _process(self, rank: int, on: str) -> int:
        """The number of a line of the trace, which is named when it first comes up."""
        key = (rank, on)
        if key not in self._processes:
            number = self._processes[key] = len(self._processes) + 1
            names = (("process_name", {"name": f"rank {rank}: {on}"}), ("process_sort_index", {"sort_index": number}))
            self._events += [{"ph": "M", "name": name, "pid": number, "args": args} for name, args in names]
        return self._processes[key]


def record(
    context: ExpertParallelContext, step: Callable[[int], object], file: TraceFile, title: str
) -> dict[str, dict[str, float]]:
    """Run `step(number)` a few times under torch's profiler; rank 0 adds it to `file`. Collective.

    Returns:
        For each phase the microseconds of a step: `mean_us` over ranks, `largest_us` of a rank; on a GPU, those of the
        GPU, and nothing where the profiler could not watch it.
    """
    for number in range(WARM_UP_STEPS):
        step(number)
    activities, on_gpu = [ProfilerActivity.CPU], context.device.type == "cuda"
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(context.device)
    with profile(activities=activities) as profiler:
        # Inside, since the profiler starts slowly.
        environment.barrier(context, "trace begins")
        for number in range(STEPS):
            step(number)
        if on_gpu:
            torch.cuda.synchronize(context.device)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        events = own_events(json.loads(exported.read_text()))
    ranks = environment.gather(context, "trace", events, list[Event])
    if context.rank == 0:
        file.add(title, ranks)
    kind = GPU_RANGES if on_gpu else HOST_RANGES
    return mean_phases([phase_times(events, kind) for events in ranks])


def own_events(exported: dict[str, Any]) -> list[Event]:
    """The events worth keeping of what torch's profiler exported.

    `start_ns` is on one clock for all processes of a host, `dur` in microseconds, `on` what was busy: host or GPU.
    """
    base_ns = int(exported.get("baseTimeNanoseconds", 0))
    events = []
    for event in exported["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in KEPT:
            continue
        if kind in (HOST_RANGES, GPU_RANGES) and not event["name"].startswith(PREFIX):
            continue
        on = "host" if kind in (HOST_RANGES, "cuda_runtime", "cuda_driver") else "GPU"
        kept = {key: event[key] for key in ("ph", "cat", "name", "dur", "tid")}
        # As integers: a float of microseconds since 1970 has no nanoseconds.
        events.append(kept | {"start_ns": base_ns + round(event["ts"] * 1e3), "on": on})
    return events


def phase_times(events: list[Event], kind: str) -> dict[str, float]:
    """Microseconds of each phase in a step of one rank, from ranges of this kind; in the order in which they begin."""
    sums: dict[str, float] = {}
    for event in sorted(events, key=lambda event: int(event["start_ns"])):
        if event["cat"] == kind:
            name = event["name"].removeprefix(PREFIX)
            sums[name] = sums.get(name, 0.0) + event["dur"]
    return {name: total / STEPS for name, total in sums.items()}


def mean_phases(ranks: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """`{"mean_us", "largest_us"}` of each phase over ranks; a rank without one counts as 0."""
    found = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        times = [rank.get(name, 0.0) for rank in ranks]
        found[name] = {"mean_us": statistics.mean(times), "largest_us": max(times)}
    return found
