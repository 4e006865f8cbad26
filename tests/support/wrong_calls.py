"""Wrong calls of the whole public interface: each is refused with a `ValueError` that names the argument, or right.

Every function, constructor and method that `__all__` of a public package leads to is found by `inspect`. A call starts
from right arguments (`right_calls`), of which one or two become wrong or hostile (`wrong_values`). What may follow:

- a `ValueError` whose text begins with the name of an argument;
- where the values are of the annotated kinds and in range: the result of the same call with plain values, contiguous
  tensors and Python numbers, on objects of its own; and, where `REFERENCES` has one, the result of torch in float64.

Anything else is a fault. Calls run in child processes, which report how far they are: a crash or a hang has a number
too. `python -m tests.support.wrong_calls --calls 20000 --seed 1` prints all faults; `--only 123` repeats one call.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_runtime.checkpoints.kept_files import VARIABLE
from moe_runtime.comm.errors import StaleHandleError
from moe_runtime.dispatcher import TokenDispatcher
from tests.support.call_verdicts import (
    UNCHECKED,
    Fault,
    compare_with_plain,
    describe,
    finished,
    is_plain,
    judge_accepted,
    judge_error,
    normal,
    where,
)
from tests.support.public_calls import Call, targets
from tests.support.right_objects import HIDDEN, World, leave_group
from tests.support.wrong_values import wrong_value

FOR_MESSAGES = {"argument"}
"""Parameters that only name an argument in a message."""
SECONDS = 10
"""Most seconds of a call."""
SILENCE = 60
"""Seconds without a call after which a child hangs."""
MEMORY = 2 << 30
"""Bytes that a child may take: a call that wants more is at fault."""


class Hang(BaseException):
    """A call that takes too long."""


def run_call(seed: int, index: int) -> tuple[str, str]:
    """Make call `index`: its target, and `refused`, `accepted` or `order`. Raises `Fault`."""
    try:
        return _run_call(seed, index)
    finally:
        leave_group()


def _run_call(seed: int, index: int) -> tuple[str, str]:
    draw = random.Random(f"{seed}-{index}")
    names = sorted(targets())
    name = names[index % len(names)]
    target = targets()[name]
    # Objects that cost much are made less often.
    if target.owner is not None and target.owner.__name__ == "TokenDispatcher" and draw.random() < 0.3:
        check_order(draw)
        return "order of calls", "order"
    seed_of_world = draw.randrange(2**31)
    function, arguments = Call(target, World(random.Random(seed_of_world))).parts()
    wrong = _spoil(arguments, draw)
    closed = draw.random() < (0.1 if wrong else 0.5) and _close(function, arguments)
    said = describe(name, arguments, wrong, closed)
    plain = {key: normal(arguments[key]) for key in wrong}
    try:
        result = finished(function(**arguments))
    except Exception as error:
        right = not wrong and not closed
        problem = f"{name} | | a right call is refused" if right else judge_error(target, arguments, wrong, error)
        if problem:
            raise Fault(f"{problem}\n    {said}\n    {where(error)}") from None
        return name, "refused"
    if closed and name not in MAY_BE_CLOSED:
        raise Fault(f"{name} | context | accepted a closed one\n    {said}")
    for key in wrong:
        if problem := judge_accepted(target, key, arguments[key]):
            raise Fault(f"{name} | {key} | {problem}\n    {said}")
    if not closed and name not in UNCHECKED and all(is_plain(value) for value in plain.values()):
        other, others = Call(target, World(random.Random(seed_of_world))).parts()
        compare_with_plain(name, wrong, (result, arguments), other, others | plain, said)
    return name, "accepted"


def _spoil(arguments: dict[str, Any], draw: random.Random) -> list[str]:
    """Make one or two of the arguments wrong, rarely none; their names."""
    names = sorted(set(arguments) - FOR_MESSAGES)
    wrong = draw.sample(names, min(len(names), draw.choice((0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2))))
    for key in wrong:
        others = [v for k, v in sorted(arguments.items()) if k != key and isinstance(v, torch.Tensor)]
        others = [other for other in others if other.layout == torch.strided and not other.is_nested]
        arguments[key] = wrong_value(arguments[key], others, draw)
    return wrong


def _close(function: Any, arguments: dict[str, Any]) -> bool:
    """Close the context of a call, if it has one. A checkpoint that is read again opens its files again."""
    on = getattr(function, "__self__", None)
    for value in (on, getattr(on, "context", None), arguments.get("context"), *getattr(on, "contexts", [])):
        if type(value).__name__ == "ExpertParallelContext":
            value.close()
            return True
    return False


MAY_BE_CLOSED = {
    "CombineSink",
    "ExpertParallel",
    "ExpertParallel.close",
    "ExpertParallel.count_tokens",
    "ExpertParallel.expert_loads",
    "ExpertParallel.join",
    "ExpertParallel.record_routes",
    "ExpertParallel.replay_routes",
    "ExpertParallelContext.abort",
    "ExpertParallelContext.close",
    "ExpertParallelContext.fail",
    "ExpertParallelContext.next_exchange_id",
    "ExpertParallelContext.next_layer_id",
    "MoELayer.close",
    "MoELayer.count_steps",
    "MoELayer.count_waits",
    "MoELayer.extra_repr",
    "MoELayer.record_routes",
    "VirtualRanks.close",
}
"""What needs no memory between ranks."""


def check_order(draw: random.Random) -> None:
    """Stages of steps in any order and of any dispatcher: refused unless each is the next one of its own handle."""
    w = World(draw)
    torch.manual_seed(1)
    context = w.context()
    made = [TokenDispatcher(**(w.dispatcher_arguments() | {"context": context})) for _ in range(2)]
    stages = ("dispatch_recv", "combine_send", "combine_recv")
    handles: list[list[Any]] = []  # handle, dispatcher, stages done, number of the dispatch
    said = []
    sent = 0
    for _ in range(12):
        if not handles or draw.random() < 0.25:
            owner = draw.randrange(2)
            try:
                handles.append([made[owner].dispatch_send(**w.tokens()), owner, 0, sent])
            except StaleHandleError:
                return  # what an earlier stage recorded, which ends the group
            sent += 1
            said.append(f"send({owner})")
            continue
        held = draw.choice(handles)
        handle, owner, done, number = held
        stage = draw.randrange(3) if draw.random() < 0.5 else min(done, 2)
        caller = owner if draw.random() < 0.9 else 1 - owner
        said.append(f"{stages[stage]}({number}, by {caller})")
        output = torch.zeros(made[caller].geometry.row_capacity, HIDDEN, dtype=torch.bfloat16)
        more = (output, handle) if stages[stage] == "combine_send" else (handle,)
        right = caller == owner and stage == done
        try:
            getattr(made[caller], stages[stage])(*more)
        except ValueError as error:
            if right or not str(error).startswith("handle: "):
                raise Fault(f"order of calls | handle | {error}\n    {said}") from None
        except StaleHandleError:
            if max(sent - other[3] for other in handles) <= 2:
                raise Fault(f"order of calls | handle | stale too soon\n    {said}") from None
            return  # which ends the group
        except Exception as error:
            raise Fault(f"order of calls | handle | {type(error).__name__}\n    {said}\n    {where(error)}") from None
        else:
            if not right:
                raise Fault(f"order of calls | handle | accepted\n    {said}")
            held[2] += 1


def _child(seed: int, start: int, count: int, progress: str) -> None:
    """Make calls `start .. start + count`, one JSON line for each fault, and a count of all in the end."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    file = os.open(progress, os.O_WRONLY | os.O_CREAT)

    def too_long(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, too_long)
    counts: Counter[str] = Counter()
    for index in range(start, start + count):
        os.pwrite(file, f"{index:020d}".encode(), 0)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            name, outcome = run_call(seed, index)
            counts[f"{name} {outcome}"] += 1
        except Fault as fault:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps({"index": index, "fault": str(fault)}), flush=True)
        except Hang:
            print(json.dumps({"index": index, "fault": f"{_name_of(index)} | | over {SECONDS} s"}), flush=True)
        except Exception as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            text = f"{_name_of(index)} | | the fuzzer itself: {where(error)}"
            print(json.dumps({"index": index, "fault": text, "trace": traceback.format_exc()[-1500:]}), flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"counts": counts}), flush=True)


def _name_of(index: int) -> str:
    names = sorted(targets())
    return names[index % len(names)]


@dataclass(frozen=True)
class Outcome:
    """Of a run: calls by target and outcome, and faults `(index, text)`."""

    counts: Counter[str]
    faults: list[tuple[int, str]]


def run(seed: int, start: int, count: int, *, processes: int = 1, seconds: float = float("inf")) -> Outcome:
    """Make `count` calls from `start` on, in `processes` children at a time, for about `seconds`."""
    batch, end = max(1, min(500, count // processes)), time.monotonic() + seconds
    starts = iter(range(start, start + count, batch))
    outcome, running = Outcome(Counter(), []), []
    with tempfile.TemporaryDirectory() as folder:
        while True:
            while len(running) < processes and time.monotonic() < end and (first := next(starts, None)) is not None:
                running.append(_Batch(seed, first, min(batch, start + count - first), Path(folder)))
            if not running:
                return outcome
            for child in list(running):
                if child.is_done(outcome):
                    running.remove(child)
            time.sleep(0.05)


class _Batch:
    """A child process with a range of calls; after a crash or a hang another one goes on behind it."""

    def __init__(self, seed: int, start: int, count: int, folder: Path) -> None:
        self.seed, self.start, self.end, self.folder = seed, start, start + count, folder
        self._begin()

    def _begin(self) -> None:
        self.progress = self.folder / f"{self.start}.progress"
        self.output = self.folder / f"{self.start}.out"
        numbers = [str(self.seed), str(self.start), str(self.end - self.start)]
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.support.wrong_calls", "--child", *numbers]
        with self.output.open("w") as out, (self.folder / f"{self.start}.err").open("w") as err:
            # What a call keeps in host memory goes with the folder.
            environment = os.environ | {"OMP_NUM_THREADS": "1", VARIABLE: str(self.folder / "kept")}
            environment.pop("TRITON_INTERPRET", None)
            self.process = subprocess.Popen(
                [*command, str(self.progress)], stdout=out, stderr=err, env=environment, start_new_session=True
            )
        self.seen, self.since = -1, time.monotonic()

    def is_done(self, outcome: Outcome) -> bool:
        at = int(self.progress.read_text() or 0) if self.progress.exists() else -1
        if at != self.seen:
            self.seen, self.since = at, time.monotonic()
        code, silent = self.process.poll(), time.monotonic() - self.since > SILENCE
        if code is None and not silent:
            return False
        if code is None:
            self.process.kill()
            self.process.wait()
        for line in self.output.read_text().splitlines():
            found = json.loads(line)
            outcome.counts.update(found.get("counts", {}))
            if "fault" in found:
                outcome.faults.append((found["index"], found["fault"]))
        if code == 0:
            return True
        error = (self.folder / f"{self.start}.err").read_text()[-600:]
        if at < 0:
            raise RuntimeError(f"a child made no call: {error}")
        how = "hangs" if code is None else f"ends the process ({code}): {error}"
        outcome.faults.append((at, f"{_name_of(at)} | | {how}"))
        if at + 1 >= self.end:
            return True
        self.start = at + 1
        self._begin()
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, help="number of one call, made in this process")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(*map(int, options.child[:3]), options.child[3])
        return 0
    if options.only is not None:
        warnings.simplefilter("ignore")
        print(*run_call(options.seed, options.only))
        return 0
    outcome = run(options.seed, options.start, options.calls, processes=options.processes)
    for kind, number in sorted(outcome.counts.items()):
        print(f"{number:6d}  {kind}")
    groups: dict[str, list[tuple[int, str]]] = {}
    for index, fault in sorted(outcome.faults):
        groups.setdefault(fault.split("\n")[0], []).append((index, fault))
    for _, found in sorted(groups.items()):
        print(f"{len(found)} x {found[0][1]}\n    --seed {options.seed} --only {found[0][0]}")
    print(f"{outcome.counts.total() + len(outcome.faults)} calls, {len(outcome.faults)} faults, {len(groups)} kinds")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
