"""A program that begins in a process with torch loaded sees and leaves what one of the real interpreter would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.programs import ROOT, without_interpreter
from tests.support.spawner import SOCKET, interpreter

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU programs are the real interpreter's"),
]

SEEN = """\
import json, os, sys
try:
    spec = __spec__ and __spec__.name
    file = __file__
except NameError:
    file = None
folders = [folder for folder in sys.path if "site-packages" not in folder and "lib/python" not in folder]
print(json.dumps([__name__, spec, file, sys.argv, folders, os.getcwd(), os.environ["ABOUT"], sys.stdin.read()]))
print("an error", file=sys.stderr)
sys.exit(7)
"""


def both(*arguments: str, **more: str) -> list[subprocess.CompletedProcess[str]]:
    environment = without_interpreter(**more)
    return [
        subprocess.run(
            [python, *arguments], input="some\ninput", env=environment, capture_output=True, text=True, timeout=120
        )
        for python in (sys.executable, interpreter())
    ]


@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("how", ["-c", "-m", "file"])
def test_a_program_sees_what_it_would(
    how: str, ours_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    start = {"-c": ("-c", SEEN), "-m": ("-u", "-m", "seen"), "file": ("seen.py",)}[how]
    folders = [str(tmp_path / "elsewhere"), str(ROOT)]
    path = os.pathsep.join(reversed(folders) if ours_first else folders)
    real, ours = both(*start, "-c", "two words", ABOUT="this", PYTHONPATH=path)
    assert ours.args != real.args
    assert (ours.returncode, json.loads(ours.stdout), ours.stderr) == (7, json.loads(real.stdout), "an error\n")
    assert real.returncode == 7


@pytest.mark.parametrize(
    "code",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "raise SystemExit('a reason')",
        "import atexit; atexit.register(print, 'the end'); print('first')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "import sys; sys.stdout.write('no newline')",
    ],
)
def test_it_ends_as_it_would(code: str) -> None:
    real, ours = both("-c", code)
    assert (ours.returncode, ours.stdout, ours.stderr) == (real.returncode, real.stdout, real.stderr)


def test_an_exception_is_printed() -> None:
    real, ours = both("-c", "print(1 / 0)")
    assert ours.returncode == real.returncode == 1
    assert ours.stderr.splitlines()[-1] == real.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_options_that_it_does_not_know_are_the_real_interpreters() -> None:
    assert len({done.stdout for done in both("-V")}) == 1


def test_programs_of_programs_come_from_there_too() -> None:
    inner = "import sys; print('torch' in sys.modules)"
    real, ours = both("-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])")
    assert (real.stdout, ours.stdout) == ("False\n", "True\n")


@pytest.mark.parametrize("interprets", ["0", "1"])
def test_a_program_of_this_checkout_begins_with_its_layers(interprets: str) -> None:
    code = "import sys; print('moe_runtime.layer' in sys.modules); from moe_runtime.kernels.formats import quantize; "
    code += "print(type(quantize.quantize_tile).__name__, quantize.__file__)"
    real, ours = both("-c", code, PYTHONPATH=str(ROOT), TRITON_INTERPRET=interprets)
    (began, *seen), (began_here, *seen_here) = real.stdout.split(), ours.stdout.split()
    assert (began, began_here) == ("False", "True"), ours.stderr
    assert seen == seen_here and seen[0] == {"0": "JITFunction", "1": "InterpretedFunction"}[interprets]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_who_is_killed_takes_the_program_along(number: signal.Signals) -> None:
    code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    process = subprocess.Popen([interpreter(), "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert pid != process.pid
    process.send_signal(number)
    assert process.wait(timeout=60) == -number
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")
    process.stdout.close()


def test_without_the_process_it_is_the_real_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreter() != sys.executable  # it has begun
    monkeypatch.setenv(SOCKET, "/no/such/socket")
    done = both("-c", "import sys; print(sys.executable)")
    assert {run.stdout.strip() for run in done} == {sys.executable}
