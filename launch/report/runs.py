"""Runs read back from their JSON: which kind a run is, where it ran, and its times with their spread."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.launch.benchmarks.layer_report import KEY, LOW_LATENCY_KIND, NORMAL_KIND, OURS, PHASES_KIND
from moe_runtime.launch.benchmarks.show import Report, Result
from moe_runtime.launch.kernel_bench.show import gpu_of

LAYER = "layer"
"""The kind of a run of `bench` over a config; its JSON has no `kind`."""
PHASES, LINKS = PHASES_KIND, "links"
GEMM, OPERATIONS, CHECKED, MODELS = "gemm", "operations", "operations_checked", "models"
"""Those of `kernel_bench`."""
LOW_LATENCY, NORMAL = LOW_LATENCY_KIND, NORMAL_KIND
PEERS = "peers"
"""Of `research.peers`."""
LOADING = "loading"

SIZES = ("hidden_size", "intermediate_size", "num_experts", "top_k")
"""Fields of a layer's config that make runs comparable."""

NAMED_BY = {
    LAYER: (*KEY, "implementation"),
    LOW_LATENCY: (*KEY, "implementation"),
    NORMAL: (*KEY, "implementation"),
    GEMM: ("case", "hidden", "intermediate"),
    OPERATIONS: ("operation", "format", "variant", "shape"),
    LINKS: ("way", "bytes_per_peer", "blocks"),
    MODELS: ("model", "weight_format", "token_format", "tokens"),
    PEERS: ("operation", "implementation", "variant", "tokens_per_rank"),
}
"""Fields that identify a time in a run, by kind."""


@dataclass(frozen=True)
class Figure:
    """A time and its spread, in microseconds; all None where nothing was timed.

    Raises `ValueError` for what was timed without a spread, and for what is no time.
    """

    median_us: float | None
    smallest_us: float | None
    largest_us: float | None

    def __post_init__(self) -> None:
        times = (self.median_us, self.smallest_us, self.largest_us)
        if self.median_us is not None and not all(isinstance(us, int | float) and 0 <= us < math.inf for us in times):
            raise ValueError(f"expected a time in us with its spread, got {times}")


@contextmanager
def reading(file: Path, what: str) -> Iterator[None]:
    """Turn errors while `file` is read and its JSON taken apart into a `ValueError` naming it; `what` is expected."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file.name}: {error.strerror}") from None
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{file.name}: expected the JSON of {what}, {text}") from None


def kind_of(report: Report) -> str:
    return str(report.get("kind", LAYER))


def read(file: Path, *kinds: str) -> Report:
    """The JSON of a run. Raises `ValueError` naming the file if it cannot be read, or is not of one of `kinds`."""
    with reading(file, "a run" if not kinds else f"a run of kind {' or '.join(kinds)}"):
        report: Report = json.loads(file.read_text())
        if kinds and kind_of(report) not in kinds:
            raise ValueError(f"got kind {kind_of(report)}")
        return report


def figures(report: Report) -> dict[str, Figure]:
    """Every time of a run that has a spread, by name. Raises `ValueError` for a kind without times."""
    kind = kind_of(report)
    if kind == LOADING:
        found = {}
        for name in ("read", "load"):
            times = [1e6 * seconds for seconds in report["result"][f"{name}_s"]]
            found[name] = Figure(statistics.median(times), min(times), max(times))
        return found
    if kind not in NAMED_BY:
        raise ValueError(f"got kind {kind}")
    timed: dict[str, Result] = {}
    for result in report["results"]:
        if "refused" in result:
            continue
        name = ", ".join(str(result[field]) for field in NAMED_BY[kind] if result[field] != "")
        timed[name] = result
        if kind == GEMM:
            timed |= {f"{name}: {part}": record for part, record in result.get("parts", {}).items()}
            timed |= {f"{name}: {peer['name']}": peer for peer in result["peers"]}
    # The oldest runs have no spread for baselines.
    return {
        name: Figure(record["median_us"], record["smallest_us"], record["largest_us"])
        for name, record in timed.items()
        if "smallest_us" in record
    }


def ours(report: Report) -> list[Result]:
    """Results of this runtime, without baselines."""
    return [result for result in report["results"] if result["implementation"] == OURS]


def ranks_of(report: Report) -> int:
    return int(report["environment"]["ranks"])


def model_of(report: Report) -> str:
    """Sizes of the layer of a run, and `num_sms` where it is limited."""
    layer = report["config"]["layer"]
    limited = [] if layer.get("num_sms") is None else [f"num_sms {layer['num_sms']}"]
    return ", ".join([*(f"{name} {layer[name]}" for name in SIZES), *limited])


def check_alike(reports: Sequence[Report]) -> None:
    """Raise `ValueError` where runs over a config are of different models or GPUs."""
    for what, of in (("model", model_of), ("GPU", gpu_of)):
        found = list(dict.fromkeys(of(report) for report in reports))
        if len(found) > 1:
            raise ValueError(f"RUN: expected runs of one {what}, got {'; '.join(found)}")
