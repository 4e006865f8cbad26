"""`research.mxfp4_peer` without a GPU and without Humming: small sizes, and a stand-in that computes in float64."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import MXFP4
from moe_runtime.kernels.formats.reference_quantize import swizzle_scales
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.research import mxfp4_peer
from moe_runtime.launch.research.mxfp4_peer import Routed, Weights

TILE = 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"EXPERTS": 6, "ROWS": 48, "COLUMNS": 96, "TOP_K": 2}.items():
        monkeypatch.setattr(mxfp4_peer, name, size)


class StandIn(torch.nn.Module):
    """As `HummingLayer`; `wrong` spoils an element of each row."""

    wrong = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.humming_config = arguments

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.weights = Weights(tensors["weight"], tensors["weight_scale"])

    def transform(self) -> None:
        pass

    def forward(self, x: torch.Tensor, *, outputs: torch.Tensor, compute_config: dict[str, str], **more: Any) -> None:
        tiles = more["tuning_config"]
        if compute_config["gemm_type"] == "indexed":
            assert int(more["num_tokens_padded"]) == more["sorted_ids"].numel() == more["expert_ids"].numel() * TILE
            places = more["sorted_ids"].long().view(-1, tiles["block_shape"][0])
            for expert, tile in zip(more["expert_ids"].tolist(), places, strict=True):
                tile = tile[tile < outputs.shape[0]]
                outputs[tile] = (x[tile // more["top_k"]].double() @ self.weights.float64(expert).T).to(outputs.dtype)
        else:
            offsets = more["expert_layout"].tolist()
            for expert, (start, end) in enumerate(pairwise(offsets)):
                outputs[start:end] = (x[start:end].double() @ self.weights.float64(expert).T).to(outputs.dtype)
        if self.wrong:
            outputs[:, 0] += 100.0


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [(0, 8, {"block_shape": (TILE, 128, 64)}), (8, 1 << 20, {"block_shape": (TILE, 256, 64)})]
    monkeypatch.setattr(StandIn, "wrong", False)
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=StandIn))
    tune = SimpleNamespace(get_heuristics_config=lambda config, gemm_type: ranges)
    monkeypatch.setitem(sys.modules, "humming.tune", tune)


@pytest.mark.cpu_only
@pytest.mark.parametrize("wrong", [False, True])
def test_both_are_checked_and_timed_on_the_same_rows(
    wrong: bool, humming: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "wrong", wrong)
    with ExpertParallelContext(device="cpu") as context:
        results = mxfp4_peer.run(context, [1, 21], 2)
    names = ["moe_runtime", "humming, by expert", "humming, by index"]
    assert [(r["tokens"], r["implementation"]) for r in results] == [(t, name) for t in (1, 21) for name in names]
    for result in results:
        assert result["passed"] == (not wrong or result["implementation"] == "moe_runtime"), result
        assert result["ratio"] == pytest.approx(1.0) or result["implementation"] != "moe_runtime"
        assert result["median_us"] > 0 and result["work_flop"] == result["tokens"] * 2 * 2 * 48 * 96
    json.dumps(results)


@pytest.mark.cpu_only
def test_weights_are_those_of_the_format(seed: int) -> None:
    """The values of `float64` are those that `ExpertWeights` has for the same bytes."""
    weights = Weights.draw(torch.device("cpu"))
    w = ExpertWeights(MXFP4, weights.quants, swizzle_scales(weights.scales))
    expert = seed % mxfp4_peer.EXPERTS
    assert torch.equal(weights.float64(expert), w.dequantize()[expert].double())


@pytest.mark.cpu_only
def test_what_is_not_written_or_not_finite_fails() -> None:
    device = torch.device("cpu")
    weights, routed = Weights.draw(device), Routed.draw(9, 0, device)
    found = mxfp4_peer.here(weights.here(), [routed])(0)
    assert mxfp4_peer.relative_error(weights, routed, found) <= mxfp4_peer.BOUND
    found[5, 7] = float("nan")
    assert mxfp4_peer.relative_error(weights, routed, found) == float("inf")


@pytest.mark.cpu_only
def test_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        assert mxfp4_peer.main(["--json", str(tmp_path / "peer.json")]) == 2
        assert capsys.readouterr().err == "mxfp4_peer: expected a Hopper GPU\n"
    monkeypatch.setitem(sys.modules, "humming", None)
    with pytest.raises(ValueError, match=r"^pip install humming-kernels"):
        mxfp4_peer.Humming(Weights.draw(torch.device("cpu")))
