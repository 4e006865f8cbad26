"""All counters of layers as text for Prometheus (text exposition format 0.0.4), for a server to expose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.observation.routes import RecordedRoutes
from moe_runtime.support.arguments import check_kind, describe

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the answer with `metrics_text`, as HTTP has it."""

PREFIX, COUNTER, GAUGE = "moe_runtime_", "counter", "gauge"

Labels = dict[str, object]
Sample = tuple[Labels, int | float]
Metric = tuple[str, str, str, list[Sample]]
"""Name without the prefix, type, help and samples."""


def metrics_text(
    layers: Mapping[str, MoELayer] | Sequence[MoELayer], routes: Mapping[str, RecordedRoutes] | None = None
) -> str:
    """What the layers of this rank have counted, in Prometheus' text format; a line for each number.

    Counts of a GPU are the newest that have reached the host (`LayerCounters.poll`), for which nothing waits, unless
    experts that died are dropped: their counts are read from the device. So a text has what was done when the one
    before it was made, at least. Call it between steps, from the thread that queues them, and let the server's thread
    answer with the last text. Layers that count neither steps nor waits (`count_steps`, `count_waits`) have only what
    their context knows. Labels have the numbers that ranks had at the start, also after a death.

    Args:
        layers: by the name that their label `layer` gets, or in a list, with their `layer_id` as name. They may be of
            several contexts.
        routes: by name of the layer, those that are recorded elsewhere than by `MoELayer.record_routes`, such as
            `recorded_routes()` of an inference engine with its `built_layers()`.

    Raises `ValueError` unless these are layers, and routes of some of them.
    """
    named = _named(layers)
    recorded = {name: layer.routes for name, layer in named.items() if layer.routes is not None}
    if routes is not None:
        check_kind("routes", routes, Mapping)
        for name, of_layer in routes.items():
            if name not in named:
                raise ValueError(f"routes: expected names of layers, got {describe(name)}")
            check_kind("routes", of_layer, RecordedRoutes)
        recorded |= routes
    contexts = {id(layer.context): layer.context for layer in named.values()}
    lines: list[str] = []
    for name, kind, about, samples in _metrics(named, recorded, list(contexts.values())):
        if samples:
            lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
            lines += [f"{PREFIX}{name}{{{_labels(labels)}}} {value}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines)


def _named(layers: object) -> dict[str, MoELayer]:
    if isinstance(layers, Mapping):
        named = dict(layers)
    elif isinstance(layers, Sequence) and not isinstance(layers, str):
        for layer in layers:
            check_kind("layers", layer, MoELayer)
        named = {str(layer.layer_id): layer for layer in layers}
        if len({id(layer) for layer in layers}) < len(layers):
            raise ValueError("layers: expected each layer once")
        if len(named) < len(layers):
            raise ValueError("layers: expected a mapping from names for layers of several contexts with equal ids")
    else:
        raise ValueError(f"layers: expected layers, in a list or by name, got {describe(layers)}")
    for name, layer in named.items():
        check_kind("layers", name, str)
        if name.encode(errors="ignore").decode() != name:
            raise ValueError(f"layers: expected names of characters, got {describe(name)}")
        check_kind("layers", layer, MoELayer)
    return named


def _rank(context: ExpertParallelContext) -> int:
    """The number that this rank had at the start."""
    # The present number of a rank that was released says nothing any more.
    return context.members[context.rank] if context.recovery is None else context.recovery.membership.rank


def _labels(labels: Mapping[str, object]) -> str:
    return ",".join(f'{key}="{str(value).translate(_ESCAPED)}"' for key, value in labels.items())


_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def _metrics(
    layers: Mapping[str, MoELayer], routes: Mapping[str, RecordedRoutes], contexts: Sequence[ExpertParallelContext]
) -> Iterator[Metric]:
    """Name, type, help and samples of each metric."""
    labels: dict[str, Labels] = {name: {"layer": name, "rank": _rank(one.context)} for name, one in layers.items()}
    yield from _of_steps(layers, labels)
    yield from _of_waits(layers, labels)
    dropped = [(labels[name], one.without_expert) for name, one in layers.items() if one.context.lost_experts == "drop"]
    choices: list[Sample] = [(on, both[0]) for on, both in dropped]
    tokens: list[Sample] = [(on, both[1]) for on, both in dropped]
    yield "dropped_choices_total", COUNTER, "Choices that went to no expert, since it had died.", choices
    yield "dropped_tokens_total", COUNTER, "Tokens with such choices.", tokens
    recorded = [(labels[name], one.poll()) for name, one in routes.items()]
    steps: list[Sample] = [(on, both[0]) for on, both in recorded]
    lost: list[Sample] = [(on, both[1]) for on, both in recorded]
    yield "recorded_routes_total", COUNTER, "Steps whose routes were recorded.", steps
    about = "Steps whose recorded routes were overwritten before they were read."
    yield "overwritten_routes_total", COUNTER, about, lost

    numbered: list[tuple[Labels, ExpertParallelContext]] = [({"context": n}, one) for n, one in enumerate(contexts)]

    def of_contexts(field: str) -> list[Sample]:
        return [({**on, "rank": _rank(context)}, int(getattr(context, field))) for on, context in numbered]

    about = "by layers of a context whose ranks go on after a death."
    yield "steps_done_total", COUNTER, f"Steps done {about}", of_contexts("steps_done")
    yield "steps_repeated_total", COUNTER, f"Steps run again {about}", of_contexts("steps_repeated")
    yield "generation", GAUGE, "How often the ranks have changed.", of_contexts("generation")
    states: list[Sample] = [
        ({**on, "rank": _rank(context), "peer": peer}, int(state == "in"))
        for on, context in numbered
        for peer, state in context.rank_states.items()
    ]
    yield "rank_in", GAUGE, "Whether a rank, by its number at the start, takes part: 1 or 0.", states
    yield "failed", GAUGE, "Whether the context has failed: 1 or 0.", of_contexts("failed")
    yield "reserved_bytes", GAUGE, "Bytes that are reserved for the exchange.", of_contexts("reserved_bytes")


def _of_steps(layers: Mapping[str, MoELayer], labels: Mapping[str, Labels]) -> Iterator[Metric]:
    counts = {name: layer.counters.poll() for name, layer in layers.items() if layer.counters is not None}

    def of(field: str) -> list[Sample]:
        return [(labels[name], getattr(count, field)) for name, count in counts.items()]

    yield "steps_total", COUNTER, "Steps that were counted.", of("steps")
    yield "tokens_total", COUNTER, "Tokens that this rank brought.", of("tokens")
    by_expert: list[Sample] = [
        ({**labels[name], "expert": expert}, tokens)
        for name, count in counts.items()
        for expert, tokens in enumerate(count.expert_tokens)
    ]
    about = "Tokens of this rank that were routed to an expert; summed over ranks, the rows of the expert."
    yield "expert_tokens_total", COUNTER, about, by_expert
    yield "rows_total", COUNTER, "Rows that the experts of this rank got, from all ranks.", of("rows")
    yield "dispatch_bytes_total", COUNTER, "Bytes that went to other ranks in dispatch.", of("dispatch_bytes")
    yield "combine_bytes_total", COUNTER, "Bytes that came back from them in combine.", of("combine_bytes")


def _of_waits(layers: Mapping[str, MoELayer], labels: Mapping[str, Labels]) -> Iterator[Metric]:
    counted = {name: layer.waits for name, layer in layers.items() if layer.waits is not None}
    counts = {
        name: {bucket: of_bucket for bucket, of_bucket in waits.poll().items() if of_bucket.steps}
        for name, waits in counted.items()
    }
    buckets = [({**labels[name], "bucket": b}, one) for name, found in counts.items() for b, one in found.items()]
    peers = [
        ({**labels[name], "bucket": bucket, "peer": peer}, waits)
        for name, found in counts.items()
        for bucket, one in found.items()
        for peer, waits in zip(counted[name].members, one.peers, strict=True)
        if peer != labels[name]["rank"]
    ]

    def of(field: str, unit: float = 1e-9) -> list[Sample]:
        return [
            ({**on, "stage": stage}, getattr(waits, f"{stage}_{field}") * unit)
            for on, waits in peers
            for stage in ("dispatch", "combine")
        ]

    yield (
        "step_seconds_total",
        COUNTER,
        "From the start of dispatch_recv to the end of combine.",
        [(on, one.step_ns * 1e-9) for on, one in buckets],
    )
    yield "wait_seconds_total", COUNTER, "How long this rank waited for a peer.", of("ns")
    yield "wait_seconds_max", GAUGE, "The longest of these waits.", of("max_ns")
    yield "waits_total", COUNTER, "How many they were.", of("waits", 1)
    about = "The part of the waits in dispatch before the peer had entered its step."
    yield "late_seconds_total", COUNTER, about, [(on, waits.late_ns * 1e-9) for on, waits in peers]
