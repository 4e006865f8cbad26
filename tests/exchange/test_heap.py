"""Heaps: regions of every rank are reachable by address from every other, and no file is left behind."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from moe_runtime.comm.bootstrap import RankGroup
from moe_runtime.comm.errors import PeerAbortedError, PeerTimeoutError
from moe_runtime.comm.heaps import shared_heap
from moe_runtime.comm.heaps.heap import REGION_ALIGNMENT, SymmetricHeap
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
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
    path, link = tmp_path / "memory", tmp_path / "link"
    before = os.umask(0)
    try:
        assert shared_heap._create(str(path), 4096, 1) is None
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    link.symlink_to(path)
    heap = SharedHeap(RankGroup(alone=True))
    problem = heap._map(str(link), 4096)
    assert problem is not None and problem[0] == errno.ELOOP
    assert heap._map(str(path), 4096) is None


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


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match=r"world_size: expected a positive integer to \d+, got 0"):
        PrivateHeap.group(0)
    heap = PrivateHeap()
    with pytest.raises(ValueError, match=r"num_bytes: expected a positive integer to \d+, got 0"):
        heap.reserve("a", 0)
    heap.reserve("a", 10)
    with pytest.raises(ValueError, match="'a' is already reserved"):
        heap.reserve("a", 10)
    with pytest.raises(ValueError, match="not allocated yet"):
        heap.tensor("a")
    heap.allocate()
    with pytest.raises(ValueError, match="already allocated"):
        heap.reserve("b", 10)
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


def exchange_by_address(rank: int, world: int, folder: str, seed: int) -> None:
    with SharedHeap(RankGroup(timeout_s=20.0), directory=folder) as heap:
        reserve(heap)
        heap.allocate()
        heap.barrier()
        assert os.listdir(folder) == [], "the files are unlinked once they are mapped"
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


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shared_exchange_by_address(world: int, get_pool, tmp_path: Path, seed: int) -> None:
    get_pool(world).run(exchange_by_address, str(tmp_path), seed)
    assert os.listdir(tmp_path) == []


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


def allocate_too_much(rank: int, world: int, folder: str) -> None:
    status = os.statvfs(folder)
    heap = SharedHeap(RankGroup(timeout_s=20.0), directory=folder)
    # More than there is in all: what is free now may be less than what is free later.
    heap.reserve("all", (status.f_blocks + 1000) * status.f_frsize)
    with heap:
        heap.allocate()


@pytest.mark.parametrize("folder", ["default", "temporary"])
def test_no_room_is_an_error_on_every_rank(folder: str, get_pool, tmp_path: Path) -> None:
    path = str(tmp_path) if folder == "temporary" else shared_heap.shared_memory_directory()
    before = ours(path)
    for outcome in get_pool(2).outcomes(allocate_too_much, path):
        assert isinstance(outcome.error, OSError), outcome
        assert outcome.error.errno == errno.ENOSPC
        assert "shared memory of rank 0" in str(outcome.error)
        assert "bytes needed per rank" in str(outcome.error) and f"available in {path}" in str(outcome.error)
    # Tests in other processes make and unlink files there too; a file that was left stays.
    left, deadline = ours(path) - before, time.monotonic() + 60
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= ours(path)
    assert not left


def ours(path: str) -> set[str]:
    return {name for name in os.listdir(path) if name.startswith("moe_runtime-")}


def no_room_on_rank_1(rank: int, world: int, folder: str) -> None:
    def full(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    heap = SharedHeap(RankGroup(timeout_s=20.0), directory=folder)
    heap.reserve("data", 5000)
    original = shared_heap.reserve_file
    shared_heap.reserve_file = full if rank == 1 else original
    try:
        heap.allocate()
    finally:
        shared_heap.reserve_file = original


def test_no_room_on_one_rank_is_told_on_all(get_pool, tmp_path: Path) -> None:
    for outcome in get_pool(4).outcomes(no_room_on_rank_1, str(tmp_path)):
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


def die_while_mapping(rank: int, world: int, folder: str) -> None:
    # A fresh process imports what it needs when it is told what to do; none waits for another's imports.
    dist.barrier()
    heap = SharedHeap(RankGroup(timeout_s=WITHOUT_ONE_S), directory=folder)
    heap.reserve("data", 100_000)
    if rank == 1:
        heap._map = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    heap.allocate()


def test_the_file_of_a_rank_killed_while_mapping_is_unlinked_by_the_others(tmp_path: Path) -> None:
    outcomes = run_once(die_while_mapping, 3, str(tmp_path))
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerTimeoutError) and error.rank == 1, outcomes[rank]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("native", [True, False])
def test_reserved_bytes_are_there(native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    elif not hasattr(os, "posix_fallocate"):
        pytest.skip("no posix_fallocate here")
    num_bytes = 3 * (1 << 20) + 5
    with open(tmp_path / "file", "w+b") as file:
        shared_heap.reserve_file(file.fileno(), num_bytes)
        status = os.fstat(file.fileno())
        assert status.st_size == num_bytes
        assert status.st_blocks * 512 >= num_bytes
        assert not any(file.read())
