"""Python programs that begin in a process which has torch loaded: importing it takes 3 s of a core, most programs less.

`interpreter()` takes the place of `sys.executable`: a small program that asks a process of ours, which has torch and
nothing of Triton or moe_runtime, to fork. The child takes over its arguments, environment, folder and files, and it
ends as the child does. What a child starts by `sys.executable`, such as the ranks of torchrun, comes from there too.
Programs whose `PYTHONPATH` begins with this checkout come from a child of that process which has imported its layers.
Other options than `-c`, `-m` and `-u`, and all programs where there are GPUs, are left to the real interpreter. Not for
programs that use multiprocessing: results that name classes of `__main__` may not find them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SOCKET = "MOE_RUNTIME_TEST_SPAWNER"
"""The environment variable that says where the process listens."""
PRELOADED = ("numpy", "yaml", "torch", "torch.distributed.launcher.api")
LOADED = ("moe_runtime.layer", "moe_runtime.launch.common.environment")
ROOT = str(Path(__file__).resolve().parents[2])

STAND_IN = """\
#!{python} -IS
import array, json, os, signal, socket, sys
rest = sys.argv[1:]
while rest[:1] == ["-u"]:
    del rest[0]
pipe = socket.socket(socket.AF_UNIX)
known = rest and (rest[0] in ("-c", "-m") or not rest[0].startswith("-"))
if not known or pipe.connect_ex(os.environ.get({socket!r}, "")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
what = json.dumps([rest, len(rest) < len(sys.argv) - 1, dict(os.environ), os.getcwd()]).encode()
files = array.array("i", [0, 1, 2])
pipe.sendmsg([len(what).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
pipe.sendall(what)
answers = pipe.makefile()
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int(answers.readline() or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def interpreter() -> str:
    """The path of what takes the place of `sys.executable`. The process behind it ends with the one that began it."""
    import torch

    if torch.cuda.is_available():
        return sys.executable
    if SOCKET in os.environ:  # that of the process which started this one
        return str(Path(os.environ[SOCKET]).with_name("python"))
    folder = Path(tempfile.mkdtemp(prefix="moe_runtime-spawner-"))
    stand_in, listens = folder / "python", folder / "socket"
    stand_in.write_text(STAND_IN.format(python=sys.executable, socket=SOCKET))
    stand_in.chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONPATH")}
    command = [sys.executable, "-P", __file__, str(listens), str(stand_in)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    _spawners.append(process := subprocess.Popen(command, env=clean | {"OMP_NUM_THREADS": "1"}, **pipes))
    assert process.stdout is not None and process.stdout.readline() == "ready\n", "the spawner did not start"
    os.environ[SOCKET] = str(listens)
    return str(stand_in)


_spawners: list[subprocess.Popen[str]] = []
"""Kept: it ends when its input is closed, which this process does at its end, however that comes."""


def _serve(source: socket.socket, listens: bool) -> tuple[list[str], bool]:
    """Forks a child for each that asks; returns in the child, with its arguments and whether it is not to buffer.

    Args:
        source: where programs are asked for, or, in a process that has more loaded, the first process hands them on.
        listens: whether this is the first process.
    """
    chooser = selectors.DefaultSelector()
    chooser.register(source, selectors.EVENT_READ)
    if listens:
        chooser.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
    asking: dict[int, socket.socket] = {}  # by the child's pid
    loaded: dict[str, socket.socket] = {}  # processes that have more loaded, by their TRITON_INTERPRET

    def leave(*others: socket.socket) -> None:
        """In a child: what is open belongs to this process."""
        chooser.close()
        for other in (source, *asking.values(), *loaded.values(), *others):
            other.close()

    while True:
        for key, _ in chooser.select():
            if key.fileobj is sys.stdin:
                shutil.rmtree(Path(source.getsockname()).parent, ignore_errors=True)
                os._exit(0)
            elif key.fileobj is source:
                if listens:
                    pipe, _ = source.accept()
                    asked = _receive(pipe)
                    if asked is None:
                        pipe.close()
                        continue
                    kind = _loads(asked[0][2])
                    if kind is not None:
                        if kind not in loaded:
                            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                            if os.fork() == 0:
                                leave(near, pipe)
                                for file in asked[1]:
                                    os.close(file)
                                _load(kind)
                                return _serve(far, False)
                            far.close()
                            loaded[kind] = near
                        socket.send_fds(loaded[kind], [json.dumps(asked[0]).encode()], [*asked[1], pipe.fileno()])
                        pipe.close()
                        for file in asked[1]:
                            os.close(file)
                        continue
                else:
                    what, files, _, _ = socket.recv_fds(source, 1 << 20, 4)
                    if not what:
                        os._exit(0)
                    pipe, asked = socket.socket(fileno=files.pop()), (json.loads(what), files)
                pid = os.fork()
                if pid == 0:
                    leave(pipe)
                    return _become(*asked)
                for file in asked[1]:
                    os.close(file)
                _answer(pipe, pid)
                asking[pid] = pipe
                chooser.register(pipe, selectors.EVENT_READ, pid)
                chooser.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            elif key.data not in asking:
                pass  # both ended at once
            elif isinstance(key.fileobj, socket.socket):
                # Who asked was killed; what it stands for is, too.
                chooser.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
            else:
                code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                chooser.unregister(key.fd)
                os.close(key.fd)
                pipe = asking.pop(key.data)
                if pipe in chooser.get_map():
                    chooser.unregister(pipe)
                _answer(pipe, code)
                pipe.close()


def _loads(environment: dict[str, str]) -> str | None:
    """Which process with more loaded a program comes from: of this checkout, and by whether Triton interprets."""
    interprets = environment.get("TRITON_INTERPRET", "0")
    ours = environment.get("PYTHONPATH", "").split(os.pathsep)[0] == ROOT
    return interprets if ours and interprets in ("0", "1") else None


def _load(kind: str) -> None:
    """Import what nearly all programs of this checkout do."""
    if kind == "1":
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, ROOT)
    for name in LOADED:
        import_module(name)
    sys.path.remove(ROOT)
    gc.collect()
    gc.freeze()


def _answer(pipe: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked was killed
        pipe.sendall(f"{number}\n".encode())


def _receive(pipe: socket.socket) -> tuple[list[Any], list[int]] | None:
    """What is asked for, and the files that come with it; None of one that was killed meanwhile."""
    head, files, _, _ = socket.recv_fds(pipe, 8, 3)
    left, what = int.from_bytes(head, "little"), b""
    while left > len(what):
        part = pipe.recv(left - len(what))
        if not part:
            break
        what += part
    return (json.loads(what), files) if what and len(what) == left else None


def _become(what: list[Any], files: list[int]) -> tuple[list[str], bool]:
    arguments, unbuffered, environment, folder = what
    os.setsid()  # What it sends to its own group is not for the process that it comes from.
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return arguments, unbuffered


def _run(arguments: list[str], unbuffered: bool) -> None:
    """What the interpreter would do."""
    if unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    how, *rest = arguments
    if how == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if how == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv[:] = arguments
        main.__file__ = os.path.abspath(how)
        sys.path.insert(0, os.path.dirname(main.__file__))
        code = compile(Path(how).read_bytes(), main.__file__, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The session's end ends this process.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    asked = _serve(listener, True)
    sys.executable = sys.argv[2]
    _run(*asked)
