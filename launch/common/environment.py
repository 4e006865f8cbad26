"""What the programs share: options, start and orderly end with and without torchrun, and a record of where they ran.

A mistake of the caller ends a program with one line on stderr and exit code 2, a failure between ranks with exit code
1; `--debug` shows the traceback instead.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from moe_runtime.checkpoints.writer import write_whole
from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.comm.errors import MoERuntimeError
from moe_runtime.comm.transport import TRANSPORTS
from moe_runtime.config import ParallelConfig, RunConfig, complaints, load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.runtime import ENGINES, INTERPRET
from moe_runtime.support.host_memory import memory_bytes

PACKAGES = (
    *("torch", "triton", "numpy", "pydantic", "safetensors", "transformers"),
    *("nvshmem4py-cu13", "cuda-python", "cuda-bindings", "nvidia-cuda-nvrtc"),
)

MOST_GATHERED = 64 << 20
"""Most bytes that a rank gathers: a trace has some, everything else far fewer."""

T = TypeVar("T")


def add_common_options(parser: argparse.ArgumentParser, config: str | None = "tiny_cpu") -> None:
    """Options of every program over a config; `config` is the default."""
    default = "none" if config is None else config
    parser.add_argument(
        "--config", default=config, metavar="NAME", help=f"a packaged config or a YAML file (default: {default})"
    )
    parser.add_argument("--transport", choices=("auto", *TRANSPORTS), help="instead of the config's")
    parser.add_argument("--engine", choices=ENGINES, help="instead of the config's")


def add_ignore_key_option(parser: argparse.ArgumentParser) -> None:
    """Add `--ignore-key`: a list of the keys that `Checkpoint` ignores."""
    parser.add_argument(
        "--ignore-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key of the checkpoint's JSON files that has no influence; may be given several times",
    )


def add_debug_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are written")


def read_config(options: argparse.Namespace) -> RunConfig:
    """The config that the common options describe. Raises `ValueError` naming file and key."""
    run = load_config(options.config)
    return run.replace(parallel=with_options(run.parallel, options))


def with_options(parallel: ParallelConfig, options: argparse.Namespace) -> ParallelConfig:
    """`parallel` with the transport and the engine that the common options ask for."""
    changes = {key: value for key in ("transport", "engine") if (value := getattr(options, key)) is not None}
    return parallel.replace(**changes) if changes else parallel


def check_folder(option: str, file: Path | None) -> None:
    """Raise `ValueError` naming the option unless `write_json` can write its file: no folder, in one that exists."""
    if file is None:
        return
    try:
        is_folder = file.is_dir()
    except OSError as error:  # a name that is too long
        raise ValueError(f"{option}: {file}: {error.strerror}") from None
    if is_folder:
        raise ValueError(f"{option}: expected a file, {file} is a folder")
    target = Path(os.path.realpath(file))
    if not target.parent.is_dir():
        raise ValueError(f"{option}: no folder {target.parent if file.is_symlink() else file.parent}")
    written = [target] if target.exists() else []
    if not written or target.is_file():
        written.append(target.parent)  # a file takes the place of the one before
    if target.is_symlink() or not all(os.access(path, os.W_OK) for path in written):
        raise ValueError(f"{option}: {file} cannot be written")


def check_at_least(least: int, **values: int | None) -> None:
    """Raise `ValueError` naming the option whose value is smaller; None is no value."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least {least}, got {value}")


def run_parsed(
    name: str,
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None,
) -> int:
    """The exit code of `work(options)` by `run_program`; the options are those of `parser`, and `--debug`."""
    add_debug_option(parser)
    options = parser.parse_args(arguments)
    return run_program(name, lambda: work(options), debug=options.debug)


def run_program(name: str, work: Callable[[], int], *, debug: bool = False) -> int:
    """The exit code of `work()`. Its errors, lack of memory and Ctrl-C become one line on stderr.

    Every rank that fails prints its number: torchrun ends the others as soon as one has ended.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            with suppress(OSError):  # of a pipe that took the place of a file
                stream.reconfigure(errors="replace")  # bars and the like in a locale without them
    try:
        return work()
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except Exception as error:
        if debug or not (isinstance(error, (ValueError, OSError, MoERuntimeError)) or _lacks_memory(error)):
            raise
        rank = os.environ.get("RANK")
        who = name if rank is None else f"{name}: rank {rank}"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        print(f"{who}: {kind}{one_line(error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def exit_at_sigterm() -> None:
    """Let SIGTERM end this program as `sys.exit` does, so that folders and processes that it has made go with it.

    Not for ranks: they may wait in calls that no handler interrupts.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _lacks_memory(error: Exception) -> bool:
    # What torch raises on a CPU has no class of its own.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def one_line(error: Exception) -> str:
    """The message of an error without line breaks; of a refused model, only what is wrong with it."""
    if isinstance(error, ValidationError):
        return "; ".join(complaints(error))
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(lines).replace(":; ", ": ")


def start(run: RunConfig) -> torch.device:
    """Join the ranks that torchrun started, if it did; this rank's device."""
    return init_from_env(timeout_s=run.parallel.startup_timeout_s)


def gather(context: ExpertParallelContext, what: str, value: T, kind: type[T]) -> list[T]:
    """Every rank's `value`, by rank; numbers, texts, lists, dicts and dataclasses of them, as `kind` says.

    Raises as `RankGroup.gather`, also for an answer of another kind, or whose dicts have other keys than this rank's.
    """
    if context.group is None:
        return [value]
    adapter = TypeAdapter(kind)
    mine = adapter.dump_python(value)

    def read(answer: object) -> T:
        _check_keys(mine, answer)
        return adapter.validate_python(answer)

    return context.group.gather(what, mine, read, max_bytes=MOST_GATHERED)


def _check_keys(mine: object, answer: object) -> None:
    """Raise `ValueError` where a dict of `answer` has other keys than the dict of `mine` in its place."""
    if isinstance(mine, dict) and isinstance(answer, dict):
        if mine.keys() != answer.keys():
            raise ValueError(f"expected a dict with the keys {', '.join(map(str, mine))}, got other keys")
        for key, value in mine.items():
            _check_keys(value, answer[key])


def barrier(context: ExpertParallelContext, what: str) -> None:
    """Wait for every rank."""
    if context.group is not None:
        context.group.barrier(what)


def console_of(context: ExpertParallelContext) -> Console:
    """A console that prints on rank 0 only."""
    return Console(quiet=context.rank != 0, highlight=False)


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write the JSON of a run, whole or not at all where it is a regular file: small, with a line for each result.

    A link stays, and what it leads to is written.
    """
    lines, dumps = [], partial(json.dumps, separators=(",", ":"))
    for name, value in data.items():
        text = dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(map(dumps, value)) + "\n]"
        lines.append(f"{dumps(name)}: {text}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if file.exists() and not file.is_file():
        file.write_text(text)
    else:
        write_whole(Path(os.path.realpath(file)), text.encode())


def package_versions() -> dict[str, str | None]:
    """Installed version of each of `PACKAGES`, None where it is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def gpu_records() -> list[dict[str, Any]]:
    """Name, architecture and memory of each GPU that this process sees."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": gpu.name, "arch": f"sm_{gpu.major}{gpu.minor}", "memory_bytes": gpu.total_memory} for gpu in found]


def machine_record() -> dict[str, Any]:
    """Where and how a program ran, ready for JSON; None for what is absent."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    processor = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        **_git_state(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "processor": next(processor, "").partition(":")[2].strip() or None,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes()["total"],
        "packages": package_versions(),
        "cuda": torch.version.cuda,
        "driver": driver.splitlines()[0] if driver else None,
        "gpus": gpu_records(),
    }


def environment_record(context: ExpertParallelContext) -> dict[str, Any]:
    """`machine_record`, and what the ranks of a context are."""
    return machine_record() | {
        "threads_per_rank": torch.get_num_threads(),
        "ranks": context.world_size,
        "device": context.device.type,
        "engine": context.engine,
        "hopper_kernels": context.engine == "cuda",
        "interpreted": INTERPRET and context.engine == "triton",
        "transport": context.transport,
        "transport_why_not": context.transport_reasons,
    }


def _output(*command: str | Path) -> str | None:
    """What a command prints, None where it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _command() -> str:
    """What starts this program again; under torchrun, with as many ranks on as many nodes."""
    begin, sizes = ["python"], ("LOCAL_WORLD_SIZE", "WORLD_SIZE")
    if os.environ.keys() >= set(sizes):
        here, ranks = (int(os.environ[name]) for name in sizes)
        begin = ["torchrun", f"--nproc-per-node={here}", *([f"--nnodes={ranks // here}"] if ranks > here else [])]
    spec = sys.modules["__main__"].__spec__
    program = [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join(map(_without_folder, [*begin, *program, *sys.argv[1:]]))


def _without_folder(argument: str) -> str:
    """An argument, or the value of `--option=value`, without the folder of its path, which means nothing elsewhere."""
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    return option + equals + (Path(value).name if "/" in value else value)


def _git_state() -> dict[str, Any]:
    """The commit and how many files differ from it; `MOE_RUNTIME_COMMIT` names it for a copy without its history."""
    named, root = os.environ.get("MOE_RUNTIME_COMMIT"), Path(__file__).resolve().parents[2]
    commit = _output("git", "-C", root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    if named or commit is None:
        return {"git_commit": named, "git_modified_files": None}
    status = _output("git", "-C", root, "status", "--porcelain")
    return {"git_commit": commit, "git_modified_files": None if status is None else len(status.splitlines())}
