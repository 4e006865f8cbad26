"""Pictures show the numbers of the JSON; broken runs are left out, what does not belong together is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.launch import layer_report, pictures, torch_layer, unfused_layer
from tests.programs import ROOT

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.cpu_only

COMMITTED = ROOT / "launch" / "results" / "h200x4.json"


def result(operation: str, count: int, us: float | None, by: str = "moe_runtime", **changes: Any) -> dict[str, Any]:
    made = {
        "operation": operation,
        "implementation": by,
        "tokens_per_rank": count,
        "token_format": "nvfp4",
        "weight_format": "nvfp4",
        "combine_format": "bf16",
        "mode": "indexed",
        "routing": "uniform",
        "median_us": us,
        "floor_us": None,
        "phases": None,
    }
    return made | changes


def report(ranks: int, *results: dict[str, Any]) -> dict[str, Any]:
    layer = {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8}
    where = {"ranks": ranks, "gpus": [{"name": "NVIDIA H200"}] * ranks, "processor": "a CPU"}
    return {"environment": where, "config": {"layer": layer}, "results": list(results)}


def runs() -> list[dict[str, Any]]:
    phases = {
        name: {"mean_us": us, "largest_us": 9.0} for name, us in (("experts", 40.0), ("gate_up", 30.0), ("down", 10.0))
    }
    return [
        report(2, result("layer", 8, 300.0), result("layer", 8, 900.0, torch_layer.NAME)),
        report(
            8,
            result("dispatch", 128, 20.0, floor_us=6.0),
            result("dispatch", 8, 10.0, floor_us=1.0),
            result("dispatch", 8, 12.0, "torch all_to_all_single"),
            result("dispatch", 128, 19.0, routing="zipf"),
            result("dispatch", 4096, None),
            result("layer", 8, 250.0, phases=phases),
            result("layer", 8, 800.0, torch_layer.NAME),
            result("layer", 8, 333.0, unfused_layer.NAME),
            result("layer", 8, 260.0, token_format="fp8_block"),
            result("layer", 8, 700.0, torch_layer.NAME, token_format="fp8_block"),
        ),
    ]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `draw` draws, by name."""
    found: dict[str, Any] = {}
    save = pictures.save

    def kept(figure: Any, file: Path, kind: str) -> None:
        found[kind] = figure
        save(figure, file, kind)

    monkeypatch.setattr(pictures, "save", kept)
    return found


def lines(axes: Any) -> list[tuple[list[float], list[float]]]:
    """Points of every line but those that are there for the legend."""
    found = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    return [points for points in found if points[0]]


def test_pictures_show_the_numbers(tmp_path: Path, figures: dict[str, Any]) -> None:
    files = pictures.draw(runs(), tmp_path)
    assert [file.name for file in files] == ["dispatch.svg", "layer.svg", "phases.svg", "scaling.svg"]
    first = {file: file.read_bytes() for file in files}
    assert {file: file.read_bytes() for file in pictures.draw(runs(), tmp_path)} == first
    uniform, zipf = figures["dispatch"].axes
    assert uniform.get_legend_handles_labels()[1][-1] == "floor of the bytes"
    assert lines(uniform) == [([8, 128], [10.0, 20.0]), ([8], [12.0]), ([8, 128], [1.0, 6.0])]
    assert lines(zipf) == [([128], [19.0])]
    (layer,) = figures["layer"].axes
    # The layer of torch is in bf16 beside both: the faster of its times.
    assert lines(layer) == [([8], [250.0]), ([8], [260.0]), ([8], [333.0]), ([8], [700.0])]
    (scaling,) = figures["scaling"].axes
    assert sorted(lines(scaling)) == [([2, 8], [300.0, 250.0]), ([2, 8], [900.0, 700.0])]
    (phases,) = figures["phases"].axes
    assert [label.get_text() for label in phases.get_yticklabels()] == ["nvfp4 > bf16, T=8, uniform: 40 us"]
    assert [(bar.get_x(), bar.get_width()) for bar in phases.patches] == [(0.0, 0.75), (0.75, 0.25)]


def test_a_run_without_floors_and_other_layers_is_drawn_too(tmp_path: Path, figures: dict[str, Any]) -> None:
    run = json.loads(COMMITTED.read_text())
    run["results"] = [
        {name: value for name, value in r.items() if name != "floor_us"}
        for r in run["results"]
        if r["operation"] != "layer" or r["implementation"] == "moe_runtime"
    ]
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert pictures.main([str(tmp_path / "run.json"), "--folder", str(tmp_path)]) == 0
    assert list(figures) == ["dispatch", "combine", "layer"]
    assert len(lines(figures["layer"].axes[0])) == len({r["token_format"] for r in run["results"]})


def test_a_committed_run_is_drawn(tmp_path: Path, figures: dict[str, Any]) -> None:
    assert pictures.main([str(COMMITTED), "--folder", str(tmp_path)]) == 0
    assert list(figures) == ["dispatch", "combine", "layer"]
    formats = {r["token_format"] for r in json.loads(COMMITTED.read_text())["results"]}
    assert len(lines(figures["layer"].axes[0])) == 2 * len(formats) + 1  # torch's is in bf16 beside all of them


def test_runs_of_as_many_ranks_are_shown_together(tmp_path: Path, figures: dict[str, Any]) -> None:
    parts = [report(4, result("layer", 8, 30.0)), report(4, result("layer", 64, 40.0), result("layer", 8, 31.0))]
    assert [file.name for file in pictures.draw(parts, tmp_path)] == ["layer.svg"]
    assert lines(figures["layer"].axes[0]) == [([8, 64], [31.0, 40.0])]


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    other = copy.deepcopy(runs()[0])
    other["config"]["layer"]["num_experts"] = 128
    with pytest.raises(ValueError, match=r"RUN: expected runs of one model, got .*experts 256.*; .*experts 128"):
        pictures.draw([runs()[1], other], tmp_path)
    other = copy.deepcopy(runs()[0])
    other["config"]["layer"] |= {"num_sms": 16}
    with pytest.raises(ValueError, match=r"RUN: expected runs of one model, got .*top_k 8; .*top_k 8, num_sms 16$"):
        pictures.draw([runs()[1], other], tmp_path)
    other = copy.deepcopy(runs()[0])
    other["environment"]["gpus"] = []
    with pytest.raises(ValueError, match="RUN: expected runs of one GPU, got NVIDIA H200; a CPU"):
        pictures.draw([runs()[1], other], tmp_path)
    with pytest.raises(ValueError, match="RUN: nothing to draw"):
        pictures.draw([report(2, result("layer", 8, None))], tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError: "),
        ("[]", "AttributeError: "),
        ('{"kind": "gemm"}', "got kind gemm"),
        ('{"results": []}', "KeyError: 'environment'"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    assert pictures.main([str(file), "--folder", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    what = "pictures: left out run.json: expected the JSON of launch.bench over a config"
    assert error.startswith(f"{what}, {message}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("same", "label"), [(True, "351 GB/s"), (None, "351 GB/s"), (False, "351 GB/s of NVIDIA H100")]
)
def test_floors_are_told_with_their_rate(
    same: bool | None, label: str, tmp_path: Path, figures: dict[str, Any]
) -> None:
    (_, large) = runs()
    large["link"] = {"gb_per_s": 351.0, "gpu": "NVIDIA H100", "same_gpu": same}
    pictures.draw([large], tmp_path)
    assert figures["dispatch"].axes[0].get_legend_handles_labels()[1][-1] == f"floor of the bytes at {label}"


def test_floors_of_unlike_rates_have_no_rate_in_their_label(tmp_path: Path, figures: dict[str, Any]) -> None:
    """What is drawn is of several runs, the label of all of them; a run without floors has no say."""
    own = {"gb_per_s": 351.0, "gpu": "NVIDIA H200", "same_gpu": True}
    links: list[tuple[dict[str, Any] | None, str]] = [
        (own, " at 351 GB/s"),
        (own | {"gb_per_s": 450.0}, ""),
        (own | {"gpu": "NVIDIA H100", "same_gpu": False}, ""),
        (None, ""),
    ]
    for other, label in links:
        for order in (1, -1):
            parts = [
                report(4, result("dispatch", 8, 10.0, floor_us=1.0)) | {"link": own},
                report(4, result("dispatch", 64, 20.0, floor_us=6.0)) | {"link": other},
                report(4, result("dispatch", 128, 30.0)) | {"link": own | {"gb_per_s": 1.0}},
            ]
            pictures.draw(parts[::order], tmp_path)
            (axes,) = figures["dispatch"].axes
            assert lines(axes)[-1] == ([8, 64], [1.0, 6.0])
            assert axes.get_legend_handles_labels()[1][-1] == f"floor of the bytes{label}"


def test_a_run_that_is_missing_or_broken_is_left_out(
    tmp_path: Path, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever it is: with the largest gone, the others are drawn."""
    small, large = runs()
    files = [tmp_path / name for name in ("small.json", "cut_off.json", "missing.json", "old.json")]
    files[0].write_text(json.dumps(small))
    files[1].write_text(json.dumps(large)[:-100])
    del large["results"][3]["median_us"]
    files[3].write_text(json.dumps(large))
    assert pictures.main([*map(str, files), "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.split() == [str(tmp_path / "layer.svg")]
    cut_off, missing, old = said.err.splitlines()
    assert cut_off.startswith("pictures: left out cut_off.json: expected the JSON of launch.bench over a config, ")
    assert missing == "pictures: left out missing.json: No such file or directory"
    assert old == "pictures: left out old.json: expected the JSON of launch.bench over a config, KeyError: 'median_us'"
    assert lines(figures["layer"].axes[0]) == [([8], [300.0]), ([8], [900.0])]


def test_phases_are_those_of_the_run_that_was_traced(tmp_path: Path, figures: dict[str, Any]) -> None:
    """Of most ranks among those; what it did not time takes no picture away from the others."""
    small, large = runs()
    traced = [
        report(ranks, result("layer", count, None, phases={"down": {"mean_us": 7.0 * ranks, "largest_us": 99.0}}))
        for ranks, count in ((2, 16), (4, 8))
    ]
    for one in traced:
        one["kind"] = layer_report.PHASES_KIND
    (before,) = (r for r in large["results"] if r["phases"])
    before["phases"] = None
    pictures.draw([small, large, *traced], tmp_path)
    (phases,) = figures["phases"].axes
    assert [label.get_text() for label in phases.get_yticklabels()] == ["nvfp4 > bf16, T=8, uniform: 28 us"]
    assert "4 x NVIDIA H200" in phases.get_title()
    assert lines(figures["layer"].axes[0])[0] == ([8], [250.0])
    larger = report(16, *traced[1]["results"]) | {"kind": layer_report.PHASES_KIND}
    pictures.draw([small, large, larger], tmp_path)
    assert lines(figures["layer"].axes[0])[0] == ([8], [250.0])


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pictures.main([str(COMMITTED), "--folder", str(tmp_path / "no")]) == 2
    assert "pictures: --folder: no folder " in capsys.readouterr().err
