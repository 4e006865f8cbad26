"""The results table of the README, made from the JSON that `launch.bench` wrote and nothing else.

`python -m moe_runtime.launch.tables` rewrites what stands between the two result marks of README.md from all
`launch/results/*.json`; `--check` only tells, by its exit code, whether that would change anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results -->", "<!-- end of results -->"
OURS = "moe_runtime"


def results_table(report: dict[str, Any], source: str) -> str:
    """Markdown of one file of `launch.bench`: where it ran, then a line per operation, tokens and formats."""
    record, config = report["environment"], report["config"]["layer"]
    gpu = record["gpus"][0]["name"] if record["gpus"] else record["processor"]
    packages = {name: version for name, version in record["packages"].items() if version}
    shown = [name for name in ("torch", "triton", "nvshmem4py-cu13") if name in packages]
    versions = ", ".join(f"{name} {packages[name]}" for name in shown)
    lines = [
        f"{record['ranks']} x {gpu}, driver {record['driver']}, {versions}; transport `{record['transport']}`. "
        f"H={config['hidden_size']}, I={config['intermediate_size']}, E={config['num_experts']}, "
        f"top-{config['top_k']}, {report['results'][0]['routing']} routing. The slowest rank, median over iterations "
        f"(smallest to largest), [JSON]({source}), by `{record['command']}`.",
        "",
        "| operation | tokens per rank | format > combine | us | beside | us | ratio | error (bound) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    peers = {_key(result): result for result in report["results"] if result["implementation"] != OURS}
    for result in report["results"]:
        if result["implementation"] == OURS:
            lines.append(_row(result, peers.get(_key(result))))
    return "\n".join(lines)


def _key(result: dict[str, Any]) -> tuple[object, ...]:
    names = ("operation", "tokens_per_rank", "token_format", "weight_format", "combine_format", "mode", "routing")
    return tuple(result[name] for name in names)


def _row(result: dict[str, Any], peer: dict[str, Any] | None) -> str:
    check = result["check"]
    time = "not timed: its check failed"
    if result["median_us"] is not None:
        time = f"{_us(result['median_us'])} ({_us(result['smallest_us'])} to {_us(result['largest_us'])})"
    cells = [
        result["operation"],
        str(result["tokens_per_rank"]),
        f"{result['token_format']} > {result['combine_format']}",
        time,
    ]
    if peer is None or peer["median_us"] is None or result["median_us"] is None:
        cells += ["", "", ""]
    else:
        ratio = peer["median_us"] / result["median_us"]
        cells += [peer["implementation"], _us(peer["median_us"]), f"{ratio:.2f}"]
    cells.append("" if check is None else f"{check['error']:.2g} ({check['bound']:.2g})")
    return f"| {' | '.join(cells)} |"


def _us(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def with_results(readme: str, folder: Path, root: Path) -> str:
    """`readme` with all tables of `folder` between its marks. Raises `ValueError` where a mark is missing."""
    if readme.count(START) != 1 or readme.count(END) != 1:
        raise ValueError(f"README: expected {START} and {END} once each")
    before, rest = readme.split(START)
    _, after = rest.split(END)
    tables = [
        results_table(json.loads(file.read_text()), file.relative_to(root).as_posix())
        for file in sorted(folder.glob("*.json"))
    ]
    return "\n\n".join([before + START, *tables, END + after])


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 if `--check` finds the README out of date."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.tables", description="Tables of the README.")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    file = ROOT / "README.md"
    found = file.read_text(encoding="utf-8")
    wanted = with_results(found, ROOT / "launch" / "results", ROOT)
    if options.check:
        return int(found != wanted)
    file.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
