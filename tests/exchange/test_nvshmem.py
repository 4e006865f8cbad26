"""The layer over NVSHMEM on all GPUs of this machine: bits of virtual ranks and references, graphs, and failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.comm.errors import Phase
from moe_runtime.comm.heaps import nvshmem_heap, nvshmem_world
from moe_runtime.comm.heaps.nvshmem_heap import NvshmemHeap
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.observation.waits import LATE, SLOW_TO_RETURN, slowest_rank
from moe_runtime.virtual import VirtualRanks, virtual_contexts
from tests.support import nvshmem_cases as cases
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import rank_input
from tests.support.pool import run_once
from tests.support.programs import ROOT, python_path

WORLD = torch.cuda.device_count()
ON_HOPPER = WORLD > 0 and resolve_engine("auto", torch.device("cuda")) == "cuda"

gpu = pytest.mark.gpu
several = pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")


@pytest.fixture
def ranks(get_pool: Any) -> Any:
    """The pool of one worker per GPU."""
    if nvshmem_world.problem():
        pytest.skip(f"NVSHMEM: {nvshmem_world.problem()}")
    return get_pool(WORLD, gpus=True)


def test_a_heap_needs_one_gpu() -> None:
    for place in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="device: expected one GPU such as cuda:0"):
            NvshmemHeap(RankGroup(), torch.device(place))


@pytest.mark.parametrize("complete", [True, False])
def test_memory_is_given_back_where_all_ranks_do(complete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(nvshmem_heap, "load_nvshmem", lambda: SimpleNamespace(free_tensor=freed.append))
    group = SimpleNamespace(rank=0, world_size=2, part=lambda what: complete)
    heap = NvshmemHeap(group, torch.device("cuda", 0))  # type: ignore[arg-type]
    heap.allocated, heap._own = True, torch.empty(1)
    heap.close()
    assert len(freed) == complete


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("no", name="nvshmem"), "nvshmem4py is not installed: pip install 'moe_runtime[gpu]'"),
        (ModuleNotFoundError("no", name="cuda.core"), "nvshmem4py is not installed: pip install 'moe_runtime[gpu]'"),
        (ModuleNotFoundError("no numpy", name="numpy"), "nvshmem4py cannot be imported: no numpy"),
        (OSError("libcuda.so.1"), "nvshmem4py cannot be loaded: OSError: libcuda.so.1"),
    ],
)
def test_what_is_missing_is_named(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(nvshmem_world, "load_nvshmem", fail)
    assert nvshmem_world.problem() == message
    assert nvshmem_world.version() is None


@gpu
def test_heaps_reach_every_peer(ranks: Any) -> None:
    ranks.run(cases.use_the_heap)


@gpu
@several
def test_a_heap_that_cannot_be_is_refused_on_every_rank(ranks: Any) -> None:
    for too_large, unequal in ranks.run(cases.be_refused):
        assert f"GPU memory of rank 0: {(1 << 44) + 256} bytes needed for the symmetric heap" in too_large
        assert "region: ranks reserved different sizes" in unequal


@gpu
def test_it_is_chosen_where_each_rank_has_a_gpu(ranks: Any) -> None:
    name, reasons = ranks.run(cases.choose)[0]
    assert name == ("nvshmem" if WORLD > 1 else "private")
    assert reasons.get("nvshmem") == (None if WORLD > 1 else "one rank has no peers")


@gpu
@several
def test_it_is_not_chosen_where_ranks_share_a_gpu(ranks: Any) -> None:
    for name, reasons in ranks.run(cases.choose_one_gpu_for_all):
        assert name == "collective"
        assert "share a GPU" in reasons["nvshmem"] or "NVSHMEM of this process is on" in reasons["nvshmem"]


@gpu
@several
@pytest.mark.parametrize("cause", [LATE, SLOW_TO_RETURN])
@pytest.mark.parametrize("most", [cases.TOKENS, cases.MANY], ids=["few", "many"])
def test_a_slow_rank_is_named(cause: str, most: int, ranks: Any, seed: int) -> None:
    """By replays of a graph; tokens are told of one by one, or rows are counted in chunks."""
    slow = seed % WORLD
    results = ranks.run(cases.be_waited_for, most, slow, cause, seed)
    assert all(found == results[0] for found in results)
    found = slowest_rank(results[0])
    assert found is not None and (found.rank, found.cause) == (slow, cause), str(found)
    # Each replay has a spin.
    for rank, counts in enumerate(results[0]):
        if rank != slow:
            assert counts.peers[slow].total_ns > 0.2e9 * cases.WAITED_STEPS / 2


@gpu
@several
def test_a_rank_with_fewer_sms_is_named(ranks: Any, seed: int) -> None:
    for slow in range(WORLD):
        counts = ranks.run(cases.have_fewer_sms, slow, 2, seed)[0]
        found = slowest_rank(counts)
        assert found is not None and (found.rank, found.cause) == (slow, SLOW_TO_RETURN), str(found)
        longest = [sum(of_peer.total_ns for of_peer in of_rank.peers) for of_rank in counts]
        print(f"{found}; each rank waited {longest} ns")


@gpu
def test_ranks_equal_virtual_ranks_bit_for_bit(ranks: Any, device: torch.device, seed: int) -> None:
    results = ranks.run(cases.run_layers, cases.LAYERS, seed, timeout=170)
    for number, c in enumerate(cases.LAYERS):
        expected = cases.virtual_results(WORLD, c, seed, device)
        for rank in range(WORLD):
            for step in range(cases.STEPS):
                what = f"layer {number}, step {step}, rank {rank} of {WORLD}"
                assert_same_bits(results[rank][number][step], expected[rank][step], what)


@gpu
def test_eager_and_graph_are_equal_bit_for_bit(ranks: Any, seed: int) -> None:
    assert ranks.run(cases.eager_and_graph, seed, timeout=170) == [[]] * WORLD


@gpu
def test_graphs_of_all_sizes_of_steps_give_the_bits_of_one(ranks: Any, seed: int) -> None:
    assert ranks.run(cases.replay_sizes, seed, timeout=170) == [[]] * WORLD


@gpu
def test_graphs_go_on_through_replacements(ranks: Any, seed: int) -> None:
    assert ranks.run(cases.replace_between_replays, seed, timeout=170) == [[]] * WORLD


@gpu
@pytest.mark.parametrize(
    ("fmt", "mode", "steps"),
    [
        ("nvfp4", "contiguous", 1000),
        ("bf16", "gathered", 200),
        ("fp8_block", "contiguous", 200),
        ("mxfp8", "gathered", 200),
    ],
)
def test_replays_with_new_tokens_and_routing_are_all_right(
    fmt: str, mode: str, steps: int, ranks: Any, seed: int
) -> None:
    for rank, (wrong, first, _) in enumerate(ranks.run(cases.replay_many, fmt, mode, steps, seed, timeout=170)):
        assert wrong == 0, f"rank {rank}: {wrong} of {steps} replays are wrong, the first is {first}"


@gpu
@pytest.mark.skipif(not ON_HOPPER, reason="tokens come in parts on Hopper alone")
@pytest.mark.parametrize(("fmt", "steps"), [("fp8_block", 400), ("nvfp4", 200), ("bf16", 200)])
def test_replays_in_chunks_and_parts_are_all_right(fmt: str, steps: int, ranks: Any, seed: int) -> None:
    results = ranks.run(cases.replay_many, fmt, "contiguous", steps, seed, True, timeout=170)
    for rank, (wrong, first, _) in enumerate(results):
        assert wrong == 0, f"rank {rank}: {wrong} of {steps} replays are wrong, the first is {first}"


@gpu
@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize(
    ("fmt", "wire"), [("nvfp4", "bf16"), ("bf16", "bf16"), ("fp8_block", "fp8_block"), ("mxfp8", "mxfp8")]
)
def test_the_exchange_at_reference_size_equals_the_cpu_references(
    fmt: str, wire: str, mode: str, ranks: Any, seed: int
) -> None:
    results = ranks.run(cases.exchange_at_reference_size, fmt, mode, wire, seed, timeout=170)
    settings: dict[str, Any] = {
        **cases.REFERENCE, "num_experts": 32 * WORLD, "token_format": fmt, "combine_format": wire
    }  # fmt: skip
    dispatchers = [TokenDispatcher(c, mode=mode, **settings) for c in virtual_contexts(WORLD, engine="torch")]  # type: ignore[arg-type]
    for step, counts in enumerate(cases.reference_counts(WORLD)):
        inputs = [cases.reference_input(seed + step, r, count, WORLD) for r, count in enumerate(counts)]
        handles = [d.dispatch_send(*i) for d, i in zip(dispatchers, inputs, strict=True)]
        for rank, (d, handle) in enumerate(zip(dispatchers, handles, strict=True)):
            arrived = d.dispatch_recv(handle)
            for name, expected in cases.what_arrived(arrived).items():
                assert_same_bits(results[rank][step][name], expected, f"{name} of rank {rank} in step {step}")
            d.combine_send(cases.foretold_rows(arrived, 7168, rank), handle)
        for rank, (d, handle) in enumerate(zip(dispatchers, handles, strict=True)):
            assert_same_bits(results[rank][step]["y"], d.combine_recv(handle), f"y of rank {rank} in step {step}")


@gpu
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_a_layer_of_reference_size_gives_the_same_bits_every_way(fmt: str, ranks: Any, seed: int) -> None:
    assert ranks.run(cases.reference_layer, fmt, [1, 128, 4096], seed, timeout=170) == [[]] * WORLD


@gpu
@several
def test_a_rank_that_misses_a_replay_is_named_by_the_others_in_time(ranks: Any, seed: int) -> None:
    for outcome in run_once(cases.miss_a_replay, WORLD, seed, gpus=True, timeout=120):
        name, about, phase, text, seconds = outcome.returned()
        assert (name, about, phase) == ("PeerTimeoutError", WORLD - 1, int(Phase.DISPATCH_RECV)), text
        assert f"rank {WORLD - 1} did not answer within 2 s" in text
        assert seconds < cases.TIMEOUT_S
        assert outcome.exitcode == 0


@gpu
@pytest.mark.parametrize("bad", [cases.EXPERTS, -2, 4])
def test_a_bad_expert_id_is_a_routing_error_everywhere(bad: int, ranks: Any, seed: int) -> None:
    for outcome in run_once(cases.ask_for_a_wrong_expert, WORLD, bad, seed, gpus=True, timeout=120):
        name, about, phase, text, seconds = outcome.returned()
        assert (name, about, phase) == ("RoutingError", 0, int(Phase.DISPATCH_SEND)), text
        assert f"expert id {bad} of token 2 of rank 0" in text
        assert seconds < cases.TIMEOUT_S
        assert outcome.exitcode == 0


@gpu
@several
def test_a_mistake_on_one_rank_is_heard_by_kernels_that_wait_for_it(ranks: Any, seed: int) -> None:
    for rank, outcome in enumerate(run_once(cases.call_with_a_wrong_dtype, WORLD, seed, gpus=True, timeout=120)):
        name, about, _, text, seconds = outcome.returned()
        assert (name, about) == (("ValueError", -1) if rank == 0 else ("PeerAbortedError", 0))
        assert "x: expected torch.bfloat16, got torch.float16" in text
        assert seconds < cases.TIMEOUT_S
        assert outcome.exitcode == 0


@gpu
@several
def test_a_rank_that_dies_is_named_by_the_others_in_time(ranks: Any, seed: int) -> None:
    outcomes = run_once(cases.die_before_a_step, WORLD, seed, gpus=True, timeout=120)
    assert outcomes[-1].exitcode == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        name, about, phase, _, seconds = outcome.returned()
        assert (name, about, phase) == ("PeerTimeoutError", WORLD - 1, int(Phase.DISPATCH_RECV))
        assert seconds < cases.TIMEOUT_S
        assert outcome.exitcode == 0


@gpu
@several
def test_a_group_may_be_a_part_of_the_world_but_then_not_another(ranks: Any, device: torch.device, seed: int) -> None:
    outcomes = run_once(cases.in_parts, WORLD, seed, gpus=True, timeout=120)
    size = max(1, WORLD // 2)
    for rank, outcome in enumerate(outcomes):
        y, message, transport, reason = outcome.returned()
        assert "a rank has joined other ranks in NVSHMEM before" in message
        assert transport == "collective" and reason in message
        start = rank // size * size
        inputs = [
            rank_input(seed, r, 5, cases.HIDDEN, cases.EXPERTS, cases.TOP_K).to(device)
            for r in range(start, min(start + size, WORLD))
        ]
        number = seed + rank // size
        config = cases.config("nvfp4")
        with VirtualRanks(config, len(inputs), lambda layer, n=number: layer.load_random(n), device=device) as virtual:
            expected = virtual([i.x for i in inputs], [(i.topk_idx, i.topk_weights) for i in inputs])
        assert_same_bits(y, expected[rank - start], f"rank {rank}")


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", *arguments]
    environment = os.environ | {"PYTHONPATH": python_path()}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)


@gpu
def test_processes_end_by_themselves_and_quietly(ranks: Any, tmp_path: Path, seed: int) -> None:
    """Not killed like workers: after an orderly `close()`, and after a failure that left memory behind."""
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "from moe_runtime.comm.bootstrap import init_from_env\n"
        "from tests.support import nvshmem_cases as cases\n"
        "import torch.distributed as dist\n"
        "init_from_env()\n"
        "rank, world = dist.get_rank(), dist.get_world_size()\n"
        f"cases.run_layers(rank, world, cases.LAYERS[:1], {seed})\n"
        f"error = cases.ask_for_a_wrong_expert(rank, world, 99, {seed})\n"
        "print(f'rank {rank} ended with {error[0]}', flush=True)\n"
    )
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr
    for rank in range(WORLD):
        assert f"rank {rank} ended with RoutingError" in done.stdout
    for word in ("freed implicitly", "Traceback", "Exception ignored", "Segmentation"):
        assert word not in done.stderr, done.stderr


@gpu
def test_the_doctor_tells_of_nvshmem_and_links(ranks: Any) -> None:
    done = torchrun("-m", "moe_runtime.launch.doctor", "--config", "deepseek_v3", "--world-size", "8", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["transport"]["name"] == ("nvshmem" if WORLD > 1 else "private")
    assert report["nvshmem"].startswith("3.")
    assert report["peer_access"] == [[True] * WORLD] * WORLD
    assert len(report["nvlinks"]) == WORLD
