"""Time loading a layer's experts from a checkpoint against reading the same bytes, and watch the memory of each rank.

A synthetic checkpoint is written first, in ModelOpt's NVFP4 layout, at DeepSeek-V3's sizes unless told otherwise (a
layer is 6.3 GB). Ranks run one after the other, each in a process of its own that reads its experts of all layers and
keeps them, without conversion, on the CPU. Reading takes the same ranges of the same files into one small buffer. The
files leave the page cache before every run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moe_runtime.checkpoint import Checkpoint
from moe_runtime.checkpoint_layouts import CONFIG_FILE
from moe_runtime.formats import NVFP4
from moe_runtime.launch import environment
from moe_runtime.loading import quantize_experts
from moe_runtime.plan import expert_starts
from moe_runtime.progress import with_progress
from moe_runtime.tensor_files import INDEX_FILE, SafetensorsFile, write_json
from moe_runtime.tensor_writer import TensorWriter

KIND = "loading"
"""What the JSON says it is."""
READ_BYTES = 16 << 20
EXPERTS_PER_SHARD = 64
NUMBERS = {"hidden": 7168, "inner": 2048, "experts": 256, "layers": 3, "ranks": 8, "runs": 3}
"""Options and what they are by default."""


def write_checkpoint(folder: Path, *, hidden: int, inner: int, experts: int, layers: int, seed: int = 0) -> None:
    """A checkpoint of MoE layers alone, named as DeepSeek-V3's, random quants and scales in ModelOpt's NVFP4 layout."""
    folder.mkdir(parents=True, exist_ok=True)
    data = _RandomBytes(hidden * inner, seed)
    weight_map: dict[str, str] = {}
    parts = [(layer, first) for layer in range(layers) for first in range(0, experts, EXPERTS_PER_SHARD)]
    for number, (layer, first) in enumerate(with_progress(parts, "writing", len(parts)), 1):
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for expert in range(first, min(first + EXPERTS_PER_SHARD, experts)):
            for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                shapes[f"{prefix}.weight"] = ("U8", (rows, NVFP4.quant_columns(columns)))
                shapes[f"{prefix}.weight_scale"] = ("F8_E4M3", (rows, NVFP4.scale_columns(columns)))
                shapes |= {f"{prefix}.weight_scale_2": ("F32", ()), f"{prefix}.input_scale": ("F32", ())}
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with TensorWriter(folder / file, shapes, {"format": "pt"}) as writer:
            for name, (dtype, shape) in shapes.items():
                writer.write(name, data.tensor(dtype, shape))
        weight_map |= dict.fromkeys(shapes, file)
    write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "n_shared_experts": 0,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 0,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": NVFP4.block},
    }
    write_json(folder / CONFIG_FILE, config)


class _RandomBytes:
    """Tensors cut from one buffer at random places: writing is to cost little beside the disk."""

    def __init__(self, size: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._bytes = torch.randint(0, 256, (size + 4096,), dtype=torch.uint8, generator=self._generator)

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype == "F32":
            return torch.full(shape, 2.0**-8, dtype=torch.float32)
        count = torch.Size(shape).numel()
        start = int(torch.randint(0, len(self._bytes) - count, (), generator=self._generator))
        part = self._bytes[start : start + count].view(shape)
        # e4m3 between 2^-3 and 15: neither NaN nor negative.
        return part if dtype == "U8" else (part % 56 + 0x20).view(torch.float8_e4m3fn)


def drop_from_cache(folder: Path) -> None:
    """Have the system forget the contents of the folder's files."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _mine(experts: int, rank: int, ranks: int) -> range:
    starts = expert_starts(experts, ranks)
    return range(starts[rank], starts[rank + 1])


def load(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Seconds to load a rank's experts of every layer, their bytes, and the process's largest memory."""
    began, kept = time.perf_counter(), []
    with Checkpoint(folder) as checkpoint:
        for layer in range(checkpoint.config["num_hidden_layers"]):
            config = checkpoint.layer_config(layer, max_tokens_per_rank=1)
            mine = _mine(config.num_experts, rank, ranks)
            cpu = torch.device("cpu")
            buffers = checkpoint.quant_buffers(layer, config.weight_format, len(mine), cpu)
            experts = checkpoint.experts(layer, mine, buffers)
            kept.append(quantize_experts(experts, config, len(mine), cpu, buffers))
    seconds = time.perf_counter() - began
    held = sum(weights.num_bytes for pair in kept for weights in pair)
    return {"seconds": seconds, "bytes": held, "peak_bytes": _peak_bytes()}


def _peak_bytes() -> int:
    """The largest resident memory of this program.

    Not `getrusage`'s: a process started by vfork begins there with the peak of the one that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def read(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Seconds to read the bytes that `load` needs, in the order of the files, and how many there are."""
    began, count = time.perf_counter(), 0
    buffer = memoryview(bytearray(READ_BYTES))
    for path, start, end in _ranges(folder, rank, ranks):
        with path.open("rb", buffering=0) as stream:
            stream.seek(start)
            while start < end:
                got = stream.readinto(buffer[: min(READ_BYTES, end - start)])
                start, count = start + got, count + got
    return {"seconds": time.perf_counter() - began, "bytes": count}


def _ranges(folder: Path, rank: int, ranks: int) -> Iterator[tuple[Path, int, int]]:
    """`(file, start, end)` of the rank's experts; neighbours in a file make one range."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    mine = _mine(config["n_routed_experts"], rank, ranks)
    for path in sorted(folder.glob("*.safetensors")):
        file = SafetensorsFile(path)
        file.close()
        spans = [
            (entry.start, entry.start + entry.num_bytes)
            for name, entry in file.entries.items()
            if int(name.split(".experts.")[1].split(".")[0]) in mine
        ]
        if spans:
            yield path, min(start for start, _ in spans), max(end for _, end in spans)


def in_process(task: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The answer of `task` in a fresh process: its memory is its own.

    Raises what the task raises, and `ChildProcessError` where the process was killed (mostly for want of memory).
    """
    # An executor notices that its process died; `multiprocessing.Pool` starts another and waits for ever.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        try:
            return executor.submit(task, *arguments).result()
        except BrokenProcessPool:
            raise ChildProcessError(f"{task.__name__}: its process was killed; is memory short?") from None


def measure(folder: Path, ranks: int, runs: int, console: Console) -> dict[str, Any]:
    """Reading and loading in turn; times are sums over the ranks."""
    seconds: dict[str, list[float]] = {"read": [], "load": []}
    loaded: list[dict[str, Any]] = []
    for run in range(runs):
        for name, task in (("read", read), ("load", load)):
            drop_from_cache(folder)
            answers = [in_process(task, folder, rank, ranks) for rank in range(ranks)]
            seconds[name].append(sum(answer["seconds"] for answer in answers))
            loaded = answers if name == "load" else loaded
        console.print(f"run {run + 1}: read {seconds['read'][-1]:.2f} s, load {seconds['load'][-1]:.2f} s")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "ranks": ranks,
        "bytes": sum(answer["bytes"] for answer in loaded),
        "read_s": seconds["read"],
        "load_s": seconds["load"],
        "ratio": medians["load"] / medians["read"],
        "gb_per_s": sum(answer["bytes"] for answer in loaded) / medians["load"] / 1e9,
        "over_own_bytes": max(answer["peak_bytes"] - answer["bytes"] for answer in loaded),
    }


def work(options: argparse.Namespace) -> int:
    """Write, measure, delete; 0."""
    for name in NUMBERS:
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if options.folder is not None and not options.folder.is_dir():
        raise ValueError(f"--folder: no folder {options.folder}")
    environment.check_folder("--json", options.json)
    console = Console(highlight=False)
    sizes = {name: getattr(options, name) for name in ("hidden", "inner", "experts", "layers")}
    with tempfile.TemporaryDirectory(prefix="load_bench_", dir=options.folder) as name:
        write_checkpoint(Path(name), **sizes)
        result = sizes | measure(Path(name), options.ranks, options.runs, console)
    console.print(
        f"{result['bytes'] / 1e9:.2f} GB on {options.ranks} ranks: loading takes {result['ratio']:.3f} times as long "
        f"as reading ({result['gb_per_s']:.2f} GB/s); a rank's memory peaks {result['over_own_bytes'] / 1e9:.2f} GB "
        "above its experts",
        soft_wrap=True,
    )
    if options.json is not None:
        report = {"kind": KIND, "environment": environment.machine_record(), "result": result}
        write_json(options.json, report)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.load_bench", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write (the system's folder for temporary files)")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"({default})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)
    return environment.run_program("load_bench", lambda: work(options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
