"""Humming's grouped GEMMs: MXFP4 weights and BF16 rows that lie by expert (`pip install humming-kernels`, 0.1.19).

A step is both GEMMs; SwiGLU is computed beforehand. Humming chooses its tiles itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from moe_runtime.launch.benchmarks.torch_layer import gated
from moe_runtime.launch.research.peers import ours
from moe_runtime.launch.research.peers.case import Case, Point, Way

KIND = "grouped_contiguous"


def experts(case: Case) -> Point:
    case.check_plain()
    layer_of: Any = import_module("humming.layer").HummingLayer
    tune: Any = import_module("humming.tune").get_heuristics_config
    hidden, inner = case.run.layer.hidden_size, case.run.layer.intermediate_size
    layers = []
    for place, (n, k) in enumerate(((2 * inner, hidden), (hidden, inner))):
        layer = layer_of(
            shape_n=n,
            shape_k=k,
            weight_config={"quant_method": "gpt_oss_mxfp4"},
            num_experts=len(case.local),
            torch_dtype=torch.bfloat16,
        ).to(case.device)
        quants, scales = ours.linear_mxfp4(case, place)
        layer.load_from_tensors({"weight": quants, "weight_scale": scales})
        layer.transform()
        layers.append(layer)
    bound = case.bound("bf16", "mxfp4")

    def point(tokens: int) -> Iterator[Way]:
        rows = case.rows(tokens)
        count = rows.x.shape[0]
        offsets = torch.tensor([0, *rows.sizes], device=case.device).cumsum(0, dtype=torch.int32)
        ranges = [tune(layer.humming_config, gemm_type=KIND) for layer in layers]
        tiles = [next(dict(tile) for low, high, tile in found if low < count <= high) for found in ranges]
        outs = [rows.x.new_full((count, n), torch.nan) for n in (2 * inner, hidden)]

        def product(place: int, x_RK: torch.Tensor) -> torch.Tensor:
            layers[place](
                x_RK,
                outputs=outs[place],
                expert_layout=offsets,
                compute_config={"gemm_type": KIND},
                tuning_config=tiles[place],
            )
            return outs[place]

        middle = gated(product(0, rows.x), case.activation).contiguous()
        error = case.experts_error(rows, product(1, middle))

        def step(number: int) -> None:
            product(0, rows.x)
            product(1, middle)

        yield Way("experts", "MXFP4 weights, BF16 tokens", step, error, bound, note="without SwiGLU")

    return point
