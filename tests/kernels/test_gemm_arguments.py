"""What a caller of the grouped GEMM can get wrong is a `ValueError` that names the argument, before any kernel runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.weights import GPT_OSS, SwiGLU
from moe_runtime.kernels.launch_order import LaunchOrder
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import make_rows, random_weights

IDS = torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a.format", {"format": FORMATS["mxfp8"]}),
        ("a.rows", {"rows": torch.zeros(8, 63, dtype=torch.uint8)}),
        ("a.rows", {"rows": torch.zeros(8, 32, dtype=torch.int8)}),
        ("a.rows", {"rows": torch.zeros(32, 8, dtype=torch.uint8).T}),
        ("a.rows", {"rows": torch.zeros(7, 32, dtype=torch.uint8)}),
        ("w", {"num_columns": 128}),
        ("a.num_columns", {"num_columns": np.zeros(2)}),
        ("a.row_index", {"row_index": torch.zeros(8, dtype=torch.int64)}),
        ("a.row_index", {"row_index": torch.zeros(7, dtype=torch.int32)}),
        ("a.row_scale", {"row_scale": None}),
        ("a.row_scale", {"row_scale": torch.zeros(16)[::2]}),
        ("a.group_offsets", {"group_offsets": torch.zeros(2, dtype=torch.int32)}),
        ("a.group_offsets", {"group_offsets": None}),
        ("a.group_scale_offsets", {"group_scale_offsets": None}),
        ("a.num_active_experts", {"num_active_experts": torch.ones(1)}),
        ("a.num_active_experts", {"num_active_experts": torch.ones(2, dtype=torch.int32)}),
        ("a.num_active_experts", {"num_active_experts": 1.5}),
        ("a.expert_ids", {"expert_ids": torch.tensor(0, dtype=torch.int32)}),
        ("a.expert_ids", {"expert_ids": torch.zeros(2, 2, dtype=torch.int32)}),
        ("a.group_offsets", {"group_offsets": torch.zeros(3, 2, dtype=torch.int32)}),
        ("a.row_index", {"row_index": torch.zeros(8, 2, dtype=torch.int32)}),
        ("a.row_scale", {"row_scale": torch.ones(8, 2)}),
        ("a.row_scale", {"row_scale": torch.ones(8, device="meta")}),
        ("a.capacity", {"capacity": -1}),
        ("a.expected_rows", {"expected_rows": -1}),
        ("a.order.routed_ids", {"order": LaunchOrder(routed_ids=torch.zeros(2, 2))}),
        ("a.order.routed_ids", {"order": LaunchOrder(routed_ids=torch.zeros(65, 1, dtype=torch.int32))}),
        ("a.order.routed_ids", {"order": LaunchOrder(routed_ids=torch.zeros(2, 4, dtype=torch.int64)[:, :2])}),
        ("a.order.first_id", {"order": LaunchOrder(routed_ids=IDS, first_id="x")}),  # type: ignore[arg-type]
        ("a.order.first_id", {"order": LaunchOrder(routed_ids=IDS, first_id=-1)}),
        ("a.order.route_weights", {"order": LaunchOrder(route_weights=torch.zeros(2, 2))}),
        ("a.order.route_weights", {"order": LaunchOrder(routed_ids=IDS, route_weights=[1.0])}),  # type: ignore[arg-type]
        ("a.order.route_weights", {"order": LaunchOrder(routed_ids=IDS, route_weights=torch.zeros(2, 3))}),
        ("a.order.route_weights", {"order": LaunchOrder(routed_ids=IDS, route_weights=torch.zeros(2, 2).double())}),
        ("a.order.route_weights", {"order": LaunchOrder(routed_ids=IDS, route_weights=torch.zeros(2, 2).T)}),
        ("a.order", {"order": "no"}),
        ("a.order.only_rows_pending", {"order": LaunchOrder("no")}),
        ("a.dequantized", {"dequantized": Path("rows")}),
        ("a.dequantized", {"dequantized": torch.zeros(7, 64, dtype=torch.bfloat16)}),
        ("a.dequantized", {"dequantized": torch.zeros(8, 32, dtype=torch.bfloat16)}),
        ("a.dequantized", {"dequantized": torch.zeros(8, 64)}),
        ("a.dequantized", {"dequantized": torch.zeros(64, 8, dtype=torch.bfloat16).T}),
        ("a.dequantized", {"dequantized": torch.zeros(1, 2, 8, 8, 16, dtype=torch.uint8)}),
        ("a.dequantized", {"dequantized": torch.zeros(8, 64, dtype=torch.bfloat16, device="meta")}),
        ("a.scales", {"scales": None}),
        ("a.scales", {"scales": torch.zeros(2, 2, 32, 4, 4, dtype=torch.uint8)}),
    ],
)
def test_bad_rows_are_named(name: str, change: dict[str, Any], rng: torch.Generator) -> None:
    cpu = torch.device("cpu")
    w = random_weights("nvfp4", 2, 32, 64, rng, cpu)
    a = replace(make_rows("nvfp4", [3, 5], 64, rng, cpu, num_experts=2), **change)
    with pytest.raises(ValueError, match=f"^{name}: expected .*got"):
        grouped_gemm(a, w)


@pytest.mark.parametrize(("token", "boundary"), [("bf16", 4), ("mxfp8", 2)])
def test_rows_that_are_no_whole_words_are_named(
    token: str, boundary: int, rng: torch.Generator, device: torch.device
) -> None:
    """Beside weights of two numbers a byte the kernel loads two of a row at a time; the reference takes any rows."""
    w = random_weights("mxfp4", 1, 32, 64, rng, device)
    a = make_rows(token, [3], 64, rng, device, num_experts=1)
    want = grouped_gemm(a, w, engine="torch")
    for width, first in ((67, 0), (68, 1)):
        wide = torch.zeros(3, width, dtype=a.rows.dtype, device=device)
        raw_bits(wide)[:, first : first + 64] = raw_bits(a.rows)
        odd = replace(a, rows=wide[:, first : first + 64])
        assert_same_bits(grouped_gemm(odd, w, engine="torch"), want)
        with pytest.raises(ValueError, match=rf"^a\.rows: expected rows on {boundary}-byte boundaries"):
            grouped_gemm(odd, w, engine="triton")


def test_bad_arguments_are_named(rng: torch.Generator) -> None:
    cpu = torch.device("cpu")
    w = random_weights("nvfp4", 2, 32, 64, rng, cpu, gate_up=True)
    a = make_rows("nvfp4", [3, 5], 64, rng, cpu, num_experts=2)
    with pytest.raises(ValueError, match=r"^out: expected \[at least 8, 32\], got \[7, 32\]"):
        grouped_gemm(a, w, out=torch.zeros(7, 32))
    with pytest.raises(ValueError, match=r"^out: expected rows that do not overlap, got strides \[0, 1\]"):
        grouped_gemm(a, w, out=torch.zeros(1, 32).expand(8, 32))
    fp8 = make_rows("fp8_block", [3, 5], 128, rng, cpu, num_experts=2)
    assert fp8.scales is not None
    with pytest.raises(ValueError, match=r"^a\.scales: expected \[at least 8, 1\], got \[7, 1\]"):
        grouped_gemm(replace(fp8, scales=fp8.scales[:7]), random_weights("fp8_block", 2, 32, 128, rng, cpu))
    bf16 = make_rows("bf16", [3], 64, rng, cpu, num_experts=1)
    with pytest.raises(ValueError, match=r"^a\.rows: requires grad"):
        grouped_gemm(replace(bf16, rows=bf16.rows.requires_grad_()), random_weights("bf16", 1, 32, 64, rng, cpu))
    with pytest.raises(ValueError, match=r"^out_dtype: expected"):
        grouped_gemm(a, w, out_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^engine: expected"):
        grouped_gemm(a, w, engine="nvcc")
    with pytest.raises(ValueError, match=r"^activation\.order: expected gate_up as in w, got interleaved"):
        grouped_gemm_swiglu(a, w, GPT_OSS, out_format="nvfp4")
    with pytest.raises(ValueError, match=r"^out_gsf: expected a positive finite number"):
        grouped_gemm_swiglu(a, w, SwiGLU(), out_format="nvfp4", out_gsf=0.0)
    with pytest.raises(ValueError, match=r"^out_gsf: expected a positive finite number .*got '16'"):
        grouped_gemm_swiglu(a, w, SwiGLU(), out_format="nvfp4", out_gsf="16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^out_gsf: expected None for bf16"):
        grouped_gemm_swiglu(a, w, SwiGLU(), out_format="bf16", out_gsf=1.0)
    with pytest.raises(ValueError, match=r"^I of w: format mxfp8 needs a positive multiple of 32, got 16"):
        grouped_gemm_swiglu(a, w, SwiGLU(), out_format="mxfp8")
    with pytest.raises(ValueError, match=r"^limit: expected a positive number"):
        SwiGLU(limit=0.0)
