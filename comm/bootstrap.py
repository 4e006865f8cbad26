"""How ranks find each other on the host: every exchange here goes through the group's key-value store and is bounded.

The store works whatever backend the group has (gloo, NCCL), and tells exactly which ranks have not come.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.comm.store_calls import StoreSilentError, calls_of
from moe_runtime.errors import MoERuntimeError, PeerAbortedError, PeerTimeoutError, Phase

ROLL_CALL_S = 3.0
"""How long ranks have to say that they are there, once one has waited too long."""

PARTING_S = 5.0
"""How long the rank whose process may host the store stays for those that have not read yet that all have come."""

_POLL_S = (0.001, 0.02)
"""First and longest pause between looks for the answers of peers."""

T = TypeVar("T")


class _StoreLostError(MoERuntimeError):
    """The group's store cannot be reached any more."""


@dataclass(frozen=True)
class _Left:
    """What a rank that gave up leaves in place of its next answer."""

    reason: str


class RankGroup:
    """The ranks that share one context: who this process is among them, and small exchanges between their hosts.

    Making one is not collective, but all ranks must make theirs in the same order. `gather` and `barrier` are
    collective. A rank that gave up at start-up says so with `leave`; after a `PeerTimeoutError` the ranks may have
    made different numbers of these, and the group is of no use any more.

    Attributes:
        rank, world_size: this process in the group (not in the world).
        group: the torch.distributed group; None for a single process without torch.distributed.
        timeout_s: bound of every wait.

    Raises `ValueError` where a launcher has started several ranks and torch.distributed is not initialised, unless this
    one is to be `alone`.
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh | None = None, *, timeout_s: float = 120.0, alone: bool = False
    ) -> None:
        self.timeout_s = timeout_s
        self.group = resolve_group(group)
        if self.group is None and not alone:
            _check_started_alone()
        self.rank = 0
        self.world_size = 1
        self._prefix = ""
        self._calls = 0
        self._store: Any = None
        if self.group is not None:
            self.rank = dist.get_rank(self.group)
            self.world_size = dist.get_world_size(self.group)
            ranks = dist.get_process_group_ranks(self.group)
            identity = f"{self.group.group_name}/{ranks}"
            prefix = f"moe_runtime/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
            self._store = dist.distributed_c10d._get_default_store()
            # Counted in the store, since other code of this process may have made some of the same group before.
            made = self._ask("group", lambda: self._store.add(f"{prefix}/made/{self.rank}", 1))
            self._prefix = f"{prefix}/{made}"

    def gather(self, what: str, value: object, *, timeout_s: float | None = None) -> list[Any]:
        """Every rank's `value` (picklable, small), by rank.

        Raises `PeerTimeoutError` naming `what` and the first rank that has not come within `timeout_s`
        (default: the group's); the message lists all of them. Raises `MoERuntimeError` where the store is gone or does
        not answer.
        """
        if self._store is None:
            return [value]
        return self._collect(what, self._answer(what, value), self.timeout_s if timeout_s is None else timeout_s)

    def barrier(self, what: str = "barrier") -> None:
        """Wait for every rank; raises as `gather` does."""
        self.gather(what, None)

    def part(self, what: str) -> bool:
        """The last `barrier`, after which processes may end; whether all ranks are known to have come.

        Rank 0, whose process may host the store, stays until all know it. Raises as `gather` does, but not where the
        store goes after this rank has come: then whoever hosted it has left, and nothing is left to agree on.
        """
        if self._store is None:
            return True
        keys = self._answer(what, None)
        try:
            self._collect(what, keys, self.timeout_s)
        except _StoreLostError:
            return False
        with contextlib.suppress(MoERuntimeError):
            keys = self._answer(what, None)
            if self.rank == 0:
                self._wait(what, keys, PARTING_S)
        return True

    def leave(self, reason: str) -> None:
        """Answer the peers' next `gather` without waiting for it: there they raise `PeerAbortedError` with `reason`."""
        if self._store is not None:
            # A store that is gone has nobody to tell.
            with contextlib.suppress(MoERuntimeError):
                self._answer("leave", _Left(reason))

    def missing(self, event: str, wait_s: float) -> list[int]:
        """Ranks that have not called this for `event` within `wait_s`, or until the store was gone or did not answer.

        None where it does not answer at all. Never raises.
        """
        absent: list[int] = []
        if self._store is None:
            return absent
        keys = [f"{self._prefix}/{event}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(MoERuntimeError):
            self._ask(event, lambda: self._store.set(keys[self.rank], b"here"))
            while (absent := self._not_there(event, keys)) and time.monotonic() <= deadline:
                time.sleep(0.01)
        return absent

    def connect(self, what: str, key: str) -> dist.ProcessGroupGloo:
        """A gloo group over the same ranks that is nobody else's. Collective; `key` is equal on all ranks and new.

        Raises `PeerTimeoutError` where that takes longer than the group's timeout, or a connection fails.
        """
        limit = timedelta(seconds=self.timeout_s)
        # Waits in the store, so that is another connection to it, and another thread.
        store = self._ask(what, lambda: self._store.clone())

        def make() -> dist.ProcessGroupGloo:
            return dist.ProcessGroupGloo(dist.PrefixStore(key, store), self.rank, self.world_size, limit)

        try:
            return calls_of(store).run(make, self.timeout_s)
        except RuntimeError as error:
            missing = self.missing(key, min(ROLL_CALL_S, self.timeout_s))
            names = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
            message = f"{what}: rank {self.rank} cannot connect to its peers, {names} did not take part: {error}"
            raise PeerTimeoutError(message, missing[0] if missing else -1, Phase.START_UP) from error

    def _ask(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns, which calls the store and does not wait there.

        Errors of the store become a `MoERuntimeError` that says whether it is gone or does not answer.
        """
        try:
            return calls_of(self._store).run(work)
        except StoreSilentError as error:
            trouble = "gets no answer from the group's store, the process that hosts it may be stopped"
            raise MoERuntimeError(f"{what}: rank {self.rank} {trouble}", self.rank, Phase.START_UP) from error
        except RuntimeError as error:
            trouble = f"cannot reach the group's store, the process that hosts it is gone: {error}"
            raise _StoreLostError(f"{what}: rank {self.rank} {trouble}", self.rank, Phase.START_UP) from error

    def _answer(self, what: str, value: object) -> list[str]:
        """Store this rank's answer to the next call; the keys of all ranks' answers."""
        self._calls += 1
        keys = [f"{self._prefix}/{self._calls}/{rank}" for rank in range(self.world_size)]
        mine = pickle.dumps((what, value))
        self._ask(what, lambda: self._store.set(keys[self.rank], mine))
        return keys

    def _collect(self, what: str, keys: list[str], limit: float) -> list[Any]:
        """The values of all ranks' answers to the call before, once they are there."""
        if missing := self._wait(what, keys, limit):
            names = ", ".join(map(str, missing))
            message = f"{what}: rank {names} of {self.world_size} did not come within {limit:g} s"
            raise PeerTimeoutError(message, missing[0], Phase.START_UP)
        answers = [pickle.loads(answer) for answer in self._ask(what, lambda: self._read(keys))]
        for rank, (_, answer) in enumerate(answers):
            if isinstance(answer, _Left):
                raise PeerAbortedError(f"{what}: rank {rank} gave up: {answer.reason}", rank, Phase.START_UP)
        if len({step for step, _ in answers}) > 1:
            steps = describe_ranks([step for step, _ in answers])
            raise ValueError(f"group: its ranks are not at the same step, {steps}")
        return [answer for _, answer in answers]

    def _wait(self, what: str, keys: list[str], limit: float) -> list[int]:
        """Ranks whose answers are not there within `limit` seconds.

        It looks for them time and again, since a store that waits serves no other thread of this process meanwhile.
        """
        deadline = time.monotonic() + limit
        pause, longest = _POLL_S
        while not self._ask(what, lambda: self._store.check(keys)):
            if time.monotonic() > deadline:
                # One may have answered since.
                return self._not_there(what, keys)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return []

    def _not_there(self, what: str, keys: list[str]) -> list[int]:
        """Ranks whose keys are not in the store."""
        return self._ask(what, lambda: [rank for rank, key in enumerate(keys) if not self._store.check([key])])

    def _read(self, keys: list[str]) -> list[bytes]:
        """The answers of all ranks, which are there; this rank's to the call before goes."""
        stored = [self._store.get(key) for key in keys]
        # Every rank has come to this call, so none still reads the answers to the one before.
        if self._calls > 1:
            # They are known, whatever has become of the store.
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"{self._prefix}/{self._calls - 1}/{self.rank}")
        return stored


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group meant by `group`: itself, that of a one-dimensional mesh, the default group, or None.

    Raises `ValueError` for a mesh with several dimensions and where this process is not a member.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a DeviceMesh of one dimension, got {group.ndim}; pass mesh['name']")
        group = group.get_group()
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this process is not a member of it")
        raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: this process is not a member of it")
    return group


def _check_started_alone() -> None:
    """Raise `ValueError` where `init_from_env` would find several ranks: without it each would be one of its own."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and num_ranks != "1":
        raise ValueError(
            f"group: a launcher started {num_ranks} ranks (WORLD_SIZE), but torch.distributed is not initialised; call "
            "moe_runtime.init_from_env() first, or ask for transport='private' to have a single rank in each process"
        )


def shared_memory_directory() -> str:
    """Where files of shared memory go: `/dev/shm`, or the temporary directory where there is none."""
    path = "/dev/shm"
    return path if os.path.isdir(path) and os.access(path, os.W_OK) else tempfile.gettempdir()


def host_identity() -> str:
    """Equal on two processes only if they can map each other's shared memory: host, boot and mount of the memory.

    The environment variable `MOE_RUNTIME_HOST` is a part of it: set it differently where processes of one host cannot
    share memory although this does not show.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    named = os.environ.get("MOE_RUNTIME_HOST", "")
    return f"{socket.gethostname()}/{named}/{boot}/{os.stat(shared_memory_directory()).st_dev}"


def describe_ranks(values: list[Any]) -> str:
    """`rank 0: a, rank 1: b` for an error message about values that should be equal."""
    return ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))


def init_from_env(device: str | None = None, *, timeout_s: float = 120.0) -> torch.device:
    """Initialise torch.distributed from the variables torchrun sets, and return this rank's device.

    Without them nothing is initialised (a single process). `device` is `cpu`, `cuda` or None (GPUs if there are
    any). On GPUs the backend is `cpu:gloo,cuda:nccl` and the device is `cuda:LOCAL_RANK`, made current, or the current
    one without such a variable. Its exchanges wait for `timeout_s`, on GPUs for twice as long.

    Raises `ValueError` if `device` is unknown, or the local rank has no GPU.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or None, got {device!r}")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    current = torch.cuda.current_device() if kind == "cuda" and torch.cuda.is_available() else 0
    local_rank = int(os.environ.get("LOCAL_RANK", current))
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise ValueError(f"device: local rank {local_rank} has no GPU, this host has {torch.cuda.device_count()}")
    place = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        limit = timedelta(seconds=timeout_s)
        if place.type == "cuda":
            # NCCL ends the process when its own limit is over, so those of a context come first.
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=2 * limit, device_id=place)
        else:
            dist.init_process_group("gloo", timeout=limit)
    return place
