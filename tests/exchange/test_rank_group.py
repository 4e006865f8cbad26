"""`RankGroup`: what is exchanged, who is missing, who has given up, and a store that is lost or silent."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_runtime.comm import group_members, messages, rank_group, store_calls
from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.comm.errors import MoERuntimeError, PeerAbortedError, PeerTimeoutError, Phase, StoreLostError
from moe_runtime.comm.group_members import resolve_group
from moe_runtime.comm.heaps.collective import CollectiveHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
from moe_runtime.comm.messages import integer, row
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.transport import choose_transport
from moe_runtime.context.expert_parallel import ExpertParallelContext
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once


def exchange(rank: int, world: int) -> None:
    first, second = RankGroup(timeout_s=20.0), RankGroup(timeout_s=20.0)
    for step in range(3):
        pairs = first.gather("a", [rank, step], row(integer(), integer()))
        assert pairs == [(peer, step) for peer in range(world)]
        assert second.gather("b", -rank, integer()) == [-peer for peer in range(world)]
    first.barrier()
    assert first.missing("all here", 20.0) == []
    choice = choose_transport(first, torch.device("cpu"))
    assert choice.name == "shared"
    assert choice.reasons == {
        "nvshmem": "needs GPUs, the device is cpu",
        "private": f"one rank only, the group has {world}",
        "hierarchical": "the ranks are on one host",
    }


def test_exchange(get_pool) -> None:
    get_pool(2).run(exchange)


def leave_beside_a_silent_rank(rank: int, world: int) -> tuple[int, str, float]:
    """Rank 2 never comes; rank 0 gives up, and rank 1 has waited before."""
    group, start = RankGroup(timeout_s=PATIENCE_S), time.monotonic()
    if rank == 0:
        time.sleep(0.5)
        group.leave("no checkpoint")
        group.leave("another reason")
    if rank != 1:
        return -1, "", 0.0
    with pytest.raises(PeerAbortedError) as caught:
        group.barrier("step")
    return caught.value.rank, str(caught.value), time.monotonic() - start


def test_who_waits_for_others_hears_of_a_rank_that_leaves(get_pool) -> None:
    _, (left, message, seconds), _ = get_pool(3).run(leave_beside_a_silent_rank)
    assert (left, message) == (0, "step: rank 0 gave up: no checkpoint")
    assert seconds < PATIENCE_S


def wait_for_nobody(rank: int, world: int) -> float:
    group = RankGroup(timeout_s=1.0)
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(PeerTimeoutError, match=r"step: rank 1, 2 of 3 did not come within 1 s") as caught:
            group.barrier("step")
        assert caught.value.rank == 1
        assert group.missing("event", 0.1) == [1, 2]
    return time.monotonic() - start


def test_absent_ranks_are_named_in_time() -> None:
    outcomes = run_once(wait_for_nobody, 3)
    assert outcomes[0].error is None, outcomes[0].trace
    # At most: what `run_once` waits, half of the limit that a group has if none is given.
    assert outcomes[0].result > 0.9


class LateStore:
    """A store in which nobody but this rank has answered while all are waited for; then rank 1 leaves `answer`."""

    def __init__(self, answer: bytes) -> None:
        self.kept: dict[str, bytes] = {}
        self.answer = answer

    def set(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        if len(keys) > 1:
            time.sleep(1.0)
            self.kept[keys[1]] = self.answer
            return False
        return keys[0] in self.kept


class LostStore:
    """A store that is gone once it has been looked into as often as it may be."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def set(self, key: str, value: bytes) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        if self.looks == 0:
            raise dist.DistNetworkError("Connection reset by peer")
        self.looks -= 1
        return keys[0].endswith("/0") and len(keys) == 1


def group_of_two(store: object) -> RankGroup:
    """Rank 0 of two that meet in `store`."""
    group = RankGroup(timeout_s=1.0)
    group.world_size, group._store = 2, store
    return group


class AbandonedStore(LostStore):
    """A lost store in which `note` says who has left."""

    def __init__(self, note: bytes) -> None:
        super().__init__(1000)
        self.note = note

    def check(self, keys: list[str]) -> bool:
        if keys[0].endswith("/left"):
            self.looks = 2
            return True
        return super().check(keys)

    def get(self, key: str) -> bytes:
        return self.note


def test_who_left_is_known_when_the_store_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    note = messages.answer("leave", [1, "disk full", 1])
    with pytest.raises(PeerAbortedError, match="step: rank 1 gave up: disk full") as caught:
        group_of_two(AbandonedStore(note)).barrier("step")
    assert caught.value.rank == 1
    note = messages.answer("leave", [1, "PeerTimeoutError: rank 2 did not come", 2])
    group = group_of_two(AbandonedStore(note))
    group.world_size = 3
    with pytest.raises(PeerTimeoutError, match="step: rank 1 gave up: PeerTimeoutError: rank 2 did not come") as named:
        group.barrier("step")
    assert named.value.rank == 2
    wrong = ([2, "x", 1], [1, "x", 2], [1, "x"], "x")
    for forged in (b"{}", *(messages.answer("leave", value) for value in wrong), b"\x80"):
        with pytest.raises(MoERuntimeError, match="a rank gave up with a note that this program does not write"):
            group_of_two(AbandonedStore(forged)).barrier("step")


def test_an_answer_that_comes_when_the_time_is_up_counts() -> None:
    assert group_of_two(LateStore(messages.answer("step", 7))).gather("step", 6, integer()) == [6, 7]
    with pytest.raises(PeerAbortedError, match="step: rank 1 gave up: disk full") as caught:
        group_of_two(LateStore(messages.farewell("disk full", 1))).barrier("step")
    assert caught.value.rank == 1
    # Who is there itself names the one that gave up; so does who hears of a rank that does not exist.
    for cause in (0, 2):
        with pytest.raises(PeerAbortedError, match="step: rank 1 gave up: it did not come") as caught:
            group_of_two(LateStore(messages.farewell("it did not come", cause))).barrier("step")
        assert caught.value.rank == 1


@pytest.mark.parametrize("transport", ["SharedHeap", "CollectiveHeap"])
def test_a_store_whose_host_is_gone_is_named(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    group = group_of_two(client)
    del host
    gone = "rank 0 cannot reach the group's store, the process that hosts it is gone: "
    with pytest.raises(StoreLostError, match="step: " + gone):
        group.barrier("step")
    assert group.missing("event", 0.1) == []
    group.leave("nobody listens")
    group.group = SimpleNamespace()  # type: ignore[assignment]
    heap = SharedHeap(group) if transport == "SharedHeap" else CollectiveHeap(group)
    heap.allocated = True
    with pytest.raises(StoreLostError, match=f"{transport}.close: " + gone):
        heap.close()
    monkeypatch.setattr(group_members, "resolve_group", lambda group: SimpleNamespace(group_name="x"))
    for name, value in {"get_rank": 0, "get_world_size": 2, "get_process_group_ranks": [0, 1]}.items():
        monkeypatch.setattr(dist, name, lambda group, value=value: value)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: client)
    with pytest.raises(StoreLostError, match="group: " + gone):
        RankGroup()


@pytest.mark.parametrize("prefixes", [0, 2])
@pytest.mark.parametrize(
    ("ranks", "others", "host", "name"),
    [
        ([0, 1], {}, 0, "rank 0, which hosts it,"),
        ([2, 0], {"TORCHELASTIC_USE_AGENT_STORE": "False"}, 1, "rank 1, which hosts it,"),
        ([1, 2], {}, -1, "rank 0 of the default group, which hosts it,"),
        ([0, 1], {"TORCHELASTIC_USE_AGENT_STORE": "True"}, -1, "torchrun's agent, which hosts it,"),
        ([0, 1], {"MASTER_PORT": "1"}, -1, "the process that hosts it"),
        ([0, 1], {"MASTER_ADDR": "127.0.0.2"}, -1, "the process that hosts it"),
    ],
)
def test_the_rank_that_hosts_a_lost_store_is_named(
    ranks: list[int], others: dict[str, str], host: int, name: str, prefixes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store: dist.Store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for key, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)} | others).items():
        monkeypatch.setenv(key, value)
    for _ in range(prefixes):
        store = dist.PrefixStore("prefix", store)
    monkeypatch.setattr(group_members, "resolve_group", lambda group: SimpleNamespace(group_name="x"))
    for function, found in {"get_rank": 0, "get_world_size": 2, "get_process_group_ranks": ranks}.items():
        monkeypatch.setattr(dist, function, lambda group, found=found: found)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    group = RankGroup()
    del server
    with pytest.raises(StoreLostError) as caught:
        group.barrier("step")
    assert str(caught.value).startswith(f"step: rank 0 cannot reach the group's store, {name} is gone: ")
    assert (caught.value.rank, caught.value.phase) == (host, Phase.START_UP)


def lose_rank_0(rank: int, world: int) -> tuple[int, str]:
    """Rank 0 hosts the store as torch makes it, and ends as if killed while the others start up."""
    port = [0]
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        port = [server.port]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    init_from_env("cpu", timeout_s=PATIENCE_S)
    dist.barrier()
    if rank == 0:
        os._exit(1)
    with pytest.raises(StoreLostError) as caught:
        ExpertParallelContext(device="cpu", startup_timeout_s=PATIENCE_S)
    return caught.value.rank, str(caught.value)


def test_a_death_of_rank_0_during_start_up_is_told_with_its_rank() -> None:
    _, *others = run_once(lose_rank_0, 3)
    for rank, outcome in enumerate(others, 1):
        lost, message = outcome.returned()
        assert lost == 0
        assert f"rank {rank} cannot reach the group's store, rank 0, which hosts it, is gone: " in message


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 1e10, True, "20", None, 10**400])
def test_limits_are_positive_numbers_of_seconds(timeout_s: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    expected = "^timeout_s: expected (seconds as a number|a positive, finite number of seconds, at most 1e\\+09), got "
    with pytest.raises(ValueError, match=expected):
        init_from_env("cpu", timeout_s=timeout_s)
    with pytest.raises(ValueError, match=expected):
        RankGroup(timeout_s=timeout_s)
    if timeout_s is not None:
        with pytest.raises(ValueError, match=expected):
            RankGroup().gather("step", None, messages.nothing, timeout_s=timeout_s)


def test_a_store_that_goes_while_ranks_part_is_no_error() -> None:
    assert not group_of_two(LostStore(2)).part("end")
    group = group_of_two(LostStore(2))
    group.group = SimpleNamespace()  # type: ignore[assignment]
    for heap in (SharedHeap(group), CollectiveHeap(group)):
        heap.allocated = True
        heap.close()
    with pytest.raises(StoreLostError, match="step: rank 0 cannot reach the group's store"):
        group_of_two(LostStore(2)).barrier("step")


def test_a_host_of_the_store_that_has_not_come_is_missed_while_ranks_part() -> None:
    for looks in (1, 2, 3):
        group = group_of_two(LostStore(looks))
        group._host = group_members._StoreHost(1, "rank 1, which hosts it,")
        with pytest.raises(StoreLostError, match="end: rank 0 cannot reach the group's store, rank 1, which") as caught:
            group.part("end")
        assert caught.value.rank == 1


def test_who_waits_in_vain_while_ranks_part_says_so() -> None:
    store = dist.HashStore()
    with pytest.raises(PeerTimeoutError, match=r"end: rank 1 of 2 did not come"):
        group_of_two(store).part("end")
    other = group_of_two(store)
    other.rank = 1
    with pytest.raises(PeerAbortedError, match=r"end: rank 0 gave up: PeerTimeoutError: end: rank 1 of 2 did not come"):
        other.gather("end", None, messages.nothing)
        other.part("end")


class SilentStore(dist.HashStore):
    """A store that answers nobody who looks into it."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(1.0)
        return True


def test_a_silent_store_is_an_error_while_ranks_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "ANSWER_S", 0.1)
    with pytest.raises(StoreLostError, match="end: rank 0 gets no answer from the group's store"):
        group_of_two(SilentStore()).part("end")


def test_who_was_absent_is_known_when_the_store_goes() -> None:
    assert group_of_two(LostStore(2)).missing("event", 60.0) == [1]
    for looks, host, missing in ((0, 1, [1]), (0, 0, [0]), (0, -1, []), (2, 0, [1])):
        group = group_of_two(LostStore(looks))
        group._host = group_members._StoreHost(host)
        assert group.missing("event", 60.0) == missing


class SlowStore(dist.TCPStore):
    """A store from which it takes long to read."""

    def get(self, key: str) -> bytes:
        time.sleep(1.0)
        return super().get(key)


def part_from_the_host(rank: int, world: int) -> bool:
    """Rank 0 hosts the store and ends at once, while the others still read what all have answered."""
    rank_group.PARTING_S = PATIENCE_S  # on a busy machine reads take longer than they sleep
    group = RankGroup(timeout_s=PATIENCE_S)
    port = [0]
    if rank == 0:
        group._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [group._store.port]
    dist.broadcast_object_list(port, 0)
    if rank > 0:
        group._store = SlowStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
    dist.barrier()
    complete = group.part("end")
    if rank == 0:
        os._exit(0)
    return complete


def test_the_host_of_the_store_parts_last() -> None:
    _, *others = run_once(part_from_the_host, 3)
    assert [other.result for other in others] == [True, True], others


def gather_in_two_threads(rank: int, world: int) -> list[list[int]]:
    groups = [RankGroup(timeout_s=WITHOUT_ONE_S) for _ in range(2)]
    told: list[list[int]] = [[], []]

    def gather(number: int) -> None:
        told[number] = groups[number].gather("step", 10 * number + rank, integer())

    threads = [threading.Thread(target=gather, args=(number,)) for number in (rank, 1 - rank)]
    threads[0].start()
    time.sleep(0.5)
    threads[1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return told


def test_a_thread_that_waits_leaves_the_store_to_others(get_pool) -> None:
    assert get_pool(2).run(gather_in_two_threads) == [[[0, 1], [10, 11]]] * 2


def connect_alone(rank: int, world: int) -> float:
    group = RankGroup(timeout_s=1.0)
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(
            PeerTimeoutError, match="step: rank 0 cannot connect to its peers, rank 1 did not"
        ) as caught:
            group.connect("step", "key")
        assert caught.value.rank == 1
    return time.monotonic() - start


def test_connections_to_nobody_end_in_time() -> None:
    outcomes = run_once(connect_alone, 2)
    assert outcomes[0].error is None, outcomes[0].trace
    assert outcomes[0].result < 20


def stop_the_host(rank: int, world: int) -> list[str]:
    """Rank 1 hosts a store and is stopped; what rank 0 raises meanwhile, which bounds each wait at half a second."""
    group = RankGroup()
    if rank == 1:
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.broadcast_object_list([host.port, os.getpid()], 1)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        return []
    told: list[int] = [0, 0]
    dist.broadcast_object_list(told, 1)
    port, pid = told
    group._store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.barrier()
    stopped_by = time.monotonic() + 20
    while state_of(pid) != "T":
        assert time.monotonic() < stopped_by
        time.sleep(0.01)
    problems = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_calls, "ANSWER_S", 0.25)
            threads = threading.active_count()
            for attempt in range(20):
                start = time.monotonic()
                with pytest.raises(StoreLostError) as caught:
                    group.gather("step", None, messages.nothing, timeout_s=0.25)
                problems.append(str(caught.value))
                assert caught.value.rank == -1
                # The first is waited for; while it has no answer, later ones are refused.
                assert attempt or time.monotonic() - start > 0.2
                group.leave("nobody listens")
                assert group.missing("event", 60.0) == []
            assert threading.active_count() <= threads + 1
    finally:
        os.kill(pid, signal.SIGCONT)
    dist.barrier()
    return problems


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_store_whose_host_is_stopped_is_not_waited_for(get_pool) -> None:
    start = time.monotonic()
    problems, _ = get_pool(2).run(stop_the_host)
    silent = "step: rank 0 gets no answer from the group's store, the process that hosts it may be stopped"
    assert problems == [silent] * 20
    assert time.monotonic() - start < 60.0


def test_the_thread_of_a_store_ends_with_it() -> None:
    store = dist.HashStore()
    group = group_of_two(store)
    assert group.missing("event", 0.0) == [1]
    thread = store_calls.calls_of(store).thread
    with pytest.raises(PeerTimeoutError):
        group.gather("step", None, messages.nothing, timeout_s=0.01)
    assert store_calls.calls_of(store).thread is thread and thread.is_alive()
    kept = weakref.ref(store)
    del store, group
    gc.collect()
    assert kept() is None
    thread.join(20)
    assert not thread.is_alive()


class HeldStore(dist.Store):
    """One behind a slow network: `check` says on `asked` that it has begun, and answers when it is `let` to."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.asked, self.let = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        assert self.let.wait(20)
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)


def test_a_rank_that_is_interrupted_in_a_call_of_the_store_is_heard() -> None:
    store = dist.HashStore()
    held = HeldStore(store)
    group = RankGroup._at_start(held, 1, 2, 20.0)
    main = threading.get_ident()

    def interrupt() -> None:
        assert held.asked.wait(20)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    # A shell's background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupting.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            group.barrier("step")
        interrupting.join()
    finally:
        signal.signal(signal.SIGINT, before)
    answering = threading.Timer(0.2, held.let.set)
    answering.start()
    group.leave("interrupted", caught.value)
    answering.join()
    left = RankGroup._at_start(store, 0, 2, 20.0).who_left("step")
    assert isinstance(left, PeerAbortedError) and str(left) == "step: rank 1 gave up: interrupted"


def test_threads_that_come_at_once_get_the_same_calls_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two would let a call through while one of the other has no answer."""

    class Slow(store_calls.StoreCalls):
        def __init__(self) -> None:
            time.sleep(0.05)
            super().__init__()

    monkeypatch.setattr(store_calls, "StoreCalls", Slow)
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: store_calls.calls_of(store), range(4)))) == 1


def in_subgroups(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = RankGroup(pairs[rank // 2], timeout_s=20.0)
    assert (group.rank, group.world_size) == (rank % 2, 2)
    for _ in range(1 + rank // 2):
        assert group.gather("pair", rank, integer()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    with pytest.raises(ValueError, match="group: this process is not a member"):
        RankGroup(pairs[1 - rank // 2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(ValueError, match="expected a DeviceMesh of one dimension, got 2"):
        resolve_group(mesh)
    assert RankGroup(mesh["ep"], timeout_s=20.0).gather("row", rank, integer()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert RankGroup(mesh["dp"], timeout_s=20.0).gather("column", rank, integer()) == [rank % 2, rank % 2 + 2]


def test_subgroups_and_meshes(get_pool) -> None:
    get_pool(4).run(in_subgroups)


def test_a_group_of_the_wrong_type() -> None:
    with pytest.raises(ValueError, match="group: expected a ProcessGroup, a DeviceMesh or None, got str"):
        RankGroup("world")  # type: ignore[arg-type]


def gather_often(rank: int, world: int) -> tuple[list[bool], list[int]]:
    group = RankGroup(timeout_s=20.0)
    sums = [sum(group.gather("number", rank + i, integer())) for i in range(20)]
    kept = [group._store.check([f"{group._prefix}/{call}/{rank}"]) for call in range(1, 21)]
    group.barrier()
    return kept, sums


def test_answers_that_all_have_read_do_not_stay_in_the_store(get_pool) -> None:
    """Else a model that is called a million times would fill it."""
    for kept, sums in get_pool(3).run(gather_often):
        assert kept == [False] * 19 + [True]
        assert sums == [3 + 3 * i for i in range(20)]
