"""Have ranks die or stall at chosen moments of steps, and see whether the others go on with the right bits.

`python -m tests.support.survivors --jobs 100 --seed 0 --parallel 2`

A job is a server's loop with `on_failure="continue"` on 4 or 8 CPU ranks: two layers with replicas in turn, `STEPS`
steps, `close`. A `Fault` says which rank is killed (SIGKILL) or stopped (SIGSTOP), and where. A stopped rank is
continued as soon as the others have done all steps.

Each survivor must end without an error and have a result of the smaller group within `2 * LIMIT_S` of a fault, or
`3 * LIMIT_S` of the last of several. Each of its results must be, bit for bit, that of virtual ranks which had the
group and the placement of that moment from the start. A stopped rank must raise `RankRemovedError`. Without replicas,
survivors load the experts that died (`wait`).

With `rejoin` a new process takes the place of the rank that died, and gets its experts from the others. It, or one of
them, may die or stall meanwhile (`Job.meanwhile`). Then more processes come, until all ranks are there. One that was
stopped is continued as soon as the others have gone on, and must raise that it is out, or that it could not come back.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.support.kills import RankProcesses, announced, prepare

LIMIT_S = 3.0
"""`timeout_s` of a step."""
STEPS = 6
REJOIN_STEPS = 20
"""Steps of a job with `rejoin`. From the fault on each waits a little, and admits a process that has come back."""
PAUSE_S, LONG_PAUSE_S = 0.1, 0.8
"""How long it waits in each; longer where another rank dies meanwhile, since more processes come then."""
MOST_PROCESSES = 5
"""Of one rank, in a job with `rejoin`."""
FAULT_STEP = 3
"""In which step, from 1 on, most faults are."""
EXPERTS, TOP_K, TOKENS, HIDDEN = 8, 3, 12, 256
JOB_S = 120.0
END_S = 10.0
FORMATS = ("nvfp4", "bf16")

STAGES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


@dataclass(frozen=True)
class Fault:
    """`rank` is killed, or stopped, as it comes to `place`."""

    rank: int
    place: str
    stop: bool = False


@dataclass(frozen=True)
class Job:
    """What is done to ranks.

    Attributes:
        rejoin: whether a new process takes the place of the only rank that is killed, as soon as that is dead.
        meanwhile: with `rejoin`, another fault, of the new process or of a rank that was there.
        same_memory: whether survivors keep their memory, as on GPUs. Then none of them may be stopped.
    """

    world: int
    faults: tuple[Fault, ...]
    replicas: int = 3
    rejoin: bool = False
    same_memory: bool = False
    meanwhile: Fault | None = None

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        return self.faults if self.meanwhile is None else (*self.faults, self.meanwhile)

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.world)) - {fault.rank for fault in self.all_faults}))

    @property
    def last_group(self) -> tuple[int, ...]:
        """The ranks of the last steps."""
        return tuple(range(self.world)) if self.rejoin else self.survivors

    @property
    def steps(self) -> int:
        return REJOIN_STEPS if self.rejoin else STEPS


@dataclass
class Result:
    """What a rank got from a step: the ranks of then, when it had it, and the bytes of `y`."""

    step: int
    members: tuple[int, ...]
    at: float
    y: bytes


@dataclass
class Fate:
    """What became of a rank: its results, where it was last, and when that was.

    And its last word, the errors of its processes, and how many of these there were.
    """

    results: list[Result] = field(default_factory=list)
    place: str = ""
    at: float = 0.0
    word: tuple[Any, ...] = ()
    errors: list[str] = field(default_factory=list)
    began: int = 1


def places(world: int) -> list[str]:
    """Where ranks come in step `FAULT_STEP`, in order; also between two records, or two flags of combine.

    After some flags of combine, some ranks have their results, and others wait.
    """
    n = FAULT_STEP
    first = (n - 1) * world + 1
    stores = [f"store, end ({number})" for number in range(first, first + world)]
    flags = [f"flag, begin ({number})" for number in range(first, first + world)]
    send, recv, combine, last = ([f"{stage}, begin ({n})", f"{stage}, end ({n})"] for stage in STAGES)
    return [f"step ({n})", send[0], *stores, send[1], *recv, combine[0], *flags, combine[1], *last]


def during_recovery() -> list[str]:
    """Where a survivor comes in its first recovery. Not every one comes to `propose`."""
    return [f"{place} (1)" for place in ("agree, begin", "agree, end", "make memory, begin", "new memory, end")]


def during_rejoin() -> list[str]:
    """Where a rank comes while a new process becomes one of them: new memory, and experts of two layers on their way.

    A rank that has given its last expert may die, while the new process waits for others.
    """
    memory = [f"{place} (2)" for place in ("make memory, begin", "new memory, end")]
    moves = [f"move, begin ({number})" for number in (1, 2)]
    return [
        *memory,
        *moves,
        *(f"{place} ({n})" for place in ("move experts, begin", "wait done, begin") for n in (1, 2)),
    ]


def placement(world: int, replicas: int) -> Any:
    """Each expert on `replicas` ranks, the slots of a rank in turn."""
    from moe_runtime.placement.placement import Placement

    slots = EXPERTS * replicas // world
    first = EXPERTS // world
    return Placement(
        EXPERTS, world, tuple((rank * first + slot) % EXPERTS for rank in range(world) for slot in range(slots))
    )


def layer_config(fmt: str) -> Any:
    from moe_runtime.config import MoELayerConfig

    return MoELayerConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        token_format=fmt,  # type: ignore[arg-type]
    )


def inputs(step: int, rank: int) -> Any:
    """What `rank`, by its number at the start, brings to `step`; uneven counts, and none of it for some."""
    from tests.support.exchange_data import rank_input

    return rank_input(step, rank, (TOKENS, 5, 0, 1)[(rank + step) % 4], HIDDEN, EXPERTS, TOP_K)


@functools.lru_cache(maxsize=256)
def virtual_ranks(world: int, replicas: int, members: tuple[int, ...], fmt: str) -> Any:
    """Virtual ranks that are `members` from the start."""
    from moe_runtime.resilience.refill import refill
    from moe_runtime.virtual import VirtualRanks

    whole = placement(world, replicas)
    held = refill([whole.rank_experts(member) for member in members], EXPERTS)
    return VirtualRanks(
        layer_config(fmt), len(members), lambda layer: layer.load_random(0), placement=held, engine="torch"
    )


@functools.lru_cache(maxsize=4096)
def expected(world: int, replicas: int, members: tuple[int, ...], step: int) -> dict[int, bytes]:
    """The bytes of `y` of a step by rank, of virtual ranks that are `members` from the start."""
    ranks = virtual_ranks(world, replicas, members, FORMATS[step % len(FORMATS)])
    given = [inputs(step, member) for member in members]
    ys = ranks([i.x for i in given], [(i.topk_idx, i.topk_weights) for i in given])
    return {member: _bytes(y) for member, y in zip(members, ys, strict=True)}


def run_job(job: Job) -> list[Fate]:
    """Run a job to its end."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, fates = RankProcesses(), [Fate() for _ in range(job.world)]
    processes = ranks.processes
    for rank in range(job.world):
        ranks.start(rank, run_rank, job, rank, server.port, 1)
    newest = dict(enumerate(processes))
    stopped = {fault.rank for fault in job.all_faults if fault.stop}
    end = time.monotonic() + JOB_S
    while ranks.talking and time.monotonic() < end:
        for rank, word in ranks.words(0.5):
            if word is None:
                ended = fates[rank].word == ("clean",) or fates[rank].began == MOST_PROCESSES
                if job.rejoin and rank not in job.survivors and not ended:
                    fates[rank].word = ()
                    fates[rank].began += 1
                    ranks.start(rank, run_rank, job, rank, server.port, fates[rank].began)
                    newest[rank] = processes[-1]
                continue
            kind, *said = word
            if kind == "at":
                fates[rank].place, fates[rank].at = said
            elif kind == "y":
                fates[rank].results.append(Result(*said))
            else:
                fates[rank].word = (kind, *said)
                fates[rank].errors += said[:1]
        for rank in stopped if others_are_done(job, fates) else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(newest[rank].pid or 0, signal.SIGCONT)
    for process in processes:
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()
    return fates


def others_are_done(job: Job, fates: list[Fate]) -> bool:
    """Whether survivors have done all steps; with another fault meanwhile, whether they have gone on since that."""
    if job.meanwhile is None:
        return all(len(fates[rank].results) == job.steps or fates[rank].word for rank in job.survivors)
    stalled = fates[job.meanwhile.rank]
    return stalled.place == job.meanwhile.place and all(
        any(result.at > stalled.at for result in fates[rank].results) or fates[rank].word for rank in job.survivors
    )


def faults_of(job: Job, fates: list[Fate]) -> list[str]:
    """What is wrong with a job, in words."""
    wrong = []
    for fault in job.faults:
        fate, word = fates[fault.rank], fates[fault.rank].word
        if fault.stop and (not word or word[:2] != ("error", "RankRemovedError")):
            wrong.append(f"rank {fault.rank}, which was stopped, said {word} at {fate.place!r}")
        if not fault.stop and not job.rejoin and (word or fate.place != fault.place):
            wrong.append(f"rank {fault.rank} was not killed at {fault.place!r}: {fate.place!r}, {word}")
    last = max((fates[fault.rank].at for fault in job.all_faults), default=0.0)
    if job.meanwhile is not None and fates[job.meanwhile.rank].place != job.meanwhile.place:
        wrong.append(f"rank {job.meanwhile.rank} was not killed at {job.meanwhile.place!r} meanwhile")
    if job.meanwhile is not None and job.meanwhile.stop:
        errors = fates[job.meanwhile.rank].errors
        if not errors or not set(errors) <= {"RankRemovedError", "PeerTimeoutError"}:
            wrong.append(f"rank {job.meanwhile.rank}, which was stopped meanwhile, raised {errors}")
    for rank in range(job.world):
        fate = fates[rank]
        for result in fate.results:
            if result.y != expected(job.world, job.replicas, result.members, result.step)[rank]:
                wrong.append(f"rank {rank}, step {result.step}: other bits than those of ranks {result.members}")
        groups = [result.members for result in fate.results]
        if not job.rejoin and any(not set(after) <= set(before) for before, after in itertools.pairwise(groups)):
            wrong.append(f"rank {rank}: its group grew, {groups}")
        if job.rejoin and (fate.word != ("clean",) or groups[-1] != job.last_group):
            wrong.append(f"rank {rank}: did not end with all ranks, {fate.word} {groups[-1:]}")
        if rank not in job.survivors:
            continue
        if fate.word != ("clean",) or len(fate.results) != job.steps:
            wrong.append(f"rank {rank}: {len(fate.results)} steps, {fate.word} at {fate.place!r}")
        elif job.faults and groups[-1] != job.last_group:
            wrong.append(f"rank {rank}: its last group was {groups[-1]}")
        elif job.faults:
            again = (r.at for r in fate.results if r.members == job.survivors or (job.meanwhile and r.at > last))
            seconds = next(again) - last
            if seconds > (2 if len(job.all_faults) == 1 else 3) * LIMIT_S:
                wrong.append(f"rank {rank}: went on after {seconds:.1f} s")
    if len({tuple(sorted(r.step for r in fates[rank].results)) for rank in job.survivors}) > 1:
        wrong.append("survivors have done different steps")
    return wrong


def run_rank(job: Job, rank: int, port: int, began: int, pipe: Connection) -> None:
    """A rank of a job, in a process of its own, number `began`; from 2 on it takes the place of one that is dead."""
    os.setsid()  # Else a shell that ends continues it when it is stopped, as all of an orphaned process group.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.world), LOCAL_RANK=str(rank), CUDA_VISIBLE_DEVICES="")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if not os.environ.get("SURVIVORS_STDERR"):
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)  # torch tells of each connection that is lost
    import torch

    torch.set_num_threads(1)
    if job.same_memory:
        from moe_runtime.comm.heaps.shared_heap import SharedHeap
        from moe_runtime.comm.heaps.survivors import SurvivorHeap

        SharedHeap.kept_by_survivors = True
        SharedHeap._of_survivors = lambda *of: SurvivorHeap(*of)  # type: ignore[method-assign]
    seen: Counter[str] = Counter()
    due = {fault.place: fault for fault in job.faults if fault.rank == rank and began == 1}
    if job.meanwhile is not None and job.meanwhile.rank == rank:
        # A new process comes to these places with its first memory, the others do with their second.
        seen.update({} if began == 1 else dict.fromkeys(("make memory, begin", "new memory, end"), 1))
        new = rank == job.faults[0].rank
        due |= {job.meanwhile.place: job.meanwhile} if began == 1 + new else {}

    def tell(place: str) -> None:
        seen[place] += 1
        place = f"{place} ({seen[place]})"
        if place in due:
            pipe.send(("at", place, time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP if due[place].stop else signal.SIGKILL)

    last_word: tuple[Any, ...] = ("clean",)
    try:
        work(rank, job, tell, pipe, began > 1)
    except Exception as error:
        last_word = ("error", type(error).__name__, getattr(error, "rank", None), traceback.format_exc()[-1500:])
    with contextlib.suppress(OSError):
        pipe.send(last_word)
    pipe.close()
    os._exit(0)  # The process group of torch.distributed cannot be ended in order, a peer is gone.


def work(rank: int, job: Job, tell: Callable[[str], None], pipe: Connection, again: bool) -> None:
    from moe_runtime import warming
    from moe_runtime.comm.bootstrap import init_from_env
    from moe_runtime.context.expert_parallel import ExpertParallelContext
    from moe_runtime.layer import MoELayer

    warming.KINDS = warming.KINDS[:1]  # Only so that first steps, which wait longer, are done.
    if again:
        made = ExpertParallelContext.rejoin(engine="torch", timeout_s=LIMIT_S, startup_timeout_s=30.0)
    else:
        init_from_env("cpu", timeout_s=30.0)
        made = ExpertParallelContext(
            device="cpu", engine="torch", timeout_s=LIMIT_S, startup_timeout_s=30.0, on_failure="continue"
        )
    with made as context:
        layers = [MoELayer(layer_config(fmt), context, placement=placement(job.world, job.replicas)) for fmt in FORMATS]
        for layer in layers:
            layer.load_random(0)
            if not again:
                layer.warm_up()
        if again:
            announce_places(tell)
            context.allocate()
        else:
            context.allocate()
            announce_places(tell)
        for step in range(context.steps_done, job.steps):
            tell("step")
            given = inputs(step, rank)
            y = layers[step % len(layers)](given.x, topk_idx=given.topk_idx, topk_weights=given.topk_weights)
            pipe.send(("y", step, context.members, time.monotonic(), _bytes(y)))
            if job.rejoin and step >= FAULT_STEP:
                time.sleep(PAUSE_S if job.meanwhile is None else LONG_PAUSE_S)
                context.admit()
        tell("close")


def announce_places(tell: Callable[[str], None]) -> None:
    """Have this process tell where it is in steps, in recoveries, and while experts move."""
    from moe_runtime.comm.heaps.shared_heap import SharedHeap
    from moe_runtime.context.expert_parallel import ExpertParallelContext
    from moe_runtime.kernels.exchange import reference
    from moe_runtime.placement import migration
    from moe_runtime.resilience import layer_members
    from moe_runtime.resilience.membership import Membership

    signals_of, combine_send = reference._signals_of, reference.combine_send
    flagging = [False]

    def told_signals(*args: Any) -> Any:
        if flagging[0]:
            tell("flag, begin")
        return signals_of(*args)

    def told_combine(*args: Any, **kwargs: Any) -> None:
        flagging[0] = True
        combine_send(*args, **kwargs)
        flagging[0] = False

    reference._signals_of, reference.combine_send = told_signals, told_combine
    for stage in STAGES:
        announced(reference, stage, stage, tell)
    announced(reference, "store_records", "store", tell)
    announced(Membership, "agree", "agree", tell)
    announced(Membership, "_propose", "propose", tell)
    announced(SharedHeap, "_create", "make memory", tell)
    announced(SharedHeap, "_map", "map memory", tell)
    announced(ExpertParallelContext, "_point_at_peers", "new memory", tell)
    announced(layer_members, "move_experts", "move experts", tell)
    announced(migration, "_move", "move", tell)
    announced(migration.ExpertMover, "wait_done", "wait done", tell)


def _bytes(y: Any) -> bytes:
    import torch

    return bytes(y.contiguous().view(torch.uint8).flatten().tolist())


def random_job(chooser: random.Random) -> Job:
    """One or two deaths or stalls, anywhere in a step or in the recovery from the first one.

    Or one and a return, also with another death meanwhile.
    """
    world = chooser.choice((4, 8))
    first, second = chooser.sample(range(world), 2)
    faults = [Fault(first, chooser.choice(places(world)), stop=chooser.random() < 0.2)]
    kind = chooser.choice(("one", "two at once", "in the recovery"))
    if kind == "two at once":
        faults.append(Fault(second, chooser.choice(places(world)), stop=chooser.random() < 0.2))
    elif kind == "in the recovery":
        faults.append(Fault(second, chooser.choice(during_recovery()), stop=chooser.random() < 0.2))
    # Without replicas the others load the experts that died. Of two deaths, it would matter which was first.
    replicas = chooser.choice((1, 3)) if kind == "one" else 3
    rejoin = kind == "one" and not faults[0].stop and chooser.random() < 0.5
    same_memory = not rejoin and not any(fault.stop or "memory" in fault.place for fault in faults)
    meanwhile = None
    if rejoin and chooser.random() < 0.5:
        place = chooser.choice(during_rejoin())
        meanwhile = Fault(chooser.choice((first, second)), place, stop=chooser.random() < 0.2)
    return Job(world, tuple(faults), replicas, rejoin, same_memory and chooser.random() < 0.5, meanwhile)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    arguments = parser.parse_args()
    prepare()
    chooser = random.Random(arguments.seed)
    jobs = [random_job(chooser) for _ in range(arguments.jobs)]
    failed = 0
    with ThreadPoolExecutor(arguments.parallel) as pool:
        for job, fates in zip(jobs, pool.map(run_job, jobs), strict=True):
            for wrong in faults_of(job, fates):
                failed += 1
                print(f"{job}: {wrong}", flush=True)
    print(f"{len(jobs)} jobs, {failed} faults")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
