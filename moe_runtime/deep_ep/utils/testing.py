"""`deep_ep.utils.testing`: timing with events and with torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

FLUSH_BYTES = 256 * 1000 * 1000
SLEEP_CYCLES = 20_000_000


def _flush_l2() -> None:
    torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


def bench(
    fn: Callable[[], object],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], object] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Mean, least and most seconds of `fn` between two events, after `num_warmups` calls and one more."""
    for _ in range(num_warmups):
        fn()
    torch.cuda.synchronize()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(num_tests)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        if flush_l2:
            _flush_l2()
        start.record()
        fn()
        end.record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)][1:]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], object] | None = None,
) -> float | list[float] | tuple[float | list[float], ...]:
    """Mean seconds that the kernels of a call take, by torch's profiler: from the start of the first to the last end.

    A call may run several kernels for a name. `Buffer` gives its kernels names that begin with `dispatch` or
    `combine`, by the call that they belong to.

    Args:
        fn: launches the kernels.
        kernel_names: how the names begin, one or several; the result has the same form.
        num_tests: calls of `fn`.
        suppress_kineto_output: without a meaning: nothing is printed.
        trace_path: where the trace is written to; None for nowhere.
        flush_l2: whether 256 MB are written before each call.
        barrier_comm_profiling: whether ranks meet before each call, after a long kernel that hides their launches.
        num_kernels_per_period: parts of a call, separated by the longest pauses; with more than one, a list of their
            times in order.
        barrier: how ranks meet; an all-reduce when None.

    Raises `ValueError` where a call ran too few kernels of a name, or calls ran different numbers of them.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    fn()
    torch.cuda.synchronize()
    one = torch.ones(1, dtype=torch.float32, device="cuda")
    profiler = _profiled(fn, num_tests, flush_l2, one if barrier_comm_profiling else None, barrier)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace_path or Path(folder) / "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"]))
    spans = [(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in kernels]
    results: list[float | list[float]] = []
    for name in names:
        of_name = [(start, end) for kernel, start, end in spans if kernel.lstrip("_").startswith(name)]
        each, rest = divmod(len(of_name), num_tests)
        if rest or each < num_kernels_per_period:
            raise ValueError(f"kernel_names: expected kernels of {name!r} in each call, got {len(of_name)} in all")
        calls = [of_name[i : i + each] for i in range(0, len(of_name), each)]
        times = [_seconds_of_parts(call, num_kernels_per_period) for call in calls]
        means = [sum(part) / len(part) for part in zip(*times, strict=True)]
        results.append(means if num_kernels_per_period > 1 else means[0])
    return results[0] if isinstance(kernel_names, str) else tuple(results)


def _seconds_of_parts(call: list[tuple[float, float]], parts: int) -> list[float]:
    """Seconds of each part of a call's kernels `(start, end)` in us, cut at the longest pauses."""
    pauses = sorted(range(1, len(call)), key=lambda i: call[i - 1][1] - call[i][0])[: parts - 1]
    bounds = [0, *sorted(pauses), len(call)]
    groups = [call[a:b] for a, b in pairwise(bounds)]
    return [(max(end for _, end in group) - group[0][0]) / 1e6 for group in groups]


def _profiled(
    fn: Callable[[], object],
    num_tests: int,
    flush_l2: bool,
    reduced: torch.Tensor | None,
    barrier: Callable[[], object] | None,
) -> torch.profiler.profile:
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], schedule=schedule) as profiler:
        for _ in range(2):
            for _ in range(num_tests):
                if flush_l2:
                    _flush_l2()
                if reduced is not None:
                    torch.cuda._sleep(SLEEP_CYCLES)
                    dist.all_reduce(reduced) if barrier is None else barrier()
                fn()
            torch.cuda.synchronize()
            profiler.step()
    return profiler
