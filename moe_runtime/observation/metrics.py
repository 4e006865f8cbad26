"""All counters of layers as text for Prometheus (text exposition format 0.0.4), for a server to expose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.support.arguments import check_kind, describe

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the answer with `metrics_text`, as HTTP has it."""

Sample = tuple[dict[str, object], int | float]
"""Labels, besides those of all samples of a metric, and a value."""


def metrics_text(layers: Mapping[str, MoELayer] | Sequence[MoELayer]) -> str:
    """What the layers of this rank have counted, in Prometheus' text format; a line for each number.

    Waits for nothing: counts of a GPU are the newest that have reached the host (`LayerCounters.poll`). Call it between
    steps, from the thread that queues them, and let the server's thread answer with the last text. Layers that do not
    count (`count_steps`) have only what their context knows.

    Args:
        layers: by the name that their label `layer` gets, or in a list, with their `layer_id` as name. They may be of
            several contexts.

    Raises `ValueError` unless these are layers.
    """
    named = _named(layers)
    contexts = {id(layer.context): layer.context for layer in named.values()}
    lines: list[str] = []
    for name, kind, about, samples in _metrics(named, list(contexts.values())):
        found = [f"{name}{{{_labels(labels)}}} {value}" for labels, value in samples]
        if found:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *found]
    return "".join(f"{line}\n" for line in lines)


def _named(layers: object) -> dict[str, MoELayer]:
    if isinstance(layers, Mapping):
        named = dict(layers)
    elif isinstance(layers, Sequence) and not isinstance(layers, str):
        named = {str(layer.layer_id) if isinstance(layer, MoELayer) else "": layer for layer in layers}
        if len(named) < len(layers):
            raise ValueError("layers: expected a mapping from names for layers of several contexts with equal ids")
    else:
        raise ValueError(f"layers: expected layers, in a list or by name, got {describe(layers)}")
    for name, layer in named.items():
        check_kind("layers", name, str)
        check_kind("layers", layer, MoELayer)
    return named


def _labels(labels: Mapping[str, object]) -> str:
    escaped = {
        key: str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for key, value in labels.items()
    }
    return ",".join(f'{key}="{value}"' for key, value in escaped.items())


def _metrics(
    layers: Mapping[str, MoELayer], contexts: Sequence[ExpertParallelContext]
) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """Name, type, help and samples of each metric."""
    counts = {name: layer.counters.poll() for name, layer in layers.items() if layer.counters is not None}
    labels = {name: {"layer": name, "rank": layer.context.rank} for name, layer in layers.items()}

    def of_layers(field: str) -> list[Sample]:
        return [(labels[name], getattr(count, field)) for name, count in counts.items()]

    def of_contexts(field: str) -> list[Sample]:
        return [({"rank": context.rank}, getattr(context, field)) for context in contexts]

    counter, gauge, prefix = "counter", "gauge", "moe_runtime_"
    yield f"{prefix}steps_total", counter, "Steps that were counted.", of_layers("steps")
    yield f"{prefix}tokens_total", counter, "Tokens that this rank brought.", of_layers("tokens")
    yield (
        f"{prefix}expert_tokens_total",
        counter,
        "Tokens of this rank that were routed to an expert; summed over ranks, the expert's rows.",
        [
            ({**labels[name], "expert": expert}, tokens)
            for name, count in counts.items()
            for expert, tokens in enumerate(count.expert_tokens)
        ],
    )
    yield f"{prefix}rows_total", counter, "Rows that this rank's experts got, from all ranks.", of_layers("rows")
    yield (
        f"{prefix}dispatch_bytes_total",
        counter,
        "Bytes sent to other ranks in dispatch.",
        of_layers("dispatch_bytes"),
    )
    yield f"{prefix}combine_bytes_total", counter, "Bytes received from them in combine.", of_layers("combine_bytes")
    dropped = [
        (labels[name], layer.without_expert) for name, layer in layers.items() if layer.context.lost_experts == "drop"
    ]
    about = "to no expert, since it had died."
    yield f"{prefix}dropped_choices_total", counter, f"Choices that went {about}", [(on, two[0]) for on, two in dropped]
    yield (
        f"{prefix}dropped_tokens_total",
        counter,
        f"Tokens with choices {about}",
        [(on, two[1]) for on, two in dropped],
    )
    about = "of all layers, where ranks go on after a death."
    yield f"{prefix}steps_done_total", counter, f"Steps {about}", of_contexts("steps_done")
    yield f"{prefix}steps_repeated_total", counter, f"Steps run again {about}", of_contexts("steps_repeated")
    yield f"{prefix}generation", gauge, "How often the ranks have changed.", of_contexts("generation")
    yield (
        f"{prefix}rank_in",
        gauge,
        "Whether a rank, by its number at the start, takes part: 1 or 0.",
        [
            ({"rank": context.rank, "peer": peer}, int(state == "in"))
            for context in contexts
            for peer, state in context.rank_states.items()
        ],
    )
    yield f"{prefix}reserved_bytes", gauge, "Bytes reserved for the exchange.", of_contexts("reserved_bytes")
    yield (
        f"{prefix}failed",
        gauge,
        "Whether the context has failed: 1 or 0.",
        [({"rank": context.rank}, int(context.failed)) for context in contexts],
    )
