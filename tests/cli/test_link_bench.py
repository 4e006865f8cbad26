"""The program that times ways of copying between GPUs: what it prints, and what its kernel compiles to."""

from __future__ import annotations

import pytest

from moe_runtime.kernels.nvrtc import compile_source
from moe_runtime.kernels.runtime import has_nvrtc
from moe_runtime.launch.research import link_bench
from moe_runtime.launch.research.copy_ways import SOURCE, WAYS, defines


@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")
@pytest.mark.parametrize("way", WAYS)
def test_ways_are_what_they_are_called(way: str) -> None:
    ptx = compile_source(SOURCE, defines(way, 8), "compute_90a").decode()
    assert ("cp.async.bulk.global.shared::cta.bulk_group" in ptx) == (way == "bulk")


@pytest.mark.parametrize(("megabytes", "num_bytes"), [(0.0001, 4096), (0.05, 49152), (40, 40001536)])
def test_sizes_are_whole_pieces(megabytes: float, num_bytes: int) -> None:
    assert link_bench.piece_bytes(megabytes) == num_bytes


def test_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    if link_bench.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert link_bench.main([]) == 2
    assert capsys.readouterr().err == "link_bench: device: expected GPUs, got none\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "no/such/links.json"], "--json: no folder no/such"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--blocks", "8", "-1"], "--blocks: expected at least 1, got -1"),
        (["--megabytes", "1", "0"], "--megabytes: expected positive numbers, got 0"),
        (["--megabytes", "nan"], "--megabytes: expected positive numbers, got nan"),
    ],
)
def test_mistakes_are_told_before_the_work(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(timeout_s: float) -> None:
        raise AssertionError("it joins the ranks")

    monkeypatch.setattr(link_bench, "init_from_env", begun)
    assert link_bench.main(arguments) == 2
    with pytest.raises(ValueError):
        link_bench.main([*arguments, "--debug"])
    assert capsys.readouterr().err == f"link_bench: {message}\n"
