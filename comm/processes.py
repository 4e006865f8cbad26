"""Processes of this host, as other processes know them: to end one that memory is still shared with."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessName:
    """A process that cannot be taken for a later one with the same number.

    Attributes:
        pid: its number, in the namespace of its own.
        started: when it started, in clock ticks since the host did.
        namespace: which namespace that is.
    """

    pid: int
    started: int
    namespace: str

    @classmethod
    def own(cls) -> ProcessName:
        """That of this process."""
        return cls(os.getpid(), _started(os.getpid()) or 0, os.readlink("/proc/self/ns/pid"))

    def end(self, limit_s: float) -> None:
        """Kill it (SIGKILL), and wait until it is gone with all that it had open.

        Raises `OSError` if this process may not, does not see it, or it is not gone after `limit_s`.
        """
        if self.namespace != os.readlink("/proc/self/ns/pid"):
            raise OSError(f"process {self.pid}: it is in another namespace, and cannot be ended from here")
        deadline = time.monotonic() + limit_s
        while _started(self.pid) == self.started:
            if time.monotonic() > deadline:
                raise OSError(f"process {self.pid}: it was killed, and is not gone after {limit_s:g} s")
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            time.sleep(0.01)


def _started(pid: int) -> int | None:
    """When a process started; None if there is none, or nothing is left of it but its exit code."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of its program, in parentheses, may hold anything.
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else started
