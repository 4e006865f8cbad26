"""`launch.research.peers`: adapters give peers the right things, and a peer without a time is a row that says why.

The peers here are stand-ins of `tests/support/fake_peers`, which compute in torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from moe_runtime.config import load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.report import peers as tables
from moe_runtime.launch.report import runs
from moe_runtime.launch.research.peers import __main__ as program
from moe_runtime.launch.research.peers import ours, rank, registry
from moe_runtime.launch.research.peers.case import Case
from moe_runtime.launch.research.peers.flashinfer_layer import interleave_fp4
from tests.support.programs import ROOT, python_path, without_interpreter

pytestmark = pytest.mark.cpu_only

FAKES = ROOT / "tests" / "support" / "fake_peers"
OTHERS = [name for name, peer in registry.PEERS.items() if peer.modules]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins are importable, here and in processes that are started."""
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), python_path()]))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield
    tops = {module for peer in registry.PEERS.values() for module in peer.modules}
    for name in [name for name in sys.modules if name.split(".")[0] in tops]:
        del sys.modules[name]


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    """Of one rank of torch.distributed."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with ExpertParallelContext(device="cpu") as context:
            yield Case(load_config("tiny_cpu"), context, [5, 512], steps=2, check_tokens=4, formats=["fp8"])
    finally:
        dist.destroy_process_group()


def rows_of(name: str, case: Case, folder: Path) -> list[dict[str, Any]]:
    case.tokens = [tokens for tokens in case.tokens if registry.ALL[name].times(tokens)]
    with torch.no_grad():
        rank.run(name, case, rank.Output(folder, 0))
    lines = [json.loads(line) for line in (folder / rank.ROWS).read_text().splitlines()]
    assert [line["done"] for line in lines if "done" in line] == case.tokens
    return [line for line in lines if "status" in line]


@pytest.mark.parametrize("name", [name for name in registry.ALL if name != "ours"])
def test_a_peer_that_is_right_is_timed(name: str, case: Case, fakes: None, tmp_path: Path) -> None:
    rows = rows_of(name, case, tmp_path)
    assert [row["status"] for row in rows] == ["ok"] * len(rows) and {r["tokens_per_rank"] for r in rows} == {
        *case.tokens
    }
    for row in rows:
        assert 0 < row["smallest_us"] <= row["median_us"] <= row["largest_us"] and row["iterations"] == 2
        # Exact bf16 rows come home as they were: everything else rounds.
        exact = row["operation"].startswith("normal") and "BF16" in row["variant"]
        assert (row["error"] == 0) == exact and row["error"] <= row["bound"] < 0.8
        assert row["implementation"] == (registry.OURS if name.startswith("ours") else name)
    assert registry.ALL[name].operation in {row["operation"] for row in rows}


def test_our_layers_in_every_format(case: Case, tmp_path: Path) -> None:
    case.formats, case.tokens = list(ours.FORMATS), [5]
    rows = rows_of("ours", case, tmp_path)
    assert [(row["variant"], row["status"]) for row in rows] == [(name, "ok") for name, _ in ours.FORMATS.values()]
    assert len({row["error"] for row in rows}) == len(rows)


def test_inputs_are_those_of_the_benchmark(case: Case) -> None:
    """Rows by expert hold each (token, expert) pair once, and turns differ."""
    turns = case.turns(5)
    assert len(turns) >= 5 and not torch.equal(turns[0].x, turns[1].x)
    rows = case.rows(5)
    assert rows.sizes == torch.bincount(turns[0].idx.flatten(), minlength=16).tolist()
    wanted = [turns[0].x[(turns[0].idx == expert).any(1)] for expert in range(16)]
    assert torch.equal(rows.x, torch.cat(wanted))
    assert case.local == range(16)


@pytest.mark.parametrize(
    ("mode", "status", "error"),
    [
        ("wrong", "wrong: relative error ", True),
        ("raises", "failed: RuntimeError: no kernel; for this shape", False),
    ],
)
def test_a_peer_that_is_wrong_or_raises_is_not_timed(
    mode: str, status: str, error: bool, case: Case, fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEEP_GEMM", mode)
    rows = rows_of("deep_gemm", case, tmp_path)
    assert {row["tokens_per_rank"] for row in rows} == {5, 512}
    for row in rows:
        assert row["status"].startswith(status) and row["median_us"] is None and (row["error"] is not None) == error
    assert not (tmp_path / "error.0").exists()  # each is in a row


def test_what_peers_do_not_compute_is_refused(case: Case, fakes: None, tmp_path: Path) -> None:
    layer = case.run.layer
    gpt_oss = layer.activation.replace(order="interleaved", alpha=1.702, limit=7.0, up_offset=1.0)
    case.run = case.run.replace(layer=layer.replace(activation=gpt_oss))
    for name in ("flashinfer_push", "deep_gemm", "humming"):
        with pytest.raises(ValueError, match=r"^layer: expected plain SwiGLU without biases"):
            rank.run(name, case, rank.Output(tmp_path, 0))
    case.run = case.run.replace(layer=layer.replace(activation=layer.activation.replace(limit=10.0)))
    case.check_plain()


def options(**changes: Any) -> argparse.Namespace:
    made = {"tokens": [5, 16], "formats": ["fp8"], "steps": 2, "check_tokens": 4, "limit": 60.0, "json": None}
    return argparse.Namespace(**made | changes)


def run_all(names: list[str], tmp_path: Path, world: int = 1, **changes: Any) -> list[dict[str, Any]]:
    report: dict[str, Any] = {"results": [], "versions": dict.fromkeys(names)}
    folder = tmp_path / "scratch"
    folder.mkdir()
    program._run_all(names, options(**changes), world, folder, report, load_config("tiny_cpu"))
    return report["results"]  # type: ignore[no-any-return]


def test_a_peer_that_hangs_is_ended_and_the_next_one_runs(
    fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEEP_GEMM", "hangs")
    hung, *others = run_all(["deep_gemm", "humming"], tmp_path, limit=20.0)
    assert (hung["implementation"], hung["tokens_per_rank"]) == ("deep_gemm", None)
    assert hung["status"] == "did not end within its limit of 20 s" and hung["operation"] == "experts"
    assert [(row["implementation"], row["tokens_per_rank"], row["status"]) for row in others] == [
        ("humming", count, "ok") for count in (5, 16)
    ]


def test_a_rank_that_dies_is_named(fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEEP_GEMM", "dies")
    (row,) = run_all(["deep_gemm"], tmp_path, world=2, tokens=[5])
    assert row["status"].startswith("failed: ") and "rank 1" in row["status"] and row["median_us"] is None


def test_an_interrupted_run_names_those_without_a_turn(
    fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_of = program._results

    def interrupted(name: str, *given: Any) -> Any:
        if name == "humming":
            raise KeyboardInterrupt
        return results_of(name, *given)

    monkeypatch.setattr(program, "_results", interrupted)
    file = tmp_path / "peers.json"
    with pytest.raises(KeyboardInterrupt):
        run_all(["deep_gemm", "humming"], tmp_path, tokens=[5], json=file)
    rows = [(row["implementation"], row["status"]) for row in json.loads(file.read_text())["results"]]
    assert set(rows) == {("deep_gemm", "ok"), ("humming", program.ENDED)}


def test_under_torchrun(tmp_path: Path) -> None:
    """The whole program, with a peer that is always there and one that is not."""
    file = tmp_path / "peers.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "moe_runtime.launch.research.peers",
    ]
    more = ["--config", "tiny_cpu", "--tokens", "3", "16", "--formats", "fp8", "--steps", "2", "--json", str(file)]
    done = subprocess.run(
        [*command, *more, "--peers", "torch", "humming"],
        env=without_interpreter(PYTHONPATH=python_path()),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    record = report["environment"]
    assert runs.kind_of(report) == runs.PEERS and record["ranks"] == 2 and record["device"] == "cpu"
    assert "--nproc-per-node=2 -m moe_runtime.launch.research.peers" in record["command"]
    assert record["git_commit"] and record["processor"] and record["packages"]["torch"]
    assert report["versions"] == {"torch": None, "humming": None} and report["written_for"]["humming"] == "0.1.19"
    found = [(r["operation"], r["implementation"], r["tokens_per_rank"], r["status"]) for r in report["results"]]
    assert found == [
        *(("layer", "moe_runtime", count, "ok") for count in (3, 16)),
        *(("layer", "torch", count, "ok") for count in (3, 16)),
        *(("experts", "moe_runtime", count, "ok") for count in (3, 16)),
        ("experts", "humming", None, "not installed: humming (pip install humming-kernels==0.1.19)"),
    ]
    assert "torch BF16" in done.stdout and "Humming, experts: not installed: humming" in done.stdout


def test_options_that_cannot_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["--config", "tiny_cpu", "--peers", "torch", "--tokens"]
    for more, message in (
        (["0"], "--tokens: expected at least 1"),
        (["1", "--limit", "0"], "--limit: expected seconds above 0, got 0"),
        (["1", "--steps", "0"], "--steps: expected at least 1"),
        (["1", "--json", str(tmp_path / "no" / "a.json")], "--json: no folder"),
    ):
        assert program.main([*ask, *more]) == 2
        assert message in capsys.readouterr().err


def test_ours_stands_before_each_peer_once() -> None:
    assert registry.with_ours(["torch", "deep_gemm", "flashinfer_push"]) == [
        *("ours", "torch", "ours_experts_fp8", "deep_gemm", "flashinfer_push")
    ]
    assert all(peer.install and peer.written_for for peer in map(registry.PEERS.__getitem__, OTHERS))
    assert set(OTHERS) == registry.PEERS.keys() - {"torch"} and set(tables.NAMES) == {registry.OURS, *registry.PEERS}


def test_interleaving_moves_every_bit_to_a_place_of_its_own() -> None:
    """One bit of 512 bytes at a time."""
    bits = 16 * 32 * 8
    one = torch.zeros(bits, bits // 8, dtype=torch.uint8)
    number = torch.arange(bits)
    one[number, number // 8] = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8).repeat(bits // 8)
    moved = interleave_fp4(one.view(bits, 16, 32)).view(bits, -1)
    as_bits = ((moved[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(bits, -1)
    assert (as_bits.sum(1) == 1).all() and (as_bits.sum(0) == 1).all()
    magnitudes, signs = torch.tensor([0x77, 0x88], dtype=torch.uint8)[:, None, None]
    of_signs = (one & signs).bool().any(1)
    assert torch.equal((moved & signs).bool().any(1), of_signs)  # signs stay signs, of other numbers
    assert torch.equal((moved & magnitudes).bool().any(1), ~of_signs)


def test_a_table_has_every_time_and_what_has_none() -> None:
    def row(by: str, count: int | None, us: float | None, status: str = "ok", **more: Any) -> dict[str, Any]:
        fields = {"operation": "layer", "implementation": by, "variant": "FP8", "tokens_per_rank": count}
        return fields | {"median_us": us, "status": status, "error": 0.05, "note": ""} | more

    layer = {"hidden_size": 1, "intermediate_size": 2, "num_experts": 4, "top_k": 2}
    gpu = {"ranks": 2, "gpus": [{"name": "NVIDIA H200"}], "driver": "1.2", "git_commit": "0123456789"}
    packages = {"packages": {"torch": "2.11.0", "triton": "3.6.0"}, "git_modified_files": 0}
    report = {
        "kind": runs.PEERS,
        "environment": gpu | packages,
        "config": {"layer": layer},
        "versions": {"flashinfer_push": "0.7.4", "deep_gemm": None},
        "results": [
            row("flashinfer_push", 8, 575.4),
            row("flashinfer_push", 32, None, "failed: no"),
            row("moe_runtime", 8, 469.2, error=0.063),
            row("moe_runtime", 32, 66.71),
            row("deep_gemm", None, None, "not installed: deep_gemm", operation="experts", variant=""),
        ],
    }
    heads, lines = tables.rows_of(report, "layer", lambda result: f"{result['median_us']:.0f}")
    assert heads == ["", "8", "32", "error"]
    assert lines == [["ours FP8", "469", "67", "0.063"], ["FlashInfer push FP8", "575", "", "0.05"]]
    assert tables.excuses(report) == [
        "FlashInfer push FP8, layer, T = 32: failed: no",
        "DeepGEMM, experts: not installed: deep_gemm",
    ]
    console = Console(record=True, width=200)
    tables.show_peers(report, console)
    text = console.export_text()
    assert "2 x NVIDIA H200, driver 1.2" in text and "commit 0123456" in text
    assert "versions of peers: flashinfer_push 0.7.4" in text and "66.7" in text
