"""The tables of the README, made from committed JSON and nothing else.

`python -m moe_runtime.launch.tables` rewrites what stands between the result marks of README.md from the files of
`launch.bench` in `launch/results/`, what stands between the operation marks from those of `launch.ops_run` and
`launch.doctor --kernels`, and what stands between the GEMM marks from those of `launch.bench gemm` without a config,
with the picture of the same name beside one; `--check` only tells, by its exit code, whether that would change
anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from moe_runtime.launch import gemm_table, kernel_table

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results -->", "<!-- end of results -->"
OPERATIONS_START, OPERATIONS_END = "<!-- operations -->", "<!-- end of operations -->"
GEMM_START, GEMM_END = "<!-- gemm -->", "<!-- end of gemm -->"
OURS = "moe_runtime"


def results_table(report: dict[str, Any], source: str) -> str:
    """Markdown of one file of `launch.bench`: where it ran, a line per operation and tokens, a column per format."""
    record, config = report["environment"], report["config"]["layer"]
    gpu = record["gpus"][0]["name"] if record["gpus"] else record["processor"]
    packages = {name: version for name, version in record["packages"].items() if version}
    shown = [name for name in ("torch", "triton", "nvshmem4py-cu13") if name in packages]
    versions = ", ".join(f"{name} {packages[name]}" for name in shown)
    results = report["results"]
    peers = {_key(result): result for result in results if result["implementation"] != OURS}
    ours = [result for result in results if result["implementation"] == OURS]
    columns = list(dict.fromkeys(_formats(result) for result in ours))
    rows = sorted({(_order(ours, result["operation"]), result["tokens_per_rank"]) for result in ours})
    names = {_order(ours, result["operation"]): result["operation"] for result in ours}
    beside = {result["operation"]: result["implementation"] for result in peers.values()}
    lines = [
        f"{record['ranks']} x {gpu}, driver {record['driver']}, {versions}; transport `{record['transport']}`. "
        f"H={config['hidden_size']}, I={config['intermediate_size']}, E={config['num_experts']}, "
        f"top-{config['top_k']}, {results[0]['routing']} routing. Microseconds on the slowest rank, median over "
        f"iterations; in parentheses what stands under *beside*, in the same run. Spread, errors and bounds are in the "
        f"[JSON]({source}), written by `{record['command']}`.",
        "",
        f"| operation | tokens per rank | {' | '.join(columns)} | beside |",
        "|" + "---|" * (len(columns) + 3),
    ]
    for order, tokens in rows:
        name = names[order]
        here = {_formats(r): r for r in ours if r["operation"] == name and r["tokens_per_rank"] == tokens}
        cells = [_cell(here[column], peers.get(_key(here[column]))) if column in here else "" for column in columns]
        lines.append(f"| {name} | {tokens} | {' | '.join(cells)} | {beside.get(name, '')} |")
    return "\n".join(lines)


def _order(results: list[dict[str, Any]], operation: str) -> int:
    """When an operation first comes up."""
    return next(index for index, result in enumerate(results) if result["operation"] == operation)


def _formats(result: dict[str, Any]) -> str:
    return f"{result['token_format']} > {result['combine_format']}"


def _key(result: dict[str, Any]) -> tuple[object, ...]:
    names = ("operation", "tokens_per_rank", "token_format", "weight_format", "combine_format", "mode", "routing")
    return tuple(result[name] for name in names)


def _cell(result: dict[str, Any], peer: dict[str, Any] | None) -> str:
    """Our time, and that of the peer; a result that failed its check was not timed, which is said."""
    if result["median_us"] is None:
        return "check failed"
    beside = "" if peer is None or peer["median_us"] is None else f" ({_us(peer['median_us'])})"
    return _us(result["median_us"]) + beside


def _us(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def with_results(readme: str, folder: Path, root: Path) -> str:
    """`readme` with all tables of `launch.bench` in `folder` between its marks, which say no `kind`.

    Raises `ValueError` where a mark is missing.
    """
    reports = [(file, json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    tables = [
        results_table(report, file.relative_to(root).as_posix()) for file, report in reports if "kind" not in report
    ]
    return _between(readme, START, END, tables)


def with_operations(readme: str, folder: Path, root: Path) -> str:
    """`readme` with the table of operations between its marks. Raises `ValueError` where a mark or file is missing."""
    checked, run = kernel_table.read_checked(folder), kernel_table.read_run(folder)
    if checked is None or run is None:
        raise ValueError(f"{folder}: expected {kernel_table.CHECKED_FILE} and {kernel_table.RUN_FILE}")
    source = (folder / kernel_table.RUN_FILE).relative_to(root).as_posix()
    return _between(readme, OPERATIONS_START, OPERATIONS_END, [kernel_table.markdown(checked, run, source)])


def with_gemm(readme: str, folder: Path, root: Path) -> str:
    """`readme` with all tables of `launch.bench gemm` in `folder` between its marks. Raises as `with_results` does."""
    tables = []
    for file in sorted(folder.glob("*.json")):
        report = json.loads(file.read_text())
        if report.get("kind") == gemm_table.KIND:
            picture = file.with_suffix(".svg")
            shown = picture.relative_to(root).as_posix() if picture.is_file() else None
            tables.append(gemm_table.markdown(report, file.relative_to(root).as_posix(), shown))
    return _between(readme, GEMM_START, GEMM_END, tables)


def _between(readme: str, start: str, end: str, texts: list[str]) -> str:
    if readme.count(start) != 1 or readme.count(end) != 1:
        raise ValueError(f"README: expected {start} and {end} once each")
    before, rest = readme.split(start)
    _, after = rest.split(end)
    return "\n\n".join([before + start, *texts, end + after])


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 if `--check` finds the README out of date."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.tables", description="Tables of the README.")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    file = ROOT / "README.md"
    found = file.read_text(encoding="utf-8")
    folder = ROOT / "launch" / "results"
    wanted = found
    for fill in (with_results, with_operations, with_gemm):
        wanted = fill(wanted, folder, ROOT)
    if options.check:
        return int(found != wanted)
    file.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
