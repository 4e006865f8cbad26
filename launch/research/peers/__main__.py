"""Times peers beside us, where they are installed: on equal inputs and weights, by one clock, each checked.

`torchrun --nproc-per-node=N -m moe_runtime.launch.research.peers --config NAME --tokens 1 8 ... --peers torch ...
--json FILE` prints a table and writes JSON. Each peer runs in processes of its own, one a rank. One that is absent,
fails, is wrong or takes longer than `--limit` is a row that says why; the others go on. The exit code is 1 if one of
our own rows is without a time. Nothing of a peer is part of this project: `registry.PEERS` says what to install.

Errors are relative L2 errors against float64 with the bf16 weights before quantization, of the worst rank. Times are as
`launch.bench` takes them (`launch.benchmarks.timing`): CUDA graphs, a rest before each iteration, the slowest rank of
each iteration, the median over iterations.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from moe_runtime.config import RunConfig
from moe_runtime.launch.common import environment
from moe_runtime.launch.kernel_bench.show import wide_console
from moe_runtime.launch.report.peers import OK, show_peers
from moe_runtime.launch.report.runs import PEERS as KIND
from moe_runtime.launch.research.peers.ours import DEFAULT_FORMATS, FORMATS, config_of
from moe_runtime.launch.research.peers.processes import Ranks
from moe_runtime.launch.research.peers.rank import ROWS, row
from moe_runtime.launch.research.peers.registry import ALL, OURS, PEERS, with_ours

LIMIT_S = 120.0
SKIPPED = "skipped"
ENDED = "the program ended before its turn"


def run_peers(options: argparse.Namespace) -> int:
    """Run, print and write on rank 0, whose processes are all the ranks there are; the others end at once."""
    for name in ("steps", "check_tokens"):
        environment.check_at_least(1, **{name: getattr(options, name)})
    environment.check_at_least(1, tokens=min(options.tokens))
    if not options.limit > 0:
        raise ValueError(f"--limit: expected seconds above 0, got {options.limit:g}")
    environment.check_folder("--json", options.json)
    config = environment.read_config(options)
    for name in options.formats:
        config_of(config.layer, name)
    world, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world != here:
        raise ValueError(f"expected the ranks of one host, got {world} on hosts of {here}")
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    names = with_ours(list(dict.fromkeys(options.peers)))
    report = {
        "kind": KIND,
        "environment": environment.machine_record() | {"ranks": world},
        "config": config.model_dump(),
        "limit_s": options.limit,
        "versions": {name: PEERS[name].version() for name in options.peers},
        "written_for": {name: PEERS[name].written_for for name in options.peers},
        "results": list[dict[str, Any]](),
    }
    record = report["environment"]
    record["device"] = "cuda" if record["gpus"] else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        _run_all(names, options, world, Path(scratch), report, config)
    show_peers(report, wide_console())
    ours = [result for result in report["results"] if result["implementation"] == OURS]
    return int(not all(result["status"] == OK or result["status"].startswith(SKIPPED) for result in ours))


def _run_all(
    names: list[str], options: argparse.Namespace, world: int, scratch: Path, report: dict[str, Any], config: RunConfig
) -> None:
    """Fill in the results of every peer; the next one imports while one runs."""
    file = scratch / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump()))
    with ExitStack() as stack:
        started: dict[str, Ranks] = {}

        def start(name: str) -> None:
            tokens = [str(count) for count in options.tokens if ALL[name].times(count)]
            if name in started or ALL[name].missing() or not tokens:
                return
            folder = scratch / name
            folder.mkdir()
            sizes = ["--steps", str(options.steps), "--check-tokens", str(options.check_tokens)]
            formats = ["--formats", *options.formats]
            started[name] = Ranks([name, "--config", str(file), "--tokens", *tokens, *sizes, *formats], world, folder)
            stack.callback(started[name].end)

        def write(left: list[str]) -> None:
            """What there is so far, for a run that is interrupted; `left` have not had their turn."""
            if options.json is not None:
                rows = report["results"] + [row(coming, None, ENDED) for coming in left]
                environment.write_json(options.json, {**report, "results": rows})

        write(names)
        for place, name in enumerate(names):
            for coming in names[place : place + 2]:
                start(coming)
            print(f"{name} ...", file=sys.stderr, flush=True)
            found, version = _results(name, options, started.get(name))
            report["results"] += found
            if name in report["versions"] and version is not None:
                report["versions"][name] = version
            write(names[place + 1 :])


def _results(name: str, options: argparse.Namespace, ranks: Ranks | None) -> tuple[list[dict[str, Any]], str | None]:
    """Rows of a peer, at least one, and its version."""
    peer = ALL[name]
    if missing := peer.missing():
        return [row(name, None, missing)], None
    if ranks is None:
        return [row(name, None, f"{SKIPPED}: timed with {peer.limits()}")], None
    why = ranks.run(options.limit)
    file = ranks.folder / ROWS
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = [line for line in lines if "status" in line]
    done = [line["done"] for line in lines if "done" in line]
    version = next((line["version"] for line in lines if "version" in line), None)
    if why:
        left = [count for count in options.tokens if peer.times(count) and count not in done]
        found += [row(name, count, why) for count in (left if done else [None])]
    if any(line["status"] != OK for line in found):
        print(ranks.printed(), file=sys.stderr, flush=True)
    return found, version


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.research.peers", description="Time peers beside moe_runtime."
    )
    environment.add_common_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", required=True, help="of a rank, each in turn")
    names = ", ".join(PEERS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, metavar="PEER", required=True, help=f"any of {names}")
    formats = f"of our layer: any of {', '.join(FORMATS)} (default: {' '.join(DEFAULT_FORMATS)})"
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*DEFAULT_FORMATS], help=formats)
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="timed iterations (default: 6)")
    checked = "tokens of each rank that are compared with float64 (default: 8)"
    parser.add_argument("--check-tokens", type=int, default=8, metavar="N", help=checked)
    limit = f"seconds that a peer may take in all (default: {LIMIT_S:g})"
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help=limit)
    environment.add_json_option(parser)
    return environment.run_parsed("peers", parser, run_peers, arguments)


if __name__ == "__main__":
    sys.exit(main())
