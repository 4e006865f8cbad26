"""How ranks find each other on the host. Every exchange uses the key-value store of the group and has a time limit.

The store works with any backend of the group (gloo, NCCL), and shows exactly which ranks are missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
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

from moe_runtime.comm import messages
from moe_runtime.comm.arguments import check_seconds
from moe_runtime.comm.errors import MoERuntimeError, PeerAbortedError, PeerTimeoutError, Phase, StoreLostError
from moe_runtime.comm.messages import MAX_BYTES, Reader
from moe_runtime.comm.store_calls import StoreSilentError, calls_of

MAX_SECONDS = 1e9
"""Longest limit of a wait: 30 years, which all clocks can count."""

ROLL_CALL_S = 3.0
"""How long ranks have to report themselves, once one of them has waited too long."""

PARTING_S = 5.0
"""How long rank 0, whose process may host the store, waits for peers that still read from it at the end."""

_POLL_S = (0.001, 0.02)
"""First and longest pause between two polls for the answers of peers."""

T = TypeVar("T")


@dataclass(frozen=True)
class _StoreHost:
    """Whose process hosts a group's store: its rank in the group, -1 if none is known; and its name for messages."""

    rank: int = -1
    name: str = "the process that hosts it"


class RankGroup:
    """The ranks that share one context, and small exchanges between their hosts.

    The constructor is not collective, but all ranks must create their groups in the same order. `gather` and `barrier`
    are collective. A rank that gives up at start-up calls `leave`. After a `PeerTimeoutError` ranks may have made
    different numbers of calls, and the group is unusable.

    Attributes:
        rank, world_size: this process in the group (not in the world).
        group: the torch.distributed group; None for a single process without torch.distributed.
        timeout_s: limit of every wait, in seconds.

    Raises `ValueError` for a wrong argument, and unless `alone` where a launcher has started several ranks and
    torch.distributed is not initialised.
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh | None = None, *, timeout_s: float = 120.0, alone: bool = False
    ) -> None:
        self.timeout_s = check_seconds("timeout_s", timeout_s, MAX_SECONDS)
        self.group = resolve_group(group)
        if self.group is None and not alone:
            _check_started_alone()
        self.rank = 0
        self.world_size = 1
        self._prefix = ""
        self._calls = 0
        self._store: Any = None
        self._host = _StoreHost()
        if self.group is not None:
            self.rank = dist.get_rank(self.group)
            self.world_size = dist.get_world_size(self.group)
            ranks = dist.get_process_group_ranks(self.group)
            identity = f"{self.group.group_name}/{ranks}"
            prefix = f"moe_runtime/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
            self._store = dist.distributed_c10d._get_default_store()
            self._host = _host_of(self._store, ranks)
            # Counted in the store, since other code of this process may have created groups of the same ranks before.
            made = self._ask("group", lambda: self._store.add(f"{prefix}/made/{self.rank}", 1))
            self._prefix = f"{prefix}/{made}"

    def gather(
        self,
        what: str,
        value: object,
        read: Reader[T],
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> list[T]:
        """Every rank's `value`, by rank, as `read` returns it.

        Args:
            value: what JSON carries so that it comes back the same (`messages.encode`), of at most `max_bytes`.
            read: checks and converts what came, also from this rank. It raises `ValueError` for what no rank sends.
            timeout_s: limit of the wait, in seconds; default the group's.

        Raises:
            ValueError: a wrong argument; on every rank where ranks are not at the same step.
            PeerTimeoutError: naming `what` and all ranks that did not come in time; its `rank` is the first of them.
            PeerAbortedError: naming a rank that gave up.
            StoreLostError: the store is gone or does not answer.
            MoERuntimeError: naming the rank whose answer is none that `read` takes.
        """
        limit = self.timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s, MAX_SECONDS)
        mine = messages.answer(what, value, max_bytes)
        if self._store is None:
            return [read(value)]
        return self._collect(what, self._answer(what, mine), read, limit, max_bytes)

    def barrier(self, what: str = "barrier") -> None:
        """Wait for every rank; raises as `gather` does."""
        self.gather(what, None, messages.nothing)

    def part(self, what: str) -> bool:
        """The last `barrier`, after which processes may end. Returns whether all ranks are known to have come.

        Rank 0, whose process may host the store, stays until all of them know it. Raises as `gather` does, unless the
        store goes after this rank has come: its host has then left, and nothing remains to agree on.
        """
        if self._store is None:
            return True
        mine = messages.answer(what, None)
        keys = self._answer(what, mine)
        try:
            self._collect(what, keys, messages.nothing, self.timeout_s)
        except StoreLostError as error:
            if isinstance(error.__cause__, StoreSilentError):
                raise
            return False
        with contextlib.suppress(MoERuntimeError):
            keys = self._answer(what, mine)
            if self.rank == 0:
                self._wait(what, keys, PARTING_S)
        return True

    def leave(self, reason: str) -> None:
        """Make the peers' next `gather` raise `PeerAbortedError` with `reason`. Does not wait."""
        if self._store is not None:
            # If the store is gone, no peer can read it.
            with contextlib.suppress(MoERuntimeError):
                self._answer("leave", messages.farewell(reason))

    def missing(self, event: str, wait_s: float) -> list[int]:
        """Ranks that have not called this for `event` within `wait_s`, or before the store failed.

        Empty if the store never answers. Never raises.
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
        """A gloo group over the same ranks for the caller alone. Collective; `key` must be new and equal on all ranks.

        Raises `PeerTimeoutError` if that takes longer than the group's timeout, or a connection fails.
        """
        limit = timedelta(seconds=self.timeout_s)
        # It waits in the store, so it needs its own connection and thread.
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
        """Return `work()`, which calls the store and does not wait there.

        Errors of the store become a `StoreLostError` that says whether it is gone or does not answer.
        """
        try:
            return calls_of(self._store).run(work)
        except StoreSilentError as error:
            trouble = f"gets no answer from the group's store, {self._host.name} may be stopped"
            raise StoreLostError(f"{what}: rank {self.rank} {trouble}", self._host.rank, Phase.START_UP) from error
        except RuntimeError as error:
            trouble = f"cannot reach the group's store, {self._host.name} is gone: {error}"
            raise StoreLostError(f"{what}: rank {self.rank} {trouble}", self._host.rank, Phase.START_UP) from error

    def _answer(self, what: str, mine: bytes) -> list[str]:
        """Store this rank's answer to the next call. Returns the keys of all ranks' answers."""
        self._calls += 1
        keys = [f"{self._prefix}/{self._calls}/{rank}" for rank in range(self.world_size)]
        self._ask(what, lambda: self._store.set(keys[self.rank], mine))
        return keys

    def _collect(
        self, what: str, keys: list[str], read: Reader[T], limit: float, max_bytes: int = MAX_BYTES
    ) -> list[T]:
        """Wait for the answers of all ranks under `keys`, and return their values as `read` does."""
        if missing := self._wait(what, keys, limit):
            names = ", ".join(map(str, missing))
            message = f"{what}: rank {names} of {self.world_size} did not come within {limit:g} s"
            raise PeerTimeoutError(message, missing[0], Phase.START_UP)
        stored = self._ask(what, lambda: self._read(keys))
        answers = read_answers(what, stored, lambda raw: messages.read_answer(raw, max_bytes))
        for rank, answer in enumerate(answers):
            if answer.left is not None:
                raise PeerAbortedError(f"{what}: rank {rank} gave up: {answer.left}", rank, Phase.START_UP)
        if len({answer.what for answer in answers}) > 1:
            steps = describe_ranks([answer.what for answer in answers])
            raise ValueError(f"group: its ranks are not at the same step, {steps}")
        return read_answers(what, [answer.value for answer in answers], read)

    def _wait(self, what: str, keys: list[str], limit: float) -> list[int]:
        """Ranks whose answers are not there within `limit` seconds.

        It polls, since a store that waits serves no other thread of this process meanwhile.
        """
        deadline = time.monotonic() + limit
        pause, longest = _POLL_S
        while not self._ask(what, lambda: self._store.check(keys)):
            if time.monotonic() > deadline:
                # One may have answered since the last poll.
                return self._not_there(what, keys)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return []

    def _not_there(self, what: str, keys: list[str]) -> list[int]:
        """Ranks whose keys are not in the store."""
        return self._ask(what, lambda: [rank for rank, key in enumerate(keys) if not self._store.check([key])])

    def _read(self, keys: list[str]) -> list[bytes]:
        """The answers of all ranks, which are there. Deletes this rank's answer to the previous call."""
        stored = [self._store.get(key) for key in keys]
        # Every rank has come to this call, so none still reads the answers to the previous one.
        if self._calls > 1:
            # The answers are read, whatever happens to the store.
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"{self._prefix}/{self._calls - 1}/{self.rank}")
        return stored


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group meant by `group`: itself, that of a one-dimensional mesh, the default group, or None.

    Raises `ValueError` for a mesh with several dimensions, and if this process is not a member.
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
    """Raise `ValueError` if a launcher started several ranks, each of which would otherwise run on its own."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and num_ranks != "1":
        raise ValueError(
            f"group: a launcher started {num_ranks} ranks (WORLD_SIZE), but torch.distributed is not initialised; call "
            "moe_runtime.init_from_env() first, or ask for transport='private' to have a single rank in each process"
        )


def shared_memory_directory() -> str:
    """The directory for files of shared memory: `/dev/shm`, or else the temporary directory."""
    path = "/dev/shm"
    return path if os.path.isdir(path) and os.access(path, os.W_OK) else tempfile.gettempdir()


def host_identity() -> str:
    """Host, boot and mount of the shared memory: equal only for processes that can map each other's files there.

    Files are what ranks fall back to where memory without a name cannot be shared. It includes the environment variable
    `MOE_RUNTIME_HOST`. Set different values for processes of one host that cannot share memory although the rest is
    equal.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    named = os.environ.get("MOE_RUNTIME_HOST", "")
    return f"{socket.gethostname()}/{named}/{boot}/{os.stat(shared_memory_directory()).st_dev}"


def read_answers(what: str, answers: list[Any], read: Reader[T]) -> list[T]:
    """What `read` returns for the answer of each rank. Raises `MoERuntimeError` naming the rank whose it refuses."""
    values = []
    for rank, answer in enumerate(answers):
        try:
            values.append(read(answer))
        except ValueError as error:
            message = f"{what}: the answer of rank {rank} is none that this program gives: {error}"
            raise MoERuntimeError(message, rank, Phase.START_UP) from None
    return values


def _host_of(store: Any, ranks: list[int]) -> _StoreHost:
    """Whose process hosts the default store, for a group of these ranks of the default group."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return _StoreHost()
    # torch does not say who hosts a store. It makes the one of these variables itself.
    if (store.host, str(store.port)) != (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")):
        return _StoreHost()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _StoreHost(name="torchrun's agent, which hosts it,")
    if 0 in ranks:
        return _StoreHost(ranks.index(0), f"rank {ranks.index(0)}, which hosts it,")
    return _StoreHost(name="rank 0 of the default group, which hosts it,")


def describe_ranks(values: list[Any]) -> str:
    """`rank 0: a, rank 1: b` for an error message about values that should be equal."""
    return ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))


def init_from_env(device: str | None = None, *, timeout_s: float = 120.0) -> torch.device:
    """Initialise torch.distributed from the variables that torchrun sets, and return this rank's device.

    Without them nothing is initialised (a single process). `device` is `cpu`, `cuda` or None (GPUs if there are
    any). On GPUs the backend is `cpu:gloo,cuda:nccl`, and `cuda:LOCAL_RANK` becomes the current device; without that
    variable the current device stays. Collectives time out after `timeout_s`, on GPUs after twice that.

    Raises `ValueError` if `device` is unknown, the local rank has no GPU, or `timeout_s` is no number of seconds.
    """
    limit = timedelta(seconds=check_seconds("timeout_s", timeout_s, MAX_SECONDS))
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
        if place.type == "cuda":
            # NCCL ends the process at its own limit, so the limits of a context must come first.
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=2 * limit, device_id=place)
        else:
            dist.init_process_group("gloo", timeout=limit)
    return place
