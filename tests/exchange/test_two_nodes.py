"""Two torchrun nodes on loopback, which take themselves for two hosts, give the answer of one process bit for bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.exchange.test_distributed import LAYERS, STEPS
from tests.exchange.test_hierarchical import virtual_results
from tests.support.comparison import assert_same_bits
from tests.support.programs import ROOT, without_interpreter
from tests.support.spawner import interpreter

pytestmark = pytest.mark.cpu_only

NODES, RANKS_PER_NODE = 2, 2


def start_node(node: int, port: int, *command: object) -> subprocess.Popen[str]:
    """A torchrun agent with `RANKS_PER_NODE` ranks that rendezvous at a port where somebody else holds the store."""
    launcher = [interpreter(), "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--node-rank={node}"]
    launcher += [f"--nproc-per-node={RANKS_PER_NODE}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    launcher += ["--rdzv-conf=is_host=false", "--rdzv-id=two_nodes", "--local-addr=127.0.0.1"]
    changes = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "MOE_RUNTIME_HOST": f"node{node}",
    }
    return subprocess.Popen(
        [*launcher, *map(str, command)],
        cwd=ROOT,
        env=without_interpreter(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_nodes(*command: object) -> list[str]:
    """What each node prints; all must end well."""
    # Held here all the time: a port that is only looked for may be another's when a node needs it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = [start_node(node, store.port, *command) for node in range(NODES)]
    try:
        printed = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    for node, text in zip(nodes, printed, strict=True):
        assert node.returncode == 0, text
    return printed


def test_two_nodes_give_the_one_process_answer(tmp_path: Path, seed: int) -> None:
    run_nodes(ROOT / "tests" / "support" / "two_nodes_worker.py", tmp_path, seed)
    world = NODES * RANKS_PER_NODE
    expected = [virtual_results(world, NODES, config, seed) for config in LAYERS]
    for rank in range(world):
        transport, reasons, results = torch.load(tmp_path / f"rank{rank}.pt")
        assert transport == "hierarchical"
        assert "2 hosts" in reasons["shared"]
        for step in range(STEPS):
            for number in range(len(LAYERS)):
                what = f"layer {number}, step {step}, rank {rank}"
                assert_same_bits(results[step][number], expected[number][rank][step], what)


def test_the_doctor_says_what_several_hosts_use() -> None:
    text = " ".join(run_nodes("-m", "moe_runtime.launch.doctor", "--config", "tiny_cpu"))
    assert "hierarchical" in text and "2 hosts" in " ".join(text.split())
