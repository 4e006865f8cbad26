"""Kill a random rank at a random moment of a job, and see what the others say.

`python -m tests.support.kills --kills 200 --seed 0 --jobs 3`

A job is what a server does, on 2 to 4 CPU ranks: `init_from_env`, a context, a layer with a placement, steps, another
placement, a step, `close`, the end of the process group. Each rank announces where it is. The victim kills itself
(SIGKILL) as it announces the chosen place, or is killed up to `LATER_S` later, wherever it is then.

Each survivor must raise a `MoERuntimeError` that names the victim, in `error.rank` or in the text, and its process must
end. That takes at most `LIMIT_S` and `SLACK_S` (and `ANSWER_S` where the victim hosted the store) from the kill, or
from when the survivor comes to the wait that it raises from: on a busy machine, ranks start seconds apart. It may end
without an error only if the victim had come to the last meeting in `close`: from then on, nobody needs it. Nothing of
moe_runtime may stay in /dev/shm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from moe_runtime.comm.store_calls import ANSWER_S

TRANSPORTS = ("shared", "collective", "hierarchical")
HOSTS = ("rank 0", "agent")
"""Who hosts the store where ranks meet: as without torchrun, and as with it."""
LIMIT_S = 10.0
"""`timeout_s` of everything."""
SLACK_S = 8.0
"""For the last look who is missing (3 s), and for a busy machine."""
LATER_S = 0.03
END_S = 10.0
"""For a process that has said its last word to end."""
JOB_S = 150.0
LAST_MEETING = "close: answer"
LAST_PLACE = "group destroyed"
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Kill:
    """What is done to a job: where the victim is killed, and how long after it announces that it is there."""

    transport: str
    host: str
    world_size: int
    victim: int = -1
    place: str = ""
    delay_s: float = 0.0

    @property
    def takes_the_store(self) -> bool:
        """Whether the store goes with the victim: a call of it may take `ANSWER_S` on top of its limit."""
        return self.host == "rank 0" and self.victim == 0

    def machine_of(self, rank: int) -> int:
        """The host that a rank takes itself for: two with `hierarchical`."""
        return 2 * rank // self.world_size if self.transport == "hierarchical" else 0


@dataclass
class Fate:
    """What became of a rank.

    Attributes:
        places: what it announced, in order.
        outcome: `named` in `error.rank`, `told` in the text, `clean`, `killed`, or what is wrong.
        came_at: when it announced the last place before `LAST_PLACE`.
        ended_at: when it said its last word.
        seconds: to its last word, from the kill or from `came_at`, whichever is later.
    """

    places: list[str] = field(default_factory=list)
    outcome: str = ""
    text: str = ""
    came_at: float = 0.0
    ended_at: float = 0.0
    seconds: float = 0.0


class RankProcesses:
    """Processes of ranks, each with a pipe to say words.

    Attributes:
        processes: all that were started, in their order.
    """

    def __init__(self) -> None:
        self.processes: list[ForkServerProcess] = []
        self._pipes: dict[Connection, int] = {}
        self._context = multiprocessing.get_context("forkserver")

    def start(self, rank: int, target: Callable[..., None], *args: object) -> None:
        """Start `target(*args, pipe)` for `rank`."""
        pipe, child = self._context.Pipe(duplex=False)
        process = self._context.Process(target=target, args=(*args, child), daemon=True)
        process.start()
        child.close()
        self._pipes[pipe] = rank
        self.processes.append(process)

    @property
    def talking(self) -> bool:
        """Whether any has not ended."""
        return bool(self._pipes)

    def words(self, wait_s: float) -> Iterator[tuple[int, tuple[Any, ...] | None]]:
        """What ranks say now, or next within `wait_s`: a word of each, None where it has ended."""
        for pipe in wait(list(self._pipes), timeout=wait_s):
            assert isinstance(pipe, Connection)
            rank, word = self._pipes[pipe], None
            try:
                word = pipe.recv()
            except EOFError:
                del self._pipes[pipe]
            yield rank, word


def run_job(kill: Kill) -> list[Fate]:
    """Run a job and judge every rank."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if kill.host == "agent" else None
    port = free_port() if server is None else server.port
    ranks, fates = RankProcesses(), [Fate() for _ in range(kill.world_size)]
    processes = ranks.processes
    for rank in range(kill.world_size):
        ranks.start(rank, run_rank, kill, rank, port)
    end, killed_at = time.monotonic() + JOB_S, 0.0
    while ranks.talking and time.monotonic() < end:
        for rank, word in ranks.words(1.0):
            if word is None:
                if rank == kill.victim and not killed_at:
                    killed_at = time.monotonic()
                continue
            kind, *said = word
            if kind == "at":
                fates[rank].places.append(said[0])
                if said[0] != LAST_PLACE:
                    fates[rank].came_at = time.monotonic()
                if rank == kill.victim and said[0] == kill.place and kill.delay_s and not killed_at:
                    time.sleep(kill.delay_s)
                    os.kill(processes[rank].pid or 0, signal.SIGKILL)
                    killed_at = time.monotonic()
            else:
                fates[rank].ended_at = time.monotonic()
                judge(kill, fates[rank], kind, *said)
    last = fates[kill.victim].places[-1] if kill.victim >= 0 and fates[kill.victim].places else ""
    for rank, (process, fate) in enumerate(zip(processes, fates, strict=True)):
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()
            fate.outcome = f"wrong: its process did not end ({fate.outcome})"
        elif rank == kill.victim:
            killed = process.exitcode == -signal.SIGKILL
            fate.outcome = "killed" if killed else f"wrong: not killed, {fate.outcome or process.exitcode} {fate.text}"
        elif process.exitcode != 0 or not fate.outcome:
            fate.outcome = f"wrong: exit code {process.exitcode} ({fate.outcome})"
        elif kill.victim >= 0:
            fate.seconds = fate.ended_at - max(killed_at, fate.came_at)
            since_kill = fate.ended_at - killed_at
            if fate.outcome == "clean" and not needless(kill, fates[kill.victim].places, rank):
                fate.outcome = f"wrong: no error, though the victim was last at {last!r}"
            elif late(kill, fate.seconds, since_kill):
                fate.outcome = f"wrong: {fate.outcome} after {fate.seconds:.1f} s, {since_kill:.1f} s after the kill"
    return fates


def late(kill: Kill, seconds: float, since_kill: float) -> bool:
    """Whether a survivor waited too long; two waits one after the other may not take more than twice the limit."""
    limit_s = LIMIT_S + SLACK_S + (ANSWER_S if kill.takes_the_store else 0.0)
    return seconds > limit_s or since_kill > 2 * limit_s


def judge(kill: Kill, fate: Fate, kind: str, error_rank: int = -1, text: str = "") -> None:
    """Note the last word of a rank."""
    fate.text = text
    if kind in ("clean", "other"):
        fate.outcome = "clean" if kind == "clean" else "wrong: no public error"
    elif error_rank == kill.victim:
        fate.outcome = "named"
    elif re.search(rf"\brank (\d+, )*{kill.victim}\b", text):
        fate.outcome = "told"
    else:
        fate.outcome = f"wrong: it names rank {error_rank}"


def needless(kill: Kill, places: list[str], rank: int = 0) -> bool:
    """Whether `rank` does not need the victim any more, or it cannot be known."""
    sums_are_sent = "step: relay, end (3)" in places
    if kill.machine_of(rank) != kill.machine_of(kill.victim) and sums_are_sent:
        return True  # Its last sums are on their way, and only ranks of one host close together.
    if kill.host == "rank 0" and kill.machine_of(rank) != kill.machine_of(0):
        # Rank 0 closes with ranks of its own host alone, and the store goes with it: whether the victim would have come
        # to the last meeting there is then not to be learned.
        without_victim = kill.machine_of(kill.victim) != kill.machine_of(0) and sums_are_sent
        if "close" in places or without_victim:
            return True
    if LAST_MEETING not in places:
        return False
    return places[-1] != LAST_MEETING or kill.delay_s > 0


def run_rank(kill: Kill, rank: int, port: int, pipe: Connection) -> None:
    """A rank of a job, in a process of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(kill.world_size), LOCAL_RANK=str(rank), CUDA_VISIBLE_DEVICES="")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.environ["MOE_RUNTIME_HOST"] = str(kill.machine_of(rank))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if kill.host == "agent":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)  # torch tells of each connection that is lost
    import torch
    import torch.distributed as dist

    from moe_runtime.comm.errors import MoERuntimeError

    torch.set_num_threads(1)
    seen: Counter[str] = Counter()

    def tell(place: str) -> None:
        seen[place] += 1
        place = place if seen[place] == 1 else f"{place} ({seen[place]})"
        pipe.send(("at", place))
        if rank == kill.victim and place == kill.place and not kill.delay_s:
            os.kill(os.getpid(), signal.SIGKILL)

    last_word: tuple[Any, ...] = ("clean",)
    try:
        announce_places(tell)
        work(rank, kill, tell)
    except MoERuntimeError as error:
        last_word = ("error", error.rank, f"{type(error).__name__}: {error}")
    except BaseException:
        last_word = ("other", -1, traceback.format_exc())
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        tell(LAST_PLACE)
        if rank == kill.victim:
            time.sleep(END_S)  # It may be killed a little later than it told where it is.
    finally:
        pipe.send(last_word)
        pipe.close()


def work(rank: int, kill: Kill, tell: Callable[[str], None]) -> None:
    """What each rank does."""
    from moe_runtime.comm.bootstrap import init_from_env
    from moe_runtime.context.expert_parallel import ExpertParallelContext
    from moe_runtime.dispatcher.hierarchical import HierarchicalExchange
    from moe_runtime.layer import MoELayer
    from tests.support.exchange_data import EXPERTS, HIDDEN, TOP_K, config, placements, rank_input

    tell("started")
    init_from_env("cpu", timeout_s=LIMIT_S)
    tell("joined")
    before, after, _ = placements(kill.world_size)
    if kill.transport == "hierarchical":
        before = after = None  # type: ignore[assignment]
    with ExpertParallelContext(
        device="cpu", transport=kill.transport, engine="torch", timeout_s=LIMIT_S, startup_timeout_s=LIMIT_S
    ) as context:
        tell("context made")
        layer = MoELayer(config(), context, placement=before)
        layer.load_random(0)
        tell("weights loaded")
        exchange = layer.dispatcher._exchange
        for half in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
            announced(exchange.backend, half, f"step: {half}", tell)
        if isinstance(exchange, HierarchicalExchange):
            for part in ("pack", "forward", "relay", "total"):
                announced(exchange._parts, part, f"step: {part}", tell)
        replacing = layer._replacing
        layer._replacing = lambda placement: (tell("moving experts"), replacing(placement))[1]  # type: ignore[method-assign]
        for step in range(3):
            mine = rank_input(0, rank, 5, HIDDEN, EXPERTS, TOP_K)
            layer(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
            context.check()
            if step == 1 and after is not None:
                layer.replace_experts(after)
        tell("close")
    tell("closed")


def announce_places(tell: Callable[[str], None]) -> None:
    """Have this process tell where it is in joining, meeting its peers, and making memory."""
    import torch.distributed as dist

    from moe_runtime.comm import bootstrap
    from moe_runtime.comm.heaps.shared_heap import SharedHeap
    from moe_runtime.comm.rank_group import RankGroup

    announced(bootstrap, "store_of_environment", "join: store", tell)
    announced(dist, "init_process_group", "join: connect", tell)
    announced(SharedHeap, "_create", "memory: make", tell)
    announced(SharedHeap, "_map", "memory: map", tell)
    announced(dist, "ProcessGroupGloo", "memory: connect", tell)
    gather, answer = RankGroup.gather, RankGroup._answer

    def told_gather(group: RankGroup, what: str, *args: Any, **kwargs: Any) -> Any:
        tell(f"meeting: {what}")
        found = gather(group, what, *args, **kwargs)
        tell(f"met: {what}")
        return found

    def told_answer(group: RankGroup, what: str, mine: bytes) -> list[str]:
        closing = what.endswith("Heap.close")
        if closing:
            tell(LAST_MEETING)
        keys = answer(group, what, mine)
        if closing:
            tell("close: answered")
        return keys

    RankGroup.gather = told_gather  # type: ignore[method-assign, assignment]
    RankGroup._answer = told_answer  # type: ignore[method-assign]


def announced(owner: Any, name: str, place: str, tell: Callable[[str], None]) -> None:
    """Tell of each begin and end of a call of `owner.name`."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        tell(f"{place}, begin")
        result = function(*args, **kwargs)
        tell(f"{place}, end")
        return result

    setattr(owner, name, call)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def left_in_shared_memory() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith("moe_runtime")}


def undisturbed(transport: str) -> list[str]:
    """The places of rank 1 of a job in which nobody is killed, but for those that another job may not come to.

    How many answers `close` waits for depends on who came first.
    """
    count = 4 if transport == "hierarchical" else 2
    fates = run_job(Kill(transport, HOSTS[0], count))
    assert [fate.outcome for fate in fates] == ["clean"] * count, fates
    return [place for place in fates[1].places if not place.startswith("close: answered (")]


def random_kill(chooser: random.Random, places: dict[str, dict[str, list[str]]]) -> Kill:
    transport, host, world_size = chooser.choice(TRANSPORTS), chooser.choice(HOSTS), chooser.randint(2, 4)
    if transport == "hierarchical":
        world_size = 4
    delay_s = chooser.choice((0.0, chooser.uniform(0.001, LATER_S)))
    place = chooser.choice(places[transport][chooser.choice([part for part in PARTS if places[transport][part]])])
    return Kill(transport, host, world_size, chooser.randrange(world_size), place, delay_s)


PARTS = ("before init_from_env", "init_from_env", "context and layer", "memory", "step", "replacement", "close")

BEGINNINGS = {
    "before init_from_env": ("started",),
    "init_from_env": ("join", "meeting: init_from_env", "met: init_from_env"),
    "memory": ("memory", "meeting: SharedHeap", "met: SharedHeap", "meeting: CollectiveHeap", "met: CollectiveHeap"),
    "step": ("step",),
    "replacement": ("meeting: replace_experts", "met: replace_experts", "moving"),
    "close": ("close", LAST_PLACE),
}


def part_of(place: str) -> str:
    """The part of a job that a place belongs to."""
    return next((part for part, begin in BEGINNINGS.items() if place.startswith(begin)), "context and layer")


def by_part(places: list[str]) -> dict[str, list[str]]:
    return {part: [place for place in places if part_of(place) == part] for part in PARTS}


def prepare() -> None:
    """Have ranks forked from a process that has imported what they need."""
    from tests.support.pool import _preloads

    # torch looks up the names of peers: where no name server answers, a store is silent for 5 s by default.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_preloads(), "tests.support.exchange_data"])


def run_kills(count: int, seed: int, jobs: int) -> list[tuple[Kill, list[Fate]]]:
    """Random kills, `jobs` jobs at a time."""
    prepare()
    places = {transport: by_part(undisturbed(transport)) for transport in TRANSPORTS}
    chooser = random.Random(seed)
    kills = [random_kill(chooser, places) for _ in range(count)]
    with ThreadPoolExecutor(jobs) as pool:
        return list(zip(kills, pool.map(run_job, kills), strict=True))


def faults_of(kill: Kill, fates: list[Fate]) -> list[str]:
    """In words, what is wrong with a job."""
    return [
        f"{kill}: rank {rank}: {fate.outcome}: {fate.text}; it was at {fate.places[-2:]}, the victim at "
        f"{fates[kill.victim].places[-1:]}"
        for rank, fate in enumerate(fates)
        if fate.outcome.startswith("wrong")
    ]


def table_of(results: list[tuple[Kill, list[Fate]]]) -> str:
    """Outcomes of survivors, by the part of the job in which the victim was last."""
    counts: dict[str, Counter[str]] = {}
    slowest: dict[str, float] = {}
    for kill, fates in results:
        part = part_of(fates[kill.victim].places[-1]) if fates[kill.victim].places else "before init_from_env"
        row = counts.setdefault(part, Counter())
        row["kills"] += 1
        for rank, fate in enumerate(fates):
            if rank != kill.victim:
                row["wrong" if fate.outcome.startswith("wrong") else fate.outcome] += 1
                slowest[part] = max(slowest.get(part, 0.0), fate.seconds)
    columns = ("kills", "named", "told", "clean", "wrong")
    lines = ["| killed in | " + " | ".join(columns) + " | slowest (s) |", "|---" * (len(columns) + 2) + "|"]
    for part in PARTS:
        if part in counts:
            cells = (str(counts[part][column]) for column in columns)
            lines.append(f"| {part} | {' | '.join(cells)} | {slowest[part]:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=3, help="jobs at a time")
    options = parser.parse_args()
    before = left_in_shared_memory()
    results = run_kills(options.kills, options.seed, options.jobs)
    faults = [fault for kill, fates in results for fault in faults_of(kill, fates)]
    print(table_of(results))
    left = left_in_shared_memory() - before
    print("\n".join([f"left in {SHARED_MEMORY}: {sorted(left) or 'nothing'}", *faults]))
    return int(bool(faults or left))


if __name__ == "__main__":
    from tests.support import kills  # Ranks find their functions there, not in `__main__`.

    sys.exit(kills.main())
