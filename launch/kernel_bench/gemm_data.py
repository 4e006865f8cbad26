"""Operands of the grouped GEMM's benchmark: random rows in groups, and weights in the form that a layer keeps them in.

`R` rows, `G` groups, one expert each; `N x K` a weight.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import torch

from moe_runtime.kernels.exchange.geometry import worst_case_rows
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.formats.scale_blocks import dense_128_blocks_needed
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, StoredWeights
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.launch.benchmarks.timing import copies_to_rotate
from moe_runtime.launch.kernel_bench.gemm_cases import RANDOM_ROUTINGS, RANKS, TOP_K, GemmCase, Product
from moe_runtime.ops import pack_dense_128


def make_rows(case: GemmCase, seed: int, rng: torch.Generator, engine: str) -> GroupedRows:
    """Rows of the case's first GEMM, normal with variance 1, on the device of `rng`.

    With random routing a layer's estimate of them chooses the kernel, not their number. With `layer` routing they lie
    as dispatch leaves them: one row for each token that has an expert here, found through `row_index`, and a capacity
    for every token on every expert that it may choose here; block scales stay with them where the GEMM of `engine`
    reads them there.
    """
    sizes, fmt, k = case.group_rows(seed), case.token_format, case.products[0].k
    total, device = sum(sizes), rng.device
    capacity, index = total, None
    expected = case.routed(seed).shape[0] * TOP_K // RANKS if case.routing in RANDOM_ROUTINGS else None
    stored = total
    if case.routing == "layer":
        ids = case.routed(seed)
        capacity = worst_case_rows(RANKS * case.groups, RANKS, TOP_K, ids.shape[0] // RANKS)
        stored = ids.shape[0]
        token, entry = (ids < case.groups).nonzero(as_tuple=True)
        index = torch.zeros(capacity, dtype=torch.int32)
        index[:total] = token[ids[token, entry].argsort(stable=True)].to(torch.int32)
    offsets = [0, *accumulate(sizes)]
    x_RK = torch.randn(stored, k, generator=rng, dtype=torch.float32, device=device).to(torch.bfloat16)
    q = quantize_rows(x_RK, fmt)
    # Scales lie by row position, quants by stored row.
    source = slice(None) if index is None else index[:total].to(device).long()
    by_row = index is not None and fmt.swizzled and resolve_engine(engine, device) == "cuda"
    scales, shifts = q.scales_RV, None
    if scales is not None and not by_row:
        scales = scales[source]
        if fmt.swizzled:
            needed = dense_128_blocks_needed(capacity, case.groups)
            scales, shifts = pack_dense_128(scales.contiguous(), offsets, num_blocks=needed)
        else:
            scales = _longer(scales, capacity)
    return GroupedRows(
        format=fmt,
        rows=q.quants_RK,
        scales=scales,
        row_scale=None if q.row_scale_R is None else _longer(q.row_scale_R[source], capacity),
        row_index=None if index is None else index.to(device),
        group_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        group_scale_offsets=shifts,
        expert_ids=torch.arange(case.groups, dtype=torch.int32, device=device),
        capacity=capacity,
        num_columns=k,
        scales_in_record=by_row,
        expected_rows=expected,
    )


def make_weights(case: GemmCase, product: Product, rng: torch.Generator, engine: str) -> StoredWeights:
    """Normal weights that keep the variance of a row, quantized expert by expert; expanded ones, or prepacked where
    layers prepack."""
    gate_up = case.product == "both" and product.name == "gate_up"
    parts = []
    for _ in range(case.groups):
        w_NK = torch.randn(product.n, product.k, generator=rng, dtype=torch.float32, device=rng.device)
        w_NK.mul_(product.k**-0.5)
        parts.append(ExpertWeights.quantize(w_NK.to(torch.bfloat16)[None], case.weight_format, gate_up=gate_up))
    quants = _joined([part.quants for part in parts])
    scales, expert_scales = (
        _joined(tensors) if (tensors := [t for part in parts if (t := getattr(part, name)) is not None]) else None
        for name in ("scales", "expert_scales")
    )
    w = replace(parts[0], quants=quants, scales=scales, expert_scales=expert_scales)
    parts.clear()
    if case.expanded:
        return ExpandedWeights.prepack(w)
    return PrepackedWeights.prepack(w) if PrepackedWeights.wanted(w, engine) else w


def num_copies(device: torch.device, num_bytes: int) -> int:
    """How many copies of inputs of `num_bytes` steps use in turn: on a GPU two at least, which are compared."""
    return 1 if device.type != "cuda" else max(2, copies_to_rotate(device, num_bytes))


def clone_rows(rows: GroupedRows) -> GroupedRows:
    """The same rows in other memory."""
    tensors: dict[str, Any] = {}
    for field in fields(rows):
        value = getattr(rows, field.name)
        if isinstance(value, torch.Tensor):
            tensors[field.name] = value.clone()
    return replace(rows, **tensors)


def row_bytes(rows: GroupedRows) -> int:
    """Bytes of quants and scales."""
    return rows.rows.nbytes + (0 if rows.scales is None else rows.scales.nbytes)


def _longer(t: torch.Tensor, rows: int) -> torch.Tensor:
    """`t` with rows of ones behind it."""
    return torch.cat([t, t.new_ones(rows - t.shape[0], *t.shape[1:])]).contiguous()


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Along the experts; `torch.cat` knows few types of 8 bits."""
    return torch.cat([raw_bits(t) for t in tensors]).view(tensors[0].dtype)
