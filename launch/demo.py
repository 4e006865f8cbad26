"""Everything once, on any machine: a small checkpoint, four ranks over shared memory, all formats, errors and times.

`python -m moe_runtime.launch.demo` starts its ranks itself and needs no GPU, no port and no network. Its exit code is
0 only if the error of every format is inside the bound that follows from the format.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from torch.multiprocessing import start_processes

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.config import CheckpointConfig, MoELayerConfig, RunConfig, load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.launch.common import cases, environment
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.observation.phases import PhaseTimes
from moe_runtime.reference import relative_error

WORLD_SIZE = 4
SEED = 7
TIMEOUT_S = 60.0

TOKENS = ((96, 48, 7, 128), (33, 0, 128, 1), (128, 128, 128, 128), (5, 64, 0, 96))
"""Tokens of each rank (column) in each step (row); the first step is not timed."""

PHASES = {
    "route": "each rank's router chooses the experts of its tokens",
    "dispatch_send": "tokens are quantized and stored in their experts' ranks",
    "dispatch_recv": "rows are awaited and grouped, scales laid out for the GEMM",
    "experts": "GEMM gate and up, activate and requantize, GEMM down",
    "combine_send": "a rank's rows of a token are summed and stored on its rank",
    "combine_recv": "partial sums of all ranks are awaited and summed",
}


@dataclass(frozen=True)
class FormatResult:
    """One rank's results of one format: errors against float64, and the median over steps of each phase."""

    frobenius: float
    largest: float
    phase_ms: dict[str, float]


@dataclass(frozen=True)
class RankReport:
    """One rank's results: one per format, and its proportional set size (None where the system has none)."""

    formats: dict[str, FormatResult]
    pss_bytes: int | None


def layer_config(fmt: str) -> MoELayerConfig:
    """The layer of the demo with tokens and weights in `fmt`."""
    return cases.with_token_format(load_config("tiny_qwen3_moe").layer, fmt)


def exit_code(reports: list[RankReport]) -> int:
    """0 if every error of every rank is inside the bound of its format, else 1; NaN is outside."""
    inside = (
        result.frobenius <= cases.layer_bound(layer_config(fmt))
        for report in reports
        for fmt, result in report.formats.items()
    )
    return 0 if all(inside) else 1


def run_rank(rank: int, folder: str) -> None:
    """One rank of the demo, in a process of its own."""
    if sys.platform == "linux":
        # Whatever the host is called, gloo only has to find this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    try:
        with ExpertParallelContext(device="cpu", transport="shared", engine="torch", timeout_s=TIMEOUT_S) as context:
            report = run_formats(context, Path(folder) / "checkpoint", environment.console_of(context))
            reports = environment.gather(context, "reports", report, RankReport)
        if rank == 0:
            (Path(folder) / "reports").write_text(json.dumps([asdict(report) for report in reports]))
    finally:
        dist.destroy_process_group()


def run_formats(context: ExpertParallelContext, checkpoint: Path, console: Console) -> RankReport:
    """Load the checkpoint in all formats, run every step in each, and compare with float64. Collective."""
    console.print(
        f"[bold]2[/bold] {context.world_size} ranks, transport {context.transport}, engine {context.engine}: "
        "each reads only its own experts, and quantizes them one by one"
    )
    layers = {fmt: MoELayer(layer_config(fmt), context) for fmt in FORMATS}
    experts = layers["bf16"].local_experts
    columns = (TextColumn("  loading {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("experts"))
    with Checkpoint(checkpoint) as files, Progress(*columns, console=console, disable=console.quiet) as progress:
        task = progress.add_task("rank 0", total=len(FORMATS) * len(experts))
        for layer in layers.values():
            assert layer.router is not None
            layer.router.load(files.router(0).weight)
            layer.load_experts(_counted(files.experts(0, experts), progress, task))
    context.allocate()
    console.print(
        f"[bold]3[/bold] {len(TOKENS)} steps in each of {len(FORMATS)} formats, all layers in one context of "
        f"{decimal(context.reserved_bytes)} per rank; tokens per rank: {', '.join(map(str, TOKENS))}"
    )
    for name, what in PHASES.items():
        console.print(f"  {name:<14} {what}", markup=False)
    inputs = [
        cases.step_inputs(layers["bf16"], "router", SEED, context.rank, step, counts[context.rank])
        for step, counts in enumerate(TOKENS)
    ]
    run = RunConfig(layer=layers["bf16"].config, checkpoint=CheckpointConfig(path=str(checkpoint)))
    x_TH, idx_TK, weights_TK = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    with cases.expert_source(run, context.device) as source:
        reference_TH = cases.layer_reference(layers["bf16"], source, x_TH, idx_TK, weights_TK)
    results = {}
    for fmt, layer in layers.items():
        outputs, times = [], PhaseTimes(context.device)
        for step, (x_TH, _, _) in enumerate(inputs):
            environment.barrier(context, "step")
            layer.times = times if step else None
            outputs.append(layer(x_TH))
        phase_ms = {name: median(values) for name, values in times.milliseconds().items()}
        results[fmt] = FormatResult(*relative_error(torch.cat(outputs), reference_TH), phase_ms)
    return RankReport(results, pss_bytes())


def pss_bytes() -> int | None:
    """This process's proportional set size: its own memory and its share of what it shares; None if unknown."""
    file = Path("/proc/self/smaps_rollup")
    if not file.is_file():
        return None
    return next(int(line.split()[1]) * 1024 for line in file.read_text().splitlines() if line.startswith("Pss:"))


def result_table(reports: list[RankReport]) -> Table:
    """One line per format: errors and times of the worst rank."""
    title = "Worst rank: error against float64, and ms per phase"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in ("format", "error", "bound", "max", *(name.replace("_", " ") for name in PHASES)):
        first = column == "format"
        table.add_column(column, justify="left" if first else "right", no_wrap=first)
    for fmt in FORMATS:
        results = [report.formats[fmt] for report in reports]
        bound = cases.layer_bound(layer_config(fmt))
        error, largest = _worst([r.frobenius for r in results]), _worst([r.largest for r in results])
        color = "green" if error <= bound else "red"
        phases = (max(result.phase_ms[name] for result in results) for name in PHASES)
        table.add_row(
            fmt,
            f"[{color}]{error:.4f}[/{color}]",
            f"{bound:.4f}",
            f"{largest:.4f}",
            *(f"{ms:.1f}" for ms in phases),
        )
    return table


def print_results(reports: list[RankReport], console: Console) -> None:
    """The table, what its columns mean, and the memory of all ranks."""
    console.print(result_table(reports))
    console.print(
        "error: Frobenius norm, relative to a reference with the checkpoint's unquantized weights; bound: "
        "follows from the format; max: largest error, relative to the reference's largest value; ms: median over steps"
    )
    sizes = [report.pss_bytes for report in reports if report.pss_bytes is not None]
    if len(sizes) == len(reports):
        console.print(f"memory (PSS): {decimal(sum(sizes))} in all, per rank {', '.join(map(decimal, sizes))}")
    else:
        console.print("memory (PSS): unknown on this system")


def demo(console: Console) -> int:
    """Write the checkpoint, run the ranks, and print; the exit code."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moe_runtime-demo-") as folder:
        config = layer_config("bf16")
        write_qwen3_moe_checkpoint(Path(folder) / "checkpoint", config, SEED, num_shards=2)
        size = sum(file.stat().st_size for file in (Path(folder) / "checkpoint").iterdir())
        console.print(
            f"[bold]1[/bold] wrote a Qwen3-MoE layer of {decimal(size)}: {config.num_experts} experts, "
            f"top {config.top_k}, hidden {config.hidden_size}, intermediate {config.intermediate_size}"
        )
        # Forked from a process that has imported everything once, ranks start fast and share that memory.
        multiprocessing.get_context("forkserver").set_forkserver_preload(
            ["moe_runtime.layer", "moe_runtime.launch.common.environment"]
        )
        start_processes(run_rank, (folder,), WORLD_SIZE, start_method="forkserver")
        reports = TypeAdapter(list[RankReport]).validate_json((Path(folder) / "reports").read_bytes())
    print_results(reports, console)
    code = exit_code(reports)
    words = "every error is inside its bound" if code == 0 else "an error is OUTSIDE its bound"
    console.print(f"{words}; {time.monotonic() - begin:.1f} s")
    return code


def _worst(values: list[float]) -> float:
    """The largest, NaN if there is one."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def _counted(experts: Iterator[ExpertTensors], progress: Progress, task: TaskID) -> Iterator[ExpertTensors]:
    for expert in experts:
        yield expert
        progress.advance(task)


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.demo", description=__doc__)
    environment.exit_at_sigterm()
    return environment.run_parsed("demo", parser, lambda _: demo(Console(highlight=False)), arguments)


if __name__ == "__main__":
    sys.exit(main())
