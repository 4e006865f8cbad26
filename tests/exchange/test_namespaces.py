"""Two network namespaces with a slow link between them are two hosts: the same bits, and the bytes of the formula."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest
import torch

from moe_runtime.launch.research import namespaces
from moe_runtime.virtual import VirtualRanks
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import rank_input
from tests.support.namespace_worker import CONFIG, STEPS
from tests.support.programs import ROOT, without_interpreter

pytestmark = pytest.mark.cpu_only

HOSTS, RANKS_PER_HOST = 2, 2
MEGABITS, LIMIT_S = 400, 150.0


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces, joined by a link of `MEGABITS` a second; skips where they cannot be made."""
    with ExitStack() as opened:
        try:
            names = opened.enter_context(namespaces.two_hosts(MEGABITS))
        except OSError as error:
            pytest.skip(str(error))
        yield names


def start(name: str, rank: int, log: IO[str], *command: object) -> subprocess.Popen[bytes]:
    """A rank in its namespace, as a launcher starts it."""
    changes = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
        "MOE_RUNTIME_HOST": name,
        "MASTER_ADDR": namespaces.address(0),
        "MASTER_PORT": "29555",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % RANKS_PER_HOST),
        "WORLD_SIZE": str(HOSTS * RANKS_PER_HOST),
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, *map(str, command)],
        cwd=ROOT,
        env=without_interpreter(**changes),
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def test_a_slow_link_carries_each_token_once(hosts: list[str], tmp_path: Path, seed: int) -> None:
    worker = ROOT / "tests" / "support" / "namespace_worker.py"
    world = HOSTS * RANKS_PER_HOST
    logs = [tmp_path / f"rank{rank}.log" for rank in range(world)]
    codes: list[int | None] = [None] * world
    with ExitStack() as opened:
        ranks = []
        for rank, log in enumerate(logs):
            name = hosts[rank // RANKS_PER_HOST]
            ranks.append(
                start(name, rank, opened.enter_context(log.open("w")), worker, tmp_path, seed, namespaces.INTERFACE)
            )
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and None in (codes := [process.poll() for process in ranks]):
            time.sleep(0.1)
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * world, "\n".join(log.read_text()[-3000:] for log in logs)
    with VirtualRanks(CONFIG, world, lambda layer: layer.load_random(seed), num_hosts=HOSTS) as virtual:
        for step in range(STEPS):
            inputs = [rank_input(seed + step, r, CONFIG.max_tokens_per_rank - step, 1024, 8, 4) for r in range(world)]
            expected = virtual([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])
            for rank in range(world):
                found = torch.load(tmp_path / f"rank{rank}.pt")[step]
                assert_same_bits(found, expected[rank], f"step {step}, rank {rank}")
    for host in range(HOSTS):
        ranks = range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST)
        said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in ranks]
        payload = STEPS * RANKS_PER_HOST * said[0]["of_a_step"]
        assert {one["transport"] for one in said} == {"hierarchical"}
        # Of all that the host sent; one rank may look before the last bytes of another have gone. Headers of frames and
        # of TCP, acknowledgements and barriers are few per cent of the payload.
        assert payload <= max(one["sent"] for one in said) < 1.08 * payload + 100_000, said
