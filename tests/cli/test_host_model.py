"""The model of a step over several hosts, and how full its slots are: against formulas, committed runs, and sense."""

from __future__ import annotations

import doctest
import json
import statistics
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.config import MoELayerConfig
from moe_runtime.launch.report.pages import between_marks
from moe_runtime.launch.research import host_model, host_routing, host_tables
from moe_runtime.launch.research.host_model import Deployment, Machine, Reach
from tests.support.programs import ROOT

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "launch" / "results"
MACHINE = Machine()


def layer(tokens: int = 128, token_format: str = "nvfp4", combine_format: str = "bf16") -> MoELayerConfig:
    return host_tables.layer(tokens, token_format, combine_format)


def parts(hosts: int, machine: Machine = MACHINE, **changes: Any) -> dict[str, float]:
    return host_model.step(Deployment(layer(**changes), hosts, 8), machine)


def results(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["results"]
    return found


def test_worked_examples() -> None:
    for module in (host_model, host_routing):
        found = doctest.testmod(module, extraglobs={"torch": torch})
        assert found.attempted and not found.failed


def test_constants_are_those_of_committed_runs() -> None:
    def median(name: str, operation: str, by: str) -> float:
        (found,) = (
            r["median_us"]
            for r in results(name)
            if (r["operation"], r["implementation"], r["tokens_per_rank"], r["token_format"])
            == (operation, by, 1, "nvfp4")
        )
        return float(found)

    both = sum(median("h200x2.json", operation, "moe_runtime") for operation in ("dispatch", "combine"))
    assert round(both / 4, 1) == MACHINE.kernel_us
    assert round(median("h200x2.json", "dispatch", "torch all_to_all_single"), 1) == MACHINE.network_latency_us
    over = [
        r["times_floor"]
        for r in results("models_h100.json")
        if r["model"] == "DeepSeek-V3" and r["tokens"] >= 8 and r["weight_format"] == r["token_format"]
        if r["token_format"] in ("nvfp4", "fp8_block")
    ]
    assert round(statistics.median(over), 2) == MACHINE.experts_over_floor


@pytest.mark.parametrize(("name", "value"), [("network_gb_per_s", 0), ("kernel_us", -1), ("memory_tb_per_s", 1e999)])
def test_rates_that_no_machine_has_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a"):
        replace(MACHINE, **{name: value})


def test_deployments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts: expected ranks that divide 256 experts, got 24"):
        Deployment(layer(), 3, 8)
    with pytest.raises(ValueError, match="ranks_per_host: expected at least 1, got 0"):
        Deployment(layer(), 2, 0)
    with pytest.raises(ValueError, match="where: expected several hosts, got 1"):
        parts(1)
    with pytest.raises(ValueError, match="where: expected one host, got 2"):
        host_model.one_host_step(Deployment(layer(), 2, 8), MACHINE)


@pytest.mark.parametrize("hosts", host_tables.HOSTS)
def test_bytes_are_those_of_the_exchange(hosts: int) -> None:
    """NVFP4 records of 4224 bytes and bf16 sums of 14336, as `docs/exchange.md` has them."""
    where = Deployment(layer(), hosts, 8)
    dispatch, combine = 128 * (4224 + 4) + 128, 129 * 14336
    assert where.network_bytes == {"dispatch": (hosts - 1) * dispatch, "combine": (hosts - 1) * combine}
    found = parts(hosts)
    expected = MACHINE.network_latency_us + (hosts - 1) * combine / MACHINE.network_gb_per_s * 1e-3
    assert found["network combine"] == pytest.approx(expected)
    assert tuple(found) == host_model.PARTS


def test_parts_answer_to_what_they_cross() -> None:
    base = parts(4, tokens=4096, token_format="fp8_block")
    slower = {
        "network_gb_per_s": {"network dispatch", "network combine"},
        "network_latency_us": {"network dispatch", "network combine"},
        "link_gb_per_s": {"forward", "combine_send"},
        "fp8_tflop_per_s": {"experts"},
    }
    for name, touched in slower.items():
        value = getattr(MACHINE, name)
        other = replace(MACHINE, **{name: value * 2 if name.endswith("_us") else value / 2})
        found = parts(4, other, tokens=4096, token_format="fp8_block")
        assert {part for part in found if found[part] != base[part]} == touched
        assert all(found[part] > base[part] for part in touched)
    assert (
        parts(4, tokens=4096, token_format="fp8_block", combine_format="fp8_block")["network combine"]
        < 0.6 * (base["network combine"])
    )
    given = host_model.step(Deployment(layer(), 4, 8), MACHINE, experts=7.0)
    assert given["experts"] == 7.0
    assert host_model.step(Deployment(layer(), 4, 8), MACHINE, Reach(0.5, 0.05))["forward"] < given["forward"]


def test_overlap_hides_the_smaller_part() -> None:
    """In one part: own tokens, the shared expert and own sums disappear behind the network, and no more."""
    where = Deployment(layer(), 2, 8)
    found = host_model.step(where, MACHINE)
    network, kernel = found["network dispatch"], MACHINE.kernel_us
    whole = sum(found.values())
    assert host_model.serial_us(found, 10.0) == pytest.approx(whole + 10.0)
    # Half of the tokens are own ones; both halves have the fixed time of a kernel.
    own = (found["forward"] - kernel) / 2
    hidden = own + (found["relay"] - kernel) / 2
    assert host_model.overlapped_us(where, MACHINE, found) == pytest.approx(whole - hidden)
    spare = network - kernel - own
    assert spare > 5
    assert host_model.overlapped_us(where, MACHINE, found, spare) == pytest.approx(whole - hidden)
    assert host_model.overlapped_us(where, MACHINE, found, spare + 5.0) == pytest.approx(whole - hidden + 5.0)
    with pytest.raises(ValueError, match="num_parts: expected at least 1, got 0"):
        host_model.overlapped_us(where, MACHINE, found, num_parts=0)


def test_parts_pay_for_themselves_where_bytes_are_many() -> None:
    few, many = (Deployment(layer(tokens), 2, 8) for tokens in (128, 4096))

    def us(where: Deployment, num_parts: int | None = None) -> float:
        return host_model.overlapped_us(where, MACHINE, host_model.step(where, MACHINE), num_parts=num_parts)

    assert us(few, 4) > us(few, 1) == us(few)
    assert us(many, 1) > us(many, 2) > us(many, 4) == us(many)
    # Kernels that wait for the network, or for which it waits, are hidden but for a part of them; each part of an
    # exchange has its latency.
    found = host_model.step(many, MACHINE)
    hidden = (found["forward"] + found["relay"]) / 2 + found["total"]
    gain = us(many, 1) - us(many, 4)
    assert 0.7 * hidden < gain + 6 * MACHINE.network_latency_us < hidden


def test_fewer_slots_are_fewer_bytes_and_another_copy() -> None:
    full, fewer = (Deployment(layer(4096).replace(host_capacity=slots), 16, 8) for slots in (None, 1900))
    for name, num_bytes in fewer.network_bytes.items():
        assert num_bytes == pytest.approx(full.network_bytes[name] * 1900 / 4096, rel=1e-3)
    before, after = (host_model.step(where, MACHINE) for where in (full, fewer))
    assert after["pack"] > before["pack"] and after["network combine"] < 0.5 * before["network combine"]
    # Sums are awaited all together, as slots are not tokens.
    given = Deployment(layer(4096).replace(host_capacity=4000), 2, 8)
    steps = [host_model.overlapped_us(where, MACHINE, before) for where in (given, Deployment(layer(4096), 2, 8))]
    assert steps[0] > steps[1]


def test_one_host_is_near_what_was_measured_there() -> None:
    """Where bytes count, half to one and a half of it; dispatch of the older run has older kernels."""
    found = host_tables.one_host_results(MACHINE)
    assert {r["run"] for r in found} == set(host_tables.ONE_HOST)
    for result in found:
        ratio = result["model_us"] / result["measured_us"]
        assert 0.45 < ratio < 1.3, result
        if result["operation"] == "combine":
            assert 0.8 < ratio < 1.15, result


def test_drawn_routing_is_the_formula() -> None:
    fills = host_routing.simulate("uniform", [2, 4, 16], [64, 1024], 1 << 14, 256, 8, seed=1)
    for (hosts, tokens), fill in fills.items():
        share = 1 - comb(256 - 256 // hosts, 8) / comb(256, 8)
        assert share == pytest.approx(host_model.reached(256 // hosts, 256, 8))
        assert 1 - fill.waste == pytest.approx(share, abs=0.006)
        assert fill.sigma == pytest.approx((tokens * share * (1 - share)) ** 0.5, rel=0.6)
        assert fill.mean <= fill.most <= tokens and fill.steps == (1 << 14) // tokens
        assert fill.capacity == min(tokens, -int(-(fill.mean + 6 * fill.sigma) // 1))
        assert fill.waste_of_capacity <= fill.waste + 1e-9
    # Fewer slots than tokens suffice where a token goes to few of the hosts.
    assert fills[16, 1024].capacity < 600 and fills[2, 64].capacity == 64


def test_groups_keep_tokens_on_few_hosts() -> None:
    """4 of 8 groups: a token reaches at most 4 of 8 hosts, and zipf's first host gets nearly all."""
    ids = {routing: host_routing.draw(routing, 4096, 256, 8, seed=3) for routing in host_routing.ROUTINGS}
    for routing, ids_TK in ids.items():
        assert ids_TK.shape == (4096, 8) and all(len(set(row)) == 8 for row in ids_TK[:64].tolist())
        used = host_routing.places_used(ids_TK, 256, 8).sum(dim=1)
        assert (int(used.max()) <= 4) == ("groups" in routing)
        again = host_routing.draw(routing, 4096, 256, 8, seed=3)
        assert torch.equal(ids_TK, again) and not torch.equal(ids_TK, host_routing.draw(routing, 4096, 256, 8, 4))
    shares = host_routing.places_used(ids["zipf"], 256, 4).double().mean(dim=0).tolist()
    assert shares[0] > 0.99 and shares == sorted(shares, reverse=True)
    # One of 70 sets of groups leaves a half out; groups with good experts have more of the token's.
    half = {
        routing: 1 - float(host_routing.places_used(found, 256, 2).double().mean()) for routing, found in ids.items()
    }
    assert 1 / 70 - 0.006 < half["groups"] < 0.025 < half["random groups"] < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": "even"}, "routing: expected one of uniform, zipf, groups"),
        ({"places": [3]}, "places: expected divisors of 256 experts, got 3"),
        ({"tokens": [100]}, "tokens: expected two steps at least of 256 tokens, got 100"),
        ({"routing": "random groups", "num_experts": 12, "places": [2]}, "num_experts: expected 8 groups"),
    ],
)
def test_draws_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "routing": "uniform",
        "places": [2],
        "tokens": [128],
        "num_tokens": 256,
        "num_experts": 256,
        "top_k": 8,
        "seed": 0,
    }
    with pytest.raises(ValueError, match=message):
        host_routing.simulate(**(given | changes))


def test_the_program_fills_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_tables, "DRAWN_TOKENS", 8192)
    monkeypatch.setattr(host_tables, "TOKENS", (128,))
    file, page = tmp_path / "model.json", tmp_path / "page.md"
    marks = "\n".join(f"<!-- {kind} -->\nold\n<!-- end of {kind} -->" for kind in host_tables.TABLES)
    page.write_text(f"# Title\n{marks}\nlast\n")
    arguments = ["--network-gb-per-s", "20", "--json", str(file), "--page", str(page)]
    assert host_tables.main(arguments) == 0
    text, report = page.read_text(), json.loads(file.read_text())
    assert report["machine"]["network_gb_per_s"] == 20.0 and report["kind"] == host_tables.KIND
    assert "old" not in text and text.startswith("# Title\n") and text.endswith("last\n")
    assert "**computed by us**" in text and "published by them, docs/legacy.md of DeepEP" in text
    page.write_text(f"# Title\n{marks}\nlast\n")
    assert host_tables.main(["--read", str(file), "--page", str(page)]) == 0 and page.read_text() == text
    assert host_tables.main(["--read", str(file)]) == 0 and "| tokens, formats |" in capsys.readouterr().out
    page.write_text("# Title\n")
    for wrong, message in (
        (["--page", str(page)], "page.md: expected"),
        (["--json", str(file)], "--read: computes nothing"),
        (["--network-latency-us", "1"], "--read: computes nothing"),
    ):
        assert host_tables.main(["--read", str(file), *wrong]) == 2
        assert message in capsys.readouterr().err


def test_the_page_says_what_is_assumed() -> None:
    text = " ".join((ROOT / "docs" / "hosts.md").read_text().split())
    assert f"A rank has {MACHINE.network_gb_per_s:g} GB/s of network" in text
    assert f"An exchange over it takes {MACHINE.network_latency_us:g} us" in text


def test_the_page_has_what_the_committed_file_says() -> None:
    """And what is computed now is what it says; the routing that was drawn is not drawn again."""
    report = json.loads((RESULTS / "host_model.json").read_text())
    page = (ROOT / "docs" / "hosts.md").read_text()
    assert between_marks("hosts.md", page, host_tables.tables_of(report)) == page
    machine = Machine(**report["machine"])
    assert json.loads(json.dumps(host_tables.model_results(machine))) == report["results"]
    assert host_tables.one_host_results(machine) == report["one_host"]
