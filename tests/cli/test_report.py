"""`launch.report`: tables, comparisons and plots say what the JSON says, and committed results stay readable."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.launch.benchmarks import torch_layer
from moe_runtime.launch.common.environment import write_json
from moe_runtime.launch.kernel_bench import __main__ as kernel_bench
from moe_runtime.launch.kernel_bench.show import commit_of, gpu_of
from moe_runtime.launch.kernel_bench.show import where as where_ran
from moe_runtime.launch.report import __main__ as report
from moe_runtime.launch.report import pages, peers, plot, runs
from moe_runtime.launch.report.goals import GOALS_US
from tests.support.programs import ROOT

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "launch" / "results"
FILES = sorted(file.name for file in RESULTS.glob("*.json"))


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
        "smallest_us": us,
        "largest_us": us,
        "floor_us": None,
        "phases": None,
    }
    return made | changes


def run(ranks: int, *results: dict[str, Any]) -> dict[str, Any]:
    layer = {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8}
    where = {
        "ranks": ranks,
        "device": "cuda",
        "gpus": [{"name": "NVIDIA H200"}] * ranks,
        "processor": "a CPU",
        "driver": "1.2",
        "packages": {"torch": "2.11.0", "triton": "3.6.0"},
        "git_commit": "0123456789",
        "git_modified_files": 0,
    }
    return {"environment": where, "config": {"layer": layer}, "results": list(results)}


def write(folder: Path, **reports: Any) -> list[str]:
    for name, made in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(made))
    return [str(folder / f"{name}.json") for name in reports]


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


TIMED = (*runs.NAMED_BY, runs.LOADING)
"""Kinds with times."""


# Show


@pytest.mark.parametrize("name", FILES)
def test_every_committed_run_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["show", str(RESULTS / name)]) == 0
    out = capsys.readouterr().out
    assert "│" in out and "FAILED" not in out


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "JSONDecodeError: "), ("[]", "AttributeError: "), ('{"results": []}', "KeyError: 'environment'")],
)
def test_other_files_are_refused_in_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(text)
    for command in (["show"], ["plot", "--folder", str(tmp_path)]):
        assert report.main([*command, str(tmp_path / "x.json")]) == 2
        error = capsys.readouterr().err
        assert "x.json: expected the JSON of " in error and message in error and error.count("\n") == 1
    assert report.main(["show", str(tmp_path / "no.json")]) == 2
    assert capsys.readouterr().err == "report: no.json: No such file or directory\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h200x2.json", torch_layer.NAME),
        ("soak_h200x2_nvfp4.json", "NVIDIA H200"),
        ("gemm_h200.json", "8x16"),
        ("ops_checked.json", "grouped_matmul_dynamic_scaled_nvfp4"),
    ],
)
def test_texts_of_a_run_are_shown_as_they_are(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are no markup of the console."""
    found = json.loads(json.dumps(load(name)).replace(text, "torch [/x]"))
    assert report.main(["show", *write(tmp_path, a=found)]) == 0
    assert "torch [/x]" in capsys.readouterr().out


def test_json_has_a_line_for_each_result(tmp_path: Path) -> None:
    found = {"kind": "x", "results": [{"a": [1, 2]}, {"b": None}], "none": [], "environment": {"c": "\u00e9"}}
    write_json(tmp_path / "x.json", found)
    assert json.loads((tmp_path / "x.json").read_text()) == found
    lines = (tmp_path / "x.json").read_text().splitlines()
    assert lines[2:6] == ['"results": [', '{"a":[1,2]},', '{"b":null}', "],"]


# Compare


@pytest.mark.parametrize("name", [name for name in FILES if runs.kind_of(load(name)) in TIMED])
def test_committed_runs_are_within_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    count = len(runs.figures(load(name)))
    assert report.main(["compare", *[str(RESULTS / name)] * 2]) == 0
    out = capsys.readouterr().out
    assert " are within the spread of A; not compared: " in out and " in A, " not in out and count > 1


def test_each_time_is_compared_with_its_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ends belong to the spread; faster is outside too; what one run did not time is named."""
    a = load("links_h200x4.json")
    a["results"] = [dict(r, median_us=10.0, smallest_us=9.0, largest_us=12.0) for r in a["results"][:6]]
    b = copy.deepcopy(a)
    for one, us in zip(b["results"], (9.0, 12.0, 10.5), strict=False):
        one["median_us"] = us
    a["results"][5]["median_us"] = None
    del b["results"][4]
    assert report.main(["compare", *write(tmp_path, a=a, b=b)]) == 0
    assert "4 of 4 times are within the spread of A; not compared: 2 of A, 1 of B" in capsys.readouterr().out
    for us, place, ratio in ((8.99, "faster", "0.899"), (12.01, "slower", "1.201"), (None, "not timed", "")):
        b["results"][1]["median_us"] = us
        assert report.main(["compare", *write(tmp_path, a=a, b=b)]) == 1
        rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
        cells = [[cell.strip() for cell in row] for row in rows]
        (outside,) = (row for row in cells if row[-1] != "within")
        assert outside[1:] == ["10.0", "9.0 - 12.0", "" if us is None else f"{us:.1f}", ratio, place]


def test_differences_of_the_machines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = load("h200x2.json")
    b = copy.deepcopy(a)
    b["environment"] |= {"driver": "1.2.3", "gpus": [{"name": "NVIDIA H100"}] * 2}
    b["environment"]["packages"] |= {"triton": None}
    assert report.main(["compare", *write(tmp_path, a=a, b=b)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if " in A, " in line] == [
        "GPUs: NVIDIA H200 in A, NVIDIA H100 in B",
        "driver: 580.159.04 in A, 1.2.3 in B",
        "triton: 3.6.0 in A, None in B",
    ]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("h200x2.json", lambda b: b["environment"].update(ranks=8), "B: expected a run of layer, 2 ranks, "),
        ("h200x2.json", lambda b: b["config"]["layer"].update(num_experts=7), "num_experts 7, top_k 8"),
        ("load_two_cores.json", lambda b: b["result"].update(layers=2), "layers 4, ranks 8; got loading, "),
        ("links_h200x4.json", lambda b: b.update(results=[]), "b.json: expected the JSON of a run with times"),
        ("links_h200x4.json", lambda b: b["results"][3].pop("median_us"), "KeyError: 'median_us'"),
        ("h200x2.json", lambda b: b.update(kind="phases"), "got kind phases"),
        ("h200x2.json", lambda b: b["config"]["layer"].pop("top_k"), "b.json: expected the JSON of a run with times"),
        ("links_h200x4.json", lambda b: b["results"][3].update(median_us="7"), "expected a time in us with its spread"),
        ("links_h200x4.json", lambda b: b["results"][3].update(largest_us=None), "expected a time in us with its"),
        ("links_h200x4.json", lambda b: b["results"][3].update(median_us=math.nan), "expected a time in us with its"),
        (
            "h200x2.json",
            lambda b: b.update(results=[dict(r, routing="one") for r in b["results"]]),
            "B: has no time that was measured in A",
        ),
    ],
)
def test_runs_that_do_not_compare_are_refused(
    name: str, change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = load(name)
    change(b)
    assert report.main(["compare", str(RESULTS / name), *write(tmp_path, b=b)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("report: ") and error.count("\n") == 1


# Plot


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is drawn, by the name of the file."""
    pytest.importorskip("matplotlib")
    found: dict[str, Any] = {}
    save = plot.save

    def kept(figure: Any, file: Path) -> None:
        found[file.stem] = figure
        save(figure, file)

    monkeypatch.setattr(plot, "save", kept)
    return found


def lines(axes: Any) -> list[tuple[list[float], list[float]]]:
    """Points of every line except those for the legend."""
    found = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    return [points for points in found if points[0]]


def test_plots_show_the_numbers(tmp_path: Path, figures: dict[str, Any]) -> None:
    """Of the runs with the most ranks, torch's fastest layer, and the rate that floors count with."""
    phases = {name: {"mean_us": us} for name, us in (("experts", 40.0), ("gate_up", 30.0), ("down", 10.0))}
    small = run(2, result("layer", 8, 300.0))
    large = run(
        8,
        result("dispatch", 128, 20.0, floor_us=6.0),
        result("dispatch", 8, 10.0, floor_us=1.0),
        result("dispatch", 8, 12.0, "torch all_to_all_single"),
        result("dispatch", 128, 19.0, routing="zipf"),
        result("dispatch", 4096, None),
        result("layer", 8, 250.0, phases=phases),
        result("layer", 8, 800.0, torch_layer.NAME),
        result("layer", 8, 333.0, "moe_runtime, experts unfused"),
        result("layer", 8, 260.0, token_format="fp8_block"),
        result("layer", 8, 700.0, torch_layer.NAME, token_format="fp8_block"),
    )
    large["link"] = {"gb_per_s": 351.0, "gpu": "NVIDIA H100", "same_gpu": False}
    files = write(tmp_path, small=small, large=large)
    drawn = []
    for _ in range(2):
        assert report.main(["plot", *files, "--folder", str(tmp_path)]) == 0
        drawn.append([(tmp_path / name).read_bytes() for name in ("times.svg", "phases.svg")])
    assert drawn[0] == drawn[1]
    uniform, zipf, layer = figures["times"].axes
    assert lines(uniform) == [([8, 128], [10.0, 20.0]), ([8], [12.0]), ([8, 128], [1.0, 6.0])]
    assert uniform.get_legend_handles_labels()[1][-1] == "floor of the bytes at 351 GB/s of NVIDIA H100"
    assert lines(zipf) == [([128], [19.0])] and "zipf" in zipf.get_title()
    assert lines(layer) == [([8], [250.0]), ([8], [260.0]), ([8], [700.0])]
    (bars,) = figures["phases"].axes
    assert [label.get_text() for label in bars.get_yticklabels()] == ["nvfp4 > bf16, T=8, uniform: 40 us"]
    assert [(bar.get_x(), bar.get_width()) for bar in bars.patches] == [(0.0, 0.75), (0.75, 0.25)]


def test_the_exchange_is_drawn_below_its_roofs(tmp_path: Path, figures: dict[str, Any]) -> None:
    """With the bytes of 4096 tokens of 2 ranks, which were counted by hand."""
    fp8 = {"token_format": "fp8_block", "weight_format": "fp8_block", "moved_bytes": 30.8e6}
    made = run(
        2,
        result("dispatch", 4096, 79.0, moved_bytes=17.25e6),
        result("dispatch", 4096, 205.0, mode="contiguous", **fp8),
        result("combine", 4096, 226.0, moved_bytes=58.6e6),
        result("combine", 4096, 225.0, **fp8 | {"moved_bytes": 58.6e6}),
        result("dispatch", 4096, 92.0, "torch all_to_all_single", moved_bytes=17.25e6),
        result("dispatch", 8, None, moved_bytes=3e4),
    )
    made["link"] = {"gb_per_s": 350.0, "gpu": "NVIDIA H200", "same_gpu": True}
    assert report.main(["plot", *write(tmp_path, a=made), "--folder", str(tmp_path)]) == 0
    *drawn, (x, roof) = lines(figures["exchange"].axes[0])
    moved = 17.25e6, 30.8e6, 58.6e6
    memory = [round(at[0] * link / 1e6) for (at, _), link in zip(drawn, moved, strict=True)]
    assert memory == [93, 424, 763] and [round(rate[0]) for _, rate in drawn] == [218, 150, 260]
    assert roof[0] == 350.0 and roof[1] == pytest.approx(350.0) and roof[2] == pytest.approx(4300 / x[2])
    # One rank has no links.
    alone = run(1, result("dispatch", 8, 5.0, moved_bytes=0))
    assert report.main(["plot", *write(tmp_path, b=alone), "--folder", str(tmp_path / "alone")]) == 2
    (tmp_path / "alone").mkdir()
    assert report.main(["plot", *write(tmp_path, b=alone), "--folder", str(tmp_path / "alone")]) == 0
    assert not (tmp_path / "alone" / "exchange.svg").exists()


def test_committed_runs_are_drawn_small(tmp_path: Path, figures: dict[str, Any]) -> None:
    for name in ("h200x8.json", "h200x2_phases.json", "gemm_h200.json"):
        assert report.main(["plot", str(RESULTS / name), "--folder", str(tmp_path)]) == 0
    assert set(figures) == {"times", "exchange", "phases", "gemm_h200"}
    assert all(file.stat().st_size < 40_000 for file in tmp_path.iterdir())
    points = sum(len(line[0]) for line in lines(figures["gemm_h200"].axes[0])) - 6  # the two ceilings
    assert points == 2 * len(load("gemm_h200.json")["results"])


def test_a_run_that_is_broken_is_left_out(
    tmp_path: Path, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    good = run(2, result("layer", 8, 300.0))
    listed = run(2, result("layer", 8, 300.0) | {"weight_format": []})
    good, links, listed = write(tmp_path, good=good, links=load("links_h200x4.json"), listed=listed)
    files = (good, links, str(tmp_path / "missing.json"), listed)
    assert report.main(["plot", *files, "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.split() == [str(tmp_path / "times.svg")]
    kind, missing, listed = said.err.splitlines()
    wanted = "report: left out listed.json: expected the JSON of a whole run, results[0].weight_format: expected str"
    assert listed.startswith(wanted)
    assert kind.startswith("report: left out links.json: expected the JSON of a run of kind layer or ")
    assert missing == "report: left out missing.json: No such file or directory"
    assert lines(figures["times"].axes[0]) == [([8], [300.0])]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("environment", "ranks"), 10**400, "environment.ranks: expected int above 0, got an integer of 1329 bits"),
        (("environment", "ranks"), 1, "results[1].moved_bytes: expected 0 of one rank, got 30000.0"),
        (("config", "layer", "hidden_size"), [7168], "config.layer.hidden_size: expected int above 0, got list"),
        (("link", "gb_per_s"), "fast", "link.gb_per_s: expected int or float above 0, got 'fast'"),
        (("link", "same_gpu"), None, "link.same_gpu: expected bool, got None"),
        (("results", 0, "tokens_per_rank"), True, "results[0].tokens_per_rank: expected int above 0, got True"),
        (("results", 0, "routing"), {}, "results[0].routing: expected str, got dict"),
        (("results", 0, "median_us"), [300.0], "results[0].median_us: expected int or float above 0, got list"),
        (("results", 0, "median_us"), -1, "results[0].median_us: expected int or float above 0, got -1"),
        (("results", 0, "phases"), math.nan, "results[0].phases: expected dict, got nan"),
        (("results", 0, "phases"), {"down": None}, "results[0].phases.down: expected dict, got None"),
        (("results", 0, "phases"), {"down": {"mean_us": "x"}}, "results[0].phases.down.mean_us: expected int or float"),
        (("results", 1, "token_format"), "fp7", "results[1].token_format: expected nvfp4, fp8_block, mxfp8, bf16, got"),
        (("results", 1, "combine_format"), 0, "results[1].combine_format: expected str, got 0"),
        (("results", 1, "floor_us"), 10**400, "results[1].floor_us: expected int or float above 0, got an integer of"),
        (("results", 1, "moved_bytes"), math.inf, "results[1].moved_bytes: expected int or float above 0, got inf"),
    ],
)
def test_a_field_that_cannot_be_drawn_is_named(
    path: tuple[Any, ...], value: object, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of a traceback: the file, the field, what was expected and what came."""
    pytest.importorskip("matplotlib")
    phases = {"down": {"mean_us": 10.0}}
    made: Any = run(2, result("layer", 8, 300.0, phases=phases), result("dispatch", 8, 10.0, moved_bytes=3e4))
    made["link"] = {"gb_per_s": 351.0, "gpu": "NVIDIA H200", "same_gpu": True}
    of = made
    for key in path[:-1]:
        of = of[key]
    of[path[-1]] = value
    assert report.main(["plot", *write(tmp_path, wrong=made), "--folder", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"report: left out wrong.json: expected the JSON of a whole run, {named}")
    assert error.count("\n") == 1 and not list(tmp_path.glob("*.svg"))


def test_runs_of_different_models_are_not_drawn_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    few = run(2, result("layer", 8, 300.0))
    few["config"]["layer"] |= {"num_sms": 16}
    files = write(tmp_path, beside=beside_peers(), a=run(2, result("layer", 8, 300.0)), b=few)
    assert report.main(["plot", *files, "--folder", str(tmp_path)]) == 2
    assert "RUN: expected runs of one model, got " in capsys.readouterr().err
    assert not list(tmp_path.glob("*.svg")), "a picture was written before it was refused"
    assert report.main(["plot", *write(tmp_path, a=run(2)), "--folder", str(tmp_path)]) == 2
    assert "RUN: nothing to draw" in capsys.readouterr().err
    assert report.main(["plot", files[1], "--folder", str(tmp_path / "no")]) == 2
    assert "report: --folder: no folder " in capsys.readouterr().err


# Tables


def found(*reports: dict[str, Any]) -> pages.Found:
    """The first one is that of README.md."""
    names = [pages.FRONT, *(f"run{number}.json" for number in range(1, len(reports)))]
    return {runs.LAYER: list(zip(names, reports, strict=True))}


def checked(error: float) -> dict[str, Any]:
    return {"check": {"error": error}}


def test_the_layer_beside_torch() -> None:
    """Ours first, errors below; torch's shortest time; a failed check, other routings and other variants have none."""
    one = run(
        2,
        result("layer", 8, 900.4, torch_layer.NAME, **checked(0.005)),
        result("layer", 8, 890.2, torch_layer.NAME, token_format="fp8_block", **checked(0.0046)),
        result("layer", 8, 250.0, **checked(0.234)),
        result("layer", 4096, 5100.0, sustained_us=5600.4, **checked(0.2)),
        result("layer", 4096, 3000.0, token_format="fp8_block", **checked(0.0631)),
        result("layer", 4096, 2900.0, torch_layer.NAME, **checked(0.0047)),
        result("layer", 32, 20.0, routing="one", **checked(0.1)),
        result("layer", 32, None, **checked(9.0)),
        result("layer", 32, 1.0, "moe_runtime, experts unfused", **checked(0.1)),
    )
    one["environment"]["command"] = "torchrun -m x --json a.json"
    text = pages.front_table(found(one), "there/")
    lines = text.splitlines()
    assert lines[0].startswith(
        "2 x NVIDIA H200, driver 1.2, torch 2.11.0, triton 3.6.0, commit 0123456: H=7168, I=2048,"
    )
    assert f"([JSON](there/{pages.FRONT}))" in text and "```\ntorchrun -m x --json a.json\n```" in text
    table = [line for line in lines if line.startswith("|")]
    assert table == [
        "| tokens per rank | ours NVFP4 | ours FP8 | torch BF16 |",
        "|---|---:|---:|---:|",
        "| 8 | 250 |  | 890 |",
        "| 4096 | 5100 (5600) | 3000 | 2900 |",
        "| relative error | 0.23 | 0.063 | 0.0047 |",
    ]
    assert " ".join(text.split()).endswith(
        "- Fastest of ours: NVFP4 with 8 tokens; FP8 with 4096 tokens. - NVFP4 takes 0.28 to 1.76 (**slower** with "
        "4096), FP8 takes 1.03 to 1.03 (**slower** with 4096) of the time of torch BF16."
    )
    with pytest.raises(ValueError, match=r"^results: expected a run of kind peers, or h200x2\.json"):
        pages.front_table({}, "")


def test_tables_of_the_exchange_and_of_goals() -> None:
    """Of one commit and card; goals of the run with most ranks."""
    sizes = {"config": {"layer": {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8}}}
    two = run(
        2,
        result("dispatch", 8, 20.04),
        result("dispatch", 8, 60.12, "torch all_to_all_single"),
        result("combine", 8, None),
    )
    same = run(2, result("combine", 8, 7.0, combine_format="fp8_block"))
    large = run(8, result("layer", 8, 250.0), result("layer", 4096, 5100.0), result("dispatch", 8, 20.04)) | sizes
    made = found(two, same, large)
    exchange = pages.exchange_table(made).splitlines()
    assert exchange[2] == "| tokens per rank | dispatch nvfp4 | combine bf16 | combine fp8_block |"
    assert exchange[4:] == ["| 8 | 20.0 (60.1) | check failed | 7.0 |"] and "run2" not in exchange[0]
    weights = {"token_format": "fp8_block", "weight_format": "nvfp4"}
    two["results"] += [result("layer", 8, 900.0, torch_layer.NAME), result("layer", 8, 300.0)]
    same["results"] += [result("layer", 8, 350.0, **weights), result("layer", 8, 1.0, routing="zipf", **weights)]
    layers = pages.exchange_table(found(two, same), layers=True).splitlines()
    heads = "dispatch nvfp4 | combine bf16 | layer nvfp4 | combine fp8_block | layer nvfp4 x fp8_block"
    assert layers[2] == f"| tokens per rank | {heads} |"
    assert layers[4:] == ["| 8 | 20.0 (60.1) | check failed | 300 (900) | 7.0 | 350 |"]
    goals = pages.goal_table(made).splitlines()
    assert goals[0].endswith("commit 0123456.") and goals[4:] == [
        "| layer | nvfp4 | 250 <= 250 | 5100 **>** 5000 |",
        "| dispatch | nvfp4 | 20.0 **>** 10 |  |",
    ]


def test_table_of_the_gemm() -> None:
    """On another GPU than the one of the ceilings, goals in numbers do not count."""
    h200 = load("gemm_h200.json")
    names = ["fp8_block 32x32 both", "nvfp4 32x32 both", "bf16 32x1024 both, half"]
    h200["results"] = [one for one in h200["results"] if one["case"] in names]
    other = copy.deepcopy(h200)
    other["environment"]["gpus"] = [{"name": "NVIDIA H100"}]
    expanded = load("gemm_expanded_h200.json")
    text = pages.gemm_table({runs.GEMM: [("a.json", other), ("b.json", h200), ("c.json", expanded)]})
    (head,) = (line for line in text.splitlines() if line.startswith("| rows |"))
    assert head.startswith("| rows | H100 nvfp4 | H100 fp8_block | H100 bf16 | H100 torch bf16 | H100 torch fp8 |")
    assert "| 32x32 both | 236 | 364 |  | 947 | 447 | 236 | 364 |  | 947 | 447 |" in text.splitlines()
    assert "expanded" not in text
    assert "H100: 0 of 1 goals met; missed: bf16 32x1024 both, half (within 1.1 x `bf16 32x1024 both`)." in text
    assert "H200: 1 of 4 goals met; missed: nvfp4 32x32 both (230 us), fp8_block 32x32 both (360 us), " in text


def test_table_of_fp4_weights_multiplied_in_fp8() -> None:
    """Rows of which a format is missing have no line; the file is that of `--cases expanded`."""
    plain, expanded = load("gemm_h200.json"), load("gemm_expanded_h200.json")
    cases = {"nvfp4 32x8 both, expanded": 250.0, "mxfp4 32x8 both, expanded": 300.0}
    cases |= {"fp8_block 32x8 both, beside expanded": 200.0, "nvfp4 32x9 both, expanded": 1.0}
    timed = expanded["results"][0]
    expanded["results"] = [timed | {"case": case, "median_us": us} for case, us in cases.items()]
    text = pages.expanded_table({runs.GEMM: [("a.json", plain), ("b.json", expanded)]}, "there/")
    assert text.startswith("[b](there/b.json): NVIDIA H200, ")
    assert text.splitlines()[2:] == [
        "| rows | NVFP4 in FP8 | MXFP4 in FP8 | FP8 |",
        "|---|---:|---:|---:|",
        "| 32x8 both | 250 (1.25) | 300 (1.50) | 200 |",
    ]
    with pytest.raises(ValueError, match=r"^results: expected a run of kind gemm with --cases expanded"):
        pages.expanded_table({runs.GEMM: [("a.json", plain)]}, "")


def test_the_table_of_models_is_of_the_newest_commit() -> None:
    names = ("models_deepseek_v3_h200.json", "models_few_tokens_h200.json", "models_h100.json", "models_h200.json")
    reports = [(name, load(name)) for name in names]
    for _, one in reports:
        model = one["results"][0]["model"]
        one["results"].append({"model": model, "weight_format": "a", "token_format": "b", "refused": "no"})
    text = pages.models_table({runs.MODELS: reports})
    assert text.startswith("[models_deepseek_v3_h200](") and "[models_h200](" in text and "H100" not in text
    assert "105 rows: " in text and text.count(" in a x b: no.") == 2 and text.count("\n| ") == 1 + 3 * 5
    again = load("models_h200.json")
    again["environment"]["time_utc"] = "2099"
    again["results"] = again["results"][:1]
    again["results"][0]["median_us"] = 1.0
    text = pages.models_table({runs.MODELS: [*reports, ("again.json", again)]})
    assert "105 rows: " in text and " | 1.0 (" in text
    other_card = dict(reports[0][1]["environment"], gpus=[{"name": "another"}])
    reports[0][1]["environment"] = other_card
    assert "35 rows: " in pages.models_table({runs.MODELS: reports})
    with pytest.raises(ValueError, match=rf"^results: expected a run of kind {runs.MODELS}"):
        pages.models_table({})


def beside_peers() -> dict[str, Any]:
    """A run of `research.peers` as large as one may be that has a line for each layer of FlashInfer."""
    ours = [("moe_runtime", name) for name in ("NVFP4", "FP8", "MXFP4 in FP8", "NVFP4 in FP8")]
    theirs = [("flashinfer_push", "FP8"), ("flashinfer_pull", "FP8"), ("flashinfer_nvfp4", "NVFP4 weights, FP8 tokens")]
    rows = [
        {
            **{
                "operation": "layer",
                "implementation": by,
                "variant": variant,
                "tokens_per_rank": count,
                "status": "ok",
            },
            **{"median_us": 1000.0 * (place + 1) + count, "sustained_us": None, "error": 0.05, "note": ""},
        }
        for place, (by, variant) in enumerate([*ours, *theirs, ("torch", "BF16")])
        for count in (1, 8, 32, 128, 512, 1024, 4096, 8192)
    ]
    for by in ("deepep_low_latency", "deepep_normal", "deep_gemm", "humming"):
        rows.append({"operation": "experts", "implementation": by, "variant": "", "tokens_per_rank": None})
        rows[-1] |= {"status": f"not installed: {by}", "median_us": None, "error": None}
    made = run(2) | {"kind": runs.PEERS, "results": rows, "versions": {"flashinfer_push": "0.7.4", "torch": None}}
    made["environment"] |= {"command": "torchrun --nproc-per-node=2 " + "x" * 300, "time_utc": "2027-01-01"}
    return made


def test_pages_show_a_run_beside_peers_in_place_of_one_beside_torch() -> None:
    """And keep within their lengths."""
    every = pages.read_all(RESULTS) | {runs.PEERS: [("peers.json", beside_peers())]}
    for name in ("README.md", "docs/results.md"):
        text = pages.filled(name, (ROOT / name).read_text(), every)
        assert "peers.json" in text and len(text.splitlines()) <= LENGTHS[name], name
        assert "| 8 | 1008 | 2008 | 3008 | 4008 | 5008 | 6008 | 7008 | 8008 |" in text
    text = pages.filled(PAGE_OF_PEERS, (ROOT / PAGE_OF_PEERS).read_text(), every)
    assert "- DeepGEMM, experts: not installed: deep_gemm" in text and "Versions: flashinfer_push 0.7.4." in text
    assert "| ours FP8 | 2001 |" not in text
    fewer = beside_peers()
    fewer["results"] = [one for one in fewer["results"] if one["implementation"] in ("moe_runtime", "torch")]
    fewer["environment"] |= {"git_commit": "fedcba9", "time_utc": "2028-01-01"}
    both = every | {runs.PEERS: [("fewer.json", fewer), ("peers.json", beside_peers())]}
    assert pages.front_run(both)[0] == "peers.json"
    newer, older = re.split(r"\n\n(?=\[)", pages.peers_table(both, ""))
    assert "commit fedcba9" in newer and "| torch BF16 | 8001 |" in newer and "commit 0123456" in older
    assert "of the time of torch BF16." in newer


PAGE_OF_RESULTS, PAGE_OF_PEERS = "launch/results/README.md", "docs/peers.md"
LENGTHS = {"README.md": 200, "docs/results.md": 110, PAGE_OF_RESULTS: 200}
"""Most lines of a page."""


@pytest.mark.parametrize("name", LENGTHS)
def test_a_page_of_results_is_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= LENGTHS[name]


def test_pages_of_results_are_up_to_date() -> None:
    assert report.main(["tables", "--check"]) == 0, "run python -m moe_runtime.launch.report tables"


def test_the_picture_is_of_the_run_that_the_pages_show() -> None:
    _, one = pages.front_run(pages.read_all(RESULTS))
    text = (RESULTS / report.PICTURE).read_text()
    assert f"{runs.ranks_of(one)} x {gpu_of(one)}, commit {commit_of(one)}" in text
    for name, line in peers.series_of(one, "layer").items():
        assert name in text and line


@pytest.mark.parametrize("name", [name for name in FILES if runs.kind_of(load(name)) != runs.CHECKED])
def test_a_committed_run_says_what_ran_where(name: str) -> None:
    """Commit, command, and the cards or, without any, the processor. What compiles anywhere has none of them."""
    record = load(name)["environment"]
    assert re.fullmatch("[0-9a-f]{7,40}", record["git_commit"]) and re.match("[0-9a-f]{7}\\b", commit_of(load(name)))
    assert ".py " in record["command"] or "moe_runtime.launch." in record["command"]
    assert record["gpus"] or record["processor"]
    assert len({gpu["name"] for gpu in record["gpus"]}) <= 1 and "\n" not in record["command"]


TABLES = [(name, kind) for name, tables in pages.PAGES.items() for kind in tables]
"""Each generated table that has a run."""
TABLES = [table for table in TABLES if table[1] != "peers" or pages.read_all(RESULTS).get(runs.PEERS)]


def table_of(name: str, kind: str) -> tuple[str, list[str]]:
    """What stands between the marks, and the files that it names."""
    (text,) = re.findall(rf"<!-- {kind} -->\n(.*?)\n<!-- end of {kind} -->", (ROOT / name).read_text(), re.DOTALL)
    return text, re.findall(r"\[[^]]+\]\((?:[\w./]*/)?(\w+\.json)\)", text)


@pytest.mark.parametrize(("name", "kind"), TABLES)
def test_a_table_is_of_one_commit_and_card_and_names_them(name: str, kind: str) -> None:
    text, files = table_of(name, kind)
    assert files
    # Runs beside peers have tables of their own, below their source.
    parts = re.split(r"\n\n(?=\[)", text) if kind == "peers" else [text]
    for part in parts:
        named = [file for file in files if f"{file})" in part]
        for where in (where_ran, commit_of):
            (one,) = {where(load(file)) for file in named}
            assert one in " ".join(part.split())


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-\d+)?")
DERIVED: dict[str, set[str]] = {
    "goals": {str(goal) for by_tokens in GOALS_US.values() for goal in by_tokens.values()},
    "low_latency": {f"{number / 100:.2f}" for number in range(300)},
    "expanded": {f"{number / 100:.2f}" for number in range(200)},
}
"""Numbers in tables that are of no file: goals, and ratios of two times."""


def numbers_in(value: Any) -> Iterator[str]:
    """Every number of a file, in each way that tables write one."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from numbers_in(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (f"{value:{shape}}" for shape in (".0f", ".1f", ".2f", ".2g"))


@pytest.mark.parametrize(("name", "kind"), [table for table in TABLES if table[1] != "operations"])
def test_every_number_of_a_table_is_in_its_file(name: str, kind: str) -> None:
    """But for those of the first column, which are checked by the tables' own tests."""
    text, files = table_of(name, kind)
    known = DERIVED.get(kind, set()).union(*(numbers_in(load(file)) for file in files))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [cell for line in lines[1:] for cell in line.split("|")[2:-1]]
    found = [number for cell in cells for number in NUMBER.findall(re.sub(r"[a-z]\w+ x \w+", "", cell))]
    assert len(found) >= 10 and not [number for number in found if number not in known]


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_times_of_the_layer_stand_in_their_row_and_column(name: str) -> None:
    """Read without what makes the tables: who is in the column, how many tokens in the row."""
    text, (file,) = table_of(name, "results")
    head, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")
    ]
    timed: dict[tuple[str, bool], set[str]] = {}
    for one in load(file)["results"]:
        if one["operation"] == "layer" and one["median_us"]:
            us = one["median_us"]
            key = str(one["tokens_per_rank"]), one["implementation"] == "moe_runtime"
            timed.setdefault(key, set()).add(f"{us:.1f}" if us < 100 else f"{us:.0f}")
    assert len(lines) >= 6
    for count, *cells in lines[:-1]:
        for who, cell in zip(head[1:], cells, strict=True):
            assert not cell or cell.split()[0] in timed[count, who.startswith("ours ")], (count, who)


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))])
def test_pages_with_tables_of_runs_name_the_files(page: str) -> None:
    """That are here, as every name of a file of results."""
    text = (ROOT / page).read_text()
    named = set(re.findall(r"launch/results/(\w+\.json)", text))
    assert named <= set(FILES)
    marks = set(re.findall(r"<!-- end of (\w+) -->", text))
    assert not marks or named


def test_pages_are_checked_and_remade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pages.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for name, number in ((PAGE_OF_RESULTS, "| 32x1024 both |"), ("README.md", "| relative error |")):
        page = tmp_path / name
        wanted = page.read_text()
        stale = wanted.replace(number, f"{number} 1")
        assert stale != wanted
        page.write_text(stale)
        assert report.main(["tables", "--check"]) == 1 and page.read_text() == stale
        assert report.main(["tables"]) == 0 and page.read_text() == wanted and report.main(["tables", "--check"]) == 0
    page = tmp_path / PAGE_OF_RESULTS
    page.write_text(page.read_text().replace("<!-- end of gemm -->", ""))
    with pytest.raises(ValueError, match=r"README\.md: expected <!-- gemm --> and <!-- end of gemm --> once each"):
        report.main(["--debug", "tables"])


def test_the_layer_is_drawn_with_a_line_for_each_implementation(tmp_path: Path, figures: dict[str, Any]) -> None:
    assert report.main(["plot", *write(tmp_path, beside=beside_peers()), "--folder", str(tmp_path)]) == 0
    (axes,) = figures["beside"].axes
    assert [line.get_label() for line in axes.get_lines()][3:6] == [
        *("ours NVFP4 in FP8", "FlashInfer push FP8", "FlashInfer pull FP8")
    ]
    assert len(lines(axes)) == 8 and lines(axes)[0][1][:2] == [1001.0, 1008.0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    none = beside_peers() | {"results": []}
    assert report.main(["plot", *write(tmp_path, none=none), "--folder", str(tmp_path)]) == 2


def test_a_run_beside_peers_is_compared() -> None:
    assert len(runs.figures(beside_peers() | {"results": [r | SPREAD for r in beside_peers()["results"]]})) == 68


SPREAD = {"smallest_us": 1.0, "largest_us": 2.0}


def test_parts_and_baselines_of_the_gemm_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    assert (
        kernel_bench.main(["gemm", "--small", "--cases", "^fp8_block 32x32 both$", "--steps", "2", "--json", str(file)])
        == 0
    )
    made = json.loads(file.read_text())
    (one,) = made["results"]
    timed = [one, *one["parts"].values(), *(peer for peer in one["peers"] if peer["median_us"])]
    made["results"][0]["parts"]["down"]["median_us"] *= 1e6
    capsys.readouterr()
    assert report.main(["compare", str(file), *write(tmp_path, b=made)]) == 1
    assert f"{len(timed) - 1} of {len(timed)} times" in capsys.readouterr().out and len(timed) >= 4
