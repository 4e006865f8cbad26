"""One rank of one peer: a process that `processes.Ranks` starts. It imports, waits for a line on stdin, and runs.

Rank 0 appends each row to `rows.jsonl`. When the program that started it ends, it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from moe_runtime.build import context_from_config
from moe_runtime.config import RunConfig, load_config
from moe_runtime.launch.benchmarks.timing import times_record
from moe_runtime.launch.common import environment
from moe_runtime.launch.research.peers.case import Case, Way
from moe_runtime.launch.research.peers.registry import ALL, Peer

ROWS = "rows.jsonl"
PATIENCE_S = 600.0


def row(name: str, tokens: int | None, status: str, way: Way | None = None, **more: Any) -> dict[str, Any]:
    """The record of a time, or of why there is none. `tokens` is None for all numbers of tokens."""
    peer = ALL[name]
    return {
        "operation": peer.operation if way is None else way.operation,
        "implementation": peer.implementation or name,
        "variant": "" if way is None else way.variant,
        "tokens_per_rank": tokens,
        "status": status,
        **times_record(None),
        "error": None if way is None else way.error,
        "bound": None if way is None else way.bound,
        "note": "" if way is None else way.note,
        **more,
    }


class Output:
    """What a rank writes into a folder: rank 0 the rows, every rank what went wrong."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rows = folder / ROWS if rank == 0 else None
        self._error = folder / f"error.{rank}"

    def add(self, line: dict[str, Any]) -> None:
        """A row, or `{"done": tokens}`, or `{"version": text}`."""
        if self._rows is not None:
            with self._rows.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def say(self, error: Exception) -> str:
        """Keep what went wrong first, for whoever must end this rank; the text of this error."""
        text = f"{type(error).__name__}: {environment.one_line(error)[:300]}"
        traceback.print_exc()
        if not self._error.exists():
            self._error.write_text(text)
        return text

    def forget(self) -> None:
        """What went wrong is in a row."""
        self._error.unlink(missing_ok=True)


def run(name: str, case: Case, output: Output) -> None:
    """Time every way of a peer. Collective.

    A number of tokens that fails is a row, and the next one follows, if all ranks get that far. What fails in the
    preparation is raised.
    """
    peer = ALL[name]
    point = peer.prepare(case)
    output.add({"version": version_of(peer)})
    for tokens in case.tokens:
        problem = ""
        try:
            for way in point(tokens):
                output.add(_timed(name, case, tokens, way))
        except Exception as error:
            problem = f"failed: {output.say(error)}"
        problems = environment.gather(case.context, "point", problem, str)
        if any(problems):
            output.add(row(name, tokens, next(filter(None, problems))))
            output.forget()
        output.add({"done": tokens})


def version_of(peer: Peer) -> str | None:
    """Of what is imported; a copy without metadata may say it itself."""
    module = sys.modules.get(peer.modules[0]) if peer.modules else None
    found = peer.version() or getattr(module, "__version__", None)
    return None if found is None else str(found)


def _timed(name: str, case: Case, tokens: int, way: Way) -> dict[str, Any]:
    error = case.worst(way.error)
    if not error <= way.bound:
        status = f"wrong: relative error {error:.3g}, expected at most {way.bound:.3g}"
        return row(name, tokens, status, way) | {"error": error if error < float("inf") else None}
    timing, why = case.time(way)
    note = "; ".join(filter(None, (way.note, why)))
    return row(name, tokens, "ok", way) | times_record(timing) | {"error": error, "note": note}


def config_for(peer: Peer, run_config: RunConfig) -> RunConfig:
    """Ours has its memory between ranks. For others we have none, so that theirs is the only one, and ranks wait for
    each other as long as one may compile."""
    if peer.own_transport:
        return run_config
    several = int(os.environ["WORLD_SIZE"]) > 1
    patient = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S}
    parallel = run_config.parallel.replace(transport="collective" if several else "private", **patient)
    changed: RunConfig = run_config.replace(parallel=parallel)
    return changed


def main(arguments: list[str] | None = None) -> NoReturn:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name if __spec__ else 'rank'}")
    parser.add_argument("peer", choices=ALL)
    parser.add_argument("--config", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--formats", nargs="+", default=[])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--check-tokens", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args(arguments)
    rank = int(os.environ["RANK"])
    if not sys.stdin.readline():
        os._exit(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    output, code = Output(options.folder, rank), 0
    try:
        config = config_for(ALL[options.peer], load_config(options.config))
        environment.start(config)
        context = context_from_config(config.parallel)
        case = Case(config, context, options.tokens, options.steps, options.check_tokens, options.formats)
        with torch.no_grad():
            run(options.peer, case, output)
        environment.barrier(case.context, "end")
    except Exception as error:
        output.say(error)
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # To take down several libraries with graphs alive may wait for ever: all that was found is written.
        os._exit(code)


def _end_with_parent() -> None:
    """The pipe is closed when the program at its other end is gone, however it ended."""
    while sys.stdin.readline():
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
