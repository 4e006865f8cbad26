"""Writes what `host_model` and `host_routing` say of DeepSeek-V3's layer on 2 to 16 hosts of 8 ranks.

`python -m moe_runtime.launch.research.host_tables --json FILE` computes, prints and writes the JSON, in seconds and
without a GPU. `--page docs/hosts.md` puts its tables there, between their marks, beside what others publish; with
`--read FILE` of an earlier JSON instead.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_runtime.config import MoELayerConfig
from moe_runtime.launch.common import environment
from moe_runtime.launch.report import runs
from moe_runtime.launch.report.goals import OLD_MODES
from moe_runtime.launch.report.pages import markdown_table, put_or_print
from moe_runtime.launch.report.runs import Report, Result
from moe_runtime.launch.research import host_model, host_routing
from moe_runtime.launch.research.host_model import Deployment, Machine, Reach

KIND = "host_model"
"""`kind` of the JSON."""

HOSTS, RANKS_PER_HOST = (2, 4, 8, 16), 8
TOKENS = (128, 4096)
FORMATS = (("nvfp4", "bf16"), ("nvfp4", "fp8_block"), ("fp8_block", "bf16"), ("fp8_block", "fp8_block"))
"""Of tokens (and weights), and of partial sums."""

SIZES = {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8}
SHARED_INTERMEDIATE = 2048
"""DeepSeek-V3's layer and its shared expert."""

DRAWN_TOKENS, SEED = 1 << 18, 0
"""Of the routing that is drawn."""

RESULTS = Path(__file__).resolve().parents[1] / "results"
ONE_HOST = ("h200x2.json", "h200x4.json", "h200x8.json")
"""Measured runs on one host that the model is compared with: on the GPU that its rates are of."""


PPLX = "docs/fabric-lib.md of pplx-garden"


@dataclass(frozen=True)
class Published:
    """What others publish of dispatch and combine, for 16, 32, 64 and 128 ranks; not measured by us.

    Attributes:
        name: of the library, with its network.
        page: where they stand.
        tokens: of a rank, about.
        figures: "dispatch + combine" by hosts of 8 ranks, in microseconds unless they have a unit.
    """

    name: str
    page: str
    tokens: int
    figures: dict[int, str]


PUBLISHED = (
    Published(
        "DeepEP V1 low latency, CX7",
        "docs/legacy.md of DeepEP",
        128,
        {2: "118 + 195", 4: "155 + 273", 8: "173 + 314", 16: "192 + 369"},
    ),
    Published("pplx-garden, CX7", PPLX, 128, {2: "110 + 186", 4: "154 + 266", 8: "188 + 309"}),
    Published("pplx-garden, EFA", PPLX, 128, {2: "215 + 242", 4: "229 + 335", 8: "267 + 391"}),
    Published("UCCL-EP, H200, EFA", "ep/README.md of uccl", 128, {2: "226 + 293", 4: "465 + 694"}),
    Published(
        "DeepEP V1 normal, CX7",
        "docs/legacy.md of DeepEP",
        4096,
        {2: "43 + 43 GB/s", 4: "58 + 57 GB/s", 8: "51 + 50 GB/s"},
    ),
    Published(
        "DeepEP V2, CX7, 8192 tokens, local traffic counted",
        "README of DeepEP",
        4096,
        {2: "90 + 81 GB/s", 4: "61 + 61 GB/s"},
    ),
    Published("pplx-garden, CX7", PPLX, 4096, {2: "2735 + 1062", 4: "4012 + 7527", 8: "4665 + 8771"}),
    Published("pplx-garden, EFA", PPLX, 4096, {2: "3197 + 5379", 4: "4619 + 8272", 8: "5334 + 9779"}),
    Published("UCCL-EP, H200, EFA", "ep/README.md of uccl", 4096, {2: "1196 + 6379", 4: "2022 + 4899"}),
)


def layer(tokens: int, token_format: str, combine_format: str) -> MoELayerConfig:
    """DeepSeek-V3's layer."""
    given = {"max_tokens_per_rank": tokens, "token_format": token_format, "combine_format": combine_format}
    return MoELayerConfig.model_validate(SIZES | given | {"weight_format": token_format})


def model_results(machine: Machine) -> list[Result]:
    """A line for each number of tokens, pair of formats and number of hosts: bytes, parts, and whole steps."""
    found = []
    for tokens in TOKENS:
        for formats in FORMATS:
            config = layer(tokens, *formats)
            shared = host_model.shared_us(config, machine, SHARED_INTERMEDIATE)
            for hosts in HOSTS:
                where = Deployment(config, hosts, RANKS_PER_HOST)
                parts = host_model.step(where, machine)
                found.append(
                    {
                        "tokens_per_rank": tokens,
                        "token_format": formats[0],
                        "combine_format": formats[1],
                        "hosts": hosts,
                        "ranks_per_host": RANKS_PER_HOST,
                        "network_bytes": where.network_bytes,
                        "parts_us": parts,
                        "dispatch_us": sum(parts[name] for name in host_model.DISPATCH),
                        "combine_us": sum(parts[name] for name in host_model.COMBINE),
                        "shared_us": shared,
                        "serial_us": host_model.serial_us(parts, shared),
                        "one_part_us": host_model.overlapped_us(where, machine, parts, shared, 1),
                        "built_us": host_model.overlapped_us(where, machine, parts, shared),
                        "built_parts": len(where.geometry.parts),
                    }
                )
    return found


def fill_results(machine: Machine) -> list[Result]:
    """A line for each routing, number of hosts and of tokens: slots that are used, and times with as few as needed."""
    found = []
    experts, top_k = SIZES["num_experts"], SIZES["top_k"]
    for routing in host_routing.ROUTINGS:
        ranks = [hosts * RANKS_PER_HOST for hosts in HOSTS]
        places = sorted({*HOSTS, *ranks})
        fills = host_routing.simulate(routing, places, list(TOKENS), DRAWN_TOKENS, experts, top_k, SEED)
        for (hosts, tokens), fill in fills.items():
            if hosts not in HOSTS:
                continue
            config = layer(tokens, "nvfp4", "bf16")
            reach = Reach(1 - fill.waste, 1 - fills[hosts * RANKS_PER_HOST, tokens].waste)
            all_slots, fewer = (
                _with_slots(Deployment(config.replace(host_capacity=slots), hosts, RANKS_PER_HOST), machine, reach)
                for slots in (None, fill.capacity)
            )
            found.append(
                {
                    "routing": routing,
                    "hosts": hosts,
                    **asdict(fill),
                    "waste": fill.waste,
                    "capacity": fill.capacity,
                    "waste_of_capacity": fill.waste_of_capacity,
                    **all_slots,
                    "with_capacity": fewer,
                }
            )
    return found


def _with_slots(where: Deployment, machine: Machine, reach: Reach) -> dict[str, float]:
    """Microseconds of the network, and of a step as it is built, without a shared expert."""
    parts = host_model.step(where, machine, reach)
    return {
        "dispatch_us": parts["network dispatch"],
        "combine_us": parts["network combine"],
        "step_us": host_model.overlapped_us(where, machine, parts),
    }


def one_host_results(machine: Machine) -> list[Result]:
    """What the model says of committed runs on one host, beside what was measured there."""
    found = []
    for name in ONE_HOST:
        report = runs.read(RESULTS / name)
        sizes = {key: report["config"]["layer"][key] for key in runs.SIZES}
        for result in runs.ours(report):
            operation, tokens = result["operation"], result["tokens_per_rank"]
            if result["routing"] != "uniform" or operation not in ("dispatch", "combine", "layer"):
                continue
            formats = {key: result[key] for key in ("token_format", "weight_format", "combine_format")}
            config = MoELayerConfig.model_validate(sizes | formats | {"max_tokens_per_rank": tokens})
            # Runs are older than today's rule for `auto`.
            mode = OLD_MODES.get(result["mode"], result["mode"])
            parts = host_model.one_host_step(Deployment(config, 1, runs.ranks_of(report), mode), machine)
            of = {"dispatch": host_model.ONE_HOST_DISPATCH, "combine": host_model.ONE_HOST_COMBINE}
            us = sum(parts[part] for part in of.get(operation, tuple(parts)))
            found.append(
                {
                    "run": name,
                    "operation": operation,
                    "tokens_per_rank": tokens,
                    **formats,
                    "model_us": us,
                    "measured_us": result["median_us"],
                }
            )
    return found


def model_table(report: Report) -> str:
    """Parts and whole steps; a line for each number of tokens, pair of formats and number of hosts."""
    rows = []
    for result in report["results"]:
        sent, parts = result["network_bytes"], result["parts_us"]
        rows.append(
            [
                f"{result['tokens_per_rank']}, {result['token_format']} > {result['combine_format']}",
                str(result["hosts"]),
                f"{sent['dispatch'] / 1e6:.3g} + {sent['combine'] / 1e6:.3g}",
                *(f"{parts[name]:.0f}" for name in host_model.PARTS),
                *(f"{result[name]:.0f}" for name in ("serial_us", "one_part_us")),
                f"{result['built_us']:.0f} ({result['built_parts']})",
            ]
        )
    heads = ["tokens, formats", "hosts", "MB", *host_model.PARTS, "one by one", "in one part", "as built"]
    return markdown_table(heads, rows)


def published_table(report: Report) -> str:
    """Dispatch + combine of ours, computed, and of others, published; a column for each number of ranks."""
    heads = ["tokens of a rank", "whose", "source", *(f"{hosts * RANKS_PER_HOST} ranks" for hosts in HOSTS)]
    rows = []
    for tokens in TOKENS:
        for formats in FORMATS:
            ours = {
                result["hosts"]: f"{result['dispatch_us']:.0f} + {result['combine_us']:.0f}"
                for result in report["results"]
                if (result["tokens_per_rank"], result["token_format"], result["combine_format"]) == (tokens, *formats)
            }
            name = f"moe_runtime, {formats[0]} > {formats[1]}"
            rows.append([str(tokens), name, "**computed by us**", *(ours[hosts] for hosts in HOSTS)])
        for one in PUBLISHED:
            if one.tokens == tokens:
                figures = [one.figures.get(hosts, "") for hosts in HOSTS]
                rows.append([str(tokens), one.name, f"published by them, {one.page}", *figures])
    return markdown_table(heads, rows)


def fill_table(report: Report) -> str:
    """Slots that stay empty, and the slots that are needed; a line for each routing, number of tokens and of hosts."""
    rows = []
    for fill in report["fills"]:
        fewer = fill["with_capacity"]
        rows.append(
            [
                f"{fill['routing']}, {fill['tokens']}",
                str(fill["hosts"]),
                f"{fill['waste']:.1%}",
                f"{min(fill['shares']):.1%} to {max(fill['shares']):.1%}",
                f"{fill['mean']:.1f}",
                f"{fill['sigma']:.1f}",
                str(fill["most"]),
                str(fill["capacity"]),
                f"{fill['waste_of_capacity']:.1%}",
                *(f"{of['dispatch_us']:.0f} + {of['combine_us']:.0f}" for of in (fill, fewer)),
                *(f"{of['step_us']:.0f}" for of in (fill, fewer)),
            ]
        )
    heads = ["routing, tokens", "hosts", "empty", "tokens to a host", "mean", "sigma", "most", "slots needed"]
    return markdown_table([*heads, "then empty", "network us", "then", "step us", "then"], rows)


def one_host_table(report: Report) -> str:
    """The part of the measured time that the model says; a column for each run, operation and format."""
    columns: dict[str, dict[int, str]] = {}
    for result in report["one_host"]:
        fmt = result["combine_format" if result["operation"] == "combine" else "token_format"]
        name = f"{result['run'].removesuffix('.json')} {result['operation']} {fmt}"
        text = f"{result['model_us']:.0f} of {result['measured_us']:.0f}"
        columns.setdefault(name, {}).setdefault(result["tokens_per_rank"], text)
    counts = sorted({count for column in columns.values() for count in column})
    rows = [[str(count), *(column.get(count, "") for column in columns.values())] for count in counts]
    return markdown_table(["tokens of a rank", *columns], rows)


TABLES = {
    "host_model": model_table,
    "host_published": published_table,
    "host_fill": fill_table,
    "host_one": one_host_table,
}
"""What is written between each pair of marks of a page."""


def tables_of(report: Report) -> dict[str, str]:
    """The tables of a JSON of this program."""
    return {mark: make(report) for mark, make in TABLES.items()}


def work(options: argparse.Namespace) -> int:
    """Compute or read, print and write."""
    environment.check_folder("--json", options.json)
    rates = {name: value for name in MACHINE_OPTIONS if (value := getattr(options, name)) is not None}
    if options.read is not None:
        if rates or options.json is not None:
            raise ValueError("--read: computes nothing, expected no rates and no --json")
        report = runs.read(options.read, KIND)
    else:
        machine = Machine(**rates)
        report = {
            "kind": KIND,
            "environment": environment.machine_record(),
            "machine": asdict(machine),
            "sizes": SIZES,
            "results": model_results(machine),
            "fills": fill_results(machine),
            "one_host": one_host_results(machine),
        }
    if options.json is not None:
        environment.write_json(options.json, report)
    put_or_print(tables_of(report), options.page)
    return 0


MACHINE_OPTIONS: dict[str, str] = {
    "network_gb_per_s": "of a rank",
    "network_latency_us": "of an exchange between hosts without its bytes",
}
"""Fields of `Machine` that the command line may replace."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.research.host_tables", description=__doc__)
    for name, text in MACHINE_OPTIONS.items():
        default = getattr(Machine(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=f"{text} ({default:g})")
    parser.add_argument("--read", type=Path, metavar="FILE", help="an earlier JSON, instead of computing")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables between the marks of this page")
    environment.add_json_option(parser)
    return environment.run_parsed("host_tables", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
