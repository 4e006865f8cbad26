"""MXFP4 experts beside a kernel of others: `python -m moe_runtime.launch.research.mxfp4_peer`, on one Hopper GPU.

Times the product of gate and up of gpt-oss-120b (128 experts, 5760 x 2880, bf16 tokens, top-4, uniform routing), alone,
here and in Humming (`pip install humming-kernels`), on the same weights and the same tokens. Humming chooses its tiles
itself, in each of its two kinds of grouped product: rows that lie expert by expert, and rows found by an index. Each
result is checked against float64 before it is timed. Steps take tokens and experts in turn (`timing.copies_to_rotate`).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import BF16, MXFP4, ceil_div
from moe_runtime.kernels.formats.reference_quantize import e8m0_to_f32, swizzle_scales
from moe_runtime.kernels.gemm.grouped_gemm import gemm_flops, grouped_gemm
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.benchmarks.timing import TOTAL, Lap, copies_to_rotate, measure, times_record
from moe_runtime.launch.common import environment
from moe_runtime.launch.common.cases import routing
from moe_runtime.launch.kernel_bench.models_bench import TOKENS

KIND = "mxfp4_peer"
"""`kind` of the JSON."""

EXPERTS, ROWS, COLUMNS, TOP_K = 128, 5760, 2880, 4
BOUND = 2.0**-8
"""Of the relative Frobenius error: rounding to bf16 takes at most 2^-9 of each element."""
SAMPLE = 16
"""Rows of each step that are compared with float64."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Call = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Routed:
    """The rows of a step, expert by expert.

    Attributes:
        x: bf16 `[T, COLUMNS]`.
        ids: int64 `[T * TOP_K]`, the expert of each choice.
        order: int64 `[T * TOP_K]`, the choice that each row is of.
        rows: bf16 `[T * TOP_K, COLUMNS]`.
        offsets: int32 `[EXPERTS + 1]`.
    """

    x: torch.Tensor
    ids: torch.Tensor
    order: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def draw(tokens: int, turn: int, device: torch.device) -> Routed:
        """Of step `turn`."""
        rng = torch.Generator(device).manual_seed(turn)
        x = torch.randn(tokens, COLUMNS, generator=rng, device=device).to(torch.bfloat16)
        ids = routing("uniform", 0, 0, turn, tokens, EXPERTS, TOP_K)[0].flatten().long().to(device)
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=EXPERTS)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        return Routed(x, ids, order, x[order // TOP_K].contiguous(), offsets)


@dataclass(frozen=True)
class Weights:
    """MXFP4 as checkpoints have it.

    Attributes:
        quants: uint8 `[EXPERTS, ROWS, COLUMNS / 2]`, the even column in the low half.
        scales: uint8 `[EXPERTS, ROWS, COLUMNS / 32]`, UE8M0.
    """

    quants: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def draw(device: torch.device) -> Weights:
        """Every quant, and scales of four powers of two, that make results about 1."""
        rng = torch.Generator(device).manual_seed(0)

        def integers(low: int, high: int, columns: int) -> torch.Tensor:
            shape = (EXPERTS, ROWS, columns)
            return torch.randint(low, high, shape, dtype=torch.uint8, generator=rng, device=device)

        return Weights(integers(0, 256, COLUMNS // 2), integers(118, 122, COLUMNS // MXFP4.block))

    def float64(self, expert: int) -> torch.Tensor:
        """The weight of one expert."""
        quants = self.quants[expert]
        nibbles = torch.stack([quants & 15, quants >> 4], dim=-1).view(ROWS, COLUMNS).long()
        values = torch.tensor(E2M1, dtype=torch.float64, device=quants.device)[nibbles & 7]
        values = torch.where(nibbles >= 8, -values, values)
        return values * e8m0_to_f32(self.scales[expert]).double().repeat_interleave(MXFP4.block, dim=1)

    def here(self) -> PrepackedWeights:
        """As a layer keeps them."""
        scales = torch.cat([swizzle_scales(one[None]) for one in self.scales])
        return PrepackedWeights.prepack(ExpertWeights(MXFP4, self.quants, scales))


def relative_error(weights: Weights, routed: Routed, found: torch.Tensor) -> float:
    """Relative Frobenius error of a sample of the rows of `found`, which lie as `routed.rows`."""
    positions = torch.linspace(0, found.shape[0] - 1, min(SAMPLE, found.shape[0]), device=found.device).long().unique()
    error = size = 0.0
    for position in positions.tolist():
        expert = int(routed.ids[routed.order[position]])
        expected = weights.float64(expert) @ routed.rows[position].double()
        error += float((found[position].double() - expected).square().sum())
        size += float(expected.square().sum())
    return float((error / size) ** 0.5) if torch.isfinite(found).all() else float("inf")


def here(packed: PrepackedWeights, turns: list[Routed]) -> Call:
    """Our product, of the step whose number it gets."""
    ids = torch.arange(EXPERTS, dtype=torch.int32, device=packed.device)
    steps = []
    for turn in turns:
        count = turn.rows.shape[0]
        rows = GroupedRows(BF16, turn.rows, None, None, None, turn.offsets, None, ids, count, COLUMNS)
        steps.append((rows, _poisoned(count, turn.rows.device)))

    def call(number: int) -> torch.Tensor:
        rows, out = steps[number % len(steps)]
        return grouped_gemm(rows, packed, out=out)

    return call


class Humming:
    """Humming's layer, with the same weights. Raises `ValueError` where it is not installed."""

    def __init__(self, weights: Weights) -> None:
        try:
            layers = importlib.import_module("humming.layer")
            self._tune = importlib.import_module("humming.tune").get_heuristics_config
        except ImportError as error:
            raise ValueError(f"pip install humming-kernels: {error}") from error
        layer = layers.HummingLayer(
            shape_n=ROWS,
            shape_k=COLUMNS,
            weight_config={"quant_method": "gpt_oss_mxfp4"},
            num_experts=EXPERTS,
            torch_dtype=torch.bfloat16,
        ).to(weights.quants.device)
        layer.load_from_tensors({"weight": weights.quants, "weight_scale": weights.scales})
        layer.transform()
        self._layer = layer

    def by_expert(self, turns: list[Routed]) -> Call:
        """Rows that lie expert by expert."""
        outs = [_poisoned(turn.rows.shape[0], turn.rows.device) for turn in turns]
        tiles = self._tiles("grouped_contiguous", turns[0].rows.shape[0])

        def call(number: int) -> torch.Tensor:
            turn, out = turns[number % len(turns)], outs[number % len(turns)]
            self._layer(
                turn.rows,
                outputs=out,
                expert_layout=turn.offsets,
                compute_config={"gemm_type": "grouped_contiguous"},
                tuning_config=tiles,
            )
            return out

        return call

    def by_index(self, turns: list[Routed]) -> Call:
        """Rows found by an index, which is padded to whole tiles of each expert; results lie by choice."""
        outs = [_poisoned(turn.rows.shape[0], turn.rows.device) for turn in turns]
        tiles = self._tiles("indexed", turns[0].rows.shape[0])
        tables = [_index(turn, tiles["block_shape"][0]) for turn in turns]

        def call(number: int) -> torch.Tensor:
            turn, out = turns[number % len(turns)], outs[number % len(turns)]
            choices, experts, padded = tables[number % len(turns)]
            self._layer(
                turn.x,
                outputs=out,
                sorted_ids=choices,
                expert_ids=experts,
                num_tokens_padded=padded,
                top_k=TOP_K,
                compute_config={"gemm_type": "indexed"},
                tuning_config=tiles,
            )
            return out

        return call

    def _tiles(self, kind: str, rows: int) -> dict[str, Any]:
        """What Humming chooses for so many rows."""
        ranges = self._tune(self._layer.humming_config, gemm_type=kind)
        return next(dict(tiles) for low, high, tiles in ranges if low < rows <= high)


def _poisoned(rows: int, device: torch.device) -> torch.Tensor:
    return torch.full((rows, ROWS), float("nan"), dtype=torch.bfloat16, device=device)


def _index(turn: Routed, tile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices by expert in whole tiles, filled up with a number past the last; the experts of tiles; their length."""
    past, device = turn.ids.numel(), turn.ids.device
    choices, experts = [], []
    for expert in turn.ids.unique().tolist():
        mine = (turn.ids == expert).nonzero().flatten()
        tiles = ceil_div(mine.numel(), tile)
        choices += [mine, mine.new_full((tiles * tile - mine.numel(),), past)]
        experts += [expert] * tiles
    sorted_ids = torch.cat(choices).to(torch.int32)
    return (
        sorted_ids,
        torch.tensor(experts, dtype=torch.int32, device=device),
        torch.tensor([sorted_ids.numel()], dtype=torch.int32, device=device),
    )


def run(context: ExpertParallelContext, tokens: list[int], iterations: int) -> list[dict[str, Any]]:
    """A record per number of tokens and way of computing."""
    device, results = context.device, []
    weights = Weights.draw(device)
    packed, humming = weights.here(), Humming(weights)
    for count in tokens:
        # What a step reads for sure: the weights of the experts that one token chooses.
        turns = [
            Routed.draw(count, turn, device) for turn in range(copies_to_rotate(device, TOP_K * ROWS * COLUMNS // 2))
        ]
        active = sum(int(turn.ids.unique().numel()) for turn in turns) / len(turns)
        moved = active * ROWS * (COLUMNS // 2 + COLUMNS // MXFP4.block) + 2 * count * TOP_K * (COLUMNS + ROWS)
        ways: dict[str, Callable[[list[Routed]], Call]] = {
            "moe_runtime": partial(here, packed),
            "humming, by expert": humming.by_expert,
            "humming, by index": humming.by_index,
        }
        ours: float | None = None
        for name, make in ways.items():
            call, errors = make(turns), []
            for number, turn in enumerate(turns[:3]):
                found = call(number)
                errors.append(relative_error(weights, turn, found[turn.order] if name.endswith("index") else found))

            def step(number: int, lap: Lap, call: Call = call) -> None:
                call(number)

            timing = measure(context, step, iterations=iterations, capturable=True)[TOTAL]
            ours = timing.median_us if ours is None else ours
            results.append(
                {
                    "implementation": name,
                    "tokens": count,
                    **times_record(timing),
                    "error": max(errors),
                    "bound": BOUND,
                    "passed": max(errors) <= BOUND,
                    "ratio": ours / timing.median_us,
                    "moved_bytes": moved,
                    "work_flop": gemm_flops(count * TOP_K, ROWS, COLUMNS),
                    "rate_gb_per_s": moved / timing.median_us * 1e-3,
                    "inputs_in_turn": len(turns),
                }
            )
            text = f"{count:5} tokens  {name:20} {timing.median_us:8.1f} us  here / there {ours / timing.median_us:.2f}"
            print(f"{text}  error {max(errors):.5f}", flush=True)
            del call
    return results


def work(options: argparse.Namespace) -> int:
    """Check, time, print and write; 1 if a result is wrong."""
    environment.check_folder("--json", options.json)
    environment.check_at_least(1, tokens=min(options.tokens), steps=options.steps)
    with ExpertParallelContext() as context:
        if context.device.type != "cuda" or torch.cuda.get_device_capability(context.device)[0] != 9:
            raise ValueError("expected a Hopper GPU")
        record = environment.environment_record(context)
        results = run(context, options.tokens, options.steps)
    passed = all(result["passed"] for result in results)
    if options.json is not None:
        report = {
            "kind": KIND,
            "peer": f"humming-kernels {version('humming-kernels')}",
            "environment": record,
            "passed": passed,
            "results": results,
        }
        environment.write_json(options.json, report)
    return int(not passed)


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.research.mxfp4_peer", description="Time MXFP4 products beside Humming's."
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="T", help="tokens of a step")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed iterations (default: 10)")
    environment.add_json_option(parser)
    environment.add_debug_option(parser)
    options = parser.parse_args(arguments)
    return environment.run_program("mxfp4_peer", lambda: work(options), debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
