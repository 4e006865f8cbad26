"""Heaps: regions of every rank are reachable by address from every other, and no file is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from moe_runtime.comm.errors import PeerAbortedError, PeerTimeoutError
from moe_runtime.comm.heaps import shared_heap, shared_memory
from moe_runtime.comm.heaps.heap import REGION_ALIGNMENT, SymmetricHeap
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
from moe_runtime.comm.heaps.shared_memory import NamedMemory, NamelessMemory, Room, room_for_heaps
from moe_runtime.comm.rank_group import RankGroup
from tests.support.pool import WITHOUT_ONE_S, run_once

REGIONS = {"small": 12, "large": 100_000, "last": 257}


def reserve(heap: SymmetricHeap) -> None:
    for region, num_bytes in REGIONS.items():
        heap.reserve(region, num_bytes)


def pattern(region: str, source: int, target: int, seed: int) -> torch.Tensor:
    """What `source` writes into its slice of `target`'s region."""
    generator = torch.Generator().manual_seed(seed * 1000 + source * 100 + target * 10 + len(region))
    return torch.randint(0, 256, (REGIONS[region],), generator=generator, dtype=torch.uint8)


def test_files_of_shared_memory_are_for_their_user_alone(tmp_path: Path) -> None:
    memory, link = NamedMemory(str(tmp_path)), tmp_path / "link"
    before = os.umask(0)
    try:
        (path,) = memory.create(4096)
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == 0o600
    link.symlink_to(path)
    with pytest.raises(OSError) as caught:
        memory.open(str(link), 4096)
    assert caught.value.errno == errno.ELOOP
    os.close(memory.open(path, 4096))
    memory.clean([])
    assert list(tmp_path.iterdir()) == [link]


def test_a_folder_is_asked_for_its_room_and_holds_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(f_frsize=512, f_blocks=100, f_bavail=7, f_bfree=9, f_bsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: told)
    memory = NamedMemory(str(tmp_path))
    assert memory.room() == Room(str(tmp_path), 51200, 3584)
    with pytest.raises(OSError) as caught:
        memory.create(3585)
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
    (path,) = memory.create(3584)
    assert os.stat(path).st_size == 3584
    memory.clean([])


def test_only_files_of_heaps_are_opened_or_unlinked(tmp_path: Path) -> None:
    memory = NamedMemory(str(tmp_path))
    (path,) = memory.create(4096)
    assert memory.read_place([path]) == path
    for wrong in ("moe_runtime-" + "0" * 32, f"{path}0", f"{tmp_path}/other", f"{path}\0", path.replace("-", "_")):
        with pytest.raises(ValueError, match="expected the path of a heap's file, got another text"):
            memory.read_place([wrong])
    before = open_descriptors()
    with pytest.raises(OSError, match="expected 8192 bytes, got 4096"):
        memory.open(path, 8192)
    assert open_descriptors() == before
    memory.clean([])
    memory.clean([path])


@pytest.mark.parametrize("kind", [NamedMemory, NamelessMemory])
def test_memory_that_cannot_be_reserved_is_given_up(
    kind: type[NamedMemory | NamelessMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    memory = NamedMemory(str(tmp_path)) if kind is NamedMemory else NamelessMemory()
    monkeypatch.setattr(shared_memory, "reserve_file", refuse)
    before = open_descriptors()
    with pytest.raises(OSError, match="full"):
        memory.create(4096)
    assert open_descriptors() == before and not list(tmp_path.iterdir())


def test_memory_without_a_name_is_taken_where_the_system_has_it() -> None:
    """Else tests of it are skipped, and ranks map files, wherever it is broken."""
    try:
        descriptor = os.memfd_create("moe_runtime-test", os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        pytest.skip(f"memory without a name: {error}")
    with contextlib.closing(os.fdopen(descriptor, "rb")):
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
        except OSError as error:
            pytest.skip(f"memory without a name: {error}")
    before = open_descriptors()
    assert NamelessMemory.problem() is None and open_descriptors() == before
    room = NamelessMemory().room()
    assert room.folder is None and 0 < room.available_bytes <= room.total_bytes


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nameless() -> Iterator[NamelessMemory]:
    if problem := NamelessMemory.problem():
        pytest.skip(f"memory without a name: {problem}")
    memory = NamelessMemory()
    yield memory
    memory.clean([])


def test_memory_without_a_name_is_for_its_user_alone_and_keeps_its_size(nameless: NamelessMemory) -> None:
    place = nameless.read_place(nameless.create(4096))
    descriptor = nameless.open(place, 4096)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600 and not os.get_inheritable(descriptor)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_only_memory_of_a_heap_is_opened(nameless: NamelessMemory, tmp_path: Path) -> None:
    """A place may be out of date, or false: another file may be there meanwhile."""
    place = nameless.read_place(nameless.create(4096))

    def refusal(place: tuple[int, int, int, int], num_bytes: int = 4096) -> int | None:
        with pytest.raises(OSError) as caught:
            os.close(nameless.open(place, num_bytes))
        return caught.value.errno

    before = open_descriptors()
    assert refusal(place, 8192) == errno.EINVAL
    assert refusal((*place[:3], place[3] + 1)) == refusal((*place[:2], place[2] + 1, place[3])) == errno.ESTALE
    assert refusal((place[0], 10**6, *place[2:])) == refusal((2**40, *place[1:])) == errno.ENOENT
    (tmp_path / "file").write_bytes(bytes(4096))
    os.mkfifo(tmp_path / "pipe")
    others = [os.open(tmp_path / name, os.O_RDWR) for name in ("file", "pipe")]
    others.append(os.memfd_create("another program's", os.MFD_ALLOW_SEALING))
    unsealed = os.memfd_create("moe_runtime-heap", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    for descriptor in others:
        status = os.fstat(descriptor)
        assert refusal((os.getpid(), descriptor, status.st_dev, status.st_ino)) == errno.ESTALE
    status = os.fstat(unsealed)
    assert refusal((os.getpid(), unsealed, status.st_dev, status.st_ino)) == errno.EINVAL
    for descriptor in (*others, unsealed):
        os.close(descriptor)
    assert open_descriptors() == before


def heap_descriptors() -> list[str]:
    """What this process has open of heaps, or of files in their folder."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if "moe_runtime-" in path and "-pool-" not in path]


# --- PrivateHeap


@pytest.mark.parametrize("world", [1, 3])
def test_private_peers_are_each_others_memory(world: int, device: torch.device, seed: int) -> None:
    heaps = PrivateHeap.group(world, device)
    for heap in heaps:
        reserve(heap)
    for heap in heaps:
        heap.allocate()
    for heap in heaps:
        for region, num_bytes in REGIONS.items():
            assert heap.tensor(region).shape == (num_bytes,)
            assert not heap.tensor(region).any()
    for heap in heaps:
        for peer in range(world):
            part = slice(heap.rank, None, world)
            heap.peer_tensor("large", peer)[part] = pattern("large", heap.rank, peer, seed)[part].to(device)
    for heap in heaps:
        for source in range(world):
            part = slice(source, None, world)
            expected = pattern("large", source, heap.rank, seed)[part]
            assert torch.equal(heap.tensor("large")[part].cpu(), expected)
        for region in REGIONS:
            pointers = heap.peer_pointers(region)
            assert pointers.dtype == torch.int64 and pointers.device.type == device.type
            assert pointers.tolist() == [peer.tensor(region).data_ptr() for peer in heaps]
            assert all(pointer % REGION_ALIGNMENT == 0 for pointer in pointers.tolist())
        heap.barrier()
    for heap in heaps:
        heap.close()


def test_private_members_must_reserve_the_same() -> None:
    first, second = PrivateHeap.group(2)
    first.reserve("a", 10)
    second.reserve("a", 11)
    first.allocate()
    with pytest.raises(ValueError, match="rank 1 reserved"):
        second.allocate()


def test_a_private_member_that_is_closed_gets_no_memory_again() -> None:
    first, second = PrivateHeap.group(2)
    for heap in (first, second):
        heap.reserve("a", 10)
    first.allocate()
    first.close()
    second.allocate()
    assert first._base is None
    with pytest.raises(ValueError, match="heap: that of rank 0 is closed"):
        second.peer_tensor("a", 0)
    second.close()
    third, fourth = PrivateHeap.group(2)
    third.close()
    fourth.reserve("a", 10)
    fourth.allocate()
    assert third._base is None
    fourth.close()


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match=r"world_size: expected a positive integer to \d+, got 0"):
        PrivateHeap.group(0)
    heap = PrivateHeap()
    with pytest.raises(ValueError, match=r"num_bytes: expected a positive integer to \d+, got 0"):
        heap.reserve("a", 0)
    with pytest.raises(ValueError, match=r"ones: expected an integer from 0 to 10, got 11"):
        heap.reserve("a", 10, ones=11)
    with pytest.raises(ValueError, match="region: expected a str, got list"):
        heap.reserve(["a"], 10)  # type: ignore[arg-type]
    heap.reserve("a", 10)
    with pytest.raises(ValueError, match="'a' is already reserved"):
        heap.reserve("a", 10)
    with pytest.raises(ValueError, match="not allocated yet"):
        heap.tensor("a")
    with pytest.raises(ValueError, match="not allocated yet"):
        heap.peer_pointers("a")
    heap.allocate()
    for again in (heap.allocate, lambda: heap.reserve("b", 10)):
        with pytest.raises(ValueError, match="already allocated"):
            again()
    with pytest.raises(ValueError, match="expected one of \\['a'\\], got 'b'"):
        heap.tensor("b")
    for rank in (1, -1):
        with pytest.raises(ValueError, match=f"rank: expected an integer from 0 to 0, got {rank}"):
            heap.peer_tensor("a", rank)
    heap.close()
    heap.close()
    with pytest.raises(ValueError, match="closed"):
        heap.tensor("a")


# --- SharedHeap


def exchange_by_address(rank: int, world: int, folder: str | None, seed: int) -> None:
    with SharedHeap(RankGroup(timeout_s=20.0), directory=folder) as heap:
        reserve(heap)
        heap.allocate()
        heap.barrier()
        assert len(heap_descriptors()) == world, "one for each mapping"
        assert folder is None or os.listdir(folder) == [], "the files are unlinked once they are mapped"
        assert (heap.rank, heap.world_size) == (rank, world)
        for region in REGIONS:
            assert not heap.tensor(region).any()
        heap.barrier()
        for region, num_bytes in REGIONS.items():
            for peer, address in enumerate(heap.peer_pointers(region).tolist()):
                assert address % REGION_ALIGNMENT == 0
                memory = (ctypes.c_uint8 * num_bytes).from_address(address)
                data = pattern(region, rank, peer, seed).tolist()
                memory[rank::world] = data[rank::world]
        heap.barrier()
        for region in REGIONS:
            for source in range(world):
                part = slice(source, None, world)
                assert torch.equal(heap.tensor(region)[part], pattern(region, source, rank, seed)[part])
        for peer in range(world):
            for source in range(world):
                part = slice(source, None, world)
                assert torch.equal(heap.peer_tensor("last", peer)[part], pattern("last", source, peer, seed)[part])
    assert heap_descriptors() == []


@pytest.mark.parametrize("kind", ["nameless", "files"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shared_exchange_by_address(world: int, kind: str, get_pool, tmp_path: Path, seed: int) -> None:
    get_pool(world).run(exchange_by_address, str(tmp_path) if kind == "files" else None, seed)
    assert os.listdir(tmp_path) == []


def exchange_in_files(rank: int, world: int, cause: str, folder: str, seed: int) -> list[str]:
    """Memory without a name fails on rank 1; which kinds this rank has made."""
    made = []

    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def note(kind: str) -> Callable[[Any, int], list[Any]]:
        create = getattr(shared_memory, kind).create
        return lambda memory, num_bytes: (made.append(kind) if num_bytes > 1 else None, create(memory, num_bytes))[1]

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("NamelessMemory", "NamedMemory"):
            patch.setattr(getattr(shared_memory, kind), "create", note(kind))
        patch.setattr(shared_heap, "shared_memory_directory", lambda: folder)
        if rank == 1 and cause == "not made":
            patch.setattr(os, "memfd_create", forbidden)
        if rank == 1 and cause == "no call":
            patch.delattr(os, "memfd_create")
        if rank == 1 and cause == "not opened":
            opened = NamelessMemory.open
            patch.setattr(NamelessMemory, "open", lambda *a: (opened if a[2] == 1 else forbidden)(*a))
        exchange_by_address(rank, world, folder if rank == 1 and cause == "folder" else None, seed)
    assert os.listdir(folder) == []
    return made


@pytest.mark.parametrize("cause", ["not made", "no call", "not opened", "folder"])
def test_where_memory_must_have_a_name_on_one_rank_it_has_on_all(
    cause: str, get_pool, tmp_path: Path, seed: int
) -> None:
    tried = ["NamelessMemory"] if cause == "not opened" else []
    assert get_pool(2).run(exchange_in_files, cause, str(tmp_path), seed) == [[*tried, "NamedMemory"]] * 2


@triton.jit
def _ring_kernel(pointers, values, flag_words, rank, N: tl.constexpr, WORLD: tl.constexpr):
    """Store `values` into the next rank's memory, then raise the flag behind them."""
    target = tl.load(pointers + (rank + 1) % WORLD).to(tl.pointer_type(tl.int32))
    lanes = tl.arange(0, N)
    tl.store(target + lanes, tl.load(values + lanes))
    tl.atomic_xchg(target + N, rank + 1, sem="release", scope="sys")


def ring(rank: int, world: int, seed: int) -> None:
    size = 256
    with SharedHeap(RankGroup(timeout_s=20.0)) as heap:
        heap.reserve("data", 4 * (size + 1))
        heap.allocate()
        values = torch.randint(-(2**31), 2**31, (world, size), generator=torch.Generator().manual_seed(seed))
        values = values.to(torch.int32)
        _ring_kernel[(1,)](heap.peer_pointers("data"), values[rank], None, rank, N=size, WORLD=world)
        mine = heap.tensor("data").view(torch.int32)
        before = (rank - 1) % world
        deadline = time.monotonic() + 60
        while mine[size] != before + 1:
            assert time.monotonic() < deadline, "the flag of the rank before never came"
        assert torch.equal(mine[:size], values[before])


@pytest.mark.parametrize("world", [2, 4])
def test_interpreted_kernel_stores_into_a_peer(world: int, get_pool, seed: int) -> None:
    get_pool(world).run(ring, seed)


def allocate_too_much(rank: int, world: int, folder: str | None) -> None:
    heap = SharedHeap(RankGroup(timeout_s=20.0), directory=folder)
    room = room_for_heaps() if folder is None else NamedMemory(folder).room()
    # More than there is in all: what is free now may be less than what is free later. All ranks must have it.
    heap.reserve("all", room.total_bytes // (1 if folder else world) + (1 << 22))
    with heap:
        heap.allocate()


@pytest.mark.parametrize("kind", ["nameless", "files"])
def test_no_room_is_an_error_on_every_rank(kind: str, get_pool, tmp_path: Path) -> None:
    folder = str(tmp_path) if kind == "files" else None
    for outcome in get_pool(2).outcomes(allocate_too_much, folder):
        assert isinstance(outcome.error, OSError), outcome
        assert outcome.error.errno == errno.ENOSPC
        assert "shared memory of rank 0" in str(outcome.error)
        assert "bytes needed per rank" in str(outcome.error)
        assert f"available in {folder or room_for_heaps().folder or 'memory'}" in str(outcome.error)
    assert os.listdir(tmp_path) == []


def no_room_on_rank_1(rank: int, world: int, folder: str | None) -> None:
    original = shared_memory.reserve_file

    def full(descriptor: int, num_bytes: int) -> None:
        if rank == 1 and num_bytes > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor, num_bytes)

    heap = SharedHeap(RankGroup(timeout_s=20.0), directory=folder)
    heap.reserve("data", 5000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "reserve_file", full)
        try:
            heap.allocate()
        finally:
            assert heap_descriptors() == []


@pytest.mark.parametrize("kind", ["nameless", "files"])
def test_no_room_on_one_rank_is_told_on_all(kind: str, get_pool, tmp_path: Path) -> None:
    for outcome in get_pool(4).outcomes(no_room_on_rank_1, str(tmp_path) if kind == "files" else None):
        assert isinstance(outcome.error, OSError) and outcome.error.errno == errno.ENOSPC
        assert "shared memory of rank 1" in str(outcome.error) and "5120 bytes needed per rank" in str(outcome.error)
    assert os.listdir(tmp_path) == []


def reserve_by_rank(rank: int, world: int, folder: str) -> None:
    with SharedHeap(RankGroup(timeout_s=20.0), directory=folder) as heap:
        heap.reserve("data", 1000 * (rank + 1))
        heap.allocate()


def test_different_sizes_are_an_error_on_every_rank(get_pool, tmp_path: Path) -> None:
    for outcome in get_pool(2).outcomes(reserve_by_rank, str(tmp_path)):
        assert isinstance(outcome.error, ValueError) and "[1024, 2048]" in str(outcome.error)
    assert os.listdir(tmp_path) == []


LEAVING_S = 60.0


def one_rank_leaves(rank: int, world: int) -> float:
    start = time.monotonic()
    heap = SharedHeap(RankGroup(timeout_s=LEAVING_S))
    heap.reserve("data", 10)
    heap.allocate()
    kept = heap.tensor("data")
    try:
        if rank == 1:
            heap.close(failed=True)
        else:
            with pytest.raises(PeerAbortedError, match="rank 1 gave up"):
                heap.close()
    finally:
        kept.fill_(7)  # A tensor that outlives its heap is still memory.
    assert int(kept.sum()) == 70
    return time.monotonic() - start


def test_close_after_a_failure_waits_for_nobody(get_pool) -> None:
    assert max(get_pool(2).run(one_rank_leaves)) < LEAVING_S


def die_after_allocation(rank: int, world: int, folder: str) -> None:
    # A fresh process imports what it needs when it is told what to do; none waits for another's imports.
    dist.barrier()
    heap = SharedHeap(RankGroup(timeout_s=WITHOUT_ONE_S), directory=folder)
    heap.reserve("data", 100_000)
    heap.allocate()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        heap.barrier()
    finally:
        heap.close(failed=True)


def test_a_killed_rank_leaves_no_file_and_is_named(tmp_path: Path) -> None:
    outcomes = run_once(die_after_allocation, 3, str(tmp_path))
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerTimeoutError) and error.rank == 1, outcomes[rank]
        assert f"rank 1 of 3 did not come within {WITHOUT_ONE_S:g} s" in str(error)
    assert os.listdir(tmp_path) == []


def die_while_mapping(rank: int, world: int, folder: str | None) -> list[str]:
    # A fresh process imports what it needs when it is told what to do; none waits for another's imports.
    dist.barrier()
    heap = SharedHeap(RankGroup(timeout_s=WITHOUT_ONE_S), directory=folder)
    heap.reserve("data", 100_000)
    if rank == 1:
        heap._map = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    with pytest.raises(PeerTimeoutError, match=r"SharedHeap\.allocate: map: rank 1 of 3 did not come") as caught:
        heap.allocate()
    assert caught.value.rank == 1
    return heap_descriptors()


@pytest.mark.parametrize("kind", ["nameless", "files"])
def test_a_rank_killed_while_mapping_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """Its file is unlinked by the others; memory without a name is freed, since no other has it open or mapped."""
    outcomes = run_once(die_while_mapping, 3, str(tmp_path) if kind == "files" else None)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].result == []
    assert os.listdir(tmp_path) == []


def die_with_memory_made(rank: int, world: int) -> set[str]:
    """Rank 1 dies before any peer knows where its memory is; the files that are new afterwards."""
    before = ours(shared_memory.shared_memory_directory())
    dist.barrier()
    heap = SharedHeap(RankGroup(timeout_s=WITHOUT_ONE_S))
    heap.reserve("data", 100_000)
    if rank == 1:
        create = NamelessMemory.create

        def created(memory: NamelessMemory, num_bytes: int) -> list[Any]:
            place = create(memory, num_bytes)
            if num_bytes > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return place

        NamelessMemory.create = created  # type: ignore[method-assign]
    with pytest.raises(PeerTimeoutError, match=r"SharedHeap\.allocate: create: rank 1 of 3 did not come"):
        heap.allocate()
    return ours(shared_memory.shared_memory_directory()) - before


def test_a_rank_killed_before_its_peers_know_its_memory_leaves_nothing(nameless: NamelessMemory) -> None:
    outcomes = run_once(die_with_memory_made, 3)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].result == set()


def ours(path: str) -> set[str]:
    return {name for name in os.listdir(path) if name.startswith("moe_runtime")}


def test_signals_do_not_keep_memory_from_being_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler's, every few milliseconds: a call that one interrupts is undone, and has to begin again."""
    if not hasattr(os, "posix_fallocate"):
        pytest.skip("no posix_fallocate here")
    asked: list[tuple[int, int]] = []
    reserve = os.posix_fallocate

    def reserved(descriptor: int, start: int, num_bytes: int) -> None:
        asked.append((start, num_bytes))
        reserve(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", reserved)
    num_bytes = 9 * (1 << 20) + 5
    with open(tmp_path / "file", "w+b") as file:
        shared_memory.reserve_file(file.fileno(), num_bytes)
        assert os.fstat(file.fileno()).st_size == num_bytes
    assert max(count for _, count in asked) <= 4 << 20, "some milliseconds"
    assert [start for start, _ in asked] == [sum(count for _, count in asked[:n]) for n in range(len(asked))]


@pytest.mark.parametrize("native", [True, False])
def test_reserved_bytes_are_there(native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    elif not hasattr(os, "posix_fallocate"):
        pytest.skip("no posix_fallocate here")
    num_bytes = 3 * (1 << 20) + 5
    with open(tmp_path / "file", "w+b") as file:
        shared_memory.reserve_file(file.fileno(), num_bytes)
        status = os.fstat(file.fileno())
        assert status.st_size == num_bytes
        assert status.st_blocks * 512 >= num_bytes
        assert not any(file.read())
