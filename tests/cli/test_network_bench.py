"""`bench` over several hosts: results are checked in their order, and bytes and floors of the network are told."""

from __future__ import annotations

import argparse
import doctest
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.comm.errors import Phase
from moe_runtime.comm.host_link import PrivateLink
from moe_runtime.comm.hosts import Hosts
from moe_runtime.config import load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.memory import layer_geometry
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from moe_runtime.launch import bench
from moe_runtime.launch.benchmarks import checks, layer_bench, layer_report, network
from moe_runtime.launch.common import cases, draws
from moe_runtime.virtual import VirtualRanks
from tests.cli.test_launch import program

FOUR_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
HIDDEN, EXPERTS, TOP_K, TOKENS = 128, 8, 2, 12


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    sizes = f"hidden_size: {HIDDEN}, intermediate_size: 128, num_experts: {EXPERTS}, top_k: {TOP_K}"
    file.write_text(f"layer: {{{sizes}, max_tokens_per_rank: {TOKENS}, token_format: nvfp4}}\nseed: 3\n")
    return file


def most_sent_inside(num_bytes: int) -> float:
    """Bytes that the busiest rank of 2x2 sends to the other one of its host, or gets from it; mean over the inputs.

    Token of rank `r` of any host: rank `r` of each host sends it to rank `1 - r` there if that has an expert of it.
    """
    per_rank, found = EXPERTS // 4, []
    for turn in range(layer_bench.TURNS):
        sent = [0] * 4
        for source in range(4):
            ids_TK, _ = draws.routing("uniform", 3, source, turn, TOKENS, EXPERTS, TOP_K)
            for owners in (ids_TK // per_rank).tolist():
                for host in range(2):
                    sent[2 * host + source % 2] += 2 * host + 1 - source % 2 in owners
        found.append(max(sent) * num_bytes)
    return statistics.mean(found)


@pytest.mark.cpu_only
def test_two_hosts_of_two_ranks_are_checked_and_their_bytes_told(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ("dispatch", "combine", "gemm", "layer", "--config", config, "--hosts", 2, "--steps", 2)
    done = program("bench", *arguments, "--combine-format", "bf16", "mxfp8", "--json", file, launcher=FOUR_RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["passed"] is True and report["environment"]["transport"] == "hierarchical"
    # 64 bytes of quants, and 16 each of block scales, row scale, source, ids and weights, aligned to 128.
    record = 256
    dispatch = -(-TOKENS * (record + 4) // 128) * 128 + 128
    combine = {"bf16": (TOKENS + 1) * 2 * HIDDEN, "mxfp8": (TOKENS + 1) * (HIDDEN + 16)}
    for wire, sums in combine.items():
        ours = {
            r["operation"]: r
            for r in report["results"]
            if r["implementation"] == layer_report.OURS and r["combine_format"] == wire
        }
        sent = {"dispatch": dispatch, "combine": sums, "dispatch+combine": dispatch + sums, "layer": dispatch + sums}
        assert {name: r["network_bytes"] for name, r in ours.items() if r["network_bytes"]} == sent
        for result in ours.values():
            assert (result["hosts"], result["ranks_per_host"], result["link"]) == (2, 2, "gloo")
            assert result["check"] is None or result["check"]["passed"]
        for name in sent:
            floor, rate = ours[name]["network_floor_us"], ours[name]["network_gb_per_s"]
            assert floor == pytest.approx(sent[name] / rate * 1e-3) and floor > 0
            assert ours[name]["floor_us"] == (None if name == "layer" else floor)
        moved = {"dispatch": most_sent_inside(record), "combine": most_sent_inside(2 * HIDDEN)}
        assert {name: ours[name]["moved_bytes"] for name in moved} == moved
        parts = ours["dispatch"]["network_floor_us"] + ours["combine"]["network_floor_us"]
        assert ours["layer"]["network_floor_us"] == pytest.approx(parts)
    for peer in (r for r in report["results"] if r["implementation"] == "torch all_to_all_single"):
        # Measured with our bytes, the rate says nothing of others.
        assert peer["network_bytes"] > 0 and peer["network_floor_us"] is None and peer["hosts"] == 2
    assert "2x2" in done.stdout and "gloo" in done.stdout and "network MB" in done.stdout


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize(("num_hosts", "world"), [(2, 4), (3, 3)])
def test_checks_know_the_order_of_rows_on_several_hosts(fmt: str, num_hosts: int, world: int, seed: int) -> None:
    """And refuse that of one host, and tokens of other places."""
    layer = cases.with_token_format(load_config("tiny_cpu").layer, fmt).replace(num_experts=12)
    counts = [9 + rank for rank in range(world)]
    with VirtualRanks(layer, world, lambda one: one.load_random(seed), num_hosts=num_hosts) as ranks:
        parts = [cases.step_inputs(one, "uniform", seed, r, 0, counts[r]) for r, one in enumerate(ranks.layers)]
        inputs = checks.Inputs(*zip(*parts, strict=True))
        dispatchers = [one.dispatcher for one in ranks.layers]
        handles = [d.dispatch_send(*part) for d, part in zip(dispatchers, parts, strict=True)]
        for d, handle in zip(dispatchers, handles, strict=True):
            d._exchange.dispatch_forward(handle)
        arrived = [d.dispatch_recv(handle) for d, handle in zip(dispatchers, handles, strict=True)]
        hosts = [context.hosts for context in ranks.contexts]
        ours = [checks.check_dispatch(rows, inputs, h).passed for rows, h in zip(arrived, hosts, strict=True)]
        assert all(ours)
        if num_hosts < world:
            assert not all(checks.check_dispatch(rows, inputs).passed for rows in arrived)
        rows = [checks.combine_input(one, inputs, h) for one, h in zip(arrived, hosts, strict=True)]
        for d, one, handle in zip(dispatchers, rows, handles, strict=True):
            d.combine_send(one, handle)
        for d, handle in zip(dispatchers, handles, strict=True):
            d._exchange.combine_forward(handle)
        for rank, (d, handle) in enumerate(zip(dispatchers, handles, strict=True)):
            y_TH = d.combine_recv(handle)
            assert checks.check_combine(y_TH, inputs, d.geometry, hosts[rank]).passed
            assert not checks.check_combine(y_TH.roll(1, 0), inputs, d.geometry, hosts[rank]).passed


def test_the_link_is_timed_in_the_parts_of_a_step() -> None:
    """All parts of an exchange are under way before the first is awaited, and together they are its chunk."""
    seen: list[Any] = []
    hosts = Hosts(3, 1, 1, 0)

    class Recorder(PrivateLink):
        def start(self, outgoing: Any, incoming: Any, phase: Phase, part: int, limit_s: float) -> Any:
            seen.append((phase, part, [[len(chunk) for chunk in chunks] for chunks in (outgoing, incoming)]))
            return self

        def wait(self) -> None:
            seen.append("wait")

    config = load_config("tiny_cpu").layer.replace(max_tokens_per_rank=2000, host_capacity=1100, num_experts=12)
    geometry = HostGeometry(hosts, layer_geometry(config, 3), capacity=config.host_capacity)
    assert len(geometry.parts) == 2
    with ExpertParallelContext(engine="torch", device="cpu") as context, pytest.MonkeyPatch.context() as patched:
        patched.setattr(context, "link", Recorder(hosts, []))
        for name, chunk in (("dispatch", geometry.dispatch_chunk), ("combine", geometry.combine_chunk)):
            seen.clear()
            timing = network.time_link(context, geometry, name, 1)
            assert len(timing.iterations_us) == 1
            first, second, *waits = seen[-4:]
            assert waits == ["wait"] * 2 and [first[:2], second[:2]] == [
                (network.PHASES[name], part) for part in (0, 1)
            ]
            for part in (first, second):
                assert part[2][0] == part[2][1] == [part[2][0][0]] * 3
            assert first[2][0][0] + second[2][0][0] == chunk


def test_worked_examples() -> None:
    for module in (network, checks):
        found = doctest.testmod(module, extraglobs={"torch": torch, "Hosts": Hosts})
        assert found.attempted and not found.failed


def test_a_given_rate_counts_for_ours_and_for_torch() -> None:
    rates = dict.fromkeys(network.PHASES, 2.0)
    given = network.Network(Hosts(4, 2, 0, 0), "nccl", {"dispatch": 6000, "combine": 14000}, rates, given=True)
    ours = given.record("dispatch+combine")
    assert ours == {
        "hosts": 4,
        "ranks_per_host": 2,
        "link": "nccl",
        "network_bytes": 20000,
        "network_gb_per_s": pytest.approx(2.0),
        "network_floor_us": 10.0,
    }
    assert given.record("gemm down") | network.NO_NETWORK == network.NO_NETWORK
    assert given.baseline_record(9000.0)["network_floor_us"] == 4.5
    assert given.baseline_record(None)["network_bytes"] is None


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_rates_are_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="--network-gb-per-s: expected a positive number"):
        network.given_rate(argparse.Namespace(network_gb_per_s=rate))
    assert network.given_rate(argparse.Namespace(network_gb_per_s=45.0)) == 45.0


def test_ranks_are_taken_for_those_of_hosts() -> None:
    def names(num_hosts: int, **more: str) -> list[dict[str, str]]:
        found = []
        for rank in range(4):
            variables = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", **more}
            network.take_for_hosts(num_hosts, variables)
            found.append(variables)
        return found

    two = names(2, NCCL_NET="IB")
    assert [one["MOE_RUNTIME_HOST"] for one in two] == ["host0", "host0", "host1", "host1"]
    assert [one["NCCL_HOSTID"] for one in two] == ["host0", "host0", "host1", "host1"]
    assert two[0]["NCCL_NET"] == "IB" and names(4)[3]["NCCL_NET"] == "Socket"
    assert "MOE_RUNTIME_HOST" not in names(1)[0]
    for wrong, message in (
        ({"num_hosts": 3}, "--hosts: expected a divisor of 4 ranks, got 3"),
        ({"num_hosts": 0}, "--hosts: expected a divisor of 4 ranks, got 0"),
        ({"num_hosts": 2, "MOE_RUNTIME_HOST": "a"}, "--hosts: MOE_RUNTIME_HOST names the host of each rank already"),
        ({"num_hosts": 2, "LOCAL_WORLD_SIZE": "2"}, "--hosts: expected the ranks of one machine, 2 of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            names(**wrong)  # type: ignore[arg-type]


def test_one_rank_is_no_two_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--hosts", "2"]) == 2
    assert "--hosts: expected a divisor of 1 ranks, got 2" in capsys.readouterr().err
