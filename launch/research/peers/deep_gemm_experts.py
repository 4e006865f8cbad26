"""DeepGEMM's grouped FP8 GEMMs, masked and contiguous, on the weights and rows that ours reads (written for 2.6.1).

A step is both GEMMs. What lies between them is computed beforehand: DeepGEMM has no SwiGLU and no requantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from moe_runtime.kernels.formats.number_formats import align
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.launch.benchmarks.torch_layer import gated
from moe_runtime.launch.research.peers import ours
from moe_runtime.launch.research.peers.case import Case, Point, Rows, Way

Pair = tuple[torch.Tensor, torch.Tensor]
"""Quants and scales."""
Product = Callable[[Pair, Pair, torch.Tensor], object]
"""Multiplies rows and weights into an output."""


def experts(case: Case) -> Point:
    case.check_plain()
    module: Any = import_module("deep_gemm")
    held = ours.local_weights(case, "fp8_block")
    weights = [(w.quants, w.scales) for w in held if w.scales is not None]
    bound = case.bound("fp8_block")

    def aligned(scales: torch.Tensor) -> torch.Tensor:
        return module.get_mn_major_tma_aligned_tensor(scales)

    def point(tokens: int) -> Iterator[Way]:
        rows = case.rows(tokens)
        for layout, make in (("masked", _masked), ("contiguous", _contiguous)):
            shape, place, product = make(module, rows)

            def spread(x_RK: torch.Tensor, shape: Any = shape, place: Any = place) -> Pair:
                q = quantize_rows(x_RK, "fp8_block")
                assert q.scales_RV is not None
                quants = torch.zeros(place.total, x_RK.shape[1], dtype=torch.uint8, device=x_RK.device)
                quants[place.rows] = q.quants_RK.view(torch.uint8)
                scales = torch.zeros(place.total, q.scales_RV.shape[1], device=x_RK.device)
                scales[place.rows] = q.scales_RV
                laid_out = aligned(scales.view(*shape, -1))
                return quants.view(torch.float8_e4m3fn).view(*shape, -1), laid_out

            outs = [rows.x.new_full((*shape, w[0].shape[1]), torch.nan) for w in weights]
            first = spread(rows.x)
            product(first, weights[0], outs[0])
            second = spread(gated(outs[0].flatten(0, -2)[place.rows], case.activation))
            product(second, weights[1], outs[1])
            error = case.experts_error(rows, outs[1].flatten(0, -2)[place.rows])

            def step(
                number: int, first: Pair = first, second: Pair = second, p: Product = product, o: Any = outs
            ) -> None:
                p(first, weights[0], o[0])
                p(second, weights[1], o[1])

            yield Way("experts", f"FP8, {layout}", step, error, bound, note="without SwiGLU and requantization")

    return point


class _Place:
    """Where each row lies among all that a layout has room for."""

    def __init__(self, rows: Rows, starts: list[int], total: int) -> None:
        parts = [torch.arange(start, start + size) for start, size in zip(starts, rows.sizes, strict=True)]
        self.rows, self.total = torch.cat(parts).to(rows.x.device), total


def _masked(module: Any, rows: Rows) -> tuple[tuple[int, ...], _Place, Product]:
    count, most = len(rows.sizes), align(max(rows.sizes), 128)
    sizes = torch.tensor(rows.sizes, dtype=torch.int32, device=rows.x.device)
    expected = max(1, round(sum(rows.sizes) / count))

    def product(a: Pair, w: Pair, out: torch.Tensor) -> object:
        return module.m_grouped_fp8_gemm_nt_masked(a, w, out, sizes, expected)

    return (count, most), _Place(rows, [most * number for number in range(count)], count * most), product


def _contiguous(module: Any, rows: Rows) -> tuple[tuple[int, ...], _Place, Product]:
    alignment = module.get_mk_alignment_for_contiguous_layout()
    starts, experts, total = [], [], 0
    for number, size in enumerate(rows.sizes):
        starts.append(total)
        padding = -size % alignment
        experts += [number] * size + [-1] * padding
        total += size + padding
    index = torch.tensor(experts, dtype=torch.int32, device=rows.x.device)

    def product(a: Pair, w: Pair, out: torch.Tensor) -> object:
        return module.m_grouped_fp8_gemm_nt_contiguous(a, w, out, index)

    return (total,), _Place(rows, starts, total), product
