"""Convert the experts of a checkpoint into another format; run again after an interruption, it goes on.

With `--calibrate` the inputs of the experts' products get scales too, from tokens in a safetensors file: for each layer
with experts a tensor `layers.{index}`, bf16 or fp32 `[T, H]`, of tokens that enter its MoE block. Those for multi-token
prediction may be left out, and stay meant for bf16 tokens.

If other linears of the checkpoint are quantized, only this project can read the result (docs/checkpoints.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from moe_runtime.checkpoints.calibration import Calibration, calibrate
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import check_calibrated, convert_checkpoint
from moe_runtime.checkpoints.converted_experts import TARGET_LAYOUTS
from moe_runtime.checkpoints.files import SafetensorsFile
from moe_runtime.launch.common import environment


def read_calibrations(
    source: str, tokens: Path, weight_format: str, device: str, ignore_keys: Sequence[str], console: Console
) -> dict[int, Calibration]:
    """What the tokens of each layer give. Raises `ValueError` before anything is computed, naming the file and a tensor
    of another name, or as `check_calibrated`."""
    file = SafetensorsFile(tokens, "the tokens to calibrate with")
    names: dict[int, str] = {}
    found: dict[int, Calibration] = {}
    try:
        for name, entry in file.entries.items():
            index = name.removeprefix("layers.")
            if index == name or not index.isdecimal() or entry.dtype not in ("BF16", "F32"):
                raise ValueError(f"{tokens}: tensor {name}: expected layers.0, layers.1, ... of BF16 or F32")
            if (other := names.setdefault(int(index), name)) != name:
                raise ValueError(f"{tokens}: tensors {other} and {name}: expected one for each layer")
        with Checkpoint(source, ignore_keys=ignore_keys) as checkpoint:
            check_calibrated(checkpoint, weight_format, names)
        for layer, name in names.items():
            tensors = [file.tensor(name)]
            one = found[layer] = calibrate(source, layer, tensors, device=device, ignore_keys=ignore_keys)
            console.print(f"layer {layer}: tokens up to {one.token_amax:.4g}, intermediate {one.intermediate_amax:.4g}")
    finally:
        file.close()
    return found


def check_device(name: str) -> None:
    """Raise `ValueError` unless it is the CPU or a GPU that is there."""
    count = torch.cuda.device_count()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or not (device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count)):
        raise ValueError(f"--device: expected cpu or one of {count} GPUs, cuda:0 and so on; got {name}")


def work(options: argparse.Namespace) -> int:
    """Convert; 0."""
    check_device(options.device)
    console = Console(highlight=False)
    calibrations = None
    if options.calibrate is not None:
        calibrations = read_calibrations(
            options.source, options.calibrate, options.format, options.device, options.ignore_key, console
        )

    def progress(steps: Iterator[None], total: int) -> Iterator[None]:
        yield from track(steps, "converting", total, console=console, disable=not console.is_terminal)

    convert_checkpoint(
        options.source,
        options.target,
        options.format,
        calibrations=calibrations,
        device=options.device,
        ignore_keys=options.ignore_key,
        progress=progress,
    )
    console.print(f"{options.target}: experts in {options.format}", markup=False, soft_wrap=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.convert", description=__doc__)
    parser.add_argument("source", help="folder of the checkpoint")
    parser.add_argument("target", help="folder to write; made if it is not there")
    parser.add_argument("--format", choices=tuple(TARGET_LAYOUTS), default="nvfp4", help="of the experts (nvfp4)")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="tokens of each layer, for nvfp4 activations")
    parser.add_argument("--device", default="cpu", help="where to quantize (cpu)")
    environment.add_ignore_key_option(parser)
    return environment.run_parsed("convert", parser, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
