"""Processes of engines for tests: an environment of their own, a limit on their time, and none that is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def environment(folder: Path, adapter: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a process of vLLM with `MOE_RUNTIME_VLLM` as `adapter`, whose caches lie in `folder`."""
    own = {
        "MOE_RUNTIME_VLLM": adapter,
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    return {**os.environ, **own, **(more or {})}


def end_session(process: subprocess.Popen[Any]) -> None:
    """Kill what is left of the session of `process`, which led it."""
    for pid in session(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(30)


def session(leader: int) -> list[int]:
    """Processes of the session that `leader` led, by /proc; no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@contextmanager
def started(command: list[str], log: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[Any]]:
    """`command` in a session of its own, its output in `log`; whatever of it is left at the end is killed."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=dict(env),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=log.parent,
        )
    try:
        yield process
    finally:
        end_session(process)


def run_program(command: list[str], log: Path, env: Mapping[str, str], limit_s: float) -> str:
    """The output of a program that ends well within its limit; what it starts ends with it."""
    with started(command, log, env) as process:
        try:
            code: Any = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"none after {limit_s} s"
    text = log.read_text(errors="replace")
    assert code == 0, f"{' '.join(command)}: exit status {code}\n{text[-6000:]}"
    return text


def run_llms(
    folder: Path, tag: str, cases: list[Any], adapter: str = "0", *, limit_s: float = 400
) -> tuple[dict[str, Any], str]:
    """What `run_llms.py` finds for `cases`, and its log."""
    return run_job("run_llms.py", folder, tag, cases, environment(folder, adapter), limit_s)


def run_sglang(folder: Path, tag: str, cases: list[Any], adapter: str = "0") -> tuple[dict[str, Any], str]:
    """What `run_sglang.py` finds for `cases` with `MOE_RUNTIME_SGLANG` as `adapter`, and its log."""
    own = {
        "MOE_RUNTIME_SGLANG": adapter,
        "PYTHONPATH": os.pathsep.join([str(HERE / "sglang_site"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SGLANG_USE_CPU_ENGINE": "1",
        # By default, ranks are as many as NUMA nodes at most.
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
        # SGLang compiles GLM's top-k, which takes longer than all else.
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return run_job("run_sglang.py", folder, tag, cases, environment(folder, "0", own), 400)


def run_job(
    program: str, folder: Path, tag: str, cases: list[Any], env: Mapping[str, str], limit_s: float
) -> tuple[dict[str, Any], str]:
    """What a program of this folder finds for `cases`, and its log."""
    folder.mkdir(exist_ok=True)
    file, results = folder / f"{tag}.job.json", folder / f"{tag}.json"
    file.write_text(json.dumps({"cases": cases, "results": str(results)}))
    text = run_program([str(HERE / program), str(file)], folder / f"{tag}.log", env, limit_s)
    return json.loads(results.read_text()), text
