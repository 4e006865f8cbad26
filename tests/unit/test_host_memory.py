"""How much memory there is: of the host, and what the limits of control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_runtime.support import host_memory
from moe_runtime.support.host_memory import memory_bytes

pytestmark = pytest.mark.cpu_only

MIB = 1 << 20
MEMINFO = "MemTotal:       8388608 kB\nMemFree:  1 kB\nMemAvailable:    6291456 kB\nHugePages_Total:       0\n"
HOST = {"total": 8192 * MIB, "available": 6144 * MIB}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 8 GiB, 6 of them available, without control groups."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def group(host: Path, folder: str, limit: object, use: int, cached: int) -> None:
    """A control group of the second version; half of its cached files were used lately."""
    write(host, f"cgroup/{folder}/memory.max", limit)
    write(host, f"cgroup/{folder}/memory.current", use)
    write(
        host, f"cgroup/{folder}/memory.stat", f"anon 1\ninactive_file {cached // 2}\nactive_file {cached // 2}\nshmem 9"
    )


def test_of_the_host(host: Path) -> None:
    assert memory_bytes() == HOST
    write(host, "proc/self/cgroup", "0::/not/there")
    assert memory_bytes() == HOST


def test_of_a_container(host: Path) -> None:
    """Its own group is shown as the root. Cached files do not count as used."""
    write(host, "proc/self/cgroup", "0::/docker/1234")
    group(host, "", 1024 * MIB, 1000 * MIB, 600 * MIB)
    assert memory_bytes() == {"total": 1024 * MIB, "available": 624 * MIB}


def test_the_tightest_of_nested_groups_counts(host: Path) -> None:
    write(host, "proc/self/cgroup", "0::/a/b/c")
    group(host, "a/b/c", "max", 1 * MIB, 0)
    group(host, "a/b", 3000 * MIB, 500 * MIB, 0)
    group(host, "a", 4000 * MIB, 3900 * MIB, 0)
    assert memory_bytes() == {"total": 3000 * MIB, "available": 100 * MIB}
    group(host, "a/b", 3000 * MIB, 3001 * MIB, 0)
    assert memory_bytes()["available"] == 0


def test_of_the_first_version(host: Path) -> None:
    write(host, "proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/job\n0::/")
    for folder, limit in (("", 2**63 - 4096), ("job", 512 * MIB)):
        write(host, f"cgroup/memory/{folder}/memory.limit_in_bytes", limit)
        write(host, f"cgroup/memory/{folder}/memory.usage_in_bytes", 100 * MIB)
        write(host, f"cgroup/memory/{folder}/memory.stat", f"cache 7\ntotal_inactive_file {10 * MIB}")
    assert memory_bytes() == {"total": 512 * MIB, "available": 422 * MIB}


def test_a_host_that_does_not_tell(host: Path) -> None:
    write(host, "proc/meminfo", "MemTotal: 1 kB")
    with pytest.raises(OSError, match="/proc/meminfo does not tell how much memory is available"):
        memory_bytes()
    (host / "proc/meminfo").unlink()
    with pytest.raises(FileNotFoundError):
        memory_bytes()
