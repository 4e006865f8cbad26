"""Checks, then times, kernels by themselves, at sizes of this project's choice.

`gemm` runs the cases of the grouped GEMM, `ops` the operations of `moe_runtime.ops`, and `models` layers of published
sizes in every pair of formats, each on one GPU. A result that fails its check is not timed and makes the exit code 1.
`check` needs no GPU: it runs the operations in torch and interpreted, compiles their kernels for each architecture, and
shows the result with the committed run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_runtime.kernels.runtime import ENGINES
from moe_runtime.launch.common import environment
from moe_runtime.launch.kernel_bench import gemm_bench, models_bench, ops_bench, ops_check
from moe_runtime.launch.kernel_bench.ops_table import print_operations
from moe_runtime.launch.kernel_bench.show import show_gemm, show_models, show_operations, wide_console

OPERATIONS_RUN = Path(__file__).resolve().parents[1] / "results" / "ops_h200.json"
"""The committed run of `kernel_bench ops`."""


def check_operations(options: argparse.Namespace) -> dict[str, Any]:
    """What runs and compiles without a GPU."""
    found = ops_check.check_here(len(os.sched_getaffinity(0)))
    if options.json is not None:
        environment.write_json(options.json, found)
    return found | {"passed": not ops_check.has_failed(found)}


def show_checked(report: dict[str, Any], console: Console) -> None:
    """The table of operations, with the committed run."""
    print_operations(report, json.loads(OPERATIONS_RUN.read_text()), console)


PARTS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], Callable[[dict[str, Any], Console], None]]] = {
    "gemm": (gemm_bench.run, show_gemm),
    "ops": (ops_bench.run, show_operations),
    "models": (models_bench.run, show_models),
    "check": (check_operations, show_checked),
}
"""What runs a part, and what prints its report."""


def bench(part: str, options: argparse.Namespace) -> int:
    """Check, time, print and write; 1 if a check failed."""
    run, show = PARTS[part]
    environment.check_folder("--json", options.json)
    report = run(options)
    show(report, wide_console())
    return int(not report["passed"])


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.kernel_bench", description="Time kernels.")
    commands = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, text in (
        ("gemm", "the grouped GEMM"),
        ("ops", "the operations of moe_runtime.ops"),
        ("models", "layers of published sizes in every pair of formats"),
        ("check", "run and compile the operations without a GPU"),
    ):
        command = commands.add_parser(name, help=text)
        environment.add_debug_option(command)
        environment.add_json_option(command)
        if name == "check":
            continue
        command.add_argument("--engine", choices=ENGINES, help="default: auto")
        command.add_argument("--small", action="store_true", help="small sizes, as on CPUs")
        command.add_argument("--steps", type=int, default=20, metavar="N", help="timed iterations (default: 20)")
        if name != "ops":
            command.add_argument("--cases", metavar="REGEX", help="only cases with such a name")
        if name == "models":
            command.add_argument("--tokens", type=int, nargs="+", metavar="N", help="of a step, each in turn")
    options = parser.parse_args(arguments)
    return environment.run_program("kernel_bench", partial(bench, options.part, options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
