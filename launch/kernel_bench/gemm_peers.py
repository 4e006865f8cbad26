"""The baselines of the grouped GEMM: torch's products of the same shapes, without quantization or activation.

`R` rows, `G` groups, `N x K` a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.benchmarks.timing import measure_steps, times_record
from moe_runtime.launch.benchmarks.torch_layer import group_ends, grouped_mm
from moe_runtime.launch.kernel_bench.gemm_cases import BF16_PEER, FP8_PEER, GemmCase
from moe_runtime.launch.kernel_bench.gemm_data import num_copies

Call = Callable[[int], torch.Tensor]


class Peers:
    """Times each peer once for all cases of the same sizes."""

    def __init__(self, context: ExpertParallelContext, iterations: int) -> None:
        self._context = context
        self._iterations = iterations
        self._found: dict[tuple[object, ...], dict[str, Any]] = {}

    def of(self, case: GemmCase, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """`name`, `times_record` and `why` of each peer of a case; `why` says why there is no time."""
        if case.brief:
            return []
        names = [BF16_PEER, *([FP8_PEER] if case.format == "fp8_block" else [])]
        return [self._timed(name, case, tuple(sizes)) for name in names]

    def _timed(self, name: str, case: GemmCase, sizes: tuple[int, ...]) -> dict[str, Any]:
        shapes = tuple((product.n, product.k) for product in case.products)
        key = (name, sizes, shapes)
        if key not in self._found:
            self._found[key] = {"name": name, **self._time(name, sizes, shapes)}
        return self._found[key]

    def _time(self, name: str, sizes: tuple[int, ...], shapes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
        make = {BF16_PEER: _bf16, FP8_PEER: _fp8_rowwise}[name]
        try:
            calls = [make(sizes, n, k, self._context.device) for n, k in shapes]
            for call in calls:
                call(0)
        except (AttributeError, RuntimeError) as error:
            # No such function in this torch, or none for this device.
            return times_record(None) | {"why": str(error).splitlines()[0][:200]}

        def step(number: int) -> None:
            for call in calls:
                call(number)

        timing = measure_steps(self._context, step, iterations=self._iterations)
        return times_record(timing) | {"why": None}


def _bf16(sizes: Sequence[int], n: int, k: int, device: torch.device) -> Call:
    return grouped_mm(sizes, n, k, device, num_copies(device, 2 * len(sizes) * n * k))


def _fp8_rowwise(sizes: Sequence[int], n: int, k: int, device: torch.device) -> Call:
    """A scale for each row and each column of the weights; sums stay in the tensor cores (`use_fast_accum`)."""
    function: Callable[..., torch.Tensor] = torch._scaled_grouped_mm
    groups, ends = len(sizes), group_ends(sizes, device)
    a_RK = torch.randn(sum(sizes), k, device=device).to(torch.float8_e4m3fn)
    a_scales_R = torch.rand(sum(sizes), device=device) + 0.5
    copies = num_copies(device, groups * n * k)
    w_GNK = [
        torch.randn(groups, n, k, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn) for _ in range(copies)
    ]
    w_scales_GN = torch.rand(groups, n, device=device) + 0.5
    return lambda number: function(
        a_RK,
        w_GNK[number % copies].transpose(1, 2),
        a_scales_R,
        w_scales_GN,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
