"""Measures how many bits FP8 MMA keeps of a sum: `python -m moe_runtime.launch.research.probe`.

The bound of FP8 results (`fp8_bound.py`) rests on `p`: a term is kept down to `2^-p` of the largest one. Each
row of the first measurement multiplies out to `1`, `+-2^-j` and `-1` at three places among 128 of K, and zeros
elsewhere: the result is the exact sum `+-2^-j` where the bit was kept. The second sums 128 random terms that cancel
exactly: the result is the error alone, divided by the largest term or partial sum. The exit code is 1 where the
GPU keeps fewer bits than `FP8_MMA_BITS`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from typing import Any

import torch

from moe_runtime import ops
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.benchmarks.checks import FP8_MMA_BITS, FP8_MMA_GAIN
from moe_runtime.launch.common import environment
from moe_runtime.launch.kernel_bench.fp8_bound import CHUNK, fp8_mma_slack

E4M3 = torch.float8_e4m3fn
MOST_BITS = 15
"""Powers `2^-j` down to here are products of two e4m3 values with few bits each."""

PLACES = (0, 1, 7, 31, 32, 64, 95, 96, 127)
"""Of the three terms among 128 of K: the same MMA and others, first and last lanes."""


def multiply(a_RK: torch.Tensor, b_K: torch.Tensor) -> torch.Tensor:
    """fp32 `[R]`: rows times one column of weights by `group_gemm_fp8_nt_groupwise`, all scales 1; K is 128."""
    device, rows = a_RK.device, a_RK.shape[0]
    b = torch.zeros(1, 8, CHUNK, device=device)
    b[0, :] = b_K
    ones = torch.ones(1, rows, device=device)
    indptr = torch.tensor([0, rows], dtype=torch.int32, device=device)
    c = ops.group_gemm_fp8_nt_groupwise(a_RK.to(E4M3), b.to(E4M3), ones, ones[:, :1, None].contiguous(), indptr)
    return c[:, 0].float()


def kept_bits(device: torch.device) -> int:
    """The largest `p` up to `MOST_BITS` such that `1 +- 2^-j - 1` is `+-2^-j` for all `j <= p`, at all `PLACES`."""
    places = list(itertools.permutations(PLACES, 3))
    rows_RK = torch.zeros(2 * len(places), CHUNK, device=device)
    for j in range(MOST_BITS + 1):
        half = j // 2
        rows_RK.zero_()
        expected_R = torch.zeros(len(rows_RK), device=device)
        for index, ((first, small, last), sign) in enumerate(itertools.product(places, (1.0, -1.0))):
            rows_RK[index, first], rows_RK[index, last] = 2.0**half, -(2.0**half)
            rows_RK[index, small] = sign * 2.0 ** (half - j)
            expected_R[index] = sign * 2.0**-j
        # Both factors of a product are normal e4m3 values: 2^half * 2^-half and 2^(half - j) * 2^-half.
        found_R = multiply(rows_RK, torch.full((CHUNK,), 2.0**-half, device=device))
        if not torch.equal(found_R, expected_R):
            return j - 1
    return MOST_BITS


def largest_loss(device: torch.device, rows: int = 1 << 14) -> float:
    """Largest error of sums of 128 random terms over their largest term or partial sum; the bound is `FP8_MMA_GAIN`."""
    rng = torch.Generator().manual_seed(0)
    # Small powers of two times e4m3 values of all significands, so that terms of many sizes meet.
    terms = torch.randn(rows, CHUNK // 2, generator=rng) * 2.0 ** torch.randint(
        -4, 5, (rows, CHUNK // 2), generator=rng
    )
    terms = terms.clamp(-200, 200).to(E4M3).float()
    order = torch.randperm(CHUNK // 2, generator=rng)
    a_RK = torch.cat([terms, -terms[:, order]], 1)
    b_K = torch.rand(CHUNK // 2, generator=rng).add(0.5).to(E4M3).float()
    b_K = torch.cat([b_K, b_K[order]])
    a_RK, b_K = a_RK.to(device), b_K.to(device)
    error_R = multiply(a_RK, b_K).abs().double()
    largest_R = fp8_mma_slack(a_RK.double(), b_K.double()[None])[:, 0] / FP8_MMA_GAIN
    return float((error_R / largest_R).max())


def probe(device: torch.device) -> dict[str, Any]:
    """Both measurements, and what the bound assumes of them."""
    loss = largest_loss(device)
    return {
        "kept_bits": kept_bits(device),
        "kept_bits_counted_on": FP8_MMA_BITS,
        "largest_loss": loss,
        "largest_loss_bits": -math.log2(loss) if loss else None,
        "largest_loss_allowed": FP8_MMA_GAIN,
    }


def work(options: argparse.Namespace) -> int:
    """Measure, print and write; 1 if the bound does not hold."""
    environment.check_folder("--json", options.json)
    with ExpertParallelContext() as context:
        if context.device.type != "cuda":
            raise ValueError("expected a CUDA GPU, got none")
        found = probe(context.device)
        record = environment.environment_record(context)
    print(json.dumps(found, indent=1))
    if options.json is not None:
        environment.write_json(options.json, {"kind": "fp8_probe", "environment": record, **found})
    return int(found["kept_bits"] < FP8_MMA_BITS or found["largest_loss"] > FP8_MMA_GAIN)


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.research.probe", description="Bits that FP8 MMA keeps."
    )
    environment.add_json_option(parser)
    return environment.run_parsed("probe", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
