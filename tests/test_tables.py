"""The README's results are those of the committed JSON, and the table is made as told."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_runtime.launch import tables

pytestmark = pytest.mark.cpu_only

RESULTS = Path(__file__).resolve().parent.parent / "launch" / "results"


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


def test_only_what_stands_between_the_marks_changes(tmp_path: Path) -> None:
    readme = f"before\n{tables.START}\nold\n{tables.END}\nafter\n"
    made = tables.with_results(readme, tmp_path, tmp_path)
    assert made == f"before\n{tables.START}\n\n{tables.END}\nafter\n"
    assert tables.with_results(made, tmp_path, tmp_path) == made
    with pytest.raises(ValueError, match="README: expected"):
        tables.with_results("no marks", tmp_path, tmp_path)


def test_operations_have_marks_of_their_own(tmp_path: Path) -> None:
    readme = f"a\n{tables.OPERATIONS_START}\nold\n{tables.OPERATIONS_END}\nz\n"
    made = tables.with_operations(readme, RESULTS, RESULTS)
    assert "| `group_gemm_fp8_nt_groupwise` | fp8_block |" in made and "old" not in made
    assert made.startswith("a\n") and made.endswith("z\n")
    with pytest.raises(ValueError, match=r"expected ops_checked\.json and ops_h200\.json"):
        tables.with_operations(readme, tmp_path, tmp_path)
    # Files of another kind are no results of the benchmark.
    assert "group_gemm" not in tables.with_results(f"{tables.START}{tables.END}", RESULTS, RESULTS)


def test_the_readme_is_up_to_date() -> None:
    assert tables.main(["--check"]) == 0, "run python -m moe_runtime.launch.tables"
