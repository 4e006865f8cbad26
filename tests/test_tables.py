"""The results in both READMEs are those of the committed JSON, and the tables are made as told."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.launch import gemm_table, tables, unfused_layer
from tests.programs import ROOT

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "launch" / "results"


def report() -> dict[str, object]:
    common = {
        "operation": "dispatch",
        "tokens_per_rank": 128,
        "token_format": "nvfp4",
        "weight_format": "nvfp4",
        "combine_format": "bf16",
        "mode": "indexed",
        "routing": "uniform",
    }
    ours = common | {
        "implementation": "moe_runtime",
        "median_us": 20.04,
        "smallest_us": 19.0,
        "largest_us": 123.4,
        "check": {"what": "bits", "error": 0.0, "bound": 0.0, "passed": True},
    }
    theirs = common | {"implementation": "torch all_to_all_single", "median_us": 60.12, "check": None}
    layer = {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8}
    record = {
        "ranks": 8,
        "gpus": [{"name": "NVIDIA H200"}],
        "driver": "1.2",
        "packages": {"torch": "2.11.0", "triton": "3.6.0", "transformers": None},
        "transport": "nvshmem",
        "command": "bench.py dispatch",
    }
    failed = ours | {"operation": "combine", "median_us": None}
    fewer = ours | {"tokens_per_rank": 8, "median_us": 9.5}
    other = ours | {"token_format": "bf16", "weight_format": "bf16", "median_us": 123.4}
    return {"environment": record, "config": {"layer": layer}, "results": [ours, theirs, failed, fewer, other]}


def test_a_line_has_a_cell_per_format_with_both_times() -> None:
    text = tables.results_table(report(), "launch/results/x.json")
    assert "8 x NVIDIA H200, driver 1.2, torch 2.11.0, triton 3.6.0; transport `nvshmem`" in text
    lines = text.splitlines()
    assert "| operation | tokens per rank | nvfp4 > bf16 | bf16 > bf16 | beside |" in lines
    assert "| dispatch | 8 | 9.5 |  | torch all_to_all_single |" in lines
    assert "| dispatch | 128 | 20.0 (60.1) | 123 | torch all_to_all_single |" in lines
    assert "| combine | 128 | check failed |  |  |" in lines
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["dispatch", "dispatch", "combine"]


def test_several_routings_and_what_a_layer_stands_beside() -> None:
    found = report()
    results = found["results"]
    assert isinstance(results, list)
    skew = {"even_gb_per_s": 1.0, "allowed_us": 32.5, "met": False}
    layer = results[0] | {
        "operation": "layer",
        "median_us": 250.0,
        "smallest_us": 249.0,
        "largest_us": 260.44,
        "ratio_to_torch": 0.3125,
        "ratio_to_unfused": None,
        "check": {"what": "error", "error": 0.01234, "bound": 0.2, "passed": True},
        "memory": {"peak_bytes": 2_345_000_000},
    }
    uneven = results[0] | {"routing": "one", "median_us": 33.0, "skew": skew}
    untimed = uneven | {"tokens_per_rank": 8, "median_us": None, "skew": skew | {"met": None}}
    other = layer | {"routing": "one", "memory": None, "ratio_to_unfused": 0.755}
    unfused = layer | {"implementation": unfused_layer.NAME, "median_us": 300.0}
    found["results"] = [*results, layer, unfused, other, uneven, untimed]
    lines = tables.results_table(found, "x.json").splitlines()
    assert "uniform, one routing" in lines[0]
    assert "| dispatch, uniform | 128 | 20.0 (60.1) | 123 | torch all_to_all_single |" in lines
    assert "| dispatch, one | 128 | 33.0 |  | torch all_to_all_single |" in lines
    assert "| layer, uniform | 128 | 250 |  |  |" in lines and "| layer, one | 128 | 250 |  |  |" in lines
    assert "| nvfp4 > bf16 | uniform | 128 | 250 | 249 - 260 | 0.31 |  | 1.23e-02 | 2.00e-01 | 2.35 |" in lines
    assert "| nvfp4 > bf16 | one | 128 | 250 | 249 - 260 | 0.31 | 0.76 | 1.23e-02 | 2.00e-01 |  |" in lines
    assert "| dispatch | nvfp4 > bf16 | one | 128 | 33.0 | 32.5 | missed |" in lines
    assert "| dispatch | nvfp4 > bf16 | one | 8 | check failed | 32.5 | unknown |" in lines
    assert not any("goal" in line for line in lines)


def test_sustained_times_stand_beside_those_after_rests() -> None:
    found = report()
    results = found["results"]
    assert isinstance(results, list)
    ours, theirs, *others = (result | {"sustained_us": None} for result in results)
    layer = ours | {
        "operation": "layer",
        "median_us": 3000.0,
        "smallest_us": 2900.0,
        "largest_us": 3100.0,
        "sustained_us": 3600.4,
        "ratio_to_torch": 0.5,
        "ratio_to_unfused": None,
        "check": {"what": "error", "error": 0.01234, "bound": 0.2, "passed": True},
        "memory": None,
    }
    peer = theirs | {"operation": "layer", "median_us": 6000.0, "sustained_us": 8000.0}
    short = layer | {"token_format": "bf16", "median_us": 900.0, "sustained_us": None}
    found["results"] = [ours, theirs, *others, layer, peer, short]
    lines = tables.results_table(found, "x.json").splitlines()
    assert "| layer | 128 | 3000 (6000) | 900 |" in "\n".join(lines)
    assert "| layer, sustained | 128 | 3600 (8000) |  |" in "\n".join(lines)
    assert not any(line.startswith("| dispatch, sustained") for line in lines)


def test_settings_of_a_run_are_told() -> None:
    found = report()
    config = found["config"]
    assert isinstance(config, dict)
    assert "top-8, uniform routing." in tables.results_table(found, "x.json")
    config["layer"] |= {"num_sms": 16}
    assert "top-8, num_sms 16, uniform routing." in tables.results_table(found, "x.json")


def test_goals_are_shown_where_there_are_any() -> None:
    found = report()
    results = found["results"]
    assert isinstance(results, list)
    goals = ({"us": 18, "met": False}, {"us": 38, "met": None})
    found["results"] = [results[0] | {"goal": goals[0]}, results[2] | {"goal": goals[1]}, results[3] | {"goal": None}]
    lines = tables.results_table(found, "x.json").splitlines()
    assert lines[lines.index("| operation | format | tokens per rank | us | goal us | |") + 2 :] == [
        "| dispatch | nvfp4 > bf16 | 128 | 20.0 | 18 | missed |",
        "| combine | nvfp4 > bf16 | 128 | check failed | 38 | unknown |",
    ]


def test_only_what_stands_between_the_marks_changes(tmp_path: Path) -> None:
    readme = f"before\n{tables.START}\nold\n{tables.END}\nafter\n"
    made = tables.with_results(readme, tmp_path, tmp_path)
    assert made == f"before\n{tables.START}\n\n{tables.END}\nafter\n"
    assert tables.with_results(made, tmp_path, tmp_path) == made
    with pytest.raises(ValueError, match="README: expected"):
        tables.with_results("no marks", tmp_path, tmp_path)


def test_most_ranks_come_first_and_stand_alone_on_the_front_page(tmp_path: Path) -> None:
    page = f"a{tables.START}old{tables.END}z"
    with pytest.raises(ValueError, match="expected a run of launch"):
        tables.with_times(page, tmp_path, tmp_path)
    goal = report()["results"][0] | {"goal": {"us": 18, "met": False}}  # type: ignore[index]
    for name, ranks in (("few", 8), ("a", 2), ("all_of_them", 8)):
        run = report() | {"environment": report_environment() | {"ranks": ranks}, "results": [goal]}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    made = tables.with_results(page, tmp_path, tmp_path.parent)
    sources = [f"{tmp_path.name}/{name}.json" for name in ("few", "all_of_them", "a")]
    assert re.findall(r"^### (\w+)$", made, re.MULTILINE) == ["few", "all_of_them", "a"]
    assert re.findall(r"JSON\]\((.*?)\)", made) == sources
    assert made.count("goal us") == 3
    made = tables.with_times(page, tmp_path, tmp_path.parent)
    assert re.findall(r"JSON\]\((.*?)\)", made) == sources[:1]
    assert "| dispatch | 128 | 20.0 |" in made and "goal us" not in made
    assert made.startswith("a<!--") and made.endswith("-->z") and "old" not in made
    assert tables.with_times(made, tmp_path, tmp_path.parent) == made


def test_operations_have_marks_of_their_own(tmp_path: Path) -> None:
    readme = f"a\n{tables.OPERATIONS_START}\nold\n{tables.OPERATIONS_END}\nz\n"
    made = tables.with_operations(readme, RESULTS, RESULTS)
    assert "| `group_gemm_fp8_nt_groupwise` | fp8_block |" in made and "old" not in made
    assert made.startswith("a\n") and made.endswith("z\n")
    with pytest.raises(ValueError, match=r"expected ops_checked\.json and ops_h200\.json"):
        tables.with_operations(readme, tmp_path, tmp_path)
    # Files of another kind are no results of the benchmark.
    assert "group_gemm" not in tables.with_results(f"{tables.START}{tables.END}", RESULTS, RESULTS)


def goal(kind: str, text: str, met: bool | None) -> dict[str, Any]:
    return {"kind": kind, "text": text, "met": met}


def test_the_gemm_has_marks_of_its_own(tmp_path: Path) -> None:
    result = {
        "case": "nvfp4 8x16 down",
        "rows": 128,
        "median_us": 21.25,
        "floor_us": 15.5,
        "floor_share": 0.729,
        "rate_tflop_per_s": 177.4,
        "rate_tb_per_s": 3.134,
        "checks": [{"what": "error", "error": 0.5, "bound": 1.0, "passed": True}],
        "goals": [goal("us", "22 us", True), goal("floor_share", "80% of the floor", False)],
        "peers": [{"name": "torch grouped_mm bf16", "median_us": 86.4, "why": None}],
        "kernels": ["_ZN2at6native", "decode_tokens", "decoded_gemm", "decode_tokens"],
    }
    failed = result | {"case": "other", "median_us": None, "floor_share": None, "rate_tflop_per_s": None}
    failed |= {
        "rate_tb_per_s": None,
        "checks": [{"passed": False}],
        "goals": [goal("us", "1 us", None)],
    }
    failed |= {"peers": [{"name": "torch scaled_grouped_mm fp8 rowwise", "median_us": None, "why": "none"}]}
    report = {"kind": "gemm", "environment": report_environment(), "results": [result, failed]}
    (tmp_path / "gemm.json").write_text(json.dumps(report))
    readme = f"a\n{tables.GEMM_START}\nold\n{tables.GEMM_END}\nz\n"
    made = tables.with_gemm(readme, tmp_path, tmp_path)
    assert made.startswith("a\n") and made.endswith("z\n") and "old" not in made and "![" not in made
    assert "NVIDIA H200, driver 1.2, torch 2.11.0, triton 3.6.0. Floors count 4.3 TB/s" in made
    assert "1437 in fp8, all measured; peers" in made
    long = result | {"median_us": 1370.2, "sustained_us": 1619.6}
    long["peers"] = [{"name": "torch grouped_mm bf16", "median_us": 2453, "sustained_us": 2801.6, "why": None}]
    text = gemm_table.markdown(report | {"results": [long]}, "x.json")
    assert "| nvfp4 8x16 down | 128 | 1370 (1620) | 15.5 |" in text and "| 2453 (2802) |  |" in text
    other = report_environment() | {"gpus": [{"name": "NVIDIA H100"}]}
    text = gemm_table.markdown(report | {"environment": other}, "x.json")
    assert "NVIDIA H100, driver" in text and "measured on NVIDIA H200, NOT what this ran on; peers" in text
    assert "| 3.13 |  | 86.4 |" in text
    assert (
        "| nvfp4 8x16 down | 128 | 21.2 | 15.5 | 73% | 177 | 3.13 | 22 us: met; 80% of the floor: missed | 86.4 |  | "
        "decode_tokens, decoded_gemm |" in made
    )
    assert "| other | 128 | check failed | 15.5 |  |  |  | 1 us: unknown |  | n/a | decode" in made
    assert tables.with_gemm(made, tmp_path, tmp_path) == made
    # It is no result of a layer, and its picture is shown where there is one.
    assert "nvfp4" not in tables.with_results(f"{tables.START}{tables.END}", tmp_path, tmp_path)
    (tmp_path / "gemm.svg").write_text("<svg/>")
    assert "](gemm.svg)" in tables.with_gemm(readme, tmp_path, tmp_path)


def test_a_few_gemms_stand_on_the_front_page(tmp_path: Path) -> None:
    committed = gemm_table.read(RESULTS / "gemm_h200.json")
    # One product of a pair, and uneven routing, are other cases.
    names = ["fp8_block 32x32 both", "fp8_block 32x1024 both", "fp8_block 32x1024 both, half", "fp8_block 8x32 down"]
    found = {result["case"]: result for result in committed["results"]}
    found[names[0]] |= {"median_us": 345.4, "floor_us": 334.4, "floor_share": 0.968}
    peers = [("torch scaled_grouped_mm fp8 rowwise", 448.6), ("torch grouped_mm bf16", 962.7)]
    found[names[0]]["peers"] = [{"name": name, "median_us": us, "why": None} for name, us in peers]
    report = committed | {"results": [found[name] for name in names]}
    (tmp_path / "gemm.json").write_text(json.dumps(report))
    elsewhere = report["environment"] | {"gpus": [{"name": "NVIDIA H100"}]}
    (tmp_path / "elsewhere.json").write_text(json.dumps(report | {"environment": elsewhere}))
    (tmp_path / "gemm_later.json").write_text(json.dumps(report))
    page = f"a{tables.GEMM_START}old{tables.GEMM_END}z"
    made = tables.with_few_gemms(page, tmp_path, tmp_path.parent)
    lines = [line for line in made.splitlines() if line.startswith("| fp8_block")]
    assert lines[0] == "| fp8_block 32x32 both | 345 | 334 | 97% | 963 | 449 |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == names[:2]
    assert f"[JSON]({tmp_path.name}/gemm.json)" in made and "old" not in made
    assert "elsewhere.json" not in made and "later.json" not in made
    assert tables.with_few_gemms(made, tmp_path, tmp_path.parent) == made


def report_environment() -> dict[str, Any]:
    found = report()["environment"]
    assert isinstance(found, dict)
    return found


def test_the_readmes_are_up_to_date() -> None:
    assert tables.main(["--check"]) == 0, "run python -m moe_runtime.launch.tables"


@pytest.mark.parametrize("name", tables.PAGES)
def test_each_page_is_checked_and_remade(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {page: (tables.ROOT / page).read_text() for page in tables.PAGES}
    results = tmp_path / "launch" / "results"
    shutil.copytree(RESULTS, results)
    shutil.copy(tables.ROOT / "README.md", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main(["--check"]) == 0
    stale = wanted[name].replace("| nvfp4 32x1024 both |", "| nvfp4 32x1024 both | 1")
    assert stale != wanted[name]
    (tmp_path / name).write_text(stale)
    assert tables.main(["--check"]) == 1
    assert (tmp_path / name).read_text() == stale
    assert tables.main([]) == 0 and tables.main(["--check"]) == 0
    assert {page: (tmp_path / page).read_text() for page in tables.PAGES} == wanted
