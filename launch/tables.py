"""The tables of README.md and of launch/results/README.md, made from committed JSON and nothing else.

`python -m moe_runtime.launch.tables` rewrites what stands between marks. In README.md: the times of the run of
`launch.bench` with the most ranks, a few lines of `launch.bench gemm`, and the operations of `launch.ops_run` and
`launch.doctor --kernels`. In launch/results/README.md: everything about every run of `launch.bench`, and every case of
`launch.bench gemm` with the picture of the same name. `--check` only tells, by its exit code, whether that would change
anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from moe_runtime.launch import gemm_table, kernel_table
from moe_runtime.launch.bounds import EVEN, SKEW_FACTOR, SKEW_US, verdict
from moe_runtime.launch.environment import shown_us
from moe_runtime.launch.layer_bench import OURS
from moe_runtime.launch.layer_report import key_of, peers_of, settings_of

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results -->", "<!-- end of results -->"
OPERATIONS_START, OPERATIONS_END = "<!-- operations -->", "<!-- end of operations -->"
GEMM_START, GEMM_END = "<!-- gemm -->", "<!-- end of gemm -->"


def results_table(report: dict[str, Any], source: str) -> str:
    """Markdown of one file of `launch.bench`: times, then goals, layers and uneven routings where it has any."""
    ours = _ours(report)
    parts = (_goal_lines(ours), _layer_lines(ours), _skew_lines(ours))
    return "\n".join([times_table(report, source), *(line for lines in parts for line in lines)])


def times_table(report: dict[str, Any], source: str) -> str:
    """Markdown of one file of `launch.bench`: where it ran, a line per operation and tokens, a column per format."""
    record, config = report["environment"], report["config"]["layer"]
    gpu = record["gpus"][0]["name"] if record["gpus"] else record["processor"]
    packages = {name: version for name, version in record["packages"].items() if version}
    shown = [name for name in ("torch", "triton", "nvshmem4py-cu13") if name in packages]
    versions = ", ".join(f"{name} {packages[name]}" for name in shown)
    peers, ours = peers_of(report["results"]), _ours(report)
    columns = list(dict.fromkeys(_formats(result) for result in ours))
    routings = list(dict.fromkeys(result["routing"] for result in ours))
    operations = list(dict.fromkeys(result["operation"] for result in ours))
    beside = {result["operation"]: result["implementation"] for result in peers.values()}
    settings = "".join(f", {text}" for text in settings_of(config))
    lines = [
        f"{record['ranks']} x {gpu}, driver {record['driver']}, {versions}; transport `{record['transport']}`. "
        f"H={config['hidden_size']}, I={config['intermediate_size']}, E={config['num_experts']}, "
        f"top-{config['top_k']}{settings}, {', '.join(routings)} routing. Microseconds on the slowest rank, median "
        f"over iterations; in parentheses what stands under *beside*, in the same run. Spread, errors and bounds are "
        f"in the [JSON]({source}), written by `{record['command']}`.",
        "",
        f"| operation | tokens per rank | {' | '.join(columns)} | beside |",
        "|" + "---|" * (len(columns) + 3),
    ]
    for name, routing, tokens in product(operations, routings, sorted({r["tokens_per_rank"] for r in ours})):
        case = (name, routing, tokens)
        here = {_formats(r): r for r in ours if (r["operation"], r["routing"], r["tokens_per_rank"]) == case}
        if not here:
            continue
        label = name if len(routings) == 1 else f"{name}, {routing}"
        fields = {label: "median_us"}
        # Files of before they were timed say nothing of sustained times.
        if any(r.get("sustained_us") for r in here.values()):
            fields[f"{label}, sustained"] = "sustained_us"
        for text, field in fields.items():
            cells = [
                _cell(here[column], peers.get(key_of(here[column])), field) if column in here else ""
                for column in columns
            ]
            lines.append(f"| {text} | {tokens} | {' | '.join(cells)} | {beside.get(name, '')} |")
    return "\n".join(lines)


def _ours(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [result for result in report["results"] if result["implementation"] == OURS]


def _goal_lines(ours: list[dict[str, Any]]) -> list[str]:
    """Goals of a run that has any."""
    aimed = [r for r in ours if r.get("goal")]
    if not aimed:
        return []
    lines = ["", "| operation | format | tokens per rank | us | goal us | |", "|---|---|---:|---:|---:|---|"]
    for r in aimed:
        where = f"| {r['operation']} | {_formats(r)} | {r['tokens_per_rank']} |"
        lines.append(f"{where} {_cell(r, None)} | {r['goal']['us']} | {verdict(r['goal']['met'])} |")
    return lines


def _layer_lines(ours: list[dict[str, Any]]) -> list[str]:
    """What a layer's time stands beside, where a run has it: spread, torch's time, error, memory."""
    layers = [r for r in ours if r["operation"] == "layer" and r["median_us"] and r.get("ratio_to_torch")]
    if not layers:
        return []
    lines = [
        "",
        "The layer: time over that of a layer of torch in bf16 and over that of ours with its experts in separate "
        "passes, relative error against float64, and the memory of the rank that needs most (weights, a step, the "
        "symmetric heap).",
        "",
        "| format | routing | tokens per rank | us | smallest - largest | of torch | of unfused | error | bound "
        "| peak GB |",
        "|---|---|" + "---:|" * 8,
    ]
    for r in layers:
        memory = f"{r['memory']['peak_bytes'] / 1e9:.2f}" if r["memory"] else ""
        spread = f"{shown_us(r['smallest_us'])} - {shown_us(r['largest_us'])}"
        unfused = "" if r["ratio_to_unfused"] is None else f"{r['ratio_to_unfused']:.2f}"
        numbers = f"{shown_us(r['median_us'])} | {spread} | {r['ratio_to_torch']:.2f} | {unfused}"
        errors = f"{r['check']['error']:.2e} | {r['check']['bound']:.2e}"
        lines.append(f"| {_formats(r)} | {r['routing']} | {r['tokens_per_rank']} | {numbers} | {errors} | {memory} |")
    return lines


def _skew_lines(ours: list[dict[str, Any]]) -> list[str]:
    """Uneven routing beside what it may take, where a run has both cases."""
    uneven = [r for r in ours if r.get("skew")]
    if not uneven:
        return []
    lines = [
        "",
        f"Uneven routing, which may take {SKEW_FACTOR:g} times as long as the busiest rank's bytes at the rate of "
        f"{EVEN} routing, and {SKEW_US:g} us.",
        "",
        "| operation | format | routing | tokens per rank | us | allowed us | |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for r in uneven:
        where = f"| {r['operation']} | {_formats(r)} | {r['routing']} | {r['tokens_per_rank']} |"
        lines.append(f"{where} {_cell(r, None)} | {shown_us(r['skew']['allowed_us'])} | {verdict(r['skew']['met'])} |")
    return lines


def _formats(result: dict[str, Any]) -> str:
    return f"{result['token_format']} > {result['combine_format']}"


def _cell(result: dict[str, Any], peer: dict[str, Any] | None, field: str = "median_us") -> str:
    """Our time, and that of the peer; a result that failed its check was not timed, which is said."""
    if result["median_us"] is None:
        return "check failed"
    if result[field] is None:
        return ""
    beside = "" if peer is None or peer[field] is None else f" ({shown_us(peer[field])})"
    return shown_us(result[field]) + beside


def with_times(page: str, folder: Path, root: Path) -> str:
    """`page` with the times of the run of `launch.bench` in `folder` with the most ranks between its marks.

    Raises `ValueError` where a mark or a run is missing.
    """
    runs = _runs(folder)
    if not runs:
        raise ValueError(f"{folder}: expected a run of launch.bench")
    file, report = runs[0]
    return _between(page, START, END, [times_table(report, file.relative_to(root).as_posix())])


def with_results(page: str, folder: Path, root: Path) -> str:
    """`page` with all tables of all runs of `launch.bench` in `folder` between its marks, a heading over each run.

    Raises `ValueError` where a mark is missing.
    """
    tables = [
        f"### {file.stem}\n\n{results_table(report, file.relative_to(root).as_posix())}"
        for file, report in _runs(folder)
    ]
    return _between(page, START, END, tables)


def _runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Files of `launch.bench`, which say no `kind`: most ranks first, of several the one with the shortest name."""
    reports = [(file, json.loads(file.read_text())) for file in folder.glob("*.json")]
    runs = [(file, report) for file, report in reports if "kind" not in report]
    return sorted(runs, key=lambda run: (-run[1]["environment"]["ranks"], len(run[0].name), run[0].name))


def with_operations(page: str, folder: Path, root: Path) -> str:
    """`page` with the table of operations between its marks. Raises `ValueError` where a mark or file is missing."""
    checked, run = kernel_table.read_checked(folder), kernel_table.read_run(folder)
    if checked is None or run is None:
        raise ValueError(f"{folder}: expected {kernel_table.CHECKED_FILE} and {kernel_table.RUN_FILE}")
    source = (folder / kernel_table.RUN_FILE).relative_to(root).as_posix()
    return _between(page, OPERATIONS_START, OPERATIONS_END, [kernel_table.markdown(checked, run, source)])


def with_gemm(page: str, folder: Path, root: Path) -> str:
    """`page` with all cases of `launch.bench gemm` in `folder` between its marks. Raises as `with_results` does."""
    tables = []
    for file, report in _gemm_runs(folder):
        picture = file.with_suffix(".svg")
        shown = picture.relative_to(root).as_posix() if picture.is_file() else None
        tables.append(gemm_table.markdown(report, file.relative_to(root).as_posix(), shown))
    return _between(page, GEMM_START, GEMM_END, tables)


def with_few_gemms(page: str, folder: Path, root: Path) -> str:
    """`page` with a few cases of `launch.bench gemm`, on the GPU that floors were measured on, between its marks.

    Of several runs there it is the one whose file comes first. Raises as `with_results` does.
    """
    found = [run for run in _gemm_runs(folder) if not gemm_table.foreign_note(run[1])]
    runs = [(report, file.relative_to(root).as_posix()) for file, report in found[:1]]
    return _between(page, GEMM_START, GEMM_END, [gemm_table.short_markdown(*run) for run in runs])


def _gemm_runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    reports = [(file, json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    runs = [(file, report) for file, report in reports if report.get("kind") == gemm_table.KIND]
    return sorted(runs, key=lambda run: gemm_table.foreign_note(run[1]))


def _between(page: str, start: str, end: str, texts: list[str]) -> str:
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"README: expected {start} and {end} once each")
    before, rest = page.split(start)
    _, after = rest.split(end)
    return "\n\n".join([before + start, *texts, end + after])


PAGES: dict[str, tuple[Callable[[str, Path, Path], str], ...]] = {
    "README.md": (with_times, with_operations, with_few_gemms),
    "launch/results/README.md": (with_results, with_gemm),
}
"""What fills in each page. Links are relative to where the page lies."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 if `--check` finds a page out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.tables", description=f"Tables of {', '.join(PAGES)}."
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    found = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    wanted = dict(found)
    for name, fills in PAGES.items():
        for fill in fills:
            wanted[name] = fill(wanted[name], ROOT / "launch" / "results", (ROOT / name).parent)
    if options.check:
        return int(found != wanted)
    for name, text in wanted.items():
        (ROOT / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
