"""Times loading a layer's experts on a CPU from a checkpoint, and from their copies in host memory.

A random checkpoint in bf16 is written first, by default with the sizes of a layer of Qwen3-30B-A3B (1.2 GB). Each load
is that of one rank in a process of its own. The files of the checkpoint are in the page cache, or have left it before
(`cold`). The copies lie in a folder of their own in /dev/shm, which is removed in the end. What comes from copies must
have the digest of what comes from the checkpoint. Times are the shortest of several runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moe_runtime.checkpoints.kept_files import SHARED_MEMORY, VARIABLE, free_kept, kept_layers
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.expert_slots import tensors_of
from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS, token_formats_for
from moe_runtime.launch.common import environment
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.launch.research.load_bench import drop_from_cache, in_process
from moe_runtime.layer import MoELayer

KIND = "restart"
NUMBERS = {"hidden": 2048, "inner": 768, "experts": 128, "runs": 3}
"""Options and their defaults."""


def load(folder: Path, weight_format: str, kept: str | None) -> dict[str, Any]:
    """Seconds to make the layer with its weights, and their digest. `kept` is the folder of copies, None for none."""
    if kept is not None:
        os.environ[VARIABLE] = kept
    context = ExpertParallelContext(device="cpu")
    token_format = (*token_formats_for(weight_format), "bf16")[0]
    formats: dict[str, Any] = {"weight_format": weight_format, "token_format": token_format}
    small = MoELayerConfig(
        hidden_size=256, intermediate_size=128, num_experts=1, top_k=1, max_tokens_per_rank=1, **formats
    )
    MoELayer(small, context).load_random(0)  # imports what the first weights need
    began = time.perf_counter()
    layer = MoELayer.from_checkpoint(
        folder, context=context, max_tokens_per_rank=1, keep_in_host_memory=kept is not None, **formats
    )
    seconds = time.perf_counter() - began
    assert layer.experts is not None
    digest = hashlib.sha256()
    for tensor in tensors_of(layer.experts).values():
        digest.update(memoryview(tensor.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return {"seconds": seconds, "digest": digest.hexdigest()}


def measure(folder: Path, weight_format: str, kept: str, runs: int) -> dict[str, Any]:
    """The shortest time of each way to load, in seconds, and the bytes of the copies."""
    seconds: dict[str, list[float]] = {"cold": [], "cached": [], "keeps": [], "kept": []}
    digests = set()
    for _ in range(runs):
        for name in seconds:
            if name == "cold":
                drop_from_cache(folder)
            if name == "keeps":
                free_kept()
            found = in_process(load, folder, weight_format, None if name in ("cold", "cached") else kept)
            seconds[name].append(found["seconds"])
            digests.add(found["digest"])
    if len(digests) != 1:
        raise AssertionError(f"{weight_format}: the bits of copies and checkpoint differ")
    num_bytes = sum(layer.num_bytes for layer in kept_layers())
    free_kept()
    # Whatever else the machine does adds to a time.
    shortest = {f"{name}_s": min(values) for name, values in seconds.items()}
    return {"weight_format": weight_format, "bytes": num_bytes, **shortest}


def work(options: argparse.Namespace) -> int:
    """Write, measure, delete; 0."""
    environment.check_at_least(1, **{name: getattr(options, name) for name in NUMBERS})
    environment.check_folder("--json", options.json)
    console = Console(highlight=False)
    sizes = {"hidden_size": options.hidden, "intermediate_size": options.inner, "num_experts": options.experts}
    config = MoELayerConfig(**sizes, top_k=min(8, options.experts), max_tokens_per_rank=1)
    table = Table("weights", "size", "cold", "cached", "cached, and kept", "from copies", "cached / from copies")
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="restart_bench_", dir=options.folder) as folder,
        tempfile.TemporaryDirectory(prefix="moe_runtime-restart_bench-", dir=SHARED_MEMORY) as kept,
    ):
        os.environ[VARIABLE] = kept
        write_qwen3_moe_checkpoint(folder, config, seed=0)
        for weight_format in options.formats:
            result = measure(Path(folder), weight_format, kept, options.runs)
            results.append(result)
            times = [f"{result[f'{name}_s']:.2f} s" for name in ("cold", "cached", "keeps", "kept")]
            ratio = f"{result['cached_s'] / result['kept_s']:.1f}"
            table.add_row(weight_format, f"{result['bytes'] / 1e9:.2f} GB", *times, ratio)
    console.print(table)
    if options.json is not None:
        report = {"kind": KIND, "environment": environment.machine_record(), "sizes": sizes, "results": results}
        environment.write_json(options.json, report)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.research.restart_bench", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write (the system's folder for temporary files)")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"({default})")
    parser.add_argument(
        "--formats", nargs="+", choices=WEIGHT_FORMATS, default=list(WEIGHT_FORMATS), help="of weights (all)"
    )
    environment.add_json_option(parser)
    return environment.run_parsed("restart_bench", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
