"""`launch.report`: tables, comparisons and plots say what the JSON says, and committed results stay readable."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.launch.benchmarks import torch_layer
from moe_runtime.launch.common.environment import write_json
from moe_runtime.launch.kernel_bench import __main__ as kernel_bench
from moe_runtime.launch.kernel_bench.show import commit_of, gpu_of
from moe_runtime.launch.kernel_bench.show import where as where_ran
from moe_runtime.launch.report import __main__ as report
from moe_runtime.launch.report import pages, plot, runs
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
    files = write(tmp_path, good=run(2, result("layer", 8, 300.0)), links=load("links_h200x4.json"))
    assert report.main(["plot", *files, str(tmp_path / "missing.json"), "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.split() == [str(tmp_path / "times.svg")]
    kind, missing = said.err.splitlines()
    assert kind.startswith("report: left out links.json: expected the JSON of a run of kind layer or ")
    assert missing == "report: left out missing.json: No such file or directory"
    assert lines(figures["times"].axes[0]) == [([8], [300.0])]


def test_runs_of_different_models_are_not_drawn_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    few = run(2, result("layer", 8, 300.0))
    few["config"]["layer"] |= {"num_sms": 16}
    files = write(tmp_path, a=run(2, result("layer", 8, 300.0)), b=few)
    assert report.main(["plot", *files, "--folder", str(tmp_path)]) == 2
    assert "RUN: expected runs of one model, got " in capsys.readouterr().err
    assert report.main(["plot", *write(tmp_path, a=run(2)), "--folder", str(tmp_path)]) == 2
    assert "RUN: nothing to draw" in capsys.readouterr().err
    assert report.main(["plot", files[0], "--folder", str(tmp_path / "no")]) == 2
    assert "report: --folder: no folder " in capsys.readouterr().err


# Tables


def found(*reports: dict[str, Any]) -> pages.Found:
    return {runs.LAYER: [(f"run{number}.json", one) for number, one in enumerate(reports)]}


def test_tables_of_a_layer_and_its_exchange() -> None:
    """Most ranks first; a failed check has no time; sustained times where there are any; other routings elsewhere."""
    large = run(
        8,
        result("layer", 8, 250.0),
        result("layer", 8, 900.4, torch_layer.NAME),
        result("layer", 4096, 5100.0, sustained_us=5600.4),
        result("layer", 8, 20.0, routing="one"),
        result("dispatch", 8, 20.04),
        result("dispatch", 8, 60.12, "torch all_to_all_single"),
        result("combine", 8, None),
    )
    made = found(run(2, result("layer", 8, 77.7)), large)
    layer = pages.layer_table(made).splitlines()
    assert layer[0].startswith("[run1](run1.json): NVIDIA H200, driver 1.2, torch 2.11.0, triton 3.6.0, commit 0123456")
    assert layer[2] == "| tokens per rank | run1 nvfp4 | run1 torch bf16 | run0 nvfp4 |"
    assert layer[4:] == ["| 8 | 250 | 900 | 77.7 |", "| 4096 | 5100 (5600) |  |  |"]
    exchange = pages.exchange_table(made).splitlines()
    assert exchange[2] == "| tokens per rank | run1 dispatch nvfp4 | run1 combine bf16 |"
    assert exchange[4:] == ["| 8 | 20.0 (60.1) | check failed |"] and "run0" not in exchange[0]
    goals = pages.goal_table(made).splitlines()
    assert goals[0].endswith("commit 0123456.") and goals[4:] == [
        "| layer | nvfp4 | 250 <= 250 | 5100 **>** 5000 |",
        "| dispatch | nvfp4 | 20.0 **>** 10 |  |",
        "| combine | bf16 | n/a ? 12 |  |",
    ]


def test_table_of_the_gemm() -> None:
    """On another GPU than the one of the ceilings, goals in numbers do not count."""
    h200 = load("gemm_h200.json")
    names = ["fp8_block 32x32 both", "nvfp4 32x32 both", "bf16 32x1024 both, half"]
    h200["results"] = [one for one in h200["results"] if one["case"] in names]
    other = copy.deepcopy(h200)
    other["environment"]["gpus"] = [{"name": "NVIDIA H100"}]
    text = pages.gemm_table({runs.GEMM: [("a.json", other), ("b.json", h200)]})
    (head,) = (line for line in text.splitlines() if line.startswith("| rows |"))
    assert head.startswith("| rows | H100 nvfp4 | H100 fp8_block | H100 bf16 | H100 torch bf16 | H100 torch fp8 |")
    assert "| 32x32 both | 236 | 364 |  | 947 | 447 | 236 | 364 |  | 947 | 447 |" in text.splitlines()
    assert "H100: 0 of 1 goals met; missed: bf16 32x1024 both, half (within 1.1 x `bf16 32x1024 both`)." in text
    assert "H200: 1 of 4 goals met; missed: nvfp4 32x32 both (230 us), fp8_block 32x32 both (360 us), " in text


def test_tables_of_layers_take_their_runs_whatever_these_refuse() -> None:
    names = ("models_h100.json", "models_few_tokens_h200.json", "models_gpt_oss_h200.json")
    reports = [(name, load(name)) for name in names]
    for _, one in reports:
        model = one["results"][0]["model"]
        one["results"].append({"model": model, "weight_format": "a", "token_format": "b", "refused": "no"})
    for found in (reports, reports[::-1]):
        made = (pages.models_table, pages.few_tokens_table, pages.one_model_table)
        for name, table in zip(names, made, strict=True):
            text = table({runs.MODELS: found})
            assert text.startswith(f"[{name.removesuffix('.json')}]") and text.endswith(" in a x b: no.")
    with pytest.raises(ValueError, match=rf"^results: expected a run of kind {runs.MODELS}"):
        pages.few_tokens_table({runs.MODELS: reports[:1]})


def test_the_page_of_results_is_up_to_date() -> None:
    assert report.main(["tables", "--check"]) == 0, "run python -m moe_runtime.launch.report tables"


@pytest.mark.parametrize("name", [name for name in FILES if runs.kind_of(load(name)) != runs.CHECKED])
def test_a_committed_run_says_what_ran_where(name: str) -> None:
    """Commit, command, and the cards or, without any, the processor. What compiles anywhere has none of them."""
    record = load(name)["environment"]
    assert re.fullmatch("[0-9a-f]{7,40}", record["git_commit"]) and re.match("[0-9a-f]{7}\\b", commit_of(load(name)))
    assert ".py " in record["command"] or "moe_runtime.launch." in record["command"]
    assert record["gpus"] or record["processor"]


@pytest.mark.parametrize("kind", pages.TABLES)
def test_a_table_is_of_one_commit_or_says_which_column_is_of_which(kind: str) -> None:
    page = (RESULTS / "README.md").read_text()
    (text,) = re.findall(rf"<!-- {kind} -->\n(.*?)\n<!-- end of {kind} -->", page, re.DOTALL)
    files = re.findall(r"\[[^]]+\]\((\w+\.json)\)", text)
    assert files
    for name in files:
        where, commit = f"{where_ran(load(name))}, commit {commit_of(load(name))}", f"({name})"
        assert where in text and commit in text
    if len({commit_of(load(name)) for name in files}) > 1:
        (head,) = re.findall(r"^(\|.*\|)\n\|---", text, re.MULTILINE)
        of_runs = [name.removesuffix(".json") for name in files] + [gpu_of(load(name)).split()[1] for name in files]
        assert all(cell.split()[0] in of_runs for cell in head.split("|")[2:-1]), head


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))])
def test_pages_with_tables_of_runs_name_the_files(page: str) -> None:
    """That are here, as every name of a file of results."""
    text = (ROOT / page).read_text()
    named = set(re.findall(r"launch/results/(\w+\.json)", text))
    assert named <= set(FILES)
    marks = set(re.findall(r"<!-- end of (\w+) -->", text))
    assert not marks or named


def test_the_page_is_checked_and_remade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    page = tmp_path / "results" / "README.md"
    monkeypatch.setattr(report, "PAGE", page)
    wanted = page.read_text()
    stale = wanted.replace("| 32x1024 both |", "| 32x1024 both | 1")
    assert stale != wanted
    page.write_text(stale)
    assert report.main(["tables", "--check"]) == 1 and page.read_text() == stale
    assert report.main(["tables"]) == 0 and page.read_text() == wanted and report.main(["tables", "--check"]) == 0
    page.write_text(wanted.replace("<!-- end of gemm -->", ""))
    with pytest.raises(ValueError, match=r"README\.md: expected <!-- gemm --> and <!-- end of gemm --> once each"):
        report.main(["--debug", "tables"])


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
