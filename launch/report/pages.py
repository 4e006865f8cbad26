"""The generated tables of pages, from the committed JSON of `launch/results` alone.

`launch/results/README.md` has a table per kind of run, README.md and docs/results.md the layer's times beside others',
docs/peers.md all runs beside others. A table is of one commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill

from rich.console import Console

from moe_runtime.launch.benchmarks.bounds import EVEN
from moe_runtime.launch.benchmarks.layer_report import LOW_LATENCY, NORMAL, baselines_of, gpus_of, key_of
from moe_runtime.launch.benchmarks.show import Report, Result
from moe_runtime.launch.kernel_bench.ops_table import operations_markdown
from moe_runtime.launch.kernel_bench.show import RELATIVE, commit_of, foreign_note, gpu_of, shown_us, times_of, where
from moe_runtime.launch.report import peers, runs
from moe_runtime.launch.report.goals import judge_goals
from moe_runtime.launch.report.runs import kind_of, ours, ranks_of

FRONT = "h200x2.json"
"""The run of a layer that README.md shows while there is none beside peers."""
FOUR = "h200x4.json"
"""The run on four GPUs."""
RANKS = 2
"""Of the runs of DeepEP's calls that have a table."""
EXPANDED = ", expanded"
"""At the end of the cases of `kernel_bench gemm` whose FP4 weights are multiplied in FP8."""
KIND_OF_HUMMING = "mxfp4_peer"
"""Of a program of commit 3cf2bce, which `research.peers` has replaced."""
MOST_FLOORS = 1.5
"""Times its floor that a layer may take without a word about what bounds it."""

Run = tuple[str, Report]
"""Name of the file, and what it contains."""

Found = dict[str, list[Run]]
"""Runs by kind."""


def read_all(folder: Path) -> Found:
    """The runs in `folder`."""
    found: Found = {}
    for file in sorted(folder.glob("*.json")):
        report = runs.read(file)
        found.setdefault(kind_of(report), []).append((file.name, report))
    return found


def filled(name: str, page: str, found: Found) -> str:
    """The page called `name` with its tables between their marks, `<!-- KIND -->` and `<!-- end of KIND -->`.

    Raises `ValueError` where a mark is missing.
    """
    return between_marks(name, page, {kind: make(found) for kind, make in PAGES[name].items()})


def between_marks(name: str, page: str, tables: Mapping[str, str]) -> str:
    """`page` with each table between its marks. Raises `ValueError` naming the page where a mark is missing."""
    for kind, text in tables.items():
        start, end = f"<!-- {kind} -->", f"<!-- end of {kind} -->"
        if page.count(start) != 1 or page.count(end) != 1:
            raise ValueError(f"{name}: expected {start} and {end} once each")
        before, rest = page.split(start)
        _, after = rest.split(end)
        page = "\n".join([before + start, text, end + after])
    return page


def put_or_print(tables: Mapping[str, str], page: Path | None) -> None:
    """Put tables between their marks of a page, or print them where there is none."""
    if page is None:
        console = Console(highlight=False, soft_wrap=True)
        for text in tables.values():
            console.print(text, markup=False)
        return
    with runs.reading(page, "a page with marks"):
        text = between_marks(page.name, page.read_text(encoding="utf-8"), tables)
    page.write_text(text, encoding="utf-8")


def front_run(found: Found) -> Run:
    """What README.md shows: of the runs of `research.peers` the one with most implementations of the layer, and of
    equals the newest; without any `FRONT`."""
    beside = [(name, report) for name, report in found.get(runs.PEERS, []) if peers.series_of(report, "layer")]
    if beside:
        return max(beside, key=lambda run: (len(peers.series_of(run[1], "layer")), _time_of(run)))
    chosen = [run for run in found.get(runs.LAYER, []) if run[0] == FRONT]
    if not chosen:
        raise ValueError(f"results: expected a run of kind {runs.PEERS}, or {FRONT}")
    return chosen[0]


def _time_of(run: Run) -> str:
    return str(run[1]["environment"].get("time_utc", ""))


def front_table(found: Found, folder: str, *, short: bool = False) -> str:
    """What was run, where and how, a line per number of tokens with a column for each implementation, and how they
    compare.

    Args:
        found: all runs.
        folder: where the page finds the JSON.
        short: without the command.
    """
    name, report = front_run(found)
    series = peers.series_of(report, "layer")
    sizes = report["config"]["layer"]
    where_from = f"[JSON]({folder}{name})"
    said = (
        f"{ranks_of(report)} x {where(report)}, commit {commit_of(report)}: H={sizes['hidden_size']}, "
        f"I={sizes['intermediate_size']}, {sizes['num_experts']} experts, top-{sizes['top_k']}, {EVEN} routing "
        + (f"({where_from} with the command)." if short else f"({where_from}).")
    )
    command = [] if short else [f"```\n{report['environment']['command']}\n```"]
    counts = sorted({count for line in series.values() for count in line})
    lines = [
        [str(count), *(times_of(line[count]) if count in line else "" for line in series.values())] for count in counts
    ]
    errors = [f"{max(result['error'] for result in line.values()):.2g}" for line in series.values()]
    table = markdown_table(["tokens per rank", *series], [*lines, ["relative error", *errors]])
    return "\n\n".join([_filled(said), *command, table, _verdicts(report)])


def _verdicts(report: Report) -> str:
    """How the layers of a run beside peers compare, as a list."""
    return "\n".join(_filled(f"{line[:1].upper()}{line[1:]}.", "- ") for line in peers.verdicts(report))


def _filled(text: str, bullet: str = "") -> str:
    """In lines of a page."""
    indent = " " * len(bullet)
    return fill(
        text, 118, initial_indent=bullet, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def peers_table(found: Found, folder: str) -> str:
    """Of each run of `research.peers`, the newest first: a table per operation, how layers compare, and what has no
    time.

    `front_table` has the layer of `front_run`.
    """
    reports = sorted(found.get(runs.PEERS, []), key=_time_of, reverse=True)
    if not reports:
        return "There is no run of `research.peers` here yet."
    front, parts = front_run(found)[0], list[str]()
    for name, report in reports:
        sizes = f"{ranks_of(report)} ranks, {runs.model_of(report)}"
        parts.append(f"{_source(name, report, folder)} {sizes}. Versions: {peers.versions(report)}.")
        for operation in peers.operations_of(report):
            heads, lines = peers.rows_of(report, operation, times_of)
            if lines and (operation, name) != ("layer", front):
                parts.append(markdown_table([operation, *heads[1:]], lines))
                parts += [_verdicts(report)] if operation == "layer" else []
        excuses = "\n".join(f"- {line}" for line in peers.excuses(report))
        parts += [f"Without a time:\n\n{excuses}"] if excuses else []
    return "\n\n".join(parts)


def exchange_table(found: Found, name: str = FRONT, *, layers: bool = False) -> str:
    """Of the run called `name` and those of its commit, card and number of ranks: a line per number of tokens, a column
    per operation and format, with torch's. `layers` are among the operations if asked for."""
    of_torch = "In parentheses: torch's all-to-all of the same bytes" + (", or its layer in bf16." if layers else ".")
    reports: list[Run] = []
    columns: dict[str, dict[int, str]] = {}
    for run in _like(found, name):
        baselines, before = baselines_of(run[1]["results"]), sum(map(len, columns.values()))
        for operation in ("dispatch", "combine", *(["layer"] if layers else [])):
            for result in ours(run[1]):
                if result["operation"] == operation and result["routing"] == EVEN:
                    column = columns.setdefault(_column(result), {})
                    baseline = baselines.get(key_of(result))
                    torch = "" if baseline is None else f" ({shown_us(baseline['median_us'])})"
                    column.setdefault(result["tokens_per_rank"], _cell(result, torch))
        if sum(map(len, columns.values())) > before:
            reports.append(run)
    return _by_tokens(reports, columns, of_torch)


def _column(result: Result) -> str:
    """What was done, and in which format."""
    operation, tokens, weights = (result[field] for field in ("operation", "token_format", "weight_format"))
    if operation == "layer" and weights != tokens:
        return f"layer {weights} x {tokens}"
    return f"{operation} {result['combine_format'] if operation == 'combine' else tokens}"


def _newest(found: Found, kind: str) -> list[Run]:
    """The newest run of a kind on RANKS ranks, if there is one."""
    return sorted((run for run in found.get(kind, []) if ranks_of(run[1]) == RANKS), key=_time_of)[-1:]


def low_latency_table(found: Found) -> str:
    """A line per number of tokens: dispatch, combine and both, by the calls of `moe_runtime.deep_ep` and by our own."""
    reports = _newest(found, runs.LOW_LATENCY)
    columns: dict[str, dict[int, str]] = {}
    for _, report in reports:
        own = {(r["operation"], r["tokens_per_rank"]): r["median_us"] for r in ours(report)}
        for result in report["results"]:
            if not str(result["implementation"]).startswith(LOW_LATENCY):
                continue
            column = columns.setdefault(result["operation"], {})
            native, median = own.get((result["operation"], result["tokens_per_rank"])), result["median_us"]
            beside = "" if None in (native, median) else f" ({shown_us(native)}, {median / native:.2f})"
            column[result["tokens_per_rank"]] = _cell(result, beside)
    return _by_tokens(reports, columns, "In parentheses: our native calls, and the ratio to them.")


ELASTIC = "ElasticBuffer"
"""In the names of its calls."""


def normal_table(found: Found) -> str:
    """Of the newest run: a line per call of normal mode and buffer, a column per number of tokens.

    In a cell a time for each limit of SMs.
    """
    reports = _newest(found, runs.NORMAL)
    rows: dict[tuple[str, str], dict[int, dict[str, str]]] = {}
    for _, report in reports:
        for result in report["results"]:
            if str(result["implementation"]).startswith(NORMAL):
                parts = result["implementation"].removeprefix(NORMAL).strip(", ").split(", ")
                limit = next((part for part in parts if part.endswith(" SMs")), "")
                call = ", ".join([result["operation"], *(part for part in parts if part not in (ELASTIC, limit))])
                row = rows.setdefault((call, ELASTIC if ELASTIC in parts else "Buffer"), {})
                row.setdefault(result["tokens_per_rank"], {})[limit] = _cell(result)
    counts = sorted({count for row in rows.values() for count in row})
    limits = list(dict.fromkeys(limit for row in rows.values() for cell in row.values() for limit in cell))
    lines = [
        [
            *name,
            *(" / ".join(row[count].get(limit, "") for limit in limits) if count in row else "" for count in counts),
        ]
        for name, row in sorted(rows.items())
    ]
    text = f"Tokens per rank; each cell: {' / '.join(limits)}."
    table = markdown_table(["call", "buffer", *map(str, counts)], lines)
    return "\n\n".join([" ".join([*(_source(*run) for run in reports), text]), table])


def goal_table(found: Found) -> str:
    """Of the run with most ranks that has goals: a line per operation and format with a goal, a column per number of
    tokens, in it the time and the goal."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for _, report in found.get(runs.LAYER, []):
        judge_goals(ours(report), report["config"]["layer"], gpus_of(report["environment"]))
    most_first = sorted(_on_one_host(found), key=lambda run: (-ranks_of(run[1]), run[0]))
    reports = [run for run in most_first if any(result["goal"] for result in ours(run[1]))][:1]
    for _, report in reports:
        for result in ours(report):
            if goal := result["goal"]:
                combine = result["operation"] == "combine"
                fmt = result["combine_format" if combine else "token_format"]
                sign = {True: "<=", False: "**>**", None: "?"}[goal["met"]]
                text = f"{shown_us(result['median_us'])} {sign} {goal['us']}"
                rows.setdefault((result["operation"], fmt), {}).setdefault(result["tokens_per_rank"], text)
    counts = sorted({count for row in rows.values() for count in row})
    lines = [[*name, *(row.get(count, "") for count in counts)] for name, row in rows.items()]
    table = markdown_table(["operation", "format", *map(str, counts)], lines)
    return "\n\n".join([*(_source(*run) for run in reports), table])


def gemm_table(found: Found) -> str:
    """A line per shape; for each run a column per format and those of torch. Below it the goals that were missed."""
    cells: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    notes, sources = [], []
    for name, report in found.get(runs.GEMM, []):
        if _is_expanded(report):
            continue
        gpu, foreign = gpu_of(report).split()[1], bool(foreign_note(report))
        # Cases are named after the format of their weights.
        formats = list(dict.fromkeys(result["case"].partition(" ")[0] for result in report["results"]))
        torch = list(dict.fromkeys(peer["name"].split()[2] for r in report["results"] for peer in r["peers"]))
        columns += [f"{gpu} {fmt}" for fmt in formats] + [f"{gpu} torch {kind}" for kind in torch]
        missed = []
        for result in report["results"]:
            fmt, _, rows = result["case"].partition(" ")
            row = cells.setdefault(rows, {})
            row[f"{gpu} {fmt}"] = _cell(result)
            row |= {f"{gpu} torch {peer['name'].split()[2]}": times_of(peer) for peer in result["peers"]}
            goals = [goal for goal in result["goals"] if not foreign or goal["kind"] in RELATIVE]
            missed += [f"{result['case']} ({goal['text']})" for goal in goals if goal["met"] is False]
        held = sum(not foreign or g["kind"] in RELATIVE for r in report["results"] for g in r["goals"])
        sources.append(_source(name, report))
        notes.append(f"{gpu}: {held - len(missed)} of {held} goals met; missed: {', '.join(missed) or 'none'}.")
    lines = [[case, *(row.get(column, "") for column in columns)] for case, row in cells.items()]
    return "\n\n".join([" ".join(sources), markdown_table(["rows", *columns], lines), " ".join(notes)])


def expanded_table(found: Found, folder: str) -> str:
    """Of the run of `kernel_bench gemm --cases expanded`: a line per shape, FP4 weights multiplied in FP8, with the
    multiple of what FP8 weights take, which stand beside them."""
    for name, report in found.get(runs.GEMM, []):
        if not _is_expanded(report):
            continue
        times: dict[str, dict[str, Result]] = {}
        for result in report["results"]:
            fmt, _, rows = result["case"].partition(" ")
            times.setdefault(rows.removesuffix(EXPANDED).removesuffix(f", beside{EXPANDED[1:]}"), {})[fmt] = result
        formats = ("nvfp4", "mxfp4", "fp8_block")
        lines = [
            [rows, *(_cell(of[fmt], _beside(of[fmt], of["fp8_block"])) for fmt in formats)]
            for rows, of in times.items()
            if set(of) == set(formats)
        ]
        heads = ["rows", "NVFP4 in FP8", "MXFP4 in FP8", "FP8"]
        return "\n\n".join([_source(name, report, folder), markdown_table(heads, lines)])
    raise ValueError(f"results: expected a run of kind {runs.GEMM} with --cases expanded")


def _is_expanded(report: Report) -> bool:
    """Whether a run of `kernel_bench gemm` is that of `--cases expanded`."""
    return any(result["case"].endswith(EXPANDED) for result in report["results"])


def _beside(result: Result, other: Result) -> str:
    """The multiple of the time of another one."""
    if result is other or None in (result["median_us"], other["median_us"]):
        return ""
    return f" ({result['median_us'] / other['median_us']:.2f})"


def operation_table(found: Found, folder: str = "") -> str:
    """The table of `moe_runtime.ops`. Raises `ValueError` where one of its two files is missing."""
    checked, run = found.get(runs.CHECKED), found.get(runs.OPERATIONS)
    if not checked or not run:
        raise ValueError(f"results: expected runs of kind {runs.CHECKED} and {runs.OPERATIONS}")
    (name, report), *_ = run
    return operations_markdown(checked[0][1], report, folder + name)


def models_table(found: Found) -> str:
    """Of the newest runs of `kernel_bench models`, all of one commit and card: a line per model and pair of formats, a
    column per number of tokens, in it the time and what it is of torch's.
    """
    reports = sorted(found.get(runs.MODELS, []), key=_time_of, reverse=True)
    if not reports:
        raise ValueError(f"results: expected a run of kind {runs.MODELS}")
    newest = [run for run in reports if _is_like(run[1], reports[0][1])]
    # A row that was measured again is the newest one.
    results = {
        (result["model"], f"{result['weight_format']} x {result['token_format']}", result.get("tokens")): result
        for _, report in reversed(newest)
        for result in report["results"]
    }
    rows: dict[tuple[str, str], dict[int, str]] = {}
    refused: list[str] = []
    above = Counter[str]()
    for (_, pair, _), result in results.items():
        if "refused" in result:
            refused.append(f"{result['model']} in {pair}: {result['refused']}.")
            continue
        ratio, floors = result["ratio_to_torch"], result["times_floor"]
        cell = "check failed" if ratio is None else f"{shown_us(result['median_us'])} ({ratio:.2f}, {floors:.1f})"
        rows.setdefault((result["model"], pair), {})[result["tokens"]] = cell
        above["rows"] += 1
        above["torch"] += ratio is None or ratio > 1
        above["floor"] += floors is None or floors > MOST_FLOORS
    counts = sorted({count for row in rows.values() for count in row})
    lines = [[*key, *(row.get(count, "") for count in counts)] for key, row in rows.items()]
    said = (
        f"{above['rows']} rows: {above['torch']} slower than torch's bf16 layer, {above['floor']} above {MOST_FLOORS} "
        "times their floor."
    )
    table = markdown_table(["model", "weights x tokens", *(f"{count}" for count in counts)], lines)
    sources = " ".join(_source(*run) for run in newest)
    return "\n\n".join([sources, table, " ".join([said, *refused])])


def _is_like(report: Report, other: Report) -> bool:
    """Whether both are of one commit and card."""
    return (commit_of(report), gpu_of(report)) == (commit_of(other), gpu_of(other))


def humming_table(found: Found, folder: str = "") -> str:
    """Of the run of `KIND_OF_HUMMING`: a line for each way of computing, a column per number of tokens."""
    reports = found.get(KIND_OF_HUMMING)
    if not reports:
        raise ValueError(f"results: expected a run of kind {KIND_OF_HUMMING}")
    (name, report), *_ = reports
    rows: dict[str, dict[int, str]] = {}
    for result in report["results"]:
        rows.setdefault(result["implementation"], {})[result["tokens"]] = shown_us(result["median_us"])
    counts = sorted({count for row in rows.values() for count in row})
    lines = [[by, *(row.get(count, "") for count in counts)] for by, row in rows.items()]
    table = markdown_table(["tokens", *map(str, counts)], lines)
    return "\n\n".join([f"{_source(name, report, folder)} The peer is {report['peer']}.", table])


TABLES: dict[str, Callable[[Found], str]] = {
    "exchange": exchange_table,
    "four": partial(exchange_table, name=FOUR, layers=True),
    "goals": goal_table,
    "gemm": gemm_table,
    "models": models_table,
    "low_latency": low_latency_table,
    "normal": normal_table,
}
"""What makes the table of each pair of marks."""

FROM_DOCS = "../launch/results/"

PAGES: dict[str, dict[str, Callable[[Found], str]]] = {
    "launch/results/README.md": TABLES,
    "README.md": {"results": partial(front_table, folder="launch/results/", short=True)},
    "docs/results.md": {"results": partial(front_table, folder=FROM_DOCS)},
    "docs/peers.md": {"peers": partial(peers_table, folder=FROM_DOCS)},
    "docs/gemm.md": {
        "expanded": partial(expanded_table, folder=FROM_DOCS),
        "humming": partial(humming_table, folder=FROM_DOCS),
    },
    "docs/operations.md": {"operations": partial(operation_table, folder=FROM_DOCS)},
}
"""The pages with generated tables, from the root of a clone."""


def _on_one_host(found: Found) -> list[Run]:
    """Runs of layers on one host; `docs/hosts.md` has the others."""
    return [run for run in found.get(runs.LAYER, []) if not any((r.get("hosts") or 1) > 1 for r in run[1]["results"])]


def _like(found: Found, name: str) -> list[Run]:
    """The run of layers called `name`, and those of its commit, card and number of ranks."""

    def identity(report: Report) -> tuple[str, str, int]:
        return commit_of(report), gpu_of(report), ranks_of(report)

    there = _on_one_host(found)
    wanted = {identity(report) for other, report in there if other == name}
    return [run for run in there if identity(run[1]) in wanted]


def _short(name: str) -> str:
    return name.removesuffix(".json")


def _cell(result: Result, suffix: str | None = None) -> str:
    """The time of a result, which has none if it failed its check; with a suffix instead of the sustained time."""
    if result["median_us"] is None:
        return "check failed"
    return times_of(result) if suffix is None else shown_us(result["median_us"]) + suffix


def _source(name: str, report: Report, folder: str = "") -> str:
    """The file of a run, where it ran, and the commit that its files are of."""
    return f"[{_short(name)}]({folder}{name}): {where(report)}, commit {commit_of(report)}."


def _by_tokens(reports: Sequence[Run], columns: dict[str, dict[int, str]], text: str) -> str:
    """The sources of a table, then a line per number of tokens per rank."""
    sources = []
    for name, report in reports:
        gpus = f"{ranks_of(report)} GPU{'s' if ranks_of(report) > 1 else ''}"
        sources.append(f"{_source(name, report)[:-1]}, {gpus}, E={report['config']['layer']['num_experts']}.")
    counts = sorted({count for column in columns.values() for count in column})
    lines = [[str(count), *(column.get(count, "") for column in columns.values())] for count in counts]
    return "\n\n".join([f"{' '.join(sources)} {text}", markdown_table(["tokens per rank", *columns], lines)])


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown: the first column aligned to the left, the others to the right."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), *lines])
