"""Compares the network of `host_model` with links of known rates: two network namespaces, over gloo, on CPUs.

`python -m moe_runtime.launch.research.network_check --json FILE`, as root, starts a rank in each of two namespaces.
`tc` limits the link between them to one rate after another. The time of a layer's exchanges is predicted from their
bytes and that rate, and compared with what they take: by a send and a receive that is posted before it, by the link
of `hierarchical` (`GlooLink`) alone, and by that link in steps of the layer.

What it cannot check: RDMA, NCCL, and everything that GPUs do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist

from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.comm.errors import Phase
from moe_runtime.comm.host_link import Chunks, HostLink
from moe_runtime.config import CombineFormatName, FormatName, MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.hierarchical import PART_TOKENS
from moe_runtime.launch.benchmarks import network
from moe_runtime.launch.benchmarks.timing import Timing, measure_steps
from moe_runtime.launch.common import cases, environment
from moe_runtime.launch.report import runs
from moe_runtime.launch.report.pages import markdown_table, put_or_print
from moe_runtime.launch.report.runs import Report, Result
from moe_runtime.launch.research import namespaces
from moe_runtime.launch.research.host_model import Machine
from moe_runtime.layer import MoELayer

KIND = "network_check"
"""`kind` of the JSON."""

SIZES = {"hidden_size": 1024, "intermediate_size": 64, "num_experts": 8, "top_k": 4}
PAYLOAD_SHARE = 1448 / 1514
"""Of the bytes of a full Ethernet frame with TCP's time stamps, those that TCP carries."""

PORT, LIMIT_S = 29555, 240.0
MARK = "network_check"
"""Of the table in a page."""


class TimedLink:
    """A link that awaits and times each exchange as it starts, both ranks together: no time has other work in it.

    Args:
        link: what carries the bytes.

    Attributes:
        us: microseconds of each exchange.
    """

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self.us: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def start(self, outgoing: Chunks, incoming: Chunks, phase: Phase, part: int, limit_s: float) -> Awaited:
        dist.barrier()
        begun = time.perf_counter()
        self._link.start(outgoing, incoming, phase, part, limit_s).wait()
        self.us.append((time.perf_counter() - begun) * 1e6)
        return Awaited()


class Awaited:
    """An exchange that has come."""

    def ended(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is under way."""


def measured(context: ExpertParallelContext, formats: tuple[str, str], tokens: int, steps: int) -> list[Result]:
    """What dispatch and combine of a layer take between two hosts of a rank each. Collective."""
    assert context.link is not None
    link = TimedLink(context.link)
    context.link = cast(HostLink, link)
    given = {"token_format": formats[0], "weight_format": formats[0], "combine_format": formats[1]}
    layer = MoELayer(MoELayerConfig.model_validate(SIZES | given | {"max_tokens_per_rank": tokens}), context)
    layer.load_random(0)
    x_TH, idx_TK, weights_TK = cases.step_inputs(layer, "uniform", 0, context.rank, 0, tokens)
    for _ in range(steps + 1):
        layer(x_TH, topk_idx=idx_TK, topk_weights=weights_TK)
    # Exchanges take turns; the first step of all connects.
    in_steps = environment.gather(context, "exchanges", link.us[2:], list[float])
    geometry = network.geometry_of(layer)
    found = []
    for place, (name, num_bytes) in enumerate(
        (("dispatch", geometry.dispatch_chunk), ("combine", geometry.combine_chunk))
    ):
        slowest = [max(both) for both in zip(*(times[place::2] for times in in_steps), strict=True)]
        found.append(
            {
                "exchange": name,
                "format": formats[place],
                "tokens_per_rank": tokens,
                "network_bytes": num_bytes,
                **told("pair", time_pair(context, num_bytes, steps).iterations_us),
                **told("link", network.time_link(context, geometry, name, steps).iterations_us),
                **told("step", slowest),
            }
        )
    return found


def told(name: str, iterations_us: list[float]) -> Result:
    """The smallest time, which other work on the machine adds to, and the median."""
    return {f"{name}_us": min(iterations_us), f"{name}_median_us": statistics.median(iterations_us)}


def time_pair(context: ExpertParallelContext, num_bytes: int, steps: int) -> Timing:
    """A send to the other rank, and a receive from it that is posted before. Collective."""
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8)
    incoming, other = torch.empty_like(outgoing), 1 - context.rank

    def step(number: int) -> None:
        for work in (dist.irecv(incoming, other), dist.isend(outgoing, other)):
            assert work is not None
            work.wait()

    return measure_steps(context, step, iterations=steps, capturable=False)


def rank_work(options: argparse.Namespace) -> int:
    """What each rank does in its namespace; rank 0 writes a line for each exchange."""
    init_from_env(timeout_s=LIMIT_S)
    found: list[Result] = []
    for formats in zip(options.formats, options.combine_format, strict=True):
        for tokens in (1, *options.tokens):
            with ExpertParallelContext(engine="torch", transport="hierarchical") as context:
                found += measured(context, formats, tokens, options.steps)
    if dist.get_rank() == 0:
        options.rank.write_text(json.dumps(found))
    return 0


def run_ranks(megabits: float, options: argparse.Namespace, folder: Path) -> list[Result]:
    """What `rank_work` finds over a link of so many Mbit/s.

    Raises `OSError` where namespaces cannot be made, `TimeoutError` after `LIMIT_S`, and `RuntimeError` with the end of
    the log where a rank failed.
    """
    made = folder / "found.json"
    command = [sys.executable, "-m", "moe_runtime.launch.research.network_check", "--rank", str(made)]
    command += ["--steps", str(options.steps), "--tokens", *map(str, options.tokens)]
    command += ["--formats", *options.formats, "--combine-format", *options.combine_format]
    root = str(Path(__file__).resolve().parents[2])
    shared = {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
        "MASTER_ADDR": namespaces.address(0),
        "MASTER_PORT": str(PORT),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
    }
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    with namespaces.two_hosts(megabits) as names, ExitStack() as opened:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env={**os.environ, **shared, "MOE_RUNTIME_HOST": name, "RANK": str(rank)},
                stdout=opened.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, (name, log) in enumerate(zip(names, logs, strict=True))
        ]
        try:
            deadline = time.monotonic() + LIMIT_S
            while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
                time.sleep(0.05)
            codes = [rank.poll() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if None in codes:
        raise TimeoutError(f"ranks at {megabits:g} Mbit/s did not end within {LIMIT_S:g} s")
    if any(codes):
        raise RuntimeError("a rank failed:\n" + "\n".join(log.read_text()[-2000:] for log in logs))
    found: list[Result] = json.loads(made.read_text())
    return found


def compared(megabits: float, found: list[Result]) -> list[Result]:
    """Exchanges of more than a token, each once, with what the model says of them.

    The latency is the only number that is fitted: what the fastest exchange of one token takes in the same run.
    """
    latency_us = min(result["pair_us"] for result in found if result["tokens_per_rank"] == 1)
    # tc counts whole frames.
    machine = Machine(network_gb_per_s=megabits / 8e3 * PAYLOAD_SHARE, network_latency_us=latency_us)
    compared: dict[tuple[object, ...], Result] = {}
    for result in found:
        said = machine.network_us(result["network_bytes"])
        if result["tokens_per_rank"] > 1:
            key = tuple(result[name] for name in ("exchange", "format", "tokens_per_rank"))
            compared.setdefault(key, {"megabits": megabits, **result, "latency_us": latency_us, "model_us": said})
    return list(compared.values())


def check_table(report: Report) -> str:
    """A line for each exchange and rate: milliseconds from the smallest to the median, and multiples of the model's."""
    rows = []
    for result in report["results"]:
        model, times = result["model_us"], []
        for name in ("pair", "link", "step"):
            found = result[f"{name}_us"], result[f"{name}_median_us"]
            ms, ratios = (
                " to ".join(f"{us / unit:{digits}}" for us in found) for unit, digits in ((1e3, ".1f"), (model, ".2f"))
            )
            times.append(f"{ms} ({ratios})")
        rows.append(
            [
                f"{result['exchange']}, {result['format']}, {result['tokens_per_rank']}",
                f"{result['megabits']:g}",
                f"{result['network_bytes'] / 1e6:.3g}",
                f"{model / 1e3:.1f}",
                *times,
            ]
        )
    heads = ["exchange, format, tokens", "Mbit/s", "MB", "model", "receive posted first", "GlooLink", "in steps"]
    return markdown_table(heads, rows)


def run(options: argparse.Namespace) -> Report:
    """Check the options, run and compare."""
    environment.check_at_least(1, steps=options.steps)
    environment.check_at_least(2, tokens=min(options.tokens))
    if max(options.tokens) >= 2 * PART_TOKENS:
        raise ValueError(
            f"--tokens: expected fewer than {2 * PART_TOKENS}, from which on an exchange has several parts"
        )
    if len(options.formats) != len(options.combine_format):
        raise ValueError(
            f"--combine-format: expected one for each of {len(options.formats)} formats, got "
            f"{len(options.combine_format)}"
        )
    for rate in options.megabits:
        if not 1 <= rate <= 100_000:
            raise ValueError(f"--megabits: expected 1 to 100000, got {rate:g}")
    results: list[Result] = []
    for rate in options.megabits:
        with tempfile.TemporaryDirectory() as folder:
            results += compared(rate, run_ranks(rate, options, Path(folder)))
    return {
        "kind": KIND,
        "environment": environment.machine_record(),
        "sizes": SIZES,
        "payload_share": PAYLOAD_SHARE,
        "steps": options.steps,
        "results": results,
    }


def work(options: argparse.Namespace) -> int:
    """Run or read, print and write."""
    environment.check_folder("--json", options.json)
    if options.read is not None and options.json is not None:
        raise ValueError("--read: measures nothing, expected no --json")
    report = run(options) if options.read is None else runs.read(options.read, KIND)
    if options.json is not None:
        environment.write_json(options.json, report)
    put_or_print({MARK: check_table(report)}, options.page)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.research.network_check", description=__doc__)
    rates = "of the link, each in turn (default: 100 200 400)"
    parser.add_argument("--megabits", type=float, nargs="+", default=[100, 200, 400], metavar="N", help=rates)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1000], metavar="N", help="of a rank")
    formats: dict[str, Any] = {"nargs": "+", "choices": get_args(FormatName), "default": ["bf16", "nvfp4"]}
    parser.add_argument("--formats", **formats, help="of tokens (default: bf16 nvfp4)")
    formats |= {"choices": get_args(CombineFormatName), "default": ["bf16", "fp8_block"]}
    parser.add_argument("--combine-format", **formats, help="of sums, with each of these (default: bf16 fp8_block)")
    parser.add_argument("--steps", type=int, default=9, metavar="N", help="timed iterations (default: 9)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="an earlier JSON, instead of measuring")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table between the marks of this page")
    environment.add_json_option(parser)
    environment.add_debug_option(parser)
    # How the program starts itself in a namespace.
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    task = work if options.rank is None else rank_work
    if options.rank is None:
        environment.exit_at_sigterm()
    return environment.run_program("network_check", lambda: task(options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
