"""Processes that are ended by name, and later ones with the same number that are not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import pytest

from moe_runtime.comm.processes import ProcessName

pytestmark = pytest.mark.cpu_only

SAY_NAME = """
import dataclasses, time
from moe_runtime.comm.processes import ProcessName
print(*dataclasses.astuple(ProcessName.own()), flush=True)
time.sleep(600)
"""


def test_a_process_is_ended_and_another_with_its_number_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", SAY_NAME], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        pid, started, namespace = child.stdout.readline().split()
        name = ProcessName(int(pid), int(started), namespace)
        assert name.pid == child.pid
        dataclasses.replace(name, started=name.started - 1).end(0.1)
        with pytest.raises(OSError, match="it is in another namespace"):
            dataclasses.replace(name, namespace="pid:[1]").end(0.1)
        assert child.poll() is None
        before = time.monotonic()
        name.end(10.0)  # also though nobody has asked for its exit code yet
        assert time.monotonic() - before < 5.0
        assert child.wait(10) == -9
        name.end(0.1)
