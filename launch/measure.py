"""Everything that is measured about a layer, by one command: `python -m moe_runtime.launch.measure FOLDER`.

It runs the programs of its parts one after the other, each in processes of its own:

    links       `link_bench`
    layer       `bench` over a config on 1, 2, 4, ... of the GPUs that are there, several routings on all of them
    settings    dispatch and combine of large steps with few SMs
    trace       `bench layer --trace` after them: what is profiled is not timed
    gemm        `bench gemm`
    pictures    `pictures` of what there is

JSON, a trace and pictures go to FOLDER; copied to `launch/results/`, `launch.tables` makes the tables of README.md and
of that folder's of them. A part that fails or takes too long is told of in the end, and the others run all the same.
What a part wrote before is removed when it runs again. Floors of exchanges count with what `link_bench` found, now or
before, if it has.

All of it is long. A short one, of what matters most:

    measure FOLDER --parts layer trace pictures --ranks 8 --tokens 8 128 4096 --formats nvfp4 fp8_block \\
        --combine-format bf16 --routing uniform --steps 6
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console

from moe_runtime.config import CombineFormatName, FormatName, load_config
from moe_runtime.launch import cases, environment
from moe_runtime.launch.bounds import EVEN
from moe_runtime.launch.drawing import check_can_draw

PARTS = ("links", "layer", "settings", "trace", "gemm", "pictures")
TOKENS = (1, 8, 32, 128, 512, 1024, 4096, 8192)
ROUTINGS = (EVEN, "zipf", "half", "one")
GRACE_S = 60.0
OUTPUTS = ("--json", "--trace", "--picture")
"""Options of the programs whose value is a file to write."""

FEW_SMS, LARGE = 16, 1024
"""SMs of an exchange that leaves the others to arithmetic, and tokens per rank from which on it is measured."""


@dataclass(frozen=True)
class Job:
    """A program to run: its name under `moe_runtime.launch`, its arguments, and in how many ranks."""

    program: str
    arguments: tuple[str, ...]
    ranks: int = 1

    @property
    def command(self) -> list[str]:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}")
        start = [sys.executable, *(torchrun if self.ranks > 1 else ())]
        return [*start, "-m", f"moe_runtime.launch.{self.program}", *self.arguments]

    @property
    def outputs(self) -> list[Path]:
        """The files that its options have it write."""
        pairs = itertools.pairwise(self.arguments)
        return [Path(value) for option, value in pairs if option in OUTPUTS]

    @property
    def text(self) -> str:
        ranks = "" if self.ranks == 1 else f", {self.ranks} ranks"
        return f"{shlex.join([self.program, *self.arguments])}{ranks}"


def rank_counts(num_gpus: int) -> list[int]:
    """Powers of two up to the GPUs that are there, these included; 1 without a GPU."""
    most = max(1, num_gpus)
    powers = [1 << power for power in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]


def jobs(options: argparse.Namespace, num_gpus: int) -> Iterator[Job]:
    """What is to be run, in order, each once those before have ended; `options` are those of the command line."""
    folder, ranks = options.folder, sorted(set(options.ranks or rank_counts(num_gpus)))
    most = ranks[-1]
    runs = {count: folder / f"layer_{count}.json" for count in ranks}
    phases, links = folder / "phases.json", folder / "links.json"
    steps = ("--steps", str(options.steps))
    measured = "links" in options.parts and most > 1 and num_gpus > 0
    if measured:
        yield Job("link_bench", ("--json", str(links)), most)
    rate = ("--links", str(links)) if links.exists() or (measured and options.dry_run) else ()
    if "layer" in options.parts:
        # Most ranks first: that is what most of the tables show.
        for count in reversed(ranks):
            operations = ("dispatch", "combine", "layer") if count > 1 else ("layer",)
            routings = ("--routing", *options.routing) if count == most else ()
            common = _common(options, options.tokens, options.combine_format, rate)
            yield Job("bench", (*operations, *common, *steps, *routings, "--json", str(runs[count])), count)
    large = [count for count in options.tokens if count >= LARGE]
    if "settings" in options.parts and most > 1 and large:
        few = ("dispatch", "combine", "--num-sms", str(FEW_SMS), "--json", str(folder / "few_sms.json"))
        yield Job("bench", (*few, *_common(options, large, options.combine_format, rate), *steps), most)
    if "trace" in options.parts:
        # A few eager steps of each case: one combine format shows where the time goes.
        common = _common(options, options.tokens, options.combine_format[:1], rate)
        files = ("--trace", str(folder / "trace.json"), "--json", str(phases))
        yield Job("bench", ("layer", *common, *files), most)
    if "gemm" in options.parts:
        files = ("--json", str(folder / "gemm.json"), "--picture", str(folder / "gemm.svg"))
        yield Job("bench", ("gemm", *steps, *files))
    if "pictures" in options.parts:
        drawn = [*runs.values(), *([phases] if "trace" in options.parts or phases.exists() else [])]
        yield Job("pictures", (*map(str, drawn), "--folder", str(folder)))


def _common(
    options: argparse.Namespace, tokens: Sequence[int], combine_formats: Sequence[str], rate: Sequence[str]
) -> tuple[str, ...]:
    formats = ("--formats", *options.formats, "--combine-format", *combine_formats)
    return ("--config", options.config, "--tokens", *map(str, tokens), *formats, *rate)


def run(job: Job, limit_s: float) -> str:
    """How it ended: `ok`, or what went wrong. What it started does not outlive it.

    Its files of a run before are gone then, unless it did not even begin, because of its arguments.
    """
    before = [(file, file.with_name(f"{file.name}.before")) for file in job.outputs if file.exists()]
    for file, kept in before:
        # Of a job that fails nothing is there, rather than what a later part would take for its results.
        file.replace(kept)
    process = subprocess.Popen(job.command)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:g} s"
    finally:
        if process.poll() is None:
            # torchrun ends its ranks when it is asked to end; killed at once, it would leave them.
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for file, kept in before:
            if process.returncode == 2:
                kept.replace(file)
            else:
                kept.unlink()
    return "ok" if code == 0 else f"exit code {code}"


def work(options: argparse.Namespace) -> int:
    """Run it all; 1 if a part failed."""
    num_gpus = torch.cuda.device_count()
    load_config(options.config)
    if not options.folder.is_dir():
        raise ValueError(f"FOLDER: no folder {options.folder}")
    for count in options.ranks or ():
        if not 1 <= count <= (num_gpus or count):
            raise ValueError(f"--ranks: expected 1 .. {num_gpus} GPUs, got {count}")
    if num_gpus == 0 and options.ranks is None:
        raise ValueError("--ranks: expected with a number, there is no GPU to count; --config tiny_cpu is for CPUs")
    if not options.limit_s > 0:
        raise ValueError(f"--limit-s: expected a positive number, got {options.limit_s:g}")
    for name, least in (("--steps", options.steps), ("--tokens", min(options.tokens))):
        if least < 1:
            raise ValueError(f"{name}: expected at least 1, got {least}")
    if {"gemm", "pictures"} & set(options.parts):
        check_can_draw("--parts")
    console = Console(highlight=False, soft_wrap=True)
    ends = []
    for job in jobs(options, num_gpus):
        console.print(f"$ {job.text}", markup=False)
        if options.dry_run:
            continue
        start = time.monotonic()
        ends.append((job, run(job, options.limit_s)))
        console.print(f"{ends[-1][1]}, {time.monotonic() - start:.0f} s", markup=False)
    failed = [(job, end) for job, end in ends if end != "ok"]
    for job, end in failed:
        console.print(f"FAILED: {job.text}: {end}", markup=False)
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.measure", description="Measure everything.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the files go")
    parser.add_argument("--config", default="deepseek_v3", metavar="NAME", help="a packaged config or a YAML file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="default: 1, 2, 4, ... of the GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help="per rank")
    parser.add_argument("--formats", nargs="+", choices=get_args(FormatName), default=["nvfp4", "fp8_block", "bf16"])
    parser.add_argument(
        "--combine-format", nargs="+", choices=get_args(CombineFormatName), default=["bf16", "fp8_block"]
    )
    parser.add_argument(
        "--routing",
        nargs="+",
        choices=cases.ROUTINGS,
        default=ROUTINGS,
        metavar="KIND",
        help=f"on most ranks; on fewer it is {EVEN} (default: {' '.join(ROUTINGS)})",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed iterations (default: 20)")
    parser.add_argument("--limit-s", type=float, default=3600.0, metavar="S", help="for each program (default: 3600)")
    parser.add_argument("--dry-run", action="store_true", help="show the commands, run none")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)
    # Asked to end, it ends what it has started.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return environment.run_program("measure", lambda: work(options), debug=options.debug)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
