"""Show what layers keep in host memory (`keep_in_host_memory`), and free it with `--free`.

The copies stay until they are freed, or the machine starts again. Processes that run need none of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from moe_runtime.checkpoints.kept_files import Room, free_kept, kept_folder, kept_layers
from moe_runtime.launch.common import environment


def work(options: argparse.Namespace) -> int:
    """Show or free; 0."""
    console = Console(highlight=False)
    if options.checkpoint is not None and not options.free:
        raise ValueError("--checkpoint: expected together with --free")
    if options.free:
        console.print(f"{decimal(free_kept(options.checkpoint))} freed in {escape(str(kept_folder()))}", soft_wrap=True)
        return 0
    layers = kept_layers()
    table = Table("checkpoint", "layer", "weights", "device", "experts", "size")
    for layer in layers:
        about = layer.about
        texts = (about.get(key, "not known") for key in ("checkpoint", "layer", "weight_format", "device"))
        table.add_row(*(escape(str(text)) for text in texts), str(len(layer.files)), decimal(layer.num_bytes))
    if layers:
        console.print(table)
    total, room = sum(layer.num_bytes for layer in layers), Room.of(kept_folder())
    kept = f"{decimal(total)} kept in {escape(str(kept_folder()))}, room for {decimal(room.usable_bytes)} more"
    console.print(kept, soft_wrap=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.kept_weights", description=__doc__)
    parser.add_argument("--free", action="store_true", help="remove the copies instead of showing them")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="free only those of this checkpoint")
    return environment.run_parsed("kept_weights", parser, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
