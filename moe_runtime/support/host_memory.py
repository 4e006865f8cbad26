"""How much memory this process may still have: of the host, and of the control groups that it is in."""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")

_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
"""The files with a control group's limit and use, and the entries of its `memory.stat` that it can give back."""


def memory_bytes() -> dict[str, int]:
    """`total` and `available` bytes: of the host, lowered to what the limits of the control groups leave.

    Cached files count as available. Raises `OSError` where the system does not tell.
    """
    fields = _numbers(_PROC / "meminfo")
    if not fields.keys() >= {"MemTotal:", "MemAvailable:"}:
        raise OSError(errno.ENOTSUP, "/proc/meminfo does not tell how much memory is available")
    total, available = fields["MemTotal:"] * 1024, fields["MemAvailable:"] * 1024
    for folder, (limit_file, use_file, cached) in _control_groups():
        try:
            limit, use = int((folder / limit_file).read_text()), int((folder / use_file).read_text())
            stat = _numbers(folder / "memory.stat")
        except (OSError, ValueError):
            continue  # No such group here, or one without a limit.
        total = min(total, limit)
        available = min(available, max(limit - use + sum(stat.get(name, 0) for name in cached), 0))
    return {"total": total, "available": min(total, available)}


def _control_groups() -> list[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """The folders of the groups of this process and of all groups above them, and the files of each.

    A container may show its own group as the root, whatever its path outside is.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, files = _CGROUPS, _V2
        elif "memory" in controllers.split(","):
            root, files = _CGROUPS / "memory", _V1
        else:
            continue
        group = PurePosixPath(path)
        found += [(root / str(one).lstrip("/"), files) for one in (group, *group.parents)]
    return found


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line, the second as a number."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1}
