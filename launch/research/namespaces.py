"""Network namespaces of one machine as hosts, joined by a link of known rate. Needs root, `ip` and `tc` (iproute2)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "veth"
"""Of each namespace, towards the other."""

BURST_BYTES = 96 << 10
"""What an idle link takes at once before its rate holds: more than the largest packet of TCP, 64 KB."""

COMMAND_S = 20.0


def address(host: int) -> str:
    """Of a namespace on `INTERFACE`."""
    return f"10.77.0.{host + 1}"


@contextmanager
def two_hosts(megabits: float) -> Iterator[list[str]]:
    """Names of two namespaces, joined by a link of so many Mbit/s each way; gone at the end.

    Raises `OSError` where they cannot be made, which says why.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise OSError("network namespaces need root, ip and tc")
    names = [f"moe{os.getpid()}x{host}" for host in range(2)]
    try:
        try:
            for name in names:
                _root("ip", "netns", "add", name)
            ends = [(INTERFACE, "netns", name) for name in names]
            _root("ip", "link", "add", ends[0][0], "netns", names[0], "type", "veth", "peer", *ends[1])
            for host, name in enumerate(names):
                inside = ("ip", "netns", "exec", name)
                _root(*inside, "ip", "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
                for device in ("lo", INTERFACE):
                    _root(*inside, "ip", "link", "set", device, "up")
                limit = ("rate", f"{megabits}mbit", "burst", str(BURST_BYTES), "latency", "400ms")
                _root(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)
        except subprocess.CalledProcessError as error:
            raise OSError(f"network namespaces cannot be made here: {error.stderr.strip()}") from error
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=COMMAND_S)


def _root(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S)
