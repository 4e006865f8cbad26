"""Counters as Prometheus reads them: the format by its grammar and by Prometheus' own parser, and the numbers."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from moe_runtime import MoELayer
from moe_runtime.kernels.exchange.waits import HEAD
from moe_runtime.observation.metrics import metrics_text
from moe_runtime.virtual import VirtualRanks, virtual_contexts
from tests.support.exchange_data import EXPERTS, HIDDEN, TOKENS, config, rank_input

pytestmark = pytest.mark.cpu_only

NAME, LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\n"])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
HEADER = re.compile(rf"# (HELP|TYPE) ({NAME}) (.+)")

Samples = dict[tuple[str, str], float]


def read(text: str) -> Samples:
    """The samples of a text, by name and labels; each name is described once, right before its samples."""
    found: Samples = {}
    described: list[str] = []
    types: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if match := HEADER.fullmatch(line):
            kind, name, rest = match.groups()
            if kind == "HELP":
                assert name not in described
                described.append(name)
            else:
                assert described[-1] == name and rest in ("counter", "gauge")
                types[name] = rest
                assert name.endswith("_total") == (rest == "counter")
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        name, labels, value = match.groups()
        assert described[-1] == name and name in types and (name, labels) not in found
        found[name, labels] = float(value)
    return found


def counted(seed: int, world: int = 2) -> tuple[list[MoELayer], VirtualRanks]:
    ranks = VirtualRanks(config(token_buckets=[4]), world, lambda layer: layer.load_random(1))
    for layer in ranks.layers:
        layer.count_steps()
        layer.count_waits()
    for step in range(3):
        ranks([rank_input(seed + step, rank, 3, HIDDEN, EXPERTS, 3).x for rank in range(world)], max_tokens=4)
    return ranks.layers, ranks


def test_all_counters_are_there(seed: int) -> None:
    layers, ranks = counted(seed)
    with ranks:
        for layer in layers:
            # Ranks that take turns in one process never wait.
            assert layer.waits is not None
            words = layer.waits.words.view(2, -1)[0, HEAD:]
            words += torch.randint(1, 2**40, words.shape, generator=torch.Generator().manual_seed(seed))
        found = [read(metrics_text([layer])) for layer in layers]
        for rank, (samples, layer) in enumerate(zip(found, layers, strict=True)):
            on = f'layer="0",rank="{rank}"'
            assert layer.counters is not None and layer.waits is not None
            counts, waits = layer.counters.read(), layer.waits.read()[4]
            for name, value in {
                "steps_total": 3,
                "tokens_total": 9,
                "rows_total": counts.rows,
                "dispatch_bytes_total": counts.dispatch_bytes,
                "combine_bytes_total": counts.combine_bytes,
            }.items():
                assert samples[f"moe_runtime_{name}", on] == value
            experts = [samples["moe_runtime_expert_tokens_total", f'{on},expert="{e}"'] for e in range(EXPERTS)]
            assert experts == list(counts.expert_tokens) and sum(experts) == 27
            bucket, peer = f'{on},bucket="4"', waits.peers[1 - rank]
            assert samples["moe_runtime_step_seconds_total", bucket] == pytest.approx(waits.step_ns * 1e-9)
            at = f'{bucket},peer="{1 - rank}"'
            assert samples["moe_runtime_late_seconds_total", at] == pytest.approx(peer.late_ns * 1e-9)
            for stage in ("dispatch", "combine"):
                for name, value in (
                    ("wait_seconds_total", getattr(peer, f"{stage}_ns") * 1e-9),
                    ("wait_seconds_max", getattr(peer, f"{stage}_max_ns") * 1e-9),
                    ("waits_total", getattr(peer, f"{stage}_waits")),
                ):
                    assert samples[f"moe_runtime_{name}", f'{at},stage="{stage}"'] == pytest.approx(value)
            assert not [labels for _, labels in samples if f'bucket="{TOKENS}"' in labels]
            own = f'context="0",rank="{rank}"'
            assert [samples["moe_runtime_rank_in", f'{own},peer="{p}"'] for p in (0, 1)] == [1, 1]
            assert samples["moe_runtime_reserved_bytes", own] == layer.context.reserved_bytes
            assert samples["moe_runtime_failed", own] == samples["moe_runtime_steps_repeated_total", own] == 0
            assert not [name for name, _ in samples if "dropped" in name]


def test_the_text_is_what_prometheus_parses(seed: int) -> None:
    """The same samples as by the grammar above."""
    parser = pytest.importorskip("prometheus_client.parser")
    layers, ranks = counted(seed)
    with ranks:
        text = metrics_text({'a "name" \\ of\ntwo lines': layers[0]})
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.type in ("counter", "gauge")
        for sample in family.samples:
            found[sample.name, tuple(sample.labels.items())] = sample.value
    assert len(found) == len(read(text)) > 20
    assert found["moe_runtime_steps_total", (("layer", 'a "name" \\ of\ntwo lines'), ("rank", "0"))] == 3


def test_what_is_not_counted_is_left_out_and_names_are_escaped() -> None:
    with virtual_contexts(1)[0] as context:
        layer = MoELayer(config(), context)
        samples = read(metrics_text([layer]))
        assert {name for name, _ in samples} == {
            f"moe_runtime_{name}"
            for name in (
                *("steps_done_total", "steps_repeated_total", "generation", "rank_in", "failed", "reserved_bytes"),
            )
        }
        layer.count_steps()
        layer.load_random(1)
        routes, on = layer.record_routes(torch.zeros(2, TOKENS, 3, dtype=torch.int16)), 'layer="0",rank="0"'
        for steps, reads in ((5, False), (5, True), (9, True)):
            # Those that nobody has read are lost, too.
            while routes.steps < steps:
                layer(torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
            samples = read(metrics_text([layer]))
            assert samples["moe_runtime_recorded_routes_total", on] == steps
            assert samples["moe_runtime_overwritten_routes_total", on] == {5: 3, 9: 5}[steps]
            if reads:
                routes.read()
        layer.routes = None
        assert "recorded_routes" not in metrics_text([layer])
        assert read(metrics_text([layer], {"0": routes}))["moe_runtime_recorded_routes_total", on] == 9
        for wrong in ([routes], {"1": routes}, {"0": None}):
            with pytest.raises(ValueError, match="routes: expected"):
                metrics_text([layer], wrong)  # type: ignore[arg-type]
        (labels,) = (at for name, at in read(metrics_text({'a"b\\c\nd': layer})) if name == "moe_runtime_steps_total")
        assert labels == r'layer="a\"b\\c\nd",rank="0"'


def test_dropped_choices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_contexts(1)[0] as context:
        layer = MoELayer(config(), context)
        context.lost_experts = "drop"
        monkeypatch.setattr(layer, "_members", SimpleNamespace(without_expert=(5, 4)))
        samples = read(metrics_text([layer]))
    on = 'layer="0",rank="0"'
    assert (
        samples["moe_runtime_dropped_choices_total", on] == 5 and samples["moe_runtime_dropped_tokens_total", on] == 4
    )


@pytest.mark.parametrize("wrong", [None, "layers", 5, [1], [1, 2], {"a": 1}, {1: None}, [torch.zeros(1)]])
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"layers: expected (a MoELayer|layers, in a list|a str)"):
        metrics_text(wrong)  # type: ignore[arg-type]


def test_layers_of_equal_number_need_names() -> None:
    layers = [MoELayer(config(), virtual_contexts(1)[0]) for _ in range(2)]
    with pytest.raises(ValueError, match="layers: expected a mapping from names"):
        metrics_text(layers)
    assert read(metrics_text(dict(zip("ab", layers, strict=True))))
