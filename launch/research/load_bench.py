"""Times loading a layer's experts from a checkpoint, compared with reading the same bytes, and each rank's memory.

A random checkpoint is written first, in ModelOpt's NVFP4 layout, by default with DeepSeek-V3's sizes (a layer is 6.3
GB). Ranks run one after the other, each in a process of its own that loads its experts of all layers without conversion
on the CPU. The baseline reads the same ranges of the same files into a small buffer. The files leave the page cache
before every run.
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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.files import INDEX_FILE, SafetensorsFile, write_json
from moe_runtime.checkpoints.loading import quantize_experts
from moe_runtime.checkpoints.quantization import CONFIG_FILE
from moe_runtime.checkpoints.writer import TensorWriter
from moe_runtime.kernels.formats.number_formats import NVFP4
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.launch.common import environment
from moe_runtime.support.progress import with_progress

KIND = "loading"
READ_BYTES = 16 << 20
EXPERTS_PER_SHARD = 64
NUMBERS = {"hidden": 7168, "inner": 2048, "experts": 256, "layers": 3, "ranks": 8, "runs": 3}
"""Options and their defaults."""


def write_checkpoint(folder: Path, *, hidden: int, inner: int, experts: int, layers: int, seed: int = 0) -> None:
    """A checkpoint of MoE layers alone, named as DeepSeek-V3's, with random quants and scales."""
    folder.mkdir(parents=True, exist_ok=True)
    # Tensors are cut from one buffer at random places, so that writing costs little apart from the disk.
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (hidden * inner + 4096,), dtype=torch.uint8, generator=rng)

    def tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype == "F32":
            return torch.full(shape, 2.0**-8, dtype=torch.float32)
        count = torch.Size(shape).numel()
        begin = int(torch.randint(0, len(noise) - count, (), generator=rng))
        part = noise[begin : begin + count].view(shape)
        # e4m3 between 2^-3 and 15: neither NaN nor negative.
        return part if dtype == "U8" else (part % 56 + 0x20).view(torch.float8_e4m3fn)

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
                writer.write(name, tensor(dtype, shape))
        weight_map |= dict.fromkeys(shapes, file)
    write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(8, experts),
        **{"n_shared_experts": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
        **{"num_hidden_layers": layers, "first_k_dense_replace": 0},
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": NVFP4.block},
    }
    write_json(folder / CONFIG_FILE, config)


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
    began, kept, cpu = time.perf_counter(), [], torch.device("cpu")
    with Checkpoint(folder) as checkpoint:
        for layer in range(checkpoint.config["num_hidden_layers"]):
            config = checkpoint.layer_config(layer, max_tokens_per_rank=1)
            mine = _mine(config.num_experts, rank, ranks)
            buffers = checkpoint.quant_buffers(layer, config.weight_format, len(mine), cpu)
            experts = checkpoint.experts(layer, mine, buffers)
            kept.append(quantize_experts(experts, config, len(mine), cpu, buffers))
    seconds = time.perf_counter() - began
    # Not `getrusage`: a process started by vfork begins there with the peak of the one that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    held = sum(weights.num_bytes for pair in kept for weights in pair)
    return {"seconds": seconds, "bytes": held, "peak_bytes": peak}


def read(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Seconds to read the bytes that `load` needs, in the order of the files, and how many there are."""
    began, count, buffer = time.perf_counter(), 0, memoryview(bytearray(READ_BYTES))
    config = json.loads((folder / CONFIG_FILE).read_text())
    mine = _mine(config["n_routed_experts"], rank, ranks)
    for path in sorted(folder.glob("*.safetensors")):
        file = SafetensorsFile(path)
        file.close()
        entries = [e for name, e in file.entries.items() if int(name.split(".experts.")[1].split(".")[0]) in mine]
        if not entries:
            continue
        # The experts of a rank are neighbours in a file.
        at, end = min(e.start for e in entries), max(e.start + e.num_bytes for e in entries)
        with path.open("rb", buffering=0) as stream:
            stream.seek(at)
            while at < end:
                got = stream.readinto(buffer[: min(READ_BYTES, end - at)])
                if not got:
                    raise ValueError(f"{path}: has become shorter")
                at, count = at + got, count + got
    return {"seconds": time.perf_counter() - began, "bytes": count}


def in_process(task: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The answer of `task` in a fresh process, whose memory is its own.

    Raises what the task raises, and `ChildProcessError` where the process was killed, mostly for lack of memory.
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
            loaded = [in_process(task, folder, rank, ranks) for rank in range(ranks)]
            seconds[name].append(sum(answer["seconds"] for answer in loaded))
        console.print(f"run {run + 1}: read {seconds['read'][-1]:.2f} s, load {seconds['load'][-1]:.2f} s")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    total = sum(answer["bytes"] for answer in loaded)
    return {
        "ranks": ranks,
        "bytes": total,
        "read_s": seconds["read"],
        "load_s": seconds["load"],
        "ratio": medians["load"] / medians["read"],
        "gb_per_s": total / medians["load"] / 1e9,
        "over_own_bytes": max(answer["peak_bytes"] - answer["bytes"] for answer in loaded),
    }


def work(options: argparse.Namespace) -> int:
    """Write, measure, delete; 0."""
    environment.check_at_least(1, **{name: getattr(options, name) for name in NUMBERS})
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
        environment.write_json(options.json, report)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.research.load_bench", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write (the system's folder for temporary files)")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"({default})")
    environment.add_json_option(parser)
    return environment.run_parsed("load_bench", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
