"""The benchmark of the grouped GEMM by itself: its cases, its checks, its verdicts, and the program."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, StoredWeights
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import SILU
from moe_runtime.launch.benchmarks.checks import ungrouped
from moe_runtime.launch.benchmarks.timing import STEPS_PER_GRAPH, copies_to_rotate
from moe_runtime.launch.kernel_bench import __main__ as bench
from moe_runtime.launch.kernel_bench import gemm_bench, gemm_peers
from moe_runtime.launch.kernel_bench.gemm_cases import (
    BF16_PEER,
    CASES,
    FP8_PEER,
    RANKS,
    ROUTINGS,
    GemmCase,
    Goal,
    shares,
)
from moe_runtime.launch.kernel_bench.gemm_check import (
    SAMPLE,
    Sample,
    check_bits,
    check_gated,
    check_plain,
    poisoned_memory,
)
from moe_runtime.launch.kernel_bench.gemm_data import clone_rows, make_rows, make_weights, num_copies
from moe_runtime.launch.kernel_bench.show import own_kernels
from moe_runtime.launch.report import __main__ as report
from tests.support.comparison import assert_same_bits


def case(fmt: str = "nvfp4", product: str = "both", routing: str = "even") -> GemmCase:
    return GemmCase("a case", fmt, 3, 6, product, routing, hidden=256, intermediate=128)


def operands(
    fmt: str, product: str, device: torch.device, routing: str = "even"
) -> tuple[GroupedRows, list[StoredWeights], Sample]:
    chosen, rng = case(fmt, product, routing), torch.Generator(device).manual_seed(5)
    rows = make_rows(chosen, 5, rng, "auto")
    weights = [make_weights(chosen, part, rng, "auto") for part in chosen.products]
    return rows, weights, Sample.draw(rows, 5)


# Cases


def test_names_and_goals_lead_somewhere() -> None:
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names)
    for c in CASES:
        assert c.format in FORMATS and c.routing in ROUTINGS and c.small().goals == ()
        for goal in c.goals:
            assert goal.kind != "of_case" or (goal.other in names and goal.other != c.name)
            assert goal.kind != "of_peer" or goal.other in (BF16_PEER, FP8_PEER)
            assert str(goal.other or f"{goal.value:g}" if goal.kind != "floor_share" else "80%") in goal.text


def test_rows_of_groups() -> None:
    by_name = {c.name: c.group_rows(0) for c in CASES}
    for fmt in FORMATS:
        even = f"{fmt} 32x1024 both"
        assert by_name[even] == (1024,) * 32
        half, zipf, empty = (by_name[f"{even}, {kind}"] for kind in ("half", "zipf", "empty"))
        assert sum(half) == sum(zipf) == sum(empty) == 32768
        assert half[0] == 16384 and set(half[1:]) == {528, 529}
        assert zipf[0] / zipf[9] == pytest.approx(10, rel=1e-3) and sorted(zipf, reverse=True) == list(zipf)
        assert empty.count(0) == 16 and set(empty) == {0, 2048}
    real = by_name["nvfp4 T=128 both"]
    assert real == by_name["nvfp4 T=128 both, as a layer hands it on"]
    assert len(real) == 32 and len(set(real)) > 5
    # 8192 choices of 256 experts: 1024 +- 30 rows here, 32 +- 6 in a group.
    assert abs(sum(real) - 1024) < 150 and all(8 <= size <= 60 for size in real)
    assert next(c for c in CASES if c.name == "nvfp4 T=128 both").group_rows(1) != real


@pytest.mark.parametrize(("total", "weights"), [(0, [1, 2]), (7, [1, 1, 1]), (100, [0.3, 0, 0.1])])
def test_shares_add_up(total: int, weights: list[float]) -> None:
    sizes = shares(total, weights)
    assert sum(sizes) == total
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - total * weight / sum(weights)) < 1


def test_floors_of_known_cases() -> None:
    by_name = {c.name: c for c in CASES}
    decode = by_name["nvfp4 32x32 both"]
    (first, by_first), (second, by_second) = decode.floors_us(decode.group_rows(0))
    assert by_first == by_second == "memory"
    # 0.5625 bytes for each of 44.04 million weights of 32 experts at 4.3 TB/s; rows add little.
    assert 184.3 < first + second < 190
    for name, tflop_per_s in (("fp8_block 8x4096 gate_up", 1437), ("bf16 8x4096 gate_up", 773)):
        prefill = by_name[name]
        ((us, by),) = prefill.floors_us(prefill.group_rows(0))
        assert by == "compute" and us == pytest.approx(2 * 32768 * 4096 * 7168 / tflop_per_s * 1e-6)
    sizes = (5, 0, 3)
    gate_up, down = case().products
    weight = 256 * 256 // 2 + 256 * 256 // 16
    assert case().moved_bytes(gate_up, sizes) == 8 * (128 + 16 + 4 + 64 + 8 + 4) + 2 * weight
    assert case().moved_bytes(down, sizes) == 8 * (64 + 8 + 4 + 2 * 256) + 2 * weight // 2
    assert case().flops(sizes) == 2 * 8 * 3 * 128 * 256


def test_expanded_cases_have_the_rows_of_the_fp8_cases_beside_them() -> None:
    chosen = gemm_bench.select("expanded")
    by_name = {c.name: c for c in chosen}
    assert len(chosen) == 36 and all(c.brief for c in chosen) and not any(c.brief for c in CASES if c not in chosen)
    # A case needs new weights where the format changes alone.
    assert [c.weight_format.name for c in chosen] == [fmt for fmt in ("nvfp4", "mxfp4", "fp8_block") for _ in range(12)]
    for c in chosen[:24]:
        fmt, rows = c.name.split(" ", 1)
        fp8 = by_name[f"fp8_block {rows.replace('expanded', 'beside expanded')}"]
        assert c.expanded and c.weights == fmt and fp8.weight_format is fp8.multiplied_format is c.multiplied_format
        assert c.group_rows(0) == fp8.group_rows(0) and c.products == fp8.products and c.flops([1]) == fp8.flops([1])
        assert c.goals == ((Goal("of_case", 1.08, fp8.name),) if c.routing == "even" else ())
        assert sum(c.small().group_rows(0)) > 0
    one = by_name["nvfp4 32x1 both, uniform, expanded"]
    active = sum(size > 0 for size in one.group_rows(0))
    weights = active * (4096 * 7168 + 7168 * 2048) * 9 // 16
    assert weights < sum(one.moved_bytes(product, one.group_rows(0)) for product in one.products) < 1.01 * weights
    last = by_name["mxfp4 32x2048 both, uniform, expanded"]
    (us, by), _ = last.floors_us(last.group_rows(0))
    assert by == "compute" and us == pytest.approx(2 * sum(last.group_rows(0)) * 4096 * 7168 / 1437 * 1e-6)


# Operands


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_a_layer_are_found_through_their_index(fmt: str, device: torch.device) -> None:
    chosen = case(fmt, routing="layer")
    rows = make_rows(chosen, 5, torch.Generator(device).manual_seed(5), "auto")
    ids, total = chosen.routed(5), sum(chosen.group_rows(5))
    assert rows.capacity == RANKS * 2 * 3 > total
    x_RK = torch.randn(ids.shape[0], 256, generator=torch.Generator(device).manual_seed(5), device=device)
    values = dequantize_rows(quantize_rows(x_RK.to(torch.bfloat16), fmt), engine="torch")
    tokens = [token for expert in range(3) for token in (ids == expert).any(1).nonzero().flatten().tolist()]
    assert_same_bits(dequantize_rows(ungrouped(rows), engine="torch"), values[tokens])


def test_copies_lie_elsewhere_and_are_many_times_the_cache(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    rows, _, _ = operands("nvfp4", "both", device, "layer")
    copy = clone_rows(rows)
    for name in ("rows", "scales", "row_scale", "row_index", "group_offsets"):
        ours, theirs = getattr(rows, name), getattr(copy, name)
        assert ours.data_ptr() != theirs.data_ptr()
        assert_same_bits(theirs, ours, name)
    assert num_copies(torch.device("cpu"), 1) == 1

    class Properties:
        L2_cache_size = 60_000_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    sizes = (2_000_000_000, 800_000_000, 132_000_000, 66_000_000, 1000)
    found = [num_copies(torch.device("cuda"), size) for size in sizes]
    assert found == [2, 3, 15, STEPS_PER_GRAPH, STEPS_PER_GRAPH]
    assert [copies_to_rotate(torch.device("cuda"), size) for size in sizes] == [1, *found[1:]]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("nvfp4 32x4 both, uniform, expanded", ("few", "few")),
        ("nvfp4 32x24 both, uniform, expanded", ("dozen", "dozen")),
        ("mxfp4 32x256 both, uniform, expanded", ("tall", "tall")),
        ("mxfp4 32x1024 both, even, expanded", ("ahead", "ahead")),
        ("fp8_block 32x8 both, uniform, beside expanded", ("some", "some")),
        ("fp8_block 32x64 both, uniform, beside expanded", ("decode", "decode")),
        ("bf16 8x4096 down", ("prefill",)),
        ("nvfp4 32x32 both", ()),
    ],
)
def test_planned_shapes_are_those_of_the_expected_rows(
    name: str, shapes: tuple[str, ...], device: torch.device
) -> None:
    (chosen,) = (c for c in CASES if c.name == name)
    narrow = make_rows(replace(chosen, hidden=128, intermediate=128), 0, torch.Generator(device).manual_seed(0), "auto")
    products = [product.name for product in chosen.products]
    assert gemm_bench.planned_shapes(chosen, narrow) == dict(zip(products, shapes, strict=False))


# Checks


def test_samples_have_the_ends_of_each_group(device: torch.device) -> None:
    rows, _, _ = operands("bf16", "down", device)
    offsets = torch.tensor([0, 0, 1, 3, 203], dtype=torch.int32, device=device)
    sample = Sample.draw(replace(rows, group_offsets=offsets), 1)
    taken = [sample.positions[part].tolist() for part in sample.groups]
    assert taken[:3] == [[], [0], [1, 2]]
    assert len(set(taken[3])) == len(taken[3]) == SAMPLE and {3, 202} <= set(taken[3]) <= set(range(3, 203))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("routing", ["empty", "layer"])
def test_checks_find_what_is_wrong(fmt: str, routing: str, device: torch.device) -> None:
    rows, (gate_up, down), sample = operands(fmt, "both", device, routing)
    total = int(rows.group_offsets[-1])
    with poisoned_memory():
        middle = grouped_gemm_swiglu(rows, gate_up, SILU, out_format=fmt)
    assert 0 < check_gated(middle, rows, gate_up, sample).error <= 1
    spoilt = raw_bits(middle.rows).clone()
    # The sign of an element that is not small.
    values = dequantize_rows(ungrouped(middle), engine="torch")
    row, column = divmod(int(values[:total].abs().argmax()), 128)
    if fmt == "nvfp4":
        spoilt[row, column // 2] ^= 0x80 if column % 2 else 0x08
    else:
        spoilt[row, column] ^= torch.iinfo(spoilt.dtype).min if fmt == "bf16" else 0x80
    wrong = replace(middle, rows=spoilt.view(middle.rows.dtype))
    assert row in sample.positions and check_gated(wrong, rows, gate_up, sample).error > 1
    with poisoned_memory():
        unwritten = grouped_gemm_swiglu(replace(rows, num_active_experts=1), gate_up, SILU, out_format=fmt)
    assert check_gated(unwritten, rows, gate_up, sample).error == math.inf

    out = torch.full((rows.capacity + 2, 256), math.nan, dtype=torch.bfloat16, device=device)
    grouped_gemm(middle, down, out=out)
    assert 0 < check_plain(out, middle, down, sample, "down").error <= 1
    for place, value, least in ((0, 1.05, 1), (total - 1, math.nan, math.inf)):
        other = out.clone()
        other[place] *= value
        assert check_plain(other, middle, down, sample, "down").error > 1
        assert check_plain(other, middle, down, sample, "down").error >= least
    out[total] = 0
    assert check_plain(out, middle, down, sample, "down").error == math.inf


def test_expanded_weights_are_checked_as_those_that_they_expand_to(device: torch.device) -> None:
    chosen, rng = replace(case("fp8_block", "down"), weights="nvfp4", expanded=True), torch.Generator(device)
    rows, w = make_rows(chosen, 5, rng, "auto"), make_weights(chosen, chosen.products[0], rng, "auto")
    assert isinstance(w, ExpandedWeights)
    sample, out = Sample.draw(rows, 5), grouped_gemm(rows, w)
    assert check_plain(out, rows, w, sample, "down") == check_plain(out, rows, w.expand(), sample, "down")
    found = check_bits([out, out[:4]], [-out, out[:4]])
    assert not found.passed and found.error == out.numel() and check_bits([out], [out.clone()]).passed


def test_poisoned_memory_is_nan_inside_alone() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert bool(torch.empty(1000).isnan().all())
        assert bool((torch.empty(1000, dtype=torch.uint8) == 255).all())
        assert torch.empty(10, dtype=torch.float8_e4m3fn).float().isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


# Runs


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("product", ["gate_up", "down", "both"])
def test_a_case_is_checked_and_timed(fmt: str, product: str) -> None:
    with ExpertParallelContext() as context:
        runner = gemm_bench.Runner(context, engine="auto", iterations=2, seed=1)
        record = runner.run(case(fmt, product, "layer" if product == "both" else "half"))
    assert all(check["passed"] for check in record["checks"]) and len(record["checks"]) == 2 + (product == "both")
    assert 0 < record["smallest_us"] <= record["median_us"] <= record["largest_us"]
    assert record["floor_share"] == pytest.approx(record["floor_us"] / record["median_us"])
    assert record["rate_tflop_per_s"] == pytest.approx(record["work_flop"] / record["median_us"] * 1e-6)
    assert record["rate_tb_per_s"] == pytest.approx(record["moved_bytes"] / record["median_us"] * 1e-6)
    assert set(record["parts"]) == ({"gate_up", "down"} if product == "both" else set())
    for timed in (*record["parts"].values(), *(peer for peer in record["peers"] if peer["why"] is None)):
        assert 0 < timed["smallest_us"] <= timed["median_us"] <= timed["largest_us"] and timed["iterations"] == 2
    assert [peer["name"] for peer in record["peers"]] == [BF16_PEER, *([FP8_PEER] if fmt == "fp8_block" else [])]
    json.dumps(record)


def test_a_failed_check_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = gemm_bench.grouped_gemm

    def spoil(*arguments: Any, **more: Any) -> torch.Tensor:
        out = original(*arguments, **more)
        out[0, 3] += 1
        return out

    monkeypatch.setattr(gemm_bench, "grouped_gemm", spoil)
    assert bench.main(["gemm", "--small", "--cases", "^bf16 8x4096 down", "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "check failed" in out and "FAILED down: largest error over its elementwise bound" in out


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_an_expanded_case_is_checked_and_timed(weights: str) -> None:
    chosen = replace(case("fp8_block", routing="uniform"), rows=8, weights=weights, expanded=True, brief=True)
    with ExpertParallelContext() as context:
        runner = gemm_bench.Runner(context, engine="auto", iterations=2, seed=1)
        record = runner.run(chosen)
        assert isinstance(next(iter(runner._weights.values())).copies[chosen.products[0]][0], ExpandedWeights)
        beside = runner.run(replace(chosen, weights=None, expanded=False))
    assert all(check["passed"] for one in (record, beside) for check in one["checks"])
    assert len(record["checks"]) == len(beside["checks"]) + 1 == 4
    assert record["rows"] == beside["rows"] and record["peers"] == beside["peers"] == []
    assert (record["weight_format"], record["expanded_weights"]) == (weights, True)
    assert (beside["weight_format"], beside["expanded_weights"]) == ("fp8_block", False)
    assert record["median_us"] > 0 and set(record["parts"]) == {"gate_up", "down"}
    # 4 bits and block scales, and scales of blocks of 128x128, instead of 8 bits and such scales.
    bits, blocks = {"nvfp4": 4.5, "mxfp4": 4.25}[weights], 3 * 3 * 2 * 128 * 128 // 128**2
    assert record["weight_bytes"] == 3 * 3 * 256 * 128 * bits / 8 + 4 * blocks
    assert beside["weight_bytes"] == 3 * 3 * 256 * 128 + 4 * blocks


@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_a_wrong_bit_of_expanded_weights_is_found(
    product: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "grouped_gemm" if product == "down" else "grouped_gemm_swiglu"
    original = getattr(gemm_bench, name)

    def spoil(rows: GroupedRows, w: StoredWeights, *arguments: Any, **more: Any) -> Any:
        out = original(rows, w, *arguments, **more)
        if isinstance(w, ExpandedWeights):
            raw_bits(out if product == "down" else out.rows)[0, 3] ^= 1
        return out

    monkeypatch.setattr(gemm_bench, name, spoil)
    arguments = ["gemm", "--small", "--cases", "^mxfp4 32x4 .*expanded", "--steps", "1"]
    assert bench.main(arguments) == 1
    out = capsys.readouterr().out
    assert "check failed" in out
    assert "FAILED elements that differ from the FP8 GEMM of the same e4m3 weights: 1 > 0" in " ".join(out.split())


def test_a_peer_that_there_is_not_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExpertParallelContext() as context:
        peers = gemm_peers.Peers(context, 1)
        chosen = case("fp8_block", "down")
        monkeypatch.delattr(torch, "_scaled_grouped_mm")
        bf16, fp8 = peers.of(chosen, (6, 6, 6))
        assert bf16["median_us"] > 0 and bf16["why"] is None
        assert fp8["median_us"] is None and "_scaled_grouped_mm" in fp8["why"]
        # Once for all cases of these sizes.
        assert peers.of(case("bf16", "down"), (6, 6, 6)) == [bf16]


def test_goals_are_judged() -> None:
    def record(name: str, us: float | None, *goals: Goal) -> dict[str, Any]:
        fields = [{"kind": g.kind, "value": g.value, "other": g.other, "text": g.text, "met": None} for g in goals]
        rates = {"rate_tflop_per_s": us and 1000 / us, "floor_share": us and 50 / us}
        peers = [{"name": BF16_PEER, "median_us": 120.0, "why": None}, {"name": FP8_PEER, "median_us": None, "why": ""}]
        return {"case": name, "median_us": us, "goals": fields, "peers": peers, **rates}

    goals = {
        Goal("us", 100): True,
        Goal("us", 99): False,
        Goal("tflop_per_s", 10): True,
        Goal("tflop_per_s", 11): False,
        Goal("floor_share", 0.5): True,
        Goal("floor_share", 0.51): False,
        Goal("of_case", 1.25, "other"): True,
        Goal("of_case", 1.2, "other"): False,
        Goal("of_case", 1.2, "failed"): None,
        Goal("of_case", 1.2, "not run"): None,
        Goal("of_peer", 1.0, BF16_PEER): True,
        Goal("of_peer", 0.8, BF16_PEER): False,
        Goal("of_peer", 1.0, FP8_PEER): None,
    }
    results = [record("this", 100.0, *goals), record("other", 80.0), record("failed", None, Goal("us", 1))]
    gemm_bench.judge(results)
    assert [goal["met"] for goal in results[0]["goals"]] == list(goals.values())
    assert results[2]["goals"][0]["met"] is None


def test_the_program_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gemm.json"
    pattern = "^(nvfp4 8x16 down|fp8_block 32x32|mxfp8 .*zipf)"
    assert bench.main(["gemm", "--small", "--cases", pattern, "--steps", "1", "--json", str(file)]) == 0
    made = json.loads(file.read_text())
    assert made["passed"] and made["environment"]["packages"]["torch"]
    names = ["nvfp4 8x16 down", "fp8_block 32x32 both", "mxfp8 32x1024 both, zipf"]
    assert [result["case"] for result in made["results"]] == names
    printed = capsys.readouterr().out
    assert made["ceilings"]["gpu"] == "NVIDIA H200"
    here = [gpu["name"] for gpu in made["environment"]["gpus"][:1]]
    assert ("measured on NVIDIA H200, NOT what this ran on." in printed) == (here != ["NVIDIA H200"])
    assert report.main(["show", str(file)]) == 0
    assert capsys.readouterr().out == printed


def test_a_roofline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "gemm.json"
    assert bench.main(["gemm", "--small", "--cases", "^bf16 8x4096", "--steps", "1", "--json", str(file)]) == 0
    assert report.main(["plot", str(file), "--folder", str(tmp_path)]) == 0
    assert b"operations per byte" in file.with_suffix(".svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gemm", "--cases", "no such case"), "--cases: no case like 'no such case'"),
        (("gemm", "--cases", "("), "--cases: "),
        (("gemm", "--json", "no/such/folder/x.json"), "--json: no folder no/such/folder"),
        (("gemm", "--steps", "0"), "--steps: expected at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kernel_bench: {message}") and error.count("\n") == 1


@pytest.mark.gpu
def test_kernels_of_a_case_are_named() -> None:
    with ExpertParallelContext() as context:
        runner = gemm_bench.Runner(context, engine="auto", iterations=2, seed=1)
        record = runner.run(case("bf16", "both"))
    assert record["method"] == "cuda_graph" and len(own_kernels(record)) >= 1
    assert len(record["kernels"]) >= 2
