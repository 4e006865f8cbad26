"""Worker processes for distributed tests: one pool per world size for many tests, each with a gloo group.

A test passes a function of the test module, `fn(rank, world, *args)`, and gets every rank's result. Unless they are
to have GPUs, workers see none and interpret Triton kernels. A pool that was left in a bad state is built anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest

RUN_S = 150.0
"""Less than the limit of a test, so that a hanging rank is reported with its stack."""
START_S = 120.0
HEALTH_S = 20.0
END_S = 30.0
"""For an idle worker to notice that its pipe is closed, or a dead one to be reaped; one that hangs is killed."""
STACK_LOOKS = 100
"""How often it is looked, ten times in a second, whether a stack is there and does not grow any more."""
PATIENCE_S = 100.0
"""How long ranks wait for each other where all come, or in time; what ends much earlier has not ended by this."""
WITHOUT_ONE_S = 4.0
"""How long for one that never comes: longer than any other may be held up on a busy machine."""


class RankFailure(AssertionError):
    """Some rank raised, hung or died; the message has each such rank's traceback or fate."""


@dataclass(frozen=True)
class Outcome:
    """What became of a function on one rank.

    Attributes:
        result: what it returned; None if it did not return.
        error: the exception it raised, as itself where it can be pickled, else a `RankFailure` with its text.
        trace: the traceback of `error`, as text.
        exitcode: of a fresh process (`run_once`); 0, or negative for a signal; None in a pool.
    """

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None

    def returned(self) -> Any:
        """`result`; raises `RankFailure` with the traceback where the function raised."""
        if self.error is not None:
            raise RankFailure(self.trace)
        return self.result


class WorkerPool:
    """`world_size` processes kept for many calls of `run`.

    Args:
        world_size: processes.
        gpus: as for `run_once`; such a pool ends with the first failure, since NVSHMEM is joined once per process.
    """

    def __init__(self, world_size: int, gpus: bool = False) -> None:
        self.world_size = world_size
        self.gpus = gpus
        self._workers: list[_Worker] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = RUN_S) -> list[Any]:
        """`fn(rank, world, *args)` on every rank; the results by rank.

        Raises `RankFailure` with the tracebacks if a rank raises, or does not answer within `timeout` seconds.
        """
        outcomes = self.outcomes(fn, *args, timeout=timeout)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        if failed:
            report = "\n".join(f"--- rank {rank} of {self.world_size}:\n{outcome.trace}" for rank, outcome in failed)
            raise RankFailure(f"{fn.__name__} failed on {len(failed)} rank(s)\n{report}")
        return [outcome.result for outcome in outcomes]

    def outcomes(self, fn: Callable[..., Any], *args: Any, timeout: float = RUN_S) -> list[Outcome]:
        """As `run`, but exceptions of the ranks are handed back in each rank's `Outcome`."""
        if not self._workers:
            self._workers = _start(self.world_size, self.gpus)
        outcomes = self._call(fn, args, timeout)
        if any(outcome.error is not None for outcome in outcomes):
            if self.gpus:
                self.close()
            else:
                self._check_health()
        return outcomes

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Outcome]:
        message = pickle.dumps((fn, args))
        for worker in self._workers:
            worker.send(message)
        outcomes = _collect(self._workers, timeout)
        silent = [f"rank {rank} {fate}" for rank, fate in enumerate(outcomes) if isinstance(fate, str)]
        if silent:
            traces = [
                f"--- rank {rank} of {self.world_size}:\n{outcome.trace}"
                for rank, outcome in enumerate(outcomes)
                if isinstance(outcome, Outcome) and outcome.error is not None
            ]
            self.close()
            raise RankFailure("\n".join([f"{fn.__name__}: {'; '.join(silent)}; its pool was ended", *traces]))
        return [outcome for outcome in outcomes if isinstance(outcome, Outcome)]

    def _check_health(self) -> None:
        """A failed collective can leave the gloo group broken for the next test."""
        try:
            healthy = all(outcome.error is None for outcome in self._call(_barrier, (), HEALTH_S))
        except RankFailure:
            healthy = False
        if not healthy:
            self.close()


def run_once(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = RUN_S, gpus: bool = False, hosts: int = 1
) -> list[Outcome]:
    """`fn(rank, world, *args)` in fresh processes that may be killed; what became of each rank, with its exit code.

    With `gpus` rank `r` has GPU `r` as its current device, NCCL as well as gloo, and compiled kernels; where there are
    fewer GPUs the test is skipped. With several `hosts` ranks take themselves for ranks of so many, also for NCCL.

    Raises `RankFailure` if a rank neither answers nor ends within `timeout` seconds.
    """
    workers = _start(world_size, gpus, hosts)
    try:
        message = pickle.dumps((fn, args))
        for worker in workers:
            worker.send(message)
        outcomes = _collect(workers, timeout)
    finally:
        for worker in workers:
            worker.end()
    silent = [f"rank {rank} {fate}" for rank, fate in enumerate(outcomes) if isinstance(fate, str) and "within" in fate]
    if silent:
        raise RankFailure(f"{fn.__name__}: {'; '.join(silent)}")
    return [
        Outcome(
            result=getattr(outcome, "result", None),
            error=getattr(outcome, "error", None),
            trace=getattr(outcome, "trace", ""),
            exitcode=worker.process.exitcode,
        )
        for outcome, worker in zip(outcomes, workers, strict=True)
    ]


def _scope(fixture_name: str, config: pytest.Config) -> str:
    """Threads of gloo never rest, so pools end with a file of tests; but with GPUs workers take seconds to begin."""
    import torch

    return "session" if torch.cuda.is_available() else "module"


@pytest.fixture(scope=_scope)  # type: ignore[call-overload]
def get_pool() -> Iterator[Callable[..., WorkerPool]]:
    """`get_pool(world_size, gpus=False)`: the pool of this size, which ends with the file of tests or the session."""
    pools: dict[tuple[int, bool], WorkerPool] = {}

    def get(world_size: int, gpus: bool = False) -> WorkerPool:
        return pools.setdefault((world_size, gpus), WorkerPool(world_size, gpus))

    yield get
    for pool in pools.values():
        pool.close()


class _Worker:
    """A worker process, its pipe, and the folder where it dumps its stack when asked."""

    def __init__(self, rank: int, world_size: int, gpus: bool, folder: str, hosts: int) -> None:
        self.rank = rank
        self.folder = folder
        self._hangs = False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_preloads())
        self.pipe, child = context.Pipe()
        self.process = context.Process(
            target=_work, args=(rank, world_size, gpus, folder, hosts, child), name=f"rank {rank} of {world_size}"
        )
        self.process.daemon = True
        self.process.start()
        child.close()

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # A worker that died is found when its answer is awaited.
            self.pipe.send_bytes(message)

    def answer(self, deadline: float) -> Outcome | str:
        """Its outcome, or in words why there is none."""
        try:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                self._hangs = True
                return f"did not answer within the time limit; it was at\n{self._stack()}"
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(END_S)
            return f"died with exit code {self.process.exitcode}"

    def end(self) -> None:
        """Close the pipe, which makes an idle worker return; kill one that does not."""
        self.pipe.close()
        if not self._hangs:
            self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stack(self) -> str:
        if self.process.pid is None or not self.process.is_alive():
            return "(it has ended)"
        os.kill(self.process.pid, signal.SIGUSR1)
        text = before = ""
        for _ in range(STACK_LOOKS):
            time.sleep(0.1)
            with contextlib.suppress(OSError), open(f"{self.folder}/stack-{self.rank}") as file:
                before, text = text, file.read()
            if text and text == before:
                break
        return text or "(no stack)"


def _preloads() -> list[str]:
    """What the process has imported that workers are forked from, so that one starts in milliseconds.

    Where there are GPUs some workers interpret kernels and others do not, and nothing may ask for a GPU before a fork.
    """
    import torch

    if torch.cuda.is_available():
        return ["torch", "torch.distributed"]
    found = ["tests.support.preloaded", "tests.support.pool", "torch.distributed", "hypothesis", "moe_runtime.layer"]
    if "tests.support.parallel_models" in sys.modules:
        # Some of the tests that were collected run models: seconds, once instead of in each worker.
        from tests.support.tiny_models import CLASSES

        found += ["moe_runtime.integrations.transformers", "tests.support.parallel_models"]
        found += [f"transformers.models.{family}.modeling_{family}" for family in CLASSES]
    return found


def _start(world_size: int, gpus: bool = False, hosts: int = 1) -> list[_Worker]:
    if gpus:
        import torch

        if torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs")
    folder = tempfile.mkdtemp(prefix="moe_runtime-pool-")
    workers = [_Worker(rank, world_size, gpus, folder, hosts) for rank in range(world_size)]
    failed = [
        f"rank {rank}: {outcome if isinstance(outcome, str) else outcome.trace}"
        for rank, outcome in enumerate(_collect(workers, START_S))
        if isinstance(outcome, str) or outcome.error is not None
    ]
    if failed:
        for worker in workers:
            worker.end()
        raise RankFailure("workers did not start: " + "\n".join(failed))
    return workers


def _collect(workers: list[_Worker], timeout: float) -> list[Outcome | str]:
    deadline = time.monotonic() + timeout
    return [worker.answer(deadline) for worker in workers]


def _work(rank: int, world_size: int, gpus: bool, folder: str, hosts: int, pipe: Connection) -> None:
    gc.freeze()  # What was imported before is never garbage, and not looked through for any.
    os.environ["OMP_NUM_THREADS"] = "1"
    if gpus:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.support.interpreter import quicken

        quicken()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The session's end ends the workers.
    with open(f"{folder}/stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        _answer(pipe, lambda: _join(rank, world_size, gpus, folder, hosts))
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                # No orderly end of the process group: a peer may be gone already.
                os._exit(0)
            _answer(pipe, lambda message=message: _apply(message, rank, world_size))  # type: ignore[misc]
            if gpus:
                torch.cuda.empty_cache()  # Several processes share a GPU.


def _join(rank: int, world_size: int, gpus: bool, folder: str, hosts: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if hosts > 1:
        name = f"host{rank * hosts // world_size}"
        os.environ |= {"MOE_RUNTIME_HOST": name, "NCCL_HOSTID": name, "NCCL_NET": "Socket"}
    store = dist.FileStore(f"{folder}/store", world_size)
    if gpus:
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world_size, device_id=place)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _apply(message: bytes, rank: int, world_size: int) -> Any:
    fn, args = pickle.loads(message)
    return fn(rank, world_size, *args)


def _answer(pipe: Connection, work: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps(Outcome(result=work()))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            answer = pickle.dumps(Outcome(error=error, trace=trace))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps(Outcome(error=RankFailure(trace), trace=trace))
    with contextlib.suppress(OSError):  # The session has ended meanwhile.
        pipe.send_bytes(answer)


def _barrier(rank: int, world_size: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=HEALTH_S / 2))
