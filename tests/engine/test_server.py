"""An HTTP server of vLLM on two data-parallel ranks with expert parallelism: many at once, too long, a death."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.processes import environment, session, started
from tests.engine.run_llms import GPU_MEMORY_UTILIZATION, prompts

START_S, ANSWER_S, END_S = 300.0, 120.0, 120.0


class Server:
    def __init__(self, process: subprocess.Popen[Any], port: int, model: str, log: Path) -> None:
        self.process, self.url, self.model, self.log = process, f"http://127.0.0.1:{port}", model, log

    def get(self, path: str, data: Any = None, limit_s: float = ANSWER_S) -> tuple[int, str]:
        """Status and text of an answer."""
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ask(self, prompt: list[int], **more: Any) -> tuple[int, str]:
        usual = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return self.get("/v1/completions", usual | more)

    def wait(self) -> None:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            try:
                if self.get("/health", limit_s=10)[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"not ready after {START_S} s\n{self.log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def server(folder: Path, models: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model, log = str(models / "qwen3"), folder / "server.log"
    options: dict[str, Any] = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "data-parallel-size": 2,
        "max-model-len": 512,
        "max-num-batched-tokens": 512,
        "max-num-seqs": 16,
        "kv-cache-memory-bytes": 64 << 20,
    }
    if torch.cuda.is_available():
        options["gpu-memory-utilization"] = GPU_MEMORY_UTILIZATION
    command = ["-m", "vllm.entrypoints.openai.api_server", "--enable-expert-parallel", "--enforce-eager"]
    command += ["--no-enable-prefix-caching", *(f"--{key}={value}" for key, value in options.items())]
    env = environment(folder, "1", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    with started(command, log, env) as process:
        made = Server(process, port, model, log)
        made.wait()
        yield made


def probabilities(text: str) -> list[float]:
    """Log-probabilities of the prompt's tokens but the first, of an answer that has them."""
    choice = json.loads(text)["choices"][0]
    given = choice["prompt_token_ids"] if choice.get("prompt_token_ids") else None
    found = []
    for place, step in enumerate(choice["prompt_logprobs"]):
        if step is not None:
            token = next(iter(step)) if given is None else str(given[place])
            found.append(step[token]["logprob"])
    return found


def test_many_at_once(server: Server, alone: dict[str, Any], limits: dict[str, float]) -> None:
    """As many ranks as have requests or none, in steps of different sizes."""
    asked = prompts()

    def ask(number: int) -> list[float]:
        status, text = server.ask(asked[number % len(asked)], prompt_logprobs=0, return_token_ids=True)
        assert status == 200, text
        return probabilities(text)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(3 * len(asked))))
    for first in range(0, len(found), len(asked)):
        together = [each for answer in found[first : first + len(asked)] for each in answer]
        apart = statistics.mean(abs(a - b) for a, b in zip(alone["qwen3"], together, strict=True))
        assert apart <= limits["qwen3"]
    assert "moe_runtime: 2 of 2 MoE layers taken over" in server.log.read_text()


def test_a_prompt_that_is_too_long_ends_nothing(server: Server) -> None:
    status, text = server.ask(list(range(4, 504)) * 2)
    assert status == 400 and "512" in text
    assert server.ask([5, 6, 7])[0] == 200


def test_a_killed_rank_ends_the_server(server: Server) -> None:
    """Requests that are under way are answered with an error, and no process is left."""
    workers = sorted({int(pid) for pid in re.findall(r"\(EngineCore_DP\d pid=(\d+)\)", server.log.read_text())})
    assert len(workers) == 2

    def ask_until_it_fails() -> int:
        ends = time.monotonic() + END_S
        while time.monotonic() < ends:
            try:
                status = server.ask([5, 6, 7], max_tokens=500)[0]
            except OSError:
                return 0  # The server has closed the connection.
            if status != 200:
                return status
        raise AssertionError(f"still answers after {END_S} s")

    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(ask_until_it_fails)
        time.sleep(0.5)
        os.kill(workers[-1], signal.SIGKILL)
        status = under_way.result(2 * END_S)
    assert status == 0 or status >= 500
    server.process.wait(END_S)
    ends = time.monotonic() + END_S
    while (left := session(server.process.pid)) and time.monotonic() < ends:
        time.sleep(0.2)
    assert not left, [name_of(pid) for pid in left]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
